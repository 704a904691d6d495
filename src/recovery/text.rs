//! Text for people about checkpoints and persistent sessions.

use std::fmt::Write as _;
use std::path::Path;

use super::checkpoint::store::Checkpoint;
use super::persistent::SessionDescription;
use crate::report::{Sections, escape_markers};

/// Returns a duration as text in a single unit, such as `40 seconds` or `3 minutes`.
#[must_use]
pub(crate) fn format_age(duration: jiff::SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    let (count, unit) = match seconds {
        0..100 => (seconds, "second"),
        100..6_000 => (seconds / 60, "minute"),
        6_000..200_000 => (seconds / 3_600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{count} {unit}{}", if count == 1 { "" } else { "s" })
}

/// Describes the signal that killed a process, as in `signal 9 (SIGKILL: by a user, or by the system for lack of memory)`.
pub(crate) fn describe_signal(signal: i32) -> String {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
    let hint = match name {
        "SIGKILL" => ": by a user, or by the system for lack of memory",
        "SIGABRT" => ": foreign code or SBCL itself aborted",
        "SIGSEGV" | "SIGBUS" | "SIGILL" | "SIGFPE" => ": foreign code or corrupted memory",
        "SIGXFSZ" => ": a file exceeded the file size limit (ulimit -f)",
        _ => "",
    };
    format!("signal {signal} ({name}{hint})")
}

/// Returns a size as text in megabytes, rounded up.
fn format_megabytes(bytes: u64) -> String {
    format!("{} MB", bytes.div_ceil(1 << 20))
}

/// Returns the time since a checkpoint was saved, as text.
fn checkpoint_age(checkpoint: &Checkpoint) -> String {
    format_age(jiff::Timestamp::now().duration_since(checkpoint.saved))
}

/// Returns a list of checkpoints, one per line: the intact checkpoints, the damaged checkpoints, and then the checkpoints that
/// only another server can boot.
pub(crate) fn checkpoint_list(intact: &[Checkpoint], damaged: &[Checkpoint], foreign: &[Checkpoint]) -> String {
    if intact.is_empty() && damaged.is_empty() && foreign.is_empty() {
        return "No checkpoints.".to_owned();
    }
    let mut text = String::new();
    let intact = intact.iter().map(|checkpoint| (checkpoint, String::new()));
    let damaged =
        damaged.iter().map(|checkpoint| (checkpoint, "; damaged: can only be deleted or replaced".to_owned()));
    let foreign = foreign.iter().map(|checkpoint| (checkpoint, format!("; {}", checkpoint.foreign_reason())));
    for (checkpoint, state) in intact.chain(damaged).chain(foreign) {
        let Checkpoint { name, evaluation, bytes, .. } = checkpoint;
        let age = checkpoint_age(checkpoint);
        _ = writeln!(text, "{name:?}  evaluation {evaluation}, {age} ago, {}{state}", format_megabytes(*bytes));
    }
    text.truncate(text.trim_end().len());
    text
}

/// Returns a list of the persistent sessions in `directory`, one per line.
pub(crate) fn session_list(all: &[SessionDescription], directory: &Path) -> String {
    if all.is_empty() {
        return format!(
            "There are no persistent sessions in {}. `sbcl-mcp --session NAME` starts a server that creates one.",
            directory.display()
        );
    }
    let width = all.iter().map(|session| session.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for session in all {
        let name = &session.name;
        let ago = session
            .changed
            .map_or_else(String::new, |at| format_age(jiff::Timestamp::now().duration_since(at)) + " ago, ");
        let defines = match &session.checkpoint {
            Some(checkpoint) if !checkpoint.defines.is_empty() => checkpoint.defines.clone(),
            Some(_) if session.forms == 0 => "no definitions".to_owned(),
            // If the server was killed, forms may have been evaluated after the checkpoint was saved.
            _ if session.forms == 1 => "1 defining form".to_owned(),
            _ => format!("{} defining forms", session.forms),
        };
        let content = match &session.obstacle {
            Some(reason) => format!("cannot be opened: {reason}"),
            None => format!("evaluation {}: {defines}", session.evaluations),
        };
        let holder = session.holder.map_or_else(String::new, |holder| format!("; {holder}"));
        _ = writeln!(text, "{name:width$}  {}, {ago}{content}{holder}", format_megabytes(session.bytes));
    }
    text
}

/// Returns the report of a save, which paused the session for `pause_microseconds`. `threads` names the threads that the
/// checkpoint does not contain, and `timers` is the number of timers that it does not contain.
pub(crate) fn save_report(checkpoint: &Checkpoint, pause_microseconds: u64, threads: &[String], timers: u64) -> String {
    let Checkpoint { name, evaluation, bytes, .. } = checkpoint;
    let text = format!(
        "Saved {name:?} (evaluation {evaluation}): {}. The session was paused for {} ms.\nNot included: ",
        format_megabytes(*bytes),
        (pause_microseconds + 500) / 1_000
    );
    let mut missing = missing_parts(threads, timers);
    missing.push("sockets, open files, foreign memory, environment variables and the umask.".to_owned());
    text + &missing.join(", ")
}

/// Returns a phrase for each of the `threads` that an image lacks, and a phrase for the number of `timers` that it
/// lacks.
fn missing_parts(threads: &[String], timers: u64) -> Vec<String> {
    let timers = match timers {
        0 => None,
        1 => Some("1 timer".to_owned()),
        _ => Some(format!("{timers} timers")),
    };
    threads.iter().map(|thread| escape_markers(&thread.replace('\n', "\\n"))).chain(timers).collect()
}

/// Returns a sentence about the number of evaluations that a restore discarded.
pub(crate) fn discarded_evaluations(forgotten: u64) -> String {
    match forgotten {
        0 => "Nothing has been evaluated since.".to_owned(),
        1 => "Discarded: the evaluation since then.".to_owned(),
        _ => format!("Discarded: the {forgotten} evaluations since then."),
    }
}

/// Returns the report of a restore that discarded `forgotten` evaluations. The report names the threads and timers that
/// existed at the save, if they are known. `package` is the name of the current package, if it is known, and `notices` are put
/// before the report.
pub(crate) fn restore_report(
    checkpoint: &Checkpoint,
    forgotten: u64,
    package: Option<&str>,
    notices: &[String],
) -> String {
    let mut sections = Sections::default();
    sections.push_notices(notices);
    let forgotten = discarded_evaluations(forgotten);
    let (name, evaluation, age) = (&checkpoint.name, checkpoint.evaluation, checkpoint_age(checkpoint));
    let text = sections.begin();
    _ = write!(text, "Restored {name:?} (evaluation {evaluation}, {age} ago). {forgotten}");
    let missing = missing_parts(&checkpoint.threads, checkpoint.timers);
    if !missing.is_empty() {
        _ = write!(text, "\nNot restored: {}.", missing.join(", "));
    }
    if let Some(package) = package {
        _ = write!(text, "\nCurrent package: {package}");
    }
    sections.into_text()
}
