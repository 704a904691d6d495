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
        "Evaluate Common Lisp code while functions are traced, and see the tree of their calls: arguments as they were at \
         the call, values or the error each ended with, time; in all threads. Then the code's own answer, as evaluate-lisp \
         gives it. Generic functions and (setf f) are traced, too; local functions, macros and inlined calls are not. \
         Afterwards nothing is traced that was not before. Example: {\"code\": \"(run)\", \"functions\": [\"parse\", \
         \"my-app::emit\"]}.",
        json!({
            "code": {
                "type": "string",
                "description": "Common Lisp source to evaluate: one form or many.",
            },
            "functions": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Names of the functions to trace, as one types them in the current package.",
            },
            "package": {
                "type": "string",
                "description": "In place of `functions`: trace all functions that this package defines.",
            },
            "depth": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_DEPTH,
                "default": DEPTH,
                "description": "How deep traced calls within each other are shown; deeper ones are counted.",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LIMIT,
                "default": LIMIT,
                "description": "How many calls are recorded; further ones are counted.",
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
