"""The C library version that a program requires."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The program that reads ELF files. This machine's own objdump may not support the files of another machine.
OBJDUMP = "objdump"
# VER_FLG_WEAK of elf.h.
WEAK = 2
# An upper bound of the size of libsbcl, in bytes.
LARGEST_LIBRARY = 4 << 20


def elf_files(program):
    """Yields the path of a program, and then of a copy of each ELF file in its data, such as libsbcl."""
    yield str(program)
    data = Path(program).read_bytes()
    begin = data.find(b"\x7fELF", 4)
    with tempfile.NamedTemporaryFile() as inner:
        while begin > 0:
            Path(inner.name).write_bytes(data[begin : begin + LARGEST_LIBRARY])
            yield inner.name
            begin = data.find(b"\x7fELF", begin + 4)


def newest(program):
    """Returns the newest glibc version that a program or the libsbcl in its data requires, such as (2, 31)."""
    return max(version for file in elf_files(program) for version in versions_of(listing_of(file, program)))


def shared_libraries(program):
    """Returns the names of the shared libraries that a program or the libsbcl in its data requires."""
    listings = [listing_of(file, program) for file in elf_files(program)]
    return {name for listing in listings for name in re.findall(r"^ +NEEDED +(\S+)$", listing, re.MULTILINE)}


def listing_of(file, program):
    """Returns objdump's listing of a file that `elf_files(program)` has yielded. Data of the program may merely begin like an ELF
    file; its listing may be empty."""
    done = subprocess.run([OBJDUMP, "-p", file], text=True, capture_output=True)
    if done.returncode and file == str(program):
        sys.exit(f"glibc: {OBJDUMP} cannot read {program}:\n{done.stderr}")
    return done.stdout


def versions_of(listing):
    """Returns the glibc versions that an ELF file requires, from objdump's listing: all that it names, except those marked as
    weak. Weak symbols alone do not make a version optional, because not every linker marks the version then."""
    found = re.findall(r"^ +0x[0-9a-f]+ 0x([0-9a-f]+) [0-9a-f]+ GLIBC_(\d+)\.(\d+)", listing, re.MULTILINE)
    return [(int(major), int(minor)) for flags, major, minor in found if not int(flags, 16) & WEAK]
