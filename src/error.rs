//! The library's errors. A Lisp error is not one of them: it is an [`Outcome`](crate::Outcome).

use crate::tool_names;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use thiserror::Error;

/// A setting out of its range.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{setting} {value} is out of range: allowed is {allowed}")]
pub struct LimitError {
    /// The setting's name.
    pub setting: &'static str,
    /// What was given.
    pub value: String,
    /// What is allowed, in words.
    pub allowed: String,
}

impl LimitError {
    pub(crate) fn check(setting: &'static str, unit: &str, value: u64, range: RangeInclusive<u64>) -> Result<(), Self> {
        if range.contains(&value) {
            Ok(())
        } else {
            let (least, most) = (range.start(), range.end());
            let allowed = match unit {
                "bytes" => format!("{} to {}", size(*least), size(*most)),
                _ => format!("{least} to {most} {unit}"),
            };
            Err(Self { setting, value: if unit == "bytes" { size(value) } else { value.to_string() }, allowed })
        }
    }
}

/// A number of bytes, as the command line takes it where that is exact: `128M`.
fn size(bytes: u64) -> String {
    match bytes.trailing_zeros() {
        30..64 => format!("{}G", bytes >> 30),
        20..30 => format!("{}M", bytes >> 20),
        10..20 => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}

/// Why the image could not be booted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BootError {
    /// There is one image a process, and it was booted before (or is being booted now).
    #[error(
        "SBCL is booted already: there is one image a process, to be shared (Lisp::get_or_boot gives it to programs)"
    )]
    AlreadyBooted,
    /// An earlier boot failed; SBCL's runtime cannot be initialised twice.
    #[error("an earlier boot of SBCL failed in this process; start a new process")]
    BootFailed,
    /// A size is out of range.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The system's limit for this process leaves no room for heap and stacks.
    #[error(
        "SBCL needs {} MiB of address space for its heap and stacks, and this process may use {} MiB: make them smaller \
         (the options heap and control-stack), or raise the limit (ulimit -v)", needed >> 20, limit >> 20
    )]
    AddressSpace {
        /// What is needed, in bytes.
        needed: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// `libsbcl` could not be loaded, or is not the one that this program was built with.
    #[error("cannot load SBCL's runtime library {path}: {reason}")]
    Library {
        /// The library's file.
        path: PathBuf,
        /// The loader's message, or what is wrong with the library.
        reason: String,
    },
    /// The core cannot be used: there is none, it is not complete, or it is of another build of SBCL.
    #[error("cannot use the SBCL core {path}: {reason}")]
    Core {
        /// The core's file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The core was saved by a program with another SBCL, or another version of this crate. No other program boots it.
    #[error("the core {} was saved by another build ({saved_by}); this program is of {this}", path.display())]
    OtherBuild {
        /// The core's file.
        path: PathBuf,
        /// The build that saved it: the crate's version, SBCL's, and what tells apart builds of these.
        saved_by: String,
        /// This one.
        this: String,
    },
    /// The core was saved under a heap of another size. It takes the same one unless one is asked for.
    #[error(
        "the core {} was saved under a heap of {} MiB, and does not boot under one of {} MiB", path.display(),
        saved >> 20, asked >> 20
    )]
    OtherHeap {
        /// The core's file.
        path: PathBuf,
        /// The heap that it was saved under, in bytes.
        saved: u64,
        /// The one that was asked for, in bytes.
        asked: u64,
    },
    /// This program carries no core.
    #[error(
        "this program carries no SBCL core: it was built without the feature `core`, and made none of its own in its \
         build script (sbcl-build). Name a directory with an sbcl.core"
    )]
    NoCore,
    /// Library and core were made for another version of this crate.
    #[error(
        "the SBCL core speaks version {found} of the host contract, this program speaks {expected}: \
         rebuild it from this version's sources, or do not pass a core of your own"
    )]
    Contract {
        /// This crate's version of the contract.
        expected: u32,
        /// The core's.
        found: u32,
    },
    /// `initialize_lisp` gave up.
    #[error("SBCL's runtime failed to start (status {0}); its own message is on stderr")]
    Runtime(i32),
    /// SBCL is up, but what it does for the host could not be started.
    #[error("SBCL could not start its threads: {0}")]
    Start(String),
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Why a question about the image got no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InspectError {
    /// Lisp signalled an error, for instance for a package that there is none of.
    #[error("{kind}: {message}")]
    Lisp {
        /// The condition's class name.
        kind: String,
        /// Its report.
        message: String,
    },
    /// It took too long: printing something of the session's does not end.
    #[error(
        "The inspection did not finish within {0} seconds: a print method or macro function of the \
             session's may not end."
    )]
    Timeout(u64),
}

/// Why there is nothing to be said of an evaluation.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EvaluationError {
    /// Nothing has been evaluated yet.
    #[error("No evaluations yet.")]
    None,
    /// There has been none since the session was reset, or its image replaced or lost.
    #[error(
        "No evaluations since the session was reset, or its image replaced or lost: those up to {last} are no longer kept."
    )]
    NoneSince {
        /// The number of the newest one before.
        last: u64,
    },
    /// There has been none of this number.
    #[error("There is no evaluation {id}: the newest one is {last}.")]
    Unknown {
        /// The number.
        id: u64,
        /// That of the newest one.
        last: u64,
    },
    /// It is no longer kept.
    #[error(
        "Evaluation {id} is no longer kept: the last 20 are, in at most 16 MB, until the session is reset or its \
         image lost."
    )]
    Gone {
        /// The number.
        id: u64,
    },
    /// It was in the background when its image was lost.
    #[error("Evaluation {id}, in the background, has been lost with its image{}.", tool_names::with(&["describe-last-error"], ": describe-last-error with `list` has what is known of it"))]
    Lost {
        /// The number.
        id: u64,
    },
    /// As many are in the background, or wait to be, as may.
    #[error(
        "{count} evaluations are in the background, which is as many as may be: wait for one of them, or cancel one{}, \
         or evaluate this in the foreground.",
        tool_names::with(&["abort-evaluation"], " (abort-evaluation {\"id\": …})")
    )]
    TooMany {
        /// How many there are.
        count: usize,
    },
}

/// Why what was asked of a held evaluation could not be done.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HoldError {
    /// No evaluation is held.
    #[error(
        "No evaluation is held: one is from the moment when it fails under on-error \"debug\" until it goes on, or \
         the next evaluation begins."
    )]
    NothingHeld,
    /// There is no such restart or frame, or SBCL cannot do it there.
    #[error("{0}")]
    Refused(String),
    /// It was cancelled before it was done.
    #[error("It was cancelled before it was done.")]
    Cancelled,
}
