//! The loop: what comes in on one side goes out on the other, and a worker that is gone is replaced.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::WaitStatus;

use super::journal::Journal;
use super::requests::Requests;
use super::watchdog::{self, Watchdog};
use super::worker_process::{Command, Frame, WorkerProcess, cause};
use super::{processes, refusal};
use crate::config::Limits;
use crate::handover::board::Slot;
use crate::handover::frame::Kind;
use crate::handover::{ErrorChange, Handover, Loss, Restored, line_of_job};
use crate::image::heap::LOST_TO_HEAP;
use crate::rpc::descriptors::{nonblocking_reader, nonblocking_writer};
use crate::rpc::framing::{Line, LineReader, MAX_LINE, Read};
use crate::rpc::signals::Signals;
use crate::rpc::{self, WriteBuffer};
use crate::session::restore::{Errors, failed};

/// With so many bytes of requests unanswered, no more are read.
const MAX_REQUESTS: usize = 96 << 20;
/// With so many bytes unread by the client, nothing is read from the worker.
const MAX_ANSWERS: usize = 1 << 20;
/// How long everything may take from the end of input, or a signal, to the end.
const LAST_WORDS: Duration = Duration::from_millis(900);
/// How long the client may take to read the last answers.
const FAREWELL: Duration = Duration::from_millis(50);
/// How long a worker that said goodbye may take to be gone.
const DEPARTURE: Duration = Duration::from_millis(300);
/// So many workers may die without an answer in between, as long as each of them got as far as serving.
const MAX_DEATHS: usize = 20;
/// So many may die before they serve.
const MAX_EARLY_DEATHS: usize = 5;
/// The time within which deaths are counted.
const DEATHS_WITHIN: Duration = Duration::from_secs(10);

/// Why the relay stops.
#[derive(Debug, Clone, Copy)]
struct Ending {
    status: i32,
    deadline: Instant,
}

/// A worker's death that no answer has followed yet.
#[derive(Debug, Clone, Copy)]
struct Death {
    at: Instant,
    early: bool,
}

/// What the relay does next.
enum Next {
    GoOn,
    /// Ends with this status.
    End(i32),
}

/// Client, worker, and all that is remembered between workers.
#[derive(Debug)]
pub(super) struct Relay {
    input: Option<LineReader>,
    output: WriteBuffer,
    signals: Signals,
    command: Command,
    worker: WorkerProcess,
    watchdog: Watchdog,
    /// How the worker ended, if it did.
    ended: Option<WaitStatus>,
    ending: Option<Ending>,
    deaths: Vec<Death>,
    memory: Memory,
}

/// What outlives a worker.
#[derive(Debug)]
struct Memory {
    requests: Requests,
    handshake: Vec<String>,
    /// What belongs to the handshake once its line is answered.
    keep: Vec<(u64, String)>,
    limits: Option<Limits>,
    errors: Errors,
    /// `None` when nothing is to be restored.
    journal: Option<Journal>,
    through: u64,
    /// The number of the newest evaluation.
    evaluations: u64,
    loss: Option<Loss>,
    reset: Option<u64>,
    /// What the image before the reset had to say yet, until the one after it has heard of it.
    notices: Vec<String>,
}

/// What a frame asks of the relay.
enum Wish {
    /// A fresh image, which says what this one had to say yet.
    Reset(u64, Vec<String>),
    /// An end to an image that cannot be stopped.
    Stuck(Option<Box<crate::Outcome>>),
}

