//! Building outcomes from events, within the limits.

use std::sync::Arc;
use std::time::Duration;

use super::operation::RecordsBuilder;
use crate::config::Limits;
use crate::error::InspectError;
use crate::image::{Event, Interrupt, Item, Text};
use crate::outcome::{
    Clipped, DefiningForm, Definition, DefinitionKind, Definitions, ErrorRecord, FormPosition, Frame, Local,
    LocalValue, Outcome, Restart, Role, Slot, SymbolDescription, Timing, Warning, interleaved,
};

/// Characters over its limit that a text may be printed for the sake of saying how many there are; then printing it
/// is stopped.
const COUNTED: u64 = 100_000;
/// Characters of a name: of a condition's type, a restart, a slot, a variable.
const MAX_NAME: usize = 150;
/// Characters of the place of a frame, and of the line that a failing form begins with.
const MAX_PLACE: usize = 1_000;
/// Restarts and slots of an error, and local variables of a frame.
const MAX_PARTS: usize = 100;
/// Values of an evaluation.
const MAX_VALUES: usize = 1_000;
/// Bytes of an error's frames, local variables, slots and restarts together.
const MAX_RECORD: usize = 1 << 20;

/// Bytes of one that the code handles.
const MAX_SIGNALLED: usize = 100 << 10;

/// How many of these are kept, should there be more than Lisp records.
const SIGNALLED: usize = 100;

/// How many errors are kept that others came after in the same evaluation.
const SUPERSEDED: usize = 10;

/// The kinds of error that an interruption is.
const INTERRUPTIONS: [&str; 3] = ["TIMEOUT", "CANCELLED", "HEAP-EXHAUSTED"];

/// Characters of the value of a local variable in a backtrace.
const MAX_LOCAL: u64 = 200;

/// Text that is cut while it is written.
#[derive(Debug, Clone)]
pub(super) struct ClippedBuffer {
    text: String,
    left: u64,
    omitted: u64,
}

impl ClippedBuffer {
    /// Keeps the first `limit` characters.
    pub(super) fn new(limit: u64) -> Self {
        Self { text: String::new(), left: limit, omitted: 0 }
    }

    /// Adds `text`.
    pub(super) fn push(&mut self, text: Text<'_>) {
        push_within(&mut self.left, &mut self.text, &mut self.omitted, text);
    }

    /// What is kept so far.
    #[cfg(feature = "mcp")]
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Adds what was clipped elsewhere.
    pub(super) fn push_clipped(&mut self, clipped: &Clipped) {
        let mut characters = clipped.text.chars();
        self.text.extend(
            characters.by_ref().take(usize::try_from(self.left).unwrap_or(usize::MAX)).inspect(|_| self.left -= 1),
        );
        self.omitted += characters.count() as u64 + clipped.omitted;
    }

    /// True when there is no point in going on.
    pub(super) fn enough(&self) -> bool {
        self.omitted >= COUNTED
    }
}

/// A name, cut where it is too long.
fn name(text: Text<'_>) -> String {
    let mut name = String::new();
    text.append_to(&mut name, MAX_NAME);
    if text.len() > MAX_NAME {
        name.push('…');
    }
    on_one_line(&name)
}

/// Text with its line breaks written as in Rust or C.
fn on_one_line(text: &str) -> String {
    text.replace('\n', "\\n").replace('\r', "\\r")
}

/// Adds `text` to what takes its room from `left` bytes.
fn push_bounded(left: &mut usize, buffer: &mut ClippedBuffer, text: Text<'_>) {
    if *left == 0 {
        buffer.omitted += text.len() as u64;
    } else {
        let before = buffer.text.len();
        buffer.push(text);
        *left = left.saturating_sub(buffer.text.len() - before);
    }
}

fn push_within(left: &mut u64, kept: &mut String, omitted: &mut u64, text: Text<'_>) {
    let length = text.len() as u64;
    let keep = length.min(*left);
    if keep > 0 {
        // At most the text's own length, which is a usize.
        text.append_to(kept, usize::try_from(keep).unwrap_or(usize::MAX));
        *left -= keep;
    }
    *omitted += length - keep;
}

