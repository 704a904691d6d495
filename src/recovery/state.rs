//! The recovery state: what the next worker is given to continue where the last one stopped.
//!
//! The state is the fold over [session events](SessionEvent) and the few things that happen to workers from outside: a
//! crash, a reset, a return to a checkpoint. Nothing here touches a file, a process or the clock.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::checkpoint::store::Checkpoint;
use super::definitions::{Definition, Definitions, Unrestored};
use super::event::{MAX_HANDSHAKE_MESSAGE, SessionEvent};
use super::replay_policy::{ReplayPolicy, Step};
use crate::Limits;
use crate::interruption::Stuck;
use crate::outcome::Outcome;
use crate::session::recovery::Errors;

/// Messages of a client's handshake, at most.
const MAX_HANDSHAKE: usize = 4;
/// Handshake messages whose calls are not answered yet, of all clients, at most.
const MAX_UNANSWERED_HANDSHAKES: usize = 64;
/// Saves in progress, at most: of the oldest nobody hears any more.
pub(crate) const MAX_SAVING: usize = 64;
/// Checkpoints that the next image may be booted from, at most.
const MAX_RESTORABLE: usize = 8;
/// Forms that could not be restored and are remembered, the last ones, and the bytes of their texts together.
const MAX_UNRESTORED: usize = 100;
const MAX_UNRESTORED_BYTES: usize = 8 << 20;

/// The recovery state: everything that outlives an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RecoveryState {
    /// The clients by the number of their connections; 0 is the client of the server's stdin and stdout.
    pub(crate) clients: BTreeMap<u64, Client>,
    /// Handshake messages whose calls are not answered yet, each with its call's number.
    handshakes: Vec<(u64, String)>,
    /// The limits; `None` for those of the command line.
    pub(crate) limits: Option<Limits>,
    /// The definitions to replay after the checkpoint; `None` when nothing is restored.
    pub(crate) definitions: Option<Definitions>,
    /// The forms that could not be restored and have not been defined again.
    pub(crate) unrestored: Vec<Unrestored>,
    /// The saves that have begun and are not known to be complete.
    saving: VecDeque<Save>,
    /// The checkpoints that the next image may be booted from, oldest first.
    restorable: VecDeque<Restorable>,
    /// The form or checkpoint that images were lost at, if the last one was.
    replay: ReplayPolicy,
    /// Jobs with numbers up to this one have begun in an image that is gone, and must not begin again.
    pub(crate) begun: u64,
    /// Evaluations had numbers up to this one.
    pub(crate) evaluations: u64,
    /// The call whose inspection ran when the last image was lost, and how many images were lost during it.
    pub(crate) inspected: Option<(u64, u32)>,
    /// The crash that the next image makes up for.
    pub(crate) crash: Option<CrashReport>,
    /// The reset or restore that the next image was asked for by.
    pub(crate) replacement: Option<Replacement>,
    /// The persistent session that the server's first image continues.
    pub(crate) resumed: Option<Resumed>,
}

/// A client's part of the state: its handshake and its errors.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Client {
    /// The messages that opened its conversation; it has the answers.
    pub(crate) handshake: Vec<String>,
    /// Its error state and history.
    pub(crate) errors: Errors,
}

/// A save in progress.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Save {
    /// The name of the core's file.
    file: String,
    /// The position of the first definition that is not in it.
    position: u64,
    /// The number of later definitions that were dropped for want of room.
    #[serde(default)]
    dropped: usize,
}

impl Save {
    fn completed(self, checkpoint: Checkpoint) -> Restorable {
        Restorable { checkpoint, position: self.position, dropped: self.dropped }
    }
}

/// A checkpoint that the next image may be booted from.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Restorable {
    checkpoint: Checkpoint,
    /// The position of the first definition that is not in it.
    position: u64,
    /// The number of later definitions that were dropped for want of room.
    #[serde(default)]
    dropped: usize,
}

