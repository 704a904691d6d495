//! [`Value`]: a handle to a Lisp object.

use std::fmt;
use std::sync::Arc;

use super::convert::{
    ConversionError, FromLisp, IntoLisp, LossyText, MAX_DESCRIPTION, Object, Reader, Shape, Writer, double_text,
};
use super::enter::{Cx, Entry};
use super::error::Error;
use super::pool;
use crate::image::message::{self, Handle, Token};

/// A Lisp object of any type, kept alive.
///
/// A `Value` may be stored, sent to other threads and dropped anywhere: the drop neither blocks nor calls Lisp. A clone
/// stands for the same object. An object with dynamic extent, which is on Lisp's stack, cannot become a `Value`: the
/// conversion is an error. But an object in the heap that refers to an object on the stack, for example a vector that
/// contains a list with dynamic extent, can become a `Value`. Such a `Value` must be dropped before the Lisp code that
/// made the object on the stack returns. [`Condition`](super::Condition)s need no such care.
///
/// The methods of a `Value` may be called from any thread. The calls have no time limit, and may run forever if, for
/// example, a `print-object` method does not return; but calls within the closure of [`enter`](super::Lisp::enter), or
/// within a Rust function that Lisp has called, end with the surrounding call, and so share the limit of that call.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// use sbcl::Value;
///
/// let table: Value = lisp.eval("(make-hash-table :test 'equal)")?;
/// lisp.call::<()>("(setf gethash)", (42, "answer", &table))?;
/// assert_eq!(table.get::<i64>("answer")?, Some(42));
/// assert_eq!(table.len()?, 1);
/// std::thread::spawn(move || drop(table)).join().unwrap();
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Clone)]
pub struct Value(Repr);

/// The representation of an object in Rust: a handle, or a copy if the object is NIL, T, a fixnum, a float or a
/// character. Such a copy is EQL to the original.
#[derive(Clone)]
enum Repr {
    Nil,
    True,
    Integer(i64),
    Single(f32),
    Double(f64),
    /// The character code, which may be a surrogate.
    Character(u32),
    Object(Arc<Handle>),
}

impl Value {
    pub(super) fn from_handle(handle: Handle) -> Self {
        Self(Repr::Object(Arc::new(handle)))
    }

