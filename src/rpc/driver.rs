//! Who reads: a leader and a follower.
//!
//! The thread that evaluates leads while it has nothing to evaluate: it reads a request, evaluates and answers, and
//! nobody has to be woken. When it has been away for longer than [`HANDOFF_DELAY`], the follower leads until it is
//! back.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags};

use super::descriptors::nonblocking_reader;
use super::framing::{Line, LineReader, Read};
use super::output::{MAX_UNREAD, Output};
use super::recorder::Recorder;
use super::signals::Signals;
use super::waker::Waker;
use crate::alarm::Alarm;
use crate::panics;

/// How long the evaluating thread may be away before the follower leads: most evaluations are over sooner than another
/// thread can be woken (50 µs and more), and no client notices so little.
const HANDOFF_DELAY: Duration = Duration::from_millis(2);
/// How long requests that were read before the end may still take.
const LAST_ANSWERS: Duration = Duration::from_millis(700);
/// How long after that an evaluation that still runs may unwind: the process is gone within a second of the end. Without a
/// request that waits, unwinding begins at once.
const UNWINDING: Duration = Duration::from_millis(150);
/// How often to look around when the leader cannot be woken: evaluated code may close any descriptor.
const DEAF: Duration = Duration::from_millis(5);

/// What is served. Its functions are called by the leader, one at a time.
pub(crate) trait Service: Send + Sync {
    /// Takes a line of the other side's.
    fn line(&self, line: Line<'_>);
    /// Does what is due by now; answers when something is due next.
    fn due(&self, now: Instant) -> Option<Instant>;
    /// True when nothing waits for an answer.
    fn is_idle(&self) -> bool;
    /// True when a signal that ends the process is to do so.
    fn heeds_signals(&self) -> bool;
}

/// Reads lines and hands them to a [`Service`], on whichever thread leads.
#[derive(Debug)]
pub(crate) struct Driver {
    input: Mutex<LineReader>,
    output: Arc<Output>,
    signals: Mutex<Signals>,
    waker: Arc<Waker>,
    state: Mutex<State>,
    /// Somebody else may lead, or there is work.
    changed: Condvar,
    /// Wakes the follower.
    alarm: Alarm,
}

#[derive(Debug)]
struct State {
    leader: Option<Thread>,
    /// The leader waits for descriptors, and has to be woken.
    is_polling: bool,
    /// The evaluating thread wants to lead.
    is_wanted: bool,
    /// There is something to evaluate.
    has_work: bool,
    /// Since when the evaluating thread has been away; `None` while it leads, or wants to.
    away_since: Option<Instant>,
    /// The alarm is set for some time within the handoff delay.
    is_armed: bool,
    /// No more lines are taken.
    is_paused: bool,
    /// Nothing more is read.
    ending: Option<Ending>,
    ended: Option<i32>,
}

/// The end of the service.
#[derive(Debug, Clone, Copy)]
struct Ending {
    /// The exit status.
    status: i32,
    /// Nothing is answered after this.
    answers: Instant,
    /// Nothing runs after this.
    unwinding: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thread {
    Evaluating,
    Follower,
}

impl Driver {
    /// Reads from `input`, and flushes `output` with the waker that this was given.
    pub(crate) fn new(input: OwnedFd, output: Arc<Output>, waker: Arc<Waker>) -> io::Result<Self> {
        let state = State {
            leader: None,
            is_polling: false,
            is_wanted: false,
            has_work: false,
            away_since: Some(Instant::now()),
            is_armed: true,
            is_paused: false,
            ending: None,
            ended: None,
        };
        let driver = Self {
            input: Mutex::new(LineReader::new(nonblocking_reader(input)?)),
            output,
            signals: Mutex::new(Signals::beside_lisp()?),
            waker,
            state: Mutex::new(state),
            changed: Condvar::new(),
            alarm: Alarm::default(),
        };
        driver.alarm.set(Instant::now());
        Ok(driver)
    }

    /// Has the lines that it reads recorded.
    pub(crate) fn recorded(self, recorder: Option<Recorder>) -> Self {
        Self { input: Mutex::new(self.input.into_inner().recorded(recorder)), ..self }
    }

