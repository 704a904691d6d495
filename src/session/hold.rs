//! Held evaluations: requests about them, and their release.

use std::sync::Arc;
use std::time::Duration;

use super::activity::{HeldRequest, Inspection, RequestBody};
use super::completion::end_refused;
use super::connection::Connection;
use super::events::{InspectionBuilder, OutcomeBuilder};
use super::scheduler::{OpenQuestion, Request, SchedulerState};
use super::{AnswerFn, INSPECTION_TIMEOUT, Inner, JobId, Reply, Session, TimeLimit, bind_reply};
use crate::config::Limits;
use crate::error::{HoldEnd, HoldError, InspectError};
use crate::image::process::is_forked;
use crate::image::{Job, JobKind, Lane};
use crate::outcome::{ErrorRecord, FrameLocals, Outcome};

/// The notice that the next answer carries after a held evaluation was released.
const RELEASED_NOTICE: &str = "The evaluation held for debugging was ended.";
/// The notice that the next answer carries after a hold has reached its time limit.
const HOLD_TIMED_OUT_NOTICE: &str = "The evaluation held for debugging was ended: the hold timed out.";

/// The restart to invoke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RestartDesignator {
    /// The restart with this number in the error's report, where numbers begin with 1.
    Number(u64),
    /// The restart with this name, without package.
    Name(String),
}

/// The result of invoking a restart in a held evaluation.
#[derive(Debug, Clone, PartialEq)]
pub enum Resumed {
    /// The outcome of the resumed evaluation. If the evaluation could not be resumed and stays held, the outcome of the
    /// failed attempt.
    Outcome(Arc<Outcome>),
    /// The restart was the session's own `ABORT`, which unwinds the evaluation as [`Session::abort_held`] does.
    Aborted,
}

