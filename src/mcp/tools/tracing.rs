//! trace-calls: the calls of chosen functions while code is evaluated.

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::{Arguments, Call, Fault, Reply, Step, define, later};
use crate::Evaluation;
use crate::session::operation::Operation;

pub(super) const NAME: &str = "trace-calls";

/// How deep recorded calls may be in each other, and how many are recorded, unless asked otherwise and at most.
const DEPTH: u64 = 5;
const MAX_DEPTH: u64 = 100;
const LIMIT: u64 = 200;
const MAX_LIMIT: u64 = 5_000;

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Trace Calls",
        "Evaluate Common Lisp code with functions traced: the tree of their calls, in all threads, with arguments, \
        values or the error each ended with, and time; then the code's own answer. Local functions, macros and \
        inlined calls are not seen. Nothing stays traced. Example: {\"code\": \
        \"(run)\", \"functions\": [\"parse\"]}.",
        json!({
            "code": {
                "type": "string",
                "description": "Common Lisp source.",
            },
            "functions": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Functions to trace, as typed in the current package; (setf f), too.",
            },
            "package": {
                "type": "string",
                "description": "In place of `functions`: all of this package's.",
            },
            "depth": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_DEPTH,
                "default": DEPTH,
                "description": "Calls nested deeper are only counted.",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LIMIT,
                "default": LIMIT,
                "description": "Further calls are only counted.",
            },
            "timeout": super::limits::timeout_schema(),
        }),
        &["code"],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let known = &["code", "functions", "package", "depth", "limit", "timeout"];
    let mut arguments = Arguments::new(NAME, known, 1, arguments)?;
    let mut evaluation = Evaluation::new(arguments.text("code")?);
    let functions = arguments.texts("functions")?;
    let package = arguments.optional_text("package")?;
    if functions.is_empty() == package.is_none() {
        let reason = "trace-calls needs either functions, a list of names, or package: whose functions to trace.";
        return Err(Fault::Value(reason.to_owned()));
    }
    let number = |most| format!("a whole number from 1 to {most}");
    let depth = arguments.whole("depth", 1..=MAX_DEPTH, &number(MAX_DEPTH))?.unwrap_or(DEPTH);
    let limit = arguments.whole("limit", 1..=MAX_LIMIT, &number(MAX_LIMIT))?.unwrap_or(LIMIT);
    evaluation.timeout = super::limits::timeout(&mut arguments)?;
    let mut operation =
        Operation::new("trace-calls").maybe("package", package).with("depth", depth).with("limit", limit);
    if !functions.is_empty() {
        operation = operation.with("functions", functions);
    }
    later(move |call: Call| super::evaluate_as(call, &operation, evaluation, |outcome| Reply::Calls(Box::new(outcome))))
}
