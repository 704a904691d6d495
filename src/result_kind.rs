//! The kinds of failure that the server reports itself, in place of the type of a Lisp condition.

/// The failure kind of an evaluation that reached its time limit.
pub(crate) const TIMEOUT: &str = "TIMEOUT";
/// The failure kind of an evaluation that was cancelled or aborted, or whose image was replaced by a reset or restore.
pub(crate) const CANCELLED: &str = "CANCELLED";
/// The failure kind of an evaluation that nearly filled the heap.
pub(crate) const HEAP_EXHAUSTED: &str = "HEAP-EXHAUSTED";
/// The failure kind of an evaluation that ended its own thread.
pub(crate) const THREAD_TERMINATED: &str = "THREAD-TERMINATED";
/// The failure kind of an evaluation during which the Lisp process ended.
#[cfg(feature = "mcp")]
pub(crate) const IMAGE_LOST: &str = "IMAGE-LOST";

/// A kind of failure, as docs/reference/result-kinds.md describes it.
#[cfg(feature = "mcp")]
#[derive(Debug, Clone, Copy)]
pub struct ResultKind {
    /// The name of the kind, as answers show it after `[ERROR]`.
    pub name: &'static str,
    /// The cause of the failure.
    pub cause: &'static str,
    /// The state of the image afterwards.
    pub afterwards: &'static str,
    /// The recommended next step of the client.
    pub remedy: &'static str,
}

/// Every kind of failure that the server reports itself.
#[cfg(feature = "mcp")]
pub const RESULT_KINDS: [ResultKind; 5] = [
    ResultKind {
        name: TIMEOUT,
        cause: "The evaluation ran longer than its time limit, and was interrupted.",
        afterwards: "The image is kept, with the changes that the evaluation had already made. If the evaluation did not \
                     begin to unwind within 2 seconds, or did not finish unwinding, the image is replaced (with \
                     `--no-supervisor`, the evaluation's thread is abandoned), and the message says so.",
        remedy: "Read the backtrace, which shows where the evaluation was interrupted. Pass a larger `timeout`; or pass \
                 `background` or `wait` without `timeout`, so that there is no time limit.",
    },
    ResultKind {
        name: CANCELLED,
        cause: "The client cancelled the call, or `abort-evaluation`, a reset or the restore of a checkpoint ended the \
                evaluation.",
        afterwards: "After a reset or restore, the changes that the evaluation had already made to the image are gone. \
                     Otherwise, the image is kept, with these changes; if the evaluation could not be interrupted, the same \
                     applies as after `TIMEOUT`.",
        remedy: "Call again if you still need the result.",
    },
    ResultKind {
        name: HEAP_EXHAUSTED,
        cause: "The evaluation nearly filled the heap, and was stopped before the heap was exhausted.",
        afterwards: "The image is kept, without the objects that only the evaluation referred to. The message says how much \
                     memory is still in use. If the evaluation could not be stopped in time, the image is replaced \
                     (with `--no-supervisor`, the evaluation's thread is abandoned, or the server ends).",
        remedy: "Keep less in memory, or start the server with a larger `--heap`.",
    },
    ResultKind {
        name: THREAD_TERMINATED,
        cause: "Lisp code ended the thread of the evaluation, for instance with `sb-thread:abort-thread`.",
        afterwards: "The image is kept; a new thread has replaced the ended thread.",
        remedy: "Let the code return or signal an error.",
    },
    ResultKind {
        name: IMAGE_LOST,
        cause: "The Lisp process ended during the evaluation: it exited or was killed, C code or SBCL itself aborted, \
                or the server ended it.",
        afterwards: "A new image has replaced the lost image. Unless `--restore` says otherwise, the new image has the last \
                     checkpoint, if there is one, and the later definitions. The message says what was restored and what \
                     was lost.",
        remedy: "Assign the lost values again. Save a checkpoint before you retry the evaluation.",
    },
];
