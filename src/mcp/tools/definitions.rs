//! list-definitions.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::schema::{choice, text, whole};
use super::{Arguments, Fault, Reply, Step, define, inspection, later};
use crate::mcp::recovery_context::RecoveryContext;
use crate::outcome::{DefinitionFilter, DefinitionQuery, Definitions};

pub(super) const NAME: &str = "list-definitions";

/// How many are listed unless asked otherwise.
const DEFAULT_LIMIT: u64 = 100;
const MAX_LIMIT: u64 = 10_000;

const TYPES: &[(&str, DefinitionFilter)] = &[
    ("all", DefinitionFilter::All),
    ("functions", DefinitionFilter::Functions),
    ("variables", DefinitionFilter::Variables),
    ("macros", DefinitionFilter::Macros),
    ("classes", DefinitionFilter::Classes),
];

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "List definitions",
        "List what this session defined, with lambda lists and values: functions, variables, macros, classes, \
        packages, loaded systems (counted).",
        json!({
            "type": choice(TYPES, Some("all"), "Which kind to list."),
            "package": text("Only this package's, loaded systems' too."),
            "limit": whole(1..=MAX_LIMIT, DEFAULT_LIMIT, "How many to list."),
        }),
        &[],
        inspection(),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["type", "package", "limit"], 0, arguments)?;
    let query = DefinitionQuery {
        filter: arguments.choice("type", TYPES)?.unwrap_or_default(),
        package: arguments.optional_text("package")?,
        limit: arguments.count("limit", MAX_LIMIT, DEFAULT_LIMIT)?,
    };
    // What is not there belongs to no kind and no package.
    let is_all = query.filter == DefinitionFilter::All && query.package.is_none();
    later(move |call| {
        let session = call.session().clone();
        session.definitions(&query, move |definitions| {
            let unrestored = call.context.recovery.as_ref().filter(|_| is_all).map(RecoveryContext::unrestored);
            let unrestored = unrestored.unwrap_or_default();
            call.answer(definitions.map(|definitions| Reply::Definitions(Definitions { unrestored, ..definitions })));
        });
    })
}
