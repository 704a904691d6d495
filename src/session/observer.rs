//! Observers of a session, which record what must outlive its image.

use std::sync::Arc;
use std::time::Duration;

use crate::config::Limits;
use crate::interruption::Stuck;
use crate::outcome::{Changes, Clipped, DefiningForm, ErrorRecord, Outcome};

/// Gets the events of a session that another image would need to continue it. Called on Lisp's threads, before the answer
/// that an event belongs to: no function may block.
pub(crate) trait Observer: Send + Sync {
    /// The evaluation lane begins a job of this connection's, which is interrupted after `timeout`.
    fn begun(&self, _job: u64, _connection: u64, _timeout: Option<Duration>) {}
    /// The job of the evaluation lane gets this time from now on; `None` for any time.
    fn extended(&self, _more: Option<Duration>) {}
    /// The job of the evaluation lane does something in particular now, or no longer.
    fn step(&self, _step: Option<&str>) {}
    /// A person is being asked what to do, or no longer.
    fn asks(&self, _yes: bool) {}
    /// A job of the evaluation lane is over, or continues in the background.
    fn ended(&self, _job: u64) {}
    /// These evaluations are in the background.
    fn in_background(&self, _evaluations: &mut dyn Iterator<Item = u64>) {}
    /// The inspection lane does this job, or none.
    fn inspects(&self, _job: Option<u64>) {}
    /// The error that an evaluation added to a connection's history, and the error state after it, changed or not.
    fn errors(&self, _connection: u64, _added: Option<&Arc<ErrorRecord>>, _last: Option<&Arc<ErrorRecord>>) {}
    /// A form of the evaluation with this number made `changes`. `local`: the package was bound for that evaluation alone.
    fn defined(&self, _form: &DefiningForm, _changes: &Changes, _local: bool, _evaluation: u64) {}
    /// A connection has ended.
    fn disconnected(&self, _connection: u64) {}
    /// An evaluation got this number.
    fn numbered(&self, _evaluation: u64) {}
    /// The limits were set.
    fn limits(&self, _limits: &Limits) {}
    /// True during a replay, which is not reported.
    fn restores(&self) -> bool {
        false
    }
    /// Lisp does something that cannot be stopped: the image must be replaced. `outcome` is that of the evaluation, if one ran.
    fn stuck(&self, _outcome: Option<Outcome>, _why: Stuck) {}
}

/// Gets the outcome of the evaluation that a process exists for, when Lisp does something that cannot be stopped and no other
/// image can continue.
pub(crate) struct LastWords<F>(F);

impl<F: Fn(Outcome) + Send + Sync> LastWords<F> {
    /// Makes such an observer: `say` gets an outcome that is an error, and ends the process.
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
