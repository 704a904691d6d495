//! Persistent sessions: each has a directory of its own, and continues in another server.
//!
//! The directory contains the checkpoints of the session ([`store`]), its recovery [`log`], a file that whoever serves or saves
//! the session has [locked](lock), and the [status page](crate::recovery::status_page) of its last worker. A process that is
//! killed at any moment leaves the state before a change or after it: a core counts once its manifest exists, and the log grows
//! by lines or is replaced as a whole.

mod export;
pub(crate) mod lock;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::recovery::checkpoint::store::{self, Checkpoint, MAX_NAME};
use crate::recovery::log::{self, Loaded};
use lock::Lock;

/// The file with the status page of a session's last worker.
const STATUS: &str = "status";
/// The file for errors of the process that saves the session at the end.
pub(crate) const ERRORS: &str = "errors";

/// A persistent session, which may not have begun yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Durable {
    /// The session's name.
    pub(crate) name: String,
    directory: PathBuf,
}

impl Durable {
    /// Returns the session with this name, or in this directory when there is a slash in `name`.
    ///
    /// # Errors
    /// A sentence: the name is not allowed, or there is no place for sessions.
    pub(crate) fn named(name: &OsStr) -> Result<Self, String> {
        let text = name.to_string_lossy();
        if name.as_bytes().contains(&b'/') {
            let directory = std::path::absolute(name).map_err(|error| format!("{text}: {error}"))?;
            return Ok(Self { name: text.into_owned(), directory });
        }
        let is_plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(char::is_control);
        match name.to_str().filter(|name| is_plain(name) && name.chars().count() <= MAX_NAME) {
            Some(name) => Ok(Self { name: name.to_owned(), directory: root()?.join(name) }),
            None => Err(format!(
                "A session's name has at most {MAX_NAME} characters and begins with no dot; or it is a path."
            )),
        }
    }

    /// Returns this user's sessions, by name, except those in directories elsewhere.
    pub(crate) fn all() -> Result<Vec<Self>, String> {
        let entries = match fs::read_dir(root()?) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(format!("The sessions cannot be read: {error}.")),
        };
        let mut all: Vec<_> = entries
            .flatten()
            .map(|entry| Self { name: entry.file_name().to_string_lossy().into_owned(), directory: entry.path() })
            .filter(Self::exists)
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The session's directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// True when the session has begun.
    fn exists(&self) -> bool {
        log::is_in(&self.directory)
    }

