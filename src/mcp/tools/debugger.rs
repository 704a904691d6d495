//! The tools for an evaluation that is held where it failed.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{FrameNumber, Text, Timeout, shown, text, whole};
use super::{Call, Fault, Finding, Offered, Reply, Step, evaluation_hints, inspection, later};
use crate::mcp::content::{self, LocalVariable, json};
use crate::outcome::Local;
use crate::report;
use crate::{JobId, RestartDesignator, Resumed, Session};

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
    evaluation: content::Evaluation,
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

/// frame-locals.
pub(super) struct FrameLocals;

#[derive(Deserialize, JsonSchema)]
pub(super) struct FrameArguments {
    /// The frame's number in the backtrace.
    frame: FrameNumber,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct LocalsContent {
    locals: Vec<LocalVariable>,
}

impl Offered for FrameLocals {
    const NAME: &'static str = "frame-locals";
    const TITLE: &'static str = "Frame locals";
    const DESCRIPTION: &'static str = "Show the variables of a frame of the held evaluation (on-error `debug`).\
        [[get-backtrace| Of others get-backtrace has `locals`.]]";
    type Arguments = FrameArguments;
    type Content = LocalsContent;

    fn hints() -> ToolAnnotations {
        inspection()
    }

    fn call(_: &Call, arguments: FrameArguments) -> Result<Step, Fault> {
        job(move |session, call| session.frame_locals(arguments.frame.0, move |locals| call.answer(locals)))
    }
}

impl Finding for Vec<Local> {
    fn text(&self, max: usize) -> String {
        report::locals(self, max)
    }

    fn content(&self, _: usize) -> Value {
        json(&LocalsContent { locals: self.iter().map(LocalVariable::new).collect() })
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
    /// Seconds; 0: no limit.
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
    type Content = content::Evaluation;

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

/// return-from-frame.
pub(super) struct ReturnFromFrame;

#[derive(Deserialize, JsonSchema)]
pub(super) struct ReturnArguments {
    /// The frame's number in the backtrace.
    frame: FrameNumber,
    /// Lisp code; sees the frame's variables.
    code: Text,
}

impl Offered for ReturnFromFrame {
    const NAME: &'static str = "return-from-frame";
    const TITLE: &'static str = "Return from frame";
    const DESCRIPTION: &'static str =
        "Resume the held evaluation (on-error `debug`) as if a frame had returned the values of this code.";
    type Arguments = ReturnArguments;
    type Content = content::Evaluation;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: ReturnArguments) -> Result<Step, Fault> {
        let ReturnArguments { frame, code } = arguments;
        job(move |session, call| session.return_from_frame(frame.0, &code.0, move |outcome| call.answer(outcome)))
    }
}

/// restart-frame.
pub(super) struct RestartFrame;

impl Offered for RestartFrame {
    const NAME: &'static str = "restart-frame";
    const TITLE: &'static str = "Restart frame";
    const DESCRIPTION: &'static str = "Resume the held evaluation (on-error `debug`) by calling a frame's function again with \
        the same arguments, for instance after redefining it.";
    type Arguments = FrameArguments;
    type Content = content::Evaluation;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: FrameArguments) -> Result<Step, Fault> {
        job(move |session, call| session.restart_frame(arguments.frame.0, move |outcome| call.answer(outcome)))
    }
}

/// abort-evaluation.
pub(super) struct AbortEvaluation;

#[derive(Deserialize, JsonSchema)]
pub(super) struct NoArguments {}

impl Offered for AbortEvaluation {
    const NAME: &'static str = "abort-evaluation";
    const TITLE: &'static str = "Abort evaluation";
    const DESCRIPTION: &'static str =
        "Abort the held evaluation (on-error `debug`): unwinds and runs its cleanup forms.";
    type Arguments = NoArguments;
    type Content = AbortedContent;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, _: NoArguments) -> Result<Step, Fault> {
        job(|session, call| session.abort_held(move |result| call.answer(result.map(|()| Aborted))))
    }
}

/// The held evaluation is given up.
#[derive(Debug)]
struct Aborted;

#[derive(Serialize, JsonSchema)]
pub(super) struct AbortedContent {
    aborted: bool,
}

impl Finding for Aborted {
    fn text(&self, _: usize) -> String {
        "Evaluation aborted.".to_owned()
    }

    fn content(&self, _: usize) -> Value {
        json(&AbortedContent { aborted: true })
    }
}
