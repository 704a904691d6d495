//! Finds what is wrong with Common Lisp source without evaluating any of it: unbalanced parentheses, strings and comments,
//! located by the indentation, and text that the reader would refuse (CLHS 2).
//!
//! ```
//! let checked = lisp_syntax::check("(defun f (x)\n  (list x\n  (g x))\n\n(defun g ())\n", &[]);
//! assert_eq!(checked.repaired.as_deref(), Some("(defun f (x)\n  (list x)\n  (g x))\n\n(defun g ())\n"));
//! ```

mod lexer;
mod reader;
mod repair;

use lexer::{Kind, Line, Mode, lex};
use repair::Edit;

/// How sure a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The reader refuses the text.
    Error,
    /// It may do so: that depends on what else is loaded.
    Note,
}

/// Something to be said of a place in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1, in characters.
    pub column: usize,
    /// How sure it is.
    pub severity: Severity,
    /// A sentence without its full stop, on one line.
    pub message: String,
}

/// What [`check`] found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checked {
    /// In the order of the text.
    pub findings: Vec<Finding>,
    /// The text with what the indentation suggests; present where the text is not balanced and that would be.
    pub repaired: Option<String>,
}

impl Checked {
    /// True when the reader would not get through the text.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }
}

/// Where the text stops being balanced, as a reader finds out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Imbalance {
    /// A closing parenthesis without an open one. Line and byte, from 0.
    Unmatched(usize, usize),
    /// The end of the text within something that begins there.
    Unfinished(Mode, usize, usize),
}

/// Returns true once a search is to end without a result.
type Stop<'a> = &'a dyn Fn() -> bool;

/// An open parenthesis: line and byte, from 0.
type Place = (usize, usize);

