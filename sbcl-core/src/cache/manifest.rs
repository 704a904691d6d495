//! The manifest of a stage: a list of its files with their sizes. A stage is incomplete if it has no manifest, or if a
//! file listed there is missing or has another size: the build was killed, the machine crashed, or someone changed the
//! files.

use std::fs::File;
use std::path::Path;

use crate::error::{Error, IoContext};
use crate::files;

const FILE_NAME: &str = ".manifest";

/// Syncs all files of the directory to the disk, then writes its manifest.
pub(crate) fn write(directory: &Path) -> Result<(), Error> {
    let mut lines = String::new();
    for name in files::list(directory, |_| true)? {
        let path = directory.join(&name);
        let file = File::open(&path).context("opening", &path)?;
        file.sync_all().context("writing", &path)?;
        let size = file.metadata().context("reading", &path)?.len();
        lines.push_str(&format!("{size} {}\n", name.display()));
    }
    let path = directory.join(FILE_NAME);
    std::fs::write(&path, lines).context("writing", &path)?;
    let file = File::open(&path).context("opening", &path)?;
    file.sync_all().context("writing", &path)
}

/// Returns true if the directory has a manifest, and has each file that the manifest lists, with the listed size.
pub(crate) fn is_complete(directory: &Path) -> bool {
    let Ok(lines) = std::fs::read_to_string(directory.join(FILE_NAME)) else {
        return false;
    };
    lines.lines().all(|line| {
        line.split_once(' ').is_some_and(|(size, name)| {
            let found = std::fs::metadata(directory.join(name));
            found.is_ok_and(|data| data.is_file() && Ok(data.len()) == size.parse())
        })
    })
}
