//! The reports about definitions, symbols, limits and a reset.

use std::fmt::Write as _;

use super::Sections;
use super::escape::{escape_markers, escape_output};
use super::fit::length;
use super::load::count_text;
use crate::config::Limits;
use crate::outcome::{Definition, DefinitionKind, Definitions, Role, SymbolDescription};
use crate::tool_names;

const RESET_TEXT: &str = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";

/// Returns the text of reset-session, with notices such as the one about the evaluations that the reset ended.
#[must_use]
pub fn reset(notices: &[String]) -> String {
    let mut sections = Sections(String::new());
    sections.push_notices(notices);
    sections.begin().push_str(RESET_TEXT);
    sections.0
}

/// Largest limit of list-definitions that is suggested to see all definitions.
const MAX_SUGGESTED_LIMIT: u64 = 10_000;
/// Maximum number of unrestored forms that are shown.
const MAX_UNRESTORED: usize = 10;
/// Characters reserved for the headings of list-definitions and for the lines about further definitions.
const RESERVED_FOR_HEADINGS: usize = 900;

/// Returns the text of list-definitions, in at most `max` characters. If not all definitions fit, each kind gets a
/// share of the room.
#[must_use]
pub fn definitions(definitions: &Definitions, max: usize) -> String {
    let groups: Vec<_> = definitions.shown.chunk_by(|a, b| a.kind == b.kind).collect();
    let sizes: Vec<usize> =
        groups.iter().map(|group| group.iter().map(|definition| length(&definition_line(definition))).sum()).collect();
    let shares = divide_room(&sizes, max.saturating_sub(RESERVED_FOR_HEADINGS));

    let mut sections = Sections(String::new());
    let mut more = definitions.more;
    for (group, mut room) in groups.into_iter().zip(shares) {
        if group[0].kind == DefinitionKind::System {
            push_more(&mut sections, std::mem::take(&mut more), definitions, max);
        }
        let target = sections.begin();
        target.push_str(match group[0].kind {
            DefinitionKind::Function => "[Functions]",
            DefinitionKind::Variable => "[Variables]",
            DefinitionKind::Macro => "[Macros]",
            DefinitionKind::Class => "[Classes]",
            DefinitionKind::Package => "[Packages]",
            DefinitionKind::System => "[Loaded Systems]",
        });
        for (index, definition) in group.iter().enumerate() {
            let line = definition_line(definition);
            let size = length(&line);
            if size > room {
                let more = group.len() - index;
                let fit = if more == 1 { "does not fit" } else { "do not fit" };
                _ = write!(target, "\n... {more} more {fit} here.{}", narrowing_hint(definitions, false));
                break;
            }
            room -= size;
            target.push_str(&line);
        }
    }
    push_more(&mut sections, more, definitions, max);
    if !definitions.unrestored.is_empty() {
        let target = sections.begin();
        target.push_str("[Not Restored]");
        for text in definitions.unrestored.iter().take(MAX_UNRESTORED) {
            _ = write!(target, "\n- {}", escape_markers(text));
        }
        if let more @ 1.. = definitions.unrestored.len().saturating_sub(MAX_UNRESTORED) {
            _ = write!(target, "\n- and {more} more");
        }
    }
    match sections.0 {
        text if !text.is_empty() => text,
        _ => {
            let filters = match (definitions.of_one_kind, definitions.in_one_package) {
                (false, false) => return "No definitions in this session.".to_owned(),
                (true, false) => "`type`",
                (false, true) => "`package`",
                (true, true) => "`type` and `package`",
            };
            // Without a filter, there may be some.
            format!("No definition in this session matches the filter. Omit {filters} to list all definitions.")
        }
    }
}

/// Returns advice, after a blank, on how to see definitions that do not fit. `beyond_limit` is true for definitions beyond
/// the requested limit.
fn narrowing_hint(definitions: &Definitions, beyond_limit: bool) -> String {
    let narrower = match (definitions.of_one_kind, definitions.in_one_package) {
        (false, false) => "Narrow the list by `type` or `package`",
        (true, false) => "Narrow the list by `package`",
        (false, true) => "Narrow the list by `type`",
        (true, true) => "",
    };
    let room = tool_names::if_usable(&["configure-limits"], "raise max-answer (configure-limits)");
    let limit = if beyond_limit { " and `limit`" } else { "" };
    match (narrower.is_empty(), room.is_empty()) {
        (true, true) => String::new(),
        (true, false) => format!(" To see more, {room}{limit}."),
        (false, true) => format!(" {narrower}."),
        (false, false) => format!(" {narrower}, or {room}{limit}."),
    }
}

fn definition_line(definition: &Definition) -> String {
    format!("\n- {}", escape_markers(&definition.text))
}

/// Divides `room` among items of these `sizes` and returns their shares. Room that small items do not need goes to
/// larger items.
fn divide_room(sizes: &[usize], mut room: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| sizes[index]);
    let mut shares = vec![0; sizes.len()];
    for (done, index) in order.into_iter().enumerate() {
        shares[index] = sizes[index].min(room / (sizes.len() - done));
        room -= shares[index];
    }
    shares
}

/// Adds the number of definitions beyond the limit, and advice on how to see them. Suggests a limit only if all
/// definitions are likely to fit.
fn push_more(sections: &mut Sections, more: u64, definitions: &Definitions, max: usize) {
    if more > 0 {
        let own = definitions.shown.iter().filter(|definition| definition.kind != DefinitionKind::System);
        let (count, size) = own.fold((0, 0), |(count, size), line| (count + 1, size + length(&definition_line(line))));
        let all = count + more;
        let target = sections.begin();
        if all <= MAX_SUGGESTED_LIMIT && size as u64 / count.max(1) * all <= max as u64 {
            let rest = if more == 1 { "it" } else { "them all" };
            _ = write!(target, "... {more} more; pass limit {all} to see {rest}.");
        } else {
            _ = write!(target, "... {more} more.{}", narrowing_hint(definitions, true));
        }
    }
}

/// Returns the text of describe-symbol.
#[must_use]
pub fn symbol(description: &SymbolDescription) -> String {
    match description {
        SymbolDescription::NotFound(sentence) => escape_output(sentence),
        SymbolDescription::Found(roles) => {
            let mut sections = Sections(String::new());
            for Role { title, details } in roles {
                let target = sections.begin();
                target.push_str(title);
                for (label, text) in details {
                    let space = if text.starts_with('\n') { "" } else { " " };
                    _ = write!(target, "\n  {label}:{space}{}", text.replace('\n', "\n    "));
                }
            }
            sections.0
        }
    }
}

/// Returns the text of configure-limits.
#[must_use]
pub fn limits(limits: &Limits) -> String {
    let timeout = limits.timeout.map_or_else(
        || "none".to_owned(),
        |timeout| {
            let seconds = timeout.as_secs_f64();
            format!("{seconds} second{}", if seconds == 1.0 { "" } else { "s" })
        },
    );
    format!(
        "Current limits:\n  timeout: {timeout}\n  max-output: {}\n  max-answer: {}\n  on-error: {}",
        count_text(limits.max_output, "character"),
        count_text(limits.max_answer, "character"),
        limits.on_error.name()
    )
}

#[cfg(test)]
mod tests {
    use crate::config::Limits;

    #[test]
    fn limit_of_one_character_is_in_the_singular() {
        let text = super::limits(&Limits { max_output: 1, ..Limits::default() });
        assert!(text.contains("\n  max-output: 1 character\n"), "{text}");
    }
}
