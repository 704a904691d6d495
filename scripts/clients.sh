#!/usr/bin/env bash
# Runs the end-to-end tests with the official SDKs, agent frameworks and conformance tools:
# scripts/clients.sh python-1|python-2|adapters|typescript|conformance
# Their pinned dependencies are installed under the target directory, and again only when the pins change.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
export SBCL_MCP_BIN=${SBCL_MCP_BIN:-$target/release/sbcl-mcp}
export PYTHONDONTWRITEBYTECODE=1 NODE_COMPILE_CACHE=$target/clients/node-cache
tests=$PWD/tests/clients

# environment NAME REQUIREMENTS: creates a virtual environment with exactly these packages and prints its path.
# The commands are chained with &&, because `set -e` has no effect inside $(...).
environment() {
    local directory=$target/clients/$1 requirements=$2
    # The interpreter is started, too, because the interpreter of a moved or incomplete environment does not work.
    if ! cmp -s "$requirements" "$directory/installed.txt" || ! "$directory/bin/python" -c '' 2>/dev/null; then
        echo "clients: installing $1" >&2
        rm -rf "$directory" &&
            python3 -m venv "$directory" >&2 &&
            "$directory/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2 &&
            cp "$requirements" "$directory/installed.txt" || return 1
    fi
    echo "$directory"
}

# python_client NAME TESTS REQUIREMENTS: runs the pytest suite in the directory TESTS.
python_client() {
    local directory
    directory=$(environment "$1" "$tests/$2/$3")
    echo "clients: Python SDK $("$directory/bin/python" -c 'from importlib.metadata import version; print(version("mcp"))')"
    cd "$tests/$2"
    "$directory/bin/python" -m pytest -q --color=no --basetemp "$target/clients/pytest"
}

# node_is_recent_enough: succeeds when the installed Node.js is at least 22.19, which the Inspector requires. The
# versions of distributions are often older.
node_is_recent_enough() {
    command -v npm >/dev/null &&
        node -e 'const [a, b] = process.versions.node.split("."); process.exit(a * 100 + +b < 2219 ? 1 : 0)' 2>/dev/null
}

# node_client DIRECTORY NAME: runs the npm tests in DIRECTORY, with a pinned Node.js if the installed one is too old.
node_client() {
    local directory=$tests/$1
    if ! node_is_recent_enough; then
        local node
        node=$(environment node "$tests/typescript/node.txt")
        PATH=$node/bin:$PATH
    fi
    local modules=$directory/node_modules lock=$directory/package-lock.json
    if ! cmp -s "$lock" "$modules/.installed.json"; then
        echo "clients: installing $2"
        (cd "$directory" && npm ci --silent --ignore-scripts)
        cp "$lock" "$modules/.installed.json"
    fi
    echo "clients: $2, Node.js $(node --version)"
    cd "$directory"
    npm --silent test
}

case ${1:-} in
    python-1) python_client python-1 python requirements-1.txt ;;
    python-2) python_client python-2 python requirements-2.txt ;;
    adapters) python_client adapters adapters requirements.txt ;;
    typescript) node_client typescript "the TypeScript SDKs" ;;
    conformance) node_client conformance "the conformance suite and the Inspector" ;;
    *)
        echo "usage: scripts/clients.sh python-1|python-2|adapters|typescript|conformance" >&2
        exit 2
        ;;
esac
