//! The work of the clock's thread, which enforces time limits and heap limits, and finds jobs that do not end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Inner;
use super::activity::{Activity, EvaluationActivity, RequestBody};
use super::completion::EarlierErrors;
use super::events::JobEnd;
use super::post_processing::FinishingEvaluation;
use super::scheduler::{Request, RunningJob, SchedulerState};
use crate::image::heap::HeapUsage;
use crate::image::interruption::{InterruptionAction, REACTION_TIME};
use crate::image::{self, InterruptReason, JobKind, Lane};
use crate::outcome::Clipped;

/// The extra time for an interrupted job that is delayed: by a garbage collection, which takes long in a large heap, or
/// because the process was stopped.
const DELAY_GRACE: Duration = Duration::from_secs(60);

/// The longest time between two checks in a running process. A longer time means that the process was stopped, by a
/// signal or with the whole machine. While jobs run, checks are [`HEAP_CHECK_INTERVAL`] apart.
const LATE_CHECK: Duration = Duration::from_millis(500);

/// The interval of checks while an interrupted job may wait for a garbage collection.
const COLLECTION_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The interval of heap checks while jobs run.
pub(super) const HEAP_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Returns the part of the heap that a job may keep, in bytes. SBCL ends the process when it has no room left
/// to collect garbage in. The data that earlier evaluations left count towards the limit, but some room always remains,
/// so that code can release these data.
pub(super) fn heap_limit() -> Option<usize> {
    let (kept, size) = image::heap::kept_and_size()?;
    Some((size / 5 * 2).max(kept + size / 6))
}

impl RunningJob {
    /// Returns true if the interruption is repeated until the job ends. A job that fills the heap is interrupted
    /// only once: the garbage collection that follows must not be disturbed.
    fn repeats_interruption(&self) -> bool {
        self.interrupt_reason() != Some(InterruptReason::Heap)
    }

    /// Returns true if the heap, with this usage, contains more data than this job's limit allows.
    fn fills_heap(&self, usage: Option<HeapUsage>) -> bool {
        let (Some(limit), Some(usage)) = (self.heap_limit, usage) else { return false };
        usage.kept > limit || usage.used > limit + usage.size / 4
    }

    /// Checks the heap, and returns true if the job must end because the heap is full. Withdraws an earlier
    /// interruption for the heap if there is room again.
    pub(super) fn check_heap(&mut self) -> bool {
        let full = self.fills_heap(image::heap::usage());
        if full {
            self.interruption.request(InterruptReason::Heap, Duration::ZERO, Instant::now());
        } else if self.filled_heap && self.interrupt_reason() == Some(InterruptReason::Heap) {
            self.interruption.withdraw();
        }
        self.filled_heap = full;
        full
    }

    /// Returns the time at which an interrupted job counts as stuck unless it begins to unwind, or ends, earlier. The
    /// image of a stuck job must be replaced; without a supervisor, the job's thread is abandoned. Returns `None` for a
    /// job that is not interrupted.
    fn stuck_at(&mut self, now: Instant) -> Option<Instant> {
        let was_stopped = self.checked_at.replace(now).is_some_and(|last| now > last + LATE_CHECK);
        let (since, deadline) = self.interruption.request_time().zip(self.interruption.deadline())?;
        if (was_stopped || image::heap::is_collecting()) && now < since + DELAY_GRACE {
            self.delayed_at = Some(now);
        }
        let delayed_at = self.delayed_at.filter(|at| *at >= since);
        Some(delayed_at.map_or(deadline, |at| deadline.max(at + REACTION_TIME)))
    }
}

