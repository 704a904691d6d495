//! Text that is clipped while it is written.

use crate::image::Text;
use crate::outcome::Clipped;

/// The number of omitted characters after which printing stops. Until then the characters are counted, for the report
/// of the omission.
const MAX_COUNTED: u64 = 100_000;
/// The maximum number of characters that [`clip_name`] keeps of a name or of a source line.
const MAX_NAME: usize = 150;
/// The maximum number of characters that are kept of a notice.
pub(crate) const MAX_NOTICE_CHARS: usize = 2_000;
/// The maximum number of characters that are kept of a frame's location, and of the first line of a failing form.
pub(crate) const MAX_LOCATION: usize = 1_000;

/// A buffer that keeps the first characters of a text and counts the rest.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClippedBuffer {
    text: String,
    left: u64,
    omitted: u64,
}

impl ClippedBuffer {
    /// Creates a buffer that keeps the first `limit` characters.
    pub(crate) fn new(limit: u64) -> Self {
        Self { left: limit, ..Self::default() }
    }

    pub(crate) fn push(&mut self, text: Text<'_>) {
        push_within_chars(&mut self.left, &mut self.text, &mut self.omitted, text);
    }

    /// Adds text that was clipped before. The characters omitted from the text count as omitted here, too.
    pub(crate) fn push_clipped(&mut self, clipped: &Clipped) {
        let mut characters = clipped.text.chars();
        self.text.extend(
            characters.by_ref().take(usize::try_from(self.left).unwrap_or(usize::MAX)).inspect(|_| self.left -= 1),
        );
        self.omitted += characters.count() as u64 + clipped.omitted;
    }

    /// Returns the kept text.
    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns true if nothing but white space was written.
    pub(crate) fn is_blank(&self) -> bool {
        self.text.trim().is_empty() && self.omitted == 0
    }

    /// Returns true if no more text is wanted, because enough omitted characters have been counted.
    pub(crate) fn has_enough(&self) -> bool {
        self.omitted >= MAX_COUNTED
    }
}

/// Returns the first characters of `text`: `most` characters, or all if there are fewer.
pub(crate) fn first_chars(text: Text<'_>, most: usize) -> String {
    let mut kept = String::new();
    text.append_to(&mut kept, most);
    kept
}

/// Returns a text with line breaks escaped, cut after `most` characters. The text may contain names from the user's code,
/// which may contain line breaks and be of any length. The scheduler's lock may be held, so a long text is not copied.
pub(crate) fn clip_line(text: Text<'_>, most: usize) -> String {
    let mut line = first_chars(text, most);
    if text.len() > most {
        line.push('…');
    }
    escape_line_breaks(&line)
}

/// Returns a name or a source line with line breaks escaped, cut after [`MAX_NAME`] characters.
pub(crate) fn clip_name(text: Text<'_>) -> String {
    clip_line(text, MAX_NAME)
}

/// Returns a notice with line breaks escaped, cut after [`MAX_NOTICE_CHARS`] characters.
pub(crate) fn clip_notice(text: Text<'_>) -> String {
    clip_line(text, MAX_NOTICE_CHARS)
}

/// Escapes line breaks as Rust and C do.
pub(crate) fn escape_line_breaks(text: &str) -> String {
    text.replace('\n', "\\n").replace('\r', "\\r")
}

/// Returns the part of `text` from byte `from` on, cut after a character if it is longer than `max` bytes. Returns `None` if
/// nothing follows.
pub(crate) fn part(text: &str, from: usize, max: usize) -> Option<&str> {
    let rest = text.get(from..).filter(|rest| !rest.is_empty())?;
    let end = (0..=max.min(rest.len())).rfind(|end| rest.is_char_boundary(*end)).unwrap_or(0);
    Some(&rest[..end])
}

/// Adds `text` to `buffer`, and subtracts the kept bytes from `left`. Counts all of `text` as omitted if `left` is 0.
pub(crate) fn push_within_bytes(left: &mut usize, buffer: &mut ClippedBuffer, text: Text<'_>) {
    if *left == 0 {
        buffer.omitted += text.len() as u64;
    } else {
        let before = buffer.text.len();
        buffer.push(text);
        *left = left.saturating_sub(buffer.text.len() - before);
    }
}

pub(crate) fn push_within_chars(left: &mut u64, kept: &mut String, omitted: &mut u64, text: Text<'_>) {
    let length = text.len() as u64;
    let keep = length.min(*left);
    if keep > 0 {
        // The conversion succeeds, since `keep` is at most the text's length, which is a `usize`.
        text.append_to(kept, usize::try_from(keep).unwrap_or(usize::MAX));
        *left -= keep;
    }
    *omitted += length - keep;
}

impl From<ClippedBuffer> for Clipped {
    fn from(buffer: ClippedBuffer) -> Self {
        Self { text: buffer.text, omitted: buffer.omitted }
    }
}

/// Returns the text, with the number of omitted characters at its end.
pub(crate) fn with_omission(buffer: ClippedBuffer) -> String {
    let Clipped { mut text, omitted } = buffer.into();
    if omitted > 0 {
        text.push_str(&crate::report::omission_marker(omitted));
    }
    text
}

/// Returns the text of a printed object on one line, with line breaks escaped.
pub(crate) fn printed_on_one_line(call: ClippedBuffer) -> String {
    let text = with_omission(call);
    match text.contains(['\n', '\r']) {
        true => escape_line_breaks(&text),
        // No text means that the print method did not end and was interrupted.
        false if text.is_empty() => "#<unprintable>".to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_text_ends_with_a_whole_character() {
        assert_eq!(part("aéb", 0, 2), Some("a"));
        assert_eq!(part("aéb", 1, 2), Some("é"));
        assert_eq!(part("aéb", 1, usize::MAX), Some("éb"));
        assert_eq!(part("aéb", 4, 2), None);
        assert_eq!(part("aéb", 9, 2), None);
    }
}