impl Session {
    /// Returns true while a failed evaluation of this connection is held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held_evaluation().is_some()
    }

    /// Transfers an evaluation that another connection holds to this connection. `id` is the evaluation's number,
    /// or `None` for the only held evaluation. The error of the evaluation becomes this connection's last error, and
    /// the other connection is notified. Returns the outcome with which the evaluation is held.
    ///
    /// # Errors
    /// Returns [`HoldError`] when no evaluation is held, none of the held evaluations has the number `id`, several are
    /// held and `id` is `None`, this connection already holds an evaluation or has an evaluation that runs in the
    /// foreground or waits to begin, the evaluation's error was too large to keep, or the user is being asked about the
    /// evaluation.
    pub fn take_over(&self, id: Option<u64>) -> Result<Arc<Outcome>, HoldError> {
        let refused = |reason: String| Err(HoldError::Refused(reason));
        let Self { inner, connection } = self;
        let mut scheduler = inner.scheduler.lock();
        if scheduler.held_by(connection.id).is_some() {
            return refused("This connection already holds an evaluation: resume or abort it first.".to_owned());
        }
        let held: Vec<_> = scheduler.holds.iter().map(|hold| hold.builder.evaluation()).collect();
        let wanted = match (id, &held[..]) {
            (_, []) => return Err(HoldError::NothingHeld { last: None }),
            (None, [one]) => *one,
            (Some(id), all) if all.contains(&id) => id,
            (id, all) => {
                let all = all.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
                return refused(match id {
                    Some(id) => format!("Evaluation {id} is not held. Held evaluations: {all}."),
                    None => format!("Several evaluations are held: name one of them to take over ({all})."),
                });
            }
        };
        if !scheduler.cannot_hold(connection.id) {
            return refused(
                "This connection has another evaluation that runs or waits to begin: wait until it ends, or abort it \
                 first."
                    .to_owned(),
            );
        }
        let Some(outcome) = scheduler.evaluations.outcome(wanted) else {
            return refused(format!("Evaluation {wanted} cannot be taken over: its error was too large to keep."));
        };
        let until = std::time::Instant::now().checked_add(inner.limits.lock().hold);
        let Some(before) = scheduler.transfer_hold(wanted, connection, until) else {
            return refused(format!(
                "Evaluation {wanted} cannot be taken over: a user is being asked how to continue."
            ));
        };
        inner.unlock_and_notify(scheduler);
        // Threads of the evaluation must look up again whose output gets their text.
        if let Some(pending) = &mut before.state().pending_output
            && let Some(moved) = pending.try_moved()
        {
            *pending = Arc::new(moved);
        }
        before.set_last_hold(wanted, HoldEnd::TakenOver);
        let name = connection.describe();
        before.notify(format!("{name} took over evaluation {wanted}, which was held for debugging."));
        let mut state = connection.state();
        if let Err(error) = &outcome.result {
            state.adopt_last_error(error);
            if let Some(observer) = inner.observer.get() {
                observer.errors_changed(connection.id, Some(error), state.last_error.as_ref());
            }
        }
        drop(state);
        inner.send_queued_reports();
        Ok(outcome)
    }

    /// Resumes the held evaluation by a restart. `values` are Lisp expressions for the restart's arguments, or empty.
    /// `reply` runs as in [`submit`](Self::submit), as do the replies of the methods below.
    pub fn invoke_restart(
        &self,
        restart: &RestartDesignator,
        values: &str,
        reply: impl FnOnce(Result<Resumed, HoldError>) + Send + 'static,
    ) -> JobId {
        let (number, name) = match restart {
            RestartDesignator::Number(number) => (*number, ""),
            RestartDesignator::Name(name) => (0, name.as_str()),
        };
        self.resume(JobKind::InvokeRestart(number), values, name, None, Box::new(reply))
    }

    /// Returns the number of the failed evaluation that is held for this connection.
    #[must_use]
    pub fn held_evaluation(&self) -> Option<u64> {
        self.inner.scheduler.lock().held_by(self.connection.id)
    }

    /// Returns the error of the evaluation that is held for this connection, with the frames and values from the time
    /// of the failure. Returns `None` when no evaluation is held, or its error was too large to be kept.
    #[must_use]
    pub fn held_error(&self) -> Option<Arc<ErrorRecord>> {
        let evaluation = self.held_evaluation()?;
        let outcome = self.inner.scheduler.lock().evaluations.outcome(evaluation);
        let held = outcome.and_then(|outcome| outcome.result.as_ref().err().cloned());
        held.or_else(|| self.last_error().filter(|error| error.evaluation == evaluation))
    }

    /// Reads the current values of the local variables in `count` frames of the held evaluation, but at most 50
    /// frames, from frame number `from` on. The reply gets fewer frames if the stack ends earlier. The values are read
    /// at once, even while another connection's evaluation runs.
    pub fn held_locals(
        &self,
        from: u64,
        count: u64,
        reply: impl FnOnce(Result<Vec<FrameLocals>, HoldError>) + Send + 'static,
    ) -> JobId {
        let kind = JobKind::FrameLocals { from, count: u32::try_from(count).unwrap_or(u32::MAX) };
        self.enqueue_held_request(kind, "", "", None, |_, _, limits| {
            let timeout = limits.timeout.unwrap_or(INSPECTION_TIMEOUT).min(INSPECTION_TIMEOUT);
            (Some(timeout), HeldRequest::Locals(InspectionBuilder::default(), Box::new(reply)))
        })
    }

    /// Evaluates code in the scope of a frame of the held evaluation, so that the frame's variables are visible. The
    /// evaluation stays held even if the code fails or exceeds its `timeout`.
    pub fn eval_in_frame(
        &self,
        frame: u64,
        code: &str,
        timeout: TimeLimit,
        reply: impl FnOnce(Result<Arc<Outcome>, HoldError>) + Send + 'static,
    ) -> JobId {
        self.enqueue_held_request(JobKind::EvalInFrame(frame), code, "", None, |scheduler, job, limits| {
            let timeout = timeout.resolve(limits.timeout);
            let code: Arc<str> = code.into();
            job.evaluation = self.number_evaluation(scheduler, job.id, &code);
            let builder = Box::new(OutcomeBuilder::new(job.evaluation, code, limits, timeout));
            (timeout, HeldRequest::Evaluate(builder, Box::new(reply)))
        })
    }

    /// Resumes the held evaluation by returning the values of `code` from one of its frames.
    pub fn return_from_frame(
        &self,
        frame: u64,
        code: &str,
        reply: impl FnOnce(Result<Arc<Outcome>, HoldError>) + Send + 'static,
    ) -> JobId {
        self.resume(JobKind::ReturnFromFrame(frame), code, "", None, wrap_outcome_reply(reply))
    }

    /// Resumes the held evaluation by calling the function of one of its frames again, with the same arguments.
    pub fn restart_frame(
        &self,
        frame: u64,
        reply: impl FnOnce(Result<Arc<Outcome>, HoldError>) + Send + 'static,
    ) -> JobId {
        self.resume(JobKind::RestartFrame(frame), "", "", None, wrap_outcome_reply(reply))
    }

    /// Unwinds the held evaluation and runs its cleanup forms. Changes that the evaluation has made remain.
    pub fn abort_held(&self, reply: impl FnOnce(Result<(), HoldError>) + Send + 'static) -> JobId {
        self.abort(None, Box::new(reply))
    }

    /// Queues a request that aborts the held evaluation. With a `question`, the request is refused unless the question
    /// to the user is still open when the request begins.
    pub(super) fn abort(&self, question: Option<u64>, reply: Reply<Result<(), HoldError>>) -> JobId {
        self.enqueue_held_request(JobKind::Release, "", "", question, |_, _, limits| {
            (Some(limits.cleanup), HeldRequest::Release(Some(reply)))
        })
    }

    /// Queues a request that resumes the held evaluation, on the thread that holds it. `question` has the same effect as
    /// in [`abort`](Self::abort).
    pub(super) fn resume(
        &self,
        kind: JobKind,
        text: &str,
        name: &str,
        question: Option<u64>,
        reply: Reply<Result<Resumed, HoldError>>,
    ) -> JobId {
        self.enqueue_held_request(kind, text, name, question, |_, _, limits| {
            // This builder is a placeholder: when the request begins, a builder made from the held evaluation replaces
            // it.
            let builder = Box::new(OutcomeBuilder::new(0, text.into(), limits, limits.timeout));
            (limits.timeout, HeldRequest::Resume(builder, reply))
        })
    }

    /// Queues a request about the held evaluation, in the order of this connection's requests. `make` returns the request and
    /// its time limit. If this connection holds no evaluation and has no request that could lead to a held evaluation,
    /// refuses the request at once instead of waiting for other connections' evaluations. A request that answers a
    /// `question` to the user is also refused if the question is no longer open when the request's turn comes.
    fn enqueue_held_request(
        &self,
        kind: JobKind,
        text: &str,
        name: &str,
        question: Option<u64>,
        make: impl FnOnce(&mut SchedulerState, &mut Job, Limits) -> (Option<Duration>, HeldRequest),
    ) -> JobId {
        let mut job = self.inner.job(kind, text, name);
        let id = JobId(job.id);
        if is_forked() {
            // A missing thread may hold any lock, and no thread could answer.
            return id;
        }
        let limits = *self.inner.limits.lock();
        let mut scheduler = self.inner.scheduler.lock();
        let (timeout, held) = make(&mut scheduler, &mut job, limits);
        let mut request = Request::new(&self.connection, job, timeout, RequestBody::Held(held));
        request.question = question;
        if let Some(number) = question
            && let Some(hold) = scheduler.hold_of_question(number)
            && let Some(asked) = &mut hold.question
        {
            asked.on_withdrawal = None;
            request.job_of_call = asked.first_job;
        }
        if scheduler.cannot_hold(self.connection.id) {
            let answer = Inner::refuse(&mut scheduler, request);
            self.inner.unlock_and_notify(scheduler);
            self.inner.deliver([answer]);
        } else {
            scheduler.push(Lane::Evaluation, request);
            self.inner.unlock_and_notify(scheduler);
        }
        id
    }
}

