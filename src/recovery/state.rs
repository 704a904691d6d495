//! The recovery state, from which the next worker continues where the last worker stopped.
//!
//! The state is the fold over [session events](SessionEvent) and over the crashes, resets and restores that the
//! supervisor records. This module uses no files, processes or clock.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::checkpoint::store::Checkpoint;
use super::definitions::{Definition, Definitions, SYSTEM_KIND, UnrestoredForm};
use super::event::{MAX_HANDSHAKE_MESSAGE, SessionEvent};
use super::replay_policy::{ReplayDecision, ReplayPolicy};
use super::unrestored::UnrestoredForms;
use crate::Limits;
use crate::image::interruption::StuckReason;
use crate::outcome::{FormRole, Outcome};
use crate::result_kind::CANCELLED;
use crate::rpc::inflight::ServerRequests;
use crate::rpc::route::call_of_job;
use crate::session::recovery::SavedErrors;

/// Maximum number of handshakes, of all clients together, whose calls are not answered yet. The newest are kept.
const MAX_UNANSWERED_HANDSHAKES: usize = 64;
/// Maximum number of recorded requests of the server that a client has not answered.
const MAX_OPEN_SERVER_REQUESTS: usize = 64;
/// Limit of the numbers of the server's requests, which no server reaches.
const MAX_SERVER_REQUEST: u64 = 1 << 53;
/// Maximum number of saves in progress that are recorded. When there are more, the oldest are forgotten.
pub(crate) const MAX_SAVES_IN_PROGRESS: usize = 64;
/// Maximum number of checkpoints that the next image may boot from.
const MAX_RESTORABLE_CHECKPOINTS: usize = 8;
/// Maximum number of ranges in [`RecoveryState::discarded`]. The newest ranges are kept.
const MAX_DISCARDED_RANGES: usize = 100;
/// Maximum number of forms in [`RecoveryState::unrestored`]. The newest forms are kept.
const MAX_UNRESTORED: usize = 100;
/// Maximum size of the unrestored forms together, in bytes of JSON.
const MAX_UNRESTORED_BYTES: usize = 8 << 20;

/// The state that outlives an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RecoveryState {
    /// The clients by the number of their connections; 0 is the client of the server's stdin and stdout.
    pub(crate) clients: BTreeMap<u64, ClientState>,
    /// The handshakes whose calls are not answered yet, oldest first, each with its call's number.
    handshakes: Vec<(u64, String)>,
    /// The limits that a client has set; `None` for the limits of the command line.
    pub(crate) limits: Option<Limits>,
    /// The definitions since the session began; `None` when definitions are not kept. A replay evaluates only the
    /// definitions that the booted checkpoint does not contain.
    pub(crate) definitions: Option<Definitions>,
    /// The forms that could not be restored and have not been defined again.
    pub(crate) unrestored: UnrestoredForms,
    /// The saves that have begun and are not known to be complete.
    saving: VecDeque<PendingSave>,
    /// The checkpoints that the next image may boot from, oldest first.
    restorable: VecDeque<RestorableCheckpoint>,
    /// The replay policy, which knows the form that may be poisoned.
    replay: ReplayPolicy,
    /// The highest number of a job that began in an earlier image. Jobs up to this number must not begin again.
    pub(crate) begun: u64,
    /// The highest evaluation number so far.
    pub(crate) evaluations: u64,
    /// The highest number of an error so far, of any client.
    pub(crate) errors: u64,
    /// The evaluations that resets and restores have discarded: in order, the ranges of their numbers, each with the number
    /// before the first and with the last number.
    discarded: VecDeque<(u64, u64)>,
    /// The number of the call whose inspection ran when an image was last lost during an inspection, and the number of
    /// images lost during that call.
    pub(crate) inspected: Option<(u64, u32)>,
    /// The crash that the next image recovers from.
    pub(crate) crash: Option<CrashReport>,
    /// The reset or restore that requested the next image.
    pub(crate) replacement: Option<Replacement>,
    /// The lowest job numbers of the calls whose reset or restore has replaced an image and that have no answer yet. A later
    /// image runs these calls again, whichever call requested that image.
    pub(crate) replaced_for: BTreeSet<u64>,
    /// The value of `begun` when a call last replaced an image.
    pub(crate) begun_before_replacement: u64,
    /// The persistent session that the server's first image continues.
    #[serde(rename = "resumed")]
    pub(crate) continued_session: Option<ContinuedSession>,
    /// The number of the first new line of input for the next worker. Later new lines have consecutive numbers.
    pub(crate) next_line: u64,
}

/// The recovery state of one client.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ClientState {
    /// The client's last `initialize` request that is answered, as JSON. A later handshake replaces an earlier one.
    pub(crate) initialize: Option<String>,
    /// The client's error state and history.
    pub(crate) errors: SavedErrors,
    /// The requests that the server has sent to the client. The next worker withdraws the open requests.
    #[serde(default)]
    pub(crate) server_requests: ServerRequests,
}

/// The coverage of a core: the definitions that it contains.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Coverage {
    /// The position of the first definition that the core does not contain.
    position: u64,
    /// The number of definitions from `position` on that were dropped for lack of room, and whose code is not kept.
    #[serde(default)]
    dropped: usize,
}

/// A save in progress.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct PendingSave {
    /// The name of the core's file.
    file: String,
    #[serde(flatten)]
    coverage: Coverage,
}

/// A checkpoint that the next image may boot from.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RestorableCheckpoint {
    checkpoint: Checkpoint,
    #[serde(flatten)]
    coverage: Coverage,
}

/// A replacement of the image that a call requested: a reset or the restore of a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Replacement {
    /// The lowest number for the call's jobs. The calls of a batch share a call number, but no job numbers.
    pub(crate) job: u64,
    /// The number of the connection that sent the call.
    pub(crate) client: u64,
    /// The notices of the replaced image that this client has not seen yet.
    pub(crate) notices: Vec<String>,
    /// The requested restore; `None` for a reset.
    #[serde(rename = "returned")]
    pub(crate) restore: Option<RequestedRestore>,
}

/// The restore of a checkpoint that a call requested.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RequestedRestore {
    /// The next image must boot the checkpoint. Until that image has booted, the session is as it was before the request.
    Pending {
        checkpoint: Checkpoint,
        /// The content of the checkpoint; `None` if the checkpoint was empty or its content cannot be read.
        content: Option<Box<RecoveryState>>,
    },
    /// The checkpoint has booted.
    Complete(CheckpointRestore),
    /// The checkpoint could not be booted. The session is as it was before the request.
    Failed {
        /// The checkpoint's name.
        name: String,
        /// The reason, as a clause.
        reason: String,
    },
}

/// The completed restore of a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CheckpointRestore {
    pub(crate) checkpoint: Checkpoint,
    /// The number of evaluations since the checkpoint that this restore discards.
    pub(crate) forgotten: u64,
}

/// A persistent session that a new server continues.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ContinuedSession {
    /// The session's name.
    pub(crate) session: String,
    /// The problems with the saved image or the log, in sentences, if there were any.
    pub(crate) remark: Option<String>,
}

