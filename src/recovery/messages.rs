//! Messages that a client sees after its image was replaced: the cause of the loss, and what was restored.

use std::sync::Arc;

use super::definitions::Unrestored;
use super::replay::ReplayReport;
use super::state::{CheckpointRestore, ContinuedSession, CrashReport, RecoveryState};
use super::text;
use crate::outcome::{Clipped, ErrorRecord, Outcome};
use crate::result_kind::{CANCELLED, IMAGE_LOST};
use crate::session::recovery::failed;
use crate::tool_names;

/// Maximum number of unrestored forms that a message lists.
const MAX_LISTED: usize = 10;
/// Maximum number of characters of a form that a message shows.
const MAX_SHOWN: usize = 100;

/// The messages about a replaced image, for all clients.
#[derive(Debug)]
pub(crate) struct Messages {
    /// The crash report, if the last image was lost.
    pub(crate) crash: Option<CrashReport>,
    /// The outcome of an evaluation that the replaced image did not finish.
    pub(crate) lost: Outcome,
    /// The connection of the client that requested this image; 0 if no client did.
    pub(crate) requested_by: u64,
    /// The notices of the replaced image that the requesting client has not seen yet.
    pub(crate) notices: Vec<String>,
    /// The message to the other clients about the reset or restore that requested this image.
    pub(crate) reset: Option<String>,
    /// The outcome of the restore that requested this image.
    pub(crate) restore: Option<Result<CheckpointRestore, String>>,
    /// The message about a persistent session that a new server continues.
    pub(crate) continued: Option<String>,
}

/// Returns the messages about the replaced image, once the new image has replayed its definitions.
pub(crate) fn messages(state: &RecoveryState, report: &ReplayReport) -> Messages {
    let replacement = state.replacement.as_ref();
    let restore = replacement.and_then(|replacement| replacement.restore.clone()).map(|restore| {
        if state.checkpoint().is_some_and(|booted| booted.file == restore.checkpoint.file) {
            return Ok(restore);
        }
        let restored = restored_since(state, report);
        Err(format!("The checkpoint {:?} did not boot. {restored}", restore.checkpoint.name))
    });
    let reset = replacement.filter(|_| state.crash.is_none()).map(|replacement| match &replacement.restore {
        Some(CheckpointRestore { checkpoint, .. }) => {
            format!("Another connection restored the checkpoint {:?}.", checkpoint.name)
        }
        None => "Another connection reset the session: all definitions are gone.".to_owned(),
    });
    Messages {
        crash: state.crash.clone(),
        lost: lost_outcome(state, report),
        requested_by: replacement.map_or(0, |replacement| replacement.client),
        notices: replacement.map_or(Vec::new(), |replacement| replacement.notices.clone()),
        reset,
        restore,
        continued: state.continued_session.as_ref().map(|session| continued_message(session, state, report)),
    }
}

/// Returns a line with an unrestored form, shortened, and the reason why it could not be restored.
pub(crate) fn unrestored_line(unrestored: &Unrestored) -> String {
    format!("{} ({})", shortened(&unrestored.form.code), unrestored.reason)
}

/// Appends a list of the first [`MAX_LISTED`] unrestored forms, and the number of the others.
fn push_unrestored(text: &mut String, unrestored: &[Unrestored]) {
    for form in unrestored.iter().take(MAX_LISTED) {
        *text += &format!("\n- {}", unrestored_line(form));
    }
    if unrestored.len() > MAX_LISTED {
        *text += &format!("\n- and {} more", unrestored.len() - MAX_LISTED);
    }
}

/// Returns the message about a persistent session that a new server continues.
fn continued_message(session: &ContinuedSession, state: &RecoveryState, report: &ReplayReport) -> String {
    let mut text = format!("The session {:?} continues. ", session.session);
    if let Some(remark) = &session.remark {
        text += &format!("{remark} ");
    }
    text += &restored_since(state, report);
    // A checkpoint that was saved at the end of the server contains all values.
    if state.checkpoint().is_none_or(|checkpoint| !checkpoint.at_end) {
        text += &not_kept(state, ", threads and open files");
    }
    text
}

/// Returns `text` as one line. A line of more than [`MAX_SHOWN`] characters is cut, and an ellipsis is appended.
pub(crate) fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_SHOWN) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

/// Returns the outcome of an evaluation whose image a reset has replaced.
pub(crate) fn outcome_after_reset() -> Outcome {
    failed(CANCELLED, "A reset replaced the image and ended the evaluation.".to_owned())
}

