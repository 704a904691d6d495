//! Ends jobs: records their outcomes and answers their clients.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::activity::{Activity, EvaluationActivity, HeldActivity, HeldRequest, HoldEffect, Inspection};
use super::connection::Connection;
use super::error_state::ErrorState;
use super::evaluations::EndedEvaluation;
use super::events::{JobEnd, OutcomeBuilder, Printed};
use super::hold::Resumed;
use super::scheduler::{Request, RunningJob, SchedulerState};
use super::{AnswerFn, Inner, Reply, bind_reply};
use crate::error::{HoldEnd, HoldError, InspectError};
use crate::image::{InterruptReason, Lane};
use crate::os::panics;
use crate::outcome::{ErrorRecord, Outcome, TestCounts};
use crate::tool_names;

/// The number of requests that are cancelled before other threads may use the scheduler state.
pub(super) const WITHDRAWN_AT_ONCE: usize = 100;

/// Returns the error for local variables that could not be printed. `end` is the way in which the request's job ended.
fn locals_error(end: JobEnd) -> HoldError {
    let reason = match end {
        JobEnd::Withdrawn
        | JobEnd::Interrupted(InterruptReason::Cancel)
        | JobEnd::Abandoned(InterruptReason::Cancel, _) => return HoldError::Cancelled,
        JobEnd::Interrupted(InterruptReason::Timeout) | JobEnd::Abandoned(InterruptReason::Timeout, _) => {
            "The local variables could not be printed in time: one of the session's print methods might not terminate, or \
             a value might take long to print. Redefine that method, or do without the local variables."
        }
        JobEnd::Interrupted(InterruptReason::Heap) | JobEnd::Abandoned(InterruptReason::Heap, _) => {
            "The local variables could not be printed: the heap was nearly used up, so the printing was stopped. Keep \
             fewer objects, or start with a larger heap."
        }
        JobEnd::Succeeded | JobEnd::Failed => {
            "The local variables could not be printed: one of the session's print methods ended the printing, for \
             instance by abort-thread or throw. Redefine that method."
        }
    };
    HoldError::Refused(reason.to_owned())
}

impl Inner {
    /// Reports to the observer which evaluations are in the background now.
    pub(super) fn report_background(&self, scheduler: &SchedulerState) {
        if let Some(observer) = self.observer.get() {
            observer.background_changed(&mut scheduler.background_numbers());
        }
    }

    /// Ends a job and records its outcome. Returns the function that sends the answer. The function must not be called
    /// under the scheduler's lock.
    #[must_use]
    pub(super) fn finish(&self, scheduler: &mut SchedulerState, mut running: RunningJob, end: JobEnd) -> AnswerFn {
        let is_background = running.is_background();
        if let Some(hold_end) = running.activity.hold_end(end) {
            let question = running.activity.hold_mut().and_then(|hold| hold.question.take());
            self.end_question(scheduler, question, hold_end);
            // `prepare_release` has recorded the end of a hold that the session releases.
            if let (HoldEnd::Resumed | HoldEnd::Aborted, Some(hold)) = (hold_end, running.activity.hold_mut()) {
                running.connection.set_last_hold(hold.builder.evaluation(), hold_end);
            }
        }
        let time = self.limits.lock().hold;
        if let Some(hold) = running.take_hold(Instant::now().checked_add(time)) {
            scheduler.holds.push(hold);
            if running.connection.has_ended() {
                let release = self.prepare_release(scheduler, &running.connection, HoldEnd::Released);
                scheduler.push(Lane::Evaluation, release);
            }
        }
        if is_background {
            self.report_background(scheduler);
        }
        if let Some(observer) = self.observer.get() {
            if !is_background {
                observer.job_ended(running.id);
            }
            if running.lane == Lane::Inspection && running.begun.is_some() {
                observer.inspection_ended(scheduler.observed_inspections().map(|(newest, deadline)| {
                    let now = Instant::now();
                    (newest, deadline.map_or(Duration::ZERO, |deadline| deadline.saturating_duration_since(now)))
                }));
            }
        }
        let interrupted = running.interrupt_reason();
        // The connection is moved, not cloned: cloning would write the reference count, whose cache line all threads
        // share.
        let connection = running.connection;
        match running.activity {
            Activity::Evaluate(evaluate) => {
                // A cancellation that comes after Lisp is done prevents the post-processing.
                let is_cancelled = evaluate.post_processing.is_some() && interrupted == Some(InterruptReason::Cancel);
                let end = if is_cancelled { JobEnd::Interrupted(InterruptReason::Cancel) } else { end };
                let answer = self.finish_evaluation(scheduler, &connection, evaluate, (running.id, is_background, end));
                self.after_queued_reports(answer)
            }
            Activity::Held(about) => self.after_queued_reports(self.finish_held(scheduler, &connection, *about, end)),
            Activity::Inspect(inspection) => self.finish_inspection(scheduler, &connection, inspection, end),
        }
    }

