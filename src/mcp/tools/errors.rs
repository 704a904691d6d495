//! describe-last-error and get-backtrace: the error state, which answers while an evaluation runs.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::{Answer, Arguments, Reply, define, inspection};
use crate::{Session, report};

pub(super) const DESCRIBE_NAME: &str = "describe-last-error";
pub(super) const BACKTRACE_NAME: &str = "get-backtrace";

/// Frames shown unless asked otherwise.
const DEFAULT_FRAMES: u64 = 20;

pub(super) fn tools() -> [Tool; 2] {
    [
        define(
            DESCRIBE_NAME,
            "Describe last error",
            "Explain the error that the last failed evaluation ended with: condition type, message, time, the \
             restarts that were available, and the top 5 frames. Use it after an [ERROR], before guessing. It stays \
             the same until an evaluation succeeds, which clears it.",
            json!({}),
            &[],
            inspection(),
        ),
        define(
            BACKTRACE_NAME,
            "Get backtrace",
            "Show the call stack of the last error, innermost frame first, with the arguments of each call and source \
             locations where they are known. Use it to find which of your functions was called with what.",
            json!({
                "max-frames": {
                    "type": "integer",
                    "minimum": 1,
                    "default": DEFAULT_FRAMES,
                    "description": "How many frames to show, from the point of the error outwards.",
                },
            }),
            &[],
            inspection(),
        ),
    ]
}

pub(super) fn describe(session: &Session, arguments: JsonObject) -> Answer {
    Arguments::new(DESCRIBE_NAME, &[], 0, arguments)?;
    Ok(Reply::new(report::last_error(session.last_error().as_deref())))
}

pub(super) fn backtrace(session: &Session, arguments: JsonObject) -> Answer {
    let mut arguments = Arguments::new(BACKTRACE_NAME, &["max-frames"], 0, arguments)?;
    let frames = arguments.whole("max-frames", 1.., "a whole number from 1")?.unwrap_or(DEFAULT_FRAMES);
    Ok(Reply::new(report::backtrace(session.last_error().as_deref(), frames)))
}
