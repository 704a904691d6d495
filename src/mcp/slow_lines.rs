//! Slow lines: long lines, large batches, and calls that search directories, read checkpoints, or show a large output,
//! a backtrace or many errors. A thread handles the slow lines of one client, and the client's later lines wait until
//! the thread has handled them in order. Pings, cancellations, and answers to the server's questions do not wait.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use parking_lot::Mutex;
use rmcp::model::{JsonObject, RequestId};

use super::conversation::Conversation;
use super::incoming::{DecodedLine, Message, decode};
use crate::os::panics;
use crate::rpc::id_scanner::IdScanner;
use crate::rpc::inflight::{MAX_BYTES, MAX_REQUESTS};

/// Length of a line, in bytes, above which the line is slow. The event loop decodes shorter lines itself.
const MIN_SLOW_LINE: usize = 64 << 10;

/// The lines of one client that wait for the thread that handles its slow lines.
#[derive(Debug, Default)]
pub(super) struct SlowLines(Mutex<Option<Waiting>>);

/// Waiting lines. The lines exist until the thread has handled all of them.
#[derive(Debug, Default)]
struct Waiting {
    lines: VecDeque<WaitingLine>,
    /// Size of the lines, in bytes.
    bytes: usize,
    /// The ids in waiting cancellations, each with the call number of the last cancellation.
    cancelled: HashMap<RequestId, u64>,
}

/// A line that waits, with its call number and its size in bytes.
#[derive(Debug)]
enum WaitingLine {
    Text(u64, Vec<u8>),
    /// The cancellation of a request that was not pending yet.
    Cancellation(u64, RequestId, usize),
    /// The end of the connection.
    End,
}

impl WaitingLine {
    fn bytes(&self) -> usize {
        match self {
            Self::Text(_, text) => text.len(),
            Self::Cancellation(_, _, bytes) => *bytes,
            Self::End => 0,
        }
    }
}

impl Waiting {
    fn push(&mut self, line: WaitingLine) {
        self.bytes += line.bytes();
        if let WaitingLine::Cancellation(number, id, _) = &line {
            self.cancelled.insert(id.clone(), *number);
        }
        self.lines.push_back(line);
    }

    fn pop(&mut self) -> Option<WaitingLine> {
        let line = self.lines.pop_front()?;
        self.bytes -= line.bytes();
        if let WaitingLine::Cancellation(number, id, _) = &line
            && self.cancelled.get(id) == Some(number)
        {
            self.cancelled.remove(id);
        }
        Some(line)
    }
}

impl SlowLines {
    /// Returns true if no line is being handled or waits.
    fn is_empty(&self) -> bool {
        self.0.lock().is_none()
    }

    /// Returns true unless the waiting lines are as many, or as large, as pending requests may be.
    pub(super) fn accept_more(&self) -> bool {
        let waiting = self.0.lock();
        waiting.as_ref().is_none_or(|waiting| waiting.lines.len() < MAX_REQUESTS && waiting.bytes < MAX_BYTES)
    }

    /// Returns true if a waiting cancellation names the request `id` of line `number`. A cancellation applies only to
    /// requests before it.
    pub(super) fn has_cancellation(&self, id: &RequestId, number: u64) -> bool {
        let waiting = self.0.lock();
        waiting
            .as_ref()
            .and_then(|waiting| waiting.cancelled.get(id))
            .is_some_and(|cancellation| *cancellation > number)
    }

    /// Appends a line if other lines are being handled or wait. Otherwise, returns the line.
    fn push(&self, line: WaitingLine) -> Option<WaitingLine> {
        match &mut *self.0.lock() {
            Some(waiting) => {
                waiting.push(line);
                None
            }
            None => Some(line),
        }
    }

    /// Returns the next line, even if the line before it is still being handled.
    fn pop_early(&self) -> Option<WaitingLine> {
        self.0.lock().as_mut().and_then(Waiting::pop)
    }

    /// Returns the next line to handle. After the last line, later lines do not wait.
    fn pop(&self) -> Option<WaitingLine> {
        let mut waiting = self.0.lock();
        let line = waiting.as_mut().and_then(Waiting::pop);
        if line.is_none() {
            *waiting = None;
        }
        line
    }
}

impl Conversation {
    /// Returns true if no request is pending and no line waits.
    pub(super) fn is_idle(&self) -> bool {
        // A waiting line's request is admitted before the line stops waiting.
        self.slow_lines.is_empty() && self.inflight().is_idle()
    }

    /// Returns false while a line would wait for a lock that another thread keeps. A garbage collection may have stopped this
    /// thread, and the event loop must not wait for the end of the collection.
    fn is_unlocked(&self) -> bool {
        self.inflight().is_unlocked() && self.tools().session().is_unlocked()
    }

