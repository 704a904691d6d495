#!/usr/bin/env bash
# Installs what is missing on this machine for building (`build`), and also for the tests (`test`), the lints (`lint`),
# the benchmarks (`bench`) or the packages (`dist`).
# With everything there it asks nobody and changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-test}
names=() debian=() fedora=() arch=() macos=() xcode=no

# miss NAME DEBIAN FEDORA ARCH MACOS: notes a missing thing and the packages that hold it.
miss() {
    names+=("$1") debian+=($2) fedora+=($3) arch+=($4)
    case $5 in
        xcode) xcode=yes ;;
        *) macos+=("$5") ;;
    esac
}

has() { command -v "$1" >/dev/null 2>&1; }

# A compiler without the C library's headers is a common half of an installation.
compiles_c() {
    local directory status=0
    directory=$(mktemp -d)
    printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' >"$directory/probe.c"
    ${CC:-cc} "$directory/probe.c" -o "$directory/probe" >/dev/null 2>&1 || status=1
    rm -r "$directory"
    return $status
}

makes_venvs() { python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

require_rust() {
    local wanted have
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    if ! has cargo; then
        echo "setup: cargo is missing. Install Rust $wanted or newer with rustup: https://rustup.rs" >&2
        exit 1
    fi
    have=$(rustc --version | cut -d ' ' -f 2)
    if [ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n 1)" != "$wanted" ]; then
        echo "setup: Rust $have is too old, $wanted or newer is needed: rustup update" >&2
        exit 1
    fi
}

look_for_build_tools() {
    compiles_c || miss "a C compiler" build-essential "gcc glibc-devel" base-devel xcode
    has make || has gmake || miss make make make make xcode
    has strip || miss strip binutils binutils binutils xcode
    # A ready-made SBCL needs none of the rest.
    [ -z "${SBCL_MCP_PREBUILT:-}" ] || return 0
    has tar || miss tar tar tar tar gnu-tar
    has xz || miss xz xz-utils xz xz xz
    local bootstrap=${SBCL_MCP_BOOTSTRAP:-sbcl}
    has "${bootstrap%% *}" || miss "sbcl, to build SBCL with" sbcl sbcl sbcl sbcl
}

# Where bindgen looks for it. libclang-cpp is another library.
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

look_for_lint_tools() {
    has_libclang || miss "libclang, to compare the C bindings" libclang-dev clang-devel clang llvm
}

look_for_test_tools() {
    makes_venvs || miss "Python 3.10 or newer with venv" "python3 python3-venv" python3 python python
    # tests/mcp/away.rs hides the build from the binary; elsewhere it is not compiled.
    [ "$(uname)" != Linux ] || { has unshare && has setpriv && has mount; } ||
        miss "unshare, setpriv and mount" "util-linux mount" util-linux util-linux util-linux
    # A terminal for tests/mcp/repl.rs.
    has tmux || miss tmux tmux tmux tmux tmux
    # Test frameworks and libraries, for tests/mcp/testing/ and tests/mcp/reloading.rs. Only Debian has packages of them.
    if has apt-get; then
        local system
        for system in fiveam rt alexandria esrap chipz iterate puri; do
            has_lisp_system "$system" || miss "the Lisp system $system" "cl-$system" "" "" ""
        done
        # An editor joins, in tests/mcp/attach.rs.
        has_lisp_system slime || miss "SLIME's server" cl-swank "" "" ""
    fi
}

# Where a program finds Python that embeds it.
has_libpython() {
    "${PYO3_PYTHON:-/usr/bin/python3}" -c 'import os, sys, sysconfig
library = os.path.join(*(sysconfig.get_config_var(name) or "" for name in ("LIBDIR", "LDLIBRARY")))
sys.exit(not os.path.isfile(library))' >/dev/null 2>&1
}

look_for_bench_tools() {
    has_libpython || miss "Python for programs to embed" "python3 libpython3-dev" python3-devel python python
    has "${SBCL:-sbcl}" || miss "sbcl, to compare with" sbcl sbcl sbcl sbcl
    [ -e "${SWANK:-/usr/share/common-lisp/source/slime/swank-loader.lisp}" ] ||
        miss "SLIME's server" cl-swank "" "" ""
}

look_for_dist_tools() {
    makes_venvs || miss "Python 3.10 or newer with venv" "python3 python3-venv" python3 python python
    # What the packages hold is built for an old Debian, in which only root can build.
    [ "$(id -u)" != 0 ] || ! has apt-get || has debootstrap || miss debootstrap debootstrap "" "" ""
    ! has apt-get || has lintian || miss "lintian, to check the .deb" lintian "" "" ""
}

# Where ASDF looks for systems that Linux distributions install.
has_lisp_system() { [ -e "/usr/share/common-lisp/source/$1" ]; }

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif has sudo; then
        sudo "$@"
    else
        echo "setup: neither root nor sudo. As root, run: $*" >&2
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
    echo "  Fedora: sudo dnf install ${fedora[*]}"
    echo "  Arch:   sudo pacman -S --needed ${arch[*]}"
    [ $xcode = no ] || echo "  macOS:  xcode-select --install"
    [ -z "${macos[*]:-}" ] || echo "  macOS:  brew install ${macos[*]}"
} >&2

listed() { printf '%s; ' "${names[@]}" | sed 's/; $//'; }

look() {
    names=() debian=() fedora=() arch=() macos=() xcode=no
    look_for_build_tools
    case $purpose in
        bench) look_for_bench_tools ;;
        dist) look_for_dist_tools ;;
        lint) look_for_lint_tools ;;
        test) look_for_test_tools ;;
    esac
}

require_rust
look
if [ ${#names[@]} = 0 ]; then
    echo "setup: everything is there"
    exit
fi
echo "setup: missing: $(listed)"
if ! has apt-get; then
    explain
    exit 1
fi
install_with_apt
look
if [ ${#names[@]} != 0 ]; then
    echo "setup: still missing after the installation: $(listed)" >&2
    exit 1
fi
