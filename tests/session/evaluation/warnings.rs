//! Warnings, and invalid code that SBCL compiles into a run-time error.

use super::*;

#[test]
fn evaluation_continues_after_a_recorded_warning() {
    insta::assert_snapshot!(fresh().text("(warn \"caution\") :ok"), @r"
    [warnings]
    SIMPLE-WARNING: caution

    => :OK
    ");
}

#[test]
fn warnings_are_recorded_once_each_and_in_order() {
    let outcome = fresh().eval("(warn \"w1\") (warn \"w2\") (warn 'style-warning) (warn \"w3\") :done");
    assert_eq!(values("warn", &outcome), [":DONE"]);
    let found = warnings(&outcome);
    assert_eq!(found.len(), 4, "{found:?}");
    assert_eq!(found[0], "SIMPLE-WARNING: w1");
    assert_eq!(found[1], "SIMPLE-WARNING: w2");
    assert!(found[2].starts_with("STYLE-WARNING: "), "{found:?}");
    assert_eq!(found[3], "SIMPLE-WARNING: w3");
}

#[test]
fn repeated_warning_is_recorded_each_time() {
    assert_eq!(warnings(&fresh().eval("(dotimes (i 3) (warn \"again\"))")).len(), 3);
}

#[test]
fn warnings_keep_their_own_class() {
    let lisp = fresh();
    let outcome = lisp.eval(
        "(define-condition my-warning (warning) ((n :initarg :n :reader n)) (:report (lambda (c s) (format s \"number ~D\" (n c))))) \
         (warn 'my-warning :n 7) :after",
    );
    assert_eq!(warnings(&outcome), ["MY-WARNING: number 7"]);
    assert_eq!(values("my-warning", &outcome), [":AFTER"]);
}

#[test]
fn signalled_warning_without_a_muffle_warning_restart_is_recorded() {
    let outcome = fresh().eval("(list (signal 'simple-warning :format-control \"only signalled\") :after)");
    assert_eq!(warnings(&outcome), ["SIMPLE-WARNING: only signalled"]);
    assert_eq!(values("signal", &outcome), ["(NIL :AFTER)"]);
}

#[test]
fn user_handler_runs_first_and_handled_warnings_are_not_recorded() {
    let outcome = fresh().eval("(handler-bind ((warning #'muffle-warning)) (warn \"mine\")) :done");
    assert!(outcome.warnings.is_empty(), "{:?}", outcome.warnings);
    let outcome = fresh().eval("(handler-case (warn \"mine\") (warning () :caught))");
    assert_eq!(values("handler-case", &outcome), [":CAUGHT"]);
    assert!(outcome.warnings.is_empty(), "{:?}", outcome.warnings);
}

#[test]
fn warnings_before_an_error_are_reported() {
    let outcome = fresh().eval("(warn \"before\") (error \"after\")");
    assert_eq!(warnings(&outcome), ["SIMPLE-WARNING: before"]);
    assert_eq!(error("warn", &outcome).message.text, "after");
}

#[test]
fn compiler_warnings_are_recorded_once_each() {
    let outcome = fresh().eval("(defun with-unused (x) (let ((y 1)) 2))");
    let found = warnings(&outcome);
    assert_eq!(found.iter().filter(|warning| warning.contains(" X ")).count(), 1, "{found:?}");
    assert_eq!(found.iter().filter(|warning| warning.contains(" Y ")).count(), 1, "{found:?}");
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(values("defun", &outcome), ["WITH-UNUSED"]);
}

#[test]
fn an_undefined_function_is_warned_about_once() {
    let outcome = fresh().eval("(defun calls-nothing () (no-such-helper 1) (no-such-helper 2))");
    let found = warnings(&outcome);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("NO-SUCH-HELPER") && found[0].contains("undefined function"), "{found:?}");
}

#[test]
fn an_undefined_variable_is_warned_about() {
    let outcome = fresh().eval("(defun reads-nothing () *no-such-variable*)");
    let found = warnings(&outcome);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("WARNING: ") || found[0].starts_with("SIMPLE-WARNING: "), "{found:?}");
    assert!(found[0].contains("*NO-SUCH-VARIABLE*"), "{found:?}");
}

