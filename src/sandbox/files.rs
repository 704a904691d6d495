//! The `--read-only` option, which uses Landlock to deny writing to files.

use std::path::PathBuf;

use landlock::{
    ABI, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, path_beneath_rules,
};

/// The first version of Landlock that covers all ways to change the content of a file (Linux 6.2).
const LANDLOCK_VERSION: ABI = ABI::V3;

/// Devices that programs expect to open for writing; writing to them destroys no data.
const WRITABLE_DEVICES: [&str; 6] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts"];

/// Prevents this thread, and the threads and programs that it starts from now on, from writing, creating, renaming or
/// removing files outside of the temporary directory, ASDF's cache, the directory `checkpoints` and the devices in
/// [`WRITABLE_DEVICES`]. Returns the reason, worded as a clause, if the system cannot enforce the restriction.
pub(super) fn confine(checkpoints: Option<PathBuf>) -> Result<(), String> {
    let cache = asdf_cache_directory();
    if let Some(cache) = &cache {
        // Landlock rules need existing paths. If the cache cannot be created, no rule allows writing to it.
        let _ = std::fs::create_dir_all(cache);
    }
    let writable =
        [std::env::temp_dir()].into_iter().chain(cache).chain(checkpoints).chain(WRITABLE_DEVICES.map(PathBuf::from));
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_write(LANDLOCK_VERSION))
        .and_then(Ruleset::create)
        .and_then(|ruleset| {
            // `path_beneath_rules` skips paths that do not exist. For devices, this function grants only the rights
            // that apply to files.
            ruleset.add_rules(path_beneath_rules(writable, AccessFs::from_write(LANDLOCK_VERSION)))
        })
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(|error| format!("it needs Landlock, in Linux 6.2 or later ({error})"))?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        _ => Err("it needs Landlock, in Linux 6.2 or later".to_owned()),
    }
}

/// Returns the directory of ASDF's compiled files.
fn asdf_cache_directory() -> Option<PathBuf> {
    let directory = std::env::var_os(crate::environment::CACHE_HOME).filter(|path| !path.is_empty()).map(PathBuf::from);
    let directory = directory.or_else(|| Some(std::env::home_dir()?.join(".cache")))?;
    Some(directory.join("common-lisp"))
}
