//! The error history of a connection.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::outcome::ErrorRecord;

/// The maximum number of errors that are kept.
const MAX_ERRORS: usize = 200;
/// The memory limit of all kept errors together, in bytes.
const MAX_BYTES: usize = 8 << 20;

/// The last errors, oldest first: at most [`MAX_ERRORS`] errors of at most [`MAX_BYTES`] together. The newest error is
/// kept whatever its size.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct History {
    errors: VecDeque<Arc<ErrorRecord>>,
    bytes: usize,
}

impl History {
    /// Adds an error. Drops the oldest errors if there is no room.
    pub(crate) fn push(&mut self, error: Arc<ErrorRecord>) {
        self.bytes += error.byte_size();
        self.errors.push_back(error);
        self.trim_to(MAX_BYTES);
    }

    /// Drops the oldest errors until at most [`MAX_ERRORS`] errors remain and take at most `bytes` together. The newest
    /// error stays. Returns true if errors were dropped.
    pub(crate) fn trim_to(&mut self, bytes: usize) -> bool {
        let before = self.errors.len();
        while self.errors.len() > MAX_ERRORS || self.bytes > bytes && self.errors.len() > 1 {
            let oldest = self.errors.pop_front();
            self.bytes -= oldest.map_or(0, |error| error.byte_size());
        }
        self.errors.len() < before
    }

    /// Returns true if there are [`MAX_ERRORS`] errors.
    #[cfg(feature = "mcp")]
    pub(crate) fn is_full(&self) -> bool {
        self.errors.len() == MAX_ERRORS
    }

    /// Finds an error by its number.
    pub(crate) fn get(&self, id: u64) -> Option<&Arc<ErrorRecord>> {
        self.errors.iter().find(|error| error.id == id)
    }

    /// Iterates over the errors, newest first.
    pub(crate) fn newest_first(&self) -> impl Iterator<Item = &Arc<ErrorRecord>> {
        self.errors.iter().rev()
    }
}
