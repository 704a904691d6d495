//! Session recordings: every line in both directions, with times, in a file that `sbcl-mcp replay` plays back.
//!
//! The file has one JSON object per line: a [`RecordingHeader`], then a [`RecordingEntry`] for each line.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use crate::os::files;

/// Maximum size of a recording, in bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Maximum size of the waiting entries of a recording, in bytes of memory.
const MAX_WAITING_BYTES: usize = 128 << 20;
/// Bytes reserved for the note that ends a full recording.
const FINAL_NOTE_BYTES: u64 = 200;
/// The note that ends a full recording.
const FULL: &str = "the recording is full; the rest of the session is not recorded";
/// The note that ends a recording whose file accepts entries too slowly.
const TOO_SLOW: &str = "the recording is written too slowly; the rest of the session is not recorded";
/// Maximum number of bytes read in search of a header, since the file may contain anything.
const MAX_HEADER: u64 = 1 << 20;

/// The first line of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RecordingHeader {
    /// Version of the server.
    pub(crate) sbcl_mcp: String,
    /// Version of SBCL in the server.
    pub(crate) sbcl: String,
    /// Time at which the recording began.
    pub(crate) recorded: String,
    /// Command line arguments of the server.
    pub(crate) arguments: Vec<String>,
}

/// The sender of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    Client,
    Server,
}

/// A record: a line, a line that was left out, or the note that ends a recording before the end of the session.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecordingEntry {
    /// Seconds since the recording began.
    pub(crate) at: f64,
    /// Sender of the line. `None` for the note that ends a recording before the end of the session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<Side>,
    /// The line without its newline. Bytes that are not UTF-8 become U+FFFD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) line: Option<String>,
    /// The bytes of a line that is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<Vec<u8>>,
    /// The reason why the record has no line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

impl RecordingEntry {
    /// Returns the note that ends a recording.
    fn final_note(at: f64, note: &str) -> Self {
        Self { at, note: Some(note.to_owned()), ..Self::default() }
    }

    /// Returns the size of an entry that waits to be written, in bytes of memory.
    fn waiting_bytes(&self) -> usize {
        size_of::<Self>() + self.bytes.as_ref().map_or(0, Vec::len)
    }

    /// Decodes the line of an entry that waits to be written. Keeps the bytes only if they are not UTF-8.
    fn decode_line(mut self) -> Self {
        match self.bytes.take().map(String::from_utf8) {
            Some(Ok(line)) => self.line = Some(line),
            Some(Err(error)) => {
                self.line = Some(String::from_utf8_lossy(error.as_bytes()).into_owned());
                self.bytes = Some(error.into_bytes());
            }
            None => {}
        }
        self
    }

    /// Returns the entry as JSON, with a newline at the end.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }
}

/// A recording in progress. A thread of its own encodes and writes the entries, so no caller waits for the disk. A write
/// error, or a file that accepts entries too slowly, ends the recording and does not affect the session. If the process
/// is killed or crashes, the waiting entries are lost.
#[derive(Debug, Clone)]
pub(crate) struct Recorder(Arc<Recording>);

#[derive(Debug)]
struct Recording {
    begin: Instant,
    /// Maximum size of the waiting entries, in bytes of memory. An entry may be larger if no other entry waits.
    max_bytes: usize,
    queue: Mutex<Queue>,
    /// Notified when entries are added or written, and when the recording ends.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// The entries that wait to be written, oldest first. Lines are not [decoded](RecordingEntry::decode_line) yet. While
    /// an entry is written, an empty entry is in its place.
    entries: VecDeque<RecordingEntry>,
    /// The size of the entries, in bytes of memory.
    bytes: usize,
    /// True once no more entries are recorded.
    has_ended: bool,
}

/// The file of a recording.
#[derive(Debug)]
struct RecordingWriter {
    file: File,
    bytes_left: u64,
}

impl Recorder {
    /// Begins a recording at `path`. The file may be new, empty, or an earlier recording, which is overwritten.
    ///
    /// # Errors
    /// Returns a sentence for the user if the file cannot be written, has other content, or is not a regular file.
    pub(crate) fn begin(path: &Path, header: &RecordingHeader) -> Result<Self, String> {
        Self::begin_bounded(path, header, MAX_BYTES)
    }

