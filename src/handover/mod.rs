//! What a supervisor and its workers tell each other.
//!
//! Each direction is a pipe. Towards the worker goes one line, a [`WorkerInit`], and, once the worker is ready, the
//! client's lines as they are, those of others that have joined with [whose they are](route). Towards the supervisor go [frames](frame): lines for the client, and word of whatever
//! must outlive the image.
//! What must be known even of a worker that is gone from one instruction to the next is its [shared
//! status](shared_status).

pub(crate) mod frame;
pub(crate) mod route;
pub(crate) mod shared_status;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::checkpoints::Checkpoint;
use crate::config::Limits;
use crate::outcome::{DefiningForm, ErrorRecord, Outcome};
use crate::session::recovery::Errors;

/// The first line that a worker reads: where the last one stopped.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct WorkerInit {
    /// The numbers of the lines that follow first: they are not answered yet.
    pub(crate) resent: Vec<u64>,
    /// The number of the line after those.
    pub(crate) next: u64,
    /// The lines that opened the conversation; the client has the answers.
    pub(crate) handshake: Vec<String>,
    /// The limits; `None` for those of the command line.
    pub(crate) limits: Option<Limits>,
    /// The error state and the history.
    pub(crate) errors: Errors,
    /// The clients that have joined, by their connections' numbers.
    pub(crate) guests: BTreeMap<u64, Guest>,
    /// The forms to evaluate again; `None` when nothing is to be restored.
    pub(crate) journal: Option<Vec<Entry>>,
    /// How many older ones there was no room for.
    pub(crate) dropped: usize,
    /// Jobs with numbers up to this one have begun in an image that is gone; they must not begin again.
    pub(crate) through: u64,
    /// The line with the question that the last image was lost by, or while it was answered, and how many images were.
    pub(crate) inspected: Option<(u64, u32)>,
    /// Evaluations had numbers up to this one.
    pub(crate) evaluations: u64,
    /// What became of the last image, if it was lost.
    pub(crate) crash: Option<CrashReport>,
    /// The checkpoint that this image was booted from; the forms of the journal came after it.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// The checkpoint that `reset` asked for, and how many evaluations there had been since.
    pub(crate) returned: Option<(Checkpoint, u64)>,
    /// The session that goes on, with another server than the one before.
    #[serde(default)]
    pub(crate) resumed: Option<Resumed>,
    /// What other images could not restore, and nobody has defined again.
    #[serde(default)]
    pub(crate) unrestored: Vec<Unrestored>,
    /// The line that asked for this image in place of the last one.
    pub(crate) reset: Option<u64>,
    /// The connection that this line came by.
    pub(crate) reset_by: u64,
    /// What that image had to say to it yet.
    pub(crate) notices: Vec<String>,
}

/// A client that has joined.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Guest {
    /// The lines that opened its conversation; it has the answers.
    pub(crate) handshake: Vec<String>,
    /// Its error state and history.
    pub(crate) errors: Errors,
}

/// A session that lasts, as it is begun with again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Resumed {
    /// What it is called.
    pub(crate) session: String,
    /// Why it does not go on with the last image that was saved, in a sentence.
    pub(crate) unusable: Option<String>,
}

/// A form to be evaluated again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// The form and the package it was read in.
    pub(crate) form: DefiningForm,
    /// The package was bound for its evaluation alone.
    pub(crate) local: bool,
    /// The number of the evaluation that it was part of.
    pub(crate) evaluation: u64,
    /// How long it took at first, in milliseconds, at most.
    #[serde(default)]
    pub(crate) took: u64,
}

impl Entry {
    /// What is the same of forms that were evaluated again.
    pub(crate) fn key(&self) -> (&DefiningForm, bool) {
        (&self.form, self.local)
    }
}

/// A form that could not be restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unrestored {
    pub(crate) form: DefiningForm,
    /// Why, in a line.
    pub(crate) reason: String,
}

impl Unrestored {
    pub(crate) fn new(entry: &Entry, reason: &str) -> Self {
        Self { form: entry.form.clone(), reason: reason.to_owned() }
    }

    /// True when nobody misses it after `form`: that is the same, defines the same name in the same way, or drops the name.
    pub(crate) fn is_made_good_by(&self, form: &DefiningForm) -> bool {
        if self.form == *form {
            return true;
        }
        let (Some((operator, name)), Some((by, other))) = (head(&self.form.code), head(&form.code)) else {
            return false;
        };
        let same = operator.starts_with("def") && operator == by && name == other;
        let dropped =
            DROPPING.contains(&&*by) && name == other.trim_start_matches(['\'', ':', '#', '"']).trim_end_matches('"');
        self.form.package == form.package && (same || dropped)
    }
}

/// Functions by which a user drops what he has defined.
const DROPPING: [&str; 4] = ["fmakunbound", "makunbound", "unintern", "delete-package"];