impl Relay {
    pub(super) fn start(input: OwnedFd, output: OwnedFd, command: Command, restore: bool) -> io::Result<Self> {
        let signals = Signals::new()?;
        let memory = Memory {
            requests: Requests::new(),
            handshake: Vec::new(),
            keep: Vec::new(),
            limits: None,
            errors: Errors::default(),
            journal: restore.then(Journal::default),
            through: 0,
            evaluations: 0,
            loss: None,
            reset: None,
            notices: Vec::new(),
        };
        let mut worker = command.start()?;
        memory.hand_over(&mut worker)?;
        Ok(Self {
            input: Some(LineReader::new(nonblocking_reader(input)?)),
            output: WriteBuffer::new(nonblocking_writer(output)?),
            signals,
            command,
            worker,
            watchdog: Watchdog::new(),
            ended: None,
            ending: None,
            deaths: Vec::new(),
            memory,
        })
    }

    /// Relays to the end; returns the exit status.
    pub(super) fn run(mut self) -> io::Result<i32> {
        loop {
            if let Next::End(status) = self.step()? {
                self.worker.kill();
                return Ok(status);
            }
        }
    }

    fn step(&mut self) -> io::Result<Next> {
        let ready = self.wait()?;
        if ready.worker && self.read_worker()?.is_none() {
            return Ok(Next::End(self.ending.map_or(0, |ending| ending.status)));
        }
        if ready.signals
            && let Some(signal) = self.signals.take()
        {
            self.end(128 + signal, LAST_WORDS);
        }
        if ready.signals || !self.worker.open {
            while let Some((pid, status)) = processes::ended() {
                if pid == self.worker.pid && !self.worker.gone {
                    self.worker.gone = true;
                    self.ended = Some(status);
                }
            }
        }
        if let Some(status) = self.ended.take()
            && let Some(status) = self.worker_ended(status)?
        {
            return Ok(Next::End(status));
        }
        if ready.input {
            self.read_client();
        }
        if ready.worker_input
            && let Some(input) = &mut self.worker.input
            && input.flush().is_err()
        {
            self.worker.input = None;
        }
        if ready.output && self.output.flush().is_err() {
            return Ok(Next::End(0));
        }
        let hears = self.output.is_empty() && self.ending.is_none();
        if let Some((cause, stuck)) = self.watchdog.look(&self.worker, &self.memory.requests, hears)
            && let Some(status) = self.replace(cause, stuck)?
        {
            return Ok(Next::End(status));
        }
        Ok(self.conclude())
    }

    /// Waits until something can be done.
    fn wait(&mut self) -> io::Result<Ready> {
        let takes_more = self.memory.requests.bytes() < MAX_REQUESTS;
        // At the end there is no later for what the worker has to say.
        let hears_more = self.worker.open && (self.output.backlog() < MAX_ANSWERS || self.ending.is_some());
        let mut fds = Vec::with_capacity(5);
        fds.push(PollFd::new(&self.signals, PollFlags::IN));
        let worker = hears_more.then(|| push(&mut fds, PollFd::new(&self.worker, PollFlags::IN)));
        let input = self.input.as_ref().filter(|_| takes_more);
        let input = input.map(|input| push(&mut fds, PollFd::new(input, PollFlags::IN)));
        let unsent = self.worker.input.as_ref().filter(|input| !input.is_empty());
        let worker_input = unsent.map(|input| push(&mut fds, PollFd::new(input, PollFlags::OUT)));
        let output = (!self.output.is_empty()).then(|| push(&mut fds, PollFd::new(&self.output, PollFlags::OUT)));
        let end = self.ending.map(|ending| ending.deadline.saturating_duration_since(Instant::now()));
        let watch = (self.memory.requests.bytes() > 0 || !self.worker.ready).then_some(watchdog::EVERY);
        let timeout = end.into_iter().chain(watch).min();
        // A millisecond more: what is rounded down would spin.
        rpc::wait(&mut fds, timeout.map(|left| left + Duration::from_millis(1)))?;
        let is_ready = |index: Option<usize>| index.is_some_and(|index| !fds[index].revents().is_empty());
        Ok(Ready {
            signals: is_ready(Some(0)),
            worker: is_ready(worker),
            input: is_ready(input),
            worker_input: is_ready(worker_input),
            output: is_ready(output),
        })
    }

