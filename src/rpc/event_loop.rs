//! The event loop: one thread polls, reads lines and dispatches them.
//!
//! The thread is not a Lisp thread, so a garbage collection does not stop it: requests that need no Lisp are always
//! answered.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::descriptors::nonblocking_reader;
use super::framing::{Line, LineReader, MAX_LINE, ReadStatus};
use super::output::{self, Output};
use super::recorder::Recorder;
use super::signals::Signals;
use super::waker::Waker;
use crate::os::panics;
use crate::os::poll_set::PollSet;

/// Grace period for the answers to requests that were read before the shutdown began.
const ANSWER_GRACE_PERIOD: Duration = Duration::from_millis(700);
/// Grace period for running evaluations to unwind, after [`ANSWER_GRACE_PERIOD`]. With these periods, the process exits
/// within a second of the end of input. If no request is pending, unwinding begins at once.
const UNWINDING_GRACE_PERIOD: Duration = Duration::from_millis(150);
/// Poll interval while the loop waits for an event that wakes it through no descriptor: after the wake-up descriptor is lost,
/// since evaluated code may close any descriptor, and while a process that is being replaced waits for its end.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The server that an event loop drives. The loop calls one function at a time.
pub(crate) trait Service: Send + Sync {
    /// Handles one line from the client.
    fn handle_line(&self, line: Line<'_>);
    /// Returns false while too many lines wait in the service, so that the loop reads no more. The service wakes the loop
    /// when fewer lines wait.
    fn accepts_lines(&self) -> bool {
        true
    }
    /// Runs timers that have expired by `now`, but not so many that lines have to wait. Returns the time of the next
    /// timer, which may have expired, too.
    fn run_timers(&self, now: Instant) -> Option<Instant>;
    /// Returns true if no request waits for an answer.
    fn is_idle(&self) -> bool;
    /// Returns true if SIGTERM, SIGINT and SIGHUP end this process.
    fn exits_on_signal(&self) -> bool;
    /// Returns true if the process that started and ends this process is gone.
    fn is_orphaned(&self) -> bool {
        false
    }
}

/// The event loop, which reads lines, passes each line to a [`Service`], and flushes the output.
#[derive(Debug)]
pub(crate) struct EventLoop {
    input: Mutex<LineReader>,
    output: Arc<Output>,
    signals: Mutex<Signals>,
    waker: Arc<Waker>,
    state: Mutex<LoopState>,
}

#[derive(Debug, Default, Clone, Copy)]
struct LoopState {
    /// True after [`EventLoop::begin_replacement`].
    is_being_replaced: bool,
    stage: LoopStage,
}

/// The stage of an event loop.
#[derive(Debug, Default, Clone, Copy)]
enum LoopStage {
    /// The loop reads lines.
    #[default]
    Reading,
    /// The input of a process that is being replaced has ended. The process waits until its supervisor ends it.
    AwaitingReplacement,
    /// The shutdown has begun: the loop reads nothing more.
    ShuttingDown(Shutdown),
}

impl LoopStage {
    /// Returns the shutdown, once it has begun.
    fn shutdown(self) -> Option<Shutdown> {
        if let Self::ShuttingDown(shutdown) = self { Some(shutdown) } else { None }
    }
}

/// A shutdown in progress.
#[derive(Debug, Clone, Copy)]
struct Shutdown {
    /// The exit status of the process.
    status: i32,
    /// The time after which no request is answered.
    answer_deadline: Instant,
    /// The time by which running evaluations must have unwound.
    unwinding_deadline: Instant,
}

impl EventLoop {
    /// Creates a loop that reads `input` and flushes `output`. `output` must have been created with the same `waker`.
    pub(crate) fn new(input: OwnedFd, output: Arc<Output>, waker: Arc<Waker>) -> io::Result<Self> {
        Ok(Self {
            input: Mutex::new(LineReader::new(nonblocking_reader(input)?)),
            output,
            signals: Mutex::new(Signals::in_lisp_process()?),
            waker,
            state: Mutex::default(),
        })
    }

