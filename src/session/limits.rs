//! What the clock's thread looks after: time limits, the heap, and jobs that do not end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Inner;
use super::completion::Earlier;
use super::events::JobEnd;
use super::pending::PendingReply;
use super::scheduler::{Board, Request, Running};
use crate::image::heap::Usage;
use crate::image::{self, Interrupt, JobKind, Lane};
use crate::outcome::Clipped;

/// How long after its interruption a job may go on, if the image can be replaced.
pub(super) const INTERRUPTION_GRACE: Duration = Duration::from_secs(2);

/// How long after an interruption the next one comes, until the job ends.
const INTERRUPT_AGAIN: Duration = Duration::from_secs(1);

/// How long it may go on while garbage is being collected, which takes its time in a large heap.
const COLLECTION_GRACE: Duration = Duration::from_secs(60);

/// How often to look whether that is the case.
const COLLECTION_WATCH: Duration = Duration::from_millis(50);

/// How often the heap is looked at while evaluations run.
pub(super) const HEAP_WATCH: Duration = Duration::from_millis(10);

/// That a job was interrupted.
#[derive(Debug)]
pub(super) struct Interruption {
    /// Why, at first.
    pub(super) reason: Interrupt,
    since: Instant,
    /// When garbage was last seen being collected after that.
    collected_at: Option<Instant>,
}

impl Interruption {
    pub(super) fn new(reason: Interrupt) -> Self {
        Self { reason, since: Instant::now(), collected_at: None }
    }
}

/// How much of the heap an evaluation may keep, in bytes: SBCL dies when it has no room left to collect garbage in.
/// What earlier evaluations left counts, but always leaves some room, so that it can be let go of.
pub(super) fn heap_limit() -> Option<usize> {
    let Usage { kept, size, .. } = image::heap::usage()?;
    Some((size / 5 * 2).max(kept + size / 6))
}

impl Running {
    /// True when the heap is fuller than this job may leave it.
    fn fills_heap(&self) -> bool {
        let (Some(limit), Some(usage)) = (self.heap_limit, image::heap::usage()) else { return false };
        usage.kept > limit || usage.used > limit + usage.size / 4
    }

    /// Sees whether the job is to be abandoned for the heap. One that was interrupted for it may go on if it is not.
    pub(super) fn judge_heap(&mut self) -> bool {
        let full = self.fills_heap();
        if full {
            self.interruption.get_or_insert_with(|| Interruption::new(Interrupt::Heap));
        } else if self.filled_heap && self.interrupted() == Some(Interrupt::Heap) {
            self.interruption = None;
        }
        self.filled_heap = full;
        full
    }

    /// True when it should have ended long ago, and nothing can be done about that.
    fn is_stuck(&mut self, now: Instant) -> bool {
        let Some(Interruption { since, collected_at, .. }) = &mut self.interruption else { return false };
        if image::heap::is_collecting() && now < *since + COLLECTION_GRACE {
            *collected_at = Some(now);
        }
        now >= collected_at.unwrap_or(*since) + INTERRUPTION_GRACE
    }
}

impl Inner {
    /// Has the control lane interrupt a job, if that runs; false if not.
    pub(super) fn interrupt(&self, board: &mut Board, target: u64, reason: Interrupt) -> bool {
        let Some(running) = board.find(target) else { return false };
        running.give_up_search();
        let since = running.interruption.get_or_insert_with(|| Interruption::new(reason)).since;
        // It may come too early, or be held up by cleanup forms: ask again. Collecting a large heap's garbage,
        // which follows when that is full, is not to be disturbed.
        if reason != Interrupt::Heap {
            let again = Instant::now() + INTERRUPT_AGAIN;
            running.deadline = Some(again);
            self.clock.arm(again);
        }
        if self.observer.get().is_some() {
            self.clock.arm(since + INTERRUPTION_GRACE);
        }
        let job = self.job(JobKind::Interrupt { target, reason }, "", "");
        board.push(Lane::Control, Request::new(&self.main, job, None, PendingReply::Nobody));
        true
    }

