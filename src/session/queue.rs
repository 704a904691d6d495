//! A queue that one Lisp thread waits on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use parking_lot::{Condvar, Mutex};

use super::idle::Idle;

/// First in, first out; any thread pushes, one pops.
pub(super) struct Queue<T> {
    items: Mutex<VecDeque<T>>,
    pushed: Condvar,
    /// What the thread that pops does while there is nothing.
    idle: OnceCell<Arc<dyn Idle>>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { items: Mutex::default(), pushed: Condvar::new(), idle: OnceCell::new() }
    }
}

impl<T> Queue<T> {
    /// Adds at the end.
    pub(super) fn push(&self, item: T) {
        self.items.lock().push_back(item);
        self.wake();
    }

    /// Has the thread that pops look again.
    pub(super) fn wake(&self) {
        match self.idle() {
            Some(idle) => idle.wake(),
            None => drop(self.pushed.notify_one()),
        }
    }

    /// From now on the thread that pops does this while it waits. Only the first one counts.
    #[cfg(feature = "mcp")]
    pub(super) fn idle_with(&self, idle: Arc<dyn Idle>) {
        let _ = self.idle.set(idle);
        // It may be asleep. The lock: or about to be.
        drop(self.items.lock());
        self.pushed.notify_one();
    }

    /// What the thread that pops does while it waits, if it is more than sleeping.
    pub(super) fn idle(&self) -> Option<&dyn Idle> {
        self.idle.get().map(|idle| &**idle)
    }

    /// Waits for the first that `fits` and takes it; `None` when none has come by `deadline`. For as long as `awake` the
    /// thread does not sleep: what comes by then is spared the time that waking takes, which can be several times that of
    /// a small evaluation.
    pub(super) fn pop(&self, deadline: Option<Instant>, awake: Duration, fits: impl Fn(&T) -> bool) -> Option<T> {
        let take = |items: &mut VecDeque<T>| {
            let index = items.iter().position(&fits)?;
            items.remove(index)
        };
        if let Some(idle) = self.idle() {
            return self.pop_idle(idle, deadline, take);
        }
        if let Some(item) = super::stay_awake(awake, || take(&mut *self.items.try_lock()?)) {
            return Some(item);
        }
        let mut items = self.items.lock();
        loop {
            if let Some(item) = take(&mut items) {
                return Some(item);
            }
            if let Some(idle) = self.idle() {
                drop(items);
                return self.pop_idle(idle, deadline, take);
            }
            match deadline {
                None => self.pushed.wait(&mut items),
                Some(deadline) if Instant::now() >= deadline => return None,
                Some(deadline) => drop(self.pushed.wait_until(&mut items, deadline)),
            }
        }
    }

    fn pop_idle(
        &self,
        idle: &dyn Idle,
        deadline: Option<Instant>,
        take: impl Fn(&mut VecDeque<T>) -> Option<T>,
    ) -> Option<T> {
        loop {
            if let Some(item) = take(&mut self.items.lock()) {
                return Some(item);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
            idle.idle(deadline);
        }
    }

    /// Puts back what was popped, by the thread that pops.
    pub(super) fn push_front(&self, item: T) {
        self.items.lock().push_front(item);
    }

    /// Takes out all.
    #[cfg(feature = "mcp")]
    pub(super) fn take_all(&self) -> VecDeque<T> {
        std::mem::take(&mut *self.items.lock())
    }

    /// Takes out the first that `matches`.
    pub(super) fn remove(&self, matches: impl FnMut(&T) -> bool) -> Option<T> {
        let mut items = self.items.lock();
        let index = items.iter().position(matches)?;
        items.remove(index)
    }
}
