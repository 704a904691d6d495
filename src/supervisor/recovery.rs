//! The supervisor's record: the clients' open requests, the [recovery state](RecoveryState), and the files that follow that
//! state: the log of a persistent session, and checkpoints that are complete or replaced.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::Options;
use super::requests::Requests;
use super::worker_process::WorkerProcess;
use crate::recovery::checkpoint::store::{self, Checkpoint, Checkpoints};
use crate::recovery::event::SessionEvent;
use crate::recovery::log::{self, Loaded, Log};
use crate::recovery::persistent::Durable;
use crate::recovery::state::{Crash, LastStatus, RecoveryState, Replacement, Resumed, SavedFile};
use crate::recovery::status_page::{Status, WorkerStatus, last_number};
use crate::recovery::text;
use crate::rpc::framing::MAX_LINE;
use crate::rpc::route::call_of_job;

/// Interval at which a log that cannot be written is tried again.
pub(super) const LOG_RETRY: Duration = Duration::from_secs(2);

/// The record that outlives a worker process.
#[derive(Debug)]
pub(super) struct Recovery {
    pub(super) requests: Requests,
    state: RecoveryState,
    pub(super) checkpoints: Checkpoints,
    /// True when the next image boots from the last checkpoint without a request.
    begins_with_checkpoints: bool,
    /// The log of a persistent session.
    log: Option<Log>,
    /// The time of the last attempt to write a log again that could not be written.
    log_tried: Option<Instant>,
}

impl Recovery {
    /// Creates the record before the first worker process.
    pub(super) fn new(options: &Options) -> Self {
        Self {
            requests: Requests::new(),
            state: RecoveryState::new(options.restore),
            checkpoints: options.checkpoints.clone(),
            begins_with_checkpoints: options.begins_with_checkpoints,
            log: None,
            log_tried: None,
        }
    }

