//! The whole recipe: from the settings and the checkout's files to the library and the core.

use std::path::{Path, PathBuf};

use crate::cache::Cache;
use crate::error::Error;
use crate::library::Shim;
use crate::platform::Platform;
use crate::progress::Progress;
use crate::sbcl::{Bare, Sbcl};
use crate::settings::Settings;
use crate::toolchain::Toolchain;
use crate::{core, library, sbcl};

/// What goes into a build.
#[derive(Debug)]
pub struct Recipe {
    /// The directory of the Lisp side, with its `build/build.lisp`.
    pub lisp_dir: PathBuf,
    /// The C file that is linked into the library.
    pub shim: PathBuf,
    /// The directory of that file's headers.
    pub include_dir: PathBuf,
    /// The machine that the result is for.
    pub target: Platform,
    /// Whether the core is wanted: if not, the library is enough of those that are ready-made.
    pub wants_core: bool,
    /// What the environment says.
    pub settings: Settings,
    /// Where progress is shown.
    pub progress: Progress,
}

/// What came out of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Built {
    /// The shared library, without debugging symbols.
    pub library: PathBuf,
    /// The core that it starts.
    pub core: PathBuf,
    /// The SBCL that both were made with; none for those that were ready-made.
    pub bare: Option<Bare>,
    /// The compiled Lisp side, as one fasl, for other cores made with that SBCL.
    pub host: Option<PathBuf>,
}

impl Recipe {
    /// The recipe for a checkout of the project: its `lisp/` and `ffi/`, this machine, this environment, progress on
    /// standard error. A user without a home gets the cache in the checkout's `target/`.
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

    /// The library and the core: those that [`SBCL_MCP_PREBUILT`](crate::settings::PREBUILT) names, or those of the
    /// cache, made if they are not there.
    ///
    /// # Errors
    ///
    /// Whatever keeps them from being had; see [`Error`]. Each says what helps.
    pub fn build(&self) -> Result<Built, Error> {
        if let Some(directory) = &self.settings.prebuilt {
            return self.prebuilt(directory);
        }
        if !self.target.is_host() {
            return Err(Error::CrossBuild { target: self.target.to_string(), host: Platform::host().to_string() });
        }
        let cache = Cache::new(self.settings.cache.clone());
        let toolchain = Toolchain::choose(&self.settings)?;
        let sbcl = self.build_sbcl(&cache, &toolchain)?;
        let shim = Shim { source: &self.shim, include: &self.include_dir };
        let library = library::build(&cache, &sbcl, shim, &toolchain, &self.target, &self.progress)?;
        let core = core::build(&cache, &sbcl, &self.lisp_dir, &self.include_dir, &self.progress)?;
        Ok(Built { library, core: core.core, bare: Some(sbcl.bare()), host: Some(core.host) })
    }

    /// SBCL alone, as its own build leaves it, made if it is not in the cache: also where the Lisp side does not build
    /// with it yet. None where [`SBCL_MCP_PREBUILT`](crate::settings::PREBUILT) names ready-made files.
    ///
    /// # Errors
    ///
    /// As for [`build`](Self::build).
    pub fn sbcl(&self) -> Result<Option<Bare>, Error> {
        if self.settings.prebuilt.is_some() {
            return Ok(None);
        }
        let cache = Cache::new(self.settings.cache.clone());
        let toolchain = Toolchain::choose(&self.settings)?;
        Ok(Some(self.build_sbcl(&cache, &toolchain)?.bare()))
    }

    fn build_sbcl(&self, cache: &Cache, toolchain: &Toolchain) -> Result<Sbcl, Error> {
        sbcl::build(cache, &self.settings, toolchain, &self.target, &self.progress)
    }

    /// The files and directories whose change makes another build necessary.
    #[must_use]
    pub fn inputs(&self) -> Vec<PathBuf> {
        let mut inputs = vec![self.lisp_dir.clone(), self.shim.clone(), self.include_dir.clone()];
        inputs.extend(self.settings.source.clone());
        inputs
    }

    fn prebuilt(&self, directory: &Path) -> Result<Built, Error> {
        let (library, core) = (directory.join(self.target.library_name()), directory.join(core::NAME));
        let built = Built { library, core, bare: None, host: None };
        let problem = if !directory.is_absolute() {
            "that is not an absolute path".to_owned()
        } else if let Some(missing) = self.missing(&built) {
            format!("{} is not there", missing.display())
        } else {
            return Ok(built);
        };
        Err(Error::Prebuilt { directory: directory.to_owned(), problem, library: self.target.library_name() })
    }

    /// What is not there of ready-made files.
    fn missing<'a>(&self, built: &'a Built) -> Option<&'a Path> {
        let wanted = [Some(&built.library), Some(&built.core).filter(|_| self.wants_core)];
        wanted.into_iter().flatten().map(PathBuf::as_path).find(|file| !file.is_file())
    }
}
