//! The requests that wait for an answer: each gets exactly one, and none once it is cancelled.
//!
//! A request is known by a call number of our own, so that its id may be used again as soon as the client has no more
//! to expect of it. The number's [`Responder`] is consumed by answering; dropping it is an answer as well.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rmcp::model::{ErrorData, ProgressToken, RequestId};
use serde::Serialize;
use serde_json::{Value, json};

use super::output::Output;

/// So many requests may wait at a time.
pub(crate) const MAX_REQUESTS: usize = 10_000;
/// So many bytes of requests may wait, but for one that waits alone.
pub(crate) const MAX_BYTES: usize = 128 << 20;

/// Clients are promised a sign of life every five seconds; this leaves some room.
const PROGRESS_EVERY: Duration = Duration::from_secs(4);
/// How often output is looked for.
const OUTPUT_EVERY: Duration = Duration::from_millis(250);
/// Bytes of output in one report.
const MESSAGE_BYTES: usize = 1000;
/// How long a question may stay open at most.
const DAY: Duration = Duration::from_secs(86_400);

type Cancel = Box<dyn FnOnce() + Send>;
type Printed = Box<dyn Fn(usize) -> Option<String> + Send>;
/// Takes the client's answer to a question.
type Reply = Box<dyn FnOnce(Result<Value, NoAnswer>) + Send>;

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// The client says why.
    Refused(String),
    /// It has not come in time.
    Late,
    /// There is nothing to be asked any more.
    Moot,
}

/// What waits on one connection.
#[derive(Debug)]
pub(crate) struct Inflight {
    pub(crate) output: Arc<Output>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    last: u64,
    calls: HashMap<u64, Call>,
    ids: HashMap<RequestId, u64>,
    bytes: usize,
    questions: HashMap<u64, Question>,
    timers: BTreeSet<(Instant, Timer)>,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("ids", &self.ids).finish_non_exhaustive()
    }
}

/// What is due, by the number that it concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Progress(u64),
    Question(u64),
    Late(u64),
}

struct Call {
    id: RequestId,
    bytes: usize,
    place: Place,
    cancel: Option<Cancel>,
    progress: Option<Progress>,
    /// What is done when it is not answered by then.
    late: Option<(Instant, Cancel)>,
}

/// Where an answer goes.
#[derive(Debug)]
enum Place {
    /// To the client: it is all that this line asked for.
    Line(u64),
    /// Into a batch.
    Batch(Arc<Batch>),
}

/// The answers to a batch, which leave together.
#[derive(Debug)]
pub(crate) struct Batch {
    line: u64,
    state: Mutex<BatchState>,
}

#[derive(Debug)]
struct BatchState {
    answers: Vec<Value>,
    /// The ids of what is answered.
    ids: Vec<RequestId>,
    missing: usize,
}

struct Progress {
    token: ProgressToken,
    begin: Instant,
    told: Instant,
    /// Bytes of output that were reported.
    seen: usize,
    next: Instant,
    printed: Printed,
}

/// A request of ours.
struct Question {
    call: u64,
    until: Instant,
    reply: Reply,
}

/// What answers a request.
#[derive(Serialize)]
struct Response<I, R> {
    jsonrpc: &'static str,
    id: I,
    #[serde(flatten)]
    outcome: Outcome<R>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome<R> {
    Result(R),
    Error(ErrorData),
}

impl<I> Response<I, ()> {
    fn failed(id: I, error: ErrorData) -> Self {
        Self { jsonrpc: "2.0", id, outcome: Outcome::Error(error) }
    }
}

impl Inflight {
    /// Nothing waits yet; answers go to `output`.
    pub(crate) fn new(output: Arc<Output>) -> Arc<Self> {
        Arc::new(Self { output, table: Mutex::default() })
    }

