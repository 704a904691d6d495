//! The report of run-tests.

mod failures;
mod suspects;

use std::fmt::Write as _;

use self::failures::{one_line, push_failures};
use super::escape::escape_markers;
use super::fit::{cut, length};
use super::load::count_text;
use super::{Sections, clipped_message, omission_marker};
use crate::audience::Audience;
use crate::outcome::{Outcome, PassingImage, Record, Suspects, TestCounts, TestResult, TestRun, TestStatus, of_kind};
use crate::tool_names;

/// Maximum length of a form, in characters.
const MAX_FORM: usize = 300;
/// Maximum length of a call or a name, in characters.
const MAX_CALL: usize = 120;
/// Maximum length of a path, in characters. The reader cannot open a path that is cut.
const MAX_PATH: usize = 1000;
/// Characters reserved for the text after the failures.
const RESERVED_AFTER_FAILURES: usize = 700;
/// Number of characters shown from the beginning and from the end of a test operation's output.
const MAX_PRINTED: [usize; 2] = [1500, 700];
/// Like [`MAX_PRINTED`], if the suspects already show the test operation's output for each failure.
const MAX_PRINTED_WITH_SUSPECTS: [usize; 2] = [600, 600];
/// Output of a test operation with at most this many lines is assumed not to report on single tests.
const MAX_SUMMARY_LINES: usize = 2;
/// The text between the results of two systems.
const SEPARATOR: &str = "\n\n";
/// Maximum number of names in a list of tests.
const MAX_NAMES: usize = 20;
/// Maximum number of warnings shown. The reports of loads show more.
const MAX_WARNINGS: usize = 3;
/// Maximum length of a warning, in characters.
const MAX_WARNING: usize = 160;

/// Returns the text of run-tests, in at most `max` characters: the counts, then the failed tests that fit. For several
/// systems, the text has a section for each system, and the total counts. If `suspects_available` is true and a search for
/// suspects could help, the text says how to ask for it.
#[must_use]
pub fn tests(outcome: &Outcome, max: usize, suspects_available: bool) -> String {
    let mut sections = Sections(String::new());
    sections.push_notices(&outcome.notices);
    let target = sections.begin();
    let room = max.saturating_sub(RESERVED_AFTER_FAILURES);
    let systems = outcome.split_by_system();
    let shows_all_output = if systems.is_empty() {
        push_run(target, outcome, room, suspects_available)
    } else {
        push_runs(target, &systems, room.saturating_sub(length(target)), suspects_available);
        false
    };
    let printed = outcome.stdout.char_count() + outcome.stderr.char_count();
    if printed > 0 && outcome.kept && !shows_all_output {
        let (first, them) = match (omitted_output(outcome), printed) {
            (0, 1) => (String::new(), "it"),
            (0, _) => (String::new(), "them"),
            (omitted, _) if printed - omitted == 1 => (", of which the first is kept".to_owned(), "it"),
            (omitted, _) => (format!(", of which the first {} are kept", printed - omitted), "these"),
        };
        let advice =
            format!(": check-evaluation {{\"id\": {}, \"part\": \"output\"}} shows {them}", outcome.evaluation);
        let advice = tool_names::if_usable(&["check-evaluation"], &advice);
        _ = write!(target, "\nThe test run printed {}{first}{advice}.", count_text(printed, "character"));
    }
    push_warnings(&mut sections, outcome);
    sections.0
}

