//! The list of failed tests in the report of run-tests, cut to fit.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use super::super::escape::escape_markers;
use super::super::fit::length;
use super::super::load::count_text;
use super::super::{call_text, clipped_message};
use super::suspects::{FunctionSet, has_suspects, push_new_suspects, push_suspects, suspect_set};
use super::{MAX_CALL, MAX_FORM, MAX_NAMES, MAX_PATH};
use crate::audience::Audience;
use crate::outcome::{Check, ErrorRecord, FrameRecord, Outcome, Test, TestResult, TestRun};
use crate::tool_names;

/// Maximum length of a value, in characters.
const MAX_VALUE: usize = 400;
/// Maximum length of a message, in characters.
const MAX_MESSAGE: usize = 400;
/// Maximum length, in characters, of an error message in the list of tests that failed in the same way.
const MAX_DUPLICATE_MESSAGE: usize = 120;
/// Maximum length of a check that is shown on one line, in characters.
const MAX_ONE_LINE_CHECK: usize = 110;
/// Maximum number of user frames shown for an error. Errors of the same type are grouped if these frames agree.
const MAX_FRAMES: usize = 3;

/// The amount of detail shown for each failed test. If there are many failures, showing more of them takes precedence
/// over showing more checks of each.
pub(super) struct Detail {
    pub(super) checks: usize,
    pub(super) frames: usize,
    /// Number of suspects shown with at most `lines` lines each. For further suspects only name and location are shown.
    pub(super) functions: usize,
    pub(super) lines: usize,
    /// True to also show a suspect's context: further lines of the function, which more passing tests ran.
    pub(super) context: bool,
}

/// The levels of detail, highest first. The report uses the first level with which all failures fit, or else the last.
const DETAIL_LEVELS: [Detail; 6] = [
    Detail { checks: 4, frames: MAX_FRAMES, functions: usize::MAX, lines: usize::MAX, context: true },
    Detail { checks: 2, frames: 2, functions: usize::MAX, lines: 8, context: false },
    Detail { checks: 1, frames: 1, functions: usize::MAX, lines: 6, context: false },
    Detail { checks: 1, frames: 1, functions: 3, lines: 5, context: false },
    Detail { checks: 1, frames: 1, functions: 2, lines: 4, context: false },
    Detail { checks: 1, frames: 1, functions: 1, lines: 2, context: false },
];

pub(super) fn push_failures(target: &mut String, outcome: &Outcome, max: usize) {
    let run = TestRun::of(&outcome.records);
    let failed: Vec<_> = run.failures().collect();
    let entries = group_failures(&failed, &outcome.errors);
    let room = max.saturating_sub(length(target));
    let texts = |detail| entry_texts(&entries, &outcome.errors, detail, room);
    let [first, rest @ ..] = &DETAIL_LEVELS;
    let mut entry_texts = texts(first);
    for detail in rest {
        if entry_texts.len() == entries.len() {
            break;
        }
        entry_texts = texts(detail);
    }
    let omitted = &entries[entry_texts.len()..];
    target.extend(entry_texts);
    if !omitted.is_empty() {
        let tests = omitted.iter().flat_map(|entry| std::iter::once(&entry.test).chain(&entry.duplicates));
        let names: Vec<_> = tests.map(|test| one_line(&test.result.name, MAX_CALL)).collect();
        let more = names.len();
        let shown = names.iter().take(MAX_NAMES).cloned().collect::<Vec<_>>().join(", ");
        let rest = if more > MAX_NAMES { ", …" } else { "" };
        let advice = match Audience::current() {
            Audience::Agent => " (run-tests with `name` shows one)",
            Audience::Shell | Audience::AttachedShell => "",
            Audience::Repl => " (:test P::TEST shows one)",
        };
        _ = write!(target, "\n... {more} more failed, not shown for lack of room{advice}: {shown}{rest}");
    }
}

