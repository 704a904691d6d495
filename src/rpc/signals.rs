//! Signals, as something to poll for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM};

/// SIGTERM, SIGINT, SIGHUP, which end the server, and perhaps SIGCHLD.
#[derive(Debug)]
pub(crate) struct Signals {
    pipe: UnixStream,
    end: Arc<AtomicUsize>,
}

impl Signals {
    /// Takes the signals over from the system, in a process without Lisp: those that end it, and SIGCHLD. The others
    /// mean nothing.
    pub(crate) fn new() -> io::Result<Self> {
        Self::take_over(&[SIGCHLD], &[SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO])
    }

    /// The same beside Lisp, which has handlers of its own.
    pub(crate) fn beside_lisp() -> io::Result<Self> {
        Self::take_over(&[], &[SIGUSR1])
    }

    fn take_over(told: &[i32], ignored: &[i32]) -> io::Result<Self> {
        let (pipe, write) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        let end = Arc::new(AtomicUsize::new(0));
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            signal_hook::flag::register_usize(signal, end.clone(), usize::try_from(signal).unwrap_or(1))?;
            signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
        }
        for signal in told {
            signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
        }
        survive(ignored)?;
        Ok(Self { pipe, end })
    }

    /// Forgets that some came; returns the number of one that ends the server.
    pub(crate) fn take(&mut self) -> Option<i32> {
        let mut bytes = [0; 64];
        while rustix::io::read(&self.pipe, &mut bytes).is_ok_and(|read| read == bytes.len()) {}
        i32::try_from(self.end.load(Ordering::Relaxed)).ok().filter(|signal| *signal != 0)
    }
}

/// Has these signals do nothing, where by default they end the process. That is not the same as ignoring them, which
/// every program that this one starts would inherit.
fn survive(signals: &[i32]) -> io::Result<()> {
    for signal in signals {
        signal_hook::flag::register(*signal, Arc::new(AtomicBool::new(false)))?;
    }
    Ok(())
}

/// In a worker, has the signals that end a server do nothing: only the supervisor is meant to be ended by them, and a
/// worker that gets one does by accident (`kill 0` in a program that Lisp started, `kill` of `getpid`).
pub(crate) fn survive_accidents() -> io::Result<()> {
    survive(&[SIGTERM, SIGINT, SIGHUP, SIGUSR1])
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}
