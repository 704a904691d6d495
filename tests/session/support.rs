//! Shared helpers of the session tests: the only session of the process, and parsers for its reports.

#![allow(dead_code, reason = "every test file uses a part of it")]

use std::fmt::Debug;
use std::sync::mpsc;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sbcl::outcome::{Definition, DefinitionFilter, DefinitionQuery, Definitions, SymbolDescription};
use sbcl::report;
use sbcl::{ErrorRecord, Evaluation, ImageConfig, InspectError, JobId, Limits, Outcome, Progress, Session, TimeLimit};

/// The time after which a test considers an operation hung.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

static SESSION: LazyLock<Session> = LazyLock::new(|| {
    Session::start(&ImageConfig::default(), Limits::default()).expect("SBCL boots once in this process")
});

static TURN: Mutex<()> = Mutex::new(());

/// Exclusive access to the session of the process, for one test at a time.
pub(crate) struct TestSession {
    session: &'static Session,
    _turn: MutexGuard<'static, ()>,
}

/// Waits until no other test uses the session, resets it and returns it. Other tests wait until the returned value is
/// dropped.
pub(crate) fn fresh() -> TestSession {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    SESSION.set_limits(Limits::default());
    let lisp = TestSession { session: &SESSION, _turn: turn };
    // The reset keeps the notices for the next answer, which may be about an earlier test. This answer takes them.
    lisp.eval("nil");
    lisp.reset();
    lisp
}

fn wait_for_reply<T: Send + 'static>(description: impl Debug, send: impl FnOnce(mpsc::Sender<T>)) -> T {
    let (sender, receiver) = mpsc::channel();
    send(sender);
    receiver.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("no answer within {DEADLINE:?} to {description:?}"))
}

impl TestSession {
    pub(crate) fn session(&self) -> &'static Session {
        self.session
    }

    pub(crate) fn run(&self, evaluation: Evaluation) -> Outcome {
        wait_for_reply(evaluation.code.clone(), |sender| {
            self.session.submit(evaluation, move |outcome| _ = sender.send(Arc::unwrap_or_clone(outcome)));
        })
    }

    /// Starts an evaluation. The receiver gets its outcome.
    pub(crate) fn start(&self, code: &str) -> (JobId, mpsc::Receiver<Outcome>) {
        let (sender, receiver) = mpsc::channel();
        (
            self.session.submit(Evaluation::new(code), move |outcome| _ = sender.send(Arc::unwrap_or_clone(outcome))),
            receiver,
        )
    }

    /// Waits until the most recently started evaluation runs.
    pub(crate) fn await_running(&self) {
        while self.session.evaluation(None).expect("it was started").progress == Progress::Queued {
            std::thread::yield_now();
        }
    }

    pub(crate) fn eval(&self, code: &str) -> Outcome {
        self.run(Evaluation::new(code))
    }

    pub(crate) fn eval_in(&self, package: &str, code: &str) -> Outcome {
        self.run(Evaluation { package: Some(package.to_owned()), ..Evaluation::new(code) })
    }

    pub(crate) fn eval_for(&self, timeout: Duration, code: &str) -> Outcome {
        self.run(Evaluation { timeout: TimeLimit::Of(timeout), ..Evaluation::new(code) })
    }

    /// Evaluates `code` and returns its report.
    pub(crate) fn text(&self, code: &str) -> String {
        report::evaluation(&self.eval(code))
    }

    /// Evaluates `code`, which must succeed, and returns its values.
    #[track_caller]
    pub(crate) fn values(&self, code: &str) -> Vec<String> {
        values(code, &self.eval(code))
    }

    /// Evaluates `code`, which must succeed, and returns its only value.
    #[track_caller]
    pub(crate) fn value(&self, code: &str) -> String {
        let mut values = self.values(code);
        assert_eq!(values.len(), 1, "one value of {code}: {values:?}");
        values.remove(0)
    }

    /// Evaluates `code`, which must fail, and returns its error.
    #[track_caller]
    pub(crate) fn error(&self, code: &str) -> Arc<ErrorRecord> {
        error(code, &self.eval(code))
    }

    pub(crate) fn last_error_text(&self) -> String {
        report::last_error(self.session.last_error().as_deref())
    }

    pub(crate) fn backtrace_text(&self, frames: u64) -> String {
        report::backtrace(self.session.last_error().as_deref(), frames)
    }

    pub(crate) fn definitions(&self) -> Result<Vec<Definition>, InspectError> {
        Ok(self.definitions_of(&DefinitionQuery { limit: 10_000, ..DefinitionQuery::default() })?.shown)
    }

    pub(crate) fn definitions_of(&self, query: &DefinitionQuery) -> Result<Definitions, InspectError> {
        wait_for_reply("definitions", |sender| _ = self.session.definitions(query, move |reply| _ = sender.send(reply)))
    }

    #[track_caller]
    pub(crate) fn definitions_text(&self, filter: DefinitionFilter) -> String {
        let query = DefinitionQuery { filter, ..DefinitionQuery::default() };
        report::definitions(&self.definitions_of(&query).expect("definitions can be listed"), usize::MAX)
    }

    pub(crate) fn describe_in(&self, name: &str, package: Option<&str>) -> Result<SymbolDescription, InspectError> {
        wait_for_reply(name, |sender| {
            _ = self.session.describe_symbol(name, package, false, move |reply| _ = sender.send(reply))
        })
    }

    #[track_caller]
    pub(crate) fn source_text(&self, name: &str) -> String {
        let described: Result<_, InspectError> = wait_for_reply(name, |sender| {
            _ = self.session.describe_symbol(name, None, true, move |reply| _ = sender.send(reply))
        });
        report::symbol(&described.expect("a symbol can be described"))
    }

    #[track_caller]
    pub(crate) fn describe_text(&self, name: &str) -> String {
        report::symbol(&self.describe_in(name, None).expect("a symbol can be described"))
    }

    pub(crate) fn reset(&self) {
        wait_for_reply("reset", |sender| self.session.reset(move |reply| _ = sender.send(reply)))
            .expect("a session can be reset");
    }
}

