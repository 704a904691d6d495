//! Conversions of Lisp objects to Rust values and back.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::fmt;
use std::hash::{BuildHasher, Hash};

use super::enter::{Cx, Entry};
use super::error::Error;
use super::rounding;
use super::value::Value;
use crate::image::message::{self, Characters, KeyWithoutValue, Token};
use crate::image::message_buffer::MessageBuffer;
use crate::image::program;

/// A failed conversion: a Lisp object cannot be read as the requested Rust type, or a Rust value has no Lisp
/// counterpart.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// let error = lisp.eval::<Vec<i8>>("(list 1 2 300)").unwrap_err();
/// assert_eq!(error.to_string(), "expected an integer from -128 to 127, but found 300 (in element 2)");
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct ConversionError {
    /// A description of what was expected.
    pub expected: String,
    /// A description of what was found instead. Long text, such as the text of a string, is cut off.
    pub found: String,
    /// The position of the object that was found, as a list of parts such as `element 3` or `the key of entry 0`,
    /// outermost part first. In a long list, `…` replaces the innermost parts. Elements, entries and values are
    /// numbered from 0, arguments from 1.
    pub place: Vec<String>,
    /// True if the object could not be examined because Lisp could not be called, was interrupted, or had too little
    /// stack or heap left. The object may be readable as the requested type nevertheless.
    is_unexamined: bool,
}

impl fmt::Display for ConversionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {}, but found {}", self.expected, self.found)?;
        match &self.place[..] {
            [] => Ok(()),
            place => write!(f, " (in {})", place.join(", ")),
        }
    }
}

impl ConversionError {
    /// Makes an error for a conversion that a program implements itself.
    pub fn new(expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self { expected: expected.into(), found: found.into(), place: Vec::new(), is_unexamined: false }
    }

    /// Adds `place`, an enclosing position, to the error. If the error would have more than [`MAX_PLACES`] positions,
    /// `…` replaces the innermost positions.
    pub(super) fn with_outer_place(mut self, place: impl FnOnce() -> String) -> Self {
        if self.place.len() >= MAX_PLACES {
            self.place.truncate(MAX_PLACES - 2);
            self.place.push("…".to_owned());
        }
        self.place.insert(0, place());
        self
    }

    /// Returns the error for an object that is nested too deeply or contains itself, and for a stack that is nearly
    /// used up.
    #[cold]
    fn too_deep() -> Self {
        let error = Self::new(
            "an object of limited nesting depth",
            "an object that is nested too deeply or contains itself (or the stack is nearly used up)",
        );
        Self { is_unexamined: true, ..error }
    }
}

/// Maximum length of an object's text in the description of the object, in characters.
pub(super) const MAX_DESCRIPTION: usize = 60;

/// Maximum number of positions that [`ConversionError::with_outer_place`] keeps.
const MAX_PLACES: usize = 32;

/// Maximum number of values that a host function returns. SBCL puts the values on the control stack; more values could
/// extend beyond the guard pages at the end of the stack.
const MAX_VALUES: usize = 10_000;

/// Maximum nesting depth of messages: an object that is nested too deeply to be written in one message is a handle
/// there, and is read from another message.
const MAX_FETCH_DEPTH: u32 = 10_000;

/// The depth to which Lisp writes out an object for Rust, in levels of lists, vectors and hash tables. A hash table
/// takes two levels, as a list of pairs does.
///
/// Unless the shape is opaque, numbers, characters, strings, symbols and vectors of octets are written at any depth.
/// Other vectors, lists and hash tables become handles below this depth. All other objects, such as instances and
/// functions, become handles at any depth. If the shape is opaque, every object below the depth becomes a handle,
/// except `nil`, `t`, fixnums, floats and characters. In the shape of `bool` and `()`, every object that would become a
/// handle in an opaque shape becomes `t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape(u16);

impl Shape {
    /// The shape of objects that are written without levels: numbers, characters, strings, symbols and vectors of
    /// octets.
    pub const ATOM: Self = Self(0);
    /// The shape of a handle: the object itself is not written out.
    pub const OPAQUE: Self = Self(256);
    /// The shape for types that learn only whether the object is `nil`.
    const TRUTH: Self = Self(512);
    /// The largest depth that Lisp writes.
    pub const DEEP: Self = Self(255);

    /// Returns the shape of a container whose elements have this shape.
    #[must_use]
    pub const fn nested(self) -> Self {
        // At the largest depth, an object that is not written out may be a container, which `t` cannot stand for.
        Self(if self.0 & 255 == 255 { self.0 & !Self::TRUTH.0 } else { self.0 + 1 })
    }

    /// Returns a shape that serves two types: a type that needs this shape, and a type that needs `other`. Of two
    /// opaque shapes, the result is the one with fewer levels, because an object that is not written out can still be
    /// fetched.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        // `t` may stand for the object only if both types learn only whether the object is `nil`.
        let removed = if self.0 & other.0 & Self::TRUTH.0 == 0 { Self::TRUTH.0 } else { 0 };
        let (this, other) = (Self(self.0 & !removed), Self(other.0 & !removed));
        let deeper = if this.0 & 255 > other.0 & 255 { this } else { other };
        match (this.0 & 256 != 0, other.0 & 256 != 0) {
            (true, false) => this,
            (false, true) => other,
            (true, true) if deeper.0 == this.0 => other,
            (true, true) => this,
            (false, false) => deeper,
        }
    }

    /// Returns the number that stands for this shape in calls into Lisp.
    pub(super) const fn code(self) -> u16 {
        self.0
    }
}

/// A reader that reads the Lisp objects in a message one after another.
#[derive(Debug)]
pub struct Reader<'m> {
    cx: &'m Cx,
    message: message::MessageReader<'m>,
    /// The number of enclosing messages that are being read.
    fetch_depth: u32,
}

/// A guard whose destructor skips the rest of an object, unless the object has been read.
struct SkipGuard<'r, 'a> {
    reader: &'r mut Reader<'a>,
    start: usize,
    is_read: bool,
}

impl Drop for SkipGuard<'_, '_> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_read {
            self.reader.message.skip_rest(self.start);
        }
    }
}

impl<'m> Reader<'m> {
    #[inline]
    pub(super) fn new(cx: &'m Cx, message: &'m [u64]) -> Self {
        Self { cx, message: message::MessageReader::new(message), fetch_depth: 0 }
    }