    /// Takes what the worker says. `None` when the client is gone; else whether there may be more.
    fn read_worker(&mut self) -> io::Result<Option<bool>> {
        let Self { worker, output, memory, deaths, ending, .. } = self;
        let mut wish = None;
        let mut gone = false;
        let (mut ready, mut bye) = (worker.ready, worker.bye);
        let result = worker.read(|frame| {
            match frame {
                (Kind::Answer, line, text) => {
                    if memory.answered(line) {
                        gone |= output.put(text).is_err();
                        deaths.clear();
                    }
                }
                (Kind::Message, _, text) => gone |= output.put(text).is_err(),
                (Kind::Bye, status, _) => bye = Some(i32::try_from(status).unwrap_or(1)),
                (Kind::Restored, _, payload) => {
                    ready = true;
                    memory.restored(payload);
                }
                frame => wish = memory.note(frame),
            }
            wish.is_none()
        });
        (worker.ready, worker.bye) = (ready, bye);
        // One that leaves although nobody asked it to has lost its end of a pipe. One that never served could not.
        let left = bye == Some(0) && ready && ending.is_none();
        if let (Some(status), None, false) = (bye, *ending, left) {
            *ending = Some(Ending { status, deadline: Instant::now() + DEPARTURE });
        }
        if gone {
            return Ok(None);
        }
        if left {
            self.replace("lost its connection and was ended".to_owned(), None)?;
            return Ok(Some(true));
        }
        match wish {
            None => {}
            Some(Wish::Reset(line, notices)) => self.reset(line, notices)?,
            Some(Wish::Stuck(outcome)) => {
                let cause = "did not react to being interrupted and was ended".to_owned();
                self.replace(cause, outcome)?;
            }
        }
        match result {
            Ok(more) => {
                if !self.worker.open && self.worker.bye.is_none() {
                    // It lives but cannot speak: its descriptors were closed under it.
                    self.worker.kill();
                }
                Ok(Some(more))
            }
            Err(_) => {
                self.replace("wrote to a pipe that it must not write to, and was ended".to_owned(), None)?;
                Ok(Some(true))
            }
        }
    }

    fn read_client(&mut self) {
        let Self { input, output, worker, memory, .. } = self;
        let Some(client) = input else { return };
        let read = client.read();
        while let Some(line) = client.next_line() {
            match line {
                Line::Text(line) => {
                    memory.requests.add(line);
                    if let Some(input) = &mut worker.input {
                        // A worker that does not read is gone; the next one gets the line.
                        let _ = input.put(line);
                    }
                }
                Line::TooLong(id) => {
                    let reason = format!("the message is longer than {} MiB", MAX_LINE >> 20);
                    drop(output.put(&refusal::line(id, refusal::INVALID_REQUEST, &reason)));
                }
            }
        }
        if !read.is_ok_and(|read| read != Read::End) {
            self.end(0, LAST_WORDS);
        }
    }

    /// Begins the end: nothing more is read, and the worker has until the deadline.
    fn end(&mut self, status: i32, within: Duration) {
        self.input = None;
        if self.ending.is_none() {
            self.ending = Some(Ending { status, deadline: Instant::now() + within });
        }
    }

    /// What is due at the end.
    fn conclude(&mut self) -> Next {
        let Some(ending) = self.ending else { return Next::GoOn };
        if self.worker.input.as_ref().is_some_and(WriteBuffer::is_empty) {
            // The worker sees the end of input.
            self.worker.input = None;
        }
        if Instant::now() < ending.deadline {
            return Next::GoOn;
        }
        self.give_up(ending.status, "the server is shutting down; this was not finished")
    }

    /// Answers whoever still waits, and ends.
    fn give_up(&mut self, status: i32, reason: &str) -> Next {
        self.worker.kill();
        for (_, line) in self.memory.requests.iter() {
            if let Some(answer) = refusal::of_line(line, reason)
                && self.output.put(&answer).is_err()
            {
                break;
            }
        }
        self.say_farewell();
        Next::End(status)
    }

