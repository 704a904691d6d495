#!/usr/bin/env bash
# scripts/setup.sh [build|test|lint|bench|dist|arm64]
# Installs the missing tools for building and, depending on the argument, for the tests, lints, benchmarks or packages,
# or for building and running programs for aarch64 Linux on another machine. Changes nothing when everything is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-test}
names=() debian=() fedora=() arch=() macos=() xcode=no

# add_missing NAME DEBIAN FEDORA ARCH MACOS: records a missing tool, and its packages on each system.
add_missing() {
    # shellcheck disable=SC2206 # An argument has the names of several packages, or of none.
    names+=("$1") debian+=($2) fedora+=($3) arch+=($4)
    case $5 in
        xcode) xcode=yes ;;
        *) macos+=("$5") ;;
    esac
}

has() { command -v "$1" >/dev/null 2>&1; }

# compiles_c: succeeds when a C program compiles. Often a compiler is installed without the C library's headers.
compiles_c() {
    local directory status=0
    directory=$(mktemp -d)
    printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' >"$directory/probe.c"
    ${CC:-cc} "$directory/probe.c" -o "$directory/probe" >/dev/null 2>&1 || status=1
    rm -r "$directory"
    return $status
}

makes_venvs() { python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

require_rust() {
    local wanted have
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    if ! has cargo; then
        echo "setup: cargo is missing. Install Rust $wanted or newer with rustup: https://rustup.rs" >&2
        exit 1
    fi
    have=$(rustc --version | cut -d ' ' -f 2)
    if [ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n 1)" != "$wanted" ]; then
        echo "setup: Rust $have is too old: Rust $wanted or newer is needed. Run rustup update, or install rustup: https://rustup.rs" >&2
        exit 1
    fi
}

find_missing_build_tools() {
    compiles_c || add_missing "a C compiler" build-essential "gcc glibc-devel" base-devel xcode
    has make || has gmake || add_missing make make make make xcode
    has strip || add_missing strip binutils binutils binutils xcode
    # A prebuilt SBCL needs none of the tools below.
    [ -z "${SBCL_MCP_PREBUILT:-}" ] || return 0
    has tar || add_missing tar tar tar tar gnu-tar
    has xz || add_missing xz xz-utils xz xz xz
    local bootstrap=${SBCL_MCP_BOOTSTRAP:-sbcl}
    has "${bootstrap%% *}" || add_missing "sbcl, to build SBCL with" sbcl sbcl sbcl sbcl
}

# has_libclang: searches the directories that bindgen searches. libclang-cpp is a different library.
has_libclang() {
    [ -z "${LIBCLANG_PATH:-}" ] || return 0
    local directory
    for directory in /usr/lib /usr/lib64 /usr/lib/*-linux-* /usr/lib/llvm*/lib /usr/local/lib \
        /Library/Developer/CommandLineTools/usr/lib /opt/homebrew/opt/llvm/lib; do
        if compgen -G "$directory/libclang[.-]*" | grep -q -e 'libclang\(-[0-9.]*\)\?\.\(so\|dylib\)'; then
            return 0
        fi
    done
    return 1
}

find_missing_lint_tools() {
    has_libclang || add_missing "libclang, to compare the C bindings" libclang-dev clang-devel clang llvm
}

find_missing_test_tools() {
    makes_venvs || add_missing "Python 3.11 or newer with venv" "python3 python3-venv" python3 python python
    # tests/mcp/portability.rs hides the build directory from the binary. On other systems it is not compiled.
    [ "$(uname)" != Linux ] || { has unshare && has setpriv && has mount; } ||
        add_missing "unshare, setpriv and mount" "util-linux mount" util-linux util-linux util-linux
    # The terminal of tests/mcp/repl.rs.
    has tmux || add_missing tmux tmux tmux tmux tmux
    # Test frameworks and libraries for tests/mcp/run_tests/ and tests/mcp/reloading.rs. Only Debian packages
    # these systems.
    if has apt-get; then
        local system
        for system in fiveam rt alexandria esrap chipz iterate puri; do
            has_lisp_system "$system" || add_missing "the Lisp system $system" "cl-$system" "" "" ""
        done
        # An editor connects in tests/mcp/attach.rs.
        has_lisp_system slime || add_missing "SLIME's server" cl-swank "" "" ""
    fi
}

# has_libpython: succeeds when the library for programs that embed Python is installed.
has_libpython() {
    "${PYO3_PYTHON:-/usr/bin/python3}" -c 'import os, sys, sysconfig
library = os.path.join(*(sysconfig.get_config_var(name) or "" for name in ("LIBDIR", "LDLIBRARY")))
sys.exit(not os.path.isfile(library))' >/dev/null 2>&1
}

find_missing_bench_tools() {
    has_libpython || add_missing "Python for programs to embed" "python3 libpython3-dev" python3-devel python python
    has "${SBCL:-sbcl}" || add_missing "sbcl, to compare with" sbcl sbcl sbcl sbcl
    [ -e "${SWANK:-/usr/share/common-lisp/source/slime/swank-loader.lisp}" ] ||
        add_missing "SLIME's server" cl-swank "" "" ""
}

find_missing_dist_tools() {
    makes_venvs || add_missing "Python 3.11 or newer with venv" "python3 python3-venv" python3 python python
    # The program in the packages is built for an old Debian, which needs root.
    [ "$(id -u)" != 0 ] || ! has apt-get || has debootstrap || add_missing debootstrap debootstrap "" "" ""
    ! has apt-get || has lintian || add_missing "lintian, to check the .deb" lintian "" "" ""
}

find_missing_arm64_tools() {
    [ "$(uname -m)" != aarch64 ] || return 0
    CC=${CC_aarch64_unknown_linux_gnu:-aarch64-linux-gnu-gcc} compiles_c ||
        add_missing "a C compiler for aarch64" "gcc-aarch64-linux-gnu libc6-dev-arm64-cross" gcc-aarch64-linux-gnu \
            "aarch64-linux-gnu-gcc aarch64-linux-gnu-glibc" ""
    has aarch64-linux-gnu-strip ||
        add_missing "strip for aarch64" binutils-aarch64-linux-gnu binutils-aarch64-linux-gnu \
            aarch64-linux-gnu-binutils ""
    has qemu-aarch64-static || has qemu-aarch64 ||
        add_missing "QEMU for aarch64 programs" qemu-user-static qemu-user-static-aarch64 qemu-user-static ""
    { has unshare && has mount; } || add_missing "unshare and mount" "util-linux mount" util-linux util-linux ""
    # Programs are linked with the C library of an old Debian, which needs root.
    [ "$(id -u)" != 0 ] || ! has apt-get || has debootstrap || add_missing debootstrap debootstrap "" "" ""
}

# has_lisp_system NAME: succeeds when the system is in the directory where Linux distributions install Lisp systems.
has_lisp_system() { [ -e "/usr/share/common-lisp/source/$1" ]; }

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif has sudo; then
        sudo "$@"
    else
        echo "setup: neither root nor sudo. As root, run: apt-get update &&" \
            "apt-get install --no-install-recommends ${debian[*]}" >&2
        exit 1
    fi
}

