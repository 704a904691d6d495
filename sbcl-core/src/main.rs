//! `cargo run -p sbcl-core` builds the shared library and the core, with visible progress, and prints their paths. A
//! later build of the main crate finds these files in the cache. `cargo run -p sbcl-core internals` writes
//! `lisp/build/sbcl-internals.sexp` instead, using SBCL alone.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use sbcl_core::Recipe;

fn main() -> ExitCode {
    let checkout = checkout_directory();
    let recipe = Recipe::in_checkout(&checkout);
    if std::env::args().nth(1).as_deref() == Some("internals") {
        return match write_internals(&recipe, &checkout) {
            Ok(()) => ExitCode::SUCCESS,
            Err(problem) => {
                eprintln!("sbcl-core: {problem}");
                ExitCode::FAILURE
            }
        };
    }
    match recipe.build() {
        Ok(built) => {
            println!("library: {}", built.library.display());
            println!("core: {}", built.core.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("sbcl-core: {error}");
            ExitCode::FAILURE
        }
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
