//! The supervisor's event loop: relays lines between clients and worker, and replaces a worker process that is lost.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, getpid};

use super::guests::{self, Event, Guests};
use super::recovery::Recovery;
use super::shutdown::Shutdown;
use super::worker::{Worker, WorkerId};
use super::worker_process::{WorkerProcess, cause, may_be_from_outside};
use super::{Options, messages, processes};
use crate::durable::Durable;
use crate::durable::lock::{Doing, Lock};
use crate::image::heap::LOST_TO_HEAP;
use crate::poll_set::{PollSet, Ready};
use crate::recovery::checkpoint::store::Checkpoint;
use crate::recovery::event::WorkerEvent;
use crate::recovery::state::Crash;
use crate::result_kind::HEAP_EXHAUSTED;
use crate::rpc::WriteBuffer;
use crate::rpc::descriptors::{nonblocking_reader, nonblocking_writer};
use crate::rpc::frame::Kind;
use crate::rpc::framing::{Line, LineReader, MAX_LINE, Read};
use crate::rpc::inflight;
use crate::rpc::output::MAX_UNREAD;
use crate::rpc::route::notice;
use crate::rpc::signals::Signals;
use crate::session::recovery::failed;

/// Bytes of a client's unanswered requests above which the supervisor reads no more from that client. The limit exceeds the
/// worker's own limit by a line, so that the worker refuses excess requests and a cancellation still gets through.
const MAX_REQUESTS: usize = inflight::MAX_BYTES + MAX_LINE + (1 << 20);

/// Number of characters of an error that a notice shows.
const MAX_REASON: usize = 200;

/// An action before the next step of the loop.
#[must_use]
#[derive(Debug)]
enum Verdict {
    /// Replace the worker's process, which is lost or must be ended.
    Replace(WorkerId, Crash),
    /// Reset the session for this call; the strings are notices that the client has not seen yet.
    Reset(WorkerId, u64, Vec<String>),
    /// Restore the checkpoint for this call; the strings are notices that the client has not seen yet.
    Return(WorkerId, u64, Box<Checkpoint>, Vec<String>),
    /// End the server, which cannot start or continue for this reason.
    Fail(String),
    /// End the loop.
    End,
}

type Step = Result<(), Verdict>;

