//! [`Function`]: a Lisp function that Rust calls.

use std::sync::Arc;

use super::convert::{Arguments, ConversionError, FromLisp, IntoLisp, Reader, Shape, Writer};
use super::enter::Cx;
use super::error::Error;
use super::options::Options;
use super::pool;
use super::value::Value;

/// A Lisp function that Rust can call.
///
/// A `Function` that was looked up by name always calls the current definition. If a [`Lisp`](super::Lisp) handle
/// looked the function up, the function's calls have the handle's options (time limit, error handler, package and
/// variable bindings), and the handle's [interrupt handle](super::Lisp::interrupt_handle) interrupts these calls.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// let floor = lisp.function("floor")?;
/// assert_eq!(floor.call::<(i64, i64)>((17, 5))?, (3, 2));
/// let add: sbcl::Function = lisp.eval("(let ((n 3)) (lambda (x) (+ x n)))")?;
/// assert_eq!(add.call::<i64>((4,))?, 7);
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Function {
    value: Value,
    options: Option<Arc<Options>>,
}

impl Function {
    pub(super) fn from_value(value: Value) -> Self {
        Self { value, options: None }
    }

    /// Returns this function with `options` for its calls.
    pub(super) fn with_options(self, options: &Arc<Options>) -> Self {
        Self { options: Some(options.clone()), ..self }
    }

    /// Calls the function: directly if the current thread is a Lisp thread that has called Rust, otherwise on a Lisp
    /// thread of the program.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let join = lisp.eval::<sbcl::Function>("(lambda (&rest texts) (format nil \"~{~a~^, ~}\" texts))")?;
    /// assert_eq!(join.call::<String>(("a", "b"))?, "a, b");
    /// assert_eq!(join.call::<String>(vec!["a", "b", "c"])?, "a, b, c");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if the function does not exist or fails, or if Lisp cannot read an argument, such
    /// as a symbol of a package that does not exist; [`Error::Conversion`] if an argument has no Lisp counterpart, or
    /// the values cannot be read as a `T`; and the errors of [`Lisp::enter`](super::Lisp::enter).
    pub fn call<T: FromLisp + Send>(&self, arguments: impl Arguments + Sync) -> Result<T, Error> {
        let work = |cx: &Cx| cx.apply(&self.value, &arguments);
        match &self.options {
            Some(options) => pool::run_with_options(options, work),
            None => pool::run(work),
        }
    }

    /// Returns the Lisp object that is called: the function itself; the function's name; or, for the name
    /// `(setf name)`, a function that calls the current definition.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.function("car")?.value().to_string(), "CAR");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.value
    }
}

impl FromLisp for Function {
    const SHAPE: Shape = Shape::OPAQUE;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let value: Value = reader.read()?;
        match reader.find_callee(&value)? {
            Some(callee) => Ok(Self::from_value(callee)),
            None => Err(ConversionError::new("a function or its name", reader.describe(&value))),
        }
    }
}

impl IntoLisp for Function {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        self.value.write(writer)
    }
}
