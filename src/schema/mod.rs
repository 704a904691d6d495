//! The structured content of a tool's result: what its text says, as JSON, and the schemas of that.
//!
//! Text is as Lisp wrote it: nothing is escaped here, since nothing can pass for a marker. What was cut ends as in the
//! text, with the number of characters that were left out. A property without a value is missing.
//!
//! The content that one tool alone has is in the file of that tool.

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

pub(crate) use error::{Failure, Summary};
pub(crate) use evaluation::{Evaluation, LoadReport};
pub(crate) use tests::Tests;

/// Writes content as JSON.
pub(crate) fn json(content: &impl Serialize) -> Value {
    serde_json::to_value(content).unwrap_or_default()
}

/// Replaces all else where the call was wrong.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Refusal<'a> {
    #[schemars(extend("says" = "In place of all else: what was wrong with the call."))]
    pub(crate) refused: &'a str,
}

/// A text, and how much of it was left out.
fn clipped(text: &Clipped) -> String {
    let mut result = text.text.clone();
    if text.omitted > 0 {
        result.push_str(&report::omission(text.omitted));
    }
    result
}

/// Seconds of so many milliseconds.
fn seconds(milliseconds: u64) -> f64 {
    // Some days at most: nothing is lost.
    milliseconds as f64 / 1000.0
}

/// Says what every client's converter understands, and no more: one `type` each, no `$ref`, no `anyOf`. What is documented
/// is for programmers; a description is an extension `says`.
struct Plain {
    /// The documentation is the description.
    documented: bool,
}

impl Transform for Plain {
    fn transform(&mut self, schema: &mut Schema) {
        transform_subschemas(self, schema);
        let Some(map) = schema.as_object_mut() else { return };
        for name in ["format", "title", "$schema", "additionalProperties"] {
            map.remove(name);
        }
        if !self.documented {
            map.remove("description");
        }
        if let Some(says) = map.remove("says") {
            map.insert("description".to_owned(), says);
        }
        if map.get("default").is_some_and(|default| matches!(default, Value::Null | Value::Bool(false))) {
            map.remove("default");
        }
        // What may be missing is no other type.
        if let Some(Value::Array(types)) = map.get("type") {
            let of = types.iter().find(|name| *name != "null").cloned();
            map.extend(of.map(|of| ("type".to_owned(), of)));
        }
        if let Some(Value::Array(words)) = map.get_mut("enum") {
            words.retain(|word| !word.is_null());
        }
        // Documented words are choices.
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

fn plain<T: JsonSchema>(documented: bool) -> JsonObject {
    let mut settings = SchemaSettings::draft2020_12();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    Plain { documented }.transform(&mut schema);
    let map = schema.as_object_mut().map(std::mem::take).unwrap_or_default();
    // In the order in which it is read.
    let mut ordered = Map::new();
    for name in ["type", "properties", "required"] {
        ordered.extend(map.get(name).map(|value| (name.to_owned(), value.clone())));
    }
    ordered
}

/// The schema of arguments, whose documentation is what a client reads.
pub(crate) fn schema_of_arguments<T: JsonSchema>() -> JsonObject {
    let mut schema = plain::<T>(true);
    schema.entry("properties").or_insert_with(|| Map::new().into());
    schema
}

/// The schema of a result. No property is required, since each may be missing where the call was refused.
pub(crate) fn schema_of_result<T: JsonSchema>() -> JsonObject {
    let [mut schema, mut refusal] = [plain::<T>(false), plain::<Refusal<'_>>(false)];
    schema.remove("required");
    let properties = schema.entry("properties").or_insert_with(|| Map::new().into());
    if let (Some(properties), Some(Value::Object(refused))) = (properties.as_object_mut(), refusal.remove("properties"))
    {
        properties.extend(refused);
    }
    schema
}
