//! Forking the process for a checkpoint while its threads are inside malloc or changing a weak hash table (`make
//! checkpoint-load` saves 500 checkpoints), and on old kernels.

#![cfg(target_os = "linux")]

use std::time::Instant;

use serde_json::json;

use crate::client::{Scratch, Server, call_err, call_ok};
use crate::server_mode::Mode;

/// Starts a server whose checkpoints are in `state`.
fn serve(mode: Mode, state: &Scratch) -> Server {
    let mut server = mode.start_with_environment(&[], &[("XDG_STATE_HOME", state)]);
    server.initialize("2025-11-25");
    server
}

/// Starts threads that work while *GO* is true.
const THREADS: &str = r#"
(defvar *go* t)
(defvar *tables* '())
(defun work (name function)
  (sb-thread:make-thread (lambda () (loop (if *go* (funcall function) (sleep 0.001)))) :name name))"#;

/// Allocates more than malloc's per-thread caches hold, so that each call takes the lock of an arena.
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

/// Stops SBCL's finalizer thread and starts it again. SBCL refuses to fork a process with several threads.
const FORK: &str = r#"
(require :sb-posix)
(work "forks" (lambda ()
                (ignore-errors (sb-posix:fork))
                (sleep 0.0003)))"#;

/// Saves checkpoints while threads execute `loads`, then restores the last one.
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
        // This is evaluated after the fork; until then the threads work, and afterwards they would only slow the save
        // down.
        server.evaluate("(setf *go* nil)");
        let (text, is_error) = server.outcome(saving);
        assert!(!is_error, "save {number}: {text}");
        if number % 50 == 0 {
            println!("{number} saved in {:?}", begin.elapsed());
        }
    }
    server.evaluate("(setf *go* nil)");
    call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "loaded"}));
    let text = server.evaluate(
        "(sb-ext:gc :full t)
         (dolist (table *tables*) (setf (gethash :key table) :value))
         (sb-ext:gc :full t)
         (list *go* (length (sb-thread:list-all-threads))
               (every (lambda (table) (eq :value (gethash :key table))) *tables*))",
    );
    assert_eq!(text, "=> (T 1 T)");
}

/// Returns the number of checkpoints that each test saves.
fn saves() -> usize {
    std::env::var("SBCL_MCP_LOADED_SAVES").ok().and_then(|saves| saves.parse().ok()).unwrap_or(4)
}

#[test]
fn save_works_with_threads_in_malloc() {
    save_under_load(&[ALLOCATE]);
}

#[test]
fn save_works_with_threads_changing_weak_tables() {
    save_under_load(&[INSERT]);
}

#[test]
fn save_works_with_threads_in_malloc_and_in_weak_tables() {
    save_under_load(&[ALLOCATE, INSERT]);
}

#[test]
fn save_works_with_a_thread_that_stops_and_starts_finalizers() {
    save_under_load(&[FORK]);
}

/// SBCL walks the space with the image's code while it holds a mutex that the copy, which walks all spaces, needs, too. On
/// aarch64 that space is empty, so the thread takes the mutex itself.
#[test]
fn save_works_while_a_thread_that_walks_the_heap_is_in_c_code() {
    let state = Scratch::new();
    let mut server = serve(Mode::Supervised, &state);
    server.evaluate(
        r#"(defvar *walks* nil)
           (defun walk (space)
             (sb-vm:map-allocated-objects
              (lambda (object type size)
                (declare (ignore object type size))
                (when (and (not *walks*) (sb-thread:mutex-owner sb-vm::*allocator-mutex*))
                  (setf *walks* t)
                  (sb-unix:nanosleep 1000 0)))
              space))
           ;; The thread starts and is awaited in one form: no code can be compiled once the mutex is held.
           (let ((spaces '(:immobile :text)))
             (sb-thread:make-thread
              (lambda ()
                (dolist (space spaces)
                  (ignore-errors (walk space)))
                #-x86-64
                (sb-thread::with-system-mutex (sb-vm::*allocator-mutex*)
                  (setf *walks* t)
                  (sb-unix:nanosleep 1000 0))))
             (loop until *walks* do (sleep 0.001)))"#,
    );
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
}

#[test]
fn save_names_a_thread_that_cannot_be_interrupted() {
    let state = Scratch::new();
    let mut server = serve(Mode::Supervised, &state);
    server.evaluate(
        r#"(defvar *spins* nil)
           (defvar *stop* nil)
           (sb-thread:make-thread (lambda () (sb-sys:without-interrupts (setf *spins* t) (loop until *stop*)))
                                  :name "spins")
           (loop until *spins* do (sleep 0.001))"#,
    );
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert!(
        text.contains("in 10 seconds was blocked, the last by thread spins in code that must not be interrupted"),
        "{text}"
    );
    server.evaluate("(setf *stop* t)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
}

#[test]
fn save_names_a_thread_that_never_stops_defining_a_class() {
    let state = Scratch::new();
    let mut server = serve(Mode::Supervised, &state);
    server.evaluate(
        r#"(defvar *defines* nil)
           (defvar *stop* nil)
           (sb-thread:make-thread (lambda ()
                                    (sb-kernel::with-world-lock ()
                                      (setf *defines* t)
                                      (loop until *stop* do (sleep 0.01))))
                                  :name "defines")
           (loop until *defines* do (sleep 0.001))"#,
    );
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert!(
        text.contains("the last by thread defines, which was defining or updating a class. A save is possible"),
        "{text}"
    );
    server.evaluate("(setf *stop* t)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
}

/// A saved image must boot and collect its garbage before it counts as a checkpoint.
#[test]
fn save_is_refused_when_the_saved_image_cannot_collect_garbage() {
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
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert_eq!(text, "Nothing was saved: the saved image does not boot; the server's stderr may say why.");
    server.evaluate("(pop sb-ext:*init-hooks*)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
}

/// Makes close_range(2) fail as before Linux 5.9, by a seccomp filter for all threads of the process.
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
fn save_works_on_a_kernel_without_close_range() {
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
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "x"}));
    // The three standard descriptors, and that of the directory listing.
    assert_eq!(server.evaluate("*open*"), "=> 4");
    let text = server.evaluate(r#"(< (length (directory "/proc/self/fd/*" :resolve-symlinks nil)) 100)"#);
    assert_eq!(text, "=> T");
}