/// Appends the results of several systems, each within its share of the room, and the total counts. Also appends the hint
/// about suspects if `hint` is true and a search for suspects could help.
fn push_runs(target: &mut String, systems: &[(&str, Outcome)], mut room: usize, hint: bool) {
    let section = |(name, outcome): &(&str, Outcome), room| {
        let mut text = format!("{}:\n", escape_markers(name));
        push_run(&mut text, outcome, room, false);
        text
    };
    // Smaller texts are placed first, so that room that they do not need goes to the larger texts.
    let mut full_texts: Vec<_> = systems.iter().map(|system| section(system, usize::MAX)).enumerate().collect();
    full_texts.sort_by_key(|(_, text)| length(text));
    let mut texts = vec![String::new(); systems.len()];
    for (done, (index, text)) in full_texts.into_iter().enumerate() {
        let share = (room / (systems.len() - done)).saturating_sub(SEPARATOR.len());
        let fits = length(&text) <= share;
        texts[index] = if fits {
            text
        } else {
            cut(section(&systems[index], share.saturating_sub(RESERVED_AFTER_FAILURES)), share)
        } + SEPARATOR;
        room = room.saturating_sub(length(&texts[index]));
    }
    target.extend(texts);
    let counts = systems.iter().map(|(_, outcome)| TestCounts::of(outcome).unwrap_or_default());
    let verdict = counts.clone().map(|counts| verdict(&counts)).max().unwrap_or(Verdict::NothingRan);
    let all = counts.fold(TestCounts::default(), |all, counts| all + counts);
    let verdict = if verdict == Verdict::NothingRan && all.passed > 0 { "NOT ALL RAN" } else { verdict.name() };
    _ = write!(target, "{} systems: {verdict}{}", systems.len(), counts_text(&all));
    if hint && systems.iter().any(|(name, outcome)| tests_ran(name, &outcome.records) && lacks_suspects(outcome)) {
        target.push_str(suspects_hint());
    }
}

/// Returns true if tests of `system`, one of several systems, ran. If none ran, the system's only result is a failed test
/// with the system's name.
pub(crate) fn tests_ran(system: &str, records: &[Record]) -> bool {
    of_kind(records).any(|test: &TestResult| test.name != system)
}

/// Appends the results of one run, with the failures cut to `room` characters. Also appends the hint about suspects if
/// `hint` is true and a search for suspects could help. Returns true if all output of the tests is shown.
fn push_run(target: &mut String, outcome: &Outcome, room: usize, hint: bool) -> bool {
    let counts = TestCounts::of(outcome).unwrap_or_default();
    target.push_str(&counts_line(&counts));
    push_differences(target, outcome);
    push_tests_without_checks(target, outcome);
    let (printed, shows_all_output) = printed_by_test_op(outcome);
    push_failures(target, outcome, room.saturating_sub(length(&printed)));
    if hint && lacks_suspects(outcome) {
        target.push_str(suspects_hint());
    }
    target.push_str(&printed);
    shows_all_output
}

/// Returns the line shown when suspects were not asked for. Empty for the REPL, whose commands cannot ask for suspects.
fn suspects_hint() -> &'static str {
    match Audience::current() {
        Audience::Agent => {
            "\nrun-tests with `suspects`: 3 also lists code that failed tests ran and few or no passing tests ran."
        }
        Audience::Shell | Audience::AttachedShell => {
            "\n--suspects 3 also lists code that failed tests ran and few or no passing tests ran."
        }
        Audience::Repl => "",
    }
}

/// Returns true if tests failed, no suspects were looked for, and a search for them might find some.
fn lacks_suspects(outcome: &Outcome) -> bool {
    let counts = TestCounts::of(outcome).unwrap_or_default();
    counts.failed + counts.errors > 0
        && (!TestRun::of(&outcome.records).has_only_test_operations()
            || outcome.printed().trim().lines().count() > MAX_SUMMARY_LINES)
        && !outcome.records.iter().any(|record| matches!(record, Record::Suspects(_) | Record::NoSuspects(_)))
}

/// The verdict on a run, worst last.
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

/// Returns the line with the verdict and the counts.
fn counts_line(counts: &TestCounts) -> String {
    format!("{}{}", verdict(counts).name(), counts_text(counts))
}

