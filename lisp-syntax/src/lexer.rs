//! Standard syntax (CLHS 2), a line at a time: what parentheses, strings and comments there are. Nothing is read.

/// What a line begins or ends within.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mode {
    Code,
    String,
    /// A symbol's name between vertical bars.
    Bars,
    /// A block comment, so deep.
    Comment(u8),
}

/// What kind of thing an [`Item`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Open,
    Close,
    /// A quote, comma, backquote or dispatching macro that stands before a form.
    Prefix,
    /// `#+` or `#-`.
    Feature,
    Token,
    /// The beginning of a string.
    Text,
}

/// A part of a line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) kind: Kind,
    /// Where it begins and ends in its line, in bytes; a string that goes on ends with the line.
    pub(super) start: usize,
    pub(super) end: usize,
    /// Where it begins on the screen, with tabs of eight columns.
    pub(super) column: u32,
}

/// A line taken apart.
#[derive(Debug, Clone)]
pub(super) struct Line {
    pub(super) items: Vec<Item>,
    /// What the next line begins within.
    pub(super) end: Mode,
    /// Where each `"` is that begins or ends a string.
    pub(super) quotes: Vec<usize>,
    /// How many of them stand where such a one seldom does: no blank before the first, none behind the last.
    pub(super) crowded: u32,
    /// Where a string, symbol or comment that goes on to the next line began here.
    pub(super) open_end: Option<usize>,
}

/// Whether the standard syntax of a byte is whitespace.
pub(super) fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | 0x0c)
}

/// Whether a token ends before this byte.
pub(super) fn is_delimiter(byte: u8) -> bool {
    is_blank(byte) || matches!(byte, b'"' | b'\'' | b'(' | b')' | b',' | b';' | b'`')
}

struct Lexer<'a> {
    text: &'a [u8],
    at: usize,
    line: Line,
    /// Up to where the column is known, and the column there.
    measured: (usize, u32),
}

/// Takes a line, without its newline, apart.
pub(super) fn lex(text: &str, mode: Mode) -> Line {
    let line = Line { items: Vec::new(), end: Mode::Code, quotes: Vec::new(), crowded: 0, open_end: None };
    let mut lexer = Lexer { text: text.as_bytes(), at: 0, line, measured: (0, 0) };
    lexer.line.end = lexer.run(mode);
    lexer.line
}