    /// Reads the first line before anything is served, and hands it to `take`.
    ///
    /// # Errors
    /// When there is none within `time`, or it cannot be read.
    pub(crate) fn first_line<T>(&self, time: Duration, mut take: impl FnMut(&[u8]) -> Option<T>) -> io::Result<T> {
        let mut input = self.input.lock();
        let until = Instant::now() + time;
        loop {
            while let Some(line) = input.next_line() {
                if let Line::Text(text) = line
                    && let Some(taken) = take(text)
                {
                    return Ok(taken);
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            super::wait(&mut [PollFd::new(&*input, PollFlags::IN)], Some(left))?;
            if input.read()? == Read::End {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The evaluating thread's part: leads until there is work, or the time has come. Calls `rest` before it sleeps.
    pub(crate) fn idle(&self, service: &dyn Service, until: Option<Instant>, rest: &dyn Fn()) {
        let mut state = self.state.lock();
        state.away_since = None;
        state.is_wanted = true;
        while !state.has_work && (state.leader.is_some() || state.ended.is_some()) {
            if state.is_polling {
                self.waker.wake();
            }
            match until {
                None => self.changed.wait(&mut state),
                Some(until) if self.changed.wait_until(&mut state, until).timed_out() => break,
                Some(_) => {}
            }
        }
        state.is_wanted = false;
        if !state.has_work && state.leader.is_none() {
            state = self.lead(Thread::Evaluating, state, service, until, &|| {
                self.rest();
                rest();
            });
        }
        state.has_work = false;
        state.away_since = Some(Instant::now());
        if !std::mem::replace(&mut state.is_armed, true) {
            self.alarm.set(Instant::now() + HANDOFF_DELAY);
        }
    }

    /// Ends [`Self::idle`], which may begin later.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        state.has_work = true;
        self.rouse(&state);
    }

    /// Has the leader look what is due: another thread may have added to that.
    pub(crate) fn look_again(&self) {
        self.waker.wake();
    }

    /// Takes no more lines from here on: another process will.
    pub(crate) fn pause(&self) {
        self.state.lock().is_paused = true;
    }

    /// The follower's part, to the end: the exit status.
    pub(crate) fn follow(&self, service: &dyn Service) -> i32 {
        loop {
            self.alarm.wait();
            let mut state = self.state.lock();
            state.is_armed = false;
            if let Some(since) = state.away_since
                && state.ended.is_none()
                && state.leader.is_none()
            {
                if since.elapsed() < HANDOFF_DELAY {
                    state.is_armed = true;
                    self.alarm.set(since + HANDOFF_DELAY);
                    continue;
                }
                state = self.lead(Thread::Follower, state, service, None, &|| ());
                self.changed.notify_all();
            }
            if let Some(status) = state.ended {
                return status;
            }
        }
    }

    /// Spares the follower to wake while nothing is evaluated.
    fn rest(&self) {
        let mut state = self.state.lock();
        if std::mem::take(&mut state.is_armed) {
            self.alarm.stop();
        }
    }

    fn rouse(&self, state: &State) {
        if state.is_polling {
            self.waker.wake();
        }
        self.changed.notify_all();
    }

    /// Begins the end, as at the end of input.
    fn end(&self, status: i32, within: Duration) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.ending.get_or_insert(Ending { status, answers: now + within, unwinding: now + LAST_ANSWERS + UNWINDING });
    }

    /// Until when what still runs at the end may unwind.
    pub(crate) fn unwinding_deadline(&self) -> Instant {
        self.state.lock().ending.map_or_else(Instant::now, |ending| ending.unwinding)
    }

    /// Leads for as long as `thread` has nothing else to do and it is not all over.
    fn lead<'a>(
        &'a self,
        thread: Thread,
        mut state: MutexGuard<'a, State>,
        service: &dyn Service,
        until: Option<Instant>,
        rest: &dyn Fn(),
    ) -> MutexGuard<'a, State> {
        state.leader = Some(thread);
        let mut input = self.input.lock();
        let mut ears = Ears { waker: true, signals: true };
        loop {
            let stops = match thread {
                Thread::Evaluating => state.has_work,
                Thread::Follower => state.is_wanted,
            };
            if stops || state.ended.is_some() || until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
            let reads = state.ending.is_none() && !state.is_paused && self.output.backlog() <= MAX_UNREAD;
            let ending = state.ending;
            drop(state);
            if reads && let Some(line) = input.next_line() {
                // What a call owes its client is settled by its responder.
                if panics::caught(|| service.line(line)).is_none() {
                    tracing::error!("a request panicked");
                }
                state = self.state.lock();
                continue;
            }
            let now = Instant::now();
            let due = panics::caught(|| service.due(now)).flatten();
            if let Some(ending) = ending
                && (now >= ending.answers || service.is_idle())
            {
                state = self.state.lock();
                state.ended = Some(ending.status);
                self.alarm.set(now);
                break;
            }
            let deaf = (!ears.waker).then(|| now + DEAF);
            let wakes = [due, until, ending.map(|ending| ending.answers), deaf].into_iter().flatten().min();
            let timeout = wakes.map(|time| time.saturating_duration_since(now));
            self.wait(&mut input, service, &mut ears, reads, timeout, rest);
            state = self.state.lock();
            state.is_polling = false;
        }
        state.leader = None;
        state
    }

    /// Waits until something can be done, and does what concerns descriptors.
    fn wait(
        &self,
        input: &mut LineReader,
        service: &dyn Service,
        ears: &mut Ears,
        reads: bool,
        mut timeout: Option<Duration>,
        rest: &dyn Fn(),
    ) {
        {
            let mut state = self.state.lock();
            state.is_polling = true;
            if state.has_work || state.is_wanted {
                // Somebody looks out for the leader already.
                timeout = Some(Duration::ZERO);
            }
        }
        let mut signals = self.signals.lock();
        let mut fds = Vec::with_capacity(4);
        let unsent = self.output.backlog() > 0;
        let output_at = unsent.then(|| push(&mut fds, PollFd::new(&*self.output, PollFlags::OUT)));
        let input_at = reads.then(|| push(&mut fds, PollFd::new(&*input, PollFlags::IN)));
        let waker_at = ears.waker.then(|| push(&mut fds, PollFd::new(&*self.waker, PollFlags::IN)));
        let signals_at = ears.signals.then(|| push(&mut fds, PollFd::new(&*signals, PollFlags::IN)));
        // Evaluated code may have set a limit under which nothing can be waited for; reading and writing still tell.
        let blind = super::wait_or_rest(&mut fds, timeout, rest).is_err();
        if blind {
            std::thread::sleep(DEAF);
        }
        let events = |at: Option<usize>| at.map_or(PollFlags::empty(), |at| fds[at].revents());
        let is_ready = |at: Option<usize>| at.is_some() && blind || !events(at).is_empty();
        let (writable, readable) = (is_ready(output_at), is_ready(input_at));
        let (woken, signalled) = (!events(waker_at).is_empty(), events(signals_at));
        drop(fds);
        if woken {
            ears.waker = self.waker.clear();
        }
        if !signalled.is_empty() {
            ears.signals = !signalled.contains(PollFlags::NVAL);
            if let Some(signal) = signals.take()
                && service.heeds_signals()
            {
                self.end(128 + signal, LAST_ANSWERS);
            }
        }
        if writable {
            self.output.flush();
        }
        if self.output.is_broken() {
            self.end(0, Duration::ZERO);
        }
        if readable {
            match input.read() {
                Ok(Read::More | Read::Nothing) => {}
                Ok(Read::End) => self.end(0, LAST_ANSWERS),
                Err(error) => {
                    tracing::debug!(%error, "the client's input broke off");
                    self.end(0, LAST_ANSWERS);
                }
            }
        }
    }

    /// Writes what is left, for as long as `time`.
    pub(crate) fn drain(&self, time: Duration) {
        let until = Instant::now() + time;
        while self.output.backlog() > 0 && !self.output.is_broken() {
            let left = until.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&*self.output, PollFlags::OUT)];
            if left.is_zero() || super::wait(&mut fds, Some(left)).is_err() {
                return;
            }
            self.output.flush();
        }
    }
}

/// Which of the leader's own descriptors still work.
#[derive(Debug)]
struct Ears {
    waker: bool,
    signals: bool,
}

/// Adds a descriptor to those to wait for; returns its place.
pub(super) fn push<'a>(fds: &mut Vec<PollFd<'a>>, fd: PollFd<'a>) -> usize {
    fds.push(fd);
    fds.len() - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::inflight::{Inflight, Responder};
    use crate::rpc::output::Reader;
    use rmcp::model::RequestId;
    use serde_json::{Value, json};
    use std::collections::VecDeque;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    /// Answers a line with itself: at once, or, if it is the name of a time in ms, when it was evaluated for as long.
    struct Echo {
        inflight: Arc<Inflight>,
        work: Mutex<VecDeque<(u64, Responder)>>,
        driver: Mutex<Option<Arc<Driver>>>,
        /// Which threads took a line.
        takers: Mutex<Vec<std::thread::ThreadId>>,
    }

