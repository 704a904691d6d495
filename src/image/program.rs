//! Calls between Lisp and a program that embeds it: `struct sbcl_library` of the contract.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use once_cell::sync::OnceCell;

use super::bindings::{sbcl_call_status, sbcl_library, sbcl_message};
pub(crate) use super::bindings::{sbcl_entry, sbcl_program_function};
use super::float_traps::{self, Masked};
use super::message::Writer;
use super::protocol::Event;
use super::words::Words;
use super::{answers, process, signals};
use crate::panics;

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallStatus {
    /// The message has its values.
    Values,
    /// The message has the condition, or the error.
    Failed,
    /// Only of the program's functions: the message has what it panicked with.
    Panicked,
    /// Something in Lisp unwinds past the caller, which is to return.
    Unwinding,
    /// Only of the program's functions: there is none of this number any more.
    Missing,
}

/// The program's side. Called on Lisp threads, any of them at any time.
pub(crate) trait Program: Send + Sync + 'static {
    /// Uses the Lisp thread, number 0 to interrupt others, until it is to end. True when something unwinds.
    fn serve(&self, inside: &Inside, thread: u32) -> bool;

    /// Calls a function, whose answer it writes.
    fn call(&self, inside: &Inside, function: u64, message: &[u64], answer: &mut Writer) -> CallStatus;

    /// Takes what a thread that works for the program prints, or warns of.
    fn event(&self, event: Event<'_>);
}

/// Hands an event of [`SBCL_JOB_PROGRAM`](super::bindings::SBCL_JOB_PROGRAM) to the program.
pub(super) fn event(event: Event<'_>) {
    if let Some(program) = PROGRAM.get() {
        // What panics there has nobody to be told.
        panics::caught(|| program.event(event));
    }
}

static PROGRAM: OnceCell<Arc<dyn Program>> = OnceCell::new();

type Gate = unsafe extern "C" fn(u64, u64, *const u64, u64, *mut sbcl_message) -> i32;

/// Proof that this thread is one of Lisp's that has called the program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inside {
    gate: Gate,
    /// The float modes of the Lisp code that called.
    modes: float_traps::Modes,
    /// Where this thread is, when it is one of those that work for the program.
    place: Option<&'static Place>,
    /// The lowest address of this thread's stack.
    stack_end: usize,
    not_send: PhantomData<*mut ()>,
}

/// Bytes of stack that must be left when Rust goes a level deeper in what may have no end. Less than Lisp wants when it is
/// called (`+room-for-program+` of `lisp/embedding/calls.lisp`); the guard pages of SBCL's are a part of it.
const ROOM: usize = 192 * 1024;

/// Returns the lowest address of this thread's stack, or 0 when that is not known. On x86-64 it is Lisp's control stack.
fn stack_end() -> usize {
    thread_local! {
        static END: Cell<Option<usize>> = const { Cell::new(None) };
    }
    END.get().unwrap_or_else(|| {
        let end = find_stack_end();
        END.set(Some(end));
        end
    })
}

#[cfg(target_os = "linux")]
fn find_stack_end() -> usize {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let (mut start, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: pthread_getattr_np(3) fills the attributes in when it returns 0; then they are read, and destroyed once.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            return 0;
        }
        libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut start, &raw mut size);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
    }
    start.addr()
}

#[cfg(target_os = "macos")]
fn find_stack_end() -> usize {
    // SAFETY: this thread's own, which both calls only read. macOS has the highest address and the size.
    unsafe {
        let thread = libc::pthread_self();
        libc::pthread_get_stackaddr_np(thread).addr().saturating_sub(libc::pthread_get_stacksize_np(thread))
    }
}

/// How many threads may work for a program, spare ones included.
pub(crate) const MOST_THREADS: usize = 512;

/// Where a thread is that works for the program: others look.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Place(AtomicU8);

/// Those of all of them, by number.
static PLACES: [Place; MOST_THREADS + 1] = [const { Place(AtomicU8::new(Place::NOWHERE)) }; MOST_THREADS + 1];

impl Place {
    const NOWHERE: u8 = 0;
    const IN_RUST: u8 = 1;
    const IN_LISP: u8 = 2;

    fn set(place: Option<&Self>, at: u8) {
        if let Some(place) = place {
            place.0.store(at, Ordering::Release);
        }
    }

