//! What tests came to.

mod failures;
mod suspects;

use std::fmt::Write as _;

use self::failures::{one_line, push_failures};
use super::escape::escape_markers;
use super::fit::{cut, length};
use super::{Sections, clipped_message, omission};
use crate::outcome::{Outcome, PassingImage, Record, Suspects, TestCounts, TestResult, TestRun, TestStatus, of_kind};

/// Characters of a form, and of a call or a name.
const MAX_FORM: usize = 300;
const MAX_CALL: usize = 120;
/// Characters of what comes after the failures.
const AROUND: usize = 700;
/// Characters of what a test operation printed.
const PRINTED: [usize; 2] = [1500, 700];
/// The same where the suspects tell what it printed of each failure.
const PRINTED_BESIDE_SUSPECTS: [usize; 2] = [600, 600];
/// Up to so many lines that it printed are no reports on its tests.
const FEW_LINES: usize = 2;
/// What is between those of several systems.
const BETWEEN: &str = "\n\n";
/// Names in a list of tests.
const NAMES: usize = 20;
/// Warnings that are shown, and characters of each: the tools that load say more.
const WARNINGS: usize = 3;
const MAX_WARNING: usize = 160;
/// What is said where suspects were not asked for.
const SUSPECTS_HINT: &str =
    "\nrun-tests with `suspects`: 3 also says which code these tests ran and passing ones did not.";

/// The answer of run-tests, of at most `max` characters: the counts, then the tests that failed as far as there is room. Of
/// several systems this for each, and the counts of all.
#[must_use]
pub fn tests(outcome: &Outcome, max: usize) -> String {
    let mut sections = Sections(String::new());
    sections.notices(&outcome.notices);
    let target = sections.begin();
    let room = max.saturating_sub(AROUND);
    let systems = outcome.by_system();
    let whole = if systems.is_empty() {
        push_run(target, outcome, room, true)
    } else {
        push_runs(target, &systems, room.saturating_sub(length(target)));
        false
    };
    let printed = outcome.stdout.characters() + outcome.stderr.characters();
    if printed > 0 && outcome.kept && !whole {
        let (first, them) = match omitted(outcome) {
            0 => (String::new(), "them"),
            omitted => (format!(", of which the first {} are kept", printed - omitted), "these"),
        };
        _ = write!(
            target,
            "\nThe tests printed {printed} characters{first}: check-evaluation {{\"id\": {}, \"part\": \"output\"}} shows {them}.",
            outcome.evaluation
        );
    }
    push_warnings(&mut sections, outcome);
    sections.0
}

/// What the tests of each of several systems came to, each in its share of the room, and the counts of all.
fn push_runs(target: &mut String, systems: &[(&str, Outcome)], mut room: usize) {
    let section = |(name, outcome): &(&str, Outcome), room| {
        let mut text = format!("{}:\n", escape_markers(name));
        push_run(&mut text, outcome, room, false);
        text
    };
    // What needs less than its share leaves the rest to others.
    let mut whole: Vec<_> = systems.iter().map(|system| section(system, usize::MAX)).enumerate().collect();
    whole.sort_by_key(|(_, text)| length(text));
    let mut texts = vec![String::new(); systems.len()];
    for (done, (index, text)) in whole.into_iter().enumerate() {
        let share = (room / (systems.len() - done)).saturating_sub(BETWEEN.len());
        let fits = length(&text) <= share;
        texts[index] =
            if fits { text } else { cut(section(&systems[index], share.saturating_sub(AROUND)), share) } + BETWEEN;
        room = room.saturating_sub(length(&texts[index]));
    }
    target.extend(texts);
    let counts = systems.iter().map(|(_, outcome)| TestCounts::of(outcome).unwrap_or_default());
    let verdict = counts.clone().map(|counts| verdict(&counts)).max().unwrap_or(Verdict::NothingRan);
    let all = counts.fold(TestCounts::default(), |all, counts| all + counts);
    let verdict = if verdict == Verdict::NothingRan && all.passed > 0 { "NOT ALL RAN" } else { verdict.name() };
    _ = write!(target, "{} systems: {verdict}{}", systems.len(), counts_text(&all));
    if systems.iter().any(|(name, outcome)| could_be_run(name, &outcome.records) && lacks_suspects(outcome)) {
        target.push_str(SUSPECTS_HINT);
    }
}

/// True when tests of one of several systems could be run: else there is one that failed, called as the system.
pub(crate) fn could_be_run(system: &str, records: &[Record]) -> bool {
    of_kind(records).any(|test: &TestResult| test.name != system)
}

/// What the tests of a system, or of whatever else, came to; the failures in this room. True when all that they printed is
/// shown.
fn push_run(target: &mut String, outcome: &Outcome, room: usize, hint: bool) -> bool {
    let counts = TestCounts::of(outcome).unwrap_or_default();
    target.push_str(&counts_line(&counts));
    push_differences(target, outcome);
    push_without_checks(target, outcome);
    let (printed, whole) = printed_by_test_op(outcome);
    push_failures(target, outcome, room.saturating_sub(length(&printed)));
    if hint && lacks_suspects(outcome) {
        target.push_str(SUSPECTS_HINT);
    }
    target.push_str(&printed);
    whole
}

/// True when tests failed whose suspects were not looked for and could be told.
fn lacks_suspects(outcome: &Outcome) -> bool {
    let counts = TestCounts::of(outcome).unwrap_or_default();
    counts.failed + counts.errors > 0
        && (!TestRun::of(&outcome.records).is_test_operation_alone()
            || outcome.printed().trim().lines().count() > FEW_LINES)
        && !outcome.records.iter().any(|record| matches!(record, Record::Suspects(_) | Record::NoSuspects(_)))
}

