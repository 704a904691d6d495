//! The tools that this process offers to its clients, and the names by which messages refer to tools. Messages name only
//! tools that their [`Audience`] can use.

use parking_lot::RwLock;

use crate::audience::Audience;

/// The names of the listed tools; `None` in a process that is not a server, where messages may name every tool.
static LISTED_TOOLS: RwLock<Option<Vec<String>>> = RwLock::new(None);

/// The tools for a held evaluation. [`ANY_DEBUGGER_TOOL`] stands for any of these tools.
const DEBUGGER_TOOLS: [&str; 3] = ["invoke-restart", "eval-in-frame", "resume-from-frame"];

/// A name that stands for any of the tools for a held evaluation. The functions of this module accept it in place of a
/// tool's name.
pub(crate) const ANY_DEBUGGER_TOOL: &str = "debugger";

/// Sets the names of the tools that this process lists to its clients.
#[cfg(feature = "mcp")]
pub(crate) fn set_listed_tools(names: Vec<String>) {
    *LISTED_TOOLS.write() = Some(names);
}

/// The tools that commands of the REPL stand for, with the names of these commands.
const REPL_COMMANDS: [(&str, &str); 2] = [("get-backtrace", ":bt"), ("abort-evaluation", ":abort")];

/// Returns true if this process lists the tool to its clients.
pub(crate) fn is_listed(tool: &str) -> bool {
    LISTED_TOOLS
        .read()
        .as_ref()
        .is_none_or(|names| is_tool_available(tool, |name| names.iter().any(|listed| listed == name)))
}

/// Returns true if messages may name the tool: if the current audience can call the tool.
pub(crate) fn is_usable(tool: &str) -> bool {
    match Audience::current() {
        Audience::Agent => is_listed(tool),
        // The server keeps the evaluation when the person's command has ended, so a client with tools can still read it.
        Audience::AttachedShell => tool == "check-evaluation" && is_listed(tool),
        Audience::Shell | Audience::Repl => false,
    }
}

/// Returns `text` if messages may name all of `tools`, otherwise an empty string.
pub(crate) fn if_usable<'a>(tools: &[&str], text: &'a str) -> &'a str {
    if tools.iter().all(|tool| is_usable(tool)) { text } else { "" }
}

/// Returns the name by which the current audience uses the tool: the tool's own name, or the name of a command. `None` if the
/// audience has neither.
pub(crate) fn name_of(tool: &'static str) -> Option<&'static str> {
    match Audience::current() {
        Audience::Repl => REPL_COMMANDS.iter().find(|(known, _)| *known == tool).map(|(_, command)| *command),
        _ => is_usable(tool).then_some(tool),
    }
}

/// Returns the tools for a held evaluation that messages may name, worded for messages, such as `get-backtrace with locals`.
pub(crate) fn usable_debugger_tools() -> impl Iterator<Item = &'static str> {
    let look = [("get-backtrace", "get-backtrace with locals")];
    let act = DEBUGGER_TOOLS.into_iter().chain(["abort-evaluation"]).map(|tool| (tool, tool));
    look.into_iter().chain(act).filter(|(tool, _)| is_usable(tool)).map(|(_, text)| text)
}

/// Returns true if a tool is available. `has` returns true for the name of an available tool. The name
/// [`ANY_DEBUGGER_TOOL`] is available if any tool for a held evaluation is available.
pub(crate) fn is_tool_available(tool: &str, has: impl Fn(&str) -> bool) -> bool {
    if tool == ANY_DEBUGGER_TOOL { DEBUGGER_TOOLS.into_iter().any(has) } else { has(tool) }
}

/// Resolves the conditional parts of `text`. `[[a|part]]` becomes `part` if tool `a` is listed, `[[a&b|part]]` if tools `a`
/// and `b` are listed, and `[[!a|part]]` if tool `a` is not listed; otherwise the part is removed. `has` returns true for
/// listed tools. Conditional parts do not nest.
#[cfg(feature = "mcp")]
pub(crate) fn resolve_conditions(text: &str, has: impl Fn(&str) -> bool) -> String {
    let mut resolved = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("[[") {
        resolved.push_str(before);
        let (part, after) = after.split_once("]]").expect("a conditional part ends");
        let (condition, part) = part.split_once('|').expect("a conditional part has a condition");
        let holds = |name: &str| match name.strip_prefix('!') {
            Some(name) => !is_tool_available(name, &has),
            None => is_tool_available(name, &has),
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
    use super::resolve_conditions;

    #[test]
    fn a_conditional_part_is_shown_when_its_tools_are_listed() {
        let text = "a[[x| x]][[x&y| both]][[!x| none]][[debugger| held]].";
        let with = |tools: &[&str]| resolve_conditions(text, |tool| tools.contains(&tool));
        assert_eq!(with(&["x"]), "a x.");
        assert_eq!(with(&["x", "y"]), "a x both.");
        assert_eq!(with(&["resume-from-frame"]), "a none held.");
    }
}
