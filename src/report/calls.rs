//! The answers of trace-calls and profile: what was seen, and then what evaluate-lisp would have said.

use std::fmt::Write as _;

use super::escape::{escape_markers, escape_output};
use super::{evaluation, fitted};
use crate::outcome::{CallEnd, CallTree, Outcome, Profile, ProfileSummary, TracedCall};

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
    let Some(CallTree { trace, calls }) = CallTree::of(&outcome.records) else {
        return with_answer(String::new(), outcome, max);
    };
    let of = if trace.functions == 1 {
        "the function traced".to_owned()
    } else {
        format!("the {} functions traced", trace.functions)
    };
    let mut head = match trace.calls {
        0 => format!(
            "No calls of {of} (calls that were inlined, or are made by SBCL's own code directly, are not seen)."
        ),
        1 => format!("1 call of {of}:"),
        total => format!("{total} calls of {of}:"),
    };
    let mut thread = None;
    let mut shown = 0;
    let room = calls_room(max);
    for call in calls {
        let mut lines = String::new();
        if call.thread != thread {
            thread.clone_from(&call.thread);
            _ = write!(lines, "\nIn thread {}:", escape_markers(thread.as_deref().unwrap_or_default()));
        }
        push_call(&mut lines, call);
        if head.chars().count() + lines.chars().count() > room {
            break;
        }
        head.push_str(&lines);
        shown += 1;
    }
    let more = trace.recorded.saturating_sub(shown);
    if more > 0 {
        _ = write!(head, "\n... {more} more calls were recorded: a smaller depth or fewer functions show the rest");
    }
    if trace.omitted > 0 {
        _ = write!(head, "\n... {} more calls were not recorded (limit)", trace.omitted);
    }
    if trace.stopped {
        head.push_str(
            "\nA thread was started: local functions were traced up to then, since SBCL's breakpoints are for one thread.",
        );
    }
    with_answer(head, outcome, max)
}

fn push_call(target: &mut String, call: &TracedCall) {
    let indent = "  ".repeat(usize::try_from(call.depth).unwrap_or(0) + 1);
    let result = escape_output(&call.result);
    _ = write!(target, "\n{indent}{}", escape_output(&call.text));
    match call.end {
        CallEnd::Returned if result.is_empty() => target.push_str(" => (no values)"),
        CallEnd::Returned => _ = write!(target, " => {result}"),
        CallEnd::Failed => _ = write!(target, " failed: {result}"),
        CallEnd::Left => target.push_str(" was left by a non-local exit"),
        CallEnd::Running => target.push_str(" has not returned"),
    }
    #[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
    if let Some(time) = call.nanoseconds.filter(|_| call.end != CallEnd::Running) {
        _ = write!(target, "  [{:.3} ms]", time as f64 / 1e6);
    }
    if let Some(deeper) = call.deeper.filter(|deeper| *deeper > 0) {
        _ = write!(target, "\n{indent}  ... {deeper} deeper calls");
    }
}

/// The table of a profile, and the answer of the code, in `max` characters.
#[must_use]
pub(crate) fn profile(outcome: &Outcome, max: usize) -> String {
    let Some(Profile { summary, functions }) = Profile::of(&outcome.records) else {
        return with_answer(String::new(), outcome, max);
    };
    let ProfileSummary { samples, threads, .. } = summary;
    #[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
    let percent = |count: u64| 100.0 * count as f64 / (*samples).max(1) as f64;
    #[allow(clippy::cast_precision_loss, reason = "it is rounded anyway")]
    let seconds = summary.milliseconds as f64 / 1e3;
    let plural = if *threads == 1 { "" } else { "s" };
    let mut head = format!("Samples {samples} over {seconds:.1} s, {threads} thread{plural}");
    if *samples == 0 {
        head.push_str("\nNo samples: one is taken every 10 ms of the mode's time. Let the code run longer, in a loop.");
        return with_answer(head, outcome, max);
    }
    head.push_str("\nself%  total%  calls   function");
    let room = max / 3 * 2;
    let mut shown = 0;
    for function in functions {
        let name = escape_markers(&function.name).replace('\n', "\\n");
        let mut line = format!("\n{:5.1}  {:6.1}      -   {name}", percent(function.own), percent(function.total));
        if let Some(place) = &function.place {
            _ = write!(line, "  {}", escape_markers(place).replace('\n', "\\n"));
        }
        let line: String = line.chars().take(LINE).collect();
        if head.chars().count() + line.chars().count() > room {
            break;
        }
        head.push_str(&line);
        shown += 1;
    }
    let more = summary.functions.saturating_sub(shown);
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
