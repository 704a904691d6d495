//! The connection to the client on stdin and stdout, moved to descriptors that the rest of the process does not use.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};

use crate::rpc::descriptors::to_private_number;
use crate::rpc::recorder::Recorder;

/// The two directions of the client's connection, on private descriptors that no child process inherits.
#[derive(Debug)]
pub(crate) struct Stdio {
    /// The descriptor from which the server reads the client's messages.
    pub(crate) input: OwnedFd,
    /// The descriptor to which the server writes messages for the client.
    pub(crate) output: OwnedFd,
    /// The recorder of the conversation on this connection; `None` if nothing is recorded.
    pub(crate) recorder: Option<Recorder>,
}

impl Stdio {
    /// Moves stdin and stdout to private descriptors, then redirects stdin to `/dev/null` and stdout to stderr. Lisp, C code
    /// and child processes then cannot write to the client through stdout, nor read from the client through stdin.
    pub(crate) fn take() -> io::Result<Self> {
        let input = to_private_number(rustix::stdio::stdin())?;
        let output = to_private_number(rustix::stdio::stdout())?;
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
        Ok(Self { input, output, recorder: None })
    }
}
