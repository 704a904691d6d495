//! The worker's part of surviving: what the last image knew is taken over, and what this one learns is handed on.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::Pid;

use super::checkpointing::Activity;
use crate::checkpoints::Checkpoint;
use crate::handover::frame::Kind;
use crate::handover::shared_status::{SharedStatus, Status, monotonic};
use crate::handover::{
    CrashReport, Entry, ErrorChange, Restored, Resumed, Return, Unrestored, WorkerInit, line_of_job,
};
use crate::outcome::{Clipped, DefiningForm, ErrorRecord, Outcome};
use crate::rpc::driver::Driver;
use crate::rpc::output::Output;
use crate::session::observer::Observer;
use crate::session::operation::Operation;
use crate::session::recovery::{Errors, failed, in_background};
use crate::{Evaluation, Limits, Session, TimeLimit, report};

/// How long a form that is restored may take: so many times what it took at first, and at least this.
const RESTORE_FACTOR: u32 = 5;
const LEAST_RESTORE_TIME: Duration = Duration::from_secs(10);
/// How long after its time an evaluation may take to end, or to be given up by this process.
const GRACE: Duration = Duration::from_secs(3);
/// Forms that a message names when they could not be restored.
const NAMED: usize = 10;
/// Characters of a form that a message shows.
const SHOWN: usize = 100;

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
    output: Arc<Output>,
    driver: Arc<Driver>,
    status: SharedStatus,
    through: u64,
    reset: Option<u64>,
    deadly_question: Option<u64>,
    restoring: Arc<Restoring>,
    /// The last image was lost, not replaced as somebody asked.
    crashed: bool,
    activity: Arc<Activity>,
    /// What was evaluated up to this one is saved; `u64::MAX` for nothing.
    saved_through: Arc<AtomicU64>,
    /// What could not be restored, and nobody has defined again.
    unrestored: Arc<Mutex<Vec<Unrestored>>>,
    /// What the clients that had joined the image before know of errors.
    guests: Arc<BTreeMap<u64, Errors>>,
    /// Known once the image is as it was.
    before: Arc<OnceLock<Before>>,
    /// What became of this connection's evaluations, if that is an error of its own.
    lost: Arc<OnceLock<Outcome>>,
    /// An answer has told of the loss.
    told: Arc<AtomicBool>,
}

/// What every connection is told of the image before.
#[derive(Debug)]
struct Before {
    crash: Option<CrashReport>,
    lost: Outcome,
    /// Who asked for this image in place of that, and what it had to say to him yet.
    reset_by: u64,
    notices: Vec<String>,
    /// What the others are told of that.
    reset: Option<String>,
    /// How the checkpoint is told of that the reset went back to.
    returned: Option<Result<Returned, String>>,
    /// What is said of a session that goes on with another server.
    resumed: Option<String>,
}

/// How restoring an image has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Restoration {
    /// The image is as it was, as far as it could be.
    Over,
    /// Another one takes its place.
    GivenUp,
}

type Waiting = Box<dyn FnOnce(Restoration) + Send>;

/// How far restoring is, and what waits for its end.
#[derive(Default)]
struct Restoring {
    /// In its order; `None` once it is over.
    waiting: Mutex<Option<Vec<Waiting>>>,
    /// Forms are being evaluated again.
    evaluates: AtomicBool,
    given_up: AtomicBool,
    /// The form that is being evaluated, from 1, and how many there are.
    at: AtomicUsize,
    forms: AtomicUsize,
}

impl std::fmt::Debug for Restoring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restoring").field("at", &self.at).field("forms", &self.forms).finish_non_exhaustive()
    }
}

