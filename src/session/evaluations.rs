//! The evaluations of a session: their numbers, and the outcomes of the last evaluations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::events::OutcomeBuilder;
use super::scheduler::{MAX_BACKGROUND, SchedulerState};
use super::{AnswerFn, Inner, JobId, Reply, Session, bind_reply};
use crate::error::EvaluationError;
use crate::os::{helper_threads, panics};
use crate::outcome::{EvaluationStatus, Outcome, Progress, byte_offset};

/// The maximum number of finished evaluations that are kept.
const MAX_KEPT_EVALUATIONS: usize = 20;
/// The memory limit of all kept outcomes together, in bytes.
const MAX_BYTES: usize = 16 << 20;
/// The maximum number of characters that are kept of an evaluation's code.
const MAX_CODE_CHARS: u64 = 1_000;

/// The identity of a wait for the end of an evaluation, by which the wait can be cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitId {
    evaluation: u64,
    number: u64,
}

/// The stage of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Queued,
    Running(Instant),
    /// No job works on the evaluation any more; it may be held.
    Over,
}

pub(super) struct EvaluationEntry {
    id: u64,
    /// The connection that submitted the evaluation, or to which the held evaluation was transferred.
    connection: Arc<Connection>,
    /// The job that works on the evaluation.
    job: u64,
    code: Arc<str>,
    stage: Stage,
    /// The total running time before this stage.
    run_time: Duration,
    /// The outcome at the last hold or at the end; `None` until the evaluation is held or ends.
    outcome: Option<Arc<Outcome>>,
    /// The number of characters of the output in the outcome.
    printed: u64,
    /// The size of the outcome, as it counts towards [`MAX_BYTES`].
    bytes: usize,
    /// The replies that wait until no job works on the evaluation, by the numbers of their waits.
    waiters: BTreeMap<u64, Waiter>,
}

impl EvaluationEntry {
    /// Records that no job works on the evaluation any more.
    fn stop(&mut self) {
        if let Stage::Running(since) = self.stage {
            self.run_time += since.elapsed();
        }
        self.stage = Stage::Over;
    }
}

struct Waiter {
    /// True if the reply gives the outcome to the evaluation's own client.
    delivers: bool,
    /// The number of the connection to which the reply passes on the outcome; `None` if the reply does not use the outcome. A
    /// helper thread calls a reply that passes on the outcome, because it may render a large answer.
    to: Option<u64>,
    reply: Reply<Arc<Outcome>>,
}

/// The consequences of the end of an evaluation.
pub(super) struct EndedEvaluation {
    /// The outcome for the call. The outcome covers the evaluation from its beginning, or from its last resumption.
    pub(super) outcome: Arc<Outcome>,
    /// The answers to the clients that waited for the end.
    pub(super) waiters: Vec<AnswerFn>,
    /// The entries that are no longer kept. Dropping these entries takes time, so the call is answered first.
    pub(super) forgotten: Vec<EvaluationEntry>,
}

/// The evaluations that wait or run, and the last finished evaluations.
#[derive(Default)]
pub(super) struct Evaluations {
    /// The number of the newest evaluation.
    last: u64,
    /// The value of `last` when this image began or was reset. While both numbers are equal, nothing has been evaluated
    /// since.
    last_at_start: u64,
    /// The evaluations that were in the background when the previous image was lost.
    lost: Vec<u64>,
    /// The entries, by number.
    entries: BTreeMap<u64, EvaluationEntry>,
    /// The numbers of the evaluations, by the jobs that work on them.
    jobs: BTreeMap<u64, u64>,
    /// The size of all kept outcomes in bytes, and the numbers of their evaluations.
    bytes: usize,
    kept: BTreeSet<u64>,
    last_wait: u64,
}

