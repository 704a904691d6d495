#!/bin/sh
# emulate.sh COMMAND...: runs COMMAND in an environment in which programs for aarch64 Linux can be started. On an aarch64
# machine, or if the machine is already set up for such programs, the script only runs COMMAND. Otherwise COMMAND runs in new
# namespaces, in which the kernel starts QEMU for these programs (Linux 6.7 or newer), and the library directory also contains
# the aarch64 libraries in the directory SBCL_MCP_SYSROOT (default: /usr/aarch64-linux-gnu). Nothing changes outside these
# namespaces.
set -eu

fail() {
    echo "emulate: $*" >&2
    exit 125
}

[ $# -gt 0 ] || fail "usage: emulate.sh COMMAND..."
loader=/lib/ld-linux-aarch64.so.1
handlers=/proc/sys/fs/binfmt_misc
starts_qemu() { grep -q '^enabled' "$handlers/qemu-aarch64" 2>/dev/null; }
# Both conditions also hold within another emulate.sh.
if [ "$(uname -m)" = aarch64 ] || { starts_qemu && [ -e $loader ]; }; then
    exec "$@"
fi

qemu='' sysroot=''
if ! starts_qemu; then
    qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) ||
        fail "QEMU is missing. Install qemu-user-static (Fedora: qemu-user-static-aarch64)"
    [ -d $handlers ] || fail "the kernel has no binfmt_misc. As root, run: modprobe binfmt_misc"
fi
if [ ! -e $loader ]; then
    sysroot=${SBCL_MCP_SYSROOT:-/usr/aarch64-linux-gnu}
    [ -e "$sysroot$loader" ] ||
        fail "$sysroot has no C library for aarch64. Install libc6-dev-arm64-cross, or set SBCL_MCP_SYSROOT to a" \
            "directory with a system for aarch64"
fi

# Runs in the namespaces: sh -c "$inside" sh QEMU SYSROOT COMMAND...
# shellcheck disable=SC2016 # The inner shell expands the variables.
inside='
fail() {
    echo "emulate: $*" >&2
    exit 125
}
qemu=$1 sysroot=$2
shift 2
if [ -n "$qemu" ]; then
    # With the flag F, the kernel opens QEMU now, so that QEMU also starts in a chroot. With P, a program keeps its argv[0].
    mount -t binfmt_misc none /proc/sys/fs/binfmt_misc &&
        printf "%s%s%s%s" ":qemu-aarch64:M:" \
            ":\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00" \
            ":\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff" \
            ":$qemu:PF" >/proc/sys/fs/binfmt_misc/register ||
        fail "the kernel cannot start QEMU for a single command, which needs Linux 6.7. To start QEMU for all" \
            "commands, install qemu-user-binfmt (before Debian 13: qemu-user-static and binfmt-support)"
fi
if [ -n "$sysroot" ]; then
    libraries=$(readlink -f /lib)
    mount -t overlay -o "lowerdir=$libraries:$sysroot/lib" none "$libraries" ||
        fail "cannot add the libraries in $sysroot to $libraries (overlayfs). As root, add the architecture arm64 to" \
            "dpkg, and install libc6:arm64"
fi
exec "$@"
'

if [ "$(id -u)" != 0 ]; then
    exec unshare --user --map-root-user --mount sh -c "$inside" sh "$qemu" "$sysroot" "$@"
fi

# Root maps all users into the namespace, for chroots and for programs that change their user. Only a process outside the new
# namespace may do so.
identity_map() { while read -r first _ count; do echo "$first $first $count"; done <"/proc/self/$1"; }
users=$(identity_map uid_map) groups=$(identity_map gid_map)
namespace=$(readlink /proc/self/ns/user)
(
    (
        while [ "$(readlink /proc/$$/ns/user)" = "$namespace" ]; do sleep 0.01; done
        printf '%s\n' "$groups" >/proc/$$/gid_map
        printf '%s\n' "$users" >/proc/$$/uid_map
    ) 2>/dev/null &
)
# shellcheck disable=SC2016 # The inner shell expands the variables.
exec unshare --user --mount sh -c '
tries=0
until [ "$(id -u)" = 0 ]; do
    tries=$((tries + 1))
    [ $tries -lt 500 ] || { echo "emulate: the users cannot be mapped into a namespace" >&2 && exit 125; }
    sleep 0.01
done
exec sh -c "$0" sh "$@"' "$inside" "$qemu" "$sysroot" "$@"
