//! What becomes of a job that is over: it is recorded, and answered.

use std::sync::Arc;
use std::time::Instant;

use super::activity::{AboutHeld, Activity, Evaluate, HeldRequest, Inspection, Then};
use super::connection::Connection;
use super::error_state::ErrorState;
use super::evaluations::Ended;
use super::events::{ClippedBuffer, JobEnd, OutcomeBuilder};
use super::hold::Resumed;
use super::scheduler::{Board, Request, Running};
use super::{Answer, Inner, Reply, answer};
use crate::error::{HoldError, InspectError};
use crate::image::{Interrupt, Lane};
use crate::os::panics;
use crate::outcome::{Clipped, ErrorRecord, Outcome, TestCounts};
use crate::tool_names;

/// What is said when local variables cannot be shown in time.
const LOCALS_UNPRINTED: &str =
    "Printing the local variables did not end within the time limit: a print method of the session's may not end.";

impl Inner {
    /// Reports which evaluations are in the background now.
    pub(super) fn report_background(&self, board: &Board) {
        if let Some(observer) = self.observer.get() {
            observer.in_background(&mut board.background_numbers());
        }
    }

    /// Turns what ran into an answer, which is given when what this returns is called: not under the board's lock.
    #[must_use]
    pub(super) fn finish(&self, board: &mut Board, mut running: Running, end: JobEnd) -> Answer {
        let is_background = running.is_background();
        if end != JobEnd::Withdrawn && running.activity.moves_held() && running.end_question() {
            self.asks_no_more();
        }
        let time = self.limits.lock().hold;
        if let Some(hold) = running.take_hold(Instant::now().checked_add(time)) {
            board.holds.push(hold);
            if running.connection.has_ended() {
                let release = self.release(board, &running.connection, super::hold::RELEASED);
                board.push(Lane::Evaluation, release);
            }
        }
        if is_background {
            self.report_background(board);
        }
        if let Some(observer) = self.observer.get() {
            if !is_background {
                observer.ended(running.id);
            }
            if running.lane == Lane::Inspection && end != JobEnd::Withdrawn {
                observer.inspects(None);
            }
        }
        let interrupted = running.interrupted();
        // Not cloned: both threads would write its count.
        let connection = running.connection;
        match running.activity {
            Activity::Evaluate(evaluate) => {
                // The interruption may have come when Lisp was done: what is to be done after that is not.
                let is_cancelled = evaluate.due.is_some() && interrupted == Some(Interrupt::Cancel);
                let end = if is_cancelled { JobEnd::Interrupted(Interrupt::Cancel) } else { end };
                self.finish_evaluation(board, &connection, evaluate, (running.id, is_background, end))
            }
            Activity::Held(about) => self.finish_held(board, &connection, *about, end),
            Activity::Inspect(inspection) => self.finish_inspection(board, &connection, inspection, end),
        }
    }

    fn finish_evaluation(
        &self,
        board: &mut Board,
        connection: &Connection,
        evaluate: Evaluate,
        (job, is_background, end): (u64, bool, JobEnd),
    ) -> Answer {
        let Evaluate { mut builder, reply, due, held, .. } = evaluate;
        let before = Earlier::take(&mut builder);
        let mut outcome = builder.finish(end);
        outcome.held = held;
        let over =
            matches!(end, JobEnd::Withdrawn | JobEnd::Abandoned(_) | JobEnd::Interrupted(Interrupt::Cancel)) || held;
        if let Some(due) = due.filter(|_| !over) {
            return due.begin(board, (job, is_background, end), before, outcome, reply);
        }
        match end {
            // It did nothing.
            JobEnd::Withdrawn => {}
            _ if is_background => self.evaluated_in_background(board, connection, before, end, &mut outcome),
            _ => self.evaluated(connection, before, &mut outcome),
        }
        keep(board, outcome, reply)
    }

