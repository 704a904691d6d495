//! The requests that wait for an answer: each gets exactly one, and none once it is cancelled.
//!
//! A request is known by a call number of our own, so that its id may be used again as soon as the client has no more
//! to expect of it. The number's [`Responder`] is consumed by answering; dropping it is an answer as well.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rmcp::model::{ErrorData, ProgressToken, RequestId};
use serde::Serialize;
use serde_json::{Value, json};

use super::output::{Encoded, MAX_ANSWER, MAX_UNREAD, Output};

/// So many requests may wait at a time.
pub(crate) const MAX_REQUESTS: usize = 10_000;
/// So many bytes of requests may wait, but for one that waits alone.
pub(crate) const MAX_BYTES: usize = 128 << 20;

/// Clients are promised a sign of life every five seconds; this leaves some room.
const PROGRESS_EVERY: Duration = Duration::from_secs(4);
/// How often output is looked for.
const OUTPUT_EVERY: Duration = Duration::from_millis(250);
/// Bytes of output in one report, unless the client wants all of it.
const MESSAGE_BYTES: usize = 1000;
/// Where the `_meta` of a report of progress says with which byte of the output its message begins, for who wants all of
/// the output; what is not output has none.
pub(crate) const OUTPUT_FROM: &str = "sbcl-mcp/output-from";
/// How long a question may stay open at most.
const DAY: Duration = Duration::from_secs(86_400);

type Cancel = Box<dyn FnOnce() + Send>;
type Printed = Box<dyn Fn(usize) -> Option<String> + Send>;
type GoesOn = Box<dyn Fn() -> Option<String> + Send>;
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
    /// Bytes of answers in batches that are not complete.
    batched: usize,
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
    /// None for a part of a batch, which has them.
    bytes: usize,
    place: Place,
    /// Functions that stop the call's steps, in no order: a step may begin before its predecessor is registered. Stopping a
    /// step that is over does nothing.
    cancel: Vec<Cancel>,
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
    answers: Encoded,
    /// The ids of what is answered.
    ids: Vec<RequestId>,
    missing: usize,
    /// Bytes of the requests that were admitted.
    bytes: usize,
}