impl From<ClippedBuffer> for Clipped {
    fn from(buffer: ClippedBuffer) -> Self {
        Self { text: buffer.text, omitted: buffer.omitted }
    }
}

/// An error as it comes in.
#[derive(Debug)]
struct ErrorBuilder {
    kind: String,
    message: ClippedBuffer,
    time: jiff::Timestamp,
    /// Number of the form that failed, and where it begins.
    form: Option<(u64, usize)>,
    slots: Vec<(String, ClippedBuffer)>,
    slots_omitted: u64,
    restarts: Vec<(u64, String, ClippedBuffer)>,
    frames: Vec<FrameBuilder>,
    total_frames: u64,
    /// Bytes that there is room for.
    left: usize,
    /// There was none for the part that was begun last.
    skips: bool,
}

/// A warning as it comes in; 0 for a line or column that is not known.
#[derive(Debug)]
struct WarningBuilder {
    kind: String,
    message: ClippedBuffer,
    file: Option<String>,
    line: u64,
    column: u64,
    form: Option<String>,
}

/// A frame as it comes in.
#[derive(Debug)]
struct FrameBuilder {
    number: u64,
    call: ClippedBuffer,
    source: Option<String>,
    code: Option<String>,
    machinery: Option<String>,
    locals: Vec<(String, u64, ClippedBuffer)>,
}

impl ErrorBuilder {
    fn new(kind: String, limits: &Limits) -> Self {
        Self {
            kind,
            message: ClippedBuffer::new(limits.max_message),
            time: jiff::Timestamp::now(),
            form: None,
            slots: Vec::new(),
            slots_omitted: 0,
            restarts: Vec::new(),
            frames: Vec::new(),
            total_frames: 0,
            left: MAX_RECORD,
            skips: false,
        }
    }

    /// Takes room for a part with this name, of which there are so many yet; `None` when there is none.
    fn part(&mut self, so_many: usize, text: Text<'_>) -> Option<String> {
        self.skips = so_many >= MAX_PARTS || self.left == 0;
        (!self.skips).then(|| {
            let name = name(text);
            self.left = self.left.saturating_sub(name.len());
            name
        })
    }

    fn finish(mut self, code: &str, evaluation: u64) -> ErrorRecord {
        if unreadable(&self.kind, &self.message.text)
            && let Some(hint) = crate::check::hint(code)
        {
            self.message.push_clipped(&format!("\nBy the indentation, {hint}").into());
        }
        let message = self.message.into();
        ErrorRecord {
            id: 0,
            form: self.form.map(|(number, start)| form_position(code, number, start)),
            slots: self.slots.into_iter().map(|(name, value)| Slot { name, value: one_line(value) }).collect(),
            kind: self.kind,
            message,
            time: self.time,
            slots_omitted: self.slots_omitted,
            restarts: self
                .restarts
                .into_iter()
                .map(|(number, name, text)| Restart { number, name, description: whole(text) })
                .collect(),
            frames: self
                .frames
                .into_iter()
                .map(|frame| Frame {
                    number: frame.number,
                    call: one_line(frame.call),
                    source: frame.source,
                    code: frame.code,
                    machinery: frame.machinery,
                    locals: frame.locals.into_iter().map(local).collect(),
                })
                .collect(),
            total_frames: self.total_frames,
            evaluation,
        }
    }
}

/// Whether the error is that the reader found the submitted code not balanced: `push-reader-position` in
/// lisp/evaluator.lisp and SBCL's reader word it so.
fn unreadable(kind: &str, message: &str) -> bool {
    kind == "END-OF-FILE" && message.contains("\nThe code ends at line ")
        || kind == "SB-INT:SIMPLE-READER-ERROR" && message.starts_with("unmatched close parenthesis")
}

