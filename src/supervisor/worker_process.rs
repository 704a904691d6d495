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

use super::requests::{MAX_PIECE, Requests};
use crate::image::heap;
use crate::recovery::checkpoint::store::this_program;
use crate::recovery::persistent::PersistentSession;
use crate::recovery::persistent::lock::Lock;
use crate::recovery::status_page::{NewestNumbers, WorkerStatus};
use crate::recovery::text;
use crate::rpc::WriteBuffer;
use crate::rpc::descriptors::set_nonblocking;
use crate::rpc::frame::{FrameKind, MAX_LINE_PAYLOAD, MalformedFrame, parse};
use crate::rpc::route::MAX_LINES_AHEAD;

/// Minimum free capacity of the read buffer before a read, in bytes.
const MIN_READ_CAPACITY: usize = 64 << 10;
/// Maximum capacity, in bytes, that an empty read buffer keeps allocated.
const MAX_IDLE_CAPACITY: usize = 1 << 20;

/// Starts a worker process with these arguments. The process boots the core `image`, or the program's own core if
/// `image` is `None`. Its status page begins with the numbers `newest`. With a persistent session the process inherits the
/// session's lock, and its status page is a file of the session.
pub(super) fn start(
    arguments: &[OsString],
    image: Option<&Path>,
    session: Option<&(PersistentSession, Lock)>,
    newest: NewestNumbers,
) -> io::Result<WorkerProcess> {
    let status = WorkerStatus::new(session.map(|(session, _)| session.status_file()).as_deref(), newest)?;
    let (requests, to) = io::pipe()?;
    let (from, answers) = io::pipe()?;
    let (to, from) = (set_nonblocking(to.into())?, set_nonblocking(from.into())?);
    let mut command = std::process::Command::new(this_program()?);
    command.arg0("sbcl-mcp").args(arguments).arg(format!("--status-fd={}", status.set_inheritable(true)?));
    if let Some(image) = image {
        command.arg("--image").arg(image);
    }
    let lock = session.map(|(_, lock)| lock.as_fd());
    if let Some(lock) = lock {
        rustix::io::fcntl_setfd(lock, FdFlags::empty())?;
        command.arg(format!("--lock-fd={}", lock.as_raw_fd()));
    }
    command.stdin(Stdio::from(OwnedFd::from(requests))).stdout(Stdio::from(OwnedFd::from(answers)));
    // The worker gets a process group of its own: the terminal's signals reach only the supervisor, and signals that a
    // child of the worker sends to its process group do not reach the supervisor.
    let child = command.process_group(0).spawn();
    status.set_inheritable(false)?;
    lock.map_or(Ok(()), |lock| rustix::io::fcntl_setfd(lock, FdFlags::CLOEXEC))?;
    Ok(WorkerProcess::new(Pid::from_child(&child?), status, WriteBuffer::new(to), from))
}

/// A frame's kind, line number and payload. The payload is owned if it came in parts.
pub(super) type ReceivedFrame<'a> = (FrameKind, u64, Cow<'a, [u8]>);

/// A worker process that was started.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    pub(super) pid: Pid,
    pub(super) status: WorkerStatus,
    /// The pipe that the process reads; `None` once the pipe is closed.
    pub(super) input: Option<WriteBuffer>,
    output: OwnedFd,
    /// True until the end of the process's output.
    pub(super) is_output_open: bool,
    /// The bytes that were read. Frames before `start` have already been returned.
    buffer: Vec<u8>,
    /// The start of the next frame in `buffer`.
    start: usize,
    /// The parts of a large answer that have arrived.
    partial_answer: Vec<u8>,
    /// The number of the line that the partial answer belongs to; `None` when no answer is partial.
    partial_answer_line: Option<u64>,
    /// The number of bytes read from the process.
    pub(super) bytes_read: u64,
    /// The number of complete lines sent to the process.
    sent: u64,
    /// The number of lines that the process has reported as received.
    received: u64,
    /// The wait status, once the process is reaped. From then on, `pid` may belong to another process.
    pub(super) wait_status: Option<WaitStatus>,
    /// True once the process serves.
    pub(super) ready: bool,
    /// True once the process has replayed its definitions.
    pub(super) replayed: bool,
    /// The exit status that the process announced.
    pub(super) announced_status: Option<i32>,
    /// True once the process has reported an event that cannot be read.
    pub(super) has_unreadable_event: bool,
}

impl WorkerProcess {
    /// Creates the record of a process that was just started, with the pipes that the process reads and writes.
    pub(super) fn new(pid: Pid, status: WorkerStatus, input: WriteBuffer, output: OwnedFd) -> Self {
        Self {
            pid,
            status,
            input: Some(input),
            output,
            is_output_open: true,
            buffer: Vec::new(),
            start: 0,
            partial_answer: Vec::new(),
            partial_answer_line: None,
            bytes_read: 0,
            sent: 0,
            received: 0,
            wait_status: None,
            ready: false,
            replayed: false,
            announced_status: None,
            has_unreadable_event: false,
        }
    }

