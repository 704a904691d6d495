//! What the clock's thread looks after: time limits, the heap, and jobs that do not end.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Inner;
use super::running::Build;
use crate::image::heap::Usage;
use crate::image::{self, Interrupt, Lane};

/// How long after its interruption a job may go on, if the image can be replaced.
pub(super) const INTERRUPTION_GRACE: Duration = Duration::from_secs(2);

/// How long after an interruption the next one comes, until the job ends.
pub(super) const INTERRUPT_AGAIN: Duration = Duration::from_secs(1);

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

impl Inner {
    /// Interrupts an evaluation that fills the heap. When to look again: soon, as long as there are evaluations at all,
    /// so that beginning one need not wake the clock.
    fn watch_heap(&self, now: Instant) -> Option<Instant> {
        let mut full = None;
        let busy = match self.running[Lane::Evaluation as usize].lock().as_mut() {
            Some(running) => {
                // Once: unwinding takes its time, and so does collecting the garbage.
                if !running.filled_heap && running.fills_heap() {
                    running.filled_heap = true;
                    full = Some(running.id);
                }
                true
            }
            None => false,
        };
        if let Some(id) = full {
            self.interrupt(Lane::Evaluation, id, Interrupt::Heap);
        }
        let begun = self.begun.load(Ordering::Relaxed);
        (self.watched.swap(begun, Ordering::Relaxed) != begun || busy).then(|| now + HEAP_WATCH)
    }

    /// Interrupts what has run too long by now. When to look again.
    pub(super) fn interrupt_overdue(&self, now: Instant) -> Option<Instant> {
        let mut next = self.watch_heap(now);
        let settled =
            self.running[Lane::Evaluation as usize].lock().as_mut().and_then(|running| running.unsettled(now));
        settled.into_iter().flatten().for_each(|question| question());
        for lane in [Lane::Evaluation, Lane::Inspection] {
            let mut overdue = None;
            next = next.into_iter().chain(self.give_up_stuck(lane, now)).min();
            if let Some(running) = self.running[lane as usize].lock().as_mut()
                && let Some(deadline) = running.deadline
            {
                if deadline <= now {
                    overdue = Some((running.id, running.interrupted.unwrap_or(Interrupt::Timeout)));
                } else {
                    next = next.into_iter().chain([deadline]).min();
                }
            }
            if let Some((id, reason)) = overdue {
                self.interrupt(lane, id, reason);
            }
        }
        next
    }

    /// Gives the image up when an interrupted job does not end. When to look again.
    fn give_up_stuck(&self, lane: Lane, now: Instant) -> Option<Instant> {
        let witness = self.witness.get()?;
        let mut slot = self.running[lane as usize].lock();
        let running = slot.as_mut()?;
        let since = running.interrupted_at?;
        if image::heap::is_collecting() && now < since + COLLECTION_GRACE {
            running.collected_at = Some(now);
            witness.extended(Some(INTERRUPTION_GRACE));
        }
        let end = running.collected_at.unwrap_or(since) + INTERRUPTION_GRACE;
        if now < end {
            return Some(end.min(now + COLLECTION_WATCH));
        }
        let mut running = slot.take()?;
        drop(slot);
        // The next image answers them.
        std::mem::forget(std::mem::take(&mut running.settled));
        match running.build {
            // Whoever waits for the answer gets it from the next image, and must not see this one give up.
            Build::Outcome(builder, reply) => {
                witness.stuck(Some(builder.finish(false, running.interrupted)));
                std::mem::forget(reply);
            }
            Build::Resumed(builder, reply) if !running.released => {
                witness.stuck(Some(builder.finish(false, running.interrupted)));
                std::mem::forget(reply);
            }
            Build::Inside(builder, reply) => {
                witness.stuck(Some(builder.finish(false, running.interrupted)));
                std::mem::forget(reply);
            }
            _ => {
                self.finish(running, Err(false))();
                // Time for that answer to be written.
                std::thread::sleep(Duration::from_millis(50));
                witness.stuck(None);
            }
        }
        None
    }
}
