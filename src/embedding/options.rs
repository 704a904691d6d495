//! The options of a handle's calls, and the restarts that handlers choose.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::convert::{ConversionError, IntoLisp, Symbol, Writer};
use super::error::Condition;
use super::value::Value;
use crate::os::panics::PanicSafeDrop;

/// A function that is called where an error is signalled, if nothing in Lisp handles the error. The function may choose
/// a restart.
pub(super) type Handler = Arc<dyn Fn(&Condition) -> Option<Restart> + Send + Sync>;

#[derive(Clone, Default)]
pub(super) struct Options {
    pub(super) timeout: Option<Duration>,
    pub(super) package: Option<String>,
    pub(super) handler: Option<Handler>,
    pub(super) variables: Vec<Variable>,
    pub(super) values: Vec<Value>,
    /// The number of the group to which the calls belong. An interrupt handle interrupts all calls of one group.
    pub(super) group: u64,
}

/// A bound variable.
#[derive(Debug, Clone)]
pub(super) enum Variable {
    /// The variable with this name, also after a reset of the session has removed the symbol and code has made it again.
    Named(Symbol),
    /// The variable of a symbol without a home package, which no name identifies.
    Homeless(Value),
}

impl IntoLisp for Variable {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        match self {
            Self::Named(symbol) => symbol.write(writer),
            Self::Homeless(symbol) => symbol.write(writer),
        }
    }
}

impl Options {
    /// Returns options that change nothing about a call.
    pub(super) fn none() -> Arc<Self> {
        static NONE: LazyLock<Arc<Options>> = LazyLock::new(Arc::default);
        NONE.clone()
    }

    /// Returns true if these options change nothing about a call except its group.
    pub(super) fn is_empty(&self) -> bool {
        self.timeout.is_none() && !self.has_bindings()
    }

    /// Returns true if Lisp has to bind variables or a handler for these options.
    pub(super) fn has_bindings(&self) -> bool {
        self.package.is_some() || self.handler.is_some() || !self.variables.is_empty()
    }

    /// Returns a group number that was not used before.
    pub(super) fn new_group() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("timeout", &self.timeout)
            .field("package", &self.package)
            .field("handler", &self.handler.is_some())
            .field("variables", &self.variables)
            .finish_non_exhaustive()
    }
}

/// The restart that a handler chooses, and the arguments for the restart.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// use sbcl::Restart;
///
/// let careful = lisp.with_handler(|condition| condition.is("error").then(|| Restart::named("skip")));
/// assert_eq!(careful.eval::<i64>("(restart-case (error \"no\") (skip () 7))")?, 7);
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug)]
pub struct Restart {
    name: String,
    arguments: Vec<RestartArgument>,
}

/// A restart's argument of any type. The argument is converted when the restart is sent to Lisp.
struct RestartArgument(PanicSafeDrop<Box<dyn IntoLisp + Send>>);

impl fmt::Debug for RestartArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

impl Restart {
    /// Chooses the innermost restart whose name is `name`, and passes one argument to the restart. The case and the
    /// package of restart names are ignored.
    ///
    /// If the argument cannot be converted, or Lisp cannot read the argument, the call whose error was passed to the
    /// handler fails with a `rust:host-error` that says so.
    #[must_use]
    pub fn invoke(name: &str, argument: impl IntoLisp + Send + 'static) -> Self {
        Self { name: name.to_owned(), arguments: vec![RestartArgument(PanicSafeDrop::new(Box::new(argument)))] }
    }

    /// Chooses the innermost restart whose name is `name`, and passes no arguments to the restart. The case and the
    /// package of restart names are ignored.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), arguments: Vec::new() }
    }
}

impl IntoLisp for RestartArgument {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        self.0.write(writer)
    }
}

impl IntoLisp for Restart {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.list(|writer| {
            self.name.write(writer)?;
            self.arguments
                .iter()
                .try_for_each(|argument| argument.write(writer))
                .map_err(|error| error.with_outer_place(|| format!("the argument of the restart {}", self.name)))
        })
    }
}
