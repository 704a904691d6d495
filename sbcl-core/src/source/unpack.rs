//! Laying out a source as a tree that SBCL's build can work in.

use std::path::{Path, PathBuf};

use super::{Source, git};
use crate::cache::Work;
use crate::error::{Error, IoContext};
use crate::{files, pin, process};

/// Lays the source out in `tree`, a directory that is there and empty.
pub(crate) fn unpack(source: &Source, tree: &Path, work: &Work<'_>) -> Result<(), Error> {
    match source {
        Source::Archive(archive) => untar(archive, tree, work)?,
        Source::Repository(repository) => {
            let archive = work.scratch.join("source.tar");
            git::export(repository, pin::GIT_COMMIT, &archive)
                .map_err(|reason| Error::SourceRefused { way: repository.display().to_string(), reason })?;
            untar(&archive, tree, work)?;
        }
        Source::Directory(directory) => files::copy(directory, tree, &directory_files(directory)?)?,
    }
    // Neither Debian's archive nor the repository has this file, without which the build asks git.
    let version = tree.join("version.lisp-expr");
    std::fs::write(&version, format!("\"{}\"\n", pin::VERSION)).doing("writing", &version)
}

/// The files of a source directory, without what a build or git left there.
pub(super) fn directory_files(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    files::list(directory, |name| ![".git", "obj", "output"].iter().any(|skipped| name == Path::new(skipped)))
}

fn untar(archive: &Path, tree: &Path, work: &Work<'_>) -> Result<(), Error> {
    let mut tar = process::bare("tar");
    tar.arg("-xf").arg(archive).arg("-C").arg(tree);
    // Git's archive has no directory around the files.
    if files::has_extension(archive, &["xz"]) {
        tar.arg("--strip-components=1");
    }
    work.log.run("unpacking SBCL's source", &mut tar, work.progress)
}
