//! Failures that cleanup forms cannot undo, and the user's debugger hooks.

use std::time::Duration;

use crate::support::{error, fresh};
use sbcl::report;

#[test]
fn cleanup_form_that_stops_the_unwinding_does_not_hide_the_error() {
    let lisp = fresh();
    let error = lisp.error("(progn (block nil (unwind-protect (error \"boom\") (return))) 5)");
    assert_eq!(error.message.text, "boom");
    assert!(lisp.last_error_text().contains("boom"));
    // The forms after the failed one are not evaluated.
    let outcome = lisp.eval("(block nil (unwind-protect (error \"boom\") (return))) (print :next)");
    assert!(outcome.is_error() && outcome.stdout.is_empty(), "{outcome:?}");
}

#[test]
fn last_of_several_errors_is_reported_and_earlier_errors_are_in_history() {
    let lisp = fresh();
    for code in [
        "(progn (block nil (unwind-protect (error \"first\") (return))) (error 'type-error :datum 1 :expected-type 'list))",
        "(unwind-protect (error \"first\") (error 'type-error :datum 1 :expected-type 'list))",
    ] {
        let outcome = lisp.eval(code);
        let last = error(code, &outcome);
        assert_eq!(last.kind, "TYPE-ERROR", "{code}");
        let history = lisp.session().error_history();
        assert_eq!((history[0].id, &*history[0].kind), (last.id, "TYPE-ERROR"));
        assert_eq!((history[1].id, &*history[1].message.text), (last.id - 1, "first"));
        let text = report::evaluation(&outcome);
        assert!(text.starts_with(&format!("[notice]\nE{} reached the debugger earlier: ", last.id - 1)), "{text}");
    }
}

#[test]
fn cleanup_forms_cannot_swallow_a_timeout() {
    let lisp = fresh();
    let limit = Duration::from_millis(200);
    for code in [
        "(progn (block nil (unwind-protect (loop) (return))) 5)",
        "(progn (block nil (unwind-protect (loop) (return))) (error \"after it\"))",
        "(progn (block nil (unwind-protect (error \"boom\") (loop))) 5)",
    ] {
        let outcome = lisp.eval_for(limit, code);
        assert_eq!(error(code, &outcome).kind, "TIMEOUT", "{code}");
    }
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn unknown_package_argument_offers_retry_abort_and_similar_names() {
    let lisp = fresh();
    lisp.values("(defpackage :some-library (:nicknames :some-lib) (:use :cl))");
    let outcome = lisp.eval_in("some-lob", "1");
    let error = error("some-lob", &outcome);
    assert_eq!(crate::support::restarts(&error), ["RETRY", "ABORT"]);
    assert!(error.message.text.contains("SOME-LIB"), "{error:?}");
    assert!(!lisp.last_error_text().contains("thread"), "{}", lisp.last_error_text());
}

#[test]
fn debugger_hook_and_invoke_debugger_hook_of_the_user_run_and_persist() {
    let lisp = fresh();
    lisp.values("(setf *debugger-hook* (lambda (c h) (declare (ignore h)) (format t \"hook ~A~%\" c)))");
    for round in 0..2 {
        let outcome = lisp.eval("(error \"boom\")");
        assert_eq!(outcome.stdout.text, "hook boom\n", "round {round}");
        assert_eq!(error("boom", &outcome).message.text, "boom");
    }
    // SBCL's *INVOKE-DEBUGGER-HOOK* runs before *DEBUGGER-HOOK*, and for BREAK as well, which by CLHS does not call
    // *DEBUGGER-HOOK*.
    lisp.values("(setf sb-ext:*invoke-debugger-hook* (lambda (c h) (declare (ignore h)) (format t \"sbcl ~A~%\" c)))");
    assert_eq!(lisp.eval("(error \"boom\")").stdout.text, "sbcl boom\nhook boom\n");
    assert_eq!(lisp.eval("(break \"here\")").stdout.text, "sbcl here\n");
    // A hook may exit non-locally, and the evaluation continues.
    lisp.values("(setf *debugger-hook* (lambda (c h) (declare (ignore c h)) (throw 'out :left)))");
    assert_eq!(lisp.value("(catch 'out (error \"boom\"))"), ":LEFT");
}

#[test]
fn error_in_debugger_hook_is_reported_as_a_notice() {
    let lisp = fresh();
    lisp.values("(setf *debugger-hook* (lambda (c h) (declare (ignore c h)) (error \"in the hook\")))");
    let outcome = lisp.eval("(error \"boom\")");
    assert_eq!(error("boom", &outcome).message.text, "boom");
    assert_eq!(
        outcome.notices,
        ["The function in the variable *DEBUGGER-HOOK* failed with SIMPLE-ERROR. To remove the function: \
          (setf *DEBUGGER-HOOK* nil)"]
    );
    lisp.values("(sb-ext:disable-debugger)");
    assert_eq!(lisp.error("(error \"boom\")").message.text, "boom");
}

#[test]
fn plus_variable_holds_the_previous_form_even_after_an_error() {
    let lisp = fresh();
    lisp.error("(error \"boom\")");
    assert_eq!(lisp.value("+"), "(ERROR \"boom\")");
    assert_eq!(lisp.value("++"), "(ERROR \"boom\")");
}

#[test]
fn small_bytes_consed_between_gcs_does_not_kill_the_image() {
    let lisp = fresh();
    lisp.values("(defvar *before* (sb-ext:bytes-consed-between-gcs)) (defun deep (n) (list (deep (1+ n))))");
    for bytes in [1, 0, 4096] {
        let set = format!("(setf (sb-ext:bytes-consed-between-gcs) {bytes})");
        assert_eq!(lisp.value(&set), bytes.to_string());
        for _ in 0..2 {
            assert_eq!(lisp.error("(car (first (list 1)))").kind, "TYPE-ERROR");
            assert_eq!(lisp.error("(deep 0)").kind, "SB-KERNEL::CONTROL-STACK-EXHAUSTED");
        }
        // The accessor returns the value that was set.
        assert_eq!(lisp.value("(sb-ext:bytes-consed-between-gcs)"), bytes.to_string());
    }
    // As in bare SBCL, an invalid value signals an error and a valid one takes effect unchanged.
    assert_eq!(lisp.error("(setf (sb-ext:bytes-consed-between-gcs) -1)").kind, "TYPE-ERROR");
    assert_eq!(lisp.value("(sb-ext:bytes-consed-between-gcs)"), "4096");
    lisp.values("(setf (sb-ext:bytes-consed-between-gcs) (* 1024 1024))");
    assert_eq!(lisp.value("(sb-ext:bytes-consed-between-gcs)"), "1048576");
    lisp.values("(setf (sb-ext:bytes-consed-between-gcs) *before*)");
    assert_eq!(lisp.value("(= *before* (sb-ext:bytes-consed-between-gcs))"), "T");
}