    fn finish_held(&self, board: &mut Board, connection: &Connection, about: AboutHeld, end: JobEnd) -> Answer {
        let is_aborted = about.is_aborted();
        let AboutHeld { request, unwinding, refused, then, .. } = about;
        if let Some(builder) = unwinding {
            self.unwound(connection, *builder);
        }
        let refused = refused.map(HoldError::Refused);
        match request {
            HeldRequest::Resume(mut builder, reply) => {
                if refused.is_some() || is_aborted || then == Then::Unchanged {
                    board.evaluations.rest(builder.evaluation());
                }
                match refused {
                    Some(error) => answer(reply, Err(error)),
                    None if is_aborted => answer(reply, Ok(Resumed::Aborted)),
                    // The restart's arguments or the code to return failed, or the restart returned.
                    None if then == Then::Unchanged => {
                        builder.detach();
                        let mut outcome = builder.finish(end);
                        self.evaluated_inside(connection, &mut outcome);
                        answer(reply, Ok(Resumed::Outcome(Arc::new(outcome))))
                    }
                    None => {
                        let before = Earlier::take(&mut builder);
                        let mut outcome = builder.finish(end);
                        outcome.held = then == Then::HeldAgain;
                        if end != JobEnd::Withdrawn {
                            self.evaluated(connection, before, &mut outcome);
                        }
                        keep(board, outcome, Box::new(|outcome| reply(Ok(Resumed::Outcome(outcome)))))
                    }
                }
            }
            HeldRequest::Evaluate(builder, reply) => {
                if let Some(error) = refused {
                    board.evaluations.remove(builder.evaluation());
                    return answer(reply, Err(error));
                }
                let mut outcome = builder.finish(end);
                self.evaluated_inside(connection, &mut outcome);
                keep(board, outcome, Box::new(|outcome| reply(Ok(outcome))))
            }
            HeldRequest::Locals(builder, reply) => answer(
                reply,
                match (refused, end) {
                    (Some(error), _) => Err(error),
                    (None, JobEnd::Succeeded) => Ok(builder.locals()),
                    (None, JobEnd::Withdrawn) => Err(HoldError::Cancelled),
                    (None, _) => Err(HoldError::Refused(LOCALS_UNPRINTED.to_owned())),
                },
            ),
            HeldRequest::Release(Some(reply)) => answer(
                reply,
                match (refused, end) {
                    (Some(error), _) => Err(error),
                    (None, JobEnd::Withdrawn) => Err(HoldError::Cancelled),
                    (None, _) => Ok(()),
                },
            ),
            HeldRequest::Release(None) => Box::new(|| ()),
        }
    }

    fn finish_inspection(
        &self,
        board: &mut Board,
        connection: &Connection,
        inspection: Inspection,
        end: JobEnd,
    ) -> Answer {
        match inspection {
            Inspection::Definitions(builder, reply) => answer(reply, builder.definitions(end)),
            Inspection::Symbol(builder, reply) => answer(reply, builder.symbol(end)),
            Inspection::Query(builder, reply) => answer(reply, builder.finish(end)),
            Inspection::Reset(builder, reply) => {
                let result: Result<(), InspectError> = builder.reset(end);
                let mut ended = Vec::new();
                if result.is_ok() {
                    for mut finishing in std::mem::take(&mut board.finishing) {
                        finishing.cancel();
                        board.evaluations.remove(finishing.evaluation);
                        ended.push(finishing.abandon());
                    }
                    board.evaluations.reset();
                    self.tell_others(connection, "reset the session: all definitions are gone.");
                    connection.state().reset();
                }
                ended.push(answer(reply, result));
                Box::new(move || panics::call_all(ended))
            }
        }
    }

    /// Ends what has not begun, as cancelled.
    #[must_use]
    pub(super) fn withdraw(&self, board: &mut Board, lane: Lane, request: Request) -> Answer {
        match Running::unbegun(request, lane) {
            Some(running) => self.finish(board, running, JobEnd::Withdrawn),
            None => Box::new(|| ()),
        }
    }

