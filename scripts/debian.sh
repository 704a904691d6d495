#!/usr/bin/env bash
# scripts/debian.sh RELEASE [ARCHITECTURE [PACKAGE...]]: installs a Debian in the cache, next to SBCL, unless it is already
# installed, and prints its directory. For another architecture, the packages are only unpacked, which is enough to link with
# the libraries and to run programs in the directory. With PACKAGEs, a complete system with these packages is installed.
# Needs root, debootstrap, a Debian or Ubuntu host and, the first time, the network.
set -euo pipefail
cd "$(dirname "$0")/.."

release=$1
own=$(dpkg --print-architecture)
architecture=${2:-$own}
packages=("${@:3}")
trees=${XDG_CACHE_HOME:-$HOME/.cache}/sbcl-mcp/debian
name=$release
[ "$architecture" = "$own" ] || name=$release-$architecture
[ ${#packages[@]} = 0 ] || name=$name-with-$(IFS=-; echo "${packages[*]}")
root=$trees/$name

fail() {
    tail "$trees/$name.log" >&2
    echo "debian: Debian $release ($architecture) cannot be installed; log: $trees/$name.log" >&2
    exit 1
}

# bootstrap OPTION...: runs debootstrap for the release, with the packages or, without packages, with libraries for linking.
bootstrap() {
    local include=libc6-dev,libzstd-dev,zlib1g-dev
    [ ${#packages[@]} = 0 ] || include=$(IFS=,; echo "${packages[*]}")
    debootstrap "$@" --variant=minbase --include="$include" "$release" "$root" >"$trees/$name.log" 2>&1 || fail
}

# unpack: unpacks the packages that debootstrap has left for its second stage.
unpack() {
    local package
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink || fail
    done
}

# finish: runs debootstrap's second stage. The variable `container` makes debootstrap create no devices, because the first
# stage has created them.
finish() {
    container=lxc sbcl-core/src/emulate.sh chroot "$root" /usr/bin/env \
        PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root /debootstrap/debootstrap --second-stage \
        >>"$trees/$name.log" 2>&1 </dev/null || fail
}

if [ -e "$root/complete" ]; then
    echo "$root"
    exit
fi
mkdir -p "$trees"
# Only one process at a time may install this Debian.
exec 9>"$trees/$name.lock"
flock 9
if [ ! -e "$root/complete" ]; then
    echo "debian: installing Debian $release ($architecture) in $root" >&2
    rm -rf "$root"
    if [ "$architecture" = "$own" ]; then
        bootstrap
    else
        bootstrap --foreign --arch="$architecture"
        if [ ${#packages[@]} = 0 ]; then unpack; else finish; fi
    fi
    # In a container, debootstrap makes a link to the container's /proc.
    [ ! -L "$root/proc" ] || { rm "$root/proc" && mkdir "$root/proc"; }
    # Outside the chroot, an absolute link would lead to a library of this machine.
    find "$root" -xdev -type l -lname '/*' | while read -r link; do
        ln -sfnr "$root$(readlink "$link")" "$link"
    done
    touch "$root/complete"
fi
echo "$root"