/// A text with the number of characters that are missing at its end.
fn whole(buffer: ClippedBuffer) -> String {
    let Clipped { mut text, omitted } = buffer.into();
    if omitted > 0 {
        text.push_str(&crate::report::omission(omitted));
    }
    text
}

/// Where the form is that begins at character `start` of `code`.
fn form_position(code: &str, number: u64, start: usize) -> FormPosition {
    let offset = code.char_indices().nth(start).map_or(code.len(), |(offset, _)| offset);
    let (before, form) = code.split_at(offset);
    FormPosition {
        number,
        line: 1 + before.matches('\n').count() as u64,
        text: form.lines().next().unwrap_or_default().trim_end().chars().take(MAX_PLACE).collect(),
    }
}

/// A local variable from its parts; the code is the contract's.
fn local((name, validity, value): (String, u64, ClippedBuffer)) -> Local {
    let value = match validity {
        0 => LocalValue::Value(one_line(value)),
        1 => LocalValue::Dead,
        _ => LocalValue::Unavailable,
    };
    Local { name, value }
}

/// A frame's text on one line.
fn one_line(call: ClippedBuffer) -> String {
    let clipped = Clipped::from(call);
    let mut text = if clipped.text.contains(['\n', '\r']) { on_one_line(&clipped.text) } else { clipped.text };
    if clipped.omitted > 0 {
        text.push_str(&crate::report::omission(clipped.omitted));
    } else if text.is_empty() {
        // A print method that did not end, and was interrupted.
        text.push_str("#<unprintable>");
    }
    text
}

/// An outcome as it comes in.
#[derive(Debug)]
pub(super) struct OutcomeBuilder {
    limits: Limits,
    timeout: Option<Duration>,
    stdout: Clipped,
    stderr: Clipped,
    turns: Vec<u32>,
    printed_before: u64,
    output_left: u64,
    warnings: Vec<WarningBuilder>,
    warnings_omitted: u64,
    values: Vec<Clipped>,
    values_left: u64,
    /// What the value begun last had left.
    value_left: u64,
    error: Option<ErrorBuilder>,
    /// Errors before that one: cleanup forms failed in turn, or stopped the unwinding.
    superseded: Vec<ErrorBuilder>,
    /// Errors where they were signalled, but for those that nothing handled; `None` if they are not recorded.
    signalled: Option<Vec<Option<ErrorBuilder>>>,
    /// How many of them there were before this evaluation was held and went on.
    signalled_before: usize,
    /// The records name them.
    errors_are_records: bool,
    timing: Option<Timing>,
    code: String,
    evaluation: u64,
    defined: Vec<DefiningForm>,
    records: RecordsBuilder,
}

impl OutcomeBuilder {
    /// For evaluation number `evaluation`, of `code` under `limits`, with a time limit of its own.
    pub(super) fn new(evaluation: u64, code: String, limits: Limits, timeout: Option<Duration>) -> Self {
        Self {
            code,
            evaluation,
            defined: Vec::new(),
            records: RecordsBuilder::default(),
            limits,
            timeout,
            stdout: Clipped::default(),
            stderr: Clipped::default(),
            turns: Vec::new(),
            printed_before: 0,
            output_left: limits.max_output,
            warnings: Vec::new(),
            warnings_omitted: 0,
            values: Vec::new(),
            values_left: limits.max_value,
            value_left: limits.max_value,
            error: None,
            superseded: Vec::new(),
            signalled: None,
            signalled_before: 0,
            errors_are_records: false,
            timing: None,
        }
    }

    /// Keeps the errors that the code handles, too.
    pub(super) fn record_errors(&mut self) {
        self.signalled.get_or_insert_default();
    }

    /// Whether these are for the records, which name them by their index.
    pub(super) fn errors_are_records(&mut self, so: bool) {
        self.errors_are_records = so;
    }

