//! The end of the server: open requests get an error as their answer, and the clients have time to read these answers.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use super::attached_clients::AttachedClients;
use super::messages;
use super::requests::Requests;
use crate::os::poll_set::PollSet;
use crate::rpc::WriteBuffer;
use crate::rpc::framing::LineReader;

/// Maximum time from the end of input, or from a signal, until the supervisor stops waiting for the worker.
const SHUTDOWN_TIME: Duration = Duration::from_millis(900);
/// Minimum time for the clients to read the last answers and, after the deadline, maximum time for the supervisor to read
/// the last answers of a worker.
pub(super) const FINAL_READ_TIME: Duration = Duration::from_millis(50);
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
    /// The time at which the supervisor stops waiting for the worker.
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

    /// Answers the open requests of all clients with errors, and also the requests that were read but not handled,
    /// which are in the buffers of `input`, the input of the client of stdin, and of the `attached` clients. Then waits
    /// until the client of stdin has read `output` and the `attached` clients have read their answers. The wait ends at the
    /// deadline, or after [`FINAL_READ_TIME`] if that is later. Answers to attached clients and to requests that were not
    /// handled also stop then, because long requests take time to parse. `worker` is the exit status that the worker
    /// announced. Returns the exit status of the server: the status of the shutdown or, if that status is 0 and the worker
    /// announced one, `worker`.
    pub(super) fn finish(
        self,
        requests: &Requests,
        input: &mut LineReader,
        output: &mut WriteBuffer,
        attached: &mut AttachedClients,
        worker: Option<i32>,
    ) -> i32 {
        let reason = self.reason.as_str();
        let refusals = |client| requests.texts_of(client).filter_map(move |line| messages::refusal(line, reason));
        let mut is_open = refusals(0).all(|answer| output.put(&answer).is_ok());
        let end = self.deadline.max(Instant::now() + FINAL_READ_TIME);
        while is_open
            && Instant::now() < end
            && let Some(line) = input.next_line()
        {
            is_open = messages::unhandled_refusal(line, reason).is_none_or(|answer| output.put(&answer).is_ok());
        }
        for client in attached.connections() {
            let refusals = refusals(client).take_while(|_| Instant::now() < end);
            refusals.for_each(|answer| attached.send(client, Cow::Owned(answer)));
        }
        attached.answer_unhandled(end, |line| messages::unhandled_refusal(line, reason));
        attached.close();
        loop {
            let mut set = PollSet::new();
            if is_open && !output.is_empty() {
                set.add_write(None, output);
            }
            attached.add_descriptors(&mut set, Some, |_| false);
            let left = end.saturating_duration_since(Instant::now());
            if set.is_empty() || left.is_zero() {
                break;
            }
            let Ok(ready) = set.wait(Some(left)) else { break };
            if ready.has(None) {
                is_open = output.flush().is_ok();
            }
            attached.handle_ready(|descriptor| ready.has(Some(descriptor)), |_, _| ());
        }
        worker.filter(|_| self.status == 0).unwrap_or(self.status)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::rpc::framing::{Line, ReadStatus};

    #[test]
    fn requests_that_were_read_and_not_handled_are_answered_at_the_end() {
        let (reader, mut client) = std::io::pipe().unwrap();
        let (mut answers, writer) = std::io::pipe().unwrap();
        let (mut input, mut output) = (LineReader::new(reader.into()), WriteBuffer::new(writer.into()));
        let request = |id: u32| format!("{{\"id\":{id},\"method\":\"ping\"}}\n");
        let handled = request(1);
        let lines = format!("{handled}{}{{\"method\":\"x\"}}\n\n{}{{\"id\":4,\"me", request(2), request(3));
        client.write_all(lines.as_bytes()).unwrap();
        assert_eq!(input.read().unwrap(), ReadStatus::More);
        assert_eq!(input.next_line(), Some(Line::Text(handled.as_bytes().into())));
        let (requests, mut attached) = (Requests::new(), AttachedClients::new(None));
        let status = Shutdown::graceful(143).finish(&requests, &mut input, &mut output, &mut attached, Some(0));
        assert_eq!(status, 143);
        drop(output);
        let mut text = String::new();
        answers.read_to_string(&mut text).unwrap();
        let answers: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(answers.iter().map(|answer| answer["id"].as_u64()).collect::<Vec<_>>(), [Some(2), Some(3)]);
        for answer in answers {
            assert_eq!(answer["error"]["message"], "the server is shutting down; the request was not finished");
        }
    }
}
