//! run-tests.

use std::collections::{BTreeMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::ToolAnnotations;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::arguments::{Flag, Names, SuspectCount, Text, seconds_of, text};
use super::background::{self, Wait};
use super::system::{Definitions, System};
use super::{Call, Fault, Finding, Offered, Step, Traits, later};
use crate::mcp::beside::{Handle, Tests};
use crate::outcome::{
    Difference, Directory, NoSuspects, PassingImage, Record, RunCounts, Suspect, Suspects, SystemToLoad, TestCounts,
    TestResult, TestRun, TestStatus, of_kind,
};
use crate::schema::{self, json};
use crate::session::Aftermath;
use crate::session::recovery::failed;
use crate::{Limits, Outcome, report};

/// What is said in place of the suspects of a test operation.
const NOTHING_TO_COMPARE: &str = "There are no suspects: of a test operation one verdict is known, and what it printed tells of \
    no test that passes to compare it with.";
/// The same where no code of theirs ran, after "There are no suspects: " and which tests that is.
const NOTHING_MARKED: &str =
    "ran nothing of the systems that are tested, but tests and what is not found in their files.";
/// Names of tests in a notice.
const NAMES: usize = 10;
/// Suspects for each test that fails, at most.
pub(crate) const MAX_SUSPECTS: u64 = 20;

/// Systems of one call.
const MAX_SYSTEMS: usize = 20;

/// Seconds that a test may take unless asked otherwise.
const TIMEOUT: f64 = 60.0;
/// Seconds that a test may be given.
pub(crate) const TEST_TIMEOUT_RANGE: RangeInclusive<f64> = 0.1..=Limits::MAX_TIMEOUT_SECONDS;

/// The tool.
pub(super) struct RunTests;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// One or more ASDF systems: `a, b`. Or give test-package or name.
    #[serde(default)]
    #[schemars(with = "Option<Text>")]
    system: Names,
    /// Where to look for the .asd first.
    directory: Option<Text>,
    /// Run the tests of this package.
    #[serde(alias = "package")]
    test_package: Option<Text>,
    /// A test, suite or tag, as `my-tests::parse`.
    name: Option<Text>,
    /// Seconds for each test.
    #[serde(default)]
    timeout: TestSeconds,
    /// First load what changed on disk.
    #[serde(default)]
    reload: Flag,
    /// Run in a fresh image that loads the files only; name what differs.
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

/// Seconds that a test may take.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(transparent)]
struct TestSeconds(f64);

impl Default for TestSeconds {
    fn default() -> Self {
        Self(TIMEOUT)
    }
}

impl<'de> Deserialize<'de> for TestSeconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let range = TEST_TIMEOUT_RANGE;
        seconds_of(&value, &range, format!("a number of seconds from {} to {}", range.start(), range.end())).map(Self)
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
    /// Which tests.
    fn tests(&self) -> Result<Tests, Fault> {
        let name = RunTests::NAME;
        let given = [!self.system.0.is_empty(), self.test_package.is_some(), self.name.is_some()];
        if given.iter().filter(|given| **given).count() != 1 {
            return Err(Fault::Value(format!("{name} needs one of system, test-package and name.")));
        }
        if self.system.0.len() > MAX_SYSTEMS {
            return Err(Fault::Value(format!("{name} takes at most {MAX_SYSTEMS} systems at once.")));
        }
        let [directory, package, name] =
            [&self.directory, &self.test_package, &self.name].map(|given| text(given.clone()));
        let known = Definitions::default();
        let mut systems: Vec<System> = Vec::new();
        for name in &self.system.0 {
            let system = System::find(name, directory.as_deref(), &known)?;
            if !systems.iter().any(|known| known.is_same(&system)) {
                systems.push(system);
            }
        }
        let timeout = u64::try_from(Duration::from_secs_f64(self.timeout.0).as_millis()).unwrap_or(u64::MAX);
        Ok(Tests { systems, package, name, timeout, reload: self.reload.0, ..Tests::default() })
    }
}

