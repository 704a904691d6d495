//! What a tool has to say, before it is worded.

use std::fmt::Debug;
use std::sync::Arc;

use serde_json::Value;

use super::tools::reply_of;
use crate::schema::{Refusal, json};
use crate::{Outcome, report};

/// What a tool has to say, as plain data: its text and its structured content tell the same.
pub(super) trait Finding: Debug + Send {
    /// What a client reads. Lists are as long as there is room in `max` characters; what else is longer is cut by [`Reply`].
    fn text(&self, max: usize) -> String;

    /// Leaves out what is worth least, where the text has more than `max` characters.
    fn fit(&mut self, _max: usize) {}

    /// The structured content of an answer whose text has at most `max` characters.
    fn content(&self, max: usize) -> Value;

    /// True when the call has failed.
    fn is_error(&self) -> bool {
        false
    }
}

/// The reply to a call.
#[derive(Debug)]
pub(super) struct Reply(Box<dyn Finding>);

impl<F: Finding + 'static> From<F> for Reply {
    fn from(finding: F) -> Self {
        Self(Box::new(finding))
    }
}

impl Reply {
    /// What a client reads, in at most `max` characters; the content is what there is to be said in so many.
    pub(super) fn text(&mut self, max: usize) -> String {
        let text = self.0.text(max);
        if text.len() <= max || text.chars().count() <= max {
            return text;
        }
        self.0.fit(max);
        report::cut(self.0.text(max), max)
    }

    /// The text of a part of an answer, which is not cut here.
    pub(super) fn part(&self, max: usize) -> String {
        self.0.text(max)
    }

    /// Leaves out what is worth least, where the text has more than `max` characters.
    pub(super) fn fit(&mut self, max: usize) {
        self.0.fit(max);
    }

    /// The structured content of an answer whose text has at most `max` characters.
    pub(super) fn content(&self, max: usize) -> Value {
        self.0.content(max)
    }

    /// True when the call has failed.
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

/// A wrong value: a sentence for whoever chose it.
#[derive(Debug)]
pub(super) struct Refused(pub(super) String);

impl Finding for Refused {
    fn text(&self, _: usize) -> String {
        self.0.clone()
    }

    fn content(&self, _: usize) -> Value {
        json(&Refusal { refused: &self.0 })
    }

    fn is_error(&self) -> bool {
        true
    }
}
