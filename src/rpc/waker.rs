//! The wake-up descriptor: any thread can wake the thread that polls.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::descriptors::set_nonblocking;

/// The wake-up descriptor: a pipe from the process to itself.
#[derive(Debug)]
pub(crate) struct Waker {
    reader: OwnedFd,
    writer: OwnedFd,
    /// True while a byte is in the pipe.
    is_pending: AtomicBool,
    /// True once the shutdown waits for pending answers, so that each answer must wake the thread.
    wakes_on_answers: AtomicBool,
}

impl Waker {
    /// Creates the pipe.
    ///
    /// # Errors
    /// Returns an error if no descriptors are left.
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let (reader, writer) = (set_nonblocking(reader.into())?, set_nonblocking(writer.into())?);
        Ok(Self { reader, writer, is_pending: AtomicBool::new(false), wakes_on_answers: AtomicBool::new(false) })
    }

    /// Makes the descriptor readable until [`Self::clear`].
    pub(crate) fn wake(&self) {
        if !self.is_pending.swap(true, Ordering::AcqRel) {
            // Errors are ignored: a full pipe is readable already, and if evaluated code has closed the pipe, `clear`
            // reports the loss to the polling thread.
            let _ = rustix::io::write(&self.writer, &[0]);
        }
    }

    /// Makes every later [`Self::notify_answered`] wake the thread.
    pub(crate) fn wake_for_answers(&self) {
        self.wakes_on_answers.store(true, Ordering::Release);
    }

    /// Wakes the thread if the shutdown waits for answers.
    pub(crate) fn notify_answered(&self) {
        if self.wakes_on_answers.load(Ordering::Acquire) {
            self.wake();
        }
    }

    /// Clears all wake-ups so far. Returns false if the pipe is gone: evaluated code may close any descriptor.
    pub(crate) fn clear(&self) -> bool {
        self.clear_by(|| self.read())
    }

    fn clear_by(&self, read: impl FnOnce() -> rustix::io::Result<usize>) -> bool {
        let read = read();
        // The flag is cleared after the read. Otherwise, a concurrent `wake` could set the flag again and write the byte
        // that the read consumes: no later `wake` would write another byte. A `wake` between the read and this line
        // writes nothing, but the caller looks for work after `clear`.
        self.is_pending.swap(false, Ordering::AcqRel);
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
        set.add_read((), waker);
        set.wait(Some(Duration::ZERO)).unwrap().has(())
    }

    #[test]
    fn a_wake_up_during_clear_is_not_lost() {
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