    /// Sets the recorder, which records every line that the loop reads.
    pub(crate) fn with_recorder(self, recorder: Option<Recorder>) -> Self {
        Self { input: Mutex::new(self.input.into_inner().with_recorder(recorder)), ..self }
    }

    /// Reads lines before the loop runs, until `take` returns a value for one of them, and returns this value. Lines of
    /// more than `limit` bytes are skipped.
    ///
    /// # Errors
    /// Returns an error if `take` returns no value within `time` or before the end of input, or if reading fails.
    pub(crate) fn find_line<T>(
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
                    && let Some(taken) = take(&text)
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
            set.add_read(LoopSource::Input, &*input);
            set.wait(Some(left))?;
            if input.read()? == ReadStatus::End {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Wakes the loop so that it runs expired timers: another thread may have added a timer.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Records that another process will replace this process and handle the lines that the service leaves unanswered. The
    /// loop continues to read lines, since clients may wait for answers that need no Lisp. Returns false if this was
    /// recorded before.
    pub(crate) fn begin_replacement(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().is_being_replaced, true)
    }

    /// Returns true after [`begin_replacement`](Self::begin_replacement).
    pub(crate) fn is_being_replaced(&self) -> bool {
        self.state.lock().is_being_replaced
    }

    /// Begins the shutdown, because the input has ended. A process that is being replaced instead waits until its supervisor
    /// ends it, or until it is orphaned: a final save by this process would undo the reset or restore that the process has
    /// requested.
    fn handle_end_of_input(&self) {
        let mut state = self.state.lock();
        if state.is_being_replaced && matches!(state.stage, LoopStage::Reading) {
            state.stage = LoopStage::AwaitingReplacement;
        } else {
            drop(state);
            self.begin_shutdown(0, ANSWER_GRACE_PERIOD);
        }
    }

    /// Begins the shutdown with this exit status. Pending requests may be answered for the time `within`. Has no effect
    /// after the first call.
    fn begin_shutdown(&self, status: i32, within: Duration) {
        let mut state = self.state.lock();
        if state.stage.shutdown().is_none() {
            let now = Instant::now();
            state.stage = LoopStage::ShuttingDown(Shutdown {
                status,
                answer_deadline: now + within,
                unwinding_deadline: now + ANSWER_GRACE_PERIOD + UNWINDING_GRACE_PERIOD,
            });
        }
        // From now on, each answer must wake the loop, which ends with the last answer.
        self.waker.wake_for_answers();
    }

    /// Returns the time by which evaluations that still run must have unwound. Before a shutdown, this is the current time.
    pub(crate) fn unwinding_deadline(&self) -> Instant {
        self.state.lock().stage.shutdown().map_or_else(Instant::now, |shutdown| shutdown.unwinding_deadline)
    }

    /// Runs until the shutdown is complete. Returns the exit status.
    pub(crate) fn run(&self, service: &dyn Service) -> i32 {
        let mut input = self.input.lock();
        let mut descriptors = UsableDescriptors { waker: true, signals: true };
        loop {
            let stage = self.state.lock().stage;
            let may_read =
                matches!(stage, LoopStage::Reading) && self.output.accepts_requests() && service.accepts_lines();
            if may_read && let Some(line) = input.next_line() {
                handle_line(service, line);
                continue;
            }
            let awaits_replacement = matches!(stage, LoopStage::AwaitingReplacement);
            if awaits_replacement && service.is_orphaned() {
                self.begin_shutdown(0, Duration::ZERO);
                continue;
            }
            let now = Instant::now();
            let next_timer = panics::catch(|| service.run_timers(now)).flatten();
            let shutdown = stage.shutdown();
            if let Some(shutdown) = shutdown
                && (now >= shutdown.answer_deadline || service.is_idle())
            {
                return shutdown.status;
            }
            let next_poll = (awaits_replacement || !descriptors.waker).then(|| now + POLL_INTERVAL);
            let deadline =
                [next_timer, shutdown.map(|shutdown| shutdown.answer_deadline), next_poll].into_iter().flatten().min();
            let timeout = deadline.map(|time| time.saturating_duration_since(now));
            self.wait(&mut input, service, &mut descriptors, may_read, timeout);
        }
    }

    /// After [`run`](Self::run), passes to `service` the lines that the client has written and the loop has not handled: after
    /// a signal, the loop reads nothing more. Too many lines may wait in the service already, but it now refuses all of them.
    /// Stops after `time`, since the client may continue to write.
    pub(crate) fn handle_unread(&self, service: &dyn Service, time: Duration) {
        let mut input = self.input.lock();
        let end = Instant::now() + time;
        while Instant::now() < end && self.output.accepts_requests() {
            if let Some(line) = input.next_line() {
                handle_line(service, line);
                continue;
            }
            if !matches!(input.read(), Ok(ReadStatus::More)) {
                return;
            }
        }
    }

    /// Polls until a descriptor is ready or `timeout` expires, and handles the ready descriptors.
    fn wait(
        &self,
        input: &mut LineReader,
        service: &dyn Service,
        descriptors: &mut UsableDescriptors,
        may_read: bool,
        timeout: Option<Duration>,
    ) {
        let mut signals = self.signals.lock();
        let mut set = PollSet::new();
        let has_backlog = self.output.backlog() > 0;
        if has_backlog {
            set.add_write(LoopSource::Output, &*self.output);
        }
        if may_read {
            set.add_read(LoopSource::Input, &*input);
        }
        if descriptors.waker {
            set.add_read(LoopSource::Waker, &*self.waker);
        }
        if descriptors.signals {
            set.add_read(LoopSource::Signals, &*signals);
        }
        // Poll fails if evaluated code has lowered RLIMIT_NOFILE. Reading and writing still work without a poll.
        let ready = set.wait(timeout).ok();
        if ready.is_none() {
            std::thread::sleep(POLL_INTERVAL);
        }
        let has = |name| ready.as_ref().is_some_and(|ready| ready.has(name));
        let writable = has(LoopSource::Output) || has_backlog && ready.is_none();
        let readable = has(LoopSource::Input) || may_read && ready.is_none();
        let (woken, signalled) = (has(LoopSource::Waker), has(LoopSource::Signals));
        let lost_signals = ready.as_ref().is_some_and(|ready| ready.is_invalid(LoopSource::Signals));
        if woken {
            descriptors.waker = self.waker.clear();
        }
        if signalled {
            descriptors.signals = !lost_signals;
            if let Some(signal) = signals.take()
                && service.exits_on_signal()
            {
                self.begin_shutdown(128 + signal, ANSWER_GRACE_PERIOD);
            }
        }
        if writable {
            self.output.flush();
        }
        if self.output.is_broken() {
            self.begin_shutdown(0, Duration::ZERO);
        }
        if readable {
            match input.read() {
                Ok(ReadStatus::More | ReadStatus::Nothing) => {}
                Ok(ReadStatus::End) => self.handle_end_of_input(),
                Err(error) => {
                    tracing::debug!(%error, "the client's input cannot be read");
                    self.handle_end_of_input();
                }
            }
        }
    }

    /// If the backlog is so large that the loop reads nothing, writes the backlog as [`drain`](Self::drain) does.
    pub(crate) fn drain_excess(&self, time: Duration) {
        if !self.output.accepts_requests() {
            self.drain(time);
        }
    }

    /// Writes the backlog until it is empty, the output is broken, or `time` has passed.
    pub(crate) fn drain(&self, time: Duration) {
        output::drain(std::slice::from_ref(&self.output), Instant::now() + time);
    }
}

/// Has `service` handle a line, even if the handling panics.
fn handle_line(service: &dyn Service, line: Line<'_>) {
    // Unwinding drops the call's `Responder`, which answers the client.
    if panics::catch(|| service.handle_line(line)).is_none() {
        tracing::error!(
            "a panic ended the handling of a request: please report this bug, with the message of the panic"
        );
    }
}

/// The loop's own descriptors. A field is true until user code has closed the descriptor.
#[derive(Debug)]
struct UsableDescriptors {
    waker: bool,
    signals: bool,
}

/// The descriptors that the loop polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoopSource {
    Input,
    Output,
    Waker,
    Signals,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::inflight::{Inflight, Responder};
    use crate::rpc::output::Recipient;
    use rmcp::model::RequestId;
    use serde_json::{Value, json};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Sender, channel};