impl Offered for RunTests {
    const NAME: &'static str = "run-tests";
    const TITLE: &'static str = "Run tests";
    const DESCRIPTION: &'static str = "Run the tests of a system or package, or one test or suite: the counts; then, for each failed \
        test, file and line, the form, what was expected and what came, or the error with frames[[get-backtrace| and its \
        identifier for get-backtrace]]. Knows FiveAM, Parachute, Rove, lisp-unit2, sb-rt and RT; else runs the ASDF test-op \
        as one test.";
    const TRAITS: Traits = Traits { searches: true, core: true, ..Traits::NONE };
    type Arguments = Arguments;
    type Content = schema::Tests;

    fn hints() -> ToolAnnotations {
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true)
    }

    fn call(_: &Call, arguments: Arguments) -> Result<Step, Fault> {
        let tests = arguments.tests()?;
        let beside = Beside { fresh: arguments.fresh.0, suspects: arguments.suspects.0 };
        let is_beside = beside.fresh || beside.suspects > 0;
        let patience = background::patience(arguments.background, arguments.wait);
        let mut operation = tests.operation().with("way", is_beside).with("beside", beside.fresh);
        if !beside.fresh {
            operation = operation.with_errors();
        }
        let mut job = background::Job::operation(tests.evaluation(), operation);
        if is_beside {
            let handle = Handle::default();
            let cancelled = handle.clone();
            let work = move |outcome| {
                if beside.is_needed(&outcome) { run_beside(&handle, tests, beside, outcome) } else { Ok(outcome) }
            };
            job = job.before_end(Aftermath::new(work, move || cancelled.end()));
        }
        later(move |call: Call| {
            background::evaluate(call, job, patience, |call, outcome| call.answer(Ok::<_, Fault>(outcome)));
        })
    }
}

/// True for an outcome that tells of tests.
pub(super) fn is_tested(outcome: &Outcome) -> bool {
    !outcome.is_error() && TestCounts::of(outcome).is_some()
}

/// What tests came to.
#[derive(Debug)]
pub(super) struct Tested(pub(super) Arc<Outcome>);

impl Finding for Tested {
    fn text(&self, max: usize) -> String {
        report::tests(&self.0, max)
    }

    fn content(&self, _: usize) -> Value {
        json(&schema::Tests::new(&self.0))
    }
}

/// What is done in other images.
#[derive(Debug, Clone, Copy)]
struct Beside {
    fresh: bool,
    suspects: u64,
}

impl Beside {
    /// Whether there is anything to do after what the session came to.
    fn is_needed(self, here: &Outcome) -> bool {
        !here.is_error() && (self.fresh || self.suspects > 0 && has_failures(here))
    }
}

fn has_failures(outcome: &Outcome) -> bool {
    TestCounts::of(outcome).is_some_and(|counts| counts.failed > 0 || counts.errors > 0)
}

/// Runs the tests in other images, once the session has, those of each system in its own.
fn run_beside(handle: &Handle, tests: Tests, beside: Beside, here: Outcome) -> Result<Outcome, String> {
    if tests.systems.len() < 2 {
        return run_one_beside(handle, tests, beside, here);
    }
    let mut fresh = Outcome::of_tests(String::new());
    let mut suspects = Vec::new();
    let mut notices: Vec<(String, Vec<String>)> = Vec::new();
    for ((name, known), system) in here.by_system().into_iter().zip(tests.systems.clone()) {
        if !beside.fresh && !report::could_be_run(name, &known.records) {
            continue;
        }
        let told = known.records.len();
        let outcome = run_one_beside(handle, Tests { systems: vec![system], ..tests.clone() }, beside, known);
        let mut outcome = outcome.unwrap_or_else(|reason| failed("SIMPLE-ERROR", reason));
        for notice in std::mem::take(&mut outcome.notices) {
            match notices.iter_mut().find(|(known, _)| *known == notice) {
                Some((_, systems)) => systems.push(name.to_owned()),
                None => notices.push((notice, vec![name.to_owned()])),
            }
        }
        if beside.fresh {
            fresh = fresh.with_system(name, told_as_test(name, outcome));
            continue;
        }
        let mut added = outcome.records.split_off(told);
        added.iter_mut().for_each(|record| record.set_system(name));
        suspects.extend(added);
    }
    let mut outcome = if beside.fresh { fresh } else { here };
    outcome.records.extend(suspects);
    // What is said of all need not say of which.
    outcome.notices.extend(notices.into_iter().map(|(notice, systems)| {
        if systems.len() == tests.systems.len() { notice } else { format!("{}: {notice}", systems.join(", ")) }
    }));
    Ok(outcome)
}