    /// Returns an error unless the stack has room to read one more level.
    #[inline]
    pub(super) fn check_stack_room(&self) -> Result<(), ConversionError> {
        if self.cx.context().has_stack_room() { Ok(()) } else { Err(ConversionError::too_deep()) }
    }

    /// Reads the next object. If the object cannot be read as a `T`, the next read starts at the object that follows.
    ///
    /// An implementation of [`FromLisp::from_lisp`] should read one object. A second read would read the object that
    /// follows, such as the next element of the enclosing list, or `nil` if no object follows.
    ///
    /// # Errors
    /// Returns an error if the object cannot be read as a `T`, or the stack has no room for one more level.
    #[inline]
    pub fn read<T: FromLisp>(&mut self) -> Result<T, ConversionError> {
        self.check_stack_room()?;
        // For a type of the shape OPAQUE, the handle is the object. For a type of the shape TRUTH, the handle suffices: the
        // object is not `nil`. Other types read what the handle refers to.
        if !matches!(T::SHAPE, Shape::OPAQUE | Shape::TRUTH) && self.message.is_at_handle() {
            return self.read_or_skip(|reader| reader.fetch(T::SHAPE, T::from_lisp));
        }
        self.read_or_skip(T::from_lisp)
    }

    /// Reads an object with `read`. If `read` fails, panics or reads nothing, skips the rest of the object, so that the
    /// next read starts at the next object.
    #[inline]
    pub(super) fn read_or_skip<T, E>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let start = self.message.position();
        let mut guard = SkipGuard { reader: self, start, is_read: false };
        let result = read(guard.reader);
        guard.is_read = result.is_ok() && guard.reader.message.position() > start;
        result
    }

    /// Reads the next object with `read`. If the message contains a handle instead of the object, first makes Lisp
    /// write the object out to the depth that `shape` gives.
    pub(super) fn fetch<T, E: From<ConversionError>>(
        &mut self,
        shape: Shape,
        read: impl FnOnce(&mut Reader<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        match self.message.take_handle() {
            None => read(self),
            Some(handle) => self.read_handle(handle, shape, read),
        }
    }

    /// Makes Lisp write the object behind `handle` out, and reads the object with `read`.
    // Not inlined, so that a recursion through `fetch` needs stack for a message only at levels where the message
    // contains a handle.
    #[inline(never)]
    fn read_handle<T, E: From<ConversionError>>(
        &self,
        handle: message::Handle,
        shape: Shape,
        read: impl FnOnce(&mut Reader<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let value = Value::from_handle(handle);
        let message = self.write_out(&value, shape)?;
        let mut reader = self.nested_reader(&message);
        // The first token is the number of values.
        let _ = reader.token();
        read(&mut reader)
    }

    /// Makes Lisp write out the object behind `value` to the depth that `shape` gives. Returns the message.
    fn write_out(&self, value: &Value, shape: Shape) -> Result<MessageBuffer, ConversionError> {
        if self.fetch_depth == MAX_FETCH_DEPTH {
            return Err(ConversionError::too_deep());
        }
        let expected = "an object that can be passed to Rust";
        self.cx.write_out(value, shape).map_err(|error| self.failed_call(expected, value, &error))
    }

    /// Makes the error for `value`, which cannot be converted because a call of Lisp failed with `error`.
    fn failed_call(&self, expected: &str, value: &Value, error: &Error) -> ConversionError {
        let condition = error.condition();
        if condition.is_some_and(|condition| condition.is("control-stack-exhausted")) {
            return ConversionError::too_deep();
        }
        let reason = condition.map_or_else(|| error.to_string(), |condition| condition.message().to_owned());
        let failure = ConversionError::new(expected, format!("{}: {reason}", self.describe(value)));
        // Only these errors are about the object itself: for example, the object is too large for a message. Code that
        // interrupts the call may signal other errors.
        let is_about_object = condition.is_some_and(|condition| condition.is("sbcl-host/embedding::unwritable-object"));
        ConversionError { is_unexamined: !is_about_object, ..failure }
    }

    /// Returns a short description of `value` for an error message.
    pub(super) fn describe(&self, value: &Value) -> String {
        self.cx.describe(value)
    }

    /// Makes Lisp write the bound slots of an instance, a structure or a condition as a property list. Returns the
    /// message that contains the list.
    pub(super) fn slots_as_list(&self, handle: message::Handle) -> Result<MessageBuffer, ConversionError> {
        let value = Value::from_handle(handle);
        let expected = "a property list, a hash table or an instance";
        match self.cx.call::<Value>("sbcl-host/embedding::slots-as-list", (&value,)) {
            Ok(list) => self.write_out(&list, Shape::DEEP),
            Err(Error::Condition(condition)) if condition.is("type-error") => {
                Err(ConversionError::new(expected, self.describe(&value)))
            }
            Err(error) => {
                let failure = self.failed_call("an instance whose slots can be read", &value, &error);
                // Reading a slot may run methods of the program, which signal errors of any class.
                let is_error = error
                    .condition()
                    .is_some_and(|condition| condition.is("error") && !condition.is("storage-condition"));
                Err(ConversionError { is_unexamined: !is_error, ..failure })
            }
        }
    }

    /// Returns the object to call for `value`, or `None` if `value` is neither a function nor a function's name.
    pub(super) fn find_callee(&self, value: &Value) -> Result<Option<Value>, ConversionError> {
        if value.handle().is_none() {
            return Ok(None);
        }
        let callee: Value = self
            .cx
            .call_entry(Entry::Callee, |writer| value.write(writer))
            .map_err(|error| self.failed_call("a function or its name", value, &error))?;
        let is_callable = !callee.is_nil();
        Ok(is_callable.then(|| if callee.handle().is_some() { callee } else { value.clone() }))
    }

    /// Returns a reader of `message`, which contains an object from this reader's message, or an object inside that
    /// object.
    pub(super) fn nested_reader<'w>(&'w self, message: &'w [u64]) -> Reader<'w> {
        Reader { fetch_depth: self.fetch_depth + 1, ..Reader::new(self.cx, message) }
    }

    #[inline]
    pub(super) fn token(&mut self) -> Token<'m> {
        self.message.token()
    }

    pub(super) fn skip(&mut self) {
        self.message.skip();
    }

    /// Returns the words of the next object, which remains to be read.
    pub(super) fn peek(&self) -> &'m [u64] {
        self.message.peek()
    }

    /// Returns the text of the next object, which remains to be read, if the object is a string without surrogates.
    pub(super) fn peek_text(&self) -> Option<String> {
        self.message.peek_text()
    }

    pub(super) fn is_at_nil(&self) -> bool {
        self.message.is_at_nil()
    }

    pub(super) fn is_at_name(&self) -> bool {
        self.message.is_at_name()
    }

    pub(super) fn text(&mut self) -> String {
        match self.token() {
            Token::String(characters) => characters.to_text_lossy(),
            _ => String::new(),
        }
    }

    /// Reads a symbol's name. A surrogate in the name is an error.
    pub(super) fn name(&mut self) -> Result<String, ConversionError> {
        match self.token() {
            Token::String(characters) => Self::decode_text(characters),
            _ => Ok(String::new()),
        }
    }

    pub(super) fn symbol(&mut self, has_package: bool) -> Symbol {
        let package = has_package.then(|| self.text());
        Symbol { package, name: self.text() }
    }

    pub(super) fn decode_text(characters: Characters<'_>) -> Result<String, ConversionError> {
        characters
            .to_text()
            .map_err(|code| ConversionError::new("text", format!("a string with the surrogate code point {code:#x}")))
    }

    /// Makes the error for an object that begins with `token` and is not what was expected. Skips the rest of the
    /// object.
    pub(super) fn unexpected(&mut self, expected: &str, token: Token<'_>) -> ConversionError {
        let (found, more) = match token {
            Token::Nil => ("nil".to_owned(), 0),
            Token::True => ("t".to_owned(), 0),
            Token::Integer(value) => (value.to_string(), 0),
            Token::Bignum(words) => {
                let last = words.last().copied().unwrap_or(0).cast_signed();
                let (sign, unused) =
                    if last < 0 { ("negative", last.leading_ones()) } else { ("positive", last.leading_zeros()) };
                (format!("a {sign} integer of {} bits", (words.len() * 64).saturating_sub(unused as usize)), 0)
            }
            // `Display` would print 1.0 as 1, which looks like an integer.
            Token::Single(value) => (format!("{value:?}"), 0),
            Token::Double(value) => (double_text(value), 0),
            Token::Character(code) => {
                let surrogate = || format!("the surrogate {code:#x}");
                (char::from_u32(code).map_or_else(surrogate, |c| format!("the character {c:?}")), 0)
            }
            Token::String(characters) => {
                // Converting all characters of a long string would take too long.
                let text = characters.first(MAX_DESCRIPTION + 1).to_text_lossy();
                (format!("the string {:?}", shorten(&text, MAX_DESCRIPTION)), 0)
            }
            Token::Symbol(has_package) => {
                (format!("the symbol {}", shorten(&self.symbol(has_package).to_string(), MAX_DESCRIPTION)), 0)
            }
            Token::Keyword => (format!("the keyword :{}", shorten(&self.text().to_lowercase(), MAX_DESCRIPTION)), 0),
            Token::Ratio => ("a ratio".to_owned(), 2),
            Token::Complex => ("a complex number".to_owned(), 2),
            Token::List(count) => (format!("a list of {}", object_count_text(count)), count),
            Token::Dotted(count) => ("a dotted list".to_owned(), count + 1),
            Token::Vector(count) => (format!("a vector of {}", object_count_text(count)), count),
            Token::Octets(_, count) => (format!("a vector of {}", count_text(count, "octet", "octets")), 0),
            Token::Table(count) => (format!("a hash table of {}", count_text(count, "entry", "entries")), count * 2),
            Token::Doubles(words) => (format!("a vector of {}", count_text(words.len(), "float", "floats")), 0),
            Token::Values(count) => (value_count_text(count), count),
            Token::Handle(handle) => (self.describe(&Value::from_handle(handle)), 0),
        };
        for _ in 0..more {
            self.skip();
        }
        ConversionError::new(expected, found)
    }
}