/// Returns the outcome of an evaluation that the last image did not finish.
fn lost_outcome(state: &RecoveryState, report: &ReplayReport) -> Outcome {
    let Some(crash) = &state.crash else {
        let is_restore = state.replacement.as_ref().is_some_and(|replacement| replacement.restore.is_some());
        let by = if is_restore { "Restoring a checkpoint" } else { "A reset" };
        return failed(CANCELLED, format!("{by} replaced the image and ended the evaluation."));
    };
    let restored = restored(state, report, crash);
    let stuck = crash.outcome.as_deref().and_then(|outcome| Some((outcome, outcome.result.as_ref().err()?)));
    let Some((outcome, error)) = stuck else {
        return failed(IMAGE_LOST, format!("The Lisp image {}. {restored}", crash.cause));
    };
    let mut error = ErrorRecord::clone(error);
    let text = format!("{}.\nThe Lisp image {}. {restored}", error.what_happened(), crash.cause);
    error.message = Clipped::from(text);
    Outcome { result: Err(Arc::new(error)), ..outcome.clone() }
}

/// Describes the definitions that the new image has restored after a crash, and the losses.
fn restored(state: &RecoveryState, report: &ReplayReport, crash: &CrashReport) -> String {
    let mut text = "A new image has replaced it.\n".to_owned();
    if state.definitions.is_none() {
        text += "Nothing was restored (--restore none): definitions, packages and values are gone; the limits are \
            kept.";
        return text;
    }
    text += &restored_since(state, report);
    let unfinished = match crash.background.len() + usize::from(crash.in_flight) {
        0 => ", threads and open files",
        1 => ", threads, open files, and other effects of the unfinished evaluation",
        _ => ", threads, open files, and other effects of the unfinished evaluations",
    };
    text + &not_kept(state, unfinished)
}

/// Returns the sentence about values that a replay does not restore. `others` continues the sentence's list, from a comma
/// on, with other things that are lost.
fn not_kept(state: &RecoveryState, others: &str) -> String {
    let (values, hint) = match state.checkpoint() {
        Some(_) => ("Lost: values that were assigned since the checkpoint", ""),
        None => (
            "Not kept: values that were assigned after their definition",
            tool_names::with(&["checkpoint"], " (The checkpoint tool also saves values.)"),
        ),
    };
    format!("\n{values}{others}.{hint}")
}

/// Describes the restored checkpoint and the definitions since the checkpoint: the number of replayed forms, and the missing
/// forms.
fn restored_since(state: &RecoveryState, report: &ReplayReport) -> String {
    let dropped = state.dropped();
    let failures = state.failures(&report.failed);
    let total = report.replayed + failures.len() + dropped;
    let mut text = match state.checkpoint() {
        Some(checkpoint) => {
            let age = text::age(jiff::Timestamp::now().duration_since(checkpoint.saved));
            let since = match total {
                0 => ". Nothing was defined since then.".to_owned(),
                1 if report.replayed == 1 => " and the one defining form since then.".to_owned(),
                _ if report.replayed == total => format!(" and all {total} defining forms since then."),
                _ => format!(" and {} of {total} defining forms since then. Not restored:", report.replayed),
            };
            format!(
                "Restored: the checkpoint {:?} of {age} ago (evaluation {}){since}",
                checkpoint.name, checkpoint.evaluation
            )
        }
        None => match total {
            0 => "There were no definitions to restore.".to_owned(),
            1 if report.replayed == 1 => "Restored: the one defining form.".to_owned(),
            _ if report.replayed == total => format!("Restored: all {total} defining forms."),
            _ => format!("Restored: {} of {total} defining forms. Not restored:", report.replayed),
        },
    };
    push_unrestored(&mut text, &failures);
    if dropped > 0 {
        text += &format!("\n- the {dropped} oldest forms, which were dropped to save space");
    }
    if !state.unrestored.is_empty() {
        text += "\nNot restored earlier and not redefined since:";
        push_unrestored(&mut text, &state.unrestored);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_message_says_what_happened_and_what_is_lost() {
        let stuck = failed(CANCELLED, "The evaluation was cancelled; changes it had already made remain.".to_owned());
        let crash = CrashReport {
            cause: "did not respond to an interrupt and was terminated".to_owned(),
            in_flight: true,
            connection: 0,
            background: Vec::new(),
            outcome: Some(Box::new(stuck)),
            poisoned: Vec::new(),
        };
        let idle = CrashReport { in_flight: false, outcome: None, ..crash.clone() };
        let mut state = RecoveryState::new(true);
        state.crash = Some(idle);
        let error = lost_outcome(&state, &ReplayReport::default()).result.unwrap_err();
        let text = error.message.text.clone();
        assert!(
            text.contains("\nNot kept: values that were assigned after their definition, threads and open files. (")
        );
        state.crash = Some(crash);
        let error = lost_outcome(&state, &ReplayReport::default()).result.unwrap_err();
        assert_eq!(
            error.message.text,
            "The evaluation was cancelled.\nThe Lisp image did not respond to an interrupt and was terminated. A new \
             image has replaced it.\nThere were no definitions to restore.\nNot kept: values that were assigned after \
             their definition, threads, open files, and other effects of the unfinished evaluation. (The checkpoint \
             tool also saves values.)"
        );
    }
}
