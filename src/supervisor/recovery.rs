//! The recovery record of a supervisor: the clients' open requests, the [recovery state](RecoveryState), and the files
//! that must agree with the state (the log of a persistent session, and the checkpoints).

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::SupervisorOptions;
use super::requests::Requests;
use super::worker_process::WorkerProcess;
use crate::error::format_size;
use crate::recovery::checkpoint::store::{self, Checkpoint, Checkpoints};
use crate::recovery::event::SessionEvent;
use crate::recovery::log::{self, LoadedLog, RecoveryLog};
use crate::recovery::persistent::PersistentSession;
use crate::recovery::state::{ContinuedSession, Crash, LastStatus, RecoveryState, Replacement, SavedFileStatus};
use crate::recovery::status_page::{NewestNumbers, StatusField, WorkerStatus, newest_numbers};
use crate::recovery::text;
use crate::rpc::framing::MAX_LINE;
use crate::rpc::route::{call_of_job, first_job_of_message};

/// The interval between attempts to write the log after a write has failed.
pub(super) const LOG_RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// The recovery record, which outlives each worker process.
#[derive(Debug)]
pub(super) struct RecoveryRecord {
    pub(super) requests: Requests,
    state: RecoveryState,
    pub(super) checkpoints: Checkpoints,
    /// True when the next image boots from the last checkpoint even if no client has requested it.
    boots_last_checkpoint: bool,
    /// The log; `None` unless the session is persistent.
    log: Option<RecoveryLog>,
    /// The time of the last attempt to rewrite the log after a write had failed.
    last_log_attempt: Option<Instant>,
}

impl RecoveryRecord {
    /// Creates the record before the first worker process.
    pub(super) fn new(options: &SupervisorOptions) -> Self {
        Self {
            requests: Requests::new(),
            state: RecoveryState::new(options.restore),
            checkpoints: options.checkpoints.clone(),
            boots_last_checkpoint: options.boots_last_checkpoint,
            log: None,
            last_log_attempt: None,
        }
    }

    /// Continues a persistent session where its last server stopped.
    ///
    /// # Errors
    /// Returns the reason, worded as a sentence, if the saved image needs another heap size, a newer program wrote the
    /// log, or the log cannot be read, copied or written.
    pub(super) fn continue_session(&mut self, session: &PersistentSession) -> Result<(), String> {
        let LoadedLog { state, unreadable, has_snapshot } = session.load()?;
        self.state = state.for_new_server();
        let files = self.state.saved_files();
        let manifests = store::manifests(session.directory());
        let mut remark = None;
        let mut other_heap = None;
        let checkpoints = &self.checkpoints;
        self.state.resolve_saves(|file| {
            let Some(checkpoint) = manifests.iter().find(|checkpoint| checkpoint.file == file) else {
                return SavedFileStatus::Unusable;
            };
            remark = None;
            if checkpoints.is_bootable(checkpoint) {
                SavedFileStatus::Usable(Box::new(checkpoint.clone()))
            } else if let Some(heap) = checkpoints.differing_heap_size(checkpoint) {
                other_heap = Some(heap);
                SavedFileStatus::Unusable
            } else if let Some(program) = checkpoint.other_program() {
                remark = Some(format!(
                    "The session's image was saved by {program} and cannot be booted here: only definitions are restored, \
                     not values. (`sbcl-mcp sessions export {}` prints the definitions as source code.)",
                    session.shell_name()
                ));
                SavedFileStatus::OfOtherProgram
            } else {
                remark = Some(format!("The last checkpoint, {:?}, is incomplete or damaged.", checkpoint.name));
                SavedFileStatus::Unusable
            }
        });
        if let Some(heap) = other_heap {
            let heap = format_size(heap);
            return Err(format!(
                "The session {:?} was saved with another heap size: start the server with --heap {heap}.",
                session.name
            ));
        }
        let mut add = |text: String| {
            remark = Some(remark.take().map_or(text.clone(), |remark| format!("{remark} {text}")));
        };
        if unreadable > 0 {
            let lines = match unreadable {
                1 => "A line of the session's log".to_owned(),
                _ => format!("{unreadable} lines of the session's log"),
            };
            let copy = log::copy_damaged_log(session.directory());
            let copy = copy.map_err(|error| {
                format!("The damaged log of the session {:?} cannot be copied: {error}.", session.name)
            })?;
            let copy = copy.display();
            add(format!("{lines} could not be read: some definitions may be missing. {copy} is a copy of the log."));
        }
        if !has_snapshot && !manifests.is_empty() {
            let log =
                if unreadable > 0 { "The beginning of the session's log is lost" } else { "The session's log is lost" };
            let since = if self.state.checkpoint().is_some() { " since the checkpoint" } else { "" };
            add(format!("{log}: definitions{since} may be missing."));
        }
        for path in store::unreadable_manifests(session.directory()) {
            add(format!("A checkpoint cannot be restored because its description cannot be read: {}.", path.display()));
        }
        // A checkpoint that was saved at the end of the server contains all definitions.
        if let Some(since) = log::incomplete_since(session.directory())
            && self.state.checkpoint().is_none_or(|checkpoint| !checkpoint.at_end || checkpoint.saved < since)
        {
            let age = text::format_age(jiff::Timestamp::now().duration_since(since));
            add(format!(
                "The session's log could not be written from {age} ago until the last server ended: definitions made \
                 in that time may be missing."
            ));
        }
        if let Some(failure) = session.take_save_failure() {
            add(failure);
        }
        if let Some(remark) = &remark {
            tracing::warn!("the session {:?}: {remark}", session.name);
        }
        self.checkpoints.remove_leftovers(&files);
        // A saving process that was killed after its save may not have deleted the older automatic checkpoints.
        self.checkpoints.prune_automatic(store::KEPT_AUTOMATIC_CHECKPOINTS);
        let newest = newest_numbers(&session.status_file());
        self.state.evaluations = self.state.evaluations.max(newest.evaluation);
        self.state.errors = self.state.errors.max(newest.error);
        if self.state.has_state_to_restore() || remark.is_some() {
            self.state.continued_session = Some(ContinuedSession { session: session.name.clone(), remark });
        }
        let mut log = RecoveryLog::new(session.directory());
        log.compact(&self.state)
            .map_err(|error| format!("The log of the session {:?} cannot be written: {error}.", session.name))?;
        self.log = Some(log);
        Ok(())
    }

