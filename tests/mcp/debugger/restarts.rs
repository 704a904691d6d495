//! Holding an evaluation and resuming it by a restart.

use super::*;

#[apply(both_modes)]
fn error_report_ends_with_the_restarts_and_debugger_tools(mode: Mode) {
    let mut server = mode.ready();
    let code = "(restart-case (error \"boo\") (first-way () :report \"Go the first way\" 1) (second-way (x) x))";
    let report = hold(&mut server, code);
    assert!(report.starts_with("[ERROR] SIMPLE-ERROR\nboo\n\n[Backtrace]\n0: (ERROR "), "{report}");
    let expected = format!(
        "\n\n[Debugger]\nHeld. Restarts:\n  1. FIRST-WAY - Go the first way\n  2. SECOND-WAY - SECOND-WAY\n  \
         3. RETRY - Evaluate this form again.\n  4. ABORT - Return to top level.\n{DEBUGGER_SECTION_END}"
    );
    assert!(report.ends_with(&expected), "{report}");
    // describe-last-error numbers the restarts alike.
    let restarts = expected.split_once("Restarts:").unwrap().1.split_once("\nTools").unwrap().0;
    assert!(last_error(&mut server).contains(&format!("Available Restarts:{restarts}\n\n")));
    let backtrace = call_ok(&mut server, "get-backtrace", json!({}));
    for line in report.split_once("[Backtrace]\n").unwrap().1.split_once("\n\n").unwrap().0.lines() {
        assert!(backtrace.contains(&format!("\n  {line}")), "{line}\n{backtrace}");
    }
    assert_eq!(invoke_restart(&mut server, 1), "=> 1");
    assert_nothing_held(&mut server);
    assert!(server.finish().status.success());
}

