//! Lines of JSON-RPC over descriptors: what server and supervisor share, and what serving takes.

pub(crate) mod descriptors;
pub(crate) mod driver;
pub(crate) mod frame;
pub(crate) mod framing;
pub(crate) mod inflight;
pub(crate) mod output;
pub(crate) mod poll_set;
pub(crate) mod recorder;
pub(crate) mod route;
pub(crate) mod signals;
pub(crate) mod stream;
pub(crate) mod waker;
mod write_buffer;

pub(crate) use write_buffer::WriteBuffer;

use std::time::Duration;

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

/// Waits until one of `fds` is ready, at most for `timeout`; returns how many are. After a signal none is. Only a
/// [`PollSet`](poll_set::PollSet) waits so.
fn wait(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> std::io::Result<usize> {
    let mut look = |timeout: Option<&Timespec>| match poll(fds, timeout) {
        Err(Errno::INTR) => Ok(0),
        result => Ok(result?),
    };
    let ready = crate::busy_poll::look(1, || match look(Some(&Timespec::default())) {
        Ok(0) => None,
        result => Some(result),
    });
    // Past the longest time that the system knows is never.
    let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
    ready.unwrap_or_else(|| look(timeout.as_ref()))
}