    /// An empty one for what this evaluation comes to when it goes on.
    pub(super) fn anew(&self) -> Self {
        let mut builder = Self::new(self.evaluation, self.code.clone(), self.limits, self.timeout);
        builder.output_left = self.output_left;
        builder.printed_before = self.printed_before + self.printed();
        if let Some(signalled) = &self.signalled {
            builder.record_errors();
            builder.signalled_before = self.signalled_before + signalled.len();
        }
        builder
    }

    /// The evaluation's number; 0 for none.
    pub(super) fn evaluation(&self) -> u64 {
        self.evaluation
    }

    /// How many characters of what was printed so far are kept.
    pub(super) fn printed(&self) -> u64 {
        self.turns.iter().copied().map(u64::from).sum()
    }

    /// What it comes to is told of no evaluation: it belongs to the debugger.
    pub(super) fn detach(&mut self) {
        (self.evaluation, self.printed_before) = (0, 0);
    }

    /// How many characters that were printed are not.
    pub(super) fn omitted(&self) -> u64 {
        self.stdout.omitted + self.stderr.omitted
    }

    /// What was printed so far, as far as it is kept, in its order.
    pub(super) fn printed_text(&self) -> String {
        interleaved(&self.stdout.text, &self.stderr.text, &self.turns)
    }

    /// Takes what was printed to one of the streams.
    fn print(&mut self, stderr: bool, text: Text<'_>) {
        let stream = if stderr { &mut self.stderr } else { &mut self.stdout };
        let left = self.output_left;
        push_within(&mut self.output_left, &mut stream.text, &mut stream.omitted, text);
        let kept = u32::try_from(left - self.output_left).unwrap_or(u32::MAX);
        if kept > 0 {
            // Turns of stdout are at even places, those of stderr at odd ones.
            let last_is_stderr = self.turns.len().is_multiple_of(2);
            match self.turns.last_mut() {
                Some(turn) if last_is_stderr == stderr => *turn += kept,
                last => {
                    if last.is_none() && stderr {
                        self.turns.push(0);
                    }
                    self.turns.push(kept);
                }
            }
        }
    }

    /// The time limit.
    pub(super) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// What was printed so far, as far as it is kept.
    pub(super) fn stdout(&self) -> &str {
        &self.stdout.text
    }

    /// Takes an event. True when no more of the text begun last is kept.
    pub(super) fn event(&mut self, event: Event<'_>) -> bool {
        match event {
            Event::Unhandled(number) => {
                let known = usize::try_from(number).ok().and_then(|number| number.checked_sub(self.signalled_before));
                if let (Some(signalled), Some(known)) = (&mut self.signalled, known)
                    && let Some(error) = signalled.get_mut(known)
                {
                    *error = None;
                }
            }
            Event::Stdout(text) => self.print(false, text),
            Event::Stderr(text) => self.print(true, text),
            Event::Warning(kind, line) => {
                if (self.warnings.len() as u64) < self.limits.max_warnings && self.warnings_omitted == 0 {
                    self.warnings.push(WarningBuilder {
                        kind: name(kind),
                        message: ClippedBuffer::new(self.limits.max_message),
                        file: None,
                        line,
                        column: 0,
                        form: None,
                    });
                } else {
                    self.warnings_omitted += 1;
                }
            }
            Event::WarningText { text, again } => {
                if self.warnings_omitted > 0 {
                    return true;
                }
                if let Some(WarningBuilder { message, .. }) = self.warnings.last_mut() {
                    if again {
                        *message = ClippedBuffer::new(self.limits.max_message);
                    }
                    message.push(text);
                    return message.enough();
                }
            }
            Event::WarningPlace(file, column) => {
                if let Some(warning) = self.warnings.last_mut().filter(|_| self.warnings_omitted == 0) {
                    let mut path = String::new();
                    file.append_to(&mut path, MAX_PLACE);
                    warning.file = Some(on_one_line(&path)).filter(|path| !path.is_empty());
                    warning.column = column;
                }
            }
            Event::WarningForm(form) => {
                if let Some(warning) = self.warnings.last_mut().filter(|_| self.warnings_omitted == 0) {
                    warning.form = Some(name(form));
                }
            }
            Event::Value { again: false } if self.values.len() >= MAX_VALUES => self.values_left = 0,
            Event::Value { again } => {
                if again {
                    self.values.pop();
                    self.values_left = self.value_left;
                }
                self.value_left = self.values_left;
                self.values.push(Clipped::default());
            }
            Event::ValueText(text) => {
                if let Some(value) = self.values.last_mut() {
                    push_within(&mut self.values_left, &mut value.text, &mut value.omitted, text);
                }
            }
            Event::TimeReal(ms) => self.timing.get_or_insert_default().real_ms = ms,
            Event::TimeRun(ms) => self.timing.get_or_insert_default().run_ms = ms,
            Event::TimeGc(ms) => self.timing.get_or_insert_default().gc_ms = ms,
            Event::BytesConsed(bytes) => self.timing.get_or_insert_default().bytes_consed = bytes,
            Event::Error(kind) => {
                let before = self.error.replace(ErrorBuilder::new(name(kind), &self.limits));
                if self.superseded.len() < SUPERSEDED {
                    self.superseded.extend(before);
                }
            }
            Event::Defined(start, end_and_package) => {
                self.defined.extend(defining_form(&self.code, start, &end_and_package.to_owned()));
            }
            event @ (Event::Record(_) | Event::Field(..) | Event::FieldText(_)) => return self.records.event(event),
            other => return self.error.as_mut().is_some_and(|error| error_event(error, other, &self.limits)),
        }
        false
    }

