//! Saving the image as a core, which another process of the same program boots.
//!
//! A saved core is SBCL's own file with a [`Label`] behind it, which is written last, once the rest is on the disk:
//! what says of itself what it is, is whole.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};
use serde::{Deserialize, Serialize};

use super::enter::Entry;
use super::error::Error;
use super::handle::Lisp;
use crate::error::BootError;
use crate::poll_set::PollSet;
use crate::seal::Seal;

/// How long the process that saves an image is waited for: a little longer than it has (`**saving-seconds**` of
/// `lisp/core/checkpoint.lisp`).
const SAVING: Duration = Duration::from_secs(310);
/// How much of what it says is kept, in bytes.
const MAX_WORDS: usize = 2000;
/// What a saved core ends with, after the label's length in eight bytes.
const MAGIC: &[u8; 8] = b"SBCLHOST";
/// What a core of SBCL's ends with: `CORE_MAGIC` of its `core.h`.
const CORE_MAGIC: u64 = 0x5342_434C;
/// How long a label may be, in bytes.
const MAX_LABEL: u64 = 4096;

/// What a saved core says of itself.
#[derive(Debug, Serialize, Deserialize)]
struct Label {
    /// The program that saved it, as [`crate::build`] has it: no other may boot it.
    build: String,
    /// The heap that it was saved under, in bytes: it only boots under the same.
    heap: u64,
    /// How long it is, but for the label.
    bytes: u64,
    /// What tells whether that is still what was saved.
    seal: Seal,
}

impl Label {
    /// Reads that of a file.
    fn read(file: &mut File) -> io::Result<Option<Self>> {
        let length = file.metadata()?.len();
        let mut end = [0; 16];
        if length < 16 {
            return Ok(None);
        }
        file.seek(SeekFrom::End(-16))?;
        file.read_exact(&mut end)?;
        let size = u64::from_le_bytes(end[..8].try_into().map_err(io::Error::other)?);
        if end[8..] != *MAGIC || size > MAX_LABEL || size + 16 > length {
            return Ok(None);
        }
        file.seek(SeekFrom::Start(length - 16 - size))?;
        let mut text = Vec::new();
        file.take(size).read_to_end(&mut text)?;
        let label: Option<Self> = serde_json::from_slice(&text).ok();
        Ok(label.filter(|label| label.bytes == length - 16 - size))
    }

    /// Writes it behind a core.
    fn write(&self, file: &mut File) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        let length = text.len() as u64;
        file.seek(SeekFrom::End(0))?;
        file.write_all(&[&text, &length.to_le_bytes()[..], MAGIC].concat())
    }
}

/// Looks whether this program can boot the core `path`, under a heap of `asked` bytes if one is asked for. The heap to
/// boot it under.
pub(super) fn check(path: &Path, asked: Option<u64>) -> Result<u64, BootError> {
    let unusable = |reason: String| BootError::Core { path: path.to_owned(), reason };
    let mut file = File::open(path).map_err(|error| unusable(error.to_string()))?;
    let label = Label::read(&mut file).map_err(|error| unusable(error.to_string()))?;
    let label = label.ok_or_else(|| unusable("it is not one that Lisp::save has made, or not whole".to_owned()))?;
    let this = crate::build();
    if label.build != this {
        return Err(BootError::OtherBuild { path: path.to_owned(), saved_by: label.build, this });
    }
    let metadata = file.metadata().map_err(|error| unusable(error.to_string()))?;
    let is_whole = label.seal.is_in_place(&metadata) || label.seal.holds(&mut file, label.bytes).unwrap_or(false);
    if !is_whole {
        return Err(unusable("it is not what was saved: it has been changed, or damaged on its way here".to_owned()));
    }
    match asked {
        Some(asked) if asked >> 20 != label.heap >> 20 => {
            Err(BootError::OtherHeap { path: path.to_owned(), saved: label.heap, asked })
        }
        _ => Ok(label.heap),
    }
}

