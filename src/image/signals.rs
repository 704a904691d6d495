//! Whose signal it is.
//!
//! SBCL installs handlers for faults (SIGSEGV, SIGFPE and so on), for its garbage collector (SIGUSR2) and for signals
//! such as SIGINT. Handlers belong to the whole process; here they are narrowed to Lisp threads while these run Lisp.
//! Everything else goes where it went before SBCL was booted.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use libc::{c_void, siginfo_t};

/// Faults: SBCL's in Lisp, the host's elsewhere.
const FAULTS: [c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGTRAP, libc::SIGFPE, libc::SIGABRT];

/// Sent by SBCL to its own threads only: for its garbage collector, and to interrupt one.
const LISP_ONLY: [c_int; 2] = [libc::SIGUSR2, libc::SIGURG];

/// Sent to the process for SBCL (timers, children) but handled on Lisp threads only: elsewhere its handler would block
/// the signals of the host's thread for good.
const FORWARDED: [c_int; 2] = [libc::SIGALRM, libc::SIGCHLD];

/// Given back to the host.
const HOSTS: [c_int; 6] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE, libc::SIGQUIT, libc::SIGXCPU];

/// What SBCL wants to be blocked together or not at all where its handlers interrupt (`sigaddset_deferrable` in its
/// src/runtime/interrupt.c): it gives up where only some are.
const DEFERRABLE: [c_int; 13] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGQUIT,
    libc::SIGALRM,
    libc::SIGURG,
    libc::SIGTSTP,
    libc::SIGCHLD,
    libc::SIGIO,
    libc::SIGXCPU,
    libc::SIGXFSZ,
    libc::SIGVTALRM,
    libc::SIGWINCH,
];

const LAST_SIGNAL: usize = 64;

