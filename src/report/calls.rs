//! The answers of trace-calls and profile: what was seen, and then what evaluate-lisp would have said.

use std::fmt::Write as _;

use super::escape::{escape_markers, escape_output};
use super::{evaluation, fitted};
use crate::outcome::{Outcome, Record};

/// Characters of a line that are kept when the whole is too long.
const LINE: usize = 500;

/// No line of a call has fewer characters.
const LEAST_LINE: usize = 20;

/// How many calls there may be room for in an answer of `max` characters.
pub(crate) const fn calls_shown(max: usize) -> u64 {
    (calls_room(max) / LEAST_LINE) as u64
}

/// Characters that the tree of calls may have.
const fn calls_room(max: usize) -> usize {
    max / 3 * 2
}

/// The tree of calls, and the answer of the code, in `max` characters.
#[must_use]
pub(crate) fn calls(outcome: &Outcome, max: usize) -> String {
    let Some(trace) = outcome.records.iter().find(|record| record.kind == "trace") else {
        return with_answer(String::new(), outcome, max);
    };
    let number = |name| trace.number(name).unwrap_or(0);
    let (functions, total) = (number("functions"), number("calls"));
    let of =
        if functions == 1 { "the function traced".to_owned() } else { format!("the {functions} functions traced") };
    let mut head = match total {
        0 => format!(
            "No calls of {of} (calls that were inlined, or are made by SBCL's own code directly, are not seen)."
        ),
        1 => format!("1 call of {of}:"),
        _ => format!("{total} calls of {of}:"),
    };
    let mut thread = None;
    let mut shown = 0;
    let room = calls_room(max);
    for record in outcome.records.iter().filter(|record| record.kind == "call") {
        let mut lines = String::new();
        if record.text("thread") != thread {
            thread = record.text("thread");
            _ = write!(lines, "\nIn thread {}:", escape_markers(thread.unwrap_or_default()));
        }
        push_call(&mut lines, record);
        if head.chars().count() + lines.chars().count() > room {
            break;
        }
        head.push_str(&lines);
        shown += 1;
    }
    let more = number("recorded") - shown;
    if more > 0 {
        _ = write!(head, "\n... {more} more calls were recorded: a smaller depth or fewer functions show the rest");
    }
    if number("omitted") > 0 {
        _ = write!(head, "\n... {} more calls were not recorded (limit)", number("omitted"));
    }
    if number("stopped") > 0 {
        head.push_str(
            "\nA thread was started: local functions were traced up to then, since SBCL's breakpoints are for one thread.",
        );
    }
    with_answer(head, outcome, max)
}

fn push_call(target: &mut String, record: &Record) {
    let text = |name| escape_output(record.text(name).unwrap_or_default());
    let depth = usize::try_from(record.number("depth").unwrap_or(0)).unwrap_or(0);
    let indent = "  ".repeat(depth + 1);
    _ = write!(target, "\n{indent}{}", text("text"));
    match record.text("end") {
        Some("returned") if text("result").is_empty() => target.push_str(" => (no values)"),
        Some("returned") => _ = write!(target, " => {}", text("result")),
        Some("failed") => _ = write!(target, " failed: {}", text("result")),
        Some("left") => target.push_str(" was left by a non-local exit"),
        _ => target.push_str(" has not returned"),
    }
    #[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
    if let Some(time) = record.number("nanoseconds").filter(|_| record.text("end") != Some("running")) {
        _ = write!(target, "  [{:.3} ms]", time as f64 / 1e6);
    }
    if let Some(deeper) = record.number("deeper").filter(|deeper| *deeper > 0) {
        _ = write!(target, "\n{indent}  ... {deeper} deeper calls");
    }
}

/// The table of a profile, and the answer of the code, in `max` characters.
#[must_use]
pub(crate) fn profile(outcome: &Outcome, max: usize) -> String {
    let Some(profile) = outcome.records.iter().find(|record| record.kind == "profile") else {
        return with_answer(String::new(), outcome, max);
    };
    let number = |record: &Record, name| record.number(name).unwrap_or(0);
    let (samples, threads) = (number(profile, "samples"), number(profile, "threads"));
    #[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
    let percent = |count: i64| 100.0 * count as f64 / samples.max(1) as f64;
    #[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
    let seconds = number(profile, "milliseconds") as f64 / 1e3;
    let plural = if threads == 1 { "" } else { "s" };
    let mut head = format!("Samples {samples} over {seconds:.1} s, {threads} thread{plural}");
    if samples == 0 {
        head.push_str("\nNo samples: one is taken every 10 ms of the mode's time. Let the code run longer, in a loop.");
        return with_answer(head, outcome, max);
    }
    head.push_str("\nself%  total%  calls   function");
    let room = max / 3 * 2;
    let mut shown = 0;
    for record in outcome.records.iter().filter(|record| record.kind == "function") {
        let name = escape_markers(record.text("name").unwrap_or_default()).replace('\n', "\\n");
        let mut line = format!(
            "\n{:5.1}  {:6.1}      -   {name}",
            percent(number(record, "self")),
            percent(number(record, "total"))
        );
        if let Some(place) = record.text("place") {
            _ = write!(line, "  {}", escape_markers(place).replace('\n', "\\n"));
        }
        let line: String = line.chars().take(LINE).collect();
        if head.chars().count() + line.chars().count() > room {
            break;
        }
        head.push_str(&line);
        shown += 1;
    }
    let more = number(profile, "functions") - shown;
    if more > 0 {
        _ = write!(head, "\n... {more} more functions");
    }
    with_answer(head, outcome, max)
}

/// What was seen, and below it the answer of the code, as much as there is room for.
fn with_answer(head: String, outcome: &Outcome, max: usize) -> String {
    let room = max.saturating_sub(head.chars().count() + 2);
    let mut answer = evaluation(outcome);
    if answer.chars().count() > room {
        answer = super::cut(evaluation(&fitted(outcome, room)), room);
    }
    if head.is_empty() { answer } else { format!("{head}\n\n{answer}") }
}
