//! The command `eval`.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::arguments::Options;
use super::client::connect_or_start;
use super::exit_status::CANNOT_RUN;
use super::serve::clean_up;
use super::{print_to_stderr, start_logging, tools};
use crate::audience::Audience;
use crate::mcp::stdio::Stdio;
use crate::os::temporary::ScratchDirectory;
use crate::session::observer::StuckReporter;
use crate::{Evaluation, Outcome, report};

pub(super) fn evaluate_in_own_image(options: Options, code: &[String], stdio: Stdio) -> i32 {
    evaluate_and_print(options, code, stdio).unwrap_or_else(report_cannot_run)
}

/// Evaluates code and prints the report. Returns the exit status, or a sentence that says why there is no report.
fn evaluate_and_print(options: Options, code: &[String], stdio: Stdio) -> Result<i32, String> {
    let Stdio { input, output, .. } = stdio;
    let text = read_code(code, input).map_err(|reason| format!("sbcl-mcp eval: {reason}"))?;
    let scratch = ScratchDirectory::new();
    let session = options.boot_session(&scratch, None).map_err(|error| format!("sbcl-mcp cannot start: {error}"))?;
    session.set_audience(Audience::Shell);
    start_logging(options.log);
    let output = std::fs::File::from(output);
    let print_outcome = Arc::new(move |outcome: &Outcome| {
        let mut report = Audience::Shell.address(|| report::evaluation(outcome));
        if !report.ends_with('\n') {
            report.push('\n');
        }
        let written = (&output).write_all(report.as_bytes());
        clean_up(&scratch);
        written.map_err(|error| format!("sbcl-mcp cannot write the report to stdout: {error}"))?;
        Ok(i32::from(outcome.is_error()))
    });
    let print_unfinished = print_outcome.clone();
    session.set_observer(Arc::new(StuckReporter::new(move |outcome| {
        crate::exit_now(print_unfinished(&outcome).unwrap_or_else(report_cannot_run));
    })));
    print_outcome(&session.evaluate(Evaluation::new(text)))
}

/// Prints the reason why there is no report, and returns the exit status.
fn report_cannot_run(reason: String) -> i32 {
    print_to_stderr(&reason);
    CANNOT_RUN
}

/// Evaluates code in the image of a running server. `timeout` is the time limit in seconds. Returns the exit status.
pub(super) fn evaluate_in_attached_image(
    name: Option<String>,
    code: &[String],
    timeout: Option<f64>,
    stdio: Stdio,
) -> i32 {
    let evaluated = || {
        let code = read_code(code, stdio.input)?;
        let client = connect_or_start(Some(name), Vec::new())?;
        tools::call_and_print(client, &tools::ToolRequest::Evaluate { code, timeout }, stdio.output)
    };
    evaluated().unwrap_or_else(|reason| {
        print_to_stderr(&format!("sbcl-mcp eval: {reason}"));
        CANNOT_RUN
    })
}

/// Returns the code from the arguments, or from stdin if the only argument is `-`.
fn read_code(code: &[String], input: OwnedFd) -> Result<String, String> {
    if code != ["-"] {
        return Ok(code.join("\n"));
    }
    let mut bytes = Vec::new();
    let read = std::fs::File::from(input).read_to_end(&mut bytes);
    read.map_err(|error| format!("cannot read stdin: {error}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