    /// Records in the log a change of the state that no event describes.
    fn log_state(&mut self) {
        if let Some(log) = &mut self.log {
            log.append_snapshot(&self.state.for_new_server());
        }
    }

    /// Returns the reason why the log cannot be written; `None` while the log can be written, or without a log.
    pub(super) fn log_failure(&self) -> Option<&str> {
        self.log.as_ref()?.failure()
    }

    /// Returns the time until the next attempt to write a failed log; `None` while the log can be written.
    pub(super) fn time_until_log_retry(&self) -> Option<Duration> {
        self.log_failure()?;
        Some(self.last_log_attempt.map_or(Duration::ZERO, |tried| LOG_RETRY_INTERVAL.saturating_sub(tried.elapsed())))
    }

    /// Tries to write a failed log again. Does not wait for the disk: the next attempt finds out whether this one has
    /// succeeded.
    pub(super) fn retry_log(&mut self) {
        if let Some(log) = self.log.as_mut().filter(|log| log.failure().is_some()) {
            log.retry(&self.state.for_new_server());
            self.last_log_attempt = Some(Instant::now());
        }
    }

    /// Tries to write a failed log again at the end of the server, and waits for the disk.
    pub(super) fn rewrite_log(&mut self) {
        if let Some(log) = self.log.as_mut().filter(|log| log.failure().is_some()) {
            // The log keeps the reason of a failure.
            let _ = log.compact(&self.state.for_new_server());
        }
    }

