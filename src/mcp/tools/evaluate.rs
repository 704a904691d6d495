//! The tool evaluate-lisp.

use std::sync::Arc;

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::arguments::{Flag, Text, Timeout, text};
use super::background::{self, Job, Wait};
use super::limits::OnErrorChoice;
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, ask, evaluation_hints, handle_with};
use crate::schema::{self, json};
use crate::session::Operation;
use crate::{OnError, Outcome, report};

/// The tool evaluate-lisp.
pub(super) struct EvaluateLisp;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// Common Lisp source: one form or many.
    code: Text,
    /// Package for this call alone.
    package: Option<Text>,
    /// Seconds until TIMEOUT; 0: no limit.
    #[serde(default)]
    timeout: Timeout,
    /// Add a line with real, run and GC time and the bytes allocated.
    #[serde(default)]
    capture_time: Flag,
    /// Also record handled errors where they are signalled; [notice] lists them[[get-backtrace| for get-backtrace]].
    #[serde(default)]
    record_errors: Flag,
    /// On failure: `abort` unwinds; [[debugger|`debug` holds the evaluation at the error; ]]`ask` lets the user choose a restart if the client can ask. Default: the session's.
    on_error: Option<OnErrorChoice>,
    /// Answer at once; evaluate in the background (no default timeout).
    #[serde(default)]
    background: Flag,
    /// Wait this many seconds, then continue in the background.
    wait: Option<Wait>,
}

impl ToolSpec for EvaluateLisp {
    const NAME: &'static str = "evaluate-lisp";
    const TITLE: &'static str = "Evaluate Lisp";
    const DESCRIPTION: &'static str = "Evaluate Common Lisp code in the session's SBCL image: any number of forms, \
        one by one. Send mutually recursive functions together. Definitions, variables and `*package*` persist; `*`, \
        `**`, `***` hold the last values. Returns [stdout], [stderr], [warnings], then `=> value` for each value \
        of the last form. If the code fails: [ERROR] with type and message, and a [Backtrace][[describe-last-error|; \
        describe-last-error has details]].";
    const POLICY: CallPolicy = CallPolicy { asks_user: true, core: true, always_loaded: true, ..CallPolicy::NONE };
    type Arguments = Arguments;
    type Content = schema::Evaluation;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(call: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let session = call.session().clone();
        let mut evaluation = crate::Evaluation::new(arguments.code.0);
        evaluation.package = text(arguments.package);
        evaluation.timeout = arguments.timeout.0;
        evaluation.capture_time = arguments.capture_time.0;
        evaluation.record_errors = arguments.record_errors.0;
        let wait_limit = background::wait_limit(arguments.background, arguments.wait);
        let on_error = background::resolve_on_error(&session, OnErrorChoice::value_of(arguments.on_error), wait_limit)?;
        evaluation.hold = on_error != OnError::Abort;
        let asks = on_error == OnError::Ask;
        let form_by_form = call.client.wants_one_form;
        handle_with(move |call| {
            let job = match form_by_form {
                true => Job::operation(evaluation, Operation::new("evaluate-form")),
                false => Job::new(evaluation),
            };
            background::evaluate(call, job, wait_limit, move |call, outcome| {
                if asks { ask::answer_after_asking(call, outcome) } else { call.reply(outcome) }
            });
        })
    }
}

/// The tool result of an evaluation: presents its outcome as text and as structured content.
#[derive(Debug)]
pub(super) struct EvaluationResult(pub(super) Arc<Outcome>);

impl ToolResult for EvaluationResult {
    fn text(&self, _: usize) -> String {
        report::evaluation(&self.0)
    }

    fn fit(&mut self, max: usize) {
        self.0 = Arc::new(report::fitted(&self.0, max));
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&schema::Evaluation::new(&self.0))
    }

    fn is_error(&self) -> bool {
        self.0.is_error()
    }
}
