//! The contract of `ffi/sbcl_host.h` in Rust types, without pointers.

use std::sync::atomic::{AtomicU32, Ordering};

use super::bindings::{self, sbcl_audience, sbcl_event, sbcl_interrupt, sbcl_item, sbcl_job_kind, sbcl_lane};
use crate::audience::Audience;

/// A kind of Lisp thread that pulls jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Threads that run the user's code.
    Evaluation,
    /// The thread that answers questions about the image.
    Inspection,
    /// The thread that interrupts evaluations and inspections, and starts evaluation threads.
    Control,
    /// The thread that handles the signals meant for SBCL.
    Signals,
}

impl Lane {
    /// Number of lanes.
    pub(crate) const COUNT: usize = 4;

    fn code(self) -> u32 {
        match self {
            Self::Evaluation => sbcl_lane::SBCL_LANE_EVALUATION,
            Self::Inspection => sbcl_lane::SBCL_LANE_INSPECTION,
            Self::Control => sbcl_lane::SBCL_LANE_CONTROL,
            Self::Signals => sbcl_lane::SBCL_LANE_SIGNALS,
        }
    }

    pub(super) fn from_code(code: u32) -> Option<Self> {
        match code {
            sbcl_lane::SBCL_LANE_EVALUATION => Some(Self::Evaluation),
            sbcl_lane::SBCL_LANE_INSPECTION => Some(Self::Inspection),
            sbcl_lane::SBCL_LANE_CONTROL => Some(Self::Control),
            sbcl_lane::SBCL_LANE_SIGNALS => Some(Self::Signals),
            _ => None,
        }
    }
}

/// The reason why a job is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InterruptReason {
    /// The job's time limit has passed.
    Timeout,
    /// A client cancelled the request, ended the evaluation, or disconnected; or the server shuts down.
    Cancel,
    /// The heap is nearly full.
    Heap,
}

/// The operation that a job requests from Lisp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobKind {
    /// Evaluate the job's text. The job's name, if not empty, is the package in which the text is read and evaluated.
    Evaluate {
        /// True to measure time and memory.
        timing: bool,
        /// True to hold the evaluation in the debugger if it fails.
        hold: bool,
        /// True to report errors that the code handles, too.
        record_errors: bool,
        /// True if the evaluation may end in the background. Such an evaluation binds copies of `*package*` and of the
        /// REPL's variables.
        detached: bool,
        /// True to start the evaluation in the background.
        background: bool,
    },
    /// Remove the session's definitions.
    Reset,
    /// List the session's definitions. The job's name, if not empty, is the package to which the list is restricted.
    Definitions {
        /// The kind of definitions to list; `None` for all kinds.
        kind: Option<ItemKind>,
        /// Maximum number of definitions.
        limit: u64,
    },
    /// Describe the symbol that the job's text names. The job's name, if not empty, is the package in which the symbol is
    /// looked up.
    Describe {
        /// True to include the text of the symbol's definitions.
        source: bool,
    },
    /// Invoke the restart with this number, counted from 1, of the held evaluation. If the number is 0, invoke the restart
    /// with the job's name. The job's text contains expressions for the restart's arguments.
    InvokeRestart(u64),
    /// List the local variables of some frames of the held evaluation.
    FrameLocals {
        /// Number of the first frame.
        from: u64,
        /// Number of frames.
        count: u32,
    },
    /// Evaluate the job's text in a frame of the held evaluation: the frame with this number.
    EvalInFrame(u64),
    /// Evaluate the job's text, and return its values from a frame of the held evaluation: the frame with this number.
    ReturnFromFrame(u64),
    /// Call the function of a frame of the held evaluation again: the frame with this number.
    RestartFrame(u64),
    /// Unwind the held evaluation.
    Release,
    /// Answer the query that the job's operation names.
    #[allow(dead_code, reason = "only the tools of the feature mcp send queries")]
    Query,
    /// Start a thread for this lane: another evaluation thread, or a thread that takes over the inspection lane from its
    /// present thread, which ends after its job.
    StartThread(Lane),
    /// Withdraw a thread from its lane, because the thread's job ignores its interruption.
    Abandon {
        /// Number of the stuck job.
        target: u64,
        /// The stuck job's lane. If this is the inspection lane, and no other thread has taken it over, it gets a new thread;
        /// if that thread cannot be started, Lisp refuses to withdraw the stuck thread.
        lane: Lane,
    },
    /// Report the SBCL lock that an abandoned thread holds while other threads wait for it.
    FindBlocker,
    /// Interrupt another job.
    Interrupt {
        /// Number of the job to interrupt.
        target: u64,
        /// Reason for the interruption.
        reason: InterruptReason,
    },
}