#[track_caller]
pub(crate) fn values(code: &str, outcome: &Outcome) -> Vec<String> {
    match &outcome.result {
        Ok(values) => values.iter().map(|value| value.text.clone()).collect(),
        Err(_) => panic!("{code} failed:\n{}", report::evaluation(outcome)),
    }
}

#[track_caller]
pub(crate) fn error(code: &str, outcome: &Outcome) -> Arc<ErrorRecord> {
    match &outcome.result {
        Ok(_) => panic!("{code} succeeded:\n{}", report::evaluation(outcome)),
        Err(error) => Arc::clone(error),
    }
}

/// Returns the warnings of an outcome as `TYPE: message`.
pub(crate) fn warnings(outcome: &Outcome) -> Vec<String> {
    outcome.warnings.iter().map(|warning| format!("{}: {}", warning.kind, warning.message.text)).collect()
}

pub(crate) fn restarts(error: &ErrorRecord) -> Vec<&str> {
    error.restarts.iter().map(|restart| restart.name.as_str()).collect()
}

/// Returns true when the frame is a call of `function`, named as in reports.
pub(crate) fn calls(frame: &str, function: &str) -> bool {
    frame
        .strip_prefix('(')
        .and_then(|call| call.strip_prefix(function))
        .is_some_and(|rest| rest.starts_with([' ', ')']))
}

/// Returns the first of `functions` that has no frame in the given order, innermost first.
pub(crate) fn missing_frame<'a>(error: &ErrorRecord, functions: &[&'a str]) -> Option<&'a str> {
    let mut frames = error.frames.iter();
    functions.iter().copied().find(|function| !frames.any(|frame| calls(&frame.call, function)))
}

