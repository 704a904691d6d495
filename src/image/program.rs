//! Calls between Lisp and an embedding program: `struct sbcl_library` of `ffi/sbcl_host.h`.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use once_cell::sync::OnceCell;

use super::bindings::{sbcl_call_status, sbcl_library, sbcl_message};
pub(crate) use super::bindings::{sbcl_entry, sbcl_program_function};
use super::float_traps::{self, MaskedTrapsGuard};
use super::machine::HEAP_PAGE_BYTES;
use super::message::MessageWriter;
use super::message_buffer::MessageBuffer;
use super::protocol::Event;
use super::{answers, process, signals};
use crate::os::panics;

/// The outcome of a call between Lisp and the embedding program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallStatus {
    /// The call returned; the message has its values.
    Values,
    /// The call failed; the message has the condition or the error.
    Failed,
    /// The host function panicked; the message has the function's name and the panic's text.
    Panicked,
    /// A non-local exit in Lisp unwinds past the caller, which must return as soon as possible.
    Unwinding,
    /// The program no longer has a host function of this number.
    Missing,
}

/// The embedding program's side of `struct sbcl_library`. Any Lisp thread may call these functions at any time.
pub(crate) trait Program: Send + Sync + 'static {
    /// Does the program's work on this Lisp thread, whose number is `thread`. Thread 0 interrupts the other threads.
    /// Returns true if a non-local exit is pending, and false if the thread must end.
    fn serve(&self, context: &CallContext, thread: u32) -> bool;

    /// Calls the host function with the number `function` on the objects in `message`. The function writes its values or
    /// its error to `answer`.
    fn call(&self, context: &CallContext, function: u64, message: &[u64], answer: &mut MessageWriter) -> CallStatus;

    /// Receives an event of a thread that works for the program: output, a warning, or the progress of an interruption.
    fn event(&self, event: Event<'_>);
}

/// Passes an event of [`SBCL_JOB_PROGRAM`](super::bindings::SBCL_JOB_PROGRAM) to the program.
pub(super) fn pass_event(event: Event<'_>) {
    if let Some(program) = PROGRAM.get() {
        // No caller waits for an event, so a panic is not reported.
        panics::catch(|| pass_event_to(&**program, event));
    }
}

/// Passes an event to `program`. A notice goes to the program's `tracing` subscriber, which is user code. No other event runs
/// user code on this thread.
fn pass_event_to(program: &dyn Program, event: Event<'_>) {
    match event {
        Event::Notice(_) => wait_outside_lisp(|| {
            let _outside_calls = NoContextGuard::new();
            program.event(event);
        }),
        _ => program.event(event),
    }
}

static PROGRAM: OnceCell<Arc<dyn Program>> = OnceCell::new();

type CallLisp = unsafe extern "C" fn(u64, u64, *const u64, u64, *mut sbcl_message) -> i32;

/// The context of a host function that Lisp has called on this thread. The existence of a context proves that the thread
/// may call back into Lisp.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallContext {
    call_lisp: CallLisp,
    /// The floating-point modes of the Lisp code that made the call.
    modes: float_traps::FloatModes,
    /// This thread's state, if the thread works for the program.
    state: Option<&'static ThreadState>,
    stack: Stack,
    /// False if [`has_stack_room`](Self::has_stack_room) must always return true.
    is_stack_limited: bool,
    not_send: PhantomData<*mut ()>,
}

/// Bytes of stack, including SBCL's three guard pages, that must be left before a recursion in Rust goes one level deeper. A
/// call of Lisp requires more (`+program-stack-bytes+` in `lisp/embedding/calls.lisp`).
const MIN_STACK_ROOM: usize = 3 * HEAP_PAGE_BYTES + 96 * 1024;

/// An upper bound for the bytes of Lisp's frames below the frame that checks the room for a call (`check-stack-room` in
/// `lisp/embedding/calls.lisp`).
const LISP_FRAME_BYTES: usize = 16 * 1024;

