//! The error builder, which makes an error's record from events.

use std::sync::Arc;

use super::code::{Code, TextPosition};
use super::text::{
    ClippedBuffer, MAX_LOCATION, clip_name, first_chars, printed_on_one_line, push_within_bytes, with_omission,
};
use crate::config::Limits;
use crate::image::{Event, Text};
use crate::outcome::{Clipped, ErrorRecord, FormPosition, FrameRecord, Local, LocalValue, RestartRecord, Slot};

/// The maximum number of restarts of one error, of slots of one error, and of local variables of one frame.
const MAX_PARTS: usize = 100;
/// The size limit of an error's frames, local variables, slots and restarts together, in bytes.
const MAX_RECORD_BYTES: usize = 1 << 20;
/// The size limit of the record of an error that the code handles, in bytes.
const MAX_SIGNALLED_BYTES: usize = 100 << 10;
/// The maximum number of characters that are kept of a local variable's value in a backtrace.
const MAX_LOCAL: u64 = 200;

/// A builder that makes an error's record from events.
#[derive(Debug, Default)]
pub(crate) struct ErrorBuilder {
    pub(crate) kind: String,
    /// True if the evaluation was interrupted while this error was being described.
    pub(crate) is_interrupted: bool,
    message: ClippedBuffer,
    time: jiff::Timestamp,
    /// The number of the form that failed, and the position of its first character in the code.
    form: Option<(u64, usize)>,
    slots: Vec<(String, ClippedBuffer)>,
    slots_omitted: u64,
    restarts: Vec<(u64, String, ClippedBuffer)>,
    frames: Vec<FrameBuilder>,
    total_frames: u64,
    /// The remaining bytes of the size limit.
    bytes_left: usize,
    /// True if the part begun last did not fit and is skipped.
    skips_part: bool,
}

/// A builder that makes the record of one frame.
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
    pub(crate) fn new(kind: String, limits: &Limits) -> Self {
        let message = ClippedBuffer::new(limits.max_message);
        Self { kind, message, time: jiff::Timestamp::now(), bytes_left: MAX_RECORD_BYTES, ..Self::default() }
    }

    /// Creates the builder of an error that the code may handle.
    pub(crate) fn signalled(kind: String, limits: &Limits) -> Self {
        Self { bytes_left: MAX_SIGNALLED_BYTES, ..Self::new(kind, limits) }
    }

    /// Begins a part of the record, such as a slot, with the name `text`. `count` is the number of parts of this kind
    /// so far. Returns the part's name; `None` if the part does not fit.
    fn begin_part(&mut self, count: usize, text: Text<'_>) -> Option<String> {
        self.skips_part = count >= MAX_PARTS || self.bytes_left == 0;
        (!self.skips_part).then(|| {
            let name = clip_name(text);
            self.bytes_left = self.bytes_left.saturating_sub(name.len());
            name
        })
    }

    /// Returns true if the message is blank.
    pub(crate) fn has_no_message(&self) -> bool {
        self.message.is_blank()
    }

    /// Returns true if the reader found the submitted code unbalanced. The messages are recognised by their wording,
    /// which comes from `push-reader-position` in lisp/debugger/hints.lisp and from SBCL's reader.
    fn is_unbalanced_code(&self) -> bool {
        let message = self.message.as_str();
        self.kind == "END-OF-FILE" && message.contains("\nThe code ends at line ")
            || self.kind == "SB-INT:SIMPLE-READER-ERROR" && message.starts_with("unmatched close parenthesis")
    }

    /// Returns the text that the error reports as unbalanced: a file, or the submitted `code`. Returns `None` for
    /// other errors.
    pub(crate) fn unbalanced_text(&self, code: &Code) -> Option<UnbalancedText> {
        if self.is_unbalanced_code() {
            return Some(UnbalancedText::Code(code.text().clone()));
        }
        unbalanced_file(self.message.as_str()).map(UnbalancedText::File)
    }

    /// Adds to the message a hint, which says where the text is probably unbalanced.
    pub(crate) fn add_hint(&mut self, hint: &str) {
        self.message.push_clipped(&format!("\nBy the indentation, {hint}").into());
    }

    /// Makes the record of an error in evaluation number `evaluation` of `code`. `message`, if there is one, replaces
    /// the error's own message.
    pub(crate) fn finish(self, message: Option<String>, code: &Code, evaluation: u64) -> ErrorRecord {
        ErrorRecord {
            id: 0,
            form: self.form.map(|(number, start)| form_position(code, number, start)),
            slots: self
                .slots
                .into_iter()
                .map(|(name, value)| Slot { name, value: printed_on_one_line(value) })
                .collect(),
            kind: self.kind,
            message: message.map_or_else(|| self.message.into(), Clipped::from),
            time: self.time,
            slots_omitted: self.slots_omitted,
            restarts: self
                .restarts
                .into_iter()
                .map(|(number, name, text)| RestartRecord { number, name, description: with_omission(text) })
                .collect(),
            frames: self
                .frames
                .into_iter()
                .map(|frame| FrameRecord {
                    number: frame.number,
                    call: printed_on_one_line(frame.call),
                    source: frame.source,
                    code: frame.code,
                    machinery: frame.machinery,
                    locals: frame.locals.into_iter().map(build_local).collect(),
                })
                .collect(),
            total_frames: self.total_frames,
            evaluation,
        }
    }
}

