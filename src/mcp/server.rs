//! The services that an event loop drives. [`Server`] serves all clients of a worker's supervisor, and [`SingleClient`]
//! serves one client on a stream of its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::process::{Pid, getppid};

use super::conversation::Conversation;
use super::tools::ToolContext;
use crate::recovery::state::ClientState;
use crate::recovery::status_page::{StatusField, StatusPage};
use crate::rpc::event_loop::Service;
use crate::rpc::framing::Line;
use crate::rpc::inflight::{Inflight, LOCK_RETRY_INTERVAL};
use crate::rpc::route::{self, MarkedContent};

/// The conversations with the first client and with the clients that are attached to the supervisor.
#[derive(Debug)]
pub(super) struct Server {
    main: Arc<Conversation>,
    /// The attached clients, by connection.
    attached: Mutex<BTreeMap<u64, Arc<Conversation>>>,
    /// Incomplete long lines, with their call numbers, by connection.
    pieces: Mutex<BTreeMap<u64, (u64, Vec<u8>)>>,
    /// Number of lines received from the supervisor.
    received: AtomicU64,
    /// The call number that the next new line must have. Lines that an earlier worker received have lower numbers.
    next_line: AtomicU64,
    status: StatusPage,
    /// Process id of the supervisor.
    supervisor: Option<Pid>,
}

impl Server {
    /// Creates a server that resumes the last image's conversations with `clients`, whose keys are connection numbers. The
    /// first new line has the call number `next_line`.
    pub(super) fn new(
        tools: Arc<ToolContext>,
        clients: &BTreeMap<u64, ClientState>,
        status: StatusPage,
        next_line: u64,
    ) -> Self {
        let supervisor = getppid();
        let server = Self {
            main: Conversation::new(tools),
            attached: Mutex::default(),
            pieces: Mutex::default(),
            received: AtomicU64::new(0),
            next_line: AtomicU64::new(next_line),
            status,
            supervisor,
        };
        for (connection, client) in clients {
            server.conversation(*connection).resume(client.initialize.as_deref(), &client.server_requests);
        }
        server
    }

    /// Answers the pending requests of all attached clients with an error.
    pub(super) fn fail_all(&self, reason: &'static str) {
        for conversation in self.attached.lock().values() {
            conversation.inflight().fail_all(reason);
        }
    }

    /// Records that line `number` was received. The recorded number only rises: lines that an earlier worker received
    /// have lower numbers.
    fn record_received(&self, number: u64) {
        self.status.raise(StatusField::LastLineRead, number);
    }

    /// Records that line `number`, or an unknown line, has not reached this worker, because other code in the process
    /// has read from the supervisor's pipe. The supervisor then sends the unanswered lines to another worker.
    fn record_missed(&self, number: Option<u64>) {
        self.status.raise(StatusField::LostLine, number.unwrap_or(u64::MAX));
    }

    /// Returns true if this worker has received line `number` from its beginning. `begun` is the call number of the
    /// connection's incomplete line, if there is one. Records a line that was missed.
    fn is_intact(&self, number: u64, begun: Option<u64>) -> bool {
        if let Some(begun) = begun {
            if begun != number {
                self.record_missed(Some(begun));
            }
            return begun == number;
        }
        // New lines begin in the order of their call numbers, which are consecutive.
        let next = self.next_line.fetch_max(number + 1, Ordering::Relaxed);
        if number > next {
            self.record_missed(Some(next));
        }
        true
    }

    /// Returns the conversation with an attached client, and begins the conversation if the client is new.
    fn attached_client(&self, connection: u64) -> Arc<Conversation> {
        let mut attached = self.attached.lock();
        let begin = || {
            let tools = self.main.tools();
            let output = Arc::new(tools.inflight().output.for_connection(connection));
            let session = tools.session().connect_with_number(connection);
            self.main.for_attached(tools.for_attached(session, Inflight::new(output)))
        };
        attached.entry(connection).or_insert_with(begin).clone()
    }
}

impl Server {
    /// Handles a line from the supervisor.
    fn handle_supervisor_line(&self, text: &[u8]) {
        let Some((connection, content)) = route::parse(text) else {
            tracing::error!("a line from the supervisor is malformed; the supervisor replaces the image");
            return self.record_missed(None);
        };
        let is_last = matches!(content, MarkedContent::Line(..) | MarkedContent::End(_));
        let received = self.received.fetch_add(u64::from(is_last), Ordering::Relaxed) + 1;
        self.handle_marked(connection, content);
        // The report follows the line's immediate answers, so that the supervisor sends no faster than it reads the
        // answers.
        if is_last && received.is_multiple_of(route::LINES_PER_REPORT) {
            self.main.inflight().output.send_received(received);
        }
    }

