"""What a program asks of the C library."""

import re
import subprocess
import tempfile
from pathlib import Path

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
    """The versions of the symbols that an ELF file cannot do without: weak ones are looked for only."""
    listing = subprocess.run(["objdump", "-T", str(file)], text=True, capture_output=True).stdout
    strong = [line for line in listing.splitlines() if "*UND*" in line and not line[16:].startswith("  w")]
    found = re.findall(r"GLIBC_(\d+)\.(\d+)", "\n".join(strong))
    return [(int(major), int(minor)) for major, minor in found]
