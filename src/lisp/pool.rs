//! The Lisp threads that work for this program, and what they are given to do.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use parking_lot::{Condvar, Mutex};

use super::convert::{ConversionError, IntoLisp, Reader, Writer};
use super::define::{self, name};
use super::enter::{Cx, Entry};
use super::error::{Condition, Error};
use super::options::Options;
use super::output;
use super::value::Value;
use crate::clock::Clock;
use crate::helper_threads;
use crate::image::program::{self, CallStatus, End, Inside, Place, Program, Rest, Task, sbcl_program_function};
use crate::image::{Event, message};
use crate::interruption::{self, Interruption};
use crate::panics::{self, Contained};
use crate::session::reentry::serves_stream;
use crate::thread_supply::ThreadSupply;

/// How often a thread that has nothing to do looks out for something before it gives way to others: as long as a short call
/// takes.
const LOOKS: u32 = 25;
/// How long a request waits before it is looked whether there are too few threads, and until the next look.
const CROWDED: Duration = Duration::from_millis(10);
/// How long none of the threads may come back, with no more of them to be had, until those that wait are given up.
const STUCK: Duration = Duration::from_secs(5);
/// How many calls whose time limits are yet to come may be over before these are forgotten; as many more as there are others.
const MAX_OVER: usize = 1024;
/// The one pool of this process.
static POOL: OnceCell<Arc<Pool>> = OnceCell::new();

/// What a thread is to do next.
enum Next {
    Request(Request),
    /// Have handles let go of.
    Release,
    /// Rest until it is called: it is a spare one, and one too many.
    Rest,
}

/// Something to do, under options.
struct Request {
    call: u64,
    task: Box<dyn Task>,
    options: Arc<Options>,
}

impl Request {
    /// Tells whoever waits how it ended, without running code of the program's: [`Left::finish`] does that.
    fn settle(self, end: End) -> Option<Left> {
        let Self { mut task, options, .. } = self;
        let Some(rest) = task.settle(end) else {
            // A caller waits until the task is dropped, and lends the options until then.
            drop(options);
            return None;
        };
        Some(Left { rest, options })
    }
}

/// What is left of a request that is over: code of the program's (a waker, destructors), which may block or panic.
struct Left {
    rest: Rest,
    options: Arc<Options>,
}

impl Left {
    /// Runs that code. Nobody waits for it.
    fn finish(self) {
        panics::caught(self.rest);
        panics::discard(self.options);
    }
}

/// A call that is under way.
struct Running {
    call: u64,
    /// Whose interrupt handle it listens to.
    group: u64,
    thread: Thread,
    /// The thread's [`LispThread`].
    thread_id: u64,
    interruption: Interruption<Reason>,
    /// When that is looked at next.
    look: Option<Instant>,
}

/// Why a call is to end, as Lisp is told and tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    Interrupted = 1,
    Timeout,
}

impl Reason {
    fn of(number: i64) -> Option<Self> {
        [Self::Interrupted, Self::Timeout].into_iter().find(|reason| *reason as i64 == number)
    }
}

impl From<Reason> for End {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Interrupted => Self::Interrupted,
            Reason::Timeout => Self::Timeout,
        }
    }
}

#[derive(Default)]
pub(super) struct Pool {
    queue: Mutex<Queue>,
    pushed: Condvar,
    /// Tells spare threads that rest that one of them is called.
    called: Condvar,
    /// How many requests wait.
    waiting: AtomicUsize,
    /// How many threads wait for requests, asleep or not.
    idle: AtomicUsize,
    /// How many requests were taken.
    taken: AtomicUsize,
    /// How many threads there are at least, and how many more there may be.
    threads: u32,
    spare_threads: u32,
    /// How long the cleanup forms of an interrupted call may take.
    cleanup: Duration,
    watch: Mutex<Watch>,
    /// Wakes the thread that looks after calls and threads.
    clock: Clock,
    next_call: AtomicU64,
}

/// The requests that wait, the calls that they become, and the threads that wait for them.
#[derive(Default)]
struct Queue {
    requests: VecDeque<Request>,
    running: Vec<Running>,
    /// The interruptions that were on their way when their calls ended: the call, and the thread that is yet to take it.
    late: Vec<(u64, u64)>,
    /// How many threads look out for requests: each takes one before it sleeps.
    awake: usize,
    asleep: usize,
    /// The number of spare threads that rest, and of those among them that are called and have not noticed it yet.
    resting: usize,
    called: usize,
}

