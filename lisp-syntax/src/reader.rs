//! Checks of balanced text. The checks find text that the reader would refuse, as far as this can be known without evaluating
//! the text.

use std::collections::HashSet;

use super::lexer::{Line, Token, TokenKind};
use super::{Finding, Severity};

/// Maximum nesting depth of parentheses. A text that is nested more deeply is not checked.
const MAX_DEPTH: usize = 500;

/// The characters, in upper case, that may follow `#` in SBCL's standard syntax (CLHS 2.4.8).
const DISPATCH_CHARACTERS: &str = "'(*+-.:=#ABCOPRSX\\|";

/// Operators, without package prefix, that define a package or name a package that is defined elsewhere.
const DEFINING_OPERATORS: [&str; 4] = ["DEFPACKAGE", "DEFINE-PACKAGE", "MAKE-PACKAGE", "DEFSYSTEM"];

/// Operators whose arguments are, at least approximately, the names of packages that the operators load or create.
const LOADING_OPERATORS: [&str; 6] =
    ["LOAD-SYSTEM", "LOAD-SYSTEMS", "QUICKLOAD", "REQUIRE", "RENAME-PACKAGE", "ADD-PACKAGE-LOCAL-NICKNAME"];

/// Packages that every image has, besides SBCL's own packages (`SB-…`) and ASDF's internal packages (`ASDF/…`, `UIOP/…`).
const NON_SB_PACKAGES: [&str; 11] = [
    "ASDF",
    "ASDF-ACTION",
    "ASDF-USER",
    "ASDF-UTILITIES",
    "CL",
    "CL-USER",
    "COMMON-LISP",
    "COMMON-LISP-USER",
    "KEYWORD",
    "SEQUENCE",
    "UIOP",
];

/// SBCL's own packages, without their prefix `SB-`.
const SB_PACKAGES: &str = "ALIEN ALIEN-INTERNALS APROF ASSEM BIGNUM BROTHERTREE BSD-SOCKETS BSD-SOCKETS-INTERNAL C \
    C-CALL CAPSTONE CLTL2 CONCURRENCY COVER DEBUG DI DISASSEM EVAL EXECUTABLE EXT FASL FASTEVAL FORMAT GMP GRAY GROVEL \
    IMPL INT INTERPRETER INTROSPECT KERNEL LOCKLESS LOOP MANUAL MD5 MOP MPFR PCL PERF POSIX PRETTY PROFILE QUEUE \
    REGALLOC ROTATE-BYTE RT SEQUENCE SIMD SIMPLE-STREAMS SPROF SYS THREAD UNICODE UNIX VM WALKER XREF";

/// Returns true if the text seems to change the readtable. Then only loading the text shows what the reader accepts.
pub(super) fn changes_readtable(lines: &[&str]) -> bool {
    const SIGNS: [&str; 5] =
        ["set-macro-character", "set-dispatch-macro-character", "in-readtable", "set-syntax-from-char", "(enable-"];
    lines.iter().any(|line| {
        let code = line.split(';').next().unwrap_or_default().to_ascii_lowercase();
        SIGNS.iter().any(|sign| code.contains(sign))
    })
}

/// Returns the names, in upper case, of packages that the text defines or expects from elsewhere.
pub(super) fn packages(lines: &[&str], lexed: &[Line]) -> Vec<String> {
    let mut walk = FormWalk::new(lines, lexed);
    walk.run();
    walk.packages
}

/// Maximum number of unknown packages for which a similar known name is searched.
const MAX_HINTS: usize = 100;

/// Returns the problems in balanced lines. `known` lists the names of packages that are defined elsewhere.
pub(super) fn findings(lines: &[&str], lexed: &[Line], known: &[String]) -> Vec<Finding> {
    let mut walk = FormWalk::new(lines, lexed);
    walk.run();
    let own_syntax = changes_readtable(lines);
    let defined: HashSet<&str> = walk.packages.iter().chain(known).map(String::as_str).collect();
    let mut findings = Vec::new();
    let (mut macros, mut unknown) = (HashSet::new(), HashSet::new());
    for (line, at, what) in walk.problems {
        let (severity, message) = match what {
            Problem::Refused(_) | Problem::Macro(_) if own_syntax => continue,
            Problem::Refused(message) => (Severity::Error, message),
            Problem::Macro(name) => {
                let message = format!("SBCL has no reader macro {name}: define it before this form is read");
                if !macros.insert(name) {
                    continue;
                }
                (Severity::Note, message)
            }
            Problem::Package(name) => {
                if is_built_in(&name) || defined.contains(&*name) || unknown.contains(&name) {
                    continue;
                }
                let near = (unknown.len() < MAX_HINTS).then(|| most_similar_name(&name, &defined)).flatten();
                let hint = near.map(|near| format!(" (did you mean {near}?)")).unwrap_or_default();
                let message =
                    format!("no package {name} is known here: load its definition before this form is read{hint}");
                unknown.insert(name);
                (Severity::Note, message)
            }
        };
        let column = lines[line][..at].chars().count() + 1;
        findings.push(Finding { line: line + 1, column, severity, message });
    }
    findings
}

