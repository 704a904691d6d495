//! One process has a session at a time.

use std::fmt::{self, Display, Formatter};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// The file that is locked, with flock(2): whoever inherits the descriptor has the lock, too, and with the last of them
/// it is gone.
pub(super) const LOCK: &str = "lock";

/// What a process does with a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It serves it.
    Serving,
    /// Its server has ended, or is about to, and it saves it.
    Saving,
}

/// Who has a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The process.
    pub(crate) pid: i32,
    pub(crate) doing: Doing,
}

impl Holder {
    /// True when the session will soon be free: its server has ended.
    pub(crate) fn is_ending(self) -> bool {
        let is_gone = || {
            let pid = rustix::process::Pid::from_raw(self.pid);
            pid.is_none_or(|pid| rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
        };
        self.doing == Doing::Saving || is_gone()
    }
}

impl Display for Holder {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let doing = match self.doing {
            Doing::Serving => "served",
            Doing::Saving => "being saved",
        };
        write!(f, "{doing} by process {}", self.pid)
    }
}

/// A session's lock, held until this and all that inherited it are gone.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Takes it, or says who has it.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn take(directory: &Path) -> io::Result<Result<Self, Holder>> {
        let path = directory.join(LOCK);
        loop {
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_same(&file, &path) => return Ok(Ok(Self(file))),
                // It was deleted meanwhile.
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Err(read(&file))),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The lock that a parent process has taken.
    pub(crate) fn inherited(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    /// Says what this process does with the session.
    pub(crate) fn say(&mut self, doing: Doing) {
        let doing = match doing {
            Doing::Serving => "serving",
            Doing::Saving => "saving",
        };
        // It is only told, to whoever does not get the lock.
        let _ = self.0.rewind();
        let _ = writeln!(self.0, "{:10} {doing:10}", std::process::id());
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Who has the session in this directory, if somebody does.
pub(super) fn holder(directory: &Path) -> Option<Holder> {
    let file = File::open(directory.join(LOCK)).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Some(read(&file)),
        _ => None,
    }
}

fn read(mut file: &File) -> Holder {
    let mut text = String::new();
    let _ = file.rewind();
    let _ = file.take(100).read_to_string(&mut text);
    let mut words = text.split_whitespace();
    let pid = words.next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
    Holder { pid, doing: if words.next() == Some("saving") { Doing::Saving } else { Doing::Serving } }
}

/// True when `path` still names the file.
fn is_same(file: &File, path: &Path) -> bool {
    match (rustix::fs::fstat(file), rustix::fs::stat(path)) {
        (Ok(open), Ok(named)) => (open.st_dev, open.st_ino) == (named.st_dev, named.st_ino),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_and_the_others_know_who() {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-lock-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        assert_eq!(holder(&directory), None);
        let mut lock = Lock::take(&directory).unwrap().unwrap();
        lock.say(Doing::Serving);
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(Lock::take(&directory).unwrap().unwrap_err(), Holder { pid, doing: Doing::Serving });
        lock.say(Doing::Saving);
        assert!(holder(&directory).unwrap().is_ending());
        let inherited = Lock::inherited(lock.0.try_clone().unwrap().into());
        drop(lock);
        assert!(Lock::take(&directory).unwrap().is_err());
        drop(inherited);
        assert_eq!(holder(&directory), None);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
