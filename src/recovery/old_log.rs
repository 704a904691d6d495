//! The format of the recovery log of builds before version 0.1. A log in this format is only read: the server that
//! reads the log rewrites it in the current format.

use serde::Deserialize;

use super::definitions::{Definition, UnrestoredForm};
use super::event::SessionEvent;
use super::state::RecoveryState;
use crate::outcome::ErrorRecord;
use crate::session::recovery::SavedErrors;
use std::sync::Arc;

/// A line of a log of a build before version 0.1.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum OldLine {
    /// The first line: the number of the last evaluation, and the number of definitions that were dropped for lack of
    /// room.
    From { evaluations: u64, dropped: usize },
    /// The error history so far.
    Errors(SavedErrors),
    /// The forms that could not be restored.
    Unrestored(Vec<UnrestoredForm>),
    /// A form that defined something.
    Form(Definition),
    /// A change of the error history: an added error, and the number of the last error.
    Error { added: Option<Arc<ErrorRecord>>, last: Option<u64> },
    /// The beginning of a save. The string is the name of the core's file.
    Saving(String),
}

impl OldLine {
    /// Returns true for the first line of a log.
    pub(super) fn is_first(&self) -> bool {
        matches!(self, Self::From { .. })
    }

    /// Applies the line to the recovery state.
    pub(super) fn apply_to(self, state: &mut RecoveryState) {
        match self {
            Self::From { evaluations, dropped } => {
                state.evaluations = evaluations;
                state.definitions.get_or_insert_default().count_dropped(dropped);
            }
            Self::Errors(errors) => state.clients.entry(0).or_default().errors = errors,
            Self::Unrestored(unrestored) => state.unrestored = unrestored.into(),
            Self::Form(definition) => state.apply(SessionEvent::Defined(definition)),
            Self::Error { added, last } => state.apply(SessionEvent::Errors { client: 0, added, last }),
            Self::Saving(file) => state.apply(SessionEvent::Saving { file }),
        }
    }
}
