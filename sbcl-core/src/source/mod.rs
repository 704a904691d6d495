//! SBCL's source: the ways to it, in order, and how it is unpacked. Each way checks what it finds against the pin.

mod cached;
mod debian;
mod git;
mod named;
mod unpack;
mod verify;

use std::fmt;
use std::path::{Path, PathBuf};

use crate::cache::Cache;
use crate::error::{Attempt, Error};
use crate::progress::Progress;
use crate::settings::Settings;

pub(crate) use unpack::unpack;

/// A source that was found and agrees with the pin.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The pinned archive.
    Archive(PathBuf),
    /// A bare git repository with the pinned commit.
    Repository(PathBuf),
    /// A directory of SBCL's, of the right version.
    Directory(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Archive(path) | Self::Repository(path) | Self::Directory(path) => path.display().fmt(formatter),
        }
    }
}

/// What came of a way.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// It led to the source.
    Found(Source),
    /// It did not: what was tried and why it failed. The next way is tried.
    Missing(String),
    /// It was named by the user, and what is there cannot be used. No other way is tried.
    Refused(String),
}

/// A way to the source.
trait Way {
    /// What to call it in a message.
    fn name(&self) -> String;
    /// Goes there.
    fn look(&self, progress: &Progress) -> Outcome;
}

/// Finds the source by the first way that leads to it.
pub(crate) fn find(settings: &Settings, cache: &Cache, progress: &Progress) -> Result<Source, Error> {
    first(&ways(settings, &cache.sources()?), progress)
}

/// What tells apart stages made from different sources: whatever agrees with the pin in every bit is the same, a
/// directory is what is in it. A named source that cannot be used is an error even if the cache has no need of it.
pub(crate) fn identity(settings: &Settings, progress: &Progress) -> Result<String, Error> {
    if settings.source.is_some() {
        let named: Box<dyn Way> = Box::new(named::Named::new(settings.source.clone()));
        if let Source::Directory(path) = first(&[named], progress)? {
            return crate::key::directory_digest(&path, &unpack::directory_files(&path)?);
        }
    }
    Ok("pinned".to_owned())
}

fn ways(settings: &Settings, sources: &Path) -> Vec<Box<dyn Way>> {
    vec![
        Box::new(named::Named::new(settings.source.clone())),
        Box::new(cached::Cached::new(sources)),
        Box::new(git::Git::new(sources)),
        Box::new(debian::Debian::new(sources)),
    ]
}

fn first(ways: &[Box<dyn Way>], progress: &Progress) -> Result<Source, Error> {
    let mut tried = Vec::new();
    for way in ways {
        match way.look(progress) {
            Outcome::Found(source) => {
                return Ok(source);
            }
            Outcome::Missing(outcome) => tried.push(Attempt { way: way.name(), outcome }),
            Outcome::Refused(reason) => {
                return Err(Error::SourceRefused { way: way.name(), reason });
            }
        }
    }
    Err(Error::NoSource { tried })
}

#[cfg(test)]
mod tests;
