//! A call's arguments, taken out one by one and checked.

use std::ops::RangeFrom;

use rmcp::model::{ErrorData, JsonObject};
use serde_json::Value;

use super::Fault;

/// The arguments of one call. `null` is the same as none.
#[derive(Debug)]
pub(super) struct Arguments {
    tool: &'static str,
    known: &'static [&'static str],
    map: JsonObject,
}

impl Arguments {
    /// For a tool that takes the arguments `known`, of which the first `required` must be there.
    ///
    /// A missing one is an error of the protocol; an unknown one is a wrong value, and nothing is done.
    pub(super) fn new(
        tool: &'static str,
        known: &'static [&'static str],
        required: usize,
        map: JsonObject,
    ) -> Result<Self, Fault> {
        let arguments = Self { tool, known, map };
        let missing = known[..required].iter().find(|name| arguments.map.get(**name).is_none_or(Value::is_null));
        let unknown = arguments.map.keys().find(|name| !known.contains(&name.as_str()));
        if missing.is_none() && unknown.is_none() {
            return Ok(arguments);
        }
        let mut reason = missing.map_or_else(String::new, |name| format!("{tool} needs the argument {name}. "));
        if let Some(name) = unknown {
            reason += &format!("{tool} has no argument {name:?}. ");
        }
        reason += &match known {
            [] => "It takes no arguments.".to_owned(),
            known => format!("It takes: {}.", known.join(", ")),
        };
        Err(if missing.is_some() {
            Fault::Protocol(ErrorData::invalid_params(reason, None))
        } else {
            Fault::Value(reason)
        })
    }

    /// A text that must be there.
    pub(super) fn text(&mut self, name: &str) -> Result<String, Fault> {
        self.optional_text(name).map(Option::unwrap_or_default)
    }

    /// A text.
    pub(super) fn optional_text(&mut self, name: &str) -> Result<Option<String>, Fault> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", &other)),
        }
    }

    /// A yes or no; no when it is not there.
    pub(super) fn flag(&mut self, name: &str) -> Result<bool, Fault> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(self.wrong(name, "true or false", &other)),
        }
    }

    /// A number; `allowed` says in words which.
    pub(super) fn number(&mut self, name: &str, allowed: impl Fn() -> String) -> Result<Option<f64>, Fault> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| self.wrong(name, &allowed(), &value)),
        }
    }

    /// A whole number, 10.0 included.
    pub(super) fn whole(&mut self, name: &str, from: RangeFrom<u64>, allowed: &str) -> Result<Option<u64>, Fault> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let float = value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..=1e15).contains(number));
        // The float is a whole number that fits: nothing is lost.
        let whole = value.as_u64().or(float.map(|number| number as u64));
        whole.filter(|number| from.contains(number)).map(Some).ok_or_else(|| self.wrong(name, allowed, &value))
    }

    /// Whatever it is.
    pub(super) fn any(&mut self, name: &str) -> Option<Value> {
        self.take(name)
    }

    /// One of some words; the first one when it is not there.
    pub(super) fn choice<T: Copy>(&mut self, name: &str, choices: &[(&str, T)]) -> Result<T, Fault> {
        let Some(value) = self.take(name) else {
            return Ok(choices[0].1);
        };
        let chosen = choices.iter().find(|(word, _)| value == *word);
        chosen.map(|(_, choice)| *choice).ok_or_else(|| {
            let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
            self.wrong(name, &format!("one of {}", words.join(", ")), &value)
        })
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        debug_assert!(self.known.contains(&name));
        self.map.remove(name).filter(|value| !value.is_null())
    }

    fn wrong(&self, name: &str, allowed: &str, value: &Value) -> Fault {
        let mut shown = value.to_string();
        if let Some((cut, _)) = shown.char_indices().nth(60) {
            shown.truncate(cut);
            shown.push('…');
        }
        Fault::Value(format!("{}: {name} must be {allowed}, not {shown}.", self.tool))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn arguments(value: Value) -> Result<Arguments, Fault> {
        let Value::Object(map) = value else { panic!("not an object") };
        Arguments::new("tool", &["code", "count", "flag"], 1, map)
    }

    fn sentence<T>(result: Result<T, Fault>) -> String {
        match result {
            Err(Fault::Value(text)) => text,
            Err(Fault::Protocol(error)) => format!("{} {}", error.code.0, error.message),
            Ok(_) => "fine".to_owned(),
        }
    }

    #[test]
    fn names_are_checked() {
        assert_eq!(sentence(arguments(json!({"code": "1", "count": null}))), "fine");
        assert_eq!(
            sentence(arguments(json!({"code": "1", "cuont": 2}))),
            "tool has no argument \"cuont\". It takes: code, count, flag."
        );
        assert_eq!(
            sentence(arguments(json!({"code": null}))),
            "-32602 tool needs the argument code. It takes: code, count, flag."
        );
        assert_eq!(
            sentence(Arguments::new("bare", &[], 0, json!({"x": 1}).as_object().unwrap().clone())),
            "bare has no argument \"x\". It takes no arguments."
        );
    }

    #[test]
    fn values_are_checked() {
        let count = |value: Value| {
            let mut arguments = arguments(json!({"code": "1", "count": value})).unwrap();
            arguments.whole("count", 1.., "a whole number from 1").map_err(|fault| sentence::<()>(Err(fault)))
        };
        assert_eq!(count(json!(null)), Ok(None));
        assert_eq!(count(json!(3)), Ok(Some(3)));
        assert_eq!(count(json!(3.0)), Ok(Some(3)));
        for wrong in [json!(0), json!(-1), json!(1.5), json!("3"), json!([]), json!(1e300)] {
            let expected = format!("tool: count must be a whole number from 1, not {wrong}.");
            assert_eq!(count(wrong), Err(expected));
        }
        let mut both = arguments(json!({"code": 7, "flag": "yes"})).unwrap();
        assert_eq!(sentence(both.text("code")), "tool: code must be a string, not 7.");
        assert_eq!(sentence(both.flag("flag")), "tool: flag must be true or false, not \"yes\".");
    }
}
