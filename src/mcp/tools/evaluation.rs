//! The tool evaluation: how far one is, what is kept of it, its end. Answers while one runs.

use std::time::Duration;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::schema::{choice, whole, whole_from};
use super::{Arguments, Call, Fault, Reply, Step, define, later, now};
use crate::report::{EvaluationPart, Page};
use crate::{EvaluationError, Progress, Session, WaitId};

pub(super) const NAME: &str = "evaluation";

/// Seconds that `wait` waits unless asked otherwise, and at most: clients have limits of their own.
const WAIT: f64 = 25.0;
const MAX_WAIT: f64 = 3600.0;
/// How long `cancel` waits for the end of what it interrupts.
const CANCEL_WAIT: Duration = Duration::from_secs(5);
/// Characters of a page unless asked otherwise, and at most.
const PAGE: u64 = 8_000;
const MAX_PAGE: u64 = 1_000_000;

#[derive(Debug, Clone, Copy, Default)]
enum Action {
    #[default]
    Status,
    Wait,
    Output,
    Cancel,
}

const ACTIONS: [(&str, Action); 4] =
    [("status", Action::Status), ("wait", Action::Wait), ("output", Action::Output), ("cancel", Action::Cancel)];

const PARTS: [(&str, EvaluationPart); 3] =
    [("output", EvaluationPart::Output), ("values", EvaluationPart::Values), ("error", EvaluationPart::Error)];

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Evaluation",
        "Check or cancel an evaluation, also while it runs; show the output or values that an answer left out \
        (`characters omitted`). The last 20 are kept.",
        json!({
            "id": whole_from(1, None, "Default: the newest."),
            "action": choice(&ACTIONS, Some("status"), "`wait` answers when it is over, as the call would have; \
                `output` shows a page; `cancel` interrupts it."),
            "seconds": {
                "type": "number",
                "minimum": 0,
                "maximum": MAX_WAIT,
                "default": WAIT,
                "description": "For `wait`: how long.",
            },
            "part": choice(&PARTS, Some("output"), "For `output`: what to show."),
            "from": whole_from(0, Some(0), "For `output`: the first character."),
            "characters": whole(1..=MAX_PAGE, PAGE, "For `output`."),
        }),
        &[],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(true).open_world(false),
    )
}

pub(super) fn call(session: &Session, arguments: JsonObject) -> Result<Step, Fault> {
    let known = &["id", "action", "seconds", "part", "from", "characters"];
    let mut arguments = Arguments::new(NAME, known, 0, arguments)?;
    let id = arguments.whole("id", 1..=u64::MAX, "an evaluation's number, from 1")?;
    let action = arguments.choice("action", &ACTIONS)?.unwrap_or_default();
    let allowed = || format!("a number of seconds from 0 to {MAX_WAIT}");
    let seconds = arguments.number("seconds", 0.0..=MAX_WAIT, allowed)?.unwrap_or(WAIT);
    let part = arguments.choice("part", &PARTS)?.unwrap_or_default();
    let from = arguments.whole("from", 0..=u64::MAX, "a character's number, from 0")?.unwrap_or(0);
    let characters = arguments.characters("characters", 1..=MAX_PAGE)?.unwrap_or(PAGE);

    let status = match session.evaluation(id) {
        Err(error @ (EvaluationError::None | EvaluationError::NoneSince { .. })) if id.is_none() => {
            return now(Reply::NoEvaluations(error));
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
            let page = Page::new(id, part, &text, omitted, from, characters);
            return now(Reply::Page(Box::new(page)));
        }
        Action::Wait => {
            return later(move |call| {
                wait(call, id, Duration::from_secs_f64(seconds), move |session, answer| {
                    session.when_over(id, move |outcome| answer(Reply::from(outcome)))
                });
            });
        }
        Action::Cancel if matches!(status.progress, Progress::Over(..)) => {}
        Action::Cancel => {
            let held = matches!(status.progress, Progress::Held(_));
            return later(move |call| {
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
                let report = move || status_of(&session, id).unwrap_or_else(|error| Reply::Refused(error.to_string()));
                wait(call, id, CANCEL_WAIT, move |session, answer| session.when_ended(id, move || answer(report())));
            });
        }
    }
    now(status_of(session, id)?)
}

fn status_of(session: &Session, id: u64) -> Result<Reply, EvaluationError> {
    Ok(Reply::Status(Box::new(session.evaluation(Some(id))?)))
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
