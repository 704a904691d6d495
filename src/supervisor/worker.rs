//! A worker as the supervisor sees it: a session's recovery record, and the process that currently serves the session.

use std::borrow::Cow;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use super::messages::{self, MAX_PARSED_LINE};
use super::recovery::{LOG_RETRY_INTERVAL, RecoveryRecord};
use super::restart_policy::{RestartPolicy, WorkerStage};
use super::watchdog::Watchdog;
use super::worker_process::{self, WorkerProcess};
use crate::recovery::persistent::PersistentSession;
use crate::recovery::persistent::lock::Lock;
use crate::recovery::state::Crash;
use crate::rpc::WriteBuffer;
use crate::rpc::route::mark_notice;

/// The number of a worker among the workers of a supervisor. The number stays when the worker's process is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WorkerId(u32);

impl WorkerId {
    /// The worker that serves the client of stdin and stdout, and all clients that attach to its session.
    pub(super) const FIRST: Self = Self(0);
}

/// A worker: a session's recovery record, and the process that serves the session.
#[derive(Debug)]
pub(super) struct Worker {
    /// The current process; `None` before the first process, and between the loss of a process and the start of the
    /// next process.
    pub(super) process: Option<WorkerProcess>,
    /// The time to start the next process.
    pub(super) start_at: Instant,
    /// True once a process was ready to serve.
    pub(super) has_served: bool,
    pub(super) watchdog: Watchdog,
    pub(super) restarts: RestartPolicy,
    pub(super) recovery: RecoveryRecord,
    /// True between the notice that the log cannot be written and the notice that the log can be written again.
    notified_log_failure: bool,
    /// The exit status that the last process announced.
    pub(super) announced_status: Option<i32>,
}

impl Worker {
    /// Creates a worker whose first process starts at once and continues from `recovery`. The watchdog checks the process
    /// every `watch_interval`.
    pub(super) fn new(recovery: RecoveryRecord, watch_interval: Duration) -> Self {
        Self {
            process: None,
            start_at: Instant::now(),
            has_served: false,
            watchdog: Watchdog::new(watch_interval),
            restarts: RestartPolicy::default(),
            recovery,
            notified_log_failure: false,
            announced_status: None,
        }
    }

    /// Starts a process that continues where the last process stopped. Returns the crash to record if the process cannot be
    /// started.
    pub(super) fn start(
        &mut self,
        arguments: &[OsString],
        session: Option<&(PersistentSession, Lock)>,
    ) -> Result<(), Crash> {
        // No process is saving now: the processes that saved the last image were killed with it.
        self.recovery.checkpoints.remove_incomplete();
        let image = self.recovery.next_core();
        let newest = self.recovery.newest_numbers();
        let started = worker_process::start(arguments, image.as_deref(), session, newest).and_then(|mut process| {
            self.recovery.send_state(&mut process)?;
            Ok(process)
        });
        self.process = Some(started.map_err(|error| Crash::new(format!("could not be started: {error}")))?);
        self.watchdog = Watchdog::new(self.watchdog.interval);
        // A log that still cannot be written is reported again: the last process may not have shown the notice.
        self.notified_log_failure &= self.recovery.log_failure().is_none();
        Ok(())
    }

    /// Tries to write a failed log again when the retry interval has passed. Notifies the clients when the log begins
    /// to fail, and when it can be written again.
    pub(super) fn check_log(&mut self) {
        if self.recovery.time_until_log_retry().is_some_and(|time| time.is_zero()) {
            self.recovery.retry_log();
        }
        let Some(input) = input_for_notices(&mut self.process) else { return };
        let text = match self.recovery.log_failure() {
            Some(reason) if !self.notified_log_failure => log_failure_notice(reason),
            None if self.notified_log_failure => {
                "The session's log can be written again and includes the definitions made meanwhile.".to_owned()
            }
            _ => return,
        };
        self.notified_log_failure = !self.notified_log_failure;
        for client in self.recovery.clients() {
            // An error means that the worker is lost, which the event loop detects.
            let _ = input.put(&mark_notice(client, &text));
        }
    }

    /// Records that a client has connected. If the log cannot be written, notifies the client, as the other clients
    /// were notified when the log began to fail.
    pub(super) fn connect(&mut self, client: u64) {
        self.recovery.connect(client);
        if self.notified_log_failure
            && let Some(reason) = self.recovery.log_failure()
            && let Some(input) = input_for_notices(&mut self.process)
        {
            // An error means that the worker is lost, which the event loop detects.
            let _ = input.put(&mark_notice(client, &log_failure_notice(reason)));
        }
    }

    /// Queues a line of a client, and sends waiting lines as long as the process reads them. A blank line has no effect. If
    /// it is long, the process finds out that it is blank: other clients would wait meanwhile.
    pub(super) fn add_line(&mut self, client: u64, line: Cow<'_, [u8]>) {
        if line.len() <= MAX_PARSED_LINE && line.trim_ascii_start().is_empty() {
            return;
        }
        self.recovery.requests.add(client, line);
        self.send_waiting();
    }

    /// Records that a client has disconnected, and notifies the process.
    pub(super) fn disconnect(&mut self, client: u64) {
        self.recovery.disconnect(client);
        self.send_waiting();
    }

    /// Sends waiting lines as long as the process reads them.
    pub(super) fn send_waiting(&mut self) {
        if let Some(process) = &mut self.process {
            process.send_waiting(&mut self.recovery.requests);
        }
    }