    /// Continues a persistent session where its last server stopped.
    ///
    /// # Errors
    /// A sentence: the saved image needs another heap size, a newer program wrote the log, or the log cannot be read, copied or
    /// written.
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
        let mut add = |text: String| {
            remark = Some(remark.take().map_or(text.clone(), |remark| format!("{remark} {text}")));
        };
        if unreadable > 0 {
            let lines =
                if unreadable == 1 { "A line of its log".to_owned() } else { format!("{unreadable} lines of its log") };
            let copy = log::keep_damaged(durable.directory());
            let copy =
                copy.map_err(|error| format!("The log of the session {:?} cannot be copied: {error}.", durable.name))?;
            let copy = copy.display();
            add(format!("{lines} could not be read: some definitions may be missing. {copy} has a copy of the log."));
        }
        // The save at the end of a server contains all definitions.
        if let Some(since) = log::incomplete_since(durable.directory())
            && self.state.checkpoint().is_none_or(|checkpoint| !checkpoint.at_end || checkpoint.saved < since)
        {
            let age = text::age(jiff::Timestamp::now().duration_since(since));
            add(format!(
                "Its last server could not write the log any more, {age} ago: what was defined after that may be missing."
            ));
        }
        if let Some(remark) = &remark {
            tracing::warn!("the session {:?}: {remark}", durable.name);
        }
        self.checkpoints.clear_up(&files);
        // A process that was killed at the end of its save has not done this.
        self.checkpoints.keep_automatic(store::KEPT);
        self.state.evaluations = self.state.evaluations.max(last_number(&durable.status_file()));
        if self.state.has_content() || remark.is_some() {
            self.state.resumed = Some(Resumed { session: durable.name.clone(), remark });
        }
        let mut log = Log::new(durable.directory());
        log.compact(&self.state)
            .map_err(|error| format!("The session {:?} cannot be written: {error}.", durable.name))?;
        self.log = Some(log);
        Ok(())
    }

    /// Compacts the log.
    fn compact_log(&mut self) {
        if let Some(log) = &mut self.log {
            // The log keeps the reason of a failure.
            let _ = log.compact(&self.state.continued());
        }
    }

    /// Returns the reason why the log cannot be written; `None` while it can, or without a log.
    pub(super) fn log_failure(&self) -> Option<&str> {
        self.log.as_ref()?.failure()
    }

    /// Returns the time until a log that cannot be written is tried again; `None` while it can be written.
    pub(super) fn log_retry(&self) -> Option<Duration> {
        self.log_failure()?;
        Some(self.log_tried.map_or(Duration::ZERO, |tried| LOG_RETRY.saturating_sub(tried.elapsed())))
    }

    /// Tries to write a log again that could not be written.
    pub(super) fn rewrite_log(&mut self) {
        if self.log_failure().is_some() {
            self.compact_log();
            self.log_tried = Some(Instant::now());
        }
    }

    /// Records a change of the session.
    pub(super) fn record(&mut self, event: SessionEvent) {
        let mut replaced_by = None;
        if let SessionEvent::Saving { file } = &event
            && let Some(content) = self.state.content()
        {
            // Without this file the checkpoint can still be restored; only its definitions are unknown to the next replay.
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
            // Only now: so far the next image would have booted from the older checkpoint.
            self.checkpoints.delete_replaced(&checkpoint);
        }
        if must_compact {
            self.compact_log();
        }
    }

    /// Records that a worker has finished a call. Returns the number of the call's connection; `None` unless the call is open.
    pub(super) fn finished(&mut self, call: u64) -> Option<u64> {
        let client = self.requests.finish(call)?;
        self.state.answered(call, client);
        Some(client)
    }

    /// Returns the clients' connection numbers.
    pub(super) fn clients(&self) -> impl Iterator<Item = u64> {
        self.state.clients.keys().copied()
    }

    /// Records that a client has connected.
    pub(super) fn join(&mut self, client: u64) {
        self.state.connected(client);
    }

    /// Records that a client has disconnected.
    pub(super) fn leave(&mut self, client: u64) {
        self.state.disconnected(client);
        self.requests.end(client);
    }

    /// Records the end of a replay, in which the definitions at the indices in `failed` failed.
    pub(super) fn restored(&mut self, failed: &[(usize, String)]) {
        if self.state.restored(failed) {
            self.compact_log();
        }
    }

    /// Records the crash of a worker. `restored`: the worker had replayed its definitions. Returns true when the replay made
    /// progress.
    pub(super) fn record_crash(&mut self, status: &WorkerStatus, restored: bool, crash: &Crash) -> bool {
        self.record_finished_saves();
        let last = self.last_status(status);
        // Foreign code may have written to the page.
        let missed = Some(status.get(Status::Missed)).filter(|line| *line != call_of_job(last.begun));
        missed.into_iter().for_each(|line| self.requests.missed(line));
        // The crashes during an inspection are counted in the state.
        if let Some(line) = crash.stalled_at.filter(|line| last.inspecting != Some(*line)) {
            self.requests.stalled(line);
        }
        self.state.record_crash(last, restored, crash)
    }

    /// Records complete saves that the lost worker did not report.
    fn record_finished_saves(&mut self) {
        let files = self.state.files_being_saved();
        let finished: Vec<_> = files.filter_map(|file| self.checkpoints.of_file(file)).collect();
        finished.into_iter().for_each(|checkpoint| self.record(SessionEvent::Saved(Box::new(checkpoint))));
    }

    /// Reads a worker's status page.
    fn last_status(&self, status: &WorkerStatus) -> LastStatus {
        // Foreign code may have written to the page.
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

    /// Records that a call resets the session; `notices` are the image's notices that the client has not seen yet.
    pub(super) fn reset(&mut self, status: &WorkerStatus, call: u64, notices: Vec<String>) {
        let replacement = self.replacement(call, notices);
        self.state.reset(&self.last_status(status), replacement);
        self.compact_log();
        self.checkpoints.forget_since(None);
    }

    /// Records that a call restores a checkpoint.
    pub(super) fn return_to(&mut self, status: &WorkerStatus, call: u64, checkpoint: Checkpoint, notices: Vec<String>) {
        // The recovery state may not know the checkpoint.
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

    /// Returns true when a call may request another image: the call is open, and did not request the present image.
    pub(super) fn may_replace(&self, call: u64) -> bool {
        self.requests.has(call) && self.state.replacement.as_ref().is_none_or(|replacement| replacement.call != call)
    }

    /// Returns the core that the next image is booted from; `None` for the program's own core.
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
        let mut state = self.state.for_worker();
        state.next_line = self.requests.next();
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

    /// Creates the record of a session with these checkpoints, and the status page of its worker.
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
        // The image may have been killed from outside while it booted from the checkpoint.
        recovery.record_crash(&status, false, &Crash::new("was killed").killed());
        assert_eq!(recovery.image(), Some(place.0.path(&second)));
        // A checkpoint that does not boot gives way to the previous checkpoint.
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
