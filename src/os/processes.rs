//! The processes that descend from this one. Orphans of a worker become the supervisor's children, and go when it does.

use std::fs;
use std::io::ErrorKind;

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, getpid, kill_process, kill_process_group, waitid,
};

/// Rounds of looking for processes, which may be making others.
const ROUNDS: usize = 5;

/// Makes orphans of the worker's this process' children.
pub(crate) fn adopt_orphans() {
    // Without it they can still be found while their parents live.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_child_subreaper(Some(getpid()));
}

/// A child that has ended, if there is one. Its number is free from here on.
pub(crate) fn ended() -> Option<(Pid, WaitStatus)> {
    rustix::process::wait(WaitOptions::NOHANG).ok().flatten()
}

/// Kills everything that descends from this process.
pub(crate) fn end_all() {
    end_all_but(&[]);
}

/// Kills everything that descends from this process, but for these and what descends from them.
pub(crate) fn end_all_but(these: &[Pid]) {
    for _ in 0..ROUNDS {
        let any = kill_descendants(getpid(), these);
        // Those that are this process' children by now are done with; the rest become so.
        while ended().is_some() {}
        if !any {
            return;
        }
        std::thread::yield_now();
    }
}

/// Kills this child, which leads a process group and is yet to be waited for, with what descends from it and that group.
pub(crate) fn end_tree(child: Pid) {
    // It starts nothing meanwhile.
    let _ = kill_process(child, Signal::STOP);
    for _ in 0..ROUNDS {
        if !kill_descendants(child, &[]) {
            break;
        }
        std::thread::yield_now();
    }
    let _ = kill_process_group(child, Signal::KILL);
}

/// Kills what descends from a process, but for these and what descends from them; false where there is nothing.
fn kill_descendants(root: Pid, but: &[Pid]) -> bool {
    let found = descendants(root, but);
    for (pid, parent) in &found {
        kill(*pid, *parent);
    }
    !found.is_empty()
}

/// Kills `pid` if it is a child of `parent`: its number may be another process' by now, which does not get the signal.
#[cfg(target_os = "linux")]
pub(crate) fn kill(pid: Pid, parent: Pid) {
    use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};
    // Whatever it is that is looked at after this is what is signalled.
    let process = pidfd_open(pid, PidfdFlags::empty());
    if children(parent).contains(&pid) {
        let _ = match process {
            Ok(process) => pidfd_send_signal(process, Signal::KILL),
            Err(rustix::io::Errno::SRCH) => Ok(()),
            // An old kernel, or no descriptor is left.
            Err(_) => kill_process(pid, Signal::KILL),
        };
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn kill(pid: Pid, _parent: Pid) {
    let _ = kill_process(pid, Signal::KILL);
}

/// True for a child that a signal has stopped.
pub(crate) fn is_stopped(child: Pid) -> bool {
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(child), options).is_ok_and(|status| status.is_some_and(|status| status.stopped()))
}

/// True unless the process has ended, or is about to: it has no program any more (proc(5), `exe`).
fn runs(pid: Pid) -> bool {
    !fs::read_link(format!("/proc/{pid}/exe")).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Returns the children of a process, of all its threads; none when it has ended.
pub(crate) fn children(parent: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten() {
        match fs::read_to_string(thread.path().join("children")) {
            Ok(text) => found.extend(text.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?))),
            // This kernel has no such files, unless the thread is gone.
            Err(_) if thread.path().exists() => return children_among_all(parent),
            Err(_) => {}
        }
    }
    found
}

/// Returns the same from a look at every process of the machine: however many there are.
fn children_among_all(parent: Pid) -> Vec<Pid> {
    let is_child = |pid: &Pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        // The command's name, in parentheses, may hold anything.
        let of = stat.as_ref().and_then(|stat| stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok());
        of == Some(parent.as_raw_nonzero().get())
    };
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    pids.filter(is_child).collect()
}

/// Returns the running descendants of the process `root`, without those of `but`, with the parent of each.
fn descendants(root: Pid, but: &[Pid]) -> Vec<(Pid, Pid)> {
    let mut found = Vec::new();
    let mut pending = vec![root];
    while let Some(parent) = pending.pop() {
        for child in children(parent).into_iter().filter(|child| !but.contains(child) && runs(*child)) {
            found.push((child, parent));
            pending.push(child);
        }
    }
    found
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use std::os::unix::process::{CommandExt, ExitStatusExt};

    #[test]
    fn children_are_found_in_either_way() {
        let mut shell = std::process::Command::new("/bin/sh");
        let mut child = shell.args(["-c", "sleep 1000; :"]).process_group(0).spawn().unwrap();
        let shell = Pid::from_child(&child);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while children(shell).is_empty() && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        let [sleep] = children(shell)[..] else { panic!("one child") };
        assert_eq!(children_among_all(shell), [sleep]);
        assert!(children(getpid()).contains(&shell) && children_among_all(getpid()).contains(&shell));
        assert!(runs(sleep) && !is_stopped(shell));
        kill_process(shell, Signal::STOP).unwrap();
        while !is_stopped(shell) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        assert!(is_stopped(shell) && is_stopped(shell));
        end_tree(shell);
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        while runs(sleep) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        assert!(!runs(sleep) && children(shell).is_empty());
    }

    #[test]
    fn only_the_process_that_is_meant_is_killed() {
        let mut child = std::process::Command::new("/bin/sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        // As if the number had been another process' when it was looked at.
        kill(pid, Pid::INIT);
        assert_eq!(child.try_wait().unwrap(), None);
        kill(pid, getpid());
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        kill(pid, getpid());
    }
}
