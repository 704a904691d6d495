//! For build scripts: compiles an application's Lisp into the core that its program contains, so that `cargo build`
//! makes one file with the application in it, natively compiled and loaded.
//!
//! ```toml
//! [dependencies]
//! # Without the feature `core`: the program's own core replaces the plain one.
//! sbcl-mcp = { version = "0.1", default-features = false }
//!
//! [build-dependencies]
//! sbcl-build = "0.1"
//! ```
//!
//! ```no_run
//! // build.rs
//! fn main() -> Result<(), sbcl_build::Error> {
//!     sbcl_build::core().system("my-app", "lisp/").build()
//! }
//! ```
//!
//! `Lisp::builder().boot()` then starts with the system `my-app` loaded. The repository's `examples/bundled` is a
//! complete program.
//!
//! # Compiler diagnostics
//!
//! Each error and warning in the application's Lisp is an error of the build, and each style warning is a warning of
//! cargo, in the form `file:line:column: type: text`. Warnings in libraries, which [`Core::search`] finds, are only
//! warnings.
//!
//! # Without building
//!
//! If [`SBCL_MCP_PREBUILT`](sbcl_core::settings::PREBUILT) is set, nothing is compiled. This environment variable
//! names a directory with `libsbcl.so` and, for a package `my-app`, the file `my-app.core`, which a build without the
//! environment variable leaves in its `OUT_DIR`. On docs.rs, [`Core::build`] does nothing.
//!
//! Otherwise a build has the requirements of `sbcl-mcp`, and needs no network once SBCL is in the cache.
#![forbid(unsafe_code)]

mod compile;
mod diagnostics;
mod embed;
mod error;

use std::path::{Path, PathBuf};

use sbcl_core::{BareSbcl, Platform, Progress, settings};

use crate::compile::Application;
pub use crate::embed::{EmbeddedFiles, embed};
pub use crate::error::Error;

/// Returns the description of a core, to which systems and directories of Lisp files can be added.
pub fn core() -> Core {
    Core::default()
}

/// The description of a core: the plain core and, on top of it, systems, then directories of Lisp files.
#[derive(Debug, Clone, Default)]
#[must_use = "nothing is built before build() is called"]
pub struct Core {
    application: Application,
}

impl Core {
    /// Adds the ASDF system `name`, to be compiled and loaded. Its `.asd` file is in `directory` or below. Like all
    /// directories here, `directory` is relative to the package's root.
    pub fn system(mut self, name: impl Into<String>, directory: impl Into<PathBuf>) -> Self {
        self.application.systems.push((name.into(), directory.into()));
        self
    }

    /// Adds the `.lisp` files in `directory`, but not in its subdirectories, to be compiled and loaded in the order of
    /// their names.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.application.directories.push(directory.into());
        self
    }

    /// Makes ASDF search `directory` and its subdirectories for libraries, which are systems that other systems depend
    /// on. ASDF searches only the directories of this [`Core`], so libraries that happen to be installed on a machine do
    /// not get into a program.
    pub fn search(mut self, directory: impl Into<PathBuf>) -> Self {
        self.application.search.push(directory.into());
        self
    }

    /// Builds the core and makes cargo link it into this package's programs.
    ///
    /// # Errors
    /// Returns an [`Error`] if the package does not depend on `sbcl-mcp`, its dependency has the feature `core`, the
    /// prebuilt core is missing, the Lisp code has errors, or SBCL or a file cannot be used. Errors in the Lisp code
    /// are passed to cargo first, line by line.
    ///
    /// # Panics
    /// Panics if cargo's environment variables for build scripts are missing. The panic makes the build fail.
    pub fn build(self) -> Result<(), Error> {
        if std::env::var_os("DOCS_RS").is_some() {
            return Ok(());
        }
        for directory in self.application.inputs() {
            println!("cargo::rerun-if-changed={}", directory.display());
        }
        println!("cargo::rerun-if-env-changed={}", settings::PREBUILT);
        let library = dependency_path("LIBRARY").ok_or(Error::NoDependency)?;
        if dependency_path("CORE").is_some() {
            return Err(Error::TwoCores);
        }
        println!("cargo::rerun-if-changed={}", library.display());
        let core = self.build_or_find()?;
        embed("sbcl_application_core", &EmbeddedFiles { core: Some(&core), library: None });
        Ok(())
    }

    /// Builds the core, unless it is prebuilt, and returns its path.
    fn build_or_find(&self) -> Result<PathBuf, Error> {
        let name = format!("{}.core", env_var("CARGO_PKG_NAME"));
        if let Some(directory) = std::env::var_os(settings::PREBUILT).filter(|value| !value.is_empty()) {
            let core = Path::new(&directory).join(name);
            return if core.is_file() { Ok(core) } else { Err(Error::Prebuilt { core }) };
        }
        let need = |name| dependency_path(name).ok_or(Error::NoDependency);
        let platform = Platform { arch: env_var("CARGO_CFG_TARGET_ARCH"), os: env_var("CARGO_CFG_TARGET_OS") };
        let (program, core, home) = (need("BARE_PROGRAM")?, need("BARE_CORE")?, need("BARE_HOME")?);
        let bare = BareSbcl { program, core, home, platform };
        let out = PathBuf::from(env_var("OUT_DIR"));
        let core = out.join(name);
        self.application.compile(&bare, &need("HOST")?, &out, &core, &Progress::terminal())?;
        Ok(core)
    }
}

/// Returns a path that the build script of `sbcl-mcp` passes to its dependants (`links = "sbcl"`).
fn dependency_path(name: &str) -> Option<PathBuf> {
    std::env::var_os(format!("DEP_SBCL_{name}")).map(PathBuf::from)
}

/// Returns the value of the environment variable `name`, which cargo sets for build scripts.
fn env_var(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; cargo sets it for build scripts"))
}
