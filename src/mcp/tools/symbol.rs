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
        "Tell what a symbol means: function, macro, variable with its value, class, type, with argument list, \
        documentation and source location. Works for SBCL's own symbols, too. A name that does not exist gets near \
        names.",
        json!({
            "name": text("The symbol as one types it: car, my-app:run."),
            "package": text("Package for a name without prefix. Default: the current one."),
            "source": flag("Add the text of each definition, from its file or from the code that was evaluated."),
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
