"""Tests of the shell scripts, with programs that only pretend to build and to test."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CARGO = """#!/bin/sh
[ "$1" != metadata ] || echo '{"packages": []}'
"""


class AllSuites(unittest.TestCase):
    def run_suites(self, clients):
        """Runs scripts/test.sh, in which all suites pass except those for which the shell code `clients` fails. Its parameter
        is the name of a client. Returns the exit status and the output."""
        with tempfile.TemporaryDirectory() as directory:
            tree = Path(directory)
            for name, text in {"bin/cargo": CARGO, "scripts/clients.sh": f"#!/bin/sh\n{clients}\n"}.items():
                (tree / name).parent.mkdir(exist_ok=True)
                (tree / name).write_text(text)
                (tree / name).chmod(0o755)
            shutil.copy(tree / "bin/cargo", tree / "scripts/recording.py")
            shutil.copy(ROOT / "scripts/test.sh", tree / "scripts")
            environment = {"PATH": f"{tree}/bin:{os.environ['PATH']}", "HOME": directory}
            done = subprocess.run([tree / "scripts/test.sh"], env=environment, text=True, capture_output=True, timeout=60)
            return done.returncode, done.stdout

    def test_the_status_is_zero_if_all_suites_pass(self):
        status, output = self.run_suites("exit 0")
        self.assertEqual((status, "FAILED" in output), (0, False), output)

    def test_a_failed_suite_is_named(self):
        status, output = self.run_suites('[ "$1" != adapters ]')
        self.assertEqual((status, "FAILED: Agent frameworks" in output), (1, True), output)

    def test_suites_that_cannot_run_because_their_shell_was_killed_are_a_failure(self):
        status, output = self.run_suites('[ "$1" != adapters ] || kill -9 $PPID')
        self.assertEqual((status, "FAILED: a group of suites" in output), (1, True), output)


if __name__ == "__main__":
    unittest.main()
