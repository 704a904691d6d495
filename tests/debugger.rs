//! The live debugger: a failed evaluation held where it failed, looked at, repaired and made to go on.

mod common;

use std::time::{Duration, Instant};

use common::{Server, bad, fail, good, last_error};
use serde_json::{Value, json};

const NOTHING_HELD: &str = "No evaluation is held: one is from the moment when it fails under on-error \
     \"debug\" until it goes on, or the next evaluation begins.";
const NO_ERROR: &str = "No error information available.\n(No error has occurred since the last successful evaluation)";
const RELEASED: &str = "[notice]\nThe evaluation that was held for debugging has been released.\n\n";
const TOOLS: &str =
    "Tools: invoke-restart, frame-locals, eval-in-frame, return-from-frame, restart-frame, abort-evaluation.";

/// Evaluates code that must fail and be held; the report.
#[track_caller]
fn hold(server: &mut Server, code: &str) -> String {
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    assert!(is_error && text.contains("\n\n[Debugger]\nHeld. Restarts:\n"), "{code} is not held:\n{text}");
    text
}

#[track_caller]
fn restart(server: &mut Server, restart: impl Into<Value>) -> String {
    good(server, "invoke-restart", json!({"restart": restart.into()}))
}

#[track_caller]
fn restart_with(server: &mut Server, restart: impl Into<Value>, values: &str) -> String {
    good(server, "invoke-restart", json!({"restart": restart.into(), "values": values}))
}

#[track_caller]
fn in_frame(server: &mut Server, frame: u64, code: &str) -> String {
    good(server, "eval-in-frame", json!({"frame": frame, "code": code}))
}

#[track_caller]
fn nothing_is_held(server: &mut Server) {
    assert_eq!(bad(server, "frame-locals", json!({"frame": 0})), NOTHING_HELD);
}

/// The number of the frame whose line in the report begins with this call.
#[track_caller]
fn frame_of(report: &str, call: &str) -> u64 {
    let line = report.lines().find_map(|line| {
        let (number, rest) = line.split_once(": ")?;
        rest.starts_with(call).then(|| number.parse().ok()).flatten()
    });
    line.unwrap_or_else(|| panic!("no frame {call} in\n{report}"))
}

// ---- Held

#[test]
fn the_report_ends_with_the_restarts_and_the_tools() {
    let mut server = Server::ready();
    let code = "(restart-case (error \"boo\") (first-way () :report \"Go the first way\" 1) (second-way (x) x))";
    let report = hold(&mut server, code);
    assert!(report.starts_with("[ERROR] SIMPLE-ERROR\nboo\n\n[Backtrace]\n0: (ERROR "), "{report}");
    let expected = format!(
        "\n\n[Debugger]\nHeld. Restarts:\n  1. FIRST-WAY - Go the first way\n  2. SECOND-WAY - SECOND-WAY\n  \
         3. RETRY - Evaluate this form again.\n  4. ABORT - Return to top level.\n{TOOLS}"
    );
    assert!(report.ends_with(&expected), "{report}");
    // Numbered alike wherever they are shown.
    let restarts = expected.split_once("Restarts:").unwrap().1.split_once("\nTools").unwrap().0;
    assert!(last_error(&mut server).contains(&format!("Available Restarts:{restarts}\n\n")));
    let backtrace = good(&mut server, "get-backtrace", json!({}));
    for line in report.split_once("[Backtrace]\n").unwrap().1.split_once("\n\n").unwrap().0.lines() {
        assert!(backtrace.contains(&format!("\n  {line}")), "{line}\n{backtrace}");
    }
    assert_eq!(restart(&mut server, 1), "=> 1");
    nothing_is_held(&mut server);
    assert!(server.finish().status.success());
}

