//! The part of `parking_lot` that the modules use, built on shuttle's primitives.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use shuttle::sync;

/// A replacement for `parking_lot::Mutex`.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

/// A replacement for `parking_lot::MutexGuard`.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(Option<sync::MutexGuard<'a, T>>);

/// A replacement for `parking_lot::Condvar`.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

/// A replacement for `parking_lot::WaitTimeoutResult`.
#[derive(Debug)]
pub struct WaitTimeoutResult;

impl<T> Mutex<T> {
    /// Creates an unlocked mutex that holds `value`.
    pub fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// Consumes the mutex and returns its value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().expect("no panic while it was locked")
    }

    /// Locks the mutex.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect("no panic while it is locked")))
    }

    /// Locks the mutex if no other thread has it. Time does not pass here.
    pub fn try_lock_for(&self, _: Duration) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("locked")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("locked")
    }
}

impl Condvar {
    /// Creates a condition variable without waiters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for a notification.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let locked = guard.0.take().expect("locked");
        guard.0 = Some(self.0.wait(locked).expect("no panic while it is locked"));
    }

    /// Waits for a notification. The deadline never passes, because shuttle has no clock.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _until: Instant) -> WaitTimeoutResult {
        self.wait(guard);
        WaitTimeoutResult
    }

    /// Notifies one waiter.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Notifies all waiters.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

impl WaitTimeoutResult {
    /// Returns false, because deadlines never pass.
    pub fn timed_out(&self) -> bool {
        false
    }
}
