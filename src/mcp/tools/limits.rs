//! The tool configure-limits.

use rmcp::model::ToolAnnotations;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::arguments::{AnswerCharacters, OutputCharacters, Timeout};
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, reply_with};
use crate::schema::json;
use crate::tool_names;
use crate::{Limits, OnError, TimeLimit, report};

/// The tool configure-limits.
pub(super) struct ConfigureLimits;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// Seconds for an evaluation; 0: no limit.
    #[serde(default)]
    #[schemars(extend("maximum" = Limits::MAX_TIMEOUT_SECONDS))]
    timeout: Timeout,
    /// Characters of output kept for each evaluation.
    max_output: Option<OutputCharacters>,
    /// Characters of one answer[[check-evaluation|; check-evaluation shows the rest]].
    max_answer: Option<AnswerCharacters>,
    /// On failure: `abort`, [[debugger|hold (`debug`) ]]or `ask` the user.
    on_error: Option<OnErrorChoice>,
}

impl ToolSpec for ConfigureLimits {
    const NAME: &'static str = "configure-limits";
    const TITLE: &'static str = "Configure limits";
    const DESCRIPTION: &'static str = "Show the session's limits and, with arguments, change them for later \
        evaluations: time (raise after TIMEOUT), output, reaction to failure.";
    const POLICY: CallPolicy = CallPolicy { repeatable: true, during_restore: true, core: true, ..CallPolicy::NONE };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        ToolAnnotations::new().read_only(false).destructive(false).idempotent(true).open_world(false)
    }

    fn call(call: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let session = call.session();
        let mut limits = session.limits();
        let before = limits;
        match arguments.timeout.0 {
            TimeLimit::Default => {}
            TimeLimit::None => limits.timeout = None,
            TimeLimit::Of(time) => limits.timeout = Some(time),
        }
        if let Some(characters) = arguments.max_output {
            limits.max_output = characters.0;
        }
        if let Some(characters) = arguments.max_answer {
            limits.max_answer = characters.0;
        }
        if let Some(on_error) = arguments.on_error {
            limits.on_error = on_error.0;
        }
        if limits != before {
            session.set_limits(limits);
        }
        reply_with(limits)
    }
}

/// Structured content: the limits after the call.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Content {
    #[schemars(range(min = 0), extend("says" = "0 means no limit."))]
    timeout: f64,
    max_output: u64,
    max_answer: u64,
    on_error: OnErrorChoice,
}

impl ToolResult for Limits {
    fn text(&self, _: usize) -> String {
        report::limits(self)
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&Content {
            timeout: self.timeout.map_or(0.0, |timeout| timeout.as_secs_f64()),
            max_output: self.max_output,
            max_answer: self.max_answer,
            on_error: OnErrorChoice(self.on_error),
        })
    }
}

/// A value of `on-error`. `debug` is allowed only if tools for a held evaluation are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OnErrorChoice(pub(super) OnError);

impl OnErrorChoice {
    pub(super) fn value_of(given: Option<Self>) -> Option<OnError> {
        given.map(|choice| choice.0)
    }
}

impl<'de> Deserialize<'de> for OnErrorChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let offered =
            |choice: &OnError| *choice != OnError::Debug || tool_names::is_listed(tool_names::ANY_DEBUGGER_TOOL);
        let offered = || OnError::ALL.into_iter().filter(offered);
        offered().find(|choice| value == choice.name()).map(Self).ok_or_else(|| {
            let names: Vec<_> = offered().map(OnError::name).collect();
            D::Error::custom(super::arguments::describe_mismatch(&format!("one of {}", names.join(", ")), &value))
        })
    }
}

impl Serialize for OnErrorChoice {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name())
    }
}

impl JsonSchema for OnErrorChoice {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "OnError".into()
    }

    /// The schema has all values. The tool set removes values that it does not offer.
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "enum": OnError::ALL.map(OnError::name)})
    }
}
