//! Details of an error beyond its type and message: source location, arguments, and earlier errors.

use std::path::Path;

use crate::client::{Scratch, Server, call_err, call_ok, evaluate_err, last_error};
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::json;

/// Evaluates `code`, which must fail, and returns the answer of describe-last-error.
#[track_caller]
fn described(server: &mut Server, code: &str) -> String {
    evaluate_err(server, code);
    last_error(server)
}

/// Returns a path as the server shows it: relative to its working directory.
fn shown(path: &Path) -> String {
    let directory = std::env::current_dir().unwrap();
    path.strip_prefix(directory).unwrap_or(path).display().to_string()
}

// ---- Source locations

#[apply(both_modes)]
fn describe_last_error_names_the_failed_form_and_its_line(mode: Mode) {
    let mut server = mode.ready();
    for (code, form) in [
        ("(error \"x\")", "Form: 1 (line 1): (error \"x\")"),
        ("(list 1) (list 2) (error \"x\")", "Form: 3 (line 1): (error \"x\")"),
        ("; a comment\n\n(list 1)\n  (progn\n (error \"x\"))", "Form: 2 (line 4): (progn"),
        ("(list \"λ 😀\n\")\n\t(/ 1 0) ; why", "Form: 2 (line 3): (/ 1 0) ; why"),
        ("(defun f () (error \"x\"))\n\n\n(f)", "Form: 2 (line 4): (f)"),
        ("(list 1)\n(car '(1)", "Form: 2 (line 2): (car '(1)"),
        ("(list 1)\n(list [ERROR])", "Form: 2 (line 2): (list [ERROR\\])"),
    ] {
        let text = described(&mut server, code);
        let line = text.lines().find(|line| line.starts_with("Form: ")).unwrap_or_else(|| panic!("{code}:\n{text}"));
        assert_eq!(line, form, "{code}");
    }
    // First the time, then the error id, then the form.
    let text = described(&mut server, "(error \"x\")");
    let lines: Vec<_> = text.lines().collect();
    let time = lines.iter().position(|line| line.starts_with("Time: ")).unwrap();
    assert!(lines[time + 1].starts_with("Id: E") && lines[time + 2].starts_with("Form: 1 "), "{text}");
    assert_eq!(lines[time + 3], "");
}

#[apply(both_modes)]
fn describe_last_error_skips_block_comments_before_the_form(mode: Mode) {
    let mut server = mode.ready();
    let text = described(&mut server, "1\n#|\n|#\n*no-such-variable*");
    assert!(text.contains("\nForm: 2 (line 4): *no-such-variable*\n"), "{text}");
}

#[apply(both_modes)]
fn warnings_and_errors_of_the_compiler_name_the_line(mode: Mode) {
    let mut server = mode.ready();
    let code = "(defun fine () 1)\n\n(defun bad (x)\n  (let ((y 1))\n    (list x (car 1))))\n\
                (defmacro broken () (error \"macro\"))\n(defun uses-it ()\n  (list 1)\n  (broken))";
    let text = server.evaluate(code);
    assert!(
        text.contains("SB-INT:SIMPLE-STYLE-WARNING: The variable Y is defined but never used. (line 4)\n"),
        "{text}"
    );
    assert!(
        text.contains("SB-INT:TYPE-WARNING: Constant 1 conflicts with its asserted type LIST. (line 5)\n"),
        "{text}"
    );
    assert!(text.contains("COMPILE-TIME-ERROR: ") && text.contains("macro (line 9)"), "{text}");
}

#[apply(both_modes)]
fn unused_argument_warning_names_a_line(mode: Mode) {
    let mut server = mode.ready();
    let text = server.evaluate("(list 1)\n(defun idle (x)\n  1)");
    assert!(text.contains("The variable X is defined but never used. (line 2)"), "{text}");
}

#[apply(both_modes)]
fn frames_of_evaluated_functions_name_evaluation_and_line(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(list 1)");
    server.evaluate("(list 2)\n\n(defun thrower (x)\n  (error \"x ~A\" x))");
    server.evaluate("(defun caller (x) (list (thrower x)))");
    evaluate_err(&mut server, "(caller 1)");
    let text = call_ok(&mut server, "get-backtrace", json!({}));
    assert!(text.contains(": (THROWER 1)\n     at evaluation 2, line 4: (error \"x ~A\" x))\n"), "{text}");
    assert!(
        text.contains(": (CALLER 1)\n     at evaluation 3, line 1: (defun caller (x) (list (thrower x)))\n"),
        "{text}"
    );
}

