//! Whether a saved core is still what was written.
//!
//! To read one whole takes longer than to boot it: where the very file that was written still lies, it is taken for what it
//! was. One that comes from elsewhere, copied or unpacked, is read and compared with its checksum. That is against
//! accidents: whoever can write a core can write a seal.

use std::fs::{File, Metadata};
use std::hash::Hasher;
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// How much of a file is read at once, in bytes.
const PIECE: usize = 1 << 20;

/// What a file was when it was written: which one, when, and a checksum (XXH3) of its beginning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seal {
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds since 1970.
    modified: (i64, i64),
    checksum: u64,
}

impl Seal {
    /// That of a file's first `bytes`, which nobody writes any more.
    ///
    /// # Errors
    /// It cannot be read, or is not as long.
    pub(crate) fn of(file: &mut File, bytes: u64) -> io::Result<Self> {
        Ok(Self { checksum: checksum(file, bytes)?, ..Self::place(&file.metadata()?) })
    }

    /// The same file as if it had last been written at `modified`, which is then to be set.
    pub(crate) fn at(self, modified: jiff::Timestamp) -> Self {
        Self { modified: (modified.as_second(), i64::from(modified.subsec_nanosecond())), ..self }
    }

    /// That of the same content in another file.
    pub(crate) fn moved_to(&self, metadata: &Metadata) -> Self {
        Self { checksum: self.checksum, ..Self::place(metadata) }
    }

    fn place(metadata: &Metadata) -> Self {
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Self { device: metadata.dev(), inode: metadata.ino(), modified, checksum: 0 }
    }

    /// True when `metadata` is of the very file that was written, as it was.
    pub(crate) fn is_in_place(&self, metadata: &Metadata) -> bool {
        *self == self.moved_to(metadata)
    }

    /// True when the first `bytes` of a file are what was written, wherever it lies.
    ///
    /// # Errors
    /// It cannot be read.
    pub(crate) fn holds(&self, file: &mut File, bytes: u64) -> io::Result<bool> {
        match checksum(file, bytes) {
            Ok(checksum) => Ok(checksum == self.checksum),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The checksum of a file's first `bytes`.
fn checksum(file: &mut File, bytes: u64) -> io::Result<u64> {
    file.rewind()?;
    let mut hasher = XxHash3_64::new();
    let mut left = bytes;
    let mut piece = vec![0; PIECE];
    while left > 0 {
        let size = usize::try_from(left).map_or(PIECE, |left| left.min(PIECE));
        file.read_exact(&mut piece[..size])?;
        hasher.write(&piece[..size]);
        left -= size as u64;
    }
    Ok(hasher.finish())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{SeekFrom, Write};

    use super::*;

    #[test]
    fn a_copy_is_read_and_what_lies_where_it_was_is_not() {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-seal-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let (path, copy) = (directory.join("core"), directory.join("copy"));
        fs::write(&path, vec![7; PIECE + 100]).unwrap();
        let bytes = PIECE as u64 + 50;
        let seal = Seal::of(&mut File::open(&path).unwrap(), bytes).unwrap();
        let is_in_place = |path| seal.is_in_place(&fs::metadata(path).unwrap());
        let holds = |path| seal.holds(&mut File::open(path).unwrap(), bytes).unwrap();
        assert!(is_in_place(&path) && holds(&path));
        fs::copy(&path, &copy).unwrap();
        assert!(!is_in_place(&copy) && holds(&copy));
        // What comes after these is not meant.
        let change = |at: u64| {
            let mut file = File::options().write(true).open(&copy).unwrap();
            file.seek(SeekFrom::Start(at)).unwrap();
            file.write_all(&[8]).unwrap();
        };
        change(bytes);
        assert!(holds(&copy));
        change(bytes - 1);
        assert!(!holds(&copy));
        fs::write(&copy, "short").unwrap();
        assert!(!holds(&copy));
        // The same file, written again.
        let later = jiff::Timestamp::UNIX_EPOCH;
        File::options().write(true).open(&path).unwrap().set_modified(later.into()).unwrap();
        assert!(!is_in_place(&path));
        assert!(seal.at(later).is_in_place(&fs::metadata(&path).unwrap()));
        fs::remove_dir_all(&directory).unwrap();
    }
}
