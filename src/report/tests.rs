//! What tests came to.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;

use super::escape::escape_markers;
use super::fit::{cut, length};
use super::{Sections, call, clipped_message};
use crate::outcome::{ErrorRecord, Frame, Outcome, Record, TestCounts};

/// Characters of a form, a value and a message, and of a frame's call.
const MAX_FORM: usize = 300;
const MAX_VALUE: usize = 400;
const MAX_MESSAGE: usize = 400;
/// Characters of the message of an error where another like it is shown.
const MAX_ALIKE: usize = 120;
const MAX_CALL: usize = 120;
/// Up to so many characters a check takes one line.
const ONE_LINE: usize = 110;
/// Frames of the user's that errors have in common whose tests fail alike.
const FRAMES: usize = 3;
/// Characters of what comes after the failures.
const AROUND: usize = 700;
/// Characters of what a test operation printed.
const PRINTED: [usize; 2] = [1500, 700];
/// The same where the suspects tell what it printed of each failure.
const PRINTED_BESIDE_SUSPECTS: [usize; 2] = [300, 300];
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

/// How much is told of each test that failed: the less, the more of them there are, as each is worth more than another one's
/// fourth check.
struct Detail {
    checks: usize,
    frames: usize,
    /// Suspects that are shown with lines of theirs, and how many of these. Of the others the place is told.
    functions: usize,
    lines: usize,
    /// Lines that passing tests ran as well, more of them than others of that function, are shown, too.
    context: bool,
}

