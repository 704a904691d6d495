//! The output of a process that serves MCP: lines to a client, or frames to a supervisor, which forwards the lines in
//! the frames.

use std::collections::VecDeque;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;

use super::WriteBuffer;
use super::descriptors::nonblocking_writer;
use super::frame::{self, FrameKind, HEADER_LEN, PART_LEN};
use super::recorder::Recorder;
use super::waker::Waker;
use crate::os::event_count::EventCount;
use crate::os::poll_set::PollSet;

/// The process that reads the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recipient {
    /// A client, which reads lines.
    Client,
    /// A supervisor, which reads frames.
    Supervisor,
}

/// Maximum number of bytes that a client may leave unread. Above this limit, further requests of the client are not read,
/// errors replace the answers to the client, and notifications to the client are dropped.
pub(crate) const MAX_UNREAD: usize = 64 << 20;
/// Maximum backlog to the supervisor, in bytes. Above this limit, the worker reads no more requests, since their answers
/// would wait behind the backlog, and begins no more of the requests that it has read, since they would enlarge it.
const MAX_SUPERVISOR_BACKLOG: usize = 1 << 20;
/// Maximum number of parts written at a time: a fast supervisor must not keep the thread from its other work.
const MAX_PARTS_PER_TURN: usize = 16;
/// Maximum length, in bytes, of a frame that a pipe accepts as a whole or not at all (`PIPE_BUF` in POSIX).
const MAX_ATOMIC_WRITE: usize = if cfg!(target_os = "linux") { 4096 } else { 512 };
/// Poll interval of a thread that waits until no thread writes directly.
const DIRECT_WRITES_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Maximum length of an answer, and of all answers in unfinished batches together, in bytes. An error replaces an answer
/// over this limit. The errors in a batch may exceed the limit.
pub(crate) const MAX_ANSWER: usize = 128 << 20;

/// A line for the client, with room before it for the header of a frame.
#[derive(Debug)]
pub(crate) struct EncodedLine(Vec<u8>);

impl EncodedLine {
    /// Encodes a message as a line.
    pub(crate) fn new(message: &impl Serialize) -> serde_json::Result<Self> {
        let mut encoded = Self(Vec::with_capacity(256));
        encoded.0.resize(HEADER_LEN, 0);
        serde_json::to_writer(&mut encoded.0, message)?;
        encoded.0.push(b'\n');
        Ok(encoded)
    }

    /// Appends an element to the JSON array in this line. An empty line becomes an array with this one element.
    pub(crate) fn push(&mut self, element: &Self) {
        const END: &[u8] = b"]\n";
        let separator = if self.is_empty() { b'[' } else { b',' };
        self.0.truncate(HEADER_LEN.max(self.0.len() - END.len()));
        self.0.push(separator);
        self.0.extend_from_slice(&element.0[HEADER_LEN..element.0.len() - 1]);
        self.0.extend_from_slice(END);
    }

    /// Returns the length of the line, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len() - HEADER_LEN
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for EncodedLine {
    fn default() -> Self {
        Self(vec![0; HEADER_LEN])
    }
}

/// An output that writes lines or frames in order: at once if the recipient reads, else later, from a buffer. Any thread
/// may write, and no function blocks.
#[derive(Debug)]
pub(crate) struct Output {
    fd: Arc<OwnedFd>,
    buffer: Arc<Mutex<Buffer>>,
    direct: Arc<DirectWrites>,
    congestion: Arc<Congestion>,
    recipient: Recipient,
    /// The number of the connection to which the supervisor forwards messages.
    connection: u64,
    /// The waker of the thread that calls [`Output::flush`].
    waker: Arc<Waker>,
}

#[derive(Debug)]
struct Buffer {
    bytes: WriteBuffer<Arc<OwnedFd>>,
    /// Answers that are sent to the supervisor in parts, one answer after the other. Small frames may come between the
    /// parts.
    large: VecDeque<LargeAnswer>,
    /// The bytes of other frames since the last part, while large answers wait.
    bytes_since_part: usize,
    is_broken: bool,
}

/// The small frames that threads write to the supervisor's pipe without the buffer's lock, because nothing waits in the buffer.
/// A pipe accepts such a frame as a whole or not at all. Most frames are small, and a garbage collection may stop a Lisp
/// thread that holds the lock, so other threads should seldom need it.
#[derive(Debug, Default)]
struct DirectWrites {
    /// The number of threads that may be writing directly.
    writers: AtomicUsize,
    /// True while something waits in the buffer, and while a thread that holds the buffer's lock writes.
    are_excluded: AtomicBool,
    /// The buffer's backlog and its flag `is_broken`, for threads that do not wait for the buffer's lock.
    backlog: AtomicUsize,
    is_broken: AtomicBool,
}

/// The locked buffer, while no thread writes directly. Dropping it allows direct writes unless something waits in the buffer.
struct ExclusiveBuffer<'o> {
    buffer: MutexGuard<'o, Buffer>,
    direct: &'o DirectWrites,
}

