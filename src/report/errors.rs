//! The reports about the last error, the error history and frames.

use std::fmt::Write as _;

use super::escape::escape_markers;
use super::fit::{cut, length};
use super::load::count_text;
use super::{NO_FRAMES, PREVIEW_FRAMES, call_text, clipped_message, push_restarts};
use crate::audience::Audience;
use crate::outcome::{ErrorRecord, FrameRecord, Local, LocalValue, Slot};
use crate::tool_names;

/// Maximum length of a message in [`error_list`], in characters.
const MAX_SUMMARY_MESSAGE: usize = 70;

/// Maximum length of the text of a failing form, in characters.
const MAX_FORM_TEXT: usize = 200;

/// Characters reserved for the line of [`error_list`] about older errors.
const RESERVED_FOR_OLDER_ERRORS: usize = 200;

/// Characters reserved for the lines of a backtrace other than frames: the heading, and the lines about missing frames.
const RESERVED_FOR_HEADING: usize = 300;

const NO_ERROR: &str = "No error information available.\n(No error has occurred since the last successful evaluation)";

/// Returns the notice that precedes an answer about errors while a cancelled evaluation has not ended.
#[cfg(feature = "mcp")]
pub(crate) fn pending_cancellation(evaluation: u64) -> String {
    format!("[notice]\nEvaluation {evaluation} was cancelled and has not ended yet: try again later to see its error.")
}

/// Returns true if an answer begins with the notice of [`pending_cancellation`].
#[cfg(feature = "mcp")]
pub(crate) fn reports_pending_cancellation(answer: &str) -> bool {
    answer.starts_with("[notice]\nEvaluation ") && answer.contains(" was cancelled and has not ended yet: ")
}

/// Returns the text of describe-last-error.
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
            escape_markers(&shortened(&form.text, MAX_FORM_TEXT))
        );
    }
    let mut unreported = error.slots.iter().filter(|slot| !is_shown_in_message(error, slot)).peekable();
    if unreported.peek().is_some() || error.slots_omitted > 0 {
        text.push_str("\n\nSlots:");
        for slot in unreported {
            _ = write!(text, "\n  {}: {}", escape_markers(&slot.name), escape_markers(&slot.value));
        }
        if error.slots_omitted > 0 {
            _ = write!(text, "\n  [... {} omitted]", count_text(error.slots_omitted, "more slot"));
        }
    }
    text.push_str("\n\nAvailable Restarts:");
    push_restarts(&mut text, error);
    let shown = error.frames.len().min(PREVIEW_FRAMES);
    _ = write!(text, "\n\nBacktrace (top {}):", count_text(shown as u64, "frame"));
    for frame in error.frames.iter().take(PREVIEW_FRAMES) {
        _ = write!(text, "\n  {}: {}", frame.number, call_text(frame));
    }
    if error.frames.is_empty() {
        text.push_str("\n  ");
        text.push_str(NO_FRAMES);
    }
    text.push_str(tool_names::if_usable(&["get-backtrace"], "\n\nFor the full backtrace, use get-backtrace."));
    text
}

/// Returns the text of get-backtrace.
#[must_use]
pub fn backtrace(error: Option<&ErrorRecord>, max_frames: u64) -> String {
    frames(error, &FrameRange { from: 0, max_frames, locals: false }, usize::MAX)
}

/// Returns the text of get-backtrace with local variables.
#[must_use]
pub fn backtrace_with_locals(error: Option<&ErrorRecord>, max_frames: u64) -> String {
    frames(error, &FrameRange { from: 0, max_frames, locals: true }, usize::MAX)
}

/// Returns one line for each variable that has a value, and a last line with the names of the other variables.
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

/// Lists errors in at most `max` characters. `errors` come newest first; `older` is the number of errors that the
/// caller left out.
#[must_use]
pub fn error_list(errors: &[std::sync::Arc<ErrorRecord>], older: usize, max: usize) -> String {
    if errors.is_empty() {
        return "This client has no recorded errors.".to_owned();
    }
    let (mut text, mut room, mut shown) = (String::new(), max.saturating_sub(RESERVED_FOR_OLDER_ERRORS), 0);
    for error in errors {
        let line = history_line(error);
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
        (0, 1) => text.push_str("\n... 1 older error (raise `list` to see it)"),
        (0, older) => _ = write!(text, "\n... {older} older errors (raise `list` to see them)"),
        (left, older) => {
            let describe = |which: &str| {
                let advice = tool_names::if_usable(&["describe-last-error"], "; describe-last-error shows ");
                if advice.is_empty() { String::new() } else { format!("{advice}{which} (error-id)") }
            };
            let room =
                tool_names::if_usable(&["configure-limits"], "; raise max-answer (configure-limits) to see more");
            let id = errors[shown].id;
            _ = match left + older {
                1 => write!(text, "\n... 1 older error (E{id}) does not fit here{}{room}", describe("it")),
                all => write!(
                    text,
                    "\n... {all} older errors (E{id} and before) do not fit here{}{room}",
                    describe("one of them")
                ),
            };
        }
    }
    text
}

