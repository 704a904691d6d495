//! Saving checkpoints: a forked copy of the image writes the core while the session continues.

use std::io::Write as _;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use super::store::{Checkpoint, Checkpoints, SaveDetails};
use crate::audience::Audience;
use crate::os::{files, processes};
use crate::outcome::{Record, SavedThread, Saving, of_kind};
use crate::recovery::event::SessionEvent;
use crate::recovery::persistent::{ERRORS_FILE, NOT_SAVED, SAVE_MARKER_FILE};
use crate::recovery::reporter::Reporter;
use crate::recovery::status_page::{StatusField, StatusPage};
use crate::result_kind::HEAP_EXHAUSTED;
use crate::session::Operation;
use crate::tool_names;
use crate::{InspectError, JobId, Session};

/// Maximum time that the save at the end of the server waits until running evaluations have ended.
pub(crate) const UNWINDING_WAIT: Duration = Duration::from_secs(14);

/// Maximum time that the save at the end of the server waits until Lisp has forked. This time is longer than the maximum
/// time of the operation `save-image` (lisp/core/checkpoint.lisp): 5 seconds for finalizers, 5 seconds for attempts to
/// fork, and 7 seconds for the last attempt.
pub(crate) const FORK_WAIT: Duration = Duration::from_secs(18);

/// A new checkpoint, with the report of its save.
#[derive(Debug)]
pub(crate) struct NewCheckpoint {
    /// The manifest.
    pub(crate) checkpoint: Checkpoint,
    /// The pause of the session, in microseconds.
    pub(crate) pause_microseconds: u64,
    /// The names of the threads that the checkpoint does not contain.
    pub(crate) threads: Vec<String>,
    /// The number of timers that the checkpoint does not contain.
    pub(crate) timers: u64,
}

impl NewCheckpoint {
    fn new(checkpoint: Checkpoint, records: &[Record]) -> Self {
        let (pause_microseconds, timers) =
            of_kind(records).next().map_or((0, 0), |saving: &Saving| (saving.stopped, saving.timers));
        Self { checkpoint, pause_microseconds, timers, threads: thread_names(records) }
    }
}

/// Returns the names of the threads that the saved image lacks, from the records of the save operation.
fn thread_names(records: &[Record]) -> Vec<String> {
    of_kind(records).map(|thread: &SavedThread| thread.name.clone()).collect()
}

/// Returns the process that saves the image, from the records of the save operation.
fn saving_process(records: &[Record]) -> Option<Pid> {
    let process = of_kind(records).find_map(|saving: &Saving| saving.process)?;
    Pid::from_raw(i32::try_from(process).ok()?)
}

/// Returns the message about a save that failed with `error`.
fn refusal(error: &InspectError, audience: Audience) -> String {
    match error {
        InspectError::Held => {
            let command = audience.address(|| tool_names::name_of("abort-evaluation"));
            let command = command.map_or_else(String::new, |command| format!(" ({command})"));
            format!(
                "Nothing was saved: an evaluation is held, and its stack cannot be saved. Resume or abort the \
                 evaluation{command} first; only the client that holds the evaluation can do this."
            )
        }
        InspectError::Running => {
            "Nothing was saved: an evaluation is running, and its stack cannot be saved. Wait until \
                                  the evaluation has ended, or abort it, and save again."
                .to_owned()
        }
        InspectError::Cancelled => {
            "Nothing was saved: the session was reset or restored before the save had begun.".to_owned()
        }
        InspectError::Lisp { kind, .. } if kind == HEAP_EXHAUSTED => {
            "Nothing was saved: the heap was nearly used up, so the save was stopped. Remove references to large \
             objects, and save again."
                .to_owned()
        }
        InspectError::ThreadTerminated => {
            "Nothing was saved: code of the session ended the thread that was to save. Save again.".to_owned()
        }
        InspectError::Lisp { message, .. } => format!("Nothing was saved: {message}"),
        error => format!("Nothing was saved: {error}"),
    }
}

