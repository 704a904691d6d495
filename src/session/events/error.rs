//! An error as it comes in.

use std::sync::Arc;

use super::text::{ClippedBuffer, MAX_PLACE, beginning, name, one_line, push_bounded, whole};
use crate::config::Limits;
use crate::image::{Event, Text};
use crate::outcome::{Clipped, ErrorRecord, FormPosition, Frame, Local, LocalValue, Restart, Slot};

/// Restarts and slots of an error, and local variables of a frame.
const MAX_PARTS: usize = 100;
/// Bytes of an error's frames, local variables, slots and restarts together.
const MAX_RECORD: usize = 1 << 20;
/// Bytes of one that the code handles.
const MAX_SIGNALLED: usize = 100 << 10;
/// Characters of the value of a local variable in a backtrace.
const MAX_LOCAL: u64 = 200;

/// An error as it comes in.
#[derive(Debug, Default)]
pub(crate) struct ErrorBuilder {
    pub(crate) kind: String,
    /// The evaluation was interrupted while this error was being described.
    pub(crate) is_interrupted: bool,
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
    pub(crate) fn new(kind: String, limits: &Limits) -> Self {
        let message = ClippedBuffer::new(limits.max_message);
        Self { kind, message, time: jiff::Timestamp::now(), left: MAX_RECORD, ..Self::default() }
    }

