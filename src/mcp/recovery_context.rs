//! The recovery context: what a worker and its clients must know about the last image, and requests for another image.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::Pid;

use crate::Session;
use crate::audience::Audience;
use crate::os::helper_threads;
use crate::outcome::Outcome;
use crate::recovery::checkpoint::autosave::AutosaveTrigger;
use crate::recovery::checkpoint::save::SaveReporter;
use crate::recovery::checkpoint::store::Checkpoint;
use crate::recovery::event::{SessionEvent, WorkerEvent};
use crate::recovery::messages::{
    ReplacementMessages, outcome_after_reset, outcome_lost_with_batch, replacement_messages, restore_notice,
    unrestored_line,
};
use crate::recovery::replay::{DefinitionReplay, ReplayEnd};
use crate::recovery::reporter::{EventForwarder, Reporter};
use crate::recovery::state::{CheckpointRestore, ClientState, RecoveryState};
use crate::recovery::status_page::{StatusField, StatusPage};
use crate::recovery::unrestored::UnrestoredForms;
use crate::rpc::event_loop::EventLoop;
use crate::rpc::inflight::Inflight;
use crate::rpc::output::Output;
use crate::rpc::route::call_of_job;
use crate::session::recovery::{SavedErrors, describe_background};

/// Grace period in which running and held evaluations unwind before another image replaces this one.
const UNWINDING_GRACE_PERIOD: Duration = Duration::from_millis(700);

/// The recovery context of one client: messages about the last image, the replay of the definitions, and requests for
/// another image.
#[derive(Debug, Clone)]
pub(super) struct RecoveryContext {
    /// The number of the client's connection.
    connection: u64,
    pub(super) reporter: Reporter,
    event_loop: Arc<EventLoop>,
    status: StatusPage,
    /// The highest number of a job that began in an earlier image.
    last_earlier_job: u64,
    /// The lowest number for the jobs of the call that requested this image.
    requested_by: Option<u64>,
    /// The lowest job numbers of the unanswered calls that have requested this image or an earlier image.
    replaced_for: Arc<BTreeSet<u64>>,
    /// The highest number of a job that had begun when a call last replaced an image.
    last_job_before_replacement: u64,
    /// The number of a call that has crashed at least two images although its tool only inspects.
    fatal_inspection: Option<u64>,
    pub(super) replay: Arc<DefinitionReplay>,
    /// The connections of the calls that have requested another image.
    requesters: Arc<Mutex<BTreeSet<u64>>>,
    /// True if the last image was lost rather than replaced by request.
    crashed: bool,
    pub(super) autosave_trigger: Arc<AutosaveTrigger>,
    pub(super) saves: SaveReporter,
    /// The forms that could not be restored and have not been defined again.
    unrestored: Arc<Mutex<UnrestoredForms>>,
    /// The errors of all clients of the last image, by connection.
    errors: Arc<BTreeMap<u64, SavedErrors>>,
    /// The messages about the last image for each audience, in the order of [`Audience::ALL`]. Set once the definitions are
    /// replayed.
    messages: Arc<OnceLock<[ReplacementMessages; Audience::ALL.len()]>>,
    /// The connection whose cancelled evaluation did not end, so that the last image was replaced.
    cancelled_connection: Option<u64>,
    /// The outcome of this client's lost evaluation, as recorded in the client's error history.
    lost: Arc<OnceLock<Outcome>>,
    /// True once an answer has reported the lost evaluation.
    loss_reported: Arc<AtomicBool>,
}

impl RecoveryContext {
    /// Creates the recovery context of another client. If the client was attached to the last image already, restores its
    /// errors in `session`.
    pub(super) fn for_attached(&self, session: &Session) -> Self {
        if let Some(errors) = self.errors.get(&session.connection_number()) {
            session.set_errors(errors.clone());
        }
        let connection = session.connection_number();
        Self { connection, lost: Arc::default(), loss_reported: Arc::default(), ..self.clone() }
    }

    /// From now on, reports changes of the client's open server requests to the supervisor, so that the next worker can
    /// withdraw the requests.
    pub(super) fn report_server_requests(&self, inflight: &Inflight) {
        let (reporter, client) = (self.reporter.clone(), self.connection);
        inflight.set_server_request_observer(move |requests| {
            reporter.report_change(SessionEvent::ServerRequests { client, requests });
        });
    }

