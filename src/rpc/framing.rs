//! The line reader, which splits a stream into lines of bounded length.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::io::Errno;

use super::recorder::{Recorder, Side};
use crate::os::helper_threads;
use crate::os::poll_set::PollSet;
use crate::rpc::id_scanner::{IdScanner, ScannedMessage};

/// Maximum length of a line, in bytes.
pub(crate) const MAX_LINE: usize = 64 << 20;
/// Returns the error message for a line over [`MAX_LINE`].
pub(crate) fn too_long_message() -> String {
    format!("the message is longer than {} MiB: send less at once", MAX_LINE >> 20)
}

/// Minimum free capacity of the buffer before a read, in bytes.
const MIN_READ_CAPACITY: usize = 64 << 10;
/// Maximum capacity, in bytes, that an empty buffer keeps allocated. A longer line is scanned as it arrives, and moved out of
/// the buffer.
const MAX_IDLE_CAPACITY: usize = 1 << 20;

/// A line of the stream.
#[derive(Debug, PartialEq)]
pub(crate) enum Line<'a> {
    /// A line with its newline. A newline is added to a last line that lacks it. A line over [`MAX_IDLE_CAPACITY`] is owned:
    /// clients would wait while a long line is copied.
    Text(Cow<'a, [u8]>),
    /// A line over the limit, which was skipped.
    TooLong(ScannedMessage),
}

/// The result of one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadStatus {
    /// The buffer has bytes that may complete a line.
    More,
    /// No bytes are available now.
    Nothing,
    /// The stream has ended.
    End,
}

/// A reader of lines from a non-blocking descriptor. Its memory is bounded by the longest line and one read.
#[derive(Debug)]
pub(crate) struct LineReader {
    fd: OwnedFd,
    /// Maximum length of a line, in bytes.
    pub(super) limit: usize,
    buffer: Vec<u8>,
    /// Index of the next line in `buffer`.
    start: usize,
    /// Index in `buffer` at which the search for the next newline begins.
    searched: usize,
    /// The scanner that searches a line over [`MAX_IDLE_CAPACITY`] for an id as the line arrives, in case the line exceeds
    /// the limit: a scan of the whole line at the limit would take too long.
    scanner: Option<IdScanner>,
    /// True while a line over the limit is skipped.
    is_too_long: bool,
    at_end: bool,
    recorder: Option<Recorder>,
}

