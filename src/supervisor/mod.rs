//! The supervisor: owns the client's stdin and stdout, and a worker that serves Lisp there.
//!
//! A worker may die of what its Lisp does. The supervisor, a single thread that runs no code but its own, copies whole
//! lines between client and worker, remembers what the next worker must know, and starts it. It reads no more of a
//! line than where it ends: the worker says which line it answers, and what is worth remembering.

mod journal;
pub(crate) mod processes;
mod refusal;
mod relay;
mod requests;
mod watchdog;
mod worker_process;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;

use relay::Relay;
use worker_process::Command;

/// Serves the client until it closes its end or a signal comes; returns the exit status.
///
/// `input` and `output` are the client's; `arguments` are those of a worker; `restore`: definitions come back when an
/// image is lost.
pub(crate) fn serve(input: OwnedFd, output: OwnedFd, arguments: Vec<OsString>, restore: bool) -> io::Result<i32> {
    processes::adopt_orphans();
    let status = Relay::start(input, output, Command::new(arguments), restore)?.run();
    processes::end_all_but(None);
    status
}
