//! The third stage: the core, saved with the Lisp side loaded.

use std::path::{Path, PathBuf};

use crate::cache::{Cache, StageContext};
use crate::error::{Error, IoContext};
use crate::key::KeyBuilder;
use crate::progress::Progress;
use crate::sbcl::{HEAP_MEGABYTES, Sbcl};
use crate::{files, process};

/// Revision of this recipe, incremented when it makes a different core from the same input.
const REVISION: &str = "3";

/// The file of the Lisp side that SBCL loads. The code in it saves a core to the file that the environment variable
/// [`CORE_OUTPUT_VARIABLE`] names.
const BUILD_FILE: &str = "build/build.lisp";

/// The header that declares the interface between the Lisp side and its host. The build of the Lisp side reads this
/// header, too.
const CONTRACT_HEADER: &str = "sbcl_host.h";

/// The environment variable that tells build.lisp in which file to save the core.
const CORE_OUTPUT_VARIABLE: &str = "SBCL_MCP_CORE_OUTPUT";

/// The environment variable that tells build.lisp in which file to store the compiled Lisp side.
const HOST_OUTPUT_VARIABLE: &str = "SBCL_MCP_HOST_OUTPUT";

/// The environment variable that tells build.lisp in which directory to put fasls.
const FASL_DIR_VARIABLE: &str = "SBCL_MCP_FASL_DIR";

/// The core's file name.
pub(crate) const FILE_NAME: &str = "sbcl.core";

/// The file name of the compiled Lisp side.
const HOST_FASL_NAME: &str = "sbcl-host.fasl";

/// The files made by this stage.
#[derive(Debug)]
pub(crate) struct CoreFiles {
    /// The core.
    pub(crate) core: PathBuf,
    /// The compiled Lisp side, as one fasl.
    pub(crate) host: PathBuf,
}

/// Number of versions of this stage that the cache keeps.
const KEPT_VERSIONS: usize = 5;

/// Returns the core and the compiled Lisp side from the cache, or builds them.
pub(crate) fn build(
    cache: &Cache,
    sbcl: &Sbcl,
    lisp: &Path,
    include: &Path,
    progress: &Progress,
) -> Result<CoreFiles, Error> {
    let header = files::list(include, |name| name == Path::new(CONTRACT_HEADER))?;
    let sources = lisp_files(lisp)?;
    let key = KeyBuilder::new("core")
        .text("revision", REVISION)
        .text("sbcl", &sbcl.key.to_string())
        .text("heap", HEAP_MEGABYTES)
        .files(lisp, &sources)?
        .files(include, &header)?
        .finish();
    let stage = sbcl.platform.stage("core");
    let directory = cache.get_or_build(&stage, &key, progress, |context| {
        progress.say(format_args!("saving the core; log: {}", context.log.path().display()));
        // SBCL puts objects at addresses that depend on the lengths of paths, so a core made from the sources in the checkout
        // would depend on the checkout's path.
        files::copy(lisp, &context.scratch.join("lisp"), &sources)?;
        files::copy(include, &context.scratch.join("ffi"), &header)?;
        save_core(sbcl, context)
    })?;
    cache.prune(&stage, KEPT_VERSIONS);
    Ok(CoreFiles { core: directory.join(FILE_NAME), host: directory.join(HOST_FASL_NAME) })
}

/// Returns the names, relative to the directory `lisp`, of the files that the Lisp side consists of.
pub(crate) fn lisp_files(lisp: &Path) -> Result<Vec<PathBuf>, Error> {
    let names = files::list(lisp, |_| true)?;
    Ok(names.into_iter().filter(|name| files::has_extension(name, &["lisp", "asd", "sexp"])).collect())
}

fn save_core(sbcl: &Sbcl, context: &StageContext<'_>) -> Result<(), Error> {
    let step = "saving the core";
    let (fasls, home) = (context.scratch.join("fasl"), context.scratch.join("home"));
    for directory in [&fasls, &home] {
        std::fs::create_dir(directory).context("creating", directory)?;
    }
    let (output, host) = (context.result.join(FILE_NAME), context.result.join(HOST_FASL_NAME));
    let mut command = process::cleaned(sbcl.platform.command(sbcl.program()));
    sbcl.bare().add_arguments(&mut command);
    command.arg("--load").arg(context.scratch.join("lisp").join(BUILD_FILE)).current_dir(&context.scratch);
    // With the real home directory, the user's own Lisp configuration would get into the core.
    command.env("HOME", &home);
    // SBCL records this date for each compiled file, instead of the time at which the file was checked out.
    command.env("SOURCE_DATE_EPOCH", "0");
    command.env(CORE_OUTPUT_VARIABLE, &output).env(HOST_OUTPUT_VARIABLE, &host).env(FASL_DIR_VARIABLE, &fasls);
    context.log.run(step, &mut command, context.progress)?;
    for file in [output, host] {
        if !file.is_file() {
            return Err(Error::MissingResult { step: step.to_owned(), file, log: context.log.path().to_owned() });
        }
    }
    Ok(())
}
