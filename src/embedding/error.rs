//! [`Error`], the error that calls of the library return, and Lisp's conditions.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::convert::{ConversionError, FromLisp, LossyText, Reader};
use super::enter::Cx;
use super::value::Value;
use crate::error::BootError;
use crate::image::message_buffer::MessageBuffer;

/// The reason why a call of the library failed.
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
    /// Lisp code in the call signalled an error, or a function such as `break` would have invoked the debugger, and no
    /// Lisp code in the call handled the condition.
    #[error("{0}")]
    Condition(Box<Condition>),
    /// A Lisp object cannot be read as the requested Rust type, or a Rust value has no Lisp counterpart.
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    /// The call took longer than the handle's time limit.
    #[error("the call took longer than its time limit of {limit:?}")]
    Timeout {
        /// The time limit.
        limit: Duration,
    },
    /// The call was interrupted by an [`InterruptHandle`](super::InterruptHandle).
    #[error("the call was interrupted")]
    Interrupted,
    /// Lisp invoked the restart ABORT, or ended the thread that ran the call. A [`Call`](super::Call) whose result was
    /// returned also returns this error if the `Call` is polled again.
    #[error("Lisp aborted the call, by the restart ABORT or by ending the call's thread")]
    Aborted,
    /// Lisp is unwinding to an outer frame, for example by a `throw`, a `return-from` or a restart, or because an outer
    /// call is interrupted.
    ///
    /// The unwinding continues as soon as the Rust function that Lisp has called returns; until then every call that
    /// would run on this thread fails with this error. Return the error to your own caller.
    #[error("the call failed because Lisp is unwinding past the calling Rust function: return from that function")]
    Unwinding,
    /// Lisp cannot be called where the call was made.
    ///
    /// There are four causes:
    ///
    /// - The stack of the Lisp thread is nearly used up.
    /// - The call was made through a [`Cx`](super::Cx) on another stack than the thread's own, as crates such as
    ///   `stacker` provide.
    /// - The call was made through a `Cx` in code to which the `Cx` was not lent, such as the `reply` of
    ///   [`Session::submit`](crate::Session::submit).
    /// - A Rust function that Lisp has called ends the process, and an exit handler or a thread-local destructor calls
    ///   Lisp on the thread of that function.
    #[error(
        "Lisp cannot be called here: the stack of this Lisp thread is nearly used up, the code runs on another stack, \
        the `Cx` was lent to other code, or the process is exiting"
    )]
    CannotCall,
    /// No Lisp thread is free: too many Lisp threads run Rust code, no more threads are allowed or can be started, and
    /// no waiting call has begun for five seconds.
    ///
    /// The Rust code may be waiting for this call. [`Builder::spare_threads`](super::Builder::spare_threads) allows
    /// more threads.
    #[error(
        "no Lisp thread is free, functions of the program that Lisp has called may be waiting for this call, and no \
         more threads are allowed (Builder::spare_threads) or could be started"
    )]
    NoThread,
    /// A stream or a warning hook of the [`Builder`](super::Builder) called Lisp.
    ///
    /// Calls that print or read wait for the stream, and calls that warn wait for the hook. A call that the stream or
    /// hook made could therefore wait forever.
    #[error(
        "a stream or warning hook called Lisp, which may be waiting for that stream or hook: call Lisp on another \
        thread, and do not let the stream or hook wait for calls that print"
    )]
    CalledByStream,
    /// The image could not be saved, for example because the disk is full or the process that saves the image was
    /// killed.
    #[error("the image was not saved in {}: {reason}", path.display())]
    Save {
        /// The file in which the image should have been saved. A previous file of this name is unchanged, unless only
        /// writing the directory to the disk failed.
        path: PathBuf,
        /// The message of the process that saves the image, a description of how that process ended, or the system's
        /// error.
        reason: String,
    },
    /// SBCL could not be booted.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// No image was booted with a [`Builder`](super::Builder). An image booted by
    /// [`Session::start`](crate::Session::start) cannot run calls of [`Lisp`](super::Lisp).
    #[error("no image was booted for calls of Lisp: boot it with Lisp::boot or Lisp::builder, not with Session::start")]
    NotBooted,
    /// This process is a forked copy of the process that booted the image, and has no Lisp threads that could run the
    /// call. The thread that forked may not call Lisp in the copy either, even if this thread is a Lisp thread.
    #[error(
        "this process is a forked copy of a process that had booted Lisp: it has no Lisp threads, and cannot boot Lisp \
         again. Fork first, and boot Lisp in the child"
    )]
    Forked,
    /// An operation of the operating system failed, or a path is not valid.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// An error of another type, for closures such as the closure of [`Lisp::enter`](super::Lisp::enter). The library
    /// itself never makes this error.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Returns the Lisp condition if this error is [`Error::Condition`].
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

