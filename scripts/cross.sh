#!/usr/bin/env bash
# scripts/cross.sh TARGET COMMAND...: runs COMMAND, such as cargo build --target TARGET, with tools that build programs for the
# Rust target TARGET on this machine, and that run such programs. On a machine of this target, COMMAND runs without these
# tools. Programs for aarch64-unknown-linux-gnu are linked with the C library of the oldest Debian on Debian's mirrors, which
# this script installs in the cache if it runs as root on Debian or Ubuntu; otherwise with the cross compiler's C library.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$1
shift
[ "${target%%-*}" != "$(uname -m)" ] || exec "$@"
if [ "$target" != aarch64-unknown-linux-gnu ]; then
    echo "cross: $(uname -m) cannot build for $target: the only supported target for other machines is" \
        "aarch64-unknown-linux-gnu" >&2
    exit 1
fi

trees=${XDG_CACHE_HOME:-$HOME/.cache}/sbcl-mcp/debian
can_install_debian() { [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null; }

# write_program FILE: writes standard input to the shell script FILE. Another process may be running the old script.
write_program() {
    local new=$1.$$
    cat >"$new"
    chmod +x "$new"
    mv "$new" "$1"
}

# The C compiler. A cross compiler looks for headers in its own C library first, and only then in a sysroot.
compiler=${CC_aarch64_unknown_linux_gnu:-aarch64-linux-gnu-gcc}
if [ -z "${SBCL_MCP_SYSROOT:-}" ] && can_install_debian; then
    SBCL_MCP_SYSROOT=$(scripts/debian.sh bullseye arm64)
    headers=$SBCL_MCP_SYSROOT/usr/include libraries=$SBCL_MCP_SYSROOT/usr/lib/aarch64-linux-gnu
    write_program "$trees/cc-arm64" <<END
#!/bin/sh
exec $compiler "--sysroot=$SBCL_MCP_SYSROOT" -isystem "$headers/aarch64-linux-gnu" -isystem "$headers" \\
    "-B$libraries" "-L$libraries" "-L$SBCL_MCP_SYSROOT/lib/aarch64-linux-gnu" "\$@"
END
    compiler=$trees/cc-arm64
    export SBCL_MCP_SYSROOT
fi

# has_standard_library RUSTC: succeeds when RUSTC can compile for the target.
has_standard_library() { [ -d "$("$1" --print target-libdir --target "$target" 2>/dev/null)" ]; }

# debian_rustc: prints the path of a Rust compiler with the target's standard library. The compiler belongs to a newer Debian
# in the cache, and runs with the libraries of this Debian.
debian_rustc() {
    local root loader
    root=$(scripts/debian.sh trixie) || return
    if [ ! -e "$root/rust-complete" ]; then
        echo "cross: installing Rust's standard library for $target in $root" >&2
        {
            sed -n 's/^\(deb .*\) trixie main.*/\1 trixie-backports main/p' "$root/etc/apt/sources.list" \
                >"$root/etc/apt/sources.list.d/backports.list" &&
                chroot "$root" dpkg --add-architecture arm64 &&
                chroot "$root" apt-get update -q &&
                DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -q -y --no-install-recommends \
                    --target-release trixie-backports rustc libstd-rust-dev:arm64
        } >"$trees/rust.log" 2>&1 || { tail "$trees/rust.log" >&2 && return 1; }
        touch "$root/rust-complete"
    fi
    loader=$root/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2
    write_program "$trees/rustc" <<END
#!/bin/sh
exec "$loader" --library-path "$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/rustc" "--sysroot=$root/usr" "\$@"
END
    echo "$trees/rustc"
}

if ! has_standard_library "${RUSTC:-rustc}"; then
    if [ -x "$trees/rustc" ] && has_standard_library "$trees/rustc"; then
        export RUSTC=$trees/rustc
    elif command -v rustup >/dev/null && rustup target add "$target" >&2 && has_standard_library "${RUSTC:-rustc}"; then
        :
    elif [ "$(uname -m)" = x86_64 ] && can_install_debian && RUSTC=$(debian_rustc); then
        export RUSTC
    else
        echo "cross: Rust's standard library for $target is missing. With rustup (https://rustup.rs), run:" \
            "rustup target add $target" >&2
        exit 1
    fi
fi

export CC_aarch64_unknown_linux_gnu=$compiler
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$compiler
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/sbcl-core/src/emulate.sh
exec "$@"
