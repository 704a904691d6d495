//! Errors of building an application's core.

use std::fmt;
use std::path::PathBuf;

use sbcl_core::settings;

/// An error that prevented an application's core from being built.
// A build script's `main` prints an error in its Debug form, so Debug prints the message, too.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The package does not depend on `sbcl-mcp`.
    #[error(
        "the package must depend directly on sbcl-mcp, with the same version as sbcl-build: add sbcl-mcp to \
         [dependencies]"
    )]
    NoDependency,

    /// The program would contain two cores: its own and the plain core.
    #[error(
        "the program would contain two cores: its dependency sbcl-mcp has the feature `core`. Set \
         default-features = false for sbcl-mcp; if the feature comes from another package, build this package alone (-p)"
    )]
    TwoCores,

    /// The prebuilt directory has no core for this package.
    #[error(
        "{variable} is set, so no core is built, but {} does not exist. Copy this file from the OUT_DIR of a build without \
         the variable, or unset the variable",
        core.display(), variable = settings::PREBUILT
    )]
    Prebuilt {
        /// The missing file.
        core: PathBuf,
    },

    /// The application's Lisp does not compile or load. Cargo has shown the errors.
    #[error("{errors} in the application's Lisp; SBCL's full output is in {}", log.display())]
    Lisp {
        /// The number of errors, as a phrase such as `one error` or `2 errors`.
        errors: String,
        /// The file with all of SBCL's output.
        log: PathBuf,
    },

    /// SBCL did not produce the core.
    #[error("SBCL did not save the core ({status}). Its full output is in {} and ends with:\n{output}", log.display())]
    Sbcl {
        /// SBCL's exit status.
        status: String,
        /// The last lines of SBCL's output.
        output: String,
        /// The file with all of SBCL's output.
        log: PathBuf,
    },

    /// A file or directory could not be used.
    #[error("{action} {} failed: {source}", path.display())]
    Io {
        /// The failed action, such as `writing`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self}")
    }
}