/// A Lisp condition, recorded where it was signalled.
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

/// A restart that was available where a condition was signalled.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestartOffer {
    /// The restart's name, without a package and usually in upper case.
    pub name: String,
    /// The description of what invoking the restart does.
    pub description: String,
}

/// A function call that was active where a condition was signalled.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Frame {
    /// The call as printed, such as `(PRICE 3)`.
    pub call: String,
    /// The source location of the code that was running, as `path:line`. `None` if the location is unknown, or if the
    /// function belongs to SBCL or to this library.
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
    /// Reads a condition from a message sent by Lisp.
    pub(super) fn read(cx: &Cx, message: &MessageBuffer) -> Result<Self, ConversionError> {
        // The stack check is off: the condition may report that the stack is used up.
        let cx = Cx::new(cx.context().without_stack_limit());
        Self::read_from(&mut Reader::new(&cx, message))
    }

    pub(super) fn read_from(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        Ok(Self {
            object: reader.read()?,
            classes: reader.read::<Vec<LossyText>>()?.into_iter().map(|LossyText(class)| class).collect(),
            message: reader.read::<LossyText>()?.0,
            restarts: reader
                .read::<Vec<(LossyText, LossyText)>>()?
                .into_iter()
                .map(|(LossyText(name), LossyText(description))| RestartOffer { name, description })
                .collect(),
            frames: reader
                .read::<Vec<(LossyText, LossyText)>>()?
                .into_iter()
                .map(|(LossyText(call), LossyText(source))| Frame {
                    call,
                    source: (!source.is_empty()).then_some(source),
                })
                .collect(),
        })
    }

    /// Returns the name of the condition's class in lower case, such as `division-by-zero` or `my-app:out-of-stock`.
    ///
    /// The name has a package prefix unless the name's symbol is accessible in `common-lisp-user`.
    #[must_use]
    pub fn class(&self) -> &str {
        self.classes.first().map_or("condition", String::as_str)
    }

    /// Returns the names of the condition's class and its superclasses up to `condition`, most specific first.
    #[must_use]
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns true if the condition's class is `name`, such as `error` or `my-app:out-of-stock`, or a subclass of
    /// `name`.
    ///
    /// Case is ignored. A name without a package matches a class of any package. A name with a package prefix matches
    /// only if [`classes`](Self::classes) contains the name with the same prefix, which has two colons if the package
    /// does not export the name.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        self.classes.iter().any(|class| {
            class.eq_ignore_ascii_case(name)
                || (!name.contains(':') && class.rsplit(':').next().is_some_and(|bare| bare.eq_ignore_ascii_case(name)))
        })
    }

    /// Returns the text that the condition reports, at most 10,000 characters.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the restarts that were available, innermost first: at most 20. The list ends before the first restart
    /// that has no name.
    ///
    /// The list is empty for a `storage-condition`, such as an exhausted stack or heap.
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

    /// Returns the calls of Lisp functions that were active within the call from Rust, innermost first: at most 30
    /// frames.
    ///
    /// The list is empty for a `storage-condition`, such as an exhausted stack or heap.
    #[must_use]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Returns the frames as text, one per line.
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

    /// Returns a handle to the condition object.
    #[must_use]
    pub fn object(&self) -> &Value {
        &self.object
    }

    /// Reads the condition's slot `name`.
    ///
    /// If the value is an object on Lisp's stack (dynamic extent), which is gone by now, or refers to such an object,
    /// the slot contains the value's printed text instead. In a list of up to 1,000 elements, texts replace only the
    /// elements that are or refer to such objects. If Lisp would have to follow more than 100,000 references from a
    /// value to find such objects, a text replaces this value, too. The texts are in the condition object itself, so
    /// Lisp code that handles the condition later finds them, too.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let error = lisp.eval::<()>("(car 7)").unwrap_err();
    /// assert_eq!(error.condition().unwrap().slot::<i64>("datum")?, 7);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if there is no such slot or the slot is unbound; [`Error::Conversion`] if the value
    /// cannot be read as a `T`.
    pub fn slot<T: FromLisp + Send>(&self, name: &str) -> Result<T, Error> {
        self.object.slot(name)
    }

    /// Returns the names and printed values of the bound slots among the condition's first 100 slots. Each printed
    /// value is cut off after 1,000 characters.
    ///
    /// # Errors
    /// Returns an error if the call cannot run or complete, such as [`Error::NoThread`].
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
