//! Compares a source with the pin.

use std::path::Path;

use crate::{key, pin};

/// Checks that a file has the SHA-256 of the pinned archive. The error says what is wrong with the file.
pub(super) fn archive(path: &Path) -> Result<(), String> {
    let found = key::file_sha256(path).map_err(|error| error.to_string())?;
    if found == pin::ARCHIVE_SHA256 {
        Ok(())
    } else {
        Err(format!("the SHA-256 of {} is {found}, not {}", path.display(), pin::ARCHIVE_SHA256))
    }
}

/// Checks that a directory is SBCL's source of the pinned version. The error says what is wrong with the directory.
pub(super) fn directory(path: &Path) -> Result<(), String> {
    if !path.join("make.sh").is_file() {
        return Err(format!("{} is not SBCL's source: it has no make.sh", path.display()));
    }
    match version(path) {
        Some(version) if version == pin::VERSION => Ok(()),
        Some(version) => Err(format!("{} is SBCL {version}, not {}", path.display(), pin::VERSION)),
        None => Err(format!("neither version.lisp-expr nor NEWS in {} states SBCL's version", path.display())),
    }
}

/// Returns the version in `version.lisp-expr`, or else the newest version in NEWS: a checkout of a tag has only NEWS.
pub(super) fn version(path: &Path) -> Option<String> {
    let read = |name: &str| std::fs::read_to_string(path.join(name)).ok();
    let stated = read("version.lisp-expr").and_then(|text| {
        let mut code = text.lines().filter(|line| !line.starts_with(';'));
        code.find_map(|line| Some(line.trim().strip_prefix('"')?.strip_suffix('"')?.to_owned()))
    });
    stated.or_else(|| {
        let news = read("NEWS")?;
        let newest = news.lines().find_map(|line| line.strip_prefix("changes in sbcl-"))?;
        newest.split_whitespace().next().map(str::to_owned)
    })
}
