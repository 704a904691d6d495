//! A temporary directory, which also replaces a missing home directory.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

/// The path of a temporary directory with an unguessable name. The directory is created when it is first needed: by Lisp,
/// for instance, if the user has no writable cache directory. [`remove`](Self::remove) deletes the directory.
#[derive(Debug)]
pub(crate) struct ScratchDirectory(PathBuf);

impl ScratchDirectory {
    /// Chooses a name in the temporary directory (`TMPDIR`).
    pub(crate) fn new() -> Self {
        let temporary = std::env::temp_dir();
        Self::in_directory(&std::path::absolute(&temporary).unwrap_or(temporary))
    }

    /// Chooses a name in the directory `path`. If `path` is a scratch directory, removing it removes the new directory, too.
    pub(crate) fn in_directory(path: &Path) -> Self {
        // Nobody can guess the number, because `RandomState` takes its keys from the system's random numbers.
        let number = RandomState::new().hash_one(std::process::id());
        Self(path.join(format!("sbcl-mcp-{number:016x}")))
    }

    /// Returns the scratch directory `path`, whose name a parent process chose.
    pub(crate) fn inherited(path: PathBuf) -> Self {
        Self(path)
    }

    /// Returns the directory's path.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Removes the directory if it exists.
    pub(crate) fn remove(&self) {
        // A directory that cannot be removed is left: at the end of the process, nobody could act on the error.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