/// Returns the texts of the first entries, as many as fit into `room`.
fn entry_texts(
    entries: &[FailureEntry<'_, '_>],
    errors: &[Arc<ErrorRecord>],
    detail: &Detail,
    mut room: usize,
) -> Vec<String> {
    let mut texts = Vec::new();
    for index in 0..entries.len() {
        let entry = entry_text(entries, index, errors, detail);
        let Some(left) = room.checked_sub(length(&entry)) else { break };
        room = left;
        texts.push(entry);
    }
    texts
}

/// Returns the lines of an entry, each preceded by a newline.
fn entry_text(entries: &[FailureEntry<'_, '_>], index: usize, errors: &[Arc<ErrorRecord>], detail: &Detail) -> String {
    let shown = &entries[index];
    let test = shown.test;
    let mut entry = heading(index + 1, test.result);
    match shown.same_failure_as {
        Some(other) => push_same_failure(&mut entry, other + 1, test, errors),
        None => push_failure(&mut entry, test, errors, detail),
    }
    push_duplicates(&mut entry, shown, errors);
    match (shown.same_suspects_as, shown.same_failure_as) {
        (Some(other), _) => _ = write!(entry, "\n   Suspects: same as for {}", other + 1),
        (None, Some(other)) if fails_in_checks(test) && has_suspects(test) => {
            push_new_suspects(&mut entry, &test.suspects, other, &entries[other].test.suspects);
        }
        (None, _) => push_suspects(&mut entry, &test.suspects, detail),
    }
    entry
}

/// Returns the error that a test ended with.
pub(super) fn error_of<'a>(test: &Test<'_>, errors: &'a [Arc<ErrorRecord>]) -> Option<&'a ErrorRecord> {
    test.result.error_among(errors).map(Arc::as_ref)
}

/// Returns the error's identifier; `None` for a person, whose commands take no identifiers.
fn error_id_text(error: &ErrorRecord) -> Option<String> {
    (Audience::current() == Audience::Agent).then(|| format!("E{}", error.id))
}

/// Returns the line with the number, name and location of a failed test, preceded by a newline.
fn heading(number: usize, test: &TestResult) -> String {
    let location = location(test).map_or_else(String::new, |location| format!("  {location}"));
    format!("\n{number}. {}{location}", one_line(&test.name, MAX_CALL))
}

/// Returns the message of a test's error, without the type of the error.
fn error_message(test: &TestResult, error: &ErrorRecord) -> String {
    let message = test.message.clone().unwrap_or_else(|| clipped_message(&error.message));
    message.strip_prefix(&format!("{}: ", error.kind)).map(str::to_owned).unwrap_or(message)
}

/// An entry in the list of failures.
struct FailureEntry<'a, 'b> {
    test: &'a Test<'b>,
    /// The index of the first entry with the same failure but different suspects.
    same_failure_as: Option<usize>,
    /// The index of the first entry with the same suspects.
    same_suspects_as: Option<usize>,
    /// Further tests with the same failure and suspects.
    duplicates: Vec<&'a Test<'b>>,
}

/// Returns true if checks of the test failed, whether or not an error ended it as well.
fn fails_in_checks(test: &Test<'_>) -> bool {
    !test.checks.is_empty()
}

/// The features of a failure. Tests whose failures have equal features count as failing in the same way.
#[derive(Clone, PartialEq, Eq, Hash)]
enum FailureSignature {
    /// An error: its type and, for each of its innermost user frames, the source location and the source line.
    Error(String, Vec<(Option<String>, Option<String>)>),
    /// Failed checks: their text, with the message of an error that followed.
    Checks(String),
}

impl FailureSignature {
    fn of(test: &Test<'_>, errors: &[Arc<ErrorRecord>]) -> Option<Self> {
        if fails_in_checks(test) {
            let mut text = String::new();
            push_checks(&mut text, test, usize::MAX);
            if let Some(error) = error_of(test, errors) {
                text.push_str(&self::error_message(test.result, error));
            }
            return Some(Self::Checks(text));
        }
        let error = error_of(test, errors)?;
        let frames = error.frames.iter().filter(|frame| is_user_frame(frame)).take(MAX_FRAMES);
        let frames: Vec<_> = frames.map(|frame| (frame.source.clone(), frame.code.clone())).collect();
        (!frames.is_empty()).then(|| Self::Error(error.kind.clone(), frames))
    }
}