    /// Reports the replacement of the last image to a client, once the definitions are replayed.
    pub(super) fn report_replacement(&self, session: &Session) {
        let (context, session) = (self.clone(), session.clone());
        self.after_restore(move || {
            if let Some(messages) = context.messages_for(session.audience()) {
                context.report_to(messages, &session);
            }
        });
    }

    /// Returns the messages about the last image for this audience; `None` until the definitions are replayed.
    fn messages_for(&self, audience: Audience) -> Option<&ReplacementMessages> {
        let mut messages = self.messages.get()?.iter().zip(Audience::ALL);
        messages.find(|(_, known)| *known == audience).map(|(messages, _)| messages)
    }

    fn report_to(&self, messages: &ReplacementMessages, session: &Session) {
        let connection = session.connection_number();
        let ReplacementMessages { requested_by, notices, reset, .. } = messages;
        if *requested_by == connection {
            notices.iter().for_each(|notice| session.add_notice(notice.clone()));
            // The answer to the restore withdraws the notice. If that call was cancelled, the client's next answer has
            // the notice. After a crash, an earlier image has already reported the restore.
            if let (None, Some(outcome)) = (&messages.crash, &messages.restore) {
                session.add_notice(restore_notice(outcome));
            }
        } else if let Some(reset) = reset {
            session.notify(reset.clone());
        }
        let lost = messages.lost_outcome(connection);
        if let (Some(crash), Err(error)) = (&messages.crash, &lost.result) {
            let waits = messages.has_lost_evaluation(connection);
            // `lost_outcome` withdraws the notice when it answers the lost evaluation. If that call was cancelled, the
            // client's next answer has the notice.
            let report = if waits { Session::add_notice } else { Session::notify };
            report(session, error.message.text.clone());
            if let Some(evaluations) = describe_background(crash.background.iter().copied()) {
                report(session, format!("{evaluations} lost with the image."));
            }
            if waits {
                let mut lost = lost.clone();
                session.record_failure(&mut lost);
                let _ = self.lost.set(lost);
            }
        }
        if connection == 0 {
            messages.continued.iter().for_each(|resumed| session.add_notice(resumed.clone()));
        }
    }

    /// Returns true if a cancelled evaluation of this client did not end, so that the last image was replaced. The
    /// cancellation becomes the client's last error once the definitions are replayed.
    pub(super) fn has_unended_cancellation(&self, session: &Session) -> bool {
        self.cancelled_connection == Some(session.connection_number())
    }

    /// Records that a checkpoint was deleted, so that the image is saved again.
    pub(super) fn record_deletion(&self) {
        self.saves.record_deletion();
        self.autosave_trigger.record_deletion();
    }

    /// Counts one more or one fewer answer that the supervisor's watchdog must wait for.
    pub(super) fn count_pending_answer(&self, more: bool) {
        self.status.adjust(StatusField::PendingAnswers, more);
    }

    /// Records that the call whose jobs begin at `job` begins, before the call changes something without a job.
    pub(super) fn record_begun(&self, job: u64) {
        self.status.record_begun(job);
    }

    /// Records that the decoding of a slow line begins or has ended. If the image is lost in between, the line may be
    /// the cause. Only one line is recorded at a time.
    pub(super) fn record_decoding(&self, call: u64, begins: bool) {
        let (old, new) = if begins { (0, call) } else { (call, 0) };
        self.status.replace(StatusField::LineBeingDecoded, old, new);
    }

    /// Returns true until the replay is complete and the client's waiting calls have continued.
    pub(super) fn is_restoring(&self) -> bool {
        !self.replay.is_complete(self.connection)
    }

    /// Calls `then` once the replay has ended: on this thread if the replay is already over and no earlier call of the
    /// client waits, else on the thread that continues the client's waiting calls. `is_slow` is true if `then` may take long
    /// before it waits for Lisp.
    pub(super) fn when_replay_ended(&self, is_slow: bool, then: impl FnOnce(ReplayEnd) + Send + 'static) {
        self.replay.when_ended(self.connection, is_slow, then);
    }

