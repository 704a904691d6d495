//! Telling a person what a long build is doing.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// Where a build's progress is shown.
#[derive(Debug)]
pub struct Progress {
    terminal: Option<File>,
    stderr: bool,
}

impl Progress {
    /// On standard error, for a program run by a person or a Makefile.
    #[must_use]
    pub fn stderr() -> Self {
        Self { terminal: None, stderr: true }
    }

    /// On the terminal, if there is one, for a build script: cargo hides its standard error, and shows it (so it is
    /// written too) when the script fails.
    #[must_use]
    pub fn terminal() -> Self {
        Self { terminal: File::options().write(true).open("/dev/tty").ok(), stderr: true }
    }

    /// Nowhere.
    #[must_use]
    pub fn silent() -> Self {
        Self { terminal: None, stderr: false }
    }

    /// Shows one line.
    pub fn say(&self, line: impl Display) {
        // A line that cannot be shown is no reason to stop a build.
        if self.stderr {
            let _ = writeln!(std::io::stderr(), "sbcl-core: {line}");
        }
        if let Some(mut terminal) = self.terminal.as_ref() {
            // Cargo's progress bar may stand on the current line.
            let _ = write!(terminal, "\r\x1b[Ksbcl-core: {line}\r\n");
        }
    }
}
