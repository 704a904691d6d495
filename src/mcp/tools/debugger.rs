//! The tools for an evaluation that is held where it failed.

use rmcp::RoleServer;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use rmcp::service::RequestContext;
use serde_json::json;
use tokio::sync::oneshot;

use super::arguments::{shown, whole};
use super::limits::{timeout, timeout_schema};
use super::wait::wait;
use super::{Answer, Arguments, Fault, Reply, define, inspection};

use crate::{HoldError, JobId, Outcome, RestartDesignator, Session};

pub(super) const RESTART: &str = "invoke-restart";
pub(super) const LOCALS: &str = "frame-locals";
pub(super) const EVAL: &str = "eval-in-frame";
pub(super) const RETURN: &str = "return-from-frame";
pub(super) const AGAIN: &str = "restart-frame";
pub(super) const ABORT: &str = "abort-evaluation";

pub(super) fn tools() -> [Tool; 6] {
    let acts = || ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true);
    let frame = || {
        json!({
            "type": "integer",
            "minimum": 0,
            "description": "The frame's number, from 0, as get-backtrace shows them.",
        })
    };
    let code = || json!({"type": "string", "description": "Lisp code; the frame's local variables are visible."});
    [
        define(
            RESTART,
            "Invoke restart",
            "Make the evaluation that is held (it failed under on-error: \"debug\") go on by one of its restarts, and answer \
             what it then comes to: its values, or the next error, held again. Typical repair: define what is missing with \
             eval-in-frame, then CONTINUE or RETRY.",
            json!({
                "restart": {
                    "type": "string",
                    "description": "Its number in the report, such as 1, or its name.",
                },
                "values": {
                    "type": "string",
                    "description": "Lisp expressions for the restart's arguments, or for the new values of an assertion's places: `41`, or `1 (list 2)`.",
                },
            }),
            &["restart"],
            acts(),
        ),
        define(
            LOCALS,
            "Frame locals",
            "Show the local variables of a frame of the evaluation that is held (it failed under on-error: \"debug\"): what a \
             function was called with, and what it had made of it. For one that is not held, get-backtrace has `locals`.",
            json!({"frame": frame()}),
            &["frame"],
            inspection(),
        ),
        define(
            EVAL,
            "Evaluate in frame",
            "Evaluate code inside a frame of the evaluation that is held (it failed under on-error: \"debug\"), with the \
             frame's local variables visible: look at them, change them, or define what was missing. Neither an error in \
             it nor its time limit loses the held evaluation.",
            json!({"frame": frame(), "code": code(), "timeout": timeout_schema()}),
            &["frame", "code"],
            acts(),
        ),
        define(
            RETURN,
            "Return from frame",
            "Make the evaluation that is held (it failed under on-error: \"debug\") go on as if a frame had returned the values \
             of this code, and answer what it then comes to.",
            json!({"frame": frame(), "code": code()}),
            &["frame", "code"],
            acts(),
        ),
        define(
            AGAIN,
            "Restart frame",
            "Make the evaluation that is held (it failed under on-error: \"debug\") go on by calling a frame's function again \
             with the same arguments, for instance after redefining it, and answer what it then comes to.",
            json!({"frame": frame()}),
            &["frame"],
            acts(),
        ),
        define(
            ABORT,
            "Abort evaluation",
            "Give up the evaluation that is held (it failed under on-error: \"debug\"): it is unwound, its cleanup forms run, and what it has done stays done.",
            json!({}),
            &[],
            acts(),
        ),
    ]
}

pub(super) async fn call(
    session: &Session,
    name: &str,
    arguments: JsonObject,
    context: &RequestContext<RoleServer>,
) -> Answer {
    match name {
        RESTART => {
            let mut arguments = Arguments::new(RESTART, &["restart", "values"], 1, arguments)?;
            let restart = designator(arguments.text("restart")?)?;
            let values = arguments.optional_text("values")?.unwrap_or_default();
            let (answer, reply) = oneshot::channel();
            let job = session.invoke_restart(&restart, &values, move |outcome| drop(answer.send(outcome)));
            let outcome = wait(context, reply, || session.cancel(job)).await??;
            Ok(outcome.map_or(Reply::Aborted, Reply::from))
        }
        LOCALS => {
            let mut arguments = Arguments::new(LOCALS, &["frame"], 1, arguments)?;
            let frame = frame(&mut arguments)?;
            let (answer, reply) = oneshot::channel();
            let job = session.frame_locals(frame, move |locals| drop(answer.send(locals)));
            let locals = wait(context, reply, || session.cancel(job)).await??;
            Ok(Reply::Locals(locals))
        }
        EVAL => {
            let mut arguments = Arguments::new(EVAL, &["frame", "code", "timeout"], 2, arguments)?;
            let (frame, code) = (frame(&mut arguments)?, arguments.text("code")?);
            let timeout = timeout(&mut arguments)?;
            resume(session, context, |reply| session.eval_in_frame(frame, &code, timeout, reply)).await
        }
        RETURN => {
            let mut arguments = Arguments::new(RETURN, &["frame", "code"], 2, arguments)?;
            let (frame, code) = (frame(&mut arguments)?, arguments.text("code")?);
            resume(session, context, |reply| session.return_from_frame(frame, &code, reply)).await
        }
        AGAIN => {
            let mut arguments = Arguments::new(AGAIN, &["frame"], 1, arguments)?;
            let frame = frame(&mut arguments)?;
            resume(session, context, |reply| session.restart_frame(frame, reply)).await
        }
        _ => {
            Arguments::new(ABORT, &[], 0, arguments)?;
            let (answer, reply) = oneshot::channel();
            let job = session.abort_held(move |result| drop(answer.send(result)));
            wait(context, reply, || session.cancel(job)).await??;
            Ok(Reply::Aborted)
        }
    }
}

type OutcomeReply = Box<dyn FnOnce(Result<Outcome, HoldError>) + Send>;

/// Submits what evaluates, and reports its outcome.
async fn resume(
    session: &Session,
    context: &RequestContext<RoleServer>,
    submit: impl FnOnce(OutcomeReply) -> JobId,
) -> Answer {
    let (answer, reply) = oneshot::channel();
    let job = submit(Box::new(move |outcome| drop(answer.send(outcome))));
    Ok(wait(context, reply, || session.cancel(job)).await??.into())
}

fn frame(arguments: &mut Arguments) -> Result<u64, Fault> {
    Ok(arguments.whole("frame", 0..=u64::MAX, "a frame's number, from 0")?.unwrap_or_default())
}

/// The restart that is meant: a number may be written as a string, too.
fn designator(restart: String) -> Result<RestartDesignator, Fault> {
    match (restart.trim().parse::<f64>(), whole(&restart)) {
        (_, Some(number @ 1..)) => Ok(RestartDesignator::Number(number)),
        (Err(_), _) => Ok(RestartDesignator::Name(restart)),
        (Ok(_), _) => Err(Fault::Value(format!(
            "{RESTART}: restart must be a number from 1, or a name, not {}.",
            shown(&restart)
        ))),
    }
}
