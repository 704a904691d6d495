//! Text for people about checkpoints and persistent sessions.

use std::fmt::Write as _;

use super::checkpoint::store::Checkpoint;
use super::persistent::Description;
use crate::report::{Sections, escape_markers};

/// Returns a duration in a single unit: `40 seconds`, `3 minutes`.
#[must_use]
pub(crate) fn age(duration: jiff::SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    let (count, unit) = match seconds {
        0..100 => (seconds, "second"),
        100..6_000 => (seconds / 60, "minute"),
        6_000..200_000 => (seconds / 3_600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{count} {unit}{}", if count == 1 { "" } else { "s" })
}

/// Returns a size in megabytes, rounded up.
fn size(bytes: u64) -> String {
    format!("{} MB", bytes.div_ceil(1 << 20))
}

/// Returns the time since a checkpoint was saved.
fn since(checkpoint: &Checkpoint) -> String {
    age(jiff::Timestamp::now().duration_since(checkpoint.saved))
}

/// Returns a list of checkpoints, one per line.
pub(crate) fn checkpoints(all: &[Checkpoint]) -> String {
    if all.is_empty() {
        return "No checkpoints yet.".to_owned();
    }
    let mut text = String::new();
    for checkpoint in all {
        let Checkpoint { name, evaluation, bytes, .. } = checkpoint;
        let age = since(checkpoint);
        _ = writeln!(text, "{name:?}  evaluation {evaluation}, {age} ago, {}", size(*bytes));
    }
    text.truncate(text.trim_end().len());
    text
}

/// Returns a list of persistent sessions, one per line.
pub(crate) fn sessions(all: &[Description]) -> String {
    if all.is_empty() {
        return "No sessions yet: start one with sbcl-mcp --session NAME.".to_owned();
    }
    let width = all.iter().map(|session| session.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for session in all {
        let name = &session.name;
        let ago =
            session.changed.map_or_else(String::new, |at| age(jiff::Timestamp::now().duration_since(at)) + " ago, ");
        let defines = match &session.checkpoint {
            Some(checkpoint) if !checkpoint.defines.is_empty() => checkpoint.defines.clone(),
            Some(_) => "no definitions".to_owned(),
            None if session.forms == 1 => "1 defining form".to_owned(),
            None => format!("{} defining forms", session.forms),
        };
        let holder = session.holder.map_or_else(String::new, |holder| format!("; {holder}"));
        _ = writeln!(
            text,
            "{name:width$}  {}, {ago}evaluation {}: {defines}{holder}",
            size(session.bytes),
            session.evaluations
        );
    }
    text
}

/// Returns the report of a save. `stopped` is the pause of the session in microseconds. `threads` are the names of the
/// threads, and `timers` is the number of timers, that the checkpoint does not contain.
pub(crate) fn checkpoint_saved(checkpoint: &Checkpoint, stopped: u64, threads: &[String], timers: u64) -> String {
    let Checkpoint { name, evaluation, bytes, .. } = checkpoint;
    let mut text = format!(
        "Saved {name:?} (evaluation {evaluation}): {}. The session was paused for {} ms.\nNot included: ",
        size(*bytes),
        (stopped + 500) / 1_000
    );
    for thread in threads {
        _ = write!(text, "{}, ", escape_markers(&thread.replace('\n', "\\n")));
    }
    match timers {
        0 => {}
        1 => text += "1 timer, ",
        _ => _ = write!(text, "{timers} timers, "),
    }
    text + "sockets, open files, foreign memory, environment variables, the umask."
}

/// Returns the report of a restore, in which the session forgot `forgotten` evaluations.
pub(crate) fn checkpoint_restored(
    checkpoint: &Checkpoint,
    forgotten: u64,
    package: &str,
    notices: &[String],
) -> String {
    let mut sections = Sections::default();
    sections.notices(notices);
    let forgotten = match forgotten {
        0 => "Nothing was evaluated since then.".to_owned(),
        1 => "Forgotten: the evaluation since then.".to_owned(),
        _ => format!("Forgotten: the {forgotten} evaluations since then."),
    };
    let (name, evaluation, age) = (&checkpoint.name, checkpoint.evaluation, since(checkpoint));
    _ = write!(
        sections.begin(),
        "Restored {name:?} (evaluation {evaluation}, {age} ago). {forgotten}\nCurrent package: {package}"
    );
    sections.into_text()
}
