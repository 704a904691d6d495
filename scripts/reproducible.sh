# shellcheck shell=bash
# Sourced by scripts/dist.sh in the repository's directory. With these settings, two builds of one commit have the same bytes,
# whatever the directory, the time and the user's settings.
umask 022
export LC_ALL=C.UTF-8 TZ=UTC
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

# remap_paths: makes the compiler store neutral paths in programs instead of this machine's paths. The name of the directory
# in which cargo keeps sources depends on the registry.
remap_paths() {
    local flags=("--remap-path-prefix=$PWD=/sbcl-mcp") sources
    for sources in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do
        flags+=("--remap-path-prefix=$sources=/crates")
    done
    local IFS=$'\x1f'
    export CARGO_ENCODED_RUSTFLAGS="${flags[*]}"
}

# Download the sources, whose directories remap_paths lists. The lists of crates and licences need the crates of all
# platforms.
cargo fetch --quiet --locked
remap_paths
