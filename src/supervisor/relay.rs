//! The loop: what comes in on one side goes out on the other, and a worker that is lost is replaced.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, getpid};

use super::guests::{self, Event, Guests};
use super::recovery::Recovery;
use super::restart_policy::{RestartPolicy, Stage};
use super::shutdown::Shutdown;
use super::watchdog::Watchdog;
use super::worker_process::{self, WorkerProcess, cause, may_be_from_outside};
use super::{Options, messages, processes};
use crate::durable::Durable;
use crate::durable::lock::{Doing, Lock};
use crate::image::heap::LOST_TO_HEAP;
use crate::recovery::checkpoint::store::Checkpoint;
use crate::recovery::event::WorkerEvent;
use crate::recovery::state::Crash;
use crate::rpc::descriptors::{nonblocking_reader, nonblocking_writer};
use crate::rpc::frame::{Kind, Malformed};
use crate::rpc::framing::{Line, LineReader, MAX_LINE, Read};
use crate::rpc::inflight;
use crate::rpc::output::MAX_UNREAD;
use crate::rpc::route::{marked, notice};
use crate::rpc::signals::Signals;
use crate::rpc::{self, WriteBuffer};
use crate::session::recovery::failed;

/// With so many bytes of a client's requests unanswered, no more are read from that client. The worker refuses what is more
/// than may wait, and one line is on its way to it: so a cancellation comes through.
const MAX_REQUESTS: usize = inflight::MAX_BYTES + MAX_LINE + (1 << 20);

/// What is to be done before the next step.
#[must_use]
#[derive(Debug)]
enum Verdict {
    /// The worker is lost, or to be given up: another one takes its place.
    Replace(Crash),
    /// This call asks for a fresh image, with notices of the present one.
    Reset(u64, Vec<String>),
    /// This call asks for the image of a checkpoint, with notices of the present one.
    Return(u64, Box<Checkpoint>, Vec<String>),
    /// The server cannot start, for this reason.
    Fail(String),
    /// All is over.
    End,
}

type Step = Result<(), Verdict>;

/// Client, worker, and all that is remembered between workers.
#[derive(Debug)]
pub(super) struct Relay {
    input: Option<LineReader>,
    output: WriteBuffer,
    guests: Guests,
    signals: Signals,
    arguments: Vec<OsString>,
    worker: Option<WorkerProcess>,
    /// When the next worker is to be started.
    start_at: Instant,
    /// A worker has got as far as serving.
    has_served: bool,
    watchdog: Watchdog,
    restarts: RestartPolicy,
    recovery: Recovery,
    shutdown: Option<Shutdown>,
    /// The status that the last worker said it would end with.
    bye: Option<i32>,
    /// The session that lasts.
    durable: Option<(Durable, Lock)>,
    /// The process that saves it at the end, and outlives this one.
    saver: Option<Pid>,
}

impl Relay {
    pub(super) fn new(input: OwnedFd, output: OwnedFd, options: Options, recovery: Recovery) -> io::Result<Self> {
        Ok(Self {
            input: Some(LineReader::new(nonblocking_reader(input)?).recorded(options.recorder.clone())),
            output: WriteBuffer::new(nonblocking_writer(output)?).recorded(options.recorder),
            guests: Guests::new(options.listener),
            signals: Signals::new()?,
            arguments: options.arguments,
            worker: None,
            start_at: Instant::now(),
            has_served: false,
            watchdog: Watchdog::new(options.watch_interval),
            restarts: RestartPolicy::default(),
            recovery,
            shutdown: None,
            bye: None,
            durable: options.durable,
            saver: None,
        })
    }

    /// Relays to the end; returns the exit status.
    pub(super) fn run(mut self) -> i32 {
        loop {
            match self.step() {
                Ok(()) => {}
                Err(Verdict::Replace(crash)) => self.replace(crash),
                Err(Verdict::Reset(line, notices)) => {
                    self.put_aside(|recovery, worker| recovery.reset(&worker.status, line, notices));
                }
                Err(Verdict::Return(line, checkpoint, notices)) => self.put_aside(|recovery, worker| {
                    recovery.return_to(&worker.status, line, *checkpoint, notices);
                }),
                Err(Verdict::Fail(reason)) => self.fail(reason),
                Err(Verdict::End) => break,
            }
        }
        self.leave_processes();
        self.shutdown.map_or(0, |shutdown| shutdown.finish(&self.recovery.requests, &mut self.output, self.bye))
    }

