#!/usr/bin/env bash
# Builds the book of docs/ in target/book. mdBook is installed once, in the cache.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.5.4
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sbcl-mcp/mdbook-$version
mdbook=$cache/bin/mdbook
if [ ! -x "$mdbook" ]; then
    # Without the features `watch` and `serve`, most of mdBook's dependencies are not needed.
    cargo install mdbook --version "$version" --locked --no-default-features --features search --root "$cache"
fi
target=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
"$mdbook" build --dest-dir "$target/book"
# Copy the Markdown files, to which llms.txt refers.
(cd docs && find . -name '*.md' -print0 | tar --null -T - -cf -) | tar -C "$target/book" -xf -
echo "book: $target/book/index.html"
