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

/// How long what is evaluated may take to end when its session is to be saved at the end.
const LAST_SAVE: Duration = Duration::from_secs(10);

/// A checkpoint and how it came about.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) checkpoint: Checkpoint,
    /// How long the session stood still, in microseconds.
    pub(crate) stopped: i64,
    /// Threads that are not in it.
    pub(crate) threads: Vec<String>,
    /// How many timers are not.
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

/// Reports of saves to the supervisor, which boots the next image from the last checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct SaveReports {
    reporter: Reporter,
    status: StatusPage,
    /// The number of the last evaluation that is saved; `u64::MAX` for none.
    saved_through: Arc<AtomicU64>,
}

/// A save in progress, until it is dropped: the supervisor knows that a call waits for it.
#[derive(Debug)]
struct SaveInProgress(StatusPage);

impl Drop for SaveInProgress {
    fn drop(&mut self) {
        self.0.count(Status::Asked, false);
    }
}

impl SaveReports {
    /// Reports of an image whose evaluations are saved up to the number `saved_through`; `None` when some are in no checkpoint.
    pub(crate) fn new(reporter: Reporter, status: StatusPage, saved_through: Option<u64>) -> Self {
        Self { reporter, status, saved_through: Arc::new(AtomicU64::new(saved_through.unwrap_or(u64::MAX))) }
    }

    /// True when nothing was evaluated since the image was saved, or booted.
    fn is_saved(&self, session: &Session) -> bool {
        session.evaluations_so_far() == self.saved_through.load(Ordering::Relaxed)
    }

    /// Reports that the image is being saved in a file of this name.
    fn begun(&self, file: &str) -> SaveInProgress {
        self.reporter.changed(SessionEvent::Saving { file: file.to_owned() });
        self.status.count(Status::Asked, true);
        SaveInProgress(self.status)
    }

    /// Reports that the file is a checkpoint now: from here on the next image may be booted from it.
    fn completed(&self, checkpoint: &Checkpoint) {
        self.saved_through.store(checkpoint.evaluation, Ordering::Relaxed);
        self.reporter.changed(SessionEvent::Saved(Box::new(checkpoint.clone())));
    }
}

/// What saving works with.
#[derive(Debug, Clone)]
pub(crate) struct Saver {
    pub(crate) session: Session,
    pub(crate) checkpoints: Checkpoints,
    /// `None` without a supervisor.
    pub(crate) reports: Option<SaveReports>,
}

impl Saver {
    /// Saves the image under `name` while the session goes on; `done` gets the checkpoint, or a sentence that says why
    /// there is none.
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

/// When the image is saved of the server's own accord.
#[derive(Debug, Default)]
pub(crate) struct Saves {
    /// Now and then; checkpoints may take so many bytes together.
    pub(crate) automatic: Option<u64>,
    /// At the end.
    pub(crate) at_end: Option<AtEnd>,
}

/// How the image of a session that lasts is saved as its server ends.
#[derive(Debug)]
pub(crate) struct AtEnd {
    /// The session's lock, which the process that saves it keeps.
    pub(crate) lock: OwnedFd,
    /// Where that says what goes wrong.
    pub(crate) errors: PathBuf,
}

impl Saver {
    /// Saves the image without being asked to, and waits for the end; returns `None` when it failed.
    pub(super) fn save_automatically(&self) -> Option<Checkpoint> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.save(self.checkpoints.automatic_name(), true, move |result| drop(sender.send(result)));
        Some(receiver.recv().ok()?.ok()?.checkpoint)
    }

    /// Saves the image, if anything was evaluated since it was saved or booted, by a process that outlives this one. What
    /// runs is ended. That process' number.
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
