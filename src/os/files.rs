//! Files that other code may have replaced. Code that a session evaluates can write to the directory of its checkpoints,
//! and to the directory of a persistent session. In place of a file, this code may put a FIFO, which blocks a process
//! that opens the FIFO, or a symbolic link to a file elsewhere.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file for reading. Follows no symbolic link at the end of `path`.
///
/// # Errors
/// Returns an error if `path` cannot be opened, or is not a regular file.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    open_unlinked(OpenOptions::new().read(true), path)
}

/// Reads a regular file of at most `max` bytes. Follows no symbolic link at the end of `path`.
///
/// # Errors
/// Returns an error if `path` cannot be read, is not a regular file, or has more than `max` bytes.
pub(crate) fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // The file may grow, so its size at this time is not a bound.
    open(path)?.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(bytes) }
}

/// Creates a file that only its owner can access, in place of any file, FIFO or symbolic link at `path`. The returned
/// file can also be read.
///
/// # Errors
/// Returns an error if the file cannot be created, for instance because `path` is a directory.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path),
    }
}

/// Opens or creates a regular file. Follows no symbolic link at the end of `path`.
///
/// # Errors
/// Returns an error if `path` cannot be opened, or is not a regular file.
pub(crate) fn open_unlinked(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    open_checked(options, libc::O_NOFOLLOW, path)
}

/// Opens or creates a regular file, for a path that the user has chosen: follows symbolic links, but does not wait for
/// the other end of a FIFO.
///
/// # Errors
/// Returns an error if `path` cannot be opened, or is not a regular file.
pub(crate) fn open_regular(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    open_checked(options, 0, path)
}

/// Opens a file without waiting, and refuses it unless it is regular. `flags` are further flags of open(2).
fn open_checked(options: &mut OpenOptions, flags: i32, path: &Path) -> io::Result<File> {
    let not_regular = || io::Error::other("not a regular file");
    let opened = options.custom_flags(libc::O_NONBLOCK | flags).open(path);
    // Opening a FIFO for writing fails while no process reads it.
    let file = opened.map_err(|error| if error.raw_os_error() == Some(libc::ENXIO) { not_regular() } else { error })?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_regular()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn fifos_block_nothing_and_symbolic_links_lead_nowhere() {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-files-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let [plain, link, fifo] = ["plain", "link", "fifo"].map(|name| directory.join(name));
        fs::write(&plain, "12345").unwrap();
        symlink(&plain, &link).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        assert_eq!(read(&plain, 5).unwrap(), b"12345");
        assert_eq!(read(&plain, 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let update = |path: &Path| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            [open_unlinked(&mut options, path), open_regular(&mut options, path)].map(|opened| opened.is_ok())
        };
        assert_eq!(update(&plain), [true, true]);
        assert!(open(&link).is_err());
        assert_eq!(update(&link), [false, true]);
        assert_eq!(open(&fifo).unwrap_err().to_string(), "not a regular file");
        assert_eq!(update(&fifo), [false, false]);
        // Writing to a FIFO that no process reads would block.
        let written = open_regular(OpenOptions::new().write(true), &fifo);
        assert_eq!(written.unwrap_err().to_string(), "not a regular file");
        for path in [&link, &fifo] {
            let created = create(path).unwrap().metadata().unwrap();
            assert!(created.is_file() && created.permissions().mode() & 0o777 == 0o600);
        }
        assert_eq!(fs::read(&plain).unwrap(), b"12345");
        assert!(create(&directory).is_err());
        fs::remove_dir_all(&directory).unwrap();
    }
}
