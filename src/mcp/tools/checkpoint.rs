//! checkpoint: the whole image, saved and brought back.

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::schema::{choice, text};
use super::{Arguments, Call, Fault, Reply, Step, define, later, now, with_package};
use crate::recovery::checkpoint::save::Saved;
use crate::recovery::checkpoint::store::{Checkpoint, MAX_NAME};
use crate::rpc::route::call_of_job;

pub(super) const NAME: &str = "checkpoint";

/// Why a user is asked no more.
const WITHDRAWN: &str = "the session went back to a checkpoint";

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    List,
    Save,
    Restore,
    Delete,
}

const ACTIONS: [(&str, Action); 4] =
    [("list", Action::List), ("save", Action::Save), ("restore", Action::Restore), ("delete", Action::Delete)];

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Checkpoint",
        "Save the whole Lisp image (values, functions, classes, packages, loaded systems) under a name and restore \
        it later, in milliseconds. Not in it: threads, sockets, open files. A lost image begins with the last checkpoint. \
        `restore` forgets everything since.",
        json!({
            "action": choice(&ACTIONS, Some("list"), "What to do."),
            "name": text("For all but `list`. Saving replaces a checkpoint of that name."),
        }),
        &[],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(false),
    )
}

/// What the tool has to say.
#[derive(Debug)]
pub(in crate::mcp) enum CheckpointReply {
    /// Those that there are, oldest first.
    List(Vec<Checkpoint>),
    /// One was saved.
    Saved(Saved),
    /// The session went back to one, and forgot so many evaluations; its package, and what there is to say.
    Restored { checkpoint: Checkpoint, forgotten: u64, package: String, notices: Vec<String> },
    /// One is gone.
    Deleted(String),
}

pub(super) fn call(call: &Call, arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["action", "name"], 0, arguments)?;
    let action = arguments.choice("action", &ACTIONS)?.unwrap_or(Action::List);
    let name = arguments.optional_text("name")?;
    let checkpoints = call.context.checkpoints.clone();
    let Some(checkpoints) = checkpoints else {
        return Err(Fault::Value("This server keeps no checkpoints.".to_owned()));
    };
    if action == Action::List {
        return now(Reply::Checkpoint(CheckpointReply::List(checkpoints.list())));
    }
    let Some(name) = name else {
        return Err(Fault::Value("checkpoint needs the argument name for this action.".to_owned()));
    };
    if name.chars().count() > MAX_NAME || name.contains(char::is_control) {
        return Err(Fault::Value(format!("A checkpoint's name is one line of at most {MAX_NAME} characters.")));
    }
    if action == Action::Save {
        return later(move |call| save(call, name));
    }
    let Some(checkpoint) = checkpoints.get(&name).or_else(|| checkpoints.damaged(&name)) else {
        let names: Vec<_> = checkpoints.list().into_iter().map(|checkpoint| format!("{:?}", checkpoint.name)).collect();
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
    now(Reply::Checkpoint(CheckpointReply::Deleted(name)))
}

fn refuse(call: Call, reason: String) {
    call.refuse(Fault::Value(reason));
}

fn save(call: Call, name: String) {
    let Some(saver) = call.context.saver() else { return };
    saver.save(name, false, move |saved| match saved {
        Ok(saved) => call.reply(Reply::Checkpoint(CheckpointReply::Saved(saved))),
        Err(reason) => refuse(call, reason),
    });
}

fn restore(call: Call, checkpoint: Checkpoint) {
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
                let reply = CheckpointReply::Restored { checkpoint, forgotten, package, notices };
                call.reply(Reply::Checkpoint(reply));
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
