#!/usr/bin/env bash
# Runs the server's suite again and again (SBCL_MCP_ROUNDS: how often, 10) beside a load that keeps every processor busy. A test
# that passes on a quiet machine only fails here. The log stays in target/flaky.log; each test that failed is listed at the end.
set -uo pipefail
cd "$(dirname "$0")/.."

# As many at a time as in scripts/test.sh.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((2 * $(nproc)))}
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
