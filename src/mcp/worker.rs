//! The worker's part of surviving: what the last image knew is taken over, and what this one learns is handed on.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::Pid;

use super::checkpointing::Activity;
use super::keeper::Keeper;
use super::loss::{Before, before, failures, replaced, unrestored_line};
use super::restoring::{Restoration, Restoring};
use crate::Session;
use crate::checkpoints::Checkpoint;
use crate::handover::frame::Kind;
use crate::handover::shared_status::{SharedStatus, Status};
use crate::handover::{Restored, Return, Unrestored, WorkerInit, line_of_job};
use crate::outcome::Outcome;
use crate::rpc::driver::Driver;
use crate::rpc::output::Output;
use crate::session::recovery::{Errors, in_background};

/// Time in which running and held evaluations unwind before another image takes the place of theirs.
const UNWINDING: Duration = Duration::from_millis(700);

/// See [`Worker::saving`].
#[derive(Debug)]
pub(super) struct Saving(SharedStatus);

impl Drop for Saving {
    fn drop(&mut self) {
        self.0.count(Status::Asked, false);
    }
}

/// A checkpoint that the session went back to, and how many evaluations were forgotten.
#[derive(Debug, Clone)]
pub(super) struct Returned {
    pub(super) checkpoint: Checkpoint,
    pub(super) forgotten: u64,
}

/// What a worker knows of the one before it.
#[derive(Debug, Clone)]
pub(super) struct Worker {
    pub(super) output: Arc<Output>,
    pub(super) driver: Arc<Driver>,
    pub(super) status: SharedStatus,
    through: u64,
    reset: Option<u64>,
    deadly_question: Option<u64>,
    pub(super) restoring: Arc<Restoring>,
    /// The last image was lost, not replaced as somebody asked.
    crashed: bool,
    pub(super) activity: Arc<Activity>,
    /// What was evaluated up to this one is saved; `u64::MAX` for nothing.
    saved_through: Arc<AtomicU64>,
    /// What could not be restored, and nobody has defined again.
    pub(super) unrestored: Arc<Mutex<Vec<Unrestored>>>,
    /// What the clients that had joined the image before know of errors.
    guests: Arc<BTreeMap<u64, Errors>>,
    /// Known once the image is as it was.
    before: Arc<OnceLock<Before>>,
    /// The connection whose evaluation, which was cancelled, the image before was given up for.
    cancelled: Option<u64>,
    /// What became of this connection's evaluations, if that is an error of its own.
    lost: Arc<OnceLock<Outcome>>,
    /// An answer has told of the loss.
    told: Arc<AtomicBool>,
}

impl Worker {
    /// The same for a client that has joined, and may have joined the image before.
    pub(super) fn beside(&self, session: &Session) -> Self {
        let worker = Self { lost: Arc::default(), told: Arc::default(), ..self.clone() };
        if let Some(errors) = self.guests.get(&session.connection_number()) {
            session.set_errors(errors.clone());
        }
        worker
    }

    /// Has a connection that the image before had, too, be told what became of that, once it is known.
    pub(super) fn tell_of_before(&self, session: &Session) {
        let (worker, session) = (self.clone(), session.clone());
        self.once_restored(move || {
            if let Some(before) = worker.before.get() {
                worker.tell(before, &session);
            }
        });
    }

    fn tell(&self, before: &Before, session: &Session) {
        let connection = session.connection_number();
        let Before { reset_by, notices, reset, .. } = before;
        if *reset_by == connection {
            notices.iter().for_each(|notice| session.add_notice(notice.clone()));
        } else if let Some(reset) = reset {
            session.tell(reset.clone());
        }
        if let (Some(crash), Err(error)) = (&before.crash, &before.lost.result) {
            let waits = crash.in_flight && crash.connection == connection;
            // The answer to what ran tells of it, unless that wants none any more.
            let tell = if waits { Session::add_notice } else { Session::tell };
            tell(session, error.message.text.clone());
            if let Some(those) = in_background(crash.background.iter().copied()) {
                tell(session, format!("{those} lost with its image."));
            }
            if waits {
                let mut lost = before.lost.clone();
                session.fail(&mut lost);
                let _ = self.lost.set(lost);
            }
        }
        if connection == 0 {
            before.resumed.iter().for_each(|resumed| session.add_notice(resumed.clone()));
        }
    }

