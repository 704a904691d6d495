//! The tools for an evaluation that is held where it failed.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::arguments::{shown, whole};
use super::limits::{timeout, timeout_schema};
use super::schema::{text, whole_from};
use super::{Arguments, Call, Fault, Reply, Step, define, evaluation_hints, inspection, later};
use crate::{JobId, RestartDesignator, Resumed, Session};

pub(super) const RESTART: &str = "invoke-restart";
pub(super) const LOCALS: &str = "frame-locals";
pub(super) const EVAL: &str = "eval-in-frame";
pub(super) const RETURN: &str = "return-from-frame";
pub(super) const AGAIN: &str = "restart-frame";
pub(super) const ABORT: &str = "abort-evaluation";

pub(super) fn tools() -> [Tool; 6] {
    let frame = || whole_from(0, None, "The frame's number in the backtrace.");
    let code = || text("Lisp code; sees the frame's variables.");
    [
        define(
            RESTART,
            "Invoke restart",
            "Resume the held evaluation (on-error `debug`) with one of its restarts; returns its \
            values or the next error, held again. Typical: [[eval-in-frame|define what is missing with eval-in-frame, \
            then ]]CONTINUE.",
            json!({
                "restart": text("Its number in the report, or its name."),
                "values": text("Lisp expressions for the restart's arguments: `1 (list 2)`."),
            }),
            &["restart"],
            evaluation_hints(),
        ),
        define(
            LOCALS,
            "Frame locals",
            "Show the variables of a frame of the held evaluation (on-error `debug`).\
            [[get-backtrace| Of others get-backtrace has `locals`.]]",
            json!({"frame": frame()}),
            &["frame"],
            inspection(),
        ),
        define(
            EVAL,
            "Evaluate in frame",
            "Evaluate code inside a frame of the held evaluation (on-error `debug`), with its \
            variables visible: inspect or set them, or define what is missing. An error in it does not lose the held \
            evaluation.",
            json!({"frame": frame(), "code": code(), "timeout": timeout_schema()}),
            &["frame", "code"],
            evaluation_hints(),
        ),
        define(
            RETURN,
            "Return from frame",
            "Resume the held evaluation (on-error `debug`) as if a frame had returned the values of \
             this code.",
            json!({"frame": frame(), "code": code()}),
            &["frame", "code"],
            evaluation_hints(),
        ),
        define(
            AGAIN,
            "Restart frame",
            "Resume the held evaluation (on-error `debug`) by calling a frame's function again with \
              the same arguments, for instance after redefining it.",
            json!({"frame": frame()}),
            &["frame"],
            evaluation_hints(),
        ),
        define(
            ABORT,
            "Abort evaluation",
            "Abort the held evaluation (on-error `debug`): unwinds and runs its cleanup forms.",
            json!({}),
            &[],
            evaluation_hints(),
        ),
    ]
}

pub(super) fn call(name: &str, arguments: JsonObject) -> Result<Step, Fault> {
    match name {
        RESTART => {
            let mut arguments = Arguments::new(RESTART, &["restart", "values"], 1, arguments)?;
            let restart = designator(arguments.text("restart")?)?;
            let values = arguments.optional_text("values")?.unwrap_or_default();
            job(move |session, call| {
                session.invoke_restart(&restart, &values, move |outcome| {
                    call.answer(outcome.map(|resumed| match resumed {
                        Resumed::Outcome(outcome) => Reply::from(outcome),
                        Resumed::Aborted => Reply::Aborted,
                    }));
                })
            })
        }
        LOCALS => {
            let mut arguments = Arguments::new(LOCALS, &["frame"], 1, arguments)?;
            let frame = frame(&mut arguments)?;
            job(move |session, call| session.frame_locals(frame, move |locals| call.answer(locals.map(Reply::Locals))))
        }
        EVAL => {
            let mut arguments = Arguments::new(EVAL, &["frame", "code", "timeout"], 2, arguments)?;
            let (frame, code) = (frame(&mut arguments)?, arguments.text("code")?);
            let timeout = timeout(&mut arguments)?;
            job(move |session, call| session.eval_in_frame(frame, &code, timeout, move |outcome| call.answer(outcome)))
        }
        RETURN => {
            let mut arguments = Arguments::new(RETURN, &["frame", "code"], 2, arguments)?;
            let (frame, code) = (frame(&mut arguments)?, arguments.text("code")?);
            job(move |session, call| session.return_from_frame(frame, &code, move |outcome| call.answer(outcome)))
        }
        AGAIN => {
            let mut arguments = Arguments::new(AGAIN, &["frame"], 1, arguments)?;
            let frame = frame(&mut arguments)?;
            job(move |session, call| session.restart_frame(frame, move |outcome| call.answer(outcome)))
        }
        _ => {
            Arguments::new(ABORT, &[], 0, arguments)?;
            job(|session, call| session.abort_held(move |result| call.answer(result.map(|()| Reply::Aborted))))
        }
    }
}

/// Submits a job that answers the call, and is cancelled with it.
fn job(submit: impl FnOnce(&Session, Call) -> JobId + Send + 'static) -> Result<Step, Fault> {
    later(move |call| {
        let (session, waiting) = (call.session().clone(), call.waiting());
        let job = submit(&session, call);
        waiting.report({
            let session = session.clone();
            move |from| session.output_so_far(job, from)
        });
        waiting.on_cancel(move || session.cancel(job));
    })
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