    /// Gives answers. What panics there concerns whoever was to take it, and must not end a thread of Lisp's.
    pub(super) fn deliver(&self, answers: impl IntoIterator<Item = Answer>) {
        for answer in answers {
            if let Err(reason) = panics::caught_as(answer, |text| text.unwrap_or_default().to_owned()) {
                panics::caught(|| tracing::error!(reason, "whoever was given an answer panicked"));
                self.main.state().notice(format!("Whoever was given an answer of this session's panicked: {reason}"));
            }
        }
    }

    /// True while another image's forms are evaluated again.
    pub(super) fn restores(&self) -> bool {
        self.observer.get().is_some_and(|observer| observer.restores())
    }

    /// Sets the error state by the outcome of an evaluation, in which these errors came before.
    pub(super) fn evaluated(&self, connection: &Connection, before: Earlier, outcome: &mut Outcome) {
        if self.restores() {
            // The state is that of the image before.
            return;
        }
        let mut state = connection.state();
        self.record_earlier(connection, &mut state, before, outcome);
        if let Err(error) = &mut outcome.result {
            state.record(error, &self.errors);
        }
        state.set_by(outcome);
        self.tell_observer(connection, &state, outcome);
        state.tell(outcome);
        drop(state);
        if let (true, Err(error)) = (outcome.held, &outcome.result) {
            self.tell_of_hold(connection, outcome.evaluation, &error.kind);
        }
    }

    /// Records the outcome of an evaluation in the background. The last error stays as it is.
    pub(super) fn evaluated_in_background(
        &self,
        board: &mut Board,
        connection: &Connection,
        before: Earlier,
        end: JobEnd,
        outcome: &mut Outcome,
    ) {
        let delivered = board.evaluations.is_awaited(outcome.evaluation);
        let mut state = connection.state();
        self.record_earlier(connection, &mut state, before, outcome);
        if let Err(error) = &mut outcome.result {
            state.record(error, &self.errors);
            // Who cancels it is told by the answer to that.
            if !delivered && end != JobEnd::Interrupted(Interrupt::Cancel) {
                state.notice(failed_in_background(outcome.evaluation, error));
            }
        }
        self.tell_observer(connection, &state, outcome);
    }

    /// Withdraws the notice that an evaluation failed in the background, when its client gets the outcome.
    pub(super) fn withdraw_failure_notice(connection: &Connection, outcome: &Outcome) {
        if let Err(error) = &outcome.result {
            connection.state().withdraw(failed_in_background(outcome.evaluation, error));
        }
    }

    /// Puts the errors into the history that came before the one that an evaluation ended with.
    fn record_earlier(&self, connection: &Connection, state: &mut ErrorState, before: Earlier, outcome: &mut Outcome) {
        let Earlier { signalled, superseded } = before;
        if let Some(errors) = signalled {
            self.record_signalled(connection, state, errors);
        }
        for (error, is_interrupted) in superseded {
            let why = if is_interrupted {
                "The evaluation was interrupted while this error was being described"
            } else {
                "A cleanup form failed in turn, left, or was interrupted, while it was unwound"
            };
            self.record_superseded(connection, state, [error], why);
        }
        for error in &mut outcome.errors {
            self.record(connection, state, error);
        }
    }

    /// Puts an error into the history.
    fn record(&self, connection: &Connection, state: &mut ErrorState, error: &mut Arc<ErrorRecord>) {
        state.record(error, &self.errors);
        if let Some(observer) = self.observer.get() {
            observer.errors(connection.id, Some(error), state.last_error.as_ref());
        }
    }

    /// Puts errors into the history that the code handled, and has the next answer list them.
    fn record_signalled(&self, connection: &Connection, state: &mut ErrorState, errors: Vec<Arc<ErrorRecord>>) {
        state.notice(match errors.len() {
            0 => "No error was signalled that the code handled.".to_owned(),
            _ => {
                let tools: Vec<_> =
                    ["get-backtrace", "describe-last-error"].into_iter().filter(|t| tool_names::has(t)).collect();
                let take = if tools.len() == 1 { "takes" } else { "take" };
                let takers = if tools.is_empty() {
                    String::new()
                } else {
                    format!(" ({} {take} their error-id)", tools.join(" and "))
                };
                format!("Errors that the code handled{takers}:")
            }
        });
        for mut error in errors {
            self.record(connection, state, &mut error);
            state.notice(crate::report::signalled_error(&error));
        }
    }

