//! The marks on lines that a supervisor sends to a worker, and the numbers of calls and jobs.
//!
//! Each line begins with `@` and the number of a client's connection, then a colon, the call number, a space, and the
//! line as the client wrote it. A marked line that ends after the call number marks the end of the connection. A long
//! line is sent in pieces, so that lines of other clients can be sent between the pieces. All pieces except the last have
//! a `+` in place of the space. Before a line that an earlier worker has received, a marked line with a `^` in place of the
//! space tells how many milliseconds ago the supervisor received the line. In a notice, a `!` and the text follow the number
//! of the connection.

use std::time::Duration;

/// Maximum number of complete lines that a supervisor has sent and the worker has not yet reported as received. The limit
/// is small, since a client's lines cannot overtake other clients' lines that have been sent, and even a short line may have
/// a long answer.
pub(crate) const MAX_LINES_AHEAD: u64 = 64;
/// Number of lines after which the worker reports how many lines it has received.
pub(crate) const LINES_PER_REPORT: u64 = MAX_LINES_AHEAD / 4;

/// Marks a client's line, or the last piece of a line. `bytes` ends with the newline. Empty `bytes` mark the end of the
/// connection.
pub(crate) fn mark_line(connection: u64, number: u64, bytes: &[u8]) -> Vec<u8> {
    let end = if bytes.is_empty() { "\n" } else { " " };
    [format!("@{connection}:{number}{end}").as_bytes(), bytes].concat()
}

/// Marks a piece of a client's line other than the last piece, which [`mark_line`] marks. `bytes` has no newline.
pub(crate) fn mark_piece(connection: u64, number: u64, bytes: &[u8]) -> Vec<u8> {
    [format!("@{connection}:{number}+").as_bytes(), bytes, b"\n"].concat()
}

/// Marks the time since the supervisor received the line with the call number `number`.
pub(crate) fn mark_age(connection: u64, number: u64, age: Duration) -> Vec<u8> {
    format!("@{connection}:{number}^{}\n", age.as_millis()).into_bytes()
}

/// Marks a notice of the supervisor, which the worker passes to the client. Newlines become spaces.
pub(crate) fn mark_notice(connection: u64, text: &str) -> Vec<u8> {
    format!("@{connection}!{}\n", text.replace(['\n', '\r'], " ")).into_bytes()
}

/// The content of a marked line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MarkedContent<'a> {
    /// The line with this call number, or the line's last piece.
    Line(u64, &'a [u8]),
    /// A piece of the line with this call number, followed by other pieces.
    Piece(u64, &'a [u8]),
    /// The time since the supervisor received the line with this call number, which follows.
    Age(u64, Duration),
    /// A notice of the supervisor for the client of this connection.
    Notice(&'a [u8]),
    /// The end of the connection, which has a call number like a line.
    End(u64),
}

/// Returns the connection and the content of a marked line; `None` for a line that no supervisor writes.
pub(crate) fn parse(line: &[u8]) -> Option<(u64, MarkedContent<'_>)> {
    let (connection, rest) = split_number(line.strip_prefix(b"@")?)?;
    let part = match rest {
        [b'!', text @ .., b'\n'] => MarkedContent::Notice(text),
        [b':', rest @ ..] => match split_number(rest)? {
            (number, b"\n") => MarkedContent::End(number),
            (number, [b' ', line @ ..]) => MarkedContent::Line(number, line),
            (number, [b'+', piece @ .., b'\n']) => MarkedContent::Piece(number, piece),
            (number, [b'^', age @ .., b'\n']) => {
                MarkedContent::Age(number, Duration::from_millis(str::from_utf8(age).ok()?.parse().ok()?))
            }
            _ => return None,
        },
        _ => return None,
    };
    Some((connection, part))
}

/// Returns the decimal number at the start of `text`, and the rest of `text`, which must not be empty.
fn split_number(text: &[u8]) -> Option<(u64, &[u8])> {
    let (digits, rest) = text.split_at(text.iter().position(|byte| !byte.is_ascii_digit())?);
    Some((str::from_utf8(digits).ok()?.parse().ok()?, rest))
}

/// Number of low bits in a job's number. The bits above are the call's number.
const CALL_SHIFT: u32 = 28;
/// Number of low bits that are 0 in a result of [`job_number`]. Jobs that no call requested get the numbers in between.
const PART_SHIFT: u32 = 8;

/// Returns the lowest number for the jobs of a message. `call` is the message's call number; `part` is the index of the
/// message in its batch, or 0. Job numbers rise with the call number, and within a call with the index.
pub(crate) fn job_number(call: u64, part: usize) -> u64 {
    let parts = 1 << (CALL_SHIFT - PART_SHIFT);
    (call << CALL_SHIFT) | ((part as u64).min(parts - 1) << PART_SHIFT)
}

/// Returns the lowest number for the jobs of the message that requested a job, as [`job_number`] returned it.
pub(crate) fn first_job_of_message(number: u64) -> u64 {
    number >> PART_SHIFT << PART_SHIFT
}

/// Returns the number of the call that requested a job.
pub(crate) fn call_of_job(number: u64) -> u64 {
    number >> CALL_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A client cannot write text that is parsed as a line of another client.
        #[test]
        fn marked_lines_and_pieces_are_parsed_back(connection in 0_u64..20, number in 1_u64..2000, text in "[@0-9 :+!{}]{0,12}\n") {
            let marked = mark_line(connection, number, text.as_bytes());
            prop_assert_eq!(parse(&marked), Some((connection, MarkedContent::Line(number, text.as_bytes()))));
            let text = text.trim_end_matches('\n').as_bytes();
            let piece = mark_piece(connection, number, text);
            prop_assert_eq!(parse(&piece), Some((connection, MarkedContent::Piece(number, text))));
        }
    }

    #[test]
    fn newlines_in_a_notice_become_spaces() {
        assert_eq!(parse(&mark_notice(3, "two\nlines")), Some((3, MarkedContent::Notice(b"two lines"))));
    }

    #[test]
    fn the_end_of_a_connection_is_marked_and_parsed() {
        assert_eq!(mark_line(7, 12, b""), b"@7:12\n");
        assert_eq!(parse(b"@7:12\n"), Some((7, MarkedContent::End(12))));
    }

    #[test]
    fn the_age_of_a_line_is_marked_and_parsed() {
        let age = Duration::from_millis(1500);
        assert_eq!(parse(&mark_age(7, 12, age)), Some((7, MarkedContent::Age(12, age))));
    }

    #[test]
    fn lines_that_no_supervisor_writes_are_refused() {
        for line in
            ["@7:1^\n", "@7:1^x\n", "{}\n", "@\n", "@7\n", "@7 {}\n", "@7:\n", "@7:x {}\n", "@7:1", "@7:1+", "@7!x"]
        {
            assert_eq!(parse(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn job_numbers_rise_with_calls_and_parts() {
        let numbers = [job_number(1, 0), job_number(1, 1), job_number(1, 1 << 30), job_number(2, 0)];
        assert!(numbers.is_sorted_by(|a, b| a < b));
        assert_eq!(numbers.map(call_of_job), [1, 1, 1, 2]);
        assert_eq!(numbers.map(|number| first_job_of_message(number + 3)), numbers);
    }
}
