//! The recovery log of a persistent session: a snapshot of the [state](RecoveryState), followed by the events since the
//! snapshot, one JSON object per line.
//!
//! The supervisor appends the events that [outlive a server](SessionEvent::outlives_server). It compacts the log to a
//! snapshot when the log has grown, and when the state has changed without an event: by a reset, by the restore of a
//! checkpoint, or by forms that failed in a replay. Reading ignores an incomplete last line. A session that is not
//! persistent has no log: its state is only in memory.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::checkpoint::store::write_atomically;
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
/// Maximum number of bytes that are read of a `.forms` file: a snapshot is one line. Version 0.1 wrote several lines.
const MAX_FORMS_BYTES: u64 = 2 * MAX_LINE as u64;
/// The version of the log's format. A log with a higher version is not read.
const FORMAT_VERSION: u32 = 2;

/// A line of the log.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogLine<'a> {
    /// The state when the log was compacted, as the first line of the log.
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
    /// True when the log has a readable snapshot or the first line of a log of version 0.1; false without a log.
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
    match files::open(&directory.join(LOG_FILE)) {
        Ok(file) => fold_lines(BufReader::new(file), initial),
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

/// Reads a checkpoint's definitions and unrestored forms from the checkpoint's `.forms` file. Returns `None` if the file
/// cannot be read.
pub(crate) fn load_checkpoint_forms(path: &Path) -> Option<RecoveryState> {
    let file = files::open(path).ok()?.take(MAX_FORMS_BYTES);
    Some(fold_lines(BufReader::new(file), RecoveryState::default()).ok()?.state)
}

/// Folds the lines of a log into `initial`. A snapshot line replaces the state so far.
fn fold_lines(mut file: impl BufRead, initial: RecoveryState) -> Result<LoadedLog, String> {
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
            let build = snapshot.build;
            return Err(format!("its log was written by a newer sbcl-mcp ({build}); use that version or a newer one"));
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
                    tracing::warn!(%error, "skipped an unreadable line of a session's log or checkpoint");
                    loaded.unreadable += 1;
                }
            },
        }
    }
}

/// Writes a checkpoint's definitions and unrestored forms to the checkpoint's `.forms` file.
pub(crate) fn write_checkpoint_forms(path: &Path, content: &RecoveryState) -> io::Result<()> {
    write_atomically(path, &snapshot_line(content)).map(drop)
}

/// Returns the first line of a log. If the line is too long, error histories are left out; the other parts of the state
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
    /// The bytes that were appended since the log was compacted.
    appended_bytes: u64,
    /// The reason why the log cannot be written; `None` while the log can be written. After a failure the last line may be
    /// incomplete, and later events are missing.
    failure: Option<String>,
}

impl RecoveryLog {
    /// Returns the log of a session's directory, which must be [compacted](Self::compact) before an event is appended.
    pub(crate) fn new(directory: &Path) -> Self {
        Self { path: directory.join(LOG_FILE), file: None, appended_bytes: 0, failure: None }
    }

    /// Replaces the log with a snapshot of `state`.
    ///
    /// # Errors
    /// Returns an error if the snapshot cannot be written, in which case the log stays as it was.
    pub(crate) fn compact(&mut self, state: &RecoveryState) -> io::Result<()> {
        let file = write_atomically(&self.path, &snapshot_line(state));
        self.file = Some(file.inspect_err(|error| self.record_failure(error))?);
        (self.appended_bytes, self.failure) = (0, None);
        // The error is ignored, because the marker usually does not exist.
        let _ = std::fs::remove_file(self.path.with_file_name(INCOMPLETE_MARKER_FILE));
        Ok(())
    }

    /// Appends an event. Does nothing after a failure, until the log is compacted. Returns true when the log has grown
    /// so much that it must be compacted.
    pub(crate) fn append(&mut self, event: &SessionEvent) -> bool {
        if self.failure.is_some() {
            return false;
        }
        let line = encode_line(&LogLine::Event(Cow::Borrowed(event)));
        if let Some(file) = &mut self.file {
            self.appended_bytes += line.len() as u64;
            if let Err(error) = file.write_all(&line) {
                self.record_failure(&error);
            }
        }
        self.failure.is_none() && self.appended_bytes > COMPACTION_THRESHOLD
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
    }

    /// Returns the reason why the log cannot be written; `None` while the log can be written.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::{Changes, DefiningForm};
    use crate::recovery::definitions::Definition;

    fn defined(code: &str, evaluation: u64) -> SessionEvent {
        let form = DefiningForm { code: code.to_owned(), package: "COMMON-LISP-USER".to_owned() };
        let changes = Changes::default();
        SessionEvent::Defined(Definition { form, changes, local: false, evaluation, took: 1, too_long: None })
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
        assert!(load(&directory).unwrap_err().starts_with("its log cannot be read (it is not a regular file"));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_log_of_version_0_1_is_read() {
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
        assert_eq!(state.unrestored.len(), 1);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