    /// A service that answers each line with the line itself: at once, or, if the line is a number, after this number of
    /// milliseconds, on another thread.
    struct Echo {
        inflight: Arc<Inflight>,
        jobs_sender: Mutex<Sender<(u64, Responder)>>,
        is_orphaned: Arc<AtomicBool>,
    }

    impl Service for Echo {
        fn handle_line(&self, line: Line<'_>) {
            let Line::Text(text) = line else { panic!("too long") };
            let text = str::from_utf8(&text).unwrap().trim();
            let responder = self.inflight.admit(RequestId::String(text.into()), 1, None, text.len()).unwrap();
            assert_ne!(text, "panic");
            match text.parse() {
                Ok(time) => self.jobs_sender.lock().send((time, responder)).unwrap(),
                Err(_) => responder.answer(json!(text)),
            }
        }

        fn run_timers(&self, now: Instant) -> Option<Instant> {
            self.inflight.run_timers(now)
        }

        fn is_idle(&self) -> bool {
            self.inflight.is_idle()
        }

        fn exits_on_signal(&self) -> bool {
            false
        }

        fn is_orphaned(&self) -> bool {
            self.is_orphaned.load(Ordering::Relaxed)
        }
    }

    /// A service in which too many lines wait. It collects further lines.
    #[derive(Default)]
    struct Full(Mutex<Vec<String>>);

