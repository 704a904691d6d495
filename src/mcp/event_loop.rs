//! The event loop, and the two threads that take turns in driving it.
//!
//! While the evaluation thread has nothing to evaluate, it drives the loop itself: an evaluation that a client asks for
//! is read, done and answered on one thread, and nobody has to be woken. While it evaluates, the thread that serves
//! stands in for it: not at once, since most evaluations are over sooner than another thread can be woken.

use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::time::timeout_at;

use crate::Session;
use crate::session::idle::{Idle, PATIENCE};

/// How long the stand-in stays awake for a client that makes one call after another.
const AWAKE: Duration = Duration::from_micros(200);

/// How often the stand-in gives way to other threads before it looks whether it is needed.
const LOOKS: usize = 5;

/// A loop on whichever thread drives it.
pub(super) struct EventLoop {
    runtime: Runtime,
    seat: Mutex<Seat>,
    /// The seat has changed in a way that concerns the stand-in.
    changed: Condvar,
    /// The evaluation thread has something to do.
    work: Notify,
    /// The stand-in has nothing to do any more.
    relieved: Notify,
}

/// Who drives the loop.
struct Seat {
    /// Since when the evaluation thread has been away; `None` while it drives.
    away: Option<Instant>,
    /// That is long enough for the stand-in to drive.
    is_needed: bool,
    /// What whoever drives next does first.
    first: Option<Box<dyn FnOnce() + Send>>,
    /// What was served is over, with this status.
    ended: Option<io::Result<i32>>,
    /// For how long the stand-in does not sleep, though it has nothing to do; `None` while it does.
    awake_until: Option<Instant>,
}

impl EventLoop {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let seat = Seat { away: Some(Instant::now()), is_needed: true, first: None, ended: None, awake_until: None };
        Ok(Arc::new(Self {
            runtime,
            seat: Mutex::new(seat),
            changed: Condvar::new(),
            work: Notify::new(),
            relieved: Notify::new(),
        }))
    }

    /// Runs `work` on this thread alone.
    pub(super) fn prepare<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Runs `service` to its end, on this thread and on the session's evaluation thread.
    pub(super) fn serve(
        self: Arc<Self>,
        session: &Session,
        service: impl Future<Output = io::Result<i32>> + Send + 'static,
    ) -> io::Result<i32> {
        let ending = self.clone();
        self.runtime.spawn(async move {
            let status = service.await;
            ending.seat.lock().ended = Some(status);
            ending.changed.notify_one();
            ending.relieved.notify_one();
        });
        session.idle_with(self.clone());
        self.stand_in()
    }

    /// Drives the loop whenever the evaluation thread is away for long.
    fn stand_in(&self) -> io::Result<i32> {
        let mut seat = self.seat.lock();
        loop {
            if let Some(status) = seat.ended.take() {
                return status;
            }
            if seat.is_needed {
                let first = seat.first.take();
                drop(seat);
                self.runtime.block_on(async {
                    perform(first);
                    self.relief().await;
                });
                seat = self.seat.lock();
            } else if seat.awake_until.is_some_and(|until| Instant::now() < until) {
                drop(seat);
                (0..LOOKS).for_each(|_| std::thread::yield_now());
                seat = self.seat.lock();
            } else {
                seat.awake_until = None;
                self.changed.wait(&mut seat);
            }
        }
    }

    /// Notes that the client makes one call after another: for a while the stand-in does not sleep, nor does its
    /// processor. One that sleeps takes longer to wake than a small evaluation takes, and the client waits on one.
    pub(super) fn stay_awake(&self) {
        let mut seat = self.seat.lock();
        if seat.awake_until.replace(Instant::now() + AWAKE).is_none() {
            self.changed.notify_one();
        }
    }

    /// Waits until somebody else drives, or nobody needs to.
    async fn relief(&self) {
        loop {
            {
                let mut seat = self.seat.lock();
                if seat.away.is_none() || seat.ended.is_some() {
                    // Under the same lock: what is looked at from now on is another absence.
                    seat.is_needed = false;
                    return;
                }
            }
            self.relieved.notified().await;
        }
    }
}

/// Does what was put off.
fn perform(work: Option<Box<dyn FnOnce() + Send>>) {
    if let Some(work) = work
        && catch_unwind(AssertUnwindSafe(work)).is_err()
    {
        tracing::error!("an answer panicked");
    }
}

impl Idle for EventLoop {
    fn idle(&self, until: Option<Instant>) {
        let first = {
            let mut seat = self.seat.lock();
            seat.away = None;
            seat.first.take()
        };
        self.relieved.notify_one();
        self.runtime.block_on(async {
            perform(first);
            match until {
                None => self.work.notified().await,
                // Past the time, the caller has what it waited for.
                Some(until) => drop(timeout_at(until.into(), self.work.notified()).await),
            }
        });
        self.seat.lock().away = Some(Instant::now());
    }

    fn pass(&self) {
        let first = self.seat.lock().first.take();
        self.runtime.block_on(async {
            perform(first);
            tokio::task::yield_now().await;
        });
    }

    fn soon(&self, work: Box<dyn FnOnce() + Send>) {
        let mut seat = self.seat.lock();
        // The stand-in drives already, or there is something that should have been done by now.
        let now = if seat.is_needed { Some(work) } else { seat.first.replace(work) };
        drop(seat);
        perform(now);
    }

    fn look(&self, now: Instant) -> Option<Instant> {
        let mut seat = self.seat.lock();
        let until = seat.away.filter(|_| !seat.is_needed)? + PATIENCE;
        if now < until {
            return Some(until);
        }
        seat.is_needed = true;
        self.changed.notify_one();
        None
    }

    fn wake(&self) {
        self.work.notify_one();
    }
}
