//! What can go wrong, said so that a person knows what to do.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::{pin, settings};

/// A way to the source that did not lead there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The way.
    pub way: String,
    /// What was tried and what came of it.
    pub outcome: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.way, self.outcome)
    }
}

/// A build's failure.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The directory of ready files does not hold them.
    #[error(
        "{variable} is {directory:?}, but {problem}. It must be the absolute path of a directory that holds \
         {library} and sbcl.core. Unset it to build SBCL {version} from source",
        variable = settings::PREBUILT,
        version = pin::VERSION
    )]
    Prebuilt {
        /// What the variable names.
        directory: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// The library's file name on this platform.
        library: &'static str,
    },

    /// SBCL is only built on the machine it is for.
    #[error(
        "SBCL cannot be built for {target} on {host}: build on such a machine, or set {variable} to a directory \
         with a libsbcl and an sbcl.core made there",
        variable = settings::PREBUILT
    )]
    CrossBuild {
        /// The platform asked for.
        target: String,
        /// The platform at hand.
        host: String,
    },

    /// Programs that the build needs are not installed.
    #[error("building SBCL {version} needs {list}, not found on the PATH. {help}", version = pin::VERSION, list = missing.join(", "))]
    MissingTools {
        /// What is missing.
        missing: Vec<String>,
        /// The command that installs it, for each system.
        help: String,
    },

    /// The C compiler is there and does not work.
    #[error("the C compiler `{compiler}` cannot build a program that includes <stdio.h>:\n{output}\n{help}")]
    BrokenCompiler {
        /// The compiler's command.
        compiler: String,
        /// What it said.
        output: String,
        /// The command that installs a whole one, for each system.
        help: String,
    },

    /// The source that was named is not the pinned one.
    #[error(
        "{way}: {reason}. Name a directory or archive of SBCL {version} ({archive}, SHA-256 {sha}), or unset \
         the variable",
        version = pin::VERSION, archive = pin::ARCHIVE, sha = pin::ARCHIVE_SHA256
    )]
    SourceRefused {
        /// The way that named it.
        way: String,
        /// Why it cannot be used.
        reason: String,
    },

    /// No way led to the source.
    #[error(
        "the source of SBCL {version} could not be had. Tried:{list}\nFetch {archive}, or tag {tag} of upstream's git \
         repository, and set {variable} to it",
        version = pin::VERSION,
        archive = pin::ARCHIVE,
        tag = pin::GIT_TAG,
        variable = settings::SOURCE,
        list = tried.iter().map(|attempt| format!("\n  - {attempt}")).collect::<String>()
    )]
    NoSource {
        /// All that was tried, in order.
        tried: Vec<Attempt>,
    },

    /// A program that a step ran has failed.
    #[error("{step} failed ({status}). The end of its output:\n{output}\nThe whole of it: {}", log.display())]
    Step {
        /// What was being done.
        step: String,
        /// How the program ended.
        status: String,
        /// The last lines it printed.
        output: String,
        /// The file with everything it printed.
        log: PathBuf,
    },

    /// A step succeeded without making what it should.
    #[error("{step} did not make {}. Its output: {}", file.display(), log.display())]
    NotMade {
        /// What was being done.
        step: String,
        /// What is missing.
        file: PathBuf,
        /// The file with everything it printed.
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

/// Says what an input or output operation was for.
pub(crate) trait IoContext<T> {
    /// Turns the system's error into ours, which says what was done to what.
    fn doing(self, action: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T> IoContext<T> for std::io::Result<T> {
    fn doing(self, action: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::Io { action, path: path.to_owned(), source })
    }
}
