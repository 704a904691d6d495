//! find-references.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Count, Text, text};
use super::{Call, Fault, Finding, Offered, Step, Traits, inspection, query};
use crate::mcp::content::json;
use crate::outcome::References;
use crate::report;
use crate::session::Operation;

/// The tool.
pub(super) struct FindReferences;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// As my-app:run or (setf slot).
    name: Text,
    /// callees: what it calls. references, sets, binds: of a variable. expansions: of a macro. methods: of a generic function or class. tests: those that call it, indirectly too. Default: callers.
    relation: Option<Relation>,
    /// How many to list.
    #[serde(default)]
    limit: Count<1_000, 50>,
    /// Package for a name without prefix.
    package: Option<Text>,
}

/// As lisp/tools/find-references.lisp has it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Relation {
    Callers,
    Callees,
    References,
    Sets,
    Binds,
    Expansions,
    Methods,
    Subclasses,
    Tests,
}

impl Offered for FindReferences {
    const NAME: &'static str = "find-references";
    const TITLE: &'static str = "Find references";
    const DESCRIPTION: &'static str = "List who calls a function, or another relation, a line each: what, where, the line of source \
        there. Works for loaded and evaluated code: {\"name\": \"*db*\", \"relation\": \"sets\"}.";
    const TRAITS: Traits = Traits::LOOKS;
    type Arguments = Arguments;
    type Content = References;

    fn hints() -> ToolAnnotations {
        inspection()
    }

    fn call(_: &Call, arguments: Arguments) -> Result<Step, Fault> {
        let name = arguments.name.0;
        let named = name.trim();
        if named.is_empty() {
            let reason =
                "find-references: name must be that of a function, variable, macro or class, as my-app:run, not \"\".";
            return Err(Fault::Value(reason.to_owned()));
        }
        if named.starts_with("#:") {
            return Err(Fault::Value(format!(
                "find-references: nothing can refer to {named}: the reader makes another symbol each time."
            )));
        }
        let relation = arguments.relation.and_then(|relation| json(&relation).as_str().map(str::to_owned));
        let operation = Operation::new(Self::NAME)
            .with("name", name)
            .maybe("relation", relation)
            .maybe("package", text(arguments.package))
            .with("limit", arguments.limit.0);
        query::<References>(operation)
    }
}

impl Finding for References {
    fn text(&self, max: usize) -> String {
        report::references_found(self, max)
    }

    fn content(&self, _: usize) -> Value {
        json(self)
    }
}