    fn of(thread: u32) -> Option<&'static Self> {
        PLACES.get(thread as usize)
    }

    /// True when thread `number` is that of nobody: it was not started, or has ended.
    pub(crate) fn is_free(number: u32) -> bool {
        Self::of(number).is_some_and(|place| place.0.load(Ordering::Acquire) == Self::NOWHERE)
    }

    /// Takes a free number for a thread that is about to be started.
    pub(crate) fn take(number: u32) {
        Self::set(Self::of(number), Self::IN_LISP);
    }

    /// Gives the number of a thread back that could not be started.
    pub(crate) fn give_back(number: u32) {
        Self::set(Self::of(number), Self::NOWHERE);
    }

    /// How many threads of the program's are in Lisp, not counting the one that interrupts others.
    pub(crate) fn count_in_lisp() -> usize {
        PLACES[1..].iter().filter(|place| place.0.load(Ordering::Acquire) == Self::IN_LISP).count()
    }
}

/// While it lives, a thread of the program's is in Lisp, which the program has called.
struct InLisp(Option<&'static Place>);

impl InLisp {
    fn new(place: Option<&'static Place>) -> Self {
        Place::set(place, Place::IN_LISP);
        Self(place)
    }
}

impl Drop for InLisp {
    fn drop(&mut self) {
        Place::set(self.0, Place::IN_RUST);
    }
}

thread_local! {
    static CURRENT: Cell<Option<Inside>> = const { Cell::new(None) };
    /// True from when a call of Lisp was unwound until the program has returned to Lisp.
    static UNWINDING: Cell<bool> = const { Cell::new(false) };
}

/// Copies what Lisp has written.
///
/// # Safety
/// `count` words at `address` are readable.
#[inline]
unsafe fn copy(address: *const u64, count: u64) -> Words {
    let mut words = Words::new();
    if let Ok(count) = usize::try_from(count)
        && count > 0
        && !address.is_null()
    {
        // SAFETY: the caller's. Nothing writes there meanwhile: it is this thread's own.
        words.extend_from_slice(unsafe { std::slice::from_raw_parts(address, count) });
    }
    words
}

/// True when this thread's stack has room for one more level of a recursion in Rust.
pub(crate) fn has_room() -> bool {
    room_above(stack_end()) >= ROOM
}

/// Bytes of stack from here down to `end`.
#[inline]
fn room_above(end: usize) -> usize {
    let here = 0_u8;
    (&raw const here).addr().saturating_sub(end)
}

impl Inside {
    /// The proof for this thread, when there is one.
    #[inline]
    pub(crate) fn current() -> Option<Self> {
        CURRENT.get()
    }

    /// Calls the function that the Lisp handle `function` stands for with the objects in `message`. Its values come in
    /// `shape`.
    #[inline]
    pub(crate) fn call(&self, function: u64, shape: u16, message: &[u64]) -> (CallStatus, Words) {
        let mut answer = sbcl_message::default();
        #[cfg(feature = "guarded-messages")]
        let message = super::buffer::Buffer::of(message);
        let status = {
            let _lisp = (self.modes.restore(), signals::enter_lisp(), InLisp::new(self.place));
            // SAFETY: this thread is one of Lisp's and has called the program (that is what Inside proves, which does not
            // leave the thread). The message is well-formed, as only `message::Writer` writes them, and lives until the
            // call returns; nothing unwinds out of it: the gate stops that.
            unsafe { (self.gate)(function, u64::from(shape), message.as_ptr(), message.len() as u64, &raw mut answer) }
        };
        let status = match u32::try_from(status) {
            Ok(sbcl_call_status::SBCL_CALL_VALUES) => CallStatus::Values,
            Ok(sbcl_call_status::SBCL_CALL_FAILED) => CallStatus::Failed,
            _ => {
                UNWINDING.set(true);
                return (CallStatus::Unwinding, Words::new());
            }
        };
        // SAFETY: the contract has Lisp leave its answer there until this thread's next call.
        (status, unsafe { copy(answer.words, answer.count) })
    }

    /// As [`has_room`] says, unless this proof is [regardless](Self::regardless_of_room) of that.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        room_above(self.stack_end) >= ROOM
    }

    /// True when a call of Lisp is not refused for want of stack.
    pub(crate) fn has_room_for_lisp(&self) -> bool {
        room_above(self.stack_end) >= 2 * ROOM
    }

    /// Returns a copy whose [`has_room`](Self::has_room) is always true: for reading the error that says there is none.
    pub(crate) fn regardless_of_room(&self) -> Self {
        Self { stack_end: 0, ..*self }
    }

    /// True when Lisp is to go on unwinding as soon as the program has returned.
    #[allow(clippy::unused_self)]
    pub(crate) fn is_unwinding(&self) -> bool {
        UNWINDING.get()
    }

    /// As [`call`](Self::call) does, with the address of `target` and its length, in octets, after the one object in the
    /// message.
    pub(crate) fn call_with_buffer(&self, function: u64, handle: u64, target: &mut [u8]) -> (CallStatus, Words) {
        // Tokens of integers: see lisp/embedding/values.lisp.
        let message = [handle, 2, target.as_mut_ptr() as u64, 2, target.len() as u64];
        self.call(function, 0, &message)
    }
}

