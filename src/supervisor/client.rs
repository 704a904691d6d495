//! The client's end: its stream cut into lines, of any length up to a limit.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::refusal;
use crate::id_scanner::IdScanner;

/// The longest line that a worker gets, in bytes.
const MAX_LINE: usize = 64 << 20;
/// How much is read at a time.
const CHUNK: usize = 64 << 10;
/// Kept memory above this is given back when it is no longer needed.
const KEEP: usize = 1 << 20;

/// What the client says.
#[derive(Debug)]
pub(super) struct ClientInput {
    fd: OwnedFd,
    chunk: Vec<u8>,
    /// A line that has begun.
    line: Vec<u8>,
    /// Reads past the rest of a line that is too long.
    too_long: Option<IdScanner>,
}

/// What came in.
pub(super) enum Said<'a> {
    /// A line with its newline.
    Line(&'a [u8]),
    /// A line that was thrown away: the answer to it.
    TooLong(Vec<u8>),
}

impl ClientInput {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, chunk: vec![0; CHUNK], line: Vec::new(), too_long: None }
    }

    /// Reads once, which does not block when the descriptor is readable. False at the end of the stream; a last line
    /// without a newline gets one.
    pub(super) fn read(&mut self, mut take: impl FnMut(Said<'_>)) -> io::Result<bool> {
        let read = match rustix::io::read(&self.fd, &mut *self.chunk) {
            Ok(read) => read,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return Ok(true),
            Err(error) => return Err(error.into()),
        };
        if read == 0 {
            if !self.line.is_empty() || self.too_long.is_some() {
                self.line.push(b'\n');
                finish(&mut self.line, &mut self.too_long, &mut take);
            }
            return Ok(false);
        }
        for piece in self.chunk[..read].split_inclusive(|&byte| byte == b'\n') {
            let ends = piece.ends_with(b"\n");
            if ends && self.line.is_empty() && self.too_long.is_none() {
                take(Said::Line(piece));
                continue;
            }
            if let Some(scanner) = &mut self.too_long {
                scanner.feed(piece);
            } else {
                self.line.extend_from_slice(piece);
                if self.line.len() > MAX_LINE {
                    let mut scanner = IdScanner::default();
                    scanner.feed(&self.line);
                    self.line = Vec::new();
                    self.too_long = Some(scanner);
                }
            }
            if ends {
                finish(&mut self.line, &mut self.too_long, &mut take);
            }
        }
        Ok(true)
    }
}

fn finish(line: &mut Vec<u8>, too_long: &mut Option<IdScanner>, take: &mut impl FnMut(Said<'_>)) {
    match too_long.take() {
        Some(scanner) => {
            let reason = format!("the message is longer than {} MiB", MAX_LINE >> 20);
            take(Said::TooLong(refusal::line(scanner.finish(), refusal::INVALID_REQUEST, &reason)));
        }
        None => take(Said::Line(line)),
    }
    line.clear();
    line.shrink_to(KEEP);
}

impl AsFd for ClientInput {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_come_out_whole() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut input = ClientInput::new(reader.into());
        let mut lines = Vec::new();
        for (piece, expected) in
            [("a", &[][..]), ("b\n\nc", &["ab\n", "\n"]), ("d\ne\nf", &["cd\n", "e\n"]), ("", &["f\n"])]
        {
            if piece.is_empty() {
                drop(std::mem::replace(&mut writer, io::pipe().unwrap().1));
            } else {
                writer.write_all(piece.as_bytes()).unwrap();
            }
            let goes_on = input
                .read(|said| match said {
                    Said::Line(line) => lines.push(String::from_utf8(line.to_vec()).unwrap()),
                    Said::TooLong(_) => panic!("too long"),
                })
                .unwrap();
            assert_eq!(goes_on, !piece.is_empty());
            assert_eq!(std::mem::take(&mut lines), expected);
        }
    }
}
