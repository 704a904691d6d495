//! Checkpoints as files: a core that an image of this program saved, and a manifest that describes the core.
//!
//! The manifest is written last, so a core that a crash left incomplete is not a checkpoint. A core may contain anything
//! that was in memory, so only the owner may read the directory. When the server ends, only a persistent session keeps
//! its directory. If the server and its worker are killed together, the next server removes the directory.

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};
use serde::{Deserialize, Serialize};

use crate::build_id;
use crate::error::format_size;
use crate::image::fingerprint::Fingerprint;
use crate::os::processes::wait_for_child;
use crate::os::{files, helper_threads};
use crate::recovery::persistent::SAVE_MARKER_FILE;
use crate::recovery::persistent::lock::{HolderState, LOCK_FILE, Lock};
use crate::recovery::text;

/// The number of automatic checkpoints that a persistent session keeps when its server ends: the last checkpoint, and
/// its predecessor in case the last checkpoint does not boot.
pub(crate) const KEPT_AUTOMATIC_CHECKPOINTS: usize = 2;

/// The time limit for a child process to save an image.
const SAVE_TIMEOUT: Duration = Duration::from_secs(300);
/// The time limit for a throw-away process to boot a saved image.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of checkpoints. Automatic checkpoints do not count.
const MAX_CHECKPOINTS: usize = 100;
/// Maximum size of a manifest, in bytes.
const MAX_MANIFEST_BYTES: u64 = 32 << 10;
/// Maximum number of manifests that are read of one directory. Code in the image can create any number of files there, which
/// the supervisor reads while clients wait.
const MAX_MANIFESTS: usize = 2_000;
/// Maximum number of incomplete files that are deleted at a time. Clients wait while the supervisor deletes files.
const MAX_DELETED_FILES: usize = 1_000;
/// The beginning of the name of a server's checkpoint directory. A hexadecimal number follows.
const DIRECTORY_PREFIX: &str = "checkpoints-";
/// Maximum length of a checkpoint's or session's name, in characters.
pub(crate) const MAX_NAME_CHARS: usize = 100;
/// Maximum number of threads that a manifest names, and maximum length of a thread's description, in characters.
const MAX_NAMED_THREADS: usize = 20;
const MAX_THREAD_CHARS: usize = 100;

/// The manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    /// The name that the client uses, or `auto-` and a number.
    pub(crate) name: String,
    /// The name of the core's file.
    pub(crate) file: String,
    /// The size of the core, in bytes.
    pub(crate) bytes: u64,
    /// The fingerprint of the core as it was saved. Manifests that other programs wrote may have none.
    #[serde(default, rename = "seal")]
    pub(crate) fingerprint: Option<Fingerprint>,
    /// The fingerprint of a core that was read and differs from the saved core. While this fingerprint applies, the
    /// core is not read again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) damaged: Option<Fingerprint>,
    /// The number of the last evaluation before the save.
    pub(crate) evaluation: u64,
    pub(crate) saved: jiff::Timestamp,
    /// The heap size of the saved image, in bytes. The core boots only with this size.
    pub(crate) heap: u64,
    /// The build of the program that saved the core. Only this build can boot the core.
    pub(crate) build: String,
    /// True for an automatic checkpoint.
    pub(crate) automatic: bool,
    /// True when the server of a persistent session saved the checkpoint as the server ended, after all evaluations.
    #[serde(default)]
    pub(crate) at_end: bool,
    /// A description of the session's definitions.
    #[serde(default)]
    pub(crate) defines: String,
    /// Descriptions of the threads that existed at the save and that the core does not contain. Empty if the threads are not
    /// known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) threads: Vec<String>,
    /// The number of timers that existed at the save and that the core does not contain; 0 if the timers are not known.
    #[serde(default)]
    pub(crate) timers: u64,
}

impl Checkpoint {
    /// Describes the program that saved the checkpoint; `None` when it was this program.
    pub(crate) fn other_program(&self) -> Option<String> {
        (self.build != build_id()).then(|| match self.build.split(' ').collect::<Vec<_>>()[..] {
            [version, sbcl, ..] => format!("another build of sbcl-mcp ({version}, with SBCL {sbcl})"),
            _ => "another program".to_owned(),
        })
    }

    /// Returns the reason, as the rest of a sentence, why this server cannot boot the checkpoint, which is
    /// [foreign](Checkpoints::foreign).
    pub(crate) fn foreign_reason(&self) -> String {
        match self.other_program() {
            Some(program) => format!("saved by {program}, and cannot be restored by this build"),
            None => {
                format!("saved with another heap size, and can only be restored with --heap {}", format_size(self.heap))
            }
        }
    }
}

/// Returns the directory for persistent files. The directory is below the directory that XDG_STATE_HOME names or, if
/// XDG_STATE_HOME is not an absolute path, below `~/.local/state`, and need not exist. Returns `None` if there is no home
/// directory either.
pub(crate) fn state_directory() -> Option<PathBuf> {
    let state = std::env::var_os(crate::environment::STATE_HOME)
        .filter(|path| Path::new(path).is_absolute())
        .map(PathBuf::from);
    let state = state.or_else(|| Some(std::env::home_dir().filter(|home| home.is_dir())?.join(".local/state")))?;
    Some(state.join("sbcl-mcp"))
}

/// The directory with the checkpoints of one server.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoints {
    directory: PathBuf,
    /// The heap size that images are booted with, in bytes.
    heap: u64,
    /// The size of the control stack that images are booted with, in bytes.
    control_stack: u64,
    /// The lock of the directory, once this process has locked it.
    lock: Arc<OnceLock<Lock>>,
}

impl Checkpoints {
    /// Returns the checkpoints in `directory`, for images with this `heap` and `control_stack`.
    pub(crate) fn new(directory: PathBuf, heap: u64, control_stack: u64) -> Self {
        Self { directory, heap, control_stack, lock: Arc::default() }
    }

    /// Chooses a directory that no other server uses, in the directory for persistent files or, if there is none, in
    /// `scratch`. The first checkpoint creates the directory.
    pub(crate) fn choose_directory(scratch: &Path) -> PathBuf {
        match state_directory() {
            // The hash is random: the standard library seeds `RandomState` from the system's randomness.
            Some(state) => {
                state.join(format!("{DIRECTORY_PREFIX}{:016x}", RandomState::new().hash_one(std::process::id())))
            }
            None => scratch.join("checkpoints"),
        }
    }

    /// Returns the path of a checkpoint's core.
    pub(crate) fn path(&self, checkpoint: &Checkpoint) -> PathBuf {
        self.directory.join(&checkpoint.file)
    }

    /// Returns the checkpoints that can be booted, oldest first. May [read](Self::is_bootable) all cores.
    pub(crate) fn list(&self) -> Vec<Checkpoint> {
        self.intact_and_damaged().0
    }

