//! A worker: a process of this very program that serves MCP and runs Lisp.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;

use rustix::process::{Pid, WaitStatus};

use super::processes;
use crate::handover::board::SharedBoard;
use crate::handover::frame::{HEADER, Kind, parse};
use crate::image::heap;
use crate::rpc::WriteBuffer;
use crate::rpc::descriptors::nonblocking;

/// How much is read at a time.
const CHUNK: usize = 64 << 10;
/// Kept memory above this is given back when it is no longer needed.
const KEEP: usize = 1 << 20;

/// How workers are started.
#[derive(Debug)]
pub(super) struct Command {
    arguments: Vec<OsString>,
}

impl Command {
    pub(super) fn new(arguments: Vec<OsString>) -> Self {
        Self { arguments }
    }

    /// Starts one.
    pub(super) fn start(&self) -> io::Result<WorkerProcess> {
        let board = SharedBoard::new()?;
        let (requests, to) = io::pipe()?;
        let (from, answers) = io::pipe()?;
        let mut command = std::process::Command::new(this_program()?);
        command.arg0("sbcl-mcp").args(&self.arguments).arg(format!("--board={}", board.inherit(true)?));
        command.stdin(Stdio::from(OwnedFd::from(requests))).stdout(Stdio::from(OwnedFd::from(answers)));
        // What the terminal sends to everybody is for the supervisor.
        let child = command.process_group(0).spawn();
        board.inherit(false)?;
        let pid = i32::try_from(child?.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::Other)?;
        Ok(WorkerProcess {
            pid,
            board,
            input: Some(WriteBuffer::new(nonblocking(to.into())?)),
            output: nonblocking(from.into())?,
            open: true,
            buffer: Vec::new(),
            gone: false,
            ready: false,
            bye: None,
        })
    }
}

/// This very program, even if its file has been replaced since.
#[cfg(target_os = "linux")]
fn this_program() -> io::Result<PathBuf> {
    Ok(PathBuf::from("/proc/self/exe"))
}

#[cfg(not(target_os = "linux"))]
fn this_program() -> io::Result<PathBuf> {
    std::env::current_exe()
}

/// A worker that was started.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    pub(super) pid: Pid,
    pub(super) board: SharedBoard,
    /// What it reads; `None` once there will be no more.
    pub(super) input: Option<WriteBuffer>,
    output: OwnedFd,
    /// It may still write something.
    pub(super) open: bool,
    /// Frames that are not complete.
    buffer: Vec<u8>,
    /// It has ended, and its number may be another process' by now.
    pub(super) gone: bool,
    /// It has restored what there was and serves.
    pub(super) ready: bool,
    /// The status that it said it would end with.
    pub(super) bye: Option<i32>,
}

/// A frame.
pub(super) type Frame<'a> = (Kind, u64, &'a [u8]);

impl WorkerProcess {
    /// Reads once and hands on the frames that are complete by then, until `take` returns false. Returns false when
    /// nothing was there to be read. An error is what no worker writes.
    pub(super) fn read(&mut self, mut take: impl FnMut(Frame<'_>) -> bool) -> io::Result<bool> {
        self.buffer.reserve(CHUNK);
        let read = match rustix::io::read(&self.output, rustix::buffer::spare_capacity(&mut self.buffer)) {
            Ok(read) => read,
            Err(rustix::io::Errno::INTR) => return Ok(true),
            Err(_) => return Ok(false),
        };
        if read == 0 {
            self.open = false;
            return Ok(false);
        }
        let mut start = 0;
        while let Some(header) = self.buffer[start..].first_chunk::<HEADER>() {
            let (kind, line, length) = parse(header).ok_or(io::ErrorKind::InvalidData)?;
            let end = start + HEADER + length;
            let Some(payload) = self.buffer.get(start + HEADER..end) else {
                self.buffer.reserve(end - self.buffer.len());
                break;
            };
            start = end;
            if !take((kind, line, payload)) {
                break;
            }
        }
        if start == self.buffer.len() {
            self.buffer.clear();
            self.buffer.shrink_to(KEEP);
        } else {
            self.buffer.drain(..start);
        }
        Ok(true)
    }

    /// Ends it and what it started, whatever they do.
    pub(super) fn kill(&self) {
        if !self.gone {
            processes::end_tree(self.pid);
        }
    }
}

impl AsFd for WorkerProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.output.as_fd()
    }
}

/// How a process ended, as the rest of a sentence.
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
