//! Arguments of calls, and their conversion to a tool's argument type.
//!
//! The conversion is lenient: numbers and booleans may be strings, names may have underscores, and `null` or an empty
//! string counts as absent.

use std::fmt::{self, Display};
use std::ops::RangeInclusive;

use rmcp::model::{JsonObject, Tool};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::StringDeserializer;
use serde::de::{DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, forward_to_deserialize_any};
use serde_json::Value;

use super::Fault;
use crate::{Limits, TimeLimit};

/// Reads the arguments of a call of `tool` as a value of `T`, the argument type of `tool`.
///
/// # Errors
/// Returns a sentence for the model if an argument is missing, unknown, or has a wrong value.
pub(super) fn read<T: DeserializeOwned>(tool: &Tool, map: JsonObject) -> Result<T, Fault> {
    T::deserialize(CallArguments { tool, map }).map_err(|ArgumentError(reason)| Fault::Refusal(reason))
}

/// An error in the arguments: a sentence, or, for the value of one argument, the end of a sentence.
#[derive(Debug)]
struct ArgumentError(String);

impl Display for ArgumentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ArgumentError {}

impl serde::de::Error for ArgumentError {
    fn custom<T: Display>(text: T) -> Self {
        Self(text.to_string())
    }

    fn duplicate_field(name: &'static str) -> Self {
        Self(format!("The argument {name} is given twice, under different names: use only the name {name}."))
    }
}

/// Returns the end of a sentence about a value that is not allowed. `allowed` describes the allowed values.
pub(super) fn describe_mismatch(allowed: &str, value: &Value) -> String {
    format!("{allowed}, not {}", abbreviate(value.to_string()))
}

/// Returns the error for a value that is not allowed.
fn value_error<E: serde::de::Error>(allowed: impl Display, value: &Value) -> E {
    E::custom(describe_mismatch(&allowed.to_string(), value))
}

/// Maximum number of arguments of a call.
const MAX_ARGUMENTS: usize = 100;
/// Maximum length of a name or path, in bytes: the maximum length of a path on Linux.
const MAX_NAME_BYTES: usize = 4096;
/// Maximum number of names in a list.
const MAX_NAMES: usize = 1_000;
/// Maximum length of all names in a list together, in bytes.
const MAX_LIST_BYTES: usize = 64 << 10;

/// The arguments of one call.
struct CallArguments<'a> {
    tool: &'a Tool,
    map: JsonObject,
}

impl<'a> CallArguments<'a> {
    fn required(&self) -> impl Iterator<Item = &'a str> {
        let required = self.tool.input_schema.get("required").and_then(Value::as_array);
        required.into_iter().flatten().filter_map(Value::as_str)
    }

    /// Replaces underscores in the names of the arguments by hyphens. Returns an error if a name is not in `known`, which
    /// has all accepted names, including those that the tool does not list; if a required argument is missing; or if there
    /// are too many arguments.
    fn normalize_names(&mut self, known: &[&str]) -> Result<(), ArgumentError> {
        if self.map.len() > MAX_ARGUMENTS {
            let (tool, given) = (&self.tool.name, self.map.len());
            return Err(ArgumentError(format!(
                "{tool}: a call may have at most {MAX_ARGUMENTS} arguments, not {given}."
            )));
        }
        let known_name = |name: String| {
            let hyphenated = name.replace('_', "-");
            if known.contains(&hyphenated.as_str()) { hyphenated } else { name }
        };
        self.map = std::mem::take(&mut self.map).into_iter().map(|(name, value)| (known_name(name), value)).collect();
        let missing = self.required().find(|name| self.map.get(*name).is_none_or(Value::is_null));
        let unknown = self.map.keys().find(|name| !known.contains(&name.as_str()));
        if missing.is_none() && unknown.is_none() {
            return Ok(());
        }
        let tool = &self.tool.name;
        let mut reason = missing.map_or_else(String::new, |name| format!("{tool} needs the argument {name}. "));
        if let Some(name) = unknown {
            reason += &format!("{tool} has no argument {}. ", quoted_excerpt(name));
        }
        let listed = self.tool.input_schema.get("properties").and_then(Value::as_object);
        let listed: Vec<_> =
            known.iter().filter(|name| listed.is_some_and(|listed| listed.contains_key(**name))).copied().collect();
        reason += &match &listed[..] {
            [] => "The tool takes no arguments.".to_owned(),
            listed => format!("The tool takes: {}.", listed.join(", ")),
        };
        Err(ArgumentError(reason))
    }
}

