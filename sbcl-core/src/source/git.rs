//! The source from upstream's git repository, at the pinned commit.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{LookupOutcome, Provider, Source};
use crate::progress::Progress;
use crate::{files, pin, process};

/// Time limit for a repository to report the commit that the tag names.
const LS_REMOTE_TIMEOUT: Duration = Duration::from_secs(6);

/// Time limit for fetching the commit.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(600);

/// Time limit for a git command that does not use the network.
const LOCAL_TIMEOUT: Duration = Duration::from_secs(120);

/// Environment variables that make git use another repository. The variables are set, for instance, if a git hook runs this
/// program.
const REPOSITORY_VARIABLES: [&str; 6] = [
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
];

/// The provider that fetches from upstream's repository or its mirror.
pub(super) struct GitProvider {
    sources: PathBuf,
    remotes: Vec<String>,
    commit: String,
}

/// Returns the path of the fetched repository in the directory `sources`.
pub(super) fn repository_path(sources: &Path) -> PathBuf {
    sources.join(format!("{}.git", pin::GIT_TAG))
}

/// Checks that the pinned tag of a bare repository names this commit, and that the repository has all of the commit's
/// contents. The error says what is wrong. A commit's name is the hash of its contents, and `fsck` computes the hashes
/// again.
pub(super) fn verify_commit(repository: &Path, commit: &str) -> Result<(), String> {
    let found = run_git(repository, &["rev-parse", "--verify", &tag_commit()])?;
    if found != commit {
        return Err(format!("tag {} is commit {found}, not {commit}", pin::GIT_TAG));
    }
    run_git(repository, &["fsck", "--full", "--no-dangling", "--no-progress"]).map(|_| ())
}

/// Writes the commit's files into a tar archive.
pub(super) fn export(repository: &Path, commit: &str, archive: &Path) -> Result<(), String> {
    let output = format!("--output={}", archive.display());
    run_git(repository, &["archive", "--format=tar", &output, commit]).map(|_| ())
}

fn tag_ref() -> String {
    format!("refs/tags/{}", pin::GIT_TAG)
}

fn tag_commit() -> String {
    format!("{}^{{commit}}", tag_ref())
}

fn git_command() -> Command {
    let mut command = Command::new("git");
    for name in REPOSITORY_VARIABLES {
        command.env_remove(name);
    }
    command.env("GIT_TERMINAL_PROMPT", "0").env("LC_ALL", "C.UTF-8");
    // With these options, git abandons a connection that has stalled.
    command.args(["-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=20"]);
    command
}

fn run_git(repository: &Path, arguments: &[&str]) -> Result<String, String> {
    process::run_with_timeout(LOCAL_TIMEOUT, git_command().arg("--git-dir").arg(repository).args(arguments))
}

impl GitProvider {
    /// Creates the provider, which fetches into this directory.
    pub(super) fn new(sources: &Path) -> Self {
        Self {
            sources: sources.to_owned(),
            remotes: pin::GIT_REMOTES.map(str::to_owned).to_vec(),
            commit: pin::GIT_COMMIT.to_owned(),
        }
    }

    fn fetch(&self, remote: &str, progress: &Progress) -> Result<PathBuf, String> {
        let (tag, peeled) = (tag_ref(), format!("{}^{{}}", tag_ref()));
        let listed =
            process::run_with_timeout(LS_REMOTE_TIMEOUT, git_command().args(["ls-remote", remote, &tag, &peeled]))?;
        if !listed.lines().any(|line| line.starts_with(&self.commit)) {
            return Err(format!(
                "the tag {} does not point to the pinned commit {}; git ls-remote printed {listed:?}",
                pin::GIT_TAG,
                self.commit
            ));
        }
        progress.say(format_args!("fetching {} from {remote}", pin::GIT_TAG));
        let temporary = self.sources.join(format!("fetching-{}.git", std::process::id()));
        let fetched = self.fetch_into(&temporary, remote, &tag);
        let published = fetched.and_then(|()| {
            let target = repository_path(&self.sources);
            // If the repository exists already, `CacheProvider` has found it unusable, so replace it.
            let _ = std::fs::remove_dir_all(&target);
            let renamed = std::fs::rename(&temporary, &target);
            renamed.map(|()| target).map_err(|error| error.to_string())
        });
        let _ = std::fs::remove_dir_all(&temporary);
        published
    }

