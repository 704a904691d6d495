//! File descriptors that never block.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};

/// A descriptor for writing to the same file that does not block, and that does not become non-blocking for whoever
/// else holds it, if the system has a way to do that.
pub(super) fn nonblocking_writer(fd: OwnedFd) -> io::Result<OwnedFd> {
    match FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) {
        // Writing to a file does not wait; opening it again would lose the place in it.
        FileType::RegularFile | FileType::Directory | FileType::BlockDevice => Ok(fd),
        FileType::Fifo | FileType::CharacterDevice => reopened(&fd).map_or_else(|| nonblocking(fd), Ok),
        _ => nonblocking(fd),
    }
}

fn reopened(fd: &OwnedFd) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

/// Makes a descriptor non-blocking.
pub(super) fn nonblocking(fd: OwnedFd) -> io::Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    Ok(fd)
}