impl<'de> Deserializer<'de> for CallArguments<'_> {
    type Error = ArgumentError;

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ArgumentError> {
        self.normalize_names(fields)?;
        let required: Vec<_> = self.required().map(str::to_owned).collect();
        // An empty string is a valid value of a required argument, but an optional argument then counts as absent.
        let is_given = |name: &str, value: &Value| {
            !value.is_null() && (value != "" || required.iter().any(|required| required == name))
        };
        let given: Vec<_> = self.map.into_iter().filter(|(name, value)| is_given(name, value)).collect();
        visitor.visit_map(GivenArguments { tool: &self.tool.name, given: given.into_iter(), value: None })
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ArgumentError> {
        self.deserialize_struct("", &[], visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// The given arguments, in the form that serde visits.
struct GivenArguments<'a> {
    tool: &'a str,
    given: std::vec::IntoIter<(String, Value)>,
    value: Option<(String, Value)>,
}

impl<'de> MapAccess<'de> for GivenArguments<'_> {
    type Error = ArgumentError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ArgumentError> {
        self.value = self.given.next();
        let Some((name, _)) = &self.value else { return Ok(None) };
        let name: StringDeserializer<ArgumentError> = name.clone().into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ArgumentError> {
        let (name, value) = self.value.take().ok_or_else(|| ArgumentError("an argument has no name".to_owned()))?;
        let tool = self.tool;
        seed.deserialize(ArgumentValue(value))
            .map_err(|ArgumentError(allowed)| ArgumentError(format!("{tool}: {name} must be {allowed}.")))
    }
}

/// The value of one argument.
struct ArgumentValue(Value);

impl<'de> Deserializer<'de> for ArgumentValue {
    type Error = ArgumentError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ArgumentError> {
        self.0.deserialize_any(visitor).map_err(|error| ArgumentError(error.to_string()))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ArgumentError> {
        visitor.visit_some(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ArgumentError> {
        match self.0 {
            Value::String(word) if words.contains(&word.as_str()) => {
                let word: StringDeserializer<ArgumentError> = word.into_deserializer();
                visitor.visit_enum(word)
            }
            other => Err(value_error(format!("one of {}", words.join(", ")), &other)),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct seq
        tuple tuple_struct map struct identifier ignored_any
    }
}

/// Implements the schema and the conversion of an argument type. The conversion's error describes the allowed values.
macro_rules! argument {
    ($name:ident, $schema:tt, $from:expr) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let value = Value::deserialize(deserializer)?;
                let from: fn(&mut Value) -> Result<Self, String> = $from;
                let mut taken = value;
                from(&mut taken).map_err(|allowed| value_error(allowed, &taken))
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    };
}

/// A string argument. A JSON number is converted to a string, and an initial byte order mark is removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Text(pub(super) String);

argument!(Text, {"type": "string"}, |value| match value {
    Value::String(text) => {
        let text = std::mem::take(text);
        Ok(Self(text.strip_prefix(BYTE_ORDER_MARK).map_or_else(|| text.clone(), str::to_owned)))
    }
    Value::Number(number) => Ok(Self(number.to_string())),
    _ => Err("a string".to_owned()),
});

/// Returns the string of an optional argument.
pub(super) fn text(given: Option<Text>) -> Option<String> {
    given.map(|text| text.0)
}

/// A string argument that is a name or a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name(String);

argument!(Name, {"type": "string"}, |value| match serde_json::from_value(value.clone()) {
    Ok(Text(text)) if text.len() <= MAX_NAME_BYTES => Ok(Self(text)),
    _ => Err(format!("a string of at most {MAX_NAME_BYTES} bytes")),
});

/// Returns the string of an optional name.
pub(super) fn name(given: Option<Name>) -> Option<String> {
    given.map(|name| name.0)
}

/// A boolean argument, false by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(super) struct Flag(pub(super) bool);

argument!(Flag, {"type": "boolean"}, |value| {
    let word = value.as_str().map(|word| word.trim().to_ascii_lowercase());
    match (value.as_bool(), word.as_deref()) {
        (Some(flag), _) => Ok(Self(flag)),
        (_, Some("true")) => Ok(Self(true)),
        (_, Some("false")) => Ok(Self(false)),
        _ => Err("true or false".to_owned()),
    }
});

/// A list of names: an array, or a string with commas or blanks between names. Commas and blanks within parentheses or
/// quotes belong to a name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Names(pub(super) Vec<String>);

argument!(Names, {"type": "array", "items": {"type": "string"}}, |value| {
    let within_limits = |count: usize, bytes: usize| count <= MAX_NAMES && bytes <= MAX_LIST_BYTES;
    let too_long = || format!("an array of at most {MAX_NAMES} strings, with at most {MAX_LIST_BYTES} bytes in all");
    let bytes = |value: &Value| value.as_str().map_or(0, str::len);
    let is_short = match &*value {
        Value::Array(values) => within_limits(values.len(), values.iter().map(bytes).sum()),
        one => within_limits(1, bytes(one)),
    };
    if !is_short {
        return Err(too_long());
    }
    let values = match std::mem::take(value) {
        Value::Array(values) => values,
        one => vec![one],
    };
    let mut names = Vec::new();
    for given in values {
        match given {
            Value::String(name) => names.push(name),
            other => {
                *value = other;
                return Err("an array of strings".to_owned());
            }
        }
    }
    if let [text] = &names[..] {
        names = split_names(text).into_iter().map(str::to_owned).collect();
    }
    names.retain(|name| !name.trim().is_empty());
    if names.len() > MAX_NAMES {
        *value = Value::from(names);
        return Err(too_long());
    }
    Ok(Self(names))
});

/// Reads an integer in a range. The integer may be written as 10.0, or as a string.
fn integer_in(value: &Value, range: RangeInclusive<u64>) -> Option<u64> {
    let number = match value {
        Value::String(text) => parse_integer(text),
        Value::Number(number) => parse_integer(&number.to_string()),
        _ => None,
    };
    number.filter(|number| range.contains(number))
}

/// An integer from 1 to `MAX`, `DEFAULT` by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(super) struct Count<const MAX: u64, const DEFAULT: u64>(pub(super) u64);

impl<const MAX: u64, const DEFAULT: u64> Default for Count<MAX, DEFAULT> {
    fn default() -> Self {
        Self(DEFAULT)
    }
}

impl<'de, const MAX: u64, const DEFAULT: u64> Deserialize<'de> for Count<MAX, DEFAULT> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let number = integer_in(&value, 1..=MAX);
        number.map(Self).ok_or_else(|| value_error(format!("a whole number from 1 to {MAX}"), &value))
    }
}

impl<const MAX: u64, const DEFAULT: u64> JsonSchema for Count<MAX, DEFAULT> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("Count{MAX}").into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "integer", "minimum": 1, "maximum": MAX})
    }
}

