//! The MCP server: the session's tools over a client's stdin and stdout, or over any stream ([`spawn`]).

mod client;
mod conversation;
mod embedded;
pub(crate) mod fresh_image;
mod incoming;
mod recovery_context;
mod reply;
mod server;
mod slow_lines;
pub(crate) mod stdio;
mod tools;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rmcp::model::ErrorData;

use crate::Session;
use crate::recovery::checkpoint::autosave::start_autosave;
use crate::recovery::checkpoint::save::{SavePolicy, Saver};
use crate::recovery::checkpoint::store::Checkpoints;
use crate::recovery::event::WorkerEvent;
use crate::recovery::reporter::Reporter;
use crate::recovery::state::RecoveryState;
use crate::recovery::status_page::StatusPage;
use crate::rpc::attach::Listener;
use crate::rpc::event_loop::{EventLoop, Service as _};
use crate::rpc::framing::MAX_LINE;
use crate::rpc::inflight::Inflight;
use crate::rpc::output::{self, Output};
use crate::rpc::waker::Waker;
pub(crate) use client::{FOR_PERSON_KEY, ONE_FORM_KEY, PACKAGE_KEY};
pub(crate) use conversation::revisions;
use conversation::{Conversation, first_request_id};
pub use embedded::{Served, Stream, set_tools, spawn};
use server::{Server, SingleClient};
use stdio::Stdio;
use tools::ToolContext;
pub(crate) use tools::{MAX_SUSPECTS, Registry, TEST_TIMEOUT_RANGE, ToolSet, split_names};

/// Minimum time for the client to read the last answers, or for the supervisor to read the worker's last frames.
const MIN_DRAIN_TIME: Duration = Duration::from_millis(150);
/// Maximum time for the supervisor to read the worker's last frames. The supervisor reads the frames at once unless the
/// system does not run the supervisor. A long time does no harm: the supervisor kills a worker that it does not wait
/// for.
const SUPERVISOR_DRAIN_TIME: Duration = Duration::from_secs(5);
/// Maximum time to wait for the first request of a client if the server cannot start. The answer gives the reason.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time to wait for the recovery state from the supervisor.
const RECOVERY_STATE_TIMEOUT: Duration = Duration::from_secs(30);

/// Poll interval while slow lines are still being handled at shutdown.
const SLOW_LINE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The error for requests that are pending at shutdown.
const SHUTTING_DOWN: &str = "the server is shutting down; the request was not finished";

/// The event loop and the pending requests of a connection on stdin and stdout.
struct Connection {
    event_loop: Arc<EventLoop>,
    inflight: Arc<Inflight>,
}

impl Connection {
    fn open(stdio: Stdio, recipient: output::Recipient) -> io::Result<Self> {
        let waker = Arc::new(Waker::new()?);
        let output =
            Arc::new(Output::new(stdio.output, recipient, waker.clone())?.with_recorder(stdio.recorder.clone()));
        let event_loop = EventLoop::new(stdio.input, output.clone(), waker)?.with_recorder(stdio.recorder);
        Ok(Self { event_loop: Arc::new(event_loop), inflight: Inflight::new(output) })
    }

    /// Reads the recovery state, which the supervisor sends first.
    fn recovery_state(&self) -> io::Result<RecoveryState> {
        self.event_loop
            .find_line(usize::MAX, RECOVERY_STATE_TIMEOUT, |line| Some(serde_json::from_slice(line)))?
            .map_err(io::Error::from)
    }

    /// Reports to the supervisor that this worker exits.
    fn report_exit(&self, status: i32) {
        Reporter::new(self.inflight.output.clone()).report(&WorkerEvent::exiting(status, None));
        self.event_loop.drain(self.drain_time());
    }

    /// Returns the time for the recipient to read the last answers: at least the rest of the time of the shutdown.
    fn drain_time(&self) -> Duration {
        self.event_loop.unwinding_deadline().saturating_duration_since(Instant::now()).max(MIN_DRAIN_TIME)
    }

