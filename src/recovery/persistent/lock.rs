//! The lock of a persistent session: only a process that holds the lock serves or saves the session. A server without a
//! persistent session locks the directory of its checkpoints in the same way.

use std::fmt::{self, Display, Formatter};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::os::files;

/// The name of the file that is locked with flock(2). Processes that inherit the descriptor share the lock, which is
/// released when the last of these processes has closed the descriptor.
pub(crate) const LOCK_FILE: &str = "lock";

/// The state of the process that holds a session's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HolderState {
    /// The process serves the session.
    Serving,
    /// The process saves the session, whose server has ended or is about to end.
    Saving,
}

/// The process that holds a session's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The id of the process; 0 if unknown.
    pub(crate) pid: i32,
    pub(crate) state: HolderState,
}

impl Holder {
    /// Returns true when the session will soon be free: the holder saves the session, has ended, or is unknown.
    pub(crate) fn is_ending(self) -> bool {
        self.state == HolderState::Saving || self.is_gone()
    }

    /// Returns true if the process has ended or is unknown. Its children may then still hold the lock.
    fn is_gone(self) -> bool {
        let pid = rustix::process::Pid::from_raw(self.pid);
        pid.is_none_or(|pid| rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
    }
}

impl Display for Holder {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            HolderState::Serving => "served",
            HolderState::Saving => "being saved",
        };
        match self.pid {
            0 => write!(f, "held by another process"),
            pid if self.is_gone() => write!(f, "held by process {pid} or its children"),
            pid => write!(f, "{state} by process {pid}"),
        }
    }
}

/// A session's lock. The lock is held until this descriptor and all inherited copies are closed.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Tries to take the lock of the session in this directory. Returns the holder if another process has the lock.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened or locked, or is not a regular file.
    pub(crate) fn try_acquire(directory: &Path) -> io::Result<Result<Self, Holder>> {
        let path = directory.join(LOCK_FILE);
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = files::open_unlinked(&mut options, &path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_same_file(&file, &path) => return Ok(Ok(Self(file))),
                // The file was deleted before it was locked, and another process may lock a new file: try again.
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Err(read_holder(&file))),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes the lock of a process that no longer exists. Returns `None` if no process has ever held the lock in this
    /// directory, if the holder still exists, or if the file cannot be opened or locked.
    pub(crate) fn take_abandoned(directory: &Path) -> Option<Self> {
        let file = files::open(&directory.join(LOCK_FILE)).ok()?;
        // A process that is about to take the lock has not written its id yet.
        if read_holder(&file).pid == 0 {
            return None;
        }
        Self::try_acquire(directory).ok()?.ok()
    }

    /// Wraps the descriptor of a lock that the parent process acquired and this process inherited.
    pub(crate) fn inherited(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    /// Writes this process's id and state to the file, for processes that do not get the lock.
    pub(crate) fn set_state(&mut self, state: HolderState) {
        let state = match state {
            HolderState::Serving => "serving",
            HolderState::Saving => "saving",
        };
        // After an error other processes may read an old id and state, but still cannot get the lock.
        let _ = self.0.rewind();
        let _ = writeln!(self.0, "{:10} {state:10}", std::process::id());
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the holder of the lock of the session in this directory; `None` while the session is free.
pub(super) fn holder(directory: &Path) -> Option<Holder> {
    let file = files::open(&directory.join(LOCK_FILE)).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Some(read_holder(&file)),
        _ => None,
    }
}

/// Reads the holder that [`Lock::set_state`] has written.
fn read_holder(mut file: &File) -> Holder {
    let mut text = String::new();
    let _ = file.rewind();
    let _ = file.take(100).read_to_string(&mut text);
    let mut words = text.split_whitespace();
    let pid = words.next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
    Holder { pid, state: if words.next() == Some("saving") { HolderState::Saving } else { HolderState::Serving } }
}

/// Returns true when `path` still names the file.
fn is_same_file(file: &File, path: &Path) -> bool {
    match (rustix::fs::fstat(file), rustix::fs::stat(path)) {
        (Ok(open), Ok(named)) => (open.st_dev, open.st_ino) == (named.st_dev, named.st_ino),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_one_holder_and_is_released_with_its_last_descriptor() {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-lock-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        assert_eq!(holder(&directory), None);
        let mut lock = Lock::try_acquire(&directory).unwrap().unwrap();
        lock.set_state(HolderState::Serving);
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(Lock::try_acquire(&directory).unwrap().unwrap_err(), Holder { pid, state: HolderState::Serving });
        lock.set_state(HolderState::Saving);
        assert!(holder(&directory).unwrap().is_ending());
        let inherited = Lock::inherited(lock.0.try_clone().unwrap().into());
        drop(lock);
        assert!(Lock::try_acquire(&directory).unwrap().is_err());
        drop(inherited);
        assert_eq!(holder(&directory), None);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
