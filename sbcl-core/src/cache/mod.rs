//! The cache of finished stages, outside the checkout and shared by all builds of a user.
//!
//! ```text
//! <cache>/<stage>-<key>/   a finished stage
//! <cache>/sources/         SBCL's source, as it was fetched
//! <cache>/logs/            output of the programs of each stage
//! <cache>/locks/           one empty file per stage and key
//! <cache>/tmp/             stages being built, or left behind by a build that was killed
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

/// A file whose modification time is the time of the stage's last use.
const LAST_USED_FILE: &str = ".used";

/// A cache in the directory `root`.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    root: PathBuf,
}

/// The directories, log and progress display of a stage that is being built.
pub(crate) struct StageContext<'a> {
    /// An empty directory that becomes the finished stage.
    pub(crate) result: PathBuf,
    /// An empty directory for temporary files, removed after the build of the stage.
    pub(crate) scratch: PathBuf,
    /// The log for the output of programs.
    pub(crate) log: Log,
    /// The display of progress.
    pub(crate) progress: &'a Progress,
}

impl Cache {
    /// Returns the cache in this directory, which is created when something is first stored.
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Creates the directory of fetched sources, and returns it.
    pub(crate) fn create_sources_directory(&self) -> Result<PathBuf, Error> {
        self.create_directory("sources")
    }

    /// Returns the directory of a finished stage. If the stage is missing or incomplete, calls `make` to build it. If
    /// several processes need the stage at the same time, one process builds it while the others wait.
    pub(crate) fn get_or_build(
        &self,
        stage: &str,
        key: &Key,
        progress: &Progress,
        make: impl FnOnce(&StageContext<'_>) -> Result<(), Error>,
    ) -> Result<PathBuf, Error> {
        let name = format!("{stage}-{key}");
        let entry = self.root.join(&name);
        if !manifest::is_complete(&entry) {
            let _lock = lock::acquire(&self.create_directory("locks")?.join(&name), progress)?;
            // Another build may have made the stage during the wait.
            if !manifest::is_complete(&entry) {
                self.build_stage(&name, &entry, progress, make)?;
            }
        }
        mark_used(&entry)?;
        Ok(entry)
    }

    /// Removes all stages of this name except the `keep` most recently used. Failures are ignored.
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

    fn build_stage(
        &self,
        name: &str,
        entry: &Path,
        progress: &Progress,
        make: impl FnOnce(&StageContext<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // An existing stage is incomplete. This build holds the lock, so no other build is working on it.
        if entry.exists() {
            self.discard(entry)?;
        }
        // Programs of a killed build may still run in its directory, so this build's directory has a different name. Otherwise
        // the name is always the same, because the contents of a core depend on the paths with which SBCL was built.
        let directory = self.create_directory("tmp")?;
        let mut temporary = directory.join(format!("{name}.0"));
        let mut left = 0;
        while temporary.exists() {
            left += 1;
            temporary.set_file_name(format!("{name}.{left}"));
        }
        self.clear_leftovers(name);
        let context = StageContext {
            result: temporary.join("result"),
            scratch: temporary.join("scratch"),
            log: Log::create(self.create_directory("logs")?.join(format!("{name}.log")))?,
            progress,
        };
        for directory in [&context.result, &context.scratch] {
            std::fs::create_dir_all(directory).context("creating", directory)?;
        }
        let made = make(&context)
            .and_then(|()| backdate(&context.result))
            .and_then(|()| manifest::write(&context.result))
            .and_then(|()| std::fs::rename(&context.result, entry).context("moving the result to", entry));
        remove(&temporary)?;
        made
    }

    /// Removes files that killed builds of this stage left behind. Failures are ignored.
    fn clear_leftovers(&self, name: &str) {
        let prefix = format!("{name}.");
        let entries = self.root.join("tmp").read_dir();
        for entry in entries.into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                let _ = remove(&entry.path());
            }
        }
    }

    /// Removes a stage. Its directory is renamed first, so that no other build sees a partly removed stage.
    fn discard(&self, entry: &Path) -> Result<(), Error> {
        let name = entry.file_name().unwrap_or_default().to_string_lossy();
        let aside = self.create_directory("tmp")?.join(format!("{name}.discarded-{}", std::process::id()));
        std::fs::rename(entry, &aside).context("removing", entry)?;
        remove(&aside)
    }

    fn create_directory(&self, name: &str) -> Result<PathBuf, Error> {
        let folder = self.root.join(name);
        std::fs::create_dir_all(&folder).context("creating", &folder)?;
        Ok(folder)
    }
}

fn remove(directory: &Path) -> Result<(), Error> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context("removing", directory),
        _ => Ok(()),
    }
}

/// Sets the files' modification times to long before any build. Cargo reruns a build script if one of its inputs is
/// newer than the start of the script's last run, as the files of a stage that was built during that run would be.
fn backdate(directory: &Path) -> Result<(), Error> {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    for name in files::list(directory, |name| !directory.join(name).is_symlink())? {
        let path = directory.join(name);
        let dated = File::open(&path).and_then(|file| file.set_modified(long_ago));
        dated.context("setting the time of", &path)?;
    }
    Ok(())
}

fn mark_used(entry: &Path) -> Result<(), Error> {
    let path = entry.join(LAST_USED_FILE);
    std::fs::write(&path, "").context("writing", &path)
}

fn last_used(entry: &Path) -> SystemTime {
    let modified = std::fs::metadata(entry.join(LAST_USED_FILE)).and_then(|data| data.modified());
    modified.unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests;
