//! The commands `load`, `test` and `eval --attach`, which call a tool, print its answer as text, and return an exit
//! status.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use serde_json::{Value, json};

use super::arguments::TestOptions;
use super::client::{CallError, Client, ClientEvent, START_TIMEOUT, ToolAnswer, connect_or_start, response_to};
use super::exit_status::{FAILED, NOT_TRIED, SUCCEEDED};
use crate::audience::Audience;
use crate::mcp::stdio::Stdio;
use crate::rpc::attach;

/// Server options that may bring further packages into the image when it boots.
const OPTIONS_THAT_LOAD_CODE: [&str; 3] = ["--user-init", "--core", "--image"];

/// A request to a server. Time limits are in seconds.
pub(super) enum ToolRequest {
    Evaluate { code: String, timeout: Option<f64> },
    Load { what: String, timeout: Option<f64> },
    Test(TestOptions),
}

impl ToolRequest {
    /// Returns the name of the command that makes this request.
    fn command(&self) -> &'static str {
        match self {
            Self::Evaluate { .. } => "eval",
            Self::Load { .. } => "load",
            Self::Test(_) => "test",
        }
    }

    /// Returns an error if the request names a test or package, and a new image, booted with these server options, cannot
    /// have these tests.
    fn check_for_new_image(&self, options: &[OsString]) -> Result<(), String> {
        let loads_code = |option: &OsString| {
            OPTIONS_THAT_LOAD_CODE
                .iter()
                .any(|known| option == known || option.to_string_lossy().starts_with(&format!("{known}=")))
        };
        let Self::Test(tests) = self else { return Ok(()) };
        match tests.what.first().filter(|name| name.contains(':')) {
            Some(name) if !options.iter().any(loads_code) => Err(format!(
                "{name} is not in a new image: name the system that contains the tests, or use --attach with a server \
                 that has loaded the tests"
            )),
            _ => Ok(()),
        }
    }

    /// Returns the names of systems, files or tests in the request, or the first line of its code. The user may have
    /// written the name of a server there.
    fn given_names(&self) -> Vec<&str> {
        match self {
            Self::Evaluate { code, .. } => code.lines().take(1).collect(),
            Self::Load { what, .. } => vec![what],
            Self::Test(tests) => tests.what.iter().map(String::as_str).collect(),
        }
    }

    /// Returns advice to write `--attach=NAME` if a name that was not found is the name of a running server.
    fn attach_advice(&self, answer: &ToolAnswer) -> Option<String> {
        let is_missing = |name: &&str| match self {
            Self::Evaluate { .. } => answer.is_error,
            _ => answer.text.contains(&format!("Component {name:?} not found")),
        };
        let missing: Vec<_> = self.given_names().into_iter().filter(is_missing).collect();
        let running = if missing.is_empty() { Vec::new() } else { attach::running_servers() };
        let name = missing.into_iter().find(|name| running.iter().any(|server| server.name == **name))?;
        Some(format!("sbcl-mcp {}: {name} is a running server: attach to it with --attach={name}.", self.command()))
    }

    /// Returns the name of the tool to call, and its arguments.
    ///
    /// # Errors
    /// Returns the reason if the request names a test or package together with other names, or if the working directory
    /// is needed and does not exist.
    fn tool_call(&self) -> Result<(&'static str, Value), String> {
        match self {
            Self::Evaluate { code, timeout } => {
                Ok(("evaluate-lisp", with_timeout(json!({"code": code, "on-error": "abort"}), *timeout)))
            }
            Self::Load { what, timeout } => {
                let mut arguments = with_timeout(load_arguments(what)?, *timeout);
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

/// Calls a tool of a running server, or of a new server with these options. Returns the exit status.
pub(super) fn connect_and_call(
    attach: Option<Option<String>>,
    options: Vec<OsString>,
    request: &ToolRequest,
    stdio: Stdio,
) -> i32 {
    let run_request = || {
        // The request is checked first, so that no server is started for a request that cannot be made.
        request.tool_call()?;
        if attach.is_none() {
            request.check_for_new_image(&options)?;
        }
        call_and_print(connect_or_start(attach, options)?, request, stdio.output)
    };
    run_request().unwrap_or_else(|reason| {
        super::print_to_stderr(&format!("sbcl-mcp {}: {reason}", request.command()));
        NOT_TRIED
    })
}

/// Sends the request and prints the answer. Returns the exit status, or a sentence that says why there is no answer or why
/// the answer cannot be printed.
pub(super) fn call_and_print(mut client: Client, request: &ToolRequest, output: OwnedFd) -> Result<i32, String> {
    let reason = |failure: CallError| failure.to_string();
    let (tool, arguments) = request.tool_call()?;
    let audience = if client.server_pid().is_some() { Audience::Shell } else { Audience::AttachedShell };
    client.initialize(audience, START_TIMEOUT).map_err(reason)?;
    let answer = call_and_show_progress(&mut client, tool, &arguments).map_err(reason)?;
    let text = answer.text.trim_end_matches('\n');
    let written = File::from(output).write_all(format!("{text}\n").as_bytes());
    written.map_err(|error| format!("cannot write the answer to stdout: {error}"))?;
    if let Some(advice) = request.attach_advice(&answer) {
        super::print_to_stderr(&advice);
    }
    Ok(exit_status_of(request, &answer))
}

/// Calls a tool and waits for the answer. If stderr is a terminal, progress of a load is shown there.
fn call_and_show_progress(client: &mut Client, tool: &str, arguments: &Value) -> Result<ToolAnswer, CallError> {
    let shows_progress = io::stderr().is_terminal() && tool == "load-system";
    let id = client.begin_call(tool, arguments)?;
    loop {
        match client.next_event(None) {
            Some(ClientEvent::Message(message)) => {
                if let Some(result) = response_to(message.clone(), id) {
                    return result.map(|result| ToolAnswer::from_result(&result));
                }
                if let Some(report) = message["params"]["message"].as_str().filter(|_| shows_progress) {
                    super::print_to_stderr(report.trim_end());
                }
            }
            Some(ClientEvent::Interrupted(_)) | None => {}
            Some(ClientEvent::Closed) => return Err(CallError::Closed),
        }
    }
}

fn exit_status_of(request: &ToolRequest, answer: &ToolAnswer) -> i32 {
    match request {
        _ if answer.content.get("refused").is_some() => NOT_TRIED,
        ToolRequest::Test(_) if answer.is_error || has_system_without_tests(&answer.content) => NOT_TRIED,
        ToolRequest::Test(_) if test_failures(&answer.content) > 0 => FAILED,
        ToolRequest::Test(_) if has_skipped_system(&answer.content) => NOT_TRIED,
        _ if answer.is_error => FAILED,
        _ => SUCCEEDED,
    }
}

/// Returns the number of tests that failed or ended with an error; 0 if the content does not belong to a test run.
pub(super) fn test_failures(content: &Value) -> u64 {
    if content.get("tests").is_none() {
        return 0;
    }
    ["failed", "errors"].iter().filter_map(|count| content[count].as_u64()).sum()
}

/// Adds the time limit, in seconds, to a tool's arguments, if one was given.
pub(super) fn with_timeout(mut arguments: Value, timeout: Option<f64>) -> Value {
    if let Some(seconds) = timeout {
        arguments["timeout"] = seconds.into();
    }
    arguments
}

/// Returns the tests in the structured content of a test run, grouped by system.
fn tests_by_system(content: &Value) -> Vec<Vec<&Value>> {
    let mut systems = BTreeMap::<_, Vec<_>>::new();
    for test in content["tests"].as_array().into_iter().flatten() {
        systems.entry(test["system"].as_str()).or_default().push(test);
    }
    systems.into_values().collect()
}

/// Returns true if the tests of some system could not be run at all. For such a system, the content has an entry with the
/// name of the system itself in place of the tests.
fn has_system_without_tests(content: &Value) -> bool {
    let is_system = |test: &&Value| test["system"].is_string() && test["system"] == test["name"];
    tests_by_system(content).iter().any(|tests| tests.iter().all(is_system))
}

/// Returns true if all tests of some system were skipped, so that nothing is known about this system.
fn has_skipped_system(content: &Value) -> bool {
    tests_by_system(content).iter().any(|tests| tests.iter().all(|test| test["status"] == "skipped"))
}

/// Returns the arguments of the tool `load-system` for a file or a system.
///
/// # Errors
/// Returns the reason if the working directory is needed and does not exist.
pub(super) fn load_arguments(what: &str) -> Result<Value, String> {
    let path = Path::new(what);
    let is_file = path.is_file() || [".lisp", ".lsp", ".cl", ".fasl"].iter().any(|end| what.ends_with(end));
    Ok(match is_file {
        true => json!({"path": absolute_path(path)?}),
        false => json!({"system": what, "directory": absolute_path(Path::new("."))?}),
    })
}

/// Returns the arguments of the tool `run-tests` for systems, or for one test or package, whose name contains a colon.
///
/// # Errors
/// Returns the reason if several names were given and one of them names a test or package, or if the working directory
/// is needed and does not exist.
pub(super) fn test_arguments(names: &[&str]) -> Result<Value, String> {
    match names {
        [name] if name.ends_with(':') => Ok(json!({"test-package": name.trim_end_matches(':')})),
        [name] if name.contains(':') => Ok(json!({"name": name})),
        _ => match names.iter().find(|name| name.contains(':')) {
            Some(name) => Err(format!(
                "{name} is not a system. A test or package must be named alone; several names must be systems."
            )),
            None => Ok(json!({"system": names.join(", "), "directory": absolute_path(Path::new("."))?})),
        },
    }
}

/// Returns the absolute path, since an attached server may have another working directory.
///
/// # Errors
/// Returns the reason if `path` is relative and the working directory does not exist.
fn absolute_path(path: &Path) -> Result<String, String> {
    let path = std::path::absolute(path).map_err(|error| {
        format!("the working directory cannot be found: {error}; run sbcl-mcp in an existing directory")
    })?;
    Ok(path.display().to_string())
}