    /// True when the image before was given up since an evaluation of this connection's, which was cancelled, did not end:
    /// once the image is as it was, that is the last error.
    pub(super) fn has_cancelled(&self, session: &Session) -> bool {
        self.cancelled == Some(session.connection_number())
    }

    /// True until the image is as it was.
    pub(super) fn is_restoring(&self) -> bool {
        !self.restoring.is_over()
    }

    /// Has `then` called as soon as the image is as it was, or given up: on this thread if it is, else on the one that
    /// restores it.
    pub(super) fn when_restored(&self, then: impl FnOnce(Restoration) + Send + 'static) {
        self.restoring.when_ended(then);
    }

    /// The same for what an image that is given up has no need of.
    pub(super) fn once_restored(&self, then: impl FnOnce() + Send + 'static) {
        self.when_restored(move |restoration| match restoration {
            Restoration::Over => then(),
            Restoration::GivenUp => {}
        });
    }

    /// How far restoring is, in words.
    pub(super) fn progress(&self) -> Option<String> {
        self.is_restoring().then(|| self.restoring.progress())
    }

    /// Restores no more, since another image takes this one's place, and has `session` say so.
    pub(super) fn give_up_restoring(&self, session: &Session) {
        self.restoring.give_up(|| {
            session.forget_said();
            session.add_notice("The image before was still being restored; that has been ended.".to_owned());
        });
    }

    /// True when nothing was evaluated since the image was saved, or booted.
    pub(super) fn is_saved(&self, session: &Session) -> bool {
        session.evaluations_so_far() == self.saved_through.load(Ordering::Relaxed)
    }

    /// What could not be restored, and nobody has defined again: a line each.
    pub(super) fn unrestored(&self) -> Vec<String> {
        self.unrestored.lock().iter().map(unrestored_line).collect()
    }

    /// This process saves the image, and goes on when all others end.
    pub(super) fn leaves(&self, saver: Pid) {
        self.output.tell(Kind::Saver, saver.as_raw_nonzero().get().unsigned_abs().into(), &());
    }

    /// True for a job that another image has begun.
    pub(super) fn has_begun(&self, number: u64) -> bool {
        number <= self.through
    }

    /// The outcome of such a job, which is an error like any other.
    pub(super) fn lost(&self, session: &Session) -> Outcome {
        let lost = self.lost.get().or_else(|| self.before.get().map(|before| &before.lost));
        let mut outcome = lost.cloned().unwrap_or_else(replaced);
        if !self.crashed {
            // It was asked for before the reset, which has cleared the error state.
            return outcome;
        }
        if let (false, Err(error)) = (self.told.swap(true, Ordering::Relaxed), &outcome.result) {
            session.withdraw_notice(error.message.text.clone());
            if error.id > 0 {
                return outcome;
            }
        }
        session.fail(&mut outcome);
        outcome
    }

    /// Why a question that asks for jobs from this number on is not answered: images were lost while they did so. What it
    /// came to is no error of the session's.
    pub(super) fn lost_question(&self, number: u64) -> Option<String> {
        let lost = &self.before.get()?.lost;
        let told = lost.result.as_ref().err().filter(|_| self.deadly_question == Some(line_of_job(number)))?;
        Some(format!("[ERROR] {}\nTwice the image was lost while this was answered.\n{}", told.kind, told.message.text))
    }

    /// True when this worker is the fresh image that this line asked for.
    pub(super) fn is_fresh_for(&self, line: u64) -> bool {
        self.reset == Some(line)
    }

    /// What there is to be said when this worker is the checkpoint that this line asked for, or could not be.
    pub(super) fn returned_for(&self, line: u64) -> Option<&Result<Returned, String>> {
        self.before.get()?.returned.as_ref().filter(|_| self.is_fresh_for(line))
    }

    /// The image is being saved in a file of this name, until what this returns is dropped: the answer waits for that.
    pub(super) fn saving(&self, file: &str) -> Saving {
        self.output.tell(Kind::Saving, 0, &file);
        self.status.count(Status::Asked, true);
        Saving(self.status)
    }

    /// That is a checkpoint now.
    pub(super) fn saved(&self, checkpoint: &Checkpoint) {
        self.saved_through.store(checkpoint.evaluation, Ordering::Relaxed);
        self.output.tell(Kind::Saved, 0, checkpoint);
    }

