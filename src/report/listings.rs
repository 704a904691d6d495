//! Definitions, symbols, limits.

use std::fmt::Write as _;

use super::Sections;
use super::escape::escape_markers;
use crate::config::Limits;
use crate::outcome::{DefinitionKind, Definitions, Role, SymbolDescription};

const RESET: &str = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";

/// The answer of reset-session, which also says what it ended.
#[must_use]
pub fn reset(notices: &[String]) -> String {
    let mut sections = Sections(String::new());
    sections.notices(notices);
    sections.begin().push_str(RESET);
    sections.0
}

/// The answer of list-definitions.
#[must_use]
pub fn definitions(definitions: &Definitions) -> String {
    let mut sections = Sections(String::new());
    let mut more = definitions.more;
    for group in definitions.shown.chunk_by(|a, b| a.kind == b.kind) {
        if group[0].kind == DefinitionKind::System {
            push_more(&mut sections, std::mem::take(&mut more), definitions);
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
        for definition in group {
            _ = write!(target, "\n- {}", escape_markers(&definition.text));
        }
    }
    push_more(&mut sections, more, definitions);
    if sections.0.is_empty() { "No definitions in this session.".to_owned() } else { sections.0 }
}

fn push_more(sections: &mut Sections, more: u64, definitions: &Definitions) {
    if more > 0 {
        let own = definitions.shown.iter().filter(|definition| definition.kind != DefinitionKind::System).count();
        _ = write!(sections.begin(), "... {more} more; ask for limit {} to see them all.", own as u64 + more);
    }
}

/// The answer of describe-symbol.
#[must_use]
pub fn symbol(description: &SymbolDescription) -> String {
    match description {
        SymbolDescription::NotFound(sentence) => sentence.clone(),
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

/// The answer of configure-limits.
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
        "Current limits:\n  timeout: {timeout}\n  max-output: {} characters\n  max-answer: {} characters\n  \
         on-error: {}",
        limits.max_output,
        limits.max_answer,
        limits.on_error.name()
    )
}
