//! The outcome builder, which makes an evaluation's outcome from events.

use std::sync::Arc;
use std::time::Duration;

use super::JobEnd;
use super::code::{Code, TextPosition};
use super::error::{ErrorBuilder, UnbalancedText};
use super::printed::{Printed, PrintedText};
use super::text::{
    ClippedBuffer, MAX_LOCATION, clip_line, clip_name, clip_notice, escape_line_breaks, first_chars, push_within_chars,
};
use crate::audience::Audience;
use crate::config::Limits;
use crate::image::interruption::StuckReason;
use crate::image::{Event, InterruptReason, Text};
use crate::outcome::{Changes, Clipped, DefiningForm, ErrorRecord, FormRole, Outcome, Timing, Warning};
use crate::result_kind::{CANCELLED, HEAP_EXHAUSTED, THREAD_TERMINATED, TIMEOUT};
use crate::session::operation::RecordsBuilder;
use crate::tool_names;

/// The maximum number of notices of a background evaluation.
const MAX_NOTICES: usize = 100;
/// The maximum number of values that are recorded of an evaluation.
const MAX_VALUES: usize = 1_000;

/// The maximum number of recorded errors that the code handles. Lisp's own limit is lower.
const MAX_SIGNALLED: usize = 100;

/// The maximum number of recorded errors before the final error of an evaluation.
const MAX_SUPERSEDED: usize = 10;

/// The phrase for a step whose name is unknown.
const UNKNOWN_STEP: &str = "the current step";

/// The kinds of the errors that report interruptions.
const INTERRUPTION_KINDS: [&str; 3] = [TIMEOUT, CANCELLED, HEAP_EXHAUSTED];

/// A builder that makes the record of a warning. A line or column that is not known is 0.
#[derive(Debug)]
struct WarningBuilder {
    kind: String,
    message: ClippedBuffer,
    file: Option<String>,
    line: u64,
    column: u64,
    form: Option<String>,
}

/// A builder that makes an evaluation's outcome from events.
#[derive(Debug, Default)]
pub(crate) struct OutcomeBuilder {
    limits: Limits,
    timeout: Option<Duration>,
    /// The audience of the messages about the evaluation.
    audience: Audience,
    printed: Arc<Printed>,
    /// The number of printed characters that were kept before this evaluation was held and resumed.
    printed_before: u64,
    warnings: Vec<WarningBuilder>,
    warnings_omitted: u64,
    values: Vec<Clipped>,
    values_left: u64,
    /// The number `values_left` as it was before the last value was added. The number is restored if Lisp prints the last
    /// value again.
    values_left_before: u64,
    error: Option<ErrorBuilder>,
    /// The errors that reached the debugger before `error`, for instance because a cleanup form failed while the
    /// evaluation was unwinding.
    superseded: Vec<ErrorBuilder>,
    /// The signalled errors, in order. An entry becomes `None` when Lisp reports that no handler handled the error. The
    /// list is `None` if signalled errors are not recorded.
    signalled: Option<Vec<Option<ErrorBuilder>>>,
    /// The number of signalled errors before this evaluation was held and resumed.
    signalled_before: usize,
    /// True if the records refer to the signalled errors.
    records_refer_to_errors: bool,
    timing: Option<Timing>,
    code: Code,
    evaluation: u64,
    /// True if the evaluation was held and resumed.
    is_resumed: bool,
    /// The description of the current step, such as `the test FOO`, if the step has a time limit of its own.
    step: Option<String>,
    defined: Vec<DefiningForm>,
    notices: Vec<String>,
    records: RecordsBuilder,
}

impl OutcomeBuilder {
    /// Creates the builder for evaluation number `evaluation` of `code`.
    pub(crate) fn new(evaluation: u64, code: Arc<str>, limits: Limits, timeout: Option<Duration>) -> Self {
        Self {
            code: Code::new(code),
            evaluation,
            limits,
            timeout,
            printed: Arc::new(Printed::new(limits.max_output)),
            values_left: limits.max_value,
            values_left_before: limits.max_value,
            ..Self::default()
        }
    }

    /// Creates a builder for an evaluation of which only the number is known.
    pub(crate) fn blank(evaluation: u64) -> Self {
        Self::new(evaluation, Arc::default(), Limits::default(), None)
    }

