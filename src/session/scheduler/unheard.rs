//! Requests of somebody who does not listen, for the tests of the board.

use super::*;
use crate::config::Limits;
use crate::session::activity::{HandledErrors, Submission};
use crate::session::events::InspectionBuilder;

/// An evaluation that may be in the background, or is held where it fails.
pub(super) fn evaluation(detached: bool) -> JobKind {
    JobKind::Evaluate { timing: false, hold: !detached, record_errors: false, detached, background: false }
}

/// The question of a job of this kind.
fn asked(kind: JobKind) -> Asked {
    let blank = || Box::new(OutcomeBuilder::blank(0));
    match kind {
        JobKind::Evaluate { .. } => {
            let (limits, handled) = (Limits::default(), HandledErrors::Ignored);
            let submission =
                Submission { number: 0, code: "".into(), limits, timeout: None, handled, local: false, due: None };
            Asked::Evaluate(submission, Box::new(|_| ()))
        }
        JobKind::InvokeRestart(_) => Asked::Held(HeldRequest::Resume(blank(), Box::new(|_| ()))),
        JobKind::FrameLocals { .. } => Asked::Held(HeldRequest::Locals(InspectionBuilder::default(), Box::new(|_| ()))),
        JobKind::Release => Asked::Held(HeldRequest::Release(None)),
        _ => Asked::Inspect(Inspection::Reset(InspectionBuilder::default(), Box::new(|_| ()))),
    }
}

/// A request for a job of this kind.
pub(super) fn request(connection: &Arc<Connection>, id: u64, kind: JobKind) -> Request {
    Request::new(connection, Job::empty(id, kind, 0), None, asked(kind))
}

/// What releases what a connection holds.
pub(super) fn release(connection: &Arc<Connection>) -> Request {
    request(connection, 0, JobKind::Release)
}