/// A key under which tests are grouped into one entry. Two tests belong together if they share any of their keys.
#[derive(PartialEq, Eq, Hash)]
enum GroupingKey {
    /// Equal failures, and equal texts about suspects.
    All(FailureSignature, String),
    /// Equal failed checks, and the same set of suspect functions, whatever their order and lines.
    Checks(FailureSignature, FunctionSet),
    /// Errors of the same type with the same message, and the same suspect functions.
    Message(String, String, FunctionSet),
}

impl GroupingKey {
    /// Returns the keys of a test with this failure signature. `suspects` is the text about the test's suspects.
    fn of(
        test: &Test<'_>,
        signature: Option<&FailureSignature>,
        suspects: &str,
        errors: &[Arc<ErrorRecord>],
    ) -> Vec<Self> {
        let functions = suspect_set(test);
        let mut keys: Vec<_> =
            signature.map(|signature| Self::All(signature.clone(), suspects.to_owned())).into_iter().collect();
        match (signature, error_of(test, errors)) {
            (Some(signature @ FailureSignature::Checks(_)), _) => keys.push(Self::Checks(signature.clone(), functions)),
            (_, Some(error)) if !functions.is_empty() => {
                keys.push(Self::Message(error.kind.clone(), error_message(test.result, error), functions));
            }
            _ => {}
        }
        keys
    }
}

/// Groups the failed tests into entries, so that failures of the same kind are shown once.
fn group_failures<'a, 'b>(failed: &[&'a Test<'b>], errors: &[Arc<ErrorRecord>]) -> Vec<FailureEntry<'a, 'b>> {
    let mut entries = Vec::<FailureEntry<'a, 'b>>::new();
    // Each map has the index of the first entry with a given key.
    let (mut signatures, mut suspects, mut entries_by_key) = (HashMap::new(), HashMap::new(), HashMap::new());
    for &test in failed {
        let signature = FailureSignature::of(test, errors);
        let mut suspects_text = String::new();
        push_suspects(&mut suspects_text, &test.suspects, &DETAIL_LEVELS[0]);
        let keys = GroupingKey::of(test, signature.as_ref(), &suspects_text, errors);
        if let Some(&earlier) = keys.iter().find_map(|key| entries_by_key.get(key)) {
            let earlier: &mut FailureEntry<'_, '_> = &mut entries[earlier];
            earlier.duplicates.push(test);
            continue;
        }
        let index = entries.len();
        let same_failure_as = signature.as_ref().and_then(|signature| signatures.get(signature)).copied();
        let same_suspects_as = suspects.get(&suspects_text).copied();
        entries.push(FailureEntry { test, same_failure_as, same_suspects_as, duplicates: Vec::new() });
        entries_by_key.extend(keys.into_iter().map(|key| (key, index)));
        if let Some(signature) = signature {
            signatures.entry(signature).or_insert(index);
        }
        if !suspects_text.is_empty() {
            suspects.entry(suspects_text).or_insert(index);
        }
    }
    entries
}

/// Appends a reference to the entry with the number `other`, which has the same failure. If the failure is an error, also
/// appends the error's message, which may differ from that entry's message.
fn push_same_failure(entry: &mut String, other: usize, test: &Test<'_>, errors: &[Arc<ErrorRecord>]) {
    match error_of(test, errors) {
        _ if fails_in_checks(test) => _ = write!(entry, "\n   Same as {other}"),
        Some(error) => {
            let message = one_line(&error_message(test.result, error), MAX_DUPLICATE_MESSAGE);
            let id = error_id_text(error).map_or_else(String::new, |id| format!("{id}, "));
            _ = write!(entry, "\n   {} {message} ({id}same frames as {other})", escape_markers(&error.kind));
        }
        None => {}
    }
}

