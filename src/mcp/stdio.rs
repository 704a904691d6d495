//! The client's stdin and stdout, taken away from everything else in the process.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};

use crate::rpc::descriptors::out_of_the_way;
use crate::rpc::recorder::Recorder;

/// The two ends of the conversation, on private numbers that no child process inherits.
#[derive(Debug)]
pub(crate) struct Stdio {
    /// What the client writes.
    pub(crate) input: OwnedFd,
    /// What the client reads.
    pub(crate) output: OwnedFd,
    /// What records the conversation.
    pub(crate) recorder: Option<Recorder>,
}

impl Stdio {
    /// Takes fds 0 and 1. From here on 0 is `/dev/null` and 1 is stderr, so that nothing that Lisp, C code or a child
    /// process writes to "stdout" can reach the client, and nothing they read is the client's.
    pub(crate) fn take() -> io::Result<Self> {
        let input = out_of_the_way(rustix::stdio::stdin())?;
        let output = out_of_the_way(rustix::stdio::stdout())?;
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
        Ok(Self { input, output, recorder: None })
    }
}
