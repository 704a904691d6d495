//! The tools for an evaluation that is held where it failed.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::Deserialize;

use super::abort_evaluation::Aborted;
use super::arguments::{FrameNumber, Text, Timeout, shown, text, whole};
use super::{Call, Fault, Offered, Reply, Step, evaluation_hints, later};
use crate::schema;
use crate::{JobId, RestartDesignator, Resumed, Session};

/// Returns the step that submits a job, as [`submit_job`] does.
pub(super) fn job(submit: impl FnOnce(&Session, Call) -> JobId + Send + 'static) -> Result<Step, Fault> {
    later(move |call| submit_job(call, submit))
}

/// Submits a job that answers `call`, and is cancelled with it.
pub(super) fn submit_job(call: Call, submit: impl FnOnce(&Session, Call) -> JobId) {
    let (session, waiting) = (call.session().clone(), call.waiting());
    let job = submit(&session, call);
    waiting.report({
        let session = session.clone();
        move |from| session.output_so_far(job, from)
    });
    waiting.on_cancel(move || session.cancel(job));
}

/// invoke-restart.
pub(super) struct InvokeRestart;

#[derive(Deserialize, JsonSchema)]
pub(super) struct RestartArguments {
    /// Its number in the report, or its name.
    restart: Text,
    /// Lisp expressions for the restart's arguments: `1 (list 2)`.
    values: Option<Text>,
}

/// What the evaluation did then, or that it was aborted.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "it is one of two contents: this is the schema of both")]
pub(super) struct RestartContent {
    #[schemars(flatten)]
    evaluation: schema::Evaluation,
    #[schemars(extend("says" = "In place of all else: the restart was ABORT."))]
    aborted: Option<bool>,
}

impl Offered for InvokeRestart {
    const NAME: &'static str = "invoke-restart";
    const TITLE: &'static str = "Invoke restart";
    const DESCRIPTION: &'static str = "Resume the held evaluation (on-error `debug`) with one of its restarts; returns its \
        values or the next error, held again. Typical: [[eval-in-frame|define what is missing with eval-in-frame, \
        then ]]CONTINUE.";
    type Arguments = RestartArguments;
    type Content = RestartContent;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: RestartArguments) -> Result<Step, Fault> {
        let restart = designator(arguments.restart.0)?;
        let values = text(arguments.values).unwrap_or_default();
        job(move |session, call| {
            session.invoke_restart(&restart, &values, move |outcome| {
                call.answer(outcome.map(|resumed| match resumed {
                    Resumed::Outcome(outcome) => Reply::from(outcome),
                    Resumed::Aborted => Aborted.into(),
                }));
            })
        })
    }
}

/// The restart that is meant: a number may be written as a string, too.
fn designator(restart: String) -> Result<RestartDesignator, Fault> {
    match (restart.trim().parse::<f64>(), whole(&restart)) {
        (_, Some(number @ 1..)) => Ok(RestartDesignator::Number(number)),
        (Err(_), _) => Ok(RestartDesignator::Name(restart)),
        (Ok(_), _) => Err(Fault::Value(format!(
            "{}: restart must be a number from 1, or a name, not {}.",
            InvokeRestart::NAME,
            shown(&restart)
        ))),
    }
}

/// eval-in-frame.
pub(super) struct EvalInFrame;

#[derive(Deserialize, JsonSchema)]
pub(super) struct EvalArguments {
    /// The frame's number in the backtrace.
    frame: FrameNumber,
    /// Lisp code; sees the frame's variables.
    code: Text,
    /// Seconds until TIMEOUT; 0: no limit.
    #[serde(default)]
    timeout: Timeout,
}

impl Offered for EvalInFrame {
    const NAME: &'static str = "eval-in-frame";
    const TITLE: &'static str = "Evaluate in frame";
    const DESCRIPTION: &'static str = "Evaluate code inside a frame of the held evaluation (on-error `debug`), with its \
        variables visible: inspect or set them, or define what is missing. An error in it does not lose the held \
        evaluation.";
    type Arguments = EvalArguments;
    type Content = schema::Evaluation;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: EvalArguments) -> Result<Step, Fault> {
        let EvalArguments { frame, code, timeout } = arguments;
        job(move |session, call| {
            session.eval_in_frame(frame.0, &code.0, timeout.0, move |outcome| call.answer(outcome))
        })
    }
}

/// resume-from-frame.
pub(super) struct ResumeFromFrame;

#[derive(Deserialize, JsonSchema)]
pub(super) struct ResumeArguments {
    /// The frame's number in the backtrace.
    frame: FrameNumber,
    /// Lisp code, which sees the frame's variables: the frame returns its values.
    r#return: Option<Text>,
}

impl Offered for ResumeFromFrame {
    const NAME: &'static str = "resume-from-frame";
    const TITLE: &'static str = "Resume from frame";
    const DESCRIPTION: &'static str = "Resume the held evaluation (on-error `debug`) at a frame: with `return` as if the frame had \
        returned these values; without, its function is called again with the same arguments, for instance after you have \
        redefined it. Returns the values or the next error, held again.";
    type Arguments = ResumeArguments;
    type Content = schema::Evaluation;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: ResumeArguments) -> Result<Step, Fault> {
        let ResumeArguments { frame, r#return } = arguments;
        match r#return {
            Some(Text(code)) => {
                job(move |session, call| session.return_from_frame(frame.0, &code, move |outcome| call.answer(outcome)))
            }
            None => job(move |session, call| session.restart_frame(frame.0, move |outcome| call.answer(outcome))),
        }
    }
}
