//! The job that a lane works on.

use std::time::Instant;

use super::builder::{InspectionBuilder, OutcomeBuilder};
use super::{Reply, Request};
use crate::error::InspectError;
use crate::image::{Event, Interrupt, Job, JobKind};
use crate::outcome::{Definition, Outcome, SymbolDescription};

/// What events build up to, and who gets it.
pub(super) enum Build {
    /// Nobody waits.
    Nothing,
    /// An evaluation.
    Outcome(Box<OutcomeBuilder>, Reply<Outcome>),
    /// list-definitions.
    Definitions(InspectionBuilder, Reply<Result<Vec<Definition>, InspectError>>),
    /// describe-symbol.
    Symbol(InspectionBuilder, Reply<Result<SymbolDescription, InspectError>>),
    /// reset-session.
    Reset(InspectionBuilder, Reply<Result<(), InspectError>>),
}

impl Build {
    /// Takes an event. True when no more of the text begun last is kept.
    pub(super) fn event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Nothing => false,
            Self::Outcome(builder, _) => builder.event(event),
            Self::Definitions(builder, _) | Self::Symbol(builder, _) | Self::Reset(builder, _) => {
                builder.event(event)
            }
        }
    }
}

/// A job in Lisp's hands.
pub(super) struct Running {
    pub(super) id: u64,
    pub(super) build: Build,
    /// When it is interrupted (again).
    pub(super) deadline: Option<Instant>,
    /// Why it was first interrupted.
    pub(super) interrupted: Option<Interrupt>,
}

impl Running {
    pub(super) fn new(request: Request, deadline: Option<Instant>) -> Self {
        Self { id: request.job.id, build: request.build, deadline, interrupted: None }
    }
}

impl Request {
    /// Moves the job out and leaves its number.
    pub(super) fn take_job(&mut self) -> Job {
        let empty = Job { id: self.job.id, kind: JobKind::Reset, text: Vec::new(), name: Vec::new() };
        std::mem::replace(&mut self.job, empty)
    }
}
