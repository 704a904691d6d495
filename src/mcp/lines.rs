//! Cuts the client's stream into lines, of any length up to a limit.

use std::io;
use std::ops::Range;
use std::time::Duration;

use serde_json::Value;

use super::pipe::Pipe;
use crate::id_scanner::IdScanner;

/// The longest line that is read, in bytes.
pub(super) const MAX_LINE: usize = 64 << 20;
/// How much is asked for at a time.
const CHUNK: usize = 64 << 10;
/// A buffer that grew beyond this for one line is given back after it.
const KEEP: usize = 1 << 20;

/// What comes next on the stream.
#[derive(Debug)]
pub(super) enum Line {
    /// A line, without its newline: where it lies in [`Lines::text`].
    Text(Range<usize>),
    /// A line over [`MAX_LINE`], which was thrown away, and the id of its request where there was one.
    TooLong(Option<Value>),
    /// The end of the stream.
    End,
}

/// The lines of a stream.
#[derive(Debug)]
pub(super) struct Lines {
    pipe: Pipe,
    buffer: Vec<u8>,
    /// Where the next line begins.
    start: usize,
    /// Up to where there is no newline.
    searched: usize,
    /// Reads past the rest of a line that is too long.
    too_long: Option<IdScanner>,
}

impl Lines {
    pub(super) fn new(pipe: Pipe) -> Self {
        Self { pipe, buffer: Vec::with_capacity(CHUNK), start: 0, searched: 0, too_long: None }
    }

    /// The bytes of a line that [`Self::next`] told of. They are gone once it is called again.
    pub(super) fn text(&self, line: Range<usize>) -> &[u8] {
        &self.buffer[line]
    }

    /// The next line; waiting as in [`Pipe::read`]. Nothing is lost when the future is dropped. A last line without a
    /// newline counts.
    pub(super) async fn next(&mut self, awake: Duration) -> io::Result<Line> {
        loop {
            if let Some(line) = self.buffered() {
                return Ok(line);
            }
            self.compact();
            self.buffer.reserve(CHUNK);
            if self.pipe.read(&mut self.buffer, awake).await? == 0 {
                return Ok(self.last());
            }
        }
    }

    fn buffered(&mut self) -> Option<Line> {
        let newline = self.buffer[self.searched..].iter().position(|&byte| byte == b'\n');
        let end = newline.map_or(self.buffer.len(), |offset| self.searched + offset);
        let line = self.start..end;
        self.searched = end;
        if self.too_long.is_some() || line.len() > MAX_LINE {
            self.too_long.get_or_insert_default().feed(&self.buffer[line.clone()]);
            self.start = end;
        }
        newline?;
        self.start = end + 1;
        self.searched = self.start;
        Some(self.too_long.take().map_or(Line::Text(line), |scanner| Line::TooLong(scanner.finish())))
    }

    fn last(&mut self) -> Line {
        if let Some(scanner) = self.too_long.take() {
            return Line::TooLong(scanner.finish());
        }
        let rest = self.start..self.buffer.len();
        self.start = rest.end;
        self.searched = rest.end;
        if rest.is_empty() { Line::End } else { Line::Text(rest) }
    }

    fn compact(&mut self) {
        if self.start == self.buffer.len() {
            self.buffer.clear();
            if self.buffer.capacity() > KEEP {
                self.buffer = Vec::new();
            }
        } else {
            self.buffer.drain(..self.start);
        }
        self.searched -= self.start;
        self.start = 0;
    }
}