    /// Takes a request of `bytes` bytes in `line`, or in a batch there.
    ///
    /// # Errors
    /// When another request of that id waits, or too many wait: what to answer.
    pub(crate) fn admit(
        self: &Arc<Self>,
        id: RequestId,
        line: u64,
        batch: Option<&Arc<Batch>>,
        bytes: usize,
    ) -> Result<Responder, ErrorData> {
        let mut table = self.table.lock();
        if table.ids.contains_key(&id) {
            let reason = "not a valid request: another one of this id is not answered yet";
            return Err(ErrorData::invalid_request(reason, None));
        }
        if table.calls.len() >= MAX_REQUESTS || !table.calls.is_empty() && table.bytes + bytes > MAX_BYTES {
            let reason = format!(
                "{} requests of {} MiB wait for their answers, which is as many as may: ask again when some have theirs",
                table.calls.len(),
                table.bytes >> 20
            );
            return Err(ErrorData::internal_error(reason, None));
        }
        table.last += 1;
        let number = table.last;
        table.bytes += bytes;
        table.ids.insert(id.clone(), number);
        let place = match batch {
            None => Place::Line(line),
            Some(batch) => {
                batch.state.lock().missing += 1;
                Place::Batch(batch.clone())
            }
        };
        table.calls.insert(number, Call { id, bytes, place, cancel: None, progress: None, late: None });
        Ok(Responder { call: number, inflight: self.clone(), settled: false })
    }

    /// True when nothing waits for an answer.
    pub(crate) fn is_idle(&self) -> bool {
        self.table.lock().calls.is_empty()
    }

    /// Cancels the request of this id, if there is one: it gets no answer any more, and its id is free.
    pub(crate) fn cancel(&self, id: &RequestId) {
        let mut table = self.table.lock();
        let Some(number) = table.ids.get(id).copied() else { return };
        let withdrawn = table.take_questions(|question| question.call == number);
        let Some(call) = table.take(number) else { return };
        for (question, _) in &withdrawn {
            self.withdraw(*question, "the evaluation was cancelled");
        }
        match call.place {
            Place::Line(line) => self.output.done(line),
            Place::Batch(batch) => self.finish(&mut table, &batch, None),
        }
        drop(table);
        // With what they would have answered, which finds nobody.
        drop(withdrawn);
        if let Some(cancel) = call.cancel {
            cancel();
        }
    }

    /// Answers a line, or a part of a batch, that is no request; its id is whatever the client sent.
    pub(crate) fn refuse(&self, id: Option<Value>, error: ErrorData, line: u64, batch: Option<&Batch>) {
        let refusal = Response::failed(id.unwrap_or_default(), error);
        match batch {
            None => self.output.answer(line, &refusal),
            Some(batch) => batch.state.lock().answers.extend(encode(&refusal)),
        }
    }

    /// A batch that is being read: it is not complete before [`Self::batch_read`].
    pub(crate) fn batch(line: u64) -> Arc<Batch> {
        Arc::new(Batch { line, state: Mutex::new(BatchState { answers: Vec::new(), ids: Vec::new(), missing: 1 }) })
    }

    /// All of the batch has been looked at.
    pub(crate) fn batch_read(&self, batch: &Batch) {
        self.finish(&mut self.table.lock(), batch, None);
    }

    fn finish(&self, table: &mut Table, batch: &Batch, answer: Option<Value>) {
        let mut state = batch.state.lock();
        state.answers.extend(answer);
        state.missing -= 1;
        if state.missing > 0 {
            return;
        }
        for id in state.ids.drain(..) {
            table.ids.remove(&id);
        }
        if state.answers.is_empty() {
            self.output.done(batch.line);
        } else {
            self.output.answer(batch.line, &std::mem::take(&mut state.answers));
        }
    }

    /// Gives the last answer of all to whatever still waits.
    pub(crate) fn abandon(&self, reason: &'static str) {
        let numbers: Vec<_> = self.table.lock().calls.keys().copied().collect();
        for number in numbers {
            self.fail(number, ErrorData::internal_error(reason, None));
        }
    }

    fn fail(&self, number: u64, error: ErrorData) {
        self.settle::<()>(number, Outcome::Error(error));
    }