    fn handle_marked(&self, connection: u64, content: MarkedContent<'_>) {
        let begun = self.pieces.lock().remove(&connection);
        let is_intact = match content {
            MarkedContent::Line(number, _) | MarkedContent::Piece(number, _) => {
                self.is_intact(number, begun.as_ref().map(|(number, _)| *number))
            }
            // A client may disconnect in the middle of a line, so an incomplete line does not matter here.
            MarkedContent::End(number) => self.is_intact(number, None),
            MarkedContent::Notice(_) | MarkedContent::Age(..) => true,
        };
        if !is_intact {
            return;
        }
        match (content, begun) {
            (MarkedContent::Piece(number, piece), begun) => {
                self.record_received(number);
                let (_, mut line) = begun.unwrap_or_default();
                line.extend_from_slice(piece);
                self.pieces.lock().insert(connection, (number, line));
            }
            (MarkedContent::Line(number, rest), Some((_, mut line))) => {
                line.extend_from_slice(rest);
                self.conversation(connection).handle_slow(line, number);
            }
            (MarkedContent::Line(number, line), None) => {
                self.record_received(number);
                self.conversation(connection).receive(line, number);
            }
            (MarkedContent::Age(number, age), begun) => {
                if let Some(begun) = begun {
                    self.pieces.lock().insert(connection, begun);
                }
                self.conversation(connection).inflight().set_age(number, age);
            }
            (MarkedContent::Notice(text), begun) => {
                if let Some(begun) = begun {
                    self.pieces.lock().insert(connection, begun);
                }
                let conversation = self.conversation(connection);
                conversation.tools().session().notify(String::from_utf8_lossy(text).into_owned());
            }
            (MarkedContent::End(number), begun) => {
                self.record_received(number);
                if self.main.tools().is_being_replaced() {
                    // The next image gets the client's unanswered lines, and must then end the connection.
                    return;
                }
                if let Some((number, _)) = begun {
                    self.main.inflight().output.send_done(number);
                }
                let output = self.main.inflight().output.clone();
                let Some(conversation) = self.attached.lock().remove(&connection) else {
                    return output.send_done(number);
                };
                // To end thousands of calls on the event loop would delay other clients.
                let end = move || {
                    conversation.disconnect();
                    output.send_done(number);
                };
                if std::thread::Builder::new().name("sbcl-mcp-close".to_owned()).spawn(end.clone()).is_err() {
                    end();
                }
            }
        }
    }

    fn conversation(&self, connection: u64) -> Arc<Conversation> {
        if connection == 0 { self.main.clone() } else { self.attached_client(connection) }
    }
}

impl Service for Server {
    fn handle_line(&self, line: Line<'_>) {
        match line {
            Line::Text(text) => self.handle_supervisor_line(&text),
            Line::TooLong(_) => {
                tracing::error!("a line from the supervisor is too long; the supervisor replaces the image");
                self.record_missed(None);
            }
        }
    }

    fn run_timers(&self, now: Instant) -> Option<Instant> {
        if !self.main.tools().session().is_unlocked() {
            return Some(now + LOCK_RETRY_INTERVAL);
        }
        let attached: Vec<_> = self.attached.lock().values().cloned().collect();
        attached.iter().chain([&self.main]).filter_map(|conversation| conversation.inflight().run_timers(now)).min()
    }

    fn is_idle(&self) -> bool {
        self.pieces.lock().is_empty()
            && self.main.is_idle()
            && self.attached.lock().values().all(|conversation| conversation.is_idle())
    }

    /// Only the supervisor ends the server, so signals have no effect on a worker that still has its supervisor.
    fn exits_on_signal(&self) -> bool {
        self.is_orphaned()
    }

    /// No answer of an orphaned worker reaches a client.
    fn is_orphaned(&self) -> bool {
        self.supervisor.is_some_and(|supervisor| getppid() != Some(supervisor))
    }
}

/// The service of one client with a stream of its own.
#[derive(Debug)]
pub(super) struct SingleClient {
    pub(super) conversation: Arc<Conversation>,
    lines: AtomicU64,
    exits_on_signal: bool,
}

impl SingleClient {
    /// Creates the service of a client that is not on stdin and stdout. Signals do not end this service.
    pub(super) fn new(conversation: Arc<Conversation>) -> Self {
        Self { conversation, lines: AtomicU64::new(0), exits_on_signal: false }
    }

    /// Creates the service of the client on stdin and stdout. Signals may end the process.
    pub(super) fn for_stdio(conversation: Arc<Conversation>) -> Self {
        Self { exits_on_signal: true, ..Self::new(conversation) }
    }
}

impl Service for SingleClient {
    fn handle_line(&self, line: Line<'_>) {
        let number = self.lines.fetch_add(1, Ordering::Relaxed) + 1;
        match line {
            Line::Text(text) => self.conversation.receive(&text, number),
            Line::TooLong(message) => self.conversation.refuse_too_long(message, number),
        }
    }

    fn accepts_lines(&self) -> bool {
        self.conversation.slow_lines.accept_more()
    }

    fn run_timers(&self, now: Instant) -> Option<Instant> {
        if !self.conversation.tools().session().is_unlocked() {
            return Some(now + LOCK_RETRY_INTERVAL);
        }
        self.conversation.inflight().run_timers(now)
    }

    fn is_idle(&self) -> bool {
        self.conversation.is_idle()
    }

    fn exits_on_signal(&self) -> bool {
        self.exits_on_signal
    }
}
