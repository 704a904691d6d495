//! The report of a load.

use std::fmt::Write as _;

use super::clipped_message;
use super::escape::escape_markers;
use crate::outcome::{Loaded, Outcome, Record, Warning};

/// Returns true for the outcome of a load, whose report has a format of its own for warnings.
pub(super) fn is_load(outcome: &Outcome) -> bool {
    outcome.records.iter().any(|record| matches!(record, Record::Loading(_) | Record::Loaded(_)))
}

/// Returns true if the load failed with an error whose message already includes this warning.
pub(super) fn is_in_error_message(outcome: &Outcome, warning: &Warning) -> bool {
    let Err(error) = &outcome.result else { return false };
    let begins = format!("{}{}: ", location(warning), warning.kind);
    is_load(outcome) && warning.file.is_some() && error.message.text.contains(&begins)
}

/// Appends the summary of a load: `Loaded ironclad: 118 files, 3 compiled, 2 warnings, 1.8 s`.
pub(super) fn push_loaded(target: &mut String, outcome: &Outcome, loaded: &Loaded) {
    let name = escape_markers(&loaded.name);
    let seconds = format!("{}.{:02} s", loaded.milliseconds / 1000, loaded.milliseconds % 1000 / 10);
    match loaded.present {
        Some(files) => _ = write!(target, "{name} is up to date: {}, {seconds}", count_text(files, "file")),
        None => {
            _ = write!(target, "Loaded {name}: {}", count_text(loaded.files, "file"));
            if loaded.compiled > 0 {
                _ = write!(target, ", {} compiled", loaded.compiled);
            }
            let all = outcome.warnings.len() as u64 + outcome.warnings_omitted;
            let errors = outcome.warnings.iter().filter(|warning| warning.kind == "COMPILE-TIME-ERROR").count() as u64;
            for (count, what) in [(errors, "compile-time error"), (all - errors, "warning")] {
                if count > 0 {
                    _ = write!(target, ", {}", count_text(count, what));
                }
            }
            _ = write!(target, ", {seconds}");
        }
    }
    if let Some(systems) = &loaded.systems {
        _ = write!(target, "\nWith {}", escape_markers(systems));
    }
    if let Some(definition) = &loaded.definition {
        _ = write!(target, "\nDefined in {}", escape_markers(definition));
    }
}

pub(super) fn count_text(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Appends the line of a warning, location first: `src/a.lisp:40:3 in (DEFUN PAD): STYLE-WARNING: …`.
pub(super) fn push_warning(target: &mut String, warning: &Warning) {
    let (location, kind) = (escape_markers(&location(warning)), escape_markers(&warning.kind));
    _ = write!(target, "\n{location}{kind}: {}", clipped_message(&warning.message));
}

/// Returns the location of a warning and a colon; an empty string for a warning outside a file.
fn location(warning: &Warning) -> String {
    let Some(file) = &warning.file else { return String::new() };
    let mut location = file.clone();
    for number in [warning.line, warning.column].into_iter().flatten() {
        _ = write!(location, ":{number}");
    }
    if let Some(form) = &warning.form {
        _ = write!(location, " in {form}");
    }
    location.push_str(": ");
    location
}