/// Returns `value` in Lisp's notation, such as `1.5d0` or `1d300`. `Display` would print 1e300 with 301 digits.
pub(super) fn double_text(value: f64) -> String {
    let text = format!("{value:?}");
    if value.is_finite() && !text.contains('e') { text + "d0" } else { text.replace('e', "d") }
}

pub(super) fn object_count_text(count: usize) -> String {
    count_text(count, "object", "objects")
}

fn value_count_text(count: usize) -> String {
    if count == 1 { "one value".to_owned() } else { format!("{count} values") }
}

fn count_text(count: usize, singular: &str, plural: &str) -> String {
    if count == 1 { format!("1 {singular}") } else { format!("{count} {plural}") }
}

/// Returns `text`, cut off with `…` after `limit` characters.
pub(super) fn shorten(text: &str, limit: usize) -> String {
    let mut characters = text.chars();
    let mut short: String = characters.by_ref().take(limit).collect();
    if characters.next().is_some() {
        short.push('…');
    }
    short
}

/// A writer that writes Lisp objects into a message one after another.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// use sbcl::{ConversionError, IntoLisp, Writer};
///
/// struct Point(f64, f64);
///
/// impl IntoLisp for Point {
///     fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
///         writer.vector(|writer| {
///             self.0.write(writer)?;
///             self.1.write(writer)
///         })
///     }
/// }
///
/// assert_eq!(lisp.value(Point(1.0, 2.5))?.to_string(), "#(1.0d0 2.5d0)");
/// # Ok::<(), sbcl::Error>(())
/// ```
///
/// If the closure that writes the elements of a list, a vector or a table fails or panics, nothing of the container is
/// written. Each writer has its own lifetime, so a writer cannot be swapped for another writer:
///
/// ```compile_fail
/// use sbcl::{ConversionError, Writer};
///
/// fn swap(writer: &mut Writer<'_>) -> Result<(), ConversionError> {
///     writer.list(|outer| outer.list(|inner| { std::mem::swap(outer, inner); Ok(()) }))
/// }
/// ```
///
/// ```compile_fail
/// use sbcl::{ConversionError, IntoLisp, Writer};
///
/// struct Swap<'a, 'm>(std::cell::RefCell<&'a mut Writer<'m>>);
///
/// impl<'m> IntoLisp for Swap<'_, 'm> {
///     fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
///         std::mem::swap(*self.0.borrow_mut(), writer);
///         Ok(())
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Writer<'m>(pub(super) &'m mut message::MessageWriter);

/// Returns an error unless the stack has room for one more level of an object.
#[inline]
pub(super) fn check_stack_room() -> Result<(), ConversionError> {
    if program::has_stack_room() { Ok(()) } else { Err(ConversionError::too_deep()) }
}

