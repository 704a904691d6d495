//! The reports of trace-calls and profile: the recorded calls or samples, followed by the report of the evaluation.

use std::fmt::Write as _;

use super::escape::{escape_markers, escape_output};
use super::load::count_text;
use super::{evaluation, fitted};
use crate::outcome::{CallEnd, CallTree, Outcome, Profile, ProfileSummary, TracedCall};
use crate::tool_names;

/// Maximum length of a line of the profile, in characters.
const MAX_LINE: usize = 500;

/// Largest `limit` of trace-calls.
pub(crate) const MAX_RECORDED_CALLS: u64 = 5_000;

/// Largest `limit` of profile.
pub(crate) const MAX_PROFILED_FUNCTIONS: u64 = 500;

/// Minimum length of the line of a call, in characters.
const MIN_LINE: usize = 20;

/// Returns the maximum number of calls that can fit into an answer of `max` characters.
pub(crate) const fn max_calls_shown(max: usize) -> u64 {
    (calls_room(max) / MIN_LINE) as u64
}

/// Returns the number of characters of an answer that the tree of calls may take.
const fn calls_room(max: usize) -> usize {
    max / 3 * 2
}

/// Returns the tree of calls and the report of the evaluation, in at most `max` characters.
#[must_use]
pub(crate) fn calls(outcome: &Outcome, max: usize) -> String {
    let Some(CallTree { trace, calls }) = CallTree::of(&outcome.records) else {
        return append_report(String::new(), outcome, max);
    };
    let of = if trace.functions == 1 {
        "the traced function".to_owned()
    } else {
        format!("the {} traced functions", trace.functions)
    };
    let mut head = match trace.calls {
        0 => {
            format!(
                "No calls to {of} were recorded (inlined calls and direct calls in SBCL's own code cannot be traced)."
            )
        }
        1 => format!("1 call to {of}:"),
        total => format!("{total} calls to {of}:"),
    };
    let mut thread = None;
    let mut shown = 0;
    let room = calls_room(max);
    let has_inner_calls = calls.iter().any(|call| call.depth > 0);
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
    let fewer = if trace.functions > 1 { "trace fewer functions" } else { "" };
    let more = trace.recorded.saturating_sub(shown);
    if more > 0 {
        let depth = if has_inner_calls { "reduce `depth`" } else { "" };
        let room = tool_names::if_usable(&["configure-limits"], "raise max-answer (configure-limits)");
        let advice = join_advice([depth, fewer, room]);
        _ = write!(head, "\n... recorded calls that do not fit here: {more}{advice}");
    }
    if trace.omitted > 0 {
        // At the largest limit, there is no larger limit to pass.
        let larger = if trace.recorded < MAX_RECORDED_CALLS { "pass a larger `limit`" } else { "" };
        let advice = join_advice([larger, fewer, ""]);
        _ = write!(head, "\n... calls beyond `limit`, not recorded: {}{advice}", trace.omitted);
    }
    if trace.stopped {
        head.push_str(
            "\nA thread was started: local functions were traced only until then, since SBCL's breakpoints work in \
             only one thread.",
        );
    }
    append_report(head, outcome, max)
}

/// Returns the alternatives that are not empty as the end of a line: `; pass a larger limit, or trace fewer functions`.
fn join_advice(alternatives: [&str; 3]) -> String {
    let alternatives: Vec<_> = alternatives.into_iter().filter(|alternative| !alternative.is_empty()).collect();
    match &alternatives[..] {
        [] => String::new(),
        [one] => format!("; {one}"),
        [first @ .., last] => format!("; {}, or {last}", first.join(", ")),
    }
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
    #[allow(clippy::cast_precision_loss, reason = "the value is rounded anyway")]
    if let Some(time) = call.nanoseconds.filter(|_| call.end != CallEnd::Running) {
        _ = write!(target, "  [{:.3} ms]", time as f64 / 1e6);
    }
    if let Some(deeper) = call.deeper.filter(|deeper| *deeper > 0) {
        _ = write!(target, "\n{indent}  ... {}", count_text(deeper, "deeper call"));
    }
}

/// Returns the table of the profile and the report of the evaluation, in at most `max` characters.
#[must_use]
pub(crate) fn profile(outcome: &Outcome, max: usize) -> String {
    let Some(Profile { summary, functions }) = Profile::of(&outcome.records) else {
        return append_report(String::new(), outcome, max);
    };
    let ProfileSummary { mode, samples, threads, .. } = summary;
    #[allow(clippy::cast_precision_loss, reason = "the value is rounded anyway")]
    let percent = |count: u64| 100.0 * count as f64 / (*samples).max(1) as f64;
    #[allow(clippy::cast_precision_loss, reason = "the value is rounded anyway")]
    let seconds = summary.milliseconds as f64 / 1e3;
    let plural = if *threads == 1 { "" } else { "s" };
    let mut head = format!("Samples {samples} over {seconds:.1} s, {threads} thread{plural}");
    if *samples == 0 {
        let reason = match mode.as_str() {
            "alloc" => "allocated too little memory",
            "time" => "ended too soon",
            _ => "used too little processor time",
        };
        _ = write!(head, "\nNo samples: the code {reason}. Let the code run longer, for example in a loop.");
        return append_report(head, outcome, max);
    }
    head.push_str("\nself%  total%  calls   function");
    let room = max / 3 * 2;
    let mut shown = 0;
    let listed = functions.len() as u64;
    for function in functions {
        let name = escape_markers(&function.name).replace('\n', "\\n");
        let mut line = format!("\n{:5.1}  {:6.1}      -   {name}", percent(function.own), percent(function.total));
        if let Some(location) = &function.location {
            _ = write!(line, "  {}", escape_markers(location).replace('\n', "\\n"));
        }
        let line: String = line.chars().take(MAX_LINE).collect();
        if head.chars().count() + line.chars().count() > room {
            break;
        }
        head.push_str(&line);
        shown += 1;
    }
    let more = summary.functions.saturating_sub(shown);
    if more > 0 {
        _ = write!(head, "\n... {}", count_text(more, "more function"));
        if shown < listed {
            head.push_str(tool_names::if_usable(
                &["configure-limits"],
                "; raise max-answer (configure-limits) to see more",
            ));
        } else if summary.functions <= MAX_PROFILED_FUNCTIONS {
            let rest = if more == 1 { "it" } else { "them all" };
            _ = write!(head, "; pass limit {} to see {rest}", summary.functions);
        }
    }
    append_report(head, outcome, max)
}

/// Appends the report of the evaluation to `head`, shortened so that the result has at most `max` characters.
fn append_report(head: String, outcome: &Outcome, max: usize) -> String {
    let room = max.saturating_sub(head.chars().count() + 2);
    let mut answer = evaluation(outcome);
    if answer.chars().count() > room {
        answer = super::cut(evaluation(&fitted(outcome, room)), room);
    }
    if head.is_empty() { answer } else { format!("{head}\n\n{answer}") }
}