/// The bytes of stack that Lisp requires for each argument of a call (`check-room-for-arguments` in
/// `lisp/embedding/calls.lisp`).
const LISP_ARGUMENT_BYTES: usize = 64;

/// Bytes of stack, including SBCL's three guard pages, that must be left when Lisp is called: the frames up to the frame in
/// which `CALL-FROM-PROGRAM` stops non-local exits must not reach a guard page. If these frames reached a guard page,
/// SBCL would unwind past the caller's Rust frames.
const MIN_CALL_ROOM: usize = 3 * HEAP_PAGE_BYTES + 16 * 1024;

/// The stack of a thread. In a Lisp thread, this stack is SBCL's control stack on x86-64, and SBCL's alien stack on aarch64.
#[derive(Debug, Clone, Copy)]
struct Stack {
    /// The lowest address.
    end: usize,
    size: usize,
}

impl Stack {
    /// The stack of a thread whose addresses are not known: all code runs on this stack and has enough room.
    const UNKNOWN: Self = Self { end: 0, size: usize::MAX };

    /// Returns the stack of this thread, as the system knows it.
    fn of_thread() -> Self {
        thread_local! {
            static STACK: Cell<Option<Stack>> = const { Cell::new(None) };
        }
        STACK.get().unwrap_or_else(|| {
            let stack = Self::find();
            STACK.set(Some(stack));
            stack
        })
    }

    /// Returns the stack of this thread, which is in a call from Lisp to the program. On macOS, SBCL's threads switch to
    /// stacks that the system does not know.
    fn of_lisp_thread() -> Self {
        Some(Self::of_thread()).filter(|stack| stack.room().is_some()).unwrap_or(Self::UNKNOWN)
    }

    #[cfg(target_os = "linux")]
    fn find() -> Self {
        let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
        let (mut start, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: pthread_getattr_np(3) initialises the attributes if it returns 0. Only then are the attributes read,
        // and destroyed once.
        unsafe {
            if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
                return Self::UNKNOWN;
            }
            libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut start, &raw mut size);
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
        }
        Self { end: start.addr(), size }
    }

    #[cfg(target_os = "macos")]
    fn find() -> Self {
        // SAFETY: the functions only read data of this thread. macOS reports the stack's highest address and its size.
        unsafe {
            let thread = libc::pthread_self();
            let size = libc::pthread_get_stacksize_np(thread);
            Self { end: libc::pthread_get_stackaddr_np(thread).addr().saturating_sub(size), size }
        }
    }

    /// Returns the number of bytes that are left on this stack, including its guard pages. Returns `None` if this code runs
    /// on another stack, as crates for coroutines and for deep recursion provide.
    #[inline]
    fn room(&self) -> Option<usize> {
        let here = 0_u8;
        let room = (&raw const here).addr().wrapping_sub(self.end);
        (room < self.size).then_some(room)
    }
}

/// Maximum number of threads that work for a program, including spare threads.
pub(crate) const MAX_THREADS: usize = 512;

/// The state of a thread that works for the program, readable by other threads: unused, in Rust or in Lisp.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct ThreadState(AtomicU8);

/// The states of all threads that work for the program, by number.
static THREAD_STATES: [ThreadState; MAX_THREADS + 1] =
    [const { ThreadState(AtomicU8::new(ThreadState::UNUSED)) }; MAX_THREADS + 1];

impl ThreadState {
    const UNUSED: u8 = 0;
    const IN_RUST: u8 = 1;
    const IN_LISP: u8 = 2;

    fn set(state: Option<&Self>, value: u8) {
        if let Some(state) = state {
            state.0.store(value, Ordering::Release);
        }
    }

