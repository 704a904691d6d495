//! A tool's result, before it becomes text or structured content.

use std::fmt::Debug;
use std::sync::Arc;

use serde_json::Value;

use super::tools::reply_of;
use crate::schema::{Refusal, json};
use crate::{Outcome, report};

/// The result of a tool as plain data. Its text and its structured content have the same meaning.
pub(super) trait ToolResult: Debug + Send {
    /// Returns the text for the client. Lists are shortened to `max` characters; [`Reply`] truncates any other text.
    fn text(&self, max: usize) -> String;

    /// Drops the least important parts, if the text has more than `max` characters.
    fn fit(&mut self, _max: usize) {}

    /// Returns the structured content that goes with a text of at most `max` characters.
    fn structured_content(&self, max: usize) -> Value;

    /// Returns true if the call has failed.
    fn is_error(&self) -> bool {
        false
    }
}

/// The reply to a call.
#[derive(Debug)]
pub(super) struct Reply(Box<dyn ToolResult>);

impl<F: ToolResult + 'static> From<F> for Reply {
    fn from(finding: F) -> Self {
        Self(Box::new(finding))
    }
}

impl Reply {
    /// Returns the text for the client, of at most `max` characters. Afterwards, [`Self::structured_content`] matches the
    /// text.
    pub(super) fn text(&mut self, max: usize) -> String {
        let text = self.0.text(max);
        if text.len() <= max || text.chars().count() <= max {
            return text;
        }
        self.0.fit(max);
        report::cut(self.0.text(max), max)
    }

    /// Returns the text for use in another reply. Lists are shortened to `max` characters; other text is not truncated.
    pub(super) fn untruncated_text(&self, max: usize) -> String {
        self.0.text(max)
    }

    /// Drops the least important parts, if the text has more than `max` characters.
    pub(super) fn fit(&mut self, max: usize) {
        self.0.fit(max);
    }

    /// Returns the structured content that goes with a text of at most `max` characters.
    pub(super) fn structured_content(&self, max: usize) -> Value {
        self.0.structured_content(max)
    }

    /// Returns true if the call has failed.
    pub(super) fn is_error(&self) -> bool {
        self.0.is_error()
    }
}

impl From<Outcome> for Reply {
    fn from(outcome: Outcome) -> Self {
        Arc::new(outcome).into()
    }
}

impl From<Arc<Outcome>> for Reply {
    fn from(outcome: Arc<Outcome>) -> Self {
        reply_of(outcome)
    }
}

/// The refusal of a call, for instance because of a wrong argument: a sentence for the model.
#[derive(Debug)]
pub(super) struct CallRefusal(pub(super) String);

impl ToolResult for CallRefusal {
    fn text(&self, _: usize) -> String {
        self.0.clone()
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&Refusal { refused: &self.0 })
    }

    fn is_error(&self) -> bool {
        true
    }
}
