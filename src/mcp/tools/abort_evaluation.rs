//! abort-evaluation: the end of an evaluation that is held or runs.

use std::time::Duration;

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{EvaluationNumber, Flag};
use super::check_evaluation::{StatusContent, status_of, wait};
use super::debugger::job;
use super::{Call, Fault, Finding, Offered, Refused, Step, Traits, evaluation_hints, later, now};
use crate::Progress;
use crate::schema::json;

/// Maximum time that a call waits for the end of the evaluation that it interrupts.
const WAIT: Duration = Duration::from_secs(5);

/// The tool.
pub(super) struct AbortEvaluation;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Which evaluation, also one that runs or waits. Default: the held one.
    id: Option<EvaluationNumber>,
    /// The default is the newest, as it was for the tool evaluation of version 0.1.
    #[serde(default)]
    #[schemars(skip)]
    newest: Flag,
}

/// The end of the held evaluation, or the progress of another one.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "the schema of two contents")]
pub(super) struct Content {
    aborted: Option<bool>,
    evaluation: Option<StatusContent>,
}

impl Offered for AbortEvaluation {
    const NAME: &'static str = "abort-evaluation";
    const TITLE: &'static str = "Abort evaluation";
    const DESCRIPTION: &'static str = "End an evaluation: it unwinds, and its cleanup forms run. With `id` one that runs, also in \
        the background, or waits; else the held one (on-error `debug`).";
    const TRAITS: Traits = Traits { core: true, ..Traits::NONE };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(call: &Call, arguments: Arguments) -> Result<Step, Fault> {
        let id = arguments.id.map(|id| id.0);
        if id.is_none() && !arguments.newest.0 {
            return abort_held();
        }
        let status = call.session().evaluation(id)?;
        let id = status.id;
        match status.progress {
            Progress::Over(..) => now(status),
            Progress::Held(_) if call.session().held_evaluation() == Some(id) => abort_held(),
            Progress::Held(_) => Err(Fault::Value(format!(
                "Evaluation {id} is held for another client, which alone can resume or abort it."
            ))),
            Progress::Queued | Progress::Running { .. } => later(move |call| interrupt(call, id)),
        }
    }
}

/// Aborts what the client's connection holds.
fn abort_held() -> Result<Step, Fault> {
    job(|session, call| session.abort_held(move |result| call.answer(result.map(|()| Aborted))))
}

/// Interrupts an evaluation, and answers with its progress when it has ended.
fn interrupt(call: Call, id: u64) {
    let session = call.session().clone();
    if let Err(error) = session.cancel_evaluation(id) {
        return call.refuse(error);
    }
    let report = move || status_of(&session, id).unwrap_or_else(|error| Refused(error.to_string()).into());
    wait(call, id, WAIT, move |session, answer| session.when_ended(id, move || answer(report())));
}

/// The held evaluation is aborted.
#[derive(Debug)]
pub(super) struct Aborted;

#[derive(Serialize)]
struct AbortedContent {
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
