//! The tool checkpoint, which saves and restores the whole image.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Text, text};
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, handle_with, reply_with, with_package};
use crate::recovery::checkpoint::save::{NewCheckpoint, SaveCanceller};
use crate::recovery::checkpoint::store::{self, MAX_NAME_CHARS};
use crate::recovery::messages::{late_save_notice, restore_notice};
use crate::recovery::state::CheckpointRestore;
use crate::recovery::text;
use crate::schema::json;

/// The tool checkpoint.
pub(super) struct CheckpointTool;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {
    /// Operation.
    #[serde(default)]
    action: Action,
    /// Name; not for `list`. Saving replaces a checkpoint of the same name.
    name: Option<Text>,
}

/// The actions of the tool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Action {
    #[default]
    List,
    Save,
    Restore,
    Delete,
}

impl ToolSpec for CheckpointTool {
    const NAME: &'static str = "checkpoint";
    const TITLE: &'static str = "Checkpoint";
    const DESCRIPTION: &'static str = "Save the whole Lisp image (values, functions, classes, packages, loaded \
        systems) under a name and restore it later, in milliseconds. Not saved: threads, sockets, open files. After a \
        crash, by default, the last checkpoint is restored. `restore` discards later changes.";
    const POLICY: CallPolicy = CallPolicy {
        only_reads: |arguments| arguments.get("action").is_none_or(|action| action == "list"),
        // A core that has changed since it was last checked is read.
        is_slow: |_| true,
        ..CallPolicy::NONE
    };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(false)
    }

    fn call(call: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let Arguments { action, name } = arguments;
        let Some(checkpoints) = call.context.checkpoints.clone() else {
            return Err(Fault::Refusal("This server is part of a program that keeps no checkpoints.".to_owned()));
        };
        if action == Action::List {
            let (intact, damaged) = checkpoints.intact_and_damaged();
            return reply_with(CheckpointReply::List { intact, damaged, foreign: checkpoints.foreign() });
        }
        let Some(name) = text(name) else {
            return Err(Fault::Refusal("checkpoint needs the argument name to save, restore or delete.".to_owned()));
        };
        if name.chars().count() > MAX_NAME_CHARS || name.contains(char::is_control) {
            return Err(Fault::Refusal(format!(
                "A checkpoint's name may have at most {MAX_NAME_CHARS} characters, and no control characters."
            )));
        }
        if action == Action::Save {
            if store::automatic_number(&name).is_some() {
                return Err(Fault::Refusal(format!(
                    "{name:?} is a name for automatic checkpoints, which the server may delete. Save under another \
                     name."
                )));
            }
            return handle_with(move |call| save(call, name));
        }
        if action == Action::Restore
            && let Some(outcome) = restore_outcome(call)
        {
            // The checkpoint may have been deleted meanwhile.
            return handle_with(move |call| answer_restore(call, outcome));
        }
        let ((intact, damaged), foreign) = (checkpoints.intact_and_damaged(), checkpoints.foreign());
        // During a replacement, two checkpoints have the name.
        let find = |all: &[store::Checkpoint]| all.iter().rfind(|checkpoint| checkpoint.name == name).cloned();
        let bootable = find(&intact);
        let is_bootable = bootable.is_some();
        let Some(checkpoint) = bootable.or_else(|| find(&damaged)).or_else(|| find(&foreign)) else {
            let all = intact.iter().chain(&damaged).chain(&foreign);
            let names: Vec<_> = all.map(|checkpoint| format!("{:?}", checkpoint.name)).collect();
            let there_are = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(Fault::Refusal(format!("There is no checkpoint {name:?}. Existing checkpoints: {there_are}.")));
        };
        if action == Action::Restore {
            if foreign.contains(&checkpoint) {
                return Err(Fault::Refusal(format!("The checkpoint {name:?} was {}.", checkpoint.foreign_reason())));
            }
            if !is_bootable {
                return Err(Fault::Refusal(format!(
                    "The checkpoint {name:?} is damaged: its file is missing or differs from the saved core. The \
                    checkpoint can only be deleted or replaced."
                )));
            }
            return handle_with(move |call| restore(call, checkpoint));
        }
        if let Some(recovery) = &call.context.recovery {
            recovery.record_begun(call.first_job);
        }
        checkpoints.delete(&checkpoint).map_err(|error| {
            Fault::Refusal(format!(
                "The checkpoint {name:?} cannot be \
            deleted: {error}."
            ))
        })?;
        if let Some(recovery) = &call.context.recovery {
            recovery.record_deletion();
        }
        reply_with(CheckpointReply::Deleted(name))
    }
}

/// A result of the tool checkpoint.
#[derive(Debug)]
enum CheckpointReply {
    /// All checkpoints: those that can be restored, those whose file differs from the saved core, and those that only another
    /// server can restore, each oldest first.
    List { intact: Vec<store::Checkpoint>, damaged: Vec<store::Checkpoint>, foreign: Vec<store::Checkpoint> },
    /// A checkpoint was saved.
    Saved(NewCheckpoint),
    /// A checkpoint was restored, and the session forgot `forgotten` evaluations. `package` is the session's current package;
    /// `None` if another call replaced the image before Lisp could name the package.
    Restored { checkpoint: store::Checkpoint, forgotten: u64, package: Option<String>, notices: Vec<String> },
    /// The checkpoint with this name was deleted.
    Deleted(String),
}

