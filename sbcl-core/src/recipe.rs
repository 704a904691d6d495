//! The complete recipe: from settings and the files of the checkout to the library and the core.

use std::path::{Path, PathBuf};

use crate::cache::Cache;
use crate::error::Error;
use crate::library::Shim;
use crate::platform::Platform;
use crate::progress::Progress;
use crate::sbcl::{BareSbcl, Sbcl};
use crate::settings::Settings;
use crate::toolchain::Toolchain;
use crate::{core, library, pin, sbcl, source};

/// The inputs of a build.
#[derive(Debug)]
pub struct Recipe {
    /// The directory of the Lisp side, with its `build/build.lisp`.
    pub lisp_dir: PathBuf,
    /// The C file that is linked into the library.
    pub shim: PathBuf,
    /// The directory of the C file's headers.
    pub include_dir: PathBuf,
    /// The platform to build for.
    pub target: Platform,
    /// True if the core is needed. Otherwise prebuilt files may consist of the library alone.
    pub wants_core: bool,
    /// Settings from the environment.
    pub settings: Settings,
    /// The display of progress.
    pub progress: Progress,
}

/// The results of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildOutput {
    /// SBCL's version.
    pub version: String,
    /// The shared library, without debugging symbols.
    pub library: PathBuf,
    /// The core that the library boots.
    pub core: PathBuf,
    /// The SBCL that made the library and the core; `None` for prebuilt files.
    pub bare: Option<BareSbcl>,
    /// The compiled Lisp side, as one fasl, for other cores made with `bare`; `None` for prebuilt files.
    pub host: Option<PathBuf>,
}

impl Recipe {
    /// Returns the recipe for a checkout of the project, with its `lisp/` and `ffi/`, for this machine, with settings
    /// from this environment and progress on standard error. For a user without a home directory the cache is in the
    /// checkout's `target/`.
    #[must_use]
    pub fn in_checkout(root: &Path) -> Self {
        Self {
            lisp_dir: root.join("lisp"),
            shim: root.join("ffi/shim.c"),
            include_dir: root.join("ffi"),
            target: Platform::host(),
            wants_core: true,
            settings: Settings::from_environment(&root.join("target/sbcl-core")),
            progress: Progress::stderr(),
        }
    }

    /// Returns the library and the core. If [`SBCL_MCP_PREBUILT`](crate::settings::PREBUILT) names a directory, returns
    /// the prebuilt files in this directory. Otherwise returns files in the cache, after building them if necessary.
    ///
    /// # Errors
    ///
    /// Returns an [`Error`] if the prebuilt files cannot be used, this machine cannot build for the target, or the build
    /// fails. Where possible, the message says how to fix the problem.
    pub fn build(&self) -> Result<BuildOutput, Error> {
        if let Some(directory) = &self.settings.prebuilt {
            return self.prebuilt(directory);
        }
        let cache = Cache::new(self.settings.cache.clone());
        let toolchain = self.toolchain()?;
        let sbcl = self.build_sbcl(&cache, &toolchain)?;
        let shim = Shim { source: &self.shim, include: &self.include_dir };
        let library = library::build(&cache, &sbcl, shim, &toolchain, &self.progress)?;
        let core = core::build(&cache, &sbcl, &self.lisp_dir, &self.include_dir, &self.progress)?;
        let version = source::version(&self.settings)?;
        Ok(BuildOutput { version, library, core: core.core, bare: Some(sbcl.bare()), host: Some(core.host) })
    }

    /// Returns plain SBCL, without the Lisp side, and builds SBCL first if the cache does not have it. Works even if the
    /// Lisp side does not compile. Returns `None` if [`SBCL_MCP_PREBUILT`](crate::settings::PREBUILT) names prebuilt
    /// files.
    ///
    /// # Errors
    ///
    /// Returns an [`Error`] if this machine cannot build for the target, a tool or SBCL's source is missing, or SBCL's own
    /// build fails.
    pub fn sbcl(&self) -> Result<Option<BareSbcl>, Error> {
        if self.settings.prebuilt.is_some() {
            return Ok(None);
        }
        let cache = Cache::new(self.settings.cache.clone());
        let toolchain = self.toolchain()?;
        Ok(Some(self.build_sbcl(&cache, &toolchain)?.bare()))
    }

    /// Returns the tools that build for the target. Fails if this machine cannot build for the target.
    fn toolchain(&self) -> Result<Toolchain, Error> {
        let host = Platform::host();
        if !self.target.is_built_on(&host) {
            return Err(Error::CrossBuild { target: self.target.to_string(), host: host.to_string() });
        }
        Toolchain::choose(&self.settings, &self.target)
    }

    fn build_sbcl(&self, cache: &Cache, toolchain: &Toolchain) -> Result<Sbcl, Error> {
        sbcl::build(cache, &self.settings, toolchain, &self.progress)
    }

    /// Returns the files and directories whose change requires another build.
    #[must_use]
    pub fn inputs(&self) -> Vec<PathBuf> {
        let mut inputs = vec![self.lisp_dir.clone(), self.shim.clone(), self.include_dir.clone()];
        inputs.extend(self.settings.source.iter().chain(&self.settings.next).cloned());
        inputs
    }

    fn prebuilt(&self, directory: &Path) -> Result<BuildOutput, Error> {
        let (library, core) = (directory.join(self.target.library_name()), directory.join(core::FILE_NAME));
        let built = BuildOutput { version: pin::VERSION.to_owned(), library, core, bare: None, host: None };
        let problem = if !directory.is_absolute() {
            "this path is not absolute".to_owned()
        } else if let Some(missing) = self.missing_file(&built) {
            format!("{} does not exist", missing.display())
        } else {
            return Ok(built);
        };
        let core = if self.wants_core { format!(" and {}", core::FILE_NAME) } else { String::new() };
        let files = format!("{}{core}", self.target.library_name());
        Err(Error::Prebuilt { directory: directory.to_owned(), problem, files })
    }

    /// Returns the first prebuilt file that is missing.
    fn missing_file<'a>(&self, built: &'a BuildOutput) -> Option<&'a Path> {
        let wanted = [Some(&built.library), Some(&built.core).filter(|_| self.wants_core)];
        wanted.into_iter().flatten().map(PathBuf::as_path).find(|file| !file.is_file())
    }
}
