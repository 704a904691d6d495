//! The worker's reports to the supervisor: events, and the numbers on the status page.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::checkpoint::autosave::AutosaveTrigger;
use super::definitions::{Definition, bounded_copy};
use super::event::{MAX_ERROR_BYTES, SessionEvent, WorkerEvent};
use super::replay::DefinitionReplay;
use super::status_page::{StatusField, StatusPage, deadline};
use super::unrestored::UnrestoredForms;
use crate::image::interruption::StuckReason;
use crate::outcome::{Changes, DefiningForm, ErrorRecord, Outcome};
use crate::rpc::event_loop::EventLoop;
use crate::rpc::output::Output;
use crate::session::observer::Observer;
use crate::{Limits, report};

/// The longest time for which a thread waits while another thread sends queued reports. A garbage collection may stop the
/// other thread.
const MAX_SENDING_WAIT: Duration = Duration::from_millis(100);

/// The worker's end of the event channel to the supervisor. Without a supervisor, events are dropped.
#[derive(Debug, Clone)]
pub(crate) struct Reporter {
    output: Arc<Output>,
    queue: Arc<ErrorQueue>,
}

/// The queue of reports about errors. A large error takes time to encode, and whoever reports it may hold a lock for which
/// other clients wait.
#[derive(Debug, Default)]
struct ErrorQueue {
    reports: Mutex<VecDeque<ErrorReport>>,
    /// The lock of the thread that sends the reports, so that they keep their order.
    sending: Mutex<()>,
}

/// A report that the errors of a client have changed.
#[derive(Debug)]
struct ErrorReport {
    /// The number of the client's connection.
    client: u64,
    /// The new error in the history.
    added: Option<Arc<ErrorRecord>>,
    /// The number of the last error.
    last: Option<u64>,
}

impl Reporter {
    /// Creates a reporter that sends events through the worker's output.
    pub(crate) fn new(output: Arc<Output>) -> Self {
        Self { output, queue: Arc::default() }
    }

    /// Queues a report. Other changes of the session may overtake the report, since they do not concern errors.
    fn queue_errors(&self, report: ErrorReport) {
        self.queue.reports.lock().push_back(report);
    }

    /// Sends the queued reports. If another thread sends reports and takes longer than [`MAX_SENDING_WAIT`], leaves the
    /// reports in the queue, from which they are sent by that thread or with the next reports.
    fn send_queued(&self) {
        // A thread may add a report, and give up waiting, just before this thread releases the lock.
        while !self.queue.reports.lock().is_empty() {
            let Some(_sending) = self.queue.sending.try_lock_for(MAX_SENDING_WAIT) else { return };
            loop {
                // The queue's lock is not held while a report is encoded.
                let next = self.queue.reports.lock().pop_front();
                let Some(ErrorReport { client, added, last }) = next else { break };
                let added = added.map(|error| error.truncated(MAX_ERROR_BYTES));
                self.report_change(SessionEvent::Errors { client, added, last });
            }
        }
    }

    /// Sends an event. An event that is too large is logged instead of sent.
    pub(crate) fn report(&self, event: &WorkerEvent) {
        if !matches!(event, WorkerEvent::Changed(_)) {
            // The supervisor may replace the worker after this event, so finished answers and the errors that belong to them
            // must be sent before the event.
            self.send_queued();
            self.output.queue_large_answers();
        }
        match event.encode() {
            Ok(bytes) => self.output.send_event(&bytes),
            Err(error) => {
                let begin: String = format!("{event:?}").chars().take(100).collect();
                tracing::error!(
                    "a report cannot be sent to the supervisor: {error}. If the Lisp process dies, the new process may \
                     lack a recent change, such as a definition. The report begins: {begin}"
                );
            }
        }
    }

    /// Sends a session event.
    pub(crate) fn report_change(&self, event: SessionEvent) {
        self.report(&WorkerEvent::Changed(event));
    }
}

