//! `load`, `test` and `eval --attach`: a tool called from a shell, its answer as text, and an exit status.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use regex::Regex;
use serde_json::{Value, json};

use super::arguments::Tests;
use super::client::{Answer, Client, Event, Failure, START, answered, client_of};
use super::exit_status::{FAILED, FINE, UNTRIED};
use crate::attach;
use crate::mcp::stdio::Stdio;

/// Options by which a server's image has more than SBCL from the beginning.
const BRING_CODE: [&str; 3] = ["--user-init", "--core", "--image"];

/// What answers advise, in the terms of the tools, and what of that a shell's user can follow.
const ADVICE: [(&str, &str); 6] = [
    (r" \(E[0-9]+: get-backtrace has all\)", ""),
    (r"\(E[0-9]+, in the frames of ([0-9]+)\)", "(in the frames of $1)"),
    (r" \(get-backtrace shows them\)", ""),
    (r" \(run-tests with `name` shows one\)", ""),
    ("run-tests with `suspects`: 3 also says", "--suspects 3 also says"),
    ("pass a larger `timeout`, or raise the default with configure-limits\\.", "pass a larger --timeout."),
];
/// The same of what is gone with the image.
const ADVICE_ON_WHAT_LASTS: [(&str, &str); 2] = [
    (r"(\nThe tests printed [^\n:]+): check-evaluation \{[^\n}]+\} shows [a-z]+\.", "$1."),
    (r"; check-evaluation \{[^\n}]+\} shows them\]", "]"),
];

/// What is asked of a server, with a time limit in seconds if one was given.
pub(super) enum Request {
    Evaluate { code: String, timeout: Option<f64> },
    Load { what: String, timeout: Option<f64> },
    Test(Tests),
}

impl Request {
    /// The command that asks it.
    fn command(&self) -> &'static str {
        match self {
            Self::Evaluate { .. } => "eval",
            Self::Load { .. } => "load",
            Self::Test(_) => "test",
        }
    }

    /// Refuses what an image that has just begun, with these options of its server's, cannot know.
    fn check_alone(&self, options: &[OsString]) -> Result<(), String> {
        let brings = |option: &OsString| {
            BRING_CODE.iter().any(|known| option == known || option.to_string_lossy().starts_with(&format!("{known}=")))
        };
        let Self::Test(tests) = self else { return Ok(()) };
        let package = tests.what.first().and_then(|name| Some(name.split_once(':')?.0));
        match package {
            Some(package) if !options.iter().any(brings) => Err(format!(
                "an image of its own has loaded nothing, and knows no package {package}: name the system that has its \
                 tests, or --attach to a server that has loaded it"
            )),
            _ => Ok(()),
        }
    }

    /// The names that it is given, or the first line of its code.
    fn names(&self) -> Vec<&str> {
        match self {
            Self::Evaluate { code, .. } => code.lines().take(1).collect(),
            Self::Load { what, .. } => vec![what],
            Self::Test(tests) => tests.what.iter().map(String::as_str).collect(),
        }
    }

    /// What is said where the name of a server that runs was taken for something else, which is not there.
    fn advice(&self, answer: &Answer) -> Option<String> {
        let is_missing = |name: &&str| match self {
            Self::Evaluate { .. } => answer.is_error,
            _ => answer.text.contains(&format!("Component {name:?} not found")),
        };
        let missing: Vec<_> = self.names().into_iter().filter(is_missing).collect();
        let running = if missing.is_empty() { Vec::new() } else { attach::running() };
        let name = missing.into_iter().find(|name| running.iter().any(|server| server.name == **name))?;
        Some(format!("sbcl-mcp {}: {name} is a server that runs: --attach={name} joins it.", self.command()))
    }

    /// The tool and its arguments, or a sentence that says why there is none.
    fn tool(&self) -> Result<(&'static str, Value), String> {
        match self {
            Self::Evaluate { code, timeout } => {
                Ok(("evaluate-lisp", with_timeout(json!({"code": code, "on-error": "abort"}), *timeout)))
            }
            Self::Load { what, timeout } => {
                let mut arguments = with_timeout(load_arguments(what), *timeout);
                arguments["on-error"] = "abort".into();
                Ok(("load-system", arguments))
            }
            Self::Test(tests) => {
                let names: Vec<_> = tests.what.iter().map(String::as_str).collect();
                let mut arguments = test_arguments(&names)?;
                arguments["reload"] = tests.reload.into();
                arguments["fresh"] = tests.fresh.into();
                arguments["suspects"] = tests.suspects.into();
                arguments["timeout"] = tests.test_timeout.into();
                Ok(("run-tests", arguments))
            }
        }
    }
}

/// Calls a tool of a server that runs, or of one for this alone, which has these options.
pub(super) fn call(attach: Option<Option<String>>, options: Vec<OsString>, request: &Request, stdio: Stdio) -> i32 {
    let called = || {
        // Asked before there is a server, which what cannot be asked is not worth.
        request.tool()?;
        if attach.is_none() {
            request.check_alone(&options)?;
        }
        run(client_of(attach, options)?, request, stdio.output)
    };
    called().unwrap_or_else(|reason| {
        super::say(&format!("sbcl-mcp {}: {reason}", request.command()));
        UNTRIED
    })
}

