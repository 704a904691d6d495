//! How the process is copied that a checkpoint is saved from: while its threads are in the middle of something, in the C
//! library's malloc or in a change of a weak hash table (`make checkpoint-load` saves 500), and on old systems.

#![cfg(target_os = "linux")]

use std::time::Instant;

use serde_json::json;

use crate::client::{Scratch, Server, bad, good};
use crate::mode::Mode;

/// A server of this mode whose checkpoints are in `state`.
fn serve(mode: Mode, state: &Scratch) -> Server {
    let mut server = mode.start_with_environment(&[], &[("XDG_STATE_HOME", state)]);
    server.initialize("2025-11-25");
    server
}

/// Threads that work while *GO* is true.
const THREADS: &str = r#"
(defvar *go* t)
(defvar *tables* '())
(defun work (name function)
  (sb-thread:make-thread (lambda () (loop (if *go* (funcall function) (sleep 0.001)))) :name name))"#;

/// More than malloc's caches for a thread take, so that each call takes the lock of an arena.
const ALLOCATE: &str = r#"
(dotimes (i 12)
  (work "allocates" (lambda ()
                      (dotimes (i 100)
                        (sb-alien:free-alien (sb-alien:make-alien sb-alien:int 3000))))))"#;

const INSERT: &str = r#"
(dotimes (i 12)
  (let ((table (make-hash-table :test 'eq :weakness :key)))
    (push table *tables*)
    (work "inserts" (lambda ()
                      (clrhash table)
                      (dotimes (i 1000)
                        (setf (gethash (list i) table) i))))))"#;

/// Saves checkpoints while threads do what `loads` says, and restores the last one.
fn save_under_load(loads: &[&str]) {
    let state = Scratch::new();
    let mut server = serve(Mode::Supervised, &state);
    server.evaluate(THREADS);
    for load in loads {
        server.evaluate(load);
    }
    let begin = Instant::now();
    for number in 1..=saves() {
        server.evaluate("(setf *go* t)");
        let saving = server.post_call("checkpoint", json!({"action": "save", "name": "loaded"}));
        // Evaluated once the process has been copied: what the threads do from then on only slows the saving down.
        server.evaluate("(setf *go* nil)");
        let (text, is_error) = server.outcome(saving);
        assert!(!is_error, "save {number}: {text}");
        if number % 50 == 0 {
            println!("{number} saved in {:?}", begin.elapsed());
        }
    }
    server.evaluate("(setf *go* nil)");
    good(&mut server, "checkpoint", json!({"action": "restore", "name": "loaded"}));
    let text = server.evaluate(
        "(sb-ext:gc :full t)
         (dolist (table *tables*) (setf (gethash :key table) :value))
         (sb-ext:gc :full t)
         (list *go* (length (sb-thread:list-all-threads))
               (every (lambda (table) (eq :value (gethash :key table))) *tables*))",
    );
    assert_eq!(text, "=> (T 1 T)");
}

/// How many checkpoints each test saves.
fn saves() -> usize {
    std::env::var("SBCL_MCP_LOADED_SAVES").ok().and_then(|saves| saves.parse().ok()).unwrap_or(4)
}

#[test]
fn threads_may_be_in_malloc() {
    save_under_load(&[ALLOCATE]);
}

#[test]
fn threads_may_be_changing_weak_tables() {
    save_under_load(&[INSERT]);
}

#[test]
fn threads_may_be_in_malloc_and_in_weak_tables() {
    save_under_load(&[ALLOCATE, INSERT]);
}

#[test]
fn a_thread_that_cannot_be_interrupted_is_named() {
    let state = Scratch::new();
    let mut server = serve(Mode::Supervised, &state);
    server.evaluate(
        r#"(defvar *spins* nil)
           (defvar *stop* nil)
           (sb-thread:make-thread (lambda () (sb-sys:without-interrupts (setf *spins* t) (loop until *stop*)))
                                  :name "spins")
           (loop until *spins* do (sleep 0.001))"#,
    );
    let text = bad(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert!(text.contains("for 10 seconds, thread spins has not left code that must not be interrupted"), "{text}");
    server.evaluate("(setf *stop* t)");
    good(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
}

#[test]
fn a_thread_that_compiles_without_end_is_named() {
    let state = Scratch::new();
    let mut server = serve(Mode::Supervised, &state);
    server.evaluate(
        r#"(defvar *compiles* nil)
           (defvar *stop* nil)
           (sb-thread:make-thread (lambda ()
                                    (sb-kernel::with-world-lock ()
                                      (setf *compiles* t)
                                      (loop until *stop* do (sleep 0.01))))
                                  :name "compiles")
           (loop until *compiles* do (sleep 0.001))"#,
    );
    let text = bad(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert!(
        text.contains("Other threads have compiled, interned symbols, or defined classes, for 10 seconds"),
        "{text}"
    );
    assert!(text.contains("the last was thread compiles"), "{text}");
    server.evaluate("(setf *stop* t)");
    good(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
}

/// The image is booted and collects its garbage before it counts as a checkpoint.
#[test]
fn an_image_that_cannot_collect_is_no_checkpoint() {
    let state = Scratch::new();
    let mut server = serve(Mode::Supervised, &state);
    server.evaluate(
        r#"(push (lambda ()
                  (sb-int:encapsulate 'sb-ext:gc 'fails
                                      (lambda (gc &rest arguments)
                                        (declare (ignore gc arguments))
                                        (sb-ext:exit :code 1 :abort t))))
                sb-ext:*init-hooks*)"#,
    );
    let text = bad(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert_eq!(text, "Nothing was saved: the saved image does not come up.");
    server.evaluate("(pop sb-ext:*init-hooks*)");
    good(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
}

/// Has the kernel know no close_range(2), as before Linux 5.9: a seccomp filter of all threads of the process.
const NO_CLOSE_RANGE: &str = r#"
(let ((filter (make-array 4 :element-type '(unsigned-byte 64)
                            :initial-contents '(#x0000000000000020       ; load the call's number
                                                #x000001b401000015       ; close_range, or allow
                                                #x0005002600000006       ; ENOSYS
                                                #x7fff000000000006)))    ; allow
      (program (make-array 2 :element-type '(unsigned-byte 64))))
  (sb-sys:with-pinned-objects (filter program)
    (setf (aref program 0) (length filter)
          (aref program 1) (sb-sys:sap-int (sb-sys:vector-sap filter)))
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "prctl" (function sb-alien:int sb-alien:int sb-alien:unsigned-long sb-alien:unsigned-long
                                              sb-alien:unsigned-long sb-alien:unsigned-long))
     38 1 0 0 0)
    ;; seccomp(2): SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC.
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "syscall" (function sb-alien:long sb-alien:long sb-alien:unsigned-long
                                                sb-alien:unsigned-long sb-sys:system-area-pointer))
     #+x86-64 317 #+arm64 277 1 1 (sb-sys:vector-sap program))))"#;

#[test]
fn a_kernel_without_close_range_will_do() {
    let state = Scratch::new();
    let mut server = serve(Mode::Supervised, &state);
    assert_eq!(server.evaluate(NO_CLOSE_RANGE), "=> 0");
    server.evaluate(
        r#"(defvar *open* nil)
           (push (lambda ()
                   (setf *open* (length (directory "/proc/self/fd/*" :resolve-symlinks nil))))
                 sb-ext:*save-hooks*)
           ;; More than the kernel lists at once, none of them for programs.
           (dotimes (i 200)
             (sb-posix:fcntl (sb-posix:open "/dev/null" sb-posix:o-rdonly) sb-posix:f-setfd 0))"#,
    );
    good(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    good(&mut server, "checkpoint", json!({"action": "restore", "name": "x"}));
    // The standard ones, and the directory.
    assert_eq!(server.evaluate("*open*"), "=> 4");
    let text = server.evaluate(r#"(< (length (directory "/proc/self/fd/*" :resolve-symlinks nil)) 100)"#);
    assert_eq!(text, "=> T");
}