/// The observer that forwards session events to the supervisor.
#[derive(Debug)]
pub(crate) struct EventForwarder {
    pub(crate) reporter: Reporter,
    pub(crate) status: StatusPage,
    pub(crate) event_loop: Arc<EventLoop>,
    pub(crate) replay: Arc<DefinitionReplay>,
    pub(crate) autosave_trigger: Arc<AutosaveTrigger>,
    /// The forms that could not be restored and have not been defined again.
    pub(crate) unrestored: Arc<Mutex<UnrestoredForms>>,
    /// By connection: the number of the client's last error as reported to the supervisor; `None` if the last evaluation
    /// succeeded.
    pub(crate) last_errors: Mutex<HashMap<u64, Option<u64>>>,
    /// The time when the running job began or, once one of its forms has defined something, when the last such form ended.
    pub(crate) form_started_at: Mutex<Instant>,
}

impl Observer for EventForwarder {
    fn is_replaying(&self) -> bool {
        self.replay.is_evaluating()
    }

    fn wait_for_recipient(&self) {
        self.reporter.output.wait_for_supervisor();
    }

    fn call_begun(&self, job: u64) {
        if !self.is_replaying() {
            self.status.record_begun(job);
        }
    }

    fn job_begun(
        &self,
        job: u64,
        requested_by: Option<u64>,
        is_query: bool,
        connection: u64,
        timeout: Option<Duration>,
    ) {
        if self.is_replaying() {
            return;
        }
        *self.form_started_at.lock() = Instant::now();
        self.status.set_step(None);
        self.status.set(StatusField::Deadline, timeout.map_or(0, deadline));
        self.status.set(StatusField::Client, connection);
        self.status.set(StatusField::RequestedBy, requested_by.filter(|_| !is_query).unwrap_or(0));
        self.status.set(StatusField::Begun, job);
    }

    fn deadline_changed(&self, more: Option<Duration>) {
        self.status.set(StatusField::Deadline, more.map_or(0, deadline));
    }

    fn step_changed(&self, step: Option<&str>) {
        self.status.set_step(step);
    }

    fn external_wait_changed(&self, yes: bool) {
        self.status.adjust(StatusField::PendingAnswers, yes);
    }

    fn job_ended(&self, job: u64) {
        if self.is_replaying() {
            return;
        }
        // A job that was cancelled while it was queued never began.
        if self.status.get(StatusField::Begun) == job {
            self.status.set(StatusField::Ended, job);
        }
        self.autosave_trigger.record_evaluation_end();
    }

    fn background_changed(&self, evaluations: &mut dyn Iterator<Item = u64>) {
        self.status.set_background(evaluations);
    }

    fn inspection_begun(&self, job: u64, more: Duration) {
        self.inspection_deadline_changed(more);
        self.status.set(StatusField::Inspecting, job);
    }

    fn inspection_deadline_changed(&self, more: Duration) {
        self.status.raise(StatusField::InspectionDeadline, deadline(more));
    }

    fn inspection_ended(&self, left: Option<(u64, Duration)>) {
        self.status.set(StatusField::InspectionDeadline, left.map_or(0, |(_, more)| deadline(more)));
        self.status.set(StatusField::Inspecting, left.map_or(0, |(job, _)| job));
    }

    fn errors_changed(&self, connection: u64, added: Option<&Arc<ErrorRecord>>, last: Option<&Arc<ErrorRecord>>) {
        let last = last.map(|error| error.id);
        let mut last_errors = self.last_errors.lock();
        let known = last_errors.entry(connection).or_default();
        if added.is_some() || *known != last {
            *known = last;
            self.reporter.queue_errors(ErrorReport { client: connection, added: added.cloned(), last });
        }
    }

    fn send_queued_reports(&self) {
        self.reporter.send_queued();
    }

    fn connection_ended(&self, connection: u64) {
        self.last_errors.lock().remove(&connection);
    }

    fn form_defined(&self, form: &DefiningForm, changes: &Changes, local: bool, attached: bool, evaluation: u64) {
        if self.is_replaying() {
            return;
        }
        let now = Instant::now();
        let took = now - std::mem::replace(&mut *self.form_started_at.lock(), now);
        let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        self.unrestored.lock().record(form, changes);
        let ((form, too_long), changes) = (bounded_copy(form), changes.clone());
        let definition = Definition { form, changes, local, attached, evaluation, took, too_long };
        self.reporter.report_change(SessionEvent::Defined(definition));
    }

    fn evaluation_detached(&self, evaluation: u64) {
        self.reporter.report_change(SessionEvent::Detached { evaluation });
    }

