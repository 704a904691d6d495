//! Signals as a descriptor that can be polled.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM};

/// A descriptor that becomes readable when the process receives a signal that ends the server (SIGTERM, SIGINT, SIGHUP)
/// or, in the supervisor, SIGCHLD.
#[derive(Debug)]
pub(crate) struct Signals {
    pipe: UnixStream,
    ending_signal: Arc<AtomicUsize>,
}

impl Signals {
    /// Installs the handlers of a process without Lisp. SIGTERM, SIGINT, SIGHUP and SIGCHLD make the descriptor readable.
    /// SIGUSR1, SIGUSR2, SIGIO and the signals of timers, which would kill the process by default, have no effect.
    pub(crate) fn new() -> io::Result<Self> {
        Self::register(&[SIGCHLD], &[SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO])
    }

    /// Installs the handlers of a process that holds Lisp, besides Lisp's own handlers. SIGTERM, SIGINT and SIGHUP make
    /// the descriptor readable, and SIGUSR1 has no effect.
    pub(crate) fn in_lisp_process() -> io::Result<Self> {
        Self::register(&[], &[SIGUSR1])
    }

    fn register(reported: &[i32], discarded: &[i32]) -> io::Result<Self> {
        let (pipe, write) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        let ending_signal = Arc::new(AtomicUsize::new(0));
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            signal_hook::flag::register_usize(signal, ending_signal.clone(), usize::try_from(signal).unwrap_or(1))?;
            signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
        }
        for signal in reported {
            signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
        }
        install_empty_handlers(discarded)?;
        Ok(Self { pipe, ending_signal })
    }

    /// Clears the descriptor's readiness. Returns the number of the ending signal (SIGTERM, SIGINT or SIGHUP) that arrived
    /// last, if any.
    pub(crate) fn take(&mut self) -> Option<i32> {
        let mut bytes = [0; 64];
        while rustix::io::read(&self.pipe, &mut bytes).is_ok_and(|read| read == bytes.len()) {}
        i32::try_from(self.ending_signal.load(Ordering::Relaxed)).ok().filter(|signal| *signal != 0)
    }
}

/// Installs handlers that do nothing, for signals that kill the process by default. SIG_IGN would be inherited by every
/// program that this process starts.
fn install_empty_handlers(signals: &[i32]) -> io::Result<()> {
    for signal in signals {
        signal_hook::flag::register(*signal, Arc::new(AtomicBool::new(false)))?;
    }
    Ok(())
}

/// Makes the signals that end a server, and SIGUSR1, harmless in a worker. A worker gets these signals only by accident,
/// for instance from a `kill 0` in a program that Lisp started.
pub(crate) fn survive_stray_signals() -> io::Result<()> {
    install_empty_handlers(&[SIGTERM, SIGINT, SIGHUP, SIGUSR1])
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}
