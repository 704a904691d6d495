//! The activities of jobs. Each owns the builder of its result, and the reply that gets the result.

use std::sync::Arc;
use std::time::Duration;

use super::Reply;
use super::aftermath::Due;
use super::events::{InspectionBuilder, OutcomeBuilder};
use super::hold::Resumed;
use super::operation::RecordsBuilder;
use super::scheduler::Hold;
use crate::config::Limits;
use crate::error::{HoldError, InspectError};
use crate::image::Event;
use crate::outcome::{Definitions, FrameLocals, Outcome, Record, SymbolDescription};

/// What is asked of Lisp, before it has begun.
pub(super) enum Asked {
    /// An evaluation.
    Evaluate(Submission, Reply<Arc<Outcome>>),
    /// Something about what is held.
    Held(HeldRequest),
    /// A question, or a reset.
    Inspect(Inspection),
    /// Something of the host's own, for the control lane: nobody waits for it.
    Control,
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
    /// The package is to be bound for it alone.
    pub(super) local: bool,
    /// What is to be done after it.
    pub(super) due: Option<Box<Due>>,
}

/// What becomes of the errors that the code handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandledErrors {
    Ignored,
    Recorded,
    /// They are recorded for the records of an operation, which name them.
    InRecords,
}

/// What is asked about a held evaluation.
pub(super) enum HeldRequest {
    /// It is to go on, unless the restart is ABORT.
    Resume(Box<OutcomeBuilder>, Reply<Result<Resumed, HoldError>>),
    /// An evaluation inside it.
    Evaluate(Box<OutcomeBuilder>, Reply<Result<Arc<Outcome>, HoldError>>),
    /// The local variables of some frames.
    Locals(InspectionBuilder, Reply<Result<Vec<FrameLocals>, HoldError>>),
    /// It is to be unwound; the session may want that by itself.
    Release(Option<Reply<Result<(), HoldError>>>),
}

/// A question about the image, or its reset.
pub(super) enum Inspection {
    /// list-definitions.
    Definitions(InspectionBuilder, Reply<Result<Definitions, InspectError>>),
    /// describe-symbol.
    Symbol(InspectionBuilder, Reply<Result<SymbolDescription, InspectError>>),
    /// A query.
    Query(RecordsBuilder, Reply<Result<Vec<Record>, InspectError>>),
    /// reset-session.
    Reset(InspectionBuilder, Reply<Result<(), InspectError>>),
}

/// What a job does that is in Lisp's hands.
pub(super) enum Activity {
    Evaluate(Evaluate),
    Held(Box<AboutHeld>),
    Inspect(Inspection),
}

/// An evaluation that runs.
pub(super) struct Evaluate {
    pub(super) builder: Box<OutcomeBuilder>,
    pub(super) reply: Reply<Arc<Outcome>>,
    /// The package is bound for it alone.
    pub(super) local: bool,
    /// What is to be done after it.
    pub(super) due: Option<Box<Due>>,
    /// It has failed and is held.
    pub(super) held: bool,
}

/// What is being done about a held evaluation.
pub(super) struct AboutHeld {
    /// What is held; `None` where nothing is.
    pub(super) hold: Option<Box<Hold>>,
    pub(super) request: HeldRequest,
    /// What the cleanup forms print and fail with, once it is released.
    pub(super) unwinding: Option<Box<OutcomeBuilder>>,
    /// Why what was asked cannot be done.
    pub(super) refused: Option<String>,
    pub(super) then: Then,
}

/// What becomes of what is held by what is done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// It goes on, to its end.
    Over,
    /// It went on, failed again, and is held there.
    HeldAgain,
    /// It is held as it was.
    Unchanged,
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

impl Asked {
    /// The number of the evaluation that this is, or is in a held one.
    pub(super) fn evaluation(&self) -> Option<u64> {
        match self {
            Self::Evaluate(submission, _) => Some(submission.number),
            Self::Held(request) => request.outcome().map(OutcomeBuilder::evaluation),
            Self::Inspect(_) | Self::Control => None,
        }
    }

    /// What is done from here on, `hold` being what it is about; `None` for what nobody waits for.
    pub(super) fn begun(self, hold: Option<Box<Hold>>) -> Option<Activity> {
        Some(match self {
            Self::Evaluate(mut submission, reply) => {
                let (local, due) = (submission.local, submission.due.take());
                Activity::Evaluate(Evaluate { builder: Box::new(submission.builder()), reply, local, due, held: false })
            }
            Self::Held(request) => {
                let releases = matches!(request, HeldRequest::Release(_));
                let unwinding = hold.as_ref().filter(|_| releases).map(|hold| Box::new(hold.builder.anew()));
                Activity::Held(Box::new(AboutHeld { hold, request, unwinding, refused: None, then: Then::Over }))
            }
            Self::Inspect(inspection) => Activity::Inspect(inspection),
            Self::Control => return None,
        })
    }
}

