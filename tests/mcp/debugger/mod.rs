//! The live debugger: a failed evaluation is held where it failed, inspected, repaired and resumed.

mod frames;
mod limits;
mod release;
mod restarts;

use std::time::{Duration, Instant};

use crate::client::{Server, call_err, call_ok, evaluate_err, frame_locals, last_error, short_limit};
use crate::processes::wait_until;
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::{Value, json};

const NOTHING_HELD: &str = "No evaluation is held: an evaluation that fails with on-error \"debug\" is held until it is \
     resumed or aborted, its hold times out, another client takes it over, or a later evaluation outside its frames, a \
     reset, a restore or the loss of the image ends it.";
const NO_ERROR: &str = "No error information available.\n(No error has occurred since the last successful evaluation)";
const RELEASED: &str = "[notice]\nThe evaluation held for debugging was ended.\n\n";
const DEBUGGER_SECTION_END: &str = "Tools: get-backtrace with locals, invoke-restart, eval-in-frame, resume-from-frame, abort-evaluation. The next \
     evaluation, load or test run ends the hold.";

/// Evaluates code that must fail and be held; returns the report.
#[track_caller]
fn hold(server: &mut Server, code: &str) -> String {
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    assert!(is_error && text.contains("\n\n[Debugger]\nHeld. Restarts:\n"), "{code} is not held:\n{text}");
    text
}

#[track_caller]
fn invoke_restart(server: &mut Server, restart: impl Into<Value>) -> String {
    call_ok(server, "invoke-restart", json!({"restart": restart.into()}))
}

#[track_caller]
fn invoke_restart_with(server: &mut Server, restart: impl Into<Value>, values: &str) -> String {
    call_ok(server, "invoke-restart", json!({"restart": restart.into(), "values": values}))
}

#[track_caller]
fn in_frame(server: &mut Server, frame: u64, code: &str) -> String {
    call_ok(server, "eval-in-frame", json!({"frame": frame, "code": code}))
}

#[track_caller]
fn assert_nothing_held(server: &mut Server) {
    let text = call_err(server, "eval-in-frame", json!({"frame": 0, "code": "1"}));
    assert!(text.starts_with("No evaluation is held: "), "{text}");
}

/// Returns the number of the frame whose line in the report begins with `call`.
#[track_caller]
fn frame_of(report: &str, call: &str) -> u64 {
    let line = report.lines().find_map(|line| {
        let (number, rest) = line.split_once(": ")?;
        rest.starts_with(call).then(|| number.parse().ok()).flatten()
    });
    line.unwrap_or_else(|| panic!("no frame {call} in\n{report}"))
}
