//! Automatic checkpoints, which the server saves without a request while the session is idle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::save::Saver;
use super::store::Checkpoints;

/// The idle time before an automatic save.
const IDLE_TIME: Duration = Duration::from_secs(2);
/// The shortest time between two automatic saves.
const MIN_SAVE_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of bytes that automatic saves write per minute.
const MAX_BYTES_PER_MINUTE: u64 = 500 << 20;
const MINUTE: Duration = Duration::from_secs(60);
/// Bytes of disk and of memory that must stay free beyond the size of the image.
const MIN_FREE_BYTES: u64 = 512 << 20;

/// A decision of the thread that saves automatically.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SaveDecision {
    /// Save the image now.
    Save,
    /// Wait until this moment, then decide again.
    Wait(Instant),
    /// Wait for the next evaluation.
    WaitForEvaluation,
}

/// The rate limiter of automatic saves.
#[derive(Debug, Default)]
struct SaveRateLimiter {
    /// The earliest time of the next save; `None` before the first save.
    next: Option<Instant>,
}

impl SaveRateLimiter {
    /// Decides what to do at `now`. `ended` is the time at which the last unsaved evaluation ended, `busy` is true while an
    /// evaluation runs or is held, and `has_room` returns true unless disk or memory is short.
    fn decide(
        &self,
        now: Instant,
        ended: Option<Instant>,
        busy: bool,
        has_room: impl FnOnce() -> bool,
    ) -> SaveDecision {
        let Some(ended) = ended else { return SaveDecision::WaitForEvaluation };
        let earliest = self.next.map_or(ended + IDLE_TIME, |next| next.max(ended + IDLE_TIME));
        if now < earliest {
            SaveDecision::Wait(earliest)
        } else if busy {
            // The end of a background evaluation does not wake this thread.
            SaveDecision::Wait(now + IDLE_TIME)
        } else if !has_room() {
            SaveDecision::Wait(now + MIN_SAVE_INTERVAL)
        } else {
            SaveDecision::Save
        }
    }

    /// Records that a save, complete or failed, wrote about `bytes` bytes and ended at `now`.
    fn record_write(&mut self, now: Instant, bytes: u64) {
        let pause = MINUTE.as_secs_f64() * bytes as f64 / MAX_BYTES_PER_MINUTE as f64;
        self.next = Some(now + MIN_SAVE_INTERVAL.max(Duration::from_secs_f64(pause)));
    }
}

/// The trigger of automatic saves: the end of an evaluation, or the deletion of a checkpoint, wakes the thread that saves.
#[derive(Debug, Default)]
pub(crate) struct AutosaveTrigger {
    /// The time at which the last evaluation ended; `None` when there is no unsaved evaluation.
    last: Mutex<Option<Instant>>,
    /// Notified when `last` changes from `None` to a time.
    changed: Condvar,
    /// The number of the newest evaluation at the last automatic save or, before that, at the start; `None` if a checkpoint
    /// was deleted since.
    saved: Mutex<Option<u64>>,
}

impl AutosaveTrigger {
    /// Records the end of an evaluation.
    pub(crate) fn record_evaluation_end(&self) {
        let first = self.last.lock().replace(Instant::now()).is_none();
        if first {
            self.changed.notify_one();
        }
    }

    /// Records the deletion of a checkpoint. Perhaps no other checkpoint contains the image's values, so the image is
    /// saved even if nothing more is evaluated.
    pub(crate) fn record_deletion(&self) {
        *self.saved.lock() = None;
        self.record_evaluation_end();
    }

