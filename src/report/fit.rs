//! Shortening of outcomes and errors to the maximum length of an answer.
//!
//! The data is cut, not the text, so that text and structured content agree. An [`Allowance`] limits each part of a
//! report; limits are lowered in a fixed order until the text is short enough.

use std::sync::Arc;

use super::evaluation::{evaluation, values_text, warning_length};
use super::frames::count_frames_to_keep;
use super::load::count_text;
use super::{EvaluationPart, PREVIEW_FRAMES, errors, omission_marker};
use crate::outcome::{Clipped, ErrorRecord, Outcome, Warning, byte_offset};
use crate::tool_names;

/// Number of characters of an error's message that are always shown.
const MIN_MESSAGE: usize = 2_000;
/// Number of frames that are always shown.
const MIN_FRAMES: usize = 10;
/// Number of restarts that are always shown: RETRY and ABORT, which the server itself establishes, as the outermost restarts.
const OWN_RESTART_COUNT: usize = 2;
/// Maximum length of the marker that replaces cut text, in characters.
const MAX_MARKER: usize = 130;
/// Maximum length, in characters, of a notice or of a warning's message if the notices or warnings do not all fit.
const MAX_LINE: usize = 500;
/// Maximum length of a frame in a terse report, in characters.
const MAX_TERSE_LINE: usize = 240;

/// The parts of an evaluation's report in the order in which they are cut. Each part has two lower bounds for its
/// limit: one for the first round of cuts, and one for the second.
const EVALUATION_ORDER: [(Part, usize, usize); 8] = [
    (Part::Output, 2_000, 0),
    (Part::Background, 500, 0),
    (Part::Values, 2_000, 0),
    (Part::Warnings, 1_500, 0),
    (Part::Notices, 1_500, 0),
    (Part::Frames, MIN_FRAMES, MIN_FRAMES),
    (Part::Message, MIN_MESSAGE, MIN_MESSAGE),
    (Part::Restarts, 10, 0),
];

/// The parts of an error's description in the order in which they are cut, with bounds as in [`EVALUATION_ORDER`].
const ERROR_ORDER: [(Part, usize, usize); 3] =
    [(Part::Slots, 5, 0), (Part::Message, MIN_MESSAGE, MIN_MESSAGE), (Part::Restarts, 10, 0)];

/// A part of a report that can be cut. Frames, restarts and slots are counted; the other parts are measured in
/// characters.
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

const PART_COUNT: usize = 9;

/// The limits for the parts of a report.
#[derive(Debug, Clone, Copy)]
struct Allowance {
    parts: [usize; PART_COUNT],
    /// True to shorten each frame, too.
    terse: bool,
}

impl Allowance {
    fn limit_for(&self, part: Part) -> usize {
        self.parts[part as usize]
    }

