//! What an evaluation or an inspection did, as plain data.
//!
//! Everything here is owned, immutable once built, and serialisable: it outlives the Lisp objects it tells of, and it
//! can be handed to another process. How it is worded is [`report`](crate::report)'s business.

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
    /// The part that was kept, from the beginning.
    pub text: String,
    /// How many characters were left out after it.
    pub omitted: u64,
}

impl Clipped {
    /// True when nothing was written at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.omitted == 0
    }
}

impl Clipped {
    /// This text and then the other one.
    fn followed_by(self, after: Self) -> Self {
        if self.omitted > 0 {
            // What comes after a cut is cut as well.
            return Self { omitted: self.omitted + after.characters(), ..self };
        }
        Self { text: self.text + &after.text, omitted: after.omitted }
    }

    /// Returns the beginning of the text that takes at most so many bytes as JSON.
    #[cfg(feature = "mcp")]
    fn within(&self, bytes: usize) -> Self {
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

    /// How many characters were written.
    pub(crate) fn characters(&self) -> u64 {
        self.text.chars().count() as u64 + self.omitted
    }
}

/// The text of two streams in the order of their turns: see [`Outcome::turns`].
pub(crate) fn interleaved(stdout: &str, stderr: &str, turns: &[u32]) -> String {
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

/// Where character `count` of `text` begins, in bytes; its length when there are not that many.
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

/// A warning that an evaluation signalled, or that the compiler did on its behalf.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// The condition's class name, with its package where a reader in CL-USER needs one.
    pub kind: String,
    /// Its report.
    pub message: Clipped,
    /// The file that the compiler was at; `None` when it was at the submitted code, or there was no compiler.
    pub file: Option<String>,
    /// The line there, from 1.
    pub line: Option<u64>,
    /// The column there, from 1.
    pub column: Option<u64>,
    /// What the form around it in the file is called: `(DEFUN F)`.
    pub form: Option<String>,
}

/// A restart that was available where an error happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct Restart {
    /// Its number, from 1, in `compute-restarts`' order.
    pub number: u64,
    /// The restart's name, without package.
    pub name: String,
    /// What it says it does.
    pub description: String,
}

/// One frame of a backtrace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// Its number, from 0 at the point of the error.
    pub number: u64,
    /// The call, printed on one line: `(FOO 1 "x")`.
    pub call: String,
    /// Where the function was defined, if that is known: `path:line`, or `evaluation 12, line 3`.
    pub source: Option<String>,
    /// The line of source there, cut if it is long.
    pub code: Option<String>,
    /// Whose machinery the frame belongs to that only brought the user's code to run: `ASDF`, `the reader`.
    pub machinery: Option<String>,
    /// The local variables that SBCL knows of. Kept for the innermost frames only.
    pub locals: Vec<Local>,
}

/// A local variable of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Local {
    /// Its name.
    pub name: String,
    /// Its value, if it can be read at this point.
    pub value: LocalValue,
}

/// The local variables of one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameLocals {
    /// The frame's number, from 0.
    pub frame: u64,
    /// Its variables, in the order of the code.
    pub locals: Vec<Local>,
}

/// The value of a local variable, as far as SBCL knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LocalValue {
    /// It has this value.
    Value(String),
    /// It is no longer, or not yet, in use at this point.
    Dead,
    /// SBCL cannot tell.
    Unavailable,
}

/// A slot of a condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct Slot {
    /// Its name, without package.
    pub name: String,
    /// Its value as printed.
    pub value: String,
}

/// Which top-level form of the submitted code failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct FormPosition {
    /// Its number, from 1.
    pub number: u64,
    /// The line, from 1, that it begins on.
    pub line: u64,
    /// Its first line of text.
    pub text: String,
}

