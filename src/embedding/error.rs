//! What can go wrong between a program and its image, and Lisp's conditions.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::convert::{ConversionError, FromLisp, Reader, Text};
use super::enter::Cx;
use super::value::Value;
use crate::error::BootError;
use crate::image::words::Words;

/// Why a call of the library failed.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// use sbcl::Error;
///
/// match lisp.eval::<i64>("(parse-integer \"12a\")") {
///     Err(Error::Condition(condition)) if condition.is("parse-error") => println!("no number: {condition}"),
///     Err(other) => return Err(other),
///     Ok(number) => println!("{number}"),
/// }
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Lisp signalled an error that nothing in Lisp handled.
    #[error("{0}")]
    Condition(Box<Condition>),
    /// A Lisp object is not what Rust asked for, or no Lisp object can be made of a Rust value.
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    /// The handle's time limit passed.
    #[error("the call took longer than its time limit of {limit:?}")]
    Timeout {
        /// The limit.
        limit: Duration,
    },
    /// It was interrupted, by an [`InterruptHandle`](super::InterruptHandle).
    #[error("the call was interrupted")]
    Interrupted,
    /// Lisp invoked the restart ABORT, or ended the thread that the call was in.
    #[error("the call was aborted by Lisp")]
    Aborted,
    /// Lisp is unwinding to a frame further out (by a `throw`, a `return-from`, a restart): what has called Rust goes on
    /// with it as soon as Rust returns. Until then every call fails with this. Pass it on.
    #[error("Lisp unwinds past this function")]
    Unwinding,
    /// All Lisp threads that there may be are inside functions of the program, which none of them has left for some
    /// seconds: they may be waiting for this very call. [`Builder::spare_threads`](super::Builder::spare_threads) allows
    /// more of them.
    #[error("no Lisp thread: all are inside functions of the program, and none comes back")]
    NoThread,
    /// A stream or a warning hook that was given to the [`Builder`](super::Builder) called Lisp. The calls that print, read or
    /// warn wait for it, perhaps this very one.
    #[error("a stream or a warning hook of Lisp's called Lisp, which may be waiting for it")]
    CalledByStream,
    /// The image could not be saved: the disk is full, a process could not be had, or the like.
    #[error("the image was not saved in {}: {reason}", path.display())]
    Save {
        /// Where it was to be saved. What was there before still is.
        path: PathBuf,
        /// What the process that saves it said, or how it ended.
        reason: String,
    },
    /// SBCL could not be booted.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The image works for no program: it was booted by [`Session::start`](crate::Session::start), or not at all.
    #[error("no Lisp was booted for this program: call Lisp::boot")]
    NotBooted,
    /// The system refused something.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Another error, of a function that was given to the library.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// The condition, if it is one.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let error = lisp.eval::<i64>("(error \"on purpose\")").unwrap_err();
    /// assert_eq!(error.condition().map(|condition| condition.message()), Some("on purpose"));
    /// assert!(lisp.eval::<i64>("\"text\"").unwrap_err().condition().is_none());
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn condition(&self) -> Option<&Condition> {
        match self {
            Self::Condition(condition) => Some(condition),
            _ => None,
        }
    }
}

/// A Lisp condition, as it was where it was signalled.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// let error = lisp.eval::<i64>("(/ 1 0)").unwrap_err();
/// let condition = error.condition().expect("a condition");
/// assert!(condition.is("division-by-zero") && condition.is("arithmetic-error"));
/// assert_eq!(condition.class(), "division-by-zero");
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Condition {
    pub(super) object: Value,
    classes: Vec<String>,
    message: String,
    restarts: Vec<RestartOffer>,
    frames: Vec<Frame>,
}

/// A restart that was there where a condition was signalled.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestartOffer {
    /// Its name, without package, in upper case as a rule.
    pub name: String,
    /// What it says it does.
    pub description: String,
}