    /// The last form that defined something.
    pub(super) fn last_defined(&self) -> Option<&DefiningForm> {
        self.defined.last()
    }

    /// What operations said so far of how far they are, in lines.
    #[cfg(feature = "mcp")]
    pub(super) fn progress(&self) -> String {
        self.records.progress()
    }

    /// Takes an event of an error that the code may handle. Returns as [`event`](Self::event) does.
    pub(super) fn signalled(&mut self, event: Event<'_>) -> bool {
        match event {
            // What print methods print.
            Event::Stdout(_) | Event::Stderr(_) => return self.event(event),
            Event::Error(kind) => {
                if let Some(signalled) = self.signalled.as_mut().filter(|signalled| signalled.len() < SIGNALLED) {
                    let error = ErrorBuilder::new(name(kind), &self.limits);
                    signalled.push(Some(ErrorBuilder { left: MAX_SIGNALLED, ..error }));
                }
            }
            event => {
                let error = self.signalled.as_mut().and_then(|signalled| signalled.last_mut()?.as_mut());
                return error.is_some_and(|error| error_event(error, event, &self.limits));
            }
        }
        false
    }

    /// Takes the errors that the code handled, in their order; `None` if they are not recorded.
    pub(super) fn take_signalled(&mut self) -> Option<Vec<Arc<ErrorRecord>>> {
        if self.errors_are_records {
            return None;
        }
        let signalled = self.signalled.as_mut().map(std::mem::take)?;
        let errors = signalled.into_iter().flatten();
        Some(errors.map(|error| Arc::new(error.finish(&self.code, 0))).collect())
    }

    /// Takes the errors that reached the debugger before the one that the evaluation ended with, in their order.
    pub(super) fn take_superseded(&mut self) -> Vec<Arc<ErrorRecord>> {
        let errors = std::mem::take(&mut self.superseded);
        // An interruption repeats itself until the evaluation ends.
        let last =
            self.error.as_ref().map(|error| error.kind.clone()).filter(|kind| INTERRUPTIONS.contains(&kind.as_str()));
        errors
            .into_iter()
            .filter(|error| last.as_ref() != Some(&error.kind))
            .map(|error| Arc::new(error.finish(&self.code, 0)))
            .collect()
    }

