//! The activities of jobs: an activity owns the builder of a job's result, and the reply that gets the result.

use std::sync::Arc;
use std::time::Duration;

use super::Reply;
use super::events::{InspectionBuilder, JobEnd, OutcomeBuilder};
use super::hold::Resumed;
use super::operation::RecordsBuilder;
use super::post_processing::BoundPostProcessing;
use super::scheduler::Hold;
use crate::audience::Audience;
use crate::config::Limits;
use crate::error::{HoldEnd, HoldError, InspectError};
use crate::image::Event;
use crate::outcome::{Definitions, FrameLocals, Outcome, Record, SymbolDescription};

/// The content of a request that has not begun.
pub(super) enum RequestBody {
    /// An evaluation.
    Evaluate(Submission, Reply<Arc<Outcome>>),
    /// A request about a held evaluation.
    Held(HeldRequest),
    /// A query, or a reset.
    Inspect(Inspection),
    /// The host's own job for the control lane, for which no client waits.
    Control,
}

/// The data from which an evaluation's outcome builder is made. The evaluating thread makes the builder: memory that
/// another thread has just written is slow to read.
pub(super) struct Submission {
    /// The number of the evaluation; 0 for an evaluation without a number.
    pub(super) number: u64,
    pub(super) code: Arc<str>,
    pub(super) limits: Limits,
    pub(super) timeout: Option<Duration>,
    pub(super) handled: HandledErrors,
    /// True if the package is bound for this evaluation alone.
    pub(super) binds_package: bool,
    /// The post-processing, if there is any.
    pub(super) post_processing: Option<Box<BoundPostProcessing>>,
}

/// The treatment of errors that the code handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandledErrors {
    Ignored,
    Recorded,
    /// The errors are recorded for an operation, whose records refer to them.
    InRecords,
}

/// A request about a held evaluation.
pub(super) enum HeldRequest {
    /// Resume the evaluation, or abort it if the restart is `ABORT`.
    Resume(Box<OutcomeBuilder>, Reply<Result<Resumed, HoldError>>),
    /// Evaluate code in one of the evaluation's frames.
    Evaluate(Box<OutcomeBuilder>, Reply<Result<Arc<Outcome>, HoldError>>),
    /// Read the local variables of some frames.
    Locals(InspectionBuilder, Reply<Result<Vec<FrameLocals>, HoldError>>),
    /// Unwind the evaluation. The reply is `None` if the session itself requests the release.
    Release(Option<Reply<Result<(), HoldError>>>),
}

/// A query about the image, or the removal of the session's definitions.
pub(super) enum Inspection {
    /// The list of definitions, for the tool list-definitions.
    Definitions(InspectionBuilder, Reply<Result<Definitions, InspectError>>),
    /// The description of a symbol, for the tool describe-symbol.
    Symbol(InspectionBuilder, Reply<Result<SymbolDescription, InspectError>>),
    /// A query that Lisp knows by name.
    Query(RecordsBuilder, Reply<Result<Vec<Record>, InspectError>>),
    /// The removal of the session's definitions in this image, for `Session::reset`, which the tool reset-session calls
    /// only without a supervisor.
    Reset(InspectionBuilder, Reply<Result<(), InspectError>>),
}

/// The content of a job that Lisp has begun.
pub(super) enum Activity {
    Evaluate(EvaluationActivity),
    Held(Box<HeldActivity>),
    Inspect(Inspection),
}

/// A running evaluation.
pub(super) struct EvaluationActivity {
    pub(super) builder: Box<OutcomeBuilder>,
    pub(super) reply: Reply<Arc<Outcome>>,
    /// True if the package is bound for this evaluation alone.
    pub(super) binds_package: bool,
    /// The post-processing, if there is any.
    pub(super) post_processing: Option<Box<BoundPostProcessing>>,
    /// True once the evaluation has failed and is held.
    pub(super) held: bool,
}

/// A running request about a held evaluation.
pub(super) struct HeldActivity {
    /// The held evaluation; `None` if no evaluation is held.
    pub(super) hold: Option<Box<Hold>>,
    pub(super) request: HeldRequest,
    /// The builder that collects the output and the errors of the cleanup forms while the evaluation unwinds.
    pub(super) unwinding: Option<Box<OutcomeBuilder>>,
    /// Lisp's reason for refusing the request.
    pub(super) refused: Option<String>,
    pub(super) effect: HoldEffect,
}

