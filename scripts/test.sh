#!/usr/bin/env bash
# Runs every test suite with the release profile; with --no-run, only compiles the suites. The end-to-end tests use the binary
# that cargo test has built. All suites run even if an earlier one fails. The last line has the number of tests in all suites.
set -uo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
log=$target/test.log
: >"$log"
failed=()

suite() {
    local name=$1
    shift
    echo "== $name: $*"
    "$@" 2>&1 | tee -a "$log"
    [ "${PIPESTATUS[0]}" = 0 ] || failed+=("$name")
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

# Most tests spend most of their time waiting for a process, a timer or a lock.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((2 * $(nproc)))}
# A differing snapshot fails the test and leaves no file.
export INSTA_UPDATE=no
# All commands use the same features, so that the library is compiled only once.
features=(--features sbcl-mcp/num-bigint)
if [ "${1:-}" = --no-run ]; then
    exec cargo test --release --workspace --no-run "${features[@]}"
fi
suite "Rust" cargo test --release --workspace --no-fail-fast "${features[@]}"
suite "Feature guarded-messages" cargo test --release --features guarded-messages --test library_soundness
for example in readme embed guided_tour plugin_host symbolic live_service axum_rules; do
    suite "Example $example" cargo run --quiet --release "${features[@]}" --example "$example"
done
suite "Recording" scripts/recording.py --check "$target/release/sbcl-mcp"
suite "Python SDK 1.x" scripts/clients.sh python-1
suite "Python SDK 2.x" scripts/clients.sh python-2
suite "Agent frameworks" scripts/clients.sh adapters
suite "TypeScript SDKs" scripts/clients.sh typescript
suite "Conformance" scripts/clients.sh conformance

for name in ${failed[@]+"${failed[@]}"}; do
    echo "FAILED: $name"
done
count
[ ${#failed[@]} = 0 ]