    impl Service for Echo {
        fn line(&self, line: Line<'_>) {
            let Line::Text(text) = line else { panic!("too long") };
            let text = str::from_utf8(text).unwrap().trim();
            self.takers.lock().push(std::thread::current().id());
            let owed = self.inflight.admit(RequestId::String(text.into()), 1, None, text.len()).unwrap();
            assert_ne!(text, "panic");
            match text.parse() {
                Ok(time) => {
                    self.work.lock().push_back((time, owed));
                    self.driver.lock().as_ref().unwrap().wake();
                }
                Err(_) => owed.answer(json!(text)),
            }
        }

        fn due(&self, now: Instant) -> Option<Instant> {
            self.inflight.due(now)
        }

        fn is_idle(&self) -> bool {
            self.inflight.is_idle()
        }

        fn heeds_signals(&self) -> bool {
            false
        }
    }

    /// The other side, an evaluating thread, and a follower.
    struct Peer {
        writer: UnixStream,
        reader: BufReader<UnixStream>,
        service: Arc<Echo>,
        evaluating: std::thread::ThreadId,
        follower: std::thread::JoinHandle<i32>,
    }

    impl Peer {
        fn new() -> Self {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let waker = Arc::new(Waker::new().unwrap());
            let output =
                Arc::new(Output::new(theirs.try_clone().unwrap().into(), Reader::Client, waker.clone()).unwrap());
            let driver = Arc::new(Driver::new(theirs.into(), output.clone(), waker).unwrap());
            let service = Arc::new(Echo {
                inflight: Inflight::new(output),
                work: Mutex::default(),
                driver: Mutex::new(Some(driver.clone())),
                takers: Mutex::default(),
            });
            let (evaluator, worker) = (driver.clone(), service.clone());
            // Never ends, as Lisp's does not.
            let evaluating = std::thread::spawn(move || {
                loop {
                    let next = worker.work.lock().pop_front();
                    match next {
                        Some((time, owed)) => {
                            std::thread::sleep(Duration::from_millis(time));
                            owed.answer(json!(time));
                        }
                        None => evaluator.idle(&*worker, None, &|| ()),
                    }
                }
            });
            let evaluating = evaluating.thread().id();
            let followed = service.clone();
            let follower = std::thread::spawn(move || driver.follow(&*followed));
            Self { reader: BufReader::new(ours.try_clone().unwrap()), writer: ours, service, evaluating, follower }
        }

