//! The third stage: the core, saved with the Lisp side loaded.

use std::path::{Path, PathBuf};

use crate::cache::{Cache, Work};
use crate::error::{Error, IoContext};
use crate::key::KeyBuilder;
use crate::progress::Progress;
use crate::sbcl::Sbcl;
use crate::{files, process};

/// Changes when this recipe makes something else of the same input.
const REVISION: &str = "1";

/// The heap, in megabytes, under which the core is saved. A core booted with a larger heap than it was saved under has
/// every function patched for a wider card table, which costs time and memory: so the largest it will run with.
const HEAP_MEGABYTES: &str = "8192";

/// The file of the Lisp side that builds it. It is loaded, and must save a core to the file that
/// [`OUTPUT`] names.
const BUILD_FILE: &str = "build.lisp";

/// Tells the build file where the core goes.
const OUTPUT: &str = "SBCL_MCP_CORE_OUTPUT";

/// Tells the build file where compiled files go.
const FASLS: &str = "SBCL_MCP_FASL_DIR";

/// The core's file name.
pub(crate) const NAME: &str = "sbcl.core";

/// How many versions of this stage are kept.
const KEPT: usize = 5;

/// Finds the core in the cache or saves it.
pub(crate) fn build(cache: &Cache, sbcl: &Sbcl, lisp: &Path, progress: &Progress) -> Result<PathBuf, Error> {
    let key = KeyBuilder::new("core")
        .text("revision", REVISION)
        .text("sbcl", &sbcl.key.to_string())
        .text("heap", HEAP_MEGABYTES)
        .files(lisp, &inputs(lisp)?)?
        .finish();
    let directory = cache.stage("core", &key, progress, |work| {
        progress.say(format_args!("saving the core; log: {}", work.log.path().display()));
        make(sbcl, lisp, work)
    })?;
    cache.prune("core", KEPT);
    Ok(directory.join(NAME))
}

/// The files of the Lisp side.
pub(crate) fn inputs(lisp: &Path) -> Result<Vec<PathBuf>, Error> {
    let names = files::list(lisp, |_| true)?;
    Ok(names.into_iter().filter(|name| files::has_extension(name, &["lisp", "asd"])).collect())
}

fn make(sbcl: &Sbcl, lisp: &Path, work: &Work<'_>) -> Result<(), Error> {
    let step = "saving the core";
    let (fasls, home) = (work.scratch.join("fasl"), work.scratch.join("home"));
    for directory in [&fasls, &home] {
        std::fs::create_dir(directory).doing("making", directory)?;
    }
    let output = work.result.join(NAME);
    let mut command = process::bare(&sbcl.program().to_string_lossy());
    command.arg("--core").arg(sbcl.core());
    command.args(["--noinform", "--dynamic-space-size", HEAP_MEGABYTES]);
    command.args(["--no-sysinit", "--no-userinit", "--non-interactive", "--disable-debugger", "--load"]);
    command.arg(lisp.join(BUILD_FILE)).current_dir(&work.scratch);
    // The builder's home would bring the builder's own Lisp configuration into the core.
    command.env("HOME", &home).env("SBCL_HOME", sbcl.home());
    command.env(OUTPUT, &output).env(FASLS, &fasls);
    work.log.run(step, &mut command, work.progress)?;
    if output.is_file() {
        Ok(())
    } else {
        let (step, log) = (step.to_owned(), work.log.path().to_owned());
        Err(Error::NotMade { step, file: output, log })
    }
}
