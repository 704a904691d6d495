//! Frames, the units in which a worker writes to its supervisor.
//!
//! A frame is a header of 16 bytes and a payload. The header is [`MAGIC`], the kind, the length of the payload, and a
//! number whose meaning depends on the kind. The length and the number are little-endian.
//!
//! Frames are no defence against malicious code: code in the worker's address space can write any frame, and so answer
//! for the server, drop a request, make the supervisor replace the image or, during the first start or if repeated, end
//! the server. Frames do prevent accidents: the descriptors have high numbers, no program that Lisp starts inherits them,
//! and bytes that are not a frame are detected at once. Since the size of a frame is bounded, no frame can make the
//! supervisor block or run out of memory.

/// Length of a header, in bytes.
pub(crate) const HEADER_LEN: usize = 16;

/// The first bytes of every frame. Other bytes were not written by a worker.
const MAGIC: [u8; 3] = [0xfe, b'S', b'M'];

/// Maximum size of a worker's answer or message, in bytes.
pub(crate) const MAX_LINE_PAYLOAD: usize = 256 << 20;
/// Length of a [part](FrameKind::Part), in bytes. Longer answers are sent in parts, so that a small frame of another client
/// does not wait for a whole large answer.
pub(crate) const PART_LEN: usize = 64 << 10;
/// Maximum size of a worker's event, in bytes.
pub(crate) const MAX_EVENT: usize = 8 << 20;

/// The kinds of frames. `call` is the number in the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FrameKind {
    /// The answer to `call`, for its client.
    Answer = 1,
    /// Any other line for a client. `call` is the number of the client's connection.
    Message,
    /// The end of `call` without an answer. No payload.
    Done,
    /// A [`WorkerEvent`](crate::recovery::event::WorkerEvent), as JSON.
    Event,
    /// A report of how many lines the worker has received so far. The number in the header is this count. No payload.
    Received,
    /// The next bytes of the answer to `call`. An `Answer` frame has the last bytes. Other frames may come between the
    /// parts of an answer, but not parts of another answer.
    Part,
}

impl FrameKind {
    const ALL: [Self; 6] = [Self::Answer, Self::Message, Self::Done, Self::Event, Self::Received, Self::Part];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns the maximum length of a payload, in bytes.
    const fn max_payload(self) -> usize {
        match self {
            Self::Answer | Self::Message => MAX_LINE_PAYLOAD,
            Self::Done | Self::Event | Self::Received => MAX_EVENT,
            Self::Part => PART_LEN,
        }
    }
}

/// Encodes the header of a frame.
pub(crate) fn encode_header(kind: FrameKind, number: u64, length: usize) -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    header[..3].copy_from_slice(&MAGIC);
    header[3] = kind as u8;
    header[4..8].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    header[8..].copy_from_slice(&number.to_le_bytes());
    header
}

/// Encodes a frame with an event of at most [`MAX_EVENT`] bytes.
pub(crate) fn encode_event(payload: &[u8]) -> Vec<u8> {
    [&encode_header(FrameKind::Event, 0, payload.len()), payload].concat()
}

/// A parsed frame: its kind, number and payload.
pub(crate) type Frame<'a> = (FrameKind, u64, &'a [u8]);

/// The error for bytes that no worker writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MalformedFrame;

/// Parses the frame at the start of `bytes`. Returns the frame with its total length, or `None` if the frame is
/// incomplete.
///
/// # Errors
/// Returns an error for bytes that no worker writes: a wrong magic number or kind, a payload that is too long, or a payload
/// whose newlines do not match the kind.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, MalformedFrame> {
    if bytes.iter().zip(MAGIC).any(|(byte, expected)| *byte != expected) {
        return Err(MalformedFrame);
    }
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else { return Ok(None) };
    let kind = FrameKind::from_code(header[3]).ok_or(MalformedFrame)?;
    let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
    if length > kind.max_payload() {
        return Err(MalformedFrame);
    }
    let Some(payload) = rest.get(..length) else { return Ok(None) };
    let end_of_line = memchr::memchr(b'\n', payload);
    let is_intact = match kind {
        FrameKind::Answer | FrameKind::Message => end_of_line.is_some_and(|end| end + 1 == length),
        FrameKind::Part => end_of_line.is_none(),
        FrameKind::Done | FrameKind::Event | FrameKind::Received => true,
    };
    if !is_intact {
        // An answer or message must be exactly one line, and a part must not have a newline.
        return Err(MalformedFrame);
    }
    let number = header[8..].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    Ok(Some(((kind, number, payload), HEADER_LEN + length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_frames_are_parsed_and_incomplete_frames_are_not() {
        for kind in FrameKind::ALL {
            let payload = if kind == FrameKind::Part { b"text " } else { b"text\n" };
            let bytes = [&encode_header(kind, u64::MAX - 1, 5)[..], payload].concat();
            let read = (kind, u64::MAX - 1, &payload[..]);
            assert_eq!(parse(&[&*bytes, b"more"].concat()), Ok(Some((read, HEADER_LEN + 5))));
            assert!((0..bytes.len()).all(|end| parse(&bytes[..end]) == Ok(None)));
        }
    }

    #[test]
    fn malformed_frames_are_rejected() {
        for bytes in [
            &b"{"[..],
            b"\xfeS{",
            &encode_header(FrameKind::Answer, 1, 1 << 30),
            &encode_header(FrameKind::Event, 1, 1 << 26),
        ] {
            assert_eq!(parse(bytes), Err(MalformedFrame));
        }
        for text in [&b""[..], b"no newline", b"two\nlines\n"] {
            assert_eq!(
                parse(&[&encode_header(FrameKind::Answer, 1, text.len())[..], text].concat()),
                Err(MalformedFrame)
            );
        }
        assert_eq!(parse(&[&encode_header(FrameKind::Part, 1, 2)[..], b"x\n"].concat()), Err(MalformedFrame));
        assert_eq!(parse(&encode_header(FrameKind::Part, 1, PART_LEN + 1)), Err(MalformedFrame));
        let event = encode_event(b"{}");
        assert_eq!(parse(&event), Ok(Some(((FrameKind::Event, 0, &b"{}"[..]), HEADER_LEN + 2))));
    }
}
