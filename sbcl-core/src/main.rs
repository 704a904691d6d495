//! `cargo run -p sbcl-core` builds the shared library and the core, with visible progress, and prints their paths. A
//! later build of the main crate finds these files in the cache. `-- --target aarch64-unknown-linux-gnu` builds the
//! library and the core for another machine. `cargo run -p sbcl-core internals` writes `lisp/build/sbcl-internals.sexp`
//! instead, using SBCL alone.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use sbcl_core::{Platform, Recipe};

const USAGE: &str = "usage: sbcl-core [--target TARGET] [internals]";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("sbcl-core: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let options = Options::parse(std::env::args().skip(1))?;
    let checkout = checkout_directory();
    let recipe = Recipe { target: options.target, ..Recipe::in_checkout(&checkout) };
    if options.writes_internals {
        return write_internals(&recipe, &checkout);
    }
    let built = recipe.build().map_err(|error| error.to_string())?;
    println!("library: {}", built.library.display());
    println!("core: {}", built.core.display());
    Ok(())
}

/// The command line.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    /// The platform to build for.
    target: Platform,
    /// True if the program writes the table of internal names instead of building.
    writes_internals: bool,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { target: Platform::host(), writes_internals: false };
        while let Some(argument) = arguments.next() {
            let target = match argument.strip_prefix("--target") {
                Some("") => arguments.next(),
                Some(rest) => rest.strip_prefix('=').map(str::to_owned),
                None if argument == "internals" => {
                    options.writes_internals = true;
                    continue;
                }
                None => None,
            };
            let problem = if argument == "--target" { "needs a value" } else { "is unknown" };
            let target = target.ok_or_else(|| format!("{argument:?} {problem}; {USAGE}"))?;
            options.target = Platform::from_target(&target).ok_or_else(|| {
                format!("{target:?} is not a supported target: write, for example, aarch64-unknown-linux-gnu")
            })?;
        }
        Ok(options)
    }
}

/// Writes the table of SBCL's internal names that the Lisp side uses, as the pinned SBCL defines them.
fn write_internals(recipe: &Recipe, checkout: &Path) -> Result<(), String> {
    let bare = recipe.sbcl().map_err(|error| error.to_string())?;
    let bare =
        bare.ok_or("the table of internal names needs an SBCL that is built from source: unset SBCL_MCP_PREBUILT")?;
    let (scripts, fasls) = (recipe.lisp_dir.join("build"), checkout.join("target/sbcl-internals"));
    let table = scripts.join("sbcl-internals.sexp");
    let mut command = bare.command();
    command.arg("--load").arg(scripts.join("write-internals.lisp"));
    command.env("SBCL_MCP_INTERNALS_OUTPUT", &table).env("SBCL_MCP_FASL_DIR", fasls);
    let output = command.output().map_err(|error| format!("{}: {error}", bare.program.display()))?;
    if output.status.success() {
        println!("table: {}", table.display());
        return Ok(());
    }
    Err(format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

/// Returns the directory of the checkout that contains this crate. When cargo runs this program, it sets
/// `CARGO_MANIFEST_DIR` to the crate's directory.
fn checkout_directory() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR");
    let manifest = manifest.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map(Path::to_owned).unwrap_or(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Options, String> {
        Options::parse(arguments.iter().map(|&argument| argument.to_owned()))
    }

    #[test]
    fn the_target_is_this_machine_unless_named() {
        let host = Options { target: Platform::host(), writes_internals: false };
        assert_eq!(parse(&[]), Ok(host));
        let arm = Platform { arch: "aarch64".to_owned(), os: "linux".to_owned() };
        for arguments in [&["--target", "aarch64-unknown-linux-gnu"][..], &["--target=aarch64-unknown-linux-gnu"]] {
            assert_eq!(parse(arguments).unwrap().target, arm);
        }
    }

    #[test]
    fn internals_are_written_on_request() {
        assert!(parse(&["internals"]).unwrap().writes_internals);
    }

    #[test]
    fn unknown_targets_and_arguments_are_refused_by_name() {
        assert!(parse(&["--target", "x86_64-unknown-linux-musl"]).unwrap_err().contains("x86_64-unknown-linux-musl"));
        for arguments in [&["--target"][..], &["--targets"], &["--help"], &["aarch64-unknown-linux-gnu"]] {
            let problem = parse(arguments).unwrap_err();
            assert!(problem.contains(arguments[0]) && problem.contains("usage:"), "{problem}");
        }
    }
}
