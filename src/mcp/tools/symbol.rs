//! describe-symbol.

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::schema::{flag, text};
use super::{Arguments, Fault, Reply, Step, define, inspection, later};

pub(super) const NAME: &str = "describe-symbol";

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Describe symbol",
        "Describe a symbol, SBCL's own too: function, macro, variable with its value, class, type, with argument \
        list, documentation and source location. Suggests similar names when nothing matches.",
        json!({
            "name": text("The symbol, as car or my-app:run."),
            "package": text("Package for a name without prefix."),
            "source": flag("Add the text of each definition."),
        }),
        &["name"],
        inspection(),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["name", "package", "source"], 1, arguments)?;
    let name = arguments.text("name")?;
    let package = arguments.optional_text("package")?;
    let source = arguments.flag("source")?;
    later(move |call| {
        let session = call.session().clone();
        session.describe_symbol(&name, package.as_deref(), source, move |found| call.answer(found.map(Reply::Symbol)));
    })
}
