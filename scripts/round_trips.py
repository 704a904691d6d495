#!/usr/bin/env python3
"""Measures one call over MCP: medians of runs that alternate, so that other load on the machine affects all servers alike.

    scripts/round_trips.py BINARY [--peer COMMAND] [--rounds N] [--calls N]

Compares `cat`, for the cost of the pipes alone; the supervised server; the plain process; and optionally another server,
COMMAND, which must have a tool `evaluate-lisp` with an argument `code`. With COMMAND, also prints the ratio of each time
to the time of that server, as the median over the rounds.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import tempfile
import time

FORMS = ("(+ 1 2)", "(let ((x 1)) (+ x 2))", "(/ 1 0)")


class Peer:
    """A process that answers each line with a line."""

    def __init__(self, command, directory):
        environment = {"HOME": directory, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        env=environment, bufsize=0)
        self.number = 0

    def request(self, method, parameters):
        """Sends a request and reads lines until its answer."""
        self.number += 1
        line = json.dumps({"jsonrpc": "2.0", "id": self.number, "method": method, "params": parameters}) + "\n"
        self.process.stdin.write(line.encode())
        while True:
            answer = json.loads(self.process.stdout.readline())
            if answer.get("id") == self.number:
                return answer

    def initialize(self):
        client = {"name": "round-trips", "version": "1"}
        self.request("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client})
        self.process.stdin.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')

    def times(self, form, calls):
        """Calls the tool `calls` times. Returns the time of each call in microseconds."""
        taken = []
        for _ in range(calls):
            begin = time.perf_counter()
            self.request("tools/call", {"name": "evaluate-lisp", "arguments": {"code": form}})
            taken.append((time.perf_counter() - begin) * 1e6)
        return taken

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=10)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--peer", help="another server's command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    commands = {"cat": ["cat"], "supervised": [arguments.binary, "serve"],
                "plain process": [arguments.binary, "serve", "--no-supervisor"]}
    if arguments.peer:
        commands["peer"] = shlex.split(arguments.peer)
    medians = {(name, form): [] for name in commands for form in FORMS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(arguments.rounds):
            for name, command in commands.items():
                peer = Peer(command, directory)
                if name != "cat":
                    peer.initialize()
                for form in FORMS:
                    peer.times(form, 50)
                    medians[name, form].append(statistics.median(peer.times(form, arguments.calls)))
                peer.end()
    table(f"µs, medians of {arguments.rounds} runs of {arguments.calls} calls", medians, commands, ".0f")
    if arguments.peer:
        ratios = {key: [of / peer for of, peer in zip(medians[key], medians["peer", key[1]])] for key in medians}
        table("ratio to the peer", ratios, [name for name in commands if name != "peer"], ".2f")


def table(title, figures, names, digits):
    """Prints the median and the range of the figures for each name and form."""
    print(f"\n| {title} | " + " | ".join(f"`{form}`" for form in FORMS) + " |")
    print("|---" * (len(FORMS) + 1) + "|")
    for name in names:
        row = (figures[name, form] for form in FORMS)
        print(f"| {name} | " + " | ".join(
            f"{statistics.median(of):{digits}} ({min(of):{digits}} to {max(of):{digits}})" for of in row) + " |")


if __name__ == "__main__":
    main()
