//! Octets of a Lisp vector where they are.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use super::program::{End, Inside, Rest, Task, scoped};

/// What is done with the octets, and what became of it.
struct Borrow<'b, F, R> {
    /// Their address, and how many there are, once Lisp has written it.
    place: &'b [AtomicU64; 2],
    work: Option<F>,
    result: &'b mut Option<std::thread::Result<R>>,
}

// SAFETY: it does not leave the thread that has made it: the thread that `pin`s keeps it in a variable of its own.
unsafe impl<F, R> Send for Borrow<'_, F, R> {}

impl<E, F: FnOnce(&[u8]) -> R, R> Task<E> for Borrow<'_, F, R> {
    fn run(&mut self, _: &Inside) {
        let Some(work) = self.work.take() else { return };
        let [address, count] = self.place.each_ref().map(|word| word.load(Ordering::Relaxed) as usize);
        // SAFETY: Lisp has pinned a vector that has so many octets there, until this returns. That nothing writes to them
        // is what the caller of `borrow_octets` has promised.
        let octets = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), count) };
        *self.result = Some(catch_unwind(AssertUnwindSafe(|| work(octets))));
    }

    fn settle(&mut self, _: End<E>) -> Option<Rest> {
        None
    }
}

/// Runs `work` on the octets of a vector. `pin` has Lisp run the task while the vector is pinned, once it has written the
/// octets' address and count at the address that `pin` is given. Returns `None` if Lisp never ran the task.
///
/// # Safety
/// Nothing may write to the octets until `work` returns.
pub(crate) unsafe fn borrow_octets<R, E: 'static>(
    work: impl FnOnce(&[u8]) -> R,
    pin: impl FnOnce(Box<dyn Task<E>>, usize) -> Result<(), E>,
) -> Result<Option<std::thread::Result<R>>, E> {
    let place = [AtomicU64::new(0), AtomicU64::new(0)];
    let mut result = None;
    let mut called = Ok(());
    let task = Borrow { place: &place, work: Some(work), result: &mut result };
    scoped(task, |task| called = pin(task, place.as_ptr().expose_provenance()));
    called.map(|()| result)
}
