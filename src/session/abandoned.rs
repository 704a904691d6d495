//! Abandoned threads, in a process without a supervisor, where no other image can take this one's place.
//!
//! A job that does not react to being interrupted is answered, and its thread is abandoned: another thread takes over its lane.
//! An abandoned thread ends when its job does. When one of them keeps everything else from going on, or there would be more
//! than four, the process ends.

use std::time::{Duration, Instant};

use super::activity::Asked;
use super::events::JobEnd;
use super::scheduler::{Board, Request, Running};
use super::{Answer, Inner, Session};
use crate::image::heap::is_collecting;
use crate::image::{JobKind, Lane};

/// The largest number of abandoned threads.
pub(super) const MAX_ABANDONED: usize = 4;
/// Time between two questions to Lisp whether an abandoned thread keeps others from going on.
const LOOK: Duration = Duration::from_secs(1);
/// The longest time for an answer. While an abandoned thread keeps the garbage collector waiting, no Lisp thread runs.
const SILENCE: Duration = Duration::from_secs(5);
/// Number of answers in a row that must name a lock.
const BLOCKED: u32 = 3;

/// Ends the process for this reason, having told whoever waits. Does not return.
pub(super) type GiveUp = Box<dyn Fn(&str) + Send + Sync>;

/// The abandoned threads, and what is known of the harm they do.
#[derive(Debug, Default)]
pub(super) struct Abandoned {
    /// The jobs that they do.
    jobs: Vec<u64>,
    look: Look,
    /// How many answers in a row named a lock, and the last one.
    blocked: (u32, String),
    /// Why no thread could be started in the place of one.
    refused: Option<String>,
}

/// The question whether an abandoned thread keeps others from going on.
#[derive(Debug, Clone, Copy, Default)]
enum Look {
    /// There is nobody to be asked about.
    #[default]
    Idle,
    /// Asked at this time, and not answered.
    Asked(Instant),
    /// Answered; to be asked again at this time.
    Due(Instant),
}

impl Abandoned {
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// True while an abandoned thread does this job.
    pub(super) fn is_of(&self, job: u64) -> bool {
        self.jobs.contains(&job)
    }

    /// A thread is abandoned that does this job.
    pub(super) fn add(&mut self, job: u64) {
        self.jobs.push(job);
        if let Look::Idle = self.look {
            self.look = Look::Due(Instant::now());
        }
    }

    /// A job is over. True when its thread was abandoned, and ends with it.
    pub(super) fn ended(&mut self, job: u64) -> bool {
        let before = self.jobs.len();
        self.jobs.retain(|abandoned| *abandoned != job);
        self.jobs.len() < before
    }

    /// Lisp's answer: the lock that an abandoned thread holds while others wait for it, or nothing.
    pub(super) fn looked(&mut self, lock: &str) {
        self.look = Look::Due(Instant::now() + LOOK);
        self.blocked = if lock.is_empty() { (0, String::new()) } else { (self.blocked.0 + 1, lock.to_owned()) };
    }

    /// No thread could be started in the place of one, if there is any.
    pub(super) fn refused(&mut self, reason: &str) {
        if !self.is_empty() {
            self.refused = Some(reason.to_owned());
        }
    }

    /// Why nothing goes on, if that is so at the moment `now`.
    fn standstill(&self, now: Instant) -> Option<String> {
        let threads = match self.jobs.len() {
            0 => return None,
            1 => "an evaluation that does not react to being interrupted".to_owned(),
            more => format!("one of {more} evaluations that do not react to being interrupted"),
        };
        if let Some(reason) = &self.refused {
            return Some(format!("Lisp cannot go on beside {threads}. {reason}"));
        }
        if self.blocked.0 >= BLOCKED {
            return Some(format!("Lisp cannot go on: {threads} holds {}, which others wait for.", self.blocked.1));
        }
        match self.look {
            Look::Asked(at) if now >= at + SILENCE && !is_collecting() => Some(format!(
                "Lisp stands still: {threads} keeps the garbage collector from stopping its thread, or holds a lock that starting a \
                 thread needs."
            )),
            _ => None,
        }
    }
}

impl Session {
    /// From here on, a job that does not react to being interrupted is abandoned. `end_process` is called with a sentence when
    /// nothing can go on beside abandoned threads: it must tell whoever waits, and not return. Only the first one counts.
    pub(crate) fn abandon_stuck(&self, end_process: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.inner.give_up.set(Box::new(end_process));
    }
}

impl Inner {
    /// True where what is stuck is abandoned.
    pub(super) fn abandons(&self) -> bool {
        self.give_up.get().is_some()
    }

    pub(super) fn end_process(&self, reason: &str) {
        if let Some(give_up) = self.give_up.get() {
            give_up(reason);
        }
    }

    /// Abandons a job that was taken out of `board`, with its thread. Its answer is added to `answers`. Returns why the process
    /// is to end, if there are too many abandoned threads already.
    pub(super) fn abandon(&self, board: &mut Board, mut running: Running, answers: &mut Vec<Answer>) -> Option<String> {
        if board.abandoned.jobs.len() == MAX_ABANDONED {
            // The end of the process answers it.
            std::mem::forget(running);
            return Some(format!(
                "{MAX_ABANDONED} evaluations that do not react to being interrupted go on in threads of their own, and there is \
                 one more."
            ));
        }
        board.abandon_thread(&running);
        let job = self.job(JobKind::Abandon { target: running.id, lane: running.lane }, "", "");
        board.push(Lane::Control, Request::new(&self.main, job, None, Asked::Control));
        let end = running.interrupted().map_or(JobEnd::Failed, JobEnd::Abandoned);
        let settled = running.take_questions();
        answers.push(self.finish(board, running, end));
        answers.extend(settled);
        None
    }

    /// Asks Lisp from time to time whether an abandoned thread keeps others from going on. Returns why the process is to end,
    /// if it is. The time of the next question is added to `next`.
    pub(super) fn look_at_abandoned(&self, board: &mut Board, now: Instant, next: &mut Vec<Instant>) -> Option<String> {
        if board.abandoned.is_empty() {
            board.abandoned.look = Look::Idle;
            return None;
        }
        if let Some(reason) = board.abandoned.standstill(now) {
            return Some(reason);
        }
        if let Look::Due(at) = board.abandoned.look
            && at <= now
        {
            let job = self.job(JobKind::Look, "", "");
            board.push(Lane::Control, Request::new(&self.main, job, None, Asked::Control));
            board.abandoned.look = Look::Asked(now);
        }
        next.push(now + LOOK);
        None
    }
}
