//! [`Cx`], the context of a Lisp thread. Calls through a `Cx` run on that thread.

use std::marker::PhantomData;
use std::panic::resume_unwind;

use super::convert::{Arguments, ConversionError, FromLisp, IntoLisp, LossyText, Reader, Shape, Writer};
use super::define::{HostFunction, LocalFunction};
use super::error::{Condition, Error};
use super::function::Function;
use super::pool;
use super::value::{self, Value};
use crate::image::borrow::borrow_octets;
use crate::image::message::{self, Token};
use crate::image::message_buffer::MessageBuffer;
use crate::image::process;
use crate::image::program::{CallContext, CallStatus, sbcl_entry};
use crate::os::panics;

/// Returns the error for a call that [`CallContext::call`] refused.
#[cold]
fn cannot_call() -> Error {
    if process::is_forked() { Error::Forked } else { Error::CannotCall }
}

/// Maximum number of arguments with which Lisp calls a function without making a list of arguments (`call-with-message`
/// in `lisp/embedding/calls.lisp`).
const MAX_UNLISTED_ARGUMENTS: usize = 3;

/// Lisp functions that the library calls by fixed handles: `enum sbcl_entry` of `ffi/sbcl_host.h`.
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

/// Proof that the current thread is a Lisp thread. [`Lisp::enter`](super::Lisp::enter) lends a `Cx` to its closure.
///
/// Calls through a `Cx` are direct: they run on the current thread. Besides the errors that the called method lists,
/// each call can fail with [`Error::Unwinding`], [`Error::CannotCall`], [`Error::Forked`], or an [`Error::Condition`]
/// about an exhausted stack or heap. A `Cx` cannot leave its thread, and no reference to the `Cx` can outlive the
/// closure that received the reference:
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
/// A closure cannot return a value that is not [`Send`], either:
///
/// ```compile_fail,E0277
/// let lisp = sbcl::Lisp::get_or_boot().unwrap();
/// let shared = lisp.enter(|_| Ok(std::rc::Rc::new(1))).unwrap();
/// ```
#[derive(Debug)]
pub struct Cx {
    context: CallContext,
    not_send: PhantomData<*mut ()>,
}

impl Cx {
    #[inline]
    pub(super) fn new(context: CallContext) -> Self {
        Self { context, not_send: PhantomData }
    }

    pub(super) fn context(&self) -> &CallContext {
        &self.context
    }

    /// Returns the context of the current thread if the thread is a Lisp thread that has called Rust, and this code
    /// runs on the thread's own stack.
    ///
    /// # Errors
    /// Returns [`Error::CannotCall`] if the thread locals that calls use have been destroyed, for example when a host
    /// function ends the process, and an exit handler or a thread-local destructor then calls Lisp.
    #[inline]
    pub(super) fn current() -> Result<Option<Self>, Error> {
        match CallContext::current() {
            Some(_) if !pool::initialize_thread_locals() => Err(Error::CannotCall),
            context => Ok(context.map(Self::new)),
        }
    }

    /// Evaluates the forms in `code` and reads the values of the last form.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.enter(|cx| cx.eval::<i64>("(+ 1 2)"))?, 3);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Lisp::eval`](super::Lisp::eval).
    pub fn eval<T: FromLisp>(&self, code: &str) -> Result<T, Error> {
        self.call_entry(Entry::EvaluateText, |writer| code.write(writer))
    }

    /// Calls the Lisp function `name` with `arguments` and reads the values that it returns.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.enter(|cx| cx.call::<(i64, i64)>("floor", (17, 5)))?, (3, 2));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Lisp::call`](super::Lisp::call).
    pub fn call<T: FromLisp>(&self, name: &str, arguments: impl Arguments) -> Result<T, Error> {
        let function: Value = self.call_entry(Entry::FindFunction, |writer| name.write(writer))?;
        self.apply(&function, &arguments)
    }

    /// Looks up the Lisp function `name`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let largest: i64 = lisp.enter(|cx| cx.function("max")?.call((3, 5, 4)))?;
    /// assert_eq!(largest, 5);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Lisp::function`](super::Lisp::function).
    pub fn function(&self, name: &str) -> Result<Function, Error> {
        self.call_entry(Entry::FindFunction, |writer| name.write(writer)).map(Function::from_value)
    }

    /// Converts `object` to a Lisp object and returns a handle to it.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let length: usize = lisp.enter(|cx| cx.call("length", (cx.value(vec!["a", "b"])?,)))?;
    /// assert_eq!(length, 2);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Lisp::value`](super::Lisp::value).
    pub fn value(&self, object: impl IntoLisp) -> Result<Value, Error> {
        self.call_entry(Entry::Objects, |writer| object.write(writer))
    }