    /// One that the code may handle.
    pub(crate) fn signalled(kind: String, limits: &Limits) -> Self {
        Self { left: MAX_SIGNALLED, ..Self::new(kind, limits) }
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

    /// True when there is nothing in its message.
    pub(crate) fn is_silent(&self) -> bool {
        self.message.is_blank()
    }

    /// Whether it is that the reader found the submitted code not balanced: `push-reader-position` in lisp/debugger/hints.lisp and
    /// SBCL's reader word it so.
    fn is_unreadable(&self) -> bool {
        let message = self.message.as_str();
        self.kind == "END-OF-FILE" && message.contains("\nThe code ends at line ")
            || self.kind == "SB-INT:SIMPLE-READER-ERROR" && message.starts_with("unmatched close parenthesis")
    }

    /// Returns the unbalanced text that made the reader fail in evaluating `code`, if the error says so.
    pub(crate) fn unbalanced(&self, code: &Arc<str>) -> Option<Unbalanced> {
        if self.is_unreadable() {
            return Some(Unbalanced::Code(code.clone()));
        }
        unreadable_file(self.message.as_str()).map(Unbalanced::File)
    }

    /// Adds to the message where the text is probably unbalanced.
    pub(crate) fn add_hint(&mut self, hint: &str) {
        self.message.push_clipped(&format!("\nBy the indentation, {hint}").into());
    }

    /// The whole of it, of evaluation number `evaluation` of `code`; with this message in place of its own, if there is
    /// one.
    pub(crate) fn finish(self, message: Option<String>, code: &str, evaluation: u64) -> ErrorRecord {
        ErrorRecord {
            id: 0,
            form: self.form.map(|(number, start)| form_position(code, number, start)),
            slots: self.slots.into_iter().map(|(name, value)| Slot { name, value: one_line(value) }).collect(),
            kind: self.kind,
            message: message.map_or_else(|| self.message.into(), Clipped::from),
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

/// An unbalanced text that the reader failed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unbalanced {
    /// The submitted code.
    Code(Arc<str>),
    /// A file, by its path.
    File(String),
}

impl Unbalanced {
    /// Says where the text is probably unbalanced. Reads the file and searches until `stop` returns true: not to be
    /// called under a lock.
    pub(crate) fn hint(&self, stop: impl Fn() -> bool) -> Option<String> {
        match self {
            Self::Code(code) => crate::check::hint(code, stop),
            Self::File(path) => {
                let longest = crate::check::LONGEST_HINTED as u64;
                let small = std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() <= longest);
                let bytes = small.then(|| std::fs::read(path).ok()).flatten()?;
                crate::check::hint(&String::from_utf8_lossy(&bytes), stop)
            }
        }
    }
}

/// Returns the path of the file that the reader found not balanced, as a message names it. SBCL words it so when it loads
/// or compiles a file.
fn unreadable_file(message: &str) -> Option<String> {
    let (_, said) = message.split_once("READ error during ")?;
    let said = said.split_once(": ")?.1;
    let balance = ["end of file on ", "unmatched close parenthesis"].iter().any(|cause| said.starts_with(cause));
    let path = said.split_once("#<SB-INT:FORM-TRACKING-STREAM for \"file ")?.1;
    let path = path.split_once("\" {").filter(|_| balance)?.0;
    Some(path.replace("\\\\", "\\").replace("\\\"", "\""))
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
pub(crate) fn local((name, validity, value): (String, u64, ClippedBuffer)) -> Local {
    let value = match validity {
        0 => LocalValue::Value(one_line(value)),
        1 => LocalValue::Dead,
        _ => LocalValue::Unavailable,
    };
    Local { name, value }
}

impl ErrorBuilder {
    /// Takes what belongs to the error. True when no more of the text begun last is kept.
    pub(crate) fn event(&mut self, event: Event<'_>, limits: &Limits) -> bool {
        match event {
            Event::ErrorText { text, again } => {
                if again {
                    self.message = ClippedBuffer::new(limits.max_message);
                }
                self.message.push(text);
                return self.message.enough();
            }
            Event::Restart(number, name) => {
                if let Some(name) = self.part(self.restarts.len(), name) {
                    self.restarts.push((number, name, ClippedBuffer::new(limits.max_frame)));
                }
            }
            Event::RestartText(text) => {
                if let Some((.., description)) = self.restarts.last_mut().filter(|_| !self.skips) {
                    push_bounded(&mut self.left, description, text);
                    return description.enough();
                }
            }
            Event::Frames(total) => self.total_frames = total,
            Event::Form(number, start) => {
                self.form = start.to_owned().parse().ok().map(|start| (number, start));
            }
            Event::Slot(name) => match self.part(self.slots.len(), name) {
                Some(name) => self.slots.push((name, ClippedBuffer::new(limits.max_frame))),
                None => self.slots_omitted += 1,
            },
            Event::SlotText(text) => {
                if let Some((_, value)) = self.slots.last_mut().filter(|_| !self.skips) {
                    push_bounded(&mut self.left, value, text);
                    return value.enough();
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
                    frame.code = Some(name(text));
                }
            }
            Event::FrameMachinery(text) => {
                if let Some(frame) = self.frames.last_mut() {
                    frame.machinery = Some(name(text));
                }
            }
            Event::FrameText(text) => {
                if let Some(frame) = self.frames.last_mut() {
                    push_bounded(&mut self.left, &mut frame.call, text);
                    return frame.call.enough();
                }
            }
            Event::FrameSource(place, line) => {
                if let Some(frame) = self.frames.last_mut() {
                    let place = beginning(place, MAX_PLACE);
                    frame.source = Some(match line {
                        0 => place,
                        _ if place.starts_with("evaluation ") => format!("{place}, line {line}"),
                        _ => format!("{place}:{line}"),
                    });
                }
            }
            Event::Local(name, validity) => {
                let so_many = self.frames.last().map_or(MAX_PARTS, |frame| frame.locals.len());
                if let (Some(name), Some(frame)) = (self.part(so_many, name), self.frames.last_mut()) {
                    frame.locals.push((name, validity, ClippedBuffer::new(MAX_LOCAL)));
                }
            }
            Event::LocalText(text) => {
                let local = self.frames.last_mut().filter(|_| !self.skips).and_then(|frame| frame.locals.last_mut());
                if let Some((.., value)) = local {
                    push_bounded(&mut self.left, value, text);
                    return value.enough();
                }
            }
            _ => {}
        }
        false
    }
}
