#!/usr/bin/env python3
"""Builds the packages: packaging/build.py PROGRAM OUTPUT [TARGET]

PROGRAM is the result of `cargo build --profile lto` in this environment, with `--target TARGET` for another machine.
OUTPUT is a directory that is deleted and created. Version, description and names come from Cargo.toml alone. Needs
cargo, cargo-about, cargo-cyclonedx, cargo-deb, npm, maturin and mcpb on the PATH, as scripts/dist.sh installs them.
"""

import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import glibc
import licences
import reproducible
import sbom

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
COMPLETIONS = {"bash": "sbcl-mcp.bash", "zsh": "_sbcl-mcp", "fish": "sbcl-mcp.fish"}
# Rust's machine names, and the names of the same machines in Node.js. An npm package contains the program for each machine.
NODE_ARCH = {"x86_64": "x64", "aarch64": "arm64"}

# The Rust target and the machine that the program is for.
TARGET = sys.argv[3] if len(sys.argv) > 3 else None
MACHINE = TARGET.split("-")[0] if TARGET else platform.machine()
FOR_TARGET = ["--target", TARGET] if TARGET else []
# The command that starts the program.
EMULATOR = [ROOT / "sbcl-core/src/emulate.sh"] if TARGET else []
if TARGET:
    glibc.OBJDUMP = f"{MACHINE}-linux-gnu-objdump"


def run(*command, directory=ROOT, **more):
    """Runs a command and returns its output. Shows the output only when the command fails."""
    done = subprocess.run([str(word) for word in command], cwd=directory, text=True, capture_output=True, **more)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} (in {directory}):\n{done.stdout}{done.stderr}")
    return done.stdout


def crate():
    """Returns the program's metadata in Cargo.toml."""
    packages = json.loads(run("cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"))["packages"]
    return next(package for package in packages if package["name"] == "sbcl-mcp")


def fresh(directory):
    """Creates an empty directory in place of an existing one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def install(source, target, executable=False):
    """Copies a file, with the permissions of files in a package."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if executable else 0o644)


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def read_json(path):
    return json.loads(path.read_text())


def stage(program, directory):
    """Collects the files of the archive and the Debian package: program, licences, documents, manual pages, completions."""
    install(program, directory / "sbcl-mcp", executable=True)
    for file in [*licences.FILES, ROOT / "README.md", ROOT / "CHANGELOG.md"]:
        install(file, directory / file.name)
    for file in ROOT.glob("docs/**/*.*"):
        install(file, directory / file.relative_to(ROOT))
    run(*EMULATOR, program, "man", directory / "man")
    for shell, name in COMPLETIONS.items():
        (directory / "completions").mkdir(exist_ok=True)
        (directory / "completions" / name).write_text(run(*EMULATOR, program, "completions", shell))


def archive(staged, output, name):
    """Writes a reproducible tar archive, with the same bytes for the same files."""

    def plain(member):
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
        member.mode = 0o755 if member.isdir() or member.mode & stat.S_IXUSR else 0o644
        return member

    with tarfile.open(output / f"{name}.tar.xz", "w:xz") as file:
        file.add(staged, arcname=name, filter=plain)


def debian(output):
    """Builds the .deb, whose contents are listed in Cargo.toml."""
    variant = [*FOR_TARGET, "--variant", "cross"] if TARGET else []
    run("cargo-deb", "--no-build", "--no-strip", "--output", output, "--deb-revision", "1", *variant)


def npm(program, crate, output, scratch):
    """Builds two npm packages: the one that users install, and its dependency with the program for this platform."""
    system, machine = platform.system().lower(), NODE_ARCH[MACHINE]
    name = f"sbcl-mcp-{system}-{machine}"
    main = {**read_json(PACKAGING / "npm/package.json"), "version": crate["version"]}
    main["mcpName"] = crate["metadata"]["mcp"]["name"]
    main["optionalDependencies"] = {f"sbcl-mcp-{system}-{each}": crate["version"] for each in NODE_ARCH.values()}
    own = {"name": name, "version": crate["version"], **read_json(PACKAGING / "npm/platform.json")}
    own.update({"os": [system], "cpu": [machine], "libc": ["glibc"]})
    write_json(scratch / "main/package.json", main)
    write_json(scratch / "platform/package.json", own)
    install(PACKAGING / "npm/bin/sbcl-mcp.js", scratch / "main/bin/sbcl-mcp.js", executable=True)
    install(PACKAGING / "npm/README.md", scratch / "main/README.md")
    install(program, scratch / "platform/bin/sbcl-mcp", executable=True)
    for package in ["main", "platform"]:
        for licence in licences.FILES:
            install(licence, scratch / package / licence.name)
        run("npm", "pack", "--pack-destination", output, directory=scratch / package)


def wheel(program, output):
    """Builds a wheel with the program alone, by pyproject.toml. maturin checks which C library the program requires."""
    # PROGRAM is in the directory of its profile, which is in the target's directory if there is a target.
    directory = program.parents[2 if TARGET else 1]
    run("maturin", "build", "--profile", "lto", "--locked", "--target-dir", directory, "--out", output, *FOR_TARGET)


def bundle(program, crate, output, scratch):
    """Builds an MCP bundle (.mcpb) for desktop applications."""
    manifest = read_json(PACKAGING / "mcpb/manifest.json")
    manifest = {"manifest_version": manifest.pop("manifest_version"), "version": crate["version"], **manifest}
    write_json(scratch / "manifest.json", manifest)
    install(program, scratch / "server/sbcl-mcp", executable=True)
    for licence in licences.FILES:
        install(licence, scratch / licence.name)
    run("mcpb", "validate", scratch / "manifest.json")
    bundle = output / f"sbcl-mcp-{crate['version']}-{MACHINE}-linux.mcpb"
    run("mcpb", "pack", scratch, bundle)
    reproducible.normalize_zip(bundle)


def server_json(crate, output):
    """Writes the description for the MCP registry. All packages have the same version."""
    server = {"name": crate["metadata"]["mcp"]["name"], "version": crate["version"]}
    server.update(read_json(PACKAGING / "registry/server.json"))
    for package in server["packages"]:
        package["version"] = crate["version"]
    write_json(output / "server.json", server)


def checksums(output):
    files = sorted(path for path in output.iterdir() if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (output / "SHA256SUMS").write_text("".join(lines))


def main():
    program, output = Path(sys.argv[1]).resolve(), fresh(Path(sys.argv[2]).resolve())
    # Cargo.toml names this directory for the .deb.
    scratch = fresh(ROOT / "target/packaging")
    of_crate = crate()
    licences.collect_crates()
    (scratch / "copyright").write_text(licences.debian_copyright())
    stage(program, scratch / "stage")
    steps = {
        "archive": lambda: archive(scratch / "stage", output, f"sbcl-mcp-{of_crate['version']}-{MACHINE}-linux"),
        "Debian package": lambda: debian(output),
        "npm packages": lambda: npm(program, of_crate, output, scratch / "npm"),
        "wheel": lambda: wheel(program, output),
        "MCP bundle": lambda: bundle(program, of_crate, output, scratch / "mcpb"),
        "server.json": lambda: server_json(of_crate, output),
        "bill of materials": lambda: sbom.write(
            program,
            f"{MACHINE}-unknown-linux-gnu",
            output / f"sbcl-mcp-{of_crate['version']}-{MACHINE}-linux.cdx.json",
        ),
        "checksums": lambda: checksums(output),
    }
    for name, make in steps.items():
        print(f"dist: {name}", flush=True)
        make()


if __name__ == "__main__":
    main()
