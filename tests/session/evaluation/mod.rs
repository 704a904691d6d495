//! Results of evaluations: values, output, warnings, errors and limits, and the state that persists.

mod failure;
mod limits;
mod output;
mod persistence;
mod specification;
mod threads;
mod values;
mod warnings;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::support::{
    DEADLINE, MARKERS, TestSession, calls, check_error_response, error, fresh, missing_frame, restarts, values,
    warnings,
};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};
use sbcl::outcome::SymbolDescription;
use sbcl::report::{self, unescape_markers};
use sbcl::{Evaluation, Limits};

/// Returns a Lisp string literal that reads as `text`.
fn literal(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