/// The most first: the first one is taken with which there is room for all.
const DETAILS: [Detail; 6] = [
    Detail { checks: 4, frames: FRAMES, functions: usize::MAX, lines: usize::MAX, context: true },
    Detail { checks: 2, frames: 2, functions: usize::MAX, lines: 8, context: false },
    Detail { checks: 1, frames: 1, functions: usize::MAX, lines: 6, context: false },
    Detail { checks: 1, frames: 1, functions: 3, lines: 5, context: false },
    Detail { checks: 1, frames: 1, functions: 2, lines: 4, context: false },
    Detail { checks: 1, frames: 1, functions: 1, lines: 2, context: false },
];

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
    let printed = outcome.turns.iter().copied().map(u64::from).sum::<u64>();
    if printed > 0 && outcome.kept && !whole {
        _ = write!(
            target,
            "\nThe tests printed {printed} characters: evaluation {{\"id\": {}, \"action\": \"output\"}} shows them.",
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
    records.iter().any(|record| record.kind == "test" && name(record) != system)
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
        && (!ran_test_op_alone(&outcome.records) || outcome.printed().trim().lines().count() > FEW_LINES)
        && !outcome.records.iter().any(|record| record.kind == "suspects")
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

/// True for the record of a test operation that is one test itself.
fn is_test_op(record: &Record) -> bool {
    record.kind == "test" && record.text("framework") == Some("ASDF")
}

/// True when there is no other test than a test operation, and so nothing that its suspects could be told by.
pub(crate) fn ran_test_op_alone(records: &[Record]) -> bool {
    records.iter().filter(|record| record.kind == "test").all(is_test_op)
}

/// What a test operation printed that is one test itself, the beginning and the end, as no more is known of its tests; and
/// whether that is all. Lines of dots and the like, which show how far it is, are left out. Empty without such a test.
fn printed_by_test_op(outcome: &Outcome) -> (String, bool) {
    if !outcome.records.iter().any(is_test_op) {
        return (String::new(), false);
    }
    let printed = outcome.printed();
    let lines = printed.lines().filter(|line| line.chars().any(char::is_alphanumeric));
    let text = escape_markers(lines.collect::<Vec<_>>().join("\n").trim());
    let characters = length(&text);
    if characters == 0 {
        return (String::new(), false);
    }
    let told = outcome.records.iter().any(|record| record.kind == "suspects" && record.text("printed").is_some());
    let [first, last] = if told { PRINTED_BESIDE_SUSPECTS } else { PRINTED };
    if characters <= first + last {
        return (format!("\nIt printed:\n{text}"), true);
    }
    let at = |count| text.char_indices().nth(count).map_or(text.len(), |(at, _)| at);
    let omitted = characters - first - last;
    let (first, last) = (&text[..at(first)], &text[at(characters - last)..]);
    (format!("\nIt printed:\n{first}\n[... {omitted} characters omitted]\n{last}"), false)
}

/// Tests that pass in the session or in the fresh image alone.
fn push_differences(target: &mut String, outcome: &Outcome) {
    for (passes, says) in [
        ("session", "Stale state: only in this session, not in a fresh image, these pass"),
        ("fresh", "Stale state: in this session, not in a fresh image, these fail"),
    ] {
        let differing = outcome.records.iter().filter(|record| record.kind == "differs");
        let names: Vec<_> = differing
            .filter(|record| record.text("passes") == Some(passes))
            .map(|record| one_line(name(record), MAX_CALL))
            .collect();
        if !names.is_empty() {
            let shown = names.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
            let rest = if names.len() > NAMES { ", …" } else { "" };
            _ = write!(target, "\n{says}: {shown}{rest}");
        }
    }
}

/// Tests that passed and checked nothing, which their frameworks count differently.
fn push_without_checks(target: &mut String, outcome: &Outcome) {
    let tests = outcome.records.iter().filter(|record| record.kind == "test" && !is_test_op(record));
    let empty = tests.filter(|test| test.text("status") == Some("passed") && test.number("checks") == Some(0));
    let names: Vec<_> = empty.map(|test| one_line(name(test), MAX_CALL)).collect();
    if !names.is_empty() {
        let shown = names.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
        let rest = if names.len() > NAMES { format!(" and {} more", names.len() - NAMES) } else { String::new() };
        _ = write!(target, "\nMade no check: {shown}{rest}");
    }
}

/// Seconds with as many places as say something.
fn tenths(milliseconds: i64) -> String {
    match milliseconds {
        ..100 => format!("0.{milliseconds:03}"),
        _ => format!("{}.{}", milliseconds / 1000, milliseconds % 1000 / 100),
    }
}

/// A test with what was recorded of its checks, and of what it ran.
struct Test<'a> {
    record: &'a Record,
    details: Vec<&'a Record>,
    suspects: Vec<&'a Record>,
}

/// The tests, each with the records after its own that belong to it.
fn with_details(records: &[Record]) -> Vec<Test<'_>> {
    let mut tests: Vec<Test<'_>> = Vec::new();
    for record in records {
        match (record.kind.as_str(), tests.last_mut()) {
            ("test", _) => tests.push(Test { record, details: Vec::new(), suspects: Vec::new() }),
            ("check" | "more-checks", Some(test)) => test.details.push(record),
            _ => {}
        }
    }
    // They come after all tests.
    let mut of = None;
    for record in records {
        match record.kind.as_str() {
            "suspects" | "suspect" | "line" => {
                if record.kind == "suspects" {
                    of = tests.iter().position(|test| name(test.record) == name(record));
                }
                if let Some(test) = of.and_then(|of| tests.get_mut(of))
                    && (record.kind != "suspects" || record.text("printed").is_some())
                {
                    test.suspects.push(record);
                }
            }
            _ => {}
        }
    }
    tests
}

fn has_failed(test: &Record) -> bool {
    matches!(test.text("status"), Some("failed" | "error"))
}

fn push_failures(target: &mut String, outcome: &Outcome, max: usize) {
    let tests = with_details(&outcome.records);
    let failed: Vec<_> = tests.iter().filter(|test| has_failed(test.record)).collect();
    let entries = entries(&failed, &outcome.errors);
    let room = max.saturating_sub(length(target));
    let written = |detail| written_entries(&entries, &outcome.errors, detail, room);
    let [first, rest @ ..] = &DETAILS;
    let mut written_entries = written(first);
    for detail in rest {
        if written_entries.len() == entries.len() {
            break;
        }
        written_entries = written(detail);
    }
    let omitted = &entries[written_entries.len()..];
    target.extend(written_entries);
    if !omitted.is_empty() {
        let tests = omitted.iter().flat_map(|entry| std::iter::once(&entry.test).chain(&entry.alike));
        let names: Vec<_> = tests.map(|test| one_line(name(test.record), MAX_CALL)).collect();
        let more = names.len();
        let shown = names.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
        let rest = if more > NAMES { ", …" } else { "" };
        _ = write!(
            target,
            "\n... {more} more failed, for which there is no room here (run-tests with `name` shows one): {shown}{rest}"
        );
    }
}