    /// Returns the checkpoints that can be booted, and the checkpoints whose core is damaged or missing, each oldest first.
    /// May [read](Self::is_bootable) all cores.
    pub(crate) fn intact_and_damaged(&self) -> (Vec<Checkpoint>, Vec<Checkpoint>) {
        self.list_unchecked().partition(|checkpoint| self.is_bootable(checkpoint))
    }

    /// Returns the checkpoints of this program and heap size, oldest first, without a look at their cores.
    fn list_unchecked(&self) -> impl Iterator<Item = Checkpoint> {
        manifests(&self.directory).into_iter().filter(|checkpoint| self.is_own(checkpoint))
    }

    /// Returns the checkpoints that another program saved, or this program with another heap size, oldest first. This server
    /// cannot boot these checkpoints.
    pub(crate) fn foreign(&self) -> Vec<Checkpoint> {
        manifests(&self.directory).into_iter().filter(|checkpoint| !self.is_own(checkpoint)).collect()
    }

    /// Returns true if this program saved the checkpoint with this server's heap size.
    fn is_own(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.build == build_id() && checkpoint.heap == self.heap
    }

    /// Returns the checkpoint whose core has this file name, if the core has not changed since it was saved. Reads no
    /// core.
    pub(crate) fn find_by_file(&self, file: &str) -> Option<Checkpoint> {
        let found = read_manifest(&self.directory.join(file).with_extension("json"))?;
        let is_unchanged = |checkpoint: &Checkpoint| {
            fs::metadata(self.path(checkpoint)).is_ok_and(|core| {
                let known = checkpoint.fingerprint.as_ref();
                core.len() == checkpoint.bytes && known.is_some_and(|known| known.is_unchanged(&core))
            })
        };
        Some(found).filter(|checkpoint| checkpoint.file == file && self.is_own(checkpoint) && is_unchanged(checkpoint))
    }

    /// Returns true if this program saved the checkpoint with this server's heap size and the core is intact. Reads a core
    /// that has changed since it was last checked, which takes seconds for a large core.
    pub(crate) fn is_bootable(&self, checkpoint: &Checkpoint) -> bool {
        self.is_own(checkpoint)
            && fs::metadata(self.path(checkpoint)).is_ok_and(|core| {
                let is_of_core =
                    |known: &Option<Fingerprint>| known.as_ref().is_some_and(|known| known.is_unchanged(&core));
                core.len() == checkpoint.bytes
                    && !is_of_core(&checkpoint.damaged)
                    && (is_of_core(&checkpoint.fingerprint) || self.verify_core(checkpoint))
            })
    }

    /// Reads the core, and returns true if it is intact according to the checksum in its fingerprint; the core may be a copy.
    /// Writes the result into the manifest, so that the core is read only once.
    pub(crate) fn verify_core(&self, checkpoint: &Checkpoint) -> bool {
        let path = self.path(checkpoint);
        let (Some(fingerprint), Ok(mut core)) = (&checkpoint.fingerprint, files::open(&path)) else { return false };
        // The metadata is read first: a core that is written meanwhile has another modification time afterwards.
        let Ok(metadata) = core.metadata() else { return false };
        let Ok(is_intact) = fingerprint.matches(&mut core, checkpoint.bytes) else { return false };
        let own = Some(fingerprint.for_copy(&metadata));
        let checked = if is_intact {
            Checkpoint { fingerprint: own, damaged: None, ..checkpoint.clone() }
        } else {
            Checkpoint { damaged: own, ..checkpoint.clone() }
        };
        // If the manifest cannot be written, the next check reads the core again.
        let _ = write_manifest(&path, &checked);
        if !path.exists() {
            // The checkpoint was deleted meanwhile.
            let _ = fs::remove_file(path.with_extension("json"));
            return false;
        }
        is_intact
    }

    /// Returns the checkpoint's heap size if this program saved the checkpoint and this server's images have another heap
    /// size; `None` otherwise.
    pub(crate) fn differing_heap_size(&self, checkpoint: &Checkpoint) -> Option<u64> {
        Some(checkpoint.heap).filter(|heap| checkpoint.build == build_id() && *heap != self.heap)
    }

    /// Returns the path of the file with the definitions and unrestored forms of the checkpoint that has this core
    /// file.
    pub(crate) fn forms_path(&self, file: &str) -> PathBuf {
        self.directory.join(file).with_extension("forms")
    }

    /// Deletes the `.forms` file of an incomplete save to the core `file`. Keeps the `.forms` file of a checkpoint.
    pub(crate) fn remove_incomplete_forms(&self, file: &str) {
        let forms = self.forms_path(file);
        if !forms.with_extension("json").exists() {
            let _ = fs::remove_file(forms);
        }
    }