impl Evaluations {
    /// Adds an evaluation of `code`, which job number `job` will run for this connection. Returns the evaluation's number.
    pub(super) fn add(&mut self, connection: &Arc<Connection>, job: u64, code: &Arc<str>) -> u64 {
        self.last += 1;
        let kept = byte_offset(code, MAX_CODE_CHARS);
        let code = if kept == code.len() { code.clone() } else { code[..kept].into() };
        let entry = EvaluationEntry {
            id: self.last,
            connection: connection.clone(),
            job,
            code,
            stage: Stage::Queued,
            run_time: Duration::ZERO,
            outcome: None,
            printed: 0,
            bytes: 0,
            waiters: BTreeMap::new(),
        };
        self.entries.insert(self.last, entry);
        self.jobs.insert(job, self.last);
        self.last
    }

    /// Returns the number of the newest evaluation.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Makes future evaluations get numbers above `number`.
    pub(super) fn number_after(&mut self, number: u64) {
        self.last = self.last.max(number);
        if self.entries.is_empty() {
            self.last_at_start = self.last;
        }
    }

    /// Sets the evaluations that were in the background when the previous image was lost.
    pub(super) fn set_lost(&mut self, numbers: &[u64]) {
        self.lost = numbers.to_vec();
        self.lost.sort_unstable();
    }

    /// Records that `job` begins or resumes an evaluation.
    pub(super) fn begin(&mut self, id: u64, job: u64, now: Instant) {
        if let Some(entry) = self.entries.get_mut(&id) {
            if entry.job != job {
                self.jobs.remove(&entry.job);
                self.jobs.insert(job, id);
                entry.job = job;
            }
            entry.stage = Stage::Running(now);
        }
    }

    /// Records that no job works on a held evaluation any more, because the evaluation stays held, or is aborted,
    /// instead of being resumed. `is_held` is true if the evaluation stays held. Returns the answers to the clients that
    /// waited for the evaluation.
    #[must_use]
    pub(super) fn mark_stopped(&mut self, id: u64, is_held: bool) -> Vec<AnswerFn> {
        let Some(entry) = self.entries.get_mut(&id) else { return Vec::new() };
        entry.stop();
        let Some(mut outcome) = entry.outcome.clone() else { return Vec::new() };
        clear_held_unless(is_held, &mut outcome);
        bind_waiters(std::mem::take(&mut entry.waiters), &outcome)
    }

    /// Records the outcome of an evaluation. Keeps the outcome if it is complete and there is room, and sets
    /// `outcome.kept` accordingly.
    #[must_use]
    pub(super) fn end(&mut self, mut outcome: Outcome) -> EndedEvaluation {
        let id = outcome.evaluation;
        let Some(entry) = self.entries.get_mut(&id) else {
            return EndedEvaluation { outcome: Arc::new(outcome), waiters: Vec::new(), forgotten: Vec::new() };
        };
        if self.kept.remove(&id) {
            self.bytes -= std::mem::take(&mut entry.bytes);
        }
        entry.stop();
        let before = entry.outcome.take();
        let mut combined = before.map(|before| Arc::unwrap_or_clone(before).followed_by(outcome.clone()));
        let bytes = combined.as_ref().unwrap_or(&outcome).byte_size();
        // The outcome at the hold may have been evicted. Then the new outcome is incomplete, and is not kept.
        outcome.kept = bytes <= MAX_BYTES && combined.as_ref().unwrap_or(&outcome).printed_before == 0;
        if let Some(combined) = &mut combined {
            combined.kept = outcome.kept;
        }
        let outcome = Arc::new(outcome);
        let combined = combined.map_or_else(|| outcome.clone(), Arc::new);
        let waiters = bind_waiters(std::mem::take(&mut entry.waiters), &combined);
        let mut forgotten = Vec::new();
        if outcome.kept {
            entry.bytes = bytes;
            entry.printed += outcome.turns.iter().copied().map(u64::from).sum::<u64>();
            entry.outcome = Some(combined);
            self.bytes += bytes;
            self.kept.insert(id);
            self.evict(id, &mut forgotten);
        } else {
            forgotten.extend(self.remove(id));
        }
        EndedEvaluation { outcome, waiters, forgotten }
    }

