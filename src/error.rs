//! The errors of booting, of inspections and of requests about evaluations. An error in evaluated code is part of an
//! [`Outcome`](crate::Outcome).

use crate::audience::Audience;
use crate::tool_names;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use thiserror::Error;

/// The error for a setting that is out of its range.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{setting} {value} is out of range; allowed: {allowed}")]
pub struct LimitError {
    /// The setting's name.
    pub setting: &'static str,
    /// The given value.
    pub value: String,
    /// A description of the allowed values.
    pub allowed: String,
}

impl LimitError {
    pub(crate) fn check(setting: &'static str, unit: &str, value: u64, range: RangeInclusive<u64>) -> Result<(), Self> {
        if range.contains(&value) {
            Ok(())
        } else {
            let (least, most) = (range.start(), range.end());
            let allowed = match unit {
                "bytes" => format!("{} to {}", format_size(*least), format_size(*most)),
                _ => format!("{least} to {most} {unit}"),
            };
            Err(Self { setting, value: if unit == "bytes" { format_size(value) } else { value.to_string() }, allowed })
        }
    }
}

/// Formats a number of bytes in the command line's notation, with the largest unit that divides the number: `128M`.
pub(crate) fn format_size(bytes: u64) -> String {
    match bytes.trailing_zeros() {
        30..64 => format!("{}G", bytes >> 30),
        20..30 => format!("{}M", bytes >> 20),
        10..20 => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}

/// The reason why the image could not be booted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BootError {
    /// The only image that a process can have has been booted before, or is being booted now.
    #[error(
        "SBCL is already booted or booting in this process, which can have only one image: to use that image, call \
         Lisp::get_or_boot, or clone the Session if Session::start booted the image"
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
        "SBCL needs {} MiB of address space for its heap and stacks, but this process is limited to {} MiB: reduce the \
         options heap and control-stack, or raise the limit (ulimit -v)", needed.div_ceil(1 << 20), limit >> 20
    )]
    AddressSpace {
        /// The needed address space in bytes.
        needed: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// `libsbcl` could not be loaded, or is not the library that this program was built with.
    #[error("cannot load SBCL's runtime library {path}: {reason}")]
    Library {
        /// The library's file.
        path: PathBuf,
        /// The loader's message, or the reason why the library was refused.
        reason: String,
    },
    /// The core cannot be used, for example because it does not exist, is incomplete, was changed after it was saved, or
    /// belongs to another build of SBCL.
    #[error("cannot use the SBCL core {path}: {reason}")]
    Core {
        /// The core's file.
        path: PathBuf,
        /// The reason why the core cannot be used.
        reason: String,
    },
    /// The core was saved by a program that contains another build of this crate or of SBCL. Only programs with the same
    /// build can boot the core.
    #[error("the core {} was saved by build {saved_by}, but this program is build {this}: save a new core", path.display())]
    OtherBuild {
        /// The core's file.
        path: PathBuf,
        /// The build that saved the core: the crate's version, SBCL's version, and an identifier of the build.
        saved_by: String,
        /// The build of this program.
        this: String,
    },
    /// The requested heap size differs from the heap size that the core was saved with. If no heap size is requested, the
    /// core boots with the saved size.
    #[error(
        "the core {} was saved with a heap of {} MiB and does not boot with {} MiB: set the option heap to the saved \
        size", path.display(),
        saved >> 20, asked >> 20
    )]
    OtherHeap {
        /// The core's file.
        path: PathBuf,
        /// The heap size that the core was saved with, in bytes.
        saved: u64,
        /// The requested heap size, in bytes.
        asked: u64,
    },
    /// This program contains no core.
    #[error(
        "this program contains no SBCL core: it was built without the feature `core`, and its build script built no core \
         (sbcl-build). Set the option core to a directory that has an sbcl.core"
    )]
    NoCore,
    /// The core was built for another version of the contract between Rust and Lisp.
    #[error(
        "the SBCL core implements version {found} of the interface between Lisp and Rust, but this program needs \
         version {expected}: rebuild the core from the sources of this version of sbcl-mcp, or do not pass your own \
         core"
    )]
    Contract {
        /// The version of the host contract in this crate.
        expected: u32,
        /// The version of the host contract in the core.
        found: u32,
    },
    /// `initialize_lisp` failed.
    #[error("SBCL's runtime failed to start (status {0}); its message is on this process's stderr")]
    Runtime(i32),
    /// SBCL has booted, but the image could not be prepared, for example because a thread could not be started.
    #[error("SBCL has booted, but the image could not be prepared: {0}")]
    Start(String),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    Os {
        /// The action that failed, worded to follow "cannot".
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The reason why an inspection of the image failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InspectError {
    /// Lisp signalled an error, for instance because a package does not exist.
    #[error("{kind}: {message}")]
    Lisp {
        /// The condition's class name.
        kind: String,
        /// The condition's report.
        message: String,
    },
    /// The inspection took longer than this number of seconds: a print method or a macro function might not terminate, an
    /// object might take long to print, or other code might hold a lock that the inspection needs.
    #[error(
        "The inspection did not finish within {0} seconds: one of the session's print methods or macro functions might \
         not terminate, an object such as a symbol with a very long name might take long to print, or other code might \
         hold a lock that the inspection needs, for instance while it compiles. Redefine that method or function, or \
         call again later."
    )]
    Timeout(u64),
    /// The inspection was cancelled, or the session was reset or restored before the inspection finished.
    #[error(
        "The request was cancelled, or the session was reset or restored before the request finished. Call again if \
         you still need the result."
    )]
    Cancelled,
    /// The inspection needs a session in which no evaluation runs, and an evaluation is running.
    #[error("An evaluation is running.")]
    Running,
    /// The inspection needs a session in which no evaluation is held, and an evaluation is held.
    #[error("An evaluation is held.")]
    Held,
    /// A print method or a macro function ended the inspection's thread.
    #[error(
        "One of the session's print methods or macro functions ended the inspection's thread, for instance by \
         abort-thread or throw. Redefine that method or function."
    )]
    ThreadTerminated,
}

