//! What operations and queries found, each put together from its records.

use serde::Serialize;

use super::records::{
    Check, Difference, ExpansionError, ExpansionPiece, ExpansionStep, FoundSymbol, More, MoreChecks, Note, Nothing,
    Omitted, ProfileSummary, ProfiledFunction, Record, Reference, Relation, Suspect, SuspectLine, Suspects, TestResult,
    Trace, TracedCall, of_kind,
};

/// Takes out the records of one kind, in their order.
macro_rules! all {
    ($records:expr, $kind:ident) => {
        $records
            .iter()
            .filter_map(|record| if let Record::$kind(record) = record { Some(record.clone()) } else { None })
    };
}

/// Returns how many more there are than were asked for, or are kept.
fn more(records: &[Record]) -> u64 {
    let more = of_kind(records).map(|more: &More| more.count).sum::<u64>();
    more + of_kind(records).map(|omitted: &Omitted| omitted.count).sum::<u64>()
}

fn notes(records: &[Record]) -> Vec<String> {
    of_kind(records).map(|note: &Note| note.text.clone()).collect()
}

/// What a search for symbols and packages found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct FoundSymbols {
    /// The best matches, the best first.
    pub symbols: Vec<FoundSymbol>,
    /// How many more there are than were asked for.
    pub more: u64,
    /// Sentences that say that there are none, with near names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nothing: Option<String>,
}

impl From<Vec<Record>> for FoundSymbols {
    fn from(records: Vec<Record>) -> Self {
        Self {
            symbols: all!(records, FoundSymbol).collect(),
            more: more(&records),
            nothing: of_kind(&records).next_back().map(|nothing: &Nothing| nothing.text.clone()),
        }
    }
}

/// What stands in a relation to a name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct References {
    /// The relation, when the name is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relation: Option<String>,
    /// In the order of their source.
    pub references: Vec<Reference>,
    /// How many more there are than were asked for.
    pub more: u64,
    /// Sentences about what is not among them.
    pub notes: Vec<String>,
}

impl From<Vec<Record>> for References {
    fn from(records: Vec<Record>) -> Self {
        Self {
            relation: of_kind(&records).next().map(|relation: &Relation| relation.name.clone()),
            references: all!(records, Reference).collect(),
            more: more(&records),
            notes: notes(&records),
        }
    }
}

/// What a macro form expands to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expansion {
    /// The steps, as far as they are named.
    pub steps: Vec<ExpansionStep>,
    /// How many more steps there were.
    pub more_steps: u64,
    /// The expansion, empty if there is none.
    pub text: String,
    /// What failed instead.
    pub error: Option<ExpansionError>,
    /// Sentences about the expansion.
    pub notes: Vec<String>,
}

impl From<Vec<Record>> for Expansion {
    fn from(records: Vec<Record>) -> Self {
        Self {
            steps: all!(records, ExpansionStep).collect(),
            more_steps: more(&records),
            text: of_kind(&records).map(|piece: &ExpansionPiece| &*piece.text).collect(),
            error: all!(records, ExpansionError).next(),
            notes: notes(&records),
        }
    }
}

/// The calls of traced functions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTree<'a> {
    /// What was traced.
    pub trace: &'a Trace,
    /// Each after the one that it is in, those of one thread together.
    pub calls: Vec<&'a TracedCall>,
}

impl<'a> CallTree<'a> {
    /// The one that records tell of, if they do.
    #[must_use]
    pub fn of(records: &'a [Record]) -> Option<Self> {
        Some(Self { trace: of_kind(records).next()?, calls: of_kind(records).collect() })
    }
}

/// Where an evaluation spent its time, or what allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile<'a> {
    /// What the profiler counted.
    pub summary: &'a ProfileSummary,
    /// The functions, the one that ran most itself first.
    pub functions: Vec<&'a ProfiledFunction>,
}

impl<'a> Profile<'a> {
    /// The one that records tell of, if they do.
    #[must_use]
    pub fn of(records: &'a [Record]) -> Option<Self> {
        Some(Self { summary: of_kind(records).next()?, functions: of_kind(records).collect() })
    }
}

/// A run of tests of one system, or of whatever else.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TestRun<'a> {
    /// The tests, those that failed first.
    pub tests: Vec<Test<'a>>,
    /// The tests that pass in the session or in a fresh image alone.
    pub differences: Vec<&'a Difference>,
}

/// A test with all that is told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Test<'a> {
    /// What it came to.
    pub result: &'a TestResult,
    /// The first checks that did not hold.
    pub checks: Vec<&'a Check>,
    /// How many more did not.
    pub more_checks: u64,
    /// The functions that may be at fault: one list, or one for each kind of failure that a test operation printed.
    pub suspects: Vec<SuspectList<'a>>,
}

/// Functions that may be at fault for a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SuspectList<'a> {
    /// What they are for.
    pub of: &'a Suspects,
    /// The functions, each with the lines that make the difference; the most suspicious one first.
    pub functions: Vec<(&'a Suspect, Vec<&'a SuspectLine>)>,
}

impl<'a> TestRun<'a> {
    /// The one that records tell of.
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
        // They come after all tests.
        let mut of = None;
        for record in records {
            if let Record::Suspects(suspects) = record {
                of = tests.iter().position(|test| test.result.name == suspects.name);
            }
            let Some(test) = of.and_then(|of| tests.get_mut(of)) else { continue };
            match (record, test.suspects.last_mut()) {
                (Record::Suspects(of), _) => test.suspects.push(SuspectList { of, functions: Vec::new() }),
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

    /// Those that tell of a fault.
    pub(crate) fn failures(&self) -> impl Iterator<Item = &Test<'a>> {
        self.tests.iter().filter(|test| test.result.status.is_failure())
    }

    /// True when there is no other test than a test operation, and so nothing that its suspects could be told by.
    pub(crate) fn is_test_operation_alone(&self) -> bool {
        self.tests.iter().all(|test| test.result.is_test_operation())
    }
}

impl TestResult {
    /// True for a test operation that is one test itself.
    #[must_use]
    pub fn is_test_operation(&self) -> bool {
        self.framework == "ASDF"
    }
}
