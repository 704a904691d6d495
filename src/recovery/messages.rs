//! Messages that a client sees after its image was replaced: why the image was replaced, and what was restored.

use std::sync::Arc;

use super::checkpoint::store::Checkpoint;
use super::definitions::UnrestoredForm;
use super::replay::ReplayReport;
use super::state::{CheckpointRestore, ContinuedSession, CrashReport, RecoveryState, RequestedRestore};
use super::text;
use crate::audience::Audience;
use crate::outcome::{Clipped, ErrorRecord, Outcome};
use crate::result_kind::{CANCELLED, IMAGE_LOST};
use crate::session::recovery::failed_outcome;
use crate::tool_names;

/// Maximum number of unrestored forms that a message lists.
const MAX_LISTED_FORMS: usize = 10;
/// Maximum number of characters of a form that a message shows.
const MAX_SHOWN_CHARS: usize = 100;

/// The messages about a replaced image, for all clients with one audience.
#[derive(Debug)]
pub(crate) struct ReplacementMessages {
    /// The crash report, if the last image was lost.
    pub(crate) crash: Option<CrashReport>,
    /// The outcome to report for the foreground evaluation that the replaced image did not finish.
    lost_foreground: Outcome,
    /// The outcome to report for any other call that the replaced image may have begun.
    pub(crate) lost_other: Outcome,
    /// The number of the requesting client's connection; 0 if no client requested the image.
    pub(crate) requested_by: u64,
    /// The notices of the replaced image that the requesting client has not seen yet.
    pub(crate) notices: Vec<String>,
    /// The message about the reset or restore that replaced the image, for all clients except the requesting client; `None`
    /// after a crash.
    pub(crate) reset: Option<String>,
    /// The requested restore if this image continues from its checkpoint, or else the message for the call that requested the
    /// restore. `None` if no restore was requested.
    pub(crate) restore: Option<Result<CheckpointRestore, String>>,
    /// The message about a persistent session that a new server continues.
    pub(crate) continued: Option<String>,
}

impl ReplacementMessages {
    /// Returns true if the foreground evaluation of this connection was lost with the image.
    pub(crate) fn has_lost_evaluation(&self, connection: u64) -> bool {
        self.crash.as_ref().is_some_and(|crash| crash.in_flight && crash.connection == connection)
    }

    /// Returns true if the call of this connection whose jobs begin at `job` requested the lost foreground evaluation, or
    /// may have requested it.
    pub(crate) fn is_lost_evaluation(&self, connection: u64, job: u64) -> bool {
        self.has_lost_evaluation(connection)
            && self.crash.as_ref().is_some_and(|crash| crash.job.is_none_or(|lost| lost == job))
    }

    /// Returns the outcome to report to this connection for its lost foreground evaluation, or else for any other call.
    pub(crate) fn lost_outcome(&self, connection: u64) -> &Outcome {
        if self.has_lost_evaluation(connection) { &self.lost_foreground } else { &self.lost_other }
    }

    /// Returns the outcome to report for the call of this connection whose jobs begin at `job`, which the replaced image may
    /// have begun. The call need not have requested the lost evaluation: it may have begun earlier and have been asking its
    /// user a question when the image was lost, or it may be a call in a batch that had begun.
    pub(crate) fn lost_outcome_of_call(&self, connection: u64, job: u64) -> &Outcome {
        if self.is_lost_evaluation(connection, job) { &self.lost_foreground } else { &self.lost_other }
    }
}

/// Returns the messages about the replaced image, for the audience of this thread's messages. `report` is the report of the
/// replay in the new image.
pub(crate) fn replacement_messages(state: &RecoveryState, report: &ReplayReport) -> ReplacementMessages {
    let replacement = state.replacement.as_ref();
    let restore = replacement.and_then(|replacement| replacement.restore.as_ref());
    let restore = restore.and_then(|restore| restore_outcome(state, report, restore));
    let reset = replacement.filter(|_| state.crash.is_none()).map(|_| match &restore {
        Some(Ok(CheckpointRestore { checkpoint, .. })) => {
            format!("Another client restored the checkpoint {:?}.", checkpoint.name)
        }
        Some(Err(reason)) => format!("Another client began to restore a checkpoint. {reason}"),
        None => "Another client reset the session: all definitions are gone.".to_owned(),
    });
    ReplacementMessages {
        crash: state.crash.clone(),
        lost_foreground: lost_outcome(state, report, true),
        lost_other: lost_outcome(state, report, false),
        requested_by: replacement.map_or(0, |replacement| replacement.client),
        notices: replacement.map_or(Vec::new(), |replacement| replacement.notices.clone()),
        reset,
        restore,
        continued: state.continued_session.as_ref().map(|session| continued_message(session, state, report)),
    }
}

