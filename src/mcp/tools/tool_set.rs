//! `--tools`: which tools a server has.

use std::sync::Arc;

use rmcp::model::{JsonObject, Tool};
use serde_json::Value;

use super::{Offered, TOOLS, all, checkpoint, former, no_such_tool, reset, traits};
use crate::tool_names;

/// Which tools are listed. One that is not listed cannot be called either: it is as if there were none, so that whoever
/// starts the server decides what it can be asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum ToolSet {
    /// Every one.
    #[default]
    All,
    /// Those of the working loop.
    Core,
    /// The tools of this set that suit the image of a program, which has more in it than a session's definitions.
    Embedded(Box<Self>),
    /// These.
    Named(Vec<String>),
}

/// What a server tells a model of itself.
const INSTRUCTIONS: &str = include_str!("../instructions.md");

/// What does not hold in the image of a program, and what does.
const OF_PROGRAMS: (&str, &str) = (
    "If\nthe Lisp process dies (IMAGE-LOST), a new one takes its place and evaluates the definitions again; values assigned\n\
     later are lost.",
    "This\nimage is part of a running program, which uses at once what is defined here: what ends its process ends the\n\
     program.",
);

/// The last step of the working loop, and what it is where commands can join the image.
const LAST_STEP: (&str, &str) = (
    "#. Write the same to the file[[load-system|, load it]][[run-tests|, run-tests again; with `fresh` before you say that it \
     works]].",
    "#. Write it to the file and test in a shell: edit && sbcl-mcp test --attach --reload --suspects 3 SYSTEM",
);

/// Numbers the lines that begin with `#.`, in their order.
fn numbered(text: &str) -> String {
    let mut parts = text.split("#.");
    let mut numbered = parts.next().unwrap_or_default().to_owned();
    for (number, part) in (1..).zip(parts) {
        numbered += &format!("{number}.{part}");
    }
    numbered
}

/// Makes a tool's texts name listed tools alone, and takes out the choices that need other tools.
fn resolve(tool: &mut Tool, has: &dyn Fn(&str) -> bool) {
    tool.description = tool.description.take().map(|text| tool_names::resolve(&text, has).into());
    let mut schema = JsonObject::clone(&tool.input_schema);
    let properties = schema.get_mut("properties").and_then(Value::as_object_mut);
    for (name, property) in properties.into_iter().flatten() {
        if let Some(Value::String(description)) = property.get_mut("description") {
            *description = tool_names::resolve(description, has);
        }
        if let Some(Value::Array(choices)) = property.get_mut("enum").filter(|_| name == "on-error")
            && !tool_names::is_among(tool_names::DEBUGGER, has)
        {
            choices.retain(|choice| choice != "debug");
        }
    }
    tool.input_schema = Arc::new(schema);
}

impl ToolSet {
    /// What a server with these tools tells a model of itself. `joinable`: commands can join its image.
    pub(super) fn instructions(&self, joinable: bool) -> String {
        let text = match self {
            Self::Embedded(_) => INSTRUCTIONS.replace(OF_PROGRAMS.0, OF_PROGRAMS.1),
            _ if joinable => INSTRUCTIONS.replace(LAST_STEP.0, LAST_STEP.1),
            _ => INSTRUCTIONS.to_owned(),
        };
        numbered(tool_names::resolve(&text, |tool| self.has(tool)).trim_end())
    }

    /// Takes what the command line says: `all`, `core`, or names with commas between.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.trim() {
            "all" => return Ok(Self::All),
            "core" => return Ok(Self::Core),
            _ => {}
        }
        let names = text.split(',').map(|name| name.trim().replace('_', "-"));
        let names = names.flat_map(|name| former::successors(&name).into_iter().map(str::to_owned).collect::<Vec<_>>());
        let names: Vec<String> = names.collect();
        let known = all();
        match names.iter().find(|name| !known.iter().any(|tool| tool.name == **name)) {
            Some(unknown) => Err(format!("{} Or all, or core.", no_such_tool(unknown, &known))),
            None => Ok(Self::Named(names)),
        }
    }

    /// Whether this tool is one of them.
    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Core => traits(name).core,
            Self::Embedded(tools) => {
                ![reset::ResetSession::NAME, checkpoint::Checkpoint::NAME].contains(&name) && tools.has(name)
            }
            Self::Named(names) => names.iter().any(|known| known == name),
        }
    }

    /// Returns those of the tools that are for the image of a program.
    pub(in crate::mcp) fn embedded(self) -> Self {
        Self::Embedded(Box::new(self))
    }

    /// Returns the names of the tools, in the order of the list.
    pub(super) fn names(&self) -> Vec<String> {
        TOOLS.iter().filter(|tool| self.has(tool.name)).map(|tool| tool.name.to_owned()).collect()
    }

    /// The tools, in their order.
    pub(super) fn tools(&self) -> Vec<Tool> {
        let mut tools: Vec<_> = all().into_iter().filter(|tool| self.has(&tool.name)).collect();
        tools.iter_mut().for_each(|tool| resolve(tool, &|name| self.has(name)));
        tools
    }
}
