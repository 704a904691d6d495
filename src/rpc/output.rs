//! What goes out: lines to a client, or the same in frames to a supervisor that hands them on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use super::WriteBuffer;
use super::descriptors::nonblocking_writer;
use super::recorder::Recorder;
use super::waker::Waker;
use crate::handover::frame::{self, Frame, HEADER, Kind};
use crate::id_scanner::IdScanner;

/// What remembers, in this very process, what another image must know: the supervisor's part where there is none.
pub(crate) trait Memory: std::fmt::Debug + Send + Sync {
    /// Takes a line that was read, which gets the next number.
    fn add(&self, line: &[u8]);
    /// Notes that a line is answered, or wants no answer. False when nobody waits for it.
    fn finished(&self, line: u64) -> bool;
    /// Takes what is to be remembered.
    fn note(&self, frame: Frame<'_>);
    /// Makes of this process one with another image, which reads from `input` after `unread`, and writes to `output`
    /// after `unsent`. `unread` may begin within a line that is too long, and comes with what has read that so far.
    fn replace(
        &self,
        input: BorrowedFd<'_>,
        unread: (&[u8], Option<&IdScanner>),
        output: BorrowedFd<'_>,
        unsent: &[u8],
    ) -> !;
}

/// Who reads.
#[derive(Debug, Clone)]
pub(crate) enum Reader {
    /// The client.
    Client,
    /// The client, of a process that remembers for itself.
    ClientOf(Arc<dyn Memory>),
    /// A supervisor.
    Supervisor,
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
    broken: bool,
}

impl Output {
    /// Writes to `fd`. `waker` is used when something is left for [`Self::flush`].
    pub(crate) fn new(fd: OwnedFd, reader: Reader, waker: Arc<Waker>) -> io::Result<Self> {
        let fd = Arc::new(nonblocking_writer(fd)?);
        let buffer = Buffer { bytes: WriteBuffer::new(fd.clone()), broken: false };
        Ok(Self { fd, buffer: Arc::new(Mutex::new(buffer)), reader, connection: 0, waker })
    }

    /// The same way out, for another client of the supervisor's.
    pub(crate) fn for_connection(&self, connection: u64) -> Self {
        let Self { fd, buffer, reader, waker, .. } = self;
        Self { fd: fd.clone(), buffer: buffer.clone(), reader: reader.clone(), connection, waker: waker.clone() }
    }

    /// True when a supervisor hands on what goes out.
    pub(crate) fn is_framed(&self) -> bool {
        matches!(self.reader, Reader::Supervisor)
    }

    /// True when somebody remembers what another image must know.
    pub(crate) fn is_remembered(&self) -> bool {
        !matches!(self.reader, Reader::Client)
    }

    /// Has all lines recorded.
    pub(crate) fn recorded(self, recorder: Option<Recorder>) -> Self {
        self.buffer.lock().bytes = WriteBuffer::new(self.fd.clone()).recorded(recorder);
        self
    }

    /// Sends all that `line` asked for.
    pub(crate) fn answer(&self, line: u64, message: &impl Serialize) {
        self.put(Kind::Answer, line, message);
    }

    /// Sends what is no answer.
    pub(crate) fn send(&self, message: &impl Serialize) {
        self.put(Kind::Message, self.connection, message);
    }

    /// Begins with what another process had not written yet; before all else.
    pub(crate) fn take_over(&self, unsent: &[u8]) {
        let mut buffer = self.buffer.lock();
        let result = buffer.bytes.put_again(unsent);
        buffer.note(result);
    }

    /// What remembers, where this process does.
    pub(crate) fn memory(&self) -> Option<&Arc<dyn Memory>> {
        match &self.reader {
            Reader::ClientOf(memory) => Some(memory),
            _ => None,
        }
    }

    /// Makes of this process one with another image, if it remembers for itself.
    pub(crate) fn replace(&self, input: BorrowedFd<'_>, unread: (&[u8], Option<&IdScanner>)) {
        if let Some(memory) = self.memory() {
            // Nothing is answered from here on.
            let buffer = self.buffer.lock();
            memory.replace(input, unread, self.fd.as_fd(), buffer.bytes.unsent());
        }
    }

    /// Notes that `line` gets no answer.
    pub(crate) fn done(&self, line: u64) {
        match &self.reader {
            Reader::Client => {}
            Reader::ClientOf(memory) => drop(memory.finished(line)),
            Reader::Supervisor => self.write(&frame::header(Kind::Done, line, 0)),
        }
    }

    /// Tells the supervisor something, or whoever remembers; a client is told nothing.
    pub(crate) fn tell(&self, kind: Kind, line: u64, content: &impl Serialize) {
        if !self.is_remembered() {
            return;
        }
        let payload = match serde_json::to_vec(content) {
            Ok(payload) => payload,
            Err(error) => return tracing::error!(%error, "word for the supervisor is lost"),
        };
        match &self.reader {
            Reader::ClientOf(memory) => memory.note((kind, line, &payload)),
            _ => self.write(&frame::frame(kind, line, &payload)),
        }
    }

    /// Writes what is left, as far as it goes.
    pub(crate) fn flush(&self) {
        let mut buffer = self.buffer.lock();
        let result = buffer.bytes.flush();
        buffer.note(result);
    }

    /// How many bytes are left.
    pub(crate) fn backlog(&self) -> usize {
        self.buffer.lock().bytes.backlog()
    }

    /// True when nobody reads any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.buffer.lock().broken
    }

    fn put(&self, kind: Kind, line: u64, message: &impl Serialize) {
        let mut bytes = Vec::with_capacity(256);
        let header = if self.is_framed() { HEADER } else { 0 };
        bytes.resize(header, 0);
        if let Err(error) = serde_json::to_writer(&mut bytes, message) {
            tracing::error!(%error, "an answer cannot be written");
            return;
        }
        bytes.push(b'\n');
        let length = bytes.len() - header;
        bytes[..header].copy_from_slice(&frame::header(kind, line, length)[..header]);
        self.write_if(&bytes, || {
            // Together with the writing: another image answers what is not finished.
            self.memory().is_none_or(|memory| kind != Kind::Answer || memory.finished(line))
        });
    }

    fn write(&self, bytes: &[u8]) {
        self.write_if(bytes, || true);
    }

    fn write_if(&self, bytes: &[u8], wanted: impl FnOnce() -> bool) {
        let mut buffer = self.buffer.lock();
        if !wanted() || buffer.broken {
            return;
        }
        let was_empty = buffer.bytes.is_empty();
        let result = buffer.bytes.put(bytes);
        buffer.note(result);
        if was_empty && !buffer.bytes.is_empty() || buffer.broken {
            self.waker.wake();
        }
    }
}

impl Buffer {
    fn note(&mut self, result: io::Result<()>) {
        if let Err(error) = result {
            tracing::debug!(%error, "the client no longer reads");
            self.broken = true;
        }
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