struct Progress {
    token: ProgressToken,
    /// All of the output is told, and not its last lines.
    whole: bool,
    begin: Instant,
    told: Instant,
    /// Bytes of output that were reported.
    seen: usize,
    next: Instant,
    printed: Printed,
    goes_on: GoesOn,
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
        let (place, bytes) = match batch {
            None => (Place::Line(line), bytes),
            Some(batch) => {
                let mut state = batch.state.lock();
                state.missing += 1;
                // The line is kept until all of it is answered.
                state.bytes += bytes;
                (Place::Batch(batch.clone()), 0)
            }
        };
        table.calls.insert(number, Call { id, bytes, place, cancel: Vec::new(), progress: None, late: None });
        Ok(Responder { call: number, inflight: self.clone(), settled: false })
    }

    /// True while somebody waits for the answer to this call.
    pub(crate) fn is_awaited(&self, call: u64) -> bool {
        self.table.lock().calls.contains_key(&call)
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
            Place::Batch(batch) => self.finish(&mut table, &batch),
        }
        drop(table);
        self.output.answered();
        call.cancel.into_iter().for_each(|cancel| cancel());
        // With what they would have answered, which finds nobody.
        drop(withdrawn);
    }

    /// Answers a line, or a part of a batch, that is no request; its id is whatever the client sent.
    pub(crate) fn refuse(&self, id: Option<Value>, error: ErrorData, line: u64, batch: Option<&Arc<Batch>>) {
        let refusal = encode_error(&id.unwrap_or_default(), error);
        match batch {
            None => self.output.answer(line, refusal),
            Some(batch) => self.table.lock().add(batch, &refusal),
        }
    }

    /// A batch that is being read: it is not complete before [`Self::batch_read`].
    pub(crate) fn batch(line: u64) -> Arc<Batch> {
        let state = BatchState { answers: Encoded::default(), ids: Vec::new(), missing: 1, bytes: 0 };
        Arc::new(Batch { line, state: Mutex::new(state) })
    }

    /// All of the batch has been looked at.
    pub(crate) fn batch_read(&self, batch: &Batch) {
        self.finish(&mut self.table.lock(), batch);
    }

    /// Notes that a part of the batch has its answer, or gets none, and sends the answers after the last one.
    fn finish(&self, table: &mut Table, batch: &Batch) {
        let mut state = batch.state.lock();
        state.missing -= 1;
        if state.missing > 0 {
            return;
        }
        for id in state.ids.drain(..) {
            table.ids.remove(&id);
        }
        table.bytes -= state.bytes;
        table.batched -= state.answers.len();
        if state.answers.is_empty() {
            self.output.done(batch.line);
        } else {
            self.output.answer(batch.line, std::mem::take(&mut state.answers));
        }
    }

    /// Cancels all that waits: the client is gone. The newest comes first: what waits for its turn must not begin because
    /// what was before it is cancelled.
    pub(crate) fn cancel_all(&self) {
        let mut calls: Vec<_> = self.table.lock().ids.iter().map(|(id, number)| (*number, id.clone())).collect();
        calls.sort_unstable_by_key(|(number, _)| Reverse(*number));
        for (_, id) in calls {
            self.cancel(&id);
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
        let id = self.table.lock().calls.get(&number).map(|call| call.id.clone());
        // Not under the lock, for which all others wait that have to do with this client.
        let answer = id.filter(|_| !self.output.is_unread()).map(|id| encode(&id, outcome));
        // Held until it is sent: whoever comes too late to cancel it finds it sent.
        let mut table = self.table.lock();
        let Some(call) = table.take(number) else {
            // Without the lock, for which a subscriber might wait.
            drop(table);
            tracing::debug!(number, "nobody waits for this answer");
            return;
        };
        let answer = answer.unwrap_or_else(|| encode_error(&call.id, unread()));
        match &call.place {
            Place::Line(line) => self.output.answer(*line, answer),
            Place::Batch(batch) => {
                let fits = table.batched + answer.len() <= MAX_ANSWER;
                let answer = if fits { answer } else { encode_error(&call.id, too_large()) };
                table.add(batch, &answer);
                // The client may not use it again before it has the answer.
                table.ids.insert(call.id.clone(), number);
                batch.state.lock().ids.push(call.id);
                self.finish(&mut table, batch);
            }
        }
        drop(table);
        self.output.answered();
    }

    /// Calls `cancel`, too, if the client cancels this call before it is answered. Returns false if the call is cancelled or
    /// answered already.
    pub(crate) fn on_cancel(&self, call: u64, cancel: impl FnOnce() + Send + 'static) -> bool {
        let mut table = self.table.lock();
        let call = table.calls.get_mut(&call);
        call.map(|call| call.cancel.push(Box::new(cancel))).is_some()
    }

    /// Has `late` called if the call is not answered after `time`.
    pub(crate) fn after(&self, call: u64, time: Duration, late: impl FnOnce() + Send + 'static) {
        let mut table = self.table.lock();
        let Some(known) = table.calls.get_mut(&call) else { return };
        let time = Instant::now() + time.min(DAY);
        known.late = Some((time, Box::new(late)));
        self.arm(&mut table, time, Timer::Late(call));
    }

    /// Reports the progress of a call until it is answered: the output that `printed` brings from a byte on, if there is
    /// more, and now and then that it goes on, in the words of `goes_on` if that has any. Of the output the last line or
    /// so is told, or the `whole`, with where it begins.
    pub(crate) fn report_progress(
        &self,
        call: u64,
        token: ProgressToken,
        whole: bool,
        printed: impl Fn(usize) -> Option<String> + Send + 'static,
        goes_on: impl Fn() -> Option<String> + Send + 'static,
    ) {
        let mut table = self.table.lock();
        let Some(known) = table.calls.get_mut(&call) else { return };
        let begin = Instant::now();
        let next = begin + OUTPUT_EVERY;
        let (printed, goes_on) = (Box::new(printed), Box::new(goes_on));
        let progress = Progress { token, whole, begin, told: begin, seen: 0, next, printed, goes_on };
        if let Some(before) = known.progress.replace(progress) {
            table.timers.remove(&(before.next, Timer::Progress(call)));
        }
        self.arm(&mut table, next, Timer::Progress(call));
    }

    /// Sets a timer, and wakes the thread that looks at timers if this one is the next.
    fn arm(&self, table: &mut Table, time: Instant, timer: Timer) {
        if table.timers.first().is_none_or(|(first, _)| time < *first) {
            self.output.wake();
        }
        table.timers.insert((time, timer));
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
        self.arm(&mut table, until, Timer::Question(number));
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

/// Returns an answer as it is sent: an error where it is too long.
fn encode<R: Serialize>(id: &impl Serialize, outcome: Outcome<R>) -> Encoded {
    match Encoded::new(&Response { jsonrpc: "2.0", id, outcome }) {
        Ok(answer) if answer.len() <= MAX_ANSWER => answer,
        Ok(_) => encode_error(id, too_large()),
        Err(error) => {
            encode_error(id, ErrorData::internal_error(format!("the answer cannot be written: {error}"), None))
        }
    }
}

fn encode_error(id: &impl Serialize, error: ErrorData) -> Encoded {
    Encoded::new(&Response::failed(id, error)).expect("an id and an error are JSON")
}

/// The error in place of an answer that would make too long a line.
fn too_large() -> ErrorData {
    let reason = format!(
        "this was done, but its answer is left out: answers of more than {} MiB do not leave at once. Ask for less, or with \
         fewer requests in a batch",
        MAX_ANSWER >> 20
    );
    ErrorData::internal_error(reason, None)
}

/// The error in place of an answer to a client that does not read.
pub(crate) fn unread() -> ErrorData {
    let reason = format!("this was done, but its answer is left out: {} MiB of answers are unread", MAX_UNREAD >> 20);
    ErrorData::internal_error(reason, None)
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

    /// Adds an answer to a batch.
    fn add(&mut self, batch: &Batch, answer: &Encoded) {
        let answers = &mut batch.state.lock().answers;
        let before = answers.len();
        answers.push(answer);
        self.batched += answers.len() - before;
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
        let mut meta = None;
        let message = match (progress.printed)(progress.seen) {
            Some(output) => {
                meta = progress.whole.then(|| json!({OUTPUT_FROM: progress.seen}));
                progress.seen += output.len();
                if progress.whole { output } else { tail(&output).to_owned() }
            }
            None if now - progress.told >= PROGRESS_EVERY => {
                (progress.goes_on)().unwrap_or_else(|| format!("still running after {seconds:.0} seconds"))
            }
            None => return Some(progress.next),
        };
        progress.told = now;
        let mut params = json!({"progressToken": progress.token, "progress": seconds, "message": message});
        if let Some(meta) = meta {
            params["_meta"] = meta;
        }
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
                Output::new(writer.into(), crate::rpc::output::Reader::Client, Arc::new(Waker::new().unwrap()))
                    .unwrap();
            Self { inflight: Inflight::new(Arc::new(output)), lines: BufReader::new(reader) }
        }

        fn admit(&self, id: i64) -> Result<Responder, ErrorData> {
            self.inflight.admit(RequestId::Number(id), 1, None, 10)
        }

        /// All that was sent. Nothing else is, later.
        fn end(self) -> Vec<Value> {
            let Self { inflight, lines } = self;
            drop(inflight);
            lines.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect()
        }
    }

    #[test]
    fn a_responder_answers_once_whatever_becomes_of_it() {
        let client = Client::new();
        client.admit(1).unwrap().answer(json!("one"));
        client.admit(2).unwrap().fail(ErrorData::invalid_params("no", None));
        drop(client.admit(3).unwrap());
        client.admit(4).unwrap().leave();
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
    fn progress_ends_with_the_answer_and_lateness_with_the_call() {
        let client = Client::new();
        let (late, called) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let responders = [1, 2].map(|id| client.admit(id).unwrap());
        for responder in &responders {
            let inflight = &client.inflight;
            inflight.report_progress(
                responder.call(),
                ProgressToken(RequestId::Number(9)),
                false,
                |from| "printed".get(from..).filter(|text| !text.is_empty()).map(str::to_owned),
                || None,
            );
            let (late, called) = (late.clone(), called.clone());
            inflight.after(responder.call(), Duration::from_secs(1), move || _ = late.fetch_add(1, Ordering::Relaxed));
            for _ in 0..2 {
                let called = called.clone();
                assert!(inflight.on_cancel(responder.call(), move || _ = called.fetch_add(1, Ordering::Relaxed)));
            }
        }
        let [first, second] = responders;
        first.answer(json!(1));
        let now = Instant::now();
        assert!(client.inflight.due(now).is_some_and(|next| next > now));
        client.inflight.due(now + Duration::from_secs(2));
        assert_eq!((late.load(Ordering::Relaxed), called.load(Ordering::Relaxed)), (1, 0));
        client.inflight.cancel(&RequestId::Number(2));
        client.inflight.cancel(&RequestId::Number(2));
        assert_eq!(called.load(Ordering::Relaxed), 2);
        assert!(!client.inflight.on_cancel(second.call(), || unreachable!("it is cancelled already")));
        assert_eq!(client.inflight.due(now + Duration::from_secs(9)), None);
        second.answer(json!(2));
        let said = client.end();
        assert_eq!(said.len(), 2, "{said:?}");
        assert_eq!(
            (&said[1]["method"], &said[1]["params"]["message"]),
            (&json!("notifications/progress"), &json!("printed"))
        );
    }

    #[test]
    fn a_question_is_answered_late_or_withdrawn() {
        let client = Client::new();
        let answers = Arc::new(Mutex::new(Vec::new()));
        let responders = [1, 2, 3].map(|id| client.admit(id).unwrap());
        for responder in &responders {
            let (answers, owed) = (answers.clone(), responder.call());
            let reply = move |answer| answers.lock().push((owed, answer));
            client.inflight.ask(owed, "ask", &json!({}), Duration::from_secs(1), Box::new(reply));
        }
        client.inflight.cancel(&RequestId::Number(1));
        client.inflight.answered(5, Ok(json!("yes")));
        client.inflight.answered(5, Ok(json!("again")));
        client.inflight.answered(4, Ok(json!("nobody's")));
        client.inflight.due(Instant::now() + Duration::from_secs(2));
        let [_, second, third] = [0, 1, 2].map(|index: usize| responders[index].call());
        let expected = [(second, Ok(json!("yes"))), (third, Err(NoAnswer::Late))];
        assert_eq!(*answers.lock(), expected);
        responders.into_iter().for_each(Responder::leave);
        let withdrawn: Vec<_> = client.end().iter().map(|message| message["params"]["requestId"].clone()).collect();
        assert_eq!(withdrawn, [json!(null), json!(null), json!(null), json!(4), json!(6)]);
    }

    #[test]
    fn there_is_an_end_to_what_is_taken() {
        let client = Client::new();
        let big = client.inflight.admit(RequestId::Number(-1), 1, None, MAX_BYTES + 1).unwrap();
        assert!(client.admit(-2).is_err());
        big.leave();
        let taken: Vec<_> = (0..MAX_REQUESTS).map(|id| client.admit(id as i64).unwrap()).collect();
        let refused = client.admit(-3).unwrap_err();
        assert!(refused.message.contains("10000 requests"), "{refused:?}");
        taken.into_iter().for_each(Responder::leave);
        client.admit(-3).unwrap().leave();
        assert_eq!(client.end(), Vec::<Value>::new());
    }

    /// What happens to a request of one of a few ids.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Ask(i64),
        Cancel(i64),
        /// The call of that place among those begun is answered, or dropped.
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
        /// Whatever the order: what is not cancelled is answered once, by its own call, and nothing else is.
        #[test]
        fn every_call_has_the_answer_it_is_owed(steps in prop::collection::vec(step(), 0..60)) {
            let client = Client::new();
            let mut owed: Vec<(Responder, usize)> = Vec::new();
            // By id: the call that waits. Then what must have been sent.
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
                    Step::Answer(place) | Step::Drop(place) if place < owed.len() => {
                        let (responder, call) = owed.remove(place);
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
                responder.leave();
            }
            let sent = client.end().into_iter();
            let sent: Vec<_> = sent.map(|answer| (answer["id"].as_i64().unwrap(), answer["result"].clone())).collect();
            prop_assert_eq!(sent, expected);
        }
    }
}
