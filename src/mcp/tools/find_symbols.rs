//! The tool find-symbols.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::arguments::{Count, Flag, Text, text};
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, inspection_hints, query};
use crate::outcome::FoundSymbols;
use crate::report;
use crate::schema::json;
use crate::session::Operation;

/// The tool find-symbols.
pub(super) struct FindSymbols;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Part of a name, a glob (* and ?), or several parts that must all occur in the name. alexandria:map searches that package; alexandria: lists it.
    query: Text,
    /// Only this package.
    package: Option<Text>,
    /// Only symbols of this type.
    #[serde(rename = "type", alias = "kind")]
    kind: Option<Kind>,
    /// Only exported symbols.
    #[serde(default)]
    external: Flag,
    /// Maximum number of symbols.
    #[serde(default)]
    limit: Count<1_000, 30>,
}

/// The kinds of symbols, named as in lisp/tools/find-symbols.lisp.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Function,
    Macro,
    Variable,
    Class,
    Package,
}

impl Kind {
    /// Returns the name by which Lisp knows the kind.
    fn name(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Macro => "macro",
            Self::Variable => "variable",
            Self::Class => "class",
            Self::Package => "package",
        }
    }
}

impl ToolSpec for FindSymbols {
    const NAME: &'static str = "find-symbols";
    const TITLE: &'static str = "Find symbols";
    const DESCRIPTION: &'static str = "Search symbols and packages by name, best matches first, with kind, lambda list \
        and first line of documentation: {\"query\": \"with-*-file\"}.[[describe-symbol| describe-symbol has details.]]";
    const POLICY: CallPolicy = CallPolicy::INSPECTION;
    type Arguments = Arguments;
    type Content = FoundSymbols;

    fn hints() -> ToolAnnotations {
        inspection_hints()
    }

    fn call(_: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let operation = Operation::new(Self::NAME)
            .with("query", arguments.query.0)
            .with_optional("package", text(arguments.package))
            .with_optional("kind", arguments.kind.map(Kind::name))
            .with("external", arguments.external.0)
            .with("limit", arguments.limit.0);
        query::<FoundSymbols>(operation)
    }
}

impl ToolResult for FoundSymbols {
    fn text(&self, max: usize) -> String {
        report::symbols_found(self, max)
    }

    fn structured_content(&self, _: usize) -> Value {
        json(self)
    }
}
