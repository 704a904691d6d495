//! Whoever must know what is to outlive this image.

use std::sync::Arc;
use std::time::Duration;

use crate::config::Limits;
use crate::interruption::Stuck;
use crate::outcome::{Changes, Clipped, DefiningForm, ErrorRecord, Outcome};

/// Is told what another image would need to go on where this one stopped. Called on Lisp's threads, before the answer
/// that it belongs to: nothing may block.
pub(crate) trait Observer: Send + Sync {
    /// The evaluation lane takes a job of this connection's, which is interrupted after `timeout`.
    fn begun(&self, _job: u64, _connection: u64, _timeout: Option<Duration>) {}
    /// It gets so much time from now on, or any.
    fn extended(&self, _more: Option<Duration>) {}
    /// What the job of that lane does now, if that is something in particular.
    fn step(&self, _step: Option<&str>) {}
    /// A person is being asked what to do, or not any more.
    fn asks(&self, _yes: bool) {}
    /// A job of that lane is over, or goes on in the background.
    fn ended(&self, _job: u64) {}
    /// These evaluations are in the background.
    fn in_background(&self, _evaluations: &mut dyn Iterator<Item = u64>) {}
    /// The inspection lane does this job, or none.
    fn inspects(&self, _job: Option<u64>) {}
    /// The error that an evaluation added to a connection's history, and the error state after it, changed or not.
    fn errors(&self, _connection: u64, _added: Option<&Arc<ErrorRecord>>, _last: Option<&Arc<ErrorRecord>>) {}
    /// A form of the evaluation with this number defined something. `local`: the package was bound for that alone.
    fn defined(&self, _form: &DefiningForm, _changes: &Changes, _local: bool, _evaluation: u64) {}
    /// A connection has ended.
    fn disconnected(&self, _connection: u64) {}
    /// An evaluation got this number.
    fn numbered(&self, _evaluation: u64) {}
    /// The limits were set.
    fn limits(&self, _limits: &Limits) {}
    /// True while what is evaluated is what was evaluated in another image: nobody is to hear of it.
    fn restores(&self) -> bool {
        false
    }
    /// What Lisp does now cannot be stopped; this is what can be said of an evaluation. The image is to be given up.
    fn stuck(&self, _outcome: Option<Outcome>, _why: Stuck) {}
}

/// Where one evaluation is all that a process is for, and no other image could go on: is told what can be said of it when
/// what Lisp does cannot be stopped.
pub(crate) struct LastWords<F>(F);

impl<F: Fn(Outcome) + Send + Sync> LastWords<F> {
    /// `say` gets an outcome that is an error, and ends the process.
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
