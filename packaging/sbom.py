"""The bill of materials of the program, in CycloneDX's format: what it contains, with versions and licences.

cargo-cyclonedx lists the crates. This module adds what cargo does not know: SBCL with its contribs, and Rust's standard
library. Paths of the build machine are removed, so that two builds have the same bill.
"""

import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import glibc

ROOT = Path(__file__).resolve().parent.parent
# The newest version of the format that cargo-cyclonedx writes.
SPEC_VERSION = "1.5"
# The licence of SBCL and of those contribs that have none of their own. packaging/LICENSE-SBCL has the text.
SBCL_LICENCE = {"license": {"name": "SBCL: public domain, with portions under BSD-style licences"}}
# The contribs of SBCL that may be in the core, each with its licence.
CONTRIBS = {
    "asdf": {"expression": "MIT"},
    "sb-bsd-sockets": SBCL_LICENCE,
    "sb-cltl2": SBCL_LICENCE,
    "sb-concurrency": SBCL_LICENCE,
    "sb-cover": SBCL_LICENCE,
    "sb-grovel": SBCL_LICENCE,
    "sb-introspect": SBCL_LICENCE,
    "sb-md5": {"expression": "CC0-1.0"},
    "sb-posix": SBCL_LICENCE,
    "sb-queue": SBCL_LICENCE,
    "sb-rotate-byte": SBCL_LICENCE,
    "sb-rt": {"license": {"name": "HPND-style licence of the Massachusetts Institute of Technology"}},
    "sb-sprof": {"expression": "BSD-3-Clause"},
}
# Third-party code in SBCL's runtime: names, directories in SBCL's source, and licences.
RUNTIME_PARTS = [
    ("tlsf-bsd", "tlsf-bsd", {"expression": "BSD-2-Clause"}),
    ("murmur-hash", "src/runtime/murmur_hash.c", {"expression": "Apache-2.0"}),
    ("cityhash-mix", "src/runtime/hopscotch.c", {"expression": "MIT"}),
]
# The libraries that every Linux system with glibc has: the program uses but does not contain them. Describe any other library,
# such as libzstd, here before the program may use it.
SYSTEM_LIBRARIES = re.compile(r"(ld-linux-.*|lib(c|dl|gcc_s|m|pthread|rt|util))\.so\.\d+$")


def pin(text):
    """Returns the constants in `text`, the source of sbcl-core/src/pin.rs, such as `VERSION`."""
    return dict(re.findall(r'^pub const (\w+): &str = "(.*)";$', text, re.MULTILINE))


def contribs(text):
    """Returns the names of SBCL's contribs in the core. `text` is lisp/sbcl-host.asd, whose first system depends on
    all of them."""
    systems = re.search(r'\(asdf:defsystem "sbcl-host"\n.*?:depends-on \((.*?)\)', text, re.DOTALL).group(1)
    return ["asdf", *(name for name in re.findall(r'"(.*?)"', systems) if not name.startswith("sbcl-host/"))]


def component(name, purl, licence, **more):
    """Returns a component that does not come from a package registry."""
    return {"type": "library", "bom-ref": purl, "name": name, "licenses": [licence], "purl": purl, **more}


def lisp_components(pin_text, asd_text):
    """Returns the components of SBCL and its parts, and the entries for their dependencies."""
    pinned = pin(pin_text)
    names = contribs(asd_text)
    unknown = [name for name in names if name not in CONTRIBS]
    if unknown:
        sys.exit(f"sbom: packaging/sbom.py does not name the licence of {', '.join(unknown)}")
    purl = f"pkg:generic/sbcl@{pinned['VERSION']}"
    sbcl = component(
        "sbcl",
        purl,
        SBCL_LICENCE,
        version=pinned["VERSION"],
        externalReferences=[{"type": "vcs", "url": re.search(r'"(https:.*?)"', pin_text).group(1)}],
        properties=[
            {"name": "sbcl-mcp:source-commit", "value": pinned["GIT_COMMIT"]},
            {"name": "sbcl-mcp:source-archive-sha256", "value": pinned["ARCHIVE_SHA256"]},
        ],
    )
    parts = [component(name, f"{purl}#contrib/{name}", CONTRIBS[name]) for name in names]
    parts += [component(name, f"{purl}#{place}", licence) for name, place, licence in RUNTIME_PARTS]
    references = sorted(part["bom-ref"] for part in parts)
    return [sbcl, *parts], [{"ref": purl, "dependsOn": references}, *({"ref": reference} for reference in references)]