    fn begin_bounded(path: &Path, header: &RecordingHeader, bytes: u64) -> Result<Self, String> {
        let reason = |error: io::Error| format!("cannot record to {}: {error}", path.display());
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = files::open_regular(&mut options, path).map_err(reason)?;
        let data = file.metadata().map_err(reason)?;
        if data.len() > 0 && read_header(&mut BufReader::new(&file)).is_none() {
            return Err(format!(
                "cannot record to {}: it contains something other than a recording; name another file",
                path.display()
            ));
        }
        file.set_len(0).and_then(|()| file.set_permissions(PermissionsExt::from_mode(0o600))).map_err(reason)?;
        // The file is opened again to append: reading the header has moved the offset of the first descriptor.
        let mut file = OpenOptions::new().append(true).open(path).map_err(reason)?;
        let line = serde_json::to_vec(header).map(|line| [line, b"\n".to_vec()].concat()).unwrap_or_default();
        file.write_all(&line).map_err(reason)?;
        let bytes_left = bytes.saturating_sub(line.len() as u64);
        Self::start(RecordingWriter { file, bytes_left }, MAX_WAITING_BYTES).map_err(reason)
    }

    /// Starts the thread that writes the entries.
    fn start(writer: RecordingWriter, max_bytes: usize) -> io::Result<Self> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let recorder = Self(Arc::new(Recording { begin: Instant::now(), max_bytes, queue, changed }));
        let recording = recorder.0.clone();
        let thread = std::thread::Builder::new().name("sbcl-mcp-record".to_owned());
        thread.spawn(move || recording.write_entries(writer)).map(|_| recorder)
    }

    /// Ends the recording, and waits until the waiting entries are written, but not longer than until `deadline`.
    pub(crate) fn finish(&self, deadline: Instant) {
        let mut queue = self.0.queue.lock();
        queue.has_ended = true;
        self.0.changed.notify_all();
        while !queue.entries.is_empty() && !self.0.changed.wait_until(&mut queue, deadline).timed_out() {}
    }

    /// Records a line that the side `from` sent. `line` may end with a newline.
    pub(crate) fn record_line(&self, from: Side, line: &[u8]) {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        self.append(RecordingEntry { from: Some(from), bytes: Some(line.to_vec()), ..RecordingEntry::default() });
    }

    /// Records that a line was left out, with `note` as the reason.
    pub(crate) fn record_skipped(&self, from: Side, note: &str) {
        self.append(RecordingEntry { from: Some(from), note: Some(note.to_owned()), ..RecordingEntry::default() });
    }

    /// Adds an entry to the waiting entries, and sets its time.
    fn append(&self, entry: RecordingEntry) {
        let mut queue = self.0.queue.lock();
        if queue.has_ended {
            return;
        }
        let at = self.0.begin.elapsed().as_secs_f64();
        let entry = if queue.entries.is_empty() || queue.bytes + entry.waiting_bytes() <= self.0.max_bytes {
            RecordingEntry { at, ..entry }
        } else {
            tracing::warn!("{TOO_SLOW}");
            queue.has_ended = true;
            RecordingEntry::final_note(at, TOO_SLOW)
        };
        queue.bytes += entry.waiting_bytes();
        queue.entries.push_back(entry);
        self.0.changed.notify_all();
    }
}

impl Recording {
    /// Writes the entries until the recording ends.
    fn write_entries(&self, mut writer: RecordingWriter) {
        let mut queue = self.queue.lock();
        loop {
            let Some(entry) = queue.entries.front_mut().map(std::mem::take) else {
                if queue.has_ended {
                    return;
                }
                self.changed.wait(&mut queue);
                continue;
            };
            let bytes = entry.waiting_bytes();
            let is_written = MutexGuard::unlocked(&mut queue, || writer.write(entry));
            if is_written {
                queue.entries.pop_front();
                queue.bytes -= bytes;
            } else {
                queue.entries.clear();
                queue.has_ended = true;
            }
            self.changed.notify_all();
        }
    }
}

impl RecordingWriter {
    /// Writes an entry. Returns false if the recording ends, because the file is full or cannot be written.
    fn write(&mut self, entry: RecordingEntry) -> bool {
        let at = entry.at;
        let bytes = entry.decode_line().encode();
        let length = bytes.len() as u64;
        if length + FINAL_NOTE_BYTES > self.bytes_left {
            let _ = self.file.write_all(&RecordingEntry::final_note(at, FULL).encode());
            tracing::warn!("{FULL}");
            return false;
        }
        self.bytes_left -= length;
        let written = self.file.write_all(&bytes);
        if let Err(error) = &written {
            tracing::warn!(%error, "cannot write to the recording; the rest of the session is not recorded");
        }
        written.is_ok()
    }
}

