//! The end of the server: whoever still waits is answered, and the client has a moment to read that.

use std::time::{Duration, Instant};

use super::messages;
use super::requests::Requests;
use crate::os::poll_set::PollSet;
use crate::rpc::WriteBuffer;

/// How long everything may take from the end of input, or a signal, to the end.
const LAST_WORDS: Duration = Duration::from_millis(950);
/// How long the client may take to read the last answers.
const FAREWELL: Duration = Duration::from_millis(50);
/// How long a client may take to ask for the first time when all that waits for it is bad news.
const BAD_NEWS: Duration = Duration::from_secs(2);

/// Why, how and by when the server ends.
#[derive(Debug)]
pub(super) struct Shutdown {
    status: i32,
    /// What whoever waits is told.
    reason: String,
    /// When everything must be over.
    pub(super) deadline: Instant,
    /// The reason is for whoever asks next, if nobody waits.
    pub(super) until_asked: bool,
}

impl Shutdown {
    /// For the end of input, or a signal: what runs has a moment for its end.
    pub(super) fn graceful(status: i32) -> Self {
        let reason = "the server is shutting down; this was not finished".to_owned();
        Self { status, reason, deadline: Instant::now() + LAST_WORDS, until_asked: false }
    }

    /// For a server that cannot go on.
    pub(super) fn failure(reason: String) -> Self {
        Self { status: 1, reason, deadline: Instant::now() + BAD_NEWS, until_asked: true }
    }

    /// Answers whoever waits; returns the exit status. `worker`: what the worker said its own will be.
    pub(super) fn finish(self, requests: &Requests, output: &mut WriteBuffer, worker: Option<i32>) -> i32 {
        let mut refusals = requests.of(0).filter_map(|line| messages::refusal(line, &self.reason));
        let end = self.deadline.max(Instant::now() + FAREWELL);
        if refusals.all(|answer| output.put(&answer).is_ok()) {
            while !output.is_empty() && Instant::now() < end {
                let mut set = PollSet::new();
                set.write((), output);
                let left = end.saturating_duration_since(Instant::now());
                if set.wait(Some(left)).is_err() || output.flush().is_err() {
                    break;
                }
            }
        }
        worker.filter(|_| self.status == 0).unwrap_or(self.status)
    }
}
