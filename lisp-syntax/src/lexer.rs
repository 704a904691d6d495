//! The lexer for standard syntax (CLHS 2): finds the parentheses, strings and comments of one line at a time.

/// The construct within which a line begins or ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mode {
    Code,
    String,
    /// A symbol's name between vertical bars.
    Bars,
    /// A block comment, with its nesting depth.
    Comment(u8),
}

/// The kind of a [`Token`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    Open,
    Close,
    /// A quote, comma, backquote or dispatching macro before a form.
    Prefix,
    /// A feature conditional, `#+` or `#-`.
    Feature,
    Atom,
    /// A string, or the first line of a string that continues on the next line.
    String,
}

/// A token of a line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token {
    pub(super) kind: TokenKind,
    /// Start and end of the token, as bytes of its line. A string that continues on the next line ends at the line's end.
    pub(super) start: usize,
    pub(super) end: usize,
    /// Column of the start on the screen, from 0, with tab stops every eight columns.
    pub(super) column: u32,
}

/// The tokens of a line and the lexer's state at its end.
#[derive(Debug, Clone)]
pub(super) struct Line {
    pub(super) tokens: Vec<Token>,
    /// The construct within which the next line begins.
    pub(super) end: Mode,
    /// Byte positions of the `"` characters that begin or end a string.
    pub(super) quotes: Vec<usize>,
    /// Number of quotes in unusual positions: an opening quote directly after an atom, or a closing quote directly before
    /// an atom or an opening parenthesis.
    pub(super) crowded_quotes: u32,
    /// Byte position of a string, symbol or comment that begins in this line and continues on the next line.
    pub(super) unclosed_start: Option<usize>,
}

/// Returns true if the byte is whitespace in standard syntax.
pub(super) fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | 0x0c)
}

/// Returns true if the byte is a delimiter, which ends the token before it.
pub(super) fn is_delimiter(byte: u8) -> bool {
    is_blank(byte) || matches!(byte, b'"' | b'\'' | b'(' | b')' | b',' | b';' | b'`')
}

struct Lexer<'a> {
    text: &'a [u8],
    at: usize,
    line: Line,
    /// A byte position and its column, from which later columns are computed.
    column_cache: (usize, u32),
}

/// Splits a line, given without its newline, into tokens. `mode` is the construct within which the line begins.
pub(super) fn lex(text: &str, mode: Mode) -> Line {
    let line =
        Line { tokens: Vec::new(), end: Mode::Code, quotes: Vec::new(), crowded_quotes: 0, unclosed_start: None };
    let mut lexer = Lexer { text: text.as_bytes(), at: 0, line, column_cache: (0, 0) };
    lexer.line.end = lexer.run(mode);
    lexer.line
}

