#!/usr/bin/env python3
"""Tests the packages as their users would use them: packaging/check.py OUTPUT [DEBIAN]

OUTPUT is the directory that packaging/build.py has written. Each package is unpacked or installed in an empty directory
and started with only its requirements on the PATH: Node.js or Python. Nothing is downloaded. Needs node and npm, mcpb,
claude, mcp-proxy, lintian and dpkg-deb (on Debian), objdump, and Python with jsonschema and uv.

If the packages are for another machine, DEBIAN is the directory of a Debian for that machine, with Node.js and Python,
as scripts/debian.sh installs it. The programs run there, with an emulator and as root. Tests of programs that only use
the server are left out.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

import glibc
import jsonschema
import licences

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = Path(sys.argv[1]).resolve()
DEBIAN = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None
if DEBIAN:
    glibc.OBJDUMP = "aarch64-linux-gnu-objdump"
# The newest C library version that a release may require. If unset, the required version is only printed.
OLDEST = os.environ.get("SBCL_MCP_OLDEST_GLIBC")

REQUESTS = [
    {
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "dist", "version": "0"},
        },
    },
    *(
        {"method": "tools/call", "params": {"name": name, "arguments": arguments}}
        for name, arguments in [
            ("evaluate-lisp", {"code": "(defun total (count) (* count (price)))"}),
            # The call fails, because there is no function PRICE, and is held. Once the function is defined, it continues.
            ("evaluate-lisp", {"code": "(total 21)", "on-error": "debug"}),
            ("eval-in-frame", {"frame": 1, "code": "(defun price () 2)"}),
            ("invoke-restart", {"restart": "CONTINUE"}),
        ]
    ),
]


def fail(message):
    sys.exit(f"check: {message}")


def run(command, directory, path="", status=0, given="", **variables):
    """Runs a command with only these environment variables, and its directory as home. Returns its output."""
    environment = {"PATH": path, "HOME": str(directory), **variables}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        env=environment,
        input=given,
        text=True,
        capture_output=True,
        timeout=300,
    )
    if done.returncode != status:
        fail(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


# The shell's arguments are DEBIAN, a directory that also has this path in DEBIAN, and a command.
IN_DEBIAN = """mount --rbind /proc "$0/proc" && mount -t tmpfs none "$0/tmp" && mkdir -p "$0$1" &&
mount --rbind "$1" "$0$1" && shift && exec chroot "$0" "$@"
"""


def placed(command, directory, path):
    """Returns the command to run and its environment variables. With DEBIAN, the command runs there, with all programs of
    this Debian on the PATH."""
    if not DEBIAN:
        return command, {"PATH": path}
    inside = ["env", "-i", "-C", directory, f"HOME={directory}", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *command]
    emulate = [ROOT / "sbcl-core/src/emulate.sh", "unshare", "--mount", "sh", "-c", IN_DEBIAN, DEBIAN, SCRATCH, *inside]
    return emulate, {"PATH": os.environ["PATH"], "SBCL_MCP_SYSROOT": str(DEBIAN)}


def run_program(command, directory, path="", status=0):
    """Runs a command as `run` does, in DEBIAN if there is one."""
    command, variables = placed(command, directory, path)
    return run(command, directory, variables.pop("PATH"), status, **variables)


def serves(command, directory, path=""):
    """Checks that the command serves MCP, and that a failed call can be repaired and continued."""
    words, variables = placed(command, directory, path)
    server = subprocess.Popen(
        [shutil.which("timeout"), "300", *map(str, words)],
        cwd=directory,
        env={"HOME": str(directory), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        for number, request in enumerate(REQUESTS):
            print(json.dumps({"jsonrpc": "2.0", "id": number, **request}), file=server.stdin, flush=True)
            answer = server.stdout.readline()
    if server.returncode != 0 or json.loads(answer)["result"]["content"] != [{"type": "text", "text": "=> 42"}]:
        fail(f"{command}: status {server.returncode}, {answer}")


def only(pattern):
    """Returns the only file of the output that matches."""
    found = sorted(OUTPUT.glob(pattern))
    if len(found) != 1:
        fail(f"{pattern}: {found}")
    return found[0]


@functools.cache
def program_of_archive():
    with tarfile.open(only("*-linux.tar.xz")) as archive:
        (member,) = (member for member in archive if member.name.endswith("/sbcl-mcp"))
        return archive.extractfile(member).read()


def holds_the_program(package, program):
    """Checks that the package has exactly the program of the archive."""
    if program.read_bytes() != program_of_archive():
        fail(f"{package.name} does not contain the archive's program")


def directory_of(*programs):
    """Returns a directory for the PATH that contains only these programs of this machine."""
    directory = Path(tempfile.mkdtemp(dir=SCRATCH))
    for program in programs:
        found = shutil.which(program) or fail(f"{program} is not installed")
        (directory / program).symlink_to(Path(found).resolve() if program != "npm" and program != "npx" else found)
    return str(directory)


def archive(empty):
    file = only("*-linux.tar.xz")
    with tarfile.open(file) as archive:
        owners = {(member.uid, member.gid) for member in archive}
        archive.extractall(empty, filter="tar") if hasattr(tarfile, "tar_filter") else archive.extractall(empty)
    if owners != {(0, 0)}:
        fail(f"{file.name} has files of {owners}")
    (unpacked,) = empty.iterdir()
    serves([unpacked / "sbcl-mcp"], empty)
    version = run_program([unpacked / "sbcl-mcp", "--version"], empty).split()[1]
    if version not in file.name:
        fail(f"{file.name} has version {version}")
    documents = ["README.md", "docs/reference/tools.md", "man/sbcl-mcp-eval.1"]
    for name in [*(licence.name for licence in licences.FILES), *documents]:
        if not (unpacked / name).is_file():
            fail(f"{file.name} has no {name}")
    for page in (unpacked / "man").iterdir():
        if f".TH {page.stem}" not in page.read_text():
            fail(f"{page.name} is not a manual page")
    run(["/bin/bash", "-n", unpacked / "completions/sbcl-mcp.bash"], empty)
    needs_glibc(unpacked / "sbcl-mcp")


def needs_glibc(program):
    """Prints the C library version that the program requires, and compares it with the limit for a release."""
    newest = glibc.newest(program)
    text = ".".join(map(str, newest))
    print(f"check: needs the GNU C library {text} or newer")
    if OLDEST and newest > tuple(map(int, OLDEST.split("."))):
        fail(f"the program needs glibc {text}; a release is to run with {OLDEST}")


def debian(empty):
    if not shutil.which("dpkg-deb"):
        print("check: no dpkg-deb here: the Debian package is not looked at")
        return
    package = only("*.deb")
    run(["dpkg-deb", "-x", package, empty / "root"], empty, os.environ["PATH"])
    serves([empty / "root/usr/bin/sbcl-mcp"], empty)
    holds_the_program(package, empty / "root/usr/bin/sbcl-mcp")
    wanted = run(["dpkg-deb", "--field", package, "Depends"], empty, os.environ["PATH"])
    version = re.search(r"libc6 \(>= (\d+)\.(\d+)\)", wanted)
    needed = glibc.newest(empty / "root/usr/bin/sbcl-mcp")
    if not version or tuple(map(int, version.groups())) > needed:
        fail(f"{package.name} depends on {wanted.strip()}, but its program requires only an older version")
    if DEBIAN:
        # Cargo.toml states these dependencies.
        if tuple(map(int, version.groups())) != needed:
            fail(f"{package.name} depends on {wanted.strip()}, but its program requires {'.'.join(map(str, needed))}")
        run_program(["dpkg", "--install", shutil.copy(package, empty)], empty)
        serves(["sbcl-mcp"], empty)
        run_program(["dpkg", "--purge", "sbcl-mcp"], empty)
    for name in [
        "man/man1/sbcl-mcp.1.gz",
        "bash-completion/completions/sbcl-mcp",
        "zsh/vendor-completions/_sbcl-mcp",
        "fish/vendor_completions.d/sbcl-mcp.fish",
        "doc/sbcl-mcp/copyright",
        "doc/sbcl-mcp/copyright-of-crates",
    ]:
        if not (empty / "root/usr/share" / name).is_file():
            fail(f"{package.name} has no {name}")
    if shutil.which("lintian"):
        unimportant = (ROOT / "packaging/deb/lintian-suppressed").read_text().splitlines()
        tags = [line for line in unimportant if line and not line.startswith("#")]
        run(["lintian", "--fail-on", "error,warning", "--suppress-tags", ",".join(tags), package], empty, os.environ["PATH"])
    else:
        print("check: no lintian here")


def npm(empty):
    path = directory_of("node", "npm", "npx", "sh")
    (empty / "package.json").write_text("{}")
    packages = sorted(OUTPUT.glob("*.tgz"))
    # With --force, npm only warns that a package is for another machine.
    machine = ["--force", "--os=linux", "--cpu=arm64", "--libc=glibc"] if DEBIAN else []
    run(["npm", "install", "--offline", "--no-audit", "--no-fund", *machine, *packages], empty, path)
    # Debian's nodejs package does not contain npm.
    launcher = [empty / "node_modules/.bin/sbcl-mcp"] if DEBIAN else ["npx", "--no-install", "sbcl-mcp"]
    serves(launcher, empty, path)
    # The launcher exits with the program's status.
    run_program([*launcher, "eval", "(car 1)"], empty, path, status=1)
    own = next((empty / "node_modules").glob("sbcl-mcp-*"))
    holds_the_program(own, own / "bin/sbcl-mcp")
    shutil.rmtree(own)
    if "is not installed" not in run_program(launcher, empty, path, status=1):
        fail("the launcher does not say that its platform's package is missing")


def wheel(empty):
    package = only("*.whl")
    tag = re.search(r"-manylinux_(\d+)_(\d+)_", package.name) or fail(f"{package.name} has no manylinux tag")
    run_program(["python3" if DEBIAN else sys.executable, "-m", "venv", empty / "venv"], empty)
    file = shutil.copy(package, empty)
    run_program([empty / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-index", file], empty)
    program = empty / "venv/bin/sbcl-mcp"
    serves([program], empty)
    holds_the_program(package, program)
    # maturin does not see the libsbcl inside the program.
    if tuple(map(int, tag.groups())) < glibc.newest(program):
        fail(f"{package.name} contains a program that requires a newer glibc")
    if DEBIAN:
        return
    uvx = shutil.which("uvx") or fail("uv is not installed")
    serves([uvx, "--offline", "--python", sys.executable, "--from", package, "sbcl-mcp"], empty)


def bundle(empty):
    package = only("*.mcpb")
    run(["mcpb", "unpack", package, empty / "bundle"], empty, os.environ["PATH"])
    run(["mcpb", "validate", empty / "bundle/manifest.json"], empty, os.environ["PATH"])
    server = json.loads((empty / "bundle/manifest.json").read_text())["server"]["mcp_config"]
    command = [word.replace("${__dirname}", str(empty / "bundle")) for word in [server["command"], *server["args"]]]
    serves(command, empty)
    holds_the_program(package, empty / "bundle/server/sbcl-mcp")


def server_json(_empty):
    server = json.loads((OUTPUT / "server.json").read_text())
    schema = json.loads((ROOT / "packaging/registry/server.schema.json").read_text())
    jsonschema.validate(server, schema)


def claude_code(empty):
    plugin = ROOT / "packaging/claude-code"
    for place in [plugin, ROOT / ".claude-plugin/marketplace.json"]:
        run(["claude", "plugin", "validate", "--strict", place], empty, os.environ["PATH"])
    run(["claude", "plugin", "marketplace", "add", ROOT], empty, os.environ["PATH"])
    run(["claude", "plugin", "install", "sbcl-mcp@sbcl-mcp"], empty, os.environ["PATH"])
    with tarfile.open(only("*-linux.tar.xz")) as archive:
        archive.extractall(empty)
    (unpacked,) = empty.glob("sbcl-mcp-*")
    server = json.loads((plugin / ".mcp.json").read_text())["mcpServers"]["sbcl"]
    serves([server["command"], *server["args"]], empty, str(unpacked))
    hook = ["/bin/sh", plugin / "scripts/check.sh"]
    path = f"{unpacked}:{directory_of('tr', 'sed')}"
    for text, status in [("(defun f (x)\n  (car x))\n", 0), ("(defun f (x)\n  (car x)\n\n(defun g () 1)\n", 2)]:
        (empty / "some.lisp").write_text(text)
        call = {"tool_name": "Edit", "tool_input": {"file_path": str(empty / "some.lisp"), "new_string": "\"file_path\": \"/x\""}}
        said = run(hook, empty, path, status=status, given=json.dumps(call))
        if (status == 2) != ("some.lisp:2:10: error: " in said):
            fail(f"the hook says: {said}")
    run(hook, empty, path, given=json.dumps({"tool_input": {"file_path": str(ROOT / "Cargo.toml")}}))


def gateway(empty):
    """Tests an HTTP gateway, for clients that cannot start a program. Its sessions share one image."""
    with tarfile.open(only("*-linux.tar.xz")) as archive:
        archive.extractall(empty)
    (program,) = empty.glob("*/sbcl-mcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["mcp-proxy", "--port", str(port), str(program)]
    process = subprocess.Popen(command, cwd=empty, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def post(session, number, method, params):
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **session}
        body = json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/mcp", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]}, answer.read().decode()

    try:
        if not any("running on" in line for line in process.stdout):
            fail("the gateway does not start")
        # Definitions persist from one session to the next, since some frameworks start a session for each call.
        for code, answer in [("(defvar *answer* 41)", "=> *ANSWER*"), ("(incf *answer*)", "=> 42")]:
            session, _ = post({}, 0, "initialize", REQUESTS[0]["params"])
            _, said = post(session, 1, "tools/call", {"name": "evaluate-lisp", "arguments": {"code": code}})
            if answer not in said:
                fail(f"through the gateway: {said}")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def checksums(_empty):
    listed = dict(reversed(line.split("  ")) for line in (OUTPUT / "SHA256SUMS").read_text().splitlines())
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in OUTPUT.iterdir() if path.name != "SHA256SUMS"
    }
    if listed != found:
        fail("SHA256SUMS does not match the files")


def main():
    users = [] if DEBIAN else [claude_code, gateway]
    for check in [checksums, archive, debian, npm, wheel, bundle, server_json, *users]:
        with tempfile.TemporaryDirectory(dir=SCRATCH) as empty:
            check(Path(empty))
        print(f"check: {check.__name__}: fine", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as SCRATCH:
        main()
