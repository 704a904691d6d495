//! The supervisor, which holds the clients' connections and keeps a worker running for them.
//!
//! User code may kill a worker. The supervisor runs no Lisp and no user code. A single thread copies lines between
//! clients and worker, records what the next worker must know, and replaces a worker that is lost. Of the lines that it
//! copies, the supervisor reads only the ids of requests and cancellations: the worker reports the line to which an
//! answer belongs, and the events that must outlive the image.

mod attached_clients;
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
use crate::recovery::persistent::PersistentSession;
use crate::recovery::persistent::lock::Lock;
use crate::rpc::attach::Listener;
use crate::rpc::recorder::Recorder;
use recovery::RecoveryRecord;
use relay::Relay;

/// The settings of a supervisor.
#[derive(Debug)]
pub(crate) struct SupervisorOptions {
    /// The command-line arguments of a worker process.
    pub(crate) arguments: Vec<OsString>,
    /// True when definitions are kept, to be replayed after an image is lost.
    pub(crate) restore: bool,
    pub(crate) checkpoints: Checkpoints,
    /// True when a new image boots from the last checkpoint even if no client has requested it.
    pub(crate) boots_last_checkpoint: bool,
    /// The persistent session, which this process has locked.
    pub(crate) session: Option<(PersistentSession, Lock)>,
    /// The socket at which clients may attach.
    pub(crate) listener: Option<Listener>,
    /// The interval at which the watchdog checks the worker.
    pub(crate) watch_interval: Duration,
    /// The recorder of the conversation with the client of stdin and stdout; `None` if nothing is recorded.
    pub(crate) recorder: Option<Recorder>,
}

/// A supervisor before its first worker, with the recovery record that will outlive the workers.
#[derive(Debug)]
pub(crate) struct Supervisor {
    options: SupervisorOptions,
    recovery: RecoveryRecord,
}

impl Supervisor {
    /// Creates a supervisor that continues its persistent session, if there is one, or begins with an empty state.
    ///
    /// # Errors
    /// Returns the reason, worded as a sentence, if the persistent session cannot be continued.
    pub(crate) fn new(options: SupervisorOptions) -> Result<Self, String> {
        let mut recovery = RecoveryRecord::new(&options);
        if let Some((session, _)) = &options.session {
            recovery.continue_session(session)?;
        }
        Ok(Self { options, recovery })
    }

    /// Serves the client on `input` and `output` until the client closes `input` or a signal arrives, or the server
    /// cannot continue. Returns the exit status.
    pub(crate) fn serve(self, input: OwnedFd, output: OwnedFd) -> io::Result<i32> {
        crate::os::processes::adopt_orphans();
        Ok(Relay::new(input, output, self.options, self.recovery)?.run())
    }
}
