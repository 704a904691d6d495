//! The exit statuses of the program's commands. [`EXIT_STATUSES`] has the exact meaning of each status of each command.

use crate::image::heap::{EXIT_HEAP_EXHAUSTED, EXIT_IMAGE_LOST};
use crate::mcp::EXIT_STUCK;

/// Status of a command that succeeded.
pub(super) const SUCCEEDED: i32 = 0;
/// Status for errors in the code, files, tests, checks or answers, and for a `serve` or `sessions` that failed.
pub(super) const FAILED: i32 = 1;
/// Status for a wrong command line or a refused request, for a `load` or `test` that got no answer or could not print
/// the answer, and for a `test` whose tests could not be run.
pub(super) const NOT_TRIED: i32 = 2;
/// Status of an `eval`, `repl`, `doctor`, `replay` or `check` that could not start, read its input, or write its result.
pub(super) const CANNOT_RUN: i32 = 3;

/// A row of the table in docs/reference/exit-statuses.md: an exit status of one command.
#[derive(Debug, Clone, Copy)]
pub struct ExitStatus {
    /// The command.
    pub command: &'static str,
    /// The status.
    pub status: i32,
    /// The outcomes that the status stands for.
    pub meaning: &'static str,
}

/// Expands to a slice of [`ExitStatus`] records, one for each status of each command.
macro_rules! statuses {
    ($($command:literal { $($status:expr => $meaning:literal,)+ })+) => {
        &[$($(ExitStatus { command: $command, status: $status, meaning: $meaning },)+)+]
    };
}

/// Every exit status of every command that users call.
pub const EXIT_STATUSES: &[ExitStatus] = statuses! {
    "serve" {
        SUCCEEDED => "The client closed its end of the connection.",
        FAILED => "The server could not start or could not replace a lost image, or the image crashed repeatedly \
                    without answering a request.",
        NOT_TRIED => "The command line is wrong.",
        EXIT_IMAGE_LOST => "With `--no-supervisor`: SBCL or foreign code aborted.",
        EXIT_HEAP_EXHAUSTED => "With `--no-supervisor`: SBCL could not continue because the heap was full.",
        EXIT_STUCK => "With `--no-supervisor`: an evaluation or inspection that cannot be interrupted blocked the \
                    server, or more than four of them ran at once.",
        128 + libc::SIGHUP => "The server received SIGHUP.",
        128 + libc::SIGINT => "The server received SIGINT.",
        128 + libc::SIGTERM => "The server received SIGTERM.",
    }
    "eval" {
        SUCCEEDED => "The code was evaluated without an error.",
        FAILED => "The code failed.",
        NOT_TRIED => "The command line is wrong, or the server refused the request.",
        CANNOT_RUN => "Lisp could not start, no server could be attached to, the server ended or did not answer, or \
                    stdin or stdout failed.",
        EXIT_IMAGE_LOST => "Without `--attach`: SBCL or foreign code aborted.",
        EXIT_HEAP_EXHAUSTED => "Without `--attach`: SBCL could not continue because the heap was full.",
    }
    "load" {
        SUCCEEDED => "The system or file is loaded.",
        FAILED => "The system or file failed to load.",
        NOT_TRIED => "No server could be started or attached to, the server ended, did not answer or refused the request, \
                    stdout failed, or the command line is wrong.",
    }
    "test" {
        SUCCEEDED => "Tests passed, and none failed; some may have been skipped.",
        FAILED => "A test failed.",
        NOT_TRIED => "There are no tests, all tests are skipped, a system does not load, Lisp crashed, no server could \
                    be started or attached to, the server ended, did not answer or refused the request, stdout \
                    failed, or the command line is wrong. With several systems: one system does not load or has no \
                    tests, or no test failed and one system has only skipped tests.",
    }
    "repl" {
        SUCCEEDED => "The REPL ended. If stdin or stdout was not a terminal, every form and command succeeded.",
        FAILED => "Stdin or stdout was not a terminal, and a form or command failed; or the reader of stdout has \
                    ended.",
        NOT_TRIED => "The command line is wrong.",
        CANNOT_RUN => "No server could be started or attached to, the server ended or did not answer, or stdin or stdout \
                    failed.",
    }
    "sessions" {
        SUCCEEDED => "The sessions were listed, or the session was deleted or exported.",
        FAILED => "The sessions cannot be listed; the session does not exist, is in use, or cannot be read, exported or \
                    deleted; or the output cannot be written.",
        NOT_TRIED => "The command line is wrong.",
    }
    "doctor" {
        SUCCEEDED => "All checks passed; the output may contain notes.",
        FAILED => "A check failed; the output says what to do.",
        NOT_TRIED => "The command line is wrong.",
        CANNOT_RUN => "The findings could not be written.",
    }
    "replay" {
        SUCCEEDED => "All compared answers are the same as in the recording.",
        FAILED => "Some answers differ, or some answers or requests of the server are missing.",
        NOT_TRIED => "The command line is wrong.",
        CANNOT_RUN => "The recording cannot be read, no server could be started, or the report could not be written.",
    }
    "check" {
        SUCCEEDED => "No errors were found, or `--fix` repaired them; the output may contain notes.",
        FAILED => "Errors were found and not repaired.",
        NOT_TRIED => "The command line is wrong.",
        CANNOT_RUN => "A file, stdin or stdout cannot be read or written, no server could be attached to, or the server \
                    ended or did not answer.",
    }
};
