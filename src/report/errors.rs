//! The error state, the history, and frames.

use std::fmt::Write as _;

use super::escape::escape_markers;
use super::fit::{cut, length};
use super::{NO_FRAMES, PREVIEW_FRAMES, call, clipped_message, push_restarts};
use crate::listed;
use crate::outcome::{ErrorRecord, Frame, Local, LocalValue, Slot};

/// Characters of a message in [`error_list`].
const HISTORY_MESSAGE: usize = 70;

/// Characters of a failing form that are shown.
const FORM_TEXT: usize = 200;

/// Characters of the line of [`error_list`] that says that there are more.
const OLDER: usize = 200;

/// Characters around the frames of a backtrace: what comes before and after them, and where some are missing.
const AROUND_FRAMES: usize = 300;

const NO_ERROR: &str = "No error information available.\n(No error has occurred since the last successful evaluation)";

/// The notice in front of an answer about errors while the cancelled evaluation of this number has not ended.
#[cfg(feature = "mcp")]
pub(crate) fn unsettled(evaluation: u64) -> String {
    format!("[notice]\nEvaluation {evaluation} was cancelled and has not ended yet: this is what was known before.")
}

/// True for an answer with the notice of [`unsettled`].
#[cfg(feature = "mcp")]
pub(crate) fn is_unsettled(answer: &str) -> bool {
    answer.starts_with("[notice]\nEvaluation ") && answer.contains(" was cancelled and has not ended yet: ")
}

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
        _ = write!(
            text,
            "\nForm: {} (line {}): {}",
            form.number,
            form.line,
            escape_markers(&shortened(&form.text, FORM_TEXT))
        );
    }
    let mut untold = error.slots.iter().filter(|slot| !told(error, slot)).peekable();
    if untold.peek().is_some() || error.slots_omitted > 0 {
        text.push_str("\n\nSlots:");
        for slot in untold {
            _ = write!(text, "\n  {}: {}", escape_markers(&slot.name), escape_markers(&slot.value));
        }
        if error.slots_omitted > 0 {
            _ = write!(text, "\n  [... {} more slots omitted]", error.slots_omitted);
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
    text.push_str(listed::with(&["get-backtrace"], "\n\nFor full backtrace, use get-backtrace tool."));
    text
}

/// The answer of get-backtrace.
#[must_use]
pub fn backtrace(error: Option<&ErrorRecord>, max_frames: u64) -> String {
    frames(error, &FrameRange { from: 0, max_frames, locals: false }, usize::MAX)
}

/// The answer of get-backtrace with local variables.
#[must_use]
pub fn backtrace_with_locals(error: Option<&ErrorRecord>, max_frames: u64) -> String {
    frames(error, &FrameRange { from: 0, max_frames, locals: true }, usize::MAX)
}

/// A line for each variable that has a value, and one for those whose values SBCL cannot give.
fn local_lines(locals: &[Local]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut missing = Vec::new();
    for local in locals {
        let name = escape_markers(&local.name);
        match &local.value {
            LocalValue::Value(value) => lines.push(format!("{name} = {}", escape_markers(value))),
            LocalValue::Dead | LocalValue::Unavailable => missing.push(name),
        }
    }
    if !missing.is_empty() {
        lines.push(format!("not available: {}", missing.join(", ")));
    }
    lines
}

/// Lists errors in at most `max` characters. `errors` come newest first; `older` is the number of errors that are left out
/// already.
#[must_use]
pub fn error_list(errors: &[std::sync::Arc<ErrorRecord>], older: usize, max: usize) -> String {
    if errors.is_empty() {
        return "No errors in this session.".to_owned();
    }
    let (mut text, mut room, mut shown) = (String::new(), max.saturating_sub(OLDER), 0);
    for error in errors {
        let line = summary(error);
        let size = length(&line) + 1;
        if size > room && shown > 0 {
            break;
        }
        room = room.saturating_sub(size);
        shown += 1;
        text.push_str(&line);
        text.push('\n');
    }
    text.pop();
    match (errors.len() - shown, older) {
        (0, 0) => {}
        (0, older) => _ = write!(text, "\n... {older} older ones (a larger `list` shows them)"),
        (left, older) => {
            let one = listed::with(&["describe-last-error"], "; describe-last-error shows one of them (error-id)");
            let room = listed::with(&["configure-limits"], "; a larger max-answer (configure-limits) makes room");
            _ = write!(
                text,
                "\n... {} older ones, E{} and before, for which there is no room here{one}{room}",
                left + older,
                errors[shown].id
            );
        }
    }
    text
}

/// The beginning of a text that may be longer.
fn shortened(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A line of the history.
fn summary(error: &ErrorRecord) -> String {
    let message = clipped_message(&error.message);
    let summary: String = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let summary = shortened(&summary, HISTORY_MESSAGE);
    let mut line = format!("E{}  {}  {}  {summary}", error.id, time(error), escape_markers(&error.kind));
    if let Some(form) = &error.form {
        _ = write!(line, "  form {} (line {})", form.number, form.line);
    }
    line
}

/// A line about an error that the code handled, with the innermost place that is known.
pub(crate) fn signalled_error(error: &ErrorRecord) -> String {
    let message = error.message.text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut line = format!("E{}  {}  {}", error.id, error.kind, shortened(&message, HISTORY_MESSAGE));
    if let Some(frame) = error.frames.iter().find(|frame| frame.source.is_some()) {
        _ = write!(line, "  in {}", shortened(&frame.call, FORM_TEXT));
        for (before, part) in [("  ", &frame.source), (": ", &frame.code)] {
            part.iter().for_each(|part| line.push_str(&[before, part].concat()));
        }
    }
    line
}

/// True when the report shows the slot's value, if only as part of a list.
fn told(error: &ErrorRecord, slot: &Slot) -> bool {
    let value = slot.value.strip_prefix('(').and_then(|value| value.strip_suffix(')')).unwrap_or(&slot.value);
    error.message.text.contains(value)
}

pub(crate) fn time(error: &ErrorRecord) -> impl std::fmt::Display {
    error.time.strftime("%Y-%m-%dT%H:%M:%SZ")
}

/// Which frames of an error are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameRange {
    /// The number of the first one.
    pub from: u64,
    /// How many at most.
    pub max_frames: u64,
    /// With their local variables.
    pub locals: bool,
}

impl FrameRange {
    /// These frames of `error`, as many as there is room for in an answer of `max` characters, but one at least.
    pub(crate) fn within<'a>(&self, error: &'a ErrorRecord, max: usize) -> &'a [Frame] {
        let begin = error.frames.partition_point(|frame| frame.number < self.from);
        let frames = &error.frames[begin..];
        let frames = &frames[..frames.len().min(usize::try_from(self.max_frames).unwrap_or(usize::MAX))];
        let mut room = max.saturating_sub(AROUND_FRAMES + length(&error.kind));
        let fits = |frame: &&Frame| {
            let size = length(&frame_text(frame, self.locals));
            let fits = size <= room;
            room = room.saturating_sub(size);
            fits
        };
        let fitting = frames.iter().take_while(fits).count();
        &frames[..fitting.max(1).min(frames.len())]
    }
}

