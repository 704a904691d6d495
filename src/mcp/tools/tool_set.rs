//! `--tools`: which tools a server has.

use rmcp::model::Tool;

use super::{all, checkpoint, no_such_tool, reset};

/// Which tools are listed. One that is not listed cannot be called either: it is as if there were none, so that whoever
/// starts the server decides what it can be asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum ToolSet {
    /// Every one.
    #[default]
    All,
    /// Those of the working loop.
    Core,
    /// Those for the image of a program that has more in it than a session's definitions.
    Embedded,
    /// These.
    Named(Vec<String>),
}

/// The tools of the working loop: evaluate or load, test, look at the failure, repair.
const CORE: [&str; 10] = [
    "evaluate-lisp",
    "load",
    "run-tests",
    "describe-last-error",
    "get-backtrace",
    "describe-symbol",
    "find-symbols",
    "evaluation",
    "reset-session",
    "configure-limits",
];

/// What a server tells a model of itself.
const INSTRUCTIONS: &str = include_str!("../instructions.md");

/// What does not hold in the image of a program, and what does.
const OF_PROGRAMS: [(&str, &str); 2] = [
    ("- checkpoint saves and restores the whole image; reset-session starts over and cannot be undone.\n", ""),
    (
        "If\nthe Lisp process dies (IMAGE-LOST), a new one takes its place and evaluates again what defined something; values\n\
         assigned later are lost.",
        "This\nimage is part of a running program, which uses at once what is defined here: what ends its process ends the\n\
         program.",
    ),
];

/// The last step of the working loop, and what it is where commands can join the image.
const LAST_STEP: (&str, &str) = (
    "5. Write the same to the file, load it, run-tests again.",
    "5. Write it to the file and test, as in a shell: edit && sbcl-mcp test --attach --reload --suspects 3 SYSTEM",
);

impl ToolSet {
    /// What a server with these tools tells a model of itself. `joinable`: commands can join its image.
    pub(super) fn instructions(&self, joinable: bool) -> String {
        let all = INSTRUCTIONS.trim_end().to_owned();
        match self {
            Self::Embedded => OF_PROGRAMS.iter().fold(all, |text, (server, program)| text.replace(server, program)),
            _ if joinable => all.replace(LAST_STEP.0, LAST_STEP.1),
            _ => all,
        }
    }

    /// Takes what the command line says: `all`, `core`, or names with commas between.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.trim() {
            "all" => return Ok(Self::All),
            "core" => return Ok(Self::Core),
            _ => {}
        }
        let names: Vec<String> = text.split(',').map(|name| name.trim().replace('_', "-")).collect();
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
            Self::Core => CORE.contains(&name),
            Self::Embedded => ![reset::NAME, checkpoint::NAME].contains(&name),
            Self::Named(names) => names.iter().any(|known| known == name),
        }
    }

    /// The tools, in their order.
    pub(super) fn tools(&self) -> Vec<Tool> {
        all().into_iter().filter(|tool| self.has(&tool.name)).collect()
    }
}
