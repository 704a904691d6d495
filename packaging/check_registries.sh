#!/usr/bin/env bash
# packaging/check_registries.sh OUTPUT
# Runs the checks that the registries make on an upload for the packages in the directory OUTPUT. Uploads nothing.
# packaging/check.py checks the .deb (lintian), the bundle (mcpb) and server.json (schema).
set -euo pipefail
cd "$(dirname "$0")/.."
output=$1

for package in "$output"/*.tgz; do
    publint run --strict "$package"
done
twine check --strict "$output"/*.whl
# Cargo packages each crate as if the other crates were already in the registry, which needs Rust 1.90.
# packaging/check_crates.sh builds the crates.
cargo publish --quiet --dry-run --no-verify --allow-dirty --locked \
    --package lisp-syntax --package sbcl-core --package sbcl-build --package sbcl-mcp
# GitHub creates its attestations from these files.
packaging/attestation.py check "$output"
echo "check: all checks of the registries passed"
