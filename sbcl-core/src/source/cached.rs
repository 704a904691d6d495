//! The source that an earlier build fetched into the cache.

use std::path::{Path, PathBuf};

use super::{LookupOutcome, Provider, Source, git, verify};
use crate::pin;
use crate::progress::Progress;

/// The provider that looks in the cache's directory of sources.
pub(super) struct CacheProvider {
    sources: PathBuf,
}

impl CacheProvider {
    /// Creates the provider for this directory.
    pub(super) fn new(sources: &Path) -> Self {
        Self { sources: sources.to_owned() }
    }
}

impl Provider for CacheProvider {
    fn name(&self) -> String {
        format!("the cache {}", self.sources.display())
    }

    fn find(&self, _: &Progress) -> LookupOutcome {
        let mut reasons = Vec::new();
        let archive = self.sources.join(pin::ARCHIVE);
        if archive.is_file() {
            match verify::archive(&archive) {
                Ok(()) => return LookupOutcome::Found(Source::Archive(archive)),
                Err(reason) => reasons.push(reason),
            }
        }
        let repository = git::repository_path(&self.sources);
        if repository.is_dir() {
            match git::verify_commit(&repository, pin::GIT_COMMIT) {
                Ok(()) => return LookupOutcome::Found(Source::Repository(repository)),
                Err(reason) => reasons.push(reason),
            }
        }
        if reasons.is_empty() {
            reasons.push("nothing there".to_owned());
        }
        LookupOutcome::Missing(reasons.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn archive_with_a_wrong_sha256_is_not_used() {
        let directory = Scratch::new("cached");
        let cached = CacheProvider::new(&directory);
        let empty = cached.find(&Progress::silent());
        assert_eq!(empty, LookupOutcome::Missing("nothing there".to_owned()));
        std::fs::write(directory.join(pin::ARCHIVE), "half of it").unwrap();
        match cached.find(&Progress::silent()) {
            LookupOutcome::Missing(reason) => assert!(reason.contains("SHA-256"), "{reason}"),
            other => panic!("used: {other:?}"),
        }
    }
}