/// The state of the loop: the clients' ends, the workers, and the shutdown.
#[derive(Debug)]
pub(super) struct Relay {
    input: Option<LineReader>,
    output: WriteBuffer,
    guests: Guests,
    signals: Signals,
    arguments: Vec<OsString>,
    /// The workers; only [`WorkerId::FIRST`] so far.
    workers: BTreeMap<WorkerId, Worker>,
    shutdown: Option<Shutdown>,
    /// The persistent session, with its lock.
    durable: Option<(Durable, Lock)>,
    /// The process that saves the persistent session at the end, and outlives the supervisor.
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
            workers: BTreeMap::from([(WorkerId::FIRST, Worker::new(recovery, options.watch_interval))]),
            shutdown: None,
            durable: options.durable,
            saver: None,
        })
    }

    /// Runs the loop until the server ends; returns the exit status.
    pub(super) fn run(mut self) -> i32 {
        loop {
            match self.step() {
                Ok(()) => {}
                Err(Verdict::Replace(id, crash)) => self.replace(id, &crash),
                Err(Verdict::Reset(id, call, notices)) => {
                    self.replace_as_asked(id, |recovery, process| recovery.reset(&process.status, call, notices));
                }
                Err(Verdict::Return(id, call, checkpoint, notices)) => {
                    self.replace_as_asked(id, |recovery, process| {
                        recovery.return_to(&process.status, call, *checkpoint, notices);
                    });
                }
                Err(Verdict::Fail(reason)) => self.fail(reason),
                Err(Verdict::End) => break,
            }
        }
        self.leave_processes();
        let Self { shutdown, mut output, workers, .. } = self;
        let first = &workers[&WorkerId::FIRST];
        shutdown.map_or(0, |shutdown| shutdown.finish(&first.recovery.requests, &mut output, first.bye))
    }

    /// Returns the worker that serves a client.
    fn worker_of(&mut self, _client: u64) -> &mut Worker {
        self.workers.entry(WorkerId::FIRST).or_insert_with(|| unreachable!("the first worker is never removed"))
    }

    fn step(&mut self) -> Step {
        self.start_workers()?;
        let ready = self.wait()?;
        for name in ready.names() {
            if let Watched::Worker(id) = name {
                self.read_worker(id)?;
            }
        }
        if ready.has(Watched::Signals) {
            if let Some(signal) = self.signals.take() {
                self.shut_down(128 + signal);
            }
            self.reap();
        }
        self.look_for_ends()?;
        for name in ready.names() {
            if let Watched::WorkerInput(id) = name
                && let Some(worker) = self.workers.get_mut(&id)
            {
                worker.hand_on();
            }
        }
        if ready.has(Watched::Input) {
            self.read_client();
        }
        self.attend_guests(&ready);
        self.workers.values_mut().for_each(Worker::attend_log);
        if ready.has(Watched::Output) && self.output.flush().is_err() {
            return Err(Verdict::End);
        }
        for (id, worker) in &mut self.workers {
            if let Some(process) = &worker.process
                && let Some(crash) =
                    worker.watchdog.look(process, &mut worker.recovery.requests, self.shutdown.is_none())
            {
                return Err(Verdict::Replace(*id, crash));
            }
        }
        self.conclude()
    }

    /// Starts the missing worker processes whose time has come.
    fn start_workers(&mut self) -> Step {
        if self.shutdown.is_some() {
            return Ok(());
        }
        let now = Instant::now();
        for (id, worker) in
            self.workers.iter_mut().filter(|(_, worker)| worker.process.is_none() && worker.start_at <= now)
        {
            let started = worker.start(&self.arguments, self.durable.as_ref());
            started.map_err(|crash| Verdict::Replace(*id, crash))?;
        }
        Ok(())
    }

    /// Waits until a descriptor is ready or a deadline has passed.
    fn wait(&mut self) -> Result<Ready<Watched>, Verdict> {
        let is_over = self.is_over();
        let first = &self.workers[&WorkerId::FIRST];
        let takes_more = |client| first.recovery.requests.bytes(client) < MAX_REQUESTS;
        let mut set = PollSet::new();
        set.read(Watched::Signals, &self.signals);
        for (id, worker) in &self.workers {
            let Some(process) = &worker.process else { continue };
            if process.open {
                set.read(Watched::Worker(*id), process);
            }
            if worker.can_send()
                && let Some(input) = &process.input
            {
                set.write(Watched::WorkerInput(*id), input);
            }
        }
        if let Some(input) = self.input.as_ref().filter(|_| self.output.backlog() <= MAX_UNREAD && takes_more(0)) {
            set.read(Watched::Input, input);
        }
        if !self.output.is_empty() {
            set.write(Watched::Output, &self.output);
        }
        self.guests.watch(&mut set, Watched::Guest, |client| self.shutdown.is_none() && takes_more(client));
        let starts =
            self.workers.values().filter(|worker| worker.process.is_none()).map(|worker| worker.start_at).min();
        let due = match &self.shutdown {
            Some(_) if is_over && starts.is_some() => Some(Instant::now()),
            Some(shutdown) => Some(shutdown.deadline),
            None => starts,
        };
        let looks = self.workers.values().filter(|worker| worker.is_watched()).map(|worker| worker.watchdog.interval);
        let due = due.map(|due| due.saturating_duration_since(Instant::now()));
        let log_retries = self.workers.values().filter_map(|worker| worker.recovery.log_retry());
        let timeout = due.into_iter().chain(looks).chain(log_retries).min();
        // A millisecond more: a timeout that is rounded down would spin.
        let ready = set.wait(timeout.map(|left| left + Duration::from_millis(1)));
        ready.map_err(|error| Verdict::Fail(format!("the server cannot wait for input: {error}")))
    }

    /// Reads once from a worker, and handles all intact frames.
    fn read_worker(&mut self, id: WorkerId) -> Step {
        let Some(process) = self.workers.get_mut(&id).and_then(|worker| worker.process.as_mut()) else { return Ok(()) };
        process.read();
        loop {
            let Self { workers, output, guests, .. } = self;
            let Some(Worker { process: Some(process), recovery, restarts, .. }) = workers.get_mut(&id) else {
                return Ok(());
            };
            let is_ready = process.ready;
            let Some((kind, call, payload)) = process.next_frame().map_err(|_| malformed(id))? else { break };
            match kind {
                Kind::Event => match WorkerEvent::decode(&payload) {
                    Ok(event) => self.take_event(id, event)?,
                    Err(_) if !process.restored => {
                        let crash = Crash::new("reported something that cannot be read, and was ended");
                        return Err(Verdict::Replace(id, crash));
                    }
                    Err(error) => report_unreadable(process, recovery.clients(), &error),
                },
                _ if !is_ready => return Err(malformed(id)),
                Kind::Answer => {
                    let unread = recovery.requests.connection(call).filter(|it| is_unread(output, guests, *it));
                    let error = unread.and_then(|_| messages::unread(recovery.requests.text(call)?));
                    let answer = error.map_or(payload, Cow::Owned);
                    match recovery.finished(call) {
                        Some(0) => output.put_whole(answer).map_err(|_| Verdict::End)?,
                        Some(connection) => guests.send(connection, answer),
                        // The call has been answered already, or its client has disconnected.
                        None => continue,
                    }
                    restarts.answered();
                }
                Kind::Message if is_unread(output, guests, call) => {}
                Kind::Message if call == 0 => output.put_whole(payload).map_err(|_| Verdict::End)?,
                Kind::Message => guests.send(call, payload),
                Kind::Done => drop(recovery.finished(call)),
                Kind::Received => process.report_received(call),
                Kind::Part => unreachable!("the process keeps parts until they are an answer"),
            }
        }
        let process = self.workers.get(&id).and_then(|worker| worker.process.as_ref());
        if let Some(process) = process.filter(|process| !process.open && process.bye.is_none()) {
            // A worker that still lives cannot report anything: user code has closed its descriptors.
            processes::kill(process.pid, getpid());
        }
        Ok(())
    }

    /// Handles a worker's event.
    fn take_event(&mut self, id: WorkerId, event: WorkerEvent) -> Step {
        let Some(worker) = self.workers.get_mut(&id) else { return Ok(()) };
        let Worker { process: Some(process), recovery, has_served, .. } = worker else { return Ok(()) };
        match event {
            WorkerEvent::Ready if !process.ready => {
                process.ready = true;
                *has_served = true;
                recovery.requests.apply_cancellations();
                worker.hand_on();
            }
            WorkerEvent::Leaving { status, reason } => {
                process.bye = Some(status);
                match reason {
                    _ if self.shutdown.is_some() => {}
                    Some(reason) if !*has_served => return Err(Verdict::Fail(reason)),
                    Some(reason) => {
                        return Err(Verdict::Replace(id, Crash::new(format!("cannot be started: {reason}"))));
                    }
                    // Nobody asked the worker to leave.
                    None => return Err(Verdict::Replace(id, Crash::new("lost its connection and was ended"))),
                }
            }
            WorkerEvent::SaverStarted { pid } => self.saver = Pid::from_raw(pid),
            _ if !process.ready => return Err(malformed(id)),
            WorkerEvent::Restored { failed } if !process.restored => {
                recovery.restored(&failed);
                process.restored = true;
            }
            WorkerEvent::ResetRequested { call, notices } if recovery.may_replace(call) => {
                return Err(Verdict::Reset(id, call, notices));
            }
            WorkerEvent::RestoreRequested { call, checkpoint, notices } if recovery.may_replace(call) => {
                return Err(Verdict::Return(id, call, checkpoint, notices));
            }
            WorkerEvent::Stuck { outcome, why } => {
                return Err(Verdict::Replace(id, Crash::stuck(outcome, why, process.restored)));
            }
            WorkerEvent::Changed(event) => recovery.record(event),
            WorkerEvent::ResetRequested { .. }
            | WorkerEvent::RestoreRequested { .. }
            | WorkerEvent::Restored { .. }
            | WorkerEvent::Ready => return Err(malformed(id)),
        }
        Ok(())
    }

    /// Reaps ended processes, of which SIGCHLD tells: workers, and orphans.
    fn reap(&mut self) {
        while let Some((pid, status)) = processes::ended() {
            let mut processes = self.workers.values_mut().filter_map(|worker| worker.process.as_mut());
            if let Some(process) = processes.find(|process| process.pid == pid) {
                process.ended = Some(status);
            }
        }
    }

    /// Looks for a worker that has ended, and reads its last output first.
    fn look_for_ends(&mut self) -> Step {
        let ended = self.workers.iter().find_map(|(id, worker)| Some((*id, worker.process.as_ref()?.ended?)));
        let Some((id, status)) = ended else { return Ok(()) };
        let read = |relay: &Self| Some(relay.workers.get(&id)?.process.as_ref()?.read);
        loop {
            let before = read(self);
            self.read_worker(id)?;
            if read(self) == before {
                break;
            }
        }
        let crash = Crash::new(cause(status));
        let crash = if may_be_from_outside(status) { crash.killed() } else { crash };
        let by_heap = status.exit_status() == Some(LOST_TO_HEAP);
        let outcome = by_heap.then(|| failed(HEAP_EXHAUSTED, "The heap was used up".to_owned()));
        Err(Verdict::Replace(id, crash.during(outcome)))
    }

    /// Reads once from the client of stdin.
    fn read_client(&mut self) {
        let Some(mut client) = self.input.take() else { return };
        let read = client.read();
        while let Some(line) = client.next_line() {
            match line {
                Line::Text(line) => self.worker_of(0).take(0, line),
                Line::TooLong(id) => drop(self.output.put(&messages::too_long(id))),
            }
        }
        self.input = Some(client);
        if !read.is_ok_and(|read| read != Read::End) {
            self.shut_down(0);
        }
    }

    /// Handles attached clients: connections, disconnections and lines.
    fn attend_guests(&mut self, ready: &Ready<Watched>) {
        let Self { guests, workers, .. } = self;
        let Some(worker) = workers.get_mut(&WorkerId::FIRST) else { return };
        let mut too_long = Vec::new();
        guests.attend(
            |what| ready.has(Watched::Guest(what)),
            |client, event| match event {
                Event::Joined => worker.recovery.join(client),
                Event::Said(Line::Text(line)) => worker.take(client, line),
                Event::Said(Line::TooLong(id)) => too_long.push((client, id)),
                Event::Left => worker.leave(client),
            },
        );
        for (client, id) in too_long {
            guests.send(client, Cow::Owned(messages::too_long(id)));
        }
    }

    /// Kills the descendants of this process, except the processes that save a persistent session.
    fn leave_processes(&mut self) {
        if self.durable.is_some() && self.shutdown.as_ref().is_some_and(|shutdown| !shutdown.until_asked) {
            // The worker's last output may report the saving process.
            let _ = self.read_worker(WorkerId::FIRST);
            let processes = self.workers.values().filter_map(|worker| worker.process.as_ref());
            let ready = processes.filter(|process| process.ready).map(|process| process.pid);
            processes::end_all_but(&ready.chain(self.saver).collect::<Vec<_>>());
        } else {
            processes::end_all();
        }
    }

    /// Begins a graceful shutdown: the supervisor reads no more requests, and running calls have a moment to finish.
    fn shut_down(&mut self, status: i32) {
        self.input = None;
        self.guests.close();
        if let Some((_, lock)) = &mut self.durable {
            lock.say(Doing::Saving);
        }
        self.workers.values_mut().for_each(|worker| worker.recovery.rewrite_log());
        if self.shutdown.is_none() {
            self.shutdown = Some(Shutdown::graceful(status));
        }
    }

    /// Ends the workers of a server that cannot continue, and begins the shutdown.
    fn fail(&mut self, reason: String) {
        processes::end_all();
        self.workers.values_mut().for_each(|worker| worker.process = None);
        self.shutdown.get_or_insert_with(|| Shutdown::failure(reason));
    }

    /// Returns true during a shutdown that has nothing left to wait for.
    fn is_over(&mut self) -> bool {
        let Some(shutdown) = &self.shutdown else { return false };
        let is_awaited = |worker: &mut Worker| worker.recovery.requests.first_awaited().is_some();
        self.workers.values().all(|worker| worker.process.is_none())
            && (!shutdown.until_asked || self.input.is_none() || self.workers.values_mut().any(is_awaited))
    }

    /// Closes the workers' inputs during a shutdown, and ends the loop when the shutdown is over.
    fn conclude(&mut self) -> Step {
        let Some(shutdown) = &self.shutdown else { return Ok(()) };
        for worker in self.workers.values_mut().filter(|worker| !worker.has_unsent()) {
            if let Some(process) = worker.process.as_mut().filter(|process| process.ready) {
                // The worker sees the end of input.
                process.input = None;
            }
        }
        let deadline = shutdown.deadline;
        if self.is_over() || Instant::now() >= deadline { Err(Verdict::End) } else { Ok(()) }
    }

    /// Ends the rest of a lost process and schedules another process, except in a shutdown. After too many losses the server
    /// fails.
    fn replace(&mut self, id: WorkerId, crash: &Crash) {
        if self.shutdown.is_some() {
            self.leave_processes();
            if let Some(worker) = self.workers.get_mut(&id) {
                worker.bye = worker.process.take().and_then(|process| process.bye);
            }
            return;
        }
        self.end_processes_of(id);
        match self.workers.get_mut(&id).map(|worker| worker.record_loss(crash)) {
            Some(Ok(Some((0, refusal)))) => drop(self.output.put(&refusal)),
            Some(Ok(Some((client, refusal)))) => self.guests.send(client, Cow::Owned(refusal)),
            Some(Ok(None)) | None => {}
            Some(Err(reason)) => {
                tracing::error!("{reason}");
                self.fail(reason);
            }
        }
    }

    /// Replaces a worker's process at the request of a call; `remember` records the change.
    fn replace_as_asked(&mut self, id: WorkerId, remember: impl FnOnce(&mut Recovery, &WorkerProcess)) {
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.replace(remember);
        }
        self.end_processes_of(id);
    }

    /// Kills a worker's process and its descendants. With a single worker, these are all descendants of the supervisor.
    fn end_processes_of(&self, _id: WorkerId) {
        processes::end_all();
    }
}

