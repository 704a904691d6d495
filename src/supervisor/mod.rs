//! The supervisor: owns the client's stdin and stdout, and a worker that serves Lisp there.
//!
//! A worker may die of what its Lisp does. The supervisor, a single thread that runs no code but its own, copies whole
//! lines between client and worker, remembers what the next worker must know, and starts it. It reads no more of a
//! line than where it ends: the worker says which line it answers, and what is worth remembering.

mod guests;
pub(crate) mod log;
mod messages;
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

use crate::recovery::checkpoint::store::Checkpoints;
use crate::recovery::persistent::Durable;
use crate::recovery::persistent::lock::Lock;
use crate::rpc::attach::Listener;
use crate::rpc::recorder::Recorder;
use recovery::Recovery;
use relay::Relay;

/// The settings of a supervisor.
#[derive(Debug)]
pub(crate) struct Options {
    /// The arguments of a worker.
    pub(crate) arguments: Vec<OsString>,
    /// Definitions come back when an image is lost.
    pub(crate) restore: bool,
    /// The checkpoints.
    pub(crate) checkpoints: Checkpoints,
    /// A new image begins with the last one.
    pub(crate) begins_with_checkpoints: bool,
    /// The persistent session, which this process has locked.
    pub(crate) durable: Option<(Durable, Lock)>,
    /// The socket at which clients may attach.
    pub(crate) listener: Option<Listener>,
    /// The interval at which the watchdog looks at the worker.
    pub(crate) watch_interval: Duration,
    /// The recorder of the conversation.
    pub(crate) recorder: Option<Recorder>,
}

/// Makes the record that outlives workers, before the first one.
#[derive(Debug)]
pub(crate) struct Supervisor {
    options: Options,
    recovery: Recovery,
}

impl Supervisor {
    /// Makes a record that continues a persistent session, or begins with nothing.
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
        crate::os::processes::adopt_orphans();
        Ok(Relay::new(input, output, self.options, self.recovery)?.run())
    }
}
