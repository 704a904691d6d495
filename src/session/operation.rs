//! Operations and queries that Lisp runs by name, and the records that they return. The Lisp side is in
//! lisp/core/operations.lisp.

use std::fmt::{self, Display, Formatter};

use super::events::{ClippedBuffer, JobEnd, clip_name, first_chars};
use crate::error::InspectError;
use crate::image::{Event, Text};
use crate::os::helper_threads;
use crate::outcome::{FieldValue, LoadProgress, Loading, Omitted, Record, System, of_kind};

/// The maximum number of records in one answer, and the maximum size of these records together, in bytes. Operations
/// have smaller limits of their own.
const MAX_RECORDS: usize = 10_000;
const MAX_BYTES: usize = 4 << 20;
/// The maximum number of characters that are kept of one field.
const MAX_FIELD: u64 = 10_000;

/// An argument of an operation, in Lisp syntax.
pub(crate) struct Argument(String);

/// Quotes a string for Lisp's reader with standard syntax.
pub(crate) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

impl From<&str> for Argument {
    fn from(text: &str) -> Self {
        Self(quoted(text))
    }
}

impl From<String> for Argument {
    fn from(text: String) -> Self {
        Self(quoted(&text))
    }
}

impl From<u64> for Argument {
    fn from(number: u64) -> Self {
        Self(number.to_string())
    }
}

impl From<bool> for Argument {
    fn from(flag: bool) -> Self {
        Self(if flag { "T" } else { "NIL" }.to_owned())
    }
}

impl From<Vec<String>> for Argument {
    fn from(texts: Vec<String>) -> Self {
        Self(format!("({})", texts.iter().map(|text| quoted(text)).collect::<String>()))
    }
}

impl From<Vec<Operation>> for Argument {
    fn from(operations: Vec<Operation>) -> Self {
        Self(format!("({})", operations.iter().map(Operation::to_string).collect::<String>()))
    }
}

/// A query, or an operation that replaces the plain evaluation of code, with its arguments. The operation is displayed in Lisp
/// syntax.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Operation {
    /// The Lisp list that names the operation and its arguments, without the closing parenthesis.
    text: String,
    /// True if the operation reports handled errors, which its records refer to.
    pub(super) has_errors: bool,
}

impl Operation {
    /// Creates an operation without arguments. `name` is the name under which `define-query` or `define-operation`
    /// defines it in Lisp.
    pub(crate) fn new(name: &str) -> Self {
        Self { text: format!("(:{name}"), has_errors: false }
    }

    /// Declares that the operation reports handled errors, to which its records refer. The errors are added to the
    /// history and to the outcome.
    #[must_use]
    pub(crate) fn with_errors(self) -> Self {
        Self { has_errors: true, ..self }
    }

    /// Adds an argument.
    #[must_use]
    pub(crate) fn with(mut self, name: &str, value: impl Into<Argument>) -> Self {
        self.text += &format!(" :{name} {}", value.into().0);
        self
    }

    /// Adds an argument unless `value` is `None`.
    #[must_use]
    pub(crate) fn with_optional(self, name: &str, value: Option<impl Into<Argument>>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }
}

impl Display for Operation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{})", self.text)
    }
}

/// A builder that makes records from events. Records beyond the limits are counted in a last record, [`Omitted`].
#[derive(Debug, Default)]
pub(super) struct RecordsBuilder {
    records: Vec<Record>,
    /// The field begun last: its name and its value, which is the text if there is one, and the number otherwise.
    field: Option<(String, i64, Option<ClippedBuffer>)>,
    bytes: usize,
    omitted: u64,
    error: Option<(String, ClippedBuffer)>,
}

/// Converts Lisp's name of a record or field to the spelling of the [record table](crate::outcome::Record):
/// lowercase, with underscores.
fn record_name(text: Text<'_>) -> String {
    first_chars(text, 100).to_ascii_lowercase().replace('-', "_")
}

