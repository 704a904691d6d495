//! The tool run-tests.

use std::collections::{BTreeMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::ToolAnnotations;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::arguments::{Flag, Name, Names, SuspectCount, Text, name, parse_seconds};
use super::background::{self, Wait};
use super::system::{System, run_search};
use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, handle_with};
use crate::mcp::fresh_image::{self, FreshRun, TestSelection};
use crate::outcome::{
    Difference, Directory, NoSuspects, PassingImage, Record, RunCounts, Suspect, Suspects, SystemToLoad, TestCounts,
    TestResult, TestRun, TestStatus, of_kind,
};
use crate::schema::{self, json};
use crate::session::PostProcessing;
use crate::session::recovery::failed_outcome;
use crate::{Limits, Outcome, report};

/// The notice of a run in a fresh image.
const RAN_FRESH: &str = "This test run used a fresh image, which loads only files.";
/// Like [`RAN_FRESH`], for several systems, each of which has an image of its own.
const EACH_RAN_FRESH: &str = "This test run used a fresh image, which loads only files, for each system.";
/// The notice if a test operation failed: its single verdict allows no comparison.
const NOTHING_TO_COMPARE: &str = "There are no suspects: the ASDF test-op counts as one test, and its output names no \
    passing test to compare with.";
/// The end of the notice if coverage marked no code of the tested systems. This end follows "There are no suspects: no failed
/// test ".
const NOTHING_MARKED: &str = "ran code from the files of a tested system, apart from the tests themselves.";
/// Maximum number of test names in a notice.
const MAX_NAMED_TESTS: usize = 10;
/// Maximum number of suspects for each failing test: functions that the failing test ran, but few passing tests did.
pub(crate) const MAX_SUSPECTS: u64 = 20;

/// Maximum number of systems in one call.
const MAX_SYSTEMS: usize = 20;

/// Default time limit for each test, in seconds.
const DEFAULT_TIMEOUT_SECONDS: f64 = 60.0;
/// Allowed time limits for each test, in seconds.
pub(crate) const TEST_TIMEOUT_RANGE: RangeInclusive<f64> = 0.1..=Limits::MAX_TIMEOUT_SECONDS;

/// The tool run-tests.
pub(super) struct RunTests;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// One or more ASDF systems: `a, b`. Or give test-package or name.
    #[serde(default)]
    #[schemars(with = "Option<Text>")]
    system: Names,
    /// Directory to search first for the .asd.
    directory: Option<Name>,
    /// Run the tests of this package.
    #[serde(alias = "package")]
    test_package: Option<Name>,
    /// A test, suite or tag, such as `my-tests::parse`.
    name: Option<Name>,
    /// Seconds for each test.
    #[serde(default)]
    timeout: TestSeconds,
    /// First load files that changed on disk.
    #[serde(default)]
    reload: Flag,
    /// Run in a fresh image that only loads the files; list tests whose result differs.
    #[serde(default)]
    fresh: Flag,
    /// For each failing test, list up to N functions that few passing tests ran, with the lines. Runs the tests again.
    #[serde(default)]
    suspects: SuspectCount,
    /// Answer at once; continue in the background.
    #[serde(default)]
    background: Flag,
    /// Wait this many seconds, then continue in the background.
    wait: Option<Wait>,
}

/// Time limit for each test, in seconds.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(transparent)]
struct TestSeconds(f64);

impl Default for TestSeconds {
    fn default() -> Self {
        Self(DEFAULT_TIMEOUT_SECONDS)
    }
}

impl<'de> Deserialize<'de> for TestSeconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let range = TEST_TIMEOUT_RANGE;
        parse_seconds(&value, &range, format!("a number of seconds from {} to {}", range.start(), range.end()))
            .map(Self)
    }
}

impl JsonSchema for TestSeconds {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "TestSeconds".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "number",
            "minimum": TEST_TIMEOUT_RANGE.start(),
            "maximum": TEST_TIMEOUT_RANGE.end(),
        })
    }
}

