//! Lisp's float modes: its traps would be faults in the host's code.
#![allow(unsafe_code)]

/// While it lives, this thread computes with floats as Rust expects: all traps are masked. On other processors than
/// x86-64 Lisp masks them for the host.
pub(super) struct Masked {
    #[cfg(target_arch = "x86_64")]
    before: u32,
}

/// The float modes of a thread that runs Lisp.
#[derive(Debug, Clone, Copy)]
pub(super) struct Modes {
    #[cfg(target_arch = "x86_64")]
    lisp: u32,
}

/// While it lives, this thread, which has called Lisp back, computes with floats as Lisp expects.
pub(super) struct Restored {
    #[cfg(target_arch = "x86_64")]
    host: u32,
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;

    /// MXCSR as a process begins with it: all exceptions masked, rounding to nearest.
    const DEFAULT: u32 = 0x1f80;

    impl super::Masked {
        pub(in crate::image) fn new() -> Self {
            let mut before = 0;
            // SAFETY: STMXCSR writes 32 bits, to a variable of that size.
            unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack, preserves_flags)) };
            load(DEFAULT);
            Self { before }
        }

        /// What was there before.
        pub(in crate::image) fn modes(&self) -> super::Modes {
            super::Modes { lisp: self.before }
        }
    }

    impl super::Modes {
        /// Puts them in force again.
        pub(in crate::image) fn restore(self) -> super::Restored {
            load(self.lisp);
            super::Restored { host: DEFAULT }
        }
    }

    impl Drop for super::Restored {
        fn drop(&mut self) {
            load(self.host);
        }
    }

    impl Drop for super::Masked {
        /// Puts back what was there, so that exceptions of the host's leave no trace.
        fn drop(&mut self) {
            load(self.before);
        }
    }

    fn load(modes: u32) {
        // SAFETY: LDMXCSR reads 32 bits, from a variable of that size, without reserved bits: it is the default or what
        // STMXCSR gave. The modes that Rust code assumes are in force while any runs; the others are Lisp's own.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const modes, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Masked {
    pub(super) fn new() -> Self {
        Self {}
    }

    pub(super) fn modes(&self) -> Modes {
        Modes {}
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Modes {
    pub(super) fn restore(self) -> Restored {
        Restored {}
    }
}