/// The crash report: the information about a lost image that the next image passes to its clients.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CrashReport {
    /// The cause, as the rest of a sentence about the image: `was killed by signal 9 (SIGKILL)`.
    pub(crate) cause: String,
    /// True when a foreground evaluation was running.
    pub(crate) in_flight: bool,
    /// The number of the connection that requested the foreground evaluation.
    #[serde(default)]
    pub(crate) connection: u64,
    /// The lowest number for the jobs of the message that requested the foreground evaluation; `None` if unknown.
    #[serde(default)]
    pub(crate) job: Option<u64>,
    /// The numbers of the background evaluations.
    pub(crate) background: Vec<u64>,
    /// The outcome of the foreground evaluation, if it could not be interrupted or if it exhausted the heap.
    #[serde(rename = "stuck")]
    pub(crate) outcome: Option<Box<Outcome>>,
    /// The poisoned forms, which are left out because they killed an image during its replay.
    pub(crate) poisoned: Vec<UnrestoredForm>,
}

impl CrashReport {
    /// Returns true when the image was replaced because a cancelled evaluation did not end.
    pub(crate) fn follows_cancellation(&self) -> bool {
        let error = self.outcome.as_ref().and_then(|outcome| outcome.result.as_ref().err());
        self.in_flight && error.is_some_and(|error| error.kind == CANCELLED)
    }
}

/// The loss of an image, as the supervisor detected it.
#[derive(Debug, Clone)]
pub(crate) struct Crash {
    /// The cause, as the rest of a sentence about the image.
    pub(crate) cause: String,
    /// The outcome of the foreground evaluation, if known.
    pub(crate) outcome: Option<Box<Outcome>>,
    /// The suspicion against the form that was being replayed.
    pub(crate) suspicion: Suspicion,
    /// The call number of the input line at which the worker stalled, or of a line that did not reach the worker.
    pub(crate) stalled_at: Option<u64>,
}

/// The strength of the evidence that the form being replayed caused a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suspicion {
    /// Only the form can have caused the crash.
    Certain,
    /// The form or something else in the image caused the crash.
    Likely,
    /// Another process may have caused the crash: the image was killed by a signal that other processes send.
    Possible,
}

impl Crash {
    /// Creates a crash. `cause` is the rest of a sentence about the image.
    pub(crate) fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), outcome: None, suspicion: Suspicion::Likely, stalled_at: None }
    }

    /// Adds the outcome of the foreground evaluation.
    pub(crate) fn with_outcome(self, outcome: impl Into<Option<Outcome>>) -> Self {
        Self { outcome: outcome.into().map(Box::new), ..self }
    }

    /// Records the line of input at which the worker stalled, or a line that did not reach the worker; `None` for neither.
    pub(crate) fn stalled_at(self, line: Option<u64>) -> Self {
        Self { stalled_at: line, ..self }
    }

    /// Marks the form that was being replayed as the certain cause of the crash.
    pub(crate) fn caused_by_form(self) -> Self {
        Self { suspicion: Suspicion::Certain, ..self }
    }

    /// Marks the crash as possibly caused from outside.
    pub(crate) fn possibly_external(self) -> Self {
        Self { suspicion: Suspicion::Possible, ..self }
    }

    /// Creates the crash of an image that could not be interrupted. `outcome` is the outcome of the stuck evaluation. If
    /// `replayed` is false, the image had not replayed all definitions, and the form being replayed caused the crash.
    pub(crate) fn stuck(outcome: Option<Box<Outcome>>, why: StuckReason, replayed: bool) -> Self {
        let crash = Self { outcome, ..Self::new(format!("{} and was terminated", why.predicate())) };
        if replayed { crash } else { crash.caused_by_form() }
    }
}

/// The content of the status page of a worker that is lost or about to be replaced.
#[derive(Debug, Clone, Default)]
pub(crate) struct LastStatus {
    /// The highest job number of a call that had begun; 0 if no call had begun, or if the numbers on the page belong to no
    /// call.
    pub(crate) begun: u64,
    /// True when a requested foreground job had not ended.
    pub(crate) in_flight: bool,
    /// The number of the connection that requested the foreground job.
    pub(crate) client: u64,
    /// The lowest number for the jobs of the message that requested the foreground job; `None` if no unanswered message of
    /// this client has the job's number.
    pub(crate) job: Option<u64>,
    /// The numbers of the background evaluations.
    pub(crate) background: Vec<u64>,
    /// The step that the foreground job had reached.
    pub(crate) step: Option<String>,
    /// The index of the definition that was being replayed.
    pub(crate) replaying: Option<usize>,
    /// The number of the newest evaluation.
    pub(crate) evaluations: u64,
    /// The number of the newest error.
    pub(crate) errors: u64,
    /// The number of the unanswered call whose inspection was running.
    pub(crate) inspecting: Option<u64>,
}

impl Default for RecoveryState {
    fn default() -> Self {
        Self::new(true)
    }
}

impl RecoveryState {
    /// Creates the state before the first worker. `restores` is true when definitions are kept and replayed.
    pub(crate) fn new(restores: bool) -> Self {
        Self {
            clients: BTreeMap::from([(0, ClientState::default())]),
            handshakes: Vec::new(),
            limits: None,
            definitions: restores.then(Definitions::default),
            unrestored: UnrestoredForms::default(),
            saving: VecDeque::new(),
            restorable: VecDeque::new(),
            replay: ReplayPolicy::default(),
            begun: 0,
            evaluations: 0,
            errors: 0,
            discarded: VecDeque::new(),
            inspected: None,
            crash: None,
            replacement: None,
            replaced_for: BTreeSet::new(),
            begun_before_replacement: 0,
            continued_session: None,
            next_line: 0,
        }
    }