/// A function call that was under way where a condition was signalled.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Frame {
    /// The call as printed: `(PRICE 3)`.
    pub call: String,
    /// Where the function was defined, if that is known: `path:line`.
    pub source: Option<String>,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.call)?;
        match &self.source {
            Some(source) => write!(f, " at {source}"),
            None => Ok(()),
        }
    }
}

impl Condition {
    /// Reads what Lisp wrote of one.
    pub(super) fn read(cx: &Cx, words: &Words) -> Result<Self, ConversionError> {
        // It may tell that the stack is used up.
        let cx = Cx::new(cx.inside().regardless_of_room());
        Self::read_from(&mut Reader::new(&cx, words))
    }

    pub(super) fn read_from(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        Ok(Self {
            object: reader.read()?,
            classes: reader.read::<Vec<Text>>()?.into_iter().map(|Text(class)| class).collect(),
            message: reader.read::<Text>()?.0,
            restarts: reader
                .read::<Vec<(Text, Text)>>()?
                .into_iter()
                .map(|(Text(name), Text(description))| RestartOffer { name, description })
                .collect(),
            frames: reader
                .read::<Vec<(Text, Text)>>()?
                .into_iter()
                .map(|(Text(call), Text(source))| Frame { call, source: (!source.is_empty()).then_some(source) })
                .collect(),
        })
    }

    /// The name of its class, in lower case, with its package where that is not `common-lisp-user`'s own business:
    /// `division-by-zero`, `my-app:out-of-stock`.
    #[must_use]
    pub fn class(&self) -> &str {
        self.classes.first().map_or("condition", String::as_str)
    }

    /// The names of its class and of all classes above it, the nearest first.
    #[must_use]
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// True when it is of the class `name`, or of one below it: `error`, `arithmetic-error`, `my-app:out-of-stock`. Case
    /// does not matter; without a package any will do.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        self.classes.iter().any(|class| {
            class.eq_ignore_ascii_case(name)
                || (!name.contains(':') && class.rsplit(':').next().is_some_and(|bare| bare.eq_ignore_ascii_case(name)))
        })
    }

    /// What it reports of itself, at most 10,000 characters.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The restarts that were there, the innermost first.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let error = lisp.eval::<()>("(restart-case (error \"no\") (try-later () :report \"Try later.\"))").unwrap_err();
    /// let restart = &error.condition().unwrap().restarts()[0];
    /// assert_eq!((restart.name.as_str(), restart.description.as_str()), ("TRY-LATER", "Try later."));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn restarts(&self) -> &[RestartOffer] {
        &self.restarts
    }

    /// The calls that were under way, the innermost first, at most 30. None of an exhausted stack or heap.
    #[must_use]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// The frames as text, one a line.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let error = lisp.eval::<()>("(/ 1 0)").unwrap_err();
    /// assert!(error.condition().unwrap().backtrace().contains("(/ 1 0)"));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn backtrace(&self) -> String {
        let lines: Vec<String> =
            self.frames.iter().enumerate().map(|(number, frame)| format!("{number}: {frame}")).collect();
        lines.join("\n")
    }

    /// The condition object itself.
    #[must_use]
    pub fn object(&self) -> &Value {
        &self.object
    }

    /// What its slot `name` holds.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let error = lisp.eval::<()>("(car 7)").unwrap_err();
    /// assert_eq!(error.condition().unwrap().slot::<i64>("datum")?, 7);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// When there is no such slot, it is unbound, or holds something else.
    pub fn slot<T: FromLisp + Send>(&self, name: &str) -> Result<T, Error> {
        self.object.slot(name)
    }

    /// The names of its slots that are bound, and what they hold, printed.
    ///
    /// # Errors
    /// When Lisp does not answer.
    pub fn slots(&self) -> Result<Vec<(String, String)>, Error> {
        self.object.slots()
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.class(), self.message)
    }
}

impl From<Condition> for Error {
    fn from(condition: Condition) -> Self {
        Self::Condition(Box::new(condition))
    }
}
