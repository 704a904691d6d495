//! The conversations with all clients, as the threads that read serve them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::process::{Pid, getppid};

use super::conversation::Conversation;
use super::incoming::decode;
use super::tools::ToolContext;
use crate::os::panics;
use crate::recovery::state::RecoveryState;
use crate::recovery::status_page::{Status, StatusPage};
use crate::rpc::driver::Service;
use crate::rpc::framing::Line;
use crate::rpc::inflight::Inflight;
use crate::rpc::route::{self, Part};

/// The client of stdin and stdout, and those that have joined by its supervisor.
#[derive(Debug)]
pub(super) struct Server {
    main: Arc<Conversation>,
    /// Those that have joined, by their connections' numbers.
    guests: Mutex<BTreeMap<u64, Arc<Conversation>>>,
    /// Long lines that have been read in part, with their numbers, by connection.
    pieces: Mutex<BTreeMap<u64, (u64, Vec<u8>)>>,
    /// Lines that wait, by connection, while a thread takes a slow line of that connection.
    taken: Arc<Mutex<BTreeMap<u64, Said>>>,
    /// The number of the supervisor's lines so far.
    received: AtomicU64,
    /// The number of the next line that no other worker got before.
    next_line: AtomicU64,
    status: StatusPage,
    /// The supervisor.
    parent: Option<Pid>,
}

/// Lines that wait, with their numbers; `None` when the client is gone.
type Said = VecDeque<(u64, Option<Vec<u8>>)>;

impl Server {
    /// A server that continues the conversations of another image: `handshakes` are done. The first new line has the number
    /// `next_line`.
    pub(super) fn new(
        tools: Arc<ToolContext>,
        handshakes: Vec<(u64, Vec<String>)>,
        status: StatusPage,
        next_line: u64,
    ) -> Self {
        let parent = getppid();
        let server = Self {
            main: Conversation::new(tools),
            guests: Mutex::default(),
            pieces: Mutex::default(),
            taken: Arc::default(),
            received: AtomicU64::new(0),
            next_line: AtomicU64::new(next_line),
            status,
            parent,
        };
        for (connection, handshake) in handshakes {
            server.conversation(connection).go_on(&handshake);
        }
        server
    }

    /// Gives the last answer to whatever still waits.
    pub(super) fn abandon(&self, reason: &'static str) {
        for conversation in self.guests.lock().values() {
            conversation.inflight().abandon(reason);
        }
    }

    /// Records that the line with this number was read. Lines that were handed to another worker before have lower numbers.
    fn heard(&self, number: u64) {
        self.status.raise(Status::Heard, number);
    }

    /// Records that the line with this number, or a line that is not known, has not reached this worker: other code in the
    /// process has read from the supervisor's pipe. The supervisor hands its open lines to another worker then.
    fn missed(&self, number: Option<u64>) {
        self.status.raise(Status::Missed, number.unwrap_or(u64::MAX));
    }

    /// Returns true unless the line with this number is torn: unless it begins here, or continues the line `begun`.
    fn is_intact(&self, number: u64, begun: Option<u64>) -> bool {
        if let Some(begun) = begun {
            if begun != number {
                self.missed(Some(begun));
            }
            return begun == number;
        }
        // New lines begin in the order of their numbers, which are consecutive.
        let next = self.next_line.fetch_max(number + 1, Ordering::Relaxed);
        if number > next {
            self.missed(Some(next));
        }
        true
    }

    /// True when the supervisor is gone, and nobody hears what is said.
    pub(super) fn is_orphaned(&self) -> bool {
        self.parent.is_some_and(|parent| getppid() != Some(parent))
    }

    /// The conversation with a client that has joined, perhaps just now.
    fn guest(&self, connection: u64) -> Arc<Conversation> {
        let mut guests = self.guests.lock();
        let begin = || {
            let tools = self.main.tools();
            let output = Arc::new(tools.inflight().output.for_connection(connection));
            let session = tools.session().connect_as(connection);
            self.main.beside(tools.beside(session, Inflight::new(output)))
        };
        guests.entry(connection).or_insert_with(begin).clone()
    }
}

impl Server {
    /// Takes what the supervisor has handed on.
    fn handed_on(&self, text: &[u8]) {
        let Some((connection, part)) = route::parse(text) else {
            tracing::error!("the supervisor wrote a line that cannot be read");
            return self.missed(None);
        };
        let is_last = matches!(part, Part::Line(..) | Part::End(_));
        let received = self.received.fetch_add(u64::from(is_last), Ordering::Relaxed) + 1;
        self.take_part(connection, part);
        // After what the line is answered at once, so that the supervisor sends no more than it reads.
        if is_last && received.is_multiple_of(route::REPORT_AFTER) {
            self.main.inflight().output.received(received);
        }
    }

