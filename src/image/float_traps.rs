//! Switches between the floating-point modes of Lisp and of the host. With the traps that Lisp enables, the host's code
//! would fault.

use super::machine::FloatControl;

/// A guard: while it lives, all floating-point traps are masked in this thread, as Rust code expects.
pub(super) struct MaskedTrapsGuard {
    previous: FloatControl,
}

/// The floating-point modes of a thread that runs Lisp.
#[derive(Debug, Clone, Copy)]
pub(super) struct FloatModes(FloatControl);

/// A guard: while it lives, Lisp's floating-point modes apply in this thread, because the host has called back into Lisp.
pub(super) struct LispModesGuard(());

impl MaskedTrapsGuard {
    pub(super) fn new() -> Self {
        let previous = FloatControl::current();
        FloatControl::DEFAULT.apply();
        Self { previous }
    }

    /// Returns Lisp's modes, which the guard restores when it is dropped.
    pub(super) fn lisp_modes(&self) -> FloatModes {
        FloatModes(self.previous)
    }
}

impl FloatModes {
    /// Makes these modes apply again until the returned guard is dropped.
    pub(super) fn restore(self) -> LispModesGuard {
        self.0.apply();
        LispModesGuard(())
    }
}

impl Drop for LispModesGuard {
    fn drop(&mut self) {
        FloatControl::DEFAULT.apply();
    }
}

impl Drop for MaskedTrapsGuard {
    /// Restores the previous modes, so that the host's exception flags do not reach Lisp.
    fn drop(&mut self) {
        self.previous.apply();
    }
}
