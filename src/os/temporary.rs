//! A temporary directory for those who have no home directory.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

/// The name of a directory that nobody else can guess and nobody has made yet. Lisp makes it when it needs it, which is
/// when the user has no home directory or cannot write to it; at the end it is [removed](Self::remove).
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Chooses a name below the temporary directory (`TMPDIR`).
    pub(crate) fn new() -> Self {
        let temporary = std::env::temp_dir();
        Self::in_directory(&std::path::absolute(&temporary).unwrap_or(temporary))
    }

    /// Chooses a name in this directory: another scratch directory, with which it goes.
    pub(crate) fn in_directory(path: &Path) -> Self {
        // The standard library seeds its hash maps from the system's randomness.
        let number = RandomState::new().hash_one(std::process::id());
        Self(path.join(format!("sbcl-mcp-{number:016x}")))
    }

    /// The directory of this name, which a parent process chose.
    pub(crate) fn inherited(path: PathBuf) -> Self {
        Self(path)
    }

    /// Its name.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Removes the directory if it was made.
    pub(crate) fn remove(&self) {
        // What cannot be removed is not worth a word at the end.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