    /// Returns the constant `nil`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert!(lisp.call::<bool>("null", (sbcl::Value::nil(),))?);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn nil() -> Self {
        Self(Repr::Nil)
    }

    /// Returns true if the object is `nil`.
    #[must_use]
    pub fn is_nil(&self) -> bool {
        matches!(self.0, Repr::Nil)
    }

    pub(super) fn handle(&self) -> Option<&Arc<Handle>> {
        match &self.0 {
            Repr::Object(handle) => Some(handle),
            _ => None,
        }
    }

    /// Writes the object into `message`.
    pub(super) fn write_token(&self, message: &mut message::MessageWriter) {
        match &self.0 {
            Repr::Nil => message.nil(),
            Repr::True => message.boolean(true),
            Repr::Integer(value) => message.integer(*value),
            Repr::Single(value) => message.single(*value),
            Repr::Double(value) => message.double(*value),
            Repr::Character(code) => message.character(*code),
            Repr::Object(handle) => message.handle(handle),
        }
    }

    /// Reads the object as a `T`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let list: sbcl::Value = lisp.eval("(list 1 2 3)")?;
    /// assert_eq!(list.to::<Vec<i64>>()?, [1, 2, 3]);
    /// assert_eq!(list.to::<(i64, i64, i64)>()?, (1, 2, 3));
    /// assert!(list.to::<String>().is_err());
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Conversion`] if the object cannot be read as a `T`.
    pub fn to<T: FromLisp + Send>(&self) -> Result<T, Error> {
        pool::run(|cx| cx.call_entry(Entry::Objects, |writer| self.write(writer))).map(|Object(object)| object)
    }

    /// Returns the object's type as a Lisp type specifier, such as `(simple-vector 3)`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.eval::<sbcl::Value>("(vector 1 2 3)")?.type_of()?, "(simple-vector 3)");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the call cannot run or complete, such as [`Error::NoThread`].
    pub fn type_of(&self) -> Result<String, Error> {
        pool::run(|cx| cx.call_entry(Entry::TypeOf, |writer| self.write(writer))).map(|LossyText(text)| text)
    }

    /// Returns the text that `prin1` prints for the object, cut off with `…` after `limit` characters. The printer
    /// variables other than `*package*` have fixed values, whatever Lisp code or
    /// [`with_bindings`](super::Lisp::with_bindings) has set.
    ///
    /// The digits of a huge integer take too long to compute if most of them would be cut off. So for an integer of
    /// more than 100,000 bits and more than four bits for each character of `limit`, the text is its size, such as
    /// `#<positive integer of 200000 bits>`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let list: sbcl::Value = lisp.eval("(list 1 \"two\" #\\3)")?;
    /// assert_eq!(list.print(100)?, "(1 \"two\" #\\3)");
    /// assert_eq!(list.print(4)?, "(1 \"…");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the call cannot run or complete, such as [`Error::NoThread`]. If the object cannot be
    /// printed, the call does not fail, and the text says that the object is unprintable.
    pub fn print(&self, limit: usize) -> Result<String, Error> {
        pool::run(|cx| cx.print(self, limit))
    }

    /// Returns true if both values are `eql`: the same object, the same character, or numbers of the same type and
    /// value. `0.0` and `-0.0` are not `eql`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let (one, other) = (lisp.value("same")?, lisp.value("same")?);
    /// assert!(one.eql(&one)? && !one.eql(&other)?);
    /// assert!(one.equal(&other)? && one.equalp(&lisp.value("SAME")?)?);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the call cannot run or complete, such as [`Error::NoThread`].
    pub fn eql(&self, other: &Self) -> Result<bool, Error> {
        self.is_equal_by(0, other)
    }

    /// Returns true if both values are `equal`.
    ///
    /// # Errors
    /// Returns an error if the call cannot run or complete, such as [`Error::NoThread`].
    pub fn equal(&self, other: &Self) -> Result<bool, Error> {
        self.is_equal_by(1, other)
    }

    /// Returns true if both values are `equalp`. The call never returns for equal arrays, structures or hash tables
    /// that contain circular lists.
    ///
    /// # Errors
    /// Returns an error if the call cannot run or complete, such as [`Error::NoThread`].
    pub fn equalp(&self, other: &Self) -> Result<bool, Error> {
        self.is_equal_by(2, other)
    }

    fn is_equal_by(&self, kind: i32, other: &Self) -> Result<bool, Error> {
        pool::run(|cx| cx.call_entry_with(Entry::Same, &(kind, self, other)))
    }

    /// Returns the number of elements in a sequence, or of entries in a hash table.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.eval::<sbcl::Value>("(list 1 2 3)")?.len()?, 3);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] with a `type-error` if the object is neither a sequence nor a hash table, or is a
    /// dotted or circular list.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> Result<usize, Error> {
        pool::run(|cx| cx.call_entry(Entry::Size, |writer| self.write(writer)))
    }

    /// Looks up the entry for a key of a hash table, an association list or a property list, or for an index of a
    /// sequence.
    ///
    /// Returns `None` if there is no such entry. An entry whose value is `nil` exists: the `nil` is read as a `T`.
    ///
    /// A hash table compares keys by its own test, an association list by `equal`, and a property list by `eq`. So a
    /// Rust string is never found in a property list: use a [`keyword`](crate::keyword) or another
    /// [`Symbol`](crate::Symbol). A list whose first element other than `nil` is a cons is searched as an association
    /// list, and any other list as a property list. In any list, even an association or property list, a non-negative
    /// integer is an index and never a key. Like [`equalp`](Self::equalp), a search in a hash table with this test
    /// never returns for equal arrays, structures or hash tables that contain circular lists.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let prices: sbcl::Value = lisp.eval("'((\"apple\" . 30) (\"pear\" . 60))")?;
    /// assert_eq!(prices.get::<i64>("pear")?, Some(60));
    /// assert_eq!(prices.get::<i64>("plum")?, None);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if the object has no keys or indices, or is a malformed or circular list in which
    /// Lisp cannot search for `key`, or if keys are compared by `equal` or `equalp`, and `key` is a list that contains
    /// itself or has more than a million elements; [`Error::Conversion`] if the entry cannot be read as a `T`, or `key`
    /// has no Lisp counterpart.
    pub fn get<T: FromLisp + Send>(&self, key: impl IntoLisp + Sync) -> Result<Option<T>, Error> {
        let (value, found): (Value, bool) = pool::run(|cx| cx.call_entry_with(Entry::Element, &(self, &key)))?;
        found.then(|| value.to()).transpose()
    }

    /// Reads the slot `name` of an instance, a structure or a condition. The name's case and package are ignored.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let point: sbcl::Value = lisp.eval("(defstruct guide-point x y) (make-guide-point :x 1 :y 2)")?;
    /// assert_eq!(point.slot::<i64>("y")?, 2);
    /// assert_eq!(point.slots()?, [("x".to_owned(), "1".to_owned()), ("y".to_owned(), "2".to_owned())]);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if there is no such slot or the slot is unbound; [`Error::Conversion`] if the value
    /// cannot be read as a `T`.
    pub fn slot<T: FromLisp + Send>(&self, name: &str) -> Result<T, Error> {
        pool::run(|cx| cx.call_entry_with(Entry::Slot, &(self, name))).map(|Object(object)| object)
    }

    /// Returns the names and printed values of the bound slots among the object's first 100 slots. Each printed value
    /// is cut off after 1,000 characters.
    ///
    /// # Errors
    /// Returns an error if the call cannot run or complete, such as [`Error::NoThread`].
    pub fn slots(&self) -> Result<Vec<(String, String)>, Error> {
        let slots: Vec<(LossyText, LossyText)> =
            pool::run(|cx| cx.call_entry(Entry::Slots, |writer| self.write(writer)))?;
        Ok(slots.into_iter().map(|(LossyText(name), LossyText(value))| (name, value)).collect())
    }

    /// Returns handles to the elements of a list, or of a vector that is not a string.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let all = lisp.eval::<sbcl::Value>("(list 1 \"two\")")?.elements()?;
    /// assert_eq!((all[0].to::<i64>()?, all[1].to::<String>()?), (1, "two".to_owned()));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Conversion`] if the object is a string, a dotted list, or neither a list nor a vector;
    /// [`Error::Condition`] if the object is a circular list.
    pub fn elements(&self) -> Result<Vec<Self>, Error> {
        self.to()
    }
}