thread_local! {
    /// How deep this thread is in functions that Lisp called.
    static HOST_DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// The Lisp thread that gets the forwarded signals; 0 until there is one.
static SIGNAL_THREAD: AtomicUsize = AtomicUsize::new(0);

/// Makes this thread, one of Lisp's that never ends, the one that forwarded signals go to.
pub(super) fn take_forwarded() {
    // SAFETY: pthread_self(3) always succeeds.
    SIGNAL_THREAD.store(unsafe { libc::pthread_self() } as usize, Ordering::Release);
}

/// While it lives, this thread runs the host's code.
pub(super) struct InHost(());

/// Notes that a function of the host begins, called from Lisp.
pub(super) fn enter_host() -> InHost {
    HOST_DEPTH.set(HOST_DEPTH.get() + 1);
    InHost(())
}

impl Drop for InHost {
    fn drop(&mut self) {
        HOST_DEPTH.set(HOST_DEPTH.get() - 1);
    }
}

/// While it lives, this thread runs Lisp again, which the host has called back.
pub(super) struct InLisp(u32);

/// Notes that the host calls Lisp back.
pub(super) fn enter_lisp() -> InLisp {
    InLisp(HOST_DEPTH.replace(0))
}

impl Drop for InLisp {
    fn drop(&mut self) {
        HOST_DEPTH.set(self.0);
    }
}

/// The handlers behind the filter.
struct Table {
    /// As it was before SBCL was booted.
    before: [MaybeUninit<libc::sigaction>; LAST_SIGNAL],
    /// SBCL's handlers, which take three arguments; 0 where it has set none.
    sbcl: [AtomicUsize; LAST_SIGNAL],
    is_booting: AtomicBool,
    is_lisp_thread: unsafe extern "C" fn() -> i32,
    catch_stack_loss: CatchStackLoss,
}

/// `sbcl_host_catch_stack_loss`.
pub(super) type CatchStackLoss = unsafe extern "C" fn(*mut c_void, *mut c_void) -> i32;

/// Null until [`Boot::begin`].
static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

fn current_action(signal: c_int) -> MaybeUninit<libc::sigaction> {
    let mut action = MaybeUninit::zeroed();
    // SAFETY: `action` is writable; with a null new action nothing changes.
    unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    action
}

fn set_action(signal: c_int, action: &libc::sigaction) {
    // SAFETY: `action` is a valid structure that came from sigaction(2) or names our filter.
    unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
}

fn is_filtered(signal: c_int) -> bool {
    FAULTS.contains(&signal) || LISP_ONLY.contains(&signal) || FORWARDED.contains(&signal)
}

/// SBCL sets its handlers, and changes the mask of the thread that boots it.
pub(super) struct Boot {
    mask: libc::sigset_t,
}

impl Boot {
    /// From here on SBCL's handlers stay behind the filter, if [`take_action`] gets them.
    pub(super) fn begin(is_lisp_thread: unsafe extern "C" fn() -> i32, catch_stack_loss: CatchStackLoss) -> Self {
        let table = Table {
            before: std::array::from_fn(|signal| current_action(signal as c_int)),
            sbcl: [const { AtomicUsize::new(0) }; LAST_SIGNAL],
            is_booting: AtomicBool::new(true),
            is_lisp_thread,
            catch_stack_loss,
        };
        TABLE.store(Box::leak(Box::new(table)), Ordering::Release);
        let mut mask = MaybeUninit::zeroed();
        // SAFETY: `mask` is writable; a null set leaves the thread's mask alone. sigset_t has no invalid values.
        let mask = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
            mask.assume_init()
        };
        Self { mask }
    }

    /// Gives this thread its mask back. What SBCL sets from here on, for signals that are not filtered, is Lisp's wish.
    pub(super) fn end(self) {
        // SAFETY: published by `begin`, and never freed.
        let table = unsafe { &*TABLE.load(Ordering::Acquire) };
        // Where SBCL's handlers are not given to `take_action`, they are taken late.
        #[cfg(not(target_os = "linux"))]
        for signal in FAULTS.into_iter().chain(LISP_ONLY).chain(FORWARDED).chain(HOSTS) {
            // SAFETY: filled by sigaction(2).
            unsafe { take_action(signal, current_action(signal).as_ptr().cast()) };
            if HOSTS.contains(&signal) {
                // SAFETY: filled by sigaction(2), in `begin`.
                set_action(signal, unsafe { table.before[signal as usize].assume_init_ref() });
            }
        }
        table.is_booting.store(false, Ordering::Release);
        // SAFETY: a mask that this thread had before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.mask, std::ptr::null_mut()) };
    }
}

/// Takes what SBCL would set for `signal`, and returns 1: behind the filter, or not at all where the signal is the host's
/// while SBCL boots. Else 0. In a thread that is not Lisp's, a handler of SBCL's would block the signals for good.
///
/// # Safety
/// `action` is one that sigaction(2) takes, of SBCL's, and [`Boot::begin`] has been called.
pub(super) unsafe extern "C" fn take_action(signal: i32, action: *const c_void) -> i32 {
    // SAFETY: the caller's; the table is never freed.
    let (table, mut action) = unsafe { (&*TABLE.load(Ordering::Acquire), *action.cast::<libc::sigaction>()) };
    let is_function = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
    if !is_filtered(signal) || !is_function {
        return (table.is_booting.load(Ordering::Acquire) && HOSTS.contains(&signal)).into();
    }
    table.sbcl[signal as usize].store(action.sa_sigaction, Ordering::Release);
    action.sa_sigaction = filter as *const () as usize;
    action.sa_flags |= libc::SA_SIGINFO;
    set_action(signal, &action);
    1
}

/// Calls SBCL's handler.
///
/// # Safety
/// Only within [`filter`], with its own arguments.
unsafe fn deliver_to_lisp(table: &Table, signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the filter is set where there is a handler of SBCL's, which takes three arguments; these are the kernel's.
    unsafe {
        let handler = table.sbcl[signal as usize].load(Ordering::Acquire);
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = std::mem::transmute(handler);
        handler(signal, info, context);
    }
}

