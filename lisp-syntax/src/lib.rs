//! Checks Common Lisp source without evaluating it. Finds text that the reader would refuse (CLHS 2), and unbalanced
//! parentheses, strings and comments, whose positions it infers from the indentation.
//!
//! ```
//! let checked = lisp_syntax::check("(defun f (x)\n  (list x\n  (g x))\n\n(defun g ())\n", &[]);
//! assert_eq!(checked.repaired.as_deref(), Some("(defun f (x)\n  (list x)\n  (g x))\n\n(defun g ())\n"));
//! ```

mod lexer;
mod reader;
mod repair;

use lexer::{Line, Mode, TokenKind, lex};
use repair::Edit;

/// The severity of a [`Finding`]: whether the problem is certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The reader refuses the text.
    Error,
    /// The reader may refuse the text, depending on what else is loaded.
    Note,
}

/// A problem at a position in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1, in characters.
    pub column: usize,
    /// The severity: whether the problem is certain.
    pub severity: Severity,
    /// The description: a sentence on one line, without its full stop.
    pub message: String,
}

/// The result of [`check`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckResult {
    /// The findings, in the order of the text.
    pub findings: Vec<Finding>,
    /// The text with the repair that its indentation suggests. Present only if the text is unbalanced and the repaired
    /// text is readable.
    pub repaired: Option<String>,
}

impl CheckResult {
    /// Returns true if the reader would refuse the text.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }
}

/// The reason why a text is unbalanced, with a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Imbalance {
    /// A closing parenthesis has no opening parenthesis. The fields are its line and its byte in the line, from 0.
    Unmatched(usize, usize),
    /// The text ends within a construct. The fields are the construct's mode (`Code` for a form), and the line and byte,
    /// from 0, where the construct begins.
    Unfinished(Mode, usize, usize),
}

/// A function that returns true when a search must end without a result.
type StopCondition<'a> = &'a dyn Fn() -> bool;

/// The position of a parenthesis: line and byte, from 0.
type Position = (usize, usize);

/// Checks that the lines are balanced. Calls `visit` for each pair of parentheses, with the position of the closing
/// parenthesis first.
fn check_balance(lines: &[&str], mut visit: impl FnMut(Position, Position)) -> Result<(), Imbalance> {
    let mut open: Vec<Position> = Vec::new();
    let mut mode = Mode::Code;
    let mut unfinished = (0, 0);
    for (number, text) in lines.iter().enumerate() {
        let line = lex(text, mode);
        for token in &line.tokens {
            match token.kind {
                TokenKind::Open => open.push((number, token.start)),
                TokenKind::Close => match open.pop() {
                    Some(start) => visit((number, token.start), start),
                    None => return Err(Imbalance::Unmatched(number, token.start)),
                },
                _ => {}
            }
        }
        if let Some(start) = line.unclosed_start {
            unfinished = (number, start);
        }
        mode = line.end;
    }
    match (mode, open.last()) {
        (Mode::Code, None) => Ok(()),
        (Mode::Code, Some(_)) => Err(Imbalance::Unfinished(mode, open[0].0, open[0].1)),
        _ => Err(Imbalance::Unfinished(mode, unfinished.0, unfinished.1)),
    }
}

/// Splits a text at its newlines. Joining the lines with newlines restores the text.
fn split_lines(text: &str) -> Vec<&str> {
    text.split('\n').collect()
}

fn lex_lines(lines: &[&str]) -> Vec<Line> {
    let mut mode = Mode::Code;
    lines
        .iter()
        .map(|line| {
            let line = lex(line, mode);
            mode = line.end;
            line
        })
        .collect()
}

/// Returns the names, in upper case, of packages that a text defines or expects from elsewhere (`:use`, `:depends-on`,
/// `load-system`).
#[must_use]
pub fn packages(text: &str) -> Vec<String> {
    let lines = split_lines(text);
    reader::packages(&lines, &lex_lines(&lines))
}

