//! The result of an evaluation or an inspection, as plain data.
//!
//! An [`Outcome`] owns its data and is serialisable: it outlives the Lisp objects that it describes, and can be sent to
//! another process. [`report`](crate::report) turns the results into text.

mod findings;
mod records;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use findings::*;
pub use records::*;

/// Text that may have been cut while it was written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clipped {
    /// The beginning of the text, as far as it was kept.
    pub text: String,
    /// The number of characters left out after `text`.
    pub omitted: u64,
}

impl Clipped {
    /// Returns true if nothing was written, not even text that was left out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.omitted == 0
    }
}

impl Clipped {
    /// Returns this text with `after` appended.
    fn followed_by(self, after: Self) -> Self {
        if self.omitted > 0 {
            // Text after the cut cannot be kept: all of `after` counts as omitted.
            return Self { omitted: self.omitted + after.char_count(), ..self };
        }
        Self { text: self.text + &after.text, omitted: after.omitted }
    }

    /// Returns the text cut so that its JSON form takes at most `bytes` bytes. Characters that are cut off count as omitted.
    #[cfg(feature = "mcp")]
    fn truncated(&self, bytes: usize) -> Self {
        let mut left = bytes;
        let mut fits = |character: char| {
            let size = json_size(character.encode_utf8(&mut [0; 4]));
            let fits = size <= left;
            left -= if fits { size } else { 0 };
            fits
        };
        let end = self.text.find(|character| !fits(character)).unwrap_or(self.text.len());
        let (text, rest) = self.text.split_at(end);
        Self { text: text.to_owned(), omitted: self.omitted + rest.chars().count() as u64 }
    }

    /// Returns the number of characters written, including the characters that were left out.
    pub(crate) fn char_count(&self) -> u64 {
        self.text.chars().count() as u64 + self.omitted
    }
}

/// Merges `stdout` and `stderr` in the order in which they were printed. `turns` has the format of [`Outcome::turns`].
pub(crate) fn interleave(stdout: &str, stderr: &str, turns: &[u32]) -> String {
    let mut text = String::with_capacity(stdout.len() + stderr.len());
    let mut rest = [stdout, stderr];
    for (index, &count) in turns.iter().enumerate() {
        let stream = &mut rest[index % 2];
        let (now, later) = stream.split_at(byte_offset(stream, u64::from(count)));
        text.push_str(now);
        *stream = later;
    }
    text
}

/// Returns the byte offset of the character with index `count` in `text`, or the length of `text` if it has fewer
/// characters.
pub(crate) fn byte_offset(text: &str, count: u64) -> usize {
    usize::try_from(count).ok().and_then(|count| text.char_indices().nth(count)).map_or(text.len(), |(at, _)| at)
}

impl From<&str> for Clipped {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), omitted: 0 }
    }
}

impl From<String> for Clipped {
    fn from(text: String) -> Self {
        Self { text, omitted: 0 }
    }
}

/// A warning signalled by an evaluation, or by the compiler while it compiled the submitted code or a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// The class name of the condition, with a package prefix where CL-USER needs one.
    pub kind: String,
    /// The report of the condition.
    pub message: Clipped,
    /// The file that the compiler was reading; `None` for the submitted code, and for a warning outside the compiler.
    pub file: Option<String>,
    /// The line in the file, or in the submitted code, from 1.
    pub line: Option<u64>,
    /// The column on the line, from 1.
    pub column: Option<u64>,
    /// The operator and the name of the enclosing top-level form in the file, as in `(DEFUN F)`.
    pub form: Option<String>,
}

/// A restart that was available where an error happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct RestartRecord {
    /// The number of the restart, from 1, in the order of `compute-restarts`.
    pub number: u64,
    /// The name of the restart, without its package.
    pub name: String,
    /// The report of the restart: what invoking it does.
    pub description: String,
}

/// One frame of a backtrace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameRecord {
    /// The number of the frame, from 0 at the point of the error.
    pub number: u64,
    /// The call, printed on one line: `(FOO 1 "x")`.
    pub call: String,
    /// The source location of the code that the frame runs, if known: `path:line`, or `evaluation 12, line 3`.
    pub source: Option<String>,
    /// The source line at that location, shortened if it is long.
    pub code: Option<String>,
    /// The part of SBCL or of a library that the frame belongs to, such as `the reader` or `ASDF`; `None` for any other
    /// frame, such as a frame of the user's code.
    pub machinery: Option<String>,
    /// The local variables that SBCL knows. Recorded for the innermost frames only.
    pub locals: Vec<Local>,
}

