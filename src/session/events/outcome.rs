//! An outcome as it comes in.

use std::sync::Arc;
use std::time::Duration;

use super::JobEnd;
use super::error::{ErrorBuilder, Unbalanced};
use super::text::{ClippedBuffer, MAX_PLACE, beginning, name, on_one_line, push_within};
use crate::config::Limits;
use crate::image::{Event, Interrupt, Text};
use crate::interruption::Stuck;
use crate::listed;
use crate::outcome::{Changes, Clipped, DefiningForm, ErrorRecord, FormRole, Outcome, Timing, Warning, interleaved};
use crate::result_kind::{CANCELLED, HEAP_EXHAUSTED, THREAD_TERMINATED, TIMEOUT};
use crate::session::operation::RecordsBuilder;

/// Notices of an evaluation in the background, and characters of one.
const MAX_NOTICES: usize = 100;
const MAX_NOTICE: usize = 2_000;
/// Values of an evaluation.
const MAX_VALUES: usize = 1_000;

/// How many errors are kept that the code handles, should there be more than Lisp records.
const SIGNALLED: usize = 100;

/// How many errors are kept that others came after in the same evaluation.
const SUPERSEDED: usize = 10;

/// The kinds of error that an interruption is.
const INTERRUPTIONS: [&str; 3] = [TIMEOUT, CANCELLED, HEAP_EXHAUSTED];

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

/// An outcome as it comes in.
#[derive(Debug, Default)]
pub(crate) struct OutcomeBuilder {
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
    code: Arc<str>,
    evaluation: u64,
    /// What it does that has a time limit of its own.
    step: Option<String>,
    defined: Vec<DefiningForm>,
    /// The last form that defined something, whether it failed then or not, and its changes.
    last_defined: Option<(DefiningForm, Changes)>,
    notices: Vec<String>,
    records: RecordsBuilder,
}

impl OutcomeBuilder {
    /// For evaluation number `evaluation`, of `code` under `limits`, with a time limit of its own.
    pub(crate) fn new(evaluation: u64, code: Arc<str>, limits: Limits, timeout: Option<Duration>) -> Self {
        Self {
            code,
            evaluation,
            limits,
            timeout,
            output_left: limits.max_output,
            values_left: limits.max_value,
            value_left: limits.max_value,
            ..Self::default()
        }
    }

    /// For an evaluation of which nothing is known but its number.
    pub(crate) fn blank(evaluation: u64) -> Self {
        Self::new(evaluation, Arc::default(), Limits::default(), None)
    }

    /// Keeps the errors that the code handles, too.
    pub(crate) fn record_errors(&mut self) {
        self.signalled.get_or_insert_default();
    }

    /// Keeps them for the records, which name them by their index.
    pub(crate) fn errors_are_records(&mut self) {
        self.record_errors();
        self.errors_are_records = true;
    }

