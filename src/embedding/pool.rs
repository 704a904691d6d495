//! The pool: the Lisp threads that run the program's calls.
//!
//! Pool threads take requests from a queue and run them in parallel. The monitor, Lisp thread number 0, interrupts
//! calls and starts spare threads. The monitor runs no code of the program.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use parking_lot::{Condvar, Mutex};

use super::convert::{ConversionError, IntoLisp, Reader, Writer};
use super::define::{self, function_name};
use super::enter::{Cx, Entry};
use super::error::{Condition, Error};
use super::options::Options;
use super::output;
use super::value::Value;
use crate::image::interruption::{self, Interruption};
use crate::image::program::{
    self, CallContext, CallStatus, Followup, Program, Task, TaskEnd, ThreadState, sbcl_program_function,
};
use crate::image::{Event, message, process};
use crate::os::clock::DeadlineClock;
use crate::os::helper_threads;
use crate::os::panics::{self, PanicSafeDrop};
use crate::os::thread_supply::ThreadSupply;
use crate::session::reentry::is_stream_thread;

/// Number of checks for work that an idle thread makes before it yields the processor. Together the checks take about
/// as long as a short call.
const CHECKS_PER_YIELD: u32 = 25;
/// The time that a request waits before the monitor checks whether there are too few threads, and the time between
/// checks.
const THREAD_CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// The time after which waiting requests fail if too many threads are inside Rust, no request has been taken meanwhile,
/// and no more threads can be started.
const NO_THREAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The allowance for scheduled checks of finished calls. When the number of scheduled checks exceeds this allowance
/// plus twice the number that the last sweep left, a sweep removes the checks of finished calls.
const MAX_STALE_CHECKS: usize = 1024;
/// The pool of the image in this process.
static POOL: OnceCell<Arc<Pool>> = OnceCell::new();

/// The way in which a call ended.
pub(super) type RequestEnd = TaskEnd<Error>;

/// The next step of a pool thread.
enum NextStep {
    Request(Request),
    /// Make Lisp release objects whose handles were dropped.
    Release,
    /// Park the thread, because it is a spare thread that is not needed now.
    Park,
}

/// A call to run on a Lisp thread: the call's number, task and options.
struct Request {
    call: u64,
    task: Box<dyn Task<Error>>,
    options: Arc<Options>,
}

impl Request {
    /// Reports the end of the request to the request's caller. Returns the code of the program that remains to run,
    /// such as a waker or a destructor, if any.
    fn settle(self, end: RequestEnd) -> Option<Completion> {
        let Self { mut task, options, .. } = self;
        let Some(followup) = task.settle(end) else {
            // A task without followup code belongs to a blocking caller, which holds the options until the task is
            // dropped. So this is not the last reference to the options, and no destructor runs here.
            drop(options);
            return None;
        };
        Some(Completion { followup, options })
    }
}

/// Code of the program that remains to run for a finished request: a waker and destructors, which may block or panic.
struct Completion {
    followup: Followup,
    options: Arc<Options>,
}

impl Completion {
    /// Runs the remaining code. No caller waits for this code.
    fn run(self) {
        panics::catch(self.followup);
        panics::discard(self.options);
    }
}

/// A call that is running.
struct RunningCall {
    call: u64,
    /// The number of the group to which the call belongs. An interrupt handle interrupts all calls of one group.
    group: u64,
    thread: CallThread,
    /// The [`ThreadId`] of the thread that runs the call.
    thread_id: u64,
    interruption: Interruption<EndReason>,
    /// The time of the next scheduled check of the interruption.
    next_check: Option<Instant>,
}

/// The reason for ending a call. Lisp receives the reason's number, and passes the number back when the call has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EndReason {
    Interrupted = 1,
    Timeout,
}

impl EndReason {
    fn from_code(number: i64) -> Option<Self> {
        [Self::Interrupted, Self::Timeout].into_iter().find(|reason| *reason as i64 == number)
    }
}

impl From<EndReason> for RequestEnd {
    fn from(reason: EndReason) -> Self {
        match reason {
            EndReason::Interrupted => Self::Interrupted,
            EndReason::Timeout => Self::Timeout,
        }
    }
}

#[derive(Default)]
pub(super) struct Pool {
    state: Mutex<PoolState>,
    pushed: Condvar,
    /// Notified when a parked spare thread is needed.
    unparked: Condvar,
    /// The number of requests that wait.
    waiting: AtomicUsize,
    /// The number of threads that wait for requests, awake or asleep.
    idle: AtomicUsize,
    /// The number of requests ever taken by a pool thread.
    taken: AtomicUsize,
    /// The number of Lisp threads that may run in parallel. Threads inside Rust do not count.
    threads: u32,
    /// The maximum number of spare threads, which run requests while other threads are inside Rust.
    spare_threads: u32,
    /// The grace period of an interrupted call's cleanup forms.
    cleanup: Duration,
    monitor: Mutex<MonitorState>,
    /// The clock that wakes the monitor at its next deadline.
    clock: DeadlineClock,
    next_call: AtomicU64,
}

/// The waiting requests, the running calls, and the numbers of idle and of parked threads.
#[derive(Default)]
struct PoolState {
    /// The waiting requests, by the numbers of their calls, so that the oldest request is the first.
    requests: BTreeMap<u64, Request>,
    running: Vec<RunningCall>,
    /// Interruptions that were still under way when their calls ended. Each pair is the call's number and the
    /// [`ThreadId`] of the thread that has not taken the interruption yet.
    orphaned_interruptions: Vec<(u64, u64)>,
    /// The number of idle threads that check for requests. Such a thread takes a request, if there is one, before it
    /// sleeps.
    awake: usize,
    asleep: usize,
    /// The number of parked spare threads.
    parked: usize,
    /// The number of threads, still counted in `parked`, that have been unparked but have not woken yet.
    unpark_requests: usize,
}