/// The effect of a request on a held evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HoldEffect {
    /// The evaluation was resumed to its end, or released.
    Ended,
    /// The evaluation was resumed, failed again, and is held at the new failure.
    HeldAgain,
    /// The evaluation is held as before.
    Unchanged,
}

impl Submission {
    fn builder(self) -> OutcomeBuilder {
        let mut builder = OutcomeBuilder::new(self.number, self.code, self.limits, self.timeout);
        match self.handled {
            HandledErrors::Ignored => {}
            HandledErrors::Recorded => builder.record_errors(),
            HandledErrors::InRecords => builder.record_referenced_errors(),
        }
        builder
    }
}

impl RequestBody {
    /// Returns the number of the evaluation that this request begins or resumes.
    pub(super) fn evaluation(&self) -> Option<u64> {
        match self {
            Self::Evaluate(submission, _) => Some(submission.number),
            Self::Held(request) => request.outcome_builder().map(OutcomeBuilder::evaluation),
            Self::Inspect(_) | Self::Control => None,
        }
    }

    /// Makes an activity from the request. `hold` is the held evaluation that the request is about, and `audience` the
    /// audience of the request's messages. Returns `None` for a job of the control lane, which has no activity.
    pub(super) fn begin(self, hold: Option<Box<Hold>>, audience: Audience) -> Option<Activity> {
        let mut activity = match self {
            Self::Evaluate(mut submission, reply) => {
                let (binds_package, post_processing) = (submission.binds_package, submission.post_processing.take());
                Activity::Evaluate(EvaluationActivity {
                    builder: Box::new(submission.builder()),
                    reply,
                    binds_package,
                    post_processing,
                    held: false,
                })
            }
            Self::Held(request) => {
                let releases = matches!(request, HeldRequest::Release(_));
                let unwinding =
                    hold.as_ref().filter(|_| releases).map(|hold| Box::new(hold.builder.resumption_builder()));
                Activity::Held(Box::new(HeldActivity {
                    hold,
                    request,
                    unwinding,
                    refused: None,
                    effect: HoldEffect::Ended,
                }))
            }
            Self::Inspect(inspection) => Activity::Inspect(inspection),
            Self::Control => return None,
        };
        activity.builders().for_each(|builder| builder.set_audience(audience));
        Some(activity)
    }
}

impl HeldRequest {
    /// Returns true if the request is served within the held evaluation and leaves it held.
    pub(super) fn keeps_hold(&self) -> bool {
        matches!(self, Self::Evaluate(..) | Self::Locals(..))
    }

    /// Returns the outcome builder of a request to resume or to evaluate. The next image answers the request's
    /// call, so the reply is neither called nor dropped: dropping it would send an answer.
    pub(super) fn into_builder_without_reply(self) -> Option<Box<OutcomeBuilder>> {
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

    pub(super) fn outcome_builder(&self) -> Option<&OutcomeBuilder> {
        match self {
            Self::Resume(builder, _) | Self::Evaluate(builder, _) => Some(builder),
            Self::Locals(..) | Self::Release(_) => None,
        }
    }

    fn outcome_builder_mut(&mut self) -> Option<&mut OutcomeBuilder> {
        match self {
            Self::Resume(builder, _) | Self::Evaluate(builder, _) => Some(builder),
            Self::Locals(..) | Self::Release(_) => None,
        }
    }

    fn handle_event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Resume(builder, _) | Self::Evaluate(builder, _) => builder.handle_event(event),
            Self::Locals(builder, _) => builder.handle_event(event),
            Self::Release(_) => false,
        }
    }
}

impl Inspection {
    fn handle_event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Query(builder, _) => builder.handle_event(event),
            Self::Definitions(builder, _) | Self::Symbol(builder, _) | Self::Reset(builder, _) => {
                builder.handle_event(event)
            }
        }
    }
}

impl HeldActivity {
    /// Records that the held evaluation begins to unwind. From now on, the output and the errors of its cleanup
    /// forms are collected.
    pub(super) fn begin_unwinding(&mut self) {
        if let Some(builder) = self.request.outcome_builder_mut() {
            builder.renew_printed();
        }
        self.unwinding = self.hold.as_ref().map(|hold| Box::new(hold.builder.resumption_builder()));
    }

