//! Automatic checkpoints, which the server saves without a request while the session is idle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::save::Saver;
use super::store::Checkpoints;

/// The idle time before an automatic save.
const QUIET: Duration = Duration::from_secs(2);
/// The shortest time between two automatic saves.
const INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of bytes that automatic saves write per minute.
const RATE: u64 = 500 << 20;
const MINUTE: Duration = Duration::from_secs(60);
/// Bytes of disk and of memory that must stay free beyond the size of the image.
const RESERVE: u64 = 512 << 20;

/// A decision of the thread that saves automatically.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SaveDecision {
    /// Save the image now.
    Save,
    /// Wait until this moment, then decide again.
    Wait(Instant),
    /// Wait for the next evaluation.
    Rest,
}

/// The rate limiter of automatic saves.
#[derive(Debug, Default)]
struct Pace {
    /// The earliest time of the next save; `None` before the first save.
    next: Option<Instant>,
}

impl Pace {
    /// Decides what to do at `now`. `ended` is the end of the last unsaved evaluation, `busy` is true while an evaluation
    /// runs or is held, and `has_room` returns true unless disk or memory is short.
    fn decide(
        &self,
        now: Instant,
        ended: Option<Instant>,
        busy: bool,
        has_room: impl FnOnce() -> bool,
    ) -> SaveDecision {
        let Some(ended) = ended else { return SaveDecision::Rest };
        let earliest = self.next.map_or(ended + QUIET, |next| next.max(ended + QUIET));
        if now < earliest {
            SaveDecision::Wait(earliest)
        } else if busy {
            // The end of a background evaluation does not wake this thread.
            SaveDecision::Wait(now + QUIET)
        } else if !has_room() {
            SaveDecision::Wait(now + INTERVAL)
        } else {
            SaveDecision::Save
        }
    }

    /// Records that a save has written `bytes` by `now`, even if the save failed.
    fn wrote(&mut self, now: Instant, bytes: u64) {
        let pause = MINUTE.as_secs_f64() * bytes as f64 / RATE as f64;
        self.next = Some(now + INTERVAL.max(Duration::from_secs_f64(pause)));
    }
}

/// The trigger of automatic saves: the end of an evaluation wakes the thread that saves.
#[derive(Debug, Default)]
pub(crate) struct AutosaveTrigger {
    /// The end of the last evaluation; `None` when that evaluation is saved.
    last: Mutex<Option<Instant>>,
    /// Notified when `last` changes from `None` to a time.
    changed: Condvar,
}

impl AutosaveTrigger {
    /// Records the end of an evaluation.
    pub(crate) fn ended(&self) {
        let first = self.last.lock().replace(Instant::now()).is_none();
        if first {
            self.changed.notify_one();
        }
    }

    /// Waits until `decide`, called with the time of the last unsaved evaluation, returns [`SaveDecision::Save`], and
    /// marks that evaluation as saved. The thread sleeps while nothing is evaluated.
    fn wait_to_save(&self, decide: impl Fn(Option<Instant>) -> SaveDecision) {
        loop {
            let last = *self.last.lock();
            // `decide` is called without the lock, because the caller of `ended` may hold locks that `decide` takes.
            let decision = decide(last);
            let mut last = self.last.lock();
            match decision {
                SaveDecision::Save => {
                    *last = None;
                    return;
                }
                SaveDecision::Wait(until) => drop(self.changed.wait_until(&mut last, until)),
                SaveDecision::Rest if last.is_none() => self.changed.wait(&mut last),
                SaveDecision::Rest => {}
            }
        }
    }
}

/// Starts the thread that saves the image after the evaluations that `activity` reports, and deletes automatic
/// checkpoints when all checkpoints together take more than `space` bytes.
pub(crate) fn start_autosave(saver: Saver, activity: Arc<AutosaveTrigger>, space: u64) {
    // The number is read here, so that evaluations before the thread begins are saved, too.
    let mut saved = saver.session.evaluations_so_far();
    let run = move || {
        let mut pace = Pace::default();
        loop {
            activity.wait_to_save(|ended| {
                pace.decide(Instant::now(), ended, saver.session.is_busy(), || has_room(&saver.checkpoints))
            });
            let evaluations = saver.session.evaluations_so_far();
            if evaluations == saved {
                continue;
            }
            let checkpoint = saver.save_automatically();
            // A failed save may have written as many bytes as a complete save.
            pace.wrote(Instant::now(), checkpoint.as_ref().map_or_else(used, |checkpoint| checkpoint.bytes));
            if checkpoint.is_some() {
                saved = evaluations;
                saver.checkpoints.make_room(space);
            } else {
                activity.ended();
            }
        }
    };
    // If the thread cannot be started, only automatic saves are missing.
    let _ = std::thread::Builder::new().name("sbcl-mcp-auto".to_owned()).spawn(run);
}

