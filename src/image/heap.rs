//! How full the Lisp heap is, read without Lisp's help: it may be too busy filling it.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};

use once_cell::sync::OnceCell;

/// The variables of SBCL's runtime.
struct Variables {
    allocated: &'static AtomicUsize,
    size: &'static AtomicUsize,
}

static VARIABLES: OnceCell<Variables> = OnceCell::new();

/// Remembers where the runtime keeps `bytes_allocated` and `dynamic_space_size`.
///
/// # Safety
/// Both must point to aligned words that live as long as the process.
pub(super) unsafe fn watch(allocated: *mut usize, size: *mut usize) {
    // SAFETY: the caller's. The runtime writes the words without regard to us; a stale value is as good.
    let variables =
        unsafe { Variables { allocated: AtomicUsize::from_ptr(allocated), size: AtomicUsize::from_ptr(size) } };
    _ = VARIABLES.set(variables);
}

/// Bytes in use, garbage included, and bytes there are. `None` before boot.
pub(crate) fn usage() -> Option<(usize, usize)> {
    let variables = VARIABLES.get()?;
    Some((variables.allocated.load(Ordering::Relaxed), variables.size.load(Ordering::Relaxed)))
}
