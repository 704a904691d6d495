//! Whose line it is that a supervisor hands on: one of a client that has joined begins with `@`, the number of its
//! connection and a space. When there is nothing behind the number, that client is gone. A long line comes in pieces, between which
//! other clients' lines may stand: all but the last have a `+` in place of the space. Lines of the server's own client
//! are as it wrote them, but for those that begin with `@` themselves.

use std::borrow::Cow;

/// What a worker reads for a client's line.
pub(crate) fn marked(connection: u64, line: &[u8]) -> Cow<'_, [u8]> {
    if connection == 0 && line.first() != Some(&b'@') {
        return Cow::Borrowed(line);
    }
    let end = if line.is_empty() { "\n" } else { " " };
    Cow::Owned([format!("@{connection}{end}").as_bytes(), line].concat())
}

/// Marks a piece of a client's line, which has no newline, for the worker. [`last`] marks the last piece.
pub(crate) fn piece(connection: u64, bytes: &[u8]) -> Vec<u8> {
    [format!("@{connection}+").as_bytes(), bytes, b"\n"].concat()
}

/// Marks the last piece of a client's line, with its newline, for the worker.
pub(crate) fn last(connection: u64, bytes: &[u8]) -> Vec<u8> {
    [format!("@{connection} ").as_bytes(), bytes].concat()
}

/// Marks a text of the supervisor's own for a client, which its session is to report. The text is cut to one line.
pub(crate) fn notice(connection: u64, text: &str) -> Vec<u8> {
    format!("@{connection}!{}\n", text.replace(['\n', '\r'], " ")).into_bytes()
}

/// The content of a line that the worker reads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// A line, or the last piece of one.
    Line(&'a [u8]),
    /// A piece of a line, which more will follow.
    Piece(&'a [u8]),
    /// A text of the supervisor's own for this client.
    Notice(&'a [u8]),
    /// The client is gone.
    End,
}

/// Returns the number of the connection that a line belongs to, and its content.
pub(crate) fn parse(line: &[u8]) -> (u64, Part<'_>) {
    let split = || {
        let rest = line.strip_prefix(b"@")?;
        let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
        let connection = str::from_utf8(&rest[..digits]).ok()?.parse().ok()?;
        match &rest[digits..] {
            b"\n" => Some((connection, Part::End)),
            [b' ', line @ ..] => Some((connection, Part::Line(line))),
            [b'+', piece @ .., b'\n'] => Some((connection, Part::Piece(piece))),
            [b'!', text @ .., b'\n'] => Some((connection, Part::Notice(text))),
            _ => None,
        }
    };
    split().unwrap_or((0, Part::Line(line)))
}

/// Bits of a job's number that are not its call's.
const CALL_SHIFT: u32 = 28;
/// Bits that leave room for jobs that no call asked for.
const PART_SHIFT: u32 = 8;

/// The least number for the job that the `part`th message of a call asks for. Numbers rise with calls, and within a batch.
pub(crate) fn job_number(call: u64, part: usize) -> u64 {
    let parts = 1 << (CALL_SHIFT - PART_SHIFT);
    (call << CALL_SHIFT) | ((part as u64).min(parts - 1) << PART_SHIFT)
}

/// The number of the call that asked for a job.
pub(crate) fn call_of_job(number: u64) -> u64 {
    number >> CALL_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever a client writes, it is taken for that, and for that client's.
        #[test]
        fn what_is_marked_is_parsed(connection in 0_u64..20, text in "[@0-9 {}]{0,12}\n") {
            let line = marked(connection, text.as_bytes());
            prop_assert_eq!(parse(&line), (connection, Part::Line(text.as_bytes())));
            let text = text.trim_end_matches('\n').as_bytes();
            let piece = piece(connection, text);
            prop_assert_eq!(parse(&piece), (connection, Part::Piece(text)));
        }
    }

    #[test]
    fn notices_are_lines_of_their_own() {
        assert_eq!(parse(&notice(3, "two\nlines")), (3, Part::Notice(b"two lines")));
    }

    #[test]
    fn job_numbers_rise_with_calls_and_parts() {
        let numbers = [job_number(1, 0), job_number(1, 1), job_number(1, 1 << 30), job_number(2, 0)];
        assert!(numbers.is_sorted_by(|a, b| a < b));
        assert_eq!(numbers.map(call_of_job), [1, 1, 1, 2]);
    }

    #[test]
    fn the_end_of_a_client_is_told() {
        assert_eq!(&*marked(7, b""), b"@7\n");
        assert_eq!(parse(b"@7\n"), (7, Part::End));
        assert_eq!(&*marked(0, b"{}\n"), b"{}\n");
    }
}