#[apply(both_modes)]
fn frames_of_loaded_functions_name_file_and_line(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.write(
        "loaded.lisp",
        "(defun first-one () (second-one 1))\n;; a comment\n\n(defun second-one (x)\n  (list (third-one x)))\n\n\
         #| more\n|#\n(defun third-one (x)\n  (error \"x ~A\" x))\n",
    );
    server.evaluate(&format!("(load {:?})", path.display().to_string()));
    evaluate_err(&mut server, "(list (first-one))");
    let text = call_ok(&mut server, "get-backtrace", json!({}));
    for (call, line, code) in
        [("(SECOND-ONE 1)", 5, "(list (third-one x)))"), ("(THIRD-ONE 1)", 10, "(error \"x ~A\" x))")]
    {
        assert!(text.contains(&format!(": {call}\n     at {}:{line}: {code}\n", shown(&path))), "{call}:\n{text}");
    }
}

#[apply(both_modes)]
fn frames_of_code_compiled_during_a_load_name_the_form_that_was_loaded(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.write(
        "compiled.lisp",
        "(defpackage :late-code (:use :cl))\n(in-package :late-code)\n\n\
         (defvar *f* (compile nil '(lambda () (error \"x\"))))\n(defvar *g* 1)\n",
    );
    server.evaluate(&format!("(load {:?})", path.display().to_string()));
    evaluate_err(&mut server, "(list (funcall late-code::*f*))");
    let text = call_ok(&mut server, "get-backtrace", json!({}));
    let source = format!("     at {}:4: (defvar *f* (compile nil '(lambda () (error \"x\"))))\n", shown(&path));
    assert!(text.contains(&source), "{text}");
}

// ---- Arguments, variables and slots