    /// Records a change of the session in the state and in the log.
    pub(super) fn record(&mut self, event: SessionEvent) {
        let mut replaced_by = None;
        // A save that has failed or is forgotten must leave no file with definitions. The worker cannot delete this
        // file, because the supervisor may write the file after the save has failed. Hostile code may also report saves
        // that do not exist as complete.
        let ended = match &event {
            SessionEvent::Saving { .. } => self.state.next_forgotten_save(),
            SessionEvent::SaveFailed { file } => Some(file.as_str()),
            SessionEvent::Saved(checkpoint) => Some(checkpoint.file.as_str()),
            _ => None,
        };
        ended.into_iter().for_each(|file| self.checkpoints.remove_incomplete_forms(file));
        if matches!(event, SessionEvent::Saving { .. }) && self.log.is_none() {
            // The directory of a persistent session is locked already.
            self.checkpoints.lock();
        }
        if let SessionEvent::Saving { file } = &event
            && let Some(content) = self.state.checkpoint_content()
        {
            // Without this file the checkpoint can still be restored, but the recovery state may then lack the definitions
            // that the checkpoint contains.
            let path = self.checkpoints.forms_path(file);
            if let Err(error) = log::write_checkpoint_forms(&path, &content) {
                tracing::warn!(
                    "the definitions in a checkpoint cannot be written to {}: {error}; if the checkpoint is restored, these \
                     definitions may be lost once the checkpoint can no longer be booted",
                    path.display()
                );
            }
        }
        if let SessionEvent::Saved(checkpoint) = &event
            && self.state.files_being_saved().any(|file| file == checkpoint.file)
        {
            replaced_by = Some(checkpoint.clone());
        }
        let must_compact = self.log.as_mut().filter(|_| event.outlives_server()).is_some_and(|log| log.append(&event));
        self.state.apply(event);
        if let Some(checkpoint) = replaced_by {
            // Older checkpoints with this name are deleted after the event is applied: until then, a new image might boot
            // from one of them.
            self.checkpoints.delete_replaced(&checkpoint.name);
        }
        if let Some(log) = self.log.as_mut().filter(|_| must_compact) {
            log.begin_compaction(&self.state.for_new_server());
        }
    }

    /// Records that a worker has finished a call. Returns the number of the call's connection; `None` if the call is
    /// not open.
    pub(super) fn finish_call(&mut self, call: u64) -> Option<u64> {
        let client = self.requests.finish(call)?;
        self.state.record_answer(call, client);
        Some(client)
    }

    /// Returns the clients' connection numbers.
    pub(super) fn clients(&self) -> impl Iterator<Item = u64> {
        self.state.clients.keys().copied()
    }

    /// Records that a client has connected.
    pub(super) fn connect(&mut self, client: u64) {
        self.state.record_connection(client);
    }

    /// Records that a client has disconnected.
    pub(super) fn disconnect(&mut self, client: u64) {
        self.state.record_disconnection(client);
        self.requests.disconnect(client);
    }

    /// Records the end of a replay, which completes a pending restore. `failed` contains the index of each definition that
    /// failed, with the reason.
    pub(super) fn record_replay(&mut self, failed: &[(usize, String)]) {
        let restore = self.state.complete_restore();
        if self.state.record_replay(failed) || restore.is_some() {
            self.log_state();
        }
        if let Some(restore) = restore {
            self.checkpoints.delete_newer(Some(&restore.checkpoint));
        }
    }

    /// Completes a pending restore at the end of the server, so that the next server continues from the checkpoint. No
    /// image has booted the checkpoint, but its core must be intact.
    pub(super) fn complete_restore_at_end(&mut self) {
        let requested = self.state.requested_checkpoint();
        if requested.is_some_and(|checkpoint| self.checkpoints.is_bootable(checkpoint)) {
            self.record_replay(&[]);
        }
    }

    /// Records the crash of a worker. `replayed` is true when the worker had replayed its definitions. Returns true
    /// when the crash advances the replay, for instance because a poisoned form is now left out.
    pub(super) fn record_crash(&mut self, status: &WorkerStatus, replayed: bool, crash: &Crash) -> bool {
        self.record_finished_saves();
        let last = self.last_status(status);
        // A line whose job has begun was not lost: foreign code may have written the line's number to the status page.
        let begun_last = call_of_job(status.get(StatusField::RequestedBy));
        let lost_line = Some(status.get(StatusField::LostLine)).filter(|line| *line != begun_last);
        lost_line.into_iter().for_each(|line| self.requests.record_undelivered(line));
        // A crash during an inspection does not count as a stall: the recovery state counts these crashes.
        let stalled_at = crash.stalled_at.filter(|line| last.inspecting != Some(*line));
        // A large line may use up the memory when it is decoded, in each image.
        let decoded = Some(status.get(StatusField::LineBeingDecoded)).filter(|line| *line > 0);
        if let Some(line) = stalled_at.or(decoded) {
            self.requests.record_stall(line);
        }
        let was_pending = self.has_pending_restore();
        let progress = self.state.record_crash(last, replayed, crash);
        if was_pending && !self.has_pending_restore() {
            // The restore has failed: neither the next image nor the next server may boot its checkpoint.
            self.log_state();
        }
        progress
    }

    /// Returns true if a call has requested a restore whose checkpoint has not booted yet.
    pub(super) fn has_pending_restore(&self) -> bool {
        self.state.requested_checkpoint().is_some()
    }

