//! Text that is cut while it is written.

use crate::image::Text;
use crate::outcome::Clipped;

/// Characters over its limit that a text may be printed for the sake of saying how many there are; then printing it
/// is stopped.
const COUNTED: u64 = 100_000;
/// Characters of a name: of a condition's type, a restart, a slot, a variable.
const MAX_NAME: usize = 150;
/// Characters of the place of a frame, and of the line that a failing form begins with.
pub(crate) const MAX_PLACE: usize = 1_000;

/// Text that is cut while it is written.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClippedBuffer {
    text: String,
    left: u64,
    omitted: u64,
}

impl ClippedBuffer {
    /// Keeps the first `limit` characters.
    pub(crate) fn new(limit: u64) -> Self {
        Self { left: limit, ..Self::default() }
    }

    /// Adds `text`.
    pub(crate) fn push(&mut self, text: Text<'_>) {
        push_within(&mut self.left, &mut self.text, &mut self.omitted, text);
    }

    /// Adds what was clipped elsewhere.
    pub(crate) fn push_clipped(&mut self, clipped: &Clipped) {
        let mut characters = clipped.text.chars();
        self.text.extend(
            characters.by_ref().take(usize::try_from(self.left).unwrap_or(usize::MAX)).inspect(|_| self.left -= 1),
        );
        self.omitted += characters.count() as u64 + clipped.omitted;
    }

    /// What is kept.
    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    /// True when nothing but white space was written.
    pub(crate) fn is_blank(&self) -> bool {
        self.text.trim().is_empty() && self.omitted == 0
    }

    /// True when there is no point in going on.
    pub(crate) fn enough(&self) -> bool {
        self.omitted >= COUNTED
    }
}

/// The first characters of `text`, at most so many.
pub(crate) fn beginning(text: Text<'_>, most: usize) -> String {
    let mut kept = String::new();
    text.append_to(&mut kept, most);
    kept
}

/// A name, cut where it is too long.
pub(crate) fn name(text: Text<'_>) -> String {
    let mut name = beginning(text, MAX_NAME);
    if text.len() > MAX_NAME {
        name.push('…');
    }
    on_one_line(&name)
}

/// Text with its line breaks written as in Rust or C.
pub(crate) fn on_one_line(text: &str) -> String {
    text.replace('\n', "\\n").replace('\r', "\\r")
}

/// Adds `text` to what takes its room from `left` bytes.
pub(crate) fn push_bounded(left: &mut usize, buffer: &mut ClippedBuffer, text: Text<'_>) {
    if *left == 0 {
        buffer.omitted += text.len() as u64;
    } else {
        let before = buffer.text.len();
        buffer.push(text);
        *left = left.saturating_sub(buffer.text.len() - before);
    }
}

pub(crate) fn push_within(left: &mut u64, kept: &mut String, omitted: &mut u64, text: Text<'_>) {
    let length = text.len() as u64;
    let keep = length.min(*left);
    if keep > 0 {
        // At most the text's own length, which is a usize.
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

/// A text with the number of characters that are missing at its end.
pub(crate) fn whole(buffer: ClippedBuffer) -> String {
    let Clipped { mut text, omitted } = buffer.into();
    if omitted > 0 {
        text.push_str(&crate::report::omission(omitted));
    }
    text
}

/// A frame's text on one line.
pub(crate) fn one_line(call: ClippedBuffer) -> String {
    let text = whole(call);
    match text.contains(['\n', '\r']) {
        true => on_one_line(&text),
        // A print method that did not end, and was interrupted.
        false if text.is_empty() => "#<unprintable>".to_owned(),
        false => text,
    }
}
