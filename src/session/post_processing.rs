//! Post-processing: work for an evaluation whose Lisp part is done, such as writing files or asking other images. The
//! work runs on a thread of its own, while Lisp begins the next evaluation. The evaluation is over when this work is
//! done.

use std::sync::Arc;

use super::completion::{EarlierErrors, end_evaluation};
use super::connection::Connection;
use super::events::{JobEnd, OutcomeBuilder};
use super::scheduler::SchedulerState;
use super::{AnswerFn, Inner, Reply, Session, bind_reply};
use crate::image::InterruptReason;
use crate::os::panics;
use crate::outcome::Outcome;

/// A function that makes the final outcome from Lisp's outcome, or returns the reason why it cannot.
type PostProcessingFn = Box<dyn FnOnce(Outcome) -> Result<Outcome, String> + Send>;

/// The work for an evaluation whose Lisp part is done, and the function that cancels this work.
pub(crate) struct PostProcessing {
    work: PostProcessingFn,
    /// The function that asks the work to end soon.
    cancel: Box<dyn FnOnce() + Send>,
}

impl PostProcessing {
    /// Creates post-processing. `work` runs on a thread of its own, unless the evaluation has been cancelled or is
    /// held. `cancel` is called when the evaluation is cancelled while `work` runs, and must not block.
    pub(crate) fn new(
        work: impl FnOnce(Outcome) -> Result<Outcome, String> + Send + 'static,
        cancel: impl FnOnce() + Send + 'static,
    ) -> Self {
        Self { work: Box::new(work), cancel: Box::new(cancel) }
    }
}

/// Post-processing, and the session that it belongs to.
pub(super) struct BoundPostProcessing {
    pub(super) post_processing: PostProcessing,
    pub(super) session: Session,
}

/// The guard of an answer that waits for work outside Lisp. The observer is notified when the guard is created and
/// when it is dropped, so that the supervisor does not mistake a long wait for a stuck worker.
struct ExternalWait(Session);

impl ExternalWait {
    fn new(session: &Session) -> Self {
        if let Some(observer) = session.inner.observer.get() {
            observer.external_wait_changed(true);
        }
        Self(session.clone())
    }
}

impl Drop for ExternalWait {
    fn drop(&mut self) {
        self.0.inner.end_external_wait();
    }
}

/// An evaluation whose Lisp part is done and whose post-processing runs.
pub(super) struct FinishingEvaluation {
    pub(super) job: u64,
    pub(super) evaluation: u64,
    pub(super) background: bool,
    end: JobEnd,
    earlier: EarlierErrors,
    reply: Reply<Arc<Outcome>>,
    /// The function that cancels the work; `None` once the evaluation is cancelled.
    cancel: Option<Box<dyn FnOnce() + Send>>,
}

impl BoundPostProcessing {
    /// Records the evaluation as finishing. Returns the function that starts the work on `outcome`.
    pub(super) fn begin(
        self,
        scheduler: &mut SchedulerState,
        (job, background, end): (u64, bool, JobEnd),
        earlier: EarlierErrors,
        outcome: Outcome,
        reply: Reply<Arc<Outcome>>,
    ) -> AnswerFn {
        let PostProcessing { work, cancel } = self.post_processing;
        let evaluation = outcome.evaluation;
        scheduler.finishing.push(FinishingEvaluation {
            job,
            evaluation,
            background,
            end,
            earlier,
            reply,
            cancel: Some(cancel),
        });
        let session = self.session;
        Box::new(move || {
            let fallback = session.clone();
            let wait = ExternalWait::new(&session);
            let done = move || {
                let _wait = wait;
                let result = panics::catch(|| work(outcome)).unwrap_or_else(|| {
                    let reason = "Processing the result panicked in the server; the server's stderr has the details.";
                    Err(reason.to_owned())
                });
                session.inner.end_post_processing(&session.connection, job, result);
            };
            let thread = std::thread::Builder::new().name("sbcl-mcp-finish".to_owned()).spawn(done);
            if let Err(error) = thread {
                fallback.inner.end_post_processing(
                    &fallback.connection,
                    job,
                    Err(format!("Cannot start a thread to process the result: {error}.")),
                );
            }
        })
    }
}

impl FinishingEvaluation {
    /// Asks the work to end soon.
    pub(super) fn cancel(&mut self) {
        if let Some(cancel) = self.cancel.take() {
            cancel();
        }
    }

    /// Returns the answer to the call whose evaluation was cancelled.
    pub(super) fn answer_as_cancelled(self) -> AnswerFn {
        let outcome = OutcomeBuilder::blank(self.evaluation).finish(JobEnd::Interrupted(InterruptReason::Cancel));
        bind_reply(self.reply, Arc::new(outcome))
    }
}

impl Inner {
    /// Ends the evaluation of `job`, whose post-processing has returned `result`.
    fn end_post_processing(&self, connection: &Connection, job: u64, result: Result<Outcome, String>) {
        let mut scheduler = self.scheduler.lock();
        // The evaluation may have been answered already, because its image will be replaced or the session was reset.
        let Some(index) = scheduler.finishing.iter().position(|finishing| finishing.job == job) else { return };
        let FinishingEvaluation { evaluation, background, end, earlier, reply, cancel, .. } =
            scheduler.finishing.swap_remove(index);
        let builder = OutcomeBuilder::blank(evaluation);
        let (end, mut outcome) = match result {
            _ if cancel.is_none() => {
                let end = JobEnd::Interrupted(InterruptReason::Cancel);
                (end, builder.finish(end))
            }
            Ok(outcome) => (end, Outcome { evaluation, ..outcome }),
            Err(reason) => (JobEnd::Failed, builder.finish_with_error("SIMPLE-ERROR", reason)),
        };
        if background {
            self.report_background(&scheduler);
            self.record_background_evaluation(&mut scheduler, connection, earlier, end, &mut outcome);
        } else {
            self.record_evaluation(connection, earlier, &mut outcome);
        }
        let answer = end_evaluation(&mut scheduler, outcome, reply);
        self.unlock_and_notify(scheduler);
        self.deliver([answer]);
    }
}
