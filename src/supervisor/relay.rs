//! The supervisor's event loop, which relays lines between clients and worker and replaces a worker process that is
//! lost.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, getpid};

use super::attached_clients::{AttachedClients, AttachedDescriptor, ClientEvent};
use super::recovery::RecoveryRecord;
use super::requests::MAX_LINES_PER_STEP;
use super::shutdown::{FINAL_READ_TIME, Shutdown};
use super::worker::{Worker, WorkerId};
use super::worker_process::{WorkerProcess, describe_exit, is_possibly_external};
use super::{SupervisorOptions, messages};
use crate::image::heap::EXIT_HEAP_EXHAUSTED;
use crate::os::poll_set::{PollSet, ReadyDescriptors};
use crate::os::processes;
use crate::recovery::checkpoint::store::{Checkpoint, is_core_name};
use crate::recovery::event::WorkerEvent;
use crate::recovery::persistent::PersistentSession;
use crate::recovery::persistent::lock::{HolderState, Lock};
use crate::recovery::state::Crash;
use crate::result_kind::HEAP_EXHAUSTED;
use crate::rpc::WriteBuffer;
use crate::rpc::descriptors::{nonblocking_reader, nonblocking_writer};
use crate::rpc::frame::FrameKind;
use crate::rpc::framing::{Line, LineReader, MAX_LINE, ReadStatus};
use crate::rpc::id_scanner::ScannedMessage;
use crate::rpc::inflight;
use crate::rpc::output::MAX_UNREAD;
use crate::rpc::route::mark_notice;
use crate::rpc::signals::Signals;
use crate::session::recovery::failed_outcome;

/// Size of a client's unanswered requests, in bytes with the overhead of each line, above which the supervisor reads no more
/// from that client. The limit exceeds the worker's own limits by more than the longest line, so that the worker refuses
/// excess requests and a cancellation still gets through.
const MAX_REQUEST_BYTES: usize = inflight::MAX_BYTES + MAX_LINE + (4 << 20);

/// Maximum capacity of a pipe, in bytes, unless an administrator has raised it.
const MAX_PIPE_CAPACITY: u64 = 1 << 20;

/// Maximum number of characters of an error that a notice shows.
const MAX_ERROR_CHARS: usize = 200;
/// The beginning of the reason with which a worker exits if Lisp does not start (`serve_as_worker`). After another
/// sentence's beginning, this beginning is left out.
const CANNOT_START: &str = "sbcl-mcp cannot start: ";

/// An action that interrupts a step of the loop and is performed before the next step.
#[must_use]
#[derive(Debug)]
enum LoopAction {
    /// Replace the worker's process, which is lost or must be ended.
    Replace(WorkerId, Crash),
    /// Reset the session at the request of the call whose jobs begin at this number. The strings are notices that the
    /// client has not seen yet.
    Reset(WorkerId, u64, Vec<String>),
    /// Restore the checkpoint at the request of the call whose jobs begin at this number. The strings are notices that
    /// the client has not seen yet.
    Restore(WorkerId, u64, Box<Checkpoint>, Vec<String>),
    /// End the server, which cannot start or continue for this reason.
    Fail(String),
    /// End the loop.
    End,
}

type StepResult = Result<(), LoopAction>;

/// The event loop, with the connections to its clients, its workers, and the state of a shutdown.
#[derive(Debug)]
pub(super) struct Relay {
    /// The input of the client of stdin.
    input: LineReader,
    /// True until the input of the client of stdin ends or a graceful shutdown begins.
    reads_input: bool,
    /// The output to the client of stdout.
    output: WriteBuffer,
    attached: AttachedClients,
    signals: Signals,
    /// The arguments of a worker process.
    arguments: Vec<OsString>,
    /// The workers; only [`WorkerId::FIRST`] so far.
    workers: BTreeMap<WorkerId, Worker>,
    /// The shutdown in progress.
    shutdown: Option<Shutdown>,
    /// The persistent session, with its lock.
    session: Option<(PersistentSession, Lock)>,
    /// The process that saves the persistent session at the end, and outlives the supervisor.
    saver: Option<Pid>,
}

