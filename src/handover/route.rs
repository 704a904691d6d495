//! Whose line it is that a supervisor hands on: one of a client that has joined begins with `@`, the number of its
//! connection and a space. When there is nothing behind the number, that client is gone. Lines of the server's own client
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

/// The connection that a line is of, and what the client wrote; nothing when it is gone.
pub(crate) fn parse(line: &[u8]) -> (u64, &[u8]) {
    let split = || {
        let rest = line.strip_prefix(b"@")?;
        let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
        let connection = str::from_utf8(&rest[..digits]).ok()?.parse().ok()?;
        match &rest[digits..] {
            b"\n" => Some((connection, &b""[..])),
            [b' ', line @ ..] => Some((connection, line)),
            _ => None,
        }
    };
    split().unwrap_or((0, line))
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
            prop_assert_eq!(parse(&line), (connection, text.as_bytes()));
        }
    }

    #[test]
    fn the_end_of_a_client_is_told() {
        assert_eq!(&*marked(7, b""), b"@7\n");
        assert_eq!(parse(b"@7\n"), (7, &b""[..]));
        assert_eq!(&*marked(0, b"{}\n"), b"{}\n");
    }
}