    /// Returns true if a waiting reply gives the outcome to this evaluation's own client.
    pub(super) fn is_awaited(&self, id: u64) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.waiters.values().any(|waiter| waiter.delivers))
    }

    /// Returns the evaluation that this job works on.
    pub(super) fn find_by_job(&self, job: u64) -> Option<u64> {
        self.jobs.get(&job).copied()
    }

    /// Returns the connection of the evaluation that this job works on.
    pub(super) fn connection_of_job(&self, job: u64) -> Option<Arc<Connection>> {
        self.entries.get(self.jobs.get(&job)?).map(|entry| entry.connection.clone())
    }

    /// Returns the kept outcome of an evaluation: at its end or, if the evaluation has not ended, at its last hold.
    pub(super) fn outcome(&self, id: u64) -> Option<Arc<Outcome>> {
        self.get(id).ok()?.outcome.clone()
    }

    /// Transfers an evaluation to this connection. The evaluation becomes the connection's newest unless the connection
    /// has a newer evaluation.
    pub(super) fn set_connection(&mut self, id: u64, connection: &Arc<Connection>) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.connection = connection.clone();
            connection.newest_evaluation.fetch_max(id, Ordering::Relaxed);
        }
    }

    /// Removes all evaluations that are over. The numbers continue, and evaluations that wait or run stay.
    pub(super) fn reset(&mut self) {
        self.entries.retain(|_, entry| entry.stage != Stage::Over);
        self.jobs.retain(|_, id| self.entries.contains_key(id));
        self.lost.clear();
        self.bytes = 0;
        self.kept.clear();
        if self.entries.is_empty() {
            self.last_at_start = self.last;
        }
    }

    /// Returns the entry of a connection's newest evaluation.
    fn newest(&self, connection: &Connection) -> Result<&EvaluationEntry, EvaluationError> {
        match connection.newest_evaluation.load(Ordering::Relaxed) {
            id if id > self.last_at_start => self.get(id),
            _ => Err(match self.lost.last() {
                Some(id) => EvaluationError::Lost { id: *id },
                None if self.last_at_start == 0 => EvaluationError::None,
                None => EvaluationError::NoneSince { last: self.last_at_start },
            }),
        }
    }

    /// Returns the entry of evaluation `id`.
    fn get(&self, id: u64) -> Result<&EvaluationEntry, EvaluationError> {
        let none = self.last == 0;
        match self.entries.get(&id) {
            Some(entry) => Ok(entry),
            None if none => Err(EvaluationError::None),
            None if id == 0 || id > self.last => Err(EvaluationError::Unknown { id, last: self.last }),
            None if self.lost.contains(&id) => Err(EvaluationError::Lost { id }),
            None => Err(EvaluationError::Gone { id }),
        }
    }

    /// Moves the oldest finished entries except `newest` into `forgotten` until the limits [`MAX_KEPT_EVALUATIONS`] and
    /// [`MAX_BYTES`] hold.
    fn evict(&mut self, newest: u64, forgotten: &mut Vec<EvaluationEntry>) {
        while self.kept.len() > MAX_KEPT_EVALUATIONS || self.bytes > MAX_BYTES {
            // A held evaluation that is being resumed has an outcome, too.
            let is_over = |id: &u64| self.entries.get(id).is_some_and(|entry| entry.stage == Stage::Over);
            let Some(oldest) = self.kept.iter().copied().find(|id| *id != newest && is_over(id)) else { return };
            self.kept.remove(&oldest);
            let entry = self.remove(oldest);
            self.bytes -= entry.as_ref().map_or(0, |entry| entry.bytes);
            forgotten.extend(entry);
        }
    }

    /// Removes and returns the entry of an evaluation.
    fn remove(&mut self, id: u64) -> Option<EvaluationEntry> {
        let entry = self.entries.remove(&id)?;
        self.jobs.remove(&entry.job);
        Some(entry)
    }

    /// Takes the reply of a wait.
    fn take_waiter(&mut self, wait: WaitId) -> Option<Waiter> {
        self.entries.get_mut(&wait.evaluation)?.waiters.remove(&wait.number)
    }
}