/// A local variable of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Local {
    /// The name of the variable.
    pub name: String,
    /// The value of the variable, if it can be read at this point.
    pub value: LocalValue,
}

/// The local variables of one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameLocals {
    /// The number of the frame, from 0.
    pub frame: u64,
    /// The variables, in the order of the code.
    pub locals: Vec<Local>,
}

/// The value of a local variable, as far as SBCL knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LocalValue {
    /// The printed value.
    Value(String),
    /// The variable is not yet, or no longer, in use at this point.
    Dead,
    /// SBCL cannot tell the value.
    Unavailable,
}

/// A slot of a condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct Slot {
    /// The name of the slot, without its package.
    pub name: String,
    /// The printed value of the slot.
    pub value: String,
}

/// The position, in the submitted code, of the top-level form that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct FormPosition {
    /// The number of the form, from 1.
    pub number: u64,
    /// The line on which the form begins, from 1.
    pub line: u64,
    /// The first line of the form's text.
    pub text: String,
}

/// An error, recorded where it happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorRecord {
    /// The number of the error in the session's history, from 1 (`E1`); 0 before a number is assigned.
    pub id: u64,
    /// The class name of the condition, with a package prefix where CL-USER needs one; or a kind of failure that the server
    /// reports itself, such as `TIMEOUT`, `CANCELLED` or `IMAGE-LOST`.
    pub kind: String,
    /// The report of the condition.
    pub message: Clipped,
    /// The time of the error.
    pub time: jiff::Timestamp,
    /// The form of the submitted code that failed.
    pub form: Option<FormPosition>,
    /// The slots of the condition.
    pub slots: Vec<Slot>,
    /// The recorded restarts, in the order of `compute-restarts`. If there are very many, some restarts in the middle are
    /// missing, as gaps in the numbers show. The session itself establishes the last two restarts, `RETRY` and `ABORT`.
    pub restarts: Vec<RestartRecord>,
    /// The recorded frames, innermost first. The middle of a very deep stack is missing, as gaps in the numbers show.
    pub frames: Vec<FrameRecord>,
    /// The number of frames on the stack.
    pub total_frames: u64,
    /// The number of slots left out of `slots`.
    pub slots_omitted: u64,
    /// The number of the evaluation that ended with this error; 0 if no evaluation is known.
    pub evaluation: u64,
}

impl ErrorRecord {
    /// Returns the message without a period at the end, as the beginning of a longer message.
    pub(crate) fn message_clause(&self) -> &str {
        self.message.text.trim_end().trim_end_matches('.')
    }

    /// Returns a copy of the record with `locals` in place of its own local variables.
    #[cfg(feature = "mcp")]
    pub(crate) fn with_locals(&self, mut locals: Vec<FrameLocals>) -> Self {
        let mut record = self.clone();
        for frame in &mut record.frames {
            let of_frame = locals.iter_mut().find(|locals| locals.frame == frame.number);
            frame.locals = of_frame.map(|locals| std::mem::take(&mut locals.locals)).unwrap_or_default();
        }
        record
    }

    /// Returns the approximate size of the record in bytes. Text counts with its size as JSON, which is never smaller than
    /// its size in memory.
    pub(crate) fn byte_size(&self) -> usize {
        let form = self.form.as_ref().map_or(0, |form| json_size(&form.text));
        let own = 4 * PART_BYTES + json_size(&self.kind) + json_size(&self.message.text) + form;
        let slots = self.slots.iter().map(Slot::byte_size).sum::<usize>();
        let restarts = self.restarts.iter().map(RestartRecord::byte_size).sum::<usize>();
        own + slots + restarts + self.frames.iter().map(FrameRecord::byte_size).sum::<usize>()
    }

