//! A call of a tool, and the ways to answer it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::{CallToolResult, ContentBlock, InputRequiredResult, MetaObject, ProgressToken, ServerResult};
use serde::Serialize;
use serde_json::Value;

use super::ask::AskState;
use super::{CallRefusal, Fault, Reply, ToolContext, with_package};
use crate::mcp::client::{Client, PACKAGE_KEY, adapt_to_revision};
use crate::rpc::inflight::{Inflight, NoAnswer, Responder};
use crate::{InspectError, JobId, Session};

/// Maximum time for which the answer to a person waits for the name of the session's package. Another client's inspection may
/// delay the query for the name. Without the name, the person's client shows the last name that it got.
const PACKAGE_WAIT: Duration = Duration::from_secs(1);

/// Maximum length, in bytes, of output that is not shortened in the answer to a person. The output that is kept by default is
/// not longer.
const MAX_PERSON_OUTPUT: usize = 4 << 20;

/// A call that has no answer yet. Dropping the call answers with an internal error.
#[derive(Debug)]
pub(in crate::mcp) struct Call {
    pub(super) context: Arc<ToolContext>,
    pub(super) client: Client,
    /// The lowest number for the jobs of this call.
    pub(super) first_job: u64,
    /// The state of the questions to the user; `None` for a tool that never asks.
    pub(super) ask_state: Option<AskState>,
    responder: Responder,
}

impl Call {
    pub(in crate::mcp) fn new(context: Arc<ToolContext>, responder: Responder, client: Client, first_job: u64) -> Self {
        Self { context, client, first_job, ask_state: None, responder }
    }

    pub(super) fn session(&self) -> &Session {
        &self.context.session
    }

    /// Returns true if the answer has structured content.
    pub(super) fn is_structured(&self) -> bool {
        self.client.is_for_person || self.context.options.structured
    }

    /// Answers with a tool's result, or with the reason why the tool has no result.
    pub(super) fn answer(self, reply: Result<impl Into<Reply>, impl Into<Fault>>) {
        match reply {
            Ok(reply) => self.reply(reply),
            Err(fault) => self.refuse(fault),
        }
    }

    /// Answers with the result of an inspection. If the inspection was cancelled because another image replaces this one,
    /// the next image repeats the call.
    pub(super) fn answer_inspection(self, found: Result<impl Into<Reply>, InspectError>) {
        match found {
            Err(InspectError::Cancelled) if self.context.recovery.is_some() => _ = self.leave_unanswered(),
            found => self.answer(found),
        }
    }

    /// Answers with the reason why the tool has no result.
    pub(super) fn refuse(self, fault: impl Into<Fault>) {
        let fault: Fault = self.session().audience().address(|| fault.into());
        match fault {
            Fault::Refusal(sentence) => self.reply(CallRefusal(sentence)),
            Fault::Protocol(error) => self.responder.fail(error),
        }
    }

    /// Answers with a tool's result.
    pub(super) fn reply(self, reply: impl Into<Reply>) {
        // For a client that is gone, the result is not rendered, because rendering takes time.
        if self.context.inflight.is_closed() {
            return;
        }
        let mut reply = reply.into();
        let max = self.context.max_answer();
        let audience = self.session().audience();
        let for_person = self.client.is_for_person;
        // A person's client shows the output in progress reports, and then the rest of the output in the structured content. So
        // this content is made before the output is shortened to fit the text.
        let output_len = |content: &Value| {
            ["stdout", "stderr"].map(|part| content[part].as_str().map_or(0, str::len)).iter().sum::<usize>()
        };
        let whole = for_person
            .then(|| audience.address(|| reply.structured_content(max)))
            .filter(|content| output_len(content) <= MAX_PERSON_OUTPUT);
        // The text is always one block: some clients show only the first block of an error.
        let content = vec![ContentBlock::text(audience.address(|| reply.text(max)))];
        let mut result =
            if reply.is_error() { CallToolResult::error(content) } else { CallToolResult::success(content) };
        let structured = || self.is_structured().then(|| audience.address(|| reply.structured_content(max)));
        result.structured_content = whole.or_else(structured);
        if !for_person {
            return self.responder.answer(adapt_to_revision(ServerResult::CallToolResult(result), &self.client));
        }
        let (session, pending) = (self.session().clone(), self.pending());
        let query = with_package(&session, move |package| {
            result.meta =
                package.map(|package| MetaObject([(PACKAGE_KEY.to_owned(), package.into())].into_iter().collect()));
            self.responder.answer(adapt_to_revision(ServerResult::CallToolResult(result), &self.client));
        });
        pending.set_deadline(PACKAGE_WAIT, move || session.cancel(query));
    }

    /// Asks the client to repeat the call with the user's input.
    pub(super) fn request_input(self, question: InputRequiredResult) {
        self.responder.answer(ServerResult::InputRequiredResult(question));
    }

    /// Returns the number of the call's line; `None` for a call in a batch.
    pub(super) fn line(&self) -> Option<u64> {
        self.responder.line()
    }

    /// Drops the call without an answer: another process answers the client. Returns false if the call has been answered
    /// already, for example because the client has cancelled it.
    pub(super) fn leave_unanswered(self) -> bool {
        self.responder.leave_unanswered()
    }

    /// Returns true unless the client has cancelled the call.
    pub(super) fn is_awaited(&self) -> bool {
        self.context.inflight.is_awaited(self.responder.request_number())
    }

    /// Returns a reference to the call for timers, cancellation and progress, which need not own the call.
    pub(super) fn pending(&self) -> PendingCall {
        PendingCall {
            inflight: self.context.inflight.clone(),
            request: self.responder.request_number(),
            token: self.client.progress_token.clone(),
            all_output: self.client.is_for_person,
        }
    }