    /// Calls `decide` with the time at which the last unsaved evaluation ended, until `decide` returns
    /// [`SaveDecision::Save`]. Then marks that evaluation as saved. The thread sleeps while nothing is evaluated.
    fn wait_to_save(&self, decide: impl Fn(Option<Instant>) -> SaveDecision) {
        loop {
            let last = *self.last.lock();
            // `decide` is called without the lock on `last`, because a caller of `record_evaluation_end`, which takes that
            // lock, may hold other locks that `decide` takes.
            let decision = decide(last);
            let mut last = self.last.lock();
            match decision {
                SaveDecision::Save => {
                    *last = None;
                    return;
                }
                SaveDecision::Wait(until) => drop(self.changed.wait_until(&mut last, until)),
                SaveDecision::WaitForEvaluation if last.is_none() => self.changed.wait(&mut last),
                SaveDecision::WaitForEvaluation => {}
            }
        }
    }
}

/// Starts the thread that saves the image after the evaluations that `autosave_trigger` reports, and deletes automatic
/// checkpoints when all checkpoints together take more than `space` bytes.
pub(crate) fn start_autosave(saver: Saver, autosave_trigger: Arc<AutosaveTrigger>, space: u64) {
    // The number is read before the thread starts, so that an evaluation that ends before the thread runs is saved, too.
    *autosave_trigger.saved.lock() = Some(saver.session.newest_evaluation_number());
    let run = move || {
        let mut pace = SaveRateLimiter::default();
        loop {
            autosave_trigger.wait_to_save(|ended| {
                pace.decide(Instant::now(), ended, saver.session.is_busy(), || has_room(&saver.checkpoints))
            });
            let evaluations = saver.session.newest_evaluation_number();
            if *autosave_trigger.saved.lock() == Some(evaluations) {
                continue;
            }
            let checkpoint = saver.save_automatically();
            // A failed save may have written as many bytes as a complete save.
            pace.record_write(
                Instant::now(),
                checkpoint.as_ref().map_or_else(used_heap_bytes, |checkpoint| checkpoint.bytes),
            );
            if checkpoint.is_some() {
                *autosave_trigger.saved.lock() = Some(evaluations);
                saver.checkpoints.make_room(space);
            } else {
                autosave_trigger.record_evaluation_end();
            }
        }
    };
    // If the thread cannot be started, only automatic saves are missing.
    let _ = std::thread::Builder::new().name("sbcl-mcp-auto".to_owned()).spawn(run);
}

/// Returns the number of used bytes in the heap, which is about the size of a saved image.
fn used_heap_bytes() -> u64 {
    u64::try_from(crate::image::heap::usage().map_or(0, |usage| usage.used)).unwrap_or(u64::MAX)
}

/// Returns true while neither disk nor memory is short.
fn has_room(checkpoints: &Checkpoints) -> bool {
    is_space_sufficient(used_heap_bytes(), checkpoints.free_space(), free_memory())
}

/// Returns true when an image of `used` bytes may be saved. `disk` and `memory` are the free bytes; `None` if unknown.
fn is_space_sufficient(used: u64, disk: Option<u64>, memory: Option<u64>) -> bool {
    [disk, memory].into_iter().flatten().all(|free| free > used.saturating_add(MIN_FREE_BYTES))
}