/// A file that is being written beside the one that it will be. Dropped before that, it is gone.
struct Draft<'path> {
    path: PathBuf,
    whole: &'path Path,
}

impl<'path> Draft<'path> {
    fn new(whole: &'path Path) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = whole.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        // A directory could not be replaced at the end, a device must not be.
        if fs::metadata(whole).is_ok_and(|there| !there.is_file()) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "what is there is no file"));
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut draft = name.to_owned();
        draft.push(format!(".{}-{number}.draft", std::process::id()));
        let draft = Self { path: std::path::absolute(whole)?.with_file_name(draft), whole };
        // What cannot be written is told before anything is copied.
        File::create_new(&draft.path)?;
        Ok(draft)
    }

    /// Makes it the file that it is to be, with a label.
    fn finish(&self, heap: u64) -> io::Result<()> {
        let mut file = File::options().read(true).write(true).open(&self.path)?;
        let bytes = file.metadata()?.len();
        let mut last = [0; 8];
        file.seek(SeekFrom::End(-8))?;
        file.read_exact(&mut last)?;
        if u64::from_le_bytes(last) != CORE_MAGIC {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is not whole"));
        }
        file.sync_all()?;
        let modified = jiff::Timestamp::now().round(jiff::Unit::Second).map_err(io::Error::other)?;
        let seal = Seal::of(&mut file, bytes)?.at(modified);
        Label { build: crate::build(), heap, bytes, seal }.write(&mut file)?;
        // The label says when it was written.
        file.set_modified(modified.into())?;
        file.sync_all()?;
        fs::rename(&self.path, self.whole)?;
        File::open(self.path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        // Once it is finished there is none of this name.
        let _ = fs::remove_file(&self.path);
    }
}

impl Lisp {
    /// Saves the image as the file `path`, a core that another process of the same program boots with
    /// [`Builder::core`](super::Builder::core). It takes a second and more (0.9 s with 40 MB of objects, 11 s with 1
    /// GB), while Lisp goes on: it stands still for some 3 to 10 ms, in which this process is copied (`fork`); the copy
    /// saves. The thread that calls this waits until the file is complete. May be called from any thread; Linux only.
    ///
    /// In the core is whatever was in memory at that moment: packages, variables, functions and closures, tables,
    /// classes and instances, loaded systems. Not in it are threads, open files and sockets, foreign memory, timers,
    /// and what only Rust held on to: a [`Value`](super::Value) or a [`Function`](super::Function) means nothing in
    /// another process, so keep in a variable what is to be found again. Functions that were [defined](Self::define) in
    /// Rust are there by name, and whoever calls one gets a `rust:host-error`, with the restart `use-value`, until the
    /// program that has booted the core defines it as well; then older references to it work again, too.
    /// `sb-ext:*save-hooks*` are run, in the copy, where functions of the program's are not there either.
    ///
    /// Calls that other threads are in meanwhile go on here, and are cut off in the core where they are, without their
    /// cleanup forms; locks that they held are free there. No collection, compilation, class definition, change of a
    /// package, of a weak or synchronized hash table, nor anything else in `sb-sys:without-interrupts` is cut off: those
    /// are waited for, if need be by having the other threads pause for some milliseconds. Any other change is, be it of several objects or of one hash table:
    /// what must be whole in the core must not be changed meanwhile, so have those who change it and whoever saves hold
    /// a lock of yours. Host threads may do what they like, those that are in a function that Lisp has called, too, and
    /// nothing of the host runs in the copy: none of its threads, no signal handler, no `atexit` or `pthread_atfork`
    /// function, no destructor. It has none of its files open. The copy is a child of the host: one that waits for all
    /// its children may see it end (`SIGCHLD`, `waitpid`), which does no harm.
    ///
    /// The file is readable by its owner only (0600): what was in memory may be secret. It is there as a whole or not
    /// at all, and replaces what was there. A host that ends before that leaves `PATH.…-….draft` behind. It boots under
    /// the same size of heap, and in a program with the very same build of this crate and SBCL; from another one it is
    /// refused.
    ///
    /// There is no variant without a copy of the process: SBCL saves by moving every object and ends the process, and
    /// neither the host's own threads nor frames of Rust's on the Lisp threads' stacks survive that. Where the system
    /// refuses a copy (with `vm.overcommit_memory=2`, under a seccomp filter), this fails and nothing else happens.
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::boot()?;
    /// lisp.eval::<()>("(defvar *visits* 41)")?;
    /// lisp.save("app.core")?;
    /// // In another process:
    /// let lisp = sbcl::Lisp::builder().core("app.core").boot()?;
    /// assert_eq!(lisp.eval::<i64>("(incf *visits*)")?, 42);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Io`] when a file cannot be made at `path`; [`Error::Save`] when the copy did not save, on a full disk
    /// for instance, or took longer than 300 seconds; [`Error::Condition`] when the process cannot be copied, or other
    /// threads compile, intern symbols or define classes for 30 seconds without a pause, or one stays in
    /// `without-interrupts` for as long. What was at `path` before
    /// stays. This handle's [limit](Self::with_timeout) is for the time until there is a copy: [`Error::Timeout`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let at_path = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        if !cfg!(target_os = "linux") {
            return Err(at_path(io::ErrorKind::Unsupported.into()).into());
        }
        let draft = Draft::new(path).map_err(at_path)?;
        let file = draft.path.to_str().ok_or_else(|| at_path(io::ErrorKind::InvalidFilename.into()))?;
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
        let process = self.enter(|cx| cx.ask_with::<i32>(Entry::Save, &(file, writer.as_raw_fd())));
        drop(writer);
        // Without a copy that ends at once: whoever is interrupted has ended it.
        let process = process.inspect_err(|_| drop(read_report(&reader, None)))?;
        // The host may have waited for it already, as for any child of its own.
        let process = Pid::from_raw(process).and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok());
        let ended = read_report(&reader, process.as_ref());
        if let Some(process) = &process {
            let _ = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED);
        }
        let failed = |reason: String| Error::Save { path: path.to_owned(), reason };
        ended.map_err(failed)?;
        let heap = crate::image::heap::usage().map_or(0, |usage| usage.size as u64);
        draft.finish(heap).map_err(|error| failed(error.to_string()))
    }
}

