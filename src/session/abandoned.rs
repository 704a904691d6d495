//! Abandoned threads, for a process without a supervisor: nothing can replace its image when a job is stuck.
//!
//! If a job ignores its interruption, its client gets an answer and its thread is abandoned: another thread serves
//! the lane. An abandoned thread ends when its job does. The process ends when an abandoned thread keeps the other Lisp
//! threads from running, or when there would be more than four abandoned threads.

use std::time::{Duration, Instant};

use super::activity::RequestBody;
use super::events::JobEnd;
use super::scheduler::{Request, RunningJob, SchedulerState};
use super::{AnswerFn, Inner, Session};
use crate::image::heap::is_collecting;
use crate::image::{JobKind, Lane};

/// The maximum number of abandoned threads.
pub(super) const MAX_ABANDONED: usize = 4;
/// The interval of the lock checks, which ask Lisp whether an abandoned thread blocks other threads.
const LOCK_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The time within which Lisp must answer a lock check. While an abandoned thread keeps the garbage collector waiting,
/// no Lisp thread can answer.
const LOCK_CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// The number of consecutive answers to lock checks that must name a lock before the process ends.
const MAX_BLOCKED_ANSWERS: u32 = 3;

/// A function that answers all clients and ends the process, for the reason in its argument.
pub(super) type EndProcessFn = Box<dyn Fn(&str) + Send + Sync>;

/// The abandoned threads, and the signs that they block other threads.
#[derive(Debug, Default)]
pub(super) struct AbandonedThreads {
    /// The jobs of the abandoned threads.
    jobs: Vec<u64>,
    lock_check: LockCheck,
    /// The number of consecutive answers that named a lock, and the lock in the last answer.
    blocked: (u32, String),
    /// The reason why an abandoned thread could not be replaced.
    refused: Option<String>,
}

/// The state of the lock check, which asks Lisp whether an abandoned thread blocks other threads.
#[derive(Debug, Clone, Copy, Default)]
enum LockCheck {
    /// No thread is abandoned.
    #[default]
    Idle,
    /// The check was requested at this time and has not been answered.
    Asked(Instant),
    /// The next check is at this time.
    Scheduled(Instant),
}

impl AbandonedThreads {
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns true while an abandoned thread runs this job.
    pub(super) fn runs(&self, job: u64) -> bool {
        self.jobs.contains(&job)
    }

    /// Records that the thread of this job is abandoned.
    pub(super) fn add(&mut self, job: u64) {
        self.jobs.push(job);
        if let LockCheck::Idle = self.lock_check {
            self.lock_check = LockCheck::Scheduled(Instant::now());
        }
    }

    /// Records the end of a job. Returns true if the job's thread was abandoned; the thread then ends.
    pub(super) fn record_end(&mut self, job: u64) -> bool {
        let before = self.jobs.len();
        self.jobs.retain(|abandoned| *abandoned != job);
        self.jobs.len() < before
    }

    /// Records the answer to a lock check. `lock` is the name of the lock that an abandoned thread holds while
    /// other threads wait for the lock; it is empty if there is no such lock.
    pub(super) fn record_lock_check(&mut self, lock: &str) {
        self.lock_check = LockCheck::Scheduled(Instant::now() + LOCK_CHECK_INTERVAL);
        self.blocked = if lock.is_empty() { (0, String::new()) } else { (self.blocked.0 + 1, lock.to_owned()) };
    }

    /// Records that an abandoned thread could not be replaced. Does nothing if no thread is abandoned.
    pub(super) fn record_refusal(&mut self, reason: &str) {
        if !self.is_empty() {
            self.refused = Some(reason.to_owned());
        }
    }

