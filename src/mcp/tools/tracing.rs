//! trace-calls: the calls of chosen functions while code is evaluated.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::background::{self, Job};
use super::limits::{timeout, timeout_schema};
use super::schema::{choice, text, whole};
use super::{Arguments, Call, Fault, Step, define, evaluation_hints, later};
use crate::listed;
use crate::report::calls_shown;
use crate::session::Operation;
use crate::{Evaluation, OnError};

pub(super) const NAME: &str = "trace-calls";

/// How deep recorded calls may be in each other, and how many are recorded, unless asked otherwise and at most.
const DEPTH: u64 = 5;
const MAX_DEPTH: u64 = 100;
const LIMIT: u64 = 200;
const MAX_LIMIT: u64 = 5_000;

/// What the argument `on-error` may be; `debug` where there are tools for what is held.
const ON_ERROR: [(&str, OnError); 2] = [("abort", OnError::Abort), ("debug", OnError::Debug)];

const DESCRIPTION: &str = "Evaluate Common Lisp code with functions traced: the tree of their calls, in all threads, with \
    arguments, values or error, and time; then the code's own answer. Macros and inlined calls are \
    not seen. Example: {\"code\": \"(run)\", \"functions\": [\"parse\"]}.";

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "code": text("Common Lisp source."),
        "functions": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Also (setf f), (method f :around (integer)), (labels g :in f).",
        },
        "package": text("Trace all of this package's."),
        "depth": whole(1..=MAX_DEPTH, DEPTH, "Deeper calls are counted."),
        "limit": whole(1..=MAX_LIMIT, LIMIT, "Further ones are counted."),
        "timeout": timeout_schema(),
        "on-error": choice(&ON_ERROR, None, "Default: abort."),
    });
    background::add_properties(&mut properties);
    define(NAME, "Trace Calls", DESCRIPTION, properties, &["code"], evaluation_hints())
}

pub(super) fn call(call: &Call, arguments: JsonObject) -> Result<Step, Fault> {
    let known = &["code", "functions", "package", "depth", "limit", "timeout", "on-error", "background", "wait"];
    let mut arguments = Arguments::new(NAME, known, 1, arguments)?;
    let mut evaluation = Evaluation::new(arguments.text("code")?);
    let functions = arguments.names("functions")?;
    let package = arguments.optional_text("package")?;
    if functions.is_empty() == package.is_none() {
        let reason = "trace-calls needs either functions, a list of names, or package: whose functions to trace.";
        return Err(Fault::Value(reason.to_owned()));
    }
    let depth = arguments.count("depth", MAX_DEPTH, DEPTH)?;
    let limit = arguments.count("limit", MAX_LIMIT, LIMIT)?;
    evaluation.timeout = timeout(&mut arguments)?;
    let on_error =
        arguments.choice("on-error", if listed::has(listed::DEBUGGER) { &ON_ERROR } else { &ON_ERROR[..1] })?;
    let patience = background::patience(&mut arguments)?;
    let mut operation = Operation::new("trace-calls")
        .maybe("package", package)
        .with("depth", depth)
        .with("limit", limit)
        .with("foreground", patience.is_none());
    if !functions.is_empty() {
        operation = operation.with("functions", functions);
    }
    // What is held is traced until it is released: only who asks for that gets it.
    let on_error = background::on_error(call.session(), on_error.or(Some(OnError::Abort)), patience)?;
    evaluation.hold = on_error == OnError::Debug;
    if !call.is_structured() {
        operation = operation.with("shown", calls_shown(call.context.max_answer()));
    }
    let job = Job::operation(evaluation, operation);
    later(move |call| background::evaluate(call, job, patience, |call, outcome| call.reply(outcome)))
}