/// Returns the counts as text, preceded by two spaces.
fn counts_text(counts: &TestCounts) -> String {
    let TestCounts { passed, failed, errors, skipped, milliseconds } = counts;
    let seconds = seconds(*milliseconds);
    let plural = if *errors == 1 { "" } else { "s" };
    format!("  {passed} passed, {failed} failed, {errors} error{plural}, {skipped} skipped in {seconds} s")
}

/// Returns the number of characters of output that were not kept.
fn omitted_output(outcome: &Outcome) -> u64 {
    outcome.stdout.omitted + outcome.stderr.omitted
}

/// Returns the beginning and the end of the output of a run with a test operation, since nothing else is known about
/// the operation's tests. Loads of systems are part of the run. The boolean is true if this is all of the output. Lines
/// without letters or digits, such as rows of dots, are left out. The text is empty if no test operation ran or if the
/// run printed nothing.
fn printed_by_test_op(outcome: &Outcome) -> (String, bool) {
    if !of_kind(&outcome.records).any(TestResult::is_test_operation) {
        return (String::new(), false);
    }
    let printed = outcome.printed();
    let lines = printed.lines().filter(|line| line.chars().any(char::is_alphanumeric));
    let text = escape_markers(lines.collect::<Vec<_>>().join("\n").trim());
    let characters = length(&text);
    let end = match omitted_output(outcome) {
        0 if characters == 0 => return (String::new(), false),
        0 => String::new(),
        omitted => omission_marker(omitted),
    };
    let has_printed_suspects = of_kind(&outcome.records).any(|suspects: &Suspects| suspects.printed.is_some());
    let [first, last] = if has_printed_suspects { MAX_PRINTED_WITH_SUSPECTS } else { MAX_PRINTED };
    if characters <= first + last {
        return (format!("\nThe test run printed:\n{text}{end}"), end.is_empty());
    }
    let at = |count| text.char_indices().nth(count).map_or(text.len(), |(at, _)| at);
    let between = omission_marker((characters - first - last) as u64);
    let (first, last) = (&text[..at(first)], &text[at(characters - last)..]);
    (format!("\nThe test run printed:\n{first}\n{between}\n{last}{end}"), false)
}

/// Appends the tests that pass only in the session, or only in the fresh image.
fn push_differences(target: &mut String, outcome: &Outcome) {
    for (passes, one, many) in [
        (PassingImage::Session, "this test passes", "these tests pass"),
        (PassingImage::Fresh, "this test fails", "these tests fail"),
    ] {
        let differing = TestRun::of(&outcome.records).differences;
        let differing = differing.iter().filter(|difference| difference.passes == passes);
        let names: Vec<_> = differing.map(|difference| one_line(&difference.name, MAX_CALL)).collect();
        if !names.is_empty() {
            let shown = names.iter().take(MAX_NAMES).cloned().collect::<Vec<_>>().join(", ");
            let rest = if names.len() > MAX_NAMES { ", …" } else { "" };
            let which = if names.len() == 1 { one } else { many };
            _ = write!(target, "\nStale state: {which} in this session, but not in a fresh image: {shown}{rest}");
        }
    }
}

/// Appends the passed tests that made no check. Some test frameworks count such tests as passed, others do not.
fn push_tests_without_checks(target: &mut String, outcome: &Outcome) {
    let tests = of_kind(&outcome.records).filter(|test: &&TestResult| !test.is_test_operation());
    let empty = tests.filter(|test| test.status == TestStatus::Passed && test.checks == Some(0));
    let names: Vec<_> = empty.map(|test| one_line(&test.name, MAX_CALL)).collect();
    if !names.is_empty() {
        let shown = names.iter().take(MAX_NAMES).cloned().collect::<Vec<_>>().join(", ");
        let rest =
            if names.len() > MAX_NAMES { format!(" and {} more", names.len() - MAX_NAMES) } else { String::new() };
        _ = write!(target, "\nTests without checks: {shown}{rest}");
    }
}

