//! The frames of a failed evaluation's report.

use std::fmt::Write as _;

use super::escape::escape_markers;
use super::{NO_FRAMES, call};
use crate::outcome::{ErrorRecord, Frame};
use crate::tool_names;

/// Frames in the report of a failed evaluation.
const REPORT_FRAMES: usize = 20;
/// Frames of a machinery in it before the rest of them is folded.
const MACHINERY_FRAMES: usize = 2;
/// Characters of such a frame: enough for the function's name.
const MACHINERY_CALL: usize = 60;

/// The frames that the report of a failed evaluation shows: of a machinery's, the first ones; whether it leaves out the
/// others comes with each.
pub(crate) fn report_frames(error: &ErrorRecord) -> impl Iterator<Item = (&Frame, bool)> {
    let runs = error.frames.chunk_by(|a, b| a.machinery.is_some() && a.machinery == b.machinery);
    let shown = runs.flat_map(|run| {
        // To leave out a single one would save nothing.
        let folded = run[0].machinery.is_some() && run.len() > MACHINERY_FRAMES + 1;
        run.iter().take(if folded { MACHINERY_FRAMES } else { run.len() }).map(move |frame| (frame, folded))
    });
    shown.take(REPORT_FRAMES)
}

/// How many of the error's frames its report is made of when it shows at most `count`.
pub(super) fn frames_shown_by(error: &ErrorRecord, count: usize) -> usize {
    let after = report_frames(error).nth(count).map_or(u64::MAX, |(frame, _)| frame.number);
    error.frames.partition_point(|frame| frame.number < after)
}

/// Pushes the frames of a failed evaluation's report.
pub(super) fn push_frames(target: &mut String, error: &ErrorRecord) {
    let frames: Vec<_> = report_frames(error).collect();
    let last = error.frames.last().map_or(0, |frame| frame.number + 1);
    let mut next = 0;
    for (index, (frame, folded)) in frames.iter().enumerate() {
        let call = call(frame);
        _ = write!(target, "\n{}: {}", frame.number, if *folded { beginning(&call) } else { call });
        next = frame.number + 1;
        let (Some(name), true) = (&frame.machinery, *folded) else { continue };
        let after = frames.get(index + 1).map(|(after, _)| after);
        if after.is_none_or(|after| after.machinery.as_ref() != Some(name)) {
            let run = error.frames.iter().skip_while(|other| other.number < frame.number);
            let end = run.take_while(|other| other.machinery.as_ref() == Some(name)).last();
            let end = end.map_or(last, |end| end.number + 1);
            if end > next {
                _ = write!(target, "\n... {} frames of {}", end - next, escape_markers(name));
                next = end;
            }
        }
    }
    if error.frames.is_empty() {
        target.push('\n');
        target.push_str(NO_FRAMES);
    }
    let more = error.total_frames.saturating_sub(next);
    if more > 0 {
        _ = write!(
            target,
            "\n... {more} more frames{}",
            tool_names::with(&["get-backtrace"], " (get-backtrace shows them)")
        );
    }
}

/// What is shown of a machinery's frame.
fn beginning(call: &str) -> String {
    match call.char_indices().nth(MACHINERY_CALL) {
        Some((end, _)) => format!("{}…", &call[..end]),
        None => call.to_owned(),
    }
}