    /// Applies a change of the session.
    pub(crate) fn apply(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Handshake { call, message } => {
                if message.len() <= MAX_HANDSHAKE_MESSAGE {
                    self.handshakes.retain(|(of, _)| *of != call);
                    self.handshakes.push((call, message));
                    let excess = self.handshakes.len().saturating_sub(MAX_UNANSWERED_HANDSHAKES);
                    self.handshakes.drain(..excess);
                }
            }
            SessionEvent::Defined(definition) => {
                self.unrestored.record(&definition.form, &definition.changes);
                self.evaluations = self.evaluations.max(definition.evaluation);
                if let Some(definitions) = &mut self.definitions {
                    for position in definitions.add(definition) {
                        let complete = self.restorable.iter_mut().map(|entry| &mut entry.coverage);
                        let cores = complete.chain(self.saving.iter_mut().map(|save| &mut save.coverage));
                        cores.filter(|core| core.position <= position).for_each(|core| core.dropped += 1);
                    }
                }
            }
            SessionEvent::Detached { evaluation } => {
                if let Some(definitions) = &mut self.definitions {
                    definitions.make_local(evaluation);
                }
            }
            SessionEvent::Errors { client, added, last } => {
                self.errors = self.errors.max(added.as_ref().map_or(0, |error| error.id));
                if let Some(client) = self.clients.get_mut(&client) {
                    client.errors.record(added, last);
                }
            }
            SessionEvent::ServerRequests { client, mut requests } => {
                requests.open.truncate(MAX_OPEN_SERVER_REQUESTS);
                // User code can forge the event, and after a huge number, the next numbers would overflow.
                if let Some(client) = self.clients.get_mut(&client)
                    && requests.last < MAX_SERVER_REQUEST
                {
                    client.server_requests = requests;
                }
            }
            SessionEvent::Limits(limits) => self.limits = Some(limits),
            SessionEvent::Saving { file } => {
                let position = self.definitions.as_ref().map_or(0, Definitions::next_position);
                self.saving.push_back(PendingSave { file, coverage: Coverage { position, dropped: 0 } });
                if self.saving.len() > MAX_SAVES_IN_PROGRESS {
                    self.saving.pop_front();
                }
            }
            SessionEvent::SaveFailed { file } => self.saving.retain(|save| save.file != file),
            SessionEvent::Saved(checkpoint) => {
                let index = self.saving.iter().position(|save| save.file == checkpoint.file);
                let is_replaced = |entry: &RestorableCheckpoint| {
                    entry.checkpoint.name == checkpoint.name && entry.checkpoint.saved > checkpoint.saved
                };
                // A save of the same name that began later may have been completed earlier.
                if let Some(save) = index.and_then(|index| self.saving.remove(index))
                    && !self.restorable.iter().any(is_replaced)
                {
                    self.restorable.retain(|entry| entry.checkpoint.name != checkpoint.name);
                    self.add_restorable(RestorableCheckpoint { checkpoint: *checkpoint, coverage: save.coverage });
                }
            }
        }
    }

    /// Adds a checkpoint to `restorable`, which is ordered by the definitions that the cores contain, and then by time.
    fn add_restorable(&mut self, new: RestorableCheckpoint) {
        // Saves may be completed in a different order than they were begun.
        let age = |entry: &RestorableCheckpoint| (entry.coverage.position, entry.checkpoint.saved);
        let index = self.restorable.partition_point(|other| age(other) <= age(&new));
        self.restorable.insert(index, new);
        if self.restorable.len() > MAX_RESTORABLE_CHECKPOINTS {
            self.restorable.pop_front();
        }
    }

    /// Returns the files of the saves that are not known to be complete, oldest first.
    pub(crate) fn files_being_saved(&self) -> impl Iterator<Item = &str> {
        self.saving.iter().map(|save| &*save.file)
    }

    /// Returns the file of the oldest save that is not known to be complete, if the state forgets this save when the next
    /// save begins.
    pub(crate) fn next_forgotten_save(&self) -> Option<&str> {
        self.files_being_saved().next().filter(|_| self.saving.len() >= MAX_SAVES_IN_PROGRESS)
    }

    /// Returns the files of all saves, complete or not, ordered by the last definition that they contain.
    pub(crate) fn saved_files(&self) -> Vec<String> {
        let complete = self.restorable.iter().map(|entry| (entry.coverage, &entry.checkpoint.file));
        let mut files: Vec<_> = complete.chain(self.saving.iter().map(|save| (save.coverage, &save.file))).collect();
        files.sort_by_key(|(coverage, _)| coverage.position);
        files.into_iter().map(|(_, file)| file.clone()).collect()
    }

    /// Returns the checkpoint that the next image boots from.
    pub(crate) fn checkpoint(&self) -> Option<&Checkpoint> {
        self.restorable.back().map(|entry| &entry.checkpoint)
    }

    /// Returns the checkpoint that the next image must boot at the request of a call; `None` unless a restore is pending.
    pub(crate) fn requested_checkpoint(&self) -> Option<&Checkpoint> {
        match self.replacement.as_ref()?.restore.as_ref()? {
            RequestedRestore::Pending { checkpoint, .. } => Some(checkpoint),
            RequestedRestore::Complete(_) | RequestedRestore::Failed { .. } => None,
        }
    }

    /// Keeps only the checkpoints for which `keep` returns true.
    pub(crate) fn retain_checkpoints(&mut self, mut keep: impl FnMut(&Checkpoint) -> bool) {
        self.restorable.retain(|entry| keep(&entry.checkpoint));
    }

    /// Returns the position of the first definition that the checkpoint does not contain; 0 without a checkpoint.
    fn checkpoint_position(&self) -> u64 {
        self.restorable.back().map_or(0, |entry| entry.coverage.position)
    }

    /// Returns true when there is a checkpoint to boot or a definition to replay.
    pub(crate) fn has_state_to_restore(&self) -> bool {
        !self.restorable.is_empty()
            || self.definitions.as_ref().is_some_and(|definitions| definitions.next_position() > 0)
    }

    /// Records that a call of this client is finished, with or without an answer. If the call was a handshake, it replaces
    /// the client's last handshake.
    pub(crate) fn record_answer(&mut self, call: u64, client: u64) {
        self.replaced_for.retain(|job| call_of_job(*job) != call);
        let Some(index) = self.handshakes.iter().position(|(of, _)| *of == call) else { return };
        let (_, message) = self.handshakes.remove(index);
        if let Some(client) = self.clients.get_mut(&client) {
            client.initialize = Some(message);
        }
    }

    /// Records that a client has connected.
    pub(crate) fn record_connection(&mut self, client: u64) {
        self.clients.insert(client, ClientState::default());
    }

    /// Records that a client has disconnected.
    pub(crate) fn record_disconnection(&mut self, client: u64) {
        self.clients.remove(&client);
    }

    /// Records the end of a replay. `failed` contains the index of each definition that failed, with the reason; these
    /// definitions are not replayed again. Returns true if any form could not be restored, or if the image notified a client
    /// that its history is shortened: the next image then does not repeat the notice.
    pub(crate) fn record_replay(&mut self, failed: &[(usize, String)]) -> bool {
        let unrestored = self.missing_forms(failed);
        let position = self.checkpoint_position();
        if let Some(definitions) = &mut self.definitions {
            definitions.forget_dropped_forms(position);
            if !failed.is_empty() {
                definitions.remove(position, &failed.iter().map(|(index, _)| *index).collect());
            }
        }
        self.replay = ReplayPolicy::default();
        let mut changed = !unrestored.is_empty();
        self.unrestored.append(unrestored);
        self.unrestored.keep_newest(MAX_UNRESTORED, MAX_UNRESTORED_BYTES);
        for client in self.clients.values_mut() {
            changed |= client.errors.record_notice();
        }
        changed
    }

    /// Returns the forms that are missing after a replay: the poisoned forms, the forms that were dropped for lack of
    /// room, and the definitions at the indices in `failed`, each with the reason. A failed form is not missing if an
    /// equal form follows, or if later forms that succeeded defined or removed all of its names. A form that had already failed
    /// in the lost image may have loaded a system that an earlier form loads: the replay of this form loads the current files
    /// of the system.
    pub(crate) fn missing_forms(&self, failed: &[(usize, String)]) -> Vec<UnrestoredForm> {
        let replayed: Vec<_> =
            self.definitions.iter().flat_map(|definitions| definitions.iter_from(self.checkpoint_position())).collect();
        let failed: HashMap<usize, &String> = failed.iter().map(|(index, why)| (*index, why)).collect();
        let mut first_loads: HashMap<&String, usize> = HashMap::new();
        for (index, definition) in replayed.iter().copied().enumerate().filter(|(index, _)| !failed.contains_key(index))
        {
            // A system in `removed` was loaded as a dependency.
            let changes = &definition.changes;
            for system in changes.defined.iter().chain(&changes.removed).filter(|name| name.starts_with(SYSTEM_KIND)) {
                first_loads.entry(system).or_insert(index);
            }
        }
        let (mut later_forms, mut later_names) = (HashSet::new(), HashSet::new());
        let mut missing = Vec::new();
        for (index, definition) in replayed.into_iter().enumerate().rev() {
            let changes = &definition.changes;
            let is_later = !later_forms.insert(&definition.form);
            match failed.get(&index) {
                None => later_names.extend(changes.defined.iter().chain(&changes.removed)),
                Some(why) => {
                    let mut form = UnrestoredForm::new(definition, why);
                    let has_names = !form.missing.is_empty();
                    if changes.role == FormRole::Failed {
                        form.missing.retain(|name| first_loads.get(name).is_none_or(|first| *first > index));
                    }
                    let is_replaced = has_names && form.missing.iter().all(|name| later_names.contains(name));
                    // The form that failed after it had loaded files again is missing itself.
                    if !is_later && !definition.is_reload() && !is_replaced {
                        missing.push(form);
                    }
                }
            }
        }
        let poisoned = self.crash.iter().flat_map(|crash| &crash.poisoned).cloned();
        let dropped =
            self.definitions.iter().flat_map(|definitions| definitions.dropped_forms(self.checkpoint_position()));
        poisoned.chain(dropped.cloned()).chain(missing.into_iter().rev()).collect()
    }

    /// Records a crash. `replayed` is true when the image had replayed its definitions. Returns true when the crash
    /// advances the replay: a poisoned form is left out, a first form is recorded as possibly poisoned, or the
    /// recorded form has fewer tries left.
    ///
    /// If a restore is pending and its checkpoint is not tried again, the restore has failed. If the lost image was to
    /// replace another image at the request of a call, the state contains a crash only if a form is left out: otherwise
    /// the next image reports the reset or restore, as the lost image would have done.
    pub(crate) fn record_crash(&mut self, last: LastStatus, replayed: bool, crash: &Crash) -> bool {
        self.handshakes.clear();
        self.raise_counters(&last);
        if let Some(call) = last.inspecting {
            let before = self.inspected.filter(|(known, _)| *known == call).map_or(0, |(_, times)| times);
            self.inspected = Some((call, before + 1));
        }
        // No client waits for the outcome of a replayed form.
        let outcome = crash.outcome.clone().filter(|_| replayed);
        let cause = match last.step.filter(|_| last.in_flight && replayed && outcome.is_none()) {
            Some(step) => format!("{} during {step}", crash.cause),
            None => crash.cause.clone(),
        };
        // The client's number is from the status page, to which foreign code may have written.
        let connection = if self.clients.contains_key(&last.client) { last.client } else { 0 };
        let (in_flight, job, background) = (last.in_flight, last.job, last.background);
        let mut report = CrashReport { cause, in_flight, connection, job, background, outcome, poisoned: Vec::new() };
        let mut progress = false;
        if replayed {
            if let Some(replacement) = &mut self.replacement {
                replacement.notices.clear();
            }
            self.continued_session = None;
        } else {
            let is_requested = self.crash.is_none() && self.replacement.is_some();
            // If the lost image was itself recovering from a crash, that crash is kept, since no client has seen it yet.
            report = self.crash.take().unwrap_or(report);
            let is_restore = self.requested_checkpoint().is_some();
            // After the boot of a requested checkpoint, no definition is replayed.
            let replaying = last.replaying.filter(|_| !is_restore);
            match self.replay.decide_after_crash(replaying, crash.suspicion, &crash.cause) {
                ReplayDecision::Retry { progress: further } => progress = further,
                ReplayDecision::Skip { index, reason } => {
                    let position = self.checkpoint_position();
                    // The index is from the status page, to which foreign code may have written.
                    if let Some(form) = self.definitions.as_mut().and_then(|all| all.take(position, index)) {
                        report.poisoned.push(UnrestoredForm::new(&form, &reason));
                        progress = true;
                    }
                }
                ReplayDecision::PreviousCheckpoint if is_restore => {
                    self.fail_restore(format!("its image {}", crash.cause));
                }
                ReplayDecision::PreviousCheckpoint => drop(self.restorable.pop_back()),
            }
            if is_requested && report.poisoned.is_empty() {
                return progress;
            }
        }
        self.crash = Some(report);
        progress
    }

    /// Raises the highest numbers so far to at least the numbers of the last image.
    fn raise_counters(&mut self, last: &LastStatus) {
        self.begun = self.begun.max(last.begun);
        self.evaluations = self.evaluations.max(last.evaluations);
        self.errors = self.errors.max(last.errors);
    }

    /// Records that the evaluations with numbers above `number` are discarded. Returns how many of these evaluations
    /// were not discarded earlier.
    fn discard_evaluations_after(&mut self, number: u64) -> u64 {
        let discarded: u64 =
            self.discarded.iter().map(|(before, last)| last.saturating_sub(*before.max(&number))).sum();
        self.discarded.retain(|(_, last)| *last <= number);
        if self.evaluations > number {
            self.discarded.push_back((number, self.evaluations));
        }
        if self.discarded.len() > MAX_DISCARDED_RANGES {
            self.discarded.pop_front();
        }
        self.evaluations.saturating_sub(number).saturating_sub(discarded)
    }

    /// Records a reset: removes the definitions, the checkpoints, the unrestored forms, and the error state and history of
    /// the requesting client. The limits and the clients stay.
    pub(crate) fn record_reset(&mut self, last: &LastStatus, replacement: Replacement) {
        if let Some(client) = self.requesting_client(&replacement) {
            client.errors.reset();
        }
        self.record_replacement(last, replacement);
        self.discard_evaluations_after(0);
        self.definitions = self.definitions.take().map(|_| Definitions::default());
        self.restorable.clear();
        self.unrestored = UnrestoredForms::default();
    }

    /// Records that a call requested the restore of a checkpoint. The definitions, the checkpoints and the error states stay
    /// until the restore is [complete](Self::complete_restore). `content` is the content of the checkpoint; `None` if the
    /// checkpoint was empty or its content cannot be read.
    pub(crate) fn request_restore(
        &mut self,
        checkpoint: Checkpoint,
        last: &LastStatus,
        mut replacement: Replacement,
        content: Option<Self>,
    ) {
        replacement.restore = Some(RequestedRestore::Pending { checkpoint, content: content.map(Box::new) });
        self.record_replacement(last, replacement);
    }

    /// Records that the pending restore has failed for this reason, a clause. The session stays as it was before the
    /// request, except that no later image boots from the checkpoint.
    pub(crate) fn fail_restore(&mut self, reason: String) {
        if let Some(restore) = self.replacement.as_mut().and_then(|replacement| replacement.restore.as_mut())
            && let RequestedRestore::Pending { checkpoint, .. } = restore
        {
            self.restorable.retain(|entry| entry.checkpoint.file != checkpoint.file);
            *restore = RequestedRestore::Failed { name: checkpoint.name.clone(), reason };
            self.replay = ReplayPolicy::default();
        }
    }

    /// Records that the checkpoint of the pending restore has booted: removes the later definitions and checkpoints. The
    /// error histories stay. Returns the restore; `None` if no restore was pending.
    pub(crate) fn complete_restore(&mut self) -> Option<CheckpointRestore> {
        let replacement = self.replacement.as_mut()?;
        let RequestedRestore::Pending { checkpoint, content } =
            replacement.restore.take_if(|restore| matches!(restore, RequestedRestore::Pending { .. }))?
        else {
            return None;
        };
        if let Some(client) = self.clients.get_mut(&replacement.client) {
            client.errors.last = None;
        }
        let forgotten = self.discard_evaluations_after(checkpoint.evaluation);
        let restore = CheckpointRestore { checkpoint: checkpoint.clone(), forgotten };
        if let Some(replacement) = &mut self.replacement {
            replacement.restore = Some(RequestedRestore::Complete(restore.clone()));
        }
        let (saved, unrestored) = content.map(|content| (content.definitions, content.unrestored)).unzip();
        let saved = saved.flatten();
        self.unrestored = unrestored.unwrap_or_default();
        match self.restorable.iter().position(|entry| entry.checkpoint.file == checkpoint.file) {
            Some(index) => {
                self.restorable.truncate(index + 1);
                let Coverage { position, dropped } = self.restorable[index].coverage;
                if let Some(definitions) = &mut self.definitions {
                    match saved {
                        // The present definitions may lack forms that were repeated or replaced after the save.
                        Some(saved) => {
                            self.restorable[index].coverage.position = saved.next_position();
                            *definitions = saved;
                        }
                        None => definitions.truncate(position, dropped),
                    }
                }
                // The counts of older checkpoints include dropped definitions that were just removed or restored.
                let left = self.definitions.as_ref().map_or(0, Definitions::dropped_count);
                for entry in &mut self.restorable {
                    entry.coverage.dropped = entry.coverage.dropped.saturating_sub(dropped).min(left);
                }
            }
            None => {
                let definitions = saved.unwrap_or_default();
                let position = definitions.next_position();
                self.restorable =
                    VecDeque::from([RestorableCheckpoint { checkpoint, coverage: Coverage { position, dropped: 0 } }]);
                self.definitions = self.definitions.take().map(|_| definitions);
            }
        }
        Some(restore)
    }

    /// Returns the client that requested a replacement, or the client of stdin if the requesting client has
    /// disconnected.
    fn requesting_client(&mut self, replacement: &Replacement) -> Option<&mut ClientState> {
        let client = if self.clients.contains_key(&replacement.client) { replacement.client } else { 0 };
        self.clients.get_mut(&client)
    }

    /// Records a requested replacement of the image, as part of recording a reset or a restore.
    fn record_replacement(&mut self, last: &LastStatus, replacement: Replacement) {
        self.handshakes.clear();
        self.saving.clear();
        self.raise_counters(last);
        self.begun_before_replacement = self.begun;
        (self.crash, self.continued_session, self.replay) = (None, None, ReplayPolicy::default());
        self.replaced_for.insert(replacement.job);
        self.replacement = Some(replacement);
    }

    /// Returns the state with which a new server continues the session: without attached clients, calls and crashes.
    pub(crate) fn for_new_server(&self) -> Self {
        let errors = self.clients.get(&0).map(|client| client.errors.clone()).unwrap_or_default();
        // If the server ended during a replay, `unrestored` lacks the poisoned forms.
        let poisoned = self.crash.iter().flat_map(|crash| &crash.poisoned);
        Self {
            clients: BTreeMap::from([(0, ClientState { errors, ..ClientState::default() })]),
            definitions: Some(self.definitions.clone().unwrap_or_default()),
            unrestored: self.unrestored.iter().chain(poisoned).cloned().collect(),
            evaluations: self.evaluations,
            errors: self.errors,
            discarded: self.discarded.clone(),
            restorable: self.restorable.clone(),
            saving: self.saving.clone(),
            ..Self::new(true)
        }
    }

    /// Keeps the restorable saves of a session that a new server continues. Calls `classify` with each file, oldest
    /// first.
    pub(crate) fn resolve_saves(&mut self, mut classify: impl FnMut(&str) -> SavedFileStatus) {
        let complete = self.restorable.drain(..);
        let complete = complete.map(|entry| PendingSave { file: entry.checkpoint.file, coverage: entry.coverage });
        let mut saves: Vec<_> = complete.chain(self.saving.drain(..)).collect();
        saves.sort_by_key(|save| save.coverage.position);
        for PendingSave { file, coverage } in saves {
            match classify(&file) {
                SavedFileStatus::Usable(checkpoint) => {
                    self.add_restorable(RestorableCheckpoint { checkpoint: *checkpoint, coverage })
                }
                SavedFileStatus::OfOtherProgram => self.restorable.clear(),
                SavedFileStatus::Unusable => {}
            }
        }
    }

    /// Records the checkpoint that was saved at the end of the last server. No event recorded the beginning of this
    /// save, which contains all definitions so far.
    pub(crate) fn record_final_save(&mut self, checkpoint: &Checkpoint) {
        if self.saved_files().contains(&checkpoint.file) {
            return;
        }
        self.evaluations = self.evaluations.max(checkpoint.evaluation);
        self.apply(SessionEvent::Saving { file: checkpoint.file.clone() });
    }

    /// Returns the state for the next worker, with only the definitions that the last checkpoint does not contain. A pending
    /// restore is complete in this state, since the worker boots the checkpoint.
    pub(crate) fn for_worker(&mut self) -> Self {
        if self.requested_checkpoint().is_some() {
            return self.for_restoring_worker();
        }
        let all = self.definitions.take();
        let definitions = all.as_ref().map(|definitions| definitions.suffix_from(self.checkpoint_position()));
        let state = Self { definitions, ..self.clone() };
        self.definitions = all;
        state
    }

    /// Returns the state for a worker that boots the checkpoint of the pending restore. The worker needs none of the
    /// definitions in the checkpoint. These definitions, and those that they replace, are not copied if the checkpoint's
    /// content is known: clients wait meanwhile.
    fn for_restoring_worker(&mut self) -> Self {
        let saved = self.pending_definitions().map(|saved| {
            let none = saved.suffix_from(saved.next_position());
            std::mem::replace(saved, none)
        });
        let replaced = self.definitions.take_if(|_| saved.is_some());
        let mut restored = self.clone();
        if let (Some(saved), Some(pending)) = (saved, self.pending_definitions()) {
            *pending = saved;
        }
        if replaced.is_some() {
            restored.definitions = Some(Definitions::default());
            self.definitions = replaced;
        }
        restored.complete_restore();
        let position = restored.checkpoint_position();
        restored.definitions = restored.definitions.take().map(|definitions| definitions.suffix_from(position));
        restored
    }

    /// Returns the definitions in the checkpoint of the pending restore.
    fn pending_definitions(&mut self) -> Option<&mut Definitions> {
        match self.replacement.as_mut()?.restore.as_mut()? {
            RequestedRestore::Pending { content: Some(content), .. } => content.definitions.as_mut(),
            _ => None,
        }
    }

    /// Returns the content of a checkpoint that is being saved, for a later restore: the definitions and the unrestored
    /// forms. Returns `None` when there are no definitions or unrestored forms, or when definitions are not kept.
    pub(crate) fn checkpoint_content(&self) -> Option<Self> {
        let definitions = self.definitions.as_ref()?;
        let any = definitions.next_position() > 0 || !self.unrestored.is_empty();
        any.then(|| Self {
            definitions: Some(definitions.clone()),
            unrestored: self.unrestored.clone(),
            ..Self::new(true)
        })
    }

    /// Returns a copy without the error histories, for a state that is too large.
    pub(crate) fn without_histories(&self) -> Self {
        let mut state = self.clone();
        state.clients.values_mut().for_each(|client| client.errors.history = Default::default());
        state
    }

    /// Returns the definitions in order. In a worker, the state contains only the definitions that the worker replays.
    pub(crate) fn definitions(&self) -> impl Iterator<Item = &Definition> {
        self.definitions.iter().flat_map(|definitions| definitions.iter_from(0))
    }

    /// Returns the number of definitions after the checkpoint that were dropped for lack of room, and whose code is not
    /// kept.
    pub(crate) fn dropped_since_checkpoint(&self) -> usize {
        let since_the_beginning = || self.definitions.as_ref().map_or(0, Definitions::dropped_count);
        self.restorable.back().map_or_else(since_the_beginning, |entry| entry.coverage.dropped)
    }
}