/// The parts of an error report, as the parser of the specification finds them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sections {
    pub(crate) stdout: Option<String>,
    pub(crate) kind: String,
    pub(crate) message: String,
    pub(crate) backtrace: String,
}

/// Parses an error report as the specification does, by searching for the markers. Returns `None` for a malformed report.
pub(crate) fn parse_error_response(text: &str) -> Option<Sections> {
    let error = text.find("[ERROR]")?;
    let stdout = text.find("[stdout]").map(|start| {
        let start = start + "[stdout]".len();
        text.get(start..error).unwrap_or_default().trim_matches('\n').to_owned()
    });
    let line_end = error + text[error..].find('\n')?;
    let kind = text.get(error + 8..line_end)?.trim_matches(' ');
    if kind.is_empty() {
        return None;
    }
    let backtrace = text.find("[Backtrace]")?;
    let message = text.get(line_end..backtrace)?.trim_matches(['\n', ' ']);
    Some(Sections {
        stdout,
        kind: kind.to_owned(),
        message: message.to_owned(),
        backtrace: text[backtrace + "[Backtrace]".len()..].to_owned(),
    })
}

/// Parses an error report, and checks the invariants that the specification states for its format.
///
/// # Errors
/// A description of the first violation.
pub(crate) fn check_error_response(text: &str) -> Result<Sections, String> {
    let parsed = parse_error_response(text).ok_or("not parseable")?;
    if parsed.message.is_empty() {
        return Err("an empty message".to_owned());
    }
    for marker in ["[ERROR]", "[Backtrace]"] {
        let count = text.matches(marker).count();
        if count != 1 {
            return Err(format!("{count} times {marker}"));
        }
    }
    let order = ["[notice]", "[background]", "[stdout]", "[stderr]", "[warnings]", "[ERROR]", "[Backtrace]"];
    let mut last = 0;
    for marker in order {
        let Some(at) = text.find(marker) else { continue };
        if text.matches(marker).count() != 1 {
            return Err(format!("{marker} more than once"));
        }
        if at < last {
            return Err(format!("{marker} is out of order"));
        }
        last = at;
        if at > 0 && !text[..at].ends_with("\n\n") {
            return Err(format!("{marker} is not preceded by one blank line"));
        }
        if text[..at].ends_with("\n\n\n") && marker == "[ERROR]" {
            return Err(format!("{marker} is preceded by more than one blank line"));
        }
    }
    let lines: Vec<&str> = parsed.backtrace.trim_start_matches('\n').lines().collect();
    if lines.is_empty() || !lines[0].starts_with("0: (") {
        return Err("no frame 0".to_owned());
    }
    let mut number = 0;
    for (index, line) in lines.iter().enumerate() {
        // Runs of internal frames are folded: `... 31 frames of ASDF`.
        let folded = line.strip_prefix("... ").and_then(|rest| rest.split_once(" frames of "));
        if let Some((count, _)) = folded {
            number += count.parse::<usize>().map_err(|_| format!("no number in {line:?}"))?;
            continue;
        }
        let frame = line.strip_prefix(&format!("{number}: ")).is_some_and(|call| call.starts_with('('));
        number += 1;
        let more = index >= 20
            && index + 1 == lines.len()
            && line
                .strip_prefix("... ")
                .and_then(|rest| rest.split_once(" more frames (get-backtrace shows "))
                .filter(|(_, shown)| ["them)", "the innermost 500 and the outermost 500 frames)"].contains(shown))
                .map(|(count, _)| count)
                .is_some_and(|count| count.parse::<u64>().is_ok_and(|count| count > 0));
        if !frame && !more {
            return Err(format!("line {index} of the backtrace is not a frame: {line:?}"));
        }
    }
    Ok(parsed)
}

/// The section markers of a report, which text inside a section could forge.
pub(crate) const MARKERS: [&str; 8] =
    ["[stdout]", "[stderr]", "[warnings]", "[background]", "[notice]", "[ERROR]", "[Backtrace]", "[Debugger]"];
