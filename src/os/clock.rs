//! Deadlines: an alarm for the earliest of many times, and the wait for it. The session and the library's pool of threads each
//! have one.

use std::time::Instant;

use parking_lot::Mutex;

use crate::os::alarm::Alarm;

/// An alarm that is set for every evaluation and every call with a limit but seldom rings: it stays at the earliest time that it
/// was armed for. When that comes, the thread that waits looks what is really due.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// When the thread wakes; `None` while it waits to be told.
    wakes: Mutex<Option<Instant>>,
    alarm: Alarm,
}

impl Clock {
    /// Makes sure that the thread looks at `time` or before.
    pub(crate) fn arm(&self, time: Instant) {
        let mut wakes = self.wakes.lock();
        if wakes.is_none_or(|wakes| time < wakes) {
            *wakes = Some(time);
            self.alarm.set(time);
        }
    }

    /// Forgets all times.
    pub(crate) fn rest(&self) {
        let mut wakes = self.wakes.lock();
        if wakes.take().is_some() {
            self.alarm.stop();
        }
    }

    /// Waits until the time has come, forgets it, and returns the present moment. One thread waits at a time.
    pub(crate) fn wait(&self) -> Instant {
        loop {
            let now = Instant::now();
            if self.wakes.lock().take_if(|wakes| *wakes <= now).is_some() {
                return now;
            }
            self.alarm.wait();
        }
    }

    /// Calls `look` whenever the time has come; it returns the next time. Never returns.
    pub(crate) fn run(&self, mut look: impl FnMut(Instant) -> Option<Instant>) {
        loop {
            if let Some(next) = look(self.wait()) {
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
    fn it_stays_at_the_earliest_time_until_it_rests() {
        let clock = Clock::default();
        let (soon, late) = (Instant::now() + Duration::from_secs(3600), Instant::now() + Duration::from_secs(7200));
        clock.arm(soon);
        clock.arm(late);
        assert_eq!(*clock.wakes.lock(), Some(soon));
        clock.rest();
        clock.arm(late);
        assert_eq!(*clock.wakes.lock(), Some(late));
    }
}
