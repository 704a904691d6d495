//! The evaluation that is held where it failed: what can be asked of it, and when it is released.

use std::time::{Duration, Instant};

use super::builder::{InspectionBuilder, OutcomeBuilder};
use super::running::Build;
use super::{AWAKE, Inner, JobId, Reply, Request, Session};
use crate::error::HoldError;
use crate::image::{JobKind, Lane};
use crate::outcome::{Local, Outcome};

/// How an evaluation is held.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    /// When it is released at last.
    pub(super) until: Instant,
}

/// How long releasing a held evaluation may take before its cleanup forms are abandoned.
pub(super) const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the next answer says of an evaluation that was released.
pub(super) const RELEASED: &str = "The evaluation that was held for debugging has been released.";

/// Which restart to invoke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RestartDesignator {
    /// By its number, from 1, in the report.
    Number(u64),
    /// By its name, without package.
    Name(String),
}

impl Session {
    /// True while a failed evaluation is held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.held.lock().is_some()
    }

    /// Makes the held evaluation go on by a restart. `values` are Lisp expressions for the restart's arguments, or
    /// empty. `reply` gets what the evaluation comes to, or `None` when the restart is the session's own `ABORT`, which
    /// does what [`abort_held`](Self::abort_held) does; it runs as in [`submit`](Self::submit), like those below.
    pub fn invoke_restart(
        &self,
        restart: &RestartDesignator,
        values: &str,
        reply: impl FnOnce(Result<Option<Outcome>, HoldError>) + Send + 'static,
    ) -> JobId {
        let (number, name) = match restart {
            RestartDesignator::Number(number) => (*number, ""),
            RestartDesignator::Name(name) => (0, name.as_str()),
        };
        self.ask_held(JobKind::InvokeRestart(number), values, name, |builder| Build::Resumed(builder, Box::new(reply)))
    }

    /// Shows the local variables of a frame of the held evaluation.
    pub fn frame_locals(
        &self,
        frame: u64,
        reply: impl FnOnce(Result<Vec<Local>, HoldError>) + Send + 'static,
    ) -> JobId {
        self.ask_held(JobKind::FrameLocals(frame), "", "", |_| {
            Build::Locals(InspectionBuilder::default(), Box::new(reply))
        })
    }

    /// Evaluates code with the variables of a frame of the held evaluation visible. An error in it leaves the held one
    /// as it is, and so does `timeout`, which is as in [`Evaluation`](super::Evaluation).
    pub fn eval_in_frame(
        &self,
        frame: u64,
        code: &str,
        timeout: Option<Option<Duration>>,
        reply: impl FnOnce(Result<Outcome, HoldError>) + Send + 'static,
    ) -> JobId {
        let limits = *self.0.limits.lock();
        let timeout = timeout.unwrap_or(limits.timeout);
        let mut job = self.0.job(JobKind::EvalInFrame(frame), code, "");
        job.evaluation = self.0.add_evaluation(job.id, code);
        let builder = Box::new(OutcomeBuilder::new(job.evaluation, code.to_owned(), limits, timeout));
        self.0.enqueue(Lane::Evaluation, job, timeout, Build::Inside(builder, Box::new(reply)))
    }

    /// Returns the values of `code` from a frame of the held evaluation, which goes on.
    pub fn return_from_frame(
        &self,
        frame: u64,
        code: &str,
        reply: impl FnOnce(Result<Outcome, HoldError>) + Send + 'static,
    ) -> JobId {
        self.ask_held(JobKind::ReturnFromFrame(frame), code, "", |builder| Build::Resumed(builder, always(reply)))
    }

    /// Calls the function of a frame of the held evaluation again, with the same arguments.
    pub fn restart_frame(&self, frame: u64, reply: impl FnOnce(Result<Outcome, HoldError>) + Send + 'static) -> JobId {
        self.ask_held(JobKind::RestartFrame(frame), "", "", |builder| Build::Resumed(builder, always(reply)))
    }

    /// Unwinds the held evaluation: its cleanup forms run, and what they do stays done.
    pub fn abort_held(&self, reply: impl FnOnce(Result<(), HoldError>) + Send + 'static) -> JobId {
        self.ask_held(JobKind::Release, "", "", |_| Build::Release(Box::new(reply)))
    }

    fn ask_held(
        &self,
        kind: JobKind,
        text: &str,
        name: &str,
        build: impl FnOnce(Box<OutcomeBuilder>) -> Build,
    ) -> JobId {
        let limits = *self.0.limits.lock();
        let timeout = if kind == JobKind::Release { Some(RELEASE_TIMEOUT) } else { limits.timeout };
        let builder = Box::new(OutcomeBuilder::new(0, text.to_owned(), limits, timeout));
        self.0.enqueue(Lane::Evaluation, self.0.job(kind, text, name), timeout, build(builder))
    }
}

