//! Detection of evaluations that would never end: `Session::evaluate` returns an error when it is called on a thread that
//! must not wait for the session's evaluations, or in a forked process.

use std::cell::Cell;

use super::Session;
use crate::image::{self, Lane};

/// The kind of the error that `Session::evaluate` returns on a thread that must not wait for an evaluation.
pub(super) const DEADLOCK: &str = "DEADLOCK";

const DEADLOCK_IN_EVALUATION: &str = "Session::evaluate was called on an evaluation thread (by a Rust function that an \
    evaluation called, or by a function that receives a reply): the call would wait for itself. Call Lisp directly \
    (Lisp::eval, Lisp::enter), or queue the code with Session::submit, which replies later.";
pub(super) const DEADLOCK_IN_BACKGROUND: &str = "Session::evaluate was called in a background evaluation, and the call \
    would never return: the background limit is reached, and every background evaluation would wait for an evaluation \
    that cannot begin or end. Queue the code with Session::submit, which replies later.";
const DEADLOCK_IN_STREAM: &str = "Session::evaluate was called by a Lisp stream or warning hook, which an evaluation may be \
    waiting for. Queue the code with Session::submit, which replies later.";

/// The kind of the error of an evaluation in a forked process.
pub(super) const FORKED: &str = "FORKED";
/// The message of the error of an evaluation in a forked process.
pub(super) const NO_THREADS: &str = "This process is a forked copy of a process that had booted Lisp: it has no Lisp threads, \
    and cannot boot Lisp again. Fork first, and boot Lisp in the child.";

thread_local! {
    static IS_STREAM_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as serving a stream or the warning hook. Lisp code that prints, reads or warns waits for such
/// a thread.
pub(crate) fn mark_stream_thread() {
    IS_STREAM_THREAD.set(true);
}

/// Returns true in a thread that serves a stream or the warning hook.
pub(crate) fn is_stream_thread() -> bool {
    IS_STREAM_THREAD.get()
}

impl Session {
    /// Returns the job number of the background evaluation that this thread runs, or `None` if it runs none. Returns
    /// the reason, as an error, if the thread must not wait for an evaluation.
    pub(super) fn background_waiter(&self) -> Result<Option<u64>, &'static str> {
        if is_stream_thread() {
            return Err(DEADLOCK_IN_STREAM);
        }
        let Some((lane, job)) = image::current_lane_and_job() else { return Ok(None) };
        let is_background = self.inner.scheduler.lock().find(job).is_some_and(|running| running.is_background());
        match lane {
            _ if is_background => Ok(Some(job)),
            // The control lane must not wait: it starts the threads that evaluations may need.
            Lane::Evaluation | Lane::Control => Err(DEADLOCK_IN_EVALUATION),
            _ => Ok(None),
        }
    }
}
