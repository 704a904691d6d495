//! The edge cases and counterexamples that the specification lists by name.

use super::*;

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
    // A user thread creates the memory pressure, because another evaluation would clear the error state.
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
    // The test needs real time to pass.
    std::thread::sleep(Duration::from_millis(1200));
    for _ in 0..100 {
        assert_eq!(lisp.last_error_text(), first);
    }
}

#[test]
fn edge_nested_errors_in_a_handler_report_the_second_error() {
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
fn edge_errors_during_class_initialization_report_the_initform_error() {
    let failure = fresh().error("(defclass c () ((a :initform (error \"initform\")))) (make-instance 'c)");
    assert_eq!((failure.kind.as_str(), failure.message.text.as_str()), ("SIMPLE-ERROR", "initform"));
    assert_eq!(missing_frame(&failure, &["ERROR", "EVAL"]), None, "{:#?}", failure.frames);
}

#[test]
fn edge_errors_in_macro_expansion_show_the_macro_function_frame() {
    let failure = fresh().error("(defmacro m (x) (error \"expanding ~A\" x)) (m 5)");
    assert_eq!((failure.kind.as_str(), failure.message.text.as_str()), ("SIMPLE-ERROR", "expanding 5"));
    assert_eq!(missing_frame(&failure, &["ERROR", "(MACRO-FUNCTION M)", "EVAL"]), None, "{:#?}", failure.frames);
}

#[test]
fn edge_stack_overflow_from_infinite_recursion_keeps_the_session_usable() {
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
fn edge_errors_in_the_compiler_become_warnings_and_run_time_errors() {
    let lisp = fresh();
    let outcome = lisp.eval("(compile nil '(lambda () (let ((1 2)) 3))) :compiled");
    assert_eq!(values("compile", &outcome), [":COMPILED"]);
    assert!(!outcome.warnings.is_empty());
    assert!(outcome.stderr.is_empty(), "{}", outcome.stderr.text);
    let failure = lisp.error("(funcall (compile nil '(lambda () (let ((1 2)) 3))))");
    assert_eq!(failure.kind, "SB-INT:COMPILED-PROGRAM-ERROR");
}

#[test]
fn edge_very_deep_call_chains_keep_1000_frames_and_count_all() {
    let lisp = fresh();
    let failure = lisp.error("(defun deep (n) (if (zerop n) (error \"bottom\") (list (deep (1- n))))) (deep 100000)");
    assert_eq!(failure.message.text, "bottom");
    assert!(failure.total_frames > 100_000, "{}", failure.total_frames);
    assert_eq!(failure.frames.len(), 1000);
}

#[test]
fn edge_errors_in_error_handling_code_replace_the_first_error() {
    let lisp = fresh();
    let failure = lisp.error("(handler-case (car 5) (type-error () (/ 1 (- 5 5))))");
    assert_eq!(failure.kind, "DIVISION-BY-ZERO");
    let failure = lisp.error("(unwind-protect (error \"body\") (error \"cleanup\"))");
    assert_eq!(failure.message.text, "cleanup");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn edge_multiple_sequential_errors_each_replace_the_last_error() {
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
fn edge_errors_with_stdout_before_keep_the_output_in_the_report() {
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
fn edge_errors_in_other_encodings_keep_non_ascii_text() {
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
fn counterexample_backtrace_does_not_degrade_over_time() {
    let lisp = fresh();
    lisp.error("(defun a () (/ 1 0)) (a)");
    let first = lisp.backtrace_text(10);
    // The test needs real time to pass.
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
fn counterexample_describe_last_error_and_get_backtrace_agree() {
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
fn process_survives_each_error_listed_in_the_specification() {
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
fn panic_in_a_reply_callback_is_reported_as_a_notice() {
    let lisp = crate::support::fresh();
    lisp.session().submit(Evaluation::new("1"), |_| panic!("on purpose"));
    let outcome = lisp.eval("(+ 1 2)");
    assert_eq!(outcome.notices, ["The function that received one of this session's answers panicked: on purpose"]);
}

#[test]
fn reader_error_hints_by_indentation_at_a_missing_or_extra_parenthesis() {
    let session = fresh();
    let hint = |code: &str| {
        let message = session.error(code).message.text.clone();
        message.lines().find(|line| line.starts_with("By the indentation")).map(str::to_owned)
    };
    assert_eq!(
        hint("(defun f (x)\n  (list x\n  (g x))\n(defun g ())").as_deref(),
        Some(
            "By the indentation, line 2: the form that begins at line 2 is probably not closed: one ) missing \
             at 2:10"
        )
    );
    assert_eq!(
        hint("(list 1\n  (list 2))\n  (list 3))").as_deref(),
        Some(
            "By the indentation, line 2: the form that begins at line 1 is probably closed too early: one ) too many at 2:11"
        )
    );
    assert_eq!(hint("(read-from-string \"(a\")"), None);
    assert_eq!(hint("(read-from-string \")\")"), None);
}