/// Appends the names of the duplicates of an entry: first the tests with the same message, then each of the remaining
/// tests with its own message.
fn push_duplicates(target: &mut String, entry: &FailureEntry<'_, '_>, errors: &[Arc<ErrorRecord>]) {
    let message =
        |test: &Test<'_>| error_of(test, errors).map(|error| error_message(test.result, error)).unwrap_or_default();
    let known = message(entry.test);
    let (same, other): (Vec<_>, Vec<_>) = entry
        .duplicates
        .iter()
        .take(MAX_NAMES)
        .map(|test| (test, message(test)))
        .partition(|(_, message)| *message == known);
    let title = |test: &Test<'_>| one_line(&test.result.name, MAX_CALL);
    let mut lines = Vec::new();
    if !same.is_empty() {
        lines.push(same.iter().map(|(test, _)| title(test)).collect::<Vec<_>>().join(", "));
    }
    lines.extend(
        other.iter().map(|(test, message)| format!("{}: {}", title(test), one_line(message, MAX_DUPLICATE_MESSAGE))),
    );
    if entry.duplicates.len() > MAX_NAMES {
        lines.push(format!("and {} more", entry.duplicates.len() - MAX_NAMES));
    }
    for (index, line) in lines.iter().enumerate() {
        _ = write!(target, "\n   {} {line}", if index == 0 { "Alike:" } else { "      " });
    }
}

/// Appends at most `most` failed checks of a test.
fn push_checks(entry: &mut String, test: &Test<'_>, most: usize) {
    for check in test.checks.iter().take(most) {
        push_check(entry, check);
    }
    let more = test.checks.len().saturating_sub(most) as u64 + test.more_checks;
    if more > 0 {
        _ = write!(entry, "\n   ... {} of this test failed", count_text(more, "more check"));
    }
}

/// Appends the failed checks and the error of a test.
fn push_failure(entry: &mut String, test: &Test<'_>, errors: &[Arc<ErrorRecord>], detail: &Detail) {
    push_checks(entry, test, detail.checks);
    match (error_of(test, errors), &test.result.message) {
        (Some(error), _) => {
            let (kind, message) =
                (escape_markers(&error.kind), one_line(&error_message(test.result, error), MAX_MESSAGE));
            _ = write!(entry, "\n   {kind} {message}");
            if let Some(id) = error_id_text(error) {
                _ = write!(entry, " ({id}{})", tool_names::if_usable(&["get-backtrace"], ": get-backtrace shows all"));
            }
            for frame in error.frames.iter().filter(|frame| is_user_frame(frame)).take(detail.frames) {
                push_frame(entry, frame);
            }
        }
        (None, Some(message)) => _ = write!(entry, "\n   {}", one_line(message, MAX_MESSAGE)),
        (None, None) => {}
    }
}

/// Returns the location of a test, such as `tests/parse.lisp:31`.
pub(super) fn location(test: &TestResult) -> Option<String> {
    let file = one_line(test.file.as_ref()?, MAX_PATH);
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
        Some(form) if length(&form) + length(&values) <= MAX_ONE_LINE_CHECK => {
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

/// Returns true if the frame belongs, or might belong, to user code.
pub(super) fn is_user_frame(frame: &FrameRecord) -> bool {
    frame.source.is_some() && frame.machinery.is_none()
}

fn push_frame(entry: &mut String, frame: &FrameRecord) {
    _ = write!(entry, "\n   {}: {}", frame.number, one_line(&call_text(frame), MAX_CALL));
    if let Some(source) = &frame.source {
        _ = write!(entry, "  {}", escape_markers(source));
    }
    if let Some(code) = &frame.code {
        _ = write!(entry, ": {}", escape_markers(code));
    }
}

/// Returns the text on one line with markers escaped, cut to `max` characters.
pub(super) fn one_line(text: &str, max: usize) -> String {
    let text = escape_markers(&text.split_whitespace().collect::<Vec<_>>().join(" "));
    match text.char_indices().nth(max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