    /// Ends this worker's service in favour of a checkpoint's image, which says what `session` has to say yet.
    pub(super) fn go_back(&self, line: u64, checkpoint: Checkpoint, session: &Session) {
        self.leave_image(session, move |worker, notices| {
            worker.output.tell(Kind::Return, line, &Return { checkpoint, notices });
        });
    }

    /// Has another image take this one's place, once what was abandoned is unwound. `tell` says which, with what `session`
    /// has to say yet.
    fn leave_image(&self, session: &Session, tell: impl FnOnce(&Self, Vec<String>) + Clone + Send + 'static) {
        self.driver.pause();
        let is_unwinding = session.is_unwinding();
        let (worker, session, deadline) = (self.clone(), session.clone(), Instant::now() + UNWINDING);
        let leave = move || {
            session.await_unwound(deadline);
            tell(&worker, session.take_notices());
        };
        if !is_unwinding {
            return leave();
        }
        // What unwinds may want this thread.
        if std::thread::Builder::new().name("sbcl-mcp-leave".to_owned()).spawn(leave.clone()).is_err() {
            leave();
        }
    }

    /// Ends this worker's service in favour of a fresh image, which says what `session` has to say yet.
    pub(super) fn make_way(&self, line: u64, session: &Session) {
        self.leave_image(session, move |worker, notices| worker.output.tell(Kind::Reset, line, &notices));
    }
}

/// Makes `session` go on where the last image stopped, and has the supervisor told of all that happens in it.
pub(super) fn take_over(
    session: &Session,
    init: &WorkerInit,
    output: Arc<Output>,
    driver: Arc<Driver>,
    status: SharedStatus,
) -> Worker {
    if let Some(limits) = init.limits {
        session.set_limits(limits);
    }
    session.count_evaluations_from(init.evaluations);
    session.lose_evaluations(init.crash.as_ref().map_or(&[], |crash| &crash.background));
    session.set_errors(init.errors.clone());
    let forms = init.journal.as_ref().map_or(0, Vec::len);
    let worker = Worker {
        output,
        driver,
        status,
        through: init.through,
        reset: init.reset,
        deadly_question: init.inspected.filter(|(_, times)| *times > 1).map(|(line, _)| line),
        restoring: Arc::new(Restoring::new(forms)),
        crashed: init.crash.is_some(),
        activity: Arc::default(),
        guests: Arc::new(init.guests.iter().map(|(number, guest)| (*number, guest.errors.clone())).collect()),
        before: Arc::default(),
        cancelled: init.crash.as_ref().filter(|crash| crash.was_cancelled()).map(|crash| crash.connection),
        // Forms that were evaluated again are in no checkpoint.
        saved_through: Arc::new(AtomicU64::new(if forms > 0 { u64::MAX } else { init.evaluations })),
        unrestored: Arc::new(Mutex::new(init.unrestored.clone())),
        lost: Arc::default(),
        told: Arc::default(),
    };
    session.observe(Arc::new(Keeper {
        worker: worker.clone(),
        told: Mutex::new(HashMap::from([(0, session.last_error().map(|error| error.id))])),
        since: Mutex::new(Instant::now()),
    }));
    worker.output.tell(Kind::Ready, 0, &());
    if forms == 0 {
        worker.restore(session, init);
        return worker;
    }
    // Meanwhile questions are answered.
    let (restorer, session, init) = (worker.clone(), session.clone(), init.clone());
    let run = move || restorer.restore(&session, &init);
    if let Err(error) = std::thread::Builder::new().name("sbcl-mcp-restore".to_owned()).spawn(run) {
        tracing::error!("nothing can be restored: {error}");
        crate::exit_now(1);
    }
    worker
}

impl Worker {
    /// Makes the image as it was, and lets all go on that waits for that.
    fn restore(&self, session: &Session, init: &WorkerInit) {
        let journal = init.journal.as_deref().unwrap_or_default();
        // What the image said as it was booted.
        let notices = session.take_notices();
        let Some(report) = self.restoring.evaluate(session, journal, self.status) else { return };
        session.forget_said();
        notices.into_iter().for_each(|notice| session.add_notice(notice));
        self.unrestored.lock().extend(failures(init, &report));
        let _ = self.before.set(before(init, &report));
        self.output.tell(Kind::Restored, 0, &Restored { failed: report.failed });
        self.restoring.end();
        self.driver.look_again();
    }
}