/// Returns the first `characters` characters of a string, with an ellipsis if there are more.
fn shortened(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns an error's line in the error history.
fn history_line(error: &ErrorRecord) -> String {
    let message = clipped_message(&error.message);
    let summary: String = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let summary = shortened(&summary, MAX_SUMMARY_MESSAGE);
    let mut line = format!("E{}  {}  {}  {summary}", error.id, time(error), escape_markers(&error.kind));
    if let Some(form) = &error.form {
        _ = write!(line, "  form {} (line {})", form.number, form.line);
    }
    line
}

/// Returns a line about an error that the code handled, with the innermost frame whose source is known.
pub(crate) fn signalled_error(error: &ErrorRecord) -> String {
    let message = error.message.text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut line = format!("E{}  {}  {}", error.id, error.kind, shortened(&message, MAX_SUMMARY_MESSAGE));
    if let Some(frame) = error.frames.iter().find(|frame| frame.source.is_some()) {
        _ = write!(line, "  in {}", shortened(&frame.call, MAX_FORM_TEXT));
        for (before, part) in [("  ", &frame.source), (": ", &frame.code)] {
            part.iter().for_each(|part| line.push_str(&[before, part].concat()));
        }
    }
    line
}

/// Returns true if the message contains the slot's value or, if the value is a list, its elements.
fn is_shown_in_message(error: &ErrorRecord, slot: &Slot) -> bool {
    let value = slot.value.strip_prefix('(').and_then(|value| value.strip_suffix(')')).unwrap_or(&slot.value);
    error.message.text.contains(value)
}

pub(crate) fn time(error: &ErrorRecord) -> impl std::fmt::Display {
    error.time.strftime("%Y-%m-%dT%H:%M:%SZ")
}

/// The range of an error's frames to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameRange {
    /// The number of the first frame.
    pub from: u64,
    /// The maximum number of frames.
    pub max_frames: u64,
    /// True to include local variables.
    pub locals: bool,
}

impl FrameRange {
    /// Returns the frames of `error` in this range, as many as fit into an answer of `max` characters, but at least
    /// one if the range is not empty.
    pub(crate) fn fitting_frames<'a>(&self, error: &'a ErrorRecord, max: usize) -> &'a [FrameRecord] {
        let begin = error.frames.partition_point(|frame| frame.number < self.from);
        let frames = &error.frames[begin..];
        let frames = &frames[..frames.len().min(usize::try_from(self.max_frames).unwrap_or(usize::MAX))];
        let mut room = max.saturating_sub(RESERVED_FOR_HEADING + length(&error.kind));
        let fits = |frame: &&FrameRecord| {
            let size = length(&frame_text(frame, self.locals));
            let fits = size <= room;
            room = room.saturating_sub(size);
            fits
        };
        let fitting = frames.iter().take_while(fits).count();
        &frames[..fitting.max(1).min(frames.len())]
    }
}

/// Returns the text of get-backtrace, in at most `max` characters.
#[must_use]
pub fn frames(error: Option<&ErrorRecord>, range: &FrameRange, max: usize) -> String {
    error.map_or_else(|| NO_ERROR.to_owned(), |error| titled_frames("Backtrace", error, range, max))
}

