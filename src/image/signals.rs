//! Signal dispositions: routes each signal to SBCL's handler or to the host's.
//!
//! SBCL installs handlers for faults (SIGSEGV, SIGFPE and so on), for its garbage collector (SIGUSR2) and for signals
//! such as SIGINT. Handlers are process-wide, so a filter is installed in their place. The filter calls SBCL's handler of a
//! fault only on a Lisp thread that is running Lisp. Other faults go to the handler that was installed before the boot.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering, compiler_fence};

use libc::{c_void, siginfo_t};

/// Fault signals. SBCL's handler gets faults in Lisp code; the host's handler gets all other faults.
const FAULT_SIGNALS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGTRAP, libc::SIGFPE, libc::SIGABRT];

/// Signals that SBCL sends to its own threads only: SIGUSR2 to stop them for a collection, SIGURG to interrupt a thread.
const LISP_ONLY_SIGNALS: [c_int; 2] = [libc::SIGUSR2, libc::SIGURG];

/// Signals whose handlers SBCL must not replace while it boots: the handlers installed before the boot stay.
const HOST_SIGNALS: [c_int; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE, libc::SIGQUIT, libc::SIGXCPU];

/// The signals that SBCL requires to be all blocked or all unblocked in code that its handlers interrupt
/// (`sigaddset_deferrable` in SBCL's src/runtime/interrupt.c). If only some are blocked there, SBCL ends the process.
const DEFERRABLE_SIGNALS: [c_int; 13] = [
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

/// Signals are numbered from 1 to 64.
const SIGNAL_TABLE_SIZE: usize = 65;

thread_local! {
    /// Number of host functions, called from Lisp, that are active in this thread. The signal filter reads the number.
    static HOST_DEPTH: AtomicU32 = const { AtomicU32::new(0) };
}

/// Changes [`HOST_DEPTH`] and returns its previous value. Only this thread writes the number, so no atomic
/// read-modify-write operation is needed; the fences keep the compiler from moving the change.
fn change_host_depth(new: impl FnOnce(u32) -> u32) -> u32 {
    compiler_fence(Ordering::SeqCst);
    let before = HOST_DEPTH.with(|depth| {
        let before = depth.load(Ordering::Relaxed);
        depth.store(new(before), Ordering::Relaxed);
        before
    });
    compiler_fence(Ordering::SeqCst);
    before
}

/// The Lisp thread to which signals are forwarded; 0 until it has started.
static SIGNAL_THREAD: AtomicUsize = AtomicUsize::new(0);

/// Makes this Lisp thread, which must never end, the target of forwarded signals.
pub(super) fn receive_forwarded_signals() {
    // SAFETY: pthread_self(3) always succeeds.
    SIGNAL_THREAD.store(unsafe { libc::pthread_self() } as usize, Ordering::Release);
}

/// A guard: while it lives, this thread runs the host's code.
pub(super) struct HostCallGuard(());

/// Marks the start of a host function that Lisp has called.
pub(super) fn enter_host() -> HostCallGuard {
    change_host_depth(|depth| depth + 1);
    HostCallGuard(())
}

impl Drop for HostCallGuard {
    fn drop(&mut self) {
        change_host_depth(|depth| depth - 1);
    }
}

/// A guard: while it lives, this thread runs Lisp code, because the host has called back into Lisp.
pub(super) struct LispCallGuard(u32);

/// Marks the start of a call from the host back into Lisp.
pub(super) fn enter_lisp() -> LispCallGuard {
    LispCallGuard(change_host_depth(|_| 0))
}

impl Drop for LispCallGuard {
    fn drop(&mut self) {
        change_host_depth(|_| self.0);
    }
}

/// The handlers that the filter dispatches to.
struct HandlerTable {
    /// The actions that were installed before SBCL was booted.
    previous_actions: [MaybeUninit<libc::sigaction>; SIGNAL_TABLE_SIZE],
    /// SBCL's handlers, which take three arguments; 0 where SBCL has installed none.
    sbcl_handlers: [AtomicUsize; SIGNAL_TABLE_SIZE],
    /// The signals that SBCL requires to be blocked in each of its handlers (`blockable_sigset` in SBCL's
    /// src/runtime/interrupt.c).
    blocked_in_handlers: OnceLock<libc::sigset_t>,
    is_booting: AtomicBool,
    functions: SignalFunctions,
}

/// The functions of the shim for signal handlers. `ffi/sbcl_host.h` declares and describes these functions.
#[derive(Debug, Clone, Copy)]
pub(super) struct SignalFunctions {
    pub(super) is_lisp_thread: unsafe extern "C" fn() -> i32,
    pub(super) may_be_stopping: unsafe extern "C" fn() -> i32,
    pub(super) catch_stack_loss: unsafe extern "C" fn(*mut c_void, *mut c_void) -> i32,
}

/// The table in use; null until [`BootPhase::begin`].
static HANDLER_TABLE: AtomicPtr<HandlerTable> = AtomicPtr::new(std::ptr::null_mut());

fn current_action(signal: c_int) -> MaybeUninit<libc::sigaction> {
    let mut action = MaybeUninit::zeroed();
    // SAFETY: `action` is writable, and a null new action changes nothing.
    unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    action
}

fn set_action(signal: c_int, action: &libc::sigaction) {
    // SAFETY: `action` is a valid structure that came from sigaction(2) or names our filter.
    unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
}

/// The phase in which SBCL installs its handlers and changes the signal mask of the booting thread.
pub(super) struct BootPhase {
    mask: libc::sigset_t,
}

impl BootPhase {
    /// Starts the phase. From here on, when [`intercept_action`] receives a handler of SBCL's, it installs the filter, which
    /// calls SBCL's handler. Unblocks the fault signals in this thread, from which all Lisp threads inherit their masks: the
    /// kernel ends a process in which a thread with a blocked fault signal causes this fault.
    pub(super) fn begin(functions: SignalFunctions) -> Self {
        let table = HandlerTable {
            previous_actions: std::array::from_fn(|signal| current_action(signal as c_int)),
            sbcl_handlers: [const { AtomicUsize::new(0) }; SIGNAL_TABLE_SIZE],
            blocked_in_handlers: OnceLock::new(),
            is_booting: AtomicBool::new(true),
            functions,
        };
        HANDLER_TABLE.store(Box::leak(Box::new(table)), Ordering::Release);
        let (mut faults, mut mask) = (MaybeUninit::zeroed(), MaybeUninit::zeroed());
        // SAFETY: the sets are writable, and sigemptyset(3) initialises the first one before it is used. A null pointer for
        // the new or the old mask is allowed. Every bit pattern is a valid sigset_t.
        let mask = unsafe {
            libc::sigemptyset(faults.as_mut_ptr());
            for signal in FAULT_SIGNALS {
                libc::sigaddset(faults.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_UNBLOCK, faults.as_ptr(), std::ptr::null_mut());
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
            mask.assume_init()
        };
        Self { mask }
    }

    /// Ends the phase and restores this thread's signal mask. From here on Lisp may install handlers for all signals.
    pub(super) fn end(self) {
        // SAFETY: `begin` published the table, which is never freed.
        let table = unsafe { &*HANDLER_TABLE.load(Ordering::Acquire) };
        // Only on Linux does SBCL pass its actions to `intercept_action`. On other systems this loop passes them.
        #[cfg(not(target_os = "linux"))]
        for signal in
            FAULT_SIGNALS.into_iter().chain(LISP_ONLY_SIGNALS).chain([libc::SIGALRM, libc::SIGCHLD]).chain(HOST_SIGNALS)
        {
            // SAFETY: sigaction(2) filled in the action, which SBCL has installed, and `begin` has been called.
            unsafe { intercept_action(signal, current_action(signal).as_ptr().cast()) };
            if HOST_SIGNALS.contains(&signal) {
                // SAFETY: sigaction(2) filled in the action, in `begin`.
                set_action(signal, unsafe { table.previous_actions[signal as usize].assume_init_ref() });
            }
        }
        table.is_booting.store(false, Ordering::Release);
        // SAFETY: `self.mask` is the mask that `begin` read, and a null pointer for the old mask is allowed.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.mask, std::ptr::null_mut()) };
    }
}

/// Unblocks all signals in this thread, and thereby in the threads that it starts. A process inherits its signal mask from the
/// program that started it.
#[cfg(feature = "mcp")]
pub(crate) fn unblock_all() {
    let mut none = MaybeUninit::zeroed();
    // SAFETY: the set is writable, and sigemptyset(3) initialises it. A null pointer for the old mask is allowed.
    unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
    }
}

/// Returns true if this thread is a Lisp thread.
pub(crate) fn is_lisp_thread() -> bool {
    // SAFETY: a published table is never freed, and the function of the shim has no preconditions.
    unsafe {
        HANDLER_TABLE.load(Ordering::Acquire).as_ref().is_some_and(|table| (table.functions.is_lisp_thread)() != 0)
    }
}

/// Intercepts the action that SBCL would install for `signal`. Returns 1 if SBCL must not install it: either the filter has
/// been installed, and will call SBCL's handler, or the signal is one of [`HOST_SIGNALS`] and SBCL is booting. Returns 0
/// otherwise. Without the filter, a handler of SBCL's would block signals permanently on threads of the host. Only the
/// handler of SIGPROF, which calls no Lisp code and samples the thread that it interrupts, is installed without the filter.
///
/// # Safety
/// `action` must be valid for sigaction(2) and come from SBCL, and [`BootPhase::begin`] must have been called.
pub(super) unsafe extern "C" fn intercept_action(signal: i32, action: *const c_void) -> i32 {
    // SAFETY: the caller guarantees that `action` is valid and that the table is published. The table is never freed.
    let (table, mut action) = unsafe { (&*HANDLER_TABLE.load(Ordering::Acquire), *action.cast::<libc::sigaction>()) };
    if table.is_booting.load(Ordering::Acquire) && HOST_SIGNALS.contains(&signal) {
        return 1;
    }
    let is_function = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
    let Some(handler) = table.sbcl_handlers.get(signal as usize) else { return 0 };
    if !is_function || signal == libc::SIGPROF {
        return 0;
    }
    handler.store(action.sa_sigaction, Ordering::Release);
    // The mask is the same in all actions of SBCL.
    let _ = table.blocked_in_handlers.set(action.sa_mask);
    action.sa_sigaction = filter_signal as *const () as usize;
    action.sa_flags |= libc::SA_SIGINFO;
    set_action(signal, &action);
    1
}

/// Calls SBCL's handler of `signal`.
///
/// # Safety
/// Must be called within [`filter_signal`], with the arguments of [`filter_signal`].
unsafe fn deliver_to_lisp(table: &HandlerTable, signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the filter is installed only for signals with a handler of SBCL's, which takes three arguments. The arguments
    // passed on come from the kernel. The mask comes from SBCL, and a null pointer for the old mask is allowed.
    unsafe {
        // If the program has installed a handler that calls the filter, such as a handler of signal-hook, the kernel has
        // blocked only the signals that the program's action names. The kernel restores the mask after that handler.
        if let Some(mask) = table.blocked_in_handlers.get() {
            libc::pthread_sigmask(libc::SIG_BLOCK, mask, std::ptr::null_mut());
        }
        let handler = table.sbcl_handlers[signal as usize].load(Ordering::Acquire);
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = std::mem::transmute(handler);
        handler(signal, info, context);
    }
}

/// Calls the action's handler. Returns false if the action has no handler, because it is `SIG_DFL` or `SIG_IGN`.
///
/// # Safety
/// Must be called within a signal handler, with that handler's own arguments.
unsafe fn deliver(action: &libc::sigaction, signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    match action.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => false,
        handler if action.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the action's flags say that the handler takes three arguments. The arguments passed on come from the
            // kernel.
            unsafe {
                let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = std::mem::transmute(handler);
                handler(signal, info, context);
            }
            true
        }
        handler => {
            // SAFETY: the action's flags say that the handler takes one argument.
            unsafe {
                let handler: extern "C" fn(c_int) = std::mem::transmute(handler);
                handler(signal);
            }
            true
        }
    }
}

