//! The write buffer, which writes as many bytes as the descriptor accepts and keeps the rest.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::recorder::{Recorder, Side};

/// Maximum capacity, in bytes, that an empty buffer keeps allocated.
const MAX_IDLE_CAPACITY: usize = 1 << 20;
/// Maximum number of bytes per write: a fast reader must not keep the thread from its other work.
const MAX_WRITE: usize = 1 << 20;

/// A buffer of bytes that one descriptor has not accepted yet. No function blocks.
#[derive(Debug)]
pub(crate) struct WriteBuffer<F = OwnedFd> {
    /// The descriptor, which must be non-blocking.
    fd: F,
    bytes: Vec<u8>,
    /// Number of bytes at the start of `bytes` that have been written.
    written: usize,
    recorder: Option<Recorder>,
}

impl<F: AsFd> WriteBuffer<F> {
    /// Creates a buffer for `fd`, which must be non-blocking.
    pub(crate) fn new(fd: F) -> Self {
        Self { fd, bytes: Vec::new(), written: 0, recorder: None }
    }

    /// Sets the recorder, which records the bytes of each [`put`](Self::put) or [`put_owned`](Self::put_owned) as a line
    /// of the server. With a recorder, each of these calls must pass one complete line.
    pub(crate) fn with_recorder(self, recorder: Option<Recorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Writes `bytes`, and keeps the bytes that the descriptor does not accept.
    ///
    /// # Errors
    /// Returns the error of write(2), such as EPIPE if the other end is closed.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(recorder) = &self.recorder {
            recorder.record_line(Side::Server, bytes);
        }
        let mut rest = bytes;
        if self.is_empty() {
            rest = &bytes[self.write(bytes)?..];
        }
        self.bytes.extend_from_slice(rest);
        Ok(())
    }

    /// Writes `bytes` like [`put`](Self::put). If there is no backlog, a large owned buffer is kept without copying it.
    pub(crate) fn put_owned(&mut self, bytes: Cow<'_, [u8]>) -> io::Result<()> {
        match bytes {
            Cow::Owned(bytes) if self.is_empty() && bytes.len() > MAX_IDLE_CAPACITY => {
                if let Some(recorder) = &self.recorder {
                    recorder.record_line(Side::Server, &bytes);
                }
                self.bytes = bytes;
                self.written = 0;
                self.written = self.write(&self.bytes)?;
                Ok(())
            }
            bytes => self.put(&bytes),
        }
    }

    /// Writes as much of the backlog as the descriptor accepts.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.written += self.write(&self.bytes[self.written..])?;
        if self.is_empty() {
            self.bytes.clear();
            self.written = 0;
            self.bytes.shrink_to(MAX_IDLE_CAPACITY);
        } else if self.written > MAX_IDLE_CAPACITY && self.written > self.bytes.len() / 2 {
            self.bytes.drain(..self.written);
            self.written = 0;
        }
        Ok(())
    }

    /// Returns true if nothing is left to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.written == self.bytes.len()
    }

    /// Returns the number of bytes left to write.
    pub(crate) fn backlog(&self) -> usize {
        self.bytes.len() - self.written
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(MAX_WRITE)];
        let mut written = 0;
        while written < bytes.len() {
            match rustix::io::write(&self.fd, &bytes[written..]) {
                Ok(count) => written += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(written)
    }
}

impl<F: AsFd> AsFd for WriteBuffer<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::descriptors::set_nonblocking;
    use std::io::Read;

    #[test]
    fn unwritten_bytes_are_kept_and_flushed_in_order() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut buffer = WriteBuffer::new(set_nonblocking(writer.into()).unwrap());
        let lines: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[n as usize % 4]).collect();
        for piece in lines.chunks(70_000) {
            buffer.put(piece).unwrap();
        }
        assert!(buffer.backlog() > 0 && !buffer.is_empty());
        let mut read = vec![0; lines.len()];
        let mut written = 0;
        while written < read.len() {
            written += reader.read(&mut read[written..]).unwrap();
            buffer.flush().unwrap();
        }
        assert!(buffer.is_empty() && read == lines);
        // The same bytes are written again, as an owned buffer.
        buffer.put_owned(Cow::Owned(lines.clone())).unwrap();
        buffer.put_owned(Cow::Borrowed(b"more")).unwrap();
        let mut read = vec![0; lines.len() + 4];
        let mut written = 0;
        while written < read.len() {
            written += reader.read(&mut read[written..]).unwrap();
            buffer.flush().unwrap();
        }
        assert!(buffer.is_empty() && read == [&*lines, b"more"].concat());
        drop(reader);
        buffer.put(b"nobody\n").unwrap_err();
    }
}
