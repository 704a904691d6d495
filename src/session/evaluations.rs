//! The evaluations of a session: their numbers, and the last ones whole.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::events::OutcomeBuilder;
use super::scheduler::{Board, MAX_BACKGROUND};
use super::{Answer, Inner, JobId, Reply, Session, answer};
use crate::error::EvaluationError;
use crate::outcome::{EvaluationStatus, Outcome, Progress, byte_offset};

/// How many evaluations that are over are kept.
const KEPT: usize = 20;
/// Bytes that they take together at most.
const BYTES: usize = 16 << 20;
/// Characters of an evaluation's code that are kept.
const MAX_CODE: u64 = 1_000;

/// Names a wait for the end of an evaluation, so that it can be given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitId(u64);

/// What is being done about an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Queued,
    Running(Instant),
    /// Nothing, it may be held.
    Over,
}

pub(super) struct Entry {
    id: u64,
    /// Whose it is.
    connection: Arc<Connection>,
    /// The job that does it.
    job: u64,
    code: Arc<str>,
    stage: Stage,
    /// How long it ran before this stage.
    took: Duration,
    /// What it came to: when it was held last, or at its end.
    outcome: Option<Arc<Outcome>>,
    /// What that takes of [`BYTES`].
    bytes: usize,
}

impl Entry {
    /// Nothing is done about it any more.
    fn rest(&mut self) {
        if let Stage::Running(since) = self.stage {
            self.took += since.elapsed();
        }
        self.stage = Stage::Over;
    }
}

struct Waiter {
    id: WaitId,
    evaluation: u64,
    /// It is given what the evaluation came to, as the call would be that asked for that.
    delivers: bool,
    reply: Reply<Arc<Outcome>>,
}

/// What is to be done when an evaluation has ended.
pub(super) struct Ended {
    /// What its call is answered with: what it came to since it was held, if it was.
    pub(super) outcome: Arc<Outcome>,
    /// Those who waited for its end.
    pub(super) waiters: Vec<Answer>,
    /// What is not kept any longer. To take it apart would keep the call waiting.
    pub(super) forgotten: Vec<Entry>,
}

/// Those that wait or run, and the last ones that are over.
#[derive(Default)]
pub(super) struct Evaluations {
    /// The number of the last one.
    last: u64,
    /// What that was when this image began: there is none of it yet while it is the same.
    before: u64,
    /// Those that were in the background when the image before was lost.
    lost: Vec<u64>,
    /// In the order of their numbers.
    entries: VecDeque<Entry>,
    /// Bytes that the ones take that are over, and how many there are.
    bytes: usize,
    over: usize,
    waiters: Vec<Waiter>,
    waits: u64,
}

impl Evaluations {
    /// Begins with an evaluation of `code` for a connection, done by `job`, and gives it its number.
    pub(super) fn add(&mut self, connection: &Arc<Connection>, job: u64, code: &Arc<str>) -> u64 {
        self.last += 1;
        let kept = byte_offset(code, MAX_CODE);
        let code = if kept == code.len() { code.clone() } else { code[..kept].into() };
        self.entries.push_back(Entry {
            id: self.last,
            connection: connection.clone(),
            job,
            code,
            stage: Stage::Queued,
            took: Duration::ZERO,
            outcome: None,
            bytes: 0,
        });
        self.last
    }

    /// The number of the last one.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// The next ones get numbers above this one.
    pub(super) fn count_from(&mut self, number: u64) {
        self.last = self.last.max(number);
        if self.entries.is_empty() {
            self.before = self.last;
        }
    }

    /// These were in the background when the image before was lost.
    pub(super) fn lose(&mut self, numbers: &[u64]) {
        self.lost = numbers.to_vec();
        self.lost.sort_unstable();
    }

    /// `job` begins to do an evaluation, or goes on with it.
    pub(super) fn begin(&mut self, id: u64, job: u64, now: Instant) {
        if let Some(entry) = self.entry(id) {
            entry.job = job;
            entry.stage = Stage::Running(now);
        }
    }

    /// What is held was to go on and does not.
    pub(super) fn rest(&mut self, id: u64) {
        if let Some(entry) = self.entry(id) {
            entry.rest();
        }
    }