install_with_apt() {
    echo "setup: installing with apt: ${debian[*]}"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -q
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${debian[@]}"
}

explain() {
    echo "setup: this machine has no apt. Install what is missing, then run make again:"
    [ -z "${fedora[*]:-}" ] || echo "  Fedora: sudo dnf install ${fedora[*]}"
    [ -z "${arch[*]:-}" ] || echo "  Arch:   sudo pacman -S --needed ${arch[*]}"
    [ $xcode = no ] || echo "  macOS:  xcode-select --install"
    [ -z "${macos[*]:-}" ] || echo "  macOS:  brew install ${macos[*]}"
} >&2

listed() { printf '%s; ' "${names[@]}" | sed 's/; $//'; }

find_missing_tools() {
    names=() debian=() fedora=() arch=() macos=() xcode=no
    find_missing_build_tools
    case $purpose in
        arm64) find_missing_arm64_tools ;;
        bench) find_missing_bench_tools ;;
        dist) find_missing_dist_tools ;;
        lint) find_missing_lint_tools ;;
        test) find_missing_test_tools ;;
    esac
}

require_rust
find_missing_tools
if [ ${#names[@]} = 0 ]; then
    echo "setup: everything is installed"
    exit
fi
echo "setup: missing: $(listed)"
if ! has apt-get; then
    explain
    exit 1
fi
install_with_apt
find_missing_tools
if [ ${#names[@]} != 0 ]; then
    echo "setup: still missing after the installation: $(listed)" >&2
    exit 1
fi