    fn step(&mut self) -> Step {
        self.start_worker()?;
        let ready = self.wait()?;
        if ready.worker {
            self.read_worker()?;
        }
        if ready.signals
            && let Some(signal) = self.signals.take()
        {
            self.shut_down(128 + signal);
        }
        self.look_for_ends()?;
        if let Some(worker) = &mut self.worker
            && ready.worker_input
            && worker.write(&self.recovery.requests).is_err()
        {
            worker.input = None;
        }
        self.read_client(ready.input);
        self.attend_guests(&ready.guests);
        if ready.output && self.output.flush().is_err() {
            return Err(Verdict::End);
        }
        if let Some(worker) = &self.worker {
            let crash = self.watchdog.look(worker, &mut self.recovery.requests, self.shutdown.is_none());
            crash.map_or(Ok(()), |crash| Err(Verdict::Replace(crash)))?;
        }
        self.conclude()
    }

    /// Starts a worker where the last one stopped, if it is time to.
    fn start_worker(&mut self) -> Step {
        if self.worker.is_some() || self.shutdown.is_some() || Instant::now() < self.start_at {
            return Ok(());
        }
        // What the last image was saving when it ended, as have the processes that did it.
        self.recovery.checkpoints.remove_torn();
        let image = self.recovery.image();
        let started =
            worker_process::start(&self.arguments, image.as_deref(), self.durable.as_ref()).and_then(|mut worker| {
                self.recovery.hand_over(&mut worker)?;
                Ok(worker)
            });
        match started {
            Ok(worker) => {
                self.worker = Some(worker);
                self.watchdog = Watchdog::new(self.watchdog.interval);
                Ok(())
            }
            Err(error) => Err(Verdict::Replace(Crash::new(format!("cannot be started: {error}")))),
        }
    }

    /// Waits until something can be done.
    fn wait(&mut self) -> Result<Ready, Verdict> {
        let is_over = self.is_over();
        let takes_more =
            |connection| self.recovery.requests.bytes(connection) < MAX_REQUESTS && !self.is_busy_with(connection);
        let mut fds = Vec::with_capacity(5);
        let mut watch = |fd| {
            fds.push(fd);
            fds.len() - 1
        };
        let signals = watch(PollFd::new(&self.signals, PollFlags::IN));
        let worker = self.worker.as_ref().filter(|worker| worker.open);
        let worker = worker.map(|worker| watch(PollFd::new(worker, PollFlags::IN)));
        let input = self.input.as_ref().filter(|_| self.output.backlog() <= MAX_UNREAD && takes_more(0));
        let input = input.map(|input| watch(PollFd::new(input, PollFlags::IN)));
        let unsent = self.worker.as_ref().filter(|worker| worker.has_unsent());
        let unsent = unsent.and_then(|worker| worker.input.as_ref());
        let worker_input = unsent.map(|input| watch(PollFd::new(input, PollFlags::OUT)));
        let output = (!self.output.is_empty()).then(|| watch(PollFd::new(&self.output, PollFlags::OUT)));
        let guests = self.guests.watch(&mut fds, |connection| self.shutdown.is_none() && takes_more(connection));
        let due = match (&self.worker, &self.shutdown) {
            (None, Some(_)) if is_over => Some(Instant::now()),
            (_, Some(shutdown)) => Some(shutdown.deadline),
            (None, None) => Some(self.start_at),
            _ => None,
        };
        let is_watched = self.worker.as_ref().is_some_and(|worker| {
            !worker.ready || worker.unfinished().is_some() || self.recovery.requests.may_be_awaited()
        });
        let due = due.map(|due| due.saturating_duration_since(Instant::now()));
        let timeout = due.into_iter().chain(is_watched.then_some(self.watchdog.interval)).min();
        // A millisecond more: what is rounded down would spin.
        if let Err(error) = rpc::wait(&mut fds, timeout.map(|left| left + Duration::from_millis(1))) {
            return Err(Verdict::Fail(format!("the server cannot wait for input: {error}")));
        }
        let is_ready = |index: usize| !fds[index].revents().is_empty();
        Ok(Ready {
            signals: is_ready(signals),
            worker: worker.is_some_and(is_ready),
            input: input.is_some_and(is_ready),
            worker_input: worker_input.is_some_and(is_ready),
            output: output.is_some_and(is_ready),
            guests: guests.ready(is_ready),
        })
    }

