#!/usr/bin/env python3
"""Statements for GitHub's attestations.

packaging/attestation.py check OUTPUT: checks that GitHub's action `attest` accepts SHA256SUMS and the bills of materials in
the directory OUTPUT.
packaging/attestation.py statement OUTPUT COMMIT REF REPOSITORY: prints the provenance, as an in-toto statement with SLSA's
predicate, that the action creates from SHA256SUMS when the release workflow builds COMMIT at REF. The statement is not signed:
only GitHub can sign for its workflows.
"""

import json
import re
import sys
from pathlib import Path

WORKFLOW = ".github/workflows/release.yml"
# The action's limits.
MOST_SUBJECTS = 1024
LARGEST_BILL = 16 << 20


def subjects(checksums):
    """Returns the subjects of a statement about the files that `checksums`, the text of SHA256SUMS, lists."""
    found = []
    for line in checksums.splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  (\S+)", line)
        if not match:
            sys.exit(f"attestation: this line of SHA256SUMS is not a checksum: {line}")
        found.append({"name": match[2], "digest": {"sha256": match[1]}})
    names = {subject["name"] for subject in found}
    if not 0 < len(names) == len(found) <= MOST_SUBJECTS:
        sys.exit(f"attestation: SHA256SUMS lists {len(found)} files with {len(names)} names; at most {MOST_SUBJECTS} are accepted")
    return found


def bill_problem(text):
    """Returns the reason why the action does not accept a bill of materials, or None if the action accepts it."""
    if len(text.encode()) > LARGEST_BILL:
        return f"larger than {LARGEST_BILL} bytes"
    bill = json.loads(text)
    missing = [name for name in ["bomFormat", "serialNumber", "specVersion"] if not bill.get(name)]
    return f"no {missing[0]}" if missing else None


def statement(checksums, commit, ref, repository):
    """Returns the statement about a build of `commit`, to which `ref` points, by the workflow of `repository`, a URL."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects(checksums),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://actions.github.io/buildtypes/workflow/v1",
                "externalParameters": {"workflow": {"ref": ref, "repository": repository, "path": WORKFLOW}},
                "resolvedDependencies": [{"uri": f"git+{repository}@{ref}", "digest": {"gitCommit": commit}}],
            },
            "runDetails": {"builder": {"id": f"{repository}/{WORKFLOW}@{ref}"}},
        },
    }


def check(output):
    subjects((output / "SHA256SUMS").read_text())
    bills = sorted(output.glob("*.cdx.json"))
    if not bills:
        sys.exit(f"attestation: {output} has no bill of materials (*.cdx.json)")
    for bill in bills:
        problem = bill_problem(bill.read_text())
        if problem:
            sys.exit(f"attestation: GitHub does not accept {bill.name}: {problem}")


def main():
    match sys.argv[1:]:
        case ["check", output]:
            check(Path(output))
        case ["statement", output, commit, ref, repository]:
            checksums = (Path(output) / "SHA256SUMS").read_text()
            print(json.dumps(statement(checksums, commit, ref, repository), indent=2))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
