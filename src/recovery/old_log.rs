//! The recovery log of version 0.1, which is read once: the next start writes the session's log in the present format.

use serde::Deserialize;

use super::definitions::{Definition, Unrestored};
use super::event::SessionEvent;
use super::state::RecoveryState;
use crate::outcome::ErrorRecord;
use crate::session::recovery::Errors;
use std::sync::Arc;

/// A line of such a log.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum OldLine {
    /// The number of the last evaluation, and how many definitions there was no room for. The first line.
    From { evaluations: u64, dropped: usize },
    /// The errors so far.
    Errors(Errors),
    /// The forms that could not be restored.
    Unrestored(Vec<Unrestored>),
    /// A form that defined something.
    Form(Definition),
    /// A change of the errors.
    Error { added: Option<Arc<ErrorRecord>>, last: Option<u64> },
    /// The image was being saved in a file of this name.
    Saving(String),
}

impl OldLine {
    /// True for the first line of a log.
    pub(super) fn is_first(&self) -> bool {
        matches!(self, Self::From { .. })
    }

    pub(super) fn apply_to(self, state: &mut RecoveryState) {
        match self {
            Self::From { evaluations, dropped } => {
                state.evaluations = evaluations;
                state.definitions.get_or_insert_default().count_dropped(dropped);
            }
            Self::Errors(errors) => state.clients.entry(0).or_default().errors = errors,
            Self::Unrestored(unrestored) => state.unrestored = unrestored,
            Self::Form(definition) => state.apply(SessionEvent::Defined(definition)),
            Self::Error { added, last } => state.apply(SessionEvent::Errors { client: 0, added, last }),
            Self::Saving(file) => state.apply(SessionEvent::Saving { file }),
        }
    }
}
