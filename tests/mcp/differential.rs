//! The same code evaluated by the binary and by the SBCL that made its core: the verdicts must agree.
//!
//! A file in `tests/differential/` holds the cases of one theme. A line `== name` begins a case; the lines after it are
//! the code of one call of evaluate-lisp. A line `--` begins another call. Lines with these prefixes change a case:
//!
//! - `fresh:` both sides start anew before this case; otherwise it continues in the state of the previous case
//! - `each:` every following line is a call
//! - `differs:` the reason why the contract requires another answer from the binary; the answers must then differ
//!
//! A line that begins with `#;` is a comment. `@SCRATCH@` in code stands for a directory that is empty when each side
//! begins. The programs of `tests/corpus/` run through the same comparison.
//!
//! A verdict is the answer of evaluate-lisp without its backtrace and restarts. `driver.lisp` prints bare SBCL's
//! verdicts in the same layout. [`normalized`] removes what differs between any two runs; nothing else does.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::bare::bare;
use crate::client::{Scratch, Server, is_emulated};
use sbcl::report::unescape_markers;
use sbcl_core::BareSbcl;
use serde_json::json;

/// The placeholder in code for the directory that it may write to.
const SCRATCH: &str = "@SCRATCH@";

/// Returns the time limit of a call for bare SBCL. The first call also loads `driver.lisp`.
fn deadline() -> Duration {
    Duration::from_secs(if is_emulated() { 120 } else { 20 })
}

/// The character that ends each answer of the driver.
const ANSWER_END: char = '\u{1f}';

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

// Cases

#[derive(Debug, Default)]
struct Case {
    name: String,
    calls: Vec<String>,
    fresh: bool,
    differs: Option<String>,
    /// True if each line is a call.
    each: bool,
}

fn load(theme: &str) -> Vec<Case> {
    let path = directory("differential").join(theme).with_extension("txt");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut cases: Vec<Case> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("#;") {
            continue;
        }
        if let Some(name) = line.strip_prefix("== ") {
            cases.push(Case { name: name.trim().to_owned(), calls: vec![String::new()], ..Case::default() });
            continue;
        }
        let Some(case) = cases.last_mut() else {
            assert!(line.trim().is_empty(), "{theme}: line {} stands before the first case", number + 1);
            continue;
        };
        if line.is_empty() {
            continue;
        }
        if line == "--" || (case.each && !case.calls.last().is_some_and(String::is_empty)) {
            case.calls.push(String::new());
        }
        if line == "--" {
            continue;
        }
        if line.starts_with("each:") {
            case.each = true;
        } else if line.starts_with("fresh:") {
            case.fresh = true;
        } else if let Some(why) = line.strip_prefix("differs:") {
            case.differs = Some(why.trim().to_owned());
        } else {
            let code = case.calls.last_mut().expect("never empty");
            code.push_str(line);
            code.push('\n');
        }
    }
    cases
}

/// Loads the programs of a corpus file as cases, with the differences that [`CORPUS_DIFFERS`] lists.
fn load_corpus(theme: &str) -> Vec<Case> {
    let path = directory("corpus").join(theme).with_extension("txt");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut cases: Vec<Case> = Vec::new();
    let mut in_code = false;
    for line in text.lines().filter(|line| !line.starts_with("#;")) {
        if let Some(name) = line.strip_prefix("== ") {
            let differs = CORPUS_DIFFERS.iter().find(|(known, _)| *known == name.trim());
            cases.push(Case {
                name: name.trim().to_owned(),
                calls: vec![String::new()],
                differs: differs.map(|(_, why)| (*why).to_owned()),
                ..Case::default()
            });
            in_code = true;
        } else if line.starts_with("type:") {
            in_code = false;
        } else if let (true, Some(case)) = (in_code, cases.last_mut()) {
            case.calls[0].push_str(line);
            case.calls[0].push('\n');
        }
    }
    cases
}

/// Corpus programs whose verdict differs from bare SBCL's, with the reason.
const CORPUS_DIFFERS: &[(&str, &str)] = &[
    ("too many arguments", IGNORES),
    ("a compiled call with too many arguments", IGNORES),
    ("with-input-from-string end", "evaluated code is compiled with more debug: the stream is on the heap"),
    ("remove-method of no method", METHODS),
    ("find-method that is not there", METHODS),
    (
        "an undefined type in a structure",
        "how often it is told depends on the compilation unit, which is the call here",
    ),
    ("a very long message", "a limit of the contract"),
    ("a report function that recurses", "another stack is exhausted first: theirs differ in size"),
    ("a restart test that fails", "bare SBCL meets the failing test again when it lists the restarts"),
    ("the debugger disabled", "bare SBCL ends"),
    ("an array larger than the heap", HEAP),
    ("a string larger than the heap", HEAP),
    ("an array larger than any heap in a function", HEAP),
    ("joining a thread that failed", "bare SBCL's debugger waits for the user in that thread"),
];

