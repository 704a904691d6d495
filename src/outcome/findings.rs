//! The results of operations and queries, each assembled from its records.

use serde::Serialize;

use super::records::{
    Check, Difference, ExpansionError, ExpansionPiece, ExpansionStep, FoundSymbol, More, MoreChecks, Note, Nothing,
    Omitted, ProfileSummary, ProfiledFunction, Record, Reference, Relation, Suspect, SuspectLine, Suspects, TestResult,
    Trace, TracedCall, of_kind,
};

/// Clones the records of one kind, in order.
macro_rules! clone_records {
    ($records:expr, $kind:ident) => {
        $records
            .iter()
            .filter_map(|record| if let Record::$kind(record) = record { Some(record.clone()) } else { None })
    };
}

/// Returns the number of results that were left out, because they were beyond the requested limit or were not kept.
fn omitted_count(records: &[Record]) -> u64 {
    let more = of_kind(records).map(|more: &More| more.count).sum::<u64>();
    more + of_kind(records).map(|omitted: &Omitted| omitted.count).sum::<u64>()
}

fn note_texts(records: &[Record]) -> Vec<String> {
    of_kind(records).map(|note: &Note| note.text.clone()).collect()
}

/// The result of a search for symbols and packages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct FoundSymbols {
    /// The best matches, best first.
    pub symbols: Vec<FoundSymbol>,
    /// The number of matches beyond the requested limit.
    pub more: u64,
    /// A message that nothing matches, with similar names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nothing: Option<String>,
}

impl From<Vec<Record>> for FoundSymbols {
    fn from(records: Vec<Record>) -> Self {
        Self {
            symbols: clone_records!(records, FoundSymbol).collect(),
            more: omitted_count(&records),
            nothing: of_kind(&records).next_back().map(|nothing: &Nothing| nothing.text.clone()),
        }
    }
}

/// The definitions that refer to a name in a given way, such as its callers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct References {
    /// The relation, if the name is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relation: Option<String>,
    /// The references, in the order of their source.
    pub references: Vec<Reference>,
    /// The number of references beyond the requested limit.
    pub more: u64,
    /// Sentences about references that may be missing.
    pub notes: Vec<String>,
}

impl From<Vec<Record>> for References {
    fn from(records: Vec<Record>) -> Self {
        Self {
            relation: of_kind(&records).next().map(|relation: &Relation| relation.name.clone()),
            references: clone_records!(records, Reference).collect(),
            more: omitted_count(&records),
            notes: note_texts(&records),
        }
    }
}

/// The expansion of a macro form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expansion {
    /// The recorded steps.
    pub steps: Vec<ExpansionStep>,
    /// The number of further steps, which were not recorded.
    pub more_steps: u64,
    /// The form after the expansion: the given form if it could not be expanded. Empty if an error stopped the expansion.
    pub text: String,
    /// The error that stopped the expansion.
    pub error: Option<ExpansionError>,
    /// Remarks about the expansion, for instance that the form could not be expanded.
    pub notes: Vec<String>,
}

impl From<Vec<Record>> for Expansion {
    fn from(records: Vec<Record>) -> Self {
        Self {
            steps: clone_records!(records, ExpansionStep).collect(),
            more_steps: omitted_count(&records),
            text: of_kind(&records).map(|piece: &ExpansionPiece| &*piece.text).collect(),
            error: clone_records!(records, ExpansionError).next(),
            notes: note_texts(&records),
        }
    }
}

/// The recorded calls of traced functions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTree<'a> {
    /// The summary of the trace.
    pub trace: &'a Trace,
    /// The calls, grouped by thread, each after its caller.
    pub calls: Vec<&'a TracedCall>,
}

impl<'a> CallTree<'a> {
    /// Assembles the call tree; returns `None` if the records contain no trace.
    #[must_use]
    pub fn of(records: &'a [Record]) -> Option<Self> {
        Some(Self { trace: of_kind(records).next()?, calls: of_kind(records).collect() })
    }
}