impl PoolState {
    /// Returns true if a sleeping thread must be woken: more requests wait than threads are awake to take requests.
    fn must_wake_thread(&self) -> bool {
        self.asleep > 0 && self.requests.len() > self.awake
    }

    /// Requests that a parked spare thread continue; the caller then notifies [`Pool::unparked`]. Returns false if all
    /// parked threads have been unparked already, or none is parked.
    fn unpark_spare(&mut self) -> bool {
        let can_unpark = self.unpark_requests < self.parked;
        self.unpark_requests += usize::from(can_unpark);
        can_unpark
    }

    /// Records that the current thread begins to run `request`.
    fn begin_call(&mut self, request: &Request, thread: CallThread) {
        let (call, group) = (request.call, request.options.group);
        let thread_id = ThreadId::current();
        self.running.push(RunningCall {
            call,
            group,
            thread,
            thread_id,
            interruption: Interruption::default(),
            next_check: None,
        });
    }

    /// Records that a call has ended.
    fn end_call(&mut self, call: u64) {
        if let Some(index) = self.running.iter().position(|running| running.call == call) {
            let running = self.running.swap_remove(index);
            if running.interruption.is_under_way() {
                self.orphaned_interruptions.push((call, running.thread_id));
            }
        }
    }

    fn find_call(&mut self, call: u64) -> Option<&mut RunningCall> {
        self.running.iter_mut().find(|running| running.call == call)
    }

    /// Returns true if an interruption was sent to the thread, for any of its calls, and the thread has not taken it
    /// yet.
    fn is_interruption_under_way(&self, thread_id: u64) -> bool {
        self.orphaned_interruptions.iter().any(|(_, thread)| *thread == thread_id)
            || self.running.iter().any(|running| running.thread_id == thread_id && running.interruption.is_under_way())
    }

    /// Returns true if the interruption of any call on the thread has been requested.
    fn is_ending(&self, thread_id: u64) -> bool {
        self.running.iter().any(|running| running.thread_id == thread_id && running.interruption.reason().is_some())
    }
}

/// The monitor's schedule.
#[derive(Default)]
struct MonitorState {
    /// Scheduled checks of calls: the time, the call's number and the reason. Checks of finished calls stay until their
    /// time comes or a sweep removes them.
    checks: BinaryHeap<Reverse<(Instant, u64, CheckReason)>>,
    /// The number of checks that the last sweep left.
    left_by_last_sweep: usize,
    /// The time of the next check for too few threads.
    thread_check: Option<Instant>,
    /// The value of [`Pool::taken`] when requests were found waiting for a thread, and the time when this value was
    /// first found. `None` if no request waits for lack of threads.
    stalled_since: Option<(usize, Instant)>,
    supply: ThreadSupply,
}

impl MonitorState {
    /// Schedules a check of a call that is being interrupted, for the time `at`.
    fn schedule_check(&mut self, running: &mut RunningCall, at: Instant) {
        running.next_check = Some(at);
        self.checks.push(Reverse((at, running.call, CheckReason::Interruption)));
    }
}

/// The calls to interrupt.
#[derive(Clone, Copy)]
enum InterruptedCalls {
    /// The call with this number.
    One(u64),
    /// All calls of the group with this number.
    Group(u64),
}

impl InterruptedCalls {
    /// Returns true if these calls include the call with the number `call`, whose group has the number `group`.
    fn include(self, call: u64, group: u64) -> bool {
        match self {
            Self::One(number) => number == call,
            Self::Group(number) => number == group,
        }
    }
}

/// The reason for checking a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CheckReason {
    /// The call's time limit has passed.
    Limit,
    /// The call is being interrupted.
    Interruption,
}

/// An action of the monitor.
enum MonitorAction {
    /// Interrupt a call. The fields are the call's thread, the call's number and the reason.
    Interrupt(CallThread, u64, EndReason),
    /// Start a spare thread with this number.
    StartThread(u32),
}

/// The thread that a call runs on.
#[derive(Clone)]
enum CallThread {
    /// A thread of the pool, by number.
    Pool(u32),
    /// Any other Lisp thread.
    Other(Value),
}

impl IntoLisp for CallThread {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        match self {
            Self::Pool(number) => number.write(writer),
            Self::Other(thread) => thread.write(writer),
        }
    }
}

thread_local! {
    /// The tasks that Lisp will run on this thread, indexed by their numbers. An element is `None` while its task runs.
    static TASKS: RefCell<Vec<Option<Box<dyn Task<Error>>>>> = const { RefCell::new(Vec::new()) };
    /// The options of the calls that this thread is in, innermost last.
    static OPTIONS_STACK: RefCell<Vec<Arc<Options>>> = const { RefCell::new(Vec::new()) };
    /// This thread's number in the pool; `None` on a thread that does not belong to the pool.
    static POOL_THREAD_NUMBER: Cell<Option<u32>> = const { Cell::new(None) };
}

/// A sentinel that is destroyed before the thread locals that calls use: thread locals are destroyed in the reverse
/// order of their first use, and [`ThreadLocals::new`] uses all of them.
struct ThreadLocals {
    /// False if one of the thread locals had already been destroyed when the sentinel was made.
    are_alive: bool,
}

thread_local! {
    static THREAD_LOCALS: ThreadLocals = ThreadLocals::new();
}

impl ThreadLocals {
    fn new() -> Self {
        let are_alive = TASKS.try_with(|_| ()).is_ok()
            && OPTIONS_STACK.try_with(|_| ()).is_ok()
            && THREAD_ID.try_with(|_| ()).is_ok()
            && define::initialize_thread_locals()
            && program::initialize_thread_locals();
        Self { are_alive }
    }
}

