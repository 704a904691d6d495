#!/usr/bin/env bash
# scripts/sanitize.sh address|thread
# Runs unit tests of the Rust code under AddressSanitizer or ThreadSanitizer, with a nightly compiler and its rust-src (rustup
# toolchain install nightly --component rust-src). The tests need no Lisp: sanitizers do not understand SBCL's heap and signals.
set -euo pipefail
cd "$(dirname "$0")/.."

sanitizer=${1:-}
case $sanitizer in
    address) tests=() ;;
    # Tests in which several threads use a queue. ThreadSanitizer does not support fences, so tests that rely on
    # a fence are left out.
    thread) tests=(os:: rpc:: session:: image::message_buffer) ;;
    *)
        echo "usage: scripts/sanitize.sh address|thread" >&2
        exit 2
        ;;
esac
host=$(rustc --version --verbose | sed -n 's/^host: //p')
# The standard library is built with the sanitizer, too. Because of --target, build scripts are built without the sanitizer.
RUSTFLAGS=-Zsanitizer=$sanitizer RUST_TEST_THREADS=$(nproc) \
    cargo +nightly test -Zbuild-std --target "$host" --target-dir "${CARGO_TARGET_DIR:-target}/sanitize-$sanitizer" \
    --package sbcl-mcp --package lisp-syntax --lib -- "${tests[@]}"
