#!/usr/bin/env bash
# Every check of form: formatting, lints, documentation, generated code.
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
    echo "== $*"
    "$@"
}

# The bindings in the repository must be those that the header gives. They are compared with what was there before,
# not with the last commit: both may just have been changed.
check_bindings() {
    local bindings=src/image/bindings.rs before status=0
    before=$(mktemp)
    cp "$bindings" "$before"
    step cargo check --quiet --lib --no-default-features --features bindgen
    # What bindgen writes is compared as rustfmt would have it.
    rustfmt --edition 2024 "$bindings"
    diff -u "$before" "$bindings" || status=$?
    rm "$before"
    if [ $status != 0 ]; then
        echo "lint: $bindings was not what ffi/sbcl_host.h gives; it is now" >&2
        return 1
    fi
}

step cargo fmt --all --check
step cargo clippy --quiet --workspace --all-targets -- -D warnings
step cargo clippy --quiet --lib --no-default-features -- -D warnings
RUSTDOCFLAGS="-D warnings" step cargo doc --quiet --no-deps --workspace
check_bindings
echo "lint: all is well"
