//! Checkpoints as files: cores that running images of this program saved, each with a manifest that says what it is.
//!
//! A core counts once its manifest is there, which is written last: what a crash leaves behind is no checkpoint. They
//! may hold whatever was in memory, so the directory is its owner's alone, and gone when the server ends.

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use serde::{Deserialize, Serialize};

/// How long a child may take to save an image, and a throw-away process to boot it.
const SAVING: Duration = Duration::from_secs(300);
const PROBING: Duration = Duration::from_secs(30);
/// Checkpoints that there may be.
const MAX_CHECKPOINTS: usize = 100;
/// Characters of a name.
pub(crate) const MAX_NAME: usize = 100;

/// What a checkpoint is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    /// What the client calls it.
    pub(crate) name: String,
    /// The name of its core's file, and how many bytes that has.
    pub(crate) file: String,
    pub(crate) bytes: u64,
    /// The number of the last evaluation before it.
    pub(crate) evaluation: u64,
    pub(crate) saved: jiff::Timestamp,
    /// The heap that it was saved under, in bytes: it only boots under the same.
    pub(crate) heap: u64,
    /// The program that saved it: no other may boot it.
    pub(crate) build: String,
    /// It was saved of the server's own accord.
    pub(crate) automatic: bool,
}

/// Where what is kept lies, which need not exist: below XDG_STATE_HOME; `None` for a user without a home directory.
pub(crate) fn state_directory() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").filter(|path| Path::new(path).is_absolute()).map(PathBuf::from);
    let state = state.or_else(|| Some(std::env::home_dir().filter(|home| home.is_dir())?.join(".local/state")))?;
    Some(state.join("sbcl-mcp"))
}

/// The checkpoints of one server.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoints {
    directory: PathBuf,
    /// What images are booted with.
    heap: u64,
    control_stack: u64,
}

impl Checkpoints {
    /// Those in `directory`, for images of this size.
    pub(crate) fn new(directory: PathBuf, heap: u64, control_stack: u64) -> Self {
        Self { directory, heap, control_stack }
    }

    /// A directory that no other server has, which need not exist until there is a checkpoint: below XDG_STATE_HOME,
    /// or in `scratch` for a user without a home directory.
    pub(crate) fn choose_directory(scratch: &Path) -> PathBuf {
        match state_directory() {
            // The standard library seeds its hash maps from the system's randomness.
            Some(state) => state.join(format!("checkpoints-{:016x}", RandomState::new().hash_one(std::process::id()))),
            None => scratch.join("checkpoints"),
        }
    }

    /// The file of a checkpoint's core.
    pub(crate) fn path(&self, checkpoint: &Checkpoint) -> PathBuf {
        self.directory.join(&checkpoint.file)
    }

    /// Those that can be booted, oldest first.
    pub(crate) fn list(&self) -> Vec<Checkpoint> {
        let Ok(entries) = fs::read_dir(&self.directory) else { return Vec::new() };
        let manifests =
            entries.flatten().map(|entry| entry.path()).filter(|path| path.extension() == Some("json".as_ref()));
        let mut found: Vec<Checkpoint> = manifests
            .filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok())
            .filter(|checkpoint| self.is_whole(checkpoint))
            .collect();
        found.sort_by_key(|checkpoint| checkpoint.saved);
        found
    }

    /// True for a core of this very program that is as long as it was.
    fn is_whole(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.build == build()
            && checkpoint.heap == self.heap
            && fs::metadata(self.path(checkpoint)).is_ok_and(|core| core.len() == checkpoint.bytes)
    }

    /// The one of this name.
    pub(crate) fn get(&self, name: &str) -> Option<Checkpoint> {
        self.list().into_iter().find(|checkpoint| checkpoint.name == name)
    }

    /// Makes the directory, if it is not there, and returns its name.
    pub(crate) fn make_directory(&self) -> io::Result<PathBuf> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        Ok(self.directory.clone())
    }

    /// Chooses a file for a new one.
    ///
    /// # Errors
    /// A sentence: the directory cannot be made, or there are too many.
    pub(crate) fn begin(&self) -> Result<Draft, String> {
        if self.list().len() >= MAX_CHECKPOINTS {
            return Err(format!("There are {MAX_CHECKPOINTS} checkpoints: delete one first."));
        }
        self.make_directory().map_err(|error| {
            format!("The directory for checkpoints, {}, cannot be made: {error}.", self.directory.display())
        })?;
        let number = RandomState::new().hash_one(Instant::now());
        Ok(Draft { checkpoints: self.clone(), file: format!("{number:016x}.core"), finished: false })
    }

    /// Removes one.
    ///
    /// # Errors
    /// The files cannot be removed.
    pub(crate) fn delete(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        let core = self.path(checkpoint);
        // Without its manifest it is none any more, whatever happens to the core.
        fs::remove_file(core.with_extension("json"))?;
        fs::remove_file(core)
    }

    /// Removes the automatic ones that came after this one, or all: the session goes on from there.
    pub(crate) fn forget_since(&self, from: Option<&Checkpoint>) {
        let later = |one: &Checkpoint| from.is_none_or(|from| one.saved > from.saved);
        for checkpoint in self.list().into_iter().filter(|one| one.automatic && later(one)) {
            let _ = self.delete(&checkpoint);
        }
    }

    /// Removes the oldest automatic ones until all together take at most `space` bytes; the newest stays.
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

    /// Bytes that may still be written there, if that can be told.
    pub(crate) fn free_space(&self) -> Option<u64> {
        let existing = self.directory.ancestors().find(|directory| directory.exists())?;
        let disk = rustix::fs::statvfs(existing).ok()?;
        Some(disk.f_bavail.saturating_mul(disk.f_frsize))
    }

    /// Removes all of them, and the directory.
    pub(crate) fn remove(&self) {
        remove_directory(&self.directory);
    }

    /// Boots the core in a throw-away process and compares what that calls itself with `name`.
    fn probe(&self, core: &Path, name: &str) -> Result<(), String> {
        let mut command = Command::new(this_program().map_err(|error| error.to_string())?);
        command.arg0("sbcl-mcp").arg("probe").args([
            OsString::from(format!("--heap={}", self.heap)),
            OsString::from(format!("--control-stack={}", self.control_stack)),
            "--image".into(),
            core.into(),
        ]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
        let mut child = child.map_err(|error| format!("a process to try it cannot be started: {error}"))?;
        let ended = wait_until(Pid::from_child(&child), PROBING);
        if !ended {
            let _ = child.kill();
        }
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        if ended && output.status.success() && output.stdout == name.as_bytes() {
            return Ok(());
        }
        Err("the saved image does not come up".to_owned())
    }
}

