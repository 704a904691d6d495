//! configure-limits.

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::{Value, json};

use super::schema::choice;
use super::{Answer, Arguments, Fault, Reply, define};
use crate::listed;
use crate::{Limits, OnError, Session, TimeLimit};

pub(super) const NAME: &str = "configure-limits";

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Configure limits",
        "Show the session's limits and, with arguments, change them for later evaluations: when work needs longer \
        (TIMEOUT) or output was cut[[debugger|, or to hold every failure (on-error)]].",
        json!({
            "timeout": {
                "type": "number",
                "minimum": 0,
                "maximum": Limits::MAX_TIMEOUT_SECONDS,
                "description": "Seconds for an evaluation; 0 for no limit.",
            },
            "max-output": {
                "type": "integer",
                "minimum": Limits::MAX_OUTPUT_RANGE.start(),
                "maximum": Limits::MAX_OUTPUT_RANGE.end(),
                "description": "Characters of output kept for each evaluation.",
            },
            "max-answer": {
                "type": "integer",
                "minimum": Limits::MAX_ANSWER_RANGE.start(),
                "maximum": Limits::MAX_ANSWER_RANGE.end(),
                "description": "Characters of one answer[[evaluation|; the tool evaluation shows what is left out]].",
            },
            "on-error": on_error_schema("What to do on a failure."),
        }),
        &[],
        ToolAnnotations::new().read_only(false).destructive(false).idempotent(true).open_world(false),
    )
}

pub(super) fn call(session: &Session, arguments: JsonObject) -> Answer {
    let mut arguments = Arguments::new(NAME, &["timeout", "max-output", "max-answer", "on-error"], 0, arguments)?;
    let mut limits = session.limits();
    let before = limits;
    match timeout(&mut arguments)? {
        TimeLimit::Default => {}
        TimeLimit::None => limits.timeout = None,
        TimeLimit::Of(time) => limits.timeout = Some(time),
    }
    if let Some(characters) = arguments.characters("max-output", Limits::MAX_OUTPUT_RANGE)? {
        limits.max_output = characters;
    }
    if let Some(characters) = arguments.characters("max-answer", Limits::MAX_ANSWER_RANGE)? {
        limits.max_answer = characters;
    }
    if let Some(on_error) = on_error(&mut arguments)? {
        limits.on_error = on_error;
    }
    if limits != before {
        session.set_limits(limits);
    }
    Ok(Reply::Limits(limits))
}

/// The argument `timeout`, in seconds, 0 for none.
pub(super) fn timeout(arguments: &mut Arguments) -> Result<TimeLimit, Fault> {
    let allowed = || format!("a number of seconds from 0 (for none) to {}", Limits::MAX_TIMEOUT_SECONDS);
    let Some(seconds) = arguments.number("timeout", 0.0..=Limits::MAX_TIMEOUT_SECONDS, allowed)? else {
        return Ok(TimeLimit::Default);
    };
    Ok(Limits::timeout_from_seconds(seconds)?.map_or(TimeLimit::None, TimeLimit::Of))
}

/// The schema of the argument `timeout` of a tool that evaluates, whose default is the session's limit.
pub(super) fn timeout_schema() -> Value {
    json!({"type": "number", "minimum": 0, "description": "Seconds; 0: no limit."})
}

/// The same of one that has a time limit of its own where none is given.
pub(super) fn timeout_schema_with(default: &str) -> Value {
    json!({"type": "number", "minimum": 0, "description": format!("Seconds; 0: no limit. Default: {default}.")})
}

/// Returns the values that the argument `on-error` may have: `debug` only where there are tools for what is held.
fn on_errors() -> Vec<(&'static str, OnError)> {
    let offered = |choice: &OnError| *choice != OnError::Debug || listed::has(listed::DEBUGGER);
    OnError::ALL.into_iter().filter(offered).map(|choice| (choice.name(), choice)).collect()
}

/// The argument `on-error`.
pub(super) fn on_error(arguments: &mut Arguments) -> Result<Option<OnError>, Fault> {
    arguments.choice("on-error", &on_errors())
}

/// Its schema, with all values: the tool set takes out what it does not offer.
pub(super) fn on_error_schema(description: &str) -> Value {
    choice(&OnError::ALL.map(|choice| (choice.name(), choice)), None, description)
}