    fn by_number(thread: u32) -> Option<&'static Self> {
        THREAD_STATES.get(thread as usize)
    }

    /// Returns true if no thread has this number: no thread was started with it, or the thread has ended.
    pub(crate) fn is_free(number: u32) -> bool {
        Self::by_number(number).is_some_and(|state| state.0.load(Ordering::Acquire) == Self::UNUSED)
    }

    /// Reserves a free number for a thread that is about to be started.
    pub(crate) fn reserve(number: u32) {
        Self::set(Self::by_number(number), Self::IN_LISP);
    }

    /// Releases the number of a thread that could not be started.
    pub(crate) fn release(number: u32) {
        Self::set(Self::by_number(number), Self::UNUSED);
    }

    /// Returns the number of threads that are in Lisp, without thread 0, which interrupts the other threads.
    pub(crate) fn count_in_lisp() -> usize {
        THREAD_STATES[1..].iter().filter(|state| state.0.load(Ordering::Acquire) == Self::IN_LISP).count()
    }
}

/// A guard that marks a thread of the program as in Lisp or in Rust while the guard lives.
struct StateGuard {
    state: Option<&'static ThreadState>,
    /// The state to which the thread returns.
    before: u8,
}

impl StateGuard {
    /// Marks a thread that is in Rust as in Lisp.
    fn in_lisp(state: Option<&'static ThreadState>) -> Self {
        ThreadState::set(state, ThreadState::IN_LISP);
        Self { state, before: ThreadState::IN_RUST }
    }

    /// Marks a thread that is in Lisp as in Rust.
    fn in_rust(state: Option<&'static ThreadState>) -> Self {
        ThreadState::set(state, ThreadState::IN_RUST);
        Self { state, before: ThreadState::IN_LISP }
    }
}

impl Drop for StateGuard {
    fn drop(&mut self) {
        ThreadState::set(self.state, self.before);
    }
}

/// Runs `wait`, in which this thread waits for the program on behalf of Lisp code. Meanwhile the thread counts as in Rust, so
/// that a spare thread can run a call that the program needs first.
pub(crate) fn wait_outside_lisp<R>(wait: impl FnOnce() -> R) -> R {
    let _rust = StateGuard::in_rust(CURRENT_CONTEXT.get().and_then(|context| context.state));
    wait()
}

thread_local! {
    static CURRENT_CONTEXT: Cell<Option<CallContext>> = const { Cell::new(None) };
    /// True from the moment a non-local exit ended a call from Rust to Lisp until the host function has returned to Lisp.
    static UNWINDING: Cell<bool> = const { Cell::new(false) };
}

/// A guard: while it lives, this thread is in no call from Lisp to the program, even if Lisp called a host function that has
/// not returned. Replies and other user code that runs while Lisp reports an event or asks for a job must not call Lisp
/// directly: a non-local exit of such a call would be resumed when that host function returns, and its target may be gone by
/// then.
pub(super) struct NoContextGuard(Option<CallContext>);

impl NoContextGuard {
    pub(super) fn new() -> Self {
        Self(CURRENT_CONTEXT.take())
    }
}

impl Drop for NoContextGuard {
    fn drop(&mut self) {
        CURRENT_CONTEXT.set(self.0);
    }
}

/// Copies a message that Lisp has written.
///
/// # Safety
/// Unless `address` is null, it must be aligned, and the `count` words there must be readable and not change during the
/// copy.
#[inline]
unsafe fn copy_message(address: *const u64, count: u64) -> MessageBuffer {
    let mut words = MessageBuffer::new();
    if let Ok(count) = usize::try_from(count)
        && count > 0
        && !address.is_null()
    {
        // SAFETY: the caller guarantees that the words are readable and do not change, and `address` is not null.
        words.extend_from_slice(unsafe { std::slice::from_raw_parts(address, count) });
    }
    words
}

/// Returns true if this thread's stack has room for one more level of a recursion in Rust, or if this code runs on another
/// stack.
pub(crate) fn has_stack_room() -> bool {
    Stack::of_thread().room().is_none_or(|room| room >= MIN_STACK_ROOM)
}

impl CallContext {
    /// Returns this thread's context; `None` unless the thread is in a call from Lisp to the program, and on the stack of
    /// that call.
    #[inline]
    pub(crate) fn current() -> Option<Self> {
        CURRENT_CONTEXT.get().filter(|context| context.stack.room().is_some())
    }

