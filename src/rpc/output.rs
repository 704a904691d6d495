//! What goes out: lines to a client, or the same in frames to a supervisor that hands them on.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use super::WriteBuffer;
use super::descriptors::nonblocking_writer;
use super::frame::{self, HEADER, Kind, PART};
use super::recorder::Recorder;
use super::waker::Waker;

/// Who reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    /// The client.
    Client,
    /// A supervisor.
    Supervisor,
}

/// With so many bytes unread by a client, no more of its requests are read, its answers become errors and what else is for it
/// is dropped.
pub(crate) const MAX_UNREAD: usize = 64 << 20;
/// Bytes of backlog to the supervisor above which the worker reads no more requests: their answers would wait behind it.
const MAX_UNSENT: usize = 1 << 20;
/// So many parts are written at a time: a supervisor that reads as fast must not keep the thread from all else.
const MOST_PARTS: usize = 16;
/// The longest line that is written, in bytes, but for what errors add to it.
pub(crate) const MAX_ANSWER: usize = 128 << 20;

/// A line for the client, with room in front for the header of a frame.
#[derive(Debug)]
pub(crate) struct Encoded(Vec<u8>);

impl Encoded {
    /// Encodes a message.
    pub(crate) fn new(message: &impl Serialize) -> serde_json::Result<Self> {
        let mut encoded = Self(Vec::with_capacity(256));
        encoded.0.resize(HEADER, 0);
        serde_json::to_writer(&mut encoded.0, message)?;
        encoded.0.push(b'\n');
        Ok(encoded)
    }

    /// Appends an element to an array, which is nothing at first.
    pub(crate) fn push(&mut self, element: &Self) {
        const END: &[u8] = b"]\n";
        let separator = if self.is_empty() { b'[' } else { b',' };
        self.0.truncate(HEADER.max(self.0.len() - END.len()));
        self.0.push(separator);
        self.0.extend_from_slice(&element.0[HEADER..element.0.len() - 1]);
        self.0.extend_from_slice(END);
    }

