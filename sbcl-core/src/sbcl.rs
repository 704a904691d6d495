//! The first stage: SBCL itself, with its contribs and the C objects that a shared library is linked from.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, Work};
use crate::error::{Error, IoContext};
use crate::key::{Key, KeyBuilder};
use crate::platform::Platform;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::toolchain::Toolchain;
use crate::{files, pin, process, source};

/// Changes when this recipe makes something else of the same source.
const REVISION: &str = "1";

/// What SBCL's build is told. It is compressed by nothing, so it needs no library but C's. Its default home is a
/// directory that cannot exist, so that no other SBCL's contribs are ever loaded into it.
const OPTIONS: [&str; 2] = ["--prefix=/nonexistent", "--with-sb-thread"];

/// What the C compiler is told. SBCL's handlers begin with a look at a thread local, on any thread that a signal comes to.
/// In a library that is loaded with dlopen the first such look allocates (`__tls_get_addr`), which never ends where the
/// signal came within malloc; by this model the thread local is there from the thread's beginning.
const CFLAGS: &str = "-ftls-model=initial-exec";

/// The contribs that the core does not need.
const CONTRIBS_LEFT_OUT: &str = "sb-aclrepl sb-capstone sb-executable sb-gmp sb-mpfr sb-perf sb-simd sb-simple-streams";

/// The heap, in megabytes, under which the core is saved. A core booted with a larger heap than it was saved under has
/// every function patched for a wider card table, which costs time and memory: so the largest it will run with.
pub(crate) const HEAP_MEGABYTES: &str = "8192";

/// How many versions of this stage are kept.
const KEPT: usize = 3;

/// A built SBCL.
#[derive(Debug, Clone)]
pub(crate) struct Sbcl {
    directory: PathBuf,
    /// The stage's key, which goes into those of the stages made with it.
    pub(crate) key: Key,
}

impl Sbcl {
    /// The executable.
    pub(crate) fn program(&self) -> PathBuf {
        self.runtime().join("sbcl")
    }

    /// The executable's own core.
    pub(crate) fn core(&self) -> PathBuf {
        self.directory.join("output/sbcl.core")
    }

    /// What SBCL knows as `SBCL_HOME`: the contribs are under it.
    pub(crate) fn home(&self) -> PathBuf {
        self.directory.join("obj/sbcl-home")
    }

    /// The directory of the runtime's headers, objects and `sbcl.mk`.
    pub(crate) fn runtime(&self) -> PathBuf {
        self.directory.join("src/runtime")
    }

    /// The executable as it is to be started.
    pub(crate) fn bare(&self) -> Bare {
        Bare { program: self.program(), core: self.core(), home: self.home() }
    }

    /// The position-independent objects that make up the shared library.
    pub(crate) fn objects(&self) -> Result<Vec<PathBuf>, Error> {
        let names = files::list(&self.directory, |_| true)?;
        let objects = names.into_iter().filter(|name| files::has_extension(name, &["o"]));
        Ok(objects.map(|name| self.directory.join(name)).collect())
    }
}

/// An SBCL as its own build leaves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bare {
    /// The executable.
    pub program: PathBuf,
    /// The executable's own core.
    pub core: PathBuf,
    /// What SBCL knows as `SBCL_HOME`: the directory that has the contribs under it.
    pub home: PathBuf,
}

impl Bare {
    /// Starts it with the heap that cores are saved with and without anyone's configuration. It ends with a status other
    /// than 0 when an error is not handled. Lisp's own options, such as `--load`, may follow.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        self.arguments(&mut command);
        command
    }

    /// The arguments and variables of [`command`](Self::command).
    pub(crate) fn arguments(&self, command: &mut Command) {
        command.arg("--core").arg(&self.core).args(["--noinform", "--dynamic-space-size", HEAP_MEGABYTES]);
        command.args(["--no-sysinit", "--no-userinit", "--non-interactive", "--disable-debugger"]);
        command.env("SBCL_HOME", &self.home);
    }
}

