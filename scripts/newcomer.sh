#!/usr/bin/env bash
# scripts/newcomer.sh COMMAND...: runs COMMAND as on a newcomer's machine: an empty home directory, with nothing that cargo, npm,
# pip, ASDF or this project has kept, and an empty temporary directory. How registries are reached stays as it is set up.
# What COMMAND leaves in the temporary directory is listed and is a failure: whatever runs here removes what it makes.
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
# The toolchain is not what is tried.
export RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
[ -d "$RUSTUP_HOME" ] || unset RUSTUP_HOME
ln -s "$old_cargo/bin" "$scratch/home/.cargo/bin"
export HOME=$scratch/home TMPDIR=$scratch/tmp PIP_NO_CACHE_DIR=1
unset CARGO_HOME CARGO_TARGET_DIR XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR XDG_STATE_HOME

status=0
"$@" || status=$?
left=$(find "$TMPDIR" -mindepth 1 -maxdepth 1 ! -name '.*')
if [ -n "$left" ]; then
    echo "newcomer: left in the temporary directory:"
    echo "$left" | sed 's/^/  /' | head -n 40
    [ $status != 0 ] || status=1
fi
exit $status
