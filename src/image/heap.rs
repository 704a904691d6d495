//! Heap usage, read without Lisp's help, because Lisp may be busy filling the heap.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

/// Variables of SBCL's runtime that describe the heap. SBCL writes the variables without synchronisation, so a value
/// that was read may be stale, which is acceptable.
pub(super) struct HeapVariables {
    /// `sbcl_host_heap_use` of `ffi/shim.c`: returns the bytes of the pages that contain objects.
    pub(super) use_of_pages: unsafe extern "C" fn() -> usize,
    /// `bytes_allocated`: the bytes of all objects, including garbage.
    pub(super) allocated: &'static AtomicUsize,
    /// `dynamic_space_size`: the size of the heap in bytes.
    pub(super) size: &'static AtomicUsize,
    /// `auto_gc_trigger`: the bytes of all objects at which the next collection starts.
    pub(super) trigger: &'static AtomicUsize,
    /// `bytes_consed_between_gcs`: the bytes by which `auto_gc_trigger` exceeds the bytes of all objects after the last
    /// collection.
    pub(super) bytes_between_collections: &'static AtomicUsize,
    /// `gc_active_p`: nonzero during a collection.
    pub(super) collecting: &'static AtomicU8,
}

static HEAP_VARIABLES: OnceCell<HeapVariables> = OnceCell::new();

/// The last result of [`HeapVariables::kept`], and the trigger from which the result was computed.
static KEPT: Mutex<Kept> = Mutex::new(Kept { trigger: 0, bytes: 0 });

struct Kept {
    trigger: usize,
    bytes: usize,
}

impl HeapVariables {
    /// Returns the bytes of the pages in use, including garbage. Takes some 30 µs for each GiB in use.
    fn used(&self) -> usize {
        // SAFETY: the function only reads the runtime's table of pages, which always exists where pages are in use.
        unsafe { (self.use_of_pages)() }
    }

    /// Returns the bytes of the pages that were in use after the last collection. Counts pages only at the first call after
    /// a collection.
    fn kept(&self) -> usize {
        // SBCL stores the trigger at the end of a collection, which leaves fewer pages in use. Lisp stores the trigger last
        // (`adapt-nursery` in lisp/core/heap.lisp).
        let trigger = self.trigger.load(Ordering::Acquire);
        let mut kept = KEPT.lock();
        if kept.trigger != trigger {
            let objects = trigger.saturating_sub(self.bytes_between_collections.load(Ordering::Relaxed));
            let used = self.used();
            let allocated = self.allocated.load(Ordering::Relaxed).max(1);
            // Few pages have been used since the collection. The share of the kept pages is about that of the kept objects.
            let share = objects.min(allocated) * 1024 / allocated;
            *kept = Kept { trigger, bytes: used * share / 1024 };
        }
        kept.bytes
    }
}

/// Sets the variables that [`usage`] and [`is_collecting`] read.
pub(super) fn set_variables(variables: HeapVariables) {
    _ = HEAP_VARIABLES.set(variables);
}

/// The heap's usage, in bytes of whole pages, because the heap is full when no page is free.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeapUsage {
    /// Bytes in use, including garbage.
    pub(crate) used: usize,
    /// Bytes that were in use after the last collection, hardly any of them garbage.
    pub(crate) kept: usize,
    /// Size of the heap.
    pub(crate) size: usize,
}

/// Returns the heap's usage; `None` before boot.
pub(crate) fn usage() -> Option<HeapUsage> {
    let variables = HEAP_VARIABLES.get()?;
    let kept = variables.kept();
    let used = variables.used();
    Some(HeapUsage { used, kept: kept.min(used), size: variables.size.load(Ordering::Relaxed) })
}

/// Returns the bytes that were in use after the last collection, and the size of the heap; `None` before boot. Faster than
/// [`usage`].
pub(crate) fn kept_and_size() -> Option<(usize, usize)> {
    let variables = HEAP_VARIABLES.get()?;
    Some((variables.kept(), variables.size.load(Ordering::Relaxed)))
}

/// Returns true during a collection, while Lisp's threads are stopped.
pub(crate) fn is_collecting() -> bool {
    HEAP_VARIABLES.get().is_some_and(|variables| variables.collecting.load(Ordering::Relaxed) != 0)
}

/// Exit status of a process in which SBCL could not continue.
pub(crate) const EXIT_IMAGE_LOST: i32 = 86;
/// Exit status of a process in which SBCL could not continue because the heap was full.
pub(crate) const EXIT_HEAP_EXHAUSTED: i32 = 87;

/// SBCL's lossage handler, called when SBCL cannot continue and has written the reason to stderr.
pub(super) unsafe extern "C" fn on_lossage() {
    // A collection copies the live objects, each into contiguous free memory, so it can fail when half the heap is in use.
    let tenths = if is_collecting() { 5 } else { 9 };
    let is_full = HEAP_VARIABLES
        .get()
        .is_some_and(|variables| variables.used() > variables.size.load(Ordering::Relaxed) / 10 * tenths);
    super::signals::exit_now(if is_full { EXIT_HEAP_EXHAUSTED } else { EXIT_IMAGE_LOST });
}