impl RecordsBuilder {
    /// Handles an event. Returns true if Lisp may stop printing the text begun last.
    pub(super) fn handle_event(&mut self, event: Event<'_>) -> bool {
        match event {
            Event::Record(kind) => {
                self.end_field();
                self.bytes += self.records.last().map_or(0, Record::byte_size);
                if self.omitted > 0 || self.records.len() >= MAX_RECORDS || self.bytes >= MAX_BYTES {
                    self.omitted += 1;
                } else {
                    let kind = record_name(kind);
                    match Record::empty(&kind) {
                        Some(record) => self.records.push(record),
                        // The scheduler's lock is held here, and a tracing subscriber may call the session.
                        None => helper_threads::run(move || {
                            tracing::error!("Lisp reported a record of unknown kind {kind:?}: please report this bug");
                        }),
                    }
                }
            }
            Event::Field(field, number) => {
                self.end_field();
                self.field = Some((record_name(field), number, None));
            }
            Event::FieldText(text) => {
                let Some((_, _, buffer)) = &mut self.field else { return true };
                let buffer = buffer.get_or_insert_with(|| ClippedBuffer::new(MAX_FIELD));
                if self.omitted == 0 {
                    buffer.push(text);
                }
                return self.omitted > 0 || buffer.has_enough();
            }
            Event::Error { kind, .. } => self.error = Some((clip_name(kind), ClippedBuffer::new(MAX_FIELD))),
            Event::ErrorText { text, replaces } => {
                if let Some((_, message)) = &mut self.error {
                    if replaces {
                        *message = ClippedBuffer::new(MAX_FIELD);
                    }
                    message.push(text);
                    return message.has_enough();
                }
            }
            _ => {}
        }
        false
    }

    /// Returns the record begun last if it is a [`System`] record, which introduces the results of one tested system.
    pub(super) fn last_system(&mut self) -> Option<&mut System> {
        match self.records.last_mut().filter(|_| self.omitted == 0)? {
            Record::System(system) => Some(system),
            _ => None,
        }
    }

    fn end_field(&mut self) {
        let Some((name, number, text)) = self.field.take() else { return };
        if let Some(record) = self.records.last_mut().filter(|_| self.omitted == 0) {
            let text = text.map(|text| FieldValue::Text(crate::outcome::Clipped::from(text).text));
            record.set(&name, text.unwrap_or(FieldValue::Number(number)));
        }
    }

    /// Returns true if the records are those of a load.
    pub(super) fn reports_load(&self) -> bool {
        of_kind::<Loading>(&self.records).next().is_some()
    }

    /// Returns the progress messages of loads so far, one per line.
    pub(super) fn progress(&self) -> String {
        let is_progress = self.omitted == 0 && matches!(self.records.last(), Some(Record::LoadProgress(_)));
        let last = self.field.as_ref().filter(|_| is_progress).and_then(|(_, _, text)| text.as_ref());
        let messages = of_kind(&self.records).map(|progress: &LoadProgress| &*progress.message);
        let messages = messages.filter(|message| !message.is_empty());
        messages.chain(last.map(ClippedBuffer::as_str)).flat_map(|message| [message, "\n"]).collect()
    }

    /// Returns the records so far.
    pub(super) fn records(mut self) -> Vec<Record> {
        self.end_field();
        if self.omitted > 0 {
            self.records.push(Omitted { count: self.omitted }.into());
        }
        self.records
    }

    /// Returns the records of a query, or the error that ended the query. `end` is the way in which its job ended.
    pub(super) fn finish(self, end: JobEnd) -> Result<Vec<Record>, InspectError> {
        if end == JobEnd::Succeeded {
            return Ok(self.records());
        }
        let error = self.error.map(|(kind, message)| (kind, crate::outcome::Clipped::from(message).text));
        Err(end.inspection_error(error))
    }
}

#[cfg(test)]
mod tests {
    use super::Operation;

    #[test]
    fn operations_are_displayed_in_lisp_syntax() {
        let operation = Operation::new("find-symbols")
            .with("query", r#"a"b\c"#)
            .with("limit", 30)
            .with("external", true)
            .with_optional("package", None::<String>)
            .with("names", vec!["x".to_owned(), "y z".to_owned()])
            .with("all", vec![Operation::new("a").with("b", true), Operation::new("c")]);
        assert_eq!(
            operation.to_string(),
            r#"(:find-symbols :query "a\"b\\c" :limit 30 :external T :names ("x""y z") :all ((:a :b T)(:c)))"#
        );
    }
}
