#!/usr/bin/env bash
# scripts/core_twice.sh [--sbcl]
# Builds the core twice with the same SBCL, and fails if the cores differ. With --sbcl, the script also builds SBCL and its
# library twice, which takes minutes, reports the bytes that differ, and fails if there are any. The script's own cache always
# has the same path, because SBCL puts objects at addresses that depend on the lengths of paths.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)/core-twice
cache=$target/cache/sbcl-mcp
users=${XDG_CACHE_HOME:-$HOME/.cache}/sbcl-mcp

# build NAME: builds the stages that are missing in the cache, and copies the library and the core to the directory NAME.
build() {
    local file
    mkdir -p "$target/$1"
    XDG_CACHE_HOME=$target/cache cargo run --quiet -p sbcl-core | while read -r _ file; do cp "$file" "$target/$1/"; done
}

rm -rf "$target"
mkdir -p "$cache"
# Use the SBCL in the user's cache if it has been built.
for directory in "$users"/sources "$users"/sbcl-*; do
    [ ! -e "$directory" ] || cp -r "$directory" "$cache/"
done
build first
rm -r "$cache"/core-*
build second
scripts/compare_builds.py "$target/first/sbcl.core" "$target/second/sbcl.core"
[ "${1:-}" = --sbcl ] || exit 0

for name in third fourth; do
    rm -rf "$cache"/{core,library,sbcl}-*
    build $name
    cp "$cache"/sbcl-*/output/sbcl.core "$target/$name/sbcl-alone.core"
done
status=0
cmp "$target"/third/libsbcl.* "$target"/fourth/libsbcl.* || status=1
[ $status != 0 ] || echo "core-twice: the libraries are equal"
scripts/compare_builds.py "$target/third/sbcl-alone.core" "$target/fourth/sbcl-alone.core" || status=1
exit $status
