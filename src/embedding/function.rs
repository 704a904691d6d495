//! Lisp functions.

use std::sync::Arc;

use super::convert::{Arguments, ConversionError, FromLisp, IntoLisp, Reader, Shape, Writer};
use super::enter::Cx;
use super::error::Error;
use super::options::Options;
use super::pool;
use super::value::Value;

/// A Lisp function, looked up once. One that was looked up by its name follows its redefinition, and its calls have the
/// options of the handle that looked it up: its time limit, handler, package and variables.
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
    pub(super) fn of(value: Value) -> Self {
        Self { value, options: None }
    }

    /// The same, called under `options`.
    pub(super) fn under(self, options: &Arc<Options>) -> Self {
        Self { options: Some(options.clone()), ..self }
    }

    /// Calls it: directly on a Lisp thread, elsewhere on one of the threads that work for this program.
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
    /// [`Error::Condition`] when it fails, [`Error::Conversion`] when what it returns is no `T`; [`Error::Timeout`] and
    /// the like of the handle's options.
    pub fn call<T: FromLisp + Send>(&self, arguments: impl Arguments + Sync) -> Result<T, Error> {
        let work = |cx: &Cx| cx.apply(&self.value, &arguments);
        match &self.options {
            Some(options) => pool::run_under(options, work),
            None => pool::run(work),
        }
    }

    /// The function, or its name, as an object.
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
        match reader.callee(&value) {
            Some(callee) => Ok(Self::of(callee)),
            None => Err(ConversionError::new("a function or its name", format!("{value}"))),
        }
    }
}

impl IntoLisp for Function {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        self.value.write(writer)
    }
}
