#!/usr/bin/env python3
"""The figures of the tools of a working day, as medians over MCP in one run, each with what it is to be at most. They count
on a quiet machine and with the release binary.

    scripts/figures.py BINARY

Exit status 1 when one is missed.
"""

import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from mutants import Server

INSTALLED = Path("/usr/share/common-lisp/source")
LIBRARIES = ("alexandria", "babel", "bordeaux-threads", "cl-ppcre", "closer-mop", "esrap", "fiveam", "flexi-streams",
             "iterate", "named-readtables", "split-sequence", "trivial-garbage")
# Calls that a median is of; those of what takes longer, and of one call's cost.
SHORT, LONG = 101, 7
TRACED = 5_000


class Figures:
    """A server, and what was measured with it."""

    def __init__(self, binary, directory):
        self.server = Server(binary, directory, structured=False)
        self.missed = 0

    def text(self, tool, **arguments):
        result = self.server.call(tool, **arguments)
        text = result["content"][0]["text"]
        if result.get("isError"):
            sys.exit(f"{tool} {arguments}: {text}")
        return text

    def milliseconds(self, tool, **arguments):
        begun = time.perf_counter()
        self.text(tool, **arguments)
        return (time.perf_counter() - begun) * 1000

    def median(self, count, tool, **arguments):
        self.text(tool, **arguments)
        return statistics.median(self.milliseconds(tool, **arguments) for _ in range(count))

    def inside(self, form, tool="evaluate-lisp", **arguments):
        """Milliseconds that a form takes in Lisp, evaluated by this tool; its internal real time is too coarse."""
        code = ("(flet ((now () (multiple-value-bind (s us) (sb-ext:get-time-of-day) (+ (* 1000000 s) us)))) "
                f"(let ((begun (now))) {form} (- (now) begun)))")
        return int(re.search(r"=> (\d+)\s*$", self.text(tool, code=code, **arguments)).group(1)) / 1000

    def say(self, what, value, most, unit="ms"):
        met = value <= most
        self.missed += not met
        print(f"{what}: {value:.3g} {unit} (at most {most:g}){'' if met else '  MISSED'}", flush=True)


def measure(figures):
    present = [name for name in LIBRARIES if "NIL" not in figures.text(
        "evaluate-lisp", code=f'(and (asdf:find-system "{name}" nil) t)')]
    for name in present:
        figures.text("load-system", system=name, timeout=600)
    symbols = figures.text("evaluate-lisp", code="(let ((n 0)) (do-all-symbols (s) (incf n)) n)").split()[-1]
    print(f"{len(present)} libraries are loaded: {', '.join(present)}; {symbols} symbols in all packages")

    figures.say("find-references, the first", figures.milliseconds("find-references", name="alexandria:ensure-list"), 300)
    names = ("alexandria:flatten", "alexandria:with-gensyms", "cl-ppcre:scan", "esrap:parse", "alexandria:once-only")
    each = [figures.median(LONG, "find-references", name=name) for name in names]
    figures.say("find-references", statistics.median(each), 30)
    figures.say("find-symbols", figures.median(SHORT, "find-symbols", query="hash"), 5)
    figures.say("describe-symbol", figures.median(SHORT, "describe-symbol", name="alexandria:flatten"), 1)
    figures.say("macroexpand", figures.median(SHORT, "macroexpand", form="(dolist (x '(1 2)) (print x))"), 1)

    # In turn, as a machine has its moods.
    loads, own = [], []
    for _ in range(4 * LONG):
        loads.append(figures.milliseconds("load-system", system="esrap"))
        own.append(figures.inside('(asdf:load-system "esrap")'))
    figures.say("load of an up-to-date system, to ASDF's own time", statistics.median(loads) / statistics.median(own),
                1.1, "times")

    figures.text("load-system", system="esrap/tests", timeout=600)
    runs, own = [], []
    by_framework = ("(let ((fiveam:*test-dribble* (make-broadcast-stream))) "
                    "(fiveam:run (intern \"ESRAP\" \"ESRAP-TESTS\")))")
    for _ in range(3 * LONG):
        begun = time.perf_counter()
        text = figures.text("run-tests", system="esrap")
        runs.append((time.perf_counter() - begun) * 1000)
        if not text.startswith("=> all pass"):
            sys.exit(text)
        own.append(figures.inside(by_framework))
    figures.say("run-tests, to the framework's own time", statistics.median(runs) / statistics.median(own), 1.05, "times")

    figures.text("evaluate-lisp", code="(progn (declaim (notinline traced never)) (defun traced (n) (1+ n)) "
                                       "(defun never (n) (1+ n)))")
    calls = f"(dotimes (i {TRACED}) (traced i))"
    traced, reported, before, never = [], [], [], []
    for _ in range(LONG):
        # What the traced code itself sees of it, and from the request to the answer.
        traced.append(figures.inside(calls, "trace-calls", functions=["traced"], limit=TRACED))
        reported.append(figures.milliseconds("trace-calls", code=calls, functions=["traced"], limit=TRACED))
    for _ in range(4 * LONG):
        for function, times in (("traced", before), ("never", never)):
            times.append(figures.inside(f"(dotimes (i {4000 * TRACED}) ({function} i))"))
    figures.say("trace-calls, a recorded call, as the code sees it", statistics.median(traced) * 1000 / TRACED, 3, "µs")
    figures.say("trace-calls, a recorded call, the whole to it", statistics.median(reported) * 1000 / TRACED, 3, "µs")
    figures.say("code that was traced before, to what never was", statistics.median(before) / statistics.median(never),
                1.01, "times")


def structured(binary, directory):
    """What trace-calls takes where structured content tells of every recorded call; there is no limit to that."""
    server = Server(binary, directory)
    server.call("evaluate-lisp", code="(progn (declaim (notinline traced)) (defun traced (n) (1+ n)))")
    times = []
    for _ in range(LONG):
        begun = time.perf_counter()
        server.call("trace-calls", code=f"(dotimes (i {TRACED}) (traced i))", functions=["traced"], limit=TRACED)
        times.append(time.perf_counter() - begun)
    server.end()
    print(f"trace-calls, the whole, with structured content of all calls: {statistics.median(times) * 1e6 / TRACED:.3g} µs")


def main():
    if not all((INSTALLED / library).exists() for library in ("esrap", "alexandria", "fiveam")):
        sys.exit("esrap, alexandria and fiveam are not installed (scripts/setup.sh test)")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        figures = Figures(os.path.abspath(sys.argv[1]), scratch)
        try:
            measure(figures)
        finally:
            figures.server.end()
        structured(os.path.abspath(sys.argv[1]), scratch)
    sys.exit(1 if figures.missed else 0)


if __name__ == "__main__":
    main()
