//! The server's processes, as /proc shows them.

use std::collections::HashMap;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::client::{DEADLINE, Server};

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
    let end = Instant::now() + DEADLINE;
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

/// Has the process that Lisp is in write no file beyond so many bytes, or any again. As on a full disk, an error tells
/// it so, not a signal, where Lisp has evaluated [`NO_SIGXFSZ`].
pub(crate) fn limit_files(lisp: u32, bytes: Option<u64>) {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = Pid::from_raw(i32::try_from(lisp).unwrap());
    prlimit(pid, Resource::Core, Rlimit { current: Some(0), maximum: None }).unwrap();
    prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

/// Ignores SIGXFSZ.
pub(crate) const NO_SIGXFSZ: &str = r#"(sb-alien:alien-funcall
  (sb-alien:extern-alien "signal" (function sb-alien:unsigned-long sb-alien:int sb-alien:unsigned-long)) 25 1)"#;

/// Has the system refuse to copy the process that this is evaluated in, as when there is no memory: a seccomp filter of
/// the evaluating thread's, for clone(2) without CLONE_VM.
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
