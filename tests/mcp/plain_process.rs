//! A server without a supervisor: an evaluation that cannot be interrupted is answered and abandoned, and the process
//! ends only when its stuck thread blocks everything.

use crate::client::{Server, short_limit};
use crate::processes::signal;
use crate::server_mode::Mode;
use serde_json::json;

/// The exit status of a process in which a stuck thread blocks everything.
const BLOCKED_STATUS: i32 = 88;

fn plain() -> Server {
    let mut server = Mode::Plain.start_with(&["--heap", "512M", "--cleanup", "0.5"]);
    server.initialize("2025-06-18");
    server
}

/// Evaluates code with a short time limit.
fn evaluate_stuck(server: &mut Server, code: &str) -> (String, bool) {
    server.call_tool("evaluate-lisp", json!({"code": code, "timeout": short_limit()}))
}

/// The code is answered with TIMEOUT as abandoned, and further requests are served.
#[rstest::rstest]
#[case::loops("(sb-sys:without-interrupts (loop))")]
#[case::sleeps("(sb-sys:without-interrupts (sleep 1000))")]
#[case::allocates("(sb-sys:without-interrupts (loop (make-array 1000)))")]
#[case::compiles("(sb-sys:without-interrupts (loop (compile nil '(lambda () 1))))")]
#[case::macro_that_loops(
    "(progn (defmacro m () (sb-sys:without-interrupts (loop))) (funcall (compile nil '(lambda () (m)))))"
)]
#[case::finalizer(
    "(let ((begun nil))
       (dotimes (i 100)
         (finalize (list i) (lambda () (setf begun t) (sb-sys:without-interrupts (loop))) :dont-save t))
       (gc :full t)
       ;; Here or in SBCL's own thread for that.
       (sb-impl::run-pending-finalizers)
       (sb-sys:without-interrupts (loop until begun) (loop)))"
)]
#[case::hash_table(
    "(let ((h (make-hash-table :test 'equal)))
                      (sb-sys:without-interrupts (loop (setf (gethash (random 1000000) h) t) (clrhash h))))"
)]
#[case::mutex(
    "(let ((m (sb-thread:make-mutex)) (taken (sb-thread:make-semaphore)))
       (sb-thread:make-thread (lambda () (sb-thread:grab-mutex m) (sb-thread:signal-semaphore taken) (sleep 1000)))
       (sb-thread:wait-on-semaphore taken)
       (sb-sys:without-interrupts (sb-thread:with-mutex (m) 1)))"
)]
#[case::condition_handler(
    "(handler-bind ((serious-condition (lambda (c) c (loop)))) (sb-sys:without-interrupts (loop)))"
)]
#[case::cleanup_form("(unwind-protect (loop) (sb-sys:without-interrupts (loop)))")]
#[case::print_method(
    "(progn (defclass p () ()) (defmethod print-object ((p p) s) (declare (ignore s)) (sb-sys:without-interrupts (loop)))
            (make-instance 'p))"
)]
#[case::reader_macro(
    "(progn (set-macro-character #\\! (lambda (s c) (declare (ignore s c)) (sb-sys:without-interrupts (loop))))
            (read-from-string \"!x\"))"
)]
fn stuck_evaluation_is_abandoned_and_other_requests_still_work(#[case] code: &str) {
    let mut server = plain();
    let (text, is_error) = evaluate_stuck(&mut server, code);
    assert!(is_error && text.contains("TIMEOUT") && text.contains("thread was abandoned"), "{text}");
    let reason = match code.starts_with("(unwind-protect ") {
        true => "and could not finish unwinding, because cleanup forms keep running",
        false => "and did not respond to an interrupt (",
    };
    assert!(text.contains(reason), "{text}");
    let lock = "waiting for a lock without a name, which thread (unnamed) of evaluation 1 owns.\n";
    assert_eq!(text.contains(lock), code.contains("(sb-thread:with-mutex (m) 1)"), "{text}");
    let (text, _) = server.call_tool("describe-last-error", json!({}));
    assert!(text.contains("TIMEOUT"), "{text}");
    for (code, value) in [
        ("(+ 1 2)", "=> 3"),
        ("(defun f (x) (* x 2))", "=> F"),
        ("(progn (defclass k () ()) (f 4))", "=> 8"),
        ("(progn (gc :full t) :collected)", "=> :COLLECTED"),
        ("(sb-thread:join-thread (sb-thread:make-thread (lambda () 7)))", "=> 7"),
        ("(eq (sb-thread:main-thread) sb-thread:*current-thread*)", "=> T"),
        ("(defvar *mutex* (sb-thread:make-mutex))", "=> *MUTEX*"),
        ("(sb-thread:grab-mutex *mutex*)", "=> T"),
        ("(progn (sb-thread:release-mutex *mutex*) (sb-thread:mutex-owner *mutex*))", "=> NIL"),
    ] {
        assert_eq!(server.evaluate(code), value, "{code}");
    }
    let (text, is_error) = server.call_tool("describe-symbol", json!({"name": "f"}));
    assert!(!is_error, "{text}");
    assert_eq!(server.finish().status.code(), Some(0));
}

