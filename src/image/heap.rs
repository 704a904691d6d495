//! How full the Lisp heap is, read without Lisp's help: it may be too busy filling it.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use once_cell::sync::OnceCell;

/// Variables of SBCL's runtime, which writes them without regard to us; a stale value is as good.
pub(super) struct Variables {
    /// `bytes_allocated`.
    pub(super) allocated: &'static AtomicUsize,
    /// `dynamic_space_size`.
    pub(super) size: &'static AtomicUsize,
    /// `auto_gc_trigger`: how full the heap is when garbage is collected the next time.
    pub(super) trigger: &'static AtomicUsize,
    /// `bytes_consed_between_gcs`: how much that is above what the last collection left.
    pub(super) step: &'static AtomicUsize,
    /// `gc_active_p`.
    pub(super) collecting: &'static AtomicU8,
}

static VARIABLES: OnceCell<Variables> = OnceCell::new();

/// Has the heap watched from here on.
pub(super) fn watch(variables: Variables) {
    _ = VARIABLES.set(variables);
}

/// How full the heap is, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    /// What is in use, garbage included.
    pub(crate) used: usize,
    /// What the last collection left: hardly any garbage.
    pub(crate) kept: usize,
    /// What there is.
    pub(crate) size: usize,
}

/// How full the heap is. `None` before boot.
pub(crate) fn usage() -> Option<Usage> {
    let variables = VARIABLES.get()?;
    let used = variables.allocated.load(Ordering::Relaxed);
    let trigger = variables.trigger.load(Ordering::Relaxed);
    let kept = trigger.saturating_sub(variables.step.load(Ordering::Relaxed)).min(used);
    Some(Usage { used, kept, size: variables.size.load(Ordering::Relaxed) })
}

/// True while garbage is being collected, and Lisp's threads stand still.
pub(crate) fn is_collecting() -> bool {
    VARIABLES.get().is_some_and(|variables| variables.collecting.load(Ordering::Relaxed) != 0)
}

/// The status of a process that SBCL gave up.
pub(crate) const LOST: i32 = 86;
/// The status of one whose heap was full then.
pub(crate) const LOST_TO_HEAP: i32 = 87;

/// What SBCL calls, having said why on stderr, when it cannot go on.
pub(super) unsafe extern "C" fn lost() {
    // A collection needs room for what it copies, in pieces as large as the objects.
    let parts = if is_collecting() { 5 } else { 9 };
    let is_full = usage().is_some_and(|usage| usage.used > usage.size / 10 * parts);
    super::signals::exit_now(if is_full { LOST_TO_HEAP } else { LOST });
}
