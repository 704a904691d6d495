//! A call's arguments, taken out one by one and checked.

use std::ops::RangeInclusive;

use rmcp::model::JsonObject;
use serde_json::Value;

use super::Fault;

/// The arguments of one call. `null` is the same as none.
#[derive(Debug)]
pub(super) struct Arguments {
    tool: &'static str,
    known: &'static [&'static str],
    required: usize,
    map: JsonObject,
}

impl Arguments {
    /// For a tool that takes the arguments `known`, of which the first `required` must be there.
    ///
    /// Nothing is done when one is missing or unknown. `max_frames` is taken for `max-frames`.
    pub(super) fn new(
        tool: &'static str,
        known: &'static [&'static str],
        required: usize,
        map: JsonObject,
    ) -> Result<Self, Fault> {
        let map = map.into_iter().map(|(name, value)| (known_name(known, name), value)).collect();
        let arguments = Self { tool, known, required, map };
        let missing = known[..required].iter().find(|name| arguments.map.get(**name).is_none_or(Value::is_null));
        let unknown = arguments.map.keys().find(|name| !known.contains(&name.as_str()));
        if missing.is_none() && unknown.is_none() {
            return Ok(arguments);
        }
        let mut reason = missing.map_or_else(String::new, |name| format!("{tool} needs the argument {name}. "));
        if let Some(name) = unknown {
            reason += &format!("{tool} has no argument {}. ", shown(name));
        }
        reason += &match known {
            [] => "It takes no arguments.".to_owned(),
            known => format!("It takes: {}.", known.join(", ")),
        };
        Err(Fault::Value(reason))
    }

    /// A text that must be there.
    pub(super) fn text(&mut self, name: &str) -> Result<String, Fault> {
        self.optional_text(name).map(Option::unwrap_or_default)
    }

    /// A text. A number is one as it is written, and an empty text is none.
    pub(super) fn optional_text(&mut self, name: &str) -> Result<Option<String>, Fault> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => {
                Ok(Some(text.strip_prefix(BYTE_ORDER_MARK).map_or(text.clone(), str::to_owned)))
            }
            Some(Value::Number(number)) => Ok(Some(number.to_string())),
            Some(other) => Err(self.wrong(name, "a string", &other)),
        }
    }

    /// Names, in an array or in one text, where commas or blanks part them, but for what is within parentheses or quoted.
    pub(super) fn names(&mut self, name: &str) -> Result<Vec<String>, Fault> {
        let mut names = self.texts(name)?;
        if let [text] = &names[..] {
            names = parted(text).into_iter().map(str::to_owned).collect();
        }
        names.retain(|name| !name.trim().is_empty());
        Ok(names)
    }

    /// Texts. A single one may stand for a list of it.
    fn texts(&mut self, name: &str) -> Result<Vec<String>, Fault> {
        let values = match self.take(name) {
            None => return Ok(Vec::new()),
            Some(Value::Array(values)) => values,
            Some(value) => vec![value],
        };
        let text = |value: Value| match value {
            Value::String(text) => Ok(text),
            other => Err(self.wrong(name, "an array of strings", &other)),
        };
        values.into_iter().map(text).collect()
    }

    /// A yes or no; no when it is not there.
    pub(super) fn flag(&mut self, name: &str) -> Result<bool, Fault> {
        let Some(value) = self.take(name) else { return Ok(false) };
        let word = value.as_str().map(|word| word.trim().to_ascii_lowercase());
        match (value.as_bool(), word.as_deref()) {
            (Some(flag), _) => Ok(flag),
            (_, Some("true")) => Ok(true),
            (_, Some("false")) => Ok(false),
            _ => Err(self.wrong(name, "true or false", &value)),
        }
    }

    /// A number; `allowed` says in words which.
    pub(super) fn number(
        &mut self,
        name: &str,
        range: RangeInclusive<f64>,
        allowed: impl Fn() -> String,
    ) -> Result<Option<f64>, Fault> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = float(&value).filter(|number| range.contains(number));
        number.map(Some).ok_or_else(|| self.wrong(name, &allowed(), &value))
    }

    /// A whole number, 10.0 included.
    pub(super) fn whole(
        &mut self,
        name: &str,
        range: RangeInclusive<u64>,
        allowed: &str,
    ) -> Result<Option<u64>, Fault> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = match &value {
            Value::String(text) => whole(text),
            Value::Number(number) => whole(&number.to_string()),
            _ => None,
        };
        let number = number.filter(|number| range.contains(number));
        number.map(Some).ok_or_else(|| self.wrong(name, allowed, &value))
    }

    /// A whole number from 1 to `most`; `default` when it is not there.
    pub(super) fn count(&mut self, name: &str, most: u64, default: u64) -> Result<u64, Fault> {
        let allowed = format!("a whole number from 1 to {most}");
        Ok(self.whole(name, 1..=most, &allowed)?.unwrap_or(default))
    }

    /// A whole number of characters.
    pub(super) fn characters(&mut self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, Fault> {
        let allowed = format!("a whole number of characters from {} to {}", range.start(), range.end());
        self.whole(name, range, &allowed)
    }

    /// One of some words.
    pub(super) fn choice<T: Copy>(&mut self, name: &str, choices: &[(&str, T)]) -> Result<Option<T>, Fault> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let chosen = choices.iter().find(|(word, _)| value == *word);
        chosen.map(|(_, choice)| Some(*choice)).ok_or_else(|| {
            let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
            self.wrong(name, &format!("one of {}", words.join(", ")), &value)
        })
    }

    /// What must be there may be empty; for what need not, an empty text is none.
    fn required(&self) -> &'static [&'static str] {
        &self.known[..self.required]
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        debug_assert!(self.known.contains(&name));
        self.map.remove(name).filter(|value| !value.is_null() && (value != "" || self.required().contains(&name)))
    }

    fn wrong(&self, name: &str, allowed: &str, value: &Value) -> Fault {
        Fault::Value(format!("{}: {name} must be {allowed}, not {}.", self.tool, shown_as(value.to_string())))
    }
}