    /// All errors that reached the debugger, in their order, and what was printed.
    pub(super) fn unwound(mut self) -> (Vec<Arc<ErrorRecord>>, Clipped) {
        let printed = Clipped { text: self.printed_text(), omitted: self.omitted() };
        let mut errors = self.take_superseded();
        // Its time to unwind is over: that is no error.
        let last = self.error.take().filter(|error| !INTERRUPTIONS.contains(&error.kind.as_str()));
        errors.extend(last.map(|error| Arc::new(error.finish(&self.code, self.evaluation))));
        (errors, printed)
    }

    /// The outcome, once the job is over. `interrupted`: why it was, if it was.
    pub(super) fn finish(mut self, success: bool, interrupted: Option<Interrupt>) -> Outcome {
        let result = if success {
            Ok(self.values)
        } else {
            let mut error = self.error.take().unwrap_or_else(|| match interrupted {
                Some(Interrupt::Cancel) => ErrorBuilder::new("CANCELLED".to_owned(), &self.limits),
                Some(Interrupt::Heap) => ErrorBuilder::new("HEAP-EXHAUSTED".to_owned(), &self.limits),
                Some(Interrupt::Timeout) => ErrorBuilder::new("TIMEOUT".to_owned(), &self.limits),
                None => {
                    let mut error = ErrorBuilder::new("THREAD-TERMINATED".to_owned(), &self.limits);
                    error.message.text =
                        "The code ended the thread that evaluated it; a new one has taken its place.".to_owned();
                    error
                }
            });
            if error.message.text.trim().is_empty() && error.message.omitted == 0 {
                error.message.text = match (error.kind.as_str(), self.timeout) {
                    ("TIMEOUT", Some(timeout)) if interrupted.is_some() => timeout_message(timeout),
                    ("HEAP-EXHAUSTED", _) if interrupted.is_some() => {
                        "The heap was nearly used up, so the evaluation was stopped.".to_owned()
                    }
                    ("CANCELLED", _) if interrupted.is_some() => {
                        "The evaluation was cancelled; what it had done by then stays done.".to_owned()
                    }
                    _ => "(no message)".to_owned(),
                };
            }
            Err(Arc::new(error.finish(&self.code, self.evaluation)))
        };
        Outcome {
            evaluation: self.evaluation,
            kept: false,
            notices: Vec::new(),
            background: Clipped::default(),
            stdout: self.stdout,
            stderr: self.stderr,
            turns: self.turns,
            printed_before: self.printed_before,
            warnings: self
                .warnings
                .into_iter()
                .map(|warning| Warning {
                    kind: warning.kind,
                    message: warning.message.into(),
                    file: warning.file,
                    line: (warning.line > 0).then_some(warning.line),
                    column: (warning.column > 0).then_some(warning.column),
                    form: warning.form,
                })
                .collect(),
            warnings_omitted: self.warnings_omitted,
            result,
            timing: self.timing,
            held: false,
            defined: self.defined,
            records: self.records.records(),
            errors: if self.errors_are_records {
                let signalled = self.signalled.take().unwrap_or_default();
                signalled.into_iter().flatten().map(|error| Arc::new(error.finish(&self.code, 0))).collect()
            } else {
                Vec::new()
            },
        }
    }
}

/// The form of `code` that begins at character `start`; where it ends and its package are as Lisp tells them.
fn defining_form(code: &str, start: u64, end_and_package: &str) -> Option<DefiningForm> {
    let (end, package) = end_and_package.split_once(' ')?;
    let start = usize::try_from(start).ok()?;
    let end: usize = end.parse().ok()?;
    let code = code.chars().skip(start).take(end.checked_sub(start)?).collect();
    Some(DefiningForm { code, package: package.to_owned() })
}

fn timeout_message(timeout: Duration) -> String {
    let seconds = timeout.as_secs_f64();
    format!(
        "The evaluation did not finish within its time limit of {seconds} second{} and was interrupted. What it had \
         done by then stays done. For more time, pass a larger `timeout`, or raise the default with configure-limits.",
        if timeout == Duration::from_secs(1) { "" } else { "s" }
    )
}

