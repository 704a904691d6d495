#!/usr/bin/env python3
"""Loads Lisp libraries, touches every file, loads them again, and prints a table with the notices of the second load.

Nothing has changed, so a notice is a failure. With --append, a comment is appended to each file, too.

    scripts/reload_libraries.py [--binary FILE] [--append] [--source DIRECTORY] [SYSTEM...]

DIRECTORY has one directory of sources per library, as Debian's /usr/share/common-lisp/source has. The script works on
a copy of DIRECTORY.
"""

import argparse
import os
import pathlib
import re
import shutil
import sys
import tempfile

from mutants import Server

SYSTEMS = """alexandria anaphora babel bordeaux-threads cffi chipz chunga cl-base64 cl-containers cl-fad cl-interpol
cl-ppcre cl-unicode cl-utilities cl-who closer-mop contextl cxml drakma esrap fiveam flexi-streams hunchentoot
ieee-floats ironclad iterate local-time lparallel md5 metabang-bind named-readtables nibbles parse-number puri quri
regex rfc2388 rt salza2 split-sequence trivial-backtrace trivial-features trivial-garbage trivial-gray-streams
usocket uuid xmls yason zpb-ttf""".split()


def start(binary, sources, home):
    """Starts a server that finds only the systems below a directory."""
    os.environ.update(HOME=str(home), XDG_CACHE_HOME=str(home / "cache"),
                      CL_SOURCE_REGISTRY=f'(:source-registry (:tree "{sources}/") :ignore-inherited-configuration)')
    return Server(binary, sources, structured=False)


def load(server, system):
    """Loads a system. Returns the text of the answer, and whether it is an error."""
    answer = server.call("load-system", system=system, timeout=600)
    return answer["content"][0]["text"], answer.get("isError", False)


def touch(sources, append):
    for file in sources.rglob("*"):
        if file.suffix in (".lisp", ".cl", ".lsp", ".asd") and file.is_file():
            if append and file.suffix != ".asd":
                with open(file, "ab") as out:
                    out.write(b"\n;; The same.\n")
            os.utime(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/sbcl-mcp")
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--source", default="/usr/share/common-lisp/source", type=pathlib.Path)
    parser.add_argument("systems", nargs="*", default=SYSTEMS)
    arguments = parser.parse_args()
    loaded = noticed = 0
    with tempfile.TemporaryDirectory(prefix="reload-libraries-") as directory:
        root = pathlib.Path(directory).resolve()
        sources, home = root / "source", root / "home"
        shutil.copytree(arguments.source, sources)
        home.mkdir()
        print(f"{'system':24} {'first load':>28} {'again':>28}  notices")
        for system in arguments.systems:
            server = start(os.path.abspath(arguments.binary), sources, home)
            texts = []
            for again in (False, True):
                if again:
                    touch(sources, arguments.append)
                text, is_error = load(server, system)
                texts.append(text)
                if is_error:
                    break
            server.end()
            if is_error:
                print(f"{system:24} {'fails' if len(texts) == 1 else 'fails again'}: {text.splitlines()[0]}")
                if len(texts) == 2:
                    noticed += 1
                continue
            counts = [re.search(r": (\d+ files?(?:, \d+ compiled)?)", text) for text in texts]
            notice = re.search(r"\[notice\]\n(.*?)\n\n", texts[1] + "\n\n", re.DOTALL)
            lines = notice.group(1).splitlines() if notice else []
            loaded += 1
            noticed += bool(lines)
            print(f"{system:24} {counts[0].group(1):>28} {counts[1].group(1):>28}  {len(lines)}")
            for line in lines:
                print(f"    {line}")
    print(f"{loaded} systems loaded twice; notices for {noticed}")
    return 1 if noticed else 0


if __name__ == "__main__":
    sys.exit(main())
