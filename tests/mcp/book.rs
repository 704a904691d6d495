//! The examples of README.md and of the book in docs/ run as they stand.
//!
//! A page is one story: its examples run from top to bottom, in one directory of their own and with one server. What a
//! reader sees is what runs:
//!
//! | in the page | what the test does |
//! |---|---|
//! | a block that begins with `→ TOOL {…}` | calls tools of the server; indented lines below are the argument `code`; what follows must be the answer |
//! | a line in parentheses within such a block | does what the line says (see [`Run::meanwhile`]) |
//! | a block `console` with lines `$ COMMAND` | runs each in a shell; what follows must be its output |
//! | a block `repl` with lines `CL-USER> …` | types each in a terminal with `sbcl-mcp repl`; what follows must be shown |
//! | a block `lisp` that begins with `;;; FILE` | writes the file |
//! | a block `diff` that begins with `--- FILE` | changes the file |
//! | `<!-- server: OPTIONS -->` | starts another server for what follows |
//! | `` `sbcl-mcp …` prints `…` `` within a sentence | runs the command and compares its output |
//!
//! A line `...` in an answer stands for any lines. Times, sizes, addresses and the like may differ ([`settled`]). With
//! `SBCL_MCP_UPDATE_REFERENCE=1` (`make reference`) answers that differ are written into the page instead.

use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Value, json};

use crate::client::{Scratch, Server, binary};
use crate::processes::kill_worker;
use crate::repl::Terminal;

/// The environment variable that makes the tests write pages instead of comparing them.
const UPDATE: &str = "SBCL_MCP_UPDATE_REFERENCE";

/// The repository.
pub(crate) const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Returns true if pages are written instead of compared.
pub(crate) fn is_updating() -> bool {
    std::env::var_os(UPDATE).is_some_and(|value| value == "1")
}

/// A step of a page.
#[derive(Debug)]
pub(crate) enum Step {
    /// Starts a server with these options.
    Server(Vec<String>),
    /// Writes a file.
    File(String, String),
    /// Replaces a part of a file.
    Change { file: String, old: String, new: String },
    /// Calls a tool.
    Call { tool: String, arguments: Value, answer: Answer },
    /// Runs a command in a shell.
    Shell(String, Answer),
    /// Starts a REPL.
    Terminal,
    /// Types a line into the REPL, which shows its answer and the next prompt.
    Type { line: String, prompt: String, answer: Answer },
    /// Performs an event that the line describes.
    Meanwhile(String),
}

/// An answer as the page has it.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The lines of the page, counted from 0.
    lines: Range<usize>,
    /// The answer, without the block's indentation.
    text: Vec<String>,
    /// The indentation of each line on the page.
    indentation: &'static str,
}

/// Returns the steps of a page, each with the heading above it.
pub(crate) fn steps(page: &str) -> Vec<(String, Step)> {
    static FILE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^;;; ([A-Za-z0-9_./-]+\.(?:lisp|asd))$").unwrap());
    let lines: Vec<&str> = page.lines().collect();
    let mut steps = Vec::new();
    let mut heading = String::new();
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at];
        at += 1;
        if let Some(title) = line.strip_prefix('#') {
            heading = title.trim_start_matches('#').trim().to_owned();
        } else if let Some(options) = line.strip_prefix("<!-- server:").and_then(|rest| rest.strip_suffix("-->")) {
            let options = options.split_whitespace().map(str::to_owned).collect();
            steps.push((heading.clone(), Step::Server(options)));
        } else if let Some(info) = line.strip_prefix("```") {
            let begin = at;
            while at < lines.len() && lines[at] != "```" {
                at += 1;
            }
            let block = &lines[begin..at];
            let body = |from: usize| block[from..].iter().map(|line| format!("{line}\n")).collect::<String>();
            let first = block.first().copied().unwrap_or_default();
            let found = match info {
                "console" => commands(block, begin),
                "repl" => typed(block, begin),
                "lisp" => {
                    FILE.captures(first).map(|file| Step::File(file[1].to_owned(), body(0))).into_iter().collect()
                }
                "diff" => first.strip_prefix("--- ").map(|file| change(file, &block[1..])).into_iter().collect(),
                _ if first.starts_with("→ ") || is_meanwhile(first) => calls(block, begin, ""),
                _ => Vec::new(),
            };
            steps.extend(found.into_iter().map(|step| (heading.clone(), step)));
            at += 1;
        } else if line.starts_with("    → ") && (at < 2 || lines[at - 2].is_empty()) {
            let begin = at - 1;
            while at < lines.len() && (lines[at].is_empty() || lines[at].starts_with("    ")) {
                at += 1;
            }
            let block: Vec<_> = lines[begin..at].iter().map(|line| line.strip_prefix("    ").unwrap_or(line)).collect();
            steps.extend(calls(&block, begin, "    ").into_iter().map(|step| (heading.clone(), step)));
        }
    }
    steps
}

