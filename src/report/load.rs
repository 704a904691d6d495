//! What was loaded.

use std::fmt::Write as _;

use super::clipped_message;
use super::escape::escape_markers;
use crate::outcome::{Outcome, Record, Warning};

/// True when this is the outcome of a load, which words its warnings in its own way.
pub(super) fn is_load(outcome: &Outcome) -> bool {
    outcome.records.iter().any(|record| matches!(record.kind.as_str(), "loading" | "loaded"))
}

/// True when the message of the error that a load failed with has this warning.
pub(super) fn is_told(outcome: &Outcome, warning: &Warning) -> bool {
    let Err(error) = &outcome.result else { return false };
    let begins = format!("{}{}: ", place(warning), warning.kind);
    is_load(outcome) && warning.file.is_some() && error.message.text.contains(&begins)
}

/// What was loaded; none when that failed, or nothing was to be.
pub(crate) fn loaded(outcome: &Outcome) -> Option<&Record> {
    outcome.records.iter().find(|record| record.kind == "loaded").filter(|_| !outcome.is_error())
}

/// Says what was loaded: `Loaded ironclad: 118 files, 3 compiled, 2 warnings, 1.8 s`.
pub(super) fn push_loaded(target: &mut String, outcome: &Outcome, loaded: &Record) {
    let name = escape_markers(loaded.text("name").unwrap_or_default());
    let number = |field| loaded.number(field).unwrap_or(0);
    let seconds = number("milliseconds");
    let seconds = format!("{}.{:02} s", seconds / 1000, seconds % 1000 / 10);
    match loaded.number("present") {
        Some(files) => _ = write!(target, "{name} is up to date: {}, {seconds}", counted(files, "file")),
        None => {
            _ = write!(target, "Loaded {name}: {}", counted(number("files"), "file"));
            if number("compiled") > 0 {
                _ = write!(target, ", {} compiled", number("compiled"));
            }
            let all = outcome.warnings.len() as u64 + outcome.warnings_omitted;
            let errors = outcome.warnings.iter().filter(|warning| warning.kind == "COMPILE-TIME-ERROR").count() as u64;
            for (count, what) in [(errors, "compile-time error"), (all - errors, "warning")] {
                if count > 0 {
                    _ = write!(target, ", {}", counted(i64::try_from(count).unwrap_or(i64::MAX), what));
                }
            }
            _ = write!(target, ", {seconds}");
        }
    }
    if let Some(systems) = loaded.text("systems") {
        _ = write!(target, "\nWith {}", escape_markers(systems));
    }
    if let Some(definition) = loaded.text("definition") {
        _ = write!(target, "\nDefined in {}", escape_markers(definition));
    }
}

fn counted(count: i64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A warning, on a line of its own, where it is first: `src/a.lisp:40:3 in (DEFUN PAD): STYLE-WARNING: …`.
pub(super) fn push_warning(target: &mut String, warning: &Warning) {
    let (place, kind) = (escape_markers(&place(warning)), escape_markers(&warning.kind));
    _ = write!(target, "\n{place}{kind}: {}", clipped_message(&warning.message));
}

/// Where a warning is, with a colon; nothing if it is in no file.
fn place(warning: &Warning) -> String {
    let Some(file) = &warning.file else { return String::new() };
    let mut place = file.clone();
    for number in [warning.line, warning.column].into_iter().flatten() {
        _ = write!(place, ":{number}");
    }
    if let Some(form) = &warning.form {
        _ = write!(place, " in {form}");
    }
    place.push_str(": ");
    place
}
