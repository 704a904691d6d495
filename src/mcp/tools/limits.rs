//! configure-limits.

use std::time::Duration;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::{Answer, Arguments, Fault, Reply, define};
use crate::{Limits, Session};

pub(super) const NAME: &str = "configure-limits";

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Configure limits",
        "Show the limits of evaluations and, with arguments, change them for the evaluations after this. Use it when \
         work needs longer than the time limit (type TIMEOUT) or when output was cut (`characters omitted`). The \
         limits survive resets. For a single long evaluation, evaluate-lisp's own timeout is enough.",
        json!({
            "timeout": {
                "type": "number",
                "minimum": 0,
                "maximum": Limits::MAX_TIMEOUT_SECONDS,
                "description": "Seconds an evaluation may take; 0 for no limit.",
            },
            "max-output": {
                "type": "integer",
                "minimum": Limits::MAX_OUTPUT_RANGE.start(),
                "maximum": Limits::MAX_OUTPUT_RANGE.end(),
                "description": "Characters of captured output kept, stdout and stderr together.",
            },
        }),
        &[],
        ToolAnnotations::new().read_only(false).destructive(false).idempotent(true).open_world(false),
    )
}

pub(super) fn call(session: &Session, arguments: JsonObject) -> Answer {
    let mut arguments = Arguments::new(NAME, &["timeout", "max-output"], 0, arguments)?;
    let mut limits = session.limits();
    let before = limits;
    if let Some(timeout) = timeout(&mut arguments)? {
        limits.timeout = timeout;
    }
    let range = Limits::MAX_OUTPUT_RANGE;
    let allowed = format!("a whole number of characters from {} to {}", range.start(), range.end());
    if let Some(characters) = arguments.whole("max-output", 0.., &allowed)? {
        limits.set_max_output(characters)?;
    }
    if limits != before {
        session.set_limits(limits);
    }
    Ok(Reply::Limits(limits))
}

/// The argument `timeout`, in seconds, 0 for none.
pub(super) fn timeout(arguments: &mut Arguments) -> Result<Option<Option<Duration>>, Fault> {
    let allowed = || format!("a number of seconds from 0 (for none) to {}", Limits::MAX_TIMEOUT_SECONDS);
    let seconds = arguments.number("timeout", allowed)?;
    Ok(seconds.map(Limits::timeout_from_seconds).transpose()?)
}