    /// Answers all pending requests with an error and flushes the output.
    fn fail_all_and_drain(&self, reason: &'static str) {
        self.inflight.fail_all(reason);
        self.event_loop.drain(MIN_DRAIN_TIME);
    }
}

/// Options of the tools that a server offers.
#[derive(Debug, Clone)]
pub(crate) struct ToolOptions {
    /// True if results have structured content.
    pub(crate) structured: bool,
    /// The offered tools.
    pub(crate) registry: Registry,
    /// True if other programs, such as commands in a shell, can attach to the image.
    pub(crate) attachable: bool,
}

/// Serves a supervisor's clients until the supervisor closes the connection. First reads the recovery state from the
/// supervisor, and continues the previous worker's session from this state.
///
/// Returns the exit status. Once a process saves the session at the end, its id is on the status page.
pub(crate) fn serve(
    stdio: Stdio,
    session: &Session,
    checkpoints: Checkpoints,
    saves: SavePolicy,
    status: StatusPage,
    options: ToolOptions,
) -> io::Result<i32> {
    // The messages about the last image name only offered tools, and are worded before the tool context exists.
    options.registry.publish_tool_names();
    let connection = Connection::open(stdio, output::Recipient::Supervisor)?;
    let state = connection.recovery_state()?;
    let (clients, next_line) = (state.clients.clone(), state.next_line);
    let output = connection.inflight.output.clone();
    let recovery = recovery_context::resume(session, state, output, connection.event_loop.clone(), status);
    let reports = Some(recovery.saves.clone());
    let saver = Saver { session: session.clone(), checkpoints: checkpoints.clone(), reports };
    if let Some(space) = saves.automatic_space {
        let (saver, autosave_trigger) = (saver.clone(), recovery.autosave_trigger.clone());
        // No call waits yet, so this runs before any call submits an evaluation.
        recovery.after_restore(move || start_autosave(saver, autosave_trigger, space));
    }
    let inflight = connection.inflight.clone();
    let tools = ToolContext::new(session.clone(), inflight, Some(recovery.clone()), Some(checkpoints), options);
    let server = Arc::new(Server::new(tools, &clients, status, next_line));
    let status = connection.event_loop.run(&*server);
    let has_supervisor = !server.is_orphaned();
    // A save would undo the reset or restore that this process has requested.
    let may_save = has_supervisor || !recovery.is_being_replaced();
    if has_supervisor {
        server.fail_all(SHUTTING_DOWN);
        connection.inflight.fail_all(SHUTTING_DOWN);
        // Lisp threads that wait until the supervisor has read enough must unwind their held evaluations.
        connection.event_loop.drain_excess(SUPERVISOR_DRAIN_TIME);
    }
    let deadline = connection.event_loop.unwinding_deadline();
    if recovery.is_restoring() {
        // The replay is abandoned rather than failed, so the form being replayed and all later forms stay in the recovery
        // state.
        recovery.replay.abandon(|| ());
        session.cancel_and_answer_all(|| ());
        session.wait_until_unwound(deadline);
    } else {
        session.unwind_all(deadline);
    }
    if has_supervisor {
        connection.report_exit(status);
    }
    let at_end = saves.at_end.filter(|_| may_save && !recovery.is_restoring());
    let saved = at_end.map_or(Ok(None), |at_end| saver.save_at_end(at_end)).unwrap_or_else(|reason| {
        tracing::error!("the session was not saved: {reason}");
        None
    });
    if let Some(saver) = saved {
        recovery.report_saver(saver);
    }
    if has_supervisor {
        connection.event_loop.drain(SUPERVISOR_DRAIN_TIME);
    }
    Ok(status)
}

/// Answers the pending requests of all clients with an error, and refuses their further requests with the same error.
fn fail_all(clients: &[Arc<Conversation>], reason: &'static str) {
    clients.iter().for_each(|client| client.inflight().fail_all(reason));
}

