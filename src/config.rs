//! Sizes and limits, with their defaults and bounds.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::LimitError;

/// How the image is booted: one a process, by [`Session::start`](crate::Session::start).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageConfig {
    /// The Lisp heap in bytes: 128 MiB to 64 GiB, default 8 GiB. It is address space, not memory, until it is used.
    pub heap: u64,
    /// The control stack of a Lisp thread in bytes: 2 MiB to 4 GiB, default 256 MiB. Address space as well.
    pub control_stack: u64,
    /// A directory with `libsbcl.so` and `sbcl.core` to use in place of those this program carries.
    pub core_dir: Option<PathBuf>,
    /// A core that a running image of this program has saved, to go on with in place of the plain one.
    pub image: Option<PathBuf>,
    /// Load the user's `~/.sbclrc` once the image is up.
    pub user_init: bool,
    /// A directory that stands in for a home directory where the user has none, or none that can be written: ASDF keeps
    /// compiled files there. It need not exist; the caller removes it. `None`: SBCL's own ways.
    pub scratch: Option<PathBuf>,
}

impl Default for ImageConfig {
    fn default() -> Self {
        Self { heap: 8 << 30, control_stack: 256 << 20, core_dir: None, image: None, user_init: false, scratch: None }
    }
}

impl ImageConfig {
    /// Smallest and largest heap in bytes.
    pub const HEAP_RANGE: std::ops::RangeInclusive<u64> = 128 << 20..=64 << 30;
    /// Smallest and largest control stack in bytes.
    pub const CONTROL_STACK_RANGE: std::ops::RangeInclusive<u64> = 2 << 20..=4 << 30;

    /// Checks the sizes.
    ///
    /// # Errors
    /// [`LimitError`] names the setting, its value and the allowed range.
    pub fn check(&self) -> Result<(), LimitError> {
        LimitError::check("heap", "bytes", self.heap, Self::HEAP_RANGE)?;
        LimitError::check("control-stack", "bytes", self.control_stack, Self::CONTROL_STACK_RANGE)
    }
}

/// What becomes of an evaluation that fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// It is unwound and reported.
    #[default]
    Abort,
    /// It is held where it failed, for the debugger's tools.
    Debug,
    /// It is held, and the user chooses the restart.
    Ask,
}

impl OnError {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Abort, Self::Debug, Self::Ask];

    /// Its name, as clients write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::Debug => "debug",
            Self::Ask => "ask",
        }
    }
}

/// What bounds an evaluation and its report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// How long an evaluation may take; `None` for as long as it likes. Default 30 s, at most a day.
    pub timeout: Option<Duration>,
    /// Characters of captured output, stdout and stderr together. Default 1,000,000.
    pub max_output: u64,
    /// Characters of one answer of the server's: what is longer is cut. Default 9,500.
    pub max_answer: u64,
    /// Characters of all values together. Default 50,000.
    pub max_value: u64,
    /// Characters of a message. Default 10,000.
    pub max_message: u64,
    /// Characters of a frame. Default 300.
    pub max_frame: u64,
    /// Warnings recorded. Default 200.
    pub max_warnings: u64,
    /// How long a failed evaluation is held for debugging before it is released. Default ten minutes.
    pub hold: Duration,
    /// What becomes of an evaluation that fails and does not say: the server's default, which the library's
    /// [`Evaluation`](crate::Evaluation) does not look at.
    pub on_error: OnError,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            timeout: Some(Duration::from_secs(30)),
            max_output: 1_000_000,
            max_answer: 9_500,
            max_value: 50_000,
            max_message: 10_000,
            max_frame: 300,
            max_warnings: 200,
            hold: Duration::from_secs(600),
            on_error: OnError::Abort,
        }
    }
}

impl Limits {
    /// Longest time limit in seconds.
    pub const MAX_TIMEOUT_SECONDS: f64 = 86_400.0;
    /// Smallest and largest `max_output` in characters.
    pub const MAX_OUTPUT_RANGE: std::ops::RangeInclusive<u64> = 1..=10_000_000;
    /// Smallest and largest `max_answer` in characters.
    pub const MAX_ANSWER_RANGE: std::ops::RangeInclusive<u64> = 6_000..=1_000_000;

    /// A time limit from seconds as a client gives them: 0 for none.
    ///
    /// # Errors
    /// [`LimitError`] for a negative number, one over a day, or not a number.
    pub fn timeout_from_seconds(seconds: f64) -> Result<Option<Duration>, LimitError> {
        if seconds == 0.0 {
            Ok(None)
        } else if seconds > 0.0 && seconds <= Self::MAX_TIMEOUT_SECONDS {
            Ok(Some(Duration::from_secs_f64(seconds).max(Duration::from_millis(1))))
        } else {
            Err(LimitError {
                setting: "timeout",
                value: seconds.to_string(),
                allowed: "0 (for none) to 86400 seconds".to_owned(),
            })
        }
    }

    /// Sets `max_output`.
    ///
    /// # Errors
    /// [`LimitError`] when it is out of range.
    pub fn set_max_output(&mut self, characters: u64) -> Result<(), LimitError> {
        LimitError::check("max-output", "characters", characters, Self::MAX_OUTPUT_RANGE)?;
        self.max_output = characters;
        Ok(())
    }

    /// Sets `max_answer`.
    ///
    /// # Errors
    /// [`LimitError`] when it is out of range.
    pub fn set_max_answer(&mut self, characters: u64) -> Result<(), LimitError> {
        LimitError::check("max-answer", "characters", characters, Self::MAX_ANSWER_RANGE)?;
        self.max_answer = characters;
        Ok(())
    }
}
