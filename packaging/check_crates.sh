#!/usr/bin/env bash
# Tests `cargo install` from the packaged crates, without the repository, as a user would. Works offline: SBCL and the
# crates that ours depend on are in their caches.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
names=(lisp-syntax sbcl-build sbcl-core sbcl-mcp)
cargo package --quiet --no-verify --offline --allow-dirty --target-dir "$scratch" "${names[@]/#/--package=}"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
patches=()
for name in "${names[@]}"; do
    tar -xzf "$scratch/package/$name-$version.crate" -C "$scratch"
    patches+=(--config "patch.crates-io.$name.path='$scratch/$name-$version'")
done
# The dependencies are already built in this directory, with cargo's default flags.
export CARGO_TARGET_DIR=$PWD/target
unset CARGO_ENCODED_RUSTFLAGS
cd "$scratch"
cargo install --quiet --offline --debug --path "sbcl-mcp-$version" --root "$scratch/root" "${patches[@]}"
answer=$(env -i "$scratch/root/bin/sbcl-mcp" eval '(+ 1 2)')
[ "$answer" = "=> 3" ] || { echo "check: the program from the crates answers: $answer" >&2 && exit 1; }
echo "check: cargo install: fine"