const IGNORES: &str = "evaluated code is compiled with more debug: SBCL offers to ignore arguments";
const METHODS: &str = "the core has more methods of PRINT-OBJECT, and the message counts them";
const HEAP: &str = "the heaps differ in size, and the message has it";

// Bare SBCL

/// A process of bare SBCL that runs `driver.lisp`.
struct Driver {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
}

impl Driver {
    fn start(bare: &BareSbcl, captures: &Path) -> Self {
        for name in ["stdout", "stderr"] {
            std::fs::write(captures.join(name), "").expect("a file to capture in");
        }
        let mut child = Command::new(&bare.program)
            .arg("--core")
            .arg(&bare.core)
            .args(["--noinform", "--disable-ldb", "--no-sysinit", "--no-userinit", "--load"])
            .arg(directory("differential/driver.lisp"))
            .args(["--eval", "(differential::serve)", "--quit"])
            .env("SBCL_HOME", &bare.home)
            .env("HOME", captures.parent().expect("the captures are in the shared directory"))
            .env("DIFFERENTIAL_STDOUT", captures.join("stdout"))
            .env("DIFFERENTIAL_STDERR", captures.join("stderr"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("bare SBCL starts");
        let stdin = child.stdin.take().expect("a pipe");
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            loop {
                let mut answer = Vec::new();
                match stdout.read_until(ANSWER_END as u8, &mut answer) {
                    Ok(1..) if answer.pop() == Some(ANSWER_END as u8) => {}
                    _ => break,
                }
                let mut newline = [0];
                let text = String::from_utf8_lossy(&answer).trim_end_matches('\n').to_owned();
                if stdout.read_exact(&mut newline).is_err() || sender.send(text).is_err() {
                    break;
                }
            }
        });
        Self { child, stdin, answers }
    }

    fn is_gone(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_some()
    }

