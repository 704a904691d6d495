//! Post-processing: work for an evaluation whose Lisp part is done, such as writing files or asking other images. The
//! work runs on a thread of its own, while Lisp begins the next evaluation. The evaluation is over when this work is
//! done, or soon after the evaluation is cancelled.

use std::sync::Arc;
use std::time::Instant;

use super::completion::{EarlierErrors, end_evaluation};
use super::connection::Connection;
use super::events::{JobEnd, OutcomeBuilder};
use super::scheduler::SchedulerState;
use super::{AnswerFn, Inner, Reply, Session};
use crate::image::InterruptReason;
use crate::image::interruption::REACTION_TIME;
use crate::os::clock::DeadlineClock;
use crate::os::{helper_threads, panics};
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
    /// held. `cancel` is called on a helper thread when the evaluation is cancelled while `work` runs.
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
    pub(super) connection: Arc<Connection>,
    end: JobEnd,
    earlier: EarlierErrors,
    reply: Reply<Arc<Outcome>>,
    /// The function that cancels the work; `None` once the evaluation is cancelled.
    cancel: Option<Box<dyn FnOnce() + Send>>,
    /// The time at which a cancelled evaluation ends even if its work continues; `None` until the evaluation is
    /// cancelled.
    ends_at: Option<Instant>,
    wait: ExternalWait,
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
        let session = self.session;
        scheduler.finishing.push(FinishingEvaluation {
            job,
            evaluation,
            background,
            connection: session.connection.clone(),
            end,
            earlier,
            reply,
            cancel: Some(cancel),
            ends_at: None,
            wait: ExternalWait::new(&session),
        });
        Box::new(move || {
            let fallback = session.clone();
            let done = move || {
                let result = panics::catch(|| work(outcome)).unwrap_or_else(|| {
                    let reason = "Processing the result panicked in the server: please report this bug, with the message of \
                        the panic on the server's stderr.";
                    Err(reason.to_owned())
                });
                session.inner.end_post_processing(job, result);
            };
            let thread = std::thread::Builder::new().name("sbcl-mcp-finish".to_owned()).spawn(done);
            if let Err(error) = thread {
                let reason = format!(
                    "The evaluation itself ended, but a thread to process its result could not be started: {error}. Try \
                     again later."
                );
                fallback.inner.end_post_processing(job, Err(reason));
            }
        })
    }
}

impl FinishingEvaluation {
    /// Asks the work to end soon, and sets `clock` for [`ends_at`](Self::ends_at).
    pub(super) fn cancel(&mut self, clock: &DeadlineClock) {
        if let Some(cancel) = self.cancel.take() {
            let end = Instant::now() + REACTION_TIME;
            self.ends_at = Some(end);
            clock.arm(end);
            // Ending many processes takes time, and the caller holds the scheduler's lock.
            helper_threads::run(cancel);
        }
    }

    /// Returns the time at which a cancelled evaluation ends even if its work continues; `None` for an evaluation that is
    /// not cancelled.
    pub(super) fn ends_at(&self) -> Option<Instant> {
        self.ends_at
    }

    /// Ends the evaluation as cancelled, without waiting for the work. Returns the function that answers the call and the
    /// clients that wait for the evaluation.
    pub(super) fn end_as_cancelled(self, scheduler: &mut SchedulerState) -> AnswerFn {
        let outcome = OutcomeBuilder::blank(self.evaluation).finish(JobEnd::Interrupted(InterruptReason::Cancel));
        end_evaluation(scheduler, outcome, self.reply)
    }
}

impl Inner {
    /// Ends the evaluation of `job`, whose post-processing has returned `result`.
    fn end_post_processing(&self, job: u64, result: Result<Outcome, String>) {
        let mut scheduler = self.scheduler.lock();
        // The evaluation may have ended already: it was cancelled, its image will be replaced, or the session was
        // reset.
        let Some(index) = scheduler.finishing.iter().position(|finishing| finishing.job == job) else { return };
        let finishing = scheduler.finishing.swap_remove(index);
        let answer = self.finish_post_processing(&mut scheduler, finishing, Some(result));
        self.unlock_and_notify(scheduler);
        self.deliver([answer]);
    }

    /// Ends the cancelled evaluations whose work has continued for too long. Returns their answers.
    pub(super) fn end_overdue_post_processing(&self, scheduler: &mut SchedulerState, now: Instant) -> Vec<AnswerFn> {
        let is_overdue = |finishing: &mut FinishingEvaluation| finishing.ends_at.is_some_and(|end| end <= now);
        let overdue: Vec<_> = scheduler.finishing.extract_if(.., is_overdue).collect();
        overdue.into_iter().map(|finishing| self.finish_post_processing(scheduler, finishing, None)).collect()
    }

