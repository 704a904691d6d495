//! Platforms that the library can be built for.

use std::ffi::OsStr;
use std::fmt;
use std::process::Command;

/// The script that runs a command in an environment in which programs for aarch64 Linux can be started.
const EMULATE: &str = include_str!("emulate.sh");

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

    /// Returns the platform of a Rust target such as `aarch64-unknown-linux-gnu`, or `None` if the library cannot be built
    /// for this operating system or C library.
    #[must_use]
    pub fn from_target(target: &str) -> Option<Self> {
        let mut parts = target.splitn(3, '-');
        let (arch, _vendor, system) = (parts.next()?, parts.next()?, parts.next()?);
        let os = match system {
            "linux-gnu" => "linux",
            "darwin" => "macos",
            _ => return None,
        };
        Some(Self { arch: arch.to_owned(), os: os.to_owned() })
    }

    /// Returns true for the platform of this machine.
    #[must_use]
    pub fn is_host(&self) -> bool {
        *self == Self::host()
    }

    /// Returns true if SBCL for this platform can be built on a machine of the platform `host`. Each platform can build for
    /// itself, and any Linux can build for aarch64 Linux with the help of QEMU.
    #[must_use]
    pub fn is_built_on(&self, host: &Self) -> bool {
        self == host || (self.arch == "aarch64" && self.os == "linux" && host.os == "linux")
    }

    /// Returns a command that runs `program` in an environment in which this platform's programs can be started, with QEMU
    /// if necessary. `program` itself may belong to this platform or to the machine's platform. The emulation reads the
    /// environment variable [`SYSROOT`](crate::settings::SYSROOT) when the command starts.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        if self.is_host() {
            return Command::new(program);
        }
        let mut command = Command::new("sh");
        command.args(["-c", EMULATE, "emulate.sh"]).arg(program);
        command
    }

    /// Returns the name of a cross-development tool, such as `aarch64-linux-gnu-gcc` for `gcc`.
    pub(crate) fn tool(&self, name: &str) -> String {
        format!("{}-linux-gnu-{name}", self.arch)
    }

    /// Returns the processor's name in SBCL's build.
    pub(crate) fn sbcl_arch(&self) -> String {
        if self.arch == "aarch64" { "arm64".to_owned() } else { self.arch.replace('_', "-") }
    }

    /// Returns the name of a stage in the cache. The names of stages for other machines differ, because the cache keeps only
    /// the latest stages of each name.
    pub(crate) fn stage(&self, name: &str) -> String {
        if self.is_host() { name.to_owned() } else { format!("{self}-{name}") }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn platform(arch: &str, os: &str) -> Platform {
        Platform { arch: arch.to_owned(), os: os.to_owned() }
    }

    #[test]
    fn rust_targets_name_platforms() {
        assert_eq!(Platform::from_target("aarch64-unknown-linux-gnu"), Some(platform("aarch64", "linux")));
        assert_eq!(Platform::from_target("x86_64-unknown-linux-gnu"), Some(platform("x86_64", "linux")));
        assert_eq!(Platform::from_target("aarch64-apple-darwin"), Some(platform("aarch64", "macos")));
        for target in ["x86_64-unknown-linux-musl", "x86_64-pc-windows-msvc", "aarch64-linux-gnu", "arm64", ""] {
            assert_eq!(Platform::from_target(target), None, "{target}");
        }
    }

    #[test]
    fn only_aarch64_linux_is_built_on_another_platform() {
        let (x86, arm) = (platform("x86_64", "linux"), platform("aarch64", "linux"));
        assert!(x86.is_built_on(&x86) && arm.is_built_on(&arm) && arm.is_built_on(&x86));
        assert!(!x86.is_built_on(&arm));
        assert!(!arm.is_built_on(&platform("aarch64", "macos")));
        assert!(!platform("aarch64", "macos").is_built_on(&x86));
    }

    #[test]
    fn programs_of_this_machine_run_without_emulation() {
        let command = Platform::host().command("/x/sbcl");
        assert_eq!(command.get_program(), "/x/sbcl");
        assert_eq!(command.get_args().count(), 0);
    }

    #[test]
    fn programs_of_another_machine_run_by_the_emulation_script() {
        let command = platform("pdp10", "linux").command("/x/sbcl");
        assert_eq!(command.get_program(), "sh");
        let arguments: Vec<_> = command.get_args().collect();
        assert_eq!(arguments, ["-c", EMULATE, "emulate.sh", "/x/sbcl"]);
    }

    #[test]
    fn stages_of_other_machines_have_other_names() {
        assert_eq!(Platform::host().stage("sbcl"), "sbcl");
        // Pruning the stages `sbcl-…` must not remove this one.
        assert_eq!(platform("pdp10", "linux").stage("sbcl"), "pdp10-linux-sbcl");
    }

    #[test]
    fn tools_and_sbcl_have_their_own_names_of_the_processor() {
        let arm = platform("aarch64", "linux");
        assert_eq!((arm.tool("gcc"), arm.sbcl_arch()), ("aarch64-linux-gnu-gcc".to_owned(), "arm64".to_owned()));
        assert_eq!(platform("x86_64", "linux").sbcl_arch(), "x86-64");
    }
}
