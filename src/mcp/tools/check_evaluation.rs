//! The tool check-evaluation: the progress of an evaluation, its result, and its kept output. Calls are answered while
//! an evaluation runs.

use std::sync::Arc;
use std::time::Duration;

use rmcp::model::ToolAnnotations;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::arguments::{CharacterIndex, EvaluationNumber, PageCharacters, parse_seconds};
use super::{
    Call, CallHandler, CallPolicy, Fault, Reply, ToolResult, ToolSpec, handle_with, inspection_hints, reply_with,
};
use crate::report::{self, EvaluationPart, Page};
use crate::schema::{Tests, json};
use crate::{EvaluationError, EvaluationStatus, Outcome, Progress, Session, WaitId};

/// Maximum number of seconds that a call waits.
const MAX_WAIT_SECONDS: f64 = 3600.0;
/// Default number of characters of a page.
const DEFAULT_PAGE: u64 = 8_000;

/// The tool check-evaluation.
pub(super) struct CheckEvaluation;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Evaluation number. Default: the newest.
    id: Option<EvaluationNumber>,
    /// Wait this many seconds for the end; show the result as the call would have.
    #[serde(alias = "seconds", alias = "timeout")]
    wait: Option<WaitSeconds>,
    /// Show a page of this part.
    part: Option<Part>,
    /// With `part`: index of the first character.
    #[serde(default)]
    from: CharacterIndex,
    /// With `part`: number of characters.
    #[serde(default = "default_page", alias = "characters")]
    limit: PageCharacters,
}

fn default_page() -> PageCharacters {
    PageCharacters(DEFAULT_PAGE)
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Part {
    Output,
    Values,
    Error,
}

impl From<Part> for EvaluationPart {
    fn from(part: Part) -> Self {
        match part {
            Part::Output => Self::Output,
            Part::Values => Self::Values,
            Part::Error => Self::Error,
        }
    }
}

/// Waiting time in seconds.
#[derive(Debug, Clone, Copy)]
struct WaitSeconds(f64);

impl<'de> Deserialize<'de> for WaitSeconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let allowed = format!("a number of seconds from 0 to {MAX_WAIT_SECONDS}");
        parse_seconds(&value, &(0.0..=MAX_WAIT_SECONDS), allowed).map(Self)
    }
}

impl JsonSchema for WaitSeconds {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "WaitSeconds".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "minimum": 0, "maximum": MAX_WAIT_SECONDS})
    }
}

/// Structured content: the evaluation's progress, or a page of its output, values or error. After a wait for the result, the
/// content of run-tests or evaluate-lisp.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "the type only describes the schema of several kinds of content")]
pub(super) struct Content {
    #[schemars(flatten)]
    outcome: Tests,
    evaluation: Option<StatusContent>,
    page: Option<PageContent>,
}

impl ToolSpec for CheckEvaluation {
    const NAME: &'static str = "check-evaluation";
    const TITLE: &'static str = "Check evaluation";
    const DESCRIPTION: &'static str = "Report the progress of an evaluation, wait for its result, or show text \
        that an answer left out (`characters omitted`). Changes nothing, not even the last error. The last 20 \
        evaluations are kept. Example: {\"id\": 12, \"wait\": 60}.";
    const POLICY: CallPolicy = CallPolicy {
        core: true,
        // Without `wait` and `part`, the answer is a short status.
        is_slow: |arguments| arguments.keys().any(|name| name != "id"),
        ..CallPolicy::INSPECTION
    };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        inspection_hints()
    }

    fn call(call: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let session = call.session();
        let Arguments { id, wait: seconds, part, from, limit } = arguments;
        if part.is_some() && seconds.is_some() {
            return Err(Fault::Refusal(format!("{} takes wait or part, not both.", Self::NAME)));
        }
        let status = match session.evaluation(id.map(|id| id.0)) {
            Err(error @ (EvaluationError::None | EvaluationError::NoneSince { .. })) if id.is_none() => {
                return reply_with(NoEvaluations(error));
            }
            status => status?,
        };
        let id = status.id;
        if let Some(part) = part.map(EvaluationPart::from) {
            let (text, omitted) = match (part, &status.progress) {
                (EvaluationPart::Output, _) => session.printed(id)?,
                (part, Progress::Held(outcome) | Progress::Over(outcome, _)) => part.text_in(outcome),
                // There are no values and no error yet.
                (_, Progress::Queued | Progress::Running { .. }) => return reply_with(status),
            };
            return reply_with(Page::new(id, part, &text, omitted, from.0, limit.0));
        }
        let Some(WaitSeconds(seconds)) = seconds else { return reply_with(status) };
        handle_with(move |call| {
            answer_within(call, id, Duration::from_secs_f64(seconds), move |session, answer| {
                let of = session.clone();
                session.await_outcome(id, move |outcome| answer(Reply::from(AwaitedResult::new(&of, outcome))))
            });
        })
    }
}

/// The result of an evaluation that another call began.
#[derive(Debug)]
struct AwaitedResult {
    /// Identifier of the evaluation's error in this client's history.
    error: Option<u64>,
    reply: Reply,
}

