//! Calls of a session from threads that must not wait for one of its evaluations, or not for ever.

use std::cell::Cell;

use super::Session;
use crate::image::{self, Lane};

/// The kind of the error that an evaluation fails with when the calling thread must not wait for it.
pub(super) const DEADLOCK: &str = "DEADLOCK";

const BY_EVALUATION: &str = "Session::evaluate was called on the thread that evaluates, by a Rust function that an \
    evaluation of the session called, or by a reply: it would wait for itself. Call Lisp directly there (Lisp::eval, \
    Lisp::enter), or queue the code with Session::submit, whose reply comes later.";
pub(super) const BY_BACKGROUND: &str = "Session::evaluate was called in an evaluation in the background, and as many are \
    there as may be: all of them wait like that for evaluations that cannot begin before one of them ends. Queue the code \
    with Session::submit, whose reply comes later.";
const BY_STREAM: &str = "Session::evaluate was called by a stream or a warning hook of Lisp's, which an evaluation may be \
    waiting for. Queue the code with Session::submit, whose reply comes later.";

thread_local! {
    static SERVES_STREAM: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as one that serves a stream or the warning hook: whoever prints or reads waits for it.
pub(crate) fn serve_stream() {
    SERVES_STREAM.set(true);
}

/// True in a thread that serves a stream or the warning hook.
pub(crate) fn serves_stream() -> bool {
    SERVES_STREAM.get()
}

impl Session {
    /// Returns the evaluation in the background that this thread works on, if there is one; or the reason why the thread must
    /// not wait for an evaluation.
    pub(super) fn waiting_job(&self) -> Result<Option<u64>, &'static str> {
        if serves_stream() {
            return Err(BY_STREAM);
        }
        let Some((lane, job)) = image::current_job() else { return Ok(None) };
        let is_background = self.inner.board.lock().find(job).is_some_and(|running| running.is_background());
        match lane {
            _ if is_background => Ok(Some(job)),
            // Those of the control lane start the threads that evaluations may need.
            Lane::Evaluation | Lane::Control => Err(BY_EVALUATION),
            _ => Ok(None),
        }
    }
}
