//! The code of an evaluation, and the positions in it.

use std::cell::Cell;
use std::sync::Arc;

/// The position of a character in a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TextPosition {
    /// The index of the character.
    index: usize,
    /// The byte offset of the character.
    pub(crate) offset: usize,
    /// The number of line breaks before the character.
    pub(crate) line_breaks: usize,
}

/// The number of bytes of a block, whose characters are counted together.
const BLOCK: usize = 128;

/// The code of an evaluation. Its forms are mostly looked up in order, so each search begins where the last search ended:
/// long code is not read from its beginning for each form.
#[derive(Debug, Clone, Default)]
pub(crate) struct Code {
    text: Arc<str>,
    last: Cell<TextPosition>,
}

impl Code {
    pub(crate) fn new(text: Arc<str>) -> Self {
        Self { text, last: Cell::default() }
    }

    pub(crate) fn text(&self) -> &Arc<str> {
        &self.text
    }

    /// Returns the position of the character with this index, or of the end if the code has fewer characters.
    pub(crate) fn position(&self, index: usize) -> TextPosition {
        let mut position = self.last.get();
        if index < position.index {
            position = TextPosition::default();
        }
        // The scheduler's lock may be held. Counting by blocks takes much less time than looking at each character.
        while let Some(block) = self.text.as_bytes()[position.offset..].first_chunk::<BLOCK>() {
            let characters: u8 = block.iter().map(|byte| u8::from(byte & 0xc0 != 0x80)).sum();
            let next = position.index + usize::from(characters);
            if next > index {
                break;
            }
            let line_breaks: u8 = block.iter().map(|byte| u8::from(*byte == b'\n')).sum();
            position.index = next;
            position.offset += BLOCK;
            position.line_breaks += usize::from(line_breaks);
        }
        // The last block may end within a character.
        while !self.text.is_char_boundary(position.offset) {
            position.offset += 1;
        }
        for character in self.text[position.offset..].chars().take(index - position.index) {
            position.index += 1;
            position.offset += character.len_utf8();
            position.line_breaks += usize::from(character == '\n');
        }
        self.last.set(position);
        position
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_found_in_any_order() {
        let code = Code::new("aλ\n\nb😀c".into());
        let expected = [(0, 0, 0), (1, 1, 0), (2, 3, 0), (3, 4, 1), (4, 5, 2), (5, 6, 2), (6, 10, 2), (7, 11, 2)];
        for at in [0, 3, 3, 6, 1, 7, 0, 5, 99, 2] {
            let (index, offset, line_breaks) = expected[at.min(7)];
            assert_eq!(code.position(at), TextPosition { index, offset, line_breaks }, "{at}");
        }
    }

    #[test]
    fn positions_in_long_code_are_those_of_its_characters() {
        let text: String = (0..1_000).flat_map(|part| ["aλ\n😀", "b\n", "é"][part % 3].chars()).collect();
        let code = Code::new(text.as_str().into());
        let expected = |index| {
            let before = || text.chars().take(index);
            let line_breaks = before().filter(|character| *character == '\n').count();
            TextPosition { index, offset: before().map(char::len_utf8).sum(), line_breaks }
        };
        let count = text.chars().count();
        for index in (0..=count).chain((0..=count).rev().step_by(97)) {
            assert_eq!(code.position(index), expected(index));
        }
    }
}