/// The answer of get-backtrace, of at most `max` characters.
#[must_use]
pub fn frames(error: Option<&ErrorRecord>, range: &FrameRange, max: usize) -> String {
    error.map_or_else(|| NO_ERROR.to_owned(), |error| titled_frames("Backtrace", error, range, max))
}

/// The answer of get-backtrace, of at most `max` characters, about an evaluation that is held. The local variables of `error`
/// have their present values. When these do not fit, all of them are cut.
#[cfg(feature = "mcp")]
pub(crate) fn live_frames(error: &ErrorRecord, range: &FrameRange, max: usize) -> String {
    const TITLE: &str = "Backtrace (live)";
    /// Number of characters of a value when not all values fit, and of the line that says so.
    const SHORT_VALUE: usize = 200;
    const ABOUT_LOCALS: usize = 100;
    let shown = range.within(error, usize::MAX);
    let mut text = titled_frames(TITLE, error, range, usize::MAX);
    if let Some(frame) = shown.get(LIVE_FRAMES) {
        _ = write!(text, "\nVariables of {LIVE_FRAMES} frames are shown; ask with from {} for the next.", frame.number);
    }
    if !shown.is_empty() && shown.iter().all(|frame| frame.locals.is_empty()) {
        text += "\nNo local variables: the code is SBCL's own, or SBCL kept none of them.";
    }
    if length(&text) <= max {
        return text;
    }
    let mut short = error.clone();
    for local in short.frames.iter_mut().flat_map(|frame| &mut frame.locals) {
        if let LocalValue::Value(value) = &mut local.value {
            *value = cut(std::mem::take(value), SHORT_VALUE);
        }
    }
    let text = titled_frames(TITLE, &short, range, max.saturating_sub(ABOUT_LOCALS));
    let one = listed::with(&["eval-in-frame"], ": eval-in-frame shows one variable, whole");
    format!("{text}\nLong values are cut{one}.")
}

