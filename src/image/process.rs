//! What the process that hosts the image shares with others, and what becomes of it when C code forks.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "mcp")]
use std::{io, os::fd::FromRawFd, sync::atomic::AtomicU64};

/// Memory that another process sees as well.
#[cfg(feature = "mcp")]
pub(crate) type SharedPage = &'static [AtomicU64; 512];

/// Maps the first page of the file that a parent process left open under `number`, and closes it.
///
/// # Errors
/// When there is no such file, it is one of the standard three, or it is shorter than a page.
#[cfg(feature = "mcp")]
pub(crate) fn share(number: i32) -> io::Result<SharedPage> {
    use rustix::mm::{MapFlags, ProtFlags};
    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: nothing else in this process knows the number: it was opened by the parent, and this runs first. The
    // mapping is new, page-aligned, at least a page long (checked, since memory past a file's end cannot be touched)
    // and never unmapped; atomics may be shared with another process.
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

/// Takes what a parent process left open under `number`. No program that this one starts inherits it.
///
/// # Errors
/// When there is no such file, or it is one of the standard three.
#[cfg(feature = "mcp")]
pub(crate) fn inherited(number: i32) -> io::Result<std::os::fd::OwnedFd> {
    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: nothing else in this process knows the number: it was opened by the parent, and this runs first.
    let file = unsafe {
        rustix::fs::fstat(std::os::fd::BorrowedFd::borrow_raw(number))?;
        std::os::fd::OwnedFd::from_raw_fd(number)
    };
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)?;
    Ok(file)
}

static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_fork() {
    FORKED.store(true, Ordering::Relaxed);
}

/// From here on [`is_forked`] tells.
pub(crate) fn watch_forks() {
    // SAFETY: the handler only stores to an atomic.
    unsafe { libc::pthread_atfork(None, None, Some(note_fork)) };
}

/// True in a process that `fork` made of this one: it has this one's memory, but none of its business.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}
