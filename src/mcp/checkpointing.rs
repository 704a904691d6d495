//! Saving checkpoints: when the client asks for one, and of the server's own accord.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::Pid;

use super::worker::Worker;
use crate::Session;
use crate::checkpoints::{Checkpoint, Checkpoints, Made};
use crate::outcome::Record;
use crate::session::operation::Operation;

/// How long nothing must have been evaluated before the image is saved of the server's own accord, and how long after
/// the last time that may be.
const QUIET: Duration = Duration::from_secs(2);
const INTERVAL: Duration = Duration::from_secs(30);
/// Bytes that may be written in a minute.
const RATE: u64 = 500 << 20;
/// Bytes of disk and of memory that must be free beyond what the image takes.
const RESERVE: u64 = 512 << 20;

/// How long what is evaluated may take to end when its session is to be saved at the end.
const LAST_SAVE: Duration = Duration::from_secs(10);

/// A checkpoint and how it came about.
#[derive(Debug)]
pub(super) struct Saved {
    pub(super) checkpoint: Checkpoint,
    /// How long the session stood still, in microseconds.
    pub(super) stopped: i64,
    /// Threads that are not in it.
    pub(super) threads: Vec<String>,
    /// How many timers are not.
    pub(super) timers: i64,
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

/// What saving works with.
#[derive(Debug, Clone)]
pub(super) struct Saver {
    pub(super) session: Session,
    pub(super) checkpoints: Checkpoints,
    /// Whoever begins another image with the last checkpoint.
    pub(super) worker: Option<Worker>,
}

impl Saver {
    /// Saves the image under `name` while the session goes on; `done` gets the checkpoint, or a sentence that says why
    /// there is none.
    pub(super) fn save(
        &self,
        name: String,
        automatic: bool,
        done: impl FnOnce(Result<Saved, String>) + Send + 'static,
    ) {
        if self.session.is_anything_held() {
            return done(Err(
                "Nothing was saved: an evaluation is held, and its stack cannot be saved. Go on with it, \
                             or abort it (abort-evaluation), first."
                    .to_owned(),
            ));
        }
        if self.session.is_busy() {
            return done(Err(
                "Nothing was saved: an evaluation runs, and its stack cannot be saved. Wait for it (the \
                             tool evaluation), or cancel it, first."
                    .to_owned(),
            ));
        }
        let draft = match self.checkpoints.begin() {
            Ok(draft) => draft,
            Err(reason) => return done(Err(reason)),
        };
        let path = draft.path().to_string_lossy().into_owned();
        let operation = Operation::new("save-image").with("path", path).with("name", &*name);
        let evaluation = self.session.evaluations_so_far();
        let made = Made { name, evaluation, saved: jiff::Timestamp::now(), automatic, at_end: false };
        let (worker, checkpoints) = (self.worker.clone(), self.checkpoints.clone());
        self.session.query_in_order(&operation, move |records| {
            let records = match records {
                Ok(records) => records,
                Err(error) => return done(Err(format!("Nothing was saved: {error}"))),
            };
            // Before anything else is evaluated: what is defined from here on is not in it.
            let saving = worker.as_ref().map(|worker| worker.saving(draft.file()));
            let child = records.iter().find_map(|record| record.number("process"));
            let Some(child) = child.and_then(|child| Pid::from_raw(i32::try_from(child).ok()?)) else {
                return done(Err("Nothing was saved: the process that would do it did not start.".to_owned()));
            };
            let finish = move || {
                let saved = draft.finish(child, made);
                match (&worker, &saved) {
                    (Some(worker), Ok(checkpoint)) => worker.saved(checkpoint),
                    (None, Ok(checkpoint)) => checkpoints.delete_replaced(checkpoint),
                    _ => {}
                }
                done(match saved {
                    Ok(checkpoint) => Ok(Saved::new(checkpoint, &records)),
                    Err(reason) => Err(format!("Nothing was saved: {reason}.")),
                });
                drop(saving);
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
    /// Saves the image of the server's own accord, and waits for that; `None` when there is no room, or it failed.
    fn save_automatically(&self) -> Option<Checkpoint> {
        if !has_room(&self.checkpoints) {
            return None;
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        self.save(self.checkpoints.automatic_name(), true, move |result| drop(sender.send(result)));
        Some(receiver.recv().ok()?.ok()?.checkpoint)
    }

    /// Saves the image, if anything was evaluated since it was saved or booted, by a process that outlives this one. What
    /// runs is ended. That process' number.
    pub(super) fn save_at_end(&self, at_end: AtEnd) -> Result<Option<Pid>, String> {
        if self.worker.as_ref().is_some_and(|worker| worker.is_saved(&self.session)) {
            return Ok(None);
        }
        let errors = std::fs::File::create(&at_end.errors).map_err(|error| error.to_string())?;
        let draft = self.checkpoints.begin()?;
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

/// When something was evaluated last.
#[derive(Debug, Default)]
pub(super) struct Activity {
    last: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Activity {
    /// Something was evaluated.
    pub(super) fn ended(&self) {
        let first = self.last.lock().replace(Instant::now()).is_none();
        if first {
            self.changed.notify_one();
        }
    }

    /// Waits until something was evaluated, and then nothing more for so long. It sleeps as long as nothing is.
    fn quiet(&self) {
        let mut last = self.last.lock();
        loop {
            match *last {
                None => self.changed.wait(&mut last),
                Some(at) if at.elapsed() >= QUIET => {
                    *last = None;
                    return;
                }
                Some(at) => drop(self.changed.wait_until(&mut last, at + QUIET)),
            }
        }
    }
}

/// Saves the image now and then, from a thread of its own, after `activity`; checkpoints take at most `space` bytes
/// together.
pub(super) fn save_now_and_then(saver: Saver, activity: Arc<Activity>, space: u64) {
    // Now: what is evaluated before the thread begins is to be saved.
    let mut saved = saver.session.evaluations_so_far();
    let run = move || {
        loop {
            activity.quiet();
            let evaluations = saver.session.evaluations_so_far();
            if evaluations == saved {
                continue;
            }
            if saver.session.is_busy() {
                // What goes on in the background does not say when it is over.
                activity.ended();
                continue;
            }
            let Some(checkpoint) = saver.save_automatically() else {
                std::thread::sleep(INTERVAL);
                activity.ended();
                continue;
            };
            saved = evaluations;
            saver.checkpoints.make_room(space);
            let seconds = checkpoint.bytes * 60 / RATE;
            std::thread::sleep(INTERVAL.max(Duration::from_secs(seconds)));
        }
    };
    // Without it nothing is saved, and nothing else is lost.
    let _ = std::thread::Builder::new().name("sbcl-mcp-auto".to_owned()).spawn(run);
}

/// True while neither disk nor memory is short.
fn has_room(checkpoints: &Checkpoints) -> bool {
    let needed = RESERVE + u64::try_from(crate::image::heap::usage().map_or(0, |usage| usage.used)).unwrap_or(u64::MAX);
    checkpoints.free_space().is_none_or(|free| free > needed) && free_memory().is_none_or(|free| free > needed)
}

/// Bytes of memory that programs may still have, as the kernel reckons it.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}