impl Deref for ExclusiveBuffer<'_> {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.buffer
    }
}

impl DerefMut for ExclusiveBuffer<'_> {
    fn deref_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }
}

impl Drop for ExclusiveBuffer<'_> {
    fn drop(&mut self) {
        let (backlog, is_broken) = (self.buffer.backlog(), self.buffer.is_broken);
        self.direct.backlog.store(backlog, Ordering::Relaxed);
        self.direct.is_broken.store(is_broken, Ordering::Relaxed);
        self.direct.are_excluded.store(backlog > 0 || is_broken, Ordering::Release);
    }
}

/// The state of the backlog to the supervisor, for threads that wait until the backlog is small.
#[derive(Debug, Default)]
struct Congestion {
    /// True while the backlog exceeds [`MAX_SUPERVISOR_BACKLOG`].
    is_present: AtomicBool,
    /// The number of times that a congestion has ended.
    ended: EventCount,
}

/// An answer that is sent to the supervisor in parts.
#[derive(Debug)]
struct LargeAnswer {
    connection: u64,
    call: u64,
    bytes: Vec<u8>,
    /// Index of the first unwritten byte in `bytes`. Before this byte, there is room for a frame's header.
    rest: usize,
}

impl LargeAnswer {
    fn unwritten_len(&self) -> usize {
        self.bytes.len() - self.rest
    }

    /// Returns the frame with the next part. The last frame is an [`Answer`](FrameKind::Answer).
    fn next_frame(&mut self) -> &[u8] {
        let (kind, length) = if self.unwritten_len() > PART_LEN {
            (FrameKind::Part, PART_LEN)
        } else {
            (FrameKind::Answer, self.unwritten_len())
        };
        let begin = self.rest - HEADER_LEN;
        self.bytes[begin..self.rest].copy_from_slice(&frame::encode_header(kind, self.call, length));
        self.rest += length;
        &self.bytes[begin..self.rest]
    }
}

impl Output {
    /// Creates an output that writes to `fd`, and wakes `waker` when it needs a [`Self::flush`].
    pub(crate) fn new(fd: OwnedFd, recipient: Recipient, waker: Arc<Waker>) -> io::Result<Self> {
        let fd = Arc::new(nonblocking_writer(fd)?);
        let bytes = WriteBuffer::new(fd.clone());
        let buffer = Buffer { bytes, large: VecDeque::new(), bytes_since_part: 0, is_broken: false };
        Ok(Self {
            fd,
            buffer: Arc::new(Mutex::new(buffer)),
            direct: Arc::default(),
            congestion: Arc::default(),
            recipient,
            connection: 0,
            waker,
        })
    }

    /// Returns an output for another connection, with the same descriptor and buffer.
    pub(crate) fn for_connection(&self, connection: u64) -> Self {
        let Self { fd, buffer, direct, congestion, recipient, waker, .. } = self;
        let (fd, buffer, direct) = (fd.clone(), buffer.clone(), direct.clone());
        let (congestion, waker) = (congestion.clone(), waker.clone());
        Self { fd, buffer, direct, congestion, recipient: *recipient, connection, waker }
    }

    /// Returns true if a supervisor reads the output.
    pub(crate) fn is_framed(&self) -> bool {
        self.recipient == Recipient::Supervisor
    }

    /// Sets the recorder, which records every line of the output. Must be called before any output.
    pub(crate) fn with_recorder(self, recorder: Option<Recorder>) -> Self {
        self.buffer.lock().bytes = WriteBuffer::new(self.fd.clone()).with_recorder(recorder);
        self
    }

    /// Sends the complete answer to `call`.
    pub(crate) fn answer(&self, call: u64, answer: EncodedLine) {
        self.put(FrameKind::Answer, call, answer);
    }

