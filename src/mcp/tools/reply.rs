//! What a tool has to say, before it is worded.

use std::sync::Arc;

use crate::outcome::{Definition, Local, SymbolDescription};
use crate::report::{self, DefinitionFilter};
use crate::{ErrorRecord, Limits, Outcome};

/// What a tool has to say, as plain data. The text and the structured content are made of the same.
#[derive(Debug)]
pub(in crate::mcp) enum Reply {
    /// What an evaluation did.
    Outcome(Box<Outcome>),
    /// An error to describe, if there is one.
    Error(Option<Arc<ErrorRecord>>),
    /// The frames of an error, if there is one.
    Backtrace { error: Option<Arc<ErrorRecord>>, max_frames: u64, locals: bool },
    /// Errors, newest first.
    History(Vec<Arc<ErrorRecord>>),
    /// The local variables of a frame.
    Locals(Vec<Local>),
    /// The held evaluation is given up.
    Aborted,
    /// Definitions of these kinds.
    Definitions(Vec<Definition>, DefinitionFilter),
    /// What a symbol means.
    Symbol(SymbolDescription),
    /// The session is as new; what there is to say of what it was.
    Reset(Vec<String>),
    /// The limits in force.
    Limits(Limits),
    /// A wrong value: a sentence for whoever chose it.
    Refused(String),
}

impl Reply {
    /// What a client reads.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Outcome(outcome) => report::evaluation(outcome),
            Self::Error(error) => report::last_error(error.as_deref()),
            Self::Backtrace { error, max_frames, locals: true } => {
                report::backtrace_with_locals(error.as_deref(), *max_frames)
            }
            Self::Backtrace { error, max_frames, locals: false } => report::backtrace(error.as_deref(), *max_frames),
            Self::History(errors) => report::error_history(errors),
            Self::Locals(locals) => report::locals(locals),
            Self::Aborted => "Evaluation aborted.".to_owned(),
            Self::Definitions(definitions, filter) => report::definitions(definitions, *filter),
            Self::Symbol(description) => report::symbol(description),
            Self::Reset(notices) => report::reset(notices),
            Self::Limits(limits) => report::limits(limits),
            Self::Refused(sentence) => sentence.clone(),
        }
    }

    pub(super) fn is_error(&self) -> bool {
        match self {
            Self::Outcome(outcome) => outcome.is_error(),
            Self::Refused(_) => true,
            _ => false,
        }
    }
}

impl From<Outcome> for Reply {
    fn from(outcome: Outcome) -> Self {
        Self::Outcome(Box::new(outcome))
    }
}