/// A text that the reader found unbalanced.
#[derive(Debug, Clone)]
pub(crate) enum UnbalancedText {
    /// The submitted code.
    Code(Arc<str>),
    /// A file, by its path.
    File(String),
}

/// Two codes are equal if they are the same string in memory. Comparing their contents would take time under the
/// scheduler's lock.
impl PartialEq for UnbalancedText {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Code(code), Self::Code(other)) => Arc::ptr_eq(code, other),
            (Self::File(path), Self::File(other)) => path == other,
            _ => false,
        }
    }
}

impl UnbalancedText {
    /// Describes the source location where the text is probably unbalanced; `None` if no location is found, or the file
    /// is too long or cannot be read. Stops searching when `stop` returns true. Reading and searching take time, so this
    /// function must not be called under a lock.
    pub(crate) fn hint(&self, stop: impl Fn() -> bool) -> Option<String> {
        match self {
            Self::Code(code) => lisp_syntax::hint(code, stop),
            Self::File(path) => {
                let longest = lisp_syntax::MAX_HINTED_LENGTH as u64;
                let small = std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() <= longest);
                let bytes = small.then(|| std::fs::read(path).ok()).flatten()?;
                lisp_syntax::hint(&String::from_utf8_lossy(&bytes), stop)
            }
        }
    }
}

/// Returns the path of the file that the reader found unbalanced, from the message of an error. The message has the
/// wording of SBCL's `load` and `compile-file`.
fn unbalanced_file(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("READ error during ")?;
    let rest = rest.split_once(": ")?.1;
    let balance = ["end of file on ", "unmatched close parenthesis"].iter().any(|cause| rest.starts_with(cause));
    let path = rest.split_once("#<SB-INT:FORM-TRACKING-STREAM for \"file ")?.1;
    let path = path.split_once("\" {").filter(|_| balance)?.0;
    Some(path.replace("\\\\", "\\").replace("\\\"", "\""))
}

/// Returns the position of form number `number`, which begins at character `start` of `code`.
fn form_position(code: &Code, number: u64, start: usize) -> FormPosition {
    let TextPosition { offset, line_breaks, .. } = code.position(start);
    // The scheduler's lock may be held, and the line may be long, so only its beginning is read.
    let line = code.text()[offset..].chars().take_while(|character| *character != '\n').take(MAX_LOCATION);
    let text = line.collect::<String>().trim_end().to_owned();
    FormPosition { number, line: 1 + line_breaks as u64, text }
}

/// Makes a local variable from its name, its validity code and its value. `SBCL_EVENT_LOCAL` in ffi/sbcl_host.h defines
/// the code: 0 if the variable has a value, 1 if it is dead, 2 if its value is unavailable.
pub(crate) fn build_local((name, validity, value): (String, u64, ClippedBuffer)) -> Local {
    let value = match validity {
        0 => LocalValue::Value(printed_on_one_line(value)),
        1 => LocalValue::Dead,
        _ => LocalValue::Unavailable,
    };
    Local { name, value }
}

