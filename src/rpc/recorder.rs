//! Session recordings: every line in both directions, with times, in a file that `sbcl-mcp replay` plays back.
//!
//! The file has one JSON object per line: a [`RecordingHeader`], then a [`RecordingEntry`] for each line.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::os::files;

/// Maximum size of a recording, in bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Bytes reserved for the note that ends a full recording.
const FINAL_NOTE_BYTES: u64 = 200;
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

/// A record: a line, a line that was left out, or the note that ends a full recording.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecordingEntry {
    /// Seconds since the recording began.
    pub(crate) at: f64,
    /// Sender of the line. `None` for the note that ends a full recording.
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

/// The writer of a recording. A write error ends the recording and does not affect the session.
#[derive(Debug, Clone)]
pub(crate) struct Recorder(Arc<Mutex<RecordingState>>);

#[derive(Debug)]
struct RecordingState {
    /// The file; `None` once the recording is full or a write has failed.
    file: Option<File>,
    begin: Instant,
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
        Ok(Self(Arc::new(Mutex::new(RecordingState { file: Some(file), begin: Instant::now(), bytes_left }))))
    }

    /// Records a line that the side `from` sent. `line` may end with a newline.
    pub(crate) fn record_line(&self, from: Side, line: &[u8]) {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let text = String::from_utf8_lossy(line);
        let bytes = matches!(text, Cow::Owned(_)).then(|| line.to_vec());
        self.append(RecordingEntry {
            from: Some(from),
            line: Some(text.into_owned()),
            bytes,
            ..RecordingEntry::default()
        });
    }

    /// Records that a line was left out, with `note` as the reason.
    pub(crate) fn record_skipped(&self, from: Side, note: &str) {
        self.append(RecordingEntry { from: Some(from), note: Some(note.to_owned()), ..RecordingEntry::default() });
    }

    fn append(&self, record: RecordingEntry) {
        let mut state = self.0.lock();
        let Some(mut file) = state.file.take() else { return };
        let at = state.begin.elapsed().as_secs_f64();
        let encode = |record: &RecordingEntry| {
            let mut bytes = serde_json::to_vec(record).unwrap_or_default();
            bytes.push(b'\n');
            bytes
        };
        let bytes = encode(&RecordingEntry { at, ..record });
        let length = bytes.len() as u64;
        if length + FINAL_NOTE_BYTES > state.bytes_left {
            let note = Some("the recording is full; the rest of the session is not recorded".to_owned());
            let _ = file.write_all(&encode(&RecordingEntry { at, note, ..RecordingEntry::default() }));
            tracing::warn!("the recording is full; the rest of the session is not recorded");
            return;
        }
        match file.write_all(&bytes) {
            Ok(()) => {
                state.bytes_left -= length;
                state.file = Some(file);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot write to the recording; the rest of the session is not recorded");
            }
        }
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
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() <= 2_000 && text.ends_with('\n'), "{}", text.len());
        let mut file = BufReader::new(text.as_bytes());
        assert_eq!(read_header(&mut file), Some(header()));
        let records: Vec<RecordingEntry> =
            file.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        let (last, lines) = records.split_last().unwrap();
        assert_eq!(last.note.as_deref(), Some("the recording is full; the rest of the session is not recorded"));
        assert!(
            lines.len() > 10
                && lines.iter().enumerate().all(|(number, record)| {
                    record.line.as_deref() == Some(&*format!("{{\"number\": {number}}}"))
                        && record.from == Some(Side::Client)
                })
        );
        std::fs::remove_file(&path).unwrap();
    }
}
