//! Threads: which exist, what keeps their memory alive, and which form a thread's definitions belong to.

use crate::support::fresh;
use sbcl::report::DefinitionFilter;

#[test]
fn evaluations_run_on_the_main_thread() {
    let lisp = fresh();
    assert_eq!(
        lisp.value(
            "(list (eq (sb-thread:main-thread) sb-thread:*current-thread*) (length (sb-thread:list-all-threads)))"
        ),
        "(T 1)"
    );
    let outcome = lisp.eval(
        "(let ((done (sb-thread:make-semaphore)))
           (sb-thread:make-thread (lambda ()
                                    (sb-thread:interrupt-thread (sb-thread:main-thread)
                                                                (lambda () (princ :interrupted)))
                                    (sb-thread:signal-semaphore done)))
           (sb-thread:wait-on-semaphore done)
           1)",
    );
    assert_eq!(outcome.stdout.text, "INTERRUPTED");
    assert_eq!(lisp.error("(sb-thread:abort-thread)").kind, "SB-THREAD::SIMPLE-THREAD-ERROR");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn memory_of_finished_threads_is_garbage_collected() {
    let lisp = fresh();
    // Allocates four times the limit below, so that memory that is kept by mistake exceeds it.
    let code = "(flet ((run (n) (dotimes (i n) (sb-thread:join-thread (sb-thread:make-thread
                  (lambda () (make-array 1000000 :element-type '(unsigned-byte 8))))))))
                  (run 400)
                  (sb-thread:join-thread (sb-thread:make-thread #'run :arguments '(400)))
                  (sb-ext:gc :full t)
                  (< (sb-kernel:dynamic-usage) 200000000))";
    assert_eq!(lisp.value(code), "T");
}

#[test]
fn system_threads_are_not_reported_as_still_running() {
    let outcome = fresh().eval("(sb-ext:gc)");
    assert!(outcome.notices.is_empty(), "{outcome:?}");
}

#[test]
fn definition_by_a_background_thread_is_not_attributed_to_other_forms() {
    let lisp = fresh();
    lisp.eval(
        "(defvar *stop* nil) (defvar *rounds* 0)
         (defvar *thread* (sb-thread:make-thread (lambda () (loop until *stop* do (eval '(defun redefined () 1)) (incf *rounds*)))))",
    );
    let code = "(let ((before *rounds*)) (loop while (< *rounds* (+ before 3)) do (sb-thread:thread-yield)) (+ 1 2))";
    assert_eq!(lisp.eval(code).defined, []);
    // Definitions by a thread that a form starts belong to that form.
    assert_eq!(
        lisp.eval("(sb-thread:join-thread (sb-thread:make-thread (lambda () (eval '(defun by-thread () 1)))))")
            .defined
            .len(),
        1
    );
    lisp.values("(setf *stop* t) (sb-thread:join-thread *thread*)");
    assert!(lisp.definitions_text(DefinitionFilter::Functions).contains("BY-THREAD"));
}
