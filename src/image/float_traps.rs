//! Floating-point modes: with the traps that Lisp enables, the host's code would fault.
#![allow(unsafe_code)]

/// A guard: while it lives, all floating-point traps are masked in this thread, as Rust code expects. On processors
/// other than x86-64 Lisp masks them before it calls the host.
pub(super) struct MaskedTraps {
    #[cfg(target_arch = "x86_64")]
    previous: u32,
}

/// The floating-point modes of a thread that runs Lisp.
#[derive(Debug, Clone, Copy)]
pub(super) struct Modes {
    #[cfg(target_arch = "x86_64")]
    lisp: u32,
}

/// A guard: while it lives, Lisp's floating-point modes apply in this thread, because the host has called Lisp back.
pub(super) struct LispModes {
    #[cfg(target_arch = "x86_64")]
    host: u32,
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;

    /// The initial MXCSR of a process: all exceptions masked, rounding to nearest.
    const DEFAULT: u32 = 0x1f80;

    impl super::MaskedTraps {
        pub(in crate::image) fn new() -> Self {
            let mut previous = 0;
            // SAFETY: STMXCSR writes 32 bits, to a variable of that size.
            unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut previous, options(nostack, preserves_flags)) };
            load(DEFAULT);
            Self { previous }
        }

        /// Returns Lisp's modes, which the guard restores when it is dropped.
        pub(in crate::image) fn modes(&self) -> super::Modes {
            super::Modes { lisp: self.previous }
        }
    }

    impl super::Modes {
        /// Makes these modes apply again until the returned guard is dropped.
        pub(in crate::image) fn restore(self) -> super::LispModes {
            load(self.lisp);
            super::LispModes { host: DEFAULT }
        }
    }

    impl Drop for super::LispModes {
        fn drop(&mut self) {
            load(self.host);
        }
    }

    impl Drop for super::MaskedTraps {
        /// Restores the previous modes, so that the host's exception flags do not reach Lisp.
        fn drop(&mut self) {
            load(self.previous);
        }
    }

    fn load(modes: u32) {
        // SAFETY: LDMXCSR reads 32 bits, from a variable of that size. The value sets no reserved bits, since it is the
        // default or comes from STMXCSR. Lisp's modes apply only while Lisp runs; Rust code runs with the default modes,
        // which it assumes.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const modes, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl MaskedTraps {
    pub(super) fn new() -> Self {
        Self {}
    }

    pub(super) fn modes(&self) -> Modes {
        Modes {}
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Modes {
    pub(super) fn restore(self) -> LispModes {
        LispModes {}
    }
}