/// The reports of saves to the supervisor, which boots the next image from the last checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct SaveReporter {
    reporter: Reporter,
    status: StatusPage,
    /// The number of the last evaluation that a checkpoint contains. `None` if the image may contain other changes that no
    /// checkpoint contains: the image has replayed definitions and has not been saved since, threads or timers of the
    /// program existed at the last save, or a checkpoint was deleted since.
    saved_through: Arc<Mutex<Option<u64>>>,
}

/// A pending answer, which the status page counts until this value is dropped.
#[derive(Debug)]
struct PendingAnswer(StatusPage);

impl Drop for PendingAnswer {
    fn drop(&mut self) {
        self.0.adjust(StatusField::PendingAnswers, false);
    }
}

/// A save in progress, which counts as failed if it is dropped before its end is reported. A client may wait for the save.
#[derive(Debug)]
struct SaveInProgress {
    reports: SaveReporter,
    _pending: PendingAnswer,
    /// The name of the core's file.
    file: String,
    /// True once the end of the save is reported.
    has_ended: bool,
}

impl SaveInProgress {
    /// Reports that the save has ended: with the checkpoint `new`, so that the next image may boot from this
    /// checkpoint, or with a failure.
    fn report_end(&mut self, new: Option<&NewCheckpoint>) {
        self.has_ended = true;
        let event = match new {
            Some(new) => {
                let has_all = new.threads.is_empty() && new.timers == 0;
                *self.reports.saved_through.lock() = has_all.then_some(new.checkpoint.evaluation);
                SessionEvent::Saved(Box::new(new.checkpoint.clone()))
            }
            None => SessionEvent::SaveFailed { file: self.file.clone() },
        };
        self.reports.reporter.report_change(event);
    }
}

impl Drop for SaveInProgress {
    fn drop(&mut self) {
        if !self.has_ended {
            self.report_end(None);
        }
    }
}

impl SaveReporter {
    /// Creates the reporter of an image. `saved_through` is the number of the image's last saved evaluation; `None` if the
    /// image must replay definitions, which no checkpoint contains.
    pub(crate) fn new(reporter: Reporter, status: StatusPage, saved_through: Option<u64>) -> Self {
        Self { reporter, status, saved_through: Arc::new(Mutex::new(saved_through)) }
    }

    /// Returns true when nothing can have changed since the last save or, if no form had to be replayed, since the image
    /// booted: nothing was evaluated, and no thread or timer of the program has run.
    fn is_saved(&self, session: &Session) -> bool {
        Some(session.newest_evaluation_number()) == *self.saved_through.lock()
    }

    /// Records that a checkpoint was deleted, so that perhaps no checkpoint contains the image's changes.
    pub(crate) fn record_deletion(&self) {
        *self.saved_through.lock() = None;
    }

    /// Reports that a save of the image to `file` has begun.
    fn report_start(&self, file: &str) -> SaveInProgress {
        self.reporter.report_change(SessionEvent::Saving { file: file.to_owned() });
        let pending = self.count_pending_answer();
        SaveInProgress { reports: self.clone(), _pending: pending, file: file.to_owned(), has_ended: false }
    }

    /// Counts one more pending answer on the status page, until the returned guard is dropped.
    fn count_pending_answer(&self) -> PendingAnswer {
        self.status.adjust(StatusField::PendingAnswers, true);
        PendingAnswer(self.status)
    }
}

/// The canceller of a save whose process has been copied. Clones cancel the same save.
#[derive(Debug, Clone)]
pub(crate) struct SaveCanceller {
    /// A pidfd of the saving process, because the process id may be reused; `None` if the pidfd could not be opened.
    process: Option<Arc<OwnedFd>>,
    is_cancelled: Arc<AtomicBool>,
}

impl SaveCanceller {
    fn new(child: Pid) -> Self {
        let process = pidfd_open(child, PidfdFlags::empty()).ok().map(Arc::new);
        Self { process, is_cancelled: Arc::default() }
    }

    /// Kills the saving process. Has no effect once the checkpoint is, or is about to be, complete.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        if let Some(process) = &self.process {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }
}