/// Returns the calls of a block that begins in line `begin` of the page.
fn calls(block: &[&str], begin: usize, indentation: &'static str) -> Vec<Step> {
    let is_step = |line: &str| line.starts_with("→ ") || is_meanwhile(line);
    let mut steps = Vec::new();
    let mut at = 0;
    while at < block.len() {
        let line = block[at];
        at += 1;
        if is_meanwhile(line) {
            steps.push(Step::Meanwhile(line.to_owned()));
        }
        let Some(call) = line.strip_prefix("→ ") else { continue };
        let (tool, arguments) = call.split_once(' ').unwrap_or((call, "{}"));
        let mut arguments: Value = serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{error}: {line}"));
        let mut code = Vec::new();
        while at < block.len() && block[at].starts_with("  ") {
            code.push(&block[at][2..]);
            at += 1;
        }
        if !code.is_empty() {
            arguments["code"] = code.join("\n").into();
        }
        let from = at;
        while at < block.len() && !is_step(block[at]) {
            at += 1;
        }
        let answer = answer(block, from..at, begin, indentation);
        steps.push(Step::Call { tool: tool.to_owned(), arguments, answer });
    }
    steps
}

/// Returns true for a line that describes an event between two calls.
fn is_meanwhile(line: &str) -> bool {
    // An answer may have Lisp in parentheses, but no sentence in them.
    line.starts_with("(line ") || line.starts_with("(the ") || line.starts_with("(somebody ")
}

/// Returns the commands of a block that begins in line `begin` of the page.
fn commands(block: &[&str], begin: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut at = 0;
    while at < block.len() {
        let command = block[at].strip_prefix("$ ").unwrap_or_else(|| panic!("no command: {}", block[at]));
        let mut command = command.to_owned();
        at += 1;
        while let Some(more) = block.get(at).and_then(|line| line.strip_prefix("> ")) {
            command = format!("{command}\n{more}");
            at += 1;
        }
        let from = at;
        while at < block.len() && !block[at].starts_with("$ ") {
            at += 1;
        }
        steps.push(Step::Shell(command, answer(block, from..at, begin, "")));
    }
    steps
}

/// Returns the lines that a block, which begins in line `begin` of the page, types into a REPL.
fn typed(block: &[&str], begin: usize) -> Vec<Step> {
    static PROMPT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^((?:\[[0-9]+\] )?[A-Z-]+>) ").unwrap());
    let prompts: Vec<_> = (0..block.len()).filter(|&at| PROMPT.is_match(block[at])).collect();
    let prompt = |at: usize| PROMPT.captures(block[at]).unwrap()[1].to_owned();
    let step = |(number, &at): (usize, &usize)| {
        let next = prompts.get(number + 1).copied();
        let line = block[at][prompt(at).len() + 1..].to_owned();
        let answer = answer(block, at + 1..next.unwrap_or(block.len()), begin, "");
        Step::Type { line, prompt: next.map_or_else(|| "CL-USER>".to_owned(), prompt), answer }
    };
    [Step::Terminal].into_iter().chain(prompts.iter().enumerate().map(step)).collect()
}

/// Returns the answer in these lines of a block, without blank lines around it.
fn answer(block: &[&str], lines: Range<usize>, begin: usize, indentation: &'static str) -> Answer {
    let (mut from, mut to) = (lines.start, lines.end);
    while from < to && block[to - 1].is_empty() {
        to -= 1;
    }
    while from < to && block[from].is_empty() {
        from += 1;
    }
    let text = block[from..to].iter().map(|&line| line.to_owned()).collect();
    Answer { lines: begin + from..begin + to, text, indentation }
}

/// Returns the change that a diff of one hunk describes.
fn change(file: &str, lines: &[&str]) -> Step {
    let side = |other: char| {
        let lines = lines.iter().filter(|line| !line.starts_with(other));
        lines.map(|line| format!("{}\n", line.get(1..).unwrap_or_default())).collect::<String>()
    };
    Step::Change { file: file.to_owned(), old: side('+'), new: side('-') }
}