impl Writer<'_> {
    /// Returns an error unless the stack has room to write one more level.
    #[inline]
    pub(super) fn check_stack_room(&self) -> Result<(), ConversionError> {
        check_stack_room()
    }

    /// Writes a list of the objects that `write` writes.
    ///
    /// # Errors
    /// Returns the error of `write`, or an error if the stack has no room for one more level.
    pub fn list(
        &mut self,
        write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
    ) -> Result<(), ConversionError> {
        self.check_stack_room()?;
        self.0.list(|inner| write(&mut Writer(inner)))
    }

    /// Writes a hash table, with the test `equal`, of the keys and values that `write` writes alternately.
    ///
    /// # Errors
    /// Returns the error of `write`, or an error if a key has no value, or the stack has no room for one more level.
    pub fn table(
        &mut self,
        write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
    ) -> Result<(), ConversionError> {
        self.check_stack_room()?;
        self.0.table(|inner| write(&mut Writer(inner)))
    }

    pub(super) fn values(
        &mut self,
        write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
    ) -> Result<(), ConversionError> {
        self.check_stack_room()?;
        self.0.values(|inner| {
            write(&mut Writer(inner))?;
            match inner.object_count() {
                0..=MAX_VALUES => Ok(()),
                count => Err(ConversionError::new(format!("at most {MAX_VALUES} values"), format!("{count} values"))),
            }
        })
    }

    /// Writes a simple vector of the objects that `write` writes.
    ///
    /// # Errors
    /// Returns the error of `write`, or an error if the stack has no room for one more level.
    pub fn vector(
        &mut self,
        write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
    ) -> Result<(), ConversionError> {
        self.check_stack_room()?;
        self.0.vector(|inner| write(&mut Writer(inner)))
    }
}

impl From<KeyWithoutValue> for ConversionError {
    fn from(_: KeyWithoutValue) -> Self {
        Self::new("a value for each key of a hash table", "a key without a value")
    }
}

/// A type that can be read from a Lisp object.
///
/// | Rust | Lisp |
/// |---|---|
/// | `i8` … `i128`, `u8` … `u128`, `isize`, `usize` | an integer that fits |
/// | `BigInt`, `BigUint` of `num-bigint` (feature `num-bigint`) | an integer, for `BigUint` not a negative one |
/// | `f64` | a float, or an integer or ratio in the range of `f64`, rounded to the nearest `f64` |
/// | `f32` | a single float, or an integer from -16777216 to 16777216 |
/// | `bool` | `nil` is false, everything else is true |
/// | `char`, `String` | a character that is not a surrogate, a string without surrogates |
/// | `Option<T>` | `nil` is `None`; any other object is read as a `T` |
/// | `Result<T, Value>` | any object: `Ok` if the object can be read as a `T`, otherwise `Err` with a handle to the object |
/// | `Vec<T>`, `[T; N]` | a list that is not dotted, or a vector that is not a string; for an array, with exactly `N` elements |
/// | `HashMap`, `BTreeMap` | a hash table, or a list of pairs, each read as a tuple of two; if two keys become equal, the first pair of a list counts, and a hash table is refused |
/// | tuples of up to eight | a call's multiple values; for one object, such as an element, an argument, a slot or a [`Value`], a list or a vector that is not a string, and for a tuple of two also a pair (a cons whose cdr is a non-empty list counts as a list) |
/// | [`Symbol`], [`Ratio`], [`Complex`] | a symbol, a rational number whose parts fit an `i128`, a number |
/// | [`Value`], [`Function`](super::Function) | any object; a function or its name |
/// | [`Serde<T>`](super::Serde) | an object that serde can read as a `T` |
/// | `()` | any values or any object, ignored |
///
/// Implement the trait for a type of your own by reading another type:
///
/// ```
/// use sbcl::{ConversionError, FromLisp, Reader, Shape};
///
/// #[derive(Debug, PartialEq)]
/// struct Cents(i64);
///
/// impl FromLisp for Cents {
///     const SHAPE: Shape = i64::SHAPE;
///
///     fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
///         Ok(Self(reader.read()?))
///     }
/// }
///
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// assert_eq!(lisp.eval::<Vec<Cents>>("'(1 2)")?, [Cents(1), Cents(2)]);
/// # Ok::<(), sbcl::Error>(())
/// ```
pub trait FromLisp: Sized {
    /// The depth to which Lisp must write out an object for this type.
    const SHAPE: Shape;
    /// The shape for reading a call's values; only tuples read more than one value.
    const VALUES: Shape = Self::SHAPE;
    /// True if this type has a value for an argument that a call omits.
    #[doc(hidden)]
    const OPTIONAL: bool = false;

    /// Reads the next object.
    ///
    /// # Errors
    /// Returns an error if the object cannot be read as this type.
    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError>;

    /// Reads as many of a call's `count` values as this type needs.
    ///
    /// # Errors
    /// Returns the errors of [`from_lisp`](Self::from_lisp), and an error if this type needs more than `count` values.
    #[doc(hidden)]
    fn from_values(reader: &mut Reader<'_>, count: usize) -> Result<Self, ConversionError> {
        let _ = count;
        // At the end of the message, the reader returns NIL.
        reader.read()
    }

    /// Converts a vector of `count` octets, packed into words, if this type is `u8`.
    #[doc(hidden)]
    fn from_octets(_words: &[u64], _count: usize) -> Option<Vec<Self>> {
        None
    }
}

/// An `Object` is a `T` that is read from one object: a tuple is read from a list or a vector, not from a call's values.
pub(super) struct Object<T>(pub(super) T);

impl<T: FromLisp> FromLisp for Object<T> {
    const SHAPE: Shape = T::SHAPE;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        T::from_lisp(reader).map(Self)
    }
}

/// A type whose values can be converted to Lisp objects, the counterpart of [`FromLisp`].
///
/// | Rust | Lisp |
/// |---|---|
/// | `f64`, `f32` | a double float, a single float |
/// | `str` | a string |
/// | `Vec<T>`, slices, arrays | a list, or a vector of octets if the elements are `u8` |
/// | tuples | a list |
/// | `HashMap`, `BTreeMap` | a hash table with the test `equal` |
/// | `None`, `false`, `()` | `nil` |
/// | `true` | `t` |
/// | `Some(value)`, references, `Box<T>` | the object for the value that they contain or refer to |
///
/// Except for `Result`, the types of [`FromLisp`]'s table that are missing here become objects of the kind from which
/// they are read.
///
/// Converting a map is an error if some keys become `equal` objects, such as `None` and `Some(false)`.
///
/// `Result` does not implement this trait: a [host function](super::HostFunction) that returns `Err` signals a
/// condition.
///
/// ```
/// use sbcl::{ConversionError, IntoLisp, Writer};
///
/// struct Cents(i64);
///
/// impl IntoLisp for Cents {
///     fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
///         self.0.write(writer)
///     }
/// }
///
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// assert_eq!(lisp.call::<i64>("+", (Cents(1), 2))?, 3);
/// # Ok::<(), sbcl::Error>(())
/// ```
pub trait IntoLisp {
    /// Writes the value as one object.
    ///
    /// # Errors
    /// Returns an error if the value has no Lisp counterpart. If the value was an argument of a call, the call is not
    /// made.
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError>;

