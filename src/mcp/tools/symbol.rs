//! The tool describe-symbol.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Flag, Text, text};
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, inspect, inspection_hints};
use crate::outcome::{Role, SymbolDescription};
use crate::report;
use crate::schema::json;

/// The tool describe-symbol.
pub(super) struct DescribeSymbol;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Symbol, such as car or my-app:run.
    name: Text,
    /// Package for a name without prefix.
    package: Option<Text>,
    /// Add the source of each definition.
    #[serde(default)]
    source: Flag,
}

impl ToolSpec for DescribeSymbol {
    const NAME: &'static str = "describe-symbol";
    const TITLE: &'static str = "Describe symbol";
    const DESCRIPTION: &'static str = "Describe any symbol, even SBCL's own: function, macro, variable with its value, \
        class, type, with lambda list, documentation and source location. Suggests similar names if nothing \
        matches.";
    const POLICY: CallPolicy = CallPolicy::INSPECTION;
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        inspection_hints()
    }

    fn call(_: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let Arguments { name, package, source } = arguments;
        let package = text(package);
        inspect(move |session, call| {
            let answer = move |found| call.answer_inspection(found);
            session.describe_symbol(&name.0, package.as_deref(), source.0, answer)
        })
    }
}

/// The meanings of a symbol.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Content {
    roles: Vec<RoleContent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_found: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct RoleContent {
    title: String,
    details: Vec<Detail>,
}

#[derive(Serialize, JsonSchema)]
struct Detail {
    label: String,
    text: String,
}

impl RoleContent {
    fn new(role: &Role) -> Self {
        let details = role.details.iter().map(|(label, text)| Detail { label: label.clone(), text: text.clone() });
        Self { title: role.title.clone(), details: details.collect() }
    }
}

impl ToolResult for SymbolDescription {
    fn text(&self, _: usize) -> String {
        report::symbol(self)
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&match self {
            Self::Found(roles) => Content { roles: roles.iter().map(RoleContent::new).collect(), not_found: None },
            Self::NotFound(sentence) => Content { roles: Vec::new(), not_found: Some(sentence.clone()) },
        })
    }
}
