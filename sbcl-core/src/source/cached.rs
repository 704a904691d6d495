//! The source that an earlier build fetched.

use std::path::{Path, PathBuf};

use super::{Outcome, Source, Way, git, verify};
use crate::pin;
use crate::progress::Progress;

/// The cache's folder of sources.
pub(super) struct Cached {
    sources: PathBuf,
}

impl Cached {
    /// Looks in this folder.
    pub(super) fn new(sources: &Path) -> Self {
        Self { sources: sources.to_owned() }
    }
}

impl Way for Cached {
    fn name(&self) -> String {
        format!("the cache {}", self.sources.display())
    }

    fn look(&self, _: &Progress) -> Outcome {
        let mut reasons = Vec::new();
        let archive = self.sources.join(pin::ARCHIVE);
        if archive.is_file() {
            match verify::archive(&archive) {
                Ok(()) => return Outcome::Found(Source::Archive(archive)),
                Err(reason) => reasons.push(reason),
            }
        }
        let repository = git::repository(&self.sources);
        if repository.is_dir() {
            match git::check(&repository, pin::GIT_COMMIT) {
                Ok(()) => return Outcome::Found(Source::Repository(repository)),
                Err(reason) => reasons.push(reason),
            }
        }
        if reasons.is_empty() {
            reasons.push("nothing there".to_owned());
        }
        Outcome::Missing(reasons.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn archive_with_a_wrong_sha256_is_not_used() {
        let directory = Scratch::new("cached");
        let cached = Cached::new(&directory);
        let empty = cached.look(&Progress::silent());
        assert_eq!(empty, Outcome::Missing("nothing there".to_owned()));
        std::fs::write(directory.join(pin::ARCHIVE), "half of it").unwrap();
        match cached.look(&Progress::silent()) {
            Outcome::Missing(reason) => assert!(reason.contains("SHA-256"), "{reason}"),
            other => panic!("used: {other:?}"),
        }
    }
}