/// Calls the action's handler, or returns false when it has none.
///
/// # Safety
/// Only within a signal handler, with that handler's own arguments.
unsafe fn deliver(action: &libc::sigaction, signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    match action.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => false,
        handler if action.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: sigaction(2) said that this is a three-argument handler; the arguments are the kernel's.
            unsafe {
                let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = std::mem::transmute(handler);
                handler(signal, info, context);
            }
            true
        }
        handler => {
            // SAFETY: sigaction(2) said that this is a one-argument handler.
            unsafe {
                let handler: extern "C" fn(c_int) = std::mem::transmute(handler);
                handler(signal);
            }
            true
        }
    }
}

/// True for a signal that a thread of this process sent to another.
///
/// # Safety
/// `info` is what a handler was given.
unsafe fn is_from_here(info: *mut siginfo_t) -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const TO_A_THREAD: c_int = libc::SI_TKILL;
    // Other systems do not say how it was sent.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const TO_A_THREAD: c_int = 0;
    // SAFETY: the caller's.
    unsafe { (TO_A_THREAD == 0 || (*info).si_code == TO_A_THREAD) && (*info).si_pid() == libc::getpid() }
}

/// Puts `errno` back when it is dropped: what is interrupted may be about to read it.
struct KeptErrno(c_int);

impl KeptErrno {
    fn place() -> *mut c_int {
        // SAFETY: it has no preconditions, and gives the address of this thread's own.
        #[cfg(target_os = "linux")]
        return unsafe { libc::__errno_location() };
        // SAFETY: the same.
        #[cfg(not(target_os = "linux"))]
        return unsafe { libc::__error() };
    }

    fn new() -> Self {
        // SAFETY: this thread's own, always readable.
        Self(unsafe { *Self::place() })
    }
}

impl Drop for KeptErrno {
    fn drop(&mut self) {
        // SAFETY: this thread's own, always writable.
        unsafe { *Self::place() = self.0 };
    }
}

/// Where a handler of the host's was interrupted that blocks some of the signals that SBCL wants to be blocked together,
/// has this one come again when that handler is done, and returns true.
///
/// # Safety
/// Within the handler of `signal`, with its own context.
#[inline(never)]
unsafe fn put_off(signal: c_int, context: *mut c_void) -> bool {
    // SAFETY: the kernel's, of the code that was interrupted; the handler may change what is blocked there.
    let mask = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_sigmask };
    // SAFETY: a valid set, and signals that there are.
    let blocked = DEFERRABLE.iter().filter(|other| unsafe { libc::sigismember(mask, **other) } == 1).count();
    if blocked == 0 || blocked == DEFERRABLE.len() {
        return false;
    }
    let _errno = KeptErrno::new();
    // SAFETY: as above. Sent to this thread while its handler runs, the signal stays pending; and blocked after that,
    // until the mask is restored that the interrupted handler will return to.
    unsafe {
        libc::sigaddset(mask, signal);
        libc::pthread_kill(libc::pthread_self(), signal);
    }
    true
}

/// Has the host's own handler and SBCL's thread for signals take one that was sent to the process, and returns true;
/// false on that thread, or where there is none. A thread of the host's has no use for it, and another one of Lisp's may
/// have its interrupts disabled for as long as it has nothing to do: there would be no timers meanwhile.
///
/// # Safety
/// Within the handler of `signal`, with its own arguments.
#[inline(never)]
unsafe fn pass_on(table: &Table, signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    let _errno = KeptErrno::new();
    let thread = SIGNAL_THREAD.load(Ordering::Acquire);
    // SAFETY: the caller's. What is called for the thread is async-signal-safe, and that thread never ends.
    unsafe {
        let (is_here, is_there) = (thread == libc::pthread_self() as usize, thread != 0);
        // In a copy of the process (`fork`) there is no such thread, and nothing of the host's.
        let is_passed_on = is_there && !is_here && libc::pthread_kill(thread as libc::pthread_t, signal) == 0;
        if is_passed_on || !is_there || is_here && !is_from_here(info) {
            deliver(table.before[signal as usize].assume_init_ref(), signal, info, context);
        }
        is_passed_on
    }
}

