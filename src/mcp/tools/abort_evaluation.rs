//! The tool abort-evaluation, which ends a held or running evaluation.

use std::time::Duration;

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{EvaluationNumber, Flag};
use super::check_evaluation::{StatusContent, answer_within, status_of};
use super::debugger::handle_with_job;
use super::{
    Call, CallHandler, CallPolicy, CallRefusal, Fault, ToolResult, ToolSpec, evaluation_hints, handle_with, reply_with,
};
use crate::schema::json;
use crate::tool_names;
use crate::{EvaluationStatus, HoldError, Progress, Session};

/// Maximum time that a call waits for the end of the evaluation that it interrupts.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The tool abort-evaluation.
pub(super) struct AbortEvaluation;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Number of a running or waiting evaluation.[[debugger| Default: the held evaluation.]]
    id: Option<EvaluationNumber>,
    /// True to abort the newest evaluation if `id` is missing, as the former tool `evaluation` did.
    #[serde(default)]
    #[schemars(skip)]
    newest: Flag,
}

/// Structured content: the end of the held evaluation, or the progress of another evaluation.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "the type only describes the schema of two kinds of content")]
pub(super) struct Content {
    aborted: Option<bool>,
    evaluation: Option<StatusContent>,
}

impl ToolSpec for AbortEvaluation {
    const NAME: &'static str = "abort-evaluation";
    const TITLE: &'static str = "Abort evaluation";
    const DESCRIPTION: &'static str = "End [[debugger|the held evaluation (on-error `debug`) or, with `id`, \
        ]]a running, waiting or background evaluation. Its cleanup forms run.";
    const POLICY: CallPolicy = CallPolicy { core: true, ..CallPolicy::NONE };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(call: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let id = arguments.id.map(|id| id.0);
        if id.is_none() && !arguments.newest.0 {
            return abort_held();
        }
        let status = call.session().evaluation(id)?;
        let id = status.id;
        match status.progress {
            Progress::Over(..) => reply_with(status),
            Progress::Held(_) if call.session().held_evaluation() == Some(id) => abort_held(),
            Progress::Held(_) => {
                // Clients on streams of an embedding program share the image, but no REPL can attach to it.
                let take_over =
                    if call.context.options.attachable { ", unless a REPL takes it over (:take)" } else { "" };
                Err(Fault::Refusal(format!(
                    "Evaluation {id} is held for another client: only that client can resume or abort the \
                     evaluation{take_over}."
                )))
            }
            Progress::Queued | Progress::Running { .. } => handle_with(move |call| interrupt(call, id)),
        }
    }
}

/// Aborts the evaluation that the client holds.
fn abort_held() -> Result<CallHandler, Fault> {
    handle_with_job(|session, call| {
        let of = session.clone();
        session.abort_held(move |result| match result {
            Err(error @ HoldError::NothingHeld { .. }) => {
                let reason = of.audience().address(|| explain_nothing_held(&of, &error));
                call.refuse(Fault::Refusal(reason));
            }
            result => call.answer(result.map(|()| AbortResult)),
        })
    })
}

/// Returns the message of `error`, with advice if an agent may have meant its newest evaluation, which has not ended. The
/// commands of a person take no `id`.
fn explain_nothing_held(session: &Session, error: &HoldError) -> String {
    // Without tools for a held evaluation, no call can ask to hold one, so advice on how to do so would mislead.
    let held = if tool_names::is_listed(tool_names::ANY_DEBUGGER_TOOL) {
        error.to_string()
    } else {
        "No evaluation is held.".to_owned()
    };
    match session.evaluation(None) {
        Ok(EvaluationStatus { id, progress: Progress::Queued | Progress::Running { .. }, .. })
            if tool_names::is_usable(AbortEvaluation::NAME) =>
        {
            format!("{held} To end evaluation {id}, which has not ended, pass its `id`.")
        }
        _ => held,
    }
}

/// Interrupts evaluation `id`, and aborts it if it is held afterwards. Answers once the evaluation has ended, or with its
/// progress if it neither ends nor is held within [`ABORT_TIMEOUT`].
fn interrupt(call: Call, id: u64) {
    let (session, first_job) = (call.session().clone(), call.first_job);
    if let Err(error) = session.cancel_evaluation(id) {
        return call.refuse(error);
    }
    let report = move || status_of(&session, id).unwrap_or_else(|error| CallRefusal(error.to_string()).into());
    answer_within(call, id, ABORT_TIMEOUT, move |session, answer| {
        let ended = session.clone();
        session.await_stop(id, move || {
            // If the interrupted code was about to resume a held evaluation, the evaluation is now held as before.
            if ended.held_evaluation() == Some(id) {
                // The job belongs to this call, whichever thread calls this closure.
                ended.handle_call(first_job, || {
                    ended.abort_held(move |result| answer(result.map_or_else(|_| report(), |()| AbortResult.into())));
                });
            } else {
                answer(report());
            }
        })
    });
}

/// The result of aborting the held evaluation.
#[derive(Debug)]
pub(super) struct AbortResult;

#[derive(Serialize)]
struct AbortedContent {
    aborted: bool,
}

impl ToolResult for AbortResult {
    fn text(&self, _: usize) -> String {
        "Evaluation aborted.".to_owned()
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&AbortedContent { aborted: true })
    }
}
