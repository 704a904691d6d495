#!/usr/bin/env python3
"""Measures how well run-tests' suspects locate faults: seeds single-operator mutants into libraries with tests, one at a
time, and reports how often a failing test's suspects include the mutated function and line.

    scripts/mutants.py BINARY COUNT LIBRARY...

LIBRARY is DIRECTORY:SYSTEM, such as /usr/share/common-lisp/source/esrap:esrap. For each library, COUNT mutants that make
tests fail are tried. A mutant's rank is the position of its function among the suspects. The script works on a copy, and
the same seed gives the same mutants.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SUSPECTS = 5
SEED = 12
# The time limit for a mutant, in seconds.
LIMIT = 240
# Operators and their replacements.
OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "=": "/=", "+": "-", "-": "+", "1+": "1-", "1-": "1+", "and": "or",
    "or": "and", "when": "unless", "unless": "when", "not": "identity", "null": "identity", "car": "cdr", "cdr": "car",
    "first": "second", "second": "first", "rest": "first", "min": "max", "max": "min", "incf": "decf", "every": "some",
    "some": "every", "eq": "equal", "zerop": "plusp", "plusp": "zerop", "push": "pushnew", "floor": "ceiling",
}
SITE = re.compile(r"(?<!['`#])\((" + "|".join(re.escape(name) for name in OPERATORS) + r")(?=[ \n])")


class Server:
    """A server, with its client on pipes."""

    def __init__(self, binary, directory, structured=True):
        arguments = [binary] + ["--structured-content"] * structured
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=directory)
        self.number = 0
        client = {"name": "mutants", "version": "1"}
        self.request("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client})
        self.send({"method": "notifications/initialized"})

    def send(self, message):
        self.process.stdin.write((json.dumps({"jsonrpc": "2.0", **message}) + "\n").encode())
        self.process.stdin.flush()

    def request(self, method, params):
        self.number += 1
        self.send({"id": self.number, "method": method, "params": params})
        for line in self.process.stdout:
            answer = json.loads(line)
            if answer.get("id") == self.number:
                return answer["result"]
        raise RuntimeError("the server ended")

    def call(self, tool, **arguments):
        return self.request("tools/call", {"name": tool, "arguments": arguments})

    def end(self):
        try:
            self.process.stdin.close()
        except OSError:
            pass
        self.process.wait(timeout=60)


def sites(directory):
    """Finds the operators to replace: in definitions of the library, not of its tests."""
    found = []
    for path in sorted(directory.rglob("*.lisp")):
        if re.search(r"test|example|doc|package", str(path.relative_to(directory))):
            continue
        text = path.read_text(errors="replace")
        for form in re.finditer(r"(?ms)^\((?:defun|defmethod|defmacro) .*?(?=^\(|\Z)", text):
            found += [(path, form.start(), form.start() + site.start(1), site.group(1))
                      for site in SITE.finditer(form.group())]
    return found


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def rewrite(path, text):
    """Writes `text` to the file and deletes the file's fasl, so that the file is compiled again, however little time
    has passed since the last mutant."""
    path.write_text(text)
    for compiled in Path(os.environ["XDG_CACHE_HOME"]).rglob(f"{path.stem}.fasl"):
        compiled.unlink()


def try_mutant(binary, directory, system, site):
    """Tests one mutant. Returns None when no test fails. Otherwise returns the ranks of the mutated function and line (None
    when not shown) for the first failing test, the best ranks over all failing tests, the number of failing tests, and the
    mean number of lines shown for a test."""
    path, start, position, operator = site
    original = path.read_text(errors="replace")
    mutated = original[:position] + OPERATORS[operator] + original[position + len(operator):]
    rewrite(path, mutated)
    try:
        failed = [test for test in run_tests(binary, directory, system) if test.get("suspects")]
    finally:
        rewrite(path, original)
    if not failed:
        return None
    definition, line = line_of(original, start), line_of(original, position)
    file = str(path.relative_to(directory))
    functions, lines = [], []
    for test in failed:
        found = next(((rank, suspect) for rank, suspect in enumerate(test["suspects"], 1)
                      if suspect.get("file") == file and suspect["line"] == definition), (None, None))
        functions.append(found[0])
        lines.append(found[0] if found[0] and any(shown["line"] == line for shown in found[1]["lines"]) else None)
    shown = sum(len(suspect["lines"]) for test in failed for suspect in test["suspects"])
    return (functions[0], lines[0], min(filter(None, functions), default=None),
            min(filter(None, lines), default=None), len(failed), shown / len(failed))


def run_tests(binary, directory, system):
    """Runs the tests of a system in a new server. Returns their results, or none when the server ends or hangs."""
    server = Server(binary, directory)
    # With a mutant, loading the system may never end.
    late = threading.Timer(LIMIT, server.process.kill)
    late.start()
    try:
        root = json.dumps(str(directory) + "/")
        server.call("evaluate-lisp", code=f"(progn (push {root} asdf:*central-registry*) t)")
        result = server.call("run-tests", system=system, suspects=SUSPECTS, timeout=20)
        return result.get("structuredContent", {}).get("tests", [])
    except (OSError, RuntimeError):
        return []
    finally:
        late.cancel()
        server.end()


def main():
    binary, count = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    noticed = []
    for library in sys.argv[3:]:
        source, system = library.rsplit(":", 1)
        chosen = random.Random(SEED)
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch).resolve() / system
            shutil.copytree(source, directory)
            os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
            candidates = sites(directory)
            chosen.shuffle(candidates)
            tests = run_tests(binary, directory, system)
            if not tests or any(test["status"] in ("failed", "error") for test in tests):
                print(f"{system}: left out, since no test ran, or some fail without a mutant", flush=True)
                continue
            of_library = 0
            for site in candidates:
                if of_library == count:
                    break
                shown = try_mutant(binary, directory, system, site)
                if shown is None:
                    continue
                of_library += 1
                noticed.append(shown)
                place = f"{site[0].relative_to(directory)}:{line_of(site[0].read_text(errors='replace'), site[2])}"
                print(f"{system} {place} {site[3]} -> {OPERATORS[site[3]]}: {shown[4]} failing tests; first test: "
                      f"function {shown[0]}, line {shown[1]}; best: function {shown[2]}, line {shown[3]}", flush=True)
    total = len(noticed)
    if not total:
        sys.exit("no test noticed a mutant")
    print(f"{total} mutants that tests notice; lines shown for a test, mean: {sum(e[5] for e in noticed) / total:.1f}")
    for what, index in (("function, for the first failing test", 0), ("its line, for the first failing test", 1),
                        ("function, for some failing test", 2), ("its line, for some failing test", 3)):
        counts = [sum(1 for entry in noticed if entry[index] and entry[index] <= most) for most in (1, 3, SUSPECTS)]
        print(f"{what}, among the first 1, 3, {SUSPECTS}: {', '.join(map(str, counts))} of {total}")


if __name__ == "__main__":
    main()
