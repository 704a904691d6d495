//! The replay: evaluates the definitions again, form by form. Calls that need the image wait for the end of the replay.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::definitions::Definition;
use super::messages::shortened;
use super::status_page::{StatusField, StatusPage, deadline};
use crate::outcome::ErrorRecord;
use crate::session::Operation;
use crate::{Evaluation, Session, TimeLimit};

/// The time limit of a replayed form, as a multiple of the form's first run time.
const REPLAY_TIME_FACTOR: u32 = 5;
/// The shortest time limit of a replayed form.
const MIN_REPLAY_TIME: Duration = Duration::from_secs(10);

/// The maximum number of line breaks that are put before a form, so that reports show the form's original line numbers.
const MAX_LINES_BEFORE: usize = 100_000;

/// The outcome of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplayEnd {
    /// The replay is complete; forms may have failed.
    Complete,
    /// The replay was abandoned: another image replaces this image.
    Abandoned,
}

/// The continuation of a call that waits for the end of the replay.
type WaitingCall = Box<dyn FnOnce(ReplayEnd) + Send>;

/// The stage of a replay, with the calls that wait for its end, in order.
enum Stage {
    /// Forms are being evaluated.
    Evaluating(Vec<WaitingCall>),
    /// All forms are evaluated. The waiting calls continue one after the other, and new calls queue behind them.
    Releasing(Vec<WaitingCall>),
    Ended(ReplayEnd),
}

/// The replay of the definitions in a new image.
pub(crate) struct DefinitionReplay {
    stage: Mutex<Stage>,
    /// The number of the form that is being evaluated, counted from 1.
    current_form: AtomicUsize,
    /// The number of all forms.
    form_count: usize,
}

impl std::fmt::Debug for DefinitionReplay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DefinitionReplay")
            .field("current_form", &self.current_form)
            .field("form_count", &self.form_count)
            .finish_non_exhaustive()
    }
}

impl DefinitionReplay {
    /// Creates a replay of this many forms, which has not begun.
    pub(crate) fn new(form_count: usize) -> Self {
        Self { stage: Mutex::new(Stage::Evaluating(Vec::new())), current_form: AtomicUsize::new(0), form_count }
    }

    /// Returns true until all definitions have been evaluated again or the replay has been abandoned.
    pub(crate) fn is_evaluating(&self) -> bool {
        matches!(*self.stage.lock(), Stage::Evaluating(_))
    }

    /// Returns true once the replay is complete and all waiting calls have continued.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(*self.stage.lock(), Stage::Ended(ReplayEnd::Complete))
    }

    /// Calls `then` when the replay has ended: at once if it already has, else later, on the thread that ends the replay.
    pub(crate) fn when_ended(&self, then: impl FnOnce(ReplayEnd) + Send + 'static) {
        let mut stage = self.stage.lock();
        match &mut *stage {
            Stage::Evaluating(waiting) | Stage::Releasing(waiting) => waiting.push(Box::new(then)),
            Stage::Ended(end) => {
                let end = *end;
                drop(stage);
                then(end);
            }
        }
    }

    /// Describes the progress of the replay, for a client that waits.
    pub(crate) fn progress(&self) -> String {
        let at = self.current_form.load(Ordering::Relaxed);
        format!("waiting while the image is restored: form {at} of {}", self.form_count)
    }

    /// Evaluates the definitions again, and returns the report; `None` when the replay was abandoned.
    pub(crate) fn evaluate<'a>(
        &self,
        session: &Session,
        definitions: impl Iterator<Item = &'a Definition>,
        status: StatusPage,
    ) -> Option<ReplayReport> {
        let mut report = ReplayReport::default();
        for (index, definition) in definitions.enumerate() {
            if !self.is_evaluating() {
                return None;
            }
            self.current_form.store(index + 1, Ordering::Relaxed);
            if let Some(obstacle) = definition.replay_obstacle() {
                report.failed.push((index, obstacle));
                continue;
            }
            let limit = time_limit(definition.took);
            status.set(StatusField::Deadline, deadline(limit));
            status.set(StatusField::ReplayedForm, index as u64 + 1);
            // The line breaks give the form the line numbers that it had in its original evaluation.
            let code = "\n".repeat(definition.changes.line.min(MAX_LINES_BEFORE)) + &definition.form.code;
            let mut evaluation = Evaluation::new(code);
            evaluation.timeout = TimeLimit::Of(limit);
            let operation = if definition.attached {
                Some(Operation::new("restore-attached-form").with("package", &*definition.form.package))
            } else if definition.local {
                evaluation.package = Some(definition.form.package.clone());
                None
            } else {
                Some(Operation::new("restore-form").with("package", &*definition.form.package))
            };
            match &session.evaluate_with_options(Some(definition.evaluation), evaluation, operation.as_ref()).result {
                Ok(_) => report.replayed += 1,
                Err(error) => report.failed.push((index, failure_reason(error))),
            }
        }
        status.set(StatusField::Deadline, 0);
        self.begin_release().then_some(report)
    }

    /// Begins the stage in which waiting calls continue. Returns false when the replay was abandoned.
    fn begin_release(&self) -> bool {
        let mut stage = self.stage.lock();
        let Stage::Evaluating(waiting) = &mut *stage else { return false };
        *stage = Stage::Releasing(std::mem::take(waiting));
        true
    }

    /// Continues all waiting calls and ends the replay.
    pub(crate) fn end(&self) {
        loop {
            let mut stage = self.stage.lock();
            let Stage::Releasing(waiting) = &mut *stage else { return };
            let waiting = std::mem::take(waiting);
            if waiting.is_empty() {
                *stage = Stage::Ended(ReplayEnd::Complete);
                return;
            }
            drop(stage);
            waiting.into_iter().for_each(|then| then(ReplayEnd::Complete));
        }
    }

    /// Abandons the replay, calls `notify` and then continues the waiting calls. Does nothing when the replay has
    /// ended.
    pub(crate) fn abandon(&self, notify: impl FnOnce()) {
        let mut stage = self.stage.lock();
        let (Stage::Evaluating(waiting) | Stage::Releasing(waiting)) = &mut *stage else { return };
        let waiting = std::mem::take(waiting);
        *stage = Stage::Ended(ReplayEnd::Abandoned);
        drop(stage);
        notify();
        waiting.into_iter().for_each(|then| then(ReplayEnd::Abandoned));
    }
}

