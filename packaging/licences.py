"""The licences of everything in the program: of this project, of SBCL and of the crates."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
# The licences of the crates, which cargo-about collects.
CRATES = PACKAGING / "LICENSE-CRATES"
# The files that each package contains.
FILES = [ROOT / "LICENSE-APACHE", ROOT / "LICENSE-MIT", PACKAGING / "LICENSE-SBCL", CRATES]


def collect_crates():
    """Writes the texts of the crates' licences to CRATES. Fails if a crate has a licence that about.toml does not accept."""
    directory = PACKAGING / "crate-licences"
    command = ["cargo-about", "generate", "--fail", "--frozen", "--config", directory / "about.toml"]
    subprocess.run([*command, "--output-file", CRATES, directory / "about.hbs"], cwd=ROOT, check=True)


def debian_paragraph(name, text):
    """Returns the paragraph of a Debian copyright file that defines the licence `name`."""
    lines = (line.rstrip() for line in text.strip("\n").splitlines())
    return "\n".join([f"License: {name}", *(f" {line}" if line else " ." for line in lines)]) + "\n"


def debian_copyright():
    """Returns Debian's copyright file: packaging/deb/copyright with the licence of SBCL. The crates' licences are in a file of
    their own, because lintian refuses complete texts of licences that every Debian system already contains."""
    sbcl = debian_paragraph("SBCL", (PACKAGING / "LICENSE-SBCL").read_text())
    return f"{(PACKAGING / 'deb/copyright').read_text()}\n{sbcl}"