/// Finds SBCL in the cache or builds it.
pub(crate) fn build(
    cache: &Cache,
    settings: &Settings,
    toolchain: &Toolchain,
    platform: &Platform,
    progress: &Progress,
) -> Result<Sbcl, Error> {
    let key = KeyBuilder::new("sbcl")
        .text("revision", REVISION)
        .text("commit", pin::GIT_COMMIT)
        .text("archive", pin::ARCHIVE_SHA256)
        .text("source", &source::identity(settings, progress)?)
        .text("options", &OPTIONS.join(" "))
        .text("compiler flags", CFLAGS)
        .text("contribs left out", CONTRIBS_LEFT_OUT)
        .text("compiler", &toolchain.identity()?)
        .text("platform", &platform.to_string())
        .finish();
    let directory = cache.stage("sbcl", &key, progress, |work| {
        toolchain.check(&work.scratch)?;
        progress.say(format_args!(
            "building SBCL {}, once on this machine: about three minutes; log: {}",
            pin::VERSION,
            work.log.path().display()
        ));
        let source = source::find(settings, cache, progress)?;
        progress.say(format_args!("source: {source}"));
        make(&source, &key, toolchain, work)
    })?;
    cache.prune("sbcl", KEPT);
    Ok(Sbcl { directory, key })
}

fn make(source: &source::Source, key: &Key, toolchain: &Toolchain, work: &Work<'_>) -> Result<(), Error> {
    let tree = work.scratch.join("tree");
    std::fs::create_dir(&tree).doing("making", &tree)?;
    source::unpack(source, &tree, work)?;
    let step = format!("building SBCL {}", pin::VERSION);
    let mut build = script(&tree, "make.sh", key, toolchain);
    build.args(OPTIONS).arg(format!("--xc-host={}", toolchain.bootstrap));
    work.log.run(&step, &mut build, work.progress)?;
    // Its objects are wanted, not the library: that is linked again with the shim.
    let step = "building libsbcl";
    work.log.run(step, &mut script(&tree, "make-shared-library.sh", key, toolchain), work.progress)?;
    files::copy(&tree, &work.result, &files::list(&tree, is_needed)?)?;
    for name in ["src/runtime/sbcl", "src/runtime/sbcl.mk", "src/runtime/runtime.pic.o", "output/sbcl.core"] {
        let file = work.result.join(name);
        if !file.is_file() {
            let (step, log) = (step.to_owned(), work.log.path().to_owned());
            return Err(Error::NotMade { step, file, log });
        }
    }
    Ok(())
}

fn script(tree: &Path, name: &str, key: &Key, toolchain: &Toolchain) -> Command {
    let mut command = process::bare("sh");
    command.arg(name).current_dir(tree);
    command.env("CC", toolchain.compiler.join(" ")).env("CFLAGS", CFLAGS);
    command.env("SBCL_MAKE_JOBS", format!("-j{}", toolchain.jobs));
    command.env("SBCL_CONTRIB_BLOCKLIST", CONTRIBS_LEFT_OUT);
    // With it SBCL's build identifier names neither this machine nor its user, and is another for each key.
    command.env("SOURCE_DATE_EPOCH", key.number().to_string());
    command
}

/// Whether a file of the built tree is kept, or a directory looked into. The tree's shape is kept too: the headers
/// include one another by relative paths, and SBCL finds its contribs from its home.
fn is_needed(name: &Path) -> bool {
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
    fn is_needed_keeps_headers_pic_objects_and_contribs_only() {
        for name in ["src/runtime/thread.h", "src/runtime/thread.pic.o", "obj/sbcl-home/contrib/asdf.fasl"] {
            assert!(is_needed(Path::new(name)), "{name}");
        }
        for name in ["src/runtime/thread.c", "src/runtime/thread.o", "src/code/list.lisp", "output/cold-sbcl.core"] {
            assert!(!is_needed(Path::new(name)), "{name}");
        }
    }
}