    fn take_part(&self, connection: u64, part: Part<'_>) {
        let begun = self.pieces.lock().remove(&connection);
        let is_intact = match part {
            Part::Line(number, _) | Part::Piece(number, _) => {
                self.is_intact(number, begun.as_ref().map(|(number, _)| *number))
            }
            // A client may leave in the middle of a line.
            Part::End(number) => self.is_intact(number, None),
            Part::Notice(_) => true,
        };
        if !is_intact {
            return;
        }
        match (part, begun) {
            (Part::Piece(number, piece), begun) => {
                self.heard(number);
                let (_, mut line) = begun.unwrap_or_default();
                line.extend_from_slice(piece);
                self.pieces.lock().insert(connection, (number, line));
            }
            (Part::Line(number, rest), Some((_, mut line))) => {
                line.extend_from_slice(rest);
                self.take_slow(connection, number, line);
            }
            (Part::Line(number, line), None) => {
                self.heard(number);
                self.in_turn(connection, number, line);
            }
            (Part::Notice(text), begun) => {
                if let Some(begun) = begun {
                    self.pieces.lock().insert(connection, begun);
                }
                let conversation = self.conversation(connection);
                conversation.tools().session().tell(String::from_utf8_lossy(text).into_owned());
            }
            (Part::End(number), begun) => {
                self.heard(number);
                if let Some((number, _)) = begun {
                    self.main.inflight().output.done(number);
                }
                let conversation = self.guests.lock().remove(&connection);
                let waits = self.taken.lock().get_mut(&connection).map(|said| said.push_back((number, None))).is_some();
                if let Some(conversation) = conversation.filter(|_| !waits) {
                    conversation.end();
                }
                self.main.inflight().output.done(number);
            }
        }
    }

    fn conversation(&self, connection: u64) -> Arc<Conversation> {
        if connection == 0 { self.main.clone() } else { self.guest(connection) }
    }

    /// Takes a line, after a slow one of the same connection's if that is being taken.
    fn in_turn(&self, connection: u64, number: u64, line: &[u8]) {
        if let Some(said) = self.taken.lock().get_mut(&connection) {
            return said.push_back((number, Some(line.to_vec())));
        }
        let incoming = decode(line);
        if incoming.searches_directories() {
            return self.take_slow(connection, number, line.to_vec());
        }
        self.conversation(connection).decoded(incoming, line.len(), number);
    }

    /// Takes a slow line, one that is long or searches directories, on a thread of its own, while others are served.
    fn take_slow(&self, connection: u64, number: u64, line: Vec<u8>) {
        let mut said = VecDeque::from([(number, Some(line))]);
        let mut taken = self.taken.lock();
        if let Some(waiting) = taken.get_mut(&connection) {
            return waiting.append(&mut said);
        }
        taken.insert(connection, said);
        drop(taken);
        let (conversation, taken) = (self.conversation(connection), self.taken.clone());
        let take = move || {
            loop {
                let next = {
                    let mut taken = taken.lock();
                    let next = taken.get_mut(&connection).and_then(VecDeque::pop_front);
                    if next.is_none() {
                        taken.remove(&connection);
                    }
                    next
                };
                let Some((number, line)) = next else { break };
                let take = || match &line {
                    Some(line) => conversation.line(Line::Text(line), number),
                    None => conversation.end(),
                };
                // What a call owes its client is settled by its responder.
                if panics::caught(take).is_none() {
                    tracing::error!("a request panicked");
                }
            }
            // Something may be due now.
            conversation.tools().look_again();
        };
        if std::thread::Builder::new().name("sbcl-mcp-line".to_owned()).spawn(take.clone()).is_err() {
            take();
        }
    }
}

impl Service for Server {
    fn line(&self, line: Line<'_>) {
        match line {
            Line::Text(text) => self.handed_on(text),
            Line::TooLong(_) => {
                tracing::error!("the supervisor wrote a line that is too long");
                self.missed(None);
            }
        }
    }

    fn due(&self, now: Instant) -> Option<Instant> {
        let guests: Vec<_> = self.guests.lock().values().cloned().collect();
        guests.iter().chain([&self.main]).filter_map(|conversation| conversation.inflight().due(now)).min()
    }

    fn is_idle(&self) -> bool {
        self.pieces.lock().is_empty()
            && self.taken.lock().is_empty()
            && self.main.inflight().is_idle()
            && self.guests.lock().values().all(|conversation| conversation.inflight().is_idle())
    }

    /// The supervisor alone ends the server, and this process goes when it is gone.
    fn heeds_signals(&self) -> bool {
        self.is_orphaned()
    }
}

/// The handshakes of the clients that were attached to the image before, by the numbers of their connections.
pub(super) fn handshakes(state: &RecoveryState) -> Vec<(u64, Vec<String>)> {
    state.clients.iter().map(|(number, client)| (*number, client.handshake.clone())).collect()
}

/// One client that has a stream of its own.
#[derive(Debug)]
pub(super) struct SingleClient {
    pub(super) conversation: Arc<Conversation>,
    lines: AtomicU64,
    heeds_signals: bool,
}

impl SingleClient {
    /// A client whose end does not end this process.
    pub(super) fn new(conversation: Arc<Conversation>) -> Self {
        Self { conversation, lines: AtomicU64::new(0), heeds_signals: false }
    }

    /// The client of stdin and stdout, in a process that signals may end.
    pub(super) fn of_process(conversation: Arc<Conversation>) -> Self {
        Self { heeds_signals: true, ..Self::new(conversation) }
    }
}

impl Service for SingleClient {
    fn line(&self, line: Line<'_>) {
        self.conversation.line(line, self.lines.fetch_add(1, Ordering::Relaxed) + 1);
    }

    fn due(&self, now: Instant) -> Option<Instant> {
        self.conversation.inflight().due(now)
    }

    fn is_idle(&self) -> bool {
        self.conversation.inflight().is_idle()
    }

    fn heeds_signals(&self) -> bool {
        self.heeds_signals
    }
}
