//! Persistent sessions, which outlive their server, each in a directory of its own.
//!
//! The directory contains the checkpoints ([`store`]), the recovery [`log`], a [lock] file, and the
//! [status page](crate::recovery::status_page) of the last worker. The files are consistent even if a process is killed
//! at any moment: a core counts only with its manifest, which is written last, and the log grows by lines or is replaced
//! atomically.

mod export;
pub(crate) mod lock;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::os::files;
use crate::recovery::checkpoint::store::{self, Checkpoint, MAX_NAME_CHARS};
use crate::recovery::log::{self, LoadedLog};
use crate::recovery::messages::shortened_to;
use lock::Lock;

/// The name of the file with the status page of a session's last worker.
const STATUS_FILE: &str = "status";
/// The name of the file for the output of the process that saves the session at the end of its server.
pub(crate) const ERRORS_FILE: &str = "errors";
/// Maximum size of the [`ERRORS_FILE`] file, in bytes. A larger file is ignored.
const MAX_ERRORS_BYTES: u64 = 16 << 20;
/// The name of a file that exists from the beginning of the save at the end of a server until the session is saved, when
/// the file [becomes the manifest](store). The file is created empty: on a full disk, this is possible although the
/// [`ERRORS_FILE`] file cannot be written.
pub(crate) const SAVE_MARKER_FILE: &str = "save.incomplete";
/// Maximum number of characters that a message shows of the reason why the session was not saved. The reason may contain a
/// path, and ends with the advice.
const MAX_REASON_CHARS: usize = 1_000;
/// The beginning of the line in the [`ERRORS_FILE`] file that says why the session was not saved.
pub(crate) const NOT_SAVED: &str = "The session was not saved: ";

/// A persistent session, which need not exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PersistentSession {
    /// The session's name, or the path of its directory as the user gave it.
    pub(crate) name: String,
    directory: PathBuf,
}

impl PersistentSession {
    /// Returns the session with this name. A `name` that contains a slash is the path of the session's directory.
    ///
    /// # Errors
    /// Returns the reason if `name` is not a valid name or path, or if `name` is not a path and this user has no directory
    /// for sessions.
    pub(crate) fn named(name: &OsStr) -> Result<Self, String> {
        let text = name.to_string_lossy();
        if name.as_bytes().contains(&b'/') {
            let directory = std::path::absolute(name).map_err(|error| {
                format!(
                    "The working directory, to which {text:?} is relative, cannot be found: {error}. Use an absolute \
                     path."
                )
            })?;
            return Ok(Self { name: text.into_owned(), directory });
        }
        let is_plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(char::is_control);
        match name.to_str().filter(|name| is_plain(name) && name.chars().count() <= MAX_NAME_CHARS) {
            Some(name) => {
                let advice =
                    "Set XDG_STATE_HOME to an absolute path, or name the session by a path that contains a slash.";
                Ok(Self { name: name.to_owned(), directory: sessions_directory(advice)?.join(name) })
            }
            None => Err(format!(
                "{text:?} is not a valid session name: use 1 to {MAX_NAME_CHARS} printable characters without a leading \
                 dot, or a path that contains a slash."
            )),
        }
    }

