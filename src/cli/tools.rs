//! `load`, `test` and `eval --attach`: a tool called from a shell, its answer as text, and an exit status.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use super::client::{Answer, Client, Event, Failure, START, answered, client_of};
use super::repl::{load_arguments, test_arguments, test_failures};
use crate::mcp::stdio::Stdio;

/// Exit statuses: it went well; something failed; it could not be done (clap's status for a wrong command line, too).
const FINE: i32 = 0;
const FAILED: i32 = 1;
const IMPOSSIBLE: i32 = 2;

/// What is asked of a server.
pub(super) enum Request {
    Evaluate(String),
    Load(String),
    Test(String),
}

/// Calls a tool of a server that runs, or of one for this alone.
pub(super) fn call(attach: Option<Option<String>>, request: &Request, stdio: Stdio) -> i32 {
    let (command, what) = match request {
        Request::Load(what) => ("load", what),
        Request::Test(what) => ("test", what),
        Request::Evaluate(code) => ("eval", code),
    };
    let mut given: Vec<_> = std::env::args_os().skip_while(|argument| argument != command).skip(1).collect();
    // The rest is a server's.
    if let Some(at) = given.iter().rposition(|argument| *argument == **what) {
        given.remove(at);
    }
    given.retain(|argument| argument != "--");
    let done = client_of(attach, given).and_then(|client| run(client, request, stdio.output));
    done.unwrap_or_else(|reason| {
        super::say(&format!("sbcl-mcp {command}: {reason}"));
        IMPOSSIBLE
    })
}

/// Asks, and prints what is answered. Returns the exit status, or a sentence that says why there is no answer.
pub(super) fn run(mut client: Client, request: &Request, output: OwnedFd) -> Result<i32, String> {
    let reason = |failure: Failure| failure.to_string();
    client.initialize(START).map_err(reason)?;
    let (tool, arguments) = match request {
        Request::Evaluate(code) => ("evaluate-lisp", json!({"code": code, "on-error": "abort"})),
        Request::Load(what) => {
            let mut arguments = load_arguments(what);
            arguments["on-error"] = "abort".into();
            ("load", arguments)
        }
        Request::Test(what) => ("run-tests", test_arguments(what)),
    };
    let answer = ask(&mut client, tool, &arguments).map_err(reason)?;
    let written = File::from(output).write_all(format!("{}\n", answer.text.trim_end_matches('\n')).as_bytes());
    written.map_err(|error| format!("the answer cannot be written: {error}"))?;
    Ok(status(request, &answer))
}

/// Calls a tool and waits; what it reports meanwhile goes to stderr, if somebody looks at that.
fn ask(client: &mut Client, tool: &str, arguments: &Value) -> Result<Answer, Failure> {
    let is_seen = io::stderr().is_terminal() && tool == "load";
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
        _ if answer.content.get("refused").is_some() => IMPOSSIBLE,
        Request::Test(_) if answer.is_error => IMPOSSIBLE,
        Request::Test(_) if test_failures(&answer.content) > 0 => FAILED,
        _ if answer.is_error => FAILED,
        _ => FINE,
    }
}
