//! Saving the image as a core, which another process of the same program boots.
//!
//! A saved core is the file that SBCL writes, followed by a [`CoreTrailer`]. The trailer is written last, once the rest
//! is on the disk: a file with a trailer is complete.

use std::ffi::OsStr;
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
use crate::image::fingerprint::Fingerprint;
use crate::os::poll_set::PollSet;

/// The time after which this process kills the copy that saves the image. This time is slightly longer than the time
/// limit that the copy sets for itself (`**saving-seconds**` of `lisp/core/checkpoint.lisp`).
const SAVE_TIMEOUT: Duration = Duration::from_secs(310);
/// Maximum size of the saving process's message, in bytes.
const MAX_REPORT_BYTES: usize = 2000;
/// Number of bytes at the end of a complete report: four zero bytes, and the saving process's wait status.
const REPORT_END_BYTES: usize = 8;
/// The last eight bytes of a saved core. The eight bytes before this magic number contain the length of the trailer's
/// text.
const TRAILER_MAGIC: &[u8; 8] = b"SBCLHOST";
/// The last word of a core as SBCL writes it: `CORE_MAGIC` of SBCL's `core.h`.
const CORE_MAGIC: u64 = 0x5342_434C;
/// Maximum length of a trailer's text, in bytes.
const MAX_TRAILER_BYTES: u64 = 4096;

/// The description, in JSON, that is appended to a saved core.
#[derive(Debug, Serialize, Deserialize)]
struct CoreTrailer {
    /// The [build](crate::build_id) that saved the core; no other build may boot the core.
    build: String,
    /// The heap size in bytes of the image that was saved. The core must be booted with the same heap size.
    heap: u64,
    /// The length of the core in bytes, without the trailer.
    bytes: u64,
    /// The fingerprint by which later changes of the core are detected.
    #[serde(rename = "seal")]
    fingerprint: Fingerprint,
}

impl CoreTrailer {
    /// Returns the trailer of a file; `None` if the file does not end with a valid trailer.
    fn read(file: &mut File) -> io::Result<Option<Self>> {
        let length = file.metadata()?.len();
        let mut end = [0; 16];
        if length < 16 {
            return Ok(None);
        }
        file.seek(SeekFrom::End(-16))?;
        file.read_exact(&mut end)?;
        let size = u64::from_le_bytes(end[..8].try_into().map_err(io::Error::other)?);
        if end[8..] != *TRAILER_MAGIC || size > MAX_TRAILER_BYTES || size + 16 > length {
            return Ok(None);
        }
        file.seek(SeekFrom::Start(length - 16 - size))?;
        let mut text = Vec::new();
        file.take(size).read_to_end(&mut text)?;
        let trailer: Option<Self> = serde_json::from_slice(&text).ok();
        Ok(trailer.filter(|trailer| trailer.bytes == length - 16 - size))
    }

    /// Appends the trailer to a core: the text, the length of the text, and the magic number.
    fn write(&self, file: &mut File) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        let length = text.len() as u64;
        file.seek(SeekFrom::End(0))?;
        file.write_all(&[&text, &length.to_le_bytes()[..], TRAILER_MAGIC].concat())
    }
}

/// Checks that this program can boot the core in the file `path`, and returns the heap size in bytes that the core was
/// saved with. `asked` is the requested heap size in bytes, or `None` for any size. The requested and the saved size
/// must be equal when rounded down to whole MiB.
pub(super) fn check_core(path: &Path, asked: Option<u64>) -> Result<u64, BootError> {
    let unusable = |reason: String| BootError::Core { path: path.to_owned(), reason };
    let mut file = File::open(path).map_err(|error| unusable(error.to_string()))?;
    let trailer = CoreTrailer::read(&mut file).map_err(|error| unusable(error.to_string()))?;
    let not_saved = "the file was not written by Lisp::save, or is incomplete; for an sbcl.core, name its directory";
    let trailer = trailer.ok_or_else(|| unusable(not_saved.to_owned()))?;
    let this = crate::build_id();
    if trailer.build != this {
        return Err(BootError::OtherBuild { path: path.to_owned(), saved_by: trailer.build, this });
    }
    let metadata = file.metadata().map_err(|error| unusable(error.to_string()))?;
    let is_intact = trailer.fingerprint.is_unchanged(&metadata)
        || trailer.fingerprint.matches(&mut file, trailer.bytes).unwrap_or(false);
    if !is_intact {
        return Err(unusable("the file was changed or damaged after the save: save a new core".to_owned()));
    }
    match asked {
        Some(asked) if asked >> 20 != trailer.heap >> 20 => {
            Err(BootError::OtherHeap { path: path.to_owned(), saved: trailer.heap, asked })
        }
        _ => Ok(trailer.heap),
    }
}

/// A file that is being written next to its target. Dropping the draft deletes the file, unless the draft was
/// published.
struct CoreDraft<'path> {
    path: PathBuf,
    target: &'path Path,
}