    /// Reads once what the worker says.
    fn read_worker(&mut self) -> Step {
        let Some(worker) = &mut self.worker else { return Ok(()) };
        worker.read();
        loop {
            let Self { worker: Some(worker), output, guests, recovery, restarts, .. } = self else { return Ok(()) };
            let is_ready = worker.ready;
            let Some((kind, call, payload)) = worker.next_frame().map_err(malformed)? else { break };
            match kind {
                Kind::Event => match WorkerEvent::decode(payload) {
                    Ok(event) => self.take_event(event)?,
                    Err(error) => report_unreadable(worker, &error),
                },
                _ if !is_ready => return Err(malformed(Malformed)),
                Kind::Answer => {
                    let unread = recovery.requests.connection(call).filter(|it| is_unread(output, guests, *it));
                    let error = unread.and_then(|_| messages::unread(recovery.requests.text(call)?));
                    let answer = error.as_deref().unwrap_or(payload);
                    match recovery.finished(call) {
                        Some(0) => output.put(answer).map_err(|_| Verdict::End)?,
                        Some(connection) => guests.send(connection, answer),
                        // Somebody was told already, or does not want to be.
                        None => continue,
                    }
                    restarts.answered();
                }
                Kind::Message if is_unread(output, guests, call) => {}
                Kind::Message if call == 0 => output.put(payload).map_err(|_| Verdict::End)?,
                Kind::Message => guests.send(call, payload),
                Kind::Done => drop(recovery.finished(call)),
            }
        }
        if let Some(worker) = self.worker.as_ref().filter(|worker| !worker.open && worker.bye.is_none()) {
            // If it lives, it cannot speak: its descriptors were closed under it.
            processes::kill(worker.pid, getpid());
        }
        Ok(())
    }

    /// Takes an event of the worker's.
    fn take_event(&mut self, event: WorkerEvent) -> Step {
        let Self { worker: Some(worker), recovery, .. } = self else { return Ok(()) };
        match event {
            WorkerEvent::Ready if !worker.ready => {
                worker.ready = true;
                self.has_served = true;
                recovery.requests.apply_cancellations();
                if let Some(input) = &mut worker.input {
                    for (_, connection, line) in recovery.requests.iter() {
                        // One that is gone already is noticed elsewhere.
                        let _ = input.put(&marked(connection, line));
                    }
                }
            }
            WorkerEvent::Leaving { status, reason } => {
                worker.bye = Some(status);
                match reason {
                    _ if self.shutdown.is_some() => {}
                    Some(reason) if !self.has_served => return Err(Verdict::Fail(reason)),
                    Some(reason) => return Err(Verdict::Replace(Crash::new(format!("cannot be started: {reason}")))),
                    // Nobody asked it to leave.
                    None => return Err(Verdict::Replace(Crash::new("lost its connection and was ended"))),
                }
            }
            WorkerEvent::SaverStarted { pid } => self.saver = Pid::from_raw(pid),
            _ if !worker.ready => return Err(malformed(Malformed)),
            WorkerEvent::Restored { failed } if !worker.restored => {
                recovery.restored(&failed);
                worker.restored = true;
            }
            WorkerEvent::ResetRequested { call, notices } if recovery.may_replace(call) => {
                return Err(Verdict::Reset(call, notices));
            }
            WorkerEvent::RestoreRequested { call, checkpoint, notices } if recovery.may_replace(call) => {
                return Err(Verdict::Return(call, checkpoint, notices));
            }
            WorkerEvent::Stuck { outcome, why } => {
                return Err(Verdict::Replace(Crash::stuck(outcome, why, worker.restored)));
            }
            WorkerEvent::Changed(event) => recovery.record(event),
            WorkerEvent::ResetRequested { .. }
            | WorkerEvent::RestoreRequested { .. }
            | WorkerEvent::Restored { .. }
            | WorkerEvent::Ready => return Err(malformed(Malformed)),
        }
        Ok(())
    }

