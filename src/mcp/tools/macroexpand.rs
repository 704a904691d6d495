//! The tool macroexpand.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Text, text};
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, inspection_hints, query};
use crate::outcome::{Expansion, ExpansionError, ExpansionStep};
use crate::report;
use crate::schema::json;
use crate::session::Operation;

/// The tool macroexpand.
pub(super) struct MacroExpand;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// The form, as Lisp source.
    form: Text,
    /// once: one step. full: until the form is no longer a macro form. all: subforms, too.
    #[serde(default)]
    depth: Depth,
    /// Package to read the form in.
    package: Option<Text>,
}

/// The depths of expansion, named as in lisp/tools/macroexpand.lisp.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Depth {
    Once,
    #[default]
    Full,
    All,
}

impl ToolSpec for MacroExpand {
    const NAME: &'static str = "macroexpand";
    const TITLE: &'static str = "Expand macros";
    const DESCRIPTION: &'static str = "Expand a macro form to source, and list the steps. Runs no code except \
        macro functions. Example: {\"form\": \"(with-open-file (s p) (read s))\"}.";
    const POLICY: CallPolicy = CallPolicy::INSPECTION;
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        inspection_hints()
    }

    fn call(_: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let depth = match arguments.depth {
            Depth::Once => "once",
            Depth::Full => "full",
            Depth::All => "all",
        };
        let operation = Operation::new(Self::NAME)
            .with("form", arguments.form.0)
            .with("depth", depth)
            .with_optional("package", text(arguments.package));
        query::<Expansion>(operation)
    }
}

/// The expansion of a form.
#[derive(Serialize, JsonSchema)]
pub(super) struct Content {
    steps: Vec<ExpansionStep>,
    notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expansion: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ExpansionError>,
}

impl ToolResult for Expansion {
    fn text(&self, _: usize) -> String {
        report::expansion(self)
    }

    fn structured_content(&self, max: usize) -> Value {
        json(&Content {
            steps: self.steps.clone(),
            notes: self.notes.clone(),
            expansion: (!self.text.is_empty()).then(|| report::cut(self.text.clone(), max)),
            error: self.error.clone(),
        })
    }

    fn is_error(&self) -> bool {
        self.error.is_some()
    }
}
