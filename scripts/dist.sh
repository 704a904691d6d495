#!/usr/bin/env bash
# scripts/dist.sh [--build]
# Builds the packages in target/dist and, without --build, tests each, as their users and registries would. The program is
# built for the oldest systems that this machine can build for. Needs Python 3.10, Node.js 20 and, the first time, the
# network.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$PWD/target
# shellcheck source=scripts/packagers.sh
. scripts/packagers.sh
# shellcheck source=scripts/reproducible.sh
. scripts/reproducible.sh
if [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null; then
    program=$(scripts/old_glibc.sh)
    # With the same compiler, later cargo commands find the program built.
    compiler=$(readlink "$target/old-glibc/cc")
    environment=(CC="$compiler" CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER="$compiler")
    # The program and the .deb may require at most the libraries of the old Debian; the .deb's dependencies come from it.
    export SBCL_MCP_OLDEST_GLIBC=2.31 DPKG_ADMINDIR=$target/old-glibc/debian/var/lib/dpkg
else
    echo "dist: without root and debootstrap, the program needs a glibc as new as that of this system"
    cargo build --profile lto
    program=$target/lto/sbcl-mcp
    environment=()
fi

env "${environment[@]}" packaging/build.py "$program" "$target/dist"
[ "${1:-}" != --build ] || exit 0
env -u DPKG_ADMINDIR packaging/check.py "$target/dist"
packaging/check_workflows.mjs "$tools/node/node_modules"
packaging/check_registries.sh "$target/dist"
packaging/check_crates.sh
(cd "$target/dist" && cat SHA256SUMS)
