//! The answers of find-symbols, find-references and macroexpand.

use std::fmt::Write as _;

use super::escape::{escape_markers, escape_output};
use super::fit::length;
use crate::listed;
use crate::outcome::Record;

/// Characters of what is said of what is not shown.
const AROUND: usize = 250;
/// How many are worth being asked for at once.
const WORTH_ASKING: u64 = 1_000;

/// The answer of find-symbols, of at most about `max` characters: the best matches.
#[must_use]
pub fn symbols_found(records: &[Record], max: usize) -> String {
    let lines = of_kind(records, "symbol").map(|record| {
        let mut line = field(record, "name").to_owned();
        _ = write!(line, "  {}", field(record, "kind"));
        if let Some(text) = record.text("lambda-list") {
            _ = write!(line, " {text}");
        }
        if let Some(text) = record.text("documentation") {
            _ = write!(line, "  {text}");
        }
        line
    });
    let mut text = listed(lines, more(records), max, "a kind, a package, external or another word in the query");
    for nothing in of_kind(records, "nothing") {
        push_line(&mut text, &escape_output(field(nothing, "text")));
    }
    text
}

/// The answer of find-references, of at most about `max` characters.
#[must_use]
pub fn references_found(records: &[Record], max: usize) -> String {
    let notes = notes(records);
    let lines = of_kind(records, "reference").map(|record| {
        let mut line = format!("{}  {}", field(record, "name"), field(record, "where"));
        if let Some(code) = record.text("code") {
            _ = write!(line, ": {code}");
        }
        if let Some(how) = record.text("how") {
            _ = write!(line, "  ({how})");
        }
        line
    });
    let mut text = listed(lines, more(records), max.saturating_sub(length(&notes)), "another relation");
    push_line(&mut text, &notes);
    text
}

/// The answer of macroexpand: the steps, the expansion, or the error in between.
#[must_use]
pub fn expansion(records: &[Record]) -> String {
    let mut parts = Vec::new();
    if let Some(error) = expansion_error(records) {
        let message = error.text("message").filter(|message| !message.is_empty()).unwrap_or("(no message)");
        let context = field(error, "while");
        parts.push(format!(
            "[ERROR] {}\n{}\nWhile {}.",
            escape_markers(field(error, "type")),
            escape_output(message.trim_end()),
            escape_markers(context)
        ));
    }
    let steps = steps(records);
    if !steps.is_empty() {
        parts.push(steps);
    }
    let expansion: String = of_kind(records, "expansion").map(|piece| field(piece, "text")).collect();
    if !expansion.is_empty() {
        parts.push(expansion);
    }
    let notes = notes(records);
    if !notes.is_empty() {
        // What the answer is mostly about comes first.
        let place = if parts.len() > 1 { parts.len() } else { 0 };
        parts.insert(place, notes);
    }
    parts.join("\n\n")
}

/// The error in a macro function, or in the form, that macroexpand answers with.
pub(crate) fn expansion_error(records: &[Record]) -> Option<&Record> {
    of_kind(records, "error").next()
}

/// `WITH-OPEN-FILE → LET, WHEN → IF`: what one step ends with, the next one may begin with.
fn steps(records: &[Record]) -> String {
    let mut text = String::new();
    let mut last = None;
    for step in of_kind(records, "step") {
        let (name, result) = (field(step, "macro"), field(step, "result"));
        if last != Some(name) {
            if last.is_some() {
                text.push_str(", ");
            }
            text.push_str(name);
        }
        _ = write!(text, " → {result}");
        if let Some(count @ 2..) = step.number("count") {
            _ = write!(text, " ×{count}");
        }
        last = Some(result);
    }
    match more(records) {
        0 => {}
        more => _ = write!(text, ", ... {more} more steps"),
    }
    escape_markers(&text)
}

pub(crate) fn of_kind<'a>(records: &'a [Record], kind: &'a str) -> impl Iterator<Item = &'a Record> {
    records.iter().filter(move |record| record.kind == kind)
}

pub(crate) fn field<'a>(record: &'a Record, name: &str) -> &'a str {
    record.text(name).unwrap_or_default()
}

/// How many more there are than were asked for.
pub(crate) fn more(records: &[Record]) -> u64 {
    let counts = records.iter().filter(|record| matches!(&*record.kind, "more" | "omitted"));
    counts.filter_map(|record| record.number("count")).filter_map(|count| u64::try_from(count).ok()).sum()
}

fn notes(records: &[Record]) -> String {
    let notes: Vec<_> = of_kind(records, "note").map(|note| escape_output(field(note, "text"))).collect();
    notes.join("\n")
}

fn push_line(text: &mut String, line: &str) {
    if !line.is_empty() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(line);
    }
}

/// As many of the lines as there is room for, how many more there are, and how to see them.
fn listed(lines: impl Iterator<Item = String>, more: u64, max: usize, narrower: &str) -> String {
    let lines: Vec<_> = lines.map(|line| escape_output(&line.replace('\n', " "))).collect();
    let mut room = max.saturating_sub(AROUND);
    let mut text = String::new();
    let mut shown = 0;
    for line in &lines {
        let size = length(line) + 1;
        if size > room {
            break;
        }
        room -= size;
        push_line(&mut text, line);
        shown += 1;
    }
    let all = lines.len() as u64 + more;
    let rest = all - shown;
    if rest > 0 {
        let ask = if shown < lines.len() as u64 {
            let room = listed::with(&["configure-limits"], ", a larger max-answer (configure-limits) makes room");
            format!("no room for them here: {narrower} narrows the list down{room}")
        } else if all <= WORTH_ASKING {
            format!("ask for limit {all} to see them all")
        } else {
            format!("{narrower} narrows the list down")
        };
        push_line(&mut text, &format!("... {rest} more; {ask}."));
    }
    text
}
