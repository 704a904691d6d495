#!/usr/bin/env python3
"""Combines the packages that were built on several machines: packaging/combine.py OUTPUT DIRECTORY...

Copies the files of the directories to OUTPUT, which is created, and writes SHA256SUMS for all of them. Files that do not depend
on the machine, such as the main npm package, are in each directory and must have the same bytes.
"""

import hashlib
import shutil
import sys
from pathlib import Path

CHECKSUMS = "SHA256SUMS"


def combine(output, directories):
    """Copies the files of `directories` to `output`, and writes their checksums."""
    output.mkdir(parents=True)
    for directory in directories:
        listed = dict(reversed(line.split("  ")) for line in (directory / CHECKSUMS).read_text().splitlines())
        files = sorted(path for path in directory.iterdir() if path.name != CHECKSUMS)
        missing = listed.keys() - {file.name for file in files}
        if missing:
            sys.exit(f"combine: {directory} lacks {', '.join(sorted(missing))}")
        for file in files:
            contents = file.read_bytes()
            if listed.get(file.name) != hashlib.sha256(contents).hexdigest():
                sys.exit(f"combine: {file} does not have the checksum in {CHECKSUMS}")
            target = output / file.name
            if target.exists() and target.read_bytes() != contents:
                sys.exit(f"combine: the machines built {file.name} differently")
            shutil.copyfile(file, target)
    files = sorted(output.iterdir())
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (output / CHECKSUMS).write_text("".join(lines))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    combine(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
