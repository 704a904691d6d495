//! The structured content of an error.

use schemars::JsonSchema;
use serde::Serialize;

use super::clipped;
use crate::ErrorRecord;
use crate::outcome::{FormPosition, FrameRecord, Local, LocalValue, RestartRecord, Slot};
use crate::report;

/// The summary of an error in a list of errors.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ErrorSummary {
    #[serde(rename = "type")]
    class: String,
    message: String,
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    form: Option<FormPosition>,
}

impl ErrorSummary {
    pub(crate) fn new(error: &ErrorRecord) -> Self {
        Self {
            class: error.kind.clone(),
            message: clipped(&error.message),
            time: report::time(error).to_string(),
            id: (error.id > 0).then(|| format!("E{}", error.id)),
            form: error.form.clone(),
        }
    }
}

/// An error with some of its frames.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ErrorDetails {
    #[serde(flatten)]
    summary: ErrorSummary,
    slots: Vec<Slot>,
    restarts: Vec<RestartRecord>,
    frames: Vec<FrameContent>,
    total_frames: u64,
}

impl ErrorDetails {
    /// Creates the content with these frames, and with their local variables if `locals` is true.
    pub(crate) fn new<'a>(
        error: &ErrorRecord,
        frames: impl IntoIterator<Item = &'a FrameRecord>,
        locals: bool,
    ) -> Self {
        Self {
            summary: ErrorSummary::new(error),
            slots: error.slots.clone(),
            restarts: error.restarts.clone(),
            frames: frames.into_iter().map(|frame| FrameContent::new(frame, locals)).collect(),
            total_frames: error.total_frames,
        }
    }
}

/// A frame. The call is given as a whole, and also split into function and arguments.
#[derive(Debug, Serialize, JsonSchema)]
struct FrameContent {
    number: u64,
    call: String,
    function: String,
    arguments: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    machinery: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    locals: Option<Vec<LocalVariable>>,
}

impl FrameContent {
    fn new(frame: &FrameRecord, locals: bool) -> Self {
        let (function, arguments) = split_call(&frame.call);
        Self {
            number: frame.number,
            call: frame.call.clone(),
            function: function.to_owned(),
            arguments: arguments.to_owned(),
            source: frame.source.clone(),
            code: frame.code.clone(),
            machinery: frame.machinery.clone(),
            locals: locals.then(|| frame.locals.iter().map(LocalVariable::new).collect()),
        }
    }
}

/// Splits a printed call into the function and the arguments.
fn split_call(call: &str) -> (&str, &str) {
    let inner = call.strip_prefix('(').unwrap_or(call);
    let inner = inner.strip_suffix(')').unwrap_or(inner);
    let (mut depth, mut quote, mut escaped) = (0, None, false);
    for (index, character) in inner.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' | '|' if quote.is_none() => quote = Some(character),
            _ if quote == Some(character) => quote = None,
            _ if quote.is_some() => {}
            '(' => depth += 1,
            ')' => depth -= 1,
            ' ' if depth == 0 => return (&inner[..index], &inner[index + 1..]),
            _ => {}
        }
    }
    (inner, "")
}

/// A local variable: its value, or the reason why the value is not known.
#[derive(Debug, Serialize, JsonSchema)]
struct LocalVariable {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<UnknownReason>,
}

#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
enum UnknownReason {
    #[serde(rename = "dead here")]
    Dead,
    #[serde(rename = "unavailable")]
    Unavailable,
}

impl LocalVariable {
    fn new(local: &Local) -> Self {
        let (value, unknown) = match &local.value {
            LocalValue::Value(value) => (Some(value.clone()), None),
            LocalValue::Dead => (None, Some(UnknownReason::Dead)),
            LocalValue::Unavailable => (None, Some(UnknownReason::Unavailable)),
        };
        Self { name: local.name.clone(), value, unknown }
    }
}

#[cfg(test)]
mod tests {
    use super::split_call;

    #[test]
    fn calls_are_split_into_function_and_arguments() {
        for (call, function, arguments) in [
            ("(FOO 1 \"x y\")", "FOO", "1 \"x y\""),
            ("(FOO)", "FOO", ""),
            ("((LAMBDA (X) :IN BAR) 3)", "(LAMBDA (X) :IN BAR)", "3"),
            ("((SETF |a b|) 1 2)", "(SETF |a b|)", "1 2"),
            ("(|a b| 1)", "|a b|", "1"),
            ("(\"foreign function: read\")", "\"foreign function: read\"", ""),
            ("((FLET \"BODY (1\" :IN A\\ B))", "(FLET \"BODY (1\" :IN A\\ B)", ""),
            ("", "", ""),
        ] {
            assert_eq!(split_call(call), (function, arguments), "{call}");
        }
    }
}