/// Reports the first unreadable event of a process, on stderr and to the clients: the next image may lack the change.
fn report_unreadable(worker: &mut WorkerProcess, clients: impl Iterator<Item = u64>, error: &serde_json::Error) {
    if std::mem::replace(&mut worker.has_unreadable, true) {
        return;
    }
    let error: String = error.to_string().chars().take(MAX_REASON).collect();
    tracing::error!("the worker reported an event that cannot be read: {error}");
    let text = format!("The supervisor could not read what the image reported ({error}): the next image may lack it.");
    if let Some(input) = &mut worker.input {
        for client in clients {
            // Another part of the loop notices the loss of the worker.
            let _ = input.put(&notice(client, &text));
        }
    }
}

/// Returns the verdict for a worker that broke the protocol.
fn malformed(id: WorkerId) -> Verdict {
    Verdict::Replace(id, Crash::new("wrote to a pipe that it must not write to, and was ended"))
}

/// Returns true when a client's backlog is so large that its answers become errors.
fn is_unread(output: &WriteBuffer, guests: &Guests, connection: u64) -> bool {
    let backlog = if connection == 0 { output.backlog() } else { guests.backlog(connection) };
    backlog > MAX_UNREAD
}

/// What the supervisor waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watched {
    Signals,
    /// What a worker says.
    Worker(WorkerId),
    /// What a worker reads.
    WorkerInput(WorkerId),
    Input,
    Output,
    Guest(guests::Watched),
}