/// The reply of what never aborts.
fn always(
    reply: impl FnOnce(Result<Outcome, HoldError>) + Send + 'static,
) -> Reply<Result<Option<Outcome>, HoldError>> {
    Box::new(|result| reply(result.and_then(|outcome| outcome.ok_or(HoldError::NothingHeld))))
}

impl Inner {
    /// The next job of the evaluation lane. While an evaluation is held, that is one that concerns it, or its release.
    pub(super) fn next_evaluation(&self) -> Request {
        let queue = &self.lanes[Lane::Evaluation as usize];
        loop {
            let held = *self.held.lock();
            let Some(Held { until }) = held else {
                let Some(request) = queue.pop(None, AWAKE, |_| true) else { continue };
                if !request.job.kind.concerns_held() {
                    return request;
                }
                self.refuse(request);
                continue;
            };
            // The question may be answered while this waits.
            let fits = |request: &Request| {
                let kind = request.job.kind;
                kind.concerns_held() || kind == JobKind::Reset || self.question.lock().is_none()
            };
            match queue.pop(Some(until), Duration::ZERO, fits) {
                Some(mut request) if request.job.kind.concerns_held() => {
                    *self.held.lock() = None;
                    if let (Build::Resumed(builder, _), Some(held)) = (&mut request.build, &*self.held_as.lock()) {
                        // What was held goes on under its own limits. An error is in a form of its code.
                        request.timeout = held.timeout();
                        **builder = held.anew();
                        request.job.evaluation = builder.evaluation();
                    }
                    return request;
                }
                Some(request) => {
                    queue.push_front(request);
                    return self.release(RELEASED);
                }
                None => {
                    return self
                        .release("The evaluation that was held for debugging has been released: its time was up.");
                }
            }
        }
    }

    /// Nobody is asked about a held evaluation any more: what has waited for that may begin.
    pub(super) fn end_question(&self) {
        if self.question.lock().take().is_none() {
            return;
        }
        #[cfg(feature = "mcp")]
        if let Some(witness) = self.witness.get() {
            witness.asks(false);
        }
        self.lanes[Lane::Evaluation as usize].wake();
    }

    /// A job that releases the held evaluation; the next answer says why.
    fn release(&self, notice: &str) -> Request {
        *self.held.lock() = None;
        self.end_question();
        self.state.lock().notice(notice.to_owned());
        Request { job: self.job(JobKind::Release, "", ""), timeout: Some(RELEASE_TIMEOUT), build: Build::Nothing }
    }

    /// Answers what concerns a held evaluation when there is none.
    fn refuse(&self, request: Request) {
        match request.build {
            Build::Resumed(_, reply) => reply(Err(HoldError::NothingHeld)),
            Build::Inside(builder, reply) => {
                self.evaluations.lock().remove(builder.evaluation());
                reply(Err(HoldError::NothingHeld));
            }
            Build::Locals(_, reply) => reply(Err(HoldError::NothingHeld)),
            Build::Release(reply) => reply(Err(HoldError::NothingHeld)),
            _ => {}
        }
    }
}
