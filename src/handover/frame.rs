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

/// What every frame begins with. Anything else was not written by a worker.
const MAGIC: [u8; 3] = [0xfe, b'S', b'M'];

/// What a frame is about. `line` is the number in its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// For the client: all that `line` asked for.
    Answer = 1,
    /// For the client whose connection has the number in `line`: anything else.
    Message,
    /// `line` wants no answer, or none any more.
    Done,
    /// The payload belongs to the handshake, once `line` is answered or done.
    Keep,
    /// An [`Entry`](super::Entry) for the journal.
    Defined,
    /// An [`ErrorChange`](super::ErrorChange) of the connection with the number in `line`.
    Error,
    /// The limits, as JSON.
    Limits,
    /// The image is as it was: a [`Restored`](super::Restored).
    Restored,
    /// `line` asks for a fresh image, which says what this one had to say yet: a list of texts.
    Reset,
    /// The image is being saved from here on, in a file of this name: a string.
    Saving,
    /// That is a [`Checkpoint`](crate::checkpoints::Checkpoint) now.
    Saved,
    /// `line` asks for the image of a checkpoint: a [`Return`](super::Return).
    Return,
    /// Process number `line` saves a session that lasts, and goes on when all others end.
    Saver,
    /// An evaluation, or something else that Lisp does, cannot be stopped: an `Option<Outcome>`.
    Stuck,
    /// The worker ends, with `line` as its status: an `Option<String>`, why it cannot serve.
    Bye,
    /// The worker serves, though it may have something to restore yet. The first frame of every worker, unless it is a
    /// `Bye`.
    Ready,
}

impl Kind {
    const ALL: [Self; 16] = [
        Self::Answer,
        Self::Message,
        Self::Done,
        Self::Keep,
        Self::Defined,
        Self::Error,
        Self::Limits,
        Self::Restored,
        Self::Reset,
        Self::Saving,
        Self::Saved,
        Self::Return,
        Self::Saver,
        Self::Stuck,
        Self::Bye,
        Self::Ready,
    ];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// The longest payload, in bytes: for lines, more than a worker writes; of all that the next one is given together,
    /// no more than that reads as one line.
    const fn max_payload(self) -> usize {
        match self {
            Self::Answer | Self::Message => 256 << 20,
            Self::Keep => 1 << 20,
            _ => 8 << 20,
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

/// A whole frame. A payload that is too long is left out: what the frame says beyond its kind is lost.
pub(crate) fn frame(kind: Kind, line: u64, payload: &[u8]) -> Vec<u8> {
    let payload = if payload.len() > kind.max_payload() { &[] } else { payload };
    [&header(kind, line, payload.len()), payload].concat()
}

/// A frame that was read: its kind, line and payload.
pub(crate) type Frame<'a> = (Kind, u64, &'a [u8]);

/// What no worker writes.
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
    if matches!(kind, Kind::Answer | Kind::Message)
        && memchr::memchr(b'\n', payload).is_none_or(|end| end + 1 != length)
    {
        // Not one line.
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
            let bytes = frame(kind, u64::MAX - 1, b"text\n");
            let read = (kind, u64::MAX - 1, &b"text\n"[..]);
            assert_eq!(parse(&[&*bytes, b"more"].concat()), Ok(Some((read, HEADER + 5))));
            assert!((0..bytes.len()).all(|end| parse(&bytes[..end]) == Ok(None)));
        }
    }

    #[test]
    fn what_no_worker_writes_is_found_at_once() {
        for bytes in [&b"{"[..], b"\xfeS{", &header(Kind::Answer, 1, 1 << 30), &header(Kind::Bye, 1, 1 << 26)] {
            assert_eq!(parse(bytes), Err(Malformed));
        }
        for text in [&b""[..], b"no newline", b"two\nlines\n"] {
            assert_eq!(parse(&frame(Kind::Answer, 1, text)), Err(Malformed));
        }
        let long = frame(Kind::Stuck, 1, &vec![0; 9 << 20]);
        assert_eq!(parse(&long), Ok(Some(((Kind::Stuck, 1, &b""[..]), HEADER))));
    }
}
