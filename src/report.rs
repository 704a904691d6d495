//! From outcomes to text: what a client reads.
//!
//! Pure functions. Text that comes from Lisp is escaped wherever it could pass for one of the report's own markers.

use std::fmt::Write as _;

use crate::config::Limits;
use crate::outcome::{
    Clipped, Definition, DefinitionKind, ErrorRecord, Frame, Local, LocalValue, Outcome, Role, Slot, SymbolDescription,
};

/// Frames in the report of a failed evaluation.
pub(crate) const REPORT_FRAMES: usize = 20;
/// Frames in [`last_error`].
pub(crate) const PREVIEW_FRAMES: usize = 5;
/// Characters of a message in [`error_history`].
const HISTORY_MESSAGE: usize = 70;
/// What stands for the value when there is none.
const NO_VALUES: &str = "; No values";
/// What stands for the frames when there are none.
const NO_FRAMES: &str = "0: (no frames available)";

/// The answer of reset-session.
pub const RESET: &str = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";

const NO_ERROR: &str = "No error information available.\n(No error has occurred since the last successful evaluation)";

/// The names in the report's markers, brackets left out.
const MARKERS: [&str; 8] = ["stdout", "stderr", "warnings", "background", "notice", "ERROR", "Backtrace", "Debugger"];

/// How the report says that text was cut.
#[must_use]
pub fn omission(characters: u64) -> String {
    format!("[... {characters} characters omitted]")
}

/// Escapes the report's markers in `text`: each gets a backslash before its closing bracket, one more if some are
/// there already, so that [`unescape_markers`] can undo it.
#[must_use]
pub fn escape_markers(text: &str) -> String {
    map_markers(text, |escaped, backslashes| {
        for _ in 0..=backslashes {
            escaped.push('\\');
        }
    })
}

/// Undoes [`escape_markers`].
#[must_use]
pub fn unescape_markers(text: &str) -> String {
    map_markers(text, |plain, backslashes| {
        for _ in 1..backslashes {
            plain.push('\\');
        }
    })
}

/// Copies `text`; at each marker `[name\…\]`, `backslashes` writes those before the bracket, given their number.
fn map_markers(text: &str, backslashes: impl Fn(&mut String, usize)) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('[') {
        let (before, bracket) = rest.split_at(start + 1);
        result.push_str(before);
        rest = bracket;
        let Some(name) = MARKERS.iter().find(|name| rest.starts_with(**name)) else { continue };
        let tail = &rest[name.len()..];
        let count = tail.bytes().take_while(|byte| *byte == b'\\').count();
        if tail[count..].starts_with(']') {
            result.push_str(name);
            backslashes(&mut result, count);
            result.push(']');
            rest = &tail[count + 1..];
        }
    }
    result.push_str(rest);
    result
}

/// Escapes captured output: markers, and lines that begin with `=> `, which get a backslash in front.
#[must_use]
pub fn escape_output(text: &str) -> String {
    let text = escape_markers(text);
    if !text.contains("=> ") {
        return text;
    }
    let mut result = String::with_capacity(text.len() + 8);
    for line in text.split_inclusive('\n') {
        if line.trim_start_matches('\\').starts_with("=> ") {
            result.push('\\');
        }
        result.push_str(line);
    }
    result
}

fn push_clipped(target: &mut String, clipped: &Clipped, escape: impl Fn(&str) -> String) {
    let text =
        if clipped.omitted == 0 { clipped.text.strip_suffix('\n').unwrap_or(&clipped.text) } else { &clipped.text };
    target.push_str(&escape(text));
    if clipped.omitted > 0 {
        target.push_str(&omission(clipped.omitted));
    }
}

fn clipped_message(message: &Clipped) -> String {
    let mut text = String::new();
    push_clipped(&mut text, message, escape_markers);
    text
}

/// A frame's call, safe in a report.
fn call(frame: &Frame) -> String {
    escape_markers(&frame.call)
}

/// A report is sections with one blank line between them.
struct Sections(String);

impl Sections {
    fn begin(&mut self) -> &mut String {
        if !self.0.is_empty() {
            self.0.push_str("\n\n");
        }
        &mut self.0
    }

    fn output(&mut self, marker: &str, text: &Clipped) {
        if !text.is_empty() {
            let target = self.begin();
            target.push_str(marker);
            target.push('\n');
            push_clipped(target, text, escape_output);
        }
    }
}

/// The answer of evaluate-lisp.
#[must_use]
pub fn evaluation(outcome: &Outcome) -> String {
    let mut sections = Sections(String::new());
    if !outcome.notices.is_empty() {
        let target = sections.begin();
        target.push_str("[notice]");
        for notice in &outcome.notices {
            target.push('\n');
            target.push_str(&escape_markers(notice));
        }
    }
    sections.output("[background]", &outcome.background);
    sections.output("[stdout]", &outcome.stdout);
    sections.output("[stderr]", &outcome.stderr);
    if !outcome.warnings.is_empty() {
        let target = sections.begin();
        target.push_str("[warnings]");
        for warning in &outcome.warnings {
            _ = write!(target, "\n{}: {}", escape_markers(&warning.kind), clipped_message(&warning.message));
            if let Some(line) = warning.line {
                _ = write!(target, " (line {line})");
            }
        }
        if outcome.warnings_omitted > 0 {
            _ = write!(target, "\n[... {} warnings omitted]", outcome.warnings_omitted);
        }
    }
    match &outcome.result {
        Ok(values) => {
            let target = sections.begin();
            push_values(target, values);
            if let Some(timing) = outcome.timing {
                _ = write!(
                    target,
                    "\n; Timing: {}ms real, {}ms run, {}ms GC, {} bytes consed",
                    timing.real_ms, timing.run_ms, timing.gc_ms, timing.bytes_consed
                );
            }
        }
        Err(error) => {
            _ = write!(
                sections.begin(),
                "[ERROR] {}\n{}",
                escape_markers(&error.kind),
                clipped_message(&error.message)
            );
            let target = sections.begin();
            target.push_str("[Backtrace]");
            for frame in error.frames.iter().take(REPORT_FRAMES) {
                _ = write!(target, "\n{}: {}", frame.number, call(frame));
            }
            if error.frames.is_empty() {
                target.push('\n');
                target.push_str(NO_FRAMES);
            }
            let more = error.total_frames.saturating_sub(error.frames.len().min(REPORT_FRAMES) as u64);
            if more > 0 {
                _ = write!(target, "\n... {more} more frames (get-backtrace shows them)");
            }
            if outcome.held {
                push_debugger(sections.begin(), error);
            }
        }
    }
    sections.0
}

