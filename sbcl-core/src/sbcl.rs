//! The first stage: SBCL itself, with its contribs and the C objects that a shared library is linked from.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, StageContext};
use crate::error::{Error, IoContext};
use crate::key::{Key, KeyBuilder};
use crate::platform::Platform;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::toolchain::Toolchain;
use crate::{files, pin, process, source};

/// Revision of this recipe, incremented when it makes a different SBCL from the same source.
const REVISION: &str = "2";

/// Options of SBCL's build. Core compression is off, so SBCL needs no library besides the C library. The default home is
/// a directory that cannot exist, so that SBCL never loads the contribs of another SBCL.
const BUILD_OPTIONS: [&str; 2] = ["--prefix=/nonexistent", "--with-sb-thread"];

/// Flags for the C compiler. SBCL's signal handlers first read a thread local, on whichever thread receives the signal.
/// In a library loaded with dlopen, the first read on a thread allocates (`__tls_get_addr`), and deadlocks if the
/// signal arrived within malloc. With the model `initial-exec`, the thread local exists from the
/// start of the thread.
const CFLAGS: &str = "-ftls-model=initial-exec";

/// Contribs that the core does not need.
const EXCLUDED_CONTRIBS: &str = "sb-aclrepl sb-capstone sb-executable sb-gmp sb-mpfr sb-perf sb-simd sb-simple-streams";

/// Heap size, in megabytes, of the SBCL that saves a core: the largest heap that a core is expected to run with,
/// because booting with a larger heap patches every function for a wider card table, which costs time and memory.
pub(crate) const HEAP_MEGABYTES: &str = "8192";

/// Number of versions of this stage that the cache keeps.
const KEPT_VERSIONS: usize = 3;

/// A built SBCL.
#[derive(Debug, Clone)]
pub(crate) struct Sbcl {
    directory: PathBuf,
    /// The platform that SBCL runs on.
    pub(crate) platform: Platform,
    /// The stage's key, which is part of the keys of stages built with this SBCL.
    pub(crate) key: Key,
}

impl Sbcl {
    /// Returns the path of SBCL's executable.
    pub(crate) fn program(&self) -> PathBuf {
        self.runtime_directory().join("sbcl")
    }

    /// Returns the path of the core that SBCL's own build made.
    pub(crate) fn core(&self) -> PathBuf {
        self.directory.join("output/sbcl.core")
    }

    /// Returns the value for `SBCL_HOME`, the directory that contains the contribs.
    pub(crate) fn home(&self) -> PathBuf {
        self.directory.join("obj/sbcl-home")
    }

    /// Returns the directory of the runtime's headers, objects and `sbcl.mk`.
    pub(crate) fn runtime_directory(&self) -> PathBuf {
        self.directory.join("src/runtime")
    }

    /// Returns the executable with its core and home, as needed to start it.
    pub(crate) fn bare(&self) -> BareSbcl {
        BareSbcl { program: self.program(), core: self.core(), home: self.home(), platform: self.platform.clone() }
    }

    /// Returns the paths of the position-independent object files from which the shared library is linked.
    pub(crate) fn objects(&self) -> Result<Vec<PathBuf>, Error> {
        let names = files::list(&self.directory, |_| true)?;
        let objects = names.into_iter().filter(|name| files::has_extension(name, &["o"]));
        Ok(objects.map(|name| self.directory.join(name)).collect())
    }
}

/// An SBCL as its own build leaves it, without the Lisp side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BareSbcl {
    /// The executable.
    pub program: PathBuf,
    /// The executable's own core.
    pub core: PathBuf,
    /// The value for `SBCL_HOME`, the directory that contains the contribs.
    pub home: PathBuf,
    /// The platform that SBCL runs on. On machines of other platforms, an emulator runs SBCL.
    pub platform: Platform,
}

impl BareSbcl {
    /// Returns a command that starts SBCL with the heap size with which cores are saved, and without any user's
    /// configuration. An unhandled error makes SBCL exit with a status other than 0. Lisp's own options, such as
    /// `--load`, may be appended.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = self.platform.command(&self.program);
        self.add_arguments(&mut command);
        command
    }

    /// Adds the arguments and environment variables of [`command`](Self::command) to another command.
    pub(crate) fn add_arguments(&self, command: &mut Command) {
        command.arg("--core").arg(&self.core).args(["--noinform", "--dynamic-space-size", HEAP_MEGABYTES]);
        command.args(["--no-sysinit", "--no-userinit", "--non-interactive", "--disable-debugger"]);
        command.env("SBCL_HOME", &self.home);
    }
}

