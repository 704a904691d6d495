//! Finds the id of a request in text that is not JSON, or too long to be read as JSON.

use serde_json::Value;

/// The longest id that is given back.
const MAX_TOKEN: usize = 256;
/// The bound of the numbers whose integers a double holds exactly.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// Returns true for an id that is written in the answer as the client wrote it. A number of more than 64 bits is not: it is
/// rounded.
pub(crate) fn is_exact(id: &Value) -> bool {
    match id {
        Value::String(_) => true,
        Value::Number(number) => {
            number.is_i64() || number.is_u64() || number.as_f64().is_some_and(|number| number.abs() < MAX_EXACT)
        }
        _ => false,
    }
}

/// Reads a message piece by piece in constant memory and remembers the `"id"` at its top level.
#[derive(Debug, Default)]
pub(crate) struct IdScanner {
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// The scalar at the top level that is being read, as it is written.
    token: Vec<u8>,
    /// The last key at the top level was `"id"`.
    at_id: bool,
    /// The message has a result or an error: it answers a request of ours and wants no answer.
    is_response: bool,
    found: Option<Value>,
}

impl IdScanner {
    /// The id in a whole text.
    pub(crate) fn scan(text: &[u8]) -> Option<Value> {
        let mut scanner = Self::default();
        scanner.feed(text);
        scanner.finish()
    }

    /// Reads on.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if self.in_string { self.inside_string(byte) } else { self.outside_strings(byte) }
        }
    }

    /// What was found.
    pub(crate) fn finish(mut self) -> Option<Value> {
        self.end_of_value();
        self.found.filter(|_| !self.is_response)
    }

    fn inside_string(&mut self, byte: u8) {
        self.keep(byte);
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => self.in_string = false,
            _ => {}
        }
    }

    fn outside_strings(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.in_string = true;
                self.keep(byte);
            }
            b'{' | b'[' => {
                self.depth += 1;
                self.token.clear();
            }
            b'}' | b']' => {
                self.end_of_value();
                self.depth = self.depth.saturating_sub(1);
            }
            b',' => self.end_of_value(),
            b':' if self.depth == 1 => {
                self.at_id = self.token == b"\"id\"";
                self.is_response |= self.token == b"\"result\"" || self.token == b"\"error\"";
                self.token.clear();
            }
            byte if byte.is_ascii_whitespace() => {}
            byte => self.keep(byte),
        }
    }

    fn keep(&mut self, byte: u8) {
        // One byte too many makes the token unreadable, which is what it should be.
        if self.depth == 1 && self.token.len() <= MAX_TOKEN {
            self.token.push(byte);
        }
    }

    fn end_of_value(&mut self) {
        if self.depth != 1 {
            return;
        }
        if std::mem::take(&mut self.at_id) && self.token.len() <= MAX_TOKEN {
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
        let found = |text: &str| IdScanner::scan(text.as_bytes());
        assert_eq!(found(r#"{"jsonrpc":"2.0","id":7,"method":"#), Some(json!(7)));
        assert_eq!(
            found(r#"{"method":"x","params":{"id":1,"a":["id",{"id":2}]},"id" : "a\"b" }"#),
            Some(json!("a\"b"))
        );
        assert_eq!(found(r#"{"params":{"code":"\",\"id\":5}"},"method":"x"}"#), None);
        assert_eq!(found(r#"{"params":{"id":5"#), None);
        assert_eq!(found(r#"{"id":{"id":5}}"#), None);
        assert_eq!(found(r#"{"id":null,"#), None);
        assert_eq!(found(r#"{"id":3,"result":{,}"#), None);
        assert_eq!(found("no json at all"), None);
        assert_eq!(found(&format!(r#"{{"id":"{}","#, "x".repeat(300))), None);
    }

    #[test]
    fn reads_in_pieces() {
        let mut scanner = IdScanner::default();
        for piece in [br#"{"params":{"code":"aaaa"#.as_slice(), br#"aaa\"#, br#""aa"},"i"#, br#"d":1"#, b"23}"] {
            scanner.feed(piece);
        }
        assert_eq!(scanner.finish(), Some(json!(123)));
    }
}