    fn evaluation_numbered(&self, evaluation: u64) {
        self.status.raise(StatusField::NewestEvaluation, evaluation);
    }

    fn error_numbered(&self, error: u64) {
        self.status.raise(StatusField::NewestError, error);
    }

    fn limits_changed(&self, limits: &Limits) {
        self.reporter.report_change(SessionEvent::Limits(*limits));
    }

    fn stuck(&self, outcome: Option<Outcome>, why: StuckReason) {
        // The supervisor may send the outcome as an answer, so the outcome is cut to the highest limit that a client can
        // set.
        let most = usize::try_from(*Limits::MAX_ANSWER_RANGE.end()).unwrap_or(usize::MAX);
        let outcome = outcome.map(|outcome| report::fitted(&Outcome { kept: false, ..outcome }, most));
        self.reporter.report(&WorkerEvent::Stuck { outcome: outcome.map(Box::new), why });
        self.event_loop.begin_replacement();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};

    use super::*;
    use crate::outcome::Clipped;
    use crate::rpc::frame;
    use crate::rpc::output::Recipient;
    use crate::rpc::waker::Waker;

    fn error(id: u64) -> Arc<ErrorRecord> {
        Arc::new(ErrorRecord {
            id,
            kind: "SIMPLE-ERROR".to_owned(),
            message: Clipped::from("x"),
            time: jiff::Timestamp::UNIX_EPOCH,
            form: None,
            slots: Vec::new(),
            restarts: Vec::new(),
            frames: Vec::new(),
            total_frames: 0,
            slots_omitted: 0,
            evaluation: 1,
        })
    }

    #[test]
    fn errors_are_sent_later_in_order_and_before_an_event_after_which_the_worker_is_replaced() {
        let (reader, reporter) = reporter();
        reporter.queue_errors(ErrorReport { client: 0, added: Some(error(1)), last: Some(1) });
        reporter.queue_errors(ErrorReport { client: 3, added: Some(error(2)), last: Some(2) });
        assert_eq!(rustix::io::ioctl_fionread(&reader).unwrap(), 0);
        reporter.report(&WorkerEvent::reset_requested(7, &[]));
        reporter.queue_errors(ErrorReport { client: 0, added: None, last: None });
        reporter.send_queued();
        let expected = ["0: Some(1), Some(1)", "3: Some(2), Some(2)", "reset by 7", "0: None, None"];
        assert_eq!(sent_events(reader, reporter), expected);
    }

    #[test]
    fn an_event_does_not_wait_for_a_thread_that_stopped_while_it_sent_errors() {
        let (reader, reporter) = reporter();
        reporter.queue_errors(ErrorReport { client: 0, added: Some(error(1)), last: Some(1) });
        let sending = reporter.queue.sending.lock();
        reporter.report(&WorkerEvent::reset_requested(7, &[]));
        drop(sending);
        reporter.send_queued();
        assert_eq!(sent_events(reader, reporter), ["reset by 7", "0: Some(1), Some(1)"]);
    }

    /// Creates a reporter, and the reading end of the pipe to which it writes.
    fn reporter() -> (PipeReader, Reporter) {
        let (reader, writer) = std::io::pipe().unwrap();
        let output = Output::new(writer.into(), Recipient::Supervisor, Arc::new(Waker::new().unwrap())).unwrap();
        (reader, Reporter::new(Arc::new(output)))
    }

    /// Drops the reporter, and describes the events that it has sent.
    fn sent_events(mut reader: PipeReader, reporter: Reporter) -> Vec<String> {
        drop(reporter);
        let (mut bytes, mut sent) = (Vec::new(), Vec::new());
        reader.read_to_end(&mut bytes).unwrap();
        let mut rest = &bytes[..];
        while let Some(((_, _, payload), length)) = frame::parse(rest).unwrap() {
            sent.push(match WorkerEvent::decode(payload).unwrap() {
                WorkerEvent::Changed(SessionEvent::Errors { client, added, last }) => {
                    format!("{client}: {:?}, {last:?}", added.map(|error| error.id))
                }
                WorkerEvent::ResetRequested { job, .. } => format!("reset by {job}"),
                event => panic!("{event:?}"),
            });
            rest = &rest[length..];
        }
        sent
    }
}
