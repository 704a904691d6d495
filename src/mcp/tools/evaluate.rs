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

const DESCRIPTION: &str = "Evaluate Common Lisp code in the persistent SBCL session: any number of forms, one by one. \
    Send functions that call each other together. Definitions, variables and `*package*` persist; `*`, `**`, `***` hold \
    the last values. Answers with [stdout], [stderr], [warnings], then `=> value` for each value of the last form. A \
    failure answers with [ERROR], type and message, and a [Backtrace][[describe-last-error|; describe-last-error tells \
    more]].";

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "code": text("Common Lisp source: one form or many."),
        "package": text("Package for this call alone."),
        "timeout": timeout_schema(),
        "capture-time": flag("Add a line with real, run and GC time and the bytes allocated."),
        "record-errors": flag("Also record errors that the code handles, where they are signalled; [notice] lists them\
            [[get-backtrace| for get-backtrace]]."),
        "on-error": on_error_schema("On a failure: `abort` unwinds; [[debugger|`debug` holds it where it failed; ]]`ask` \
            lets the user choose the restart, where the client can ask. Default: the session's."),
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