/// What is told of the entries, of as many as there is room for.
fn written_entries(
    entries: &[Entry<'_, '_>],
    errors: &[Arc<ErrorRecord>],
    detail: &Detail,
    mut room: usize,
) -> Vec<String> {
    let mut written = Vec::new();
    for index in 0..entries.len() {
        let entry = written_entry(entries, index, errors, detail);
        let Some(left) = room.checked_sub(length(&entry)) else { break };
        room = left;
        written.push(entry);
    }
    written
}

/// What is told of an entry, in lines that each begin with a newline.
fn written_entry(entries: &[Entry<'_, '_>], index: usize, errors: &[Arc<ErrorRecord>], detail: &Detail) -> String {
    let shown = &entries[index];
    let test = shown.test;
    let mut entry = heading(index + 1, test.record);
    match shown.like {
        Some(other) => push_likeness(&mut entry, other + 1, test, errors),
        None => push_failure(&mut entry, test, errors, detail),
    }
    push_alike(&mut entry, shown, errors);
    match (shown.suspects_of, shown.like) {
        (Some(other), _) => _ = write!(entry, "\n   Suspects: as those of {}", other + 1),
        (None, Some(other)) if fails_in_checks(test) && !test.suspects.is_empty() => {
            push_other_suspects(&mut entry, &test.suspects, other, &entries[other].test.suspects);
        }
        (None, _) => push_suspects(&mut entry, &test.suspects, detail),
    }
    entry
}

/// The error that a test ended with.
fn error_of<'a>(test: &Test<'_>, errors: &'a [Arc<ErrorRecord>]) -> Option<&'a ErrorRecord> {
    errors.get(usize::try_from(test.record.number("error")?).ok()?).map(Arc::as_ref)
}

/// What one entry of the list of failures tells of.
struct Entry<'a, 'b> {
    test: &'a Test<'b>,
    /// The entry, from 0, whose test ended in the same way, but with other suspects.
    like: Option<usize>,
    /// The first entry with the same suspects.
    suspects_of: Option<usize>,
    /// The tests that ended in the same way, with the same suspects.
    alike: Vec<&'a Test<'b>>,
}

/// True when checks of a test failed, whatever else did.
fn fails_in_checks(test: &Test<'_>) -> bool {
    test.details.iter().any(|detail| detail.kind == "check")
}

/// The functions among the suspects of a test.
fn functions(test: &Test<'_>) -> Functions {
    test.suspects.iter().filter_map(|record| function(record)).collect()
}

/// The name and the line of the function that a record of suspects is of.
fn function(record: &Record) -> Option<(String, Option<i64>)> {
    (record.kind == "suspect").then(|| (name(record).to_owned(), record.number("line")))
}

/// Functions by name and line.
type Functions = BTreeSet<(String, Option<i64>)>;

/// How a test ends.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Way {
    /// With an error of this type in these frames of the user's.
    Error(String, Vec<(Option<String>, Option<String>)>),
    /// With checks that failed, and what else this says.
    Checks(String),
}

impl Way {
    fn of(test: &Test<'_>, errors: &[Arc<ErrorRecord>]) -> Option<Self> {
        if fails_in_checks(test) {
            let mut said = String::new();
            push_checks(&mut said, test, usize::MAX);
            if let Some(error) = error_of(test, errors) {
                said.push_str(&self::said(test.record, error));
            }
            return Some(Self::Checks(said));
        }
        let error = error_of(test, errors)?;
        let frames = error.frames.iter().filter(|frame| is_users(frame)).take(FRAMES);
        let frames: Vec<_> = frames.map(|frame| (frame.source.clone(), frame.code.clone())).collect();
        (!frames.is_empty()).then(|| Self::Error(error.kind.clone(), frames))
    }
}