    /// Writes a slice of values as one sequence.
    #[doc(hidden)]
    fn write_slice(slice: &[Self], writer: &mut Writer<'_>) -> Result<(), ConversionError>
    where
        Self: Sized,
    {
        writer.list(|writer| write_elements(slice, writer))
    }
}

fn write_elements<T: IntoLisp>(elements: &[T], writer: &mut Writer<'_>) -> Result<(), ConversionError> {
    elements.iter().enumerate().try_for_each(|(index, element)| {
        element.write(writer).map_err(|e| e.with_outer_place(|| format!("element {index}")))
    })
}

/// The arguments of a call: a tuple of up to eight values, or an array, a slice or a vector of values of one type.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// assert_eq!(lisp.call::<i64>("+", (1, 2, 3))?, 6);
/// assert_eq!(lisp.call::<i64>("+", [1, 2, 3])?, 6);
/// assert_eq!(lisp.call::<i64>("+", &vec![1; 50])?, 50);
/// # Ok::<(), sbcl::Error>(())
/// ```
pub trait Arguments {
    /// Writes the arguments, one object each.
    #[doc(hidden)]
    fn write_arguments(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError>;
}

macro_rules! impl_integers {
    ($($type:ty),*) => {$(
        impl FromLisp for $type {
            const SHAPE: Shape = Shape::ATOM;

            #[inline]
            fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
                let token = reader.token();
                let value = match &token {
                    Token::Integer(value) => Self::try_from(*value).ok(),
                    Token::Bignum(words) => bignum_to_i128(words).and_then(|value| Self::try_from(value).ok()),
                    _ => None,
                };
                value.ok_or_else(|| {
                    let expected = format!("an integer from {} to {}", Self::MIN, Self::MAX);
                    reader.unexpected(&expected, token)
                })
            }
        }

        impl IntoLisp for $type {
            #[inline]
            fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
                match i64::try_from(*self) {
                    Ok(value) => writer.0.integer(value),
                    // Only `u64` and `usize` have values beyond the range of `i64`.
                    Err(_) => writer.0.long_integer(*self as i128),
                }
                Ok(())
            }
        }
    )*};
}

impl_integers!(i8, i16, i32, i64, isize, u16, u32, u64, usize);

fn bignum_to_i128(words: &[u64]) -> Option<i128> {
    match *words {
        [low] => Some(i128::from(low.cast_signed())),
        [low, high] => Some((u128::from(high) << 64 | u128::from(low)).cast_signed()),
        _ => None,
    }
}

fn token_to_i128(token: &Token<'_>) -> Option<i128> {
    match token {
        Token::Integer(value) => Some(i128::from(*value)),
        Token::Bignum(words) => bignum_to_i128(words),
        _ => None,
    }
}

impl FromLisp for i128 {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let token = reader.token();
        token_to_i128(&token).ok_or_else(|| reader.unexpected("an integer from -2^127 to 2^127 - 1", token))
    }
}

impl IntoLisp for i128 {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.long_integer(*self);
        Ok(())
    }
}

impl FromLisp for u128 {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let token = reader.token();
        let value = match &token {
            Token::Integer(value) => Self::try_from(*value).ok(),
            Token::Bignum([low, high, 0]) => Some(Self::from(*high) << 64 | Self::from(*low)),
            Token::Bignum(words) => bignum_to_i128(words).and_then(|value| Self::try_from(value).ok()),
            _ => None,
        };
        value.ok_or_else(|| reader.unexpected("an integer from 0 to 2^128 - 1", token))
    }
}

impl IntoLisp for u128 {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        match i128::try_from(*self) {
            Ok(value) => writer.0.long_integer(value),
            Err(_) => writer.0.bignum(&[*self as u64, (*self >> 64) as u64, 0]),
        }
        Ok(())
    }
}

/// Unpacks `count` octets from the words that hold them.
pub(super) fn unpack_octets(words: &[u64], count: usize) -> Vec<u8> {
    let mut octets = vec![0; words.len() * 8];
    for (target, word) in octets.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *target = word.to_le_bytes();
    }
    octets.truncate(count);
    octets
}

impl FromLisp for u8 {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let token = reader.token();
        let value = if let Token::Integer(value) = token { Self::try_from(value).ok() } else { None };
        value.ok_or_else(|| reader.unexpected("an integer from 0 to 255", token))
    }

    fn from_octets(words: &[u64], count: usize) -> Option<Vec<Self>> {
        Some(unpack_octets(words, count))
    }
}

impl IntoLisp for u8 {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.integer(i64::from(*self));
        Ok(())
    }

    fn write_slice(slice: &[Self], writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.octets(slice);
        Ok(())
    }
}

impl FromLisp for f64 {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let token = reader.token();
        read_real(reader, token, "a real number")
    }
}

/// Reads the real number that begins with `token`, rounded to the nearest `f64`. If the object is not a real number,
/// the error says that `expected` was expected.
fn read_real(reader: &mut Reader<'_>, token: Token<'_>, expected: &str) -> Result<f64, ConversionError> {
    let one = [1];
    let quotient = match token {
        Token::Double(value) => return Ok(value),
        Token::Single(value) => return Ok(value.into()),
        Token::Integer(value) => return Ok(value as f64),
        Token::Bignum(words) => rounding::quotient(words, &one),
        Token::Ratio => match (reader.token(), reader.token()) {
            (Token::Integer(numerator), Token::Integer(denominator)) => {
                rounding::quotient(&[numerator.cast_unsigned()], &[denominator.cast_unsigned()])
            }
            (Token::Integer(numerator), Token::Bignum(words)) => {
                rounding::quotient(&[numerator.cast_unsigned()], words)
            }
            (Token::Bignum(words), Token::Integer(denominator)) => {
                rounding::quotient(words, &[denominator.cast_unsigned()])
            }
            (Token::Bignum(numerator), Token::Bignum(denominator)) => rounding::quotient(numerator, denominator),
            (_, token) => return Err(reader.unexpected(expected, token)),
        },
        token => return Err(reader.unexpected(expected, token)),
    };
    if quotient.is_finite() {
        Ok(quotient)
    } else {
        Err(ConversionError::new("a number in the range of an f64", "a number beyond the range of an f64"))
    }
}

