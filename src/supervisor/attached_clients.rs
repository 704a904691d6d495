//! The clients that are attached through the server's socket.

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::requests::MAX_LINES_PER_STEP;
use crate::os::poll_set::PollSet;
use crate::rpc::WriteBuffer;
use crate::rpc::attach::{Listener, MAX_ATTACHED};
use crate::rpc::framing::{Line, LineReader, ReadStatus};
use crate::rpc::output::MAX_UNREAD;

/// The connection of an attached client.
#[derive(Debug)]
struct AttachedClient {
    /// The number of the connection.
    connection: u64,
    input: LineReader,
    output: WriteBuffer,
    /// True once the client has closed the connection, or reading or writing has failed.
    is_gone: bool,
}

/// The server's socket, and the clients that are attached through the socket.
#[derive(Debug)]
pub(super) struct AttachedClients {
    /// The socket; `None` if the server has no socket or is shutting down.
    listener: Option<Listener>,
    clients: Vec<AttachedClient>,
    /// The number of the newest connection.
    last_connection: u64,
}

/// A descriptor that the event loop polls: the socket, or the input or output of the connection with this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttachedDescriptor {
    Listener,
    Input(u64),
    Output(u64),
}

/// An event on a connection.
pub(super) enum ClientEvent<'a> {
    Connected,
    Line(Line<'a>),
    Disconnected,
}

impl AttachedClients {
    pub(super) fn new(listener: Option<Listener>) -> Self {
        Self { listener, clients: Vec::new(), last_connection: 0 }
    }

