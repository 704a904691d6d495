//! Printed values, and the sections of a report.

use super::*;

#[test]
fn a_value_is_shown_after_an_arrow() {
    assert_eq!(fresh().text("(+ 1 2)"), "=> 3");
}

#[test]
fn multiple_values_are_shown_on_one_line_each() {
    insta::assert_snapshot!(fresh().text("(values 1 :two \"three\")"), @r#"
    => 1
    => :TWO
    => "three"
    "#);
}

#[test]
fn zero_values_are_shown_as_no_values() {
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
fn report_sections_come_in_order_separated_by_one_blank_line() {
    let text = fresh().text(
        "(warn \"w\") (format *error-output* \"err~%\") (format t \"out~%\") (format *trace-output* \"trace~%\") :done",
    );
    let expected = "[stdout]\nout\n\n[stderr]\nerr\ntrace\n\n[warnings]\nSIMPLE-WARNING: w\n\n=> :DONE";
    assert_eq!(text, expected);
}

#[test]
fn error_report_sections_come_in_order_before_error_and_backtrace() {
    let text = fresh().text("(format t \"out\") (format *error-output* \"err\") (warn \"w\") (error \"boom\")");
    let start = "[stdout]\nout\n\n[stderr]\nerr\n\n[warnings]\nSIMPLE-WARNING: w\n\n[ERROR] SIMPLE-ERROR\nboom\n\n\
                 [Backtrace]\n0: (ERROR \"boom\")\n";
    assert!(text.starts_with(start), "{text}");
}

#[test]
fn empty_sections_are_left_out() {
    let lisp = fresh();
    insta::assert_snapshot!(lisp.text("(format t \"x\")"), @r"
    [stdout]
    x

    => NIL
    ");
    insta::assert_snapshot!(lisp.text("(format *error-output* \"y\")"), @r"
    [stderr]
    y

    => NIL
    ");
    insta::assert_snapshot!(lisp.text("(progn (warn \"z\") 1)"), @r"
    [warnings]
    SIMPLE-WARNING: z

    => 1
    ");
}

#[test]
fn circular_list_is_printed_with_sharp_labels() {
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
fn print_length_and_print_level_of_the_user_take_precedence() {
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
fn print_object_method_that_aborts_yields_an_unprintable_value() {
    let lisp = fresh();
    lisp.values("(defclass aborts () ()) (defmethod print-object ((x aborts) s) (abort))");
    assert_eq!(lisp.value("(make-instance 'aborts)"), "#<unprintable ABORTS>");
}

#[test]
fn error_in_print_object_does_not_fail_the_evaluation() {
    let lisp = fresh();
    lisp.values(
        "(defclass broken () ()) (defmethod print-object ((o broken) s) (declare (ignore s)) (error \"never\"))",
    );
    assert_eq!(lisp.text("(make-instance 'broken)"), "=> #<unprintable BROKEN>");
    insta::assert_snapshot!(lisp.text("(values 1 (make-instance 'broken) 2)"), @r"
    => 1
    => #<unprintable BROKEN>
    => 2
    ");
    assert!(lisp.session().last_error().is_none());
}

#[test]
fn unprintable_value_is_shown_with_its_package_prefix() {
    let lisp = fresh();
    lisp.values("(defpackage :p (:use :cl)) (defclass p::broken () ()) (defmethod print-object ((o p::broken) s) (declare (ignore s)) (error \"never\"))");
    assert_eq!(lisp.text("(make-instance 'p::broken)"), "=> #<unprintable P::BROKEN>");
}

#[test]
fn stack_overflow_in_print_object_does_not_fail_the_evaluation() {
    let lisp = fresh();
    lisp.values("(defclass endless () ()) (defmethod print-object ((o endless) s) (list (print-object o s)))");
    assert_eq!(lisp.value("(make-instance 'endless)"), "#<unprintable ENDLESS>");
    assert_eq!(lisp.text("(+ 1 2)"), "=> 3");
}

#[test]
fn throw_in_print_object_does_not_fail_the_evaluation() {
    let lisp = fresh();
    lisp.values(
        "(defclass thrower () ()) (defmethod print-object ((o thrower) s) (declare (ignore s)) (throw 'nowhere 1))",
    );
    assert_eq!(lisp.text("(make-instance 'thrower)"), "=> #<unprintable THROWER>");
}

#[test]
fn print_object_method_determines_how_a_value_is_shown() {
    let lisp = fresh();
    lisp.values("(defclass loud () ()) (defmethod print-object ((o loud) s) (write-string \"LOUD\" s))");
    assert_eq!(lisp.text("(make-instance 'loud)"), "=> LOUD");
}

#[test]
fn huge_value_is_cut_at_50_000_characters_with_an_exact_omitted_count() {
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
fn bignum_of_100_000_digits_is_cut() {
    let outcome = fresh().eval("(1- (expt 10 100000))");
    let value = &outcome.result.as_ref().expect("it succeeds")[0];
    assert!(value.text.chars().all(|digit| digit == '9'));
    assert_eq!(value.text.len() as u64 + value.omitted, 100_000);
    assert!(value.omitted > 0);
}

#[test]
fn standard_objects_are_printed_as_prin1_prints_them() {
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
