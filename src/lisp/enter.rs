//! On a Lisp thread: direct calls.

use std::marker::PhantomData;

use super::convert::{Arguments, ConversionError, FromLisp, IntoLisp, Reader, Shape, Text, Writer};
use super::define::{HostFunction, LocalFunction};
use super::error::{Condition, Error};
use super::function::Function;
use super::value::{self, Value};
use crate::image::message::{self, Token};
use crate::image::program::{CallStatus, Inside, sbcl_entry};
use crate::image::words::Words;
use crate::panics;

/// Functions of Lisp's that this side calls: `enum sbcl_entry` of `ffi/sbcl_host.h`.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub(super) enum Entry {
    RunUnderConditions = sbcl_entry::SBCL_ENTRY_RUN_UNDER_CONDITIONS,
    EvaluateText = sbcl_entry::SBCL_ENTRY_EVALUATE_TEXT,
    LoadText = sbcl_entry::SBCL_ENTRY_LOAD_TEXT,
    LoadFile = sbcl_entry::SBCL_ENTRY_LOAD_FILE,
    FindFunction = sbcl_entry::SBCL_ENTRY_FIND_FUNCTION,
    Release = sbcl_entry::SBCL_ENTRY_RELEASE,
    Interrupt = sbcl_entry::SBCL_ENTRY_INTERRUPT,
    DefineFunction = sbcl_entry::SBCL_ENTRY_DEFINE_FUNCTION,
    Print = sbcl_entry::SBCL_ENTRY_PRINT,
    TypeOf = sbcl_entry::SBCL_ENTRY_TYPE_OF,
    Same = sbcl_entry::SBCL_ENTRY_SAME,
    OctetCount = sbcl_entry::SBCL_ENTRY_OCTET_COUNT,
    CopyOctets = sbcl_entry::SBCL_ENTRY_COPY_OCTETS,
    Size = sbcl_entry::SBCL_ENTRY_SIZE,
    Slot = sbcl_entry::SBCL_ENTRY_SLOT,
    Slots = sbcl_entry::SBCL_ENTRY_SLOTS,
    Element = sbcl_entry::SBCL_ENTRY_ELEMENT,
    Objects = sbcl_entry::SBCL_ENTRY_OBJECTS,
    Symbol = sbcl_entry::SBCL_ENTRY_SYMBOL,
    StartThread = sbcl_entry::SBCL_ENTRY_START_THREAD,
    LocalFunction = sbcl_entry::SBCL_ENTRY_LOCAL_FUNCTION,
    BorrowOctets = sbcl_entry::SBCL_ENTRY_BORROW_OCTETS,
    Save = sbcl_entry::SBCL_ENTRY_SAVE,
    Callee = sbcl_entry::SBCL_ENTRY_CALLEE,
    CurrentThread = sbcl_entry::SBCL_ENTRY_CURRENT_THREAD,
}

/// Proof that this thread is one of Lisp's: [`Lisp::enter`](super::Lisp::enter) lends it.
///
/// Calls by it are direct: no other thread has to be woken, and nothing waits. It cannot leave its thread, nor outlive the
/// closure that got it:
///
/// ```compile_fail,E0521
/// let lisp = sbcl::Lisp::get_or_boot().unwrap();
/// let mut kept = None;
/// lisp.enter(|cx| { kept = Some(cx); Ok(()) }).unwrap();
/// ```
///
/// ```compile_fail,E0277
/// let lisp = sbcl::Lisp::get_or_boot().unwrap();
/// lisp.enter(|cx| std::thread::scope(|scope| scope.spawn(|| cx.eval::<i64>("1")).join().unwrap())).unwrap();
/// ```
///
/// Nor does what a call returns come to a thread that it must not come to:
///
/// ```compile_fail,E0277
/// let lisp = sbcl::Lisp::get_or_boot().unwrap();
/// let shared = lisp.enter(|_| Ok(std::rc::Rc::new(1))).unwrap();
/// ```
#[derive(Debug)]
pub struct Cx {
    inside: Inside,
    not_send: PhantomData<*mut ()>,
}

impl Cx {
    #[inline]
    pub(super) fn new(inside: Inside) -> Self {
        Self { inside, not_send: PhantomData }
    }

    pub(super) fn inside(&self) -> &Inside {
        &self.inside
    }