    /// Sends an answer, if it is still wanted.
    fn settle<R: Serialize>(&self, number: u64, outcome: Outcome<R>) {
        // Held until it is sent: whoever comes too late to cancel it finds it sent.
        let mut table = self.table.lock();
        let Some(call) = table.take(number) else {
            tracing::debug!(number, "nobody waits for this answer");
            return;
        };
        let response = Response { jsonrpc: "2.0", id: &call.id, outcome };
        match &call.place {
            Place::Line(line) => self.output.answer(*line, &response),
            Place::Batch(batch) => {
                let answer = encode(&response);
                // The client may not use it again before it has the answer.
                table.ids.insert(call.id.clone(), number);
                batch.state.lock().ids.push(call.id.clone());
                self.finish(&mut table, batch, answer);
            }
        }
        drop(table);
    }

    /// Has `cancel` called should the client cancel this call before it is answered.
    pub(crate) fn on_cancel(&self, call: u64, cancel: impl FnOnce() + Send + 'static) {
        if let Some(call) = self.table.lock().calls.get_mut(&call) {
            call.cancel = Some(Box::new(cancel));
        }
    }

    /// Has `late` called if the call is not answered after `time`.
    pub(crate) fn after(&self, call: u64, time: Duration, late: impl FnOnce() + Send + 'static) {
        let mut table = self.table.lock();
        let Some(known) = table.calls.get_mut(&call) else { return };
        let time = Instant::now() + time.min(DAY);
        known.late = Some((time, Box::new(late)));
        table.timers.insert((time, Timer::Late(call)));
    }

    /// Reports the progress of a call until it is answered: the output that `printed` brings from a byte on, if there is
    /// more, and now and then that it goes on.
    pub(crate) fn report_progress(
        &self,
        call: u64,
        token: ProgressToken,
        printed: impl Fn(usize) -> Option<String> + Send + 'static,
    ) {
        let mut table = self.table.lock();
        let Some(known) = table.calls.get_mut(&call) else { return };
        let begin = Instant::now();
        let next = begin + OUTPUT_EVERY;
        known.progress = Some(Progress { token, begin, told: begin, seen: 0, next, printed: Box::new(printed) });
        table.timers.insert((next, Timer::Progress(call)));
    }

    /// Asks the client something on behalf of a call: `reply` gets what it answers within `time`, or why it did not.
    /// It is dropped when the call is cancelled, and the question is withdrawn.
    pub(crate) fn ask(&self, call: u64, method: &str, params: &impl Serialize, time: Duration, reply: Reply) {
        let mut table = self.table.lock();
        if !table.calls.contains_key(&call) {
            return;
        }
        table.last += 1;
        let number = table.last;
        let until = Instant::now() + time.min(DAY);
        table.questions.insert(number, Question { call, until, reply });
        table.timers.insert((until, Timer::Question(number)));
        drop(table);
        self.output.send(&json!({"jsonrpc": "2.0", "id": number, "method": method, "params": params}));
    }

    /// Takes the client's answer to a question: a result, or why there is none. Others are nobody's.
    pub(crate) fn answered(&self, question: u64, answer: Result<Value, String>) {
        let found = self.table.lock().take_question(question);
        if let Some(reply) = found {
            reply(answer.map_err(NoAnswer::Refused));
        }
    }

    /// Withdraws all questions.
    pub(crate) fn withdraw_all(&self, reason: &str) {
        let questions = self.table.lock().take_questions(|_| true);
        for (question, reply) in questions {
            self.withdraw(question, reason);
            reply(Err(NoAnswer::Moot));
        }
    }

