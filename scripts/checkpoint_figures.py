#!/usr/bin/env python3
"""Measures the cost of checkpoints with the release binary, with ratios to a plain start in the same run.

Usage: scripts/checkpoint_figures.py [BINARY] [SYSTEM...]

The SYSTEMs are loaded for the figures of a lost image; those that ASDF does not find are left out. Needs a quiet machine.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

SYSTEMS = ["alexandria", "babel", "bordeaux-threads", "cl-ppcre", "flexi-streams", "split-sequence",
           "trivial-features", "usocket", "ironclad", "hunchentoot"]
TIMES = 7


class Server:
    """A server and its client."""

    def __init__(self, binary, state, *arguments):
        self.begin = time.perf_counter()
        environment = dict(os.environ, XDG_STATE_HOME=state)
        self.process = subprocess.Popen([binary, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env=environment, text=True)
        self.last = 0
        self.request("initialize", {"protocolVersion": "2025-06-18", "capabilities": {},
                                    "clientInfo": {"name": "figures", "version": "1"}})

    def request(self, method, params):
        self.last += 1
        message = {"jsonrpc": "2.0", "id": self.last, "method": method, "params": params}
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        while True:
            answer = json.loads(self.process.stdout.readline())
            if answer.get("id") == self.last:
                return answer["result"]

    def call(self, tool, **arguments):
        """Calls a tool. Returns the text of the answer, and its time in milliseconds."""
        begin = time.perf_counter()
        result = self.request("tools/call", {"name": tool, "arguments": arguments})
        return result["content"][0]["text"], (time.perf_counter() - begin) * 1000

    def evaluate(self, code, **arguments):
        return self.call("evaluate-lisp", code=code, **arguments)

    def kill_worker(self):
        pid = self.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            os.kill(int(children.read().split()[0]), signal.SIGKILL)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def median(function, times=TIMES):
    return statistics.median(function() for _ in range(times))


def figure(what, milliseconds, plain=None):
    ratio = f"  {milliseconds / plain:5.2f} plain starts" if plain else ""
    print(f"{what:58} {milliseconds:9.1f} ms{ratio}", flush=True)


def median_plain_start(binary, state):
    def start():
        server = Server(binary, state)
        server.evaluate("(+ 1 2)")
        taken = (time.perf_counter() - server.begin) * 1000
        server.end()
        return taken
    return median(start)


def measure_by_heap_size(binary, state, plain):
    for name, megabytes in (("40 MB", 0), ("200 MB", 160), ("1 GB", 960)):
        server = Server(binary, state)
        server.evaluate(f"(defvar *live* (loop repeat {megabytes} collect (make-array 131072 :initial-element 1)))"
                        " (sb-ext:gc :full t)", timeout=600)
        stopped, complete = [], []
        for _ in range(3):
            text, taken = server.call("checkpoint", action="save", name="x")
            if "paused for " not in text:
                sys.exit(text)
            stopped.append(float(text.split("paused for ")[1].split()[0]))
            complete.append(taken)
        figure(f"{name} live: pause of save", statistics.median(stopped))
        figure(f"{name} live: until the core is complete and verified", statistics.median(complete))

        def restore():
            begin = time.perf_counter()
            server.call("checkpoint", action="restore", name="x")
            server.evaluate("(+ 1 2)")
            return (time.perf_counter() - begin) * 1000
        figure(f"{name} live: restore to the next answer", median(restore), plain)
        server.end()


def measure_with_libraries(binary, state, plain, systems):
    server = Server(binary, state)
    loaded = []
    for system in systems:
        if server.call("load-system", system=system, timeout=600)[0].startswith(("Loaded", system)):
            loaded.append(system)

    def answer_after_kill():
        server.kill_worker()
        return server.evaluate("(+ 1 2)")[1]
    figure(f"IMAGE-LOST to the next answer, {len(loaded)} libraries, no checkpoint", median(answer_after_kill, 3), plain)
    server.call("checkpoint", action="save", name="x")
    figure(f"IMAGE-LOST to the next answer, {len(loaded)} libraries, a checkpoint", median(answer_after_kill), plain)
    server.end()


def measure_busy_session(binary, state):
    """Measures an evaluation in a busy session, without and with automatic checkpoints."""
    taken = []
    for arguments in ((), ("--checkpoints", "auto")):
        server = Server(binary, state, *arguments)
        server.evaluate("(defun work () (loop for i below 200000 sum (sqrt i)))")
        begin = time.perf_counter()
        count = 0
        while time.perf_counter() - begin < 10:
            server.evaluate("(work)")
            count += 1
        taken.append((time.perf_counter() - begin) / count * 1000)
        server.end()
    figure("a busy session, per evaluation", taken[0])
    figure("a busy session with automatic checkpoints, per evaluation", taken[1])


def main():
    binary = sys.argv[1] if len(sys.argv) > 1 else "target/release/sbcl-mcp"
    state = tempfile.mkdtemp()
    try:
        plain = median_plain_start(binary, state)
        figure("a plain start, to the first answer", plain)
        measure_by_heap_size(binary, state, plain)
        measure_with_libraries(binary, state, plain, sys.argv[2:] or SYSTEMS)
        measure_busy_session(binary, state)
    finally:
        shutil.rmtree(state, ignore_errors=True)


main()