impl IntoLisp for f64 {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.double(*self);
        Ok(())
    }
}

impl FromLisp for f32 {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        match reader.token() {
            Token::Single(value) => Ok(value),
            Token::Integer(value) if value.unsigned_abs() <= 1 << f32::MANTISSA_DIGITS => Ok(value as Self),
            token => Err(reader.unexpected("a single float, or an integer from -16777216 to 16777216", token)),
        }
    }
}

impl IntoLisp for f32 {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.single(*self);
        Ok(())
    }
}

impl FromLisp for bool {
    const SHAPE: Shape = Shape::TRUTH;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let value = !reader.is_at_nil();
        reader.skip();
        Ok(value)
    }
}

impl IntoLisp for bool {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.boolean(*self);
        Ok(())
    }
}

impl FromLisp for char {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let token = reader.token();
        let value = if let Token::Character(code) = token { Self::from_u32(code) } else { None };
        value.ok_or_else(|| reader.unexpected("a character", token))
    }
}

impl IntoLisp for char {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.character(u32::from(*self));
        Ok(())
    }
}

impl FromLisp for String {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        match reader.token() {
            Token::String(characters) => Reader::decode_text(characters),
            token => Err(reader.unexpected("a string", token)),
        }
    }
}

/// Text that Lisp wrote for people. U+FFFD replaces the surrogates, which a Rust string cannot hold.
pub(super) struct LossyText(pub(super) String);

impl FromLisp for LossyText {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        match reader.token() {
            Token::String(characters) => Ok(Self(characters.to_text_lossy())),
            token => Err(reader.unexpected("a string", token)),
        }
    }
}

impl IntoLisp for str {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.string(self);
        Ok(())
    }
}

impl IntoLisp for String {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.string(self);
        Ok(())
    }
}

impl FromLisp for () {
    const SHAPE: Shape = Shape::TRUTH;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        reader.skip();
        Ok(())
    }

    fn from_values(_: &mut Reader<'_>, _: usize) -> Result<Self, ConversionError> {
        Ok(())
    }
}

impl IntoLisp for () {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.nil();
        Ok(())
    }
}

impl<T: FromLisp> FromLisp for Option<T> {
    const SHAPE: Shape = T::SHAPE;
    const OPTIONAL: bool = true;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        if reader.is_at_nil() {
            reader.skip();
            Ok(None)
        } else {
            reader.read().map(Some)
        }
    }
}

impl<T: IntoLisp> IntoLisp for Option<T> {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.check_stack_room()?;
        match self {
            Some(value) => value.write(writer),
            None => ().write(writer),
        }
    }
}

/// Reads an object that may or may not be a `T`. If the object is not a `T`, the result is `Err` with a handle to the
/// object.
///
/// Reading fails if it cannot determine whether the object is a `T`: the call is interrupted, code that interrupts the
/// call signals an error, the stack or the heap is nearly used up, or `T` is a recursive type and the object is nested
/// too deeply.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// use sbcl::Value;
///
/// let divide = "(lambda (n) (handler-case (/ 12 n) (error (condition) condition)))";
/// let quotients: Vec<Result<i64, Value>> = lisp.eval(&format!("(mapcar {divide} '(3 0))"))?;
/// assert_eq!(*quotients[0].as_ref().unwrap(), 4);
/// assert_eq!(quotients[1].as_ref().unwrap_err().type_of()?, "division-by-zero");
/// # Ok::<(), sbcl::Error>(())
/// ```
impl<T: FromLisp> FromLisp for Result<T, Value> {
    // Lisp writes a handle even for an object that can be read as a `T`, because `Err` needs the object itself.
    const SHAPE: Shape = Shape::OPAQUE;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let value: Value = reader.read()?;
        let converted = reader.write_out(&value, T::SHAPE).and_then(|message| {
            let mut reader = reader.nested_reader(&message);
            // The first token is the number of values.
            let _ = reader.token();
            reader.read()
        });
        match converted {
            Ok(object) => Ok(Ok(object)),
            // While Lisp is unwinding, even an error that the program's own `from_lisp` made may say nothing about the
            // object.
            Err(error) if error.is_unexamined || reader.cx.context().is_unwinding() => Err(error),
            Err(_) => Ok(Err(value)),
        }
    }
}

impl<T: FromLisp> FromLisp for Vec<T> {
    const SHAPE: Shape = T::SHAPE.nested();

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let count = match reader.token() {
            Token::Nil => 0,
            Token::List(count) | Token::Vector(count) => count,
            Token::Octets(words, count) => {
                return match T::from_octets(words, count) {
                    Some(octets) => Ok(octets),
                    None => {
                        read_elements(reader, unpack_octets(words, count), |octet, writer| writer.integer(octet.into()))
                    }
                };
            }
            Token::Doubles(words) => {
                return read_elements(reader, words.iter().copied().map(f64::from_bits), |double, writer| {
                    writer.double(double)
                });
            }
            token => return Err(reader.unexpected("a list or a vector", token)),
        };
        // At most 1 MiB is reserved in advance: if the elements cannot be read as a `T`, the memory is not needed.
        let mut items = Self::with_capacity(count.min((1 << 20) / size_of::<T>().max(1)));
        for index in 0..count {
            items.push(reader.read().map_err(|error| error.with_outer_place(|| format!("element {index}")))?);
        }
        Ok(items)
    }
}

/// Reads each element of a specialised vector as a `T`. `write` writes an element into a message, from which this
/// function then reads the element.
fn read_elements<T: FromLisp, E>(
    reader: &Reader<'_>,
    elements: impl IntoIterator<Item = E>,
    write: impl Fn(E, &mut message::MessageWriter),
) -> Result<Vec<T>, ConversionError> {
    let cx = reader.cx;
    elements
        .into_iter()
        .enumerate()
        .map(|(index, element)| {
            let mut writer = message::MessageWriter::new();
            write(element, &mut writer);
            Reader::new(cx, writer.words())
                .read()
                .map_err(|error| error.with_outer_place(|| format!("element {index}")))
        })
        .collect()
}