    /// Makes the session's directory, which only its owner may read.
    ///
    /// # Errors
    /// A sentence: the directory cannot be made, or contains something else.
    pub(crate) fn make_directory(&self) -> Result<(), String> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory);
        made.map_err(|error| {
            format!("The session {:?} has no place: {}: {error}.", self.name, self.directory.display())
        })?;
        // Whoever begins one is killed, or has not come further.
        let is_begun = |path: &PathBuf| is_ours(path) && path.file_name() != Some(log::LOG.as_ref());
        if self.exists() || self.files().all(|path| is_begun(&path)) {
            return Ok(());
        }
        Err(format!("The directory {} is not empty, and no session: choose another.", self.directory.display()))
    }

    /// The files in its directory.
    fn files(&self) -> impl Iterator<Item = PathBuf> {
        fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.path())
    }

    /// The file with the status page of its worker.
    pub(crate) fn status_file(&self) -> PathBuf {
        self.directory.join(STATUS)
    }

    /// The file for errors of the save at the end.
    pub(crate) fn errors_file(&self) -> PathBuf {
        self.directory.join(ERRORS)
    }

    /// Reads the session's log. The caller has locked the session, or only looks.
    ///
    /// # Errors
    /// A sentence: a newer program wrote the log, or it cannot be read.
    pub(crate) fn load(&self) -> Result<Loaded, String> {
        let loaded = log::load(&self.directory);
        let mut loaded =
            loaded.map_err(|reason| format!("The session {:?} cannot be used here: {reason}.", self.name))?;
        // A save at the end contains all of the log, which says nothing of it.
        let last = store::manifests(&self.directory).into_iter().rfind(|checkpoint| checkpoint.at_end);
        if let Some(last) = last {
            loaded.state.saved_at_end(&last);
        }
        Ok(loaded)
    }

    /// The session's name, as an argument in a shell.
    pub(crate) fn shell_name(&self) -> String {
        let is_plain = self.name.chars().all(|c| c.is_alphanumeric() || "/._-+".contains(c));
        if is_plain { self.name.clone() } else { format!("'{}'", self.name.replace('\'', r"'\''")) }
    }

    /// Its last checkpoint, whatever program saved it.
    fn last_checkpoint(&self, loaded: &Loaded) -> Option<Checkpoint> {
        let all = store::manifests(&self.directory);
        let files = loaded.state.saved_files();
        files.iter().rev().find_map(|file| all.iter().find(|checkpoint| checkpoint.file == *file).cloned())
    }

    /// Describes the session.
    pub(crate) fn describe(&self) -> Description {
        let loaded = self.load().unwrap_or_default();
        let checkpoint = self.last_checkpoint(&loaded);
        let files = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let metadata: Vec<_> = files.filter_map(|file| file.metadata().ok()).collect();
        Description {
            name: self.name.clone(),
            bytes: metadata.iter().map(fs::Metadata::len).sum(),
            changed: metadata.iter().filter_map(|file| file.modified().ok()).max().and_then(|at| at.try_into().ok()),
            forms: loaded.state.definitions().count(),
            evaluations: loaded.state.evaluations,
            checkpoint,
            holder: lock::holder(&self.directory),
        }
    }

    /// Removes the session's files, and the directory if nothing else is in it.
    ///
    /// # Errors
    /// A sentence: there is no such session, it runs, or its files cannot be removed.
    pub(crate) fn delete(&self) -> Result<(), String> {
        let _lock = self.lock_for("deleted")?;
        // The log first: without it there is none.
        let ours = self.files().filter(|path| is_ours(path));
        let mut removed = fs::remove_file(self.directory.join(log::LOG));
        ours.for_each(|path| drop(fs::remove_file(path)));
        if self.files().next().is_none() {
            removed = removed.and_then(|()| fs::remove_dir(&self.directory));
        }
        removed.map_err(|error| format!("The session {:?} cannot be deleted: {error}.", self.name))
    }

    /// Returns its definitions, as the text of a file that SBCL loads.
    ///
    /// # Errors
    /// A sentence: there is no such session.
    pub(crate) fn export(&self) -> Result<String, String> {
        if !self.exists() {
            return Err(self.missing());
        }
        Ok(export::export(&self.name, &self.load()?.state))
    }

    fn missing(&self) -> String {
        let names: Vec<_> = Self::all().unwrap_or_default().into_iter().map(|one| one.name).collect();
        let there_are = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        format!("There is no session {:?}. There are: {there_are}.", self.name)
    }

    fn lock_for(&self, what: &str) -> Result<Lock, String> {
        if !self.exists() {
            return Err(self.missing());
        }
        Lock::take(&self.directory)
            .map_err(|error| format!("The session {:?} cannot be {what}: {error}.", self.name))?
            .map_err(|holder| format!("The session {:?} is {holder}, and cannot be {what} meanwhile.", self.name))
    }
}

/// True for a file with a name as the files of sessions have.
fn is_ours(path: &Path) -> bool {
    let is_named = |ours: &str| {
        let name = path.file_name();
        name == Some(ours.as_ref()) || name.map(Path::new) == Some(&Path::new(ours).with_extension("draft"))
    };
    store::is_ours(path) || [log::LOG, log::DAMAGED, lock::LOCK, STATUS, ERRORS].iter().any(|ours| is_named(ours))
}

/// A session as `sbcl-mcp sessions` lists it.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) name: String,
    /// The size of its files.
    pub(crate) bytes: u64,
    /// The time of the last change of a file.
    pub(crate) changed: Option<jiff::Timestamp>,
    /// The number of forms that defined something.
    pub(crate) forms: usize,
    /// The number of its last evaluation, as far as it is known.
    pub(crate) evaluations: u64,
    /// Its last checkpoint.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// The process that serves or saves it.
    pub(crate) holder: Option<lock::Holder>,
}

/// The directory that contains the sessions.
fn root() -> Result<PathBuf, String> {
    let state = store::state_directory();
    state.map(|state| state.join("sessions")).ok_or_else(|| {
        "There is no place for sessions: neither XDG_STATE_HOME nor a home directory. `--session` takes a path, too.".to_owned()
    })
}
