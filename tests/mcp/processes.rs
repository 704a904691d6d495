//! The server's processes, from /proc.

use std::collections::HashMap;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::client::{DEADLINE, Server};

/// Returns all running processes with their parents and names.
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

/// Returns the child processes of a process.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    processes().into_iter().filter(|(_, (of, _))| *of == parent).map(|(pid, _)| pid).collect()
}

/// Returns the running descendants of a process that have this program name.
pub(crate) fn descendants(ancestor: u32, name: &str) -> Vec<u32> {
    let all = processes();
    let descends = |pid: u32| {
        let parent = |pid: &u32| all.get(pid).map(|(parent, _)| *parent);
        std::iter::successors(parent(&pid), parent).any(|parent| parent == ancestor)
    };
    all.iter().filter(|(pid, (_, found))| found == name && descends(**pid)).map(|(pid, _)| *pid).collect()
}

/// Returns true for a running process.
pub(crate) fn is_alive(pid: u32) -> bool {
    processes().contains_key(&pid)
}

/// Sends a signal, given as an option of kill(1).
pub(crate) fn signal(pid: u32, signal: &str) {
    let _ = Command::new("kill").args([signal, &pid.to_string()]).status();
}

/// Waits until `holds` returns true; `what` describes the condition.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the worker process of a server.
pub(crate) fn worker(server: &Server) -> u32 {
    let mut found = None;
    wait_until("there is a worker", || {
        found = children(server.pid()).first().copied();
        found.is_some()
    });
    found.unwrap()
}

/// Kills the worker and waits until it is gone.
pub(crate) fn kill_worker(server: &Server) {
    let pid = worker(server);
    signal(pid, "-KILL");
    wait_until("the worker is gone", || !is_alive(pid));
}

/// Stops all threads of the worker, which may happen a millisecond after the signal, or finds it ended by the
/// supervisor, which happens only to a stopped worker.
pub(crate) fn stop_worker(server: &Server) {
    let pid = worker(server);
    signal(pid, "-STOP");
    wait_until("the worker is stopped", || {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat"));
            stat.is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, state)| state.starts_with(" T")))
        })
    });
}

/// Limits the size of the files that the process may write, or removes the limit. As on a full disk, a write fails with
/// an error instead of a signal if Lisp has evaluated [`NO_SIGXFSZ`].
pub(crate) fn limit_file_size(lisp: u32, bytes: Option<u64>) {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = Pid::from_raw(i32::try_from(lisp).unwrap());
    prlimit(pid, Resource::Core, Rlimit { current: Some(0), maximum: None }).unwrap();
    prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

/// Makes the process ignore SIGXFSZ.
pub(crate) const NO_SIGXFSZ: &str = r#"(sb-alien:alien-funcall
  (sb-alien:extern-alien "signal" (function sb-alien:unsigned-long sb-alien:int sb-alien:unsigned-long)) 25 1)"#;

/// Makes the system refuse to fork the process, as when there is no memory: a seccomp filter of the evaluating thread
/// for clone(2) without CLONE_VM.
pub(crate) const NO_FORK: &str = r#"
(let ((filter (make-array 6 :element-type '(unsigned-byte 64)
                            :initial-contents '(#x0000000000000020                       ; load the call's number
                                                #+x86-64 #x0000003803000015              ; clone, or allow
                                                #+arm64 #x000000dc03000015
                                                #x0000001000000020                       ; load its flags
                                                #x0000010000010045                       ; a thread: allow
                                                #x0005000c00000006                       ; ENOMEM
                                                #x7fff000000000006)))                    ; allow
      (program (make-array 2 :element-type '(unsigned-byte 64))))
  (sb-sys:with-pinned-objects (filter program)
    (setf (aref program 0) (length filter)
          (aref program 1) (sb-sys:sap-int (sb-sys:vector-sap filter)))
    (flet ((prctl (option argument more)
             (sb-alien:alien-funcall
              (sb-alien:extern-alien "prctl" (function sb-alien:int sb-alien:int sb-alien:unsigned-long
                                                       sb-alien:unsigned-long sb-alien:unsigned-long
                                                       sb-alien:unsigned-long))
              option argument more 0 0)))
      (list (prctl 38 1 0) (prctl 22 2 (sb-sys:sap-int (sb-sys:vector-sap program)))))))"#;