impl Queue {
    /// True when a thread has to be woken, since there are more requests than threads that look out for them.
    fn needs_another(&self) -> bool {
        self.asleep > 0 && self.requests.len() > self.awake
    }

    /// Calls a spare thread that rests. False when there is none.
    fn call_spare(&mut self) -> bool {
        let rests = self.called < self.resting;
        self.called += usize::from(rests);
        rests
    }

    /// Notes that `thread` begins to do what is requested.
    fn begin(&mut self, request: &Request, thread: Thread) {
        let (call, group) = (request.call, request.options.group);
        let thread_id = LispThread::id();
        self.running.push(Running {
            call,
            group,
            thread,
            thread_id,
            interruption: Interruption::default(),
            look: None,
        });
    }

    /// Notes that a call is over.
    fn end(&mut self, call: u64) {
        if let Some(place) = self.running.iter().position(|running| running.call == call) {
            let running = self.running.swap_remove(place);
            if running.interruption.is_under_way() {
                self.late.push((call, running.thread_id));
            }
        }
    }

    fn find(&mut self, call: u64) -> Option<&mut Running> {
        self.running.iter_mut().find(|running| running.call == call)
    }

    /// True while an interruption is on its way to a thread, for whichever of its calls.
    fn is_interrupting(&self, thread_id: u64) -> bool {
        self.late.iter().any(|(_, of)| *of == thread_id)
            || self.running.iter().any(|running| running.thread_id == thread_id && running.interruption.is_under_way())
    }

    /// True when a call that this thread is in is to end.
    fn is_ending(&self, thread_id: u64) -> bool {
        self.running.iter().any(|running| running.thread_id == thread_id && running.interruption.reason().is_some())
    }
}

/// What the thread that interrupts others is to look after.
#[derive(Default)]
struct Watch {
    /// When which calls are looked at, those that are over included, until they are swept out.
    due: BinaryHeap<Reverse<(Instant, u64, Due)>>,
    /// How many of them were left by that.
    swept: usize,
    /// When to look whether there are too few threads.
    look: Option<Instant>,
    /// How many requests had been taken when there were found to be too few, and when that was.
    stuck: Option<(usize, Instant)>,
    supply: ThreadSupply,
}

impl Watch {
    /// Has a call that is to be interrupted looked at.
    fn look_at(&mut self, running: &mut Running, at: Instant) {
        running.look = Some(at);
        self.due.push(Reverse((at, running.call, Due::Interruption)));
    }
}

/// Why a call is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// Its time limit has passed.
    Limit,
    /// It is being interrupted.
    Interruption,
}

/// What the thread that interrupts others is to do.
enum Duty {
    /// Interrupt a call.
    Interrupt(Thread, u64, Reason),
    /// Start a thread of this number.
    Start(u32),
}

/// Where a call runs.
#[derive(Clone)]
enum Thread {
    /// One of this pool's.
    Own(u32),
    /// Another one of Lisp's.
    Other(Value),
}

impl IntoLisp for Thread {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        match self {
            Self::Own(number) => number.write(writer),
            Self::Other(thread) => thread.write(writer),
        }
    }
}

thread_local! {
    /// What the closures that Lisp is to have run are kept in, by number.
    static TASKS: RefCell<Vec<Option<Box<dyn Task>>>> = const { RefCell::new(Vec::new()) };
    /// The options of the calls that this thread is in, innermost last.
    static OPTIONS: RefCell<Vec<Arc<Options>>> = const { RefCell::new(Vec::new()) };
    /// This thread's number in the pool.
    static NUMBER: Cell<Option<u32>> = const { Cell::new(None) };
}

/// A thread of Lisp's that calls are made on. Unlike a number of the pool's, its own is never another thread's.
struct LispThread(u64);

thread_local! {
    static LISP_THREAD: LispThread = LispThread::new();
}

impl LispThread {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// This thread's; 0 when it is ending.
    fn id() -> u64 {
        LISP_THREAD.try_with(|thread| thread.0).unwrap_or(0)
    }
}

impl Drop for LispThread {
    /// Interruptions that it has not taken end with it.
    fn drop(&mut self) {
        if let Some(pool) = POOL.get() {
            pool.queue.lock().late.retain(|(_, thread)| *thread != self.0);
        }
    }
}

/// Has calls come to `pool` from now on: that of the boot that succeeded.
pub(super) fn install(pool: Arc<Pool>) {
    let woken = pool.clone();
    message::wake_with(move || _ = woken.pushed.notify_one());
    let _ = POOL.set(pool);
}