/// Checks the Lisp source `text`, and suggests a repair if its parentheses, strings or comments are not balanced.
///
/// Assumes standard syntax (CLHS 2). `known` lists the names, in upper case, of packages that other files define.
#[must_use]
pub fn check(text: &str, known: &[String]) -> CheckResult {
    let lines = split_lines(text);
    match check_balance(&lines, |_, _| {}) {
        Ok(()) => CheckResult { findings: reader::findings(&lines, &lex_lines(&lines), known), repaired: None },
        Err(imbalance) => {
            let edits = repair::find_edits(&lines, &|| false).unwrap_or_default();
            let repaired = apply_edits(&lines, &edits);
            let mut findings = match edits[..] {
                [] => vec![plain_finding(&lines, imbalance)],
                _ => explain(&lines, &edits, &split_lines(&repaired)),
            };
            // A file that changes the readtable may be readable in spite of the findings.
            if reader::changes_readtable(&lines) {
                for finding in &mut findings {
                    finding.severity = Severity::Note;
                    finding
                        .message
                        .push_str(" (the file changes the readtable, so this may be correct in its own syntax)");
                }
                return CheckResult { findings, repaired: None };
            }
            let reads = !edits.is_empty() && is_readable(&repaired);
            CheckResult { findings, repaired: reads.then_some(repaired) }
        }
    }
}

/// Returns true if a reader would need more text, because `text` ends within parentheses, a string, a comment or a symbol
/// between vertical bars, after a prefix such as a quote, or after a feature conditional without its form.
pub fn is_unfinished(text: &str) -> bool {
    let mut lines = UnfinishedLines::default();
    text.split('\n').fold(false, |_, line| lines.add(line))
}

/// The lines of a text that arrives line by line. The time to add a line does not depend on the lines before it.
///
/// ```
/// let mut lines = lisp_syntax::UnfinishedLines::default();
/// assert!(lines.add("(defun f (x)"));
/// assert!(!lines.add("  (* x 2))"));
/// ```
#[derive(Debug, Clone)]
pub struct UnfinishedLines {
    mode: Mode,
    /// The number of parentheses that are not closed; `None` after a closing parenthesis that has no opening parenthesis.
    open: Option<usize>,
    /// The number of forms that the prefixes and feature conditionals outside parentheses still need.
    needed: usize,
}

impl Default for UnfinishedLines {
    fn default() -> Self {
        Self { mode: Mode::Code, open: Some(0), needed: 0 }
    }
}

impl UnfinishedLines {
    /// Adds a line, given without its newline. Returns the result of [`is_unfinished`] for all lines.
    pub fn add(&mut self, line: &str) -> bool {
        let Line { tokens, end, .. } = lex(line, self.mode);
        self.mode = end;
        for token in tokens {
            self.open = match token.kind {
                TokenKind::Open => self.open.map(|open| open + 1),
                TokenKind::Close => self.open.and_then(|open| open.checked_sub(1)),
                _ => self.open,
            };
            if self.open != Some(0) {
                continue;
            }
            self.needed = match token.kind {
                TokenKind::Prefix => self.needed.max(1),
                // The feature expression, and the form that is read if the features are present.
                TokenKind::Feature => self.needed.max(1) + 1,
                _ => self.needed.saturating_sub(1),
            };
        }
        self.open.is_some_and(|open| open > 0 || self.mode != Mode::Code || self.needed > 0)
    }
}

/// The kind of a part of the text, for syntax highlighting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HighlightKind {
    /// A string, or the first line of a string that continues on the next line.
    Text,
    /// A keyword, that is, a symbol with a leading colon.
    Keyword,
    /// A parenthesis that has a matching parenthesis.
    Parenthesis {
        /// The position of the matching parenthesis in the text, in bytes.
        partner: usize,
    },
}

/// Returns the parts of a text to highlight, with their byte ranges, in the order of the text.
pub fn highlights(text: &str) -> Vec<(std::ops::Range<usize>, HighlightKind)> {
    let lines = split_lines(text);
    let starts: Vec<usize> = lines
        .iter()
        .scan(0, |at, line| {
            let start = *at;
            *at += line.len() + 1;
            Some(start)
        })
        .collect();
    let mut parts = Vec::new();
    let _ = check_balance(&lines, |(close_line, close), (open_line, open)| {
        let (open, close) = (starts[open_line] + open, starts[close_line] + close);
        parts.push((open..open + 1, HighlightKind::Parenthesis { partner: close }));
        parts.push((close..close + 1, HighlightKind::Parenthesis { partner: open }));
    });
    for (line, start) in lex_lines(&lines).iter().zip(&starts) {
        for token in &line.tokens {
            let range = start + token.start..start + token.end;
            match token.kind {
                TokenKind::String => parts.push((range, HighlightKind::Text)),
                TokenKind::Atom if text[range.clone()].starts_with(':') => parts.push((range, HighlightKind::Keyword)),
                _ => {}
            }
        }
    }
    parts.sort_by_key(|(range, _)| range.start);
    parts
}

