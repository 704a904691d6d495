//! File descriptors that do not block, and descriptors with numbers that user code rarely touches.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::fcntl_dupfd_cloexec;

/// Lowest number for the duplicates that [`to_private_number`] makes, if the limit of open files allows it.
const MIN_PRIVATE_NUMBER: i32 = 500;

/// Returns a descriptor that reads from the file of `fd` without blocking. If the file is a pipe or a terminal, opens the
/// file again, so that processes that share `fd`, such as the shell, are not affected. If the file cannot be opened
/// again, and for a socket, `fd` itself becomes non-blocking. Regular files never block, so their `fd` is returned
/// unchanged.
pub(crate) fn nonblocking_reader(fd: OwnedFd) -> io::Result<OwnedFd> {
    reopen_or_set_nonblocking(fd, OFlags::RDONLY)
}

/// Returns a descriptor that writes to the file of `fd` without blocking, as [`nonblocking_reader`] does for reading.
pub(crate) fn nonblocking_writer(fd: OwnedFd) -> io::Result<OwnedFd> {
    reopen_or_set_nonblocking(fd, OFlags::WRONLY)
}

fn reopen_or_set_nonblocking(fd: OwnedFd, access: OFlags) -> io::Result<OwnedFd> {
    match FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) {
        // Regular files never block, and opening the file again would lose the offset.
        FileType::RegularFile | FileType::Directory | FileType::BlockDevice => Ok(fd),
        FileType::Fifo | FileType::CharacterDevice => {
            reopen_nonblocking(&fd, access).map_or_else(|| set_nonblocking(fd), Ok)
        }
        _ => set_nonblocking(fd),
    }
}

/// Opens the file of `fd` again, non-blocking. Returns `None` if the system cannot open the file again.
pub(crate) fn reopen_nonblocking(fd: impl AsFd, access: OFlags) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    to_private_number(rustix::fs::open(path, flags, Mode::empty()).ok()?).ok()
}

/// Duplicates a descriptor to a high number, since user code may close or write to low numbers by mistake. Child
/// processes do not inherit the duplicate.
pub(crate) fn to_private_number(fd: impl AsFd) -> io::Result<OwnedFd> {
    // If the limit of open files is low, any number above 2 is used. The numbers of the standard streams are avoided even
    // if these streams are closed.
    Ok(fcntl_dupfd_cloexec(&fd, MIN_PRIVATE_NUMBER).or_else(|_| fcntl_dupfd_cloexec(&fd, 3))?)
}

/// Makes a descriptor non-blocking.
pub(crate) fn set_nonblocking(fd: OwnedFd) -> io::Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    Ok(fd)
}