/// The pool, unless this thread is one that the pool's may be waiting for.
fn pool() -> Result<&'static Arc<Pool>, Error> {
    if serves_stream() {
        return Err(Error::CalledByStream);
    }
    POOL.get().ok_or(Error::NotBooted)
}

/// Does `work` on a Lisp thread: this one, if it is one that has called Rust.
pub(super) fn run<R: Send>(work: impl FnOnce(&Cx) -> Result<R, Error> + Send) -> Result<R, Error> {
    match Cx::current() {
        Some(cx) => cx.check_room().and_then(|()| work(&cx)),
        None => elsewhere(&Options::none(), work),
    }
}

/// Does `work` on a Lisp thread under `options`.
pub(super) fn run_under<R: Send>(
    options: &Arc<Options>,
    work: impl FnOnce(&Cx) -> Result<R, Error> + Send,
) -> Result<R, Error> {
    match Cx::current() {
        Some(cx) if options.is_empty() && is_in_group(options.group) => cx.check_room().and_then(|()| work(&cx)),
        _ => elsewhere(options, work),
    }
}

/// True when a call that this thread is in is one of the group already: what ends the group's ends it.
fn is_in_group(group: u64) -> bool {
    OPTIONS.with_borrow(|all| all.iter().any(|options| options.group == group))
}

/// A closure and what becomes of it. All of it is the caller's, who waits: what is not used is dropped there.
struct Work<F, R> {
    work: Option<F>,
    result: Option<std::thread::Result<Result<R, Error>>>,
    end: Option<End>,
}

impl<F: FnOnce(&Cx) -> Result<R, Error> + Send, R: Send> Task for &mut Work<F, R> {
    fn run(&mut self, inside: &Inside) {
        if let Some(work) = self.work.take() {
            let cx = Cx::new(*inside);
            self.result = Some(catch_unwind(AssertUnwindSafe(|| work(&cx))));
        }
    }

    fn settle(&mut self, end: End) -> Option<Rest> {
        self.end = Some(end);
        None
    }
}

/// What a call comes to that ended so. It takes the call's own `result` where that counts.
pub(super) fn settled<R>(
    end: End,
    result: &mut Option<std::thread::Result<Result<R, Error>>>,
    limit: Option<Duration>,
) -> std::thread::Result<Result<R, Error>> {
    // A panic is more than an end.
    if let Some(result) = result.take_if(|result| result.is_err() || matches!(end, End::Done)) {
        return result;
    }
    Ok(Err(match end {
        End::Failed(error) => *error,
        End::Timeout => Error::Timeout { limit: limit.unwrap_or_default() },
        End::Interrupted => Error::Interrupted,
        End::Aborted | End::Done => Error::Aborted,
        End::Unwound => Error::Unwinding,
        End::NoThread => Error::NoThread,
    }))
}