    /// Creates the directory if it does not exist, and returns its path.
    pub(crate) fn make_directory(&self) -> io::Result<PathBuf> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        Ok(self.directory.clone())
    }

    /// Locks the directory until this process ends, so that no other server [removes](remove_abandoned_directories) it.
    pub(crate) fn lock(&self) {
        // Without the lock, the directory stays if all processes of this server are killed.
        if self.lock.get().is_none()
            && let Ok(Ok(mut lock)) = Lock::try_acquire(&self.directory)
        {
            lock.set_state(HolderState::Serving);
            let _ = self.lock.set(lock);
        }
    }

    /// Chooses a file for a new checkpoint.
    ///
    /// # Errors
    /// Returns the reason as a sentence if the directory cannot be created, or if there are too many named checkpoints.
    pub(crate) fn new_draft(&self, automatic: bool) -> Result<Draft, String> {
        if !automatic && self.list_unchecked().filter(|checkpoint| !checkpoint.automatic).count() >= MAX_CHECKPOINTS {
            return Err(format!(
                "Checkpoint limit reached: {MAX_CHECKPOINTS}. Delete a named checkpoint first; automatic checkpoints do not \
                 count."
            ));
        }
        self.make_directory().map_err(|error| {
            format!("The checkpoint directory {} cannot be created: {error}.", self.directory.display())
        })?;
        let number = RandomState::new().hash_one(Instant::now());
        Ok(Draft { checkpoints: self.clone(), file: format!("{number:016x}.core"), finished: false })
    }

    /// Deletes a checkpoint.
    ///
    /// # Errors
    /// Returns an error if the manifest cannot be removed, or if the core exists and cannot be removed.
    pub(crate) fn delete(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        self.delete_with(checkpoint, fs::remove_file)
    }

    /// Deletes a checkpoint. `remove` removes the core.
    fn delete_with(&self, checkpoint: &Checkpoint, remove: impl FnOnce(PathBuf) -> io::Result<()>) -> io::Result<()> {
        let core = self.path(checkpoint);
        let manifest = core.with_extension("json");
        // The manifest is removed first: a core without a manifest is not a checkpoint, even if the other files stay.
        fs::remove_file(&manifest)?;
        let _ = fs::remove_file(self.forms_path(&checkpoint.file));
        let removed = remove(core);
        // A thread or process that was reading the core may have written the manifest again.
        let _ = fs::remove_file(manifest);
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Deletes all checkpoints with this name but the newest. Reads no core, and does not wait for the disk.
    pub(crate) fn delete_replaced(&self, name: &str) {
        let mut all: Vec<_> = self.list_unchecked().filter(|checkpoint| checkpoint.name == name).collect();
        all.sort_by_key(|checkpoint| checkpoint.saved);
        all.pop();
        for checkpoint in all {
            let _ = self.delete_with(&checkpoint, remove_in_background);
        }
    }

    /// Deletes incomplete files of killed processes, and automatic checkpoints whose core files are not in `known`.
    pub(crate) fn remove_leftovers(&self, known: &[String]) {
        let all = manifests(&self.directory);
        for checkpoint in all.iter().filter(|checkpoint| checkpoint.automatic && !known.contains(&checkpoint.file)) {
            let _ = self.delete(checkpoint);
        }
        self.remove_incomplete();
    }

    /// Deletes at most [`MAX_DELETED_FILES`] incomplete files that killed processes left behind; the next call deletes
    /// more. Must not be called while a process is saving. Does not wait for the disk.
    pub(crate) fn remove_incomplete(&self) {
        let is_left = |path: &PathBuf| match path.extension().and_then(|extension| extension.to_str()) {
            Some("core" | "forms") => !path.with_extension("json").exists(),
            Some("draft") => true,
            _ => false,
        };
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let left = entries.map(|entry| entry.path()).filter(|path| is_checkpoint_file(path)).filter(is_left);
        for path in left.take(MAX_DELETED_FILES) {
            // A `.forms` file is small, and its draft would have the name of the core's draft.
            let is_small = path.extension() == Some("forms".as_ref());
            let _ = if is_small { fs::remove_file(path) } else { remove_in_background(path) };
        }
    }

    /// Returns the time of a save that begins now. Checkpoints are ordered by their times, so the time is later than the
    /// times of all checkpoints, even if the system's clock has been set back.
    pub(crate) fn next_save_time(&self) -> jiff::Timestamp {
        let now = jiff::Timestamp::now();
        let newest = manifests(&self.directory).last().map(|checkpoint| checkpoint.saved);
        let after = newest.and_then(|newest| newest.checked_add(jiff::SignedDuration::from_nanos(1)).ok());
        after.map_or(now, |after| now.max(after))
    }

    /// Returns a new name for an automatic checkpoint.
    pub(crate) fn automatic_name(&self) -> String {
        let numbers = manifests(&self.directory).into_iter();
        let last = numbers.filter_map(|one| automatic_number(&one.name)).max();
        format!("auto-{}", last.unwrap_or(0).saturating_add(1))
    }

    /// Deletes the automatic checkpoints that are newer than `from`, the checkpoint from which the session continues. If
    /// `from` is `None`, deletes all automatic checkpoints. Reads no core, and does not wait for the disk.
    pub(crate) fn delete_newer(&self, from: Option<&Checkpoint>) {
        let later = |checkpoint: &Checkpoint| from.is_none_or(|from| checkpoint.saved > from.saved);
        for checkpoint in self.list_unchecked().filter(|checkpoint| checkpoint.automatic && later(checkpoint)) {
            let _ = self.delete_with(&checkpoint, remove_in_background);
        }
    }

    /// Deletes the oldest automatic checkpoints until all checkpoints together take at most `space` bytes. The newest
    /// automatic checkpoint stays. Only bootable checkpoints count.
    pub(crate) fn make_room(&self, space: u64) {
        let all = self.list();
        let mut taken: u64 = all.iter().map(|checkpoint| checkpoint.bytes).sum();
        let newest = all.iter().rposition(|checkpoint| checkpoint.automatic);
        for (index, checkpoint) in all.iter().enumerate() {
            if taken > space && checkpoint.automatic && Some(index) != newest && self.delete(checkpoint).is_ok() {
                taken -= checkpoint.bytes;
            }
        }
    }

    /// Returns the number of free bytes on the directory's disk, if known.
    pub(crate) fn free_space(&self) -> Option<u64> {
        let existing = self.directory.ancestors().find(|directory| directory.exists())?;
        let disk = rustix::fs::statvfs(existing).ok()?;
        Some(disk.f_bavail.saturating_mul(disk.f_frsize))
    }

    /// Deletes all checkpoints and the directory.
    pub(crate) fn remove_all(&self) {
        remove_directory(&self.directory);
    }

    /// Boots the core in a throw-away process, which collects garbage, and compares the checkpoint name that the image
    /// records with `name`. Returns the image's description of its definitions.
    ///
    /// # Errors
    /// Returns the reason, worded as a clause, if the process cannot be started, if its output cannot be read, or if the
    /// image does not boot in time or has another name.
    pub(crate) fn probe(&self, core: &Path, name: &str) -> Result<String, String> {
        let mut command = Command::new(this_program().map_err(|error| error.to_string())?);
        command.arg0("sbcl-mcp").arg("probe").args([
            OsString::from(format!("--heap={}", self.heap)),
            OsString::from(format!("--control-stack={}", self.control_stack)),
            "--image".into(),
            core.into(),
        ]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
        let mut child =
            child.map_err(|error| format!("the process that tests the saved image cannot be started: {error}"))?;
        let ended = wait_for_child(Pid::from_child(&child), PROBE_TIMEOUT);
        if !ended {
            let _ = child.kill();
        }
        let output = child
            .wait_with_output()
            .map_err(|error| format!("the output of the process that tests the saved image cannot be read: {error}"))?;
        let tried: Option<ProbeReport> = serde_json::from_slice(&output.stdout).ok();
        match tried.filter(|tried| ended && output.status.success() && tried.name == name) {
            Some(tried) => Ok(tried.defines),
            None if !ended => Err(format!("the saved image did not boot within {} seconds", PROBE_TIMEOUT.as_secs())),
            None => Err("the saved image does not boot; the server's stderr may say why".to_owned()),
        }
    }

    /// Returns the draft for a core file that another process is saving.
    pub(crate) fn draft(&self, file: String) -> Draft {
        Draft { checkpoints: self.clone(), file, finished: false }
    }

    /// Deletes all bootable automatic checkpoints except the last `count`.
    pub(crate) fn prune_automatic(&self, count: usize) {
        let automatic: Vec<_> = self.list().into_iter().filter(|checkpoint| checkpoint.automatic).collect();
        for checkpoint in automatic.iter().rev().skip(count) {
            let _ = self.delete(checkpoint);
        }
    }
}

/// The report of an image that [`probe`](Checkpoints::probe) boots.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ProbeReport {
    /// The checkpoint's name, as recorded in the booted image.
    pub(crate) name: String,
    /// A description of the session's definitions.
    pub(crate) defines: String,
}

/// Turns a core into a draft, and lets a helper thread delete the draft, which takes half a second for a core of a
/// gigabyte. If this process is killed before that, the draft is [removed](Checkpoints::remove_incomplete) like other
/// drafts. A file that is a draft already keeps its name until it is deleted.
fn remove_in_background(path: PathBuf) -> io::Result<()> {
    let draft = path.with_extension("draft");
    fs::rename(path, &draft)?;
    helper_threads::run(move || drop(fs::remove_file(draft)));
    Ok(())
}

