#!/usr/bin/env python3
"""Measures the tools of a working day over MCP, as medians, and compares each median with its limit. The limits apply
to a quiet machine and the release binary.

    scripts/figures.py BINARY

Exits with status 1 when a limit is exceeded.
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
# The number of calls for a median, the number of longer calls for a median, and the number of calls to trace.
SHORT, LONG = 101, 7
TRACED = 5_000


class Figures:
    """A server, and the number of limits that it has exceeded."""

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
        """Returns the milliseconds that a form takes inside Lisp. Reads the time of day, because Lisp's internal real time is
        too coarse."""
        code = ("(flet ((now () (multiple-value-bind (s us) (sb-ext:get-time-of-day) (+ (* 1000000 s) us)))) "
                f"(let ((begun (now))) {form} (- (now) begun)))")
        return int(re.search(r"=> (\d+)\s*$", self.text(tool, code=code, **arguments)).group(1)) / 1000

    def report(self, what, value, most, unit="ms"):
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

    figures.report("find-references, the first", figures.milliseconds("find-references", name="alexandria:ensure-list"), 300)
    names = ("alexandria:flatten", "alexandria:with-gensyms", "cl-ppcre:scan", "esrap:parse", "alexandria:once-only")
    each = [figures.median(LONG, "find-references", name=name) for name in names]
    figures.report("find-references", statistics.median(each), 30)
    figures.report("find-symbols", figures.median(SHORT, "find-symbols", query="hash"), 5)
    figures.report("describe-symbol", figures.median(SHORT, "describe-symbol", name="alexandria:flatten"), 1)
    figures.report("macroexpand", figures.median(SHORT, "macroexpand", form="(dolist (x '(1 2)) (print x))"), 1)

    # The two measurements alternate, because the speed of a machine varies.
    loads, own = [], []
    for _ in range(4 * LONG):
        loads.append(figures.milliseconds("load-system", system="esrap"))
        own.append(figures.inside('(asdf:load-system "esrap")'))
    figures.report("load of an up-to-date system, relative to ASDF's own time", statistics.median(loads) / statistics.median(own),
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
    figures.report("run-tests, relative to the framework's own time", statistics.median(runs) / statistics.median(own), 1.05, "times")

    figures.text("evaluate-lisp", code="(progn (declaim (notinline traced never)) (defun traced (n) (1+ n)) "
                                       "(defun never (n) (1+ n)))")
    calls = f"(dotimes (i {TRACED}) (traced i))"
    traced, reported, before, never = [], [], [], []
    for _ in range(LONG):
        # The cost inside the traced code, and the cost from the request to the answer.
        traced.append(figures.inside(calls, "trace-calls", functions=["traced"], limit=TRACED))
        reported.append(figures.milliseconds("trace-calls", code=calls, functions=["traced"], limit=TRACED))
    for _ in range(4 * LONG):
        for function, times in (("traced", before), ("never", never)):
            times.append(figures.inside(f"(dotimes (i {4000 * TRACED}) ({function} i))"))
    figures.report("trace-calls, per recorded call, inside the traced code", statistics.median(traced) * 1000 / TRACED, 3, "µs")
    figures.report("trace-calls, per recorded call, from request to answer", statistics.median(reported) * 1000 / TRACED, 3, "µs")
    figures.report("code that was traced before, to code that never was", statistics.median(before) / statistics.median(never),
                1.01, "times")


def structured(binary, directory):
    """Measures trace-calls with every recorded call in the structured content. This figure has no limit."""
    server = Server(binary, directory)
    server.call("evaluate-lisp", code="(progn (declaim (notinline traced)) (defun traced (n) (1+ n)))")
    times = []
    for _ in range(LONG):
        begun = time.perf_counter()
        server.call("trace-calls", code=f"(dotimes (i {TRACED}) (traced i))", functions=["traced"], limit=TRACED)
        times.append(time.perf_counter() - begun)
    server.end()
    print(f"trace-calls, from request to answer, with structured content of all calls: {statistics.median(times) * 1e6 / TRACED:.3g} µs")


def main():
    if not all((INSTALLED / library).exists() for library in ("esrap", "alexandria", "fiveam")):
        sys.exit(f"esrap, alexandria or fiveam is missing in {INSTALLED}: on Debian or Ubuntu, run scripts/setup.sh test")
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