impl Restoring {
    /// Lets all go on that waits, in its order.
    fn end(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            // What comes meanwhile waits behind them.
            match waiting.as_mut().map(std::mem::take) {
                Some(those) if !those.is_empty() => {
                    drop(waiting);
                    those.into_iter().for_each(|then| then(Restoration::Over));
                }
                _ => {
                    *waiting = None;
                    return;
                }
            }
        }
    }
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
        self.when_restored(move |_| {
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

    /// True until the image is as it was.
    pub(super) fn is_restoring(&self) -> bool {
        self.restoring.waiting.lock().is_some()
    }

    /// Has `then` called as soon as the image is as it was, or given up: on this thread if it is, else on the one that
    /// restores it.
    pub(super) fn when_restored(&self, then: impl FnOnce(Restoration) + Send + 'static) {
        if let Some(waiting) = &mut *self.restoring.waiting.lock() {
            waiting.push(Box::new(then));
            return;
        }
        then(Restoration::Over);
    }

    /// How far restoring is, in words.
    pub(super) fn progress(&self) -> Option<String> {
        let (at, forms) = (&self.restoring.at, &self.restoring.forms);
        let (at, forms) = (at.load(Ordering::Relaxed), forms.load(Ordering::Relaxed));
        self.is_restoring().then(|| format!("waiting for the image, which is being restored: form {at} of {forms}"))
    }

    /// Restores no more, since another image takes this one's place, and has `session` say so.
    pub(super) fn give_up_restoring(&self, session: &Session) {
        self.restoring.given_up.store(true, Ordering::Relaxed);
        let waiting = self.restoring.waiting.lock().as_mut().map(std::mem::take);
        let Some(waiting) = waiting else { return };
        session.forget_said();
        session.add_notice("The image before was still being restored; that has been ended.".to_owned());
        waiting.into_iter().for_each(|then| then(Restoration::GivenUp));
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

    /// What goes on in the session.
    pub(super) fn activity(&self) -> &Arc<Activity> {
        &self.activity
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
        self.driver.pause();
        self.output.tell(Kind::Return, line, &Return { checkpoint, notices: session.take_notices() });
        self.driver.replace();
    }

    /// False where another image would cut off those that have joined: they have come to this very process.
    pub(super) fn is_replaceable(&self, session: &Session) -> bool {
        self.output.memory().is_none() || !session.has_guests()
    }

    /// Has it forgotten what another image would have to know, as `line` asks for: this one goes on.
    pub(super) fn forget(&self, line: u64) {
        self.output.tell(Kind::Reset, line, &Vec::<String>::new());
    }

    /// Ends this worker's service in favour of a fresh image, which says what `session` has to say yet.
    pub(super) fn make_way(&self, line: u64, session: &Session) {
        self.driver.pause();
        self.output.tell(Kind::Reset, line, &session.take_notices());
        self.driver.replace();
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
    let restoring = Arc::new(Restoring::default());
    *restoring.waiting.lock() = Some(Vec::new());
    restoring.forms.store(forms, Ordering::Relaxed);
    let unrestored = Arc::new(Mutex::new(init.unrestored.clone()));
    let activity = Arc::new(Activity::default());
    let told = Mutex::new(HashMap::from([(0, session.last_error().map(|error| error.id))]));
    session.observe(Arc::new(Keeper {
        output: output.clone(),
        driver: driver.clone(),
        status,
        told,
        since: Mutex::new(Instant::now()),
        activity: activity.clone(),
        unrestored: unrestored.clone(),
        restoring: restoring.clone(),
    }));
    let worker = Worker {
        output,
        driver,
        status,
        through: init.through,
        reset: init.reset,
        deadly_question: init.inspected.filter(|(_, times)| *times > 1).map(|(line, _)| line),
        restoring,
        crashed: init.crash.is_some(),
        activity,
        guests: Arc::new(init.guests.iter().map(|(number, guest)| (*number, guest.errors.clone())).collect()),
        before: Arc::default(),
        // Forms that were evaluated again are in no checkpoint.
        saved_through: Arc::new(AtomicU64::new(if forms > 0 { u64::MAX } else { init.evaluations })),
        unrestored,
        lost: Arc::default(),
        told: Arc::default(),
    };
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
        let restoring = &self.restoring;
        restoring.evaluates.store(true, Ordering::Relaxed);
        let report = restore(session, init.journal.as_deref().unwrap_or_default(), self.status, restoring);
        if restoring.given_up.load(Ordering::Relaxed) {
            return;
        }
        restoring.evaluates.store(false, Ordering::Relaxed);
        session.forget_said();
        self.unrestored.lock().extend(failures(init, &report));
        let _ = self.before.set(before(init, &report));
        self.output.tell(Kind::Restored, 0, &Restored { failed: report.failed });
        restoring.end();
        self.driver.look_again();
    }
}

/// What is told of the image before.
fn before(init: &WorkerInit, report: &Report) -> Before {
    let returned = init.returned.as_ref().map(|(checkpoint, forgotten)| {
        if init.checkpoint.as_ref().is_some_and(|base| base.file == checkpoint.file) {
            Ok(Returned { checkpoint: checkpoint.clone(), forgotten: *forgotten })
        } else {
            Err(format!("The checkpoint {:?} did not come up. {}", checkpoint.name, restored_since(init, report, &[])))
        }
    });
    let reset = init.reset.filter(|_| init.crash.is_none()).map(|_| match &init.returned {
        Some((checkpoint, _)) => format!("Another connection restored the checkpoint {:?}.", checkpoint.name),
        None => "Another connection reset the session: all definitions are gone.".to_owned(),
    });
    Before {
        crash: init.crash.clone(),
        lost: lost(init, report),
        reset_by: init.reset_by,
        notices: init.notices.clone(),
        reset,
        returned,
        resumed: init.resumed.as_ref().map(|which| resumed(which, init, report)),
    }
}

/// The forms that this image could not restore.
fn failures(init: &WorkerInit, report: &Report) -> Vec<Unrestored> {
    let journal = init.journal.as_deref().unwrap_or_default();
    let deadly = init.crash.as_ref().map_or(&[][..], |crash| &crash.deadly).iter();
    let failed = report.failed.iter().map(|(index, reason)| Unrestored::new(&journal[*index], reason));
    deadly.map(Unrestored::deadly).chain(failed).collect()
}

fn unrestored_line(unrestored: &Unrestored) -> String {
    format!("{} ({})", shortened(&unrestored.form.code), unrestored.reason)
}

fn push_unrestored(text: &mut String, unrestored: &[Unrestored]) {
    for one in unrestored.iter().take(NAMED) {
        *text += &format!("\n- {}", unrestored_line(one));
    }
    if unrestored.len() > NAMED {
        *text += &format!("\n- and {} more", unrestored.len() - NAMED);
    }
}

/// What is said of a session that goes on with another server.
fn resumed(resumed: &Resumed, init: &WorkerInit, report: &Report) -> String {
    let mut text = format!("The session {:?} goes on. ", resumed.session);
    if let Some(other) = &resumed.other {
        text += &format!("Its image was saved by {other}. It cannot be booted here: only definitions come back. ");
    }
    text + &restored_since(init, report, &[])
}

/// How restoring went.
#[derive(Debug, Default)]
struct Report {
    restored: usize,
    /// Indices into the journal, each with the reason.
    failed: Vec<(usize, String)>,
}

fn restore(session: &Session, journal: &[Entry], status: SharedStatus, restoring: &Restoring) -> Report {
    let mut report = Report::default();
    for (index, entry) in journal.iter().enumerate() {
        if restoring.given_up.load(Ordering::Relaxed) {
            return report;
        }
        restoring.at.store(index + 1, Ordering::Relaxed);
        let limit = (RESTORE_FACTOR * Duration::from_millis(entry.took)).max(LEAST_RESTORE_TIME);
        status.set(Status::Due, due(limit));
        status.set(Status::Restoring, index as u64 + 1);
        let mut evaluation = Evaluation::new(&*entry.form.code);
        evaluation.timeout = TimeLimit::Of(limit);
        let operation = if entry.local {
            evaluation.package = Some(entry.form.package.clone());
            None
        } else {
            Some(Operation::new("restore-form").with("package", &*entry.form.package))
        };
        match session.evaluate_again(entry.evaluation, evaluation, operation.as_ref()).result {
            Ok(_) => report.restored += 1,
            Err(error) => report.failed.push((index, reason(&error))),
        }
    }
    status.set(Status::Restoring, 0);
    status.set(Status::Due, 0);
    report
}

fn reason(error: &ErrorRecord) -> String {
    let text = error.message.text.lines().next().unwrap_or_default();
    format!("{}: {}", error.kind, shortened(text))
}

fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

/// The outcome of an evaluation that has not begun in an image that is replaced.
pub(super) fn replaced() -> Outcome {
    failed("CANCELLED", "The evaluation ended with its image, which reset-session has replaced.".to_owned())
}

/// What is said of an evaluation that the last image did not finish.
fn lost(init: &WorkerInit, report: &Report) -> Outcome {
    let Some(crash) = &init.crash else {
        let by = if init.returned.is_some() { "a checkpoint" } else { "reset-session" };
        return failed("CANCELLED", format!("The evaluation ended with its image, which {by} has replaced."));
    };
    let restored = restored(init, report, crash);
    let stuck = crash.stuck.as_deref().and_then(|outcome| Some((outcome, outcome.result.as_ref().err()?)));
    let Some((outcome, error)) = stuck else {
        return failed("IMAGE-LOST", format!("The Lisp image {}. {restored}", crash.cause));
    };
    let mut error = ErrorRecord::clone(error);
    let text = format!("{}.\nThe Lisp image {}. {restored}", error.what_happened(), crash.cause);
    error.message = Clipped::from(text);
    Outcome { result: Err(Arc::new(error)), ..outcome.clone() }
}

fn restored(init: &WorkerInit, report: &Report, crash: &CrashReport) -> String {
    let mut text = "A new image has taken its place.\n".to_owned();
    if init.journal.is_none() {
        text += "Nothing was restored (--restore none): definitions, packages and values are gone; the limits stay.";
        return text;
    }
    text += &restored_since(init, report, &crash.deadly);
    text += match &init.checkpoint {
        Some(_) => {
            "\nLost: values that were assigned since the checkpoint, threads, open files, and what else the unfinished \
             evaluation had done."
        }
        None => {
            "\nNot kept: values that were assigned after their definition, threads, open files, and what else the \
             unfinished evaluation had done. (The tool checkpoint saves values, too.)"
        }
    };
    text
}

/// What was restored: the checkpoint, and the forms since.
fn restored_since(init: &WorkerInit, report: &Report, deadly: &[Entry]) -> String {
    let journal = init.journal.as_deref().unwrap_or_default();
    let dropped = if init.checkpoint.is_some() { 0 } else { init.dropped };
    let total = journal.len() + deadly.len() + dropped;
    let mut text = match &init.checkpoint {
        Some(checkpoint) => {
            let age = report::age(jiff::Timestamp::now().duration_since(checkpoint.saved));
            let since = match total {
                0 => ". Nothing was defined since.".to_owned(),
                1 if report.restored == 1 => " and the one form that defined something since.".to_owned(),
                _ if report.restored == total => format!(" and all {total} forms that defined something since."),
                _ => format!(" and {} of {total} forms that defined something since. Not restored:", report.restored),
            };
            format!(
                "Restored: the checkpoint {:?} of {age} ago (evaluation {}){since}",
                checkpoint.name, checkpoint.evaluation
            )
        }
        None => match total {
            0 => "There were no definitions to restore.".to_owned(),
            1 if report.restored == 1 => "Restored: the one form that defined something.".to_owned(),
            _ if report.restored == total => format!("Restored: all {total} forms that defined something."),
            _ => format!("Restored: {} of {total} forms that defined something. Not restored:", report.restored),
        },
    };
    push_unrestored(&mut text, &failures(init, report));
    if dropped > 0 {
        text += &format!("\n- the {dropped} oldest ones, for which there was no room");
    }
    if !init.unrestored.is_empty() {
        text += "\nNot restored earlier, and not defined again since:";
        push_unrestored(&mut text, &init.unrestored);
    }
    text
}

/// When an evaluation must be over that has so much time from now on, for [`Status::Due`].
fn due(time: Duration) -> u64 {
    u64::try_from((time + GRACE).as_nanos()).unwrap_or(u64::MAX).saturating_add(monotonic())
}

/// Tells the supervisor.
#[derive(Debug)]
struct Keeper {
    output: Arc<Output>,
    driver: Arc<Driver>,
    status: SharedStatus,
    /// The number of each connection's last error as the supervisor knows it.
    told: Mutex<HashMap<u64, Option<u64>>>,
    /// When the form that runs began, or one before it: the job's begin, or the last form that defined something.
    since: Mutex<Instant>,
    activity: Arc<Activity>,
    unrestored: Arc<Mutex<Vec<Unrestored>>>,
    restoring: Arc<Restoring>,
}

impl Observer for Keeper {
    fn restores(&self) -> bool {
        self.restoring.evaluates.load(Ordering::Relaxed)
    }

    fn begun(&self, job: u64, timeout: Option<Duration>) {
        if self.restores() {
            return;
        }
        *self.since.lock() = Instant::now();
        self.status.set(Status::Due, timeout.map_or(0, due));
        self.status.set(Status::Begun, job);
    }

    fn extended(&self, more: Option<Duration>) {
        self.status.set(Status::Due, more.map_or(0, due));
    }

    fn asks(&self, yes: bool) {
        self.status.count(Status::Asked, yes);
    }

    fn ended(&self, job: u64) {
        if self.restores() {
            return;
        }
        // One that was cancelled in the queue never began.
        if self.status.get(Status::Begun) == job {
            self.status.set(Status::Ended, job);
        }
        self.activity.ended();
    }

    fn in_background(&self, evaluations: &mut dyn Iterator<Item = u64>) {
        self.status.set_background(evaluations);
    }

    fn inspects(&self, job: Option<u64>) {
        self.status.set(Status::Inspecting, job.unwrap_or(0));
    }

    fn errors(&self, connection: u64, added: Option<&Arc<ErrorRecord>>, last: Option<&Arc<ErrorRecord>>) {
        let last = last.map(|error| error.id);
        let mut told = self.told.lock();
        let known = told.entry(connection).or_default();
        if added.is_some() || *known != last {
            *known = last;
            self.output.tell(Kind::Error, connection, &ErrorChange { added: added.cloned(), last });
        }
    }

    fn disconnected(&self, connection: u64) {
        self.told.lock().remove(&connection);
    }

    fn defined(&self, form: &DefiningForm, local: bool, evaluation: u64) {
        if self.restores() {
            return;
        }
        let now = Instant::now();
        let took = now - std::mem::replace(&mut *self.since.lock(), now);
        let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        self.unrestored.lock().retain(|unrestored| !unrestored.is_made_good_by(form));
        self.output.tell(Kind::Defined, 0, &Entry { form: form.clone(), local, evaluation, took });
    }

    fn numbered(&self, evaluation: u64) {
        self.status.set(Status::Numbered, evaluation);
    }

    fn limits(&self, limits: &Limits) {
        self.output.tell(Kind::Limits, 0, limits);
    }

    fn stuck(&self, outcome: Option<Outcome>) {
        // No answer will have more of it.
        let most = usize::try_from(*Limits::MAX_ANSWER_RANGE.end()).unwrap_or(usize::MAX);
        let outcome = outcome.map(|outcome| report::fitted(&Outcome { kept: false, ..outcome }, most));
        self.output.tell(Kind::Stuck, 0, &outcome);
        self.driver.replace();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_told_in_sentences() {
        let stuck =
            failed("CANCELLED", "The evaluation was cancelled; what it had done by then stays done.".to_owned());
        let crash = CrashReport {
            cause: "did not react to being interrupted and was ended".to_owned(),
            in_flight: true,
            connection: 0,
            background: Vec::new(),
            stuck: Some(Box::new(stuck)),
            deadly: Vec::new(),
        };
        let init = WorkerInit { journal: Some(Vec::new()), crash: Some(crash), ..WorkerInit::default() };
        let error = lost(&init, &Report::default()).result.unwrap_err();
        assert_eq!(
            error.message.text,
            "The evaluation was cancelled.\nThe Lisp image did not react to being \
             interrupted and was ended. A new image has taken its place.\nThere were no definitions to restore.\nNot \
             kept: values that were assigned after their definition, threads, open files, and what else the unfinished \
             evaluation had done. (The tool checkpoint saves values, too.)"
        );
    }
}
