//! The evaluation that is held where it failed: what can be asked of it, and when it is released.

use std::sync::Arc;

use super::activity::{Asked, HeldRequest};
use super::connection::Connection;
use super::events::{InspectionBuilder, OutcomeBuilder};
use super::scheduler::{Board, Request};
use super::{Answer, Inner, JobId, Reply, Session, TimeLimit, answer};
use crate::error::HoldError;
use crate::image::{Job, JobKind, Lane};
use crate::outcome::{ErrorRecord, FrameLocals, Outcome};

/// What the next answer says of an evaluation that was released.
pub(super) const RELEASED: &str = "The evaluation that was held for debugging has been released.";
pub(super) const TIME_UP: &str = "The evaluation that was held for debugging has been released: its time was up.";

/// Which restart to invoke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RestartDesignator {
    /// By its number, from 1, in the report.
    Number(u64),
    /// By its name, without package.
    Name(String),
}

/// What became of a held evaluation by a restart.
#[derive(Debug, Clone, PartialEq)]
pub enum Resumed {
    /// It went on, and came to this.
    Outcome(Arc<Outcome>),
    /// The restart was the session's own `ABORT`, which does what [`Session::abort_held`] does.
    Aborted,
}

impl Session {
    /// Returns true while a failed evaluation of this connection is held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held_evaluation().is_some()
    }

    /// Makes what another connection holds this one's: evaluation `id`, or the one that there is. It is the last error of
    /// both from then on, and the other one is told. Its outcome as it is held.
    ///
    /// # Errors
    /// [`HoldError`]: there is none, or more than one, or this connection holds one already, or somebody is being asked
    /// about it.
    pub fn take_over(&self, id: Option<u64>) -> Result<Arc<Outcome>, HoldError> {
        let refused = |reason: String| Err(HoldError::Refused(reason));
        let Self { inner, connection } = self;
        let mut board = inner.board.lock();
        if board.hold_of(connection.id).is_some() {
            return refused(
                "This connection holds an evaluation already: go on with it, or abort it, first.".to_owned(),
            );
        }
        let held: Vec<_> = board.holds.iter().map(|hold| hold.builder.evaluation()).collect();
        let wanted = match (id, &held[..]) {
            (_, []) => return Err(HoldError::NothingHeld),
            (None, [one]) => *one,
            (Some(id), all) if all.contains(&id) => id,
            (_, all) => {
                let all: Vec<_> = all.iter().map(u64::to_string).collect();
                return refused(format!("Which one is to be taken over? These are held: {}.", all.join(", ")));
            }
        };
        let Some(outcome) = board.evaluations.held_outcome(wanted) else {
            return refused(format!("What evaluation {wanted} came to was too large to be kept."));
        };
        let until = std::time::Instant::now().checked_add(inner.limits.lock().hold);
        let Some(before) = board.hand_over(wanted, connection, until) else {
            return refused(format!("Somebody is being asked how evaluation {wanted} is to go on."));
        };
        inner.leave_board(board);
        let who = connection.describe();
        before.tell(format!("{who} took over evaluation {wanted}, which was held for debugging."));
        let mut state = connection.state();
        if let Err(error) = &outcome.result {
            state.take_over(error);
            if let Some(observer) = inner.observer.get() {
                observer.errors(connection.id, Some(error), state.last_error.as_ref());
            }
        }
        Ok(outcome)
    }

    /// Makes the held evaluation go on by a restart. `values` are Lisp expressions for the restart's arguments, or
    /// empty. `reply` runs as in [`submit`](Self::submit), like those below.
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
        self.resume(JobKind::InvokeRestart(number), values, name, Box::new(reply))
    }

    /// Returns the number of the failed evaluation that is held for this connection.
    #[must_use]
    pub fn held_evaluation(&self) -> Option<u64> {
        self.inner.board.lock().held_by(self.connection.id)
    }

    /// Returns the error of the evaluation that is held for this connection, with the frames and values that it had when it
    /// failed. `None` when none is held, or when its error was too large to be kept.
    #[must_use]
    pub fn held_error(&self) -> Option<Arc<ErrorRecord>> {
        let evaluation = self.held_evaluation()?;
        let outcome = self.inner.board.lock().evaluations.held_outcome(evaluation);
        let held = outcome.and_then(|outcome| outcome.result.as_ref().err().cloned());
        held.or_else(|| self.last_error().filter(|error| error.evaluation == evaluation))
    }

    /// Reads the present values of the local variables of the held evaluation: of `count` frames, 50 at most, from the frame
    /// with the number `from` on. Fewer frames when there are not so many.
    pub fn held_locals(
        &self,
        from: u64,
        count: u64,
        reply: impl FnOnce(Result<Vec<FrameLocals>, HoldError>) + Send + 'static,
    ) -> JobId {
        let timeout = self.inner.limits.lock().timeout;
        let asked = Asked::Held(HeldRequest::Locals(InspectionBuilder::default(), Box::new(reply)));
        let kind = JobKind::FrameLocals { from, count: u32::try_from(count).unwrap_or(u32::MAX) };
        self.ask_of_held(self.inner.board.lock(), self.inner.job(kind, "", ""), timeout, asked)
    }

    /// Evaluates code with the variables of a frame of the held evaluation visible. Neither an error in it nor its
    /// `timeout` changes the held one.
    pub fn eval_in_frame(
        &self,
        frame: u64,
        code: &str,
        timeout: TimeLimit,
        reply: impl FnOnce(Result<Arc<Outcome>, HoldError>) + Send + 'static,
    ) -> JobId {
        let limits = *self.inner.limits.lock();
        let timeout = timeout.or(limits.timeout);
        let mut job = self.inner.job(JobKind::EvalInFrame(frame), code, "");
        let code: Arc<str> = code.into();
        let mut board = self.inner.board.lock();
        job.evaluation = self.number_evaluation(&mut board, job.id, &code);
        let builder = Box::new(OutcomeBuilder::new(job.evaluation, code, limits, timeout));
        let asked = Asked::Held(HeldRequest::Evaluate(builder, Box::new(reply)));
        self.ask_of_held(board, job, timeout, asked)
    }

    /// Returns the values of `code` from a frame of the held evaluation, which goes on.
    pub fn return_from_frame(
        &self,
        frame: u64,
        code: &str,
        reply: impl FnOnce(Result<Arc<Outcome>, HoldError>) + Send + 'static,
    ) -> JobId {
        self.resume(JobKind::ReturnFromFrame(frame), code, "", never_aborted(reply))
    }

    /// Calls the function of a frame of the held evaluation again, with the same arguments.
    pub fn restart_frame(
        &self,
        frame: u64,
        reply: impl FnOnce(Result<Arc<Outcome>, HoldError>) + Send + 'static,
    ) -> JobId {
        self.resume(JobKind::RestartFrame(frame), "", "", never_aborted(reply))
    }

    /// Unwinds the held evaluation: its cleanup forms run, and what they do stays done.
    pub fn abort_held(&self, reply: impl FnOnce(Result<(), HoldError>) + Send + 'static) -> JobId {
        let job = self.inner.job(JobKind::Release, "", "");
        let cleanup = self.inner.limits.lock().cleanup;
        let asked = Asked::Held(HeldRequest::Release(Some(Box::new(reply))));
        self.ask_of_held(self.inner.board.lock(), job, Some(cleanup), asked)
    }

    /// Requests what makes the held evaluation go on, on the thread that holds it.
    fn resume(&self, kind: JobKind, text: &str, name: &str, reply: Reply<Result<Resumed, HoldError>>) -> JobId {
        let limits = *self.inner.limits.lock();
        // What is held puts its own in place of this when it goes on.
        let builder = Box::new(OutcomeBuilder::new(0, text.into(), limits, limits.timeout));
        let job = self.inner.job(kind, text, name);
        let asked = Asked::Held(HeldRequest::Resume(builder, reply));
        self.ask_of_held(self.inner.board.lock(), job, limits.timeout, asked)
    }

    /// Requests something of the held evaluation, in the order of this connection's requests. It is refused at once where
    /// nothing can be held: other connections' evaluations, which may take long, do not matter then.
    fn ask_of_held(
        &self,
        mut board: parking_lot::MutexGuard<'_, Board>,
        job: Job,
        timeout: Option<std::time::Duration>,
        asked: Asked,
    ) -> JobId {
        let id = JobId(job.id);
        let request = Request::new(&self.connection, job, timeout, asked);
        if board.can_hold_nothing(self.connection.id) {
            let answer = Inner::refuse(&mut board, request);
            self.inner.leave_board(board);
            self.inner.deliver([answer]);
        } else {
            board.push(Lane::Evaluation, request);
            self.inner.leave_board(board);
        }
        id
    }
}

