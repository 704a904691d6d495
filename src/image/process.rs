//! File descriptors and memory shared with other processes, and detection of forks by C code.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "mcp")]
use std::{io, os::fd::FromRawFd, sync::atomic::AtomicU64};

use super::signals;

/// A page of memory shared with another process.
#[cfg(feature = "mcp")]
pub(crate) type SharedPage = &'static [AtomicU64; 512];

/// Maps the first page of the file that the parent process left open as descriptor `number`, and closes the descriptor.
///
/// # Errors
/// Returns an error if the descriptor is not open or belongs to stdin, stdout or stderr, or if its file is shorter than a
/// page or cannot be mapped.
#[cfg(feature = "mcp")]
pub(crate) fn map_shared_page(number: i32) -> io::Result<SharedPage> {
    use rustix::mm::{MapFlags, ProtFlags};
    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the parent opened the descriptor, and this function runs before any code that could use the descriptor. The
    // mapping is new, page-aligned and never unmapped, and atomics may be shared with another process. Memory beyond the
    // end of a file must not be touched, so the file's length is checked.
    unsafe {
        if rustix::fs::fstat(std::os::fd::BorrowedFd::borrow_raw(number))?.st_size < 4096 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let file = std::os::fd::OwnedFd::from_raw_fd(number);
        let page = rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &file,
            0,
        )?;
        Ok(&*page.cast())
    }
}

/// Takes the file that the parent process left open as descriptor `number`, and marks it close-on-exec.
///
/// # Errors
/// Returns an error if the descriptor is not open, or belongs to stdin, stdout or stderr.
#[cfg(feature = "mcp")]
pub(crate) fn take_inherited_descriptor(number: i32) -> io::Result<std::os::fd::OwnedFd> {
    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the parent opened the descriptor, and this function runs before any code that could use the descriptor.
    let file = unsafe {
        rustix::fs::fstat(std::os::fd::BorrowedFd::borrow_raw(number))?;
        std::os::fd::OwnedFd::from_raw_fd(number)
    };
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)?;
    Ok(file)
}

static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn record_fork() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Makes [`is_forked`] detect forks from here on.
pub(crate) fn detect_forks() {
    static REGISTERED: Once = Once::new();
    // A boot that failed may be tried again, and a handler cannot be removed.
    // SAFETY: the handler only stores to an atomic.
    REGISTERED.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(record_fork)) });
}

/// Returns true in a child that C code forked. The child has a copy of its parent's memory, but must not act for its
/// parent.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Ends this process if C code forked it. The process lacks its parent's other threads, which may have held any lock, and
/// must not work for its parent.
pub(crate) fn exit_if_forked() {
    if is_forked() {
        signals::exit_now(0);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Forks this process, and returns true if `check` returns true in the child within 60 seconds.
    pub(crate) fn holds_in_forked_child(check: impl FnOnce() -> bool) -> bool {
        detect_forks();
        // SAFETY: the child only calls code under test, which must not need other threads, and _exit(2).
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: alarm(2) takes a number. SIGALRM ends the child.
            unsafe { libc::alarm(60) };
            let status = if check() { 42 } else { 1 };
            // SAFETY: _exit(2) takes a number.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: `status` is writable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42
    }
}