/// The operations that save a session's image: on request, automatically, and at the end of the server.
#[derive(Debug, Clone)]
pub(crate) struct Saver {
    pub(crate) session: Session,
    pub(crate) checkpoints: Checkpoints,
    /// The reports to the supervisor; `None` without a supervisor.
    pub(crate) reports: Option<SaveReporter>,
}

impl Saver {
    /// Saves the image under `name` while the session continues. Calls `done` with the checkpoint, or with the reason for
    /// the failure as a sentence. `automatic` is true for a save that no client requested. Returns the job that copies the
    /// process, during which no evaluation begins; `None` if nothing can be saved now. Once the process is copied, calls
    /// `on_copied` with the save's canceller.
    pub(crate) fn save(
        &self,
        name: String,
        automatic: bool,
        on_copied: impl FnOnce(SaveCanceller) + Send + 'static,
        done: impl FnOnce(Result<NewCheckpoint, String>) + Send + 'static,
    ) -> Option<JobId> {
        let audience = self.session.audience();
        // The check is repeated when the query's turn comes. This check refuses at once, instead of after the
        // evaluation.
        let idle = self.session.check_idle().map_err(|error| refusal(&error, audience));
        let draft = match idle.and_then(|()| self.checkpoints.new_draft(automatic)) {
            Ok(draft) => draft,
            Err(reason) => {
                done(Err(reason));
                return None;
            }
        };
        if self.reports.is_none() {
            // A supervisor, which outlives this process, locks the directory itself.
            self.checkpoints.lock();
        }
        let path = draft.path().to_string_lossy().into_owned();
        let operation = Operation::new("save-image").with("path", path).with("name", &*name);
        let saved = self.checkpoints.next_save_time();
        let (reports, checkpoints) = (self.reports.clone(), self.checkpoints.clone());
        // Other requests may wait for an automatic save, during which the watchdog must not take the worker for stalled.
        let waiting = self.reports.as_ref().filter(|_| automatic).map(SaveReporter::count_pending_answer);
        let job = self.session.query_when_idle(&operation, automatic, move |evaluation, records| {
            let _waiting = waiting;
            let records = match records {
                Ok(records) => records,
                Err(error) => return done(Err(refusal(&error, audience))),
            };
            let threads = thread_names(&records);
            let timers = of_kind(&records).next().map_or(0, |saving: &Saving| saving.timers);
            let made = SaveDetails { name, evaluation, saved, automatic, at_end: false, threads, timers };
            // The save is reported before the next evaluation begins, since the core contains no later definitions.
            let mut in_progress = reports.as_ref().map(|reports| reports.report_start(draft.file()));
            let Some(child) = saving_process(&records) else {
                drop(in_progress);
                return done(Err("Nothing was saved: the saving process did not start.".to_owned()));
            };
            let canceller = SaveCanceller::new(child);
            on_copied(canceller.clone());
            let finish = Arc::new(Mutex::new(Some(move || {
                let saved = draft.finish(child, made, || canceller.is_cancelled());
                let saved = saved.map(|checkpoint| NewCheckpoint::new(checkpoint, &records));
                match (&mut in_progress, &saved) {
                    (Some(in_progress), _) => in_progress.report_end(saved.as_ref().ok()),
                    (None, Ok(new)) => checkpoints.delete_replaced(&new.checkpoint.name),
                    (None, Err(_)) => {}
                }
                done(saved.map_err(|reason| format!("Nothing was saved: {reason}.")));
                drop(in_progress);
            })));
            let run = move || {
                let finish = finish.lock().take();
                finish.into_iter().for_each(|finish| finish());
            };
            if std::thread::Builder::new().name("sbcl-mcp-save".to_owned()).spawn(run.clone()).is_err() {
                // This thread must not wait for the save, so the save fails.
                processes::kill_child(child, getpid());
                run();
            }
        });
        Some(job)
    }
}

/// The policy for saves that no client requests.
#[derive(Debug, Default)]
pub(crate) struct SavePolicy {
    /// The space for all checkpoints together, in bytes; `None` without automatic saves.
    pub(crate) automatic_space: Option<u64>,
    /// The save at the end of the server; `None` if the session is not persistent.
    pub(crate) at_end: Option<FinalSave>,
}

