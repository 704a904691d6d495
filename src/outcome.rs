//! What an evaluation or an inspection did, as plain data.
//!
//! Everything here is owned, immutable once built, and serialisable: it outlives the Lisp objects it tells of, and it
//! can be handed to another process. How it is worded is [`report`](crate::report)'s business.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Text that may have been cut while it was written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clipped {
    /// The part that was kept, from the beginning.
    pub text: String,
    /// How many characters were left out after it.
    pub omitted: u64,
}

impl Clipped {
    /// True when nothing was written at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.omitted == 0
    }
}

impl From<&str> for Clipped {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), omitted: 0 }
    }
}

impl From<String> for Clipped {
    fn from(text: String) -> Self {
        Self { text, omitted: 0 }
    }
}

/// A warning that an evaluation signalled, or that the compiler did on its behalf.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// The condition's class name, with its package where a reader in CL-USER needs one.
    pub kind: String,
    /// Its report.
    pub message: Clipped,
    /// The line, from 1, of the submitted code that the compiler was at.
    pub line: Option<u64>,
}

/// A restart that was available where an error happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// The restart's name, without package.
    pub name: String,
    /// What it says it does.
    pub description: String,
}

/// One frame of a backtrace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// Its number, from 0 at the point of the error.
    pub number: u64,
    /// The call, printed on one line: `(FOO 1 "x")`.
    pub call: String,
    /// Where the function was defined, if that is known: `path:line`, or `evaluation 12, line 3`.
    pub source: Option<String>,
    /// The local variables that SBCL knows of. Kept for the innermost frames only.
    pub locals: Vec<Local>,
}

/// A local variable of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Local {
    /// Its name.
    pub name: String,
    /// Its value, if it can be read at this point.
    pub value: LocalValue,
}

/// The value of a local variable, as far as SBCL knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LocalValue {
    /// It has this value.
    Value(String),
    /// It is no longer, or not yet, in use at this point.
    Dead,
    /// SBCL cannot tell.
    Unavailable,
}

/// A slot of a condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Its name, without package.
    pub name: String,
    /// Its value as printed.
    pub value: String,
}

/// Which top-level form of the submitted code failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormPosition {
    /// Its number, from 1.
    pub number: u64,
    /// The line, from 1, that it begins on.
    pub line: u64,
    /// Its first line of text.
    pub text: String,
}

/// An error and everything known about it, taken where it happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorRecord {
    /// Its number in this session's history, from 1: `E1`. 0 before it has got one.
    pub id: u64,
    /// The condition's class name, with its package where a reader in CL-USER needs one; or one of the server's own:
    /// `TIMEOUT`, `CANCELLED`, `IMAGE-LOST`.
    pub kind: String,
    /// The condition's report.
    pub message: Clipped,
    /// When it happened.
    pub time: jiff::Timestamp,
    /// The form of the submitted code that failed.
    pub form: Option<FormPosition>,
    /// The condition's slots.
    pub slots: Vec<Slot>,
    /// The restarts, in `compute-restarts`' order.
    pub restarts: Vec<Restart>,
    /// The frames that were kept, innermost first. Of a very deep stack the middle is missing: the numbers tell.
    pub frames: Vec<Frame>,
    /// How many frames there were.
    pub total_frames: u64,
}

/// What `capture-time` measures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Elapsed time in milliseconds.
    pub real_ms: u64,
    /// Processor time in milliseconds.
    pub run_ms: u64,
    /// Time spent in garbage collection, in milliseconds.
    pub gc_ms: u64,
    /// Bytes allocated.
    pub bytes_consed: u64,
}

/// A form that defined something: evaluated again in its package, in order with the others, it makes another image
/// like this one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DefiningForm {
    /// The form's text.
    pub code: String,
    /// The package it was read in.
    pub package: String,
}

/// What one evaluation did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// What the server itself has to say.
    pub notices: Vec<String>,
    /// Output of threads that outlived their evaluation.
    pub background: Clipped,
    /// What went to `*standard-output*`.
    pub stdout: Clipped,
    /// What went to `*error-output*` and `*trace-output*`.
    pub stderr: Clipped,
    /// Warnings in the order they were signalled.
    pub warnings: Vec<Warning>,
    /// How many more warnings there were.
    pub warnings_omitted: u64,
    /// The values of the last form, or the error that ended the evaluation.
    pub result: Result<Vec<Clipped>, Arc<ErrorRecord>>,
    /// Present when it was asked for.
    pub timing: Option<Timing>,
    /// The evaluation is held where it failed: its restarts can be invoked and its frames looked at.
    pub held: bool,
    /// The forms that defined something, in order.
    pub defined: Vec<DefiningForm>,
}

impl Outcome {
    /// True when the evaluation ended with an error.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.result.is_err()
    }
}

/// What kind of thing a [`Definition`] defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DefinitionKind {
    /// Functions and generic functions.
    Function,
    /// Variables, parameters, constants, globals.
    Variable,
    /// Macros, compiler macros and symbol macros.
    Macro,
    /// Classes, structures and condition types.
    Class,
    /// Packages.
    Package,
    /// Systems that were loaded.
    System,
}

/// One thing that the session defined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    /// What it is.
    pub kind: DefinitionKind,
    /// One line: its name, and the lambda list or value where there is one.
    pub text: String,
}

/// One role of a symbol: a function, a variable, a class and so on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Role {
    /// The symbol with its package and the role: `COMMON-LISP:CAR [FUNCTION]`.
    pub title: String,
    /// What is known of it, as label and text, in the order to show: `("Arglist", "(LIST)")`.
    pub details: Vec<(String, String)>,
}

/// What a symbol means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SymbolDescription {
    /// The symbol exists; without roles when nothing is known of it.
    Found(Vec<Role>),
    /// No such symbol: a sentence that says where it was looked for, with near names.
    NotFound(String),
}
