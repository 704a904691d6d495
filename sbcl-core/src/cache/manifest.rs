//! The manifest of a stage: a list of its files. A stage without a manifest, or without one of the files listed there,
//! is incomplete: the build was killed, the machine crashed, or a person changed it.

use std::fs::File;
use std::path::Path;

use crate::error::{Error, IoContext};
use crate::files;

const NAME: &str = ".manifest";

/// Writes the directory's manifest, with sizes, after all files have been synced to the disk.
pub(crate) fn write(directory: &Path) -> Result<(), Error> {
    let mut lines = String::new();
    for name in files::list(directory, |_| true)? {
        let path = directory.join(&name);
        let file = File::open(&path).context("opening", &path)?;
        file.sync_all().context("writing", &path)?;
        let size = file.metadata().context("reading", &path)?.len();
        lines.push_str(&format!("{size} {}\n", name.display()));
    }
    let path = directory.join(NAME);
    std::fs::write(&path, lines).context("writing", &path)?;
    let file = File::open(&path).context("opening", &path)?;
    file.sync_all().context("writing", &path)
}

/// Returns true if the directory has a manifest and every file listed there in full length.
pub(crate) fn is_complete(directory: &Path) -> bool {
    let Ok(lines) = std::fs::read_to_string(directory.join(NAME)) else {
        return false;
    };
    lines.lines().all(|line| {
        line.split_once(' ').is_some_and(|(size, name)| {
            let found = std::fs::metadata(directory.join(name));
            found.is_ok_and(|data| data.is_file() && Ok(data.len()) == size.parse())
        })
    })
}
