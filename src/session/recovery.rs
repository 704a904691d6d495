//! What a session takes over from one whose image is gone.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::aftermath::Finishing;
use super::error_state::ErrorState;
use super::events::{JobEnd, OutcomeBuilder};
use super::history::History;
use super::hold::RELEASED;
use super::observer::Observer;
use super::scheduler::{Board, Question, Running};
use super::{Answer, Inner, Session};
use crate::image::{Interrupt, Lane};
use crate::outcome::{ErrorRecord, Outcome};

/// Time that a question about the error state waits for the end of a cancelled evaluation.
const SETTLING: Duration = Duration::from_millis(200);

/// What a reset says of an evaluation that ran.
const ENDED: &str = "The evaluation that was running has been ended.";

/// What a reset says of what it ends.
fn said_of(board: &Board) -> Vec<String> {
    let is_foreground = |running: &Running| running.is_foreground() && running.activity.is_asked_for();
    let foreground = board.running.iter().any(is_foreground).then(|| ENDED.to_owned());
    let background = in_background(board.background_numbers()).map(|which| format!("{which} ended."));
    foreground.into_iter().chain(background).collect()
}

/// The beginning of a sentence about evaluations in the background: what has been done to them.
pub(crate) fn in_background(numbers: impl Iterator<Item = u64>) -> Option<String> {
    let mut numbers: Vec<_> = numbers.collect();
    numbers.sort_unstable();
    match &numbers[..] {
        [] => None,
        [one] => Some(format!("Evaluation {one}, in the background, has been")),
        [first @ .., last] => {
            let first: Vec<_> = first.iter().map(u64::to_string).collect();
            Some(format!("Evaluations {} and {last}, in the background, have been", first.join(", ")))
        }
    }
}

impl Inner {
    /// Has all that is held released.
    fn release_all(&self, board: &mut Board) {
        let holders: Vec<_> = board.holds.iter().map(|hold| hold.connection.clone()).collect();
        for connection in holders {
            let release = self.release(board, &connection, RELEASED);
            board.push(Lane::Evaluation, release);
        }
    }

    /// Takes out all that waits, as cancelled.
    fn end_waiting(&self, board: &mut Board) -> Vec<Answer> {
        let waiting = board.take_all_waiting();
        waiting.into_iter().map(|(lane, request)| self.withdraw(board, lane, request)).collect()
    }
}

/// Maximum size of a history that is handed to another image, in bytes: a worker gets the histories of all clients before it
/// serves.
const MAX_HISTORY: usize = 1 << 20;

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
            self.history.limit(MAX_HISTORY);
        }
        let before = self.last.take().filter(|error| Some(error.id) == last);
        self.last = before.or_else(|| self.history.get(last?).cloned());
    }

    /// Forgets everything but how far the numbers have come.
    pub(crate) fn reset(&mut self) {
        *self = Self { count: self.count, ..Self::default() };
    }
}

impl ErrorState {
    /// Takes over what another session knew.
    fn restore(&mut self, errors: Errors) {
        let Errors { last, history, .. } = errors;
        // What the image said as it was booted is yet to be told.
        self.reset();
        (self.last_error, self.history) = (last, history);
    }
}

impl Session {
    /// Has `observer` told of everything from here on. Only the first one counts.
    pub(crate) fn observe(&self, observer: Arc<dyn Observer>) {
        let _ = self.inner.observer.set(observer);
    }

    /// Evaluations to come get numbers above this one.
    pub(crate) fn count_evaluations_from(&self, number: u64) {
        self.inner.board.lock().evaluations.count_from(number);
    }

    /// These evaluations were in the background when the image before was lost.
    pub(crate) fn lose_evaluations(&self, numbers: &[u64]) {
        self.inner.board.lock().evaluations.lose(numbers);
    }

    /// The next jobs get numbers from this one on.
    pub(crate) fn number_from(&self, number: u64) {
        self.inner.next_id.fetch_max(number, Ordering::Relaxed);
    }

    /// Calls `answer`, which answers a question about the error state, when nothing that was cancelled is yet to become part
    /// of it; after 200 ms all the same, with the number of the evaluation that has not ended.
    pub(crate) fn when_settled(&self, answer: impl FnOnce(Option<u64>) + Send + 'static) {
        let mut board = self.inner.board.lock();
        let own = board.foreground().filter(|running| running.connection.id == self.connection.id);
        match own.filter(|running| running.interrupted() == Some(Interrupt::Cancel)) {
            Some(running) => {
                let until = Instant::now() + SETTLING;
                running.questions.push(Question { until, answer: Box::new(answer) });
                self.inner.clock.arm(until);
            }
            None => {
                drop(board);
                answer(None);
            }
        }
    }