impl Drop for ThreadLocals {
    /// Does nothing: only for a type with a destructor does Rust record that a thread local has been destroyed.
    fn drop(&mut self) {}
}

/// Initializes the thread locals that calls use, unless they are initialized. A thread that calls this function before
/// it runs code of the program keeps these thread locals until the program's own thread locals have been destroyed.
/// Returns false if one of the thread locals that calls use has been destroyed, because the thread or the process ends.
#[inline]
pub(super) fn initialize_thread_locals() -> bool {
    THREAD_LOCALS.try_with(|locals| locals.are_alive).unwrap_or(false)
}

/// The identity of a Lisp thread that runs calls. Unlike a thread's number in the pool, an identity is never reused.
struct ThreadId(u64);

thread_local! {
    static THREAD_ID: ThreadId = ThreadId::new();
}

impl ThreadId {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the current thread's identity, or 0 if the thread is ending.
    fn current() -> u64 {
        THREAD_ID.try_with(|thread| thread.0).unwrap_or(0)
    }
}

impl Drop for ThreadId {
    /// Discards the interruptions that the ending thread has not taken.
    fn drop(&mut self) {
        if let Some(pool) = pool_with_threads() {
            pool.state.lock().orphaned_interruptions.retain(|(_, thread)| *thread != self.0);
        }
    }
}

/// Makes `pool` receive all calls of the program. This function must be called after the image has booted.
pub(super) fn install(pool: Arc<Pool>) {
    let woken = pool.clone();
    message::register_release_waker(move || {
        // In a forked process, a missing thread may hold the condition variable's lock.
        if !process::is_forked() {
            woken.pushed.notify_one();
        }
    });
    let _ = POOL.set(pool);
}

/// Returns the pool of this process. Returns `None` if no image has booted, and in a forked process, which has no pool
/// threads and in which a missing thread may hold the pool's locks.
fn pool_with_threads() -> Option<&'static Arc<Pool>> {
    POOL.get().filter(|_| !process::is_forked())
}

/// Returns the pool of this process. Fails if no image has booted; in a forked process, which has no pool threads; and
/// on a thread that serves a stream or the warning hook, because pool threads may be waiting for that thread.
fn pool() -> Result<&'static Arc<Pool>, Error> {
    if process::is_forked() {
        return Err(Error::Forked);
    }
    if is_stream_thread() {
        return Err(Error::CalledByStream);
    }
    POOL.get().ok_or(Error::NotBooted)
}

/// Runs `work` on a Lisp thread: on the current thread if this thread is a Lisp thread that has called Rust, otherwise
/// on a pool thread.
pub(super) fn run<R: Send>(work: impl FnOnce(&Cx) -> Result<R, Error> + Send) -> Result<R, Error> {
    match Cx::current()? {
        Some(cx) => cx.check_stack_room().and_then(|()| work(&cx)),
        None => run_request(&Options::none(), work),
    }
}

/// Runs `work` with `options` on a Lisp thread. If the current thread is a Lisp thread that has called Rust, `work`
/// runs on the current thread.
pub(super) fn run_with_options<R: Send>(
    options: &Arc<Options>,
    work: impl FnOnce(&Cx) -> Result<R, Error> + Send,
) -> Result<R, Error> {
    match Cx::current()? {
        Some(cx)
            if options.is_empty() && is_in_group(options.group) && current_package_and_handler() == (false, false) =>
        {
            cx.check_stack_room().and_then(|()| work(&cx))
        }
        _ => run_request(options, work),
    }
}

/// Returns true if this thread is running a call of the group. Interrupting the group then also ends the calls that are
/// made within that call.
fn is_in_group(group: u64) -> bool {
    OPTIONS_STACK.with_borrow(|all| all.iter().any(|options| options.group == group))
}

/// Returns whether the innermost call of this thread has a package, and whether that call has a handler. Calls of other
/// handles within this call inherit neither the package nor the handler.
fn current_package_and_handler() -> (bool, bool) {
    OPTIONS_STACK.with_borrow(|all| match all.last() {
        Some(options) => (options.package.is_some(), options.handler.is_some()),
        None => (false, false),
    })
}

/// The task of a blocking call: a closure, its result and the end of the call. The task belongs to the caller, which
/// waits until the pool has dropped its reference to the task.
struct BlockingTask<F, R> {
    work: Option<F>,
    result: Option<std::thread::Result<Result<R, Error>>>,
    end: Option<RequestEnd>,
}

impl<F: FnOnce(&Cx) -> Result<R, Error> + Send, R: Send> Task<Error> for &mut BlockingTask<F, R> {
    fn run(&mut self, context: &CallContext) {
        if let Some(work) = self.work.take() {
            let cx = Cx::new(*context);
            self.result = Some(catch_unwind(AssertUnwindSafe(|| work(&cx))));
        }
    }

    fn settle(&mut self, end: RequestEnd) -> Option<Followup> {
        self.end = Some(end);
        None
    }
}

/// Returns the result of a call that ended with `end`: the closure's own `result` if the closure panicked or the call
/// was not ended early, otherwise an error. `limit` is the time limit that [`Error::Timeout`] reports.
pub(super) fn call_result<R>(
    end: RequestEnd,
    result: &mut Option<std::thread::Result<Result<R, Error>>>,
    limit: Option<Duration>,
) -> std::thread::Result<Result<R, Error>> {
    // A panic takes precedence over the way in which the call ended.
    if let Some(result) = result.take_if(|result| result.is_err() || matches!(end, RequestEnd::Done)) {
        return result;
    }
    Ok(Err(match end {
        RequestEnd::Failed(error) => *error,
        RequestEnd::Timeout => Error::Timeout { limit: limit.unwrap_or_default() },
        RequestEnd::Interrupted => Error::Interrupted,
        RequestEnd::Aborted | RequestEnd::Done => Error::Aborted,
        RequestEnd::Unwound => Error::Unwinding,
        RequestEnd::NoThread => Error::NoThread,
    }))
}

