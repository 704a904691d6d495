//! The reports of find-symbols, find-references and macroexpand.

use std::fmt::Write as _;

use super::escape::{escape_markers, escape_output};
use super::fit::length;
use super::load::count_text;
use crate::outcome::{Expansion, ExpansionStep, FoundSymbols, References};
use crate::tool_names;

/// Characters reserved for the line about further results.
const RESERVED_FOR_OMITTED: usize = 250;
/// Largest limit that is suggested to see all results.
const MAX_SUGGESTED_LIMIT: u64 = 1_000;

/// Returns the text of find-symbols, in at most about `max` characters.
#[must_use]
pub fn symbols_found(found: &FoundSymbols, max: usize) -> String {
    let lines = found.symbols.iter().map(|symbol| {
        let mut line = format!("{}  {}", symbol.name, symbol.kind);
        if let Some(text) = &symbol.lambda_list {
            _ = write!(line, " {text}");
        }
        if let Some(text) = &symbol.documentation {
            _ = write!(line, "  {text}");
        }
        line
    });
    let narrower = "`type`, `package`, `external` or another word in the query";
    let mut text = fit_lines(lines, found.more, max, Some(narrower));
    if let Some(nothing) = &found.nothing {
        push_line(&mut text, &escape_output(nothing));
    }
    text
}

/// Returns the text of find-references, in at most about `max` characters.
#[must_use]
pub fn references_found(found: &References, max: usize) -> String {
    let notes = notes(&found.notes);
    let lines = found.references.iter().map(|reference| {
        let mut line = format!("{}  {}", reference.name, reference.location);
        if let Some(code) = &reference.code {
            _ = write!(line, ": {code}");
        }
        if let Some(how) = &reference.how {
            _ = write!(line, "  ({how})");
        }
        line
    });
    // No argument narrows a list of references.
    let mut text = fit_lines(lines, found.more, max.saturating_sub(length(&notes)), None);
    push_line(&mut text, &notes);
    text
}

/// Returns the text of macroexpand: the error if there is one, the steps, and the expansion.
#[must_use]
pub fn expansion(expansion: &Expansion) -> String {
    let mut parts = Vec::new();
    if let Some(error) = &expansion.error {
        let message = if error.message.is_empty() { "(no message)" } else { &error.message };
        parts.push(format!(
            "[ERROR] {}\n{}\nWhile {}.",
            escape_markers(&error.class),
            escape_output(message.trim_end()),
            escape_markers(&error.during)
        ));
    }
    let steps = steps(expansion);
    if !steps.is_empty() {
        parts.push(steps);
    }
    if !expansion.text.is_empty() {
        parts.push(expansion.text.clone());
    }
    let notes = notes(&expansion.notes);
    if !notes.is_empty() {
        // With a single part, such as a form that has no expansion steps, the notes matter most and come first.
        let place = if parts.len() > 1 { parts.len() } else { 0 };
        parts.insert(place, notes);
    }
    parts.join("\n\n")
}

/// Returns the steps as `WITH-OPEN-FILE → LET, WHEN → IF`. A step that begins with the operator at the end of the
/// previous step continues the chain of that step.
fn steps(expansion: &Expansion) -> String {
    let mut text = String::new();
    let mut last = None;
    for ExpansionStep { operator, result, count } in &expansion.steps {
        if last != Some(operator) {
            if last.is_some() {
                text.push_str(", ");
            }
            text.push_str(operator);
        }
        _ = write!(text, " → {result}");
        if *count > 1 {
            _ = write!(text, " ×{count}");
        }
        last = Some(result);
    }
    match expansion.more_steps {
        0 => {}
        more => _ = write!(text, ", ... {}", count_text(more, "more step")),
    }
    escape_markers(&text)
}

fn notes(notes: &[String]) -> String {
    let notes: Vec<_> = notes.iter().map(|note| escape_output(note)).collect();
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

/// Returns the lines that fit into `max` characters. `more` is the number of results without a line. If any results are
/// not shown, adds a line with their number and with advice, for instance to narrow the list by `narrower`.
fn fit_lines(lines: impl Iterator<Item = String>, more: u64, max: usize, narrower: Option<&str>) -> String {
    let lines: Vec<_> = lines.map(|line| escape_output(&line.replace('\n', " "))).collect();
    let mut room = max.saturating_sub(RESERVED_FOR_OMITTED);
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
        let narrow = narrower.map(|narrower| format!("narrow the list by {narrower}"));
        let advice = if shown < lines.len() as u64 {
            let raise = tool_names::if_usable(&["configure-limits"], "raise max-answer (configure-limits)");
            let raise = (!raise.is_empty()).then(|| raise.to_owned());
            let ways: Vec<_> = narrow.into_iter().chain(raise).collect();
            format!("not enough room{}{}", if ways.is_empty() { "" } else { ": " }, ways.join(", or "))
        } else if all <= MAX_SUGGESTED_LIMIT {
            format!("pass limit {all} to see {}", if rest == 1 { "it" } else { "them all" })
        } else {
            narrow.unwrap_or_else(|| format!("at most {MAX_SUGGESTED_LIMIT} can be listed"))
        };
        push_line(&mut text, &format!("... {rest} more; {advice}."));
    }
    text
}
