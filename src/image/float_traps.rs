//! Switches between the floating-point modes of Lisp and of the host. With the traps that Lisp enables, the host's code
//! would fault.
#![allow(unsafe_code)]

/// A guard: while it lives, all floating-point traps are masked in this thread, as Rust code expects. On processors
/// other than x86-64 Lisp masks them before it calls the host.
pub(super) struct MaskedTrapsGuard {
    #[cfg(target_arch = "x86_64")]
    previous: u32,
}

/// The floating-point modes of a thread that runs Lisp.
#[derive(Debug, Clone, Copy)]
pub(super) struct FloatModes {
    #[cfg(target_arch = "x86_64")]
    mxcsr: u32,
}

/// A guard: while it lives, Lisp's floating-point modes apply in this thread, because the host has called back into Lisp.
pub(super) struct LispModesGuard {
    #[cfg(target_arch = "x86_64")]
    host: u32,
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;

    /// The initial MXCSR of a process: all exceptions masked, rounding to nearest.
    const DEFAULT_MXCSR: u32 = 0x1f80;

    impl super::MaskedTrapsGuard {
        pub(in crate::image) fn new() -> Self {
            let mut previous = 0;
            // SAFETY: STMXCSR writes 32 bits, to a variable of that size.
            unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut previous, options(nostack, preserves_flags)) };
            load_mxcsr(DEFAULT_MXCSR);
            Self { previous }
        }

        /// Returns Lisp's modes, which the guard restores when it is dropped.
        pub(in crate::image) fn lisp_modes(&self) -> super::FloatModes {
            super::FloatModes { mxcsr: self.previous }
        }
    }

    impl super::FloatModes {
        /// Makes these modes apply again until the returned guard is dropped.
        pub(in crate::image) fn restore(self) -> super::LispModesGuard {
            load_mxcsr(self.mxcsr);
            super::LispModesGuard { host: DEFAULT_MXCSR }
        }
    }

    impl Drop for super::LispModesGuard {
        fn drop(&mut self) {
            load_mxcsr(self.host);
        }
    }

    impl Drop for super::MaskedTrapsGuard {
        /// Restores the previous modes, so that the host's exception flags do not reach Lisp.
        fn drop(&mut self) {
            load_mxcsr(self.previous);
        }
    }

    fn load_mxcsr(modes: u32) {
        // SAFETY: LDMXCSR reads 32 bits, from a variable of that size. The value sets no reserved bits, since it is the
        // default or comes from STMXCSR. Lisp's modes apply only while Lisp runs; Rust code runs with the default modes,
        // which it assumes.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const modes, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl MaskedTrapsGuard {
    pub(super) fn new() -> Self {
        Self {}
    }

    pub(super) fn lisp_modes(&self) -> FloatModes {
        FloatModes {}
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl FloatModes {
    pub(super) fn restore(self) -> LispModesGuard {
        LispModesGuard {}
    }
}