/// Makes a message that consists of a list of `elements`. `write` writes an element.
fn list_message<E>(
    elements: impl IntoIterator<Item = E>,
    write: impl Fn(E, &mut message::MessageWriter),
) -> message::MessageWriter {
    let mut message = message::MessageWriter::new();
    let Ok(()) = message.list(|list| {
        elements.into_iter().for_each(|element| write(element, list));
        Ok::<_, Infallible>(())
    });
    message
}

impl<T: FromLisp, const N: usize> FromLisp for [T; N] {
    const SHAPE: Shape = T::SHAPE.nested();

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let items = Vec::from_lisp(reader)?;
        items.try_into().map_err(|items: Vec<T>| {
            ConversionError::new(format!("a sequence of {}", object_count_text(N)), object_count_text(items.len()))
        })
    }
}

impl<T: IntoLisp> IntoLisp for [T] {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        T::write_slice(self, writer)
    }
}

impl<T: IntoLisp> IntoLisp for Vec<T> {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        T::write_slice(self, writer)
    }
}

impl<T: IntoLisp, const N: usize> IntoLisp for [T; N] {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        T::write_slice(self, writer)
    }
}

impl<T: IntoLisp + ?Sized> IntoLisp for &T {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.check_stack_room()?;
        (**self).write(writer)
    }
}

impl<T: IntoLisp + ?Sized> IntoLisp for Box<T> {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.check_stack_room()?;
        (**self).write(writer)
    }
}

/// Reads the entries of a hash table, or a list of pairs. `add` adds an entry and returns true, unless an earlier entry
/// has an equal key. In a list of pairs, the earlier entry shadows the later entry, as in an association list. In a hash
/// table, equal keys are an error, because one of the two entries would be lost.
fn read_entries<K: FromLisp, V: FromLisp>(
    reader: &mut Reader<'_>,
    mut add: impl FnMut(K, V) -> bool,
) -> Result<(), ConversionError> {
    match reader.token() {
        Token::Nil => {}
        Token::Table(count) => {
            for index in 0..count {
                let key =
                    reader.read().map_err(|error| error.with_outer_place(|| format!("the key of entry {index}")))?;
                let value =
                    reader.read().map_err(|error| error.with_outer_place(|| format!("the value of entry {index}")))?;
                if !add(key, value) {
                    let found = "a key that becomes the same Rust key as an earlier key";
                    let error = ConversionError::new("a hash table whose keys become different Rust keys", found);
                    return Err(error.with_outer_place(|| format!("the key of entry {index}")));
                }
            }
        }
        Token::List(count) => {
            for index in 0..count {
                let (key, value) =
                    reader.read::<(K, V)>().map_err(|error| error.with_outer_place(|| format!("element {index}")))?;
                add(key, value);
            }
        }
        token => return Err(reader.unexpected("a hash table, or a list of pairs", token)),
    }
    Ok(())
}

fn write_entries<'a, K: IntoLisp + 'a, V: IntoLisp + 'a>(
    entries: impl Iterator<Item = (&'a K, &'a V)>,
    writer: &mut Writer<'_>,
) -> Result<(), ConversionError> {
    writer.table(|writer| {
        for (index, (key, value)) in entries.enumerate() {
            key.write(writer).map_err(|error| error.with_outer_place(|| format!("the key of entry {index}")))?;
            value.write(writer).map_err(|error| error.with_outer_place(|| format!("the value of entry {index}")))?;
        }
        Ok(())
    })
}

impl<K: FromLisp + Eq + Hash, V: FromLisp, S: BuildHasher + Default> FromLisp for HashMap<K, V, S> {
    const SHAPE: Shape = <(K, V)>::SHAPE.nested();

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let mut map = Self::default();
        read_entries(reader, |key, value| {
            let count = map.len();
            map.entry(key).or_insert(value);
            map.len() > count
        })?;
        Ok(map)
    }
}

impl<K: IntoLisp, V: IntoLisp, S> IntoLisp for HashMap<K, V, S> {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        write_entries(self.iter(), writer)
    }
}

impl<K: FromLisp + Ord, V: FromLisp> FromLisp for BTreeMap<K, V> {
    const SHAPE: Shape = <(K, V)>::SHAPE.nested();

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let mut map = Self::new();
        read_entries(reader, |key, value| {
            let count = map.len();
            map.entry(key).or_insert(value);
            map.len() > count
        })?;
        Ok(map)
    }
}

impl<K: IntoLisp, V: IntoLisp> IntoLisp for BTreeMap<K, V> {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        write_entries(self.iter(), writer)
    }
}

macro_rules! impl_tuples {
    ($($count:literal: $($name:ident . $index:tt),*;)*) => {$(
        impl<$($name: FromLisp),*> FromLisp for ($($name,)*) {
            const SHAPE: Shape = Self::VALUES.nested();
            const VALUES: Shape = join_shapes(&[$($name::SHAPE),*]);

            fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
                let present = match reader.token() {
                    Token::List($count) | Token::Vector($count) => $count,
                    Token::Dotted(before) if before + 1 == $count => $count,
                    // A list of one object is also a pair whose cdr is NIL.
                    Token::List(before) if before == 1 && $count == 2 => 1,
                    Token::Octets(words, $count) => {
                        let list = list_message(unpack_octets(words, $count), |octet, list| list.integer(octet.into()));
                        return Self::from_lisp(&mut reader.nested_reader(list.words()));
                    }
                    Token::Doubles(words) if words.len() == $count => {
                        let list = list_message(words, |word, list| list.double(f64::from_bits(*word)));
                        return Self::from_lisp(&mut reader.nested_reader(list.words()));
                    }
                    token => {
                        let expected = format!("a sequence of {}", object_count_text($count));
                        return Err(reader.unexpected(&expected, token));
                    }
                };
                Ok(($({
                    let element =
                        if $index < present { reader.read::<$name>() } else { reader.nested_reader(message::NIL).read() };
                    element.map_err(|error| error.with_outer_place(|| format!("element {}", $index)))?
                },)*))
            }

            fn from_values(reader: &mut Reader<'_>, count: usize) -> Result<Self, ConversionError> {
                if count < $count {
                    for _ in 0..count {
                        reader.skip();
                    }
                    return Err(ConversionError::new(value_count_text($count), value_count_text(count)));
                }
                Ok(($(reader.read::<$name>().map_err(|error| error.with_outer_place(|| format!("value {}", $index)))?,)*))
            }
        }

        impl<$($name: IntoLisp),*> IntoLisp for ($($name,)*) {
            fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
                writer.list(|writer| {
                    $(self.$index.write(writer).map_err(|error| error.with_outer_place(|| format!("element {}", $index)))?;)*
                    Ok(())
                })
            }
        }

        impl<$($name: IntoLisp),*> Arguments for ($($name,)*) {
            fn write_arguments(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
                $(self.$index.write(writer).map_err(|error| error.with_argument_place($index + 1))?;)*
                Ok(())
            }
        }
    )*};
}