/// Defines the type of an integer argument by its name, its minimum, its maximum (`None` if there is none), and the
/// description of the allowed values for error messages.
macro_rules! whole_number {
    ($(#[$about:meta])* $name:ident, $min:expr, $max:expr, $allowed:expr) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        #[serde(transparent)]
        pub(super) struct $name(pub(super) u64);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let value = Value::deserialize(deserializer)?;
                let max: Option<u64> = $max;
                let number = integer_in(&value, $min..=max.unwrap_or(u64::MAX));
                number.map(Self).ok_or_else(|| value_error($allowed, &value))
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                let mut schema = json_schema!({"type": "integer", "minimum": $min});
                let max: Option<u64> = $max;
                if let Some(max) = max {
                    schema.insert("maximum".to_owned(), max.into());
                }
                schema
            }
        }
    };
}

whole_number!(
    /// A frame's number in the backtrace, counted from 0.
    FrameNumber, 0, None, "a frame number, 0 or greater"
);
whole_number!(
    /// An evaluation's number, counted from 1.
    EvaluationNumber, 1, None, "an evaluation number, 1 or greater"
);
whole_number!(
    /// A character's index in a string, counted from 0.
    CharacterIndex, 0, None, "a character index, 0 or greater"
);
whole_number!(
    /// An integer from 1, without an upper bound.
    PositiveNumber, 1, None, "a whole number, 1 or greater"
);

