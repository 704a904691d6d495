//! The worker process: a process of this program that serves MCP and runs Lisp.

use std::borrow::Cow;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, WaitStatus};

use super::requests::{PIECE, Requests};
use crate::image::heap;
use crate::recovery::checkpoint::store::this_program;
use crate::recovery::persistent::Durable;
use crate::recovery::persistent::lock::Lock;
use crate::recovery::status_page::WorkerStatus;
use crate::rpc::WriteBuffer;
use crate::rpc::descriptors::nonblocking;
use crate::rpc::frame::{Kind, MAX_LINE_PAYLOAD, Malformed, parse};
use crate::rpc::route::MAX_AHEAD;

/// Bytes of a single read.
const CHUNK: usize = 64 << 10;
/// Bytes of the read buffer that are kept when the buffer is empty.
const KEEP: usize = 1 << 20;

/// Starts a worker process with these arguments, which boots `image`, or the program's own core. With a persistent session
/// the process inherits the session's lock, and its status page is a file of the session.
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
    // A process group of its own: the terminal's signals reach only the supervisor, and signals that a child of the worker
    // sends to its process group do not.
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
        large: Vec::new(),
        large_line: None,
        read: 0,
        sent: 0,
        received: 0,
        ended: None,
        ready: false,
        restored: false,
        bye: None,
        has_unreadable: false,
    })
}

/// A frame's kind, its line, and its payload: one's own where that came in parts.
pub(super) type Received<'a> = (Kind, u64, Cow<'a, [u8]>);

/// A worker process that was started.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    pub(super) pid: Pid,
    pub(super) status: WorkerStatus,
    /// The pipe that the process reads; `None` once the pipe is closed.
    pub(super) input: Option<WriteBuffer>,
    output: OwnedFd,
    /// True until the end of the process' output.
    pub(super) open: bool,
    buffer: Vec<u8>,
    /// The start of the next frame in `buffer`.
    start: usize,
    /// The answer that comes in parts, as far as it is read, and the line it answers.
    large: Vec<u8>,
    large_line: Option<u64>,
    /// The number of bytes read from the process.
    pub(super) read: u64,
    /// The number of whole lines sent to the process, and the number that it has reported as received.
    sent: u64,
    received: u64,
    /// The wait status of a reaped process, whose id may belong to another process now.
    pub(super) ended: Option<WaitStatus>,
    /// True once the process serves.
    pub(super) ready: bool,
    /// True once the process has replayed its definitions.
    pub(super) restored: bool,
    /// The exit status that the process announced.
    pub(super) bye: Option<i32>,
    /// True once the process has reported an event that cannot be read.
    pub(super) has_unreadable: bool,
}

impl WorkerProcess {
    /// Writes unsent bytes and then waiting lines, as far as the process reads, but not much more than a piece at a time. A
    /// process that is not ready must read its recovery state first.
    pub(super) fn hand_on(&mut self, requests: &mut Requests) {
        let Some(input) = &mut self.input else { return };
        // A process that has closed its input is lost; the next process gets the lines.
        let mut goes_on = input.flush().is_ok();
        let mut written = 0;
        // Lines beyond the pipe's capacity stay in `requests`, where lines of other clients can pass them.
        while goes_on
            && input.is_empty()
            && written < PIECE
            && self.ready
            && self.sent < self.received + MAX_AHEAD
            && let Some(piece) = requests.next_piece()
        {
            written += piece.marked.len();
            self.sent += u64::from(piece.is_last);
            goes_on = input.put(&piece.marked).is_ok();
        }
        if !goes_on {
            self.input = None;
        }
    }

    /// Returns true while the process is to be sent what waits, as soon as it reads.
    pub(super) fn takes_more(&self) -> bool {
        self.ready && self.sent < self.received + MAX_AHEAD
    }

    /// Records that the process reports so many lines as received.
    pub(super) fn report_received(&mut self, lines: u64) {
        self.received = self.received.max(lines.min(self.sent));
    }

    /// Reads once from the process.
    pub(super) fn read(&mut self) {
        self.buffer.drain(..self.start);
        self.start = 0;
        if self.buffer.is_empty() {
            self.buffer.shrink_to(KEEP);
        }
        self.buffer.reserve(CHUNK);
        match rustix::io::read(&self.output, rustix::buffer::spare_capacity(&mut self.buffer)) {
            Ok(0) => self.open = false,
            Ok(read) => self.read += read as u64,
            // Nothing to read now.
            Err(_) => {}
        }
    }

    /// Returns the next intact frame, or the next answer that came in parts; `None` until more is read.
    pub(super) fn next_frame(&mut self) -> Result<Option<Received<'_>>, Malformed> {
        loop {
            let Some(((kind, line, payload), length)) = parse(&self.buffer[self.start..])? else { return Ok(None) };
            self.start += length;
            let is_last = kind == Kind::Answer && self.large_line == Some(line);
            if kind != Kind::Part && !is_last {
                return Ok(Some((kind, line, Cow::Borrowed(payload))));
            }
            if *self.large_line.get_or_insert(line) != line || self.large.len() + payload.len() > MAX_LINE_PAYLOAD {
                return Err(Malformed);
            }
            self.large.extend_from_slice(payload);
            if is_last {
                self.large_line = None;
                return Ok(Some((kind, line, Cow::Owned(std::mem::take(&mut self.large)))));
            }
        }
    }

    /// Returns the number of bytes read, if the last frame or answer is incomplete.
    pub(super) fn unfinished(&self) -> Option<u64> {
        (self.start < self.buffer.len() || self.large_line.is_some()).then_some(self.read)
    }
}

impl AsFd for WorkerProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.output.as_fd()
    }
}

/// Describes the end of a process, as the rest of a sentence.
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

/// Returns true for a process killed by a signal that users and other programs send. A fault in the process itself raises
/// none of these signals.
pub(super) fn may_be_from_outside(status: WaitStatus) -> bool {
    let sent = [Signal::KILL, Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];
    status.terminating_signal().is_some_and(|signal| sent.iter().any(|one| one.as_raw() == signal))
}