/// What can be done with a held evaluation.
fn push_debugger(target: &mut String, error: &ErrorRecord) {
    target.push_str("[Debugger]\nHeld. Restarts:");
    push_restarts(target, error);
    target.push_str(
        "\nTools: invoke-restart, frame-locals, eval-in-frame, return-from-frame, restart-frame, abort-evaluation.",
    );
}

fn push_restarts(target: &mut String, error: &ErrorRecord) {
    if error.restarts.is_empty() {
        target.push_str("\n  (none)");
    }
    for (index, restart) in error.restarts.iter().enumerate() {
        let description = escape_markers(&restart.description).replace('\n', "\n     ");
        _ = write!(target, "\n  {}. {} - {description}", index + 1, escape_markers(&restart.name));
    }
}

fn push_values(target: &mut String, values: &[Clipped]) {
    if values.is_empty() {
        target.push_str(NO_VALUES);
    }
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            target.push('\n');
        }
        target.push_str("=> ");
        target.push_str(&value.text);
        if value.omitted > 0 {
            target.push_str(&omission(value.omitted));
        }
    }
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

/// Which definitions list-definitions shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DefinitionFilter {
    /// All of them, packages and systems too.
    #[default]
    All,
    /// Functions.
    Functions,
    /// Variables.
    Variables,
    /// Macros.
    Macros,
    /// Classes.
    Classes,
}

impl DefinitionFilter {
    pub(crate) fn admits(self, kind: DefinitionKind) -> bool {
        match self {
            Self::All => true,
            Self::Functions => kind == DefinitionKind::Function,
            Self::Variables => kind == DefinitionKind::Variable,
            Self::Macros => kind == DefinitionKind::Macro,
            Self::Classes => kind == DefinitionKind::Class,
        }
    }
}

/// The answer of list-definitions. `definitions` are sorted by kind.
#[must_use]
pub fn definitions(definitions: &[Definition], filter: DefinitionFilter) -> String {
    let mut sections = Sections(String::new());
    for group in definitions.chunk_by(|a, b| a.kind == b.kind) {
        let kind = group[0].kind;
        if !filter.admits(kind) {
            continue;
        }
        let target = sections.begin();
        target.push_str(match kind {
            DefinitionKind::Function => "[Functions]",
            DefinitionKind::Variable => "[Variables]",
            DefinitionKind::Macro => "[Macros]",
            DefinitionKind::Class => "[Classes]",
            DefinitionKind::Package => "[Packages]",
            DefinitionKind::System => "[Loaded Systems]",
        });
        for definition in group {
            _ = write!(target, "\n- {}", escape_markers(&definition.text));
        }
    }
    if sections.0.is_empty() { "No definitions in this session.".to_owned() } else { sections.0 }
}

/// The answer of describe-symbol.
#[must_use]
pub fn symbol(description: &SymbolDescription) -> String {
    match description {
        SymbolDescription::NotFound(sentence) => sentence.clone(),
        SymbolDescription::Found(roles) => {
            let mut sections = Sections(String::new());
            for Role { title, details } in roles {
                let target = sections.begin();
                target.push_str(title);
                for (label, text) in details {
                    _ = write!(target, "\n  {label}: {}", text.replace('\n', "\n    "));
                }
            }
            sections.0
        }
    }
}

/// The answer of configure-limits.
#[must_use]
pub fn limits(limits: &Limits) -> String {
    let timeout = limits.timeout.map_or_else(
        || "none".to_owned(),
        |timeout| {
            let seconds = timeout.as_secs_f64();
            format!("{seconds} second{}", if seconds == 1.0 { "" } else { "s" })
        },
    );
    format!("Current limits:\n  timeout: {timeout}\n  max-output: {} characters", limits.max_output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_escaped_and_unescaped() {
        for (plain, escaped) in [
            ("[ERROR]", "[ERROR\\]"),
            ("[ERROR\\]", "[ERROR\\\\]"),
            ("a [stdout] b [[Debugger]]", "a [stdout\\] b [[Debugger\\]]"),
            ("[ERRO] [ERROR [ERROR x]", "[ERRO] [ERROR [ERROR x]"),
            ("", ""),
        ] {
            assert_eq!(escape_markers(plain), escaped);
            assert_eq!(unescape_markers(escaped), plain);
        }
    }

    #[test]
    fn a_captured_line_cannot_pass_for_a_value() {
        assert_eq!(escape_output("=> 3\nx => 3\n\\=> 4"), "\\=> 3\nx => 3\n\\\\=> 4");
    }
}
