//! What the events of a job build up to, within the limits.

mod error;
mod inspection;
mod outcome;
mod text;

pub(crate) use error::Unbalanced;
pub(crate) use inspection::InspectionBuilder;
pub(crate) use outcome::OutcomeBuilder;
pub(crate) use text::{ClippedBuffer, beginning, on_one_line};

use crate::image::Interrupt;

/// How a job came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobEnd {
    /// Lisp did it.
    Succeeded,
    /// Lisp did not, and has said why, unless the thread was ended.
    Failed,
    /// It was interrupted, and did not succeed all the same.
    Interrupted(Interrupt),
    /// It was interrupted, did not react to that, and goes on for nobody.
    Abandoned(Interrupt),
    /// It was cancelled before it began.
    Withdrawn,
}