    /// Returns true if Lisp can be called here: this code runs on the stack of a call from Lisp to the program, `room` bytes
    /// of the stack are left, and the process is not a forked child, in which Lisp would wait for threads that are missing.
    #[inline]
    fn can_call(&self, room: usize) -> bool {
        self.stack.room().is_some_and(|left| left >= room) && CURRENT_CONTEXT.get().is_some() && !process::is_forked()
    }

    /// Calls the Lisp function with the handle `function` on the objects in `message`. `shape` says to which depth
    /// Lisp writes out the returned values: it is the number in a `Shape` of `embedding/convert.rs`. Returns `None` if Lisp
    /// cannot be called here: the stack is nearly used up, this code runs on another stack or outside the call of which this is
    /// the context, or the process is a forked child.
    #[inline]
    pub(crate) fn call(&self, function: u64, shape: u16, message: &[u64]) -> Option<(CallStatus, MessageBuffer)> {
        if !self.can_call(MIN_CALL_ROOM) {
            return None;
        }
        let mut answer = sbcl_message::default();
        #[cfg(feature = "guarded-messages")]
        let message = super::outgoing::OutgoingBuffer::from_words(message);
        let status = {
            let _lisp = (self.modes.restore(), signals::enter_lisp(), StateGuard::in_lisp(self.state));
            // SAFETY: a CallContext exists only on a Lisp thread that has called the program, and is not Send. `can_call` has
            // checked that this thread is in such a call and on its stack. The message is well-formed, because a
            // `message::MessageWriter` or `call_with_buffer` wrote it, and the message lives until the call returns. The
            // Lisp function behind `call_lisp` catches all non-local exits.
            unsafe {
                (self.call_lisp)(function, u64::from(shape), message.as_ptr(), message.len() as u64, &raw mut answer)
            }
        };
        let status = match u32::try_from(status) {
            Ok(sbcl_call_status::SBCL_CALL_VALUES) => CallStatus::Values,
            Ok(sbcl_call_status::SBCL_CALL_FAILED) => CallStatus::Failed,
            _ => {
                UNWINDING.set(true);
                return Some((CallStatus::Unwinding, MessageBuffer::new()));
            }
        };
        // SAFETY: by the contract Lisp keeps its answer at this address, unchanged, until this thread's next call.
        Some((status, unsafe { copy_message(answer.words, answer.count) }))
    }

    /// Returns true if the stack has room for one more level of a recursion in Rust, as [`has_stack_room`] does, or if this
    /// context [ignores](Self::without_stack_limit) the limit.
    #[inline]
    pub(crate) fn has_stack_room(&self) -> bool {
        !self.is_stack_limited || self.stack.room().is_none_or(|room| room >= MIN_STACK_ROOM)
    }

    /// Returns true if Lisp can be called here with `arguments` arguments, and does not refuse the call for lack of control
    /// stack. Only Lisp knows how much binding stack is left.
    pub(crate) fn has_stack_room_for_lisp(&self, arguments: usize) -> bool {
        self.can_call(2 * MIN_STACK_ROOM + LISP_FRAME_BYTES + arguments * LISP_ARGUMENT_BYTES)
    }

    /// Returns a copy whose [`has_stack_room`](Self::has_stack_room) always returns true. Callers use the copy to read
    /// the error that reports a lack of stack.
    pub(crate) fn without_stack_limit(&self) -> Self {
        Self { is_stack_limited: false, ..*self }
    }

    /// Returns true if a non-local exit is pending, which Lisp continues as soon as the program has returned.
    #[allow(clippy::unused_self)]
    pub(crate) fn is_unwinding(&self) -> bool {
        UNWINDING.get()
    }

