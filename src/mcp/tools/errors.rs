//! describe-last-error, get-backtrace and error-history: the error state, which answers while an evaluation runs.

use std::sync::Arc;

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::arguments::shown;
use super::schema::{flag, text, whole, whole_from};
use super::{Answer, Arguments, Call, Fault, Reply, define, inspection};
use crate::listed;
use crate::report::FrameRange;
use crate::{ErrorRecord, Session};

pub(super) const DESCRIBE_NAME: &str = "describe-last-error";
pub(super) const BACKTRACE_NAME: &str = "get-backtrace";
pub(super) const HISTORY_NAME: &str = "error-history";

/// Frames shown unless asked otherwise.
const DEFAULT_FRAMES: u64 = 20;
/// Errors listed unless asked otherwise, and at most.
const DEFAULT_HISTORY: u64 = 20;
const MAX_HISTORY: u64 = 200;

pub(super) fn tools() -> [Tool; 3] {
    [
        define(
            DESCRIBE_NAME,
            "Describe last error",
            "Explain the last error: type, message, time, restarts, and the top 5 frames. Use it after an [ERROR]. It stays until an evaluation succeeds.[[error-history| error-history has older ones.]]",
            json!({"error-id": error_id()}),
            &[],
            inspection(),
        ),
        define(
            BACKTRACE_NAME,
            "Get backtrace",
            "Show the call stack of the last error, innermost frame first, with the arguments of each call and \
            source locations.",
            json!({
                "max-frames": whole_from(1, Some(DEFAULT_FRAMES), "How many frames to show."),
                "from": whole_from(0, Some(0), "The first frame to show."),
                "locals": flag("Show the local variables under each frame."),
                "error-id": error_id(),
            }),
            &[],
            inspection(),
        ),
        define(
            HISTORY_NAME,
            "Error history",
            "List the session's errors, newest first, with their identifiers[[describe-last-error| for \
             describe-last-error]]. A success clears the last error, not the history.",
            json!({"limit": whole(1..=MAX_HISTORY, DEFAULT_HISTORY, "How many errors to list.")}),
            &[],
            inspection(),
        ),
    ]
}

fn error_id() -> serde_json::Value {
    text("Which error, as `E17`. Default: the last one.")
}

/// The error that the argument error-id names, or the last one.
fn error(session: &Session, arguments: &mut Arguments) -> Result<Option<Arc<ErrorRecord>>, Fault> {
    let Some(id) = arguments.optional_text("error-id")? else { return Ok(session.last_error()) };
    let number = id.trim().trim_start_matches(['E', 'e']).parse().unwrap_or(0);
    session.error(number).map(Some).ok_or_else(|| {
        let known = session.error_history();
        Fault::Value(if known.is_empty() {
            format!("There is no error {}: no errors in this session.", shown(&id))
        } else {
            let see = listed::with(&[HISTORY_NAME], " (see error-history)");
            format!("There is no error {}. The history has {}{see}.", shown(&id), range(&known))
        })
    })
}

/// The identifiers of errors, which come newest first.
fn range(errors: &[Arc<ErrorRecord>]) -> String {
    match errors {
        [newest, .., oldest] => format!("E{} to E{}", oldest.id, newest.id),
        [one] => format!("E{}", one.id),
        [] => "none".to_owned(),
    }
}

/// Answers a call of one of these tools, while the cancelled evaluation `unended` has not ended, if there is one.
pub(super) fn answer(call: Call, name: &str, arguments: JsonObject, unended: Option<u64>) {
    let session = call.session();
    let answer = match name {
        DESCRIBE_NAME => describe(session, arguments),
        BACKTRACE_NAME => backtrace(session, arguments),
        _ => history(session, arguments),
    };
    call.answer(answer.map(|reply| match unended {
        Some(evaluation) => Reply::Unsettled(evaluation, Box::new(reply)),
        None => reply,
    }));
}

fn describe(session: &Session, arguments: JsonObject) -> Answer {
    let mut arguments = Arguments::new(DESCRIBE_NAME, &["error-id"], 0, arguments)?;
    Ok(Reply::Error(error(session, &mut arguments)?))
}

fn backtrace(session: &Session, arguments: JsonObject) -> Answer {
    let mut arguments = Arguments::new(BACKTRACE_NAME, &["max-frames", "from", "locals", "error-id"], 0, arguments)?;
    let max_frames = arguments.whole("max-frames", 1..=u64::MAX, "a whole number from 1")?.unwrap_or(DEFAULT_FRAMES);
    let from = arguments.whole("from", 0..=u64::MAX, "a frame's number, from 0")?.unwrap_or(0);
    let locals = arguments.flag("locals")?;
    let error = error(session, &mut arguments)?;
    Ok(Reply::Backtrace(error, FrameRange { from, max_frames, locals }))
}

fn history(session: &Session, arguments: JsonObject) -> Answer {
    let mut arguments = Arguments::new(HISTORY_NAME, &["limit"], 0, arguments)?;
    let limit = arguments.count("limit", MAX_HISTORY, DEFAULT_HISTORY)?;
    let mut errors = session.error_history();
    let shown = errors.len().min(usize::try_from(limit).unwrap_or(usize::MAX));
    let older = errors.split_off(shown).len();
    Ok(Reply::History(errors, older))
}
