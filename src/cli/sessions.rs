//! Persistent sessions, on the command line: which there are, and what is done before one is served and after.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Subcommand;

use super::arguments::Restore;
use super::say;
use super::serve::has_hung_up;
use crate::image::process::inherited;
use crate::recovery::checkpoint::save::AtEnd;
use crate::recovery::checkpoint::store::{self, Draft, Made};
use crate::recovery::persistent::Durable;
use crate::recovery::persistent::lock::{Doing, Lock};
use crate::recovery::text;
use crate::rpc::attach::{self, Running};
use crate::rpc::descriptors::out_of_the_way;

/// How long a start waits for the process that saves the session, and for a server that may be about to end.
const SAVING: Duration = Duration::from_secs(60);
const ENDING: Duration = Duration::from_secs(1);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(20);

/// What to do with sessions.
#[derive(Debug, Subcommand)]
pub(super) enum Action {
    /// List them (what happens without a command).
    List,
    /// Delete one that nobody has, for good.
    Delete {
        /// Its name, or its directory, with a slash in it.
        name: OsString,
    },
    /// Write the definitions of one in their order, as Lisp that any SBCL loads.
    Export {
        /// Its name, or its directory, with a slash in it.
        name: OsString,
        /// The file to write, in place of stdout.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// The servers that can be joined, a line each, behind the sessions.
fn running(all: &[Running]) -> String {
    let mut text = String::new();
    for Running { name, pid, client, guests, refused, .. } in all {
        if text.is_empty() {
            text += "\n\nRunning, to be joined:\n";
        }
        let client = client.as_deref().or(refused.as_deref()).unwrap_or("no client yet");
        let joined = if guests.is_empty() { String::new() } else { format!("; joined: {}", guests.join(", ")) };
        _ = writeln!(text, "{name}  process {pid}, {client}{joined}");
    }
    text
}

/// Does it; returns the exit status, or a sentence that says why not.
pub(super) fn run(action: Option<Action>, output: OwnedFd) -> Result<i32, String> {
    let text = match action {
        None | Some(Action::List) => {
            let all: Vec<_> = Durable::all()?.iter().map(Durable::describe).collect();
            text::sessions(&all).trim_end().to_owned() + &running(&attach::running())
        }
        Some(Action::Delete { name }) => {
            let session = Durable::named(&name)?;
            session.delete()?;
            format!("Deleted {:?}.", session.name)
        }
        Some(Action::Export { name, output: file }) => {
            let text = Durable::named(&name)?.export()?;
            match file {
                None => text,
                Some(file) => {
                    fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
                    return Ok(0);
                }
            }
        }
    };
    let written = fs::File::from(output).write_all(format!("{}\n", text.trim_end()).as_bytes());
    written.map(|()| 0).map_err(|error| format!("sbcl-mcp cannot write: {error}"))
}

/// Takes a session for this process, when its server before has saved it.
///
/// # Errors
/// A sentence: who has it, or why it cannot be used.
pub(super) fn open(name: &OsStr, restore: Restore, input: &OwnedFd) -> Result<(Durable, Lock), String> {
    if restore != Restore::Checkpoint {
        return Err("--session goes on with the last checkpoint: it cannot be combined with --restore.".to_owned());
    }
    let durable = Durable::named(name)?;
    durable.make_directory()?;
    let begin = Instant::now();
    let mut said = false;
    loop {
        let taken = Lock::take(durable.directory());
        let holder = match taken.map_err(|error| format!("The session {:?} cannot be used: {error}.", durable.name))? {
            Ok(mut lock) => {
                lock.say(Doing::Serving);
                tell_errors(&durable);
                return Ok((durable, lock));
            }
            Err(holder) => holder,
        };
        if holder.is_ending() && !std::mem::replace(&mut said, true) {
            say(&format!("The session {:?} is {holder}: this server waits for it.", durable.name));
        }
        let patience = if holder.is_ending() { SAVING } else { ENDING };
        if begin.elapsed() >= patience {
            return Err(format!("The session {:?} is {holder}. A session has one server at a time.", durable.name));
        }
        if has_hung_up(input, Some(LOOK)) {
            return Err(format!("The session {:?} is {holder}, and the client is gone.", durable.name));
        }
    }
}

/// Says what went wrong when the session was saved last.
fn tell_errors(durable: &Durable) {
    let file = durable.errors_file();
    if let Ok(text) = fs::read_to_string(&file)
        && !text.trim().is_empty()
    {
        say(&format!("When the session {:?} was saved last:\n{}", durable.name, text.trim_end()));
    }
    let _ = fs::remove_file(file);
}

/// How a worker saves its session at the end, when it has one.
pub(super) fn at_end(lock_fd: Option<i32>, directory: &Path) -> Option<AtEnd> {
    // Out of the way of number 3, too, which it will have there.
    let lock = inherited(lock_fd?).and_then(out_of_the_way).ok()?;
    Some(at_end_with(lock, directory))
}

/// The same with this lock.
pub(super) fn at_end_with(lock: OwnedFd, directory: &Path) -> AtEnd {
    AtEnd { lock, errors: directory.join(crate::recovery::persistent::ERRORS) }
}

/// Makes a checkpoint of what this process' child saves: the last step of a server.
pub(super) fn finish_saving(draft: Draft, name: String, evaluation: u64) -> Result<(), String> {
    let lock = inherited(3).map_err(|error| format!("The session was not saved: its lock is not there: {error}."))?;
    let mut lock = Lock::inherited(lock);
    lock.say(Doing::Saving);
    let made = Made { name, evaluation, saved: jiff::Timestamp::now(), automatic: true, at_end: true };
    let checkpoints = draft.checkpoints().clone();
    draft.finish_only_child(made).map_err(|reason| format!("The session was not saved: {reason}."))?;
    checkpoints.keep_automatic(store::KEPT);
    Ok(())
}