const fn join_shapes(shapes: &[Shape]) -> Shape {
    let mut shape = shapes[0];
    let mut index = 1;
    while index < shapes.len() {
        shape = shape.or(shapes[index]);
        index += 1;
    }
    shape
}

impl_tuples! {
    1: A.0;
    2: A.0, B.1;
    3: A.0, B.1, C.2;
    4: A.0, B.1, C.2, D.3;
    5: A.0, B.1, C.2, D.3, E.4;
    6: A.0, B.1, C.2, D.3, E.4, F.5;
    7: A.0, B.1, C.2, D.3, E.4, F.5, G.6;
    8: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7;
}

impl Arguments for () {
    fn write_arguments(&self, _: &mut Writer<'_>) -> Result<(), ConversionError> {
        Ok(())
    }
}

impl<T: IntoLisp> Arguments for [T] {
    fn write_arguments(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        let mut arguments = self.iter().zip(1..);
        arguments.try_for_each(|(argument, number)| {
            argument.write(writer).map_err(|error| error.with_argument_place(number))
        })
    }
}

impl<T: IntoLisp> Arguments for Vec<T> {
    fn write_arguments(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        self[..].write_arguments(writer)
    }
}

impl<T: IntoLisp, const N: usize> Arguments for [T; N] {
    fn write_arguments(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        self[..].write_arguments(writer)
    }
}

impl<T: Arguments + ?Sized> Arguments for &T {
    fn write_arguments(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        (**self).write_arguments(writer)
    }
}

/// A symbol, given by the symbol's name and the name of the symbol's package. Conversion to Lisp interns a symbol that
/// has a package.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// use sbcl::Symbol;
///
/// assert_eq!(lisp.eval::<Symbol>("'car")?, Symbol::new("COMMON-LISP", "CAR"));
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Symbol {
    /// The name of the symbol's package, `KEYWORD` for a keyword. With `None`, each conversion to Lisp makes a new
    /// uninterned symbol.
    pub package: Option<String>,
    /// The symbol's name, usually in upper case.
    pub name: String,
}

impl Symbol {
    /// Makes a symbol from the name of the symbol's package and the symbol's own name. The names are case-sensitive.
    pub fn new(package: impl Into<String>, name: impl Into<String>) -> Self {
        Self { package: Some(package.into()), name: name.into() }
    }
}

/// Returns the keyword whose name is `name` in upper case: `keyword("rate")` is `:RATE`.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// assert!(lisp.call::<bool>("keywordp", (sbcl::keyword("rate"),))?);
/// # Ok::<(), sbcl::Error>(())
/// ```
#[must_use]
pub fn keyword(name: &str) -> Symbol {
    Symbol::new("KEYWORD", name.chars().map(upper_case).collect::<String>())
}

/// Converts a character to upper case as Lisp's reader does: only if the result is one character that converts back.
pub(super) fn upper_case(character: char) -> char {
    let mut upper = character.to_uppercase();
    match (upper.next(), upper.next()) {
        (Some(upper), None) if upper.to_lowercase().eq([character]) => upper,
        _ => character,
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.package.as_deref() {
            Some("KEYWORD") => write!(f, ":{}", self.name),
            Some(package) => write!(f, "{package}::{}", self.name),
            None => write!(f, "#:{}", self.name),
        }
    }
}

impl FromLisp for Symbol {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        match reader.token() {
            Token::Nil => Ok(Self::new("COMMON-LISP", "NIL")),
            Token::True => Ok(Self::new("COMMON-LISP", "T")),
            Token::Symbol(true) => {
                let (package, name) = (reader.read(), reader.read());
                Ok(Self { package: Some(package?), name: name? })
            }
            Token::Symbol(false) => Ok(Self { package: None, name: reader.read()? }),
            Token::Keyword => Ok(Self::new("KEYWORD", reader.read::<String>()?)),
            token => Err(reader.unexpected("a symbol", token)),
        }
    }
}

impl IntoLisp for Symbol {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.symbol(self.package.as_deref(), &self.name);
        Ok(())
    }
}

/// A ratio of two integers. A ratio read from Lisp is in lowest terms and has a positive denominator, which is 1 for an
/// integer.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// assert_eq!(lisp.eval::<sbcl::Ratio>("(/ 6 -4)")?, sbcl::Ratio { numerator: -3, denominator: 2 });
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ratio {
    /// The dividend.
    pub numerator: i128,
    /// The divisor. In the conversion to Lisp, 0 counts as 1.
    pub denominator: i128,
}

impl FromLisp for Ratio {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        match reader.token() {
            Token::Ratio => {
                let (numerator, denominator) = (reader.read(), reader.read());
                Ok(Self { numerator: numerator?, denominator: denominator? })
            }
            token => match token_to_i128(&token) {
                Some(numerator) => Ok(Self { numerator, denominator: 1 }),
                None => {
                    Err(reader.unexpected("an integer or ratio whose numerator and denominator fit an i128", token))
                }
            },
        }
    }
}

impl IntoLisp for Ratio {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.ratio(self.numerator, self.denominator);
        Ok(())
    }
}

/// A complex number. A `Complex` can also be read from a real number, because Lisp turns complex rationals with the
/// imaginary part 0 into reals.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// assert_eq!(lisp.eval::<sbcl::Complex>("(sqrt -4)")?, sbcl::Complex { re: 0.0, im: 2.0 });
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Complex {
    /// The real part.
    pub re: f64,
    /// The imaginary part.
    pub im: f64,
}

impl FromLisp for Complex {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        match reader.token() {
            Token::Complex => {
                let (re, im) = (reader.read(), reader.read());
                Ok(Self { re: re?, im: im? })
            }
            token => Ok(Self { re: read_real(reader, token, "a number")?, im: 0.0 }),
        }
    }
}

impl IntoLisp for Complex {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        writer.0.complex(self.re, self.im);
        Ok(())
    }
}
