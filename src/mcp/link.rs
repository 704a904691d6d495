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

/// What the reading side, the writing side and the end of the server know together.
#[derive(Debug)]
pub(super) struct Link {
    /// To the client.
    pub(super) output: Arc<Output>,
    in_flight: Mutex<HashMap<RequestId, Option<Arc<Mutex<Batch>>>>>,
    /// The opening request has been answered.
    opened: AtomicBool,
    /// The client has nothing more to say.
    pub(super) input_ended: Notify,
    /// Nothing more is to be read.
    pub(super) stop: Notify,
}

/// The answers to a batch, which leave together.
#[derive(Debug, Default)]
pub(super) struct Batch {
    answers: Vec<Vec<u8>>,
    missing: usize,
}

impl Link {
    pub(super) fn new(output: Output) -> Self {
        Self {
            output: Arc::new(output),
            in_flight: Mutex::default(),
            opened: AtomicBool::new(false),
            input_ended: Notify::new(),
            stop: Notify::new(),
        }
    }

    /// From now on notifications mean something.
    pub(super) fn open(&self) {
        self.opened.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_open(&self) -> bool {
        self.opened.load(Ordering::Relaxed)
    }

    /// Notes that a request waits for its answer. False when one of that id does already.
    pub(super) fn expect(&self, id: &RequestId, batch: Option<&Arc<Mutex<Batch>>>) -> bool {
        let mut in_flight = self.in_flight.lock();
        if in_flight.contains_key(id) {
            return false;
        }
        if let Some(batch) = batch {
            batch.lock().missing += 1;
        }
        in_flight.insert(id.clone(), batch.cloned());
        true
    }

    /// Notes that a request wants no answer any more.
    pub(super) fn forget(&self, id: &RequestId) {
        if let Some(Some(batch)) = self.in_flight.lock().remove(id) {
            self.finish(&batch, None);
        }
    }

    /// Sends the answer to a request, if it still wants one.
    pub(super) fn answer(&self, id: &RequestId, message: &impl Serialize) {
        match self.in_flight.lock().remove(id) {
            None => tracing::debug!(%id, "nobody waits for this answer"),
            Some(None) => self.send(message),
            Some(Some(batch)) => self.finish(&batch, encode(message)),
        }
    }

    /// Answers what is no message.
    pub(super) fn refuse(&self, refusal: &Refusal, batch: Option<&Arc<Mutex<Batch>>>) {
        match batch {
            None => self.send(refusal),
            Some(batch) => batch.lock().answers.extend(encode(refusal)),
        }
    }

    /// Sends anything, as a line.
    pub(super) fn send(&self, message: &impl Serialize) {
        if let Some(mut line) = encode(message) {
            line.push(b'\n');
            self.output.put(&line);
        }
    }

    /// A batch that is being read: it is not complete before [`Self::batch_read`].
    pub(super) fn batch() -> Arc<Mutex<Batch>> {
        Arc::new(Mutex::new(Batch { answers: Vec::new(), missing: 1 }))
    }

    /// All of the batch has been looked at.
    pub(super) fn batch_read(&self, batch: &Mutex<Batch>) {
        self.finish(batch, None);
    }

    /// Tells whoever still waits that there will be no answer.
    pub(super) fn abandon(&self) {
        let ids: Vec<_> = self.in_flight.lock().keys().cloned().collect();
        for id in ids {
            let reason = "the server is shutting down; this was not finished";
            self.answer(&id, &Refusal::new(Some(id.clone().into_json_value()), ErrorCode::INTERNAL_ERROR, reason));
        }
    }

    fn finish(&self, batch: &Mutex<Batch>, answer: Option<Vec<u8>>) {
        let mut batch = batch.lock();
        batch.answers.extend(answer);
        batch.missing -= 1;
        if batch.missing == 0 && !batch.answers.is_empty() {
            let mut line = vec![b'['];
            line.extend(batch.answers.join(&b','));
            line.extend(b"]\n");
            self.output.put(&line);
        }
    }
}

fn encode(message: &impl Serialize) -> Option<Vec<u8>> {
    serde_json::to_vec(message).inspect_err(|error| tracing::error!(%error, "an answer cannot be written")).ok()
}