/// An error and everything known about it, taken where it happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorRecord {
    /// Its number in this session's history, from 1: `E1`. 0 before it has got one.
    pub id: u64,
    /// The condition's class name, with its package where a reader in CL-USER needs one; or one of the server's own:
    /// `TIMEOUT`, `CANCELLED`, `IMAGE-LOST`.
    pub kind: String,
    /// The condition's report.
    pub message: Clipped,
    /// When it happened.
    pub time: jiff::Timestamp,
    /// The form of the submitted code that failed.
    pub form: Option<FormPosition>,
    /// The condition's slots.
    pub slots: Vec<Slot>,
    /// The restarts that were kept, in `compute-restarts`' order. Of very many some in the middle are missing: the
    /// numbers tell. The last two are the server's own.
    pub restarts: Vec<Restart>,
    /// The frames that were kept, innermost first. Of a very deep stack the middle is missing: the numbers tell.
    pub frames: Vec<Frame>,
    /// How many frames there were.
    pub total_frames: u64,
    /// How many more slots there were.
    pub slots_omitted: u64,
    /// The number of the evaluation that ended with it; 0 where none is known.
    pub evaluation: u64,
}

impl ErrorRecord {
    /// What its message begins with: of an evaluation that was ended, that, without what is said of an image that goes on.
    pub(crate) fn what_happened(&self) -> &str {
        let text = &*self.message.text;
        let end = ["; ", ". "].iter().filter_map(|mark| text.find(mark)).min();
        text[..end.unwrap_or(text.len())].trim_end_matches('.')
    }

    /// Returns the record with these local variables in place of its own.
    #[cfg(feature = "mcp")]
    pub(crate) fn with_locals(&self, mut locals: Vec<FrameLocals>) -> Self {
        let mut record = self.clone();
        for frame in &mut record.frames {
            let of_frame = locals.iter_mut().find(|locals| locals.frame == frame.number);
            frame.locals = of_frame.map(|locals| std::mem::take(&mut locals.locals)).unwrap_or_default();
        }
        record
    }

    /// How much room it takes, about: in memory, and as JSON where that is more.
    pub(crate) fn bytes(&self) -> usize {
        let form = self.form.as_ref().map_or(0, |form| json_size(&form.text));
        let own = 4 * PART + json_size(&self.kind) + json_size(&self.message.text) + form;
        let slots = self.slots.iter().map(Slot::bytes).sum::<usize>();
        let restarts = self.restarts.iter().map(Restart::bytes).sum::<usize>();
        own + slots + restarts + self.frames.iter().map(Frame::bytes).sum::<usize>()
    }