impl Relay {
    pub(super) fn new(
        input: OwnedFd,
        output: OwnedFd,
        options: SupervisorOptions,
        recovery: RecoveryRecord,
    ) -> io::Result<Self> {
        Ok(Self {
            input: LineReader::new(nonblocking_reader(input)?).with_recorder(options.recorder.clone()),
            reads_input: true,
            output: WriteBuffer::new(nonblocking_writer(output)?).with_recorder(options.recorder),
            attached: AttachedClients::new(options.listener),
            signals: Signals::new()?,
            arguments: options.arguments,
            workers: BTreeMap::from([(WorkerId::FIRST, Worker::new(recovery, options.watch_interval))]),
            shutdown: None,
            session: options.session,
            saver: None,
        })
    }

    /// Runs the loop until the server ends; returns the exit status.
    pub(super) fn run(mut self) -> i32 {
        loop {
            match self.step() {
                Ok(()) => {}
                Err(LoopAction::Replace(id, crash)) => self.replace(id, &crash),
                Err(LoopAction::Reset(id, job, notices)) => self.reset(id, job, notices),
                Err(LoopAction::Restore(id, job, checkpoint, notices)) => self.restore(id, job, *checkpoint, notices),
                Err(LoopAction::Fail(reason)) => self.fail(reason),
                Err(LoopAction::End) => break,
            }
        }
        if self.shutdown.is_none() {
            // The client of stdout reads no more. Attached clients get answers.
            self.shut_down(0);
        }
        self.read_last_answers();
        self.kill_processes();
        // A server that cannot continue keeps the definitions, since the requested checkpoint may be the cause.
        if self.shutdown.as_ref().is_some_and(|shutdown| !shutdown.waits_for_request) {
            self.workers.values_mut().for_each(|worker| worker.recovery.complete_restore_at_end());
        }
        // The log may have become writable since the shutdown began.
        self.workers.values_mut().for_each(|worker| worker.recovery.rewrite_log());
        let Self { shutdown, mut input, mut output, mut attached, workers, .. } = self;
        let first = &workers[&WorkerId::FIRST];
        shutdown.map_or(0, |shutdown| {
            shutdown.finish(&first.recovery.requests, &mut input, &mut output, &mut attached, first.announced_status)
        })
    }

    fn step(&mut self) -> StepResult {
        self.start_workers()?;
        let ready = self.wait()?;
        for name in ready.names() {
            if let Descriptor::WorkerOutput(id) = name {
                self.read_worker(id)?;
            }
        }
        if ready.has(Descriptor::Signals) {
            if let Some(signal) = self.signals.take() {
                self.shut_down(128 + signal);
            }
            self.reap();
        }
        self.handle_exits()?;
        for name in ready.names() {
            if let Descriptor::WorkerInput(id) = name
                && let Some(worker) = self.workers.get_mut(&id)
            {
                worker.send_waiting();
            }
        }
        if ready.has(Descriptor::ClientInput) {
            self.read_client();
        }
        self.handle_attached_clients(&ready);
        self.workers.values_mut().for_each(Worker::check_log);
        if ready.has(Descriptor::ClientOutput) && self.output.flush().is_err() {
            return Err(LoopAction::End);
        }
        for (id, worker) in &mut self.workers {
            if let Some(process) = &worker.process
                && let Some(crash) = worker.watchdog.check(process, &worker.recovery.requests, self.shutdown.is_none())
            {
                return Err(LoopAction::Replace(*id, crash));
            }
        }
        self.advance_shutdown()
    }

