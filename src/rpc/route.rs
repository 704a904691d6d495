//! Marks on the lines that a supervisor hands on to a worker: each line begins with `@` and the number of a client's
//! connection, then come a colon, the line's own number, a space, and the line as the client wrote it. When there is nothing
//! behind the number, the client is gone. A long line comes in pieces, between which other clients' lines may stand: all but
//! the last have a `+` in place of the space. A `!` in place of the colon marks a notice.

/// Marks a client's line, or the last piece of one, with its newline; an empty one when the client is gone.
pub(crate) fn line(connection: u64, number: u64, bytes: &[u8]) -> Vec<u8> {
    let end = if bytes.is_empty() { "\n" } else { " " };
    [format!("@{connection}:{number}{end}").as_bytes(), bytes].concat()
}

/// Marks a piece of a client's line, which has no newline. [`line`] marks the last piece.
pub(crate) fn piece(connection: u64, number: u64, bytes: &[u8]) -> Vec<u8> {
    [format!("@{connection}:{number}+").as_bytes(), bytes, b"\n"].concat()
}

/// Marks a text of the supervisor's own for a client, which its session is to report. The text is cut to one line.
pub(crate) fn notice(connection: u64, text: &str) -> Vec<u8> {
    format!("@{connection}!{}\n", text.replace(['\n', '\r'], " ")).into_bytes()
}

/// The content of a line that the worker reads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// The line with this number, or the last piece of it.
    Line(u64, &'a [u8]),
    /// A piece of the line with this number, which more will follow.
    Piece(u64, &'a [u8]),
    /// A text of the supervisor's own for this client.
    Notice(&'a [u8]),
    /// The client is gone, as the line with this number says.
    End(u64),
}

/// Returns the number of the connection that a line belongs to, and its content; `None` for what no supervisor writes.
pub(crate) fn parse(line: &[u8]) -> Option<(u64, Part<'_>)> {
    let (connection, rest) = number(line.strip_prefix(b"@")?)?;
    let part = match rest {
        [b'!', text @ .., b'\n'] => Part::Notice(text),
        [b':', rest @ ..] => match number(rest)? {
            (number, b"\n") => Part::End(number),
            (number, [b' ', line @ ..]) => Part::Line(number, line),
            (number, [b'+', piece @ .., b'\n']) => Part::Piece(number, piece),
            _ => return None,
        },
        _ => return None,
    };
    Some((connection, part))
}

/// Splits off the number that a text begins with.
fn number(text: &[u8]) -> Option<(u64, &[u8])> {
    let (digits, rest) = text.split_at(text.iter().position(|byte| !byte.is_ascii_digit())?);
    Some((str::from_utf8(digits).ok()?.parse().ok()?, rest))
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
        fn what_is_marked_is_parsed(connection in 0_u64..20, number in 1_u64..2000, text in "[@0-9 :+!{}]{0,12}\n") {
            let marked = line(connection, number, text.as_bytes());
            prop_assert_eq!(parse(&marked), Some((connection, Part::Line(number, text.as_bytes()))));
            let text = text.trim_end_matches('\n').as_bytes();
            let piece = piece(connection, number, text);
            prop_assert_eq!(parse(&piece), Some((connection, Part::Piece(number, text))));
        }
    }

    #[test]
    fn notices_are_lines_of_their_own() {
        assert_eq!(parse(&notice(3, "two\nlines")), Some((3, Part::Notice(b"two lines"))));
    }

    #[test]
    fn the_end_of_a_client_is_told() {
        assert_eq!(line(7, 12, b""), b"@7:12\n");
        assert_eq!(parse(b"@7:12\n"), Some((7, Part::End(12))));
    }

    #[test]
    fn what_no_supervisor_writes_is_refused() {
        for line in ["{}\n", "@\n", "@7\n", "@7 {}\n", "@7:\n", "@7:x {}\n", "@7:1", "@7:1+", "@7!x"] {
            assert_eq!(parse(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn job_numbers_rise_with_calls_and_parts() {
        let numbers = [job_number(1, 0), job_number(1, 1), job_number(1, 1 << 30), job_number(2, 0)];
        assert!(numbers.is_sorted_by(|a, b| a < b));
        assert_eq!(numbers.map(call_of_job), [1, 1, 1, 2]);
    }
}
