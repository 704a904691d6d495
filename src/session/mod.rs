//! A session: the queue of jobs, the limits and the error state through which clients use one image.
//!
//! The [api] puts a request into the [scheduler]'s queue. A Lisp thread takes the request from the queue, and the
//! [events] that Lisp reports build up the result. At the [end](completion) of the request, its outcome is recorded in
//! the [error state](error_state) and among the [evaluations], and the caller is answered. Each client of a session has
//! a [connection] of its own.
#![cfg_attr(not(feature = "mcp"), allow(dead_code, reason = "only the server uses the whole interface"))]

mod abandoned;
mod activity;
mod api;
mod completion;
mod connection;
mod error_state;
mod evaluations;
mod events;
mod history;
mod hold;
mod host;
mod limits;
pub(crate) mod observer;
mod operation;
mod post_processing;
#[cfg(feature = "mcp")]
pub(crate) mod recovery;
pub(crate) mod reentry;
mod scheduler;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use once_cell::sync::OnceCell;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::config::Limits;
use crate::image::process::is_forked;
use crate::image::{Job, JobKind, Lane};
use crate::os::clock::DeadlineClock;
use crate::os::event_count::EventCount;
use abandoned::EndProcessFn;
use activity::RequestBody;
use connection::Connection;
use observer::Observer;
#[cfg(feature = "mcp")]
pub(crate) use scheduler::MAX_BACKGROUND;
use scheduler::{Request, SchedulerState};

#[cfg(feature = "mcp")]
pub(crate) use api::OutcomeSoFar;
pub use api::{Background, Evaluation, JobId, Session, TimeLimit};
pub use evaluations::WaitId;
pub use hold::{RestartDesignator, Resumed};
pub(crate) use operation::Operation;
#[cfg(feature = "mcp")]
pub(crate) use operation::quoted;
#[cfg(feature = "mcp")]
pub(crate) use post_processing::PostProcessing;

/// The time limit of an inspection.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// The time after which an inspection no longer delays the inspections of other connections: another thread takes over.
const HAND_OVER_TIME: Duration = Duration::from_millis(100);

/// The time for which the event loop waits for the scheduler's lock, and for the output's lock, where it can do without: a
/// progress report that does not get a lock is sent later, and another thread handles a line.
const BRIEF_LOCK_TIME: Duration = Duration::from_micros(100);

type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// A function that sends an answer: a [`Reply`] bound to its argument.
type AnswerFn = Box<dyn FnOnce() + Send>;

fn bind_reply<T: Send + 'static>(reply: Reply<T>, value: T) -> AnswerFn {
    Box::new(move || reply(value))
}

/// The state that all handles of a session share. Each field that every evaluation writes has a cache line of its own,
/// since the caller's thread and the Lisp thread would slow each other down by writing to a shared line.
struct Inner {
    /// The scheduler state. Lock order: this lock is taken before all others except `output_copy`.
    scheduler: CachePadded<Mutex<SchedulerState>>,
    /// The event counts, one per lane, on which the lane's threads wait for work. The threads poll the count briefly
    /// before they sleep.
    changed: [CachePadded<EventCount>; Lane::COUNT],
    /// The condition variable on which threads wait until no evaluation runs, unwinds or is held.
    idle: Condvar,
    limits: CachePadded<Mutex<Limits>>,
    /// The lock for copying an evaluation's output, which may be large: one thread copies at a time.
    output_copy: Mutex<()>,
    /// The session's own connection, which has number 0.
    own_connection: Arc<Connection>,
    /// The connections other than the session's own, in the order in which they were added. While this lock is held, no
    /// other lock is taken.
    attached: Mutex<Vec<Arc<Connection>>>,
    next_connection: AtomicU64,
    /// The number of errors that all connections have recorded so far, from which errors get their numbers. A reset
    /// does not restart the count, so that a number never means two errors.
    error_count: AtomicU64,
    clock: CachePadded<DeadlineClock>,
    /// The number of jobs on evaluating threads that have begun, and this number at the clock's last check.
    evaluations_begun: CachePadded<AtomicU64>,
    begun_at_last_check: AtomicU64,
    next_id: CachePadded<AtomicU64>,
    /// The observer, which receives the changes that must outlive the image.
    observer: OnceCell<Arc<dyn Observer>>,
    /// The function that ends the process when abandoned threads keep the other Lisp threads from running, or when
    /// there are too many abandoned threads.
    end_process_fn: OnceCell<EndProcessFn>,
}

