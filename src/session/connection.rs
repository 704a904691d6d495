//! The connections of a session, one per client. A connection has its own error state, held evaluation, `*package*`,
//! and REPL and printer variables. The image, its definitions and the limits are shared, and the evaluations of all
//! connections take turns.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::activity::{Inspection, RequestBody};
use super::error_state::ErrorState;
use super::scheduler::{Request, RunningJob, SchedulerState};
use super::{AnswerFn, INSPECTION_TIMEOUT, Inner, Session};
use crate::audience::Audience;
use crate::error::{EndedHold, HoldEnd};
use crate::image::{InterruptReason, Lane};
use crate::session::operation::{Operation, RecordsBuilder};

/// The maximum length of a connection's name in characters.
const MAX_NAME: usize = 60;

/// A function that is called at once with each message about another connection's action. The second argument is the
/// number of an evaluation, if the message says that another connection now holds it. The function must not block.
pub(super) type MessageListener = Box<dyn Fn(&str, Option<u64>) + Send + Sync>;

/// The state of one connection.
pub(super) struct Connection {
    /// The connection's number; 0 for the session's own connection, which uses the global values of `*package*` and
    /// of the REPL and printer variables.
    pub(super) id: u64,
    name: Mutex<String>,
    /// The audience of the connection's messages; an agent unless the client has named another audience.
    audience: OnceLock<Audience>,
    state: Mutex<ErrorState>,
    listener: OnceLock<MessageListener>,
    ended: AtomicBool,
    /// The connection's last hold, once it has ended.
    last_hold: Mutex<Option<EndedHold>>,
    /// The number of the connection's newest evaluation; 0 before the first evaluation.
    pub(super) newest_evaluation: AtomicU64,
}

impl Connection {
    pub(super) fn new(id: u64) -> Arc<Self> {
        Arc::new(Self {
            id,
            name: Mutex::default(),
            audience: OnceLock::new(),
            state: Mutex::default(),
            listener: OnceLock::new(),
            ended: AtomicBool::new(false),
            last_hold: Mutex::default(),
            newest_evaluation: AtomicU64::new(0),
        })
    }

    /// Locks the error state, which also contains the messages for the next answer.
    pub(super) fn state(&self) -> MutexGuard<'_, ErrorState> {
        self.state.lock()
    }

    /// Returns the audience of the connection's messages.
    pub(super) fn audience(&self) -> Audience {
        self.audience.get().copied().unwrap_or_default()
    }

    /// Records that the connection no longer holds this evaluation.
    pub(super) fn set_last_hold(&self, evaluation: u64, end: HoldEnd) {
        *self.last_hold.lock() = Some(EndedHold { evaluation, end });
    }

    /// Returns the hold of this connection that ended last.
    pub(super) fn last_hold(&self) -> Option<EndedHold> {
        *self.last_hold.lock()
    }

    /// Notifies the client about another connection's action: at once if there is a listener, otherwise with the next
    /// answer.
    pub(super) fn notify(&self, text: String) {
        match self.listener.get() {
            Some(listener) => listener(&text, None),
            None => self.state().add_notice(text),
        }
    }

    /// Returns the subject of a sentence about this connection, for other clients.
    pub(super) fn describe(&self) -> String {
        let name = self.name.lock();
        match (name.is_empty(), self.is_attached()) {
            (true, _) => "Another client".to_owned(),
            (false, true) => format!("Another client ({name})"),
            (false, false) => format!("The server's first client ({name})"),
        }
    }

    /// Returns true if this is not the session's own connection.
    pub(super) fn is_attached(&self) -> bool {
        self.id != 0
    }

    /// Returns true once the client has disconnected.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