/// Returns true if this process sent the signal to one of its own threads.
///
/// # Safety
/// `info` must be the argument of a signal handler.
unsafe fn is_from_this_process(info: *mut siginfo_t) -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const SENT_TO_THREAD_CODE: c_int = libc::SI_TKILL;
    // Other systems do not report how a signal was sent, so only the sender is checked.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const SENT_TO_THREAD_CODE: c_int = 0;
    // SAFETY: the caller guarantees that `info` came from the kernel.
    unsafe {
        (SENT_TO_THREAD_CODE == 0 || (*info).si_code == SENT_TO_THREAD_CODE) && (*info).si_pid() == libc::getpid()
    }
}

/// Returns true if another process sent the signal. SBCL takes each fault signal for a fault of the instruction that the
/// signal interrupted, and would report an error of this instruction.
///
/// # Safety
/// `info` must be the argument of a signal handler.
unsafe fn is_from_another_process(info: *mut siginfo_t) -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CODES: [c_int; 3] = [libc::SI_USER, libc::SI_QUEUE, libc::SI_TKILL];
    // Other systems do not report how a signal was sent.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CODES: [c_int; 0] = [];
    // SAFETY: the caller guarantees that `info` came from the kernel, which gives the sender of signals with these codes.
    unsafe { CODES.contains(&(*info).si_code) && (*info).si_pid() != libc::getpid() }
}