    /// Returns the record cut to about `bytes` bytes, without the end of a long message, and without the form, slots,
    /// restarts and outer frames that do not fit.
    #[cfg(feature = "mcp")]
    pub(crate) fn truncated(self: &Arc<Self>, bytes: usize) -> Arc<Self> {
        if self.byte_size() <= bytes {
            return self.clone();
        }
        let mut left = bytes;
        let mut takes = |bytes: usize| {
            let fits = bytes <= left;
            left -= if fits { bytes } else { 0 };
            fits
        };
        let form = self.form.clone().filter(|form| takes(json_size(&form.text)));
        takes(4 * PART_BYTES + json_size(&self.kind));
        let message = self.message.truncated(bytes / 2);
        takes(json_size(&message.text));
        let slots: Vec<_> = self.slots.iter().filter(|slot| takes(slot.byte_size())).cloned().collect();
        // The restarts are taken from the end, because the server's own restarts come last and must stay.
        let mut restarts: Vec<_> =
            self.restarts.iter().rev().filter(|restart| takes(restart.byte_size())).cloned().collect();
        restarts.reverse();
        let frames = self.frames.iter().take_while(|frame| takes(frame.byte_size())).cloned().collect();
        Arc::new(Self {
            id: self.id,
            kind: self.kind.clone(),
            message,
            time: self.time,
            form,
            slots_omitted: self.slots_omitted + (self.slots.len() - slots.len()) as u64,
            slots,
            restarts,
            frames,
            total_frames: self.total_frames,
            evaluation: self.evaluation,
        })
    }
}

/// The approximate size in bytes of a slot, restart, frame or local variable without its text.
const PART_BYTES: usize = 64;

/// Returns an upper bound for the size of `text` as JSON, without quotes, in bytes. A control character counts as six
/// bytes.
pub(crate) fn json_size(text: &str) -> usize {
    let escape = |byte: &u8| if *byte < b' ' { 5 } else { u8::from(*byte == b'"' || *byte == b'\\') };
    // The sum for 32 bytes fits into a byte. Thus, the compiled code can add many bytes at once: texts of megabytes are counted
    // while clients wait.
    let escapes = |bytes: &[u8]| usize::from(bytes.iter().map(escape).sum::<u8>());
    let (chunks, rest) = text.as_bytes().as_chunks::<32>();
    text.len() + chunks.iter().map(|chunk| escapes(chunk)).sum::<usize>() + escapes(rest)
}

fn part_bytes(name: &str, value: &str) -> usize {
    PART_BYTES + json_size(name) + json_size(value)
}

impl Slot {
    fn byte_size(&self) -> usize {
        part_bytes(&self.name, &self.value)
    }
}

impl RestartRecord {
    fn byte_size(&self) -> usize {
        part_bytes(&self.name, &self.description)
    }
}

impl FrameRecord {
    fn byte_size(&self) -> usize {
        let locals = self.locals.iter().map(|local| match &local.value {
            LocalValue::Value(value) => part_bytes(&local.name, value),
            LocalValue::Dead | LocalValue::Unavailable => part_bytes(&local.name, ""),
        });
        let [source, code] = [&self.source, &self.code].map(|part| part.as_deref().unwrap_or_default());
        part_bytes(&self.call, source) + json_size(code) + locals.sum::<usize>()
    }
}

/// The time and memory that an evaluation used, measured if [`Evaluation::capture_time`](crate::Evaluation::capture_time)
/// is set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Elapsed time in milliseconds.
    pub real_ms: u64,
    /// Processor time in milliseconds.
    pub run_ms: u64,
    /// Time spent in garbage collection, in milliseconds.
    pub gc_ms: u64,
    /// Bytes allocated.
    pub bytes_consed: u64,
}

/// A form that defined something. To make its definitions in another image, evaluate such forms again, in order and each in
/// its package.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DefiningForm {
    /// The text of the form.
    pub code: String,
    /// The package in which the form was read.
    pub package: String,
}

