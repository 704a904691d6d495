//! The contract of `ffi/sbcl_host.h` in Rust terms, without pointers.

use std::sync::atomic::{AtomicU32, Ordering};

use super::bindings::{self, sbcl_event, sbcl_interrupt, sbcl_item, sbcl_job_kind, sbcl_lane};

/// A Lisp thread that pulls jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Runs the user's code.
    Evaluation,
    /// Answers questions about the image.
    Inspection,
    /// Interrupts the other two.
    Control,
    /// Handles the signals that are SBCL's.
    Signals,
}

impl Lane {
    /// How many there are.
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

/// Why a job is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// Its time limit has passed.
    Timeout,
    /// Its client does not want it any more.
    Cancel,
    /// The heap is nearly used up.
    Heap,
}

/// What a job asks of Lisp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobKind {
    /// Evaluate the text, in the package of that name if there is one.
    Evaluate {
        /// Measure it.
        timing: bool,
        /// When it fails, hold it there.
        hold: bool,
        /// Tell of the errors that the code handles, too.
        record_errors: bool,
        /// It may be in the background when it ends.
        detached: bool,
        /// The evaluation begins in the background.
        background: bool,
    },
    /// Remove what the session defined.
    Reset,
    /// List what the session defined, in the package of that name if there is one.
    Definitions {
        /// Only these.
        only: Option<Item>,
        /// At most this many.
        limit: u64,
    },
    /// Say what the symbol in the text means.
    Describe {
        /// With the text of its definitions.
        source: bool,
    },
    /// Invoke a restart of the held evaluation: this number (from 1), or 0 for the name; the text has its arguments.
    InvokeRestart(u64),
    /// Show the local variables of `count` frames of the held evaluation, from frame `from` on.
    FrameLocals {
        /// The number of the first frame.
        from: u64,
        /// The number of frames.
        count: u32,
    },
    /// Evaluate the text in this frame of the held evaluation.
    EvalInFrame(u64),
    /// Return the values of the text from this frame of the held evaluation.
    ReturnFromFrame(u64),
    /// Call the function of this frame of the held evaluation again.
    RestartFrame(u64),
    /// Unwind the held evaluation.
    Release,
    /// Answer the query that the operation is.
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    Query,
    /// Start a thread that evaluates.
    StartThread,
    /// Have the thread of a job that does not react to being interrupted serve no lane any more.
    Abandon {
        /// The job.
        target: u64,
        /// Its lane. That for inspection gets another thread, or the job is refused.
        lane: Lane,
    },
    /// Tell whether an abandoned thread keeps others from going on.
    Look,
    /// Interrupt another job.
    Interrupt {
        /// The other job.
        target: u64,
        /// Why.
        reason: Interrupt,
    },
}

impl JobKind {
    /// True for what is asked of a held evaluation.
    pub(crate) fn concerns_held(self) -> bool {
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

/// One job, its texts in UTF-32 as Lisp takes them.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) kind: JobKind,
    /// The number of the evaluation that it belongs to; 0 for none.
    pub(crate) evaluation: u64,
    /// The number of the connection that it is done for.
    pub(crate) connection: u64,
    pub(crate) text: Vec<u32>,
    pub(crate) name: Vec<u32>,
    /// What is asked by name; empty for nothing.
    pub(crate) operation: Vec<u32>,
}

impl Job {
    /// One without texts.
    pub(crate) fn empty(id: u64, kind: JobKind, evaluation: u64) -> Self {
        Self { id, kind, evaluation, connection: 0, text: Vec::new(), name: Vec::new(), operation: Vec::new() }
    }

    /// The job in C's form. It points into `self`.
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
            JobKind::Definitions { only, limit } => {
                (sbcl_job_kind::SBCL_JOB_DEFINITIONS, only.map_or(0, item_code), limit)
            }
            JobKind::Describe { source } => {
                (sbcl_job_kind::SBCL_JOB_DESCRIBE, if source { bindings::SBCL_DESCRIBE_SOURCE } else { 0 }, 0)
            }
            JobKind::Query => (sbcl_job_kind::SBCL_JOB_QUERY, 0, 0),
            JobKind::StartThread => (sbcl_job_kind::SBCL_JOB_START_THREAD, 0, 0),
            JobKind::Abandon { target, lane } => (sbcl_job_kind::SBCL_JOB_ABANDON, lane.code(), target),
            JobKind::Look => (sbcl_job_kind::SBCL_JOB_LOOK, 0, 0),
            JobKind::Interrupt { target, reason } => (
                sbcl_job_kind::SBCL_JOB_INTERRUPT,
                match reason {
                    Interrupt::Timeout => sbcl_interrupt::SBCL_INTERRUPT_TIMEOUT,
                    Interrupt::Cancel => sbcl_interrupt::SBCL_INTERRUPT_CANCEL,
                    Interrupt::Heap => sbcl_interrupt::SBCL_INTERRUPT_HEAP,
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
        }
    }
}

/// Characters as Lisp holds them: code points, surrogates included. A Lisp thread may be writing there: each is read once,
/// and whatever it is then, it is taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text<'a>(pub(super) &'a [AtomicU32]);

impl Text<'_> {
    /// How many characters there are.
    pub(crate) fn len(self) -> usize {
        self.0.len()
    }

