//! evaluate-lisp.

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::ask::{self, Asked};
use super::{Arguments, Call, Fault, Step, background, define, later};
use crate::{Evaluation, OnError};

pub(super) const NAME: &str = "evaluate-lisp";

const DESCRIPTION: &str = "Evaluate Common Lisp code in the persistent SBCL session: define functions, run them, \
    load systems, try things out. Takes any number of forms, read and evaluated one by one, so `in-package` works for \
    the forms after it; send functions that call each other together. Definitions, variables, packages and \
    `*package*` persist between calls, and `*`, `**`, `***` hold the last values. Answers with [stdout], [stderr] and \
    [warnings] where there are any, then one `=> value` line for each value of the last form. A failure answers with \
    [ERROR], its type and message, and a [Backtrace]; describe-last-error and get-backtrace tell more. Reading from \
    standard input meets end of file.";

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "code": {
            "type": "string",
            "description": "Common Lisp source: one form or many.",
        },
        "package": {
            "type": "string",
            "description": "Package to read and evaluate in, for this call alone. Default: the session's current package.",
        },
        "timeout": super::limits::timeout_schema(),
        "capture-time": {
            "type": "boolean",
            "default": false,
            "description": "Add a line with real, run and GC time and the bytes allocated.",
        },
        "record-errors": {
            "type": "boolean",
            "default": false,
            "description": "Also record the errors that the code handles itself (handler-case, ignore-errors, test frameworks), where they are signalled: the first of each kind and place, 20 at most. [notice] lists them with their identifiers, for get-backtrace and describe-last-error.",
        },
        "on-error": {
            "type": "string",
            "enum": super::limits::on_error_names(),
            "description": "What a failure comes to: `abort` unwinds and reports; `debug` also holds the evaluation where it failed, for invoke-restart, frame-locals, eval-in-frame and the other debugger tools; `ask` lets the user choose the restart, where the client can ask (elicitation), and is `debug` where it cannot. Default: the session's (see configure-limits), `abort` at first.",
        },
    });
    background::add_properties(&mut properties);
    define(
        NAME,
        "Evaluate Lisp",
        DESCRIPTION,
        properties,
        &["code"],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true),
    )
}

pub(super) fn call(call: &Call, arguments: JsonObject) -> Result<Step, Fault> {
    let session = call.session().clone();
    let asked = Asked::new(&call.context, &arguments);
    let mut arguments = Arguments::new(
        NAME,
        &["code", "package", "timeout", "capture-time", "record-errors", "on-error", "background", "wait"],
        1,
        arguments,
    )?;
    let mut evaluation = Evaluation::new(arguments.text("code")?);
    evaluation.package = arguments.optional_text("package")?;
    evaluation.timeout = super::limits::timeout(&mut arguments)?;
    evaluation.capture_time = arguments.flag("capture-time")?;
    evaluation.record_errors = arguments.flag("record-errors")?;
    let patience = background::patience(&mut arguments)?;
    let on_error = background::on_error(&session, super::limits::on_error(&mut arguments)?, patience)?;
    evaluation.hold = on_error != OnError::Abort;
    let asks = on_error == OnError::Ask;
    later(move |call| {
        background::evaluate(call, background::Job::new(evaluation), patience, move |call, outcome| {
            if asks { ask::settle(call, asked, outcome) } else { call.answer(Ok::<_, Fault>(outcome)) }
        });
    })
}