/// True when the signal is the end of the control stack, which has been taken care of.
#[inline(never)]
fn is_stack_loss(table: &Table, info: *mut siginfo_t, context: *mut c_void) -> bool {
    let _errno = KeptErrno::new();
    // SAFETY: as in `filter`, which calls this with its own arguments.
    unsafe { (table.catch_stack_loss)((*info).si_addr(), context) != 0 }
}

/// The handler of the faults and of SBCL's own signals.
///
/// Nothing is asked of a thread that may be the host's, unless it has caused the signal itself: it may be within malloc, and
/// the first look at a thread local of a library that was loaded with dlopen allocates that.
///
/// Nothing is left to do here after SBCL's handler, which keeps errno itself: it has to be called as the last thing, so
/// that SBCL finds the frame that trapped where this one would be. With a destructor to run, this function would keep
/// something in the register that SBCL follows the frames by.
extern "C" fn filter(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the table was published before this handler was set, and is never freed. What runs here is
    // async-signal-safe: loads, a constant-initialised thread local, the shim's look at a thread local.
    unsafe {
        let table = &*TABLE.load(Ordering::Acquire);
        if LISP_ONLY.contains(&signal) {
            // From elsewhere than SBCL it means nothing.
            let is_lisp = is_from_here(info) && (table.is_lisp_thread)() != 0;
            if is_lisp && !(signal == libc::SIGURG && put_off(signal, context)) {
                deliver_to_lisp(table, signal, info, context);
            }
            return;
        }
        if FORWARDED.contains(&signal) {
            if !pass_on(table, signal, info, context) && (table.is_lisp_thread)() != 0 && !put_off(signal, context) {
                deliver_to_lisp(table, signal, info, context);
            }
            return;
        }
        let lisp = (table.is_lisp_thread)() != 0;
        if lisp && HOST_DEPTH.get() == 0 {
            if signal == libc::SIGSEGV && is_stack_loss(table, info, context) {
                return;
            }
            deliver_to_lisp(table, signal, info, context);
            return;
        }
        let before = table.before[signal as usize].assume_init_ref();
        if !deliver(before, signal, info, context) {
            // No handler: what the host had happens when the instruction runs again, or the signal is raised again.
            set_action(signal, before);
            if (*info).si_code <= 0 {
                libc::raise(signal);
            }
        }
    }
}

/// Ends the process at once, without running exit handlers or destructors: Lisp's threads may be anywhere.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: _exit(2) has no preconditions.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn fail(_: c_int) {
        // SAFETY: this descriptor is not open, which is all that it is about.
        unsafe { libc::close(-1) };
    }

    extern "C" fn never() -> i32 {
        0
    }

    extern "C" fn catch_nothing(_: *mut c_void, _: *mut c_void) -> i32 {
        0
    }

    #[test]
    fn errno_is_what_it_was_after_a_signal() {
        let mut failing = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all zero is a valid action: none.
        unsafe { failing.assume_init_mut() }.sa_sigaction = fail as *const () as usize;
        let table = Table {
            before: [failing; LAST_SIGNAL],
            sbcl: [const { AtomicUsize::new(0) }; LAST_SIGNAL],
            is_booting: AtomicBool::new(false),
            is_lisp_thread: never,
            catch_stack_loss: catch_nothing,
        };
        TABLE.store(Box::leak(Box::new(table)), Ordering::Release);
        // SAFETY: this thread's own errno; the handler of SIGALRM looks at neither argument.
        unsafe {
            *KeptErrno::place() = libc::ENOENT;
            filter(libc::SIGALRM, std::ptr::null_mut(), std::ptr::null_mut());
            assert_eq!(*KeptErrno::place(), libc::ENOENT);
        }
        TABLE.store(std::ptr::null_mut(), Ordering::Release);
    }
}