    /// Starts the missing worker processes whose start time has come.
    fn start_workers(&mut self) -> StepResult {
        if self.shutdown.is_some() {
            return Ok(());
        }
        let now = Instant::now();
        for (id, worker) in
            self.workers.iter_mut().filter(|(_, worker)| worker.process.is_none() && worker.start_at <= now)
        {
            let started = worker.start(&self.arguments, self.session.as_ref());
            started.map_err(|crash| LoopAction::Replace(*id, crash))?;
        }
        Ok(())
    }

    /// Waits until a descriptor is ready or a deadline has passed.
    fn wait(&mut self) -> Result<ReadyDescriptors<Descriptor>, LoopAction> {
        let is_over = self.is_over();
        let first = &self.workers[&WorkerId::FIRST];
        let takes_more = |client| first.recovery.requests.bytes(client) < MAX_REQUEST_BYTES;
        let mut set = PollSet::new();
        set.add_read(Descriptor::Signals, &self.signals);
        for (id, worker) in &self.workers {
            let Some(process) = &worker.process else { continue };
            if process.is_output_open {
                set.add_read(Descriptor::WorkerOutput(*id), process);
            }
            if worker.can_send()
                && let Some(input) = &process.input
            {
                set.add_write(Descriptor::WorkerInput(*id), input);
            }
        }
        if self.reads_input && self.output.backlog() <= MAX_UNREAD && takes_more(0) {
            self.input.add_to(&mut set, Descriptor::ClientInput);
        }
        if !self.output.is_empty() {
            set.add_write(Descriptor::ClientOutput, &self.output);
        }
        self.attached
            .add_descriptors(&mut set, Descriptor::Attached, |client| self.shutdown.is_none() && takes_more(client));
        let starts =
            self.workers.values().filter(|worker| worker.process.is_none()).map(|worker| worker.start_at).min();
        let wake_at = match &self.shutdown {
            Some(_) if is_over && starts.is_some() => Some(Instant::now()),
            Some(shutdown) => Some(shutdown.deadline),
            None => starts,
        };
        let check_intervals =
            self.workers.values().filter(|worker| worker.is_watched()).map(|worker| worker.watchdog.interval);
        let left = wake_at.map(|time| time.saturating_duration_since(Instant::now()));
        let log_retries = self.workers.values().filter_map(|worker| worker.recovery.time_until_log_retry());
        let retries = log_retries.chain(self.attached.time_until_retry());
        let timeout = left.into_iter().chain(check_intervals).chain(retries).min();
        // One millisecond is added, since the loop would spin if the timeout were rounded down.
        let ready = set.wait(timeout.map(|left| left + Duration::from_millis(1)));
        ready.map_err(|error| LoopAction::Fail(format!("the server cannot wait for input: {error}")))
    }

    /// Reads once from a worker, and handles all complete frames.
    fn read_worker(&mut self, id: WorkerId) -> StepResult {
        let Some(process) = self.workers.get_mut(&id).and_then(|worker| worker.process.as_mut()) else { return Ok(()) };
        process.read();
        loop {
            let Self { workers, output, attached, .. } = self;
            let Some(Worker { process: Some(process), recovery, restarts, .. }) = workers.get_mut(&id) else {
                return Ok(());
            };
            let is_ready = process.ready;
            let Some((kind, call, payload)) = process.next_frame().map_err(|_| protocol_violation(id))? else { break };
            match kind {
                FrameKind::Event => match WorkerEvent::decode(&payload) {
                    Ok(event) => self.handle_event(id, event)?,
                    Err(_) if !process.replayed => {
                        let crash = Crash::new("sent an unreadable report and was terminated");
                        return Err(LoopAction::Replace(id, crash));
                    }
                    Err(error) => report_unreadable_event(process, recovery.clients(), &error),
                },
                _ if !is_ready => return Err(protocol_violation(id)),
                FrameKind::Answer => {
                    let unread = recovery
                        .requests
                        .connection(call)
                        .filter(|client| has_excess_backlog(output, attached, *client));
                    let error = unread.and_then(|_| messages::backlog_error(recovery.requests.text(call)?));
                    let answer = error.map_or(payload, Cow::Owned);
                    match recovery.finish_call(call) {
                        Some(0) => output.put_owned(answer).map_err(|_| LoopAction::End)?,
                        Some(connection) => attached.send(connection, answer),
                        // The call is not open, for instance because it has been answered already.
                        None => continue,
                    }
                    restarts.record_answer();
                }
                FrameKind::Message if has_excess_backlog(output, attached, call) => {}
                FrameKind::Message if call == 0 => output.put_owned(payload).map_err(|_| LoopAction::End)?,
                FrameKind::Message => attached.send(call, payload),
                FrameKind::Done => drop(recovery.finish_call(call)),
                FrameKind::Received => process.record_received(call),
                FrameKind::Part => unreachable!("the worker process joins the parts of an answer"),
            }
        }
        let process = self.workers.get(&id).and_then(|worker| worker.process.as_ref());
        if let Some(process) = process.filter(|process| !process.is_output_open && process.announced_status.is_none()) {
            // The output has ended, but the worker did not announce its exit. If the worker is still alive, user code
            // has closed its descriptors and the worker can report nothing.
            processes::kill_child(process.pid, getpid());
        }
        Ok(())
    }

