//! The records with which Lisp answers queries and operations: one structure for each kind in `lisp/build/records.sexp`.

use serde::{Deserialize, Serialize};

/// The value of a record field, as sent by Lisp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FieldValue {
    /// A string, possibly cut.
    Text(String),
    /// An integer; a flag is 1 for true.
    Number(i64),
}

/// A Rust type that a record field can have.
trait FieldType: Sized {
    /// Converts a value; returns `None` for a value of another type.
    fn from_value(value: FieldValue) -> Option<Self>;

    /// Returns the size of the heap memory that the field owns, in bytes.
    fn byte_size(&self) -> usize {
        0
    }

    /// Returns true if the field has no value.
    fn is_absent(&self) -> bool {
        false
    }
}

impl FieldType for String {
    fn from_value(value: FieldValue) -> Option<Self> {
        if let FieldValue::Text(text) = value { Some(text) } else { None }
    }

    fn byte_size(&self) -> usize {
        self.len()
    }
}

impl FieldType for u64 {
    fn from_value(value: FieldValue) -> Option<Self> {
        if let FieldValue::Number(number) = value { number.try_into().ok() } else { None }
    }
}

impl FieldType for bool {
    fn from_value(value: FieldValue) -> Option<Self> {
        u64::from_value(value).map(|number| number > 0)
    }
}

impl<T: FieldType> FieldType for Option<T> {
    fn from_value(value: FieldValue) -> Option<Self> {
        T::from_value(value).map(Some)
    }

    fn byte_size(&self) -> usize {
        self.as_ref().map_or(0, T::byte_size)
    }

    fn is_absent(&self) -> bool {
        self.is_none()
    }
}

/// The result of a test.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum TestStatus {
    /// All checks held.
    #[default]
    Passed,
    /// A check failed, or the test exceeded its time limit.
    Failed,
    /// An error ended the test.
    Error,
    /// The test did not run, checked nothing and gave a reason, or failed as expected.
    Skipped,
}

impl TestStatus {
    /// Returns true if the test failed or ended with an error.
    #[must_use]
    pub fn is_failure(self) -> bool {
        matches!(self, Self::Failed | Self::Error)
    }
}

impl FieldType for TestStatus {
    fn from_value(value: FieldValue) -> Option<Self> {
        enum_from_name(value)
    }
}

/// The way in which a traced call ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum CallEnd {
    /// The function returned.
    Returned,
    /// An error ended the call.
    Failed,
    /// A non-local exit ended the call.
    Left,
    /// The call has not ended.
    #[default]
    Running,
}

impl FieldType for CallEnd {
    fn from_value(value: FieldValue) -> Option<Self> {
        enum_from_name(value)
    }
}

/// The image in which a test passes that fails in the other image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PassingImage {
    /// The session's image.
    #[default]
    Session,
    /// The fresh image.
    Fresh,
}

impl FieldType for PassingImage {
    fn from_value(value: FieldValue) -> Option<Self> {
        enum_from_name(value)
    }
}

/// Converts a string to the enum variant whose name in serde is this string. Returns `None` if there is no such variant.
fn enum_from_name<T: for<'a> Deserialize<'a>>(value: FieldValue) -> Option<T> {
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, StringDeserializer};
    let deserializer: StringDeserializer<Error> = String::from_value(value)?.into_deserializer();
    T::deserialize(deserializer).ok()
}

/// The approximate size in bytes of a record without the text of its fields.
const RECORD_BYTES: usize = 128;