/// The classification of a file in which a session was saved.
#[derive(Debug)]
pub(crate) enum SavedFileStatus {
    /// A checkpoint that this server can boot.
    Usable(Box<Checkpoint>),
    /// A checkpoint of another program. Older checkpoints are not used either: all definitions are replayed.
    OfOtherProgram,
    /// A file that is missing, incomplete or damaged, or needs another heap size.
    Unusable,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::{Changes, DefiningForm};

    fn definition(code: &str) -> Definition {
        let form = DefiningForm { code: code.to_owned(), package: "COMMON-LISP-USER".to_owned() };
        Definition {
            form,
            changes: Changes::default(),
            local: false,
            attached: false,
            evaluation: 1,
            took: 0,
            too_long: None,
        }
    }

    fn checkpoint() -> Checkpoint {
        Checkpoint {
            name: "x".to_owned(),
            file: "x.core".to_owned(),
            bytes: 0,
            fingerprint: None,
            damaged: None,
            evaluation: 1,
            saved: jiff::Timestamp::UNIX_EPOCH,
            heap: 0,
            build: crate::build_id(),
            automatic: false,
            at_end: false,
            defines: String::new(),
            threads: Vec::new(),
            timers: 0,
        }
    }

    fn with_definitions(codes: &[&str]) -> RecoveryState {
        let mut state = RecoveryState::new(true);
        codes.iter().for_each(|code| state.apply(SessionEvent::Defined(definition(code))));
        state
    }