/// Returns the text of get-backtrace for a held evaluation, in at most `max` characters. The local variables of `error`
/// have their present values. If the text is too long, long values are shortened.
#[cfg(feature = "mcp")]
pub(crate) fn live_frames(error: &ErrorRecord, range: &FrameRange, max: usize) -> String {
    const TITLE: &str = "Backtrace (live)";
    /// Maximum length of a shortened value, in characters.
    const SHORT_VALUE: usize = 200;
    /// Characters reserved for the line that says that values are shortened.
    const RESERVED_FOR_SHORTENING_NOTE: usize = 100;
    let shown = range.fitting_frames(error, usize::MAX);
    let mut text = titled_frames(TITLE, error, range, usize::MAX);
    if let Some(frame) = shown.get(MAX_FRAMES_WITH_LOCALS) {
        _ = write!(
            text,
            "\nVariables are shown for only {MAX_FRAMES_WITH_LOCALS} frames; pass `from` {} to see the variables of the \
             next frames.",
            frame.number
        );
    }
    if !shown.is_empty() && shown.iter().all(|frame| frame.locals.is_empty()) {
        let (frames_have, code_lacks) =
            if shown.len() == 1 { ("frame has", "its code lacks") } else { ("frames have", "their code lacks") };
        _ = write!(
            text,
            "\nNo local variables: the {frames_have} none, or {code_lacks} debug information, as SBCL's own code does."
        );
    }
    if length(&text) <= max {
        return text;
    }
    let mut short = error.clone();
    let mut is_shortened = false;
    for local in short.frames.iter_mut().flat_map(|frame| &mut frame.locals) {
        if let LocalValue::Value(value) = &mut local.value {
            let whole = value.len();
            *value = cut(std::mem::take(value), SHORT_VALUE);
            is_shortened |= value.len() != whole;
        }
    }
    let text = titled_frames(TITLE, &short, range, max.saturating_sub(RESERVED_FOR_SHORTENING_NOTE));
    if !is_shortened {
        return text;
    }
    let one = tool_names::if_usable(&["eval-in-frame"], ": eval-in-frame shows a variable in full");
    format!("{text}\nLong values are shortened{one}.")
}

/// Maximum number of frames whose variables are read at once: `+frames-with-locals+` in lisp/core/frames.lisp.
#[cfg(feature = "mcp")]
const MAX_FRAMES_WITH_LOCALS: usize = 50;

/// Returns the line with the identifier of an error and the names of the tools that accept it.
#[cfg(feature = "mcp")]
pub(crate) fn error_id_line(id: u64) -> String {
    let tools: Vec<_> =
        ["describe-last-error", "get-backtrace"].into_iter().filter(|tool| tool_names::is_usable(tool)).collect();
    match &tools[..] {
        [] => format!("Error id: E{id}"),
        [one] => format!("Error id: E{id} (argument error-id of {one})"),
        all => format!("Error id: E{id} (argument error-id of {})", all.join(" and ")),
    }
}

fn titled_frames(title: &str, error: &ErrorRecord, range: &FrameRange, max: usize) -> String {
    let shown = range.fitting_frames(error, max);
    let total = error.total_frames;
    let of_all = count_text(total, "frame");
    let mut text = format!("{title} for {} ({} of {of_all}):", escape_markers(&error.kind), shown.len());
    let mut next = range.from;
    for frame in shown {
        if frame.number > next {
            let frames = count_text(frame.number - next, "frame");
            _ = write!(text, "\n  ... {frames} in between, not kept");
        }
        next = frame.number + 1;
        text.push_str(&cut(frame_text(frame, range.locals), max.saturating_sub(RESERVED_FOR_HEADING)));
    }
    if error.frames.is_empty() {
        text.push_str("\n  ");
        text.push_str(NO_FRAMES);
    } else if shown.is_empty() {
        _ = write!(text, "\n  (no frames from {} on)", range.from);
    } else if next < total {
        let more = count_text(total - next, "more frame");
        let (all, following) = if total - next == 1 { ("it", "it") } else { ("them all", "the next frames") };
        // A larger max-frames helps only if max-frames left frames out. Otherwise the frames did not fit, or the range
        // does not begin at frame 0, so the next range is suggested. Another image keeps only the first frames of a large
        // error.
        let kept = error.frames.last().map_or(0, |frame| frame.number + 1);
        let shows_all = range.from == 0 && kept == total && shown.len() as u64 == range.max_frames;
        match Audience::current() {
            _ if next >= kept => _ = write!(text, "\n{more}, not kept."),
            Audience::Repl if shows_all => _ = write!(text, "\n{more}; :bt {total} shows all frames."),
            // A person who asks for some frames knows that there are more.
            Audience::Repl => {}
            _ if shows_all => _ = write!(text, "\n{more}; pass max-frames {total} to see {all}."),
            _ => _ = write!(text, "\n{more}; pass `from` {next} to see {following}."),
        }
    }
    text
}

/// Returns the lines of a frame, each preceded by a newline.
fn frame_text(frame: &FrameRecord, with_locals: bool) -> String {
    let mut text = format!("\n  {}: {}", frame.number, call_text(frame));
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
