#!/usr/bin/env bash
# scripts/dist.sh [--build] [TARGET]
# Builds the packages in target/dist and, without --build, tests each package as its users and its registry would. The program
# is built for the oldest systems that this machine can build for. Needs Python 3.11, Node.js 20 and, the first time, the
# network. With TARGET, a Rust target, the script builds packages for another machine, in target/dist-MACHINE, and, as root,
# tests them in an emulated Debian.
set -euo pipefail
cd "$(dirname "$0")/.."

only_build=no
if [ "${1:-}" = --build ]; then
    only_build=yes
    shift
fi
target=$PWD/target
machine=$(uname -m)
triple=${1:-}
[ "${triple%%-*}" != "$machine" ] || triple=

# shellcheck source=scripts/packagers.sh
. scripts/packagers.sh
# shellcheck source=scripts/reproducible.sh
. scripts/reproducible.sh
# Later cargo commands need the same environment; otherwise cargo would build the program again.
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
    "${environment[@]}" cargo build --profile lto --target "$triple" --target-dir "$target"
    program=$target/$triple/lto/sbcl-mcp
else
    echo "dist: without root and debootstrap, the program needs a glibc as new as this system's"
    cargo build --profile lto --target-dir "$target"
    program=$target/lto/sbcl-mcp
fi

"${environment[@]}" packaging/build.py "$program" "$output" ${triple:+"$triple"}
[ $only_build = no ] || exit 0
if [ -z "$triple" ]; then
    env -u DPKG_ADMINDIR packaging/check.py "$output"
    packaging/check_workflows.mjs "$tools/node/node_modules"
    packaging/check_crates.sh
elif [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null; then
    # The oldest Debian, with the packages that npm packages and wheels need.
    debian=$(scripts/debian.sh bullseye arm64 nodejs python3-venv)
    packaging/check.py "$output" "$debian"
fi
packaging/check_registries.sh "$output"
(cd "$output" && cat SHA256SUMS)