def standard_library(version_line):
    """Returns the component of Rust's standard library. `version_line` is the output of `rustc --version`."""
    version = version_line.split()[1]
    return component("rust-std", f"pkg:generic/rust-std@{version}", {"expression": "MIT OR Apache-2.0"}, version=version)


def without_path(purl):
    """Returns a package URL without the part that names a directory of the build machine."""
    return re.sub(r"\?download_url=file:[^#]*", "", purl)


def complete(bom, added, dependencies, libraries):
    """Returns the bill of the whole program. `bom` is cargo-cyclonedx's bill, `added` are further components, `dependencies`
    are their dependencies, and `libraries` are the names of the shared libraries that the program uses."""
    bom = copy.deepcopy(bom)
    program = bom["metadata"]["component"]
    references = {}

    def rename(item, reference):
        references[item["bom-ref"]] = item["bom-ref"] = reference

    for item in [program, *bom["components"]]:
        rename(item, f"pkg:cargo/{item['name']}@{item['version']}")
        item["purl"] = without_path(item["purl"])
    for part in program.get("components", []):
        rename(part, f"{program['bom-ref']}#{part['name']}")
        if "purl" in part:
            part["purl"] = without_path(part["purl"])
    program["properties"] = [{"name": "sbcl-mcp:shared-library", "value": name} for name in sorted(libraries)]
    for entry in bom["dependencies"]:
        entry["ref"] = references[entry["ref"]]
        if "dependsOn" in entry:
            entry["dependsOn"] = sorted(references[name] for name in entry["dependsOn"])
        if entry["ref"] == program["bom-ref"]:
            inner = {name for other in dependencies for name in other.get("dependsOn", [])}
            direct = {item["bom-ref"] for item in added} - inner
            entry["dependsOn"] = sorted({*entry.get("dependsOn", []), *direct})
    bom["components"] = sorted([*bom["components"], *added], key=lambda item: item["bom-ref"])
    bom["dependencies"] = sorted([*bom["dependencies"], *dependencies], key=lambda entry: entry["ref"])
    # GitHub requires a serial number. This number depends only on the contents.
    bom.pop("serialNumber", None)
    contents = hashlib.sha256(json.dumps(bom, sort_keys=True).encode()).hexdigest()
    bom["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, contents)}"
    return bom


def crates_bom(target):
    """Returns cargo-cyclonedx's bill for the program, built with the default features for `target`."""
    # cargo-cyclonedx writes the file next to the manifest of each member of the workspace.
    name = "sbcl-mcp-sbom"
    members = json.loads(
        subprocess.check_output(
            ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"], cwd=ROOT, text=True
        )
    )["packages"]
    files = [Path(member["manifest_path"]).parent / f"{name}.json" for member in members]
    command = ["cargo-cyclonedx", "cyclonedx", "--quiet", "--format", "json", "--spec-version", SPEC_VERSION]
    try:
        subprocess.run(
            [*command, "--no-build-deps", "--target", target, "--override-filename", name],
            cwd=ROOT,
            check=True,
            env={"SOURCE_DATE_EPOCH": "0", **os.environ, "CARGO_NET_OFFLINE": "true"},
        )
        return json.loads((ROOT / f"{name}.json").read_text())
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def check_valid(text):
    """Ends this program if `text` does not conform to CycloneDX's schema."""
    # The tests of the functions above run without this library.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    problem = JsonStrictValidator(SchemaVersion.from_version(SPEC_VERSION)).validate_str(text)
    if problem:
        sys.exit(f"sbom: {problem}")


def write(program, target, file):
    """Writes the bill of `program`, built for the Rust target `target`, to `file`."""
    libraries = set(glibc.shared_libraries(program))
    unknown = sorted(name for name in libraries if not SYSTEM_LIBRARIES.match(name))
    if unknown:
        sys.exit(f"sbom: the program needs {', '.join(unknown)}, which packaging/sbom.py does not describe")
    lisp, dependencies = lisp_components(
        (ROOT / "sbcl-core/src/pin.rs").read_text(), (ROOT / "lisp/sbcl-host.asd").read_text()
    )
    # scripts/cross.sh may set RUSTC.
    std = standard_library(subprocess.check_output([os.environ.get("RUSTC", "rustc"), "--version"], text=True))
    bom = complete(crates_bom(target), [*lisp, std], [*dependencies, {"ref": std["bom-ref"]}], libraries)
    text = json.dumps(bom, indent=2, ensure_ascii=False) + "\n"
    check_valid(text)
    file.write_text(text)