    fn say_farewell(&mut self) {
        let end = Instant::now() + FAREWELL;
        let end = self.ending.map_or(end, |ending| ending.deadline.max(end));
        while !self.output.is_empty() && Instant::now() < end {
            let mut fds = [PollFd::new(&self.output, PollFlags::OUT)];
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
            if self.output.flush().is_err() {
                break;
            }
        }
    }

    /// Takes what a worker said last, and replaces it unless that was goodbye. The status when all is over.
    fn worker_ended(&mut self, status: WaitStatus) -> io::Result<Option<i32>> {
        let pid = self.worker.pid;
        while self.worker.open {
            match self.read_worker()? {
                None => return Ok(Some(0)),
                Some(_) if self.worker.pid != pid => return Ok(None),
                Some(true) => {}
                Some(false) => break,
            }
        }
        if let Some(ending) = self.ending {
            let status = if self.worker.bye.is_some() && ending.status == 0 { self.worker.bye } else { None };
            let Next::End(status) =
                self.give_up(status.unwrap_or(ending.status), "the server is shutting down; this was not finished")
            else {
                return Ok(None);
            };
            return Ok(Some(status));
        }
        let by_heap = status.exit_status() == Some(LOST_TO_HEAP);
        let stuck = by_heap.then(|| Box::new(failed("HEAP-EXHAUSTED", "The heap was used up".to_owned())));
        self.replace(cause(status), stuck)
    }

    /// Ends the worker, if that is still to be done, and starts another where it stopped. The status when there is no
    /// point in that.
    fn replace(&mut self, cause: String, stuck: Option<Box<crate::Outcome>>) -> io::Result<Option<i32>> {
        self.worker.kill();
        processes::end_all_but(None);
        tracing::warn!("the Lisp image {cause}");
        let now = Instant::now();
        self.deaths.retain(|death| now - death.at < DEATHS_WITHIN);
        self.deaths.push(Death { at: now, early: !self.worker.ready });
        let early = self.deaths.iter().filter(|death| death.early).count();
        if self.deaths.len() >= MAX_DEATHS || early >= MAX_EARLY_DEATHS {
            let reason = format!(
                "the Lisp image was lost {} times within {} seconds (the last one {cause}); the server gives up",
                self.deaths.len(),
                DEATHS_WITHIN.as_secs()
            );
            tracing::error!("{reason}");
            let Next::End(status) = self.give_up(1, &reason) else { return Ok(None) };
            return Ok(Some(status));
        }
        self.memory.lose(&self.worker, cause, stuck);
        self.renew()?;
        Ok(None)
    }

    /// A fresh image in place of this one, at the wish of `line`.
    fn reset(&mut self, line: u64, notices: Vec<String>) -> io::Result<()> {
        self.memory.forget(line, &self.worker);
        self.memory.notices = notices;
        self.worker.kill();
        self.renew()
    }

    fn renew(&mut self) -> io::Result<()> {
        self.worker = self.command.start()?;
        self.watchdog = Watchdog::new();
        self.ended = None;
        self.memory.hand_over(&mut self.worker)
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
}

fn push<'a>(fds: &mut Vec<PollFd<'a>>, fd: PollFd<'a>) -> usize {
    fds.push(fd);
    fds.len() - 1
}

impl Memory {
    /// Notes that a line is answered. False for one that was before, whose new answer nobody wants.
    fn answered(&mut self, line: u64) -> bool {
        let waited = self.requests.finish(line);
        if waited && !self.keep.is_empty() {
            for (of, text) in std::mem::take(&mut self.keep) {
                if of == line { self.handshake.push(text) } else { self.keep.push((of, text)) }
            }
        }
        waited
    }

