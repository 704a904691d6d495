//! What the reader makes of balanced text, as far as that can be known without evaluating it.

use std::collections::HashSet;

use super::lexer::{Item, Kind, Line};
use super::{Finding, Severity};

/// How deep forms may be nested to be looked at.
const DEEPEST: usize = 500;

/// What dispatching macros SBCL has (CLHS 2.4.8).
const DISPATCHING: &str = "'(*+-.:=#ABCOPRSX\\|";

/// Operators that define a package, or say what defines others, by name without package.
const DEFINING: [&str; 4] = ["DEFPACKAGE", "DEFINE-PACKAGE", "MAKE-PACKAGE", "DEFSYSTEM"];

/// Operators that bring packages of the name that they are given, or something like it.
const BRINGING: [&str; 6] =
    ["LOAD-SYSTEM", "LOAD-SYSTEMS", "QUICKLOAD", "REQUIRE", "RENAME-PACKAGE", "ADD-PACKAGE-LOCAL-NICKNAME"];

/// The packages of this image that are neither an implementation's (`SB-…`) nor ASDF's parts (`ASDF/…`).
const PACKAGES: [&str; 11] = [
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

/// Those of SBCL's that begin with `SB-`.
const IMPLEMENTATION: &str = "ALIEN ALIEN-INTERNALS APROF ASSEM BIGNUM BROTHERTREE BSD-SOCKETS BSD-SOCKETS-INTERNAL C \
    C-CALL CAPSTONE CLTL2 CONCURRENCY COVER DEBUG DI DISASSEM EVAL EXECUTABLE EXT FASL FASTEVAL FORMAT GMP GRAY GROVEL \
    IMPL INT INTERPRETER INTROSPECT KERNEL LOCKLESS LOOP MANUAL MD5 MOP MPFR PCL PERF POSIX PRETTY PROFILE QUEUE \
    REGALLOC ROTATE-BYTE RT SEQUENCE SIMD SIMPLE-STREAMS SPROF SYS THREAD UNICODE UNIX VM WALKER XREF";

/// Whether the text has a syntax of its own: then only whoever loads it knows what the reader makes of it.
pub(super) fn has_own_syntax(lines: &[&str]) -> bool {
    const SIGNS: [&str; 5] =
        ["set-macro-character", "set-dispatch-macro-character", "in-readtable", "set-syntax-from-char", "(enable-"];
    lines.iter().any(|line| {
        let code = line.split(';').next().unwrap_or_default().to_ascii_lowercase();
        SIGNS.iter().any(|sign| code.contains(sign))
    })
}

/// Names of packages that the text defines, or says that something else does, in upper case.
pub(super) fn packages(lines: &[&str], lexed: &[Line]) -> Vec<String> {
    let mut walk = Walk::new(lines, lexed);
    walk.run();
    walk.packages
}

/// The number of unknown packages that are compared with the known ones.
const MAX_HINTS: usize = 100;

/// What is wrong with balanced lines. `known` are names of packages that are defined elsewhere.
pub(super) fn findings(lines: &[&str], lexed: &[Line], known: &[String]) -> Vec<Finding> {
    let mut walk = Walk::new(lines, lexed);
    walk.run();
    let own_syntax = has_own_syntax(lines);
    let defined: HashSet<&str> = walk.packages.iter().chain(known).map(String::as_str).collect();
    let mut findings = Vec::new();
    let (mut macros, mut unknown) = (HashSet::new(), HashSet::new());
    for (line, at, what) in walk.found {
        let (severity, message) = match what {
            Wrong::Refused(_) | Wrong::Macro(_) if own_syntax => continue,
            Wrong::Refused(message) => (Severity::Error, message),
            Wrong::Macro(name) => {
                let message = format!("SBCL has no reader macro {name}: this reads only where one is defined");
                if !macros.insert(name) {
                    continue;
                }
                (Severity::Note, message)
            }
            Wrong::Package(name) => {
                if exists(&name) || defined.contains(&*name) || unknown.contains(&name) {
                    continue;
                }
                let near = (unknown.len() < MAX_HINTS).then(|| nearest(&name, &defined)).flatten();
                let hint = near.map(|near| format!(" (is {near} meant?)")).unwrap_or_default();
                let message = format!(
                    "no package {name} is known here: what defines it must be loaded before this is read{hint}"
                );
                unknown.insert(name);
                (Severity::Note, message)
            }
        };
        let column = lines[line][..at].chars().count() + 1;
        findings.push(Finding { line: line + 1, column, severity, message });
    }
    findings
}

fn exists(name: &str) -> bool {
    PACKAGES.contains(&name)
        || name.starts_with("ASDF/")
        || name.starts_with("UIOP/")
        || name.strip_prefix("SB-").is_some_and(|name| IMPLEMENTATION.split_whitespace().any(|other| other == name))
}

/// The known package whose name is nearest to this one's, if one is near.
fn nearest<'names>(name: &str, defined: &HashSet<&'names str>) -> Option<&'names str> {
    let near = defined.iter().copied().chain(PACKAGES).filter(|other| is_near(name, other));
    near.min_by_key(|other| (other.len().abs_diff(name.len()), *other))
}

