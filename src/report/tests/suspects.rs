//! The functions that may be at fault for a test that failed.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::failures::{Detail, one_line};
use super::{MAX_CALL, MAX_FORM};
use crate::outcome::{Suspect, SuspectLine, SuspectList, Test};

/// Functions by name and line.
pub(super) type Functions = BTreeSet<(String, u64)>;

/// The functions among the suspects of a test.
pub(super) fn functions(test: &Test<'_>) -> Functions {
    all(&test.suspects).map(|suspect| (suspect.name.clone(), suspect.line)).collect()
}

/// The functions of all lists.
fn all<'a>(lists: &'a [SuspectList<'_>]) -> impl Iterator<Item = &'a Suspect> {
    lists.iter().flat_map(|list| &list.functions).map(|(suspect, _)| *suspect)
}

/// True when there is something to be told of the suspects of a test.
pub(super) fn has_suspects(test: &Test<'_>) -> bool {
    test.suspects.iter().any(|list| list.of.printed.is_some() || !list.functions.is_empty())
}

/// The functions that may be at fault, each with the lines that make the difference.
pub(super) fn push_suspects(entry: &mut String, lists: &[SuspectList<'_>], detail: &Detail) {
    for SuspectList { of, functions } in lists {
        if let Some(printed) = &of.printed {
            let more = if of.more > 0 { format!(" (and {} more)", of.more) } else { String::new() };
            _ = write!(entry, "\n   Before it printed {}{more}:", one_line(printed, MAX_CALL));
        }
        for (index, (suspect, lines)) in functions.iter().enumerate() {
            let (name, file) = (one_line(&suspect.name, MAX_CALL), suspect_place(suspect));
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

/// The suspects of a test that fails in the same checks as the one of entry `other`: those that this one does not have.
pub(super) fn push_other_suspects(
    entry: &mut String,
    suspects: &[SuspectList<'_>],
    other: usize,
    known: &[SuspectList<'_>],
) {
    let is_known = |suspect: &Suspect| all(known).any(|known| known.name == suspect.name && known.line == suspect.line);
    let new = all(suspects).filter(|suspect| !is_known(suspect));
    let new: Vec<_> =
        new.map(|suspect| format!("{}{}", one_line(&suspect.name, MAX_CALL), suspect_place(suspect))).collect();
    _ = write!(entry, "\n   Suspects: as those of {}", other + 1);
    if !new.is_empty() {
        _ = write!(entry, ", and {}", new.join(", "));
    }
}

/// Where one of the suspects is defined, after two spaces.
fn suspect_place(suspect: &Suspect) -> String {
    let line = suspect.line;
    suspect.file.as_ref().map_or_else(String::new, |file| format!("  {}:{line}", one_line(file, MAX_CALL)))
}

/// Lines of one of the suspects.
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
