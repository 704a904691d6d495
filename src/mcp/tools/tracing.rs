//! The tool trace-calls, which records the calls of chosen functions during an evaluation.

use std::sync::Arc;

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Count, Flag, Name, Names, Text, Timeout, describe_mismatch, name, text};
use super::background::{self, Job, Wait};
use super::limits::OnErrorChoice;
use super::{Call, CallHandler, Fault, ToolResult, ToolSpec, evaluation_hints, handle_with};
use crate::outcome::{CallTree, TracedCall};
use crate::report::{self, MAX_RECORDED_CALLS, max_calls_shown};
use crate::schema::{self, json};
use crate::session::Operation;
use crate::tool_names;
use crate::{Evaluation, OnError, Outcome};

/// The tool trace-calls.
pub(super) struct TraceCalls;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// Common Lisp source.
    code: Text,
    /// Functions to trace: names, or (setf f), (method f :around (integer)), (labels g :in f).
    #[serde(default)]
    functions: Names,
    /// Trace all functions of this package.
    trace_package: Option<Name>,
    /// Package to read the code in.
    package: Option<Text>,
    /// Record calls to this depth; count deeper calls.
    #[serde(default)]
    depth: Count<100, 5>,
    /// Record this many calls; count the rest.
    #[serde(default)]
    limit: Count<MAX_RECORDED_CALLS, 200>,
    /// Seconds until TIMEOUT; 0: no limit.
    #[serde(default)]
    timeout: Timeout,
    /// On a failure, abort (the default)[[debugger| or hold the evaluation for debugging]].
    #[schemars(extend("enum" = ["abort", "debug"]))]
    on_error: Option<OnErrorChoice>,
    /// Answer at once; evaluate in the background (no default timeout).
    #[serde(default)]
    background: Flag,
    /// Wait this many seconds, then continue in the background.
    wait: Option<Wait>,
}

/// Structured content: the result of the evaluation, and the recorded calls.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Content {
    #[serde(flatten)]
    evaluation: schema::Evaluation,
    calls: Vec<TracedCall>,
    omitted_calls: u64,
}

impl ToolSpec for TraceCalls {
    const NAME: &'static str = "trace-calls";
    const TITLE: &'static str = "Trace calls";
    const DESCRIPTION: &'static str = "Evaluate Common Lisp code with functions traced. Returns the tree of \
        their calls, in all threads, with arguments, values or error, and time; then the code's result. Macros and \
        inlined calls are not seen. Example: {\"code\": \"(run)\", \"functions\": [\"parse\"]}.";
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(call: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let mut evaluation = Evaluation::new(arguments.code.0);
        let functions = arguments.functions.0;
        let [mut traced, mut package] = [name(arguments.trace_package), text(arguments.package)];
        if functions.is_empty() && traced.is_none() {
            // In builds before version 0.1, `package` named the package to trace.
            traced = package.take();
        }
        if functions.is_empty() == traced.is_none() {
            return Err(Fault::Refusal(format!(
                "{} needs either functions (a list of names) or trace-package (a package whose functions are traced).",
                Self::NAME
            )));
        }
        evaluation.package = package;
        evaluation.timeout = arguments.timeout.0;
        let on_error = OnErrorChoice::value_of(arguments.on_error).unwrap_or(OnError::Abort);
        if on_error == OnError::Ask {
            let choices =
                if tool_names::is_listed(tool_names::ANY_DEBUGGER_TOOL) { "one of abort, debug" } else { "abort" };
            let reason = describe_mismatch(choices, &Value::from(on_error.name()));
            return Err(Fault::Refusal(format!("{}: on-error must be {reason}.", Self::NAME)));
        }
        let wait_limit = background::wait_limit(arguments.background, arguments.wait);
        let mut operation = Operation::new("trace-calls")
            .with_optional("package", traced)
            .with("depth", arguments.depth.0)
            .with("limit", arguments.limit.0)
            .with("foreground", wait_limit.is_none());
        if !functions.is_empty() {
            operation = operation.with("functions", functions);
        }
        // A held evaluation stays traced until it is released, so only the argument `on-error` can hold the evaluation,
        // not the session's setting.
        let on_error = background::resolve_on_error(call.session(), Some(on_error), wait_limit)?;
        evaluation.hold = on_error == OnError::Debug;
        if !call.is_structured() {
            operation = operation.with("shown", max_calls_shown(call.context.max_answer()));
        }
        let job = Job::operation(evaluation, operation);
        handle_with(move |call| background::evaluate(call, job, wait_limit, |call, outcome| call.reply(outcome)))
    }
}

/// Returns true for an outcome with traced calls.
pub(super) fn has_traced_calls(outcome: &Outcome) -> bool {
    CallTree::of(&outcome.records).is_some()
}

/// The result of an evaluation, with its calls.
#[derive(Debug)]
pub(super) struct TraceResult(pub(super) Arc<Outcome>);

impl ToolResult for TraceResult {
    fn text(&self, max: usize) -> String {
        report::calls(&self.0, max)
    }

    fn structured_content(&self, max: usize) -> Value {
        // The rest of the outcome is truncated as in the text.
        let outcome = report::fitted(&self.0, max);
        let tree = CallTree::of(&outcome.records);
        json(&Content {
            evaluation: schema::Evaluation::new(&outcome),
            omitted_calls: tree.as_ref().map_or(0, |tree| tree.trace.omitted),
            calls: tree.map(|tree| tree.calls.into_iter().cloned().collect()).unwrap_or_default(),
        })
    }

    fn is_error(&self) -> bool {
        self.0.is_error()
    }
}
