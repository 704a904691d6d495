//! The recovery context: the knowledge of a worker and its clients about the last image, and requests for another image.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::Pid;

use crate::Session;
use crate::outcome::Outcome;
use crate::recovery::checkpoint::autosave::Activity;
use crate::recovery::checkpoint::save::SaveReports;
use crate::recovery::checkpoint::store::Checkpoint;
use crate::recovery::definitions::Unrestored;
use crate::recovery::event::WorkerEvent;
use crate::recovery::messages::{Messages, messages, replaced, unrestored_line};
use crate::recovery::reporter::{EventReporter, Reporter};
use crate::recovery::restore::{Restoration, Restoring};
use crate::recovery::state::{Client, RecoveryState, Returned};
use crate::recovery::status_page::{Status, StatusPage};
use crate::rpc::driver::Driver;
use crate::rpc::output::Output;
use crate::rpc::route::call_of_job;
use crate::session::recovery::{Errors, in_background};

/// Time in which running and held evaluations unwind before another image replaces theirs.
const UNWINDING: Duration = Duration::from_millis(700);

/// The recovery context of one client.
#[derive(Debug, Clone)]
pub(super) struct RecoveryContext {
    pub(super) reporter: Reporter,
    driver: Arc<Driver>,
    status: StatusPage,
    /// The highest number of a job that began in an earlier image.
    begun: u64,
    /// The call that requested this image.
    requested_by: Option<u64>,
    /// The call whose inspection has lost two images or more.
    fatal_inspection: Option<u64>,
    pub(super) restoring: Arc<Restoring>,
    /// True when the last image was lost, not replaced by request.
    crashed: bool,
    pub(super) activity: Arc<Activity>,
    pub(super) saves: SaveReports,
    /// The forms that could not be restored and have not been defined again.
    unrestored: Arc<Mutex<Vec<Unrestored>>>,
    /// The errors of the clients that were attached to the last image, by connection.
    errors: Arc<BTreeMap<u64, Errors>>,
    /// The messages about the last image, set once the definitions are replayed.
    messages: Arc<OnceLock<Messages>>,
    /// The client whose cancelled evaluation did not end, so that the last image was replaced.
    cancelled: Option<u64>,
    /// The outcome of this client's lost evaluation as an error in the client's own history.
    lost: Arc<OnceLock<Outcome>>,
    /// True once an answer has reported the loss.
    told: Arc<AtomicBool>,
}

impl RecoveryContext {
    /// Creates the recovery context of another client, which may have been attached to the last image.
    pub(super) fn beside(&self, session: &Session) -> Self {
        if let Some(errors) = self.errors.get(&session.connection_number()) {
            session.set_errors(errors.clone());
        }
        Self { lost: Arc::default(), told: Arc::default(), ..self.clone() }
    }

    /// Reports the replacement of the last image to a client, once the definitions are replayed.
    pub(super) fn tell_of_replacement(&self, session: &Session) {
        let (context, session) = (self.clone(), session.clone());
        self.once_restored(move || {
            if let Some(messages) = context.messages.get() {
                context.tell(messages, &session);
            }
        });
    }

    fn tell(&self, messages: &Messages, session: &Session) {
        let connection = session.connection_number();
        let Messages { requested_by, notices, reset, .. } = messages;
        if *requested_by == connection {
            notices.iter().for_each(|notice| session.add_notice(notice.clone()));
        } else if let Some(reset) = reset {
            session.tell(reset.clone());
        }
        if let (Some(crash), Err(error)) = (&messages.crash, &messages.lost.result) {
            let waits = crash.in_flight && crash.connection == connection;
            // The answer to the lost evaluation has the notice, unless its call was cancelled.
            let tell = if waits { Session::add_notice } else { Session::tell };
            tell(session, error.message.text.clone());
            if let Some(those) = in_background(crash.background.iter().copied()) {
                tell(session, format!("{those} lost with its image."));
            }
            if waits {
                let mut lost = messages.lost.clone();
                session.fail(&mut lost);
                let _ = self.lost.set(lost);
            }
        }
        if connection == 0 {
            messages.resumed.iter().for_each(|resumed| session.add_notice(resumed.clone()));
        }
    }