    /// Handles a worker's event.
    fn handle_event(&mut self, id: WorkerId, event: WorkerEvent) -> StepResult {
        let Some(worker) = self.workers.get_mut(&id) else { return Ok(()) };
        let Worker { process: Some(process), recovery, has_served, .. } = worker else { return Ok(()) };
        // The supervisor reads this file and writes next to it, so the name must not lead to another directory.
        let is_core_elsewhere = event.core_file().is_some_and(|file| !is_core_name(file));
        match event {
            WorkerEvent::Ready if !process.ready => {
                process.ready = true;
                *has_served = true;
                recovery.requests.apply_cancellations();
                worker.send_waiting();
            }
            WorkerEvent::Exiting { status, reason } => {
                process.announced_status = Some(status);
                match reason {
                    _ if self.shutdown.is_some() => {}
                    Some(reason) if !*has_served && !recovery.boots_damaged_checkpoint() => {
                        return Err(LoopAction::Fail(reason));
                    }
                    Some(reason) => {
                        let reason = reason.strip_prefix(CANNOT_START).unwrap_or(&reason);
                        return Err(LoopAction::Replace(id, Crash::new(format!("could not be started: {reason}"))));
                    }
                    // The worker exits without a reason because its input has ended, although the server is not
                    // shutting down.
                    None => {
                        let crash = Crash::new("lost its connection to the server and was terminated");
                        return Err(LoopAction::Replace(id, crash));
                    }
                }
            }
            _ if !process.ready || is_core_elsewhere => return Err(protocol_violation(id)),
            WorkerEvent::Replayed { failed } if !process.replayed => {
                recovery.record_replay(&failed);
                process.replayed = true;
            }
            WorkerEvent::ResetRequested { job, notices } if recovery.may_replace(job) => {
                return Err(LoopAction::Reset(id, job, notices));
            }
            WorkerEvent::RestoreRequested { job, checkpoint, notices } if recovery.may_replace(job) => {
                return Err(LoopAction::Restore(id, job, checkpoint, notices));
            }
            WorkerEvent::Stuck { outcome, why } => {
                return Err(LoopAction::Replace(id, Crash::stuck(outcome, why, process.replayed)));
            }
            WorkerEvent::Changed(event) => recovery.record(event),
            WorkerEvent::ResetRequested { .. }
            | WorkerEvent::RestoreRequested { .. }
            | WorkerEvent::Replayed { .. }
            | WorkerEvent::Ready => return Err(protocol_violation(id)),
        }
        Ok(())
    }