/// Returns true if the checks find no reason why the reader would refuse the text.
fn is_readable(text: &str) -> bool {
    let lines = split_lines(text);
    check_balance(&lines, |_, _| {}).is_ok()
        && reader::findings(&lines, &lex_lines(&lines), &[]).iter().all(|finding| finding.severity != Severity::Error)
}

/// Longest code or file, in bytes, that [`hint`] examines.
pub const MAX_HINTED_LENGTH: usize = 400_000;

/// Returns hints, as in `line 7: …`, about where the parentheses of unbalanced code disagree with its indentation.
/// Returns `None` if the code is balanced, is longer than [`MAX_HINTED_LENGTH`] or changes the readtable, if nothing was
/// found, or if `stop` returned true first.
pub fn hint(code: &str, stop: impl Fn() -> bool) -> Option<String> {
    if code.len() > MAX_HINTED_LENGTH {
        return None;
    }
    let lines = split_lines(code);
    check_balance(&lines, |_, _| {}).err()?;
    if reader::changes_readtable(&lines) {
        return None;
    }
    let edits = repair::find_edits(&lines, &stop)?;
    let repaired = apply_edits(&lines, &edits);
    let findings = explain(&lines, &edits, &split_lines(&repaired));
    let messages: Vec<_> =
        findings.iter().map(|finding| format!("line {}: {}", finding.line, finding.message)).collect();
    Some(messages.join("\n"))
}

/// Returns the text with the edits applied. The edits must be in order, at most one per line.
fn apply_edits(lines: &[&str], edits: &[Edit]) -> String {
    let mut changed: Vec<String> = Vec::with_capacity(edits.len());
    let mut result: Vec<&str> = lines.to_vec();
    for edit in edits {
        let line = lines[edit.line];
        changed.push([&line[..edit.at], &edit.inserted, &line[edit.at + edit.removed..]].concat());
    }
    for (edit, line) in edits.iter().zip(&changed) {
        result[edit.line] = line;
    }
    result.join("\n")
}

/// Returns a finding for each edit, which describes the problem that the edit repairs.
fn explain(lines: &[&str], edits: &[Edit], repaired: &[&str]) -> Vec<Finding> {
    edits.iter().map(|edit| explain_one(lines, edit, repaired)).collect()
}

fn explain_one(lines: &[&str], edit: &Edit, repaired: &[&str]) -> Finding {
    let text = lines[edit.line];
    let line = edit.line + 1;
    let column = text[..edit.at].chars().count() + 1;
    let place = format!("{line}:{column}");
    let removed = &text[edit.at..edit.at + edit.removed];
    let message = match (removed, edit.inserted.as_str()) {
        (")", _) => match enclosing_open_paren(repaired, (edit.line, edit.at)) {
            Some(start) => format!(
                "the form that begins at line {} is probably closed too early: one ) too many at {place}",
                start.0 + 1
            ),
            None => format!("one ) too many at {place}"),
        },
        ("(", _) => format!("one ( too many at {place}"),
        ("\"", _) => format!("one \" too many at {place}: it begins or ends a string in the wrong place"),
        (mark, "") => format!("one {mark} too many at {place}"),
        (_, "(") => format!("one ( missing at {place}"),
        (_, "\"") => format!("a string probably begins or ends here: one \" missing at {place}"),
        (_, "|#") => format!("a block comment is probably not closed: |# missing at {place}"),
        (_, closing) => {
            let count = closing.len();
            let missing = if count == 1 { "one ) missing".to_owned() } else { format!("{count} ) missing") };
            let mut start = None;
            let last = (edit.line, edit.at + count - 1);
            let _ = check_balance(repaired, |close, open| {
                if close == last {
                    start = Some(open);
                }
            });
            match start {
                Some((start, _)) => {
                    format!("the form that begins at line {} is probably not closed: {missing} at {place}", start + 1)
                }
                None => format!("{missing} at {place}"),
            }
        }
    };
    Finding { line, column, severity: Severity::Error, message }
}