    /// Sends a message that answers no request. The message is dropped if the client has too many unread bytes.
    pub(crate) fn send(&self, message: &impl Serialize) {
        if self.has_excess_backlog() {
            return;
        }
        match EncodedLine::new(message) {
            Ok(message) => self.put(FrameKind::Message, self.connection, message),
            Err(error) => tracing::error!(%error, "dropped a message that cannot be encoded as JSON"),
        }
    }

    /// Returns true if the client has too many unread bytes. A supervisor reads everything and counts the client's unread
    /// bytes itself; with a supervisor, only unwritten bytes of large answers to the client count here.
    pub(crate) fn has_excess_backlog(&self) -> bool {
        // Most backlogs are small: this needs no lock.
        self.backlog() > MAX_UNREAD
            && (!self.is_framed() || self.buffer.lock().large_answer_bytes(self.connection) > MAX_UNREAD)
    }

    /// Returns true if the backlog is small enough to read more requests. Large answers to a supervisor do not count.
    pub(crate) fn accepts_requests(&self) -> bool {
        if self.is_framed() {
            !self.congestion.is_present.load(Ordering::Acquire)
        } else {
            self.backlog() <= MAX_UNREAD
        }
    }

    /// Locks the buffer, and waits until no thread writes directly.
    fn lock_to_write(&self) -> ExclusiveBuffer<'_> {
        let locked = ExclusiveBuffer { buffer: self.buffer.lock(), direct: &self.direct };
        // Sequentially consistent, like `write_directly`: that thread sees the exclusion, or this thread sees the writer.
        self.direct.are_excluded.store(true, Ordering::SeqCst);
        while self.direct.writers.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(DIRECT_WRITES_POLL_INTERVAL);
        }
        locked
    }

    /// Writes a frame without the buffer's lock, if nothing waits in the buffer and the pipe has room for the frame. Returns
    /// true if the frame was written.
    fn write_directly(&self, frame: &[u8]) -> bool {
        if !self.is_framed() || frame.len() > MAX_ATOMIC_WRITE {
            return false;
        }
        self.direct.writers.fetch_add(1, Ordering::SeqCst);
        let is_written = !self.direct.are_excluded.load(Ordering::SeqCst) && rustix::io::write(&self.fd, frame).is_ok();
        self.direct.writers.fetch_sub(1, Ordering::Release);
        is_written
    }

    /// Waits until the backlog to the supervisor is small enough to begin another request. Does not wait for a client.
    pub(crate) fn wait_for_supervisor(&self) {
        let Congestion { is_present, ended } = &*self.congestion;
        loop {
            let seen = ended.current();
            if !is_present.load(Ordering::Acquire) {
                return;
            }
            ended.wait(seen, None);
        }
    }

    /// Updates the congestion after a change of the backlog.
    fn update_congestion(&self, buffer: &Buffer) {
        let is_large = self.is_framed() && !buffer.is_broken && buffer.bytes.backlog() > MAX_SUPERVISOR_BACKLOG;
        // The flag changes only under the buffer's lock.
        if self.congestion.is_present.load(Ordering::Relaxed) != is_large {
            self.congestion.is_present.store(is_large, Ordering::Release);
            if !is_large {
                self.congestion.ended.notify_all();
            }
        }
    }

    /// Reports to the supervisor that `call` gets no answer. Without a supervisor, does nothing.
    pub(crate) fn send_done(&self, call: u64) {
        if self.is_framed() {
            self.write(&frame::encode_header(FrameKind::Done, call, 0));
        }
    }

    /// Reports to the supervisor that the worker has received `lines` lines in all.
    pub(crate) fn send_received(&self, lines: u64) {
        self.write(&frame::encode_header(FrameKind::Received, lines, 0));
    }

    /// Sends an event to the supervisor, as JSON of at most [`MAX_EVENT`](frame::MAX_EVENT) bytes. Without a
    /// supervisor, does nothing.
    pub(crate) fn send_event(&self, payload: &[u8]) {
        if self.is_framed() {
            self.write(&frame::encode_event(payload));
        }
    }

    /// Moves all parts of large answers into the buffer, so that later frames follow them.
    pub(crate) fn queue_large_answers(&self) {
        let mut buffer = self.lock_to_write();
        while !buffer.large.is_empty() {
            buffer.put_next_part();
        }
        self.update_congestion(&buffer);
    }

    /// Wakes the thread that calls [`Self::flush`].
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Wakes the thread that calls [`Self::flush`] if the thread waits for the last answers.
    pub(crate) fn notify_answered(&self) {
        self.waker.notify_answered();
    }

    /// Writes as much of the backlog as the descriptor accepts.
    pub(crate) fn flush(&self) {
        let mut buffer = self.lock_to_write();
        let result = buffer.bytes.flush();
        buffer.record_result(result);
        buffer.write_parts(MAX_PARTS_PER_TURN);
        self.update_congestion(&buffer);
    }

    /// Returns the number of bytes left to write.
    pub(crate) fn backlog(&self) -> usize {
        self.direct.backlog.load(Ordering::Relaxed)
    }

    /// Returns true if a write has failed, for instance because the other end is closed.
    pub(crate) fn is_broken(&self) -> bool {
        self.direct.is_broken.load(Ordering::Relaxed)
    }

    fn put(&self, kind: FrameKind, call: u64, EncodedLine(mut bytes): EncodedLine) {
        let length = bytes.len() - HEADER_LEN;
        if !self.is_framed() {
            return self.write(&bytes[HEADER_LEN..]);
        }
        if kind == FrameKind::Answer && length > PART_LEN {
            return self.write_and_wake(|buffer| {
                buffer.large.push_back(LargeAnswer { connection: self.connection, call, bytes, rest: HEADER_LEN });
                buffer.write_parts(MAX_PARTS_PER_TURN);
            });
        }
        bytes[..HEADER_LEN].copy_from_slice(&frame::encode_header(kind, call, length));
        self.write(&bytes);
    }

    fn write(&self, bytes: &[u8]) {
        if self.write_directly(bytes) {
            return;
        }
        self.write_and_wake(|buffer| {
            let result = buffer.bytes.put(bytes);
            buffer.record_result(result);
            buffer.put_part_in_turn(bytes.len());
        });
    }

    /// Calls `write` unless the output is broken. If there was no backlog before and `write` leaves some, or if `write`
    /// breaks the output, wakes the thread that calls [`Self::flush`].
    fn write_and_wake(&self, write: impl FnOnce(&mut Buffer)) {
        let mut buffer = self.lock_to_write();
        if buffer.is_broken {
            return;
        }
        let was_empty = buffer.backlog() == 0;
        write(&mut buffer);
        self.update_congestion(&buffer);
        let needs_flush = was_empty && buffer.backlog() > 0 || buffer.is_broken;
        // Only from here on does the woken thread see the backlog.
        drop(buffer);
        if needs_flush {
            self.waker.wake();
        }
    }
}

