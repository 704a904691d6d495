//! A worker as the supervisor sees it: a session with its record, and the current one of the processes that serve it.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use super::messages;
use super::recovery::{LOG_RETRY, Recovery};
use super::restart_policy::{RestartPolicy, Stage};
use super::watchdog::Watchdog;
use super::worker_process::{self, WorkerProcess};
use crate::recovery::persistent::Durable;
use crate::recovery::persistent::lock::Lock;
use crate::recovery::state::Crash;
use crate::rpc::route::notice;

/// The number of a worker among the workers of a supervisor. The number stays when the worker's process is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WorkerId(u32);

impl WorkerId {
    /// The worker that serves the client of stdin and stdout, and all clients that attach to its session.
    pub(super) const FIRST: Self = Self(0);
}

/// A session, and the process that serves the session.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) process: Option<WorkerProcess>,
    /// The time to start the next process.
    pub(super) start_at: Instant,
    /// True once a process was ready to serve.
    pub(super) has_served: bool,
    pub(super) watchdog: Watchdog,
    pub(super) restarts: RestartPolicy,
    pub(super) recovery: Recovery,
    /// True when the clients were notified that the log cannot be written, and not yet that it can be again.
    log_failed: bool,
    /// The exit status that the last process announced.
    pub(super) bye: Option<i32>,
}

impl Worker {
    /// Creates a worker whose first process starts at once and continues from `recovery`. The watchdog looks at the process
    /// every `watch_interval`.
    pub(super) fn new(recovery: Recovery, watch_interval: Duration) -> Self {
        Self {
            process: None,
            start_at: Instant::now(),
            has_served: false,
            watchdog: Watchdog::new(watch_interval),
            restarts: RestartPolicy::default(),
            recovery,
            log_failed: false,
            bye: None,
        }
    }

    /// Starts a process that continues where the last process stopped.
    pub(super) fn start(&mut self, arguments: &[OsString], durable: Option<&(Durable, Lock)>) -> Result<(), Crash> {
        // The processes that saved the last image have ended with it.
        self.recovery.checkpoints.remove_torn();
        let image = self.recovery.image();
        let started = worker_process::start(arguments, image.as_deref(), durable).and_then(|mut process| {
            self.recovery.hand_over(&mut process)?;
            Ok(process)
        });
        self.process = Some(started.map_err(|error| Crash::new(format!("cannot be started: {error}")))?);
        self.watchdog = Watchdog::new(self.watchdog.interval);
        // The last process may not have shown its notice.
        self.log_failed &= self.recovery.log_failure().is_none();
        Ok(())
    }

    /// Tries to write a log again that cannot be written, and notifies the clients once when that begins and once when it is
    /// over.
    pub(super) fn attend_log(&mut self) {
        if self.recovery.log_retry().is_some_and(|time| time.is_zero()) {
            self.recovery.rewrite_log();
        }
        // A replay discards the notices that come meanwhile.
        let Some(process) = self.process.as_mut().filter(|process| process.restored) else { return };
        let Some(input) = &mut process.input else { return };
        let text = match self.recovery.log_failure() {
            Some(reason) if !self.log_failed => format!(
                "The session's log cannot be written: {reason}. Until it can, what is defined is lost when the server is killed. \
                 The server tries again every {} seconds.",
                LOG_RETRY.as_secs()
            ),
            None if self.log_failed => {
                "The session's log can be written again, and has what was defined meanwhile.".to_owned()
            }
            _ => return,
        };
        self.log_failed = !self.log_failed;
        for client in self.recovery.clients() {
            // Another part of the loop notices the loss of the worker.
            let _ = input.put(&notice(client, &text));
        }
    }

    /// Queues a line of a client, and sends what the process reads.
    pub(super) fn take(&mut self, client: u64, line: &[u8]) {
        self.recovery.requests.add(client, line);
        self.hand_on();
    }

    /// Records that a client has disconnected, and notifies the process.
    pub(super) fn leave(&mut self, client: u64) {
        self.recovery.leave(client);
        self.hand_on();
    }

    /// Sends waiting lines, as far as the process reads.
    pub(super) fn hand_on(&mut self) {
        if let Some(process) = &mut self.process {
            process.hand_on(&mut self.recovery.requests);
        }
    }

    /// Returns true while there is something to write to the process.
    pub(super) fn has_unsent(&self) -> bool {
        self.has_to_send(|process| process.ready)
    }

    /// Returns true while something is to be written to the process as soon as it reads.
    pub(super) fn can_send(&self) -> bool {
        self.has_to_send(WorkerProcess::takes_more)
    }

    fn has_to_send(&self, takes_lines: impl Fn(&WorkerProcess) -> bool) -> bool {
        self.process.as_ref().is_some_and(|process| {
            let waits = takes_lines(process) && self.recovery.requests.is_waiting();
            process.input.as_ref().is_some_and(|input| !input.is_empty() || waits)
        })
    }

    /// Returns true while the watchdog must look at the process.
    pub(super) fn is_watched(&self) -> bool {
        self.process.as_ref().is_some_and(|process| {
            !process.ready || process.unfinished().is_some() || self.recovery.requests.may_be_awaited()
        })
    }

    /// Records the loss of the process, and the time to start the next process. Returns a client and the answer to its request
    /// that no other process gets, if there is one. Fails with a reason after too many losses.
    pub(super) fn record_loss(&mut self, crash: &Crash) -> Result<Option<(u64, Vec<u8>)>, String> {
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
        let stalling = self.recovery.requests.take_stalling();
        let refusal = stalling.and_then(|(client, line)| Some((client, messages::stalling(&line)?)));
        self.recovery.resend();
        if progress {
            self.start_at = Instant::now();
            return Ok(refusal);
        }
        self.start_at = self
            .restarts
            .after_loss(stage, Instant::now())
            .map_err(|times| format!("the Lisp image was lost {times} (the last one {cause}); the server gives up"))?;
        Ok(refusal)
    }

    /// Discards the process, and starts the next process at once; `remember` records the change in the recovery record.
    pub(super) fn replace(&mut self, remember: impl FnOnce(&mut Recovery, &WorkerProcess)) {
        if let Some(process) = self.process.take() {
            remember(&mut self.recovery, &process);
            self.recovery.resend();
        }
        self.start_at = Instant::now();
    }
}
