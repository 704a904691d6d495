//! The reports of check-evaluation: the progress of an evaluation, and pages of its output, values or error message.

use std::fmt::Write as _;
use std::time::Duration;

use super::evaluation::values_text;
use super::fit::{length, page_marker};
use super::load::count_text;
use super::{escape_markers, escape_output, omission_marker};
use crate::outcome::{ErrorRecord, EvaluationStatus, Outcome, Progress, byte_offset};

/// Maximum number of characters of the code that are shown.
const MAX_CODE: u64 = 100;

/// A part of an evaluation that check-evaluation shows page by page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EvaluationPart {
    /// The output.
    #[default]
    Output,
    /// The values.
    Values,
    /// The message of the error.
    Error,
}

impl EvaluationPart {
    /// Returns the name that clients use for the part.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Output => "output",
            Self::Values => "values",
            Self::Error => "error",
        }
    }

    /// Returns the text of this part of an outcome, and the number of further characters that were not kept. Callers
    /// read the output of a running evaluation, which has no outcome yet, from the session.
    #[must_use]
    pub fn text_in(self, outcome: &Outcome) -> (String, u64) {
        match (self, &outcome.result) {
            (Self::Output, _) => (outcome.printed(), outcome.stdout.omitted + outcome.stderr.omitted),
            (Self::Values, Ok(values)) => (values_text(values), 0),
            (Self::Error, Err(error)) => (error.message.text.clone(), error.message.omitted),
            _ => Default::default(),
        }
    }
}

/// Returns the text of check-evaluation about an evaluation's progress.
#[must_use]
pub fn evaluation_status(status: &EvaluationStatus) -> String {
    let mut text = format!("Evaluation {}: ", status.id);
    let (outcome, over) = match &status.progress {
        Progress::Queued => {
            text += "waiting for earlier evaluations";
            (None, false)
        }
        Progress::Running { time, background } => {
            text += &format!("running for {}{}", seconds(*time), if *background { ", in the background" } else { "" });
            (None, false)
        }
        Progress::Held(outcome) => {
            text += &format!("held in the debugger{}", failure_text(outcome));
            (Some(outcome), true)
        }
        Progress::Over(outcome, time) => {
            let end = if outcome.is_error() { "failed" } else { "succeeded" };
            text += &format!("{end} after {}{}", seconds(*time), failure_text(outcome));
            (Some(outcome), true)
        }
    };
    let line = status.code.trim_start().lines().next().unwrap_or_default();
    let shown = &line[..byte_offset(line, MAX_CODE)];
    let more = if shown.len() < status.code.trim().len() { " …" } else { "" };
    _ = write!(text, "\n{}{more}", escape_markers(shown));
    _ = write!(text, "\nOutput{}: {}", if over { "" } else { " so far" }, count_text(status.printed, "character"));
    if let Some(Ok(values)) = outcome.map(|outcome| &outcome.result) {
        _ = write!(text, "\nValues: {}", count_text(length(&values_text(values)) as u64, "character"));
    }
    text
}

fn failure_text(outcome: &Outcome) -> String {
    match &outcome.result {
        Err(error) => format!(" with {}{}", escape_markers(&error.kind), error_suffix(error)),
        Ok(_) => String::new(),
    }
}

/// Returns the identifier of an error in parentheses, or an empty string if the error has no identifier.
fn error_suffix(error: &ErrorRecord) -> String {
    if error.id > 0 { format!(" (E{})", error.id) } else { String::new() }
}

/// Formats a duration in seconds, with one decimal place below 10 s.
fn seconds(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 10.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}

/// A page of a part of an evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The number of the evaluation.
    pub evaluation: u64,
    /// The part of the evaluation that the page belongs to.
    pub part: EvaluationPart,
    /// The text of the page, in which markers are not escaped.
    pub text: String,
    /// The index of the page's first character in the part.
    pub from: u64,
    /// The number of characters of the part that were kept.
    pub total: u64,
    /// The number of further characters, which were not kept.
    pub omitted: u64,
}

impl Page {
    /// Returns the page of at most `characters` characters that begins at index `from` of `text`.
    #[must_use]
    pub fn new(evaluation: u64, part: EvaluationPart, text: &str, omitted: u64, from: u64, characters: u64) -> Self {
        let rest = &text[byte_offset(text, from)..];
        let page = rest[..byte_offset(rest, characters)].to_owned();
        Self { evaluation, part, text: page, from, total: length(text) as u64, omitted }
    }

    /// Shortens the page so that its report has at most `max` characters, or only the text that every report has.
    #[must_use]
    pub fn fitted(mut self, max: usize) -> Self {
        loop {
            let more = length(&evaluation_page(&self)).saturating_sub(max);
            let now = length(&self.text);
            if more == 0 || now == 0 {
                return self;
            }
            // The marker at the end may become longer as the page becomes shorter.
            self.text.truncate(byte_offset(&self.text, now.saturating_sub(more + 130) as u64));
        }
    }
}

/// Returns the text of check-evaluation for a page.
#[must_use]
pub fn evaluation_page(page: &Page) -> String {
    let Page { evaluation, part, text, from, total, omitted } = page;
    let name = part.name();
    let end = from + length(text) as u64;
    if *total == 0 && *omitted == 0 {
        return format!("Evaluation {evaluation}, {name}: none.");
    }
    if end <= *from {
        let lost = if *omitted > 0 { format!(", and {omitted} more were not kept") } else { String::new() };
        return format!("Evaluation {evaluation}, {name}: no characters from {from} on; the total is {total}{lost}.");
    }
    let shown = if *part == EvaluationPart::Values { text.clone() } else { escape_output(text) };
    let mut answer = format!("Evaluation {evaluation}, {name}, characters {from} to {} of {total}:\n{shown}", end - 1);
    if end < *total {
        answer += &page_marker(*evaluation, *part, total - end, end);
    } else if *omitted > 0 {
        answer += &omission_marker(*omitted);
    }
    answer
}