    /// Returns true while bytes are unsent or a process that is ready has lines waiting.
    pub(super) fn has_unsent_input(&self) -> bool {
        self.has_input_to_send(|process| process.ready)
    }

    /// Returns true while bytes are unsent or the process accepts the lines that wait.
    pub(super) fn can_send(&self) -> bool {
        self.has_input_to_send(WorkerProcess::takes_lines)
    }

    fn has_input_to_send(&self, takes_lines: impl Fn(&WorkerProcess) -> bool) -> bool {
        self.process.as_ref().is_some_and(|process| {
            let waits = takes_lines(process) && self.recovery.requests.has_unsent_lines();
            process.input.as_ref().is_some_and(|input| !input.is_empty() || waits)
        })
    }

    /// Returns true while the watchdog must check the process.
    pub(super) fn is_watched(&self) -> bool {
        self.process.as_ref().is_some_and(|process| {
            !process.replayed || process.unfinished_frame_at().is_some() || self.recovery.requests.has_awaited_lines()
        })
    }

    /// Records the loss of the process, and sets the time to start the next process. If two processes have stalled at a
    /// request, returns the request's client and the error that answers the request.
    ///
    /// # Errors
    /// Returns a sentence that says how often the image was lost, and what caused the last loss, if too many
    /// processes were lost.
    pub(super) fn record_loss(&mut self, crash: &Crash) -> Result<Option<(u64, Vec<u8>)>, String> {
        let process = self.process.take();
        let cause = &crash.cause;
        tracing::warn!("the Lisp image {cause}");
        let stage = match &process {
            Some(process) if process.replayed => WorkerStage::Serving,
            Some(process) if process.announced_status.is_none() => WorkerStage::Starting,
            _ => WorkerStage::Unstarted,
        };
        let progress = process
            .as_ref()
            .is_some_and(|process| self.recovery.record_crash(&process.status, process.replayed, crash));
        let now = Instant::now();
        let start_at = if progress { Ok(now) } else { self.restarts.record_loss(stage, now) };
        // If the server stops, all open requests stay open, and are answered with the reason.
        self.start_at = start_at.map_err(|times| {
            format!(
                "the Lisp image was lost {times} (the last image {cause}); the server stops: remove the cause \
                     before you start the server again"
            )
        })?;
        let stalling = self.recovery.requests.take_stalling_line();
        // Without a process, no line was sent.
        if let Some(process) = &process {
            self.recovery.requeue_open_lines(&process.status);
        }
        Ok(stalling.and_then(|(client, line)| Some((client, messages::stall_error(&line)?))))
    }

    /// Discards the process and schedules the next process at once. `record` records the reason in the recovery record.
    pub(super) fn replace(&mut self, record: impl FnOnce(&mut RecoveryRecord, &WorkerProcess)) {
        if let Some(process) = self.process.take() {
            record(&mut self.recovery, &process);
            self.recovery.requeue_open_lines(&process.status);
        }
        self.start_at = Instant::now();
    }
}

/// Returns the pipe for notices to the clients; `None` while there is no process, or the process still replays
/// definitions: a replay discards the notices that arrive while it runs.
fn input_for_notices(process: &mut Option<WorkerProcess>) -> Option<&mut WriteBuffer> {
    process.as_mut().filter(|process| process.replayed)?.input.as_mut()
}

fn log_failure_notice(reason: &str) -> String {
    format!(
        "The session's log cannot be written: {reason}. Until the log can be written again, new definitions are lost if the \
         server is killed. The server retries every {} seconds.",
        LOG_RETRY_INTERVAL.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::checkpoint::store::Checkpoints;
    use crate::supervisor::recovery::tests::options;
    use crate::supervisor::restart_policy::MAX_LOSSES;
    use crate::supervisor::watchdog::tests::replayed_worker;

    #[test]
    fn a_blank_line_is_dropped_unless_it_is_so_long_that_other_clients_would_wait() {
        let options = options(Checkpoints::new(std::env::temp_dir().join("sbcl-mcp-no-checkpoints"), 1 << 30, 2 << 20));
        let mut worker = Worker::new(RecoveryRecord::new(&options), options.watch_interval);
        for (length, is_kept) in [(1, false), (MAX_PARSED_LINE, false), (MAX_PARSED_LINE + 1, true)] {
            worker.add_line(0, vec![b' '; length].into());
            assert_eq!(worker.recovery.requests.has_unsent_lines(), is_kept, "{length}");
        }
    }

    #[test]
    fn a_request_at_which_two_workers_have_stalled_stays_open_if_the_server_stops() {
        let options = options(Checkpoints::new(std::env::temp_dir().join("sbcl-mcp-no-checkpoints"), 1 << 30, 2 << 20));
        let mut worker = Worker::new(RecoveryRecord::new(&options), options.watch_interval);
        worker.recovery.requests.add(0, *b"{\"id\":7,\"method\":\"ping\"}\n");
        for left in (0..MAX_LOSSES).rev() {
            worker.process = Some(replayed_worker());
            assert!(worker.recovery.requests.next_piece().is_some());
            let line = worker.recovery.requests.first_open_line_from(0);
            // Only the last two workers stall.
            let loss = worker.record_loss(&Crash::new("died").stalled_at(line.filter(|_| left < 2)));
            assert_eq!(loss.is_err(), left == 0);
        }
        assert!(worker.recovery.requests.has_awaited_lines());
    }
}