/// Describes the allowed numbers of characters.
fn describe_character_range(range: &RangeInclusive<u64>) -> String {
    format!("a whole number of characters from {} to {}", range.start(), range.end())
}

whole_number!(
    /// Maximum number of characters of an evaluation's output.
    OutputCharacters, *Limits::MAX_OUTPUT_RANGE.start(), Some(*Limits::MAX_OUTPUT_RANGE.end()),
    describe_character_range(&Limits::MAX_OUTPUT_RANGE)
);
whole_number!(
    /// Maximum number of characters of an answer.
    AnswerCharacters, *Limits::MAX_ANSWER_RANGE.start(), Some(*Limits::MAX_ANSWER_RANGE.end()),
    describe_character_range(&Limits::MAX_ANSWER_RANGE)
);
/// Upper limit of a page's length, in characters.
const MAX_PAGE: u64 = 1_000_000;
whole_number!(
    /// Number of characters of a page of output, values or an error.
    PageCharacters, 1, Some(MAX_PAGE), describe_character_range(&(1..=MAX_PAGE))
);
whole_number!(
    /// Maximum number of suspects for each failing test; 0 to look for none.
    SuspectCount, 0, Some(super::MAX_SUSPECTS),
    format!("a whole number of suspects, from 0 to {}", super::MAX_SUSPECTS)
);

/// Reads a number of seconds in a range. The number may be written as a string.
pub(super) fn parse_seconds<E: serde::de::Error>(
    value: &Value,
    range: &RangeInclusive<f64>,
    allowed: impl Display,
) -> Result<f64, E> {
    parse_float(value).filter(|number| range.contains(number)).ok_or_else(|| value_error(allowed, value))
}

/// Time limit of an evaluation, in seconds. 0 is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Timeout(pub(super) TimeLimit);

argument!(Timeout, {"type": "number", "minimum": 0}, |value| {
    let seconds = parse_float(value).filter(|seconds| (0.0..=Limits::MAX_TIMEOUT_SECONDS).contains(seconds));
    let limit = seconds.and_then(|seconds| Limits::timeout_from_seconds(seconds).ok());
    let limit = limit.ok_or_else(|| format!("a number of seconds from 0 (no limit) to {}", Limits::MAX_TIMEOUT_SECONDS))?;
    Ok(Self(limit.map_or(TimeLimit::None, TimeLimit::Of)))
});

/// Splits a string at commas and blanks that are not within parentheses, `"` or `|`.
pub(crate) fn split_names(text: &str) -> Vec<&str> {
    let (mut depth, mut quote) = (0_usize, None);
    let separates = move |character: char| {
        match (character, quote) {
            (_, Some(open)) => quote = Some(open).filter(|_| character != open),
            ('"' | '|', None) => quote = Some(character),
            ('(', None) => depth += 1,
            (')', None) => depth = depth.saturating_sub(1),
            (_, None) => return depth == 0 && (character == ',' || character.is_whitespace()),
        }
        false
    };
    text.split(separates).filter(|part| !part.is_empty()).collect()
}

/// The mark that some editors put at the start of a file.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Quotes a string from the client and truncates it, for use in a message.
pub(in crate::mcp) fn quoted_excerpt(text: &str) -> String {
    abbreviate(format!("{:?}", text.chars().take(MAX_EXCERPT).collect::<String>()))
}

