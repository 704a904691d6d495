//! File descriptors that never block.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};

/// A descriptor for reading from the same file that does not block, and that does not become non-blocking for whoever
/// else holds it (the shell, on a terminal), if the system has a way to do that.
pub(crate) fn nonblocking_reader(fd: OwnedFd) -> io::Result<OwnedFd> {
    open(fd, OFlags::RDONLY)
}

/// The same for writing.
pub(crate) fn nonblocking_writer(fd: OwnedFd) -> io::Result<OwnedFd> {
    open(fd, OFlags::WRONLY)
}

fn open(fd: OwnedFd, access: OFlags) -> io::Result<OwnedFd> {
    match FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) {
        // A file does not make anybody wait; opening it again would lose the place in it.
        FileType::RegularFile | FileType::Directory | FileType::BlockDevice => Ok(fd),
        FileType::Fifo | FileType::CharacterDevice => reopened(&fd, access).map_or_else(|| nonblocking(fd), Ok),
        _ => nonblocking(fd),
    }
}

fn reopened(fd: &OwnedFd, access: OFlags) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

/// Makes a descriptor non-blocking.
pub(crate) fn nonblocking(fd: OwnedFd) -> io::Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    Ok(fd)
}
