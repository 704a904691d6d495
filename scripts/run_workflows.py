#!/usr/bin/env python3
"""Runs the steps of the workflows on this machine: scripts/run_workflows.py [WORKFLOW[/JOB]...]

Without arguments, runs all jobs of all workflows. Each job runs the commands in .github/workflows in a clone of the last
commit below target/workflows. The script skips jobs for other kinds of machines, steps that use an action of GitHub, steps
with a condition that is false for a branch, and steps whose names begin with "Install", which prepare a new machine. Needs
PyYAML, which scripts/packagers.sh installs (make workflows).
"""

import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "target/workflows"
BRANCH = {"github.ref_type == 'tag'": False}
# The keys of a step that this script supports in steps with a command.
SUPPORTED = {"id", "if", "name", "run"}


def combinations(job):
    """Returns the values of the matrix for each run of a job, as dictionaries; one empty dictionary without a matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    unsupported = {"include", "exclude"} & matrix.keys()
    if unsupported:
        sys.exit(f"workflows: a matrix with {', '.join(sorted(unsupported))} is not supported")
    return [dict(zip(matrix, values)) for values in itertools.product(*matrix.values())]


def substitute(text, values):
    """Returns a command in which the expressions that name values of the matrix are replaced by these values."""

    def value(match):
        name = match[1]
        if name not in values:
            sys.exit(f"workflows: the value of {name} is not known on this machine")
        return str(values[name])

    return re.sub(r"\$\{\{ *(.*?) *\}\}", value, text)


def machine(runner):
    """Returns the kind of machine that a runner's label names, as platform.system() and platform.machine() would."""
    if runner.startswith("macos"):
        return "Darwin", "arm64"
    return "Linux", "aarch64" if runner.endswith("-arm") else "x86_64"


def holds(condition):
    """Returns true if the condition is true in the workflow of a branch."""
    if condition not in BRANCH:
        sys.exit(f"workflows: the condition {condition} is not supported")
    return BRANCH[condition]


def plan(job, values, here):
    """Returns the steps of a job with these values of its matrix, as pairs: None and a command, or the reason to skip the
    step and None."""
    values = {f"matrix.{name}": value for name, value in values.items()}
    runner = substitute(job["runs-on"], values)
    if machine(runner) != here:
        return [(f"needs a machine of the kind {runner}", None)]
    if "if" in job and not holds(job["if"]):
        return [(f"only if {job['if']}", None)]
    steps = []
    for step in job["steps"]:
        name = step.get("name", "")
        if "uses" in step:
            steps.append((f"{step['uses'].split('@')[0]} is an action of GitHub", None))
        elif "if" in step and not holds(step["if"]):
            steps.append((f"{name or step['run']}: only if {step['if']}", None))
        elif name.startswith("Install"):
            steps.append((f"{name}: prepares a new machine", None))
        else:
            unsupported = step.keys() - SUPPORTED
            if unsupported:
                sys.exit(f"workflows: a step with {', '.join(sorted(unsupported))} is not supported: {step['run']}")
            steps.append((None, substitute(step["run"], values)))
    return steps


def shim_sudo(directory):
    """Returns a directory for the PATH with a program `sudo`, if this process runs as root on a machine without sudo; otherwise
    None."""
    if shutil.which("sudo") or os.geteuid() != 0:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (directory / "sudo").chmod(0o755)
    return directory


def run_job(name, steps, variables):
    """Runs the steps of a job in a fresh clone. Returns the command that failed, or None."""
    if all(command is None for _, command in steps):
        for reason, _ in steps:
            print(f"workflows: {name}: skipped: {reason}", flush=True)
        return None
    tree = WORK / re.sub(r"[^\w.-]+", "-", name)
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    outputs = tree.with_suffix(".output")
    outputs.write_text("")
    shim = shim_sudo(WORK / "bin")
    path = os.environ["PATH"] if shim is None else f"{shim}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if key != "CARGO_TARGET_DIR"}
    environment = {**kept, "PATH": path, "CI": "true", "GITHUB_REF_NAME": "main", "GITHUB_OUTPUT": str(outputs)}
    environment.update({key: str(value) for key, value in variables.items()})
    for reason, command in steps:
        if command is None:
            print(f"workflows: {name}: skipped: {reason}", flush=True)
            continue
        print(f"workflows: {name}: $ {command.strip()}", flush=True)
        # GitHub's default shell.
        if subprocess.run(["bash", "-e", "-c", command], cwd=tree, env=environment, stdin=subprocess.DEVNULL).returncode:
            return command.strip()
    return None


def main():
    import yaml

    here = platform.system(), platform.machine()
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    workflows = {file.stem: yaml.safe_load(file.read_text())["jobs"] for file in files}
    jobs = [(workflow, identifier) for workflow, found in workflows.items() for identifier in found]
    wanted, failed = set(sys.argv[1:]), []
    unknown = wanted - workflows.keys() - {"/".join(job) for job in jobs}
    if unknown:
        sys.exit(f"workflows: no workflow or job is named {', '.join(sorted(unknown))}")
    for workflow, identifier in jobs:
        if wanted and not wanted & {workflow, f"{workflow}/{identifier}"}:
            continue
        job = workflows[workflow][identifier]
        for values in combinations(job):
            name = "/".join([workflow, identifier, *map(str, values.values())])
            command = run_job(name, plan(job, values, here), job.get("env", {}))
            if command:
                failed.append(f"{name}: {command}")
    for line in failed:
        print(f"workflows: failed: {line}")
    if failed:
        sys.exit(1)
    print("workflows: all steps that run on this machine passed")


if __name__ == "__main__":
    main()