/// The client may write requests before it learns that the server ends.
#[test]
fn requests_that_are_unread_at_sigterm_are_answered() {
    let mut server = plain();
    let running = server.post_running("", "(loop)", 0.0);
    // The requests are written before the stopped process can end.
    signal(server.pid(), "-STOP");
    signal(server.pid(), "-TERM");
    let unread = ["1", "2", "3"].map(|code| server.post_call("evaluate-lisp", json!({"code": code})));
    signal(server.pid(), "-CONT");
    for id in unread.into_iter().chain([running]) {
        let answer = server.answer(id);
        assert_eq!(answer["error"]["message"], "the server is shutting down; the request was not finished", "{answer}");
    }
    assert_eq!(server.end().status.code(), Some(143));
}

/// The process reports to waiting clients why it ends, and exits with its own status.
#[rstest::rstest]
#[case::collections_inhibited("(sb-sys:without-gcing (loop))", "(gc :full t)", "the garbage collector")]
#[case::world_lock(
    "(sb-kernel::with-world-lock () (sb-sys:without-interrupts (loop)))",
    "(defclass k () ())",
    "holds the lock \"PCL global mutex\""
)]
#[case::package_lock(
    "(sb-thread:with-recursive-lock (sb-impl::*package-graph-lock*) (sb-sys:without-interrupts (loop)))",
    "(defpackage :new (:use :cl))",
    "holds the lock \"Package Graph Lock\""
)]
#[case::thread_lock(
    "(sb-thread:with-mutex (sb-thread::*make-thread-lock*) (sb-sys:without-interrupts (loop)))",
    "(+ 1 2)",
    "a lock that is needed to start a thread"
)]
fn process_exits_when_a_stuck_thread_blocks_all_others(#[case] code: &str, #[case] next: &str, #[case] why: &str) {
    let mut server = plain();
    let (text, is_error) = evaluate_stuck(&mut server, code);
    assert!(is_error && text.contains("TIMEOUT"), "{text}");
    let answer = server.request("tools/call", json!({"name": "evaluate-lisp", "arguments": {"code": next}}));
    let message = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(message.starts_with("the server stops: Lisp ") && message.contains(why), "{message}");
    let end = server.finish();
    assert_eq!(end.status.code(), Some(BLOCKED_STATUS));
    assert!(end.stderr.contains(why), "{}", end.stderr);
}

#[test]
fn process_exits_at_the_fifth_abandoned_thread() {
    let mut server = plain();
    for _ in 0..4 {
        let (text, _) = evaluate_stuck(&mut server, "(sb-sys:without-interrupts (loop (sleep 1)))");
        assert!(text.contains("thread was abandoned"), "{text}");
    }
    assert_eq!(server.evaluate("(+ 1 2)"), "=> 3");
    let call = json!({"name": "evaluate-lisp", "arguments": {"code": "(sb-sys:without-interrupts (loop (sleep 1)))", "timeout": short_limit()}});
    let answer = server.request("tools/call", call);
    let message = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(
        message.contains("An interrupted evaluation or inspection does not end, and 4 others already run"),
        "{message}"
    );
    assert_eq!(server.finish().status.code(), Some(BLOCKED_STATUS));
}