    /// Makes a Lisp function from a Rust closure that need be neither `Send` nor `Sync`.
    ///
    /// Only this thread may call the function, and only while the returned [`LocalFunction`] lives. Calls from other
    /// threads, and later calls, signal a `rust:host-error`.
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
    /// The function cannot leave the thread:
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
    /// Returns [`Error::Unwinding`] if Lisp is unwinding.
    pub fn local_function<Arguments, F: HostFunction<Arguments>>(
        &self,
        function: F,
    ) -> Result<LocalFunction<'_>, Error> {
        LocalFunction::new(self, function)
    }

    /// Returns the number of octets in a vector of octets (element type `(unsigned-byte 8)`).
    ///
    /// # Errors
    /// Returns [`Error::Condition`] with a `type-error` if `octets` is not a vector of octets.
    pub fn len(&self, octets: &Value) -> Result<usize, Error> {
        self.call_entry(Entry::OctetCount, |writer| octets.write(writer))
    }

    /// Copies the octets of a vector into `target`, as fast as memory can be copied.
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
    /// Returns [`Error::Condition`] if `octets` is not a vector of octets (`(unsigned-byte 8)`), or its length differs
    /// from the length of `target`.
    pub fn copy_bytes(&self, octets: &Value, target: &mut [u8]) -> Result<(), Error> {
        let Some(handle) = octets.handle() else {
            return self.call_entry(Entry::OctetCount, |writer| octets.write(writer)).map(|_: usize| ());
        };
        let answer = self.context.call_with_buffer(Entry::CopyOctets as u64, message::handle_token(handle), target);
        self.read(answer)
    }

    /// Lends `work` the octets of a vector in place, without copying them.
    ///
    /// If the vector has a fill pointer, `work` gets only the octets before the fill pointer. The safe alternative is
    /// [`copy_bytes`](Self::copy_bytes), which copies as fast as memory allows.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let sum: u64 = lisp.enter(|cx| {
    ///     let octets = cx.eval("(make-array 1000 :element-type '(unsigned-byte 8) :initial-element 2)")?;
    ///     // SAFETY: the vector is new, and nothing else has it.
    ///     unsafe { cx.borrow_bytes(&octets, |octets| octets.iter().map(|&octet| u64::from(octet)).sum()) }
    /// })?;
    /// assert_eq!(sum, 2000);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Safety
    /// Until `work` returns, nothing may write to the vector: neither this thread, in functions that `work` calls, nor
    /// any other thread of Lisp or of the program. The vector is pinned: garbage collections, which other threads may
    /// run as usual, do not move the vector.
    ///
    /// # Errors
    /// Returns [`Error::Condition`] with a `type-error` if `octets` is not a vector of octets (`(unsigned-byte 8)`);
    /// [`Error::Unwinding`] if a call that `work` makes starts to unwind. An interruption takes effect when `work` has
    /// returned, or while `work` calls Lisp.
    ///
    /// # Panics
    /// Panics if `work` panics.
    #[allow(unsafe_code, reason = "the caller must uphold the requirements in the Safety section")]
    pub unsafe fn borrow_bytes<R>(&self, octets: &Value, work: impl FnOnce(&[u8]) -> R) -> Result<R, Error> {
        let pin = |task, place: usize| {
            pool::call_with_task(self, task, |writer| {
                octets.write(writer)?;
                place.write(writer)
            })
        };
        // SAFETY: the caller promises that nothing writes to the octets until `work` returns. The Lisp function of
        // `Entry::BorrowOctets` pins the vector, stores the address and the count, and runs the task, on this thread.
        match unsafe { borrow_octets(work, pin) }? {
            Some(Ok(result)) => Ok(result),
            Some(Err(panic)) => resume_unwind(panic),
            // Lisp returned without an error, but did not run the task that calls `work`.
            None => Err(Error::Aborted),
        }
    }

    /// Returns the text that `prin1` prints for `object`, cut off after `limit` characters. [`Value::print`] says more
    /// about the text.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.enter(|cx| cx.print(&cx.eval("(list 1 2)")?, 100))?, "(1 2)");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Unwinding`] if Lisp is unwinding.
    pub fn print(&self, object: &Value, limit: usize) -> Result<String, Error> {
        self.call_entry_with(Entry::Print, &(object, limit, true)).map(|LossyText(text)| text)
    }

    pub(super) fn describe(&self, value: &Value) -> String {
        value::describe(self, value)
    }

    /// Calls `function` with `arguments` and reads the values that it returns.
    #[inline]
    pub(super) fn apply<T: FromLisp>(
        &self,
        function: &Value,
        arguments: &(impl Arguments + ?Sized),
    ) -> Result<T, Error> {
        match function.handle() {
            Some(handle) => self.call_handle(handle.number(), |writer| arguments.write_arguments(writer)),
            // A value without a handle is not a function. Looking up the value's text as a name makes Lisp signal the
            // error.
            None => {
                let function: Value =
                    self.call_entry(Entry::FindFunction, |writer| function.to_string().write(writer))?;
                self.apply(&function, arguments)
            }
        }
    }

    /// Calls one of the [`Entry`] functions with the objects that `write` writes.
    pub(super) fn call_entry<T: FromLisp>(
        &self,
        entry: Entry,
        write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
    ) -> Result<T, Error> {
        self.call_handle(entry as u64, write)
    }

    pub(super) fn call_entry_with<T: FromLisp>(&self, entry: Entry, arguments: &impl Arguments) -> Result<T, Error> {
        self.call_handle(entry as u64, |writer| arguments.write_arguments(writer))
    }

    #[inline]
    fn call_handle<T: FromLisp>(
        &self,
        handle: u64,
        write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
    ) -> Result<T, Error> {
        if message::has_many_dropped_handles() {
            self.release_handles();
        }
        let mut message = message::MessageWriter::new();
        write(&mut Writer(&mut message))?;
        let answer = self.context.call(handle, T::VALUES.code(), message.words());
        self.read(answer)
    }

    /// Makes Lisp release the objects whose handles have been dropped, unless another thread is taking the handles.
    #[cold]
    pub(super) fn release_handles(&self) {
        // Handles dropped after this count may stay in the queue, so the loop ends however fast other threads drop
        // handles.
        let mut left = message::dropped_handle_count();
        // Handles taken from the queue would be lost if the call failed. So no handle is taken if the call would fail.
        while left > 0 && self.can_release() {
            let released = message::take_dropped_handles();
            if released.is_empty() {
                return;
            }
            left = left.saturating_sub(released.len());
            // If the heap has no room for the list of the handles, no handle has been released: after the release, only
            // shrinking the message buffer could fail, and `can_release` has shrunk the buffer.
            let result = self
                .release(&released)
                .or_else(|_| released.chunks(MAX_UNLISTED_ARGUMENTS).try_for_each(|few| self.release(few)));
            if let Err(error) = result {
                panics::catch(|| {
                    tracing::error!(
                        "Lisp could not release all objects of dropped handles; the others stay in memory: {error}"
                    );
                });
                return;
            }
        }
    }

    /// Returns true if Lisp would release handles here. Only a call shows whether Lisp has enough binding stack.
    fn can_release(&self) -> bool {
        !self.context.is_unwinding()
            && self.context.has_stack_room_for_lisp(message::WAKE_THRESHOLD)
            && self.read::<()>(self.context.call(Entry::Objects as u64, <()>::VALUES.code(), &[])).is_ok()
    }

    /// Makes Lisp release the objects of `handles`. Lisp cannot be interrupted meanwhile.
    fn release(&self, handles: &[u64]) -> Result<(), Error> {
        let mut message = message::MessageWriter::new();
        handles.write_arguments(&mut Writer(&mut message))?;
        self.read(self.context.call(Entry::Release as u64, <()>::VALUES.code(), message.words()))
    }

    /// Reads the values of a call, or its error, from Lisp's answer. `answer` is `None` if Lisp could not be called.
    #[inline]
    pub(super) fn read<T: FromLisp>(&self, answer: Option<(CallStatus, MessageBuffer)>) -> Result<T, Error> {
        let (status, message) = answer.ok_or_else(cannot_call)?;
        match status {
            CallStatus::Values => {
                let mut reader = Reader::new(self, &message);
                let count = match reader.token() {
                    Token::Values(count) => count,
                    _ => 0,
                };
                T::from_values(&mut reader, count)
                    .map_err(|error| if self.context.is_unwinding() { Error::Unwinding } else { error.into() })
            }
            CallStatus::Failed | CallStatus::Panicked | CallStatus::Missing => Err(self.read_condition(&message)),
            CallStatus::Unwinding => Err(Error::Unwinding),
        }
    }

    #[cold]
    fn read_condition(&self, message: &MessageBuffer) -> Error {
        Condition::read(self, message).map_or_else(Error::from, Error::from)
    }

    /// Makes Lisp write out the object behind `value` to the depth that `shape` gives. Returns the message.
    pub(super) fn write_out(&self, value: &Value, shape: Shape) -> Result<MessageBuffer, Error> {
        let mut message = message::MessageWriter::new();
        value.write_token(&mut message);
        match self.context.call(Entry::Objects as u64, shape.code(), message.words()).ok_or_else(cannot_call)? {
            (CallStatus::Values, message) => Ok(message),
            (CallStatus::Unwinding, _) => Err(Error::Unwinding),
            (CallStatus::Failed | CallStatus::Panicked | CallStatus::Missing, message) => {
                Err(self.read_condition(&message))
            }
        }
    }

    /// Returns Lisp's own error if the control stack is nearly used up. To get this error, makes a call into Lisp that
    /// does nothing: if Rust has no stack left for another level, Lisp has none for a call either, and signals the
    /// error.
    #[inline]
    pub(super) fn check_stack_room(&self) -> Result<(), Error> {
        if self.context.has_stack_room() { Ok(()) } else { self.call_entry(Entry::Objects, |_| Ok(())) }
    }
}
