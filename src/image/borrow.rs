//! Octets of a Lisp vector where they are.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use super::program::{End, Inside, Rest, Task};
use crate::lisp::{Cx, Error, IntoLisp, Value, call_with_task};

/// What is done with the octets, and what became of it.
struct Borrow<'b, F, R> {
    /// Their address, and how many there are, once Lisp has written it.
    place: &'b [AtomicU64; 2],
    work: Option<F>,
    result: &'b mut Option<std::thread::Result<R>>,
}

// SAFETY: it does not leave the thread that has made it: `call_with_task` keeps it in a variable of the thread's.
unsafe impl<F, R> Send for Borrow<'_, F, R> {}

impl<F: FnOnce(&[u8]) -> R, R> Task for Borrow<'_, F, R> {
    fn run(&mut self, _: &Inside) {
        let Some(work) = self.work.take() else { return };
        let [address, count] = self.place.each_ref().map(|word| word.load(Ordering::Relaxed) as usize);
        // SAFETY: Lisp has pinned a vector that has so many octets there, until this returns. That nothing writes to them
        // is what the caller of `borrow_bytes` has promised.
        let octets = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), count) };
        *self.result = Some(catch_unwind(AssertUnwindSafe(|| work(octets))));
    }

    fn settle(&mut self, _: End) -> Option<Rest> {
        None
    }
}

impl Cx {
    /// Lends `work` the octets of a vector where Lisp has them, without copying: [`copy_bytes`](Self::copy_bytes) is the safe
    /// way, at the speed of memory. The vector may be of any length; one with a fill pointer has the octets below it.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let sum: u64 = lisp.enter(|cx| {
    ///     let octets = cx.eval("(make-array 1000 :element-type '(unsigned-byte 8) :initial-element 2)")?;
    ///     // SAFETY: the vector is new, and nothing else has it.
    ///     unsafe { cx.borrow_bytes(&octets, |octets| octets.iter().map(|&octet| u64::from(octet)).sum()) }
    /// })?;
    /// assert_eq!(sum, 2000);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Safety
    /// Until `work` returns, nothing may write to the vector: neither this thread, in what `work` calls, nor any other one
    /// of Lisp's or of the program's. That the vector stays where it is, is seen to: no collection moves it meanwhile, and
    /// other threads collect as ever.
    ///
    /// # Errors
    /// A `type-error` of anything but a vector of octets (`(unsigned-byte 8)`); [`Error::Unwinding`] when Lisp unwinds in
    /// what `work` calls. An interruption waits until `work` returns.
    ///
    /// # Panics
    /// When `work` does.
    pub unsafe fn borrow_bytes<R>(&self, octets: &Value, work: impl FnOnce(&[u8]) -> R) -> Result<R, Error> {
        let place = [AtomicU64::new(0), AtomicU64::new(0)];
        let mut result = None;
        let task = Borrow { place: &place, work: Some(work), result: &mut result };
        call_with_task(self, task, |writer| {
            octets.write(writer)?;
            place.as_ptr().expose_provenance().write(writer)
        })?;
        match result {
            Some(Ok(result)) => Ok(result),
            Some(Err(panic)) => resume_unwind(panic),
            // Lisp has not called back, and says nothing of it.
            None => Err(Error::Aborted),
        }
    }
}
