//! What a job's events build up to, and who gets it.

use std::sync::Arc;
use std::time::Duration;

use super::Reply;
use super::events::{InspectionBuilder, OutcomeBuilder};
use super::hold::Resumed;
use super::operation::RecordsBuilder;
use crate::config::Limits;
use crate::error::{HoldError, InspectError};
use crate::image::Event;
use crate::outcome::{Definitions, Local, Outcome, Record, SymbolDescription};

/// What is made of a job's events, and whoever waits for it.
pub(super) enum PendingReply {
    /// Nobody waits.
    Nobody,
    /// An evaluation that has not begun.
    Submitted(Submission, Reply<Arc<Outcome>>),
    /// An evaluation.
    Evaluation(Box<OutcomeBuilder>, Reply<Arc<Outcome>>),
    /// A held evaluation that goes on, unless the restart was ABORT.
    Resumed(Box<OutcomeBuilder>, Reply<Result<Resumed, HoldError>>),
    /// An evaluation inside a held one.
    Inside(Box<OutcomeBuilder>, Reply<Result<Arc<Outcome>, HoldError>>),
    /// frame-locals.
    Locals(InspectionBuilder, Reply<Result<Vec<Local>, HoldError>>),
    /// abort-evaluation.
    Release(Reply<Result<(), HoldError>>),
    /// list-definitions.
    Definitions(InspectionBuilder, Reply<Result<Definitions, InspectError>>),
    /// describe-symbol.
    Symbol(InspectionBuilder, Reply<Result<SymbolDescription, InspectError>>),
    /// A query.
    Query(RecordsBuilder, Reply<Result<Vec<Record>, InspectError>>),
    /// reset-session.
    Reset(InspectionBuilder, Reply<Result<(), InspectError>>),
}

/// What an outcome is to be built for. The thread that evaluates makes the builder: what another thread has written comes
/// late to its processor.
pub(super) struct Submission {
    /// The evaluation's number; 0 for none.
    pub(super) number: u64,
    pub(super) code: Arc<str>,
    pub(super) limits: Limits,
    pub(super) timeout: Option<Duration>,
    pub(super) handled: HandledErrors,
}

/// What becomes of the errors that the code handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandledErrors {
    Ignored,
    Recorded,
    /// They are recorded for the records of an operation, which name them.
    InRecords,
}

impl Submission {
    fn builder(self) -> OutcomeBuilder {
        let mut builder = OutcomeBuilder::new(self.number, self.code, self.limits, self.timeout);
        match self.handled {
            HandledErrors::Ignored => {}
            HandledErrors::Recorded => builder.record_errors(),
            HandledErrors::InRecords => builder.errors_are_records(),
        }
        builder
    }
}

impl PendingReply {
    /// The outcome that is being built, of an evaluation.
    pub(super) fn outcome(&self) -> Option<&OutcomeBuilder> {
        match self {
            Self::Evaluation(builder, _) | Self::Resumed(builder, _) | Self::Inside(builder, _) => Some(builder),
            _ => None,
        }
    }

    /// What takes the job's events when that begins.
    pub(super) fn begun(self) -> Self {
        match self {
            Self::Submitted(submission, reply) => Self::Evaluation(Box::new(submission.builder()), reply),
            begun => begun,
        }
    }

    /// The same, to be changed.
    pub(super) fn outcome_mut(&mut self) -> Option<&mut OutcomeBuilder> {
        match self {
            Self::Evaluation(builder, _) | Self::Resumed(builder, _) | Self::Inside(builder, _) => Some(builder),
            _ => None,
        }
    }

    /// The number of the evaluation that this is, or goes on with.
    pub(super) fn evaluation(&self) -> Option<u64> {
        match self {
            Self::Submitted(submission, _) => Some(submission.number),
            _ => self.outcome().map(OutcomeBuilder::evaluation),
        }
    }

    /// Takes an event. True when no more of the text begun last is kept.
    pub(super) fn event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Nobody | Self::Submitted(..) | Self::Release(_) => false,
            Self::Evaluation(builder, _) | Self::Resumed(builder, _) | Self::Inside(builder, _) => builder.event(event),
            Self::Query(builder, _) => builder.event(event),
            Self::Definitions(builder, _)
            | Self::Symbol(builder, _)
            | Self::Locals(builder, _)
            | Self::Reset(builder, _) => builder.event(event),
        }
    }

    /// Takes an event of an error that the code may handle. Returns as [`event`](Self::event) does.
    pub(super) fn signalled(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Evaluation(builder, _) | Self::Resumed(builder, _) => builder.signalled(event),
            _ => false,
        }
    }
}
