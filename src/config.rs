//! Sizes and limits, with their defaults and bounds.

use std::path::PathBuf;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::LimitError;

/// The configuration of the process's only image, which [`Session::start`](crate::Session::start) boots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageConfig {
    /// The size of the Lisp heap in bytes: 128 MiB to 64 GiB, default 8 GiB. The heap takes address space, but no
    /// memory until it is used.
    pub heap: u64,
    /// The size of a Lisp thread's control stack in bytes: 2 MiB to 4 GiB, default 256 MiB. A stack takes address
    /// space, but no memory until it is used.
    pub control_stack: u64,
    /// A directory with an `sbcl.core` to use instead of the core in this program. A `libsbcl.so` in the directory must be
    /// the library that the program was built with. On systems other than Linux the library is required.
    pub core_dir: Option<PathBuf>,
    /// A core file that an image of this program has saved, to boot instead of the plain core.
    pub image: Option<PathBuf>,
    /// True to load the user's `~/.sbclrc` after the boot. Ignored if `image` is given.
    pub user_init: bool,
    /// A directory that serves as the home directory if the user has no home directory, and that receives ASDF's compiled
    /// files if the user's cache directory is not writable. The directory need not exist; the caller removes it. `None`
    /// for no such directory.
    pub scratch: Option<PathBuf>,
}

impl Default for ImageConfig {
    fn default() -> Self {
        Self { heap: 8 << 30, control_stack: 256 << 20, core_dir: None, image: None, user_init: false, scratch: None }
    }
}

impl ImageConfig {
    /// The smallest and the largest heap in bytes.
    pub const HEAP_RANGE: std::ops::RangeInclusive<u64> = 128 << 20..=64 << 30;
    /// The smallest and the largest control stack in bytes.
    pub const CONTROL_STACK_RANGE: std::ops::RangeInclusive<u64> = 2 << 20..=4 << 30;

    /// Checks the sizes of the heap and the control stack.
    ///
    /// # Errors
    /// Returns a [`LimitError`], which names the setting and the allowed range, if a size is out of range.
    pub fn check(&self) -> Result<(), LimitError> {
        LimitError::check("heap", "bytes", self.heap, Self::HEAP_RANGE)?;
        LimitError::check("control-stack", "bytes", self.control_stack, Self::CONTROL_STACK_RANGE)
    }
}

/// The treatment of an evaluation that fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// The evaluation is unwound and reported.
    #[default]
    Abort,
    /// The evaluation is held where it failed, for the debugger's tools.
    Debug,
    /// The evaluation is held, and the user is asked to choose a restart if the client supports such questions.
    Ask,
}

impl OnError {
    /// All variants, in the order of their declaration.
    pub const ALL: [Self; 3] = [Self::Abort, Self::Debug, Self::Ask];

    /// Returns the variant's name, as clients write it in the argument `on-error`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::Debug => "debug",
            Self::Ask => "ask",
        }
    }
}

/// The limits of an evaluation and of the report on it. All values are within their ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct Limits {
    pub(crate) timeout: Option<Duration>,
    pub(crate) max_output: u64,
    pub(crate) max_answer: u64,
    pub(crate) max_value: u64,
    pub(crate) max_message: u64,
    pub(crate) max_frame: u64,
    pub(crate) max_warnings: u64,
    pub(crate) hold: Duration,
    pub(crate) cleanup: Duration,
    pub(crate) on_error: OnError,
}

impl Serialize for Limits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Limits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer)?.checked().map_err(D::Error::custom)
    }
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
            cleanup: Duration::from_secs(5),
            on_error: OnError::Abort,
        }
    }
}

impl Limits {
    /// The longest time limit in seconds.
    pub const MAX_TIMEOUT_SECONDS: f64 = 86_400.0;
    /// The smallest and the largest `max_output` in characters.
    pub const MAX_OUTPUT_RANGE: std::ops::RangeInclusive<u64> = 1..=10_000_000;
    /// The smallest and the largest `max_answer` in characters.
    pub const MAX_ANSWER_RANGE: std::ops::RangeInclusive<u64> = 6_000..=1_000_000;

    /// Converts a client's number of seconds to a time limit of at least 1 ms. 0 seconds mean no limit (`None`).
    ///
    /// # Errors
    /// Returns a [`LimitError`] if `seconds` is negative, larger than 86,400 (a day), or NaN.
    pub fn timeout_from_seconds(seconds: f64) -> Result<Option<Duration>, LimitError> {
        if seconds == 0.0 {
            Ok(None)
        } else if seconds > 0.0 && seconds <= Self::MAX_TIMEOUT_SECONDS {
            Ok(Some(Duration::from_secs_f64(seconds).max(Duration::from_millis(1))))
        } else {
            Err(LimitError {
                setting: "timeout",
                value: format!("{seconds:?}").trim_end_matches(".0").to_owned(),
                allowed: "0 (no limit) to 86400 seconds".to_owned(),
            })
        }
    }

