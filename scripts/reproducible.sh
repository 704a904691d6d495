# shellcheck shell=bash
# Sourced by scripts/dist.sh, in the repository's directory: with these settings, two builds of one commit have the same
# bytes, whatever the directory, the time and the user's settings.
umask 022
export LC_ALL=C.UTF-8 TZ=UTC
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

# remap_paths: replaces the paths of this machine that the compiler stores in programs. The name of cargo's directory of
# sources depends on the registry.
remap_paths() {
    local flags=("--remap-path-prefix=$PWD=/sbcl-mcp") sources
    for sources in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do
        flags+=("--remap-path-prefix=$sources=/crates")
    done
    local IFS=$'\x1f'
    export CARGO_ENCODED_RUSTFLAGS="${flags[*]}"
}

# Creates the directories of the sources. The lists of crates and licences need the crates of every platform.
cargo fetch --quiet --locked
remap_paths
