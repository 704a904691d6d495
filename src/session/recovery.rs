//! Restores a session in a new image, and ends a session in an old image.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use serde::{Deserialize, Serialize};

use super::error_state::ErrorState;
use super::events::{JobEnd, OutcomeBuilder};
use super::history::History;
use super::hold::Resumed;
use super::observer::Observer;
use super::scheduler::{ErrorQuery, OpenQuestion, RunningJob, SchedulerState, request_for_call};
use super::{AnswerFn, Inner, JobId, Session};
use crate::error::{HoldEnd, HoldError};
use crate::image::{InterruptReason, JobKind, Lane};
use crate::outcome::{ErrorRecord, Outcome};

/// The maximum time for which a query for the error state waits for the end of a cancelled evaluation.
const SETTLING_TIME: Duration = Duration::from_millis(200);

/// The message that a reset, or the replacement of the image, ended the foreground evaluation.
const FOREGROUND_ENDED: &str = "The running evaluation was ended.";

/// Returns messages about the running evaluations that a reset, or the replacement of the image, ends.
fn describe_cancelled(scheduler: &SchedulerState) -> Vec<String> {
    let is_foreground = |running: &RunningJob| running.is_foreground() && running.is_requested() && !running.is_query();
    let foreground = scheduler.running.iter().any(is_foreground).then(|| FOREGROUND_ENDED.to_owned());
    let background = describe_background(scheduler.background_numbers()).map(|which| format!("{which} ended."));
    foreground.into_iter().chain(background).collect()
}

/// Returns the beginning of a passive sentence about these background evaluations, up to and including "was" or "were";
/// `None` if there are none.
pub(crate) fn describe_background(numbers: impl Iterator<Item = u64>) -> Option<String> {
    let mut numbers: Vec<_> = numbers.collect();
    numbers.sort_unstable();
    match &numbers[..] {
        [] => None,
        [one] => Some(format!("Background evaluation {one} was")),
        [first @ .., last] => {
            let first: Vec<_> = first.iter().map(u64::to_string).collect();
            Some(format!("Background evaluations {} and {last} were", first.join(", ")))
        }
    }
}

impl Inner {
    /// Queues the release of all held evaluations.
    fn release_all(&self, scheduler: &mut SchedulerState) {
        let holders: Vec<_> = scheduler.holds.iter().map(|hold| hold.connection.clone()).collect();
        for connection in holders {
            let release = self.prepare_release(scheduler, &connection, HoldEnd::Released);
            scheduler.push(Lane::Evaluation, release);
        }
    }

    /// Cancels all waiting requests of these lanes, as [`withdraw_all`](Self::withdraw_all) does. Returns their answers.
    fn cancel_waiting(&self, scheduler: &mut MutexGuard<'_, SchedulerState>, lanes: &[Lane]) -> Vec<AnswerFn> {
        let waiting = scheduler.take_all_waiting(lanes);
        self.withdraw_all(scheduler, waiting)
    }
}

/// The maximum size of a history that another image gets, in bytes. A worker gets the histories of all clients before it
/// serves any client, so they must be small.
const MAX_HISTORY_BYTES: usize = 1 << 20;

/// The errors of a connection, in the form that is passed to another image.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SavedErrors {
    /// The last error; `None` once a later evaluation has succeeded.
    pub(crate) last: Option<Arc<ErrorRecord>>,
    /// The recorded errors.
    pub(crate) history: History,
    /// The number of the newest error.
    pub(crate) count: u64,
    /// True if the history lacks older errors because of [`MAX_HISTORY_BYTES`], and no image has notified the client.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_shortened: bool,
}

