#!/usr/bin/env bash
# packaging/check_registries.sh OUTPUT
# Checks the packages in the directory OUTPUT with the tools of their registries, as these would check an upload. Uploads
# nothing. packaging/check.py checks the .deb (lintian), the bundle (mcpb) and server.json (schema).
set -euo pipefail
cd "$(dirname "$0")/.."
output=$1

for package in "$output"/*.tgz; do
    publint run --strict "$package"
done
twine check --strict "$output"/*.whl
# Each crate is packaged against the others as they would be in the registry, which needs Rust 1.90. They are built by
# packaging/check_crates.sh.
cargo publish --quiet --dry-run --no-verify --allow-dirty --locked \
    --package lisp-syntax --package sbcl-core --package sbcl-build --package sbcl-mcp
# GitHub's attestations are made of these files.
packaging/attestation.py check "$output"
echo "check: registries: fine"