    /// Returns true when a cancelled evaluation of this client did not end, so that the last image was replaced. The
    /// cancellation becomes the client's last error once the definitions are replayed.
    pub(super) fn has_cancelled(&self, session: &Session) -> bool {
        self.cancelled == Some(session.connection_number())
    }

    /// Makes the event loop check for due work.
    pub(super) fn look_again(&self) {
        self.driver.look_again();
    }

    /// Returns true until the replay is complete.
    pub(super) fn is_restoring(&self) -> bool {
        !self.restoring.is_over()
    }

    /// Calls `then` once the replay has ended: on this thread if it has already, else on the thread that ends it.
    pub(super) fn when_restored(&self, then: impl FnOnce(Restoration) + Send + 'static) {
        self.restoring.when_ended(then);
    }

    /// Calls `then` once the definitions are replayed, and never if the replay is abandoned.
    pub(super) fn once_restored(&self, then: impl FnOnce() + Send + 'static) {
        self.when_restored(move |restoration| match restoration {
            Restoration::Over => then(),
            Restoration::GivenUp => {}
        });
    }

    /// Describes the progress of the replay, for a client that waits; `None` once the replay is complete.
    pub(super) fn progress(&self) -> Option<String> {
        self.is_restoring().then(|| self.restoring.progress())
    }

    /// Abandons the replay, because another image replaces this one, and adds a notice to `session`.
    pub(super) fn give_up_restoring(&self, session: &Session) {
        self.restoring.give_up(|| {
            session.forget_said();
            session.add_notice("The image before was still being restored; that has been ended.".to_owned());
        });
    }

    /// Returns a line for each form that could not be restored and has not been defined again.
    pub(super) fn unrestored(&self) -> Vec<String> {
        self.unrestored.lock().iter().map(unrestored_line).collect()
    }

    /// Reports that the process `saver` saves the image and must survive the end of the others.
    pub(super) fn leaves(&self, saver: Pid) {
        self.reporter.report(&WorkerEvent::SaverStarted { pid: saver.as_raw_nonzero().get() });
    }

    /// Returns true for a job that an earlier image has begun.
    pub(super) fn has_begun(&self, number: u64) -> bool {
        number <= self.begun
    }

