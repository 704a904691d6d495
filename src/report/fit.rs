//! Answers that are no longer than they may be: what is cut, where, and how it says so.
//!
//! Cutting takes place in the data, before it is worded, so that text and structured content tell the same. An
//! [`Allowance`] says how many characters each part may have; parts lose theirs in a fixed order until the text is
//! short enough.

use std::sync::Arc;

use super::evaluation::{evaluation, values_text, warning_length};
use super::frames::frames_shown_by;
use super::{EvaluationPart, errors, omission};
use crate::outcome::{Clipped, ErrorRecord, Outcome, Warning, byte_offset};
use crate::tool_names;

/// Characters of a message that are always shown.
const MESSAGE: usize = 2_000;
/// Frames that are always shown.
const FRAMES: usize = 10;
/// Restarts that the server establishes itself, which are always shown: RETRY and ABORT, the outermost.
const OWN_RESTARTS: usize = 2;
/// Characters that a marker in place of what was cut may take.
const MARKER: usize = 130;
/// Characters of a notice, or of a warning, when not all fit.
const LINE: usize = 500;
/// Characters of a frame, and of a restart's description, when hardly anything fits.
const SHORT: usize = 240;

/// The parts of an evaluation's report that may be cut, in the order in which they are, each with what it keeps at
/// first and what at last.
const EVALUATION: [(Part, usize, usize); 8] = [
    (Part::Output, 2_000, 0),
    (Part::Background, 500, 0),
    (Part::Values, 2_000, 0),
    (Part::Warnings, 1_500, 0),
    (Part::Notices, 1_500, 0),
    (Part::Frames, FRAMES, FRAMES),
    (Part::Message, MESSAGE, MESSAGE),
    (Part::Restarts, 10, 0),
];

/// The same of an error's description.
const ERROR: [(Part, usize, usize); 3] =
    [(Part::Slots, 5, 0), (Part::Message, MESSAGE, MESSAGE), (Part::Restarts, 10, 0)];

/// What may be cut. Frames, restarts and slots are counted, the others measured in characters.
#[derive(Debug, Clone, Copy)]
enum Part {
    Output,
    Background,
    Values,
    Warnings,
    Notices,
    Frames,
    Message,
    Restarts,
    Slots,
}

const PARTS: usize = 9;

/// How much each part may have.
#[derive(Debug, Clone, Copy)]
struct Allowance {
    parts: [usize; PARTS],
    /// Frames and restarts are shortened, too.
    terse: bool,
}

impl Allowance {
    fn of(&self, part: Part) -> usize {
        self.parts[part as usize]
    }

    /// Lowers allowances in the `order` until what is made with them is not too long. `size` says how much of a part
    /// there is in it.
    fn settle<T>(
        max: usize,
        order: &[(Part, usize, usize)],
        size: impl Fn(&T, Part) -> usize,
        make: impl Fn(&Self) -> T,
        excess: impl Fn(&T) -> usize,
    ) -> T {
        let mut allowance = Self { parts: [max; PARTS], terse: false };
        let mut made = make(&allowance);
        let last = order.iter().map(|(part, _, last)| (*part, *last));
        for (part, floor) in order.iter().map(|(part, first, _)| (*part, *first)).chain(last) {
            let more = excess(&made);
            if more == 0 {
                return made;
            }
            let now = size(&made, part);
            // Of what is counted, there is no telling how much one is.
            let less = match part {
                Part::Frames | Part::Restarts | Part::Slots => floor,
                _ => now.saturating_sub(more + 2 * MARKER).max(floor),
            };
            if less < now {
                allowance.parts[part as usize] = less;
                made = make(&allowance);
            }
        }
        if excess(&made) > 0 {
            allowance.terse = true;
            made = make(&allowance);
        }
        made
    }
}

