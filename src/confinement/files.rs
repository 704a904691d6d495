//! No writing, by Landlock.

use std::path::PathBuf;

use landlock::{
    ABI, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, path_beneath_rules,
};

/// The first version of Landlock that covers all ways to change what is in a file (Linux 6.2).
const VERSION: ABI = ABI::V3;

/// Devices that lose nothing by being written to, and that programs expect to be able to open.
const DEVICES: [&str; 6] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts"];

/// Refuses this thread, and what it starts from now on, to write, create, rename or remove files elsewhere.
pub(super) fn confine(checkpoints: Option<PathBuf>) -> Result<(), String> {
    let cache = cache();
    if let Some(cache) = &cache {
        // What is not there cannot be allowed. If it cannot be made, there is no cache.
        let _ = std::fs::create_dir_all(cache);
    }
    let writable = [std::env::temp_dir()].into_iter().chain(cache).chain(checkpoints).chain(DEVICES.map(PathBuf::from));
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_write(VERSION))
        .and_then(Ruleset::create)
        .and_then(|ruleset| {
            // What does not exist is passed over, and devices get the rights that files have.
            ruleset.add_rules(path_beneath_rules(writable, AccessFs::from_write(VERSION)))
        })
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(|error| format!("it needs Landlock as of Linux 6.2 ({error})"))?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        _ => Err("it needs Landlock as of Linux 6.2".to_owned()),
    }
}

/// Where ASDF puts compiled files.
fn cache() -> Option<PathBuf> {
    let directory = std::env::var_os(crate::environment::CACHE_HOME).filter(|path| !path.is_empty()).map(PathBuf::from);
    let directory = directory.or_else(|| Some(std::env::home_dir()?.join(".cache")))?;
    Some(directory.join("common-lisp"))
}