impl SavedErrors {
    /// Adds the error `added`, if there is one, to the history. Makes error number `last` the last error; `None` clears
    /// the last error.
    pub(crate) fn record(&mut self, added: Option<Arc<ErrorRecord>>, last: Option<u64>) {
        if let Some(error) = added {
            self.count = self.count.max(error.id);
            self.history.push(error);
            let is_trimmed = self.history.trim_to(MAX_HISTORY_BYTES);
            // A full history has as many errors as an image keeps.
            self.is_shortened = (self.is_shortened || is_trimmed) && !self.history.is_full();
        }
        let before = self.last.take().filter(|error| Some(error.id) == last);
        self.last = before.or_else(|| self.history.get(last?).cloned());
    }

    /// Returns a notice for the client if the next image does not get all errors of the history.
    fn shortening_notice(&self) -> Option<String> {
        let oldest = self.history.newest_first().last().filter(|_| self.is_shortened)?;
        Some(format!(
            "The error history now begins with E{}: a new image gets at most 1 MiB of a client's errors.",
            oldest.id
        ))
    }

    /// Records that an image got the history and added the notice for the client, if there was one. Returns true if there
    /// was a notice.
    pub(crate) fn record_notice(&mut self) -> bool {
        std::mem::take(&mut self.is_shortened)
    }

    /// Removes the errors, but keeps the count.
    pub(crate) fn reset(&mut self) {
        *self = Self { count: self.count, ..Self::default() };
    }
}

impl ErrorState {
    /// Replaces the last error and the history with the errors of another image.
    fn restore(&mut self, errors: SavedErrors) {
        let SavedErrors { last, history, .. } = errors;
        // `reset` keeps the notices of the boot, which the next answer carries.
        self.reset();
        (self.last_error, self.history) = (last, history);
    }
}

impl Session {
    /// Sets the observer. Later calls have no effect.
    pub(crate) fn set_observer(&self, observer: Arc<dyn Observer>) {
        let _ = self.inner.observer.set(observer);
    }

    /// Makes future evaluations get numbers above `number`.
    pub(crate) fn number_evaluations_after(&self, number: u64) {
        self.inner.scheduler.lock().evaluations.number_after(number);
    }

    /// Makes future errors get numbers above `number`.
    pub(crate) fn number_errors_after(&self, number: u64) {
        self.inner.error_count.fetch_max(number, Ordering::Relaxed);
    }

    /// Sets the evaluations that were in the background when the previous image was lost.
    pub(crate) fn set_lost_evaluations(&self, numbers: &[u64]) {
        self.inner.scheduler.lock().evaluations.set_lost(numbers);
    }

    /// Calls `handle`, which handles a call and requests the call's jobs on this thread. `first_job` is the lowest number for
    /// these jobs, and all future jobs get numbers from `first_job` on.
    pub(crate) fn handle_call(&self, first_job: u64, handle: impl FnOnce()) {
        self.inner.next_id.fetch_max(first_job, Ordering::Relaxed);
        request_for_call(first_job, handle);
    }

    /// Calls `answer` when a query for the error state may be answered. If this connection's foreground evaluation
    /// was cancelled, the query waits until the state includes the evaluation's end, but at most 200 ms. The argument
    /// of `answer` is the number of an evaluation that has not ended by then, or else `None`.
    pub(crate) fn when_settled(&self, answer: impl FnOnce(Option<u64>) + Send + 'static) {
        let mut scheduler = self.inner.scheduler.lock();
        let own = scheduler.foreground().filter(|running| running.connection.id == self.connection.id);
        match own.filter(|running| running.interrupt_reason() == Some(InterruptReason::Cancel)) {
            Some(running) => {
                let until = Instant::now() + SETTLING_TIME;
                running.error_queries.push(ErrorQuery { until, answer: Box::new(answer) });
                self.inner.clock.arm(until);
            }
            None => {
                drop(scheduler);
                answer(None);
            }
        }
    }