/// Wraps a reply that gets an outcome, for a request that resumes the held evaluation and never aborts it.
fn wrap_outcome_reply(
    reply: impl FnOnce(Result<Arc<Outcome>, HoldError>) + Send + 'static,
) -> Reply<Result<Resumed, HoldError>> {
    Box::new(|result| {
        reply(result.and_then(|resumed| match resumed {
            Resumed::Outcome(outcome) => Ok(outcome),
            Resumed::Aborted => Err(HoldError::NothingHeld { last: None }),
        }));
    })
}

impl Inner {
    /// Ends a question to the user, which was taken from its hold, because the hold ends. Requests that waited for the
    /// user's answer may then begin.
    pub(super) fn end_question(
        &self,
        scheduler: &mut SchedulerState,
        question: Option<OpenQuestion>,
        hold_end: HoldEnd,
    ) {
        let Some(question) = question else { return };
        self.end_external_wait();
        scheduler.withdrawals.extend(question.on_withdrawal.map(|withdraw| bind_reply(withdraw, hold_end)));
    }

    pub(super) fn end_external_wait(&self) {
        if let Some(observer) = self.observer.get() {
            observer.external_wait_changed(false);
        }
    }

    /// Creates the request that releases a connection's held evaluation, and adds a notice to the next answer.
    pub(super) fn prepare_release(
        &self,
        scheduler: &mut SchedulerState,
        connection: &Arc<Connection>,
        reason: HoldEnd,
    ) -> Request {
        let question = scheduler.take_question_of(connection.id);
        self.end_question(scheduler, question, reason);
        if let Some(hold) = scheduler.hold_of(connection.id) {
            connection.set_last_hold(hold.builder.evaluation(), reason);
        }
        let notice = if reason == HoldEnd::TimedOut { HOLD_TIMED_OUT_NOTICE } else { RELEASED_NOTICE };
        connection.state().add_notice(notice.to_owned());
        let cleanup = self.limits.lock().cleanup;
        Request::new(
            connection,
            self.job(JobKind::Release, "", ""),
            Some(cleanup),
            RequestBody::Held(HeldRequest::Release(None)),
        )
    }

    /// Returns the answer to a request about a held evaluation when no evaluation is held, or to a query that needs an idle
    /// session when the session is not idle.
    pub(super) fn refuse(scheduler: &mut SchedulerState, request: Request) -> AnswerFn {
        let error = HoldError::NothingHeld { last: request.connection.last_hold() };
        let request = match request.body {
            RequestBody::Held(request) => request,
            RequestBody::Inspect(Inspection::Query(_, reply)) => {
                let busy = scheduler.check_idle().err();
                return bind_reply(reply, Err(busy.unwrap_or(InspectError::Cancelled)));
            }
            _ => return Box::new(|| ()),
        };
        match request {
            HeldRequest::Resume(_, reply) => bind_reply(reply, Err(error)),
            HeldRequest::Evaluate(builder, reply) => end_refused(scheduler, *builder, error, reply),
            HeldRequest::Locals(_, reply) => bind_reply(reply, Err(error)),
            HeldRequest::Release(Some(reply)) => bind_reply(reply, Err(error)),
            HeldRequest::Release(None) => Box::new(|| ()),
        }
    }
}