impl AwaitedResult {
    /// Creates the result for the client of `session`. The client's history lacks errors of other clients' evaluations,
    /// so such an error gets no identifier.
    fn new(session: &Session, outcome: Arc<Outcome>) -> Self {
        let error = outcome.result.as_ref().err().map(|error| error.id).filter(|id| session.error(*id).is_some());
        Self { error, reply: outcome.into() }
    }
}

impl ToolResult for AwaitedResult {
    fn text(&self, max: usize) -> String {
        let Some(id) = self.error else { return self.reply.untruncated_text(max) };
        let line = report::error_id_line(id);
        format!("{}\n\n{line}", self.reply.untruncated_text(max.saturating_sub(line.len() + 2)))
    }

    fn fit(&mut self, max: usize) {
        let line = self.error.map_or(0, |id| report::error_id_line(id).len() + 2);
        self.reply.fit(max.saturating_sub(line));
    }

    fn structured_content(&self, max: usize) -> Value {
        self.reply.structured_content(max)
    }

    fn is_error(&self) -> bool {
        self.reply.is_error()
    }
}

/// The progress of an evaluation.
#[derive(Serialize, JsonSchema)]
pub(super) struct StatusContent {
    id: u64,
    state: State,
    code: String,
    printed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<bool>,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum State {
    Queued,
    Running,
    Background,
    Held,
    Over,
}

/// Structured content that consists of a status only.
#[derive(Serialize)]
struct StatusOnly {
    evaluation: StatusContent,
}

impl ToolResult for EvaluationStatus {
    fn text(&self, _: usize) -> String {
        report::evaluation_status(self)
    }

    fn structured_content(&self, _: usize) -> Value {
        let (state, took, outcome) = match &self.progress {
            Progress::Queued => (State::Queued, None, None),
            Progress::Running { time, background: false } => (State::Running, Some(time), None),
            Progress::Running { time, background: true } => (State::Background, Some(time), None),
            Progress::Held(outcome) => (State::Held, None, Some(outcome)),
            Progress::Over(outcome, time) => (State::Over, Some(time), Some(outcome)),
        };
        json(&StatusOnly {
            evaluation: StatusContent {
                id: self.id,
                state,
                code: self.code.clone(),
                printed: self.printed,
                seconds: took.map(Duration::as_secs_f64),
                failed: outcome.map(|outcome| outcome.is_error()),
            },
        })
    }
}

/// A page of an evaluation's output, values or error.
#[derive(Serialize, JsonSchema)]
struct PageContent {
    evaluation: u64,
    part: String,
    text: String,
    from: u64,
    total: u64,
    omitted: u64,
}

/// Structured content that consists of a page only.
#[derive(Serialize)]
struct PageOnly {
    page: PageContent,
}

impl ToolResult for Page {
    fn text(&self, _: usize) -> String {
        report::evaluation_page(self)
    }

    fn fit(&mut self, max: usize) {
        *self = self.clone().fitted(max);
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&PageOnly {
            page: PageContent {
                evaluation: self.evaluation,
                part: self.part.name().to_owned(),
                text: self.text.clone(),
                from: self.from,
                total: self.total,
                omitted: self.omitted,
            },
        })
    }
}

/// The result if nothing has been evaluated yet, or nothing since a reset or since the image was replaced.
#[derive(Debug)]
struct NoEvaluations(EvaluationError);

impl ToolResult for NoEvaluations {
    fn text(&self, _: usize) -> String {
        self.0.to_string()
    }

    fn structured_content(&self, _: usize) -> Value {
        Value::Object(serde_json::Map::new())
    }
}

/// Returns the progress of an evaluation.
pub(super) fn status_of(session: &Session, id: u64) -> Result<Reply, EvaluationError> {
    Ok(session.evaluation(Some(id))?.into())
}

/// A function that answers a waiting call.
pub(super) type AnswerCallback = Box<dyn FnOnce(Reply) + Send>;

/// Calls `begin` with a callback that answers the call once the wait that `begin` starts is over. If the wait is not over
/// within `time`, answers with the progress of evaluation `id`.
pub(super) fn answer_within(
    call: Call,
    id: u64,
    time: Duration,
    begin: impl FnOnce(&Session, AnswerCallback) -> Result<WaitId, EvaluationError>,
) {
    let (session, pending) = (call.session().clone(), call.pending());
    let call = call.shared();
    let first = call.clone();
    let answer = move |reply: Reply| {
        if let Some(call) = first.take() {
            call.reply(reply);
        }
    };
    match begin(&session, Box::new(answer)) {
        Err(error) => {
            if let Some(call) = call.take() {
                call.refuse(error);
            }
        }
        Ok(wait) => {
            let waiting_session = session.clone();
            pending.on_cancel(move || _ = waiting_session.cancel_wait(wait));
            pending.report_progress(|_, _| None);
            pending.set_deadline(time, move || {
                // After the end of the wait, the callback may have to wait until the answers to other calls are rendered.
                if session.cancel_wait(wait)
                    && let Some(call) = call.take()
                {
                    call.answer(status_of(&session, id));
                }
            });
        }
    }
}
