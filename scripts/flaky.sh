#!/usr/bin/env bash
# Runs the server's test suite repeatedly (SBCL_MCP_ROUNDS, 10 by default) under a load that keeps every processor busy, to
# find tests that pass only on a quiet machine. The log is target/flaky.log; the tests that failed are listed at the end.
set -uo pipefail
cd "$(dirname "$0")/.."

# The same number of test threads as in scripts/test.sh.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((3 * $(nproc)))}
rounds=${SBCL_MCP_ROUNDS:-10}
target=${CARGO_TARGET_DIR:-target}
log=$target/flaky.log
cargo test --release --test mcp --no-run || exit 1
: >"$log"

load=()
for _ in $(seq "$(nproc)"); do
    (while :; do head -c 64M /dev/zero | sha256sum >/dev/null; done) &
    load+=($!)
done
trap 'kill "${load[@]}" 2>/dev/null' EXIT

failed=0
for round in $(seq "$rounds"); do
    echo "==== round $round of $rounds ($(date -u +%H:%M:%S))" | tee -a "$log"
    cargo test --release --test mcp -- "$@" >>"$log" 2>&1 || failed=$((failed + 1))
    grep '^test result: ' "$log" | tail -n 1
done
grep '^test .* FAILED$' "$log" | sort | uniq -c
echo "$failed of $rounds rounds failed; the log: $log"
[ $failed = 0 ]
