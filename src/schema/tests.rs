//! The structured content of a test run.

use schemars::JsonSchema;
use serde::Serialize;

use super::{ErrorSummary, Evaluation, seconds};
use crate::Outcome;
use crate::outcome::{PassingImage, Suspect, SuspectLine, SuspectList, Test, TestCounts, TestRun, TestStatus};

/// Structured content of a test run's result.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Tests {
    #[serde(flatten)]
    evaluation: Evaluation,
    passed: u64,
    failed: u64,
    errors: u64,
    skipped: u64,
    seconds: f64,
    tests: Vec<TestReport>,
    differs: Vec<Difference>,
}

impl Tests {
    pub(crate) fn new(outcome: &Outcome) -> Self {
        let TestCounts { passed, failed, errors, skipped, milliseconds } = TestCounts::of(outcome).unwrap_or_default();
        let systems = outcome.split_by_system();
        let each = |outcome: &Outcome| {
            let run = TestRun::of(&outcome.records);
            run.tests.iter().map(|test| TestReport::new(test, outcome)).collect::<Vec<_>>()
        };
        let differences = TestRun::of(&outcome.records).differences;
        Self {
            evaluation: Evaluation::new(outcome),
            passed,
            failed,
            errors,
            skipped,
            seconds: seconds(milliseconds),
            tests: if systems.is_empty() {
                each(outcome)
            } else {
                systems.iter().flat_map(|(_, outcome)| each(outcome)).collect()
            },
            differs: differences.iter().map(|it| Difference { name: it.name.clone(), passes: it.passes }).collect(),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct Difference {
    name: String,
    #[schemars(extend("says" = "The only image in which the test passes."))]
    passes: PassingImage,
}

#[derive(Debug, Serialize, JsonSchema)]
struct TestReport {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("says" = "Name of the system, if several were tested."))]
    system: Option<String>,
    name: String,
    framework: String,
    status: TestStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    seconds: f64,
    #[schemars(extend("says" = "The first checks that failed."))]
    checks: Vec<Check>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    suspects: Option<Vec<SuspectReport>>,
}

impl TestReport {
    fn new(test: &Test<'_>, outcome: &Outcome) -> Self {
        let Test { result, checks, suspects, .. } = test;
        let checks = checks.iter().map(|check| Check {
            form: check.form.clone(),
            expected: check.expected.clone(),
            actual: check.actual.clone(),
            message: check.message.clone(),
        });
        let suspects: Vec<_> = suspects.iter().flat_map(SuspectReport::all).collect();
        Self {
            system: result.system.clone(),
            name: result.name.clone(),
            framework: result.framework.clone(),
            status: result.status,
            message: result.message.clone(),
            file: result.file.clone(),
            line: result.line,
            code: result.code.clone(),
            seconds: seconds(result.milliseconds),
            checks: checks.collect(),
            error: result.error_among(&outcome.errors).map(|error| ErrorSummary::new(error)),
            suspects: (!suspects.is_empty()).then_some(suspects),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct Check {
    #[serde(skip_serializing_if = "Option::is_none")]
    form: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    actual: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct SuspectReport {
    #[serde(flatten)]
    suspect: Suspect,
    lines: Vec<SuspectLine>,
}

impl SuspectReport {
    fn all(list: &SuspectList<'_>) -> Vec<Self> {
        let report = |(suspect, lines): &(&Suspect, Vec<&SuspectLine>)| Self {
            suspect: (*suspect).clone(),
            lines: lines.iter().map(|line| (*line).clone()).collect(),
        };
        list.functions.iter().map(report).collect()
    }
}
