//! Why a core could not be made.

use std::fmt;
use std::path::PathBuf;

use sbcl_core::settings;

/// Why an application's core could not be made.
// `main` of a build script shows the error's Debug form, so that is the sentence, too.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The package does not depend on `sbcl-mcp`.
    #[error("sbcl-build needs the package to depend on sbcl-mcp itself, of the same version, in [dependencies]")]
    NoDependency,

    /// The program would carry the plain core, too.
    #[error(
        "the program would carry two cores: its dependency sbcl-mcp has the feature `core`. Give it \
         default-features = false; if the feature comes from another package, build this one alone (-p)"
    )]
    TwoCores,

    /// The directory of ready files has no core for this package.
    #[error(
        "{variable} is set, so no core is made, and there is no {}. A build without the variable leaves that file in its \
         OUT_DIR: put it there, or unset the variable",
        core.display(), variable = settings::PREBUILT
    )]
    Prebuilt {
        /// The file that was looked for.
        core: PathBuf,
    },

    /// The application's Lisp does not compile, or load. Cargo was told why.
    #[error("{errors} in the application's Lisp; all that SBCL said: {}", log.display())]
    Lisp {
        /// How many there are, in words.
        errors: String,
        /// The file with all of SBCL's output.
        log: PathBuf,
    },

    /// SBCL could not do its work.
    #[error("SBCL did not make the core ({status}). The end of its output, which is in {}:\n{output}", log.display())]
    Sbcl {
        /// How it ended.
        status: String,
        /// The last lines of its output.
        output: String,
        /// The file with all of it.
        log: PathBuf,
    },

    /// A file or directory could not be used.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self}")
    }
}