/// Makes this program the one that Lisp calls, with so many threads to work for it, and returns the contract's structure.
///
/// # Panics
/// When called twice: there is one image a process.
pub(super) fn install(program: Arc<dyn Program>, threads: u32) -> *mut sbcl_library {
    assert!(PROGRAM.set(program).is_ok(), "the program is installed once");
    let library = Box::new(sbcl_library { threads, reserved: 0, serve: Some(serve), call: Some(call), gate: None });
    let library = Box::into_raw(library);
    LIBRARY.set(Library(library)).unwrap_or_else(|_| unreachable!("installed once"));
    library
}

struct Library(*mut sbcl_library);
// SAFETY: the structure is leaked, and nothing writes to it once Lisp has called the program.
unsafe impl Send for Library {}
// SAFETY: the same.
unsafe impl Sync for Library {}

static LIBRARY: OnceCell<Library> = OnceCell::new();

/// Calls `function` with the proof that Lisp has called the program in this thread.
fn inside<R>(
    modes: float_traps::Modes,
    place: Option<&'static Place>,
    function: impl FnOnce(&dyn Program, &Inside) -> R,
) -> Option<R> {
    let (program, library) = (PROGRAM.get()?, LIBRARY.get()?);
    // SAFETY: leaked, and complete: Lisp has set the gate before it makes its first call.
    let gate = unsafe { (*library.0).gate }?;
    let inside = Inside { gate, modes, place, stack_end: stack_end(), not_send: PhantomData };
    Place::set(place, Place::IN_RUST);
    let before = CURRENT.replace(Some(inside));
    UNWINDING.set(false);
    let result = panics::caught(|| function(&**program, &inside));
    CURRENT.set(before);
    UNWINDING.set(false);
    result
}

/// `sbcl_library.serve`.
unsafe extern "C" fn serve(thread: u32) -> i32 {
    let masked = Masked::new();
    let _in_host = signals::enter_host();
    let place = Place::of(thread);
    let goes_on = inside(masked.modes(), place, |program, inside| program.serve(inside, thread)).unwrap_or(false);
    Place::set(place, if goes_on { Place::IN_LISP } else { Place::NOWHERE });
    i32::from(goes_on)
}

/// `sbcl_library.call`.
unsafe extern "C" fn call(function: u64, words: *const u64, count: u64, answer: *mut sbcl_message) -> i32 {
    let masked = Masked::new();
    let _in_host = signals::enter_host();
    if process::is_forked() {
        // SAFETY: the contract has Lisp pass a pinned, writable struct sbcl_message.
        unsafe { answer.write(answers::of_forked_process()) };
        return sbcl_call_status::SBCL_CALL_FAILED.cast_signed();
    }
    // SAFETY: the contract has Lisp pass its message, in memory that is this thread's.
    let message = unsafe { copy(words, count) };
    // SAFETY: the contract has Lisp pass a pinned, initialised struct sbcl_message.
    let being_read = unsafe { (*answer).count };
    let mut reply = Writer::new();
    let place = CURRENT.get().and_then(|inside| inside.place);
    let status = inside(masked.modes(), place, |program, inside| program.call(inside, function, &message, &mut reply))
        .unwrap_or(CallStatus::Panicked);
    Place::set(place, Place::IN_LISP);
    // SAFETY: the contract has Lisp pass a pinned, writable struct sbcl_message.
    unsafe { answer.write(answers::keep(being_read, reply)) };
    match status {
        CallStatus::Values => sbcl_call_status::SBCL_CALL_VALUES,
        CallStatus::Failed => sbcl_call_status::SBCL_CALL_FAILED,
        CallStatus::Panicked => sbcl_call_status::SBCL_CALL_PANICKED,
        CallStatus::Unwinding => sbcl_call_status::SBCL_CALL_UNWINDING,
        CallStatus::Missing => sbcl_call_status::SBCL_CALL_MISSING,
    }
    .cast_signed()
}