impl Lexer<'_> {
    fn byte(&self, ahead: usize) -> Option<u8> {
        self.text.get(self.at + ahead).copied()
    }

    fn column(&mut self, to: usize) -> u32 {
        let (from, mut column) = self.column_cache;
        for &byte in &self.text[from..to] {
            match byte {
                b'\t' => column = (column / 8 + 1) * 8,
                // Continuation bytes of a UTF-8 character take no column.
                0x80..=0xbf => {}
                _ => column += 1,
            }
        }
        self.column_cache = (to, column);
        column
    }

    fn push(&mut self, kind: TokenKind, start: usize) {
        let column = self.column(start);
        self.line.tokens.push(Token { kind, start, end: self.at, column });
    }

    fn run(&mut self, mode: Mode) -> Mode {
        let begun = match mode {
            Mode::Code => Mode::Code,
            Mode::String => self.skip_string(),
            Mode::Bars => match self.skip_bars() {
                Mode::Code => self.skip_atom(),
                mode => mode,
            },
            Mode::Comment(depth) => self.skip_comment(depth),
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
                    self.push(if byte == b'(' { TokenKind::Open } else { TokenKind::Close }, start);
                    Mode::Code
                }
                b'"' => {
                    if start > 0 && !is_delimiter(self.text[start - 1]) && !self.follows_dispatch_macro(start) {
                        self.line.crowded_quotes += 1;
                    }
                    self.line.quotes.push(start);
                    self.at += 1;
                    let end = self.skip_string();
                    self.push(TokenKind::String, start);
                    end
                }
                b'\'' | b'`' | b',' => {
                    self.at += 1;
                    if byte == b',' && matches!(self.byte(0), Some(b'@' | b'.')) {
                        self.at += 1;
                    }
                    self.push(TokenKind::Prefix, start);
                    Mode::Code
                }
                b'#' => self.read_dispatch_macro(),
                _ => {
                    let end = self.skip_atom();
                    self.push(TokenKind::Atom, start);
                    end
                }
            };
            if end != Mode::Code {
                self.line.unclosed_start = Some(start);
                return end;
            }
        }
        Mode::Code
    }

    /// Returns true if the double quote at `start` directly follows `,@` or a dispatching macro such as `#p`.
    fn follows_dispatch_macro(&self, start: usize) -> bool {
        let before = &self.text[..start];
        before.ends_with(b"#") || before.len() > 1 && before[before.len() - 2] == b'#' || before.ends_with(b",@")
    }

    /// Advances to the end of the string, or to the end of the line if the string continues on the next line. Returns the
    /// mode there.
    fn skip_string(&mut self) -> Mode {
        while let Some(byte) = self.byte(0) {
            self.at += 1;
            match byte {
                b'\\' => self.at = (self.at + 1).min(self.text.len()),
                b'"' => {
                    self.line.quotes.push(self.at - 1);
                    if self.byte(0).is_some_and(|next| !is_delimiter(next) || next == b'(') {
                        self.line.crowded_quotes += 1;
                    }
                    return Mode::Code;
                }
                _ => {}
            }
        }
        Mode::String
    }

    /// Advances beyond the closing vertical bar, or to the end of the line if there is none. Returns the mode there.
    fn skip_bars(&mut self) -> Mode {
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

    /// Advances to the end of the atom, or to the end of the line if a vertical bar is not closed. Returns the mode there.
    fn skip_atom(&mut self) -> Mode {
        while let Some(byte) = self.byte(0) {
            match byte {
                b'\\' => self.at = (self.at + 2).min(self.text.len()),
                b'|' => {
                    self.at += 1;
                    if self.skip_bars() == Mode::Bars {
                        return Mode::Bars;
                    }
                }
                _ if is_delimiter(byte) => break,
                _ => self.at += 1,
            }
        }
        Mode::Code
    }

    /// Advances to the end of the block comment, or to the end of the line if the comment continues on the next line.
    /// Returns the mode there.
    fn skip_comment(&mut self, mut depth: u8) -> Mode {
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

    /// Reads the token or block comment that begins with the `#` at the current position. Returns the mode where it ends.
    fn read_dispatch_macro(&mut self) -> Mode {
        let start = self.at;
        self.at += 1;
        while self.byte(0).is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        let Some(byte) = self.byte(0) else {
            self.push(TokenKind::Prefix, start);
            return Mode::Code;
        };
        match byte {
            b'|' => {
                self.at += 1;
                self.skip_comment(1)
            }
            b'\\' => {
                // Skip the character after the backslash, whatever it is, and the rest of a character name.
                self.at = (self.at + 2).min(self.text.len());
                let end = self.skip_atom();
                self.push(TokenKind::Atom, start);
                end
            }
            b'+' | b'-' => {
                self.at += 1;
                self.push(TokenKind::Feature, start);
                Mode::Code
            }
            b':' | b'*' | b'b' | b'B' | b'o' | b'O' | b'x' | b'X' | b'r' | b'R' => {
                self.at += 1;
                let end = self.skip_atom();
                self.push(TokenKind::Atom, start);
                end
            }
            b'#' => {
                self.at += 1;
                self.push(TokenKind::Atom, start);
                Mode::Code
            }
            _ if is_delimiter(byte) && byte != b'\'' && byte != b',' => {
                self.push(TokenKind::Prefix, start);
                Mode::Code
            }
            _ => {
                self.at += 1;
                while self.byte(0).is_some_and(|byte| (0x80..=0xbf).contains(&byte)) {
                    self.at += 1;
                }
                self.push(TokenKind::Prefix, start);
                Mode::Code
            }
        }
    }
}