fn run_request<R: Send>(options: &Arc<Options>, work: impl FnOnce(&Cx) -> Result<R, Error> + Send) -> Result<R, Error> {
    let pool = pool()?;
    let cx = Cx::current()?;
    let mut task = BlockingTask { work: Some(work), result: None, end: None };
    program::submit_and_wait(&mut task, |task| {
        let request = pool.new_request(options, task);
        match &cx {
            Some(cx) => pool.perform_nested(cx, request),
            None => pool.push_request(request),
        }
    });
    // `end` is still `None` if the task was dropped without being settled.
    let result = call_result(task.end.unwrap_or(RequestEnd::Aborted), &mut task.result, options.timeout);
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Settles a waiting request on the monitor thread. The code of the program that remains to run is passed to a helper
/// thread, because that code might block the monitor.
fn settle_from_monitor(request: Request, end: RequestEnd) {
    if let Some(completion) = request.settle(end) {
        helper_threads::run(|| completion.run());
    }
}

/// Queues `task` for a Lisp thread. Returns the number of the call, for [`interrupt_call`].
pub(super) fn submit(options: &Arc<Options>, task: Box<dyn Task<Error>>) -> Result<u64, Error> {
    let pool = pool()?;
    let request = pool.new_request(options, task);
    let call = request.call;
    pool.push_request(request);
    Ok(call)
}

/// Calls Lisp to pin a vector and run `task` while the vector is pinned. `write` writes two arguments: the vector, and
/// the address of the two words in which Lisp stores the vector's address and length.
pub(super) fn call_with_task(
    cx: &Cx,
    task: Box<dyn Task<Error>>,
    write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
) -> Result<(), Error> {
    let number = store_task(task);
    let result = cx.call_entry(Entry::BorrowOctets, |writer| {
        number.write(writer)?;
        write(writer)
    });
    drop(TASKS.with_borrow_mut(Vec::pop));
    result
}

/// Stores `task` and returns the number by which Lisp calls it back. Tasks are removed in reverse order.
fn store_task(task: Box<dyn Task<Error>>) -> usize {
    TASKS.with_borrow_mut(|tasks| {
        tasks.push(Some(task));
        tasks.len() - 1
    })
}

/// Interrupts the call with the number `call`, unless the call has ended.
pub(super) fn interrupt_call(call: u64) {
    if let Some(pool) = pool_with_threads() {
        pool.interrupt_calls(InterruptedCalls::One(call));
    }
}

/// Interrupts all calls of a group: those that run, and those that wait for a thread.
pub(super) fn interrupt_group(group: u64) {
    if let Some(pool) = pool_with_threads() {
        pool.interrupt_calls(InterruptedCalls::Group(group));
    }
}

impl Pool {
    pub(super) fn new(threads: u32, spare_threads: u32, cleanup: Duration) -> Self {
        Self { threads, spare_threads, cleanup, ..Self::default() }
    }

    fn new_request(&self, options: &Arc<Options>, task: Box<dyn Task<Error>>) -> Request {
        let call = self.next_call.fetch_add(1, Ordering::Relaxed) + 1;
        Request { call, task, options: options.clone() }
    }

    fn push_request(&self, request: Request) {
        let (call, limit) = (request.call, request.options.timeout);
        let mut state = self.state.lock();
        state.requests.insert(call, request);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let must_wake_thread = state.must_wake_thread();
        drop(state);
        if must_wake_thread {
            self.pushed.notify_one();
        }
        self.schedule_timeout(call, limit);
        self.schedule_thread_check();
    }

    /// Schedules the end of a call, waiting or running, for the time when its limit has passed.
    fn schedule_timeout(&self, call: u64, limit: Option<Duration>) {
        let Some(deadline) = limit.and_then(|limit| Instant::now().checked_add(limit)) else { return };
        let mut monitor = self.monitor.lock();
        monitor.checks.push(Reverse((deadline, call, CheckReason::Limit)));
        if monitor.checks.len() > 2 * monitor.left_by_last_sweep + MAX_STALE_CHECKS {
            let state = self.state.lock();
            let waiting = state.requests.keys().copied();
            let live: HashSet<u64> = state.running.iter().map(|running| running.call).chain(waiting).collect();
            drop(state);
            monitor.checks.retain(|Reverse((_, call, _))| live.contains(call));
            monitor.left_by_last_sweep = monitor.checks.len();
        }
        drop(monitor);
        self.clock.arm(deadline);
    }

    /// Schedules a check for too few threads if a request waits and no thread is idle.
    fn schedule_thread_check(&self) {
        if self.idle.load(Ordering::SeqCst) == 0 && self.waiting.load(Ordering::SeqCst) > 0 {
            let mut monitor = self.monitor.lock();
            if monitor.thread_check.is_none() {
                let at = Instant::now() + THREAD_CHECK_INTERVAL;
                monitor.thread_check = Some(at);
                self.clock.arm(at);
            }
        }
    }

    /// Waits for the next step of thread `number`.
    fn next_step(&self, number: u32) -> NextStep {
        self.idle.fetch_add(1, Ordering::SeqCst);
        self.state.lock().awake += 1;
        let next = self.next_while_idle(number);
        if !matches!(next, NextStep::Request(_)) {
            // This thread counted as awake, so `push_request` may not have woken another thread for a waiting request.
            let mut state = self.state.lock();
            state.awake -= 1;
            if state.must_wake_thread() {
                drop(state);
                self.pushed.notify_one();
            }
        }
        self.idle.fetch_sub(1, Ordering::SeqCst);
        // While this thread counted as idle, `push_request` may not have scheduled a check for too few threads.
        self.schedule_thread_check();
        next
    }

    /// Waits for the next step of a thread that counts as awake. When a request is returned, [`Pool::take_request`] has
    /// already stopped counting the thread as awake.
    fn next_while_idle(&self, number: u32) -> NextStep {
        let is_spare = number > self.threads;
        loop {
            let mut checks = 0;
            let found = crate::os::busy_poll::poll_briefly(CHECKS_PER_YIELD, || {
                if is_spare && (self.waiting.load(Ordering::SeqCst) == 0 || self.has_enough_threads()) {
                    return Some(NextStep::Park);
                }
                if let Some(request) = self.take_request(number) {
                    return Some(NextStep::Request(request));
                }
                checks += 1;
                // While a program makes one call after another, the handles that the program drops are released here,
                // many at a time.
                (checks >= CHECKS_PER_YIELD && message::dropped_handle_count() > 0).then_some(NextStep::Release)
            });
            if let Some(next) = found {
                return next;
            }
            let mut state = self.state.lock();
            if state.requests.is_empty() {
                state.awake -= 1;
                state.asleep += 1;
                self.pushed.wait(&mut state);
                state.asleep -= 1;
                state.awake += 1;
                drop(state);
                if message::dropped_handle_count() > 0 {
                    // Objects behind dropped handles may take up heap that waiting calls need.
                    return NextStep::Release;
                }
            }
        }
    }

    /// Takes the first waiting request, if any, for thread `number`, which then no longer counts as awake.
    fn take_request(&self, number: u32) -> Option<Request> {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let (_, request) = state.requests.pop_first()?;
        state.begin_call(&request, CallThread::Pool(number));
        state.awake -= 1;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.taken.fetch_add(1, Ordering::Relaxed);
        Some(request)
    }

    /// Parks this spare thread until it is needed. The thread does not end instead, because thread-local destructors of
    /// the program, which may block or call Lisp, would run at its end.
    fn park(&self) {
        let mut state = self.state.lock();
        state.parked += 1;
        while state.unpark_requests == 0 {
            self.unparked.wait(&mut state);
        }
        state.unpark_requests -= 1;
        state.parked -= 1;
    }

    /// Of the calls that `calls` selects, interrupts the running calls and fails the waiting calls.
    fn interrupt_calls(&self, calls: InterruptedCalls) {
        let now = Instant::now();
        let mut monitor = self.monitor.lock();
        let mut state = self.state.lock();
        for running in state.running.iter_mut().filter(|running| calls.include(running.call, running.group)) {
            if running.interruption.request(EndReason::Interrupted, self.cleanup, now) {
                monitor.schedule_check(running, now);
            }
        }
        let numbers: Vec<u64> = match calls {
            // When a program drops many futures, a search of all requests for each of them would take too long.
            InterruptedCalls::One(call) => vec![call],
            InterruptedCalls::Group(group) => {
                let requests = state.requests.values().filter(|request| request.options.group == group);
                requests.map(|request| request.call).collect()
            }
        };
        let waiting: Vec<Request> =
            numbers.into_iter().filter_map(|call| self.remove_request(&mut state, call)).collect();
        drop(state);
        drop(monitor);
        self.clock.arm(now);
        output::wake_calls_waiting_for_streams();
        // All requests are settled before any completion runs, as completions may block.
        let completions: Vec<Completion> =
            waiting.into_iter().filter_map(|request| request.settle(RequestEnd::Interrupted)).collect();
        completions.into_iter().for_each(Completion::run);
    }

    /// Records that the thread of `call` has taken the interruption that was sent for `call`. From now on, the next
    /// interruption can be sent to this thread.
    fn record_interruption_taken(&self, call: u64) {
        let now = Instant::now();
        let mut monitor = self.monitor.lock();
        let mut state = self.state.lock();
        let thread_id = match state.find_call(call) {
            Some(running) => {
                running.interruption.record_taken(now);
                running.thread_id
            }
            None => match state.orphaned_interruptions.iter().position(|(orphan, _)| *orphan == call) {
                Some(index) => state.orphaned_interruptions.swap_remove(index).1,
                None => return,
            },
        };
        let is_to_end =
            |running: &&mut RunningCall| running.thread_id == thread_id && running.interruption.reason().is_some();
        state.running.iter_mut().filter(is_to_end).for_each(|running| monitor.schedule_check(running, now));
        self.clock.arm(now);
    }

    /// Records that `call` has begun to unwind.
    fn record_unwinding(&self, call: u64) {
        if let Some(running) = self.state.lock().find_call(call) {
            running.interruption.record_unwinding(Instant::now());
        }
    }

    /// Returns true if the interruption of any call on the current thread has been requested.
    pub(super) fn is_ending(&self) -> bool {
        self.state.lock().is_ending(ThreadId::current())
    }

    /// Runs a request on the current thread, a Lisp thread that has called Rust.
    fn perform_nested(&self, cx: &Cx, request: Request) {
        let thread = match POOL_THREAD_NUMBER.get() {
            Some(number) => CallThread::Pool(number),
            None => CallThread::Other(cx.call_entry_with(Entry::CurrentThread, &()).unwrap_or_else(|_| Value::nil())),
        };
        self.state.lock().begin_call(&request, thread);
        self.schedule_timeout(request.call, request.options.timeout);
        self.perform(cx.context(), request, false);
    }

    /// Runs a request that [`PoolState::begin_call`] has recorded. `is_outermost` is true if the current thread is a
    /// pool thread that is in no other call.
    fn perform(&self, context: &CallContext, request: Request, is_outermost: bool) {
        let Request { call, task, options } = request;
        let cx = Cx::new(*context);
        let number = store_task(task);
        let (replaces_package, replaces_handler) = current_package_and_handler();
        OPTIONS_STACK.with_borrow_mut(|all| all.push(options.clone()));
        let result = cx.call_entry::<Option<i64>>(Entry::RunUnderConditions, |writer| {
            call.write(writer)?;
            number.write(writer)?;
            if options.has_bindings() || replaces_package || replaces_handler {
                match &options.package {
                    Some(package) => package.write(writer)?,
                    None => replaces_package.write(writer)?,
                }
                options.handler.is_some().write(writer)?;
                options.variables.write(writer)?;
                options.values.write(writer)?;
            }
            Ok(())
        });
        if is_outermost {
            // Lisp code may have called fork(2) itself.
            process::exit_if_forked();
        }
        drop(OPTIONS_STACK.with_borrow_mut(Vec::pop));
        let task = TASKS.with_borrow_mut(|tasks| tasks.pop().flatten());
        let end = match result {
            Ok(None) => RequestEnd::Done,
            Ok(Some(number)) => EndReason::from_code(number).map_or(RequestEnd::Aborted, RequestEnd::from),
            Err(Error::Unwinding) if is_outermost => RequestEnd::Aborted,
            Err(Error::Unwinding) => RequestEnd::Unwound,
            Err(error) => RequestEnd::Failed(Box::new(error)),
        };
        self.state.lock().end_call(call);
        if let Some(completion) = task.and_then(|task| Request { call, task, options }.settle(end)) {
            if context.is_unwinding() {
                // On this thread, which is unwinding, the completion could not call Lisp.
                helper_threads::run(|| completion.run());
            } else {
                completion.run();
            }
        }
    }

    /// Runs the monitor, and never returns. Interrupts calls that have reached their time limit or whose interruption
    /// has been requested, and starts threads when there are too few.
    fn run_monitor(&self, cx: &Cx) {
        loop {
            let (action, result): (_, Result<(), Error>) = match self.next_action() {
                MonitorAction::Interrupt(thread, call, reason) => {
                    ("interrupt a call", cx.call_entry_with(Entry::Interrupt, &(thread, call, reason as i64)))
                }
                MonitorAction::StartThread(number) => {
                    let started = cx.call_entry_with(Entry::StartThread, &(number,));
                    let mut monitor = self.monitor.lock();
                    if started.is_ok() {
                        monitor.supply.record_started();
                    } else {
                        ThreadState::release(number);
                        monitor.supply.record_failure(Instant::now());
                    }
                    ("start a thread", started)
                }
            };
            if let Err(error) = result {
                helper_threads::run(move || {
                    tracing::error!("Lisp could not {action}: {error}");
                });
            }
        }
    }

    fn next_action(&self) -> MonitorAction {
        let mut monitor = self.monitor.lock();
        loop {
            let now = Instant::now();
            if monitor.thread_check.is_some_and(|at| at <= now) {
                let (thread_to_start, failed_request) = self.check_threads(&mut monitor, now);
                if let Some(request) = failed_request {
                    parking_lot::MutexGuard::unlocked(&mut monitor, || {
                        settle_from_monitor(request, RequestEnd::NoThread)
                    });
                }
                if let Some(number) = thread_to_start {
                    return MonitorAction::StartThread(number);
                }
                continue;
            }
            let first = monitor.checks.peek().map(|Reverse((at, ..))| *at);
            if first.is_none_or(|first| first > now) {
                if let Some(wake) = first.into_iter().chain(monitor.thread_check).min() {
                    self.clock.arm(wake);
                }
                parking_lot::MutexGuard::unlocked(&mut monitor, || self.clock.wait());
                continue;
            }
            let Some(Reverse((at, call, reason))) = monitor.checks.pop() else { continue };
            let mut state = self.state.lock();
            if state.find_call(call).is_some() {
                let action = self.check_call(&mut monitor, &mut state, (at, call, reason), now);
                drop(state);
                if reason == CheckReason::Limit {
                    output::wake_calls_waiting_for_streams();
                }
                match action {
                    Some(action) => return action,
                    None => continue,
                }
            }
            let waiting = match reason {
                CheckReason::Limit => self.remove_request(&mut state, call),
                CheckReason::Interruption => None,
            };
            drop(state);
            if let Some(request) = waiting {
                parking_lot::MutexGuard::unlocked(&mut monitor, || settle_from_monitor(request, RequestEnd::Timeout));
            }
        }
    }

    /// Checks a running call, and returns the interruption to be sent now, if any. If `reason` is `Limit`, requests the
    /// call's interruption first. `at` is the time for which the check was scheduled.
    fn check_call(
        &self,
        monitor: &mut MonitorState,
        state: &mut PoolState,
        (at, call, reason): (Instant, u64, CheckReason),
        now: Instant,
    ) -> Option<MonitorAction> {
        let running = state.find_call(call)?;
        match reason {
            CheckReason::Limit => {
                if !running.interruption.request(EndReason::Timeout, self.cleanup, now) {
                    return None;
                }
            }
            // The call was checked in the meantime, or its check was rescheduled.
            CheckReason::Interruption if running.next_check != Some(at) => return None,
            CheckReason::Interruption => {}
        }
        running.next_check = None;
        let thread_id = running.thread_id;
        if state.is_interruption_under_way(thread_id) {
            // The call is checked again when the thread has taken the earlier interruption.
            return None;
        }
        let running = state.find_call(call)?;
        match running.interruption.next_action(now) {
            interruption::InterruptionAction::Send => {
                let reason = running.interruption.reason()?;
                Some(MonitorAction::Interrupt(running.thread.clone(), call, reason))
            }
            interruption::InterruptionAction::Wait(until) => {
                monitor.schedule_check(running, until);
                None
            }
            interruption::InterruptionAction::Idle => None,
        }
    }

    /// Removes and returns the waiting request of the call with the number `call`, if the call is still waiting.
    fn remove_request(&self, state: &mut PoolState, call: u64) -> Option<Request> {
        let request = state.requests.remove(&call)?;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Some(request)
    }

    /// Returns true if the number of threads in Lisp has reached the number that may run in parallel.
    fn has_enough_threads(&self) -> bool {
        ThreadState::count_in_lisp() >= self.threads as usize
    }

    /// Unparks a spare thread if requests wait because too many threads are inside Rust. If no spare thread can be
    /// unparked, returns the number of a thread to start. If no thread can be started either, and no request has been
    /// taken for too long, returns a request that must fail.
    fn check_threads(&self, monitor: &mut MonitorState, now: Instant) -> (Option<u32>, Option<Request>) {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            (monitor.thread_check, monitor.stalled_since) = (None, None);
            return (None, None);
        }
        monitor.thread_check = Some(now + THREAD_CHECK_INTERVAL);
        if self.idle.load(Ordering::SeqCst) > 0 || self.has_enough_threads() {
            monitor.stalled_since = None;
            return (None, None);
        }
        let taken = self.taken.load(Ordering::Relaxed);
        let Some((_, since)) = monitor.stalled_since.filter(|(before, _)| *before == taken) else {
            // A thread may be about to take a request: the pool is stalled only if no request is taken until the next
            // check.
            monitor.stalled_since = Some((taken, now));
            return (None, None);
        };
        if self.state.lock().unpark_spare() {
            self.unparked.notify_one();
            monitor.stalled_since = None;
            return (None, None);
        }
        let spare = (self.threads + 1..=self.threads + self.spare_threads).find(|number| ThreadState::is_free(*number));
        if let Some(number) = spare
            && monitor.supply.claim_start(1, now)
        {
            ThreadState::reserve(number);
            return (Some(number), None);
        }
        if now < since + NO_THREAD_TIMEOUT {
            return (None, None);
        }
        let mut state = self.state.lock();
        let first = state.requests.keys().next().copied();
        (None, first.and_then(|call| self.remove_request(&mut state, call)))
    }
}

