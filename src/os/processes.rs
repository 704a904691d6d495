//! Finds and kills descendants of this process. Orphans of a worker become children of the supervisor, which kills the
//! orphans when it replaces the worker or ends.

use std::collections::HashSet;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, getpid, kill_process, kill_process_group,
    pidfd_open, waitid,
};

use super::poll_set::PollSet;

/// The maximum number of searches for descendants. A search may miss processes that are started meanwhile.
const MAX_SEARCHES: usize = 5;
/// The maximum time in which [`kill_generations`] waits for the ends of killed processes.
const MAX_WAIT: Duration = Duration::from_millis(500);
/// The number of processes above which waiting for the ends of killed processes takes less time than a search of each
/// process for children.
const MAX_SEARCHED: usize = 64;

/// Makes this process the parent of its orphaned descendants, such as the orphans of a worker.
pub(crate) fn adopt_orphans() {
    // An error is ignored: without adoption, descendants are still found as long as their parents live.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_child_subreaper(Some(getpid()));
}

/// Reaps a child that has ended, if there is one, and returns its process id and status. The system may then reuse the id.
pub(crate) fn reap() -> Option<(Pid, WaitStatus)> {
    rustix::process::wait(WaitOptions::NOHANG).ok().flatten()
}

/// Waits until a child has ended, at most for `time`, without reaping the child. Returns false if the child still runs.
/// Returns true at once if the system refuses to watch the child.
pub(crate) fn wait_for_child(child: Pid, time: Duration) -> bool {
    let Ok(descriptor) = pidfd_open(child, PidfdFlags::empty()) else { return true };
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut set = PollSet::new();
        set.add_read((), &descriptor);
        match set.wait(Some(left)) {
            Ok(ready) if ready.has(()) => return true,
            Ok(_) if left.is_zero() => return false,
            Ok(_) => {}
            Err(_) => return true,
        }
    }
}

/// Kills all descendants of this process.
pub(crate) fn kill_all_descendants() {
    kill_all_descendants_except(Vec::new);
}

/// Kills all descendants of this process, except the processes that `except` returns and their descendants. `except` is
/// called after each search and before the found processes are killed. Therefore, `except` knows of each process that a
/// parent has reported before the parent ended and the process became an orphan.
pub(crate) fn kill_all_descendants_except(except: impl Fn() -> Vec<Pid>) {
    #[cfg(target_os = "linux")]
    if descendants(getpid(), MAX_SEARCHED).len() > MAX_SEARCHED
        && rustix::process::child_subreaper().is_ok_and(|adopter| adopter.is_some())
    {
        kill_generations(&except);
    }
    // After `kill_generations`, some processes may be left, such as those that end slowly.
    kill_descendants(getpid(), except);
    // Reap the killed children.
    while reap().is_some() {}
}

/// Kills the children of this process, then the orphans that this process adopts as its children end, and so on, except
/// the processes that `except` returns. For thousands of processes, this takes half the time of [`kill_descendants`],
/// which reads several files for each process, but does not wait. This process must adopt orphans.
#[cfg(target_os = "linux")]
fn kill_generations(except: &impl Fn() -> Vec<Pid>) {
    let (this, end) = (getpid(), Instant::now() + MAX_WAIT);
    // The processes that were killed and still exist.
    let mut killed: HashSet<Pid> = HashSet::new();
    loop {
        while reap().is_some() {}
        let found: HashSet<Pid> = children(this).into_iter().collect();
        let spared = except();
        killed.retain(|pid| found.contains(pid));
        let before = killed.len();
        for pid in found {
            if !spared.contains(&pid) && !killed.contains(&pid) && kill_child(pid, this) {
                killed.insert(pid);
            }
        }
        // A killed process starts no other process: without children, it leaves no orphans.
        let parent = killed.iter().copied().find(|pid| killed.len() > MAX_SEARCHED || !children(*pid).is_empty());
        let is_done = parent.is_none() && killed.len() == before;
        let left = end.saturating_duration_since(Instant::now());
        if is_done || left.is_zero() {
            return;
        }
        if let Some(parent) = parent {
            wait_for_child(parent, left);
        }
    }
}

/// Kills a child, its descendants, and the process group that the child leads. The child must not have been reaped.
pub(crate) fn kill_tree(child: Pid) {
    // A stopped process cannot start other processes.
    let _ = kill_process(child, Signal::STOP);
    kill_descendants(child, Vec::new);
    let _ = kill_process(child, Signal::KILL);
    let _ = kill_process_group(child, Signal::KILL);
}

/// Kills the descendants of the process `root`, except the processes that `except` returns after each search, and their
/// descendants. Processes that become orphans meanwhile are found only if `root` adopts them.
fn kill_descendants(root: Pid, except: impl Fn() -> Vec<Pid>) {
    let mut known = HashSet::new();
    for _ in 0..MAX_SEARCHES {
        let mut found = descendants(root, usize::MAX);
        let mut spared: HashSet<Pid> = except().into_iter().collect();
        let excepted = spared.clone();
        found.retain(|(pid, parent)| {
            let is_spared = excepted.contains(pid) || spared.contains(parent);
            if is_spared {
                spared.insert(*pid);
            }
            !is_spared && known.insert(*pid)
        });
        if found.is_empty() {
            return;
        }
        // Children are killed before their parents, since the children of a killed process get another parent.
        for (pid, parent) in found.into_iter().rev() {
            if !kill_child(pid, parent) {
                // The next search finds the process if it has another parent now.
                known.remove(&pid);
            }
        }
    }
}

