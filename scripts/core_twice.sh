#!/usr/bin/env bash
# Builds SBCL, the library and the core twice, each time with an empty cache, and reports the bytes that differ (make core-twice).
# The cache has the same path both times, because SBCL's identifier depends on the compiler's path and objects are placed by
# the lengths of paths. Takes twice the time of SBCL's build.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)/core-twice
rm -rf "$target"
cargo build --quiet -p sbcl-core
for build in first second; do
    rm -rf "$target/cache"
    mkdir -p "$target/$build" "$target/cache"
    XDG_CACHE_HOME=$target/cache cargo run --quiet -p sbcl-core | while read -r _ file; do
        cp "$file" "$target/$build/"
    done
    cp "$target"/cache/sbcl-mcp/sbcl-*/output/sbcl.core "$target/$build/sbcl-alone.core"
done

status=0
for core in sbcl-alone.core sbcl.core; do
    echo "== $core"
    scripts/compare_builds.py "$target/first/$core" "$target/second/$core" || status=1
done
for library in "$target"/first/libsbcl.*; do
    cmp "$library" "$target/second/$(basename "$library")" || status=1
done
exit $status
