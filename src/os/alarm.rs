//! A timer that one thread waits for and any thread sets. On Linux, this module uses a kernel timer, which can be set
//! without waking the waiting thread. Such a wake-up can take longer than the evaluation whose time limit is set.

pub(crate) use timer::Alarm;

/// The implementation with a kernel timer.
#[cfg(any(target_os = "linux", target_os = "android"))]
mod timer {
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
    };

    /// The poll interval when the kernel timer cannot be read: evaluated code may have closed its descriptor.
    const POLL_INTERVAL: Duration = Duration::from_millis(5);

    #[derive(Debug)]
    pub(crate) struct Alarm(Option<OwnedFd>);

    impl Default for Alarm {
        fn default() -> Self {
            Self(timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).ok())
        }
    }

    impl Alarm {
        /// Makes [`Self::wait`] return at `time`.
        pub(crate) fn set(&self, time: Instant) {
            // A value of zero would disarm the timer.
            let left = time.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
            let it_value = left.try_into().unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
            let once = Itimerspec { it_interval: Timespec::default(), it_value };
            if let Some(timer) = &self.0 {
                // An error is ignored: without a timer, `wait` polls.
                let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &once);
            }
        }

        /// Disarms the timer.
        pub(crate) fn stop(&self) {
            let never = Itimerspec { it_interval: Timespec::default(), it_value: Timespec::default() };
            if let Some(timer) = &self.0 {
                let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &never);
            }
        }

        /// Waits until the time that was set. May return early.
        pub(crate) fn wait(&self) {
            let rung = self.0.as_ref().is_some_and(|timer| {
                rustix::io::retry_on_intr(|| rustix::io::read(timer, &mut [0; 8])).is_ok_and(|count| count == 8)
            });
            if !rung {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod timer {
    use std::time::Instant;

    use parking_lot::{Condvar, Mutex};

    #[derive(Debug, Default)]
    pub(crate) struct Alarm {
        time: Mutex<Option<Instant>>,
        changed: Condvar,
    }

    impl Alarm {
        /// Makes [`Self::wait`] return at `time`.
        pub(crate) fn set(&self, time: Instant) {
            *self.time.lock() = Some(time);
            self.changed.notify_one();
        }

        /// Disarms the timer.
        pub(crate) fn stop(&self) {
            *self.time.lock() = None;
        }

        /// Waits until the time that was set. May return early.
        pub(crate) fn wait(&self) {
            let mut time = self.time.lock();
            match *time {
                None => self.changed.wait(&mut time),
                Some(until) => {
                    self.changed.wait_until(&mut time, until);
                    time.take_if(|time| *time <= Instant::now());
                }
            }
        }
    }
}
