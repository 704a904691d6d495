//! Files of SBCL's as data of a program.

use std::path::{Path, PathBuf};

/// The assembly file that embeds them.
const SOURCE: &str = include_str!("embed.S");

/// What is embedded.
#[derive(Debug, Clone, Copy)]
pub struct Contents<'a> {
    /// A core. There is one a program.
    pub core: Option<&'a Path>,
    /// The shared library.
    pub library: Option<&'a Path>,
}

/// Assembles the files into a static library of this name, which cargo links, whole, into what is built of the package
/// whose build script this is called in.
///
/// # Panics
/// When cargo's variables for build scripts are missing, or `OUT_DIR` cannot be written.
pub fn embed(name: &str, contents: &Contents<'_>) {
    let source = PathBuf::from(crate::variable("OUT_DIR")).join(format!("{name}.S"));
    std::fs::write(&source, SOURCE).unwrap_or_else(|error| panic!("writing {}: {error}", source.display()));
    let mut assembler = cc::Build::new();
    assembler.file(&source).cargo_debug(false);
    // Nothing refers to a core that is found by the name of its section.
    assembler.link_lib_modifier("+whole-archive");
    for (define, file) in [("SBCL_CORE_FILE", contents.core), ("SBCL_LIBRARY_FILE", contents.library)] {
        if let Some(file) = file {
            // Also where they are made again if someone clears the cache.
            println!("cargo::rerun-if-changed={}", file.display());
            assembler.define(define, Some(quoted(file).as_str()));
        }
    }
    assembler.compile(name);
}

/// A path as a string of the assembler.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""))
}