/// Returns the number of used bytes in the heap, which is about the size of a saved image.
fn used() -> u64 {
    u64::try_from(crate::image::heap::usage().map_or(0, |usage| usage.used)).unwrap_or(u64::MAX)
}

/// Returns true while neither disk nor memory is short.
fn has_room(checkpoints: &Checkpoints) -> bool {
    is_enough(used(), checkpoints.free_space(), free_memory())
}

/// Returns true when an image of `used` bytes may be saved. `disk` and `memory` are the free bytes; `None` if unknown.
fn is_enough(used: u64, disk: Option<u64>, memory: Option<u64>) -> bool {
    [disk, memory].into_iter().flatten().all(|free| free > used.saturating_add(RESERVE))
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
        let pace = Pace::default();
        let decide = |now, ended| pace.decide(now, ended, false, || true);
        assert_eq!(decide(begin, None), SaveDecision::Rest);
        assert_eq!(decide(begin + SECOND, Some(begin)), SaveDecision::Wait(begin + QUIET));
        assert_eq!(decide(begin + QUIET, Some(begin)), SaveDecision::Save);
    }

    #[test]
    fn a_save_waits_for_running_evaluations_for_room_and_for_the_rate_limit() {
        let now = Instant::now() + 100 * SECOND;
        let ended = Some(now - QUIET);
        let mut pace = Pace::default();
        let room_is_not_checked = || unreachable!("it costs something");
        assert_eq!(pace.decide(now, ended, true, room_is_not_checked), SaveDecision::Wait(now + QUIET));
        assert_eq!(pace.decide(now, ended, false, || false), SaveDecision::Wait(now + INTERVAL));
        // A small image is saved every 30 seconds, an image of a gigabyte every two minutes.
        for (bytes, seconds) in [(40 << 20, 30), (250 << 20, 30), (500 << 20, 60), (1000 << 20, 120)] {
            pace.wrote(now - SECOND, bytes);
            let next = now - SECOND + seconds * SECOND;
            assert_eq!(pace.decide(now, ended, false, room_is_not_checked), SaveDecision::Wait(next));
            assert_eq!(pace.decide(next, ended, false, || true), SaveDecision::Save);
            assert_eq!(pace.decide(next, Some(next), false, || true), SaveDecision::Wait(next + QUIET));
        }
    }

    #[test]
    fn an_image_is_not_saved_when_disk_or_memory_is_short() {
        let used = 1 << 30;
        let (short, enough) = (Some(used + RESERVE), Some(used + RESERVE + 1));
        assert!(is_enough(used, enough, enough) && is_enough(used, None, None) && is_enough(used, enough, None));
        assert!(!is_enough(used, short, enough) && !is_enough(used, enough, short) && !is_enough(used, None, short));
        assert!(!is_enough(u64::MAX, enough, enough));
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
            let mut pace = Pace::default();
            let mut ended = None;
            let mut saves: Vec<(Instant, u64)> = Vec::new();
            for (milliseconds, has_ended, busy, has_room, bytes) in moments {
                now += Duration::from_millis(milliseconds);
                if has_ended {
                    ended = Some(now);
                }
                match pace.decide(now, ended, busy, || has_room) {
                    SaveDecision::Rest => prop_assert_eq!(ended, None),
                    // The thread never spins, and never waits longer than the rate limit and the reason to wait
                    // require.
                    SaveDecision::Wait(until) => {
                        prop_assert!(until > now && ended.is_some());
                        let paused = saves.last().map_or(now, |(at, bytes)| {
                            let pause = MINUTE.as_secs_f64() * *bytes as f64 / RATE as f64;
                            *at + INTERVAL.max(Duration::from_secs_f64(pause))
                        });
                        let reason = if has_room { QUIET } else { INTERVAL };
                        prop_assert!(until <= paused.max(now + reason));
                    }
                    SaveDecision::Save => {
                        prop_assert!(!busy && has_room && ended.is_some_and(|ended| now - ended >= QUIET));
                        prop_assert!(saves.last().is_none_or(|(at, _)| now - *at >= INTERVAL));
                        saves.push((now, bytes));
                        pace.wrote(now, bytes);
                        ended = None;
                    }
                }
            }
            // Between any two saves the bytes written stay within the rate.
            for (first, (begin, _)) in saves.iter().enumerate() {
                let mut written = 0;
                for (at, bytes) in &saves[first..] {
                    let allowed = (*at - *begin).as_secs_f64() * RATE as f64 / MINUTE.as_secs_f64();
                    prop_assert!(written as f64 <= allowed + 1.0);
                    written += bytes;
                }
            }
        }
    }
}
