//! find-references.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::schema::{choice, text, whole};
use super::{Arguments, Fault, Reply, Step, define, inspection, query};
use crate::session::Operation;

pub(super) const NAME: &str = "find-references";

const DEFAULT_LIMIT: u64 = 50;
const MAX_LIMIT: u64 = 1_000;

/// As lisp/find-references.lisp has them.
const RELATIONS: [&str; 9] =
    ["callers", "callees", "references", "sets", "binds", "expansions", "methods", "subclasses", "tests"];

fn relations() -> [(&'static str, &'static str); 9] {
    RELATIONS.map(|relation| (relation, relation))
}

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Find references",
        "List who calls a function, or another relation, a line each: what, where, the line of source there. Works \
        for loaded and evaluated code: {\"name\": \"*db*\", \"relation\": \"sets\"}.",
        json!({
            "name": text("As my-app:run or (setf slot)."),
            "relation": choice(&relations(), None, "callees: what it calls. references, sets, binds: of a variable. \
                expansions: of a macro. methods: of a generic function or class. tests: those that call it, \
                indirectly too. Default: callers."),
            "package": text("Package for a name without prefix."),
            "limit": whole(1..=MAX_LIMIT, DEFAULT_LIMIT, "How many to list."),
        }),
        &["name"],
        inspection(),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["name", "relation", "limit", "package"], 1, arguments)?;
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
        .maybe("relation", arguments.choice("relation", &relations())?)
        .maybe("package", arguments.optional_text("package")?)
        .with("limit", arguments.count("limit", MAX_LIMIT, DEFAULT_LIMIT)?);
    query(operation, Reply::References)
}