impl Arguments {
    /// Returns the selected tests.
    fn test_selection(self, call: &Call) -> Result<TestSelection, Fault> {
        let tool = RunTests::NAME;
        let given = [!self.system.0.is_empty(), self.test_package.is_some(), self.name.is_some()];
        if given.iter().filter(|given| **given).count() != 1 {
            return Err(Fault::Refusal(format!("{tool} needs exactly one of system, test-package and name.")));
        }
        if self.system.0.len() > MAX_SYSTEMS {
            return Err(Fault::Refusal(format!("{tool} takes at most {MAX_SYSTEMS} systems at once.")));
        }
        let [directory, package, name] = [self.directory, self.test_package, self.name].map(name);
        let names = self.system.0;
        let systems = run_search(call, move |known| {
            let mut systems: Vec<System> = Vec::new();
            for name in &names {
                let system = System::find(name, directory.as_deref(), known)?;
                if !systems.iter().any(|other| other.is_same(&system)) {
                    systems.push(system);
                }
            }
            Ok(systems)
        })?;
        let timeout = u64::try_from(Duration::from_secs_f64(self.timeout.0).as_millis()).unwrap_or(u64::MAX);
        let (reload, audience) = (self.reload.0, call.session().audience());
        Ok(TestSelection { systems, package, name, timeout, reload, audience, ..TestSelection::default() })
    }
}

impl ToolSpec for RunTests {
    const NAME: &'static str = "run-tests";
    const TITLE: &'static str = "Run tests";
    const DESCRIPTION: &'static str = "Run the tests of a system or package, or one test or suite: returns the counts \
        and, for each failed test, file and line, the form, expected and actual values, or the error with \
        frames[[get-backtrace| and its identifier for get-backtrace]]. Supports FiveAM, Parachute, Rove, lisp-unit2, \
        sb-rt and RT; otherwise runs the ASDF test-op as one test.";
    const POLICY: CallPolicy = CallPolicy { is_slow: |_| true, core: true, ..CallPolicy::NONE };
    type Arguments = Arguments;
    type Content = schema::Tests;

    fn hints() -> ToolAnnotations {
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true)
    }

    fn call(call: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let options = FreshRunOptions { fresh: arguments.fresh.0, suspects: arguments.suspects.0 };
        let uses_fresh_image = options.fresh || options.suspects > 0;
        let wait_limit = background::wait_limit(arguments.background, arguments.wait);
        let tests = arguments.test_selection(call)?;
        let mut operation = tests.operation().with("way", uses_fresh_image).with("beside", options.fresh);
        if !options.fresh {
            operation = operation.with_errors();
        }
        let mut job = background::Job::operation(tests.evaluation(), operation);
        if uses_fresh_image {
            let run = FreshRun::default();
            let cancelled = run.clone();
            let work = move |outcome| {
                if options.needs_fresh_image(&outcome) {
                    run_in_fresh_images(&run, tests, options, outcome)
                } else {
                    Ok(outcome)
                }
            };
            job = job.with_post_processing(PostProcessing::new(work, move || cancelled.end()));
        }
        handle_with(move |call: Call| {
            background::evaluate(call, job, wait_limit, |call, outcome| call.answer(Ok::<_, Fault>(outcome)));
        })
    }
}

/// Returns true for the outcome of a test run that has results, whether or not the tests passed.
pub(super) fn has_test_results(outcome: &Outcome) -> bool {
    !outcome.is_error() && TestCounts::of(outcome).is_some()
}

/// The result of a test run.
#[derive(Debug)]
pub(super) struct TestRunResult(pub(super) Arc<Outcome>);

impl ToolResult for TestRunResult {
    fn text(&self, max: usize) -> String {
        // Without fresh images, a search for suspects would be refused.
        report::tests(&self.0, max, fresh_image::is_enabled())
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&schema::Tests::new(&self.0))
    }
}

/// The work to do in fresh images after the session's own run.
#[derive(Debug, Clone, Copy)]
struct FreshRunOptions {
    /// True to run the tests again, in a fresh image.
    fresh: bool,
    /// Maximum number of suspects for each failing test. 0 to look for none.
    suspects: u64,
}

impl FreshRunOptions {
    /// Returns true if a fresh image is needed after the session's outcome `here`.
    fn needs_fresh_image(self, here: &Outcome) -> bool {
        !here.is_error() && (self.fresh || self.suspects > 0 && has_failures(here))
    }
}

fn has_failures(outcome: &Outcome) -> bool {
    TestCounts::of(outcome).is_some_and(|counts| counts.failed > 0 || counts.errors > 0)
}

