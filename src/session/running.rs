//! The job that a lane works on.

use std::time::Instant;

use super::builder::{InspectionBuilder, OutcomeBuilder};
use super::operation::RecordsBuilder;
use super::watch::INTERRUPTION_GRACE;
use super::{Answer, Reply, Request};
use crate::error::{HoldError, InspectError};
use crate::image::{self, Event, Interrupt, Job, JobKind};
use crate::outcome::{DefiningForm, Definitions, Local, Outcome, Record, SymbolDescription};

/// What events build up to, and who gets it.
pub(super) enum Build {
    /// Nobody waits.
    Nothing,
    /// An evaluation.
    Outcome(Box<OutcomeBuilder>, Reply<Outcome>),
    /// A held evaluation that goes on, unless the restart was ABORT.
    Resumed(Box<OutcomeBuilder>, Reply<Result<Option<Outcome>, HoldError>>),
    /// An evaluation inside a held one.
    Inside(Box<OutcomeBuilder>, Reply<Result<Outcome, HoldError>>),
    /// frame-locals.
    Locals(InspectionBuilder, Reply<Result<Vec<Local>, HoldError>>),
    /// abort-evaluation.
    Release(Reply<Result<(), HoldError>>),
    /// list-definitions.
    Definitions(InspectionBuilder, Reply<Result<Definitions, InspectError>>),
    /// describe-symbol.
    Symbol(InspectionBuilder, Reply<Result<SymbolDescription, InspectError>>),
    /// A query.
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    Query(RecordsBuilder, Reply<Result<Vec<Record>, InspectError>>),
    /// reset-session.
    Reset(InspectionBuilder, Reply<Result<(), InspectError>>),
}

impl Build {
    /// What was printed so far, as far as it is kept.
    pub(super) fn stdout(&self) -> &str {
        match self {
            Self::Outcome(builder, _) => builder.stdout(),
            Self::Resumed(builder, _) => builder.stdout(),
            Self::Inside(builder, _) => builder.stdout(),
            _ => "",
        }
    }

    /// What was said so far of how far it is, in lines.
    #[cfg(feature = "mcp")]
    pub(super) fn progress(&self) -> String {
        match self {
            Self::Outcome(builder, _) => builder.progress(),
            Self::Resumed(builder, _) => builder.progress(),
            _ => String::new(),
        }
    }

    /// Takes an event. True when no more of the text begun last is kept.
    pub(super) fn event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Nothing | Self::Release(_) => false,
            Self::Outcome(builder, _) => builder.event(event),
            Self::Resumed(builder, _) => builder.event(event),
            Self::Inside(builder, _) => builder.event(event),
            Self::Query(builder, _) => builder.event(event),
            Self::Definitions(builder, _)
            | Self::Symbol(builder, _)
            | Self::Locals(builder, _)
            | Self::Reset(builder, _) => builder.event(event),
        }
    }
}

impl Build {
    /// Takes an event of an error that the code may handle. Returns as [`event`](Self::event) does.
    pub(super) fn signalled(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Outcome(builder, _) => builder.signalled(event),
            Self::Resumed(builder, _) => builder.signalled(event),
            _ => false,
        }
    }

    /// The number of the evaluation that this is, or goes on with.
    pub(super) fn evaluation(&self) -> Option<u64> {
        match self {
            Self::Outcome(builder, _) => Some(builder.evaluation()),
            Self::Resumed(builder, _) => Some(builder.evaluation()),
            Self::Inside(builder, _) => Some(builder.evaluation()),
            _ => None,
        }
    }

    /// True for what the inspection lane answers.
    pub(super) fn is_inspection(&self) -> bool {
        matches!(self, Self::Definitions(..) | Self::Symbol(..) | Self::Query(..))
    }

    /// The last form of the evaluation that defined something.
    pub(super) fn last_defined(&self) -> Option<&DefiningForm> {
        match self {
            Self::Outcome(builder, _) => builder.last_defined(),
            Self::Resumed(builder, _) => builder.last_defined(),
            Self::Inside(builder, _) => builder.last_defined(),
            _ => None,
        }
    }
}

/// A job in Lisp's hands.
pub(super) struct Running {
    pub(super) id: u64,
    /// The evaluation that it belongs to; 0 for none.
    pub(super) evaluation: u64,
    pub(super) build: Build,
    /// When it is interrupted (again).
    pub(super) deadline: Option<Instant>,
    /// How much of the heap it may keep, in bytes.
    pub(super) heap_limit: Option<usize>,
    /// It was interrupted because it keeps more.
    pub(super) filled_heap: bool,
    /// Why it was first interrupted.
    pub(super) interrupted: Option<Interrupt>,
    /// When that was.
    pub(super) interrupted_at: Option<Instant>,
    /// When garbage was last seen being collected after that.
    pub(super) collected_at: Option<Instant>,
    /// When it is over, an evaluation is held.
    pub(super) holds: bool,
    /// It is held as it was before this job.
    pub(super) unchanged: bool,
    /// It unwinds what was held.
    pub(super) released: bool,
    /// What the cleanup forms of that print and fail with.
    pub(super) unwinding: Option<Box<OutcomeBuilder>>,
    /// Why what was asked cannot be done.
    pub(super) refused: Option<String>,
    /// Questions about the error state, which wait for its end because it was cancelled.
    pub(super) settled: Vec<Answer>,
}

impl Running {
    pub(super) fn new(request: Request, deadline: Option<Instant>) -> Self {
        Self {
            id: request.job.id,
            evaluation: request.job.evaluation,
            build: request.build,
            deadline,
            heap_limit: None,
            filled_heap: false,
            interrupted: None,
            interrupted_at: None,
            collected_at: None,
            holds: false,
            unchanged: false,
            released: false,
            unwinding: None,
            refused: None,
            settled: Vec::new(),
        }
    }

    /// True when the heap is fuller than this job may leave it.
    pub(super) fn fills_heap(&self) -> bool {
        let (Some(limit), Some(usage)) = (self.heap_limit, image::heap::usage()) else { return false };
        usage.kept > limit || usage.used > limit + usage.size / 4
    }

    /// The questions that wait for its end, when that is long overdue and nobody else replaces the image.
    pub(super) fn unsettled(&mut self, now: Instant) -> Option<Vec<Answer>> {
        let overdue = self.interrupted_at? + INTERRUPTION_GRACE <= now;
        overdue.then(|| std::mem::take(&mut self.settled))
    }

    /// Sees whether the job is to be abandoned for the heap. One that was interrupted for it may go on if it is not.
    pub(super) fn judge_heap(&mut self) -> bool {
        let full = self.fills_heap();
        if full {
            self.interrupted.get_or_insert(Interrupt::Heap);
            self.interrupted_at.get_or_insert_with(Instant::now);
        } else if self.filled_heap && self.interrupted == Some(Interrupt::Heap) {
            (self.interrupted, self.interrupted_at, self.collected_at) = (None, None, None);
        }
        self.filled_heap = full;
        full
    }
}

impl Request {
    /// Moves the job out and leaves its number.
    pub(super) fn take_job(&mut self) -> Job {
        let Job { id, evaluation, .. } = self.job;
        let empty =
            Job { id, kind: JobKind::Reset, evaluation, text: Vec::new(), name: Vec::new(), operation: Vec::new() };
        std::mem::replace(&mut self.job, empty)
    }
}
