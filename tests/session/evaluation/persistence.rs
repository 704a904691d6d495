//! State that persists from one evaluation to the next.

use super::*;

#[test]
fn definitions_persist_across_evaluations() {
    let lisp = fresh();
    lisp.values("(defun square (x) (* x x))");
    lisp.values(
        "(defvar *n* 6) (defparameter *p* 1) (defconstant +c+ 7) (defmacro twice (x) `(list ,x ,x)) (defstruct pt x)",
    );
    lisp.values("(defclass k () ((a :initarg :a :accessor a))) (defgeneric g (x)) (defmethod g ((x k)) (a x))");
    assert_eq!(
        lisp.value("(list (square *n*) *p* +c+ (twice 1) (pt-x (make-pt :x 2)) (g (make-instance 'k :a 9)))"),
        "(36 1 7 (1 1) 2 9)"
    );
}

#[test]
fn definitions_made_before_an_error_persist() {
    let lisp = fresh();
    lisp.error("(defun made-before () :made) (error \"stop\") (defun made-after () :never)");
    assert_eq!(lisp.value("(list (made-before) (fboundp 'made-after))"), "(:MADE NIL)");
}

#[test]
fn undeclared_variables_persist_across_evaluations() {
    let lisp = fresh();
    lisp.eval("(setf *undeclared* 41)");
    assert_eq!(lisp.value("(incf *undeclared*)"), "42");
    assert_eq!(lisp.value("*undeclared*"), "42");
}

#[test]
fn in_package_persists_across_evaluations() {
    let lisp = fresh();
    lisp.values("(defpackage :my-app (:use :cl)) (in-package :my-app)");
    assert_eq!(lisp.value("(package-name *package*)"), "\"MY-APP\"");
    lisp.values("(defun local () :local)");
    assert_eq!(lisp.value("'local"), "LOCAL");
    lisp.values("(in-package :cl-user)");
    assert_eq!(lisp.value("'my-app::local"), "MY-APP::LOCAL");
    assert_eq!(lisp.value("(my-app::local)"), ":LOCAL");
}

#[test]
fn in_package_applies_to_later_forms_of_the_same_call() {
    let lisp = fresh();
    let code = "(defpackage :fresh (:use :cl) (:export #:f))\n(in-package :fresh)\n(defun f () 'here)\n(in-package :cl-user)\n(fresh:f)";
    assert_eq!(lisp.value(code), "FRESH::HERE");
}

#[test]
fn defmacro_applies_to_later_forms_of_the_same_call() {
    assert_eq!(fresh().value("(defmacro ten () 10) (+ (ten) 1)"), "11");
}

#[test]
fn set_macro_character_applies_to_later_forms_of_the_same_call() {
    let lisp = fresh();
    assert_eq!(lisp.value("(setf *readtable* (copy-readtable)) (set-macro-character #\\$ (lambda (s c) (declare (ignore c)) (list 'quote (read s)))) $foo"), "FOO");
    assert_eq!(lisp.value("$bar"), "BAR");
    lisp.values("(setf *readtable* (copy-readtable nil))");
}

#[test]
fn package_argument_applies_to_one_call_only() {
    let lisp = fresh();
    lisp.values("(defpackage :other (:use :cl))");
    let outcome = lisp.eval_in("other", "(list *package* 'sym)");
    assert_eq!(values("other", &outcome), ["(#<PACKAGE \"OTHER\"> SYM)"]);
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
    assert_eq!(lisp.values("(find-symbol \"SYM\" :cl-user)"), ["NIL", "NIL"]);
}

#[test]
fn the_package_argument_is_read_like_a_symbol() {
    let lisp = fresh();
    lisp.values("(defpackage :other (:use :cl)) (defpackage \"mixed Case\" (:use :cl))");
    for name in ["other", "OTHER", "Other", "cl-user", "COMMON-LISP-USER"] {
        assert!(!lisp.eval_in(name, "(+ 1 1)").is_error(), "{name}");
    }
    assert!(!lisp.eval_in("|mixed Case|", "(+ 1 1)").is_error());
}

#[test]
fn error_under_a_package_argument_restores_the_current_package() {
    let lisp = fresh();
    lisp.values("(defpackage :other (:use :cl))");
    assert!(lisp.eval_in("other", "(error \"x\")").is_error());
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
}

#[test]
fn in_package_under_a_package_argument_ends_with_the_call() {
    let lisp = fresh();
    lisp.values("(defpackage :one (:use :cl)) (defpackage :two (:use :cl))");
    let outcome = lisp.eval_in("one", "(in-package :two) (package-name *package*)");
    assert_eq!(values("two", &outcome), ["\"TWO\""]);
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
}