    /// Looks for processes that have ended: the worker, once it has said its last words, and what it has left behind.
    fn look_for_ends(&mut self) -> Step {
        while let Some((pid, status)) = processes::ended() {
            if let Some(worker) = &mut self.worker
                && worker.pid == pid
            {
                worker.ended = Some(status);
            }
        }
        let Some(status) = self.worker.as_ref().and_then(|worker| worker.ended) else { return Ok(()) };
        loop {
            let before = self.worker.as_ref().map(|worker| worker.received);
            self.read_worker()?;
            if self.worker.as_ref().map(|worker| worker.received) == before {
                break;
            }
        }
        let crash = Crash::new(cause(status));
        let crash = if may_be_from_outside(status) { crash.killed() } else { crash };
        let by_heap = status.exit_status() == Some(LOST_TO_HEAP);
        Err(Verdict::Replace(
            crash.during(by_heap.then(|| failed("HEAP-EXHAUSTED", "The heap was used up".to_owned()))),
        ))
    }

    /// Takes the client's lines, and reads once if more are there, unless a long line is being handed on.
    fn read_client(&mut self, is_readable: bool) {
        self.take_lines();
        if !is_readable || self.is_busy_with(0) {
            return;
        }
        let Some(client) = &mut self.input else { return };
        let read = client.read();
        self.take_lines();
        if !read.is_ok_and(|read| read != Read::End) {
            self.shut_down(0);
        }
    }

    fn take_lines(&mut self) {
        let Self { input: Some(client), worker, recovery, output, .. } = self else { return };
        while !worker.as_ref().is_some_and(|worker| worker.is_busy_with(0))
            && let Some(line) = client.next_line()
        {
            match line {
                Line::Text(line) => hand_on(worker, recovery, 0, line),
                Line::TooLong(id) => drop(output.put(&messages::too_long(id))),
            }
        }
    }

    /// True while a long line of this connection's is being handed on.
    fn is_busy_with(&self, connection: u64) -> bool {
        self.worker.as_ref().is_some_and(|worker| worker.is_busy_with(connection))
    }

    /// Looks who joins or leaves, and what those say that have joined.
    fn attend_guests(&mut self, ready: &guests::Ready) {
        let Self { guests, recovery, worker, .. } = self;
        let mut too_long = Vec::new();
        guests.attend(ready, |connection, event| {
            match event {
                Event::Reads => {}
                Event::Joined => recovery.join(connection),
                Event::Said(Line::Text(line)) => hand_on(worker, recovery, connection, line),
                Event::Said(Line::TooLong(id)) => too_long.push((connection, id)),
                Event::Left => {
                    recovery.leave(connection);
                    if let Some(worker) = worker.as_mut().filter(|worker| worker.ready) {
                        worker.drop_lines_of(connection);
                        worker.hand_on(connection, recovery.requests.next() - 1, b"");
                    }
                }
            }
            !worker.as_ref().is_some_and(|worker| worker.is_busy_with(connection))
        });
        for (connection, id) in too_long {
            guests.send(connection, &messages::too_long(id));
        }
    }

    /// Ends the processes that descend from this one, but for what saves a session that lasts.
    fn leave_processes(&mut self) {
        if self.durable.is_some() && self.shutdown.as_ref().is_some_and(|shutdown| !shutdown.until_asked) {
            // Whatever it has still to say: it may be about that.
            let _ = self.read_worker();
            let worker = self.worker.as_ref().filter(|worker| worker.ready).map(|worker| worker.pid);
            processes::end_all_but(&[worker, self.saver].into_iter().flatten().collect::<Vec<_>>());
        } else {
            processes::end_all();
        }
    }

    /// Begins the end: nothing more is read, and what runs has a moment.
    fn shut_down(&mut self, status: i32) {
        self.input = None;
        self.guests.close();
        if let Some((_, lock)) = &mut self.durable {
            lock.say(Doing::Saving);
        }
        if self.shutdown.is_none() {
            self.shutdown = Some(Shutdown::graceful(status));
        }
    }