    /// Returns the record without the end of its message, slots, restarts and outer frames that exceed about so many bytes.
    #[cfg(feature = "mcp")]
    pub(crate) fn within(self: &Arc<Self>, bytes: usize) -> Arc<Self> {
        if self.bytes() <= bytes {
            return self.clone();
        }
        let mut left = bytes;
        let mut takes = |bytes: usize| {
            let fits = bytes <= left;
            left -= if fits { bytes } else { 0 };
            fits
        };
        let form = self.form.clone().filter(|form| takes(json_size(&form.text)));
        takes(4 * PART + json_size(&self.kind));
        let message = self.message.within(bytes / 2);
        takes(json_size(&message.text));
        let slots: Vec<_> = self.slots.iter().filter(|slot| takes(slot.bytes())).cloned().collect();
        // The last ones are the server's own.
        let mut restarts: Vec<_> =
            self.restarts.iter().rev().filter(|restart| takes(restart.bytes())).cloned().collect();
        restarts.reverse();
        let frames = self.frames.iter().take_while(|frame| takes(frame.bytes())).cloned().collect();
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

/// Bytes of a part of an error without its texts, about.
const PART: usize = 64;

/// Returns an upper bound of a text's size as JSON without its quotes, in bytes: control characters take six.
pub(crate) fn json_size(text: &str) -> usize {
    let escaped = |byte: u8| if byte < b' ' { 6 } else { 1 + usize::from(byte == b'"' || byte == b'\\') };
    text.bytes().map(escaped).sum()
}

fn part_bytes(name: &str, value: &str) -> usize {
    PART + json_size(name) + json_size(value)
}

impl Slot {
    fn bytes(&self) -> usize {
        part_bytes(&self.name, &self.value)
    }
}

impl Restart {
    fn bytes(&self) -> usize {
        part_bytes(&self.name, &self.description)
    }
}

impl Frame {
    fn bytes(&self) -> usize {
        let locals = self.locals.iter().map(|local| match &local.value {
            LocalValue::Value(value) => part_bytes(&local.name, value),
            LocalValue::Dead | LocalValue::Unavailable => part_bytes(&local.name, ""),
        });
        let [source, code] = [&self.source, &self.code].map(|part| part.as_deref().unwrap_or_default());
        part_bytes(&self.call, source) + json_size(code) + locals.sum::<usize>()
    }
}

/// What `capture-time` measures.
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

/// A form that defined something: evaluated again in its package, in order with the others, it makes another image
/// like this one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DefiningForm {
    /// The form's text.
    pub code: String,
    /// The package it was read in.
    pub package: String,
}

/// The changes that a form made to the image, as Lisp reported them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Changes {
    /// The names that it defined, each with the kind of definition: `FUNCTION APP::F`. None when there were more than Lisp
    /// reports (50), or when a system defined them.
    pub(crate) defined: Vec<String>,
    /// The names that it removed, in the same form.
    pub(crate) removed: Vec<String>,
    /// The modules that its symbols belong to, as `require` takes them.
    pub(crate) modules: Vec<String>,
    pub(crate) role: FormRole,
}

/// The role of a form in a session: whether it can be replayed, and whether a file of source may leave it out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FormRole {
    /// Unknown, since version 0.1 recorded the form.
    #[default]
    Unknown,
    /// An `in-package`.
    PackageSelection,
    /// A `defun` in which nothing runs before the function is called.
    Function,
    /// A `defgeneric` or `defmethod` in which nothing runs before the function is called.
    GenericFunction,
    /// A form that failed after it had defined something: it cannot be replayed.
    Failed,
    /// Any other form.
    Other,
}

impl Changes {
    /// Parses what Lisp reports beside a form's place: lines that begin with `=` (its role), `+` (a name that it defined),
    /// `-` (a name that it removed) or `?` (a module).
    pub(crate) fn parse<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let mut changes = Self { role: FormRole::Other, ..Self::default() };
        for line in lines {
            let Some((mark, text)) = line.split_at_checked(1) else { continue };
            match mark {
                "+" => changes.defined.push(text.to_owned()),
                "-" => changes.removed.push(text.to_owned()),
                "?" => changes.modules.push(text.to_owned()),
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
}

/// What one evaluation did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The evaluation's number in its session, from 1; 0 for none.
    pub evaluation: u64,
    /// The session keeps it whole under this number, until newer ones take its place.
    pub kept: bool,
    /// What the server itself has to say.
    pub notices: Vec<String>,
    /// Output of threads that outlived their evaluation.
    pub background: Clipped,
    /// What went to `*standard-output*`.
    pub stdout: Clipped,
    /// What went to `*error-output*` and `*trace-output*`.
    pub stderr: Clipped,
    /// The order in which these two were printed: so many characters of stdout, so many of stderr, and so on in turn.
    pub turns: Vec<u32>,
    /// How many characters this evaluation had printed before it was held and went on.
    pub printed_before: u64,
    /// Warnings in the order they were signalled.
    pub warnings: Vec<Warning>,
    /// How many more warnings there were.
    pub warnings_omitted: u64,
    /// The values of the last form, or the error that ended the evaluation.
    pub result: Result<Vec<Clipped>, Arc<ErrorRecord>>,
    /// Present when it was asked for.
    pub timing: Option<Timing>,
    /// The evaluation is held where it failed: its restarts can be invoked and its frames looked at.
    pub held: bool,
    /// It is not over, and goes on in the background: this is what it has printed so far.
    pub in_background: bool,
    /// The forms that defined something, in order.
    pub defined: Vec<DefiningForm>,
    /// What an operation found, in its order.
    pub records: Vec<Record>,
    /// Errors that its records tell of, in their order: a record names one by its index.
    pub errors: Vec<Arc<ErrorRecord>>,
}

impl Outcome {
    /// True when the evaluation ended with an error.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.result.is_err()
    }

