//! File descriptors that never block.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::fcntl_dupfd_cloexec;

/// The least number of a descriptor that is to be out of the way, if the limit allows for it.
const PRIVATE: i32 = 500;

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

/// The same file, opened once more so as not to block; `None` where the system has no way to do that.
pub(crate) fn reopened(fd: impl AsFd, access: OFlags) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    out_of_the_way(rustix::fs::open(path, flags, Mode::empty()).ok()?).ok()
}

/// The same descriptor under a number that code does not close or write to by mistake, as it may do with small ones. No
/// program that this one starts inherits it.
pub(crate) fn out_of_the_way(fd: impl AsFd) -> io::Result<OwnedFd> {
    // Above the standard three, which somebody may have closed before this program was started.
    Ok(fcntl_dupfd_cloexec(&fd, PRIVATE).or_else(|_| fcntl_dupfd_cloexec(&fd, 3))?)
}

/// Makes a descriptor non-blocking.
pub(crate) fn nonblocking(fd: OwnedFd) -> io::Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    Ok(fd)
}