/// Reads the header of a recording. Returns `None` if the file does not begin with a header.
pub(crate) fn read_header(file: &mut impl BufRead) -> Option<RecordingHeader> {
    let mut line = Vec::new();
    file.take(MAX_HEADER).read_until(b'\n', &mut line).ok()?;
    serde_json::from_slice(&line).ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    use super::*;

    fn header() -> RecordingHeader {
        RecordingHeader {
            sbcl_mcp: "0".to_owned(),
            sbcl: "0".to_owned(),
            recorded: String::new(),
            arguments: Vec::new(),
        }
    }

    #[test]
    fn a_full_recording_ends_with_a_note_and_has_no_partial_lines() {
        let path = std::env::temp_dir().join(format!("sbcl-mcp-recorder-{}", std::process::id()));
        let recorder = Recorder::begin_bounded(&path, &header(), 2_000).unwrap();
        for number in 0..100 {
            recorder.record_line(Side::Client, format!("{{\"number\": {number}}}\n").as_bytes());
        }
        recorder.finish(Instant::now() + Duration::from_secs(20));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() <= 2_000 && text.ends_with('\n'), "{}", text.len());
        let mut file = BufReader::new(text.as_bytes());
        assert_eq!(read_header(&mut file), Some(header()));
        let records: Vec<RecordingEntry> =
            file.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        let (last, lines) = records.split_last().unwrap();
        assert_eq!(last.note.as_deref(), Some(FULL));
        assert!(
            lines.len() > 10
                && lines.iter().enumerate().all(|(number, record)| {
                    record.line.as_deref() == Some(&*format!("{{\"number\": {number}}}"))
                        && record.from == Some(Side::Client)
                })
        );
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_recording_whose_file_accepts_no_bytes_blocks_no_caller_and_ends_with_a_note() {
        // The pipe has room for two lines. Three more lines may wait.
        let (reader, pipe) = io::pipe().unwrap();
        let writer = RecordingWriter { file: OwnedFd::from(pipe).into(), bytes_left: MAX_BYTES };
        let recorder = Recorder::start(writer, 100_000).unwrap();
        let line = [b'x'; 30_000];
        (0..10).for_each(|_| recorder.record_line(Side::Server, &line));
        assert!(recorder.0.queue.lock().has_ended);
        // The pipe closes once all waiting entries are written.
        let records: Vec<RecordingEntry> =
            BufReader::new(reader).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        let (last, lines) = records.split_last().unwrap();
        assert_eq!((last.from, last.note.as_deref()), (None, Some(TOO_SLOW)));
        assert!((3..=5).contains(&lines.len()), "{} lines", lines.len());
        assert!(lines.iter().all(|record| record.line.as_ref().is_some_and(|text| text.as_bytes() == line)));
    }

    #[test]
    fn a_line_longer_than_all_waiting_lines_may_be_is_recorded_if_no_other_line_waits() {
        let (reader, pipe) = io::pipe().unwrap();
        let writer = RecordingWriter { file: OwnedFd::from(pipe).into(), bytes_left: MAX_BYTES };
        let recorder = Recorder::start(writer, 1_000).unwrap();
        let line = "x".repeat(2_000);
        recorder.record_line(Side::Server, line.as_bytes());
        // The pipe closes once the line is written.
        recorder.finish(Instant::now() + Duration::from_secs(20));
        let records: Vec<RecordingEntry> =
            BufReader::new(reader).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        assert_eq!(records.iter().map(|record| record.line.as_deref()).collect::<Vec<_>>(), [Some(&*line)]);
    }

    #[test]
    fn a_line_that_is_not_utf_8_is_recorded_with_its_bytes() {
        let decoded = |bytes: &[u8]| {
            let waiting = RecordingEntry { bytes: Some(bytes.to_vec()), ..RecordingEntry::default() };
            let RecordingEntry { line, bytes, .. } = waiting.decode_line();
            (line.unwrap(), bytes)
        };
        assert_eq!(decoded("ünïcode".as_bytes()), ("ünïcode".to_owned(), None));
        assert_eq!(decoded(b"what\xFF"), ("what\u{FFFD}".to_owned(), Some(b"what\xFF".to_vec())));
    }
}
