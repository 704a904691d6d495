//! checkpoint: the whole image, saved and brought back.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Text, text};
use super::{Call, Fault, Finding, Offered, Step, later, now, with_package};
use crate::recovery::checkpoint::save::Saved;
use crate::recovery::checkpoint::store::{self, MAX_NAME};
use crate::recovery::text;
use crate::rpc::route::call_of_job;
use crate::schema::json;

/// Why a user is asked no more.
const WITHDRAWN: &str = "the session went back to a checkpoint";

/// The tool.
pub(super) struct Checkpoint;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// What to do.
    #[serde(default)]
    action: Action,
    /// For all but `list`. Saving replaces a checkpoint of that name.
    name: Option<Text>,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Action {
    #[default]
    List,
    Save,
    Restore,
    Delete,
}

impl Offered for Checkpoint {
    const NAME: &'static str = "checkpoint";
    const TITLE: &'static str = "Checkpoint";
    const DESCRIPTION: &'static str = "Save the whole Lisp image (values, functions, classes, packages, loaded systems) under a name \
        and restore it later, in milliseconds. Not in it: threads, sockets, open files. A lost image begins with the last \
        checkpoint. `restore` forgets everything since.";
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(false)
    }

    fn call(call: &Call, arguments: Arguments) -> Result<Step, Fault> {
        let Arguments { action, name } = arguments;
        let Some(checkpoints) = call.context.checkpoints.clone() else {
            return Err(Fault::Value("This server keeps no checkpoints.".to_owned()));
        };
        if action == Action::List {
            return now(Told::List(checkpoints.list()));
        }
        let Some(name) = text(name) else {
            return Err(Fault::Value("checkpoint needs the argument name for this action.".to_owned()));
        };
        if name.chars().count() > MAX_NAME || name.contains(char::is_control) {
            return Err(Fault::Value(format!("A checkpoint's name is one line of at most {MAX_NAME} characters.")));
        }
        if action == Action::Save {
            return later(move |call| save(call, name));
        }
        let Some(checkpoint) = checkpoints.get(&name).or_else(|| checkpoints.damaged(&name)) else {
            let names = checkpoints.list().into_iter().map(|checkpoint| format!("{:?}", checkpoint.name));
            let names: Vec<_> = names.collect();
            let there_are = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(Fault::Value(format!("There is no checkpoint {name:?}. There are: {there_are}.")));
        };
        if action == Action::Restore {
            if !checkpoints.is_whole(&checkpoint) {
                return Err(Fault::Value(format!(
                    "The checkpoint {name:?} is not whole: its file is not what was saved. It can be deleted."
                )));
            }
            return later(move |call| restore(call, checkpoint));
        }
        checkpoints.delete(&checkpoint).map_err(|error| Fault::Value(format!("It cannot be deleted: {error}.")))?;
        now(Told::Deleted(name))
    }
}

/// What the tool has to say.
#[derive(Debug)]
enum Told {
    /// Those that there are, oldest first.
    List(Vec<store::Checkpoint>),
    /// One was saved.
    Saved(Saved),
    /// The session went back to one, and forgot so many evaluations; its package, and what there is to say.
    Restored { checkpoint: store::Checkpoint, forgotten: u64, package: String, notices: Vec<String> },
    /// One is gone.
    Deleted(String),
}

/// The content of each of these.
#[derive(Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Content {
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoints: Option<Vec<One>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    saved: Option<One>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped_microseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timers: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    restored: Option<One>,
    #[serde(skip_serializing_if = "Option::is_none")]
    forgotten: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    package: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    notices: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deleted: Option<String>,
}

/// What is told of a checkpoint.
#[derive(Serialize, JsonSchema)]
struct One {
    name: String,
    evaluation: u64,
    saved: String,
    bytes: u64,
}

impl One {
    fn new(checkpoint: &store::Checkpoint) -> Self {
        let store::Checkpoint { name, evaluation, saved, bytes, .. } = checkpoint;
        Self { name: name.clone(), evaluation: *evaluation, saved: saved.strftime("%FT%TZ").to_string(), bytes: *bytes }
    }
}

impl Finding for Told {
    fn text(&self, _: usize) -> String {
        match self {
            Self::List(all) => text::checkpoints(all),
            Self::Saved(saved) => {
                text::checkpoint_saved(&saved.checkpoint, saved.stopped, &saved.threads, saved.timers)
            }
            Self::Restored { checkpoint, forgotten, package, notices } => {
                text::checkpoint_restored(checkpoint, *forgotten, package, notices)
            }
            Self::Deleted(name) => format!("Deleted {name:?}."),
        }
    }

    fn content(&self, _: usize) -> Value {
        let nothing = Content::default();
        json(&match self {
            Self::List(all) => Content { checkpoints: Some(all.iter().map(One::new).collect()), ..nothing },
            Self::Saved(saved) => Content {
                saved: Some(One::new(&saved.checkpoint)),
                stopped_microseconds: Some(saved.stopped),
                threads: Some(saved.threads.clone()),
                timers: Some(saved.timers),
                ..nothing
            },
            Self::Restored { checkpoint, forgotten, package, notices } => Content {
                restored: Some(One::new(checkpoint)),
                forgotten: Some(*forgotten),
                package: Some(package.clone()),
                notices: Some(notices.clone()),
                ..nothing
            },
            Self::Deleted(name) => Content { deleted: Some(name.clone()), ..nothing },
        })
    }
}

fn refuse(call: Call, reason: String) {
    call.refuse(Fault::Value(reason));
}

fn save(call: Call, name: String) {
    let Some(saver) = call.context.saver() else { return };
    saver.save(name, false, move |saved| match saved {
        Ok(saved) => call.reply(Told::Saved(saved)),
        Err(reason) => refuse(call, reason),
    });
}

fn restore(call: Call, checkpoint: store::Checkpoint) {
    let session = call.session().clone();
    let Some(recovery) = call.context.recovery.clone() else {
        return refuse(
            call,
            "Nothing was restored: a process without a supervisor (--no-supervisor) is its image, and cannot go back to \
             another."
                .to_owned(),
        );
    };
    let number = call_of_job(call.number);
    match recovery.returned_for(number) {
        Some(Ok(returned)) => {
            let (checkpoint, forgotten) = (returned.checkpoint.clone(), returned.forgotten);
            with_package(&session, move |package| {
                let notices = call.session().take_notices();
                let package = package.unwrap_or_default();
                call.reply(Told::Restored { checkpoint, forgotten, package, notices });
            });
        }
        Some(Err(reason)) => refuse(call, reason.clone()),
        None => {
            // The next worker answers.
            let inflight = call.context.inflight.clone();
            call.leave();
            session.abandon();
            inflight.withdraw_all(WITHDRAWN);
            recovery.request_restore(number, checkpoint, &session);
        }
    }
}