    fn fetch_into(&self, directory: &Path, remote: &str, tag: &str) -> Result<(), String> {
        process::run_with_timeout(LOCAL_TIMEOUT, git_command().args(["init", "--quiet", "--bare"]).arg(directory))?;
        let refspec = format!("{tag}:{tag}");
        let mut fetch = git_command();
        fetch.arg("--git-dir").arg(directory);
        fetch.args(["fetch", "--quiet", "--no-tags", "--depth", "1", remote, &refspec]);
        process::run_with_timeout(TRANSFER_TIMEOUT, &mut fetch)?;
        verify_commit(directory, &self.commit)
    }
}

impl Provider for GitProvider {
    fn name(&self) -> String {
        "upstream's git repository".to_owned()
    }

    fn find(&self, progress: &Progress) -> LookupOutcome {
        if !files::is_program("git") {
            return LookupOutcome::Missing("git is not installed".to_owned());
        }
        let mut reasons = Vec::new();
        for remote in &self.remotes {
            match self.fetch(remote, progress) {
                Ok(repository) => return LookupOutcome::Found(Source::Repository(repository)),
                Err(reason) => reasons.push(format!("{remote}: {reason}")),
            }
        }
        LookupOutcome::Missing(reasons.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    /// Creates a repository with one commit, tagged with the pinned name, and returns the commit.
    fn upstream(directory: &Path) -> String {
        let run = |arguments: &[&str]| {
            let identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"];
            let mut command = git_command();
            command.arg("-C").arg(directory).args(identity).args(arguments);
            process::run_with_timeout(LOCAL_TIMEOUT, &mut command).unwrap()
        };
        run(&["init", "--quiet"]);
        std::fs::write(directory.join("make.sh"), "echo built\n").unwrap();
        run(&["add", "."]);
        run(&["commit", "--quiet", "-m", "first"]);
        run(&["tag", "-a", "-m", "annotated", pin::GIT_TAG]);
        run(&["rev-parse", "HEAD"])
    }

    fn find(commit: &str, remotes: Vec<String>, sources: &Path) -> LookupOutcome {
        let git = GitProvider { sources: sources.to_owned(), remotes, commit: commit.to_owned() };
        git.find(&Progress::silent())
    }

    #[test]
    fn pinned_commit_is_fetched_from_the_first_working_remote() {
        let (origin, sources) = (Scratch::new("origin"), Scratch::new("git"));
        let commit = upstream(&origin);
        let remotes = vec!["file:///no/such/repository".to_owned(), format!("file://{}", origin.display())];
        let found = find(&commit, remotes, &sources);
        assert_eq!(found, LookupOutcome::Found(Source::Repository(repository_path(&sources))));
        let archive = sources.join("source.tar");
        export(&repository_path(&sources), &commit, &archive).unwrap();
        let tar = std::fs::read(&archive).unwrap();
        assert!(String::from_utf8_lossy(&tar).contains("echo built"));
    }

    #[test]
    fn tag_that_names_another_commit_is_not_used() {
        let (origin, sources) = (Scratch::new("origin"), Scratch::new("git"));
        let commit = upstream(&origin);
        let outcome = find(pin::GIT_COMMIT, vec![format!("file://{}", origin.display())], &sources);
        match outcome {
            LookupOutcome::Missing(reason) => assert!(reason.contains(&commit), "{reason}"),
            other => panic!("used: {other:?}"),
        }
        assert_eq!(sources.read_dir().unwrap().count(), 0);
    }
}
