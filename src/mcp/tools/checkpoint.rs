//! checkpoint: the whole image, saved and brought back.

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use rustix::process::Pid;
use serde_json::json;

use super::{Arguments, Call, Fault, Reply, Step, define, later};
use crate::checkpoints::{Checkpoint, MAX_NAME};
use crate::handover::line_of_job;
use crate::outcome::Record;
use crate::session::operation::Operation;

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
        "Save the whole Lisp image - values, functions, classes, packages, loaded systems - under a name, and go back to \
         it later in the time of a start. Not in it: threads, sockets, open files, foreign memory. Saving lets the \
         session go on at once; should the image be lost, the next one begins with the last checkpoint. `restore` \
         forgets everything since. Save before an experiment that may leave the session in a state you do not want.",
        json!({
            "action": {
                "type": "string",
                "enum": ACTIONS.map(|(name, _)| name),
                "default": "list",
                "description": "What to do: list the checkpoints, save one, go back to one, or delete one.",
            },
            "name": {
                "type": "string",
                "description": "Its name, for all but `list`. Saving under a name that is there replaces that checkpoint.",
            },
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

/// A checkpoint and how it came about.
#[derive(Debug)]
pub(in crate::mcp) struct Saved {
    pub(in crate::mcp) checkpoint: Checkpoint,
    /// How long the session stood still, in microseconds.
    pub(in crate::mcp) stopped: i64,
    /// Threads that are not in it.
    pub(in crate::mcp) threads: Vec<String>,
    /// How many timers are not.
    pub(in crate::mcp) timers: i64,
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
        return Ok(Step::Answer(Reply::Checkpoint(CheckpointReply::List(checkpoints.list()))));
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
    let Some(checkpoint) = checkpoints.get(&name) else {
        let names: Vec<_> = checkpoints.list().into_iter().map(|checkpoint| format!("{:?}", checkpoint.name)).collect();
        let there_are = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return Err(Fault::Value(format!("There is no checkpoint {name:?}. There are: {there_are}.")));
    };
    if action == Action::Restore {
        return later(move |call| restore(call, checkpoint));
    }
    checkpoints.delete(&checkpoint).map_err(|error| Fault::Value(format!("It cannot be deleted: {error}.")))?;
    Ok(Step::Answer(Reply::Checkpoint(CheckpointReply::Deleted(name))))
}

fn refuse(call: Call, reason: String) {
    call.answer(Err::<Reply, _>(Fault::Value(reason)));
}

fn save(call: Call, name: String) {
    let session = call.session().clone();
    if session.is_held() {
        return refuse(
            call,
            "Nothing was saved: an evaluation is held, and its stack cannot be saved. Go on with it, or abort it \
             (abort-evaluation), first."
                .to_owned(),
        );
    }
    if session.is_busy() {
        return refuse(
            call,
            "Nothing was saved: an evaluation runs, and its stack cannot be saved. Wait for it (the tool evaluation), or \
             cancel it, first."
                .to_owned(),
        );
    }
    let Some(checkpoints) = call.context.checkpoints.clone() else { return };
    let draft = match checkpoints.begin() {
        Ok(draft) => draft,
        Err(reason) => return refuse(call, reason),
    };
    let path = draft.path().to_string_lossy().into_owned();
    let operation = Operation::new("save-image").with("path", path).with("name", &*name);
    let evaluation = session.evaluations_so_far();
    session.query_in_order(&operation, move |records| {
        let records = match records {
            Ok(records) => records,
            Err(error) => return refuse(call, format!("Nothing was saved: {error}")),
        };
        // Before anything else is evaluated: what is defined from here on is not in it.
        let saving = call.context.worker.as_ref().map(|worker| worker.saving(draft.file()));
        let child = records.iter().find_map(|record| record.number("process"));
        let Some(child) = child.and_then(|child| Pid::from_raw(i32::try_from(child).ok()?)) else {
            return refuse(call, "Nothing was saved: the process that would do it did not start.".to_owned());
        };
        let finish = move || {
            match draft.finish(child, name, evaluation) {
                Ok(checkpoint) => {
                    if let Some(worker) = &call.context.worker {
                        worker.saved(&checkpoint);
                    }
                    call.answer(Ok::<_, Fault>(Reply::Checkpoint(CheckpointReply::Saved(saved(checkpoint, &records)))));
                }
                Err(reason) => refuse(call, format!("Nothing was saved: {reason}.")),
            }
            drop(saving);
        };
        // Should there be no thread for it, dropping the call answers.
        let _ = std::thread::Builder::new().name("sbcl-mcp-save".to_owned()).spawn(finish);
    });
}

fn saved(checkpoint: Checkpoint, records: &[Record]) -> Saved {
    let number = |name| records.iter().find_map(|record| record.number(name)).unwrap_or(0);
    let threads = records.iter().filter(|record| record.kind == "thread");
    Saved {
        checkpoint,
        stopped: number("stopped"),
        timers: number("timers"),
        threads: threads.filter_map(|record| record.text("name").map(str::to_owned)).collect(),
    }
}

fn restore(call: Call, checkpoint: Checkpoint) {
    let session = call.session().clone();
    let Some(worker) = call.context.worker.clone() else {
        return refuse(
            call,
            "Nothing was restored: with --no-supervisor there is no process that could replace the image.".to_owned(),
        );
    };
    let line = line_of_job(call.number);
    match worker.returned_for(line) {
        Some(Ok(returned)) => {
            let (checkpoint, forgotten) = (returned.checkpoint.clone(), returned.forgotten);
            session.query(&Operation::new("image-name"), move |records| {
                let package = records.ok().and_then(|records| Some(records.first()?.text("package")?.to_owned()));
                let notices = call.session().take_notices();
                let package = package.unwrap_or_default();
                let reply = CheckpointReply::Restored { checkpoint, forgotten, package, notices };
                call.answer(Ok::<_, Fault>(Reply::Checkpoint(reply)));
            });
        }
        Some(Err(reason)) => refuse(call, reason.clone()),
        None => {
            // The next worker answers.
            let inflight = call.context.inflight.clone();
            call.leave();
            session.abandon();
            inflight.withdraw_all(WITHDRAWN);
            worker.go_back(line, checkpoint, &session);
        }
    }
}
