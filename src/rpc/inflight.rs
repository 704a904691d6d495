//! The pending requests of one connection. Each request gets exactly one answer, or no answer if it is cancelled.
//!
//! Each request gets a number of its own, so that the client may use an id again once its request is answered or
//! cancelled. A request's [`Responder`] is consumed by answering; dropping the responder answers with an internal error.
//! Call numbers, in contrast, come from the supervisor, which numbers lines: the requests of a batch share a call number.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rmcp::model::{ErrorData, ProgressToken, RequestId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::output::{EncodedLine, MAX_ANSWER, MAX_UNREAD, Output};

/// Maximum number of pending requests.
pub(crate) const MAX_REQUESTS: usize = 10_000;
/// Maximum size of all pending requests, in bytes. A single request may be larger.
pub(crate) const MAX_BYTES: usize = 128 << 20;

/// Interval between progress reports while there is no new output.
const STATUS_INTERVAL: Duration = Duration::from_secs(4);
/// Interval between checks for new output.
const OUTPUT_INTERVAL: Duration = Duration::from_millis(250);
/// Interval before the next report to a client that wants all output, while the client has not got all of it.
const REST_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum number of bytes of output in one report, unless the client wants all output.
const MAX_PROGRESS_MESSAGE: usize = 1000;
/// Maximum number of bytes of output in one report to a client that wants all output. The next reports have the rest:
/// other requests would wait while a report of many megabytes is encoded.
const MAX_OUTPUT_PART: usize = 64 << 10;
/// Key in the `_meta` of a progress report. Its value is the index of the message's first byte in the whole output. Only
/// reports of output have the key, and only for clients that want all output.
pub(crate) const OUTPUT_OFFSET_KEY: &str = "sbcl-mcp/output-from";
/// Maximum number of timers that run at a time: thousands of timers must not keep the event loop from its other work.
const MAX_TIMERS_PER_TURN: usize = 256;
/// Maximum duration of a timer.
const MAX_TIMER: Duration = Duration::from_secs(86_400);
/// The time for which the event loop waits for the lock of the pending requests, where it can do without.
const BRIEF_LOCK_TIME: Duration = Duration::from_micros(100);
/// The time after which the event loop tries again to run timers, when another thread has kept a lock that they need.
pub(crate) const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

type CancelFn = Box<dyn FnOnce() + Send>;
type OutputSince = Box<dyn Fn(usize, usize) -> Option<String> + Send>;
type StatusText = Box<dyn Fn() -> Option<String> + Send>;
/// A function that takes the client's response to a server request.
type ReplyHandler = Box<dyn FnOnce(Result<Value, NoAnswer>) + Send>;
/// A function that takes the server requests after one was added or removed.
type ServerRequestObserver = Box<dyn Fn(ServerRequests) + Send>;

/// The reason why a server request has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// The client refused, with this message.
    Refused(String),
    /// The client did not answer in time.
    TimedOut,
    /// The server has withdrawn the request.
    Withdrawn,
}

/// The numbers of one connection's server requests, which the next worker needs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ServerRequests {
    /// The number of the last request; 0 before the first request.
    pub(crate) last: u64,
    /// The numbers of the requests that are neither answered nor withdrawn.
    pub(crate) open: Vec<u64>,
}

/// The pending requests of one connection: the client's requests, and the requests that the server sent to the client
/// ("server requests").
#[derive(Debug)]
pub(crate) struct Inflight {
    pub(crate) output: Arc<Output>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// The last number given to a request of the client, and to a server request.
    last_number: u64,
    last_server_request: u64,
    requests: HashMap<u64, PendingRequest>,
    ids: HashMap<RequestId, u64>,
    bytes: usize,
    /// Bytes of answers in batches that are not complete.
    batched_bytes: usize,
    server_requests: HashMap<u64, ServerRequest>,
    server_request_observer: Option<ServerRequestObserver>,
    timers: BTreeSet<(Instant, Timer)>,
    /// By call: the time since the supervisor received the call, when this worker got it from an earlier worker.
    ages: HashMap<u64, Duration>,
    /// True once the client is gone, so that no answer can reach it.
    is_closed: bool,
    /// The reason why no further requests are admitted, after [`Inflight::fail_all`].
    end_reason: Option<&'static str>,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("ids", &self.ids).finish_non_exhaustive()
    }
}

/// A timer. The value is the number of the request: a server request for `ServerRequest`, otherwise a client's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Progress(u64),
    ServerRequest(u64),
    Deadline(u64),
}

struct PendingRequest {
    id: RequestId,
    /// Size of the request, in bytes; 0 for a request in a batch, since the batch counts the bytes of its requests.
    bytes: usize,
    destination: Destination,
    /// Functions that stop the steps of the request, such as its jobs. Their order is arbitrary, since a step may be
    /// registered before the previous step is. Stopping a finished step has no effect.
    cancel: Vec<CancelFn>,
    progress: Option<Progress>,
    /// A deadline, and the function to call if the request is not answered by then.
    deadline: Option<(Instant, CancelFn)>,
}

/// The destination of an answer.
#[derive(Debug)]
enum Destination {
    /// The client itself: the answer completes the call with this number.
    Line(u64),
    /// A batch, which is answered as a whole.
    Batch(Arc<Batch>),
}

impl Destination {
    /// Returns the number of the call that the answer completes.
    fn call(&self) -> u64 {
        match self {
            Self::Line(call) => *call,
            Self::Batch(batch) => batch.call,
        }
    }
}

/// The answers to a batch, which are sent together.
#[derive(Debug)]
pub(crate) struct Batch {
    call: u64,
    state: Mutex<BatchState>,
}

#[derive(Debug)]
struct BatchState {
    answers: EncodedLine,
    /// The ids of the answered requests.
    ids: Vec<RequestId>,
    missing: usize,
    /// Size of the admitted requests, in bytes.
    bytes: usize,
}