/// Whether one name is the other with a character more, less, changed, or two exchanged.
fn is_near(name: &str, other: &str) -> bool {
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

/// Something wrong with a place.
enum Wrong {
    /// The standard syntax does not have it.
    Refused(String),
    /// It begins with a dispatching macro that SBCL does not have.
    Macro(String),
    /// It names this package.
    Package(String),
}

/// A walk over the forms of a text.
struct Walk<'a> {
    lines: &'a [&'a str],
    /// Each with its line.
    items: Vec<(usize, Item)>,
    found: Vec<(usize, usize, Wrong)>,
    packages: Vec<String>,
    /// The form that was looked for last is missing: there is the end of its list, or of the text.
    nothing: bool,
}

/// What a form is in.
#[derive(Debug, Clone, Copy)]
struct Context {
    depth: usize,
    backquotes: u32,
    /// What `#+` and `#-` stand before is not looked at: it depends on what is loaded whether it is read.
    skipped: bool,
}

impl<'a> Walk<'a> {
    fn new(lines: &'a [&'a str], lexed: &[Line]) -> Self {
        let items =
            lexed.iter().enumerate().flat_map(|(number, line)| line.items.iter().map(move |item| (number, *item)));
        Self { lines, items: items.collect(), found: Vec::new(), packages: Vec::new(), nothing: false }
    }

    fn run(&mut self) {
        let mut depth = 0_usize;
        for (_, item) in &self.items {
            match item.kind {
                Kind::Open => depth += 1,
                Kind::Close => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > DEEPEST {
                return;
            }
        }
        let mut at = 0;
        while at < self.items.len() {
            if self.text(at) == "." {
                self.refuse(at, "a dot that is in no list");
            }
            let next = self.form(at, Context { depth: 0, backquotes: 0, skipped: false });
            at = next.max(at + 1);
        }
    }

    fn text(&self, at: usize) -> &'a str {
        let lines = self.lines;
        self.items.get(at).map_or("", |(line, item)| &lines[*line][item.start..item.end])
    }

    fn kind(&self, at: usize) -> Option<Kind> {
        self.items.get(at).map(|(_, item)| item.kind)
    }

    fn refuse(&mut self, at: usize, message: &str) {
        let (line, item) = self.items[at];
        self.found.push((line, item.start, Wrong::Refused(message.to_owned())));
    }

    /// Walks over the form at `at`; returns where what comes after it begins. A closing parenthesis is no form.
    fn form(&mut self, at: usize, context: Context) -> usize {
        // Prefixes nest, too.
        let context = Context { depth: context.depth + 1, ..context };
        if context.depth > 2 * DEEPEST {
            return self.items.len();
        }
        let end = match self.kind(at) {
            None | Some(Kind::Close) => {
                self.nothing = true;
                return at;
            }
            Some(Kind::Text) => at + 1,
            Some(Kind::Token) => {
                if !context.skipped {
                    self.token(at);
                }
                at + 1
            }
            Some(Kind::Feature) => {
                let skipped = Context { skipped: true, ..context };
                self.feature_operators(at + 1);
                let feature = self.form(at + 1, skipped);
                let conditional = if self.nothing { feature } else { self.form(feature, skipped) };
                if self.nothing {
                    self.refuse(at, "a feature expression with nothing after it");
                    return conditional;
                }
                // There need be none after it: then this stands last in its list.
                return self.form(conditional, context);
            }
            Some(Kind::Prefix) => self.prefixed(at, context),
            Some(Kind::Open) => self.list(at, context),
        };
        self.nothing = false;
        end
    }

    /// Looks at the operators of the feature expression at `at` (CLHS 24.1.2.1).
    fn feature_operators(&mut self, mut at: usize) {
        let mut depth = 0_usize;
        while let Some(kind) = self.kind(at) {
            match kind {
                Kind::Open => {
                    depth += 1;
                    let operator = bare_name(self.text(at + 1));
                    if self.kind(at + 1) == Some(Kind::Token) && !["AND", "OR", "NOT"].contains(&operator.as_str()) {
                        self.refuse(at, "a list in a feature expression begins with AND, OR or NOT");
                    }
                }
                Kind::Close => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                return;
            }
            at += 1;
        }
    }

    fn prefixed(&mut self, at: usize, context: Context) -> usize {
        let prefix = self.text(at);
        let backquotes = match prefix.as_bytes()[0] {
            b'`' => context.backquotes + 1,
            b',' => {
                if context.backquotes == 0 && !context.skipped {
                    self.refuse(at, "a comma that is in no backquote");
                }
                context.backquotes.saturating_sub(1)
            }
            b'#' => {
                if !context.skipped {
                    self.dispatching(at, prefix);
                }
                context.backquotes
            }
            _ => context.backquotes,
        };
        let end = self.form(at + 1, Context { backquotes, ..context });
        if self.nothing {
            self.refuse(at, &format!("{prefix} with nothing after it"));
        }
        end
    }

    /// Looks at the dispatching macro at `at`.
    fn dispatching(&mut self, at: usize, prefix: &str) {
        let (line, item) = self.items[at];
        let named = prefix.trim_start_matches('#').trim_start_matches(|c: char| c.is_ascii_digit());
        // A delimiter is no part of the item.
        let Some(character) = named.chars().next().or_else(|| self.lines[line][item.end..].chars().next()) else {
            return self.refuse(at, "# at the end of a line");
        };
        match character {
            '<' => self.refuse(at, "#< begins what was printed as an object that cannot be read"),
            ')' => self.refuse(at, "#) cannot be read"),
            _ if character.is_ascii_whitespace() => self.refuse(at, "# before a blank cannot be read"),
            _ if DISPATCHING.contains(character.to_ascii_uppercase()) => {}
            _ => self.found.push((line, item.start, Wrong::Macro(format!("#{character}")))),
        }
    }

    fn list(&mut self, open: usize, context: Context) -> usize {
        let mut at = open + 1;
        if !context.skipped && self.text(at) == "." {
            self.refuse(at, "a dot with nothing before it in its list");
        }
        let operator = bare_name(self.text(at));
        if self.kind(at) == Some(Kind::Token) {
            if DEFINING.contains(&operator.as_str()) {
                self.defined(at + 1);
            } else if BRINGING.contains(&operator.as_str()) {
                self.brought(at + 1);
            }
        }
        while let Some(kind) = self.kind(at) {
            if kind == Kind::Close {
                return at + 1;
            }
            if !context.skipped && self.text(at) == "." && at > open + 1 && self.kind(at + 1) == Some(Kind::Close) {
                self.refuse(at, "a dot with nothing after it in its list");
            }
            at = self.form(at, context);
        }
        at
    }

    /// Takes the names in the rest of a defpackage form, from `at`, but what it exports.
    fn defined(&mut self, mut at: usize) {
        let mut depth = 0;
        let mut exported: Option<usize> = None;
        while let Some(kind) = self.kind(at) {
            match kind {
                Kind::Open => {
                    depth += 1;
                    if exported.is_none() && matches!(bare_name(self.text(at + 1)).as_str(), "EXPORT" | "DOCUMENTATION")
                    {
                        exported = Some(depth);
                    }
                }
                Kind::Close if depth == 0 => return,
                Kind::Close => {
                    if exported == Some(depth) {
                        exported = None;
                    }
                    depth -= 1;
                }
                Kind::Token | Kind::Text if exported.is_none() => self.packages.push(designated(self.text(at))),
                _ => {}
            }
            at += 1;
        }
    }

    /// Takes the names in the rest of a list, from `at`.
    fn brought(&mut self, mut at: usize) {
        while matches!(self.kind(at), Some(Kind::Token | Kind::Text | Kind::Prefix | Kind::Open)) {
            if matches!(self.kind(at), Some(Kind::Token | Kind::Text)) {
                self.packages.push(designated(self.text(at)));
            }
            at += 1;
        }
    }

    fn token(&mut self, at: usize) {
        let text = self.text(at);
        let (line, item) = self.items[at];
        if text.len() > 1 && text.bytes().all(|byte| byte == b'.') {
            return self.refuse(at, "a token of nothing but dots");
        }
        if text.starts_with(['#', ':']) {
            return;
        }
        let Some((package, name)) = split_package(text) else { return };
        if split_package(name.trim_start_matches(':')).is_some() {
            return self.refuse(at, &format!("too many colons in {text}"));
        }
        self.found.push((line, item.start, Wrong::Package(package)));
    }
}

/// The package that a token names, in upper case as the reader would have it, and the rest after the first colon.
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

/// The name of a symbol without its package, in upper case.
fn bare_name(token: &str) -> String {
    token.rsplit(':').next().unwrap_or_default().to_uppercase()
}

/// The name that a designator designates: `:foo`, `#:foo`, `foo` or `"FOO"`.
fn designated(text: &str) -> String {
    match text.strip_prefix('"') {
        // Systems have names in lower case.
        Some(name) => name.trim_end_matches('"').to_uppercase(),
        None => bare_name(text).replace('|', ""),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    #[test]
    fn time_for_unknown_packages_grows_with_their_number_and_not_faster() {
        let text: String = (0..20_000).map(|number| format!("(package-{number:05}:name)\n")).collect();
        let begin = Instant::now();
        assert_eq!(super::super::check(&text, &[]).findings.len(), 20_000);
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    }
}