/// The save of a persistent session at the end of its server.
#[derive(Debug)]
pub(crate) struct FinalSave {
    /// The session's lock, which the saving process holds until it is done.
    pub(crate) lock: OwnedFd,
    /// The session's directory.
    pub(crate) directory: PathBuf,
}

impl Saver {
    /// Saves the image as an automatic checkpoint and waits for the end of the save; returns `None` when the save failed.
    pub(super) fn save_automatically(&self) -> Option<Checkpoint> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.save(self.checkpoints.automatic_name(), true, drop, move |result| drop(sender.send(result)));
        Some(receiver.recv().ok()?.ok()?.checkpoint)
    }

    /// Cancels running evaluations, aborts held evaluations, and saves the image in a process that outlives the current
    /// process. Returns the id of the saving process; `None` when there is nothing new to save.
    ///
    /// # Errors
    /// Returns the reason why the image cannot be saved: the directory or the errors file cannot be created, running
    /// evaluations do not end in time, or Lisp refuses to save. Also writes the reason to the errors file, for the session's
    /// next server.
    pub(crate) fn save_at_end(&self, at_end: FinalSave) -> Result<Option<Pid>, String> {
        let saver = self.start_final_save(&at_end);
        if let Err(reason) = &saver {
            let text = format!("{NOT_SAVED}{}.\n", reason.trim_end_matches('.'));
            let errors = files::create(&at_end.directory.join(ERRORS_FILE));
            let _ = errors.and_then(|mut errors| errors.write_all(text.as_bytes()));
            // Lisp may still fork, and then passes the descriptor on.
            std::mem::forget(at_end.lock);
        }
        saver
    }

    /// [Saves the image](Self::save_at_end), but does not write a failure to the errors file.
    fn start_final_save(&self, at_end: &FinalSave) -> Result<Option<Pid>, String> {
        if self.reports.as_ref().is_some_and(|reports| reports.is_saved(&self.session)) {
            return Ok(None);
        }
        // The marker becomes the manifest of a complete save. If the marker cannot be created and the save fails, the
        // next server does not report the failure unless the errors file has the reason.
        let _ = files::create(&at_end.directory.join(SAVE_MARKER_FILE));
        let path = at_end.directory.join(ERRORS_FILE);
        let errors =
            files::create(&path).map_err(|error| format!("the file {} cannot be created: {error}", path.display()))?;
        let not_within = |obstacle: &str, wait: Duration| format!("{obstacle} within {} seconds", wait.as_secs());
        // All evaluations have been interrupted, but some of them, including background evaluations, may still unwind.
        if !self.session.unwind_all(Instant::now() + UNWINDING_WAIT) {
            return Err(not_within("an evaluation did not end", UNWINDING_WAIT));
        }
        let draft = self.checkpoints.new_draft(true)?;
        let name = self.checkpoints.automatic_name();
        let evaluation = self.session.newest_evaluation_number();
        let program = draft.leak_finisher_command(&name, evaluation);
        let descriptor = |fd: &dyn AsRawFd| u64::from(fd.as_raw_fd().unsigned_abs());
        let operation = Operation::new("save-image")
            .with("path", draft.path().to_string_lossy().into_owned())
            .with("name", name)
            .with("finisher", program)
            .with("lock", descriptor(&at_end.lock))
            .with("errors", descriptor(&errors));
        let (sender, receiver) = std::sync::mpsc::channel();
        self.session.query_when_idle(&operation, true, move |_, records| drop(sender.send(records)));
        let records = receiver.recv_timeout(FORK_WAIT);
        if records.is_err() {
            // Lisp may still fork, and then passes the descriptor on.
            std::mem::forget(errors);
        }
        let records = records.map_err(|_| not_within("the Lisp process could not be copied", FORK_WAIT))?;
        let records = records.map_err(|error| match error {
            InspectError::Lisp { message, .. } => message,
            error => error.to_string(),
        })?;
        // The saving process owns the draft from here on.
        draft.release();
        Ok(saving_process(&records))
    }
}