/// The changes that a form made to the image, as reported by Lisp, with the form's role and line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Changes {
    /// The defined names, each with its kind of definition: `FUNCTION APP::F`. A loaded system, `SYSTEM app`, stands for all
    /// names that it defines. Empty if the form defined or removed more than 50 names, because Lisp then reports none.
    pub(crate) defined: Vec<String>,
    /// The generic functions to which the form added methods: `METHOD APP::F`. A method replaces no other method, so only a
    /// removal of the function, which removes this name too, makes the methods of earlier forms obsolete. Also, if the form
    /// failed, the systems that it loaded in part.
    pub(crate) methods: Vec<String>,
    /// The removed names, in the format of `defined`. Also the systems that the form loaded as dependencies of other systems: a
    /// load of the other systems loads them, too.
    pub(crate) removed: Vec<String>,
    /// The modules that the form's symbols belong to, by the names that `require` takes.
    pub(crate) modules: Vec<String>,
    /// The source files that the form had ASDF load when the image had already loaded a file; at most 50. A restored image
    /// may consider these files up to date, because earlier forms load their current versions, but must load them again.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) reloaded: Vec<String>,
    pub(crate) role: FormRole,
    /// The line of the evaluation's code on which the form begins, from 0.
    pub(crate) line: usize,
}

/// The role of a form in a session. The role determines whether the form can be replayed, and whether an exported source file
/// may omit the form.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FormRole {
    /// The role is unknown, because a build before version 0.1 recorded the form.
    #[default]
    Unknown,
    /// An `in-package` form.
    PackageSelection,
    /// A `defun` in which nothing runs before the function is called.
    Function,
    /// A `defgeneric` or `defmethod` in which nothing runs before the function is called.
    GenericFunction,
    /// A form that failed after it had defined something, and so cannot be replayed.
    Failed,
    /// Any other form.
    Other,
}

impl Changes {
    /// Parses the lines in which Lisp reports the changes of a form. Each line begins with `=` (the role of the form), `+`
    /// (a defined name or a loaded system), `*` (a generic function to which a method was added, or a system of which a part
    /// was loaded), `-` (a removed name), `?` (a module) or `!` (a file that was loaded again).
    pub(crate) fn parse<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let mut changes = Self { role: FormRole::Other, ..Self::default() };
        for line in lines {
            let Some((mark, text)) = line.split_at_checked(1) else { continue };
            match mark {
                "+" => changes.defined.push(text.to_owned()),
                "*" => changes.methods.push(text.to_owned()),
                "-" => changes.removed.push(text.to_owned()),
                "?" => changes.modules.push(text.to_owned()),
                "!" => changes.reloaded.push(text.to_owned()),
                _ => {
                    changes.role = match text {
                        "in-package" => FormRole::PackageSelection,
                        "defun" => FormRole::Function,
                        "defmethod" => FormRole::GenericFunction,
                        "failed" => FormRole::Failed,
                        _ => FormRole::Other,
                    }
                }
            }
        }
        changes
    }

    /// Returns the names that are missing if the form is not replayed.
    #[cfg(feature = "mcp")]
    pub(crate) fn made(&self) -> impl Iterator<Item = &String> {
        self.defined.iter().chain(&self.methods)
    }
}

/// The result of one evaluation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The number of the evaluation in its session, from 1; 0 if the outcome is not of a numbered evaluation.
    pub evaluation: u64,
    /// True if the session keeps the complete outcome, under the number `evaluation`, until newer outcomes replace it.
    pub kept: bool,
    /// Messages about the session, which the evaluated code did not print.
    pub notices: Vec<String>,
    /// Output of threads that outlived their evaluation.
    pub background: Clipped,
    /// Output to `*standard-output*`.
    pub stdout: Clipped,
    /// Output to `*error-output*` and `*trace-output*`.
    pub stderr: Clipped,
    /// The order in which `stdout` and `stderr` were printed: character counts of the two streams in alternation,
    /// `stdout` first.
    pub turns: Vec<u32>,
    /// The number of characters that the evaluation had printed before the part that this outcome covers; 0 if the outcome
    /// covers the evaluation from its beginning.
    pub printed_before: u64,
    /// The warnings, in the order in which they were signalled.
    pub warnings: Vec<Warning>,
    /// The number of warnings left out of `warnings`.
    pub warnings_omitted: u64,
    /// The values of the last form, or the error that ended the evaluation.
    pub result: Result<Vec<Clipped>, Arc<ErrorRecord>>,
    /// The time and memory used, if the evaluation was submitted with `capture_time`.
    pub timing: Option<Timing>,
    /// True if the evaluation is held where it failed: its restarts can be invoked and its frames inspected. In the outcome
    /// of a failed attempt to resume a held evaluation, true if that evaluation stays held.
    pub held: bool,
    /// True if the evaluation still runs in the background. The outcome then contains only the output so far.
    pub in_background: bool,
    /// The forms that defined something, in order.
    pub defined: Vec<DefiningForm>,
    /// The records that an operation returned, in order.
    pub records: Vec<Record>,
    /// The errors that `records` refer to by index.
    pub errors: Vec<Arc<ErrorRecord>>,
}

