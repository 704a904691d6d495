#!/usr/bin/env python3
"""Simulates a working day: seeds faults, one at a time, into two libraries with 11,000 lines in all, esrap and alexandria.
A failing test detects each fault, the answers of the tools locate it, and it is repaired, all in one image and without a
reset. At the end all tests must pass.

    scripts/working_day.py BINARY

The script knows each fault, but counts it as located only when an answer names the function and one of its lines, as
FILE:LINE. It fails when a fault is not located. It prints the number of calls and of characters in answers.
"""

import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mutants import Server

INSTALLED = Path("/usr/share/common-lisp/source")
# Faults: the file, the start of the definition, the original text, its replacement, and the kind of fault.
ESRAP = [
    ("src/macros.lisp", "(defun text ", "(&rest arguments)", "(&optional arguments)", "wrong lambda list"),
    ("src/macros.lisp", "(defun singleton-option ", "(setf value-seen t", "(setf value-seen nil", "wrong value"),
    ("src/interface.lisp", "(defun find-rule ", "(check-type symbol nonterminal)", "(check-type symbol keyword)", "wrong type"),
    ("src/interface.lisp", "(defun process-parse-result ", "(esrap-parse-error text result)", "(esrap-parse-errors text result)", "undefined function"),
    ("src/conditions.lisp", "(defun left-recursion ", ":position position", ":position text", "wrong argument"),
]
ALEXANDRIA = [
    ("alexandria-1/sequences.lisp", "(defun rotate-tail-to-head ", "(+ m 1)", "(+ m 2)", "off by one"),
    ("alexandria-1/sequences.lisp", "(defun last-elt ", "(elt sequence (1- len))", "(elt sequence len)", "off by one"),
    ("alexandria-1/sequences.lisp", "(defun ends-with ", "(lastcar sequence)", "(car sequence)", "wrong function"),
    ("alexandria-1/sequences.lisp", "(defun extremum ", "(> real-end start)", "(< real-end start)", "wrong operator"),
    ("alexandria-1/sequences.lisp", "(defun length= ", "(unless (= el current)", "(when (= el current)", "wrong branch"),
    ("alexandria-1/hash-tables.lisp", "(defmacro ensure-gethash ", "(if ,presentp", "(if (not ,presentp)", "broken macro"),
    ("alexandria-1/hash-tables.lisp", "(defun plist-hash-table ", "(tail plist (cddr tail))", "(tail plist (cdr tail))", "wrong step"),
    ("alexandria-1/numbers.lisp", "(defun iota ", "then (+ i step)", "then (- i step)", "wrong operator"),
    ("alexandria-1/numbers.lisp", "(defun binomial-coefficient ", "(%multiply-range (+ k 1) n)", "(%multiply-range k n)", "off by one"),
    ("alexandria-1/numbers.lisp", "(defun subfactorial ", "(x 1 (1+ x))", "(x 1 (1- x))", "infinite loop"),
    ("alexandria-1/control-flow.lisp", "(defun generate-switch-body ", "'(t otherwise)", "'(otherwise)", "broken macro"),
    ("alexandria-1/control-flow.lisp", "(defmacro xor ", "(values ,true t)", "(values ,true nil)", "broken macro"),
    ("alexandria-1/functions.lisp", "(defun conjoin ", "(apply head arguments))", "(apply head (rest arguments)))", "wrong argument"),
    ("alexandria-1/lists.lisp", "(defun proper-list-p ", "(when (eq fast slow)", "(unless (eq fast slow)", "wrong branch"),
    ("alexandria-1/lists.lisp", "(defun setp ", "(push key seen)", "(pop seen)", "wrong macro"),
    ("alexandria-1/symbols.lisp", "(defun make-keyword ", ":keyword)", ":alexandria)", "wrong package"),
    ("alexandria-1/binding.lisp", "(defmacro if-let ", "(if (and ,@variables)", "(if (or ,@variables)", "broken macro"),
    ("alexandria-1/sequences.lisp", "(defun starts-with ", "(elt sequence 0)", "(elt sequence 1)", "off by one"),
    ("alexandria-1/hash-tables.lisp", "(defun copy-hash-table ", "(funcall key v)", "v", "missing step"),
    ("alexandria-1/numbers.lisp", "(defun median ", "(oddp len)", "(evenp len)", "wrong branch"),
    ("alexandria-1/numbers.lisp", "(defun mean ", "(length sample)", "(alexandria-tests::length-of sample)", "wrong package"),
    ("alexandria-1/control-flow.lisp", "(defmacro nth-value-or ", "(nth ,nth-value ,values)", "(nth 0 ,values)", "broken macro"),
    ("alexandria-1/lists.lisp", "(defun circular-list-p ", "(return t)", "(return nil)", "wrong value"),
    ("alexandria-1/lists.lisp", "(defun delete-from-plist ", "(setf head next)", "(setf head rest)", "wrong variable"),
    ("alexandria-1/conditions.lisp", "(defun required-argument ", "(error", "(warn", "missing restart"),
]


