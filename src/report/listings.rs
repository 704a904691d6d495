//! Definitions, symbols, limits.

use std::fmt::Write as _;

use super::Sections;
use super::escape::escape_markers;
use crate::config::Limits;
use crate::outcome::{Definition, DefinitionKind, Role, SymbolDescription};

const RESET: &str = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";

/// The answer of reset-session, which also says what it ended.
#[must_use]
pub fn reset(notices: &[String]) -> String {
    let mut sections = Sections(String::new());
    sections.notices(notices);
    sections.begin().push_str(RESET);
    sections.0
}

/// Which definitions list-definitions shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DefinitionFilter {
    /// All of them, packages and systems too.
    #[default]
    All,
    /// Functions.
    Functions,
    /// Variables.
    Variables,
    /// Macros.
    Macros,
    /// Classes.
    Classes,
}

impl DefinitionFilter {
    pub(crate) fn admits(self, kind: DefinitionKind) -> bool {
        match self {
            Self::All => true,
            Self::Functions => kind == DefinitionKind::Function,
            Self::Variables => kind == DefinitionKind::Variable,
            Self::Macros => kind == DefinitionKind::Macro,
            Self::Classes => kind == DefinitionKind::Class,
        }
    }
}

/// The answer of list-definitions. `definitions` are sorted by kind.
#[must_use]
pub fn definitions(definitions: &[Definition], filter: DefinitionFilter) -> String {
    let mut sections = Sections(String::new());
    for group in definitions.chunk_by(|a, b| a.kind == b.kind) {
        let kind = group[0].kind;
        if !filter.admits(kind) {
            continue;
        }
        let target = sections.begin();
        target.push_str(match kind {
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
    if sections.0.is_empty() { "No definitions in this session.".to_owned() } else { sections.0 }
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
                    _ = write!(target, "\n  {label}: {}", text.replace('\n', "\n    "));
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
        "Current limits:\n  timeout: {timeout}\n  max-output: {} characters\n  max-answer: {} characters\n  on-error: {}",
        limits.max_output,
        limits.max_answer,
        limits.on_error.name()
    )
}