    /// Wraps the call so that several callbacks can try to answer it, and only the first callback does so.
    pub(super) fn shared(self) -> SharedCall {
        SharedCall(Arc::new(Mutex::new(Some(self))))
    }
}

/// A call that several callbacks may try to answer: the callback that takes the call first answers it. Clones share the
/// call.
#[derive(Debug, Clone)]
pub(super) struct SharedCall(Arc<Mutex<Option<Call>>>);

impl SharedCall {
    /// Takes the call. Returns `None` if the call has been taken already.
    pub(super) fn take(&self) -> Option<Call> {
        self.0.lock().take()
    }

    /// Takes the call if `decide` returns a value, and returns both. No other callback takes the call while `decide` runs.
    /// Does not call `decide` if the call has been taken already.
    pub(super) fn take_if<T>(&self, decide: impl FnOnce() -> Option<T>) -> Option<(Call, T)> {
        let mut call = self.0.lock();
        let value = call.is_some().then(decide)??;
        Some((call.take()?, value))
    }
}

/// The state of a job's submission, which a cancellation on another thread may precede.
#[derive(Debug, Default)]
struct Submission {
    job: Option<JobId>,
    is_cancelled: bool,
}

impl Submission {
    /// Records a cancellation. Returns the job to cancel, if the job is submitted.
    fn cancel(&mut self) -> Option<JobId> {
        self.is_cancelled = true;
        self.job
    }

    /// Records the submitted job. Returns true if the job must be cancelled.
    fn record(&mut self, job: JobId) -> bool {
        self.job = Some(job);
        self.is_cancelled
    }
}

/// A reference to a pending call.
#[derive(Debug, Clone)]
pub(super) struct PendingCall {
    inflight: Arc<Inflight>,
    request: u64,
    token: Option<ProgressToken>,
    /// True if progress reports have all output.
    all_output: bool,
}

impl PendingCall {
    /// Adds a function to call if the client cancels the call before it is answered. Returns false if the call is no
    /// longer pending.
    pub(super) fn on_cancel(&self, cancel: impl FnOnce() + Send + 'static) -> bool {
        self.inflight.on_cancel(self.request, cancel)
    }

    /// Calls `cancel` when the client cancels the call before it is answered, or at once if the call is already cancelled.
    pub(super) fn when_cancelled(&self, cancel: impl FnOnce() + Clone + Send + 'static) {
        if !self.on_cancel(cancel.clone()) {
            cancel();
        }
    }

    /// Submits a job of the call with `submit`, which may return `None` instead of a job. Cancelling the call cancels the
    /// job, even if another thread cancels the call before `submit` returns.
    pub(super) fn submit<J: Copy + Into<Option<JobId>>>(&self, session: &Session, submit: impl FnOnce() -> J) -> J {
        let submission = Arc::new(Mutex::new(Submission::default()));
        let (cancelled, canceller) = (submission.clone(), session.clone());
        let is_pending = self.on_cancel(move || {
            let job = cancelled.lock().cancel();
            job.into_iter().for_each(|job| canceller.cancel(job));
        });
        if !is_pending {
            submission.lock().cancel();
        }
        let job = submit();
        let submitted: Option<JobId> = job.into();
        if let Some(submitted) = submitted.filter(|job| submission.lock().record(*job)) {
            session.cancel(submitted);
        }
        job
    }

    /// Calls `on_deadline` if the call is not answered within `time`.
    pub(super) fn set_deadline(&self, time: Duration, on_deadline: impl FnOnce() + Send + 'static) {
        self.inflight.set_deadline(self.request, time, on_deadline);
    }

    /// Reports progress, if the client asked for progress. `printed` returns the output from a byte index on, up to a number
    /// of bytes, or `None` if there is no further output.
    pub(super) fn report_progress(&self, printed: impl Fn(usize, usize) -> Option<String> + Send + 'static) {
        if let Some(token) = &self.token {
            self.inflight.report_progress(self.request, token.clone(), self.all_output, printed, || None);
        }
    }

    /// Reports at intervals why the call has not begun, with the text of `status`.
    pub(super) fn report_waiting(&self, status: impl Fn() -> Option<String> + Send + 'static) {
        if let Some(token) = &self.token {
            self.inflight.report_progress(self.request, token.clone(), self.all_output, |_, _| None, status);
        }
    }

    /// Reports the progress of a job: the text that `reports` returns, or, while the job waits, the evaluation that it
    /// waits for.
    pub(super) fn report_job(
        &self,
        session: &Session,
        job: JobId,
        reports: fn(&Session, JobId, usize, usize) -> Option<String>,
    ) {
        if let Some(token) = &self.token {
            let (printing, waiting) = (session.clone(), session.clone());
            let evaluation = session.evaluation_of(job);
            let printed = move |from, max| reports(&printing, job, from, max);
            self.inflight.report_progress(self.request, token.clone(), self.all_output, printed, move || {
                let (first, time) = waiting.blocking_evaluation_for_progress(evaluation?)?;
                Some(format!("waiting for evaluation {first}, which has been running for {:.0} s", time.as_secs_f64()))
            });
        }
    }

    /// Asks the client a question. `reply` gets the answer, or the reason why no answer came within `time`.
    pub(super) fn ask(
        &self,
        method: &str,
        params: &impl Serialize,
        time: Duration,
        reply: impl FnOnce(Result<Value, NoAnswer>) + Send + 'static,
    ) {
        self.inflight.ask(self.request, method, params, time, Box::new(reply));
    }

    /// Withdraws the question to the client, if the question is open, and sends `reason` to the client.
    pub(super) fn withdraw_question(&self, reason: &str) {
        self.inflight.withdraw_for(self.request, reason);
    }
}