    fn reset_or_restore() -> Replacement {
        Replacement { job: 1, client: 0, notices: Vec::new(), restore: None }
    }

    /// Restores a checkpoint that boots. Returns the number of evaluations that the restore discards.
    fn restore(
        state: &mut RecoveryState,
        checkpoint: Checkpoint,
        last: &LastStatus,
        content: Option<RecoveryState>,
    ) -> u64 {
        state.request_restore(checkpoint, last, reset_or_restore(), content);
        state.complete_restore().expect("a restore is pending").forgotten
    }

    fn codes(state: &RecoveryState) -> Vec<&str> {
        state.definitions().map(|definition| &*definition.form.code).collect()
    }

    #[test]
    fn definitions_of_an_evaluation_that_moves_to_the_background_become_local() {
        let mut state = with_definitions(&["(in-package :b)", "(f)"]);
        state.apply(SessionEvent::Defined(Definition { evaluation: 2, ..definition("(g)") }));
        state.apply(SessionEvent::Detached { evaluation: 1 });
        let locals: Vec<_> = state.definitions().map(|definition| definition.local).collect();
        assert_eq!(locals, [true, true, false]);
    }

    #[test]
    fn a_form_that_crashes_replays_is_left_out_and_the_first_crash_is_reported() {
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
        assert!(state.record_replay(&[(1, "it failed".to_owned())]));
        assert_eq!(codes(&state), ["(a)"]);
        let unrestored: Vec<_> = state.unrestored.iter().map(|form| (&*form.form.code, &*form.reason)).collect();
        assert_eq!(unrestored, [("(b)", "while this form was replayed, the image died again"), ("(c)", "it failed")]);
    }

