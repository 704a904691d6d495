//! What an evaluation answers: values, output, warnings, errors, limits, and what persists from one to the next.

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
    DEADLINE, Lisp, MARKERS, calls, check_error_response, error, fresh, missing_frame, restarts, values, warnings,
};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};
use sbcl::outcome::SymbolDescription;
use sbcl::report::{self, unescape_markers};
use sbcl::{Evaluation, Limits};

/// A Lisp string literal that reads as `text`.
fn literal(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