    /// What this thread's proof is, when it is a Lisp thread that has called Rust.
    #[inline]
    pub(super) fn current() -> Option<Self> {
        Inside::current().map(Self::new)
    }

    /// Evaluates the forms in `code` and reads the values of the last one.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.enter(|cx| cx.eval::<i64>("(+ 1 2)"))?, 3);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Lisp::eval`](super::Lisp::eval).
    pub fn eval<T: FromLisp>(&self, code: &str) -> Result<T, Error> {
        self.ask(Entry::EvaluateText, |writer| code.write(writer))
    }

    /// Calls the function `name`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.enter(|cx| cx.call::<(i64, i64)>("floor", (17, 5)))?, (3, 2));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Lisp::call`](super::Lisp::call).
    pub fn call<T: FromLisp>(&self, name: &str, arguments: impl Arguments) -> Result<T, Error> {
        let function: Value = self.ask(Entry::FindFunction, |writer| name.write(writer))?;
        self.apply(&function, &arguments)
    }

    /// Looks up the function `name`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let largest: i64 = lisp.enter(|cx| cx.function("max")?.call((3, 5, 4)))?;
    /// assert_eq!(largest, 5);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Lisp::function`](super::Lisp::function).
    pub fn function(&self, name: &str) -> Result<Function, Error> {
        self.ask(Entry::FindFunction, |writer| name.write(writer)).map(Function::of)
    }

    /// Makes a Lisp object of `object` and returns its handle.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let length: usize = lisp.enter(|cx| cx.call("length", (cx.value(vec!["a", "b"])?,)))?;
    /// assert_eq!(length, 2);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// When it names a package that there is none of; [`Error::Conversion`] when no object can be made of it.
    pub fn value(&self, object: impl IntoLisp) -> Result<Value, Error> {
        self.ask(Entry::Objects, |writer| object.write(writer))
    }

