//! The exit statuses of the program's commands.

use crate::image::heap::{LOST, LOST_TO_HEAP};
use crate::mcp::STANDSTILL;

/// The command did what was asked.
pub(super) const FINE: i32 = 0;
/// The code, the files, the tests or the answers are wrong; for a server, it could not start.
pub(super) const FAILED: i32 = 1;
/// The command line is wrong; `load` and `test` could not be tried.
pub(super) const UNTRIED: i32 = 2;
/// The command could not do what was asked: start, read its input, or write its result.
pub(super) const IMPOSSIBLE: i32 = 3;

/// An exit status of one command, as docs/reference/exit-statuses.md describes it.
#[derive(Debug, Clone, Copy)]
pub struct ExitStatus {
    /// The command.
    pub command: &'static str,
    /// The status.
    pub status: i32,
    /// The reason for the status.
    pub meaning: &'static str,
}

/// Describes statuses of one command.
macro_rules! statuses {
    ($($command:literal { $($status:expr => $meaning:literal,)+ })+) => {
        &[$($(ExitStatus { command: $command, status: $status, meaning: $meaning },)+)+]
    };
}

/// Every exit status of every command that users call.
pub const EXIT_STATUSES: &[ExitStatus] = statuses! {
    "serve" {
        FINE => "The client closed its end of the connection.",
        FAILED => "The server could not start, or images ended one after another without an answer in between.",
        UNTRIED => "The command line is wrong.",
        LOST => "With `--no-supervisor`: SBCL or foreign code gave up.",
        LOST_TO_HEAP => "With `--no-supervisor`: the heap was exhausted during a garbage collection.",
        STANDSTILL => "With `--no-supervisor`: an evaluation that cannot be interrupted kept everything else from going on.",
        128 + libc::SIGHUP => "The server got SIGHUP.",
        128 + libc::SIGINT => "The server got SIGINT.",
        128 + libc::SIGTERM => "The server got SIGTERM.",
    }
    "eval" {
        FINE => "The code was evaluated without an error.",
        FAILED => "The code failed.",
        UNTRIED => "The command line is wrong.",
        IMPOSSIBLE => "Lisp could not start, there is no server to attach to, or the report could not be written.",
    }
    "load" {
        FINE => "The system or file is loaded.",
        FAILED => "The system or file failed to load.",
        UNTRIED => "Loading could not be tried: no server to attach to, or a wrong command line.",
    }
    "test" {
        FINE => "All tests passed.",
        FAILED => "A test failed.",
        UNTRIED => "Tests could not be run: there are none, all are skipped, a system does not load, there is no server to \
                    attach to, or the command line is wrong. With several systems, one of them is enough.",
    }
    "repl" {
        FINE => "The REPL ended. From a pipe or a file: nothing failed.",
        FAILED => "From a pipe or a file: a form failed.",
        UNTRIED => "The command line is wrong.",
        IMPOSSIBLE => "There is no server.",
    }
    "sessions" {
        FINE => "Listed, deleted or exported.",
        FAILED => "The session does not exist, is in use, or cannot be read.",
        UNTRIED => "The command line is wrong.",
    }
    "doctor" {
        FINE => "Everything that the server needs works.",
        FAILED => "Something does not work; the output says what to do.",
        UNTRIED => "The command line is wrong.",
        IMPOSSIBLE => "The findings could not be written.",
    }
    "replay" {
        FINE => "All answers are the same as in the recording.",
        FAILED => "Some answers differ.",
        UNTRIED => "The command line is wrong.",
        IMPOSSIBLE => "The recording cannot be played.",
    }
    "check" {
        FINE => "The reader accepts every file. There may be notes.",
        FAILED => "The reader refuses a file.",
        UNTRIED => "The command line is wrong.",
        IMPOSSIBLE => "A file cannot be read or written.",
    }
};