    /// Adds the descriptors to poll to `set`, each under the key that `name` returns. A connection is read only while
    /// `reads` returns true for its number and the client reads its answers.
    pub(super) fn add_descriptors<'a, T: Copy + PartialEq>(
        &'a self,
        set: &mut PollSet<'a, T>,
        name: impl Fn(AttachedDescriptor) -> T,
        reads: impl Fn(u64) -> bool,
    ) {
        if let Some(listener) = self.listener.as_ref().filter(|listener| listener.time_until_retry().is_none()) {
            set.add_read(name(AttachedDescriptor::Listener), listener);
        }
        for client in &self.clients {
            if client.output.backlog() <= MAX_UNREAD && reads(client.connection) {
                client.input.add_to(set, name(AttachedDescriptor::Input(client.connection)));
            }
            if !client.output.is_empty() {
                set.add_write(name(AttachedDescriptor::Output(client.connection)), &client.output);
            }
        }
    }

    /// Returns the time for which [`add_descriptors`](Self::add_descriptors) leaves out the socket; `None` if the socket is
    /// polled.
    pub(super) fn time_until_retry(&self) -> Option<Duration> {
        self.listener.as_ref()?.time_until_retry()
    }

    /// Writes output, reads lines and accepts clients on each descriptor for which `is_ready` returns true. Calls
    /// `handle` with the number of the connection and each event on it, but at most [`MAX_LINES_PER_STEP`] lines.
    pub(super) fn handle_ready(
        &mut self,
        is_ready: impl Fn(AttachedDescriptor) -> bool,
        mut handle: impl FnMut(u64, ClientEvent<'_>),
    ) {
        for client in &mut self.clients {
            if is_ready(AttachedDescriptor::Output(client.connection)) {
                client.is_gone |= client.output.flush().is_err();
            }
            if is_ready(AttachedDescriptor::Input(client.connection)) {
                let read = client.input.read();
                for _ in 0..MAX_LINES_PER_STEP {
                    let Some(line) = client.input.next_line() else { break };
                    handle(client.connection, ClientEvent::Line(line));
                }
                client.is_gone |= !read.is_ok_and(|read| read != ReadStatus::End);
            }
        }
        for client in self.clients.extract_if(.., |client| client.is_gone) {
            handle(client.connection, ClientEvent::Disconnected);
        }
        let Some(listener) = self.listener.as_ref().filter(|_| is_ready(AttachedDescriptor::Listener)) else { return };
        while let Some(stream) = listener.accept(self.clients.len() >= MAX_ATTACHED) {
            let Ok((input, output)) = split_stream(stream) else { return };
            self.last_connection += 1;
            let (input, output) = (LineReader::new(input), WriteBuffer::new(output));
            self.clients.push(AttachedClient { connection: self.last_connection, input, output, is_gone: false });
            handle(self.last_connection, ClientEvent::Connected);
        }
    }

    /// Sends the answer that `answer` returns for each line that was read and not handled, until the time `end`.
    pub(super) fn answer_unhandled(&mut self, end: Instant, answer: impl Fn(Line<'_>) -> Option<Vec<u8>>) {
        for client in &mut self.clients {
            while Instant::now() < end
                && let Some(line) = client.input.next_line()
            {
                if let Some(answer) = answer(line) {
                    client.is_gone |= client.output.put_owned(Cow::Owned(answer)).is_err();
                }
            }
        }
    }

    /// Returns the numbers of the connections.
    pub(super) fn connections(&self) -> Vec<u64> {
        self.clients.iter().map(|client| client.connection).collect()
    }

    /// Sends a line on a connection, if the client is still attached.
    pub(super) fn send(&mut self, connection: u64, line: Cow<'_, [u8]>) {
        if let Some(client) = self.clients.iter_mut().find(|client| client.connection == connection) {
            client.is_gone |= client.output.put_owned(line).is_err();
        }
    }

    /// Returns the backlog of a connection: the number of bytes that are not written to its socket yet.
    pub(super) fn backlog(&self, connection: u64) -> usize {
        self.clients.iter().find(|client| client.connection == connection).map_or(0, |client| client.output.backlog())
    }

    /// Closes the socket: no more clients can attach.
    pub(super) fn close(&mut self) {
        self.listener = None;
    }
}

/// Returns the nonblocking input and output of a stream.
fn split_stream(stream: UnixStream) -> std::io::Result<(OwnedFd, OwnedFd)> {
    stream.set_nonblocking(true)?;
    let output = stream.try_clone()?;
    Ok((stream.into(), output.into()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn the_lines_of_one_read_are_handled_in_several_steps() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let (input, output) = split_stream(theirs).unwrap();
        let (input, output) = (LineReader::new(input), WriteBuffer::new(output));
        let client = AttachedClient { connection: 1, input, output, is_gone: false };
        let mut attached = AttachedClients { listener: None, clients: vec![client], last_connection: 1 };
        ours.write_all("x\n".repeat(2 * MAX_LINES_PER_STEP + 1).as_bytes()).unwrap();
        let mut step = || {
            let mut set = PollSet::new();
            attached.add_descriptors(&mut set, |descriptor| descriptor, |_| true);
            let ready = set.wait(Some(Duration::ZERO)).unwrap();
            let mut lines = 0;
            attached.handle_ready(
                |descriptor| ready.has(descriptor),
                |_, event| lines += usize::from(matches!(event, ClientEvent::Line(_))),
            );
            lines
        };
        assert_eq!([(); 4].map(|()| step()), [MAX_LINES_PER_STEP, MAX_LINES_PER_STEP, 1, 0]);
    }

    #[test]
    fn lines_that_are_left_after_a_step_can_be_answered() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let (input, output) = split_stream(theirs).unwrap();
        let (input, output) = (LineReader::new(input), WriteBuffer::new(output));
        let client = AttachedClient { connection: 1, input, output, is_gone: false };
        let mut attached = AttachedClients { listener: None, clients: vec![client], last_connection: 1 };
        ours.write_all("x\n".repeat(MAX_LINES_PER_STEP + 2).as_bytes()).unwrap();
        attached.handle_ready(|descriptor| descriptor == AttachedDescriptor::Input(1), |_, _| ());
        attached.answer_unhandled(Instant::now(), |_| panic!("no time is left"));
        let end = Instant::now() + Duration::from_secs(20);
        attached.answer_unhandled(end, |line| (line == Line::Text(b"x\n".into())).then(|| b"answer\n".to_vec()));
        attached.answer_unhandled(end, |_| panic!("no line is left"));
        drop(attached);
        let mut answers = String::new();
        ours.read_to_string(&mut answers).unwrap();
        assert_eq!(answers, "answer\nanswer\n");
    }
}