#[test]
fn unknown_package_argument_is_an_error_that_suggests_similar_names() {
    let lisp = fresh();
    lisp.values("(defpackage :my-application (:use :cl))");
    let outcome = lisp.eval_in("my-aplication", "(+ 1 2)");
    let failure = error("package", &outcome);
    assert!(failure.kind.contains("PACKAGE"), "{}", failure.kind);
    assert!(failure.message.text.to_uppercase().contains("MY-APPLICATION"), "{}", failure.message.text);
    assert!(failure.message.text.to_uppercase().contains("MY-APLICATION"), "{}", failure.message.text);
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(lisp.session().last_error(), Some(failure));
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn deleting_the_current_package_falls_back_to_cl_user() {
    let lisp = fresh();
    lisp.values("(defpackage :doomed (:use :cl)) (in-package :doomed)");
    lisp.eval("(delete-package :doomed)");
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn non_package_value_of_the_package_variable_falls_back_to_cl_user() {
    let lisp = fresh();
    lisp.eval("(setf *package* 42)");
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
}

#[test]
fn star_variables_work_as_in_a_repl() {
    let lisp = fresh();
    lisp.values("1");
    lisp.values("(+ 1 1)");
    lisp.values("(values 3 4)");
    assert_eq!(lisp.value("(list * ** ***)"), "(3 2 1)");
}

#[test]
fn plus_and_slash_and_minus_work_as_in_a_repl() {
    let lisp = fresh();
    lisp.values("(values 1 2)");
    assert_eq!(lisp.value("(list / +)"), "((1 2) (VALUES 1 2))");
    assert_eq!(lisp.value("-"), "-");
    assert_eq!(lisp.value("(list -)"), "((LIST -))");
    lisp.values("(* 2 3)");
    lisp.values("(* 4 5)");
    assert_eq!(lisp.value("(list + ++ // ///)"), "((* 4 5) (* 2 3) (6) (((LIST -))))");
}

#[test]
fn each_form_of_a_call_updates_the_repl_variables() {
    let lisp = fresh();
    assert_eq!(lisp.value("1 2 (list * **)"), "(2 1)");
}

#[test]
fn an_error_does_not_change_star() {
    let lisp = fresh();
    lisp.values(":kept");
    lisp.error("(error \"x\")");
    assert_eq!(lisp.value("*"), ":KEPT");
}

#[test]
fn print_base_of_the_user_persists_and_does_not_change_reports() {
    let lisp = fresh();
    lisp.values("(setf *print-base* 2 *print-radix* t)");
    assert_eq!(lisp.value("10"), "#b1010");
    let outcome = lisp.eval("(defun f (x) (error \"no ~A\" (type-of x))) (f 10)");
    let text = report::evaluation(&outcome);
    assert!(text.contains("\n0: (ERROR") && text.contains("\n1: (F 10)"), "{text}");
    let timed = lisp.run(Evaluation { capture_time: true, ..Evaluation::new("1") });
    assert!(timed.timing.is_some());
}

#[test]
fn read_base_of_the_user_persists_and_does_not_change_reports() {
    let lisp = fresh();
    lisp.eval("(setf *read-base* 16)");
    assert_eq!(lisp.value("(list FF 10)"), "(255 16)");
    assert!(lisp.describe_text("car").starts_with("COMMON-LISP:CAR [FUNCTION]"));
    lisp.error("(error \"x\")");
    assert!(lisp.last_error_text().contains("1. RETRY"));
}

#[test]
fn hostile_printer_variables_do_not_disturb_a_report() {
    let lisp = fresh();
    lisp.eval("(setf *print-length* 0 *print-level* 0 *print-case* :downcase *print-escape* nil *print-lines* 1 *print-right-margin* 1 *print-readably* nil *print-base* 36 *print-array* nil *print-gensym* nil)");
    let outcome = lisp.eval("(defun shown (x y) (car x) y) (shown 35 \"text\")");
    let failure = error("shown", &outcome);
    assert_eq!(failure.kind, "TYPE-ERROR");
    assert_eq!(failure.message.text, "The value 35 is not of type LIST");
    assert!(failure.frames.iter().any(|frame| frame.call == "(SHOWN 35 \"text\")"), "{:#?}", failure.frames);
}

#[test]
fn print_readably_does_not_disturb_a_report() {
    let lisp = fresh();
    lisp.eval("(setf *print-readably* t)");
    let outcome = lisp.eval("(error \"stream ~A\" 1)");
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(error("x", &outcome).message.text, "stream 1");
    assert!(!lisp.eval("#'car").is_error(), "a value that cannot be printed readably is still a success");
}

#[test]
fn failing_pprint_dispatch_table_does_not_disturb_a_report() {
    let lisp = fresh();
    lisp.eval("(setf *print-pprint-dispatch* (copy-pprint-dispatch)) (set-pprint-dispatch 'cons (lambda (s o) (declare (ignore s o)) (error \"dispatch\")))");
    let outcome = lisp.eval("(error \"real\")");
    assert_eq!(error("x", &outcome).message.text, "real");
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
}

#[test]
fn the_users_print_case_persists() {
    let lisp = fresh();
    lisp.values("(setf *print-case* :downcase)");
    assert_eq!(lisp.value("'foo"), "foo");
    assert_eq!(lisp.error("(error 'type-error :datum 1 :expected-type 'string)").kind, "TYPE-ERROR");
}

#[test]
fn the_users_readtable_case_does_not_disturb_a_report() {
    let lisp = fresh();
    lisp.eval("(setf *readtable* (copy-readtable)) (setf (readtable-case *readtable*) :invert)");
    let failure = lisp.error("(error \"x\")");
    assert_eq!(failure.kind, "SIMPLE-ERROR");
    assert_eq!(failure.frames[0].call, "(ERROR \"x\")");
}

/// The environment variable with the file to which [`random_returns_an_integer`] writes its number in a child process.
const NUMBER_FILE: &str = "SBCL_TEST_RANDOM_NUMBER_FILE";

#[test]
fn random_returns_an_integer() {
    let number = fresh().value("(random (expt 2 64))");
    assert!(number.chars().all(|digit| digit.is_ascii_digit()), "{number}");
    if let Some(path) = std::env::var_os(NUMBER_FILE) {
        std::fs::write(path, number).expect("the number can be written");
    }
}

#[test]
fn every_process_starts_with_a_different_random_state() {
    let start = |which: u32| {
        let path = std::env::temp_dir().join(format!("sbcl-random-{}-{which}", std::process::id()));
        let program = std::env::current_exe().expect("the test's own program");
        let output = std::process::Command::new(program)
            .args(["--exact", "evaluation::persistence::random_returns_an_integer"])
            .env(NUMBER_FILE, &path)
            .output()
            .expect("the test's own program runs");
        assert!(output.status.success(), "{output:?}");
        let number = std::fs::read_to_string(&path).expect("a number");
        std::fs::remove_file(path).expect("the file can be removed");
        number
    };
    assert_ne!(start(1), start(2));
}

#[test]
fn tail_recursion_of_a_million_steps_does_not_exhaust_the_stack() {
    let lisp = fresh();
    assert_eq!(
        lisp.value("(defun count-down (n) (if (zerop n) :done (count-down (1- n)))) (count-down 1000000)"),
        ":DONE"
    );
}

#[test]
fn reading_standard_input_signals_end_of_file() {
    let lisp = fresh();
    for stream in ["*standard-input*", "*query-io*", "*debug-io*", "*terminal-io*"] {
        assert_eq!(lisp.error(&format!("(read-line {stream})")).kind, "END-OF-FILE", "{stream}");
        assert_eq!(lisp.value(&format!("(read-char {stream} nil :eof)")), ":EOF", "{stream}");
    }
    assert_eq!(lisp.value("(read nil nil :eof)"), ":EOF");
}

#[test]
fn capture_time_adds_a_timing_line_to_the_report() {
    let lisp = fresh();
    let outcome =
        lisp.run(Evaluation { capture_time: true, ..Evaluation::new("(make-array 1000000) (sleep 0.02) :slept") });
    let timing = outcome.timing.expect("timing was asked for");
    assert!(timing.real_ms >= 20, "{timing:?}");
    assert!(timing.bytes_consed >= 8_000_000, "{timing:?}");
    let text = report::evaluation(&outcome);
    let expected = format!(
        "=> :SLEPT\n; Timing: {}ms real, {}ms run, {}ms GC, {} bytes consed",
        timing.real_ms, timing.run_ms, timing.gc_ms, timing.bytes_consed
    );
    assert_eq!(text, expected);
    assert!(lisp.eval("1").timing.is_none());
}

#[test]
fn capture_time_of_a_failed_evaluation_gives_a_well_formed_report() {
    let outcome = fresh().run(Evaluation { capture_time: true, ..Evaluation::new("(error \"x\")") });
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
}
