//! A worker as the supervisor sees it: a session with its record, and the process that serves it, one after the other.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use super::recovery::Recovery;
use super::restart_policy::{RestartPolicy, Stage};
use super::watchdog::Watchdog;
use super::worker_process::{self, WorkerProcess};
use crate::durable::Durable;
use crate::durable::lock::Lock;
use crate::recovery::state::Crash;

/// The number of a worker among those of its supervisor. It stays when another process takes the worker's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WorkerId(u32);

impl WorkerId {
    /// The worker that serves the client of stdin and stdout, and all that attach to its session.
    pub(super) const FIRST: Self = Self(0);
}

/// A session, and the process that serves it.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) process: Option<WorkerProcess>,
    /// The time to start the next process.
    pub(super) start_at: Instant,
    /// A process has got as far as serving.
    pub(super) has_served: bool,
    pub(super) watchdog: Watchdog,
    pub(super) restarts: RestartPolicy,
    pub(super) recovery: Recovery,
    /// The status that the last process said it would end with.
    pub(super) bye: Option<i32>,
}

impl Worker {
    /// A worker whose first process is started at once, to continue with `recovery`. It is looked at every `watch_interval`.
    pub(super) fn new(recovery: Recovery, watch_interval: Duration) -> Self {
        Self {
            process: None,
            start_at: Instant::now(),
            has_served: false,
            watchdog: Watchdog::new(watch_interval),
            restarts: RestartPolicy::default(),
            recovery,
            bye: None,
        }
    }

    /// Starts a process where the last one stopped.
    pub(super) fn start(&mut self, arguments: &[OsString], durable: Option<&(Durable, Lock)>) -> Result<(), Crash> {
        // What the last image was saving when it ended, as have the processes that did it.
        self.recovery.checkpoints.remove_torn();
        let image = self.recovery.image();
        let started = worker_process::start(arguments, image.as_deref(), durable).and_then(|mut process| {
            self.recovery.hand_over(&mut process)?;
            Ok(process)
        });
        self.process = Some(started.map_err(|error| Crash::new(format!("cannot be started: {error}")))?);
        self.watchdog = Watchdog::new(self.watchdog.interval);
        Ok(())
    }

    /// Queues a line that was just read, and hands on what the process takes.
    pub(super) fn take(&mut self, client: u64, line: &[u8]) {
        self.recovery.requests.add(client, line);
        self.hand_on();
    }

    /// Records that a client is gone, and tells the process.
    pub(super) fn leave(&mut self, client: u64) {
        self.recovery.leave(client);
        self.hand_on();
    }

    /// Hands on what waits, as far as the process reads.
    pub(super) fn hand_on(&mut self) {
        if let Some(process) = &mut self.process {
            process.hand_on(&mut self.recovery.requests);
        }
    }

    /// True while there is something to be written to the process.
    pub(super) fn has_unsent(&self) -> bool {
        self.process.as_ref().is_some_and(|process| {
            let waits = process.ready && self.recovery.requests.is_waiting();
            process.input.as_ref().is_some_and(|input| !input.is_empty() || waits)
        })
    }

    /// True while the process must be looked at now and then.
    pub(super) fn is_watched(&self) -> bool {
        self.process.as_ref().is_some_and(|process| {
            !process.ready || process.unfinished().is_some() || self.recovery.requests.may_be_awaited()
        })
    }

    /// Records the loss of the process, and when to start the next one. Fails with a reason when there is no point in that.
    pub(super) fn record_loss(&mut self, crash: &Crash) -> Result<(), String> {
        let process = self.process.take();
        let cause = &crash.cause;
        tracing::warn!("the Lisp image {cause}");
        let stage = match &process {
            Some(process) if process.restored => Stage::Serving,
            Some(process) if process.bye.is_none() => Stage::Starting,
            _ => Stage::Unstarted,
        };
        let progress =
            process.is_some_and(|process| self.recovery.record_crash(&process.status, process.restored, crash));
        self.recovery.resend();
        if progress {
            self.start_at = Instant::now();
            return Ok(());
        }
        self.start_at = self
            .restarts
            .after_loss(stage, Instant::now())
            .map_err(|times| format!("the Lisp image was lost {times} (the last one {cause}); the server gives up"))?;
        Ok(())
    }

    /// Replaces the process with another one; `remember` records what remains of it.
    pub(super) fn replace(&mut self, remember: impl FnOnce(&mut Recovery, &WorkerProcess)) {
        if let Some(process) = self.process.take() {
            remember(&mut self.recovery, &process);
            self.recovery.resend();
        }
        self.start_at = Instant::now();
    }
}
