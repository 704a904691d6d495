"""Tests of scripts/run_workflows.py."""

import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import run_workflows

LINUX = ("Linux", "x86_64")


class Workflows(unittest.TestCase):
    def test_a_job_runs_once_for_each_combination_of_its_matrix(self):
        job = {"strategy": {"matrix": {"runner": ["a", "b"], "kind": ["x", "y"]}}}
        expected = [{"runner": runner, "kind": kind} for runner in "ab" for kind in "xy"]
        self.assertEqual(run_workflows.combinations(job), expected)
        self.assertEqual(run_workflows.combinations({}), [{}])

    def test_commands_get_the_values_of_the_matrix(self):
        job = {"runs-on": "ubuntu-24.04", "steps": [{"run": "make sanitize SANITIZER=${{ matrix.sanitizer }}"}]}
        steps = run_workflows.plan(job, {"sanitizer": "thread"}, LINUX)
        self.assertEqual(steps, [(None, "make sanitize SANITIZER=thread")])
        with self.assertRaisesRegex(SystemExit, "matrix.sanitizer"):
            run_workflows.plan(job, {}, LINUX)

    def test_jobs_of_other_machines_and_steps_of_github_are_left_out(self):
        for runner in ["ubuntu-24.04-arm", "macos-15"]:
            steps = run_workflows.plan({"runs-on": runner, "steps": [{"run": "make"}]}, {}, LINUX)
            self.assertEqual([command for _, command in steps], [None])
        steps = [
            {"uses": "actions/checkout@0"},
            {"name": "Install tools", "run": "apt-get install"},
            {"if": "github.ref_type == 'tag'", "run": "publish"},
            {"name": "Build", "run": "make build"},
        ]
        planned = run_workflows.plan({"runs-on": "ubuntu-24.04", "steps": steps}, {}, LINUX)
        self.assertEqual([command for _, command in planned], [None, None, None, "make build"])

    def test_steps_with_settings_that_would_be_ignored_are_refused(self):
        step = {"run": "make", "working-directory": "docs"}
        with self.assertRaisesRegex(SystemExit, "working-directory"):
            run_workflows.plan({"runs-on": "ubuntu-24.04", "steps": [step]}, {}, LINUX)

    def test_unknown_conditions_are_refused(self):
        with self.assertRaisesRegex(SystemExit, "always"):
            run_workflows.plan({"runs-on": "ubuntu-24.04", "steps": [{"if": "always()", "run": "make"}]}, {}, LINUX)


if __name__ == "__main__":
    unittest.main()
