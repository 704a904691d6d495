//! What is told of the image before: how it was lost or replaced, and what of it is restored.

use std::sync::Arc;

use super::restoring::Report;
use super::worker::Returned;
use crate::handover::{CrashReport, Resumed, Unrestored, WorkerInit};
use crate::listed;
use crate::outcome::{Clipped, ErrorRecord, Outcome};
use crate::report;
use crate::session::recovery::failed;

/// Forms that a message names when they could not be restored.
const NAMED: usize = 10;
/// Characters of a form that a message shows.
const SHOWN: usize = 100;

/// What every connection is told of the image before.
#[derive(Debug)]
pub(super) struct Before {
    pub(super) crash: Option<CrashReport>,
    pub(super) lost: Outcome,
    /// Who asked for this image in place of that, and what it had to say to him yet.
    pub(super) reset_by: u64,
    pub(super) notices: Vec<String>,
    /// What the others are told of that.
    pub(super) reset: Option<String>,
    /// How the checkpoint is told of that the reset went back to.
    pub(super) returned: Option<Result<Returned, String>>,
    /// What is said of a session that goes on with another server.
    pub(super) resumed: Option<String>,
}

/// What is told of the image before.
pub(super) fn before(init: &WorkerInit, report: &Report) -> Before {
    let returned = init.returned.as_ref().map(|(checkpoint, forgotten)| {
        if init.checkpoint.as_ref().is_some_and(|base| base.file == checkpoint.file) {
            Ok(Returned { checkpoint: checkpoint.clone(), forgotten: *forgotten })
        } else {
            Err(format!("The checkpoint {:?} did not come up. {}", checkpoint.name, restored_since(init, report, &[])))
        }
    });
    let reset = init.reset.filter(|_| init.crash.is_none()).map(|_| match &init.returned {
        Some((checkpoint, _)) => format!("Another connection restored the checkpoint {:?}.", checkpoint.name),
        None => "Another connection reset the session: all definitions are gone.".to_owned(),
    });
    Before {
        crash: init.crash.clone(),
        lost: lost(init, report),
        reset_by: init.reset_by,
        notices: init.notices.clone(),
        reset,
        returned,
        resumed: init.resumed.as_ref().map(|which| resumed(which, init, report)),
    }
}

/// The forms that this image could not restore.
pub(super) fn failures(init: &WorkerInit, report: &Report) -> Vec<Unrestored> {
    let journal = init.journal.as_deref().unwrap_or_default();
    let deadly = init.crash.as_ref().map_or(&[][..], |crash| &crash.deadly).iter().cloned();
    let failed = report.failed.iter().map(|(index, reason)| Unrestored::new(&journal[*index], reason));
    deadly.chain(failed).collect()
}

pub(super) fn unrestored_line(unrestored: &Unrestored) -> String {
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

/// What is said of a session that goes on with another server.
fn resumed(resumed: &Resumed, init: &WorkerInit, report: &Report) -> String {
    let mut text = format!("The session {:?} goes on. ", resumed.session);
    if let Some(unusable) = &resumed.unusable {
        text += &format!("{unusable} ");
    }
    text + &restored_since(init, report, &[])
}

pub(super) fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

/// The outcome of an evaluation that has not begun in an image that is replaced.
pub(super) fn replaced() -> Outcome {
    failed("CANCELLED", "The evaluation ended with its image, which a reset has replaced.".to_owned())
}

/// What is said of an evaluation that the last image did not finish.
fn lost(init: &WorkerInit, report: &Report) -> Outcome {
    let Some(crash) = &init.crash else {
        let by = if init.returned.is_some() { "a checkpoint" } else { "a reset" };
        return failed("CANCELLED", format!("The evaluation ended with its image, which {by} has replaced."));
    };
    let restored = restored(init, report, crash);
    let stuck = crash.stuck.as_deref().and_then(|outcome| Some((outcome, outcome.result.as_ref().err()?)));
    let Some((outcome, error)) = stuck else {
        return failed("IMAGE-LOST", format!("The Lisp image {}. {restored}", crash.cause));
    };
    let mut error = ErrorRecord::clone(error);
    let text = format!("{}.\nThe Lisp image {}. {restored}", error.what_happened(), crash.cause);
    error.message = Clipped::from(text);
    Outcome { result: Err(Arc::new(error)), ..outcome.clone() }
}

fn restored(init: &WorkerInit, report: &Report, crash: &CrashReport) -> String {
    let mut text = "A new image has taken its place.\n".to_owned();
    if init.journal.is_none() {
        text += "Nothing was restored (--restore none): definitions, packages and values are gone; the limits stay.";
        return text;
    }
    text += &restored_since(init, report, &crash.deadly);
    let (values, hint) = match &init.checkpoint {
        Some(_) => ("\nLost: values that were assigned since the checkpoint", ""),
        None => (
            "\nNot kept: values that were assigned after their definition",
            listed::with(&["checkpoint"], " (The tool checkpoint saves values, too.)"),
        ),
    };
    let unfinished = match crash.background.len() + usize::from(crash.in_flight) {
        0 => ", threads and open files",
        1 => ", threads, open files, and what else the unfinished evaluation had done",
        _ => ", threads, open files, and what else the unfinished evaluations had done",
    };
    text + values + unfinished + "." + hint
}

/// What was restored: the checkpoint, and the forms since.
fn restored_since(init: &WorkerInit, report: &Report, deadly: &[Unrestored]) -> String {
    let journal = init.journal.as_deref().unwrap_or_default();
    let dropped = if init.checkpoint.is_some() { 0 } else { init.dropped };
    let total = journal.len() + deadly.len() + dropped;
    let mut text = match &init.checkpoint {
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
    push_unrestored(&mut text, &failures(init, report));
    if dropped > 0 {
        text += &format!("\n- the {dropped} oldest ones, for which there was no room");
    }
    if !init.unrestored.is_empty() {
        text += "\nNot restored earlier, and not defined again since:";
        push_unrestored(&mut text, &init.unrestored);
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
            deadly: Vec::new(),
        };
        let idle = CrashReport { in_flight: false, stuck: None, ..crash.clone() };
        let init = WorkerInit { journal: Some(Vec::new()), crash: Some(idle), ..WorkerInit::default() };
        let error = lost(&init, &Report::default()).result.unwrap_err();
        let text = error.message.text.clone();
        assert!(
            text.contains("\nNot kept: values that were assigned after their definition, threads and open files. (")
        );
        let init = WorkerInit { journal: Some(Vec::new()), crash: Some(crash), ..WorkerInit::default() };
        let error = lost(&init, &Report::default()).result.unwrap_err();
        assert_eq!(
            error.message.text,
            "The evaluation was cancelled.\nThe Lisp image did not react to being \
             interrupted and was ended. A new image has taken its place.\nThere were no definitions to restore.\nNot \
             kept: values that were assigned after their definition, threads, open files, and what else the unfinished \
             evaluation had done. (The tool checkpoint saves values, too.)"
        );
    }
}
