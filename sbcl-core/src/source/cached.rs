//! The source that an earlier build fetched, in the cache.

use std::path::{Path, PathBuf};

use super::{Outcome, Provider, Source, git, verify};
use crate::pin;
use crate::progress::Progress;

/// The provider that looks in the cache's directory of sources.
pub(super) struct Cached {
    sources: PathBuf,
}

impl Cached {
    /// Creates the provider for this directory.
    pub(super) fn new(sources: &Path) -> Self {
        Self { sources: sources.to_owned() }
    }
}

impl Provider for Cached {
    fn name(&self) -> String {
        format!("the cache {}", self.sources.display())
    }

    fn find(&self, _: &Progress) -> Outcome {
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
        let empty = cached.find(&Progress::silent());
        assert_eq!(empty, Outcome::Missing("nothing there".to_owned()));
        std::fs::write(directory.join(pin::ARCHIVE), "half of it").unwrap();
        match cached.find(&Progress::silent()) {
            Outcome::Missing(reason) => assert!(reason.contains("SHA-256"), "{reason}"),
            other => panic!("used: {other:?}"),
        }
    }
}
