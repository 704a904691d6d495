//! Builders that make results from the events of a job, within the limits.

mod error;
mod inspection;
mod outcome;
mod text;

pub(crate) use error::UnbalancedText;
pub(crate) use inspection::InspectionBuilder;
pub(crate) use outcome::OutcomeBuilder;
pub(crate) use text::{ClippedBuffer, escape_line_breaks, first_chars};

use crate::image::Interrupt;

/// The way in which a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobEnd {
    /// Lisp completed the job.
    Succeeded,
    /// The job failed. Lisp has reported the error, unless the code ended the job's thread.
    Failed,
    /// The job was interrupted and did not succeed.
    Interrupted(Interrupt),
    /// The job ignored its interruption. It was answered, and may still run.
    Abandoned(Interrupt),
    /// The job was cancelled before it began.
    Withdrawn,
}
