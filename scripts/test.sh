#!/usr/bin/env bash
# Runs every test suite; with --no-run, only compiles the suites and the server. The test programs are compiled without
# optimization, and start the optimized server. All suites run even if an earlier one fails. Most tests wait for processes,
# timers and locks most of the time, so four groups of suites run at the same time: the server's suite, clients of the server,
# programs outside the workspace, and the rest. The output of the other groups is printed after that of the server's suite. The
# tests that measure delays, or that fill a heap faster than an overloaded machine could react, run last, one on each processor.
# The last line has the number of tests in all suites.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
log=$target/test.log
client_log=$target/test-clients.log
bundled_log=$target/test-bundled.log
other_log=$target/test-other.log
failed=$target/test-failed.txt
: >"$log"
: >"$failed"
# 1 once a suite has failed. A group of suites that runs in the background has its own copy, and returns it.
status=0

# suite NAME COMMAND...: runs a suite, and prints its time. If it fails, its name is added to the list of failed suites.
suite() {
    local name=$1 TIMEFORMAT="== $1: %R s, of processor time %U s and %S s in the system"
    shift
    echo "== $name: $*"
    { time "$@"; } 2>&1 && return
    status=1
    echo "$name" >>"$failed"
    return 1
}

# count: sums the summary lines of cargo test, pytest and Node.js' test runner.
count() {
    awk '
        /^test result: / { for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p += $(i - 1); if ($i ~ /^failed/) f += $(i - 1) } }
        /^[0-9]+ (passed|failed).* in [0-9.]+s/ { for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p += $(i - 1); if ($i ~ /^failed/) f += $(i - 1) } }
        /^ℹ pass / { p += $3 }
        /^ℹ fail / { f += $3 }
        END { printf "%d passed, %d failed\n", p, f }
    ' "$log"
}

# other_tests: prints the options of cargo test for all targets with tests except the server's suite.
other_tests() {
    cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
targets = [target for package in json.load(sys.stdin)["packages"] for target in package["targets"]]
print("--lib", "--bins", *("--test=" + t["name"] for t in targets if t["kind"] == ["test"] and t["name"] not in ("bundled", "mcp")))'
}

# The number of tests that run at the same time in each suite. Most tests spend most of their time waiting.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((3 * $(nproc)))}
# A differing snapshot fails the test and leaves no file.
export INSTA_UPDATE=no
export SBCL_MCP_BIN=${SBCL_MCP_BIN:-$(realpath "$target")/release/sbcl-mcp}
# The commands use the same features, so that the library is compiled only once for them.
rust=(cargo test --workspace --features sbcl-mcp/num-bigint)
# The server is compiled at the same time as the test programs: each profile has its own directory, which one cargo can use at a
# time.
cargo build --quiet --release &
"${rust[@]}" --no-run
compiled=$?
wait $! && [ $compiled = 0 ] || exit 1
[ "${1:-}" != --no-run ] || exit 0

other_suites() {
    local options
    options=$(other_tests) || { status=1 && echo "list of the tests" >>"$failed"; }
    # This suite comes first, because it compiles the library again, and another suite of cargo waits for this.
    suite "Feature guarded-messages" "${rust[@]}" --features sbcl-mcp/guarded-messages --test library_soundness
    # shellcheck disable=SC2086 # The options have no spaces.
    suite "Rust" "${rust[@]}" --no-fail-fast $options
    suite "Documentation" "${rust[@]}" --doc
    for example in readme embed guided_tour plugin_host symbolic live_service axum_rules; do
        suite "Example $example" cargo run --quiet --features sbcl-mcp/num-bigint --example "$example"
    done
    return $status
}

client_suites() {
    suite "Recording" scripts/recording.py --check "$SBCL_MCP_BIN"
    suite "Python SDK 1.x" scripts/clients.sh python-1
    suite "Python SDK 2.x" scripts/clients.sh python-2
    suite "Agent frameworks" scripts/clients.sh adapters
    suite "TypeScript SDKs" scripts/clients.sh typescript
    suite "Conformance" scripts/clients.sh conformance
    return $status
}

suite "Bundled programs" "${rust[@]}" --test bundled >"$bundled_log" 2>&1 &
groups=($!)
client_suites >"$client_log" 2>&1 &
groups+=($!)
other_suites >"$other_log" 2>&1 &
groups+=($!)
suite "Server" "${rust[@]}" --test mcp -- --skip stalls:: --skip heap_exhaust | tee -a "$log" || status=1
echo "== The other suites"
# Ends when the other suites have ended.
tail -n +1 -f --pid=$! "$other_log"
for group in "${groups[@]}"; do wait "$group" || status=1; done
cat "$client_log" "$bundled_log"
cat "$other_log" "$client_log" "$bundled_log" >>"$log"
RUST_TEST_THREADS=$(nproc) suite "Delays" "${rust[@]}" --test mcp -- stalls:: heap_exhaust | tee -a "$log" || status=1

# The output of the failed Rust tests, once more.
awk '/^failures:$/ { show = 1 } show; /^test result: / { show = 0 }' "$log"
sed 's/^/FAILED: /' "$failed"
[ $status = 0 ] || [ -s "$failed" ] || echo "FAILED: a group of suites ended early, or $failed could not be written"
count
exit $status
