#!/usr/bin/env bash
# Builds the program against the C library of an older Debian, so that it runs on systems that are as old, and tries
# it there: in a chroot of each Debian from that one on. Prints where the program is; that Debian is
# target/old-glibc/debian, and what linked it target/old-glibc/cc. Needs root, debootstrap, a Debian or Ubuntu to build
# on and, once, the network; the trees stay in the cache, beside SBCL.
# scripts/old_glibc.sh [PROFILE]; without: lto
set -euo pipefail
cd "$(dirname "$0")/.."

# The oldest release on Debian's mirrors, and those that came after.
RELEASES=(bullseye bookworm)
MACHINE=x86_64
trees=${XDG_CACHE_HOME:-$HOME/.cache}/sbcl-mcp/debian
target=$PWD/target/old-glibc
profile=${1:-lto}

# tree RELEASE: installs a Debian, with what programs are linked with, once.
tree() {
    local root=$trees/$1 link
    [ -e "$root/complete" ] && return
    echo "old-glibc: installing Debian $1 in $root" >&2
    rm -rf "$root"
    mkdir -p "$trees"
    debootstrap --variant=minbase --include=libc6-dev,libzstd-dev,zlib1g-dev "$1" "$root" >"$trees/$1.log" 2>&1 ||
        { tail "$trees/$1.log" >&2 && exit 1; }
    # Seen from outside, an absolute link leads to this machine's library.
    find "$root" -xdev -type l -lname '/*' | while read -r link; do
        ln -sfnr "$root$(readlink "$link")" "$link"
    done
    touch "$root/complete"
}

# try PROGRAM RELEASE: has the doctor look, evaluates, and saves and restores a checkpoint, with that Debian's libraries
# alone.
try() {
    local root=$trees/$2 glibc said name=sbcl-mcp.$$
    install "$1" "$root/tmp/$name"
    # Its /proc goes with the command.
    in_tree() {
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp unshare --mount \
            sh -c 'mount --bind /proc "$0/proc" && exec chroot "$0" "$@"' "$root" "$@"
    }
    # restores: has a server save a checkpoint, and restore it.
    restores() {
        local id=0 server server_PID
        coproc server { in_tree "/tmp/$name" 2>&1; }
        # ask METHOD PARAMETERS: prints the answer.
        ask() {
            local line
            id=$((id + 1))
            printf '{"jsonrpc":"2.0","id":%d,"method":"%s","params":%s}\n' "$id" "$1" "$2" >&"${server[1]}"
            while read -r -t 120 line <&"${server[0]}"; do
                [[ $line != *"\"id\":$id,"* && $line != *"\"id\":$id}"* ]] || { said=$line && return; }
            done
            said="no answer to $1 $2 within two minutes" && return 1
        }
        evaluate() { ask tools/call "{\"name\":\"evaluate-lisp\",\"arguments\":{\"code\":\"$1\"}}"; }
        checkpoint() { ask tools/call "{\"name\":\"checkpoint\",\"arguments\":{\"action\":\"$1\",\"name\":\"x\"}}"; }
        ask initialize '{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"old-glibc","version":"1"}}' &&
            evaluate '(defvar *x* 41)' && checkpoint save && [[ $said == *'Saved \"x\"'* ]] &&
            evaluate '(setf *x* 0)' && checkpoint restore && [[ $said == *'Restored \"x\"'* ]] &&
            evaluate '(1+ *x*)' && [[ $said == *'=> 42'* ]]
        local result=$? pid=$server_PID
        exec {server[1]}>&-
        # A server that hangs does not end by itself.
        timeout 30 tail --pid="$pid" -f /dev/null || kill "$pid"
        return $result
    }
    glibc=$(in_tree ldd --version | sed -n '1s/.* //p')
    if ! said=$(in_tree "/tmp/$name" doctor 2>&1) || [ "$(in_tree "/tmp/$name" eval '(+ 1 2)')" != "=> 3" ] ||
        ! restores; then
        rm "$root/tmp/$name"
        printf '%s\nold-glibc: it does not run on Debian %s (glibc %s)\n' "$said" "$2" "$glibc" >&2
        exit 1
    fi
    rm "$root/tmp/$name"
    echo "old-glibc: runs on Debian $2 (glibc $glibc)" >&2
}

for release in "${RELEASES[@]}"; do tree "$release"; done
# A program of its own: contribs of SBCL's take CC for one word.
compiler=$trees/cc
libraries=$trees/${RELEASES[0]}/usr/lib/$MACHINE-linux-gnu
cat >"$compiler" <<END
#!/bin/sh
exec ${CC:-cc} --sysroot=$trees/${RELEASES[0]} -B$libraries -L$libraries "\$@"
END
chmod +x "$compiler"
CC=$compiler CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=$compiler \
    cargo build --profile "$profile" --target-dir "$target" >&2
program=$target/${profile/#dev/debug}/sbcl-mcp
for release in "${RELEASES[@]}"; do try "$program" "$release"; done
ln -sfn "$trees/${RELEASES[0]}" "$target/debian"
ln -sfn "$compiler" "$target/cc"
echo "$program"