/// The state of a page that runs: its directory, its server and its terminal.
pub(crate) struct Run {
    directory: Scratch,
    home: Scratch,
    options: Vec<String>,
    server: Option<Server>,
    terminal: Option<Terminal>,
}

impl Run {
    pub(crate) fn new() -> Self {
        let (directory, home) = (Scratch::new(), Scratch::new());
        home.directory("XDG_RUNTIME_DIR");
        std::fs::set_permissions(home.join("XDG_RUNTIME_DIR"), PermissionsExt::from_mode(0o700)).unwrap();
        Self { directory, home, options: Vec::new(), server: None, terminal: None }
    }

    /// Performs a step. Returns its answer if it has one.
    pub(crate) fn perform(&mut self, step: &Step) -> Option<String> {
        match step {
            Step::Server(options) => {
                self.end();
                self.options.clone_from(options);
            }
            Step::File(name, text) => _ = self.directory.write(name, text),
            Step::Change { file, old, new } => {
                let text = std::fs::read_to_string(self.directory.join(file)).unwrap();
                assert_eq!(text.matches(old.as_str()).count(), 1, "{file} has this once:\n{old}\n\n{text}");
                self.directory.write(file, &text.replace(old, new));
            }
            Step::Meanwhile(line) => self.meanwhile(line),
            Step::Terminal => self.terminal = Some(Terminal::start("", &[])),
            Step::Type { line, prompt, .. } => {
                return self.terminal.as_ref().map(|terminal| terminal.evaluate(line, prompt));
            }
            Step::Call { tool, arguments, .. } => {
                let (text, _) = self.server().call_tool(tool, arguments.clone());
                return Some(self.portable(&text));
            }
            Step::Shell(command, _) => return Some(self.portable(&self.shell(command))),
        }
        None
    }

    /// Replaces the test's directories in an answer by those of a reader.
    fn portable(&self, text: &str) -> String {
        let home = self.home.join("HOME").display().to_string();
        text.replace(&home, "/home/me").replace(&self.directory.display().to_string(), "/home/me/project")
    }

    /// Performs the event that a line in parentheses describes.
    fn meanwhile(&mut self, line: &str) {
        match line {
            "(somebody kills the Lisp process)" => kill_worker(self.server()),
            "(the client ends, and comes back)" => self.end(),
            other => panic!("unknown event: {other}"),
        }
    }

    /// Ends the server, as a client does.
    fn end(&mut self) {
        if let Some(server) = self.server.take() {
            server.finish();
        }
    }

    fn server(&mut self) -> &mut Server {
        if self.server.is_none() {
            let mut command = self.command(Path::new(binary()));
            let mut server = Server::start_command(command.args(&self.options));
            server.initialize("2025-06-18");
            self.server = Some(server);
        }
        self.server.as_mut().unwrap()
    }

    /// Returns the output of a command on both streams, as a terminal would show it.
    fn shell(&self, command: &str) -> String {
        let output = self.command(Path::new("sh")).args(["-c", &format!("exec 2>&1\n{command}")]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        for name in ["HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"] {
            command.env(name, self.home.directory(name));
        }
        let binary = Path::new(binary()).parent().unwrap().display();
        command.env("PATH", format!("{binary}:{}", std::env::var("PATH").unwrap_or_default()));
        command.current_dir(&*self.directory).stdin(Stdio::null());
        command
    }
}

/// Replaces the parts of a line that differ from run to run.
pub(crate) fn settled(line: &str) -> String {
    static VOLATILE: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
        // Without Unicode's tables, as in the program.
        let patterns = [
            (r"\{[0-9A-F]{6,}\}", "{address}"),
            (r"#[xX][0-9A-Fa-f]{6,}", "address"),
            (r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.]+Z?", "date"),
            (r"(?-u:\b)[0-9]{2}:[0-9]{2}:[0-9]{2}(?-u:\b)", "time"),
            (r"(?-u:\b)[0-9][0-9,.]* ?(ns|µs|us|ms|s|seconds?|minutes?)(?-u:\b)", "duration"),
            (r"(?-u:\b)[0-9][0-9,.]* ?([KMG]i?B|kB|bytes|B)(?-u:\b)", "size"),
            (r"(?-u:\b)[0-9]+ of size(?-u:\b)", "size"),
            // A profile.
            (r"^Samples [0-9]+", "Samples"),
            (r"^ *[0-9]+\.[0-9](?-u:\b)", "number"),
            (r"^\.\.\. [0-9]+ more functions?(; pass limit [0-9]+ to see (it|them all))?", "more functions"),
            (r"(?-u:\b)[0-9]+\.[0-9](?-u:\b)", "number"),
            (r"  +", "  "),
            (r"(?-u:\b)(process|pid) [0-9]+", "process"),
        ];
        patterns.into_iter().map(|(pattern, name)| (Regex::new(pattern).unwrap(), name)).collect()
    });
    let settle = |line: String, (pattern, name): &(Regex, &str)| pattern.replace_all(&line, *name).into_owned();
    VOLATILE.iter().fold(line.trim_end().to_owned(), settle)
}