/// Truncates a string from the client, for use in a message.
pub(in crate::mcp) fn excerpt(text: &str) -> String {
    abbreviate(text.chars().take(MAX_EXCERPT + 1).collect())
}

/// Maximum number of characters of a string from the client in a message.
const MAX_EXCERPT: usize = 60;

fn abbreviate(mut text: String) -> String {
    if let Some((cut, _)) = text.char_indices().nth(MAX_EXCERPT) {
        text.truncate(cut);
        text.push('…');
    }
    text
}

/// Reads a number, which may be written as a string.
fn parse_float(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())
}

/// Reads a non-negative integer, which may be written as 10 or 10.0.
pub(super) fn parse_integer(text: &str) -> Option<u64> {
    let text = text.trim();
    // The conversion is exact: the float is an integer of at most 10^15.
    let float =
        |text: &str| text.parse().ok().filter(|number: &f64| number.fract() == 0.0 && (0.0..=1e15).contains(number));
    text.parse().ok().or_else(|| float(text).map(|number| number as u64))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::schema_of_arguments;

    #[derive(Debug, Deserialize, JsonSchema)]
    #[serde(rename_all = "kebab-case")]
    struct Sample {
        code: Text,
        #[serde(default, alias = "top")]
        max_count: Count<10, 4>,
        #[serde(default)]
        flag: Flag,
        name: Option<Text>,
        #[serde(default)]
        names: Names,
        word: Option<Word>,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
    #[serde(rename_all = "lowercase")]
    enum Word {
        One,
        Two,
    }

    #[derive(Debug, Deserialize, JsonSchema)]
    struct Nothing {}

    fn given<T: DeserializeOwned + JsonSchema>(arguments: Value) -> Result<T, String> {
        let Value::Object(map) = arguments else { panic!("not an object") };
        let tool = Tool::new("tool", "A tool.", schema_of_arguments::<T>());
        read(&tool, map).map_err(|fault| match fault {
            Fault::Refusal(text) => text,
            Fault::Protocol(error) => format!("{} {}", error.code.0, error.message),
        })
    }

    fn sample(arguments: Value) -> Result<Sample, String> {
        given(arguments)
    }

    #[test]
    fn unknown_and_missing_argument_names_are_refused() {
        assert!(sample(json!({"code": "1", "max-count": null})).is_ok());
        let takes = "The tool takes: code, max-count, flag, name, names, word.";
        assert_eq!(
            sample(json!({"code": "1", "max-cuont": 2})).unwrap_err(),
            format!("tool has no argument \"max-cuont\". {takes}")
        );
        assert_eq!(sample(json!({"code": null})).unwrap_err(), format!("tool needs the argument code. {takes}"));
        assert_eq!(sample(json!({"code": "1", "top": 3})).unwrap().max_count.0, 3);
        assert_eq!(
            given::<Nothing>(json!({"x": 1})).unwrap_err(),
            "tool has no argument \"x\". The tool takes no arguments."
        );
        let long = sample(json!({"code": "1", ("x".repeat(1_000_000)): 1})).unwrap_err();
        assert!(long.len() < 200, "{long}");
    }

    #[test]
    fn values_outside_the_range_are_refused() {
        let count = |value: Value| sample(json!({"code": "1", "max_count": value})).map(|sample| sample.max_count.0);
        for none in [json!(null), json!("")] {
            assert_eq!(count(none), Ok(4));
        }
        for three in [json!(3), json!(3.0), json!("3"), json!(" 3.0 ")] {
            assert_eq!(count(three), Ok(3));
        }
        for wrong in [json!(0), json!(-1), json!(1.5), json!("three"), json!([]), json!(1e300), json!(11), json!("NaN")]
        {
            let expected = format!("tool: max-count must be a whole number from 1 to 10, not {wrong}.");
            assert_eq!(count(wrong), Err(expected));
        }
    }

    #[test]
    fn name_lists_are_split_outside_parentheses_and_quotes() {
        for (given, expected) in [
            (json!("a, b"), vec!["a", "b"]),
            (json!(" a\n,b c,"), vec!["a", "b", "c"]),
            (json!(["a", "", "(b\"", "c"]), vec!["a", "(b\"", "c"]),
            (
                json!("(setf a) |b c|, (method d (e f)) \"g h\""),
                vec!["(setf a)", "|b c|", "(method d (e f))", "\"g h\""],
            ),
            (json!("a) b"), vec!["a)", "b"]),
        ] {
            assert_eq!(sample(json!({"code": "1", "names": given})).unwrap().names.0, expected);
        }
    }

    #[test]
    fn names_and_lists_beyond_their_limits_are_refused() {
        let names = |given: Value| sample(json!({"code": "1", "names": given})).map(|sample| sample.names.0.len());
        assert_eq!(names(json!(vec!["a"; MAX_NAMES])), Ok(MAX_NAMES));
        assert_eq!(names(json!("a,".repeat(MAX_NAMES))), Ok(MAX_NAMES));
        for long in [json!(vec!["a"; MAX_NAMES + 1]), json!("a,".repeat(MAX_NAMES + 1)), json!("a".repeat(65_537))] {
            let reason = names(long).unwrap_err();
            assert!(reason.starts_with("tool: names must be an array of at most 1000 strings, with at most 65536"));
            assert!(reason.len() < 250, "{reason}");
        }
        let name = |length: usize| serde_json::from_value::<Name>(json!("x".repeat(length)));
        assert!(name(MAX_NAME_BYTES).is_ok());
        let reason = name(MAX_NAME_BYTES + 1).unwrap_err().to_string();
        assert!(reason.starts_with("a string of at most 4096 bytes, not \"xxx") && reason.len() < 150, "{reason}");
        let many: serde_json::Map<_, _> = (0..=MAX_ARGUMENTS).map(|n| (n.to_string(), Value::Null)).collect();
        assert_eq!(sample(Value::Object(many)).unwrap_err(), "tool: a call may have at most 100 arguments, not 101.");
    }

    #[test]
    fn texts_flags_and_words_are_converted_leniently() {
        for (value, expected) in [(json!(7), "7"), (json!(1.5), "1.5"), (json!("\u{feff}(f)"), "(f)"), (json!(""), "")]
        {
            assert_eq!(sample(json!({"code": value})).unwrap().code.0, expected);
        }
        for (value, expected) in
            [(json!("TRUE"), true), (json!("false"), false), (json!(true), true), (json!(""), false)]
        {
            assert_eq!(sample(json!({"code": "1", "flag": value})).unwrap().flag.0, expected);
        }
        let wrong = |arguments: Value| sample(arguments).unwrap_err();
        assert_eq!(wrong(json!({"code": ["x"]})), "tool: code must be a string, not [\"x\"].");
        assert_eq!(wrong(json!({"code": "1", "flag": "yes"})), "tool: flag must be true or false, not \"yes\".");
        assert_eq!(sample(json!({"code": "1", "name": ""})).unwrap().name, None);
        assert_eq!(sample(json!({"code": "1", "word": "two"})).unwrap().word, Some(Word::Two));
        assert_eq!(wrong(json!({"code": "1", "word": "three"})), "tool: word must be one of one, two, not \"three\".");
        assert_eq!(wrong(json!({"code": "1", "word": 3})), "tool: word must be one of one, two, not 3.");
    }

    #[test]
    fn argument_schemas_use_only_keywords_that_every_client_understands() {
        assert_eq!(
            Value::Object(schema_of_arguments::<Sample>()),
            json!({
                "type": "object",
                "properties": {
                    "code": {"type": "string"},
                    "max-count": {"type": "integer", "minimum": 1, "maximum": 10, "default": 4},
                    "flag": {"type": "boolean"},
                    "name": {"type": "string"},
                    "names": {"type": "array", "items": {"type": "string"}},
                    "word": {"type": "string", "enum": ["one", "two"]},
                },
                "required": ["code"],
            })
        );
        assert_eq!(Value::Object(schema_of_arguments::<Nothing>()), json!({"type": "object", "properties": {}}));
    }
}
