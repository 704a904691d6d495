//! Saving checkpoints: a forked copy of the image writes the core while the session goes on.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Pid;

use super::store::{Checkpoint, Checkpoints, Made};
use crate::Session;
use crate::listed;
use crate::outcome::Record;
use crate::recovery::event::SessionEvent;
use crate::recovery::reporter::Reporter;
use crate::recovery::status_page::{Status, StatusPage};
use crate::session::Operation;

/// Time in which evaluations must end when the session is saved at the end of its server.
const LAST_SAVE: Duration = Duration::from_secs(10);

/// A new checkpoint, and how it was made.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) checkpoint: Checkpoint,
    /// Microseconds for which the session was stopped.
    pub(crate) stopped: i64,
    /// The names of the threads that the checkpoint does not contain.
    pub(crate) threads: Vec<String>,
    /// The number of timers that the checkpoint does not contain.
    pub(crate) timers: i64,
}

impl Saved {
    fn new(checkpoint: Checkpoint, records: &[Record]) -> Self {
        let number = |name| records.iter().find_map(|record| record.number(name)).unwrap_or(0);
        let threads = records.iter().filter(|record| record.kind == "thread");
        Self {
            checkpoint,
            stopped: number("stopped"),
            timers: number("timers"),
            threads: threads.filter_map(|record| record.text("name").map(str::to_owned)).collect(),
        }
    }
}

/// Reports saves to the supervisor, which boots the next image from the last checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct SaveReports {
    reporter: Reporter,
    status: StatusPage,
    /// The number of the last evaluation that is saved; `u64::MAX` for none.
    saved_through: Arc<AtomicU64>,
}

/// A save in progress, until it is dropped. The supervisor knows that a call waits for the save.
#[derive(Debug)]
struct SaveInProgress(StatusPage);

impl Drop for SaveInProgress {
    fn drop(&mut self) {
        self.0.count(Status::Asked, false);
    }
}

impl SaveReports {
    /// Makes the reports of an image: all evaluations up to number `saved_through` are saved; `None` when some are in no
    /// checkpoint.
    pub(crate) fn new(reporter: Reporter, status: StatusPage, saved_through: Option<u64>) -> Self {
        Self { reporter, status, saved_through: Arc::new(AtomicU64::new(saved_through.unwrap_or(u64::MAX))) }
    }

    /// True when nothing was evaluated since the image was saved or booted.
    fn is_saved(&self, session: &Session) -> bool {
        session.evaluations_so_far() == self.saved_through.load(Ordering::Relaxed)
    }

    /// Reports that the image is being saved in a file of this name.
    fn begun(&self, file: &str) -> SaveInProgress {
        self.reporter.changed(SessionEvent::Saving { file: file.to_owned() });
        self.status.count(Status::Asked, true);
        SaveInProgress(self.status)
    }

    /// Reports that the file is a checkpoint, from which the next image may be booted.
    fn completed(&self, checkpoint: &Checkpoint) {
        self.saved_through.store(checkpoint.evaluation, Ordering::Relaxed);
        self.reporter.changed(SessionEvent::Saved(Box::new(checkpoint.clone())));
    }
}

/// Saves checkpoints of one session.
#[derive(Debug, Clone)]
pub(crate) struct Saver {
    pub(crate) session: Session,
    pub(crate) checkpoints: Checkpoints,
    /// The reports to the supervisor; `None` without one.
    pub(crate) reports: Option<SaveReports>,
}