/// The profile of an evaluation: the functions in which it spent time or allocated memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile<'a> {
    /// The mode of the profiler, and the numbers of samples, threads and functions.
    pub summary: &'a ProfileSummary,
    /// The functions, sorted by the number of samples in the function itself, largest first.
    pub functions: Vec<&'a ProfiledFunction>,
}

impl<'a> Profile<'a> {
    /// Assembles the profile; returns `None` if the records contain no profile.
    #[must_use]
    pub fn of(records: &'a [Record]) -> Option<Self> {
        Some(Self { summary: of_kind(records).next()?, functions: of_kind(records).collect() })
    }
}

/// The results of a test run: the tests of one system, a package, a suite or a single test.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TestRun<'a> {
    /// The tests, failures first.
    pub tests: Vec<Test<'a>>,
    /// The tests that pass only in the session, or only in a fresh image.
    pub differences: Vec<&'a Difference>,
}

/// A test with its failed checks and suspects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Test<'a> {
    /// The result of the test.
    pub result: &'a TestResult,
    /// The first checks that failed.
    pub checks: Vec<&'a Check>,
    /// The number of further failed checks.
    pub more_checks: u64,
    /// The functions that may be at fault: a single list, or a list for each kind of failure that a test operation printed.
    pub suspects: Vec<SuspectList<'a>>,
}

/// The functions that may be at fault for a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SuspectList<'a> {
    /// The record that introduces the list: it names the test, and contains the failure report if a test operation printed
    /// the failure.
    pub header: &'a Suspects,
    /// The functions, most suspicious first. Each has a list of its lines that the failing test ran: suspicious lines,
    /// which no or only few passing tests ran, and lines of context, for which [`SuspectLine::passing`] is set.
    pub functions: Vec<(&'a Suspect, Vec<&'a SuspectLine>)>,
}

impl<'a> TestRun<'a> {
    /// Assembles the test run from its records.
    #[must_use]
    pub fn of(records: &'a [Record]) -> Self {
        let mut tests: Vec<Test<'a>> = Vec::new();
        for record in records {
            match (record, tests.last_mut()) {
                (Record::TestResult(result), _) => {
                    tests.push(Test { result, checks: Vec::new(), more_checks: 0, suspects: Vec::new() });
                }
                (Record::Check(check), Some(test)) => test.checks.push(check),
                (Record::MoreChecks(MoreChecks { count }), Some(test)) => test.more_checks += count,
                _ => {}
            }
        }
        // The records of suspects come after the records of all tests. A `Suspects` record names its test.
        let mut of = None;
        for record in records {
            if let Record::Suspects(suspects) = record {
                of = tests.iter().position(|test| test.result.name == suspects.name);
            }
            let Some(test) = of.and_then(|of| tests.get_mut(of)) else { continue };
            match (record, test.suspects.last_mut()) {
                (Record::Suspects(header), _) => test.suspects.push(SuspectList { header, functions: Vec::new() }),
                (Record::Suspect(suspect), Some(list)) => list.functions.push((suspect, Vec::new())),
                (Record::SuspectLine(line), Some(SuspectList { functions, .. })) => {
                    if let Some((_, lines)) = functions.last_mut() {
                        lines.push(line);
                    }
                }
                _ => {}
            }
        }
        Self { tests, differences: of_kind(records).collect() }
    }

    /// Returns the tests that failed or ended with an error.
    pub(crate) fn failures(&self) -> impl Iterator<Item = &Test<'a>> {
        self.tests.iter().filter(|test| test.result.status.is_failure())
    }

    /// Returns true if all tests of the run are ASDF test operations. The search for suspects then had no passing tests for
    /// comparison.
    pub(crate) fn has_only_test_operations(&self) -> bool {
        self.tests.iter().all(|test| test.result.is_test_operation())
    }
}

impl TestResult {
    /// Returns true for an ASDF test operation that counts as one test because its test framework is unknown.
    #[must_use]
    pub fn is_test_operation(&self) -> bool {
        self.framework == "ASDF"
    }
}