impl Session {
    /// Returns the status of an evaluation of any connection; without an `id`, of this connection's newest evaluation.
    /// Works while an evaluation runs.
    ///
    /// # Errors
    /// Returns [`EvaluationError`] when nothing has been evaluated, no evaluation has this number, or the evaluation
    /// was lost with its image or is no longer kept.
    pub fn evaluation(&self, id: Option<u64>) -> Result<EvaluationStatus, EvaluationError> {
        let scheduler = self.inner.scheduler.lock();
        let entry = match id {
            Some(id) => scheduler.evaluations.get(id)?,
            None => scheduler.evaluations.newest(&self.connection)?,
        };
        let progress = match (entry.stage, &entry.outcome) {
            (Stage::Queued, _) => Progress::Queued,
            (Stage::Running(since), _) => Progress::Running {
                time: entry.run_time + since.elapsed(),
                background: scheduler.background_numbers().any(|number| number == entry.id),
            },
            (Stage::Over, Some(outcome)) if outcome.held && scheduler.is_held(entry.id) => {
                Progress::Held(outcome.clone())
            }
            (Stage::Over, Some(outcome)) => Progress::Over(outcome.clone(), entry.run_time),
            (Stage::Over, None) => return Err(EvaluationError::Gone { id: entry.id }),
        };
        let printed = entry.printed + scheduler.running_builder(entry.id).map_or(0, OutcomeBuilder::printed_chars);
        Ok(EvaluationStatus { id: entry.id, code: entry.code.to_string(), progress, printed })
    }

    /// Returns the kept output of an evaluation so far, with stdout and stderr in the order printed, and the number of
    /// omitted characters.
    ///
    /// # Errors
    /// Fails as [`evaluation`](Self::evaluation) does.
    pub fn printed(&self, id: u64) -> Result<(String, u64), EvaluationError> {
        let _copying = self.inner.output_copy.lock();
        let (before, so_far) = loop {
            let scheduler = self.inner.scheduler.lock();
            let before = scheduler.evaluations.get(id)?.outcome.clone();
            let Some(builder) = scheduler.running_builder(id) else { break (before, None) };
            let printed = builder.printed().clone();
            drop(scheduler);
            // If the evaluation is held or ends meanwhile, the outcome of its entry gets the output.
            let (so_far, is_complete) = printed.copy();
            if is_complete {
                break (before, Some(so_far.interleaved()));
            }
        };
        let (mut text, mut omitted) = before.map_or_else(Default::default, |outcome| {
            (outcome.printed(), outcome.stdout.omitted + outcome.stderr.omitted)
        });
        if let Some(so_far) = so_far {
            text += &so_far.text;
            omitted += so_far.omitted;
        }
        Ok((text, omitted))
    }

    /// Calls `reply` with the outcome of an evaluation when the evaluation is over or held, on a helper thread, or at once
    /// if this is already the case. Does not change the error state. If the evaluation belongs to this connection, the
    /// connection's next answer no longer mentions the evaluation's failure.
    ///
    /// # Errors
    /// Fails as [`evaluation`](Self::evaluation) does.
    pub fn await_outcome(
        &self,
        id: u64,
        reply: impl FnOnce(Arc<Outcome>) + Send + 'static,
    ) -> Result<WaitId, EvaluationError> {
        self.inner.add_waiter(id, Some(&self.connection), Box::new(reply))
    }

    /// Calls `reply` when an evaluation is over or held, or at once if this is already the case. Does not change
    /// the error state.
    ///
    /// # Errors
    /// Fails as [`evaluation`](Self::evaluation) does.
    pub fn await_stop(&self, id: u64, reply: impl FnOnce() + Send + 'static) -> Result<WaitId, EvaluationError> {
        self.inner.add_waiter(id, None, Box::new(|_| reply()))
    }

    /// Cancels a wait for an evaluation. The reply of the wait is dropped. Returns false if the wait was cancelled earlier, or
    /// is over: then its reply has been called, or will be.
    pub fn cancel_wait(&self, wait: WaitId) -> bool {
        let waiter = self.inner.scheduler.lock().evaluations.take_waiter(wait);
        waiter.is_some()
    }