#[apply(both_modes)]
fn get_backtrace_shows_locals_on_request_and_marks_unavailable_ones(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun careful (x) (declare (optimize debug)) (let ((y (list x))) (cerror \"go\" \"x\") (list x y)))\n\
         (defun careless (x) (declare (optimize (debug 1) (speed 3))) (let ((z (careful (length x)))) (list z)))",
    );
    evaluate_err(&mut server, "(careless (list 1 2 3))");
    let plain = call_ok(&mut server, "get-backtrace", json!({}));
    assert!(!plain.contains(" = "), "{plain}");
    let text = call_ok(&mut server, "get-backtrace", json!({"locals": true}));
    assert!(text.contains(": (CAREFUL 3)\n     at evaluation 1, line 1: (defun careful "), "{text}");
    assert!(text.contains("\n     X = 3\n     Y = (3)\n"), "{text}");
    // The list is dead at the call, so its variable is unavailable.
    assert!(text.contains("     not available: X"), "{text}");
    assert!(!text.contains("     Z = 3"), "{text}");
    // Apart from the locals the text is the same.
    let without: Vec<_> =
        text.lines().filter(|line| !line.starts_with("     ") || line.starts_with("     at ")).collect();
    assert_eq!(without.join("\n"), plain);
}

#[apply(both_modes)]
fn locals_whose_printing_fails_are_marked(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defclass sulky () ())\n(defmethod print-object ((x sulky) stream) (error \"no\"))\n\
         (defun f (x) (declare (optimize debug)) (cerror \"go\" \"here\") x)",
    );
    evaluate_err(&mut server, "(f (make-instance 'sulky))");
    let text = call_ok(&mut server, "get-backtrace", json!({"locals": true}));
    assert!(text.contains("     X = #<unprintable SULKY>\n"), "{text}");
}

#[apply(both_modes)]
fn describe_last_error_lists_condition_slots_missing_from_the_report(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(define-condition terse (error) ((code :initarg :code) (why :initarg :why) (unset :initarg :unset))\n  \
         (:report \"terse\"))\n\
         (define-condition chatty (error) ((code :initarg :code))\n  \
         (:report (lambda (c s) (format s \"code ~A\" (slot-value c 'code)))))",
    );
    let text = described(&mut server, "(error 'terse :code 42 :why (list :a \"[ERROR]\"))");
    assert!(text.contains("\n\nSlots:\n  CODE: 42\n  WHY: (:A \"[ERROR\\]\")\n\nAvailable Restarts:"), "{text}");
    let text = described(&mut server, "(error 'chatty :code 4242)");
    assert!(!text.contains("Slots:"), "{text}");
    let text = described(&mut server, "(error 'type-error :datum 1 :expected-type 'string)");
    assert!(!text.contains("\n  DATUM: 1\n") || text.contains("Slots:"), "{text}");
    // Slots are shown up to a bound.
    let text = described(&mut server, "(error 'terse :code (make-list 100000) :why (make-string 1000000))");
    assert!(text.len() < 50_000, "{}", text.len());
}

// ---- Error history

#[apply(both_modes)]
fn error_history_lists_the_last_errors_with_stable_ids(mode: Mode) {
    let mut server = mode.ready();
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": 20})), "This client has no recorded errors.");
    for number in 1..=25 {
        evaluate_err(&mut server, &format!(":one\n(error \"number ~A\" {number})"));
    }
    let history = call_ok(&mut server, "describe-last-error", json!({"list": 20}));
    let lines: Vec<_> = history.lines().collect();
    assert_eq!(lines.len(), 21);
    assert_eq!(lines[20], "... 5 older errors (raise `list` to see them)");
    for (line, number) in lines.iter().zip((6..=25).rev()) {
        let (id, rest) = line.split_once("  ").unwrap();
        assert_eq!(id, format!("E{number}"));
        let (time, rest) = rest.split_once("  ").unwrap();
        assert!(time.len() == 20 && time.ends_with('Z'), "{line}");
        assert_eq!(rest, format!("SIMPLE-ERROR  number {number}  form 2 (line 2)"));
    }
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": 200})).lines().count(), 25);
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": "2"})).lines().count(), 3);
    assert!(call_err(&mut server, "describe-last-error", json!({"list": 201})).contains("from 1 to 200"));
    for id in ["E26", "E0", "x"] {
        for tool in ["describe-last-error", "get-backtrace"] {
            let (text, is_error) = server.call_tool(tool, json!({"error-id": id}));
            assert!(is_error && text.contains("The history has E1 to E25 "), "{id}: {text}");
        }
    }
    // An error id always gives the same description; a success changes neither.
    let ask = |server: &mut Server| {
        let id = json!({"error-id": "E10"});
        (call_ok(server, "describe-last-error", id.clone()), call_ok(server, "get-backtrace", id))
    };
    let first = ask(&mut server);
    assert!(
        first.0.starts_with("Error: SIMPLE-ERROR\n  number 10\n") && first.0.contains("\nId: E10\n"),
        "{}",
        first.0
    );
    assert!(first.1.contains("(ERROR \"number ~A\" 10)"), "{}", first.1);
    server.assert_works();
    assert_eq!(
        call_ok(&mut server, "describe-last-error", json!({})).lines().next(),
        Some("No error information available.")
    );
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": 20})), history);
    assert_eq!(ask(&mut server), first);
    evaluate_err(&mut server, "(error \"another\")");
    assert_eq!(ask(&mut server), first);
    assert!(call_ok(&mut server, "describe-last-error", json!({"list": 20})).starts_with("E26 "));

    call_ok(&mut server, "reset-session", json!({}));
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": 20})), "This client has no recorded errors.");
    let (text, is_error) = server.call_tool("describe-last-error", json!({"error-id": "E25"}));
    assert!(is_error && text.contains("this client has no recorded errors"), "{text}");
}

#[apply(both_modes)]
fn error_id_of_the_last_error_gives_the_same_description_and_frames(mode: Mode) {
    let mut server = mode.ready();
    let last = described(&mut server, "(vector-pop (vector))");
    let id = last.lines().find_map(|line| line.strip_prefix("Id: ")).expect("an identifier").to_owned();
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"error-id": id})), last);
    let backtrace = call_ok(&mut server, "get-backtrace", json!({"max-frames": 2, "locals": true}));
    let by_id = json!({"max-frames": 2, "locals": true, "error-id": id.to_lowercase()});
    assert_eq!(call_ok(&mut server, "get-backtrace", by_id), backtrace);
}

