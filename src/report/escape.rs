//! Escapes text from Lisp, so that the text cannot be mistaken for one of the report's own markers.

/// The names in the report's markers, without brackets.
const MARKERS: [&str; 8] = ["stdout", "stderr", "warnings", "background", "notice", "ERROR", "Backtrace", "Debugger"];

/// Escapes the report's markers in `text`. Adds one backslash before the closing bracket of each marker, in addition to
/// existing backslashes, so that [`unescape_markers`] can restore the text.
#[must_use]
pub fn escape_markers(text: &str) -> String {
    map_markers(text, |escaped, backslashes| {
        for _ in 0..=backslashes {
            escaped.push('\\');
        }
    })
}

/// Undoes [`escape_markers`].
#[must_use]
pub fn unescape_markers(text: &str) -> String {
    map_markers(text, |plain, backslashes| {
        for _ in 1..backslashes {
            plain.push('\\');
        }
    })
}

/// Copies `text` and lets `backslashes` change its markers. A marker is a name from [`MARKERS`] in brackets, with any
/// number of backslashes before the closing bracket. `backslashes` gets the copy so far and this number, and appends the
/// backslashes for the copy.
fn map_markers(text: &str, backslashes: impl Fn(&mut String, usize)) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('[') {
        let (before, bracket) = rest.split_at(start + 1);
        result.push_str(before);
        rest = bracket;
        let Some(name) = MARKERS.iter().find(|name| rest.starts_with(**name)) else { continue };
        let tail = &rest[name.len()..];
        let count = tail.bytes().take_while(|byte| *byte == b'\\').count();
        if tail[count..].starts_with(']') {
            result.push_str(name);
            backslashes(&mut result, count);
            result.push(']');
            rest = &tail[count + 1..];
        }
    }
    result.push_str(rest);
    result
}

/// Escapes the markers in captured output or a message. Also puts a backslash before each line that begins with `=> `,
/// or with backslashes followed by `=> `, so that the line cannot be mistaken for a value.
#[must_use]
pub fn escape_output(text: &str) -> String {
    let text = escape_markers(text);
    if !text.contains("=> ") {
        return text;
    }
    let mut result = String::with_capacity(text.len() + 8);
    for line in text.split_inclusive('\n') {
        if line.trim_start_matches('\\').starts_with("=> ") {
            result.push('\\');
        }
        result.push_str(line);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_escaped_and_unescaped() {
        for (plain, escaped) in [
            ("[ERROR]", "[ERROR\\]"),
            ("[ERROR\\]", "[ERROR\\\\]"),
            ("a [stdout] b [[Debugger]]", "a [stdout\\] b [[Debugger\\]]"),
            ("[ERRO] [ERROR [ERROR x]", "[ERRO] [ERROR [ERROR x]"),
            ("", ""),
        ] {
            assert_eq!(escape_markers(plain), escaped);
            assert_eq!(unescape_markers(escaped), plain);
        }
    }

    #[test]
    fn output_lines_that_look_like_values_are_escaped() {
        assert_eq!(escape_output("=> 3\nx => 3\n\\=> 4"), "\\=> 3\nx => 3\n\\\\=> 4");
    }
}
