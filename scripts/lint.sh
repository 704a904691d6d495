#!/usr/bin/env bash
# Runs every static check: formatting, lints, documentation, generated code.
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
    echo "== $*"
    "$@"
}

# check_bindings: fails when the bindings in the repository differ from those that bindgen generates. The comparison is
# with the working tree, not with the last commit, because header and bindings may have been changed together.
check_bindings() {
    local bindings=src/image/bindings.rs status=0
    before=$(mktemp)
    trap 'rm "$before"' EXIT
    cp "$bindings" "$before"
    step cargo check --quiet --lib --no-default-features --features bindgen
    # bindgen's output is compared after formatting.
    rustfmt --edition 2024 "$bindings"
    diff -u "$before" "$bindings" || status=$?
    if [ $status != 0 ]; then
        echo "lint: $bindings did not match ffi/sbcl_host.h and has been generated again; commit this file" >&2
        return 1
    fi
}

step cargo fmt --all --check
step cargo clippy --quiet --workspace --all-targets -- -D warnings
step cargo clippy --quiet --lib --no-default-features -- -D warnings
RUSTDOCFLAGS="-D warnings" step cargo doc --quiet --no-deps --workspace
check_bindings
echo "lint: no problems"
