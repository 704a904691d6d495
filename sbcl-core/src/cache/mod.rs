//! The cache of finished stages, outside the checkout and shared by all builds of a user.
//!
//! ```text
//! <cache>/<stage>-<key>/   a finished stage
//! <cache>/sources/         SBCL's source, as it was fetched
//! <cache>/logs/            what the programs of each stage printed
//! <cache>/locks/           one empty file a stage and key
//! <cache>/tmp/             work under way, or left behind by a build that was killed
//! ```

mod lock;
mod manifest;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::error::{Error, IoContext};
use crate::files;
use crate::key::Key;
use crate::process::Log;
use crate::progress::Progress;

/// The file of a stage whose time says when the stage was last used.
const USED: &str = ".used";

/// The cache's directory.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    root: PathBuf,
}

/// What a stage that is being made has to work with.
pub(crate) struct Work<'a> {
    /// An empty directory which becomes the finished stage.
    pub(crate) result: PathBuf,
    /// An empty directory which goes away with the work.
    pub(crate) scratch: PathBuf,
    /// Takes what programs print.
    pub(crate) log: Log,
    /// Where progress is shown.
    pub(crate) progress: &'a Progress,
}

impl Cache {
    /// The cache in this directory, which is made when something is first put there.
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Where fetched sources are kept. The directory is made.
    pub(crate) fn sources(&self) -> Result<PathBuf, Error> {
        self.folder("sources")
    }

    /// A finished stage's directory. If there is none, `make` fills one. Of several builds that want it at the same
    /// time one makes it and the others wait.
    pub(crate) fn stage(
        &self,
        stage: &str,
        key: &Key,
        progress: &Progress,
        make: impl FnOnce(&Work<'_>) -> Result<(), Error>,
    ) -> Result<PathBuf, Error> {
        let name = format!("{stage}-{key}");
        let entry = self.root.join(&name);
        if !manifest::is_complete(&entry) {
            let _lock = lock::take(&self.folder("locks")?.join(&name), progress)?;
            // Another build may have made it while this one waited.
            if !manifest::is_complete(&entry) {
                self.make(&name, &entry, progress, make)?;
            }
        }
        mark_used(&entry)?;
        Ok(entry)
    }

    /// Removes stages of this name but the `keep` that were used last. What cannot be removed stays.
    pub(crate) fn prune(&self, stage: &str, keep: usize) {
        let prefix = format!("{stage}-");
        let entries = self.root.read_dir().into_iter().flatten().flatten();
        let mut stages: Vec<(SystemTime, PathBuf)> = entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
            .map(|entry| (last_used(&entry.path()), entry.path()))
            .collect();
        stages.sort_by(|one, other| other.cmp(one));
        for (_, entry) in stages.into_iter().skip(keep) {
            let _ = self.discard(&entry);
        }
    }

    fn make(
        &self,
        name: &str,
        entry: &Path,
        progress: &Progress,
        make: impl FnOnce(&Work<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // Whoever left something under these names is gone: the lock is ours.
        if entry.exists() {
            self.discard(entry)?;
        }
        self.clear_leftovers(name);
        // Programs of a build that was killed may still run in its directory, so this one is not called the same.
        let temporary = self.folder("tmp")?.join(format!("{name}.{}", std::process::id()));
        remove(&temporary)?;
        let work = Work {
            result: temporary.join("result"),
            scratch: temporary.join("scratch"),
            log: Log::create(self.folder("logs")?.join(format!("{name}.log")))?,
            progress,
        };
        for directory in [&work.result, &work.scratch] {
            std::fs::create_dir_all(directory).doing("making", directory)?;
        }
        let made = make(&work)
            .and_then(|()| backdate(&work.result))
            .and_then(|()| manifest::write(&work.result))
            .and_then(|()| std::fs::rename(&work.result, entry).doing("publishing", entry));
        remove(&temporary)?;
        made
    }

    /// Removes what killed builds of this stage left behind, as far as it can be removed.
    fn clear_leftovers(&self, name: &str) {
        let prefix = format!("{name}.");
        let entries = self.root.join("tmp").read_dir();
        for entry in entries.into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                let _ = remove(&entry.path());
            }
        }
    }

    /// Removes a stage in such a way that no half of it is ever seen under its name.
    fn discard(&self, entry: &Path) -> Result<(), Error> {
        let name = entry.file_name().unwrap_or_default().to_string_lossy();
        let aside = self.folder("tmp")?.join(format!("{name}.discarded-{}", std::process::id()));
        std::fs::rename(entry, &aside).doing("removing", entry)?;
        remove(&aside)
    }

    fn folder(&self, name: &str) -> Result<PathBuf, Error> {
        let folder = self.root.join(name);
        std::fs::create_dir_all(&folder).doing("making", &folder)?;
        Ok(folder)
    }
}

fn remove(directory: &Path) -> Result<(), Error> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).doing("removing", directory),
        _ => Ok(()),
    }
}

/// Has the files look older than any build: cargo runs a build script again for a file that is newer than the last run's
/// beginning, and so for what that run has made.
fn backdate(directory: &Path) -> Result<(), Error> {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    for name in files::list(directory, |name| !directory.join(name).is_symlink())? {
        let path = directory.join(name);
        let dated = File::open(&path).and_then(|file| file.set_modified(long_ago));
        dated.doing("dating", &path)?;
    }
    Ok(())
}

fn mark_used(entry: &Path) -> Result<(), Error> {
    let path = entry.join(USED);
    std::fs::write(&path, "").doing("writing", &path)
}

fn last_used(entry: &Path) -> SystemTime {
    let modified = std::fs::metadata(entry.join(USED)).and_then(|data| data.modified());
    modified.unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests;