/// Returns true if SBCL's handler should handle `signal`, one of the [`LISP_ONLY_SIGNALS`]: this process sent the signal, or
/// may have sent it. While the queue of signals is full, the kernel delivers signals without the sender's process id.
/// SBCL ignores a SIGURG that announces nothing, but a SIGUSR2 for no reason would stop the thread until the next
/// collection, so SIGUSR2 is accepted only while threads may be stopped. SIGURG also comes from the timer of a Lisp
/// thread that was interrupted in foreign code.
///
/// # Safety
/// `info` must be the argument of a signal handler.
unsafe fn is_for_lisp(table: &HandlerTable, signal: c_int, info: *mut siginfo_t) -> bool {
    // SAFETY: the shim's function is async-signal-safe.
    if signal == libc::SIGUSR2 && unsafe { (table.functions.may_be_stopping)() } == 0 {
        return false;
    }
    #[cfg(any(target_os = "linux", target_os = "android"))]
    // SAFETY: the caller guarantees that `info` came from the kernel.
    unsafe {
        let is_sender_unknown = (*info).si_code == libc::SI_USER && (*info).si_pid() == 0;
        if is_sender_unknown || signal == libc::SIGURG && (*info).si_code == libc::SI_TIMER {
            return true;
        }
    }
    // SAFETY: the caller guarantees that `info` came from the kernel.
    unsafe { is_from_this_process(info) }
}

