//! load.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::ask::{self, Asked};
use super::limits::{on_error, on_error_schema, timeout, timeout_schema_with};
use super::schema::{choice, text};
use super::system::{Definitions, System, absolute, existing, pathname};
use super::{Arguments, Call, Fault, Step, background, define, evaluation_hints, later};
use crate::session::Operation;
use crate::{Evaluation, OnError, Session, TimeLimit, report};

pub(super) const NAME: &str = "load";

const DESCRIPTION: &str = "Load an ASDF system with its dependencies, or a Lisp file, into the session; compiles what \
    changed on disk. Use it after editing files, in place of asdf:load-system. Finds a system by name, or by the .asd \
    file in or near `directory`. [warnings] have file, line and form; [notice] names \
    variables that keep an old value, and definitions that a file no longer has. Example: {\"system\": \"my-app\"}.";

const FORCE: [(&str, Option<&str>); 3] = [("none", None), ("self", Some("self")), ("all", Some("all"))];

/// The time limit where none is given.
const TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "system": text("An ASDF system, as `my-app/tests`."),
        "path": text("Or a .lisp, .fasl or .asd file, or a directory with an .asd."),
        "force": choice(
            &FORCE,
            Some("none"),
            "Reload what is up to date: the system it`self`, or `all` it depends on.",
        ),
        "directory": text("Where to look for the .asd first."),
        "package": text("Current package meanwhile."),
        "timeout": timeout_schema_with("600"),
        "on-error": on_error_schema("What to do on a failure."),
    });
    background::add_properties(&mut properties);
    define(NAME, "Load a system or file", DESCRIPTION, properties, &[], evaluation_hints())
}

pub(super) fn call(call: &Call, arguments: JsonObject) -> Result<Step, Fault> {
    let session = call.session().clone();
    let asked = Asked::new(&call.context, &arguments);
    let known = &["system", "path", "force", "directory", "package", "timeout", "on-error", "background", "wait"];
    let mut arguments = Arguments::new(NAME, known, 0, arguments)?;
    let force = arguments.choice("force", &FORCE)?.flatten();
    let system = arguments.optional_text("system")?;
    let path = arguments.optional_text("path")?;
    let directory = arguments.optional_text("directory")?;
    let target = Target::of(system.as_deref(), path.as_deref(), directory.as_deref())?;
    let mut evaluation = Evaluation::new(target.code(force));
    let operation = target.operation(force);
    evaluation.package = arguments.optional_text("package")?;
    let patience = background::patience(&mut arguments)?;
    evaluation.timeout = match timeout(&mut arguments)? {
        TimeLimit::Default if patience.is_none() => TimeLimit::Of(TIMEOUT),
        limit => limit,
    };
    let on_error = background::on_error(&session, on_error(&mut arguments)?, patience)?;
    evaluation.hold = on_error != OnError::Abort;
    let asks = on_error == OnError::Ask;
    let job = background::Job::operation(evaluation, operation).reporting(Session::progress_so_far);
    later(move |call| {
        background::evaluate(call, job, patience, move |call, outcome| {
            let outcome = if outcome.is_error() { outcome } else { Arc::new(report::with_brief_output(&outcome)) };
            if asks { ask::settle(call, asked, outcome) } else { call.reply(outcome) }
        });
    })
}

/// What is to be loaded.
#[derive(Debug)]
enum Target {
    System(System),
    File(PathBuf),
}

impl Target {
    fn of(system: Option<&str>, path: Option<&str>, directory: Option<&str>) -> Result<Self, Fault> {
        match (system, path, directory) {
            (Some(_), Some(_), _) => Err(Fault::Value("load takes system or path, not both.".to_owned())),
            (Some(system), None, _) => System::find(system, directory, &Definitions::default()).map(Self::System),
            (None, Some(path), _) => {
                let path = match directory {
                    Some(directory) => existing(directory)?.join(path),
                    None => absolute(path)?,
                };
                if path.is_dir() {
                    System::of_directory(&path).map(Self::System)
                } else if path.extension() == Some(OsStr::new("asd")) && path.is_file() {
                    Ok(Self::System(System::of_definition(&path)))
                } else {
                    Ok(Self::File(path))
                }
            }
            (None, None, Some(directory)) => System::of_directory(&existing(directory)?).map(Self::System),
            (None, None, None) => Err(Fault::Value(
                "load needs the argument system or path. It takes: system, path, force, directory, package, \
                 timeout, on-error."
                    .to_owned(),
            )),
        }
    }

    /// What evaluates to the same.
    fn code(&self, force: Option<&str>) -> String {
        match self {
            Self::System(system) => system.code(force),
            Self::File(path) => format!("(cl:load {})", pathname(&path.display().to_string())),
        }
    }

    fn operation(&self, force: Option<&str>) -> Operation {
        let load = Operation::new("load");
        match self {
            Self::System(system) => system.of(load.maybe("force", force)),
            Self::File(path) => load.with("path", path.display().to_string()),
        }
    }
}