    /// Calls `then` once the definitions are replayed, and never if the replay is abandoned.
    pub(super) fn after_restore(&self, then: impl FnOnce() + Send + 'static) {
        self.when_replay_ended(false, move |end| match end {
            ReplayEnd::Complete => then(),
            ReplayEnd::Abandoned => {}
        });
    }

    /// Describes the progress of the replay, for a client that waits. Returns `None` once the replay is complete.
    pub(super) fn progress(&self) -> Option<String> {
        self.is_restoring().then(|| self.replay.progress())
    }

    /// Abandons the replay, because a reset replaces the image, and adds a notice to `session`.
    fn abandon_replay(&self, session: &Session) {
        self.replay.abandon(|| {
            session.discard_pending_messages();
            session.add_notice("The reset ended the unfinished restore of the session's definitions.".to_owned());
        });
    }

    /// Returns a line for each form that could not be restored and has not been defined again.
    pub(super) fn unrestored_lines(&self) -> Vec<String> {
        self.unrestored.lock().iter().map(unrestored_line).collect()
    }

    /// Reports that process `saver` saves the image and must outlive the worker. The report is on the status page, since the
    /// supervisor must know the process as soon as this worker has ended, even if much of the output is still unread.
    pub(super) fn report_saver(&self, saver: Pid) {
        self.status.set(StatusField::Saver, u64::from(saver.as_raw_nonzero().get().unsigned_abs()));
    }

    /// Returns true if job `number` began in an earlier image.
    pub(super) fn began_in_earlier_image(&self, number: u64) -> bool {
        number <= self.last_earlier_job
    }

    /// Returns the outcome of the call whose jobs begin at `job` and that began in an earlier image. After a crash, the
    /// outcome of a call that `evaluates` becomes the session's last error, unless another call's evaluation was lost.
    pub(super) fn lost_outcome(&self, session: &Session, job: u64, evaluates: bool) -> Outcome {
        let is_of_last_image = self.crashed && job > self.last_job_before_replacement;
        if !is_of_last_image && self.has_batch_replaced_image(job) {
            return outcome_lost_with_batch();
        }
        let connection = session.connection_number();
        let Some(messages) = self.messages_for(session.audience()) else { return outcome_after_reset() };
        let evaluated = messages.is_lost_evaluation(connection, job);
        let recorded = self.lost.get().filter(|_| evaluated);
        let mut outcome = recorded.unwrap_or_else(|| messages.lost_outcome_of_call(connection, job)).clone();
        if !self.crashed || !evaluated && messages.has_lost_evaluation(connection) {
            // The image was replaced by request, so the job's end is not an error of the session; or the lost evaluation is
            // the session's last error.
            return outcome;
        }
        if let Err(error) = &outcome.result {
            session.withdraw_notice(error.message.text.clone());
            if error.id > 0 && !self.loss_reported.swap(true, Ordering::Relaxed) {
                return outcome;
            }
        }
        if evaluates {
            session.record_failure(&mut outcome);
        }
        outcome
    }

    /// Returns the answer to an inspection during which two images were lost, if `number` is one of its jobs. The
    /// session's error state does not change.
    pub(super) fn lost_inspection(&self, number: u64) -> Option<String> {
        let lost = &self.messages_for(Audience::current())?.lost_other;
        let error = lost.result.as_ref().err().filter(|_| self.fatal_inspection == Some(call_of_job(number)))?;
        Some(format!(
            "[ERROR] {}\nTwo images were lost during this request, so it is not retried.\n{}",
            error.kind, error.message.text
        ))
    }

    /// Returns true if the call whose jobs begin at `job` has already replaced an image.
    pub(super) fn has_replaced_image(&self, job: u64) -> bool {
        self.replaced_for.contains(&job)
    }

    /// Returns the reason why the call whose jobs begin at `job` cannot request another image, as a sentence. Only one call
    /// of a batch can do so: each new image runs the whole batch again.
    pub(super) fn replacement_obstacle(&self, job: u64) -> Option<String> {
        self.has_batch_replaced_image(job).then(|| {
            "This call has reset or restored nothing, because another call of the same batch has already reset or restored \
             the session. Send this call outside the batch."
                .to_owned()
        })
    }

    /// Returns true if another call of the same batch as the call whose jobs begin at `job` has already replaced an image.
    fn has_batch_replaced_image(&self, job: u64) -> bool {
        self.replaced_for.iter().any(|by| *by != job && call_of_job(*by) == call_of_job(job))
    }

