//! Wakes a thread that waits for descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::descriptors::nonblocking;

/// A pipe to oneself.
#[derive(Debug)]
pub(crate) struct Waker {
    reader: OwnedFd,
    writer: OwnedFd,
    /// A byte is on its way.
    pending: AtomicBool,
    /// The end waits for answers.
    ends: AtomicBool,
}

impl Waker {
    /// # Errors
    /// When there are no descriptors left.
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let (reader, writer) = (nonblocking(reader.into())?, nonblocking(writer.into())?);
        Ok(Self { reader, writer, pending: AtomicBool::new(false), ends: AtomicBool::new(false) })
    }

    /// Makes the descriptor readable until [`Self::clear`].
    pub(crate) fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // Full is awake; closed under us is noticed by who waits.
            let _ = rustix::io::write(&self.writer, &[0]);
        }
    }

    /// Has [`Self::answered`] wake from now on.
    pub(crate) fn wake_for_answers(&self) {
        self.ends.store(true, Ordering::Release);
    }

    /// Wakes the thread if the end waits for answers.
    pub(crate) fn answered(&self) {
        if self.ends.load(Ordering::Acquire) {
            self.wake();
        }
    }

    /// Forgets the calls so far. False when the pipe is gone: evaluated code may close any descriptor.
    pub(crate) fn clear(&self) -> bool {
        self.clear_by(|| self.read())
    }

    fn clear_by(&self, read: impl FnOnce() -> rustix::io::Result<usize>) -> bool {
        let read = read();
        // Not before: it would take the byte of a call that comes in between, and nobody would write another one. What
        // such a call is about has been said by now.
        self.pending.swap(false, Ordering::AcqRel);
        matches!(read, Ok(1..) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR))
    }

    fn read(&self) -> rustix::io::Result<usize> {
        rustix::io::read(&self.reader, &mut [0; 16])
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::os::poll_set::PollSet;

    fn is_readable(waker: &Waker) -> bool {
        let mut set = PollSet::new();
        set.read((), waker);
        set.wait(Some(Duration::ZERO)).unwrap().has(())
    }

    #[test]
    fn a_call_while_others_are_forgotten_does_not_make_it_deaf() {
        let waker = Waker::new().unwrap();
        for early in [true, false] {
            waker.wake();
            assert!(is_readable(&waker));
            assert!(waker.clear_by(|| {
                if early {
                    waker.wake();
                }
                let read = waker.read();
                waker.wake();
                read
            }));
            waker.wake();
            assert!(is_readable(&waker), "early: {early}");
            assert!(waker.clear());
            assert!(!is_readable(&waker));
        }
    }
}
