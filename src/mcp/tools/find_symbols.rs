//! find-symbols.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::schema::{choice, flag, text, whole};
use super::{Arguments, Fault, Reply, Step, define, inspection, query};
use crate::session::Operation;

pub(super) const NAME: &str = "find-symbols";

const DEFAULT_LIMIT: u64 = 30;
const MAX_LIMIT: u64 = 1_000;

/// As lisp/find-symbols.lisp has them.
const KINDS: &[(&str, &str)] = &[
    ("function", "function"),
    ("macro", "macro"),
    ("variable", "variable"),
    ("class", "class"),
    ("package", "package"),
];

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Find symbols",
        "Search symbols and packages by name, best matches first, with kind, lambda list and first line of \
        documentation: {\"query\": \"with-*-file\"}.[[describe-symbol| describe-symbol tells all about one.]]",
        json!({
            "query": text("Part of a name, a glob (* and ?), or several parts that it must have. alexandria:map \
                searches that package; alexandria: lists it."),
            "package": text("Only this package."),
            "kind": choice(KINDS, None, "Only this kind."),
            "external": flag("Only what packages export."),
            "limit": whole(1..=MAX_LIMIT, DEFAULT_LIMIT, "How many to list."),
        }),
        &["query"],
        inspection(),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["query", "package", "kind", "external", "limit"], 1, arguments)?;
    let operation = Operation::new(NAME)
        .with("query", arguments.text("query")?)
        .maybe("package", arguments.optional_text("package")?)
        .maybe("kind", arguments.choice("kind", KINDS)?)
        .with("external", arguments.flag("external")?)
        .with("limit", arguments.count("limit", MAX_LIMIT, DEFAULT_LIMIT)?);
    query(operation, Reply::Symbols)
}
