//! Frames: what a worker writes to its supervisor.
//!
//! A header of 16 bytes: [`MAGIC`], the kind, the payload's length and a line's number, both little-endian. Then the
//! payload.
//!
//! Nothing here keeps out code that means harm: what runs in the worker's address space can write any frame, and so
//! answer for the server, have a request forgotten, or have the image replaced. Accidents are kept out (the descriptors
//! are out of the way, no program that Lisp starts inherits them, and what is not a frame is found at once), and a
//! frame has bounds, whoever wrote it: it cannot make the supervisor wait, end, or use up memory.

/// Length of a header.
pub(crate) const HEADER: usize = 16;

/// The first bytes of every frame. Anything else was not written by a worker.
const MAGIC: [u8; 3] = [0xfe, b'S', b'M'];

/// The largest answer or message of a worker, in bytes.
pub(crate) const MAX_LINE_PAYLOAD: usize = 256 << 20;
/// An answer above this many bytes goes in [parts](Kind::Part) of this length: so much of it another client waits for.
pub(crate) const PART: usize = 64 << 10;
/// The largest event of a worker, in bytes.
pub(crate) const MAX_EVENT: usize = 8 << 20;

/// The kinds of frames. `call` is the number in the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The answer to `call`, for its client.
    Answer = 1,
    /// Any other line, for the client whose connection has the number in `call`.
    Message,
    /// Nothing: `call` wants no answer, or none any more.
    Done,
    /// A [`WorkerEvent`](crate::recovery::event::WorkerEvent), as JSON.
    Event,
    /// Nothing: the worker has received `call` lines in all.
    Received,
    /// The next bytes of the answer to `call`, of which an `Answer` has the last ones. Other frames may come in between, but
    /// not parts of another answer.
    Part,
}

impl Kind {
    const ALL: [Self; 6] = [Self::Answer, Self::Message, Self::Done, Self::Event, Self::Received, Self::Part];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// The longest payload, in bytes.
    const fn max_payload(self) -> usize {
        match self {
            Self::Answer | Self::Message => MAX_LINE_PAYLOAD,
            Self::Done | Self::Event | Self::Received => MAX_EVENT,
            Self::Part => PART,
        }
    }
}

/// A frame's header.
pub(crate) fn header(kind: Kind, line: u64, length: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..3].copy_from_slice(&MAGIC);
    header[3] = kind as u8;
    header[4..8].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    header[8..].copy_from_slice(&line.to_le_bytes());
    header
}

/// A frame with an event, which has at most [`MAX_EVENT`] bytes.
pub(crate) fn event(payload: &[u8]) -> Vec<u8> {
    [&header(Kind::Event, 0, payload.len()), payload].concat()
}

/// A frame that was read: its kind, line and payload.
pub(crate) type Frame<'a> = (Kind, u64, &'a [u8]);

/// The error for bytes that no worker writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed;

/// The frame that `bytes` begin with, and its length; `None` when they are not the whole of it.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, Malformed> {
    if bytes.iter().zip(MAGIC).any(|(byte, expected)| *byte != expected) {
        return Err(Malformed);
    }
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
    let kind = Kind::from_code(header[3]).ok_or(Malformed)?;
    let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
    if length > kind.max_payload() {
        return Err(Malformed);
    }
    let Some(payload) = rest.get(..length) else { return Ok(None) };
    let end_of_line = memchr::memchr(b'\n', payload);
    let is_intact = match kind {
        Kind::Answer | Kind::Message => end_of_line.is_some_and(|end| end + 1 == length),
        Kind::Part => end_of_line.is_none(),
        Kind::Done | Kind::Event | Kind::Received => true,
    };
    if !is_intact {
        // Not one line, or not a part of one.
        return Err(Malformed);
    }
    let line = header[8..].iter().rev().fold(0, |line, byte| line << 8 | u64::from(*byte));
    Ok(Some(((kind, line, payload), HEADER + length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for kind in Kind::ALL {
            let payload = if kind == Kind::Part { b"text " } else { b"text\n" };
            let bytes = [&header(kind, u64::MAX - 1, 5)[..], payload].concat();
            let read = (kind, u64::MAX - 1, &payload[..]);
            assert_eq!(parse(&[&*bytes, b"more"].concat()), Ok(Some((read, HEADER + 5))));
            assert!((0..bytes.len()).all(|end| parse(&bytes[..end]) == Ok(None)));
        }
    }

    #[test]
    fn what_no_worker_writes_is_found_at_once() {
        for bytes in [&b"{"[..], b"\xfeS{", &header(Kind::Answer, 1, 1 << 30), &header(Kind::Event, 1, 1 << 26)] {
            assert_eq!(parse(bytes), Err(Malformed));
        }
        for text in [&b""[..], b"no newline", b"two\nlines\n"] {
            assert_eq!(parse(&[&header(Kind::Answer, 1, text.len())[..], text].concat()), Err(Malformed));
        }
        assert_eq!(parse(&[&header(Kind::Part, 1, 2)[..], b"x\n"].concat()), Err(Malformed));
        assert_eq!(parse(&header(Kind::Part, 1, PART + 1)), Err(Malformed));
        let event = event(b"{}");
        assert_eq!(parse(&event), Ok(Some(((Kind::Event, 0, &b"{}"[..]), HEADER + 2))));
    }
}
