//! Notices a worker that lives but does nothing any more: one that somebody has stopped, or whose threads wait for each
//! other because an evaluation was interrupted inside foreign code.

use std::time::{Duration, Instant};

use super::processes;
use super::requests::Requests;
use super::worker_process::WorkerProcess;
use crate::handover::board::{Slot, monotonic};
use crate::session::restore::failed;

/// How often to look while something is asked of a worker.
pub(super) const EVERY: Duration = Duration::from_secs(1);

// So many looks in a row must find something wrong. They are counted, not timed: this process may have been stopped as
// well, or the machine busy.

/// For a worker that does not read: collecting the garbage of a large heap takes its time.
const DEAF: u32 = 10;
/// For one that reads and does nothing.
const MUTE: u32 = 20;
/// For one that somebody has stopped, and may let go on.
const STOPPED: u32 = 10;
/// For an evaluation that goes on after the worker should have given it up.
const OVERDUE: u32 = 2;
/// For restoring, whose own limit is 30 seconds.
const UNREADY: u32 = 45;

/// What is wrong with a worker: the rest of a sentence, and what can be said of an evaluation.
pub(super) type Fault = (String, Option<Box<crate::Outcome>>);

/// Looks at one worker.
#[derive(Debug)]
pub(super) struct Watchdog {
    looked: Instant,
    heard: u64,
    /// The request that has waited for longest, and what ran last.
    waits: (u64, u64),
    deaf: u32,
    mute: u32,
    stopped: u32,
    overdue: u32,
    unready: u32,
}

impl Watchdog {
    pub(super) fn new() -> Self {
        Self { looked: Instant::now(), heard: 0, waits: (0, 0), deaf: 0, mute: 0, stopped: 0, overdue: 0, unready: 0 }
    }

    /// Looks, if it is time to. `hears`: nothing keeps the worker from reading on.
    pub(super) fn look(&mut self, worker: &WorkerProcess, requests: &Requests, hears: bool) -> Option<Fault> {
        if self.looked.elapsed() < EVERY {
            return None;
        }
        self.looked = Instant::now();
        if !worker.ready {
            self.unready += 1;
            let fault = (self.unready >= UNREADY).then(|| "did not get ready and was ended".to_owned());
            return fault.map(|cause| (cause, None));
        }
        let (begun, due) = (worker.board.get(Slot::Begun), worker.board.get(Slot::Due));
        let overdue = begun > worker.board.get(Slot::Ended) && due != 0 && due < monotonic();
        self.overdue = if overdue { self.overdue + 1 } else { 0 };
        if self.overdue >= OVERDUE {
            let outcome = failed("TIMEOUT", "The evaluation ran longer than its time limit".to_owned());
            return Some(("could not be interrupted and was ended".to_owned(), Some(Box::new(outcome))));
        }
        self.stopped = if processes::is_stopped(worker.pid) { self.stopped + 1 } else { 0 };
        if self.stopped >= STOPPED {
            return Some(("was stopped by somebody and was ended".to_owned(), None));
        }
        let idle = begun <= worker.board.get(Slot::Ended) && worker.board.get(Slot::Asked) == 0;
        let waits = (requests.iter().next().map_or(0, |(number, _)| number), begun);
        let mute = hears && idle && waits.0 != 0 && waits == self.waits;
        self.mute = if mute { self.mute + 1 } else { 0 };
        self.waits = waits;
        if self.mute >= MUTE {
            return Some(("no longer answered and was ended".to_owned(), None));
        }
        let heard = worker.board.get(Slot::Heard);
        let deaf = hears && heard == self.heard && requests.iter().any(|(number, _)| number > heard);
        self.deaf = if deaf { self.deaf + 1 } else { 0 };
        self.heard = heard;
        (self.deaf >= DEAF).then(|| ("no longer read what was asked of it and was ended".to_owned(), None))
    }
}