#[test]
fn type_conflict_is_a_warning_and_the_evaluation_succeeds() {
    let outcome = fresh().eval("(defun conflict () (+ 1 \"x\")) :value");
    assert_eq!(values("conflict", &outcome), [":VALUE"]);
    assert_eq!(outcome.warnings.len(), 1, "{:?}", outcome.warnings);
}

#[test]
fn redefinition_gives_no_warning() {
    let lisp = fresh();
    assert_eq!(lisp.text("(defun twice () 1)"), "=> TWICE");
    assert_eq!(lisp.text("(defun twice () 2)"), "=> TWICE");
    assert_eq!(lisp.text("(defmacro thrice () 1)"), "=> THRICE");
    assert_eq!(lisp.text("(defmacro thrice () 2)"), "=> THRICE");
    assert_eq!(lisp.text("(defgeneric fourth-time (x)) (defmethod fourth-time ((x integer)) 1) :ok"), "=> :OK");
    assert_eq!(lisp.text("(defmethod fourth-time ((x integer)) 2) :ok"), "=> :OK");
    assert_eq!(lisp.text("(twice)"), "=> 2");
}

#[test]
fn mutually_recursive_functions_in_one_call_give_no_warning() {
    let lisp = fresh();
    let code = "(defun even-p (n) (if (zerop n) t (odd-p (1- n))))\n(defun odd-p (n) (if (zerop n) nil (even-p (1- n))))\n(even-p 100)";
    assert_eq!(lisp.text(code), "=> T");
}

#[test]
fn variable_used_before_its_defvar_in_the_same_call_works() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun later () *later*) (defvar *later* 5) (later)");
    assert_eq!(values("later", &outcome), ["5"]);
}

#[test]
fn warnings_beyond_200_are_counted_as_omitted() {
    let lisp = fresh();
    let outcome = lisp.eval("(dotimes (i 250) (warn \"number ~D\" i))");
    assert_eq!(outcome.warnings.len(), 200);
    assert_eq!(outcome.warnings_omitted, 50);
    assert_eq!(outcome.warnings[199].message.text, "number 199");
    assert!(report::evaluation(&outcome).contains("50 warnings omitted"));
}

#[test]
fn a_warning_whose_report_fails_is_recorded() {
    let outcome = fresh().eval(
        "(define-condition bad-warning (warning) () (:report (lambda (c s) (declare (ignore c s)) (error \"no report\")))) \
         (warn 'bad-warning) :done",
    );
    assert_eq!(values("bad-warning", &outcome), [":DONE"]);
    let found = warnings(&outcome);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("BAD-WARNING: (the condition's report failed"), "{found:?}");
}

// Invalid code that SBCL compiles into a run-time error.

#[test]
fn malformed_let_in_a_function_is_recorded_as_a_compile_time_error() {
    let outcome = fresh().eval("(defun q () (let ((1 2)) 3))");
    assert_eq!(values("q", &outcome), ["Q"]);
    let found = warnings(&outcome);
    assert_eq!(found.iter().filter(|entry| entry.starts_with("COMPILE-TIME-ERROR: ")).count(), 1, "{found:?}");
    assert!(outcome.stderr.is_empty() && outcome.stdout.is_empty());
}

#[test]
fn failing_macro_in_a_function_is_recorded_as_a_compile_time_error() {
    let lisp = fresh();
    let outcome = lisp.eval("(defmacro fails () (error \"no expansion\")) (defun uses () (fails)) :ok");
    assert_eq!(values("uses", &outcome), [":OK"]);
    let found = warnings(&outcome);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("COMPILE-TIME-ERROR: ") && found[0].contains("no expansion"), "{found:?}");
    let failure = lisp.error("(uses)");
    assert_eq!(failure.kind, "SB-INT:COMPILED-PROGRAM-ERROR");
    assert_eq!(missing_frame(&failure, &["USES", "EVAL"]), None, "{:#?}", failure.frames);
}

#[test]
fn functions_around_a_function_that_fails_to_compile_are_defined() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun good-1 () 1) (defun bad () (let ((1 2)) 3)) (defun good-2 () (good-1)) (good-2)");
    assert_eq!(values("good-2", &outcome), ["1"]);
}
