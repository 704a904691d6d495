//! The error state of a connection.

use std::sync::Arc;

use super::events::{MAX_NOTICE_CHARS, Printed};
use super::history::History;
use crate::outcome::ErrorRecord;

/// The maximum number of notices for the next answer.
const MAX_NOTICES: usize = 100;

/// The last error, the history, and the messages for the next answer.
#[derive(Default)]
pub(super) struct ErrorState {
    /// The last error; `None` once a later evaluation has succeeded.
    pub(super) last_error: Option<Arc<ErrorRecord>>,
    /// The recorded errors.
    pub(super) history: History,
    /// Output of threads that outlived their evaluation, for the next answer. It has one stream.
    pub(super) pending_output: Option<Arc<Printed>>,
    /// Notices for the next answer.
    pub(super) notices: Vec<String>,
    /// The number of notices that were omitted because of the limit.
    notices_omitted: u64,
}

/// Truncates a notice to [`MAX_NOTICE_CHARS`] characters.
fn truncate_notice(mut notice: String) -> String {
    if let Some((end, _)) = notice.char_indices().nth(MAX_NOTICE_CHARS) {
        notice.truncate(end);
        notice.push('…');
    }
    notice
}

impl ErrorState {
    /// Gives `error` this number, and adds the error to the history.
    pub(super) fn record(&mut self, error: &mut Arc<ErrorRecord>, number: u64) {
        // `get_mut` succeeds: the builder has just made the error, so there is no other reference.
        if let Some(record) = Arc::get_mut(error) {
            record.id = number;
        }
        self.history.push(error.clone());
    }

    /// Adds another connection's error to the history, and makes it the last error.
    pub(super) fn adopt_last_error(&mut self, error: &Arc<ErrorRecord>) {
        self.history.push(error.clone());
        self.last_error = Some(error.clone());
    }

    /// Returns the output for the next answer. If there is none yet, creates it; it then keeps `limit` characters.
    pub(super) fn pending_output(&mut self, limit: u64) -> &Arc<Printed> {
        self.pending_output.get_or_insert_with(|| Arc::new(Printed::with_one_stream(limit)))
    }

    /// Adds a notice to the next answer.
    pub(super) fn add_notice(&mut self, text: String) {
        if self.notices.len() >= MAX_NOTICES {
            self.notices_omitted += 1;
            return;
        }
        self.notices.push(truncate_notice(text));
    }

    /// Removes a notice that waits for the next answer.
    pub(super) fn withdraw_notice(&mut self, notice: String) {
        let notice = truncate_notice(notice);
        self.notices.retain(|kept| *kept != notice);
    }

    /// Takes the notices that wait for the next answer.
    pub(super) fn take_notices(&mut self) -> Vec<String> {
        let mut notices = std::mem::take(&mut self.notices);
        match std::mem::take(&mut self.notices_omitted) {
            0 => {}
            1 => notices.push("[... 1 more notice omitted]".to_owned()),
            more => notices.push(format!("[... {more} more notices omitted]")),
        }
        notices
    }

    /// Removes the errors and the output, but keeps the notices.
    pub(super) fn reset(&mut self) {
        *self = Self { notices: self.take_notices(), ..Self::default() };
    }
}
