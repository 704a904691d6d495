#!/usr/bin/env python3
"""How well run-tests' suspects find a fault: seeds single-operator mutants into libraries with tests, one at a time, and
reports how often the mutated function, and its line, are shown for a test that fails for it.

    scripts/mutants.py BINARY COUNT LIBRARY...

LIBRARY is DIRECTORY:SYSTEM, such as /usr/share/common-lisp/source/esrap:esrap. COUNT mutants that tests notice are tried of
each. Works on a copy; the same seed gives the same mutants.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUSPECTS = 5
SEED = 12
# What is put in the place of what.
OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "=": "/=", "+": "-", "-": "+", "1+": "1-", "1-": "1+", "and": "or",
    "or": "and", "when": "unless", "unless": "when", "not": "identity", "null": "identity", "car": "cdr", "cdr": "car",
    "first": "second", "second": "first", "rest": "first", "min": "max", "max": "min", "incf": "decf", "every": "some",
    "some": "every", "eq": "equal", "zerop": "plusp", "plusp": "zerop", "push": "pushnew", "floor": "ceiling",
}
SITE = re.compile(r"(?<!['`#])\((" + "|".join(re.escape(name) for name in OPERATORS) + r")(?=[ \n])")


class Server:
    """A server on pipes."""

    def __init__(self, binary, directory):
        arguments = [binary, "--structured-content"]
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
        self.process.stdin.close()
        self.process.wait(timeout=60)


def sites(directory):
    """Where an operator can be put in another's place: in definitions of the code, not of its tests."""
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


def try_mutant(binary, directory, system, site, later):
    """What is shown of one mutant: None when no test notices it, else rank of its function (or None) and of its line."""
    path, start, position, operator = site
    original = path.read_text(errors="replace")
    mutated = original[:position] + OPERATORS[operator] + original[position + len(operator):]
    path.write_text(mutated)
    os.utime(path, (later, later))
    server = Server(binary, directory)
    try:
        root = json.dumps(str(directory) + "/")
        server.call("evaluate-lisp", code=f"(progn (push {root} asdf:*central-registry*) t)")
        result = server.call("run-tests", system=system, suspects=SUSPECTS, timeout=10)
        content = result["structuredContent"]
        failed = [test for test in content.get("tests", []) if test.get("suspects")]
        if not failed:
            return None
        definition, line = line_of(original, start), line_of(original, position)
        file = str(path.relative_to(directory))
        function_ranks, line_ranks = [], []
        for test in failed:
            for rank, suspect in enumerate(test["suspects"], 1):
                if suspect.get("file") == file and suspect["line"] == definition:
                    function_ranks.append(rank)
                    if any(shown["line"] == line for shown in suspect["lines"]):
                        line_ranks.append(rank)
        first = failed[0]["suspects"]
        at_first = next((rank for rank, suspect in enumerate(first, 1)
                         if suspect.get("file") == file and suspect["line"] == definition), None)
        return at_first, min(function_ranks, default=None), min(line_ranks, default=None), len(failed)
    finally:
        server.end()
        path.write_text(original)
        os.utime(path, (later + 1, later + 1))


def main():
    binary, count = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    noticed = []
    for library in sys.argv[3:]:
        source, system = library.rsplit(":", 1)
        chosen = random.Random(SEED)
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch).resolve() / system
            shutil.copytree(source, directory)
            candidates = sites(directory)
            chosen.shuffle(candidates)
            later, of_library = time.time() + 10, 0
            for site in candidates:
                if of_library == count:
                    break
                later += 10
                shown = try_mutant(binary, directory, system, site, later)
                if shown is None:
                    continue
                of_library += 1
                noticed.append(shown)
                place = f"{site[0].relative_to(directory)}:{line_of(site[0].read_text(errors='replace'), site[2])}"
                print(f"{system} {place} {site[3]} -> {OPERATORS[site[3]]}: {shown[3]} failing tests; function: first "
                      f"test {shown[0]}, best {shown[1]}; line {shown[2]}", flush=True)
    total = len(noticed)
    print(f"{total} mutants that tests notice")
    for what, index in (("function, for the first failing test", 0), ("function, for some failing test", 1),
                        ("its line, for some failing test", 2)):
        for most in (1, 3, SUSPECTS):
            shown = sum(1 for entry in noticed if entry[index] and entry[index] <= most)
            print(f"{what}, among the first {most}: {shown} of {total}")


if __name__ == "__main__":
    main()
