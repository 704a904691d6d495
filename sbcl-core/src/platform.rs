//! Which machine the library is for.

use std::fmt;

/// A processor and an operating system, as Rust names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    /// The processor, as in `CARGO_CFG_TARGET_ARCH`: `x86_64`, `aarch64`, …
    pub arch: String,
    /// The operating system, as in `CARGO_CFG_TARGET_OS`: `linux`, `macos`, …
    pub os: String,
}

impl Platform {
    /// The machine that this code runs on.
    #[must_use]
    pub fn host() -> Self {
        Self { arch: std::env::consts::ARCH.to_owned(), os: std::env::consts::OS.to_owned() }
    }

    /// Whether this is the machine that this code runs on. SBCL is only built for that one.
    #[must_use]
    pub fn is_host(&self) -> bool {
        *self == Self::host()
    }

    /// Whether this is macOS, where files and tools differ.
    pub(crate) fn is_macos(&self) -> bool {
        self.os == "macos"
    }

    /// What the shared library is called here.
    #[must_use]
    pub fn library_name(&self) -> &'static str {
        if self.is_macos() { "libsbcl.dylib" } else { "libsbcl.so" }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}-{}", self.arch, self.os)
    }
}
