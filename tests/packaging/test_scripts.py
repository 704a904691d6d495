"""Tests of the shell scripts, with programs that only pretend to build and to test."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def write_programs(tree, programs):
    """Writes shell scripts, given by name, to the directory `tree`. Returns an environment with `tree`/bin on the PATH."""
    for name, text in programs.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(f"#!/bin/sh\n{text}\n")
        (tree / name).chmod(0o755)
    return {"PATH": f"{tree}/bin:{os.environ['PATH']}", "HOME": str(tree)}


class AllSuites(unittest.TestCase):
    def run_suites(self, clients):
        """Runs scripts/test.sh, in which all suites pass except those for which the shell code `clients` fails. Its parameter
        is the name of a client. Returns the exit status and the output."""
        with tempfile.TemporaryDirectory() as directory:
            tree = Path(directory)
            cargo = """[ "$1" != metadata ] || echo '{"packages": []}'"""
            programs = {"bin/cargo": cargo, "scripts/clients.sh": clients, "scripts/recording.py": ""}
            environment = write_programs(tree, programs)
            shutil.copy(ROOT / "scripts/test.sh", tree / "scripts")
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


class Packages(unittest.TestCase):
    def test_the_program_just_built_is_packaged_even_if_cargo_has_another_target_directory(self):
        with tempfile.TemporaryDirectory() as directory:
            tree = Path(directory)
            cargo = """directory=$CARGO_TARGET_DIR
            while [ $# != 0 ]; do [ "$1" != --target-dir ] || directory=$2; shift; done
            mkdir -p "$directory/lto" && echo new >"$directory/lto/sbcl-mcp\""""
            programs = {"bin/cargo": cargo, "bin/id": "echo 1000", "packaging/build.py": 'cat "$1"'}
            environment = write_programs(tree, {**programs, "scripts/packagers.sh": "", "scripts/reproducible.sh": ""})
            shutil.copy(ROOT / "scripts/dist.sh", tree / "scripts")
            (tree / "target/lto").mkdir(parents=True)
            (tree / "target/lto/sbcl-mcp").write_text("old\n")
            environment["CARGO_TARGET_DIR"] = f"{tree}/elsewhere"
            command = [tree / "scripts/dist.sh", "--build"]
            output = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=60).stdout
            self.assertEqual(output.splitlines()[-1], "new")


if __name__ == "__main__":
    unittest.main()
