//! The structured content of an evaluation.

use schemars::JsonSchema;
use serde::Serialize;

use super::{ErrorDetails, clipped, seconds};
use crate::Outcome;
use crate::outcome::{self, Loaded, ReadUpTo, of_kind};
use crate::report;

/// Structured content of an evaluation's result.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Evaluation {
    notices: Vec<String>,
    background: String,
    stdout: String,
    stderr: String,
    warnings: Vec<Warning>,
    warnings_omitted: u64,
    held: bool,
    /// Character index of the end of the form that was read, for clients that send code form by form.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    read: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    loaded: Option<LoadReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("says" = "The evaluation's number, if it continues in the background."))]
    in_background: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("says" = "The values of the last form, if the evaluation succeeded."))]
    values: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorDetails>,
}

impl Evaluation {
    pub(crate) fn new(outcome: &Outcome) -> Self {
        let (values, error) = match &outcome.result {
            _ if outcome.in_background => (None, None),
            Ok(values) => (Some(values.iter().map(clipped).collect()), None),
            Err(error) => {
                let frames = report::report_frames(error).map(|(frame, _)| frame);
                (None, Some(ErrorDetails::new(error, frames, true)))
            }
        };
        Self {
            notices: outcome.notices.clone(),
            background: clipped(&outcome.background),
            stdout: clipped(&outcome.stdout),
            stderr: clipped(&outcome.stderr),
            warnings: outcome.warnings.iter().map(Warning::new).collect(),
            warnings_omitted: outcome.warnings_omitted,
            held: outcome.held,
            read: of_kind(&outcome.records).next().map(|read: &ReadUpTo| read.end),
            loaded: outcome.loaded().map(LoadReport::new),
            timing: outcome.timing.filter(|_| !outcome.is_error()).map(Timing::new),
            in_background: outcome.in_background.then_some(outcome.evaluation),
            values,
            error,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct Warning {
    #[serde(rename = "type")]
    class: String,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    form: Option<String>,
}

impl Warning {
    fn new(warning: &outcome::Warning) -> Self {
        Self {
            class: warning.kind.clone(),
            message: clipped(&warning.message),
            file: warning.file.clone(),
            line: warning.line,
            column: warning.column,
            form: warning.form.clone(),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Timing {
    real_ms: u64,
    run_ms: u64,
    gc_ms: u64,
    bytes_consed: u64,
}

impl Timing {
    fn new(timing: outcome::Timing) -> Self {
        let outcome::Timing { real_ms, run_ms, gc_ms, bytes_consed } = timing;
        Self { real_ms, run_ms, gc_ms, bytes_consed }
    }
}

/// Structured content about the system or file that an evaluation loaded.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LoadReport {
    name: String,
    files: u64,
    compiled: u64,
    up_to_date: bool,
    seconds: f64,
    systems: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    definition: Option<String>,
}

impl LoadReport {
    fn new(loaded: &Loaded) -> Self {
        let systems = loaded.systems.iter().flat_map(|names| names.split(", "));
        Self {
            name: loaded.name.clone(),
            files: loaded.files,
            compiled: loaded.compiled,
            up_to_date: loaded.present.is_some(),
            seconds: seconds(loaded.milliseconds),
            systems: systems.map(str::to_owned).collect(),
            definition: loaded.definition.clone(),
        }
    }
}