/// Formats milliseconds as seconds: with three decimal places below 0.1 s, otherwise with one.
fn seconds(milliseconds: u64) -> String {
    match milliseconds {
        ..100 => format!("0.{milliseconds:03}"),
        _ => format!("{}.{}", milliseconds / 1000, milliseconds % 1000 / 100),
    }
}

/// Appends the warnings that occurred while the tests were loaded.
fn push_warnings(sections: &mut Sections, outcome: &Outcome) {
    let all = outcome.warnings.len() as u64 + outcome.warnings_omitted;
    if all == 0 {
        return;
    }
    let target = sections.begin();
    target.push_str("[warnings]");
    for warning in outcome.warnings.iter().take(MAX_WARNINGS) {
        let message = one_line(&clipped_message(&warning.message), MAX_WARNING);
        _ = write!(target, "\n{}: {message}", escape_markers(&warning.kind));
        if let (Some(file), Some(line)) = (&warning.file, warning.line) {
            _ = write!(target, " ({}:{line})", escape_markers(file));
        }
    }
    let more = all.saturating_sub(MAX_WARNINGS as u64);
    if more > 0 {
        let advice = tool_names::if_usable(
            &["load-system"],
            "; load-system with `force` compiles the files again and shows more",
        );
        _ = write!(target, "\n[... {} omitted{advice}]", count_text(more, "warning"));
    }
}

#[cfg(test)]
mod wording_tests {
    use super::tests;
    use crate::outcome::{Clipped, Difference, MoreChecks, Outcome, Record, TestResult, TestStatus, Warning};

    #[test]
    fn one_omitted_check_and_one_test_with_stale_state_are_in_the_singular() {
        for (count, names, check, stale) in [
            (1, &["A"][..], "... 1 more check of this test failed", "this test passes in this session"),
            (2, &["A", "B"], "... 2 more checks of this test failed", "these tests pass in this session"),
        ] {
            let test = TestResult { name: "A".to_owned(), status: TestStatus::Failed, ..TestResult::default() };
            let mut records: Vec<Record> = vec![test.into(), MoreChecks { count }.into()];
            for name in names {
                records.push(Difference { name: (*name).to_owned(), ..Difference::default() }.into());
            }
            let outcome = Outcome { records, ..Outcome::from_test_output(String::new()) };
            let report = tests(&outcome, 10_000, false);
            assert!(report.contains(check) && report.contains(stale), "{report}");
        }
    }

    #[test]
    fn a_report_with_omitted_warnings_says_how_to_see_more() {
        let warning = |n: u8| Warning {
            kind: "STYLE-WARNING".to_owned(),
            message: format!("Warning {n}.").into(),
            file: None,
            line: None,
            column: None,
            form: None,
        };
        let warnings = (1..=5).map(warning).collect();
        let outcome = Outcome { warnings, ..Outcome::from_test_output(String::new()) };
        let report = tests(&outcome, 10_000, false);
        let end = "STYLE-WARNING: Warning 3.\n[... 2 warnings omitted; load-system with `force` compiles the files again and \
                   shows more]";
        assert!(report.ends_with(end), "{report}");
    }

    #[test]
    fn one_printed_or_kept_character_is_in_the_singular() {
        for (text, omitted, expected) in [
            ("x", 0, "The test run printed 1 character: check-evaluation {\"id\": 3, \"part\": \"output\"} shows it."),
            (
                "x",
                2,
                "The test run printed 3 characters, of which the first is kept: check-evaluation {\"id\": 3, \"part\": \
                 \"output\"} shows it.",
            ),
            (
                "xy",
                1,
                "The test run printed 3 characters, of which the first 2 are kept: check-evaluation {\"id\": 3, \"part\": \
                 \"output\"} shows these.",
            ),
        ] {
            let stdout = Clipped { text: text.to_owned(), omitted };
            let outcome = Outcome { evaluation: 3, kept: true, stdout, ..Outcome::from_test_output(String::new()) };
            let report = tests(&outcome, 10_000, false);
            assert!(report.ends_with(expected), "{report}");
        }
    }
}