    /// Cancels an evaluation that waits or runs, as [`cancel`](Self::cancel) does. Does nothing for an evaluation that
    /// is over. Use [`abort_held`](Self::abort_held) for a held evaluation.
    ///
    /// # Errors
    /// Fails as [`evaluation`](Self::evaluation) does.
    pub fn cancel_evaluation(&self, id: u64) -> Result<(), EvaluationError> {
        let job = self.inner.scheduler.lock().evaluations.get(id)?.job;
        self.cancel(JobId(job));
        Ok(())
    }

    /// Returns the number of the evaluation that `job` works on or was submitted for, if it is known.
    pub(crate) fn evaluation_of(&self, job: JobId) -> Option<u64> {
        self.inner.scheduler.lock().evaluations.find_by_job(job.0)
    }

    /// Returns the number of the foreground evaluation that evaluation `id` waits behind, and the running time of that
    /// evaluation so far; `None` if evaluation `id` does not wait, or no evaluation is in the foreground.
    #[must_use]
    pub fn blocking_evaluation(&self, id: u64) -> Option<(u64, Duration)> {
        self.inner.scheduler.lock().blocking_evaluation(id)
    }

    /// Returns the same as [`blocking_evaluation`](Self::blocking_evaluation). Also returns `None` while another thread keeps
    /// the scheduler's lock.
    pub(crate) fn blocking_evaluation_for_progress(&self, id: u64) -> Option<(u64, Duration)> {
        self.inner.lock_briefly()?.blocking_evaluation(id)
    }

    /// Adds an evaluation of `code`, which job number `job` will run for this connection. Returns the evaluation's number.
    pub(super) fn number_evaluation(&self, scheduler: &mut SchedulerState, job: u64, code: &Arc<str>) -> u64 {
        let number = scheduler.evaluations.add(&self.connection, job, code);
        self.connection.newest_evaluation.store(number, Ordering::Relaxed);
        if let Some(observer) = self.inner.observer.get() {
            observer.evaluation_numbered(number);
        }
        number
    }

    /// Checks that there is room for another evaluation in the background.
    ///
    /// # Errors
    /// Returns [`EvaluationError::TooMany`] when the background is full. Evaluations that wait to begin there count,
    /// too.
    pub fn check_background_capacity(&self) -> Result<(), EvaluationError> {
        match self.inner.scheduler.lock().background_and_waiting_count() {
            0..MAX_BACKGROUND => Ok(()),
            count => Err(EvaluationError::TooMany { count }),
        }
    }
}

/// Binds the replies that wait for an evaluation to its outcome. The replies that pass on the outcome are one answer for each
/// connection, which runs them one after the other on a helper thread. So a client does not wait for the answers to the many
/// requests of another client.
fn bind_waiters(waiters: BTreeMap<u64, Waiter>, outcome: &Arc<Outcome>) -> Vec<AnswerFn> {
    let mut answers: Vec<AnswerFn> = Vec::new();
    let mut slow: BTreeMap<u64, Vec<AnswerFn>> = BTreeMap::new();
    for waiter in waiters.into_values() {
        let answers = match waiter.to {
            Some(connection) => slow.entry(connection).or_default(),
            None => &mut answers,
        };
        answers.push(bind_reply(waiter.reply, outcome.clone()));
    }
    for replies in slow.into_values() {
        answers.push(Box::new(move || helper_threads::run(move || panics::call_all(replies))));
    }
    answers
}

/// Clears the flag `held` in the outcome of an evaluation that is no longer held.
fn clear_held_unless(is_held: bool, outcome: &mut Arc<Outcome>) {
    if outcome.held && !is_held {
        Arc::make_mut(outcome).held = false;
    }
}

