#!/usr/bin/env bash
# scripts/dist.sh [TARGET]
# Builds the packages in target/dist and tests each, with pinned tools that are installed below the target directory.
# The program is built for the oldest systems that this machine can build for. Needs Python 3.10, Node.js 20 and, the
# first time, the network. With TARGET, a Rust target, the packages are for another machine and in target/dist-MACHINE;
# as root they are tested in an emulated Debian.
set -euo pipefail
cd "$(dirname "$0")/.."

CARGO_DEB=3.8.0
target=$PWD/target
tools=$target/packagers
mkdir -p "$tools"
machine=$(uname -m)
triple=${1:-}
[ "${triple%%-*}" != "$machine" ] || triple=

# With the same environment, later cargo commands find the program built.
environment=(env)
output=$target/dist
if [ -n "$triple" ]; then
    environment=(scripts/cross.sh "$triple")
    output=$target/dist-${triple%%-*}
fi
if [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null; then
    program=$(scripts/old_glibc.sh lto "$triple")
    # The program and the .deb may require at most the libraries of the old Debian; the .deb's dependencies come from it.
    export SBCL_MCP_OLDEST_GLIBC=2.31
    if [ -z "$triple" ]; then
        compiler=$(readlink "$target/old-glibc/cc")
        environment+=(CC="$compiler" "CARGO_TARGET_${machine^^}_UNKNOWN_LINUX_GNU_LINKER=$compiler")
        export DPKG_ADMINDIR=$target/old-glibc/debian/var/lib/dpkg
    fi
elif [ -n "$triple" ]; then
    echo "dist: without root and debootstrap, the program needs a glibc as new as the cross compiler's, and is not tested"
    "${environment[@]}" cargo build --profile lto --target "$triple"
    program=$target/$triple/lto/sbcl-mcp
else
    echo "dist: without root and debootstrap, the program needs a glibc as new as that of this system"
    cargo build --profile lto
    program=$target/lto/sbcl-mcp
fi

# is_installed FILE: succeeds when the packages that FILE lists are installed.
is_installed() { cmp -s "$1" "$tools/installed/$(basename "$1")"; }
mark_installed() { mkdir -p "$tools/installed" && cp "$1" "$tools/installed/"; }

if ! is_installed packaging/tools/requirements.txt; then
    echo "dist: installing Python's tools"
    rm -rf "$tools/python"
    python3 -m venv "$tools/python"
    "$tools/python/bin/python" -m pip install --quiet --disable-pip-version-check -r packaging/tools/requirements.txt
    mark_installed packaging/tools/requirements.txt
fi
if ! is_installed packaging/tools/package-lock.json; then
    echo "dist: installing Node.js' tools"
    mkdir -p "$tools/node"
    cp packaging/tools/package.json packaging/tools/package-lock.json packaging/tools/.npmrc "$tools/node"
    (cd "$tools/node" && npm ci --silent --ignore-scripts && node node_modules/@anthropic-ai/claude-code/install.cjs)
    mark_installed packaging/tools/package-lock.json
fi
if [ "$("$tools/bin/cargo-deb" --version 2>/dev/null)" != "cargo-deb $CARGO_DEB" ]; then
    echo "dist: installing cargo-deb"
    cargo install --quiet --locked --root "$tools" cargo-deb --version "$CARGO_DEB"
fi
export PATH=$tools/python/bin:$tools/node/node_modules/.bin:$tools/bin:$PATH

"${environment[@]}" packaging/build.py "$program" "$output" ${triple:+"$triple"}
if [ -z "$triple" ]; then
    env -u DPKG_ADMINDIR packaging/check.py "$output"
    packaging/check_workflows.mjs "$tools/node/node_modules"
    packaging/check_crates.sh
elif [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null; then
    # The oldest Debian, with what npm packages and wheels need.
    debian=$(scripts/debian.sh bullseye arm64 nodejs python3-venv)
    packaging/check.py "$output" "$debian"
fi
(cd "$output" && cat SHA256SUMS)