/// A guard that restores `errno`, because the interrupted code may be about to read it.
struct SavedErrno(c_int);

impl SavedErrno {
    fn location() -> *mut c_int {
        // SAFETY: the function has no preconditions, and returns the address of this thread's errno.
        #[cfg(target_os = "linux")]
        return unsafe { libc::__errno_location() };
        // SAFETY: the function has no preconditions, and returns the address of this thread's errno.
        #[cfg(not(target_os = "linux"))]
        return unsafe { libc::__error() };
    }

    fn new() -> Self {
        // SAFETY: `location` returns the address of this thread's errno, which is always readable.
        Self(unsafe { *Self::location() })
    }
}

impl Drop for SavedErrno {
    fn drop(&mut self) {
        // SAFETY: `location` returns the address of this thread's errno, which is always writable.
        unsafe { *Self::location() = self.0 };
    }
}

/// Defers `signal` if it interrupted a handler of the host's that blocks some, but not all, of the [`DEFERRABLE_SIGNALS`].
/// A deferred signal is delivered again when that handler returns. Returns true if the signal was deferred.
///
/// # Safety
/// Must be called within the handler of `signal`, with the context that the handler received.
#[inline(never)]
unsafe fn defer(signal: c_int, context: *mut c_void) -> bool {
    // SAFETY: the kernel provides the context of the interrupted code, and a handler may change the mask in it.
    let mask = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_sigmask };
    // SAFETY: `mask` is a valid set, and the signal numbers are valid.
    let blocked = DEFERRABLE_SIGNALS.iter().filter(|other| unsafe { libc::sigismember(mask, **other) } == 1).count();
    if blocked == 0 || blocked == DEFERRABLE_SIGNALS.len() {
        return false;
    }
    let _errno = SavedErrno::new();
    // SAFETY: `mask` is a valid set, and `signal` is valid. The signal stays pending while its own handler runs on this
    // thread. When its handler returns, the changed mask keeps the signal blocked. When the interrupted handler returns,
    // the kernel restores the mask that applied before the interrupted handler.
    unsafe {
        libc::sigaddset(mask, signal);
        libc::pthread_kill(libc::pthread_self(), signal);
    }
    true
}

