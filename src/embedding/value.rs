//! Handles of Lisp objects.

use std::fmt;
use std::sync::Arc;

use super::convert::{ConversionError, FromLisp, IntoLisp, Reader, Shape, Text, Writer};
use super::enter::{Cx, Entry};
use super::error::Error;
use super::pool;
use crate::image::message::{self, Handle, Token};

/// A Lisp object of any type, kept alive.
///
/// It may be stored, sent to other threads and dropped anywhere: dropping one neither blocks nor calls Lisp. Clones are the
/// same object. Its methods may be called from any thread; they have the time that they need, which may be for ever (where a
/// `print-object` does not end), but within [`enter`](super::Lisp::enter) that of the call.
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

/// What EQL cannot tell from a copy needs no handle.
#[derive(Clone)]
enum Repr {
    Nil,
    True,
    Integer(i64),
    Single(f32),
    Double(f64),
    /// Its code, which may be a surrogate.
    Character(u32),
    Object(Arc<Handle>),
}

impl Value {
    pub(super) fn of_handle(handle: Handle) -> Self {
        Self(Repr::Object(Arc::new(handle)))
    }

    /// `nil`.
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

    /// True when it is `nil`.
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

    /// Writes it.
    pub(super) fn put(&self, message: &mut message::Writer) {
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

    /// Reads it as a `T`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let list: sbcl::Value = lisp.eval("(list 1 2 3)")?;
    /// assert_eq!(list.to::<Vec<i64>>()?, [1, 2, 3]);
    /// assert!(list.to::<String>().is_err());
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Conversion`] when it is something else.
    pub fn to<T: FromLisp + Send>(&self) -> Result<T, Error> {
        pool::run(|cx| cx.ask(Entry::Objects, |writer| self.write(writer)))
    }

    /// Its type as one writes it in Lisp, such as `(simple-vector 3)`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.eval::<sbcl::Value>("(vector 1 2 3)")?.type_of()?, "(simple-vector 3)");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// When Lisp does not answer.
    pub fn type_of(&self) -> Result<String, Error> {
        pool::run(|cx| cx.ask(Entry::TypeOf, |writer| self.write(writer))).map(|Text(text)| text)
    }

    /// It as `prin1` has it, at most `limit` characters, and where there are more, `…`.
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
    /// When Lisp does not answer. That an object cannot be printed is told in the text.
    pub fn print(&self, limit: usize) -> Result<String, Error> {
        pool::run(|cx| cx.print(self, limit))
    }

    /// True when both are the same object, or equal numbers or characters: `eql`.
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
    /// When Lisp does not answer.
    pub fn eql(&self, other: &Self) -> Result<bool, Error> {
        self.same(0, other)
    }

    /// True when both are alike by `equal`.
    ///
    /// # Errors
    /// When Lisp does not answer.
    pub fn equal(&self, other: &Self) -> Result<bool, Error> {
        self.same(1, other)
    }

    /// True when both are alike by `equalp`.
    ///
    /// # Errors
    /// When Lisp does not answer.
    pub fn equalp(&self, other: &Self) -> Result<bool, Error> {
        self.same(2, other)
    }

    fn same(&self, kind: i32, other: &Self) -> Result<bool, Error> {
        pool::run(|cx| cx.ask_with(Entry::Same, &(kind, self, other)))
    }

    /// How many elements a sequence has, or entries a hash table.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.eval::<sbcl::Value>("(list 1 2 3)")?.len()?, 3);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// A `type-error` of anything else.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> Result<usize, Error> {
        pool::run(|cx| cx.ask(Entry::Size, |writer| self.write(writer)))
    }

    /// What a hash table, an association list or a property list has under `key`, or a sequence at that index. `None` when
    /// there is nothing; something that is `nil` is read as such.
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
    /// When it is none of these, or what there is is no `T`.
    pub fn get<T: FromLisp + Send>(&self, key: impl IntoLisp + Sync) -> Result<Option<T>, Error> {
        let (value, found): (Value, bool) = pool::run(|cx| cx.ask_with(Entry::Element, &(self, &key)))?;
        found.then(|| value.to()).transpose()
    }

    /// What the slot `name` of an instance, a structure or a condition holds. Neither case nor package of the name matter.
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
    /// When there is no such slot, it is unbound, or what it holds is no `T`.
    pub fn slot<T: FromLisp + Send>(&self, name: &str) -> Result<T, Error> {
        pool::run(|cx| cx.ask_with(Entry::Slot, &(self, name)))
    }

    /// The names of the slots that are bound, and what they hold, printed; at most 100.
    ///
    /// # Errors
    /// When Lisp does not answer.
    pub fn slots(&self) -> Result<Vec<(String, String)>, Error> {
        let slots: Vec<(Text, Text)> = pool::run(|cx| cx.ask(Entry::Slots, |writer| self.write(writer)))?;
        Ok(slots.into_iter().map(|(Text(name), Text(value))| (name, value)).collect())
    }

    /// The elements of a list or a vector.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let all = lisp.eval::<sbcl::Value>("(list 1 \"two\")")?.elements()?;
    /// assert_eq!((all[0].to::<i64>()?, all[1].to::<String>()?), (1, "two".to_owned()));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// When it is no sequence.
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
        self.put(writer.0);
        Ok(())
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Nil => f.write_str("Value(nil)"),
            Repr::True => f.write_str("Value(t)"),
            Repr::Integer(value) => write!(f, "Value({value})"),
            Repr::Single(value) => write!(f, "Value({value})"),
            Repr::Double(value) => write!(f, "Value({value}d0)"),
            Repr::Character(code) => match char::from_u32(*code) {
                Some(value) => write!(f, "Value({value:?})"),
                None => write!(f, "Value(character {code:#x})"),
            },
            Repr::Object(handle) => write!(f, "Value(object {})", handle.number()),
        }
    }
}

/// As `prin1` has it, at most 10,000 characters. This calls Lisp; [`Value::print`] tells when that fails.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.print(10_000) {
            Ok(text) => f.write_str(&text),
            Err(_) => f.write_str("#<object>"),
        }
    }
}

/// Reads and writes as `cx` does, for what the crate does with values itself.
pub(super) fn describe(cx: &Cx, value: &Value) -> String {
    cx.print(value, 60).unwrap_or_else(|_| "an object".to_owned())
}