    impl Service for Full {
        fn handle_line(&self, line: Line<'_>) {
            let Line::Text(text) = line else { panic!("too long") };
            self.0.lock().push(str::from_utf8(&text).unwrap().trim().to_owned());
        }

        fn accepts_lines(&self) -> bool {
            false
        }

        fn run_timers(&self, _: Instant) -> Option<Instant> {
            None
        }

        fn is_idle(&self) -> bool {
            true
        }

        fn exits_on_signal(&self) -> bool {
            false
        }
    }

    /// A client, connected to an event loop that runs on a thread of its own.
    struct TestClient {
        writer: UnixStream,
        reader: BufReader<UnixStream>,
        event_loop: Arc<EventLoop>,
        is_orphaned: Arc<AtomicBool>,
        serving: std::thread::JoinHandle<i32>,
    }

    impl TestClient {
        fn new() -> Self {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let waker = Arc::new(Waker::new().unwrap());
            let output =
                Arc::new(Output::new(theirs.try_clone().unwrap().into(), Recipient::Client, waker.clone()).unwrap());
            let event_loop = Arc::new(EventLoop::new(theirs.into(), output.clone(), waker).unwrap());
            let (jobs_sender, jobs) = channel::<(u64, Responder)>();
            let is_orphaned = Arc::new(AtomicBool::new(false));
            let service = Echo {
                inflight: Inflight::new(output),
                jobs_sender: Mutex::new(jobs_sender),
                is_orphaned: is_orphaned.clone(),
            };
            std::thread::spawn(move || {
                for (time, responder) in jobs {
                    std::thread::sleep(Duration::from_millis(time));
                    responder.answer(json!(time));
                }
            });
            let running_loop = event_loop.clone();
            let serving = std::thread::spawn(move || running_loop.run(&service));
            Self { reader: BufReader::new(ours.try_clone().unwrap()), writer: ours, event_loop, is_orphaned, serving }
        }

