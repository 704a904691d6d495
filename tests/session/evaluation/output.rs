//! Captured output, and its limits.

use super::*;

#[test]
fn stdout_and_stderr_output_are_captured_separately() {
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
fn fresh_line_directive_adds_one_newline_after_a_partial_line() {
    insta::assert_snapshot!(fresh().eval("(format t \"a~&b~&~&c\") nil").stdout.text, @r"
    a
    b
    c
    ");
}

#[test]
fn standard_output_can_be_rebound_by_the_user() {
    let lisp = fresh();
    assert_eq!(lisp.text("(with-output-to-string (*standard-output*) (write-string \"inner\"))"), "=> \"inner\"");
}

#[test]
fn compiler_diagnostics_never_appear_in_stdout_or_stderr() {
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
fn captured_output_is_cut_at_1_000_000_characters_with_an_exact_count() {
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
fn timeout_and_hold_out_of_range_are_refused_also_when_deserialized() {
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
fn set_max_output_cuts_output_beyond_the_limit() {
    let lisp = fresh();
    let mut limits = Limits::default();
    limits.set_max_output(10).expect("ten is allowed");
    lisp.session().set_limits(limits);
    insta::assert_snapshot!(lisp.text("(write-string \"0123456789abc\") nil"), @r"
    [stdout]
    0123456789[... 3 characters omitted]

    => NIL
    ");
    insta::assert_snapshot!(lisp.text("(write-string \"0123456789\") nil"), @r"
    [stdout]
    0123456789

    => NIL
    ");
}

#[test]
fn max_output_counts_characters_and_not_bytes() {
    let lisp = fresh();
    let mut limits = Limits::default();
    limits.set_max_output(4).expect("four is allowed");
    lisp.session().set_limits(limits);
    let outcome = lisp.eval("(write-string \"λé😀日本語\") nil");
    assert_eq!(outcome.stdout.text, "λé😀日");
    assert_eq!(outcome.stdout.omitted, 2);
}

#[test]
fn max_output_and_timeout_seconds_out_of_range_are_refused() {
    let mut limits = Limits::default();
    for characters in [0, 10_000_001, u64::MAX] {
        let refused = limits.set_max_output(characters).expect_err("out of range");
        assert!(refused.to_string().contains("1 to 10000000"), "{refused}");
    }
    for (seconds, written) in [
        (-1.0, "-1"),
        (90_000.0, "90000"),
        (86_400.5, "86400.5"),
        (1e300, "1e300"),
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
    ] {
        let refused = Limits::timeout_from_seconds(seconds).expect_err("out of range");
        let expected = format!("timeout {written} is out of range; allowed: 0 (no limit) to 86400 seconds");
        assert_eq!(refused.to_string(), expected);
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
