//! The functions that Lisp calls.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::bindings::{SBCL_HOST_CONTRACT, SBCL_JOB_PROGRAM, SBCL_JOB_SIGNALLED, sbcl_host, sbcl_job, sbcl_library};
use super::float_traps::Masked;
use super::process::is_forked;
use super::protocol::{Event, Host, Job, Lane, Text};
use super::signals;
use crate::config::ImageConfig;
use crate::os::panics;

static NEXT_THREAD: AtomicU64 = AtomicU64::new(1);

static HOST: OnceCell<Arc<dyn Host>> = OnceCell::new();

thread_local! {
    /// The job that this thread works on: Lisp reads its texts after `next_job` has returned.
    static CURRENT: RefCell<Option<Job>> = const { RefCell::new(None) };
    /// The number of this thread.
    static THREAD: u64 = NEXT_THREAD.fetch_add(1, Ordering::Relaxed);
    /// The lane that this thread pulls jobs for, and the number of the last one; 0 for none.
    static PULLED: Cell<Option<(Lane, u64)>> = const { Cell::new(None) };
}

/// Returns the lane that this thread pulls jobs for, or is about to, and the number of the job that it works on; 0 before
/// its first one. `None` on other threads.
pub(crate) fn current_job() -> Option<(Lane, u64)> {
    PULLED.get()
}

/// How long a thread waits that found the host in confusion, lest it spin.
const PAUSE: Duration = Duration::from_millis(10);

/// Why Lisp says that it cannot start.
static REFUSAL: Mutex<Option<String>> = Mutex::new(None);

/// Why `sbcl_host_start` returned 0.
pub(super) fn refusal() -> String {
    REFUSAL.lock().take().unwrap_or_else(|| "it does not say why".to_owned())
}

/// Makes `host` the one that Lisp calls and returns the table of functions for it.
///
/// # Panics
/// When called twice: there is one image a process.
pub(super) fn install(
    host: Arc<dyn Host>,
    seed: u64,
    config: &ImageConfig,
    library: *mut sbcl_library,
) -> &'static sbcl_host {
    assert!(HOST.set(host).is_ok(), "the host is installed once");
    let scratch = config.scratch.as_deref().and_then(Path::to_str).unwrap_or_default();
    let scratch: &[u32] = scratch.chars().map(u32::from).collect::<Vec<_>>().leak();
    Box::leak(Box::new(sbcl_host {
        contract: SBCL_HOST_CONTRACT,
        size: u32::try_from(size_of::<sbcl_host>()).expect("a small structure"),
        seed,
        user_init: u64::from(config.user_init),
        next_job: Some(next_job),
        event: Some(event),
        scratch: scratch.as_ptr(),
        scratch_length: scratch.len() as u64,
        library,
    }))
}

/// `sbcl_host.next_job`.
unsafe extern "C" fn next_job(lane: u32, out: *mut sbcl_job) -> i32 {
    let _in_host = (Masked::new(), signals::enter_host());
    if is_forked() {
        leave_forked();
    }
    let (Some(host), Some(lane)) = (HOST.get(), Lane::from_code(lane)) else {
        return 0;
    };
    if lane == Lane::Signals {
        signals::take_forwarded();
        return 0;
    }
    PULLED.set(Some((lane, PULLED.get().map_or(0, |(_, job)| job))));
    // SAFETY: the contract has Lisp pass a pinned, initialised struct sbcl_job.
    let held = Some(unsafe { (*out).id }).filter(|job| *job != 0);
    let job = loop {
        match panics::caught(|| host.next_job(lane, THREAD.with(|number| *number), held)) {
            Some(Some(job)) => break job,
            Some(None) => return 0,
            // A lane that ended would leave all that comes after without an answer.
            None => {
                panics::caught(|| {
                    tracing::error!(?lane, "looking for the next job panicked; this thread of Lisp's looks again");
                });
                std::thread::sleep(PAUSE);
            }
        }
    };
    // SAFETY: the contract has Lisp pass a pinned, writable struct sbcl_job.
    unsafe { out.write(job.to_raw()) };
    PULLED.set(Some((lane, job.id)));
    // The texts' buffers do not move with the job.
    CURRENT.set(Some(job));
    1
}

/// `sbcl_host.event`.
unsafe extern "C" fn event(job: u64, kind: u32, number: i64, text: *const u32, length: u64) -> i32 {
    let _in_host = (Masked::new(), signals::enter_host());
    let text = match usize::try_from(length) {
        Ok(length) if length > 0 && !text.is_null() => {
            // SAFETY: the contract has Lisp pass `length` characters in a pinned string, aligned as `u32`, which nothing
            // moves or frees during the call. Another Lisp thread may write to it, hence atomics: each character that
            // is read was there at some time.
            unsafe { std::slice::from_raw_parts(text.cast::<AtomicU32>(), length) }
        }
        _ => &[],
    };
    let Some(event) = Event::from_raw(kind, number, Text(text)) else {
        return 0;
    };
    if is_forked() {
        return if matches!(event, Event::Done { .. }) { leave_forked() } else { 0 };
    }
    if let (0, Event::Refused(reason)) = (job, event) {
        *REFUSAL.lock() = Some(reason.to_owned());
        return 0;
    }
    if job == SBCL_JOB_PROGRAM {
        super::program::event(event);
        return 0;
    }
    let Some(host) = HOST.get() else { return 0 };
    if let Event::ThreadEnded = event {
        panics::caught(|| host.thread_ended(THREAD.with(|number| *number)));
        return 0;
    }
    let (job, signalled) = (job & !SBCL_JOB_SIGNALLED, job & SBCL_JOB_SIGNALLED != 0);
    panics::caught(|| host.event(job, signalled, event)).map_or_else(
        || {
            panics::caught(|| tracing::error!(job, "taking an event panicked"));
            0
        },
        i32::from,
    )
}

/// Ends a copy of this process that C code made, without its other threads, which may have held any lock: neither the job
/// in which it was made nor the next one is its business.
fn leave_forked() -> ! {
    signals::exit_now(0)
}