/// How a marker names what is missing, and how to see it.
#[derive(Debug, Clone, Copy)]
enum Rest {
    /// It is not kept.
    Lost,
    /// This evaluation's output.
    Output(u64),
    /// Its values.
    Values(u64),
    /// The message of its error.
    Error(u64),
}

impl Rest {
    /// The marker in place of `characters` from the one at `from` on.
    fn marker(self, characters: u64, from: u64) -> String {
        let (id, part) = match self {
            Self::Lost => return omission(characters),
            _ if !tool_names::has("check-evaluation") => return omission(characters),
            Self::Output(id) => (id, "output"),
            Self::Values(id) => (id, "values"),
            Self::Error(id) => (id, "error"),
        };
        format!(
            "[... {characters} characters omitted; check-evaluation {{\"id\": {id}, \"part\": \"{part}\", \"from\": {from}}} \
             shows them]"
        )
    }
}

/// The marker that ends a page of an evaluation's output before `characters` more.
pub(super) fn page_marker(id: u64, part: EvaluationPart, characters: u64, from: u64) -> String {
    let rest = match part {
        EvaluationPart::Output => Rest::Output(id),
        EvaluationPart::Values => Rest::Values(id),
        EvaluationPart::Error => Rest::Error(id),
    };
    rest.marker(characters, from)
}

/// How many characters `text` has.
pub(super) fn length(text: &str) -> usize {
    text.chars().count()
}

/// The character after which to cut `keep` characters off the beginning of `text`: the end of a line, if there is one
/// near.
fn head(text: &str, keep: usize) -> usize {
    let kept = &text[..byte_offset(text, keep as u64)];
    match kept.rfind('\n') {
        Some(newline) if length(&kept[newline..]) <= keep / 4 => length(&kept[..=newline]),
        _ => keep,
    }
}

/// `text` without its middle, so that at most `keep` characters are left, unless the marker would take as many as it
/// stands for; `marker` gets how many are missing, and from where.
fn without_middle(text: &str, keep: usize, marker: impl FnOnce(u64, u64) -> String) -> String {
    let total = length(text);
    if total <= keep {
        return text.to_owned();
    }
    let begin = head(text, keep.div_ceil(2));
    let mut end = total - keep / 2;
    let tail = &text[byte_offset(text, end as u64)..];
    // The last part begins with a newline, if there is one near.
    if let Some(newline) = tail.find('\n').filter(|newline| length(&tail[..*newline]) <= keep / 8) {
        end += length(&tail[..newline]);
    }
    let marker = marker((end - begin) as u64, begin as u64);
    if length(&marker) >= end - begin {
        return text.to_owned();
    }
    let mut cut = text[..byte_offset(text, begin as u64)].to_owned();
    cut += &marker;
    cut += &text[byte_offset(text, end as u64)..];
    cut
}

/// The first `keep` characters of `text`, and a marker.
fn without_end(text: &str, keep: usize, marker: impl FnOnce(u64, u64) -> String) -> String {
    let total = length(text);
    if total <= keep {
        return text.to_owned();
    }
    let marker = marker((total - keep) as u64, keep as u64);
    if length(&marker) >= total - keep {
        return text.to_owned();
    }
    let mut cut = text[..byte_offset(text, keep as u64)].to_owned();
    cut += &marker;
    cut
}

/// A text of which nothing is known but that it is too long: it is cut after a line, if there is one near.
#[must_use]
pub fn cut(text: String, max: usize) -> String {
    if text.len() <= max || length(&text) <= max {
        return text;
    }
    let keep = head(&text, max.saturating_sub(MARKER));
    without_end(&text, keep, |characters, _| omission(characters))
}