impl Lexer<'_> {
    fn byte(&self, ahead: usize) -> Option<u8> {
        self.text.get(self.at + ahead).copied()
    }

    fn column(&mut self, to: usize) -> u32 {
        let (from, mut column) = self.measured;
        for &byte in &self.text[from..to] {
            match byte {
                b'\t' => column = (column / 8 + 1) * 8,
                // Bytes of a character after its first one.
                0x80..=0xbf => {}
                _ => column += 1,
            }
        }
        self.measured = (to, column);
        column
    }

    fn push(&mut self, kind: Kind, start: usize) {
        let column = self.column(start);
        self.line.items.push(Item { kind, start, end: self.at, column });
    }

    fn run(&mut self, mode: Mode) -> Mode {
        let begun = match mode {
            Mode::Code => Mode::Code,
            Mode::String => self.string(),
            Mode::Bars => match self.bars() {
                Mode::Code => self.token(),
                mode => mode,
            },
            Mode::Comment(depth) => self.comment(depth),
        };
        if begun != Mode::Code {
            return begun;
        }
        while let Some(byte) = self.byte(0) {
            let start = self.at;
            let end = match byte {
                _ if is_blank(byte) => {
                    self.at += 1;
                    Mode::Code
                }
                b';' => break,
                b'(' | b')' => {
                    self.at += 1;
                    self.push(if byte == b'(' { Kind::Open } else { Kind::Close }, start);
                    Mode::Code
                }
                b'"' => {
                    if start > 0 && !is_delimiter(self.text[start - 1]) && !self.after_dispatch(start) {
                        self.line.crowded += 1;
                    }
                    self.line.quotes.push(start);
                    self.at += 1;
                    let end = self.string();
                    self.push(Kind::Text, start);
                    end
                }
                b'\'' | b'`' | b',' => {
                    self.at += 1;
                    if byte == b',' && matches!(self.byte(0), Some(b'@' | b'.')) {
                        self.at += 1;
                    }
                    self.push(Kind::Prefix, start);
                    Mode::Code
                }
                b'#' => self.dispatching(),
                _ => {
                    let end = self.token();
                    self.push(Kind::Token, start);
                    end
                }
            };
            if end != Mode::Code {
                self.line.open_end = Some(start);
                return end;
            }
        }
        Mode::Code
    }

    /// Whether what stands before the quote at `start` is a macro such as `#p`.
    fn after_dispatch(&self, start: usize) -> bool {
        let before = &self.text[..start];
        before.ends_with(b"#") || before.len() > 1 && before[before.len() - 2] == b'#' || before.ends_with(b",@")
    }

    /// Goes to the end of the string.
    fn string(&mut self) -> Mode {
        while let Some(byte) = self.byte(0) {
            self.at += 1;
            match byte {
                b'\\' => self.at = (self.at + 1).min(self.text.len()),
                b'"' => {
                    self.line.quotes.push(self.at - 1);
                    if self.byte(0).is_some_and(|next| !is_delimiter(next) || next == b'(') {
                        self.line.crowded += 1;
                    }
                    return Mode::Code;
                }
                _ => {}
            }
        }
        Mode::String
    }

    /// Goes to the closing vertical bar.
    fn bars(&mut self) -> Mode {
        while let Some(byte) = self.byte(0) {
            self.at += 1;
            match byte {
                b'\\' => self.at = (self.at + 1).min(self.text.len()),
                b'|' => return Mode::Code,
                _ => {}
            }
        }
        Mode::Bars
    }

    /// Goes to the end of the token.
    fn token(&mut self) -> Mode {
        while let Some(byte) = self.byte(0) {
            match byte {
                b'\\' => self.at = (self.at + 2).min(self.text.len()),
                b'|' => {
                    self.at += 1;
                    if self.bars() == Mode::Bars {
                        return Mode::Bars;
                    }
                }
                _ if is_delimiter(byte) => break,
                _ => self.at += 1,
            }
        }
        // What was escaped may be longer than a byte.
        while self.byte(0).is_some_and(|byte| (0x80..=0xbf).contains(&byte)) {
            self.at += 1;
        }
        Mode::Code
    }

    /// Goes to the end of the block comment.
    fn comment(&mut self, mut depth: u8) -> Mode {
        while self.at < self.text.len() {
            match (self.text[self.at], self.byte(1)) {
                (b'|', Some(b'#')) => {
                    self.at += 2;
                    depth -= 1;
                    if depth == 0 {
                        return Mode::Code;
                    }
                }
                (b'#', Some(b'|')) => {
                    self.at += 2;
                    depth = depth.saturating_add(1);
                }
                _ => self.at += 1,
            }
        }
        Mode::Comment(depth)
    }

    /// Takes what begins with `#`.
    fn dispatching(&mut self) -> Mode {
        let start = self.at;
        self.at += 1;
        while self.byte(0).is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        let Some(byte) = self.byte(0) else {
            self.push(Kind::Prefix, start);
            return Mode::Code;
        };
        match byte {
            b'|' => {
                self.at += 1;
                self.comment(1)
            }
            b'\\' => {
                // The character after it, whatever it is, and the rest of a name.
                self.at = (self.at + 2).min(self.text.len());
                let end = self.token();
                self.push(Kind::Token, start);
                end
            }
            b'+' | b'-' => {
                self.at += 1;
                self.push(Kind::Feature, start);
                Mode::Code
            }
            b':' | b'*' | b'b' | b'B' | b'o' | b'O' | b'x' | b'X' | b'r' | b'R' => {
                self.at += 1;
                let end = self.token();
                self.push(Kind::Token, start);
                end
            }
            b'#' => {
                self.at += 1;
                self.push(Kind::Token, start);
                Mode::Code
            }
            _ if is_delimiter(byte) && byte != b'\'' && byte != b',' => {
                self.push(Kind::Prefix, start);
                Mode::Code
            }
            _ => {
                self.at += 1;
                while self.byte(0).is_some_and(|byte| (0x80..=0xbf).contains(&byte)) {
                    self.at += 1;
                }
                self.push(Kind::Prefix, start);
                Mode::Code
            }
        }
    }
}