    fn finish_evaluation(
        &self,
        scheduler: &mut SchedulerState,
        connection: &Connection,
        evaluate: EvaluationActivity,
        (job, is_background, end): (u64, bool, JobEnd),
    ) -> AnswerFn {
        let EvaluationActivity { mut builder, reply, post_processing, held, .. } = evaluate;
        let earlier = EarlierErrors::take(&mut builder);
        let mut outcome = builder.finish(end);
        outcome.held = held;
        let over =
            matches!(end, JobEnd::Withdrawn | JobEnd::Abandoned(..) | JobEnd::Interrupted(InterruptReason::Cancel))
                || held;
        if let Some(post_processing) = post_processing.filter(|_| !over) {
            return post_processing.begin(scheduler, (job, is_background, end), earlier, outcome, reply);
        }
        match end {
            // A withdrawn evaluation never began, or its image will be replaced: nothing is recorded.
            JobEnd::Withdrawn => {}
            _ if is_background => self.record_background_evaluation(scheduler, connection, earlier, end, &mut outcome),
            _ => self.record_evaluation(connection, earlier, &mut outcome),
        }
        end_evaluation(scheduler, outcome, reply)
    }

    fn finish_held(
        &self,
        scheduler: &mut SchedulerState,
        connection: &Connection,
        about: HeldActivity,
        end: JobEnd,
    ) -> AnswerFn {
        let is_aborted = about.is_aborted();
        let HeldActivity { request, unwinding, refused, effect, .. } = about;
        if let Some(builder) = unwinding {
            self.record_unwinding(connection, *builder);
        }
        let refused = refused.map(HoldError::Refused);
        match request {
            HeldRequest::Resume(mut builder, reply) => {
                let is_held = scheduler.is_held(builder.evaluation());
                let waiters = if refused.is_some() || is_aborted || effect == HoldEffect::Unchanged {
                    scheduler.evaluations.mark_stopped(builder.evaluation(), is_held)
                } else {
                    Vec::new()
                };
                let resumed = match refused {
                    Some(error) => bind_reply(reply, Err(error)),
                    None if is_aborted => bind_reply(reply, Ok(Resumed::Aborted)),
                    // The evaluation is held as before: the code for the restart's arguments or for the values to
                    // return failed, or the restart's function returned normally.
                    None if effect == HoldEffect::Unchanged => {
                        builder.clear_evaluation();
                        let mut outcome = builder.finish(end);
                        outcome.held = is_held;
                        self.record_evaluation_in_hold(connection, &mut outcome);
                        bind_reply(reply, Ok(Resumed::Outcome(Arc::new(outcome))))
                    }
                    None => {
                        let earlier = EarlierErrors::take(&mut builder);
                        let mut outcome = builder.finish(end);
                        outcome.held = effect == HoldEffect::HeldAgain;
                        if end != JobEnd::Withdrawn {
                            self.record_evaluation(connection, earlier, &mut outcome);
                        }
                        end_evaluation(scheduler, outcome, Box::new(|outcome| reply(Ok(Resumed::Outcome(outcome)))))
                    }
                };
                Box::new(move || panics::call_all(std::iter::once(resumed).chain(waiters)))
            }
            HeldRequest::Evaluate(builder, reply) => {
                if let Some(error) = refused {
                    return end_refused(scheduler, *builder, error, reply);
                }
                let mut outcome = builder.finish(end);
                self.record_evaluation_in_hold(connection, &mut outcome);
                end_evaluation(scheduler, outcome, Box::new(|outcome| reply(Ok(outcome))))
            }
            HeldRequest::Locals(builder, reply) => bind_reply(
                reply,
                match (refused, end) {
                    (Some(error), _) => Err(error),
                    (None, JobEnd::Succeeded) => Ok(builder.locals()),
                    (None, end) => Err(locals_error(end)),
                },
            ),
            HeldRequest::Release(Some(reply)) => bind_reply(
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
        scheduler: &mut SchedulerState,
        connection: &Connection,
        inspection: Inspection,
        end: JobEnd,
    ) -> AnswerFn {
        match inspection {
            Inspection::Definitions(builder, reply) => bind_reply(reply, builder.definitions(end)),
            Inspection::Symbol(builder, reply) => bind_reply(reply, builder.symbol_description(end)),
            Inspection::Query(builder, reply) => bind_reply(reply, builder.finish(end)),
            Inspection::Reset(builder, reply) => {
                let result: Result<(), InspectError> = builder.reset_result(end);
                let mut ended = Vec::new();
                if result.is_ok() {
                    for mut finishing in std::mem::take(&mut scheduler.finishing) {
                        finishing.cancel(&self.clock);
                        ended.push(finishing.end_as_cancelled(scheduler));
                    }
                    scheduler.evaluations.reset();
                    self.notify_others(connection, "reset the session: all definitions are gone.");
                    connection.state().reset();
                }
                ended.push(bind_reply(reply, result));
                Box::new(move || panics::call_all(ended))
            }
        }
    }

    /// Cancels a request that has not begun. Returns the function that sends its answer.
    #[must_use]
    pub(super) fn withdraw(&self, scheduler: &mut SchedulerState, lane: Lane, request: Request) -> AnswerFn {
        match RunningJob::unstarted(request, lane) {
            Some(running) => self.finish(scheduler, running, JobEnd::Withdrawn),
            None => Box::new(|| ()),
        }
    }

    /// Cancels requests that have not begun. Returns the functions that send their answers. Cancelling many thousands of
    /// requests takes time, so the lock is released in between. Other threads find these requests neither among the requests
    /// that wait nor among the jobs that run.
    #[must_use]
    pub(super) fn withdraw_all(
        &self,
        scheduler: &mut MutexGuard<'_, SchedulerState>,
        requests: Vec<(Lane, Request)>,
    ) -> Vec<AnswerFn> {
        let mut answers = Vec::with_capacity(requests.len());
        for (lane, request) in requests {
            answers.push(self.withdraw(scheduler, lane, request));
            if answers.len().is_multiple_of(WITHDRAWN_AT_ONCE) {
                MutexGuard::bump(scheduler);
            }
        }
        answers
    }

    /// Sends answers. A panic in a recipient's code must not end a Lisp thread, so it is caught and reported in a
    /// notice.
    pub(super) fn deliver(&self, answers: impl IntoIterator<Item = AnswerFn>) {
        for answer in answers {
            if let Err(reason) = panics::catch_as(answer, |text| text.unwrap_or("(no message)").to_owned()) {
                panics::catch(|| tracing::error!(reason, "the receiver of an answer panicked"));
                self.own_connection
                    .state()
                    .add_notice(format!("The function that received one of this session's answers panicked: {reason}"));
            }
        }
    }

    /// Returns true while forms that another image evaluated are replayed in this image.
    pub(super) fn is_replaying(&self) -> bool {
        self.observer.get().is_some_and(|observer| observer.is_replaying())
    }

    /// Records the outcome of a foreground evaluation, and its earlier errors, in the error state and the history.
    pub(super) fn record_evaluation(&self, connection: &Connection, earlier: EarlierErrors, outcome: &mut Outcome) {
        if self.is_replaying() {
            // A replay leaves the error state as the lost image had it.
            return;
        }
        let mut state = connection.state();
        self.record_earlier_errors(connection, &mut state, earlier, outcome);
        if let Err(error) = &mut outcome.result {
            state.record(error, self.next_error_number());
        }
        state.update_from(outcome);
        self.report_errors(connection, &state, outcome);
        let background = state.take_pending(outcome);
        drop(state);
        outcome.background = background.map(|printed| printed.take().stdout).unwrap_or_default();
        if let (true, Err(error)) = (outcome.held, &outcome.result) {
            self.notify_of_hold(connection, outcome.evaluation, &error.kind);
        }
    }

    /// Records the outcome of a background evaluation in the history, without changing the last error.
    pub(super) fn record_background_evaluation(
        &self,
        scheduler: &mut SchedulerState,
        connection: &Connection,
        earlier: EarlierErrors,
        end: JobEnd,
        outcome: &mut Outcome,
    ) {
        let delivered = scheduler.evaluations.is_awaited(outcome.evaluation);
        let mut state = connection.state();
        self.record_earlier_errors(connection, &mut state, earlier, outcome);
        if let Err(error) = &mut outcome.result {
            state.record(error, self.next_error_number());
            // A client that cancels an evaluation learns of its end from the answer to the cancellation.
            if !delivered && end != JobEnd::Interrupted(InterruptReason::Cancel) {
                state.add_notice(background_failure_notice(outcome.evaluation, error));
            }
        }
        self.report_errors(connection, &state, outcome);
    }

    /// Withdraws the notice that a background evaluation failed, when its client gets the outcome.
    pub(super) fn withdraw_failure_notice(connection: &Connection, outcome: &Outcome) {
        if let Err(error) = &outcome.result {
            connection.state().withdraw_notice(background_failure_notice(outcome.evaluation, error));
        }
    }

    /// Adds to the history the errors of an evaluation other than its final error.
    fn record_earlier_errors(
        &self,
        connection: &Connection,
        state: &mut ErrorState,
        earlier: EarlierErrors,
        outcome: &mut Outcome,
    ) {
        let EarlierErrors { signalled, superseded } = earlier;
        if let Some(errors) = signalled {
            self.record_signalled_errors(connection, state, errors);
        }
        for (error, is_interrupted) in superseded {
            let why = if is_interrupted {
                "The evaluation was interrupted while this error was being described"
            } else {
                "A cleanup form failed, exited non-locally or was interrupted while the evaluation was unwinding"
            };
            self.record_superseded_errors(connection, state, [error], why);
        }
        for error in &mut outcome.errors {
            self.record_error(connection, state, error);
        }
    }

    /// Adds an error to the history, and reports it to the observer.
    fn record_error(&self, connection: &Connection, state: &mut ErrorState, error: &mut Arc<ErrorRecord>) {
        state.record(error, self.next_error_number());
        if let Some(observer) = self.observer.get().filter(|_| !connection.has_ended()) {
            observer.errors_changed(connection.id, Some(error), state.last_error.as_ref());
        }
    }

    /// Adds to the history the errors that the code handled, and lists these errors in the next answer.
    fn record_signalled_errors(&self, connection: &Connection, state: &mut ErrorState, errors: Vec<Arc<ErrorRecord>>) {
        state.add_notice(match errors.len() {
            0 => "The code handled no errors.".to_owned(),
            _ => {
                let tools: Vec<_> =
                    ["get-backtrace", "describe-last-error"].into_iter().filter(|t| tool_names::is_listed(t)).collect();
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
            self.record_error(connection, state, &mut error);
            state.add_notice(crate::report::signalled_error(&error));
        }
    }

    /// Adds to the history errors that are not the result of an evaluation. Adds to the next answer a notice about each
    /// error, with the explanation `why`.
    fn record_superseded_errors(
        &self,
        connection: &Connection,
        state: &mut ErrorState,
        errors: impl IntoIterator<Item = Arc<ErrorRecord>>,
        why: &str,
    ) {
        for mut error in errors {
            self.record_error(connection, state, &mut error);
            state.add_notice(format!("E{} reached the debugger earlier: {}. {why}.", error.id, error.kind));
        }
    }

    /// Records the notices, the output and the errors of a released evaluation's cleanup forms.
    fn record_unwinding(&self, connection: &Connection, mut builder: OutcomeBuilder) {
        let notices = builder.take_notices();
        let (errors, printed) = builder.into_errors_and_output();
        let limit = self.limits.lock().max_output;
        let mut state = connection.state();
        for notice in notices {
            state.add_notice(notice);
        }
        if !printed.is_empty() {
            state.pending_output(limit).push_clipped(&printed);
        }
        self.record_superseded_errors(
            connection,
            &mut state,
            errors,
            "This error was signalled while the held evaluation was \
            unwinding",
        );
    }

    /// Records the outcome of code that was evaluated for a held evaluation, for instance in one of its frames. The last
    /// error stays the same.
    fn record_evaluation_in_hold(&self, connection: &Connection, outcome: &mut Outcome) {
        let mut state = connection.state();
        if let Err(error) = &mut outcome.result {
            state.record(error, self.next_error_number());
        }
        self.report_errors(connection, &state, outcome);
        let background = state.take_pending(outcome);
        drop(state);
        outcome.background = background.map(|printed| printed.take().stdout).unwrap_or_default();
    }

    /// Makes the observer send its queued reports. Must not be called under the scheduler's lock.
    pub(super) fn send_queued_reports(&self) {
        if let Some(observer) = self.observer.get() {
            observer.send_queued_reports();
        }
    }

    /// Returns a function that makes the observer send its queued reports, and then calls `answer`.
    pub(super) fn after_queued_reports(&self, answer: AnswerFn) -> AnswerFn {
        match self.observer.get().cloned() {
            None => answer,
            Some(observer) => Box::new(move || {
                observer.send_queued_reports();
                answer();
            }),
        }
    }

    /// Reports an outcome's error and the error state to the observer, for the next image.
    pub(super) fn report_errors(&self, connection: &Connection, state: &ErrorState, outcome: &Outcome) {
        if let Some(observer) = self.observer.get().filter(|_| !connection.has_ended()) {
            observer.errors_changed(connection.id, outcome.result.as_ref().err(), state.last_error.as_ref());
        }
    }
}

/// The errors of an evaluation before its final error.
pub(super) struct EarlierErrors {
    /// The errors that the code handled, if they are recorded.
    signalled: Option<Vec<Arc<ErrorRecord>>>,
    /// The errors that reached the debugger, each with a flag: true if the evaluation was interrupted while the error
    /// was being described.
    superseded: Vec<(Arc<ErrorRecord>, bool)>,
}

impl EarlierErrors {
    pub(super) fn take(builder: &mut OutcomeBuilder) -> Self {
        Self { signalled: builder.take_signalled(), superseded: builder.take_superseded() }
    }
}

/// Ends an evaluation with this outcome, and keeps the outcome if there is room. Returns the function that sends the
/// outcome to the caller and to the clients that wait for it.
pub(super) fn end_evaluation(scheduler: &mut SchedulerState, outcome: Outcome, reply: Reply<Arc<Outcome>>) -> AnswerFn {
    let EndedEvaluation { outcome, waiters, forgotten } = scheduler.evaluations.end(outcome);
    Box::new(move || {
        panics::call_all(std::iter::once(bind_reply(reply, outcome)).chain(waiters));
        drop(forgotten);
    })
}

/// Ends an evaluation in a frame that was refused with this error. Returns the function that sends the error to the caller,
/// and an outcome with the error's message to the clients that wait for the evaluation.
pub(super) fn end_refused(
    scheduler: &mut SchedulerState,
    builder: OutcomeBuilder,
    error: HoldError,
    reply: Reply<Result<Arc<Outcome>, HoldError>>,
) -> AnswerFn {
    let outcome = builder.finish_with_error("SIMPLE-ERROR", error.to_string());
    end_evaluation(scheduler, outcome, Box::new(|_| reply(Err(error))))
}

impl ErrorState {
    /// Sets the last error from the outcome of an evaluation.
    fn update_from(&mut self, outcome: &Outcome) {
        self.last_error = match &outcome.result {
            Err(error) => Some(error.clone()),
            // After a test run with failures, the last error is the first error that ended a test. If no error did, the
            // last error stays.
            Ok(_) if TestCounts::of(outcome).is_some_and(|counts| counts.failed > 0 || counts.errors > 0) => {
                outcome.errors.first().cloned().or_else(|| self.last_error.take())
            }
            Ok(_) => None,
        };
    }

    /// Moves the notices that waited for the next answer into this outcome. Returns the output that waited. The caller adds
    /// its text to the outcome when this state is unlocked, because the caller may have to wait for a thread that prints.
    #[must_use]
    pub(super) fn take_pending(&mut self, outcome: &mut Outcome) -> Option<Arc<Printed>> {
        outcome.notices.extend(self.take_notices());
        self.pending_output.take()
    }
}

/// Returns the notice that a background evaluation failed.
fn background_failure_notice(evaluation: u64, error: &ErrorRecord) -> String {
    format!("Background evaluation {evaluation} failed with {} (E{}).", error.kind, error.id)
}