impl<'path> CoreDraft<'path> {
    fn new(target: &'path Path) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // For `app/` and `app/.` too, `file_name` returns `app`.
        let is_last = |name: &&OsStr| target.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes());
        let name = target.file_name().filter(is_last).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidFilename, "the path does not end with the name of a file")
        })?;
        // The final rename could not replace a directory, and must not replace a device.
        if fs::metadata(target).is_ok_and(|existing| !existing.is_file()) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "something other than a regular file has this name; name another file",
            ));
        }
        let path = std::path::absolute(target)?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let mut draft = name.to_owned();
            draft.push(format!(".{}-{number}.draft", std::process::id()));
            let path = path.with_file_name(draft);
            // Creating the file here reports a directory without write access before the process is copied.
            match File::create_new(&path) {
                // This file is the draft of a killed process, or of a process in another container, that had the same
                // number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => return created.map(|_| Self { path, target }),
            }
        }
    }

    /// Checks that SBCL wrote the whole core, appends the trailer with the heap size `heap` in bytes, and renames the
    /// draft to its target.
    fn publish(&self, heap: u64) -> io::Result<()> {
        let mut file = File::options().read(true).write(true).open(&self.path)?;
        let bytes = file.metadata()?.len();
        let mut last = [0; 8];
        file.seek(SeekFrom::End(-8))?;
        file.read_exact(&mut last)?;
        if u64::from_le_bytes(last) != CORE_MAGIC {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the core was not written completely"));
        }
        file.sync_all()?;
        let modified = jiff::Timestamp::now().round(jiff::Unit::Second).map_err(io::Error::other)?;
        let fingerprint = Fingerprint::compute(&mut file, bytes)?.with_modified(modified);
        CoreTrailer { build: crate::build_id(), heap, bytes, fingerprint }.write(&mut file)?;
        // The file must have the modification time that the fingerprint contains.
        file.set_modified(modified.into())?;
        file.sync_all()?;
        fs::rename(&self.path, self.target)?;
        File::open(self.path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

impl Drop for CoreDraft<'_> {
    fn drop(&mut self) {
        // A published draft no longer has this name.
        let _ = fs::remove_file(&self.path);
    }
}

impl Lisp {
    /// Saves the image as a core in the file `path`. Another process of the same program can boot the core with
    /// [`Builder::core`](super::Builder::core).
    ///
    /// Saving takes about 1 s with 40 MB of objects and about 10 s with 1 GB, while Lisp continues to run. Lisp threads
    /// are stopped only for the copying of this process (`fork`), usually for 3 to 10 ms; the copy of the process
    /// writes the file. The calling thread waits until the file is complete. This function works on Linux only.
    ///
    /// The core contains the Lisp objects that were in memory at the time of the copy: packages, variables, functions
    /// and closures, hash tables, classes and instances, loaded systems. The core does not contain threads, open files
    /// and sockets, foreign memory, timers, or objects that only Rust kept alive. A [`Value`](super::Value) or a
    /// [`Function`](super::Function) has no meaning in another process, so keep objects that the other process needs in
    /// Lisp variables.
    ///
    /// Functions [defined](Self::define) in Rust are in the core by name. Calling such a function signals a
    /// `rust:host-error`, with the restart `use-value`, until the program that booted the core has defined the function
    /// as well; older references to the function then work again. The functions in `sb-ext:*save-hooks*` run in the
    /// copy, where functions defined in Rust are not available either.
    ///
    /// Calls on other threads continue in this process. In the core, these calls are cut off where they were, without
    /// their cleanup forms, and the locks that they held are free. Saving waits for collections, class definitions,
    /// changes of packages and of weak or synchronized hash tables, and any other code in
    /// `sb-sys:without-interrupts`. If necessary, saving pauses the other threads, for up to two seconds at a time. All
    /// other changes can be cut off midway, whether they affect multiple objects or one hash table. If the core must
    /// not contain such a change half done, hold a lock of your own during the change, and take the same lock to save.
    ///
    /// Finalizers and functions in `sb-ext:*after-gc-hooks*` run on a thread of SBCL's own. Saving stops this thread
    /// first, and therefore waits until a finalizer or such a function that is running has returned. Finalizers and
    /// these functions cannot save the image.
    ///
    /// Saving does not wait for the program's own threads, nor for Lisp threads that run Rust code, unless these
    /// threads hold a lock of the C library. No Rust or C code of the program runs in the copy: none of the program's
    /// threads, no signal handler, no `atexit` or `pthread_atfork` function, no destructor. The copy has none of the
    /// program's files open. The copy is a child of this process: a program that waits for all its children may see the
    /// copy end (`SIGCHLD`, `waitpid`), which does no harm.
    ///
    /// Only the owner of the file can read the file (mode 0600), because the memory of the image may contain secrets.
    /// The file appears complete or not at all, and replaces a previous file. If the process ends before the file is
    /// complete, a file `PATH.…-….draft` remains. The core boots only with the same heap size, and only in a program
    /// with exactly the same build of this crate and SBCL.
    ///
    /// An image cannot be saved without a copy of the process: to save, SBCL moves every object and then ends the
    /// process. Neither the program's own threads nor Rust frames on the stacks of Lisp threads would survive. If the
    /// system refuses to copy the process, for example with `vm.overcommit_memory=2` or under a seccomp filter, this
    /// function fails and changes nothing.
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
    /// Returns these errors:
    ///
    /// - [`Error::Io`] if no file can be created at `path`, `path` is not UTF-8, or the system is not Linux;
    /// - [`Error::Save`] if the copy did not save, for example on a full disk, or took longer than 300 seconds;
    /// - [`Error::Condition`] if the system refuses to copy the process, or if the save is blocked for 30 seconds:
    ///   other threads intern symbols or define classes without a pause, a thread stays in
    ///   `without-interrupts`, a thread in C code holds a lock of the C library, or a finalizer or a function in
    ///   `sb-ext:*after-gc-hooks*` does not return;
    /// - [`Error::Timeout`] if the handle's [limit](Self::with_timeout) passes before the copy is made.
    ///
    /// After an error, a previous file at `path` is unchanged, unless only writing the directory to the disk failed.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let at_path = |error: io::Error| {
            io::Error::new(error.kind(), format!("the image was not saved in {}: {error}", path.display()))
        };
        if !cfg!(target_os = "linux") {
            return Err(at_path(io::Error::new(io::ErrorKind::Unsupported, "saving works only on Linux")).into());
        }
        let draft = CoreDraft::new(path).map_err(at_path)?;
        let not_utf_8 = || at_path(io::Error::new(io::ErrorKind::InvalidFilename, "the path is not valid UTF-8"));
        let file = draft.path.to_str().ok_or_else(not_utf_8)?;
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
        let process = self.enter(|cx| cx.call_entry_with::<i32>(Entry::Save, &(file, writer.as_raw_fd())));
        drop(writer);
        // If the call failed, no copy was made, or the interruption has ended the copy. So this read returns at once.
        let process = process.inspect_err(|_| drop(read_report(&reader, None)))?;
        // No descriptor is opened if the program has already waited for the process, as a program may do for all its
        // children.
        let process = Pid::from_raw(process).and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok());
        let ended = read_report(&reader, process.as_ref());
        if let Some(process) = &process {
            let _ = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED);
        }
        let failed = |reason: String| Error::Save { path: path.to_owned(), reason };
        ended.map_err(failed)?;
        let heap = crate::image::heap::usage().map_or(0, |usage| usage.size as u64);
        draft.publish(heap).map_err(|error| failed(error.to_string()))
    }
}