/// Forwards `signal` to the thread that handles signals for SBCL. The signal comes from a timer or a child process, or Lisp
/// code has installed a handler for it. Also passes the signal to the host's handler, unless this is the signal thread and
/// another thread has forwarded the signal. Returns true if the signal was forwarded, and false on the signal thread itself
/// or if there is no signal thread. Threads of the host cannot handle the signal: SBCL's handler would block signals
/// permanently there. Another Lisp thread may disable its interrupts while it is idle, and would then handle the signal too
/// late for SBCL's timers.
///
/// # Safety
/// Must be called within the handler of `signal`, with the arguments of that handler.
#[inline(never)]
unsafe fn forward(table: &HandlerTable, signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    let _errno = SavedErrno::new();
    let thread = SIGNAL_THREAD.load(Ordering::Acquire);
    // SAFETY: the caller passes on the handler's arguments. `previous_actions` was filled in by sigaction(2).
    // pthread_kill(3) is async-signal-safe, and the signal thread never ends.
    unsafe {
        let (is_here, is_there) = (thread == libc::pthread_self() as usize, thread != 0);
        // In a forked process the signal thread does not exist: nothing is forwarded, and the host's handler is not called.
        let is_forwarded = is_there && !is_here && libc::pthread_kill(thread as libc::pthread_t, signal) == 0;
        if is_forwarded || !is_there || is_here && !is_from_this_process(info) {
            deliver(table.previous_actions[signal as usize].assume_init_ref(), signal, info, context);
        }
        is_forwarded
    }
}

/// Handles a fault at the end of a Lisp stack: makes the thread continue in Lisp, in `sbcl_host_stack_lost`, after the
/// signal handler. Returns false, and does nothing, for other faults.
#[inline(never)]
fn handle_stack_loss(table: &HandlerTable, info: *mut siginfo_t, context: *mut c_void) -> bool {
    let _errno = SavedErrno::new();
    // SAFETY: `info` and `context` come from the kernel: they are arguments of `filter_signal`.
    unsafe { (table.functions.catch_stack_loss)((*info).si_addr(), context) != 0 }
}

