//! What a session remembers between evaluations.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::events::ClippedBuffer;
use super::history::History;
use crate::outcome::ErrorRecord;

/// Notices that wait for the next answer at most, and characters of one.
const MAX_NOTICES: usize = 100;
const MAX_NOTICE: usize = 2_000;

/// The error state, the history, and what waits for the next answer.
#[derive(Default)]
pub(super) struct ErrorState {
    /// The last error; none once an evaluation has succeeded.
    pub(super) last_error: Option<Arc<ErrorRecord>>,
    /// The last errors.
    pub(super) history: History,
    /// Output of threads that outlived their evaluation, until the next answer.
    pub(super) background: Option<ClippedBuffer>,
    /// What the server has to say in the next answer.
    pub(super) notices: Vec<String>,
    /// How many more there were.
    notices_omitted: u64,
}

/// What is kept of a notice.
fn cut(mut notice: String) -> String {
    if let Some((end, _)) = notice.char_indices().nth(MAX_NOTICE) {
        notice.truncate(end);
        notice.push('…');
    }
    notice
}

impl ErrorState {
    /// Gives `error` its number, the one after `errors`, and puts it into the history.
    pub(super) fn record(&mut self, error: &mut Arc<ErrorRecord>, errors: &AtomicU64) {
        let number = errors.fetch_add(1, Ordering::Relaxed) + 1;
        // Just made by the builder: nobody else has it yet.
        if let Some(record) = Arc::get_mut(error) {
            record.id = number;
        }
        self.history.push(error.clone());
    }

    /// Takes an error of another connection's for this one's last.
    pub(super) fn take_over(&mut self, error: &Arc<ErrorRecord>) {
        self.history.push(error.clone());
        self.last_error = Some(error.clone());
    }

    /// Has the next answer say this.
    pub(super) fn notice(&mut self, text: String) {
        if self.notices.len() >= MAX_NOTICES {
            self.notices_omitted += 1;
            return;
        }
        self.notices.push(cut(text));
    }

    /// Has the next answer not say this after all.
    pub(super) fn withdraw(&mut self, notice: String) {
        let notice = cut(notice);
        self.notices.retain(|kept| *kept != notice);
    }

    /// What the next answer has to say.
    pub(super) fn take_notices(&mut self) -> Vec<String> {
        let mut notices = std::mem::take(&mut self.notices);
        match std::mem::take(&mut self.notices_omitted) {
            0 => {}
            more => notices.push(format!("[... {more} more notices omitted]")),
        }
        notices
    }

    /// Forgets everything but what is yet to be said.
    pub(super) fn reset(&mut self) {
        *self = Self { notices: self.take_notices(), ..Self::default() };
    }
}
