//! The Lisp libraries that Debian installs, with a cache of their compiled files for each test that loads them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use serde_json::json;

use crate::client::{Scratch, Server};

/// The directory in which Debian installs Lisp systems.
pub(crate) const INSTALLED: &str = "/usr/share/common-lisp/source";

/// The systems that tests load, by the names of their directories.
const SYSTEMS: [&str; 5] = ["alexandria", "esrap", "fiveam", "rt", "slime"];

/// Returns true if the Lisp system in this directory is installed. Otherwise the test is skipped; in CI it fails.
pub(crate) fn installed(system: &str) -> bool {
    let there = Path::new(INSTALLED).join(system).exists();
    assert!(there || std::env::var_os("CI").is_none(), "scripts/setup.sh test installs {system}");
    if !there {
        eprintln!("{system} is not installed: left out");
    }
    there
}

/// A cache directory with the compiled files of the installed [`SYSTEMS`], compiled once and kept in the target directory. The
/// directory is named after the systems, because others may be installed later.
static COMPILED: LazyLock<PathBuf> = LazyLock::new(|| {
    let systems: Vec<&str> = SYSTEMS.into_iter().filter(|system| installed(system)).collect();
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("compiled-{}", systems.join("-")));
    if !kept.exists() {
        let cache = Scratch::below_target();
        let mut server = Server::start_with_environment(&[], &[("XDG_CACHE_HOME", &cache.directory("cache"))]);
        server.initialize("2025-11-25");
        for system in systems {
            let system = if system == "slime" { "swank" } else { system };
            let code = format!("(handler-bind ((warning #'muffle-warning)) (asdf:load-system {system:?}))");
            let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code, "timeout": 600}));
            assert!(!is_error, "{text}");
        }
        server.finish();
        // Another test process may have created the directory first.
        let _ = std::fs::rename(cache.join("cache"), &kept);
    }
    kept
});

/// Starts a server whose cache contains the compiled installed libraries, without sending anything.
pub(crate) fn start_with(arguments: &[&str]) -> Server {
    start_in(Path::new("."), arguments)
}

/// Starts a server as [`start_with`] does, in a working directory.
pub(crate) fn start_in(directory: &Path, arguments: &[&str]) -> Server {
    let server = Server::start_in(directory, arguments);
    copy_to(&server);
    server
}

/// Copies the compiled libraries into the cache of a server that has not used it yet.
pub(crate) fn copy_to(server: &Server) {
    let cache = server.home().join("XDG_CACHE_HOME");
    let copied = Command::new("cp").arg("-a").arg(COMPILED.join(".")).arg(cache).status();
    assert!(copied.expect("cp starts").success(), "the compiled libraries can be copied");
}