/// The outcome, so that its report has at most `max` characters.
#[must_use]
pub fn fitted(outcome: &Outcome, max: usize) -> Outcome {
    let size = |outcome: &Outcome, part| match part {
        Part::Output => length(&outcome.stdout.text) + length(&outcome.stderr.text),
        Part::Background => length(&outcome.background.text),
        Part::Values => outcome.result.as_deref().map_or(0, |values| length(&values_text(values))),
        Part::Warnings => outcome.warnings.iter().map(warning_length).sum(),
        Part::Notices => outcome.notices.iter().map(|notice| length(notice)).sum(),
        Part::Frames => outcome.result.as_ref().map_or_else(|error| error.frames.len(), |_| 0),
        Part::Message => outcome.result.as_ref().map_or_else(|error| length(&error.message.text), |_| 0),
        Part::Restarts => outcome.result.as_ref().map_or_else(|error| error.restarts.len(), |_| 0),
        Part::Slots => 0,
    };
    let excess = |made: &Outcome| length(&evaluation(made)).saturating_sub(max);
    Allowance::settle(max, &EVALUATION, size, |allowance| within(outcome, allowance), excess)
}

/// Characters of output that [`with_brief_output`] leaves.
#[cfg(feature = "mcp")]
const BRIEF: usize = 1_000;

/// The outcome with little of what was printed: of code that prints for those who watch.
#[cfg(feature = "mcp")]
pub(crate) fn with_brief_output(outcome: &Outcome) -> Outcome {
    let mut parts = [usize::MAX; PARTS];
    parts[Part::Output as usize] = BRIEF;
    Outcome { turns: outcome.turns.clone(), ..within(outcome, &Allowance { parts, terse: false }) }
}

/// The error, so that its description has at most `max` characters.
#[must_use]
pub fn fitted_error(error: &ErrorRecord, max: usize) -> ErrorRecord {
    let size = |error: &ErrorRecord, part| match part {
        Part::Message => length(&error.message.text),
        Part::Restarts => error.restarts.len(),
        Part::Slots => error.slots.len(),
        _ => 0,
    };
    let excess = |made: &ErrorRecord| length(&errors::last_error(Some(made))).saturating_sub(max);
    Allowance::settle(max, &ERROR, size, |allowance| error_within(error, allowance), excess)
}

fn within(outcome: &Outcome, allowance: &Allowance) -> Outcome {
    let kept = |rest: fn(u64) -> Rest| if outcome.kept { rest(outcome.evaluation) } else { Rest::Lost };
    let (stdout, stderr) =
        shares(allowance.of(Part::Output), length(&outcome.stdout.text), length(&outcome.stderr.text));
    let output = |text: &Clipped, keep, stderr| Clipped {
        text: without_middle(&text.text, keep, |characters, from| {
            let from = outcome.printed_before + outcome.printed_at(stderr, from);
            kept(Rest::Output).marker(characters, from)
        }),
        omitted: text.omitted,
    };
    let warnings = warnings_within(&outcome.warnings, allowance.of(Part::Warnings));
    Outcome {
        evaluation: outcome.evaluation,
        kept: outcome.kept,
        notices: notices_within(&outcome.notices, allowance.of(Part::Notices)),
        background: Clipped {
            text: without_middle(&outcome.background.text, allowance.of(Part::Background), |characters, _| {
                omission(characters)
            }),
            omitted: outcome.background.omitted,
        },
        stdout: output(&outcome.stdout, stdout, false),
        stderr: output(&outcome.stderr, stderr, true),
        turns: Vec::new(),
        printed_before: outcome.printed_before,
        warnings_omitted: outcome.warnings_omitted + (outcome.warnings.len() - warnings.len()) as u64,
        warnings,
        result: match &outcome.result {
            Ok(values) => Ok(values_within(values, allowance.of(Part::Values), kept(Rest::Values))),
            Err(error) => Err(Arc::new(error_within(error, allowance))),
        },
        timing: outcome.timing,
        held: outcome.held,
        in_background: outcome.in_background,
        defined: Vec::new(),
        records: outcome.records.clone(),
        errors: outcome.errors.clone(),
    }
}

