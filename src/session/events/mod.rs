//! Builders that make the results of jobs from events, and cut each result to its size limits.

mod error;
mod inspection;
mod outcome;
mod text;

pub(crate) use error::UnbalancedText;
pub(crate) use inspection::InspectionBuilder;
pub(crate) use outcome::OutcomeBuilder;
pub(crate) use text::{ClippedBuffer, escape_line_breaks, first_chars};

use crate::image::InterruptReason;

/// The way in which a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobEnd {
    /// Lisp completed the job.
    Succeeded,
    /// The job failed. Lisp has reported the error, unless the code ended the job's thread.
    Failed,
    /// The job was interrupted and did not succeed.
    Interrupted(InterruptReason),
    /// The job ignored its interruption. Its client was answered, and the job may still run.
    Abandoned(InterruptReason),
    /// The job was cancelled before it began, or was answered early because its image will be replaced.
    Withdrawn,
}