/// Returns the position of the opening parenthesis of the innermost form that is open at `place`.
fn enclosing_open_paren(lines: &[&str], place: Position) -> Option<Position> {
    let mut open: Vec<Position> = Vec::new();
    let mut mode = Mode::Code;
    for (number, text) in lines.iter().enumerate().take(place.0 + 1) {
        let line = lex(text, mode);
        for token in &line.tokens {
            if (number, token.start) >= place {
                return open.last().copied();
            }
            match token.kind {
                TokenKind::Open => open.push((number, token.start)),
                TokenKind::Close => _ = open.pop(),
                _ => {}
            }
        }
        mode = line.end;
    }
    open.last().copied()
}

/// Returns the finding for an unbalanced text for which no repair was found.
fn plain_finding(lines: &[&str], imbalance: Imbalance) -> Finding {
    let (line, at, message) = match imbalance {
        Imbalance::Unmatched(line, at) => (line, at, "unmatched close parenthesis"),
        Imbalance::Unfinished(Mode::Code, line, at) => (line, at, "the form that begins here is not closed"),
        Imbalance::Unfinished(Mode::String, line, at) => (line, at, "the string that begins here is not closed"),
        Imbalance::Unfinished(Mode::Bars, line, at) => (line, at, "the symbol with a | that begins here is not closed"),
        Imbalance::Unfinished(Mode::Comment(_), line, at) => (line, at, "the comment that begins here is not closed"),
    };
    let column = lines[line][..at].chars().count() + 1;
    Finding { line: line + 1, column, severity: Severity::Error, message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_vertical_bar_of_a_symbol_is_reported_and_not_repaired() {
        let message = "the symbol with a | that begins here is not closed";
        for (text, line, column) in [
            ("'|a", 1, 2),
            ("(defun f () '|a b)\n", 1, 14),
            ("(defun f () '|a b)\n\n(defun g () 1)\n", 1, 14),
            ("(defun f ()\n  '|a)\n\n(defun g () '|b|)\n", 2, 4),
        ] {
            let finding = Finding { line, column, severity: Severity::Error, message: message.to_owned() };
            assert_eq!(check(text, &[]), CheckResult { findings: vec![finding], repaired: None }, "{text}");
            assert_eq!(hint(text, || false), None, "{text}");
        }
        // The bar in the string ends the symbol.
        let checked = check("(defun f () '|a b)\n(print \"x|y\")\n", &[]);
        assert_eq!((checked.findings[0].line, checked.findings[0].column, checked.repaired), (2, 12, None));
        // A surplus end of a block comment also leaves a bar open.
        assert_eq!(check("(f)\n|#\n(g)\n", &[]).repaired.as_deref(), Some("(f)\n\n(g)\n"));
    }

    #[test]
    fn text_is_unfinished_within_a_construct_or_after_a_prefix() {
        for text in ["(", "(a\n(b)", "\"a\n(b)", "#| a #| b |#\nc", "|a\nb", "'", "(a)\n,@\n\n; )", "#", "(a (\n)\n"] {
            assert!(is_unfinished(text), "{text:?}");
        }
        for text in ["#+", "#+a", "#-(or a\nb)\n", "#+a #-b", "#+a #-b c\n'", "'#+a", "#+a\n'"] {
            assert!(is_unfinished(text), "{text:?}");
        }
        for text in
            ["", "\n", "a", "()\n", ")", "(a))\n(b", ") \"a", "\"(\"", "#\\(", "#| ( |#", "; (", "'\na", "(a ')"]
        {
            assert!(!is_unfinished(text), "{text:?}");
        }
        for text in ["#+a\nb", "#-(or a\nb)\n(c)", "#+a #-b c", "'#+a b", "#+a\n'b", "#+a \"b\"", "(#+a)"] {
            assert!(!is_unfinished(text), "{text:?}");
        }
    }
}
