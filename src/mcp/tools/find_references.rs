//! find-references.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::{Arguments, Fault, Reply, Step, define, inspection, later};
use crate::session::operation::Operation;

pub(super) const NAME: &str = "find-references";

const DEFAULT_LIMIT: u64 = 50;
const MAX_LIMIT: u64 = 1_000;

/// As lisp/find-references.lisp has them.
pub(super) const RELATIONS: [&str; 9] =
    ["callers", "callees", "references", "sets", "binds", "expansions", "methods", "subclasses", "tests"];

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Find references",
        "List who calls a function, or another relation, a line each: what, where, the line of source there. Works \
        for loaded and evaluated code: {\"name\": \"*db*\", \"relation\": \"sets\"}. Ends with what was not looked \
        at.",
        json!({
            "name": {"type": "string", "description": "As one types it: my-app:run, (setf slot)."},
            "relation": {
                "type": "string",
                "enum": RELATIONS,
                "description": "callees: what it calls. references, sets, binds: of a variable. expansions: of a macro. methods: of a generic function or class. tests: those that call it, indirectly too. Default: callers.",
            },
            "package": {
                "type": "string",
                "description": "Package for a name without prefix. Default: the current one.",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LIMIT,
                "default": DEFAULT_LIMIT,
                "description": "How many to list.",
            },
        }),
        &["name"],
        inspection(),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["name", "relation", "limit", "package"], 1, arguments)?;
    let relations = RELATIONS.map(|relation| (relation, relation));
    let name = arguments.text("name")?;
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
    let operation = Operation::new(NAME)
        .with("name", name)
        .maybe("relation", arguments.choice("relation", &relations)?)
        .maybe("package", arguments.optional_text("package")?)
        .with(
            "limit",
            arguments.whole("limit", 1..=MAX_LIMIT, "a whole number from 1 to 1000")?.unwrap_or(DEFAULT_LIMIT),
        );
    later(move |call| {
        let session = call.session().clone();
        session.query(&operation, move |found| call.answer(found.map(Reply::References)));
    })
}