/// Returns the bytes of available memory, as the kernel estimates them.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_image_is_saved_once_it_has_been_idle() {
        let begin = Instant::now();
        let pace = SaveRateLimiter::default();
        let decide = |now, ended| pace.decide(now, ended, false, || true);
        assert_eq!(decide(begin, None), SaveDecision::WaitForEvaluation);
        assert_eq!(decide(begin + SECOND, Some(begin)), SaveDecision::Wait(begin + IDLE_TIME));
        assert_eq!(decide(begin + IDLE_TIME, Some(begin)), SaveDecision::Save);
    }

    #[test]
    fn a_save_waits_for_evaluations_free_space_and_the_rate_limit() {
        let now = Instant::now() + 100 * SECOND;
        let ended = Some(now - IDLE_TIME);
        let mut pace = SaveRateLimiter::default();
        let room_is_not_checked = || unreachable!("it costs something");
        assert_eq!(pace.decide(now, ended, true, room_is_not_checked), SaveDecision::Wait(now + IDLE_TIME));
        assert_eq!(pace.decide(now, ended, false, || false), SaveDecision::Wait(now + MIN_SAVE_INTERVAL));
        // A small image is saved every 30 seconds, an image of a gigabyte every two minutes.
        for (bytes, seconds) in [(40 << 20, 30), (250 << 20, 30), (500 << 20, 60), (1000 << 20, 120)] {
            pace.record_write(now - SECOND, bytes);
            let next = now - SECOND + seconds * SECOND;
            assert_eq!(pace.decide(now, ended, false, room_is_not_checked), SaveDecision::Wait(next));
            assert_eq!(pace.decide(next, ended, false, || true), SaveDecision::Save);
            assert_eq!(pace.decide(next, Some(next), false, || true), SaveDecision::Wait(next + IDLE_TIME));
        }
    }

    #[test]
    fn an_image_is_not_saved_when_disk_or_memory_is_short() {
        let used = 1 << 30;
        let (short, enough) = (Some(used + MIN_FREE_BYTES), Some(used + MIN_FREE_BYTES + 1));
        assert!(
            is_space_sufficient(used, enough, enough)
                && is_space_sufficient(used, None, None)
                && is_space_sufficient(used, enough, None)
        );
        assert!(
            !is_space_sufficient(used, short, enough)
                && !is_space_sufficient(used, enough, short)
                && !is_space_sufficient(used, None, short)
        );
        assert!(!is_space_sufficient(u64::MAX, enough, enough));
    }

    /// Generates a moment of a session: the milliseconds since the last moment, whether an evaluation has ended,
    /// whether other evaluations run, whether there is room, and the size of a saved image in bytes.
    fn moment() -> impl Strategy<Value = (u64, bool, bool, bool, u64)> {
        (0..40_000_u64, any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.8), 0..(2_u64 << 30))
    }

    proptest! {
        #[test]
        fn automatic_saves_keep_their_interval_and_rate(moments in prop::collection::vec(moment(), 1..200)) {
            let mut now = Instant::now();
            let mut pace = SaveRateLimiter::default();
            let mut ended = None;
            let mut saves: Vec<(Instant, u64)> = Vec::new();
            for (milliseconds, has_ended, busy, has_room, bytes) in moments {
                now += Duration::from_millis(milliseconds);
                if has_ended {
                    ended = Some(now);
                }
                match pace.decide(now, ended, busy, || has_room) {
                    SaveDecision::WaitForEvaluation => prop_assert_eq!(ended, None),
                    // The thread never spins, and never waits longer than the rate limit and the reason to wait
                    // require.
                    SaveDecision::Wait(until) => {
                        prop_assert!(until > now && ended.is_some());
                        let paused = saves.last().map_or(now, |(at, bytes)| {
                            let pause = MINUTE.as_secs_f64() * *bytes as f64 / MAX_BYTES_PER_MINUTE as f64;
                            *at + MIN_SAVE_INTERVAL.max(Duration::from_secs_f64(pause))
                        });
                        let reason = if has_room { IDLE_TIME } else { MIN_SAVE_INTERVAL };
                        prop_assert!(until <= paused.max(now + reason));
                    }
                    SaveDecision::Save => {
                        prop_assert!(!busy && has_room && ended.is_some_and(|ended| now - ended >= IDLE_TIME));
                        prop_assert!(saves.last().is_none_or(|(at, _)| now - *at >= MIN_SAVE_INTERVAL));
                        saves.push((now, bytes));
                        pace.record_write(now, bytes);
                        ended = None;
                    }
                }
            }
            // Between any two saves the bytes written stay within the rate.
            for (first, (begin, _)) in saves.iter().enumerate() {
                let mut written = 0;
                for (at, bytes) in &saves[first..] {
                    let allowed = (*at - *begin).as_secs_f64() * MAX_BYTES_PER_MINUTE as f64 / MINUTE.as_secs_f64();
                    prop_assert!(written as f64 <= allowed + 1.0);
                    written += bytes;
                }
            }
        }
    }
}