struct Progress {
    token: ProgressToken,
    /// True if reports have all output, in parts, false if they have only the end of the new output.
    all_output: bool,
    begin: Instant,
    last_report: Instant,
    /// Number of bytes of output reported so far.
    reported: usize,
    next: Instant,
    printed: OutputSince,
    status: StatusText,
}

/// A request from the server to the client.
struct ServerRequest {
    /// Number of the client's request that this request serves.
    on_behalf_of: u64,
    deadline: Instant,
    reply: ReplyHandler,
}

/// The JSON-RPC response to a request.
#[derive(Serialize)]
struct Response<I, R> {
    jsonrpc: &'static str,
    id: I,
    #[serde(flatten)]
    body: ResponseBody<R>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum ResponseBody<R> {
    Result(R),
    Error(ErrorData),
}

impl<I> Response<I, ()> {
    fn failed(id: I, error: ErrorData) -> Self {
        Self { jsonrpc: "2.0", id, body: ResponseBody::Error(error) }
    }
}

impl Inflight {
    /// Creates an empty table of pending requests, whose answers go to `output`.
    pub(crate) fn new(output: Arc<Output>) -> Arc<Self> {
        Arc::new(Self { output, table: Mutex::default() })
    }

    /// Admits a request of `bytes` bytes. Without `batch`, the answer to the request completes `call`; otherwise, the answer
    /// is sent with the other answers of the batch.
    ///
    /// # Errors
    /// Returns the error to answer with if another request with this id is pending, if the pending requests are too many or
    /// too large, or after [`fail_all`](Self::fail_all).
    pub(crate) fn admit(
        self: &Arc<Self>,
        id: RequestId,
        call: u64,
        batch: Option<&Arc<Batch>>,
        bytes: usize,
    ) -> Result<Responder, ErrorData> {
        let mut table = self.table.lock();
        if let Some(reason) = table.end_reason {
            return Err(ErrorData::internal_error(reason, None));
        }
        if table.ids.contains_key(&id) {
            let reason = "not a valid request: a request with this id is still pending; use another id";
            return Err(ErrorData::invalid_request(reason, None));
        }
        if table.requests.len() >= MAX_REQUESTS || !table.requests.is_empty() && table.bytes + bytes > MAX_BYTES {
            let limit = if table.requests.len() >= MAX_REQUESTS {
                format!("{} pending", table.requests.len())
            } else {
                format!("with this request, more than {} MiB would be pending", MAX_BYTES >> 20)
            };
            let reason =
                format!("request limit reached ({limit}); send this request again when some requests are answered");
            return Err(ErrorData::internal_error(reason, None));
        }
        table.last_number += 1;
        let number = table.last_number;
        table.bytes += bytes;
        table.ids.insert(id.clone(), number);
        let (destination, bytes) = match batch {
            None => (Destination::Line(call), bytes),
            Some(batch) => {
                let mut state = batch.state.lock();
                state.missing += 1;
                // These bytes count until the whole batch is answered, since the supervisor keeps the line until then.
                state.bytes += bytes;
                (Destination::Batch(batch.clone()), 0)
            }
        };
        table.requests.insert(
            number,
            PendingRequest { id, bytes, destination, cancel: Vec::new(), progress: None, deadline: None },
        );
        Ok(Responder { request: number, inflight: self.clone(), settled: false })
    }

    /// Returns true if this request is pending.
    pub(crate) fn is_awaited(&self, request: u64) -> bool {
        self.table.lock().requests.contains_key(&request)
    }

    /// Returns false while another thread keeps the lock for which most functions of this type wait: a garbage collection may
    /// have stopped a Lisp thread that sends an answer.
    pub(crate) fn is_unlocked(&self) -> bool {
        self.table.try_lock_for(BRIEF_LOCK_TIME).is_some()
    }

    /// Returns true if no request is pending.
    pub(crate) fn is_idle(&self) -> bool {
        self.table.lock().requests.is_empty()
    }

    /// Cancels the pending request with this id. The request gets no answer, and its id may be used again. Returns false
    /// if no request with this id is pending.
    pub(crate) fn cancel(&self, id: &RequestId) -> bool {
        let mut table = self.table.lock();
        let Some(number) = table.ids.get(id).copied() else { return false };
        let withdrawn = table.take_server_requests_where(|sent| sent.on_behalf_of == number);
        let Some(request) = table.take(number) else { return true };
        for (sent, _) in &withdrawn {
            self.withdraw(*sent, "the evaluation was cancelled");
        }
        self.finish_unanswered(&mut table, &request.destination);
        drop(table);
        self.output.notify_answered();
        request.cancel.into_iter().for_each(|cancel| cancel());
        // The reply handlers may own the responder of the cancelled request; dropping the responder now sends no answer.
        drop(withdrawn);
        true
    }

    /// Answers a line, or a member of a batch, with `error`, without admitting a request. `id` is the id that the
    /// client sent, if any, and may be any JSON value.
    pub(crate) fn refuse(&self, id: Option<Value>, error: ErrorData, call: u64, batch: Option<&Arc<Batch>>) {
        let refusal = encode_error(&id.unwrap_or_default(), error);
        match batch {
            None => self.output.answer(call, refusal),
            Some(batch) => self.table.lock().add_answer(batch, &refusal),
        }
    }

    /// Creates a batch, which stays incomplete until [`Self::mark_batch_read`].
    pub(crate) fn new_batch(call: u64) -> Arc<Batch> {
        let state = BatchState { answers: EncodedLine::default(), ids: Vec::new(), missing: 1, bytes: 0 };
        Arc::new(Batch { call, state: Mutex::new(state) })
    }