/// Waits for the report of the Lisp function `save-and-report`: the saving process's message and wait status. If the
/// report is not complete within [`SAVE_TIMEOUT`], kills `process`, the process that sends the report. If the image was
/// not saved, returns the reason, worded as a clause.
fn read_report(reader: &OwnedFd, process: Option<&OwnedFd>) -> Result<(), String> {
    let end = Instant::now() + SAVE_TIMEOUT;
    let mut report = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut set = PollSet::new();
        set.add_read((), reader);
        // If polling fails, the read below blocks instead.
        if set.wait(Some(left)).is_ok_and(|ready| !ready.has(())) {
            if left.is_zero() {
                let _ = process.map(|process| pidfd_send_signal(process, Signal::KILL));
                let limit = SAVE_TIMEOUT.as_secs();
                return Err(format!("the process that was saving the image did not end within {limit} seconds"));
            }
            continue;
        }
        match rustix::io::read(reader, &mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                report.extend_from_slice(&buffer[..count]);
                // The beginning has the reason for a failure, and the end has the wait status: drop the text between
                // them.
                if report.len() > MAX_REPORT_BYTES + REPORT_END_BYTES {
                    report.drain(MAX_REPORT_BYTES..report.len() - REPORT_END_BYTES);
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    // Without this end, the text may be the output of a saving process that was killed.
    let Some((message, [0, 0, 0, 0, status @ ..])) = report.split_last_chunk::<REPORT_END_BYTES>() else {
        return Err("the process that was saving the image was killed, or took longer than 300 seconds".to_owned());
    };
    let message = String::from_utf8_lossy(message).trim().to_owned();
    let status = i32::from_le_bytes(*status);
    let how = match (libc::WIFEXITED(status), libc::WIFSIGNALED(status)) {
        (true, _) if libc::WEXITSTATUS(status) == 0 => return Ok(()),
        (true, _) => format!("exited with status {}", libc::WEXITSTATUS(status)),
        (_, true) => format!("was killed by signal {}", libc::WTERMSIG(status)),
        _ => "could not be started".to_owned(),
    };
    Err(format!("the process for saving the image {how}{}{message}", if message.is_empty() { "" } else { ": " }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_of_another_process_with_the_same_number_is_kept() {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-drafts-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let target = directory.join("app.core");
        let names = |number: u64| directory.join(format!("app.core.{}-{number}.draft", std::process::id()));
        let others: Vec<_> = (0..100).map(names).collect();
        others.iter().for_each(|path| fs::write(path, "another process's").unwrap());
        let draft = CoreDraft::new(&target).unwrap();
        assert!(draft.path.exists() && !others.contains(&draft.path));
        drop(draft);
        assert!(others.iter().all(|path| path.exists()));
        fs::remove_dir_all(&directory).unwrap();
    }
}
