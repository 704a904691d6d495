//! What an evaluation answers: values, output, warnings, errors, limits, and what persists from one to the next.

mod support;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use sbcl::outcome::SymbolDescription;
use sbcl::report::{self, unescape_markers};
use sbcl::{Evaluation, Limits};
use support::{
    DEADLINE, MARKERS, calls, check_error_response, error, fresh, missing_frame, restarts, values, warnings,
};

/// A Lisp string literal that reads as `text`.
fn literal(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

// Success: sections, values.

#[test]
fn a_value_is_shown_after_an_arrow() {
    assert_eq!(fresh().text("(+ 1 2)"), "=> 3");
}

#[test]
fn several_values_have_a_line_each() {
    assert_eq!(fresh().text("(values 1 :two \"three\")"), "=> 1\n=> :TWO\n=> \"three\"");
}

#[test]
fn no_values_say_so() {
    assert_eq!(fresh().text("(values)"), "; No values");
}

#[test]
fn code_without_a_form_has_no_values() {
    let lisp = fresh();
    for code in ["", " \n\t ", "; only a comment", "#| a block |# ; and a line\n", "#+no-such-feature (car 1)"] {
        assert_eq!(lisp.text(code), "; No values", "{code:?}");
    }
}

#[test]
fn only_the_last_form_gives_values() {
    assert_eq!(fresh().text("1 2 (values 3 4)"), "=> 3\n=> 4");
}

#[test]
fn sections_come_in_order_with_one_blank_line_between() {
    let text = fresh().text(
        "(warn \"w\") (format *error-output* \"err~%\") (format t \"out~%\") (format *trace-output* \"trace~%\") :done",
    );
    let expected = "[stdout]\nout\n\n[stderr]\nerr\ntrace\n\n[warnings]\nSIMPLE-WARNING: w\n\n=> :DONE";
    assert_eq!(text, expected);
}

#[test]
fn sections_of_a_failure_come_in_the_same_order() {
    let text = fresh().text("(format t \"out\") (format *error-output* \"err\") (warn \"w\") (error \"boom\")");
    let start = "[stdout]\nout\n\n[stderr]\nerr\n\n[warnings]\nSIMPLE-WARNING: w\n\n[ERROR] SIMPLE-ERROR\nboom\n\n\
                 [Backtrace]\n0: (ERROR \"boom\")\n";
    assert!(text.starts_with(start), "{text}");
}

#[test]
fn empty_sections_are_left_out() {
    let lisp = fresh();
    assert_eq!(lisp.text("(format t \"x\")"), "[stdout]\nx\n\n=> NIL");
    assert_eq!(lisp.text("(format *error-output* \"y\")"), "[stderr]\ny\n\n=> NIL");
    assert_eq!(lisp.text("(progn (warn \"z\") 1)"), "[warnings]\nSIMPLE-WARNING: z\n\n=> 1");
}

#[test]
fn a_circular_list_is_a_value() {
    let value = fresh().value("(let ((l (list 1 2 3))) (setf (cdr (last l)) l) l)");
    assert_eq!(value, "#1=(1 2 3 . #1#)");
}

#[test]
fn a_list_shows_at_most_100_elements() {
    let lisp = fresh();
    let exact = lisp.value("(loop for i from 1 to 100 collect i)");
    assert!(exact.ends_with(" 100)") && !exact.contains("..."), "{exact}");
    let longer = lisp.value("(loop for i from 1 to 101 collect i)");
    assert!(longer.ends_with("100 ...)"), "{longer}");
    let vector = lisp.value("(make-array 1000 :initial-element 7)");
    assert!(vector.ends_with("...)"), "{vector}");
    assert_eq!(vector.matches('7').count(), 100, "{vector}");
}

#[test]
fn a_list_shows_at_most_10_levels() {
    let lisp = fresh();
    let nested = |depth: u32| format!("(let ((l :core)) (dotimes (i {depth}) (setf l (list l))) l)");
    assert_eq!(lisp.value(&nested(10)), format!("{}:CORE{}", "(".repeat(10), ")".repeat(10)));
    assert_eq!(lisp.value(&nested(11)), format!("{}#{}", "(".repeat(10), ")".repeat(10)));
}

#[test]
fn the_users_own_print_limits_win() {
    let lisp = fresh();
    lisp.values("(setf *print-length* 3 *print-level* 2)");
    assert_eq!(lisp.value("(list 1 2 3 4)"), "(1 2 3 ...)");
    assert_eq!(lisp.value("(list (list (list 1)))"), "((#))");
    lisp.values("(setf *print-length* 200)");
    assert!(lisp.value("(loop for i from 1 to 150 collect i)").ends_with(" 150)"));
}

#[test]
fn values_are_printed_pretty() {
    let value = fresh().value("'(defun some-function (argument) (let ((variable (compute argument))) (print variable) (list variable argument)))");
    assert!(value.lines().count() > 1, "{value}");
}

#[test]
fn a_print_method_that_aborts_is_one_that_fails() {
    let lisp = fresh();
    lisp.values("(defclass aborts () ()) (defmethod print-object ((x aborts) s) (abort))");
    assert_eq!(lisp.value("(make-instance 'aborts)"), "#<unprintable ABORTS>");
}

#[test]
fn an_unprintable_value_is_still_a_success() {
    let lisp = fresh();
    lisp.values(
        "(defclass broken () ()) (defmethod print-object ((o broken) s) (declare (ignore s)) (error \"never\"))",
    );
    assert_eq!(lisp.text("(make-instance 'broken)"), "=> #<unprintable BROKEN>");
    assert_eq!(lisp.text("(values 1 (make-instance 'broken) 2)"), "=> 1\n=> #<unprintable BROKEN>\n=> 2");
    assert!(lisp.session().last_error().is_none());
}

#[test]
fn an_unprintable_value_in_a_package_of_its_own_is_named_with_it() {
    let lisp = fresh();
    lisp.values("(defpackage :p (:use :cl)) (defclass p::broken () ()) (defmethod print-object ((o p::broken) s) (declare (ignore s)) (error \"never\"))");
    assert_eq!(lisp.text("(make-instance 'p::broken)"), "=> #<unprintable P::BROKEN>");
}

#[test]
fn a_print_method_that_overflows_the_stack_is_still_a_success() {
    let lisp = fresh();
    lisp.values("(defclass endless () ()) (defmethod print-object ((o endless) s) (list (print-object o s)))");
    assert_eq!(lisp.value("(make-instance 'endless)"), "#<unprintable ENDLESS>");
    assert_eq!(lisp.text("(+ 1 2)"), "=> 3");
}

#[test]
fn a_print_method_that_throws_is_still_a_success() {
    let lisp = fresh();
    lisp.values(
        "(defclass thrower () ()) (defmethod print-object ((o thrower) s) (declare (ignore s)) (throw 'nowhere 1))",
    );
    assert_eq!(lisp.text("(make-instance 'thrower)"), "=> #<unprintable THROWER>");
}

#[test]
fn a_print_method_decides_how_a_value_looks() {
    let lisp = fresh();
    lisp.values("(defclass loud () ()) (defmethod print-object ((o loud) s) (write-string \"LOUD\" s))");
    assert_eq!(lisp.text("(make-instance 'loud)"), "=> LOUD");
}

#[test]
fn a_huge_value_is_cut_and_the_count_is_exact() {
    let lisp = fresh();
    let outcome = lisp.eval("(make-string 200000 :initial-element #\\v)");
    let value = &outcome.result.as_ref().expect("it succeeds")[0];
    let kept = value.text.chars().count() as u64;
    assert_eq!(kept, 50_000);
    assert_eq!(value.omitted, 200_002 - kept);
    let text = report::evaluation(&outcome);
    assert!(text.ends_with("v[... 150002 characters omitted]"), "{}", &text[text.len() - 60..]);
}

#[test]
fn a_bignum_of_a_million_digits_is_cut() {
    let outcome = fresh().eval("(1- (expt 10 100000))");
    let value = &outcome.result.as_ref().expect("it succeeds")[0];
    assert!(value.text.chars().all(|digit| digit == '9'));
    assert_eq!(value.text.len() as u64 + value.omitted, 100_000);
    assert!(value.omitted > 0);
}

#[test]
fn values_print_readably_as_lisp_prints_them() {
    let lisp = fresh();
    for (code, value) in [
        ("\"a \\\"quoted\\\" \\\\ string\"", "\"a \\\"quoted\\\" \\\\ string\""),
        ("#\\Space", "#\\ "),
        ("'|mixed Case|", "|mixed Case|"),
        (":key", ":KEY"),
        ("1/3", "1/3"),
        ("1.5d0", "1.5d0"),
        ("#c(1 2)", "#C(1 2)"),
        ("'(quote x)", "'X"),
        ("#'car", "#<FUNCTION CAR>"),
        ("nil", "NIL"),
        ("#p\"/tmp/x\"", "#P\"/tmp/x\""),
    ] {
        assert_eq!(lisp.value(code), value, "{code}");
    }
}

// Captured output.

#[test]
fn output_goes_to_the_stream_it_was_written_to() {
    let outcome = fresh().eval(
        "(print 1) (format *error-output* \"e\") (format *trace-output* \"t\") (write-string \"o\") (format *terminal-io* \"\") 0",
    );
    assert_eq!(outcome.stdout.text, "\n1 o");
    assert_eq!(outcome.stderr.text, "et");
}

#[test]
fn trace_output_is_captured() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun traced (x) (* x 2)) (trace traced) (traced 21)");
    assert_eq!(values("traced", &outcome), ["42"]);
    assert!(outcome.stderr.text.contains("TRACED 21") && outcome.stderr.text.contains("42"), "{}", outcome.stderr.text);
    lisp.values("(untrace)");
}

