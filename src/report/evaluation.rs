//! The report of an evaluation.

use std::fmt::Write as _;

use super::escape::escape_markers;
use super::frames::push_frames;
use super::{Sections, clipped_message, load, omission_marker, push_restarts};
use crate::outcome::{Clipped, ErrorRecord, Outcome, Warning};
use crate::tool_names;

/// The line shown when an evaluation returned no values.
const NO_VALUES: &str = "; No values";

/// Returns the text of evaluate-lisp.
#[must_use]
pub fn evaluation(outcome: &Outcome) -> String {
    let mut sections = Sections(String::new());
    sections.push_notices(&outcome.notices);
    sections.push_output("[background]", &outcome.background);
    let loaded = outcome.loaded();
    if let Some(loaded) = loaded {
        load::push_loaded(sections.begin(), outcome, loaded);
    }
    sections.push_output("[stdout]", &outcome.stdout);
    sections.push_output("[stderr]", &outcome.stderr);
    let warnings: Vec<_> =
        outcome.warnings.iter().filter(|warning| !load::is_in_error_message(outcome, warning)).collect();
    if !warnings.is_empty() || outcome.warnings_omitted > 0 {
        let target = sections.begin();
        target.push_str("[warnings]");
        for warning in warnings {
            if load::is_load(outcome) {
                load::push_warning(target, warning);
            } else {
                push_warning(target, warning);
            }
        }
        if outcome.warnings_omitted > 0 {
            _ = write!(target, "\n[... {} omitted]", load::count_text(outcome.warnings_omitted, "warning"));
        }
    }
    match &outcome.result {
        _ if outcome.in_background => {
            _ = write!(sections.begin(), "Evaluation {} continues in the background.", outcome.evaluation);
        }
        Ok(values) if values.is_empty() && loaded.is_some() => {}
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
            push_frames(target, error);
            // An error without an evaluation is that of a failed attempt to resume: its restarts are not those of the held
            // evaluation.
            if outcome.held && error.evaluation > 0 {
                push_debugger(sections.begin(), error);
            }
        }
    }
    sections.0
}

fn push_warning(target: &mut String, warning: &Warning) {
    _ = write!(target, "\n{}: {}", escape_markers(&warning.kind), clipped_message(&warning.message));
    push_location(target, warning);
}

/// Returns the length of a warning's line with its newline, in characters.
pub(super) fn warning_length(warning: &Warning) -> usize {
    let mut line = String::new();
    push_warning(&mut line, warning);
    line.chars().count()
}

/// Appends the location of a warning: `(line 3)` for submitted code, `(src/a.lisp:12, in (DEFUN F))` for a file.
fn push_location(target: &mut String, warning: &Warning) {
    match (&warning.file, warning.line) {
        (None, None) => {}
        (None, Some(line)) => _ = write!(target, " (line {line})"),
        (Some(file), line) => {
            _ = write!(target, " ({}", escape_markers(file));
            if let Some(line) = line {
                _ = write!(target, ":{line}");
            }
            if let Some(form) = &warning.form {
                _ = write!(target, ", in {}", escape_markers(form));
            }
            target.push(')');
        }
    }
}

/// Appends the restarts of a held evaluation and the names of the debugger's tools.
fn push_debugger(target: &mut String, error: &ErrorRecord) {
    target.push_str("[Debugger]\nHeld. Restarts:");
    push_restarts(target, error);
    let tools: Vec<_> = tool_names::usable_debugger_tools().collect();
    if !tools.is_empty() {
        _ = write!(target, "\nTools: {}. The next evaluation, load or test run ends the hold.", tools.join(", "));
    }
}

fn push_values(target: &mut String, values: &[Clipped]) {
    if values.is_empty() {
        target.push_str(NO_VALUES);
    }
    target.push_str(&values_text(values));
}

/// Returns the values, one per line.
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

/// Returns the text of a value, with a marker for omitted characters.
pub(super) fn value_text(value: &Clipped) -> String {
    let mut text = value.text.clone();
    if value.omitted > 0 {
        text.push_str(&omission_marker(value.omitted));
    }
    text
}