    /// What was loaded; `None` when that failed, or nothing was to be.
    #[must_use]
    pub fn loaded(&self) -> Option<&Loaded> {
        of_kind(&self.records).next().filter(|_| !self.is_error())
    }

    /// How much memory it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        let values = match &self.result {
            Ok(values) => values.iter().map(|value| 32 + value.text.len()).sum(),
            Err(error) => error.bytes(),
        };
        let warnings = self.warnings.iter().map(|warning| 64 + warning.kind.len() + warning.message.text.len());
        let notices = self.notices.iter().map(|notice| 24 + notice.len());
        let defined = self.defined.iter().map(|form| 48 + form.code.len() + form.package.len());
        let records = self.records.iter().map(Record::bytes);
        let output = self.stdout.text.len() + self.stderr.text.len() + self.background.text.len();
        512 + output
            + 4 * self.turns.len()
            + values
            + warnings.sum::<usize>()
            + notices.sum::<usize>()
            + defined.sum::<usize>()
            + records.sum::<usize>()
            + self.errors.iter().map(|error| error.bytes()).sum::<usize>()
    }

    /// What it printed to stdout and stderr, in the order printed, as far as that is kept.
    #[must_use]
    pub fn printed(&self) -> String {
        interleaved(&self.stdout.text, &self.stderr.text, &self.turns)
    }

    /// The place in [`printed`](Self::printed), in characters, of the character at `place` of stdout, or of stderr.
    pub(crate) fn printed_at(&self, stderr: bool, place: u64) -> u64 {
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

    /// What the tests of each of several systems came to, by the names that were asked for; nothing where there was one.
    pub(crate) fn by_system(&self) -> Vec<(&str, Self)> {
        let begun: Vec<&System> = of_kind(&self.records).collect();
        let printed = self.printed();
        let at = |system: &System| byte_offset(&printed, system.printed);
        // What was printed after the last that was kept is not known to be anybody else's.
        let cut = begun.iter().rposition(|system| at(system) < printed.len()).unwrap_or(0);
        let systems = begun.iter().enumerate().map(|(index, system)| {
            let name = &*system.name;
            let end = begun.get(index + 1).map_or(printed.len(), |next| at(next));
            let printed = printed.get(at(system)..end).unwrap_or_default();
            let mut outcome = Self::of_tests(printed.to_owned());
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
                // One that was not kept is nobody else's either.
                let found = test.error_among(&self.errors);
                test.error = found.map(|_| outcome.errors.len() as u64);
                outcome.errors.extend(found.cloned());
            }
            (name, outcome)
        });
        systems.collect()
    }

    /// One of tests that come to nothing yet, and printed this.
    pub(crate) fn of_tests(printed: String) -> Self {
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

    /// The same with what the tests of one more of several systems came to: the reverse of [`by_system`](Self::by_system).
    #[cfg(feature = "mcp")]
    pub(crate) fn with_system(mut self, name: &str, mut tests: Self) -> Self {
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

    /// One outcome of an evaluation that was held with this one, and went on to `after`.
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
    /// The error that ended it, among those of the outcome, if it was kept.
    pub(crate) fn error_among<'a>(&self, errors: &'a [Arc<ErrorRecord>]) -> Option<&'a Arc<ErrorRecord>> {
        errors.get(usize::try_from(self.error?).ok()?)
    }
}