/// A reset, or a return to a checkpoint, that a call asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Replacement {
    /// The call's number.
    pub(crate) call: u64,
    /// The connection that it came by.
    pub(crate) client: u64,
    /// Notices of the replaced image that this client has not seen yet.
    pub(crate) notices: Vec<String>,
    /// The checkpoint that was asked for; `None` for a reset.
    pub(crate) returned: Option<Returned>,
}

/// A return to a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Returned {
    pub(crate) checkpoint: Checkpoint,
    /// The number of evaluations after the checkpoint, which are forgotten.
    pub(crate) forgotten: u64,
}

/// A persistent session that a new server continues.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Resumed {
    /// The session's name.
    pub(crate) session: String,
    /// Sentences that say why the session continues without its last image, or without some lines of its log.
    pub(crate) remark: Option<String>,
}

/// A crash report: what clients are told about a lost image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CrashReport {
    /// The rest of a sentence about the image: `was killed by signal 9 (SIGKILL)`.
    pub(crate) cause: String,
    /// An evaluation was running.
    pub(crate) in_flight: bool,
    /// The client that the evaluation was for.
    #[serde(default)]
    pub(crate) connection: u64,
    /// The numbers of the evaluations in the background.
    pub(crate) background: Vec<u64>,
    /// The outcome of an evaluation that could not be stopped.
    pub(crate) stuck: Option<Box<Outcome>>,
    /// The poisoned forms, which took an image down when they were replayed and are not tried again.
    pub(crate) poisoned: Vec<Unrestored>,
}

impl CrashReport {
    /// True when the image was replaced because an evaluation did not end that had been cancelled.
    pub(crate) fn was_cancelled(&self) -> bool {
        let error = self.stuck.as_ref().and_then(|outcome| outcome.result.as_ref().err());
        self.in_flight && error.is_some_and(|error| error.kind == "CANCELLED")
    }
}

/// A crash, as the supervisor sees it.
#[derive(Debug, Clone)]
pub(crate) struct Crash {
    /// The rest of a sentence about the image.
    pub(crate) cause: String,
    /// The outcome of the evaluation that ran.
    pub(crate) outcome: Option<Box<Outcome>>,
    /// The suspicion against the form that was being replayed.
    pub(crate) suspicion: Suspicion,
}

/// The suspicion that a crash casts on the form that was being replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suspicion {
    /// Only the form can have caused the crash.
    Certain,
    /// The image ended: the form, or something beside it, was the cause.
    Likely,
    /// The image was killed by a signal that others send, too.
    Possible,
}

impl Crash {
    pub(crate) fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), outcome: None, suspicion: Suspicion::Likely }
    }

    /// The crash, with the outcome of the evaluation that ran.
    pub(crate) fn during(self, outcome: impl Into<Option<Outcome>>) -> Self {
        Self { outcome: outcome.into().map(Box::new), ..self }
    }

    /// The crash, when the form that was being replayed must have caused it.
    pub(crate) fn by_form(self) -> Self {
        Self { suspicion: Suspicion::Certain, ..self }
    }

    /// The crash, when somebody outside may have caused it.
    pub(crate) fn killed(self) -> Self {
        Self { suspicion: Suspicion::Possible, ..self }
    }

    /// The crash of an image in which something could not be interrupted: the evaluation with this outcome, or, unless the
    /// image was `restored`, the form that was being replayed.
    pub(crate) fn stuck(outcome: Option<Box<Outcome>>, why: Stuck, restored: bool) -> Self {
        let crash = Self { outcome, ..Self::new(format!("{} and was ended", why.verb())) };
        if restored { crash } else { crash.by_form() }
    }
}

/// The last content of a worker's status page.
#[derive(Debug, Clone, Default)]
pub(crate) struct LastStatus {
    /// The number of the last job that began, if a call asked for it; else 0.
    pub(crate) begun: u64,
    /// The job had not ended.
    pub(crate) in_flight: bool,
    /// The client that it was for.
    pub(crate) client: u64,
    /// The numbers of the evaluations in the background.
    pub(crate) background: Vec<u64>,
    /// A description of what the foreground was doing.
    pub(crate) step: Option<String>,
    /// The index of the definition that was being replayed.
    pub(crate) replaying: Option<usize>,
    /// The number of the newest evaluation.
    pub(crate) evaluations: u64,
    /// The open call whose inspection ran.
    pub(crate) inspecting: Option<u64>,
}

