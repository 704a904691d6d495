//! What goes to users: the crates as cargo packages them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The workspace's root.
const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The names of the files in a package, as cargo lists them.
fn listing(package: &str) -> Vec<String> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["package", "--list", "--allow-dirty", "--offline", "--package", package]).current_dir(ROOT);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Compares the first parts of the names in a package with `expected`, and its size, in bytes, with `bound`.
fn check(package: &str, directory: &str, expected: &[&str], bound: u64) {
    let names = listing(package);
    let first = |name: &String| name.split('/').next().unwrap_or_default().to_owned();
    let found: BTreeSet<String> = names.iter().map(first).collect();
    // What cargo adds, the one of these only where there is a repository.
    let made = [".cargo_vcs_info.json", "Cargo.lock", "Cargo.toml", "Cargo.toml.orig"];
    let found: BTreeSet<&str> = found.iter().map(String::as_str).filter(|name| !made.contains(name)).collect();
    assert_eq!(found, expected.iter().copied().collect(), "in {package}");
    let size = |name: &String| Path::new(ROOT).join(directory).join(name).metadata().map_or(0, |data| data.len());
    let total: u64 = names.iter().map(size).sum();
    assert!(total < bound, "{package} has {total} bytes");
}

#[test]
fn packages_hold_what_their_build_needs_and_no_more() {
    let ours = ["benches", "build.rs", "CHANGELOG.md", "examples", "ffi", "LICENSE-APACHE", "LICENSE-MIT", "lisp"];
    check("sbcl-mcp", "", &[&ours[..], &["README.md", "src"]].concat(), 3 << 20);
    for ours in ["sbcl-core", "sbcl-build"] {
        check(ours, ours, &["LICENSE-APACHE", "LICENSE-MIT", "src"], 1 << 20);
    }
}