#[apply(both_modes)]
fn evaluation_is_held_only_with_on_error_debug(mode: Mode) {
    let mut server = mode.ready();
    for arguments in [json!({"code": "(error \"x\")"}), json!({"code": "(error \"x\")", "on-error": "abort"})] {
        let text = call_err(&mut server, "evaluate-lisp", arguments);
        assert!(!text.contains("[Debugger]"), "{text}");
        assert_nothing_held(&mut server);
    }
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": "1", "on-error": "explode"}));
    assert!(text.contains("on-error must be one of abort, debug, ask"), "{text}");
    // Code that handles its own errors or only signals conditions is not held.
    for (code, value) in [
        ("(handler-case (error \"x\") (error () :handled))", "=> :HANDLED"),
        ("(progn (signal \"x\") :done)", "=> :DONE"),
        ("(nth-value 0 (ignore-errors (error \"x\")))", "=> NIL"),
    ] {
        assert_eq!(call_ok(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"})), value);
    }
}

#[apply(both_modes)]
fn cancellation_and_stack_or_heap_exhaustion_are_never_held(mode: Mode) {
    let mut server = mode.start_with(&["--heap", "512M"]);
    server.initialize("2025-06-18");
    let code = "(defun deep (n) (+ 1 (deep n))) (deep 1)";
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    assert!(text.contains("[ERROR] SB-KERNEL::CONTROL-STACK-EXHAUSTED\n"), "{text}");
    assert!(!text.contains("[Debugger]"), "{text}");
    assert_nothing_held(&mut server);

    let code = "(let ((all '())) (loop (push (make-array 100000) all)))";
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    assert!(text.contains("[ERROR] HEAP-EXHAUSTED\n") && !text.contains("[Debugger]"), "{text}");
    assert_nothing_held(&mut server);

    server.evaluate("(defvar *runs* nil)");
    let id = server.post_call("evaluate-lisp", json!({"code": "(setf *runs* t) (loop)", "on-error": "debug"}));
    while !call_ok(&mut server, "list-definitions", json!({"type": "variables"})).contains("*RUNS* = T") {}
    server.notify("notifications/cancelled", json!({"requestId": id}));
    assert_nothing_held(&mut server);
    assert!(last_error(&mut server).starts_with("Error: CANCELLED\n"));
    server.assert_works();
}

#[apply(both_modes)]
fn every_kind_of_error_is_held_with_on_error_debug(mode: Mode) {
    let mut server = mode.ready();
    for (code, kind) in [
        ("(/ 1 0)", "DIVISION-BY-ZERO"),
        ("(break \"here\")", "SIMPLE-CONDITION"),
        ("(invoke-debugger (make-condition 'simple-error :format-control \"x\"))", "SIMPLE-ERROR"),
        ("(list 1", "END-OF-FILE"),
        ("(intern \"X\" :no-such-package)", "PACKAGE-DOES-NOT-EXIST"),
        ("(make-instance 'no-such-class)", "SB-PCL:CLASS-NOT-FOUND-ERROR"),
        ("(handler-bind ((error (lambda (c) (error \"in the handler of ~A\" c)))) (error \"x\"))", "SIMPLE-ERROR"),
    ] {
        let report = hold(&mut server, code);
        assert!(report.contains(&format!("[ERROR] {kind}\n")), "{code}: expected {kind}:\n{report}");
        assert_eq!(call_ok(&mut server, "abort-evaluation", json!({})), "Evaluation aborted.");
    }
    server.assert_works();
}

#[apply(both_modes)]
fn unknown_package_argument_is_held_with_retry_and_abort(mode: Mode) {
    let mut server = mode.ready();
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": "1", "package": "NOPE", "on-error": "debug"}));
    assert!(text.contains("Restarts:\n  1. RETRY - Look for the package again.\n  2. ABORT - "), "{text}");
    call_ok(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(make-package \"NOPE\")"}));
    let text = call_ok(&mut server, "invoke-restart", json!({"restart": "RETRY"}));
    assert_eq!(text, "=> 1");
}

// ---- Restarts

#[apply(both_modes)]
fn continue_calls_a_function_defined_while_held(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun price (item) (* 2 (base-price item)))\n(defun total (items) (reduce #'+ (mapcar #'price items)))",
    );
    let report = hold(&mut server, "(total (list :tea 5))");
    assert!(report.contains("[ERROR] UNDEFINED-FUNCTION\n"), "{report}");
    assert!(report.contains("\n0: (BASE-PRICE :TEA)\n1: (PRICE :TEA)\n"), "{report}");
    assert!(report.contains("\n  1. CONTINUE - Retry calling BASE-PRICE.\n"), "{report}");
    // The locals show the argument of the call.
    let locals = frame_locals(&mut server, 1);
    assert_eq!(locals, "ITEM = :TEA");
    assert_eq!(in_frame(&mut server, 1, "(list item)"), "=> (:TEA)");
    // Frame 0 has no variables: its code is evaluated globally, with a notice.
    let text = in_frame(&mut server, 0, "(defun base-price (item) (if (eq item :tea) 10 item))");
    let said = "[notice]\nSBCL knows no variables of frame 0, so the code was evaluated outside the frame.\n\n";
    assert_eq!(text, format!("{said}=> BASE-PRICE"));
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> 30");
    assert_eq!(last_error(&mut server), NO_ERROR);
    assert_nothing_held(&mut server);
}

#[apply(both_modes)]
fn eval_in_frame_without_variables_evaluates_globally_with_a_notice(mode: Mode) {
    let mut server = mode.ready();
    let report = hold(&mut server, "(defun none () (/ 1 0)) (defun some-are (x) (list (none) x)) (some-are 1)");
    let frames = report.split_once("[Backtrace]\n").unwrap().1.split_once("\n\n").unwrap().0;
    for (number, frame) in (0..).zip(frames.lines()) {
        let own = frame.contains("(SOME-ARE 1)") && !frame.contains("EVAL");
        let answer = in_frame(&mut server, number, "(+ 1 2)");
        let notice = if own {
            String::new()
        } else {
            format!(
                "[notice]\nSBCL knows no variables of frame {number}, so the code was evaluated outside the frame.\n\n"
            )
        };
        assert_eq!(answer, format!("{notice}=> 3"), "{frame}");
    }
    assert!(frames.lines().count() >= 6, "{frames}");
}

#[apply(both_modes)]
fn retry_evaluates_only_the_failing_form_again(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *log* '())\n(defun area (r) (push r *log*) (* 2 (factor r)))");
    let report = hold(&mut server, "(push :before *log*)\n(+ 1 (area 5))");
    let frame = frame_of(&report, "(AREA 5)");
    assert_eq!(in_frame(&mut server, frame, "(defun factor (r) (declare (ignore r)) 10)"), "=> FACTOR");
    assert_eq!(invoke_restart(&mut server, "retry"), "=> 21");
    // Only the failing form was evaluated again.
    assert_eq!(server.evaluate("*log*"), "=> (5 5 :BEFORE)");
}

#[apply(both_modes)]
fn retry_and_abort_are_listed_among_thousands_of_restarts(mode: Mode) {
    let mut server = mode.ready();
    for count in [97, 98, 99, 10_000] {
        let code = format!(
            "(labels ((f (n) (if (zerop n) (error \"deep\") (restart-case (f (1- n)) (foo () 1))))) (f {count}))"
        );
        let report = call_err(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"}));
        let own = format!(
            "\n  {}. RETRY - Evaluate this form again.\n  {}. ABORT - Return to top level.\n",
            count + 1,
            count + 2
        );
        for text in [report, last_error(&mut server)] {
            assert!(text.contains(&own), "{text}");
            let omitted = count - 98;
            let plural = if omitted == 1 { "" } else { "s" };
            let line = format!("\n  [... {omitted} more restart{plural} omitted]");
            assert_eq!(text.contains(&line), omitted > 0, "{text}");
            assert_eq!(text.contains("\n  98. FOO - FOO\n"), count >= 98, "{text}");
        }
        let text = call_err(&mut server, "invoke-restart", json!({"restart": "no-such"}));
        assert!(text.ends_with(&format!(" FOO, {} RETRY, {} ABORT.", count + 1, count + 2)), "{text}");
        call_ok(&mut server, "invoke-restart", json!({"restart": count + 2}));
    }
    // In a short answer, RETRY and ABORT are the last restarts to be omitted.
    call_ok(&mut server, "configure-limits", json!({"max-answer": 6_000}));
    let text = evaluate_err(
        &mut server,
        "(labels ((f (n) (if (zerop n) (error (make-string 3000 :initial-element #\\x))
                             (restart-case (f (1- n)) (foo () :report \"This says at some length what it does.\" 1)))))
           (f 200))",
    );
    assert!(text.starts_with("[ERROR]"), "{text}");
    let text = last_error(&mut server);
    assert!(text.contains("\n  201. RETRY - ") && text.contains("\n  202. ABORT - "), "{text}");
    assert!(text.chars().count() <= 6_000 && text.contains(" more restarts omitted]"), "{text}");
}

#[apply(both_modes)]
fn invoke_restart_passes_the_given_values(mode: Mode) {
    let mut server = mode.ready();
    for (code, name, values, expected) in [
        ("(+ 1 *no-such-variable*)", json!("USE-VALUE"), "41", "=> 42"),
        ("(+ 1 *no-such-variable*)", json!("use-value"), "(* 6 7)", "=> 43"),
        ("(+ 1 *stored-variable*)", json!("STORE-VALUE"), "(+ 1 1)", "=> 3"),
        ("(list (no-such-function 1 2))", json!("use-value"), "#'+", "=> (3)"),
        ("(let ((x 5)) (check-type x string) x)", json!("store-value"), "\"five\"", "=> \"five\""),
        ("(let ((k 3)) (ccase k (1 :one)))", json!("store-value"), "1", "=> :ONE"),
        ("(restart-case (error \"x\") (two (a b) (list a b)))", json!("two"), "1 (list 2)", "=> (1 (2))"),
        ("(restart-case (error \"x\") (many (&rest all) all))", json!(1), "", "=> NIL"),
        (
            "(restart-case (error \"x\") (many (&rest all) all))",
            json!("1"),
            "'a \"b c\" ; no more\n 3",
            "=> (A \"b c\" 3)",
        ),
        ("(restart-case (error \"x\") (more (&key a b) (list a b)))", json!("MORE"), ":b 2", "=> (NIL 2)"),
        ("(restart-case (error \"x\") (some (v) (values v v)))", json!("some"), "1", "=> 1\n=> 1"),
        ("(progn (cerror \"Go on\" \"x\") :done)", json!("continue"), "", "=> :DONE"),
        ("(progn (break) :done)", json!("continue"), "", "=> :DONE"),
    ] {
        hold(&mut server, code);
        let (text, _) = server.call_tool("invoke-restart", json!({"restart": name, "values": values}));
        // The compiler's warning about the missing function comes with the end of the evaluation.
        let answer = text.rsplit_once("\n\n").map_or(&*text, |(_, last)| last);
        assert_eq!(answer, expected, "{code} {name} {values}:\n{text}");
        assert_nothing_held(&mut server);
    }
    assert_eq!(server.evaluate("*stored-variable*"), "=> 2");
}

#[apply(both_modes)]
fn unbound_slot_is_repaired_by_store_value_use_value_or_retry(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defclass point () ((x :accessor x)))\n(defvar *p* (make-instance 'point))");
    hold(&mut server, "(list (x *p*) (x *p*))");
    assert_eq!(invoke_restart_with(&mut server, "STORE-VALUE", "(+ 3 4)"), "=> (7 7)");
    assert_eq!(server.evaluate("(slot-value *p* 'x)"), "=> 7");
    server.evaluate("(slot-makunbound *p* 'x)");
    hold(&mut server, "(x *p*)");
    assert_eq!(invoke_restart_with(&mut server, "USE-VALUE", "8"), "=> 8");
    assert_eq!(server.evaluate("(slot-boundp *p* 'x)"), "=> NIL");
    // Alternatively the slot is set in the frame, and the form is evaluated again.
    hold(&mut server, "(1+ (x *p*))");
    assert!(in_frame(&mut server, 0, "(setf (x *p*) 1)").ends_with("=> 1"));
    assert_eq!(invoke_restart(&mut server, "RETRY"), "=> 2");
}

#[apply(both_modes)]
fn retry_succeeds_after_a_missing_slot_is_added_to_the_class(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defclass thing () ())\n(defvar *t* (make-instance 'thing))");
    let report = hold(&mut server, "(slot-value *t* 'size)");
    assert!(report.contains("[ERROR] SB-PCL::MISSING-SLOT\n"), "{report}");
    in_frame(&mut server, 0, "(defclass thing () ((size :initform 9)))");
    assert_eq!(invoke_restart(&mut server, "RETRY"), "=> 9");
}

#[apply(both_modes)]
fn assert_without_places_continues_once_the_test_is_true(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *ready* nil)");
    hold(&mut server, "(assert *ready*)\n:asserted");
    let again = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(again.contains("[ERROR] SIMPLE-ERROR\n") && again.contains("[Debugger]\nHeld."), "{again}");
    in_frame(&mut server, 0, "(setf *ready* t)");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :ASSERTED");
}

#[apply(both_modes)]
fn assert_with_places_takes_new_values_from_continue(mode: Mode) {
    let mut server = mode.ready();
    let one = "(let ((n 1)) (assert (= n 2) (n) \"n is ~A\" n) n)";
    hold(&mut server, one);
    // SBCL prompts for the values and reads the given ones.
    let asked = "[stdout]\nThe old value of N is 1.\nDo you want to supply a new value?  (y or n) \n\
                 Type a form to be evaluated:\n\n=> 2";
    assert_eq!(invoke_restart_with(&mut server, "CONTINUE", "2"), asked);
    hold(&mut server, one);
    let still = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "3"}));
    assert!(still.contains("\nn is 3\n"), "{still}");
    // Without a new value the place keeps its value.
    let still = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(still.contains("\nn is 3\n") && still.ends_with(DEBUGGER_SECTION_END), "{still}");
    let failed = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "(car 1)"}));
    assert!(
        failed.starts_with("[notice]\nAn expression for a value failed: ") && failed.contains("[ERROR] TYPE-ERROR\n"),
        "{failed}"
    );
    let many = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "2 3"}));
    assert_eq!(many, "The restart CONTINUE takes up to 1 value; 2 were given.");
    assert!(invoke_restart_with(&mut server, "CONTINUE", "(1+ 1)").ends_with("\n\n=> 2"));

    let two = "(let ((a 1) (b (list 2))) (assert (and (eql a 5) (eql (car b) 6)) (a (car b))) (list a b))";
    hold(&mut server, two);
    let still = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "5"}));
    assert!(still.contains("\nThe assertion "), "{still}");
    assert!(invoke_restart_with(&mut server, "CONTINUE", "5 6").ends_with("\n\n=> (5 (6))"));
    hold(&mut server, "(let ((n 1)) (assert (null n) (n)) :null)");
    assert!(invoke_restart_with(&mut server, "CONTINUE", "nil").ends_with("\n\n=> :NULL"));
    // Each value form is evaluated once, and its value may be any object.
    server.evaluate("(defvar *evaluated* 0)");
    hold(&mut server, "(let ((f nil)) (assert (functionp f) (f)) (funcall f))");
    let values = "(let ((n (incf *evaluated*))) (lambda () n))";
    assert!(invoke_restart_with(&mut server, "CONTINUE", values).ends_with("\n\n=> 1"));
    // A place whose printed form contains commas, spaces and full stops is still one place.
    hold(
        &mut server,
        "(let ((h (make-hash-table :test 'equal))) (assert (gethash \"a, b.\" h) ((gethash \"a, b.\" h))) :set)",
    );
    let many = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "1 2"}));
    assert!(many.starts_with("The restart CONTINUE takes up to 1 value; 2 were given"), "{many}");
    assert!(invoke_restart_with(&mut server, "CONTINUE", "1").ends_with("\n\n=> :SET"));
    hold(&mut server, "(assert (= 1 2))");
    let text = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "1"}));
    assert_eq!(text, "The restart CONTINUE takes no values; 1 was given.");
}

