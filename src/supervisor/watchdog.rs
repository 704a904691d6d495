//! Notices a worker that lives but does nothing any more: one that somebody has stopped, or whose threads wait for each
//! other because an evaluation was interrupted inside foreign code.

use std::time::{Duration, Instant};

use super::processes;
use super::requests::Requests;
use super::worker_process::WorkerProcess;
use crate::recovery::state::Crash;
use crate::recovery::status_page::{Status, monotonic};
use crate::result_kind::TIMEOUT;
use crate::session::recovery::failed;

// So many looks in a row must find something wrong. They are counted, not timed: this process may have been stopped as
// well, or the machine busy.

/// For a worker that does not read: collecting the garbage of a large heap takes its time.
const NOT_READING: u32 = 10;
/// For one that reads and does nothing.
const STALLED: u32 = 20;
/// For one that somebody has stopped, and may let go on.
const STOPPED: u32 = 10;
/// For an evaluation that goes on after the worker should have given it up.
const OVERDUE: u32 = 2;
/// For what it began to say and does not finish.
const UNFINISHED: u32 = 5;
/// For one that is not ready: it boots, or a form that it restores goes on past its time.
const UNREADY: u32 = 45;

/// Looks at one worker.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    /// How often to look while something is asked of the worker.
    pub(super) interval: Duration,
    looked: Option<Instant>,
    heard: u64,
    /// The request that has waited for longest, and what ran last.
    waits: (Option<u64>, u64),
    /// How much it had said, when that was not all.
    said: Option<u64>,
    not_reading: u32,
    stalled: u32,
    stopped: u32,
    overdue: u32,
    unfinished: u32,
    unready: u32,
}

impl Watchdog {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, ..Self::default() }
    }

    /// Looks, if it is time to. `hears`: nothing keeps the worker from reading on, and this process from hearing it.
    pub(super) fn look(&mut self, worker: &WorkerProcess, requests: &mut Requests, hears: bool) -> Option<Crash> {
        if self.looked.get_or_insert_with(Instant::now).elapsed() < self.interval {
            return None;
        }
        self.looked = Some(Instant::now());
        let found = |counter: &mut u32, wrong: bool| {
            *counter = if wrong { *counter + 1 } else { 0 };
            *counter
        };
        if !worker.restored {
            // While it restores, each form has its time.
            let due = worker.status.get(Status::Due);
            let overdue = worker.status.get(Status::Restoring) > 0 && due < monotonic();
            if found(&mut self.overdue, overdue) >= OVERDUE {
                return Some(Crash::new("could not be interrupted and was ended").by_form());
            }
            return (found(&mut self.unready, due < monotonic()) >= UNREADY)
                .then(|| Crash::new("did not get ready and was ended"));
        }
        let (begun, due) = (worker.status.get(Status::Begun), worker.status.get(Status::Due));
        let running = begun > worker.status.get(Status::Ended);
        if found(&mut self.overdue, running && due != 0 && due < monotonic()) >= OVERDUE {
            let outcome = failed(TIMEOUT, "The evaluation ran longer than its time limit".to_owned());
            return Some(Crash::new("could not be interrupted and was ended").during(outcome));
        }
        if found(&mut self.stopped, processes::is_stopped(worker.pid)) >= STOPPED {
            return Some(Crash::new("was stopped by somebody and was ended"));
        }
        let missed = worker.status.get(Status::Missed);
        if missed > 0 {
            let crash = Crash::new("lost a request, because code had read from the server's pipe, and was ended");
            return Some(crash.stalled_at(Some(missed)));
        }
        let said = worker.unfinished();
        let unfinished = hears && self.stopped == 0 && said.is_some() && said == self.said;
        self.said = said;
        if found(&mut self.unfinished, unfinished) >= UNFINISHED {
            return Some(Crash::new("wrote to a pipe that it must not write to, and was ended"));
        }
        // What wants no answer may wait for something that does before it is said to be done.
        let waits = (requests.first_awaited(), begun);
        let busy = running || worker.status.get(Status::Asked) > 0 || !worker.status.background().is_empty();
        let stalled = hears && !busy && waits.0.is_some() && waits == self.waits;
        self.waits = waits;
        if found(&mut self.stalled, stalled) >= STALLED {
            return Some(Crash::new("no longer answered and was ended").stalled_at(waits.0));
        }
        let heard = worker.status.get(Status::Heard);
        let not_reading = hears && heard == self.heard && requests.is_any_after(heard);
        self.heard = heard;
        (found(&mut self.not_reading, not_reading) >= NOT_READING).then(|| {
            Crash::new("no longer read what was asked of it and was ended").stalled_at(requests.first_from(heard))
        })
    }
}
