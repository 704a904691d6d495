//! Busy polling: a thread that waits looks for new work for some microseconds before it sleeps.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

/// The time for which a thread without work polls before it sleeps. A program that sends one request after another
/// returns within this time (10 to 30 µs here), and waking a processor takes 50 µs.
const POLL_TIME: Duration = Duration::from_micros(50);

/// The time within which a thread must have waited twice before it polls in a third wait. When requests arrive singly,
/// the thread is asleep anyway.
const RECENTLY: Duration = Duration::from_millis(5);

/// The duration of a yield from which a thread counts as having lost the processor to another program.
const CROWDED_AFTER: Duration = Duration::from_micros(500);

/// The time for which a thread that has lost the processor does not poll: the other program's time slice takes longer
/// than any wake-up.
const CROWDED_TIME: Duration = Duration::from_millis(100);

thread_local! {
    /// The end of the time in which this thread does not poll.
    static NO_POLL_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The times of this thread's last two waits, the latest first.
    static WAITED: Cell<[Option<Instant>; 2]> = const { Cell::new([None; 2]) };
}

/// Polls until `check` returns a value; returns `None` when the thread has polled for long enough. Yields the processor
/// after `checks_per_yield` checks: a check that is a system call takes as long as twenty reads of memory.
pub(crate) fn poll_briefly<T>(checks_per_yield: u32, mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    let [last, before] = WAITED.get();
    WAITED.set([Some(begin), last]);
    let comes_often = before.is_some_and(|before| begin - before < RECENTLY);
    let is_crowded = NO_POLL_UNTIL.get().is_some_and(|until| begin < until);
    let poll_time = if comes_often && !is_crowded { POLL_TIME } else { Duration::ZERO };
    loop {
        for _ in 0..checks_per_yield {
            if let Some(found) = check() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() >= poll_time {
            return None;
        }
        // Other threads, perhaps the awaited one, may need this processor.
        let yielded = Instant::now();
        std::thread::yield_now();
        let now = Instant::now();
        if now - yielded > CROWDED_AFTER {
            NO_POLL_UNTIL.set(Some(now + CROWDED_TIME));
        }
    }
}

/// Waits until one of `fds` is ready, for `timeout` at most. Returns the number of ready descriptors: 0 after a signal.
/// Only [`PollSet`](crate::os::poll_set::PollSet) calls this.
pub(crate) fn wait(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> std::io::Result<usize> {
    let mut poll = |timeout: Option<&Timespec>| match rustix::event::poll(fds, timeout) {
        Err(Errno::INTR) => Ok(0),
        result => Ok(result?),
    };
    let ready = poll_briefly(1, || match poll(Some(&Timespec::default())) {
        Ok(0) => None,
        result => Some(result),
    });
    // A timeout that the system cannot represent never ends.
    let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
    ready.unwrap_or_else(|| poll(timeout.as_ref()))
}
