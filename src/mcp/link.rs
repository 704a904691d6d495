//! Who waits for an answer: every request gets exactly one, and none that was cancelled.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rmcp::model::{ErrorCode, RequestId};
use serde::Serialize;
use tokio::sync::Notify;

use super::incoming::Refusal;
use super::output::Output;
use crate::handover::frame::{self, HEADER, Kind};

/// Word of so many lines that want no answer is kept back until there is something else to write.
const MAX_UNTOLD: usize = 16;

/// What the reading side, the writing side and the end of the server know together.
#[derive(Debug)]
pub(super) struct Link {
    /// To the client, or to the supervisor.
    pub(super) output: Arc<Output>,
    /// Frames for a supervisor that wait for the next one; `None` when lines go straight to the client.
    untold: Option<Mutex<Vec<u8>>>,
    /// The process that started this one.
    parent: Option<rustix::process::Pid>,
    in_flight: Mutex<HashMap<RequestId, Waiter>>,
    /// Requests whose answer has left before rmcp had it: what it brings for them is dropped.
    overtaken: Mutex<Vec<RequestId>>,
    /// There is one fewer of them.
    caught_up: Notify,
    /// The opening request has been answered.
    opened: AtomicBool,
    /// The client has nothing more to say.
    pub(super) input_ended: Notify,
    /// Nothing more is to be read.
    pub(super) stop: Notify,
}

/// Where an answer goes.
#[derive(Debug)]
enum Waiter {
    /// To the client: it is all that this line asked for.
    Line(u64),
    /// Into a batch.
    Batch(Arc<Mutex<Batch>>),
    /// Nowhere: the client has it from another worker.
    Nobody,
}

/// The answers to a batch, which leave together.
#[derive(Debug)]
pub(super) struct Batch {
    line: u64,
    answers: Vec<Vec<u8>>,
    missing: usize,
}

impl Link {
    /// `supervised`: what is written are frames for a supervisor.
    pub(super) fn new(output: Output, supervised: bool) -> Self {
        Self {
            output: Arc::new(output),
            untold: supervised.then(Mutex::default),
            parent: rustix::process::getppid(),
            in_flight: Mutex::default(),
            overtaken: Mutex::default(),
            caught_up: Notify::new(),
            opened: AtomicBool::new(false),
            input_ended: Notify::new(),
            stop: Notify::new(),
        }
    }

    /// True when the supervisor is gone, and nobody hears what is said.
    pub(super) fn is_orphaned(&self) -> bool {
        self.untold.is_some() && rustix::process::getppid() != self.parent
    }

    /// From now on notifications mean something.
    pub(super) fn open(&self) {
        self.opened.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_open(&self) -> bool {
        self.opened.load(Ordering::Relaxed)
    }

    /// True when nothing waits for an answer.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.lock().is_empty()
    }

    /// Notes that a request of this line waits for its answer. False when one of that id does already.
    pub(super) fn expect(&self, id: &RequestId, line: u64, batch: Option<&Arc<Mutex<Batch>>>) -> bool {
        let mut in_flight = self.in_flight.lock();
        if in_flight.contains_key(id) {
            return false;
        }
        if let Some(batch) = batch {
            batch.lock().missing += 1;
        }
        in_flight.insert(id.clone(), batch.map_or(Waiter::Line(line), |batch| Waiter::Batch(batch.clone())));
        true
    }

    /// Notes that the client has the answer to a request that is asked again.
    pub(super) fn expect_again(&self, id: &RequestId) {
        self.in_flight.lock().insert(id.clone(), Waiter::Nobody);
    }

    /// True when something from a line before this one waits for its answer.
    pub(super) fn expects_before(&self, line: u64) -> bool {
        self.in_flight.lock().values().any(|waiter| match waiter {
            Waiter::Line(other) => *other < line,
            Waiter::Batch(batch) => batch.lock().line < line,
            Waiter::Nobody => false,
        })
    }

    /// Notes that a request wants no answer any more.
    pub(super) fn forget(&self, id: &RequestId) {
        let waiter = self.in_flight.lock().remove(id);
        match waiter {
            Some(Waiter::Line(line)) => self.tell(Kind::Done, line, &()),
            Some(Waiter::Batch(batch)) => self.finish(&batch, None),
            Some(Waiter::Nobody) | None => {}
        }
    }

    /// Sends the answer that rmcp brings to a request, if it still wants one.
    pub(super) fn answer(&self, id: &RequestId, message: &impl Serialize) {
        if self.has_caught_up(id) {
            self.caught_up.notify_one();
            return;
        }
        let waiter = self.in_flight.lock().remove(id);
        self.settle(id, waiter, message);
    }

    /// Sends the answer to a request, if it still wants one, from the thread that made it: rmcp, whose answer to it is
    /// dropped, may be on another one, which would have to be woken.
    pub(super) fn answer_ahead(&self, id: &RequestId, message: &impl Serialize) {
        let waiter = {
            let mut in_flight = self.in_flight.lock();
            let waiter = in_flight.remove(id);
            if waiter.is_some() {
                // Under the lock: whoever finds the id free sees that it was overtaken.
                self.overtaken.lock().push(id.clone());
            }
            waiter
        };
        self.settle(id, waiter, message);
    }

    /// Notes that rmcp has an answer, too; false when that is the only one.
    fn has_caught_up(&self, id: &RequestId) -> bool {
        let mut overtaken = self.overtaken.lock();
        let index = overtaken.iter().position(|other| other == id);
        index.map(|index| overtaken.swap_remove(index)).is_some()
    }