        fn send(&mut self, text: &str) {
            self.writer.write_all(text.as_bytes()).unwrap();
        }

        /// The id of the next answer.
        fn answer(&mut self) -> String {
            let mut line = String::new();
            self.reader.read_line(&mut line).unwrap();
            let answer: Value = serde_json::from_str(&line).unwrap();
            answer["id"].as_str().unwrap().to_owned()
        }

        fn end(self) -> i32 {
            self.writer.shutdown(std::net::Shutdown::Write).unwrap();
            self.follower.join().unwrap()
        }
    }

    #[test]
    fn every_line_is_answered_in_its_order() {
        let mut peer = Peer::new();
        for round in 0..300 {
            // Some outlast the handoff delay, some are over at about that time.
            let time = [0, 0, 1, 2, 3][round % 5];
            peer.send(&format!("{time}\n"));
            assert_eq!(peer.answer(), time.to_string());
        }
        // By now the evaluating thread leads.
        peer.send("here\n");
        assert_eq!(peer.answer(), "here");
        assert_eq!(peer.service.takers.lock().last(), Some(&peer.evaluating));
        assert_eq!(peer.end(), 0);
    }

    #[test]
    fn the_follower_leads_while_something_is_evaluated() {
        let mut peer = Peer::new();
        peer.send("300\n");
        for text in ["a", "b", "c"] {
            peer.send(&format!("{text}\n"));
            assert_eq!(peer.answer(), text);
        }
        assert_ne!(peer.service.takers.lock().last(), Some(&peer.evaluating));
        assert_eq!(peer.answer(), "300");
        peer.send("0\n");
        assert_eq!(peer.answer(), "0");
        assert_eq!(peer.end(), 0);
    }

    #[test]
    fn a_panic_is_answered_and_ends_nothing() {
        let mut peer = Peer::new();
        peer.send("panic\nafter\n");
        assert_eq!((peer.answer(), peer.answer()), ("panic".to_owned(), "after".to_owned()));
        assert_eq!(peer.end(), 0);
    }

    #[test]
    fn what_was_asked_before_the_end_is_answered() {
        let mut peer = Peer::new();
        peer.send("20\nlast, without a newline");
        peer.writer.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!((peer.answer(), peer.answer()), ("last, without a newline".to_owned(), "20".to_owned()));
        assert_eq!(peer.follower.join().unwrap(), 0);
    }

    #[test]
    fn a_side_that_does_not_read_stops_nothing() {
        let mut peer = Peer::new();
        let mut writer = peer.writer.try_clone().unwrap();
        let lines = std::thread::spawn(move || {
            for line in 0..20_000 {
                writer.write_all(format!("line {line} {}\n", "x".repeat(100)).as_bytes()).unwrap();
            }
        });
        // All of it is taken, though nothing is read: far more than a socket holds.
        lines.join().unwrap();
        for line in 0..20_000 {
            assert!(peer.answer().starts_with(&format!("line {line} ")));
        }
        assert_eq!(peer.end(), 0);
    }
}
