//! A clock for many deadlines, which wakes a waiting thread at the earliest deadline. The session and the embedding
//! library's thread pool each have a clock.

use std::time::Instant;

use parking_lot::Mutex;

use crate::os::alarm::Alarm;

/// An alarm for the earliest of many deadlines. Each evaluation and each call with a time limit arms the clock, but the
/// alarm is seldom set: it stays at the earliest time that the clock was armed for. At that time, the waiting thread
/// checks which deadlines have passed.
#[derive(Debug, Default)]
pub(crate) struct DeadlineClock {
    /// The time when the waiting thread wakes; `None` when the clock is not armed.
    wake_time: Mutex<Option<Instant>>,
    alarm: Alarm,
}

impl DeadlineClock {
    /// Makes the waiting thread wake at `time` or earlier.
    pub(crate) fn arm(&self, time: Instant) {
        let mut wake_time = self.wake_time.lock();
        if wake_time.is_none_or(|wake_time| time < wake_time) {
            *wake_time = Some(time);
            self.alarm.set(time);
        }
    }

    /// Disarms the clock.
    pub(crate) fn stop(&self) {
        let mut wake_time = self.wake_time.lock();
        if wake_time.take().is_some() {
            self.alarm.stop();
        }
    }

    /// Waits until the armed time, disarms the clock, and returns the current time. Only one thread may wait.
    pub(crate) fn wait(&self) -> Instant {
        loop {
            let now = Instant::now();
            if self.wake_time.lock().take_if(|wake_time| *wake_time <= now).is_some() {
                return now;
            }
            self.alarm.wait();
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_clock_keeps_the_earliest_time_until_it_is_stopped() {
        let clock = DeadlineClock::default();
        let (soon, late) = (Instant::now() + Duration::from_secs(3600), Instant::now() + Duration::from_secs(7200));
        clock.arm(soon);
        clock.arm(late);
        assert_eq!(*clock.wake_time.lock(), Some(soon));
        clock.stop();
        clock.arm(late);
        assert_eq!(*clock.wake_time.lock(), Some(late));
    }
}