    /// Forgets one that did not come about.
    pub(super) fn remove(&mut self, id: u64) {
        if let Some(index) = self.find(id) {
            self.take_entry(index);
        }
    }

    /// Keeps what an evaluation came to, if there is room for it: the outcome says so.
    #[must_use]
    pub(super) fn end(&mut self, mut outcome: Outcome) -> Ended {
        let id = outcome.evaluation;
        let Some(index) = self.find(id) else {
            return Ended { outcome: Arc::new(outcome), waiters: Vec::new(), forgotten: Vec::new() };
        };
        self.forget_outcome(index);
        let entry = &mut self.entries[index];
        entry.rest();
        let before = entry.outcome.take();
        let mut whole = before.map(|before| Outcome::clone(&before).followed_by(outcome.clone()));
        let bytes = whole.as_ref().unwrap_or(&outcome).bytes();
        // What was held may have had to go meanwhile: then this is not the whole.
        outcome.kept = bytes <= BYTES && whole.as_ref().unwrap_or(&outcome).printed_before == 0;
        if let Some(whole) = &mut whole {
            whole.kept = outcome.kept;
        }
        let outcome = Arc::new(outcome);
        let whole = whole.map_or_else(|| outcome.clone(), Arc::new);
        let mut forgotten = Vec::new();
        if outcome.kept {
            entry.bytes = bytes;
            entry.outcome = Some(whole.clone());
            self.bytes += bytes;
            self.over += 1;
            self.make_room(id, &mut forgotten);
        } else {
            forgotten.extend(self.entries.remove(index));
        }
        let waiters = self.waiters.extract_if(.., |waiter| waiter.evaluation == id);
        let waiters = waiters.map(|waiter| -> Answer { answer(waiter.reply, whole.clone()) }).collect();
        Ended { outcome, waiters, forgotten }
    }

    /// True when somebody waits who is given what this evaluation comes to.
    pub(super) fn is_awaited(&self, id: u64) -> bool {
        self.waiters.iter().any(|waiter| waiter.evaluation == id && waiter.delivers)
    }

    /// The evaluation that is done by this job.
    pub(super) fn by_job(&self, job: u64) -> Option<u64> {
        self.entries.iter().rev().find(|entry| entry.job == job).map(|entry| entry.id)
    }

    /// The connection that this job works for.
    pub(super) fn connection(&self, job: u64) -> Option<Arc<Connection>> {
        self.entries.iter().rev().find(|entry| entry.job == job).map(|entry| entry.connection.clone())
    }

    /// What a held evaluation came to.
    pub(super) fn held_outcome(&self, id: u64) -> Option<Arc<Outcome>> {
        self.get(id).ok()?.outcome.clone()
    }

    /// An evaluation is this connection's from now on, and its newest.
    pub(super) fn set_connection(&mut self, id: u64, connection: &Arc<Connection>) {
        if let Some(entry) = self.entry(id) {
            entry.connection = connection.clone();
            connection.newest.fetch_max(id, Ordering::Relaxed);
        }
    }

    /// Forgets all but how far the numbers have come, and what has not run yet.
    pub(super) fn reset(&mut self) {
        self.entries.retain(|entry| entry.stage != Stage::Over);
        self.lost.clear();
        (self.bytes, self.over) = (0, 0);
        if self.entries.is_empty() {
            self.before = self.last;
        }
    }

