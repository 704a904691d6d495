//! The recovery log of a persistent session: a snapshot of the [state](RecoveryState), followed by the events since the
//! snapshot, one JSON object per line.
//!
//! The supervisor appends the events that [outlive a server](SessionEvent::outlives_server), and another snapshot when
//! the state has changed without an event: by a reset, by a restore that is complete or has failed, by forms that failed
//! in a replay, or by a notice that an image gives only once. A snapshot replaces the lines before it. The supervisor
//! compacts the log to one snapshot when the log has grown. Reading ignores an incomplete last line. A session that is not
//! persistent has no log: its state is only in memory.
//!
//! The supervisor's event loop does not wait for the disk, which may be busy with a core of gigabytes. The log survives
//! the end of all processes, but its last lines may not survive a failure of the machine.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::checkpoint::store::{draft_path, write_atomically, write_without_sync};
use super::event::SessionEvent;
use super::old_log::OldLine;
use super::state::RecoveryState;
use crate::os::files;
use crate::rpc::framing::MAX_LINE;

/// The name of the log's file.
pub(crate) const LOG_FILE: &str = "log";
/// The name of the copy of a log with unreadable lines.
pub(crate) const DAMAGED_LOG_FILE: &str = "log.damaged";
/// The name of an empty file that marks an incomplete log: definitions since the file was created may be missing.
pub(crate) const INCOMPLETE_MARKER_FILE: &str = "log.incomplete";
/// Size of the appended events, in bytes, above which the log is compacted.
const COMPACTION_THRESHOLD: u64 = 64 << 20;
/// Maximum size of a checkpoint's `.forms` file, in bytes. The definitions and the unrestored forms are bounded: together,
/// they take about 25 MiB at most.
const MAX_CHECKPOINT_FORMS: u64 = 32 << 20;
/// The version of the log's format. A log with a higher version is not read.
const FORMAT_VERSION: u32 = 2;

/// A line of the log.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogLine<'a> {
    /// The state at this line, as the first line of the log and after a change without an event.
    Snapshot {
        /// The version of the format.
        format: u32,
        /// The build of the program that wrote the log.
        build: String,
        state: Box<Cow<'a, RecoveryState>>,
    },
    /// A change after the snapshot.
    Event(Cow<'a, SessionEvent>),
}

/// The part of the first line that all formats from version 2 on share.
#[derive(Debug, Deserialize)]
struct FirstLine {
    snapshot: SnapshotVersion,
}

/// The part of a snapshot that identifies its format and the program that wrote it.
#[derive(Debug, Deserialize)]
struct SnapshotVersion {
    format: u32,
    build: String,
    #[serde(rename = "state")]
    _state: IgnoredAny,
}

/// A log that was read.
#[derive(Debug, Default)]
pub(crate) struct LoadedLog {
    /// The fold over the log.
    pub(crate) state: RecoveryState,
    /// The number of lines that could not be read. An incomplete last line does not count.
    pub(crate) unreadable: usize,
    /// True when the log has a readable snapshot or the first line of a log of a build before version 0.1; false without
    /// a log.
    pub(crate) has_snapshot: bool,
}

/// Reads the log in a session's directory. Without a log, the state is empty.
///
/// # Errors
/// Returns the reason, worded as a clause, if a newer program wrote the log, or if the log cannot be read.
pub(crate) fn load(directory: &Path) -> Result<LoadedLog, String> {
    load_with_initial_state(directory, RecoveryState::default())
}

/// Reads the log like [`load`], but applies the events to `initial` if the log has no readable snapshot.
///
/// # Errors
/// Returns the errors of [`load`].
pub(crate) fn load_with_initial_state(directory: &Path, initial: RecoveryState) -> Result<LoadedLog, String> {
    let path = directory.join(LOG_FILE);
    match files::open(&path) {
        Ok(file) => fold_lines(BufReader::new(file), &path, initial),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(LoadedLog { state: initial, ..LoadedLog::default() })
        }
        Err(error) => Err(unreadable_log_message(&error)),
    }
}

