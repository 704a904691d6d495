//! One stream served by a thread of its own, which has nothing else to do.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::descriptors::nonblocking_reader;
use super::driver::{Service, push};
use super::framing::{LineReader, Read};
use super::output::Output;
use super::waker::Waker;
use crate::panics;

/// Hands the lines of `input` to `service` and flushes `output`, which was made with `waker`, until either side of the
/// stream is closed, or `is_over` says so, which is asked whenever something happens.
pub(crate) fn serve(
    input: OwnedFd,
    output: &Arc<Output>,
    waker: &Waker,
    service: &dyn Service,
    is_over: impl Fn() -> bool,
) -> io::Result<()> {
    let mut input = LineReader::new(nonblocking_reader(input)?);
    loop {
        let reads = output.takes_more();
        while reads && let Some(line) = input.next_line() {
            // What a call owes its client is settled by its responder.
            if panics::caught(|| service.line(line)).is_none() {
                tracing::error!("a request panicked");
            }
        }
        let now = Instant::now();
        let due = panics::caught(|| service.due(now)).flatten();
        if is_over() || output.is_broken() {
            return Ok(());
        }
        let mut fds = vec![PollFd::new(waker, PollFlags::IN)];
        let input_at = reads.then(|| push(&mut fds, PollFd::new(&input, PollFlags::IN)));
        let unsent = output.backlog() > 0;
        let output_at = unsent.then(|| push(&mut fds, PollFd::new(&**output, PollFlags::OUT)));
        super::wait(&mut fds, due.map(|due| due.saturating_duration_since(now)))?;
        let is_ready = |at: usize| !fds[at].revents().is_empty();
        let (woken, readable) = (is_ready(0), input_at.is_some_and(is_ready));
        let writable = output_at.is_some_and(is_ready);
        drop(fds);
        if woken && !waker.clear() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if writable {
            output.flush();
        }
        if readable && input.read()? == Read::End {
            return Ok(());
        }
    }
}
