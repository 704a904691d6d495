//! The clients that have joined by the server's socket.

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::os::poll_set::PollSet;
use crate::rpc::WriteBuffer;
use crate::rpc::attach::{Listener, MAX_GUESTS};
use crate::rpc::framing::{Line, LineReader, Read};
use crate::rpc::output::MAX_UNREAD;

/// One of them.
#[derive(Debug)]
struct Guest {
    /// The number of its connection.
    connection: u64,
    input: LineReader,
    output: WriteBuffer,
    is_gone: bool,
}

/// The socket, and all that have joined.
#[derive(Debug)]
pub(super) struct Guests {
    /// `None` where there is no socket, or no more may join.
    listener: Option<Listener>,
    guests: Vec<Guest>,
    last: u64,
}

/// What of them is waited for: the socket, and what those with these connections say and read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watched {
    Listener,
    Input(u64),
    Output(u64),
}

/// What one of them does.
pub(super) enum Event<'a> {
    Joined,
    Said(Line<'a>),
    Left,
}

impl Guests {
    pub(super) fn new(listener: Option<Listener>) -> Self {
        Self { listener, guests: Vec::new(), last: 0 }
    }

    /// Adds what is to be waited for; `reads`: more of a connection's requests may be taken.
    pub(super) fn watch<'a, T: Copy + PartialEq>(
        &'a self,
        set: &mut PollSet<'a, T>,
        name: impl Fn(Watched) -> T,
        reads: impl Fn(u64) -> bool,
    ) {
        if let Some(listener) = &self.listener {
            set.read(name(Watched::Listener), listener);
        }
        for guest in &self.guests {
            if guest.output.backlog() <= MAX_UNREAD && reads(guest.connection) {
                set.read(name(Watched::Input(guest.connection)), &guest.input);
            }
            if !guest.output.is_empty() {
                set.write(name(Watched::Output(guest.connection)), &guest.output);
            }
        }
    }

    /// Takes who connects, reads and writes, and calls `take` with the connection and what happens by it.
    pub(super) fn attend(&mut self, is_ready: impl Fn(Watched) -> bool, mut take: impl FnMut(u64, Event<'_>)) {
        for guest in &mut self.guests {
            if is_ready(Watched::Output(guest.connection)) {
                guest.is_gone |= guest.output.flush().is_err();
            }
            if is_ready(Watched::Input(guest.connection)) {
                let read = guest.input.read();
                while let Some(line) = guest.input.next_line() {
                    take(guest.connection, Event::Said(line));
                }
                guest.is_gone |= !read.is_ok_and(|read| read != Read::End);
            }
        }
        for guest in self.guests.extract_if(.., |guest| guest.is_gone) {
            take(guest.connection, Event::Left);
        }
        let Some(listener) = self.listener.as_ref().filter(|_| is_ready(Watched::Listener)) else { return };
        while let Some(stream) = listener.accept(self.guests.len() >= MAX_GUESTS) {
            let Ok((input, output)) = halves(stream) else { continue };
            self.last += 1;
            let (input, output) = (LineReader::new(input), WriteBuffer::new(output));
            self.guests.push(Guest { connection: self.last, input, output, is_gone: false });
            take(self.last, Event::Joined);
        }
    }

    /// Sends a line to one of them, if it is still there.
    pub(super) fn send(&mut self, connection: u64, line: Cow<'_, [u8]>) {
        if let Some(guest) = self.guests.iter_mut().find(|guest| guest.connection == connection) {
            guest.is_gone |= guest.output.put_whole(line).is_err();
        }
    }

    /// How much one of them has not read.
    pub(super) fn backlog(&self, connection: u64) -> usize {
        self.guests.iter().find(|guest| guest.connection == connection).map_or(0, |guest| guest.output.backlog())
    }

    /// Nobody joins any more, and nothing more is read.
    pub(super) fn close(&mut self) {
        self.listener = None;
    }
}

/// The two directions of a stream, neither of which blocks.
fn halves(stream: UnixStream) -> std::io::Result<(OwnedFd, OwnedFd)> {
    stream.set_nonblocking(true)?;
    let output = stream.try_clone()?;
    Ok((stream.into(), output.into()))
}
