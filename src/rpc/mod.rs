//! Lines of JSON-RPC over descriptors: what server and supervisor share, and what serving takes.

pub(crate) mod descriptors;
pub(crate) mod driver;
pub(crate) mod framing;
pub(crate) mod inflight;
pub(crate) mod output;
pub(crate) mod signals;
pub(crate) mod waker;
mod write_buffer;

pub(crate) use write_buffer::WriteBuffer;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

/// How long a thread that has nothing to do looks for input before it sleeps: the time in which a program that makes
/// one request after another comes back (10 to 30 µs here), where waking a processor takes 50.
const BUSY: Duration = Duration::from_micros(50);

/// Waits until one of `fds` is ready, at most for `timeout`; returns how many are. A signal is no reason to return an
/// error: then none is ready.
///
/// This is the one busy-poll: the thread stays awake for the first 50 µs.
pub(crate) fn wait(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> std::io::Result<usize> {
    let begin = Instant::now();
    while begin.elapsed() < BUSY {
        match poll(fds, Some(&Timespec::default())) {
            // Other processes may want this processor: the one that is waited for, perhaps.
            Ok(0) => std::thread::yield_now(),
            Err(Errno::INTR) => return Ok(0),
            result => return Ok(result?),
        }
    }
    // Past the longest time that the system knows is never.
    let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
    match poll(fds, timeout.as_ref()) {
        Err(Errno::INTR) => Ok(0),
        result => Ok(result?),
    }
}