    /// Marks a batch as completely read. Until then, the unread rest counts as a missing member of the batch, so that the
    /// answers are not sent too early.
    pub(crate) fn mark_batch_read(&self, batch: &Batch) {
        self.finish_batch_member(&mut self.table.lock(), batch);
    }

    /// Counts one member of the batch as done, and sends the answers if no other member is missing.
    fn finish_batch_member(&self, table: &mut Table, batch: &Batch) {
        let mut state = batch.state.lock();
        state.missing -= 1;
        if state.missing > 0 {
            return;
        }
        for id in state.ids.drain(..) {
            table.ids.remove(&id);
        }
        table.bytes -= state.bytes;
        table.batched_bytes -= state.answers.len();
        if state.answers.is_empty() || table.is_closed {
            self.output.send_done(batch.call);
        } else {
            self.output.answer(batch.call, std::mem::take(&mut state.answers));
        }
    }

    /// Completes a request without an answer.
    fn finish_unanswered(&self, table: &mut Table, destination: &Destination) {
        match destination {
            Destination::Line(call) => self.output.send_done(*call),
            Destination::Batch(batch) => self.finish_batch_member(table, batch),
        }
    }

    /// Makes all requests complete without an answer from now on, because the client is gone.
    pub(crate) fn close(&self) {
        self.table.lock().is_closed = true;
    }

    /// Returns true after [`close`](Self::close).
    pub(crate) fn is_closed(&self) -> bool {
        self.table.lock().is_closed
    }

    /// Cancels all pending requests, because the client is gone. The newest request is cancelled first: a queued job must
    /// not begin because the job before it was cancelled.
    pub(crate) fn cancel_all(&self) {
        let mut requests: Vec<_> = self.table.lock().ids.iter().map(|(id, number)| (*number, id.clone())).collect();
        requests.sort_unstable_by_key(|(number, _)| Reverse(*number));
        for (_, id) in requests {
            self.cancel(&id);
        }
    }

    /// Answers all pending requests with an error, and refuses further requests with the same error.
    pub(crate) fn fail_all(&self, reason: &'static str) {
        let mut table = self.table.lock();
        table.end_reason = Some(reason);
        let numbers: Vec<_> = table.requests.keys().copied().collect();
        drop(table);
        for number in numbers {
            self.fail(number, ErrorData::internal_error(reason, None));
        }
    }

    /// Returns true after [`fail_all`](Self::fail_all).
    pub(crate) fn refuses_requests(&self) -> bool {
        self.table.lock().end_reason.is_some()
    }

    fn fail(&self, number: u64, error: ErrorData) {
        self.settle::<()>(number, ResponseBody::Error(error));
    }

    /// Sends an answer if the request is still pending.
    fn settle<R: Serialize>(&self, number: u64, body: ResponseBody<R>) {
        let id = {
            let table = self.table.lock();
            table.requests.get(&number).filter(|_| !table.is_closed).map(|request| request.id.clone())
        };
        // The answer is encoded before the lock is taken, so that other threads with answers need not wait for this step.
        let answer = id.filter(|_| !self.output.has_excess_backlog()).map(|id| encode(&id, body));
        // The lock is held until the answer is sent, so that a cancellation comes either before or after the answer.
        let mut table = self.table.lock();
        let Some(request) = table.take(number) else {
            // The lock is released first, because a `tracing` subscriber might wait for it.
            drop(table);
            tracing::debug!(number, "the answer was dropped: its request is no longer pending");
            return;
        };
        let answer = answer.unwrap_or_else(|| encode_error(&request.id, unread_error()));
        match &request.destination {
            destination if table.is_closed => self.finish_unanswered(&mut table, destination),
            Destination::Line(call) => self.output.answer(*call, answer),
            Destination::Batch(batch) => {
                let answer = if table.batched_bytes + answer.len() <= MAX_ANSWER {
                    answer
                } else {
                    let error = encode_error(&request.id, too_large_error("Put fewer requests in a batch"));
                    // Most refusals are this short, and their reasons must not be lost.
                    if answer.len() <= error.len() { answer } else { error }
                };
                table.add_answer(batch, &answer);
                // `take` has freed the id, but the client must not use the id again before the batch is answered.
                table.ids.insert(request.id.clone(), number);
                batch.state.lock().ids.push(request.id);
                self.finish_batch_member(&mut table, batch);
            }
        }
        drop(table);
        self.output.notify_answered();
    }

    /// Adds a function to call if the client cancels the request before it is answered. Returns false if the request is
    /// no longer pending.
    pub(crate) fn on_cancel(&self, request: u64, cancel: impl FnOnce() + Send + 'static) -> bool {
        let mut table = self.table.lock();
        let request = table.requests.get_mut(&request);
        request.map(|request| request.cancel.push(Box::new(cancel))).is_some()
    }

    /// Calls `on_deadline` if the request is not answered within `time`.
    pub(crate) fn set_deadline(&self, request: u64, time: Duration, on_deadline: impl FnOnce() + Send + 'static) {
        let mut table = self.table.lock();
        let Some(known) = table.requests.get_mut(&request) else { return };
        let time = Instant::now() + time.min(MAX_TIMER);
        known.deadline = Some((time, Box::new(on_deadline)));
        self.arm(&mut table, time, Timer::Deadline(request));
    }

