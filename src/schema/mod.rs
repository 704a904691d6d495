//! The structured content of results, as JSON, and its schemas. Structured content has the same meaning as the text.
//!
//! Strings are as Lisp printed them, without the text format's escapes: in JSON no string can be mistaken for a marker.
//! Truncated strings end as in the text, with the number of omitted characters. Properties without a value are omitted.
//!
//! Content that only one tool has is defined in that tool's file.

mod error;
mod evaluation;
mod tests;

use rmcp::model::JsonObject;
use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::outcome::Clipped;
use crate::report;

pub(crate) use error::{ErrorDetails, ErrorSummary};
pub(crate) use evaluation::{Evaluation, LoadReport};
pub(crate) use tests::Tests;

/// Encodes content as JSON.
pub(crate) fn json(content: &impl Serialize) -> Value {
    serde_json::to_value(content).unwrap_or_default()
}

/// Structured content of a refused call, in place of all other content.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Refusal<'a> {
    #[schemars(extend("says" = "Reason for the refusal; all other fields are absent."))]
    pub(crate) refused: &'a str,
}

/// Returns the kept text, followed by the number of omitted characters if it was truncated.
fn clipped(text: &Clipped) -> String {
    let mut result = text.text.clone();
    if text.omitted > 0 {
        result.push_str(&report::omission_marker(text.omitted));
    }
    result
}

/// Converts milliseconds to seconds.
fn seconds(milliseconds: u64) -> f64 {
    // The conversion of the integer is exact, since no duration reaches 2^53 milliseconds.
    milliseconds as f64 / 1000.0
}

/// A transform that reduces a schema to keywords that all clients understand: one `type` each, no `$ref`, no `anyOf`.
/// The extension keyword `says` becomes the description.
struct PlainSchema {
    /// True to use doc comments as descriptions.
    keep_descriptions: bool,
}

impl Transform for PlainSchema {
    fn transform(&mut self, schema: &mut Schema) {
        transform_subschemas(self, schema);
        let Some(map) = schema.as_object_mut() else { return };
        for name in ["format", "title", "$schema", "additionalProperties"] {
            map.remove(name);
        }
        if !self.keep_descriptions {
            map.remove("description");
        }
        if let Some(says) = map.remove("says") {
            map.insert("description".to_owned(), says);
        }
        if map.get("default").is_some_and(|default| matches!(default, Value::Null | Value::Bool(false))) {
            map.remove("default");
        }
        // An optional property keeps the type of its value: it may be missing, but is never null.
        if let Some(Value::Array(types)) = map.get("type") {
            let of = types.iter().find(|name| *name != "null").cloned();
            map.extend(of.map(|of| ("type".to_owned(), of)));
        }
        if let Some(Value::Array(words)) = map.get_mut("enum") {
            words.retain(|word| !word.is_null());
        }
        // If an enum's variants have doc comments, schemars writes the enum as `oneOf`.
        if let Some(Value::Array(choices)) = map.remove("oneOf") {
            let words = choices.iter().filter_map(|choice| choice.get("const").cloned()).collect();
            map.insert("type".to_owned(), "string".into());
            map.insert("enum".to_owned(), words);
        }
        if let Some(Value::Array(choices)) = map.remove("anyOf")
            && let Some(Value::Object(choice)) =
                choices.into_iter().find(|choice| choice.get("type").is_none_or(|name| name != "null"))
        {
            for (name, value) in choice {
                map.entry(name).or_insert(value);
            }
        }
    }
}

fn plain_schema<T: JsonSchema>(keep_descriptions: bool) -> JsonObject {
    let mut settings = SchemaSettings::draft2020_12();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    PlainSchema { keep_descriptions }.transform(&mut schema);
    let map = schema.as_object_mut().map(std::mem::take).unwrap_or_default();
    // The keywords come in the order in which people read a schema.
    let mut ordered = Map::new();
    for name in ["type", "properties", "required"] {
        ordered.extend(map.get(name).map(|value| (name.to_owned(), value.clone())));
    }
    ordered
}

/// Returns the schema of a tool's arguments. Doc comments of the fields become descriptions.
pub(crate) fn schema_of_arguments<T: JsonSchema>() -> JsonObject {
    let mut schema = plain_schema::<T>(true);
    schema.entry("properties").or_insert_with(|| Map::new().into());
    schema
}

/// Returns the schema of a tool's result. No property is required, since a refused call has only `refused`.
pub(crate) fn schema_of_result<T: JsonSchema>() -> JsonObject {
    let [mut schema, mut refusal] = [plain_schema::<T>(false), plain_schema::<Refusal<'_>>(false)];
    schema.remove("required");
    let properties = schema.entry("properties").or_insert_with(|| Map::new().into());
    if let (Some(properties), Some(Value::Object(refused))) = (properties.as_object_mut(), refusal.remove("properties"))
    {
        properties.extend(refused);
    }
    schema
}