    #[test]
    fn only_the_form_is_listed_if_files_that_a_failed_form_loaded_again_cannot_be_loaded() {
        let mut state = with_definitions(&[]);
        let changes = Changes::parse("=failed\n!/a.lisp".lines());
        state.apply(SessionEvent::Defined(Definition { changes, ..definition("(load)") }));
        assert!(state.record_replay(&[(0, "no such file".to_owned()), (1, "it failed".to_owned())]));
        let unrestored: Vec<_> = state.unrestored.iter().map(|form| (&*form.form.code, &*form.reason)).collect();
        assert_eq!(unrestored, [("(load)", "it failed")]);
        assert_eq!(state.definitions().count(), 0);
    }

    #[test]
    fn saves_that_complete_out_of_order_leave_the_newest_checkpoint_last() {
        let saved = |name: &str, file: &str, second| Checkpoint {
            name: name.to_owned(),
            file: file.to_owned(),
            saved: jiff::Timestamp::from_second(second).unwrap(),
            ..checkpoint()
        };
        for (first, second) in [("a", "b"), ("a", "a")] {
            let mut state = with_definitions(&["(f)"]);
            for file in ["1.core", "2.core"] {
                state.apply(SessionEvent::Saving { file: file.to_owned() });
            }
            state.apply(SessionEvent::Saved(Box::new(saved(second, "2.core", 2))));
            state.apply(SessionEvent::Saved(Box::new(saved(first, "1.core", 1))));
            assert_eq!(state.checkpoint().unwrap().file, "2.core");
        }
    }

    #[test]
    fn unrestored_forms_are_bounded_by_number_and_bytes() {
        let mut state = RecoveryState::new(true);
        for round in 0..3 * MAX_UNRESTORED {
            state.apply(SessionEvent::Defined(definition(&format!("(f {round})"))));
            assert!(state.record_replay(&[(0, "it failed".to_owned())]));
        }
        assert_eq!(state.unrestored.iter().len(), MAX_UNRESTORED);
        for letter in ["x", "y", "z"] {
            state.apply(SessionEvent::Defined(definition(&letter.repeat(MAX_UNRESTORED_BYTES / 2 - 1000))));
            assert!(state.record_replay(&[(0, "it failed".to_owned())]));
        }
        assert_eq!(state.unrestored.iter().len(), 2);
    }

    #[test]
    fn a_restore_counts_only_evaluations_that_no_earlier_restore_or_reset_has_discarded() {
        let mut state = RecoveryState::new(true);
        let at = |evaluations| LastStatus { evaluations, ..LastStatus::default() };
        let restore_to = |state: &mut RecoveryState, evaluation, newest| {
            restore(state, Checkpoint { evaluation, ..checkpoint() }, &at(newest), None)
        };
        // The checkpoint saved at evaluation 5 contains evaluations 4 and 5.
        let restores = [(1, 2), (1, 2), (1, 3), (5, 7), (1, 7), (1, 9)];
        let forgotten = restores.map(|(evaluation, newest)| restore_to(&mut state, evaluation, newest));
        assert_eq!(forgotten, [1, 0, 1, 2, 2, 2]);
        state.record_reset(&at(11), reset_or_restore());
        assert_eq!([(1, 11), (1, 12)].map(|(evaluation, newest)| restore_to(&mut state, evaluation, newest)), [0, 1]);
    }

    #[test]
    fn a_crash_does_not_change_which_jobs_had_begun_before_the_last_reset() {
        let mut state = RecoveryState::new(true);
        let begun = |begun| LastStatus { begun, ..LastStatus::default() };
        state.record_reset(&begun(5), Replacement { job: 6, ..reset_or_restore() });
        state.record_crash(begun(7), true, &Crash::new("died"));
        assert_eq!((state.begun_before_replacement, state.begun), (5, 7));
    }

