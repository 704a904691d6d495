//! The one busy-poll.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a thread that has nothing to do stays awake before it sleeps: the time in which a program that makes one
/// request after another comes back (10 to 30 µs here), where waking a processor takes 50.
const BUSY: Duration = Duration::from_micros(50);

/// It does so only if it has waited three times within this: what comes alone finds it asleep anyway.
const LATELY: Duration = Duration::from_millis(5);

thread_local! {
    /// When this thread waited last, and when before that.
    static WAITED: Cell<[Option<Instant>; 2]> = const { Cell::new([None; 2]) };
}

/// Looks for something until it is there, or the thread has been awake for long enough. It gives way after so many looks:
/// one that is a system call takes as long as twenty at memory.
pub(crate) fn look<T>(looks: u32, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    let [last, before] = WAITED.get();
    WAITED.set([Some(begin), last]);
    let busy = if before.is_some_and(|before| begin - before < LATELY) { BUSY } else { Duration::ZERO };
    loop {
        for _ in 0..looks {
            if let Some(found) = look() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() >= busy {
            return None;
        }
        // Others may want this processor: the one that is waited for, perhaps.
        std::thread::yield_now();
    }
}