    /// Returns the outcome of a job that an earlier image has begun, and makes it the session's last error after a crash.
    pub(super) fn lost_outcome(&self, session: &Session) -> Outcome {
        let lost = self.lost.get().or_else(|| self.messages.get().map(|messages| &messages.lost));
        let mut outcome = lost.cloned().unwrap_or_else(replaced);
        if !self.crashed {
            // The job is older than the reset, which has cleared the error state.
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

    /// Returns the answer to an inspection, whose jobs have numbers from `number` on, if two images were lost during it. The
    /// session's error state does not change.
    pub(super) fn lost_question(&self, number: u64) -> Option<String> {
        let lost = &self.messages.get()?.lost;
        let told = lost.result.as_ref().err().filter(|_| self.fatal_inspection == Some(call_of_job(number)))?;
        Some(format!("[ERROR] {}\nTwice the image was lost while this was answered.\n{}", told.kind, told.message.text))
    }

    /// Returns true when this call requested the image.
    pub(super) fn is_fresh_for(&self, call: u64) -> bool {
        self.requested_by == Some(call)
    }

    /// Returns the outcome of the restore that this call requested, if the image serves that restore.
    pub(super) fn returned_for(&self, call: u64) -> Option<&Result<Returned, String>> {
        self.messages.get()?.returned.as_ref().filter(|_| self.is_fresh_for(call))
    }

    /// Asks the supervisor to restore a checkpoint. The new image gets the notices that `session` has not seen yet.
    pub(super) fn request_restore(&self, call: u64, checkpoint: Checkpoint, session: &Session) {
        self.leave_image(session, move |notices| WorkerEvent::restore_requested(call, checkpoint, notices));
    }

    /// Asks the supervisor for a reset. The new image gets the notices that `session` has not seen yet.
    pub(super) fn request_reset(&self, call: u64, session: &Session) {
        self.leave_image(session, move |notices| WorkerEvent::reset_requested(call, notices));
    }

    /// Requests another image once abandoned evaluations have unwound; `request` gets the unseen notices of `session`.
    fn leave_image(&self, session: &Session, request: impl FnOnce(&[String]) -> WorkerEvent + Clone + Send + 'static) {
        self.driver.pause();
        let is_unwinding = session.is_unwinding();
        let (reporter, session, deadline) = (self.reporter.clone(), session.clone(), Instant::now() + UNWINDING);
        let leave = move || {
            session.await_unwound(deadline);
            reporter.report(&request(&session.take_notices()));
        };
        if !is_unwinding {
            return leave();
        }
        // An unwinding evaluation may need this thread.
        if std::thread::Builder::new().name("sbcl-mcp-leave".to_owned()).spawn(leave.clone()).is_err() {
            leave();
        }
    }
}

/// Makes `session` continue where the last image stopped, and reports its events to the supervisor.
pub(super) fn resume(
    session: &Session,
    state: RecoveryState,
    output: Arc<Output>,
    driver: Arc<Driver>,
    status: StatusPage,
) -> RecoveryContext {
    if let Some(limits) = state.limits {
        session.set_limits(limits);
    }
    session.count_evaluations_from(state.evaluations);
    session.lose_evaluations(state.crash.as_ref().map_or(&[], |crash| &crash.background));
    if let Some(client) = state.clients.get(&0) {
        session.set_errors(client.errors.clone());
    }
    let forms = state.definitions().count();
    let reporter = Reporter::new(output);
    let errors = state.clients.iter().map(|(number, client)| (*number, client.errors.clone())).collect();
    let context = RecoveryContext {
        reporter: reporter.clone(),
        driver: driver.clone(),
        status,
        begun: state.begun,
        requested_by: state.replacement.as_ref().map(|replacement| replacement.call),
        fatal_inspection: state.inspected.filter(|(_, losses)| *losses > 1).map(|(call, _)| call),
        restoring: Arc::new(Restoring::new(forms)),
        crashed: state.crash.is_some(),
        activity: Arc::default(),
        // Definitions that are replayed are in no checkpoint.
        saves: SaveReports::new(reporter.clone(), status, (forms == 0).then_some(state.evaluations)),
        unrestored: Arc::new(Mutex::new(state.unrestored.clone())),
        errors: Arc::new(errors),
        messages: Arc::default(),
        cancelled: state.crash.as_ref().filter(|crash| crash.was_cancelled()).map(|crash| crash.connection),
        lost: Arc::default(),
        told: Arc::default(),
    };
    let last_error = |client: &Client| client.errors.last.as_ref().map(|error| error.id);
    session.observe(Arc::new(EventReporter {
        reporter: reporter.clone(),
        status,
        driver,
        restoring: context.restoring.clone(),
        activity: context.activity.clone(),
        unrestored: context.unrestored.clone(),
        last_errors: Mutex::new(state.clients.iter().map(|(number, client)| (*number, last_error(client))).collect()),
        since: Mutex::new(Instant::now()),
    }));
    reporter.report(&WorkerEvent::Ready);
    if forms == 0 {
        context.replay(session, &state);
        return context;
    }
    // On a thread of its own, so that calls that need no image are answered meanwhile.
    let (replayed, session) = (context.clone(), session.clone());
    let run = move || replayed.replay(&session, &state);
    if let Err(error) = std::thread::Builder::new().name("sbcl-mcp-restore".to_owned()).spawn(run) {
        tracing::error!("nothing can be restored: {error}");
        crate::exit_now(1);
    }
    context
}

impl RecoveryContext {
    /// Replays the definitions, then continues the waiting calls.
    fn replay(&self, session: &Session, state: &RecoveryState) {
        // The notices of the boot survive `forget_said`.
        let notices = session.take_notices();
        let Some(report) = self.restoring.evaluate(session, state.definitions(), self.status) else { return };
        session.forget_said();
        notices.into_iter().for_each(|notice| session.add_notice(notice));
        self.unrestored.lock().extend(state.failures(&report.failed));
        let _ = self.messages.set(messages(state, &report));
        self.reporter.report(&WorkerEvent::restored(&report.failed));
        // Only after the report: until then the supervisor blames a crash on the last form.
        self.status.set(Status::Restoring, 0);
        self.restoring.end();
        self.driver.look_again();
    }
}
