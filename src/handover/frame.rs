//! Frames: what a worker writes to its supervisor.
//!
//! A header of 16 bytes: [`MAGIC`], the kind, the payload's length and a line's number, both little-endian. Then the
//! payload.

/// Length of a header.
pub(crate) const HEADER: usize = 16;

/// What every frame begins with. Anything else was not written by a worker.
const MAGIC: [u8; 3] = [0xfe, b'S', b'M'];

/// The longest payload.
const MAX_PAYLOAD: usize = 1 << 30;

/// What a frame is about. `line` is the number in its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// For the client: all that `line` asked for.
    Answer = 1,
    /// For the client: anything else.
    Message,
    /// `line` wants no answer, or none any more.
    Done,
    /// The payload belongs to the handshake, once `line` is answered or done.
    Keep,
    /// An [`Entry`](super::Entry) for the journal.
    Defined,
    /// An [`ErrorChange`](super::ErrorChange).
    Error,
    /// The limits, as JSON.
    Limits,
    /// The worker is ready: a [`Restored`](super::Restored).
    Restored,
    /// `line` asks for a fresh image, which says what this one had to say yet: a list of texts.
    Reset,
    /// An evaluation, or something else that Lisp does, cannot be stopped: an `Option<Outcome>`.
    Stuck,
    /// The worker ends as it should, with `line` as its status.
    Bye,
}

impl Kind {
    const ALL: [Self; 11] = [
        Self::Answer,
        Self::Message,
        Self::Done,
        Self::Keep,
        Self::Defined,
        Self::Error,
        Self::Limits,
        Self::Restored,
        Self::Reset,
        Self::Stuck,
        Self::Bye,
    ];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
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

/// A whole frame.
pub(crate) fn frame(kind: Kind, line: u64, payload: &[u8]) -> Vec<u8> {
    [&header(kind, line, payload.len()), payload].concat()
}

/// What a header says: kind, line and the payload's length. `None` when no worker wrote it.
pub(crate) fn parse(header: &[u8; HEADER]) -> Option<(Kind, u64, usize)> {
    let length = u32::from_le_bytes(header[4..8].try_into().ok()?) as usize;
    let line = u64::from_le_bytes(header[8..].try_into().ok()?);
    if header[..3] != MAGIC || length > MAX_PAYLOAD {
        return None;
    }
    Some((Kind::from_code(header[3])?, line, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for kind in Kind::ALL {
            assert_eq!(parse(&header(kind, u64::MAX - 1, 7)), Some((kind, u64::MAX - 1, 7)));
        }
        assert_eq!(parse(b"{\"jsonrpc\":\"2.0\""), None);
        assert_eq!(parse(&header(Kind::Bye, 0, MAX_PAYLOAD + 1)), None);
    }
}
