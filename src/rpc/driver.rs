//! The event loop: one thread reads and dispatches.
//!
//! A garbage collection does not stop this thread, since it is none of Lisp's: requests that need no Lisp are always answered.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::descriptors::nonblocking_reader;
use super::framing::{Line, LineReader, MAX_LINE, Read};
use super::output::Output;
use super::recorder::Recorder;
use super::signals::Signals;
use super::waker::Waker;
use crate::os::panics;
use crate::os::poll_set::PollSet;

/// How long requests that were read before the end may still take.
const LAST_ANSWERS: Duration = Duration::from_millis(700);
/// How long after that an evaluation that still runs may unwind: the process is gone within a second of the end. Without a
/// request that waits, unwinding begins at once.
const UNWINDING: Duration = Duration::from_millis(150);
/// Poll interval after the wake-up descriptor is lost: evaluated code may close any descriptor.
const UNWOKEN: Duration = Duration::from_millis(5);

/// A service: the event loop calls its functions, one at a time.
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

/// Reads lines and hands them to a [`Service`].
#[derive(Debug)]
pub(crate) struct Driver {
    input: Mutex<LineReader>,
    output: Arc<Output>,
    signals: Mutex<Signals>,
    waker: Arc<Waker>,
    state: Mutex<State>,
}

#[derive(Debug, Default, Clone, Copy)]
struct State {
    /// No more lines are taken.
    is_paused: bool,
    /// Nothing more is read.
    ending: Option<Ending>,
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

impl Driver {
    /// Reads from `input`, and flushes `output` with the waker that this was given.
    pub(crate) fn new(input: OwnedFd, output: Arc<Output>, waker: Arc<Waker>) -> io::Result<Self> {
        Ok(Self {
            input: Mutex::new(LineReader::new(nonblocking_reader(input)?)),
            output,
            signals: Mutex::new(Signals::beside_lisp()?),
            waker,
            state: Mutex::default(),
        })
    }

    /// Has the lines that it reads recorded.
    pub(crate) fn recorded(self, recorder: Option<Recorder>) -> Self {
        Self { input: Mutex::new(self.input.into_inner().recorded(recorder)), ..self }
    }