/// Takes what belongs to an error. True when no more of the text begun last is kept.
fn error_event(error: &mut ErrorBuilder, event: Event<'_>, limits: &Limits) -> bool {
    match event {
        Event::ErrorText { text, again } => {
            if again {
                error.message = ClippedBuffer::new(limits.max_message);
            }
            error.message.push(text);
            return error.message.enough();
        }
        Event::Restart(number, name) => {
            if let Some(name) = error.part(error.restarts.len(), name) {
                error.restarts.push((number, name, ClippedBuffer::new(limits.max_frame)));
            }
        }
        Event::RestartText(text) => {
            if let Some((.., description)) = error.restarts.last_mut().filter(|_| !error.skips) {
                push_bounded(&mut error.left, description, text);
                return description.enough();
            }
        }
        Event::Frames(total) => error.total_frames = total,
        Event::Form(number, start) => {
            error.form = start.to_owned().parse().ok().map(|start| (number, start));
        }
        Event::Slot(name) => match error.part(error.slots.len(), name) {
            Some(name) => error.slots.push((name, ClippedBuffer::new(limits.max_frame))),
            None => error.slots_omitted += 1,
        },
        Event::SlotText(text) => {
            if let Some((_, value)) = error.slots.last_mut().filter(|_| !error.skips) {
                push_bounded(&mut error.left, value, text);
                return value.enough();
            }
        }
        Event::Frame(number) => error.frames.push(FrameBuilder {
            number,
            call: ClippedBuffer::new(limits.max_frame),
            source: None,
            code: None,
            machinery: None,
            locals: Vec::new(),
        }),
        Event::FrameCode(text) => {
            if let Some(frame) = error.frames.last_mut() {
                frame.code = Some(name(text));
            }
        }
        Event::FrameMachinery(text) => {
            if let Some(frame) = error.frames.last_mut() {
                frame.machinery = Some(name(text));
            }
        }
        Event::FrameText(text) => {
            if let Some(frame) = error.frames.last_mut() {
                push_bounded(&mut error.left, &mut frame.call, text);
                return frame.call.enough();
            }
        }
        Event::FrameSource(place, line) => {
            if let Some(frame) = error.frames.last_mut() {
                let mut path = String::new();
                place.append_to(&mut path, MAX_PLACE);
                let place = path;
                frame.source = Some(match line {
                    0 => place,
                    _ if place.starts_with("evaluation ") => format!("{place}, line {line}"),
                    _ => format!("{place}:{line}"),
                });
            }
        }
        Event::Local(name, validity) => {
            let so_many = error.frames.last().map_or(MAX_PARTS, |frame| frame.locals.len());
            if let (Some(name), Some(frame)) = (error.part(so_many, name), error.frames.last_mut()) {
                frame.locals.push((name, validity, ClippedBuffer::new(MAX_LOCAL)));
            }
        }
        Event::LocalText(text) => {
            let local = error.frames.last_mut().filter(|_| !error.skips).and_then(|frame| frame.locals.last_mut());
            if let Some((.., value)) = local {
                push_bounded(&mut error.left, value, text);
                return value.enough();
            }
        }
        _ => {}
    }
    false
}

/// An inspection's answer as it comes in.
#[derive(Debug, Default)]
pub(super) struct InspectionBuilder {
    items: Vec<(Item, String, ClippedBuffer)>,
    locals: Vec<(String, u64, ClippedBuffer)>,
    error: Option<(String, String)>,
}

/// Characters of one item.
const MAX_ITEM: u64 = 10_000;

/// Characters of a definition in a list of them; of a variable, those of its value.
const MAX_DEFINITION: u64 = 1_000;
const MAX_VARIABLE: u64 = 200;

/// How much of an item is kept.
fn item_limit(kind: Item) -> u64 {
    match kind {
        Item::Variable => MAX_VARIABLE,
        Item::Function | Item::Macro | Item::Class => MAX_DEFINITION,
        _ => MAX_ITEM,
    }
}