/// The filter: the handler of faults, of SBCL's own signals, and of the signals for which Lisp code has installed handlers.
///
/// On a thread that may be the host's, thread locals of a library loaded with dlopen must not be used unless the thread
/// itself caused the signal. The first use allocates memory, and the interrupted thread may be within malloc.
///
/// SBCL's handler must be called last, so that SBCL finds the trapping frame where this function's frame would be. A
/// destructor to run after the call would make this function keep a value in the register by which SBCL walks the frames.
/// So this function does not restore errno: SBCL's handler preserves errno.
extern "C" fn filter_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the table was published before this handler was installed, and is never freed. All functions called here are
    // async-signal-safe: they load atomics, read a constant-initialised thread local or a thread local of the shim, and
    // send signals.
    unsafe {
        let table = &*HANDLER_TABLE.load(Ordering::Acquire);
        if LISP_ONLY_SIGNALS.contains(&signal) {
            // Signals that SBCL did not send are ignored.
            let is_accepted = (table.functions.is_lisp_thread)() != 0 && is_for_lisp(table, signal, info);
            if is_accepted && !(signal == libc::SIGURG && defer(signal, context)) {
                deliver_to_lisp(table, signal, info, context);
            }
            return;
        }
        if !FAULT_SIGNALS.contains(&signal) {
            if !forward(table, signal, info, context)
                && (table.functions.is_lisp_thread)() != 0
                && !defer(signal, context)
            {
                deliver_to_lisp(table, signal, info, context);
            }
            return;
        }
        let was_sent = (*info).si_code <= 0;
        let is_fault_in_lisp =
            (table.functions.is_lisp_thread)() != 0 && HOST_DEPTH.with(|depth| depth.load(Ordering::Relaxed)) == 0;
        if is_fault_in_lisp && !is_from_another_process(info) {
            if signal == libc::SIGSEGV && handle_stack_loss(table, info, context) {
                return;
            }
            deliver_to_lisp(table, signal, info, context);
            return;
        }
        let before = table.previous_actions[signal as usize].assume_init_ref();
        if was_sent && before.sa_sigaction == libc::SIG_IGN {
            // Without the filter, SBCL would no longer get its faults.
            return;
        }
        if !deliver(before, signal, info, context) {
            set_action(signal, before);
        }
        // The host has no handler for the signal, or its handler has restored the default action, as that of Rust does. If an
        // instruction faulted, the default action takes effect when the instruction runs again. If a process sent the signal,
        // it must be raised again.
        if was_sent && current_action(signal).assume_init().sa_sigaction == libc::SIG_DFL {
            libc::raise(signal);
        }
    }
}

/// Ends the process at once, without exit handlers or destructors, because Lisp's threads may still be running.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: _exit(2) has no preconditions.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn set_errno(_: c_int) {
        // SAFETY: the descriptor is not open; the call only sets errno.
        unsafe { libc::close(-1) };
    }

    extern "C" fn always_false() -> i32 {
        0
    }

    extern "C" fn catch_nothing(_: *mut c_void, _: *mut c_void) -> i32 {
        0
    }

    /// Runs `check` while the filter dispatches to `previous`, the action that was installed before the boot.
    fn with_previous_handler(previous: usize, check: impl FnOnce()) {
        static TABLE_IN_USE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
        let _in_use = TABLE_IN_USE.lock();
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the all-zero action is valid: it has no handler.
        unsafe { action.assume_init_mut() }.sa_sigaction = previous;
        let table = HandlerTable {
            previous_actions: [action; SIGNAL_TABLE_SIZE],
            sbcl_handlers: [const { AtomicUsize::new(0) }; SIGNAL_TABLE_SIZE],
            blocked_in_handlers: OnceLock::new(),
            is_booting: AtomicBool::new(false),
            functions: SignalFunctions {
                is_lisp_thread: always_false,
                may_be_stopping: always_false,
                catch_stack_loss: catch_nothing,
            },
        };
        HANDLER_TABLE.store(Box::leak(Box::new(table)), Ordering::Release);
        check();
        HANDLER_TABLE.store(std::ptr::null_mut(), Ordering::Release);
    }

    #[test]
    fn the_signal_filter_preserves_errno() {
        // SAFETY: `location` returns the address of this thread's errno. For SIGALRM, the filter uses neither pointer.
        with_previous_handler(set_errno as *const () as usize, || unsafe {
            *SavedErrno::location() = libc::ENOENT;
            filter_signal(libc::SIGALRM, std::ptr::null_mut(), std::ptr::null_mut());
            assert_eq!(*SavedErrno::location(), libc::ENOENT);
        });
    }

    #[test]
    fn a_sent_signal_that_the_host_ignores_leaves_the_filter_installed() {
        // SAFETY: the all-zero information is valid, and says that a process sent the signal. sigaction(2) filled in the
        // action that is read. For a sent signal that the host ignores, the filter does not use the context.
        with_previous_handler(libc::SIG_IGN, || unsafe {
            let before = current_action(libc::SIGFPE);
            filter_signal(libc::SIGFPE, MaybeUninit::zeroed().as_mut_ptr(), std::ptr::null_mut());
            let after = current_action(libc::SIGFPE).assume_init();
            set_action(libc::SIGFPE, before.assume_init_ref());
            assert_eq!(after.sa_sigaction, before.assume_init().sa_sigaction);
        });
    }
}