/// Of several systems, one that has no tests that could be run has one that failed, so that others are told of, too.
fn told_as_test(name: &str, outcome: Outcome) -> Outcome {
    let Err(error) = &outcome.result else { return outcome };
    let run = RunCounts { errors: 1, ..RunCounts::default() }.into();
    let status = TestStatus::Error;
    let test = TestResult { name: name.to_owned(), status, error: Some(0), ..TestResult::default() }.into();
    Outcome { records: vec![run, test], errors: vec![error.clone()], result: Ok(Vec::new()), ..outcome }
}

/// Runs the tests in other images, once the session has. If a fresh one is asked for, what is said is what they come to
/// there, and which ones differ.
fn run_one_beside(handle: &Handle, mut tests: Tests, beside: Beside, here: Outcome) -> Result<Outcome, String> {
    tests.registry = of_kind(&here.records).map(|directory: &Directory| directory.name.clone()).collect();
    tests.load = of_kind(&here.records).map(|system: &SystemToLoad| system.name.clone()).collect();
    tests.reload = false;
    if tests.systems.is_empty() && tests.load.is_empty() {
        return Err("The tests are in no file of a system that is loaded, which another image could load.".to_owned());
    }
    let mut outcome = if beside.fresh { run_fresh(handle, &tests, &here)? } else { here };
    if beside.suspects == 0 || outcome.is_error() || !has_failures(&outcome) {
        return Ok(outcome);
    }
    tests.suspects = beside.suspects;
    tests.endless = failed_tests(&outcome, |test| test.milliseconds >= tests.timeout);
    add_suspects(handle, &tests, &mut outcome);
    Ok(outcome)
}

/// The names of the tests that failed, of those that these are.
fn failed_tests(outcome: &Outcome, are: impl Fn(&TestResult) -> bool) -> Vec<String> {
    let failed = of_kind(&outcome.records).filter(|test: &&TestResult| test.status.is_failure() && are(test));
    failed.map(|test| test.name.clone()).collect()
}

/// Those of the tests of these names that passed.
fn passed_tests(names: &[String], records: &[Record]) -> Vec<String> {
    let passed = of_kind(records).filter(|test: &&TestResult| test.status == TestStatus::Passed);
    let passed: HashSet<_> = passed.map(|test| &test.name).collect();
    names.iter().filter(|name| passed.contains(name)).cloned().collect()
}

/// Runs the tests in a fresh image.
fn run_fresh(handle: &Handle, tests: &Tests, here: &Outcome) -> Result<Outcome, String> {
    let mut outcome = handle.run(tests)?;
    outcome.defined.clear();
    outcome.notices.push("The tests ran in a fresh image that loaded the files and nothing else.".to_owned());
    outcome.records.extend(differences(&here.records, &outcome.records));
    Ok(outcome)
}

/// Runs the tests once more under coverage and adds the suspects to what they came to.
fn add_suspects(handle: &Handle, tests: &Tests, outcome: &mut Outcome) {
    let failed = match handle.run(tests) {
        Ok(covered) => match covered.result {
            Ok(_) => {
                // Under coverage tests are slower: what fails there alone, as by its limit, is not of interest.
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
                    let more = passed.len().saturating_sub(NAMES);
                    outcome.notices.push(format!(
                        "No suspects of what passed where they were looked for, in another image that loaded the \
                         files: {}{}.",
                        passed[..passed.len() - more].join(", "),
                        if more > 0 { format!(" and {more} more") } else { String::new() }
                    ));
                }
                if !found && passed.len() < failed.len() {
                    outcome.notices.push(match passed.is_empty() {
                        _ if TestRun::of(&outcome.records).is_test_operation_alone() => NOTHING_TO_COMPARE.to_owned(),
                        true => format!("There are no suspects: the tests that failed {NOTHING_MARKED}"),
                        false => format!("There are no suspects: the other tests that failed {NOTHING_MARKED}"),
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
    outcome.notices.push(format!("Suspects could not be looked for. {failed}"));
}

/// Records `differs` of the tests that pass in one of the two images alone.
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