impl Program for Pool {
    fn serve(&self, context: &CallContext, thread: u32) -> bool {
        let cx = Cx::new(*context);
        if thread == 0 {
            self.run_monitor(&cx);
            return false;
        }
        POOL_THREAD_NUMBER.set(Some(thread));
        initialize_thread_locals();
        loop {
            // The code that ran at the end of the last request, such as a waker, may have forked.
            process::exit_if_forked();
            cx.release_handles();
            if context.is_unwinding() {
                return true;
            }
            match self.next_step(thread) {
                NextStep::Request(request) => {
                    self.perform(context, request, true);
                    if context.is_unwinding() {
                        return true;
                    }
                }
                NextStep::Release => {}
                NextStep::Park => self.park(),
            }
        }
    }

    fn call(
        &self,
        context: &CallContext,
        function: u64,
        message: &[u64],
        answer: &mut message::MessageWriter,
    ) -> CallStatus {
        let cx = Cx::new(*context);
        initialize_thread_locals();
        let work = || {
            let mut writer = Writer(answer);
            match function {
                RUN_TASK => run_task(&cx, message),
                ASK_HANDLER => ask_handler(&cx, message, &mut writer),
                RECORD_INSTALLED => define::record_installed(Reader::new(&cx, message)),
                READ_INPUT => {
                    let waits = Reader::new(&cx, message).read().unwrap_or(true);
                    output::read_input(&|| !waits || self.is_ending())
                        .write(&mut writer)
                        .map_err(|error| HostFailure::from_error(function_name(function), error.into()))
                }
                _ => define::call(&cx, function, message, &mut writer),
            }
        };
        let result = panics::catch_as(work, |text| text.unwrap_or("the panic has no message").to_owned());
        if message::has_many_dropped_handles() {
            cx.release_handles();
        }
        match result {
            Ok(Ok(())) => CallStatus::Values,
            Ok(Err(failure)) => {
                *answer = message::MessageWriter::new();
                failure.write(answer)
            }
            Err(text) => {
                *answer = message::MessageWriter::new();
                answer.string_pair(&function_name(function), &text);
                CallStatus::Panicked
            }
        }
    }