    /// Reports the progress of a request until it is answered. `printed` takes the number of bytes of output reported so
    /// far and a maximum length in bytes. It returns the output that follows, if there is any, cut after a character if it is
    /// longer. While there is no new output, a report is sent every few seconds, with the text that `status` returns or, if
    /// `status` returns `None`, with the elapsed time. With `all_output`, the reports have all of the output, and each report
    /// has the byte index of its part; otherwise, a report has only the end of the new output. If the request had other
    /// reports before, also from an earlier worker, the time continues: the progress of a request must increase (MCP).
    pub(crate) fn report_progress(
        &self,
        request: u64,
        token: ProgressToken,
        all_output: bool,
        printed: impl Fn(usize, usize) -> Option<String> + Send + 'static,
        status: impl Fn() -> Option<String> + Send + 'static,
    ) {
        let mut table = self.table.lock();
        let table = &mut *table;
        let Some(known) = table.requests.get_mut(&request) else { return };
        let now = Instant::now();
        let next = now + OUTPUT_INTERVAL;
        let age = table.ages.get(&known.destination.call()).copied().unwrap_or_default();
        let first = now.checked_sub(age).unwrap_or(now);
        let begin = known.progress.as_ref().map_or(first, |previous| previous.begin);
        let (printed, status) = (Box::new(printed), Box::new(status));
        let progress = Progress { token, all_output, begin, last_report: now, reported: 0, next, printed, status };
        if let Some(previous) = known.progress.replace(progress) {
            table.timers.remove(&(previous.next, Timer::Progress(request)));
        }
        self.arm(table, next, Timer::Progress(request));
    }

    /// Sets the time since the supervisor received a call, which an earlier worker has received but not answered.
    pub(crate) fn set_age(&self, call: u64, age: Duration) {
        self.table.lock().ages.insert(call, age);
    }

    /// Sets a timer. Wakes the event loop if the timer is now the first.
    fn arm(&self, table: &mut Table, time: Instant, timer: Timer) {
        if table.timers.first().is_none_or(|(first, _)| time < *first) {
            self.output.wake();
        }
        table.timers.insert((time, timer));
    }

    /// Sets the function that is called when server requests are added or removed. A new server request is sent after
    /// the call.
    pub(crate) fn set_server_request_observer(&self, observer: impl Fn(ServerRequests) + Send + 'static) {
        self.table.lock().server_request_observer = Some(Box::new(observer));
    }

    /// Withdraws the open server requests of an earlier worker, whose numbers are not used again: a late answer to such a
    /// request must not answer another request.
    pub(crate) fn withdraw_earlier(&self, earlier: &ServerRequests) {
        let mut table = self.table.lock();
        table.last_server_request = earlier.last;
        for number in &earlier.open {
            self.withdraw(*number, "the Lisp process was replaced");
        }
        if !earlier.open.is_empty() {
            table.notify_server_request_observer();
        }
    }

    /// Sends a server request to the client, to serve the client's request with the number `request`. `reply` gets the
    /// answer, or the reason why no answer came within `time`. If the client's request is cancelled, `reply` is dropped and
    /// the server request is withdrawn.
    pub(crate) fn ask(&self, request: u64, method: &str, params: &impl Serialize, time: Duration, reply: ReplyHandler) {
        let mut table = self.table.lock();
        if !table.requests.contains_key(&request) {
            return;
        }
        table.last_server_request += 1;
        let number = table.last_server_request;
        let deadline = Instant::now() + time.min(MAX_TIMER);
        table.server_requests.insert(number, ServerRequest { on_behalf_of: request, deadline, reply });
        table.notify_server_request_observer();
        self.arm(&mut table, deadline, Timer::ServerRequest(number));
        drop(table);
        self.output.send(&json!({"jsonrpc": "2.0", "id": number, "method": method, "params": params}));
    }

    /// Passes the client's answer, a result or the message of a refusal, to the reply handler of the server request with
    /// this number. The answer is ignored if no such request is open.
    pub(crate) fn deliver_reply(&self, number: u64, answer: Result<Value, String>) {
        let found = self.table.lock().take_server_request(number);
        if let Some(reply) = found {
            reply(answer.map_err(NoAnswer::Refused));
        }
    }

    /// Withdraws the server requests that serve the client's request with the number `request`, and sends `reason` to the
    /// client.
    pub(crate) fn withdraw_for(&self, request: u64, reason: &str) {
        let server_requests = self.table.lock().take_server_requests_where(|sent| sent.on_behalf_of == request);
        for (number, reply) in server_requests {
            self.withdraw(number, reason);
            reply(Err(NoAnswer::Withdrawn));
        }
    }

    fn withdraw(&self, number: u64, reason: &str) {
        let params = json!({"requestId": number, "reason": reason});
        self.output.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}));
    }

    /// Runs timers that have expired by `now`, at most [`MAX_TIMERS_PER_TURN`]. Returns the time of the next timer,
    /// which may have expired, too.
    pub(crate) fn run_timers(&self, now: Instant) -> Option<Instant> {
        for _ in 0..MAX_TIMERS_PER_TURN {
            let Some(mut table) = self.table.try_lock_for(BRIEF_LOCK_TIME) else {
                return Some(now + LOCK_RETRY_INTERVAL);
            };
            let (time, timer) = *table.timers.first()?;
            if time > now {
                return Some(time);
            }
            table.timers.remove(&(time, timer));
            match timer {
                // The lock is held while the report is sent, so that no report follows the answer.
                Timer::Progress(number) => {
                    if let Some(next) = table.report(number, now, &self.output) {
                        table.timers.insert((next, timer));
                    }
                }
                Timer::Deadline(number) => {
                    let expired = table.requests.get_mut(&number).and_then(|request| request.deadline.take());
                    drop(table);
                    if let Some((_, on_deadline)) = expired {
                        on_deadline();
                    }
                }
                Timer::ServerRequest(number) => {
                    let reply = table.take_server_request(number);
                    drop(table);
                    if let Some(reply) = reply {
                        self.withdraw(number, "the client did not answer in time");
                        reply(Err(NoAnswer::TimedOut));
                    }
                }
            }
        }
        match self.table.try_lock_for(BRIEF_LOCK_TIME) {
            Some(table) => table.timers.first().map(|(time, _)| *time),
            None => Some(now + LOCK_RETRY_INTERVAL),
        }
    }
}

