//! trace-calls: the calls of chosen functions while code is evaluated.

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::background::{self, Job};
use super::{Arguments, Call, Fault, Step, define, later};
use crate::report::calls_shown;
use crate::session::operation::Operation;
use crate::{Evaluation, OnError, Outcome};

pub(super) const NAME: &str = "trace-calls";

/// How deep recorded calls may be in each other, and how many are recorded, unless asked otherwise and at most.
const DEPTH: u64 = 5;
const MAX_DEPTH: u64 = 100;
const LIMIT: u64 = 200;
const MAX_LIMIT: u64 = 5_000;

/// What a failure may come to here.
const ON_ERROR: [(&str, OnError); 2] = [("abort", OnError::Abort), ("debug", OnError::Debug)];

const DESCRIPTION: &str = "Evaluate Common Lisp code with functions traced: the tree of their calls, in all threads, with \
    arguments, values or the error each ended with, and time; then the code's own answer. Macros and inlined calls are \
    not seen. Nothing stays traced. Example: {\"code\": \"(run)\", \"functions\": [\"parse\"]}.";

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "code": {
            "type": "string",
            "description": "Common Lisp source.",
        },
        "functions": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Also (setf f), (method f :around (integer)), (labels g :in f).",
        },
        "package": {
            "type": "string",
            "description": "Trace all of this package's.",
        },
        "depth": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_DEPTH,
            "default": DEPTH,
            "description": "Deeper calls are counted.",
        },
        "limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_LIMIT,
            "default": LIMIT,
            "description": "Further ones are counted.",
        },
        "timeout": super::limits::timeout_schema(),
        "on-error": {
            "type": "string",
            "enum": ON_ERROR.map(|(name, _)| name),
            "description": "Default: abort.",
        },
    });
    background::add_properties(&mut properties);
    define(
        NAME,
        "Trace Calls",
        DESCRIPTION,
        properties,
        &["code"],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let known = &["code", "functions", "package", "depth", "limit", "timeout", "on-error", "background", "wait"];
    let mut arguments = Arguments::new(NAME, known, 1, arguments)?;
    let mut evaluation = Evaluation::new(arguments.text("code")?);
    let functions = arguments.names("functions")?;
    let package = arguments.optional_text("package")?;
    if functions.is_empty() == package.is_none() {
        let reason = "trace-calls needs either functions, a list of names, or package: whose functions to trace.";
        return Err(Fault::Value(reason.to_owned()));
    }
    let number = |most| format!("a whole number from 1 to {most}");
    let depth = arguments.whole("depth", 1..=MAX_DEPTH, &number(MAX_DEPTH))?.unwrap_or(DEPTH);
    let limit = arguments.whole("limit", 1..=MAX_LIMIT, &number(MAX_LIMIT))?.unwrap_or(LIMIT);
    evaluation.timeout = super::limits::timeout(&mut arguments)?;
    let on_error = arguments.choice("on-error", &ON_ERROR)?;
    let patience = background::patience(&mut arguments)?;
    let mut operation = Operation::new("trace-calls")
        .maybe("package", package)
        .with("depth", depth)
        .with("limit", limit)
        .with("foreground", patience.is_none());
    if !functions.is_empty() {
        operation = operation.with("functions", functions);
    }
    later(move |call: Call| {
        // What is held is traced until it is released: only who asks for that gets it.
        match background::on_error(call.session(), on_error.or(Some(OnError::Abort)), patience) {
            Err(fault) => call.answer(Err::<Outcome, _>(fault)),
            Ok(on_error) => {
                evaluation.hold = on_error == OnError::Debug;
                if !call.is_structured() {
                    operation = operation.with("shown", calls_shown(call.context.max_answer()));
                }
                let job = Job::operation(evaluation, operation);
                background::evaluate(call, job, patience, |call, outcome| call.answer(Ok::<_, Fault>(outcome)));
            }
        }
    })
}
