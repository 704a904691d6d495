#!/usr/bin/env bash
# Builds the book of docs/ in target/book. mdBook is installed once, in the cache.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.5.4
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sbcl-mcp/mdbook-$version
mdbook=$cache/bin/mdbook
if [ ! -x "$mdbook" ]; then
    # Without the server that watches for changes: that is most of its dependencies.
    cargo install mdbook --version "$version" --locked --no-default-features --features search --root "$cache"
fi
"$mdbook" build --dest-dir "$PWD/${CARGO_TARGET_DIR:-target}/book"
echo "book: ${CARGO_TARGET_DIR:-target}/book/index.html"
