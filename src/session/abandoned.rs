//! Threads that serve no lane any more, in a process that is all there is: no other image could take this one's place.
//!
//! What does not react to being interrupted is answered, and abandoned with its thread; another thread takes over its lane. The
//! thread may end by itself, and then is gone. When one of them keeps everything else from going on, or there are too many,
//! the process ends.

use std::time::{Duration, Instant};

use super::events::JobEnd;
use super::pending::PendingReply;
use super::scheduler::{Board, Request, Running};
use super::{Inner, Session};
use crate::image::heap::is_collecting;
use crate::image::{JobKind, Lane, Text};

/// How many threads may be abandoned at the same time.
pub(super) const MAX_ABANDONED: usize = 4;
/// How often Lisp is asked whether one of them keeps others from going on.
const LOOK: Duration = Duration::from_secs(1);
/// How long the answer may take: as long as an abandoned thread keeps the garbage collector from stopping it, nothing in
/// Lisp runs.
const SILENCE: Duration = Duration::from_secs(5);
/// So many answers in a row must name the lock that others wait for.
const BLOCKED: u32 = 3;

/// Ends the process for this reason, having told whoever waits. Does not return.
pub(super) type GiveUp = Box<dyn Fn(&str) + Send + Sync>;

/// The abandoned threads, and what is known of the harm they do.
#[derive(Debug, Default)]
pub(super) struct Abandoned {
    /// The jobs that they do.
    jobs: Vec<u64>,
    /// How many threads are being started in their place for the evaluation lane.
    relieving: usize,
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

    /// A thread is there for the evaluation lane. True when it takes the place of an abandoned one.
    pub(super) fn relieve(&mut self) -> bool {
        let relieves = self.relieving > 0;
        self.relieving -= usize::from(relieves);
        relieves
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

    /// No thread could be started in the place of the one that does this job. False when that was not abandoned.
    pub(super) fn refused(&mut self, job: u64, reason: Text<'_>) -> bool {
        let is_abandoned = self.jobs.contains(&job);
        if is_abandoned {
            self.refused = Some(reason.to_owned());
        }
        is_abandoned
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
    /// Has what does not react to being interrupted answered and abandoned. `end_process` is called when nothing can go on beside
    /// it, with the reason in a sentence; it must tell whoever waits, and not return. Only the first one counts.
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

    /// Answers a job that does not react to being interrupted, and has another thread take over its lane. When to look what
    /// became of that.
    pub(super) fn abandon(&self, mut running: Running) -> Option<Instant> {
        let now = Instant::now();
        let mut board = self.board.lock();
        if board.abandoned.jobs.len() == MAX_ABANDONED {
            drop(board);
            self.end_process(&format!(
                "{MAX_ABANDONED} evaluations that do not react to being interrupted go on in threads of their own, and there is \
                 one more."
            ));
            return None;
        }
        let is_relieved = running.is_background() || running.is_parked() || running.lane == Lane::Background;
        let lane = if is_relieved { Lane::Background } else { running.lane };
        board.abandoned.jobs.push(running.id);
        board.abandoned.relieving += usize::from(lane == Lane::Evaluation);
        if let Look::Idle = board.abandoned.look {
            board.abandoned.look = Look::Due(now);
        }
        let job = self.job(JobKind::Abandon { target: running.id, lane }, "", "");
        board.push(Lane::Control, Request::new(&self.main, job, None, PendingReply::Nobody));
        let end = running.interrupted().map_or(JobEnd::Failed, JobEnd::Abandoned);
        let settled = std::mem::take(&mut running.settled);
        let answer = self.finish(&mut board, running, end);
        self.leave_board(board);
        self.deliver(std::iter::once(answer).chain(settled));
        Some(now)
    }

    /// Asks Lisp from time to time whether an abandoned thread keeps others from going on. Why the process is to end, if it
    /// is; `next` gets when to look again.
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
            board.push(Lane::Control, Request::new(&self.main, job, None, PendingReply::Nobody));
            board.abandoned.look = Look::Asked(now);
        }
        next.push(now + LOOK);
        None
    }
}