/// How a task ended.
#[derive(Debug)]
pub(crate) enum End {
    /// By itself.
    Done,
    /// Its time limit passed.
    Timeout,
    /// It was interrupted.
    Interrupted,
    /// By Lisp's restart ABORT.
    Aborted,
    /// By something else in Lisp that unwound it.
    Unwound,
    /// There was no thread to do it.
    NoThread,
    /// It could not be begun, or had an error outside what was to be done.
    Failed(Box<crate::lisp::Error>),
}

/// Something that is done on a Lisp thread, then settled and dropped.
pub(crate) trait Task: Send {
    /// Does it, once.
    fn run(&mut self, inside: &Inside);

    /// Takes how it ended, and returns the code of the program's that is to be run then, such as a waker. Neither this nor
    /// dropping the task afterwards runs any. A caller who waits for the task is told when it is dropped.
    fn settle(&mut self, end: End) -> Option<Rest>;
}

/// The program's code that runs when a task is over. It panics at most once.
pub(crate) type Rest = Box<dyn FnOnce() + Send>;

/// Lets a task that borrows be handed to another thread.
///
/// # Safety
/// The caller must not let `'a` end before the task is dropped.
unsafe fn erase<'a>(task: Box<dyn Task + 'a>) -> Box<dyn Task> {
    // SAFETY: only the lifetime differs; the caller keeps it.
    unsafe { std::mem::transmute::<Box<dyn Task + 'a>, Box<dyn Task>>(task) }
}

/// Hands `task` to `submit` and returns when it has been dropped.
pub(crate) fn scoped<'a>(task: impl Task + 'a, submit: impl FnOnce(Box<dyn Task>)) {
    /// Waits even when `submit` panics.
    struct Wait(Arc<Over>);
    impl Drop for Wait {
        fn drop(&mut self) {
            self.0.wait();
        }
    }
    let over = Arc::new(Over::default());
    let task = Box::new(Watched { task, _tell: Tell(over.clone()) });
    let wait = Wait(over);
    // SAFETY: this function does not return, nor unwind, before the task has been dropped: that is what `over` tells,
    // which only Tell's destructor sets.
    submit(unsafe { erase(task) });
    drop(wait);
}

/// Whether a task is dropped.
#[derive(Debug, Default)]
struct Over {
    over: AtomicBool,
    lock: parking_lot::Mutex<()>,
    told: parking_lot::Condvar,
}

/// How long a thread looks out for the end before it sleeps, and how often before it gives way to others: as long as a
/// short call takes.
const AWAKE: std::time::Duration = std::time::Duration::from_micros(50);
const LOOKS: u32 = 40;

impl Over {
    fn tell(&self) {
        self.over.store(true, Ordering::Release);
        let _lock = self.lock.lock();
        self.told.notify_all();
    }

    fn is_told(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    fn wait(&self) {
        let mut looks = 0;
        let mut end = None;
        while !self.is_told() {
            looks += 1;
            if looks < LOOKS {
                std::hint::spin_loop();
                continue;
            }
            let now = std::time::Instant::now();
            if now < *end.get_or_insert(now + AWAKE) {
                std::thread::yield_now();
                continue;
            }
            let mut lock = self.lock.lock();
            while !self.is_told() {
                self.told.wait(&mut lock);
            }
        }
    }
}

/// A task, and who is told when it is dropped: fields are dropped in their order.
struct Watched<T> {
    task: T,
    _tell: Tell,
}

impl<T: Task> Task for Watched<T> {
    fn run(&mut self, inside: &Inside) {
        self.task.run(inside);
    }

    fn settle(&mut self, end: End) -> Option<Rest> {
        self.task.settle(end)
    }
}

struct Tell(Arc<Over>);

impl Drop for Tell {
    fn drop(&mut self) {
        self.0.tell();
    }
}