/// Returns a requested restore if this image continues from its checkpoint, or else the message for the call that requested
/// the restore. Returns `None` for a pending restore, which no worker's state contains.
fn restore_outcome(
    state: &RecoveryState,
    report: &ReplayReport,
    restore: &RequestedRestore,
) -> Option<Result<CheckpointRestore, String>> {
    let begin = match restore {
        RequestedRestore::Pending { .. } => return None,
        RequestedRestore::Complete(restore) => {
            let CheckpointRestore { checkpoint: Checkpoint { name, file, .. }, .. } = restore;
            if state.checkpoint().is_some_and(|booted| booted.file == *file) {
                return Some(Ok(restore.clone()));
            }
            format!("The checkpoint {name:?} was restored, but the image was then lost.")
        }
        RequestedRestore::Failed { name, reason } => {
            let kept = if state.definitions.is_some() { ", and no definition was discarded" } else { "" };
            format!("The checkpoint {name:?} was not restored: {reason}. A new image continues the session{kept}.")
        }
    };
    Some(Err(format!("{begin}\n{}", describe_restored(state, report, None))))
}

/// Returns the notice about a requested restore. Only a client that has cancelled its call sees the notice: an answer to
/// the call says more.
pub(crate) fn restore_notice(outcome: &Result<CheckpointRestore, String>) -> String {
    match outcome {
        Ok(CheckpointRestore { checkpoint: Checkpoint { name, evaluation, .. }, forgotten }) => format!(
            "The checkpoint {name:?} (evaluation {evaluation}) was restored: the call was cancelled too late. {}",
            text::discarded_evaluations(*forgotten)
        ),
        Err(reason) => reason.clone(),
    }
}

/// Returns the notice about a save whose call was cancelled when the checkpoint was complete, or about to be complete.
pub(crate) fn late_save_notice(checkpoint: &Checkpoint) -> String {
    let Checkpoint { name, evaluation, .. } = checkpoint;
    format!("The checkpoint {name:?} (evaluation {evaluation}) was saved: the call was cancelled too late.")
}

/// Returns a line with an unrestored form, shortened, and the reason why it could not be restored.
pub(crate) fn unrestored_line(unrestored: &UnrestoredForm) -> String {
    format!("{} ({})", shortened(&unrestored.form.code), unrestored.reason)
}

/// Appends a list of the first [`MAX_LISTED_FORMS`] unrestored forms, and the number of further forms.
fn push_unrestored<'a>(text: &mut String, unrestored: impl ExactSizeIterator<Item = &'a UnrestoredForm>) {
    let count = unrestored.len();
    for form in unrestored.take(MAX_LISTED_FORMS) {
        *text += &format!("\n- {}", unrestored_line(form));
    }
    if count > MAX_LISTED_FORMS {
        *text += &format!("\n- and {} more", count - MAX_LISTED_FORMS);
    }
}

/// Returns the message about a persistent session that a new server continues.
fn continued_message(session: &ContinuedSession, state: &RecoveryState, report: &ReplayReport) -> String {
    let mut text = format!("The session {:?} continues. ", session.session);
    if let Some(remark) = &session.remark {
        text += &format!("{remark} ");
    }
    text += &describe_restored_checkpoint(state, report);
    // A checkpoint that was saved at the end of a server contains all values, unless a later server has evaluated something.
    let is_complete = |checkpoint: &Checkpoint| checkpoint.at_end && checkpoint.evaluation >= state.evaluations;
    if !state.checkpoint().is_some_and(is_complete) {
        text += &lost_values_sentence(state, None);
    }
    text
}

/// Returns `text` as one line. A line of more than [`MAX_SHOWN_CHARS`] characters is cut, and an ellipsis is appended.
pub(crate) fn shortened(text: &str) -> String {
    shortened_to(text, MAX_SHOWN_CHARS)
}

