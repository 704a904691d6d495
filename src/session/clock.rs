//! The thread that notices when a time limit has passed.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// An alarm that is set for every evaluation but seldom woken: it sleeps until the earliest deadline it has heard of,
/// and when it wakes it looks what is really due.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// When the thread wakes; `None` while it waits to be told.
    wakes: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Clock {
    /// Makes sure that the thread looks at `deadline` or before.
    pub(super) fn arm(&self, deadline: Instant) {
        let mut wakes = self.wakes.lock();
        if wakes.is_none_or(|wakes| deadline < wakes) {
            *wakes = Some(deadline);
            self.changed.notify_one();
        }
    }

    /// Calls `look` whenever the time has come; it answers when the next time is. Never returns.
    pub(super) fn run(&self, mut look: impl FnMut(Instant) -> Option<Instant>) {
        let mut wakes = self.wakes.lock();
        loop {
            match *wakes {
                None => self.changed.wait(&mut wakes),
                Some(at) if at > Instant::now() => {
                    self.changed.wait_until(&mut wakes, at);
                }
                Some(_) => {
                    *wakes = None;
                    drop(wakes);
                    let next = look(Instant::now());
                    wakes = self.wakes.lock();
                    *wakes = wakes.into_iter().chain(next).min();
                }
            }
        }
    }
}