impl ErrorBuilder {
    /// Handles an event about the error. Returns true if Lisp may stop printing the text begun last.
    pub(crate) fn handle_event(&mut self, event: Event<'_>, limits: &Limits) -> bool {
        match event {
            Event::ErrorText { text, replaces } => {
                if replaces {
                    self.message = ClippedBuffer::new(limits.max_message);
                }
                self.message.push(text);
                return self.message.has_enough();
            }
            Event::Restart(number, name) => {
                if let Some(name) = self.begin_part(self.restarts.len(), name) {
                    self.restarts.push((number, name, ClippedBuffer::new(limits.max_frame)));
                }
            }
            Event::RestartText(text) => {
                if let Some((.., description)) = self.restarts.last_mut().filter(|_| !self.skips_part) {
                    push_within_bytes(&mut self.bytes_left, description, text);
                    return description.has_enough();
                }
            }
            Event::Frames(total) => self.total_frames = total,
            Event::Form(number, start) => {
                self.form = start.to_owned().parse().ok().map(|start| (number, start));
            }
            Event::Slot(name) => match self.begin_part(self.slots.len(), name) {
                Some(name) => self.slots.push((name, ClippedBuffer::new(limits.max_frame))),
                None => self.slots_omitted += 1,
            },
            Event::SlotText(text) => {
                if let Some((_, value)) = self.slots.last_mut().filter(|_| !self.skips_part) {
                    push_within_bytes(&mut self.bytes_left, value, text);
                    return value.has_enough();
                }
            }
            Event::Frame(number) => self.frames.push(FrameBuilder {
                number,
                call: ClippedBuffer::new(limits.max_frame),
                source: None,
                code: None,
                machinery: None,
                locals: Vec::new(),
            }),
            Event::FrameCode(text) => {
                if let Some(frame) = self.frames.last_mut() {
                    frame.code = Some(clip_name(text));
                }
            }
            Event::FrameMachinery(text) => {
                if let Some(frame) = self.frames.last_mut() {
                    frame.machinery = Some(clip_name(text));
                }
            }
            Event::FrameText(text) => {
                if let Some(frame) = self.frames.last_mut() {
                    push_within_bytes(&mut self.bytes_left, &mut frame.call, text);
                    return frame.call.has_enough();
                }
            }
            Event::FrameSource(location, line) => {
                if let Some(frame) = self.frames.last_mut() {
                    let location = first_chars(location, MAX_LOCATION);
                    frame.source = Some(match line {
                        0 => location,
                        _ if location.starts_with("evaluation ") => format!("{location}, line {line}"),
                        _ => format!("{location}:{line}"),
                    });
                }
            }
            Event::Local(name, validity) => {
                let count = self.frames.last().map_or(MAX_PARTS, |frame| frame.locals.len());
                if let (Some(name), Some(frame)) = (self.begin_part(count, name), self.frames.last_mut()) {
                    frame.locals.push((name, validity, ClippedBuffer::new(MAX_LOCAL)));
                }
            }
            Event::LocalText(text) => {
                let local =
                    self.frames.last_mut().filter(|_| !self.skips_part).and_then(|frame| frame.locals.last_mut());
                if let Some((.., value)) = local {
                    push_within_bytes(&mut self.bytes_left, value, text);
                    return value.has_enough();
                }
            }
            _ => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn text_of_a_form_is_the_beginning_of_its_line() {
        let text = |code: &str, start| form_position(&Code::new(code.into()), 1, start).text;
        assert_eq!(text("(f)\n(g x) \t\r\n(h)", 4), "(g x)");
        assert_eq!(text("(f) (g)", 4), "(g)");
        assert_eq!(text("(f)", 3), "");
        assert_eq!(text(&"λ".repeat(MAX_LOCATION + 1), 0), "λ".repeat(MAX_LOCATION));
    }

    #[test]
    fn text_of_a_form_in_a_long_line_takes_little_time() {
        let code = Code::new(format!("(f){}", " ".repeat(16 << 20)).into());
        let begin = Instant::now();
        for _ in 0..1_000 {
            assert_eq!(form_position(&code, 1, 0).text, "(f)");
        }
        let time = begin.elapsed();
        assert!(time < Duration::from_secs(1), "{time:?}");
    }

    #[test]
    fn unbalanced_codes_are_compared_by_address() {
        let code: Arc<str> = "(".into();
        assert_eq!(UnbalancedText::Code(code.clone()), UnbalancedText::Code(code.clone()));
        assert_ne!(UnbalancedText::Code(code), UnbalancedText::Code("(".into()));
    }
}