    fn event(&self, event: Event<'_>) {
        match event {
            Event::Interrupted(call) => self.record_interruption_taken(call),
            Event::Unwinding(call) => self.record_unwinding(call),
            event => output::write_event(event, &|| self.is_ending()),
        }
    }
}

/// Number of the built-in function that runs a task. The next three constants are the numbers of the other built-in
/// functions (`enum sbcl_program_function` of `ffi/sbcl_host.h`).
const RUN_TASK: u64 = sbcl_program_function::SBCL_PROGRAM_RUN as u64;
const ASK_HANDLER: u64 = sbcl_program_function::SBCL_PROGRAM_ASK as u64;
const READ_INPUT: u64 = sbcl_program_function::SBCL_PROGRAM_READ_INPUT as u64;
const RECORD_INSTALLED: u64 = sbcl_program_function::SBCL_PROGRAM_DEFINED as u64;

/// The reason why a host function returned no values.
pub(super) enum HostFailure {
    /// The function returned an error. The fields are the condition, or nil if the error is not a condition; the name
    /// of the function; and the text of an error that is not a condition.
    Error(Value, String, String),
    /// Lisp is unwinding.
    Unwinding,
    /// No function has the number that Lisp called, for example because the function was replaced in the meantime.
    Missing,
}

impl HostFailure {
    /// Makes the failure for the function `name`, which returned `error`. [`define::call`] does not call this function
    /// while Lisp is unwinding. So an [`Error::Unwinding`] that arrives here is about an earlier unwinding, and is
    /// reported like any other error.
    pub(super) fn from_error(name: String, error: Box<dyn std::error::Error + Send + Sync>) -> Self {
        match error.downcast::<Error>() {
            Ok(error) => match *error {
                Error::Condition(condition) => Self::Error(condition.object.clone(), name, String::new()),
                other => Self::Error(Value::nil(), name, PanicSafeDrop::new(other).to_string()),
            },
            Err(other) => Self::Error(Value::nil(), name, PanicSafeDrop::new(other).to_string()),
        }
    }