    /// Writes unsent bytes and then waiting lines, as long as the process reads them, but no further lines once the
    /// lines of this call have [`MAX_PIECE`] bytes. A process gets lines only once it is ready, since it must read its
    /// recovery state first.
    pub(super) fn send_waiting(&mut self, requests: &mut Requests) {
        let Some(input) = &mut self.input else { return };
        // A process that has closed its input is lost; the next process gets the lines.
        let mut is_open = input.flush().is_ok();
        let mut written = 0;
        // Lines beyond the pipe's capacity stay in `requests`, where lines of other clients can pass them.
        while is_open
            && input.is_empty()
            && written < MAX_PIECE
            && self.ready
            && self.sent < self.received + MAX_LINES_AHEAD
            && let Some(piece) = requests.next_piece()
        {
            written += piece.marked.len() + piece.dropped;
            self.sent += u64::from(piece.is_last);
            is_open = piece.age.iter().chain([&piece.marked]).all(|line| input.put(line).is_ok());
        }
        if !is_open {
            self.input = None;
        }
    }

    /// Returns true while the process is ready and fewer than [`MAX_LINES_AHEAD`] sent lines are not reported as received.
    pub(super) fn takes_lines(&self) -> bool {
        self.ready && self.sent < self.received + MAX_LINES_AHEAD
    }

    /// Records that the process has reported `lines` lines as received.
    pub(super) fn record_received(&mut self, lines: u64) {
        self.received = self.received.max(lines.min(self.sent));
    }

    /// Reads once from the process.
    pub(super) fn read(&mut self) {
        self.buffer.drain(..self.start);
        self.start = 0;
        if self.buffer.is_empty() {
            self.buffer.shrink_to(MAX_IDLE_CAPACITY);
        }
        self.buffer.reserve(MIN_READ_CAPACITY);
        match rustix::io::read(&self.output, rustix::buffer::spare_capacity(&mut self.buffer)) {
            Ok(0) => self.is_output_open = false,
            Ok(read) => self.bytes_read += read as u64,
            // The descriptor does not block: an error means that there is nothing to read now.
            Err(_) => {}
        }
    }

    /// Returns the number of bytes that the process has written and that have not been read.
    pub(super) fn unread_bytes(&self) -> u64 {
        rustix::io::ioctl_fionread(&self.output).unwrap_or(0)
    }

    /// Returns the next complete frame, or the next answer that came in parts; `None` until more is read.
    ///
    /// # Errors
    /// Returns [`MalformedFrame`] for bytes that the worker's own code does not write, and for an answer that is too long.
    pub(super) fn next_frame(&mut self) -> Result<Option<ReceivedFrame<'_>>, MalformedFrame> {
        loop {
            let Some(((kind, line, payload), length)) = parse(&self.buffer[self.start..])? else { return Ok(None) };
            self.start += length;
            let is_last = kind == FrameKind::Answer && self.partial_answer_line == Some(line);
            if kind != FrameKind::Part && !is_last {
                return Ok(Some((kind, line, Cow::Borrowed(payload))));
            }
            if *self.partial_answer_line.get_or_insert(line) != line
                || self.partial_answer.len() + payload.len() > MAX_LINE_PAYLOAD
            {
                return Err(MalformedFrame);
            }
            self.partial_answer.extend_from_slice(payload);
            if is_last {
                self.partial_answer_line = None;
                return Ok(Some((kind, line, Cow::Owned(std::mem::take(&mut self.partial_answer)))));
            }
        }
    }

    /// Returns the number of bytes read so far, if they end within a frame or within an answer in parts.
    pub(super) fn unfinished_frame_at(&self) -> Option<u64> {
        (self.start < self.buffer.len() || self.partial_answer_line.is_some()).then_some(self.bytes_read)
    }
}

impl AsFd for WorkerProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.output.as_fd()
    }
}

/// Describes the end of a worker process, as the predicate of a sentence about the Lisp image.
pub(super) fn describe_exit(status: WaitStatus) -> String {
    if let Some(signal) = status.terminating_signal() {
        return format!("was killed by {}", text::describe_signal(signal));
    }
    match status.exit_status() {
        Some(heap::EXIT_IMAGE_LOST) => {
            "could not continue, because SBCL itself or foreign code aborted (the server's stderr may say why)"
                .to_owned()
        }
        Some(heap::EXIT_HEAP_EXHAUSTED) => {
            "filled its heap and was terminated (keep fewer objects, or start with a larger heap)".to_owned()
        }
        Some(status) => format!("exited with status {status}"),
        None => "ended".to_owned(),
    }
}

/// Returns true for a process killed by a signal that users and other programs send. A fault in the process itself
/// raises none of these signals.
pub(super) fn is_possibly_external(status: WaitStatus) -> bool {
    let sent = [Signal::KILL, Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];
    status.terminating_signal().is_some_and(|signal| sent.iter().any(|sent| sent.as_raw() == signal))
}