    /// Returns the verdict on code. A process that ended or does not answer is a verdict, too.
    fn verdict(&mut self, code: &str) -> String {
        const GONE: &str = "SBCL is gone, or does not answer";
        let literal = format!("\"{}\"\n", code.replace('\\', "\\\\").replace('"', "\\\""));
        if self.stdin.write_all(literal.as_bytes()).and_then(|()| self.stdin.flush()).is_err() {
            return GONE.to_owned();
        }
        self.answers.recv_timeout(deadline()).unwrap_or_else(|_| {
            let _ = self.child.kill();
            let _ = self.child.wait();
            GONE.to_owned()
        })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// The binary

/// Returns the binary's verdict on code, in the driver's layout.
fn verdict(server: &mut Server, code: &str) -> String {
    let (answer, is_error) = server.call_tool("evaluate-lisp", json!({ "code": code }));
    if !is_error {
        return answer;
    }
    let mut verdict = answer.split("\n\n[Backtrace]").next().unwrap_or_default().to_owned();
    let (described, _) = server.call_tool("describe-last-error", json!({}));
    let restarts = described.lines().skip_while(|line| !line.starts_with("Available Restarts:")).skip(1);
    verdict.push_str("\n\n[Restarts]");
    for line in restarts.take_while(|line| !line.is_empty()) {
        let line = line.trim_start();
        let line = line
            .split_once(". ")
            .filter(|(number, _)| number.parse::<u32>().is_ok())
            .map_or(line, |(_, restart)| restart);
        _ = write!(verdict, "\n{line}");
    }
    verdict
}

// Comparing

/// Returns a verdict without the parts that differ between runs or that only the contract requires: the server's own
/// messages, addresses, thread numbers, the numbers of uninterned symbols, the names of the standard streams, the
/// locations of warnings and of what is missing at the end of the code.
fn normalized(verdict: &str) -> String {
    let verdict = &*unescape_markers(verdict);
    let verdict = match verdict.strip_prefix("[notice]") {
        Some(text) => text.split_once("\n\n").map_or("", |(_, rest)| rest),
        None => verdict,
    };
    let mut section = "";
    let mut result = String::with_capacity(verdict.len());
    for line in verdict.lines() {
        if let Some(name) =
            ["[stdout]", "[stderr]", "[warnings]", "[ERROR]"].iter().find(|name| line.starts_with(**name))
        {
            section = name;
        }
        if section == "[ERROR]" && HINTS.iter().any(|hint| line.starts_with(hint)) {
            continue;
        }
        let line = if section == "[warnings]" { without_place(line) } else { line };
        // A line of a message that looks like a value is escaped.
        let line = match line.strip_prefix('\\') {
            Some(rest) if rest.trim_start_matches('\\').starts_with("=> ") => rest,
            _ => line,
        };
        push_without_identity(&mut result, line);
        result.push('\n');
    }
    STANDARD_STREAMS.iter().fold(result, |text, name| text.replace(name, "#<a standard stream>"))
}

/// Prefixes of the lines that the binary adds to a condition's message.
const HINTS: [&str; 9] = [
    "The code ends at line ",
    "The reader stopped at line ",
    "Did you mean ",
    "By the indentation, line ",
    "In /",
    "Existing instances of ",
    "The restart CONTINUE installs the new definition",
    "The restart RECKLESSLY-CONTINUE installs the new definition as if",
    "The object was made with an earlier definition",
];

/// Printed forms of the standard streams: the binary has its own, and bare SBCL's depend on how they are reached.
const STANDARD_STREAMS: [&str; 9] = [
    "#<SBCL-HOST::EMPTY-STREAM {}>",
    "#<SBCL-HOST::HOST-STREAM {}>",
    "#<HOST-STREAM {}>",
    "#<CONCATENATED-STREAM :STREAMS NIL {}>",
    "#<SYNONYM-STREAM :SYMBOL SB-SYS:*STDIN* {}>",
    "#<SYNONYM-STREAM :SYMBOL SB-SYS:*STDOUT* {}>",
    "#<SYNONYM-STREAM :SYMBOL SB-SYS:*STDERR* {}>",
    "#<SB-SYS:FD-STREAM for \"standard input\" {}>",
    "#<SB-SYS:FD-STREAM for \"standard output\" {}>",
];

/// Returns a warning without its source location, ` (line 3)` or ` (src/a.lisp:12, in (DEFUN F))`.
fn without_place(line: &str) -> &str {
    let is_place = |text: &str| {
        let place = text.split([',', ')']).next().unwrap_or("");
        let number = place.strip_prefix("line ").or_else(|| place.split_once(':').map(|(_, number)| number));
        text.ends_with(')') && number.is_some_and(|number| number.starts_with(|c: char| c.is_ascii_digit()))
    };
    let starts = line.match_indices(" (").find(|(start, _)| is_place(&line[start + 2..]));
    starts.map_or(line, |(start, _)| &line[..start])
}

/// Appends a line without addresses (`{1001234ABC}`), thread numbers (`tid=123`) and the numbers of uninterned symbols
/// (`#:G123`).
fn push_without_identity(result: &mut String, line: &str) {
    let mut rest = line;
    while let Some(start) = ["{", "#:", "tid="].iter().filter_map(|what| rest.find(what)).min() {
        let (before, from) = rest.split_at(start);
        result.push_str(before);
        if let Some(thread) = from.strip_prefix("tid=") {
            result.push_str("tid=");
            rest = thread.trim_start_matches(|c: char| c.is_ascii_digit());
        } else if let Some(symbol) = from.strip_prefix("#:") {
            let end = symbol.find(|c: char| !c.is_ascii_alphanumeric() && !"-*+%!?<>=/".contains(c));
            let (name, after) = symbol.split_at(end.unwrap_or(symbol.len()));
            result.push_str("#:");
            result.push_str(name.trim_end_matches(|c: char| c.is_ascii_digit()));
            rest = after;
        } else {
            result.push('{');
            let address = from[1..].trim_start_matches(|c: char| c.is_ascii_hexdigit());
            let is_address = address.starts_with('}') && from.len() - address.len() > 5;
            rest = if is_address { address } else { &from[1..] };
        }
    }
    result.push_str(rest);
}

/// Returns bare SBCL's verdict without the compiler's messages on stderr, which the contract keeps out of answers.
fn without_chatter(verdict: &str) -> String {
    let Some((before, rest)) = split_at_line(verdict, "[stderr]") else { return verdict.to_owned() };
    let end = ["[warnings]", "[ERROR] ", "=> ", "; No values"].iter().filter_map(|next| find_line(rest, next)).min();
    let (stderr, after) = rest.split_at(end.unwrap_or(rest.len()));
    let is_chatter = |line: &str| line.starts_with(';') || line.ends_with("disabled: proceed with caution");
    let lines: Vec<&str> = stderr.lines().skip(1).collect();
    if !lines.iter().any(|line| is_chatter(line)) {
        return verdict.to_owned();
    }
    let own: Vec<&str> = lines.into_iter().filter(|line| !is_chatter(line) && !line.is_empty()).collect();
    let own = if own.is_empty() { String::new() } else { format!("[stderr]\n{}\n\n", own.join("\n")) };
    format!("{before}{own}{after}")
}

fn find_line(text: &str, prefix: &str) -> Option<usize> {
    if text.starts_with(prefix) { Some(0) } else { text.find(&format!("\n{prefix}")).map(|before| before + 1) }
}

fn split_at_line<'a>(text: &'a str, prefix: &str) -> Option<(&'a str, &'a str)> {
    find_line(text, prefix).map(|start| text.split_at(start))
}

/// The working directory of both sides. Paths are printed, so both must use the same one, in turns.
struct SharedDirectory(Scratch);

impl SharedDirectory {
    fn new() -> Self {
        let path = Scratch::new();
        path.directory("captures");
        Self(path)
    }