#[apply(both_modes)]
fn unloaded_quicklisp_gets_a_hint_in_the_package_error(mode: Mode) {
    let home = Scratch::new();
    home.directory("quicklisp");
    let mut server = mode.start_with_environment(&[], &[("HOME", &*home)]);
    server.initialize("2025-06-18");
    let setup = home.join("quicklisp/setup.lisp");
    let expected = format!(
        "\nQuicklisp is not loaded, and {} does not exist. To load a system that ASDF finds on this machine: \
         (asdf:load-system ...)\n\n[Backtrace]",
        setup.display()
    );
    let report = evaluate_err(&mut server, "(ql:quickload :alexandria)");
    assert!(report.starts_with("[ERROR] SB-INT:SIMPLE-READER-PACKAGE-ERROR\nPackage QL does not exist."), "{report}");
    assert!(report.contains(&expected), "{report}");
    std::fs::write(&setup, "(defpackage :quicklisp-client (:nicknames :ql) (:export #:quickload))").unwrap();
    let expected = format!("\nQuicklisp is not loaded. To load Quicklisp: (load {setup:?})\n\n[Backtrace]");
    for code in ["(ql:quickload :alexandria)", "(quicklisp:quickload :alexandria)", "(in-package :ql)"] {
        let report = evaluate_err(&mut server, code);
        assert!(report.contains(&expected), "{report}");
        assert!(last_error(&mut server).contains("Quicklisp is not loaded."), "{code}");
    }
    server.evaluate(&format!("(load {setup:?})"));
    for code in ["(ql::quickload :alexandria)", "(ql:no-such-symbol)", "(no-such-package:f)"] {
        assert!(!evaluate_err(&mut server, code).contains("Quicklisp is not"), "{code}");
    }
    std::fs::remove_dir_all(&home).unwrap();
}

// ---- Recording of handled errors

/// Evaluates `code` with `record-errors` and returns the answer.
#[apply(both_modes)]
fn structure_redefinition_hint_names_only_the_restarts_that_sbcl_offers(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defstruct point x) (defstruct size (width 0d0 :type double-float)) (defstruct nothing)");
    let continues =
        "\nThe restart CONTINUE installs the new definition: these instances and this code become invalid.\n";
    let recklessly =
        "The restart RECKLESSLY-CONTINUE installs the new definition as if both definitions were compatible.\n";
    for (code, old, is_reckless) in [
        ("(defstruct point x y)", "POINT, and code compiled for them, use the old definition, with the slot X.", true),
        ("(defstruct nothing x)", "NOTHING, and code compiled for them, use the old definition, with no slots.", true),
        // A raw slot cannot become a slot for Lisp objects.
        (
            "(defstruct size width)",
            "SIZE, and code compiled for them, use the old definition, with the slot WIDTH.",
            false,
        ),
    ] {
        let report = evaluate_err(&mut server, code);
        let hint = format!("\nExisting instances of {old}{continues}{}", if is_reckless { recklessly } else { "" });
        assert!(report.contains(&hint), "{report}");
        assert_eq!(report.contains(recklessly), is_reckless, "{report}");
    }
}

#[track_caller]
fn recorded(server: &mut Server, code: &str) -> String {
    call_ok(server, "evaluate-lisp", json!({"code": code, "record-errors": true}))
}

const HEADING: &str =
    "[notice]\nErrors that the code handled (get-backtrace and describe-last-error take their error-id):\n";

