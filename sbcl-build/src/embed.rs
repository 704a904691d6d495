//! Embeds SBCL's files into a program as data.

use std::path::{Path, PathBuf};

/// The assembly file that includes the embedded files.
const ASSEMBLY_SOURCE: &str = include_str!("embed.S");

/// The files to embed.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddedFiles<'a> {
    /// A core, at most one per program.
    pub core: Option<&'a Path>,
    /// The shared library.
    pub library: Option<&'a Path>,
}

/// Assembles the files into a static library called `name`. Cargo links the whole library into the targets of the
/// package whose build script calls this function.
///
/// # Panics
/// Panics if cargo's environment variables for build scripts are missing, `OUT_DIR` is not writable, or the assembler
/// fails.
pub fn embed(name: &str, contents: &EmbeddedFiles<'_>) {
    let source = PathBuf::from(crate::env_var("OUT_DIR")).join(format!("{name}.S"));
    std::fs::write(&source, ASSEMBLY_SOURCE).unwrap_or_else(|error| panic!("writing {}: {error}", source.display()));
    let mut assembler = cc::Build::new();
    assembler.file(&source).cargo_debug(false);
    // No symbol refers to the core, which the runtime finds by the name of its section, so the linker would drop it.
    assembler.link_lib_modifier("+whole-archive");
    for (define, file) in [("SBCL_CORE_FILE", contents.core), ("SBCL_LIBRARY_FILE", contents.library)] {
        if let Some(file) = file {
            // If someone clears the cache, the files are missing and the build script runs again.
            println!("cargo::rerun-if-changed={}", file.display());
            assembler.define(define, Some(assembler_literal(file).as_str()));
        }
    }
    assembler.compile(name);
}

/// Returns a path as a string literal for the assembler.
fn assembler_literal(path: &Path) -> String {
    let text = path.display().to_string();
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""))
}