    /// Makes a Lisp function of a Rust closure that need be neither `Send` nor `Sync`: only this thread may call it, as
    /// long as what is returned lives. Elsewhere and afterwards calls fail with a `rust:host-error`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// use std::{cell::Cell, rc::Rc};
    ///
    /// let sum = lisp.enter(|cx| {
    ///     let sum = Rc::new(Cell::new(0));
    ///     let add = { let sum = sum.clone(); cx.local_function(move |n: i64| sum.set(sum.get() + n))? };
    ///     cx.call::<()>("mapc", (&add, vec![1, 2, 3]))?;
    ///     Ok(sum.get())
    /// })?;
    /// assert_eq!(sum, 6);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// It cannot leave the thread:
    ///
    /// ```compile_fail,E0277
    /// let lisp = sbcl::Lisp::get_or_boot().unwrap();
    /// lisp.enter(|cx| {
    ///     let local = cx.local_function(|| 1)?;
    ///     std::thread::scope(|scope| { scope.spawn(|| local.call::<i64>(())); });
    ///     Ok(())
    /// }).unwrap();
    /// ```
    ///
    /// # Errors
    /// When something unwinds.
    pub fn local_function<Arguments, F: HostFunction<Arguments>>(
        &self,
        function: F,
    ) -> Result<LocalFunction<'_>, Error> {
        LocalFunction::new(self, function)
    }

    /// How many octets a vector of them has.
    ///
    /// # Errors
    /// A `type-error` of anything else.
    pub fn len(&self, octets: &Value) -> Result<usize, Error> {
        self.ask(Entry::OctetCount, |writer| octets.write(writer))
    }

    /// Copies the octets of a vector into `target`, at the speed of memory.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let copy = lisp.enter(|cx| {
    ///     let octets = cx.eval("(coerce #(1 2 3) '(vector (unsigned-byte 8)))")?;
    ///     let mut copy = vec![0; cx.len(&octets)?];
    ///     cx.copy_bytes(&octets, &mut copy)?;
    ///     Ok(copy)
    /// })?;
    /// assert_eq!(copy, [1, 2, 3]);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// When it is no vector of octets (`(unsigned-byte 8)`), or has not as many as `target` has room for.
    pub fn copy_bytes(&self, octets: &Value, target: &mut [u8]) -> Result<(), Error> {
        let Some(handle) = octets.handle() else {
            return self.ask(Entry::OctetCount, |writer| octets.write(writer)).map(|_: usize| ());
        };
        let answer = self.inside.call_with_buffer(Entry::CopyOctets as u64, message::handle_token(handle), target);
        self.read(answer)
    }

    /// `object` as `prin1` has it, at most `limit` characters.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.enter(|cx| cx.print(&cx.eval("(list 1 2)")?, 100))?, "(1 2)");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// When something unwinds.
    pub fn print(&self, object: &Value, limit: usize) -> Result<String, Error> {
        self.ask_with(Entry::Print, &(object, limit, true)).map(|Text(text)| text)
    }

    pub(super) fn describe(&self, value: &Value) -> String {
        value::describe(self, value)
    }

    /// Calls `function` with `arguments`.
    #[inline]
    pub(super) fn apply<T: FromLisp>(
        &self,
        function: &Value,
        arguments: &(impl Arguments + ?Sized),
    ) -> Result<T, Error> {
        match function.handle() {
            Some(handle) => self.call_handle(handle.number(), |writer| arguments.write_arguments(writer)),
            // Lisp says what is wrong with it.
            None => {
                let function: Value = self.ask(Entry::FindFunction, |writer| function.to_string().write(writer))?;
                self.apply(&function, arguments)
            }
        }
    }

    /// Calls one of Lisp's own functions with what `write` writes.
    pub(super) fn ask<T: FromLisp>(
        &self,
        entry: Entry,
        write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
    ) -> Result<T, Error> {
        self.call_handle(entry as u64, write)
    }

    pub(super) fn ask_with<T: FromLisp>(&self, entry: Entry, arguments: &impl Arguments) -> Result<T, Error> {
        self.call_handle(entry as u64, |writer| arguments.write_arguments(writer))
    }

    #[inline]
    fn call_handle<T: FromLisp>(
        &self,
        handle: u64,
        write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
    ) -> Result<T, Error> {
        if message::has_many_released() {
            self.release_handles();
        }
        let mut message = message::Writer::new();
        write(&mut Writer(&mut message))?;
        let answer = self.inside.call(handle, T::VALUES.code(), message.words());
        self.read(answer)
    }

    /// Has Lisp let go of what dropped handles kept alive, or of some of it. That is not interrupted.
    #[cold]
    pub(super) fn release_handles(&self) {
        // Otherwise they wait: those of a call that fails would be lost.
        if self.inside.is_unwinding() || !self.inside.has_room_for_lisp() {
            return;
        }
        let released = message::take_released();
        if released.is_empty() {
            return;
        }
        let mut message = message::Writer::new();
        let written = released.write_arguments(&mut Writer(&mut message)).map_err(Error::from);
        let result = written.and_then(|()| {
            self.read::<()>(self.inside.call(Entry::Release as u64, <()>::VALUES.code(), message.words()))
        });
        if let Err(error) = result {
            panics::caught(|| tracing::error!("handles could not be released: {error}"));
        }
    }

    /// Reads the answer of a call.
    #[inline]
    pub(super) fn read<T: FromLisp>(&self, (status, words): (CallStatus, Words)) -> Result<T, Error> {
        match status {
            CallStatus::Values => {
                let mut reader = Reader::new(self, &words);
                let count = match reader.token() {
                    Token::Values(count) => count,
                    _ => 0,
                };
                Ok(T::from_values(&mut reader, count)?)
            }
            CallStatus::Failed | CallStatus::Panicked | CallStatus::Missing => Err(self.read_condition(&words)),
            CallStatus::Unwinding => Err(Error::Unwinding),
        }
    }

    #[cold]
    fn read_condition(&self, words: &Words) -> Error {
        Condition::read(self, words).map_or_else(Error::from, Error::from)
    }

    /// Has Lisp write the object of `value` in `shape`.
    pub(super) fn write_out(&self, value: &Value, shape: Shape) -> Result<Words, Error> {
        let mut message = message::Writer::new();
        value.put(&mut message);
        match self.inside.call(Entry::Objects as u64, shape.code(), message.words()) {
            (CallStatus::Values, words) => Ok(words),
            (CallStatus::Unwinding, _) => Err(Error::Unwinding),
            (CallStatus::Failed | CallStatus::Panicked | CallStatus::Missing, words) => {
                Err(self.read_condition(&words))
            }
        }
    }

    /// Returns Lisp's own error when the control stack is nearly used up: Lisp wants more room than Rust does.
    #[inline]
    pub(super) fn check_room(&self) -> Result<(), Error> {
        if self.inside.has_room() { Ok(()) } else { self.ask(Entry::Objects, |_| Ok(())) }
    }
}
