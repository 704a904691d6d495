//! A session: jobs, limits and the error state in front of one image.
//!
//! A request is put on the [scheduler](scheduler)'s board by the [api], taken from there by a thread of Lisp's, built up
//! from that one's [events], and [completed](completion): recorded in the [error state](error_state) and among the
//! [evaluations], and answered. What belongs to one of those who share the session is its [connection].
#![cfg_attr(not(feature = "mcp"), allow(dead_code, reason = "the server asks for more than programs do"))]

mod abandoned;
mod activity;
mod aftermath;
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
use crate::image::{Job, JobKind, Lane};
use crate::os::clock::Clock;
use abandoned::GiveUp;
use activity::Asked;
use connection::Connection;
use observer::Observer;
#[cfg(feature = "mcp")]
pub(crate) use scheduler::MAX_BACKGROUND;
use scheduler::{Board, Request};

#[cfg(feature = "mcp")]
pub(crate) use aftermath::Aftermath;
pub use api::{Background, Evaluation, JobId, Session, TimeLimit};
pub use evaluations::WaitId;
pub use hold::{RestartDesignator, Resumed};
pub(crate) use operation::Operation;
#[cfg(feature = "mcp")]
pub(crate) use operation::quoted;

/// How long an inspection may take.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(10);

type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// Calls a [`Reply`] with what it waits for.
type Answer = Box<dyn FnOnce() + Send>;

fn answer<T: Send + 'static>(reply: Reply<T>, value: T) -> Answer {
    Box::new(move || reply(value))
}

/// What is written for every evaluation has a cache line of its own: the caller's thread and Lisp's take turns, and would
/// wait for what stands beside it.
struct Inner {
    /// Where others are locked as well, this comes first.
    board: CachePadded<Mutex<Board>>,
    /// For the threads of each lane: there is something new on the board.
    changed: [Condvar; Lane::COUNT],
    /// For whoever waits until nothing runs.
    ended: Condvar,
    limits: CachePadded<Mutex<Limits>>,
    /// The session's own connection.
    main: Arc<Connection>,
    /// Those that joined it, in their order. Nothing else is locked under this.
    guests: Mutex<Vec<Arc<Connection>>>,
    next_connection: AtomicU64,
    /// Errors so far, of all connections, those of before a reset included, so that a number never means two things.
    errors: AtomicU64,
    clock: CachePadded<Clock>,
    /// Evaluations so far, and how many there were when the heap was last looked at.
    begun: CachePadded<AtomicU64>,
    watched: AtomicU64,
    next_id: CachePadded<AtomicU64>,
    /// How often the board has had something new for a thread that evaluates: what such a thread looks at while it is
    /// awake.
    pushes: CachePadded<AtomicU64>,
    /// Who is told of what must outlive the image.
    observer: OnceCell<Arc<dyn Observer>>,
    /// Where no other image can take this one's place: what ends the process, for this reason.
    give_up: OnceCell<GiveUp>,
}

impl Inner {
    fn new(limits: Limits) -> Self {
        Self {
            board: CachePadded::default(),
            changed: Default::default(),
            ended: Condvar::new(),
            limits: CachePadded::new(Mutex::new(limits)),
            main: Connection::new(0),
            guests: Mutex::default(),
            next_connection: AtomicU64::new(1),
            errors: AtomicU64::new(0),
            clock: CachePadded::default(),
            begun: CachePadded::default(),
            watched: AtomicU64::new(0),
            next_id: CachePadded::new(AtomicU64::new(1)),
            pushes: CachePadded::default(),
            observer: OnceCell::new(),
            give_up: OnceCell::new(),
        }
    }

    fn next_job_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// A job that belongs to no evaluation.
    fn job(&self, kind: JobKind, text: &str, name: &str) -> Job {
        Job { text: utf32(text), name: utf32(name), ..Job::empty(self.next_job_id(), kind, 0) }
    }

    /// A job that asks a question which the Lisp side knows by name.
    fn query(&self, operation: &Operation) -> Job {
        Job { operation: utf32(&operation.to_string()), ..self.job(JobKind::Query, "", "") }
    }

    /// Gives up the board, and wakes whoever has something new to look at there.
    fn leave_board(&self, mut board: MutexGuard<'_, Board>) {
        board.settle(Instant::now());
        let changed = board.take_changed();
        // Before anybody is woken: the lock could be handed to a thread that a collection stops.
        drop(board);
        self.notify(changed);
        self.ended.notify_all();
    }

    fn notify(&self, changed: [bool; Lane::COUNT]) {
        for (lane, _) in changed.iter().enumerate().filter(|(_, changed)| **changed) {
            if lane == Lane::Evaluation as usize {
                self.pushes.fetch_add(1, Ordering::Release);
                // Those that hold an evaluation, too.
                self.changed[lane].notify_all();
            } else {
                self.changed[lane].notify_one();
            }
        }
    }
}

impl Session {
    fn enqueue(&self, lane: Lane, job: Job, timeout: Option<Duration>, asked: Asked) -> JobId {
        let id = JobId(job.id);
        let mut board = self.inner.board.lock();
        board.push(lane, Request::new(&self.connection, job, timeout, asked));
        self.inner.leave_board(board);
        id
    }
}

/// Text as Lisp takes it.
fn utf32(text: &str) -> Vec<u32> {
    // Chars cannot tell how many they are: collected, they would be moved to more room again and again.
    let mut codes = Vec::with_capacity(text.len());
    codes.extend(text.chars().map(u32::from));
    codes
}
