#!/usr/bin/env python3
"""Compares two builds: scripts/compare_builds.py ONE TWO

ONE and TWO are directories of packages, or two cores of SBCL. Reports each file that is missing in one of the directories or
differs, the differing members of an archive, and the differing spaces and addresses of a core. Exits with status 1 if there
is a difference.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

# Constants of SBCL's core files (tools-for-build/corefile.lisp in its source).
CORE_MAGIC = 0x5342434C
DIRECTORY, END = 3861, 3840
SPACES = {1: "dynamic", 2: "static", 3: "read-only", 4: "fixedobj", 5: "text", 6: "permgen"}
WORD = 8
# Number of differing words to list for each part of a core.
LISTED = 5


def members(file):
    """Returns the contents of the members of an archive, by name; None if Python cannot read `file` as an archive."""
    if re.search(r"\.(tar\.xz|tgz|crate)$", file.name):
        with tarfile.open(file) as archive:
            return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    return None


def difference(one, two):
    """Returns a phrase that describes the difference between two unequal byte strings."""
    first = next((place for place, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))
    sizes = f"{len(one)} bytes" if len(one) == len(two) else f"{len(one)} and {len(two)} bytes"
    return f"{sizes}, equal up to byte {first}"


def compare_contents(one, two):
    """Returns a line for each name that is missing in one of two dictionaries of contents, or whose contents differ."""
    lines = []
    for name in sorted({*one, *two}):
        if name not in one or name not in two:
            lines.append(f"{name}: only in the {'second' if name in two else 'first'}")
        elif one[name] != two[name]:
            lines.append(f"{name}: {difference(one[name], two[name])}")
    return lines


def compare_directories(one, two):
    """Returns a line for each difference between two directories of packages."""
    files = [{path.name: path for path in directory.iterdir() if path.is_file()} for directory in (one, two)]
    contents = [{name: path.read_bytes() for name, path in group.items()} for group in files]
    lines = []
    for line in compare_contents(*contents):
        lines.append(line)
        name = line.split(": ")[0]
        if name in files[0] and name in files[1]:
            parts = [members(group[name]) for group in files]
            if None not in parts:
                lines += [f"  {inner}" for inner in compare_contents(*parts)]
                lines += [] if parts[0] != parts[1] else ["  the members are equal: their order, dates or permissions differ"]
    return lines


def spaces(core):
    """Returns the spaces of a core, as tuples of an identifier, a number of words, a first page, an address in Lisp and a
    number of pages; and the number of bytes in the header."""
    words = memoryview(core)[: len(core) // WORD * WORD].cast("Q")
    if words[0] != CORE_MAGIC:
        raise ValueError("not a core of SBCL")
    found, place = [], 1
    while words[place] != END:
        length = words[place + 1]
        if words[place] == DIRECTORY:
            found = [tuple(words[entry : entry + 5]) for entry in range(place + 2, place + length, 5)]
        place += length
    return found, place * WORD


def page_size(found):
    """Returns the size of SBCL's pages, which depends on the processor: the smallest size at which no space needs more pages
    than it has."""
    size = 4096
    while any(-(-count * WORD // size) > pages for _, count, _, _, pages in found):
        size *= 2
    return size


def differing_words(one, two, begin, end, step):
    """Returns the places of the words between `begin` and `end` that differ. Equal pages of `step` bytes are skipped."""
    places = []
    for page in range(begin, end, step):
        if one[page : min(page + step, end)] != two[page : min(page + step, end)]:
            words = range(page, min(page + step, end), WORD)
            places += [word for word in words if one[word : word + WORD] != two[word : word + WORD]]
    return places


def compare_cores(one, two):
    """Returns a line for each differing part of two cores, and lines with the first differing addresses of the part."""
    (found, header), (other, _) = spaces(one), spaces(two)
    if found != other:
        return ["the sizes or addresses of the spaces differ"]
    size = page_size(found)
    parts = [("header", 0, header, 0)]
    for name, count, page, address, _ in found:
        # The page after the header's first is number 0.
        begin = (page + 1) * size
        parts.append((SPACES.get(name, str(name)), begin, begin + count * WORD, address))
    lines = []
    for name, begin, end, address in parts:
        places = differing_words(one, two, begin, end, size)
        if places:
            lines.append(f"{name}: {len(places)} of {(end - begin) // WORD} words differ")
        for place in places[:LISTED]:
            values = [int.from_bytes(core[place : place + WORD], "little") for core in (one, two)]
            lines.append(f"  {address + place - begin:#x}: {values[0]:#x} and {values[1]:#x}")
    if not lines and one != two:
        lines.append(f"other parts: {difference(one, two)}")
    return lines


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    one, two = map(Path, sys.argv[1:])
    lines = compare_directories(one, two) if one.is_dir() else compare_cores(one.read_bytes(), two.read_bytes())
    for line in lines:
        print(f"compare: {line}")
    if lines:
        sys.exit(1)
    print("compare: the builds are equal")


if __name__ == "__main__":
    main()
