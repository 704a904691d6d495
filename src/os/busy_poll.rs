//! Busy polling: a thread that waits looks for new work for some microseconds before it sleeps.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

/// The time for which a thread without work polls before it sleeps. A program that sends one request after another sends
/// its next request within this time (10 to 30 µs were measured), while a sleeping processor takes 10 to 50 µs to wake.
const POLL_TIME: Duration = Duration::from_micros(50);

/// A thread polls only if it has begun two other waits within this time before the current wait. If requests arrive less
/// often, they arrive after the thread has stopped polling, so polling would not help.
const RECENT_WAIT_TIME: Duration = Duration::from_millis(5);

/// If a yield takes longer than this time, the thread has lost the processor to another program.
const SLOW_YIELD_TIME: Duration = Duration::from_micros(500);

/// The time for which a thread that has lost the processor does not poll. While polling, the thread could lose the
/// processor again, for a time slice of the other program, which takes longer than a wake-up.
const NO_POLL_TIME: Duration = Duration::from_millis(100);

thread_local! {
    /// The end of the time in which this thread does not poll.
    static NO_POLL_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The times at which this thread's last two waits began, the latest first.
    static LAST_WAITS: Cell<[Option<Instant>; 2]> = const { Cell::new([None; 2]) };
}

/// Polls until `check` returns a value; returns `None` when the thread has polled for long enough. Yields the processor
/// after every `checks_per_yield` checks. Callers pass a small number if a check is slow: a system call takes as long as
/// twenty reads of memory.
pub(crate) fn poll_briefly<T>(checks_per_yield: u32, mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    let [last, before] = LAST_WAITS.get();
    LAST_WAITS.set([Some(begin), last]);
    let waits_often = before.is_some_and(|before| begin - before < RECENT_WAIT_TIME);
    let has_lost_processor = NO_POLL_UNTIL.get().is_some_and(|until| begin < until);
    let poll_time = if waits_often && !has_lost_processor { POLL_TIME } else { Duration::ZERO };
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
        // Other threads, perhaps the thread that this one waits for, may need this processor.
        let yielded = Instant::now();
        std::thread::yield_now();
        let now = Instant::now();
        if now - yielded > SLOW_YIELD_TIME {
            NO_POLL_UNTIL.set(Some(now + NO_POLL_TIME));
        }
    }
}

/// Waits until one of `fds` is ready, at most for `timeout`. Returns the number of ready descriptors: 0 after the timeout
/// or a signal. Only [`PollSet`](crate::os::poll_set::PollSet) calls this function.
pub(crate) fn wait_for_descriptors(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> std::io::Result<usize> {
    let mut poll = |timeout: Option<&Timespec>| match rustix::event::poll(fds, timeout) {
        Err(Errno::INTR) => Ok(0),
        result => Ok(result?),
    };
    let ready = poll_briefly(1, || match poll(Some(&Timespec::default())) {
        Ok(0) => None,
        result => Some(result),
    });
    // A timeout that is too long for the system counts as no timeout.
    let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
    ready.unwrap_or_else(|| poll(timeout.as_ref()))
}
