//! describe-symbol.

use rmcp::RoleServer;
use rmcp::model::{JsonObject, Tool};
use rmcp::service::RequestContext;
use serde_json::json;
use tokio::sync::oneshot;

use super::wait::wait;
use super::{Answer, Arguments, Reply, define, inspection};
use crate::Session;

pub(super) const NAME: &str = "describe-symbol";

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Describe symbol",
        "Tell what a symbol means: function, macro, variable with its value, class, type, with argument list, type, \
         documentation and source location. Works for SBCL's own symbols and for yours. Use it before calling \
         something unfamiliar. A name that does not exist gets near names.",
        json!({
            "name": {
                "type": "string",
                "description": "The symbol as the Lisp reader would read it: car, my-app:run, sb-ext:*gc-run-time*.",
            },
            "package": {
                "type": "string",
                "description": "Package to look it up in when the name has no prefix. Default: the session's current package.",
            },
            "source": {
                "type": "boolean",
                "default": false,
                "description": "Add the text of each definition, from its file or from the code that was evaluated.",
            },
        }),
        &["name"],
        inspection(),
    )
}

pub(super) async fn call(session: &Session, arguments: JsonObject, context: &RequestContext<RoleServer>) -> Answer {
    let mut arguments = Arguments::new(NAME, &["name", "package", "source"], 1, arguments)?;
    let name = arguments.text("name")?;
    let package = arguments.optional_text("package")?;
    let source = arguments.flag("source")?;
    let (answer, reply) = oneshot::channel();
    session.describe_symbol(&name, package.as_deref(), source, move |description| drop(answer.send(description)));
    let description = wait(context, reply, || ()).await??;
    Ok(Reply::Symbol(description))
}
