//! Platforms that the library can be built for.

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
    /// Returns the platform of this machine.
    #[must_use]
    pub fn host() -> Self {
        Self { arch: std::env::consts::ARCH.to_owned(), os: std::env::consts::OS.to_owned() }
    }

    /// Returns true for the platform of this machine, the only one for which SBCL can be built.
    #[must_use]
    pub fn is_host(&self) -> bool {
        *self == Self::host()
    }

    /// Returns true for macOS, where file names and tools differ.
    pub(crate) fn is_macos(&self) -> bool {
        self.os == "macos"
    }

    /// Returns the shared library's file name on this platform.
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
