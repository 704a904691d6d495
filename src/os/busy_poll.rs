//! The one busy-poll.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

/// How long a thread that has nothing to do stays awake before it sleeps: the time in which a program that makes one
/// request after another comes back (10 to 30 µs here), where waking a processor takes 50.
const BUSY: Duration = Duration::from_micros(50);

/// It does so only if it has waited three times within this: what comes alone finds it asleep anyway.
const LATELY: Duration = Duration::from_millis(5);

/// The time after which a thread that gave way has lost the processor to a program that computes.
const CROWDED: Duration = Duration::from_micros(500);

/// The time after that in which the thread sleeps at once: a slice of such a program's takes longer than any wake-up.
const CROWDED_FOR: Duration = Duration::from_millis(100);

thread_local! {
    /// The end of the time in which this thread sleeps at once.
    static ASLEEP_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
    /// When this thread waited last, and when before that.
    static WAITED: Cell<[Option<Instant>; 2]> = const { Cell::new([None; 2]) };
}

/// Looks for something until it is there, or the thread has been awake for long enough. It gives way after so many looks:
/// one that is a system call takes as long as twenty at memory.
pub(crate) fn look<T>(looks: u32, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    let [last, before] = WAITED.get();
    WAITED.set([Some(begin), last]);
    let comes_often = before.is_some_and(|before| begin - before < LATELY);
    let is_crowded = ASLEEP_UNTIL.get().is_some_and(|until| begin < until);
    let busy = if comes_often && !is_crowded { BUSY } else { Duration::ZERO };
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
        let yielded = Instant::now();
        std::thread::yield_now();
        let now = Instant::now();
        if now - yielded > CROWDED {
            ASLEEP_UNTIL.set(Some(now + CROWDED_FOR));
        }
    }
}

/// Waits until one of `fds` is ready, at most for `timeout`; returns how many are. After a signal none is. Only a
/// [`PollSet`](crate::os::poll_set::PollSet) waits so.
pub(crate) fn wait(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> std::io::Result<usize> {
    let mut poll = |timeout: Option<&Timespec>| match rustix::event::poll(fds, timeout) {
        Err(Errno::INTR) => Ok(0),
        result => Ok(result?),
    };
    let ready = look(1, || match poll(Some(&Timespec::default())) {
        Ok(0) => None,
        result => Some(result),
    });
    // Past the longest time that the system knows is never.
    let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
    ready.unwrap_or_else(|| poll(timeout.as_ref()))
}