    /// The length of the line.
    pub(crate) fn len(&self) -> usize {
        self.0.len() - HEADER
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for Encoded {
    fn default() -> Self {
        Self(vec![0; HEADER])
    }
}

/// Whole lines (or frames) in order: written at once when the other side reads, kept for it when it does not. Any thread
/// writes; nothing here waits.
#[derive(Debug)]
pub(crate) struct Output {
    fd: Arc<OwnedFd>,
    buffer: Arc<Mutex<Buffer>>,
    reader: Reader,
    /// Whom a supervisor hands on what is no answer: the number of the client's connection.
    connection: u64,
    /// Wakes the thread that flushes.
    waker: Arc<Waker>,
}

#[derive(Debug)]
struct Buffer {
    bytes: WriteBuffer<Arc<OwnedFd>>,
    /// The answers that go to a supervisor in parts, one after the other. Small frames pass them.
    large: VecDeque<Large>,
    broken: bool,
}

/// An answer that goes in parts.
#[derive(Debug)]
struct Large {
    connection: u64,
    line: u64,
    bytes: Vec<u8>,
    /// The index of the first byte in `bytes` that is not written. Room for a frame's header is before it.
    rest: usize,
}

impl Large {
    fn left(&self) -> usize {
        self.bytes.len() - self.rest
    }

    /// The frame with its next part. The last one is an [`Answer`](Kind::Answer).
    fn next_frame(&mut self) -> &[u8] {
        let (kind, length) = if self.left() > PART { (Kind::Part, PART) } else { (Kind::Answer, self.left()) };
        let begin = self.rest - HEADER;
        self.bytes[begin..self.rest].copy_from_slice(&frame::header(kind, self.line, length));
        self.rest += length;
        &self.bytes[begin..self.rest]
    }
}

impl Output {
    /// Writes to `fd`. `waker` is used when something is left for [`Self::flush`].
    pub(crate) fn new(fd: OwnedFd, reader: Reader, waker: Arc<Waker>) -> io::Result<Self> {
        let fd = Arc::new(nonblocking_writer(fd)?);
        let buffer = Buffer { bytes: WriteBuffer::new(fd.clone()), large: VecDeque::new(), broken: false };
        Ok(Self { fd, buffer: Arc::new(Mutex::new(buffer)), reader, connection: 0, waker })
    }

    /// The same way out, for another client of the supervisor's.
    pub(crate) fn for_connection(&self, connection: u64) -> Self {
        let Self { fd, buffer, reader, waker, .. } = self;
        Self { fd: fd.clone(), buffer: buffer.clone(), reader: *reader, connection, waker: waker.clone() }
    }

    /// True when a supervisor hands on what goes out.
    pub(crate) fn is_framed(&self) -> bool {
        self.reader == Reader::Supervisor
    }

    /// Has all lines recorded.
    pub(crate) fn recorded(self, recorder: Option<Recorder>) -> Self {
        self.buffer.lock().bytes = WriteBuffer::new(self.fd.clone()).recorded(recorder);
        self
    }

    /// Sends all that `line` asked for.
    pub(crate) fn answer(&self, line: u64, answer: Encoded) {
        self.put(Kind::Answer, line, answer);
    }

    /// Sends what is no answer, unless the client does not read.
    pub(crate) fn send(&self, message: &impl Serialize) {
        if self.is_unread() {
            return;
        }
        match Encoded::new(message) {
            Ok(message) => self.put(Kind::Message, self.connection, message),
            Err(error) => tracing::error!(%error, "a message cannot be written"),
        }
    }

    /// True when the client has more to read than is kept for it. The supervisor, which reads always, looks to that itself,
    /// for what it has read.
    pub(crate) fn is_unread(&self) -> bool {
        let buffer = self.buffer.lock();
        match self.reader {
            Reader::Client => buffer.backlog() > MAX_UNREAD,
            Reader::Supervisor => buffer.large_of(self.connection) > MAX_UNREAD,
        }
    }

    /// Returns true while the backlog allows more requests to be read. Large answers to a supervisor keep none from that.
    pub(crate) fn takes_more(&self) -> bool {
        let most = if self.is_framed() { MAX_UNSENT } else { MAX_UNREAD };
        self.buffer.lock().bytes.backlog() <= most
    }

    /// Notes that `line` gets no answer.
    pub(crate) fn done(&self, line: u64) {
        if self.is_framed() {
            self.write(&frame::header(Kind::Done, line, 0));
        }
    }

    /// Reports to the supervisor that `lines` of its lines have been received in all.
    pub(crate) fn received(&self, lines: u64) {
        self.write(&frame::header(Kind::Received, lines, 0));
    }

    /// Sends the supervisor an event, as JSON of at most [`MAX_EVENT`](frame::MAX_EVENT) bytes; a client gets none.
    pub(crate) fn event(&self, payload: &[u8]) {
        if self.is_framed() {
            self.write(&frame::event(payload));
        }
    }

    /// Has what is written from here on go after all answers that were written so far, parts included.
    pub(crate) fn order(&self) {
        let mut buffer = self.buffer.lock();
        while !buffer.large.is_empty() {
            buffer.put_part();
        }
    }

    /// Wakes the thread that flushes.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Wakes the thread that flushes if it waits for the last answers.
    pub(crate) fn answered(&self) {
        self.waker.answered();
    }

    /// Writes what is left, as far as it goes.
    pub(crate) fn flush(&self) {
        let mut buffer = self.buffer.lock();
        let result = buffer.bytes.flush();
        buffer.note(result);
        buffer.write_parts(MOST_PARTS);
    }

    /// How many bytes are left.
    pub(crate) fn backlog(&self) -> usize {
        self.buffer.lock().backlog()
    }

    /// True when nobody reads any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.buffer.lock().broken
    }

    fn put(&self, kind: Kind, line: u64, Encoded(mut bytes): Encoded) {
        let length = bytes.len() - HEADER;
        if !self.is_framed() {
            return self.write(&bytes[HEADER..]);
        }
        if kind == Kind::Answer && length > PART {
            return self.change(|buffer| {
                buffer.large.push_back(Large { connection: self.connection, line, bytes, rest: HEADER });
                buffer.write_parts(MOST_PARTS);
            });
        }
        bytes[..HEADER].copy_from_slice(&frame::header(kind, line, length));
        self.write(&bytes);
    }

    fn write(&self, bytes: &[u8]) {
        self.change(|buffer| {
            let result = buffer.bytes.put(bytes);
            buffer.note(result);
        });
    }

    /// Writes with `write`, and wakes the thread that flushes what is left.
    fn change(&self, write: impl FnOnce(&mut Buffer)) {
        let mut buffer = self.buffer.lock();
        if buffer.broken {
            return;
        }
        let was_empty = buffer.backlog() == 0;
        write(&mut buffer);
        if was_empty && buffer.backlog() > 0 || buffer.broken {
            self.waker.wake();
        }
    }
}

impl Buffer {
    fn note(&mut self, result: io::Result<()>) {
        // No event of `tracing` here: a subscriber might wait for this lock.
        if result.is_err() {
            self.broken = true;
            self.large.clear();
        }
    }