    /// An empty one for what this evaluation comes to when it goes on.
    pub(crate) fn anew(&self) -> Self {
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
    pub(crate) fn evaluation(&self) -> u64 {
        self.evaluation
    }

    /// How many characters of what was printed so far are kept.
    pub(crate) fn printed(&self) -> u64 {
        self.turns.iter().copied().map(u64::from).sum()
    }

    /// What it comes to is told of no evaluation: it belongs to the debugger.
    pub(crate) fn detach(&mut self) {
        (self.evaluation, self.printed_before) = (0, 0);
    }

    /// How many characters that were printed are not.
    pub(crate) fn omitted(&self) -> u64 {
        self.stdout.omitted + self.stderr.omitted
    }

    /// What was printed so far, as far as it is kept, in its order.
    pub(crate) fn printed_text(&self) -> String {
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
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// What was printed so far, as far as it is kept.
    pub(crate) fn stdout(&self) -> &str {
        &self.stdout.text
    }

    /// Takes an event. True when no more of the text begun last is kept.
    pub(crate) fn event(&mut self, event: Event<'_>) -> bool {
        match event {
            Event::Step(step, _) => self.step = (step.len() > 0).then(|| step.to_owned()),
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
                    let path = on_one_line(&beginning(file, MAX_PLACE));
                    warning.file = Some(path).filter(|path| !path.is_empty());
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
            Event::Error { kind, interrupts } => {
                let mut before = self.error.replace(ErrorBuilder::new(name(kind), &self.limits));
                before.iter_mut().for_each(|error| error.is_interrupted = interrupts);
                if self.superseded.len() < SUPERSEDED {
                    self.superseded.extend(before);
                }
            }
            Event::Notice(text) => {
                if self.notices.len() < MAX_NOTICES {
                    // Names of the user's stand in it.
                    self.notices.push(on_one_line(&beginning(text, MAX_NOTICE)));
                }
            }
            Event::Defined(start, description) => {
                self.last_defined = defining_form(&self.code, start, &description.to_owned());
                let defined = self.last_defined.iter().filter(|(_, changes)| changes.role != FormRole::Failed);
                self.defined.extend(defined.map(|(form, _)| form.clone()));
            }
            event @ Event::Record(_) => {
                let enough = self.records.event(event);
                if let Some(system) = self.records.begun_system() {
                    system.printed = self.turns.iter().copied().map(u64::from).sum();
                }
                return enough;
            }
            event @ (Event::Field(..) | Event::FieldText(_)) => return self.records.event(event),
            other => return self.error.as_mut().is_some_and(|error| error.event(other, &self.limits)),
        }
        false
    }

    /// Has it end with an error of Lisp's making that Lisp could not tell of itself.
    pub(crate) fn fail(&mut self, kind: &str, message: Text<'_>) {
        let mut error = ErrorBuilder::new(kind.to_owned(), &self.limits);
        error.event(Event::ErrorText { text: message, again: false }, &self.limits);
        self.error = Some(error);
    }

    /// What there is of it, while it goes on in the background.
    pub(crate) fn so_far(&self) -> Outcome {
        let mut builder = Self::new(self.evaluation, Arc::default(), self.limits, None);
        (builder.stdout, builder.stderr) = (self.stdout.clone(), self.stderr.clone());
        (builder.turns, builder.printed_before) = (self.turns.clone(), self.printed_before);
        Outcome { kept: true, in_background: true, ..builder.finish(JobEnd::Succeeded) }
    }

    /// The last form that defined something, whether it failed then or not, and its changes.
    pub(crate) fn last_defined(&self) -> Option<&(DefiningForm, Changes)> {
        self.last_defined.as_ref()
    }

    /// What operations said so far of how far they are, in lines.
    pub(crate) fn progress(&self) -> String {
        self.records.progress()
    }

    /// Takes an event of an error that the code may handle. Returns as [`event`](Self::event) does.
    pub(crate) fn signalled(&mut self, event: Event<'_>) -> bool {
        match event {
            // What print methods print.
            Event::Stdout(_) | Event::Stderr(_) => return self.event(event),
            Event::Error { kind, .. } => {
                if let Some(signalled) = self.signalled.as_mut().filter(|signalled| signalled.len() < SIGNALLED) {
                    signalled.push(Some(ErrorBuilder::signalled(name(kind), &self.limits)));
                }
            }
            event => {
                let error = self.signalled.as_mut().and_then(|signalled| signalled.last_mut()?.as_mut());
                return error.is_some_and(|error| error.event(event, &self.limits));
            }
        }
        false
    }

    /// Takes the errors that the code handled, in their order; `None` if they are not recorded, or are the records'.
    pub(crate) fn take_signalled(&mut self) -> Option<Vec<Arc<ErrorRecord>>> {
        if self.errors_are_records { None } else { self.signalled_errors() }
    }

    fn signalled_errors(&mut self) -> Option<Vec<Arc<ErrorRecord>>> {
        let signalled = self.signalled.as_mut().map(std::mem::take)?;
        let errors = signalled.into_iter().flatten();
        Some(errors.map(|error| Arc::new(error.finish(None, &self.code, 0))).collect())
    }

    /// Takes the errors that reached the debugger before the one that the evaluation ended with, in their order, each with
    /// whether the evaluation was interrupted while the error was being described.
    pub(crate) fn take_superseded(&mut self) -> Vec<(Arc<ErrorRecord>, bool)> {
        let errors = std::mem::take(&mut self.superseded);
        // An interruption repeats itself until the evaluation ends.
        let last =
            self.error.as_ref().map(|error| error.kind.clone()).filter(|kind| INTERRUPTIONS.contains(&kind.as_str()));
        errors
            .into_iter()
            .filter(|error| last.as_ref() != Some(&error.kind))
            .map(|error| (error.is_interrupted, error))
            .map(|(is_interrupted, error)| (Arc::new(error.finish(None, &self.code, 0)), is_interrupted))
            .collect()
    }

    /// All errors that reached the debugger, in their order, and what was printed.
    pub(crate) fn unwound(mut self) -> (Vec<Arc<ErrorRecord>>, Clipped) {
        let printed = Clipped { text: self.printed_text(), omitted: self.omitted() };
        let mut errors: Vec<_> = self.take_superseded().into_iter().map(|(error, _)| error).collect();
        // Its time to unwind is over: that is no error.
        let last = self.error.take().filter(|error| !INTERRUPTIONS.contains(&error.kind.as_str()));
        errors.extend(last.map(|error| Arc::new(error.finish(None, &self.code, self.evaluation))));
        (errors, printed)
    }

    /// Adds the texts that were found unbalanced by the errors so far, each once.
    pub(crate) fn unbalanced(&self, texts: &mut Vec<Unbalanced>) {
        let signalled = self.signalled.iter().flatten().flatten();
        for text in self.error.iter().chain(&self.superseded).chain(signalled).filter_map(|e| e.unbalanced(&self.code))
        {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
    }

    /// Adds the hints to the errors that are about these texts.
    pub(crate) fn add_hints(&mut self, hints: &[(Unbalanced, String)]) {
        let signalled = self.signalled.iter_mut().flatten().flatten();
        for error in self.error.iter_mut().chain(&mut self.superseded).chain(signalled) {
            let text = error.unbalanced(&self.code);
            if let Some((_, hint)) = hints.iter().find(|(about, _)| Some(about) == text.as_ref()) {
                error.add_hint(hint);
            }
        }
    }

    /// The outcome, when it ended with an error that Lisp knows nothing of.
    pub(crate) fn failed(self, kind: &str, message: String) -> Outcome {
        let error = ErrorBuilder::new(kind.to_owned(), &self.limits).finish(Some(message), &self.code, self.evaluation);
        Outcome { result: Err(Arc::new(error)), ..self.finish(JobEnd::Failed) }
    }

    /// The outcome, once the job is over.
    pub(crate) fn finish(mut self, end: JobEnd) -> Outcome {
        let errors = if self.errors_are_records { self.signalled_errors().unwrap_or_default() } else { Vec::new() };
        let result = match end {
            JobEnd::Succeeded => Ok(self.values),
            _ => {
                // An abandoned evaluation may have told only the half of an error.
                let error = self.error.take().filter(|_| !matches!(end, JobEnd::Abandoned(_)));
                let error = error.unwrap_or_else(|| ErrorBuilder::new(kind_of(end).to_owned(), &self.limits));
                let message = || message_of(&error.kind, end, self.timeout, self.step.as_deref());
                let message = error.is_silent().then(message);
                Err(Arc::new(error.finish(message, &self.code, self.evaluation)))
            }
        };
        Outcome {
            evaluation: self.evaluation,
            kept: false,
            in_background: false,
            notices: self.notices,
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
            errors,
        }
    }
}

/// The form of `code` that begins at character `start`, and what it changed. Lisp describes it in lines: where it ends, its
/// [changes](Changes::parse), and, after an `@`, the name of its package, which may have lines of its own.
fn defining_form(code: &str, start: u64, description: &str) -> Option<(DefiningForm, Changes)> {
    let (lines, package) = description.split_once("\n@")?;
    let mut lines = lines.lines();
    let start = usize::try_from(start).ok()?;
    let end: usize = lines.next()?.parse().ok()?;
    let code = code.chars().skip(start).take(end.checked_sub(start)?).collect();
    Some((DefiningForm { code, package: package.to_owned() }, Changes::parse(lines)))
}

/// The kind of an error that Lisp has said nothing of.
fn kind_of(end: JobEnd) -> &'static str {
    match end {
        JobEnd::Interrupted(Interrupt::Timeout) | JobEnd::Abandoned(Interrupt::Timeout) => TIMEOUT,
        JobEnd::Interrupted(Interrupt::Heap) | JobEnd::Abandoned(Interrupt::Heap) => HEAP_EXHAUSTED,
        JobEnd::Interrupted(Interrupt::Cancel) | JobEnd::Abandoned(Interrupt::Cancel) | JobEnd::Withdrawn => CANCELLED,
        JobEnd::Succeeded | JobEnd::Failed => THREAD_TERMINATED,
    }
}

/// What is said of an error of this kind that has no message.
fn message_of(kind: &str, end: JobEnd, timeout: Option<Duration>, step: Option<&str>) -> String {
    match (kind, end, timeout) {
        (_, JobEnd::Abandoned(reason), _) => abandoned_message(reason, timeout),
        (TIMEOUT, JobEnd::Interrupted(_), Some(timeout)) => timeout_message(timeout),
        (TIMEOUT, JobEnd::Interrupted(_), None) => {
            format!("The time limit of {} has passed.", step.unwrap_or("it"))
        }
        (HEAP_EXHAUSTED, JobEnd::Interrupted(_), _) => {
            "The heap was nearly used up, so the evaluation was stopped.".to_owned()
        }
        (CANCELLED, JobEnd::Interrupted(_) | JobEnd::Withdrawn, _) => {
            "The evaluation was cancelled; what it had done by then stays done.".to_owned()
        }
        (THREAD_TERMINATED, JobEnd::Failed, _) => {
            "The code ended the thread that evaluated it; a new one has taken its place.".to_owned()
        }
        _ => "(no message)".to_owned(),
    }
}

/// The message of an evaluation that was abandoned.
fn abandoned_message(reason: Interrupt, timeout: Option<Duration>) -> String {
    let what = match (reason, timeout) {
        (Interrupt::Timeout, Some(timeout)) => out_of_time(timeout),
        (Interrupt::Timeout, None) => "The evaluation did not finish within its time limit".to_owned(),
        (Interrupt::Cancel, _) => "The evaluation was cancelled".to_owned(),
        (Interrupt::Heap, _) => "The heap was nearly used up, so the evaluation was interrupted".to_owned(),
    };
    format!(
        "{what}, and {}. Its thread was abandoned: it may still run, and change things, until it ends by itself.",
        Stuck::Unmoved.verb()
    )
}

fn timeout_message(timeout: Duration) -> String {
    format!(
        "{} and was interrupted. What it had done by then stays done. For more time, pass a larger `timeout`{}.",
        out_of_time(timeout),
        listed::with(&["configure-limits"], ", or raise the default with configure-limits")
    )
}

/// The beginning of a sentence about an evaluation whose time is up.
fn out_of_time(timeout: Duration) -> String {
    let seconds = timeout.as_secs_f64();
    let plural = if timeout == Duration::from_secs(1) { "" } else { "s" };
    format!("The evaluation did not finish within its time limit of {seconds} second{plural}")
}