/// Returns true if the lines match the answer, where `...` stands for any lines.
fn is_answer(expected: &[String], actual: &[&str]) -> bool {
    match expected.split_first() {
        None => actual.is_empty(),
        Some((line, rest)) if line.trim() == "..." => (0..=actual.len()).any(|from| is_answer(rest, &actual[from..])),
        Some((line, rest)) => actual
            .split_first()
            .is_some_and(|(found, actual)| settled(line) == settled(found) && is_answer(rest, actual)),
    }
}

/// Runs a page. `before` prepares each step, and returns true if it has performed the step. `is_right` compares answers.
/// Returns the page with wrong answers replaced, and a report of them.
pub(crate) fn run(
    name: &str,
    page: &str,
    before: impl FnMut(&mut Run, &str, &Step) -> bool,
    is_right: impl Fn(&[String], &[&str]) -> bool,
) -> (String, Vec<String>) {
    run_with(&mut Run::new(), name, page, before, is_right)
}

/// Runs a page in the state of an earlier run; see [`run`].
pub(crate) fn run_with(
    run: &mut Run,
    name: &str,
    page: &str,
    mut before: impl FnMut(&mut Run, &str, &Step) -> bool,
    is_right: impl Fn(&[String], &[&str]) -> bool,
) -> (String, Vec<String>) {
    let mut replaced: Vec<(&Answer, Vec<String>)> = Vec::new();
    let mut wrong = Vec::new();
    let steps = steps(page);
    for (heading, step) in &steps {
        if before(run, heading, step) {
            continue;
        }
        let actual = run.perform(step);
        let (Some(actual), Step::Call { answer, .. } | Step::Type { answer, .. } | Step::Shell(_, answer)) =
            (actual, step)
        else {
            continue;
        };
        let lines: Vec<_> = actual.trim_end().lines().collect();
        if !is_right(&answer.text, &lines) {
            let line = answer.lines.start + 1;
            wrong.push(format!("{name}:{line}: expected\n{}\n\nfound\n{actual}\n", answer.text.join("\n")));
            replaced.push((answer, lines.iter().map(|&line| line.to_owned()).collect()));
        }
    }
    let mut lines: Vec<String> = page.lines().map(str::to_owned).collect();
    for (answer, text) in replaced.into_iter().rev() {
        let line = |line: &String| format!("{}{line}", answer.indentation).trim_end().to_owned();
        let mut text: Vec<_> = text.iter().map(line).collect();
        if answer.lines.is_empty() {
            // A new example: the answer stands between blank lines.
            let is_call = lines[..answer.lines.start].last().is_some_and(|line| !line.starts_with("$ "));
            let ends = lines.get(answer.lines.start).is_none_or(|line| line.is_empty() || line.starts_with("```"));
            if is_call && !lines[answer.lines.start - 1].is_empty() {
                text.insert(0, String::new());
            }
            if is_call && !ends {
                text.push(String::new());
            }
        }
        lines.splice(answer.lines.clone(), text);
    }
    (format!("{}\n", lines.join("\n")), wrong)
}