    /// Reads lines of up to `limit` bytes, before anything is served, until `take` takes one.
    ///
    /// # Errors
    /// When there is none within `time`, or it cannot be read.
    pub(crate) fn first_line<T>(
        &self,
        limit: usize,
        time: Duration,
        mut take: impl FnMut(&[u8]) -> Option<T>,
    ) -> io::Result<T> {
        let mut input = self.input.lock();
        input.limit = limit;
        let until = Instant::now() + time;
        loop {
            while let Some(line) = input.next_line() {
                if let Line::Text(text) = line
                    && let Some(taken) = take(text)
                {
                    input.limit = MAX_LINE;
                    return Ok(taken);
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut set = PollSet::new();
            set.read(Watched::Input, &*input);
            set.wait(Some(left))?;
            if input.read()? == Read::End {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Wakes the loop, which looks what is due: another thread may have added a timer.
    pub(crate) fn look_again(&self) {
        self.waker.wake();
    }

    /// Takes no more lines from here on: another process will.
    pub(crate) fn pause(&self) {
        self.state.lock().is_paused = true;
    }

    /// Begins the end, as at the end of input.
    fn end(&self, status: i32, within: Duration) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.ending.get_or_insert(Ending { status, answers: now + within, unwinding: now + LAST_ANSWERS + UNWINDING });
        // The last answer is the end.
        self.waker.wake_for_answers();
    }

    /// Until when what still runs at the end may unwind.
    pub(crate) fn unwinding_deadline(&self) -> Instant {
        self.state.lock().ending.map_or_else(Instant::now, |ending| ending.unwinding)
    }

    /// Serves to the end: the exit status.
    pub(crate) fn run(&self, service: &dyn Service) -> i32 {
        let mut input = self.input.lock();
        let mut descriptors = Descriptors { waker: true, signals: true };
        loop {
            let State { is_paused, ending } = *self.state.lock();
            let reads = ending.is_none() && !is_paused && self.output.takes_more();
            if reads && let Some(line) = input.next_line() {
                // What a call owes its client is settled by its responder.
                if panics::caught(|| service.line(line)).is_none() {
                    tracing::error!("a request panicked");
                }
                continue;
            }
            let now = Instant::now();
            let due = panics::caught(|| service.due(now)).flatten();
            if let Some(ending) = ending
                && (now >= ending.answers || service.is_idle())
            {
                return ending.status;
            }
            let unwoken = (!descriptors.waker).then(|| now + UNWOKEN);
            let wakes = [due, ending.map(|ending| ending.answers), unwoken].into_iter().flatten().min();
            let timeout = wakes.map(|time| time.saturating_duration_since(now));
            self.wait(&mut input, service, &mut descriptors, reads, timeout);
        }
    }

    /// Waits until something can be done, and does what concerns descriptors.
    fn wait(
        &self,
        input: &mut LineReader,
        service: &dyn Service,
        descriptors: &mut Descriptors,
        reads: bool,
        timeout: Option<Duration>,
    ) {
        let mut signals = self.signals.lock();
        let mut set = PollSet::new();
        let unsent = self.output.backlog() > 0;
        if unsent {
            set.write(Watched::Output, &*self.output);
        }
        if reads {
            set.read(Watched::Input, &*input);
        }
        if descriptors.waker {
            set.read(Watched::Waker, &*self.waker);
        }
        if descriptors.signals {
            set.read(Watched::Signals, &*signals);
        }
        // Evaluated code may have set a limit under which nothing can be waited for; reading and writing still tell.
        let ready = set.wait(timeout).ok();
        if ready.is_none() {
            std::thread::sleep(UNWOKEN);
        }
        let has = |name| ready.as_ref().is_some_and(|ready| ready.has(name));
        let writable = has(Watched::Output) || unsent && ready.is_none();
        let readable = has(Watched::Input) || reads && ready.is_none();
        let (woken, signalled) = (has(Watched::Waker), has(Watched::Signals));
        let lost_signals = ready.as_ref().is_some_and(|ready| ready.is_invalid(Watched::Signals));
        if woken {
            descriptors.waker = self.waker.clear();
        }
        if signalled {
            descriptors.signals = !lost_signals;
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
            let mut set = PollSet::new();
            set.write(Watched::Output, &*self.output);
            if left.is_zero() || set.wait(Some(left)).is_err() {
                return;
            }
            self.output.flush();
        }
    }
}

/// The loop's own descriptors that still work: evaluated code may close any.
#[derive(Debug)]
struct Descriptors {
    waker: bool,
    signals: bool,
}

/// The descriptors that the loop waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watched {
    Input,
    Output,
    Waker,
    Signals,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::inflight::{Inflight, Responder};
    use crate::rpc::output::Reader;
    use rmcp::model::RequestId;
    use serde_json::{Value, json};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Sender, channel};

    /// Answers a line with itself: at once, or, if it is the name of a time in ms, when it was evaluated for as long.
    struct Echo {
        inflight: Arc<Inflight>,
        work: Mutex<Sender<(u64, Responder)>>,
    }

    impl Service for Echo {
        fn line(&self, line: Line<'_>) {
            let Line::Text(text) = line else { panic!("too long") };
            let text = str::from_utf8(text).unwrap().trim();
            let owed = self.inflight.admit(RequestId::String(text.into()), 1, None, text.len()).unwrap();
            assert_ne!(text, "panic");
            match text.parse() {
                Ok(time) => self.work.lock().send((time, owed)).unwrap(),
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

    /// The other side, an evaluating thread, and the event loop's.
    struct Peer {
        writer: UnixStream,
        reader: BufReader<UnixStream>,
        serving: std::thread::JoinHandle<i32>,
    }

    impl Peer {
        fn new() -> Self {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let waker = Arc::new(Waker::new().unwrap());
            let output =
                Arc::new(Output::new(theirs.try_clone().unwrap().into(), Reader::Client, waker.clone()).unwrap());
            let driver = Driver::new(theirs.into(), output.clone(), waker).unwrap();
            let (work, jobs) = channel::<(u64, Responder)>();
            let service = Echo { inflight: Inflight::new(output), work: Mutex::new(work) };
            std::thread::spawn(move || {
                for (time, owed) in jobs {
                    std::thread::sleep(Duration::from_millis(time));
                    owed.answer(json!(time));
                }
            });
            let serving = std::thread::spawn(move || driver.run(&service));
            Self { reader: BufReader::new(ours.try_clone().unwrap()), writer: ours, serving }
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
            self.serving.join().unwrap()
        }
    }

    #[test]
    fn every_line_is_answered_in_its_order() {
        let mut peer = Peer::new();
        for round in 0..300 {
            let time = [0, 0, 1, 2, 3][round % 5];
            peer.send(&format!("{time}\n"));
            assert_eq!(peer.answer(), time.to_string());
        }
        assert_eq!(peer.end(), 0);
    }

    #[test]
    fn lines_are_taken_while_something_is_evaluated() {
        let mut peer = Peer::new();
        peer.send("300\n");
        for text in ["a", "b", "c"] {
            peer.send(&format!("{text}\n"));
            assert_eq!(peer.answer(), text);
        }
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
    fn what_was_asked_before_the_end_is_answered_and_is_the_end() {
        let mut peer = Peer::new();
        let begin = Instant::now();
        peer.send("20\nlast, without a newline");
        peer.writer.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!((peer.answer(), peer.answer()), ("last, without a newline".to_owned(), "20".to_owned()));
        assert_eq!(peer.serving.join().unwrap(), 0);
        assert!(begin.elapsed() < LAST_ANSWERS, "nothing else is waited for");
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