#[test]
fn only_on_error_debug_holds() {
    let mut server = Server::ready();
    for arguments in [json!({"code": "(error \"x\")"}), json!({"code": "(error \"x\")", "on-error": "abort"})] {
        let text = bad(&mut server, "evaluate-lisp", arguments);
        assert!(!text.contains("[Debugger]"), "{text}");
        nothing_is_held(&mut server);
    }
    let text = bad(&mut server, "evaluate-lisp", json!({"code": "1", "on-error": "explode"}));
    assert!(text.contains("on-error must be one of abort, debug, ask"), "{text}");
    // Nor does what handles its own errors, or only signals.
    for (code, value) in [
        ("(handler-case (error \"x\") (error () :handled))", "=> :HANDLED"),
        ("(progn (signal \"x\") :done)", "=> :DONE"),
        ("(nth-value 0 (ignore-errors (error \"x\")))", "=> NIL"),
    ] {
        assert_eq!(good(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"})), value);
    }
}

#[test]
fn cancels_and_exhausted_stacks_and_heaps_are_never_held() {
    let mut server = Server::start_with(&["--heap", "512M"]);
    server.initialize("2025-06-18");
    let code = "(defun deep (n) (+ 1 (deep n))) (deep 1)";
    let text = bad(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    assert!(text.contains("[ERROR] SB-KERNEL::CONTROL-STACK-EXHAUSTED\n"), "{text}");
    assert!(!text.contains("[Debugger]"), "{text}");
    nothing_is_held(&mut server);

    let code = "(let ((all '())) (loop (push (make-array 100000) all)))";
    let text = bad(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    assert!(text.contains("[ERROR] HEAP-EXHAUSTED\n") && !text.contains("[Debugger]"), "{text}");
    nothing_is_held(&mut server);

    server.evaluate("(defvar *runs* nil)");
    let id = server.post_call("evaluate-lisp", json!({"code": "(setf *runs* t) (loop)", "on-error": "debug"}));
    while !good(&mut server, "list-definitions", json!({"type": "variables"})).contains("*RUNS* = T") {}
    server.notify("notifications/cancelled", json!({"requestId": id}));
    nothing_is_held(&mut server);
    assert!(last_error(&mut server).starts_with("Error: CANCELLED\n"));
    server.goes_on();
}

#[test]
fn every_kind_of_error_is_held() {
    let mut server = Server::ready();
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
        assert_eq!(good(&mut server, "abort-evaluation", json!({})), "Evaluation aborted.");
    }
    server.goes_on();
}

#[test]
fn an_unknown_package_is_held_with_the_two_restarts() {
    let mut server = Server::ready();
    let text = bad(&mut server, "evaluate-lisp", json!({"code": "1", "package": "NOPE", "on-error": "debug"}));
    assert!(text.contains("Restarts:\n  1. RETRY - Evaluate this form again.\n  2. ABORT - "), "{text}");
    good(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(make-package \"NOPE\")"}));
    let text = good(&mut server, "invoke-restart", json!({"restart": "RETRY"}));
    assert_eq!(text, "=> 1");
}

// ---- Restarts

#[test]
fn an_undefined_function_is_defined_and_called_again() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun price (item) (* 2 (base-price item)))\n(defun total (items) (reduce #'+ (mapcar #'price items)))",
    );
    let report = hold(&mut server, "(total (list :tea 5))");
    assert!(report.contains("[ERROR] UNDEFINED-FUNCTION\n"), "{report}");
    assert!(report.contains("\n0: (BASE-PRICE :TEA)\n1: (PRICE :TEA)\n"), "{report}");
    assert!(report.contains("\n  1. CONTINUE - Retry calling BASE-PRICE.\n"), "{report}");
    // What was it called with?
    let locals = good(&mut server, "frame-locals", json!({"frame": 1}));
    assert_eq!(locals, "ITEM = :TEA");
    assert_eq!(in_frame(&mut server, 1, "(list item)"), "=> (:TEA)");
    // Frame 0 has no variables: its code is evaluated globally, which is said.
    let text = in_frame(&mut server, 0, "(defun base-price (item) (if (eq item :tea) 10 item))");
    let said = "[notice]\nThe frame has no variables that SBCL knows of: the code was evaluated globally.\n\n";
    assert_eq!(text, format!("{said}=> BASE-PRICE"));
    assert_eq!(restart(&mut server, "CONTINUE"), "=> 30");
    assert_eq!(last_error(&mut server), NO_ERROR);
    nothing_is_held(&mut server);
}

#[test]
fn code_in_a_frame_without_variables_is_said_to_be_evaluated_globally() {
    let mut server = Server::ready();
    let said = "[notice]\nThe frame has no variables that SBCL knows of: the code was evaluated globally.\n\n=> 3";
    let report = hold(&mut server, "(defun none () (/ 1 0)) (defun some-are (x) (list (none) x)) (some-are 1)");
    let frames = report.split_once("[Backtrace]\n").unwrap().1.split_once("\n\n").unwrap().0;
    for (number, frame) in (0..).zip(frames.lines()) {
        let own = frame.contains("(SOME-ARE 1)") && !frame.contains("EVAL");
        let answer = in_frame(&mut server, number, "(+ 1 2)");
        assert_eq!(answer, if own { "=> 3" } else { said }, "{frame}");
    }
    assert!(frames.lines().count() >= 6, "{frames}");
}

#[test]
fn an_undefined_function_is_defined_and_the_form_evaluated_again() {
    let mut server = Server::ready();
    server.evaluate("(defvar *log* '())\n(defun area (r) (push r *log*) (* 2 (factor r)))");
    let report = hold(&mut server, "(push :before *log*)\n(+ 1 (area 5))");
    let frame = frame_of(&report, "(AREA 5)");
    assert_eq!(in_frame(&mut server, frame, "(defun factor (r) (declare (ignore r)) 10)"), "=> FACTOR");
    assert_eq!(restart(&mut server, "retry"), "=> 21");
    // The failing form alone was evaluated again.
    assert_eq!(server.evaluate("*log*"), "=> (5 5 :BEFORE)");
}

#[test]
fn retry_and_abort_are_among_the_restarts_of_any_number() {
    let mut server = Server::ready();
    for count in [97, 98, 99, 10_000] {
        let code = format!(
            "(labels ((f (n) (if (zerop n) (error \"deep\") (restart-case (f (1- n)) (foo () 1))))) (f {count}))"
        );
        let report = bad(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"}));
        let own = format!(
            "\n  {}. RETRY - Evaluate this form again.\n  {}. ABORT - Return to top level.\n",
            count + 1,
            count + 2
        );
        for text in [report, last_error(&mut server)] {
            assert!(text.contains(&own), "{text}");
            let omitted = count - 98;
            assert_eq!(text.contains(&format!("\n  [... {omitted} more restarts omitted]")), omitted > 0, "{text}");
            assert_eq!(text.contains("\n  98. FOO - FOO\n"), count >= 98, "{text}");
        }
        let text = bad(&mut server, "invoke-restart", json!({"restart": "no-such"}));
        assert!(text.ends_with(&format!(" FOO, {} RETRY, {} ABORT.", count + 1, count + 2)), "{text}");
        good(&mut server, "invoke-restart", json!({"restart": count + 2}));
    }
    // There is little room: they are the last to go.
    good(&mut server, "configure-limits", json!({"max-answer": 6_000}));
    let text = fail(
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

#[test]
fn restarts_take_values() {
    let mut server = Server::ready();
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
        // The compiler's complaint about the missing function comes with the end of the evaluation.
        let answer = text.rsplit_once("\n\n").map_or(&*text, |(_, last)| last);
        assert_eq!(answer, expected, "{code} {name} {values}:\n{text}");
        nothing_is_held(&mut server);
    }
    assert_eq!(server.evaluate("*stored-variable*"), "=> 2");
}

#[test]
fn an_unbound_slot_is_filled() {
    let mut server = Server::ready();
    server.evaluate("(defclass point () ((x :accessor x)))\n(defvar *p* (make-instance 'point))");
    hold(&mut server, "(list (x *p*) (x *p*))");
    assert_eq!(restart_with(&mut server, "STORE-VALUE", "(+ 3 4)"), "=> (7 7)");
    assert_eq!(server.evaluate("(slot-value *p* 'x)"), "=> 7");
    server.evaluate("(slot-makunbound *p* 'x)");
    hold(&mut server, "(x *p*)");
    assert_eq!(restart_with(&mut server, "USE-VALUE", "8"), "=> 8");
    assert_eq!(server.evaluate("(slot-boundp *p* 'x)"), "=> NIL");
    // Or the slot is filled by hand, and the form evaluated again.
    hold(&mut server, "(1+ (x *p*))");
    assert!(in_frame(&mut server, 0, "(setf (x *p*) 1)").ends_with("=> 1"));
    assert_eq!(restart(&mut server, "RETRY"), "=> 2");
}

#[test]
fn a_missing_slot_is_added_to_the_class() {
    let mut server = Server::ready();
    server.evaluate("(defclass thing () ())\n(defvar *t* (make-instance 'thing))");
    let report = hold(&mut server, "(slot-value *t* 'size)");
    assert!(report.contains("[ERROR] SB-PCL::MISSING-SLOT\n"), "{report}");
    in_frame(&mut server, 0, "(defclass thing () ((size :initform 9)))");
    assert_eq!(restart(&mut server, "RETRY"), "=> 9");
}

#[test]
fn an_assertion_without_places_goes_on_when_it_holds() {
    let mut server = Server::ready();
    server.evaluate("(defvar *ready* nil)");
    hold(&mut server, "(assert *ready*)\n:asserted");
    let again = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(again.contains("[ERROR] SIMPLE-ERROR\n") && again.contains("[Debugger]\nHeld."), "{again}");
    in_frame(&mut server, 0, "(setf *ready* t)");
    assert_eq!(restart(&mut server, "CONTINUE"), "=> :ASSERTED");
}

#[test]
fn an_assertion_with_places_takes_their_new_values() {
    let mut server = Server::ready();
    let one = "(let ((n 1)) (assert (= n 2) (n) \"n is ~A\" n) n)";
    hold(&mut server, one);
    // SBCL's own prompt asks, and gets the values for an answer.
    let asked = "[stdout]\nThe old value of N is 1.\nDo you want to supply a new value?  (y or n) \n\
                 Type a form to be evaluated:\n\n=> 2";
    assert_eq!(restart_with(&mut server, "CONTINUE", "2"), asked);
    hold(&mut server, one);
    let still = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "3"}));
    assert!(still.contains("\nn is 3\n"), "{still}");
    // Without a new value the place keeps the one it has.
    let still = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(still.contains("\nn is 3\n") && still.ends_with(TOOLS), "{still}");
    let failed = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "(car 1)"}));
    assert!(failed.starts_with("[notice]\n`values` failed: ") && failed.contains("[ERROR] TYPE-ERROR\n"), "{failed}");
    let many = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "2 3"}));
    let said = "The restart CONTINUE takes up to 1 value; 2 were given: give them in `values`, as Lisp expressions.";
    assert_eq!(many, said);
    assert!(restart_with(&mut server, "CONTINUE", "(1+ 1)").ends_with("\n\n=> 2"));

    let two = "(let ((a 1) (b (list 2))) (assert (and (eql a 5) (eql (car b) 6)) (a (car b))) (list a b))";
    hold(&mut server, two);
    let still = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "5"}));
    assert!(still.contains("\nThe assertion "), "{still}");
    assert!(restart_with(&mut server, "CONTINUE", "5 6").ends_with("\n\n=> (5 (6))"));
    hold(&mut server, "(let ((n 1)) (assert (null n) (n)) :null)");
    assert!(restart_with(&mut server, "CONTINUE", "nil").ends_with("\n\n=> :NULL"));
    // Each value is evaluated once, and any object will do.
    server.evaluate("(defvar *evaluated* 0)");
    hold(&mut server, "(let ((f nil)) (assert (functionp f) (f)) (funcall f))");
    let values = "(let ((n (incf *evaluated*))) (lambda () n))";
    assert!(restart_with(&mut server, "CONTINUE", values).ends_with("\n\n=> 1"));
    // A place that prints with commas, blanks and full stops is one.
    hold(
        &mut server,
        "(let ((h (make-hash-table :test 'equal))) (assert (gethash \"a, b.\" h) ((gethash \"a, b.\" h))) :set)",
    );
    let many = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "1 2"}));
    assert!(many.starts_with("The restart CONTINUE takes up to 1 value; 2 were given"), "{many}");
    assert!(restart_with(&mut server, "CONTINUE", "1").ends_with("\n\n=> :SET"));
    hold(&mut server, "(assert (= 1 2))");
    let text = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "1"}));
    assert_eq!(text, "The restart CONTINUE takes no values; 1 was given.");
}

#[test]
fn an_assertion_that_nobody_holds_still_asks() {
    let mut server = Server::ready();
    let asks = "(handler-bind ((simple-error #'continue)) (let ((n 1)) (assert (= n 2) (n)) n))";
    let text = bad(&mut server, "evaluate-lisp", json!({"code": asks}));
    assert!(text.contains("[ERROR] END-OF-FILE\n"), "{text}");
    // A stream of the code's own is asked as it would be by SBCL.
    let own = "(let ((n 1) (*query-io* (make-two-way-stream (make-string-input-stream \"y 2\") *standard-output*))) \
               (assert (= n 2) (n)) n)";
    hold(&mut server, own);
    assert!(restart_with(&mut server, "CONTINUE", "7").ends_with("\n\n=> 2"));
    // Nor do the values that one got reach the next.
    hold(&mut server, &format!("(let ((n 1)) (assert (= n 2) (n)) (list n {asks}))"));
    let text = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "2"}));
    assert!(text.contains("[ERROR] END-OF-FILE\n"), "{text}");
}

#[test]
fn the_next_error_is_held_again() {
    let mut server = Server::ready();
    let code = "(format t \"before~%\")\n(list (restart-case (error \"one\") (use-it (x) x))\n \
                (progn (format t \"between~%\") (restart-case (error \"two\") (use-it (x) x))))";
    let first = hold(&mut server, code);
    assert!(first.starts_with("[stdout]\nbefore\n\n[ERROR] SIMPLE-ERROR\none\n"), "{first}");
    let second = bad(&mut server, "invoke-restart", json!({"restart": "use-it", "values": "1"}));
    assert!(second.starts_with("[stdout]\nbetween\n\n[ERROR] SIMPLE-ERROR\ntwo\n"), "{second}");
    assert!(second.ends_with(TOOLS), "{second}");
    assert!(last_error(&mut server).starts_with("Error: SIMPLE-ERROR\n  two\n"));
    assert_eq!(restart_with(&mut server, "use-it", "2"), "=> (1 2)");
    assert_eq!(last_error(&mut server), NO_ERROR);
    assert_eq!(good(&mut server, "error-history", json!({})).lines().count(), 2);
}

#[test]
fn the_next_error_knows_its_form() {
    let mut server = Server::ready();
    hold(&mut server, ":first\n\n(progn (cerror \"go\" \"one\")\n  (error \"two\"))");
    assert!(last_error(&mut server).contains("\nForm: 2 (line 3): (progn (cerror \"go\" \"one\")\n"));
    bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    let text = last_error(&mut server);
    assert!(text.contains("\nForm: 2 (line 3): (progn (cerror \"go\" \"one\")\n"), "{text}");
}