/// Asks, and prints what is answered. Returns the exit status, or a sentence that says why there is no answer.
pub(super) fn run(mut client: Client, request: &Request, output: OwnedFd) -> Result<i32, String> {
    let reason = |failure: Failure| failure.to_string();
    let (tool, arguments) = request.tool()?;
    client.initialize(START).map_err(reason)?;
    let answer = ask(&mut client, tool, &arguments).map_err(reason)?;
    let text = for_shell(answer.text.trim_end_matches('\n'), client.server().is_none());
    let written = File::from(output).write_all(format!("{text}\n").as_bytes());
    written.map_err(|error| format!("the answer cannot be written: {error}"))?;
    if let Some(advice) = request.advice(&answer) {
        super::say(&advice);
    }
    Ok(status(request, &answer))
}

/// An answer in a shell's terms; `lasts`: there will be an image that can be asked for more.
pub(super) fn for_shell(text: &str, lasts: bool) -> String {
    let gone = if lasts { &[][..] } else { &ADVICE_ON_WHAT_LASTS };
    ADVICE.iter().chain(gone).fold(text.to_owned(), |text, (advice, instead)| match Regex::new(advice) {
        Ok(advice) => advice.replace_all(&text, *instead).into_owned(),
        Err(_) => text,
    })
}

/// Calls a tool and waits; what it reports meanwhile goes to stderr, if somebody looks at that.
fn ask(client: &mut Client, tool: &str, arguments: &Value) -> Result<Answer, Failure> {
    let is_seen = io::stderr().is_terminal() && tool == "load-system";
    let id = client.begin_call(tool, arguments)?;
    loop {
        match client.next(None) {
            Some(Event::Message(message)) => {
                if let Some(result) = answered(message.clone(), id) {
                    return result.map(|result| Answer::of(&result));
                }
                if let Some(report) = message["params"]["message"].as_str().filter(|_| is_seen) {
                    super::say(report.trim_end());
                }
            }
            Some(Event::Interrupted(_)) | None => {}
            Some(Event::Closed) => return Err(Failure::Closed),
        }
    }
}

fn status(request: &Request, answer: &Answer) -> i32 {
    match request {
        _ if answer.content.get("refused").is_some() => UNTRIED,
        Request::Test(_) if answer.is_error || is_left_out(&answer.content) => UNTRIED,
        Request::Test(_) if test_failures(&answer.content) > 0 => FAILED,
        Request::Test(_) if is_skipped(&answer.content) => UNTRIED,
        _ if answer.is_error => FAILED,
        _ => FINE,
    }
}

/// How many tests did not pass, if the content is of tests.
pub(super) fn test_failures(content: &Value) -> u64 {
    if content.get("tests").is_none() {
        return 0;
    }
    ["failed", "errors"].iter().filter_map(|count| content[count].as_u64()).sum()
}

/// The arguments of a tool that evaluates, with a time limit in seconds if one was given.
pub(super) fn with_timeout(mut arguments: Value, timeout: Option<f64>) -> Value {
    if let Some(seconds) = timeout {
        arguments["timeout"] = seconds.into();
    }
    arguments
}

/// The tests in the content, of each of several systems or of whatever it is.
fn tests_of_each(content: &Value) -> Vec<Vec<&Value>> {
    let mut systems = BTreeMap::<_, Vec<_>>::new();
    for test in content["tests"].as_array().into_iter().flatten() {
        systems.entry(test["system"].as_str()).or_default().push(test);
    }
    systems.into_values().collect()
}

/// True when one of several systems has no tests that could be run: that is told of as a test which is called as it is.
fn is_left_out(content: &Value) -> bool {
    let is_system = |test: &&Value| test["system"].is_string() && test["system"] == test["name"];
    tests_of_each(content).iter().any(|tests| tests.iter().all(is_system))
}

/// True when all tests were skipped, if only of one of several systems: nothing is known of what they are to test.
fn is_skipped(content: &Value) -> bool {
    tests_of_each(content).iter().any(|tests| tests.iter().all(|test| test["status"] == "skipped"))
}

/// What the tool load takes for a file or a system of this name.
pub(super) fn load_arguments(what: &str) -> Value {
    let path = Path::new(what);
    let is_file = path.is_file() || [".lisp", ".lsp", ".cl", ".fasl"].iter().any(|end| what.ends_with(end));
    match is_file {
        true => json!({"path": absolute(path)}),
        false => json!({"system": what, "directory": absolute(Path::new("."))}),
    }
}

/// What the tool run-tests takes for systems, or for a test or package, whose name has a colon in or behind it.
///
/// # Errors
/// A sentence about names of which it takes one at a time.
pub(super) fn test_arguments(names: &[&str]) -> Result<Value, String> {
    match names {
        [name] if name.ends_with(':') => Ok(json!({"test-package": name.trim_end_matches(':')})),
        [name] if name.contains(':') => Ok(json!({"name": name})),
        _ => match names.iter().find(|name| name.contains(':')) {
            Some(name) => {
                Err(format!("{name} is no system: several at once must be, a test or a package stands alone."))
            }
            None => Ok(json!({"system": names.join(", "), "directory": absolute(Path::new("."))})),
        },
    }
}

/// The path from the root on: a server that was joined may have another working directory.
fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string()
}
