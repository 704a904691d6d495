//! Messages that a client sees after its image was replaced: the cause of the loss, and what was restored.

use std::sync::Arc;

use super::definitions::Unrestored;
use super::restore::Report;
use super::state::{CrashReport, RecoveryState, Resumed, Returned};
use crate::listed;
use crate::outcome::{Clipped, ErrorRecord, Outcome};
use crate::report;
use crate::result_kind::{CANCELLED, IMAGE_LOST};
use crate::session::recovery::failed;

/// Maximum number of unrestored forms that a message lists.
const NAMED: usize = 10;
/// Number of characters of a form that a message shows.
const SHOWN: usize = 100;

/// The messages for all clients.
#[derive(Debug)]
pub(crate) struct Messages {
    pub(crate) crash: Option<CrashReport>,
    /// The outcome of an evaluation that the replaced image did not finish.
    pub(crate) lost: Outcome,
    /// The client that requested this image, and its unseen notices.
    pub(crate) requested_by: u64,
    pub(crate) notices: Vec<String>,
    /// The message to the other clients about the reset or restore that requested this image.
    pub(crate) reset: Option<String>,
    /// The outcome of the restore that requested this image.
    pub(crate) returned: Option<Result<Returned, String>>,
    /// The message about a persistent session that a new server continues.
    pub(crate) resumed: Option<String>,
}