    /// Lowers limits in `order` until the result of `make` is short enough or `order` ends. `size` returns the size of a
    /// part of a result, and `excess` the number of characters by which a result is too long.
    fn fit<T>(
        max: usize,
        order: &[(Part, usize, usize)],
        size: impl Fn(&T, Part) -> usize,
        make: impl Fn(&Self) -> T,
        excess: impl Fn(&T) -> usize,
    ) -> T {
        let mut allowance = Self { parts: [max; PART_COUNT], terse: false };
        let mut made = make(&allowance);
        let last = order.iter().map(|(part, _, last)| (*part, *last));
        for (part, floor) in order.iter().map(|(part, first, _)| (*part, *first)).chain(last) {
            let more = excess(&made);
            if more == 0 {
                return made;
            }
            let now = size(&made, part);
            // The number of characters of each frame, restart or slot is unknown here, so the limits of these parts
            // drop to the lower bound at once.
            let less = match part {
                Part::Frames | Part::Restarts | Part::Slots => floor,
                _ => now.saturating_sub(more + 2 * MAX_MARKER).max(floor),
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

/// The origin of omitted text, which determines the `check-evaluation` call that its marker names.
#[derive(Debug, Clone, Copy)]
enum Omission {
    /// Text that is not kept, so no call of check-evaluation can show it.
    Lost,
    /// The output of this evaluation.
    Output(u64),
    /// The values of this evaluation.
    Values(u64),
    /// The message of the error of this evaluation.
    Error(u64),
}

impl Omission {
    /// Returns the marker that replaces `characters` characters, the first of which has the index `from`.
    fn marker(self, characters: u64, from: u64) -> String {
        let (id, part) = match self {
            Self::Lost => return omission_marker(characters),
            _ if !tool_names::is_usable("check-evaluation") => return omission_marker(characters),
            Self::Output(id) => (id, "output"),
            Self::Values(id) => (id, "values"),
            Self::Error(id) => (id, "error"),
        };
        let (omitted, them) = (count_text(characters, "character"), if characters == 1 { "it" } else { "them" });
        format!(
            "[... {omitted} omitted; check-evaluation {{\"id\": {id}, \"part\": \"{part}\", \"from\": {from}}} shows {them}]"
        )
    }
}

/// Returns the marker at the end of a page of an evaluation. The marker says that `characters` more characters follow,
/// beginning at index `from`.
pub(super) fn page_marker(id: u64, part: EvaluationPart, characters: u64, from: u64) -> String {
    let omitted = match part {
        EvaluationPart::Output => Omission::Output(id),
        EvaluationPart::Values => Omission::Values(id),
        EvaluationPart::Error => Omission::Error(id),
    };
    omitted.marker(characters, from)
}

/// Returns the number of characters of `text`.
pub(super) fn length(text: &str) -> usize {
    text.chars().count()
}

/// Returns the number of characters to keep at the beginning of `text`: `keep`, or fewer if a line ends shortly before
/// that index.
fn head_length(text: &str, keep: usize) -> usize {
    let kept = &text[..byte_offset(text, keep as u64)];
    match kept.rfind('\n') {
        Some(newline) if length(&kept[newline..]) <= keep / 4 => length(&kept[..=newline]),
        _ => keep,
    }
}

/// Returns `text` without its middle, with about `keep` characters left. Returns all of `text` if the marker would not be
/// shorter than the text that it replaces. `marker` takes the number of missing characters and the index of the first.
fn without_middle(text: &str, keep: usize, marker: impl FnOnce(u64, u64) -> String) -> String {
    let total = length(text);
    if total <= keep {
        return text.to_owned();
    }
    let begin = head_length(text, keep.div_ceil(2));
    let mut end = total - keep / 2;
    let tail = &text[byte_offset(text, end as u64)..];
    // If a line ends near the beginning of the last part, the last part begins with that newline.
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

/// Returns the first `keep` characters of `text` and a marker, or all of `text` if the marker would save nothing.
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

/// Cuts text of unknown structure to `max` characters, at the end of a line if a line ends near the limit.
#[must_use]
pub fn cut(text: String, max: usize) -> String {
    if text.len() <= max || length(&text) <= max {
        return text;
    }
    let keep = head_length(&text, max.saturating_sub(MAX_MARKER));
    without_end(&text, keep, |characters, _| omission_marker(characters))
}

/// Cuts an outcome so that its report has at most `max` characters, or as few as the parts that are always shown allow.
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
    Allowance::fit(max, &EVALUATION_ORDER, size, |allowance| cut_outcome(outcome, allowance), excess)
}

/// Characters of output that [`with_brief_output`] keeps.
#[cfg(feature = "mcp")]
const BRIEF_OUTPUT: usize = 1_000;

/// Returns the outcome with most of its output cut. Meant for loads, whose output is mostly progress messages.
#[cfg(feature = "mcp")]
pub(crate) fn with_brief_output(outcome: &Outcome) -> Outcome {
    let mut parts = [usize::MAX; PART_COUNT];
    parts[Part::Output as usize] = BRIEF_OUTPUT;
    Outcome { turns: outcome.turns.clone(), ..cut_outcome(outcome, &Allowance { parts, terse: false }) }
}

/// Cuts an error so that its description has at most `max` characters, or as few as the parts that are always shown allow.
/// Keeps only the frames that the description shows.
#[must_use]
pub fn fitted_error(error: &ErrorRecord, max: usize) -> ErrorRecord {
    let error = &with_first_frames(error, PREVIEW_FRAMES);
    let size = |error: &ErrorRecord, part| match part {
        Part::Message => length(&error.message.text),
        Part::Restarts => error.restarts.len(),
        Part::Slots => error.slots.len(),
        _ => 0,
    };
    let excess = |made: &ErrorRecord| length(&errors::last_error(Some(made))).saturating_sub(max);
    Allowance::fit(max, &ERROR_ORDER, size, |allowance| cut_error(error, allowance), excess)
}

fn cut_outcome(outcome: &Outcome, allowance: &Allowance) -> Outcome {
    let kept = |omitted: fn(u64) -> Omission| if outcome.kept { omitted(outcome.evaluation) } else { Omission::Lost };
    let (stdout, stderr) =
        split_evenly(allowance.limit_for(Part::Output), length(&outcome.stdout.text), length(&outcome.stderr.text));
    let output = |text: &Clipped, keep, stderr| Clipped {
        text: without_middle(&text.text, keep, |characters, from| {
            let from = outcome.printed_before + outcome.printed_index(stderr, from);
            kept(Omission::Output).marker(characters, from)
        }),
        omitted: text.omitted,
    };
    let warnings = cut_warnings(&outcome.warnings, allowance.limit_for(Part::Warnings));
    Outcome {
        evaluation: outcome.evaluation,
        kept: outcome.kept,
        notices: cut_notices(&outcome.notices, allowance.limit_for(Part::Notices)),
        background: Clipped {
            text: without_middle(&outcome.background.text, allowance.limit_for(Part::Background), |characters, _| {
                omission_marker(characters)
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
            Ok(values) => Ok(cut_values(values, allowance.limit_for(Part::Values), kept(Omission::Values))),
            Err(error) => Err(Arc::new(cut_error(error, allowance))),
        },
        timing: outcome.timing,
        held: outcome.held,
        in_background: outcome.in_background,
        defined: Vec::new(),
        records: outcome.records.clone(),
        errors: outcome.errors.clone(),
    }
}

/// Divides `all` characters between two texts with the lengths `first` and `second`. Each text gets half of `all`, plus
/// the characters that the other text does not need.
fn split_evenly(all: usize, first: usize, second: usize) -> (usize, usize) {
    let half = all / 2;
    if first <= half {
        (first, all - first)
    } else if second <= half {
        (all - second, second)
    } else {
        (half, half)
    }
}

/// Returns the values without the middle of their text. A cut that spans several values joins the beginning of the first
/// and the end of the last into one value.
fn cut_values(values: &[Clipped], keep: usize, omitted: Omission) -> Vec<Clipped> {
    let text = values_text(values);
    let total = length(&text);
    if total <= keep {
        return values.to_vec();
    }
    // The characters of `text` between these indices are replaced. The characters may belong to several values.
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
            head + &omitted.marker((end.max(from) - from) as u64, from as u64)
        });
        if last >= end {
            text.push_str(&whole[byte_offset(&whole, end.saturating_sub(first) as u64)..]);
            shown.extend(open.take().map(Clipped::from));
        }
    }
    shown.extend(open.map(Clipped::from));
    shown
}

fn cut_warnings(warnings: &[Warning], mut keep: usize) -> Vec<Warning> {
    let all: usize = warnings.iter().map(warning_length).sum();
    if all <= keep {
        return warnings.to_vec();
    }
    let mut shown = Vec::new();
    for warning in warnings {
        let text = without_end(&warning.message.text, MAX_LINE, |characters, _| omission_marker(characters));
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

fn cut_notices(notices: &[String], mut keep: usize) -> Vec<String> {
    let all: usize = notices.iter().map(|notice| length(notice)).sum();
    if all <= keep {
        return notices.to_vec();
    }
    let mut shown = Vec::new();
    for notice in notices {
        let notice = without_end(notice, MAX_LINE, |characters, _| omission_marker(characters));
        if length(&notice) > keep {
            break;
        }
        keep -= length(&notice);
        shown.push(notice);
    }
    if shown.len() < notices.len() {
        let omitted = count_text((notices.len() - shown.len()) as u64, "more notice");
        shown.push(format!("[... {omitted} omitted]"));
    }
    shown
}

/// Returns a copy of the error with only its first `count` frames. The frames of an error may take a megabyte.
fn with_first_frames(error: &ErrorRecord, count: usize) -> ErrorRecord {
    ErrorRecord {
        id: error.id,
        kind: error.kind.clone(),
        message: error.message.clone(),
        time: error.time,
        form: error.form.clone(),
        slots: error.slots.clone(),
        restarts: error.restarts.clone(),
        frames: error.frames.iter().take(count).cloned().collect(),
        total_frames: error.total_frames,
        slots_omitted: error.slots_omitted,
        evaluation: error.evaluation,
    }
}

fn cut_error(error: &ErrorRecord, allowance: &Allowance) -> ErrorRecord {
    let omitted = if error.evaluation > 0 { Omission::Error(error.evaluation) } else { Omission::Lost };
    let mut error =
        with_first_frames(error, count_frames_to_keep(error, allowance.limit_for(Part::Frames).max(MIN_FRAMES)));
    error.message.text =
        without_end(&error.message.text, allowance.limit_for(Part::Message).max(MIN_MESSAGE), |count, from| {
            omitted.marker(count, from)
        });
    // The server's own restarts are the last ones and are kept.
    let (restarts, shown) = (error.restarts.len(), allowance.limit_for(Part::Restarts).max(OWN_RESTART_COUNT));
    if shown < restarts {
        error.restarts.drain(shown - OWN_RESTART_COUNT..restarts - OWN_RESTART_COUNT);
    }
    let slots = error.slots.len().saturating_sub(allowance.limit_for(Part::Slots));
    error.slots.truncate(allowance.limit_for(Part::Slots));
    error.slots_omitted += slots as u64;
    if allowance.terse {
        for frame in &mut error.frames {
            frame.call = without_end(&frame.call, MAX_TERSE_LINE, |characters, _| omission_marker(characters));
        }
    }
    error
}
