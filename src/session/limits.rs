//! What the clock's thread looks after: time limits, the heap, and jobs that do not end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Inner;
use super::activity::{Activity, Asked, Evaluate};
use super::completion::Earlier;
use super::events::JobEnd;
use super::scheduler::{Board, Request, Running};
use crate::image::heap::Usage;
use crate::image::interruption::{REACTION, Step, Stuck};
use crate::image::{self, Interrupt, JobKind};
use crate::outcome::Clipped;

/// How long it may go on while garbage is being collected, which takes its time in a large heap.
const COLLECTION_GRACE: Duration = Duration::from_secs(60);

/// How often to look whether that is the case.
const COLLECTION_WATCH: Duration = Duration::from_millis(50);

/// How often the heap is looked at while evaluations run.
pub(super) const HEAP_WATCH: Duration = Duration::from_millis(10);

/// How much of the heap an evaluation may keep, in bytes: SBCL dies when it has no room left to collect garbage in.
/// What earlier evaluations left counts, but always leaves some room, so that it can be let go of.
pub(super) fn heap_limit() -> Option<usize> {
    let Usage { kept, size, .. } = image::heap::usage()?;
    Some((size / 5 * 2).max(kept + size / 6))
}

impl Running {
    /// True when it is interrupted again as long as it goes on. Collecting a large heap's garbage, which follows when that is
    /// full, is not to be disturbed.
    fn repeats_interruption(&self) -> bool {
        self.interrupted() != Some(Interrupt::Heap)
    }

    /// True when the heap is fuller than this job may leave it.
    fn fills_heap(&self) -> bool {
        let (Some(limit), Some(usage)) = (self.heap_limit, image::heap::usage()) else { return false };
        usage.kept > limit || usage.used > limit + usage.size / 4
    }

    /// Sees whether the job is to be abandoned for the heap. One that was interrupted for it may go on if it is not.
    pub(super) fn judge_heap(&mut self) -> bool {
        let full = self.fills_heap();
        if full {
            self.interruption.want(Interrupt::Heap, Duration::ZERO, Instant::now());
        } else if self.filled_heap && self.interrupted() == Some(Interrupt::Heap) {
            self.interruption.withdraw();
        }
        self.filled_heap = full;
        full
    }

    /// When it is stuck, so that the image must be replaced if it can be: it is interrupted and has neither begun to unwind nor
    /// ended. `None` while it is not interrupted.
    fn stuck_at(&mut self, now: Instant) -> Option<Instant> {
        let (since, due) = self.interruption.since().zip(self.interruption.due())?;
        if image::heap::is_collecting() && now < since + COLLECTION_GRACE {
            self.collected_at = Some(now);
        }
        let collected_at = self.collected_at.filter(|at| *at >= since);
        Some(collected_at.map_or(due, |at| due.max(at + REACTION)))
    }
}

impl Inner {
    /// Has the control lane interrupt a job, if that runs; false if not.
    pub(super) fn interrupt(&self, board: &mut Board, target: u64, reason: Interrupt) -> bool {
        let Some(running) = board.find(target) else { return false };
        running.give_up_search();
        let now = Instant::now();
        let interruption = &mut running.interruption;
        // Neither what fills the heap nor what unwinds already has a grace period.
        let full = reason == Interrupt::Heap || interruption.reason() == Some(Interrupt::Heap);
        let cleanup = if full || running.activity.unwinds_held() { Duration::ZERO } else { self.limits.lock().cleanup };
        match reason {
            Interrupt::Heap => interruption.end_grace(now),
            // It may be that it has used up its time as well.
            _ => {
                if full {
                    interruption.withdraw();
                }
                running.deadline = None;
            }
        }
        interruption.want(reason, cleanup, now);
        if let Some(due) = interruption.due() {
            self.clock.arm(due);
        }
        let step = interruption.step(now);
        if let Step::Wait(next) = step {
            self.clock.arm(next);
        }
        match (step, reason) {
            (Step::Send, _) => self.send_interruption(board, target, reason),
            // The threads that may fill it are ended all the same.
            (_, Interrupt::Heap) => self.send_interruption(board, 0, reason),
            _ => {}
        }
        true
    }

    /// Has the control lane interrupt the thread of job `target`, if there is one.
    pub(super) fn send_interruption(&self, board: &mut Board, target: u64, reason: Interrupt) {
        let job = self.job(JobKind::Interrupt { target, reason }, "", "");
        board.send_interruption(target, Request::new(&self.main, job, None, Asked::Control));
    }

