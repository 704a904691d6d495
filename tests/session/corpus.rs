//! Programs that fail, each with the facts that its error report must contain.
//!
//! Each file in `tests/corpus/` covers one theme. In it, a line `== name` begins a program. The lines after it are Lisp,
//! up to the first line that begins with one of these keys:
//!
//! - `type:` the exact type of the condition (required)
//! - `message:` a part of the message, on one line (required, may be repeated; ` || ` between alternatives)
//! - `restarts:` all restart names in order, without the final RETRY and ABORT (required, may be empty)
//! - `frames:` functions that must be in the backtrace, innermost first, separated by ` < `
//! - `top:` the function of frame 0
//! - `bottom:` the function of the outermost frame (default: EVAL)
//! - `foreign:` the reason why the backtrace has frames of C functions; without this key there must be none
//! - `stdout:` the output before the error, on one line
//! - `warnings:` the types of the warnings before the error, in order
//!
//! A line that begins with `#;` is a comment.

use std::fmt::Write as _;
use std::path::Path;

use crate::support::{TestSession, calls, check_error_response, missing_frame, restarts};
use sbcl::{Evaluation, report};

#[derive(Debug, Default)]
struct Program {
    name: String,
    code: String,
    kind: String,
    messages: Vec<String>,
    restarts: Vec<String>,
    frames: Vec<String>,
    top: Option<String>,
    bottom: Option<String>,
    foreign: bool,
    stdout: Option<String>,
    warnings: Option<Vec<String>>,
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn parse(theme: &str, text: &str) -> Vec<Program> {
    let mut programs: Vec<Program> = Vec::new();
    let mut in_code = false;
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("#;") {
            continue;
        }
        if let Some(name) = line.strip_prefix("== ") {
            programs.push(Program { name: name.trim().to_owned(), ..Program::default() });
            in_code = true;
            continue;
        }
        let Some(program) = programs.last_mut() else {
            assert!(line.trim().is_empty(), "{theme}: line {} stands before the first program", number + 1);
            continue;
        };
        let (key, value) = line.split_once(':').map_or(("", line), |(key, value)| (key, value.trim()));
        match key {
            "type" => program.kind = value.to_owned(),
            "message" => program.messages.push(value.to_owned()),
            "restarts" => {
                program.restarts = words(value);
                program.restarts.extend(["RETRY".to_owned(), "ABORT".to_owned()]);
            }
            "frames" => program.frames = value.split(" < ").map(|name| name.trim().to_owned()).collect(),
            "top" => program.top = Some(value.to_owned()),
            "bottom" => program.bottom = Some(value.to_owned()),
            "foreign" => program.foreign = true,
            "stdout" => program.stdout = Some(value.to_owned()),
            "warnings" => program.warnings = Some(words(value)),
            _ if in_code => {
                program.code.push_str(line);
                program.code.push('\n');
                continue;
            }
            _ => assert!(line.trim().is_empty(), "{theme}: line {} is neither code nor a known word", number + 1),
        }
        in_code = false;
    }
    for program in &programs {
        let complete = !program.kind.is_empty() && !program.messages.is_empty() && !program.restarts.is_empty();
        assert!(complete, "{theme}: {} lacks a type, a message or its restarts", program.name);
    }
    programs
}

fn load(theme: &str) -> Vec<Program> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(theme).with_extension("txt");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    parse(theme, &text)
}