/// The reply of what never aborts.
fn never_aborted(
    reply: impl FnOnce(Result<Arc<Outcome>, HoldError>) + Send + 'static,
) -> Reply<Result<Resumed, HoldError>> {
    Box::new(|result| {
        reply(result.and_then(|resumed| match resumed {
            Resumed::Outcome(outcome) => Ok(outcome),
            Resumed::Aborted => Err(HoldError::NothingHeld),
        }));
    })
}

impl Inner {
    /// Nobody is asked any more about what a connection holds: what has waited for that may begin.
    pub(super) fn end_question(&self, board: &mut Board, connection: &Connection) {
        if board.end_question(connection.id) {
            self.asks_no_more();
        }
    }

    pub(super) fn asks_no_more(&self) {
        if let Some(observer) = self.observer.get() {
            observer.asks(false);
        }
    }

    /// What releases what a connection holds; its next answer says why.
    pub(super) fn release(&self, board: &mut Board, connection: &Arc<Connection>, notice: &str) -> Request {
        self.end_question(board, connection);
        connection.state().notice(notice.to_owned());
        let cleanup = self.limits.lock().cleanup;
        Request::new(
            connection,
            self.job(JobKind::Release, "", ""),
            Some(cleanup),
            Asked::Held(HeldRequest::Release(None)),
        )
    }

    /// Answers what concerns a held evaluation when there is none.
    pub(super) fn refuse(board: &mut Board, request: Request) -> Answer {
        let error = HoldError::NothingHeld;
        let Asked::Held(request) = request.asked else { return Box::new(|| ()) };
        match request {
            HeldRequest::Resume(_, reply) => answer(reply, Err(error)),
            HeldRequest::Evaluate(builder, reply) => {
                board.evaluations.remove(builder.evaluation());
                answer(reply, Err(error))
            }
            HeldRequest::Locals(_, reply) => answer(reply, Err(error)),
            HeldRequest::Release(Some(reply)) => answer(reply, Err(error)),
            HeldRequest::Release(None) => Box::new(|| ()),
        }
    }
}