/// Looks whether the lines are balanced; `visit` is called for each closing parenthesis with its place and that of the
/// open one.
fn balance(lines: &[&str], mut visit: impl FnMut(Place, Place)) -> Result<(), Imbalance> {
    let mut open: Vec<Place> = Vec::new();
    let mut mode = Mode::Code;
    let mut unfinished = (0, 0);
    for (number, text) in lines.iter().enumerate() {
        let line = lex(text, mode);
        for item in &line.items {
            match item.kind {
                Kind::Open => open.push((number, item.start)),
                Kind::Close => match open.pop() {
                    Some(start) => visit((number, item.start), start),
                    None => return Err(Imbalance::Unmatched(number, item.start)),
                },
                _ => {}
            }
        }
        if let Some(start) = line.open_end {
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

/// The lines of a text without their newlines; what `join` makes of them with newlines is the text.
fn lines_of(text: &str) -> Vec<&str> {
    text.split('\n').collect()
}

fn lexed(lines: &[&str]) -> Vec<Line> {
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

/// Names of packages that a text defines, or says that something else does (`:use`, `:depends-on`, `load-system`), in
/// upper case.
#[must_use]
pub fn packages(text: &str) -> Vec<String> {
    let lines = lines_of(text);
    reader::packages(&lines, &lexed(&lines))
}

/// Checks a text.
///
/// The syntax is taken to be the standard one (CLHS 2). `known` are names of packages that other files are known to
/// define, in upper case.
#[must_use]
pub fn check(text: &str, known: &[String]) -> Checked {
    let lines = lines_of(text);
    match balance(&lines, |_, _| {}) {
        Ok(()) => Checked { findings: reader::findings(&lines, &lexed(&lines), known), repaired: None },
        Err(imbalance) => {
            let edits = repair::edits(&lines, &|| false).unwrap_or_default();
            let repaired = apply(&lines, &edits);
            let mut findings = match edits[..] {
                [] => vec![plain(&lines, imbalance)],
                _ => explain(&lines, &edits, &lines_of(&repaired)),
            };
            // The reader may well have another opinion.
            if reader::has_own_syntax(&lines) {
                for finding in &mut findings {
                    finding.severity = Severity::Note;
                    finding.message.push_str(" (or else it is right by the syntax that the file makes for itself)");
                }
                return Checked { findings, repaired: None };
            }
            let reads = !edits.is_empty() && reads(&repaired);
            Checked { findings, repaired: reads.then_some(repaired) }
        }
    }
}

/// Whether a reader would go on reading where the text ends: within parentheses, a string or a comment, or after a quote.
pub fn is_unfinished(text: &str) -> bool {
    let lines = lines_of(text);
    match balance(&lines, |_, _| {}) {
        Err(Imbalance::Unfinished(..)) => true,
        Err(Imbalance::Unmatched(..)) => false,
        Ok(()) => {
            let lexed = lexed(&lines);
            let last = lexed.iter().rev().find_map(|line| line.items.last());
            last.is_some_and(|item| matches!(item.kind, Kind::Prefix | Kind::Feature))
        }
    }
}

/// What a part of a text is, for whoever colours it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A string, or a line of it.
    Text,
    /// A symbol of the package KEYWORD.
    Keyword,
    /// A parenthesis that has a partner.
    Parenthesis {
        /// Where that is, in bytes.
        partner: usize,
    },
}

/// The parts of a text that are worth a colour: where each begins and ends, in bytes, in their order.
pub fn parts(text: &str) -> Vec<(std::ops::Range<usize>, Part)> {
    let lines = lines_of(text);
    let starts: Vec<usize> = lines
        .iter()
        .scan(0, |at, line| {
            let start = *at;
            *at += line.len() + 1;
            Some(start)
        })
        .collect();
    let mut parts = Vec::new();
    let _ = balance(&lines, |(close_line, close), (open_line, open)| {
        let (open, close) = (starts[open_line] + open, starts[close_line] + close);
        parts.push((open..open + 1, Part::Parenthesis { partner: close }));
        parts.push((close..close + 1, Part::Parenthesis { partner: open }));
    });
    for (line, start) in lexed(&lines).iter().zip(&starts) {
        for item in &line.items {
            let range = start + item.start..start + item.end;
            match item.kind {
                Kind::Text => parts.push((range, Part::Text)),
                Kind::Token if text[range.clone()].starts_with(':') => parts.push((range, Part::Keyword)),
                _ => {}
            }
        }
    }
    parts.sort_by_key(|(range, _)| range.start);
    parts
}

/// Whether nothing is known that a reader would refuse.
fn reads(text: &str) -> bool {
    let lines = lines_of(text);
    balance(&lines, |_, _| {}).is_ok()
        && reader::findings(&lines, &lexed(&lines), &[]).iter().all(|finding| finding.severity != Severity::Error)
}

/// Bytes of code, or of a file, that [`hint`] looks into.
pub const LONGEST_HINTED: usize = 400_000;

/// Says where the indentation of code that the reader came to no end with went wrong: `line 7: …`. Returns `None` when
/// the code is balanced, nothing can be said, or `stop` returned true before something was found.
pub fn hint(code: &str, stop: impl Fn() -> bool) -> Option<String> {
    if code.len() > LONGEST_HINTED {
        return None;
    }
    let lines = lines_of(code);
    balance(&lines, |_, _| {}).err()?;
    if reader::has_own_syntax(&lines) {
        return None;
    }
    let edits = repair::edits(&lines, &stop)?;
    let repaired = apply(&lines, &edits);
    let findings = explain(&lines, &edits, &lines_of(&repaired));
    let said: Vec<_> = findings.iter().map(|finding| format!("line {}: {}", finding.line, finding.message)).collect();
    Some(said.join("\n"))
}

/// The text with the edits, which are in order, one a line at most.
fn apply(lines: &[&str], edits: &[Edit]) -> String {
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

/// What is wrong in the words of the edits that would mend it.
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
        (")", _) => match open_at(repaired, (edit.line, edit.at)) {
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
            let _ = balance(repaired, |close, open| {
                if close == last {
                    start = Some(open);
                }
            });
            match start {
                Some((start, _)) => format!(
                    "the form that begins at line {} is probably not closed where it ends: {missing} at {place}",
                    start + 1
                ),
                None => format!("{missing} at {place}"),
            }
        }
    };
    Finding { line, column, severity: Severity::Error, message }
}

/// The innermost form that is open at a place.
fn open_at(lines: &[&str], place: Place) -> Option<Place> {
    let mut open: Vec<Place> = Vec::new();
    let mut mode = Mode::Code;
    for (number, text) in lines.iter().enumerate().take(place.0 + 1) {
        let line = lex(text, mode);
        for item in &line.items {
            if (number, item.start) >= place {
                return open.last().copied();
            }
            match item.kind {
                Kind::Open => open.push((number, item.start)),
                Kind::Close => _ = open.pop(),
                _ => {}
            }
        }
        mode = line.end;
    }
    open.last().copied()
}

/// What a reader says, for want of anything better.
fn plain(lines: &[&str], imbalance: Imbalance) -> Finding {
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
