//! check-evaluation: the progress of an evaluation, and what is kept of it.

use std::fmt::Write as _;
use std::time::Duration;

use super::evaluation::values_text;
use super::fit::{length, page_marker};
use super::{escape_markers, escape_output, omission};
use crate::outcome::{ErrorRecord, EvaluationStatus, Outcome, Progress, byte_offset};

/// Characters of the code that are shown.
const SHOWN_CODE: u64 = 100;

/// What is kept of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EvaluationPart {
    /// What it printed.
    #[default]
    Output,
    /// Its values.
    Values,
    /// Its error's message.
    Error,
}

impl EvaluationPart {
    /// Its name, as clients write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Output => "output",
            Self::Values => "values",
            Self::Error => "error",
        }
    }

    /// The text of this part of an outcome, and how many characters of it were not kept. Not of the output, which there
    /// may be before there is an outcome.
    #[must_use]
    pub fn of(self, outcome: &Outcome) -> (String, u64) {
        match (self, &outcome.result) {
            (Self::Output, _) => (outcome.printed(), outcome.stdout.omitted + outcome.stderr.omitted),
            (Self::Values, Ok(values)) => (values_text(values), 0),
            (Self::Error, Err(error)) => (error.message.text.clone(), error.message.omitted),
            _ => Default::default(),
        }
    }
}

/// The answer of check-evaluation: the progress.
#[must_use]
pub fn evaluation_status(status: &EvaluationStatus) -> String {
    let mut text = format!("Evaluation {}: ", status.id);
    let (outcome, over) = match &status.progress {
        Progress::Queued => {
            text += "waiting for the evaluations before it";
            (None, false)
        }
        Progress::Running { time, background } => {
            text += &format!("running for {}{}", seconds(*time), if *background { ", in the background" } else { "" });
            (None, false)
        }
        Progress::Held(outcome) => {
            text += &format!("held where it failed{}", failure(outcome));
            (Some(outcome), true)
        }
        Progress::Over(outcome, time) => {
            let end = if outcome.is_error() { "failed" } else { "succeeded" };
            text += &format!("{end} after {}{}", seconds(*time), failure(outcome));
            (Some(outcome), true)
        }
    };
    let line = status.code.trim_start().lines().next().unwrap_or_default();
    let shown = &line[..byte_offset(line, SHOWN_CODE)];
    let more = if shown.len() < status.code.trim().len() { " …" } else { "" };
    _ = write!(text, "\n{}{more}", escape_markers(shown));
    _ = write!(text, "\nOutput{}: {} characters", if over { "" } else { " so far" }, status.printed);
    if let Some(Ok(values)) = outcome.map(|outcome| &outcome.result) {
        _ = write!(text, "\nValues: {} characters", length(&values_text(values)));
    }
    text
}

fn failure(outcome: &Outcome) -> String {
    match &outcome.result {
        Err(error) => format!(" with {}{}", escape_markers(&error.kind), id(error)),
        Ok(_) => String::new(),
    }
}

/// An error's identifier, in parentheses, if it has one.
fn id(error: &ErrorRecord) -> String {
    if error.id > 0 { format!(" (E{})", error.id) } else { String::new() }
}

/// A time, in seconds as exact as it is worth.
fn seconds(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 10.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}

/// A page of a part of an evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The evaluation's number.
    pub evaluation: u64,
    /// The part.
    pub part: EvaluationPart,
    /// The part's text from here, as printed.
    pub text: String,
    /// The character that it begins with, from 0.
    pub from: u64,
    /// How many characters the part has.
    pub total: u64,
    /// How many more were not kept.
    pub omitted: u64,
}

impl Page {
    /// At most `characters` of `text` from the one at `from` on.
    #[must_use]
    pub fn new(evaluation: u64, part: EvaluationPart, text: &str, omitted: u64, from: u64, characters: u64) -> Self {
        let rest = &text[byte_offset(text, from)..];
        let page = rest[..byte_offset(rest, characters)].to_owned();
        Self { evaluation, part, text: page, from, total: length(text) as u64, omitted }
    }

    /// The same with fewer characters, so that the answer has at most `max`.
    #[must_use]
    pub fn fitted(mut self, max: usize) -> Self {
        loop {
            let more = length(&evaluation_page(&self)).saturating_sub(max);
            let now = length(&self.text);
            if more == 0 || now == 0 {
                return self;
            }
            // The marker may grow with it.
            self.text.truncate(byte_offset(&self.text, now.saturating_sub(more + 130) as u64));
        }
    }
}

/// The answer of check-evaluation: a page.
#[must_use]
pub fn evaluation_page(page: &Page) -> String {
    let Page { evaluation, part, text, from, total, omitted } = page;
    let name = part.name();
    let end = from + length(text) as u64;
    if *total == 0 && *omitted == 0 {
        return format!("Evaluation {evaluation}, {name}: none.");
    }
    if end <= *from {
        return format!("Evaluation {evaluation}, {name}: no characters from {from} on, there are {total}.");
    }
    let shown = if *part == EvaluationPart::Values { text.clone() } else { escape_output(text) };
    let mut answer = format!("Evaluation {evaluation}, {name}, characters {from} to {} of {total}:\n{shown}", end - 1);
    if end < *total {
        answer += &page_marker(*evaluation, *part, total - end, end);
    } else if *omitted > 0 {
        answer += &omission(*omitted);
    }
    answer
}