/// After [`fail_all`], answers the requests in waiting lines, and writes the answers to all clients, until `end`.
fn finish_answers(clients: &[Arc<Conversation>], end: Instant) {
    let outputs: Vec<_> = clients.iter().map(|client| client.inflight().output.clone()).collect();
    loop {
        // All clients have their turn, even if a slow line of the first client is still being handled.
        let busy = clients.iter().filter(|client| !client.refuse_waiting(end)).count();
        if busy == 0 || Instant::now() >= end {
            return output::drain(&outputs, end);
        }
        // A slow batch is answered when the thread that handles it has refused its last request.
        output::drain(&outputs, Instant::now() + SLOW_LINE_POLL_INTERVAL);
        std::thread::sleep(SLOW_LINE_POLL_INTERVAL);
    }
}

/// Exit status of a process that cannot continue because an evaluation cannot be interrupted.
pub(crate) const EXIT_STUCK: i32 = 88;

/// Serves the client on stdin and stdout from the process that holds Lisp, until the client closes its end or a signal
/// arrives. If an evaluation cannot be interrupted, calls `clean_up` and exits with [`EXIT_STUCK`].
///
/// Returns the exit status: 0 if the client has closed the connection, 128 + the signal's number for SIGTERM, SIGINT and
/// SIGHUP.
pub(crate) fn serve_unsupervised(
    stdio: Stdio,
    session: &Session,
    checkpoints: Checkpoints,
    listener: Option<Listener>,
    options: ToolOptions,
    clean_up: impl Fn() + Send + Sync + 'static,
) -> io::Result<i32> {
    let connection = Connection::open(stdio, output::Recipient::Client)?;
    let tools = ToolContext::new(session.clone(), connection.inflight.clone(), None, Some(checkpoints), options);
    let main = Conversation::new(tools);
    let listener = listener.map(Arc::new);
    let attached = embedded::AttachedClients::default();
    // The thread that ends the process holds this lock, and so does this thread during the shutdown. Otherwise a client
    // that disconnects as soon as it is answered could change the exit status.
    let ending = Arc::new(Mutex::new(()));
    session.enable_job_abandonment({
        let (main, listener, attached) = (main.clone(), listener.clone(), attached.clone());
        let ending = ending.clone();
        move |reason| {
            let _ending = ending.lock();
            tracing::error!("{reason} The server stops. Without --no-supervisor, the server would replace the image.");
            // The leak does not matter, since the process exits.
            let reason =
                format!("the server stops: {reason} Without --no-supervisor, a server replaces its image instead.");
            let reason: &'static str = Box::leak(reason.into_boxed_str());
            listener.iter().for_each(|listener| listener.remove());
            let clients = [attached.conversations(), vec![main.clone()]].concat();
            fail_all(&clients, reason);
            finish_answers(&clients, Instant::now() + MIN_DRAIN_TIME);
            clean_up();
            crate::exit_now(EXIT_STUCK);
        }
    });
    if let Some(listener) = listener.clone() {
        attached.clone().accept(listener, main.clone())?;
    }
    let service = SingleClient::for_stdio(main.clone());
    let status = connection.event_loop.run(&service);
    let _ending = ending.lock();
    listener.iter().for_each(|listener| listener.remove());
    let all_clients = || [attached.conversations(), vec![main.clone()]].concat();
    fail_all(&all_clients(), SHUTTING_DOWN);
    session.unwind_all(connection.event_loop.unwinding_deadline());
    // A client that was connected already may have been accepted meanwhile.
    let clients = all_clients();
    fail_all(&clients, SHUTTING_DOWN);
    let (now, time) = (Instant::now(), connection.drain_time());
    connection.event_loop.handle_unread(&service, time / 2);
    finish_answers(&clients, now + time);
    Ok(status)
}

/// Answers the client's first request with the reason why the server cannot start.
pub(crate) fn refuse(stdio: Stdio, reason: &str) -> io::Result<()> {
    let connection = Connection::open(stdio, output::Recipient::Client)?;
    if let Ok(id) = connection.event_loop.find_line(MAX_LINE, REFUSAL_TIMEOUT, first_request_id) {
        let error = ErrorData::internal_error(reason.to_owned(), None);
        connection.inflight.refuse(Some(id.into_json_value()), error, 1, None);
    }
    connection.fail_all_and_drain(SHUTTING_DOWN);
    Ok(())
}
