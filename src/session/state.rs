//! What a session remembers between evaluations.

use std::collections::VecDeque;
use std::sync::Arc;

use super::builder::ClippedBuffer;
use crate::outcome::ErrorRecord;

/// How many errors the history keeps.
pub(super) const HISTORY: usize = 20;

/// The error state, the history, and what waits for the next answer.
#[derive(Default)]
pub(super) struct State {
    /// The last error; none once an evaluation has succeeded.
    pub(super) last_error: Option<Arc<ErrorRecord>>,
    /// The last errors, oldest first.
    pub(super) history: VecDeque<Arc<ErrorRecord>>,
    /// Errors so far, those of before a reset included, so that a number never means two things.
    pub(super) errors: u64,
    /// Output of threads that outlived their evaluation, until the next answer.
    pub(super) background: Option<ClippedBuffer>,
    /// What the server has to say in the next answer.
    pub(super) notices: Vec<String>,
}

impl State {
    /// Gives `error` its number and puts it into the history.
    pub(super) fn record(&mut self, error: &mut Arc<ErrorRecord>) {
        self.errors += 1;
        // Just made by the builder: nobody else has it yet.
        if let Some(record) = Arc::get_mut(error) {
            record.id = self.errors;
        }
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(error.clone());
    }

    /// Puts errors into the history that others came after in the same evaluation, and says so in its answer.
    pub(super) fn record_superseded(&mut self, errors: Vec<Arc<ErrorRecord>>) {
        for mut error in errors {
            self.record(&mut error);
            self.notices.push(format!(
                "Before this, E{} reached the debugger: {}. A cleanup form failed while it was unwound, or stopped that.",
                self.errors, error.kind
            ));
        }
    }

    /// The error with this number, if the history still has it.
    pub(super) fn error(&self, id: u64) -> Option<Arc<ErrorRecord>> {
        self.history.iter().find(|error| error.id == id).cloned()
    }

    /// The history, newest first.
    pub(super) fn history(&self) -> Vec<Arc<ErrorRecord>> {
        self.history.iter().rev().cloned().collect()
    }

    /// Forgets everything but how far the numbers have come, and what is yet to be said.
    pub(super) fn reset(&mut self) {
        *self = Self { errors: self.errors, notices: std::mem::take(&mut self.notices), ..Self::default() };
    }
}