impl Inner {
    /// Calls `reply` with the outcome of an evaluation when the evaluation is over or held. `to` is the connection
    /// that gets the outcome; `None` if the reply does not pass on the outcome.
    fn add_waiter(
        &self,
        id: u64,
        to: Option<&Connection>,
        reply: Reply<Arc<Outcome>>,
    ) -> Result<WaitId, EvaluationError> {
        let mut scheduler = self.scheduler.lock();
        let entry = scheduler.evaluations.get(id)?;
        let connection = entry.connection.clone();
        let delivers = to.is_some_and(|to| to.id == connection.id);
        if let (Stage::Over, Some(outcome)) = (entry.stage, &entry.outcome) {
            let mut outcome = outcome.clone();
            let is_held = scheduler.is_held(id);
            if delivers {
                Self::withdraw_failure_notice(&connection, &outcome);
            }
            drop(scheduler);
            clear_held_unless(is_held, &mut outcome);
            reply(outcome);
            return Ok(WaitId { evaluation: id, number: 0 });
        }
        let reply = match self.observer.get().filter(|_| to.is_some()) {
            Some(observer) => {
                let observer = observer.clone();
                // This reply runs on a helper thread. The reply above may run on the event loop's thread, which must not wait.
                let wait_and_reply: Reply<Arc<Outcome>> = Box::new(move |outcome| {
                    observer.wait_for_recipient();
                    reply(outcome);
                });
                wait_and_reply
            }
            None => reply,
        };
        let evaluations = &mut scheduler.evaluations;
        evaluations.last_wait += 1;
        let wait = WaitId { evaluation: id, number: evaluations.last_wait };
        if let Some(entry) = evaluations.entries.get_mut(&id) {
            entry.waiters.insert(wait.number, Waiter { delivers, to: to.map(|to| to.id), reply });
        }
        Ok(wait)
    }
}

impl SchedulerState {
    /// Returns the builder of a running evaluation's outcome.
    fn running_builder(&self, evaluation: u64) -> Option<&OutcomeBuilder> {
        let mut builders = self.running.iter().filter_map(|running| running.activity.outcome_builder());
        builders.find(|builder| builder.evaluation() == evaluation)
    }