impl Default for RecoveryState {
    fn default() -> Self {
        Self::new(true)
    }
}

impl RecoveryState {
    /// The state before the first worker. `restores`: definitions are kept and replayed.
    pub(crate) fn new(restores: bool) -> Self {
        Self {
            clients: BTreeMap::from([(0, Client::default())]),
            handshakes: Vec::new(),
            limits: None,
            definitions: restores.then(Definitions::default),
            unrestored: Vec::new(),
            saving: VecDeque::new(),
            restorable: VecDeque::new(),
            replay: ReplayPolicy::default(),
            begun: 0,
            evaluations: 0,
            inspected: None,
            crash: None,
            replacement: None,
            resumed: None,
        }
    }

    /// Applies a change of the session.
    pub(crate) fn apply(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Handshake { call, message } => {
                if self.handshakes.len() < MAX_UNANSWERED_HANDSHAKES && message.len() <= MAX_HANDSHAKE_MESSAGE {
                    self.handshakes.push((call, message));
                }
            }
            SessionEvent::Defined(definition) => {
                self.unrestored.retain_mut(|form| !form.is_resolved_by(&definition.form, &definition.changes));
                self.evaluations = self.evaluations.max(definition.evaluation);
                if let Some(definitions) = &mut self.definitions {
                    for position in definitions.add(definition) {
                        let lacks = |one: &&mut Restorable| one.position <= position;
                        self.restorable.iter_mut().filter(lacks).for_each(|one| one.dropped += 1);
                        let lacks = |save: &&mut Save| save.position <= position;
                        self.saving.iter_mut().filter(lacks).for_each(|save| save.dropped += 1);
                    }
                }
            }
            SessionEvent::Errors { client, added, last } => {
                if let Some(client) = self.clients.get_mut(&client) {
                    client.errors.note(added, last);
                }
            }
            SessionEvent::Limits(limits) => self.limits = Some(limits),
            SessionEvent::Saving { file } => {
                let position = self.definitions.as_ref().map_or(0, Definitions::end);
                self.saving.push_back(Save { file, position, dropped: 0 });
                if self.saving.len() > MAX_SAVING {
                    self.saving.pop_front();
                }
            }
            SessionEvent::Saved(checkpoint) => {
                let index = self.saving.iter().position(|save| save.file == checkpoint.file);
                if let Some(save) = index.and_then(|index| self.saving.remove(index)) {
                    self.restorable.retain(|one| one.checkpoint.name != checkpoint.name);
                    self.add_restorable(save.completed(*checkpoint));
                }
            }
        }
    }

    fn add_restorable(&mut self, new: Restorable) {
        // A save that began before another may end after it.
        let index = self.restorable.partition_point(|other| other.position <= new.position);
        self.restorable.insert(index, new);
        if self.restorable.len() > MAX_RESTORABLE {
            self.restorable.pop_front();
        }
    }

    /// The files of the saves that are not known to be complete, oldest first.
    pub(crate) fn files_being_saved(&self) -> impl Iterator<Item = &str> {
        self.saving.iter().map(|save| &*save.file)
    }

    /// The files of all saves, complete or not, in the order of what they contain.
    pub(crate) fn saved_files(&self) -> Vec<String> {
        let complete = self.restorable.iter().map(|one| (one.position, &one.checkpoint.file));
        let mut files: Vec<_> = complete.chain(self.saving.iter().map(|save| (save.position, &save.file))).collect();
        files.sort_by_key(|(position, _)| *position);
        files.into_iter().map(|(_, file)| file.clone()).collect()
    }

    /// The checkpoint that the next image is booted from.
    pub(crate) fn checkpoint(&self) -> Option<&Checkpoint> {
        self.restorable.back().map(|one| &one.checkpoint)
    }

    /// The file of the checkpoint that the next image is asked to return to; `None` when nobody asked, or the image came up or
    /// was lost.
    pub(crate) fn requested_checkpoint(&self) -> Option<String> {
        let replacement = self.replacement.as_ref().filter(|_| self.crash.is_none())?;
        Some(replacement.returned.as_ref()?.checkpoint.file.clone())
    }

    /// Keeps the checkpoints that the next image may be booted from only if `keep` says so.
    pub(crate) fn retain_checkpoints(&mut self, mut keep: impl FnMut(&Checkpoint) -> bool) {
        self.restorable.retain(|one| keep(&one.checkpoint));
    }

    /// The position of the first definition that is not in the checkpoint.
    fn position(&self) -> u64 {
        self.restorable.back().map_or(0, |one| one.position)
    }

    /// True when the next image would be different from a new one.
    pub(crate) fn has_content(&self) -> bool {
        !self.restorable.is_empty() || self.definitions.as_ref().is_some_and(|definitions| definitions.end() > 0)
    }

    /// Records that a call of this client's is answered, or wants no answer.
    pub(crate) fn answered(&mut self, call: u64, client: u64) {
        let messages = self.handshakes.extract_if(.., |(of, _)| *of == call).map(|(_, message)| message);
        match self.clients.get_mut(&client) {
            Some(client) => {
                let room = MAX_HANDSHAKE.saturating_sub(client.handshake.len());
                client.handshake.extend(messages.take(room));
            }
            None => messages.for_each(drop),
        }
    }

    /// Records that a client has connected.
    pub(crate) fn connected(&mut self, client: u64) {
        self.clients.insert(client, Client::default());
    }

    /// Records that a client is gone.
    pub(crate) fn disconnected(&mut self, client: u64) {
        self.clients.remove(&client);
    }

    /// Records that the worker has replayed its definitions, except those at the indices in `failed`, which will not be
    /// tried again; each has the reason. Returns true when something could not be restored.
    pub(crate) fn restored(&mut self, failed: &[(usize, String)]) -> bool {
        let mut unrestored = self.failures(failed);
        let position = self.position();
        if let Some(definitions) = self.definitions.as_mut().filter(|_| !failed.is_empty()) {
            definitions.remove(position, &failed.iter().map(|(index, _)| *index).collect());
        }
        self.replay = ReplayPolicy::default();
        let any = !unrestored.is_empty();
        self.unrestored.append(&mut unrestored);
        let mut bytes = 0;
        let fits = |form: &&Unrestored| {
            bytes += form.size();
            bytes <= MAX_UNRESTORED_BYTES
        };
        let kept = self.unrestored.iter().rev().take(MAX_UNRESTORED).take_while(fits).count();
        self.unrestored.drain(..self.unrestored.len() - kept);
        any
    }

    /// The forms that are missing after a replay: the poisoned ones, and those that failed at the indices in `failed`, each
    /// with the reason. A form is not missing when the same form, or others that define all its names, succeeded after it.
    pub(crate) fn failures(&self, failed: &[(usize, String)]) -> Vec<Unrestored> {
        let replayed: Vec<_> =
            self.definitions.iter().flat_map(|definitions| definitions.iter_from(self.position())).collect();
        let failed: HashMap<usize, &String> = failed.iter().map(|(index, why)| (*index, why)).collect();
        let (mut later_forms, mut later_names) = (HashSet::new(), HashSet::new());
        let mut missing = Vec::new();
        for (index, definition) in replayed.into_iter().enumerate().rev() {
            let changes = &definition.changes;
            let is_later = !later_forms.insert(&definition.form);
            match failed.get(&index) {
                None => later_names.extend(changes.defined.iter().chain(&changes.removed)),
                Some(why) => {
                    let is_replaced = |form: &Unrestored| {
                        !form.missing.is_empty() && form.missing.iter().all(|name| later_names.contains(name))
                    };
                    missing
                        .extend(Some(Unrestored::new(definition, why)).filter(|form| !is_later && !is_replaced(form)));
                }
            }
        }
        let poisoned = self.crash.iter().flat_map(|crash| &crash.poisoned).cloned();
        poisoned.chain(missing.into_iter().rev()).collect()
    }

    /// Records a crash: this is where it is turned into the next worker's state. `restored`: the image had replayed its
    /// definitions. Returns true when the replay got further than last time, or will.
    pub(crate) fn record_crash(&mut self, last: LastStatus, restored: bool, crash: &Crash) -> bool {
        self.handshakes.clear();
        // Nobody has asked for what is replayed.
        let stuck = crash.outcome.clone().filter(|_| restored);
        let cause = match last.step.filter(|_| last.in_flight && restored && stuck.is_none()) {
            Some(step) => format!("{}; it was at {step}", crash.cause),
            None => crash.cause.clone(),
        };
        // Anything may have written to the status page that the client's number is from.
        let connection = if self.clients.contains_key(&last.client) { last.client } else { 0 };
        let (in_flight, background) = (last.in_flight, last.background);
        let mut report = CrashReport { cause, in_flight, connection, background, stuck, poisoned: Vec::new() };
        let mut progress = false;
        if restored {
            if let Some(replacement) = &mut self.replacement {
                replacement.notices.clear();
            }
            self.resumed = None;
        } else {
            // The client must hear of the crash that the lost image was to make up for.
            report = self.crash.take().unwrap_or(report);
            match self.replay.after_crash(last.replaying, crash.suspicion) {
                Step::Retry { progress: further } => progress = further,
                Step::Skip { index, reason } => {
                    let position = self.position();
                    // Anything may have written to the status page that the index is from.
                    if let Some(form) = self.definitions.as_mut().and_then(|all| all.take(position, index)) {
                        report.poisoned.push(Unrestored::new(&form, &reason));
                        progress = true;
                    }
                }
                Step::PreviousCheckpoint => drop(self.restorable.pop_back()),
            }
        }
        self.count(last.begun, last.evaluations);
        if let Some(call) = last.inspecting {
            let before = self.inspected.filter(|(known, _)| *known == call).map_or(0, |(_, times)| times);
            self.inspected = Some((call, before + 1));
        }
        self.crash = Some(report);
        progress
    }

    fn count(&mut self, begun: u64, evaluations: u64) {
        self.begun = self.begun.max(begun);
        self.evaluations = self.evaluations.max(evaluations);
    }

    /// Records a reset: nothing remains but the limits, the clients and the history of errors of the others.
    pub(crate) fn reset(&mut self, last: &LastStatus, replacement: Replacement) {
        if let Some(client) = self.client_of(&replacement) {
            client.errors.reset();
        }
        self.replace(last, replacement);
        self.definitions = self.definitions.take().map(|_| Definitions::default());
        self.restorable.clear();
        self.unrestored.clear();
    }

    /// Records a return to a checkpoint: all that came later is forgotten, except the history of errors. `saved` is the
    /// content of the checkpoint, which is used when this session did not come through it.
    pub(crate) fn return_to(
        &mut self,
        checkpoint: Checkpoint,
        last: &LastStatus,
        mut replacement: Replacement,
        saved: RecoveryState,
    ) {
        if let Some(client) = self.client_of(&replacement) {
            client.errors.last = None;
        }
        let forgotten = self.evaluations.max(last.evaluations).saturating_sub(checkpoint.evaluation);
        replacement.returned = Some(Returned { checkpoint: checkpoint.clone(), forgotten });
        self.replace(last, replacement);
        self.unrestored = saved.unrestored;
        match self.restorable.iter().position(|one| one.checkpoint.file == checkpoint.file) {
            Some(index) => {
                self.restorable.truncate(index + 1);
                let position = self.position();
                if let Some(definitions) = &mut self.definitions {
                    definitions.truncate(position);
                }
                self.restorable.iter_mut().for_each(|one| one.dropped = 0);
            }
            None => {
                let definitions = saved.definitions.unwrap_or_default();
                let position = definitions.end();
                self.restorable = VecDeque::from([Restorable { checkpoint, position, dropped: 0 }]);
                self.definitions = self.definitions.take().map(|_| definitions);
            }
        }
    }

    fn client_of(&mut self, replacement: &Replacement) -> Option<&mut Client> {
        let client = if self.clients.contains_key(&replacement.client) { replacement.client } else { 0 };
        self.clients.get_mut(&client)
    }

    fn replace(&mut self, last: &LastStatus, replacement: Replacement) {
        self.handshakes.clear();
        self.saving.clear();
        self.count(last.begun, last.evaluations);
        (self.crash, self.resumed, self.replay) = (None, None, ReplayPolicy::default());
        self.replacement = Some(replacement);
    }

    /// A new server's state, which continues this one's session: without clients, calls and crashes.
    pub(crate) fn continued(mut self) -> Self {
        let errors = self.clients.remove(&0).unwrap_or_default().errors;
        let mut state = Self::new(true);
        state.clients.insert(0, Client { handshake: Vec::new(), errors });
        state.definitions = Some(self.definitions.unwrap_or_default());
        // A server that ended before its image was restored has not said that these are missing.
        self.unrestored.extend(self.crash.into_iter().flat_map(|crash| crash.poisoned));
        (state.unrestored, state.evaluations) = (self.unrestored, self.evaluations);
        (state.restorable, state.saving) = (self.restorable, self.saving);
        state
    }

    /// Settles the saves of a session that a new server continues: `look` says of each file, in order, what became of it.
    pub(crate) fn settle_saves(&mut self, mut look: impl FnMut(&str) -> SavedFile) {
        let complete = self.restorable.drain(..).map(|Restorable { checkpoint, position, dropped }| Save {
            file: checkpoint.file,
            position,
            dropped,
        });
        let mut saves: Vec<_> = complete.chain(self.saving.drain(..)).collect();
        saves.sort_by_key(|save| save.position);
        for save in saves {
            match look(&save.file) {
                SavedFile::Usable(checkpoint) => self.add_restorable(save.completed(*checkpoint)),
                SavedFile::OfOtherProgram => self.restorable.clear(),
                SavedFile::Unusable => {}
            }
        }
    }

    /// Records that a save contains all that was defined, though its beginning was not reported.
    pub(crate) fn saved_at_end(&mut self, checkpoint: &Checkpoint) {
        if self.saved_files().contains(&checkpoint.file) {
            return;
        }
        self.evaluations = self.evaluations.max(checkpoint.evaluation);
        self.apply(SessionEvent::Saving { file: checkpoint.file.clone() });
    }

    /// The state as the next worker is given it: of the definitions only those that are not in the checkpoint.
    pub(crate) fn for_worker(&mut self) -> Self {
        let all = self.definitions.take();
        let definitions = all.as_ref().map(|definitions| definitions.since(self.position()));
        let state = Self { definitions, ..self.clone() };
        self.definitions = all;
        state
    }

    /// Returns the content of a checkpoint that is being saved, for a later return to it: definitions, and missing forms.
    pub(crate) fn content(&self) -> Option<Self> {
        let definitions = self.definitions.as_ref()?;
        let any = definitions.end() > 0 || !self.unrestored.is_empty();
        any.then(|| Self {
            definitions: Some(definitions.clone()),
            unrestored: self.unrestored.clone(),
            ..Self::new(true)
        })
    }

    /// The state without the histories of errors, for when it is too large.
    pub(crate) fn without_histories(&self) -> Self {
        let mut state = self.clone();
        state.clients.values_mut().for_each(|client| client.errors.history = Default::default());
        state
    }

    /// The definitions, in order. A worker is given those that it replays, and no others.
    pub(crate) fn definitions(&self) -> impl Iterator<Item = &Definition> {
        self.definitions.iter().flat_map(|definitions| definitions.iter_from(0))
    }

    /// Returns the number of definitions after the checkpoint that were dropped for want of room.
    pub(crate) fn dropped(&self) -> usize {
        let since_the_beginning = || self.definitions.as_ref().map_or(0, Definitions::dropped);
        self.restorable.back().map_or_else(since_the_beginning, |one| one.dropped)
    }
}

