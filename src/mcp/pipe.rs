//! One direction of the client's stream, read or written without ever blocking the runtime.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A file descriptor behind tokio's event loop where the kernel can poll it, and as it is where it cannot.
#[derive(Debug)]
pub(super) enum Pipe {
    /// Pipes, sockets, terminals.
    Polled {
        /// The descriptor, non-blocking.
        fd: AsyncFd<OwnedFd>,
        /// A read that returns less than was asked for took all there was. Not so on terminals, which give a line.
        short_read_drains: bool,
    },
    /// Regular files and `/dev/null`: never wait, and epoll refuses them.
    Plain(OwnedFd),
}

impl Pipe {
    /// For reading from `fd`.
    pub(super) fn reader(fd: OwnedFd) -> io::Result<Self> {
        Self::open(fd, OFlags::RDONLY, Interest::READABLE)
    }

    /// For writing to `fd`.
    pub(super) fn writer(fd: OwnedFd) -> io::Result<Self> {
        Self::open(fd, OFlags::WRONLY, Interest::WRITABLE)
    }

    fn open(fd: OwnedFd, access: OFlags, interest: Interest) -> io::Result<Self> {
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
        let fd = match kind {
            // Reopening a file would lose the place in it.
            FileType::RegularFile | FileType::Directory | FileType::BlockDevice => return Ok(Self::Plain(fd)),
            FileType::Fifo | FileType::CharacterDevice => reopened(&fd, access).map_or_else(|| nonblocking(fd), Ok)?,
            _ => nonblocking(fd)?,
        };
        let short_read_drains = matches!(kind, FileType::Fifo | FileType::Socket);
        // tokio wants `unsafe` for types that may give up their descriptor while it is registered. This one does not.
        #[allow(deprecated, reason = "sound for an OwnedFd that is never moved out")]
        match AsyncFd::try_with_interest(fd, interest) {
            Ok(fd) => Ok(Self::Polled { fd, short_read_drains }),
            Err(refused) => {
                let (fd, error) = refused.into_parts();
                if error.kind() == io::ErrorKind::PermissionDenied { Ok(Self::Plain(fd)) } else { Err(error) }
            }
        }
    }

    /// Waits for input and appends it to `buffer`, at most as much as its spare capacity holds; 0 at the end. For as
    /// long as `awake` the thread does not sleep, if nothing else is to be done. Nothing is lost when the future is
    /// dropped.
    pub(super) async fn read(&self, buffer: &mut Vec<u8>, awake: Duration) -> io::Result<usize> {
        let (fd, short_read_drains) = match self {
            Self::Plain(fd) => {
                return Ok(rustix::io::retry_on_intr(|| rustix::io::read(fd, spare_capacity(buffer)))?);
            }
            Self::Polled { fd, short_read_drains } => (fd, *short_read_drains),
        };
        let begin = Instant::now();
        while begin.elapsed() < awake {
            tokio::task::yield_now().await;
            match rustix::io::read(fd.get_ref(), spare_capacity(buffer)) {
                // Other processes may want this processor: the client, for one.
                Err(Errno::AGAIN | Errno::INTR) => std::thread::yield_now(),
                result => return Ok(result?),
            }
        }
        loop {
            let mut ready = fd.readable().await?;
            let room = buffer.capacity() - buffer.len();
            let result = ready
                .try_io(|fd| Ok(rustix::io::retry_on_intr(|| rustix::io::read(fd.get_ref(), spare_capacity(buffer)))?));
            if let Ok(read) = result {
                // Spares the read that would only say EAGAIN; the next input is a new event.
                if short_read_drains && read.as_ref().is_ok_and(|n| (1..room).contains(n)) {
                    ready.clear_ready();
                }
                return read;
            }
        }
    }

    /// Writes what fits now; [`io::ErrorKind::WouldBlock`] when nothing does.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::io::write(self, bytes))?)
    }

    /// Waits until something can be written and writes it.
    pub(super) async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(_) => self.try_write(bytes),
            Self::Polled { fd, .. } => loop {
                let mut ready = fd.writable().await?;
                if let Ok(written) = ready.try_io(|_| self.try_write(bytes)) {
                    return written;
                }
            },
        }
    }
}

impl AsFd for Pipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(fd) => fd.as_fd(),
            Self::Polled { fd, .. } => fd.get_ref().as_fd(),
        }
    }
}

/// An open file description of our own for the same pipe or terminal, so that whoever else holds it (the shell, on a
/// terminal) does not find it non-blocking. `None` where the system has no way to do that.
fn reopened(fd: &OwnedFd, access: OFlags) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

fn nonblocking(fd: OwnedFd) -> io::Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    Ok(fd)
}
