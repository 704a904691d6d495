//! The tools that this process offers to its clients. Messages name no other tools.

use parking_lot::RwLock;

/// The names of the listed tools; `None` in a process that is not a server, where messages may name every tool.
static LISTED: RwLock<Option<Vec<String>>> = RwLock::new(None);

/// The tools for a held evaluation. The condition [`DEBUGGER`] in a text stands for any of these tools.
const DEBUGGER_TOOLS: [&str; 3] = ["invoke-restart", "eval-in-frame", "resume-from-frame"];

/// The condition that stands for any of the tools for a held evaluation.
pub(crate) const DEBUGGER: &str = "debugger";

/// Sets the listed tools of the process.
#[cfg(feature = "mcp")]
pub(crate) fn set(names: Vec<String>) {
    *LISTED.write() = Some(names);
}

/// Returns true if messages may name the tool.
pub(crate) fn has(tool: &str) -> bool {
    LISTED.read().as_ref().is_none_or(|names| is_among(tool, |name| names.iter().any(|listed| listed == name)))
}

/// Returns `text` if messages may name all of `tools`, otherwise an empty string.
pub(crate) fn with<'a>(tools: &[&str], text: &'a str) -> &'a str {
    if tools.iter().all(|tool| has(tool)) { text } else { "" }
}

/// Returns the tools for a held evaluation that messages may name, as a client would call them.
pub(crate) fn debugger() -> impl Iterator<Item = &'static str> {
    let look = [("get-backtrace", "get-backtrace with locals")];
    let act = DEBUGGER_TOOLS.into_iter().chain(["abort-evaluation"]).map(|tool| (tool, tool));
    look.into_iter().chain(act).filter(|(tool, _)| has(tool)).map(|(_, text)| text)
}

/// Returns true if `has` returns true for `tool`. The name [`DEBUGGER`] stands for the tools for a held evaluation: returns
/// true if `has` returns true for any of these tools.
pub(crate) fn is_among(tool: &str, has: impl Fn(&str) -> bool) -> bool {
    if tool == DEBUGGER { DEBUGGER_TOOLS.into_iter().any(has) } else { has(tool) }
}

/// Resolves the conditional parts of a text: `[[a|text]]` becomes `text` if tool `a` is listed, `[[a&b|text]]` if tools `a`
/// and `b` are listed, `[[!a|text]]` if tool `a` is not listed; otherwise the part is removed. Conditional parts do not
/// nest.
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
        assert_eq!(with(&["resume-from-frame"]), "a none held.");
    }
}
