//! evaluate-lisp.

use std::future::Future;
use std::pin::Pin;

use rmcp::RoleServer;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use rmcp::service::RequestContext;
use serde_json::json;
use tokio::sync::oneshot;

use super::ahead::Ahead;
use super::ask;
use super::wait::wait_reporting;
use super::{Arguments, Desk, Fault, Step, define};
use crate::{Evaluation, OnError, Outcome};

pub(super) const NAME: &str = "evaluate-lisp";

const DESCRIPTION: &str = "Evaluate Common Lisp code in the persistent SBCL session: define functions, run them, \
    load systems, try things out. Takes any number of forms, read and evaluated one by one, so `in-package` works for \
    the forms after it; send functions that call each other together. Definitions, variables, packages and \
    `*package*` persist between calls, and `*`, `**`, `***` hold the last values. Answers with [stdout], [stderr] and \
    [warnings] where there are any, then one `=> value` line for each value of the last form. A failure answers with \
    [ERROR], its type and message, and a [Backtrace]; describe-last-error and get-backtrace tell more. Reading from \
    standard input meets end of file.";

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Evaluate Lisp",
        DESCRIPTION,
        json!({
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
            "on-error": {
                "type": "string",
                "enum": super::limits::on_error_names(),
                "description": "What a failure comes to: `abort` unwinds and reports; `debug` also holds the evaluation where it failed, for invoke-restart, frame-locals, eval-in-frame and the other debugger tools; `ask` lets the user choose the restart, where the client can ask (elicitation), and is `debug` where it cannot. Default: the session's (see configure-limits), `abort` at first.",
            },
        }),
        &["code"],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true),
    )
}

pub(super) async fn call(
    desk: &Desk,
    arguments: JsonObject,
    context: &RequestContext<RoleServer>,
) -> Result<Step, Fault> {
    let session = &desk.session;
    let mut arguments =
        Arguments::new(NAME, &["code", "package", "timeout", "capture-time", "on-error"], 1, arguments)?;
    let mut evaluation = Evaluation::new(arguments.text("code")?);
    evaluation.package = arguments.optional_text("package")?;
    evaluation.timeout = super::limits::timeout(&mut arguments)?;
    evaluation.capture_time = arguments.flag("capture-time")?;
    let on_error = super::limits::on_error(&mut arguments)?.unwrap_or(session.limits().on_error);
    evaluation.hold = on_error != OnError::Abort;
    let asks = on_error == OnError::Ask;

    // What a person is asked about is no answer yet.
    let ahead = (!asks).then(|| Ahead::new(desk, context));
    let (answer, reply) = oneshot::channel();
    // Submitted before the first wait: calls come here in the order of their lines, and so the jobs keep it.
    let job = session.submit(evaluation, move |outcome| {
        let unanswered = match ahead {
            Some(ahead) => {
                ahead.answer(outcome.into());
                None
            }
            None => Some(outcome),
        };
        drop(answer.send(unanswered));
    });
    let printed = |from| session.output_so_far(job, from);
    match wait_reporting(context, reply, || session.cancel(job), printed).await? {
        Some(outcome) => ask(desk, outcome, context).await,
        None => Ok(Step::Answered),
    }
}

/// Lets the person decide, where there is something to decide. Seldom, so that its room is not in each call.
fn ask<'a>(
    desk: &'a Desk,
    outcome: Outcome,
    context: &'a RequestContext<RoleServer>,
) -> Pin<Box<dyn Future<Output = Result<Step, Fault>> + Send + 'a>> {
    Box::pin(ask::settle(&desk.session, &desk.pending, outcome, context))
}