    /// Handles a line from the client: at once, or on another thread if the line is slow, must wait for a slow line, or would
    /// wait for a lock.
    /// `number` is the call number.
    pub(super) fn receive(self: &Arc<Self>, line: &[u8], number: u64) {
        if self.tools().is_being_replaced() {
            return self.receive_during_replacement(line, number);
        }
        if line.len() > MIN_SLOW_LINE {
            return self.handle_slow(line.to_vec(), number);
        }
        let decoded = decode(line);
        if decoded.overtakes_slow_lines() && self.inflight().is_unlocked() {
            return self.handle_decoded(decoded, line.len(), number);
        }
        let is_first = self.slow_lines.is_empty();
        if decoded.is_slow() || is_first && !self.is_unlocked() {
            return self.handle_slow(line.to_vec(), number);
        }
        if is_first {
            return self.handle_decoded(decoded, line.len(), number);
        }
        let waiting = match decoded.cancelled_request() {
            Some(id) if self.is_unlocked() && self.inflight().cancel(&id) => {
                return self.inflight().output.send_done(number);
            }
            Some(id) => WaitingLine::Cancellation(number, id, line.len()),
            None => WaitingLine::Text(number, line.to_vec()),
        };
        if let Some(line) = self.slow_lines.push(waiting) {
            self.handle_waiting(line);
        }
    }

    /// Handles a line while another image replaces this one, or leaves the line to the next image, which gets every line
    /// without an answer in the order in which the lines arrived.
    fn receive_during_replacement(self: &Arc<Self>, line: &[u8], number: u64) {
        if line.len() > MIN_SLOW_LINE {
            return self.leave_line();
        }
        let decoded = decode(line);
        if let Some(id) = decoded.cancelled_request() {
            // The cancellation is left, too: the request, or a batch with it, may be among the lines for the next image.
            if !self.inflight().cancel(&id) {
                _ = self.slow_lines.push(WaitingLine::Cancellation(number, id, line.len()));
            }
        } else if decoded.overtakes_slow_lines() {
            self.handle_decoded(decoded, line.len(), number);
        } else if !self.may_handle(&decoded) {
            self.leave_line();
        } else if decoded.is_slow() || !self.slow_lines.is_empty() {
            self.handle_slow(line.to_vec(), number);
        } else {
            self.handle_decoded(decoded, line.len(), number);
        }
    }

    /// Returns false if a line must be left to the image that replaces this one. An answer that needs no Lisp, or to a call
    /// that only reads, does not wait for the evaluations that unwind, unless the client's earlier lines have been left. A
    /// client that has itself requested the next image reads from that image.
    fn may_handle(&self, decoded: &DecodedLine) -> bool {
        let is_next = || !self.has_left_lines.load(Ordering::Relaxed);
        let reads_here = || decoded.only_reads() && self.tools().is_replaced_for_others();
        !self.tools().is_being_replaced() || is_next() && (decoded.needs_no_lisp() || reads_here())
    }

    /// Leaves a line to the image that replaces this one.
    pub(super) fn leave_line(&self) {
        self.has_left_lines.store(true, Ordering::Relaxed);
    }

    /// Handles a slow line on a separate thread, after the client's earlier slow lines. `number` is the call number.
    pub(super) fn handle_slow(self: &Arc<Self>, line: Vec<u8>, number: u64) {
        if line.len() > MIN_SLOW_LINE && self.tools().is_being_replaced() {
            return self.leave_line();
        }
        let Some(line) = self.slow_lines.push(WaitingLine::Text(number, line)) else { return };
        self.slow_lines.0.lock().get_or_insert_default().push(line);
        let conversation = self.clone();
        let handle_all = move |on_own_thread: bool| {
            conversation.tools().count_pending_answer(true);
            let next_line = || {
                if on_own_thread {
                    // Other clients' answers would wait behind the answer to the next line.
                    conversation.inflight().output.wait_for_supervisor();
                }
                conversation.slow_lines.pop()
            };
            while let Some(line) = next_line() {
                conversation.handle_waiting_and_catch(line);
                // The event loop reads on when fewer lines wait.
                conversation.inflight().output.wake();
            }
            conversation.tools().count_pending_answer(false);
            // The event loop checks for shutdown only when it wakes.
            conversation.inflight().output.wake();
        };
        let handle_on_thread = handle_all.clone();
        let thread = std::thread::Builder::new().name("sbcl-mcp-line".to_owned());
        if thread.spawn(move || handle_on_thread(true)).is_err() {
            handle_all(false);
        }
    }

