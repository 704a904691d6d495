#!/usr/bin/env python3
"""Prepares a release: scripts/release.py prepare VERSION [--once] [--tag] [--target TARGET]...

Clones the last commit twice, changes the version, the changelog and Debian's changelog in the clones, builds the packages of
VERSION in both, compares the builds, and tests the packages as `make dist` does. Without --tag the repository does not change.
With --tag the script adds the tested commit, with an annotated tag, to the current branch. The script never pushes or uploads
anything. With --once it builds only once, without a comparison. With --target it also builds packages for another machine, as
`make dist TARGET=...` does.

scripts/release.py again: builds the packages of the last commit again, in a clone, and compares them with target/dist.

scripts/release.py notes VERSION: prints the section of CHANGELOG.md about VERSION.
"""

import argparse
import datetime
import email.utils
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The directory with the clones and their packages.
WORK = ROOT / "target/publish"
# The published packages of the workspace, each after its dependencies.
CRATES = ["lisp-syntax", "sbcl-core", "sbcl-build", "sbcl-mcp"]
MANIFESTS = [
    "Cargo.toml",
    "lisp-syntax/Cargo.toml",
    "sbcl-core/Cargo.toml",
    "sbcl-build/Cargo.toml",
    "examples/bundled/Cargo.toml",
]
LOCK_FILES = ["Cargo.lock", "benches/peers/Cargo.lock"]
PLUGIN = "packaging/claude-code/.claude-plugin/plugin.json"
# Values that these files must not contain when packages are published (packaging/README.md).
PLACEHOLDERS = {"Cargo.toml": ["sbcl-mcp@localhost", "io.github.sbcl-mcp/"], "packaging/deb/changelog": ["sbcl-mcp@localhost"]}


class Refusal(Exception):
    """The reason why the release cannot be prepared, with advice."""


def parse_version(text):
    """Returns a version such as "1.2.3" as a tuple of numbers."""
    match = re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", text)
    if not match:
        raise Refusal(f"{text} is not a version: write three numbers, such as 1.2.3")
    return tuple(map(int, match.groups()))


def check_newer(version, manifest_version, tags):
    """Refuses a version that is not newer than each of `tags`, or that is older than the version in Cargo.toml."""
    released = [tag.removeprefix("v") for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    newest = max(released, key=parse_version, default=None)
    if newest and parse_version(version) <= parse_version(newest):
        raise Refusal(f"{version} is not newer than {newest}, the newest tag: choose a later version")
    if parse_version(version) < parse_version(manifest_version):
        raise Refusal(f"{version} is older than {manifest_version}, the version in Cargo.toml: choose a later version")


def sections(changelog):
    """Returns the sections of CHANGELOG.md, newest first, as pairs of a heading and a text."""
    parts = re.split(r"^## (.*)\n", changelog, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2]))


def release_changelog(changelog, version, date):
    """Returns CHANGELOG.md with its first section, which must be marked as unreleased, as the section of `version`."""
    found = sections(changelog)
    heading, text = found[0] if found else ("", "")
    if not heading.endswith("(unreleased)"):
        raise Refusal(
            f'CHANGELOG.md begins with "{heading}": begin it with "## {version} (unreleased)" and say what has changed'
        )
    if not re.search(r"^- \S", text, re.MULTILINE):
        raise Refusal(f'the section "{heading}" of CHANGELOG.md has no entries: say what has changed for those who upgrade')
    return changelog.replace(f"## {heading}\n", f"## {version} ({date})\n", 1)


def release_notes(changelog, version):
    """Returns the section of CHANGELOG.md about `version`, without its heading."""
    for heading, text in sections(changelog):
        if heading.split(" ")[0] == version:
            return text.strip() + "\n"
    raise Refusal(f"CHANGELOG.md has no section about {version}")


def debian_changelog(changelog, version, date):
    """Returns packaging/deb/changelog with an entry for `version`. `date` has the format of a mail header."""
    maintainer = re.search(r"^ -- (.*>)  ", changelog, re.MULTILINE).group(1)
    entry = f"sbcl-mcp ({version}-1) unstable; urgency=low\n\n  * See CHANGELOG.md.\n\n -- {maintainer}  {date}\n"
    entries = re.split(r"\n(?=sbcl-mcp \()", changelog)
    # An entry for this version, made during its development, is replaced.
    if entries[0].startswith(f"sbcl-mcp ({version}-1) "):
        entries = entries[1:]
    return "\n".join([entry, *entries])


