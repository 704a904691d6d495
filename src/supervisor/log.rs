//! The supervisor's log on stderr. The client may never read stderr, so messages that do not fit are dropped and
//! counted.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use once_cell::sync::Lazy;
use rustix::fs::FileType;
use rustix::net::SendFlags;

use crate::os::poll_set::PollSet;
use crate::rpc::descriptors::reopen_nonblocking;

/// Number of bytes that poll(2) guarantees room for when it reports that a pipe can be written.
const PIPE_BUF: usize = 4096;

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
        match self.kind {
            FileType::Socket => Ok(rustix::net::send(self.fd(), message, SendFlags::DONTWAIT)?),
            FileType::Fifo | FileType::CharacterDevice if self.reopened.is_none() => write_if_ready(self.fd(), message),
            _ => Ok(rustix::io::write(self.fd(), message)?),
        }
    }
}

/// Writes `message` to a pipe or terminal whose writes may block, if `message` is at most [`PIPE_BUF`] bytes long and
/// the file has room for [`PIPE_BUF`] bytes.
fn write_if_ready(fd: BorrowedFd<'_>, message: &[u8]) -> io::Result<usize> {
    let mut set = PollSet::new();
    set.add_write("stderr", &fd);
    if message.len() > PIPE_BUF || !set.wait(Some(Duration::ZERO))?.has("stderr") {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Ok(rustix::io::write(fd, message)?)
}

/// Makes C code, such as SBCL's runtime, write to stderr without waiting; what does not fit is lost. Only with glibc: on
/// other systems, C code waits. Must be called before the process has other threads.
pub(crate) fn redirect_c_code() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        Lazy::force(&STDERR);
        crate::image::c_stderr::redirect(|text| _ = STDERR.put(text));
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
            _ => STDERR.put(format!("(log messages that stderr did not accept: {dropped})\n").as_bytes()).is_ok(),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Another user's pipe cannot be opened again, so its writes block.
    #[test]
    fn a_message_to_a_full_blocking_pipe_is_dropped() {
        let (mut reader, writer) = io::pipe().unwrap();
        let written = (0..1 << 20).take_while(|_| write_if_ready(writer.as_fd(), &[b'x'; PIPE_BUF]).is_ok()).count();
        assert!(written > 0);
        let full = write_if_ready(writer.as_fd(), b"message").unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        io::Read::read_exact(&mut reader, &mut vec![0; written * PIPE_BUF]).unwrap();
        assert_eq!(write_if_ready(writer.as_fd(), b"message").unwrap(), 7);
        assert!(write_if_ready(writer.as_fd(), &[b'x'; PIPE_BUF + 1]).is_err());
    }
}