    /// Returns the session's newest numbers so far.
    pub(super) fn newest_numbers(&self) -> NewestNumbers {
        NewestNumbers { evaluation: self.state.evaluations, error: self.state.errors }
    }

    /// Records completed saves that the lost worker did not report.
    fn record_finished_saves(&mut self) {
        let files = self.state.files_being_saved();
        let finished: Vec<_> = files.filter_map(|file| self.checkpoints.find_by_file(file)).collect();
        finished.into_iter().for_each(|checkpoint| self.record(SessionEvent::Saved(Box::new(checkpoint))));
    }

    /// Reads a worker's status page.
    fn last_status(&self, status: &WorkerStatus) -> LastStatus {
        // A job of a call that was never sent cannot have begun: foreign code may have written to the status page.
        let job_in =
            |field| Some(status.get(field)).filter(|job| call_of_job(*job) < self.requests.next_number()).unwrap_or(0);
        let requested_by = job_in(StatusField::RequestedBy);
        let runs = status.get(StatusField::Begun) != status.get(StatusField::Ended);
        let client = status.get(StatusField::Client);
        let replaying = usize::try_from(status.get(StatusField::ReplayedForm)).unwrap_or(0).checked_sub(1);
        let newest = status.newest_numbers();
        LastStatus {
            // If foreign code has written too high a number, at least the last job counts as begun.
            begun: requested_by.max(job_in(StatusField::HighestBegun)),
            in_flight: runs && requested_by != 0,
            client,
            // A job that was requested after its call had been handled may have a number of another client's call, or of a
            // call that is already answered.
            job: (self.requests.connection(call_of_job(requested_by)) == Some(client))
                .then(|| first_job_of_message(requested_by)),
            background: status.background(),
            step: status.step(),
            replaying,
            evaluations: newest.evaluation,
            errors: newest.error,
            inspecting: Some(call_of_job(status.get(StatusField::Inspecting)))
                .filter(|call| self.requests.is_open(*call)),
        }
    }

    /// Records a reset of the session by the call whose jobs begin at `job`. `notices` are the image's notices that the
    /// client has not seen yet.
    pub(super) fn record_reset(&mut self, status: &WorkerStatus, job: u64, notices: Vec<String>) {
        let replacement = self.replacement(job, notices);
        self.state.record_reset(&self.last_status(status), replacement);
        self.log_state();
        self.checkpoints.delete_newer(None);
    }

    /// Records that the call whose jobs begin at `job` requested the restore of a checkpoint. `notices` are the image's
    /// notices that the client has not seen yet. The log and the other checkpoints stay as they are until the checkpoint has
    /// booted.
    pub(super) fn request_restore(
        &mut self,
        status: &WorkerStatus,
        job: u64,
        checkpoint: Checkpoint,
        notices: Vec<String>,
    ) {
        // The state forgets the saves in progress, because their processes were killed with the image.
        self.record_finished_saves();
        let (replacement, last) = (self.replacement(job, notices), self.last_status(status));
        let content = log::load_checkpoint_forms(&self.checkpoints.forms_path(&checkpoint.file));
        self.state.request_restore(checkpoint, &last, replacement, content);
    }

    fn replacement(&self, job: u64, notices: Vec<String>) -> Replacement {
        Replacement { job, client: self.requests.connection(call_of_job(job)).unwrap_or(0), notices, restore: None }
    }

    /// Queues the open requests for the next worker. Requests that an image may have begun keep their numbers. So do requests
    /// that have replaced an image, and the request whose inspection ran when an image was last lost during an inspection.
    /// `status` is the status page of the last worker.
    pub(super) fn requeue_open_lines(&mut self, status: &WorkerStatus) {
        let Self { requests, state, .. } = self;
        let begun = status.begun_calls();
        let inspected = state.inspected.map(|(call, _)| call);
        let has_replaced_image = |call: u64| state.replaced_for.iter().any(|job| call_of_job(*job) == call);
        requests
            .requeue_open_lines(|call| begun.may_include(call) || inspected == Some(call) || has_replaced_image(call));
    }

    /// Returns true when the call whose jobs begin at `job` may request another image: the call is open, and neither it nor
    /// another request in its batch has already replaced an image.
    pub(super) fn may_replace(&self, job: u64) -> bool {
        let call = call_of_job(job);
        self.requests.is_open(call) && !self.state.replaced_for.iter().any(|job| call_of_job(*job) == call)
    }