/// The reason why the status of an evaluation is not available, or a background evaluation cannot begin.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EvaluationError {
    /// The connection has evaluated nothing yet.
    #[error("No evaluations of this client yet.")]
    None,
    /// The connection has evaluated nothing since the session was reset, or its image was replaced or lost.
    #[error(
        "No evaluations of this client since the session was reset, or the image was replaced or lost; evaluations up \
         to {last} are no longer kept."
    )]
    NoneSince {
        /// The number of the newest evaluation before the reset, replacement or loss.
        last: u64,
    },
    /// No evaluation has this number.
    #[error("There is no evaluation {id}: the newest is {last}.")]
    Unknown {
        /// The requested number.
        id: u64,
        /// The number of the newest evaluation.
        last: u64,
    },
    /// The evaluation is no longer kept.
    #[error(
        "Evaluation {id} is no longer kept: the session keeps the last 20, up to 16 MB, until it is reset, or its \
         image is replaced or lost."
    )]
    Gone {
        /// The evaluation's number.
        id: u64,
    },
    /// The evaluation was in the background when its image was lost.
    #[error(
        "Background evaluation {id} was lost with the image. The first evaluation answered after the loss shows the \
         cause."
    )]
    Lost {
        /// The evaluation's number.
        id: u64,
    },
    /// The limit of background evaluations is reached. Evaluations that wait to begin in the background count, too.
    #[error(
        "Background limit reached: {count} evaluations. Wait for an evaluation to end, cancel an evaluation{}, or \
         evaluate the code in the foreground.",
        tool_names::if_usable(&["abort-evaluation"], " (abort-evaluation {\"id\": …})")
    )]
    TooMany {
        /// The number of evaluations that are in the background or wait to begin there.
        count: usize,
    },
}

/// The way in which a hold ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldEnd {
    /// A request resumed the evaluation, which may be held again at its next error.
    Resumed,
    /// A request aborted the evaluation.
    Aborted,
    /// The hold reached its time limit.
    TimedOut,
    /// The session released the evaluation for a later evaluation or a reset. While the user is being asked about the
    /// evaluation, the next evaluation waits and hence does not release the evaluation.
    Released,
    /// Another connection took over the evaluation, which stays held.
    TakenOver,
}

/// A hold that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndedHold {
    /// The number of the evaluation that was held.
    pub evaluation: u64,
    /// The way in which the hold ended.
    pub end: HoldEnd,
}

/// Returns the explanation, as the rest of a message, why a connection holds no evaluation. `last` is the connection's
/// last hold; `None` if there was none.
fn explain_nothing_held(last: Option<EndedHold>) -> String {
    let (how, advice) = match Audience::current() {
        Audience::Repl => ("at the prompt", ""),
        _ => ("with on-error \"debug\"", " To debug an error, evaluate the code with on-error \"debug\"."),
    };
    let Some(EndedHold { evaluation, end }) = last else {
        return format!(
            "an evaluation that fails {how} is held until it is resumed or aborted, its hold times out, another client takes it \
             over, or a later evaluation outside its frames, a reset, a restore or the loss of the image ends it."
        );
    };
    let end = match end {
        HoldEnd::Resumed => "it was resumed",
        HoldEnd::Aborted => "it was aborted",
        HoldEnd::TimedOut => "its hold timed out",
        HoldEnd::Released => "a later evaluation or a reset ended it",
        HoldEnd::TakenOver => "another client took it over",
    };
    format!("evaluation {evaluation} was held until {end}.{advice}")
}

/// The reason why a request about a held evaluation failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HoldError {
    /// The connection holds no evaluation.
    #[error("No evaluation is held: {}", explain_nothing_held(*last))]
    NothingHeld {
        /// The connection's last hold in this image, if there was one.
        last: Option<EndedHold>,
    },
    /// The request was refused. The field is the reason, for instance that the restart or frame does not exist.
    #[error("{0}")]
    Refused(String),
    /// The request was cancelled.
    #[error("The request was cancelled before it finished.")]
    Cancelled,
}
