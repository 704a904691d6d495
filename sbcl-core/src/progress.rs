//! The display of a long build's progress.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// The destination of progress messages.
#[derive(Debug)]
pub struct Progress {
    terminal: Option<File>,
    stderr: bool,
}

impl Progress {
    /// Returns a display that writes to standard error, for a program that a person or a Makefile runs.
    #[must_use]
    pub fn stderr() -> Self {
        Self { terminal: None, stderr: true }
    }

    /// Returns a display that writes to the terminal, if there is one, and to standard error. The display is meant for build
    /// scripts, whose standard error cargo shows only if the script fails.
    #[must_use]
    pub fn terminal() -> Self {
        Self { terminal: File::options().write(true).open("/dev/tty").ok(), stderr: true }
    }

    /// Returns a display that shows nothing.
    #[must_use]
    pub fn silent() -> Self {
        Self { terminal: None, stderr: false }
    }

    /// Shows one line.
    pub fn say(&self, line: impl Display) {
        // A build continues even if a line cannot be shown.
        if self.stderr {
            let _ = writeln!(std::io::stderr(), "sbcl-core: {line}");
        }
        if let Some(mut terminal) = self.terminal.as_ref() {
            // Cargo's progress bar may be on the current line.
            let _ = write!(terminal, "\r\x1b[Ksbcl-core: {line}\r\n");
        }
    }
}