/// The fate of a file that a session was saved in.
#[derive(Debug)]
pub(crate) enum SavedFile {
    /// The file is a checkpoint that can be booted here.
    Usable(Box<Checkpoint>),
    /// Another program saved it. Older checkpoints do not count either: replaying all definitions restores more.
    OfOtherProgram,
    /// The file is gone, incomplete or damaged.
    Unusable,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::{Changes, DefiningForm};

    fn definition(code: &str) -> Definition {
        let form = DefiningForm { code: code.to_owned(), package: "COMMON-LISP-USER".to_owned() };
        Definition { form, changes: Changes::default(), local: false, evaluation: 1, took: 0, too_long: None }
    }

    fn checkpoint() -> Checkpoint {
        Checkpoint {
            name: "x".to_owned(),
            file: "x.core".to_owned(),
            bytes: 0,
            seal: None,
            evaluation: 1,
            saved: jiff::Timestamp::UNIX_EPOCH,
            heap: 0,
            build: crate::build(),
            automatic: false,
            at_end: false,
            defines: String::new(),
        }
    }

    fn with_definitions(codes: &[&str]) -> RecoveryState {
        let mut state = RecoveryState::new(true);
        codes.iter().for_each(|code| state.apply(SessionEvent::Defined(definition(code))));
        state
    }