/// What tests came to in a word, the worst last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    AllPass,
    NothingRan,
    Failed,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::AllPass => "=> all pass",
            Self::NothingRan => "NOTHING RAN",
            Self::Failed => "FAILED",
        }
    }
}

fn verdict(counts: &TestCounts) -> Verdict {
    match counts {
        TestCounts { failed: 0, errors: 0, passed: 1.., .. } => Verdict::AllPass,
        TestCounts { failed: 0, errors: 0, .. } => Verdict::NothingRan,
        _ => Verdict::Failed,
    }
}

/// The verdict in one line.
fn counts_line(counts: &TestCounts) -> String {
    format!("{}{}", verdict(counts).name(), counts_text(counts))
}

/// How many tests came to what, after two spaces.
fn counts_text(counts: &TestCounts) -> String {
    let TestCounts { passed, failed, errors, skipped, milliseconds } = counts;
    let seconds = tenths(*milliseconds);
    let plural = if *errors == 1 { "" } else { "s" };
    format!("  {passed} passed, {failed} failed, {errors} error{plural}, {skipped} skipped in {seconds} s")
}

/// How many characters that the tests printed were not kept.
fn omitted(outcome: &Outcome) -> u64 {
    outcome.stdout.omitted + outcome.stderr.omitted
}

/// What a test operation printed that is one test itself, the beginning and the end, as no more is known of its tests; and
/// whether that is all. Lines of dots and the like, which show how far it is, are left out. Empty without such a test.
fn printed_by_test_op(outcome: &Outcome) -> (String, bool) {
    if !of_kind(&outcome.records).any(TestResult::is_test_operation) {
        return (String::new(), false);
    }
    let printed = outcome.printed();
    let lines = printed.lines().filter(|line| line.chars().any(char::is_alphanumeric));
    let text = escape_markers(lines.collect::<Vec<_>>().join("\n").trim());
    let characters = length(&text);
    let end = match omitted(outcome) {
        0 if characters == 0 => return (String::new(), false),
        0 => String::new(),
        omitted => omission(omitted),
    };
    let told = of_kind(&outcome.records).any(|suspects: &Suspects| suspects.printed.is_some());
    let [first, last] = if told { PRINTED_BESIDE_SUSPECTS } else { PRINTED };
    if characters <= first + last {
        return (format!("\nIt printed:\n{text}{end}"), end.is_empty());
    }
    let at = |count| text.char_indices().nth(count).map_or(text.len(), |(at, _)| at);
    let between = omission((characters - first - last) as u64);
    let (first, last) = (&text[..at(first)], &text[at(characters - last)..]);
    (format!("\nIt printed:\n{first}\n{between}\n{last}{end}"), false)
}

/// Tests that pass in the session or in the fresh image alone.
fn push_differences(target: &mut String, outcome: &Outcome) {
    for (passes, says) in [
        (PassingImage::Session, "Stale state: only in this session, not in a fresh image, these pass"),
        (PassingImage::Fresh, "Stale state: in this session, not in a fresh image, these fail"),
    ] {
        let differing = TestRun::of(&outcome.records).differences;
        let differing = differing.iter().filter(|difference| difference.passes == passes);
        let names: Vec<_> = differing.map(|difference| one_line(&difference.name, MAX_CALL)).collect();
        if !names.is_empty() {
            let shown = names.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
            let rest = if names.len() > NAMES { ", …" } else { "" };
            _ = write!(target, "\n{says}: {shown}{rest}");
        }
    }
}

/// Tests that passed and checked nothing, which their frameworks count differently.
fn push_without_checks(target: &mut String, outcome: &Outcome) {
    let tests = of_kind(&outcome.records).filter(|test: &&TestResult| !test.is_test_operation());
    let empty = tests.filter(|test| test.status == TestStatus::Passed && test.checks == Some(0));
    let names: Vec<_> = empty.map(|test| one_line(&test.name, MAX_CALL)).collect();
    if !names.is_empty() {
        let shown = names.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
        let rest = if names.len() > NAMES { format!(" and {} more", names.len() - NAMES) } else { String::new() };
        _ = write!(target, "\nMade no check: {shown}{rest}");
    }
}

/// Seconds with as many places as say something.
fn tenths(milliseconds: u64) -> String {
    match milliseconds {
        ..100 => format!("0.{milliseconds:03}"),
        _ => format!("{}.{}", milliseconds / 1000, milliseconds % 1000 / 100),
    }
}

/// What loading the tests warned of.
fn push_warnings(sections: &mut Sections, outcome: &Outcome) {
    let all = outcome.warnings.len() as u64 + outcome.warnings_omitted;
    if all == 0 {
        return;
    }
    let target = sections.begin();
    target.push_str("[warnings]");
    for warning in outcome.warnings.iter().take(WARNINGS) {
        let message = one_line(&clipped_message(&warning.message), MAX_WARNING);
        _ = write!(target, "\n{}: {message}", escape_markers(&warning.kind));
        if let (Some(file), Some(line)) = (&warning.file, warning.line) {
            _ = write!(target, " ({}:{line})", escape_markers(file));
        }
    }
    let more = all.saturating_sub(WARNINGS as u64);
    if more > 0 {
        _ = write!(target, "\n[... {more} warnings omitted]");
    }
}
