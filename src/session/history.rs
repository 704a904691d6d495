//! The last errors of a session.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::outcome::ErrorRecord;

/// How many errors are kept.
const ERRORS: usize = 200;
/// Bytes that they take together at most.
const BYTES: usize = 8 << 20;

/// The last errors, oldest first, within bounds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct History {
    errors: VecDeque<Arc<ErrorRecord>>,
    bytes: usize,
}

impl History {
    /// Adds an error; the oldest ones make room.
    pub(crate) fn push(&mut self, error: Arc<ErrorRecord>) {
        self.bytes += error.bytes();
        self.errors.push_back(error);
        self.limit(BYTES);
    }

    /// Drops the oldest errors until the rest takes at most so many bytes. The newest error stays.
    pub(crate) fn limit(&mut self, bytes: usize) {
        while self.errors.len() > ERRORS || self.bytes > bytes && self.errors.len() > 1 {
            let oldest = self.errors.pop_front();
            self.bytes -= oldest.map_or(0, |error| error.bytes());
        }
    }

    /// The error with this number.
    pub(crate) fn get(&self, id: u64) -> Option<&Arc<ErrorRecord>> {
        self.errors.iter().find(|error| error.id == id)
    }

    /// Newest first.
    pub(crate) fn newest_first(&self) -> impl Iterator<Item = &Arc<ErrorRecord>> {
        self.errors.iter().rev()
    }
}