/// Returns the Markdown pages below docs/ except generated ones.
fn pages() -> Vec<PathBuf> {
    let mut directories = vec![Path::new(ROOT).join("docs")];
    let mut pages = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("docs/reference") {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    pages
}

#[test]
fn examples_of_the_book_run_as_they_stand() {
    let mut wrong = Vec::new();
    let mut examples = 0;
    for path in pages() {
        let page = std::fs::read_to_string(&path).unwrap();
        let name = path.strip_prefix(ROOT).unwrap().display().to_string();
        let steps = steps(&page);
        if steps.is_empty() {
            continue;
        }
        examples += steps.len();
        let (updated, found) = run(&name, &page, |_, _, _| false, is_answer);
        if is_updating() {
            std::fs::write(&path, updated).unwrap();
        } else {
            wrong.extend(found);
        }
    }
    assert!(
        wrong.is_empty(),
        "{} answers differ; `make reference` regenerates them:\n\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(examples > 30, "{examples} examples are few");
}

/// The project of README.md, "A failing test".
const DEMO: [(&str, &str); 3] = [
    (
        "demo.asd",
        "(defsystem \"demo\" :pathname \"src\" :components ((:file \"demo\"))\n  \
         :in-order-to ((test-op (test-op \"demo/tests\"))))\n\
         (defsystem \"demo/tests\" :depends-on (\"demo\" \"sb-rt\") :pathname \"tests\" :components ((:file \"tests\"))\n  \
         :perform (test-op (o c) (uiop:symbol-call :sb-rt :do-tests)))\n",
    ),
    (
        "src/demo.lisp",
        "(defpackage :demo (:use :cl) (:export :classify))\n(in-package :demo)\n\n(defun small-name (n)\n  \
         (list :small n))\n\n\n(defun large-name (n)\n  (if (plusp n)\n      (list :larg n)\n      (list :negative n)))\n\n\
         (defun classify (n)\n  (if (< -1 n 10) (small-name n) (large-name n)))\n",
    ),
    (
        "tests/tests.lisp",
        "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
         (deftest small (classify 1) (:small 1))\n(deftest negative (classify -5) (:negative -5))\n\
         (deftest large (classify 100) (:large 100))\n",
    ),
];

/// Prepares what README.md leaves out. Returns true if that replaces the step.
fn prepare_readme(run: &mut Run, last: &mut String, heading: &str, step: &Step) -> bool {
    if heading != last {
        heading.clone_into(last);
        *run = Run::new();
        match heading {
            "A failing test" => {
                for (name, text) in DEMO {
                    run.directory.write(name, text);
                }
            }
            "Before a risky step" => {
                let code = "(defvar *stock* (make-hash-table)) (setf (gethash :apples *stock*) 40)";
                run.server().call_tool("evaluate-lisp", json!({"code": code}));
            }
            _ => {}
        }
    }
    match step {
        Step::Meanwhile(line) if line == "(line 10 is repaired in the file)" => {
            let (name, text) = DEMO[1];
            run.directory.write(name, &text.replace(":larg ", ":large "));
            true
        }
        _ => false,
    }
}

/// Returns true if the answer contains these lines in this order, whatever is between them.
fn is_excerpt(expected: &[String], actual: &[&str]) -> bool {
    let mut actual = actual.iter();
    let lines = expected.iter().filter(|line| !matches!(line.trim(), "" | "..."));
    lines.into_iter().all(|line| actual.any(|found| settled(line.trim()) == settled(found.trim())))
}

#[test]
fn examples_of_the_readme_run_as_they_stand() {
    let page = std::fs::read_to_string(Path::new(ROOT).join("README.md")).unwrap();
    let mut last = String::new();
    let prepare = |run: &mut Run, heading: &str, step: &Step| prepare_readme(run, &mut last, heading, step);
    let (_, wrong) = run("README.md", &page, prepare, is_excerpt);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let calls = steps(&page).iter().filter(|(_, step)| matches!(step, Step::Call { .. })).count();
    assert!(calls >= 9, "{calls} calls");
    let answer = Run::new().shell("sbcl-mcp eval '(lisp-implementation-type)'");
    assert!(page.contains(&format!("the answer is `{}`", answer.trim_end())), "{answer}");
}

#[test]
fn commands_within_sentences_print_what_the_sentences_say() {
    static SENTENCE: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"`(sbcl-mcp [^`]+)`[ \n]+prints[ \n]+`([^`]+)`").unwrap());
    let mut found = 0;
    for path in pages().into_iter().chain([Path::new(ROOT).join("README.md")]) {
        let page = std::fs::read_to_string(&path).unwrap();
        for sentence in SENTENCE.captures_iter(&page) {
            assert_eq!(Run::new().shell(&sentence[1]).trim_end(), &sentence[2], "{}: {}", path.display(), &sentence[1]);
            found += 1;
        }
    }
    assert!(found > 0);
}
