//! The third stage: the core, saved with the Lisp side loaded.

use std::path::{Path, PathBuf};

use crate::cache::{Cache, Work};
use crate::error::{Error, IoContext};
use crate::key::KeyBuilder;
use crate::progress::Progress;
use crate::sbcl::{HEAP_MEGABYTES, Sbcl};
use crate::{files, process};

/// Changes when this recipe makes something else of the same input.
const REVISION: &str = "2";

/// The file of the Lisp side that builds it. It is loaded, and must save a core to the file that
/// [`OUTPUT`] names.
const BUILD_FILE: &str = "build/build.lisp";

/// The contract of the Lisp side with its host, which is read when the Lisp side is compiled.
const HEADER: &str = "sbcl_host.h";

/// Tells the build file where the core goes.
const OUTPUT: &str = "SBCL_MCP_CORE_OUTPUT";

/// Tells the build file where all that was compiled goes.
const HOST_OUTPUT: &str = "SBCL_MCP_HOST_OUTPUT";

/// Tells the build file where compiled files go.
const FASLS: &str = "SBCL_MCP_FASL_DIR";

/// The core's file name.
pub(crate) const NAME: &str = "sbcl.core";

/// The name of the file with the compiled Lisp side.
const HOST_NAME: &str = "sbcl-host.fasl";

/// What this stage makes.
#[derive(Debug)]
pub(crate) struct Core {
    /// The core.
    pub(crate) core: PathBuf,
    /// The compiled Lisp side, as one fasl.
    pub(crate) host: PathBuf,
}

/// How many versions of this stage are kept.
const KEPT: usize = 5;

/// Finds the core in the cache or saves it.
pub(crate) fn build(
    cache: &Cache,
    sbcl: &Sbcl,
    lisp: &Path,
    include: &Path,
    progress: &Progress,
) -> Result<Core, Error> {
    let header = files::list(include, |name| name == Path::new(HEADER))?;
    let key = KeyBuilder::new("core")
        .text("revision", REVISION)
        .text("sbcl", &sbcl.key.to_string())
        .text("heap", HEAP_MEGABYTES)
        .files(lisp, &inputs(lisp)?)?
        .files(include, &header)?
        .finish();
    let directory = cache.stage("core", &key, progress, |work| {
        progress.say(format_args!("saving the core; log: {}", work.log.path().display()));
        make(sbcl, lisp, work)
    })?;
    cache.prune("core", KEPT);
    Ok(Core { core: directory.join(NAME), host: directory.join(HOST_NAME) })
}

/// The files of the Lisp side.
pub(crate) fn inputs(lisp: &Path) -> Result<Vec<PathBuf>, Error> {
    let names = files::list(lisp, |_| true)?;
    Ok(names.into_iter().filter(|name| files::has_extension(name, &["lisp", "asd", "sexp"])).collect())
}

fn make(sbcl: &Sbcl, lisp: &Path, work: &Work<'_>) -> Result<(), Error> {
    let step = "saving the core";
    let (fasls, home) = (work.scratch.join("fasl"), work.scratch.join("home"));
    for directory in [&fasls, &home] {
        std::fs::create_dir(directory).doing("making", directory)?;
    }
    let (output, host) = (work.result.join(NAME), work.result.join(HOST_NAME));
    let mut command = process::bare(&sbcl.program().to_string_lossy());
    sbcl.bare().arguments(&mut command);
    command.arg("--load").arg(lisp.join(BUILD_FILE)).current_dir(&work.scratch);
    // The builder's home would bring the builder's own Lisp configuration into the core.
    command.env("HOME", &home);
    command.env(OUTPUT, &output).env(HOST_OUTPUT, &host).env(FASLS, &fasls);
    work.log.run(step, &mut command, work.progress)?;
    for file in [output, host] {
        if !file.is_file() {
            return Err(Error::NotMade { step: step.to_owned(), file, log: work.log.path().to_owned() });
        }
    }
    Ok(())
}