impl Session {
    /// Adds a connection to the session. The returned handle has an error state, a held evaluation, `*package*`, and
    /// REPL and printer variables of its own. The variables begin with the values of a new session. The evaluations of
    /// all connections take turns. The definitions of one connection are reported to the other connections, as notices
    /// in their next outcomes.
    ///
    /// [`disconnect`](Self::disconnect) ends the connection.
    #[must_use]
    pub fn connect(&self) -> Self {
        self.connect_with_number(self.inner.next_connection.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds a connection as [`connect`](Self::connect) does, with the number `id`, which must not have been used
    /// before.
    pub(crate) fn connect_with_number(&self, id: u64) -> Self {
        self.inner.next_connection.fetch_max(id + 1, Ordering::Relaxed);
        let connection = Connection::new(id);
        self.inner.attached.lock().push(connection.clone());
        Self { inner: self.inner.clone(), connection }
    }

    /// Ends this connection, unless it is the session's own: cancels its inspections and its waiting and running
    /// evaluations, including evaluations in the background and evaluations whose results are still being processed
    /// outside Lisp, and releases its held evaluation. Other connections are not affected.
    pub fn disconnect(&self) {
        let Self { inner, connection } = self;
        if !connection.is_attached() || connection.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        inner.attached.lock().retain(|other| other.id != connection.id);
        let mut scheduler = inner.scheduler.lock();
        let answers = inner.withdraw_waiting_of(&mut scheduler, connection);
        let of_it = |running: &&RunningJob| running.connection.id == connection.id;
        let running: Vec<_> = scheduler.running.iter().filter(of_it).map(|running| running.id).collect();
        for job in running {
            inner.interrupt(&mut scheduler, job, InterruptReason::Cancel);
        }
        for finishing in scheduler.finishing.iter_mut().filter(|finishing| finishing.connection.id == connection.id) {
            finishing.cancel(&inner.clock);
        }
        if scheduler.hold_of(connection.id).is_some() {
            let release = inner.prepare_release(&mut scheduler, connection, HoldEnd::Released);
            scheduler.push(Lane::Evaluation, release);
        }
        // This query makes Lisp forget the connection's variables.
        let job = inner.query_job(&Operation::new("forget-connection").with("connection", connection.id));
        let body = RequestBody::Inspect(Inspection::Query(RecordsBuilder::default(), Box::new(|_| ())));
        scheduler.push(Lane::Inspection, Request::new(&inner.own_connection, job, Some(INSPECTION_TIMEOUT), body));
        inner.unlock_and_notify(scheduler);
        inner.deliver(answers);
        if let Some(observer) = inner.observer.get() {
            observer.connection_ended(connection.id);
        }
    }

    /// Cancels all requests of this connection that wait, which takes much less time than cancelling each request.
    pub(crate) fn withdraw_waiting(&self) {
        let mut scheduler = self.inner.scheduler.lock();
        let answers = self.inner.withdraw_waiting_of(&mut scheduler, &self.connection);
        self.inner.unlock_and_notify(scheduler);
        self.inner.deliver(answers);
    }

    /// Sets the name that other connections see: `name` without control characters, cut after 60 characters.
    pub fn set_name(&self, name: &str) {
        *self.connection.name.lock() = name.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
    }

    /// Sets the audience of this connection's messages. Later calls have no effect.
    pub(crate) fn set_audience(&self, audience: Audience) {
        let _ = self.connection.audience.set(audience);
    }

    /// Returns the audience of this connection's messages.
    pub(crate) fn audience(&self) -> Audience {
        self.connection.audience()
    }

    /// Sets the listener, which gets messages about other connections' actions in place of notices in the next outcome.
    /// Later calls have no effect.
    pub(crate) fn set_listener(&self, listener: impl Fn(&str, Option<u64>) + Send + Sync + 'static) {
        let _ = self.connection.listener.set(Box::new(listener));
    }

    /// Returns the number of this connection: 0 for the session's own connection.
    pub(crate) fn connection_number(&self) -> u64 {
        self.connection.id
    }

    /// Returns the names of the connections: first the name of the session's own connection, which may be empty, then
    /// the other nonempty names.
    #[must_use]
    pub fn connection_names(&self) -> Vec<String> {
        let names = self.inner.connections().map(|connection| connection.name.lock().clone()).enumerate();
        names.filter(|(index, name)| *index == 0 || !name.is_empty()).map(|(_, name)| name).collect()
    }
}

impl Inner {
    /// Returns all connections, the session's own first.
    fn connections(&self) -> impl Iterator<Item = Arc<Connection>> + use<> {
        let attached = self.attached.lock().clone();
        std::iter::once(self.own_connection.clone()).chain(attached)
    }

    /// Cancels all waiting requests of a connection, as [`withdraw_all`](Self::withdraw_all) does. Returns their answers.
    fn withdraw_waiting_of(
        &self,
        scheduler: &mut MutexGuard<'_, SchedulerState>,
        connection: &Connection,
    ) -> Vec<AnswerFn> {
        let waiting = scheduler.take_waiting_of_connection(connection.id);
        self.withdraw_all(scheduler, waiting)
    }

    /// Returns true if there is a connection other than `connection`.
    pub(super) fn has_other_connections(&self, connection: &Connection) -> bool {
        connection.is_attached() || !self.attached.lock().is_empty()
    }

    /// Notifies all connections except `connection` about an action of `connection`. `what` is the rest of a
    /// sentence whose subject is `connection`.
    pub(super) fn notify_others(&self, connection: &Connection, what: &str) {
        let name = connection.describe();
        for other in self.connections().filter(|other| other.id != connection.id) {
            other.notify(format!("{name} {what}"));
        }
    }

    /// Notifies the listeners of other connections that `connection` holds an evaluation, which failed with an error of
    /// this kind. Connections without a listener are not notified: the evaluation might no longer be held when their
    /// next answer is sent.
    pub(super) fn notify_of_hold(&self, connection: &Connection, evaluation: u64, kind: &str) {
        let text = format!("{} holds evaluation {evaluation} for debugging: {kind}.", connection.describe());
        for other in self.connections().filter(|other| other.id != connection.id) {
            if let Some(listener) = other.listener.get() {
                listener(&text, Some(evaluation));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::session::completion::WITHDRAWN_AT_ONCE;
    use crate::session::observer::Observer;
    use crate::{Evaluation, Limits};

    /// The number of requests that [`EndObserver`] expects.
    const WITHDRAWN: usize = 10 * WITHDRAWN_AT_ONCE;

    /// An observer that records whether another thread got the scheduler's lock before the last request was cancelled.
    /// The observer sleeps, so that the other thread waits for the lock.
    #[derive(Default)]
    struct EndObserver {
        ended: AtomicUsize,
        is_locked: AtomicBool,
        is_locked_before_last: AtomicBool,
    }

    impl Observer for EndObserver {
        fn job_ended(&self, _: u64) {
            let ended = self.ended.fetch_add(1, Ordering::Relaxed) + 1;
            if ended.is_multiple_of(WITHDRAWN_AT_ONCE) {
                thread::sleep(Duration::from_millis(10));
            }
            if ended == WITHDRAWN {
                self.is_locked_before_last.store(self.is_locked.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
    }

    #[test]
    fn other_threads_get_the_lock_while_many_requests_of_a_connection_are_cancelled() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let observer = Arc::new(EndObserver::default());
        let _ = inner.observer.set(observer.clone());
        let session = Session { connection: inner.own_connection.clone(), inner };
        let gone = session.connect();
        for _ in 0..WITHDRAWN {
            gone.submit(Evaluation::new("1"), drop);
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                while observer.ended.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
                drop(session.inner.scheduler.lock());
                observer.is_locked.store(true, Ordering::Relaxed);
            });
            gone.withdraw_waiting();
        });
        assert!(observer.is_locked_before_last.load(Ordering::Relaxed));
    }

    #[test]
    fn withdrawing_the_waiting_requests_of_a_connection_cancels_no_other_requests() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let session = Session { connection: inner.own_connection.clone(), inner };
        let gone = session.connect();
        let (send, receive) = mpsc::channel();
        for (number, session) in [&session, &gone, &session, &gone].into_iter().enumerate() {
            let send = send.clone();
            session.submit(Evaluation::new("1"), move |outcome| send.send((number, outcome.is_error())).unwrap());
        }
        gone.withdraw_waiting();
        assert_eq!(receive.try_iter().collect::<Vec<_>>(), [(1, true), (3, true)]);
        gone.withdraw_waiting();
        session.withdraw_waiting();
        assert_eq!(receive.try_iter().collect::<Vec<_>>(), [(0, true), (2, true)]);
    }
}
