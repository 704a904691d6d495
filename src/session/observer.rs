//! Whoever must know what is to outlive this image.

use std::sync::Arc;
use std::time::Duration;

use crate::config::Limits;
use crate::outcome::{DefiningForm, ErrorRecord, Outcome};

/// Is told what another image would need to go on where this one stopped. Called on Lisp's threads, before the answer
/// that it belongs to: nothing may block.
pub(crate) trait Observer: Send + Sync {
    /// The evaluation lane takes a job, which is interrupted after `timeout`.
    fn begun(&self, job: u64, timeout: Option<Duration>);
    /// It gets so much time from now on, or any.
    fn extended(&self, more: Option<Duration>);
    /// A person is being asked what to do, or not any more.
    fn asks(&self, yes: bool);
    /// A job of that lane is over, or goes on in the background.
    fn ended(&self, job: u64);
    /// These evaluations are in the background.
    fn in_background(&self, evaluations: &mut dyn Iterator<Item = u64>);
    /// The inspection lane does this job, or none.
    fn inspects(&self, job: Option<u64>);
    /// The error that an evaluation added to a connection's history, and the error state after it, changed or not.
    fn errors(&self, connection: u64, added: Option<&Arc<ErrorRecord>>, last: Option<&Arc<ErrorRecord>>);
    /// A form of the evaluation with this number defined something. `local`: the package was bound for that alone.
    fn defined(&self, form: &DefiningForm, local: bool, evaluation: u64);
    /// A connection has ended.
    fn disconnected(&self, connection: u64);
    /// An evaluation got this number.
    fn numbered(&self, evaluation: u64);
    /// The limits were set.
    fn limits(&self, limits: &Limits);
    /// True while what is evaluated is what was evaluated in another image: nobody is to hear of it.
    fn restores(&self) -> bool;
    /// What Lisp does now cannot be stopped; this is what can be said of an evaluation. The image is to be given up.
    fn stuck(&self, outcome: Option<Outcome>);
}
