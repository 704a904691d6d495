//! Tests of the cache, with fake stages that are built in a moment.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::key::KeyBuilder;
use crate::scratch::Scratch;

fn key(text: &str) -> Key {
    KeyBuilder::new("test").text("text", text).finish()
}

fn cache(directory: &Scratch) -> Cache {
    Cache::new(directory.to_path_buf())
}

/// Requests the stage, and counts in `made` how often it was built.
fn build(cache: &Cache, key: &Key, made: &AtomicU32) -> PathBuf {
    let make = |context: &StageContext<'_>| {
        made.fetch_add(1, Ordering::SeqCst);
        std::fs::write(context.scratch.join("junk"), "").unwrap();
        std::fs::write(context.result.join("file"), "whole").unwrap();
        std::thread::sleep(Duration::from_millis(100));
        Ok(())
    };
    cache.get_or_build("fake", key, &Progress::silent(), make).unwrap()
}

#[test]
fn concurrent_builds_make_a_stage_once() {
    let directory = Scratch::new("concurrent");
    let cache = cache(&directory);
    let made = AtomicU32::new(0);
    let entries = std::thread::scope(|scope| {
        let builds: Vec<_> = (0..8).map(|_| scope.spawn(|| build(&cache, &key("a"), &made))).collect();
        builds.into_iter().map(|build| build.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(made.load(Ordering::SeqCst), 1);
    for entry in entries {
        assert_eq!(std::fs::read_to_string(entry.join("file")).unwrap(), "whole");
    }
    assert_eq!(cache.root.join("tmp").read_dir().unwrap().count(), 0);
}

#[test]
fn stage_files_are_dated_before_the_build_began() {
    let directory = Scratch::new("dates");
    let begin = SystemTime::now();
    let entry = build(&cache(&directory), &key("a"), &AtomicU32::new(0));
    let modified = |name: &str| entry.join(name).metadata().unwrap().modified().unwrap();
    assert!(modified("file") < begin && modified("file") > SystemTime::UNIX_EPOCH);
    // The file that records the last use is not backdated, because `prune` compares the times of last use.
    assert!(modified(LAST_USED_FILE) > begin);
}

#[test]
fn different_keys_make_different_stages() {
    let directory = Scratch::new("keys");
    let cache = cache(&directory);
    let made = AtomicU32::new(0);
    let one = build(&cache, &key("a"), &made);
    let other = build(&cache, &key("b"), &made);
    assert_ne!(one, other);
    assert_eq!(made.load(Ordering::SeqCst), 2);
}

#[test]
fn incomplete_stage_is_made_again() {
    let made = AtomicU32::new(0);
    let damage: [fn(&Path); 4] = [
        // The build was killed before it wrote the manifest.
        |entry| std::fs::remove_file(entry.join(".manifest")).unwrap(),
        // A file is missing.
        |entry| std::fs::remove_file(entry.join("file")).unwrap(),
        // A file is truncated, as after a power failure.
        |entry| std::fs::write(entry.join("file"), "who").unwrap(),
        // The directory is empty.
        |entry| {
            std::fs::remove_dir_all(entry).unwrap();
            std::fs::create_dir(entry).unwrap();
        },
    ];
    for (number, damage) in damage.iter().enumerate() {
        let directory = Scratch::new("half");
        let cache = cache(&directory);
        let entry = build(&cache, &key("a"), &made);
        damage(&entry);
        let again = build(&cache, &key("a"), &made);
        assert_eq!(again, entry);
        assert_eq!(std::fs::read_to_string(entry.join("file")).unwrap(), "whole");
        assert_eq!(made.load(Ordering::SeqCst) as usize, 2 * (number + 1));
    }
}

#[test]
fn leftovers_of_a_killed_build_are_removed_and_not_used() {
    let directory = Scratch::new("killed");
    let cache = cache(&directory);
    let name = format!("fake-{}.0", key("a"));
    let left = cache.root.join("tmp").join(name).join("result");
    std::fs::create_dir_all(&left).unwrap();
    std::fs::write(left.join("stale"), "").unwrap();
    let entry = build(&cache, &key("a"), &AtomicU32::new(0));
    assert!(!entry.join("stale").exists());
    assert!(!left.exists());
}

#[test]
fn a_failed_build_publishes_nothing_and_can_be_tried_again() {
    let directory = Scratch::new("failed");
    let cache = cache(&directory);
    let fail = |context: &StageContext<'_>| {
        std::fs::write(context.result.join("file"), "half").unwrap();
        let mut command = crate::process::clean_command("sh");
        context.log.run("failing", command.args(["-c", "echo why; false"]), context.progress)
    };
    let error = cache.get_or_build("fake", &key("a"), &Progress::silent(), fail).unwrap_err();
    let Error::Step { log, output, .. } = error else {
        panic!("not the step's error: {error}");
    };
    assert_eq!(output, "why");
    assert!(std::fs::read_to_string(log).unwrap().contains("why"), "the log stays");
    let made = AtomicU32::new(0);
    build(&cache, &key("a"), &made);
    assert_eq!(made.load(Ordering::SeqCst), 1);
}

#[test]
fn prune_keeps_the_most_recently_used_stages() {
    let directory = Scratch::new("prune");
    let cache = cache(&directory);
    let made = AtomicU32::new(0);
    let entries: Vec<_> = ["a", "b", "c", "d"].iter().map(|text| build(&cache, &key(text), &made)).collect();
    std::thread::sleep(Duration::from_millis(20));
    build(&cache, &key("a"), &made);
    cache.prune("fake", 2);
    let left: Vec<_> = entries.iter().map(|entry| entry.exists()).collect();
    assert_eq!(left, [true, false, false, true]);
}