    /// True while rmcp lacks an answer that has left: another request of that id, or word that it is cancelled, would
    /// confuse it.
    pub(super) fn is_ahead(&self) -> bool {
        !self.overtaken.lock().is_empty()
    }

    /// Waits until rmcp has all answers that have left.
    pub(super) async fn caught_up(&self) {
        while self.is_ahead() {
            self.caught_up.notified().await;
        }
    }

    fn settle(&self, id: &RequestId, waiter: Option<Waiter>, message: &impl Serialize) {
        match waiter {
            None => tracing::debug!(%id, "nobody waits for this answer"),
            Some(Waiter::Line(line)) => self.put(Kind::Answer, line, message),
            Some(Waiter::Batch(batch)) => self.finish(&batch, encode(message)),
            Some(Waiter::Nobody) => {}
        }
    }

    /// Answers a line, or a part of a batch, that is no message.
    pub(super) fn refuse(&self, refusal: &Refusal, line: u64, batch: Option<&Arc<Mutex<Batch>>>) {
        match batch {
            None => self.put(Kind::Answer, line, refusal),
            Some(batch) => batch.lock().answers.extend(encode(refusal)),
        }
    }

    /// Sends a notification that concerns a request, unless that is answered.
    pub(super) fn send_before_answer(&self, id: &RequestId, message: &impl Serialize) {
        // Held meanwhile: the answer waits for it.
        let in_flight = self.in_flight.lock();
        if in_flight.contains_key(id) {
            self.send(message);
        }
    }

    /// Sends what is no answer.
    pub(super) fn send(&self, message: &impl Serialize) {
        self.put(Kind::Message, 0, message);
    }

    /// Notes that a line gets no answer.
    pub(super) fn done(&self, line: u64) {
        if let Some(untold) = &self.untold {
            let mut untold = untold.lock();
            untold.extend(frame::header(Kind::Done, line, 0));
            if untold.len() >= MAX_UNTOLD * HEADER {
                self.output.put(&std::mem::take(&mut *untold));
            }
        }
    }

    /// Notes that a message in this line opens the conversation with another worker, too.
    pub(super) fn keep(&self, line: u64, message: &impl Serialize) {
        if let (Some(untold), Some(text)) = (&self.untold, encode(message)) {
            untold.lock().extend(frame::frame(Kind::Keep, line, &text));
        }
    }

    /// Tells the supervisor something.
    pub(super) fn tell(&self, kind: Kind, line: u64, content: &impl Serialize) {
        if let (Some(untold), Some(payload)) = (&self.untold, encode(content)) {
            let mut untold = untold.lock();
            untold.extend(frame::frame(kind, line, &payload));
            self.output.put(&std::mem::take(&mut *untold));
        }
    }

    /// A batch that is being read: it is not complete before [`Self::batch_read`].
    pub(super) fn batch(line: u64) -> Arc<Mutex<Batch>> {
        Arc::new(Mutex::new(Batch { line, answers: Vec::new(), missing: 1 }))
    }

    /// All of the batch has been looked at.
    pub(super) fn batch_read(&self, batch: &Mutex<Batch>) {
        self.finish(batch, None);
    }

    /// Tells whoever still waits that there will be no answer.
    pub(super) fn abandon(&self) {
        let waiting = std::mem::take(&mut *self.in_flight.lock());
        for (id, waiter) in waiting {
            let reason = "the server is shutting down; this was not finished";
            let refusal = Refusal::new(Some(id.clone().into_json_value()), ErrorCode::INTERNAL_ERROR, reason);
            self.settle(&id, Some(waiter), &refusal);
        }
    }

    fn finish(&self, batch: &Mutex<Batch>, answer: Option<Vec<u8>>) {
        let mut batch = batch.lock();
        batch.answers.extend(answer);
        batch.missing -= 1;
        if batch.missing > 0 {
            return;
        }
        if batch.answers.is_empty() {
            self.done(batch.line);
        } else {
            let mut bytes = self.begin();
            bytes.push(b'[');
            bytes.extend(batch.answers.join(&b','));
            bytes.push(b']');
            self.end(Kind::Answer, batch.line, bytes);
        }
    }

    fn put(&self, kind: Kind, line: u64, message: &impl Serialize) {
        let mut bytes = self.begin();
        match serde_json::to_writer(&mut bytes, message) {
            Ok(()) => self.end(kind, line, bytes),
            Err(error) => tracing::error!(%error, "an answer cannot be written"),
        }
    }

    /// An empty line for the client, with room for a header where there is a supervisor.
    fn begin(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256);
        if self.untold.is_some() {
            bytes.extend([0; HEADER]);
        }
        bytes
    }

    /// Sends a line that [`Self::begin`] began.
    fn end(&self, kind: Kind, line: u64, mut bytes: Vec<u8>) {
        bytes.push(b'\n');
        let Some(untold) = &self.untold else { return self.output.put(&bytes) };
        let length = bytes.len() - HEADER;
        bytes[..HEADER].copy_from_slice(&frame::header(kind, line, length));
        let mut untold = untold.lock();
        if untold.is_empty() {
            self.output.put(&bytes);
        } else {
            untold.extend(bytes);
            self.output.put(&std::mem::take(&mut *untold));
        }
    }
}

fn encode(message: &impl Serialize) -> Option<Vec<u8>> {
    serde_json::to_vec(message).inspect_err(|error| tracing::error!(%error, "an answer cannot be written")).ok()
}
