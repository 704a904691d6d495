//! The command `eval`.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::arguments::Options;
use super::client::client_of;
use super::exit_status::IMPOSSIBLE;
use super::serve::clear_up;
use super::{say, start_logging, tools};
use crate::mcp::stdio::Stdio;
use crate::scratch::Scratch;
use crate::session::observer::LastWords;
use crate::{Evaluation, Outcome, report};

pub(super) fn here(options: Options, code: &[String], stdio: Stdio) -> i32 {
    eval_to_the_end(options, code, stdio).unwrap_or_else(impossible)
}

/// Evaluates code; returns the exit status, or a sentence that says why there is no report.
fn eval_to_the_end(options: Options, code: &[String], stdio: Stdio) -> Result<i32, String> {
    let Stdio { input, output, .. } = stdio;
    let text = code_of(code, input)?;
    let scratch = Scratch::new();
    let session = options.session(&scratch, None).map_err(|error| format!("sbcl-mcp cannot start: {error}"))?;
    start_logging(options.log);
    let output = std::fs::File::from(output);
    let say = Arc::new(move |outcome: &Outcome| {
        let mut report = tools::for_shell(&report::evaluation(outcome), false);
        if !report.ends_with('\n') {
            report.push('\n');
        }
        let written = (&output).write_all(report.as_bytes());
        clear_up(&scratch);
        written.map_err(|error| format!("sbcl-mcp cannot write the report: {error}"))?;
        Ok(i32::from(outcome.is_error()))
    });
    let last_words = say.clone();
    session.observe(Arc::new(LastWords::new(move |outcome| {
        crate::exit_now(last_words(&outcome).unwrap_or_else(impossible));
    })));
    say(&session.evaluate(Evaluation::new(text)))
}

/// Says why there is no report; returns the exit status.
fn impossible(reason: String) -> i32 {
    say(&reason);
    IMPOSSIBLE
}

/// Evaluates code in the image of a server that runs, with this time limit in seconds, if any was given.
pub(super) fn attached(name: Option<String>, code: &[String], timeout: Option<f64>, stdio: Stdio) -> i32 {
    let evaluated = || {
        let code = code_of(code, stdio.input)?;
        let client = client_of(Some(name), Vec::new())?;
        tools::run(client, &tools::Request::Evaluate { code, timeout }, stdio.output)
    };
    evaluated().unwrap_or_else(|reason| {
        say(&format!("sbcl-mcp eval: {reason}"));
        IMPOSSIBLE
    })
}

/// The code that arguments are, or stdin has.
fn code_of(code: &[String], input: OwnedFd) -> Result<String, String> {
    if code != ["-"] {
        return Ok(code.join("\n"));
    }
    let mut bytes = Vec::new();
    let read = std::fs::File::from(input).read_to_end(&mut bytes);
    read.map_err(|error| format!("sbcl-mcp cannot read stdin: {error}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