    #[test]
    fn restoring_a_checkpoint_clears_the_suspect_of_the_last_replay() {
        let mut state = with_definitions(&["(a)", "(b)"]);
        let at_first = LastStatus { replaying: Some(0), ..LastStatus::default() };
        let killed = || Crash::new("was killed").possibly_external();
        (0..2).for_each(|_| assert!(state.record_crash(at_first.clone(), false, &killed())));
        let saved = with_definitions(&["(c)", "(d)"]);
        restore(&mut state, checkpoint(), &LastStatus::default(), Some(saved));
        state.apply(SessionEvent::Defined(definition("(e)")));
        assert!(state.record_crash(at_first, false, &killed()));
        assert_eq!(codes(&state), ["(c)", "(d)", "(e)"]);
    }

    /// Returns a state with the definitions `(f)`, `(g)` and `(h)`, and a request to restore the checkpoint x, which contains
    /// `(f)`. The checkpoint y contains `(g)`, too.
    fn with_pending_restore() -> RecoveryState {
        let mut state = with_definitions(&["(f)"]);
        let mut content = None;
        for (name, next) in [("x", "(g)"), ("y", "(h)")] {
            let file = format!("{name}.core");
            state.apply(SessionEvent::Saving { file: file.clone() });
            content = content.or(state.checkpoint_content());
            let saved = Checkpoint { name: name.to_owned(), file, ..checkpoint() };
            state.apply(SessionEvent::Saved(Box::new(saved)));
            state.apply(SessionEvent::Defined(definition(next)));
        }
        let last = LastStatus { evaluations: 4, ..LastStatus::default() };
        state.request_restore(checkpoint(), &last, reset_or_restore(), content);
        state
    }