    fn backlog(&self) -> usize {
        self.bytes.backlog() + self.large.iter().map(Large::left).sum::<usize>()
    }

    /// Returns the number of bytes of a connection's large answers that are not written.
    fn large_of(&self, connection: u64) -> usize {
        self.large.iter().filter(|large| large.connection == connection).map(Large::left).sum()
    }

    /// Writes parts of the large answers, as far as it goes, but no more than `most`.
    fn write_parts(&mut self, most: usize) {
        for _ in 0..most {
            if !self.bytes.is_empty() {
                return;
            }
            self.put_part();
        }
    }

    fn put_part(&mut self) {
        let Some(large) = self.large.front_mut() else { return };
        let result = self.bytes.put(large.next_frame());
        if large.left() == 0 {
            self.large.pop_front();
        }
        self.note(result);
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};

    use super::*;

    /// Reads all frames from `output`, as a supervisor does.
    fn read_all(output: Output, mut reader: PipeReader) -> Vec<(Kind, u64, Vec<u8>)> {
        let (mut bytes, mut chunk) = (Vec::new(), vec![0; 1 << 20]);
        while output.backlog() > 0 {
            let read = reader.read(&mut chunk).unwrap();
            bytes.extend_from_slice(&chunk[..read]);
            output.flush();
        }
        drop(output);
        reader.read_to_end(&mut bytes).unwrap();
        let (mut frames, mut rest) = (Vec::new(), &bytes[..]);
        while let Some(((kind, line, payload), length)) = frame::parse(rest).unwrap() {
            frames.push((kind, line, payload.to_vec()));
            rest = &rest[length..];
        }
        assert!(rest.is_empty());
        frames
    }

    fn framed() -> (PipeReader, Output) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, Output::new(writer.into(), Reader::Supervisor, Arc::new(Waker::new().unwrap())).unwrap())
    }

    #[test]
    fn small_answer_passes_large_ones() {
        let (reader, output) = framed();
        let text = "x".repeat(10 * PART);
        output.answer(1, Encoded::new(&text).unwrap());
        output.answer(2, Encoded::new(&text).unwrap());
        output.answer(3, Encoded::new(&"small").unwrap());
        let frames = read_all(output, reader);
        let small = frames.iter().position(|(_, line, _)| *line == 3).unwrap();
        assert!(small < 4, "{small} frames came before the small one");
        for line in [1, 2] {
            let of_line = || frames.iter().filter(|(_, of, _)| *of == line);
            let whole: Vec<u8> = of_line().flat_map(|(.., payload)| payload.clone()).collect();
            assert_eq!(whole, format!("\"{text}\"\n").into_bytes());
            assert!(of_line().rev().skip(1).all(|(kind, ..)| *kind == Kind::Part));
            assert_eq!(of_line().next_back().unwrap().0, Kind::Answer);
        }
        let second = frames.iter().position(|(_, line, _)| *line == 2).unwrap();
        assert!(frames[second..].iter().all(|(_, line, _)| *line != 1), "the parts of two answers are mixed");
    }

    #[test]
    fn what_is_ordered_comes_after_large_answers() {
        let (reader, output) = framed();
        output.answer(1, Encoded::new(&"x".repeat(10 * PART)).unwrap());
        output.order();
        output.event(b"{}");
        assert_eq!(read_all(output, reader).pop(), Some((Kind::Event, 0, b"{}".to_vec())));
    }
}
