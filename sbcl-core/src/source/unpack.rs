//! Unpacks a source into a tree in which SBCL's build can run.

use std::path::{Path, PathBuf};

use super::{Source, git};
use crate::cache::StageContext;
use crate::error::{Error, IoContext};
use crate::{files, pin, process};

/// Unpacks the source of this version into `tree`, an existing empty directory.
pub(crate) fn unpack(source: &Source, version: &str, tree: &Path, context: &StageContext<'_>) -> Result<(), Error> {
    match source {
        Source::Archive(archive) => untar(archive, tree, context)?,
        Source::Repository(repository) => {
            let archive = context.scratch.join("source.tar");
            git::export(repository, pin::GIT_COMMIT, &archive)
                .map_err(|reason| Error::SourceRefused { provider: repository.display().to_string(), reason })?;
            untar(&archive, tree, context)?;
        }
        Source::Directory(directory) => files::copy(directory, tree, &directory_files(directory)?)?,
    }
    // Debian's archive and the repository lack this file, without which the build asks git for the version.
    let file = tree.join("version.lisp-expr");
    std::fs::write(&file, format!("\"{version}\"\n")).context("writing", &file)
}

/// Returns the files of a source directory, except git's data and the results of earlier builds.
pub(super) fn directory_files(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    files::list(directory, |name| ![".git", "obj", "output"].iter().any(|skipped| name == Path::new(skipped)))
}

fn untar(archive: &Path, tree: &Path, context: &StageContext<'_>) -> Result<(), Error> {
    let mut tar = process::clean_command("tar");
    tar.arg("-xf").arg(archive).arg("-C").arg(tree);
    // Unlike Debian's archive, the archive made by git has no top-level directory.
    if files::has_extension(archive, &["xz"]) {
        tar.arg("--strip-components=1");
    }
    context.log.run("unpacking SBCL's source", &mut tar, context.progress)
}