/// How many tests came to what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TestCounts {
    /// All their checks held.
    pub passed: u64,
    /// A check did not hold, or the test took too long.
    pub failed: u64,
    /// An error ended the test.
    pub errors: u64,
    /// It was not run, or checked nothing for a reason that it gave.
    pub skipped: u64,
    /// How long all of them took.
    pub milliseconds: u64,
}

impl TestCounts {
    /// Those of an outcome that is one of tests: of several systems, of all together.
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

    /// How many tests there were.
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

/// How far an evaluation is.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// It waits for the ones before it.
    Queued,
    /// It has run for so long, in the foreground or in the background.
    Running {
        /// How long.
        time: Duration,
        /// Calls that come after it need not wait for its end.
        background: bool,
    },
    /// It has failed and is held where it failed.
    Held(Arc<Outcome>),
    /// It is over, and took so long.
    Over(Arc<Outcome>, Duration),
}

/// What is known of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluationStatus {
    /// Its number.
    pub id: u64,
    /// The beginning of its code.
    pub code: String,
    /// How far it is.
    pub progress: Progress,
    /// Characters that it has printed so far, as far as they are kept.
    pub printed: u64,
}

/// What kind of thing a [`Definition`] defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DefinitionKind {
    /// Functions and generic functions.
    Function,
    /// Variables, parameters, constants, globals.
    Variable,
    /// Macros, compiler macros and symbol macros.
    Macro,
    /// Classes, structures and condition types.
    Class,
    /// Packages.
    Package,
    /// Systems that were loaded.
    System,
}

/// One thing that the session defined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
pub struct Definition {
    /// What it is.
    pub kind: DefinitionKind,
    /// One line: its name, and the lambda list or value where there is one.
    pub text: String,
}

/// Which definitions to list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "mcp", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DefinitionFilter {
    /// All of them, packages and systems too.
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

/// A question for definitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinitionQuery {
    /// Which ones.
    pub filter: DefinitionFilter,
    /// Only those in this package, what systems brought too.
    pub package: Option<String>,
    /// At most this many; systems are not counted.
    pub limit: u64,
}

impl Default for DefinitionQuery {
    fn default() -> Self {
        Self { filter: DefinitionFilter::All, package: None, limit: 100 }
    }
}

/// What a session defined.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definitions {
    /// Sorted by kind, then by text.
    pub shown: Vec<Definition>,
    /// How many more there are than were asked for.
    pub more: u64,
    /// Forms that defined something in an image that was lost, and could not be restored, each with the reason.
    #[serde(default)]
    pub unrestored: Vec<String>,
}

/// One role of a symbol: a function, a variable, a class and so on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Role {
    /// The symbol with its package and the role: `COMMON-LISP:CAR [FUNCTION]`.
    pub title: String,
    /// What is known of it, as label and text, in the order to show: `("Arglist", "(LIST)")`.
    pub details: Vec<(String, String)>,
}

/// What a symbol means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SymbolDescription {
    /// The symbol exists; without roles when nothing is known of it.
    Found(Vec<Role>),
    /// No such symbol: a sentence that says where it was looked for, with near names.
    NotFound(String),
}

#[cfg(all(test, feature = "mcp"))]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_was_not_kept_is_not_another_ones() {
        let test = |error| TestResult { name: "t".to_owned(), error: Some(error), ..TestResult::default() }.into();
        let run = Outcome { records: vec![test(0), test(7)], ..Outcome::of_tests(String::new()) };
        let mut whole = Outcome::of_tests(String::new()).with_system("a", run.clone()).with_system("b", run);
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
            .by_system()
            .iter()
            .map(|(_, run)| of_kind(&run.records).map(|test: &TestResult| test.error).collect())
            .collect();
        assert_eq!(numbers, [[Some(0), None], [Some(0), None]]);
    }
}