    fn codes(state: &RecoveryState) -> Vec<&str> {
        state.definitions().map(|definition| &*definition.form.code).collect()
    }

    #[test]
    fn a_crash_during_a_replay_leaves_out_the_form_after_its_tries_and_reports_the_first_crash() {
        let mut state = with_definitions(&["(a)", "(b)", "(c)"]);
        let first = LastStatus { in_flight: true, background: vec![4], ..LastStatus::default() };
        assert!(!state.record_crash(first, true, &Crash::new("died")));
        let at_second = LastStatus { replaying: Some(1), ..LastStatus::default() };
        assert!(state.record_crash(at_second.clone(), false, &Crash::new("died again")));
        assert_eq!(codes(&state), ["(a)", "(b)", "(c)"]);
        assert!(state.record_crash(at_second, false, &Crash::new("died again")));
        assert_eq!(codes(&state), ["(a)", "(c)"]);
        let crash = state.crash.clone().expect("it was lost");
        assert_eq!((&*crash.cause, crash.in_flight, crash.background), ("died", true, vec![4]));
        assert_eq!(crash.poisoned[0].form.code, "(b)");
        assert!(state.restored(&[(1, "it failed".to_owned())]));
        assert_eq!(codes(&state), ["(a)"]);
        let unrestored: Vec<_> = state.unrestored.iter().map(|form| (&*form.form.code, &*form.reason)).collect();
        assert_eq!(unrestored, [("(b)", "it takes the image down"), ("(c)", "it failed")]);
    }