    /// Cancels all waiting requests and interrupts all running evaluations, which are answered when they end. Returns
    /// messages about the cancelled evaluations.
    pub(crate) fn cancel_all(&self) -> Vec<String> {
        let mut scheduler = self.inner.scheduler.lock();
        let messages = describe_cancelled(&scheduler);
        let answers = self.inner.cancel_waiting(&mut scheduler, &[Lane::Evaluation, Lane::Inspection]);
        let running: Vec<_> = scheduler.running.iter().filter(|running| running.evaluates()).map(|r| r.id).collect();
        for job in running {
            self.inner.interrupt(&mut scheduler, job, InterruptReason::Cancel);
        }
        scheduler.finishing.iter_mut().for_each(|finishing| finishing.cancel(&self.inner.clock));
        self.inner.unlock_and_notify(scheduler);
        self.inner.deliver(answers);
        messages
    }

    /// Cancels all waiting requests, interrupts all running evaluations and releases all held evaluations, in an
    /// image that ends. Waits until the evaluations have unwound, or until `deadline`. Returns false if an evaluation still
    /// runs or is held.
    pub(crate) fn unwind_all(&self, deadline: Instant) -> bool {
        self.cancel_all();
        let mut scheduler = self.inner.scheduler.lock();
        self.inner.release_all(&mut scheduler);
        // The lock is not released before the wait below, which releases it for the threads that unwind.
        scheduler.reschedule(Instant::now());
        let changed = scheduler.take_changed_lanes();
        self.inner.notify(changed);
        while scheduler.is_busy() && !self.inner.idle.wait_until(&mut scheduler, deadline).timed_out() {}
        let has_unwound = !scheduler.is_busy();
        drop(scheduler);
        // The threads that have unwound may not have sent their reports yet.
        self.inner.send_queued_reports();
        has_unwound
    }

    /// Waits until the jobs that [`cancel_and_answer_all`](Self::cancel_and_answer_all) ended have unwound, or until
    /// `deadline`.
    pub(crate) fn wait_until_unwound(&self, deadline: Instant) {
        let mut scheduler = self.inner.scheduler.lock();
        while (!scheduler.unwinding.is_empty() || scheduler.is_busy())
            && !self.inner.idle.wait_until(&mut scheduler, deadline).timed_out()
        {}
    }

    /// Returns true while an evaluation runs or is held, or a request waits.
    pub(crate) fn has_work(&self) -> bool {
        let scheduler = self.inner.scheduler.lock();
        scheduler.is_busy() || scheduler.has_waiting(Lane::Evaluation) || scheduler.has_waiting(Lane::Inspection)
    }

    /// Answers all waiting and running requests except inspections with a cancellation, in an image that will be replaced.
    /// The running and held evaluations then unwind. Calls `before_answer` before each answer.
    pub(crate) fn cancel_and_answer_all(&self, before_answer: impl Fn()) {
        let mut scheduler = self.inner.scheduler.lock();
        let notices = describe_cancelled(&scheduler);
        let mut answers = Vec::new();
        for mut running in scheduler.take_running_of_lane(Lane::Evaluation) {
            running.cancel_hint_search();
            scheduler.unwinding.push(running.id);
            // A job that was interrupted or unwinds is not interrupted again: an interruption would cut its cleanup
            // forms short.
            if running.interrupt_reason().is_none()
                && !running.interruption.is_under_way()
                && !running.activity.unwinds_held()
            {
                self.inner.send_interruption(&mut scheduler, running.id, InterruptReason::Cancel);
            }
            let settled = running.take_error_queries();
            answers.push(self.inner.finish(&mut scheduler, running, JobEnd::Withdrawn));
            answers.extend(settled);
        }
        answers.extend(self.inner.cancel_waiting(&mut scheduler, &[Lane::Evaluation]));
        for mut finishing in std::mem::take(&mut scheduler.finishing) {
            finishing.cancel(&self.inner.clock);
            answers.push(finishing.end_as_cancelled(&mut scheduler));
        }
        for notice in notices {
            self.add_notice(notice);
        }
        self.inner.release_all(&mut scheduler);
        self.inner.unlock_and_notify(scheduler);
        self.inner.deliver(answers.into_iter().inspect(|_| before_answer()));
    }