    fn find(&self, id: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&id, |entry| entry.id).ok()
    }

    fn entry(&mut self, id: u64) -> Option<&mut Entry> {
        self.find(id).map(|index| &mut self.entries[index])
    }

    /// The entry of the newest evaluation of a connection.
    fn newest(&self, connection: &Connection) -> Result<&Entry, EvaluationError> {
        match connection.newest.load(Ordering::Relaxed) {
            id if id > self.before => self.get(id),
            _ => Err(match self.lost.last() {
                Some(id) => EvaluationError::Lost { id: *id },
                None if self.before == 0 => EvaluationError::None,
                None => EvaluationError::NoneSince { last: self.before },
            }),
        }
    }

    /// The entry of this evaluation.
    fn get(&self, id: u64) -> Result<&Entry, EvaluationError> {
        let none = self.last == 0;
        match self.find(id) {
            Some(index) => Ok(&self.entries[index]),
            None if none => Err(EvaluationError::None),
            None if id == 0 || id > self.last => Err(EvaluationError::Unknown { id, last: self.last }),
            None if self.lost.contains(&id) => Err(EvaluationError::Lost { id }),
            None => Err(EvaluationError::Gone { id }),
        }
    }

    /// Takes away what an entry counts for.
    fn forget_outcome(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        if entry.outcome.is_some() {
            self.over -= 1;
            self.bytes -= std::mem::take(&mut entry.bytes);
        }
    }

    fn take_entry(&mut self, index: usize) -> Option<Entry> {
        self.forget_outcome(index);
        self.entries.remove(index)
    }

    /// Moves the oldest ones but `newest` out until the bounds are kept.
    fn make_room(&mut self, newest: u64, forgotten: &mut Vec<Entry>) {
        while self.over > KEPT || self.bytes > BYTES {
            let oldest = self.entries.iter().position(|entry| entry.id != newest && entry.stage == Stage::Over);
            let Some(oldest) = oldest else { return };
            forgotten.extend(self.take_entry(oldest));
        }
    }
}

impl Session {
    /// What is known of an evaluation, of whatever connection; the newest one of this by default. Answers while one runs.
    ///
    /// # Errors
    /// [`EvaluationError`]: there is none of this number, or it is no longer kept.
    pub fn evaluation(&self, id: Option<u64>) -> Result<EvaluationStatus, EvaluationError> {
        let board = self.inner.board.lock();
        let entry = match id {
            Some(id) => board.evaluations.get(id)?,
            None => board.evaluations.newest(&self.connection)?,
        };
        let progress = match (entry.stage, &entry.outcome) {
            (Stage::Queued, _) => Progress::Queued,
            (Stage::Running(since), _) => Progress::Running {
                time: entry.took + since.elapsed(),
                background: board.background_numbers().any(|number| number == entry.id),
            },
            (Stage::Over, Some(outcome)) if outcome.held && board.is_held(entry.id) => Progress::Held(outcome.clone()),
            (Stage::Over, Some(outcome)) => Progress::Over(outcome.clone(), entry.took),
            (Stage::Over, None) => return Err(EvaluationError::Gone { id: entry.id }),
        };
        let before = entry.outcome.as_ref().map_or(0, |outcome| outcome.turns.iter().copied().map(u64::from).sum());
        let printed = before + board.building(entry.id).map_or(0, OutcomeBuilder::printed);
        Ok(EvaluationStatus { id: entry.id, code: entry.code.to_string(), progress, printed })
    }

    /// What an evaluation has printed so far, stdout and stderr in the order printed, as far as that is kept; and how
    /// many characters more it printed.
    ///
    /// # Errors
    /// As [`evaluation`](Self::evaluation).
    pub fn printed(&self, id: u64) -> Result<(String, u64), EvaluationError> {
        let (before, building) = {
            let board = self.inner.board.lock();
            (board.evaluations.get(id)?.outcome.clone(), board.building(id).map(OutcomeBuilder::so_far))
        };
        // Put together without the lock.
        let (mut text, mut omitted) = before.map_or_else(Default::default, |outcome| {
            (outcome.printed(), outcome.stdout.omitted + outcome.stderr.omitted)
        });
        if let Some(outcome) = building {
            text += &outcome.printed();
            omitted += outcome.stdout.omitted + outcome.stderr.omitted;
        }
        Ok((text, omitted))
    }

    /// Has `reply` called with the outcome of an evaluation when it is over, or held; at once if it is. The error state stays
    /// as it is. The next answer of the connection that began the evaluation does not mention its failure any more.
    ///
    /// # Errors
    /// As [`evaluation`](Self::evaluation).
    pub fn when_over(
        &self,
        id: u64,
        reply: impl FnOnce(Arc<Outcome>) + Send + 'static,
    ) -> Result<WaitId, EvaluationError> {
        self.inner.when_over(id, Some(&self.connection), Box::new(reply))
    }