    /// Returns the directory for the code, emptied.
    fn emptied(&self) -> String {
        let files = self.0.join("files");
        let _ = std::fs::remove_dir_all(&files);
        std::fs::create_dir(&files).expect("a scratch directory");
        files.to_string_lossy().into_owned()
    }
}

/// Runs cases on both sides and describes each difference.
fn differences(cases: &[Case], bare: &BareSbcl) -> Vec<String> {
    let scratch = SharedDirectory::new();
    let mut found = Vec::new();
    // Within a stretch of cases each side keeps its state. The sides run one after the other because they share the
    // directory.
    for stretch in cases.chunk_by(|_, next| !next.fresh) {
        let code = |call: &str, files: &str| call.trim_end().replace(SCRATCH, files);
        let files = scratch.emptied();
        let mut server = Server::start_with_environment(&[], &[("HOME", &scratch.0)]);
        server.initialize("2025-06-18");
        let ours: Vec<Vec<String>> = stretch
            .iter()
            .map(|case| case.calls.iter().map(|call| normalized(&verdict(&mut server, &code(call, &files)))).collect())
            .collect();
        drop(server);
        let files = scratch.emptied();
        let mut driver = Driver::start(bare, &scratch.0.join("captures"));
        for (case, ours) in stretch.iter().zip(ours) {
            if driver.is_gone() {
                driver = Driver::start(bare, &scratch.0.join("captures"));
            }
            let judged: Vec<String> = case
                .calls
                .iter()
                .map(|call| normalized(&without_chatter(&driver.verdict(&code(call, &files)))))
                .collect();
            match (&case.differs, ours == judged) {
                (None, false) => found.push(difference(case, &ours, &judged)),
                (Some(why), true) => found.push(format!("== {}\nno longer differs ({why})\n", case.name)),
                _ => {}
            }
        }
    }
    found
}

fn difference(case: &Case, ours: &[String], judged: &[String]) -> String {
    let mut text = format!("== {}\n", case.name);
    for ((call, ours), judged) in case.calls.iter().zip(ours).zip(judged) {
        if ours != judged {
            _ = writeln!(text, "{call}-- bare SBCL:\n{}-- the binary:\n{}", shown(judged), shown(ours));
        }
    }
    text
}

/// Returns a verdict with its long lines cut.
fn shown(verdict: &str) -> String {
    verdict.lines().fold(String::new(), |text, line| text + &line.chars().take(500).collect::<String>() + "\n")
}

fn run(theme: &str, cases: &[Case]) {
    assert!(!cases.is_empty(), "{theme} holds no case");
    let Some(bare) = bare() else { return };
    let found = differences(cases, bare);
    assert!(found.is_empty(), "{} of {} cases of {theme} differ:\n\n{}", found.len(), cases.len(), found.join("\n"));
}

macro_rules! themes {
    ($($theme:ident)*; $($programs:ident)*) => {
        $(#[test] fn $theme() { run(stringify!($theme), &load(stringify!($theme))); })*

        mod corpus {
            use super::{load_corpus, run};

            $(#[test] fn $programs() {
                run(concat!("corpus-", stringify!($programs)), &load_corpus(stringify!($programs)));
            })*
        }

        #[test]
        fn every_case_file_is_run_by_a_test() {
            for (name, known) in
                [("differential", &[$(stringify!($theme)),*][..]), ("corpus", &[$(stringify!($programs)),*][..])]
            {
                for entry in std::fs::read_dir(directory(name)).expect("the cases are there") {
                    let path = entry.expect("its entries can be read").path();
                    let Some(theme) = path.file_name().and_then(|file| file.to_str()?.strip_suffix(".txt")) else {
                        continue;
                    };
                    assert!(known.contains(&theme), "no test runs {}", path.display());
                }
            }
        }
    };
}

themes! {
    compiler session evaluation objects symbols numbers sequences files printer system;
    arithmetic types control packages reader files streams parsing sequences storage compiling macros clos printing
    threads foreign nested user_defined
}