#[test]
fn abandoned_thread_that_ends_no_longer_counts_toward_the_limit() {
    let mut server = plain();
    assert_eq!(server.evaluate("(defvar *end* nil)"), "=> *END*");
    for round in 0..6 {
        assert_eq!(server.evaluate("(setf *end* nil)"), "=> NIL");
        let (text, _) = evaluate_stuck(&mut server, "(sb-sys:without-interrupts (loop until *end* do (sleep 0.01)))");
        assert!(text.contains("thread was abandoned"), "{round}: {text}");
        let gone = "(progn (setf *end* t)
                           (loop while (find \"abandoned\" (sb-thread:list-all-threads)
                                             :key #'sb-thread:thread-name :test #'equal)
                                 do (sleep 0.01))
                           :gone)";
        assert_eq!(server.evaluate(gone), "=> :GONE", "{round}");
    }
    assert_eq!(server.finish().status.code(), Some(0));
}

#[test]
fn every_repeated_reset_names_the_evaluation_that_it_could_not_end() {
    let mut server = plain();
    assert_eq!(server.evaluate("(defun f () 1)"), "=> F");
    evaluate_stuck(&mut server, "(sb-sys:without-interrupts (loop (sleep 1)))");
    // SBCL ends the process when nine interruptions are pending for a thread.
    for _ in 0..12 {
        let (text, is_error) = server.call_tool("reset-session", json!({}));
        let notice = "The reset could not end 1 interrupted evaluation or inspection. To end it, restart the server.";
        assert!(!is_error && text.contains(notice), "{text}");
    }
    assert_eq!(server.evaluate("(fboundp 'f)"), "=> NIL");
    assert_eq!(server.finish().status.code(), Some(0));
}

#[test]
fn stuck_inspection_and_background_evaluation_are_abandoned_too() {
    let mut server = plain();
    let code = "(progn (defclass p () ())
                       (defmethod print-object ((p p) s) (declare (ignore s)) (sb-sys:without-interrupts (loop)))
                       (defvar *p* (make-instance 'p)))";
    assert_eq!(server.evaluate(code), "=> *P*");
    let (text, is_error) = server.call_tool("describe-symbol", json!({"name": "*p*"}));
    assert!(is_error && text.contains("10 second"), "{text}");
    let (text, is_error) = server.call_tool("describe-symbol", json!({"name": "car"}));
    assert!(!is_error, "{text}");
    let arguments = json!({"code": "(sb-sys:without-interrupts (loop))", "timeout": short_limit(), "background": true});
    let (text, is_error) = server.call_tool("evaluate-lisp", arguments);
    assert!(!is_error, "{text}");
    let (text, is_error) = server.call_tool("check-evaluation", json!({"id": 2, "wait": 10}));
    assert!(is_error && text.contains("thread was abandoned"), "{text}");
    assert_eq!(server.evaluate("(+ 1 2)"), "=> 3");
    assert_eq!(server.finish().status.code(), Some(0));
}

#[test]
fn features_that_need_the_supervisor_are_refused_with_that_reason() {
    let mut server = Mode::Plain.start_unread(&["--session", "mine"]);
    server.start_reading();
    let answer = server.request(
        "initialize",
        json!({"protocolVersion": "2025-06-18", "capabilities": {},
                                                     "clientInfo": {"name": "test", "version": "1"}}),
    );
    let message = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(message.contains("--session needs the supervisor"), "{message}");
    assert_eq!(server.finish().status.code(), Some(1));
    let mut server = plain();
    let (text, is_error) = server.call_tool("checkpoint", json!({"action": "save", "name": "one"}));
    assert!(!is_error, "{text}");
    let (text, is_error) = server.call_tool("checkpoint", json!({"action": "restore", "name": "one"}));
    assert!(is_error && text.contains("--no-supervisor"), "{text}");
    assert_eq!(server.evaluate("(defun f () 1)"), "=> F");
    let (text, is_error) = server.call_tool("reset-session", json!({}));
    assert!(!is_error, "{text}");
    assert_eq!(server.evaluate("(fboundp 'f)"), "=> NIL");
    assert_eq!(server.finish().status.code(), Some(0));
}
