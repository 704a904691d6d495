//! A counter of events on which threads sleep.
//!
//! A condition variable would pass the lock that goes with it to a sleeping thread when the thread is notified. If that
//! thread is a Lisp thread that a garbage collection has stopped, all other threads would wait for the lock until the
//! collection ends. A thread that sleeps on an event count asks for the lock only when it runs again.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// The number of notifications so far, modulo 2³².
#[derive(Debug, Default)]
pub(crate) struct EventCount {
    count: AtomicU32,
    /// The lock and condition variable on which threads sleep where there is no futex.
    #[cfg(not(target_os = "linux"))]
    sleepers: (parking_lot::Mutex<()>, parking_lot::Condvar),
}

impl EventCount {
    /// Returns the count. To miss no event, a thread reads the count before it looks for work, or while it holds the lock
    /// under which it looked.
    pub(crate) fn current(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Wakes one sleeping thread.
    pub(crate) fn notify_one(&self) {
        self.notify(1);
    }

    /// Wakes all sleeping threads.
    pub(crate) fn notify_all(&self) {
        self.notify(i32::MAX.cast_unsigned());
    }
}

#[cfg(target_os = "linux")]
impl EventCount {
    /// Sleeps until the count differs from `seen` or the time `until` is over. May return earlier.
    pub(crate) fn wait(&self, seen: u32, until: Option<Instant>) {
        use rustix::thread::futex::{Flags, wait};

        let time = until.map(|until| until.saturating_duration_since(Instant::now()));
        // A time beyond the range of a timespec counts as no limit.
        let time = time.and_then(|time| rustix::thread::Timespec::try_from(time).ok());
        // The thread is woken, the count has changed, the time is over, or a signal arrived: the caller looks again.
        let _ = wait(&self.count, Flags::PRIVATE, seen, time.as_ref());
    }

    fn notify(&self, threads: u32) {
        use rustix::thread::futex::{Flags, wake};

        self.count.fetch_add(1, Ordering::Release);
        // Waking fails only for an invalid address.
        let _ = wake(&self.count, Flags::PRIVATE, threads);
    }
}

#[cfg(not(target_os = "linux"))]
impl EventCount {
    /// Sleeps until the count differs from `seen` or the time `until` is over. May return earlier.
    pub(crate) fn wait(&self, seen: u32, until: Option<Instant>) {
        let (lock, changed) = &self.sleepers;
        let mut guard = lock.lock();
        if self.current() == seen {
            match until {
                None => changed.wait(&mut guard),
                Some(until) => drop(changed.wait_until(&mut guard, until)),
            }
        }
    }

    fn notify(&self, threads: u32) {
        let (lock, changed) = &self.sleepers;
        let guard = lock.lock();
        self.count.fetch_add(1, Ordering::Release);
        drop(guard);
        if threads == 1 { drop(changed.notify_one()) } else { drop(changed.notify_all()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn wait_returns_at_once_if_the_count_has_changed() {
        let count = EventCount::default();
        let seen = count.current();
        count.notify_one();
        count.wait(seen, None);
        assert_ne!(count.current(), seen);
    }

    #[test]
    fn wait_ends_at_its_deadline() {
        let count = EventCount::default();
        let until = Instant::now() + Duration::from_millis(20);
        while Instant::now() < until {
            count.wait(count.current(), Some(until));
        }
    }

    #[test]
    fn notify_all_wakes_every_sleeping_thread() {
        let count = Arc::new(EventCount::default());
        let seen = count.current();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let count = count.clone();
                std::thread::spawn(move || {
                    while count.current() == seen {
                        count.wait(seen, None);
                    }
                })
            })
            .collect();
        count.notify_all();
        for thread in threads {
            thread.join().expect("a woken thread");
        }
    }
}
