//! macroexpand.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::schema::{choice, text};
use super::{Arguments, Fault, Reply, Step, define, inspection, query};
use crate::session::Operation;

pub(super) const NAME: &str = "macroexpand";

/// As lisp/macroexpand.lisp has them.
const DEPTHS: &[(&str, &str)] = &[("once", "once"), ("full", "full"), ("all", "all")];

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Expand macros",
        "Expand a macro form, as source, with the steps named. Evaluates nothing but macro functions: {\"form\": \
        \"(with-open-file (s p) (read s))\"}.",
        json!({
            "form": text("The form, as Lisp source."),
            "depth": choice(DEPTHS, Some("full"), "once: one step. full: until the form itself is no macro form. all: \
                subforms, too."),
            "package": text("Package to read the form in."),
        }),
        &["form"],
        inspection(),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["form", "depth", "package"], 1, arguments)?;
    let operation = Operation::new(NAME)
        .with("form", arguments.text("form")?)
        .with("depth", arguments.choice("depth", DEPTHS)?.unwrap_or("full"))
        .maybe("package", arguments.optional_text("package")?);
    query(operation, Reply::Expansion)
}
