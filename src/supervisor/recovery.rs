//! The supervisor's record: the clients' open requests, the [recovery state](RecoveryState), and the files that follow from
//! it: the log of a persistent session, and checkpoints that are complete or replaced.

use std::io;
use std::path::PathBuf;

use super::Options;
use super::requests::Requests;
use super::worker_process::WorkerProcess;
use crate::durable::Durable;
use crate::recovery::checkpoint::store::{self, Checkpoint, Checkpoints};
use crate::recovery::event::SessionEvent;
use crate::recovery::log::{self, Loaded, Log};
use crate::recovery::state::{Crash, LastStatus, RecoveryState, Replacement, Resumed, SavedFile};
use crate::recovery::status_page::{Status, WorkerStatus, last_number};
use crate::rpc::framing::MAX_LINE;
use crate::rpc::route::call_of_job;

/// The record that outlives a worker.
#[derive(Debug)]
pub(super) struct Recovery {
    pub(super) requests: Requests,
    state: RecoveryState,
    pub(super) checkpoints: Checkpoints,
    /// The next image is booted from the last checkpoint.
    begins_with_checkpoints: bool,
    /// The log of a persistent session.
    log: Option<Log>,
}

impl Recovery {
    /// The record before the first worker.
    pub(super) fn new(options: &Options) -> Self {
        Self {
            requests: Requests::new(),
            state: RecoveryState::new(options.restore),
            checkpoints: options.checkpoints.clone(),
            begins_with_checkpoints: options.begins_with_checkpoints,
            log: None,
        }
    }

    /// Continues a persistent session where its last server stopped.
    ///
    /// # Errors
    /// A sentence: its image needs another heap, a newer program wrote its log, or the log cannot be written.
    pub(super) fn continue_session(&mut self, durable: &Durable) -> Result<(), String> {
        let Loaded { state, unreadable } = durable.load()?;
        self.state = state.continued();
        let files = self.state.saved_files();
        let manifests = store::manifests(durable.directory());
        let mut remark = None;
        let mut other_heap = None;
        let checkpoints = &self.checkpoints;
        self.state.settle_saves(|file| {
            let Some(checkpoint) = manifests.iter().find(|checkpoint| checkpoint.file == file) else {
                return SavedFile::Unusable;
            };
            remark = None;
            if checkpoints.is_whole(checkpoint) {
                SavedFile::Usable(Box::new(checkpoint.clone()))
            } else if let Some(heap) = checkpoints.other_heap(checkpoint) {
                other_heap = Some(heap);
                SavedFile::Unusable
            } else if let Some(program) = checkpoint.other_program() {
                remark = Some(format!(
                    "Its image was saved by {program}. It cannot be booted here: only definitions come back, values do \
                     not. (`sbcl-mcp sessions export {}` writes the definitions as a file.)",
                    durable.shell_name()
                ));
                SavedFile::OfOtherProgram
            } else {
                remark = Some(format!("The image that was saved last, {:?}, is not whole.", checkpoint.name));
                SavedFile::Unusable
            }
        });
        if let Some(heap) = other_heap {
            let heap = heap >> 20;
            return Err(format!(
                "The session {:?} was saved with another heap: start it with --heap {heap}M.",
                durable.name
            ));
        }
        if unreadable > 0 {
            let lines =
                if unreadable == 1 { "A line of its log".to_owned() } else { format!("{unreadable} lines of its log") };
            let copy = log::keep_damaged(durable.directory());
            let copy =
                copy.map_err(|error| format!("The log of the session {:?} cannot be copied: {error}.", durable.name))?;
            let copy = copy.display();
            let text =
                format!("{lines} could not be read: some definitions may be missing. {copy} has a copy of the log.");
            remark = Some(remark.map_or(text.clone(), |remark| format!("{remark} {text}")));
        }
        if let Some(remark) = &remark {
            tracing::warn!("the session {:?}: {remark}", durable.name);
        }
        self.checkpoints.clear_up(&files);
        self.state.evaluations = self.state.evaluations.max(last_number(&durable.status_file()));
        if self.state.has_content() {
            self.state.resumed = Some(Resumed { session: durable.name.clone(), remark });
        }
        let mut log = Log::new(durable.directory());
        log.compact(&self.state)
            .map_err(|error| format!("The session {:?} cannot be written: {error}.", durable.name))?;
        self.log = Some(log);
        Ok(())
    }

    /// Compacts the log, after a change that is no event.
    fn compact_log(&mut self) {
        if let Some(log) = &mut self.log
            && let Err(error) = log.compact(&self.state.clone().continued())
        {
            tracing::warn!("the session's log cannot be written: {error}");
        }
    }

