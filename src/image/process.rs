//! What the process that hosts the image shares with others, and what becomes of it when C code forks.
#![allow(unsafe_code)]

use std::io;
#[cfg(feature = "mcp")]
use std::os::fd::FromRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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

/// Has a program that this process becomes inherit these files, and none but them and the standard three; and no timer
/// of this one's.
#[cfg(feature = "mcp")]
pub(crate) fn keep_only(files: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
    // SAFETY: both calls take plain numbers, or a struct that is only read, and change nothing but what execve(2) keeps.
    unsafe {
        let none = std::mem::zeroed();
        for which in [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF] {
            libc::setitimer(which, &raw const none, std::ptr::null_mut());
        }
        #[cfg(target_os = "linux")]
        if libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    for file in files {
        rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty())?;
    }
    Ok(())
}

/// A thread that forks when it is asked to, and so finds out whether `fork` waits for a lock that a stopped thread holds:
/// in `malloc`, or in what others have registered with `pthread_atfork`. It ends when this is dropped.
pub(crate) struct ForkProbe {
    word: std::sync::Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ForkProbe {
    const ASKED: u64 = 1;
    const ANSWERED: u64 = 2;
    const OVER: u64 = 3;

    /// Starts the thread.
    ///
    /// # Errors
    /// There is none to be had.
    pub(crate) fn start() -> io::Result<Self> {
        let word = std::sync::Arc::new(AtomicU64::new(0));
        let asked = word.clone();
        let thread = std::thread::Builder::new().name("sbcl-fork-probe".to_owned()).spawn(move || {
            loop {
                match asked.load(Ordering::Acquire) {
                    Self::OVER => return,
                    Self::ASKED => {
                        fork_and_exit();
                        let _ =
                            asked.compare_exchange(Self::ASKED, Self::ANSWERED, Ordering::AcqRel, Ordering::Relaxed);
                    }
                    _ => std::thread::sleep(std::time::Duration::from_micros(100)),
                }
            }
        })?;
        Ok(Self { word, thread: Some(thread) })
    }

    /// The address of the word by which it is asked: see `fork-may-wait-p` of `lisp/checkpoint.lisp`.
    pub(crate) fn address(&self) -> u64 {
        self.word.as_ptr().expose_provenance() as u64
    }
}

impl Drop for ForkProbe {
    fn drop(&mut self) {
        self.word.store(Self::OVER, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Makes a process that ends at once. Where there cannot be one, nothing has waited either.
fn fork_and_exit() {
    // SAFETY: the child does nothing but end; the parent waits for it, if nobody else has.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(0),
            child if child > 0 => _ = libc::waitpid(child, std::ptr::null_mut(), 0),
            _ => {}
        }
    }
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
