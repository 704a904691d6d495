//! Keys of cached stages: hashes of everything that a stage depends on.

use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, IoContext};

/// A stage's key: the first 20 hexadecimal digits of a SHA-256.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key(String);

impl Key {
    /// Returns a date derived from the key, in seconds since 1970: before 1988, and so before the date of any source file.
    pub(crate) fn as_timestamp(&self) -> u32 {
        let number = u32::from_str_radix(&self.0[..8], 16).expect("a key consists of hexadecimal digits");
        number >> 3
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A builder of a [`Key`], which hashes a stage's inputs as they are added.
pub(crate) struct KeyBuilder(Sha256);

impl KeyBuilder {
    /// Starts the key of the stage called `stage`.
    pub(crate) fn new(stage: &str) -> Self {
        Self(Sha256::new()).text("stage", stage)
    }

    /// Adds a string under a label.
    pub(crate) fn text(mut self, label: &str, text: &str) -> Self {
        self.add_part(label.as_bytes());
        self.add_part(text.as_bytes());
        self
    }

    /// Adds the contents of files and their `names`, which are relative to `directory`.
    pub(crate) fn files(mut self, directory: &Path, names: &[PathBuf]) -> Result<Self, Error> {
        for name in names {
            let path = directory.join(name);
            let contents = std::fs::read(&path).context("reading", &path)?;
            self.add_part(name.to_string_lossy().as_bytes());
            self.add_part(&contents);
        }
        Ok(self)
    }

    /// Returns the key, a hash of all parts that were added.
    pub(crate) fn finish(self) -> Key {
        let mut digits = hex(&self.0.finalize());
        digits.truncate(20);
        Key(digits)
    }

    // The length comes first, so that moving bytes from one part to the next changes the hash.
    fn add_part(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }
}

/// Returns the SHA-256 of a file, in lower-case hexadecimal digits.
pub(crate) fn file_sha256(path: &Path) -> Result<String, Error> {
    let contents = std::fs::read(path).context("reading", path)?;
    Ok(hex(&Sha256::digest(contents)))
}

/// Returns one digest of the names and contents of files in a directory.
pub(crate) fn directory_digest(directory: &Path, names: &[PathBuf]) -> Result<String, Error> {
    Ok(KeyBuilder::new("directory").files(directory, names)?.finish().to_string())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn boundary_between_label_and_text_changes_the_key() {
        let one = KeyBuilder::new("s").text("a", "bc").finish();
        let other = KeyBuilder::new("s").text("ab", "c").finish();
        assert_ne!(one, other);
        assert_eq!(one, KeyBuilder::new("s").text("a", "bc").finish());
    }

    #[test]
    fn file_name_and_contents_change_the_key() {
        let directory = Scratch::new("key");
        let path = directory.join("a");
        let key = |name: &str| {
            let names = [PathBuf::from(name)];
            KeyBuilder::new("s").files(&directory, &names).unwrap().finish()
        };
        std::fs::write(&path, "one").unwrap();
        std::fs::write(directory.join("b"), "one").unwrap();
        let before = key("a");
        assert_ne!(before, key("b"));
        std::fs::write(&path, "two").unwrap();
        assert_ne!(before, key("a"));
    }

    #[test]
    fn timestamps_differ_between_keys_and_are_before_1988() {
        let stamp = |text| KeyBuilder::new("s").text("a", text).finish().as_timestamp();
        assert_ne!(stamp("one"), stamp("two"));
        assert!(Key("f".repeat(20)).as_timestamp() < 568_000_000);
    }

    #[test]
    fn file_sha256_matches_a_known_digest() {
        let directory = Scratch::new("sha");
        let path = directory.join("abc");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(file_sha256(&path).unwrap(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
