//! The replay, which evaluates the definitions again, form by form. Calls that need the image wait for the end of the
//! replay.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::definitions::Definition;
use super::messages::shortened;
use super::status_page::{StatusField, StatusPage, deadline};
use crate::os::panics;
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

/// The stage of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Forms are being evaluated.
    Evaluating,
    /// All forms are evaluated, but their report is not complete.
    Evaluated,
    /// The replay is complete. The waiting calls continue one after the other, and new calls queue behind them.
    Continuing,
    Ended(ReplayEnd),
}

/// A call in the queue of all connections.
struct QueuedCall {
    connection: u64,
    /// True if the call may take long before it waits for Lisp.
    is_slow: bool,
    call: WaitingCall,
}

/// The stage of a replay, and the calls that wait.
struct State {
    stage: Stage,
    /// The calls that wait, in the order of their arrival.
    waiting: VecDeque<QueuedCall>,
    /// The calls that wait for a slow call of their connection, and the slow call, by connection, in order. The new calls of
    /// a connection with an entry queue behind them.
    slow: BTreeMap<u64, Vec<WaitingCall>>,
}

/// The replay of the definitions in a new image.
pub(crate) struct DefinitionReplay {
    state: Mutex<State>,
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
        let state = State { stage: Stage::Evaluating, waiting: VecDeque::new(), slow: BTreeMap::new() };
        Self { state: Mutex::new(state), current_form: AtomicUsize::new(0), form_count }
    }

    /// Returns true until all definitions have been evaluated again or the replay has been abandoned.
    pub(crate) fn is_evaluating(&self) -> bool {
        self.state.lock().stage == Stage::Evaluating
    }

    /// Returns true once the replay is complete and all waiting calls of this connection have continued.
    pub(crate) fn is_complete(&self, connection: u64) -> bool {
        let state = self.state.lock();
        state.stage == Stage::Ended(ReplayEnd::Complete) && !state.slow.contains_key(&connection)
    }

    /// Calls `then` when the replay has ended and the earlier waiting calls have continued, those of other connections
    /// unless they wait for a slow call: at once if this is already the case, else later, on another thread. `is_slow` is
    /// true if `then` may take long before it waits for Lisp.
    pub(crate) fn when_ended(&self, connection: u64, is_slow: bool, then: impl FnOnce(ReplayEnd) + Send + 'static) {
        let mut state = self.state.lock();
        match state.stage {
            Stage::Ended(end) if !state.slow.contains_key(&connection) => {
                drop(state);
                then(end);
            }
            Stage::Ended(_) => state.slow.entry(connection).or_default().push(Box::new(then)),
            _ => state.waiting.push_back(QueuedCall { connection, is_slow, call: Box::new(then) }),
        }
    }

    /// Describes the progress of the replay, for a client that waits.
    pub(crate) fn progress(&self) -> String {
        let mut text = "waiting while the image is restored".to_owned();
        if self.form_count > 0 {
            let at = self.current_form.load(Ordering::Relaxed).max(1);
            text += &format!(": form {at} of {}", self.form_count);
        }
        text
    }

    /// Evaluates the definitions again, and returns the report; `None` when the replay was abandoned.
    pub(crate) fn evaluate<'a>(
        &self,
        session: &Session,
        definitions: impl Iterator<Item = &'a Definition>,
        status: StatusPage,
    ) -> Option<ReplayReport> {
        let mut report = ReplayReport::default();
        // The definition that was evaluated last, if it succeeded.
        let mut last: Option<&Definition> = None;
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
            if definition.local && !definition.attached {
                evaluation.package = Some(definition.form.package.clone());
            }
            // The same form need not load the same files twice in a row: the first time, it loaded their current versions.
            let repeated = last.filter(|last| last.form == definition.form);
            let is_due = |file: &&String| repeated.is_none_or(|last| !last.changes.reloaded.contains(file));
            let due: Vec<_> = definition.changes.reloaded.iter().filter(is_due).cloned().collect();
            let operation = if definition.attached { "restore-attached-form" } else { "restore-form" };
            let operation = Operation::new(operation).with("package", &*definition.form.package).with("reloaded", due);
            let outcome = session.evaluate_with_options(Some(definition.evaluation), evaluation, Some(&operation));
            last = outcome.result.is_ok().then_some(definition);
            match &outcome.result {
                Ok(_) => report.replayed += 1,
                Err(error) => report.failed.push((index, failure_reason(error))),
            }
        }
        status.set(StatusField::Deadline, 0);
        self.finish_evaluating().then_some(report)
    }

    /// Records that all forms are evaluated. Returns false when the replay was abandoned.
    fn finish_evaluating(&self) -> bool {
        let mut state = self.state.lock();
        let is_evaluating = state.stage == Stage::Evaluating;
        if is_evaluating {
            state.stage = Stage::Evaluated;
        }
        is_evaluating
    }

    /// Ends the replay and continues the waiting calls in the order of their arrival, in which their jobs must be numbered.
    /// From a connection's first slow call on, the connection's calls do not continue here: `start_thread` must start a
    /// thread that calls [`continue_slow_calls`](Self::continue_slow_calls) for the connection.
    pub(crate) fn end(&self, start_thread: impl Fn(u64)) {
        let mut state = self.state.lock();
        if state.stage == Stage::Evaluated {
            state.stage = Stage::Continuing;
        }
        while state.stage == Stage::Continuing {
            let Some(QueuedCall { connection, is_slow, call }) = state.waiting.pop_front() else {
                state.stage = Stage::Ended(ReplayEnd::Complete);
                return;
            };
            match state.slow.get_mut(&connection) {
                Some(calls) => calls.push(call),
                None if is_slow => {
                    state.slow.insert(connection, vec![call]);
                    MutexGuard::unlocked(&mut state, || start_thread(connection));
                }
                // A panic must not keep the other clients' calls waiting.
                None => _ = MutexGuard::unlocked(&mut state, || panics::catch(|| call(ReplayEnd::Complete))),
            }
        }
    }

    /// Continues a connection's slow call, and one after the other the calls that wait for it.
    pub(crate) fn continue_slow_calls(&self, connection: u64) {
        loop {
            let mut state = self.state.lock();
            let Some(calls) = state.slow.get_mut(&connection).map(std::mem::take) else { return };
            if calls.is_empty() {
                state.slow.remove(&connection);
                return;
            }
            drop(state);
            // A panic must not keep the connection's other calls waiting.
            calls.into_iter().for_each(|then| _ = panics::catch(|| then(ReplayEnd::Complete)));
        }
    }

    /// Abandons the replay and calls `notify`, unless the replay is complete. In either case, continues the calls that still
    /// wait, in an image that will be replaced.
    pub(crate) fn abandon(&self, notify: impl FnOnce()) {
        let mut state = self.state.lock();
        let slow = std::mem::take(&mut state.slow).into_values().flatten();
        let waiting = std::mem::take(&mut state.waiting).into_iter().map(|queued| queued.call);
        let end = match state.stage {
            Stage::Evaluating | Stage::Evaluated => ReplayEnd::Abandoned,
            Stage::Continuing => ReplayEnd::Complete,
            Stage::Ended(end) => end,
        };
        let is_incomplete = matches!(state.stage, Stage::Evaluating | Stage::Evaluated);
        state.stage = Stage::Ended(end);
        drop(state);
        if is_incomplete {
            notify();
        }
        slow.chain(waiting).for_each(|then| then(ReplayEnd::Abandoned));
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
        replay.when_ended(0, false, move |end| {
            first(end);
            late.when_ended(0, false, third);
        });
        replay.when_ended(0, false, call(2));
        assert!(replay.is_evaluating() && calls.lock().is_empty());
        assert!(replay.finish_evaluating());
        replay.end(|_| unreachable!("no call is slow"));
        assert_eq!(*calls.lock(), [1, 2, 3].map(|number| (number, ReplayEnd::Complete)));
        assert!(replay.is_complete(0));
    }

    /// Jobs get their numbers when their calls continue, and jobs with lower numbers must begin first.
    #[test]
    fn waiting_calls_of_all_connections_continue_in_the_order_of_their_arrival() {
        let replay = Arc::new(DefinitionReplay::new(0));
        let (calls, call) = calls();
        let (late, first) = (replay.clone(), call(1));
        let fourth = call(4);
        replay.when_ended(2, false, move |end| {
            first(end);
            late.when_ended(3, false, fourth);
        });
        replay.when_ended(1, false, call(2));
        replay.when_ended(2, false, call(3));
        assert!(replay.finish_evaluating());
        replay.end(|_| unreachable!("no call is slow"));
        assert_eq!(*calls.lock(), [1, 2, 3, 4].map(|number| (number, ReplayEnd::Complete)));
    }

    #[test]
    fn calls_do_not_wait_for_the_slow_calls_of_another_connection() {
        let replay = DefinitionReplay::new(0);
        let (calls, call) = calls();
        replay.when_ended(1, true, call(1));
        replay.when_ended(2, false, call(2));
        replay.when_ended(1, false, call(3));
        assert!(replay.finish_evaluating());
        replay.when_ended(2, false, call(4));
        assert!(calls.lock().is_empty(), "the report of the replay is not complete");
        let started = Mutex::new(Vec::new());
        replay.end(|connection| started.lock().push(connection));
        assert_eq!(*started.lock(), [1]);
        replay.when_ended(2, false, call(5));
        assert!(replay.is_complete(2) && !replay.is_complete(1));
        replay.when_ended(1, false, call(6));
        replay.continue_slow_calls(1);
        assert_eq!(*calls.lock(), [2, 4, 5, 1, 3, 6].map(|number| (number, ReplayEnd::Complete)));
        assert!(replay.is_complete(1));
    }

    #[test]
    fn calls_that_have_not_continued_when_the_image_is_replaced_are_abandoned() {
        let replay = DefinitionReplay::new(0);
        let (calls, call) = calls();
        replay.when_ended(0, true, call(1));
        assert!(replay.finish_evaluating());
        replay.end(|_| ());
        replay.abandon(|| unreachable!("the replay is complete"));
        replay.continue_slow_calls(0);
        assert_eq!(*calls.lock(), [(1, ReplayEnd::Abandoned)]);
        assert!(replay.is_complete(0));
    }

    #[test]
    fn abandoning_a_replay_notifies_before_it_resumes_waiting_and_later_calls() {
        let replay = DefinitionReplay::new(1);
        let (calls, call) = calls();
        replay.when_ended(0, false, call(1));
        replay.abandon(|| assert!(calls.lock().is_empty()));
        replay.when_ended(0, false, call(2));
        replay.abandon(|| unreachable!("it has ended"));
        replay.end(|_| unreachable!("no call waits"));
        assert_eq!(*calls.lock(), [1, 2].map(|number| (number, ReplayEnd::Abandoned)));
        assert!(!replay.is_evaluating() && !replay.is_complete(0));
    }
}
