//! Threads that run the embedding program's code, such as wakers and destructors, for threads that must not block on it.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::os::panics;

type Work = Box<dyn FnOnce() + Send>;

/// The largest number of threads. While all of them are blocked, new work waits.
const MOST: usize = 64;
/// Time after which a thread without work ends.
const IDLE: Duration = Duration::from_secs(1);

struct Waiting {
    work: VecDeque<Work>,
    threads: usize,
    idle: usize,
}

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { work: VecDeque::new(), threads: 0, idle: 0 });
static PUSHED: Condvar = Condvar::new();

/// Runs `work` on another thread and returns at once. A panic in it is ignored.
pub(crate) fn run(work: impl FnOnce() + Send + 'static) {
    let mut waiting = WAITING.lock();
    waiting.work.push_back(Box::new(work));
    if waiting.idle >= waiting.work.len() {
        PUSHED.notify_one();
        return;
    }
    if waiting.threads >= MOST {
        return;
    }
    waiting.threads += 1;
    drop(waiting);
    if std::thread::Builder::new().name("sbcl-helper".to_owned()).spawn(serve).is_err() {
        // What was pushed waits for a thread that there is, or for the next attempt.
        WAITING.lock().threads -= 1;
    }
}

fn serve() {
    let mut waiting = WAITING.lock();
    loop {
        if let Some(work) = waiting.work.pop_front() {
            drop(waiting);
            panics::caught(work);
            waiting = WAITING.lock();
            continue;
        }
        waiting.idle += 1;
        let waited = PUSHED.wait_for(&mut waiting, IDLE);
        waiting.idle -= 1;
        if waited.timed_out() && waiting.work.is_empty() {
            waiting.threads -= 1;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn work_that_blocks_or_panics_does_not_hold_up_what_comes_after() {
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
