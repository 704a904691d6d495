//! The replay: evaluates the definitions again, form by form. Calls that need the image wait for the end of the replay.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::definitions::Definition;
use super::messages::shortened;
use super::status_page::{Status, StatusPage, deadline};
use crate::outcome::ErrorRecord;
use crate::session::Operation;
use crate::{Evaluation, Session, TimeLimit};

/// The time limit of a replayed form: a multiple of its first run time, and at least [`LEAST_RESTORE_TIME`].
const RESTORE_FACTOR: u32 = 5;
const LEAST_RESTORE_TIME: Duration = Duration::from_secs(10);

/// The end of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restoration {
    /// The replay is complete, with or without failed forms.
    Over,
    /// The replay was abandoned: another image replaces this one.
    GivenUp,
}

type Waiting = Box<dyn FnOnce(Restoration) + Send>;

/// A stage of the replay, with the calls that wait for the end, in order.
enum Stage {
    /// Forms are being evaluated.
    Evaluating(Vec<Waiting>),
    /// All forms are evaluated. Waiting calls continue one after the other, and new calls queue behind them.
    Releasing(Vec<Waiting>),
    Ended(Restoration),
}

/// The replay of the definitions in a new image.
pub(crate) struct Restoring {
    stage: Mutex<Stage>,
    /// The number of the form that is being evaluated, from 1, and the number of all forms.
    at: AtomicUsize,
    forms: usize,
}

impl std::fmt::Debug for Restoring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restoring").field("at", &self.at).field("forms", &self.forms).finish_non_exhaustive()
    }
}

impl Restoring {
    pub(crate) fn new(forms: usize) -> Self {
        Self { stage: Mutex::new(Stage::Evaluating(Vec::new())), at: AtomicUsize::new(0), forms }
    }

    /// Returns true while forms of the last image are being evaluated.
    pub(crate) fn evaluates(&self) -> bool {
        matches!(*self.stage.lock(), Stage::Evaluating(_))
    }

    /// Returns true once the replay is complete and all waiting calls have continued.
    pub(crate) fn is_over(&self) -> bool {
        matches!(*self.stage.lock(), Stage::Ended(Restoration::Over))
    }

    /// Calls `then` when the replay has ended: on this thread if it has already, else on the thread that ends it.
    pub(crate) fn when_ended(&self, then: impl FnOnce(Restoration) + Send + 'static) {
        let mut stage = self.stage.lock();
        match &mut *stage {
            Stage::Evaluating(waiting) | Stage::Releasing(waiting) => waiting.push(Box::new(then)),
            Stage::Ended(restoration) => {
                let restoration = *restoration;
                drop(stage);
                then(restoration);
            }
        }
    }

    /// Describes the progress of the replay, for a client that waits.
    pub(crate) fn progress(&self) -> String {
        let at = self.at.load(Ordering::Relaxed);
        format!("waiting for the image, which is being restored: form {at} of {}", self.forms)
    }

    /// Evaluates the definitions again and reports the result; `None` when the replay was abandoned.
    pub(crate) fn evaluate<'a>(
        &self,
        session: &Session,
        definitions: impl Iterator<Item = &'a Definition>,
        status: StatusPage,
    ) -> Option<Report> {
        let mut report = Report::default();
        for (index, definition) in definitions.enumerate() {
            if !self.evaluates() {
                return None;
            }
            self.at.store(index + 1, Ordering::Relaxed);
            if let Some(obstacle) = definition.obstacle() {
                report.failed.push((index, obstacle));
                continue;
            }
            let limit = time_for(definition.took);
            status.set(Status::Due, deadline(limit));
            status.set(Status::Restoring, index as u64 + 1);
            let mut evaluation = Evaluation::new(&*definition.form.code);
            evaluation.timeout = TimeLimit::Of(limit);
            let operation = if definition.local {
                evaluation.package = Some(definition.form.package.clone());
                None
            } else {
                Some(Operation::new("restore-form").with("package", &*definition.form.package))
            };
            match &session.evaluate_as(Some(definition.evaluation), evaluation, operation.as_ref()).result {
                Ok(_) => report.restored += 1,
                Err(error) => report.failed.push((index, reason(error))),
            }
        }
        status.set(Status::Due, 0);
        self.evaluated().then_some(report)
    }

    /// Begins the next stage. Returns false when the replay was abandoned.
    fn evaluated(&self) -> bool {
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
                *stage = Stage::Ended(Restoration::Over);
                return;
            }
            drop(stage);
            waiting.into_iter().for_each(|then| then(Restoration::Over));
        }
    }

    /// Abandons the replay: calls `told`, then the waiting calls. Does nothing when the replay has ended.
    pub(crate) fn give_up(&self, told: impl FnOnce()) {
        let mut stage = self.stage.lock();
        let (Stage::Evaluating(waiting) | Stage::Releasing(waiting)) = &mut *stage else { return };
        let waiting = std::mem::take(waiting);
        *stage = Stage::Ended(Restoration::GivenUp);
        drop(stage);
        told();
        waiting.into_iter().for_each(|then| then(Restoration::GivenUp));
    }
}

/// Returns the time limit of a form that `took` this many milliseconds at first; never overflows.
fn time_for(took: u64) -> Duration {
    Duration::from_millis(took).saturating_mul(RESTORE_FACTOR).max(LEAST_RESTORE_TIME)
}

/// The result of a replay.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) restored: usize,
    /// Indices of the definitions that failed, each with the reason.
    pub(crate) failed: Vec<(usize, String)>,
}

fn reason(error: &ErrorRecord) -> String {
    let text = error.message.text.lines().next().unwrap_or_default();
    format!("{}: {}", error.kind, shortened(text))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// The calls that continued, in order.
    type Calls = Arc<Mutex<Vec<(u32, Restoration)>>>;

    fn calls() -> (Calls, impl Fn(u32) -> Waiting) {
        let calls = Calls::default();
        let called = calls.clone();
        (calls, move |number| {
            let called = called.clone();
            Box::new(move |restoration| called.lock().push((number, restoration)))
        })
    }

    #[test]
    fn a_form_has_a_multiple_of_its_first_time() {
        assert_eq!(time_for(0), Duration::from_secs(10));
        assert_eq!(time_for(2_000), Duration::from_secs(10));
        assert_eq!(time_for(60_000), Duration::from_secs(300));
        assert!(time_for(u64::MAX) > Duration::from_secs(1 << 50));
    }

    #[test]
    fn what_comes_while_others_go_on_goes_on_behind_them() {
        let restoring = Arc::new(Restoring::new(0));
        let (calls, call) = calls();
        let (late, first) = (restoring.clone(), call(1));
        let third = call(3);
        restoring.when_ended(move |restoration| {
            first(restoration);
            late.when_ended(third);
        });
        restoring.when_ended(call(2));
        assert!(restoring.evaluates() && calls.lock().is_empty());
        assert!(restoring.evaluated());
        restoring.end();
        assert_eq!(*calls.lock(), [1, 2, 3].map(|number| (number, Restoration::Over)));
        assert!(restoring.is_over());
    }

    #[test]
    fn whoever_waits_for_what_is_given_up_is_told() {
        let restoring = Restoring::new(1);
        let (calls, call) = calls();
        restoring.when_ended(call(1));
        restoring.give_up(|| assert!(calls.lock().is_empty()));
        restoring.when_ended(call(2));
        restoring.give_up(|| unreachable!("it has ended"));
        restoring.end();
        assert_eq!(*calls.lock(), [1, 2].map(|number| (number, Restoration::GivenUp)));
        assert!(!restoring.evaluates() && !restoring.is_over());
    }
}