#[apply(both_modes)]
fn assert_continued_by_a_handler_still_reads_query_io(mode: Mode) {
    let mut server = mode.ready();
    let asks = "(handler-bind ((simple-error #'continue)) (let ((n 1)) (assert (= n 2) (n)) n))";
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": asks}));
    assert!(text.contains("[ERROR] END-OF-FILE\n"), "{text}");
    // If the code binds *QUERY-IO*, the prompt goes to that stream, as in SBCL.
    let own = "(let ((n 1) (*query-io* (make-two-way-stream (make-string-input-stream \"y 2\") *standard-output*))) \
               (assert (= n 2) (n)) n)";
    hold(&mut server, own);
    assert!(invoke_restart_with(&mut server, "CONTINUE", "7").ends_with("\n\n=> 2"));
    // The values for one error do not reach the next one.
    hold(&mut server, &format!("(let ((n 1)) (assert (= n 2) (n)) (list n {asks}))"));
    let text = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "2"}));
    assert!(text.contains("[ERROR] END-OF-FILE\n"), "{text}");
}

#[apply(both_modes)]
fn next_error_of_a_resumed_evaluation_is_held_again(mode: Mode) {
    let mut server = mode.ready();
    let code = "(format t \"before~%\")\n(list (restart-case (error \"one\") (use-it (x) x))\n \
                (progn (format t \"between~%\") (restart-case (error \"two\") (use-it (x) x))))";
    let first = hold(&mut server, code);
    assert!(first.starts_with("[stdout]\nbefore\n\n[ERROR] SIMPLE-ERROR\none\n"), "{first}");
    let second = call_err(&mut server, "invoke-restart", json!({"restart": "use-it", "values": "1"}));
    assert!(second.starts_with("[stdout]\nbetween\n\n[ERROR] SIMPLE-ERROR\ntwo\n"), "{second}");
    assert!(second.ends_with(DEBUGGER_SECTION_END), "{second}");
    assert!(last_error(&mut server).starts_with("Error: SIMPLE-ERROR\n  two\n"));
    assert_eq!(invoke_restart_with(&mut server, "use-it", "2"), "=> (1 2)");
    assert_eq!(last_error(&mut server), NO_ERROR);
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": 20})).lines().count(), 2);
}

