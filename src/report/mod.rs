//! Reports: outcomes as the text that a client reads.
//!
//! The functions here have no side effects. Output, messages and names from Lisp are escaped where they could be mistaken
//! for one of the report's own markers. Printed values of evaluations are not escaped.

#[cfg(feature = "mcp")]
mod calls;
mod errors;
mod escape;
mod evaluation;
mod evaluations;
mod finding;
mod fit;
mod frames;
mod listings;
mod load;
mod tests;

use std::fmt::Write as _;

use crate::outcome::{Clipped, ErrorRecord, FrameRecord};

#[cfg(feature = "mcp")]
pub(crate) use calls::{MAX_PROFILED_FUNCTIONS, MAX_RECORDED_CALLS, calls, max_calls_shown, profile};
pub(crate) use errors::signalled_error;
pub use errors::{FrameRange, backtrace, backtrace_with_locals, error_list, frames, last_error};
#[cfg(feature = "mcp")]
pub(crate) use errors::{error_id_line, live_frames, pending_cancellation, reports_pending_cancellation, time};
pub use escape::{escape_markers, escape_output, unescape_markers};
pub use evaluation::evaluation;
pub use evaluations::{EvaluationPart, Page, evaluation_page, evaluation_status};
pub use finding::{expansion, references_found, symbols_found};
#[cfg(feature = "mcp")]
pub(crate) use fit::with_brief_output;
pub use fit::{cut, fitted, fitted_error};
#[cfg(feature = "mcp")]
pub(crate) use frames::report_frames;
pub use listings::{definitions, limits, reset, symbol};
pub use tests::tests;
#[cfg(feature = "mcp")]
pub(crate) use tests::tests_ran;

pub use crate::outcome::DefinitionFilter;

/// Number of frames shown in [`last_error`].
pub(crate) const PREVIEW_FRAMES: usize = 5;
/// The line shown in place of frames when there are none.
const NO_FRAMES: &str = "0: (no frames available)";

/// Returns the marker that replaces cut text of `characters` characters.
#[must_use]
pub fn omission_marker(characters: u64) -> String {
    format!("[... {} omitted]", load::count_text(characters, "character"))
}

fn push_clipped(target: &mut String, clipped: &Clipped, escape: impl Fn(&str) -> String) {
    let text =
        if clipped.omitted == 0 { clipped.text.strip_suffix('\n').unwrap_or(&clipped.text) } else { &clipped.text };
    target.push_str(&escape(text));
    if clipped.omitted > 0 {
        target.push_str(&omission_marker(clipped.omitted));
    }
}

fn clipped_message(message: &Clipped) -> String {
    let mut text = String::new();
    push_clipped(&mut text, message, escape_output);
    text
}

/// Returns the frame's call with markers escaped.
fn call_text(frame: &FrameRecord) -> String {
    escape_markers(&frame.call)
}

/// Text in sections, with one blank line between them.
#[derive(Default)]
pub(crate) struct Sections(String);

impl Sections {
    /// Returns the text of all sections.
    #[cfg(feature = "mcp")]
    pub(crate) fn into_text(self) -> String {
        self.0
    }

    /// Begins a section and returns the string to which its text must be appended.
    pub(crate) fn begin(&mut self) -> &mut String {
        if !self.0.is_empty() {
            self.0.push_str("\n\n");
        }
        &mut self.0
    }

    /// Adds the section of notices, if there are any.
    pub(crate) fn push_notices(&mut self, notices: &[String]) {
        if !notices.is_empty() {
            let target = self.begin();
            target.push_str("[notice]");
            for notice in notices {
                // A notice may contain names from user code: further lines are indented, so that none reads as a notice
                // or a value.
                let notice = escape_markers(notice);
                for (index, line) in notice.lines().filter(|line| !line.trim().is_empty()).enumerate() {
                    target.push_str(if index == 0 { "\n" } else { "\n  " });
                    target.push_str(line);
                }
            }
        }
    }

    fn push_output(&mut self, marker: &str, text: &Clipped) {
        if !text.is_empty() {
            let target = self.begin();
            target.push_str(marker);
            target.push('\n');
            push_clipped(target, text, escape_output);
        }
    }
}

fn push_restarts(target: &mut String, error: &ErrorRecord) {
    if error.restarts.is_empty() {
        target.push_str("\n  (none)");
    }
    let mut next = 1;
    for restart in &error.restarts {
        if restart.number > next {
            let omitted = load::count_text(restart.number - next, "more restart");
            _ = write!(target, "\n  [... {omitted} omitted]");
        }
        next = restart.number + 1;
        let description = escape_markers(&restart.description).replace('\n', "\n     ");
        _ = write!(target, "\n  {}. {} - {description}", restart.number, escape_markers(&restart.name));
    }
}