    /// Puts errors into the history that no answer is about, and has the next one say so, and why there were more.
    fn record_superseded(
        &self,
        connection: &Connection,
        state: &mut ErrorState,
        errors: impl IntoIterator<Item = Arc<ErrorRecord>>,
        why: &str,
    ) {
        for mut error in errors {
            self.record(connection, state, &mut error);
            state.notice(format!("E{} reached the debugger before: {}. {why}.", error.id, error.kind));
        }
    }

    /// Takes note of what the cleanup forms of a held evaluation did that was released.
    fn unwound(&self, connection: &Connection, builder: OutcomeBuilder) {
        let (errors, printed) = builder.unwound();
        let limit = self.limits.lock().max_output;
        let mut state = connection.state();
        if !printed.is_empty() {
            state.background.get_or_insert_with(|| ClippedBuffer::new(limit)).push_clipped(&printed);
        }
        self.record_superseded(connection, &mut state, errors, "It was signalled while what was held was unwound");
    }

    /// Takes note of the outcome of an evaluation inside a held one, which leaves the error state alone.
    fn evaluated_inside(&self, connection: &Connection, outcome: &mut Outcome) {
        let mut state = connection.state();
        if let Err(error) = &mut outcome.result {
            state.record(error, &self.errors);
        }
        self.tell_observer(connection, &state, outcome);
        state.tell(outcome);
    }

    /// Has another image know of this one's error, should it come to that.
    pub(super) fn tell_observer(&self, connection: &Connection, state: &ErrorState, outcome: &Outcome) {
        if let Some(observer) = self.observer.get() {
            observer.errors(connection.id, outcome.result.as_ref().err(), state.last_error.as_ref());
        }
    }
}

/// The errors of an evaluation that came before the one that it ended with.
pub(super) struct Earlier {
    /// Those that the code handled, if they are recorded.
    signalled: Option<Vec<Arc<ErrorRecord>>>,
    /// The errors that reached the debugger, each with whether the evaluation was interrupted while the error was being described.
    superseded: Vec<(Arc<ErrorRecord>, bool)>,
}

impl Earlier {
    pub(super) fn take(builder: &mut OutcomeBuilder) -> Self {
        Self { signalled: builder.take_signalled(), superseded: builder.take_superseded() }
    }
}

/// Keeps an outcome. What this returns gives it to whoever waits for it.
pub(super) fn keep(board: &mut Board, outcome: Outcome, reply: Reply<Arc<Outcome>>) -> Answer {
    let Ended { outcome, waiters, forgotten } = board.evaluations.end(outcome);
    Box::new(move || {
        panics::call_all(std::iter::once(answer(reply, outcome)).chain(waiters));
        drop(forgotten);
    })
}

impl ErrorState {
    /// Becomes what the outcome of an evaluation makes of it.
    fn set_by(&mut self, outcome: &Outcome) {
        self.last_error = match &outcome.result {
            Err(error) => Some(error.clone()),
            // Tests: the state is that of the first one that failed.
            Ok(_) if TestCounts::of(outcome).is_some_and(|counts| counts.failed > 0 || counts.errors > 0) => {
                outcome.errors.first().cloned().or_else(|| self.last_error.take())
            }
            Ok(_) => None,
        };
    }

    /// Adds what waited for the next answer.
    pub(super) fn tell(&mut self, outcome: &mut Outcome) {
        outcome.background = self.background.take().map(Clipped::from).unwrap_or_default();
        outcome.notices.extend(self.take_notices());
    }
}

/// What the next answer says of it.
fn failed_in_background(evaluation: u64, error: &ErrorRecord) -> String {
    format!("Evaluation {evaluation}, in the background, failed with {} (E{}).", error.kind, error.id)
}
