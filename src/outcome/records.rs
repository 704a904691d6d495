//! The records by which Lisp answers queries and operations: a structure for each kind in `lisp/build/records.sexp`.

use serde::{Deserialize, Serialize};

/// What Lisp says of a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FieldValue {
    /// A string, as far as it was kept.
    Text(String),
    /// An integer; 1 for true.
    Number(i64),
}

/// What a field can hold.
trait FieldType: Sized {
    /// Takes a value; `None` where it is of another type.
    fn from_value(value: FieldValue) -> Option<Self>;

    /// The memory that it takes beside its own size, in bytes.
    fn bytes(&self) -> usize {
        0
    }

    /// True where there is nothing to tell of.
    fn is_absent(&self) -> bool {
        false
    }
}

impl FieldType for String {
    fn from_value(value: FieldValue) -> Option<Self> {
        if let FieldValue::Text(text) = value { Some(text) } else { None }
    }

    fn bytes(&self) -> usize {
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

    fn bytes(&self) -> usize {
        self.as_ref().map_or(0, T::bytes)
    }

    fn is_absent(&self) -> bool {
        self.is_none()
    }
}

/// What a test came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum TestStatus {
    /// All its checks held.
    #[default]
    Passed,
    /// A check did not hold, or it took too long.
    Failed,
    /// An error ended it.
    Error,
    /// It was not run, or checked nothing for a reason that it gave.
    Skipped,
}

impl TestStatus {
    /// True for one of those that tell of a fault.
    #[must_use]
    pub fn is_failure(self) -> bool {
        matches!(self, Self::Failed | Self::Error)
    }
}

impl FieldType for TestStatus {
    fn from_value(value: FieldValue) -> Option<Self> {
        word(value)
    }
}

/// How a traced call ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum CallEnd {
    /// It returned values.
    Returned,
    /// With an error.
    Failed,
    /// By a non-local exit.
    Left,
    /// It has not.
    #[default]
    Running,
}

impl FieldType for CallEnd {
    fn from_value(value: FieldValue) -> Option<Self> {
        word(value)
    }
}

/// Which image a test passes in that fails in the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PassingImage {
    /// The session's.
    #[default]
    Session,
    /// The fresh one.
    Fresh,
}

impl FieldType for PassingImage {
    fn from_value(value: FieldValue) -> Option<Self> {
        word(value)
    }
}

/// Reads one of the words of an enum.
fn word<T: for<'a> Deserialize<'a>>(value: FieldValue) -> Option<T> {
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, StringDeserializer};
    let word: StringDeserializer<Error> = String::from_value(value)?.into_deserializer();
    T::deserialize(word).ok()
}

/// Bytes of a record without its texts, about.
const RECORD: usize = 128;

/// Defines the structures; its argument is made of `lisp/build/records.sexp` by `sbcl_core::records`.
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
                fn of(record: &Record) -> Option<&Self> {
                    if let Record::$name(record) = record { Some(record) } else { None }
                }
            }
        )*

        /// One thing that a query or an operation found.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Record {
            $($(#[$about])* $name($name),)*
        }

        impl Record {
            /// An empty record of the kind that Lisp calls so; `None` when there is none.
            pub(crate) fn begin(kind: &str) -> Option<Self> {
                match kind {
                    $(stringify!($kind) => Some(Self::$name($name::default())),)*
                    _ => None,
                }
            }

            /// Gives a field its value. Nothing happens when there is no such field, or it holds no such value.
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

            /// How much memory it takes, about.
            pub(crate) fn bytes(&self) -> usize {
                match self {
                    $(Self::$name(_record) => RECORD $(+ FieldType::bytes(&_record.$field))*,)*
                }
            }
        }
    };
}

/// A kind of record.
pub(crate) trait RecordKind: Sized {
    /// The record, if it is of this kind.
    fn of(record: &Record) -> Option<&Self>;
}

/// Those of the records that are of one kind.
pub(crate) fn of_kind<T: RecordKind + 'static>(records: &[Record]) -> impl DoubleEndedIterator<Item = &T> {
    records.iter().filter_map(T::of)
}

include!(concat!(env!("OUT_DIR"), "/records.rs"));

impl Record {
    /// The field that says which of several systems it is about, if it has one.
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

    /// Which of several systems it, and what comes after it, is about, if it says so.
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

    /// Has it be about this one of several systems, if it can say so.
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
    fn fields_take_values_of_their_own_type_alone() {
        let mut record = Record::begin("test").unwrap();
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
        assert_eq!(TestResult::of(&record).unwrap().status, TestStatus::Skipped);
        assert_eq!(Record::begin("odd"), None);
    }
}