#[test]
fn output_without_a_newline_is_complete() {
    assert_eq!(fresh().eval("(write-string \"no newline\") nil").stdout.text, "no newline");
}

#[test]
fn output_is_kept_when_the_evaluation_fails() {
    let outcome = fresh().eval("(format t \"hello\") (error \"boom\")");
    assert_eq!(outcome.stdout.text, "hello");
    assert_eq!(error("boom", &outcome).kind, "SIMPLE-ERROR");
}

#[test]
fn output_of_one_evaluation_is_not_in_the_next() {
    let lisp = fresh();
    assert_eq!(lisp.eval("(write-string \"first\")").stdout.text, "first");
    assert_eq!(lisp.eval("(write-string \"second\")").stdout.text, "second");
    assert!(lisp.eval("1").stdout.is_empty());
}

#[test]
fn output_in_the_middle_of_a_line_survives_fresh_line() {
    assert_eq!(fresh().eval("(format t \"a~&b~&~&c\") nil").stdout.text, "a\nb\nc");
}

#[test]
fn standard_output_can_be_rebound_by_the_user() {
    let lisp = fresh();
    assert_eq!(lisp.text("(with-output-to-string (*standard-output*) (write-string \"inner\"))"), "=> \"inner\"");
}

#[test]
fn the_compilers_chatter_never_reaches_the_output() {
    let lisp = fresh();
    for code in [
        "(defun chatter (x) (undefined-one x) (let ((unused 1)) 2))",
        "(defun dead-code () (if nil (car 1) 2))",
        "(defun badly-typed () (+ 1 \"x\"))",
        "(defun slow (x) (declare (optimize speed)) (+ x 1))",
        "(compile nil '(lambda (x) (car 5) y))",
        "(defmacro failing () (error \"expansion\")) (defun uses-failing () (failing))",
        "(defun malformed () (let ((1 2)) 3))",
    ] {
        let outcome = lisp.eval(code);
        assert!(outcome.stdout.is_empty(), "{code}: {}", outcome.stdout.text);
        assert!(outcome.stderr.is_empty(), "{code}: {}", outcome.stderr.text);
    }
}

#[test]
fn captured_output_is_limited_and_the_count_is_exact() {
    let lisp = fresh();
    let outcome = lisp.eval("(dotimes (i 3000000) (write-char #\\x)) :done");
    assert_eq!(outcome.stdout.text.chars().count(), 1_000_000);
    assert_eq!(outcome.stdout.omitted, 2_000_000);
    let text = report::evaluation(&outcome);
    assert!(text.ends_with("x[... 2000000 characters omitted]\n\n=> :DONE"), "{}", &text[text.len() - 80..]);
}

fn max_output(characters: u64) -> Limits {
    let mut limits = Limits::default();
    limits.set_max_output(characters).expect("it is allowed");
    limits
}

#[test]
fn limits_cannot_be_wrong() {
    let mut limits = Limits::default();
    let day = Duration::from_secs(86_400);
    for time in [Duration::ZERO, Duration::from_micros(999), day + Duration::from_millis(1), Duration::MAX] {
        assert!(limits.set_timeout(Some(time)).is_err() && limits.set_hold(time).is_err(), "{time:?}");
    }
    assert_eq!(limits, Limits::default());
    limits.set_timeout(None).unwrap();
    limits.set_hold(day).unwrap();
    let text = serde_json::to_string(&limits).unwrap();
    assert_eq!(serde_json::from_str::<Limits>(&text).unwrap(), limits);
    for (right, wrong) in [("\"max_output\":1000000", "\"max_output\":0"), ("\"secs\":86400", "\"secs\":86401")] {
        let changed = text.replace(right, wrong);
        assert_ne!(changed, text);
        assert!(serde_json::from_str::<Limits>(&changed).is_err(), "{changed}");
    }
}

#[test]
fn the_output_limit_holds_for_stdout_and_stderr_together() {
    let lisp = fresh();
    lisp.session().set_limits(max_output(100_000));
    let outcome =
        lisp.eval("(dotimes (i 80000) (write-char #\\o)) (dotimes (i 80000) (write-char #\\e *error-output*)) :done");
    assert_eq!(outcome.stdout.text.chars().count(), 80_000);
    assert_eq!(outcome.stdout.omitted, 0);
    assert_eq!(outcome.stderr.text.chars().count(), 20_000);
    assert_eq!(outcome.stderr.omitted, 60_000);
}

#[test]
fn the_output_limit_can_be_set() {
    let lisp = fresh();
    let mut limits = Limits::default();
    limits.set_max_output(10).expect("ten is allowed");
    lisp.session().set_limits(limits);
    assert_eq!(
        lisp.text("(write-string \"0123456789abc\") nil"),
        "[stdout]\n0123456789[... 3 characters omitted]\n\n=> NIL"
    );
    assert_eq!(lisp.text("(write-string \"0123456789\") nil"), "[stdout]\n0123456789\n\n=> NIL");
}

#[test]
fn limits_count_characters_and_not_bytes() {
    let lisp = fresh();
    let mut limits = Limits::default();
    limits.set_max_output(4).expect("four is allowed");
    lisp.session().set_limits(limits);
    let outcome = lisp.eval("(write-string \"λé😀日本語\") nil");
    assert_eq!(outcome.stdout.text, "λé😀日");
    assert_eq!(outcome.stdout.omitted, 2);
}

#[test]
fn limits_out_of_range_are_refused() {
    let mut limits = Limits::default();
    for characters in [0, 10_000_001, u64::MAX] {
        let refused = limits.set_max_output(characters).expect_err("out of range");
        assert!(refused.to_string().contains("1 to 10000000"), "{refused}");
    }
    for seconds in [-1.0, f64::NAN, f64::INFINITY, 86_400.5] {
        let refused = Limits::timeout_from_seconds(seconds).expect_err("out of range");
        assert!(refused.to_string().contains("86400"), "{refused}");
    }
    assert_eq!(Limits::timeout_from_seconds(0.0), Ok(None));
    assert_eq!(Limits::timeout_from_seconds(1.5), Ok(Some(Duration::from_millis(1500))));
    assert_eq!(limits, Limits::default());
}

#[test]
fn limits_survive_a_reset() {
    let lisp = fresh();
    let limits = max_output(5);
    lisp.session().set_limits(limits);
    lisp.reset();
    assert_eq!(lisp.session().limits(), limits);
    assert_eq!(lisp.eval("(write-string \"0123456789\") nil").stdout.text, "01234");
}

#[test]
fn endless_output_is_stopped_by_the_time_limit_and_stays_bounded() {
    let lisp = fresh();
    lisp.session().set_limits(max_output(100_000));
    let outcome = lisp.eval_for(Duration::from_millis(300), "(loop (write-line \"more and more\"))");
    assert_eq!(error("loop", &outcome).kind, "TIMEOUT");
    assert_eq!(outcome.stdout.text.chars().count(), 100_000);
    assert!(outcome.stdout.omitted > 0);
}

// Warnings.

