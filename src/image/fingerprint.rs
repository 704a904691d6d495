//! Fingerprints of saved cores, to check that a core has not changed since it was saved.
//!
//! Reading a core takes longer than booting it, so a file with the original device, inode and modification time counts
//! as unchanged. A core that was copied or unpacked is read, and its checksum is compared. Fingerprints guard against
//! accidents only: whoever can write a core can also write its fingerprint.

use std::fs::{File, Metadata};
use std::hash::Hasher;
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// Number of bytes of a file that are read at a time.
const CHUNK_SIZE: usize = 1 << 20;

/// Identity and content of a file: device, inode, modification time, and a checksum (XXH3) of its beginning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fingerprint {
    device: u64,
    inode: u64,
    /// The modification time: seconds since 1970, and nanoseconds within the second.
    modified: (i64, i64),
    checksum: u64,
}

impl Fingerprint {
    /// Computes the fingerprint of a file's first `bytes` bytes, which must no longer change.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or has fewer than `bytes` bytes.
    pub(crate) fn compute(file: &mut File, bytes: u64) -> io::Result<Self> {
        Ok(Self { checksum: checksum(file, bytes)?, ..Self::without_checksum(&file.metadata()?) })
    }

    /// Replaces the modification time by `modified`, which the caller then sets on the file.
    pub(crate) fn with_modified(self, modified: jiff::Timestamp) -> Self {
        Self { modified: (modified.as_second(), i64::from(modified.subsec_nanosecond())), ..self }
    }

    /// Returns the fingerprint of a copy of the file. `metadata` is the metadata of the copy.
    pub(crate) fn for_copy(&self, metadata: &Metadata) -> Self {
        Self { checksum: self.checksum, ..Self::without_checksum(metadata) }
    }

    fn without_checksum(metadata: &Metadata) -> Self {
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Self { device: metadata.dev(), inode: metadata.ino(), modified, checksum: 0 }
    }

    /// Returns true if `metadata` has the fingerprint's device, inode and modification time.
    pub(crate) fn is_unchanged(&self, metadata: &Metadata) -> bool {
        *self == self.for_copy(metadata)
    }

    /// Returns true if the first `bytes` bytes of `file` have the fingerprint's checksum. `file` may be a copy.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read. For a file that is too short, returns false, not an error.
    pub(crate) fn matches(&self, file: &mut File, bytes: u64) -> io::Result<bool> {
        match checksum(file, bytes) {
            Ok(checksum) => Ok(checksum == self.checksum),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Computes the checksum of a file's first `bytes` bytes.
fn checksum(file: &mut File, bytes: u64) -> io::Result<u64> {
    file.rewind()?;
    let mut hasher = XxHash3_64::new();
    let mut left = bytes;
    let mut chunk = vec![0; CHUNK_SIZE];
    while left > 0 {
        let size = usize::try_from(left).map_or(CHUNK_SIZE, |left| left.min(CHUNK_SIZE));
        file.read_exact(&mut chunk[..size])?;
        hasher.write(&chunk[..size]);
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
    fn a_copied_core_is_verified_by_its_checksum_and_the_original_by_its_metadata() {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-seal-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let (path, copy) = (directory.join("core"), directory.join("copy"));
        fs::write(&path, vec![7; CHUNK_SIZE + 100]).unwrap();
        let bytes = CHUNK_SIZE as u64 + 50;
        let fingerprint = Fingerprint::compute(&mut File::open(&path).unwrap(), bytes).unwrap();
        let is_unchanged = |path| fingerprint.is_unchanged(&fs::metadata(path).unwrap());
        let matches = |path| fingerprint.matches(&mut File::open(path).unwrap(), bytes).unwrap();
        assert!(is_unchanged(&path) && matches(&path));
        fs::copy(&path, &copy).unwrap();
        assert!(!is_unchanged(&copy) && matches(&copy));
        // Bytes after the fingerprinted bytes may change.
        let change = |at: u64| {
            let mut file = File::options().write(true).open(&copy).unwrap();
            file.seek(SeekFrom::Start(at)).unwrap();
            file.write_all(&[8]).unwrap();
        };
        change(bytes);
        assert!(matches(&copy));
        change(bytes - 1);
        assert!(!matches(&copy));
        fs::write(&copy, "short").unwrap();
        assert!(!matches(&copy));
        // With another modification time, the original file no longer counts as unchanged.
        let later = jiff::Timestamp::UNIX_EPOCH;
        File::options().write(true).open(&path).unwrap().set_modified(later.into()).unwrap();
        assert!(!is_unchanged(&path));
        assert!(fingerprint.with_modified(later).is_unchanged(&fs::metadata(&path).unwrap()));
        fs::remove_dir_all(&directory).unwrap();
    }
}