impl Inner {
    fn new(limits: Limits) -> Self {
        Self {
            scheduler: CachePadded::default(),
            changed: Default::default(),
            idle: Condvar::new(),
            limits: CachePadded::new(Mutex::new(limits)),
            output_copy: Mutex::default(),
            own_connection: Connection::new(0),
            attached: Mutex::default(),
            next_connection: AtomicU64::new(1),
            error_count: AtomicU64::new(0),
            clock: CachePadded::default(),
            evaluations_begun: CachePadded::default(),
            begun_at_last_check: AtomicU64::new(0),
            next_id: CachePadded::new(AtomicU64::new(1)),
            observer: OnceCell::new(),
            end_process_fn: OnceCell::new(),
        }
    }

    fn next_job_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the number of a new error, and reports the number to the observer.
    fn next_error_number(&self) -> u64 {
        let number = self.error_count.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(observer) = self.observer.get() {
            observer.error_numbered(number);
        }
        number
    }

    /// Creates a job that belongs to no evaluation. The meaning of `text` and `name` depends on the kind of job.
    fn job(&self, kind: JobKind, text: &str, name: &str) -> Job {
        Job { text: utf32(text), name: utf32(name), ..Job::without_texts(self.next_job_id(), kind, 0) }
    }

    /// Creates a job for a query that the Lisp side knows by name.
    fn query_job(&self, operation: &Operation) -> Job {
        Job { operation: utf32(&operation.to_string()), ..self.job(JobKind::Query, "", "") }
    }

    /// Schedules waiting requests, unlocks the scheduler state, wakes the threads that have work, and withdraws the
    /// questions to the user whose holds have ended.
    fn unlock_and_notify(&self, mut scheduler: MutexGuard<'_, SchedulerState>) {
        scheduler.reschedule(Instant::now());
        let changed = scheduler.take_changed_lanes();
        let withdrawals = std::mem::take(&mut scheduler.withdrawals);
        // The lock is released before threads are woken, so that it does not pass to a Lisp thread that a garbage
        // collection may stop.
        drop(scheduler);
        self.notify(changed);
        self.idle.notify_all();
        self.deliver(withdrawals);
    }

    fn notify(&self, changed: [bool; Lane::COUNT]) {
        for (lane, _) in changed.iter().enumerate().filter(|(_, changed)| **changed) {
            if lane == Lane::Evaluation as usize {
                // The work may be for one particular thread, such as the holder of an evaluation, so all threads must
                // wake.
                self.changed[lane].notify_all();
            } else {
                self.changed[lane].notify_one();
            }
        }
    }

    /// Locks the scheduler state. Returns `None` if another thread keeps the lock: a garbage collection may have stopped this
    /// thread, and the event loop must not wait for the end of the collection.
    fn lock_briefly(&self) -> Option<MutexGuard<'_, SchedulerState>> {
        self.scheduler.try_lock_for(BRIEF_LOCK_TIME)
    }
}

impl Session {
    /// Returns false while another thread keeps the scheduler's lock, for which most functions of this type wait. A garbage
    /// collection may have stopped this thread.
    #[cfg(feature = "mcp")]
    pub(crate) fn is_unlocked(&self) -> bool {
        self.inner.lock_briefly().is_some()
    }

    /// Queues a request. In a forked process, which has no thread that could answer, drops the request with its reply.
    fn enqueue(&self, lane: Lane, job: Job, timeout: Option<Duration>, body: RequestBody) -> JobId {
        let id = JobId(job.id);
        if is_forked() {
            return id;
        }
        let mut scheduler = self.inner.scheduler.lock();
        scheduler.push(lane, Request::new(&self.connection, job, timeout, body));
        self.inner.unlock_and_notify(scheduler);
        id
    }
}

/// Encodes text for Lisp: one code point per element.
fn utf32(text: &str) -> Vec<u32> {
    // `Chars` has no exact length, so `collect` would reallocate again and again.
    let mut codes = Vec::with_capacity(text.len());
    codes.extend(text.chars().map(u32::from));
    codes
}
