//! Threads that run slow work in place of threads that must not block: the embedding program's wakers and destructors,
//! cancellations that end processes, the rendering of answers, and the deletion of large files.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::os::panics;

type Work = Box<dyn FnOnce() + Send>;

/// The maximum number of helper threads. While all helper threads are blocked, new work waits.
const MAX_THREADS: usize = 64;
/// The time after which a thread without work ends, except the thread that [`start`] starts.
const IDLE_TIME: Duration = Duration::from_secs(1);

struct Helpers {
    work: VecDeque<Work>,
    threads: usize,
    idle: usize,
}

#[cfg(feature = "mcp")]
impl Helpers {
    /// Returns true if no work is queued or running.
    fn is_idle(&self) -> bool {
        self.idle == self.threads && self.work.is_empty()
    }
}

static HELPERS: Mutex<Helpers> = Mutex::new(Helpers { work: VecDeque::new(), threads: 0, idle: 0 });
static WORK_PUSHED: Condvar = Condvar::new();
static THREAD_IDLE: Condvar = Condvar::new();

/// Starts a helper thread that never ends. It runs the work for which no other thread can be started, for example because
/// evaluated code has used up the threads of the process. Later calls do nothing.
pub(crate) fn start() -> io::Result<()> {
    static STARTED: Mutex<bool> = Mutex::new(false);
    let mut started = STARTED.lock();
    if !*started {
        HELPERS.lock().threads += 1;
        spawn(Duration::MAX)?;
        *started = true;
    }
    Ok(())
}

/// Runs `work` on another thread and returns at once. A panic in `work` is ignored.
pub(crate) fn run(work: impl FnOnce() + Send + 'static) {
    run_with(Box::new(work), || spawn(IDLE_TIME));
}

/// Runs `work` on another thread. Calls `start_thread` unless an idle thread can run it.
fn run_with(work: Work, start_thread: impl FnOnce() -> io::Result<()>) {
    let mut helpers = HELPERS.lock();
    helpers.work.push_back(work);
    if helpers.idle >= helpers.work.len() {
        WORK_PUSHED.notify_one();
        return;
    }
    if helpers.threads >= MAX_THREADS {
        return;
    }
    helpers.threads += 1;
    drop(helpers);
    // If no thread can be started, the work stays queued for the threads that exist.
    _ = start_thread();
}

/// Starts a thread, which is counted already. The thread ends after `idle_time` without work.
fn spawn(idle_time: Duration) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("sbcl-helper".to_owned());
    let spawned = thread.spawn(move || run_queued_work(idle_time)).map(drop);
    if spawned.is_err() {
        HELPERS.lock().threads -= 1;
        THREAD_IDLE.notify_all();
    }
    spawned
}

/// Waits until no work is queued or running, or until `deadline`.
#[cfg(feature = "mcp")]
pub(crate) fn wait_until_idle(deadline: std::time::Instant) {
    let mut helpers = HELPERS.lock();
    while !helpers.is_idle() && !THREAD_IDLE.wait_until(&mut helpers, deadline).timed_out() {}
}

/// Returns true if no work is queued or running.
#[cfg(feature = "mcp")]
pub(crate) fn is_idle() -> bool {
    HELPERS.lock().is_idle()
}

fn run_queued_work(idle_time: Duration) {
    let mut helpers = HELPERS.lock();
    loop {
        if let Some(work) = helpers.work.pop_front() {
            drop(helpers);
            panics::catch(work);
            helpers = HELPERS.lock();
            continue;
        }
        helpers.idle += 1;
        THREAD_IDLE.notify_all();
        let waited = WORK_PUSHED.wait_for(&mut helpers, idle_time);
        helpers.idle -= 1;
        if waited.timed_out() && helpers.work.is_empty() {
            helpers.threads -= 1;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[cfg(feature = "mcp")]
    #[test]
    fn wait_until_idle_waits_for_running_work() {
        let (done, is_done) = mpsc::channel();
        run(move || {
            std::thread::sleep(Duration::from_millis(50));
            done.send(()).unwrap();
        });
        wait_until_idle(std::time::Instant::now() + Duration::from_secs(20));
        assert_eq!(is_done.try_recv(), Ok(()));
    }

    #[test]
    fn work_is_run_although_no_thread_can_be_started() {
        start().unwrap();
        let (done, is_done) = mpsc::channel();
        for number in 0..8 {
            let done = done.clone();
            run_with(Box::new(move || done.send(number).unwrap()), || {
                HELPERS.lock().threads -= 1;
                Err(io::ErrorKind::WouldBlock.into())
            });
        }
        drop(done);
        for _ in 0..8 {
            is_done.recv_timeout(Duration::from_secs(20)).unwrap();
        }
    }

    #[test]
    fn work_that_blocks_or_panics_does_not_delay_later_work() {
        let (done, is_done) = mpsc::channel();
        let gates: Vec<_> = (0..8)
            .map(|number| {
                let (open, gate) = mpsc::channel::<()>();
                let done = done.clone();
                run(|| panic!("on purpose"));
                run(move || {
                    let _ = gate.recv();
                    done.send(number).unwrap();
                });
                open
            })
            .collect();
        run(move || done.send(99).unwrap());
        assert_eq!(is_done.recv_timeout(Duration::from_secs(20)), Ok(99));
        drop(gates);
        let mut rest: Vec<i32> = is_done.iter().collect();
        rest.sort_unstable();
        assert_eq!(rest, (0..8).collect::<Vec<_>>());
    }
}
