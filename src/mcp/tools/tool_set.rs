//! The set of tools that a server offers (`--tools`).

use std::sync::Arc;

use rmcp::model::{JsonObject, Tool};
use serde_json::Value;

use super::{
    TOOLS, ToolSpec, all_tool_definitions, checkpoint, former_names, policy, reset, run_tests, unknown_tool_message,
};
use crate::tool_names;

/// A set of tools. Other tools are neither listed nor callable, so that the person who starts the server decides what
/// clients can do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum ToolSet {
    /// All tools.
    #[default]
    All,
    /// The tools of the working loop: evaluate, load, test, inspect failures.
    Core,
    /// The tools of the given set, without those that would remove the definitions of a program that embeds the image.
    Embedded(Box<Self>),
    /// The tools with these names.
    Named(Vec<String>),
}

/// The server's instructions for a model.
const INSTRUCTIONS: &str = include_str!("../instructions.md");

/// The sentence of the instructions about the loss of the image.
const LOSS_WORDING: &str = "If\nthe Lisp process dies (IMAGE-LOST), a new process replaces it and, by default, restores the \
    last checkpoint and later definitions;\nvalues assigned later are lost.";

/// The replacement of [`LOSS_WORDING`] if the image is embedded in a program.
const EMBEDDED_WORDING: &str = "This\nimage is part of a running program: definitions take effect in it at once, and code \
    that ends the process ends\nthe program.";

/// The replacement of [`LOSS_WORDING`] if the server has no supervisor.
const UNSUPERVISED_WORDING: &str = "If\nthe Lisp process dies, this server and the session end with it.";

/// The part of the instructions about fresh images, which a program that embeds the image cannot start.
const FRESH_WORDING: &str = "; with `fresh` before you say that it works";

/// The last step of the working loop, and its replacement if commands in a shell can attach to the image.
const LAST_STEP_WORDING: (&str, &str) = (
    "#. Write the code to the file[[load-system|, load it]][[run-tests|, run-tests again; with `fresh` before you say that it \
     works]].",
    "#. Write the code to the file and test in a shell: edit && sbcl-mcp test --attach --reload --suspects 3 SYSTEM",
);

/// Replaces each `#.` with the number of its list item.
fn number_list_items(text: &str) -> String {
    let mut parts = text.split("#.");
    let mut numbered = parts.next().unwrap_or_default().to_owned();
    for (number, part) in (1..).zip(parts) {
        numbered += &format!("{number}.{part}");
    }
    numbered
}

/// Removes mentions of unlisted tools from a tool's texts, and choices that need unlisted tools.
fn remove_unlisted_tools(tool: &mut Tool, has: &dyn Fn(&str) -> bool) {
    tool.description = tool.description.take().map(|text| tool_names::resolve_conditions(&text, has).into());
    let mut schema = JsonObject::clone(&tool.input_schema);
    let properties = schema.get_mut("properties").and_then(Value::as_object_mut);
    for (name, property) in properties.into_iter().flatten() {
        if let Some(Value::String(description)) = property.get_mut("description") {
            *description = tool_names::resolve_conditions(description, has);
        }
        if let Some(Value::Array(choices)) = property.get_mut("enum").filter(|_| name == "on-error")
            && !tool_names::is_tool_available(tool_names::ANY_DEBUGGER_TOOL, has)
        {
            choices.retain(|choice| choice != "debug");
        }
    }
    tool.input_schema = Arc::new(schema);
}

/// Removes the arguments of run-tests that need a fresh image.
fn remove_fresh_images(tool: &mut Tool) {
    if tool.name == run_tests::RunTests::NAME {
        let mut schema = JsonObject::clone(&tool.input_schema);
        if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
            properties.retain(|name, _| name != "fresh" && name != "suspects");
        }
        tool.input_schema = Arc::new(schema);
    }
}

impl ToolSet {
    /// Returns the instructions for a model. `attachable` is true if commands in a shell can attach to the image, and
    /// `supervised` is true if a supervisor replaces a lost image.
    pub(super) fn instructions(&self, attachable: bool, supervised: bool) -> String {
        let loss = match self {
            Self::Embedded(_) => EMBEDDED_WORDING,
            _ if supervised => LOSS_WORDING,
            _ => UNSUPERVISED_WORDING,
        };
        let text = INSTRUCTIONS.replace(LOSS_WORDING, loss);
        let text = match self {
            Self::Embedded(_) => text.replace(FRESH_WORDING, ""),
            // The command `test` calls run-tests.
            _ if attachable && self.has(run_tests::RunTests::NAME) => {
                text.replace(LAST_STEP_WORDING.0, LAST_STEP_WORDING.1)
            }
            _ => text,
        };
        number_list_items(tool_names::resolve_conditions(&text, |tool| self.has(tool)).trim_end())
    }

    /// Parses the value of `--tools`: `all`, `core`, or a comma-separated list of names.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.trim() {
            "all" => return Ok(Self::All),
            "core" => return Ok(Self::Core),
            _ => {}
        }
        let names = text.split(',').map(|name| name.trim().replace('_', "-"));
        let names =
            names.flat_map(|name| former_names::successors(&name).into_iter().map(str::to_owned).collect::<Vec<_>>());
        let names: Vec<String> = names.collect();
        let known = all_tool_definitions();
        match names.iter().find(|name| !known.iter().any(|tool| tool.name == **name)) {
            Some(unknown) => {
                let reason = unknown_tool_message(unknown, &known);
                Err(format!(
                    "{reason} The words `all` and `core` name sets of tools, and cannot be combined with other names."
                ))
            }
            None => Ok(Self::Named(names)),
        }
    }

    /// Returns true if the set has this tool.
    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Core => policy(name).core,
            Self::Embedded(tools) => {
                ![reset::ResetSession::NAME, checkpoint::CheckpointTool::NAME].contains(&name) && tools.has(name)
            }
            Self::Named(names) => names.iter().any(|known| known == name),
        }
    }

    /// Returns this set for the image of a program: without the tools that would remove the program's own definitions.
    pub(in crate::mcp) fn embedded(self) -> Self {
        Self::Embedded(Box::new(self))
    }

    /// Returns the names of the tools, in the order of [`TOOLS`].
    pub(super) fn names(&self) -> Vec<String> {
        TOOLS.iter().filter(|tool| self.has(tool.name)).map(|tool| tool.name.to_owned()).collect()
    }

    /// Returns the definitions of the tools, in the order of [`TOOLS`].
    pub(super) fn tools(&self) -> Vec<Tool> {
        let mut tools: Vec<_> = all_tool_definitions().into_iter().filter(|tool| self.has(&tool.name)).collect();
        tools.iter_mut().for_each(|tool| remove_unlisted_tools(tool, &|name| self.has(name)));
        if let Self::Embedded(_) = self {
            tools.iter_mut().for_each(remove_fresh_images);
        }
        tools
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_name_the_shell_command_for_tests_only_with_the_tool_run_tests() {
        for (tools, expected) in [("all", true), ("core", true), ("evaluate-lisp,load-system", false)] {
            let instructions = ToolSet::parse(tools).expect("a tool set").instructions(true, true);
            assert_eq!(instructions.contains("sbcl-mcp test"), expected, "{tools}: {instructions}");
            assert_eq!(instructions.contains("Write the code to the file, load it."), !expected, "{instructions}");
        }
    }
}
