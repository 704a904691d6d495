//! The supervisor's log on stderr. The client may never read stderr, so messages that do not fit are dropped and
//! counted.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use once_cell::sync::Lazy;
use rustix::fs::FileType;
use rustix::net::SendFlags;

use crate::rpc::descriptors::reopen_nonblocking;

/// Stderr for nonblocking writes. Other processes share the open file of descriptor 2 and may rely on blocking writes,
/// so its flags must not change.
struct Stderr {
    kind: FileType,
    /// A separately opened, nonblocking descriptor, if stderr is a pipe or a character device; `None` for other
    /// files, or if opening failed.
    reopened: Option<OwnedFd>,
}

static STDERR: Lazy<Stderr> = Lazy::new(|| {
    let stderr = rustix::stdio::stderr();
    let kind = rustix::fs::fstat(stderr).map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode));
    let reopens = matches!(kind, FileType::Fifo | FileType::CharacterDevice);
    Stderr { kind, reopened: reopens.then(|| reopen_nonblocking(stderr, rustix::fs::OFlags::WRONLY)).flatten() }
});

/// The number of messages that were dropped since the last message was written.
static DROPPED_MESSAGES: AtomicUsize = AtomicUsize::new(0);

impl Stderr {
    fn fd(&self) -> BorrowedFd<'_> {
        self.reopened.as_ref().map_or(rustix::stdio::stderr(), AsFd::as_fd)
    }

    fn put(&self, message: &[u8]) -> io::Result<usize> {
        Ok(match self.kind {
            FileType::Socket => rustix::net::send(self.fd(), message, SendFlags::DONTWAIT)?,
            _ => rustix::io::write(self.fd(), message)?,
        })
    }
}

/// A writer that writes each message to stderr in one call, or drops the message. Writing never blocks or fails.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StderrLog;

impl Write for StderrLog {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let dropped = DROPPED_MESSAGES.load(Ordering::Relaxed);
        let fits = match dropped {
            0 => true,
            _ => STDERR.put(format!("(log messages dropped because stderr was full: {dropped})\n").as_bytes()).is_ok(),
        };
        if fits && STDERR.put(message).is_ok() {
            DROPPED_MESSAGES.store(0, Ordering::Relaxed);
        } else {
            DROPPED_MESSAGES.store(dropped + 1, Ordering::Relaxed);
        }
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