/// Shares `all` characters among two texts of these lengths: each gets half, or what the other one leaves.
fn shares(all: usize, first: usize, second: usize) -> (usize, usize) {
    let half = all / 2;
    if first <= half {
        (first, all - first)
    } else if second <= half {
        (all - second, second)
    } else {
        (half, half)
    }
}

/// The values without the middle of their text. What is left of two values with the marker between them is one.
fn values_within(values: &[Clipped], keep: usize, rest: Rest) -> Vec<Clipped> {
    let text = values_text(values);
    let total = length(&text);
    if total <= keep {
        return values.to_vec();
    }
    // In place of all that lies between the beginning of one value and the end of another, or the same.
    let (begin, end) = (keep.div_ceil(2), total - keep / 2);
    let (mut shown, mut at): (Vec<Clipped>, usize) = (Vec::new(), 0);
    let mut open: Option<String> = None;
    for value in values {
        let whole = super::evaluation::value_text(value);
        let (first, last) = (at + 3, at + 3 + length(&whole));
        at = last + 1;
        if last <= begin || first >= end && open.is_none() {
            shown.push(Clipped::from(whole));
            continue;
        }
        let from = begin.max(first);
        let text = open.get_or_insert_with(|| {
            let head = whole[..byte_offset(&whole, (from - first) as u64)].to_owned();
            head + &rest.marker((end.max(from) - from) as u64, from as u64)
        });
        if last >= end {
            text.push_str(&whole[byte_offset(&whole, end.saturating_sub(first) as u64)..]);
            shown.extend(open.take().map(Clipped::from));
        }
    }
    shown.extend(open.map(Clipped::from));
    shown
}

fn warnings_within(warnings: &[Warning], mut keep: usize) -> Vec<Warning> {
    let all: usize = warnings.iter().map(warning_length).sum();
    if all <= keep {
        return warnings.to_vec();
    }
    let mut shown = Vec::new();
    for warning in warnings {
        let text = without_end(&warning.message.text, LINE, |characters, _| omission(characters));
        let message = Clipped { text, omitted: warning.message.omitted };
        let warning = Warning { message, ..warning.clone() };
        let size = warning_length(&warning);
        if size > keep {
            break;
        }
        keep -= size;
        shown.push(warning);
    }
    shown
}

fn notices_within(notices: &[String], mut keep: usize) -> Vec<String> {
    let all: usize = notices.iter().map(|notice| length(notice)).sum();
    if all <= keep {
        return notices.to_vec();
    }
    let mut shown = Vec::new();
    for notice in notices {
        let notice = without_end(notice, LINE, |characters, _| omission(characters));
        if length(&notice) > keep {
            break;
        }
        keep -= length(&notice);
        shown.push(notice);
    }
    if shown.len() < notices.len() {
        shown.push(format!("[... {} more notices omitted]", notices.len() - shown.len()));
    }
    shown
}

fn error_within(error: &ErrorRecord, allowance: &Allowance) -> ErrorRecord {
    let rest = if error.evaluation > 0 { Rest::Error(error.evaluation) } else { Rest::Lost };
    let mut error = error.clone();
    error.message.text = without_end(&error.message.text, allowance.of(Part::Message).max(MESSAGE), |count, from| {
        rest.marker(count, from)
    });
    error.frames.truncate(frames_shown_by(&error, allowance.of(Part::Frames).max(FRAMES)));
    // The last ones are the server's own.
    let (restarts, shown) = (error.restarts.len(), allowance.of(Part::Restarts).max(OWN_RESTARTS));
    if shown < restarts {
        error.restarts.drain(shown - OWN_RESTARTS..restarts - OWN_RESTARTS);
    }
    let slots = error.slots.len().saturating_sub(allowance.of(Part::Slots));
    error.slots.truncate(allowance.of(Part::Slots));
    error.slots_omitted += slots as u64;
    if allowance.terse {
        for frame in &mut error.frames {
            frame.call = without_end(&frame.call, SHORT, |characters, _| omission(characters));
        }
    }
    error
}
