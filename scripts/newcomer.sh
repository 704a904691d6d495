#!/usr/bin/env bash
# scripts/newcomer.sh COMMAND...: runs COMMAND as on a new contributor's machine: with an empty home directory and temporary
# directory, and without the caches of cargo, npm, pip, ASDF and this project. The configuration of registries is kept.
# Files that COMMAND leaves in the temporary directory are listed and make the run fail.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }

scratch=$(mktemp -d "${TMPDIR:-/tmp}/new.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/home/.cargo" "$scratch/tmp"
chmod 1777 "$scratch/tmp"
chmod 755 "$scratch"
old_cargo=${CARGO_HOME:-$HOME/.cargo}
for file in config.toml config; do
    [ ! -f "$old_cargo/$file" ] || cp "$old_cargo/$file" "$scratch/home/.cargo/"
done
for file in .npmrc .config/pip/pip.conf .pip/pip.conf; do
    [ ! -f "$HOME/$file" ] || install -D "$HOME/$file" "$scratch/home/$file"
done
# The Rust toolchain is shared, not tested.
export RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
[ -d "$RUSTUP_HOME" ] || unset RUSTUP_HOME
ln -s "$old_cargo/bin" "$scratch/home/.cargo/bin"
export HOME=$scratch/home TMPDIR=$scratch/tmp PIP_NO_CACHE_DIR=1
unset CARGO_HOME CARGO_TARGET_DIR XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR XDG_STATE_HOME

status=0
"$@" || status=$?
left=$(find "$TMPDIR" -mindepth 1 -maxdepth 1 ! -name '.*')
if [ -n "$left" ]; then
    echo "newcomer: files left in the temporary directory:"
    echo "$left" | sed 's/^/  /' | head -n 40
    [ $status != 0 ] || status=1
fi
exit $status