    /// Calls a Lisp function, as [`call`](Self::call) does, with three arguments: the object that the token `handle` stands
    /// for, the address of `target`, and the length of `target` in octets.
    pub(crate) fn call_with_buffer(
        &self,
        function: u64,
        handle: u64,
        target: &mut [u8],
    ) -> Option<(CallStatus, MessageBuffer)> {
        // 2 is the tag of an integer: see lisp/embedding/values.lisp.
        let message = [handle, 2, target.as_mut_ptr() as u64, 2, target.len() as u64];
        self.call(function, 0, &message)
    }
}

/// Installs `program`, for which `threads` Lisp threads will work, and returns the structure through which Lisp calls the
/// program.
///
/// # Panics
/// Panics if called twice, because a process has only one image.
pub(super) fn install(program: Arc<dyn Program>, threads: u32) -> *mut sbcl_library {
    assert!(PROGRAM.set(program).is_ok(), "the program is installed only once");
    let library = Box::new(sbcl_library { threads, reserved: 0, serve: Some(serve), call: Some(call), gate: None });
    let library = Box::into_raw(library);
    LIBRARY_TABLE.set(LibraryTable(library)).unwrap_or_else(|_| unreachable!("installed once"));
    library
}

struct LibraryTable(*mut sbcl_library);
// SAFETY: the structure is leaked, and Lisp writes to it only before its first call of the program.
unsafe impl Send for LibraryTable {}
// SAFETY: threads only read the leaked structure, after Lisp's last write to it.
unsafe impl Sync for LibraryTable {}

static LIBRARY_TABLE: OnceCell<LibraryTable> = OnceCell::new();

/// Calls `function` in the context of a call from Lisp on this thread. Returns `None` if `function` panics, no program is
/// installed, or Lisp has not set `gate`.
fn with_call_context<R>(
    modes: float_traps::FloatModes,
    state: Option<&'static ThreadState>,
    function: impl FnOnce(&dyn Program, &CallContext) -> R,
) -> Option<R> {
    let (program, library) = (PROGRAM.get()?, LIBRARY_TABLE.get()?);
    // SAFETY: the structure is leaked, and no thread writes to it now: Lisp sets `gate` before its first call.
    let call_lisp = unsafe { (*library.0).gate }?;
    let stack = Stack::of_lisp_thread();
    let context = CallContext { call_lisp, modes, state, stack, is_stack_limited: true, not_send: PhantomData };
    ThreadState::set(state, ThreadState::IN_RUST);
    let before = CURRENT_CONTEXT.replace(Some(context));
    UNWINDING.set(false);
    let result = panics::catch(|| function(&**program, &context));
    CURRENT_CONTEXT.set(before);
    UNWINDING.set(false);
    result
}

/// Initializes the thread local that holds this thread's answers to Lisp, unless it is initialized. Returns false if it has
/// been destroyed.
pub(crate) fn initialize_thread_locals() -> bool {
    answers::initialize_thread_local()
}

/// Implements `sbcl_library.serve`.
unsafe extern "C" fn serve(thread: u32) -> i32 {
    let masked = MaskedTrapsGuard::new();
    let _in_host = signals::enter_host();
    let state = ThreadState::by_number(thread);
    let unwinds = with_call_context(masked.lisp_modes(), state, |program, context| program.serve(context, thread))
        .unwrap_or(false);
    ThreadState::set(state, if unwinds { ThreadState::IN_LISP } else { ThreadState::UNUSED });
    i32::from(unwinds)
}