    /// Returns the reason to end the process if abandoned threads keep the other Lisp threads from running.
    fn end_reason(&self, now: Instant) -> Option<String> {
        let threads = match self.jobs.len() {
            0 => return None,
            1 => "an interrupted evaluation or inspection that does not end".to_owned(),
            more => format!("one of {more} interrupted evaluations and inspections that do not end"),
        };
        if let Some(reason) = &self.refused {
            return Some(format!("Lisp cannot continue: the thread of {threads} could not be replaced. {reason}"));
        }
        if self.blocked.0 >= MAX_BLOCKED_ANSWERS {
            return Some(format!(
                "Lisp cannot continue: {threads} holds {}, which other threads wait for.",
                self.blocked.1
            ));
        }
        match self.lock_check {
            LockCheck::Asked(at) if now >= at + LOCK_CHECK_TIMEOUT && !is_collecting() => Some(format!(
                "Lisp is blocked: {threads} keeps the garbage collector from stopping its thread, or holds a lock \
                 that is needed to start a thread."
            )),
            _ => None,
        }
    }
}

impl Session {
    /// Makes the session abandon jobs that ignore their interruption. `end_process` is called with a reason when
    /// abandoned threads keep the other Lisp threads from running, or when there are too many abandoned threads. The
    /// function must answer all clients, and must not return. Later calls of this method have no effect.
    pub(crate) fn enable_job_abandonment(&self, end_process: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.inner.end_process_fn.set(Box::new(end_process));
    }
}

impl Inner {
    /// Returns true if stuck jobs are abandoned in this process.
    pub(super) fn abandons_stuck_jobs(&self) -> bool {
        self.end_process_fn.get().is_some()
    }

    pub(super) fn end_process(&self, reason: &str) {
        if let Some(end_process) = self.end_process_fn.get() {
            end_process(reason);
        }
    }

    /// Abandons a job, which was removed from `scheduler`, and its thread. Adds the job's answer to `answers`.
    /// Returns the reason to end the process if there are too many abandoned threads already.
    pub(super) fn abandon_job(
        &self,
        scheduler: &mut SchedulerState,
        mut running: RunningJob,
        answers: &mut Vec<AnswerFn>,
    ) -> Option<String> {
        if scheduler.abandoned.jobs.len() == MAX_ABANDONED {
            // The function that ends the process answers the job's client. Dropping the reply here would send
            // another answer.
            std::mem::forget(running);
            return Some(format!(
                "An interrupted evaluation or inspection does not end, and {MAX_ABANDONED} others already run in \
                 abandoned threads, which is the maximum."
            ));
        }
        scheduler.abandon_thread(&running);
        let job = self.job(JobKind::Abandon { target: running.id, lane: running.lane }, "", "");
        scheduler.push(Lane::Control, Request::new(&self.own_connection, job, None, RequestBody::Control));
        let why = running.stuck_reason();
        let end = running.interrupt_reason().map_or(JobEnd::Failed, |reason| JobEnd::Abandoned(reason, why));
        let settled = running.take_error_queries();
        answers.push(self.finish(scheduler, running, end));
        answers.extend(settled);
        None
    }

    /// Asks Lisp at intervals whether an abandoned thread blocks other threads. Returns the reason to end the process,
    /// if there is one. Adds the time of the next check to `next`.
    pub(super) fn check_abandoned(
        &self,
        scheduler: &mut SchedulerState,
        now: Instant,
        next: &mut Vec<Instant>,
    ) -> Option<String> {
        if scheduler.abandoned.is_empty() {
            scheduler.abandoned.lock_check = LockCheck::Idle;
            return None;
        }
        if let Some(reason) = scheduler.abandoned.end_reason(now) {
            return Some(reason);
        }
        if let LockCheck::Scheduled(at) = scheduler.abandoned.lock_check
            && at <= now
        {
            let job = self.job(JobKind::FindBlocker, "", "");
            scheduler.push(Lane::Control, Request::new(&self.own_connection, job, None, RequestBody::Control));
            scheduler.abandoned.lock_check = LockCheck::Asked(now);
        }
        next.push(now + LOCK_CHECK_INTERVAL);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_to_end_the_process_does_not_call_an_abandoned_inspection_an_evaluation() {
        let mut abandoned = AbandonedThreads::default();
        abandoned.add(1);
        abandoned.record_refusal("Lisp could not start a new thread for inspections: x");
        let expected = "Lisp cannot continue: the thread of an interrupted evaluation or inspection that does not end \
                        could not be replaced. Lisp could not start a new thread for inspections: x";
        assert_eq!(abandoned.end_reason(Instant::now()).as_deref(), Some(expected));
    }
}
