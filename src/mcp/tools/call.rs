//! One call of a tool: who asks, and who is owed the answer.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::{CallToolResult, ContentBlock, InputRequiredResult, MetaObject, ProgressToken, ServerResult};
use serde::Serialize;
use serde_json::Value;

use super::ask::Asked;
use super::{Fault, Refused, Reply, ToolContext, with_package};
use crate::mcp::peer::{PACKAGE, Peer, fitted};
use crate::rpc::inflight::{Inflight, NoAnswer, Responder};
use crate::{JobId, Session};

/// A call that waits for its answer. Dropping it answers an internal error.
#[derive(Debug)]
pub(in crate::mcp) struct Call {
    pub(super) context: Arc<ToolContext>,
    pub(super) peer: Peer,
    /// The least number for a job that it asks for.
    pub(super) number: u64,
    /// Present for a tool that asks a person how to go on.
    pub(super) asked: Option<Asked>,
    responder: Responder,
}

impl Call {
    pub(in crate::mcp) fn new(context: Arc<ToolContext>, responder: Responder, peer: Peer, number: u64) -> Self {
        Self { context, peer, number, asked: None, responder }
    }

    pub(super) fn session(&self) -> &Session {
        &self.context.session
    }

    /// Whether the answer has structured content, too.
    pub(super) fn is_structured(&self) -> bool {
        self.peer.is_for_person() || self.context.offer.structured
    }

    /// Answers with what a tool has to say, or why it has nothing to.
    pub(super) fn answer(self, reply: Result<impl Into<Reply>, impl Into<Fault>>) {
        match reply {
            Ok(reply) => self.reply(reply),
            Err(fault) => self.refuse(fault),
        }
    }

    /// Answers with why a tool has nothing to say.
    pub(super) fn refuse(self, fault: impl Into<Fault>) {
        match fault.into() {
            Fault::Value(sentence) => self.reply(Refused(sentence)),
            Fault::Protocol(error) => self.responder.fail(error),
        }
    }

    /// Answers with what a tool has to say.
    pub(super) fn reply(self, reply: impl Into<Reply>) {
        let mut reply = reply.into();
        let max = self.context.max_answer();
        // One block, always: clients are known to show only the first one of an error.
        let content = vec![ContentBlock::text(reply.text(max))];
        let mut result =
            if reply.is_error() { CallToolResult::error(content) } else { CallToolResult::success(content) };
        let (for_person, structured) = (self.peer.is_for_person(), self.is_structured());
        result.structured_content = structured.then(|| reply.content(max));
        if !for_person {
            return self.responder.answer(fitted(ServerResult::CallToolResult(result), &self.peer));
        }
        let session = self.session().clone();
        with_package(&session, move |package| {
            result.meta =
                package.map(|package| MetaObject([(PACKAGE.to_owned(), package.into())].into_iter().collect()));
            self.responder.answer(fitted(ServerResult::CallToolResult(result), &self.peer));
        });
    }

    /// Answers that the client is to call again, with the user's input.
    pub(super) fn ask_again(self, question: InputRequiredResult) {
        self.responder.answer(ServerResult::InputRequiredResult(question));
    }

    /// Leaves the answer to another process.
    pub(super) fn leave(self) {
        self.responder.leave();
    }

    /// True unless the client has cancelled it.
    pub(super) fn is_awaited(&self) -> bool {
        self.context.inflight.is_awaited(self.responder.call())
    }

    /// What can be done about it while the answer is somebody else's.
    pub(super) fn waiting(&self) -> Waiting {
        Waiting {
            inflight: self.context.inflight.clone(),
            call: self.responder.call(),
            token: self.peer.meta.get_progress_token(),
            whole: self.peer.is_for_person(),
        }
    }

    /// A call that whoever comes first answers.
    pub(super) fn shared(self) -> SharedCall {
        SharedCall(Arc::new(Mutex::new(Some(self))))
    }
}

/// See [`Call::shared`].
#[derive(Debug, Clone)]
pub(super) struct SharedCall(Arc<Mutex<Option<Call>>>);

impl SharedCall {
    /// The call, for the first who asks.
    pub(super) fn take(&self) -> Option<Call> {
        self.0.lock().take()
    }
}

/// A call while it waits.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    inflight: Arc<Inflight>,
    call: u64,
    token: Option<ProgressToken>,
    /// Reports of progress have all of the output.
    whole: bool,
}

impl Waiting {
    /// Calls `cancel`, too, if the client cancels the call before it is answered. Returns false if it is cancelled or answered
    /// already.
    pub(super) fn on_cancel(&self, cancel: impl FnOnce() + Send + 'static) -> bool {
        self.inflight.on_cancel(self.call, cancel)
    }

    /// Has `late` called if it is not answered after `time`.
    pub(super) fn after(&self, time: Duration, late: impl FnOnce() + Send + 'static) {
        self.inflight.after(self.call, time, late);
    }

    /// Reports progress to a client that asked for it: what `printed` brings from a byte on, if there is more, and now
    /// and then that it goes on.
    pub(super) fn report(&self, printed: impl Fn(usize) -> Option<String> + Send + 'static) {
        if let Some(token) = &self.token {
            self.inflight.report_progress(self.call, token.clone(), self.whole, printed, || None);
        }
    }

    /// The same of a call that has not begun: now and then why, in the words of `goes_on`.
    pub(super) fn report_waiting(&self, goes_on: impl Fn() -> Option<String> + Send + 'static) {
        if let Some(token) = &self.token {
            self.inflight.report_progress(self.call, token.clone(), self.whole, |_| None, goes_on);
        }
    }

    /// The same of an evaluation: what `reports` brings, or what it waits for.
    pub(super) fn report_job(
        &self,
        session: &Session,
        job: JobId,
        reports: fn(&Session, JobId, usize) -> Option<String>,
    ) {
        if let Some(token) = &self.token {
            let (printing, waiting) = (session.clone(), session.clone());
            let printed = move |from| reports(&printing, job, from);
            self.inflight.report_progress(self.call, token.clone(), self.whole, printed, move || {
                let (first, time) = waiting.waits_behind(job)?;
                Some(format!("waiting for evaluation {first}, which has run for {:.0} seconds", time.as_secs_f64()))
            });
        }
    }

    /// Asks the client something; `reply` gets what it answers within `time`, or why it did not.
    pub(super) fn ask(
        &self,
        method: &str,
        params: &impl Serialize,
        time: Duration,
        reply: impl FnOnce(Result<Value, NoAnswer>) + Send + 'static,
    ) {
        self.inflight.ask(self.call, method, params, time, Box::new(reply));
    }
}
