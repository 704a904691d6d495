//! What the process that hosts the image shares with others, and what becomes of it when C code forks.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "mcp")]
use std::{
    convert::Infallible,
    ffi::{CString, OsString},
    io,
    os::{fd::FromRawFd, unix::ffi::OsStrExt},
    path::Path,
    sync::atomic::AtomicU64,
};

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

/// Has a program that this process becomes inherit these files, and none but them and the standard three.
#[cfg(feature = "mcp")]
pub(crate) fn keep_only(files: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
    // SAFETY: the call takes plain numbers and changes nothing but what execve(2) keeps.
    #[cfg(target_os = "linux")]
    if unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) } != 0 {
        // Before Linux 5.11, or where a filter refuses it.
        for entry in std::fs::read_dir("/proc/self/fd")? {
            let number = entry?.file_name().to_str().and_then(|name| name.parse::<libc::c_int>().ok());
            if let Some(number) = number.filter(|number| *number > 2) {
                // SAFETY: as above. One that another thread has closed meanwhile needs nothing.
                unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
            }
        }
    }
    for file in files {
        rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty())?;
    }
    Ok(())
}

/// Signals that Lisp's threads and timers send its own process. By default they end one.
#[cfg(feature = "mcp")]
const OWN_SIGNALS: [i32; 5] = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM, libc::SIGVTALRM, libc::SIGPROF];

/// Blocks those signals for this thread, or no longer.
#[cfg(feature = "mcp")]
fn mask_own_signals(how: i32) -> io::Result<()> {
    // SAFETY: a signal set is plain memory, which is initialized before it is used. All of this is async-signal-safe.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in OWN_SIGNALS {
            libc::sigaddset(&raw mut set, signal);
        }
        match libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut()) {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Becomes this program (execve(2)), which has to [heed signals](heed_own_signals): one that another thread sends meanwhile,
/// as to have this one wait for a garbage collection, would end it before it can do anything about that. Not by
/// `Command::exec`: that no longer ignores SIGPIPE, and other threads may be writing to what nobody reads.
///
/// # Errors
/// Why this process goes on.
#[cfg(feature = "mcp")]
pub(crate) fn become_program(
    program: &Path,
    arguments: &[OsString],
    environment: &[(OsString, OsString)],
) -> io::Result<Infallible> {
    let text = |bytes: &[&[u8]]| CString::new(bytes.concat()).map_err(io::Error::other);
    let pointers = |texts: &[CString]| {
        let null = std::iter::once(std::ptr::null());
        texts.iter().map(|text| text.as_ptr()).chain(null).collect::<Vec<_>>()
    };
    let program = text(&[program.as_os_str().as_bytes()])?;
    let arguments = arguments.iter().map(|argument| text(&[argument.as_bytes()])).collect::<io::Result<Vec<_>>>()?;
    let variables = environment.iter().map(|(name, value)| text(&[name.as_bytes(), b"=", value.as_bytes()]));
    let variables = variables.collect::<io::Result<Vec<_>>>()?;
    let (arguments, variables) = (pointers(&arguments), pointers(&variables));
    // Any sooner, a collection would wait for this thread while it waits for memory.
    mask_own_signals(libc::SIG_BLOCK)?;
    // SAFETY: the texts end with a zero, the lists with a null pointer, and all of them live until the call returns.
    unsafe { libc::execve(program.as_ptr(), arguments.as_ptr(), variables.as_ptr()) };
    Err(io::Error::last_os_error())
}

/// Forgets timers and signals that were meant for the program that this process was, and gets signals from here on.
#[cfg(feature = "mcp")]
pub(crate) fn heed_own_signals() -> io::Result<()> {
    // Here and not there: its threads could have set timers to the last.
    for which in [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF] {
        // SAFETY: the struct is plain memory that is only read.
        unsafe { libc::setitimer(which, &std::mem::zeroed(), std::ptr::null_mut()) };
    }
    for signal in OWN_SIGNALS {
        // SAFETY: no handler is installed, and the disposition is what it was after the two calls. A signal that is
        // ignored is not pending any more (signal(7), POSIX 2.4.1).
        unsafe {
            let before = libc::signal(signal, libc::SIG_IGN);
            libc::signal(signal, before);
        }
    }
    mask_own_signals(libc::SIG_UNBLOCK)
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