/// Removes a directory of checkpoints if it was made.
pub(crate) fn remove_directory(directory: &Path) {
    // What cannot be removed is not worth a word at the end.
    let _ = fs::remove_dir_all(directory);
}

/// A core that is being saved. Dropped before it is finished, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Draft {
    checkpoints: Checkpoints,
    file: String,
    finished: bool,
}

impl Draft {
    /// Where to save it.
    pub(crate) fn path(&self) -> PathBuf {
        self.checkpoints.directory.join(&self.file)
    }

    /// The name of that file.
    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    /// Waits until process `child` has saved it, tries it, and makes a checkpoint of it, in place of another one of
    /// that name.
    ///
    /// # Errors
    /// The rest of a sentence: why there is none.
    pub(crate) fn finish(
        mut self,
        child: Pid,
        name: String,
        evaluation: u64,
        automatic: bool,
    ) -> Result<Checkpoint, String> {
        let saved = jiff::Timestamp::now();
        if !wait_until(child, SAVING) {
            let _ = kill_process(child, Signal::KILL);
        }
        match waitpid(Some(child), WaitOptions::empty()) {
            Ok(Some((_, status))) if status.exit_status() == Some(0) => {}
            Ok(Some((_, status))) => {
                let how = match (status.exit_status(), status.terminating_signal()) {
                    (_, Some(signal)) => format!("was killed by signal {signal}"),
                    (status, _) => format!("ended with status {}; stderr says more", status.unwrap_or(-1)),
                };
                return Err(format!("the process that saved it {how}"));
            }
            Ok(None) => return Err("the process that saved it is gone".to_owned()),
            Err(error) => return Err(format!("the process that saved it cannot be waited for: {error}")),
        }
        let path = self.path();
        self.checkpoints.probe(&path, &name)?;
        let written = |error: io::Error| format!("it cannot be written: {error}");
        let core = File::open(&path).map_err(written)?;
        core.sync_all().map_err(written)?;
        let bytes = core.metadata().map_err(written)?.len();
        let heap = self.checkpoints.heap;
        let checkpoint =
            Checkpoint { name, file: self.file.clone(), bytes, evaluation, saved, heap, build: build(), automatic };
        let before = self.checkpoints.get(&checkpoint.name);
        write_whole(&path.with_extension("json"), &serde_json::to_vec(&checkpoint).map_err(|e| e.to_string())?)
            .map_err(written)?;
        self.finished = true;
        if let Some(before) = before {
            let _ = self.checkpoints.delete(&before);
        }
        Ok(checkpoint)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_file(self.path());
        }
    }
}

/// Writes a file that is there as a whole or not at all.
fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let draft = path.with_extension("draft");
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(draft, path)
}

/// Waits, no longer than `time`, until a child has ended; it is yet to be waited for. False when it goes on.
fn wait_until(child: Pid, time: Duration) -> bool {
    let Ok(descriptor) = pidfd_open(child, PidfdFlags::empty()) else { return true };
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let wait = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&wait)) {
            Ok(0) if left.is_zero() => return false,
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            _ => return true,
        }
    }
}

/// What no other build of this program is called.
fn build() -> String {
    format!("{} {} {}", crate::VERSION, crate::SBCL_VERSION, env!("SBCL_MCP_BUILD"))
}

/// This very program, even if its file has been replaced since.
#[cfg(target_os = "linux")]
pub(crate) fn this_program() -> io::Result<PathBuf> {
    Ok(PathBuf::from("/proc/self/exe"))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn this_program() -> io::Result<PathBuf> {
    std::env::current_exe()
}
