//! The frames in the report of a failed evaluation.
//!
//! Machinery is code, such as ASDF or the reader, that only leads to the user's code. Most machinery frames are left out.

use std::fmt::Write as _;

use super::escape::escape_markers;
use super::{NO_FRAMES, call_text};
use crate::outcome::{ErrorRecord, FrameRecord};
use crate::tool_names;

/// Maximum number of frames in the report of a failed evaluation.
const MAX_FRAMES: usize = 20;
/// Maximum depth of a stack of which all frames are kept: `+max-full-stack-depth+` in lisp/core/frames.lisp. Of a deeper
/// stack, half of this number of innermost frames and as many outermost frames are kept.
const MAX_FULL_STACK_DEPTH: u64 = 1000;
/// Number of frames shown from each run of consecutive frames that belong to the same machinery.
const MAX_MACHINERY_FRAMES: usize = 2;
/// Maximum length of the call of a machinery frame, in characters: enough for the name of the function.
const MAX_MACHINERY_CALL: usize = 60;

/// Returns the frames that the report of a failed evaluation shows. The boolean with a frame is true if the frame belongs
/// to a run of machinery frames of which the report shows only the first [`MAX_MACHINERY_FRAMES`].
pub(crate) fn report_frames(error: &ErrorRecord) -> impl Iterator<Item = (&FrameRecord, bool)> {
    let runs = error.frames.chunk_by(|a, b| a.machinery.is_some() && a.machinery == b.machinery);
    let shown = runs.flat_map(|run| {
        // Replacing a single frame by a line about the frame would save nothing.
        let folded = run[0].machinery.is_some() && run.len() > MAX_MACHINERY_FRAMES + 1;
        run.iter().take(if folded { MAX_MACHINERY_FRAMES } else { run.len() }).map(move |frame| (frame, folded))
    });
    shown.take(MAX_FRAMES)
}

/// Returns the number of the error's frames to keep for a report that shows at most `count` frames. Frames that the
/// report leaves out between the frames that it shows are counted, too.
pub(super) fn count_frames_to_keep(error: &ErrorRecord, count: usize) -> usize {
    let after = report_frames(error).nth(count).map_or(u64::MAX, |(frame, _)| frame.number);
    error.frames.partition_point(|frame| frame.number < after)
}

/// Appends the frames of a failed evaluation.
pub(super) fn push_frames(target: &mut String, error: &ErrorRecord) {
    let frames: Vec<_> = report_frames(error).collect();
    let last = error.frames.last().map_or(0, |frame| frame.number + 1);
    let mut next = 0;
    for (index, (frame, folded)) in frames.iter().enumerate() {
        let call = call_text(frame);
        _ = write!(target, "\n{}: {}", frame.number, if *folded { short_call(&call) } else { call });
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
        let (frames, them) = if more == 1 { ("frame", "it") } else { ("frames", "them") };
        _ = write!(target, "\n... {more} more {frames}");
        if let Some(command) = tool_names::name_of("get-backtrace") {
            if error.total_frames > MAX_FULL_STACK_DEPTH {
                let kept = MAX_FULL_STACK_DEPTH / 2;
                _ = write!(target, " ({command} shows the innermost {kept} and the outermost {kept} frames)");
            } else {
                _ = write!(target, " ({command} shows {them})");
            }
        }
    }
}

/// Returns the call of a machinery frame, shortened.
fn short_call(call: &str) -> String {
    match call.char_indices().nth(MAX_MACHINERY_CALL) {
        Some((end, _)) => format!("{}…", &call[..end]),
        None => call.to_owned(),
    }
}
