//! Hidden commands that boot an image for a server: to run tests in a fresh image, and to try a checkpoint.

use std::io::{self, BufRead, Write};
use std::sync::Arc;

use super::arguments::Options;
use super::serve::{EXIT_GRACE_PERIOD, clean_up, exit_after_supervisor};
use super::{report_failure, start_logging};
use crate::Outcome;
use crate::mcp;
use crate::mcp::stdio::Stdio;
use crate::os::processes;
use crate::os::temporary::ScratchDirectory;
use crate::recovery::checkpoint::store::ProbeReport;
use crate::session::observer::StuckReporter;

/// Runs tests for the parent process, and exits when the parent does. Returns the exit status.
pub(super) fn run(options: Options, stdio: Stdio) -> i32 {
    let result = run_tests(options, stdio);
    result.map_or_else(|reason| report_failure(&format!("sbcl-mcp cannot run tests: {reason}")), |()| 0)
}

fn run_tests(options: Options, stdio: Stdio) -> Result<(), String> {
    // The request is one line. The parent keeps its end of the pipe open, so reading to the end of the input would block.
    let input = stdio.input.try_clone().map_err(|error| error.to_string())?;
    let mut request = String::new();
    io::BufReader::new(std::fs::File::from(input)).read_line(&mut request).map_err(|error| error.to_string())?;
    let request: mcp::fresh_image::TestRequest = serde_json::from_str(&request).map_err(|error| error.to_string())?;
    // Orphans of the tests' processes stay descendants of this process, so that `clean_up` finds and kills them.
    processes::adopt_orphans();
    let (tests, scratch) = (request.tests, Arc::new(ScratchDirectory::inherited(request.scratch)));
    let remaining = scratch.clone();
    exit_after_supervisor(&stdio, EXIT_GRACE_PERIOD, Vec::new, move || remaining.remove())
        .map_err(|error| error.to_string())?;
    // A fresh image loads files: it is not restored from a checkpoint.
    let options = Options { image: None, ..options };
    let session = options.boot_session(&scratch, None)?;
    session.set_audience(tests.audience);
    start_logging(options.log);
    let output = std::fs::File::from(stdio.output);
    let send_outcome = Arc::new(move |outcome: &Outcome| {
        clean_up(&scratch);
        let text = serde_json::to_vec(outcome).map_err(|error| error.to_string())?;
        (&output).write_all(&text).map_err(|error| error.to_string())
    });
    let send_unfinished = send_outcome.clone();
    session.set_observer(Arc::new(StuckReporter::new(move |outcome| {
        crate::exit_now(i32::from(send_unfinished(&outcome).is_err()));
    })));
    send_outcome(&session.evaluate_with_options(None, tests.evaluation(), Some(&tests.operation().with_errors())))
}

/// Boots a checkpoint, collects all garbage, and reports the checkpoint's name and definitions as found in the image.
/// Returns the exit status.
pub(super) fn probe(options: Options, stdio: Stdio) -> i32 {
    let scratch = ScratchDirectory::new();
    let session = match options.boot_session(&scratch, None) {
        Ok(session) => session,
        Err(error) => return report_failure(&format!("sbcl-mcp cannot start: {error}")),
    };
    let (name, defines) = session.collect_garbage_and_describe();
    let trial = serde_json::to_vec(&ProbeReport { name, defines }).unwrap_or_default();
    let written = std::fs::File::from(stdio.output).write_all(&trial);
    clean_up(&scratch);
    i32::from(written.is_err())
}
