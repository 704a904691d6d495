//! What an evaluation did.

use std::fmt::Write as _;

use super::escape::escape_markers;
use super::{NO_FRAMES, REPORT_FRAMES, Sections, call, clipped_message, omission, push_restarts};
use crate::outcome::{Clipped, ErrorRecord, Outcome};

/// What stands for the value when there is none.
const NO_VALUES: &str = "; No values";

/// The answer of evaluate-lisp.
#[must_use]
pub fn evaluation(outcome: &Outcome) -> String {
    let mut sections = Sections(String::new());
    sections.notices(&outcome.notices);
    sections.output("[background]", &outcome.background);
    sections.output("[stdout]", &outcome.stdout);
    sections.output("[stderr]", &outcome.stderr);
    if !outcome.warnings.is_empty() || outcome.warnings_omitted > 0 {
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

fn push_values(target: &mut String, values: &[Clipped]) {
    if values.is_empty() {
        target.push_str(NO_VALUES);
    }
    target.push_str(&values_text(values));
}

/// Values, a line each.
pub(super) fn values_text(values: &[Clipped]) -> String {
    let mut text = String::new();
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            text.push('\n');
        }
        text.push_str("=> ");
        text.push_str(&value_text(value));
    }
    text
}

/// A value, and how much of it is missing.
pub(super) fn value_text(value: &Clipped) -> String {
    let mut text = value.text.clone();
    if value.omitted > 0 {
        text.push_str(&omission(value.omitted));
    }
    text
}
