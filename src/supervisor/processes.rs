//! The processes that a worker leaves behind: they become the supervisor's children, and go when it does.

use std::collections::HashMap;

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process};

/// Rounds of looking for processes, which may be making others.
const ROUNDS: usize = 5;

/// Makes orphans of the worker's this process' children.
pub(crate) fn adopt_orphans() {
    // Without it they can still be found while their parents live.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_child_subreaper(Some(getpid()));
}

/// A child that has ended, if there is one.
pub(super) fn ended() -> Option<(Pid, WaitStatus)> {
    rustix::process::wait(WaitOptions::NOHANG).ok().flatten()
}

/// Kills everything that descends from this process, but not `worker` and what descends from that.
pub(crate) fn end_all_but(worker: Option<Pid>) {
    for _ in 0..ROUNDS {
        let found = descendants(getpid(), worker);
        for pid in &found {
            let _ = kill_process(*pid, Signal::KILL);
        }
        // Those that are this process' children by now are done with; the rest become so.
        while ended().is_some_and(|(pid, _)| Some(pid) != worker) {}
        if found.is_empty() {
            return;
        }
        std::thread::yield_now();
    }
}

/// Kills a process and everything that descends from it.
pub(super) fn end_tree(root: Pid) {
    // Nothing is to be added while they are looked for.
    let _ = kill_process(root, Signal::STOP);
    let found = descendants(root, None);
    let _ = kill_process(root, Signal::KILL);
    for pid in found {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// True for a process that a signal has stopped, where the system says so.
pub(super) fn is_stopped(pid: Pid) -> bool {
    stat(&pid.as_raw_nonzero().to_string()).is_some_and(|fields| fields.trim_start().starts_with('T'))
}

/// The fields of a process' status after its name, where the system has it.
fn stat(pid: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name, in parentheses, may hold anything.
    Some(stat.rsplit_once(')')?.1.to_owned())
}

/// What descends from `root` and still runs, without `spared` and its own.
fn descendants(root: Pid, spared: Option<Pid>) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some((name, pid)) = name.to_str().and_then(|name| Some((name, name.parse::<i32>().ok()?))) else {
            continue;
        };
        let Some(fields) = stat(name) else { continue };
        let mut fields = fields.split_ascii_whitespace();
        let runs = fields.next().is_some_and(|state| state != "Z" && state != "X");
        let parent = fields.next().and_then(|parent| parent.parse().ok());
        if let (true, Some(parent)) = (runs, parent) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut pending = vec![root.as_raw_nonzero().get()];
    while let Some(parent) = pending.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            if let Some(pid) = Pid::from_raw(child)
                && Some(pid) != spared
            {
                found.push(pid);
                pending.push(child);
            }
        }
    }
    found
}