#[apply(both_modes)]
fn next_error_of_a_resumed_evaluation_names_its_form(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, ":first\n\n(progn (cerror \"go\" \"one\")\n  (error \"two\"))");
    assert!(last_error(&mut server).contains("\nForm: 2 (line 3): (progn (cerror \"go\" \"one\")\n"));
    call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    let text = last_error(&mut server);
    assert!(text.contains("\nForm: 2 (line 3): (progn (cerror \"go\" \"one\")\n"), "{text}");
}

#[apply(both_modes)]
fn failing_restart_values_leave_the_evaluation_held(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(restart-case (error \"held\") (take (x) x))");
    let before = last_error(&mut server);
    for (values, kind) in [("(/ 1 0)", "DIVISION-BY-ZERO"), ("(list 1", "END-OF-FILE")] {
        let text = call_err(&mut server, "invoke-restart", json!({"restart": "take", "values": values}));
        let said = "[notice]\nAn expression for a value failed: the restart was not invoked, and the evaluation is still \
                    held.\n\n";
        assert!(text.starts_with(&format!("{said}[ERROR] {kind}\n")) && !text.contains("[Debugger]"), "{text}");
    }
    assert_eq!(last_error(&mut server), before);
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": 20})).lines().count(), 3);
    assert_eq!(invoke_restart_with(&mut server, "take", ":taken"), "=> :TAKEN");
}

#[apply(both_modes)]
fn returning_restart_leaves_the_evaluation_held(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *called* 0)");
    hold(&mut server, "(restart-bind ((count-me (lambda () (incf *called*)))) (error \"x\"))");
    let said = "[notice]\nThe restart returned instead of resuming the evaluation, so the evaluation is still held. Invoke \
                another restart, or abort the evaluation.\n\n; No values";
    assert_eq!(invoke_restart(&mut server, "count-me"), said);
    assert!(in_frame(&mut server, 0, "*called*").ends_with("=> 1"));
    call_ok(&mut server, "abort-evaluation", json!({}));
}

