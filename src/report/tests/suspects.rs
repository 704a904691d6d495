//! The functions that may be at fault for a test that failed.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::failures::{Detail, Test, name, one_line};
use super::{MAX_CALL, MAX_FORM};
use crate::outcome::Record;

/// Functions by name and line.
pub(super) type Functions = BTreeSet<(String, Option<i64>)>;

/// The functions among the suspects of a test.
pub(super) fn functions(test: &Test<'_>) -> Functions {
    test.suspects.iter().filter_map(|record| function(record)).collect()
}

/// The name and the line of the function that a record of suspects is of.
pub(super) fn function(record: &Record) -> Option<(String, Option<i64>)> {
    (record.kind == "suspect").then(|| (name(record).to_owned(), record.number("line")))
}

/// The functions that may be at fault, each with the lines that make the difference.
pub(super) fn push_suspects(entry: &mut String, suspects: &[&Record], detail: &Detail) {
    let mut label = "Suspects: ";
    // Functions shown so far of this list.
    let mut functions = 0;
    for (index, record) in suspects.iter().enumerate() {
        if let Some(printed) = record.text("printed") {
            let more = record.number("more").unwrap_or(0);
            let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
            _ = write!(entry, "\n   Before it printed {}{more}:", one_line(printed, MAX_CALL));
            (label, functions) = ("Suspects: ", 0);
            continue;
        }
        if record.kind == "line" {
            continue;
        }
        let file = suspect_place(record);
        functions += 1;
        if functions > detail.functions {
            let also = if functions == detail.functions + 1 { "\n             also" } else { "," };
            _ = write!(entry, "{also} {}{file}", one_line(name(record), MAX_CALL));
            continue;
        }
        _ = write!(entry, "\n   {label}{}{file}", one_line(name(record), MAX_CALL));
        _ = match record.number("passing") {
            Some(0) => write!(entry, "  (no passing test ran these lines)"),
            Some(1) => write!(entry, "  (1 passing test ran these lines)"),
            passing => write!(entry, "  ({} passing tests ran these lines)", passing.unwrap_or(0)),
        };
        if let Some(macros) = record.text("macros") {
            _ = write!(entry, "  expands {}", one_line(macros, MAX_CALL));
        }
        label = "          ";
        let lines = suspects[index + 1..].iter().take_while(|record| record.kind == "line");
        push_lines(entry, lines.copied(), detail);
    }
}

/// The suspects of a test that fails in the same checks as the one of entry `other`: those that this one does not have.
pub(super) fn push_other_suspects(entry: &mut String, suspects: &[&Record], other: usize, known: &[&Record]) {
    let known: Vec<_> = known.iter().filter_map(|record| function(record)).collect();
    let new = suspects.iter().filter(|record| function(record).is_some_and(|function| !known.contains(&function)));
    let new: Vec<_> =
        new.map(|record| format!("{}{}", one_line(name(record), MAX_CALL), suspect_place(record))).collect();
    _ = write!(entry, "\n   Suspects: as those of {}", other + 1);
    if !new.is_empty() {
        _ = write!(entry, ", and {}", new.join(", "));
    }
}

/// Where one of the suspects is defined, after two spaces.
fn suspect_place(record: &Record) -> String {
    let line = record.number("line").unwrap_or(0);
    record.text("file").map_or_else(String::new, |file| format!("  {}:{line}", one_line(file, MAX_CALL)))
}

/// Lines of one of the suspects.
fn push_lines<'a>(entry: &mut String, lines: impl Iterator<Item = &'a Record>, detail: &Detail) {
    let (context, own): (Vec<_>, Vec<_>) = lines.partition(|line| line.number("passing").is_some());
    let mut shown = if detail.context || own.is_empty() { [own, context].concat() } else { own };
    shown.truncate(detail.lines);
    shown.sort_by_key(|line| line.number("line"));
    for line in shown {
        let (number, code) = (line.number("line").unwrap_or(0), line.text("code").unwrap_or_default());
        let passing = line.number("passing").map_or_else(String::new, |tests| format!("  ({tests} passing)"));
        _ = write!(entry, "\n               {number}: {}{passing}", one_line(code, MAX_FORM));
    }
}