impl Inner {
    /// Interrupts a job through the control lane. Returns false if the job does not run.
    pub(super) fn interrupt(&self, scheduler: &mut SchedulerState, target: u64, reason: InterruptReason) -> bool {
        let Some(running) = scheduler.find(target) else { return false };
        running.cancel_hint_search();
        let now = Instant::now();
        let interruption = &mut running.interruption;
        // A job that fills the heap, or already unwinds a held evaluation, gets no grace period.
        let full = reason == InterruptReason::Heap || interruption.reason() == Some(InterruptReason::Heap);
        let cleanup = if full || running.activity.unwinds_held() { Duration::ZERO } else { self.limits.lock().cleanup };
        match reason {
            InterruptReason::Heap => interruption.end_grace(now),
            // A job that was interrupted for the heap may also exceed its time limit or be cancelled: the new reason
            // replaces the old reason.
            _ => {
                if full {
                    interruption.withdraw();
                }
                running.deadline = None;
            }
        }
        interruption.request(reason, cleanup, now);
        if let Some(deadline) = interruption.deadline() {
            self.clock.arm(deadline);
        }
        let next_action = interruption.next_action(now);
        if let InterruptionAction::Wait(next) = next_action {
            self.clock.arm(next);
        }
        match (next_action, reason) {
            (InterruptionAction::Send, _) => self.send_interruption(scheduler, target, reason),
            // The job's thread has been interrupted already. An interruption of job 0, which has no thread, only
            // ends the user's threads, which may fill the heap, too.
            (_, InterruptReason::Heap) => self.send_interruption(scheduler, 0, reason),
            _ => {}
        }
        true
    }

    /// Queues a control job that interrupts the thread of job `target`. Job 0 has no thread. With the reason `Heap`,
    /// the control job also ends the user's threads.
    pub(super) fn send_interruption(&self, scheduler: &mut SchedulerState, target: u64, reason: InterruptReason) {
        let job = self.job(JobKind::Interrupt { target, reason }, "", "");
        scheduler.send_interruption(target, Request::new(&self.own_connection, job, None, RequestBody::Control));
    }

    /// Records that a job's thread has taken its interruption or, if `unwinds` is true, that the thread begins to unwind.
    pub(super) fn record_interruption(&self, running: &mut RunningJob, unwinds: bool) {
        let now = Instant::now();
        if unwinds {
            running.interruption.record_unwinding(now);
        } else {
            running.interruption.record_taken(now);
        }
        let Some(deadline) = running.interruption.deadline() else { return };
        self.clock.arm(deadline);
        if running.repeats_interruption()
            && let InterruptionAction::Wait(next) = running.interruption.next_action(now)
        {
            self.clock.arm(next);
        }
        if unwinds {
            self.report_deadline(running, deadline - now);
        }
    }

    /// Reports to the observer that the foreground job, or an inspection, has a new deadline in the time `more`.
    pub(super) fn report_deadline(&self, running: &RunningJob, more: Duration) {
        let Some(observer) = self.observer.get() else { return };
        if running.is_foreground() {
            observer.deadline_changed(Some(more));
        } else if running.lane == Lane::Inspection {
            observer.inspection_deadline_changed(more);
        }
    }

