//! A stage's list of files. A stage without one, or one that lacks a file of it, is not complete: a build that was
//! killed, a crash of the machine or a person may have left it so.

use std::fs::File;
use std::path::Path;

use crate::error::{Error, IoContext};
use crate::files;

const NAME: &str = ".manifest";

/// Lists the directory's files with their sizes, and has all of them on the disk before the list is.
pub(crate) fn write(directory: &Path) -> Result<(), Error> {
    let mut lines = String::new();
    for name in files::list(directory, |_| true)? {
        let path = directory.join(&name);
        let file = File::open(&path).doing("opening", &path)?;
        file.sync_all().doing("writing", &path)?;
        let size = file.metadata().doing("reading", &path)?.len();
        lines.push_str(&format!("{size} {}\n", name.display()));
    }
    let path = directory.join(NAME);
    std::fs::write(&path, lines).doing("writing", &path)?;
    let file = File::open(&path).doing("opening", &path)?;
    file.sync_all().doing("writing", &path)
}

/// Whether the directory has its list and every file of it in full length.
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