/// Encodes an answer. An answer that is too long becomes an error.
fn encode<R: Serialize>(id: &impl Serialize, body: ResponseBody<R>) -> EncodedLine {
    match EncodedLine::new(&Response { jsonrpc: "2.0", id, body }) {
        Ok(answer) if answer.len() <= MAX_ANSWER => answer,
        Ok(_) => encode_error(id, too_large_error("Ask for less")),
        Err(error) => {
            encode_error(id, ErrorData::internal_error(format!("the answer cannot be encoded as JSON: {error}"), None))
        }
    }
}

fn encode_error(id: &impl Serialize, error: ErrorData) -> EncodedLine {
    EncodedLine::new(&Response::failed(id, error)).expect("an id and an error can be encoded as JSON")
}

/// Returns the error that replaces an answer over [`MAX_ANSWER`] bytes, or an answer with which batches would exceed this
/// limit. The request may have been refused. `advice` is a sentence without a full stop.
fn too_large_error(advice: &str) -> ErrorData {
    let limit = MAX_ANSWER >> 20;
    let reason =
        format!("the answer was dropped: the limit is {limit} MiB; the request may have been executed. {advice}");
    ErrorData::internal_error(reason, None)
}

/// Returns the error that replaces an answer to a client with too many unread bytes. The request may have been refused.
pub(crate) fn unread_error() -> ErrorData {
    let reason = format!(
        "the answer was dropped, because {} MiB of earlier answers have not reached the client; the request may have been \
         executed. Read the earlier answers before you send more requests",
        MAX_UNREAD >> 20
    );
    ErrorData::internal_error(reason, None)
}

impl Table {
    fn take(&mut self, number: u64) -> Option<PendingRequest> {
        let request = self.requests.remove(&number)?;
        self.ids.remove(&request.id);
        self.bytes -= request.bytes;
        if let Some(progress) = &request.progress {
            self.timers.remove(&(progress.next, Timer::Progress(number)));
        }
        if let Some((time, _)) = &request.deadline {
            self.timers.remove(&(*time, Timer::Deadline(number)));
        }
        Some(request)
    }

    /// Adds an answer to a batch.
    fn add_answer(&mut self, batch: &Batch, answer: &EncodedLine) {
        let answers = &mut batch.state.lock().answers;
        let before = answers.len();
        answers.push(answer);
        self.batched_bytes += answers.len() - before;
    }

    fn take_server_request(&mut self, number: u64) -> Option<ReplyHandler> {
        let server_request = self.server_requests.remove(&number)?;
        self.timers.remove(&(server_request.deadline, Timer::ServerRequest(number)));
        self.notify_server_request_observer();
        Some(server_request.reply)
    }

    fn notify_server_request_observer(&self) {
        if let Some(observer) = &self.server_request_observer {
            let open = self.server_requests.keys().copied().collect();
            observer(ServerRequests { last: self.last_server_request, open });
        }
    }

    fn take_server_requests_where(&mut self, which: impl Fn(&ServerRequest) -> bool) -> Vec<(u64, ReplyHandler)> {
        let numbers: Vec<_> = self.server_requests.iter().filter(|(_, sent)| which(sent)).map(|(n, _)| *n).collect();
        numbers.into_iter().filter_map(|number| Some((number, self.take_server_request(number)?))).collect()
    }

    /// Sends a progress report if there is new output, or if the last report is old. Sends no report while the backlog
    /// is large, since answers would have to wait for it. Returns the time of the next check.
    fn report(&mut self, number: u64, now: Instant, output: &Output) -> Option<Instant> {
        let progress = self.requests.get_mut(&number)?.progress.as_mut()?;
        progress.next = now + OUTPUT_INTERVAL;
        if !output.accepts_requests() {
            if progress.all_output {
                progress.next = now + REST_INTERVAL;
            }
            return Some(progress.next);
        }
        let seconds = (now - progress.begin).as_secs_f64();
        let mut meta = None;
        // With a character more than a report has room for, the length shows whether more output follows.
        let max = if progress.all_output { MAX_OUTPUT_PART + 4 } else { usize::MAX };
        let message = match (progress.printed)(progress.reported, max) {
            Some(mut printed) if progress.all_output => {
                meta = Some(json!({OUTPUT_OFFSET_KEY: progress.reported}));
                if printed.len() > MAX_OUTPUT_PART {
                    let end = (0..=MAX_OUTPUT_PART).rfind(|index| printed.is_char_boundary(*index)).unwrap_or(0);
                    printed.truncate(end);
                    progress.next = now + REST_INTERVAL;
                }
                progress.reported += printed.len();
                printed
            }
            Some(printed) => {
                progress.reported += printed.len();
                tail(&printed).to_owned()
            }
            None if now - progress.last_report >= STATUS_INTERVAL => {
                (progress.status)().unwrap_or_else(|| format!("still running after {seconds:.0} seconds"))
            }
            None => return Some(progress.next),
        };
        progress.last_report = now;
        let mut params = json!({"progressToken": progress.token, "progress": seconds, "message": message});
        if let Some(meta) = meta {
            params["_meta"] = meta;
        }
        output.send(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}));
        Some(progress.next)
    }
}

/// Returns the end of `output` that fits into a report.
fn tail(output: &str) -> &str {
    let start = output.len().saturating_sub(MAX_PROGRESS_MESSAGE);
    let start = (start..output.len()).find(|index| output.is_char_boundary(*index)).unwrap_or(0);
    output[start..].trim_end()
}

/// The obligation to answer one request. Answering consumes the responder; dropping the responder answers with an
/// internal error.
#[derive(Debug)]
pub(crate) struct Responder {
    request: u64,
    inflight: Arc<Inflight>,
    settled: bool,
}