impl JobKind {
    /// Returns true for operations on a held evaluation.
    pub(crate) fn is_for_held_evaluation(self) -> bool {
        matches!(
            self,
            Self::InvokeRestart(_)
                | Self::FrameLocals { .. }
                | Self::EvalInFrame(_)
                | Self::ReturnFromFrame(_)
                | Self::RestartFrame(_)
                | Self::Release
        )
    }
}

/// A job for a Lisp thread. Its texts are in Lisp's encoding, UTF-32.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) kind: JobKind,
    /// Number of the evaluation that the job belongs to, or 0.
    pub(crate) evaluation: u64,
    /// Number of the connection that requested the job.
    pub(crate) connection: u64,
    /// The audience of the connection's messages.
    pub(crate) audience: Audience,
    pub(crate) text: Vec<u32>,
    pub(crate) name: Vec<u32>,
    /// The operation's name and arguments, printed as a Lisp list; empty for a job without an operation.
    pub(crate) operation: Vec<u32>,
}

impl Job {
    /// Creates a job without texts.
    pub(crate) fn without_texts(id: u64, kind: JobKind, evaluation: u64) -> Self {
        Self {
            id,
            kind,
            evaluation,
            connection: 0,
            audience: Audience::Agent,
            text: Vec::new(),
            name: Vec::new(),
            operation: Vec::new(),
        }
    }

