//! A queue that one Lisp thread waits on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// First in, first out; any thread pushes, one pops.
#[derive(Debug)]
pub(super) struct Queue<T> {
    items: Mutex<VecDeque<T>>,
    pushed: Condvar,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { items: Mutex::default(), pushed: Condvar::new() }
    }
}

impl<T> Queue<T> {
    /// Adds at the end.
    pub(super) fn push(&self, item: T) {
        self.items.lock().push_back(item);
        self.pushed.notify_one();
    }

    /// Waits for the first and takes it. For as long as `awake` the thread does not sleep: what comes by then is spared
    /// the time that waking takes, which can be several times that of a small evaluation.
    pub(super) fn pop(&self, awake: Duration) -> T {
        let until = Instant::now() + awake;
        while Instant::now() < until {
            if let Some(item) = self.items.try_lock().and_then(|mut items| items.pop_front()) {
                return item;
            }
            // Gives way where there is but one processor for both threads.
            std::thread::yield_now();
        }
        let mut items = self.items.lock();
        loop {
            match items.pop_front() {
                Some(item) => return item,
                None => self.pushed.wait(&mut items),
            }
        }
    }

    /// Waits for the first and takes it; `None` when nothing has come by `deadline`.
    pub(super) fn pop_until(&self, deadline: Instant) -> Option<T> {
        let mut items = self.items.lock();
        loop {
            if let Some(item) = items.pop_front() {
                return Some(item);
            }
            if self.pushed.wait_until(&mut items, deadline).timed_out() {
                return items.pop_front();
            }
        }
    }

    /// Puts back what was popped.
    pub(super) fn push_front(&self, item: T) {
        self.items.lock().push_front(item);
        self.pushed.notify_one();
    }

    /// Takes out the first that `matches`.
    pub(super) fn remove(&self, matches: impl FnMut(&T) -> bool) -> Option<T> {
        let mut items = self.items.lock();
        let index = items.iter().position(matches)?;
        items.remove(index)
    }
}
