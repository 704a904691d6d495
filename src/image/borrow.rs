//! Access to the octets of a Lisp vector without copying them.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use super::program::{CallContext, Followup, Task, TaskEnd, submit_and_wait};

/// A task that applies `work` to the octets and stores the result of `work`.
struct BorrowTask<'b, F, R> {
    /// Address and count of the octets, both 0 until Lisp has written them.
    location: &'b [AtomicU64; 2],
    work: Option<F>,
    result: &'b mut Option<std::thread::Result<R>>,
}

// SAFETY: the task stays on the thread that made it. The argument `pin` of `borrow_octets` keeps the task in a thread local
// and calls Lisp; on the same thread, Lisp calls a host function, which takes the task from the thread local and runs it.
unsafe impl<F, R> Send for BorrowTask<'_, F, R> {}

impl<E, F: FnOnce(&[u8]) -> R, R> Task<E> for BorrowTask<'_, F, R> {
    fn run(&mut self, _: &CallContext) {
        let Some(work) = self.work.take() else { return };
        let [address, count] = self.location.each_ref().map(|word| word.load(Ordering::Relaxed) as usize);
        // SAFETY: Lisp has pinned a vector with `count` octets at `address` until this function returns. The caller of
        // `borrow_octets` guarantees that nothing writes to them.
        let octets = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), count) };
        *self.result = Some(catch_unwind(AssertUnwindSafe(|| work(octets))));
    }

    fn settle(&mut self, _: TaskEnd<E>) -> Option<Followup> {
        None
    }
}

/// Runs `work` on the octets of a vector. `pin` makes Lisp pin the vector, write the octets' address and count to the
/// address that `pin` receives, and run the task. Returns the result of `work`, which is an error if `work` panicked, or
/// `None` if Lisp never ran the task. If `pin` fails, returns its error.
///
/// # Safety
/// Nothing may write to the octets until `work` returns. `pin` must do what is described above, and Lisp must run the task on
/// this thread while the vector is pinned.
pub(crate) unsafe fn borrow_octets<R, E: 'static>(
    work: impl FnOnce(&[u8]) -> R,
    pin: impl FnOnce(Box<dyn Task<E>>, usize) -> Result<(), E>,
) -> Result<Option<std::thread::Result<R>>, E> {
    let location = [AtomicU64::new(0), AtomicU64::new(0)];
    let mut result = None;
    let mut called = Ok(());
    let task = BorrowTask { location: &location, work: Some(work), result: &mut result };
    submit_and_wait(task, |task| called = pin(task, location.as_ptr().expose_provenance()));
    called.map(|()| result)
}
