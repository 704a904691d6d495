# shellcheck shell=bash
# Sourced in the repository's directory: installs the pinned tools that build and check packages and workflows, unless they
# are already installed, and puts them on the PATH. The tools are in target/packagers, which may be a link to the same
# directory of another clone (scripts/release.py).
mkdir -p target/packagers
tools=$(cd target/packagers && pwd -P)

# is_installed FILE: succeeds when the packages that FILE lists are installed.
is_installed() { cmp -s "$1" "$tools/installed/$(basename "$1")"; }
mark_installed() { mkdir -p "$tools/installed" && cp "$1" "$tools/installed/"; }

if ! is_installed packaging/tools/requirements.txt; then
    echo "packagers: installing tools in Python"
    rm -rf "$tools/python"
    python3 -m venv "$tools/python"
    "$tools/python/bin/python" -m pip install --quiet --disable-pip-version-check -r packaging/tools/requirements.txt
    mark_installed packaging/tools/requirements.txt
fi
if ! is_installed packaging/tools/package-lock.json; then
    echo "packagers: installing tools for Node.js"
    mkdir -p "$tools/node"
    cp packaging/tools/package.json packaging/tools/package-lock.json packaging/tools/.npmrc "$tools/node"
    (cd "$tools/node" && npm ci --silent --ignore-scripts && node node_modules/@anthropic-ai/claude-code/install.cjs)
    mark_installed packaging/tools/package-lock.json
fi
if ! is_installed packaging/tools/cargo.txt; then
    echo "packagers: installing tools for cargo"
    while read -r name version features; do
        cargo install --quiet --locked --root "$tools" "$name" --version "$version" --features "$features"
    done < <(grep -v '^#' packaging/tools/cargo.txt)
    mark_installed packaging/tools/cargo.txt
fi
export PATH=$tools/python/bin:$tools/node/node_modules/.bin:$tools/bin:$PATH