/// Returns the error message, worded as a clause, for a log that cannot be read.
fn unreadable_log_message(error: &io::Error) -> String {
    format!("its log cannot be read ({error})")
}

/// Copies a log with unreadable lines to [`DAMAGED_LOG_FILE`] in the session's directory, before the log is compacted.
/// Returns the path of the copy.
///
/// # Errors
/// Returns an error if the log cannot be read, or if the copy cannot be written.
pub(crate) fn copy_damaged_log(directory: &Path) -> io::Result<PathBuf> {
    let copy = directory.join(DAMAGED_LOG_FILE);
    io::copy(&mut files::open(&directory.join(LOG_FILE))?, &mut files::create(&copy)?)?;
    Ok(copy)
}

/// Returns the time since which the last server of a session could not write its log; `None` when the log is complete.
pub(crate) fn incomplete_since(directory: &Path) -> Option<jiff::Timestamp> {
    directory.join(INCOMPLETE_MARKER_FILE).metadata().and_then(|file| file.modified()).ok()?.try_into().ok()
}

/// Returns true when a directory has a log whose first line is readable.
pub(crate) fn has_readable_log(directory: &Path) -> bool {
    let mut line = Vec::new();
    let file = files::open(&directory.join(LOG_FILE)).map(|file| BufReader::new(file).take(MAX_LINE as u64));
    file.and_then(|mut file| file.read_until(b'\n', &mut line)).is_ok()
        && (serde_json::from_slice::<FirstLine>(&line).is_ok()
            || serde_json::from_slice(&line).is_ok_and(|line: OldLine| line.is_first()))
}

/// Reads a checkpoint's definitions and unrestored forms from the checkpoint's `.forms` file. Returns `None` unless the
/// file is one complete snapshot: clients wait while the supervisor reads what code in the image may have written.
pub(crate) fn load_checkpoint_forms(path: &Path) -> Option<RecoveryState> {
    let bytes = files::read(path, MAX_CHECKPOINT_FORMS).ok()?;
    let line: LogLine<'_> = serde_json::from_slice(&bytes).ok()?;
    match line {
        LogLine::Snapshot { format: ..=FORMAT_VERSION, state, .. } => Some((*state).into_owned()),
        LogLine::Snapshot { .. } | LogLine::Event(_) => None,
    }
}

/// Folds the lines of `file`, the log at `path`, into `initial`. A snapshot line replaces the state so far.
fn fold_lines(mut file: impl BufRead, path: &Path, initial: RecoveryState) -> Result<LoadedLog, String> {
    let mut loaded = LoadedLog { state: initial, ..LoadedLog::default() };
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = file.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut line);
        if read.map_err(|error| unreadable_log_message(&error))? == 0 {
            return Ok(loaded);
        }
        // A newer format shares only `FirstLine` with this format.
        if let Ok(FirstLine { snapshot }) = serde_json::from_slice(&line)
            && snapshot.format > FORMAT_VERSION
        {
            let version = snapshot.build.split(' ').next().unwrap_or_default();
            return Err(format!(
                "its log was written by a newer sbcl-mcp ({version}); use that version or a newer one"
            ));
        }
        match serde_json::from_slice(&line) {
            Ok(LogLine::Snapshot { state, .. }) => {
                loaded.state = (*state).into_owned();
                loaded.has_snapshot = true;
            }
            Ok(LogLine::Event(event)) => loaded.state.apply(event.into_owned()),
            Err(_) => match serde_json::from_slice::<OldLine>(&line) {
                Ok(old) => {
                    loaded.has_snapshot |= old.is_first();
                    old.apply_to(&mut loaded.state);
                }
                // An incomplete or empty line is no error: a full disk or a crash of the machine leaves such lines.
                Err(_) if line.last() != Some(&b'\n') || line.trim_ascii().is_empty() => {}
                Err(error) => {
                    tracing::warn!(%error, "skipped an unreadable line of {}", path.display());
                    loaded.unreadable += 1;
                }
            },
        }
    }
}