impl InspectionBuilder {
    /// Takes an event. True when no more of the text begun last is kept.
    pub(super) fn event(&mut self, event: Event<'_>) -> bool {
        match event {
            Event::Item(kind, label) => {
                self.items.push((kind, label.to_owned(), ClippedBuffer::new(item_limit(kind))));
            }
            Event::ItemText(text) => {
                if let Some((_, _, item)) = self.items.last_mut() {
                    item.push(text);
                    return item.enough();
                }
            }
            Event::Local(name, validity) => {
                self.locals.push((name.to_owned(), validity, ClippedBuffer::new(MAX_ITEM)));
            }
            Event::LocalText(text) => {
                if let Some((.., value)) = self.locals.last_mut() {
                    value.push(text);
                    return value.enough();
                }
            }
            Event::Error(kind) => self.error = Some((kind.to_owned(), String::new())),
            Event::ErrorText { text, again } => {
                if let Some((_, message)) = &mut self.error {
                    if again {
                        message.clear();
                    }
                    text.append_to(message, 10_000_usize.saturating_sub(message.len()));
                }
            }
            _ => {}
        }
        false
    }

    fn check(self, success: bool, interrupted: Option<Interrupt>) -> Result<Vec<(Item, String, String)>, InspectError> {
        if !success {
            return Err(match (self.error, interrupted) {
                (_, Some(_)) | (None, _) => InspectError::Timeout(super::INSPECTION_TIMEOUT.as_secs()),
                (Some((kind, message)), None) => InspectError::Lisp { kind, message },
            });
        }
        Ok(self
            .items
            .into_iter()
            .map(|(kind, label, text)| {
                let clipped = Clipped::from(text);
                let mut text = clipped.text;
                if clipped.omitted > 0 {
                    text.push_str(&crate::report::omission(clipped.omitted));
                }
                (kind, label, text)
            })
            .collect())
    }

    /// The answer of list-definitions, sorted.
    pub(super) fn definitions(
        self,
        success: bool,
        interrupted: Option<Interrupt>,
    ) -> Result<Definitions, InspectError> {
        let mut more = 0;
        let mut shown: Vec<_> = self
            .check(success, interrupted)?
            .into_iter()
            .filter_map(|(item, label, text)| {
                let kind = match item {
                    Item::Function => DefinitionKind::Function,
                    Item::Variable => DefinitionKind::Variable,
                    Item::Macro => DefinitionKind::Macro,
                    Item::Class => DefinitionKind::Class,
                    Item::Package => DefinitionKind::Package,
                    Item::System => DefinitionKind::System,
                    Item::More => {
                        more = label.parse().unwrap_or(0);
                        return None;
                    }
                    Item::Role | Item::Detail | Item::NotFound => return None,
                };
                Some(Definition { kind, text: on_one_line(&(label + &text)) })
            })
            .collect();
        shown.sort_by(|a, b| (a.kind, &a.text).cmp(&(b.kind, &b.text)));
        shown.dedup();
        Ok(Definitions { shown, more })
    }

    /// The answer of describe-symbol.
    pub(super) fn symbol(
        self,
        success: bool,
        interrupted: Option<Interrupt>,
    ) -> Result<SymbolDescription, InspectError> {
        let mut roles: Vec<Role> = Vec::new();
        for (item, label, text) in self.check(success, interrupted)? {
            match item {
                Item::NotFound => return Ok(SymbolDescription::NotFound(text)),
                Item::Role => roles.push(Role { title: text, details: Vec::new() }),
                Item::Detail if !label.is_empty() => {
                    if let Some(role) = roles.last_mut() {
                        role.details.push((label, text));
                    }
                }
                _ => {}
            }
        }
        Ok(SymbolDescription::Found(roles))
    }

    /// The answer of frame-locals.
    pub(super) fn locals(self) -> Vec<Local> {
        self.locals.into_iter().map(local).collect()
    }

    /// The answer of reset-session.
    pub(super) fn reset(self, success: bool, interrupted: Option<Interrupt>) -> Result<(), InspectError> {
        self.check(success, interrupted).map(drop)
    }
}
