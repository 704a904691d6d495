//! The source archive from Debian's pool, through the mirror that this machine's apt uses.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{LookupOutcome, Provider, Source, verify};
use crate::progress::Progress;
use crate::{files, pin, process};

/// Time limit for apt to list its mirrors.
const MIRROR_LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// Time limit for the download of the archive.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(600);

/// Apt's own downloader, which uses apt's proxies and exists wherever apt does.
const APT_HELPER: &str = "/usr/lib/apt/apt-helper";

/// The provider that downloads from Debian's pool.
pub(super) struct DebianProvider {
    sources: PathBuf,
}

impl DebianProvider {
    /// Creates the provider, which downloads into this directory.
    pub(super) fn new(sources: &Path) -> Self {
        Self { sources: sources.to_owned() }
    }

    fn fetch(&self, mirror: &str, progress: &Progress) -> Result<PathBuf, String> {
        let address = archive_address(mirror);
        progress.say(format_args!("fetching {address}"));
        let partial = self.sources.join(format!("{}.part-{}", pin::ARCHIVE, std::process::id()));
        let accepted = download(&address, &partial).and_then(|()| publish_if_pinned(&partial, &self.sources));
        let _ = std::fs::remove_file(&partial);
        accepted.map_err(|reason| format!("{address}: {reason}"))
    }
}

impl Provider for DebianProvider {
    fn name(&self) -> String {
        "Debian's pool".to_owned()
    }

    fn find(&self, progress: &Progress) -> LookupOutcome {
        let mirrors = match mirrors() {
            Ok(mirrors) if mirrors.is_empty() => {
                return LookupOutcome::Missing("no HTTP mirror is configured for apt".to_owned());
            }
            Ok(mirrors) => mirrors,
            Err(reason) => return LookupOutcome::Missing(format!("apt's mirrors are unknown: {reason}")),
        };
        let mut reasons = Vec::new();
        for mirror in mirrors {
            match self.fetch(&mirror, progress) {
                Ok(archive) => return LookupOutcome::Found(Source::Archive(archive)),
                Err(reason) => reasons.push(reason),
            }
        }
        LookupOutcome::Missing(reasons.join("; "))
    }
}

/// Returns the base addresses of the mirrors in apt's configuration.
fn mirrors() -> Result<Vec<String>, String> {
    if !files::is_program("apt-get") {
        return Err("apt-get is not installed".to_owned());
    }
    let mut ask = Command::new("apt-get");
    ask.args(["indextargets", "--format", "$(REPO_URI)"]);
    process::run_with_timeout(MIRROR_LIST_TIMEOUT, &mut ask).map(|listed| mirror_addresses(&listed))
}

/// Returns the distinct HTTP and HTTPS addresses in apt's output, in the same order.
fn mirror_addresses(listed: &str) -> Vec<String> {
    let mut bases = Vec::new();
    for line in listed.lines().map(|line| line.trim().to_owned()) {
        if (line.starts_with("http://") || line.starts_with("https://")) && !bases.contains(&line) {
            bases.push(line);
        }
    }
    bases
}

fn archive_address(mirror: &str) -> String {
    format!("{}/{}/{}", mirror.trim_end_matches('/'), pin::ARCHIVE_POOL, pin::ARCHIVE)
}

fn download(address: &str, target: &Path) -> Result<(), String> {
    let mut command = if files::is_program(APT_HELPER) {
        let mut command = Command::new(APT_HELPER);
        command.args(["download-file", address]).arg(target);
        command
    } else if files::is_program("curl") {
        let mut command = Command::new("curl");
        command.args(["--fail", "--silent", "--show-error", "--location", "--connect-timeout", "10", "--output"]);
        command.arg(target).arg(address);
        command
    } else if files::is_program("wget") {
        let mut command = Command::new("wget");
        command.args(["--no-verbose", "--connect-timeout=10", "--tries=2", "--output-document"]);
        command.arg(target).arg(address);
        command
    } else {
        return Err("neither apt-helper nor curl nor wget is installed".to_owned());
    };
    process::run_with_timeout(TRANSFER_TIMEOUT, &mut command).map(|_| ())
}

/// Moves a downloaded file to its final name if it is the pinned archive.
fn publish_if_pinned(partial: &Path, sources: &Path) -> Result<PathBuf, String> {
    verify::archive(partial)?;
    let archive = sources.join(pin::ARCHIVE);
    std::fs::rename(partial, &archive).map_err(|error| error.to_string())?;
    Ok(archive)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn mirror_list_keeps_http_addresses_without_duplicates() {
        let listed = "http://a.example/debian/\ncdrom:[x]/\nhttp://a.example/debian/\nhttps://b.example/d\n";
        assert_eq!(mirror_addresses(listed), ["http://a.example/debian/", "https://b.example/d"]);
    }

    #[test]
    fn archive_address_is_in_the_pool_under_the_base_url() {
        let expected = format!("http://a.example/debian/pool/main/s/sbcl/{}", pin::ARCHIVE);
        assert_eq!(archive_address("http://a.example/debian/"), expected);
        assert_eq!(archive_address("http://a.example/debian"), expected);
    }

    #[test]
    fn a_download_with_a_wrong_sha256_is_refused() {
        let directory = Scratch::new("debian");
        let partial = directory.join("partial");
        std::fs::write(&partial, "an error page").unwrap();
        let reason = publish_if_pinned(&partial, &directory).unwrap_err();
        assert!(reason.contains("SHA-256"), "{reason}");
        assert!(!directory.join(pin::ARCHIVE).exists());
    }
}