/// What two tests that are one entry have in common.
#[derive(PartialEq, Eq, Hash)]
enum Common {
    /// They end in the same way, and what is told of their suspects is the same.
    All(Way, String),
    /// The same checks fail, and the suspects are the same functions, in whatever order and with whatever lines.
    Checks(Way, Functions),
    /// Their errors are of the same type and say the same, and the suspects are the same functions.
    Said(String, String, Functions),
}

impl Common {
    /// What others may have in common with a test that ends in a `way`; `suspects` is what is told of its suspects.
    fn of(test: &Test<'_>, way: Option<&Way>, suspects: &str, errors: &[Arc<ErrorRecord>]) -> Vec<Self> {
        let functions = functions(test);
        let mut common: Vec<_> = way.map(|way| Self::All(way.clone(), suspects.to_owned())).into_iter().collect();
        match (way, error_of(test, errors)) {
            (Some(way @ Way::Checks(_)), _) => common.push(Self::Checks(way.clone(), functions)),
            (_, Some(error)) if !functions.is_empty() => {
                common.push(Self::Said(error.kind.clone(), said(test.record, error), functions));
            }
            _ => {}
        }
        common
    }
}

/// The entries for the tests that failed. What those have in common that end in the same way is told once.
fn entries<'a, 'b>(failed: &[&'a Test<'b>], errors: &[Arc<ErrorRecord>]) -> Vec<Entry<'a, 'b>> {
    let mut entries = Vec::<Entry<'a, 'b>>::new();
    // The first entry of each.
    let (mut ways, mut suspects, mut all) = (HashMap::new(), HashMap::new(), HashMap::new());
    for &test in failed {
        let way = Way::of(test, errors);
        let mut told = String::new();
        push_suspects(&mut told, &test.suspects, &DETAILS[0]);
        let common = Common::of(test, way.as_ref(), &told, errors);
        if let Some(&same) = common.iter().find_map(|common| all.get(common)) {
            let same: &mut Entry<'_, '_> = &mut entries[same];
            same.alike.push(test);
            continue;
        }
        let index = entries.len();
        let like = way.as_ref().and_then(|way| ways.get(way)).copied();
        let suspects_of = suspects.get(&told).copied();
        entries.push(Entry { test, like, suspects_of, alike: Vec::new() });
        all.extend(common.into_iter().map(|common| (common, index)));
        if let Some(way) = way {
            ways.entry(way).or_insert(index);
        }
        if !told.is_empty() {
            suspects.entry(told).or_insert(index);
        }
    }
    entries
}

/// What a test says that ended like another one: that, and what is its own.
fn push_likeness(entry: &mut String, other: usize, test: &Test<'_>, errors: &[Arc<ErrorRecord>]) {
    match error_of(test, errors) {
        _ if fails_in_checks(test) => _ = write!(entry, "\n   The same as of {other}"),
        Some(error) => {
            let said = one_line(&said(test.record, error), MAX_ALIKE);
            _ = write!(entry, "\n   {} {said} (E{}, in the frames of {other})", escape_markers(&error.kind), error.id);
        }
        None => {}
    }
}

/// The tests that failed like the one of the entry: those whose errors say the same, and then each that says another thing.
fn push_alike(target: &mut String, entry: &Entry<'_, '_>, errors: &[Arc<ErrorRecord>]) {
    let message = |test: &Test<'_>| error_of(test, errors).map(|error| said(test.record, error)).unwrap_or_default();
    let known = message(entry.test);
    let (same, other): (Vec<_>, Vec<_>) =
        entry.alike.iter().take(NAMES).map(|test| (test, message(test))).partition(|(_, message)| *message == known);
    let title = |test: &Test<'_>| one_line(name(test.record), MAX_CALL);
    let mut lines = Vec::new();
    if !same.is_empty() {
        lines.push(same.iter().map(|(test, _)| title(test)).collect::<Vec<_>>().join(", "));
    }
    lines.extend(other.iter().map(|(test, message)| format!("{}: {}", title(test), one_line(message, MAX_ALIKE))));
    if entry.alike.len() > NAMES {
        lines.push(format!("and {} more", entry.alike.len() - NAMES));
    }
    for (index, line) in lines.iter().enumerate() {
        _ = write!(target, "\n   {} {line}", if index == 0 { "Alike:" } else { "      " });
    }
}

