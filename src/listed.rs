//! The tools that this process offers to its clients: no text names another one.

use std::sync::OnceLock;

/// The names of the listed tools; unset in a process that is no server, where every tool may be named.
static LISTED: OnceLock<Vec<String>> = OnceLock::new();

/// The tools for a held evaluation, which together have the name [`DEBUGGER`] in conditions.
const DEBUGGER_TOOLS: [&str; 6] =
    ["invoke-restart", "frame-locals", "eval-in-frame", "return-from-frame", "restart-frame", "abort-evaluation"];

/// Stands for any of the tools for a held evaluation.
pub(crate) const DEBUGGER: &str = "debugger";

/// Sets the listed tools. The first call counts: a process has one set of tools.
#[cfg(feature = "mcp")]
pub(crate) fn set(names: Vec<String>) {
    let _ = LISTED.set(names);
}

/// Returns true if texts may name the tool.
pub(crate) fn has(tool: &str) -> bool {
    LISTED.get().is_none_or(|names| is_among(tool, |name| names.iter().any(|listed| listed == name)))
}

/// Returns `text` if all of `tools` may be named, or else nothing.
pub(crate) fn with<'a>(tools: &[&str], text: &'a str) -> &'a str {
    if tools.iter().all(|tool| has(tool)) { text } else { "" }
}

/// Returns the names of the tools for a held evaluation that may be named.
pub(crate) fn debugger() -> impl Iterator<Item = &'static str> {
    DEBUGGER_TOOLS.into_iter().filter(|tool| has(tool))
}

/// Returns whether the tool, or any of [`DEBUGGER`], is one of those that `has` knows.
pub(crate) fn is_among(tool: &str, has: impl Fn(&str) -> bool) -> bool {
    if tool == DEBUGGER { DEBUGGER_TOOLS.into_iter().any(has) } else { has(tool) }
}

/// Resolves the conditional parts of a text: `[[a|text]]` stands for `text` if tool `a` is listed, `[[a&b|text]]` if both
/// are, `[[!a|text]]` if `a` is not. The parts do not nest.
#[cfg(feature = "mcp")]
pub(crate) fn resolve(text: &str, has: impl Fn(&str) -> bool) -> String {
    let mut resolved = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("[[") {
        resolved.push_str(before);
        let (part, after) = after.split_once("]]").expect("a conditional part ends");
        let (condition, part) = part.split_once('|').expect("a conditional part has a condition");
        let holds = |name: &str| match name.strip_prefix('!') {
            Some(name) => !is_among(name, &has),
            None => is_among(name, &has),
        };
        if condition.split('&').all(holds) {
            resolved.push_str(part);
        }
        rest = after;
    }
    resolved + rest
}

#[cfg(all(test, feature = "mcp"))]
mod tests {
    use super::resolve;

    #[test]
    fn a_conditional_part_is_shown_when_its_tools_are_listed() {
        let text = "a[[x| x]][[x&y| both]][[!x| none]][[debugger| held]].";
        let with = |tools: &[&str]| resolve(text, |tool| tools.contains(&tool));
        assert_eq!(with(&["x"]), "a x.");
        assert_eq!(with(&["x", "y"]), "a x both.");
        assert_eq!(with(&["restart-frame"]), "a none held.");
    }
}