    /// Has `reply` called when an evaluation is over, or held; at once if it is. The error state stays as it is.
    ///
    /// # Errors
    /// As [`evaluation`](Self::evaluation).
    pub fn when_ended(&self, id: u64, reply: impl FnOnce() + Send + 'static) -> Result<WaitId, EvaluationError> {
        self.inner.when_over(id, None, Box::new(|_| reply()))
    }

    /// Gives up waiting for an evaluation.
    pub fn wait_no_longer(&self, wait: WaitId) {
        self.inner.board.lock().evaluations.waiters.retain(|waiter| waiter.id != wait);
    }

    /// Ends an evaluation that waits or runs, as [`cancel`](Self::cancel) does. Does nothing for one that is over; one
    /// that is held is for [`abort_held`](Self::abort_held).
    ///
    /// # Errors
    /// As [`evaluation`](Self::evaluation).
    pub fn cancel_evaluation(&self, id: u64) -> Result<(), EvaluationError> {
        let job = self.inner.board.lock().evaluations.get(id)?.job;
        self.cancel(JobId(job));
        Ok(())
    }

    /// The number of the evaluation that `job` waits behind, which has run in the foreground for so long; `None` when
    /// it does not wait.
    #[must_use]
    pub fn waits_behind(&self, job: JobId) -> Option<(u64, Duration)> {
        let board = self.inner.board.lock();
        let waits = board
            .evaluations
            .by_job(job.0)
            .and_then(|id| board.evaluations.get(id).ok())
            .is_some_and(|entry| entry.stage == Stage::Queued);
        let first = board.running.iter().find(|running| !running.is_background() && running.evaluates())?;
        let entry = board.evaluations.get(first.evaluation).ok()?;
        match entry.stage {
            Stage::Running(since) if waits => Some((entry.id, entry.took + since.elapsed())),
            _ => None,
        }
    }

    /// Gives an evaluation of `code`, done by `job`, its number.
    pub(super) fn number_evaluation(&self, board: &mut Board, job: u64, code: &Arc<str>) -> u64 {
        let number = board.evaluations.add(&self.connection, job, code);
        self.connection.newest.store(number, Ordering::Relaxed);
        if let Some(observer) = self.inner.observer.get() {
            observer.numbered(number);
        }
        number
    }

    /// True while another evaluation may be begun in the background.
    ///
    /// # Errors
    /// [`EvaluationError::TooMany`]: as many are there, or wait to be, as may.
    pub fn check_background(&self) -> Result<(), EvaluationError> {
        match self.inner.board.lock().background_and_waiting() {
            0..MAX_BACKGROUND => Ok(()),
            count => Err(EvaluationError::TooMany { count }),
        }
    }
}

impl Inner {
    /// `to`: the connection that is given what it came to.
    fn when_over(
        &self,
        id: u64,
        to: Option<&Connection>,
        reply: Reply<Arc<Outcome>>,
    ) -> Result<WaitId, EvaluationError> {
        let mut board = self.board.lock();
        let entry = board.evaluations.get(id)?;
        let connection = entry.connection.clone();
        let delivers = to.is_some_and(|to| to.id == connection.id);
        if let (Stage::Over, Some(outcome)) = (entry.stage, &entry.outcome) {
            let mut outcome = outcome.clone();
            if outcome.held && !board.is_held(id) {
                Arc::make_mut(&mut outcome).held = false;
            }
            if delivers {
                Self::withdraw_failure_notice(&connection, &outcome);
            }
            drop(board);
            reply(outcome);
            return Ok(WaitId(0));
        }
        let evaluations = &mut board.evaluations;
        evaluations.waits += 1;
        let wait = WaitId(evaluations.waits);
        evaluations.waiters.push(Waiter { id: wait, evaluation: id, delivers, reply });
        Ok(wait)
    }
}

impl Board {
    /// What an evaluation that runs comes to so far.
    fn building(&self, evaluation: u64) -> Option<&OutcomeBuilder> {
        let mut builders = self.running.iter().filter_map(|running| running.activity.outcome());
        builders.find(|builder| builder.evaluation() == evaluation)
    }
}
