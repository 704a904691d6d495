//! The host's side of `struct sbcl_host`: the functions that Lisp threads call to pull jobs and push events.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::bindings::{SBCL_HOST_CONTRACT, SBCL_JOB_PROGRAM, SBCL_JOB_SIGNALLED, sbcl_host, sbcl_job, sbcl_library};
use super::float_traps::MaskedTrapsGuard;
use super::process::{exit_if_forked, is_forked};
use super::program::NoContextGuard;
use super::protocol::{Event, Host, Job, Lane, Text};
use super::signals;
use crate::config::ImageConfig;
use crate::os::panics;

static NEXT_THREAD_NUMBER: AtomicU64 = AtomicU64::new(1);

static HOST: OnceCell<Arc<dyn Host>> = OnceCell::new();

thread_local! {
    /// The job that this thread works on. Lisp reads the job's texts after `next_job` has returned.
    static CURRENT_JOB: RefCell<Option<Job>> = const { RefCell::new(None) };
    /// The host's number for this thread.
    static THREAD_NUMBER: u64 = NEXT_THREAD_NUMBER.fetch_add(1, Ordering::Relaxed);
    /// The lane that this thread pulls jobs for, and the number of the thread's last job (0 before its first job).
    static LANE_AND_JOB_ID: Cell<Option<(Lane, u64)>> = const { Cell::new(None) };
}

/// Returns the lane that this thread serves, and the number of the job that it works on or worked on last (0 before its
/// first job). Returns `None` on threads that pull no jobs.
pub(crate) fn current_lane_and_job() -> Option<(Lane, u64)> {
    LANE_AND_JOB_ID.get()
}

/// Pause before the next attempt to get a job after the host panicked, so that the thread does not spin.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Lisp's reason for refusing to start.
static START_REFUSAL: Mutex<Option<String>> = Mutex::new(None);

/// Returns the reason why `sbcl_host_start` returned 0.
pub(super) fn start_refusal() -> String {
    START_REFUSAL.lock().take().unwrap_or_else(|| "Lisp gave no reason".to_owned())
}

/// Installs `host`, and returns the function table through which Lisp calls it. `seed` is the seed of Lisp's
/// `*random-state*`. `library` is the interface of the embedding program; null if there is no program.
///
/// # Panics
/// Panics if called twice, because a process has only one image.
pub(super) fn install(
    host: Arc<dyn Host>,
    seed: u64,
    config: &ImageConfig,
    library: *mut sbcl_library,
) -> &'static sbcl_host {
    assert!(HOST.set(host).is_ok(), "the host is installed only once");
    let scratch = config.scratch.as_deref().and_then(Path::to_str).unwrap_or_default();
    let scratch: &[u32] = scratch.chars().map(u32::from).collect::<Vec<_>>().leak();
    Box::leak(Box::new(sbcl_host {
        contract: SBCL_HOST_CONTRACT,
        size: u32::try_from(size_of::<sbcl_host>()).expect("the structure's size fits 32 bits"),
        seed,
        user_init: u64::from(config.user_init),
        next_job: Some(next_job),
        event: Some(event),
        scratch: scratch.as_ptr(),
        scratch_length: scratch.len() as u64,
        library,
    }))
}

/// Implements `sbcl_host.next_job`.
unsafe extern "C" fn next_job(lane: u32, out: *mut sbcl_job) -> i32 {
    let _in_host = (MaskedTrapsGuard::new(), signals::enter_host());
    exit_if_forked();
    let (Some(host), Some(lane)) = (HOST.get(), Lane::from_code(lane)) else {
        return 0;
    };
    if lane == Lane::Signals {
        signals::receive_forwarded_signals();
        return 0;
    }
    LANE_AND_JOB_ID.set(Some((lane, LANE_AND_JOB_ID.get().map_or(0, |(_, job)| job))));
    // The first use registers the destructor, for which the C library takes the dynamic loader's lock. Evaluated code that
    // loads a library may hold the lock for long, so the lock must not be needed once a job has arrived.
    CURRENT_JOB.with(|_| ());
    // SAFETY: by the contract Lisp passes a pinned, initialised struct sbcl_job.
    let held = Some(unsafe { (*out).id }).filter(|job| *job != 0);
    let _outside_calls = NoContextGuard::new();
    let job = loop {
        match panics::catch(|| host.next_job(lane, THREAD_NUMBER.with(|number| *number), held)) {
            Some(Some(job)) => break job,
            Some(None) => return 0,
            // If this thread ended, later requests on its lane might never be answered.
            None => {
                panics::catch(|| {
                    tracing::error!(?lane, "choosing the next job panicked; this Lisp thread tries again");
                });
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    };
    // SAFETY: by the contract Lisp passes a pinned, writable struct sbcl_job.
    unsafe { out.write(job.to_raw()) };
    LANE_AND_JOB_ID.set(Some((lane, job.id)));
    // Lisp has pointers to the texts; moving the job does not move their buffers.
    CURRENT_JOB.set(Some(job));
    1
}

/// Implements `sbcl_host.event`.
unsafe extern "C" fn event(job: u64, kind: u32, number: i64, text: *const u32, length: u64) -> i32 {
    let _in_host = (MaskedTrapsGuard::new(), signals::enter_host());
    let text = match usize::try_from(length) {
        Ok(length) if length > 0 && !text.is_null() => {
            // SAFETY: by the contract Lisp passes `length` characters of a pinned string. The characters are aligned as
            // `u32`, and neither moved nor freed during the call. Another Lisp thread may write to the string, so the
            // characters are read as atomics.
            unsafe { std::slice::from_raw_parts(text.cast::<AtomicU32>(), length) }
        }
        _ => &[],
    };
    let Some(event) = Event::from_raw(kind, number, Text(text)) else {
        return 0;
    };
    if is_forked() {
        if let Event::Done { .. } = event {
            exit_if_forked();
        }
        return 0;
    }
    if let (0, Event::Refused(reason)) = (job, event) {
        *START_REFUSAL.lock() = Some(reason.to_owned());
        return 0;
    }
    if job == SBCL_JOB_PROGRAM {
        super::program::pass_event(event);
        return 0;
    }
    let Some(host) = HOST.get() else { return 0 };
    let _outside_calls = NoContextGuard::new();
    if let Event::ThreadEnded = event {
        panics::catch(|| host.thread_ended(THREAD_NUMBER.with(|number| *number)));
        return 0;
    }
    let (job, signalled) = (job & !SBCL_JOB_SIGNALLED, job & SBCL_JOB_SIGNALLED != 0);
    panics::catch(|| host.event(job, signalled, event)).map_or_else(
        || {
            panics::catch(|| {
                tracing::error!(job, "handling an event of this job panicked; the job's result may be incomplete");
            });
            0
        },
        i32::from,
    )
}
