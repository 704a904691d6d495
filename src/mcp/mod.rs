//! The MCP server: the session's tools over a client's stdin and stdout, or over any stream ([`spawn`]).

pub(crate) mod beside;
mod conversation;
mod embedded;
mod incoming;
mod peer;
mod recovery_context;
mod reply;
mod server;
pub(crate) mod stdio;
mod tools;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::ErrorData;
use rustix::process::Pid;

use crate::Session;
use crate::recovery::checkpoint::autosave::save_now_and_then;
use crate::recovery::checkpoint::save::{Saver, Saves};
use crate::recovery::checkpoint::store::Checkpoints;
use crate::recovery::event::WorkerEvent;
use crate::recovery::reporter::Reporter;
use crate::recovery::state::RecoveryState;
use crate::recovery::status_page::StatusPage;
use crate::rpc::attach::Listener;
use crate::rpc::driver::Driver;
use crate::rpc::framing::MAX_LINE;
use crate::rpc::inflight::Inflight;
use crate::rpc::output::{self, Output};
use crate::rpc::waker::Waker;
pub(crate) use conversation::revisions;
use conversation::{Conversation, first_request};
pub use embedded::{Served, Stream, set_tools, spawn};
pub(crate) use peer::{FOR_PERSON, ONE_FORM, PACKAGE};
use server::{Server, SingleClient};
use stdio::Stdio;
use tools::ToolContext;
pub(crate) use tools::{MAX_SUSPECTS, Registry, TEST_TIMEOUT_RANGE, ToolSet, parted};

/// How long the client may take to read the last answers.
const FAREWELL: Duration = Duration::from_millis(150);
/// How long a client may take to say its first word when all that waits for it is bad news.
const BAD_NEWS: Duration = Duration::from_secs(2);
/// How long a supervisor may take to say where the last worker stopped.
const HANDOVER: Duration = Duration::from_secs(30);

/// What whoever still waits is told at the end.
const SHUTTING_DOWN: &str = "the server is shutting down; this was not finished";

/// The two ends of a connection.
struct Connection {
    driver: Arc<Driver>,
    inflight: Arc<Inflight>,
}

impl Connection {
    fn open(stdio: Stdio, reader: output::Reader) -> io::Result<Self> {
        let waker = Arc::new(Waker::new()?);
        let output = Arc::new(Output::new(stdio.output, reader, waker.clone())?.recorded(stdio.recorder.clone()));
        let driver = Driver::new(stdio.input, output.clone(), waker)?.recorded(stdio.recorder);
        Ok(Self { driver: Arc::new(driver), inflight: Inflight::new(output) })
    }

    /// The recovery state, which the supervisor sends first.
    fn recovery_state(&self) -> io::Result<RecoveryState> {
        self.driver
            .first_line(usize::MAX, HANDOVER, |line| Some(serde_json::from_slice(line)))?
            .map_err(io::Error::from)
    }

    /// Tells the supervisor that this worker ends.
    fn leave(&self, status: i32) {
        Reporter::new(self.inflight.output.clone()).report(&WorkerEvent::leaving(status, None));
        self.driver.drain(FAREWELL);
    }

    /// Gives the last answer to whatever still waits.
    fn end_for(&self, reason: &'static str) {
        self.inflight.abandon(reason);
        self.driver.drain(FAREWELL);
    }
}

/// How tools are offered.
#[derive(Debug, Clone)]
pub(crate) struct Offer {
    /// Results have structured content, too.
    pub(crate) structured: bool,
    /// The tools.
    pub(crate) registry: Registry,
    /// Others can join, as by commands in a shell.
    pub(crate) joinable: bool,
}