/// Runs one program and returns the list of errors in its report.
fn check(lisp: &TestSession, program: &Program) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut claim = |holds: bool, what: String| {
        if !holds {
            wrong.push(what);
        }
    };
    let outcome = lisp.run(Evaluation::new(program.code.trim_end()));
    let text = report::evaluation(&outcome);
    let Err(error) = &outcome.result else {
        return vec![format!("it succeeds:\n{text}")];
    };
    claim(error.kind == program.kind, format!("type {}, expected {}", error.kind, program.kind));
    for part in &program.messages {
        claim(
            part.split(" || ").any(|part| error.message.text.contains(part)),
            format!("message {:?} lacks {part:?}", error.message.text),
        );
    }
    claim(
        restarts(error) == program.restarts,
        format!("restarts {:?}, expected {:?}", restarts(error), program.restarts),
    );
    let functions: Vec<&str> = program.frames.iter().map(String::as_str).collect();
    if let Some(missing) = missing_frame(error, &functions) {
        claim(false, format!("no frame of {missing} where {functions:?} should be"));
    }
    if let Some(top) = &program.top {
        let frame = error.frames.first().map_or("", |frame| frame.call.as_str());
        claim(calls(frame, top), format!("frame 0 is {frame}, expected a call of {top}"));
    }
    let bottom = program.bottom.as_deref().unwrap_or("EVAL");
    let frame = error.frames.last().map_or("", |frame| frame.call.as_str());
    claim(calls(frame, bottom), format!("the outermost frame is {frame}, expected a call of {bottom}"));
    for (index, frame) in error.frames.iter().enumerate().take(500) {
        claim(frame.number == index as u64, format!("frame {index} has the number {}", frame.number));
        claim(!frame.call.contains('\n'), format!("frame {index} has several lines: {:?}", frame.call));
        claim(
            program.foreign || !frame.call.contains("foreign function: "),
            format!("frame {index} is machinery: {}", frame.call),
        );
    }
    if error.total_frames <= 1000 {
        let kept = error.frames.len() as u64;
        claim(error.total_frames == kept, format!("{kept} of {} frames were kept", error.total_frames));
    }
    if let Some(stdout) = &program.stdout {
        let found = outcome.stdout.text.trim_end();
        claim(found == stdout, format!("stdout {found:?}, expected {stdout:?}"));
    } else {
        claim(outcome.stdout.is_empty(), format!("stray output {:?}", outcome.stdout.text));
    }
    if let Some(kinds) = &program.warnings {
        let found: Vec<&str> = outcome.warnings.iter().map(|warning| warning.kind.as_str()).collect();
        claim(&found == kinds, format!("warnings {found:?}, expected {kinds:?}"));
    }
    match check_error_response(&text) {
        Ok(parsed) => {
            claim(parsed.kind == error.kind, format!("the report's type is {:?}", parsed.kind));
            claim(
                parsed.stdout.is_some() != outcome.stdout.is_empty(),
                "stdout's section and stdout disagree".to_owned(),
            );
        }
        Err(reason) => claim(false, format!("the report is malformed: {reason}")),
    }
    let state = lisp.session().last_error();
    claim(state.as_ref() == Some(error), "the error state is not the evaluation's error".to_owned());
    let described = lisp.last_error_text();
    claim(described.starts_with(&format!("Error: {}\n", program.kind)), format!("described as:\n{described}"));
    for _ in 0..10 {
        claim(lisp.last_error_text() == described, "describing the error again gives another text".to_owned());
        claim(lisp.session().last_error() == state, "asking for the error again gives another error".to_owned());
    }
    if !wrong.is_empty() {
        wrong.push(format!("the report:\n{text}"));
    }
    let after = lisp.eval("(+ 1 2)");
    let text = report::evaluation(&after);
    if text != "=> 3" {
        wrong.push(format!("afterwards (+ 1 2) gives:\n{text}"));
    }
    if lisp.session().last_error().is_some() {
        wrong.push("a success does not clear the error".to_owned());
    }
    wrong
}

fn run(theme: &str) {
    let programs = load(theme);
    assert!(!programs.is_empty(), "{theme} holds no program");
    let lisp = crate::support::fresh();
    let mut complaints = String::new();
    let mut failed = 0;
    for program in &programs {
        let wrong = check(&lisp, program);
        if !wrong.is_empty() {
            failed += 1;
            _ = write!(complaints, "\n== {}\n{}", program.name, program.code);
            for what in wrong {
                _ = writeln!(complaints, "-- {what}");
            }
        }
    }
    assert!(failed == 0, "{failed} of {} programs of {theme}:\n{complaints}", programs.len());
}

macro_rules! themes {
    ($($theme:ident)*) => {
        $(#[test] fn $theme() { run(stringify!($theme)); })*

        #[test]
        fn corpus_has_at_least_200_programs() {
            let count: usize = [$(stringify!($theme)),*].iter().map(|theme| load(theme).len()).sum();
            assert!(count >= 200, "{count} programs");
        }

        #[test]
        fn every_corpus_file_is_run_by_a_test() {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
            for entry in std::fs::read_dir(directory).expect("the corpus is there") {
                let name = entry.expect("its entries can be read").file_name();
                let name = name.to_string_lossy();
                let known = [$(concat!(stringify!($theme), ".txt")),*].contains(&&*name);
                assert!(known, "no test runs {name}");
            }
        }
    };
}

themes! {
    arithmetic types control packages reader files streams parsing sequences storage compiling macros clos printing
    threads foreign nested user_defined
}
