//! The recipe that turns a pinned SBCL into a shared library and a saved core.
//!
//! ```no_run
//! # fn main() -> Result<(), sbcl_core::Error> {
//! let root = std::path::Path::new(".");
//! let built = sbcl_core::Recipe::in_checkout(root).build()?;
//! println!("{} {}", built.library.display(), built.core.display());
//! # Ok(())
//! # }
//! ```
//!
//! # Stages
//!
//! Each stage is a directory of the cache, named by a hash of all its inputs, and published by a rename when it is
//! complete. A lock per directory lets concurrent builds do the work only once.
//!
//! | stage | build time | contents | rebuilt when |
//! |---|---|---|---|
//! | `sbcl-<key>` | minutes | SBCL itself, its contribs, its C objects | the pin, the source, the build options, the compiler or the platform change |
//! | `library-<key>` | a second | `libsbcl.so` with the C shim linked in | `sbcl-<key>`, the shim or one of its headers changes |
//! | `core-<key>` | seconds | `sbcl.core` with the Lisp side loaded; the compiled Lisp side alone (`sbcl-host.fasl`) | `sbcl-<key>`, a file of the Lisp side or `sbcl_host.h` changes |
//!
//! The names of stages for another machine begin with its platform: `aarch64-linux-sbcl-<key>`.
//!
//! # Other machines
//!
//! SBCL's build runs the new SBCL, so a machine builds for its own platform. On Linux, it also builds for aarch64 Linux
//! (`--target aarch64-unknown-linux-gnu`): the bootstrapping Lisp and a cross compiler run on the machine itself, and the
//! new SBCL in QEMU's user mode. Unless the machine already starts aarch64 programs, the script `emulate.sh` tells the
//! kernel to start QEMU for them, only in the build's own namespaces.
//!
//! # Environment variables
//!
//! | variable | meaning |
//! |---|---|
//! | `SBCL_MCP_PREBUILT` | the absolute path of a directory with a prebuilt `libsbcl.so` (`libsbcl.dylib`) and, if the core is needed, `sbcl.core`: nothing is built |
//! | `SBCL_MCP_SOURCE` | the absolute path of SBCL's source: the pinned archive, or a directory. For a directory, only the version can be checked; its builds are cached separately |
//! | `SBCL_MCP_NEXT` | the absolute path of a directory with the source of an SBCL of any version, which is built in place of the pinned SBCL, in the cache's subdirectory `next` |
//! | `SBCL_MCP_BOOTSTRAP` | the command that starts the bootstrapping Lisp (default `sbcl`), split at spaces |
//! | `CC` | the C compiler (default `cc`) |
//! | `CC_aarch64_unknown_linux_gnu` | the C compiler for aarch64 Linux on machines of other platforms (default `aarch64-linux-gnu-gcc`) |
//! | `SBCL_MCP_SYSROOT` | the directory with an aarch64 Linux system, whose C library programs in QEMU use (default `/usr/aarch64-linux-gnu`) |
//! | `XDG_CACHE_HOME` | the location of the cache: `$XDG_CACHE_HOME/sbcl-mcp` (default `~/.cache/sbcl-mcp`); a relative path is ignored |
//!
//! An empty environment variable counts as unset. Without `HOME` and `XDG_CACHE_HOME` the cache is in the build's own
//! directory.
//!
//! # In the build script
//!
//! The main crate's `build.rs` runs the recipe again when one of [`Recipe::inputs`] or of [`settings::VARIABLES`] has
//! changed, or when a file that it embedded is no longer in the cache. The main crate's manifest declares `links = "sbcl"`,
//! so the build script of a direct dependant receives paths in `DEP_SBCL_…`, from which the crate `sbcl-build` makes an
//! application's own core. If `DOCS_RS` is set, `build.rs` does not run the recipe, so it needs neither network nor SBCL.
//! `cargo run -p sbcl-core` does the same work beforehand, with progress on standard error.
//!
//! # Where the source comes from
//!
//! The recipe looks for the source in this order: [`SBCL_MCP_SOURCE`](settings::SOURCE), the cache, upstream's git
//! repository, this repository's mirror, and Debian's pool through the mirrors in apt's configuration. Every source is
//! compared with the [`pin`] before it is used; of a directory, only the version is compared. The recipe does not look for
//! a source if [`SBCL_MCP_NEXT`](settings::NEXT) names one, and does not compare this source with the pin.
#![forbid(unsafe_code)]

mod cache;
mod core;
mod error;
mod files;
mod key;
mod library;
pub mod pin;
mod platform;
mod process;
mod progress;
mod recipe;
pub mod records;
mod sbcl;
#[cfg(test)]
mod scratch;
pub mod settings;
mod source;
mod toolchain;

pub use error::{Attempt, Error};
pub use platform::Platform;
pub use progress::Progress;
pub use recipe::{BuildOutput, Recipe};
pub use sbcl::BareSbcl;
pub use settings::Settings;