impl LineReader {
    /// Creates a reader of lines of up to [`MAX_LINE`] bytes. `fd` must be non-blocking.
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self::with_limit(fd, MAX_LINE)
    }

    fn with_limit(fd: OwnedFd, limit: usize) -> Self {
        Self {
            fd,
            limit,
            buffer: Vec::new(),
            start: 0,
            searched: 0,
            scanner: None,
            is_too_long: false,
            at_end: false,
            recorder: None,
        }
    }

    /// Sets the recorder, which records each line as sent by the client.
    pub(crate) fn with_recorder(self, recorder: Option<Recorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Adds the stream to `set`. It is ready at once if the buffer may contain a line, otherwise when it can be read.
    pub(crate) fn add_to<'a, T: Copy + PartialEq>(&'a self, set: &mut PollSet<'a, T>, name: T) {
        if self.may_have_line() {
            set.add_ready(name);
        } else {
            set.add_read(name, self);
        }
    }

    /// Returns true unless the whole buffer has been searched for lines.
    fn may_have_line(&self) -> bool {
        self.searched < self.buffer.len()
    }

    /// Reads once, unless the buffer may contain a line.
    ///
    /// # Errors
    /// Returns the errors of read(2), except EAGAIN and EINTR.
    pub(crate) fn read(&mut self) -> io::Result<ReadStatus> {
        if self.may_have_line() {
            return Ok(ReadStatus::More);
        }
        if self.at_end {
            return Ok(ReadStatus::End);
        }
        self.buffer.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        if self.buffer.is_empty() {
            self.buffer.shrink_to(MAX_IDLE_CAPACITY);
        }
        self.buffer.reserve(MIN_READ_CAPACITY);
        match rustix::io::read(&self.fd, spare_capacity(&mut self.buffer)) {
            Ok(0) => {
                self.at_end = true;
                if !self.buffer.is_empty() || self.is_too_long {
                    self.buffer.push(b'\n');
                    return Ok(ReadStatus::More);
                }
                Ok(ReadStatus::End)
            }
            Ok(_) => Ok(ReadStatus::More),
            Err(Errno::AGAIN | Errno::INTR) => Ok(ReadStatus::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the next complete line in the buffer.
    pub(crate) fn next_line(&mut self) -> Option<Line<'_>> {
        let newline = memchr::memchr(b'\n', &self.buffer[self.searched..]);
        let end = newline.map_or(self.buffer.len(), |offset| self.searched + offset + 1);
        let line = self.start..end;
        if let Some(scanner) = &mut self.scanner {
            scanner.feed(&self.buffer[self.searched..end]);
        } else if line.len() > self.limit.min(MAX_IDLE_CAPACITY) && self.limit < usize::MAX {
            self.scanner.get_or_insert_default().feed(&self.buffer[line.clone()]);
        }
        self.searched = end;
        self.is_too_long |= line.len() > self.limit;
        if self.is_too_long {
            self.start = end;
            if self.buffer.capacity() > MAX_IDLE_CAPACITY {
                let skipped = self.take_front(end);
                // Other clients would wait while a long line is freed.
                helper_threads::run(move || drop(skipped));
            }
        }
        newline?;
        let scanner = self.scanner.take();
        if std::mem::take(&mut self.is_too_long) {
            if let Some(recorder) = &self.recorder {
                recorder.record_skipped(Side::Client, "the client's message was too long to be recorded");
            }
            return Some(Line::TooLong(scanner.unwrap_or_default().finish()));
        }
        if let Some(recorder) = &self.recorder {
            recorder.record_line(Side::Client, &self.buffer[line.clone()]);
        }
        if line.len() > MAX_IDLE_CAPACITY {
            let mut text = self.take_front(end);
            text.drain(..line.start);
            return Some(Line::Text(Cow::Owned(text)));
        }
        self.start = end;
        Some(Line::Text(Cow::Borrowed(&self.buffer[line])))
    }

    /// Removes the first `end` bytes from the buffer and returns them without a copy.
    fn take_front(&mut self, end: usize) -> Vec<u8> {
        let rest = self.buffer.split_off(end);
        (self.start, self.searched) = (0, 0);
        std::mem::replace(&mut self.buffer, rest)
    }
}

impl AsFd for LineReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::descriptors::set_nonblocking;
    use proptest::prelude::*;
    use serde_json::Value;
    use std::io::Write;

    const LIMIT: usize = 40;

    /// Writes the pieces to a stream, and returns all lines of the stream. A line over [`LIMIT`] becomes an `Err` with the
    /// line's id.
    fn lines(pieces: &[Vec<u8>]) -> Vec<Result<Vec<u8>, Option<Value>>> {
        let (reader, writer) = io::pipe().unwrap();
        let mut writer = Some(writer);
        let mut reader = LineReader::with_limit(set_nonblocking(reader.into()).unwrap(), LIMIT);
        let mut lines = Vec::new();
        let mut pieces = pieces.iter();
        loop {
            while let Some(line) = reader.next_line() {
                lines.push(match line {
                    Line::Text(text) => Ok(text.into_owned()),
                    Line::TooLong(message) => Err(message.request_id()),
                });
            }
            assert!(reader.buffer.len() - reader.start <= LIMIT);
            match reader.read().unwrap() {
                ReadStatus::More => {}
                ReadStatus::Nothing => match pieces.next() {
                    Some(piece) => writer.as_mut().unwrap().write_all(piece).unwrap(),
                    None => writer = None,
                },
                ReadStatus::End => return lines,
            }
        }
    }

    #[test]
    fn lines_are_reassembled_from_pieces() {
        let pieces = ["a", "b\n\nc", "d\ne\nf"].map(|piece| piece.as_bytes().to_vec());
        let expected = ["ab\n", "\n", "cd\n", "e\n", "f\n"].map(|line| Ok(line.as_bytes().to_vec()));
        assert_eq!(lines(&pieces), expected);
        assert_eq!(lines(&[]), []);
    }

    /// The recovery state may be a line of many megabytes, and clients wait for it.
    #[test]
    fn a_long_line_is_not_scanned_if_there_is_no_limit() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut reader = LineReader::with_limit(reader.into(), usize::MAX);
        while reader.buffer.len() <= 2 * MAX_IDLE_CAPACITY {
            writer.write_all(&[b'x'; 4096]).unwrap();
            assert_eq!(reader.read().unwrap(), ReadStatus::More);
            assert_eq!(reader.next_line(), None);
        }
        assert!(reader.scanner.is_none());
    }

    #[test]
    fn lines_that_are_left_in_the_buffer_come_before_the_next_read() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut reader = LineReader::new(reader.into());
        let is_ready_at_once = |reader: &LineReader| {
            let mut set = PollSet::new();
            reader.add_to(&mut set, "input");
            set.wait(Some(std::time::Duration::ZERO)).unwrap().has("input")
        };
        assert!(!is_ready_at_once(&reader));
        writer.write_all(b"a\nb\nc").unwrap();
        assert_eq!(reader.read().unwrap(), ReadStatus::More);
        assert_eq!(reader.next_line(), Some(Line::Text(b"a\n".into())));
        assert!(is_ready_at_once(&reader));
        assert_eq!(reader.read().unwrap(), ReadStatus::More);
        assert_eq!(reader.next_line(), Some(Line::Text(b"b\n".into())));
        assert_eq!(reader.next_line(), None);
        assert!(!is_ready_at_once(&reader));
        drop(writer);
        assert_eq!(reader.read().unwrap(), ReadStatus::More);
        assert_eq!(reader.next_line(), Some(Line::Text(b"c\n".into())));
        assert_eq!(reader.next_line(), None);
        assert_eq!(reader.read().unwrap(), ReadStatus::End);
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped() {
        let long = format!("{{\"id\":7,\"x\":\"{}\"}}", "x".repeat(3 * LIMIT));
        let text = format!("before\n{long}\nafter\n{long}");
        let expected = [Ok(b"before\n".to_vec()), Err(Some(7.into())), Ok(b"after\n".to_vec()), Err(Some(7.into()))];
        for size in [1, 7, 1000] {
            let pieces: Vec<_> = text.as_bytes().chunks(size).map(<[u8]>::to_vec).collect();
            assert_eq!(lines(&pieces), expected, "{size}");
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_scanned_as_it_arrives_and_freed_at_the_limit() {
        let (reader, _writer) = io::pipe().unwrap();
        let limit = 4 * MAX_IDLE_CAPACITY;
        let mut reader = LineReader::with_limit(reader.into(), limit);
        reader.buffer.extend_from_slice(b"{\"id\":7,\"x\":\"");
        reader.buffer.resize(limit, b'x');
        assert_eq!(reader.next_line(), None);
        assert!(reader.scanner.is_some() && !reader.is_too_long);
        reader.buffer.push(b'x');
        assert_eq!(reader.next_line(), None);
        assert!(reader.buffer.capacity() <= MAX_IDLE_CAPACITY);
        reader.buffer.extend_from_slice(b"\"}\nafter\n");
        assert_eq!(reader.next_line(), Some(Line::TooLong(ScannedMessage::Request(Some(7.into())))));
        assert_eq!(reader.next_line(), Some(Line::Text(b"after\n".into())));
        assert_eq!(reader.next_line(), None);
    }

    #[test]
    fn a_long_line_is_moved_out_of_the_buffer() {
        let (reader, _writer) = io::pipe().unwrap();
        let mut reader = LineReader::new(reader.into());
        reader.buffer = format!("before\n{}\nafter\n", "x".repeat(MAX_IDLE_CAPACITY)).into_bytes();
        let address = reader.buffer.as_ptr();
        assert_eq!(reader.next_line(), Some(Line::Text(b"before\n".into())));
        let Some(Line::Text(Cow::Owned(text))) = reader.next_line() else { panic!("a line of its own") };
        assert_eq!((text.as_ptr(), text.len()), (address, MAX_IDLE_CAPACITY + 1));
        assert_eq!(reader.next_line(), Some(Line::Text(b"after\n".into())));
        assert_eq!(reader.next_line(), None);
    }

    proptest! {
        /// A stream cut into any pieces has the same lines as the whole stream.
        #[test]
        fn lines_do_not_depend_on_how_the_stream_is_cut(
            text in prop::collection::vec(prop_oneof![8 => Just(b'x'), 1 => Just(b'\n')], 0..300),
            cuts in prop::collection::vec(0_usize..300, 0..10),
        ) {
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(text.len())).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let pieces: Vec<_> = cuts.windows(2).map(|cut| text[cut[0]..cut[1]].to_vec()).collect();
            let mut expected: Vec<_> = text.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
            if expected.last().is_some_and(Vec::is_empty) {
                expected.pop();
            }
            let expected: Vec<_> = expected
                .into_iter()
                .map(|line| if line.len() + 1 > LIMIT { Err(None) } else { Ok([line, vec![b'\n']].concat()) })
                .collect();
            prop_assert_eq!(lines(&pieces), expected);
        }
    }
}
