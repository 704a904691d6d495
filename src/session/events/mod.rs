//! Builders that make the results of jobs from events, and cut each result to its size limits.

mod code;
mod error;
mod inspection;
mod outcome;
mod printed;
mod text;

pub(crate) use error::UnbalancedText;
pub(crate) use inspection::InspectionBuilder;
pub(crate) use outcome::{OutcomeBuilder, defining_form};
pub(crate) use printed::Printed;
pub(crate) use text::{
    ClippedBuffer, MAX_LOCATION, MAX_NOTICE_CHARS, clip_line, clip_name, clip_notice, first_chars, part,
};

use crate::error::InspectError;
use crate::image::InterruptReason;
use crate::image::interruption::StuckReason;
use crate::result_kind::HEAP_EXHAUSTED;
use crate::session::INSPECTION_TIMEOUT;

/// The way in which a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobEnd {
    /// Lisp completed the job.
    Succeeded,
    /// The job failed. Lisp has reported the error, unless the code ended the job's thread.
    Failed,
    /// The job was interrupted and did not succeed.
    Interrupted(InterruptReason),
    /// The job ignored its interruption. The job's client was answered, and the job may still run.
    Abandoned(InterruptReason, StuckReason),
    /// The job was cancelled before it began, or was answered early because its image will be replaced.
    Withdrawn,
}

impl JobEnd {
    /// Returns the error of an inspection that did not succeed. `reported` is the kind and the message of the error that
    /// Lisp reported.
    pub(crate) fn inspection_error(self, reported: Option<(String, String)>) -> InspectError {
        let lisp = |(kind, message)| InspectError::Lisp { kind, message };
        match self {
            Self::Interrupted(InterruptReason::Timeout) | Self::Abandoned(InterruptReason::Timeout, _) => {
                InspectError::Timeout(INSPECTION_TIMEOUT.as_secs())
            }
            Self::Interrupted(InterruptReason::Cancel)
            | Self::Abandoned(InterruptReason::Cancel, _)
            | Self::Withdrawn => InspectError::Cancelled,
            Self::Interrupted(InterruptReason::Heap) | Self::Abandoned(InterruptReason::Heap, _) => {
                lisp(reported.unwrap_or_else(|| {
                    (
                        HEAP_EXHAUSTED.to_owned(),
                        "The heap was nearly used up, so the request was stopped. Keep fewer objects, or start with \
                         a larger heap."
                            .to_owned(),
                    )
                }))
            }
            Self::Succeeded | Self::Failed => reported.map_or(InspectError::ThreadTerminated, lisp),
        }
    }
}