impl Saver {
    /// Saves the image under `name` while the session continues. `done` gets the checkpoint, or a sentence that says why there
    /// is none.
    pub(crate) fn save(
        &self,
        name: String,
        automatic: bool,
        done: impl FnOnce(Result<Saved, String>) + Send + 'static,
    ) {
        if self.session.is_anything_held() {
            return done(Err(format!(
                "Nothing was saved: an evaluation is held, and its stack cannot be saved. Resume or abort it{} first.",
                listed::with(&["abort-evaluation"], " (abort-evaluation)")
            )));
        }
        if self.session.is_busy() {
            return done(Err(
                "Nothing was saved: an evaluation runs, and its stack cannot be saved. Wait for it (the \
                             tool evaluation), or cancel it, first."
                    .to_owned(),
            ));
        }
        let draft = match self.checkpoints.begin(automatic) {
            Ok(draft) => draft,
            Err(reason) => return done(Err(reason)),
        };
        let path = draft.path().to_string_lossy().into_owned();
        let operation = Operation::new("save-image").with("path", path).with("name", &*name);
        let evaluation = self.session.evaluations_so_far();
        let made = Made { name, evaluation, saved: jiff::Timestamp::now(), automatic, at_end: false };
        let (reports, checkpoints) = (self.reports.clone(), self.checkpoints.clone());
        self.session.query_in_order(&operation, move |records| {
            let records = match records {
                Ok(records) => records,
                Err(error) => return done(Err(format!("Nothing was saved: {error}"))),
            };
            // Before anything else is evaluated: what is defined from here on is not in it.
            let in_progress = reports.as_ref().map(|reports| reports.begun(draft.file()));
            let child = records.iter().find_map(|record| record.number("process"));
            let Some(child) = child.and_then(|child| Pid::from_raw(i32::try_from(child).ok()?)) else {
                return done(Err("Nothing was saved: the process that would do it did not start.".to_owned()));
            };
            let finish = move || {
                let saved = draft.finish(child, made);
                match (&reports, &saved) {
                    (Some(reports), Ok(checkpoint)) => reports.completed(checkpoint),
                    (None, Ok(checkpoint)) => checkpoints.delete_replaced(checkpoint),
                    _ => {}
                }
                done(match saved {
                    Ok(checkpoint) => Ok(Saved::new(checkpoint, &records)),
                    Err(reason) => Err(format!("Nothing was saved: {reason}.")),
                });
                drop(in_progress);
            };
            // Should there be no thread for it, whoever waits is answered as what they wait with is dropped.
            let _ = std::thread::Builder::new().name("sbcl-mcp-save".to_owned()).spawn(finish);
        });
    }
}

/// The times at which the server saves the image without being asked to.
#[derive(Debug, Default)]
pub(crate) struct Saves {
    /// Automatic saves while the server runs; their checkpoints may take so many bytes together.
    pub(crate) automatic: Option<u64>,
    /// The save at the end of the server.
    pub(crate) at_end: Option<AtEnd>,
}

/// The parts that the save of a persistent session at the end of its server needs.
#[derive(Debug)]
pub(crate) struct AtEnd {
    /// The session's lock, which the saving process keeps.
    pub(crate) lock: OwnedFd,
    /// The file for errors of the saving process.
    pub(crate) errors: PathBuf,
}

impl Saver {
    /// Saves an automatic checkpoint and waits until it is complete; returns `None` when the save failed.
    pub(super) fn save_automatically(&self) -> Option<Checkpoint> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.save(self.checkpoints.automatic_name(), true, move |result| drop(sender.send(result)));
        Some(receiver.recv().ok()?.ok()?.checkpoint)
    }

    /// Ends what runs, and saves the image by a process that outlives this one, if anything was evaluated since the image was
    /// saved or booted. Returns the id of that process.
    pub(crate) fn save_at_end(&self, at_end: AtEnd) -> Result<Option<Pid>, String> {
        if self.reports.as_ref().is_some_and(|reports| reports.is_saved(&self.session)) {
            return Ok(None);
        }
        let mut errors = std::fs::OpenOptions::new();
        let errors = errors.write(true).create(true).truncate(true).mode(0o600);
        let errors = errors.open(&at_end.errors).map_err(|error| error.to_string())?;
        let draft = self.checkpoints.begin(true)?;
        let name = self.checkpoints.automatic_name();
        let evaluation = self.session.evaluations_so_far();
        let program = draft.finisher(&name, evaluation);
        self.session.end_all();
        self.session.abort_held(|_| ());
        let descriptor = |fd: &dyn AsRawFd| u64::from(fd.as_raw_fd().unsigned_abs());
        let operation = Operation::new("save-image")
            .with("path", draft.path().to_string_lossy().into_owned())
            .with("name", name)
            .with("finisher", program)
            .with("lock", descriptor(&at_end.lock))
            .with("errors", descriptor(&errors));
        let (sender, receiver) = std::sync::mpsc::channel();
        self.session.query_in_order(&operation, move |records| drop(sender.send(records)));
        let records = receiver.recv_timeout(LAST_SAVE).map_err(|_| "what is evaluated does not end".to_owned())?;
        let records = records.map_err(|error| error.to_string())?;
        let saver = records.iter().find_map(|record| record.number("process"));
        // From here on it is that process'.
        draft.leave();
        Ok(saver.and_then(|saver| Pid::from_raw(i32::try_from(saver).ok()?)))
    }
}