fn name(test: &Record) -> &str {
    test.text("name").unwrap_or_default()
}

/// The name of a test that failed and its place, after a newline.
fn heading(number: usize, record: &Record) -> String {
    let place = place(record).map_or_else(String::new, |place| format!("  {place}"));
    format!("\n{number}. {}{place}", one_line(name(record), MAX_CALL))
}

/// What the error of a test says, without its type.
fn said(record: &Record, error: &ErrorRecord) -> String {
    let said = record.text("message").map_or_else(|| clipped_message(&error.message), str::to_owned);
    said.strip_prefix(&format!("{}: ", error.kind)).map(str::to_owned).unwrap_or(said)
}

/// The first checks of a test that failed, so many at most.
fn push_checks(entry: &mut String, test: &Test<'_>, most: usize) {
    let checks: Vec<_> = test.details.iter().filter(|detail| detail.kind == "check").collect();
    for detail in checks.iter().take(most) {
        push_check(entry, detail);
    }
    let omitted: i64 = test.details.iter().filter_map(|detail| detail.number("count")).sum();
    let more = checks.len().saturating_sub(most) + usize::try_from(omitted).unwrap_or(0);
    if more > 0 {
        _ = write!(entry, "\n   ... {more} more checks of this test failed");
    }
}

/// How a test failed.
fn push_failure(entry: &mut String, test: &Test<'_>, errors: &[Arc<ErrorRecord>], detail: &Detail) {
    let record = test.record;
    push_checks(entry, test, detail.checks);
    match (error_of(test, errors), record.text("message")) {
        (Some(error), _) => {
            let (kind, said) = (escape_markers(&error.kind), one_line(&said(record, error), MAX_MESSAGE));
            _ = write!(entry, "\n   {kind} {said} (E{}: get-backtrace has all)", error.id);
            for frame in error.frames.iter().filter(|frame| is_users(frame)).take(detail.frames) {
                push_frame(entry, frame);
            }
        }
        (None, Some(message)) => _ = write!(entry, "\n   {}", one_line(message, MAX_MESSAGE)),
        (None, None) => {}
    }
}

/// The functions that may be at fault, each with the lines that make the difference.
fn push_suspects(entry: &mut String, suspects: &[&Record], detail: &Detail) {
    let mut label = "Suspects: ";
    // Functions shown so far of this list.
    let mut functions = 0;
    for (index, record) in suspects.iter().enumerate() {
        if let Some(printed) = record.text("printed") {
            let more = record.number("more").unwrap_or(0);
            let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
            _ = write!(entry, "\n   Before it printed {}{more}:", one_line(printed, MAX_CALL));
            (label, functions) = ("Suspects: ", 0);
            continue;
        }
        if record.kind == "line" {
            continue;
        }
        let file = suspect_place(record);
        functions += 1;
        if functions > detail.functions {
            let also = if functions == detail.functions + 1 { "\n             also" } else { "," };
            _ = write!(entry, "{also} {}{file}", one_line(name(record), MAX_CALL));
            continue;
        }
        _ = write!(entry, "\n   {label}{}{file}", one_line(name(record), MAX_CALL));
        _ = match record.number("passing") {
            Some(0) => write!(entry, "  (no passing test ran these lines)"),
            Some(1) => write!(entry, "  (1 passing test ran these lines)"),
            passing => write!(entry, "  ({} passing tests ran these lines)", passing.unwrap_or(0)),
        };
        if let Some(macros) = record.text("macros") {
            _ = write!(entry, "  expands {}", one_line(macros, MAX_CALL));
        }
        label = "          ";
        let lines = suspects[index + 1..].iter().take_while(|record| record.kind == "line");
        push_lines(entry, lines.copied(), detail);
    }
}