impl Responder {
    /// Returns the number of the request, which is unique on this connection.
    pub(crate) fn request_number(&self) -> u64 {
        self.request
    }

    /// Returns the call number of the request's line; `None` for a request in a batch, and if the request needs no answer any
    /// more.
    pub(crate) fn line(&self) -> Option<u64> {
        match self.inflight.table.lock().requests.get(&self.request)?.destination {
            Destination::Line(call) => Some(call),
            Destination::Batch(_) => None,
        }
    }

    /// Answers the request with a result.
    pub(crate) fn answer(mut self, result: impl Serialize) {
        self.settled = true;
        self.inflight.settle(self.request, ResponseBody::Result(result));
    }

    /// Answers the request with a protocol error.
    pub(crate) fn fail(mut self, error: ErrorData) {
        self.settled = true;
        self.inflight.fail(self.request, error);
    }

    /// Leaves the request to another process, which will answer it. Returns false if the request needs no answer any more,
    /// for example because the client has cancelled it or is gone.
    pub(crate) fn leave_unanswered(mut self) -> bool {
        self.settled = true;
        let mut table = self.inflight.table.lock();
        let request = table.take(self.request);
        let is_closed = table.is_closed;
        if let Some(request) = request.as_ref().filter(|_| is_closed) {
            self.inflight.finish_unanswered(&mut table, &request.destination);
        }
        drop(table);
        request.is_some() && !is_closed
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.settled {
            let reason = "the server failed to answer this request; see its log on stderr";
            self.inflight.fail(self.request, ErrorData::internal_error(reason, None));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::waker::Waker;
    use proptest::prelude::*;
    use std::io::{BufRead, BufReader};
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Client {
        inflight: Arc<Inflight>,
        lines: BufReader<std::io::PipeReader>,
    }

    impl Client {
        fn new() -> Self {
            let (reader, writer) = std::io::pipe().unwrap();
            let output =
                Output::new(writer.into(), crate::rpc::output::Recipient::Client, Arc::new(Waker::new().unwrap()))
                    .unwrap();
            Self { inflight: Inflight::new(Arc::new(output)), lines: BufReader::new(reader) }
        }

        fn admit(&self, id: i64) -> Result<Responder, ErrorData> {
            self.inflight.admit(RequestId::Number(id), 1, None, 10)
        }

        /// Ends the connection and returns all messages that were sent.
        fn end(self) -> Vec<Value> {
            let Self { inflight, lines } = self;
            drop(inflight);
            lines.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect()
        }
    }

    #[test]
    fn a_responder_answers_exactly_once_even_if_dropped_or_unwound() {
        let client = Client::new();
        client.admit(1).unwrap().answer(json!("one"));
        client.admit(2).unwrap().fail(ErrorData::invalid_params("no", None));
        drop(client.admit(3).unwrap());
        assert!(client.admit(4).unwrap().leave_unanswered());
        let panicking = client.admit(5).unwrap();
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _owed = panicking;
            panic!("on the way to an answer");
        }));
        assert!(panic.is_err());
        assert!(client.inflight.is_idle());
        let answers = client.end();
        assert_eq!(answers.iter().map(|answer| answer["id"].clone()).collect::<Vec<_>>(), [1, 2, 3, 5]);
        assert_eq!(answers[0], json!({"jsonrpc": "2.0", "id": 1, "result": "one"}));
        assert_eq!(answers[1]["error"]["code"], -32602);
        assert_eq!((&answers[2]["error"]["code"], &answers[3]["error"]["code"]), (&json!(-32603), &json!(-32603)));
    }

    #[test]
    fn a_client_that_is_gone_gets_no_answers() {
        let client = Client::new();
        let batch = Inflight::new_batch(2);
        let admit = |id| client.inflight.admit(RequestId::Number(id), 2, Some(&batch), 10).unwrap();
        let members = [admit(1), admit(2), admit(3)];
        client.inflight.mark_batch_read(&batch);
        let [early, answered, left] = members;
        early.answer(json!("early"));
        let single = [4, 5, 6].map(|id| client.admit(id).unwrap());
        client.inflight.close();
        answered.answer(json!("late"));
        assert!(!left.leave_unanswered());
        let [answered, left, cancelled] = single;
        answered.answer(json!("late"));
        assert!(!left.leave_unanswered());
        client.inflight.cancel_all();
        cancelled.answer(json!("late"));
        assert!(client.inflight.is_idle() && client.inflight.is_closed());
        assert_eq!(client.end(), Vec::<Value>::new());
    }

    #[test]
    fn only_long_answers_are_dropped_from_a_batch_that_is_too_large() {
        let client = Client::new();
        let batch = Inflight::new_batch(1);
        let admit = |id| client.inflight.admit(RequestId::Number(id), 1, Some(&batch), 10).unwrap();
        let [refused, short, long] = [admit(1), admit(2), admit(3)];
        client.inflight.mark_batch_read(&batch);
        client.inflight.table.lock().batched_bytes = MAX_ANSWER;
        refused.fail(ErrorData::invalid_params("no", None));
        short.answer(json!("short"));
        long.answer(json!("x".repeat(1_000)));
        let sent = client.end();
        assert_eq!((&sent[0][0]["error"]["message"], &sent[0][1]["result"]), (&json!("no"), &json!("short")));
        let message = sent[0][2]["error"]["message"].as_str().unwrap();
        assert!(message.contains("128 MiB") && message.contains("may have been executed"), "{message}");
    }

    #[test]
    fn progress_and_timeouts_end_with_the_answer() {
        let client = Client::new();
        let (late, called) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let responders = [1, 2].map(|id| client.admit(id).unwrap());
        for responder in &responders {
            let inflight = &client.inflight;
            inflight.report_progress(
                responder.request_number(),
                ProgressToken(RequestId::Number(9)),
                false,
                |from, _| "printed".get(from..).filter(|text| !text.is_empty()).map(str::to_owned),
                || None,
            );
            let (late, called) = (late.clone(), called.clone());
            inflight.set_deadline(responder.request_number(), Duration::from_secs(1), move || {
                _ = late.fetch_add(1, Ordering::Relaxed)
            });
            for _ in 0..2 {
                let called = called.clone();
                assert!(
                    inflight.on_cancel(responder.request_number(), move || _ = called.fetch_add(1, Ordering::Relaxed))
                );
            }
        }
        let [first, second] = responders;
        first.answer(json!(1));
        let now = Instant::now();
        assert!(client.inflight.run_timers(now).is_some_and(|next| next > now));
        client.inflight.run_timers(now + Duration::from_secs(2));
        assert_eq!((late.load(Ordering::Relaxed), called.load(Ordering::Relaxed)), (1, 0));
        client.inflight.cancel(&RequestId::Number(2));
        client.inflight.cancel(&RequestId::Number(2));
        assert_eq!(called.load(Ordering::Relaxed), 2);
        assert!(!client.inflight.on_cancel(second.request_number(), || unreachable!("it is cancelled already")));
        assert_eq!(client.inflight.run_timers(now + Duration::from_secs(9)), None);
        second.answer(json!(2));
        let sent = client.end();
        assert_eq!(sent.len(), 2, "{sent:?}");
        assert_eq!(
            (&sent[1]["method"], &sent[1]["params"]["message"]),
            (&json!("notifications/progress"), &json!("printed"))
        );
    }

    #[test]
    fn large_output_is_reported_in_parts_without_gaps() {
        let client = Client::new();
        let responder = client.admit(1).unwrap();
        let Client { inflight, lines } = client;
        // The limit of a report falls within a character.
        let printed = format!("x{}", "é".repeat(MAX_OUTPUT_PART));
        let all = printed.clone();
        inflight.report_progress(
            responder.request_number(),
            ProgressToken(RequestId::Number(9)),
            true,
            move |from, max| {
                assert!(max < 2 * MAX_OUTPUT_PART, "the whole output would be copied for each report");
                let rest = all.get(from..).filter(|rest| !rest.is_empty())?;
                let end = (0..=max.min(rest.len())).rfind(|end| rest.is_char_boundary(*end))?;
                Some(rest[..end].to_owned())
            },
            || None,
        );
        let reading = std::thread::spawn(move || {
            lines.lines().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap()).collect::<Vec<_>>()
        });
        let begin = Instant::now() + OUTPUT_INTERVAL;
        for turn in 0..3 {
            inflight.run_timers(begin + REST_INTERVAL * turn);
        }
        while inflight.output.backlog() > 0 {
            inflight.output.flush();
            std::thread::yield_now();
        }
        assert!(responder.leave_unanswered());
        drop(inflight);
        let mut reported = String::new();
        for report in reading.join().unwrap() {
            let message = report["params"]["message"].as_str().unwrap();
            assert_eq!(report["params"]["_meta"][OUTPUT_OFFSET_KEY], reported.len());
            assert!(message.len() <= MAX_OUTPUT_PART);
            reported += message;
        }
        assert_eq!(reported, printed);
    }

    /// The event loop handles lines between the timers.
    #[test]
    fn many_expired_timers_run_in_several_turns() {
        let client = Client::new();
        let requests = 2 * MAX_TIMERS_PER_TURN + 1;
        let expired = Arc::new(AtomicUsize::new(0));
        let responders: Vec<_> = (0..requests).map(|id| client.admit(id as i64).unwrap()).collect();
        for responder in &responders {
            let expired = expired.clone();
            let count = move || _ = expired.fetch_add(1, Ordering::Relaxed);
            client.inflight.set_deadline(responder.request_number(), Duration::ZERO, count);
        }
        let now = Instant::now();
        for run in [MAX_TIMERS_PER_TURN, 2 * MAX_TIMERS_PER_TURN] {
            assert!(client.inflight.run_timers(now).is_some_and(|next| next <= now));
            assert_eq!(expired.load(Ordering::Relaxed), run);
        }
        assert_eq!(client.inflight.run_timers(now), None);
        assert_eq!(expired.load(Ordering::Relaxed), requests);
        assert!(responders.into_iter().all(Responder::leave_unanswered));
    }

    #[test]
    fn progress_does_not_decrease_when_other_reports_replace_the_reports_of_a_request() {
        let client = Client::new();
        client.inflight.set_age(1, Duration::from_secs(100));
        let responder = client.admit(1).unwrap();
        let later = Instant::now() + Duration::from_secs(60);
        for _ in 0..2 {
            let token = ProgressToken(RequestId::Number(9));
            client.inflight.report_progress(responder.request_number(), token, false, |_, _| None, || None);
            client.inflight.run_timers(later);
        }
        assert!(responder.leave_unanswered());
        let progress: Vec<_> = client.end().iter().map(|sent| sent["params"]["progress"].as_f64().unwrap()).collect();
        assert!(progress.len() == 2 && progress.is_sorted() && progress[0] > 100.0, "{progress:?}");
    }

    #[test]
    fn a_server_request_is_answered_once_or_times_out_or_is_withdrawn() {
        let client = Client::new();
        let answers = Arc::new(Mutex::new(Vec::new()));
        let responders = [1, 2, 3, 4].map(|id| client.admit(id).unwrap());
        for responder in &responders {
            let (answers, owed) = (answers.clone(), responder.request_number());
            let reply = move |answer| answers.lock().push((owed, answer));
            client.inflight.ask(owed, "ask", &json!({}), Duration::from_secs(1), Box::new(reply));
        }
        client.inflight.cancel(&RequestId::Number(1));
        let sent = [1, 2, 3, 4];
        client.inflight.deliver_reply(sent[1], Ok(json!("yes")));
        client.inflight.deliver_reply(sent[1], Ok(json!("again")));
        client.inflight.deliver_reply(sent[0], Ok(json!("nobody's")));
        client.inflight.withdraw_for(responders[3].request_number(), "not needed");
        client.inflight.run_timers(Instant::now() + Duration::from_secs(2));
        let [_, second, third, fourth] = [0, 1, 2, 3].map(|index: usize| responders[index].request_number());
        let expected =
            [(second, Ok(json!("yes"))), (fourth, Err(NoAnswer::Withdrawn)), (third, Err(NoAnswer::TimedOut))];
        assert_eq!(*answers.lock(), expected);
        responders.into_iter().for_each(|responder| _ = responder.leave_unanswered());
        let withdrawn: Vec<_> = client.end().iter().map(|message| message["params"]["requestId"].clone()).collect();
        let asked = std::iter::repeat_n(json!(null), 4);
        assert_eq!(withdrawn, asked.chain([0, 3, 2].map(|index: usize| json!(sent[index]))).collect::<Vec<_>>());
    }

    #[test]
    fn the_next_worker_withdraws_open_server_requests_and_does_not_use_their_numbers_again() {
        let client = Client::new();
        let reported = Arc::new(Mutex::new(Vec::new()));
        let reports = reported.clone();
        client.inflight.set_server_request_observer(move |requests| reports.lock().push(requests));
        client.inflight.withdraw_earlier(&ServerRequests { last: 7, open: vec![6] });
        let responder = client.admit(1).unwrap();
        let reply = Box::new(|answer: Result<Value, NoAnswer>| assert_eq!(answer, Ok(json!("yes"))));
        client.inflight.ask(responder.request_number(), "ask", &json!({}), Duration::from_secs(1), reply);
        client.inflight.deliver_reply(6, Ok(json!("late")));
        client.inflight.deliver_reply(8, Ok(json!("yes")));
        assert!(responder.leave_unanswered());
        let sent = client.end();
        assert_eq!((sent.len(), &sent[0]["params"]["requestId"], &sent[1]["id"]), (2, &json!(6), &json!(8)));
        let reported: Vec<_> = reported.lock().iter().map(|requests| (requests.last, requests.open.clone())).collect();
        assert_eq!(reported, [(7, vec![]), (8, vec![8]), (8, vec![])]);
    }

    #[test]
    fn requests_over_the_count_and_size_limits_are_refused() {
        let client = Client::new();
        let big = client.inflight.admit(RequestId::Number(-1), 1, None, MAX_BYTES + 1).unwrap();
        let refused = client.admit(-2).unwrap_err();
        assert!(refused.message.contains("more than 128 MiB"), "{refused:?}");
        assert!(big.leave_unanswered());
        let taken: Vec<_> = (0..MAX_REQUESTS).map(|id| client.admit(id as i64).unwrap()).collect();
        let refused = client.admit(-3).unwrap_err();
        assert!(refused.message.contains("(10000 pending)"), "{refused:?}");
        assert!(taken.into_iter().all(Responder::leave_unanswered));
        assert!(client.admit(-3).unwrap().leave_unanswered());
        assert_eq!(client.end(), Vec::<Value>::new());
    }

    /// A step of a random sequence. `Ask` and `Cancel` have the id of a request; `Answer` and `Drop` have the index of a
    /// responder.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Ask(i64),
        Cancel(i64),
        Answer(usize),
        Drop(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0_i64..4).prop_map(Step::Ask),
            2 => (0_i64..4).prop_map(Step::Cancel),
            3 => (0_usize..8).prop_map(Step::Answer),
            1 => (0_usize..8).prop_map(Step::Drop),
        ]
    }

    proptest! {
        /// In any order of steps, every request that is not cancelled is answered once, by its own responder.
        #[test]
        fn every_request_that_is_not_cancelled_gets_exactly_its_own_answer(steps in prop::collection::vec(step(), 0..60)) {
            let client = Client::new();
            let mut owed: Vec<(Responder, usize)> = Vec::new();
            // `waiting` maps the id of each pending request to the step that made it. `expected` lists the ids and results
            // of the answers that must have been sent.
            let mut waiting: HashMap<i64, usize> = HashMap::new();
            let mut expected = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Ask(id) => match client.admit(id) {
                        Ok(responder) => {
                            prop_assert!(waiting.insert(id, number).is_none());
                            owed.push((responder, number));
                        }
                        Err(_) => prop_assert!(waiting.contains_key(&id)),
                    },
                    Step::Cancel(id) => {
                        client.inflight.cancel(&RequestId::Number(id));
                        waiting.remove(&id);
                    }
                    Step::Answer(index) | Step::Drop(index) if index < owed.len() => {
                        let (responder, call) = owed.remove(index);
                        let id = waiting.iter().find(|(_, waits)| **waits == call).map(|(id, _)| *id);
                        let answers = matches!(step, Step::Answer(_));
                        if let Some(id) = id {
                            waiting.remove(&id);
                            expected.push((id, if answers { json!(call) } else { json!(null) }));
                        }
                        if answers { responder.answer(json!(call)) } else { drop(responder) }
                    }
                    Step::Answer(_) | Step::Drop(_) => {}
                }
            }
            prop_assert_eq!(client.inflight.is_idle(), waiting.is_empty());
            for (responder, _) in owed {
                let number = responder.request_number();
                let is_awaited = client.inflight.is_awaited(number);
                prop_assert_eq!(responder.leave_unanswered(), is_awaited);
            }
            let sent = client.end().into_iter();
            let sent: Vec<_> = sent.map(|answer| (answer["id"].as_i64().unwrap(), answer["result"].clone())).collect();
            prop_assert_eq!(sent, expected);
        }
    }
}