impl FromLisp for Value {
    const SHAPE: Shape = Shape::OPAQUE;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        Ok(Self(match reader.token() {
            Token::Nil => Repr::Nil,
            Token::True => Repr::True,
            Token::Integer(value) => Repr::Integer(value),
            Token::Single(value) => Repr::Single(value),
            Token::Double(value) => Repr::Double(value),
            Token::Character(code) => Repr::Character(code),
            Token::Handle(handle) => Repr::Object(Arc::new(handle)),
            token => return Err(reader.unexpected("a handle", token)),
        }))
    }
}

impl IntoLisp for Value {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        self.write_token(writer.0);
        Ok(())
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Nil => f.write_str("Value(nil)"),
            Repr::True => f.write_str("Value(t)"),
            Repr::Integer(value) => write!(f, "Value({value})"),
            Repr::Single(value) => write!(f, "Value({value:?})"),
            Repr::Double(value) => write!(f, "Value({})", double_text(*value)),
            Repr::Character(code) => match char::from_u32(*code) {
                Some(value) => write!(f, "Value({value:?})"),
                None => write!(f, "Value(character {code:#x})"),
            },
            Repr::Object(handle) => write!(f, "Value(object {})", handle.number()),
        }
    }
}

/// Prints the object as `prin1` does, cut off after 10,000 characters.
///
/// Printing calls Lisp. If the call fails, the text is `#<object>`; [`Value::print`] returns the error.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.print(10_000) {
            Ok(text) => f.write_str(&text),
            Err(_) => f.write_str("#<object>"),
        }
    }
}

/// Returns the printed form of `value` for error messages, cut off after [`MAX_DESCRIPTION`] characters.
pub(super) fn describe(cx: &Cx, value: &Value) -> String {
    cx.print(value, MAX_DESCRIPTION).unwrap_or_else(|_| "an object".to_owned())
}