    /// Reaps ended processes after a SIGCHLD: worker processes, whose wait status is kept, and orphans.
    fn reap(&mut self) {
        while let Some((pid, status)) = processes::reap() {
            let mut processes = self.workers.values_mut().filter_map(|worker| worker.process.as_mut());
            if let Some(process) = processes.find(|process| process.pid == pid) {
                process.wait_status = Some(status);
            }
        }
    }

    /// Replaces a worker process that has ended, after reading its remaining output, but no more than a pipe can
    /// contain.
    fn handle_exits(&mut self) -> StepResult {
        let ended = self.workers.iter().find_map(|(id, worker)| Some((*id, worker.process.as_ref()?.wait_status?)));
        let Some((id, status)) = ended else { return Ok(()) };
        let bytes_read = |relay: &Self| {
            relay.workers.get(&id).and_then(|worker| worker.process.as_ref()).map_or(0, |process| process.bytes_read)
        };
        // The process's descendants may write to the pipe without end, but what the process itself wrote comes first.
        let mut before = bytes_read(self);
        let end = before + MAX_PIPE_CAPACITY;
        while before < end {
            self.read_worker(id)?;
            let now = bytes_read(self);
            if now == before {
                break;
            }
            before = now;
        }
        let crash = Crash::new(describe_exit(status));
        let crash = if is_possibly_external(status) { crash.possibly_external() } else { crash };
        let by_heap = status.exit_status() == Some(EXIT_HEAP_EXHAUSTED);
        let outcome = by_heap.then(|| failed_outcome(HEAP_EXHAUSTED, "The heap was used up".to_owned()));
        Err(LoopAction::Replace(id, crash.with_outcome(outcome)))
    }

    /// Reads once from the client of stdin, and handles at most [`MAX_LINES_PER_STEP`] lines.
    fn read_client(&mut self) {
        // A signal may have begun the shutdown in this step.
        if !self.reads_input {
            return;
        }
        let Self { input, output, workers, .. } = self;
        let Some(worker) = workers.get_mut(&WorkerId::FIRST) else { return };
        let read = input.read();
        for _ in 0..MAX_LINES_PER_STEP {
            let Some(line) = input.next_line() else { break };
            match line {
                Line::Text(line) => worker.add_line(0, line),
                Line::TooLong(ScannedMessage::Request(id)) => drop(output.put(&messages::too_long_error(id))),
                Line::TooLong(ScannedMessage::Response(id)) => worker.add_line(0, messages::too_long_error(id).into()),
            }
        }
        if !read.is_ok_and(|read| read != ReadStatus::End) {
            self.shut_down(0);
        }
    }

    /// Handles the attached clients' connections, lines and disconnections.
    fn handle_attached_clients(&mut self, ready: &ReadyDescriptors<Descriptor>) {
        let Self { attached, workers, .. } = self;
        let Some(worker) = workers.get_mut(&WorkerId::FIRST) else { return };
        let mut too_long = Vec::new();
        attached.handle_ready(
            |descriptor| ready.has(Descriptor::Attached(descriptor)),
            |client, event| match event {
                ClientEvent::Connected => worker.connect(client),
                ClientEvent::Line(Line::Text(line)) => worker.add_line(client, line),
                ClientEvent::Line(Line::TooLong(ScannedMessage::Request(id))) => too_long.push((client, id)),
                ClientEvent::Line(Line::TooLong(ScannedMessage::Response(id))) => {
                    worker.add_line(client, messages::too_long_error(id).into());
                }
                ClientEvent::Disconnected => worker.disconnect(client),
            },
        );
        for (client, id) in too_long {
            attached.send(client, Cow::Owned(messages::too_long_error(id)));
        }
    }

