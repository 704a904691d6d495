//! Interleavings of the event loop and the requests in flight, tried by the scheduler of `shuttle`.
//!
//! The modules of `src/rpc` are compiled unchanged. The blocking primitives below them, locks and the wait for descriptors,
//! are replaced by shuttle's. A lost wake-up then blocks a thread forever, which shuttle reports as a deadlock.

// The unit tests of the modules run in the library, not here.
#![cfg(not(test))]

// Makes `parking_lot` in the modules name the replacement below.
extern crate self as parking_lot;

#[path = "parking_lot.rs"]
mod locks;

pub use locks::{Condvar, Mutex, MutexGuard};

#[allow(dead_code, reason = "of the modules, what the scenarios need is used")]
#[path = "../../../src/os"]
mod os {
    // No scenario waits on a count, where a thread would block without shuttle's knowledge.
    pub(crate) mod event_count;
    pub(crate) mod panics;
    pub(crate) mod poll_set;

    pub(crate) mod helper_threads {
        /// Runs `work` at once: no scenario has work that blocks.
        pub(crate) fn run(work: impl FnOnce() + Send + 'static) {
            work();
        }
    }

    pub(crate) mod busy_poll {
        /// Waits until one of `fds` is ready, or with a timeout returns after one attempt. There are no spurious wake-ups
        /// that could hide a lost one.
        pub(crate) fn wait_for_descriptors(
            fds: &mut [rustix::event::PollFd<'_>],
            timeout: Option<std::time::Duration>,
        ) -> std::io::Result<usize> {
            loop {
                let ready = rustix::event::poll(fds, Some(&rustix::event::Timespec::default()))?;
                shuttle::thread::yield_now();
                if ready > 0 {
                    return Ok(ready);
                }
                if timeout.is_some() {
                    return Ok(ready);
                }
            }
        }
    }
}

#[allow(dead_code, reason = "see above")]
#[path = "../../../src/rpc"]
mod rpc {
    pub(crate) mod descriptors;
    pub(crate) mod event_loop;
    pub(crate) mod frame;
    pub(crate) mod framing;
    pub(crate) mod id_scanner;
    pub(crate) mod inflight;
    pub(crate) mod output;
    pub(crate) mod waker;
    mod write_buffer;

    pub(crate) use write_buffer::WriteBuffer;

    pub(crate) mod recorder {
        //! A recorder that records nothing.

        #[derive(Debug, Clone, Copy)]
        pub(crate) enum Recorder {}

        #[derive(Debug, Clone, Copy)]
        pub(crate) enum Side {
            Client,
            Server,
        }

        impl Recorder {
            pub(crate) fn record_line(&self, _from: Side, _line: &[u8]) {}

            pub(crate) fn record_skipped(&self, _from: Side, _note: &str) {}
        }
    }

    pub(crate) mod signals {
        //! A signal source that never delivers a signal.

        use std::io::{self, PipeReader, PipeWriter};
        use std::os::fd::{AsFd, BorrowedFd};

        #[derive(Debug)]
        pub(crate) struct Signals(PipeReader, PipeWriter);

        impl Signals {
            pub(crate) fn in_lisp_process() -> io::Result<Self> {
                io::pipe().map(|(reader, writer)| Self(reader, writer))
            }

            pub(crate) fn take(&mut self) -> Option<i32> {
                None
            }
        }

        impl AsFd for Signals {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.0.as_fd()
            }
        }
    }
}

pub mod scenarios;
