"""What a program asks of the C library."""

import re
import subprocess
import tempfile
from pathlib import Path

# VER_FLG_WEAK of elf.h.
WEAK = 2
# More than libsbcl has.
LARGEST_LIBRARY = 4 << 20


def newest(program):
    """The newest version of the GNU C library's that a program asks for, or the libsbcl in its data: (2, 31)."""
    data = Path(program).read_bytes()
    versions = versions_of(program)
    begin = data.find(b"\x7fELF", 4)
    with tempfile.NamedTemporaryFile() as inner:
        while begin > 0:
            Path(inner.name).write_bytes(data[begin : begin + LARGEST_LIBRARY])
            versions += versions_of(inner.name)
            begin = data.find(b"\x7fELF", begin + 4)
    return max(versions)


def versions_of(file):
    """The versions that an ELF file cannot be loaded without: all it names, but for those that are marked as weak.
    That all symbols of a version are weak is not enough: not every linker marks it then."""
    listing = subprocess.run(["objdump", "-p", str(file)], text=True, capture_output=True).stdout
    found = re.findall(r"^ +0x[0-9a-f]+ 0x([0-9a-f]+) [0-9a-f]+ GLIBC_(\d+)\.(\d+)", listing, re.MULTILINE)
    return [(int(major), int(minor)) for flags, major, minor in found if not int(flags, 16) & WEAK]