def bump_manifest(manifest, old, new):
    """Returns a Cargo.toml in which our crates, and dependencies on our crates, have the version `new` instead of `old`."""
    lines = []
    for line in manifest.splitlines(keepends=True):
        if line.startswith("version = ") or re.match(rf"({'|'.join(CRATES)}) = ", line):
            line = line.replace(f'"{old}"', f'"{new}"')
        lines.append(line)
    return "".join(lines)


def bump_lock(lock, old, new):
    """Returns a Cargo.lock in which our crates have the version `new` instead of `old`."""
    names = "|".join(CRATES)
    return re.sub(rf'^(name = "(?:{names})"\nversion = )"{re.escape(old)}"', rf'\1"{new}"', lock, flags=re.MULTILINE)


def manifest_version(manifest):
    """Returns the version of the package that a Cargo.toml describes."""
    return re.search(r'^version = "(.*)"', manifest, re.MULTILINE).group(1)


def placeholders(read):
    """Returns a line for each remaining placeholder. `read` returns the text of a file of the repository."""
    left = [f"{file}: {value}" for file, values in PLACEHOLDERS.items() for value in values if value in read(file)]
    return left if re.search(r"^repository = ", read("Cargo.toml"), re.MULTILINE) else [*left, "Cargo.toml: no repository"]


def run(*command, directory=ROOT, **more):
    """Runs a command and shows its output. Raises Refusal if the command fails."""
    print("release: $", *command, flush=True)
    if subprocess.run([str(word) for word in command], cwd=directory, **more).returncode:
        raise Refusal(f"{' '.join(map(str, command))} failed: see above")


def output_of(*command, directory=ROOT):
    """Returns the output of a command."""
    return subprocess.run(command, cwd=directory, check=True, text=True, stdout=subprocess.PIPE).stdout.rstrip()


def change_files(tree, version, now):
    """Changes the version and the date of the files in the directory `tree`. `now` is the date."""

    def change(name, function, *arguments):
        file = tree / name
        file.write_text(function(file.read_text(), *arguments))

    old = manifest_version((tree / "Cargo.toml").read_text())
    change("CHANGELOG.md", release_changelog, version, now.strftime("%-d %B %Y"))
    change("packaging/deb/changelog", debian_changelog, version, email.utils.format_datetime(now))
    for name in MANIFESTS:
        change(name, bump_manifest, old, version)
    for name in LOCK_FILES:
        change(name, bump_lock, old, version)
    change(PLUGIN, lambda text: text.replace(f'"version": "{old}"', f'"version": "{version}"'))


def clone(name, source, commit):
    """Clones `commit` of the repository `source` into a new directory in WORK. The clone uses this repository's
    installed tools."""
    tree = WORK / name
    shutil.rmtree(tree, ignore_errors=True)
    run("git", "-c", "init.defaultBranch=main", "clone", "--quiet", "--no-checkout", source, tree)
    run("git", "checkout", "--quiet", "--detach", commit, directory=tree)
    tools = ROOT / "target/packagers"
    tools.mkdir(parents=True, exist_ok=True)
    (tree / "target").mkdir()
    (tree / "target/packagers").symlink_to(tools)
    return tree


def outputs(tree, targets):
    """Returns the directories in which scripts/dist.sh builds packages in `tree`, for this machine and then for `targets`."""
    return [tree / "target/dist", *(tree / f"target/dist-{target.split('-')[0]}" for target in targets)]


def build(tree, targets, *options):
    """Builds the packages in `tree`, for this machine and for `targets`."""
    for target in [[], *([target] for target in targets)]:
        run("scripts/dist.sh", *options, *target, directory=tree, env=build_environment())


def build_again(tree, targets, source, commit):
    """Builds the packages of `commit` of the repository `source` in a second clone, and compares them with the packages in
    `tree`."""
    second = clone("second", source, commit)
    build(second, targets, "--build")
    for one, two in zip(outputs(tree, targets), outputs(second, targets)):
        run(sys.executable, ROOT / "scripts/compare_builds.py", one, two)


def build_environment():
    """Returns the environment of a build, in which each clone has its own target directory."""
    return {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}