/// Returns the messages about the replaced image, once the new image has replayed its definitions.
pub(crate) fn messages(state: &RecoveryState, report: &Report) -> Messages {
    let replacement = state.replacement.as_ref();
    let returned = replacement.and_then(|replacement| replacement.returned.clone()).map(|returned| {
        if state.checkpoint().is_some_and(|booted| booted.file == returned.checkpoint.file) {
            return Ok(returned);
        }
        let restored = restored_since(state, report);
        Err(format!("The checkpoint {:?} did not come up. {restored}", returned.checkpoint.name))
    });
    let reset = replacement.filter(|_| state.crash.is_none()).map(|replacement| match &replacement.returned {
        Some(Returned { checkpoint, .. }) => {
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
        returned,
        resumed: state.resumed.as_ref().map(|which| resumed(which, state, report)),
    }
}

pub(crate) fn unrestored_line(unrestored: &Unrestored) -> String {
    format!("{} ({})", shortened(&unrestored.form.code), unrestored.reason)
}

fn push_unrestored(text: &mut String, unrestored: &[Unrestored]) {
    for one in unrestored.iter().take(NAMED) {
        *text += &format!("\n- {}", unrestored_line(one));
    }
    if unrestored.len() > NAMED {
        *text += &format!("\n- and {} more", unrestored.len() - NAMED);
    }
}

/// Returns the message about a persistent session that a new server continues.
fn resumed(resumed: &Resumed, state: &RecoveryState, report: &Report) -> String {
    let mut text = format!("The session {:?} goes on. ", resumed.session);
    if let Some(remark) = &resumed.remark {
        text += &format!("{remark} ");
    }
    text += &restored_since(state, report);
    // The save at the end of a server contains all values.
    if state.checkpoint().is_none_or(|checkpoint| !checkpoint.at_end) {
        text += &not_kept(state, ", threads and open files");
    }
    text
}

pub(crate) fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

/// Returns the outcome of an evaluation whose image was replaced by a reset.
pub(crate) fn replaced() -> Outcome {
    failed(CANCELLED, "The evaluation ended with its image, which a reset has replaced.".to_owned())
}

/// Returns the outcome of an evaluation that the last image did not finish.
fn lost_outcome(state: &RecoveryState, report: &Report) -> Outcome {
    let Some(crash) = &state.crash else {
        let returned = state.replacement.as_ref().is_some_and(|replacement| replacement.returned.is_some());
        let by = if returned { "a checkpoint" } else { "a reset" };
        return failed(CANCELLED, format!("The evaluation ended with its image, which {by} has replaced."));
    };
    let restored = restored(state, report, crash);
    let stuck = crash.stuck.as_deref().and_then(|outcome| Some((outcome, outcome.result.as_ref().err()?)));
    let Some((outcome, error)) = stuck else {
        return failed(IMAGE_LOST, format!("The Lisp image {}. {restored}", crash.cause));
    };
    let mut error = ErrorRecord::clone(error);
    let text = format!("{}.\nThe Lisp image {}. {restored}", error.what_happened(), crash.cause);
    error.message = Clipped::from(text);
    Outcome { result: Err(Arc::new(error)), ..outcome.clone() }
}

fn restored(state: &RecoveryState, report: &Report, crash: &CrashReport) -> String {
    let mut text = "A new image has taken its place.\n".to_owned();
    if state.definitions.is_none() {
        text += "Nothing was restored (--restore none): definitions, packages and values are gone; the limits stay.";
        return text;
    }
    text += &restored_since(state, report);
    let unfinished = match crash.background.len() + usize::from(crash.in_flight) {
        0 => ", threads and open files",
        1 => ", threads, open files, and what else the unfinished evaluation had done",
        _ => ", threads, open files, and what else the unfinished evaluations had done",
    };
    text + &not_kept(state, unfinished)
}

/// Returns the sentence about the values that a replay does not bring back, and about `others` that are gone.
fn not_kept(state: &RecoveryState, others: &str) -> String {
    let (values, hint) = match state.checkpoint() {
        Some(_) => ("Lost: values that were assigned since the checkpoint", ""),
        None => (
            "Not kept: values that were assigned after their definition",
            listed::with(&["checkpoint"], " (The tool checkpoint saves values, too.)"),
        ),
    };
    format!("\n{values}{others}.{hint}")
}

/// Describes the restored checkpoint, and the forms since that were replayed or not.
fn restored_since(state: &RecoveryState, report: &Report) -> String {
    let dropped = state.dropped();
    let failures = state.failures(&report.failed);
    let total = report.restored + failures.len() + dropped;
    let mut text = match state.checkpoint() {
        Some(checkpoint) => {
            let age = report::age(jiff::Timestamp::now().duration_since(checkpoint.saved));
            let since = match total {
                0 => ". Nothing was defined since.".to_owned(),
                1 if report.restored == 1 => " and the one form that defined something since.".to_owned(),
                _ if report.restored == total => format!(" and all {total} forms that defined something since."),
                _ => format!(" and {} of {total} forms that defined something since. Not restored:", report.restored),
            };
            format!(
                "Restored: the checkpoint {:?} of {age} ago (evaluation {}){since}",
                checkpoint.name, checkpoint.evaluation
            )
        }
        None => match total {
            0 => "There were no definitions to restore.".to_owned(),
            1 if report.restored == 1 => "Restored: the one form that defined something.".to_owned(),
            _ if report.restored == total => format!("Restored: all {total} forms that defined something."),
            _ => format!("Restored: {} of {total} forms that defined something. Not restored:", report.restored),
        },
    };
    push_unrestored(&mut text, &failures);
    if dropped > 0 {
        text += &format!("\n- the {dropped} oldest ones, for which there was no room");
    }
    if !state.unrestored.is_empty() {
        text += "\nNot restored earlier, and not defined again since:";
        push_unrestored(&mut text, &state.unrestored);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_told_in_sentences() {
        let stuck =
            failed("CANCELLED", "The evaluation was cancelled; what it had done by then stays done.".to_owned());
        let crash = CrashReport {
            cause: "did not react to being interrupted and was ended".to_owned(),
            in_flight: true,
            connection: 0,
            background: Vec::new(),
            stuck: Some(Box::new(stuck)),
            poisoned: Vec::new(),
        };
        let idle = CrashReport { in_flight: false, stuck: None, ..crash.clone() };
        let mut state = RecoveryState::new(true);
        state.crash = Some(idle);
        let error = lost_outcome(&state, &Report::default()).result.unwrap_err();
        let text = error.message.text.clone();
        assert!(
            text.contains("\nNot kept: values that were assigned after their definition, threads and open files. (")
        );
        state.crash = Some(crash);
        let error = lost_outcome(&state, &Report::default()).result.unwrap_err();
        assert_eq!(
            error.message.text,
            "The evaluation was cancelled.\nThe Lisp image did not react to being \
             interrupted and was ended. A new image has taken its place.\nThere were no definitions to restore.\nNot \
             kept: values that were assigned after their definition, threads, open files, and what else the unfinished \
             evaluation had done. (The tool checkpoint saves values, too.)"
        );
    }
}