/// Kills `pid` if it is a child of `parent`. If the id has been reused for a process of another parent, nothing is killed.
/// Returns true if the signal was sent.
#[cfg(target_os = "linux")]
pub(crate) fn kill_child(pid: Pid, parent: Pid) -> bool {
    use rustix::process::pidfd_send_signal;
    // The descriptor is opened before the check, so that the signal goes to the process that was checked.
    let process = pidfd_open(pid, PidfdFlags::empty());
    is_child(pid, parent)
        && match process {
            Ok(process) => pidfd_send_signal(process, Signal::KILL).is_ok(),
            Err(rustix::io::Errno::SRCH) => false,
            // The descriptor could not be opened: the kernel is too old, or too many descriptors are open.
            Err(_) => kill_process(pid, Signal::KILL).is_ok(),
        }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn kill_child(pid: Pid, _parent: Pid) -> bool {
    kill_process(pid, Signal::KILL).is_ok()
}

/// Returns true if a signal has stopped the child.
pub(crate) fn is_stopped(child: Pid) -> bool {
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(child), options).is_ok_and(|status| status.is_some_and(|status| status.stopped()))
}

/// Returns the child processes of a process, whichever thread started them; an empty list if the process has ended.
pub(crate) fn children(parent: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten() {
        match fs::read_to_string(thread.path().join("children")) {
            Ok(text) => found.extend(text.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?))),
            // The thread still exists, so this kernel has no `children` files.
            Err(_) if thread.path().exists() => return children_among_all(parent),
            Err(_) => {}
        }
    }
    found
}

/// Returns the children of a process, by checking every process of the machine.
fn children_among_all(parent: Pid) -> Vec<Pid> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    pids.filter(|pid| is_child(*pid, parent)).collect()
}

/// Returns true if `pid` is a child of `parent`, which may have ended but has not been reaped.
fn is_child(pid: Pid, parent: Pid) -> bool {
    // `waitid` is faster than a file in /proc, but does not find children that send another signal than SIGCHLD.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    if parent == getpid() && waitid(WaitId::Pid(pid), options).is_ok() {
        return true;
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    // The command's name, in parentheses, may contain any character.
    let of = stat.as_ref().and_then(|stat| stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok());
    of == Some(parent.as_raw_nonzero().get())
}

/// Returns the descendants of the process `root`, each with its parent and after its parent. A process that `root` has
/// adopted during the search may be listed under both parents. The search ends once more than `limit` processes are found.
fn descendants(root: Pid, limit: usize) -> Vec<(Pid, Pid)> {
    let mut found = Vec::new();
    let mut visited = HashSet::new();
    let mut pending = vec![root];
    while found.len() <= limit
        && let Some(parent) = pending.pop()
    {
        if visited.insert(parent) {
            let all = children(parent);
            found.extend(all.iter().map(|child| (*child, parent)));
            pending.extend(all);
        }
    }
    // The process `root` may have adopted a process whose parent ended during the search.
    let known: HashSet<_> = found.iter().copied().collect();
    found.extend(children(root).into_iter().map(|child| (child, root)).filter(|entry| !known.contains(entry)));
    found
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::os::unix::process::{CommandExt, ExitStatusExt};

    /// Returns false if the process has ended or is about to end: such a process has no `exe` any more (proc(5)).
    fn is_running(pid: Pid) -> bool {
        !fs::read_link(format!("/proc/{pid}/exe")).is_err_and(|error| error.kind() == ErrorKind::NotFound)
    }

    #[test]
    fn children_are_found_by_thread_and_among_all_processes() {
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
        assert!(is_running(sleep) && !is_stopped(shell));
        kill_process(shell, Signal::STOP).unwrap();
        while !is_stopped(shell) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        assert!(is_stopped(shell) && is_stopped(shell));
        kill_tree(shell);
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        while is_running(sleep) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        assert!(!is_running(sleep) && children(shell).is_empty());
    }

    #[test]
    fn processes_that_are_reported_during_the_search_are_not_killed_with_their_descendants() {
        let mut shell = std::process::Command::new("/bin/sh");
        let script = "(sleep 1000; :) & (sleep 1000; :) & wait";
        let mut child = shell.args(["-c", script]).process_group(0).spawn().unwrap();
        let shell = Pid::from_child(&child);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while descendants(shell, usize::MAX).len() < 4 && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        let [spared, other] = children(shell)[..] else { panic!("two children") };
        let ([spared_child], [other_child]) = (&children(spared)[..], &children(other)[..]) else {
            panic!("no children")
        };
        // The report is made when the search is over.
        kill_descendants(shell, || vec![spared]);
        while [other, *other_child].iter().any(|pid| is_running(*pid)) && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        assert!(!is_running(other) && !is_running(*other_child));
        assert!(is_running(spared) && is_running(*spared_child));
        kill_tree(shell);
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn a_process_of_another_parent_is_not_killed() {
        let mut child = std::process::Command::new("/bin/sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        // `INIT` is not the child's parent: to `kill_child`, the id looks as if it had been reused.
        kill_child(pid, Pid::INIT);
        assert_eq!(child.try_wait().unwrap(), None);
        kill_child(pid, getpid());
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        kill_child(pid, getpid());
    }
}