/// Waits for what `save-and-report` tells: what the process said that saves, and how it ended. The one that tells it,
/// `process`, is ended if that takes too long.
fn read_report(reader: &OwnedFd, process: Option<&OwnedFd>) -> Result<(), String> {
    let end = Instant::now() + SAVING;
    let mut report = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut set = PollSet::new();
        set.read((), reader);
        // Where it cannot wait, reading does.
        if set.wait(Some(left)).is_ok_and(|ready| !ready.has(())) {
            if left.is_zero() {
                let _ = process.map(|process| pidfd_send_signal(process, Signal::KILL));
                return Err("the process that saves it does not end".to_owned());
            }
            continue;
        }
        match rustix::io::read(reader, &mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                report.extend_from_slice(&buffer[..count]);
                // The beginning says why; the end, how it ended.
                if report.len() > MAX_WORDS + 4 {
                    report.drain(MAX_WORDS..report.len() - 4);
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    let Some((words, status)) = report.split_last_chunk::<4>() else {
        return Err("the process that saves it was ended, or took too long".to_owned());
    };
    let words = String::from_utf8_lossy(words).trim().to_owned();
    let status = i32::from_le_bytes(*status);
    let how = match (libc::WIFEXITED(status), libc::WIFSIGNALED(status)) {
        (true, _) if libc::WEXITSTATUS(status) == 0 => return Ok(()),
        (true, _) => format!("ended with status {}", libc::WEXITSTATUS(status)),
        (_, true) => format!("was killed by signal {}", libc::WTERMSIG(status)),
        _ => "could not be started".to_owned(),
    };
    Err(format!("the process that saves it {how}{}{words}", if words.is_empty() { "" } else { ": " }))
}
