//! Schemas of arguments, as [`Arguments`](super::Arguments) takes them.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

pub(super) fn text(description: &str) -> Value {
    json!({"type": "string", "description": description})
}

/// A yes or no; no when it is not there, which needs no saying.
pub(super) fn flag(description: &str) -> Value {
    json!({"type": "boolean", "description": description})
}

pub(super) fn whole(range: RangeInclusive<u64>, default: u64, description: &str) -> Value {
    json!({
        "type": "integer",
        "minimum": range.start(),
        "maximum": range.end(),
        "default": default,
        "description": description,
    })
}

/// A whole number without an upper bound.
pub(super) fn whole_from(least: u64, default: Option<u64>, description: &str) -> Value {
    with_default(json!({"type": "integer", "minimum": least, "description": description}), default)
}

/// One of some words, in the table that [`Arguments::choice`](super::Arguments::choice) takes.
pub(super) fn choice<T>(choices: &[(&str, T)], default: Option<&str>, description: &str) -> Value {
    let words: Vec<_> = choices.iter().map(|(word, _)| word).collect();
    with_default(json!({"type": "string", "enum": words, "description": description}), default)
}

fn with_default(mut schema: Value, default: Option<impl Into<Value>>) -> Value {
    if let Some(default) = default {
        schema["default"] = default.into();
    }
    schema
}