impl Outcome {
    /// Returns true if the evaluation ended with an error.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.result.is_err()
    }

    /// Returns the report on a load; `None` if the load failed, or if this is not the outcome of a load.
    #[must_use]
    pub fn loaded(&self) -> Option<&Loaded> {
        of_kind(&self.records).next().filter(|_| !self.is_error())
    }

    /// Returns the approximate size of the outcome in memory, in bytes.
    pub(crate) fn byte_size(&self) -> usize {
        let values = match &self.result {
            Ok(values) => values.iter().map(|value| 32 + value.text.len()).sum(),
            Err(error) => error.byte_size(),
        };
        let warnings = self.warnings.iter().map(|warning| 64 + warning.kind.len() + warning.message.text.len());
        let notices = self.notices.iter().map(|notice| 24 + notice.len());
        let defined = self.defined.iter().map(|form| 48 + form.code.len() + form.package.len());
        let records = self.records.iter().map(Record::byte_size);
        let output = self.stdout.text.len() + self.stderr.text.len() + self.background.text.len();
        512 + output
            + 4 * self.turns.len()
            + values
            + warnings.sum::<usize>()
            + notices.sum::<usize>()
            + defined.sum::<usize>()
            + records.sum::<usize>()
            + self.errors.iter().map(|error| error.byte_size()).sum::<usize>()
    }

    /// Returns the recorded output to stdout and stderr, in the order in which it was printed.
    #[must_use]
    pub fn printed(&self) -> String {
        interleave(&self.stdout.text, &self.stderr.text, &self.turns)
    }

    /// Returns the index in [`printed`](Self::printed) of the character with index `place` in stdout, or in stderr if
    /// `stderr` is true. Both indices count characters.
    pub(crate) fn printed_index(&self, stderr: bool, place: u64) -> u64 {
        let (mut before, mut own) = (0, 0);
        for (index, &count) in self.turns.iter().enumerate() {
            let count = u64::from(count);
            if (index % 2 == 1) == stderr {
                if own + count > place {
                    break;
                }
                own += count;
            }
            before += count;
        }
        before + (place - own.min(place))
    }

    /// Splits the outcome of a test run into one outcome per system, each with the system's name as it was requested.
    /// Returns an empty list if a single system was tested.
    pub(crate) fn split_by_system(&self) -> Vec<(&str, Self)> {
        let begun: Vec<&System> = of_kind(&self.records).collect();
        let printed = self.printed();
        let at = |system: &System| byte_offset(&printed, system.printed);
        // Output omitted at the end is attributed to the last system whose output was kept, because no record tells which
        // system printed it.
        let cut = begun.iter().rposition(|system| at(system) < printed.len()).unwrap_or(0);
        let systems = begun.iter().enumerate().map(|(index, system)| {
            let name = &*system.name;
            let end = begun.get(index + 1).map_or(printed.len(), |next| at(next));
            let printed = printed.get(at(system)..end).unwrap_or_default();
            let mut outcome = Self::from_test_output(printed.to_owned());
            if index == cut {
                outcome.stdout.omitted = self.stdout.omitted + self.stderr.omitted;
            }
            let mut current = None;
            for record in &self.records {
                current = record.system().or(current);
                if current == Some(name) && !matches!(record, Record::System(_)) {
                    outcome.records.push(record.clone());
                }
            }
            for record in &mut outcome.records {
                let Record::TestResult(test) = record else { continue };
                // The index of an error that was not kept is cleared: in the new list, the index would name an error of
                // another test.
                let found = test.error_among(&self.errors);
                test.error = found.map(|_| outcome.errors.len() as u64);
                outcome.errors.extend(found.cloned());
            }
            (name, outcome)
        });
        systems.collect()
    }

    /// Returns an outcome that has the output `printed` and no test results yet.
    pub(crate) fn from_test_output(printed: String) -> Self {
        Self {
            evaluation: 0,
            kept: false,
            notices: Vec::new(),
            background: Clipped::default(),
            turns: vec![u32::try_from(printed.chars().count()).unwrap_or(u32::MAX)],
            stdout: printed.into(),
            stderr: Clipped::default(),
            printed_before: 0,
            warnings: Vec::new(),
            warnings_omitted: 0,
            result: Ok(Vec::new()),
            timing: None,
            held: false,
            in_background: false,
            defined: Vec::new(),
            records: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// Adds `tests`, the outcome of the tests of the system `name`, to this outcome: the reverse of
    /// [`split_by_system`](Self::split_by_system).
    #[cfg(feature = "mcp")]
    pub(crate) fn with_system_tests(mut self, name: &str, mut tests: Self) -> Self {
        let system = System { name: name.to_owned(), printed: self.printed().chars().count() as u64 };
        for record in &mut tests.records {
            if let Record::TestResult(TestResult { error: Some(error), .. }) = record {
                *error += self.errors.len() as u64;
            }
            record.set_system(name);
        }
        tests.notices.retain(|notice| !self.notices.contains(notice));
        self.records.push(system.into());
        self.followed_by(tests)
    }

    /// Appends the outcome `after`: the outcome of the same evaluation after it was held and resumed, or of the tests of
    /// another system.
    pub(crate) fn followed_by(self, after: Self) -> Self {
        let mut turns = self.turns;
        if turns.len() % 2 == 1 {
            turns.push(0);
        }
        turns.extend(after.turns);
        Self {
            notices: [self.notices, after.notices].concat(),
            background: self.background.followed_by(after.background),
            stdout: self.stdout.followed_by(after.stdout),
            stderr: self.stderr.followed_by(after.stderr),
            turns,
            printed_before: self.printed_before,
            warnings: [self.warnings, after.warnings].concat(),
            warnings_omitted: self.warnings_omitted + after.warnings_omitted,
            defined: [self.defined, after.defined].concat(),
            records: [self.records, after.records].concat(),
            errors: [self.errors, after.errors].concat(),
            ..after
        }
    }
}

impl TestResult {
    /// Returns the error that ended the test, from the `errors` of the test's outcome, if the error was kept.
    pub(crate) fn error_among<'a>(&self, errors: &'a [Arc<ErrorRecord>]) -> Option<&'a Arc<ErrorRecord>> {
        errors.get(usize::try_from(self.error?).ok()?)
    }
}

