#!/usr/bin/env bash
# Runs the server's test suite repeatedly (SBCL_MCP_ROUNDS, 10 by default) under a load that keeps every processor busy, to
# find tests that pass only on a quiet machine. The log is target/flaky.log; the tests that failed are listed at the end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

rounds=${SBCL_MCP_ROUNDS:-10}
target=${CARGO_TARGET_DIR:-target}
log=$target/flaky.log
mkdir -p "$target"
export SBCL_MCP_BIN=${SBCL_MCP_BIN:-$(realpath "$target")/release/sbcl-mcp}
# The same programs as in scripts/test.sh.
rust=(cargo test --workspace --features sbcl-mcp/num-bigint --test mcp)
{ cargo build --release && "${rust[@]}" --no-run; } || exit 1
: >"$log"

load=()
for _ in $(seq "$(nproc)"); do
    (while :; do head -c 64M /dev/zero | sha256sum >/dev/null; done) &
    load+=($!)
done
trap 'kill "${load[@]}" 2>/dev/null' EXIT

# run_tests: runs the suite as scripts/test.sh does: the tests that measure delays last, one on each processor.
run_tests() {
    local status=0
    RUST_TEST_THREADS=$((3 * $(nproc))) "${rust[@]}" -- --skip stalls:: --skip heap_exhaust || status=1
    RUST_TEST_THREADS=$(nproc) "${rust[@]}" -- stalls:: heap_exhaust || status=1
    return $status
}

failed=0
for round in $(seq "$rounds"); do
    echo "==== round $round of $rounds ($(date -u +%H:%M:%S))" | tee -a "$log"
    run_tests >>"$log" 2>&1 || failed=$((failed + 1))
    grep '^test result: ' "$log" | tail -n 2
done
grep '^test .* FAILED$' "$log" | sort | uniq -c
echo "$failed of $rounds rounds failed; the log: $log"
[ $failed = 0 ]