    /// Notes that a job's thread has taken its interruption, and, if it begins to unwind by that, that it does.
    pub(super) fn interrupted(&self, running: &mut Running, unwinds: bool) {
        let now = Instant::now();
        if unwinds {
            running.interruption.unwinds(now);
        } else {
            running.interruption.taken(now);
        }
        let Some(due) = running.interruption.due() else { return };
        self.clock.arm(due);
        if running.repeats_interruption()
            && let Step::Wait(next) = running.interruption.step(now)
        {
            self.clock.arm(next);
        }
        if unwinds
            && !running.is_background()
            && let Some(observer) = self.observer.get()
        {
            observer.extended(Some(due - now));
        }
    }

    /// Interrupts what has run too long by now, or fills the heap. When to look again.
    pub(super) fn interrupt_overdue(&self, now: Instant) -> Option<Instant> {
        let mut board = self.board.lock();
        let mut next = Vec::new();
        let mut overdue = Vec::new();
        let mut again = Vec::new();
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
                Some(deadline) if deadline <= now => overdue.push((running.id, Interrupt::Timeout)),
                deadline => next.extend(deadline),
            }
            if let (true, Some(reason)) = (running.repeats_interruption(), running.interrupted()) {
                match running.interruption.step(now) {
                    Step::Send => again.push((running.id, reason)),
                    Step::Wait(until) => next.push(until),
                    Step::Rest => {}
                }
            }
            settled.append(&mut running.take_overdue_questions(now));
            next.extend(running.questions.iter().map(|question| question.until).min());
            let Some(stuck_at) = running.stuck_at(now) else { continue };
            if (self.observer.get().is_some() || self.abandons()) && stuck_at <= now {
                stuck = Some(running.id);
                continue;
            }
            if self.observer.get().is_some() || self.abandons() {
                next.push(stuck_at.min(now + COLLECTION_WATCH));
            }
            if let Some(observer) = self.observer.get()
                && image::heap::is_collecting()
                && !running.is_background()
            {
                observer.extended(Some(stuck_at - now));
            }
        }
        for (id, reason) in overdue {
            self.interrupt(&mut board, id, reason);
        }
        for (id, reason) in again {
            self.send_interruption(&mut board, id, reason);
        }
        let mut stuck = stuck.and_then(|id| board.take_running(id));
        let mut standstill = self.look_at_abandoned(&mut board, now, &mut next);
        if self.abandons()
            && let Some(running) = stuck.take()
        {
            standstill = standstill.or(self.abandon(&mut board, running, &mut settled));
            next.push(now);
        }
        self.leave_board(board);
        self.deliver(settled);
        if let Some(reason) = standstill {
            self.end_process(&reason);
        }
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
        std::mem::forget(std::mem::take(&mut running.questions));
        let end = running.interrupted().map_or(JobEnd::Failed, JobEnd::Interrupted);
        let why = if running.interruption.is_unwinding() { Stuck::Unwinding } else { Stuck::Unmoved };
        let is_background = running.is_background();
        match running.activity {
            Activity::Evaluate(Evaluate { mut builder, reply, .. }) if is_background => {
                std::mem::forget(reply);
                let before = Earlier::take(&mut builder);
                let mut outcome = builder.finish(end);
                if let Err(error) = &mut outcome.result {
                    let text = format!("{}. It did not end then: its image was replaced.", error.what_happened());
                    Arc::make_mut(error).message = Clipped::from(text);
                }
                self.evaluated_in_background(&mut self.board.lock(), &running.connection, before, end, &mut outcome);
                observer.stuck(None, why);
            }
            // Whoever waits for the answer gets it from the next image, and must not see this one give up.
            Activity::Evaluate(Evaluate { builder, reply, .. }) => {
                observer.stuck(Some(builder.finish(end)), why);
                std::mem::forget(reply);
            }
            Activity::Held(about) if !about.is_aborted() && about.request.outcome().is_some() => {
                let builder = about.request.leave_to_the_next_image();
                observer.stuck(builder.map(|builder| builder.finish(end)), why);
            }
            _ => {
                let answer = self.finish(&mut self.board.lock(), running, JobEnd::Failed);
                self.deliver([answer]);
                // Time for that answer to be written.
                std::thread::sleep(Duration::from_millis(50));
                observer.stuck(None, why);
            }
        }
    }
}