/// Runs the tests in fresh images, separately for each system. `here` is the outcome in the session.
fn run_in_fresh_images(
    run: &FreshRun,
    tests: TestSelection,
    options: FreshRunOptions,
    here: Outcome,
) -> Result<Outcome, String> {
    if tests.systems.len() < 2 {
        let mut outcome = run_system_in_fresh_image(run, tests, options, here)?;
        if options.fresh {
            outcome.notices.insert(0, RAN_FRESH.to_owned());
        }
        return Ok(outcome);
    }
    let mut fresh = Outcome::from_test_output(String::new());
    // The systems whose tests ran in a fresh image.
    let mut ran_fresh = Vec::new();
    let mut suspects = Vec::new();
    let mut notices: Vec<(String, Vec<String>)> = Vec::new();
    for ((name, known), system) in here.split_by_system().into_iter().zip(tests.systems.clone()) {
        if !options.fresh && !report::tests_ran(name, &known.records) {
            continue;
        }
        let known_records = known.records.len();
        let outcome =
            run_system_in_fresh_image(run, TestSelection { systems: vec![system], ..tests.clone() }, options, known);
        if options.fresh && outcome.is_ok() {
            ran_fresh.push(name.to_owned());
        }
        let mut outcome = outcome.unwrap_or_else(|reason| failed_outcome("SIMPLE-ERROR", reason));
        for notice in std::mem::take(&mut outcome.notices) {
            match notices.iter_mut().find(|(known, _)| *known == notice) {
                Some((_, systems)) => systems.push(name.to_owned()),
                None => notices.push((notice, vec![name.to_owned()])),
            }
        }
        if options.fresh {
            fresh = fresh.with_system_tests(name, as_failed_test(name, outcome));
            continue;
        }
        let mut added = outcome.records.split_off(known_records);
        added.iter_mut().for_each(|record| record.set_system(name));
        suspects.extend(added);
    }
    let mut outcome = if options.fresh { fresh } else { here };
    outcome.records.extend(suspects);
    let ran_fresh = match ran_fresh.len() {
        0 => None,
        1 => Some((RAN_FRESH.to_owned(), ran_fresh)),
        _ => Some((EACH_RAN_FRESH.to_owned(), ran_fresh)),
    };
    // A notice that concerns all systems is not prefixed with their names.
    outcome.notices.extend(ran_fresh.into_iter().chain(notices).map(|(notice, systems)| {
        if systems.len() == tests.systems.len() { notice } else { format!("{}: {notice}", systems.join(", ")) }
    }));
    Ok(outcome)
}

/// Turns a run that failed as a whole into a run with one failed test, so that the failure can be reported together
/// with the results of other systems.
fn as_failed_test(name: &str, outcome: Outcome) -> Outcome {
    let Err(error) = &outcome.result else { return outcome };
    let run = RunCounts { errors: 1, ..RunCounts::default() }.into();
    let status = TestStatus::Error;
    let test = TestResult { name: name.to_owned(), status, error: Some(0), ..TestResult::default() }.into();
    Outcome { records: vec![run, test], errors: vec![error.clone()], result: Ok(Vec::new()), ..outcome }
}

/// If `options.fresh` is true, runs the tests in a fresh image and returns their outcome there, with its differences from
/// the session's outcome `here`. Otherwise returns `here`. If tests failed and `options` asks for suspects, the returned
/// outcome also has the suspects.
fn run_system_in_fresh_image(
    run: &FreshRun,
    mut tests: TestSelection,
    options: FreshRunOptions,
    here: Outcome,
) -> Result<Outcome, String> {
    tests.registry = of_kind::<Directory>(&here.records).cloned().collect();
    tests.load = of_kind(&here.records).map(|system: &SystemToLoad| system.name.clone()).collect();
    tests.reload = false;
    if tests.systems.is_empty() && tests.load.is_empty() {
        return Err(
            "The tests are not in a file of a loaded system, so a fresh image cannot load them: write them to \
            such a file first."
                .to_owned(),
        );
    }
    let mut outcome = if options.fresh { run_fresh(run, &tests, &here)? } else { here };
    if options.suspects == 0 || outcome.is_error() || !has_failures(&outcome) {
        return Ok(outcome);
    }
    tests.suspects = options.suspects;
    tests.endless = failed_tests(&outcome, |test| test.milliseconds >= tests.timeout);
    add_suspects(run, &tests, &mut outcome);
    Ok(outcome)
}

/// Returns the names of the failed tests that satisfy `predicate`.
fn failed_tests(outcome: &Outcome, predicate: impl Fn(&TestResult) -> bool) -> Vec<String> {
    let failed = of_kind(&outcome.records).filter(|test: &&TestResult| test.status.is_failure() && predicate(test));
    failed.map(|test| test.name.clone()).collect()
}

