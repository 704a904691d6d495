//! The processes that descend from this one. Orphans of a worker become the supervisor's children, and go when it does.

use std::collections::HashMap;

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process, kill_process_group};

/// Rounds of looking for processes, which may be making others.
const ROUNDS: usize = 5;

/// Makes orphans of the worker's this process' children.
pub(crate) fn adopt_orphans() {
    // Without it they can still be found while their parents live.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_child_subreaper(Some(getpid()));
}

/// A child that has ended, if there is one. Its number is free from here on.
pub(super) fn ended() -> Option<(Pid, WaitStatus)> {
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
pub(super) fn kill(pid: Pid, parent: Pid) {
    use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};
    // Whatever it is that is looked at after this is what is signalled.
    let process = pidfd_open(pid, PidfdFlags::empty());
    if stat(pid).is_some_and(|(_, of)| of == parent) {
        let _ = match process {
            Ok(process) => pidfd_send_signal(process, Signal::KILL),
            Err(rustix::io::Errno::SRCH) => Ok(()),
            // An old kernel, or no descriptor is left.
            Err(_) => kill_process(pid, Signal::KILL),
        };
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn kill(pid: Pid, _parent: Pid) {
    let _ = kill_process(pid, Signal::KILL);
}

/// True for a process that a signal has stopped, where the system says so.
pub(super) fn is_stopped(pid: Pid) -> bool {
    stat(pid).is_some_and(|(state, _)| state == b'T')
}

/// A process' state and its parent, where the system has them.
fn stat(pid: Pid) -> Option<(u8, Pid)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    Some((state, Pid::from_raw(fields.next()?.parse().ok()?)?))
}

/// What descends from the process `root`, and not from `but`, and still runs, with the parent of each.
fn descendants(root: Pid, but: &[Pid]) -> Vec<(Pid, Pid)> {
    let mut children: HashMap<Pid, Vec<Pid>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        if let Some(pid) = pid
            && let Some((state, parent)) = stat(pid)
            && !matches!(state, b'Z' | b'X')
        {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut pending = vec![root];
    while let Some(parent) = pending.pop() {
        for child in children.remove(&parent).unwrap_or_default().into_iter().filter(|child| !but.contains(child)) {
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
    use std::os::unix::process::ExitStatusExt;

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