/// The suspects of a test that fails in the same checks as the one of entry `other`: those that this one does not have.
fn push_other_suspects(entry: &mut String, suspects: &[&Record], other: usize, known: &[&Record]) {
    let known: Vec<_> = known.iter().filter_map(|record| function(record)).collect();
    let new = suspects.iter().filter(|record| function(record).is_some_and(|function| !known.contains(&function)));
    let new: Vec<_> =
        new.map(|record| format!("{}{}", one_line(name(record), MAX_CALL), suspect_place(record))).collect();
    _ = write!(entry, "\n   Suspects: as those of {}", other + 1);
    if !new.is_empty() {
        _ = write!(entry, ", and {}", new.join(", "));
    }
}

/// Where one of the suspects is defined, after two spaces.
fn suspect_place(record: &Record) -> String {
    let line = record.number("line").unwrap_or(0);
    record.text("file").map_or_else(String::new, |file| format!("  {}:{line}", one_line(file, MAX_CALL)))
}

/// Lines of one of the suspects.
fn push_lines<'a>(entry: &mut String, lines: impl Iterator<Item = &'a Record>, detail: &Detail) {
    let (context, own): (Vec<_>, Vec<_>) = lines.partition(|line| line.number("passing").is_some());
    let mut shown = if detail.context || own.is_empty() { [own, context].concat() } else { own };
    shown.truncate(detail.lines);
    shown.sort_by_key(|line| line.number("line"));
    for line in shown {
        let (number, code) = (line.number("line").unwrap_or(0), line.text("code").unwrap_or_default());
        let passing = line.number("passing").map_or_else(String::new, |tests| format!("  ({tests} passing)"));
        _ = write!(entry, "\n               {number}: {}{passing}", one_line(code, MAX_FORM));
    }
}

/// `tests/parse.lisp:31`
fn place(record: &Record) -> Option<String> {
    let file = one_line(record.text("file")?, MAX_CALL);
    Some(match record.number("line") {
        Some(line) if line > 0 => format!("{file}:{line}"),
        _ => file,
    })
}

fn push_check(entry: &mut String, check: &Record) {
    let form = check.text("form").map(|form| one_line(form, MAX_FORM));
    let expected = check.text("expected").map(|value| format!("expected {}", one_line(value, MAX_VALUE)));
    let actual = check.text("actual").map(|value| format!("got {}", one_line(value, MAX_VALUE)));
    let values = [expected, actual].into_iter().flatten().collect::<Vec<_>>().join(", ");
    match form {
        Some(form) if length(&form) + length(&values) <= ONE_LINE => {
            _ = write!(entry, "\n   {form}  {values}");
            entry.truncate(entry.trim_end().len());
        }
        form => {
            for line in form.into_iter().chain(Some(values).filter(|values| !values.is_empty())) {
                _ = write!(entry, "\n   {line}");
            }
        }
    }
    if let Some(message) = check.text("message").filter(|message| !message.is_empty()) {
        _ = write!(entry, "\n   {}", one_line(message, MAX_MESSAGE));
    }
}

/// The frame is the user's, or may be.
fn is_users(frame: &Frame) -> bool {
    frame.source.is_some() && frame.machinery.is_none()
}

fn push_frame(entry: &mut String, frame: &Frame) {
    _ = write!(entry, "\n   {}: {}", frame.number, one_line(&call(frame), MAX_CALL));
    if let Some(source) = &frame.source {
        _ = write!(entry, "  {}", escape_markers(source));
    }
    if let Some(code) = &frame.code {
        _ = write!(entry, ": {}", escape_markers(code));
    }
}

/// Text on one line, cut where it is longer than `max` characters.
fn one_line(text: &str, max: usize) -> String {
    let text = escape_markers(&text.split_whitespace().collect::<Vec<_>>().join(" "));
    match text.char_indices().nth(max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
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