#[apply(both_modes)]
fn restart_with_the_wrong_number_of_values_is_refused(mode: Mode) {
    let mut server = mode.ready();
    let takes = |what: &str| format!("The restart {what}.");
    for (code, name, refusals, values, expected) in [
        (
            "(+ 1 *no-such-variable*)",
            "use-value",
            vec![
                ("", "USE-VALUE takes 1 value: pass it as a Lisp expression"),
                ("1 2", "USE-VALUE takes 1 value; 2 were given"),
            ],
            "41",
            "=> 42",
        ),
        (
            "(let ((x 5)) (check-type x string) x)",
            "store-value",
            vec![("", "STORE-VALUE takes 1 value: pass it as a Lisp expression")],
            "\"a\"",
            "=> \"a\"",
        ),
        (
            "(no-such-function 1)",
            "return-value",
            vec![("; none", "RETURN-VALUE takes values: pass them as Lisp expressions")],
            ":back",
            "=> :BACK",
        ),
        (
            "(restart-case (error \"x\") (take (x) x))",
            "take",
            vec![("", "TAKE takes 1 value: pass it as a Lisp expression")],
            "1",
            "=> 1",
        ),
        (
            "(block b (restart-bind ((pair (lambda (a &optional b) (return-from b (list a b))))) (error \"x\")))",
            "pair",
            vec![
                ("", "PAIR takes 1 to 2 values: pass them as Lisp expressions"),
                ("1 2 3", "PAIR takes 1 to 2 values; 3 were given"),
            ],
            "1",
            "=> (1 NIL)",
        ),
        (
            "(block b (restart-bind ((some (lambda (a &rest more) (return-from b (list a more))))) (error \"x\")))",
            "some",
            vec![("", "SOME takes at least 1 value: pass them as Lisp expressions")],
            "1 2",
            "=> (1 (2))",
        ),
    ] {
        hold(&mut server, code);
        let before = last_error(&mut server);
        for (values, said) in refusals {
            let text = call_err(&mut server, "invoke-restart", json!({"restart": name, "values": values}));
            assert_eq!(text, takes(said), "{code} {values}");
        }
        assert_eq!(last_error(&mut server), before);
        let text = invoke_restart_with(&mut server, name, values);
        assert!(text.ends_with(expected), "{code}: {text}");
    }
    let interpreted = "(restart-case (error \"x\") (take (x) x))";
    server.evaluate(&format!("(defun interpreted () (let ((*evaluator-mode* :interpret)) (eval '{interpreted})))"));
    hold(&mut server, "(interpreted)");
    let text = call_err(&mut server, "invoke-restart", json!({"restart": "TAKE"}));
    assert_eq!(text, takes("TAKE takes 1 value: pass it as a Lisp expression"));
    assert_eq!(invoke_restart_with(&mut server, "TAKE", "1"), "=> 1");
    hold(&mut server, "(cerror \"go\" \"x\")");
    let text = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "1"}));
    assert_eq!(text, "The restart CONTINUE takes no values; 1 was given.");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> NIL");
}