    /// Sets the audience of the messages about the evaluation: an agent by default.
    pub(crate) fn set_audience(&mut self, audience: Audience) {
        self.audience = audience;
    }

    /// Makes the builder also record the errors that the code handles.
    pub(crate) fn record_errors(&mut self) {
        self.signalled.get_or_insert_default();
    }

    /// Makes the builder also record the errors that the code handles, to which the outcome's records refer by index.
    pub(crate) fn record_referenced_errors(&mut self) {
        self.record_errors();
        self.records_refer_to_errors = true;
    }

    /// Creates an empty builder for the resumption of this evaluation.
    pub(crate) fn resumption_builder(&self) -> Self {
        let mut builder = Self::new(self.evaluation, self.code.text().clone(), self.limits, self.timeout);
        builder.audience = self.audience;
        builder.is_resumed = true;
        builder.printed = Arc::new(Printed::new(self.printed.left()));
        builder.printed_before = self.printed_before + self.printed_chars();
        if let Some(signalled) = &self.signalled {
            builder.record_errors();
            builder.signalled_before = self.signalled_before + signalled.len();
        }
        builder
    }

    /// Returns the evaluation's number; 0 for none.
    pub(crate) fn evaluation(&self) -> u64 {
        self.evaluation
    }

    /// Returns the number of printed characters that are kept so far.
    pub(crate) fn printed_chars(&self) -> u64 {
        self.printed.kept()
    }

    /// Clears the evaluation's number, for the outcome of a debugger operation, which is not the evaluation's own outcome.
    pub(crate) fn clear_evaluation(&mut self) {
        (self.evaluation, self.printed_before) = (0, 0);
    }

    /// Returns the evaluation's output, to which threads print while the evaluation runs.
    pub(crate) fn printed(&self) -> &Arc<Printed> {
        &self.printed
    }

