//! describe-last-error, get-backtrace and error-history: the error state, which answers while an evaluation runs.

use std::sync::Arc;

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::{Answer, Arguments, Fault, Reply, define, inspection};
use crate::{ErrorRecord, Session};

pub(super) const DESCRIBE_NAME: &str = "describe-last-error";
pub(super) const BACKTRACE_NAME: &str = "get-backtrace";
pub(super) const HISTORY_NAME: &str = "error-history";

/// Frames shown unless asked otherwise.
const DEFAULT_FRAMES: u64 = 20;

pub(super) fn tools() -> [Tool; 3] {
    [
        define(
            DESCRIBE_NAME,
            "Describe last error",
            "Explain the error that the last failed evaluation ended with: condition type, message, time, the \
             restarts that were available, and the top 5 frames. Use it after an [ERROR], before guessing. It stays \
             the same until an evaluation succeeds, which clears it; error-history has older ones.",
            json!({"error-id": error_id()}),
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
                "locals": {
                    "type": "boolean",
                    "default": false,
                    "description": "Show the local variables under each frame.",
                },
                "error-id": error_id(),
            }),
            &[],
            inspection(),
        ),
        define(
            HISTORY_NAME,
            "Error history",
            "List the last 20 errors of this session, newest first, with the identifiers that describe-last-error and \
             get-backtrace take. A success clears the last error, not the history.",
            json!({}),
            &[],
            inspection(),
        ),
    ]
}

fn error_id() -> serde_json::Value {
    json!({
        "type": "string",
        "description": "Which error, as error-history names them: `E17`. Default: the last one.",
    })
}

/// The error that the argument error-id names, or the last one.
fn error(session: &Session, arguments: &mut Arguments) -> Result<Option<Arc<ErrorRecord>>, Fault> {
    let Some(id) = arguments.optional_text("error-id")? else { return Ok(session.last_error()) };
    let number = id.trim().trim_start_matches(['E', 'e']).parse().unwrap_or(0);
    session.error(number).map(Some).ok_or_else(|| {
        let known: Vec<_> = session.error_history().iter().map(|error| format!("E{}", error.id)).collect();
        Fault::Value(if known.is_empty() {
            format!("There is no error {id:?}: no errors in this session.")
        } else {
            format!("There is no error {id:?}. The history has: {}.", known.join(", "))
        })
    })
}

pub(super) fn describe(session: &Session, arguments: JsonObject) -> Answer {
    let mut arguments = Arguments::new(DESCRIBE_NAME, &["error-id"], 0, arguments)?;
    Ok(Reply::Error(error(session, &mut arguments)?))
}

pub(super) fn backtrace(session: &Session, arguments: JsonObject) -> Answer {
    let mut arguments = Arguments::new(BACKTRACE_NAME, &["max-frames", "locals", "error-id"], 0, arguments)?;
    let max_frames = arguments.whole("max-frames", 1.., "a whole number from 1")?.unwrap_or(DEFAULT_FRAMES);
    let locals = arguments.flag("locals")?;
    let error = error(session, &mut arguments)?;
    Ok(Reply::Backtrace { error, max_frames, locals })
}

pub(super) fn history(session: &Session, arguments: JsonObject) -> Answer {
    Arguments::new(HISTORY_NAME, &[], 0, arguments)?;
    Ok(Reply::History(session.error_history()))
}
