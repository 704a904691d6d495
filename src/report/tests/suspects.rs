//! The suspects of a failed test: functions that may be at fault.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::failures::{Detail, one_line};
use super::{MAX_CALL, MAX_FORM, MAX_PATH};
use crate::outcome::{Suspect, SuspectLine, SuspectList, Test};

/// A set of functions, by name and line.
pub(super) type FunctionSet = BTreeSet<(String, u64)>;

/// Returns the suspects of a test as a set.
pub(super) fn suspect_set(test: &Test<'_>) -> FunctionSet {
    all_suspects(&test.suspects).map(|suspect| (suspect.name.clone(), suspect.line)).collect()
}

/// Returns the suspects of all lists.
fn all_suspects<'a>(lists: &'a [SuspectList<'_>]) -> impl Iterator<Item = &'a Suspect> {
    lists.iter().flat_map(|list| &list.functions).map(|(suspect, _)| *suspect)
}

/// Returns true if there is anything to show about the suspects of a test.
pub(super) fn has_suspects(test: &Test<'_>) -> bool {
    test.suspects.iter().any(|list| list.header.printed.is_some() || !list.functions.is_empty())
}

/// Appends the suspects, each with as many lines of its code as `detail` allows.
pub(super) fn push_suspects(entry: &mut String, lists: &[SuspectList<'_>], detail: &Detail) {
    for SuspectList { header, functions } in lists {
        if let Some(printed) = &header.printed {
            let more = if header.more > 0 { format!(" (and {} more)", header.more) } else { String::new() };
            _ = write!(entry, "\n   Before the test-op printed {}{more}:", one_line(printed, MAX_CALL));
        }
        for (index, (suspect, lines)) in functions.iter().enumerate() {
            let (name, file) = (one_line(&suspect.name, MAX_CALL), suspect_location(suspect));
            if index >= detail.functions {
                let also = if index == detail.functions { "\n             also" } else { "," };
                _ = write!(entry, "{also} {name}{file}");
                continue;
            }
            let label = if index == 0 { "Suspects: " } else { "          " };
            _ = write!(entry, "\n   {label}{name}{file}");
            _ = match suspect.passing {
                0 => write!(entry, "  (no passing test ran these lines)"),
                1 => write!(entry, "  (1 passing test ran these lines)"),
                passing => write!(entry, "  ({passing} passing tests ran these lines)"),
            };
            if let Some(macros) = &suspect.macros {
                _ = write!(entry, "  expands {}", one_line(macros, MAX_CALL));
            }
            push_lines(entry, lines, detail);
        }
    }
}

/// Appends a reference to the entry with index `other`, whose test fails in the same checks and has the suspects `known`.
/// Also appends the functions of `suspects` that are not in `known`.
pub(super) fn push_new_suspects(
    entry: &mut String,
    suspects: &[SuspectList<'_>],
    other: usize,
    known: &[SuspectList<'_>],
) {
    let is_known =
        |suspect: &Suspect| all_suspects(known).any(|known| known.name == suspect.name && known.line == suspect.line);
    let new = all_suspects(suspects).filter(|suspect| !is_known(suspect));
    let new: Vec<_> =
        new.map(|suspect| format!("{}{}", one_line(&suspect.name, MAX_CALL), suspect_location(suspect))).collect();
    _ = write!(entry, "\n   Suspects: same as for {}", other + 1);
    if !new.is_empty() {
        _ = write!(entry, ", and {}", new.join(", "));
    }
}

/// Returns the location of a suspect, preceded by two spaces; an empty string if the suspect's file is unknown.
fn suspect_location(suspect: &Suspect) -> String {
    let line = suspect.line;
    suspect.file.as_ref().map_or_else(String::new, |file| format!("  {}:{line}", one_line(file, MAX_PATH)))
}

/// Appends the lines of a suspect, as many as `detail` allows.
fn push_lines(entry: &mut String, lines: &[&SuspectLine], detail: &Detail) {
    let (context, own): (Vec<&SuspectLine>, Vec<_>) = lines.iter().partition(|line| line.passing.is_some());
    let mut shown = if detail.context || own.is_empty() { [own, context].concat() } else { own };
    shown.truncate(detail.lines);
    shown.sort_by_key(|line| line.line);
    for SuspectLine { line, code, passing } in shown {
        let passing = passing.map_or_else(String::new, |tests| format!("  ({tests} passing)"));
        _ = write!(entry, "\n               {line}: {}{passing}", one_line(code, MAX_FORM));
    }
}
