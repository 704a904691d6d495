//! The tool load-system.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::arguments::{Flag, Name, Text, Timeout, name, text};
use super::background::{self, Wait};
use super::limits::OnErrorChoice;
use super::system::{DefinitionCache, System, absolute_path, existing_directory, pathname, run_search};
use super::{Call, CallHandler, CallPolicy, Fault, ToolSpec, ask, evaluation_hints, handle_with};
use crate::schema;
use crate::session::Operation;
use crate::{Evaluation, OnError, Session, TimeLimit, report};

/// Default time limit of a load.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// The tool load-system.
pub(super) struct LoadSystem;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// ASDF system, such as `my-app/tests`.
    system: Option<Name>,
    /// In place of `system`: a .lisp, .fasl or .asd file, or a directory with an .asd.
    path: Option<Name>,
    /// Reload even if up to date. `self`: the system; `all`: its dependencies, too.
    #[serde(default)]
    force: Force,
    /// Directory to search first for the .asd.
    directory: Option<Name>,
    /// Current package during the load.
    package: Option<Text>,
    /// Seconds until TIMEOUT; 0: no limit. Default: 600.
    #[serde(default)]
    timeout: Timeout,
    /// On failure: `abort`, [[debugger|hold (`debug`) ]]or `ask` the user.
    on_error: Option<OnErrorChoice>,
    /// Answer at once; evaluate in the background (no default timeout).
    #[serde(default)]
    background: Flag,
    /// Wait this many seconds, then continue in the background.
    wait: Option<Wait>,
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Force {
    #[default]
    None,
    #[serde(rename = "self")]
    System,
    All,
}

impl Force {
    /// Returns the name by which Lisp knows the choice; `None` if up-to-date files are not reloaded.
    fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::System => Some("self"),
            Self::All => Some("all"),
        }
    }
}

/// Structured content: the result of the evaluation, and a report about the loaded system or file.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "the type only describes the schema: the content is made as for any evaluation")]
pub(super) struct Content {
    #[schemars(flatten)]
    evaluation: schema::Evaluation,
    loaded: Option<schema::LoadReport>,
}

impl ToolSpec for LoadSystem {
    const NAME: &'static str = "load-system";
    const TITLE: &'static str = "Load a system or file";
    const DESCRIPTION: &'static str = "Load an ASDF system with its dependencies, or a Lisp file, into the session; \
        compiles what changed on disk. Use after edits, in place of asdf:load-system. Finds a system by \
        name, or by the .asd file in or near `directory`. [warnings] have file, line and form; [notice] names \
        variables that keep an old value, and definitions that a file no longer has. Example: {\"system\": \
        \"my-app\"}.";
    const POLICY: CallPolicy = CallPolicy { is_slow: |_| true, asks_user: true, core: true, ..CallPolicy::NONE };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(call: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let session = call.session().clone();
        let force = arguments.force.name();
        let [system, path, directory] = [arguments.system, arguments.path, arguments.directory].map(name);
        let target = run_search(call, move |known| {
            Target::from_arguments(system.as_deref(), path.as_deref(), directory.as_deref(), known)
        })?;
        let mut evaluation = Evaluation::new(target.code(force));
        let operation = target.operation(force);
        evaluation.package = text(arguments.package);
        let wait_limit = background::wait_limit(arguments.background, arguments.wait);
        evaluation.timeout = match arguments.timeout.0 {
            TimeLimit::Default if wait_limit.is_none() => TimeLimit::Of(DEFAULT_TIMEOUT),
            limit => limit,
        };
        let on_error = background::resolve_on_error(&session, OnErrorChoice::value_of(arguments.on_error), wait_limit)?;
        evaluation.hold = on_error != OnError::Abort;
        let asks = on_error == OnError::Ask;
        let job = background::Job::operation(evaluation, operation).with_progress_text(Session::progress_part);
        handle_with(move |call| {
            background::evaluate(call, job, wait_limit, move |call, outcome| {
                let outcome = if outcome.is_error() { outcome } else { Arc::new(report::with_brief_output(&outcome)) };
                if asks { ask::answer_after_asking(call, outcome) } else { call.reply(outcome) }
            });
        })
    }
}

/// The system or file to load.
#[derive(Debug)]
enum Target {
    System(System),
    File(PathBuf),
}

impl Target {
    fn from_arguments(
        system: Option<&str>,
        path: Option<&str>,
        directory: Option<&str>,
        known: &DefinitionCache,
    ) -> Result<Self, Fault> {
        match (system, path, directory) {
            (Some(_), Some(_), _) => {
                Err(Fault::Refusal(format!("{} takes system or path, not both.", LoadSystem::NAME)))
            }
            (Some(system), None, _) => System::find(system, directory, known).map(Self::System),
            (None, Some(path), _) => {
                let path = match directory {
                    Some(directory) => existing_directory(directory)?.join(path),
                    None => absolute_path(path)?,
                };
                if path.is_dir() {
                    System::from_directory(&path).map(Self::System)
                } else if path.extension() == Some(OsStr::new("asd")) && path.is_file() {
                    Ok(Self::System(System::from_asd_file(&path)))
                } else {
                    Ok(Self::File(path))
                }
            }
            (None, None, Some(directory)) => System::from_directory(&existing_directory(directory)?).map(Self::System),
            (None, None, None) => Err(Fault::Refusal(format!(
                "{} needs system, path or directory. The tool takes: system, path, force, directory, package, timeout, \
                 on-error, background, wait.",
                LoadSystem::NAME
            ))),
        }
    }

    /// Returns Lisp code that loads the target, for the recovery log.
    fn code(&self, force: Option<&str>) -> String {
        match self {
            Self::System(system) => system.code(force),
            Self::File(path) => format!("(cl:load {})", pathname(&path.display().to_string())),
        }
    }

    fn operation(&self, force: Option<&str>) -> Operation {
        let load = Operation::new("load");
        match self {
            Self::System(system) => system.add_to(load.with_optional("force", force)),
            Self::File(path) => load.with("path", path.display().to_string()),
        }
    }
}