    /// Begins the end of a server that cannot go on.
    fn fail(&mut self, reason: String) {
        processes::end_all();
        self.worker = None;
        self.shutdown.get_or_insert_with(|| Shutdown::failure(reason));
    }

    /// True when the end has begun and nothing is left that it would wait for.
    fn is_over(&mut self) -> bool {
        let Some(shutdown) = &self.shutdown else { return false };
        self.worker.is_none()
            && (!shutdown.until_asked || self.input.is_none() || self.recovery.requests.first_awaited().is_some())
    }

    /// What is due at the end.
    fn conclude(&mut self) -> Step {
        let Some(shutdown) = &self.shutdown else { return Ok(()) };
        if let Some(worker) = &mut self.worker
            && worker.ready
            && !worker.has_unsent()
        {
            // The worker sees the end of input.
            worker.input = None;
        }
        let deadline = shutdown.deadline;
        if self.is_over() || Instant::now() >= deadline { Err(Verdict::End) } else { Ok(()) }
    }

    /// Ends what is left of a worker that is lost, and has another one started, unless all is over or there is no point
    /// in that.
    fn replace(&mut self, crash: Crash) {
        if self.shutdown.is_some() {
            self.leave_processes();
            self.bye = self.worker.take().and_then(|worker| worker.bye);
            return;
        }
        processes::end_all();
        let worker = self.worker.take();
        let cause = crash.cause.clone();
        tracing::warn!("the Lisp image {cause}");
        let stage = match &worker {
            Some(worker) if worker.restored => Stage::Serving,
            Some(worker) if worker.bye.is_none() => Stage::Starting,
            _ => Stage::Unstarted,
        };
        if let Some(worker) = worker
            && self.recovery.lost(&worker.status, worker.restored, &crash)
        {
            self.start_at = Instant::now();
            return;
        }
        match self.restarts.lost(stage, Instant::now()) {
            Ok(at) => self.start_at = at,
            Err(times) => {
                let reason = format!("the Lisp image was lost {times} (the last one {cause}); the server gives up");
                tracing::error!("{reason}");
                self.fail(reason);
            }
        }
    }

    /// Another image in place of this one, of which that is remembered.
    fn put_aside(&mut self, remember: impl FnOnce(&mut Recovery, &WorkerProcess)) {
        if let Some(worker) = self.worker.take() {
            remember(&mut self.recovery, &worker);
        }
        processes::end_all();
        self.start_at = Instant::now();
    }
}

/// Reports an event that cannot be read, on stderr and to the server's client: the next image may lack what it said.
fn report_unreadable(worker: &mut WorkerProcess, error: &serde_json::Error) {
    tracing::error!("the worker reported an event that cannot be read: {error}");
    let text = format!("The supervisor could not read what the image reported ({error}): the next image may lack it.");
    if let Some(input) = &mut worker.input {
        // A worker that is gone already is noticed elsewhere.
        let _ = input.put(&notice(0, &text));
    }
}

/// A worker that wrote what no worker writes.
fn malformed(_: Malformed) -> Verdict {
    Verdict::Replace(Crash::new("wrote to a pipe that it must not write to, and was ended"))
}

/// True when a client leaves so much unread that its answers become errors.
fn is_unread(output: &WriteBuffer, guests: &Guests, connection: u64) -> bool {
    let backlog = if connection == 0 { output.backlog() } else { guests.backlog(connection) };
    backlog > MAX_UNREAD
}

/// Takes a line that was just read, and hands it on. A worker that is not ready gets all lines when it is.
fn hand_on(worker: &mut Option<WorkerProcess>, recovery: &mut Recovery, connection: u64, line: &[u8]) {
    recovery.requests.add(connection, line);
    if let Some(worker) = worker.as_mut().filter(|worker| worker.ready) {
        worker.hand_on(connection, recovery.requests.next() - 1, line);
    }
}

/// What can be done without waiting.
#[derive(Debug)]
struct Ready {
    signals: bool,
    worker: bool,
    input: bool,
    worker_input: bool,
    output: bool,
    guests: guests::Ready,
}