/// Implements `sbcl_library.call`.
unsafe extern "C" fn call(function: u64, words: *const u64, count: u64, answer: *mut sbcl_message) -> i32 {
    let masked = MaskedTrapsGuard::new();
    let _in_host = signals::enter_host();
    if process::is_forked() {
        // SAFETY: by the contract Lisp passes a pinned, writable struct sbcl_message.
        unsafe { answer.write(answers::forked_process_error()) };
        return sbcl_call_status::SBCL_CALL_FAILED.cast_signed();
    }
    // SAFETY: by the contract Lisp passes `count` aligned words in memory that only this thread writes to.
    let message = unsafe { copy_message(words, count) };
    // SAFETY: by the contract Lisp passes a pinned, initialised struct sbcl_message.
    let being_read = unsafe { (*answer).count };
    let mut reply = MessageWriter::new();
    let state = CURRENT_CONTEXT.get().and_then(|context| context.state);
    let status = with_call_context(masked.lisp_modes(), state, |program, context| {
        program.call(context, function, &message, &mut reply)
    })
    .unwrap_or(CallStatus::Panicked);
    // A child that the program's function has forked must not continue the Lisp code that called the function.
    process::exit_if_forked();
    ThreadState::set(state, ThreadState::IN_LISP);
    // SAFETY: by the contract Lisp passes a pinned, writable struct sbcl_message.
    unsafe { answer.write(answers::store(being_read, reply)) };
    match status {
        CallStatus::Values => sbcl_call_status::SBCL_CALL_VALUES,
        CallStatus::Failed => sbcl_call_status::SBCL_CALL_FAILED,
        CallStatus::Panicked => sbcl_call_status::SBCL_CALL_PANICKED,
        CallStatus::Unwinding => sbcl_call_status::SBCL_CALL_UNWINDING,
        CallStatus::Missing => sbcl_call_status::SBCL_CALL_MISSING,
    }
    .cast_signed()
}

/// The way in which a task ended.
#[derive(Debug)]
pub(crate) enum TaskEnd<E> {
    /// The task returned.
    Done,
    /// The task's time limit passed.
    Timeout,
    /// The program interrupted the task.
    Interrupted,
    /// Lisp's restart ABORT ended the task.
    Aborted,
    /// Another non-local exit in Lisp ended the task.
    Unwound,
    /// No Lisp thread was available to run the task.
    NoThread,
    /// The task could not be started, or an error outside the task's own work ended it.
    Failed(Box<E>),
}

/// Work for a Lisp thread. A task is run, then settled, then dropped.
pub(crate) trait Task<E>: Send {
    /// Does the work. Called at most once.
    fn run(&mut self, context: &CallContext);

    /// Records how the task ended, and returns code of the program to run afterwards, such as a waker. Neither `settle` nor
    /// dropping the task runs code of the program. Dropping the task notifies the thread that waits for the task.
    fn settle(&mut self, end: TaskEnd<E>) -> Option<Followup>;
}

/// Code of the program that runs after a task has ended. The code may panic.
pub(crate) type Followup = Box<dyn FnOnce() + Send>;

