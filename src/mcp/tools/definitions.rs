//! list-definitions.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::{Arguments, Fault, Reply, Step, define, inspection, later};
use crate::report::DefinitionFilter;

pub(super) const NAME: &str = "list-definitions";

const TYPES: &[(&str, DefinitionFilter)] = &[
    ("all", DefinitionFilter::All),
    ("functions", DefinitionFilter::Functions),
    ("variables", DefinitionFilter::Variables),
    ("macros", DefinitionFilter::Macros),
    ("classes", DefinitionFilter::Classes),
];

pub(super) fn tool() -> Tool {
    let types: Vec<_> = TYPES.iter().map(|(word, _)| *word).collect();
    define(
        NAME,
        "List definitions",
        "List what this session has defined, with lambda lists and values: functions, variables, macros, classes, \
         packages, loaded systems. What came with SBCL is left out. Use it to see where you are, after a break or a \
         reset.",
        json!({
            "type": {
                "type": "string",
                "enum": types,
                "default": "all",
                "description": "Which kind of definitions to list.",
            },
        }),
        &[],
        inspection(),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["type"], 0, arguments)?;
    let filter = arguments.choice("type", TYPES)?.unwrap_or_default();
    later(move |call| {
        let session = call.session().clone();
        session.definitions(move |result| call.answer(result.map(|found| Reply::Definitions(found, filter))));
    })
}
