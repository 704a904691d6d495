//! evaluate-lisp.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::ask::{self, Asked};
use super::background::Job;
use super::limits::{on_error, on_error_schema, timeout, timeout_schema};
use super::schema::{flag, text};
use super::{Arguments, Call, Fault, Step, background, define, evaluation_hints, later};
use crate::session::Operation;
use crate::{Evaluation, OnError};

pub(super) const NAME: &str = "evaluate-lisp";

const DESCRIPTION: &str = "Evaluate Common Lisp code in the persistent SBCL session. Any number of forms, read and \
    evaluated one by one; send functions that call each other together. Definitions, variables and `*package*` \
    persist, and `*`, `**`, `***` hold the last values. Answers with [stdout], [stderr] and [warnings], then a `=> \
    value` line for each value of the last form. A failure answers with [ERROR], type and message, and a \
    [Backtrace]; describe-last-error and get-backtrace tell more. Standard input is empty.";

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "code": text("Common Lisp source: one form or many."),
        "package": text("Package to evaluate in, for this call alone. Default: the current one."),
        "timeout": timeout_schema(),
        "capture-time": flag("Add a line with real, run and GC time and the bytes allocated."),
        "record-errors": flag("Also record the errors that the code handles itself, where they are signalled (20 at \
            most): [notice] lists them with identifiers for get-backtrace."),
        "on-error": on_error_schema("`abort` unwinds and reports a failure; `debug` also holds it where it failed, for \
            invoke-restart, frame-locals, eval-in-frame and the like; `ask` lets the user choose the restart, where \
            the client can ask. Default: the session's, `abort` at first."),
    });
    background::add_properties(&mut properties);
    define(NAME, "Evaluate Lisp", DESCRIPTION, properties, &["code"], evaluation_hints())
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
    evaluation.timeout = timeout(&mut arguments)?;
    evaluation.capture_time = arguments.flag("capture-time")?;
    evaluation.record_errors = arguments.flag("record-errors")?;
    let patience = background::patience(&mut arguments)?;
    let on_error = background::on_error(&session, on_error(&mut arguments)?, patience)?;
    evaluation.hold = on_error != OnError::Abort;
    let asks = on_error == OnError::Ask;
    let form_by_form = call.peer.is_form_by_form();
    later(move |call| {
        let job = match form_by_form {
            true => Job::operation(evaluation, Operation::new("evaluate-form")),
            false => Job::new(evaluation),
        };
        background::evaluate(call, job, patience, move |call, outcome| {
            if asks { ask::settle(call, asked, outcome) } else { call.reply(outcome) }
        });
    })
}
