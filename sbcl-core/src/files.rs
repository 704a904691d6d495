//! Functions that list and copy directory trees and look for executable programs.

use std::path::{Path, PathBuf};

use crate::error::{Error, IoContext};

/// Lists the files under a directory, as sorted names relative to it. `wanted` returns true for the names of the files
/// to list and of the directories to enter. Symbolic links are followed; broken ones are omitted.
pub(crate) fn list(directory: &Path, wanted: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>, Error> {
    let mut names = Vec::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(folder) = pending.pop() {
        let path = directory.join(&folder);
        for entry in path.read_dir().context("listing", &path)? {
            let name = folder.join(entry.context("listing", &path)?.file_name());
            if !wanted(&name) {
                continue;
            }
            match std::fs::metadata(directory.join(&name)) {
                Ok(metadata) if metadata.is_dir() => pending.push(name),
                Ok(metadata) if metadata.is_file() => names.push(name),
                _ => {}
            }
        }
    }
    names.sort();
    Ok(names)
}

/// Copies the files `names`, which are relative to both directories, and creates directories as needed.
pub(crate) fn copy(from: &Path, to: &Path, names: &[PathBuf]) -> Result<(), Error> {
    for name in names {
        let target = to.join(name);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent).context("creating", parent)?;
        }
        std::fs::copy(from.join(name), &target).context("copying to", &target)?;
    }
    Ok(())
}

/// Returns true if the name has one of these extensions, which are given without the dot.
pub(crate) fn has_extension(name: &Path, extensions: &[&str]) -> bool {
    let extension = name.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| extensions.contains(&extension))
}

/// Returns true if `name` is the path of an executable file, or the name of an executable file in `PATH`.
pub(crate) fn is_program(name: &str) -> bool {
    if name.contains('/') {
        return is_executable(Path::new(name));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| is_executable(&directory.join(name)))
}

#[cfg(unix)]
fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

#[cfg(not(unix))]
fn is_executable(path: &Path) -> bool {
    path.is_file()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn listing_is_sorted_recursive_and_pruned() {
        let directory = Scratch::new("list");
        for name in ["b.lisp", "a/c.lisp", "skip/d.lisp"] {
            let path = directory.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let names = list(&directory, |name| name != Path::new("skip")).unwrap();
        assert_eq!(names, [Path::new("a/c.lisp"), Path::new("b.lisp")]);
    }

    #[test]
    fn is_program_finds_names_on_path_and_absolute_paths() {
        assert!(is_program("sh"));
        assert!(is_program("/bin/sh"));
        assert!(!is_program("no-such-program-anywhere"));
        assert!(!is_program("/etc/passwd"));
    }
}