    fn write(&self, answer: &mut message::MessageWriter) -> CallStatus {
        match self {
            Self::Unwinding => return CallStatus::Unwinding,
            Self::Missing => return CallStatus::Missing,
            Self::Error(condition, name, text) if condition.is_nil() => answer.string_pair(name, text),
            Self::Error(condition, ..) => condition.write_token(answer),
        }
        CallStatus::Failed
    }
}

fn run_task(cx: &Cx, message: &[u64]) -> Result<(), HostFailure> {
    let number = Reader::new(cx, message).read::<usize>().unwrap_or(usize::MAX);
    let task = TASKS.with_borrow_mut(|tasks| tasks.get_mut(number).and_then(Option::take));
    let Some(mut task) = task else { return Ok(()) };
    task.run(cx.context());
    TASKS.with_borrow_mut(|tasks| tasks[number] = Some(task));
    if cx.context().is_unwinding() { Err(HostFailure::Unwinding) } else { Ok(()) }
}

fn ask_handler(cx: &Cx, message: &[u64], writer: &mut Writer<'_>) -> Result<(), HostFailure> {
    let handler = OPTIONS_STACK.with_borrow(|all| all.last().and_then(|options| options.handler.clone()));
    let condition = Condition::read_from(&mut Reader::new(cx, message)).ok();
    match handler.zip(condition).and_then(|(handler, condition)| handler(&condition)) {
        Some(restart) => {
            restart.write(writer).map_err(|error| HostFailure::from_error(function_name(ASK_HANDLER), error.into()))?
        }
        None => writer.0.nil(),
    }
    if cx.context().is_unwinding() { Err(HostFailure::Unwinding) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Task<Error> for Nothing {
        fn run(&mut self, _: &CallContext) {}
        fn settle(&mut self, _: RequestEnd) -> Option<Followup> {
            None
        }
    }

    /// Begins a call of group 0 on this thread.
    fn begin(pool: &Pool, call: u64) {
        let request = Request { call, task: Box::new(Nothing), options: Options::none() };
        pool.state.lock().begin_call(&request, CallThread::Pool(1));
    }

    /// Queues a call of the group.
    fn push(pool: &Pool, group: u64) {
        let options = Arc::new(Options { group, ..Options::default() });
        pool.push_request(pool.new_request(&options, Box::new(Nothing)));
    }

    /// Returns the number of the call that the monitor would interrupt now, if any, and records the interruption as
    /// sent.
    fn next_interruption(pool: &Pool) -> Option<u64> {
        let mut monitor = pool.monitor.lock();
        let now = Instant::now();
        while monitor.checks.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
            let Reverse(check) = monitor.checks.pop()?;
            let mut state = pool.state.lock();
            if let Some(MonitorAction::Interrupt(_, call, _)) = pool.check_call(&mut monitor, &mut state, check, now) {
                return Some(call);
            }
        }
        None
    }

    #[test]
    fn at_most_one_interruption_per_thread_is_under_way() {
        let pool = Pool::new(1, 0, Duration::from_secs(5));
        begin(&pool, 1);
        begin(&pool, 2);
        for _ in 0..9 {
            pool.interrupt_calls(InterruptedCalls::Group(0));
        }
        let first = next_interruption(&pool).expect("one is sent");
        assert_eq!(next_interruption(&pool), None);
        // The call ends before the thread takes the call's interruption, and another call begins on the thread.
        pool.state.lock().end_call(first);
        begin(&pool, 3);
        pool.interrupt_calls(InterruptedCalls::One(3));
        assert_eq!(next_interruption(&pool), None);
        pool.record_interruption_taken(first);
        assert!(next_interruption(&pool).is_some_and(|call| call != first));
        assert_eq!(next_interruption(&pool), None);
        assert!(pool.is_ending());
        assert!(pool.monitor.lock().checks.len() < 9);
    }

    #[test]
    fn interrupting_each_of_many_waiting_calls_does_not_search_all_requests() {
        let pool = Pool::default();
        let count = 100_000;
        for _ in 0..count {
            push(&pool, 0);
        }
        let start = Instant::now();
        for call in (1..=count).rev() {
            pool.interrupt_calls(InterruptedCalls::One(call));
            // Searching all requests each time would take minutes.
            assert!(start.elapsed() < Duration::from_secs(60), "{call} calls are left");
        }
        assert!(pool.state.lock().requests.is_empty());
        assert_eq!(pool.waiting.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn interrupting_a_group_fails_only_its_waiting_calls() {
        let pool = Pool::default();
        for group in [1, 2, 1, 3, 1] {
            push(&pool, group);
        }
        pool.interrupt_calls(InterruptedCalls::Group(1));
        let left: Vec<u64> = pool.state.lock().requests.keys().copied().collect();
        assert_eq!(left, [2, 4]);
    }

    #[test]
    fn checks_of_finished_calls_are_swept_out() {
        let pool = Pool::default();
        let hour = Duration::from_secs(3600);
        let begin = |call| {
            begin(&pool, call);
            pool.schedule_timeout(call, Some(hour));
        };
        begin(1);
        for call in 2..100_000 {
            begin(call);
            pool.state.lock().end_call(call);
        }
        let monitor = pool.monitor.lock();
        assert!(monitor.checks.len() <= 2 * MAX_STALE_CHECKS, "{}", monitor.checks.len());
        assert!(monitor.checks.iter().any(|Reverse((_, call, _))| *call == 1));
    }
}
