//! The tool list-definitions.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Count, Text, text};
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, inspect, inspection_hints};
use crate::mcp::recovery_context::RecoveryContext;
use crate::outcome::{Definition, DefinitionFilter, DefinitionQuery, Definitions};
use crate::report;
use crate::schema::json;

/// The tool list-definitions.
pub(super) struct ListDefinitions;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Kind of definition to list.
    #[serde(default, rename = "type")]
    filter: DefinitionFilter,
    /// Only definitions in this package, even from loaded systems.
    package: Option<Text>,
    /// Maximum number of definitions.
    #[serde(default)]
    limit: Count<10_000, 100>,
}

impl ToolSpec for ListDefinitions {
    const NAME: &'static str = "list-definitions";
    const TITLE: &'static str = "List definitions";
    const DESCRIPTION: &'static str = "List this session's functions, variables, macros, classes and packages, \
        with lambda lists and values; for loaded systems only counts.";
    const POLICY: CallPolicy = CallPolicy { core: true, ..CallPolicy::INSPECTION };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        inspection_hints()
    }

    fn call(_: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let Arguments { filter, package, limit } = arguments;
        let query = DefinitionQuery { filter, package: text(package), limit: limit.0 };
        // Forms that could not be restored have no kind and no package.
        let is_all = query.filter == DefinitionFilter::All && query.package.is_none();
        inspect(move |session, call| {
            session.definitions(&query, move |definitions| {
                let unrestored =
                    call.context.recovery.as_ref().filter(|_| is_all).map(RecoveryContext::unrestored_lines);
                let unrestored = unrestored.unwrap_or_default();
                call.answer_inspection(definitions.map(|definitions| Definitions { unrestored, ..definitions }));
            })
        })
    }
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Content {
    definitions: Vec<Definition>,
    more: u64,
    not_restored: Vec<String>,
}

impl ToolResult for Definitions {
    fn text(&self, max: usize) -> String {
        report::definitions(self, max)
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&Content { definitions: self.shown.clone(), more: self.more, not_restored: self.unrestored.clone() })
    }
}