    /// Handles a waiting line, even if the handling panics.
    fn handle_waiting_and_catch(&self, line: WaitingLine) {
        // Unwinding drops the call's `Responder`, which answers the client.
        if panics::catch(|| self.handle_waiting(line)).is_none() {
            tracing::error!(
                "a panic ended the handling of a request: please report this bug, with the message of the panic"
            );
        }
    }

    fn handle_waiting(&self, line: WaitingLine) {
        match line {
            WaitingLine::Text(_, text) if text.len() > MIN_SLOW_LINE && self.tools().is_being_replaced() => {
                self.leave_line();
            }
            WaitingLine::Text(number, text) => {
                let decoded = self.request_to_refuse(&text).unwrap_or_else(|| {
                    self.tools().record_decoding(number, true);
                    let decoded = decode(&text);
                    self.tools().record_decoding(number, false);
                    decoded
                });
                if self.may_handle(&decoded) {
                    self.handle_decoded(decoded, text.len(), number);
                } else {
                    self.leave_line();
                }
            }
            WaitingLine::Cancellation(number, id, _) => {
                self.inflight().cancel(&id);
                if !self.tools().is_being_replaced() {
                    self.inflight().output.send_done(number);
                }
            }
            WaitingLine::End => self.end(),
        }
    }

    /// Returns the request in a long line, with its id alone, if all requests are refused: to decode the line could take too
    /// long. Returns `None` if the line must be decoded, for instance because it is a batch.
    fn request_to_refuse(&self, text: &[u8]) -> Option<DecodedLine> {
        if text.len() <= MIN_SLOW_LINE || !self.inflight().refuses_requests() {
            return None;
        }
        let id = serde_json::from_value(IdScanner::scan(text).request_id()?).ok()?;
        Some(DecodedLine::Single(Ok(Message::Request { id, method: String::new(), params: JsonObject::new() })))
    }

    /// Handles waiting lines until `end`, after [`Inflight::fail_all`](crate::rpc::inflight::Inflight::fail_all): their requests
    /// are refused, and need not wait for the slow line that is being handled. Returns true if no line waits or is being handled.
    pub(super) fn refuse_waiting(&self, end: Instant) -> bool {
        while Instant::now() < end
            && let Some(line) = self.slow_lines.pop_early()
        {
            self.handle_waiting_and_catch(line);
        }
        self.slow_lines.is_empty()
    }

    /// Ends the connection of a client that is gone. The client's waiting lines are dropped, and a slow line that is
    /// being handled is cancelled.
    pub(super) fn disconnect(&self) {
        let mut waiting = self.slow_lines.0.lock();
        let Some(lines) = &mut *waiting else {
            drop(waiting);
            return self.end();
        };
        let dropped = std::mem::take(lines);
        lines.push(WaitingLine::End);
        drop(waiting);
        for line in dropped.lines {
            if let WaitingLine::Text(number, _) | WaitingLine::Cancellation(number, ..) = line {
                self.inflight().output.send_done(number);
            }
        }
        self.cancel_requests();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_of_more_than_16_messages_are_slow() {
        let batch = |messages| format!("[{}]", vec![r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#; messages].join(","));
        assert!(!decode(batch(16).as_bytes()).is_slow());
        assert!(decode(batch(17).as_bytes()).is_slow());
    }

    #[test]
    fn a_waiting_cancellation_applies_only_to_earlier_lines_with_its_id() {
        let (lines, id) = (SlowLines::default(), RequestId::Number(7));
        assert!(lines.push(WaitingLine::Cancellation(1, id.clone(), 10)).is_some(), "nothing is being handled");
        *lines.0.lock() = Some(Waiting::default());
        for number in [5, 8] {
            assert!(lines.push(WaitingLine::Cancellation(number, id.clone(), 10)).is_none());
        }
        assert!(lines.has_cancellation(&id, 7) && !lines.has_cancellation(&id, 8));
        assert!(!lines.has_cancellation(&RequestId::Number(6), 1));
        lines.pop();
        assert!(lines.has_cancellation(&id, 7), "the second cancellation still waits");
        lines.pop();
        assert!(!lines.has_cancellation(&id, 7) && !lines.is_empty());
        assert!(lines.pop().is_none() && lines.is_empty());
    }

    #[test]
    fn lines_beyond_the_limit_of_pending_requests_are_not_accepted() {
        let lines = SlowLines::default();
        *lines.0.lock() = Some(Waiting::default());
        lines.push(WaitingLine::Text(1, vec![0; MAX_BYTES - 1]));
        assert!(lines.accept_more());
        lines.push(WaitingLine::Text(2, vec![0]));
        assert!(!lines.accept_more());
        lines.pop();
        assert!(lines.accept_more());
        (0..MAX_REQUESTS).for_each(|_| drop(lines.push(WaitingLine::End)));
        assert!(!lines.accept_more());
    }
}
