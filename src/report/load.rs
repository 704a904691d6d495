//! What was loaded.

use std::fmt::Write as _;

use super::clipped_message;
use super::escape::escape_markers;
use crate::outcome::{Loaded, Outcome, Record, Warning};

/// True when this is the outcome of a load, which words its warnings in its own way.
pub(super) fn is_load(outcome: &Outcome) -> bool {
    outcome.records.iter().any(|record| matches!(record, Record::Loading(_) | Record::Loaded(_)))
}

/// True when the message of the error that a load failed with has this warning.
pub(super) fn is_told(outcome: &Outcome, warning: &Warning) -> bool {
    let Err(error) = &outcome.result else { return false };
    let begins = format!("{}{}: ", place(warning), warning.kind);
    is_load(outcome) && warning.file.is_some() && error.message.text.contains(&begins)
}

/// Says what was loaded: `Loaded ironclad: 118 files, 3 compiled, 2 warnings, 1.8 s`.
pub(super) fn push_loaded(target: &mut String, outcome: &Outcome, loaded: &Loaded) {
    let name = escape_markers(&loaded.name);
    let seconds = format!("{}.{:02} s", loaded.milliseconds / 1000, loaded.milliseconds % 1000 / 10);
    match loaded.present {
        Some(files) => _ = write!(target, "{name} is up to date: {}, {seconds}", counted(files, "file")),
        None => {
            _ = write!(target, "Loaded {name}: {}", counted(loaded.files, "file"));
            if loaded.compiled > 0 {
                _ = write!(target, ", {} compiled", loaded.compiled);
            }
            let all = outcome.warnings.len() as u64 + outcome.warnings_omitted;
            let errors = outcome.warnings.iter().filter(|warning| warning.kind == "COMPILE-TIME-ERROR").count() as u64;
            for (count, what) in [(errors, "compile-time error"), (all - errors, "warning")] {
                if count > 0 {
                    _ = write!(target, ", {}", counted(count, what));
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

fn counted(count: u64, what: &str) -> String {
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