/// The argument's name, written with hyphens where the tool has it so.
fn known_name(known: &[&str], name: String) -> String {
    let hyphenated = name.replace('_', "-");
    if known.contains(&hyphenated.as_str()) { hyphenated } else { name }
}

/// The parts of a text between commas and blanks that are not within parentheses, `"` or `|`.
pub(crate) fn parted(text: &str) -> Vec<&str> {
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

/// What editors may put before a text.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// A text that was given, in quotation marks and not too long to be repeated.
pub(super) fn shown(text: &str) -> String {
    shown_as(format!("{text:?}"))
}

fn shown_as(mut text: String) -> String {
    if let Some((cut, _)) = text.char_indices().nth(60) {
        text.truncate(cut);
        text.push('…');
    }
    text
}

/// A number, which may be written as a string.
fn float(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())
}

/// A whole number as written: 10 and 10.0.
pub(super) fn whole(text: &str) -> Option<u64> {
    let text = text.trim();
    // The float is a whole number that fits: nothing is lost.
    let float =
        |text: &str| text.parse().ok().filter(|number: &f64| number.fract() == 0.0 && (0.0..=1e15).contains(number));
    text.parse().ok().or_else(|| float(text).map(|number| number as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn arguments(value: Value) -> Result<Arguments, Fault> {
        let Value::Object(map) = value else { panic!("not an object") };
        Arguments::new("tool", &["code", "max-count", "flag", "name"], 1, map)
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
        assert_eq!(sentence(arguments(json!({"code": "1", "max-count": null}))), "fine");
        assert_eq!(
            sentence(arguments(json!({"code": "1", "max-cuont": 2}))),
            "tool has no argument \"max-cuont\". It takes: code, max-count, flag, name."
        );
        assert_eq!(
            sentence(arguments(json!({"code": null}))),
            "tool needs the argument code. It takes: code, max-count, flag, name."
        );
        assert_eq!(
            sentence(Arguments::new("bare", &[], 0, json!({"x": 1}).as_object().unwrap().clone())),
            "bare has no argument \"x\". It takes no arguments."
        );
        let long = sentence(arguments(json!({"code": "1", ("x".repeat(1_000_000)): 1})));
        assert!(long.len() < 200, "{long}");
    }

    #[test]
    fn values_are_checked() {
        let count = |value: Value| {
            let mut arguments = arguments(json!({"code": "1", "max_count": value})).unwrap();
            arguments
                .whole("max-count", 1..=10, "a whole number from 1 to 10")
                .map_err(|fault| sentence::<()>(Err(fault)))
        };
        for none in [json!(null), json!("")] {
            assert_eq!(count(none), Ok(None));
        }
        for three in [json!(3), json!(3.0), json!("3"), json!(" 3.0 ")] {
            assert_eq!(count(three), Ok(Some(3)));
        }
        for wrong in [json!(0), json!(-1), json!(1.5), json!("three"), json!([]), json!(1e300), json!(11), json!("NaN")]
        {
            let expected = format!("tool: max-count must be a whole number from 1 to 10, not {wrong}.");
            assert_eq!(count(wrong), Err(expected));
        }
    }

    #[test]
    fn names_are_parted() {
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
            assert_eq!(arguments(json!({"code": "1", "name": given})).unwrap().names("name").unwrap(), expected);
        }
    }

    #[test]
    fn texts_and_flags_are_taken_generously() {
        for (value, expected) in [(json!(7), "7"), (json!(1.5), "1.5"), (json!("\u{feff}(f)"), "(f)"), (json!(""), "")]
        {
            let mut given = arguments(json!({"code": value})).unwrap();
            assert_eq!(given.text("code").unwrap(), expected);
        }
        for (value, expected) in
            [(json!("TRUE"), true), (json!("false"), false), (json!(true), true), (json!(""), false)]
        {
            let mut given = arguments(json!({"code": "1", "flag": value})).unwrap();
            assert_eq!(given.flag("flag").unwrap(), expected);
        }
        let mut given = arguments(json!({"code": ["x"], "flag": "yes", "name": ""})).unwrap();
        assert_eq!(sentence(given.text("code")), "tool: code must be a string, not [\"x\"].");
        assert_eq!(sentence(given.flag("flag")), "tool: flag must be true or false, not \"yes\".");
        assert_eq!(given.optional_text("name").unwrap(), None);
    }
}