    /// Returns the outcome of the restore that the call whose jobs begin at `job` requested, if that restore has replaced an
    /// image.
    pub(super) fn restore_outcome(&self, job: u64) -> Option<Result<CheckpointRestore, String>> {
        if self.requested_by == Some(job) {
            return self.messages_for(Audience::current())?.restore.clone();
        }
        let replaced = || {
            let text = "The image was replaced again after this restore. To return to the checkpoint, restore the \
                checkpoint again.";
            Err(text.to_owned())
        };
        self.has_replaced_image(job).then(replaced)
    }

    /// Returns true once a call has requested another image, which handles all later lines that this image does not.
    pub(super) fn is_being_replaced(&self) -> bool {
        self.event_loop.is_being_replaced()
    }

    /// Returns true once calls of other clients, but no call of this client, have requested another image. Until that image
    /// exists, this image answers the client's calls that only read. Returns false if the image is replaced because an
    /// evaluation is stuck: the error state lacks the end of that evaluation.
    pub(super) fn is_replaced_for_others(&self) -> bool {
        let requesters = self.requesters.lock();
        !requesters.is_empty() && !requesters.contains(&self.connection)
    }

    /// Asks the supervisor to restore a checkpoint, for the call whose jobs begin at `job`. The new image gets the notices
    /// that `session` has not seen yet.
    pub(super) fn request_restore(&self, job: u64, checkpoint: Checkpoint, session: &Session) {
        self.request_image(session, || (), move |notices| WorkerEvent::restore_requested(job, checkpoint, notices));
    }

    /// Abandons the replay and asks the supervisor for a reset, for the call whose jobs begin at `job`. The new image
    /// gets the notices that `session` has not seen yet.
    pub(super) fn request_reset(&self, job: u64, session: &Session) {
        let (context, own) = (self.clone(), session.clone());
        let abandon_replay = move || context.abandon_replay(&own);
        self.request_image(session, abandon_replay, move |notices| WorkerEvent::reset_requested(job, notices));
    }

    /// Calls `prepare`, and cancels and answers all requests except inspections, which continue. Then requests another image
    /// once interrupted evaluations have unwound, or after [`UNWINDING_GRACE_PERIOD`]. `request` creates the event from the
    /// notices that `session` has not seen yet. Unless the session and the helper threads are idle, another thread does all
    /// this: thousands of answers, or answers that are still being rendered, would delay other clients, and an unwinding
    /// evaluation may need this thread. Does nothing if another call has already requested an image: that image handles this
    /// call.
    fn request_image(
        &self,
        session: &Session,
        prepare: impl FnOnce() + Clone + Send + 'static,
        request: impl FnOnce(&[String]) -> WorkerEvent + Clone + Send + 'static,
    ) {
        self.requesters.lock().insert(self.connection);
        if !self.event_loop.begin_replacement() {
            return;
        }
        let is_idle = !self.is_restoring() && !session.has_work() && helper_threads::is_idle();
        let (reporter, event_loop, session) = (self.reporter.clone(), self.event_loop.clone(), session.clone());
        let send_request = move || {
            prepare();
            session.cancel_and_answer_all(|| event_loop.drain_excess(UNWINDING_GRACE_PERIOD));
            let deadline = Instant::now() + UNWINDING_GRACE_PERIOD;
            session.wait_until_unwound(deadline);
            // The helper threads render the answers of the cancelled evaluations.
            helper_threads::wait_until_idle(deadline);
            session.cancel_and_answer_inspections();
            reporter.report(&request(&session.take_notices()));
        };
        let leave = std::thread::Builder::new().name("sbcl-mcp-leave".to_owned());
        if is_idle || leave.spawn(send_request.clone()).is_err() {
            send_request();
        }
    }
}

