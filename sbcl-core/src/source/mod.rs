//! Finds SBCL's source by asking several providers in order, and unpacks it. Each provider compares its source with the
//! pin.

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
use crate::pin;
use crate::progress::Progress;
use crate::settings::Settings;

pub(crate) use unpack::unpack;

/// A source that agrees with the pin, or the directory that `SBCL_MCP_NEXT` names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The pinned archive.
    Archive(PathBuf),
    /// A bare git repository with the pinned commit.
    Repository(PathBuf),
    /// A source directory.
    Directory(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Archive(path) | Self::Repository(path) | Self::Directory(path) => path.display().fmt(formatter),
        }
    }
}

/// The result of asking a provider.
#[derive(Debug, PartialEq, Eq)]
enum LookupOutcome {
    /// The provider has the source.
    Found(Source),
    /// The provider does not have the source, for this reason. The next provider is asked.
    Missing(String),
    /// The user named a source that cannot be used, for this reason. No other provider is asked.
    Refused(String),
}

/// A provider of SBCL's source.
trait Provider {
    /// Returns the provider's name for messages.
    fn name(&self) -> String;
    /// Looks for the source and, if necessary, downloads it.
    fn find(&self, progress: &Progress) -> LookupOutcome;
}

/// Returns the version of the SBCL to build: the pinned version, or the version of the source that `SBCL_MCP_NEXT` names.
pub(crate) fn version(settings: &Settings) -> Result<String, Error> {
    let Some(directory) = &settings.next else {
        return Ok(pin::VERSION.to_owned());
    };
    let refuse = |problem| Error::NextRefused { directory: directory.clone(), problem };
    if !directory.is_absolute() {
        return Err(refuse("this path is not absolute"));
    }
    verify::version(directory).ok_or_else(|| refuse("neither version.lisp-expr nor NEWS there states SBCL's version"))
}

/// Returns the source that `SBCL_MCP_NEXT` names, or else the source from the first provider that has it.
pub(crate) fn find(settings: &Settings, cache: &Cache, progress: &Progress) -> Result<Source, Error> {
    if let Some(directory) = &settings.next {
        return Ok(Source::Directory(directory.clone()));
    }
    search_providers(&providers(settings, &cache.create_sources_directory()?), progress)
}

/// Returns a string that distinguishes stages built from different sources: `pinned` for every source that agrees with
/// the pin bit by bit, or a digest of a directory's contents. Fails if the user named a source that cannot be used,
/// even if the cache has all stages.
pub(crate) fn identity(settings: &Settings, progress: &Progress) -> Result<String, Error> {
    if let Some(directory) = &settings.next {
        return crate::key::directory_digest(directory, &unpack::directory_files(directory)?);
    }
    if settings.source.is_some() {
        let named: Box<dyn Provider> = Box::new(named::NamedProvider::new(settings.source.clone()));
        if let Source::Directory(path) = search_providers(&[named], progress)? {
            return crate::key::directory_digest(&path, &unpack::directory_files(&path)?);
        }
    }
    Ok("pinned".to_owned())
}

fn providers(settings: &Settings, sources: &Path) -> Vec<Box<dyn Provider>> {
    vec![
        Box::new(named::NamedProvider::new(settings.source.clone())),
        Box::new(cached::CacheProvider::new(sources)),
        Box::new(git::GitProvider::new(sources)),
        Box::new(debian::DebianProvider::new(sources)),
    ]
}

fn search_providers(providers: &[Box<dyn Provider>], progress: &Progress) -> Result<Source, Error> {
    let mut tried = Vec::new();
    for provider in providers {
        match provider.find(progress) {
            LookupOutcome::Found(source) => {
                return Ok(source);
            }
            LookupOutcome::Missing(reason) => tried.push(Attempt { provider: provider.name(), reason }),
            LookupOutcome::Refused(reason) => {
                return Err(Error::SourceRefused { provider: provider.name(), reason });
            }
        }
    }
    Err(Error::NoSource { tried })
}

#[cfg(test)]
mod tests;