/// Returns the manifests in a directory, including manifests of other programs, oldest first.
pub(crate) fn manifests(directory: &Path) -> Vec<Checkpoint> {
    let mut found: Vec<Checkpoint> = manifest_paths(directory)
        .filter_map(|path| read_manifest(&path))
        // A manifest that names a file in another directory is ignored.
        .filter(|checkpoint| is_core_name(&checkpoint.file))
        .collect();
    found.sort_by_key(|checkpoint| checkpoint.saved);
    found
}

/// Returns the paths of a directory's manifests that cannot be read.
pub(crate) fn unreadable_manifests(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = manifest_paths(directory).filter(|path| read_manifest(path).is_none()).collect();
    paths.sort();
    paths
}

/// Returns the paths in a directory that are named like a manifest, at most [`MAX_MANIFESTS`].
fn manifest_paths(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let paths = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.extension() == Some("json".as_ref()) && is_checkpoint_file(path)).take(MAX_MANIFESTS)
}

/// Reads a manifest. Returns `None` if the file is not a regular file, is too large, or contains something else.
fn read_manifest(path: &Path) -> Option<Checkpoint> {
    serde_json::from_slice(&files::read(path, MAX_MANIFEST_BYTES).ok()?).ok()
}

/// Returns true for a file named like a file of a checkpoint. A directory that the user chose may contain other files.
pub(crate) fn is_checkpoint_file(path: &Path) -> bool {
    let Some((stem, extensions)) = path.file_name().and_then(|name| name.to_str()?.split_once('.')) else {
        return false;
    };
    let is_manifest_draft = || {
        let number = extensions.strip_prefix("json.").and_then(|rest| rest.strip_suffix(".draft"));
        number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-'))
    };
    // A core that is being deleted has the extension `draft`. Builds before version 0.1 wrote other files with it.
    is_number(stem)
        && (["core", "json", "forms", "json.draft", "forms.draft", "draft"].contains(&extensions)
            || is_manifest_draft())
}

/// Returns the number in a name that [`Checkpoints::automatic_name`] may return; `None` for any other name.
pub(crate) fn automatic_number(name: &str) -> Option<u64> {
    name.strip_prefix("auto-")?.parse().ok()
}

/// Returns true for a name of a core's file. Such a name has no directory.
pub(crate) fn is_core_name(name: &str) -> bool {
    name.strip_suffix(".core").is_some_and(is_number)
}

/// Returns true for the hexadecimal number with which the names of a checkpoint's files begin.
fn is_number(stem: &str) -> bool {
    stem.len() == 16 && stem.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Deletes each checkpoint directory in `state`, the directory for persistent files, that was locked by a server which
/// no longer exists. Such a server was killed together with its worker.
pub(crate) fn remove_abandoned_directories(state: &Path) {
    let entries = fs::read_dir(state).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| {
        let number = entry.file_name().to_str().and_then(|name| Some(is_number(name.strip_prefix(DIRECTORY_PREFIX)?)));
        number == Some(true) && entry.file_type().is_ok_and(|kind| kind.is_dir())
    });
    for directory in directories.map(|entry| entry.path()) {
        let Some(_lock) = Lock::take_abandoned(&directory) else { continue };
        remove_directory(&directory);
    }
}

/// Deletes a directory of checkpoints if it exists. At the end of the server, no client is left to receive an error.
pub(crate) fn remove_directory(directory: &Path) {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    // The lock's file is deleted last. If this process ends before that, the next server still finds the directory.
    for file in files.filter(|file| file.file_name() != LOCK_FILE) {
        let _ = fs::remove_file(file.path());
    }
    let _ = fs::remove_dir_all(directory);
}

/// A core that is being saved. Dropping an unfinished draft removes the core. The supervisor removes the `.forms` file that
/// it has written, or may be about to write, once it learns that the save has failed.
#[derive(Debug)]
pub(crate) struct Draft {
    /// The checkpoints that the draft will belong to.
    checkpoints: Checkpoints,
    /// The name of the core's file.
    file: String,
    /// True when dropping the draft must not remove the core.
    finished: bool,
}

impl Draft {
    /// Returns the path of the core.
    pub(crate) fn path(&self) -> PathBuf {
        self.checkpoints.directory.join(&self.file)
    }

    /// Returns the name of the core's file.
    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    /// Returns the checkpoints that the draft will belong to.
    pub(crate) fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// Drops the draft without removing the core, which the [finisher](Self::leak_finisher_command) still needs.
    pub(crate) fn release(mut self) {
        self.finished = true;
    }

    /// Returns the address of the finisher's command line: a null-terminated C array of strings, which is leaked since a
    /// forked process executes it later. The finisher is a process that outlives this process: it waits until its own only
    /// child has saved the core, and then turns the draft into a checkpoint. File descriptor 3 of the finisher is the
    /// session's lock.
    pub(crate) fn leak_finisher_command(&self, name: &str, evaluation: u64) -> u64 {
        let Checkpoints { directory, heap, control_stack, .. } = &self.checkpoints;
        let arguments: Vec<OsString> = vec![
            "/proc/self/exe".into(),
            "finish-saving".into(),
            "--directory".into(),
            directory.into(),
            format!("--file={}", self.file).into(),
            format!("--name={name}").into(),
            format!("--evaluation={evaluation}").into(),
            format!("--heap={heap}").into(),
            format!("--control-stack={control_stack}").into(),
        ];
        // Paths and names contain no NUL.
        let arguments: Vec<CString> =
            arguments.into_iter().filter_map(|argument| CString::new(argument.into_vec()).ok()).collect();
        let pointers = arguments.leak().iter().map(|argument| argument.as_ptr()).chain([std::ptr::null()]);
        pointers.collect::<Vec<_>>().leak().as_ptr().expose_provenance() as u64
    }

    /// Waits until process `child` has saved the core, boots the core as a test, and turns the draft into a checkpoint
    /// unless `is_cancelled` then returns true.
    ///
    /// # Errors
    /// Returns the reason, worded as a clause, if the process failed or did not end in time, if the core does not boot, if a
    /// file cannot be read or written, or if the save was cancelled.
    pub(crate) fn finish(
        self,
        child: Pid,
        made: SaveDetails,
        is_cancelled: impl FnOnce() -> bool,
    ) -> Result<Checkpoint, String> {
        let has_ended = wait_for_child(child, SAVE_TIMEOUT);
        if !has_ended {
            let _ = kill_process(child, Signal::KILL);
        }
        match waitpid(Some(child), WaitOptions::empty()) {
            Ok(_) if !has_ended => Err(save_timeout_message()),
            Ok(ended) => self.complete(ended.map(|(_, status)| status), made, is_cancelled),
            Err(error) => Err(format!("waiting for the saving process failed: {error}")),
        }
    }