    #[test]
    fn unrestored_forms_are_bounded_by_number_and_bytes() {
        let mut state = RecoveryState::new(true);
        for round in 0..3 * MAX_UNRESTORED {
            state.apply(SessionEvent::Defined(definition(&format!("(f {round})"))));
            assert!(state.restored(&[(0, "it failed".to_owned())]));
        }
        assert_eq!(state.unrestored.len(), MAX_UNRESTORED);
        for letter in ["x", "y", "z"] {
            state.apply(SessionEvent::Defined(definition(&letter.repeat(MAX_UNRESTORED_BYTES / 2 - 1000))));
            assert!(state.restored(&[(0, "it failed".to_owned())]));
        }
        assert_eq!(state.unrestored.len(), 2);
    }

    #[test]
    fn a_return_to_a_checkpoint_clears_the_suspect_of_the_replay_before() {
        let mut state = with_definitions(&["(a)", "(b)"]);
        let at_first = LastStatus { replaying: Some(0), ..LastStatus::default() };
        let killed = || Crash::new("was killed").killed();
        (0..2).for_each(|_| assert!(state.record_crash(at_first.clone(), false, &killed())));
        let replacement = Replacement { call: 1, client: 0, notices: Vec::new(), returned: None };
        let saved = with_definitions(&["(c)", "(d)"]);
        state.return_to(checkpoint(), &LastStatus::default(), replacement, saved);
        state.apply(SessionEvent::Defined(definition("(e)")));
        assert!(state.record_crash(at_first, false, &killed()));
        assert_eq!(codes(&state), ["(c)", "(d)", "(e)"]);
    }