/// Restores the session's limits, errors and counters from `state`, and begins to replay the definitions. From now on,
/// the session's events are forwarded to the supervisor.
pub(super) fn resume(
    session: &Session,
    state: RecoveryState,
    output: Arc<Output>,
    event_loop: Arc<EventLoop>,
    status: StatusPage,
) -> RecoveryContext {
    if let Some(limits) = state.limits {
        session.set_limits(limits);
    }
    session.number_evaluations_after(state.evaluations);
    session.number_errors_after(state.errors);
    session.set_lost_evaluations(state.crash.as_ref().map_or(&[], |crash| &crash.background));
    if let Some(client) = state.clients.get(&0) {
        session.set_errors(client.errors.clone());
    }
    let forms = state.definitions().count();
    let reporter = Reporter::new(output);
    let errors = state.clients.iter().map(|(number, client)| (*number, client.errors.clone())).collect();
    let context = RecoveryContext {
        connection: session.connection_number(),
        reporter: reporter.clone(),
        event_loop: event_loop.clone(),
        status,
        last_earlier_job: state.begun,
        requested_by: state.replacement.as_ref().map(|replacement| replacement.job),
        replaced_for: Arc::new(state.replaced_for.clone()),
        last_job_before_replacement: state.begun_before_replacement,
        fatal_inspection: state.inspected.filter(|(_, losses)| *losses > 1).map(|(call, _)| call),
        replay: Arc::new(DefinitionReplay::new(forms)),
        requesters: Arc::default(),
        crashed: state.crash.is_some(),
        autosave_trigger: Arc::default(),
        // If definitions must be replayed, no checkpoint contains all of them yet.
        saves: SaveReporter::new(reporter.clone(), status, (forms == 0).then_some(state.evaluations)),
        unrestored: Arc::new(Mutex::new(state.unrestored.clone())),
        errors: Arc::new(errors),
        messages: Arc::default(),
        cancelled_connection: state
            .crash
            .as_ref()
            .filter(|crash| crash.follows_cancellation())
            .map(|crash| crash.connection),
        lost: Arc::default(),
        loss_reported: Arc::default(),
    };
    let last_error = |client: &ClientState| client.errors.last.as_ref().map(|error| error.id);
    session.set_observer(Arc::new(EventForwarder {
        reporter: reporter.clone(),
        status,
        event_loop,
        replay: context.replay.clone(),
        autosave_trigger: context.autosave_trigger.clone(),
        unrestored: context.unrestored.clone(),
        last_errors: Mutex::new(state.clients.iter().map(|(number, client)| (*number, last_error(client))).collect()),
        form_started_at: Mutex::new(Instant::now()),
    }));
    reporter.report(&WorkerEvent::Ready);
    if forms == 0 {
        context.replay(session, &state);
        return context;
    }
    // The replay runs on a separate thread, so that calls that need no Lisp are answered meanwhile.
    let (replayed, session) = (context.clone(), session.clone());
    let run = move || replayed.replay(&session, &state);
    if let Err(error) = std::thread::Builder::new().name("sbcl-mcp-restore".to_owned()).spawn(run) {
        tracing::error!("the thread that restores the session cannot be started: {error}");
        crate::exit_now(1);
    }
    context
}

impl RecoveryContext {
    /// Replays the definitions, then continues the waiting calls. From a client's first slow call on, the client's calls
    /// continue on a thread of their own: a slow call may search directories or read checkpoints before it waits for Lisp.
    fn replay(&self, session: &Session, state: &RecoveryState) {
        // The notices of the boot are taken first and added again later, so that `discard_pending_messages` discards only
        // the messages of the replay.
        let notices = session.take_notices();
        let Some(report) = self.replay.evaluate(session, state.definitions(), self.status) else { return };
        session.discard_pending_messages();
        notices.into_iter().for_each(|notice| session.add_notice(notice));
        self.unrestored.lock().append(state.missing_forms(&report.failed));
        let messages = Audience::ALL.map(|audience| audience.address(|| replacement_messages(state, &report)));
        let _ = self.messages.set(messages);
        self.reporter.report(&WorkerEvent::replayed(&report.failed));
        // The field is cleared after the report: until then, the supervisor blames a crash on the form replayed last.
        self.status.set(StatusField::ReplayedForm, 0);
        self.replay.end(|connection| {
            self.count_pending_answer(true);
            let context = self.clone();
            let continue_calls = move || {
                context.replay.continue_slow_calls(connection);
                context.count_pending_answer(false);
                context.event_loop.wake();
            };
            if std::thread::Builder::new().name("sbcl-mcp-waited".to_owned()).spawn(continue_calls.clone()).is_err() {
                continue_calls();
            }
        });
        self.event_loop.wake();
    }
}