    /// Ends an evaluation whose post-processing has returned `result`; `None` if the work continues although the
    /// evaluation was cancelled. Returns the function that sends the answer.
    fn finish_post_processing(
        &self,
        scheduler: &mut SchedulerState,
        finishing: FinishingEvaluation,
        result: Option<Result<Outcome, String>>,
    ) -> AnswerFn {
        let FinishingEvaluation { evaluation, background, connection, end, earlier, reply, cancel, wait, .. } =
            finishing;
        let builder = OutcomeBuilder::blank(evaluation);
        let (end, mut outcome) = match result.filter(|_| cancel.is_some()) {
            None => {
                let end = JobEnd::Interrupted(InterruptReason::Cancel);
                (end, builder.finish(end))
            }
            Some(Ok(outcome)) => (end, Outcome { evaluation, ..outcome }),
            Some(Err(reason)) => (JobEnd::Failed, builder.finish_with_error("SIMPLE-ERROR", reason)),
        };
        if background {
            self.report_background(scheduler);
            self.record_background_evaluation(scheduler, &connection, earlier, end, &mut outcome);
        } else {
            self.record_evaluation(&connection, earlier, &mut outcome);
        }
        let answer = self.after_queued_reports(end_evaluation(scheduler, outcome, reply));
        Box::new(move || {
            answer();
            drop(wait);
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::Limits;
    use crate::session::JobId;

    /// Returns a session without an image.
    fn session() -> Session {
        let inner = Arc::new(Inner::new(Limits::default()));
        Session { connection: inner.own_connection.clone(), inner }
    }

    /// Begins post-processing for job 1 that continues until the returned sender is dropped, whatever `cancel` does. Also
    /// returns the receiver of the outcome.
    fn begin_endless(
        session: &Session,
        cancel: impl FnOnce() + Send + 'static,
    ) -> (mpsc::Sender<()>, mpsc::Receiver<Arc<Outcome>>) {
        let (end, ended) = mpsc::channel();
        let (answer, answered) = mpsc::channel();
        let work = move |outcome| {
            let _ = ended.recv();
            Ok(outcome)
        };
        let post_processing = PostProcessing::new(work, cancel);
        let bound = BoundPostProcessing { post_processing, session: session.clone() };
        let mut builder = OutcomeBuilder::blank(1);
        let earlier = EarlierErrors::take(&mut builder);
        let outcome = builder.finish(JobEnd::Succeeded);
        let reply = Box::new(move |outcome| drop(answer.send(outcome)));
        let mut scheduler = session.inner.scheduler.lock();
        let start = bound.begin(&mut scheduler, (1, false, JobEnd::Succeeded), earlier, outcome, reply);
        drop(scheduler);
        start();
        (end, answered)
    }

    /// Asserts that the cancelled evaluation ends after its grace period, and not before.
    fn assert_ends_after_its_grace_period(session: &Session, answered: &mpsc::Receiver<Arc<Outcome>>) {
        let next = session.inner.interrupt_overdue(Instant::now()).expect("a time to end");
        assert!(session.is_busy() && answered.try_recv().is_err());
        session.inner.interrupt_overdue(next);
        assert!(!session.is_busy());
        let outcome = answered.try_recv().expect("an answer");
        assert_eq!(outcome.result.as_ref().expect_err("it was cancelled").kind, "CANCELLED");
    }

    #[test]
    fn a_cancelled_evaluation_ends_although_its_post_processing_goes_on() {
        let session = session();
        let (_end, answered) = begin_endless(&session, || ());
        assert_eq!(session.inner.interrupt_overdue(Instant::now()), None);
        session.cancel(JobId(1));
        assert_ends_after_its_grace_period(&session, &answered);
    }

    #[test]
    fn a_cancellation_does_not_wait_until_the_work_is_cancelled() {
        let session = session();
        let (release, released) = mpsc::channel::<()>();
        let (cancelled, is_cancelled) = mpsc::channel();
        let cancel = move || cancelled.send(released.recv_timeout(Duration::from_secs(20))).unwrap();
        let (_end, _answered) = begin_endless(&session, cancel);
        session.cancel(JobId(1));
        release.send(()).unwrap();
        assert_eq!(is_cancelled.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
    }

    #[test]
    fn post_processing_for_a_disconnected_client_is_cancelled() {
        let session = session();
        let (gone, other) = (session.connect(), session.connect());
        let (_end, answered) = begin_endless(&gone, || ());
        other.disconnect();
        assert_eq!(session.inner.interrupt_overdue(Instant::now()), None);
        gone.disconnect();
        assert_ends_after_its_grace_period(&session, &answered);
    }
}