    #[test]
    fn definitions_that_were_dropped_since_a_checkpoint_are_counted() {
        let mut state = RecoveryState::new(true);
        let large = |number: usize| definition(&format!("({number} {})", "x".repeat(1 << 20)));
        (0..10).for_each(|number| state.apply(SessionEvent::Defined(large(number))));
        let checkpoint = checkpoint();
        state.apply(SessionEvent::Saving { file: checkpoint.file.clone() });
        (10..20).for_each(|number| state.apply(SessionEvent::Defined(large(number))));
        state.apply(SessionEvent::Saved(Box::new(checkpoint)));
        assert_eq!(state.dropped(), 0);
        (20..40).for_each(|number| state.apply(SessionEvent::Defined(large(number))));
        assert_eq!(state.dropped() + state.definitions().count(), 30);
    }

    #[test]
    fn a_form_that_failed_is_not_missing_when_later_forms_defined_its_names() {
        let mut state = RecoveryState::new(true);
        let defining = |code: &str, names: &[&str]| {
            let defined = names.iter().map(|name| (*name).to_owned()).collect();
            SessionEvent::Defined(Definition { changes: Changes { defined, ..Changes::default() }, ..definition(code) })
        };
        for (code, names) in [
            ("(both)", &["FUNCTION F", "FUNCTION G"][..]),
            ("(defun f)", &["FUNCTION F"]),
            ("(other)", &["FUNCTION H"]),
            ("(defun g)", &["FUNCTION G"]),
            ("(other)", &["FUNCTION H"]),
        ] {
            state.apply(defining(code, names));
        }
        let missing = |indices: &[usize]| {
            let failed: Vec<_> = indices.iter().map(|index| (*index, "it failed".to_owned())).collect();
            state.failures(&failed).into_iter().map(|form| form.form.code).collect::<Vec<_>>()
        };
        assert!(missing(&[0]).is_empty());
        assert_eq!(missing(&[0, 1]), ["(both)", "(defun f)"]);
        assert!(missing(&[2]).is_empty());
        assert_eq!(missing(&[2, 4]), ["(other)"]);
    }