    /// Reads the answers that the workers have sent by the end of the loop, and performs a reset or restore that they
    /// have requested: the system may not have run this process until the deadline of the shutdown had passed.
    fn read_last_answers(&mut self) {
        let end = Instant::now() + FINAL_READ_TIME;
        loop {
            let mut set = PollSet::new();
            for (id, worker) in &self.workers {
                // A worker sends its answers before it announces its exit.
                let process = worker.process.as_ref();
                if let Some(process) =
                    process.filter(|process| process.is_output_open && process.announced_status.is_none())
                {
                    set.add_read(*id, process);
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            if set.is_empty() || left.is_zero() {
                return;
            }
            let Ok(ready) = set.wait(Some(left)) else { return };
            for id in ready.names() {
                match self.read_worker(id) {
                    Ok(()) => {}
                    Err(LoopAction::Reset(id, job, notices)) => return self.reset(id, job, notices),
                    Err(LoopAction::Restore(id, job, checkpoint, notices)) => {
                        return self.restore(id, job, *checkpoint, notices);
                    }
                    Err(_) => return,
                }
            }
        }
    }

    /// Kills the descendants of this process, except those that may still save the persistent session.
    fn kill_processes(&mut self) {
        if self.session.is_none() || self.shutdown.as_ref().is_some_and(|shutdown| shutdown.waits_for_request) {
            return processes::kill_all_descendants();
        }
        let processes = || self.workers.values().filter_map(|worker| worker.process.as_ref());
        // The status page is read after each search: a worker may start the saving process and end at any time.
        processes::kill_all_descendants_except(|| {
            let ready = processes().filter(|process| process.ready).map(|process| process.pid);
            ready.chain(processes().filter_map(|process| process.status.saver())).chain(self.saver).collect()
        });
        self.saver = processes().find_map(|process| process.status.saver()).or(self.saver);
    }

    /// Begins a graceful shutdown: the supervisor reads no more requests, and running calls have until the deadline to
    /// finish.
    fn shut_down(&mut self, status: i32) {
        self.reads_input = false;
        self.attached.close();
        if let Some((_, lock)) = &mut self.session {
            lock.set_state(HolderState::Saving);
        }
        self.workers.values_mut().for_each(|worker| worker.recovery.rewrite_log());
        if self.shutdown.is_none() {
            self.shutdown = Some(Shutdown::graceful(status));
        }
    }

    /// Kills the workers of a server that cannot continue, and begins the shutdown.
    fn fail(&mut self, reason: String) {
        processes::kill_all_descendants();
        self.workers.values_mut().for_each(|worker| worker.process = None);
        self.shutdown.get_or_insert_with(|| Shutdown::failure(reason));
    }

    /// Returns true during a shutdown when there is nothing left to wait for.
    fn is_over(&self) -> bool {
        let Some(shutdown) = &self.shutdown else { return false };
        let has_awaited_lines = |worker: &Worker| worker.recovery.requests.has_awaited_lines();
        self.workers.values().all(|worker| worker.process.is_none())
            && (!shutdown.waits_for_request || !self.reads_input || self.workers.values().any(has_awaited_lines))
    }

    /// Closes the workers' inputs during a shutdown, and ends the loop when the shutdown is over.
    fn advance_shutdown(&mut self) -> StepResult {
        let Some(shutdown) = &self.shutdown else { return Ok(()) };
        for worker in self.workers.values_mut().filter(|worker| !worker.has_unsent_input()) {
            if let Some(process) = worker.process.as_mut().filter(|process| process.ready) {
                // The worker ends at the end of its input.
                process.input = None;
            }
        }
        let deadline = shutdown.deadline;
        if self.is_over() || Instant::now() >= deadline { Err(LoopAction::End) } else { Ok(()) }
    }

    /// Kills the remains of a lost process and schedules the next process, except during a shutdown. After too many
    /// losses, the server fails.
    fn replace(&mut self, id: WorkerId, crash: &Crash) {
        if self.shutdown.is_some() {
            self.kill_processes();
            if let Some(worker) = self.workers.get_mut(&id) {
                let process = worker.process.take();
                if let Some(process) = process.as_ref().filter(|_| worker.recovery.has_pending_restore()) {
                    worker.recovery.record_crash(&process.status, process.replayed, crash);
                }
                worker.announced_status = process.and_then(|process| process.announced_status);
            }
            return;
        }
        self.kill_processes_of(id);
        match self.workers.get_mut(&id).map(|worker| worker.record_loss(crash)) {
            Some(Ok(Some((0, refusal)))) => drop(self.output.put(&refusal)),
            Some(Ok(Some((client, refusal)))) => self.attached.send(client, Cow::Owned(refusal)),
            Some(Ok(None)) | None => {}
            Some(Err(reason)) => {
                tracing::error!("{reason}");
                self.fail(reason);
            }
        }
    }

    /// Resets the session at the request of the call whose jobs begin at `job`.
    fn reset(&mut self, id: WorkerId, job: u64, notices: Vec<String>) {
        self.replace_on_request(id, |recovery, process| recovery.record_reset(&process.status, job, notices));
    }

    /// Restores the checkpoint at the request of the call whose jobs begin at `job`.
    fn restore(&mut self, id: WorkerId, job: u64, checkpoint: Checkpoint, notices: Vec<String>) {
        self.replace_on_request(id, |recovery, process| {
            recovery.request_restore(&process.status, job, checkpoint, notices);
        });
    }

    /// Replaces a worker's process at the request of a call. `record` records the reason in the recovery record.
    fn replace_on_request(&mut self, id: WorkerId, record: impl FnOnce(&mut RecoveryRecord, &WorkerProcess)) {
        // The process must not outlive its input: at the end of its input it would believe that the server has ended, and
        // delete the checkpoints.
        self.kill_processes_of(id);
        if let Some((session, _)) = self.session.as_ref().filter(|_| self.shutdown.is_some()) {
            // The worker may have begun to save the image that the call discards. The save is not a failed save.
            let _ = session.take_save_failure();
        }
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.replace(record);
        }
    }

    /// Kills a worker's process and its descendants. Since there is only one worker, these are all descendants of
    /// the supervisor.
    fn kill_processes_of(&self, _id: WorkerId) {
        processes::kill_all_descendants();
    }
}

/// Reports the first unreadable event of a process on stderr and to the clients, since the next image may lack the
/// change that the event describes.
fn report_unreadable_event(worker: &mut WorkerProcess, clients: impl Iterator<Item = u64>, error: &serde_json::Error) {
    if std::mem::replace(&mut worker.has_unreadable_event, true) {
        return;
    }
    let error: String = error.to_string().chars().take(MAX_ERROR_CHARS).collect();
    tracing::error!("the supervisor could not read a report from the image: {error}");
    let text = format!(
        "The supervisor could not read a report from the Lisp process ({error}). If the process dies, the new process \
        may lack a recent change, such as a definition: evaluate recent definitions again, or save a checkpoint."
    );
    if let Some(input) = &mut worker.input {
        for client in clients {
            // An error means that the worker is lost, which the event loop detects.
            let _ = input.put(&mark_notice(client, &text));
        }
    }
}

/// Returns the action that replaces a worker because it broke the protocol.
fn protocol_violation(id: WorkerId) -> LoopAction {
    let crash = Crash::new("was terminated because code had written to a file descriptor that the server uses");
    LoopAction::Replace(id, crash)
}

/// Returns true when a client's backlog is so large that errors replace the answers to the client.
fn has_excess_backlog(output: &WriteBuffer, attached: &AttachedClients, connection: u64) -> bool {
    let backlog = if connection == 0 { output.backlog() } else { attached.backlog(connection) };
    backlog > MAX_UNREAD
}

/// A descriptor that the loop polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Descriptor {
    Signals,
    /// The pipe that a worker process writes to.
    WorkerOutput(WorkerId),
    /// The pipe that a worker process reads from.
    WorkerInput(WorkerId),
    /// The server's stdin.
    ClientInput,
    /// The server's stdout.
    ClientOutput,
    /// A descriptor of the attached clients.
    Attached(AttachedDescriptor),
}