    /// Returns the job as a C structure that points to the texts of `self`.
    pub(super) fn to_raw(&self) -> bindings::sbcl_job {
        let (kind, flags, argument) = match self.kind {
            JobKind::Evaluate { timing, hold, record_errors, detached, background } => (
                sbcl_job_kind::SBCL_JOB_EVALUATE,
                if timing { bindings::SBCL_EVALUATE_TIMING } else { 0 }
                    | if hold { bindings::SBCL_EVALUATE_HOLD } else { 0 }
                    | if record_errors { bindings::SBCL_EVALUATE_RECORD_ERRORS } else { 0 }
                    | if detached { bindings::SBCL_EVALUATE_DETACHED } else { 0 }
                    | if background { bindings::SBCL_EVALUATE_BACKGROUND } else { 0 },
                0,
            ),
            JobKind::InvokeRestart(number) => (sbcl_job_kind::SBCL_JOB_INVOKE_RESTART, 0, number),
            JobKind::FrameLocals { from, count } => (sbcl_job_kind::SBCL_JOB_FRAME_LOCALS, count, from),
            JobKind::EvalInFrame(frame) => (sbcl_job_kind::SBCL_JOB_EVAL_IN_FRAME, 0, frame),
            JobKind::ReturnFromFrame(frame) => (sbcl_job_kind::SBCL_JOB_RETURN_FROM_FRAME, 0, frame),
            JobKind::RestartFrame(frame) => (sbcl_job_kind::SBCL_JOB_RESTART_FRAME, 0, frame),
            JobKind::Release => (sbcl_job_kind::SBCL_JOB_RELEASE, 0, 0),
            JobKind::Reset => (sbcl_job_kind::SBCL_JOB_RESET, 0, 0),
            JobKind::Definitions { kind, limit } => {
                (sbcl_job_kind::SBCL_JOB_DEFINITIONS, kind.map_or(0, item_code), limit)
            }
            JobKind::Describe { source } => {
                (sbcl_job_kind::SBCL_JOB_DESCRIBE, if source { bindings::SBCL_DESCRIBE_SOURCE } else { 0 }, 0)
            }
            JobKind::Query => (sbcl_job_kind::SBCL_JOB_QUERY, 0, 0),
            JobKind::StartThread(lane) => (sbcl_job_kind::SBCL_JOB_START_THREAD, lane.code(), 0),
            JobKind::Abandon { target, lane } => (sbcl_job_kind::SBCL_JOB_ABANDON, lane.code(), target),
            JobKind::FindBlocker => (sbcl_job_kind::SBCL_JOB_LOOK, 0, 0),
            JobKind::Interrupt { target, reason } => (
                sbcl_job_kind::SBCL_JOB_INTERRUPT,
                match reason {
                    InterruptReason::Timeout => sbcl_interrupt::SBCL_INTERRUPT_TIMEOUT,
                    InterruptReason::Cancel => sbcl_interrupt::SBCL_INTERRUPT_CANCEL,
                    InterruptReason::Heap => sbcl_interrupt::SBCL_INTERRUPT_HEAP,
                },
                target,
            ),
        };
        bindings::sbcl_job {
            id: self.id,
            kind,
            flags,
            argument,
            text: self.text.as_ptr(),
            text_length: self.text.len() as u64,
            name: self.name.as_ptr(),
            name_length: self.name.len() as u64,
            evaluation: self.evaluation,
            operation: self.operation.as_ptr(),
            operation_length: self.operation.len() as u64,
            connection: self.connection,
            audience: match self.audience {
                Audience::Agent => sbcl_audience::SBCL_AUDIENCE_AGENT,
                Audience::Shell => sbcl_audience::SBCL_AUDIENCE_SHELL,
                Audience::AttachedShell => sbcl_audience::SBCL_AUDIENCE_ATTACHED_SHELL,
                Audience::Repl => sbcl_audience::SBCL_AUDIENCE_REPL,
            },
        }
    }
}

/// Characters in Lisp's representation: code points, including surrogates. Another Lisp thread may be changing the
/// characters, so each character is read only once, and any value is accepted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text<'a>(pub(super) &'a [AtomicU32]);

#[cfg(test)]
impl<'a> Text<'a> {
    /// Creates a text from code points.
    pub(crate) fn new(characters: &'a [AtomicU32]) -> Self {
        Self(characters)
    }
}

impl Text<'_> {
    /// Returns the number of characters.
    pub(crate) fn len(self) -> usize {
        self.0.len()
    }

    /// Appends the first `count` characters to `target`. Codes that are not Unicode scalar values become U+FFFD.
    pub(crate) fn append_to(self, target: &mut String, count: usize) {
        let characters = &self.0[..count.min(self.0.len())];
        target.reserve(characters.len());
        let character =
            |c: &AtomicU32| char::from_u32(c.load(Ordering::Relaxed)).unwrap_or(char::REPLACEMENT_CHARACTER);
        target.extend(characters.iter().map(character));
    }

    /// Returns all characters as a string.
    pub(crate) fn to_owned(self) -> String {
        let mut string = String::new();
        self.append_to(&mut string, self.len());
        string
    }
}

/// The kind of an item that an inspection lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ItemKind {
    Function,
    Variable,
    Macro,
    Class,
    Package,
    System,
    Role,
    Detail,
    NotFound,
    More,
}

