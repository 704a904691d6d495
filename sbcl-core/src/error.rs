//! Errors of a build, with advice on how to fix them.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::{pin, settings};

/// A failed attempt to obtain SBCL's source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The provider that was tried.
    pub provider: String,
    /// The reason why the attempt failed.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.provider, self.reason)
    }
}

/// An error that makes a build fail.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The prebuilt directory cannot be used: its path is not absolute, or it lacks a file.
    #[error(
        "{variable} is {directory:?}, but {problem}. {variable} must be the absolute path of a directory that \
         holds {files}. Unset {variable} to build SBCL {version} from source",
        variable = settings::PREBUILT,
        version = pin::VERSION
    )]
    Prebuilt {
        /// The directory that `SBCL_MCP_PREBUILT` names.
        directory: PathBuf,
        /// The problem with the directory.
        problem: String,
        /// The names of the files that the directory must hold, as a phrase: the library, and the core if it is needed.
        files: String,
    },

    /// SBCL for the requested platform cannot be built on this machine. SBCL's build runs the new SBCL, so the build needs a
    /// machine of this platform, or an emulator.
    #[error(
        "SBCL for {target} cannot be built on {host}: build on {target}, or set {variable} to the absolute path of a \
         directory with a libsbcl and an sbcl.core for {target}",
        variable = settings::PREBUILT
    )]
    CrossBuild {
        /// The requested platform.
        target: String,
        /// The platform of this machine.
        host: String,
    },

    /// Programs that the build needs are not installed.
    #[error("building SBCL needs programs that were not found: {list}. {help}", list = missing.join(", "))]
    MissingTools {
        /// The missing programs.
        missing: Vec<String>,
        /// The commands that install the missing programs, one for each operating system.
        help: String,
    },

    /// The C compiler is installed but does not work.
    #[error("the C compiler `{compiler}` {problem}:\n{output}\n{help}")]
    BrokenCompiler {
        /// The compiler's command.
        compiler: String,
        /// The failure, worded to follow the compiler's command.
        problem: String,
        /// The compiler's output.
        output: String,
        /// The commands that install a complete compiler, one for each operating system.
        help: String,
    },

    /// The emulator that runs another machine's programs is installed but does not work.
    #[error("programs for {target} do not run on this machine:\n{output}")]
    BrokenEmulator {
        /// The requested platform.
        target: String,
        /// The output of the emulator or of the emulated program, with advice.
        output: String,
    },

    /// A source that the user named, or a fetched repository, cannot be used.
    #[error(
        "SBCL's source cannot be used ({provider}): {reason}. Set SBCL_MCP_SOURCE to the absolute path of a directory or \
         archive of SBCL {version} ({archive}, SHA-256 {sha}); if this variable is not set, the build fetches the source",
        version = pin::VERSION, archive = pin::ARCHIVE, sha = pin::ARCHIVE_SHA256
    )]
    SourceRefused {
        /// The environment variable that names the source, with its value, or the path of the fetched repository.
        provider: String,
        /// The reason why the source cannot be used.
        reason: String,
    },

    /// The directory of another SBCL's source cannot be used.
    #[error(
        "{variable} is {directory:?}, but {problem}. {variable} must be the absolute path of a directory with SBCL's \
         source",
        variable = settings::NEXT
    )]
    NextRefused {
        /// The directory that `SBCL_MCP_NEXT` names.
        directory: PathBuf,
        /// The problem with the directory.
        problem: &'static str,
    },

    /// No provider had the source.
    #[error(
        "the source of SBCL {version} could not be obtained. Tried:{list}\nDownload {archive}, Debian's source archive, or \
         check out tag {tag} of upstream's git repository, and set {variable} to the absolute path of the archive or checkout",
        version = pin::VERSION,
        archive = pin::ARCHIVE,
        tag = pin::GIT_TAG,
        variable = settings::SOURCE,
        list = tried.iter().map(|attempt| format!("\n  - {attempt}")).collect::<String>()
    )]
    NoSource {
        /// The failed attempts, one for each provider, in order.
        tried: Vec<Attempt>,
    },

    /// A program that a step runs failed or could not be started.
    #[error("{step} failed ({status}).{}\nThe full output is in {}", end_of_output(output), log.display())]
    Step {
        /// The name of the step, such as `saving the core`.
        step: String,
        /// The program's exit status, or the reason why it could not be started.
        status: String,
        /// The last lines of the program's output; empty if there was none.
        output: String,
        /// The file with all of the output.
        log: PathBuf,
    },

    /// A step succeeded without making its result.
    #[error("{step} did not produce {}; the output of this step is in {}", file.display(), log.display())]
    MissingResult {
        /// The name of the step, such as `saving the core`.
        step: String,
        /// The missing file.
        file: PathBuf,
        /// The file with all of the output.
        log: PathBuf,
    },

    /// A file or directory could not be used.
    #[error("{action} {} failed: {source}", path.display())]
    Io {
        /// The failed action, such as `reading`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
}

/// Returns the part of a message that shows the last lines of a program's output; empty without output.
fn end_of_output(output: &str) -> String {
    if output.is_empty() { String::new() } else { format!(" The end of the output:\n{output}") }
}

/// An extension of I/O results, which adds the failed action and its path to an error.
pub(crate) trait IoContext<T> {
    /// Converts an I/O error into [`Error::Io`], with the action and its path.
    fn context(self, action: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T> IoContext<T> for std::io::Result<T> {
    fn context(self, action: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::Io { action, path: path.to_owned(), source })
    }
}
