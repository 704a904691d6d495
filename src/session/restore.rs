//! What a session takes over from one whose image is gone.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::builder::OutcomeBuilder;
use super::history::History;
use super::hold::RELEASED;
use super::idle::Idle;
use super::operation::Operation;
use super::running::{Build, Running};
use super::state::State;
use super::witness::Witness;
use super::{Interrupt, Lane, Ordering, Reply, Session, wait};
use crate::Evaluation;
use crate::config::Limits;
use crate::outcome::{Clipped, ErrorRecord, Outcome};

/// What a reset says of an evaluation that ran.
const ENDED: &str = "The evaluation that was running has been ended.";

/// What a session knows of errors, as it is handed to another.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Errors {
    /// The error state.
    pub(crate) last: Option<Arc<ErrorRecord>>,
    /// The last errors.
    pub(crate) history: History,
    /// The number of the last one.
    pub(crate) count: u64,
}

impl Errors {
    /// Takes note of what an evaluation did.
    pub(crate) fn note(&mut self, added: Option<Arc<ErrorRecord>>, last: Option<u64>) {
        if let Some(error) = added {
            self.count = self.count.max(error.id);
            self.history.push(error);
        }
        let before = self.last.take().filter(|error| Some(error.id) == last);
        self.last = before.or_else(|| self.history.get(last?).cloned());
    }

    /// Forgets everything but how far the numbers have come.
    pub(crate) fn reset(&mut self) {
        *self = Self { count: self.count, ..Self::default() };
    }
}

impl State {
    /// Takes over what another session knew.
    fn restore(&mut self, errors: Errors) {
        // What restoring had to say is told elsewhere.
        let Errors { last, history, count } = errors;
        *self = Self::default();
        (self.last_error, self.history, self.errors) = (last, history, count);
    }
}

impl Session {
    /// Has `witness` told of everything from here on. Only the first one counts.
    pub(crate) fn observe(&self, witness: Arc<dyn Witness>) {
        let _ = self.0.witness.set(witness);
    }

    /// Has the evaluation thread do this while there is nothing to evaluate. Only the first one counts. From then on
    /// [`Session::evaluate`] must not be called where this is done.
    pub(crate) fn idle_with(&self, idle: Arc<dyn Idle>) {
        self.0.lanes[Lane::Evaluation as usize].idle_with(idle);
    }

    /// Evaluates, and waits for the outcome, what was part of evaluation `source` in another image: it gets no number
    /// of its own.
    pub(crate) fn evaluate_again(&self, source: u64, evaluation: Evaluation, operation: Option<&Operation>) -> Outcome {
        wait(|reply: Reply<Outcome>| {
            self.submit_as(self.0.next_job_id(), 0, source, evaluation, operation, reply);
        })
    }

    /// Evaluations to come get numbers above this one.
    pub(crate) fn count_evaluations_from(&self, number: u64) {
        self.0.evaluations.lock().count_from(number);
    }

    /// The next jobs get numbers from this one on.
    pub(crate) fn number_from(&self, number: u64) {
        self.0.next_id.fetch_max(number, Ordering::Relaxed);
    }

    /// Calls `question`, which is about the error state, when nothing that was cancelled is yet to become part of it.
    pub(crate) fn when_settled(&self, question: impl FnOnce() + Send + 'static) {
        let mut slot = self.0.running[Lane::Evaluation as usize].lock();
        match slot.as_mut() {
            Some(running) if running.interrupted == Some(Interrupt::Cancel) => running.settled.push(Box::new(question)),
            _ => {
                drop(slot);
                question();
            }
        }
    }

    /// Ends all that waits or runs, as cancelled. What runs is interrupted, and answers for itself. Returns what is to be
    /// said of it.
    pub(crate) fn end_all(&self) -> Option<String> {
        self.end_queued(Lane::Evaluation);
        self.end_queued(Lane::Inspection);
        let running = self.0.running[Lane::Evaluation as usize].lock().as_ref().map(|running| running.id);
        let interrupted = running.is_some_and(|job| self.0.interrupt(Lane::Evaluation, job, Interrupt::Cancel));
        interrupted.then(|| ENDED.to_owned())
    }

    /// Answers all that waits, runs or is held as cancelled, in an image that is to be replaced.
    pub(crate) fn abandon(&self) {
        for lane in [Lane::Evaluation, Lane::Inspection] {
            let running = self.0.running[lane as usize].lock().take();
            if let Some(mut running) = running {
                if lane == Lane::Evaluation && !matches!(running.build, Build::Nothing) {
                    self.add_notice(ENDED.to_owned());
                }
                let settled = std::mem::take(&mut running.settled);
                self.0.finish(running, Ok(Interrupt::Cancel))();
                settled.into_iter().for_each(|question| question());
            }
            self.end_queued(lane);
        }
        if self.0.held.lock().take().is_some() {
            self.add_notice(RELEASED.to_owned());
        }
    }

    fn end_queued(&self, lane: Lane) {
        for request in self.0.lanes[lane as usize].take_all() {
            self.0.finish(Running::new(request, None), Ok(Interrupt::Cancel))();
        }
    }

    /// Takes the errors over.
    pub(crate) fn set_errors(&self, errors: Errors) {
        self.0.state.lock().restore(errors);
    }

    /// Takes an error for the last one, as if an evaluation had failed with it.
    pub(crate) fn fail(&self, outcome: &mut Outcome) {
        let mut state = self.0.state.lock();
        if let Err(error) = &mut outcome.result {
            *error = Arc::new(ErrorRecord::clone(error));
            state.record(error);
        }
        state.last_error = outcome.result.as_ref().err().cloned();
        self.0.tell_witness(&state, outcome);
    }

    /// What the next answer has to say, which it will not say now.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        self.0.state.lock().take_notices()
    }

    /// Has the next answer not say this after all.
    pub(crate) fn withdraw_notice(&self, notice: &str) {
        // What is kept of it may be shorter.
        self.0.state.lock().notices.retain(|kept| kept.lines().next() != notice.lines().next());
    }

    /// Adds to what the next answer has to say.
    pub(crate) fn add_notice(&self, notice: String) {
        self.0.state.lock().notice(notice);
    }
}

/// A question to a person about the held evaluation, until it is dropped.
#[derive(Debug)]
pub(crate) struct Asking {
    session: Session,
    question: u64,
}

impl Session {
    /// Has it known that a person is being asked about the held evaluation, who may take any time: what does not concern
    /// it waits until that is over.
    pub(crate) fn asking(&self) -> Asking {
        let question = self.0.next_job_id();
        if self.is_held() {
            // Perhaps in place of one that is asked again.
            let before = self.0.question.lock().replace(question);
            if let (None, Some(witness)) = (before, self.0.witness.get()) {
                witness.asks(true);
            }
        }
        Asking { session: self.clone(), question }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let present = *self.session.0.question.lock();
        if present == Some(self.question) {
            self.session.0.end_question();
        }
    }
}

/// The outcome of an evaluation that an image did not come back from.
pub(crate) fn failed(kind: &str, message: String) -> Outcome {
    let mut outcome = OutcomeBuilder::new(0, String::new(), Limits::default(), None).finish(false, None);
    if let Err(error) = &mut outcome.result {
        let error = Arc::make_mut(error);
        error.kind = kind.to_owned();
        error.message = Clipped::from(message);
    }
    outcome
}
