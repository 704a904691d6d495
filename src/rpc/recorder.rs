//! A recording: every line of a session, both ways, with times, in a file that `sbcl-mcp replay` plays.
//!
//! The file has one JSON object a line: a [`Header`], then a [`Record`] for each line of the session.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// How many bytes a recording may have.
const MAX_BYTES: u64 = 256 << 20;
/// What is left for the last word.
const LAST_WORD: u64 = 200;
/// Bytes of a header that are read at most: there may be anything in a file.
const MAX_HEADER: u64 = 1 << 20;

/// What a recording begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Header {
    /// The version of the server.
    pub(crate) sbcl_mcp: String,
    /// The version of SBCL in it.
    pub(crate) sbcl: String,
    /// When it began.
    pub(crate) recorded: String,
    /// What the server was started with.
    pub(crate) arguments: Vec<String>,
}

/// Who wrote a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    Client,
    Server,
}

/// A line of the session.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Seconds since the recording began.
    pub(crate) at: f64,
    /// Whose it is; nobody's when it is the last word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<Side>,
    /// The line without its newline; what is not UTF-8 in it is U+FFFD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) line: Option<String>,
    /// The line's bytes, where it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<Vec<u8>>,
    /// Why there is no line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

/// Writes a recording. What fails ends the recording and nothing else.
#[derive(Debug, Clone)]
pub(crate) struct Recorder(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Until it is full, or cannot be written.
    file: Option<File>,
    begin: Instant,
    left: u64,
}

impl Recorder {
    /// Begins a recording in `path`: a new file, an empty one, or another recording, which it replaces.
    ///
    /// # Errors
    /// A sentence: the file cannot be written, or has something else in it, or is none that never makes anybody wait.
    pub(crate) fn begin(path: &Path, header: &Header) -> Result<Self, String> {
        Self::begin_bounded(path, header, MAX_BYTES)
    }

    fn begin_bounded(path: &Path, header: &Header, bytes: u64) -> Result<Self, String> {
        let reason = |error: io::Error| format!("{} cannot be recorded to: {error}", path.display());
        let mut options = OpenOptions::new();
        // A FIFO would make whoever opens it wait.
        let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(nonblocking);
        let file = options.open(path).map_err(reason)?;
        let data = file.metadata().map_err(reason)?;
        if !data.is_file() {
            return Err(format!("{} cannot be recorded to: it is no regular file", path.display()));
        }
        if data.len() > 0 && read_header(&mut BufReader::new(&file)).is_none() {
            return Err(format!("{} has something else than a recording in it: name another file", path.display()));
        }
        file.set_len(0).and_then(|()| file.set_permissions(PermissionsExt::from_mode(0o600))).map_err(reason)?;
        // Opened for reading and writing at one place.
        let mut file = OpenOptions::new().append(true).open(path).map_err(reason)?;
        let line = serde_json::to_vec(header).map(|line| [line, b"\n".to_vec()].concat()).unwrap_or_default();
        file.write_all(&line).map_err(reason)?;
        let left = bytes.saturating_sub(line.len() as u64);
        Ok(Self(Arc::new(Mutex::new(State { file: Some(file), begin: Instant::now(), left }))))
    }

    /// Records a line, with its newline or without.
    pub(crate) fn line(&self, from: Side, line: &[u8]) {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let text = String::from_utf8_lossy(line);
        let bytes = matches!(text, Cow::Owned(_)).then(|| line.to_vec());
        self.put(Record { from: Some(from), line: Some(text.into_owned()), bytes, ..Record::default() });
    }

    /// Records that there was a line, and why it is not here.
    pub(crate) fn skipped(&self, from: Side, note: &str) {
        self.put(Record { from: Some(from), note: Some(note.to_owned()), ..Record::default() });
    }

    fn put(&self, record: Record) {
        let mut state = self.0.lock();
        let Some(mut file) = state.file.take() else { return };
        let at = state.begin.elapsed().as_secs_f64();
        let encode = |record: &Record| {
            let mut bytes = serde_json::to_vec(record).unwrap_or_default();
            bytes.push(b'\n');
            bytes
        };
        let bytes = encode(&Record { at, ..record });
        let length = bytes.len() as u64;
        if length + LAST_WORD > state.left {
            let note = Some("the recording is full; the session went on".to_owned());
            let _ = file.write_all(&encode(&Record { at, note, ..Record::default() }));
            tracing::warn!("the recording is full; the session goes on without");
            return;
        }
        match file.write_all(&bytes) {
            Ok(()) => {
                state.left -= length;
                state.file = Some(file);
            }
            Err(error) => tracing::warn!(%error, "the recording ends here; the session goes on"),
        }
    }
}

/// The header of a recording; `None` when it is none.
pub(crate) fn read_header(file: &mut impl BufRead) -> Option<Header> {
    let mut line = Vec::new();
    file.take(MAX_HEADER).read_until(b'\n', &mut line).ok()?;
    serde_json::from_slice(&line).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header { sbcl_mcp: "0".to_owned(), sbcl: "0".to_owned(), recorded: String::new(), arguments: Vec::new() }
    }

    #[test]
    fn a_full_recording_says_so_and_has_whole_lines() {
        let path = std::env::temp_dir().join(format!("sbcl-mcp-recorder-{}", std::process::id()));
        let recorder = Recorder::begin_bounded(&path, &header(), 2_000).unwrap();
        for number in 0..100 {
            recorder.line(Side::Client, format!("{{\"number\": {number}}}\n").as_bytes());
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() <= 2_000 && text.ends_with('\n'), "{}", text.len());
        let mut file = BufReader::new(text.as_bytes());
        assert_eq!(read_header(&mut file), Some(header()));
        let records: Vec<Record> = file.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        let (last, lines) = records.split_last().unwrap();
        assert_eq!(last.note.as_deref(), Some("the recording is full; the session went on"));
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