/// The operator of a form and its first argument, as written: of a definition, the name.
fn head(code: &str) -> Option<(String, String)> {
    let rest = code.trim_start().strip_prefix('(')?;
    let (operator, rest) = rest.split_at(rest.find(char::is_whitespace)?);
    let operator = operator.rsplit(':').next()?.to_ascii_lowercase();
    let rest = rest.trim_start();
    let end = match rest.trim_start_matches('\'').strip_prefix('(') {
        // (setf name), or a structure's name and options
        Some(_) => rest.find(')')? + 1,
        None => rest.find(|c: char| c.is_whitespace() || matches!(c, '(' | ')' | ';')).unwrap_or(rest.len()),
    };
    (end > 0).then(|| (operator, rest[..end].to_ascii_lowercase()))
}

/// How an image was lost.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CrashReport {
    /// What happened to it, as the rest of a sentence: `was killed by signal 9 (SIGKILL)`.
    pub(crate) cause: String,
    /// An evaluation was running.
    pub(crate) in_flight: bool,
    /// The connection that it was for.
    #[serde(default)]
    pub(crate) connection: u64,
    /// The numbers of the evaluations that were in the background.
    pub(crate) background: Vec<u64>,
    /// What could be said of an evaluation that did not let itself be stopped.
    pub(crate) stuck: Option<Box<Outcome>>,
    /// Forms that took an image down as they were being restored; they are not tried again.
    pub(crate) deadly: Vec<Unrestored>,
}

impl CrashReport {
    /// True when it was given up since an evaluation did not end that had been cancelled.
    pub(crate) fn was_cancelled(&self) -> bool {
        let error = self.stuck.as_ref().and_then(|outcome| outcome.result.as_ref().err());
        self.in_flight && error.is_some_and(|error| error.kind == "CANCELLED")
    }
}

/// What an evaluation did to the errors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ErrorChange {
    /// A new one.
    pub(crate) added: Option<Arc<ErrorRecord>>,
    /// The number of the last one; `None` without an error.
    pub(crate) last: Option<u64>,
}

/// The checkpoint that a line asks for, and what the present image had to say yet.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Return {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) notices: Vec<String>,
}

/// What a worker could not restore.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Restored {
    /// Forms that are not to be tried again, as indices into the journal that it was given, each with the reason.
    pub(crate) failed: Vec<(usize, String)>,
}

/// What a worker writes that cannot serve, and ends with this status for this reason.
pub(crate) fn farewell(status: i32, reason: &str) -> Vec<u8> {
    let payload = serde_json::Value::from(reason).to_string();
    frame::frame(frame::Kind::Bye, u64::try_from(status).unwrap_or(1), payload.as_bytes())
}

/// Bits of a job's number that do not belong to its line's.
const LINE_SHIFT: u32 = 28;
/// Bits that leave room for jobs that no line asked for.
const PART_SHIFT: u32 = 8;

/// The least number for the job that the `part`th message in line `line` asks for. Numbers rise with lines, and
/// within a batch.
pub(crate) fn job_number(line: u64, part: usize) -> u64 {
    let parts = 1 << (LINE_SHIFT - PART_SHIFT);
    (line << LINE_SHIFT) | ((part as u64).min(parts - 1) << PART_SHIFT)
}

/// The line that asked for a job.
pub(crate) fn line_of_job(number: u64) -> u64 {
    number >> LINE_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_is_made_good_by_one_of_the_same_name() {
        let form = |code: &str, package: &str| DefiningForm { code: code.to_owned(), package: package.to_owned() };
        let unrestored = |code: &str| Unrestored { form: form(code, "APP"), reason: String::new() };
        assert!(unrestored("(defun f (x) 1)").is_made_good_by(&form(" (cl:DEFUN F () 2)", "APP")));
        assert!(unrestored("(defun (setf f) (x) 1)").is_made_good_by(&form("(defun (setf f) (y) 1)", "APP")));
        assert!(unrestored("(load \"a\")").is_made_good_by(&form("(load \"a\")", "APP")));
        assert!(unrestored("(defun f (x) 1)").is_made_good_by(&form("(fmakunbound 'f)", "APP")));
        assert!(unrestored("(defun (setf f) (x) 1)").is_made_good_by(&form("(fmakunbound '(setf f))", "APP")));
        assert!(unrestored("(defpackage :a (:use :cl))").is_made_good_by(&form("(defpackage :a)", "APP")));
        for other in [
            "(fmakunbound 'g)",
            "(defun g () 1)",
            "(defmacro f () 1)",
            "(defun (setf f) (x) 1)",
            "(load \"a\")",
            "f",
            "",
            "(defun",
        ] {
            assert!(!unrestored("(defun f (x) 1)").is_made_good_by(&form(other, "APP")), "{other}");
        }
        assert!(!unrestored("(defun f (x) 1)").is_made_good_by(&form("(defun f () 2)", "MINE")));
    }

    #[test]
    fn numbers_rise_with_lines_and_parts() {
        let numbers = [job_number(1, 0), job_number(1, 1), job_number(1, 1 << 30), job_number(2, 0)];
        assert!(numbers.is_sorted_by(|a, b| a < b));
        assert_eq!(numbers.map(line_of_job), [1, 1, 1, 2]);
    }
}
