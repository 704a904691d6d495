//! One of those who share a session. Its error state, what it holds for debugging, its `*package*`, and the REPL's and
//! printer's variables are its own; the image, its definitions and the limits are everybody's. The evaluations of all
//! take turns.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::activity::{Asked, Inspection};
use super::error_state::ErrorState;
use super::scheduler::{Request, Running};
use super::{INSPECTION_TIMEOUT, Inner, Session};
use crate::image::{Interrupt, Lane};
use crate::session::operation::{Operation, RecordsBuilder};

/// Characters of a connection's name.
const MAX_NAME: usize = 60;

/// Takes what others do as they do it, and the number of an evaluation that one of them holds from now on. It must not
/// wait.
pub(super) type Listener = Box<dyn Fn(&str, Option<u64>) + Send + Sync>;

/// What belongs to one connection.
pub(super) struct Connection {
    /// 0 for the session's own, whose variables are the global ones.
    pub(super) id: u64,
    name: Mutex<String>,
    state: Mutex<ErrorState>,
    listener: OnceLock<Listener>,
    ended: AtomicBool,
    /// The number of its newest evaluation, 0 before the first.
    pub(super) newest: AtomicU64,
}

impl Connection {
    pub(super) fn new(id: u64) -> Arc<Self> {
        Arc::new(Self {
            id,
            name: Mutex::default(),
            state: Mutex::default(),
            listener: OnceLock::new(),
            ended: AtomicBool::new(false),
            newest: AtomicU64::new(0),
        })
    }

    /// Its error state, and what waits for its next answer.
    pub(super) fn state(&self) -> MutexGuard<'_, ErrorState> {
        self.state.lock()
    }

    /// Tells it what another one did: at once where it listens, else with its next answer.
    pub(super) fn tell(&self, text: String) {
        match self.listener.get() {
            Some(listener) => listener(&text, None),
            None => self.state().notice(text),
        }
    }

    /// What the others call it, as a sentence begins.
    pub(super) fn describe(&self) -> String {
        let name = self.name.lock();
        match (name.is_empty(), self.is_guest()) {
            (true, _) => "Another connection".to_owned(),
            (false, true) => format!("Another connection ({name})"),
            (false, false) => format!("The session's own connection ({name})"),
        }
    }

    /// True for one that joined the session's own.
    pub(super) fn is_guest(&self) -> bool {
        self.id != 0
    }

    /// True when nobody is there any more.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

impl Session {
    /// Joins the session by another connection: a handle on the same image whose error state, held evaluation,
    /// `*package*`, and REPL and printer variables are its own, and begin as a session's do. Evaluations of all
    /// connections take turns. What one defines is told to the others, as notices of their next outcome.
    ///
    /// [`disconnect`](Self::disconnect) ends it.
    #[must_use]
    pub fn connect(&self) -> Self {
        self.connect_as(self.inner.next_connection.fetch_add(1, Ordering::Relaxed))
    }

    /// The same under a number that was never one's before.
    pub(crate) fn connect_as(&self, id: u64) -> Self {
        self.inner.next_connection.fetch_max(id + 1, Ordering::Relaxed);
        let connection = Connection::new(id);
        self.inner.guests.lock().push(connection.clone());
        Self { inner: self.inner.clone(), connection }
    }

    /// Ends this connection, unless it is the session's own: what it has waiting or running, in the background too, is
    /// cancelled, and what it holds is released. The others notice nothing of it.
    pub fn disconnect(&self) {
        let Self { inner, connection } = self;
        if !connection.is_guest() || connection.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        inner.guests.lock().retain(|guest| guest.id != connection.id);
        let mut board = inner.board.lock();
        let mut answers = Vec::new();
        for (lane, request) in board.take_waiting_of(connection.id) {
            answers.push(inner.withdraw(&mut board, lane, request));
        }
        let of_it = |running: &&Running| running.connection.id == connection.id && running.evaluates();
        let running: Vec<_> = board.running.iter().filter(of_it).map(|running| running.id).collect();
        for job in running {
            inner.interrupt(&mut board, job, Interrupt::Cancel);
        }
        if board.hold_of(connection.id).is_some() {
            let release = inner.release(&mut board, connection, super::hold::RELEASED);
            board.push(Lane::Evaluation, release);
        }
        // Its variables.
        let job = inner.query(&Operation::new("forget-connection").with("connection", connection.id));
        let asked = Asked::Inspect(Inspection::Query(RecordsBuilder::default(), Box::new(|_| ())));
        board.push(Lane::Inspection, Request::new(&inner.main, job, Some(INSPECTION_TIMEOUT), asked));
        inner.leave_board(board);
        inner.deliver(answers);
        if let Some(observer) = inner.observer.get() {
            observer.disconnected(connection.id);
        }
    }

    /// What the other connections call this one.
    pub fn set_name(&self, name: &str) {
        *self.connection.name.lock() = name.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
    }

    /// Has `listener` called with what other connections do, in place of saying so in the next outcome; once.
    pub(crate) fn listen(&self, listener: impl Fn(&str, Option<u64>) + Send + Sync + 'static) {
        // A second one would be told the same.
        let _ = self.connection.listener.set(Box::new(listener));
    }

    /// The number of this connection: 0 for the session's own.
    pub(crate) fn connection_number(&self) -> u64 {
        self.connection.id
    }

    /// What the connections are called, the session's own first, perhaps with an empty name; of the others those that
    /// have one.
    #[must_use]
    pub fn connection_names(&self) -> Vec<String> {
        let names = self.inner.connections().map(|connection| connection.name.lock().clone()).enumerate();
        names.filter(|(place, name)| *place == 0 || !name.is_empty()).map(|(_, name)| name).collect()
    }
}

impl Inner {
    /// All of them.
    fn connections(&self) -> impl Iterator<Item = Arc<Connection>> + use<> {
        let guests = self.guests.lock().clone();
        std::iter::once(self.main.clone()).chain(guests)
    }

    /// True when somebody else than `connection` is there.
    pub(super) fn is_shared(&self, connection: &Connection) -> bool {
        connection.is_guest() || !self.guests.lock().is_empty()
    }

    /// Tells every other connection what this one did.
    pub(super) fn tell_others(&self, connection: &Connection, what: &str) {
        let who = connection.describe();
        for other in self.connections().filter(|other| other.id != connection.id) {
            other.tell(format!("{who} {what}"));
        }
    }

    /// Tells the others that listen that this connection holds an evaluation: it is of use while that is so, and of none
    /// with some later answer.
    pub(super) fn tell_of_hold(&self, connection: &Connection, evaluation: u64, kind: &str) {
        let text = format!("{} holds evaluation {evaluation} for debugging: {kind}.", connection.describe());
        for other in self.connections().filter(|other| other.id != connection.id) {
            if let Some(listener) = other.listener.get() {
                listener(&text, Some(evaluation));
            }
        }
    }
}