impl Buffer {
    fn record_result(&mut self, result: io::Result<()>) {
        // The error is not logged with `tracing`: the caller holds the buffer's lock, and a subscriber might wait for it.
        if result.is_err() {
            self.is_broken = true;
            self.large.clear();
        }
    }

    fn backlog(&self) -> usize {
        self.bytes.backlog() + self.large.iter().map(LargeAnswer::unwritten_len).sum::<usize>()
    }

    /// Returns the number of unwritten bytes in a connection's large answers.
    fn large_answer_bytes(&self, connection: u64) -> usize {
        self.large.iter().filter(|large| large.connection == connection).map(LargeAnswer::unwritten_len).sum()
    }

    /// Writes up to `max` parts of the large answers, while the descriptor accepts them.
    fn write_parts(&mut self, max: usize) {
        for _ in 0..max {
            if !self.bytes.is_empty() {
                return;
            }
            self.put_next_part();
        }
    }

    /// Puts the next part after other frames of [`PART_LEN`] bytes in all, of which the last has `length` bytes. Otherwise,
    /// large answers would wait as long as other frames fill the buffer.
    fn put_part_in_turn(&mut self, length: usize) {
        if self.large.is_empty() {
            return;
        }
        self.bytes_since_part += length;
        if self.bytes_since_part >= PART_LEN {
            self.put_next_part();
        }
    }

