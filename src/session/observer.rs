//! The observer of a session, which records the state that outlives the image.

use std::sync::Arc;
use std::time::Duration;

use crate::config::Limits;
use crate::image::interruption::Stuck;
use crate::outcome::{Changes, Clipped, DefiningForm, ErrorRecord, Outcome};

/// Receives the changes that another image needs to continue the session. The session calls it on Lisp's threads, before
/// it sends the answer that a change belongs to: no method may block.
pub(crate) trait Observer: Send + Sync {
    /// A foreground job of this connection begins; it is interrupted after `timeout`.
    fn begun(&self, _job: u64, _connection: u64, _timeout: Option<Duration>) {}
    /// The foreground job gets a new deadline, this long from now; `None` for no deadline.
    fn extended(&self, _more: Option<Duration>) {}
    /// The foreground job begins this step; `None` when the step is over.
    fn step(&self, _step: Option<&str>) {}
    /// An answer begins to wait for a person or another process, or stops waiting.
    fn asks(&self, _yes: bool) {}
    /// A foreground job ends, or continues in the background.
    fn ended(&self, _job: u64) {}
    /// The set of background evaluations changes to these numbers.
    fn in_background(&self, _evaluations: &mut dyn Iterator<Item = u64>) {}
    /// This inspection job begins; `None` when it ends.
    fn inspects(&self, _job: Option<u64>) {}
    /// An evaluation ends. `added`: the new error in the connection's history; `last`: the connection's error state now.
    fn errors(&self, _connection: u64, _added: Option<&Arc<ErrorRecord>>, _last: Option<&Arc<ErrorRecord>>) {}
    /// A form of the evaluation with this number defined something. `local`: the package was bound for this evaluation only.
    fn defined(&self, _form: &DefiningForm, _changes: &Changes, _local: bool, _evaluation: u64) {}
    /// A connection ends.
    fn disconnected(&self, _connection: u64) {}
    /// An evaluation gets this number.
    fn numbered(&self, _evaluation: u64) {}
    /// A client sets the limits.
    fn limits(&self, _limits: &Limits) {}
    /// Returns true during a replay, whose evaluations are not reported again.
    fn restores(&self) -> bool {
        false
    }
    /// Lisp cannot be interrupted, so the image must be replaced. `outcome`: for the evaluation, if a call waits for one.
    fn stuck(&self, _outcome: Option<Outcome>, _why: Stuck) {}
}

/// The observer of a process that runs a single evaluation, without an image to replace its own: reports the outcome when
/// Lisp cannot be interrupted.
pub(crate) struct LastWords<F>(F);

impl<F: Fn(Outcome) + Send + Sync> LastWords<F> {
    /// Creates the observer; `say` gets an outcome that is an error, and ends the process.
    pub(crate) fn new(say: F) -> Self {
        Self(say)
    }
}

impl<F: Fn(Outcome) + Send + Sync> Observer for LastWords<F> {
    fn stuck(&self, outcome: Option<Outcome>, why: Stuck) {
        let Some(mut outcome) = outcome else { return };
        if let Err(error) = &mut outcome.result {
            let text = format!("{}. The Lisp image {}.", error.what_happened(), why.verb().trim_end_matches(','));
            Arc::make_mut(error).message = Clipped::from(text);
        }
        (self.0)(outcome);
    }
}