/// An event that a job reports. The variants follow `enum sbcl_event`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event<'a> {
    Done {
        success: bool,
    },
    Stdout(Text<'a>),
    Stderr(Text<'a>),
    /// The beginning of a warning: its type, and its line in the code (0 if unknown).
    Warning(Text<'a>, u64),
    /// More of the warning's text. If `replaces` is true, this text replaces the text so far.
    WarningText {
        text: Text<'a>,
        replaces: bool,
    },
    /// The beginning of a value. If `replaces` is true, this value replaces the value begun last.
    Value {
        replaces: bool,
    },
    ValueText(Text<'a>),
    /// The beginning of an error, with its type. If `interrupts` is true, the error was signalled while the previous error
    /// was being described.
    Error {
        kind: Text<'a>,
        interrupts: bool,
    },
    /// More of the error's text. If `replaces` is true, this text replaces the text so far.
    ErrorText {
        text: Text<'a>,
        replaces: bool,
    },
    /// The beginning of a restart: its number, from 1, and its name.
    Restart(u64, Text<'a>),
    RestartText(Text<'a>),
    Frame(u64),
    FrameText(Text<'a>),
    FrameSource(Text<'a>, u64),
    Frames(u64),
    TimeReal(u64),
    TimeRun(u64),
    TimeGc(u64),
    BytesConsed(u64),
    Item(ItemKind, Text<'a>),
    ItemText(Text<'a>),
    Notice(Text<'a>),
    /// A summary of the evaluation's definitions, for other connections. An empty text asks whether there are other
    /// connections to notify.
    Definitions(Text<'a>),
    /// A form has changed definitions. The number is the position at which the form begins, in characters. The lines of the
    /// text contain the position at which the form ends, the changes, and the package in which the form was read.
    Defined(u64, Text<'a>),
    /// The number of the form that failed, from 1, and the position at which the form begins.
    Form(u64, Text<'a>),
    Slot(Text<'a>),
    SlotText(Text<'a>),
    /// The beginning of a local variable: its name, and 0 if the variable has a value, 1 if it is dead, or 2 if its value is
    /// unavailable.
    Local(Text<'a>, u64),
    LocalText(Text<'a>),
    /// The evaluation is held when this job has ended. `unchanged` is true if the evaluation is held as it was before
    /// this job, and false if the evaluation stopped during this job.
    Held {
        unchanged: bool,
    },
    Refused(Text<'a>),
    /// This job unwinds the held evaluation.
    Released,
    /// This evaluation thread ends.
    ThreadEnded,
    /// No thread could be started for this lane, for this reason.
    ThreadRefused(Lane, Text<'a>),
    /// Asks whether the evaluation is in the foreground. If the answer is true, the evaluation stays in the foreground.
    Foreground,
    /// Asks whether the job keeps more of the heap than it may. If the answer is true, the job must end.
    Heap,
    /// The file of the warning begun last (empty for the evaluated code), and the warning's column (0 if unknown).
    WarningPlace(Text<'a>, u64),
    /// The name of the top-level form that contains the warning begun last.
    WarningForm(Text<'a>),
    /// The source line at the frame begun last.
    FrameCode(Text<'a>),
    /// The part of SBCL or of a library to which the frame begun last belongs, such as `the reader` or `ASDF`.
    FrameMachinery(Text<'a>),
    /// The beginning of a record in the answer to a query or an operation, with the record's kind.
    Record(Text<'a>),
    /// The beginning of a field of the record begun last: the field's name, and its value if no text follows.
    Field(Text<'a>, i64),
    FieldText(Text<'a>),
    /// The job fails with an error that was reported when it was signalled. The number is the error's index, from 0, among
    /// the job's errors reported in this way.
    Unhandled(u64),
    /// The job's next step, and the milliseconds that the step may take. An empty text means no particular step and no
    /// limit.
    Step(Text<'a>, u64),
    /// The last interruption sent to the job's thread begins to run there, or the thread does not exist. For a thread that
    /// works for an embedding program, the number names the call that the interruption was sent to end.
    Interrupted(u64),
    /// The job begins to unwind because it was interrupted. On a thread that works for an embedding program, the call with
    /// this number begins to unwind.
    Unwinding(u64),
    /// The name of the SBCL lock that an abandoned thread holds while other threads wait for the lock; empty if there is no
    /// such lock.
    Blocked(Text<'a>),
}

impl<'a> Event<'a> {
    /// Decodes an event. Returns `None` for a kind that the contract does not have.
    pub(super) fn from_raw(kind: u32, number: i64, text: Text<'a>) -> Option<Self> {
        let count = number.max(0).cast_unsigned();
        Some(match kind {
            sbcl_event::SBCL_EVENT_DONE => Self::Done { success: number == 0 },
            sbcl_event::SBCL_EVENT_STDOUT => Self::Stdout(text),
            sbcl_event::SBCL_EVENT_STDERR => Self::Stderr(text),
            sbcl_event::SBCL_EVENT_WARNING => Self::Warning(text, count),
            sbcl_event::SBCL_EVENT_WARNING_TEXT => Self::WarningText { text, replaces: number != 0 },
            sbcl_event::SBCL_EVENT_VALUE => Self::Value { replaces: number != 0 },
            sbcl_event::SBCL_EVENT_VALUE_TEXT => Self::ValueText(text),
            sbcl_event::SBCL_EVENT_ERROR => Self::Error { kind: text, interrupts: number == 1 },
            sbcl_event::SBCL_EVENT_ERROR_TEXT => Self::ErrorText { text, replaces: number != 0 },
            sbcl_event::SBCL_EVENT_RESTART => Self::Restart(count, text),
            sbcl_event::SBCL_EVENT_RESTART_TEXT => Self::RestartText(text),
            sbcl_event::SBCL_EVENT_FRAME => Self::Frame(count),
            sbcl_event::SBCL_EVENT_FRAME_TEXT => Self::FrameText(text),
            sbcl_event::SBCL_EVENT_FRAME_SOURCE => Self::FrameSource(text, count),
            sbcl_event::SBCL_EVENT_FRAMES => Self::Frames(count),
            sbcl_event::SBCL_EVENT_TIME_REAL => Self::TimeReal(count),
            sbcl_event::SBCL_EVENT_TIME_RUN => Self::TimeRun(count),
            sbcl_event::SBCL_EVENT_TIME_GC => Self::TimeGc(count),
            sbcl_event::SBCL_EVENT_BYTES_CONSED => Self::BytesConsed(count),
            sbcl_event::SBCL_EVENT_ITEM => Self::Item(item_from_code(number)?, text),
            sbcl_event::SBCL_EVENT_ITEM_TEXT => Self::ItemText(text),
            sbcl_event::SBCL_EVENT_NOTICE => Self::Notice(text),
            sbcl_event::SBCL_EVENT_DEFINED => Self::Defined(count, text),
            sbcl_event::SBCL_EVENT_FORM => Self::Form(count, text),
            sbcl_event::SBCL_EVENT_SLOT => Self::Slot(text),
            sbcl_event::SBCL_EVENT_SLOT_TEXT => Self::SlotText(text),
            sbcl_event::SBCL_EVENT_LOCAL => Self::Local(text, count),
            sbcl_event::SBCL_EVENT_LOCAL_TEXT => Self::LocalText(text),
            sbcl_event::SBCL_EVENT_HELD => Self::Held { unchanged: number != 0 },
            sbcl_event::SBCL_EVENT_REFUSED => Self::Refused(text),
            sbcl_event::SBCL_EVENT_RELEASED => Self::Released,
            sbcl_event::SBCL_EVENT_HEAP => Self::Heap,
            sbcl_event::SBCL_EVENT_WARNING_PLACE => Self::WarningPlace(text, count),
            sbcl_event::SBCL_EVENT_WARNING_FORM => Self::WarningForm(text),
            sbcl_event::SBCL_EVENT_FRAME_CODE => Self::FrameCode(text),
            sbcl_event::SBCL_EVENT_FRAME_MACHINERY => Self::FrameMachinery(text),
            sbcl_event::SBCL_EVENT_RECORD => Self::Record(text),
            sbcl_event::SBCL_EVENT_FIELD => Self::Field(text, number),
            sbcl_event::SBCL_EVENT_FIELD_TEXT => Self::FieldText(text),
            sbcl_event::SBCL_EVENT_UNHANDLED => Self::Unhandled(count),
            sbcl_event::SBCL_EVENT_FOREGROUND => Self::Foreground,
            sbcl_event::SBCL_EVENT_THREAD_ENDED => Self::ThreadEnded,
            sbcl_event::SBCL_EVENT_THREAD_REFUSED => {
                Self::ThreadRefused(u32::try_from(number).ok().and_then(Lane::from_code)?, text)
            }
            sbcl_event::SBCL_EVENT_DEFINITIONS => Self::Definitions(text),
            sbcl_event::SBCL_EVENT_STEP => Self::Step(text, count),
            sbcl_event::SBCL_EVENT_INTERRUPTED => Self::Interrupted(count),
            sbcl_event::SBCL_EVENT_UNWINDING => Self::Unwinding(count),
            sbcl_event::SBCL_EVENT_BLOCKED => Self::Blocked(text),
            _ => return None,
        })
    }
}

/// The kinds of items, each with its code in the contract.
const ITEM_CODES: [(ItemKind, sbcl_item::Type); 10] = [
    (ItemKind::Function, sbcl_item::SBCL_ITEM_FUNCTION),
    (ItemKind::Variable, sbcl_item::SBCL_ITEM_VARIABLE),
    (ItemKind::Macro, sbcl_item::SBCL_ITEM_MACRO),
    (ItemKind::Class, sbcl_item::SBCL_ITEM_CLASS),
    (ItemKind::Package, sbcl_item::SBCL_ITEM_PACKAGE),
    (ItemKind::System, sbcl_item::SBCL_ITEM_SYSTEM),
    (ItemKind::Role, sbcl_item::SBCL_ITEM_ROLE),
    (ItemKind::Detail, sbcl_item::SBCL_ITEM_DETAIL),
    (ItemKind::NotFound, sbcl_item::SBCL_ITEM_NOT_FOUND),
    (ItemKind::More, sbcl_item::SBCL_ITEM_MORE),
];

fn item_code(item: ItemKind) -> u32 {
    ITEM_CODES.iter().find(|(known, _)| *known == item).map_or(0, |(_, code)| *code)
}

fn item_from_code(code: i64) -> Option<ItemKind> {
    let code = u32::try_from(code).ok()?;
    ITEM_CODES.iter().find(|(_, known)| *known == code).map(|(item, _)| *item)
}

/// The host's side of `struct sbcl_host`. Any Lisp thread may call these functions at any time.
pub(crate) trait Host: Send + Sync + 'static {
    /// Waits for the next job of the lane. Returns `None` to end the calling thread, whose number is `thread`. If the
    /// thread holds an evaluation, `held` is the number of the thread's last job.
    fn next_job(&self, lane: Lane, thread: u64, held: Option<u64>) -> Option<Job>;

    /// Records that the evaluation thread with the number `thread` ends.
    fn thread_ended(&self, thread: u64);

    /// Receives an event of `job`, or of no particular job if `job` is 0. `signalled` is true if the event describes an
    /// error that the job may still handle. For an event that asks a question, returns the answer. For [`Event::Done`],
    /// returns true if the thread was abandoned and must end. For other events, returns true if Lisp may stop printing the
    /// text begun last.
    fn event(&self, job: u64, signalled: bool, event: Event<'_>) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surrogates_and_invalid_codes_become_replacement_characters() {
        let codes = [u32::from('a'), 0, 0xd800, 0xdfff, 0x11_0000, u32::MAX, u32::from('λ')].map(AtomicU32::new);
        let text = Text(&codes);
        assert_eq!(text.to_owned(), "a\0\u{fffd}\u{fffd}\u{fffd}\u{fffd}λ");
        let mut start = "> ".to_owned();
        text.append_to(&mut start, 1);
        text.append_to(&mut start, 0);
        assert_eq!((start.as_str(), text.len()), ("> a", 7));
    }
}