/// Returns `text` as one line. A line of more than `max` characters is cut, and an ellipsis is appended.
pub(crate) fn shortened_to(text: &str, max: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(max) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

/// Returns the outcome of a call whose image a reset has replaced. The call need not be an evaluation: it may be a save.
pub(crate) fn outcome_after_reset() -> Outcome {
    failed_outcome(CANCELLED, "A reset replaced the image and ended this call.".to_owned())
}

/// Returns the outcome of a call that had begun when another call of its batch replaced the image. The answers to a batch are
/// sent together, so the call may have ended.
pub(crate) fn outcome_lost_with_batch() -> Outcome {
    let text =
        "Another call of the same batch replaced the image. This call had begun; if it had ended, its result is lost.";
    failed_outcome(CANCELLED, text.to_owned())
}

/// Returns the outcome of a lost call of the tool `checkpoint`. The image may have been lost after the call had saved or
/// deleted the checkpoint and before the answer was sent.
pub(crate) fn lost_checkpoint_call(lost: Outcome) -> Outcome {
    let Err(error) = &lost.result else { return lost };
    let mut error = ErrorRecord::clone(error);
    error.message.text +=
        "\nIf this call was to save or delete a checkpoint, it may have done so: list the checkpoints.";
    Outcome { result: Err(Arc::new(error)), ..lost }
}

/// Returns the outcome of a call that the last image did not finish. `is_foreground` is true for the evaluation whose
/// outcome the crash report may contain.
fn lost_outcome(state: &RecoveryState, report: &ReplayReport, is_foreground: bool) -> Outcome {
    let Some(crash) = &state.crash else {
        let is_restore = state.replacement.as_ref().is_some_and(|replacement| replacement.restore.is_some());
        let by = if is_restore { "Restoring a checkpoint" } else { "A reset" };
        return failed_outcome(CANCELLED, format!("{by} replaced the image and ended this call."));
    };
    let effects = match crash.background.len() + usize::from(crash.in_flight) {
        0 => None,
        1 => Some("other effects of the unfinished evaluation"),
        _ => Some("other effects of the unfinished evaluations"),
    };
    let restored = format!("A new image has replaced the lost image.\n{}", describe_restored(state, report, effects));
    let outcome = crash.outcome.as_deref().filter(|_| is_foreground);
    let stuck = outcome.and_then(|outcome| Some((outcome, outcome.result.as_ref().err()?)));
    let Some((outcome, error)) = stuck else {
        return failed_outcome(IMAGE_LOST, format!("The Lisp image {}. {restored}", crash.cause));
    };
    let mut error = ErrorRecord::clone(error);
    let text = format!("{}.\nThe Lisp image {}. {restored}", error.message_clause(), crash.cause);
    error.message = Clipped::from(text);
    Outcome { result: Err(Arc::new(error)), ..outcome.clone() }
}

/// Describes the definitions that the new image has restored, the values that were lost, and the lost `effects`, if given.
fn describe_restored(state: &RecoveryState, report: &ReplayReport, effects: Option<&str>) -> String {
    if state.definitions.is_none() {
        return "Nothing was restored (--restore none): definitions, packages and values are gone; the limits are kept."
            .to_owned();
    }
    describe_restored_checkpoint(state, report) + &lost_values_sentence(state, effects)
}

/// Returns the sentence about threads, open files and values, which a replay does not restore, and about `effects`, if
/// given.
fn lost_values_sentence(state: &RecoveryState, effects: Option<&str>) -> String {
    let (lost, values, hint) = match state.checkpoint() {
        Some(_) => ("Lost", "values assigned to variables since the checkpoint", ""),
        None => (
            "Not kept",
            "values assigned to variables after their definitions",
            match Audience::current() {
                Audience::Repl => " (:checkpoint also saves values.)",
                _ => tool_names::if_usable(&["checkpoint"], " (The checkpoint tool also saves values.)"),
            },
        ),
    };
    match effects {
        None => format!("\n{lost}: threads, open files, and {values}.{hint}"),
        Some(effects) => format!("\n{lost}: threads, open files, {values}, and {effects}.{hint}"),
    }
}

/// Describes the restored checkpoint and the definitions since the checkpoint: the number of replayed forms, and the missing
/// forms.
fn describe_restored_checkpoint(state: &RecoveryState, report: &ReplayReport) -> String {
    let dropped = state.dropped_since_checkpoint();
    let failures = state.missing_forms(&report.failed);
    let total = report.replayed + failures.len() + dropped;
    let mut text = match state.checkpoint() {
        Some(checkpoint) => {
            let age = text::format_age(jiff::Timestamp::now().duration_since(checkpoint.saved));
            let since = match total {
                0 => ". There were no later definitions to restore.".to_owned(),
                1 if report.replayed == 1 => " and the one defining form since then.".to_owned(),
                1 => ". The one defining form since then was not restored:".to_owned(),
                _ if report.replayed == total => format!(" and all {total} defining forms since then."),
                _ => format!(" and {} of {total} defining forms since then. Not restored:", report.replayed),
            };
            format!(
                "Restored: the checkpoint {:?} from {age} ago (evaluation {}){since}",
                checkpoint.name, checkpoint.evaluation
            )
        }
        None => match total {
            0 => "There were no definitions to restore.".to_owned(),
            1 if report.replayed == 1 => "Restored: the one defining form.".to_owned(),
            1 => "The one defining form was not restored:".to_owned(),
            _ if report.replayed == total => format!("Restored: all {total} defining forms."),
            _ => format!("Restored: {} of {total} defining forms. Not restored:", report.replayed),
        },
    };
    push_unrestored(&mut text, failures.iter());
    if dropped > 0 {
        let forms = if dropped == 1 { "form" } else { "forms" };
        text += &format!("\n- {dropped} older {forms}, dropped to save space");
    }
    if !state.unrestored.is_empty() {
        text += "\nStill missing since an earlier restore:";
        push_unrestored(&mut text, state.unrestored.iter());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::state::Replacement;
    use crate::result_kind::TIMEOUT;

    #[test]
    fn a_crash_message_says_what_happened_and_what_is_lost() {
        let stuck = failed_outcome(CANCELLED, "The evaluation was cancelled".to_owned());
        let crash = CrashReport {
            cause: "did not respond to an interrupt and was terminated".to_owned(),
            in_flight: true,
            connection: 0,
            job: None,
            background: Vec::new(),
            outcome: Some(Box::new(stuck)),
            poisoned: Vec::new(),
        };
        let idle = CrashReport { in_flight: false, outcome: None, ..crash.clone() };
        let mut state = RecoveryState::new(true);
        state.crash = Some(idle);
        let error = lost_outcome(&state, &ReplayReport::default(), true).result.unwrap_err();
        let text = error.message.text.clone();
        assert!(
            text.contains(
                "\nNot kept: threads, open files, and values assigned to variables after their definitions. ("
            )
        );
        state.crash = Some(crash);
        let error = lost_outcome(&state, &ReplayReport::default(), true).result.unwrap_err();
        assert_eq!(
            error.message.text,
            "The evaluation was cancelled.\nThe Lisp image did not respond to an interrupt and was terminated. A new \
             image has replaced the lost image.\nThere were no definitions to restore.\nNot kept: threads, open files, \
             values assigned to variables after their definitions, and other effects of the unfinished evaluation. (The \
             checkpoint tool also saves values.)"
        );
    }

    #[test]
    fn the_message_about_a_failed_restore_says_that_no_definition_was_discarded() {
        let mut state = RecoveryState::new(true);
        let (name, reason) = ("x".to_owned(), "its file is missing".to_owned());
        let restore = Some(RequestedRestore::Failed { name, reason });
        state.replacement = Some(Replacement { job: 256, client: 0, notices: Vec::new(), restore });
        let message = |state: &RecoveryState, replayed| {
            let report = ReplayReport { replayed, ..ReplayReport::default() };
            let messages = replacement_messages(state, &report);
            let message = messages.restore.expect("a restore was requested").expect_err("the restore has failed");
            let expected = format!("Another client began to restore a checkpoint. {message}");
            assert_eq!(messages.reset, Some(expected));
            message
        };
        let values = "threads, open files, and values assigned to variables after their definitions. (The checkpoint tool \
            also saves values.)";
        assert_eq!(
            message(&state, 2),
            format!(
                "The checkpoint \"x\" was not restored: its file is missing. A new image continues the session, and no \
                 definition was discarded.\nRestored: all 2 defining forms.\nNot kept: {values}"
            )
        );
        state.definitions = None;
        assert_eq!(
            message(&state, 0),
            "The checkpoint \"x\" was not restored: its file is missing. A new image continues the session.\nNothing was \
             restored (--restore none): definitions, packages and values are gone; the limits are kept."
        );
    }

    #[test]
    fn a_lost_evaluations_output_and_error_are_reported_for_its_own_call_only() {
        let mut stuck = failed_outcome(TIMEOUT, "The evaluation did not finish.".to_owned());
        stuck.stdout = Clipped::from("secret".to_owned());
        let mut state = RecoveryState::new(true);
        state.crash = Some(CrashReport {
            cause: "did not respond to an interrupt and was terminated".to_owned(),
            in_flight: true,
            connection: 3,
            job: Some(512),
            background: Vec::new(),
            outcome: Some(Box::new(stuck)),
            poisoned: Vec::new(),
        });
        let messages = replacement_messages(&state, &ReplayReport::default());
        for own in [messages.lost_outcome(3), messages.lost_outcome_of_call(3, 512)] {
            assert_eq!((&*own.result.as_ref().unwrap_err().kind, &*own.stdout.text), (TIMEOUT, "secret"));
        }
        // The second outcome is of another call of the same client, for instance of a save.
        let others = [messages.lost_outcome(0), messages.lost_outcome_of_call(3, 256)];
        for other in others.into_iter().chain([messages.lost_outcome_of_call(0, 512)]) {
            let error = other.result.as_ref().unwrap_err();
            assert_eq!((&*error.kind, &*other.stdout.text), (IMAGE_LOST, ""));
            let begin = "The Lisp image did not respond to an interrupt and was terminated. A new";
            assert!(error.message.text.starts_with(begin));
        }
        // Without the number of the lost evaluation, its outcome may belong to any call of the client.
        state.crash.as_mut().unwrap().job = None;
        let messages = replacement_messages(&state, &ReplayReport::default());
        assert_eq!(messages.lost_outcome_of_call(3, 256).stdout.text, "secret");
    }
}
