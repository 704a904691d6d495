//! The log on stderr. The client may never read it: what does not fit is dropped, and counted.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use once_cell::sync::Lazy;
use rustix::fs::FileType;
use rustix::net::SendFlags;

use crate::rpc::descriptors::reopened;

/// Stderr, for writing without waiting. Others write there as well, and may wait: the open file is theirs, too.
struct Stderr {
    kind: FileType,
    /// The same file, opened once more so as not to block, where there is such a thing.
    own: Option<OwnedFd>,
}

static STDERR: Lazy<Stderr> = Lazy::new(|| {
    let stderr = rustix::stdio::stderr();
    let kind = rustix::fs::fstat(stderr).map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode));
    let reopens = matches!(kind, FileType::Fifo | FileType::CharacterDevice);
    Stderr { kind, own: reopens.then(|| reopened(stderr, rustix::fs::OFlags::WRONLY)).flatten() }
});

/// Messages that did not fit since the last one that did.
static DROPPED: AtomicUsize = AtomicUsize::new(0);

impl Stderr {
    fn fd(&self) -> BorrowedFd<'_> {
        self.own.as_ref().map_or(rustix::stdio::stderr(), AsFd::as_fd)
    }

    fn put(&self, message: &[u8]) -> io::Result<usize> {
        Ok(match self.kind {
            FileType::Socket => rustix::net::send(self.fd(), message, SendFlags::DONTWAIT)?,
            _ => rustix::io::write(self.fd(), message)?,
        })
    }
}

/// Writes a message to stderr at a time, or drops it. Never waits, never fails.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log;

impl Write for Log {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let dropped = DROPPED.load(Ordering::Relaxed);
        let fits = match dropped {
            0 => true,
            _ => STDERR.put(format!("({dropped} messages were dropped: nobody read them)\n").as_bytes()).is_ok(),
        };
        if fits && STDERR.put(message).is_ok() {
            DROPPED.store(0, Ordering::Relaxed);
        } else {
            DROPPED.store(dropped + 1, Ordering::Relaxed);
        }
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
