//! Requests whose replies are ignored, for the tests of the scheduler.

use super::*;
use crate::config::Limits;
use crate::session::activity::{HandledErrors, Submission};
use crate::session::events::InspectionBuilder;
use crate::session::operation::RecordsBuilder;

/// Returns the job kind of an evaluation. A `detached` evaluation may be in the background; any other evaluation is held
/// if it fails.
pub(super) fn evaluation_kind(detached: bool) -> JobKind {
    JobKind::Evaluate { timing: false, hold: !detached, record_errors: false, detached, background: false }
}

/// Returns a request body that fits this kind of job.
fn body(kind: JobKind) -> RequestBody {
    let blank = || Box::new(OutcomeBuilder::blank(0));
    match kind {
        JobKind::Evaluate { .. } => {
            let (limits, handled) = (Limits::default(), HandledErrors::Ignored);
            let submission = Submission {
                number: 0,
                code: "".into(),
                limits,
                timeout: None,
                handled,
                binds_package: false,
                post_processing: None,
            };
            RequestBody::Evaluate(submission, Box::new(|_| ()))
        }
        JobKind::InvokeRestart(_) => RequestBody::Held(HeldRequest::Resume(blank(), Box::new(|_| ()))),
        JobKind::FrameLocals { .. } => {
            RequestBody::Held(HeldRequest::Locals(InspectionBuilder::default(), Box::new(|_| ())))
        }
        JobKind::Release => RequestBody::Held(HeldRequest::Release(None)),
        JobKind::Query => RequestBody::Inspect(Inspection::Query(RecordsBuilder::default(), Box::new(drop))),
        _ => RequestBody::Inspect(Inspection::Reset(InspectionBuilder::default(), Box::new(|_| ()))),
    }
}

/// Returns a request for a job of this kind. A query needs an idle session.
pub(super) fn request(connection: &Arc<Connection>, id: u64, kind: JobKind) -> Request {
    let request = Request::new(connection, Job::without_texts(id, kind, 0), None, body(kind));
    Request { needs_idle: kind == JobKind::Query, ..request }
}

/// Returns the request that releases the connection's held evaluation.
pub(super) fn release(connection: &Arc<Connection>) -> Request {
    request(connection, 0, JobKind::Release)
}
