//! The tools for a held evaluation: invoke-restart, eval-in-frame and resume-from-frame.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::Deserialize;

use super::abort_evaluation::AbortResult;
use super::arguments::{FrameNumber, Text, Timeout, parse_integer, quoted_excerpt, text};
use super::{Call, CallHandler, Fault, Reply, ToolSpec, evaluation_hints, handle_with};
use crate::schema;
use crate::{JobId, RestartDesignator, Resumed, Session};

/// Returns a handler that submits a job, as [`submit_job`] does.
pub(super) fn handle_with_job(
    submit: impl FnOnce(&Session, Call) -> JobId + Send + 'static,
) -> Result<CallHandler, Fault> {
    handle_with(move |call| submit_job(call, submit))
}

/// Submits a job that answers `call`. Cancelling the call cancels the job.
pub(super) fn submit_job(call: Call, submit: impl FnOnce(&Session, Call) -> JobId) {
    let (session, pending) = (call.session().clone(), call.pending());
    let job = pending.submit(&session, || submit(&session, call));
    pending.report_progress(move |from, max| session.output_part(job, from, max));
}

/// The tool invoke-restart.
pub(super) struct InvokeRestart;

#[derive(Deserialize, JsonSchema)]
pub(super) struct RestartArguments {
    /// Restart number in the report, or name.
    restart: Text,
    /// Lisp expressions for the restart's arguments: `1 (list 2)`.
    values: Option<Text>,
}

/// Structured content of invoke-restart: the resumed evaluation's result, or a note that the evaluation was aborted.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "the type only describes the schema of two kinds of content")]
pub(super) struct RestartContent {
    #[schemars(flatten)]
    evaluation: schema::Evaluation,
    #[schemars(extend("says" = "True after ABORT; all other fields are then absent."))]
    aborted: Option<bool>,
}

impl ToolSpec for InvokeRestart {
    const NAME: &'static str = "invoke-restart";
    const TITLE: &'static str = "Invoke restart";
    const DESCRIPTION: &'static str = "Resume the held evaluation (on-error `debug`) with one of its restarts; returns \
        its values or the next error, held again. Typical: [[eval-in-frame|define what is missing with eval-in-frame, \
        then ]]CONTINUE.";
    type Arguments = RestartArguments;
    type Content = RestartContent;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: RestartArguments) -> Result<CallHandler, Fault> {
        let restart = restart_designator(arguments.restart.0)?;
        let values = text(arguments.values).unwrap_or_default();
        handle_with_job(move |session, call| {
            session.invoke_restart(&restart, &values, move |outcome| {
                call.answer(outcome.map(|resumed| match resumed {
                    Resumed::Outcome(outcome) => Reply::from(outcome),
                    Resumed::Aborted => AbortResult.into(),
                }));
            })
        })
    }
}

/// Parses the argument `restart`: a number, or a name.
fn restart_designator(restart: String) -> Result<RestartDesignator, Fault> {
    match (restart.trim().parse::<f64>(), parse_integer(&restart)) {
        (_, Some(number @ 1..)) => Ok(RestartDesignator::Number(number)),
        (Err(_), _) => Ok(RestartDesignator::Name(restart)),
        (Ok(_), _) => Err(Fault::Refusal(format!(
            "{}: restart must be a number, 1 or greater, or a name, not {}.",
            InvokeRestart::NAME,
            quoted_excerpt(&restart)
        ))),
    }
}

/// The tool eval-in-frame.
pub(super) struct EvalInFrame;

#[derive(Deserialize, JsonSchema)]
pub(super) struct EvalArguments {
    /// Frame number in the backtrace.
    frame: FrameNumber,
    /// Lisp code; sees the frame's variables.
    code: Text,
    /// Seconds until TIMEOUT; 0: no limit.
    #[serde(default)]
    timeout: Timeout,
}

impl ToolSpec for EvalInFrame {
    const NAME: &'static str = "eval-in-frame";
    const TITLE: &'static str = "Evaluate in frame";
    const DESCRIPTION: &'static str = "Evaluate code in a frame of the held evaluation (on-error `debug`), with \
        its variables visible: inspect or set them, or define what is missing. An error in this code leaves the held \
        evaluation intact.";
    type Arguments = EvalArguments;
    type Content = schema::Evaluation;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: EvalArguments) -> Result<CallHandler, Fault> {
        let EvalArguments { frame, code, timeout } = arguments;
        handle_with_job(move |session, call| {
            session.eval_in_frame(frame.0, &code.0, timeout.0, move |outcome| call.answer(outcome))
        })
    }
}

/// The tool resume-from-frame.
pub(super) struct ResumeFromFrame;

#[derive(Deserialize, JsonSchema)]
pub(super) struct ResumeArguments {
    /// Frame number in the backtrace.
    frame: FrameNumber,
    /// Lisp code whose values the frame returns; sees the frame's variables.
    r#return: Option<Text>,
}

impl ToolSpec for ResumeFromFrame {
    const NAME: &'static str = "resume-from-frame";
    const TITLE: &'static str = "Resume from frame";
    const DESCRIPTION: &'static str = "Resume the held evaluation (on-error `debug`) at a frame: with `return`, the \
        frame returns that code's values; otherwise its function is called again with the same arguments, for \
        instance after you have redefined it. Returns the values or the next error, held again.";
    type Arguments = ResumeArguments;
    type Content = schema::Evaluation;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: ResumeArguments) -> Result<CallHandler, Fault> {
        let ResumeArguments { frame, r#return } = arguments;
        match r#return {
            Some(Text(code)) => handle_with_job(move |session, call| {
                session.return_from_frame(frame.0, &code, move |outcome| call.answer(outcome))
            }),
            None => handle_with_job(move |session, call| {
                session.restart_frame(frame.0, move |outcome| call.answer(outcome))
            }),
        }
    }
}