#[test]
fn failing_values_of_a_restart_leave_it_held() {
    let mut server = Server::ready();
    hold(&mut server, "(restart-case (error \"held\") (take (x) x))");
    let before = last_error(&mut server);
    for (values, kind) in [("(/ 1 0)", "DIVISION-BY-ZERO"), ("(list 1", "END-OF-FILE")] {
        let text = bad(&mut server, "invoke-restart", json!({"restart": "take", "values": values}));
        let said = "[notice]\n`values` failed: the restart was not invoked, and the evaluation is still held.\n\n";
        assert!(text.starts_with(&format!("{said}[ERROR] {kind}\n")), "{text}");
    }
    assert_eq!(last_error(&mut server), before);
    assert_eq!(good(&mut server, "error-history", json!({})).lines().count(), 3);
    assert_eq!(restart_with(&mut server, "take", ":taken"), "=> :TAKEN");
}

#[test]
fn a_restart_that_returns_leaves_it_held() {
    let mut server = Server::ready();
    server.evaluate("(defvar *called* 0)");
    hold(&mut server, "(restart-bind ((count-me (lambda () (incf *called*)))) (error \"x\"))");
    let said = "[notice]\nThe restart returned: the evaluation is still held.\n\n; No values";
    assert_eq!(restart(&mut server, "count-me"), said);
    assert!(in_frame(&mut server, 0, "*called*").ends_with("=> 1"));
    good(&mut server, "abort-evaluation", json!({}));
}

#[test]
fn a_restart_without_its_values_is_refused_and_stays() {
    let mut server = Server::ready();
    let give = ": give them in `values`, as Lisp expressions.";
    let takes = |what: &str| format!("The restart {what}");
    for (code, name, refusals, values, expected) in [
        (
            "(+ 1 *no-such-variable*)",
            "use-value",
            vec![("", "USE-VALUE takes 1 value"), ("1 2", "USE-VALUE takes 1 value; 2 were given")],
            "41",
            "=> 42",
        ),
        (
            "(let ((x 5)) (check-type x string) x)",
            "store-value",
            vec![("", "STORE-VALUE takes 1 value")],
            "\"a\"",
            "=> \"a\"",
        ),
        ("(no-such-function 1)", "return-value", vec![("; none", "RETURN-VALUE takes values")], ":back", "=> :BACK"),
        ("(restart-case (error \"x\") (take (x) x))", "take", vec![("", "TAKE takes 1 value")], "1", "=> 1"),
        (
            "(block b (restart-bind ((pair (lambda (a &optional b) (return-from b (list a b))))) (error \"x\")))",
            "pair",
            vec![("", "PAIR takes 1 to 2 values"), ("1 2 3", "PAIR takes 1 to 2 values; 3 were given")],
            "1",
            "=> (1 NIL)",
        ),
        (
            "(block b (restart-bind ((some (lambda (a &rest more) (return-from b (list a more))))) (error \"x\")))",
            "some",
            vec![("", "SOME takes at least 1 value")],
            "1 2",
            "=> (1 (2))",
        ),
    ] {
        hold(&mut server, code);
        let before = last_error(&mut server);
        for (values, said) in refusals {
            let text = bad(&mut server, "invoke-restart", json!({"restart": name, "values": values}));
            assert_eq!(text, takes(said) + give, "{code} {values}");
        }
        assert_eq!(last_error(&mut server), before);
        let text = restart_with(&mut server, name, values);
        assert!(text.ends_with(expected), "{code}: {text}");
    }
    let interpreted = "(restart-case (error \"x\") (take (x) x))";
    server.evaluate(&format!("(defun interpreted () (let ((*evaluator-mode* :interpret)) (eval '{interpreted})))"));
    hold(&mut server, "(interpreted)");
    let text = bad(&mut server, "invoke-restart", json!({"restart": "TAKE"}));
    assert_eq!(text, format!("The restart TAKE takes 1 value{give}"));
    assert_eq!(restart_with(&mut server, "TAKE", "1"), "=> 1");
    hold(&mut server, "(cerror \"go\" \"x\")");
    let text = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE", "values": "1"}));
    assert_eq!(text, "The restart CONTINUE takes no values; 1 was given.");
    assert_eq!(restart(&mut server, "CONTINUE"), "=> NIL");
}

#[test]
fn a_restart_that_asks_nobody_finds_its_own_values() {
    let mut server = Server::ready();
    let code =
        |interactive: &str| format!("(restart-case (error \"x\") (take (x) :interactive (lambda () {interactive}) x))");
    hold(&mut server, &code("(list 5)"));
    assert_eq!(restart(&mut server, "take"), "=> 5");
    hold(&mut server, &code("(list 5)"));
    assert_eq!(restart_with(&mut server, "take", "6"), "=> 6");
    for interactive in ["(list (read *query-io*))", "(error \"not me\")", "7", "(list 1 2)", "(read-line)"] {
        hold(&mut server, &code(interactive));
        let text = bad(&mut server, "invoke-restart", json!({"restart": "take"}));
        assert!(text.starts_with("The restart TAKE takes 1 value"), "{interactive}: {text}");
        assert_eq!(restart_with(&mut server, "take", "6"), "=> 6");
    }
}

#[test]
fn the_evaluation_goes_on_with_its_own_handlers() {
    let mut server = Server::ready();
    let code = "(handler-case (progn (sb-int:with-float-traps-masked () (break \"here\")) (error \"later\")) \
                (error (c) (format nil \"handled: ~A\" c)))";
    hold(&mut server, code);
    assert_eq!(restart(&mut server, "CONTINUE"), "=> \"handled: later\"");
}

// ---- Frames