    /// Records a change of the session.
    pub(super) fn record(&mut self, event: SessionEvent) {
        let mut replaced_by = None;
        if let SessionEvent::Saving { file } = &event
            && let Some(content) = self.state.content()
        {
            // Without this file a return to the checkpoint still boots the image, but forgets which forms were missing.
            if let Err(error) = log::write_content(&self.checkpoints.forms_path(file), &content) {
                tracing::warn!("the definitions in a checkpoint cannot be written: {error}");
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
            // Not before this: until now the next image would have been booted from the older one.
            self.checkpoints.delete_replaced(&checkpoint);
        }
        if must_compact {
            self.compact_log();
        }
    }

    /// Records that a worker is done with a call. Returns the number of its connection; `None` when nobody waits for it.
    pub(super) fn finished(&mut self, call: u64) -> Option<u64> {
        let client = self.requests.finish(call)?;
        self.state.answered(call, client);
        Some(client)
    }

    /// The clients, by the numbers of their connections.
    pub(super) fn clients(&self) -> impl Iterator<Item = u64> {
        self.state.clients.keys().copied()
    }

    /// Records that a client has connected.
    pub(super) fn join(&mut self, client: u64) {
        self.state.connected(client);
    }

    /// Records that a client is gone.
    pub(super) fn leave(&mut self, client: u64) {
        self.state.disconnected(client);
        self.requests.end(client);
    }

    /// Records that the worker has replayed its definitions, except those at the indices in `failed`.
    pub(super) fn restored(&mut self, failed: &[(usize, String)]) {
        if self.state.restored(failed) {
            self.compact_log();
        }
    }

    /// Records the crash of a worker that had replayed its definitions, if it was `restored`. Returns true when the replay got
    /// further than last time, or will.
    pub(super) fn record_crash(&mut self, status: &WorkerStatus, restored: bool, crash: &Crash) -> bool {
        self.record_finished_saves();
        let last = self.last_status(status);
        self.state.record_crash(last, restored, crash)
    }

    /// Records the saves that were completed when the worker could not report it any more.
    fn record_finished_saves(&mut self) {
        let files = self.state.files_being_saved();
        let finished: Vec<_> = files.filter_map(|file| self.checkpoints.of_file(file)).collect();
        finished.into_iter().for_each(|checkpoint| self.record(SessionEvent::Saved(Box::new(checkpoint))));
    }

    /// Reads what a worker's status page says.
    fn last_status(&self, status: &WorkerStatus) -> LastStatus {
        // Anything may have written to that page.
        let begun = Some(status.get(Status::Begun)).filter(|job| call_of_job(*job) < self.requests.next()).unwrap_or(0);
        let replaying = usize::try_from(status.get(Status::Restoring)).unwrap_or(0).checked_sub(1);
        LastStatus {
            begun,
            in_flight: begun > status.get(Status::Ended),
            client: status.get(Status::Client),
            background: status.background(),
            step: status.step(),
            replaying,
            evaluations: status.get(Status::Numbered).min(u64::MAX / 2),
            inspecting: Some(call_of_job(status.get(Status::Inspecting))).filter(|call| self.requests.has(*call)),
        }
    }

    /// Records that a call resets the session; `notices` are those of the image that the client has not seen yet.
    pub(super) fn reset(&mut self, status: &WorkerStatus, call: u64, notices: Vec<String>) {
        let replacement = self.replacement(call, notices);
        self.state.reset(&self.last_status(status), replacement);
        self.compact_log();
        self.checkpoints.forget_since(None);
    }

    /// Records that a call returns to a checkpoint.
    pub(super) fn return_to(&mut self, status: &WorkerStatus, call: u64, checkpoint: Checkpoint, notices: Vec<String>) {
        // The session may not have come through that checkpoint.
        let saved = log::load_content(&self.checkpoints.forms_path(&checkpoint.file)).unwrap_or_default();
        let replacement = self.replacement(call, notices);
        self.state.return_to(checkpoint.clone(), &self.last_status(status), replacement, saved);
        self.compact_log();
        self.checkpoints.forget_since(Some(&checkpoint));
    }

    fn replacement(&self, call: u64, notices: Vec<String>) -> Replacement {
        Replacement { call, client: self.requests.connection(call).unwrap_or(0), notices, returned: None }
    }

    /// Queues the open requests for the next worker. Requests that an image may have begun keep their numbers.
    pub(super) fn resend(&mut self) {
        let known = [
            Some(call_of_job(self.state.begun)),
            self.state.replacement.as_ref().map(|replacement| replacement.call),
            self.state.inspected.map(|(call, _)| call),
        ];
        self.requests.resend(known.into_iter().flatten().max().unwrap_or(0));
    }

    /// True when a call may ask for another image: it is open, and has not got one.
    pub(super) fn may_replace(&self, call: u64) -> bool {
        self.requests.has(call) && self.state.replacement.as_ref().is_none_or(|replacement| replacement.call != call)
    }

    /// The core that the next image is booted from; `None` for the plain one.
    pub(super) fn image(&mut self) -> Option<PathBuf> {
        let (checkpoints, begins_with_checkpoints) = (&self.checkpoints, self.begins_with_checkpoints);
        let requested = self.state.requested_checkpoint();
        // Named checkpoints may have been deleted since.
        self.state.retain_checkpoints(|one| {
            (begins_with_checkpoints || requested.as_ref() == Some(&one.file)) && checkpoints.path(one).is_file()
        });
        self.state.checkpoint().map(|checkpoint| self.checkpoints.path(checkpoint))
    }

    /// Gives a worker its recovery state.
    pub(super) fn hand_over(&mut self, worker: &mut WorkerProcess) -> io::Result<()> {
        let state = self.state.for_worker();
        let mut line = serde_json::to_vec(&state)?;
        if line.len() >= MAX_LINE {
            // Control characters take six bytes each.
            line = serde_json::to_vec(&state.without_histories())?;
        }
        line.push(b'\n');
        worker.input.as_mut().map_or(Ok(()), |input| input.put(&line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::checkpoint::store::tests::Place;
    use crate::recovery::state::MAX_SAVING;

    /// The record of a session with checkpoints in this place, and the status page of its worker.
    fn session(place: &Place) -> (Recovery, WorkerStatus) {
        let options = Options {
            arguments: Vec::new(),
            restore: true,
            checkpoints: place.0.clone(),
            begins_with_checkpoints: true,
            durable: None,
            listener: None,
            watch_interval: std::time::Duration::from_secs(1),
            recorder: None,
        };
        (Recovery::new(&options), WorkerStatus::new(None).expect("memory"))
    }

    fn saving(file: impl Into<String>) -> SessionEvent {
        SessionEvent::Saving { file: file.into() }
    }

    #[test]
    fn a_checkpoint_completed_just_before_a_crash_is_restored() {
        let place = Place::new("finished");
        let (mut recovery, status) = session(&place);
        let [first, second] = [("auto-1", 1), ("auto-2", 2)].map(|(name, seconds)| place.add(name, seconds, 10));
        recovery.record(saving(&*first.file));
        recovery.record(SessionEvent::Saved(Box::new(first.clone())));
        recovery.record(saving("of which nothing came.core"));
        recovery.record(saving(&*second.file));
        assert_eq!(recovery.image(), Some(place.0.path(&first)));
        recovery.record_crash(&status, true, &Crash::new("died"));
        assert_eq!(recovery.image(), Some(place.0.path(&second)));
        // Somebody may have ended an image that booted from it.
        recovery.record_crash(&status, false, &Crash::new("was killed").killed());
        assert_eq!(recovery.image(), Some(place.0.path(&second)));
        // A checkpoint that does not come up gives way to the one before.
        recovery.record_crash(&status, false, &Crash::new("died"));
        assert_eq!(recovery.image(), Some(place.0.path(&first)));
    }

    #[test]
    fn a_checkpoint_completed_after_a_crash_counts_however_many_are_being_saved() {
        let place = Place::new("late");
        let (mut recovery, status) = session(&place);
        let late = place.add("auto-1", 1, 10);
        let manifest = place.0.path(&late).with_extension("json");
        let unfinished = manifest.with_extension("draft");
        std::fs::rename(&manifest, &unfinished).expect("it is there");
        recovery.record(saving(&*late.file));
        for number in 1..MAX_SAVING {
            recovery.record(saving(format!("{number}.core")));
        }
        recovery.record_crash(&status, true, &Crash::new("died"));
        assert_eq!(recovery.image(), None);
        recovery.record_finished_saves();
        assert_eq!(recovery.image(), None);
        std::fs::rename(&unfinished, &manifest).expect("it is there");
        recovery.record_finished_saves();
        assert_eq!(recovery.image(), Some(place.0.path(&late)));
    }

    #[test]
    fn saves_that_come_to_nothing_keep_no_later_one_from_counting() {
        let place = Place::new("nothing");
        let (mut recovery, _) = session(&place);
        for number in 0..2 * MAX_SAVING {
            recovery.record(saving(format!("{number}.core")));
        }
        let saved = place.add("auto-1", 1, 10);
        recovery.record(saving(&*saved.file));
        recovery.record(SessionEvent::Saved(Box::new(saved.clone())));
        assert_eq!(recovery.image(), Some(place.0.path(&saved)));
    }
}