fn is_built_in(name: &str) -> bool {
    NON_SB_PACKAGES.contains(&name)
        || name.starts_with("ASDF/")
        || name.starts_with("UIOP/")
        || name.strip_prefix("SB-").is_some_and(|name| SB_PACKAGES.split_whitespace().any(|other| other == name))
}

/// Returns the known package name that is most similar to `name`, if any is similar enough.
fn most_similar_name<'names>(name: &str, defined: &HashSet<&'names str>) -> Option<&'names str> {
    let near = defined.iter().copied().chain(NON_SB_PACKAGES).filter(|other| is_similar(name, other));
    near.min_by_key(|other| (other.len().abs_diff(name.len()), *other))
}

/// Returns true if the names differ by one inserted, deleted or replaced character, or by two swapped adjacent
/// characters. A name of fewer than three characters has no similar names.
fn is_similar(name: &str, other: &str) -> bool {
    let (name, other): (Vec<char>, Vec<char>) = (name.chars().collect(), other.chars().collect());
    if name.len() < 3 || name == other || name.len().abs_diff(other.len()) > 1 {
        return false;
    }
    let same = name.iter().zip(&other).take_while(|(a, b)| a == b).count();
    let (rest, others) = (&name[same..], &other[same..]);
    match (rest, others) {
        ([_, rest @ ..], others) if rest == others => true,
        (rest, [_, others @ ..]) if rest == others => true,
        ([_, rest @ ..], [_, others @ ..]) if rest == others => true,
        ([a, b, rest @ ..], [c, d, others @ ..]) => a == d && b == c && rest == others,
        _ => false,
    }
}

/// A problem found in balanced text.
enum Problem {
    /// Standard syntax does not allow the text. The field is the message of the finding.
    Refused(String),
    /// The text uses the reader macro that the field names, such as `#!`, which SBCL does not define.
    Macro(String),
    /// The text names this package, which may be unknown.
    Package(String),
}

/// A walk over the forms of a text.
struct FormWalk<'a> {
    lines: &'a [&'a str],
    /// The tokens, each with the number of its line.
    tokens: Vec<(usize, Token)>,
    problems: Vec<(usize, usize, Problem)>,
    packages: Vec<String>,
    /// True if the last form that was expected is missing, because its list or the text ends there.
    form_missing: bool,
}

/// The context in which a form is read: the nesting depth, the number of backquotes and the feature conditionals around it.
#[derive(Debug, Clone, Copy)]
struct FormContext {
    depth: usize,
    backquotes: u32,
    /// True after `#+` and `#-`: the form is not checked, because the features of the image decide whether it is read.
    skipped: bool,
}