    /// Appends the first `count` characters to `target`; what is no Unicode scalar value becomes U+FFFD.
    pub(crate) fn append_to(self, target: &mut String, count: usize) {
        let characters = &self.0[..count.min(self.0.len())];
        target.reserve(characters.len());
        let character =
            |c: &AtomicU32| char::from_u32(c.load(Ordering::Relaxed)).unwrap_or(char::REPLACEMENT_CHARACTER);
        target.extend(characters.iter().map(character));
    }

    /// The whole as a string.
    pub(crate) fn to_owned(self) -> String {
        let mut string = String::new();
        self.append_to(&mut string, self.len());
        string
    }
}

/// What an item of an inspection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Item {
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

/// What a job reports. The names follow `enum sbcl_event`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event<'a> {
    Done {
        success: bool,
    },
    Stdout(Text<'a>),
    Stderr(Text<'a>),
    /// Its type, and the line of the code that it concerns, 0 if unknown.
    Warning(Text<'a>, u64),
    /// `again`: in place of what there is of it.
    WarningText {
        text: Text<'a>,
        again: bool,
    },
    /// `again`: in place of the one begun last.
    Value {
        again: bool,
    },
    ValueText(Text<'a>),
    /// Its type; `interrupts`: it came while the error before was being described.
    Error {
        kind: Text<'a>,
        interrupts: bool,
    },
    /// `again`: in place of what there is of it.
    ErrorText {
        text: Text<'a>,
        again: bool,
    },
    /// Its number, from 1, and its name.
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
    Item(Item, Text<'a>),
    ItemText(Text<'a>),
    Notice(Text<'a>),
    /// What the evaluation has defined, in words, for other connections; empty: asks whether there are any.
    Definitions(Text<'a>),
    /// Where the form begins; where it ends and its package.
    Defined(u64, Text<'a>),
    /// The form's number, and where it begins.
    Form(u64, Text<'a>),
    Slot(Text<'a>),
    SlotText(Text<'a>),
    /// The variable's name, and its `Validity`'s code.
    Local(Text<'a>, u64),
    LocalText(Text<'a>),
    /// `unchanged`: as it was before this job.
    Held {
        unchanged: bool,
    },
    Refused(Text<'a>),
    /// This job unwinds the held evaluation.
    Released,
    /// This thread, which evaluates, ends.
    ThreadEnded,
    /// No thread that evaluates could be started.
    ThreadRefused(Text<'a>),
    /// Asks whether the evaluation is still in the foreground, and has it stay there.
    Foreground,
    /// Asks whether more of the heap is kept than the job may keep. True when it is to be abandoned for that.
    Heap,
    /// The file of the warning begun last, empty for the code, and the column there, 0 if unknown.
    WarningPlace(Text<'a>, u64),
    /// What the form around the warning begun last is called.
    WarningForm(Text<'a>),
    /// The line of source at the frame begun last.
    FrameCode(Text<'a>),
    /// Whose machinery the frame begun last belongs to.
    FrameMachinery(Text<'a>),
    /// Its kind.
    Record(Text<'a>),
    /// Its name, and its value if no text follows.
    Field(Text<'a>, i64),
    FieldText(Text<'a>),
    /// Which of the errors that were told of where they were signalled, from 0, the job fails with.
    Unhandled(u64),
    /// What the job does from here on, empty for nothing in particular, and how many milliseconds that may take.
    Step(Text<'a>, u64),
    /// The interruption that was last sent to the job's thread begins to run there, or there is no such thread. Of the
    /// program's job: the call that it was to end.
    Interrupted(u64),
    /// The job, or that call, begins to unwind because it was interrupted.
    Unwinding(u64),
    /// Name of the SBCL lock that an abandoned thread holds while others wait for it; empty if there is none.
    Blocked(Text<'a>),
}

impl<'a> Event<'a> {
    /// Reads an event; `None` for a kind that the contract does not have.
    pub(super) fn from_raw(kind: u32, number: i64, text: Text<'a>) -> Option<Self> {
        let count = number.max(0).cast_unsigned();
        Some(match kind {
            sbcl_event::SBCL_EVENT_DONE => Self::Done { success: number == 0 },
            sbcl_event::SBCL_EVENT_STDOUT => Self::Stdout(text),
            sbcl_event::SBCL_EVENT_STDERR => Self::Stderr(text),
            sbcl_event::SBCL_EVENT_WARNING => Self::Warning(text, count),
            sbcl_event::SBCL_EVENT_WARNING_TEXT => Self::WarningText { text, again: number != 0 },
            sbcl_event::SBCL_EVENT_VALUE => Self::Value { again: number != 0 },
            sbcl_event::SBCL_EVENT_VALUE_TEXT => Self::ValueText(text),
            sbcl_event::SBCL_EVENT_ERROR => Self::Error { kind: text, interrupts: number == 1 },
            sbcl_event::SBCL_EVENT_ERROR_TEXT => Self::ErrorText { text, again: number != 0 },
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
            sbcl_event::SBCL_EVENT_THREAD_REFUSED => Self::ThreadRefused(text),
            sbcl_event::SBCL_EVENT_DEFINITIONS => Self::Definitions(text),
            sbcl_event::SBCL_EVENT_STEP => Self::Step(text, count),
            sbcl_event::SBCL_EVENT_INTERRUPTED => Self::Interrupted(count),
            sbcl_event::SBCL_EVENT_UNWINDING => Self::Unwinding(count),
            sbcl_event::SBCL_EVENT_BLOCKED => Self::Blocked(text),
            _ => return None,
        })
    }
}

/// The contract's items.
const ITEMS: [(Item, sbcl_item::Type); 10] = [
    (Item::Function, sbcl_item::SBCL_ITEM_FUNCTION),
    (Item::Variable, sbcl_item::SBCL_ITEM_VARIABLE),
    (Item::Macro, sbcl_item::SBCL_ITEM_MACRO),
    (Item::Class, sbcl_item::SBCL_ITEM_CLASS),
    (Item::Package, sbcl_item::SBCL_ITEM_PACKAGE),
    (Item::System, sbcl_item::SBCL_ITEM_SYSTEM),
    (Item::Role, sbcl_item::SBCL_ITEM_ROLE),
    (Item::Detail, sbcl_item::SBCL_ITEM_DETAIL),
    (Item::NotFound, sbcl_item::SBCL_ITEM_NOT_FOUND),
    (Item::More, sbcl_item::SBCL_ITEM_MORE),
];

fn item_code(item: Item) -> u32 {
    ITEMS.iter().find(|(known, _)| *known == item).map_or(0, |(_, code)| *code)
}

fn item_from_code(code: i64) -> Option<Item> {
    let code = u32::try_from(code).ok()?;
    ITEMS.iter().find(|(_, known)| *known == code).map(|(item, _)| *item)
}

/// The host's side of the contract. Called on Lisp threads, any of them at any time.
pub(crate) trait Host: Send + Sync + 'static {
    /// Waits for the lane's next job; `None` ends the thread, which has this number. `held`: it holds an evaluation, and this
    /// is the job that it did last.
    fn next_job(&self, lane: Lane, thread: u64, held: Option<u64>) -> Option<Job>;

    /// A thread that evaluates ends.
    fn thread_ended(&self, thread: u64);

    /// Takes an event of the job (0: of none in particular); `signalled`: of an error that the job may handle. True when
    /// no more of the text begun last is kept, or as the event says.
    fn event(&self, job: u64, signalled: bool, event: Event<'_>) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_character_is_replaced() {
        let codes = [u32::from('a'), 0, 0xd800, 0xdfff, 0x11_0000, u32::MAX, u32::from('λ')].map(AtomicU32::new);
        let text = Text(&codes);
        assert_eq!(text.to_owned(), "a\0\u{fffd}\u{fffd}\u{fffd}\u{fffd}λ");
        let mut start = "> ".to_owned();
        text.append_to(&mut start, 1);
        text.append_to(&mut start, 0);
        assert_eq!((start.as_str(), text.len()), ("> a", 7));
    }
}