    /// Moves the output to a new [`Printed`], so that threads that print must find their output again.
    pub(crate) fn renew_printed(&mut self) {
        self.printed = Arc::new(self.printed.moved());
    }

    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Handles an event. Returns true if Lisp may stop printing the text begun last.
    pub(crate) fn handle_event(&mut self, event: Event<'_>) -> bool {
        match event {
            Event::Step(step, _) => self.step = (step.len() > 0).then(|| clip_line(step, MAX_LOCATION)),
            Event::Unhandled(number) => {
                let known = usize::try_from(number).ok().and_then(|number| number.checked_sub(self.signalled_before));
                if let (Some(signalled), Some(known)) = (&mut self.signalled, known)
                    && let Some(error) = signalled.get_mut(known)
                {
                    *error = None;
                }
            }
            Event::Warning(kind, line) => {
                if (self.warnings.len() as u64) < self.limits.max_warnings && self.warnings_omitted == 0 {
                    self.warnings.push(WarningBuilder {
                        kind: clip_name(kind),
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
            Event::WarningText { text, replaces } => {
                if self.warnings_omitted > 0 {
                    return true;
                }
                if let Some(WarningBuilder { message, .. }) = self.warnings.last_mut() {
                    if replaces {
                        *message = ClippedBuffer::new(self.limits.max_message);
                    }
                    message.push(text);
                    return message.has_enough();
                }
            }
            Event::WarningPlace(file, column) => {
                if let Some(warning) = self.warnings.last_mut().filter(|_| self.warnings_omitted == 0) {
                    let path = escape_line_breaks(&first_chars(file, MAX_LOCATION));
                    warning.file = Some(path).filter(|path| !path.is_empty());
                    warning.column = column;
                }
            }
            Event::WarningForm(form) => {
                if let Some(warning) = self.warnings.last_mut().filter(|_| self.warnings_omitted == 0) {
                    warning.form = Some(clip_name(form));
                }
            }
            Event::Value { replaces: false } if self.values.len() >= MAX_VALUES => self.values_left = 0,
            Event::Value { replaces } => {
                if replaces {
                    self.values.pop();
                    self.values_left = self.values_left_before;
                }
                self.values_left_before = self.values_left;
                self.values.push(Clipped::default());
            }
            Event::ValueText(text) => {
                if let Some(value) = self.values.last_mut() {
                    push_within_chars(&mut self.values_left, &mut value.text, &mut value.omitted, text);
                }
            }
            Event::TimeReal(ms) => self.timing.get_or_insert_default().real_ms = ms,
            Event::TimeRun(ms) => self.timing.get_or_insert_default().run_ms = ms,
            Event::TimeGc(ms) => self.timing.get_or_insert_default().gc_ms = ms,
            Event::BytesConsed(bytes) => self.timing.get_or_insert_default().bytes_consed = bytes,
            Event::Error { kind, interrupts } => {
                let mut before = self.error.replace(ErrorBuilder::new(clip_name(kind), &self.limits));
                before.iter_mut().for_each(|error| error.is_interrupted = interrupts);
                if self.superseded.len() < MAX_SUPERSEDED {
                    self.superseded.extend(before);
                }
            }
            Event::Notice(text) => {
                if self.notices.len() < MAX_NOTICES {
                    self.notices.push(clip_notice(text));
                }
            }
            event @ Event::Record(_) => {
                let enough = self.records.handle_event(event);
                let printed = self.printed_chars();
                if let Some(system) = self.records.last_system() {
                    system.printed = printed;
                }
                return enough;
            }
            event @ (Event::Field(..) | Event::FieldText(_)) => return self.records.handle_event(event),
            other => return self.error.as_mut().is_some_and(|error| error.handle_event(other, &self.limits)),
        }
        false
    }

    /// Makes the evaluation end with an error that Lisp could not report.
    pub(crate) fn fail(&mut self, kind: &str, message: Text<'_>) {
        let mut error = ErrorBuilder::new(kind.to_owned(), &self.limits);
        error.handle_event(Event::ErrorText { text: message, replaces: false }, &self.limits);
        self.error = Some(error);
    }

    /// Returns an outcome without output, marked as the outcome of an evaluation in the background.
    pub(crate) fn outcome_so_far(&self) -> Outcome {
        let mut builder = Self::new(self.evaluation, Arc::default(), self.limits, None);
        builder.printed_before = self.printed_before;
        Outcome { kept: true, in_background: true, ..builder.finish(JobEnd::Succeeded) }
    }

    pub(crate) fn code(&self) -> &Code {
        &self.code
    }

    /// Adds a form that has defined something, unless it failed afterwards. `code` is the copy of the code in which
    /// [`defining_form`] found the form.
    pub(crate) fn add_defined(&mut self, code: Code, form: DefiningForm, changes: &Changes) {
        self.code = code;
        if changes.role != FormRole::Failed {
            self.defined.push(form);
        }
    }

    /// Returns the progress messages of operations so far, one per line.
    pub(crate) fn progress(&self) -> String {
        self.records.progress()
    }

    /// Handles an event about an error that the code may handle. Returns true if Lisp may stop printing the text begun
    /// last.
    pub(crate) fn handle_signalled_event(&mut self, event: Event<'_>) -> bool {
        match event {
            Event::Error { kind, .. } => {
                if let Some(signalled) = self.signalled.as_mut().filter(|signalled| signalled.len() < MAX_SIGNALLED) {
                    signalled.push(Some(ErrorBuilder::signalled(clip_name(kind), &self.limits)));
                }
            }
            event => {
                let error = self.signalled.as_mut().and_then(|signalled| signalled.last_mut()?.as_mut());
                return error.is_some_and(|error| error.handle_event(event, &self.limits));
            }
        }
        false
    }

    /// Takes the errors that the code handled, in order; `None` if they are not recorded, or the records refer to them.
    pub(crate) fn take_signalled(&mut self) -> Option<Vec<Arc<ErrorRecord>>> {
        if self.records_refer_to_errors { None } else { self.signalled_errors() }
    }

    fn signalled_errors(&mut self) -> Option<Vec<Arc<ErrorRecord>>> {
        let signalled = self.signalled.as_mut().map(std::mem::take)?;
        let errors = signalled.into_iter().flatten();
        Some(errors.map(|error| Arc::new(error.finish(None, &self.code, 0))).collect())
    }

    /// Takes the errors that reached the debugger before the final error, in order, each with a flag: true if the
    /// evaluation was interrupted while the error was being described.
    pub(crate) fn take_superseded(&mut self) -> Vec<(Arc<ErrorRecord>, bool)> {
        let errors = std::mem::take(&mut self.superseded);
        // An interruption is repeated until the evaluation ends, and each repetition reports an error. Only the last
        // of these errors counts.
        let last = self
            .error
            .as_ref()
            .map(|error| error.kind.clone())
            .filter(|kind| INTERRUPTION_KINDS.contains(&kind.as_str()));
        errors
            .into_iter()
            .filter(|error| last.as_ref() != Some(&error.kind))
            .map(|error| (error.is_interrupted, error))
            .map(|(is_interrupted, error)| (Arc::new(error.finish(None, &self.code, 0)), is_interrupted))
            .collect()
    }

    /// Takes the notices so far, in order.
    pub(crate) fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Returns the errors that reached the debugger, in order, and the output. A final error that reports an
    /// interruption is left out.
    pub(crate) fn into_errors_and_output(mut self) -> (Vec<Arc<ErrorRecord>>, Clipped) {
        let printed = self.printed.take().interleaved();
        let mut errors: Vec<_> = self.take_superseded().into_iter().map(|(error, _)| error).collect();
        // An interruption at the end of the grace period is not an error.
        let last = self.error.take().filter(|error| !INTERRUPTION_KINDS.contains(&error.kind.as_str()));
        errors.extend(last.map(|error| Arc::new(error.finish(None, &self.code, self.evaluation))));
        (errors, printed)
    }

    /// Adds to `texts` each text that the errors so far report as unbalanced, unless `texts` already has it.
    pub(crate) fn collect_unbalanced_texts(&self, texts: &mut Vec<UnbalancedText>) {
        let signalled = self.signalled.iter().flatten().flatten();
        for text in
            self.error.iter().chain(&self.superseded).chain(signalled).filter_map(|e| e.unbalanced_text(&self.code))
        {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
    }

    /// Adds each hint to all errors that report the hint's text as unbalanced.
    pub(crate) fn add_hints(&mut self, hints: &[(UnbalancedText, String)]) {
        let signalled = self.signalled.iter_mut().flatten().flatten();
        for error in self.error.iter_mut().chain(&mut self.superseded).chain(signalled) {
            let text = error.unbalanced_text(&self.code);
            if let Some((_, hint)) = hints.iter().find(|(about, _)| Some(about) == text.as_ref()) {
                error.add_hint(hint);
            }
        }
    }

    /// Returns the outcome, with an error of this kind as its result. Lisp has not reported the error.
    pub(crate) fn finish_with_error(self, kind: &str, message: String) -> Outcome {
        let error = ErrorBuilder::new(kind.to_owned(), &self.limits).finish(Some(message), &self.code, self.evaluation);
        Outcome { result: Err(Arc::new(error)), ..self.finish(JobEnd::Failed) }
    }

    /// Returns the outcome of an evaluation that does not end although it was interrupted, as `end` says. If Lisp has not
    /// reported an error with a message, the message is a clause that says only why the evaluation was interrupted, and the
    /// caller adds what becomes of the evaluation.
    pub(crate) fn finish_unended(self, end: JobEnd) -> Outcome {
        let has_message = self.error.as_ref().is_some_and(|error| !error.has_no_message());
        let (timeout, step) = (self.timeout, self.step.clone());
        let mut outcome = self.finish(end);
        if let Err(error) = &mut outcome.result
            && !has_message
            && let Some(clause) = interruption_clause(&error.kind, timeout, step.as_deref())
        {
            Arc::make_mut(error).message = clause.into();
        }
        outcome
    }

    /// Returns the outcome. `end` is the way in which the evaluation's job ended.
    pub(crate) fn finish(mut self, end: JobEnd) -> Outcome {
        let PrintedText { stdout, stderr, turns } = self.printed.take();
        let errors =
            if self.records_refer_to_errors { self.signalled_errors().unwrap_or_default() } else { Vec::new() };
        let result = match end {
            JobEnd::Succeeded => Ok(self.values),
            _ => {
                // An abandoned evaluation may have reported only part of an error.
                let error = self.error.take().filter(|_| !matches!(end, JobEnd::Abandoned(..)));
                let error =
                    error.unwrap_or_else(|| ErrorBuilder::new(unreported_error_kind(end).to_owned(), &self.limits));
                let is_load = self.records.reports_load();
                let advice = || more_time_advice(self.audience, is_load, self.is_resumed);
                let message = || default_message(&error.kind, end, self.timeout, advice, self.step.as_deref());
                let message = error.has_no_message().then(message);
                Err(Arc::new(error.finish(message, &self.code, self.evaluation)))
            }
        };
        Outcome {
            evaluation: self.evaluation,
            kept: false,
            in_background: false,
            notices: self.notices,
            background: Clipped::default(),
            stdout,
            stderr,
            turns,
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

/// Returns the form of `code` that begins at character `start`, and its changes. `description` is Lisp's report on the
/// form. The report's first line is the position at which the form ends; the [changes](Changes::parse) follow, one per
/// line. The name of the form's package comes last, after an `@`, and may contain line breaks. Returns `None` if the
/// description is malformed. Copying a long form takes time, so this function must not be called under a lock.
pub(crate) fn defining_form(code: &Code, start: u64, description: &str) -> Option<(DefiningForm, Changes)> {
    let (lines, package) = description.split_once("\n@")?;
    let mut lines = lines.lines();
    let start = usize::try_from(start).ok()?;
    let end: usize = lines.next()?.parse().ok()?;
    let length = end.checked_sub(start)?;
    let TextPosition { offset, line_breaks: line, .. } = code.position(start);
    let code = code.text()[offset..].chars().take(length).collect();
    Some((DefiningForm { code, package: package.to_owned() }, Changes { line, ..Changes::parse(lines) }))
}

/// Returns the kind of an error that Lisp has not reported.
fn unreported_error_kind(end: JobEnd) -> &'static str {
    match end {
        JobEnd::Interrupted(InterruptReason::Timeout) | JobEnd::Abandoned(InterruptReason::Timeout, _) => TIMEOUT,
        JobEnd::Interrupted(InterruptReason::Heap) | JobEnd::Abandoned(InterruptReason::Heap, _) => HEAP_EXHAUSTED,
        JobEnd::Interrupted(InterruptReason::Cancel)
        | JobEnd::Abandoned(InterruptReason::Cancel, _)
        | JobEnd::Withdrawn => CANCELLED,
        JobEnd::Succeeded | JobEnd::Failed => THREAD_TERMINATED,
    }
}

/// Returns the message of an error that Lisp reported without a message, or not at all. `advice` returns
/// [`more_time_advice`].
fn default_message(
    kind: &str,
    end: JobEnd,
    timeout: Option<Duration>,
    advice: impl FnOnce() -> String,
    step: Option<&str>,
) -> String {
    match (end, interruption_clause(kind, timeout, step)) {
        (JobEnd::Abandoned(reason, why), _) => abandoned_message(reason, why, timeout, step),
        (JobEnd::Interrupted(_), Some(clause)) => match (kind, timeout) {
            (TIMEOUT, Some(_)) => {
                let advice = advice();
                format!("{clause} and was interrupted; changes it had already made remain. For more time, {advice}.")
            }
            (HEAP_EXHAUSTED, _) => {
                format!("{clause}, so the evaluation was stopped. Keep fewer objects, or start with a larger heap.")
            }
            (CANCELLED, _) => format!("{clause}; changes it had already made remain."),
            // Only test runs have steps.
            _ => format!("{clause}, so the test run was stopped."),
        },
        // The evaluation has changed nothing, or its changes are gone with its image.
        (JobEnd::Withdrawn, _) if kind == CANCELLED => "The evaluation was cancelled before it finished.".to_owned(),
        (JobEnd::Failed, _) if kind == THREAD_TERMINATED => {
            "Lisp code ended the evaluation's thread; a new thread has replaced the ended thread.".to_owned()
        }
        _ => "(no message)".to_owned(),
    }
}

/// Returns the beginning of a sentence that says why an evaluation was interrupted; `None` if `kind` is not the kind of an
/// error that reports an interruption. `step` is the step for which a time limit applied, if the evaluation has none.
fn interruption_clause(kind: &str, timeout: Option<Duration>, step: Option<&str>) -> Option<String> {
    match (kind, timeout) {
        (TIMEOUT, Some(timeout)) => Some(timeout_clause(timeout)),
        (TIMEOUT, None) => Some(format!("The time limit for {} was exceeded", step.unwrap_or(UNKNOWN_STEP))),
        (HEAP_EXHAUSTED, _) => Some("The heap was nearly used up".to_owned()),
        (CANCELLED, _) => Some("The evaluation was cancelled".to_owned()),
        _ => None,
    }
}

/// Returns the message of an abandoned evaluation. `step` is the step for which a time limit applied, if the evaluation
/// has none.
fn abandoned_message(
    reason: InterruptReason,
    why: StuckReason,
    timeout: Option<Duration>,
    step: Option<&str>,
) -> String {
    let what = match (reason, timeout) {
        (InterruptReason::Timeout, Some(timeout)) => timeout_clause(timeout),
        (InterruptReason::Timeout, None) => {
            format!("The evaluation exceeded the time limit for {}", step.unwrap_or(UNKNOWN_STEP))
        }
        (InterruptReason::Cancel, _) => "The evaluation was cancelled".to_owned(),
        (InterruptReason::Heap, _) => "The evaluation nearly filled the heap".to_owned(),
    };
    format!(
        "{what}, and {}. The evaluation's thread was abandoned: the thread may keep running and making changes until \
         it ends by itself.",
        why.predicate().trim_end_matches(',')
    )
}

/// Returns advice on how to get a longer time limit. `is_load` is true for a load, and `is_resumed` for an evaluation that was
/// held and resumed.
fn more_time_advice(audience: Audience, is_load: bool, is_resumed: bool) -> String {
    match audience {
        Audience::Agent => {
            // The tools that resume an evaluation have no time limit of their own: the evaluation keeps its limit.
            let call = if is_resumed { " to the call that begins the evaluation" } else { "" };
            // The default limit of a load is not the session's limit.
            let has_default = !is_load && tool_names::is_listed("configure-limits");
            let raise = if has_default { ", or raise the default with configure-limits" } else { "" };
            format!("pass a larger `timeout`{call}{raise}")
        }
        Audience::Shell | Audience::AttachedShell => "pass a larger --timeout".to_owned(),
        Audience::Repl => "start the REPL with a larger --timeout".to_owned(),
    }
}

/// Returns the beginning of a sentence about an evaluation that exceeded its time limit.
fn timeout_clause(timeout: Duration) -> String {
    let seconds = timeout.as_secs_f64();
    let plural = if timeout == Duration::from_secs(1) { "" } else { "s" };
    format!("The evaluation did not finish within its time limit of {seconds} second{plural}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{JobEnd, OutcomeBuilder};
    use crate::config::Limits;
    use crate::image::InterruptReason;
    use crate::image::interruption::StuckReason;

    /// Returns the message of an evaluation that does not end after an interruption because of its time limit.
    fn message_of_unended(timeout: Option<Duration>, step: &str) -> String {
        let mut builder = OutcomeBuilder::new(1, "(run)".into(), Limits::default(), timeout);
        builder.step = Some(step.to_owned());
        let error = builder.finish_unended(JobEnd::Interrupted(InterruptReason::Timeout)).result.unwrap_err();
        error.message.text.clone()
    }

    #[test]
    fn message_of_an_evaluation_that_does_not_end_gives_the_reason_of_the_interruption_without_advice() {
        assert_eq!(
            message_of_unended(None, "the test |A; B. C|"),
            "The time limit for the test |A; B. C| was exceeded"
        );
        assert_eq!(
            message_of_unended(Some(Duration::from_secs(2)), ""),
            "The evaluation did not finish within its time limit of 2 seconds"
        );
    }

    /// Returns the message of an evaluation that has no time limit and ends as `end` says during a step.
    fn message_of_ended_step(end: JobEnd) -> String {
        let mut builder = OutcomeBuilder::new(1, "(run)".into(), Limits::default(), None);
        builder.step = Some("the load of demo".to_owned());
        builder.finish(end).result.unwrap_err().message.text.clone()
    }

    #[test]
    fn message_of_an_exceeded_step_says_that_the_test_run_was_stopped() {
        assert_eq!(
            message_of_ended_step(JobEnd::Interrupted(InterruptReason::Timeout)),
            "The time limit for the load of demo was exceeded, so the test run was stopped."
        );
    }

    #[test]
    fn message_of_an_abandoned_test_run_names_the_step_whose_time_limit_was_exceeded() {
        let message = message_of_ended_step(JobEnd::Abandoned(InterruptReason::Timeout, StuckReason::Unresponsive));
        let expected =
            "The evaluation exceeded the time limit for the load of demo, and did not respond to an interrupt";
        assert!(message.starts_with(expected), "{message}");
    }

    #[test]
    fn message_of_a_full_heap_says_what_to_do() {
        let message = message_of_ended_step(JobEnd::Interrupted(InterruptReason::Heap));
        assert!(message.ends_with(" Keep fewer objects, or start with a larger heap."), "{message}");
    }
}
