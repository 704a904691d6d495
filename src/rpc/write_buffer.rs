//! The write buffer: what fits is written at once, the rest is kept until it does.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::recorder::{Recorder, Side};

/// Kept memory above this is given back when it is no longer needed.
const KEEP: usize = 1 << 20;
/// So much is written at a time: whoever reads as fast as this writes must not keep the thread from all else.
const TURN: usize = 1 << 20;

/// One writing end. Nothing here waits.
#[derive(Debug)]
pub(crate) struct WriteBuffer<F = OwnedFd> {
    /// Non-blocking.
    fd: F,
    bytes: Vec<u8>,
    /// How many of the bytes are written.
    done: usize,
    recorder: Option<Recorder>,
}

impl<F: AsFd> WriteBuffer<F> {
    /// Writes to `fd`, which must not block.
    pub(crate) fn new(fd: F) -> Self {
        Self { fd, bytes: Vec::new(), done: 0, recorder: None }
    }

    /// Has what is put in, which must be whole lines, recorded as the server's.
    pub(crate) fn recorded(self, recorder: Option<Recorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Writes, or keeps for later. Errors are those of an end that nobody reads any more.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(recorder) = &self.recorder {
            recorder.line(Side::Server, bytes);
        }
        let mut rest = bytes;
        if self.is_empty() {
            rest = &bytes[self.write(bytes)?..];
        }
        self.bytes.extend_from_slice(rest);
        Ok(())
    }

    /// Does as [`put`](Self::put), and keeps what is large and its own as it is, since copying it takes long.
    pub(crate) fn put_whole(&mut self, bytes: Cow<'_, [u8]>) -> io::Result<()> {
        match bytes {
            Cow::Owned(bytes) if self.is_empty() && bytes.len() > KEEP => {
                if let Some(recorder) = &self.recorder {
                    recorder.line(Side::Server, &bytes);
                }
                self.bytes = bytes;
                self.done = 0;
                self.done = self.write(&self.bytes)?;
                Ok(())
            }
            bytes => self.put(&bytes),
        }
    }

    /// Writes what was kept, as far as it goes.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
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
    pub(crate) fn is_empty(&self) -> bool {
        self.done == self.bytes.len()
    }

    /// How much is kept.
    pub(crate) fn backlog(&self) -> usize {
        self.bytes.len() - self.done
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(TURN)];
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

impl<F: AsFd> AsFd for WriteBuffer<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::descriptors::nonblocking;
    use std::io::Read;

    #[test]
    fn what_does_not_fit_is_kept_in_order() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut buffer = WriteBuffer::new(nonblocking(writer.into()).unwrap());
        let lines: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[n as usize % 4]).collect();
        for piece in lines.chunks(70_000) {
            buffer.put(piece).unwrap();
        }
        assert!(buffer.backlog() > 0 && !buffer.is_empty());
        let mut read = vec![0; lines.len()];
        let mut done = 0;
        while done < read.len() {
            done += reader.read(&mut read[done..]).unwrap();
            buffer.flush().unwrap();
        }
        assert!(buffer.is_empty() && read == lines);
        // As a whole, too.
        buffer.put_whole(Cow::Owned(lines.clone())).unwrap();
        buffer.put_whole(Cow::Borrowed(b"more")).unwrap();
        let mut read = vec![0; lines.len() + 4];
        let mut done = 0;
        while done < read.len() {
            done += reader.read(&mut read[done..]).unwrap();
            buffer.flush().unwrap();
        }
        assert!(buffer.is_empty() && read == [&*lines, b"more"].concat());
        drop(reader);
        buffer.put(b"nobody\n").unwrap_err();
    }
}
