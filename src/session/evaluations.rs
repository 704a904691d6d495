//! The evaluations of a session: their numbers, and the last ones whole.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::builder::OutcomeBuilder;
use super::running::Build;
use super::{Answer, JobId, Reply, Session, answer};
use crate::error::EvaluationError;
use crate::image::Lane;
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

struct Entry {
    id: u64,
    /// The job that does it.
    job: u64,
    code: String,
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
    reply: Reply<Arc<Outcome>>,
}

/// Those that wait or run, and the last ones that are over.
#[derive(Default)]
pub(super) struct Evaluations {
    /// The number of the last one.
    last: u64,
    /// What that was when this image began: there is none of it yet while it is the same.
    before: u64,
    /// In the order of their numbers.
    entries: VecDeque<Entry>,
    /// Bytes that the ones take that are over, and how many there are.
    bytes: usize,
    over: usize,
    waiters: Vec<Waiter>,
    waits: u64,
}

impl Evaluations {
    /// Begins with an evaluation of `code`, done by `job`, and gives it its number.
    pub(super) fn add(&mut self, job: u64, code: &str) -> u64 {
        self.last += 1;
        let code = code[..byte_offset(code, MAX_CODE)].to_owned();
        self.entries.push_back(Entry {
            id: self.last,
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
    #[cfg(feature = "mcp")]
    pub(super) fn count_from(&mut self, number: u64) {
        self.last = self.last.max(number);
        if self.entries.is_empty() {
            self.before = self.last;
        }
    }

    /// `job` begins to do an evaluation, or goes on with it.
    pub(super) fn begin(&mut self, id: u64, job: u64) {
        if let Some(index) = self.find(id) {
            let entry = &mut self.entries[index];
            entry.job = job;
            entry.stage = Stage::Running(Instant::now());
        }
    }

    /// What is held was to go on and does not.
    pub(super) fn rest(&mut self, id: u64) {
        if let Some(index) = self.find(id) {
            self.entries[index].rest();
        }
    }

    /// Forgets one that did not come about.
    pub(super) fn remove(&mut self, id: u64) {
        if let Some(index) = self.find(id) {
            self.drop_entry(index);
        }
    }

    /// Keeps what an evaluation came to. The outcome says whether there is room for it.
    #[must_use]
    pub(super) fn end(&mut self, outcome: &mut Outcome) -> Vec<Answer> {
        let id = outcome.evaluation;
        let Some(index) = self.find(id) else { return Vec::new() };
        self.forget_outcome(index);
        let entry = &mut self.entries[index];
        entry.rest();
        let before = entry.outcome.take();
        let whole = match before {
            Some(before) => Outcome::clone(&before).followed_by(outcome.clone()),
            None => outcome.clone(),
        };
        let bytes = whole.bytes();
        // What was held may have had to go meanwhile: then this is not the whole.
        outcome.kept = bytes <= BYTES && whole.printed_before == 0;
        let whole = Arc::new(Outcome { kept: outcome.kept, defined: Vec::new(), ..whole });
        if outcome.kept {
            entry.bytes = bytes;
            entry.outcome = Some(whole.clone());
            self.bytes += bytes;
            self.over += 1;
            self.make_room(id);
        } else {
            self.entries.remove(index);
        }
        let waiters = self.waiters.extract_if(.., |waiter| waiter.evaluation == id);
        waiters.map(|waiter| -> Answer { answer(waiter.reply, whole.clone()) }).collect()
    }

    /// Forgets all but how far the numbers have come, and what has not run yet.
    pub(super) fn reset(&mut self) {
        self.entries.retain(|entry| entry.stage != Stage::Over);
        (self.bytes, self.over) = (0, 0);
        if self.entries.is_empty() {
            self.before = self.last;
        }
    }

    fn find(&self, id: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&id, |entry| entry.id).ok()
    }

    /// The entry of the newest evaluation, or of this one.
    fn get(&self, id: Option<u64>) -> Result<&Entry, EvaluationError> {
        let none = self.last == 0 || id.is_none() && self.last == self.before;
        let id = id.unwrap_or(self.last);
        match self.find(id) {
            Some(index) => Ok(&self.entries[index]),
            None if none => Err(EvaluationError::None),
            None if id == 0 || id > self.last => Err(EvaluationError::Unknown { id, last: self.last }),
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

    fn drop_entry(&mut self, index: usize) {
        self.forget_outcome(index);
        self.entries.remove(index);
    }

    /// Drops the oldest ones but `newest` until the bounds are kept.
    fn make_room(&mut self, newest: u64) {
        while self.over > KEPT || self.bytes > BYTES {
            let oldest = self.entries.iter().position(|entry| entry.id != newest && entry.stage == Stage::Over);
            let Some(oldest) = oldest else { return };
            self.drop_entry(oldest);
        }
    }
}

impl Session {
    /// What is known of an evaluation, the newest one by default. Answers while one runs.
    ///
    /// # Errors
    /// [`EvaluationError`]: there is none of this number, or it is no longer kept.
    pub fn evaluation(&self, id: Option<u64>) -> Result<EvaluationStatus, EvaluationError> {
        let mut status = {
            let evaluations = self.0.evaluations.lock();
            let entry = evaluations.get(id)?;
            let progress = match (entry.stage, &entry.outcome) {
                (Stage::Queued, _) => Progress::Queued,
                (Stage::Running(since), _) => Progress::Running(entry.took + since.elapsed()),
                (Stage::Over, Some(outcome)) if outcome.held && self.held_evaluation() == entry.id => {
                    Progress::Held(outcome.clone())
                }
                (Stage::Over, Some(outcome)) => Progress::Over(outcome.clone(), entry.took),
                (Stage::Over, None) => return Err(EvaluationError::Gone { id: entry.id }),
            };
            let printed =
                entry.outcome.as_ref().map_or(0, |outcome| outcome.turns.iter().copied().map(u64::from).sum());
            EvaluationStatus { id: entry.id, code: entry.code.clone(), progress, printed }
        };
        status.printed += self.look_at_running(status.id, OutcomeBuilder::printed).unwrap_or(0);
        Ok(status)
    }

    /// What an evaluation has printed so far, stdout and stderr in the order printed, as far as that is kept; and how
    /// many characters more it printed.
    ///
    /// # Errors
    /// As [`evaluation`](Self::evaluation).
    pub fn printed(&self, id: u64) -> Result<(String, u64), EvaluationError> {
        let before = self.0.evaluations.lock().get(Some(id))?.outcome.clone();
        let (mut text, mut omitted) = before.map_or_else(Default::default, |outcome| {
            (outcome.printed(), outcome.stdout.omitted + outcome.stderr.omitted)
        });
        if let Some((more, missing)) = self.look_at_running(id, |builder| (builder.printed_text(), builder.omitted())) {
            text += &more;
            omitted += missing;
        }
        Ok((text, omitted))
    }

    /// Has `reply` called with the outcome of an evaluation when it is over, or held; at once if it is.
    ///
    /// # Errors
    /// As [`evaluation`](Self::evaluation).
    pub fn when_over(
        &self,
        id: u64,
        reply: impl FnOnce(Arc<Outcome>) + Send + 'static,
    ) -> Result<WaitId, EvaluationError> {
        let mut evaluations = self.0.evaluations.lock();
        let entry = evaluations.get(Some(id))?;
        match (entry.stage, &entry.outcome) {
            (Stage::Over, Some(outcome)) => {
                let mut outcome = outcome.clone();
                let held = self.held_evaluation() == id;
                drop(evaluations);
                if outcome.held && !held {
                    Arc::make_mut(&mut outcome).held = false;
                }
                reply(outcome);
                Ok(WaitId(0))
            }
            _ => {
                evaluations.waits += 1;
                let wait = WaitId(evaluations.waits);
                evaluations.waiters.push(Waiter { id: wait, evaluation: id, reply: Box::new(reply) });
                Ok(wait)
            }
        }
    }

    /// Gives up waiting for an evaluation.
    pub fn wait_no_longer(&self, wait: WaitId) {
        self.0.evaluations.lock().waiters.retain(|waiter| waiter.id != wait);
    }

    /// Ends an evaluation that waits or runs, as [`cancel`](Self::cancel) does. Does nothing for one that is over; one
    /// that is held is for [`abort_held`](Self::abort_held).
    ///
    /// # Errors
    /// As [`evaluation`](Self::evaluation).
    pub fn cancel_evaluation(&self, id: u64) -> Result<(), EvaluationError> {
        let job = self.0.evaluations.lock().get(Some(id))?.job;
        self.cancel(JobId(job));
        Ok(())
    }

    /// The number of the evaluation that was held last.
    fn held_evaluation(&self) -> u64 {
        if !self.is_held() {
            return 0;
        }
        self.0.held_as.lock().as_ref().map_or(0, OutcomeBuilder::evaluation)
    }

    /// Looks at the evaluation while it runs.
    fn look_at_running<T>(&self, id: u64, look: impl FnOnce(&OutcomeBuilder) -> T) -> Option<T> {
        let running = self.0.running[Lane::Evaluation as usize].lock();
        let builder = match &running.as_ref()?.build {
            Build::Outcome(builder, _) => builder,
            Build::Resumed(builder, _) => builder,
            Build::Inside(builder, _) => builder,
            _ => return None,
        };
        (builder.evaluation() == id).then(|| look(builder))
    }
}
