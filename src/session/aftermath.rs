//! What is done for an evaluation when Lisp has done its part and before it is over: files are written, other images
//! asked. It has a thread of its own; Lisp goes on with what comes next.

use std::sync::Arc;

use super::completion::{Earlier, keep};
use super::connection::Connection;
use super::events::{JobEnd, OutcomeBuilder};
use super::scheduler::Board;
use super::{Answer, Inner, Reply, Session, answer};
use crate::image::Interrupt;
use crate::os::panics;
use crate::outcome::Outcome;

/// What is done: it makes what the evaluation comes to of what Lisp came to, or says why it cannot.
type Work = Box<dyn FnOnce(Outcome) -> Result<Outcome, String> + Send>;

/// What is to be done after an evaluation, before it is over.
pub(crate) struct Aftermath {
    work: Work,
    /// Has the work end soon.
    cancel: Answer,
}

impl Aftermath {
    /// `work` is done on a thread of its own, unless the evaluation is cancelled or held before; `cancel` is called
    /// when it is cancelled meanwhile, and must not block.
    pub(crate) fn new(
        work: impl FnOnce(Outcome) -> Result<Outcome, String> + Send + 'static,
        cancel: impl FnOnce() + Send + 'static,
    ) -> Self {
        Self { work: Box::new(work), cancel: Box::new(cancel) }
    }
}

/// An aftermath, and the session that it is of.
pub(super) struct Due {
    pub(super) aftermath: Aftermath,
    pub(super) session: Session,
}

/// While there is one, whoever watches over the image knows that an answer waits for something else: it may take its
/// time although nothing runs in Lisp.
struct Busy(Session);

impl Busy {
    fn new(session: &Session) -> Self {
        if let Some(observer) = session.inner.observer.get() {
            observer.asks(true);
        }
        Self(session.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.inner.asks_no_more();
    }
}

/// An evaluation that Lisp has done its part of.
pub(super) struct Finishing {
    pub(super) job: u64,
    pub(super) evaluation: u64,
    pub(super) background: bool,
    end: JobEnd,
    before: Earlier,
    reply: Reply<Arc<Outcome>>,
    /// Taken when it is cancelled.
    cancel: Option<Answer>,
}

impl Due {
    /// Has `outcome` become what the evaluation comes to. What this returns begins with that.
    pub(super) fn begin(
        self,
        board: &mut Board,
        (job, background, end): (u64, bool, JobEnd),
        before: Earlier,
        outcome: Outcome,
        reply: Reply<Arc<Outcome>>,
    ) -> Answer {
        let Aftermath { work, cancel } = self.aftermath;
        let evaluation = outcome.evaluation;
        board.finishing.push(Finishing { job, evaluation, background, end, before, reply, cancel: Some(cancel) });
        let session = self.session;
        Box::new(move || {
            let ends = session.clone();
            let busy = Busy::new(&session);
            let done = move || {
                let _busy = busy;
                let result = panics::caught(|| work(outcome))
                    .unwrap_or_else(|| Err("What was to be done then panicked.".to_owned()));
                session.inner.finished(&session.connection, job, result);
            };
            let thread = std::thread::Builder::new().name("sbcl-mcp-finish".to_owned()).spawn(done);
            if let Err(error) = thread {
                ends.inner.finished(&ends.connection, job, Err(format!("No thread could be started for it: {error}.")));
            }
        })
    }
}

impl Finishing {
    /// Has the work end soon.
    pub(super) fn cancel(&mut self) {
        if let Some(cancel) = self.cancel.take() {
            cancel();
        }
    }

    /// Answers as a cancelled one does.
    pub(super) fn abandon(self) -> Answer {
        let outcome = OutcomeBuilder::blank(self.evaluation).finish(JobEnd::Interrupted(Interrupt::Cancel));
        answer(self.reply, Arc::new(outcome))
    }
}

impl Inner {
    /// The work for `job` is done: its evaluation is over.
    fn finished(&self, connection: &Connection, job: u64, result: Result<Outcome, String>) {
        let mut board = self.board.lock();
        // It was answered when the image was replaced.
        let Some(index) = board.finishing.iter().position(|finishing| finishing.job == job) else { return };
        let Finishing { evaluation, background, end, before, reply, cancel, .. } = board.finishing.swap_remove(index);
        let builder = OutcomeBuilder::blank(evaluation);
        let (end, mut outcome) = match result {
            _ if cancel.is_none() => {
                let end = JobEnd::Interrupted(Interrupt::Cancel);
                (end, builder.finish(end))
            }
            Ok(outcome) => (end, Outcome { evaluation, ..outcome }),
            Err(reason) => (JobEnd::Failed, builder.failed("SIMPLE-ERROR", reason)),
        };
        if background {
            self.report_background(&board);
            self.evaluated_in_background(&mut board, connection, before, end, &mut outcome);
        } else {
            self.evaluated(connection, before, &mut outcome);
        }
        let answer = keep(&mut board, outcome, reply);
        self.leave_board(board);
        self.deliver([answer]);
    }
}
