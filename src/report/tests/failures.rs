//! The tests that failed, as far as there is room.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use super::super::escape::escape_markers;
use super::super::fit::length;
use super::super::{call, clipped_message};
use super::suspects::{Functions, functions, has_suspects, push_other_suspects, push_suspects};
use super::{MAX_CALL, MAX_FORM, NAMES};
use crate::outcome::{Check, ErrorRecord, Frame, Outcome, Test, TestResult, TestRun};
use crate::tool_names;

/// Characters of a value and a message.
const MAX_VALUE: usize = 400;
const MAX_MESSAGE: usize = 400;
/// Characters of the message of an error where another like it is shown.
const MAX_ALIKE: usize = 120;
/// Up to so many characters a check takes one line.
const ONE_LINE: usize = 110;
/// Frames of the user's that errors have in common whose tests fail alike.
const FRAMES: usize = 3;

/// How much is told of each test that failed: the less, the more of them there are, as each is worth more than another one's
/// fourth check.
pub(super) struct Detail {
    pub(super) checks: usize,
    pub(super) frames: usize,
    /// Suspects that are shown with lines of theirs, and how many of these. Of the others the place is told.
    pub(super) functions: usize,
    pub(super) lines: usize,
    /// Lines that passing tests ran as well, more of them than others of that function, are shown, too.
    pub(super) context: bool,
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

pub(super) fn push_failures(target: &mut String, outcome: &Outcome, max: usize) {
    let run = TestRun::of(&outcome.records);
    let failed: Vec<_> = run.failures().collect();
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
        let names: Vec<_> = tests.map(|test| one_line(&test.result.name, MAX_CALL)).collect();
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
    let mut entry = heading(index + 1, test.result);
    match shown.like {
        Some(other) => push_likeness(&mut entry, other + 1, test, errors),
        None => push_failure(&mut entry, test, errors, detail),
    }
    push_alike(&mut entry, shown, errors);
    match (shown.suspects_of, shown.like) {
        (Some(other), _) => _ = write!(entry, "\n   Suspects: as those of {}", other + 1),
        (None, Some(other)) if fails_in_checks(test) && has_suspects(test) => {
            push_other_suspects(&mut entry, &test.suspects, other, &entries[other].test.suspects);
        }
        (None, _) => push_suspects(&mut entry, &test.suspects, detail),
    }
    entry
}

/// The error that a test ended with.
pub(super) fn error_of<'a>(test: &Test<'_>, errors: &'a [Arc<ErrorRecord>]) -> Option<&'a ErrorRecord> {
    test.result.error_among(errors).map(Arc::as_ref)
}

/// The name of a test that failed and its place, after a newline.
fn heading(number: usize, test: &TestResult) -> String {
    let place = place(test).map_or_else(String::new, |place| format!("  {place}"));
    format!("\n{number}. {}{place}", one_line(&test.name, MAX_CALL))
}

/// What the error of a test says, without its type.
fn said(test: &TestResult, error: &ErrorRecord) -> String {
    let said = test.message.clone().unwrap_or_else(|| clipped_message(&error.message));
    said.strip_prefix(&format!("{}: ", error.kind)).map(str::to_owned).unwrap_or(said)
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
    !test.checks.is_empty()
}

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
                said.push_str(&self::said(test.result, error));
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
                common.push(Self::Said(error.kind.clone(), said(test.result, error), functions));
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
            let said = one_line(&said(test.result, error), MAX_ALIKE);
            _ = write!(entry, "\n   {} {said} (E{}, in the frames of {other})", escape_markers(&error.kind), error.id);
        }
        None => {}
    }
}

/// The tests that failed like the one of the entry: those whose errors say the same, and then each that says another thing.
fn push_alike(target: &mut String, entry: &Entry<'_, '_>, errors: &[Arc<ErrorRecord>]) {
    let message = |test: &Test<'_>| error_of(test, errors).map(|error| said(test.result, error)).unwrap_or_default();
    let known = message(entry.test);
    let (same, other): (Vec<_>, Vec<_>) =
        entry.alike.iter().take(NAMES).map(|test| (test, message(test))).partition(|(_, message)| *message == known);
    let title = |test: &Test<'_>| one_line(&test.result.name, MAX_CALL);
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

/// The first checks of a test that failed, so many at most.
fn push_checks(entry: &mut String, test: &Test<'_>, most: usize) {
    for check in test.checks.iter().take(most) {
        push_check(entry, check);
    }
    let more = test.checks.len().saturating_sub(most) as u64 + test.more_checks;
    if more > 0 {
        _ = write!(entry, "\n   ... {more} more checks of this test failed");
    }
}

/// How a test failed.
fn push_failure(entry: &mut String, test: &Test<'_>, errors: &[Arc<ErrorRecord>], detail: &Detail) {
    push_checks(entry, test, detail.checks);
    match (error_of(test, errors), &test.result.message) {
        (Some(error), _) => {
            let (kind, said) = (escape_markers(&error.kind), one_line(&said(test.result, error), MAX_MESSAGE));
            _ = write!(
                entry,
                "\n   {kind} {said} (E{}{})",
                error.id,
                tool_names::with(&["get-backtrace"], ": get-backtrace has all")
            );
            for frame in error.frames.iter().filter(|frame| is_users(frame)).take(detail.frames) {
                push_frame(entry, frame);
            }
        }
        (None, Some(message)) => _ = write!(entry, "\n   {}", one_line(message, MAX_MESSAGE)),
        (None, None) => {}
    }
}

/// `tests/parse.lisp:31`
pub(super) fn place(test: &TestResult) -> Option<String> {
    let file = one_line(test.file.as_ref()?, MAX_CALL);
    Some(match test.line {
        Some(line) if line > 0 => format!("{file}:{line}"),
        _ => file,
    })
}

fn push_check(entry: &mut String, check: &Check) {
    let form = check.form.as_ref().map(|form| one_line(form, MAX_FORM));
    let expected = check.expected.as_ref().map(|value| format!("expected {}", one_line(value, MAX_VALUE)));
    let actual = check.actual.as_ref().map(|value| format!("got {}", one_line(value, MAX_VALUE)));
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
    if let Some(message) = check.message.as_ref().filter(|message| !message.is_empty()) {
        _ = write!(entry, "\n   {}", one_line(message, MAX_MESSAGE));
    }
}

/// The frame is the user's, or may be.
pub(super) fn is_users(frame: &Frame) -> bool {
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
pub(super) fn one_line(text: &str, max: usize) -> String {
    let text = escape_markers(&text.split_whitespace().collect::<Vec<_>>().join(" "));
    match text.char_indices().nth(max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
