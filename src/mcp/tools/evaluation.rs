//! The tool evaluation: how far one is, what is kept of it, its end. Answers while one runs.

use std::time::Duration;

use rmcp::model::ToolAnnotations;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::arguments::{CharacterNumber, EvaluationNumber, PageCharacters, seconds_of};
use super::{Call, Fault, Finding, Offered, Refused, Reply, Step, Traits, later, now};
use crate::mcp::content::{Tests, json};
use crate::report::{self, EvaluationPart, Page};
use crate::{EvaluationError, EvaluationStatus, Progress, Session, WaitId};

/// Seconds that `wait` waits unless asked otherwise, and at most: clients have limits of their own.
const WAIT: f64 = 25.0;
const MAX_WAIT: f64 = 3600.0;
/// How long `cancel` waits for the end of what it interrupts.
const CANCEL_WAIT: Duration = Duration::from_secs(5);
/// Characters of a page unless asked otherwise.
const PAGE: u64 = 8_000;

/// The tool.
pub(super) struct Evaluation;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Default: the newest.
    id: Option<EvaluationNumber>,
    /// `wait` answers when it is over, as the call would have; `output` shows a page; `cancel` interrupts it.
    #[serde(default)]
    action: Action,
    /// For `wait`: how long.
    #[serde(default)]
    seconds: WaitSeconds,
    /// For `output`: what to show.
    #[serde(default)]
    part: Part,
    /// For `output`: the first character.
    #[serde(default)]
    from: CharacterNumber,
    /// For `output`.
    #[serde(default = "default_page")]
    characters: PageCharacters,
}

fn default_page() -> PageCharacters {
    PageCharacters(PAGE)
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Action {
    #[default]
    Status,
    Wait,
    Output,
    Cancel,
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Part {
    #[default]
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

/// How long `wait` waits.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(transparent)]
struct WaitSeconds(f64);

impl Default for WaitSeconds {
    fn default() -> Self {
        Self(WAIT)
    }
}

impl<'de> Deserialize<'de> for WaitSeconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let allowed = format!("a number of seconds from 0 to {MAX_WAIT}");
        seconds_of(&value, &(0.0..=MAX_WAIT), allowed).map(Self)
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
        json_schema!({"type": "number", "minimum": 0, "maximum": MAX_WAIT})
    }
}

/// How far the evaluation is, or what is kept of it; as for run-tests or evaluate-lisp for one that was waited for.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "it is one of several contents: this is the schema of all")]
pub(super) struct Content {
    #[schemars(flatten)]
    outcome: Tests,
    evaluation: Option<StatusContent>,
    page: Option<PageContent>,
}

impl Offered for Evaluation {
    const NAME: &'static str = "evaluation";
    const TITLE: &'static str = "Evaluation";
    const DESCRIPTION: &'static str = "Check or cancel an evaluation, also while it runs; show the output or values that an answer \
        left out (`characters omitted`). The last 20 are kept.";
    const TRAITS: Traits = Traits { repeatable: true, core: true, ..Traits::NONE };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(true).open_world(false)
    }

    fn call(call: &Call, arguments: Arguments) -> Result<Step, Fault> {
        let session = call.session();
        let Arguments { id, action, seconds, part, from, characters } = arguments;
        let part = EvaluationPart::from(part);
        let status = match session.evaluation(id.map(|id| id.0)) {
            Err(error @ (EvaluationError::None | EvaluationError::NoneSince { .. })) if id.is_none() => {
                return now(NoEvaluations(error));
            }
            status => status?,
        };
        let id = status.id;
        match action {
            Action::Status => {}
            Action::Output => {
                let (text, omitted) = match (part, &status.progress) {
                    (EvaluationPart::Output, _) => session.printed(id)?,
                    (part, Progress::Held(outcome) | Progress::Over(outcome, _)) => part.of(outcome),
                    _ => Default::default(),
                };
                return now(Page::new(id, part, &text, omitted, from.0, characters.0));
            }
            Action::Wait => {
                return later(move |call| {
                    wait(call, id, Duration::from_secs_f64(seconds.0), move |session, answer| {
                        session.when_over(id, move |outcome| answer(Reply::from(outcome)))
                    });
                });
            }
            Action::Cancel if matches!(status.progress, Progress::Over(..)) => {}
            Action::Cancel => {
                let held = matches!(status.progress, Progress::Held(_));
                return later(move |call| cancel(call, id, held));
            }
        }
        now(status)
    }
}

/// Interrupts an evaluation, or has it released if it is `held`.
fn cancel(call: Call, id: u64, held: bool) {
    let session = call.session().clone();
    if held {
        let of = session.clone();
        let waiting = call.waiting();
        let job = session.abort_held(move |released| match released {
            Ok(()) => call.answer(status_of(&of, id)),
            Err(error) => call.refuse(error),
        });
        waiting.on_cancel(move || session.cancel(job));
        return;
    }
    if let Err(error) = session.cancel_evaluation(id) {
        return call.refuse(error);
    }
    let report = move || status_of(&session, id).unwrap_or_else(|error| Refused(error.to_string()).into());
    wait(call, id, CANCEL_WAIT, move |session, answer| session.when_ended(id, move || answer(report())));
}

/// How far an evaluation is.
#[derive(Serialize, JsonSchema)]
struct StatusContent {
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

/// The content of a status, and no other.
#[derive(Serialize)]
struct StatusOnly {
    evaluation: StatusContent,
}

impl Finding for EvaluationStatus {
    fn text(&self, _: usize) -> String {
        report::evaluation_status(self)
    }

    fn content(&self, _: usize) -> Value {
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

/// A page of what is kept of an evaluation.
#[derive(Serialize, JsonSchema)]
struct PageContent {
    evaluation: u64,
    part: String,
    text: String,
    from: u64,
    total: u64,
    omitted: u64,
}

/// The content of a page, and no other.
#[derive(Serialize)]
struct PageOnly {
    page: PageContent,
}

impl Finding for Page {
    fn text(&self, _: usize) -> String {
        report::evaluation_page(self)
    }

    fn fit(&mut self, max: usize) {
        *self = self.clone().fitted(max);
    }

    fn content(&self, _: usize) -> Value {
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

/// Nothing has been evaluated in this image, for the reason given.
#[derive(Debug)]
struct NoEvaluations(EvaluationError);

impl Finding for NoEvaluations {
    fn text(&self, _: usize) -> String {
        self.0.to_string()
    }

    fn content(&self, _: usize) -> Value {
        Value::Object(serde_json::Map::new())
    }
}

fn status_of(session: &Session, id: u64) -> Result<Reply, EvaluationError> {
    Ok(session.evaluation(Some(id))?.into())
}

/// What answers a call that waits.
type Answer = Box<dyn FnOnce(Reply) + Send>;

/// Answers a call when what `begin` waits for has come, or how far the evaluation is after `time`.
fn wait(call: Call, id: u64, time: Duration, begin: impl FnOnce(&Session, Answer) -> Result<WaitId, EvaluationError>) {
    let (session, waiting) = (call.session().clone(), call.waiting());
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
            let unwaited = session.clone();
            waiting.on_cancel(move || unwaited.wait_no_longer(wait));
            waiting.report(|_| None);
            waiting.after(time, move || {
                session.wait_no_longer(wait);
                if let Some(call) = call.take() {
                    call.answer(status_of(&session, id));
                }
            });
        }
    }
}
