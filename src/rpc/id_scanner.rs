//! The id scanner, which finds the id of a request in text that is not valid JSON or too long to parse.

use serde_json::Value;

/// Maximum length of an id, in bytes.
const MAX_TOKEN_LEN: usize = 256;
/// Bound below which a double represents every integer exactly.
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

/// Returns true for an id that the answer can repeat as the client wrote it. A number of more than 64 bits would be
/// rounded.
pub(crate) fn is_exact(id: &Value) -> bool {
    match id {
        Value::String(_) => true,
        Value::Number(number) => {
            number.is_i64() || number.is_u64() || number.as_f64().is_some_and(|number| number.abs() < MAX_EXACT_INTEGER)
        }
        _ => false,
    }
}

/// The result of a scan: the kind of the message, and its id, if an id was found.
#[derive(Debug, PartialEq)]
pub(crate) enum ScannedMessage {
    /// A message without a result or an error. The message counts as a request.
    Request(Option<Value>),
    /// A message with a result or an error: a response to a server's request, which gets no answer.
    Response(Option<Value>),
}

impl ScannedMessage {
    /// Returns the id of a request; `None` if no id was found or the message is a response.
    pub(crate) fn request_id(self) -> Option<Value> {
        match self {
            Self::Request(id) => id,
            Self::Response(_) => None,
        }
    }
}

/// A scanner that searches a message for the `"id"` at its top level, piece by piece, in constant memory.
#[derive(Debug, Default)]
pub(crate) struct IdScanner {
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// The text of the top-level scalar that is being scanned.
    token: Vec<u8>,
    /// True while the value of the top-level key `"id"` is scanned.
    after_id_key: bool,
    /// True if the message has a result or an error.
    is_response: bool,
    found: Option<Value>,
}

impl IdScanner {
    /// Scans a complete text.
    pub(crate) fn scan(text: &[u8]) -> ScannedMessage {
        let mut scanner = Self::default();
        scanner.feed(text);
        scanner.finish()
    }

    /// Scans the next piece.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) {
        loop {
            // Most bytes of a long message are text in nested strings, such as code.
            if self.in_string && !self.escaped && self.depth != 1 {
                bytes = &bytes[memchr::memchr2(b'"', b'\\', bytes).unwrap_or(bytes.len())..];
            }
            let Some((&byte, rest)) = bytes.split_first() else { return };
            bytes = rest;
            if self.in_string { self.scan_in_string(byte) } else { self.scan_outside_strings(byte) }
        }
    }

    /// Returns the result of the scan.
    pub(crate) fn finish(mut self) -> ScannedMessage {
        self.end_value();
        if self.is_response { ScannedMessage::Response(self.found) } else { ScannedMessage::Request(self.found) }
    }

    fn scan_in_string(&mut self, byte: u8) {
        self.push_to_token(byte);
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => self.in_string = false,
            _ => {}
        }
    }

    fn scan_outside_strings(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.in_string = true;
                self.push_to_token(byte);
            }
            b'{' | b'[' => {
                self.depth += 1;
                self.token.clear();
            }
            b'}' | b']' => {
                self.end_value();
                self.depth = self.depth.saturating_sub(1);
            }
            b',' => self.end_value(),
            b':' if self.depth == 1 => {
                self.after_id_key = self.token == b"\"id\"";
                self.is_response |= self.token == b"\"result\"" || self.token == b"\"error\"";
                self.token.clear();
            }
            byte if byte.is_ascii_whitespace() => {}
            byte => self.push_to_token(byte),
        }
    }

    fn push_to_token(&mut self, byte: u8) {
        // One byte over the maximum marks the token as too long.
        if self.depth == 1 && self.token.len() <= MAX_TOKEN_LEN {
            self.token.push(byte);
        }
    }

    fn end_value(&mut self) {
        if self.depth != 1 {
            return;
        }
        if std::mem::take(&mut self.after_id_key) && self.token.len() <= MAX_TOKEN_LEN {
            let value = serde_json::from_slice(&self.token).ok();
            self.found = value.filter(is_exact);
        }
        self.token.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn finds_the_id_at_the_top_level_only() {
        let found = |text: &str| IdScanner::scan(text.as_bytes()).request_id();
        assert_eq!(found(r#"{"jsonrpc":"2.0","id":7,"method":"#), Some(json!(7)));
        assert_eq!(
            found(r#"{"method":"x","params":{"id":1,"a":["id",{"id":2}]},"id" : "a\"b" }"#),
            Some(json!("a\"b"))
        );
        assert_eq!(found(r#"{"params":{"code":"\",\"id\":5}"},"method":"x"}"#), None);
        assert_eq!(found(r#"{"params":{"id":5"#), None);
        assert_eq!(found(r#"{"id":{"id":5}}"#), None);
        assert_eq!(found(r#"{"id":null,"#), None);
        assert_eq!(found("no json at all"), None);
        assert_eq!(found(&format!(r#"{{"id":"{}","#, "x".repeat(300))), None);
    }

    #[test]
    fn finds_an_id_that_is_split_across_pieces() {
        let mut scanner = IdScanner::default();
        for piece in [br#"{"params":{"code":"aaaa"#.as_slice(), br#"aaa\"#, br#""aa"},"i"#, br#"d":1"#, b"23}"] {
            scanner.feed(piece);
        }
        assert_eq!(scanner.finish().request_id(), Some(json!(123)));
    }

    #[test]
    fn a_message_with_a_result_or_an_error_is_a_response() {
        let scan = |text: &str| IdScanner::scan(text.as_bytes());
        for text in [r#"{"id":3,"result":{,}"#, r#"{"error":{"id":4},"id":3}"#] {
            assert_eq!(scan(text), ScannedMessage::Response(Some(json!(3))));
            assert_eq!(scan(text).request_id(), None);
        }
        assert_eq!(scan(r#"{"result":[1]}"#), ScannedMessage::Response(None));
        assert_eq!(scan(r#"{"id":3,"params":{"result":1}}"#), ScannedMessage::Request(Some(json!(3))));
    }
}
