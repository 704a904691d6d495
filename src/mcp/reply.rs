//! What a tool has to say, before it is worded.

use std::sync::Arc;

use super::tools::CheckpointReply;
use crate::outcome::{
    CallTree, Definitions, Expansion, FoundSymbols, Local, Profile, References, SymbolDescription, TestCounts,
};
use crate::report::{self, FrameRange, Page};
use crate::{ErrorRecord, EvaluationError, EvaluationStatus, Limits, Outcome};

/// What a tool has to say, as plain data. The text and the structured content are made of the same.
#[derive(Debug)]
pub(super) enum Reply {
    /// What an evaluation did.
    Outcome(Arc<Outcome>),
    /// What an evaluation did, and the calls that it came to.
    Calls(Arc<Outcome>),
    /// What an evaluation did, and where it spent its time.
    Profile(Arc<Outcome>),
    /// What tests came to.
    Tests(Arc<Outcome>),
    /// An error to describe, if there is one.
    Error(Option<Arc<ErrorRecord>>),
    /// These frames of an error, if there is one.
    Backtrace(Option<Arc<ErrorRecord>>, FrameRange),
    /// Errors, newest first, and how many older ones there are.
    History(Vec<Arc<ErrorRecord>>, usize),
    /// A reply about errors, while this cancelled evaluation has not ended.
    Unsettled(u64, Box<Reply>),
    /// The local variables of a frame.
    Locals(Vec<Local>),
    /// The held evaluation is given up.
    Aborted,
    /// What the session defined.
    Definitions(Definitions),
    /// What a symbol means.
    Symbol(SymbolDescription),
    /// Symbols and packages that a search found.
    Symbols(FoundSymbols),
    /// What stands in some relation to a name.
    References(References),
    /// What a form expands to.
    Expansion(Expansion),
    /// How far an evaluation is.
    Status(Box<EvaluationStatus>),
    /// A page of what is kept of an evaluation.
    Page(Box<Page>),
    /// Nothing has been evaluated in this image, for the reason given.
    NoEvaluations(EvaluationError),
    /// The session is as new; what there is to say of what it was.
    Reset(Vec<String>),
    /// What became of checkpoints.
    Checkpoint(CheckpointReply),
    /// The limits in force.
    Limits(Limits),
    /// A wrong value: a sentence for whoever chose it.
    Refused(String),
}

impl Reply {
    /// What a client reads, in at most `max` characters; and what there is to be said in so many, if that is less.
    pub(super) fn text(&mut self, max: usize) -> String {
        let text = self.whole_text(max);
        if let Self::Calls(outcome) | Self::Profile(outcome) = self {
            // It is in its room already: what else is made of it is to be short, too.
            *outcome = Arc::new(report::fitted(outcome, max));
            return text;
        }
        if text.len() <= max || text.chars().count() <= max {
            return text;
        }
        match self {
            Self::Outcome(outcome) => *outcome = Arc::new(report::fitted(outcome, max)),
            Self::Error(Some(error)) => *error = Arc::new(report::fitted_error(error, max)),
            Self::Page(page) => **page = Page::clone(page).fitted(max),
            _ => {}
        }
        report::cut(self.whole_text(max), max)
    }

    /// What there is to be said. Lists are as long as there is room in `max` characters.
    fn whole_text(&self, max: usize) -> String {
        match self {
            Self::Outcome(outcome) => report::evaluation(outcome),
            Self::Calls(outcome) => report::calls(outcome, max),
            Self::Profile(outcome) => report::profile(outcome, max),
            Self::Tests(outcome) => report::tests(outcome, max),
            Self::Error(error) => report::last_error(error.as_deref()),
            Self::Backtrace(error, range) => report::frames(error.as_deref(), range, max),
            Self::History(errors, older) => report::error_history(errors, *older, max),
            Self::Unsettled(evaluation, reply) => {
                let notice = report::unsettled(*evaluation);
                format!("{notice}\n\n{}", reply.whole_text(max.saturating_sub(notice.len() + 2)))
            }
            Self::Locals(locals) => report::locals(locals, max),
            Self::Aborted => "Evaluation aborted.".to_owned(),
            Self::Definitions(definitions) => report::definitions(definitions, max),
            Self::Symbol(description) => report::symbol(description),
            Self::Symbols(found) => report::symbols_found(found, max),
            Self::References(found) => report::references_found(found, max),
            Self::Expansion(expansion) => report::expansion(expansion),
            Self::Status(status) => report::evaluation_status(status),
            Self::Page(page) => report::evaluation_page(page),
            Self::NoEvaluations(error) => error.to_string(),
            Self::Reset(notices) => report::reset(notices),
            Self::Checkpoint(CheckpointReply::List(all)) => report::checkpoints(all),
            Self::Checkpoint(CheckpointReply::Saved(saved)) => {
                report::checkpoint_saved(&saved.checkpoint, saved.stopped, &saved.threads, saved.timers)
            }
            Self::Checkpoint(CheckpointReply::Restored { checkpoint, forgotten, package, notices }) => {
                report::checkpoint_restored(checkpoint, *forgotten, package, notices)
            }
            Self::Checkpoint(CheckpointReply::Deleted(name)) => format!("Deleted {name:?}."),
            Self::Limits(limits) => report::limits(limits),
            Self::Refused(sentence) => sentence.clone(),
        }
    }

    pub(super) fn is_error(&self) -> bool {
        match self {
            Self::Outcome(outcome) | Self::Calls(outcome) | Self::Profile(outcome) => outcome.is_error(),
            Self::Expansion(expansion) => expansion.error.is_some(),
            Self::Refused(_) => true,
            _ => false,
        }
    }
}

impl From<Outcome> for Reply {
    fn from(outcome: Outcome) -> Self {
        Arc::new(outcome).into()
    }
}

impl From<Arc<Outcome>> for Reply {
    fn from(outcome: Arc<Outcome>) -> Self {
        let make = match () {
            () if CallTree::of(&outcome.records).is_some() => Self::Calls,
            () if Profile::of(&outcome.records).is_some() => Self::Profile,
            () if !outcome.is_error() && TestCounts::of(&outcome).is_some() => Self::Tests,
            () => Self::Outcome,
        };
        make(outcome)
    }
}