fn elsewhere<R: Send>(options: &Arc<Options>, work: impl FnOnce(&Cx) -> Result<R, Error> + Send) -> Result<R, Error> {
    let pool = pool()?;
    let mut task = Work { work: Some(work), result: None, end: None };
    program::scoped(&mut task, |task| {
        let request = pool.request(options, task);
        match Cx::current() {
            Some(cx) => pool.perform_here(&cx, request),
            None => pool.push(request),
        }
    });
    // Without an end: the threads have ended.
    let result = settled(task.end.unwrap_or(End::Aborted), &mut task.result, options.timeout);
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Ends a request that was not begun, on the thread that interrupts others: no code of the program's may run there.
fn settle_elsewhere(request: Request, end: End) {
    if let Some(left) = request.settle(end) {
        helper_threads::run(|| left.finish());
    }
}

/// Has `task` done on a Lisp thread. The number of the call, by which it can be ended.
pub(super) fn submit(options: &Arc<Options>, task: Box<dyn Task>) -> Result<u64, Error> {
    let pool = pool()?;
    let request = pool.request(options, task);
    let call = request.call;
    pool.push(request);
    Ok(call)
}

/// Has Lisp run `task` in what pins a vector, which `write` writes with where to put its address.
pub(crate) fn call_with_task(
    cx: &Cx,
    task: impl Task,
    write: impl FnOnce(&mut Writer<'_>) -> Result<(), ConversionError>,
) -> Result<(), Error> {
    let mut result = Ok(());
    program::scoped(task, |task| {
        let number = keep_task(task);
        result = cx.ask(Entry::BorrowOctets, |writer| {
            number.write(writer)?;
            write(writer)
        });
        drop(TASKS.with_borrow_mut(Vec::pop));
    });
    result
}

/// Keeps `task` until Lisp asks for it by the number that this returns. The last one that is kept is the first to go.
fn keep_task(task: Box<dyn Task>) -> usize {
    TASKS.with_borrow_mut(|tasks| {
        tasks.push(Some(task));
        tasks.len() - 1
    })
}

/// Ends a call, if it is not over.
pub(super) fn interrupt_call(call: u64) {
    if let Some(pool) = POOL.get() {
        pool.end_calls(|number, _| number == call);
    }
}

/// Ends the calls of a group.
pub(super) fn interrupt_group(group: u64) {
    if let Some(pool) = POOL.get() {
        pool.end_calls(|_, group_of_call| group_of_call == group);
    }
}

impl Pool {
    pub(super) fn new(threads: u32, spare_threads: u32, cleanup: Duration) -> Self {
        Self { threads, spare_threads, cleanup, ..Self::default() }
    }

    fn request(&self, options: &Arc<Options>, task: Box<dyn Task>) -> Request {
        let call = self.next_call.fetch_add(1, Ordering::Relaxed) + 1;
        Request { call, task, options: options.clone() }
    }

    fn push(&self, request: Request) {
        let (call, limit) = (request.call, request.options.timeout);
        let mut queue = self.queue.lock();
        queue.requests.push_back(request);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let needs_another = queue.needs_another();
        drop(queue);
        if needs_another {
            self.pushed.notify_one();
        }
        self.limit(call, limit);
        self.look_if_crowded();
    }

    /// Has a call, which waits or runs, ended when its time limit has passed.
    fn limit(&self, call: u64, limit: Option<Duration>) {
        let Some(due) = limit.and_then(|limit| Instant::now().checked_add(limit)) else { return };
        let mut watch = self.watch.lock();
        watch.due.push(Reverse((due, call, Due::Limit)));
        if watch.due.len() > 2 * watch.swept + MAX_OVER {
            let queue = self.queue.lock();
            let waiting = queue.requests.iter().map(|request| request.call);
            let live: HashSet<u64> = queue.running.iter().map(|running| running.call).chain(waiting).collect();
            drop(queue);
            watch.due.retain(|Reverse((_, call, _))| live.contains(call));
            watch.swept = watch.due.len();
        }
        drop(watch);
        self.clock.arm(due);
    }

    /// Has it looked after, if a request waits and no thread does.
    fn look_if_crowded(&self) {
        if self.idle.load(Ordering::SeqCst) == 0 && self.waiting.load(Ordering::SeqCst) > 0 {
            let mut watch = self.watch.lock();
            if watch.look.is_none() {
                let look = Instant::now() + CROWDED;
                watch.look = Some(look);
                self.clock.arm(look);
            }
        }
    }

    /// Waits for what thread `number` is to do next.
    fn next(&self, number: u32) -> Next {
        self.idle.fetch_add(1, Ordering::SeqCst);
        self.queue.lock().awake += 1;
        let next = self.next_while_idle(number);
        if !matches!(next, Next::Request(_)) {
            // A request may count on this thread.
            let mut queue = self.queue.lock();
            queue.awake -= 1;
            if queue.needs_another() {
                drop(queue);
                self.pushed.notify_one();
            }
        }
        self.idle.fetch_sub(1, Ordering::SeqCst);
        // Another one may count on this thread.
        self.look_if_crowded();
        next
    }

    /// [`Pool::next`] of a thread that is awake; it is no more if this is a request.
    fn next_while_idle(&self, number: u32) -> Next {
        let is_spare = number > self.threads;
        loop {
            let mut looks = 0;
            let found = crate::busy_poll::look(LOOKS, || {
                if is_spare && (self.waiting.load(Ordering::SeqCst) == 0 || self.are_enough()) {
                    return Some(Next::Rest);
                }
                if let Some(request) = self.take(number) {
                    return Some(Next::Request(request));
                }
                looks += 1;
                // A program that makes one call after another has handles let go of in between, many at a time.
                (looks >= LOOKS && message::has_released()).then_some(Next::Release)
            });
            if let Some(next) = found {
                return next;
            }
            let mut queue = self.queue.lock();
            if queue.requests.is_empty() {
                queue.awake -= 1;
                queue.asleep += 1;
                self.pushed.wait(&mut queue);
                queue.asleep -= 1;
                queue.awake += 1;
                drop(queue);
                if message::has_released() {
                    // What they keep may be in the way of what waits.
                    return Next::Release;
                }
            }
        }
    }

    /// Takes the first request that waits, if there is one, for thread `number`, which is awake and will not be idle any more.
    fn take(&self, number: u32) -> Option<Request> {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut queue = self.queue.lock();
        let request = queue.requests.pop_front()?;
        queue.begin(&request, Thread::Own(number));
        queue.awake -= 1;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.taken.fetch_add(1, Ordering::Relaxed);
        Some(request)
    }

    /// Has this spare thread rest until it is called. It does not end: the program's thread-local destructors may block, or
    /// call Lisp, and whatever starts a thread in Lisp waits for those that are ending (SBCL's `allocate-thread-memory`).
    fn rest(&self) {
        let mut queue = self.queue.lock();
        queue.resting += 1;
        while queue.called == 0 {
            self.called.wait(&mut queue);
        }
        queue.called -= 1;
        queue.resting -= 1;
    }

    /// Has the calls ended that `matches` by number and group.
    fn end_calls(&self, matches: impl Fn(u64, u64) -> bool) {
        let now = Instant::now();
        let mut watch = self.watch.lock();
        let mut queue = self.queue.lock();
        for running in queue.running.iter_mut().filter(|running| matches(running.call, running.group)) {
            if running.interruption.want(Reason::Interrupted, self.cleanup, now) {
                watch.look_at(running, now);
            }
        }
        let waiting: Vec<Request> =
            std::iter::from_fn(|| self.withdraw(&mut queue, |request| matches(request.call, request.options.group)))
                .collect();
        drop(queue);
        drop(watch);
        self.clock.arm(now);
        output::stop_waiting();
        // All of them first: what is left may block.
        let left: Vec<Left> = waiting.into_iter().filter_map(|request| request.settle(End::Interrupted)).collect();
        left.into_iter().for_each(Left::finish);
    }

    /// Notes that the interruption which was sent to end `call` was taken. Whatever else its thread is in may be interrupted
    /// from now on.
    fn interrupted(&self, call: u64) {
        let now = Instant::now();
        let mut watch = self.watch.lock();
        let mut queue = self.queue.lock();
        let thread_id = match queue.find(call) {
            Some(running) => {
                running.interruption.taken(now);
                running.thread_id
            }
            None => match queue.late.iter().position(|(late, _)| *late == call) {
                Some(place) => queue.late.swap_remove(place).1,
                None => return,
            },
        };
        let wanted = |running: &&mut Running| running.thread_id == thread_id && running.interruption.reason().is_some();
        queue.running.iter_mut().filter(wanted).for_each(|running| watch.look_at(running, now));
        self.clock.arm(now);
    }

    /// Notes that `call` begins to unwind.
    fn unwinds(&self, call: u64) {
        if let Some(running) = self.queue.lock().find(call) {
            running.interruption.unwinds(Instant::now());
        }
    }

    /// True when a call that this thread is in is to end.
    pub(super) fn is_ending(&self) -> bool {
        self.queue.lock().is_ending(LispThread::id())
    }

    /// Does what is requested on this thread, which Lisp has called Rust on.
    fn perform_here(&self, cx: &Cx, request: Request) {
        let thread = match NUMBER.get() {
            Some(number) => Thread::Own(number),
            None => Thread::Other(cx.ask_with(Entry::CurrentThread, &()).unwrap_or_else(|_| Value::nil())),
        };
        self.queue.lock().begin(&request, thread);
        self.limit(request.call, request.options.timeout);
        self.perform(cx.inside(), request, false);
    }

    /// Does what is requested, and noted as begun, on this thread: one of the pool's `own`, in no call yet, or another.
    fn perform(&self, inside: &Inside, request: Request, own: bool) {
        let Request { call, task, options } = request;
        let cx = Cx::new(*inside);
        let number = keep_task(task);
        OPTIONS.with_borrow_mut(|all| all.push(options.clone()));
        let result = cx.ask::<Option<i64>>(Entry::RunUnderConditions, |writer| {
            call.write(writer)?;
            number.write(writer)?;
            if options.has_bindings() {
                options.package.write(writer)?;
                options.handler.is_some().write(writer)?;
                options.variables.write(writer)?;
                options.values.write(writer)?;
            }
            Ok(())
        });
        drop(OPTIONS.with_borrow_mut(Vec::pop));
        let task = TASKS.with_borrow_mut(|tasks| tasks.pop().flatten());
        let end = match result {
            Ok(None) => End::Done,
            Ok(Some(number)) => Reason::of(number).map_or(End::Aborted, End::from),
            Err(Error::Unwinding) if own => End::Aborted,
            Err(Error::Unwinding) => End::Unwound,
            Err(error) => End::Failed(Box::new(error)),
        };
        self.queue.lock().end(call);
        if let Some(left) = task.and_then(|task| Request { call, task, options }.settle(end)) {
            if inside.is_unwinding() {
                // Here it could not call Lisp.
                helper_threads::run(|| left.finish());
            } else {
                left.finish();
            }
        }
    }

    /// Interrupts calls whose time has come, and sees to it that there are threads enough, for ever.
    fn look_after(&self, cx: &Cx) {
        loop {
            let result: Result<(), Error> = match self.next_duty() {
                Duty::Interrupt(thread, call, reason) => cx.ask_with(Entry::Interrupt, &(thread, call, reason as i64)),
                Duty::Start(number) => {
                    let started = cx.ask_with(Entry::StartThread, &(number,));
                    let mut watch = self.watch.lock();
                    if started.is_ok() {
                        watch.supply.arrived();
                    } else {
                        Place::give_back(number);
                        watch.supply.refused(Instant::now());
                    }
                    started
                }
            };
            if let Err(error) = result {
                helper_threads::run(move || {
                    tracing::error!("a call could not be interrupted, or a thread not started: {error}");
                });
            }
        }
    }

    fn next_duty(&self) -> Duty {
        let mut watch = self.watch.lock();
        loop {
            let now = Instant::now();
            if watch.look.is_some_and(|look| look <= now) {
                let (more, given_up) = self.look_at_threads(&mut watch, now);
                if let Some(request) = given_up {
                    parking_lot::MutexGuard::unlocked(&mut watch, || settle_elsewhere(request, End::NoThread));
                }
                if let Some(number) = more {
                    return Duty::Start(number);
                }
                continue;
            }
            let first = watch.due.peek().map(|Reverse((at, ..))| *at);
            if first.is_none_or(|first| first > now) {
                if let Some(wake) = first.into_iter().chain(watch.look).min() {
                    self.clock.arm(wake);
                }
                parking_lot::MutexGuard::unlocked(&mut watch, || self.clock.wait());
                continue;
            }
            let Some(Reverse((at, call, due))) = watch.due.pop() else { continue };
            let mut queue = self.queue.lock();
            if queue.find(call).is_some() {
                let duty = self.look_at_call(&mut watch, &mut queue, (at, call, due), now);
                drop(queue);
                if due == Due::Limit {
                    output::stop_waiting();
                }
                match duty {
                    Some(duty) => return duty,
                    None => continue,
                }
            }
            let waiting = match due {
                Due::Limit => self.withdraw(&mut queue, |request| request.call == call),
                Due::Interruption => None,
            };
            drop(queue);
            if let Some(request) = waiting {
                parking_lot::MutexGuard::unlocked(&mut watch, || settle_elsewhere(request, End::Timeout));
            }
        }
    }

    /// Looks at a running call, for what was due, and whether it is to be interrupted now.
    fn look_at_call(
        &self,
        watch: &mut Watch,
        queue: &mut Queue,
        (at, call, due): (Instant, u64, Due),
        now: Instant,
    ) -> Option<Duty> {
        let running = queue.find(call)?;
        match due {
            Due::Limit => {
                if !running.interruption.want(Reason::Timeout, self.cleanup, now) {
                    return None;
                }
            }
            // It was looked at meanwhile.
            Due::Interruption if running.look != Some(at) => return None,
            Due::Interruption => {}
        }
        running.look = None;
        let thread_id = running.thread_id;
        if queue.is_interrupting(thread_id) {
            // It is looked at again when the thread has taken that one.
            return None;
        }
        let running = queue.find(call)?;
        match running.interruption.step(now) {
            interruption::Step::Send => {
                let reason = running.interruption.reason()?;
                Some(Duty::Interrupt(running.thread.clone(), call, reason))
            }
            interruption::Step::Wait(until) => {
                watch.look_at(running, until);
                None
            }
            interruption::Step::Rest => None,
        }
    }

    /// Takes the first request that `matches` out of the queue.
    fn withdraw(&self, queue: &mut Queue, matches: impl Fn(&Request) -> bool) -> Option<Request> {
        let place = queue.requests.iter().position(matches)?;
        let request = queue.requests.remove(place)?;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Some(request)
    }

    /// True when as many threads as there are to be side by side are in Lisp.
    fn are_enough(&self) -> bool {
        Place::count_in_lisp() >= self.threads as usize
    }

    /// Looks whether requests wait because too many threads are inside Rust, and calls a spare one then. The number of one
    /// that is to be started; a request that is to be given up.
    fn look_at_threads(&self, watch: &mut Watch, now: Instant) -> (Option<u32>, Option<Request>) {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            (watch.look, watch.stuck) = (None, None);
            return (None, None);
        }
        watch.look = Some(now + CROWDED);
        if self.idle.load(Ordering::SeqCst) > 0 || self.are_enough() {
            watch.stuck = None;
            return (None, None);
        }
        let taken = self.taken.load(Ordering::Relaxed);
        let Some((_, since)) = watch.stuck.filter(|(before, _)| *before == taken) else {
            // They may have been about to take something.
            watch.stuck = Some((taken, now));
            return (None, None);
        };
        if self.queue.lock().call_spare() {
            self.called.notify_one();
            watch.stuck = None;
            return (None, None);
        }
        let spare = (self.threads + 1..=self.threads + self.spare_threads).find(|number| Place::is_free(*number));
        if let Some(number) = spare
            && watch.supply.start(1, now)
        {
            Place::take(number);
            return (Some(number), None);
        }
        let given_up = if now < since + STUCK { None } else { self.withdraw(&mut self.queue.lock(), |_| true) };
        (None, given_up)
    }
}

impl Program for Pool {
    fn serve(&self, inside: &Inside, thread: u32) -> bool {
        let cx = Cx::new(*inside);
        if thread == 0 {
            self.look_after(&cx);
            return false;
        }
        NUMBER.set(Some(thread));
        loop {
            cx.release_handles();
            if inside.is_unwinding() {
                return true;
            }
            match self.next(thread) {
                Next::Request(request) => {
                    self.perform(inside, request, true);
                    if inside.is_unwinding() {
                        return true;
                    }
                }
                Next::Release => {}
                Next::Rest => self.rest(),
            }
        }
    }

    fn call(&self, inside: &Inside, function: u64, message: &[u64], answer: &mut message::Writer) -> CallStatus {
        let cx = Cx::new(*inside);
        let work = || {
            let mut writer = Writer(answer);
            match function {
                RUN => run_task(&cx, message),
                ASK => ask(&cx, message, &mut writer),
                DEFINED => define::note_taken(Reader::new(&cx, message)),
                READ_INPUT => output::read(&|| self.is_ending())
                    .write(&mut writer)
                    .map_err(|error| Failure::of(name(function), error.into())),
                _ => define::call(&cx, function, message, &mut writer),
            }
        };
        let result = panics::caught_as(work, |text| text.unwrap_or("a panic without a message").to_owned());
        if message::has_many_released() {
            cx.release_handles();
        }
        match result {
            Ok(Ok(())) => CallStatus::Values,
            Ok(Err(failure)) => {
                *answer = message::Writer::new();
                failure.write(answer)
            }
            Err(text) => {
                *answer = message::Writer::new();
                answer.string_pair(&name(function), &text);
                CallStatus::Panicked
            }
        }
    }

    fn event(&self, event: Event<'_>) {
        match event {
            Event::Interrupted(call) => self.interrupted(call),
            Event::Unwinding(call) => self.unwinds(call),
            event => output::take(event, &|| self.is_ending()),
        }
    }
}

/// Numbers of the functions that are there from the beginning: `enum sbcl_program_function`.
const RUN: u64 = sbcl_program_function::SBCL_PROGRAM_RUN as u64;
const ASK: u64 = sbcl_program_function::SBCL_PROGRAM_ASK as u64;
const READ_INPUT: u64 = sbcl_program_function::SBCL_PROGRAM_READ_INPUT as u64;
const DEFINED: u64 = sbcl_program_function::SBCL_PROGRAM_DEFINED as u64;

/// Why a function of the program's has no value.
pub(super) enum Failure {
    /// It returned an error.
    Error(Value, String, String),
    /// Lisp is unwinding.
    Unwinding,
    /// There is no such function any more.
    Missing,
}

impl Failure {
    /// The failure of a function that returned `error`, unless Lisp is unwinding: an [`Error::Unwinding`] is one like others.
    pub(super) fn of(name: String, error: Box<dyn std::error::Error + Send + Sync>) -> Self {
        match error.downcast::<Error>() {
            Ok(error) => match *error {
                Error::Condition(condition) => Self::Error(condition.object.clone(), name, String::new()),
                other => Self::Error(Value::nil(), name, Contained::new(other).to_string()),
            },
            Err(other) => Self::Error(Value::nil(), name, Contained::new(other).to_string()),
        }
    }

    fn write(&self, answer: &mut message::Writer) -> CallStatus {
        match self {
            Self::Unwinding => return CallStatus::Unwinding,
            Self::Missing => return CallStatus::Missing,
            Self::Error(condition, name, text) if condition.is_nil() => answer.string_pair(name, text),
            Self::Error(condition, ..) => condition.put(answer),
        }
        CallStatus::Failed
    }
}

fn run_task(cx: &Cx, message: &[u64]) -> Result<(), Failure> {
    let number = Reader::new(cx, message).read::<usize>().unwrap_or(usize::MAX);
    let task = TASKS.with_borrow_mut(|tasks| tasks.get_mut(number).and_then(Option::take));
    let Some(mut task) = task else { return Ok(()) };
    task.run(cx.inside());
    TASKS.with_borrow_mut(|tasks| tasks[number] = Some(task));
    if cx.inside().is_unwinding() { Err(Failure::Unwinding) } else { Ok(()) }
}

fn ask(cx: &Cx, message: &[u64], writer: &mut Writer<'_>) -> Result<(), Failure> {
    let handler = OPTIONS.with_borrow(|all| all.iter().rev().find_map(|options| options.handler.clone()));
    let condition = Condition::read_from(&mut Reader::new(cx, message)).ok();
    match handler.zip(condition).and_then(|(handler, condition)| handler(&condition)) {
        Some(restart) => restart.write(writer).map_err(|error| Failure::of(name(ASK), error.into()))?,
        None => writer.0.nil(),
    }
    if cx.inside().is_unwinding() { Err(Failure::Unwinding) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has a call of group 0 run on this thread.
    fn begin(pool: &Pool, call: u64) {
        struct Nothing;
        impl Task for Nothing {
            fn run(&mut self, _: &Inside) {}
            fn settle(&mut self, _: End) -> Option<Rest> {
                None
            }
        }
        let request = Request { call, task: Box::new(Nothing), options: Options::none() };
        pool.queue.lock().begin(&request, Thread::Own(1));
    }

    /// The next interruption that is to be sent now: of which call.
    fn next_interruption(pool: &Pool) -> Option<u64> {
        let mut watch = pool.watch.lock();
        let now = Instant::now();
        while watch.due.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
            let Reverse(due) = watch.due.pop()?;
            let mut queue = pool.queue.lock();
            if let Some(Duty::Interrupt(_, call, _)) = pool.look_at_call(&mut watch, &mut queue, due, now) {
                return Some(call);
            }
        }
        None
    }

    #[test]
    fn a_thread_has_one_interruption_on_its_way_for_all_its_calls() {
        let pool = Pool::new(1, 0, Duration::from_secs(5));
        begin(&pool, 1);
        begin(&pool, 2);
        for _ in 0..9 {
            pool.end_calls(|_, _| true);
        }
        let first = next_interruption(&pool).expect("one is sent");
        assert_eq!(next_interruption(&pool), None);
        // Its call ends before the thread takes it, and another one begins there.
        pool.queue.lock().end(first);
        begin(&pool, 3);
        pool.end_calls(|call, _| call == 3);
        assert_eq!(next_interruption(&pool), None);
        pool.interrupted(first);
        assert!(next_interruption(&pool).is_some_and(|call| call != first));
        assert_eq!(next_interruption(&pool), None);
        assert!(pool.is_ending());
        assert!(pool.watch.lock().due.len() < 9);
    }

    #[test]
    fn time_limits_of_calls_that_are_over_do_not_pile_up() {
        let pool = Pool::default();
        let hour = Duration::from_secs(3600);
        let begin = |call| {
            begin(&pool, call);
            pool.limit(call, Some(hour));
        };
        begin(1);
        for call in 2..100_000 {
            begin(call);
            pool.queue.lock().end(call);
        }
        let watch = pool.watch.lock();
        assert!(watch.due.len() <= 2 * MAX_OVER, "{}", watch.due.len());
        assert!(watch.due.iter().any(|Reverse((_, call, _))| *call == 1));
    }
}