    /// Returns true if the request was to resume the evaluation, but the evaluation unwinds instead.
    pub(super) fn is_aborted(&self) -> bool {
        self.unwinding.is_some() && !matches!(self.request, HeldRequest::Release(_))
    }
}

impl Activity {
    /// Returns the builder of the evaluation's outcome, if the job evaluates code or resumes an evaluation.
    pub(super) fn outcome_builder(&self) -> Option<&OutcomeBuilder> {
        match self {
            Self::Evaluate(evaluate) => Some(&evaluate.builder),
            Self::Held(about) => about.request.outcome_builder(),
            Self::Inspect(_) => None,
        }
    }

    /// Returns the outcome builders that collect the job's events, with the current builder last.
    pub(super) fn builders(&mut self) -> impl Iterator<Item = &mut OutcomeBuilder> {
        let (builder, unwinding) = match self {
            Self::Evaluate(evaluate) => (Some(&mut *evaluate.builder), None),
            Self::Held(about) => (about.request.outcome_builder_mut(), about.unwinding.as_deref_mut()),
            Self::Inspect(_) => (None, None),
        };
        builder.into_iter().chain(unwinding)
    }

    /// Returns the builder that gets output and definitions now; `None` if these are not kept.
    pub(super) fn current_builder(&mut self) -> Option<&mut OutcomeBuilder> {
        self.builders().last()
    }

    /// Returns the held evaluation that this job is about, even while the job resumes the evaluation.
    pub(super) fn hold_mut(&mut self) -> Option<&mut Hold> {
        match self {
            Self::Held(about) => about.hold.as_deref_mut(),
            Self::Evaluate(_) | Self::Inspect(_) => None,
        }
    }

    /// Returns true if the package is bound for this evaluation alone.
    pub(super) fn binds_package(&self) -> bool {
        match self {
            Self::Evaluate(evaluate) => evaluate.binds_package,
            Self::Held(about) => about.hold.as_ref().is_some_and(|hold| hold.binds_package),
            Self::Inspect(_) => false,
        }
    }

    /// Returns false if the session itself requested the job: the release of a held evaluation. Returns true for any
    /// other job.
    pub(super) fn is_requested(&self) -> bool {
        !matches!(self, Self::Held(about) if matches!(about.request, HeldRequest::Release(None)))
    }

    /// Returns how the job, whose end is `end`, has ended the hold that it works on; `None` if the evaluation is held as
    /// before.
    pub(super) fn hold_end(&self, end: JobEnd) -> Option<HoldEnd> {
        let Self::Held(about) = self else { return None };
        Some(match about.request {
            _ if end == JobEnd::Withdrawn => HoldEnd::Released,
            _ if about.effect == HoldEffect::Unchanged => return None,
            HeldRequest::Release(None) => HoldEnd::Released,
            HeldRequest::Resume(..) if !about.is_aborted() => HoldEnd::Resumed,
            _ => HoldEnd::Aborted,
        })
    }

    /// Returns true while the job unwinds a held evaluation.
    pub(super) fn unwinds_held(&self) -> bool {
        matches!(self, Self::Held(about) if about.unwinding.is_some())
    }

    /// Handles an event. Returns true if Lisp may stop printing the text begun last.
    pub(super) fn handle_event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Evaluate(evaluate) => evaluate.builder.handle_event(event),
            Self::Held(about) => match &mut about.unwinding {
                Some(unwinding) => unwinding.handle_event(event),
                None => about.request.handle_event(event),
            },
            Self::Inspect(inspection) => inspection.handle_event(event),
        }
    }

    /// Handles an event about an error that the code may handle. Returns true if Lisp may stop printing the text begun
    /// last.
    pub(super) fn handle_signalled_event(&mut self, event: Event<'_>) -> bool {
        match self {
            Self::Evaluate(evaluate) => evaluate.builder.handle_signalled_event(event),
            Self::Held(about) => match &mut about.request {
                HeldRequest::Resume(builder, _) => builder.handle_signalled_event(event),
                _ => false,
            },
            Self::Inspect(_) => false,
        }
    }
}
