//! The thread that notices when a time has come.

use std::time::Instant;

use parking_lot::Mutex;

use crate::alarm::Alarm;

/// An alarm that is set for every evaluation but seldom rings: it stays at the earliest time it has heard of, and when
/// that comes, the thread looks what is really due.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// When the thread wakes; `None` while it waits to be told.
    wakes: Mutex<Option<Instant>>,
    alarm: Alarm,
}

impl Clock {
    /// Makes sure that the thread looks at `time` or before.
    pub(super) fn arm(&self, time: Instant) {
        let mut wakes = self.wakes.lock();
        if wakes.is_none_or(|wakes| time < wakes) {
            *wakes = Some(time);
            self.alarm.set(time);
        }
    }

    /// Forgets all times.
    pub(super) fn rest(&self) {
        let mut wakes = self.wakes.lock();
        if wakes.take().is_some() {
            self.alarm.stop();
        }
    }

    /// Calls `look` whenever the time has come; it answers when the next time is. Never returns.
    pub(super) fn run(&self, mut look: impl FnMut(Instant) -> Option<Instant>) {
        loop {
            let now = Instant::now();
            let due = {
                let mut wakes = self.wakes.lock();
                wakes.take_if(|wakes| *wakes <= now).is_some()
            };
            if !due {
                self.alarm.wait();
            } else if let Some(next) = look(now) {
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