    /// Returns the name of the checkpoint that the next worker boots, and the forms that it replays.
    fn next_image(state: &mut RecoveryState) -> (Option<String>, Vec<String>) {
        let next = state.for_worker();
        let name = next.checkpoint().map(|checkpoint| checkpoint.name.clone());
        (name, codes(&next).into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn a_restore_whose_checkpoint_does_not_boot_leaves_definitions_and_other_checkpoints_as_they_were() {
        let mut state = with_pending_restore();
        let killed = || Crash::new("was killed").possibly_external();
        for crash in [killed(), killed(), Crash::new("died")] {
            assert_eq!(next_image(&mut state), (Some("x".to_owned()), Vec::new()));
            // A damaged image may write anything to the status page.
            let last = LastStatus { replaying: Some(0), evaluations: 4, ..LastStatus::default() };
            assert!(!state.record_crash(last, false, &crash));
        }
        assert!(state.crash.is_none() && state.complete_restore().is_none());
        let failed = state.replacement.as_ref().and_then(|replacement| replacement.restore.as_ref());
        let Some(RequestedRestore::Failed { name, reason }) = failed else { panic!("not failed: {failed:?}") };
        assert_eq!((&**name, &**reason), ("x", "its image died"));
        assert_eq!(next_image(&mut state), (Some("y".to_owned()), vec!["(h)".to_owned()]));
        assert_eq!(codes(&state), ["(f)", "(g)", "(h)"]);
        // The failed restore has discarded no evaluations.
        let last = LastStatus { evaluations: 4, ..LastStatus::default() };
        assert_eq!(restore(&mut state, checkpoint(), &last, None), 3);
    }

    /// The worker's state is made without copies of the definitions.
    #[test]
    fn worker_that_boots_a_requested_checkpoint_leaves_the_definitions_as_they_were() {
        let mut state = with_pending_restore();
        let next = state.for_worker();
        assert_eq!((codes(&next).len(), next.definitions.as_ref().map(Definitions::next_position)), (0, Some(1)));
        assert_eq!(codes(&state), ["(f)", "(g)", "(h)"]);
        assert!(state.complete_restore().is_some());
        assert_eq!(codes(&state), ["(f)"]);
    }

    #[test]
    fn an_image_that_is_lost_while_it_replaces_another_by_request_is_no_crash_unless_a_form_is_left_out() {
        let mut restored = with_pending_restore();
        let mut reset = with_pending_restore();
        reset.record_reset(&LastStatus::default(), reset_or_restore());
        let killed = Crash::new("was killed").possibly_external();
        for state in [&mut restored, &mut reset] {
            assert!(!state.record_crash(LastStatus::default(), false, &killed));
            assert!(state.crash.is_none());
        }
        assert_eq!(next_image(&mut restored), (Some("x".to_owned()), Vec::new()));
        let mut failed = with_pending_restore();
        failed.fail_restore("its file is missing".to_owned());
        let at_first = LastStatus { replaying: Some(0), ..LastStatus::default() };
        assert!(failed.record_crash(at_first.clone(), false, &Crash::new("died")));
        assert!(failed.crash.is_none());
        assert!(failed.record_crash(at_first, false, &Crash::new("died")));
        assert_eq!(failed.crash.expect("a form is left out").poisoned[0].form.code, "(h)");
        // The loss of an image that has served its clients is a crash.
        assert!(restored.complete_restore().is_some());
        restored.record_crash(LastStatus::default(), true, &killed);
        assert!(restored.crash.is_some());
    }

    #[test]
    fn a_pending_restore_is_not_part_of_the_log_until_its_checkpoint_has_booted() {
        let mut state = with_pending_restore();
        let logged = |state: &RecoveryState| (state.for_new_server().restorable.len(), codes(state).len());
        assert_eq!(logged(&state), (2, 3));
        assert_eq!(state.complete_restore().expect("a restore is pending").checkpoint.name, "x");
        assert_eq!(logged(&state), (1, 1));
        assert!(state.complete_restore().is_none());
        let mut state = with_pending_restore();
        state.record_reset(&LastStatus::default(), reset_or_restore());
        assert!(state.complete_restore().is_none());
        assert_eq!(next_image(&mut state), (None, Vec::new()));
    }

    #[test]
    fn definitions_dropped_since_a_checkpoint_are_counted_as_missing() {
        let mut state = RecoveryState::new(true);
        let missing = |state: &RecoveryState| state.dropped_since_checkpoint() + state.missing_forms(&[]).len();
        let large = |number: usize| definition(&format!("({number} {})", "x".repeat(1 << 20)));
        (0..10).for_each(|number| state.apply(SessionEvent::Defined(large(number))));
        let checkpoint = checkpoint();
        state.apply(SessionEvent::Saving { file: checkpoint.file.clone() });
        (10..20).for_each(|number| state.apply(SessionEvent::Defined(large(number))));
        state.apply(SessionEvent::Saved(Box::new(checkpoint)));
        assert_eq!(missing(&state), 0);
        (20..40).for_each(|number| state.apply(SessionEvent::Defined(large(number))));
        let (dropped, count) = (missing(&state), state.definitions().count());
        assert_eq!(dropped + count, 30);
        // A newer checkpoint contains all definitions. The first checkpoint still lacks the definitions that were dropped
        // after its save.
        let newer = Checkpoint { name: "y".to_owned(), file: "y.core".to_owned(), ..self::checkpoint() };
        state.apply(SessionEvent::Saving { file: newer.file.clone() });
        state.apply(SessionEvent::Saved(Box::new(newer.clone())));
        (40..60).for_each(|number| state.apply(SessionEvent::Defined(large(number))));
        assert!(missing(&state) > 0);
        restore(&mut state, newer.clone(), &LastStatus::default(), None);
        assert_eq!(missing(&state), 0);
        state.retain_checkpoints(|checkpoint| checkpoint.file != newer.file);
        assert_eq!(missing(&state) + state.definitions().count(), 30);
    }

    #[test]
    fn restoring_a_checkpoint_restores_the_forms_that_were_dropped_after_its_save() {
        let mut state = with_definitions(&["(f 1)", "(f 2)", "(f 1)"]);
        state.apply(SessionEvent::Saving { file: checkpoint().file });
        let saved = state.checkpoint_content();
        state.apply(SessionEvent::Saved(Box::new(checkpoint())));
        // These repetitions make the form before the save superfluous for a replay of all definitions.
        let later = ["(f 2)", "(f 1)"].into_iter().chain(std::iter::repeat_n("(g)", 5000));
        later.for_each(|code| state.apply(SessionEvent::Defined(definition(code))));
        assert_eq!(codes(&state)[..4], ["(f 1)", "(f 2)", "(f 2)", "(f 1)"]);
        restore(&mut state, checkpoint(), &LastStatus::default(), saved);
        assert_eq!(codes(&state), ["(f 1)", "(f 2)", "(f 1)"]);
        assert_eq!(state.for_worker().definitions().count(), 0);
        state.apply(SessionEvent::Defined(definition("(h)")));
        assert_eq!(codes(&state.for_worker()), ["(h)"]);
        state.retain_checkpoints(|_| false);
        assert_eq!(codes(&state.for_worker()), ["(f 1)", "(f 2)", "(f 1)", "(h)"]);
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
            state.missing_forms(&failed).into_iter().map(|form| form.form.code).collect::<Vec<_>>()
        };
        assert!(missing(&[0]).is_empty());
        assert_eq!(missing(&[0, 1]), ["(both)", "(defun f)"]);
        assert!(missing(&[2]).is_empty());
        assert_eq!(missing(&[2, 4]), ["(other)"]);
    }

    #[test]
    fn a_system_is_not_missing_without_a_failed_load_when_an_earlier_load_is_restored() {
        let load = "=other\n+SYSTEM app";
        for (forms, failed, expected) in [
            ([load, "=failed\n*SYSTEM app"], &[1][..], 0),
            ([load, "=failed\n+SYSTEM app"], &[1], 0),
            (["=other\n+SYSTEM top\n-SYSTEM app", "=failed\n*SYSTEM app"], &[1], 0),
            ([load, "=failed\n*SYSTEM app"], &[0, 1], 2),
            // This form may have loaded the system from another directory, and succeeded.
            ([load, load], &[1], 1),
            ([load, "=failed\n+FUNCTION F\n*SYSTEM app"], &[1], 1),
        ] {
            let mut state = RecoveryState::new(true);
            for (number, changes) in forms.iter().enumerate() {
                let changes = Changes::parse(changes.lines());
                let form = definition(&format!("(load-system {number})"));
                state.apply(SessionEvent::Defined(Definition { changes, evaluation: number as u64, ..form }));
            }
            let failed: Vec<_> = failed.iter().map(|index| (*index, "it failed".to_owned())).collect();
            state.record_replay(&failed);
            assert_eq!(state.unrestored.iter().len(), expected, "{forms:?} {failed:?}");
            let changes = Changes::parse("=other\n+FUNCTION F".lines());
            state.apply(SessionEvent::Defined(Definition { changes, ..definition("(defun f ())") }));
            assert_eq!(state.unrestored.iter().len(), expected - usize::from(forms[1].contains('F')), "{forms:?}");
        }
    }

    #[test]
    fn a_lost_method_or_macro_is_missing_although_another_method_or_kind_of_macro_follows() {
        for (lost, later) in [
            ("=defmethod\n+FUNCTION M\n*METHOD M", "=defmethod\n*METHOD M"),
            ("=defmethod\n*METHOD M", "=other\n*METHOD M"),
            ("=other\n+MACRO K", "=other\n+SYMBOL-MACRO K"),
            ("=other\n+COMPILER-MACRO K", "=other\n+MACRO K"),
        ] {
            let mut state = RecoveryState::new(true);
            for (code, changes) in [("(lost)", lost), ("(later)", later)] {
                let changes = Changes::parse(changes.lines());
                state.apply(SessionEvent::Defined(Definition { changes, ..definition(code) }));
            }
            assert!(state.record_replay(&[(0, "it failed".to_owned())]), "{lost}");
            let changes = Changes::parse(later.lines());
            state.apply(SessionEvent::Defined(Definition { changes, ..definition("(further)") }));
            assert_eq!(state.unrestored.iter().len(), 1, "{lost}");
        }
    }

    #[test]
    fn the_recovery_state_survives_serialization() {
        let mut state = with_definitions(&["(a)", "(b)"]);
        state.record_connection(3);
        state.apply(SessionEvent::Handshake { call: 7, message: "{}".to_owned() });
        state.record_answer(7, 3);
        let requests = ServerRequests { last: 9, open: vec![8] };
        state.apply(SessionEvent::ServerRequests { client: 3, requests });
        state.apply(SessionEvent::Saving { file: "x.core".to_owned() });
        state.record_crash(LastStatus { replaying: Some(0), ..LastStatus::default() }, false, &Crash::new("died"));
        let json = serde_json::to_value(&state).expect("JSON");
        let read: RecoveryState = serde_json::from_value(json.clone()).expect("a state");
        assert_eq!(serde_json::to_value(&read).expect("JSON"), json);
        assert_eq!(read.clients[&3].initialize.as_deref(), Some("{}"));
        assert_eq!((read.clients[&3].server_requests.last, &*read.clients[&3].server_requests.open), (9, &[8][..]));
    }

    #[test]
    fn the_last_answered_handshake_of_a_client_is_kept() {
        let mut state = with_definitions(&[]);
        let begin = |state: &mut RecoveryState, call: u64| {
            state.apply(SessionEvent::Handshake { call, message: call.to_string() });
        };
        for call in 1..=100 {
            begin(&mut state, call);
            state.record_answer(call, 0);
        }
        assert_eq!(state.clients[&0].initialize.as_deref(), Some("100"));
        // A batch may contain several handshakes.
        state.apply(SessionEvent::Handshake { call: 101, message: "first".to_owned() });
        state.apply(SessionEvent::Handshake { call: 101, message: "second".to_owned() });
        state.record_answer(101, 0);
        assert_eq!(state.clients[&0].initialize.as_deref(), Some("second"));
        // Calls that are never answered do not displace the newest handshake.
        (200..300).for_each(|call| begin(&mut state, call));
        state.record_answer(299, 0);
        assert_eq!(state.clients[&0].initialize.as_deref(), Some("299"));
        assert_eq!(state.handshakes.len(), MAX_UNANSWERED_HANDSHAKES - 1);
    }

    #[test]
    fn a_continued_session_has_no_clients_or_crashes() {
        let mut state = with_definitions(&["(a)"]);
        state.record_connection(3);
        state.record_crash(LastStatus::default(), true, &Crash::new("died"));
        state.crash.as_mut().unwrap().poisoned.push(UnrestoredForm::new(&definition("(p)"), "it crashes the image"));
        let state = state.for_new_server();
        assert_eq!(codes(&state), ["(a)"]);
        assert!(state.unrestored.iter().map(|form| &*form.form.code).eq(["(p)"]));
        assert_eq!((state.clients.len(), state.crash.is_none()), (1, true));
    }
}
