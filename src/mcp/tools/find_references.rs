//! The tool find-references.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Count, Text, text};
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, inspection_hints, query};
use crate::outcome::References;
use crate::report;
use crate::schema::json;
use crate::session::Operation;

/// The tool find-references.
pub(super) struct FindReferences;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Name, such as my-app:run or (setf slot).
    name: Text,
    /// callees: functions that NAME calls. references, sets, binds: uses of a variable. expansions: uses of a macro. methods: of a generic function or class. tests: that call NAME, also indirectly. Default: callers.
    relation: Option<Relation>,
    /// Maximum number of references.
    #[serde(default)]
    limit: Count<1_000, 50>,
    /// Package for a name without prefix.
    package: Option<Text>,
}

/// The relations, named as in lisp/tools/find-references.lisp.
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

impl ToolSpec for FindReferences {
    const NAME: &'static str = "find-references";
    const TITLE: &'static str = "Find references";
    const DESCRIPTION: &'static str = "List a function's callers, or another relation, with name, place and source \
        line. Covers loaded and evaluated code. Example: {\"name\": \"*db*\", \"relation\": \"sets\"}.";
    const POLICY: CallPolicy = CallPolicy::INSPECTION;
    type Arguments = Arguments;
    type Content = References;

    fn hints() -> ToolAnnotations {
        inspection_hints()
    }

    fn call(_: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let name = arguments.name.0;
        let named = name.trim();
        if named.is_empty() {
            let reason =
                "find-references: name must be a function, variable, macro or class, such as my-app:run, not \"\".";
            return Err(Fault::Refusal(reason.to_owned()));
        }
        if named.starts_with("#:") {
            return Err(Fault::Refusal(format!(
                "find-references: nothing can refer to {named}: the reader makes a new symbol for each #: name."
            )));
        }
        let relation = arguments.relation.and_then(|relation| json(&relation).as_str().map(str::to_owned));
        let operation = Operation::new(Self::NAME)
            .with("name", name)
            .with_optional("relation", relation)
            .with_optional("package", text(arguments.package))
            .with("limit", arguments.limit.0);
        query::<References>(operation)
    }
}

impl ToolResult for References {
    fn text(&self, max: usize) -> String {
        report::references_found(self, max)
    }

    fn structured_content(&self, _: usize) -> Value {
        json(self)
    }
}
