//! The source that the user names with an environment variable.

use std::path::{Path, PathBuf};

use super::{LookupOutcome, Provider, Source, verify};
use crate::progress::Progress;
use crate::settings;

/// The provider of the directory or archive that the user names.
pub(super) struct NamedProvider {
    path: Option<PathBuf>,
}

impl NamedProvider {
    /// Creates the provider. `path` is the value of `SBCL_MCP_SOURCE`, or `None` if that environment variable is not set.
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        Self { path }
    }
}

impl Provider for NamedProvider {
    fn name(&self) -> String {
        match &self.path {
            Some(path) => format!("{} {}", settings::SOURCE, path.display()),
            None => settings::SOURCE.to_owned(),
        }
    }

    fn find(&self, _: &Progress) -> LookupOutcome {
        let Some(path) = &self.path else {
            return LookupOutcome::Missing("not set".to_owned());
        };
        match verified_source(path) {
            Ok(source) => LookupOutcome::Found(source),
            Err(reason) => LookupOutcome::Refused(reason),
        }
    }
}

fn verified_source(path: &Path) -> Result<Source, String> {
    if !path.is_absolute() {
        Err("this path is not absolute".to_owned())
    } else if path.is_dir() {
        verify::directory(path).map(|()| Source::Directory(path.to_owned()))
    } else if path.is_file() {
        verify::archive(path).map(|()| Source::Archive(path.to_owned()))
    } else {
        Err("there is no such file or directory".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pin;
    use crate::scratch::Scratch;

    fn find(path: &Path) -> LookupOutcome {
        NamedProvider::new(Some(path.to_owned())).find(&Progress::silent())
    }

    fn reason(outcome: LookupOutcome) -> String {
        match outcome {
            LookupOutcome::Refused(reason) => reason,
            other => panic!("not refused: {other:?}"),
        }
    }

    #[test]
    fn an_archive_with_a_wrong_sha256_is_refused() {
        let directory = Scratch::new("named");
        let archive = directory.join(pin::ARCHIVE);
        std::fs::write(&archive, "not SBCL").unwrap();
        let reason = reason(find(&archive));
        assert!(reason.contains("SHA-256"), "{reason}");
    }

    #[test]
    fn a_directory_must_be_of_the_pinned_version() {
        let directory = Scratch::new("named");
        assert!(reason(find(&directory)).contains("make.sh"));
        std::fs::write(directory.join("make.sh"), "").unwrap();
        std::fs::write(directory.join("NEWS"), "changes in sbcl-2.6.3 relative to sbcl-2.6.2:\n").unwrap();
        assert!(reason(find(&directory)).contains("2.6.3"));
        // `version.lisp-expr`, which SBCL's build reads, takes precedence over NEWS.
        let version = format!(";;; \"1.0\"\n\"{}\"\n", pin::VERSION);
        std::fs::write(directory.join("version.lisp-expr"), version).unwrap();
        assert_eq!(find(&directory), LookupOutcome::Found(Source::Directory(directory.to_path_buf())));
    }

    #[test]
    fn relative_or_missing_path_is_refused() {
        assert!(reason(find(Path::new("sbcl"))).contains("absolute"));
        assert!(reason(find(Path::new("/no/such/source"))).contains("no such"));
    }

    #[test]
    fn unset_sbcl_mcp_source_lets_the_next_provider_be_tried() {
        let outcome = NamedProvider::new(None).find(&Progress::silent());
        assert_eq!(outcome, LookupOutcome::Missing("not set".to_owned()));
    }
}