    /// Takes what is not for the client.
    fn note(&mut self, (kind, line, payload): Frame<'_>) -> Option<Wish> {
        match kind {
            Kind::Done => drop(self.answered(line)),
            Kind::Keep => self.keep.push((line, String::from_utf8_lossy(payload).into_owned())),
            Kind::Defined => {
                if let (Some(journal), Ok(entry)) = (&mut self.journal, serde_json::from_slice(payload)) {
                    journal.add(entry);
                }
            }
            Kind::Error => {
                if let Ok(ErrorChange { added, last }) = serde_json::from_slice(payload) {
                    self.errors.note(added, last);
                }
            }
            Kind::Limits => self.limits = serde_json::from_slice(payload).ok(),
            Kind::Reset => {
                return Some(Wish::Reset(line, serde_json::from_slice(payload).unwrap_or_default()));
            }
            Kind::Stuck => return Some(Wish::Stuck(serde_json::from_slice(payload).unwrap_or_default())),
            Kind::Answer | Kind::Message | Kind::Restored | Kind::Bye => {}
        }
        None
    }

    /// Takes the worker's word on what could not be restored: it will not be tried again.
    fn restored(&mut self, payload: &[u8]) {
        let restored: Restored = serde_json::from_slice(payload).unwrap_or_default();
        if let Some(journal) = &mut self.journal {
            journal.remove(&restored.failed);
        }
    }

    /// Remembers that an image was lost.
    fn lose(&mut self, worker: &WorkerProcess, cause: String, stuck: Option<Box<crate::Outcome>>) {
        self.keep.clear();
        if worker.ready {
            self.notices.clear();
        }
        let begun = worker.board.get(Slot::Begun);
        let mut loss = Loss {
            cause,
            in_flight: begun > worker.board.get(Slot::Ended),
            awaited: self.requests.has(line_of_job(begun)),
            stuck,
            deadly: Vec::new(),
        };
        if !worker.ready {
            // The loss that the last one was to make good is what the client must hear of.
            if let Some(earlier) = self.loss.take() {
                loss = earlier;
            }
            let restoring = usize::try_from(worker.board.get(Slot::Restoring)).unwrap_or(0);
            let deadly = restoring.checked_sub(1).and_then(|place| self.journal.as_mut()?.take(place));
            loss.deadly.extend(deadly);
        }
        self.through = self.through.max(begun);
        self.evaluations = self.evaluations.max(worker.board.get(Slot::Numbered));
        self.loss = Some(loss);
    }

    /// Remembers nothing of the image but the limits.
    fn forget(&mut self, line: u64, worker: &WorkerProcess) {
        self.keep.clear();
        self.errors.reset();
        self.loss = None;
        self.journal = self.journal.take().map(|_| Journal::default());
        self.through = self.through.max(worker.board.get(Slot::Begun));
        self.evaluations = self.evaluations.max(worker.board.get(Slot::Numbered));
        self.reset = Some(line);
    }

    /// Tells a new worker where the last one stopped.
    fn hand_over(&self, worker: &mut WorkerProcess) -> io::Result<()> {
        let handover = Handover {
            resent: self.requests.iter().map(|(number, _)| number).collect(),
            next: self.requests.next(),
            handshake: self.handshake.clone(),
            limits: self.limits,
            errors: self.errors.clone(),
            journal: self.journal.as_ref().map(|journal| journal.entries().to_vec()),
            dropped: self.journal.as_ref().map_or(0, Journal::dropped),
            through: self.through,
            evaluations: self.evaluations,
            loss: self.loss.clone(),
            reset: self.reset,
            notices: self.notices.clone(),
        };
        let mut line = serde_json::to_vec(&handover)?;
        line.push(b'\n');
        if let Some(input) = &mut worker.input {
            // One that is gone already is noticed elsewhere.
            let _ = input.put(&line);
            for (_, line) in self.requests.iter() {
                let _ = input.put(line);
            }
        }
        Ok(())
    }
}
