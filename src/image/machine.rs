//! The host's processor-specific code. Each kind of processor has a section, and all sections define the same names. The
//! Lisp side's processor-specific code is in `lisp/core/machine.lisp`, and `ffi/shim.c` contains the code for SBCL's C
//! runtime.
#![allow(unsafe_code)]

pub(super) use processor::{FloatControl, HEAP_PAGE_BYTES};

#[cfg(target_arch = "x86_64")]
mod processor {
    use std::arch::asm;

    /// Size of a page of SBCL's heap, and of a guard page of a stack, in bytes.
    pub(in crate::image) const HEAP_PAGE_BYTES: usize = 32 * 1024;

    /// The floating-point modes and exception flags of a thread: the register MXCSR.
    #[derive(Debug, Clone, Copy)]
    pub(in crate::image) struct FloatControl(u32);

    impl FloatControl {
        /// The initial modes of a process: all exceptions masked, rounding to nearest.
        pub(in crate::image) const DEFAULT: Self = Self(0x1f80);

        /// Returns this thread's modes.
        pub(in crate::image) fn current() -> Self {
            let mut modes = 0;
            // SAFETY: STMXCSR writes 32 bits, to a variable of that size.
            unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut modes, options(nostack, preserves_flags)) };
            Self(modes)
        }

        /// Makes these modes apply in this thread.
        pub(in crate::image) fn apply(self) {
            // SAFETY: LDMXCSR reads 32 bits, from a variable of that size. The value sets no reserved bits, since it is the
            // default or comes from STMXCSR. Lisp's modes apply only while Lisp runs; Rust code runs with the default modes,
            // which it assumes.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const self.0, options(nostack, preserves_flags)) };
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod processor {
    use std::arch::asm;

    /// Size of a page of SBCL's heap, and of a guard page of a stack, in bytes.
    pub(in crate::image) const HEAP_PAGE_BYTES: usize = 64 * 1024;

    /// The floating-point modes and exception flags of a thread: the registers FPCR and FPSR. On most processors exceptions
    /// cannot trap, so the bits that enable traps stay 0.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in crate::image) struct FloatControl {
        modes: u64,
        flags: u64,
    }

    impl FloatControl {
        /// The initial modes of a process: no traps, rounding to nearest.
        pub(in crate::image) const DEFAULT: Self = Self { modes: 0, flags: 0 };

        /// Returns this thread's modes.
        pub(in crate::image) fn current() -> Self {
            let (modes, flags);
            // SAFETY: the instructions only read the two registers.
            unsafe {
                asm!("mrs {}, fpcr", "mrs {}, fpsr", out(reg) modes, out(reg) flags, options(nostack, preserves_flags));
            }
            Self { modes, flags }
        }

        /// Makes these modes apply in this thread.
        pub(in crate::image) fn apply(self) {
            // Writing the registers takes longer than reading them, and Lisp's modes are often the default.
            if self == Self::current() {
                return;
            }
            let Self { modes, flags } = self;
            // SAFETY: the value is the default or comes from the registers. Lisp's modes apply only while Lisp runs; Rust code
            // runs with the default modes, which it assumes.
            unsafe { asm!("msr fpcr, {}", "msr fpsr, {}", in(reg) modes, in(reg) flags, options(nostack)) };
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!(
    "only x86-64 and AArch64 processors are supported; for another kind, add a section to src/image/machine.rs"
);
