#!/usr/bin/env bash
# scripts/old_glibc.sh [PROFILE [TARGET]]
# Builds the program (PROFILE: lto by default) against the C library of an old Debian, so that the program runs on equally old
# systems, and tests the program in chroots of this Debian and of each newer release. Prints the path of the program. The
# links target/old-glibc/debian and target/old-glibc/cc lead to this Debian and to its compiler. Needs root, debootstrap, a
# Debian or Ubuntu host and, the first time, the network. The chroots stay in the cache, next to SBCL. With TARGET, a Rust
# target, scripts/cross.sh builds the program for another machine, and an emulator runs the program in chroots for that machine.
set -euo pipefail
cd "$(dirname "$0")/.."

# The oldest release on Debian's mirrors, and the later ones.
RELEASES=(bullseye bookworm)
machine=$(uname -m)
trees=${XDG_CACHE_HOME:-$HOME/.cache}/sbcl-mcp/debian
target=$PWD/target/old-glibc
profile=${1:-lto}
triple=${2:-}
[ "${triple%%-*}" != "$machine" ] || triple=
# An emulator runs another machine's programs. Debian's name of the machine differs from Rust's.
emulator=() architecture=()
[ -z "$triple" ] || emulator=("$PWD/sbcl-core/src/emulate.sh") architecture=(arm64)

# run_on_debian PROGRAM RELEASE: runs `doctor`, evaluates, and saves and restores a checkpoint in the chroot of RELEASE.
run_on_debian() {
    local root glibc output name=sbcl-mcp.$$
    root=$(scripts/debian.sh "$2" "${architecture[@]}")
    install "$1" "$root/tmp/$name"
    # /proc is mounted only for this command.
    in_tree() {
        # shellcheck disable=SC2016 # The inner shell expands the variables.
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp SBCL_MCP_SYSROOT="$root" "${emulator[@]}" unshare --mount \
            sh -c 'mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"' "$root" "$@"
    }
    # restores_checkpoint: succeeds when a server can save a checkpoint and restore it.
    restores_checkpoint() {
        local id=0 server server_PID
        coproc server { in_tree "/tmp/$name" 2>&1; }
        # ask METHOD PARAMETERS: sends a request and stores the answer in `output`.
        ask() {
            local line
            id=$((id + 1))
            printf '{"jsonrpc":"2.0","id":%d,"method":"%s","params":%s}\n' "$id" "$1" "$2" >&"${server[1]}"
            while read -r -t 120 line <&"${server[0]}"; do
                [[ $line != *"\"id\":$id,"* && $line != *"\"id\":$id}"* ]] || { output=$line && return; }
            done
            output="no answer to $1 $2 within two minutes" && return 1
        }
        evaluate() { ask tools/call "{\"name\":\"evaluate-lisp\",\"arguments\":{\"code\":\"$1\"}}"; }
        checkpoint() { ask tools/call "{\"name\":\"checkpoint\",\"arguments\":{\"action\":\"$1\",\"name\":\"x\"}}"; }
        ask initialize '{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"old-glibc","version":"1"}}' &&
            evaluate '(defvar *x* 41)' && checkpoint save && [[ $output == *'Saved \"x\"'* ]] &&
            evaluate '(setf *x* 0)' && checkpoint restore && [[ $output == *'Restored \"x\"'* ]] &&
            evaluate '(1+ *x*)' && [[ $output == *'=> 42'* ]]
        local result=$? pid=$server_PID
        # shellcheck disable=SC1083,SC2093 # This closes a descriptor and replaces no process.
        exec {server[1]}>&-
        # A server that hangs is killed.
        timeout 30 tail --pid="$pid" -f /dev/null || kill "$pid"
        return $result
    }
    glibc=$(in_tree ldd --version | sed -n '1s/.* //p')
    if ! output=$(in_tree "/tmp/$name" doctor 2>&1) || [ "$(in_tree "/tmp/$name" eval '(+ 1 2)')" != "=> 3" ] ||
        ! restores_checkpoint; then
        rm "$root/tmp/$name"
        printf '%s\nold-glibc: the program does not work on Debian %s (glibc %s)\n' "$output" "$2" "$glibc" >&2
        exit 1
    fi
    rm "$root/tmp/$name"
    echo "old-glibc: the program runs on Debian $2 (glibc $glibc)" >&2
}

for release in "${RELEASES[@]}"; do scripts/debian.sh "$release" "${architecture[@]}" >/dev/null; done
if [ -n "$triple" ]; then
    scripts/cross.sh "$triple" cargo build --profile "$profile" --target "$triple" --target-dir "$target" >&2
    program=$target/$triple/${profile/#dev/debug}/sbcl-mcp
else
    # A wrapper script, because some of SBCL's contribs treat CC as a single word.
    compiler=$trees/cc
    libraries=$trees/${RELEASES[0]}/usr/lib/$machine-linux-gnu
    cat >"$compiler" <<END
#!/bin/sh
exec ${CC:-cc} "--sysroot=$trees/${RELEASES[0]}" "-B$libraries" "-L$libraries" "\$@"
END
    chmod +x "$compiler"
    env CC="$compiler" "CARGO_TARGET_${machine^^}_UNKNOWN_LINUX_GNU_LINKER=$compiler" \
        cargo build --profile "$profile" --target-dir "$target" >&2
    program=$target/${profile/#dev/debug}/sbcl-mcp
    ln -sfn "$trees/${RELEASES[0]}" "$target/debian"
    ln -sfn "$compiler" "$target/cc"
fi
for release in "${RELEASES[@]}"; do run_on_debian "$program" "$release"; done
echo "$program"
