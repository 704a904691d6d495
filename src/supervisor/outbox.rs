//! What is written at once if it fits, and kept until it does if not.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Kept memory above this is given back when it is no longer needed.
const KEEP: usize = 1 << 20;

/// One writing end. Nothing here waits.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Non-blocking.
    fd: OwnedFd,
    bytes: Vec<u8>,
    /// How many of the bytes are written.
    done: usize,
}

impl Outbox {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, bytes: Vec::new(), done: 0 }
    }

    /// Writes, or keeps for later. Errors are those of an end that nobody reads any more.
    pub(super) fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        if self.is_empty() {
            rest = &bytes[self.write(bytes)?..];
        }
        self.bytes.extend_from_slice(rest);
        Ok(())
    }

    /// Writes what was kept, as far as it goes.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.done += self.write(&self.bytes[self.done..])?;
        if self.is_empty() {
            self.bytes.clear();
            self.done = 0;
            self.bytes.shrink_to(KEEP);
        } else if self.done > KEEP && self.done > self.bytes.len() / 2 {
            self.bytes.drain(..self.done);
            self.done = 0;
        }
        Ok(())
    }

    /// True when everything is written.
    pub(super) fn is_empty(&self) -> bool {
        self.done == self.bytes.len()
    }

    /// How much is kept.
    pub(super) fn backlog(&self) -> usize {
        self.bytes.len() - self.done
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::write(&self.fd, &bytes[done..]) {
                Ok(written) => done += written,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(done)
    }
}

impl AsFd for Outbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