class Day:
    """A session, with the number of calls of each tool and the lengths of the answers."""

    def __init__(self, binary, root):
        self.server = Server(binary, root)
        self.lengths = []
        self.tools = Counter()

    def call(self, tool, **arguments):
        answer = self.server.call(tool, **arguments)["content"][0]["text"]
        self.lengths.append(len(answer))
        self.tools[tool] += 1
        return answer


def names_place(answer, name, file, first, last):
    """Returns true when an answer has the name of a function and one of its lines."""
    places = re.findall(re.escape(Path(file).name) + r":(\d+)", answer)
    return name.upper() in answer.upper() and any(first <= int(line) <= last for line in places)


def failing_test(answer):
    """Returns the name of the first failed test in an answer."""
    found = re.search(r"^1\. (\S+)", answer, re.M)
    return found and found.group(1)


def play(day, system, directory, fault):
    """Seeds a fault, locates it and repairs it. Returns a problem or None, and the number of the call that located it."""
    file, definition, old, new, _ = fault
    path = directory / file
    original = path.read_text()
    start = original.index(definition)
    position = original.find(old, start)
    end = original.find("\n(", start) + 1 or len(original)
    if not start <= position < end:
        return f"{definition} has no {old}", None
    first, last = (original.count("\n", 0, at) + 1 for at in (start, end))
    name = definition.split()[1]

    path.write_text(original[:position] + new + original[position + len(old):])
    answer = day.call("run-tests", system=system, reload=True, timeout=10)
    test = failing_test(answer)
    located = 1 if names_place(answer, name, file, first, last) else None
    if answer.startswith("=> all pass"):
        path.write_text(original)
        day.call("run-tests", system=system, reload=True, timeout=10)
        return "no test fails", None
    asked = [{"suspects": 5}, {"suspects": 10}]
    while located is None and test and asked:
        answer = day.call("run-tests", name=test, timeout=10, **asked.pop(0))
        if names_place(answer, name, file, first, last):
            located = 3 - len(asked)
    if located:
        day.call("describe-symbol", name=name, package=system, source=True)
    path.write_text(original)
    if not located:
        day.call("run-tests", system=system, reload=True, timeout=10)
        return "not located", None
    again = {"name": test} if test else {"system": system}
    answer = day.call("run-tests", reload=True, timeout=10, **again)
    return (None if answer.startswith("=> all pass") or "\n=> all pass" in answer else f"not repaired:\n{answer}"), located


def main():
    if not all((INSTALLED / library).exists() for library in ("esrap", "alexandria")):
        print(f"esrap or alexandria is missing in {INSTALLED}, so nothing was measured: on Debian or Ubuntu, run "
              "scripts/setup.sh test")
        sys.exit(1 if os.environ.get("CI") else 0)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch).resolve()
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        for library in ("esrap", "alexandria"):
            shutil.copytree(INSTALLED / library, root / library)
        lines = sum(len(path.read_text(errors="replace").splitlines()) for path in root.rglob("*.lisp"))
        begun = time.time()
        day = Day(os.path.abspath(sys.argv[1]), root)
        registry = " ".join(f'#p"{root / library}/"' for library in ("esrap", "alexandria"))
        day.call("evaluate-lisp", code=f"(setf asdf:*central-registry* (list {registry}))")
        day.call("load-system", system="esrap/tests")
        wrong, located, kinds = [], Counter(), Counter()
        for system, faults in (("esrap", ESRAP), ("alexandria", ALEXANDRIA)):
            answer = day.call("run-tests", system=system)
            if not answer.startswith("=> all pass"):
                wrong.append(f"{system} before: {answer}")
            for fault in faults:
                problem, by = play(day, system, root / system, fault)
                if problem:
                    wrong.append(f"{fault[0]} {fault[1]}({fault[4]}): {problem}")
                else:
                    located[by] += 1
                    kinds[fault[4]] += 1
                print(f"{fault[1].split()[1]} ({fault[4]}): {problem or f'located by call {by}'}", flush=True)
        for system in ("alexandria", "esrap"):
            answer = day.call("run-tests", system=system, reload=True)
            if not answer.startswith("=> all pass"):
                wrong.append(f"{system} after: {answer}")
        seconds = time.time() - begun
        day.server.end()
    found = sum(located.values())
    print(f"{lines} lines; {found} faults of {len(kinds)} kinds located and repaired in {seconds:.0f} s; by the first "
          f"answer {located[1]}, by the second {located[2]}, by the third {located[3]}")
    print(f"{len(day.lengths)} calls ({', '.join(f'{tool} {count}' for tool, count in day.tools.most_common())})")
    print(f"Characters of answers: {sum(day.lengths)} in all, mean {statistics.mean(day.lengths):.0f}, maximum "
          f"{max(day.lengths)}")
    for problem in wrong:
        print(f"WRONG: {problem}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