/// Writes a checkpoint's definitions and unrestored forms to the checkpoint's `.forms` file. Does not wait for the disk.
pub(crate) fn write_checkpoint_forms(path: &Path, content: &RecoveryState) -> io::Result<()> {
    write_without_sync(path, &snapshot_line(content))
}

/// Returns a line with a snapshot. If the line is too long, error histories are left out; the other parts of the state
/// are bounded, and always fit.
fn snapshot_line(state: &RecoveryState) -> Vec<u8> {
    let encode_line = |state| {
        encode_line(&LogLine::Snapshot {
            format: FORMAT_VERSION,
            build: crate::build_id(),
            state: Box::new(Cow::Borrowed(state)),
        })
    };
    let complete = encode_line(state);
    if complete.len() < MAX_LINE { complete } else { encode_line(&state.without_histories()) }
}

/// Returns a line as JSON, with a newline at the end.
fn encode_line(line: &LogLine<'_>) -> Vec<u8> {
    // Serializing cannot fail: a line consists of strings, numbers, lists, and maps with string keys.
    let mut bytes = serde_json::to_vec(line).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

/// The recovery log of a running session, to which events are appended.
#[derive(Debug)]
pub(crate) struct RecoveryLog {
    path: PathBuf,
    /// The file to append to; `None` before the log is first compacted.
    file: Option<File>,
    /// The bytes that were appended since the last compaction began.
    appended_bytes: u64,
    /// The compaction in progress.
    compaction: Option<Compaction>,
    /// The reason why the log cannot be written; `None` while the log can be written. After a failure the last line may be
    /// incomplete, and later events are missing.
    failure: Option<String>,
}

impl RecoveryLog {
    /// Returns the log of a session's directory, which must be [compacted](Self::compact) before an event is appended.
    pub(crate) fn new(directory: &Path) -> Self {
        Self { path: directory.join(LOG_FILE), file: None, appended_bytes: 0, compaction: None, failure: None }
    }

    /// Replaces the log with a snapshot of `state`, and waits for the disk.
    ///
    /// # Errors
    /// Returns an error if the snapshot cannot be written, in which case the log stays as it was.
    pub(crate) fn compact(&mut self, state: &RecoveryState) -> io::Result<()> {
        // The draft of a compaction in progress is replaced.
        self.compaction = None;
        let file = write_atomically(&self.path, &snapshot_line(state));
        self.file = Some(file.inspect_err(|error| self.record_failure(error))?);
        self.appended_bytes = 0;
        self.clear_failure();
        Ok(())
    }

    /// Begins to replace a log that could not be written with a snapshot of `state`, or finishes the replacement that an
    /// earlier call began. Does not wait for the disk.
    pub(crate) fn retry(&mut self, state: &RecoveryState) {
        self.finish_compaction();
        if self.failure.is_some() && self.compaction.is_none() {
            self.begin_compaction(state);
        }
    }

    /// Begins to compact the log to a snapshot of `state`. A thread waits for the disk. Until a later append finds that
    /// the new log is on the disk, lines are appended to both logs. After an error the log stays as it was.
    pub(crate) fn begin_compaction(&mut self, state: &RecoveryState) {
        self.appended_bytes = 0;
        match Compaction::begin(&draft_path(&self.path), &snapshot_line(state)) {
            Ok(compaction) => self.compaction = Some(compaction),
            Err(error) => self.discard_compaction(&error),
        }
    }

    /// Replaces the log with the log of the compaction in progress, if that log is on the disk.
    fn finish_compaction(&mut self) {
        let finished = self.compaction.take_if(|compaction| compaction.sync.is_finished());
        let Some(Compaction { file, sync }) = finished else { return };
        let synced =
            sync.join().unwrap_or_else(|_| Err(io::Error::other("the thread that writes the new log panicked")));
        match synced.and_then(|()| std::fs::rename(draft_path(&self.path), &self.path)) {
            Ok(()) => {
                self.file = Some(file);
                self.clear_failure();
            }
            Err(error) => self.discard_compaction(&error),
        }
    }

    /// Discards the compaction in progress, which failed with `error`. The log stays as it was.
    fn discard_compaction(&mut self, error: &io::Error) {
        if let Some(failure) = &mut self.failure {
            *failure = error.to_string();
        } else {
            tracing::warn!(
                "the session's log {} cannot be compacted, and continues to grow: {error}",
                self.path.display()
            );
        }
        self.compaction = None;
        let _ = std::fs::remove_file(draft_path(&self.path));
    }

    /// Appends an event. After a failure, appends the event only to the log of a compaction in progress. Returns true when
    /// the log has grown so much that it must be compacted.
    pub(crate) fn append(&mut self, event: &SessionEvent) -> bool {
        self.append_line(|| encode_line(&LogLine::Event(Cow::Borrowed(event))));
        self.failure.is_none() && self.compaction.is_none() && self.appended_bytes > COMPACTION_THRESHOLD
    }

    /// Appends a snapshot of `state`, which has changed without an event, in the same way.
    pub(crate) fn append_snapshot(&mut self, state: &RecoveryState) {
        self.append_line(|| snapshot_line(state));
    }

    fn append_line(&mut self, encode: impl FnOnce() -> Vec<u8>) {
        self.finish_compaction();
        let file = self.file.as_mut().filter(|_| self.failure.is_none());
        if file.is_none() && self.compaction.is_none() {
            return;
        }
        let line = encode();
        self.appended_bytes += line.len() as u64;
        if let Some(file) = file
            && let Err(error) = file.write_all(&line)
        {
            self.record_failure(&error);
        }
        // A new log that lacks a line must not replace the log.
        if let Some(compaction) = &mut self.compaction
            && let Err(error) = compaction.file.write_all(&line)
        {
            self.discard_compaction(&error);
        }
    }

    /// Records that the log cannot be written, in memory and, for the next server, in the [`INCOMPLETE_MARKER_FILE`] file.
    fn record_failure(&mut self, error: &io::Error) {
        if self.failure.is_none() && self.file.is_some() {
            tracing::warn!("the session's log {} cannot be written: {error}", self.path.display());
            // An empty file usually fits on a full disk. If the file cannot be created, the next server does not report
            // that the log is incomplete. An older marker stays.
            let mut options = OpenOptions::new();
            let _ =
                options.write(true).create_new(true).mode(0o600).open(self.path.with_file_name(INCOMPLETE_MARKER_FILE));
        }
        self.failure = Some(error.to_string());
        self.compaction = None;
    }

    /// Records that the log can be written again, and is complete.
    fn clear_failure(&mut self) {
        self.failure = None;
        // The error is ignored, because the marker usually does not exist.
        let _ = std::fs::remove_file(self.path.with_file_name(INCOMPLETE_MARKER_FILE));
    }

    /// Returns the reason why the log cannot be written; `None` while the log can be written.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

/// A compaction in progress: a new log, which replaces the log once the new log is on the disk.
#[derive(Debug)]
struct Compaction {
    /// The new log, which is a draft until the thread has ended.
    file: File,
    /// The thread that waits until the snapshot is on the disk.
    sync: JoinHandle<io::Result<()>>,
}

impl Compaction {
    /// Writes `snapshot` to the file `draft`, and begins to wait for the disk.
    fn begin(draft: &Path, snapshot: &[u8]) -> io::Result<Self> {
        let mut file = files::create(draft)?;
        file.write_all(snapshot)?;
        let written = file.try_clone()?;
        let sync = thread::Builder::new().name("sbcl-mcp-log".to_owned()).spawn(move || written.sync_all())?;
        Ok(Self { file, sync })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::outcome::{Changes, DefiningForm};
    use crate::recovery::definitions::Definition;

    fn defined(code: &str, evaluation: u64) -> SessionEvent {
        let form = DefiningForm { code: code.to_owned(), package: "COMMON-LISP-USER".to_owned() };
        let changes = Changes::default();
        SessionEvent::Defined(Definition {
            form,
            changes,
            local: false,
            attached: false,
            evaluation,
            took: 1,
            too_long: None,
        })
    }

    fn state(events: impl IntoIterator<Item = SessionEvent>) -> RecoveryState {
        let mut state = RecoveryState::new(true);
        events.into_iter().for_each(|event| state.apply(event));
        state
    }

    fn codes(directory: &Path) -> Vec<String> {
        load(directory).unwrap().state.definitions().map(|definition| definition.form.code.clone()).collect()
    }

    fn directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[test]
    fn a_truncated_log_is_read_up_to_its_last_complete_line() {
        let directory = directory("log");
        let mut log = RecoveryLog::new(&directory);
        log.compact(&state([defined("(a)", 3)])).unwrap();
        log.append(&SessionEvent::Saving { file: "x.core".to_owned() });
        log.append(&defined("(b)", 9));
        let content = std::fs::read(&log.path).unwrap();
        let mut seen = 0;
        for end in 0..=content.len() {
            std::fs::write(&log.path, &content[..end]).unwrap();
            let loaded = load(&directory).unwrap();
            let count = loaded.state.definitions().count();
            assert!(count >= seen && loaded.unreadable == 0, "{end}");
            seen = count;
        }
        assert_eq!(codes(&directory), ["(a)", "(b)"]);
        let loaded = load(&directory).unwrap();
        assert_eq!(loaded.state.saved_files(), ["x.core"]);
        assert_eq!(loaded.state.evaluations, 9);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn events_missing_from_the_log_after_a_full_disk_are_written_when_it_is_compacted() {
        let directory = directory("full-log");
        let mut log = RecoveryLog::new(&directory);
        log.compact(&state([defined("(a)", 1)])).unwrap();
        assert!(!log.append(&defined("(b)", 2)));
        let file = log.file.replace(OpenOptions::new().append(true).open("/dev/full").unwrap());
        assert!(!log.append(&defined("(c)", 3)) && !log.append(&defined("(d)", 4)));
        assert!(log.failure().is_some() && incomplete_since(&directory).is_some());
        log.file = file;
        // The file can be written again, but only a compaction restores the missing events.
        assert!(!log.append(&defined("(e)", 5)));
        // A directory with the draft's name makes the compaction fail.
        let draft = log.path.with_extension("draft");
        std::fs::create_dir(&draft).unwrap();
        assert!(log.compact(&state((1..6).map(|number| defined("(f)", number)))).is_err());
        assert_eq!(codes(&directory).len(), 2);
        assert!(!log.append(&defined("(g)", 6)) && log.failure().is_some());
        std::fs::remove_dir(&draft).unwrap();
        log.compact(&state((1..8).map(|number| defined("(h)", number)))).unwrap();
        assert_eq!((codes(&directory).len(), log.failure(), incomplete_since(&directory)), (7, None, None));
        assert!(!log.append(&defined("(i)", 8)));
        assert_eq!(codes(&directory).len(), 8);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// Makes the compaction in progress wait for the disk until the returned sender is dropped.
    fn slow_down(log: &mut RecoveryLog) -> mpsc::Sender<()> {
        let (end, ended) = mpsc::channel();
        let sync = thread::spawn(move || {
            let _ = ended.recv();
            Ok(())
        });
        log.compaction.as_mut().unwrap().sync = sync;
        end
    }

    #[test]
    fn lines_that_are_appended_during_a_compaction_are_in_the_old_log_and_in_the_new_log() {
        let directory = directory("compaction");
        let mut log = RecoveryLog::new(&directory);
        log.compact(&state([defined("(a)", 1)])).unwrap();
        log.append(&defined("(b)", 2));
        // Another definition distinguishes the new log from the old log.
        log.begin_compaction(&state([defined("(new)", 2)]));
        let end = slow_down(&mut log);
        log.append(&defined("(c)", 3));
        assert_eq!(codes(&directory), ["(a)", "(b)", "(c)"]);
        drop(end);
        while !log.compaction.as_ref().unwrap().sync.is_finished() {
            thread::yield_now();
        }
        log.append(&defined("(d)", 4));
        assert_eq!(codes(&directory), ["(new)", "(c)", "(d)"]);
        assert!(log.compaction.is_none() && log.failure().is_none());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_new_log_that_lacks_a_line_does_not_replace_the_log() {
        let directory = directory("failed-compaction");
        let full = || OpenOptions::new().append(true).open("/dev/full").unwrap();
        let mut log = RecoveryLog::new(&directory);
        log.compact(&state([defined("(a)", 1)])).unwrap();
        log.begin_compaction(&state([defined("(new)", 1)]));
        let _end = slow_down(&mut log);
        log.compaction.as_mut().unwrap().file = full();
        log.append(&defined("(b)", 2));
        assert!(log.compaction.is_none() && log.failure().is_none() && !draft_path(&log.path).exists());
        assert_eq!(codes(&directory), ["(a)", "(b)"]);
        log.begin_compaction(&state([defined("(new)", 2)]));
        let _end = slow_down(&mut log);
        log.file = Some(full());
        log.append(&defined("(c)", 3));
        assert!(log.compaction.is_none() && log.failure().is_some());
        log.compact(&state([defined("(d)", 4)])).unwrap();
        assert_eq!((codes(&directory), log.failure()), (vec!["(d)".to_owned()], None));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_failed_log_is_replaced_without_waiting_for_the_disk() {
        let directory = directory("retried-log");
        let mut log = RecoveryLog::new(&directory);
        log.compact(&state([defined("(a)", 1)])).unwrap();
        log.file = Some(OpenOptions::new().append(true).open("/dev/full").unwrap());
        log.append(&defined("(b)", 2));
        // A directory with the draft's name makes the first attempt fail.
        std::fs::create_dir(draft_path(&log.path)).unwrap();
        log.retry(&state([defined("(a)", 1), defined("(b)", 2)]));
        assert!(log.compaction.is_none() && log.failure().is_some());
        std::fs::remove_dir(draft_path(&log.path)).unwrap();
        log.retry(&state([defined("(a)", 1), defined("(b)", 2)]));
        let end = slow_down(&mut log);
        log.append(&defined("(c)", 3));
        log.retry(&RecoveryState::default());
        assert!(log.failure().is_some() && incomplete_since(&directory).is_some());
        drop(end);
        while !log.compaction.as_ref().unwrap().sync.is_finished() {
            thread::yield_now();
        }
        log.retry(&RecoveryState::default());
        assert_eq!((codes(&directory).len(), log.failure(), incomplete_since(&directory)), (3, None, None));
        log.append(&defined("(d)", 4));
        assert_eq!(codes(&directory), ["(a)", "(b)", "(c)", "(d)"]);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn an_appended_snapshot_replaces_the_lines_before_it() {
        let directory = directory("snapshots");
        let mut log = RecoveryLog::new(&directory);
        log.compact(&state([defined("(a)", 1)])).unwrap();
        log.append(&defined("(b)", 2));
        log.append_snapshot(&state([defined("(c)", 3)]));
        log.append(&defined("(d)", 4));
        assert_eq!(codes(&directory), ["(c)", "(d)"]);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_file_that_is_incomplete_or_too_large_or_has_more_lines_has_no_forms() {
        let directory = directory("forms");
        let path = directory.join("x.forms");
        write_checkpoint_forms(&path, &state([defined("(a)", 1)])).unwrap();
        assert_eq!(load_checkpoint_forms(&path).unwrap().definitions().count(), 1);
        let content = std::fs::read(&path).unwrap();
        let mut longer = content.clone();
        longer.extend(b"x\n");
        let mut large = content.clone();
        large.resize(usize::try_from(MAX_CHECKPOINT_FORMS).unwrap(), b' ');
        std::fs::write(&path, &large).unwrap();
        assert_eq!(load_checkpoint_forms(&path).unwrap().definitions().count(), 1);
        large.push(b' ');
        for other in [&content[..0], &content[..content.len() / 2], &longer[..], &large[..]] {
            std::fs::write(&path, other).unwrap();
            assert!(load_checkpoint_forms(&path).is_none());
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn lines_that_cannot_be_read_are_counted_and_a_newer_log_is_refused() {
        let directory = directory("strange-log");
        let mut log = RecoveryLog::new(&directory);
        log.compact(&state([defined("(a)", 1)])).unwrap();
        log.append(&defined("(b)", 2));
        let text = std::fs::read_to_string(&log.path).unwrap();
        let unknown = text.replace("\"event\"", "\"happening\"");
        std::fs::write(&log.path, format!("{unknown}{}\n", text.lines().nth(1).unwrap())).unwrap();
        let loaded = load(&directory).unwrap();
        assert_eq!((loaded.unreadable, loaded.state.definitions().count()), (1, 2));
        let copy = copy_damaged_log(&directory).unwrap();
        assert_eq!(std::fs::read(copy).unwrap(), std::fs::read(&log.path).unwrap());
        // The second text is a newer format whose state cannot be read here.
        for newer in [text.clone(), text.replace("\"definitions\":", "\"definitions\":7,\"other\":")] {
            std::fs::write(&log.path, newer.replace("\"format\":2", "\"format\":3")).unwrap();
            assert!(load(&directory).unwrap_err().starts_with("its log was written by a newer sbcl-mcp (0."));
            assert!(has_readable_log(&directory));
        }
        std::fs::remove_file(&log.path).unwrap();
        std::fs::create_dir(&log.path).unwrap();
        assert!(load(&directory).unwrap_err().starts_with("its log cannot be read (not a regular file"));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_log_of_an_earlier_build_is_read() {
        let directory = directory("old-log");
        let lines = [
            r#"{"from":{"evaluations":7,"dropped":1}}"#,
            r#"{"errors":{"last":null,"history":{"errors":[],"bytes":0},"count":4}}"#,
            r#"{"unrestored":[{"form":{"code":"(c)","package":"APP"},"reason":"it failed"}]}"#,
            r#"{"form":{"form":{"code":"(a)","package":"APP"},"local":false,"evaluation":3,"took":1}}"#,
            r#"{"saving":"x.core"}"#,
            r#"{"form":{"form":{"code":"(b)","package":"APP"},"local":true,"evaluation":9}}"#,
            r#"{"error":{"added":null,"last":null}}"#,
        ];
        std::fs::write(directory.join(LOG_FILE), lines.join("\n") + "\n").unwrap();
        assert!(has_readable_log(&directory));
        let LoadedLog { state, unreadable, .. } = load(&directory).unwrap();
        let codes: Vec<_> = state.definitions().map(|definition| &*definition.form.code).collect();
        assert_eq!((codes, state.saved_files(), unreadable), (vec!["(a)", "(b)"], vec!["x.core".to_owned()], 0));
        assert_eq!((state.evaluations, state.dropped_since_checkpoint(), state.clients[&0].errors.count), (9, 1, 4));
        assert_eq!(state.unrestored.iter().len(), 1);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