#[apply(both_modes)]
fn interactive_restart_function_supplies_missing_values(mode: Mode) {
    let mut server = mode.ready();
    let code =
        |interactive: &str| format!("(restart-case (error \"x\") (take (x) :interactive (lambda () {interactive}) x))");
    hold(&mut server, &code("(list 5)"));
    assert_eq!(invoke_restart(&mut server, "take"), "=> 5");
    hold(&mut server, &code("(list 5)"));
    assert_eq!(invoke_restart_with(&mut server, "take", "6"), "=> 6");
    for interactive in ["(list (read *query-io*))", "(error \"not me\")", "7", "(list 1 2)", "(read-line)"] {
        hold(&mut server, &code(interactive));
        let text = call_err(&mut server, "invoke-restart", json!({"restart": "take"}));
        assert_eq!(text, "The restart TAKE takes 1 value: pass it as a Lisp expression.", "{interactive}");
        assert_eq!(invoke_restart_with(&mut server, "take", "6"), "=> 6");
    }
}

#[apply(both_modes)]
fn resumed_evaluation_keeps_its_own_handlers(mode: Mode) {
    let mut server = mode.ready();
    let code = "(handler-case (progn (sb-int:with-float-traps-masked () (break \"here\")) (error \"later\")) \
                (error (c) (format nil \"handled: ~A\" c)))";
    hold(&mut server, code);
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> \"handled: later\"");
}
