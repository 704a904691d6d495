//! Temporary directories for tests.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A new temporary directory, removed when this value is dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Creates a directory with `name` in its name.
    pub(crate) fn new(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let unique = format!("sbcl-core-{name}-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(unique);
        std::fs::create_dir_all(&directory).expect("a temporary directory");
        Self(directory)
    }
}

impl Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A test does not fail if it cannot clean up.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