/// Defines the record structures. `sbcl_core::records` generates the argument from `lisp/build/records.sexp`.
macro_rules! records {
    ($(
        $(#[$about:meta])*
        $kind:ident $name:ident { $($(#[$says:meta])* $field:ident: $type:ty,)* }
    )*) => {
        $(
            $(#[$about])*
            #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
            #[cfg_attr(feature = "mcp", derive(schemars::JsonSchema), schemars(!default))]
            #[serde(default, rename_all = "camelCase")]
            pub struct $name {
                $($(#[$says])* #[serde(skip_serializing_if = "FieldType::is_absent")] pub $field: $type,)*
            }

            impl From<$name> for Record {
                fn from(record: $name) -> Self {
                    Self::$name(record)
                }
            }

            impl RecordKind for $name {
                fn from_record(record: &Record) -> Option<&Self> {
                    if let Record::$name(record) = record { Some(record) } else { None }
                }
            }
        )*

        /// A record of the answer to a query or an operation.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Record {
            $($(#[$about])* $name($name),)*
        }

        impl Record {
            /// Returns an empty record of the kind that Lisp calls `kind`; `None` for an unknown kind.
            pub(crate) fn empty(kind: &str) -> Option<Self> {
                match kind {
                    $(stringify!($kind) => Some(Self::$name($name::default())),)*
                    _ => None,
                }
            }

            /// Sets the field `field` to `value`. Ignores an unknown field, and a value of the wrong type.
            pub(crate) fn set(&mut self, field: &str, value: FieldValue) {
                match self {
                    $(Self::$name(record) => {
                        $(if field == stringify!($field) {
                            if let Some(value) = FieldType::from_value(value) {
                                record.$field = value;
                            }
                            return;
                        })*
                    })*
                }
            }

            /// Returns the approximate size of the record in memory, in bytes.
            pub(crate) fn byte_size(&self) -> usize {
                match self {
                    $(Self::$name(_record) => RECORD_BYTES $(+ FieldType::byte_size(&_record.$field))*,)*
                }
            }
        }
    };
}

/// A structure for one kind of record.
pub(crate) trait RecordKind: Sized {
    /// Returns the record if it is of this kind.
    fn from_record(record: &Record) -> Option<&Self>;
}

/// Returns the records of one kind, in order.
pub(crate) fn of_kind<T: RecordKind + 'static>(records: &[Record]) -> impl DoubleEndedIterator<Item = &T> {
    records.iter().filter_map(T::from_record)
}

include!(concat!(env!("OUT_DIR"), "/records.rs"));

impl Record {
    /// Returns the field for the name of the tested system; `None` for a record without this field.
    #[cfg(feature = "mcp")]
    fn system_field(&mut self) -> Option<&mut Option<String>> {
        Some(match self {
            Self::RunCounts(record) => &mut record.system,
            Self::TestResult(record) => &mut record.system,
            Self::Suspects(record) => &mut record.system,
            Self::NoSuspects(record) => &mut record.system,
            Self::Difference(record) => &mut record.system,
            Self::Directory(record) => &mut record.system,
            Self::SystemToLoad(record) => &mut record.system,
            _ => return None,
        })
    }

    /// Returns the name of the system that this record and the records after it belong to, if this record names a system.
    pub(crate) fn system(&self) -> Option<&str> {
        match self {
            Self::RunCounts(RunCounts { system, .. })
            | Self::TestResult(TestResult { system, .. })
            | Self::Suspects(Suspects { system, .. })
            | Self::NoSuspects(NoSuspects { system })
            | Self::Difference(Difference { system, .. })
            | Self::Directory(Directory { system, .. })
            | Self::SystemToLoad(SystemToLoad { system, .. }) => system.as_deref(),
            _ => None,
        }
    }

    /// Assigns the record to the system `name`, if the record has a field for a system.
    #[cfg(feature = "mcp")]
    pub(crate) fn set_system(&mut self, name: &str) {
        if let Some(system) = self.system_field() {
            *system = Some(name.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_field_ignores_values_of_another_type() {
        let mut record = Record::empty("test").unwrap();
        for (field, value) in [
            ("name", FieldValue::Text("a".to_owned())),
            ("status", FieldValue::Text("skipped".to_owned())),
            ("line", FieldValue::Number(7)),
            ("checks", FieldValue::Number(-1)),
            ("code", FieldValue::Number(0)),
            ("framework", FieldValue::Number(3)),
            ("nobody", FieldValue::Number(3)),
        ] {
            record.set(field, value);
        }
        let expected =
            TestResult { name: "a".to_owned(), status: TestStatus::Skipped, line: Some(7), ..TestResult::default() };
        assert_eq!(record, Record::TestResult(expected));
        record.set("status", FieldValue::Text("odd".to_owned()));
        assert_eq!(TestResult::from_record(&record).unwrap().status, TestStatus::Skipped);
        assert_eq!(Record::empty("odd"), None);
    }
}