    /// Answers all waiting and running inspections with a cancellation, in an image that is about to be replaced.
    pub(crate) fn cancel_and_answer_inspections(&self) {
        let mut scheduler = self.inner.scheduler.lock();
        let mut answers = Vec::new();
        for running in scheduler.take_running_of_lane(Lane::Inspection) {
            answers.push(self.inner.finish(&mut scheduler, running, JobEnd::Withdrawn));
        }
        answers.extend(self.inner.cancel_waiting(&mut scheduler, &[Lane::Inspection]));
        self.inner.unlock_and_notify(scheduler);
        self.inner.deliver(answers);
    }

    /// Restores the errors of another image. If older errors are missing, adds a notice to the next answer.
    pub(crate) fn set_errors(&self, errors: SavedErrors) {
        self.number_errors_after(errors.count);
        let notice = errors.shortening_notice();
        let mut state = self.connection.state();
        state.restore(errors);
        if let Some(notice) = notice {
            state.add_notice(notice);
        }
    }

    /// Records an outcome's error as the last error, as if an evaluation had failed with it.
    pub(crate) fn record_failure(&self, outcome: &mut Outcome) {
        let mut state = self.connection.state();
        if let Err(error) = &mut outcome.result {
            *error = Arc::new(ErrorRecord::clone(error));
            state.record(error, self.inner.next_error_number());
        }
        state.last_error = outcome.result.as_ref().err().cloned();
        self.inner.report_errors(&self.connection, &state, outcome);
        drop(state);
        self.inner.send_queued_reports();
    }

    /// Discards the output and notices of replayed forms.
    pub(crate) fn discard_pending_messages(&self) {
        let mut state = self.connection.state();
        state.pending_output = None;
        drop(state.take_notices());
    }

    /// Takes the notices that wait for the next answer.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        self.connection.state().take_notices()
    }

    /// Removes a notice that waits for the next answer.
    pub(crate) fn withdraw_notice(&self, notice: String) {
        self.connection.state().withdraw_notice(notice);
    }

    /// Notifies the client: at once if its connection has a listener, otherwise with its next answer.
    pub(crate) fn notify(&self, notice: String) {
        self.connection.notify(notice);
    }

    /// Adds a notice to the next answer.
    pub(crate) fn add_notice(&self, notice: String) {
        self.connection.state().add_notice(notice);
    }
}

/// A question to the user about the held evaluation. The question ends when this value is dropped. A choice of the user
/// is refused with [`HoldError::NothingHeld`] if the hold has ended before, even if another evaluation is held by then.
#[derive(Debug)]
pub(crate) struct UserQuestion {
    session: Session,
    number: u64,
}

impl Session {
    /// Begins a question to the user about the held evaluation that failed with `error`. `first_job` is the lowest number
    /// for the jobs of the call that asks. The answer may take any time; until then, this connection's requests wait, except
    /// resets and requests about the held evaluation. If the hold ends before the user has chosen, `on_withdrawal` is called.
    /// Returns `None` if the evaluation is no longer held.
    pub(crate) fn begin_user_question(
        &self,
        error: &ErrorRecord,
        first_job: u64,
        on_withdrawal: impl FnOnce(HoldEnd) + Send + 'static,
    ) -> Option<UserQuestion> {
        let number = self.inner.next_job_id();
        let mut scheduler = self.inner.scheduler.lock();
        let hold = scheduler.hold_of_error(self.connection.id, error)?;
        let question = OpenQuestion { number, first_job, on_withdrawal: Some(Box::new(on_withdrawal)) };
        if hold.question.replace(question).is_none()
            && let Some(observer) = self.inner.observer.get()
        {
            observer.external_wait_changed(true);
        }
        // Another connection's request may be the next to begin.
        self.inner.unlock_and_notify(scheduler);
        Some(UserQuestion { session: self.clone(), number })
    }
}