/// Returns the tests in `names` that passed according to `records`.
fn passed_tests(names: &[String], records: &[Record]) -> Vec<String> {
    let passed = of_kind(records).filter(|test: &&TestResult| test.status == TestStatus::Passed);
    let passed: HashSet<_> = passed.map(|test| &test.name).collect();
    names.iter().filter(|name| passed.contains(name)).cloned().collect()
}

/// Runs the tests in a fresh image, and adds the differences from the session's outcome `here`.
fn run_fresh(run: &FreshRun, tests: &TestSelection, here: &Outcome) -> Result<Outcome, String> {
    let mut outcome = run.run(tests)?;
    outcome.defined.clear();
    outcome.records.extend(differences(&here.records, &outcome.records));
    Ok(outcome)
}

/// Runs the tests once more, under coverage, and adds the suspects to `outcome`.
fn add_suspects(run: &FreshRun, tests: &TestSelection, outcome: &mut Outcome) {
    let failed = match run.run(tests) {
        Ok(covered) => match covered.result {
            Ok(_) => {
                // Tests are slower under coverage: tests that fail only under coverage, for instance at their time
                // limit, are ignored.
                let failed = failed_tests(outcome, |_| true);
                let passed = passed_tests(&failed, &covered.records);
                let mut wanted = false;
                outcome.records.extend(covered.records.into_iter().filter(|record| match record {
                    Record::Suspects(Suspects { name, .. }) => {
                        wanted = failed.contains(name);
                        wanted
                    }
                    Record::Suspect(_) | Record::SuspectLine(_) => wanted,
                    _ => false,
                }));
                let found = of_kind::<Suspect>(&outcome.records).next().is_some();
                if !passed.is_empty() {
                    let more = passed.len().saturating_sub(MAX_NAMED_TESTS);
                    outcome.notices.push(format!(
                        "Tests that passed in the fresh image used for the search have no suspects: {}{}.",
                        passed[..passed.len() - more].join(", "),
                        if more > 0 { format!(" and {more} more") } else { String::new() }
                    ));
                }
                if !found && passed.len() < failed.len() {
                    outcome.notices.push(match passed.is_empty() {
                        _ if TestRun::of(&outcome.records).has_only_test_operations() => NOTHING_TO_COMPARE.to_owned(),
                        true => format!("There are no suspects: no failed test {NOTHING_MARKED}"),
                        false => format!("There are no suspects: no other failed test {NOTHING_MARKED}"),
                    });
                }
                if !found {
                    outcome.records.push(NoSuspects::default().into());
                }
                return;
            }
            Err(error) => format!("{}: {}", error.kind, error.message.text),
        },
        Err(reason) => reason,
    };
    outcome.notices.push(format!("The search for suspects failed. {failed}"));
}

/// Returns a record for each test that passes in one of the two images and fails in the other.
fn differences(here: &[Record], fresh: &[Record]) -> Vec<Record> {
    let status = |records| {
        let tests = of_kind(records);
        tests.map(|test: &TestResult| (test.name.clone(), test.status)).collect::<BTreeMap<_, _>>()
    };
    let (here, fresh) = (status(here), status(fresh));
    let differing = here.into_iter().filter_map(|(name, known)| {
        let passes = match (known, fresh.get(&name)?) {
            (TestStatus::Passed, status) if status.is_failure() => PassingImage::Session,
            (status, TestStatus::Passed) if status.is_failure() => PassingImage::Fresh,
            _ => return None,
        };
        Some(Difference { name, passes, system: None }.into())
    });
    differing.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_without_fresh_images_has_no_hint_about_suspects_and_keeps_all_output() {
        const PRINTED: &str = "1 test failed:\nrun-tests with `suspects`: 3 also lists code that failed tests ran and \
            few or no passing tests ran.\nThe end.";
        assert!(!fresh_image::is_enabled());
        let run = RunCounts { failed: 1, ..RunCounts::default() }.into();
        let test = TestResult {
            name: "test-op of x".to_owned(),
            status: TestStatus::Failed,
            framework: "ASDF".to_owned(),
            ..TestResult::default()
        };
        let outcome = Outcome { records: vec![run, test.into()], ..Outcome::from_test_output(PRINTED.to_owned()) };
        let text = TestRunResult(Arc::new(outcome)).text(10_000);
        let (results, printed) = text.split_once("\nThe test run printed:\n").expect("the output");
        assert!(results.starts_with("FAILED") && !results.contains("suspects"), "{text}");
        assert_eq!(printed, PRINTED);
    }
}