        fn send(&mut self, text: &str) {
            self.writer.write_all(text.as_bytes()).unwrap();
        }

        /// Reads the next answer and returns its id.
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
    fn lines_are_answered_in_order() {
        let mut client = TestClient::new();
        for round in 0..300 {
            let time = [0, 0, 1, 2, 3][round % 5];
            client.send(&format!("{time}\n"));
            assert_eq!(client.answer(), time.to_string());
        }
        assert_eq!(client.end(), 0);
    }

    #[test]
    fn lines_are_answered_during_an_evaluation() {
        let mut client = TestClient::new();
        client.send("300\n");
        for text in ["a", "b", "c"] {
            client.send(&format!("{text}\n"));
            assert_eq!(client.answer(), text);
        }
        assert_eq!(client.answer(), "300");
        client.send("0\n");
        assert_eq!(client.answer(), "0");
        assert_eq!(client.end(), 0);
    }

    #[test]
    fn a_panicking_request_is_answered_and_the_loop_continues() {
        let mut client = TestClient::new();
        client.send("panic\nafter\n");
        assert_eq!((client.answer(), client.answer()), ("panic".to_owned(), "after".to_owned()));
        assert_eq!(client.end(), 0);
    }

    #[test]
    fn requests_before_the_end_of_input_are_answered_before_the_loop_ends() {
        let mut client = TestClient::new();
        let begin = Instant::now();
        client.send("20\nlast, without a newline");
        client.writer.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!((client.answer(), client.answer()), ("last, without a newline".to_owned(), "20".to_owned()));
        assert_eq!(client.serving.join().unwrap(), 0);
        assert!(begin.elapsed() < ANSWER_GRACE_PERIOD, "nothing else is waited for");
    }

    #[test]
    fn unread_lines_are_handled_at_the_end_although_too_many_lines_wait() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let waker = Arc::new(Waker::new().unwrap());
        let output = Output::new(theirs.try_clone().unwrap().into(), Recipient::Client, waker.clone()).unwrap();
        let event_loop = EventLoop::new(theirs.into(), Arc::new(output), waker).unwrap();
        ours.write_all(b"a\nb\nc\n").unwrap();
        let service = Full::default();
        event_loop.handle_unread(&service, Duration::from_secs(60));
        assert_eq!(*service.0.lock(), ["a", "b", "c"]);
    }

    /// The supervisor ends a process that it replaces, unless the supervisor is killed first.
    #[test]
    fn a_process_that_is_being_replaced_ends_after_its_input_only_if_it_is_orphaned() {
        let client = TestClient::new();
        client.event_loop.begin_replacement();
        client.writer.shutdown(std::net::Shutdown::Write).unwrap();
        let begin = Instant::now();
        while !matches!(client.event_loop.state.lock().stage, LoopStage::AwaitingReplacement) {
            assert!(begin.elapsed() < Duration::from_secs(60), "the loop does not notice the end of its input");
            std::thread::yield_now();
        }
        assert!(!client.serving.is_finished());
        client.is_orphaned.store(true, Ordering::Relaxed);
        assert_eq!(client.serving.join().unwrap(), 0);
    }

    #[test]
    fn a_client_that_does_not_read_does_not_block_the_loop() {
        let mut client = TestClient::new();
        let mut writer = client.writer.try_clone().unwrap();
        let lines = std::thread::spawn(move || {
            for line in 0..20_000 {
                writer.write_all(format!("line {line} {}\n", "x".repeat(100)).as_bytes()).unwrap();
            }
        });
        // The loop reads everything, far more than a socket buffer holds, though the client reads nothing.
        lines.join().unwrap();
        for line in 0..20_000 {
            assert!(client.answer().starts_with(&format!("line {line} ")));
        }
        assert_eq!(client.end(), 0);
    }
}
