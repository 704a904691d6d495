//! The error state, the history, and frames.

use std::fmt::Write as _;

use super::escape::escape_markers;
use super::{NO_FRAMES, PREVIEW_FRAMES, call, clipped_message, push_restarts};
use crate::outcome::{ErrorRecord, Local, LocalValue, Slot};

/// Characters of a message in [`error_history`].
const HISTORY_MESSAGE: usize = 70;

const NO_ERROR: &str = "No error information available.\n(No error has occurred since the last successful evaluation)";

/// The answer of describe-last-error.
#[must_use]
pub fn last_error(error: Option<&ErrorRecord>) -> String {
    let Some(error) = error else { return NO_ERROR.to_owned() };
    let mut text = format!("Error: {}", escape_markers(&error.kind));
    for line in clipped_message(&error.message).lines() {
        text.push_str(if line.is_empty() { "\n" } else { "\n  " });
        text.push_str(line);
    }
    _ = write!(text, "\n\nTime: {}", time(error));
    if error.id > 0 {
        _ = write!(text, "\nId: E{}", error.id);
    }
    if let Some(form) = &error.form {
        _ = write!(text, "\nForm: {} (line {}): {}", form.number, form.line, escape_markers(&form.text));
    }
    let mut untold = error.slots.iter().filter(|slot| !told(error, slot)).peekable();
    if untold.peek().is_some() {
        text.push_str("\n\nSlots:");
        for slot in untold {
            _ = write!(text, "\n  {}: {}", escape_markers(&slot.name), escape_markers(&slot.value));
        }
    }
    text.push_str("\n\nAvailable Restarts:");
    push_restarts(&mut text, error);
    let shown = error.frames.len().min(PREVIEW_FRAMES);
    _ = write!(text, "\n\nBacktrace (top {shown} frames):");
    for frame in error.frames.iter().take(PREVIEW_FRAMES) {
        _ = write!(text, "\n  {}: {}", frame.number, call(frame));
    }
    if error.frames.is_empty() {
        text.push_str("\n  ");
        text.push_str(NO_FRAMES);
    }
    text.push_str("\n\nFor full backtrace, use get-backtrace tool.");
    text
}

/// The answer of get-backtrace.
#[must_use]
pub fn backtrace(error: Option<&ErrorRecord>, max_frames: u64) -> String {
    frames(error, max_frames, false)
}

/// The answer of get-backtrace with local variables.
#[must_use]
pub fn backtrace_with_locals(error: Option<&ErrorRecord>, max_frames: u64) -> String {
    frames(error, max_frames, true)
}

/// Local variables, a line each.
#[must_use]
pub fn locals(locals: &[Local]) -> String {
    if locals.is_empty() {
        return "No local variables that SBCL knows of.".to_owned();
    }
    locals.iter().map(local).collect::<Vec<_>>().join("\n")
}

fn local(local: &Local) -> String {
    let value = match &local.value {
        LocalValue::Value(value) => escape_markers(value),
        LocalValue::Dead => "<dead here>".to_owned(),
        LocalValue::Unavailable => "<unavailable>".to_owned(),
    };
    format!("{} = {value}", escape_markers(&local.name))
}

/// The answer of error-history. `errors` come newest first.
#[must_use]
pub fn error_history(errors: &[std::sync::Arc<ErrorRecord>]) -> String {
    if errors.is_empty() {
        return "No errors in this session.".to_owned();
    }
    let lines = errors.iter().map(|error| {
        let message = clipped_message(&error.message);
        let mut summary: String = message.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((end, _)) = summary.char_indices().nth(HISTORY_MESSAGE) {
            summary.truncate(end);
            summary.push('…');
        }
        let mut line = format!("E{}  {}  {}  {summary}", error.id, time(error), escape_markers(&error.kind));
        if let Some(form) = &error.form {
            _ = write!(line, "  form {} (line {})", form.number, form.line);
        }
        line
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// True when the report shows the slot's value, if only as part of a list.
fn told(error: &ErrorRecord, slot: &Slot) -> bool {
    let value = slot.value.strip_prefix('(').and_then(|value| value.strip_suffix(')')).unwrap_or(&slot.value);
    error.message.text.contains(value)
}

pub(crate) fn time(error: &ErrorRecord) -> impl std::fmt::Display {
    error.time.strftime("%Y-%m-%dT%H:%M:%SZ")
}

fn frames(error: Option<&ErrorRecord>, max_frames: u64, with_locals: bool) -> String {
    let Some(error) = error else { return NO_ERROR.to_owned() };
    let shown = error.frames.len().min(usize::try_from(max_frames).unwrap_or(usize::MAX));
    let mut text = format!("Backtrace for {} ({shown} of {} frames):", escape_markers(&error.kind), error.total_frames);
    let mut next = 0;
    for frame in &error.frames[..shown] {
        if frame.number > next {
            _ = write!(text, "\n  ... {} frames in between were not kept", frame.number - next);
        }
        next = frame.number + 1;
        _ = write!(text, "\n  {}: {}", frame.number, call(frame));
        if let Some(source) = &frame.source {
            _ = write!(text, "\n     at {}", escape_markers(source));
        }
        if with_locals {
            for variable in &frame.locals {
                _ = write!(text, "\n     {}", local(variable));
            }
        }
    }
    if error.frames.is_empty() {
        text.push_str("\n  ");
        text.push_str(NO_FRAMES);
    }
    if shown < error.frames.len() {
        _ = write!(
            text,
            "\n{} more frames; ask for max-frames {} to see them all.",
            error.total_frames - shown as u64,
            error.total_frames
        );
    }
    text
}