    /// [Finishes](Self::finish) the draft when the only child of this process has saved the core.
    ///
    /// # Errors
    /// Returns the reason, worded as a clause, in the same cases as [`finish`](Self::finish).
    pub(crate) fn finish_only_child(self, made: SaveDetails) -> Result<Checkpoint, String> {
        let (sender, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(rustix::process::wait(WaitOptions::empty())));
        match ended.recv_timeout(SAVE_TIMEOUT) {
            Ok(Ok(ended)) => self.complete(ended.map(|(_, status)| status), made, || false),
            Ok(Err(error)) => Err(format!("waiting for the saving process failed: {error}")),
            // The kernel kills the child process when this process ends.
            Err(_) => Err(save_timeout_message()),
        }
    }

    /// Boots the core as a test, and turns the draft into a checkpoint unless `is_cancelled` then returns true. `ended` is
    /// the wait status of the process that saved the core; `None` if there was no such process. Returns the reason, worded
    /// as a clause, if the process failed, if the core does not boot, if a file cannot be read or written, or if the save was
    /// cancelled.
    fn complete(
        mut self,
        ended: Option<WaitStatus>,
        made: SaveDetails,
        is_cancelled: impl FnOnce() -> bool,
    ) -> Result<Checkpoint, String> {
        let status = ended.ok_or("the saving process no longer exists")?;
        if status.exit_status() != Some(0) {
            let how = match (status.exit_status(), status.terminating_signal()) {
                // The saving process sets an alarm for the same time as the time limit here.
                (_, Some(libc::SIGALRM)) => return Err(save_timeout_message()),
                (_, Some(signal)) => format!("was killed by {}", text::describe_signal(signal)),
                (status, _) => format!("exited with status {}; the server's stderr may say why", status.unwrap_or(-1)),
            };
            return Err(format!("the saving process {how}"));
        }
        let path = self.path();
        let defines = self.checkpoints.probe(&path, &made.name)?;
        let (bytes, fingerprint) = sync_core(&path)?;
        let SaveDetails { name, evaluation, saved, automatic, at_end, threads, timers } = made;
        let checkpoint = Checkpoint {
            name,
            file: self.file.clone(),
            bytes,
            fingerprint: Some(fingerprint),
            damaged: None,
            evaluation,
            saved,
            heap: self.checkpoints.heap,
            build: build_id(),
            automatic,
            at_end,
            defines,
            threads: shortened_threads(&threads),
            timers,
        };
        if is_cancelled() {
            return Err("the call was cancelled".to_owned());
        }
        let write = if at_end { write_final_manifest } else { write_manifest };
        write(&path, &checkpoint)
            .map_err(|error| format!("the description of the checkpoint cannot be written: {error}"))?;
        self.finished = true;
        Ok(checkpoint)
    }
}

/// Waits until the core at `path` is on the disk. Returns its size in bytes and its fingerprint, or the reason, worded
/// as a clause, why the core cannot be opened, written to the disk or read.
fn sync_core(path: &Path) -> Result<(u64, Fingerprint), String> {
    let mut core = File::open(path).map_err(|error| format!("the saved image cannot be opened: {error}"))?;
    core.sync_all().map_err(|error| format!("the saved image cannot be written to the disk: {error}"))?;
    let read = core.metadata().and_then(|data| Ok((data.len(), Fingerprint::compute(&mut core, data.len())?)));
    read.map_err(|error| format!("the saved image cannot be read: {error}"))
}

/// Returns the descriptions of threads for a manifest: each is cut after [`MAX_THREAD_CHARS`] characters, and threads beyond
/// the first [`MAX_NAMED_THREADS`] are only counted.
fn shortened_threads(threads: &[String]) -> Vec<String> {
    let more = match threads.len().saturating_sub(MAX_NAMED_THREADS) {
        0 => None,
        1 => Some("1 more thread".to_owned()),
        more => Some(format!("{more} more threads")),
    };
    let shorten = |thread: &String| thread.chars().take(MAX_THREAD_CHARS).collect::<String>();
    threads.iter().take(MAX_NAMED_THREADS).map(shorten).chain(more).collect()
}

/// Returns the reason, worded as a clause, why a save that took too long failed.
fn save_timeout_message() -> String {
    format!("the saving process did not end within {} seconds", SAVE_TIMEOUT.as_secs())
}

/// Writes the manifest of the core at `path`.
fn write_manifest(path: &Path, checkpoint: &Checkpoint) -> io::Result<()> {
    replace_with_manifest(&path.with_extension("json"), path, checkpoint)
}

/// Writes the manifest of the core at `path`, which was saved at the end of the server. The [marker](SAVE_MARKER_FILE) of an
/// incomplete save becomes the manifest in one step, so a process that is killed leaves either the marker or the manifest.
fn write_final_manifest(path: &Path, checkpoint: &Checkpoint) -> io::Result<()> {
    let marker = path.with_file_name(SAVE_MARKER_FILE);
    replace_with_manifest(&marker, path, checkpoint)?;
    fs::rename(marker, path.with_extension("json"))
}

/// Replaces `file` by the manifest of the core at `path`. Several threads and processes may write the manifest at the same
/// time, so each of them uses a draft of its own.
fn replace_with_manifest(file: &Path, path: &Path, checkpoint: &Checkpoint) -> io::Result<()> {
    static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed);
    let draft = path.with_extension(format!("json.{}-{number}.draft", std::process::id()));
    replace_file(file, &draft, &serde_json::to_vec(checkpoint)?, true).map(drop)
}

/// The details of a save that the manifest records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SaveDetails {
    pub(crate) name: String,
    /// The number of the last evaluation before the save.
    pub(crate) evaluation: u64,
    pub(crate) saved: jiff::Timestamp,
    pub(crate) automatic: bool,
    pub(crate) at_end: bool,
    /// Descriptions of the threads that the core does not contain. Empty if the threads are not known.
    pub(crate) threads: Vec<String>,
    /// The number of timers that the core does not contain; 0 if the timers are not known.
    pub(crate) timers: u64,
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_file(self.path());
        }
    }
}

/// Replaces a file atomically: a reader finds either the old content or the new content, complete. Returns the new
/// file, to which the caller may append.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> io::Result<File> {
    replace_file(path, &draft_path(path), content, true)
}

/// [Replaces a file atomically](write_atomically), but does not wait for the disk. If the machine fails soon afterwards,
/// the file may be empty or incomplete.
pub(crate) fn write_without_sync(path: &Path, content: &[u8]) -> io::Result<()> {
    replace_file(path, &draft_path(path), content, false).map(drop)
}

/// [Replaces a file atomically](write_atomically). The new content is written to the file `draft` first. If `sync` is
/// true, waits until the content is on the disk.
fn replace_file(path: &Path, draft: &Path, content: &[u8], sync: bool) -> io::Result<File> {
    let mut file = files::create(draft)?;
    let written = file.write_all(content).and_then(|()| if sync { file.sync_all() } else { Ok(()) });
    let written = written.and_then(|()| fs::rename(draft, path));
    written.inspect_err(|_| drop(fs::remove_file(draft))).map(|()| file)
}