    /// Interrupts what has run too long by now, or fills the heap. When to look again.
    pub(super) fn interrupt_overdue(&self, now: Instant) -> Option<Instant> {
        let mut board = self.board.lock();
        let mut next = Vec::new();
        let mut overdue = Vec::new();
        let mut settled = Vec::new();
        let mut stuck = None;
        let mut busy = false;
        for running in &mut board.running {
            // Once for the heap: unwinding takes its time, and so does collecting the garbage.
            if running.evaluates() && !running.filled_heap && running.fills_heap() {
                // Nobody can tell which one it is.
                running.filled_heap = true;
                overdue.push((running.id, Interrupt::Heap));
            }
            busy |= running.evaluates();
            match running.deadline {
                Some(deadline) if deadline <= now => {
                    overdue.push((running.id, running.interrupted().unwrap_or(Interrupt::Timeout)));
                }
                deadline => next.extend(deadline),
            }
            let Some(Interruption { since, collected_at, .. }) = running.interruption else { continue };
            let is_stuck = self.observer.get().is_some() && running.is_stuck(now);
            if since + INTERRUPTION_GRACE <= now && !is_stuck {
                // Nobody else answers the questions that wait for its end; but the next image does.
                settled.append(&mut running.settled);
            }
            if let Some(observer) = self.observer.get() {
                if is_stuck {
                    stuck = Some(running.id);
                } else {
                    next.push((collected_at.unwrap_or(since) + INTERRUPTION_GRACE).min(now + COLLECTION_WATCH));
                    if image::heap::is_collecting() && !running.is_background() {
                        observer.extended(Some(INTERRUPTION_GRACE));
                    }
                }
            }
        }
        for (id, reason) in overdue {
            self.interrupt(&mut board, id, reason);
        }
        let stuck = stuck.and_then(|id| board.take_running(id));
        self.leave_board(board);
        self.deliver(settled);
        if let Some(running) = stuck {
            self.give_up(running);
        }
        // Soon, as long as there are evaluations at all, so that beginning one need not wake the clock.
        let begun = self.begun.load(Ordering::Relaxed);
        let watch = self.watched.swap(begun, Ordering::Relaxed) != begun || busy;
        next.into_iter().chain(watch.then(|| now + HEAP_WATCH)).min()
    }

    /// Gives the image up, since an interrupted job does not end.
    fn give_up(&self, mut running: Running) {
        let Some(observer) = self.observer.get() else { return };
        // The next image answers them.
        std::mem::forget(std::mem::take(&mut running.settled));
        let end = running.interrupted().map_or(JobEnd::Failed, JobEnd::Interrupted);
        let is_background = running.is_background();
        match running.reply {
            PendingReply::Evaluation(mut builder, reply) if is_background => {
                std::mem::forget(reply);
                let before = Earlier::take(&mut builder);
                let mut outcome = builder.finish(end);
                if let Err(error) = &mut outcome.result {
                    let text = format!("{}. It did not end then: its image was replaced.", error.what_happened());
                    Arc::make_mut(error).message = Clipped::from(text);
                }
                self.evaluated_in_background(&mut self.board.lock(), &running.connection, before, end, &mut outcome);
                observer.stuck(None);
            }
            // Whoever waits for the answer gets it from the next image, and must not see this one give up.
            PendingReply::Evaluation(builder, reply) => {
                observer.stuck(Some(builder.finish(end)));
                std::mem::forget(reply);
            }
            PendingReply::Resumed(builder, reply) if !running.released => {
                observer.stuck(Some(builder.finish(end)));
                std::mem::forget(reply);
            }
            PendingReply::Inside(builder, reply) => {
                observer.stuck(Some(builder.finish(end)));
                std::mem::forget(reply);
            }
            _ => {
                let answer = self.finish(&mut self.board.lock(), running, JobEnd::Failed);
                self.deliver([answer]);
                // Time for that answer to be written.
                std::thread::sleep(Duration::from_millis(50));
                observer.stuck(None);
            }
        }
    }
}