#[apply(both_modes)]
fn record_errors_lists_errors_handled_by_the_code(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun inner (v i)\n  (aref v i))\n(defun outer (v i)\n  (handler-case (inner v i) (error () :handled)))",
    );
    // Without `record-errors`, handled errors are not recorded.
    assert_eq!(server.evaluate("(outer (vector 1 2) 9)"), "=> :HANDLED");
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": 20})), "This client has no recorded errors.");

    let text = recorded(&mut server, "(list (outer (vector 1 2) 9) (ignore-errors (error \"foo ~a\" 1)))");
    let lines: Vec<_> = text.strip_prefix(HEADING).unwrap_or_else(|| panic!("{text}")).lines().collect();
    assert!(
        lines[0].starts_with("E1  SB-INT:INVALID-ARRAY-INDEX-ERROR  Invalid index 9 for (SIMPLE-VECTOR 2)")
            && lines[0].ends_with("  in (INNER #(1 2) 9)  evaluation 1, line 2: (aref v i))"),
        "{text}"
    );
    assert!(lines[1].starts_with("E2  SIMPLE-ERROR  foo 1  in "), "{text}");
    assert_eq!(lines[2..], ["", "=> (:HANDLED NIL)"]);

    // Recorded errors have the details of any other error.
    let frames = call_ok(&mut server, "get-backtrace", json!({"error-id": "E1", "locals": true}));
    assert!(
        frames.contains("(INNER #(1 2) 9)\n     at evaluation 1, line 2: (aref v i))\n     V = #(1 2)"),
        "{frames}"
    );
    assert!(frames.contains("(OUTER #(1 2) 9)\n     at evaluation 1, line 4: (handler-case"), "{frames}");
    // Recorded errors affect neither the last error nor the outcome.
    assert!(last_error(&mut server).starts_with("No error information available."));
}