/// Returns the path to which the new content of a file is written first. Each file has a draft of its own, since the
/// supervisor writes a checkpoint's `.forms` file while a worker writes the manifest.
pub(crate) fn draft_path(path: &Path) -> PathBuf {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".draft");
    draft.into()
}

/// Returns the path of this program, even if its file has been replaced since.
#[cfg(target_os = "linux")]
pub(crate) fn this_program() -> io::Result<PathBuf> {
    Ok(PathBuf::from("/proc/self/exe"))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn this_program() -> io::Result<PathBuf> {
    std::env::current_exe()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const MEGABYTE: u64 = 1 << 20;
    const GIGABYTE: u64 = 1 << 30;

    /// A directory of checkpoints for one test, deleted when dropped.
    pub(crate) struct TestCheckpoints(pub(crate) Checkpoints);

    impl TestCheckpoints {
        pub(crate) fn new(name: &str) -> Self {
            let directory = std::env::temp_dir().join(format!("sbcl-mcp-checkpoints-{name}-{}", std::process::id()));
            remove_directory(&directory);
            Self(Checkpoints::new(directory, GIGABYTE, 2 << 20))
        }

        /// Adds a checkpoint that was saved `seconds` seconds after 1970-01-01. Its sparse core takes no room on the
        /// disk.
        pub(crate) fn add(&self, name: &str, seconds: i64, bytes: u64) -> Checkpoint {
            let draft = self.0.new_draft(true).unwrap();
            File::create(draft.path()).and_then(|core| core.set_len(bytes)).unwrap();
            let checkpoint = Checkpoint {
                name: name.to_owned(),
                file: draft.file().to_owned(),
                bytes,
                fingerprint: Some(Fingerprint::compute(&mut File::open(draft.path()).unwrap(), bytes).unwrap()),
                damaged: None,
                evaluation: 1,
                saved: jiff::Timestamp::from_second(seconds).unwrap(),
                heap: GIGABYTE,
                build: build_id(),
                automatic: name.starts_with("auto-"),
                at_end: false,
                defines: String::new(),
                threads: Vec::new(),
                timers: 0,
            };
            fs::write(self.0.forms_path(draft.file()), "").unwrap();
            draft.release();
            self.save_manifest(&checkpoint);
            checkpoint
        }

        /// Writes a manifest.
        fn save_manifest(&self, checkpoint: &Checkpoint) {
            write_manifest(&self.0.path(checkpoint), checkpoint).unwrap();
        }

        fn find_by_name(&self, name: &str) -> Option<Checkpoint> {
            self.0.list().into_iter().rfind(|checkpoint| checkpoint.name == name)
        }

        fn names(&self) -> Vec<String> {
            self.0.list().into_iter().map(|checkpoint| checkpoint.name).collect()
        }

        /// Returns the number of files in the directory.
        pub(crate) fn file_count(&self) -> usize {
            fs::read_dir(&self.0.directory).unwrap().count()
        }
    }

    /// Waits until the helper threads have deleted all drafts.
    fn await_deletions() {
        helper_threads::wait_until_idle(Instant::now() + Duration::from_secs(20));
    }

    impl Drop for TestCheckpoints {
        fn drop(&mut self) {
            self.0.remove_all();
        }
    }

    #[test]
    fn only_intact_checkpoints_of_this_program_and_heap_size_can_be_booted() {
        let test = TestCheckpoints::new("intact");
        let intact = test.add("intact", 1, 1000);
        let cut = test.add("cut", 2, 1000);
        File::options().write(true).open(test.0.path(&cut)).unwrap().set_len(999).unwrap();
        let gone = test.add("gone", 3, 1000);
        fs::remove_file(test.0.path(&gone)).unwrap();
        let other = Checkpoint { build: "0.0.1 2.0.0 x y".to_owned(), ..test.add("of another build", 4, 1000) };
        test.save_manifest(&other);
        let small = Checkpoint { heap: GIGABYTE / 2, ..test.add("under another heap", 5, 1000) };
        test.save_manifest(&small);
        let strange = Checkpoint { file: "../elsewhere.core".to_owned(), ..test.add("elsewhere", 6, 1000) };
        let manifest = test.0.directory.join("0123456789abcdef.json");
        write_atomically(&manifest, &serde_json::to_vec(&strange).unwrap()).unwrap();
        fs::write(test.0.directory.join("123456789abcdef0.json"), "{\"name\": \"incomplete").unwrap();
        assert_eq!(test.names(), ["intact", "elsewhere"]);
        assert_eq!(test.find_by_name("intact"), Some(intact.clone()));
        assert_eq!(test.find_by_name("cut"), None);
        assert_eq!((intact.other_program(), cut.other_program()), (None, None));
        assert!(other.other_program().unwrap().contains("0.0.1, with SBCL 2.0.0"));
        assert_eq!((test.0.differing_heap_size(&intact), test.0.differing_heap_size(&other)), (None, None));
        assert_eq!(test.0.differing_heap_size(&small), Some(GIGABYTE / 2));
        assert_eq!(test.0.foreign(), [other, small]);
    }

    #[test]
    fn a_damaged_core_is_read_once_and_accepted_when_it_is_repaired() {
        let test = TestCheckpoints::new("damaged");
        let path = test.0.path(&test.add("mine", 1, 1000));
        let write = |byte: u8, seconds: u64| {
            fs::write(&path, [byte; 1000]).unwrap();
            let modified = std::time::UNIX_EPOCH + Duration::from_secs(seconds);
            File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        };
        write(1, 1);
        assert_eq!(test.names(), [""; 0]);
        let (_, damaged) = test.0.intact_and_damaged();
        assert!(damaged[0].damaged.as_ref().unwrap().is_unchanged(&fs::metadata(&path).unwrap()));
        // With the modification time of the damaged core, the content is not looked at.
        write(0, 1);
        assert_eq!(test.names(), [""; 0]);
        write(0, 2);
        assert_eq!(test.names(), ["mine"]);
        assert_eq!(test.0.list()[0].damaged, None);
    }

    #[test]
    fn a_core_that_was_read_and_is_damaged_is_refused_although_its_modification_time_is_unchanged() {
        let test = TestCheckpoints::new("unchanged");
        let checkpoint = test.add("mine", 1, 1000);
        let path = test.0.path(&checkpoint);
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        fs::write(&path, [1_u8; 1000]).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        assert_eq!(test.names(), ["mine"]);
        assert!(!test.0.verify_core(&checkpoint));
        assert_eq!(test.names(), [""; 0]);
    }

    #[test]
    fn the_reason_why_a_saved_core_cannot_be_used_says_whether_opening_or_reading_failed() {
        let test = TestCheckpoints::new("reason");
        let checkpoint = test.add("mine", 1, 1000);
        let path = test.0.path(&checkpoint);
        assert_eq!(sync_core(&path).map(|(bytes, _)| bytes), Ok(1000));
        fs::remove_file(&path).unwrap();
        let reason = sync_core(&path).unwrap_err();
        assert!(reason.starts_with("the saved image cannot be opened: No such file or directory"), "{reason}");
        // A directory can be opened, but not read.
        let reason = sync_core(&test.0.directory).unwrap_err();
        assert!(reason.starts_with("the saved image cannot be read: Is a directory"), "{reason}");
    }

    #[test]
    fn the_oldest_automatic_checkpoints_are_deleted_to_free_space() {
        let test = TestCheckpoints::new("room");
        for (seconds, name) in ["auto-1", "mine", "auto-2", "auto-3", "yours"].into_iter().enumerate() {
            test.add(name, seconds.try_into().unwrap(), MEGABYTE);
        }
        test.0.make_room(5 * MEGABYTE);
        assert_eq!(test.names(), ["auto-1", "mine", "auto-2", "auto-3", "yours"]);
        test.0.make_room(4 * MEGABYTE);
        assert_eq!(test.names(), ["mine", "auto-2", "auto-3", "yours"]);
        // The newest automatic checkpoint stays, however little space there is.
        test.0.make_room(0);
        assert_eq!(test.names(), ["mine", "auto-3", "yours"]);
        assert_eq!(test.file_count(), 3 * 3);
        assert_eq!(test.0.automatic_name(), "auto-4");
    }

    #[test]
    fn checkpoints_newer_than_the_restored_one_and_replaced_ones_are_deleted() {
        let test = TestCheckpoints::new("line");
        for (seconds, name) in ["auto-1", "mine", "auto-2", "auto-3", "auto-4"].into_iter().enumerate() {
            test.add(name, seconds.try_into().unwrap(), 10);
        }
        test.0.delete_newer(test.find_by_name("auto-3").as_ref());
        assert_eq!(test.names(), ["auto-1", "mine", "auto-2", "auto-3"]);
        test.0.prune_automatic(2);
        assert_eq!(test.names(), ["mine", "auto-2", "auto-3"]);
        test.0.delete_newer(test.find_by_name("mine").as_ref());
        assert_eq!(test.names(), ["mine"]);
        // A checkpoint replaces older checkpoints with its name, even if it was completed before them.
        test.add("mine", 11, 10);
        test.add("mine", 10, 10);
        assert_eq!(test.find_by_name("mine").unwrap().saved.as_second(), 11);
        test.0.delete_replaced("mine");
        assert_eq!(test.names(), ["mine"]);
        assert_eq!(test.find_by_name("mine").unwrap().saved.as_second(), 11);
        test.add("auto-1", 12, 10);
        test.0.delete_newer(None);
        assert_eq!(test.names(), ["mine"]);
    }

    #[test]
    fn a_core_that_is_deleted_in_the_background_has_no_cores_name_and_no_file_remains() {
        let test = TestCheckpoints::new("background");
        let [replaced, automatic, kept] =
            [("mine", 1), ("auto-1", 2), ("mine", 3)].map(|(name, seconds)| test.add(name, seconds, 10));
        test.0.delete_replaced("mine");
        test.0.delete_newer(None);
        assert_eq!([replaced, automatic, kept].map(|one| test.0.path(&one).exists()), [false, false, true]);
        await_deletions();
        assert_eq!(test.file_count(), 3);
        // A server that was killed has left a core under its draft's name.
        let left = test.0.directory.join("0123456789abcdef.core");
        fs::write(left.with_extension("draft"), "").unwrap();
        fs::write(&left, "").unwrap();
        test.0.remove_incomplete();
        assert!(!left.exists());
        await_deletions();
        assert_eq!((test.names(), test.file_count()), (vec!["mine".to_owned()], 3));
    }

    #[test]
    fn a_save_is_later_than_all_checkpoints_even_if_the_clock_was_set_back() {
        let test = TestCheckpoints::new("clock");
        let now = jiff::Timestamp::now();
        test.add("past", now.as_second() - 10, 10);
        assert!(test.0.next_save_time() >= now);
        let future = test.add("future", now.as_second() + 1000, 10).saved;
        let next = test.0.next_save_time();
        assert!(next > future, "{next}");
        // Manifests keep the difference.
        test.save_manifest(&Checkpoint { saved: next, ..test.find_by_name("past").unwrap() });
        assert_eq!(test.names(), ["future", "past"]);
    }

    #[test]
    fn incomplete_files_and_unknown_automatic_checkpoints_are_removed() {
        let test = TestCheckpoints::new("incomplete");
        let known = test.add("auto-1", 1, 10);
        test.add("auto-2", 2, 10);
        test.add("mine", 3, 10);
        let incomplete = ["core", "forms", "draft", "json.draft", "forms.draft", "json.17-4.draft"];
        for incomplete in incomplete.map(|extension| format!("0123456789abcdef.{extension}")) {
            fs::write(test.0.directory.join(incomplete), "").unwrap();
        }
        // Files that belong to no checkpoint stay.
        let others = ["log", "app.core", "notes.draft", "0123456789abcdef.txt", "0123456789abcdef.json.x.draft"];
        for other in others {
            fs::write(test.0.directory.join(other), "").unwrap();
        }
        test.0.remove_incomplete();
        await_deletions();
        assert_eq!((test.names().len(), test.file_count()), (3, 3 * 3 + others.len()));
        test.0.remove_leftovers(&[known.file]);
        assert_eq!(test.names(), ["auto-1", "mine"]);
        assert_eq!(test.file_count(), 2 * 3 + others.len());
    }

    /// Code in the image can create any number of files, which the supervisor deletes while clients wait.
    #[test]
    fn a_bounded_number_of_incomplete_files_is_removed_at_a_time() {
        let test = TestCheckpoints::new("many-incomplete");
        test.add("mine", 1, 10);
        for number in 0..MAX_DELETED_FILES + 2 {
            fs::write(test.0.directory.join(format!("{number:016x}.forms")), "").unwrap();
        }
        for left in [2, 0] {
            test.0.remove_incomplete();
            assert_eq!(test.file_count(), 3 + left);
        }
        assert_eq!(test.names(), ["mine"]);
    }

    #[test]
    fn only_directories_of_servers_that_no_longer_exist_are_abandoned() {
        let state = std::env::temp_dir().join(format!("sbcl-mcp-state-{}", std::process::id()));
        remove_directory(&state);
        let directory = |name: &str| {
            let directory = state.join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("0123456789abcdef.core"), "").unwrap();
            directory
        };
        let checkpoints =
            |number| Checkpoints::new(directory(&format!("checkpoints-{number:016x}")), GIGABYTE, 2 << 20);
        let (running, killed) = (checkpoints(1), checkpoints(2));
        running.lock();
        killed.lock();
        drop(killed);
        // Another version of this program locks no directory, and a server that has just begun has not written its id.
        checkpoints(3);
        fs::write(directory("checkpoints-0000000000000004").join(LOCK_FILE), "").unwrap();
        fs::write(directory("checkpoints-mine").join(LOCK_FILE), "1 serving").unwrap();
        remove_abandoned_directories(&state);
        let mut left: Vec<_> = fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        let expected = ["0000000000000001", "0000000000000003", "0000000000000004", "mine"];
        assert_eq!(left, expected.map(|name| OsString::from(format!("checkpoints-{name}"))));
        remove_directory(&state);
    }

    #[test]
    fn an_unfinished_draft_leaves_no_core_and_named_checkpoints_are_limited() {
        let test = TestCheckpoints::new("draft");
        let draft = test.0.new_draft(false).unwrap();
        let directory = fs::metadata(&test.0.directory).unwrap();
        assert_eq!(directory.permissions().mode() & 0o777, 0o700);
        fs::write(draft.path(), "").unwrap();
        drop(draft);
        assert_eq!(test.file_count(), 0);
        for number in 0..MAX_CHECKPOINTS {
            test.add(&number.to_string(), number.try_into().unwrap(), 0);
        }
        assert!(test.0.new_draft(false).unwrap_err().contains("Checkpoint limit reached: 100."));
        // The limit does not apply to automatic checkpoints.
        assert!(test.0.new_draft(true).is_ok());
    }

    #[test]
    fn files_are_replaced_atomically() {
        let test = TestCheckpoints::new("replaced");
        let path = test.0.make_directory().unwrap().join("manifest.json");
        write_atomically(&path, b"old").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        // A directory with the draft's name makes the write fail.
        fs::create_dir(draft_path(&path)).unwrap();
        assert!(write_atomically(&path, b"new").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        fs::remove_dir(draft_path(&path)).unwrap();
        // A symbolic link with the draft's name is replaced, not followed.
        std::os::unix::fs::symlink(&path, draft_path(&path)).unwrap();
        let mut file = write_atomically(&path, b"new").unwrap();
        file.write_all(b"er").unwrap();
        assert_eq!((fs::read(&path).unwrap(), test.file_count()), (b"newer".to_vec(), 1));
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn only_small_regular_files_with_a_manifests_name_are_manifests() {
        let test = TestCheckpoints::new("manifests");
        let checkpoint = test.add("mine", 1, 10);
        let manifest = test.0.path(&checkpoint).with_extension("json");
        let path = |name: &str| test.0.directory.join(name);
        fs::copy(&manifest, path("other.json")).unwrap();
        std::os::unix::fs::symlink(&manifest, path("0000000000000001.json")).unwrap();
        let fifo = path("0000000000000002.json");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let large = fs::read_to_string(&manifest).unwrap() + &" ".repeat(usize::try_from(MAX_MANIFEST_BYTES).unwrap());
        fs::write(path("0000000000000003.json"), large).unwrap();
        assert_eq!(manifests(&test.0.directory), [checkpoint]);
        assert_eq!(unreadable_manifests(&test.0.directory).len(), 3);
    }

    #[test]
    fn a_bounded_number_of_manifests_is_read_and_the_largest_manifest_is_small_enough() {
        let test = TestCheckpoints::new("many");
        let checkpoint = test.add("mine", 1, 10);
        // In JSON, this character takes six bytes.
        let largest = Checkpoint {
            name: "\u{1}".repeat(MAX_NAME_CHARS),
            damaged: checkpoint.fingerprint.clone(),
            threads: shortened_threads(&vec!["\u{1}".repeat(MAX_THREAD_CHARS); MAX_NAMED_THREADS + 2]),
            ..checkpoint.clone()
        };
        assert!((serde_json::to_vec(&largest).unwrap().len() as u64) < MAX_MANIFEST_BYTES / 2);
        let manifest = test.0.path(&checkpoint).with_extension("json");
        for number in 0..MAX_MANIFESTS {
            fs::hard_link(&manifest, test.0.directory.join(format!("{number:016x}.json"))).unwrap();
        }
        assert_eq!(manifests(&test.0.directory).len(), MAX_MANIFESTS);
    }

    #[test]
    fn a_manifest_names_a_bounded_number_of_threads() {
        let threads = |count: usize| vec!["thread λ".to_owned(); count];
        assert_eq!(shortened_threads(&threads(MAX_NAMED_THREADS)), threads(MAX_NAMED_THREADS));
        let expected = [threads(MAX_NAMED_THREADS), vec!["1 more thread".to_owned()]].concat();
        assert_eq!(shortened_threads(&threads(MAX_NAMED_THREADS + 1)), expected);
        assert_eq!(shortened_threads(&threads(MAX_NAMED_THREADS + 2)).last().unwrap(), "2 more threads");
        assert_eq!(shortened_threads(&["λ".repeat(1000)]), ["λ".repeat(MAX_THREAD_CHARS)]);
    }

    #[test]
    fn the_marker_of_an_incomplete_save_becomes_the_manifest() {
        let test = TestCheckpoints::new("marker");
        let checkpoint = test.add("auto-1", 1, 10);
        let (core, marker) = (test.0.path(&checkpoint), test.0.directory.join(SAVE_MARKER_FILE));
        let manifest = core.with_extension("json");
        fs::remove_file(&manifest).unwrap();
        fs::write(&marker, "").unwrap();
        // A directory with the manifest's name makes the last step fail.
        fs::create_dir(&manifest).unwrap();
        assert!(write_final_manifest(&core, &checkpoint).is_err());
        assert!(marker.is_file());
        fs::remove_dir(&manifest).unwrap();
        write_final_manifest(&core, &checkpoint).unwrap();
        assert_eq!(manifests(&test.0.directory), [checkpoint]);
        // The core, the manifest and the forms.
        assert_eq!(test.file_count(), 3);
    }

    #[test]
    fn a_manifest_that_several_threads_write_is_always_complete() {
        let test = TestCheckpoints::new("threads");
        let checkpoint = test.add("mine", 1, 10);
        let written = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let write = || (0..100).for_each(|_| test.save_manifest(&checkpoint));
            let writers = [scope.spawn(write), scope.spawn(write)];
            scope.spawn(|| {
                while !written.load(Ordering::Relaxed) {
                    assert_eq!(manifests(&test.0.directory), std::slice::from_ref(&checkpoint));
                }
            });
            let results = writers.map(std::thread::ScopedJoinHandle::join);
            written.store(true, Ordering::Relaxed);
            assert!(results.iter().all(Result::is_ok));
        });
        assert_eq!(test.file_count(), 3);
    }

    #[test]
    fn the_files_of_a_checkpoint_can_be_written_concurrently() {
        let test = TestCheckpoints::new("at-once");
        let core = test.0.make_directory().unwrap().join("0123456789abcdef.core");
        std::thread::scope(|scope| {
            for extension in ["json", "forms"] {
                let path = core.with_extension(extension);
                scope.spawn(move || {
                    for _ in 0..100 {
                        write_atomically(&path, extension.as_bytes()).unwrap();
                        assert_eq!(fs::read(&path).unwrap(), extension.as_bytes());
                    }
                });
            }
        });
    }
}