    /// Returns the time limit of an evaluation; `None` for no limit. Default 30 s.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Sets the time limit of an evaluation: a millisecond to a day, or `None` for no limit.
    ///
    /// # Errors
    /// Returns a [`LimitError`] when the value is out of range.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<(), LimitError> {
        timeout.map_or(Ok(()), |timeout| Self::check_time("timeout", timeout))?;
        self.timeout = timeout;
        Ok(())
    }

    /// Returns the time for which a failed evaluation is held for debugging before it is unwound. Default ten minutes.
    #[must_use]
    pub fn hold(&self) -> Duration {
        self.hold
    }

    /// Sets the time for which a failed evaluation is held for debugging: a millisecond to a day.
    ///
    /// # Errors
    /// Returns a [`LimitError`] when the value is out of range.
    pub fn set_hold(&mut self, hold: Duration) -> Result<(), LimitError> {
        Self::check_time("hold", hold)?;
        self.hold = hold;
        Ok(())
    }

    /// Returns the grace period: the time that the cleanup forms of an interrupted evaluation may take before they are
    /// interrupted, too. Default 5 s.
    #[must_use]
    pub fn cleanup(&self) -> Duration {
        self.cleanup
    }

    /// Sets the grace period of cleanup forms: a millisecond to a day.
    ///
    /// # Errors
    /// Returns a [`LimitError`] when the value is out of range.
    pub fn set_cleanup(&mut self, cleanup: Duration) -> Result<(), LimitError> {
        Self::check_time("cleanup", cleanup)?;
        self.cleanup = cleanup;
        Ok(())
    }

    /// Returns the maximum length of captured output in characters, stdout and stderr together. Default 1,000,000.
    #[must_use]
    pub fn max_output(&self) -> u64 {
        self.max_output
    }

    /// Sets the maximum length of captured output: 1 to 10,000,000 characters.
    ///
    /// # Errors
    /// Returns a [`LimitError`] when the value is out of range.
    pub fn set_max_output(&mut self, characters: u64) -> Result<(), LimitError> {
        LimitError::check("max-output", "characters", characters, Self::MAX_OUTPUT_RANGE)?;
        self.max_output = characters;
        Ok(())
    }

    /// Returns the maximum length of an answer of the server in characters; longer answers are cut. Default 9,500.
    #[must_use]
    pub fn max_answer(&self) -> u64 {
        self.max_answer
    }

    /// Sets the maximum length of an answer of the server: 6,000 to 1,000,000 characters.
    ///
    /// # Errors
    /// Returns a [`LimitError`] when the value is out of range.
    pub fn set_max_answer(&mut self, characters: u64) -> Result<(), LimitError> {
        LimitError::check("max-answer", "characters", characters, Self::MAX_ANSWER_RANGE)?;
        self.max_answer = characters;
        Ok(())
    }

    /// Returns the maximum total length, in characters, of the printed values of an evaluation: 50,000.
    #[must_use]
    pub fn max_value(&self) -> u64 {
        self.max_value
    }

    /// Returns the maximum length of the message of an error or a warning in characters: 10,000.
    #[must_use]
    pub fn max_message(&self) -> u64 {
        self.max_message
    }

    /// Returns the maximum length in characters of a frame's call, a restart's description and a slot's value: 300.
    #[must_use]
    pub fn max_frame(&self) -> u64 {
        self.max_frame
    }

    /// Returns the maximum number of warnings that an outcome records: 200.
    #[must_use]
    pub fn max_warnings(&self) -> u64 {
        self.max_warnings
    }

    /// Returns the server's default treatment of an evaluation that fails. The library's
    /// [`Evaluation`](crate::Evaluation) ignores this setting. Default [`OnError::Abort`].
    #[must_use]
    pub fn on_error(&self) -> OnError {
        self.on_error
    }

    /// Sets the server's default treatment of an evaluation that fails.
    pub fn set_on_error(&mut self, on_error: OnError) {
        self.on_error = on_error;
    }

    fn check_time(setting: &'static str, time: Duration) -> Result<(), LimitError> {
        if (Duration::from_millis(1)..=Duration::from_secs_f64(Self::MAX_TIMEOUT_SECONDS)).contains(&time) {
            return Ok(());
        }
        let allowed = "1 millisecond to 86400 seconds".to_owned();
        Err(LimitError { setting, value: format!("{} seconds", time.as_secs_f64()), allowed })
    }

    /// Checks deserialized limits. Settings that have no setter get their default.
    fn checked(self) -> Result<Self, LimitError> {
        let mut limits = Self { on_error: self.on_error, ..Self::default() };
        limits.set_timeout(self.timeout)?;
        limits.set_hold(self.hold)?;
        limits.set_cleanup(self.cleanup)?;
        limits.set_max_output(self.max_output)?;
        limits.set_max_answer(self.max_answer)?;
        Ok(limits)
    }
}
