//! The service of one client on a stream, on the calling thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::descriptors::nonblocking_reader;
use super::event_loop::Service;
use super::framing::{LineReader, ReadStatus};
use super::output::Output;
use super::waker::Waker;
use crate::os::panics;
use crate::os::poll_set::PollSet;

/// The descriptors that the thread polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamSource {
    Waker,
    Input,
    Output,
}

/// Passes the lines of `input` to `service` and flushes `output`, which must have been created with `waker`. Returns
/// when either side closes the stream, or when `is_over` returns true; `is_over` is called in every iteration.
pub(crate) fn serve(
    input: OwnedFd,
    output: &Arc<Output>,
    waker: &Waker,
    service: &dyn Service,
    is_over: impl Fn() -> bool,
) -> io::Result<()> {
    let mut input = LineReader::new(nonblocking_reader(input)?);
    loop {
        let may_read = loop {
            if !output.accepts_requests() || !service.accepts_lines() {
                break false;
            }
            let Some(line) = input.next_line() else { break true };
            // Unwinding drops the call's `Responder`, which answers the client.
            if panics::catch(|| service.handle_line(line)).is_none() {
                tracing::error!(
                    "a panic ended the handling of a request: please report this bug, with the message of the panic"
                );
            }
        };
        let now = Instant::now();
        let next_timer = panics::catch(|| service.run_timers(now)).flatten();
        if is_over() || output.is_broken() {
            return Ok(());
        }
        let mut set = PollSet::new();
        set.add_read(StreamSource::Waker, waker);
        if may_read {
            set.add_read(StreamSource::Input, &input);
        }
        if output.backlog() > 0 {
            set.add_write(StreamSource::Output, &**output);
        }
        let ready = set.wait(next_timer.map(|time| time.saturating_duration_since(now)))?;
        if ready.has(StreamSource::Waker) && !waker.clear() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if ready.has(StreamSource::Output) {
            output.flush();
        }
        if ready.has(StreamSource::Input) && input.read()? == ReadStatus::End {
            return Ok(());
        }
    }
}
