//! The end of the server: open requests get an error as their answer, and the client has time to read these answers.

use std::time::{Duration, Instant};

use super::messages;
use super::requests::Requests;
use crate::os::poll_set::PollSet;
use crate::rpc::WriteBuffer;

/// Maximum time from the end of input, or from a signal, to the end of the server.
const SHUTDOWN_TIME: Duration = Duration::from_millis(950);
/// Minimum time for the client to read the last answers.
const FINAL_READ_TIME: Duration = Duration::from_millis(50);
/// Maximum time that a failed server waits for a client to send a request and to read the answer, which gives the
/// reason of the failure.
const FAILURE_REPORT_TIME: Duration = Duration::from_secs(2);

/// A shutdown in progress.
#[derive(Debug)]
pub(super) struct Shutdown {
    /// The exit status of the server.
    status: i32,
    /// The message of the errors that answer open requests.
    reason: String,
    /// The latest time for the server to end.
    pub(super) deadline: Instant,
    /// True when the server waits until a request can be answered with the reason.
    pub(super) waits_for_request: bool,
}

impl Shutdown {
    /// Creates the shutdown at the end of input, with `status` 0, or after a signal, with the exit status for the
    /// signal. Running calls have until the deadline to finish.
    pub(super) fn graceful(status: i32) -> Self {
        let reason = "the server is shutting down; the request was not finished".to_owned();
        Self { status, reason, deadline: Instant::now() + SHUTDOWN_TIME, waits_for_request: false }
    }

    /// Creates the shutdown of a server that cannot continue, for this reason.
    pub(super) fn failure(reason: String) -> Self {
        Self { status: 1, reason, deadline: Instant::now() + FAILURE_REPORT_TIME, waits_for_request: true }
    }

    /// Answers the open requests of the client of stdin with errors, and waits until the client has read `output`. The
    /// wait ends at the deadline, or after [`FINAL_READ_TIME`] if that is later. `worker` is the exit status that the
    /// worker announced. Returns the exit status of the server: the status of the shutdown or, if that status is 0 and the
    /// worker announced one, `worker`.
    pub(super) fn finish(self, requests: &Requests, output: &mut WriteBuffer, worker: Option<i32>) -> i32 {
        let mut refusals = requests.texts_of(0).filter_map(|line| messages::refusal(line, &self.reason));
        let end = self.deadline.max(Instant::now() + FINAL_READ_TIME);
        if refusals.all(|answer| output.put(&answer).is_ok()) {
            while !output.is_empty() && Instant::now() < end {
                let mut set = PollSet::new();
                set.add_write((), output);
                let left = end.saturating_duration_since(Instant::now());
                if set.wait(Some(left)).is_err() || output.flush().is_err() {
                    break;
                }
            }
        }
        worker.filter(|_| self.status == 0).unwrap_or(self.status)
    }
}