/// Structured content of the tool's results. Each result sets some of the fields.
#[derive(Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Content {
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoints: Option<Vec<CheckpointSummary>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    damaged: Option<Vec<CheckpointSummary>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    foreign: Option<Vec<ForeignCheckpoint>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    saved: Option<CheckpointSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped_microseconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timers: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    restored: Option<CheckpointSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    forgotten: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    package: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    notices: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deleted: Option<String>,
}

/// The description of a checkpoint.
#[derive(Serialize, JsonSchema)]
struct CheckpointSummary {
    name: String,
    evaluation: u64,
    saved: String,
    bytes: u64,
}

/// The description of a checkpoint that this server cannot restore, with the reason.
#[derive(Serialize, JsonSchema)]
struct ForeignCheckpoint {
    #[serde(flatten)]
    checkpoint: CheckpointSummary,
    reason: String,
}

impl ForeignCheckpoint {
    fn new(checkpoint: &store::Checkpoint) -> Self {
        Self { checkpoint: CheckpointSummary::new(checkpoint), reason: checkpoint.foreign_reason() }
    }
}

impl CheckpointSummary {
    fn new(checkpoint: &store::Checkpoint) -> Self {
        let store::Checkpoint { name, evaluation, saved, bytes, .. } = checkpoint;
        Self { name: name.clone(), evaluation: *evaluation, saved: saved.strftime("%FT%TZ").to_string(), bytes: *bytes }
    }
}

impl ToolResult for CheckpointReply {
    fn text(&self, _: usize) -> String {
        match self {
            Self::List { intact, damaged, foreign } => text::checkpoint_list(intact, damaged, foreign),
            Self::Saved(saved) => {
                text::save_report(&saved.checkpoint, saved.pause_microseconds, &saved.threads, saved.timers)
            }
            Self::Restored { checkpoint, forgotten, package, notices } => {
                text::restore_report(checkpoint, *forgotten, package.as_deref(), notices)
            }
            Self::Deleted(name) => format!("Deleted {name:?}."),
        }
    }

    fn structured_content(&self, _: usize) -> Value {
        let nothing = Content::default();
        json(&match self {
            Self::List { intact, damaged, foreign } => Content {
                checkpoints: Some(intact.iter().map(CheckpointSummary::new).collect()),
                damaged: (!damaged.is_empty()).then(|| damaged.iter().map(CheckpointSummary::new).collect()),
                foreign: (!foreign.is_empty()).then(|| foreign.iter().map(ForeignCheckpoint::new).collect()),
                ..nothing
            },
            Self::Saved(saved) => Content {
                saved: Some(CheckpointSummary::new(&saved.checkpoint)),
                stopped_microseconds: Some(saved.pause_microseconds),
                threads: Some(saved.threads.clone()),
                timers: Some(saved.timers),
                ..nothing
            },
            Self::Restored { checkpoint, forgotten, package, notices } => Content {
                restored: Some(CheckpointSummary::new(checkpoint)),
                forgotten: Some(*forgotten),
                package: package.clone(),
                notices: Some(notices.clone()),
                // The manifest may not name the threads and timers.
                threads: (!checkpoint.threads.is_empty()).then(|| checkpoint.threads.clone()),
                timers: (checkpoint.timers > 0).then_some(checkpoint.timers),
                ..nothing
            },
            Self::Deleted(name) => Content { deleted: Some(name.clone()), ..nothing },
        })
    }
}

fn refuse(call: Call, reason: String) {
    call.refuse(Fault::Refusal(reason));
}

fn save(call: Call, name: String) {
    let Some(saver) = call.context.saver() else { return };
    let (session, pending) = (call.session().clone(), call.pending());
    let copied = pending.clone();
    let on_copied = move |save: SaveCanceller| copied.when_cancelled(move || save.cancel());
    pending.submit(&session, || {
        saver.save(name, false, on_copied, move |saved| match saved {
            Ok(saved) => {
                // A cancelled call is not answered, so the client's next answer reports the save.
                let (session, notice) = (call.session().clone(), late_save_notice(&saved.checkpoint));
                call.pending().when_cancelled(move || session.add_notice(notice));
                call.reply(CheckpointReply::Saved(saved));
            }
            Err(reason) => refuse(call, reason),
        })
    });
}

fn restore(call: Call, checkpoint: store::Checkpoint) {
    let session = call.session().clone();
    let Some(recovery) = call.context.recovery.clone() else {
        return refuse(
            call,
            "Nothing was restored: a server with --no-supervisor cannot replace its image, and deletes its checkpoints \
             when the server ends. A server without this option restores the checkpoints that it saves."
                .to_owned(),
        );
    };
    let job = call.first_job;
    if let Some(obstacle) = recovery.replacement_obstacle(job) {
        return refuse(call, obstacle);
    }
    // The next worker answers the call. A cancelled call changes nothing.
    if call.leave_unanswered() {
        recovery.request_restore(job, checkpoint, &session);
    }
}

/// Returns the outcome of the restore that the call requested, if that restore has replaced an image.
fn restore_outcome(call: &Call) -> Option<Result<CheckpointRestore, String>> {
    call.context.recovery.as_ref()?.restore_outcome(call.first_job)
}

/// Answers the call whose restore replaced the image.
fn answer_restore(call: Call, outcome: Result<CheckpointRestore, String>) {
    call.session().withdraw_notice(restore_notice(&outcome));
    match outcome {
        Ok(CheckpointRestore { checkpoint, forgotten }) => {
            let session = call.session().clone();
            with_package(&session, move |package| {
                let notices = call.session().take_notices();
                call.reply(CheckpointReply::Restored { checkpoint, forgotten, package, notices });
            });
        }
        Err(reason) => refuse(call, reason),
    }
}