#[test]
fn a_warning_is_recorded_and_the_evaluation_goes_on() {
    assert_eq!(fresh().text("(warn \"caution\") :ok"), "[warnings]\nSIMPLE-WARNING: caution\n\n=> :OK");
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
fn the_same_warning_twice_is_two_warnings() {
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
fn a_signalled_warning_without_muffle_warning_is_recorded_and_left_alone() {
    let outcome = fresh().eval("(list (signal 'simple-warning :format-control \"only signalled\") :after)");
    assert_eq!(warnings(&outcome), ["SIMPLE-WARNING: only signalled"]);
    assert_eq!(values("signal", &outcome), ["(NIL :AFTER)"]);
}

#[test]
fn the_users_handler_sees_a_warning_first() {
    let outcome = fresh().eval("(handler-bind ((warning #'muffle-warning)) (warn \"mine\")) :done");
    assert!(outcome.warnings.is_empty(), "{:?}", outcome.warnings);
    let outcome = fresh().eval("(handler-case (warn \"mine\") (warning () :caught))");
    assert_eq!(values("handler-case", &outcome), [":CAUGHT"]);
    assert!(outcome.warnings.is_empty(), "{:?}", outcome.warnings);
}

#[test]
fn warnings_before_an_error_are_told() {
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
fn a_type_conflict_is_a_warning_and_the_value_stays() {
    let outcome = fresh().eval("(defun conflict () (+ 1 \"x\")) :value");
    assert_eq!(values("conflict", &outcome), [":VALUE"]);
    assert_eq!(outcome.warnings.len(), 1, "{:?}", outcome.warnings);
}

#[test]
fn a_redefinition_is_not_mentioned() {
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
fn functions_that_call_each_other_may_be_sent_together() {
    let lisp = fresh();
    let code = "(defun even-p (n) (if (zerop n) t (odd-p (1- n))))\n(defun odd-p (n) (if (zerop n) nil (even-p (1- n))))\n(even-p 100)";
    assert_eq!(lisp.text(code), "=> T");
}

#[test]
fn a_variable_used_before_it_is_defined_in_the_same_call_is_still_usable() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun later () *later*) (defvar *later* 5) (later)");
    assert_eq!(values("later", &outcome), ["5"]);
}

#[test]
fn more_warnings_than_the_limit_are_counted() {
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

// What SBCL compiles into a run-time error.

#[test]
fn a_malformed_let_in_a_function_is_a_compile_time_error_entry() {
    let outcome = fresh().eval("(defun q () (let ((1 2)) 3))");
    assert_eq!(values("q", &outcome), ["Q"]);
    let found = warnings(&outcome);
    assert_eq!(found.iter().filter(|entry| entry.starts_with("COMPILE-TIME-ERROR: ")).count(), 1, "{found:?}");
    assert!(outcome.stderr.is_empty() && outcome.stdout.is_empty());
}

#[test]
fn a_failing_macro_in_a_function_is_a_compile_time_error_entry() {
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
fn functions_beside_a_broken_one_are_defined() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun good-1 () 1) (defun bad () (let ((1 2)) 3)) (defun good-2 () (good-1)) (good-2)");
    assert_eq!(values("good-2", &outcome), ["1"]);
}

// Persistence.

#[test]
fn definitions_persist() {
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
fn variables_persist() {
    let lisp = fresh();
    lisp.eval("(setf *undeclared* 41)");
    assert_eq!(lisp.value("(incf *undeclared*)"), "42");
    assert_eq!(lisp.value("*undeclared*"), "42");
}

#[test]
fn the_current_package_persists() {
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
fn in_package_works_on_the_forms_after_it_in_the_same_call() {
    let lisp = fresh();
    let code = "(defpackage :fresh (:use :cl) (:export #:f))\n(in-package :fresh)\n(defun f () 'here)\n(in-package :cl-user)\n(fresh:f)";
    assert_eq!(lisp.value(code), "FRESH::HERE");
}

#[test]
fn a_macro_works_on_the_forms_after_it_in_the_same_call() {
    assert_eq!(fresh().value("(defmacro ten () 10) (+ (ten) 1)"), "11");
}

#[test]
fn a_reader_macro_works_on_the_forms_after_it_in_the_same_call() {
    let lisp = fresh();
    assert_eq!(lisp.value("(setf *readtable* (copy-readtable)) (set-macro-character #\\$ (lambda (s c) (declare (ignore c)) (list 'quote (read s)))) $foo"), "FOO");
    assert_eq!(lisp.value("$bar"), "BAR");
    lisp.values("(setf *readtable* (copy-readtable nil))");
}

#[test]
fn the_package_argument_applies_to_that_call_alone() {
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
fn an_error_in_another_package_does_not_leave_it_current() {
    let lisp = fresh();
    lisp.values("(defpackage :other (:use :cl))");
    assert!(lisp.eval_in("other", "(error \"x\")").is_error());
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
}

#[test]
fn in_package_under_a_package_argument() {
    let lisp = fresh();
    lisp.values("(defpackage :one (:use :cl)) (defpackage :two (:use :cl))");
    let outcome = lisp.eval_in("one", "(in-package :two) (package-name *package*)");
    assert_eq!(values("two", &outcome), ["\"TWO\""]);
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
}

#[test]
fn an_unknown_package_is_an_error_with_near_names() {
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
fn a_deleted_package_falls_back_to_cl_user() {
    let lisp = fresh();
    lisp.values("(defpackage :doomed (:use :cl)) (in-package :doomed)");
    lisp.eval("(delete-package :doomed)");
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn a_package_set_to_nonsense_does_not_disturb() {
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
fn the_forms_of_one_call_count_for_the_repl_variables() {
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
fn the_users_print_base_persists_and_does_not_disturb_the_server() {
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
fn the_users_read_base_persists_and_does_not_disturb_the_server() {
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
fn a_hostile_dispatch_table_does_not_disturb_a_report() {
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

/// Where [`a_random_number`] writes its number, in a process started for that.
const NUMBER_FILE: &str = "SBCL_TEST_RANDOM_NUMBER_FILE";

#[test]
fn a_random_number() {
    let number = fresh().value("(random (expt 2 64))");
    assert!(number.chars().all(|digit| digit.is_ascii_digit()), "{number}");
    if let Some(path) = std::env::var_os(NUMBER_FILE) {
        std::fs::write(path, number).expect("the number can be written");
    }
}

#[test]
fn every_start_has_its_own_random_state() {
    let start = |which: u32| {
        let path = std::env::temp_dir().join(format!("sbcl-random-{}-{which}", std::process::id()));
        let program = std::env::current_exe().expect("the test's own program");
        let output = std::process::Command::new(program)
            .args(["--exact", "a_random_number"])
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
fn a_tail_recursive_loop_of_a_million_steps() {
    let lisp = fresh();
    assert_eq!(
        lisp.value("(defun count-down (n) (if (zerop n) :done (count-down (1- n)))) (count-down 1000000)"),
        ":DONE"
    );
}

#[test]
fn reads_from_standard_input_meet_the_end_of_file() {
    let lisp = fresh();
    for stream in ["*standard-input*", "*query-io*", "*debug-io*", "*terminal-io*"] {
        assert_eq!(lisp.error(&format!("(read-line {stream})")).kind, "END-OF-FILE", "{stream}");
        assert_eq!(lisp.value(&format!("(read-char {stream} nil :eof)")), ":EOF", "{stream}");
    }
    assert_eq!(lisp.value("(read nil nil :eof)"), ":EOF");
}

#[test]
fn capture_time_adds_a_last_line() {
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
fn a_failed_evaluation_can_be_timed() {
    let outcome = fresh().run(Evaluation { capture_time: true, ..Evaluation::new("(error \"x\")") });
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
}

// Failure.

#[test]
fn the_contracts_division() {
    let text = fresh().text("(/ 1 0)");
    let start = "[ERROR] DIVISION-BY-ZERO\narithmetic error DIVISION-BY-ZERO signalled\nOperation was (/ 1 0).\n\n[Backtrace]\n0: (ERROR DIVISION-BY-ZERO ";
    assert!(text.starts_with(start), "{text}");
    let end = "\n1: (SB-KERNEL::INTEGER-/-INTEGER 1 0)\n2: (/ 1 0)\n3: (SB-INT:SIMPLE-EVAL-IN-LEXENV (/ 1 0) #<NULL-LEXENV>)\n4: (EVAL (/ 1 0))";
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn the_frame_of_an_undefined_function_has_the_called_name() {
    let failure = fresh().error("(nonexistent-func 42)");
    assert_eq!(failure.kind, "UNDEFINED-FUNCTION");
    assert_eq!(failure.frames[0].call, "(NONEXISTENT-FUNC 42)");
    assert!(restarts(&failure).ends_with(&["RETRY", "ABORT"]), "{:?}", failure.restarts);
}

#[test]
fn an_undefined_function_offers_the_same_the_second_time() {
    let lisp = fresh();
    let first = lisp.error("(undefined-twice 1)");
    let second = lisp.error("(undefined-twice 1)");
    assert_eq!(restarts(&first), ["CONTINUE", "USE-VALUE", "RETURN-VALUE", "RETURN-NOTHING", "RETRY", "ABORT"]);
    assert_eq!(second.kind, first.kind);
    assert!(restarts(&second).ends_with(&["RETRY", "ABORT"]), "{:?}", second.restarts);
}

#[test]
fn a_message_is_one_line_where_nothing_says_otherwise() {
    let lisp = fresh();
    assert_eq!(lisp.error("(+ 1 \"x\")").message.text, "The value \"x\" is not of type NUMBER");
    let long = lisp.error("(error \"about ~S\" (loop for i below 60 collect (list i :a-rather-long-keyword)))");
    assert_eq!(long.message.text.lines().count(), 1, "{}", long.message.text);
}

#[test]
fn frames_are_one_line_each() {
    let lisp = fresh();
    let failure = lisp.error("(defun f (s l) (error \"x\" s l)) (f (format nil \"a~%b\") (loop for i below 60 collect :a-rather-long-keyword))");
    let frame = failure.frames.iter().find(|frame| calls(&frame.call, "F")).expect("a frame of F");
    assert!(frame.call.starts_with("(F \"a\\nb\" (:A-RATHER-LONG-KEYWORD"), "{}", frame.call);
    assert!(failure.frames.iter().all(|frame| !frame.call.contains('\n')));
}

#[test]
fn frames_are_limited() {
    let lisp = fresh();
    let failure = lisp.error("(defun f (s) (error \"x\" s)) (f (make-string 100000 :initial-element #\\z))");
    let frame = failure.frames.iter().find(|frame| calls(&frame.call, "F")).expect("a frame of F");
    assert!(frame.call.chars().count() < 360, "{} characters", frame.call.chars().count());
    assert!(frame.call.contains("characters omitted]"), "{}", frame.call);
}

#[test]
fn messages_are_limited_and_the_count_is_exact() {
    let failure = fresh().error("(error \"~A\" (make-string 25000 :initial-element #\\m))");
    assert_eq!(failure.message.text.chars().count(), 10_000);
    assert_eq!(failure.message.omitted, 15_000);
}

#[test]
fn at_most_20_frames_are_in_the_report() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun deep (n) (if (zerop n) (error \"deep\") (list (deep (1- n))))) (deep 50)");
    let failure = error("deep", &outcome);
    let text = report::evaluation(&outcome);
    let last = format!("\n... {} more frames (get-backtrace shows them)", failure.total_frames - 20);
    assert!(text.ends_with(&last), "{text}");
    assert!(text.contains("\n19: (DEEP 18)\n..."), "{text}");
    check_error_response(&text).expect("a well-formed report");
}

#[test]
fn a_frame_of_a_function_shows_its_arguments() {
    let lisp = fresh();
    let failure =
        lisp.error("(defun shows (a b &optional c &key d) (error \"x\" a b c d)) (shows 1 \"two\" :three :d '(4))");
    let frame = failure.frames.iter().find(|frame| calls(&frame.call, "SHOWS")).expect("a frame of SHOWS");
    assert_eq!(frame.call, "(SHOWS 1 \"two\" :THREE :D (4))");
}

#[test]
fn retry_and_abort_are_described() {
    let failure = fresh().error("(error \"x\")");
    let described: Vec<(&str, &str)> =
        failure.restarts.iter().map(|restart| (restart.name.as_str(), restart.description.as_str())).collect();
    assert_eq!(described, [("RETRY", "Evaluate this form again."), ("ABORT", "Return to top level.")]);
}

#[test]
fn invoking_abort_ends_the_evaluation_and_not_the_process() {
    let lisp = fresh();
    _ = lisp.eval("(write-string \"before\") (invoke-restart 'abort) (write-string \"after\")");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
    _ = lisp.eval("(abort)");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_restarts_of_the_form_can_be_had_as_values() {
    let lisp = fresh();
    let names = "(loop for restart in (compute-restarts) repeat 2 collect (symbol-name (restart-name restart)))";
    assert_eq!(lisp.value(names), "(\"RETRY\" \"ABORT\")");
    let shown = lisp.value("(compute-restarts)");
    assert!(shown.matches("#<RESTART").count() >= 2, "{shown}");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn invoking_retry_evaluates_the_form_again() {
    let lisp = fresh();
    lisp.values("(defvar *tries* 0)");
    assert_eq!(lisp.value("(if (< (incf *tries*) 3) (invoke-restart (find \"RETRY\" (compute-restarts) :key #'restart-name :test #'string=)) (list :tries *tries*))"), "(:TRIES 3)");
}

#[test]
fn describing_the_last_error_looks_as_the_contract_says() {
    let lisp = fresh();
    lisp.error("(restart-case (/ 1 0) (use-zero () :report \"Use zero\" 0))");
    let text = lisp.last_error_text();
    let (head, tail) = text.split_once("\n\nTime: ").expect("a time");
    assert_eq!(
        head,
        "Error: DIVISION-BY-ZERO\n  arithmetic error DIVISION-BY-ZERO signalled\n  Operation was (/ 1 0)."
    );
    let (time, rest) = tail.split_once('\n').expect("something after the time");
    assert!(time.len() == 20 && time.ends_with('Z') && time.as_bytes()[10] == b'T', "{time}");
    let (id, rest) = rest.split_once('\n').expect("something after the identifier");
    assert!(id.strip_prefix("Id: E").is_some_and(|number| number.parse::<u64>().is_ok()), "{id}");
    let (form, rest) = rest.split_once('\n').expect("something after the form");
    assert_eq!(form, "Form: 1 (line 1): (restart-case (/ 1 0) (use-zero () :report \"Use zero\" 0))");
    let start = "\nAvailable Restarts:\n  1. USE-ZERO - Use zero\n  2. RETRY - Evaluate this form again.\n  3. ABORT - Return to top level.\n\nBacktrace (top 5 frames):\n  0: (ERROR DIVISION-BY-ZERO ";
    assert!(rest.starts_with(start), "{text}");
    assert!(rest.ends_with("\n\nFor full backtrace, use get-backtrace tool."), "{text}");
}

#[test]
fn describing_no_error_looks_as_the_contract_says() {
    let lisp = fresh();
    let none = "No error information available.\n(No error has occurred since the last successful evaluation)";
    assert_eq!(lisp.last_error_text(), none);
    assert_eq!(lisp.backtrace_text(20), none);
}

#[test]
fn a_backtrace_looks_as_the_contract_says() {
    let lisp = fresh();
    lisp.error("(defun deep (n) (if (zerop n) (error \"deep\") (list (deep (1- n))))) (deep 50)");
    let total = lisp.session().last_error().expect("an error").total_frames;
    let text = lisp.backtrace_text(10);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("Backtrace for SIMPLE-ERROR (10 of {total} frames):"));
    assert_eq!(lines[1], "  0: (ERROR \"deep\")");
    assert_eq!(
        lines[lines.len() - 1],
        format!("{} more frames; ask for max-frames {total} to see them all.", total - 10)
    );
    let whole = lisp.backtrace_text(total);
    assert!(whole.starts_with(&format!("Backtrace for SIMPLE-ERROR ({total} of {total} frames):")), "{whole}");
    assert!(!whole.contains("more frames"), "{whole}");
}

// Reader errors.

#[test]
fn a_reader_error_says_line_and_column() {
    let lisp = fresh();
    for (code, line) in [
        ("(list 1)\n(foo #<bar>)", 2),
        (")", 1),
        ("(+ 1 2)\n\n   )", 3),
        ("(progn\n  (print 1)\n  (no-such-package:sym))", 3),
        ("(defun f ()\n  (list 1 2)", 2),
        ("\"never closed\nstring", 2),
        ("#| never closed\n\n", 3),
        ("(list 1)\n\n(list . )", 3),
    ] {
        let failure = lisp.error(code);
        let message = failure.message.text.to_lowercase();
        assert!(
            message.contains(&format!("line {line}")) || message.contains(&format!("line: {line}")),
            "{code:?}: {message}"
        );
        assert!(message.contains("column"), "{code:?}: {message}");
        assert!(restarts(&failure).ends_with(&["RETRY", "ABORT"]), "{code:?}: {:?}", failure.restarts);
    }
}

#[test]
fn forms_before_a_reader_error_are_evaluated() {
    let lisp = fresh();
    let outcome = lisp.eval("(defvar *before* :evaluated) (write-string \"out\") (list 1");
    assert_eq!(outcome.stdout.text, "out");
    assert_eq!(error("list", &outcome).kind, "END-OF-FILE");
    assert_eq!(lisp.value("*before*"), ":EVALUATED");
}

#[test]
fn a_reader_error_of_a_stream_of_the_users_is_not_one_of_the_code() {
    let failure = fresh().error("(defun parse (s) (read-from-string s)) (parse \"(1 2\")");
    assert_eq!(failure.kind, "END-OF-FILE");
    assert_eq!(missing_frame(&failure, &["PARSE", "EVAL"]), None, "{:#?}", failure.frames);
    assert!(!failure.message.text.contains("The code ends"), "{}", failure.message.text);
}

// Time limits and cancellation.

#[test]
fn an_endless_loop_meets_the_time_limit() {
    let lisp = fresh();
    let started = Instant::now();
    let outcome = lisp.eval_for(Duration::from_millis(300), "(defun spin () (loop)) (spin)");
    assert!(started.elapsed() < DEADLINE / 4, "{:?}", started.elapsed());
    let failure = error("loop", &outcome);
    assert_eq!(failure.kind, "TIMEOUT");
    assert!(failure.message.text.contains("configure-limits"), "{}", failure.message.text);
    assert!(failure.message.text.contains("0.3") || failure.message.text.contains("300"), "{}", failure.message.text);
    assert_eq!(missing_frame(&failure, &["SPIN", "EVAL"]), None, "{:#?}", failure.frames);
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(lisp.session().last_error(), Some(failure));
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_interrupted_code_is_the_innermost_frame() {
    let outcome = fresh().eval_for(Duration::from_millis(300), "(defun spin () (loop)) (spin)");
    let failure = error("loop", &outcome);
    assert!(calls(&failure.frames[0].call, "SPIN"), "{:#?}", failure.frames);
}

#[test]
fn a_long_sleep_meets_the_time_limit() {
    let lisp = fresh();
    let outcome = lisp.eval_for(Duration::from_millis(200), "(defun naps () (list (sleep 100))) (naps)");
    let failure = error("sleep", &outcome);
    assert_eq!(failure.kind, "TIMEOUT");
    assert_eq!(missing_frame(&failure, &["NAPS", "EVAL"]), None, "{:#?}", failure.frames);
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn partial_output_is_kept_at_a_time_limit() {
    let outcome = fresh().eval_for(Duration::from_millis(300), "(write-string \"partial\") (warn \"early\") (loop)");
    assert_eq!(outcome.stdout.text, "partial");
    assert_eq!(warnings(&outcome), ["SIMPLE-WARNING: early"]);
    assert_eq!(error("loop", &outcome).kind, "TIMEOUT");
}

#[test]
fn handlers_cannot_swallow_a_time_limit() {
    let lisp = fresh();
    for code in [
        "(loop (ignore-errors (loop)))",
        "(loop (handler-case (sleep 1) (serious-condition () nil) (condition () nil)))",
        "(handler-bind ((condition (lambda (c) (declare (ignore c)) (loop)))) (loop (sleep 1)))",
        "(loop (catch 'top (restart-case (loop) (abort () 1) (retry () 2))))",
        "(loop (block nil (unwind-protect (sleep 1) (ignore-errors (sleep 0.01)))))",
    ] {
        let outcome = lisp.eval_for(Duration::from_millis(300), code);
        assert_eq!(error(code, &outcome).kind, "TIMEOUT", "{code}");
        assert_eq!(lisp.value("(+ 1 2)"), "3", "after {code}");
    }
}

#[test]
fn cleanup_forms_run_at_a_time_limit() {
    let lisp = fresh();
    lisp.values("(defvar *cleaned* nil)");
    let outcome = lisp.eval_for(Duration::from_millis(200), "(unwind-protect (loop) (setf *cleaned* :yes))");
    assert_eq!(error("loop", &outcome).kind, "TIMEOUT");
    assert_eq!(lisp.value("*cleaned*"), ":YES");
}

#[test]
fn the_time_limit_holds_while_a_value_is_printed() {
    let lisp = fresh();
    lisp.values("(defclass sleepy () ()) (defmethod print-object ((o sleepy) s) (declare (ignore s)) (loop))");
    let started = Instant::now();
    _ = lisp.eval_for(Duration::from_millis(300), "(make-instance 'sleepy)");
    assert!(started.elapsed() < DEADLINE / 4, "{:?}", started.elapsed());
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_time_limit_holds_while_an_error_is_printed() {
    let lisp = fresh();
    lisp.values("(define-condition endless (error) () (:report (lambda (c s) (declare (ignore c s)) (loop))))");
    let outcome = lisp.eval_for(Duration::from_millis(300), "(error 'endless)");
    assert!(outcome.is_error());
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_time_limit_holds_in_the_reader() {
    let lisp = fresh();
    let outcome = lisp.eval_for(Duration::from_millis(300), "(list #.(loop))");
    assert_eq!(error("reader", &outcome).kind, "TIMEOUT");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_time_limit_holds_in_a_macro() {
    let lisp = fresh();
    let outcome = lisp.eval_for(Duration::from_millis(300), "(defmacro endless () (loop)) (defun f () (endless))");
    assert_eq!(error("macro", &outcome).kind, "TIMEOUT");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_sessions_time_limit_is_used() {
    let lisp = fresh();
    let mut limits = Limits::default();
    limits.set_timeout(Some(Duration::from_millis(200))).expect("it is allowed");
    lisp.session().set_limits(limits);
    assert_eq!(lisp.error("(loop)").kind, "TIMEOUT");
    let unlimited = lisp.run(Evaluation { timeout: sbcl::TimeLimit::None, ..Evaluation::new("(sleep 0.5) :slept") });
    assert_eq!(values("sleep", &unlimited), [":SLEPT"]);
    let longer = lisp.eval_for(Duration::from_secs(20), "(sleep 0.5) :slept");
    assert_eq!(values("sleep", &longer), [":SLEPT"]);
}

#[test]
fn a_time_limit_does_not_hit_the_next_evaluation() {
    let lisp = fresh();
    for _ in 0..20 {
        _ = lisp.eval_for(Duration::from_millis(10), "(sleep 0.01)");
        assert_eq!(lisp.value("(dotimes (i 1000) (list i)) :fine"), ":FINE");
    }
}

#[test]
fn a_running_evaluation_can_be_cancelled() {
    let lisp = fresh();
    let (id, outcome) =
        lisp.start("(write-string \"begun\") (force-output) (defun runs () (loop (sleep 0.01))) (runs)");
    lisp.await_running();
    while lisp.session().output_so_far(id, 0).is_none() {
        std::thread::yield_now();
    }
    lisp.session().cancel(id);
    let outcome = outcome.recv_timeout(DEADLINE).expect("a cancelled evaluation is answered");
    let failure = error("cancelled", &outcome);
    assert_eq!(failure.kind, "CANCELLED");
    assert_eq!(outcome.stdout.text, "begun");
    assert_eq!(lisp.session().last_error(), Some(failure));
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn a_queued_evaluation_can_be_cancelled() {
    let lisp = fresh();
    let (_, first) = lisp.start("(sleep 0.3) :first");
    let (id, second) = lisp.start("(defvar *ran* t)");
    lisp.session().cancel(id);
    assert_eq!(error("second", &second.recv_timeout(DEADLINE).expect("an answer")).kind, "CANCELLED");
    assert!(lisp.session().last_error().is_none() && lisp.session().error_history().is_empty(), "it never began");
    assert_eq!(values("first", &first.recv_timeout(DEADLINE).expect("an answer")), [":FIRST"]);
    assert_eq!(lisp.value("(boundp '*ran*)"), "NIL");
}

#[test]
fn cancelling_what_is_over_does_nothing() {
    let lisp = fresh();
    let (id, outcome) = lisp.start(":over");
    assert_eq!(values("over", &outcome.recv_timeout(DEADLINE).expect("an answer")), [":OVER"]);
    lisp.session().cancel(id);
    lisp.session().cancel(id);
    assert!(lisp.session().last_error().is_none());
    assert_eq!(lisp.value("(sleep 0.05) (+ 1 2)"), "3");
}

#[test]
fn evaluations_run_in_order_of_arrival() {
    let lisp = fresh();
    lisp.values("(defvar *order* nil)");
    let (sender, receiver) = mpsc::channel();
    for number in 0..50 {
        let sender = sender.clone();
        lisp.session().submit(Evaluation::new(format!("(push {number} *order*)")), move |_| _ = sender.send(number));
    }
    let answered: Vec<i32> = (0..50).map(|_| receiver.recv_timeout(DEADLINE).expect("an answer")).collect();
    assert_eq!(answered, (0..50).collect::<Vec<i32>>());
    assert_eq!(lisp.value("(equal (reverse *order*) (loop for i below 50 collect i))"), "T");
}

#[test]
fn many_threads_may_evaluate() {
    let lisp = fresh();
    lisp.values("(defvar *count* 0)");
    let session = lisp.session();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(move || {
                for _ in 0..25 {
                    assert!(!session.evaluate(Evaluation::new("(incf *count*)")).is_error());
                }
            });
        }
    });
    assert_eq!(lisp.value("*count*"), "200");
}

// Text.

#[test]
fn utf8_goes_through() {
    let lisp = fresh();
    let outcome = lisp.eval("(write-string \"日本語 λ é 😀\") (warn \"предупреждение\") \"ß\"");
    assert_eq!(outcome.stdout.text, "日本語 λ é 😀");
    assert_eq!(warnings(&outcome), ["SIMPLE-WARNING: предупреждение"]);
    assert_eq!(values("utf8", &outcome), ["\"ß\""]);
    assert_eq!(lisp.value("(defun λ (ж) (* ж 2)) (λ 21)"), "42");
    assert_eq!(lisp.value("(length \"😀\")"), "1");
}

#[test]
fn surrogates_become_replacement_characters() {
    let outcome = fresh().eval("(write-char (code-char #xd800)) (string (code-char #xdfff))");
    assert_eq!(outcome.stdout.text, "\u{fffd}");
    assert_eq!(values("surrogate", &outcome), ["\"\u{fffd}\""]);
}

#[test]
fn nulls_and_control_characters_go_through() {
    let lisp = fresh();
    let outcome = lisp.eval("(dotimes (i 32) (write-char (code-char i))) (write-char (code-char 127)) nil");
    let expected: String = (0..32).map(char::from).chain([char::from(127)]).collect();
    assert_eq!(outcome.stdout.text, expected);
    assert_eq!(lisp.value("(string (code-char 0))"), "\"\0\"");
}

#[test]
fn a_null_in_the_code_does_not_end_it() {
    let lisp = fresh();
    assert_eq!(lisp.value("(length \"a\0b\")"), "3");
}

#[test]
fn text_is_the_same_on_both_sides() {
    let lisp = fresh();
    let code: String = "\u{10ffff}\u{e000}\u{7ff}\u{800}\u{ffff}\u{10000}é".into();
    assert_eq!(
        lisp.value(&format!("(map 'list #'char-code {})", literal(&code))),
        "(1114111 57344 2047 2048 65535 65536 233)"
    );
}

#[test]
fn carriage_returns_in_the_code_are_white_space() {
    assert_eq!(fresh().value("(+ 1\r\n 2)\r\n"), "3");
}

#[test]
fn a_megabyte_of_code_is_read() {
    let lisp = fresh();
    let code = format!("(length '({}))", "symbol ".repeat(150_000));
    assert_eq!(lisp.value(&code), "150000");
}

#[test]
fn deeply_nested_code_is_answered() {
    let lisp = fresh();
    let code = format!("{}1{}", "(list ".repeat(2_000), ")".repeat(2_000));
    _ = lisp.eval(&code);
    assert_eq!(lisp.value("(+ 1 2)"), "3");
    let code = "(".repeat(100_000);
    assert!(lisp.eval(&code).is_error());
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

// Forging.

#[test]
fn markers_in_output_are_escaped() {
    let lisp = fresh();
    for marker in MARKERS {
        let escaped = format!("{}\\]", marker.strip_suffix(']').expect("a bracket"));
        let text = lisp.text(&format!("(write-string {}) nil", literal(marker)));
        assert_eq!(text, format!("[stdout]\n{escaped}\n\n=> NIL"), "{marker}");
        let text = lisp.text(&format!("(write-string {} *error-output*) nil", literal(marker)));
        assert_eq!(text, format!("[stderr]\n{escaped}\n\n=> NIL"), "{marker}");
        let text = lisp.text(&format!("(warn {}) nil", literal(marker)));
        assert_eq!(text, format!("[warnings]\nSIMPLE-WARNING: {escaped}\n\n=> NIL"), "{marker}");
        let text = lisp.text(&format!("(error {})", literal(marker)));
        assert!(text.starts_with(&format!("[ERROR] SIMPLE-ERROR\n{escaped}\n\n[Backtrace]\n")), "{marker}: {text}");
        check_error_response(&text).unwrap_or_else(|reason| panic!("{marker}: {reason}\n{text}"));
    }
}

#[test]
fn a_marker_escaped_already_is_escaped_once_more() {
    let lisp = fresh();
    assert_eq!(lisp.text("(write-string \"[ERROR\\\\]\") nil"), "[stdout]\n[ERROR\\\\]\n\n=> NIL");
    assert_eq!(lisp.text("(write-string \"[ERROR\\\\\\\\]\") nil"), "[stdout]\n[ERROR\\\\\\]\n\n=> NIL");
}

#[test]
fn other_brackets_are_left_alone() {
    let lisp = fresh();
    for plain in ["[error]", "[Stdout]", "[ERROR", "ERROR]", "[ ERROR]", "[x]", "[[]]"] {
        assert_eq!(
            lisp.text(&format!("(write-string {}) nil", literal(plain))),
            format!("[stdout]\n{plain}\n\n=> NIL")
        );
    }
}

#[test]
fn a_line_that_looks_like_a_value_gets_a_backslash() {
    let text = fresh().text("(format t \"=> 1~%x => 2~%=>3~%=> 4~%\") nil");
    assert_eq!(text, "[stdout]\n\\=> 1\nx => 2\n=>3\n\\=> 4\n\n=> NIL");
}

#[test]
fn a_message_has_no_line_that_looks_like_a_value() {
    let lisp = fresh();
    let text = lisp.text("(warn \"a~%=> 7\") nil");
    assert_eq!(text, "[warnings]\nSIMPLE-WARNING: a\n\\=> 7\n\n=> NIL");
    let text = lisp.text("(error \"=> 1~%=> 2\")");
    assert!(text.starts_with("[ERROR] SIMPLE-ERROR\n\\=> 1\n\\=> 2\n\n[Backtrace]\n"), "{text}");
}

#[test]
fn names_take_one_line() {
    let lisp = fresh();
    let text = lisp.text(
        "(sb-thread:make-thread (lambda () (sleep 60)) :name (format nil \"n~%[ERROR] X~%=> 1\"))
         (eval (list 'define-condition (intern (format nil \"A~%=> 2\")) '(error) nil))
         (error (intern (format nil \"A~%=> 2\")))",
    );
    assert!(text.contains("thread n\\n[ERROR\\] X\\n=> 1"), "{text}");
    assert!(text.contains("\n[ERROR] |A\\n=> 2|\n"), "{text}");
    assert!(!text.contains("\n=> "), "{text}");
    let text = lisp.text("(warn (intern (format nil \"W~%=> 3\")))");
    assert!(text.starts_with("[ERROR] "), "{text}");
    let text = lisp.text(
        "(eval (list 'define-condition (intern (format nil \"W~%=> 3\")) '(warning) nil))
         (warn (intern (format nil \"W~%=> 3\"))) nil",
    );
    assert!(text.contains("[warnings]\n|W\\n=> 3|: "), "{text}");
}

#[test]
fn forged_sections_cannot_be_told_from_output() {
    let lisp = fresh();
    let outcome = lisp.eval("(format t \"[ERROR] FAKE~%nothing~%~%[Backtrace]~%0: (FAKE)~%\") (error \"[Backtrace]~%0: (FAKE)~%[ERROR] FAKE\")");
    let parsed = check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(parsed.kind, "SIMPLE-ERROR");
    assert!(parsed.stdout.expect("output").starts_with("[ERROR\\] FAKE"));
}

#[test]
fn a_forged_type_name_cannot_be_told_from_a_type() {
    let outcome = fresh().eval("(define-condition |[Backtrace]| (error) () (:report \"odd\")) (error '|[Backtrace]|)");
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
}

#[test]
fn forged_frames_cannot_be_told_from_frames() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun f (s) (error \"x\" s)) (f (format nil \"~%[Backtrace]~%0: (FAKE)~%[ERROR] X\"))");
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
}

#[test]
fn a_forged_restart_cannot_be_told_from_a_restart() {
    let lisp = fresh();
    lisp.error("(restart-case (error \"x\") (|[ERROR] y| () :report \"[Backtrace]\" 1))");
    let text = lisp.last_error_text();
    assert!(!text.contains("[ERROR]") && !text.contains("[Backtrace]"), "{text}");
}

fn printed() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        3 => prop::sample::select(MARKERS.to_vec()).prop_map(str::to_owned),
        2 => (prop::sample::select(MARKERS.to_vec()), 1..4_usize)
            .prop_map(|(marker, count)| format!("{}{}]", &marker[..marker.len() - 1], "\\".repeat(count))),
        2 => prop::sample::select(vec!["\n", "\n\n", "[", "]", "\\", "=> ", "\\=> ", "[ERROR", "\\]", " "]).prop_map(str::to_owned),
        1 => any::<String>(),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn escaping_can_be_undone(text in printed()) {
        let escaped = report::escape_markers(&text);
        for marker in MARKERS {
            prop_assert!(!escaped.contains(marker), "{escaped:?} holds {marker}");
        }
        prop_assert_eq!(unescape_markers(&escaped), text);
    }

    #[test]
    fn output_printed_by_lisp_can_be_had_back(text in printed()) {
        prop_assume!(!text.is_empty());
        let lisp = support::used();
        let outcome = lisp.eval(&format!("(write-string {}) (error \"end\")", literal(&text)));
        prop_assert_eq!(&outcome.stdout.text, &text);
        let report = report::evaluation(&outcome);
        for marker in ["[stdout]", "[ERROR]", "[Backtrace]"] {
            prop_assert_eq!(report.matches(marker).count(), 1, "{} in {}", marker, report);
        }
        for marker in ["[stderr]", "[warnings]", "[background]", "[notice]", "[Debugger]"] {
            prop_assert!(!report.contains(marker), "{} in {}", marker, report);
        }
        let section = report.strip_prefix("[stdout]\n").and_then(|rest| rest.split_once("[ERROR] ")).map(|(section, _)| section);
        let section = section.and_then(|section| section.strip_suffix("\n\n")).expect("a section of its own");
        let undone: Vec<String> = unescape_markers(section)
            .split('\n')
            .map(|line| match line.strip_prefix('\\') {
                Some(rest) if rest.trim_start_matches('\\').starts_with("=> ") => rest.to_owned(),
                _ => line.to_owned(),
            })
            .collect();
        prop_assert_eq!(undone.join("\n"), text.strip_suffix('\n').unwrap_or(&text));
    }

    #[test]
    fn any_message_leaves_the_report_well_formed(text in printed()) {
        let lisp = support::used();
        let outcome = lisp.eval(&format!("(error \"~A\" {})", literal(&text)));
        let report = report::evaluation(&outcome);
        let checked = check_error_response(&report);
        prop_assert!(checked.is_ok(), "{:?}\n{}", checked, report);
        let failure = outcome.result.expect_err("an error");
        if text.trim().is_empty() {
            prop_assert!(!failure.message.text.is_empty());
        } else {
            prop_assert_eq!(&failure.message.text, &text);
        }
    }

    #[test]
    fn any_code_is_answered(code in any::<String>()) {
        let lisp = support::used();
        let outcome = lisp.eval_for(Duration::from_secs(20), &code);
        if outcome.is_error() {
            let report = report::evaluation(&outcome);
            let checked = check_error_response(&report);
            prop_assert!(checked.is_ok(), "{:?}\n{}", checked, report);
        }
        prop_assert_eq!(lisp.text("(cl:+ 1 2)"), "=> 3");
    }
}

// Threads.

#[test]
fn output_of_a_thread_that_is_waited_for_is_captured() {
    let outcome = fresh()
        .eval("(sb-thread:join-thread (sb-thread:make-thread (lambda () (write-string \"from a thread\") :joined)))");
    assert_eq!(values("thread", &outcome), [":JOINED"]);
    assert_eq!(outcome.stdout.text, "from a thread");
}

#[test]
fn output_of_a_thread_that_outlived_its_evaluation_is_background() {
    let lisp = fresh();
    let outcome =
        lisp.eval("(defvar *th* (sb-thread:make-thread (lambda () (sleep 0.3) (write-string \"late\")))) :started");
    assert_eq!(values("start", &outcome), [":STARTED"]);
    assert!(outcome.stdout.is_empty(), "{}", outcome.stdout.text);
    let text = lisp.text("(sb-thread:join-thread *th*) (write-string \"now\") 1");
    assert_eq!(text, "[background]\nlate\n\n[stdout]\nnow\n\n=> 1");
    assert_eq!(lisp.text("1"), "=> 1");
}

#[test]
fn an_error_in_a_thread_ends_neither_the_process_nor_the_session() {
    let lisp = fresh();
    let outcome = lisp
        .eval("(sb-thread:join-thread (sb-thread:make-thread (lambda () (error \"in a thread\"))) :default :failed)");
    assert_eq!(values("thread", &outcome), [":FAILED", ":ABORT"]);
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

/// The kernel sends the timers' signal to whatever thread does not block it: one that has nothing to do passes it on.
#[test]
fn timers_go_on_whatever_thread_their_signal_comes_to() {
    let lisp = fresh();
    assert_eq!(
        lisp.value(
            "(let ((ran nil)
                   (idle (svref sbcl-host::**lane-threads** sbcl-host::+inspection-lane+)))
               (sb-ext:schedule-timer (sb-ext:make-timer (lambda () (setf ran t)) :thread nil) 0.05)
               (sb-impl::%clear-system-timer)
               (sleep 0.06)
               (sb-alien:alien-funcall
                (sb-alien:extern-alien \"pthread_kill\" (function sb-alien:int sb-alien:unsigned-long sb-alien:int))
                (sb-thread::thread-os-thread idle) sb-unix:sigalrm)
               (loop until ran do (sleep 0.01))
               ran)"
        ),
        "T"
    );
}

#[test]
fn an_error_in_a_timer_is_reported_like_any_thread_s() {
    let lisp = fresh();
    for (place, thread) in [("t", "Timer tick"), ("nil", "signals")] {
        let code = format!(
            "(defvar *done* nil) (defun tick () (unwind-protect (error \"from a timer\") (setf *done* t)))\n\
             (setf *done* nil) (sb-ext:schedule-timer (sb-ext:make-timer 'tick :name \"tick\" :thread {place}) 0.05)\n\
             (loop until *done* do (sleep 0.01)) (sleep 0.1)"
        );
        let text = lisp.text(&code);
        let report = format!(
            "[background]\nError in thread {thread}: SIMPLE-ERROR\nfrom a timer\n0: (ERROR \"from a timer\")\n1: (TICK)\n"
        );
        assert!(text.starts_with(&report) && text.ends_with("\n\n=> NIL"), "{text}");
        assert!(!text.contains("debugger") && !text.contains("quitting"), "{text}");
    }
    // Nor does one that unwinds its thread stop those to come.
    for place in ["t", "nil"] {
        for does in ["(throw 'out 1)", "(sb-thread:abort-thread)", "(setf *done* t)"] {
            let code = format!(
                "(setf *done* nil)\n\
                 (sb-ext:schedule-timer (sb-ext:make-timer (lambda () (unwind-protect {does} (setf *done* t))) :thread {place}) 0.05)\n\
                 (loop until *done* do (sleep 0.01)) :done"
            );
            assert!(lisp.text(&code).ends_with("=> :DONE"), "{does}");
        }
    }
}

#[test]
fn a_stack_exhausted_in_a_thread_ends_neither_the_process_nor_the_session() {
    let lisp = fresh();
    let code = "(defun dive (x) (list (dive x))) (sb-thread:join-thread (sb-thread:make-thread #'dive :arguments '(1)) :default :failed)";
    assert_eq!(values("dive", &lisp.eval(code)), [":FAILED", ":ABORT"]);
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

// The edge cases that the specification lists by name.

#[test]
fn edge_multiple_errors_in_quick_succession_the_latest_wins() {
    let lisp = fresh();
    let (sender, receiver) = mpsc::channel();
    for number in 0..30 {
        let sender = sender.clone();
        let code = format!("(error \"number {number}\")");
        lisp.session().submit(Evaluation::new(code), move |outcome| _ = sender.send(outcome));
    }
    for _ in 0..30 {
        assert!(receiver.recv_timeout(DEADLINE).expect("an answer").is_error());
    }
    assert_eq!(lisp.session().last_error().expect("an error").message.text, "number 29");
}

#[test]
fn edge_errors_during_error_inspection_the_previous_error_is_preserved() {
    let lisp = fresh();
    let failure = lisp.error("(error \"kept\")");
    let before = lisp.last_error_text();
    assert!(matches!(lisp.describe_in("car", Some("no-such-package")), Ok(SymbolDescription::NotFound(_))));
    _ = lisp.describe_in(")(", None);
    _ = lisp.describe_in("", None);
    _ = lisp.describe_in("no-such-package:symbol", None);
    assert_eq!(lisp.session().last_error(), Some(failure));
    assert_eq!(lisp.last_error_text(), before);
}

#[test]
fn edge_compilation_and_runtime_errors_are_both_preserved() {
    let lisp = fresh();
    for (code, kind) in [
        ("(let ((1 2)) 3)", "SB-INT:COMPILED-PROGRAM-ERROR"),
        ("(defmacro m () (error \"at compile time\")) (m)", "SIMPLE-ERROR"),
        ("(car (list* 1 2 'x 5))(car 7)", "TYPE-ERROR"),
    ] {
        let failure = lisp.error(code);
        assert_eq!(failure.kind, kind, "{code}");
        assert_eq!(lisp.session().last_error(), Some(failure), "{code}");
    }
}

#[test]
fn edge_reader_errors_are_preserved_like_other_errors() {
    let lisp = fresh();
    let failure = lisp.error("(list 1");
    let text = lisp.last_error_text();
    assert!(text.starts_with("Error: END-OF-FILE\n"), "{text}");
    assert_eq!(lisp.session().last_error(), Some(failure));
    assert_eq!(lisp.last_error_text(), text);
}

#[test]
fn edge_memory_pressure_the_error_state_is_not_collected() {
    let lisp = fresh();
    lisp.error("(defun f (x) (error \"about ~A\" x)) (f (list 1 2 3))");
    let (described, backtrace) = (lisp.last_error_text(), lisp.backtrace_text(100));
    let done = std::env::temp_dir().join(format!("sbcl-mcp-collected-{}", std::process::id()));
    // A thread of the user's makes the memory pressure, since an evaluation would clear the state.
    let lisp_error = lisp.error(&format!(
        "(sb-thread:make-thread (lambda () (dotimes (i 5) (make-list 1000000)) (sb-ext:gc :full t) \
             (with-open-file (s {done:?} :direction :output)))) (f (list 1 2 3))"
    ));
    let (again, trace) = (lisp.last_error_text(), lisp.backtrace_text(100));
    while !done.exists() {
        std::thread::yield_now();
    }
    std::fs::remove_file(&done).unwrap();
    assert_eq!(lisp.last_error_text(), again);
    assert_eq!(lisp.backtrace_text(100), trace);
    assert_eq!(lisp.session().last_error(), Some(lisp_error));
    let line = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    assert_eq!(line(&described), line(&again));
    assert_eq!(line(&backtrace), line(&trace));
}

#[test]
fn edge_redefining_print_object_does_not_change_the_error_state() {
    let lisp = fresh();
    lisp.error("(defclass thing () ()) (defun f (x) (error \"about ~A\" x)) (f (make-instance 'thing))");
    let session = lisp.session();
    let (described, backtrace) = (lisp.last_error_text(), lisp.backtrace_text(100));
    let changed = lisp.error("(defmethod print-object ((o thing) s) (write-string \"CHANGED\" s)) (error \"another\")");
    assert_eq!(session.last_error(), Some(changed));
    assert!(!described.contains("CHANGED") && !backtrace.contains("CHANGED"));
}

#[test]
fn edge_long_running_session_the_error_persists() {
    let lisp = fresh();
    lisp.error("(/ 1 0)");
    let first = lisp.last_error_text();
    // The time itself is what is tested.
    std::thread::sleep(Duration::from_millis(1200));
    for _ in 0..100 {
        assert_eq!(lisp.last_error_text(), first);
    }
}

#[test]
fn edge_nested_errors_an_error_handler_that_errors() {
    let failure = fresh()
        .error("(handler-bind ((error (lambda (c) (declare (ignore c)) (error \"second\")))) (error \"first\"))");
    assert_eq!(failure.message.text, "second");
    assert_eq!(missing_frame(&failure, &["ERROR", "(LAMBDA (C))", "EVAL"]), None, "{:#?}", failure.frames);
}

#[test]
fn edge_very_long_error_messages_are_truncated() {
    let lisp = fresh();
    let outcome = lisp.eval("(error (make-string 1000000 :initial-element #\\e))");
    let text = report::evaluation(&outcome);
    check_error_response(&text).expect("a well-formed report");
    assert!(text.len() < 20_000, "{} bytes", text.len());
    assert!(text.contains("e[... 990000 characters omitted]\n\n[Backtrace]"), "{}", &text[9_900..10_200]);
}

#[test]
fn edge_errors_during_class_initialization() {
    let failure = fresh().error("(defclass c () ((a :initform (error \"initform\")))) (make-instance 'c)");
    assert_eq!((failure.kind.as_str(), failure.message.text.as_str()), ("SIMPLE-ERROR", "initform"));
    assert_eq!(missing_frame(&failure, &["ERROR", "EVAL"]), None, "{:#?}", failure.frames);
}

#[test]
fn edge_errors_in_macro_expansion() {
    let failure = fresh().error("(defmacro m (x) (error \"expanding ~A\" x)) (m 5)");
    assert_eq!((failure.kind.as_str(), failure.message.text.as_str()), ("SIMPLE-ERROR", "expanding 5"));
    assert_eq!(missing_frame(&failure, &["ERROR", "(MACRO-FUNCTION M)", "EVAL"]), None, "{:#?}", failure.frames);
}

#[test]
fn edge_stack_overflow_from_infinite_recursion() {
    let lisp = fresh();
    for _ in 0..3 {
        let outcome = lisp.eval("(defun dive (n) (1+ (dive (1+ n)))) (dive 0)");
        let failure = error("dive", &outcome);
        assert_eq!(failure.kind, "SB-KERNEL::CONTROL-STACK-EXHAUSTED");
        assert!(calls(&failure.frames[0].call, "DIVE"), "{:?}", &failure.frames[..5]);
        assert!(failure.message.text.contains("exhausted"), "{}", failure.message.text);
        check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
        assert_eq!(lisp.value("(+ 1 2)"), "3");
    }
}

#[test]
fn edge_errors_in_the_compiler() {
    let lisp = fresh();
    let outcome = lisp.eval("(compile nil '(lambda () (let ((1 2)) 3))) :compiled");
    assert_eq!(values("compile", &outcome), [":COMPILED"]);
    assert!(!outcome.warnings.is_empty());
    assert!(outcome.stderr.is_empty(), "{}", outcome.stderr.text);
    let failure = lisp.error("(funcall (compile nil '(lambda () (let ((1 2)) 3))))");
    assert_eq!(failure.kind, "SB-INT:COMPILED-PROGRAM-ERROR");
}

#[test]
fn edge_very_deep_call_chains() {
    let lisp = fresh();
    let failure = lisp.error("(defun deep (n) (if (zerop n) (error \"bottom\") (list (deep (1- n))))) (deep 100000)");
    assert_eq!(failure.message.text, "bottom");
    assert!(failure.total_frames > 100_000, "{}", failure.total_frames);
    assert_eq!(failure.frames.len(), 1000);
}

#[test]
fn edge_errors_in_error_handling_code() {
    let lisp = fresh();
    let failure = lisp.error("(handler-case (car 5) (type-error () (/ 1 (- 5 5))))");
    assert_eq!(failure.kind, "DIVISION-BY-ZERO");
    let failure = lisp.error("(unwind-protect (error \"body\") (error \"cleanup\"))");
    assert_eq!(failure.message.text, "cleanup");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn edge_multiple_sequential_errors() {
    let lisp = fresh();
    for (code, kind) in
        [("(/ 1 0)", "DIVISION-BY-ZERO"), ("(car 'not-a-cons)", "TYPE-ERROR"), ("nowhere", "UNBOUND-VARIABLE")]
    {
        lisp.error(code);
        let text = lisp.last_error_text();
        assert!(text.starts_with(&format!("Error: {kind}\n")), "{text}");
        assert!(lisp.backtrace_text(5).starts_with(&format!("Backtrace for {kind} (")));
    }
}

#[test]
fn edge_errors_with_empty_messages_use_default_text() {
    let lisp = fresh();
    for code in [
        "(error \"\")",
        "(error \"~%\")",
        "(error \"  \")",
        "(define-condition quiet (error) () (:report \"\")) (error 'quiet)",
    ] {
        let outcome = lisp.eval(code);
        let parsed = check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
        assert_eq!(parsed.message, "(no message)", "{code}");
        assert!(lisp.last_error_text().contains("\n  (no message)\n"), "{code}");
    }
}

#[test]
fn edge_errors_with_no_backtrace_show_a_placeholder() {
    let lisp = fresh();
    let outcome = lisp.eval_in("no-such-package-at-all", "1");
    let text = report::evaluation(&outcome);
    check_error_response(&text).expect("a well-formed report");
    let failure = error("package", &outcome);
    if failure.frames.is_empty() {
        assert!(text.ends_with("[Backtrace]\n0: (no frames available)"), "{text}");
        assert!(lisp.last_error_text().contains("\n  0: (no frames available)"));
    }
    let mut bare = (*failure).clone();
    bare.frames.clear();
    bare.total_frames = 0;
    assert!(report::backtrace(Some(&bare), 20).contains("0: (no frames available)"));
}

#[test]
fn edge_errors_with_stdout_before_them() {
    let outcome = fresh().eval("(format t \"first~%second~%\") (error \"third\")");
    let parsed = check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(parsed.stdout.as_deref(), Some("first\nsecond"));
    assert_eq!(parsed.message, "third");
}

#[test]
fn edge_error_messages_containing_section_markers_are_escaped() {
    let outcome = fresh().eval("(error \"[stdout] [ERROR] [Backtrace]\")");
    let parsed = check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(parsed.message, "[stdout\\] [ERROR\\] [Backtrace\\]");
    assert_eq!(unescape_markers(&parsed.message), "[stdout] [ERROR] [Backtrace]");
}

#[test]
fn edge_errors_in_other_encodings() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun ошибка (данные) (error \"плохо: ~A 😀\" данные)) (ошибка \"日本\")");
    let parsed = check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(parsed.message, "плохо: 日本 😀");
    assert!(parsed.backtrace.contains("\n1: (ОШИБКА \"日本\")\n"), "{}", parsed.backtrace);
}

#[test]
fn counterexample_the_error_is_not_lost_after_the_first_query() {
    let lisp = fresh();
    lisp.error("(/ 1 0)");
    let first = lisp.last_error_text();
    assert!(first.starts_with("Error: DIVISION-BY-ZERO\n"));
    assert_eq!(lisp.last_error_text(), first);
}

#[test]
fn counterexample_a_backtrace_does_not_degrade() {
    let lisp = fresh();
    lisp.error("(defun a () (/ 1 0)) (a)");
    let first = lisp.backtrace_text(10);
    // The time itself is what is tested.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(lisp.backtrace_text(10), first);
}

#[test]
fn counterexample_restarts_are_not_lost() {
    let lisp = fresh();
    lisp.error("(error \"test\")");
    for _ in 0..5 {
        assert_eq!(restarts(&lisp.session().last_error().expect("an error")), ["RETRY", "ABORT"]);
    }
}

#[test]
fn counterexample_tools_agree() {
    let lisp = fresh();
    let failure = lisp.error("(defun foo () (error \"x\")) (foo)");
    let described = lisp.last_error_text();
    assert!(described.starts_with("Error: SIMPLE-ERROR\n"));
    let backtrace = lisp.backtrace_text(5);
    for frame in &failure.frames {
        let line = format!("  {}: {}", frame.number, frame.call);
        assert!(described.contains(&line) && backtrace.contains(&line), "{line}");
    }
}

#[test]
fn counterexample_stack_frames_are_complete() {
    let failure = fresh().error("(defun deep () (error \"oops\")) (deep)");
    let frames: Vec<&str> = failure.frames.iter().map(|frame| frame.call.as_str()).collect();
    assert_eq!(
        frames,
        ["(ERROR \"oops\")", "(DEEP)", "(SB-INT:SIMPLE-EVAL-IN-LEXENV (DEEP) #<NULL-LEXENV>)", "(EVAL (DEEP))"]
    );
}

#[test]
fn the_process_survives_what_the_specification_names() {
    let lisp = fresh();
    for code in [
        "(error \"test\")",
        "(/ 1 0)",
        "(car 'not-a-cons)",
        "(funcall 'not-a-function)",
        "undefined-symbol",
        "(1+ \"string\")",
    ] {
        assert!(lisp.eval(code).is_error(), "{code}");
    }
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_image_can_be_booted_only_once() {
    let lisp = fresh();
    let second = sbcl::Session::start(&sbcl::ImageConfig::default(), Limits::default());
    assert!(matches!(second, Err(sbcl::BootError::AlreadyBooted)));
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn a_panic_in_a_reply_is_told() {
    let lisp = support::fresh();
    lisp.session().submit(Evaluation::new("1"), |_| panic!("on purpose"));
    let outcome = lisp.eval("(+ 1 2)");
    assert_eq!(outcome.notices, ["Whoever was given an answer of this session's panicked: on purpose"]);
}