#[test]
fn locals_of_a_frame() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun outer (a) (let ((sum (+ a 1))) (list sum (inner sum))))\n\
         (defun inner (b) (declare (optimize debug)) (let ((text \"x\")) (cerror \"go\" \"here\") (list b text)))",
    );
    let report = hold(&mut server, "(outer 1)");
    let (inner, outer) = (frame_of(&report, "(INNER 2)"), frame_of(&report, "(OUTER 1)"));
    assert_eq!(good(&mut server, "frame-locals", json!({"frame": inner})), "B = 2\nTEXT = \"x\"");
    let locals = good(&mut server, "frame-locals", json!({"frame": outer}));
    assert!(locals.contains("A = ") && locals.contains("SUM = 2"), "{locals}");
    let shown = good(&mut server, "get-backtrace", json!({"locals": true}));
    assert!(shown.contains("(INNER 2)\n     at evaluation 1, line 2: "), "{shown}");
    assert!(shown.contains("\n     B = 2\n     TEXT = \"x\"\n"), "{shown}");
    good(&mut server, "abort-evaluation", json!({}));
}

#[test]
fn locals_that_do_not_print_leave_it_held() {
    let mut server = Server::ready();
    server.evaluate(
        "(defclass endless () ()) (defmethod print-object ((object endless) stream) (loop))\n\
         (defun f (x) (declare (optimize debug)) (cerror \"go\" \"held\") (error \"now ~A\" (type-of x)))",
    );
    let report = hold(&mut server, "(f 1)");
    let frame = frame_of(&report, "(F 1)");
    in_frame(&mut server, frame, "(setf x (make-instance 'endless)) 1");
    good(&mut server, "configure-limits", json!({"timeout": 0.3}));
    let text = bad(&mut server, "frame-locals", json!({"frame": frame}));
    assert!(text.starts_with("Printing the local variables did not end within the time limit"), "{text}");
    in_frame(&mut server, frame, "(setf x 2)");
    assert_eq!(good(&mut server, "frame-locals", json!({"frame": frame})), "X = 2");
    in_frame(&mut server, frame, "(setf x :symbol)");
    let next = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(next.contains("[ERROR] SIMPLE-ERROR\nnow KEYWORD\n") && next.ends_with(TOOLS), "{next}");
}

#[test]
fn locals_have_names() {
    let mut server = Server::ready();
    hold(&mut server, "(error \"x ~A\" 1)");
    let locals = good(&mut server, "frame-locals", json!({"frame": 0}));
    assert!(!locals.contains("||"), "{locals}");
}

#[test]
fn code_in_a_frame_sees_and_changes_its_locals() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun work (x) (declare (optimize debug))\n  (let ((y (* 2 x))) (cerror \"go\" \"stop\") (list x y)))",
    );
    let report = hold(&mut server, "(work 21)");
    let frame = frame_of(&report, "(WORK 21)");
    let text = in_frame(&mut server, frame, "(format t \"x is ~A~%\" x) (values (+ x y) :second)");
    assert_eq!(text, "[stdout]\nx is 21\n\n=> 63\n=> :SECOND");
    assert_eq!(in_frame(&mut server, frame, "(setf y :changed)"), "=> :CHANGED");
    assert_eq!(in_frame(&mut server, frame, "; nothing"), "; No values");
    let locals = good(&mut server, "frame-locals", json!({"frame": frame}));
    assert_eq!(locals, "X = 21\nY = :CHANGED");
    let warned = in_frame(&mut server, frame, "(warn \"careful\") x");
    assert_eq!(warned, "[warnings]\nSIMPLE-WARNING: careful\n\n=> 21");
    assert_eq!(restart(&mut server, "CONTINUE"), "=> (21 :CHANGED)");
}

#[test]
fn an_error_in_a_frame_does_not_lose_the_held_one() {
    let mut server = Server::ready();
    server.evaluate("(defun work (x) (declare (optimize debug)) (cerror \"go\" \"the held one\") x)");
    let report = hold(&mut server, "(work 5)");
    let frame = frame_of(&report, "(WORK 5)");
    let before = (last_error(&mut server), good(&mut server, "get-backtrace", json!({"locals": true})));
    assert!(before.0.contains("\nId: E1\n"), "{}", before.0);
    for (code, kind) in [
        ("(car x)", "TYPE-ERROR"),
        ("(error \"inside\")", "SIMPLE-ERROR"),
        ("(no-such-function x)", "UNDEFINED-FUNCTION"),
        ("(list x", "END-OF-FILE"),
        ("(throw 'nowhere 1)", "SB-INT:SIMPLE-CONTROL-ERROR"),
    ] {
        let text = bad(&mut server, "eval-in-frame", json!({"frame": frame, "code": code}));
        assert!(text.contains(&format!("[ERROR] {kind}\n")), "{code}: {text}");
        assert!(!text.contains("[Debugger]"), "{text}");
        let after = (last_error(&mut server), good(&mut server, "get-backtrace", json!({"locals": true})));
        assert_eq!(after, before, "{code}");
    }
    let history = good(&mut server, "error-history", json!({}));
    assert_eq!(history.lines().count(), 6, "{history}");
    assert!(history.starts_with("E6 "), "{history}");
    let inside = good(&mut server, "describe-last-error", json!({"error-id": "E3"}));
    assert!(inside.starts_with("Error: SIMPLE-ERROR\n  inside\n"), "{inside}");
    assert_eq!(in_frame(&mut server, frame, "x"), "=> 5");
    assert_eq!(restart(&mut server, "CONTINUE"), "=> 5");
    assert_eq!(last_error(&mut server), NO_ERROR);
}

#[test]
fn a_frame_returns_other_values() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun inner (x) (declare (optimize debug)) (error \"bad ~A\" x))\n\
         (defun mid (x) (declare (optimize debug)) (multiple-value-list (inner x)))",
    );
    let report = hold(&mut server, "(list :got (mid 3))");
    let frame = frame_of(&report, "(INNER 3)");
    let failed = bad(&mut server, "return-from-frame", json!({"frame": frame, "code": "(/ x 0)"}));
    let said = "[notice]\nThe code failed: the frame did not return, and the evaluation is still held.\n\n";
    assert!(failed.starts_with(&format!("{said}[ERROR] DIVISION-BY-ZERO\n")), "{failed}");
    let refused = bad(&mut server, "return-from-frame", json!({"frame": 0, "code": "1"}));
    assert!(refused.contains("cannot unwind to frame 0"), "{refused}");
    let text = good(&mut server, "return-from-frame", json!({"frame": frame, "code": "(values (* x 10) :two)"}));
    assert_eq!(text, "=> (:GOT (30 :TWO))");
    assert_eq!(last_error(&mut server), NO_ERROR);
}

#[test]
fn a_frame_is_called_again_after_a_redefinition() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun inner (x) (declare (optimize debug)) (error \"bad ~A\" x))\n\
         (defun mid (x) (declare (optimize debug)) (list :mid (inner x)))",
    );
    let report = hold(&mut server, "(mid 3)");
    let frame = frame_of(&report, "(INNER 3)");
    in_frame(&mut server, frame, "(defun inner (x) (list :fixed x))");
    assert_eq!(good(&mut server, "restart-frame", json!({"frame": frame})), "=> (:MID (:FIXED 3))");
    // Called again without having been changed, it fails again.
    server.evaluate("(defun inner (x) (declare (optimize debug)) (error \"again ~A\" x))");
    let report = hold(&mut server, "(mid 4)");
    let again = bad(&mut server, "restart-frame", json!({"frame": frame_of(&report, "(INNER 4)")}));
    assert!(again.contains("\nagain 4\n") && again.contains("[Debugger]\nHeld."), "{again}");
}

/// The report of an evaluation that fails in the frame of this call, which is then called again after the repair.
#[track_caller]
fn called_again(server: &mut Server, code: &str, call: &str, repair: &str) -> String {
    let report = hold(server, code);
    let frame = frame_of(&report, call);
    if !repair.is_empty() {
        in_frame(server, frame, repair);
    }
    server.call_tool("restart-frame", json!({"frame": frame})).0
}

