"""Archives whose bytes depend only on their contents."""

import os
import zipfile
from pathlib import Path

# The earliest date of the zip format.
EPOCH = (1980, 1, 1, 0, 0, 0)


def normalize_zip(file):
    """Rewrites a zip archive: sorts its members, gives all of them the same date, and keeps their permissions."""
    file = Path(file)
    temporary = file.with_name(f"{file.name}.new")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for member in sorted(old.infolist(), key=lambda member: member.filename):
            plain = zipfile.ZipInfo(member.filename, EPOCH)
            plain.create_system = member.create_system
            plain.external_attr = member.external_attr
            plain.compress_type = zipfile.ZIP_DEFLATED
            new.writestr(plain, old.read(member), compresslevel=9)
    os.replace(temporary, file)