impl UserQuestion {
    /// Returns true until the hold ends or is resumed.
    pub(crate) fn is_open(&self) -> bool {
        self.session.inner.scheduler.lock().hold_of_question(self.number).is_some()
    }

    /// Passes the question to the call with which the client has repeated the call that asked. `first_job` is the lowest
    /// number for the jobs of the repeated call.
    pub(crate) fn pass_to_call(&self, first_job: u64) {
        let mut scheduler = self.session.inner.scheduler.lock();
        let question = scheduler.hold_of_question(self.number).and_then(|hold| hold.question.as_mut());
        if let Some(question) = question {
            question.first_job = first_job;
        }
    }

    /// Aborts the held evaluation, as [`Session::abort_held`] does.
    pub(crate) fn abort(self, reply: impl FnOnce(Result<(), HoldError>) + Send + 'static) {
        let (session, number) = (self.session.clone(), self.number);
        let reply = Box::new(move |result| {
            drop(self);
            reply(result);
        });
        session.abort(Some(number), reply);
    }

    /// Resumes the held evaluation by the restart with the number `restart`, as [`Session::invoke_restart`] does.
    pub(crate) fn invoke_restart(
        self,
        restart: u64,
        values: &str,
        reply: impl FnOnce(Result<Resumed, HoldError>) + Send + 'static,
    ) -> JobId {
        let (session, number) = (self.session.clone(), self.number);
        let reply = Box::new(move |result| {
            drop(self);
            reply(result);
        });
        session.resume(JobKind::InvokeRestart(restart), values, "", Some(number), reply)
    }
}

impl Drop for UserQuestion {
    fn drop(&mut self) {
        let inner = &self.session.inner;
        let mut scheduler = inner.scheduler.lock();
        if let Some(hold) = scheduler.hold_of_question(self.number) {
            hold.question = None;
            inner.end_external_wait();
        }
        inner.unlock_and_notify(scheduler);
    }
}