#[test]
fn methods_are_called_again() {
    let mut server = Server::ready();
    server.evaluate(
        "(defgeneric area (x))
         (defmethod area :around ((x integer)) (list :around (call-next-method)))
         (defmethod area ((x number)) (list :number x (next-method-p)))
         (defmethod area ((x integer)) (error \"no area of ~a\" x))
         (defclass point () ((x :initarg :x :accessor x)))
         (defgeneric (setf place) (value point))
         (defmethod (setf place) (value (p point)) (if (eql value 1) (error \"not 1\") (setf (slot-value p 'x) value)))
         (defmethod initialize-instance :after ((p point) &key x) (if (eql x 5) (error \"~a not 5\" p)))
         (defgeneric kind (x) (:method ((x (eql :a))) (error \"no kind of ~a\" x)))
         (defgeneric all (x) (:method-combination list))
         (defmethod all list ((x integer)) (error \"not ~a\" x))
         (defmethod all list ((x number)) :number)
         (defvar *seen* '())",
    );
    // The innermost method of several, redefined so that it needs the next one, which it did not before.
    let repair = "(defmethod area ((x integer)) (list :integer x (call-next-method)))";
    let text = called_again(&mut server, "(list (area 3))", "((:METHOD AREA (INTEGER)) 3)", repair);
    assert_eq!(text, "=> ((:AROUND (:INTEGER 3 (:NUMBER 3 NIL))))");
    // An outer one calls what is next by now.
    server.evaluate("(defmethod area ((x integer)) (error \"no area of ~a\" x))");
    let repair = "(defmethod area ((x integer)) (* x x))";
    let text = called_again(&mut server, "(list (area 3))", "((:METHOD AREA :AROUND (INTEGER)) 3)", repair);
    assert_eq!(text, "=> ((:AROUND 9))");
    // Methods beside the primary ones.
    server.evaluate("(defmethod area :after ((x integer)) (error \"after ~a\" x))");
    let repair = "(defmethod area :after ((x integer)) (push x *seen*))";
    let text = called_again(&mut server, "(list (area 3) *seen*)", "((:METHOD AREA :AFTER (INTEGER)) 3)", repair);
    assert_eq!(text, "=> ((:AROUND 9) (3))");
    let (code, repair) = (
        "(let ((p (make-instance 'point))) (list (setf (place p) 1) (x p)))",
        "(defmethod (setf place) (value (p point)) (setf (slot-value p 'x) (list value)))",
    );
    assert_eq!(called_again(&mut server, code, "((:METHOD (SETF PLACE) (T POINT)) 1 ", repair), "=> (#1=(1) #1#)");
    let repair = "(defmethod initialize-instance :after ((p point) &key x) (setf (x p) (list :after x)))";
    let code = "(x (make-instance 'point :x 5))";
    let text = called_again(&mut server, code, "((:METHOD INITIALIZE-INSTANCE :AFTER (POINT))", repair);
    assert_eq!(text, "=> (:AFTER 5)");
    let repair = "(defmethod kind ((x (eql :a))) (list :kind x))";
    assert_eq!(
        called_again(&mut server, "(list (kind :a))", "((:METHOD KIND ((EQL :A))) :A)", repair),
        "=> ((:KIND :A))"
    );
    let repair = "(defmethod all list ((x integer)) :integer)";
    assert_eq!(
        called_again(&mut server, "(all 1)", "((:METHOD ALL LIST (INTEGER)) 1)", repair),
        "=> (:INTEGER :NUMBER)"
    );
    // Without a repair it fails again, in the same frames.
    server.evaluate("(defmethod kind ((x (eql :a))) (error \"no kind of ~a\" x))");
    let again = called_again(&mut server, "(list (kind :a))", "((:METHOD KIND ((EQL :A))) :A)", "");
    assert!(again.contains("\n1: ((:METHOD KIND ((EQL :A))) :A)\n") && again.ends_with(TOOLS), "{again}");
    // A method that is no more.
    let frame = frame_of(&again, "((:METHOD KIND ((EQL :A))) :A)");
    in_frame(&mut server, frame, "(remove-method #'kind (find-method #'kind '() '((eql :a))))");
    let text = bad(&mut server, "restart-frame", json!({"frame": frame}));
    let said = "Frame 1 cannot be called again: (SB-PCL::FAST-METHOD KIND ((EQL :A))) is no method of its generic function any more.";
    assert_eq!(text, said);
    let text = good(&mut server, "return-from-frame", json!({"frame": frame, "code": "(list :instead x)"}));
    assert_eq!(text, "=> ((:INSTEAD :A))");
}

#[test]
fn a_method_of_another_combination_is_not_called_again() {
    let mut server = Server::ready();
    server.evaluate(
        "(define-method-combination each () ((methods ()))
           `(list ,@(mapcar (lambda (method) `(call-method ,method)) methods)))
         (defgeneric parts (x) (:method-combination each))
         (defmethod parts ((x integer)) (error \"not ~a\" x))",
    );
    let text = called_again(&mut server, "(parts 1)", "((:METHOD PARTS (INTEGER)) 1)", "");
    let said = "Frame 1 cannot be called again: what comes next to (SB-PCL::FAST-METHOD PARTS (INTEGER)) in its method \
                combination is not known.";
    assert_eq!(text, said);
}

#[test]
fn closures_are_called_again_with_what_they_close_over() {
    let mut server = Server::ready();
    server.evaluate("(defun call (f &rest arguments) (list (apply f arguments)))\n(defvar *calls* 0)");
    for (code, call, expected) in [
        (
            "(let ((n 0)) (list (call (lambda (x) (if (< (incf n) 2) (error \"x\") (list x n))) 5) n))",
            "((LAMBDA (X)) 5)",
            "=> (((5 2)) 2)",
        ),
        // It closes over nothing.
        (
            "(call (lambda (x) (if (< (incf *calls*) 2) (error \"x\") (list :called x))) 5)",
            "((LAMBDA (X)) 5)",
            "=> ((:CALLED 5))",
        ),
        (
            "(sort (list 2 1) (lambda (a b) (if (< (incf *calls*) 2) (error \"x\") (< a b))))",
            "((LAMBDA (A B))",
            "=> (1 2)",
        ),
        (
            "(let ((n 0)) (call (lambda (&optional (x 2 x-p) &key y) (if (< (incf n) 2) (error \"x\") (list n x x-p y)))))",
            "((LAMBDA (&OPTIONAL",
            "=> ((2 2 NIL NIL))",
        ),
        // Each has its own.
        (
            "(loop for i below 2 collect (let ((m i)) (call (lambda () (if (< (incf *calls*) 2) (error \"x\") m)))))",
            "((LAMBDA ()))",
            "=> ((0) (1))",
        ),
        (
            "(let ((x 1)) (flet ((f (y) (incf x) (if (< x 3) (error \"x\") (list x y)))) (list (call #'f :y) x)))",
            "((FLET F) :Y)",
            "=> (((3 :Y)) 3)",
        ),
        (
            "(let ((x 1)) (flet ((f (y) (incf x) (if (< x 3) (error \"x\") (list x y)))) \
             (declare (dynamic-extent #'f)) (list (call #'f :y) x)))",
            "((FLET F) :Y)",
            "=> (((3 :Y)) 3)",
        ),
        // A function with a name may close over something as well.
        (
            "(let ((n 0)) (defun counter (x) (if (< (incf n) 2) (error \"x\") (list n x)))) (counter 1)",
            "(COUNTER 1)",
            "=> (2 1)",
        ),
    ] {
        server.evaluate("(setf *calls* 0)");
        assert_eq!(called_again(&mut server, code, call, ""), expected, "{code}");
        nothing_is_held(&mut server);
    }
}

#[test]
fn a_frame_is_called_again_with_what_was_supplied() {
    let mut server = Server::ready();
    server.evaluate("(defvar *calls* 0)");
    let fail = "(if (< (incf *calls*) 2) (error \"x\"))";
    server.evaluate(&format!(
        "(defun o (a &optional (b 1 b-p) (c 2 c-p)) {fail} (list a b b-p c c-p))
         (defun k (a &key (b 1 b-p) (c 2)) {fail} (list a b b-p c))
         (defun r (a &rest more &key (b 1 b-p) &allow-other-keys) {fail} (list a b b-p more))
         (defmethod m (a &optional (b 1 b-p) &key (c 2 c-p)) {fail} (list a b b-p c c-p))
         (defun init (a &optional (b (progn {fail} 5))) (list a b))"
    ));
    for (code, call, expected) in [
        ("(o 1)", "(O 1", "=> (1 1 NIL 2 NIL)"),
        ("(o 1 2)", "(O 1 2", "=> (1 2 T 2 NIL)"),
        ("(o 1 2 3)", "(O 1 2 3)", "=> (1 2 T 3 T)"),
        ("(k 1 :c 4)", "(K 1", "=> (1 1 NIL 4)"),
        ("(k 1 :b 4)", "(K 1", "=> (1 4 T 2)"),
        ("(r 1 :z 4 :b 3)", "(R 1", "=> (1 3 T (:Z 4 :B 3))"),
        ("(r 1)", "(R 1", "=> (1 1 NIL NIL)"),
        ("(m 1)", "((:METHOD M (T)) 1", "=> (1 1 NIL 2 NIL)"),
        ("(m 1 3 :c 3)", "((:METHOD M (T)) 1", "=> (1 3 T 3 T)"),
        ("(init 1)", "(INIT 1", "=> (1 5)"),
    ] {
        server.evaluate("(setf *calls* 0)");
        assert_eq!(called_again(&mut server, code, call, ""), expected, "{code}");
    }
    // What the function made no use of is not kept.
    server.evaluate("(defun unused (a b) (declare (ignore b)) (if (< (incf *calls*) 2) (error \"x\") (list a)))");
    server.evaluate("(setf *calls* 0)");
    assert_eq!(called_again(&mut server, "(unused 1 2)", "(UNUSED 1", ""), "=> (1)");
    server.evaluate("(setf *calls* 0)");
    let text = called_again(&mut server, "(unused 1 2)", "(UNUSED 1", "(defun unused (a b) (list a b))");
    assert_eq!(text, "Frame 1 cannot be called again: SBCL no longer has all the arguments of UNUSED.");
}

#[test]
fn specials_and_cleanup_forms_come_out_right() {
    let mut server = Server::ready();
    server.evaluate(
        "(defvar *depth* 0)\n(defvar *log* '())\n(defvar *calls* 0)
         (defun call (f) (list (funcall f) *depth*))
         (defun inner ()
           (let ((*depth* (1+ *depth*)))
             (unwind-protect (if (< (incf *calls*) 2) (error \"x\") *depth*) (push (list :cleaned *depth*) *log*))))",
    );
    let code = "(let ((*depth* 5)) (list (call #'inner) (catch 'out (throw 'out *depth*))))";
    assert_eq!(called_again(&mut server, code, "(INNER)", ""), "=> ((6 5) 5)");
    assert_eq!(server.evaluate("(list *depth* *log*)"), "=> (0 ((:CLEANED 6) (:CLEANED 6)))");
    server.evaluate("(setf *calls* 0 *log* '())");
    let report = hold(&mut server, code);
    let arguments = json!({"frame": frame_of(&report, "(INNER)"), "code": "(list :instead *depth*)"});
    assert_eq!(good(&mut server, "return-from-frame", arguments), "=> (((:INSTEAD 6) 5) 5)");
    assert_eq!(server.evaluate("(list *depth* *log*)"), "=> (0 ((:CLEANED 6)))");
}

#[test]
fn a_local_function_called_by_its_own_code_is_left_alone() {
    let mut server = Server::ready();
    // The code after the call was never made: the compiler knows that G does not return.
    server.evaluate("(defun outer (x) (flet ((g (y) (error \"~a ~a\" x y))) (list (g 1))))");
    let report = hold(&mut server, "(list (outer 2))");
    let frame = frame_of(&report, "((FLET G :IN OUTER)");
    let said = format!(
        "SBCL cannot unwind to frame {frame}: it is a local function that its own code calls directly, and that code \
         relies on all that the compiler found out about it. The next one out to which it can is {}.",
        frame + 1
    );
    assert_eq!(bad(&mut server, "restart-frame", json!({"frame": frame})), said);
    let arguments = json!({"frame": frame, "code": "(values 1 2)"});
    assert_eq!(bad(&mut server, "return-from-frame", arguments), said);
    let outer = frame_of(&report, "(OUTER 2)");
    assert_eq!(outer, frame + 1);
    assert_eq!(good(&mut server, "return-from-frame", json!({"frame": outer, "code": "(list x)"})), "=> ((2))");
    // A global function that calls itself is called by its name.
    server.evaluate("(defvar *fails* t)\n(defun count-down (n) (if (zerop n) (if *fails* (error \"x\") :zero) (list (count-down (1- n)))))");
    let text = called_again(&mut server, "(count-down 2)", "(COUNT-DOWN 1)", "(setf *fails* nil)");
    assert_eq!(text, "=> ((:ZERO))");
}

#[test]
fn what_a_function_is_declaimed_to_return_is_kept_to() {
    let mut server = Server::ready();
    server.evaluate(
        "(declaim (ftype (function (t) fixnum) index))
         (defun index (x) (if x (error \"x\") 1))
         (defun element (v) (declare (optimize (speed 3) (safety 0)) (simple-vector v)) (svref v (index v)))",
    );
    let report = hold(&mut server, "(element (vector 1 2 3))");
    let frame = frame_of(&report, "(INDEX");
    let said = format!("Frame {frame} cannot return this: its function is declaimed to return something else.");
    for code in ["\"two\"", "(values)", "2.5"] {
        assert_eq!(bad(&mut server, "return-from-frame", json!({"frame": frame, "code": code})), said);
    }
    assert_eq!(good(&mut server, "return-from-frame", json!({"frame": frame, "code": "2"})), "=> 3");
}

#[test]
fn frames_of_compiled_files_are_called_again_or_say_why_not() {
    let mut server = Server::ready();
    let path = std::env::temp_dir().join(format!("sbcl-debugger-{}.lisp", std::process::id()));
    let source = "
        (defvar *fails* t)
        (defun by-default (x) (list (if *fails* (error \"x\") :fine) x))
        (defmethod by-method ((x integer)) (list (if *fails* (error \"x\") :fine) x))
        (defun call (f x) (list (funcall f x)))
        (defun makes-closure () (let ((n 0)) (lambda (x) (incf n) (list (error \"x\") n x))))
        (defun without (x) (declare (optimize (debug 0))) (list (by-default x) x))";
    std::fs::write(&path, source).expect("written");
    let load = format!("(load (compile-file {:?}))", path.to_str().expect("UTF-8"));
    server.evaluate(&load);
    let text = called_again(&mut server, "(by-default 1)", "(BY-DEFAULT 1)", "(setf *fails* nil)");
    assert_eq!(text, "=> (:FINE 1)");
    server.evaluate("(setf *fails* t)");
    let text = called_again(&mut server, "(by-method 1)", "((:METHOD BY-METHOD (INTEGER)) 1)", "(setf *fails* nil)");
    assert_eq!(text, "=> (:FINE 1)");
    let text = called_again(&mut server, "(call (makes-closure) 1)", "((LAMBDA (X) :IN MAKES-CLOSURE)", "");
    let said = "Frame 1 cannot be called again: (LAMBDA (X) :IN MAKES-CLOSURE) has no global name, and only code that was \
                sent to evaluate-lisp keeps the function object it was called as.";
    assert_eq!(text, said);
    assert_eq!(good(&mut server, "return-from-frame", json!({"frame": 1, "code": "7"})), "=> (7)");
    server.evaluate("(setf *fails* t)");
    let text = called_again(&mut server, "(list (without 1))", "(WITHOUT", "");
    let said = "SBCL cannot unwind to frame 2: its code was compiled without what that needs: with (declaim (optimize (debug \
                2))), and its definition loaded again, it has it.";
    assert!(text.starts_with(said), "{text}");
    for kind in ["lisp", "fasl"] {
        std::fs::remove_file(path.with_extension(kind)).expect("removed");
    }
}

#[test]
fn a_backtrace_through_local_calls_takes_nothing_for_a_closure() {
    let mut server = Server::ready();
    let code = "(let ((x 0)) (labels ((f (n) (incf x) (if (zerop n) (sb-debug:list-backtrace) (values (f (1- n)))))) \
                (funcall (first (list #'f)) 5)))";
    for _ in 0..20 {
        good(&mut server, "evaluate-lisp", json!({"code": format!("(progn {code} (gc) :listed)")}));
    }
    server.goes_on();
}

// ---- Time limits

/// Evaluates code that must run into its time limit and be held; the report.
#[track_caller]
fn hold_overdue(server: &mut Server, code: &str) -> String {
    let arguments = json!({"code": code, "on-error": "debug", "timeout": 0.3});
    let report = bad(server, "evaluate-lisp", arguments);
    assert!(report.contains("[ERROR] TIMEOUT\n") && report.ends_with(TOOLS), "{code} is not held:\n{report}");
    report
}

#[test]
fn a_timeout_is_held_and_goes_on_where_it_was() {
    let mut server = Server::ready();
    server.evaluate(
        "(defvar *stop* nil)\n(defvar *cleaned* 0)
         (defun wait (argument)
           (unwind-protect (let ((*print-base* 2)) (loop until *stop*) (list argument *print-base*)) (incf *cleaned*)))",
    );
    let report = hold_overdue(&mut server, "(list :waited (wait :here))");
    let restarts = "\n[Debugger]\nHeld. Restarts:\n  1. CONTINUE - Go on.\n  2. RETRY - Evaluate this form again.\n  \
                    3. ABORT - Return to top level.\n";
    assert!(report.contains(restarts), "{report}");
    let frame = frame_of(&report, "(WAIT :HERE)");
    assert!(last_error(&mut server).starts_with("Error: TIMEOUT\n"));
    assert!(good(&mut server, "frame-locals", json!({"frame": frame})).contains("ARGUMENT = :HERE"));
    assert_eq!(in_frame(&mut server, frame, "(list argument *cleaned*)"), "=> (:HERE 0)");
    // With a new time limit, the one that it had.
    let again = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(again.contains("time limit of 0.3 seconds") && again.ends_with(TOOLS), "{again}");
    assert!(in_frame(&mut server, frame_of(&again, "(WAIT :HERE)"), "(setf *stop* t)").ends_with("=> T"));
    assert_eq!(restart(&mut server, "CONTINUE"), "=> (:WAITED (:HERE 2))");
    assert_eq!(last_error(&mut server), NO_ERROR);
    assert_eq!(server.evaluate("*cleaned*"), "=> 1");
    nothing_is_held(&mut server);

    // The form again.
    server.evaluate("(setf *stop* nil)");
    hold_overdue(&mut server, "(setf *cleaned* 0)\n(wait 1)");
    in_frame(&mut server, 0, "(setf *stop* t)");
    assert_eq!(restart(&mut server, "RETRY"), "=> (1 2)");
    assert_eq!(server.evaluate("*cleaned*"), "=> 2");
    // Given up, by any way.
    server.evaluate("(setf *stop* nil *cleaned* 0)");
    hold_overdue(&mut server, "(wait 1)");
    assert_eq!(good(&mut server, "abort-evaluation", json!({})), "Evaluation aborted.");
    hold_overdue(&mut server, "(wait 1)");
    assert_eq!(restart(&mut server, "ABORT"), "Evaluation aborted.");
    hold_overdue(&mut server, "(wait 1)");
    assert_eq!(server.evaluate("*cleaned*"), format!("{RELEASED}=> 3"));
}

#[test]
fn frames_of_what_timed_out_return_and_are_called_again() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun spin (x) (loop (when (eq x :stop) (return x))))\n(defun around (x) (list (spin x) *print-base*))",
    );
    for (call, expected) in [("(SPIN 1)", "=> ((:BACK 10))"), ("(AROUND 1)", "=> (:BACK)")] {
        let report = hold_overdue(&mut server, "(list (let ((*print-base* 10)) (around 1)))");
        let frame = frame_of(&report, call);
        let text = good(&mut server, "return-from-frame", json!({"frame": frame, "code": ":back"}));
        assert_eq!(text, expected, "{report}");
    }
    for call in ["(SPIN 1)", "(AROUND 1)"] {
        server.evaluate("(defun spin (x) (loop (when (eq x :stop) (return x))))");
        let report = hold_overdue(&mut server, "(list (around 1))");
        let frame = frame_of(&report, call);
        in_frame(&mut server, frame, "(defun spin (x) (list :new x))");
        assert_eq!(good(&mut server, "restart-frame", json!({"frame": frame})), "=> (((:NEW 1) 10))");
    }
}

#[test]
fn what_waits_is_held_and_waits_on() {
    let mut server = Server::ready();
    server.evaluate("(defvar *semaphore* (sb-thread:make-semaphore))");
    for code in [
        "(progn (sleep 1) :slept)",
        "(progn (sb-ext:run-program \"/bin/sleep\" '(\"1\")) :slept)",
        "(progn (sb-thread:join-thread (sb-thread:make-thread (lambda () (sleep 1)))) :slept)",
    ] {
        hold_overdue(&mut server, code);
        let mut text = String::new();
        for _ in 0..100 {
            text = server.call_tool("invoke-restart", json!({"restart": "CONTINUE"})).0;
            if !text.contains("[ERROR] TIMEOUT") {
                break;
            }
        }
        assert_eq!(text, "=> :SLEPT", "{code}");
    }
    hold_overdue(&mut server, "(progn (sb-thread:wait-on-semaphore *semaphore*) :woken)");
    in_frame(&mut server, 0, "(sb-thread:signal-semaphore *semaphore*)");
    assert_eq!(restart(&mut server, "CONTINUE"), "=> :WOKEN");
}

#[test]
fn a_timeout_where_nothing_can_be_held_is_a_failure() {
    let mut server = Server::ready();
    // Foreign code may hold locks of its own.
    let usleep = "(alien-funcall (extern-alien \"usleep\" (function int unsigned)) 5000000)";
    server.evaluate(&format!("(use-package :sb-alien) (defun foreign () {usleep})"));
    for code in [usleep, "(foreign)"] {
        let arguments = json!({"code": code, "on-error": "debug", "timeout": 0.3});
        let text = bad(&mut server, "evaluate-lisp", arguments);
        assert!(text.starts_with("[ERROR] TIMEOUT\n") && !text.contains("[Debugger]"), "{text}");
        nothing_is_held(&mut server);
    }
    // While a value is printed, there is no form to go on with.
    server.evaluate("(defclass endless () ()) (defmethod print-object ((object endless) stream) (loop))");
    let code = "(make-instance 'endless)";
    let text = server.call_tool("evaluate-lisp", json!({"code": code, "on-error": "debug", "timeout": 0.3})).0;
    assert!(text.contains("[ERROR] TIMEOUT\n") && !text.contains("[Debugger]"), "{text}");
    nothing_is_held(&mut server);
    // Code without interrupts is held when it has them again, however often it was interrupted meanwhile.
    let code = "(let ((end (+ (get-internal-real-time) (* 3/2 internal-time-units-per-second))))
                  (sb-sys:without-interrupts (loop until (> (get-internal-real-time) end)))
                  :done)";
    hold_overdue(&mut server, code);
    good(&mut server, "configure-limits", json!({"timeout": 30}));
    assert_eq!(restart(&mut server, "CONTINUE"), "=> :DONE");
    server.goes_on();
}

#[test]
fn code_in_a_frame_has_a_time_limit_of_its_own() {
    let mut server = Server::ready();
    hold(&mut server, "(progn (cerror \"go\" \"x\") :went-on)");
    let before = last_error(&mut server);
    let text = bad(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(loop)", "timeout": 0.2}));
    assert!(text.contains("[ERROR] TIMEOUT\n") && text.contains("time limit of 0.2 seconds"), "{text}");
    assert!(!text.contains("[Debugger]"), "{text}");
    assert_eq!(last_error(&mut server), before);
    good(&mut server, "configure-limits", json!({"timeout": 0.2}));
    let slow = json!({"frame": 0, "code": "(progn (sleep 0.5) 1)", "timeout": 10});
    assert!(good(&mut server, "eval-in-frame", slow).ends_with("=> 1"));
    let text = bad(&mut server, "eval-in-frame", json!({"frame": 0, "code": "1", "timeout": -1}));
    assert!(text.contains("timeout must be a number of seconds from 0 (for none) to 86400, not -1"), "{text}");
    assert_eq!(restart(&mut server, "CONTINUE"), "=> :WENT-ON");
}

#[test]
fn what_is_printed_inside_a_held_evaluation_is_in_the_answer_that_it_belongs_to() {
    let mut server = Server::ready();
    hold(&mut server, "(progn (cerror \"go\" \"x\") 1)");
    let text = good(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(princ :o1) (princ :o2)"}));
    assert!(text.contains("[stdout]\nO1O2\n"), "{text}");
    assert_eq!(restart(&mut server, "CONTINUE"), "=> 1");
}

#[test]
fn what_cleanup_forms_print_and_fail_with_on_release_is_told() {
    let mut server = Server::ready();
    hold(&mut server, "(unwind-protect (unwind-protect (error \"x\") (princ :cleaned)) (error \"in cleanup\"))");
    let failed = error_id(&mut server);
    good(&mut server, "abort-evaluation", json!({}));
    let history = good(&mut server, "error-history", json!({}));
    assert!(history.lines().next().is_some_and(|line| line.contains("in cleanup")), "{history}");
    let text = server.evaluate("1");
    let expected = format!("[notice]\nE{} reached the debugger before: SIMPLE-ERROR. ", failed + 1);
    assert!(text.starts_with(&expected) && text.contains("[background]\nCLEANED\n"), "{text}");
}

/// The number of the last error.
fn error_id(server: &mut Server) -> u64 {
    let text = last_error(server);
    text.lines().find_map(|line| line.strip_prefix("Id: E")).expect("an identifier").parse().expect("a number")
}

// ---- The end of a hold

#[test]
fn aborting_runs_the_cleanup_forms() {
    let mut server = Server::ready();
    server.evaluate("(defvar *cleaned* nil)");
    hold(&mut server, "(unwind-protect (error \"x\") (setf *cleaned* :yes))\n(setf *cleaned* :wrong)");
    let before = last_error(&mut server);
    assert!(in_frame(&mut server, 0, "*cleaned*").ends_with("=> NIL"));
    assert_eq!(good(&mut server, "abort-evaluation", json!({})), "Evaluation aborted.");
    assert_eq!(last_error(&mut server), before, "aborting leaves the error state alone");
    nothing_is_held(&mut server);
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
}

#[test]
fn the_restart_abort_releases() {
    let mut server = Server::ready();
    server.evaluate("(defvar *cleaned* nil)");
    hold(&mut server, "(unwind-protect (error \"x\") (setf *cleaned* :yes))");
    let before = last_error(&mut server);
    assert_eq!(restart(&mut server, "ABORT"), "Evaluation aborted.");
    assert_eq!(last_error(&mut server), before, "aborting leaves the error state alone");
    assert_eq!(good(&mut server, "error-history", json!({})).lines().count(), 1);
    nothing_is_held(&mut server);
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
    // One of the user's is a restart like any other.
    hold(&mut server, "(list (restart-case (error \"x\") (abort () :mine)))");
    assert_eq!(restart(&mut server, "ABORT"), "=> (:MINE)");
    // Cleanup forms that fail, or do not end, are not held again.
    hold(&mut server, "(unwind-protect (error \"x\") (error \"y\"))");
    assert_eq!(restart(&mut server, "ABORT"), "Evaluation aborted.");
    nothing_is_held(&mut server);
    hold(&mut server, "(unwind-protect (error \"x\") (loop))");
    assert_eq!(restart(&mut server, "ABORT"), "Evaluation aborted.");
    nothing_is_held(&mut server);
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
}

#[test]
fn a_new_evaluation_releases_and_says_so() {
    let mut server = Server::ready();
    server.evaluate("(defvar *cleaned* nil)");
    hold(&mut server, "(unwind-protect (error \"x\") (setf *cleaned* :yes))");
    assert_eq!(server.evaluate("*cleaned*"), format!("{RELEASED}=> :YES"));
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
    nothing_is_held(&mut server);
    // One that is held in its turn.
    hold(&mut server, "(error \"first\")");
    let second = hold(&mut server, "(error \"second\")");
    assert!(second.starts_with(&format!("{RELEASED}[ERROR] SIMPLE-ERROR\nsecond\n")), "{second}");
    good(&mut server, "abort-evaluation", json!({}));
}

#[test]
fn inspections_and_limits_do_not_release() {
    let mut server = Server::ready();
    hold(&mut server, "(cerror \"go\" \"x\")");
    for (tool, arguments) in [
        ("describe-last-error", json!({})),
        ("get-backtrace", json!({})),
        ("error-history", json!({})),
        ("list-definitions", json!({})),
        ("describe-symbol", json!({"name": "car"})),
        ("configure-limits", json!({"timeout": 20})),
    ] {
        good(&mut server, tool, arguments);
    }
    assert_eq!(restart(&mut server, "CONTINUE"), "=> NIL");
}

#[test]
fn a_reset_releases() {
    let mut server = Server::ready();
    hold(&mut server, "(error \"x\")");
    let reset = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";
    let text = good(&mut server, "reset-session", json!({}));
    assert_eq!(text, format!("{RELEASED}{reset}"));
    nothing_is_held(&mut server);
    assert_eq!(last_error(&mut server), NO_ERROR);
    assert_eq!(server.evaluate("2"), "=> 2");
    assert_eq!(good(&mut server, "reset-session", json!({})), reset);
    assert_eq!(server.evaluate("3"), "=> 3");
    server.goes_on();
}

#[test]
fn a_hold_ends_after_its_time() {
    let mut server = Server::start_with(&["--hold", "0.5"]);
    server.initialize("2025-06-18");
    hold(&mut server, "(error \"x\")");
    // A question about what is held would have it held for longer.
    while good(&mut server, "evaluation", json!({})).contains("held") {
        std::thread::yield_now();
    }
    nothing_is_held(&mut server);
    let text = server.evaluate("1");
    let said = "[notice]\nThe evaluation that was held for debugging has been released: its time was up.\n\n=> 1";
    assert_eq!(text, said);
}

#[test]
fn releasing_is_bounded_when_cleanup_forms_loop() {
    let mut server = Server::ready();
    server.evaluate("(defvar *kept* :here)");
    hold(&mut server, "(unwind-protect (error \"x\") (loop))");
    let begin = Instant::now();
    good(&mut server, "abort-evaluation", json!({}));
    hold(&mut server, "(unwind-protect (error \"x\") (loop))");
    assert_eq!(server.evaluate("*kept*"), format!("{RELEASED}=> :HERE"));
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[test]
fn time_limits_do_not_run_while_held_and_begin_anew() {
    let mut server = Server::ready();
    good(&mut server, "configure-limits", json!({"timeout": 1}));
    hold(&mut server, "(progn (sleep 0.6) (cerror \"go\" \"x\") (sleep 0.6) :done)");
    // The time itself is what is tested, here and below.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(restart(&mut server, "CONTINUE"), "=> :DONE");
    hold(&mut server, "(progn (cerror \"go\" \"x\") (loop))");
    let text = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(text.starts_with("[ERROR] TIMEOUT\n") && text.ends_with(TOOLS), "{text}");
    good(&mut server, "abort-evaluation", json!({}));
    // What is evaluated in a frame has its own, and the rest stays held.
    hold(&mut server, "(cerror \"go\" \"x\")");
    let text = bad(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(loop)"}));
    assert!(text.contains("[ERROR] TIMEOUT\n"), "{text}");
    assert_eq!(restart(&mut server, "CONTINUE"), "=> NIL");
    server.goes_on();
}

#[test]
fn what_goes_on_has_its_own_time_limit() {
    let mut server = Server::ready();
    let held = |server: &mut Server, code: &str, timeout: f64| {
        let arguments = json!({"code": code, "on-error": "debug", "timeout": timeout});
        assert!(bad(server, "evaluate-lisp", arguments).ends_with(TOOLS));
    };
    held(&mut server, "(progn (cerror \"go\" \"x\") (loop))", 0.5);
    let text = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(text.contains("did not finish within its time limit of 0.5 seconds"), "{text}");

    good(&mut server, "configure-limits", json!({"timeout": 0.5}));
    server.evaluate("(defun f () (declare (optimize debug)) (cerror \"go\" \"x\") :f)");
    let slow = "(progn (f) (sleep 1) (cerror \"go\" \"y\") (sleep 1) :done)";
    held(&mut server, slow, 10.0);
    // What is evaluated in a frame is an evaluation of its own.
    let text = bad(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(loop)"}));
    assert!(text.contains("did not finish within its time limit of 0.5 seconds"), "{text}");
    assert!(bad(&mut server, "return-from-frame", json!({"frame": 1, "code": "1"})).contains("\ny\n"));
    assert_eq!(restart(&mut server, "CONTINUE"), "=> :DONE");
    // No limit at all, and one that was the session's when it began.
    held(&mut server, slow, 0.0);
    assert!(bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"})).contains("\ny\n"));
    assert_eq!(restart(&mut server, "CONTINUE"), "=> :DONE");
    hold(&mut server, "(progn (cerror \"go\" \"x\") (loop))");
    good(&mut server, "configure-limits", json!({"timeout": 60}));
    let text = bad(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(text.contains("did not finish within its time limit of 0.5 seconds"), "{text}");
}

#[test]
fn timers_and_handlers_cannot_end_a_hold() {
    let mut server = Server::ready();
    for code in [
        // Its handler would unwind.
        "(handler-case (sb-ext:with-timeout 0.3 (cerror \"go\" \"held\") :went-on) (sb-ext:timeout () :timed-out))",
        // Its handler would throw.
        "(catch 'out (handler-bind ((sb-ext:timeout (lambda (c) (declare (ignore c)) (throw 'out :thrown))))\n \
         (sb-ext:with-timeout 0.3 (cerror \"go\" \"held\") :went-on)))",
        // It has no handler.
        "(sb-ext:with-timeout 0.3 (cerror \"go\" \"held\") :went-on)",
        "(sb-sys:with-deadline (:seconds 0.3) (cerror \"go\" \"held\") :went-on)",
        "(handler-bind ((error (lambda (c) (unless (search \"held\" (princ-to-string c)) (abort)))))\n  \
         (cerror \"go\" \"held\") :went-on)",
    ] {
        hold(&mut server, code);
        std::thread::sleep(Duration::from_millis(600));
        assert!(in_frame(&mut server, 0, "(+ 20 22)").ends_with("=> 42"), "{code}");
        let inside = bad(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(error \"inside\")"}));
        assert!(inside.contains("[ERROR] SIMPLE-ERROR\ninside\n"), "{code}: {inside}");
        assert_eq!(restart(&mut server, "CONTINUE"), "=> :WENT-ON", "{code}");
    }
}

#[test]
fn timers_in_the_held_thread_cannot_end_a_hold() {
    let mut server = Server::ready();
    for does in ["(error \"from the timer\")", "(throw 'out :thrown)", "(abort)", "(sb-thread:abort-thread)"] {
        let code = format!(
            "(catch 'out (let ((timer (sb-ext:make-timer (lambda () {does}) :thread sb-thread:*current-thread*)))\n  \
             (sb-ext:schedule-timer timer 0.3) (cerror \"go\" \"held\") :went-on))"
        );
        hold(&mut server, &code);
        std::thread::sleep(Duration::from_millis(600));
        assert!(in_frame(&mut server, 0, "(+ 20 22)").ends_with("=> 42"), "{code}");
        assert_eq!(restart(&mut server, "CONTINUE"), "=> :WENT-ON", "{code}");
    }
}

#[test]
fn cancelling_what_goes_on_stops_it() {
    let mut server = Server::ready();
    hold(&mut server, "(progn (cerror \"go\" \"x\") (loop))");
    let id = server.post_call("invoke-restart", json!({"restart": "CONTINUE"}));
    while !good(&mut server, "evaluation", json!({})).contains("running for") {
        std::thread::yield_now();
    }
    server.notify("notifications/cancelled", json!({"requestId": id}));
    server.goes_on();
    nothing_is_held(&mut server);
}

#[test]
fn giving_up_never_ends_what_runs() {
    let mut server = Server::ready();
    let running = server.post_call("evaluate-lisp", json!({"code": "(progn (sleep 0.5) :ran)", "on-error": "debug"}));
    assert_eq!(bad(&mut server, "abort-evaluation", json!({})), NOTHING_HELD);
    assert_eq!(server.outcome(running), ("=> :RAN".to_owned(), false));
}

#[test]
fn what_code_in_a_frame_defines_is_kept_as_that_code() {
    let mut server = Server::ready();
    hold(&mut server, "(progn (cerror \"go\" \"x\") (sb-sys:without-interrupts (loop)))");
    in_frame(&mut server, 1, "(defvar *kept* 7) (setf *kept* 8)\n(defun kept () (list :kept *kept*))");
    good(&mut server, "configure-limits", json!({"timeout": 0.3}));
    in_frame(&mut server, 1, "(+ 1 2)");
    let lost = "(sb-sys:without-interrupts (loop))";
    let text = bad(&mut server, "eval-in-frame", json!({"frame": 1, "code": lost, "timeout": 0.3}));
    assert!(text.contains("The Lisp image did not react to being interrupted"), "{text}");
    assert!(text.contains("\nRestored: all 2 forms that defined something.\n"), "{text}");
    assert_eq!(server.evaluate("(kept)"), "=> (:KEPT 7)");
}

#[test]
fn no_code_finds_the_restarts_of_the_server_by_accident() {
    let mut server = Server::ready();
    for code in ["(find-restart 'retry)", "(find-restart 'continue)", "(find-restart :retry)"] {
        assert_eq!(server.evaluate(code), "=> NIL", "{code}");
    }
    let text = bad(&mut server, "evaluate-lisp", json!({"code": "(invoke-restart 'retry)"}));
    assert!(text.starts_with("[ERROR] SB-INT:SIMPLE-CONTROL-ERROR\n"), "{text}");
    // Two of the same name: the inner one by name, each by its number.
    server.evaluate("(defvar *tries* 0)");
    let code = "(incf *tries*)\n(progn (incf *tries*) (restart-case (error \"x\") (retry () :report \"Mine.\" :mine)))";
    let report = hold(&mut server, code);
    assert!(report.contains("  1. RETRY - Mine.\n  2. RETRY - Evaluate this form again.\n"), "{report}");
    assert!(bad(&mut server, "invoke-restart", json!({"restart": 2})).ends_with(TOOLS));
    assert_eq!(restart(&mut server, "RETRY"), "=> :MINE");
    assert_eq!(server.evaluate("*tries*"), "=> 3");
}

// ---- What is not there

#[test]
fn nothing_is_held_in_plain_words() {
    let mut server = Server::ready();
    for (tool, arguments) in [
        ("invoke-restart", json!({"restart": 1})),
        ("frame-locals", json!({"frame": 0})),
        ("eval-in-frame", json!({"frame": 0, "code": "1"})),
        ("return-from-frame", json!({"frame": 0, "code": "1"})),
        ("restart-frame", json!({"frame": 0})),
        ("abort-evaluation", json!({})),
    ] {
        assert_eq!(bad(&mut server, tool, arguments), NOTHING_HELD, "{tool}");
    }
    assert_eq!(last_error(&mut server), NO_ERROR);
    server.goes_on();
}

#[test]
fn what_is_not_there_is_refused_with_what_is() {
    let mut server = Server::ready();
    hold(&mut server, "(cerror \"go\" \"x\")");
    let before = last_error(&mut server);
    let there_are = "There are: 1 CONTINUE, 2 RETRY, 3 ABORT.";
    for (restart, named) in
        [(json!(7), "7"), (json!("7"), "7"), (json!("nope"), "nope"), (json!("cl:continue"), "cl:continue")]
    {
        let text = bad(&mut server, "invoke-restart", json!({"restart": restart}));
        assert_eq!(text, format!("There is no restart {named}. {there_are}"));
    }
    for tool in ["frame-locals", "eval-in-frame", "return-from-frame", "restart-frame"] {
        let mut arguments = json!({"frame": 99});
        if tool.starts_with("eval") || tool.starts_with("return") {
            arguments["code"] = json!("1");
        }
        let text = bad(&mut server, tool, arguments);
        assert!(text.starts_with("There is no frame 99. Frames are numbered from 0 to 2"), "{tool}: {text}");
    }
    for (tool, arguments, part) in [
        ("invoke-restart", json!({"restart": 0}), "restart must be a number from 1, or a name"),
        ("invoke-restart", json!({"restart": true}), "restart must be a string, not true"),
        ("invoke-restart", json!({"restart": 1, "values": [41]}), "values must be a string"),
        ("frame-locals", json!({"frame": -1}), "frame must be a frame's number, from 0"),
        ("frame-locals", json!({"frame": "none"}), "frame must be a frame's number, from 0"),
        ("eval-in-frame", json!({"frame": 1}), "eval-in-frame needs the argument code"),
        ("abort-evaluation", json!({"now": true}), "abort-evaluation has no argument"),
    ] {
        let text = bad(&mut server, tool, arguments);
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(last_error(&mut server), before);
    assert_eq!(restart(&mut server, "CONTINUE"), "=> NIL");
}

#[test]
fn markers_in_restarts_and_locals_are_escaped() {
    let mut server = Server::ready();
    server.evaluate("(defun f (trap) (declare (optimize debug)) (cerror \"go\" \"x\") trap)");
    let code = "(restart-case (f \"[Debugger]\") (go-on () :report \"[ERROR] really\" 1))";
    let report = hold(&mut server, code);
    assert!(report.contains("2. GO-ON - [ERROR\\] really\n"), "{report}");
    assert_eq!(report.matches("[Debugger]").count(), 1, "{report}");
    let shown = good(&mut server, "get-backtrace", json!({"locals": true}));
    assert!(shown.contains("TRAP = \"[Debugger\\]\""), "{shown}");
    good(&mut server, "abort-evaluation", json!({}));
}

#[test]
fn all_of_it_without_a_supervisor() {
    common::again_without_supervisor(&["what_code_in_a_frame_defines_is_kept_as_that_code"]);
}
