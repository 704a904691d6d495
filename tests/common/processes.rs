//! The server's processes, as /proc shows them.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::HashMap;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::Server;

/// All processes that run: their parents and names.
pub(crate) fn processes() -> HashMap<u32, (u32, String)> {
    let mut found = HashMap::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((head, rest)) = stat.rsplit_once(')') else { continue };
        let (pid, name) = head.split_once(" (").unwrap();
        let mut fields = rest.split_ascii_whitespace();
        if fields.next() != Some("Z") {
            found.insert(pid.parse().unwrap(), (fields.next().unwrap().parse().unwrap(), name.to_owned()));
        }
    }
    found
}

/// The children of a process.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    processes().into_iter().filter(|(_, (of, _))| *of == parent).map(|(pid, _)| pid).collect()
}

/// True for a process that runs.
pub(crate) fn is_alive(pid: u32) -> bool {
    processes().contains_key(&pid)
}

/// Sends a signal, by its name with a dash.
pub(crate) fn signal(pid: u32, signal: &str) {
    let _ = Command::new("kill").args([signal, &pid.to_string()]).status();
}

/// Waits until it holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The process that holds Lisp.
pub(crate) fn worker(server: &Server) -> u32 {
    let mut found = None;
    until("there is a worker", || {
        found = children(server.pid()).first().copied();
        found.is_some()
    });
    found.unwrap()
}

/// Kills the process that holds Lisp.
pub(crate) fn kill_worker(server: &Server) {
    let pid = worker(server);
    signal(pid, "-KILL");
    until("the worker is gone", || !is_alive(pid));
}

/// Stops the process that holds Lisp: each of its threads, which may be a millisecond after the signal was sent. Where
/// the supervisor has already ended it, it was stopped.
pub(crate) fn stop_worker(server: &Server) {
    let pid = worker(server);
    signal(pid, "-STOP");
    until("the worker is stopped", || {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat"));
            stat.is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, state)| state.starts_with(" T")))
        })
    });
}
