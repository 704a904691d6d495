//! `cargo run -p sbcl-core`: makes the shared library and the core now, with visible progress, and prints where they
//! are. A build of the main crate then finds them in the cache.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    match sbcl_core::Recipe::in_checkout(&checkout()).build() {
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

/// The checkout that this crate is a directory of: cargo says where when it runs this program.
fn checkout() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR");
    let manifest = manifest.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map(Path::to_owned).unwrap_or(manifest)
}