    /// Interrupts the jobs that exceed their time limit or the heap limit, abandons or reports a job that is stuck, and
    /// ends cancelled evaluations whose post-processing continues. Tries again to start a thread that could not be started.
    /// Returns the time of the next check.
    pub(super) fn interrupt_overdue(&self, now: Instant) -> Option<Instant> {
        // Counting the pages of a large heap takes time, so this is done once, without the lock.
        let heap_usage = image::heap::usage();
        let mut scheduler = self.scheduler.lock();
        scheduler.hand_over_inspection_lane(now);
        let mut next = Vec::new();
        let mut overdue = Vec::new();
        let mut again = Vec::new();
        let mut settled = Vec::new();
        let mut stuck = None;
        let busy = !scheduler.running.is_empty();
        for running in &mut scheduler.running {
            // Each job is interrupted once for the heap: unwinding and garbage collection take time.
            if !running.filled_heap && running.fills_heap(heap_usage) {
                // Every running job is interrupted: the host cannot tell which job fills the heap.
                running.filled_heap = true;
                overdue.push((running.id, InterruptReason::Heap));
            }
            match running.deadline {
                Some(deadline) if deadline <= now => overdue.push((running.id, InterruptReason::Timeout)),
                deadline => next.extend(deadline),
            }
            if let (true, Some(reason)) = (running.repeats_interruption(), running.interrupt_reason()) {
                match running.interruption.next_action(now) {
                    InterruptionAction::Send => again.push((running.id, reason)),
                    InterruptionAction::Wait(until) => next.push(until),
                    InterruptionAction::Idle => {}
                }
            }
            settled.append(&mut running.take_overdue_error_queries(now));
            next.extend(running.error_queries.iter().map(|query| query.until).min());
            let Some(stuck_at) = running.stuck_at(now) else { continue };
            if (self.observer.get().is_some() || self.abandons_stuck_jobs()) && stuck_at <= now {
                stuck = Some(running.id);
                continue;
            }
            if self.observer.get().is_some() || self.abandons_stuck_jobs() {
                next.push(stuck_at.min(now + COLLECTION_CHECK_INTERVAL));
            }
            if image::heap::is_collecting() {
                self.report_deadline(running, stuck_at.saturating_duration_since(now));
            }
        }
        settled.extend(self.end_overdue_post_processing(&mut scheduler, now));
        next.extend(scheduler.finishing.iter().filter_map(FinishingEvaluation::ends_at));
        next.extend(scheduler.next_thread_attempt(now));
        for (id, reason) in overdue {
            self.interrupt(&mut scheduler, id, reason);
        }
        for (id, reason) in again {
            self.send_interruption(&mut scheduler, id, reason);
        }
        let mut stuck = stuck.and_then(|id| scheduler.take_running(id));
        let mut end_reason = self.check_abandoned(&mut scheduler, now, &mut next);
        if self.abandons_stuck_jobs()
            && let Some(running) = stuck.take()
        {
            end_reason = end_reason.or(self.abandon_job(&mut scheduler, running, &mut settled));
            next.push(now);
        }
        self.unlock_and_notify(scheduler);
        self.deliver(settled);
        if let Some(reason) = end_reason {
            self.end_process(&reason);
        }
        if let Some(running) = stuck {
            self.report_stuck(running);
        }
        // While evaluations keep beginning, the clock stays on, so that a new evaluation need not wake the clock's
        // thread.
        let begun = self.evaluations_begun.load(Ordering::Relaxed);
        let watch = self.begun_at_last_check.swap(begun, Ordering::Relaxed) != begun || busy;
        next.into_iter().chain(watch.then(|| now + HEAP_CHECK_INTERVAL)).min()
    }

    /// Reports a job that does not end although it was interrupted, so that the image is replaced.
    fn report_stuck(&self, mut running: RunningJob) {
        let Some(observer) = self.observer.get() else { return };
        // The next image answers these queries. Dropping the queries here would send answers.
        std::mem::forget(std::mem::take(&mut running.error_queries));
        let end = running.interrupt_reason().map_or(JobEnd::Failed, JobEnd::Interrupted);
        let why = running.stuck_reason();
        let is_background = running.is_background();
        match running.activity {
            Activity::Evaluate(EvaluationActivity { mut builder, reply, .. }) if is_background => {
                std::mem::forget(reply);
                let earlier = EarlierErrors::take(&mut builder);
                let mut outcome = builder.finish_unended(end);
                if let Err(error) = &mut outcome.result {
                    let text =
                        format!("{}. The evaluation did not end, so its image was replaced.", error.message_clause());
                    Arc::make_mut(error).message = Clipped::from(text);
                }
                self.record_background_evaluation(
                    &mut self.scheduler.lock(),
                    &running.connection,
                    earlier,
                    end,
                    &mut outcome,
                );
                observer.stuck(None, why);
            }
            // The next image answers the call. The reply must not be dropped here: dropping it would send an answer.
            Activity::Evaluate(EvaluationActivity { builder, reply, .. }) => {
                observer.stuck(Some(builder.finish_unended(end)), why);
                std::mem::forget(reply);
            }
            Activity::Held(about) if !about.is_aborted() && about.request.outcome_builder().is_some() => {
                let builder = about.request.into_builder_without_reply();
                observer.stuck(builder.map(|builder| builder.finish_unended(end)), why);
            }
            _ => {
                let answer = self.finish(&mut self.scheduler.lock(), running, end);
                self.deliver([answer]);
                // Leave time for the answer to be written before the image is replaced.
                std::thread::sleep(Duration::from_millis(50));
                observer.stuck(None, why);
            }
        }
    }
}