    /// Returns the core that the next image is booted from; `None` for the program's own core. A pending restore fails if its
    /// checkpoint was deleted.
    pub(super) fn next_core(&mut self) -> Option<PathBuf> {
        if let Some(core) = self.state.requested_checkpoint().map(|checkpoint| self.checkpoints.path(checkpoint)) {
            if core.is_file() {
                return Some(core);
            }
            self.state.fail_restore("its file is missing".to_owned());
        }
        let (checkpoints, boots_last_checkpoint) = (&self.checkpoints, self.boots_last_checkpoint);
        // Named checkpoints may have been deleted since they were recorded.
        self.state.retain_checkpoints(|checkpoint| boots_last_checkpoint && checkpoints.path(checkpoint).is_file());
        self.state.checkpoint().map(|checkpoint| self.checkpoints.path(checkpoint))
    }

    /// Returns true if the last checkpoint, which the current process boots, is damaged. Reads its core, which takes seconds
    /// if the core is large: a damaged core may have the modification time with which it counts as unchanged.
    pub(super) fn boots_damaged_checkpoint(&self) -> bool {
        self.state.checkpoint().is_some_and(|checkpoint| !self.checkpoints.verify_core(checkpoint))
    }

    /// Sends a worker its recovery state, as one line.
    pub(super) fn send_state(&mut self, worker: &mut WorkerProcess) -> io::Result<()> {
        let mut state = self.state.for_worker();
        state.next_line = self.requests.next_number();
        let mut line = serde_json::to_vec(&state)?;
        if line.len() >= MAX_LINE {
            // JSON takes six bytes for a control character, so histories within their bounds may be too large here.
            line = serde_json::to_vec(&state.without_histories())?;
        }
        line.push(b'\n');
        worker.input.as_mut().map_or(Ok(()), |input| input.put_owned(line.into()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::outcome::{Changes, DefiningForm};
    use crate::recovery::checkpoint::store::tests::TestCheckpoints;
    use crate::recovery::definitions::Definition;
    use crate::recovery::state::MAX_SAVES_IN_PROGRESS;
    use crate::rpc::route::job_number;

    /// Returns the options of a supervisor with these checkpoints.
    pub(crate) fn options(checkpoints: Checkpoints) -> SupervisorOptions {
        SupervisorOptions {
            arguments: Vec::new(),
            restore: true,
            checkpoints,
            boots_last_checkpoint: true,
            session: None,
            listener: None,
            watch_interval: Duration::from_secs(1),
            recorder: None,
        }
    }

    /// Returns the record of a session with these checkpoints, and the status page of its worker.
    fn session(checkpoints: &TestCheckpoints) -> (RecoveryRecord, WorkerStatus) {
        let options = options(checkpoints.0.clone());
        (RecoveryRecord::new(&options), WorkerStatus::new(None, Default::default()).expect("memory"))
    }

    /// Gives a session a log, as if the session were persistent. Returns the directory of the log.
    fn start_log(recovery: &mut RecoveryRecord) -> PathBuf {
        let directory = recovery.checkpoints.make_directory().expect("a directory");
        let mut log = RecoveryLog::new(&directory);
        log.compact(&recovery.state).expect("the log can be written");
        recovery.log = Some(log);
        directory
    }

    fn saving(file: impl Into<String>) -> SessionEvent {
        SessionEvent::Saving { file: file.into() }
    }

    fn defined(code: &str) -> SessionEvent {
        let form = DefiningForm { code: code.to_owned(), package: "COMMON-LISP-USER".to_owned() };
        let changes = Changes::default();
        SessionEvent::Defined(Definition {
            form,
            changes,
            attached: false,
            local: false,
            evaluation: 1,
            took: 0,
            too_long: None,
        })
    }

    #[test]
    fn a_checkpoint_completed_just_before_a_crash_is_restored() {
        let checkpoints = TestCheckpoints::new("finished");
        let (mut recovery, status) = session(&checkpoints);
        let [first, second] = [("auto-1", 1), ("auto-2", 2)].map(|(name, seconds)| checkpoints.add(name, seconds, 10));
        recovery.record(saving(&*first.file));
        recovery.record(SessionEvent::Saved(Box::new(first.clone())));
        recovery.record(saving("of which nothing came.core"));
        recovery.record(saving(&*second.file));
        assert_eq!(recovery.next_core(), Some(checkpoints.0.path(&first)));
        recovery.record_crash(&status, true, &Crash::new("died"));
        assert_eq!(recovery.next_core(), Some(checkpoints.0.path(&second)));
        // The image may have been killed from outside while it booted from the checkpoint.
        recovery.record_crash(&status, false, &Crash::new("was killed").possibly_external());
        assert_eq!(recovery.next_core(), Some(checkpoints.0.path(&second)));
        // A checkpoint that does not boot gives way to the previous checkpoint.
        recovery.record_crash(&status, false, &Crash::new("died"));
        assert_eq!(recovery.next_core(), Some(checkpoints.0.path(&first)));
    }

    #[test]
    fn a_checkpoint_completed_after_a_crash_is_restored_when_many_saves_are_in_progress() {
        let checkpoints = TestCheckpoints::new("late");
        let (mut recovery, status) = session(&checkpoints);
        let late = checkpoints.add("auto-1", 1, 10);
        let manifest = checkpoints.0.path(&late).with_extension("json");
        let unfinished = manifest.with_extension("draft");
        std::fs::rename(&manifest, &unfinished).expect("it is there");
        recovery.record(saving(&*late.file));
        for number in 1..MAX_SAVES_IN_PROGRESS {
            recovery.record(saving(format!("{number}.core")));
        }
        recovery.record_crash(&status, true, &Crash::new("died"));
        assert_eq!(recovery.next_core(), None);
        recovery.record_finished_saves();
        assert_eq!(recovery.next_core(), None);
        std::fs::rename(&unfinished, &manifest).expect("it is there");
        recovery.record_finished_saves();
        assert_eq!(recovery.next_core(), Some(checkpoints.0.path(&late)));
    }

    /// An image that runs an open call again must not be replaced by that call again, even if another call has replaced
    /// the image since.
    #[test]
    fn a_call_replaces_the_image_once_although_another_call_replaces_it_later() {
        let checkpoints = TestCheckpoints::new("twice");
        let (mut recovery, status) = session(&checkpoints);
        for line in ["[batch]\n", "reset\n"] {
            recovery.requests.add(0, line.as_bytes());
            assert!(recovery.requests.next_piece().is_some());
        }
        let [first, second] = [1, 2].map(|call| job_number(call, 0));
        recovery.record_reset(&status, first, Vec::new());
        assert_eq!([first, second].map(|job| recovery.may_replace(job)), [false, true]);
        recovery.record_reset(&status, second, Vec::new());
        assert_eq!([first, job_number(1, 1), second].map(|job| recovery.may_replace(job)), [false; 3]);
        assert_eq!(recovery.state.replaced_for.len(), 2);
        recovery.finish_call(1);
        recovery.finish_call(2);
        assert!(recovery.state.replaced_for.is_empty());
    }

    /// A job that waited while its client's user was asked a question begins after jobs with higher numbers.
    #[test]
    fn jobs_that_began_before_a_job_with_a_lower_number_do_not_begin_again() {
        let checkpoints = TestCheckpoints::new("lower");
        let (mut recovery, status) = session(&checkpoints);
        for line in ["waits\n", "begins\n"] {
            recovery.requests.add(0, line.as_bytes());
            assert!(recovery.requests.next_piece().is_some());
        }
        let ([waiting, first], page) = ([1, 2].map(|call| job_number(call, 0)), status.map());
        page.set(StatusField::HighestBegun, first);
        page.set(StatusField::Ended, first);
        page.set(StatusField::RequestedBy, waiting);
        page.set(StatusField::Begun, waiting);
        let last = recovery.last_status(&status);
        assert_eq!((last.begun, last.in_flight, last.job), (first, true, Some(waiting)));
        page.set(StatusField::Ended, waiting);
        assert!(!recovery.last_status(&status).in_flight);
        // The server's own job is no client's evaluation.
        page.set(StatusField::RequestedBy, 0);
        page.set(StatusField::Begun, first + 1);
        let last = recovery.last_status(&status);
        assert_eq!((last.begun, last.in_flight, last.job), (first, false, None));
        recovery.record_crash(&status, true, &Crash::new("died"));
        assert_eq!(recovery.state.begun, first);
    }

    /// The last call, whose job has begun, may be a call of another client.
    #[test]
    fn calls_that_have_not_begun_get_new_numbers_although_a_later_call_has_begun() {
        let checkpoints = TestCheckpoints::new("waiting");
        let (mut recovery, status) = session(&checkpoints);
        for line in ["waits\n", "inspects\n", "resets\n", "runs\n"] {
            recovery.requests.add(0, line.as_bytes());
        }
        let send_all = |recovery: &mut RecoveryRecord| {
            while recovery.requests.next_piece().is_some() {}
            (1..9).filter(|line| recovery.requests.is_open(*line)).collect::<Vec<_>>()
        };
        assert_eq!(send_all(&mut recovery), [1, 2, 3, 4]);
        status.map().record_begun(job_number(4, 0));
        status.map().set(StatusField::Inspecting, job_number(2, 0));
        recovery.record_crash(&status, true, &Crash::new("died"));
        recovery.requeue_open_lines(&status);
        assert_eq!(send_all(&mut recovery), [2, 4, 5, 6]);
        // The next image, which has a page of its own, has begun nothing. The line that reset the session keeps its number.
        let next = WorkerStatus::new(None, Default::default()).expect("memory");
        recovery.record_reset(&next, job_number(6, 0), Vec::new());
        recovery.requeue_open_lines(&next);
        assert_eq!(send_all(&mut recovery), [2, 4, 6, 7]);
    }

    #[test]
    fn a_line_during_whose_decoding_two_images_were_lost_is_not_sent_to_a_third() {
        let checkpoints = TestCheckpoints::new("decoding");
        let (mut recovery, status) = session(&checkpoints);
        let page = status.map();
        recovery.requests.add(5, *b"long\n");
        for expected in [None, Some((5, Box::from(*b"long\n")))] {
            assert!(recovery.requests.next_piece().is_some());
            let number = recovery.requests.first_open_line_from(0).expect("an open line");
            page.replace(StatusField::LineBeingDecoded, 0, number);
            // The thread of another client decodes a line at the same time.
            page.replace(StatusField::LineBeingDecoded, 0, 99);
            page.replace(StatusField::LineBeingDecoded, 99, 0);
            recovery.record_crash(&status, true, &Crash::new("died"));
            assert_eq!(recovery.requests.take_stalling_line(), expected);
            recovery.requeue_open_lines(&status);
            // The next image has a page of its own.
            page.set(StatusField::LineBeingDecoded, 0);
        }
    }

    #[test]
    fn a_restore_deletes_newer_checkpoints_only_once_its_checkpoint_has_booted() {
        let checkpoints = TestCheckpoints::new("pending");
        let (mut recovery, status) = session(&checkpoints);
        let saved = [("mine", 1), ("auto-1", 2)].map(|(name, seconds)| {
            let checkpoint = checkpoints.add(name, seconds, 10);
            recovery.record(saving(&*checkpoint.file));
            recovery.record(SessionEvent::Saved(Box::new(checkpoint.clone())));
            checkpoint
        });
        let [mine, newer] = saved.each_ref().map(|checkpoint| checkpoints.0.path(checkpoint));
        let request =
            |recovery: &mut RecoveryRecord| recovery.request_restore(&status, 0, saved[0].clone(), Vec::new());
        // An image that does not boot.
        request(&mut recovery);
        assert_eq!(recovery.next_core(), Some(mine.clone()));
        recovery.record_crash(&status, false, &Crash::new("died"));
        assert_eq!(recovery.next_core(), Some(newer.clone()));
        recovery.record_replay(&[]);
        assert!(newer.exists());
        // An image that boots.
        request(&mut recovery);
        assert_eq!(recovery.next_core(), Some(mine.clone()));
        assert!(newer.exists());
        recovery.record_replay(&[]);
        assert!(mine.exists() && !newer.exists());
    }

    #[test]
    fn a_restore_fails_if_its_checkpoint_is_deleted_before_the_boot() {
        let checkpoints = TestCheckpoints::new("deleted");
        let (mut recovery, status) = session(&checkpoints);
        let saved = checkpoints.add("mine", 1, 10);
        recovery.request_restore(&status, 0, saved.clone(), Vec::new());
        assert_eq!(recovery.next_core(), Some(checkpoints.0.path(&saved)));
        checkpoints.0.delete(&saved).expect("it is there");
        assert_eq!(recovery.next_core(), None);
        assert!(recovery.state.requested_checkpoint().is_none());
    }

    #[test]
    fn checkpoints_completed_just_before_a_restore_is_requested_can_be_booted() {
        let checkpoints = TestCheckpoints::new("requested");
        let (mut recovery, status) = session(&checkpoints);
        let [first, second] = [("first", 1), ("second", 2)].map(|(name, seconds)| {
            let checkpoint = checkpoints.add(name, seconds, 10);
            recovery.record(saving(&*checkpoint.file));
            checkpoint
        });
        recovery.request_restore(&status, 0, first, Vec::new());
        recovery.record_crash(&status, false, &Crash::new("died"));
        assert_eq!(recovery.next_core(), Some(checkpoints.0.path(&second)));
    }

    #[test]
    fn a_failed_restore_is_part_of_the_log() {
        let checkpoints = TestCheckpoints::new("logged");
        let (mut recovery, status) = session(&checkpoints);
        let directory = start_log(&mut recovery);
        let saved = checkpoints.add("mine", 1, 10);
        recovery.record(saving(&*saved.file));
        recovery.record(SessionEvent::Saved(Box::new(saved.clone())));
        let logged_files = || log::load(&directory).expect("a log").state.saved_files();
        recovery.request_restore(&status, 0, saved.clone(), Vec::new());
        recovery.record_crash(&status, false, &Crash::new("was killed").possibly_external());
        assert_eq!(logged_files(), [saved.file]);
        recovery.record_crash(&status, false, &Crash::new("died"));
        assert!(logged_files().is_empty());
    }

    #[test]
    fn a_restore_that_is_pending_at_the_end_of_the_server_is_part_of_the_log() {
        let checkpoints = TestCheckpoints::new("end");
        let (mut recovery, status) = session(&checkpoints);
        let directory = start_log(&mut recovery);
        recovery.record(defined("(f)"));
        let saved = checkpoints.add("mine", 1, 10);
        recovery.record(saving(&*saved.file));
        recovery.record(SessionEvent::Saved(Box::new(saved.clone())));
        recovery.record(defined("(g)"));
        let logged_forms = || log::load(&directory).expect("a log").state.definitions().count();
        recovery.request_restore(&status, 0, saved.clone(), Vec::new());
        assert_eq!(logged_forms(), 2);
        recovery.complete_restore_at_end();
        assert_eq!(logged_forms(), 1);
        // Without the checkpoint, the definitions stay.
        recovery.record(defined("(h)"));
        recovery.request_restore(&status, 0, saved.clone(), Vec::new());
        checkpoints.0.delete(&saved).expect("it is there");
        recovery.complete_restore_at_end();
        assert_eq!(logged_forms(), 2);
    }

    #[test]
    fn a_failed_save_leaves_no_file_with_definitions() {
        let checkpoints = TestCheckpoints::new("failed");
        let (mut recovery, _) = session(&checkpoints);
        recovery.record(defined("(f)"));
        let file = checkpoints.0.new_draft(true).expect("a directory").file().to_owned();
        let forms = checkpoints.0.forms_path(&file);
        recovery.record(saving(&*file));
        assert!(forms.exists());
        recovery.record(SessionEvent::SaveFailed { file });
        assert!(!forms.exists());
    }

    #[test]
    fn saves_that_do_not_exist_leave_a_bounded_number_of_files() {
        let checkpoints = TestCheckpoints::new("forged");
        let (mut recovery, _) = session(&checkpoints);
        recovery.record(defined("(f)"));
        let saved = checkpoints.add("mine", 1, 10);
        recovery.record(saving(&*saved.file));
        for number in 0..2 * MAX_SAVES_IN_PROGRESS {
            recovery.record(saving(format!("{number:016x}.core")));
        }
        // The three files of the checkpoint stay, though its save was forgotten. Another file is the lock.
        assert_eq!(checkpoints.file_count(), MAX_SAVES_IN_PROGRESS + 4);
        for number in 2 * MAX_SAVES_IN_PROGRESS..4 * MAX_SAVES_IN_PROGRESS {
            let file = format!("{number:016x}.core");
            recovery.record(saving(&*file));
            recovery.record(SessionEvent::Saved(Box::new(Checkpoint { file, ..saved.clone() })));
        }
        assert!(checkpoints.file_count() <= MAX_SAVES_IN_PROGRESS + 4);
    }

    #[test]
    fn saves_that_never_complete_do_not_prevent_a_later_checkpoint() {
        let checkpoints = TestCheckpoints::new("nothing");
        let (mut recovery, _) = session(&checkpoints);
        for number in 0..2 * MAX_SAVES_IN_PROGRESS {
            recovery.record(saving(format!("{number}.core")));
        }
        let saved = checkpoints.add("auto-1", 1, 10);
        recovery.record(saving(&*saved.file));
        recovery.record(SessionEvent::Saved(Box::new(saved.clone())));
        assert_eq!(recovery.next_core(), Some(checkpoints.0.path(&saved)));
    }
}