    #[test]
    fn the_state_is_the_same_after_serialization() {
        let mut state = with_definitions(&["(a)", "(b)"]);
        state.connected(3);
        state.apply(SessionEvent::Handshake { call: 7, message: "{}".to_owned() });
        state.answered(7, 3);
        state.apply(SessionEvent::Saving { file: "x.core".to_owned() });
        state.record_crash(LastStatus { replaying: Some(0), ..LastStatus::default() }, false, &Crash::new("died"));
        let json = serde_json::to_value(&state).expect("JSON");
        let read: RecoveryState = serde_json::from_value(json.clone()).expect("a state");
        assert_eq!(serde_json::to_value(&read).expect("JSON"), json);
        assert_eq!(read.clients[&3].handshake, ["{}"]);
    }

    #[test]
    fn a_continued_session_has_no_clients_or_crashes() {
        let mut state = with_definitions(&["(a)"]);
        state.connected(3);
        state.record_crash(LastStatus::default(), true, &Crash::new("died"));
        state.crash.as_mut().unwrap().poisoned.push(Unrestored::new(&definition("(p)"), "it takes the image down"));
        let state = state.continued();
        assert_eq!(codes(&state), ["(a)"]);
        assert_eq!(state.unrestored[0].form.code, "(p)");
        assert_eq!((state.clients.len(), state.crash.is_none()), (1, true));
    }
}
