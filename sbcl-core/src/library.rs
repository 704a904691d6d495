//! The second stage: `libsbcl` with the C shim linked into it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::cache::{Cache, StageContext};
use crate::error::{Error, IoContext};
use crate::key::KeyBuilder;
use crate::progress::Progress;
use crate::sbcl::Sbcl;
use crate::toolchain::Toolchain;
use crate::{files, process};

/// Revision of this recipe, incremented when it makes a different library from the same input.
const REVISION: &str = "3";

/// Number of versions of this stage that the cache keeps.
const KEPT_VERSIONS: usize = 5;

/// The shim: one C file and the directory of its headers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shim<'a> {
    /// The C file.
    pub(crate) source: &'a Path,
    /// The directory of the C file's headers.
    pub(crate) include: &'a Path,
}

/// Returns the library from the cache, or links it. The library has no debugging symbols; a copy with symbols is in the
/// directory `debug/` next to the library.
pub(crate) fn build(
    cache: &Cache,
    sbcl: &Sbcl,
    shim: Shim<'_>,
    toolchain: &Toolchain,
    progress: &Progress,
) -> Result<PathBuf, Error> {
    let platform = &toolchain.platform;
    let shim_directory = shim.source.parent().unwrap_or(Path::new("."));
    let shim_name = [PathBuf::from(shim.source.file_name().unwrap_or_default())];
    let key = KeyBuilder::new("library")
        .text("revision", REVISION)
        .text("sbcl", &sbcl.key.to_string())
        .files(shim_directory, &shim_name)?
        .files(shim.include, &headers(shim.include)?)?
        .finish();
    let directory = cache.get_or_build(&platform.stage("library"), &key, progress, |context| {
        progress.say("linking libsbcl");
        link_library(sbcl, shim, toolchain, context)
    })?;
    cache.prune(&platform.stage("library"), KEPT_VERSIONS);
    Ok(directory.join(platform.library_name()))
}

/// Returns the headers that the shim can include.
pub(crate) fn headers(include: &Path) -> Result<Vec<PathBuf>, Error> {
    let names = files::list(include, |_| true)?;
    Ok(names.into_iter().filter(|name| files::has_extension(name, &["h"])).collect())
}

fn link_library(sbcl: &Sbcl, shim: Shim<'_>, toolchain: &Toolchain, context: &StageContext<'_>) -> Result<(), Error> {
    let platform = &toolchain.platform;
    let runtime = sbcl.runtime_directory();
    let variables = MakeVariables::read(&runtime.join("sbcl.mk"))?;
    let object = context.scratch.join("shim.o");
    // The shim is compiled with SBCL's own flags, so that the shim and the runtime agree on the layout of structures.
    let mut compile = toolchain.compiler_command();
    compile.args(["-fPIC", "-c", "-I"]).arg(&runtime).arg("-I").arg(shim.include);
    compile.args(variables.words("CFLAGS").filter(|flag| *flag != "-fno-pie"));
    compile.arg(shim.source).arg("-o").arg(&object);
    context.log.run("compiling the shim", &mut compile, context.progress)?;

    let name = platform.library_name();
    let debug = context.result.join("debug");
    std::fs::create_dir(&debug).context("creating", &debug)?;
    let library = debug.join(name);
    let mut link = toolchain.compiler_command();
    link.arg("-shared").arg("-o").arg(&library).args(sbcl.objects()?).arg(&object);
    if !platform.is_macos() {
        // The shim determines where SBCL looks for an embedded core.
        link.arg("-Wl,--wrap=os_get_runtime_executable_path");
        // The shim enables interrupts for a garbage collection in which a signal could make SBCL end the process.
        link.arg("-Wl,--wrap=maybe_gc");
        // The shim intercepts SBCL's installation of signal handlers, so that the host decides which signals SBCL handles.
        link.arg("-Wl,--wrap=sigaction");
        // The shim keeps a copy of the process, which saves an image, from running code of the host when the copy ends.
        link.arg("-Wl,--wrap=exit");
        if platform.arch == "aarch64" {
            // The shim clears unused stacks without writing to them.
            link.args(["-Wl,--wrap=scrub_control_stack", "-Wl,--wrap=scrub_control_stacks"]);
        }
        // With this option, a missing symbol makes the build fail, rather than the first call.
        link.arg("-Wl,-z,defs");
    }
    link.args(variables.words("LIBS"));
    context.log.run("linking libsbcl", &mut link, context.progress)?;

    // On macOS a full strip would remove the exported names, too.
    let mut strip = process::clean_command(&toolchain.strip());
    strip.arg(if platform.is_macos() { "-x" } else { "--strip-unneeded" });
    strip.arg("-o").arg(context.result.join(name)).arg(&library);
    context.log.run("stripping libsbcl", &mut strip, context.progress)
}

/// The variables of `sbcl.mk`, the makefile in which SBCL's build records its flags.
struct MakeVariables(HashMap<String, String>);

impl MakeVariables {
    fn read(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).context("reading", path)?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once('='));
        Self(lines.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    fn words(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.get(name).map(String::as_str).unwrap_or_default().split_whitespace()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_parsed_from_sbcl_mk() {
        let flags = MakeVariables::parse("CC=cc\nCFLAGS=-g -DX=1  -O3\nLIBS=-ldl -lm\n");
        assert_eq!(flags.words("CFLAGS").collect::<Vec<_>>(), ["-g", "-DX=1", "-O3"]);
        assert_eq!(flags.words("LIBS").collect::<Vec<_>>(), ["-ldl", "-lm"]);
        assert_eq!(flags.words("ABSENT").count(), 0);
    }
}
