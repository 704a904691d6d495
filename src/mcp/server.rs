//! The conversations with all clients, as the threads that read serve them.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::process::{Pid, getppid};

use super::conversation::Conversation;
use super::tools::ToolContext;
use crate::handover::shared_status::{SharedStatus, Status};
use crate::handover::{WorkerInit, route};
use crate::rpc::driver::Service;
use crate::rpc::framing::{Line, LineReader};
use crate::rpc::inflight::Inflight;

/// The client of stdin and stdout, and those that have joined by its supervisor.
#[derive(Debug)]
pub(super) struct Server {
    main: Arc<Conversation>,
    /// Those that have joined, by their connections' numbers.
    guests: Mutex<BTreeMap<u64, Arc<Conversation>>>,
    lines: Mutex<Numbers>,
    status: SharedStatus,
    /// The supervisor, where there is one.
    parent: Option<Pid>,
}

/// The numbers of the lines, as the supervisor counts them.
#[derive(Debug)]
struct Numbers {
    resent: VecDeque<u64>,
    next: u64,
}

impl Server {
    /// Goes on where another image stopped.
    pub(super) fn new(tools: Arc<ToolContext>, init: &WorkerInit, status: SharedStatus) -> Self {
        let parent = getppid().filter(|_| tools.inflight().output.memory().is_none());
        let lines = Numbers { resent: init.resent.iter().copied().collect(), next: init.next };
        let (main, lines) = (Conversation::new(tools), Mutex::new(lines));
        let server = Self { main, guests: Mutex::default(), lines, status, parent };
        server.main.go_on(&init.handshake);
        for (connection, guest) in &init.guests {
            server.guest(*connection).go_on(&guest.handshake);
        }
        server
    }

    pub(super) fn main(&self) -> &Arc<Conversation> {
        &self.main
    }

    /// Gives the last answer to whatever still waits.
    pub(super) fn abandon(&self, reason: &'static str) {
        for conversation in self.guests.lock().values() {
            conversation.inflight().abandon(reason);
        }
    }

    /// The number of the line that was just read.
    fn number(&self, text: &[u8]) -> u64 {
        let mut lines = self.lines.lock();
        let number = lines.resent.pop_front().unwrap_or_else(|| {
            if let Some(memory) = self.main.inflight().output.memory() {
                memory.add(text);
            }
            lines.next += 1;
            lines.next - 1
        });
        self.status.set(Status::Heard, number);
        number
    }

    /// True when a supervisor is between this process and its clients.
    fn is_supervised(&self) -> bool {
        self.parent.is_some()
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

impl Service for Server {
    fn line(&self, line: Line<'_>) {
        let number = self.number(match line {
            Line::Text(text) => text,
            Line::TooLong(_) => b"\n",
        });
        match line {
            Line::Text(text) if self.is_supervised() => match route::parse(text) {
                (0, text) => self.main.line(Line::Text(text), number),
                (connection, b"") => {
                    let gone = self.guests.lock().remove(&connection);
                    if let Some(conversation) = gone {
                        conversation.end();
                    }
                    self.main.inflight().output.done(number);
                }
                (connection, text) => self.guest(connection).line(Line::Text(text), number),
            },
            line => self.main.line(line, number),
        }
    }

    fn due(&self, now: Instant) -> Option<Instant> {
        let guests: Vec<_> = self.guests.lock().values().cloned().collect();
        guests.iter().chain([&self.main]).filter_map(|conversation| conversation.inflight().due(now)).min()
    }

    fn is_idle(&self) -> bool {
        self.main.inflight().is_idle()
            && self.guests.lock().values().all(|conversation| conversation.inflight().is_idle())
    }

    /// Where a supervisor replaces what is lost, it alone ends the server, and this process goes when it is gone.
    fn heeds_signals(&self) -> bool {
        !self.is_supervised() || self.is_orphaned()
    }

    fn replace(&self, input: &LineReader) {
        self.main.inflight().output.replace(input.as_fd(), input.unread());
    }
}

/// One client that has a stream of its own.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) conversation: Arc<Conversation>,
    lines: AtomicU64,
}

impl Guest {
    pub(super) fn new(conversation: Arc<Conversation>) -> Self {
        Self { conversation, lines: AtomicU64::new(0) }
    }
}

impl Service for Guest {
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
        false
    }
}
