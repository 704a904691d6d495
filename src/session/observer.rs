//! The observer of a session, which records the state that outlives the image.

use std::sync::Arc;
use std::time::Duration;

use crate::config::Limits;
use crate::image::interruption::StuckReason;
use crate::outcome::{Changes, Clipped, DefiningForm, ErrorRecord, Outcome};

/// A receiver of the changes that another image needs to continue the session. The session calls the observer before it
/// sends the answer that a change belongs to, on Lisp's threads, on the clock's thread or on the thread of a caller: no
/// method may block, except [`wait_for_recipient`](Self::wait_for_recipient).
pub(crate) trait Observer: Send + Sync {
    /// Called by a thread that evaluates or inspects before it takes its next job, and by a helper thread before it answers a
    /// call that waited for an evaluation. Waits while the recipient of answers and reports has too many of them to read: other
    /// clients' answers would wait behind the next answer.
    fn wait_for_recipient(&self) {}
    /// Called before a job begins on an evaluating thread, in the foreground or not. `job` is the number of a job of the call
    /// that requested the job. Not called for the server's own job.
    fn call_begun(&self, _job: u64) {}
    /// Called when a foreground job begins, with the numbers of the job and of its connection, and with the job's time
    /// limit; `None` for no limit. `requested_by` is the number of a job of the call that requested the job; `None` for the
    /// server's own job. `is_query` is true if the job evaluates no code, for example if it saves a checkpoint.
    fn job_begun(
        &self,
        _job: u64,
        _requested_by: Option<u64>,
        _is_query: bool,
        _connection: u64,
        _timeout: Option<Duration>,
    ) {
    }
    /// Called when the foreground job gets a new deadline. The argument is the time until the deadline; `None` for no
    /// deadline.
    fn deadline_changed(&self, _more: Option<Duration>) {}
    /// Called when the foreground job begins a step with a time limit of its own, such as a test, or with `None` when the
    /// step is over.
    fn step_changed(&self, _step: Option<&str>) {}
    /// Called when an answer begins to wait for a person or another process (`true`), or stops waiting (`false`).
    fn external_wait_changed(&self, _begins: bool) {}
    /// Called when a foreground job ends, or continues in the background.
    fn job_ended(&self, _job: u64) {}
    /// Called with the numbers of all background evaluations when the set of these evaluations changes.
    fn background_changed(&self, _evaluations: &mut dyn Iterator<Item = u64>) {}
    /// Called when an inspection begins, with the time until its deadline. `job` is the number of a job of the call that
    /// requested the inspection.
    fn inspection_begun(&self, _job: u64, _more: Duration) {}
    /// Called when a running inspection gets a later deadline, with the time until the deadline.
    fn inspection_deadline_changed(&self, _more: Duration) {}
    /// Called when an inspection ends. `left` has the number of a job of the inspection that began last among the
    /// inspections that still run, and the time until the last deadline of these inspections.
    fn inspection_ended(&self, _left: Option<(u64, Duration)>) {}
    /// Called when an evaluation ends or an error enters a connection's history. `added` is the new error in the
    /// history, `last` the connection's last error now. The scheduler's lock may be held: an observer that needs time queues
    /// the report until [`send_queued_reports`](Self::send_queued_reports).
    fn errors_changed(&self, _connection: u64, _added: Option<&Arc<ErrorRecord>>, _last: Option<&Arc<ErrorRecord>>) {}
    /// Called without the scheduler's lock: before the answer to an evaluation whose end may have changed errors, and after any
    /// other change of errors.
    fn send_queued_reports(&self) {}
    /// Called when a form of the evaluation with this number has defined something. `binds_package` is true if the
    /// package was bound for this evaluation only, and `attached` is true if the evaluation is not one of the session's own
    /// connection.
    fn form_defined(
        &self,
        _form: &DefiningForm,
        _changes: &Changes,
        _binds_package: bool,
        _attached: bool,
        _evaluation: u64,
    ) {
    }
    /// Called when the foreground evaluation with this number continues in the background. From now on, the package
    /// counts as bound for this evaluation only, even for the forms that have defined something already. May be called
    /// more than once for an evaluation.
    fn evaluation_detached(&self, _evaluation: u64) {}
    /// Called when a connection ends.
    fn connection_ended(&self, _connection: u64) {}
    /// Called when a new evaluation gets its number.
    fn evaluation_numbered(&self, _evaluation: u64) {}
    /// Called when a new error gets its number.
    fn error_numbered(&self, _error: u64) {}
    /// Called when a client sets the limits.
    fn limits_changed(&self, _limits: &Limits) {}
    /// Returns true during a replay of another image's forms. The session then leaves its error state unchanged when a
    /// foreground evaluation ends, and does not report definitions to other connections.
    fn is_replaying(&self) -> bool {
        false
    }
    /// Called when Lisp cannot be interrupted, so that the image must be replaced. `outcome` is the outcome of the
    /// interrupted evaluation, if a call waits for this outcome.
    fn stuck(&self, _outcome: Option<Outcome>, _why: StuckReason) {}
}

/// An observer that reports an evaluation's outcome when Lisp cannot be interrupted, for a process that runs a
/// single evaluation, which no other image can continue.
pub(crate) struct StuckReporter<F>(F);

impl<F: Fn(Outcome) + Send + Sync> StuckReporter<F> {
    /// Creates the observer. `report` gets an outcome that is an error, and ends the process.
    pub(crate) fn new(report: F) -> Self {
        Self(report)
    }
}

impl<F: Fn(Outcome) + Send + Sync> Observer for StuckReporter<F> {
    fn stuck(&self, outcome: Option<Outcome>, why: StuckReason) {
        let Some(mut outcome) = outcome else { return };
        if let Err(error) = &mut outcome.result {
            let text = format!("{}. The Lisp image {}.", error.message_clause(), why.predicate().trim_end_matches(','));
            Arc::make_mut(error).message = Clipped::from(text);
        }
        (self.0)(outcome);
    }
}
