//! What a server starts of itself beside its image: one that runs tests, and one that tries a checkpoint.

use std::io::{self, BufRead, Write};
use std::sync::Arc;

use super::arguments::Options;
use super::serve::{LAST_WORDS, clear_up, outlive_nobody};
use super::{complain, start_logging};
use crate::Outcome;
use crate::mcp;
use crate::mcp::stdio::Stdio;
use crate::os::temporary::Scratch;
use crate::recovery::checkpoint::store::Tried;
use crate::session::observer::LastWords;

/// Runs tests for the process that started this one, and ends when that does.
pub(super) fn run(options: Options, stdio: Stdio) -> i32 {
    let done = run_tests(options, stdio);
    done.map_or_else(|reason| complain(&format!("sbcl-mcp cannot run tests: {reason}")), |()| 0)
}

fn run_tests(options: Options, stdio: Stdio) -> Result<(), String> {
    // Its end is held open: there may be no more in it than the line.
    let input = stdio.input.try_clone().map_err(|error| error.to_string())?;
    let mut request = String::new();
    io::BufReader::new(std::fs::File::from(input)).read_line(&mut request).map_err(|error| error.to_string())?;
    let request: mcp::beside::Request = serde_json::from_str(&request).map_err(|error| error.to_string())?;
    let (tests, scratch) = (request.tests, Arc::new(Scratch::inherited(request.scratch)));
    let left = scratch.clone();
    outlive_nobody(&stdio, LAST_WORDS, move || left.remove()).map_err(|error| error.to_string())?;
    // Files, and no checkpoint.
    let options = Options { image: None, ..options };
    let session = options.session(&scratch, None)?;
    start_logging(options.log);
    let output = std::fs::File::from(stdio.output);
    let say = Arc::new(move |outcome: &Outcome| {
        clear_up(&scratch);
        let text = serde_json::to_vec(outcome).map_err(|error| error.to_string())?;
        (&output).write_all(&text).map_err(|error| error.to_string())
    });
    let last_words = say.clone();
    session.observe(Arc::new(LastWords::new(move |outcome| {
        crate::exit_now(i32::from(last_words(&outcome).is_err()));
    })));
    say(&session.evaluate_as(None, tests.evaluation(), Some(&tests.operation().with_errors())))
}

/// Boots, collects all garbage and says what the image calls itself.
pub(super) fn probe(options: Options, stdio: Stdio) -> i32 {
    let scratch = Scratch::new();
    let session = match options.session(&scratch, None) {
        Ok(session) => session,
        Err(error) => return complain(&format!("sbcl-mcp cannot start: {error}")),
    };
    let (name, defines) = session.collect_and_name();
    let tried = serde_json::to_vec(&Tried { name, defines }).unwrap_or_default();
    let written = std::fs::File::from(stdio.output).write_all(&tried);
    clear_up(&scratch);
    i32::from(written.is_err())
}
