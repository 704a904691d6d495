//! Wakes a thread that waits for descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::descriptors::nonblocking;

/// A pipe to oneself.
#[derive(Debug)]
pub(crate) struct Waker {
    reader: OwnedFd,
    writer: OwnedFd,
    /// A byte is on its way.
    pending: AtomicBool,
}

impl Waker {
    /// # Errors
    /// When there are no descriptors left.
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let (reader, writer) = (nonblocking(reader.into())?, nonblocking(writer.into())?);
        Ok(Self { reader, writer, pending: AtomicBool::new(false) })
    }

    /// Makes the descriptor readable until [`Self::clear`].
    pub(crate) fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // Full is awake; closed under us is noticed by who waits.
            let _ = rustix::io::write(&self.writer, &[0]);
        }
    }

    /// Forgets the calls so far. False when the pipe is gone: evaluated code may close any descriptor.
    pub(crate) fn clear(&self) -> bool {
        self.pending.store(false, Ordering::Release);
        let read = rustix::io::read(&self.reader, &mut [0; 16]);
        matches!(read, Ok(1..) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR))
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}