/// Erases the lifetime of a task that borrows, so that another thread can run the task.
///
/// # Safety
/// The task must be dropped before `'a` ends.
unsafe fn erase_lifetime<'a, E: 'static>(task: Box<dyn Task<E> + 'a>) -> Box<dyn Task<E>> {
    // SAFETY: only the lifetime differs, and the caller guarantees that the task does not outlive it.
    unsafe { std::mem::transmute::<Box<dyn Task<E> + 'a>, Box<dyn Task<E>>>(task) }
}

/// Passes `task` to `submit`, and returns once the task has been dropped.
pub(crate) fn submit_and_wait<'a, E: 'static>(task: impl Task<E> + 'a, submit: impl FnOnce(Box<dyn Task<E>>)) {
    /// A guard that waits for the signal even if `submit` panics.
    struct WaitGuard(Arc<DropSignal>);
    impl Drop for WaitGuard {
        fn drop(&mut self) {
            self.0.wait();
        }
    }
    let signal = Arc::new(DropSignal::default());
    let task = Box::new(NotifyingTask { task, _notify: NotifyOnDrop(signal.clone()) });
    let wait = WaitGuard(signal);
    // SAFETY: this function neither returns nor unwinds before the task has been dropped. The function waits for `signal`,
    // which only NotifyOnDrop's destructor sets, and the task has been dropped by then.
    submit(unsafe { erase_lifetime(task) });
    drop(wait);
}

/// A flag that is set when a task has been dropped. A thread can wait for the flag.
#[derive(Debug, Default)]
struct DropSignal {
    is_dropped: AtomicBool,
    lock: parking_lot::Mutex<()>,
    condvar: parking_lot::Condvar,
}

/// Time for which a waiting thread yields the processor before it sleeps: about the duration of a short call.
const YIELD_TIME: std::time::Duration = std::time::Duration::from_micros(50);
/// Number of times that a waiting thread spins before it yields.
const MAX_SPINS: u32 = 40;

impl DropSignal {
    fn notify(&self) {
        self.is_dropped.store(true, Ordering::Release);
        let _lock = self.lock.lock();
        self.condvar.notify_all();
    }

    fn is_set(&self) -> bool {
        self.is_dropped.load(Ordering::Acquire)
    }

    fn wait(&self) {
        let mut spins = 0;
        let mut end = None;
        while !self.is_set() {
            spins += 1;
            if spins < MAX_SPINS {
                std::hint::spin_loop();
                continue;
            }
            let now = std::time::Instant::now();
            if now < *end.get_or_insert(now + YIELD_TIME) {
                std::thread::yield_now();
                continue;
            }
            let mut lock = self.lock.lock();
            while !self.is_set() {
                self.condvar.wait(&mut lock);
            }
        }
    }
}

/// A task whose drop sets a signal. Fields are dropped in order: first the task, then the notifier.
struct NotifyingTask<T> {
    task: T,
    _notify: NotifyOnDrop,
}

impl<E, T: Task<E>> Task<E> for NotifyingTask<T> {
    fn run(&mut self, context: &CallContext) {
        self.task.run(context);
    }

    fn settle(&mut self, end: TaskEnd<E>) -> Option<Followup> {
        self.task.settle(end)
    }
}

struct NotifyOnDrop(Arc<DropSignal>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_has_room_only_on_its_own_stack() {
        let own = Stack::of_thread();
        assert!(own.room().is_some_and(|room| room > 4096), "{own:?}");
        let other = std::thread::spawn(Stack::of_thread).join().expect("it ends");
        assert_eq!(other.room(), None, "{own:?} {other:?}");
        assert_eq!(Stack { end: own.end + own.size, size: 4096 }.room(), None);
        assert_eq!(Stack { end: own.end - 4096, size: 4096 }.room(), None);
        assert!(Stack::UNKNOWN.room().is_some());
    }

    /// A program that records, for each event, whether its code may call Lisp on the event's thread.
    struct EventRecorder(parking_lot::Mutex<Vec<bool>>);

    impl Program for EventRecorder {
        fn serve(&self, _: &CallContext, _: u32) -> bool {
            false
        }

        fn call(&self, _: &CallContext, _: u64, _: &[u64], _: &mut MessageWriter) -> CallStatus {
            CallStatus::Missing
        }

        fn event(&self, _: Event<'_>) {
            self.0.lock().push(CallContext::current().is_some());
        }
    }

    /// The function that receives a notice is user code, and a non-local exit of its calls could not be resumed.
    #[test]
    fn notices_are_received_outside_calls_from_lisp() {
        unsafe extern "C" fn no_lisp(_: u64, _: u64, _: *const u64, _: u64, _: *mut sbcl_message) -> i32 {
            unreachable!("nothing calls Lisp")
        }
        let context = CallContext {
            call_lisp: no_lisp,
            modes: MaskedTrapsGuard::new().lisp_modes(),
            state: None,
            stack: Stack::UNKNOWN,
            is_stack_limited: true,
            not_send: PhantomData,
        };
        let recorder = EventRecorder(parking_lot::Mutex::default());
        CURRENT_CONTEXT.set(Some(context));
        let text = crate::image::protocol::Text(&[]);
        [Event::Notice(text), Event::Stdout(text)].into_iter().for_each(|event| pass_event_to(&recorder, event));
        let is_inside = CURRENT_CONTEXT.take().is_some();
        assert_eq!((&recorder.0.lock()[..], is_inside), (&[false, true][..], true));
    }
}