/// Maximum number of frames whose variables are read at once: `+frames-with-locals+` in lisp/core/frames.lisp.
#[cfg(feature = "mcp")]
const LIVE_FRAMES: usize = 50;

/// Returns the line that names the identifier of the error in an answer.
#[cfg(feature = "mcp")]
pub(crate) fn error_id(id: u64) -> String {
    let tools: Vec<_> = ["describe-last-error", "get-backtrace"].into_iter().filter(|tool| listed::has(tool)).collect();
    match &tools[..] {
        [] => format!("Error id: E{id}"),
        [one] => format!("Error id: E{id} ({one} takes it as error-id)"),
        all => format!("Error id: E{id} ({} take it as error-id)", all.join(" and ")),
    }
}

fn titled_frames(title: &str, error: &ErrorRecord, range: &FrameRange, max: usize) -> String {
    let shown = range.within(error, max);
    let total = error.total_frames;
    let mut text = format!("{title} for {} ({} of {total} frames):", escape_markers(&error.kind), shown.len());
    let mut next = range.from;
    for frame in shown {
        if frame.number > next {
            _ = write!(text, "\n  ... {} frames in between were not kept", frame.number - next);
        }
        next = frame.number + 1;
        text.push_str(&cut(frame_text(frame, range.locals), max.saturating_sub(AROUND_FRAMES)));
    }
    if error.frames.is_empty() {
        text.push_str("\n  ");
        text.push_str(NO_FRAMES);
    } else if shown.is_empty() {
        _ = write!(text, "\n  (none from {} on)", range.from);
    } else if next < total {
        let more = match total - next {
            1 => "1 more frame".to_owned(),
            more => format!("{more} more frames"),
        };
        // All of them in one answer, where that may be.
        if range.from == 0 && shown.len() as u64 == range.max_frames {
            _ = write!(text, "\n{more}; ask for max-frames {total} to see them all.");
        } else {
            _ = write!(text, "\n{more}; ask with from {next} for what comes next.");
        }
    }
    text
}

/// A frame on lines of its own.
fn frame_text(frame: &Frame, with_locals: bool) -> String {
    let mut text = format!("\n  {}: {}", frame.number, call(frame));
    if let Some(source) = &frame.source {
        _ = write!(text, "\n     at {}", escape_markers(source));
        if let Some(code) = &frame.code {
            _ = write!(text, ": {}", escape_markers(code));
        }
    }
    if with_locals {
        for line in local_lines(&frame.locals) {
            _ = write!(text, "\n     {line}");
        }
    }
    text
}
