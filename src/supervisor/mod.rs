//! The supervisor: owns the client's stdin and stdout, and a worker that serves Lisp there.
//!
//! A worker may die of what its Lisp does. The supervisor, a single thread that runs no code but its own, copies whole
//! lines between client and worker, remembers what the next worker must know, and starts it. It reads no more of a
//! line than where it ends: the worker says which line it answers, and what is worth remembering.

mod guests;
pub(crate) mod log;
mod messages;
pub(crate) mod processes;
mod recovery;
mod relay;
mod requests;
mod restart_policy;
mod shutdown;
mod watchdog;
mod worker;
mod worker_process;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::attach::Listener;
use crate::durable::Durable;
use crate::durable::lock::Lock;
use crate::recovery::checkpoint::store::Checkpoints;
use crate::rpc::recorder::Recorder;
use recovery::Recovery;
use relay::Relay;

/// How to supervise.
#[derive(Debug)]
pub(crate) struct Options {
    /// The arguments of a worker.
    pub(crate) arguments: Vec<OsString>,
    /// Definitions come back when an image is lost.
    pub(crate) restore: bool,
    /// Where checkpoints are.
    pub(crate) checkpoints: Checkpoints,
    /// A new image begins with the last one.
    pub(crate) begins_with_checkpoints: bool,
    /// The persistent session, which this process has locked.
    pub(crate) durable: Option<(Durable, Lock)>,
    /// Where clients may join.
    pub(crate) listener: Option<Listener>,
    /// How often to look whether the worker does anything.
    pub(crate) watch_interval: Duration,
    /// What records the conversation.
    pub(crate) recorder: Option<Recorder>,
}

/// What is remembered between workers, before the first one.
#[derive(Debug)]
pub(crate) struct Supervisor {
    options: Options,
    recovery: Recovery,
}

impl Supervisor {
    /// One that goes on where a persistent session was left, or begins with nothing.
    ///
    /// # Errors
    /// A sentence: that session cannot be gone on with.
    pub(crate) fn new(options: Options) -> Result<Self, String> {
        let mut recovery = Recovery::new(&options);
        if let Some((durable, _)) = &options.durable {
            recovery.continue_session(durable)?;
        }
        Ok(Self { options, recovery })
    }

    /// Serves the client, whose ends of the conversation are `input` and `output`, until it closes its end or a signal
    /// comes; returns the exit status.
    pub(crate) fn serve(self, input: OwnedFd, output: OwnedFd) -> io::Result<i32> {
        processes::adopt_orphans();
        Ok(Relay::new(input, output, self.options, self.recovery)?.run())
    }
}