    fn withdraw(&self, question: u64, reason: &str) {
        let params = json!({"requestId": question, "reason": reason});
        self.output.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}));
    }

    /// Does what is due by `now`; answers when the next thing is.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        loop {
            let mut table = self.table.lock();
            let (time, timer) = *table.timers.first()?;
            if time > now {
                return Some(time);
            }
            table.timers.remove(&(time, timer));
            match timer {
                // The answer waits for the lock, so that no progress is reported after it.
                Timer::Progress(number) => {
                    if let Some(next) = table.report(number, now, &self.output) {
                        table.timers.insert((next, timer));
                    }
                }
                Timer::Late(number) => {
                    let late = table.calls.get_mut(&number).and_then(|call| call.late.take());
                    drop(table);
                    if let Some((_, late)) = late {
                        late();
                    }
                }
                Timer::Question(number) => {
                    let reply = table.take_question(number);
                    drop(table);
                    if let Some(reply) = reply {
                        self.withdraw(number, "nobody answered in time");
                        reply(Err(NoAnswer::Late));
                    }
                }
            }
        }
    }
}

fn encode(message: &impl Serialize) -> Option<Value> {
    serde_json::to_value(message).inspect_err(|error| tracing::error!(%error, "an answer cannot be written")).ok()
}

impl Table {
    fn take(&mut self, number: u64) -> Option<Call> {
        let call = self.calls.remove(&number)?;
        self.ids.remove(&call.id);
        self.bytes -= call.bytes;
        if let Some(progress) = &call.progress {
            self.timers.remove(&(progress.next, Timer::Progress(number)));
        }
        if let Some((time, _)) = &call.late {
            self.timers.remove(&(*time, Timer::Late(number)));
        }
        Some(call)
    }

    fn take_question(&mut self, number: u64) -> Option<Reply> {
        let question = self.questions.remove(&number)?;
        self.timers.remove(&(question.until, Timer::Question(number)));
        Some(question.reply)
    }

    fn take_questions(&mut self, which: impl Fn(&Question) -> bool) -> Vec<(u64, Reply)> {
        let numbers: Vec<_> = self.questions.iter().filter(|(_, question)| which(question)).map(|(n, _)| *n).collect();
        numbers.into_iter().filter_map(|number| Some((number, self.take_question(number)?))).collect()
    }

    /// Reports what a call has printed, or now and then that it goes on. When to look again.
    fn report(&mut self, number: u64, now: Instant, output: &Output) -> Option<Instant> {
        let progress = self.calls.get_mut(&number)?.progress.as_mut()?;
        progress.next = now + OUTPUT_EVERY;
        let seconds = (now - progress.begin).as_secs_f64();
        let message = match (progress.printed)(progress.seen) {
            Some(output) => {
                progress.seen += output.len();
                tail(&output).to_owned()
            }
            None if now - progress.told >= PROGRESS_EVERY => format!("still running after {seconds:.0} seconds"),
            None => return Some(progress.next),
        };
        progress.told = now;
        let params = json!({"progressToken": progress.token, "progress": seconds, "message": message});
        output.send(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}));
        Some(progress.next)
    }
}

/// The end of `output`, as much as fits a message.
fn tail(output: &str) -> &str {
    let start = output.len().saturating_sub(MESSAGE_BYTES);
    let start = (start..output.len()).find(|index| output.is_char_boundary(*index)).unwrap_or(0);
    output[start..].trim_end()
}

/// Owes a request its answer: answering consumes it, and dropping it answers an internal error.
#[derive(Debug)]
pub(crate) struct Responder {
    call: u64,
    inflight: Arc<Inflight>,
    settled: bool,
}

impl Responder {
    /// The call's number: no other call on this connection has it.
    pub(crate) fn call(&self) -> u64 {
        self.call
    }

    /// Answers.
    pub(crate) fn answer(mut self, result: impl Serialize) {
        self.settled = true;
        self.inflight.settle(self.call, Outcome::Result(result));
    }

    /// Answers with an error of the protocol.
    pub(crate) fn fail(mut self, error: ErrorData) {
        self.settled = true;
        self.inflight.fail(self.call, error);
    }

    /// Gives no answer, since another process will.
    pub(crate) fn leave(mut self) {
        self.settled = true;
        let call = self.inflight.table.lock().take(self.call);
        drop(call);
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.settled {
            let reason = "the server failed to answer this; its log on stderr may say why";
            self.inflight.fail(self.call, ErrorData::internal_error(reason, None));
        }
    }
}
