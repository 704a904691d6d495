//! The command `sessions`, and the functions with which `serve --session` opens a session and saves it at the end.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Subcommand;

use super::arguments::RestoreMode;
use super::print_to_stderr;
use super::serve::wait_for_hang_up;
use crate::image::process::take_inherited_descriptor;
use crate::recovery::checkpoint::save::FinalSave;
use crate::recovery::checkpoint::store::{self, Draft, SaveDetails};
use crate::recovery::persistent::lock::{Holder, HolderState, Lock};
use crate::recovery::persistent::{NOT_SAVED, PersistentSession};
use crate::recovery::text;
use crate::rpc::attach::{self, RunningServer};
use crate::rpc::descriptors::to_private_number;

/// Maximum time to wait for the lock while another process saves the session.
const SAVE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time to wait for the lock while a server holds it, since the server may be about to end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between attempts to acquire the session's lock.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// An action on sessions.
#[derive(Debug, Subcommand)]
pub(super) enum Action {
    /// List sessions and running servers (the default).
    List,
    /// Delete a session that no process holds.
    Delete {
        /// Name of the session, or its directory (with a slash).
        name: OsString,
    },
    /// Write a session's definitions, in order, as Lisp that any SBCL can load.
    Export {
        /// Name of the session, or its directory (with a slash).
        name: OsString,
        /// File to write in place of stdout.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// Returns the list of running servers, one per line, for the end of the list of sessions. Empty if no server is running.
fn running_server_list(all: &[RunningServer]) -> String {
    let mut text = String::new();
    for RunningServer { name, pid, client, attached, refusal, .. } in all {
        if text.is_empty() {
            text += "\n\nRunning servers (attach with --attach=NAME):\n";
        }
        let client = client.as_deref().or(refusal.as_deref()).unwrap_or("no named client");
        let joined = if attached.is_empty() { String::new() } else { format!("; attached: {}", attached.join(", ")) };
        _ = writeln!(text, "{name}  process {pid}, {client}{joined}");
    }
    text
}

/// Runs the command. Returns the exit status, or a sentence that says what failed.
pub(super) fn run(action: Option<Action>, output: OwnedFd) -> Result<i32, String> {
    let text = match action {
        None | Some(Action::List) => {
            let (directory, all) = PersistentSession::all()?;
            if let Err(error) = attach::check_socket_directory() {
                print_to_stderr(&format!("sbcl-mcp sessions: the running servers cannot be listed: {error}"));
            }
            let all: Vec<_> = all.iter().map(PersistentSession::describe).collect();
            let sessions = text::session_list(&all, &directory);
            sessions.trim_end().to_owned() + &running_server_list(&attach::running_servers())
        }
        Some(Action::Delete { name }) => {
            let session = PersistentSession::named(&name)?;
            session.delete()?;
            format!("Deleted the session {:?}.", session.name)
        }
        Some(Action::Export { name, output: file }) => {
            let text = PersistentSession::named(&name)?.export()?;
            match file {
                None => text,
                Some(file) => {
                    fs::write(&file, text)
                        .map_err(|error| format!("sbcl-mcp cannot write {}: {error}", file.display()))?;
                    return Ok(0);
                }
            }
        }
    };
    let written = fs::File::from(output).write_all(format!("{}\n", text.trim_end()).as_bytes());
    written.map(|()| 0).map_err(|error| format!("sbcl-mcp cannot write to stdout: {error}"))
}

/// Opens a session and acquires its lock. Waits while the previous server still saves the session.
///
/// # Errors
/// Returns a sentence that says which process holds the session, or why the session cannot be used.
pub(super) fn open(name: &OsStr, restore: RestoreMode, input: &OwnedFd) -> Result<(PersistentSession, Lock), String> {
    if restore != RestoreMode::Checkpoint {
        return Err("--session always continues from the last checkpoint: omit --restore.".to_owned());
    }
    let session = PersistentSession::named(name)?;
    session.make_directory()?;
    let begin = Instant::now();
    let mut announced = false;
    loop {
        let attempt = Lock::try_acquire(session.directory()).map_err(|error| {
            format!(
                "The session {:?} cannot be used: its lock file in {} cannot be opened or locked: {error}.",
                session.name,
                session.directory().display()
            )
        });
        let holder = match attempt? {
            Ok(mut lock) => {
                lock.set_state(HolderState::Serving);
                report_save_errors(&session);
                return Ok((session, lock));
            }
            Err(holder) => holder,
        };
        if holder.is_ending() && !std::mem::replace(&mut announced, true) {
            print_to_stderr(&format!("The session {:?} is {holder}: waiting until the session is free.", session.name));
        }
        let timeout = if holder.is_ending() { SAVE_TIMEOUT } else { EXIT_TIMEOUT };
        if begin.elapsed() >= timeout {
            let advice = advice_while_held(&session.name, holder);
            return Err(format!("The session {:?} is {holder}. {advice}", session.name));
        }
        if wait_for_hang_up(input, Some(POLL_INTERVAL)) {
            return Err(format!(
                "The session {:?} is {holder}; the client disconnected before the session was free.",
                session.name
            ));
        }
    }
}

/// Returns what a person can do about `holder`, which holds the session `name`. Clients can attach only to a server that
/// has a socket, and not while the session is being saved.
fn advice_while_held(name: &str, holder: Holder) -> String {
    if holder.is_ending() {
        // The list has only the sessions in this user's directory for sessions, whose names contain no slash.
        let list = match name.contains('/') {
            true => "",
            false => "; `sbcl-mcp sessions` shows whether a process still holds the session",
        };
        return format!("Start the server again when the session is free{list}.");
    }
    let attach = match attach::socket_path(name) {
        Ok(path) if path.exists() => format!(", or attach to that server (sbcl-mcp repl --attach={name})"),
        _ => String::new(),
    };
    format!("A session can have only one server at a time: wait until that process has ended{attach}.")
}

/// Prints the messages of the session's last save on stderr, if there are any.
fn report_save_errors(session: &PersistentSession) {
    if let Some(text) = session.read_errors()
        && !text.trim().is_empty()
    {
        print_to_stderr(&format!(
            "Messages from the last save of the session {:?}:\n{}",
            session.name,
            text.trim_end()
        ));
    }
}

/// Returns the parameters for the final save of a worker's persistent session. Returns `None` if `lock_fd`, the descriptor
/// of the session's lock, is missing or cannot be used.
pub(super) fn final_save(lock_fd: Option<i32>, directory: &Path) -> Option<FinalSave> {
    // The lock's descriptor moves to a high number. Number 3 must stay free, because the saving process expects the lock
    // there.
    let lock = take_inherited_descriptor(lock_fd?).and_then(to_private_number).ok()?;
    Some(FinalSave { lock, directory: directory.to_owned() })
}

/// Waits until the child of this process has saved a core, and makes a checkpoint of the core. Runs as the last step of a
/// server with a persistent session. Returns a sentence if the session was not saved.
pub(super) fn finish_saving(draft: Draft, name: String, evaluation: u64) -> Result<(), String> {
    let lock = take_inherited_descriptor(3)
        .map_err(|error| format!("{NOT_SAVED}the saving process did not inherit the session's lock: {error}."))?;
    let mut lock = Lock::inherited(lock);
    lock.set_state(HolderState::Saving);
    let saved = draft.checkpoints().next_save_time();
    let (threads, timers) = (Vec::new(), 0);
    let made = SaveDetails { name, evaluation, saved, automatic: true, at_end: true, threads, timers };
    let checkpoints = draft.checkpoints().clone();
    draft.finish_only_child(made).map_err(|reason| format!("{NOT_SAVED}{reason}."))?;
    checkpoints.prune_automatic(store::KEPT_AUTOMATIC_CHECKPOINTS);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_sessions_is_suggested_only_for_a_session_that_it_contains() {
        let holder = Holder { pid: 0, state: HolderState::Saving };
        let advice = "Start the server again when the session is free";
        assert_eq!(advice_while_held("./work", holder), format!("{advice}."));
        assert_eq!(
            advice_while_held("work", holder),
            format!("{advice}; `sbcl-mcp sessions` shows whether a process still holds the session.")
        );
    }
}