/// Counts of tests by result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TestCounts {
    /// Tests in which all checks held.
    pub passed: u64,
    /// Tests in which a check failed, or that exceeded their time limit.
    pub failed: u64,
    /// Tests ended by an error.
    pub errors: u64,
    /// Tests that did not run, that checked nothing and gave a reason, or that failed as expected.
    pub skipped: u64,
    /// The duration of the test run, in milliseconds.
    pub milliseconds: u64,
}

impl TestCounts {
    /// Returns the counts of a test run, added up over all tested systems; `None` if the outcome contains no test run.
    #[must_use]
    pub fn of(outcome: &Outcome) -> Option<Self> {
        let counts = of_kind(&outcome.records).map(|run: &RunCounts| Self {
            passed: run.passed,
            failed: run.failed,
            errors: run.errors,
            skipped: run.skipped,
            milliseconds: run.milliseconds,
        });
        counts.reduce(|all, counts| all + counts)
    }

    /// Returns the number of tests.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.passed + self.failed + self.errors + self.skipped
    }
}

impl std::ops::Add for TestCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            errors: self.errors + other.errors,
            skipped: self.skipped + other.skipped,
            milliseconds: self.milliseconds + other.milliseconds,
        }
    }
}

/// The progress of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// The evaluation waits for earlier evaluations.
    Queued,
    /// The evaluation is running.
    Running {
        /// The running time so far, without the time for which the evaluation was held.
        time: Duration,
        /// True if the evaluation runs in the background, so that later calls need not wait for its end.
        background: bool,
    },
    /// The evaluation failed and is held where it failed. The field is its outcome so far.
    Held(Arc<Outcome>),
    /// The evaluation has ended. The fields are its outcome and its running time, which excludes time held.
    Over(Arc<Outcome>, Duration),
}

/// The status of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluationStatus {
    /// The number of the evaluation.
    pub id: u64,
    /// The beginning of the evaluation's code.
    pub code: String,
    /// The progress of the evaluation.
    pub progress: Progress,
    /// The number of characters of the output so far, without characters that were not kept.
    pub printed: u64,
}