#[apply(both_modes)]
fn record_errors_reports_an_unhandled_error_only_once(mode: Mode) {
    let mut server = mode.ready();
    let code = json!({"code": "(ignore-errors (error \"a\"))\n(error \"b\")", "record-errors": true});
    let text = call_err(&mut server, "evaluate-lisp", code);
    let rest = text.strip_prefix(HEADING).unwrap_or_else(|| panic!("{text}"));
    assert!(rest.starts_with("E1  SIMPLE-ERROR  a  ") && rest.contains("\n\n[ERROR] SIMPLE-ERROR\nb\n"), "{text}");
    let history = call_ok(&mut server, "describe-last-error", json!({"list": 20}));
    assert_eq!(history.lines().count(), 2, "{history}");
    assert!(last_error(&mut server).contains("\nId: E2\n"));
    insta::allow_duplicates! { insta::assert_snapshot!(recorded(&mut server, "1"), @r"
    [notice]
    The code handled no errors.

    => 1
    "); }
    // The notices cover the errors before the hold and those after the resumption.
    let code = json!({"code": "(list (ignore-errors (error \"c\")) (restart-case (error \"d\") (use-value (v) v))
                                     (ignore-errors (error \"e\")))",
                      "record-errors": true, "on-error": "debug"});
    let text = call_err(&mut server, "evaluate-lisp", code);
    assert!(text.contains("E3  SIMPLE-ERROR  c  ") && !text.contains("SIMPLE-ERROR  d"), "{text}");
    call_ok(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(ignore-errors (error \"x\"))"}));
    let text = call_ok(&mut server, "invoke-restart", json!({"restart": "USE-VALUE", "values": "7"}));
    assert!(text.contains("SIMPLE-ERROR  e  ") && text.ends_with("=> (NIL 7 NIL)"), "{text}");
    assert!(!text.contains("SIMPLE-ERROR  c") && !text.contains("SIMPLE-ERROR  x"), "{text}");
}

#[apply(both_modes)]
fn record_errors_lists_each_place_once_and_at_most_20_kinds(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defun fails (v) (aref v 3))");
    let text = recorded(&mut server, "(dotimes (i 1000) (ignore-errors (fails (make-array (mod i 3)))))");
    assert_eq!(text.matches("INVALID-ARRAY-INDEX-ERROR").count(), 1, "{text}");
    let text = recorded(&mut server, "(dotimes (i 30) (eval `(ignore-errors (error \"number ~a\" ,i))))");
    assert_eq!(text.matches("SIMPLE-ERROR  number ").count(), 20, "{text}");
    assert!(
        text.starts_with("[notice]\nOnly some of the signalled errors were recorded: recording stops after 20 errors"),
        "{text}"
    );
    // A condition that is signalled again on its way counts once.
    let text = recorded(
        &mut server,
        "(handler-case (handler-bind ((error (lambda (c) (error c)))) (error \"again\")) (error () 1))",
    );
    assert_eq!(text.matches("SIMPLE-ERROR  again").count(), 1, "{text}");
}

#[apply(both_modes)]
fn record_errors_does_not_affect_handlers_or_the_result(mode: Mode) {
    let mut server = mode.ready();
    let before = "(defstruct bad)
        (defmethod print-object ((bad bad) stream) (signal 'simple-warning) (error \"while printing\"))
        (defvar *seen* '())
        (defun try (object)
          (setf *seen* '())
          (handler-case (handler-bind ((condition (lambda (c) (push (type-of c) *seen*))))
                          (error \"of ~a\" object))
            (error () (list :handled *seen*))))";
    server.evaluate(before);
    let text = recorded(&mut server, "(try (make-bad))");
    assert!(text.contains("of (the condition's report failed: SIMPLE-ERROR)"), "{text}");
    assert!(text.ends_with("=> (:HANDLED (SIMPLE-ERROR))"), "{text}");
    // An endless print method delays the evaluation by a second and does not end it.
    server.evaluate("(defmethod print-object ((bad bad) stream) (loop))");
    let text = recorded(&mut server, "(try (make-bad))");
    assert!(text.contains("E2  SIMPLE-ERROR  (the condition's report took too long to print)"), "{text}");
    assert!(text.ends_with("=> (:HANDLED (SIMPLE-ERROR))"), "{text}");
    // Errors that SBCL and ASDF handle internally are not recorded.
    let text =
        recorded(&mut server, "(defmacro fails () (error \"in a macro\"))\n(let ((x (defun uses () (fails)))) x)");
    assert!(text.starts_with("[notice]\nThe code handled no errors.\n"), "{text}");
    server.assert_works();
}

#[apply(both_modes)]
fn error_that_was_being_described_at_an_interruption_is_named_as_such(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(define-condition slow (error) () (:report (lambda (condition stream) condition stream (sleep 60))))
         (defstruct bad)
         (defmethod print-object ((bad bad) stream) stream (sleep 60))
         (defun fail-with (bad) (if (eq bad 7) bad (error \"plain\")))",
    );
    for (code, id, kind) in [("(error 'slow)", 1, "SLOW"), ("(fail-with (make-bad))", 3, "SIMPLE-ERROR")] {
        let text = call_err(&mut server, "evaluate-lisp", json!({"code": code, "timeout": 0.5}));
        let why = "The evaluation was interrupted while this error was being described.";
        let expected = format!("[notice]\nE{id} reached the debugger earlier: {kind}. {why}\n");
        assert!(text.starts_with(&expected) && text.contains("[ERROR] TIMEOUT"), "{text}");
    }
    for code in ["(unwind-protect (error \"x\") (error \"y\"))", "(unwind-protect (error \"x\") (sleep 60))"] {
        let limits = json!({"code": code, "timeout": 0.5});
        let text = call_err(&mut server, "evaluate-lisp", limits);
        assert!(
            text.contains("A cleanup form failed, exited non-locally or was interrupted while the evaluation was"),
            "{text}"
        );
    }
    server.assert_works();
}

#[apply(both_modes)]
fn record_errors_includes_errors_in_threads_of_the_evaluation(mode: Mode) {
    let mut server = mode.ready();
    let code = "(mapc #'sb-thread:join-thread
                  (loop for i below 4
                        collect (let ((i i))
                                  (sb-thread:make-thread (lambda () (ignore-errors (parse-integer (format nil \"x~a\" i))) i)))))
                (progn 1)";
    let text = recorded(&mut server, code);
    assert_eq!(text.matches("SIMPLE-PARSE-ERROR  junk in string").count(), 1, "{text}");
    assert!(text.ends_with("=> 1"), "{text}");
}

#[apply(both_modes)]
fn break_on_signals_backtrace_starts_at_the_signalling_frame(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defun inner (v)\n  (car v))\n(defun outer (v)\n  (handler-case (inner v) (error () :handled)))");
    for record in [false, true] {
        let code =
            json!({"code": "(let ((*break-on-signals* 'type-error)) (outer (eval 3)))", "record-errors": record});
        let text = call_err(&mut server, "evaluate-lisp", code);
        assert!(text.contains("BREAK was entered because of *BREAK-ON-SIGNALS*"), "{text}");
        assert!(text.contains("[Backtrace]\n0: (INNER 3)\n1: (OUTER 3)\n"), "{text}");
        let frames = call_ok(&mut server, "get-backtrace", json!({}));
        assert!(frames.contains("0: (INNER 3)\n     at evaluation 1, line 2: (car v))"), "{frames}");
    }
}
