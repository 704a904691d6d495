//! A worker: a process of this very program that serves MCP and runs Lisp.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, WaitStatus};

use super::requests::{PIECE, Requests};
use crate::durable::Durable;
use crate::durable::lock::Lock;
use crate::image::heap;
use crate::recovery::checkpoint::store::this_program;
use crate::recovery::status_page::WorkerStatus;
use crate::rpc::WriteBuffer;
use crate::rpc::descriptors::nonblocking;
use crate::rpc::frame::{Frame, Malformed, parse};

/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;
/// Kept memory above this is given back when it is no longer needed.
const KEEP: usize = 1 << 20;

/// Starts a worker with these arguments, which boots `image`, or the plain one. It gets the lock of a persistent session,
/// too, and its numbers stay with that.
pub(super) fn start(
    arguments: &[OsString],
    image: Option<&Path>,
    durable: Option<&(Durable, Lock)>,
) -> io::Result<WorkerProcess> {
    let status = WorkerStatus::new(durable.map(|(durable, _)| durable.status_file()).as_deref())?;
    let (requests, to) = io::pipe()?;
    let (from, answers) = io::pipe()?;
    let (to, from) = (nonblocking(to.into())?, nonblocking(from.into())?);
    let mut command = std::process::Command::new(this_program()?);
    command.arg0("sbcl-mcp").args(arguments).arg(format!("--status-fd={}", status.inherit(true)?));
    if let Some(image) = image {
        command.arg("--image").arg(image);
    }
    let lock = durable.map(|(_, lock)| lock.as_fd());
    if let Some(lock) = lock {
        rustix::io::fcntl_setfd(lock, FdFlags::empty())?;
        command.arg(format!("--lock-fd={}", lock.as_raw_fd()));
    }
    command.stdin(Stdio::from(OwnedFd::from(requests))).stdout(Stdio::from(OwnedFd::from(answers)));
    // What the terminal sends to everybody is for the supervisor, and what a child of the worker's sends to its process
    // group is not.
    let child = command.process_group(0).spawn();
    status.inherit(false)?;
    lock.map_or(Ok(()), |lock| rustix::io::fcntl_setfd(lock, FdFlags::CLOEXEC))?;
    Ok(WorkerProcess {
        pid: Pid::from_child(&child?),
        status,
        input: Some(WriteBuffer::new(to)),
        output: from,
        open: true,
        buffer: Vec::new(),
        start: 0,
        received: 0,
        ended: None,
        ready: false,
        restored: false,
        bye: None,
        has_unreadable: false,
    })
}

/// A worker that was started.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    pub(super) pid: Pid,
    pub(super) status: WorkerStatus,
    /// Its input; `None` once that is closed.
    pub(super) input: Option<WriteBuffer>,
    output: OwnedFd,
    /// Its output is open.
    pub(super) open: bool,
    buffer: Vec<u8>,
    /// The place in `buffer` where the next frame begins.
    start: usize,
    /// The number of bytes that it has written.
    pub(super) received: u64,
    /// Its exit status, once it has ended: its process id may be another process' then.
    pub(super) ended: Option<WaitStatus>,
    /// True once it serves.
    pub(super) ready: bool,
    /// True once it has replayed its definitions.
    pub(super) restored: bool,
    /// The status that it said it would end with.
    pub(super) bye: Option<i32>,
    /// True once it has reported an event that cannot be read.
    pub(super) has_unreadable: bool,
}

impl WorkerProcess {
    /// Writes what is left, and then what waits, as far as the process reads, and not for long. A process that is not ready has
    /// to read its recovery state first.
    pub(super) fn hand_on(&mut self, requests: &mut Requests) {
        let Some(input) = &mut self.input else { return };
        // A process that does not read any more is gone; the next one gets the lines.
        let mut goes_on = input.flush().is_ok();
        let mut written = 0;
        // What is more than the pipe holds stays where other clients' lines can come before it.
        while goes_on
            && self.ready
            && input.is_empty()
            && written < PIECE
            && let Some(piece) = requests.next_piece()
        {
            written += piece.len();
            goes_on = input.put(&piece).is_ok();
        }
        if !goes_on {
            self.input = None;
        }
    }

    /// Reads once.
    pub(super) fn read(&mut self) {
        self.buffer.drain(..self.start);
        self.start = 0;
        if self.buffer.is_empty() {
            self.buffer.shrink_to(KEEP);
        }
        self.buffer.reserve(CHUNK);
        match rustix::io::read(&self.output, rustix::buffer::spare_capacity(&mut self.buffer)) {
            Ok(0) => self.open = false,
            Ok(read) => self.received += read as u64,
            // Nothing is there now.
            Err(_) => {}
        }
    }

    /// The next frame that was read as a whole.
    pub(super) fn next_frame(&mut self) -> Result<Option<Frame<'_>>, Malformed> {
        let Some((frame, length)) = parse(&self.buffer[self.start..])? else { return Ok(None) };
        self.start += length;
        Ok(Some(frame))
    }

    /// Returns the number of bytes that it has written, when they end within a frame.
    pub(super) fn unfinished(&self) -> Option<u64> {
        (self.start < self.buffer.len()).then_some(self.received)
    }
}

impl AsFd for WorkerProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.output.as_fd()
    }
}

/// Describes how a process ended, as the rest of a sentence.
pub(super) fn cause(status: WaitStatus) -> String {
    if let Some(signal) = status.terminating_signal() {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
        let hint = match name {
            "SIGKILL" => ": somebody ended it, or the system, short of memory",
            "SIGABRT" => ": foreign code or SBCL itself gave up",
            "SIGSEGV" | "SIGBUS" | "SIGILL" | "SIGFPE" => ": foreign code, or damaged memory",
            _ => "",
        };
        return format!("was killed by signal {signal} ({name}{hint})");
    }
    match status.exit_status() {
        Some(heap::LOST) => "could not go on: SBCL itself or foreign code gave up, and stderr says more".to_owned(),
        Some(heap::LOST_TO_HEAP) => "could not go on and was ended".to_owned(),
        Some(status) => format!("ended its process with status {status}"),
        None => "ended".to_owned(),
    }
}

/// True when a process was ended by a signal that people and programs send to one another. None of these is what becomes
/// of a fault in the process itself.
pub(super) fn may_be_from_outside(status: WaitStatus) -> bool {
    let sent = [Signal::KILL, Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];
    status.terminating_signal().is_some_and(|signal| sent.iter().any(|one| one.as_raw() == signal))
}