impl HeldRequest {
    /// Returns true for what is done in the held evaluation and leaves it held.
    pub(super) fn leaves_it_held(&self) -> bool {
        matches!(self, Self::Evaluate(..) | Self::Locals(..))
    }

    /// The builder of an evaluation that the next image answers: its reply is never called.
    pub(super) fn leave_to_the_next_image(self) -> Option<Box<OutcomeBuilder>> {
        match self {
            Self::Resume(builder, reply) => {
                std::mem::forget(reply);
                Some(builder)
            }
            Self::Evaluate(builder, reply) => {
                std::mem::forget(reply);
                Some(builder)
            }
            Self::Locals(..) | Self::Release(_) => None,
        }
    }

    pub(super) fn outcome(&self) -> Option<&OutcomeBuilder> {
        match self {
            Self::Resume(builder, _) | Self::Evaluate(builder, _) => Some(builder),
            Self::Locals(..) | Self::Release(_) => None,
        }
    }

    fn outcome_mut(&mut self) -> Option<&mut OutcomeBuilder> {
        match self {
            Self::Resume(builder, _) | Self::Evaluate(builder, _) => Some(builder),
            Self::Locals(..) | Self::Release(_) => None,
        }
    }

    fn event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Resume(builder, _) | Self::Evaluate(builder, _) => builder.event(event),
            Self::Locals(builder, _) => builder.event(event),
            Self::Release(_) => false,
        }
    }
}

impl Inspection {
    fn event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Query(builder, _) => builder.event(event),
            Self::Definitions(builder, _) | Self::Symbol(builder, _) | Self::Reset(builder, _) => builder.event(event),
        }
    }
}

impl AboutHeld {
    /// It is being unwound from here on.
    pub(super) fn release(&mut self) {
        self.unwinding = self.hold.as_ref().map(|hold| Box::new(hold.builder.anew()));
    }

    /// True for what was to go on and is being unwound instead.
    pub(super) fn is_aborted(&self) -> bool {
        self.unwinding.is_some() && !matches!(self.request, HeldRequest::Release(_))
    }
}

impl Activity {
    /// The outcome that is being built, of an evaluation.
    pub(super) fn outcome(&self) -> Option<&OutcomeBuilder> {
        match self {
            Self::Evaluate(evaluate) => Some(&evaluate.builder),
            Self::Held(about) => about.request.outcome(),
            Self::Inspect(_) => None,
        }
    }

    /// The builders of what its events come to.
    pub(super) fn builders(&mut self) -> impl Iterator<Item = &mut OutcomeBuilder> {
        let (builder, unwinding) = match self {
            Self::Evaluate(evaluate) => (Some(&mut *evaluate.builder), None),
            Self::Held(about) => (about.request.outcome_mut(), about.unwinding.as_deref_mut()),
            Self::Inspect(_) => (None, None),
        };
        builder.into_iter().chain(unwinding)
    }

    /// The builder of what the code prints and defines now, if that is kept.
    pub(super) fn current_builder(&mut self) -> Option<&mut OutcomeBuilder> {
        self.builders().last()
    }

    /// The evaluation that it is about, while that is held or goes on.
    pub(super) fn hold_mut(&mut self) -> Option<&mut Hold> {
        match self {
            Self::Held(about) => about.hold.as_deref_mut(),
            Self::Evaluate(_) | Self::Inspect(_) => None,
        }
    }

    /// True when the package is bound for it alone.
    pub(super) fn is_local(&self) -> bool {
        match self {
            Self::Evaluate(evaluate) => evaluate.local,
            Self::Held(about) => about.hold.as_ref().is_some_and(|hold| hold.local),
            Self::Inspect(_) => false,
        }
    }

    /// True when it was asked for, by a client or a program.
    pub(super) fn is_asked_for(&self) -> bool {
        !matches!(self, Self::Held(about) if matches!(about.request, HeldRequest::Release(None)))
    }

    /// True when what is held goes on by it, or is unwound.
    pub(super) fn moves_held(&self) -> bool {
        matches!(
            self,
            Self::Held(about) if about.then != Then::Unchanged
                && matches!(about.request, HeldRequest::Resume(..) | HeldRequest::Release(_))
        )
    }

    /// True while it unwinds what was held.
    pub(super) fn unwinds_held(&self) -> bool {
        matches!(self, Self::Held(about) if about.unwinding.is_some())
    }

    /// Takes an event. True when no more of the text begun last is kept.
    pub(super) fn event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Evaluate(evaluate) => evaluate.builder.event(event),
            Self::Held(about) => match &mut about.unwinding {
                Some(unwinding) => unwinding.event(event),
                None => about.request.event(event),
            },
            Self::Inspect(inspection) => inspection.event(event),
        }
    }

    /// Takes an event of an error that the code may handle. Returns as [`event`](Self::event) does.
    pub(super) fn signalled(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Evaluate(evaluate) => evaluate.builder.signalled(event),
            Self::Held(about) => match &mut about.request {
                HeldRequest::Resume(builder, _) => builder.signalled(event),
                _ => false,
            },
            Self::Inspect(_) => false,
        }
    }
}