    /// Returns this user's directory for sessions, and its sessions, sorted by name.
    ///
    /// # Errors
    /// Returns the reason as a sentence if this user has no directory for sessions, or if the directory cannot be read.
    pub(crate) fn all() -> Result<(PathBuf, Vec<Self>), String> {
        let directory = sessions_directory("Set XDG_STATE_HOME to an absolute path.")?;
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((directory, Vec::new())),
            Err(error) => {
                return Err(format!("The sessions in {} cannot be listed: {error}.", directory.display()));
            }
        };
        let mut all: Vec<_> = entries
            .flatten()
            .map(|entry| Self { name: entry.file_name().to_string_lossy().into_owned(), directory: entry.path() })
            .filter(Self::exists)
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok((directory, all))
    }

    /// Returns the session's directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns true when the directory contains a readable session log, or the remains of a damaged session: a lock together
    /// with a log or a checkpoint, and only files that a session has. The check is needed since the user may name any
    /// directory.
    fn exists(&self) -> bool {
        let has = |name: &str| self.directory.join(name).is_file();
        let is_damaged = || {
            has(lock::LOCK_FILE)
                && self.files().all(|path| is_session_file(&path))
                && (has(log::LOG_FILE) || !store::manifests(&self.directory).is_empty())
        };
        log::has_readable_log(&self.directory) || is_damaged()
    }

    /// Creates the session's directory, accessible only to its owner.
    ///
    /// # Errors
    /// Returns the reason as a sentence if the directory cannot be created, or has files that belong to no session.
    pub(crate) fn make_directory(&self) -> Result<(), String> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory);
        made.map_err(|error| {
            format!(
                "The directory of the session {:?} cannot be created: {}: {error}.",
                self.name,
                self.directory.display()
            )
        })?;
        // A directory without a log may belong to a new session, whose server was killed or has not written the log yet.
        let is_begun = |path: &PathBuf| is_session_file(path) && path.file_name() != Some(log::LOG_FILE.as_ref());
        if self.exists() || self.files().all(|path| is_begun(&path)) {
            return Ok(());
        }
        let other = if self.name.contains('/') { "choose another directory" } else { "choose another session name" };
        Err(format!("The directory {} is not empty and holds no session: {other}.", self.directory.display()))
    }

    /// Returns the paths of the files in the directory.
    fn files(&self) -> impl Iterator<Item = PathBuf> {
        fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.path())
    }

    /// Returns the path of the worker's status page.
    pub(crate) fn status_file(&self) -> PathBuf {
        self.directory.join(STATUS_FILE)
    }

    /// Returns the path of the [`ERRORS_FILE`] file.
    pub(crate) fn errors_file(&self) -> PathBuf {
        self.directory.join(ERRORS_FILE)
    }

    /// Reads the [`ERRORS_FILE`] file. Returns `None` if the file does not exist or cannot be read.
    pub(crate) fn read_errors(&self) -> Option<String> {
        let bytes = files::read(&self.errors_file(), MAX_ERRORS_BYTES).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns a sentence that says why the session was not saved at the end of its last server, and deletes the
    /// [`ERRORS_FILE`] and [`SAVE_MARKER_FILE`] files. Returns `None` if no save has failed.
    pub(crate) fn take_save_failure(&self) -> Option<String> {
        let text = self.read_errors().unwrap_or_default();
        let _ = fs::remove_file(self.errors_file());
        let is_incomplete = fs::remove_file(self.directory.join(SAVE_MARKER_FILE)).is_ok();
        let reason = text
            .lines()
            .rev()
            .find_map(|line| line.strip_prefix(NOT_SAVED))
            .map(|reason| shortened_to(reason, MAX_REASON_CHARS));
        let unknown =
            || "the save did not complete; the disk may be full, or the saving process was killed.".to_owned();
        let reason = reason.or_else(|| is_incomplete.then(unknown))?;
        Some(format!("The session was not saved when its last server ended: {reason}"))
    }

    /// Reads the session's recovery state. A caller that only displays the state need not lock the session.
    ///
    /// # Errors
    /// Returns the reason as a sentence if a newer program wrote the log, or if the log cannot be read.
    pub(crate) fn load(&self) -> Result<LoadedLog, String> {
        self.load_state().map_err(|reason| format!("The session {:?} cannot be opened: {reason}.", self.name))
    }

    /// Reads the session's recovery state like [`load`](Self::load). The error is worded as a clause.
    fn load_state(&self) -> Result<LoadedLog, String> {
        let mut loaded = log::load(&self.directory)?;
        if !loaded.has_snapshot
            && let Some(newest) = store::manifests(&self.directory).last()
            && !loaded.state.saved_files().contains(&newest.file)
        {
            // The log does not mention the newest checkpoint, so it was compacted after that save, and the snapshot that
            // mentioned the save is lost.
            let forms = self.directory.join(&newest.file).with_extension("forms");
            let mut state = log::load_checkpoint_forms(&forms).unwrap_or_default();
            state.record_final_save(newest);
            loaded = log::load_with_initial_state(&self.directory, state)?;
        }
        // The log has no event for a save at the end of the server. Such a save contains all definitions of the log.
        let last = store::manifests(&self.directory).into_iter().rfind(|checkpoint| checkpoint.at_end);
        if let Some(last) = last {
            loaded.state.record_final_save(&last);
        }
        Ok(loaded)
    }

    /// Returns the session's name, quoted for a shell.
    pub(crate) fn shell_name(&self) -> String {
        // Quoting fails only for a name with a NUL, which no file name contains.
        shlex::try_quote(&self.name).map_or_else(|_| self.name.clone(), std::borrow::Cow::into_owned)
    }

    /// Returns the session's last checkpoint, which another build of this program may have saved.
    fn last_checkpoint(&self, loaded: &LoadedLog) -> Option<Checkpoint> {
        let all = store::manifests(&self.directory);
        let files = loaded.state.saved_files();
        files.iter().rev().find_map(|file| all.iter().find(|checkpoint| checkpoint.file == *file).cloned())
    }

    /// Returns the session's entry for the list of sessions.
    pub(crate) fn describe(&self) -> SessionDescription {
        let (loaded, obstacle) = match self.load_state() {
            Ok(loaded) => (loaded, None),
            Err(reason) => (LoadedLog::default(), Some(reason)),
        };
        let checkpoint = self.last_checkpoint(&loaded);
        let files = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let metadata: Vec<_> = files.filter_map(|file| file.metadata().ok()).collect();
        SessionDescription {
            name: self.name.clone(),
            bytes: metadata.iter().map(fs::Metadata::len).sum(),
            changed: metadata.iter().filter_map(|file| file.modified().ok()).max().and_then(|at| at.try_into().ok()),
            forms: loaded.state.definitions().count(),
            evaluations: loaded.state.evaluations,
            checkpoint,
            obstacle,
            holder: lock::holder(&self.directory),
        }
    }

    /// Deletes the session's files, and the directory if no other files are in it. The lock's file is deleted last, since a
    /// server that starts meanwhile must not use the session before the other files are gone.
    ///
    /// # Errors
    /// Returns the reason as a sentence if there is no such session, if a process serves or saves the session, if the
    /// session cannot be locked for another reason, or if its log or its directory cannot be removed.
    pub(crate) fn delete(&self) -> Result<(), String> {
        let _lock = self.lock_for("deleted")?;
        let lock_file = self.directory.join(lock::LOCK_FILE);
        let ours = self.files().filter(|path| is_session_file(path) && *path != lock_file);
        let mut removed = match fs::remove_file(self.directory.join(log::LOG_FILE)) {
            // A damaged session may have lost its log.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
        ours.chain([lock_file.clone()]).for_each(|path| drop(fs::remove_file(path)));
        if self.files().next().is_none() {
            removed = removed.and_then(|()| fs::remove_dir(&self.directory));
        }
        removed.map_err(|error| format!("The session {:?} cannot be deleted: {error}.", self.name))
    }

    /// Returns the session's definitions as the text of a file that SBCL can load.
    ///
    /// # Errors
    /// Returns the reason as a sentence if there is no such session, if a newer program wrote its log, or if its log cannot
    /// be read.
    pub(crate) fn export(&self) -> Result<String, String> {
        if !self.exists() {
            return Err(self.no_such_session_message());
        }
        Ok(export::export(&self.name, &self.load()?.state))
    }

    /// Returns the message that the session does not exist, with the names of the existing sessions.
    fn no_such_session_message(&self) -> String {
        let sessions = Self::all().map_or_else(|_| Vec::new(), |(_, sessions)| sessions);
        let names: Vec<_> = sessions.into_iter().map(|session| session.name).collect();
        let there_are = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        format!("There is no session {:?}. Existing sessions: {there_are}.", self.name)
    }

    /// Locks the session. `what` is the participle in the error messages, such as `deleted`.
    fn lock_for(&self, what: &str) -> Result<Lock, String> {
        if !self.exists() {
            return Err(self.no_such_session_message());
        }
        Lock::try_acquire(&self.directory)
            .map_err(|error| format!("The session {:?} cannot be {what}: {error}.", self.name))?
            .map_err(|holder| format!("The session {:?} cannot be {what} while it is {holder}.", self.name))
    }
}

/// Returns true if `path` has the name of a file that a session's directory may contain, or of a draft of such a file.
fn is_session_file(path: &Path) -> bool {
    let is_named = |ours: &str| {
        let name = path.file_name();
        name == Some(ours.as_ref()) || name.map(Path::new) == Some(&Path::new(ours).with_extension("draft"))
    };
    store::is_checkpoint_file(path)
        || [
            log::LOG_FILE,
            log::DAMAGED_LOG_FILE,
            log::INCOMPLETE_MARKER_FILE,
            lock::LOCK_FILE,
            STATUS_FILE,
            ERRORS_FILE,
            SAVE_MARKER_FILE,
        ]
        .iter()
        .any(|ours| is_named(ours))
}

/// A session as `sbcl-mcp sessions` lists it.
#[derive(Debug)]
pub(crate) struct SessionDescription {
    pub(crate) name: String,
    /// The total size of the session's files, in bytes.
    pub(crate) bytes: u64,
    /// The time of the last change to one of the files.
    pub(crate) changed: Option<jiff::Timestamp>,
    /// The number of forms that defined something.
    pub(crate) forms: usize,
    /// The highest evaluation number in the log or in a checkpoint.
    pub(crate) evaluations: u64,
    /// The last checkpoint.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// The reason, worded as a clause, why the session cannot be opened. The definitions are then unknown.
    pub(crate) obstacle: Option<String>,
    /// The process that serves or saves the session.
    pub(crate) holder: Option<lock::Holder>,
}

/// Returns this user's directory for sessions. If there is none, returns an error message that ends with `advice`.
fn sessions_directory(advice: &str) -> Result<PathBuf, String> {
    let state = store::state_directory();
    state.map(|state| state.join("sessions")).ok_or_else(|| {
        format!(
            "There is no directory for sessions: XDG_STATE_HOME is not set to an absolute path, and there is no home \
             directory. {advice}"
        )
    })
}