    fn put_next_part(&mut self) {
        self.bytes_since_part = 0;
        let Some(large) = self.large.front_mut() else { return };
        let result = self.bytes.put(large.next_frame());
        if large.unwritten_len() == 0 {
            self.large.pop_front();
        }
        self.record_result(result);
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Writes the backlogs of these outputs until all are empty or broken, or until the time `end`.
pub(crate) fn drain(outputs: &[Arc<Output>], end: Instant) {
    loop {
        let waiting: Vec<_> = outputs.iter().filter(|output| output.backlog() > 0 && !output.is_broken()).collect();
        let left = end.saturating_duration_since(Instant::now());
        if waiting.is_empty() || left.is_zero() {
            return;
        }
        let mut set = PollSet::new();
        for (index, output) in waiting.iter().enumerate() {
            set.add_write(index, &***output);
        }
        let Ok(ready) = set.wait(Some(left)) else { return };
        ready.names().for_each(|index| waiting[index].flush());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};

    use super::*;

    /// Reads all frames from `output`, as a supervisor does.
    fn read_all(output: Output, mut reader: PipeReader) -> Vec<(FrameKind, u64, Vec<u8>)> {
        let (mut bytes, mut chunk) = (Vec::new(), vec![0; 1 << 20]);
        while output.backlog() > 0 {
            let read = reader.read(&mut chunk).unwrap();
            bytes.extend_from_slice(&chunk[..read]);
            output.flush();
        }
        drop(output);
        reader.read_to_end(&mut bytes).unwrap();
        let (mut frames, mut rest) = (Vec::new(), &bytes[..]);
        while let Some(((kind, call, payload), length)) = frame::parse(rest).unwrap() {
            frames.push((kind, call, payload.to_vec()));
            rest = &rest[length..];
        }
        assert!(rest.is_empty());
        frames
    }

    fn framed_output() -> (PipeReader, Output) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, Output::new(writer.into(), Recipient::Supervisor, Arc::new(Waker::new().unwrap())).unwrap())
    }

    #[test]
    fn a_small_answer_overtakes_large_answers() {
        let (reader, output) = framed_output();
        let text = "x".repeat(10 * PART_LEN);
        output.answer(1, EncodedLine::new(&text).unwrap());
        output.answer(2, EncodedLine::new(&text).unwrap());
        output.answer(3, EncodedLine::new(&"small").unwrap());
        let frames = read_all(output, reader);
        let small = frames.iter().position(|(_, call, _)| *call == 3).unwrap();
        assert!(small < 4, "{small} frames came before the small one");
        for call in [1, 2] {
            let of_call = || frames.iter().filter(|(_, of, _)| *of == call);
            let line: Vec<u8> = of_call().flat_map(|(.., payload)| payload.clone()).collect();
            assert_eq!(line, format!("\"{text}\"\n").into_bytes());
            assert!(of_call().rev().skip(1).all(|(kind, ..)| *kind == FrameKind::Part));
            assert_eq!(of_call().next_back().unwrap().0, FrameKind::Answer);
        }
        let second = frames.iter().position(|(_, call, _)| *call == 2).unwrap();
        assert!(frames[second..].iter().all(|(_, call, _)| *call != 1), "the parts of two answers are mixed");
    }

    /// The medium answers never leave the buffer empty.
    #[test]
    fn a_large_answer_takes_turns_with_medium_answers() {
        let (reader, output) = framed_output();
        let answer = |call, length| output.answer(call, EncodedLine::new(&"x".repeat(length)).unwrap());
        while output.accepts_requests() {
            answer(1, PART_LEN / 2);
        }
        answer(2, 10 * PART_LEN);
        (0..40).for_each(|_| answer(3, PART_LEN / 2));
        let frames = read_all(output, reader);
        let large: Vec<_> = (0..frames.len()).filter(|index| frames[*index].1 == 2).collect();
        assert!(*large.last().unwrap() < frames.len() - 1, "the large answer comes after all medium answers");
        assert!(large.windows(2).all(|parts| parts[1] == parts[0] + 3), "a part does not wait for two medium answers");
    }

    #[test]
    fn a_thread_waits_until_the_supervisor_has_read_enough() {
        let (mut reader, output) = framed_output();
        let text = "x".repeat(PART_LEN / 2);
        while output.accepts_requests() {
            output.answer(1, EncodedLine::new(&text).unwrap());
        }
        let begun = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                begun.wait();
                output.wait_for_supervisor();
                output.accepts_requests()
            });
            begun.wait();
            let mut chunk = vec![0; PART_LEN];
            while !output.accepts_requests() {
                assert!(!waiting.is_finished(), "the thread does not wait");
                assert_ne!(reader.read(&mut chunk).unwrap(), 0);
                output.flush();
            }
            assert!(waiting.join().unwrap());
        });
    }

    #[test]
    fn an_event_after_queue_large_answers_follows_all_their_parts() {
        let (reader, output) = framed_output();
        output.answer(1, EncodedLine::new(&"x".repeat(10 * PART_LEN)).unwrap());
        output.queue_large_answers();
        output.send_event(b"{}");
        assert_eq!(read_all(output, reader).pop(), Some((FrameKind::Event, 0, b"{}".to_vec())));
    }
}