/// Returns the outcome of an evaluation whose image was lost, or that failed outside Lisp.
pub(crate) fn failed_outcome(kind: &str, message: String) -> Outcome {
    OutcomeBuilder::blank(0).finish_with_error(kind, message)
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::image::{Event, Host};
    use crate::outcome::Clipped;
    use crate::rpc::route::{call_of_job, job_number};
    use crate::session::Operation;
    use crate::{Evaluation, Limits};

    /// An observer that keeps the numbers by which it learns that calls begin.
    #[derive(Default)]
    struct CallObserver(Mutex<Vec<u64>>);

    impl Observer for CallObserver {
        fn call_begun(&self, job: u64) {
            self.0.lock().push(job);
        }

        fn inspection_begun(&self, job: u64, _more: Duration) {
            self.0.lock().push(job);
        }
    }

    /// While a thread handles a slow call, another thread may handle a later call.
    #[test]
    fn jobs_belong_to_their_call_although_they_get_numbers_of_a_later_call() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let session = Session { connection: inner.own_connection.clone(), inner: inner.clone() };
        let observer = Arc::new(CallObserver::default());
        let _ = inner.observer.set(observer.clone());
        let [slow, later] = [1, 2].map(|call| job_number(call, 0));
        for first_job in [later, slow] {
            session.handle_call(first_job, || _ = session.submit(Evaluation::new("1"), drop));
        }
        session.handle_call(slow, || _ = session.query(&Operation::new("image-name"), drop));
        for lane in [Lane::Evaluation, Lane::Evaluation, Lane::Inspection] {
            let job = inner.next_job(lane, 1, None).expect("a job").id;
            assert_eq!(call_of_job(job), 2);
            inner.event(job, false, Event::Done { success: true });
        }
        assert_eq!(*observer.0.lock(), [later, slow, slow]);
    }

    #[test]
    fn a_notice_says_where_the_history_begins_if_a_new_image_does_not_get_all_errors() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let session = Session { connection: inner.own_connection.clone(), inner };
        let notices = |errors: &SavedErrors| {
            session.set_errors(errors.clone());
            session.take_notices()
        };
        let mut errors = SavedErrors::default();
        let add = |errors: &mut SavedErrors, id: u64, length: usize| {
            let error = ErrorRecord {
                id,
                kind: "SIMPLE-ERROR".to_owned(),
                message: Clipped::from("x".repeat(length)),
                time: jiff::Timestamp::UNIX_EPOCH,
                form: None,
                slots: Vec::new(),
                restarts: Vec::new(),
                frames: Vec::new(),
                total_frames: 0,
                slots_omitted: 0,
                evaluation: 1,
            };
            errors.record(Some(Arc::new(error)), Some(id));
        };
        let third = MAX_HISTORY_BYTES / 3;
        add(&mut errors, 1, third);
        add(&mut errors, 2, third);
        assert!(notices(&errors).is_empty());
        let expected = "The error history now begins with E2: a new image gets at most 1 MiB of a client's errors.";
        for (id, length) in [(3, third), (4, 1)] {
            add(&mut errors, id, length);
            assert_eq!(notices(&errors), [expected]);
        }
        // Once an image has notified the client, only the loss of further errors is a reason for another notice.
        assert!(errors.record_notice() && !errors.record_notice());
        add(&mut errors, 5, 1);
        assert!(notices(&errors).is_empty());
        add(&mut errors, 6, third);
        assert_eq!(notices(&errors), [expected.replace("E2", "E3")]);
        // A history of so many errors begins later in any image.
        for id in 7..300 {
            add(&mut errors, id, 1);
        }
        assert!(notices(&errors).is_empty());
    }

    /// Another client's inspection does not wait until the evaluations have unwound.
    #[test]
    fn inspections_continue_in_an_image_that_will_be_replaced() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let session = Session { connection: inner.own_connection.clone(), inner: inner.clone() };
        let answers = Arc::new(Mutex::new(Vec::new()));
        let inspect = || {
            let answers = answers.clone();
            session.query(&Operation::new("image-name"), move |records| answers.lock().push(records.is_ok()));
        };
        let next = || inner.next_job(Lane::Inspection, 0, None).expect("a job").id;
        let end = |job| inner.event(job, false, Event::Done { success: true });
        inspect();
        let running = next();
        inspect();
        session.cancel_and_answer_all(|| ());
        assert!(answers.lock().is_empty(), "an inspection is cancelled");
        inspect();
        end(running);
        for _ in 0..2 {
            end(next());
        }
        assert_eq!(*answers.lock(), [true; 3]);
        inspect();
        next();
        inspect();
        session.cancel_and_answer_inspections();
        assert_eq!(*answers.lock(), [true, true, true, false, false]);
    }

    /// Runs the next evaluation on thread number `thread`, until it fails and is held.
    fn hold_next(session: &Session, thread: u64) {
        session.submit(Evaluation { hold: true, ..Evaluation::new("1") }, drop);
        let job = session.inner.next_job(Lane::Evaluation, thread, None).expect("a job").id;
        session.inner.event(job, false, Event::Held { unchanged: false });
        session.inner.event(job, false, Event::Done { success: false });
    }

    /// While the user is asked, a connection's requests wait. The thread that must serve the next request may be asleep.
    #[test]
    fn a_question_to_the_user_wakes_the_thread_for_the_next_request_of_another_connection() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let first = Session { connection: inner.own_connection.clone(), inner };
        let second = first.connect();
        for (session, thread) in [(&first, 1), (&second, 2)] {
            hold_next(session, thread);
        }
        for session in [&first, &second] {
            session.submit(Evaluation::new("2"), drop);
        }
        let wakeups = || first.inner.changed[Lane::Evaluation as usize].current();
        let before = wakeups();
        let error = first.last_error().expect("the error of the held evaluation");
        let question = first.begin_user_question(&error, 0, drop);
        assert!(question.is_some() && wakeups() != before);
    }
}