/// Returns the time limit of a form that first took `took` milliseconds. Large times saturate.
fn time_limit(took: u64) -> Duration {
    Duration::from_millis(took).saturating_mul(REPLAY_TIME_FACTOR).max(MIN_REPLAY_TIME)
}

/// The result of a replay.
#[derive(Debug, Default)]
pub(crate) struct ReplayReport {
    /// The number of definitions that succeeded.
    pub(crate) replayed: usize,
    /// The indices of the definitions that failed, each with the reason.
    pub(crate) failed: Vec<(usize, String)>,
}

/// Returns the reason for a failure as one line: the error's type, and the first line of its message, shortened.
fn failure_reason(error: &ErrorRecord) -> String {
    let text = error.message.text.lines().next().unwrap_or_default();
    format!("{}: {}", error.kind, shortened(text))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// The calls that continued, in order.
    type Calls = Arc<Mutex<Vec<(u32, ReplayEnd)>>>;

    fn calls() -> (Calls, impl Fn(u32) -> WaitingCall) {
        let calls = Calls::default();
        let called = calls.clone();
        (calls, move |number| {
            let called = called.clone();
            Box::new(move |end| called.lock().push((number, end)))
        })
    }

    #[test]
    fn the_replay_time_limit_is_a_multiple_of_the_first_run_time() {
        assert_eq!(time_limit(0), Duration::from_secs(10));
        assert_eq!(time_limit(2_000), Duration::from_secs(10));
        assert_eq!(time_limit(60_000), Duration::from_secs(300));
        assert!(time_limit(u64::MAX) > Duration::from_secs(1 << 50));
    }

    #[test]
    fn calls_that_arrive_while_waiting_calls_continue_are_queued_behind_them() {
        let replay = Arc::new(DefinitionReplay::new(0));
        let (calls, call) = calls();
        let (late, first) = (replay.clone(), call(1));
        let third = call(3);
        replay.when_ended(move |end| {
            first(end);
            late.when_ended(third);
        });
        replay.when_ended(call(2));
        assert!(replay.is_evaluating() && calls.lock().is_empty());
        assert!(replay.begin_release());
        replay.end();
        assert_eq!(*calls.lock(), [1, 2, 3].map(|number| (number, ReplayEnd::Complete)));
        assert!(replay.is_complete());
    }

    #[test]
    fn abandoning_a_replay_notifies_before_it_resumes_waiting_and_later_calls() {
        let replay = DefinitionReplay::new(1);
        let (calls, call) = calls();
        replay.when_ended(call(1));
        replay.abandon(|| assert!(calls.lock().is_empty()));
        replay.when_ended(call(2));
        replay.abandon(|| unreachable!("it has ended"));
        replay.end();
        assert_eq!(*calls.lock(), [1, 2].map(|number| (number, ReplayEnd::Abandoned)));
        assert!(!replay.is_evaluating() && !replay.is_complete());
    }
}
