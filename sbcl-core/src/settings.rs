//! Settings of a build, from the environment.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// The environment variable that names a directory with a prebuilt library and core, so that nothing is built.
pub const PREBUILT: &str = "SBCL_MCP_PREBUILT";
/// The environment variable that names SBCL's source: a directory or the pinned archive.
pub const SOURCE: &str = "SBCL_MCP_SOURCE";
/// The environment variable that names a directory with the source of an SBCL of any version, which is built in place of
/// the pinned SBCL.
pub const NEXT: &str = "SBCL_MCP_NEXT";
/// The environment variable with the command that starts the bootstrapping Lisp.
pub const BOOTSTRAP: &str = "SBCL_MCP_BOOTSTRAP";
/// The environment variable with the C compiler's command.
pub const COMPILER: &str = "CC";
/// The environment variable with the command of the C compiler for aarch64 Linux on machines of other platforms. Build scripts
/// that use the crate `cc` read the same variable.
pub const CROSS_COMPILER: &str = "CC_aarch64_unknown_linux_gnu";
/// The environment variable that names a directory with an aarch64 Linux system. Programs in QEMU use the C library of this
/// system.
pub const SYSROOT: &str = "SBCL_MCP_SYSROOT";

/// The environment variables whose change requires another run of the recipe.
pub const VARIABLES: [&str; 9] =
    [PREBUILT, SOURCE, NEXT, BOOTSTRAP, COMPILER, CROSS_COMPILER, SYSROOT, "XDG_CACHE_HOME", "HOME"];

/// The settings of a build.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The directory of a prebuilt library and core, if the user named a directory.
    pub prebuilt: Option<PathBuf>,
    /// The path of SBCL's source, if the user named a path.
    pub source: Option<PathBuf>,
    /// The directory with the source of an SBCL other than the pinned SBCL, if the user named a directory.
    pub next: Option<PathBuf>,
    /// The command that starts the bootstrapping Lisp.
    pub bootstrap: String,
    /// The C compiler's command, if the user named a command.
    pub compiler: Option<String>,
    /// The command of the C compiler for another machine, if the user named a command.
    pub cross_compiler: Option<String>,
    /// The cache's directory.
    pub cache: PathBuf,
    /// Maximum number of commands that a step runs in parallel.
    pub jobs: usize,
}

impl Settings {
    /// Reads the environment. `fallback_cache` is the cache's directory for a user without a home directory.
    #[must_use]
    pub fn from_environment(fallback_cache: &Path) -> Self {
        Self::from_lookup(|name| std::env::var_os(name), fallback_cache)
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>, fallback_cache: &Path) -> Self {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let path = |name: &str| get(name).map(PathBuf::from);
        let text = |name: &str| get(name).map(|value| value.to_string_lossy().into_owned());
        // The XDG specification requires relative values to be ignored.
        let absolute = |name: &str| path(name).filter(|path| path.is_absolute());
        let next = path(NEXT);
        let cache_home = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
        let mut cache = cache_home.map_or_else(|| fallback_cache.to_owned(), |home| home.join("sbcl-mcp"));
        if next.is_some() {
            // Stages of another SBCL must not displace the pinned SBCL's stages, of which the cache keeps only the latest.
            cache.push("next");
        }
        Self {
            prebuilt: path(PREBUILT),
            source: path(SOURCE),
            next,
            bootstrap: text(BOOTSTRAP).unwrap_or_else(|| "sbcl".to_owned()),
            compiler: text(COMPILER),
            cross_compiler: text(CROSS_COMPILER),
            cache,
            jobs: text("NUM_JOBS")
                .and_then(|jobs| jobs.parse().ok())
                .or_else(|| std::thread::available_parallelism().ok())
                .map_or(1, NonZeroUsize::get),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Settings {
        Settings::from_lookup(
            |name| {
                let found = variables.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            },
            Path::new("/out"),
        )
    }

    #[test]
    fn the_cache_follows_xdg_then_home_then_the_build_directory() {
        let home = ("HOME", "/home/me");
        let of_home = Path::new("/home/me/.cache/sbcl-mcp");
        assert_eq!(settings(&[("XDG_CACHE_HOME", "/c"), home]).cache, Path::new("/c/sbcl-mcp"));
        assert_eq!(settings(&[home]).cache, of_home);
        assert_eq!(settings(&[("XDG_CACHE_HOME", ""), home]).cache, of_home);
        assert_eq!(settings(&[]).cache, Path::new("/out"));
    }

    #[test]
    fn a_relative_xdg_cache_home_is_ignored() {
        let cache = settings(&[("XDG_CACHE_HOME", "here"), ("HOME", "/home/me")]).cache;
        assert_eq!(cache, Path::new("/home/me/.cache/sbcl-mcp"));
    }

    #[test]
    fn another_sbcl_has_a_cache_of_its_own() {
        assert_eq!(settings(&[("HOME", "/home/me"), (NEXT, "/s")]).cache, Path::new("/home/me/.cache/sbcl-mcp/next"));
    }

    #[test]
    fn an_empty_variable_counts_as_unset() {
        let settings = settings(&[PREBUILT, SOURCE, NEXT, BOOTSTRAP, COMPILER, CROSS_COMPILER].map(|name| (name, "")));
        assert_eq!(settings.prebuilt, None);
        assert_eq!(settings.source, None);
        assert_eq!(settings.next, None);
        assert_eq!(settings.bootstrap, "sbcl");
        assert_eq!(settings.compiler, None);
        assert_eq!(settings.cross_compiler, None);
    }

    #[test]
    fn the_cross_compiler_is_a_setting_of_its_own() {
        let settings = settings(&[(COMPILER, "clang"), (CROSS_COMPILER, "/x/cc")]);
        assert_eq!(settings.compiler.as_deref(), Some("clang"));
        assert_eq!(settings.cross_compiler.as_deref(), Some("/x/cc"));
    }
}
