//! list-definitions.

use rmcp::RoleServer;
use rmcp::model::{JsonObject, Tool};
use rmcp::service::RequestContext;
use serde_json::json;
use tokio::sync::oneshot;

use super::wait::wait;
use super::{Answer, Arguments, Reply, define, inspection};
use crate::Session;
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

pub(super) async fn call(session: &Session, arguments: JsonObject, context: &RequestContext<RoleServer>) -> Answer {
    let mut arguments = Arguments::new(NAME, &["type"], 0, arguments)?;
    let filter = arguments.choice("type", TYPES)?.unwrap_or_default();
    let (answer, reply) = oneshot::channel();
    session.definitions(move |definitions| drop(answer.send(definitions)));
    let definitions = wait(context, reply, || ()).await??;
    Ok(Reply::Definitions(definitions, filter))
}