def check_repository(version, tag):
    """Refuses a release if the repository is not ready. A dry run may contain placeholders."""
    changed = output_of("git", "status", "--porcelain")
    if changed:
        raise Refusal(f"these files are not committed; commit or remove them:\n{changed}")
    tags = output_of("git", "tag", "--list", "v*").splitlines()
    check_newer(version, manifest_version((ROOT / "Cargo.toml").read_text()), tags)
    release_changelog((ROOT / "CHANGELOG.md").read_text(), version, "")
    left = placeholders(lambda name: (ROOT / name).read_text())
    if tag and left:
        raise Refusal("\n  ".join(["replace these placeholders (packaging/README.md):", *left]))


def prepare(version, once, tag, targets):
    parse_version(version)
    check_repository(version, tag)
    run("make", "dist-tools", "sbcl")
    for target in targets:
        run("make", "build-tools", f"TARGET={target}")
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    first = clone("first", ROOT, output_of("git", "rev-parse", "HEAD"))
    change_files(first, version, now)
    # Fail here if the lock files do not match the manifests: cargo would otherwise change the lock files during the build.
    run("cargo", "metadata", "--locked", "--format-version", "1", directory=first, stdout=subprocess.DEVNULL)
    identity = {**os.environ, "GIT_AUTHOR_DATE": now.isoformat(), "GIT_COMMITTER_DATE": now.isoformat()}
    run("git", "commit", "--quiet", "--all", "--message", f"Version {version}", directory=first, env=identity)
    commit = output_of("git", "rev-parse", "HEAD", directory=first)
    build(first, targets)
    if not once:
        build_again(first, targets, first, commit)
    packages = WORK / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    run("packaging/combine.py", packages, *outputs(first, targets), directory=first)
    provenance = WORK / "provenance.json"
    with provenance.open("w") as file:
        repository = re.search(r'^repository = "(.*)"', (first / "Cargo.toml").read_text(), re.MULTILINE)
        address = repository.group(1) if repository else "https://example.invalid/sbcl-mcp"
        statement = ["packaging/attestation.py", "statement", packages, commit, f"refs/tags/v{version}", address]
        run(*statement, directory=first, stdout=file)
    notes = WORK / "notes.md"
    notes.write_text(release_notes((first / "CHANGELOG.md").read_text(), version))
    if tag:
        run("git", "fetch", "--quiet", first, commit)
        run("git", "merge", "--quiet", "--ff-only", commit)
        run("git", "tag", "--annotate", f"v{version}", "--message", f"Version {version}", commit)
    left = placeholders(lambda name: (first / name).read_text())
    print(report(version, tag, targets, packages, provenance, notes, left))


def report(version, tag, targets, packages, provenance, notes, left):
    """Returns the summary of the run, with the steps that a person must take."""
    lines = [
        "",
        f"release: the packages of {version} are in {packages}",
        f"release: the notes are in {notes}, the unsigned provenance is in {provenance}",
    ]
    if left:
        lines += ["release: replace these placeholders before you tag (packaging/README.md):"]
        lines += [f"  {line}" for line in left]
    if not tag:
        options = f"VERSION={version} TAG=yes" + (f" TARGETS='{' '.join(targets)}'" if targets else "")
        return "\n".join([*lines, f"release: this was a dry run. To commit and tag: make release {options}"])
    return "\n".join(
        [
            *lines,
            f"release: v{version} is tagged, and nothing was pushed. To publish (packaging/README.md), begin with:",
            f"  git push origin HEAD v{version}",
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparation = commands.add_parser("prepare", help="build, compare and test the packages; with --tag, commit and tag")
    preparation.add_argument("version")
    preparation.add_argument("--once", action="store_true", help="build once, without a comparison")
    preparation.add_argument("--target", action="append", default=[], help="also build for this Rust target")
    preparation.add_argument("--tag", action="store_true", help="commit and tag")
    commands.add_parser("again", help="build the last commit in a clone, and compare the packages with target/dist")
    commands.add_parser("notes", help="print the section of CHANGELOG.md about a version").add_argument("version")
    arguments = parser.parse_args()
    try:
        if arguments.command == "notes":
            print(release_notes((ROOT / "CHANGELOG.md").read_text(), arguments.version), end="")
        elif arguments.command == "again":
            build_again(ROOT, [], ROOT, output_of("git", "rev-parse", "HEAD"))
        elif arguments.once and arguments.tag:
            raise Refusal("a tag requires two equal builds: omit --once or --tag")
        else:
            prepare(arguments.version, arguments.once, arguments.tag, arguments.target)
    except Refusal as refusal:
        sys.exit(f"release: {refusal}")


if __name__ == "__main__":
    main()