/// The kind of a [`Definition`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DefinitionKind {
    /// Functions and generic functions.
    Function,
    /// Variables, parameters, constants, globals.
    Variable,
    /// Macros of all kinds, and setf expanders.
    Macro,
    /// Classes, types and method combinations.
    Class,
    /// Packages.
    Package,
    /// Systems that were loaded.
    System,
}

/// A definition made in the session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct Definition {
    /// The kind of the definition.
    pub kind: DefinitionKind,
    /// One line with the name, and the lambda list or value if there is one.
    pub text: String,
}

/// A filter for [`DefinitionQuery`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DefinitionFilter {
    /// All definitions, including packages and systems.
    #[default]
    All,
    /// Functions.
    Functions,
    /// Variables.
    Variables,
    /// Macros.
    Macros,
    /// Classes.
    Classes,
}

/// A query for the definitions of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinitionQuery {
    /// The kinds of definitions to list.
    pub filter: DefinitionFilter,
    /// The package whose definitions are listed, including definitions from loaded systems; `None` for all definitions of
    /// the session.
    pub package: Option<String>,
    /// The maximum number of definitions, systems not counted.
    pub limit: u64,
}

impl Default for DefinitionQuery {
    fn default() -> Self {
        Self { filter: DefinitionFilter::All, package: None, limit: 100 }
    }
}

/// The definitions of a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definitions {
    /// The definitions, sorted by kind, then by text.
    pub shown: Vec<Definition>,
    /// The number of definitions beyond the requested limit.
    pub more: u64,
    /// Forms that defined something in a lost image and could not be restored, each with the reason.
    #[serde(default)]
    pub unrestored: Vec<String>,
    /// True if only definitions of one kind were requested.
    #[serde(default)]
    pub of_one_kind: bool,
    /// True if only definitions in one package were requested.
    #[serde(default)]
    pub in_one_package: bool,
}

/// One role of a symbol: the symbol may name a function, a variable, a class and so on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Role {
    /// The symbol with its package, and the role: `COMMON-LISP:CAR [FUNCTION]`.
    pub title: String,
    /// The details to show, in order, each as a label and a text: `("Arglist", "(LIST)")`.
    pub details: Vec<(String, String)>,
}

/// The description of a symbol, or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SymbolDescription {
    /// The roles of an existing symbol; empty if nothing is known about it.
    Found(Vec<Role>),
    /// A sentence that says where the symbol was looked for, with similar names.
    NotFound(String),
}

#[cfg(all(test, feature = "mcp"))]
mod tests {
    use super::*;

    #[test]
    fn control_characters_count_as_six_bytes_of_json_and_quotes_and_backslashes_as_two() {
        for (character, bytes) in [("\u{1}", 6), ("\"", 2), ("\\", 2), ("x", 1), ("é", 2)] {
            for length in [0, 1, 31, 32, 33, 1_000] {
                assert_eq!(json_size(&character.repeat(length)), bytes * length, "{character:?}");
            }
        }
    }

    #[test]
    fn a_test_whose_error_was_dropped_gets_no_error_of_another_test() {
        let test = |error| TestResult { name: "t".to_owned(), error: Some(error), ..TestResult::default() }.into();
        let run = Outcome { records: vec![test(0), test(7)], ..Outcome::from_test_output(String::new()) };
        let mut whole =
            Outcome::from_test_output(String::new()).with_system_tests("a", run.clone()).with_system_tests("b", run);
        whole.errors = vec![std::sync::Arc::new(ErrorRecord {
            id: 1,
            kind: "SIMPLE-ERROR".to_owned(),
            message: Clipped::default(),
            time: jiff::Timestamp::UNIX_EPOCH,
            form: None,
            slots: Vec::new(),
            restarts: Vec::new(),
            frames: Vec::new(),
            total_frames: 0,
            slots_omitted: 0,
            evaluation: 0,
        })];
        let numbers: Vec<Vec<_>> = whole
            .split_by_system()
            .iter()
            .map(|(_, run)| of_kind(&run.records).map(|test: &TestResult| test.error).collect())
            .collect();
        assert_eq!(numbers, [[Some(0), None], [Some(0), None]]);
    }
}