    /// Returns the foreground evaluation that evaluation `id` waits behind, as [`Session::blocking_evaluation`] does.
    fn blocking_evaluation(&self, id: u64) -> Option<(u64, Duration)> {
        let waits = self.evaluations.get(id).is_ok_and(|entry| entry.stage == Stage::Queued);
        let first = self.running.iter().find(|running| running.is_foreground())?;
        let entry = self.evaluations.get(first.evaluation).ok()?;
        match entry.stage {
            Stage::Running(since) if waits => Some((entry.id, entry.run_time + since.elapsed())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::Limits;
    use crate::session::completion::end_evaluation;
    use crate::session::events::JobEnd;
    use crate::session::observer::Observer;

    /// Returns a session without an image.
    fn session() -> Session {
        let inner = Arc::new(Inner::new(Limits::default()));
        Session { connection: inner.own_connection.clone(), inner }
    }

    /// Adds an evaluation that job `job` will run, and returns its number.
    fn add_evaluation(session: &Session, job: u64) -> u64 {
        session.number_evaluation(&mut session.inner.scheduler.lock(), job, &"1".into())
    }

    /// Ends an evaluation successfully, and sends the answers.
    fn end(session: &Session, id: u64) {
        let outcome = OutcomeBuilder::blank(id).finish(JobEnd::Succeeded);
        let answer = end_evaluation(&mut session.inner.scheduler.lock(), outcome, Box::new(drop));
        answer();
    }

    /// The replies may render large answers. The thread that ends the evaluation must not wait for the replies, and
    /// other work for helper threads must not wait for many replies.
    #[test]
    fn replies_of_a_connection_that_wait_for_an_outcome_run_on_one_helper_thread() {
        let session = session();
        let id = add_evaluation(&session, 1);
        let (send, receive) = mpsc::channel();
        for _ in 0..3 {
            let send = send.clone();
            let reply = move |outcome: Arc<Outcome>| send.send((thread::current().id(), outcome.evaluation)).unwrap();
            session.await_outcome(id, reply).unwrap();
        }
        drop(send);
        end(&session, id);
        let calls: Vec<_> = receive.iter().collect();
        let (helper, _) = calls[0];
        assert_ne!(helper, thread::current().id());
        assert_eq!(calls, [(helper, id); 3]);
    }

    #[test]
    fn client_gets_an_outcome_while_the_answers_to_another_client_are_rendered() {
        let session = session();
        let id = add_evaluation(&session, 1);
        let (answered, is_answered) = mpsc::channel();
        let (send, receive) = mpsc::channel();
        let first = send.clone();
        let slow_reply = move |_| first.send(is_answered.recv_timeout(Duration::from_secs(20)).is_ok()).unwrap();
        session.await_outcome(id, slow_reply).unwrap();
        session.connect().await_outcome(id, move |_| answered.send(()).unwrap()).unwrap();
        drop(send);
        end(&session, id);
        assert_eq!(receive.recv(), Ok(true));
    }

    /// Thousands of such replies would delay the answers to other clients.
    #[test]
    fn each_reply_that_waited_for_an_outcome_waits_for_the_recipient() {
        struct Recipient(mpsc::Sender<&'static str>);
        impl Observer for Recipient {
            fn wait_for_recipient(&self) {
                self.0.send("wait").unwrap();
            }
        }
        let session = session();
        let (send, receive) = mpsc::channel();
        let next = || receive.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(session.inner.observer.set(Arc::new(Recipient(send.clone()))).is_ok());
        let id = add_evaluation(&session, 1);
        for _ in 0..2 {
            let send = send.clone();
            session.await_outcome(id, move |_| send.send("reply").unwrap()).unwrap();
        }
        end(&session, id);
        assert_eq!([next(), next(), next(), next()], ["wait", "reply", "wait", "reply"]);
        // The evaluation is over, so this reply runs on this thread.
        session.await_outcome(id, move |_| send.send("reply at once").unwrap()).unwrap();
        assert_eq!(next(), "reply at once");
    }

    #[test]
    fn cancelled_wait_for_an_evaluation_gets_no_reply() {
        let session = session();
        let id = add_evaluation(&session, 1);
        let (send, receive) = mpsc::channel();
        let waits = [0, 1, 2].map(|number| {
            let send = send.clone();
            session.await_stop(id, move || send.send(number).unwrap()).unwrap()
        });
        drop(send);
        assert!(session.cancel_wait(waits[1]) && !session.cancel_wait(waits[1]));
        end(&session, id);
        assert!(!session.cancel_wait(waits[0]));
        assert_eq!(receive.iter().collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn the_newest_outcomes_are_kept_whatever_evaluations_wait() {
        let session = session();
        let ids: Vec<_> = (0..30).map(|job| add_evaluation(&session, job)).collect();
        let (waiting, over) = ids.split_at(5);
        over.iter().for_each(|id| end(&session, *id));
        let (gone, kept) = over.split_at(over.len() - MAX_KEPT_EVALUATIONS);
        let progress = |id: &u64| session.evaluation(Some(*id)).map(|status| status.progress);
        assert!(waiting.iter().all(|id| progress(id) == Ok(Progress::Queued)));
        assert!(gone.iter().all(|id| progress(id) == Err(EvaluationError::Gone { id: *id })));
        assert!(kept.iter().all(|id| matches!(progress(id), Ok(Progress::Over(..)))));
        let found: Vec<_> = (0..30).filter_map(|job| session.evaluation_of(JobId(job))).collect();
        assert_eq!(found, [waiting, kept].concat());
        session.inner.scheduler.lock().evaluations.reset();
        let found: Vec<_> = (0..30).filter_map(|job| session.evaluation_of(JobId(job))).collect();
        assert_eq!(found, waiting);
    }

    /// Output of a thread that outlives its evaluation goes to the evaluation's connection, which is looked up for each
    /// part of the output, under the scheduler's lock.
    #[test]
    fn the_search_for_the_evaluation_of_a_job_does_not_visit_the_evaluations_that_wait() {
        let session = session();
        let begin = Instant::now();
        let ids: Vec<_> = (0..100_000).map(|job| add_evaluation(&session, job)).collect();
        let adding = begin.elapsed();
        let begin = Instant::now();
        let scheduler = session.inner.scheduler.lock();
        assert!((100_000..101_000).all(|job| scheduler.evaluations.connection_of_job(job).is_none()));
        let searching = begin.elapsed();
        assert!(searching < adding, "{searching:?}, and {adding:?} to add the evaluations");
        assert_eq!(scheduler.evaluations.find_by_job(0), Some(ids[0]));
    }
}