/// Returns SBCL from the cache, or builds it.
pub(crate) fn build(
    cache: &Cache,
    settings: &Settings,
    toolchain: &Toolchain,
    progress: &Progress,
) -> Result<Sbcl, Error> {
    let platform = &toolchain.platform;
    let version = source::version(settings)?;
    let key = KeyBuilder::new("sbcl")
        .text("revision", REVISION)
        .text("commit", pin::GIT_COMMIT)
        .text("archive", pin::ARCHIVE_SHA256)
        .text("source", &source::identity(settings, progress)?)
        .text("options", &BUILD_OPTIONS.join(" "))
        .text("compiler flags", CFLAGS)
        .text("contribs left out", EXCLUDED_CONTRIBS)
        .text("compiler", &toolchain.identity()?)
        .text("platform", &platform.to_string())
        .finish();
    let stage = platform.stage("sbcl");
    let directory = cache.get_or_build(&stage, &key, progress, |context| {
        toolchain.check(&context.scratch)?;
        progress.say(format_args!(
            "building SBCL {version} takes about {} minutes; later builds use the result; log: {}",
            if platform.is_host() { "three" } else { "ten to twenty" },
            context.log.path().display()
        ));
        let source = source::find(settings, cache, progress)?;
        progress.say(format_args!("source: {source}"));
        compile_sbcl(&source, &version, &key, toolchain, context)
    })?;
    cache.prune(&stage, KEPT_VERSIONS);
    Ok(Sbcl { directory, platform: platform.clone(), key })
}

fn compile_sbcl(
    source: &source::Source,
    version: &str,
    key: &Key,
    toolchain: &Toolchain,
    context: &StageContext<'_>,
) -> Result<(), Error> {
    let tree = context.scratch.join("tree");
    std::fs::create_dir(&tree).context("creating", &tree)?;
    source::unpack(source, version, &tree, context)?;
    let step = format!("building SBCL {version}");
    let mut build = script_command(&tree, "make.sh", key, toolchain);
    build.args(BUILD_OPTIONS).arg(format!("--xc-host={}", toolchain.bootstrap));
    if !toolchain.platform.is_host() {
        build.arg(format!("--arch={}", toolchain.platform.sbcl_arch()));
    }
    context.log.run(&step, &mut build, context.progress)?;
    // This step makes the object files. Its library is not used, because the library stage links a library with the shim.
    let mut library = script_command(&tree, "make-shared-library.sh", key, toolchain);
    context.log.run("building libsbcl", &mut library, context.progress)?;
    files::copy(&tree, &context.result, &files::list(&tree, is_kept)?)?;
    for name in ["src/runtime/sbcl", "src/runtime/sbcl.mk", "src/runtime/runtime.pic.o", "output/sbcl.core"] {
        let file = context.result.join(name);
        if !file.is_file() {
            return Err(Error::MissingResult { step, file, log: context.log.path().to_owned() });
        }
    }
    Ok(())
}

/// Returns a command that runs a script of SBCL's build. In a cross build, the script starts programs of two platforms: the
/// bootstrapping Lisp and the C compiler run on this machine, and the emulator runs the new SBCL and small test programs.
fn script_command(tree: &Path, name: &str, key: &Key, toolchain: &Toolchain) -> Command {
    let mut command = process::cleaned(toolchain.platform.command("sh"));
    command.arg(name).current_dir(tree);
    command.env("CC", toolchain.compiler.join(" ")).env("CFLAGS", CFLAGS);
    command.env("SBCL_MAKE_JOBS", format!("-j{}", toolchain.jobs));
    command.env("SBCL_CONTRIB_BLOCKLIST", EXCLUDED_CONTRIBS);
    // This date makes SBCL's build identifier independent of machine and user, but different for each key. SBCL also records
    // this date for each source file that is newer. All source files are newer, because the date is before 1988.
    command.env("SOURCE_DATE_EPOCH", key.as_timestamp().to_string());
    command
}

/// Returns true if `name` is a file of the built tree to keep, or a directory to enter. The files keep their relative
/// paths, because the headers include one another by relative paths, and SBCL finds its contribs relative to its home.
fn is_kept(name: &Path) -> bool {
    const FILES: [&str; 3] = ["src/runtime/sbcl", "src/runtime/sbcl.mk", "output/sbcl.core"];
    const DIRECTORIES: [&str; 9] = [
        "src",
        "src/runtime",
        "src/runtime/genesis",
        "tlsf-bsd",
        "tlsf-bsd/tlsf",
        "output",
        "obj",
        "obj/sbcl-home",
        "obj/sbcl-home/contrib",
    ];
    let is = |known: &&str| name == Path::new(*known);
    if FILES.iter().any(is) || DIRECTORIES.iter().any(is) {
        return true;
    }
    let in_runtime = name.starts_with("src/runtime") || name.starts_with("tlsf-bsd/tlsf");
    let is_object = name.to_string_lossy().ends_with(".pic.o");
    (in_runtime && (is_object || files::has_extension(name, &["h", "inc"])))
        || name.starts_with("obj/sbcl-home/contrib")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_tree_keeps_only_headers_pic_objects_and_contribs() {
        for name in ["src/runtime/thread.h", "src/runtime/thread.pic.o", "obj/sbcl-home/contrib/asdf.fasl"] {
            assert!(is_kept(Path::new(name)), "{name}");
        }
        for name in ["src/runtime/thread.c", "src/runtime/thread.o", "src/code/list.lisp", "output/cold-sbcl.core"] {
            assert!(!is_kept(Path::new(name)), "{name}");
        }
    }
}