    /// Ends all that waits or runs, as cancelled. What runs is interrupted, and answers for itself. Returns what is to be
    /// said of it.
    pub(crate) fn end_all(&self) -> Vec<String> {
        let mut board = self.inner.board.lock();
        let said = said_of(&board);
        let answers = self.inner.end_waiting(&mut board);
        let running: Vec<_> = board.running.iter().filter(|running| running.evaluates()).map(|r| r.id).collect();
        for job in running {
            self.inner.interrupt(&mut board, job, Interrupt::Cancel);
        }
        board.finishing.iter_mut().for_each(Finishing::cancel);
        self.inner.leave_board(board);
        self.inner.deliver(answers);
        said
    }

    /// Ends all that waits, runs or is held, in an image that ends, and waits until that is unwound; not longer than until
    /// `deadline`.
    pub(crate) fn unwind_all(&self, deadline: Instant) {
        self.end_all();
        let mut board = self.inner.board.lock();
        self.inner.release_all(&mut board);
        // Whoever unwinds wants the lock.
        board.settle(Instant::now());
        let changed = board.take_changed();
        self.inner.notify(changed);
        while board.is_busy() && !self.inner.ended.wait_until(&mut board, deadline).timed_out() {}
    }

    /// Waits until what was [abandoned](Self::abandon) is unwound; not longer than until `deadline`.
    pub(crate) fn await_unwound(&self, deadline: Instant) {
        let mut board = self.inner.board.lock();
        while (!board.unwinding.is_empty() || board.is_busy())
            && !self.inner.ended.wait_until(&mut board, deadline).timed_out()
        {}
    }

    /// True while something that was [abandoned](Self::abandon) is being unwound.
    pub(crate) fn is_unwinding(&self) -> bool {
        let board = self.inner.board.lock();
        !board.unwinding.is_empty() || board.is_busy()
    }

    /// Answers all that waits, runs or is held as cancelled, in an image that is to be replaced. What runs or is held is
    /// unwound from here on.
    pub(crate) fn abandon(&self) {
        let mut board = self.inner.board.lock();
        let notices = said_of(&board);
        let mut answers = Vec::new();
        for mut running in std::mem::take(&mut board.running) {
            running.give_up_search();
            if running.evaluates() {
                board.unwinding.push(running.id);
                // What unwinds already would have its cleanup forms interrupted.
                if running.interrupted().is_none()
                    && !running.interruption.is_under_way()
                    && !running.activity.unwinds_held()
                {
                    self.inner.send_interruption(&mut board, running.id, Interrupt::Cancel);
                }
            }
            let settled = running.take_questions();
            answers.push(self.inner.finish(&mut board, running, JobEnd::Withdrawn));
            answers.extend(settled);
        }
        answers.extend(self.inner.end_waiting(&mut board));
        for mut finishing in std::mem::take(&mut board.finishing) {
            finishing.cancel();
            answers.push(finishing.abandon());
        }
        for notice in notices {
            self.add_notice(notice);
        }
        self.inner.release_all(&mut board);
        self.inner.leave_board(board);
        self.inner.deliver(answers);
    }

    /// Takes the errors over.
    pub(crate) fn set_errors(&self, errors: Errors) {
        self.inner.errors.fetch_max(errors.count, Ordering::Relaxed);
        self.connection.state().restore(errors);
    }

    /// Takes an error for the last one, as if an evaluation had failed with it.
    pub(crate) fn fail(&self, outcome: &mut Outcome) {
        let mut state = self.connection.state();
        if let Err(error) = &mut outcome.result {
            *error = Arc::new(ErrorRecord::clone(error));
            state.record(error, &self.inner.errors);
        }
        state.last_error = outcome.result.as_ref().err().cloned();
        self.inner.tell_observer(&self.connection, &state, outcome);
    }

    /// Forgets what forms that were evaluated again have printed beside themselves, or had to say.
    pub(crate) fn forget_said(&self) {
        let mut state = self.connection.state();
        state.background = None;
        drop(state.take_notices());
    }

    /// What the next answer has to say, which it will not say now.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        self.connection.state().take_notices()
    }

    /// Has the next answer not say this after all.
    pub(crate) fn withdraw_notice(&self, notice: String) {
        self.connection.state().withdraw(notice);
    }

    /// Says what others, or the image, did: at once where this connection listens, else with its next answer.
    pub(crate) fn tell(&self, notice: String) {
        self.connection.tell(notice);
    }

    /// Adds to what the next answer has to say.
    pub(crate) fn add_notice(&self, notice: String) {
        self.connection.state().notice(notice);
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
        let question = self.inner.next_job_id();
        let mut board = self.inner.board.lock();
        if board.ask(self.connection.id, question)
            && let Some(observer) = self.inner.observer.get()
        {
            observer.asks(true);
        }
        Asking { session: self.clone(), question }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let inner = &self.session.inner;
        let mut board = inner.board.lock();
        if board.asks(self.question) {
            inner.end_question(&mut board, &self.session.connection);
        }
        inner.leave_board(board);
    }
}

/// The outcome of an evaluation that an image did not come back from.
pub(crate) fn failed(kind: &str, message: String) -> Outcome {
    OutcomeBuilder::blank(0).failed(kind, message)
}