/// Serves a supervisor's client until the supervisor closes its end: goes on where another worker stopped.
///
/// Returns the exit status, and the number of the process that saves the session at the end, if there is one.
pub(crate) fn serve(
    stdio: Stdio,
    session: &Session,
    checkpoints: Checkpoints,
    saves: Saves,
    status: StatusPage,
    offer: Offer,
) -> io::Result<(i32, Option<Pid>)> {
    // What became of the image before is worded before there are tools.
    offer.registry.name_listed_tools();
    let connection = Connection::open(stdio, output::Reader::Supervisor)?;
    let state = connection.recovery_state()?;
    let (handshakes, next_line) = (server::handshakes(&state), state.next_line);
    let output = connection.inflight.output.clone();
    let recovery = recovery_context::resume(session, state, output, connection.driver.clone(), status);
    let reports = Some(recovery.saves.clone());
    let saver = Saver { session: session.clone(), checkpoints: checkpoints.clone(), reports };
    if let Some(space) = saves.automatic {
        let (saver, activity) = (saver.clone(), recovery.activity.clone());
        recovery.once_restored(move || save_now_and_then(saver, activity, space));
    }
    let inflight = connection.inflight.clone();
    let tools = ToolContext::new(session.clone(), inflight, Some(recovery.clone()), Some(checkpoints), offer);
    let server = Arc::new(Server::new(tools, handshakes, status, next_line));
    let status = connection.driver.run(&*server);
    let is_heard = !server.is_orphaned();
    if is_heard {
        server.abandon(SHUTTING_DOWN);
        connection.inflight.abandon(SHUTTING_DOWN);
    }
    let deadline = connection.driver.unwinding_deadline();
    if recovery.is_restoring() {
        // The form that is being restored has not failed: it stays where it was, and so do those after it.
        recovery.restoring.give_up(|| ());
        session.abandon();
        session.await_unwound(deadline);
    } else {
        session.unwind_all(deadline);
    }
    if is_heard {
        connection.leave(status);
    }
    let at_end = saves.at_end.filter(|_| !recovery.is_restoring());
    let saved = at_end.map_or(Ok(None), |at_end| saver.save_at_end(at_end)).unwrap_or_else(|reason| {
        tracing::error!("the session was not saved: {reason}");
        None
    });
    if let Some(saver) = saved {
        recovery.leaves(saver);
        connection.driver.drain(FAREWELL);
    }
    Ok((status, saved))
}

/// The exit status of a process in which nothing can go on beside an evaluation that cannot be interrupted.
pub(crate) const STANDSTILL: i32 = 88;

/// Serves the client of stdin and stdout from the process that holds Lisp, until that client closes its end or a signal comes.
/// `clear_up` is called when Lisp stands still, before the process ends with the status [`STANDSTILL`].
///
/// Returns the exit status: 0 at the end of input, 128 + the signal's number for SIGTERM, SIGINT and SIGHUP.
pub(crate) fn serve_plain(
    stdio: Stdio,
    session: &Session,
    checkpoints: Checkpoints,
    listener: Option<Listener>,
    offer: Offer,
    clear_up: impl Fn() + Send + Sync + 'static,
) -> io::Result<i32> {
    let connection = Arc::new(Connection::open(stdio, output::Reader::Client)?);
    let tools = ToolContext::new(session.clone(), connection.inflight.clone(), None, Some(checkpoints), offer);
    let main = Conversation::new(tools);
    let listener = listener.map(Arc::new);
    let guests = embedded::Guests::default();
    // Whoever ends the process has this lock: a client that leaves as soon as it is answered does not change the exit status.
    let ending = Arc::new(Mutex::new(()));
    session.abandon_stuck({
        let (connection, listener, guests) = (connection.clone(), listener.clone(), guests.clone());
        let ending = ending.clone();
        move |reason| {
            let _ending = ending.lock();
            tracing::error!("{reason} The server ends.");
            // The process ends.
            let reason: &'static str = Box::leak(format!("the server ends: {reason}").into_boxed_str());
            guests.abandon(reason);
            connection.end_for(reason);
            listener.iter().for_each(|listener| listener.remove());
            clear_up();
            crate::exit_now(STANDSTILL);
        }
    });
    if let Some(listener) = listener.clone() {
        guests.clone().accept(listener, main.clone())?;
    }
    let status = connection.driver.run(&SingleClient::of_process(main));
    let _ending = ending.lock();
    guests.abandon(SHUTTING_DOWN);
    connection.inflight.abandon(SHUTTING_DOWN);
    session.unwind_all(connection.driver.unwinding_deadline());
    connection.driver.drain(FAREWELL);
    listener.iter().for_each(|listener| listener.remove());
    Ok(status)
}

/// Tells the client, when it asks for the first time, why there is no server.
pub(crate) fn refuse(stdio: Stdio, reason: &str) -> io::Result<()> {
    let connection = Connection::open(stdio, output::Reader::Client)?;
    if let Ok(id) = connection.driver.first_line(MAX_LINE, BAD_NEWS, first_request) {
        let error = ErrorData::internal_error(reason.to_owned(), None);
        connection.inflight.refuse(Some(id.into_json_value()), error, 1, None);
    }
    connection.end_for(SHUTTING_DOWN);
    Ok(())
}
