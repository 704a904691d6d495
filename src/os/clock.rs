//! A clock for many deadlines, which wakes a waiting thread at the earliest deadline. The session and the embedding
//! library's thread pool each have a clock.

use std::time::Instant;

use parking_lot::Mutex;

use crate::os::event_count::EventCount;

/// The earliest of many deadlines, and the thread that waits for it. Each evaluation and each call with a time limit arms
/// the clock, but the waiting thread is seldom woken: it sleeps until the earliest time that the clock was armed for. At
/// that time, the waiting thread checks which deadlines have passed.
///
/// The clock uses no file descriptor, because evaluated code may close all descriptors of the process.
#[derive(Debug, Default)]
pub(crate) struct DeadlineClock {
    times: Mutex<Times>,
    /// The event that the waiting thread must wake earlier than it planned.
    earlier: EventCount,
}

#[derive(Debug, Default)]
struct Times {
    /// The time when [`DeadlineClock::wait`] returns; `None` when the clock is not armed.
    wake: Option<Instant>,
    /// The time until which the waiting thread sleeps; `None` when it sleeps until it is woken. The time is past while the
    /// thread is awake.
    sleep_end: Option<Instant>,
}

impl DeadlineClock {
    /// Makes the waiting thread wake at `time` or earlier.
    pub(crate) fn arm(&self, time: Instant) {
        let mut times = self.times.lock();
        if times.wake.is_none_or(|wake| time < wake) {
            times.wake = Some(time);
            if times.sleep_end.is_none_or(|end| time < end) {
                times.sleep_end = Some(time);
                drop(times);
                self.earlier.notify_one();
            }
        }
    }

    /// Disarms the clock. The waiting thread keeps sleeping: if the clock is armed again for a later time than before,
    /// nothing needs to wake the thread.
    pub(crate) fn stop(&self) {
        self.times.lock().wake = None;
    }

    /// Waits until the armed time, disarms the clock, and returns the current time. Only one thread may wait.
    pub(crate) fn wait(&self) -> Instant {
        loop {
            let mut times = self.times.lock();
            let now = Instant::now();
            if times.wake.take_if(|wake| *wake <= now).is_some() {
                // The thread is awake: it reads the next armed time before it sleeps.
                times.sleep_end = Some(now);
                return now;
            }
            let (seen, end) = (self.earlier.current(), times.wake);
            times.sleep_end = end;
            drop(times);
            self.earlier.wait(seen, end);
        }
    }

    /// Calls `check` with the current time at each armed time, and arms the clock for the time that `check` returns, if
    /// any. Never returns.
    pub(crate) fn run(&self, mut check: impl FnMut(Instant) -> Option<Instant>) {
        loop {
            if let Some(next) = check(self.wait()) {
                self.arm(next);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_clock_keeps_the_earliest_time_until_it_is_stopped() {
        let clock = DeadlineClock::default();
        let (soon, late) = (Instant::now() + Duration::from_secs(3600), Instant::now() + Duration::from_secs(7200));
        clock.arm(soon);
        clock.arm(late);
        assert_eq!(clock.times.lock().wake, Some(soon));
        clock.stop();
        clock.arm(late);
        assert_eq!(clock.times.lock().wake, Some(late));
    }

    #[test]
    fn an_earlier_time_wakes_the_waiting_thread() {
        let clock = Arc::new(DeadlineClock::default());
        let waiting = clock.clone();
        let (woken, times) = mpsc::channel();
        std::thread::spawn(move || (0..2).try_for_each(|_| woken.send(waiting.wait())));
        for stop in [false, true] {
            let late = Instant::now() + Duration::from_secs(3600);
            clock.arm(late);
            while clock.times.lock().sleep_end != Some(late) {
                std::thread::yield_now();
            }
            if stop {
                clock.stop();
            }
            let soon = Instant::now() + Duration::from_millis(5);
            clock.arm(soon);
            assert!(times.recv_timeout(Duration::from_secs(20)).expect("the thread wakes") >= soon);
        }
    }
}