impl<'a> FormWalk<'a> {
    fn new(lines: &'a [&'a str], lexed: &[Line]) -> Self {
        let tokens =
            lexed.iter().enumerate().flat_map(|(number, line)| line.tokens.iter().map(move |token| (number, *token)));
        Self { lines, tokens: tokens.collect(), problems: Vec::new(), packages: Vec::new(), form_missing: false }
    }

    fn run(&mut self) {
        let mut depth = 0_usize;
        for (_, token) in &self.tokens {
            match token.kind {
                TokenKind::Open => depth += 1,
                TokenKind::Close => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > MAX_DEPTH {
                return;
            }
        }
        let mut at = 0;
        while at < self.tokens.len() {
            if self.text(at) == "." {
                self.refuse(at, "a dot outside a list");
            }
            let next = self.walk_form(at, FormContext { depth: 0, backquotes: 0, skipped: false });
            at = next.max(at + 1);
        }
    }

    fn text(&self, at: usize) -> &'a str {
        let lines = self.lines;
        self.tokens.get(at).map_or("", |(line, token)| &lines[*line][token.start..token.end])
    }

    fn kind(&self, at: usize) -> Option<TokenKind> {
        self.tokens.get(at).map(|(_, token)| token.kind)
    }

    fn refuse(&mut self, at: usize, message: &str) {
        let (line, token) = self.tokens[at];
        self.problems.push((line, token.start, Problem::Refused(message.to_owned())));
    }

    /// Walks over the form whose first token has the index `at`, and returns the index of the token after the form. A
    /// closing parenthesis is not a form.
    fn walk_form(&mut self, at: usize, context: FormContext) -> usize {
        // Prefixes count as levels, too, so the depth can exceed the nesting depth of the parentheses.
        let context = FormContext { depth: context.depth + 1, ..context };
        if context.depth > 2 * MAX_DEPTH {
            return self.tokens.len();
        }
        let end = match self.kind(at) {
            None | Some(TokenKind::Close) => {
                self.form_missing = true;
                return at;
            }
            Some(TokenKind::String) => at + 1,
            Some(TokenKind::Atom) => {
                if !context.skipped {
                    self.check_atom(at);
                }
                at + 1
            }
            Some(TokenKind::Feature) => {
                let skipped = FormContext { skipped: true, ..context };
                self.check_feature_operators(at + 1);
                let feature = self.walk_form(at + 1, skipped);
                if self.form_missing {
                    self.refuse(at, &format!("{} with nothing after it", self.text(at)));
                    return feature;
                }
                let conditional = self.walk_form(feature, skipped);
                if self.form_missing {
                    self.refuse(at, "a feature expression with nothing after it");
                    return conditional;
                }
                // No form need follow: the conditional may be the last element of its list.
                return self.walk_form(conditional, context);
            }
            Some(TokenKind::Prefix) => self.walk_prefixed(at, context),
            Some(TokenKind::Open) => self.walk_list(at, context),
        };
        self.form_missing = false;
        end
    }

    /// Checks the operators of the feature expression at `at` (CLHS 24.1.2.1).
    fn check_feature_operators(&mut self, mut at: usize) {
        let mut depth = 0_usize;
        while let Some(kind) = self.kind(at) {
            match kind {
                TokenKind::Open => {
                    depth += 1;
                    let operator = bare_name(self.text(at + 1));
                    if self.kind(at + 1) == Some(TokenKind::Atom) && !["AND", "OR", "NOT"].contains(&operator.as_str())
                    {
                        self.refuse(at, "a list in a feature expression must begin with AND, OR or NOT");
                    }
                }
                TokenKind::Close => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                return;
            }
            at += 1;
        }
    }

    fn walk_prefixed(&mut self, at: usize, context: FormContext) -> usize {
        let prefix = self.text(at);
        let backquotes = match prefix.as_bytes()[0] {
            b'`' => context.backquotes + 1,
            b',' => {
                if context.backquotes == 0 && !context.skipped {
                    self.refuse(at, "a comma outside a backquote");
                }
                context.backquotes.saturating_sub(1)
            }
            b'#' => {
                if !context.skipped {
                    self.check_dispatch_macro(at, prefix);
                }
                context.backquotes
            }
            _ => context.backquotes,
        };
        let end = self.walk_form(at + 1, FormContext { backquotes, ..context });
        if self.form_missing {
            self.refuse(at, &format!("{prefix} with nothing after it"));
        }
        end
    }

    /// Checks the dispatching macro at `at`.
    fn check_dispatch_macro(&mut self, at: usize, prefix: &str) {
        let (line, token) = self.tokens[at];
        let named = prefix.trim_start_matches('#').trim_start_matches(|c: char| c.is_ascii_digit());
        // If the character after `#` is a delimiter, it is not part of the token, but follows the token in the line.
        let Some(character) = named.chars().next().or_else(|| self.lines[line][token.end..].chars().next()) else {
            return self.refuse(at, "# at the end of a line cannot be read");
        };
        match character {
            '<' => self.refuse(at, "#< begins the printed form of an unreadable object"),
            ')' => self.refuse(at, "#) cannot be read"),
            _ if character.is_ascii_whitespace() => self.refuse(at, "# before whitespace cannot be read"),
            _ if DISPATCH_CHARACTERS.contains(character.to_ascii_uppercase()) => {}
            _ => self.problems.push((line, token.start, Problem::Macro(format!("#{character}")))),
        }
    }

    fn walk_list(&mut self, open: usize, context: FormContext) -> usize {
        let mut at = open + 1;
        if !context.skipped && self.text(at) == "." {
            self.refuse(at, "a dot with nothing before it in its list");
        }
        let operator = bare_name(self.text(at));
        if self.kind(at) == Some(TokenKind::Atom) {
            if DEFINING_OPERATORS.contains(&operator.as_str()) {
                self.collect_defined(at + 1);
            } else if LOADING_OPERATORS.contains(&operator.as_str()) {
                self.collect_loaded(at + 1);
            }
        }
        while let Some(kind) = self.kind(at) {
            if kind == TokenKind::Close {
                return at + 1;
            }
            let dotted = !context.skipped && self.text(at) == "." && at > open + 1;
            at = self.walk_form(at, context);
            if dotted {
                if self.kind(at) == Some(TokenKind::Close) {
                    self.refuse(at - 1, "a dot with nothing after it in its list");
                }
                at = self.walk_form(at, context);
                // A feature conditional may follow, and other reader macros may return nothing.
                if matches!(self.kind(at), Some(TokenKind::Open | TokenKind::Atom | TokenKind::String)) {
                    self.refuse(at, "a second form after the dot in its list");
                }
            }
        }
        at
    }

    /// Collects the package names in the rest of a defining form, from the token `at`, without the exported symbols and the
    /// documentation.
    fn collect_defined(&mut self, mut at: usize) {
        let mut depth = 0;
        let mut exported: Option<usize> = None;
        while let Some(kind) = self.kind(at) {
            match kind {
                TokenKind::Open => {
                    depth += 1;
                    if exported.is_none() && matches!(bare_name(self.text(at + 1)).as_str(), "EXPORT" | "DOCUMENTATION")
                    {
                        exported = Some(depth);
                    }
                }
                TokenKind::Close if depth == 0 => return,
                TokenKind::Close => {
                    if exported == Some(depth) {
                        exported = None;
                    }
                    depth -= 1;
                }
                TokenKind::Atom | TokenKind::String if exported.is_none() => {
                    self.packages.push(designated_name(self.text(at)))
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Collects the names in the arguments of a loading operator, from the token `at`.
    fn collect_loaded(&mut self, mut at: usize) {
        while matches!(self.kind(at), Some(TokenKind::Atom | TokenKind::String | TokenKind::Prefix | TokenKind::Open)) {
            if matches!(self.kind(at), Some(TokenKind::Atom | TokenKind::String)) {
                self.packages.push(designated_name(self.text(at)));
            }
            at += 1;
        }
    }

    fn check_atom(&mut self, at: usize) {
        let text = self.text(at);
        let (line, token) = self.tokens[at];
        if text.len() > 1 && text.bytes().all(|byte| byte == b'.') {
            return self.refuse(at, "a token that consists only of dots");
        }
        if text.starts_with(['#', ':']) {
            return;
        }
        let Some((package, name)) = split_package(text) else { return };
        if split_package(name.trim_start_matches(':')).is_some() {
            return self.refuse(at, &format!("too many colons in {text}"));
        }
        self.problems.push((line, token.start, Problem::Package(package)));
    }
}

/// Splits a token at its first colon into the package name, converted to upper case as the reader would, and the rest.
/// Returns `None` if there is no colon.
fn split_package(token: &str) -> Option<(String, &str)> {
    let mut package = String::new();
    let mut characters = token.char_indices();
    let mut bars = false;
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => package.extend(characters.next().map(|(_, character)| character)),
            '|' => bars = !bars,
            ':' if !bars => return Some((package, &token[at + 1..])),
            _ if bars => package.push(character),
            _ => package.extend(character.to_uppercase()),
        }
    }
    None
}

/// Returns a symbol's name without its package, in upper case.
fn bare_name(token: &str) -> String {
    token.rsplit(':').next().unwrap_or_default().to_uppercase()
}

/// Returns the name, converted to upper case, that a string designator such as `:foo`, `#:foo` or `"foo"` denotes.
fn designated_name(text: &str) -> String {
    match text.strip_prefix('"') {
        // Strings that name systems are in lower case, but the names of the systems' packages are in upper case.
        Some(name) => name.trim_end_matches('"').to_uppercase(),
        None => bare_name(text).replace('|', ""),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    #[test]
    fn checking_unknown_packages_takes_linear_time() {
        let text: String = (0..20_000).map(|number| format!("(package-{number:05}:name)\n")).collect();
        let begin = Instant::now();
        assert_eq!(super::super::check(&text, &[]).findings.len(), 20_000);
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    }
}
