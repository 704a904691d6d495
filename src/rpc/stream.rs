//! One stream served by a thread of its own, which has nothing else to do.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::descriptors::nonblocking_reader;
use super::driver::Service;
use super::framing::{LineReader, Read};
use super::output::Output;
use super::waker::Waker;
use crate::os::panics;
use crate::os::poll_set::PollSet;

/// The descriptors that the thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watched {
    Waker,
    Input,
    Output,
}

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
        let mut set = PollSet::new();
        set.read(Watched::Waker, waker);
        if reads {
            set.read(Watched::Input, &input);
        }
        if output.backlog() > 0 {
            set.write(Watched::Output, &**output);
        }
        let ready = set.wait(due.map(|due| due.saturating_duration_since(now)))?;
        if ready.has(Watched::Waker) && !waker.clear() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if ready.has(Watched::Output) {
            output.flush();
        }
        if ready.has(Watched::Input) && input.read()? == Read::End {
            return Ok(());
        }
    }
}
