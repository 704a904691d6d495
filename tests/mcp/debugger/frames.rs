//! Evaluating in a frame, returning from it, and restarting it.

use super::*;

#[apply(both_modes)]
fn frame_locals_and_get_backtrace_show_the_locals_of_a_frame(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun outer (a) (let ((sum (+ a 1))) (list sum (inner sum))))\n\
         (defun inner (b) (declare (optimize debug)) (let ((text \"x\")) (cerror \"go\" \"here\") (list b text)))",
    );
    let report = hold(&mut server, "(outer 1)");
    let (inner, outer) = (frame_of(&report, "(INNER 2)"), frame_of(&report, "(OUTER 1)"));
    assert_eq!(frame_locals(&mut server, inner), "B = 2\nTEXT = \"x\"");
    let locals = frame_locals(&mut server, outer);
    assert!(locals.contains("A = ") && locals.contains("SUM = 2"), "{locals}");
    let shown = call_ok(&mut server, "get-backtrace", json!({"locals": true}));
    assert!(shown.contains("(INNER 2)\n     at evaluation 1, line 2: "), "{shown}");
    assert!(shown.contains("\n     B = 2\n     TEXT = \"x\"\n"), "{shown}");
    call_ok(&mut server, "abort-evaluation", json!({}));
}

#[apply(both_modes)]
fn local_whose_printing_never_ends_is_replaced_and_the_evaluation_stays_held(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defclass endless () ()) (defmethod print-object ((object endless) stream) (loop))\n\
         (defun f (x y) (declare (optimize debug)) (cerror \"go\" \"held\") (error \"now ~A\" (list (type-of x) y)))",
    );
    let report = hold(&mut server, "(f 1 2)");
    let frame = frame_of(&report, "(F 1 2)");
    in_frame(&mut server, frame, "(setf x (make-instance 'endless)) 1");
    assert_eq!(frame_locals(&mut server, frame), "X = #<unprintable ENDLESS: printing took too long>\nY = 2");
    // The time limit of the session may be lower than the time limit for a value.
    call_ok(&mut server, "configure-limits", json!({"timeout": 0.1}));
    let text = call_err(&mut server, "get-backtrace", json!({"from": frame, "max-frames": 1, "locals": true}));
    assert!(text.starts_with("The local variables could not be printed in time"), "{text}");
    call_ok(&mut server, "configure-limits", json!({"timeout": 30}));
    in_frame(&mut server, frame, "(setf x 3)");
    assert_eq!(frame_locals(&mut server, frame), "X = 3\nY = 2");
    in_frame(&mut server, frame, "(setf x :symbol)");
    let next = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(next.contains("[ERROR] SIMPLE-ERROR\nnow (KEYWORD 2)\n") && next.ends_with(DEBUGGER_SECTION_END), "{next}");
}

#[apply(both_modes)]
fn frame_locals_never_shows_an_empty_variable_name(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(error \"x ~A\" 1)");
    let locals = frame_locals(&mut server, 0);
    assert!(!locals.contains("||"), "{locals}");
}

/// The stack memory of a frame has other contents once the frame has ended.
#[apply(both_modes)]
fn functions_made_in_a_held_frame_do_not_access_its_variables_after_the_hold(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *made* '()) (defun stop (c) (declare (optimize debug)) (error \"stop ~a\" c) c)");
    let held = call_err(&mut server, "evaluate-lisp", json!({"code": "(stop 5)", "on-error": "debug"}));
    assert!(held.contains("1: (STOP 5)"), "{held}");
    let make = "(setf *made* (list (lambda () c) (lambda () (setf c 1)) (let ((c c)) (lambda () c))))
                (list (funcall (first *made*)) (setf c 6) (funcall (first *made*)))";
    assert_eq!(call_ok(&mut server, "eval-in-frame", json!({"frame": 1, "code": make})), "=> (5 6 6)");
    call_ok(&mut server, "abort-evaluation", json!({}));
    for code in ["(funcall (first *made*))", "(funcall (second *made*))"] {
        let failed = call_err(&mut server, "evaluate-lisp", json!({"code": code}));
        assert!(failed.contains("C is the variable of a frame that was held for debugging"), "{failed}");
    }
    assert_eq!(server.evaluate("(funcall (third *made*))"), "=> 5");
}

#[apply(both_modes)]
fn eval_in_frame_reads_and_sets_local_variables(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun work (x) (declare (optimize debug))\n  (let ((y (* 2 x))) (cerror \"go\" \"stop\") (list x y)))",
    );
    let report = hold(&mut server, "(work 21)");
    let frame = frame_of(&report, "(WORK 21)");
    let text = in_frame(&mut server, frame, "(format t \"x is ~A~%\" x) (values (+ x y) :second)");
    insta::allow_duplicates! { insta::assert_snapshot!(text, @r"
    [stdout]
    x is 21

    => 63
    => :SECOND
    "); }
    assert_eq!(in_frame(&mut server, frame, "(setf y :changed)"), "=> :CHANGED");
    assert_eq!(in_frame(&mut server, frame, "; nothing"), "; No values");
    let locals = frame_locals(&mut server, frame);
    assert_eq!(locals, "X = 21\nY = :CHANGED");
    let warned = in_frame(&mut server, frame, "(warn \"careful\") x");
    insta::allow_duplicates! { insta::assert_snapshot!(warned, @r"
    [warnings]
    SIMPLE-WARNING: careful

    => 21
    "); }
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> (21 :CHANGED)");
}

#[apply(both_modes)]
fn variables_of_one_name_are_shown_with_their_numbers(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun shade (x) (declare (optimize debug))
           (let ((x (1+ x))) (let ((x (* x 2))) (cerror \"go\" \"here\") (list x))))",
    );
    let report = hold(&mut server, "(shade 5)");
    let frame = frame_of(&report, "(SHADE 5)");
    let locals = frame_locals(&mut server, frame);
    let mut values: Vec<_> = locals.lines().filter_map(|line| line.strip_prefix("X#")?.split(" = ").nth(1)).collect();
    values.sort_unstable();
    assert_eq!(values, ["12", "5", "6"], "{locals}");
    let label = locals.lines().find_map(|line| line.strip_suffix(" = 12")).unwrap();
    let inner = format!("(sb-debug:var 'x {})", label.strip_prefix("X#").unwrap());
    let snapshot = call_ok(&mut server, "get-backtrace", json!({"error-id": "E1", "locals": true}));
    assert!(snapshot.contains(&format!("\n     {label} = 12\n")), "{snapshot}");
    // The name alone is ambiguous.
    for code in ["x", "(setf x 1)"] {
        let text = call_err(&mut server, "eval-in-frame", json!({"frame": frame, "code": code}));
        let hint = format!("\nSeveral variables of frame {frame} have the same name: X#");
        assert!(text.contains(&hint) && text.contains("(sb-debug:var 'X "), "{text}");
    }
    assert_eq!(in_frame(&mut server, frame, &inner), "=> 12");
    assert_eq!(in_frame(&mut server, frame, &format!("(setf {inner} 40)")), "=> 40");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> (40)");
}

#[apply(both_modes)]
fn unbound_variable_in_eval_in_frame_names_the_variables_of_the_frames(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun outer (a) (declare (optimize debug)) (let ((sum (+ a 1))) (list sum (inner sum))))\n\
         (defun inner (b) (declare (optimize debug)) (let ((text \"x\")) (cerror \"go\" \"here\") (list b text)))\n\
         (defun elsewhere () (symbol-value 'nowhere))",
    );
    let report = hold(&mut server, "(outer 1)");
    let (inner, outer) = (frame_of(&report, "(INNER 2)"), frame_of(&report, "(OUTER 1)"));
    let missing = "In code compiled with a debug quality below 3, variables may be missing.".to_owned();
    let others = format!("Frames with a local variable of this name: {outer}.");
    for (name, end) in [("NOWHERE", missing), ("SUM", others)] {
        let code = format!("(list b {})", name.to_lowercase());
        let text = call_err(&mut server, "eval-in-frame", json!({"frame": inner, "code": code}));
        let hint = format!(
            "\nSBCL knows no local variable {name} of frame {inner}. Local variables with values: B, TEXT. {end}\n\n\
             [Backtrace]"
        );
        assert!(text.contains("[ERROR] UNBOUND-VARIABLE\n") && text.contains(&hint), "{text}");
    }
    // The unbound variable of a called function gets no such hint.
    let text = call_err(&mut server, "eval-in-frame", json!({"frame": inner, "code": "(elsewhere)"}));
    assert!(text.contains("[ERROR] UNBOUND-VARIABLE\n") && !text.contains("SBCL knows"), "{text}");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> (2 (2 \"x\"))");
}

#[apply(both_modes)]
fn get_backtrace_shows_present_values_with_locals_and_the_snapshot_otherwise(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun outer (x) (declare (optimize debug)) (list x (inner (1+ x))))
         (defun inner (y) (declare (optimize debug)) (cerror \"go\" \"stop\") y)",
    );
    let snapshots = [json!({}), json!({"error-id": "E1"}), json!({"error-id": "E1", "locals": true})];
    let report = hold(&mut server, "(outer 1)");
    let (inner, outer) = (frame_of(&report, "(INNER 2)"), frame_of(&report, "(OUTER 1)"));
    let before = snapshots.clone().map(|arguments| call_ok(&mut server, "get-backtrace", arguments));
    assert!(before[2].contains("     Y = 2\n") && before[2].contains("     X = 1\n"), "{}", before[2]);
    in_frame(&mut server, inner, "(setf y :new)");
    in_frame(&mut server, outer, "(setf x :other)");
    let live = call_ok(&mut server, "get-backtrace", json!({"locals": true}));
    assert!(live.starts_with("Backtrace (live) for SIMPLE-ERROR ("), "{live}");
    assert!(live.contains("     Y = :NEW\n") && live.contains("     X = :OTHER\n"), "{live}");
    let one = call_ok(&mut server, "get-backtrace", json!({"locals": true, "from": outer, "max-frames": 1}));
    assert!(one.starts_with("Backtrace (live) for SIMPLE-ERROR (1 of "), "{one}");
    assert!(one.contains("     X = :OTHER\n") && !one.contains(":NEW"), "{one}");
    let none = call_ok(&mut server, "get-backtrace", json!({"locals": true, "from": 900}));
    assert!(none.ends_with("\n  (no frames from 900 on)"), "{none}");
    let after = snapshots.clone().map(|arguments| call_ok(&mut server, "get-backtrace", arguments));
    assert_eq!(after, before);
    call_ok(&mut server, "abort-evaluation", json!({}));
    let over = call_ok(&mut server, "get-backtrace", json!({"locals": true}));
    assert_eq!(over, before[2]);
}

#[apply(both_modes)]
fn error_in_eval_in_frame_keeps_the_held_error_and_its_backtrace(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defun work (x) (declare (optimize debug)) (cerror \"go\" \"the held one\") x)");
    let report = hold(&mut server, "(work 5)");
    let frame = frame_of(&report, "(WORK 5)");
    let before = (last_error(&mut server), call_ok(&mut server, "get-backtrace", json!({"locals": true})));
    assert!(before.0.contains("\nId: E1\n"), "{}", before.0);
    for (code, kind) in [
        ("(car x)", "TYPE-ERROR"),
        ("(error \"inside\")", "SIMPLE-ERROR"),
        ("(no-such-function x)", "UNDEFINED-FUNCTION"),
        ("(list x", "END-OF-FILE"),
        ("(throw 'nowhere 1)", "SB-INT:SIMPLE-CONTROL-ERROR"),
    ] {
        let text = call_err(&mut server, "eval-in-frame", json!({"frame": frame, "code": code}));
        assert!(text.contains(&format!("[ERROR] {kind}\n")), "{code}: {text}");
        assert!(!text.contains("[Debugger]"), "{text}");
        let after = (last_error(&mut server), call_ok(&mut server, "get-backtrace", json!({"locals": true})));
        assert_eq!(after, before, "{code}");
    }
    let history = call_ok(&mut server, "describe-last-error", json!({"list": 20}));
    assert_eq!(history.lines().count(), 6, "{history}");
    assert!(history.starts_with("E6 "), "{history}");
    let inside = call_ok(&mut server, "describe-last-error", json!({"error-id": "E3"}));
    assert!(inside.starts_with("Error: SIMPLE-ERROR\n  inside\n"), "{inside}");
    assert_eq!(in_frame(&mut server, frame, "x"), "=> 5");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> 5");
    assert_eq!(last_error(&mut server), NO_ERROR);
}

/// An exit out of the held evaluation fails the request with its output; the evaluation can be resumed afterwards.
#[apply(both_modes)]
fn non_local_exit_out_of_the_held_evaluation_is_stopped_and_reported(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defun work (x) (declare (optimize debug)) (restart-case (error \"no ~A\" x) (use-value (v) v)))");
    let report = hold(&mut server, "(catch 'out (list :worked (work 5)))");
    let frame = frame_of(&report, "(WORK 5)");
    for exit in ["(throw 'out 5)", "(use-value 7)", "(invoke-restart 'use-value 7)"] {
        let code = format!("(progn (princ :before) {exit})");
        let text = call_err(&mut server, "eval-in-frame", json!({"frame": frame, "code": code}));
        assert!(text.starts_with("[stdout]\nBEFORE\n\n[ERROR] ABORTED\nA non-local exit"), "{exit}: {text}");
        let status = call_ok(&mut server, "check-evaluation", json!({}));
        assert!(status.contains(": failed after ") && status.contains(exit), "{status}");
        let text = call_err(&mut server, "resume-from-frame", json!({"frame": frame, "return": exit}));
        assert!(text.starts_with("[ERROR] ABORTED\nA non-local exit"), "{exit}: {text}");
        let text = call_err(&mut server, "invoke-restart", json!({"restart": "USE-VALUE", "values": exit}));
        assert!(text.starts_with("[ERROR] ABORTED\nA non-local exit"), "{exit}: {text}");
    }
    assert_eq!(in_frame(&mut server, frame, "x"), "=> 5");
    assert_eq!(invoke_restart_with(&mut server, "USE-VALUE", "7"), "=> (:WORKED 7)");
}

#[apply(both_modes)]
fn return_from_frame_returns_the_given_values(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun inner (x) (declare (optimize debug)) (error \"bad ~A\" x))\n\
         (defun mid (x) (declare (optimize debug)) (multiple-value-list (inner x)))",
    );
    let report = hold(&mut server, "(list :got (mid 3))");
    let frame = frame_of(&report, "(INNER 3)");
    let failed = call_err(&mut server, "resume-from-frame", json!({"frame": frame, "return": "(/ x 0)"}));
    let said =
        format!("[notice]\nThe code failed: frame {frame} did not return, and the evaluation is still held.\n\n");
    assert!(failed.starts_with(&format!("{said}[ERROR] DIVISION-BY-ZERO\n")), "{failed}");
    let refused = call_err(&mut server, "resume-from-frame", json!({"frame": 0, "return": "1"}));
    assert!(refused.contains("cannot unwind to frame 0, because "), "{refused}");
    let text = call_ok(&mut server, "resume-from-frame", json!({"frame": frame, "return": "(values (* x 10) :two)"}));
    assert_eq!(text, "=> (:GOT (30 :TWO))");
    assert_eq!(last_error(&mut server), NO_ERROR);
}

#[apply(both_modes)]
fn restart_frame_calls_the_redefined_function(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun inner (x) (declare (optimize debug)) (error \"bad ~A\" x))\n\
         (defun mid (x) (declare (optimize debug)) (list :mid (inner x)))",
    );
    let report = hold(&mut server, "(mid 3)");
    let frame = frame_of(&report, "(INNER 3)");
    in_frame(&mut server, frame, "(defun inner (x) (list :fixed x))");
    assert_eq!(call_ok(&mut server, "resume-from-frame", json!({"frame": frame})), "=> (:MID (:FIXED 3))");
    // An unchanged function fails again when its frame is restarted.
    server.evaluate("(defun inner (x) (declare (optimize debug)) (error \"again ~A\" x))");
    let report = hold(&mut server, "(mid 4)");
    let again = call_err(&mut server, "resume-from-frame", json!({"frame": frame_of(&report, "(INNER 4)")}));
    assert!(again.contains("\nagain 4\n") && again.contains("[Debugger]\nHeld."), "{again}");
}

/// Evaluates `code`, which fails in the frame of `call`; evaluates `repair`, restarts the frame and returns the answer.
#[track_caller]
fn restart_frame_after_repair(server: &mut Server, code: &str, call: &str, repair: &str) -> String {
    let report = hold(server, code);
    let frame = frame_of(&report, call);
    if !repair.is_empty() {
        in_frame(server, frame, repair);
    }
    server.call_tool("resume-from-frame", json!({"frame": frame})).0
}

/// Returns the answer to a request to call the function of `frame` again that is refused for `reason`.
fn restart_refusal(frame: u64, reason: &str) -> String {
    format!(
        "The function of frame {frame} cannot be called again: {reason} To continue without the call, pass `return` \
         with code for the frame's values."
    )
}

#[apply(both_modes)]
fn restart_frame_calls_redefined_methods_of_each_qualifier(mode: Mode) {
    let mut server = mode.ready();
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
    // The innermost of the applicable methods is redefined so that it needs the next method, which it did not before.
    let repair = "(defmethod area ((x integer)) (list :integer x (call-next-method)))";
    let text = restart_frame_after_repair(&mut server, "(list (area 3))", "((:METHOD AREA (INTEGER)) 3)", repair);
    assert_eq!(text, "=> ((:AROUND (:INTEGER 3 (:NUMBER 3 NIL))))");
    // A restarted outer method calls the next method as it is defined now.
    server.evaluate("(defmethod area ((x integer)) (error \"no area of ~a\" x))");
    let repair = "(defmethod area ((x integer)) (* x x))";
    let text =
        restart_frame_after_repair(&mut server, "(list (area 3))", "((:METHOD AREA :AROUND (INTEGER)) 3)", repair);
    assert_eq!(text, "=> ((:AROUND 9))");
    // Auxiliary and SETF methods.
    server.evaluate("(defmethod area :after ((x integer)) (error \"after ~a\" x))");
    let repair = "(defmethod area :after ((x integer)) (push x *seen*))";
    let text = restart_frame_after_repair(
        &mut server,
        "(list (area 3) *seen*)",
        "((:METHOD AREA :AFTER (INTEGER)) 3)",
        repair,
    );
    assert_eq!(text, "=> ((:AROUND 9) (3))");
    let (code, repair) = (
        "(let ((p (make-instance 'point))) (list (setf (place p) 1) (x p)))",
        "(defmethod (setf place) (value (p point)) (setf (slot-value p 'x) (list value)))",
    );
    assert_eq!(
        restart_frame_after_repair(&mut server, code, "((:METHOD (SETF PLACE) (T POINT)) 1 ", repair),
        "=> (#1=(1) #1#)"
    );
    let repair = "(defmethod initialize-instance :after ((p point) &key x) (setf (x p) (list :after x)))";
    let code = "(x (make-instance 'point :x 5))";
    let text = restart_frame_after_repair(&mut server, code, "((:METHOD INITIALIZE-INSTANCE :AFTER (POINT))", repair);
    assert_eq!(text, "=> (:AFTER 5)");
    let repair = "(defmethod kind ((x (eql :a))) (list :kind x))";
    assert_eq!(
        restart_frame_after_repair(&mut server, "(list (kind :a))", "((:METHOD KIND ((EQL :A))) :A)", repair),
        "=> ((:KIND :A))"
    );
    let repair = "(defmethod all list ((x integer)) :integer)";
    assert_eq!(
        restart_frame_after_repair(&mut server, "(all 1)", "((:METHOD ALL LIST (INTEGER)) 1)", repair),
        "=> (:INTEGER :NUMBER)"
    );
    // Without a repair the call fails again, in the same frames.
    server.evaluate("(defmethod kind ((x (eql :a))) (error \"no kind of ~a\" x))");
    let again = restart_frame_after_repair(&mut server, "(list (kind :a))", "((:METHOD KIND ((EQL :A))) :A)", "");
    assert!(
        again.contains("\n1: ((:METHOD KIND ((EQL :A))) :A)\n") && again.ends_with(DEBUGGER_SECTION_END),
        "{again}"
    );
    // A removed method cannot be restarted.
    let frame = frame_of(&again, "((:METHOD KIND ((EQL :A))) :A)");
    in_frame(&mut server, frame, "(remove-method #'kind (find-method #'kind '() '((eql :a))))");
    let text = call_err(&mut server, "resume-from-frame", json!({"frame": frame}));
    assert_eq!(text, restart_refusal(frame, "(:METHOD KIND ((EQL :A))) is no longer defined."));
    let text = call_ok(&mut server, "resume-from-frame", json!({"frame": frame, "return": "(list :instead x)"}));
    assert_eq!(text, "=> ((:INSTEAD :A))");
}

#[apply(both_modes)]
fn restart_frame_refuses_methods_of_user_defined_combinations(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(define-method-combination each () ((methods ()))
           `(list ,@(mapcar (lambda (method) `(call-method ,method)) methods)))
         (defgeneric parts (x) (:method-combination each))
         (defmethod parts ((x integer)) (error \"not ~a\" x))",
    );
    let text = restart_frame_after_repair(&mut server, "(parts 1)", "((:METHOD PARTS (INTEGER)) 1)", "");
    let reason =
        "the next methods of (:METHOD PARTS (INTEGER)) cannot be determined for a long-form method combination.";
    assert_eq!(text, restart_refusal(1, reason));
}

#[apply(both_modes)]
fn restart_frame_calls_closures_with_their_closed_over_variables(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defun call (f &rest arguments) (list (apply f arguments)))\n(defvar *calls* 0)");
    for (code, call, expected) in [
        (
            "(let ((n 0)) (list (call (lambda (x) (if (< (incf n) 2) (error \"x\") (list x n))) 5) n))",
            "((LAMBDA (X)) 5)",
            "=> (((5 2)) 2)",
        ),
        // A function that closes over nothing.
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
        // Each closure has its own variable.
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
        // A named function may close over variables, too.
        (
            "(let ((n 0)) (defun counter (x) (if (< (incf n) 2) (error \"x\") (list n x)))) (counter 1)",
            "(COUNTER 1)",
            "=> (2 1)",
        ),
    ] {
        server.evaluate("(setf *calls* 0)");
        assert_eq!(restart_frame_after_repair(&mut server, code, call, ""), expected, "{code}");
        assert_nothing_held(&mut server);
    }
}

#[apply(both_modes)]
fn restart_frame_passes_the_originally_supplied_arguments(mode: Mode) {
    let mut server = mode.ready();
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
        assert_eq!(restart_frame_after_repair(&mut server, code, call, ""), expected, "{code}");
    }
    // SBCL does not keep an argument that the function ignores.
    server.evaluate("(defun unused (a b) (declare (ignore b)) (if (< (incf *calls*) 2) (error \"x\") (list a)))");
    server.evaluate("(setf *calls* 0)");
    assert_eq!(restart_frame_after_repair(&mut server, "(unused 1 2)", "(UNUSED 1", ""), "=> (1)");
    server.evaluate("(setf *calls* 0)");
    let text = restart_frame_after_repair(&mut server, "(unused 1 2)", "(UNUSED 1", "(defun unused (a b) (list a b))");
    assert_eq!(text, restart_refusal(1, "SBCL no longer has all the arguments of UNUSED."));
}

#[apply(both_modes)]
fn frame_restart_and_return_restore_specials_and_run_cleanup_forms(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defvar *depth* 0)\n(defvar *log* '())\n(defvar *calls* 0)
         (defun call (f) (list (funcall f) *depth*))
         (defun inner ()
           (let ((*depth* (1+ *depth*)))
             (unwind-protect (if (< (incf *calls*) 2) (error \"x\") *depth*) (push (list :cleaned *depth*) *log*))))",
    );
    let code = "(let ((*depth* 5)) (list (call #'inner) (catch 'out (throw 'out *depth*))))";
    assert_eq!(restart_frame_after_repair(&mut server, code, "(INNER)", ""), "=> ((6 5) 5)");
    assert_eq!(server.evaluate("(list *depth* *log*)"), "=> (0 ((:CLEANED 6) (:CLEANED 6)))");
    server.evaluate("(setf *calls* 0 *log* '())");
    let report = hold(&mut server, code);
    let arguments = json!({"frame": frame_of(&report, "(INNER)"), "return": "(list :instead *depth*)"});
    assert_eq!(call_ok(&mut server, "resume-from-frame", arguments), "=> (((:INSTEAD 6) 5) 5)");
    assert_eq!(server.evaluate("(list *depth* *log*)"), "=> (0 ((:CLEANED 6)))");
}

#[apply(both_modes)]
fn unwinding_to_a_directly_called_local_function_is_refused(mode: Mode) {
    let mut server = mode.ready();
    // There is no code after the call: the compiler knows that G does not return.
    server.evaluate("(defun outer (x) (flet ((g (y) (error \"~a ~a\" x y))) (list (g 1))))");
    let report = hold(&mut server, "(list (outer 2))");
    let frame = frame_of(&report, "((FLET G :IN OUTER)");
    let said = format!(
        "SBCL cannot unwind to frame {frame}, because the frame's function was called directly, as a local function, by \
         code that relies on the return types that the compiler derived. The next outer frame to which SBCL can \
         unwind is {}.",
        frame + 1
    );
    assert_eq!(call_err(&mut server, "resume-from-frame", json!({"frame": frame})), said);
    let arguments = json!({"frame": frame, "return": "(values 1 2)"});
    assert_eq!(call_err(&mut server, "resume-from-frame", arguments), said);
    let outer = frame_of(&report, "(OUTER 2)");
    assert_eq!(outer, frame + 1);
    assert_eq!(call_ok(&mut server, "resume-from-frame", json!({"frame": outer, "return": "(list x)"})), "=> ((2))");
    // A recursive global function calls itself by its name, so its frame can be restarted.
    server.evaluate("(defvar *fails* t)\n(defun count-down (n) (if (zerop n) (if *fails* (error \"x\") :zero) (list (count-down (1- n)))))");
    let text = restart_frame_after_repair(&mut server, "(count-down 2)", "(COUNT-DOWN 1)", "(setf *fails* nil)");
    assert_eq!(text, "=> ((:ZERO))");
}

#[apply(both_modes)]
fn return_from_frame_refuses_values_of_another_declaimed_type(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(declaim (ftype (function (t) fixnum) index))
         (defun index (x) (if x (error \"x\") 1))
         (defun element (v) (declare (optimize (speed 3) (safety 0)) (simple-vector v)) (svref v (index v)))",
    );
    let report = hold(&mut server, "(element (vector 1 2 3))");
    let frame = frame_of(&report, "(INDEX");
    let said =
        format!("Frame {frame} cannot return these values: its function is declaimed to return values of other types.");
    for code in ["\"two\"", "(values)", "2.5"] {
        assert_eq!(call_err(&mut server, "resume-from-frame", json!({"frame": frame, "return": code})), said);
    }
    assert_eq!(call_ok(&mut server, "resume-from-frame", json!({"frame": frame, "return": "2"})), "=> 3");
}

#[apply(both_modes)]
fn restart_frame_in_compiled_files_works_or_says_why_not(mode: Mode) {
    let mut server = mode.ready();
    let path = server.home().join("compiled.lisp");
    let source = "
        (defvar *fails* t)
        (defun by-default (x) (list (if *fails* (error \"x\") :fine) x))
        (defmethod by-method ((x integer)) (list (if *fails* (error \"x\") :fine) x))
        (defun call (f x) (list (funcall f x)))
        (defun makes-closure () (let ((n 0)) (lambda (x) (incf n) (list (error \"x\") n x))))
        (defun |gone~a| (x) (error \"no ~a\" x))
        (defun without (x) (declare (optimize (debug 0))) (list (by-default x) x))";
    std::fs::write(&path, source).expect("written");
    let load = format!("(load (compile-file {:?}))", path.to_str().expect("UTF-8"));
    server.evaluate(&load);
    let text = restart_frame_after_repair(&mut server, "(by-default 1)", "(BY-DEFAULT 1)", "(setf *fails* nil)");
    assert_eq!(text, "=> (:FINE 1)");
    server.evaluate("(setf *fails* t)");
    let text = restart_frame_after_repair(
        &mut server,
        "(by-method 1)",
        "((:METHOD BY-METHOD (INTEGER)) 1)",
        "(setf *fails* nil)",
    );
    assert_eq!(text, "=> (:FINE 1)");
    let text =
        restart_frame_after_repair(&mut server, "(call (makes-closure) 1)", "((LAMBDA (X) :IN MAKES-CLOSURE)", "");
    let reason = "(LAMBDA (X) :IN MAKES-CLOSURE) has no global name, and its frame does not keep the function object, \
                  unlike most frames of code that was evaluated rather than loaded.";
    assert_eq!(text, restart_refusal(1, reason));
    assert_eq!(call_ok(&mut server, "resume-from-frame", json!({"frame": 1, "return": "7"})), "=> (7)");
    let report = hold(&mut server, "(list (|gone~a| 1))");
    let frame = frame_of(&report, "(|gone~a| 1)");
    in_frame(&mut server, frame, "(fmakunbound '|gone~a|)");
    let text = call_err(&mut server, "resume-from-frame", json!({"frame": frame}));
    assert_eq!(text, restart_refusal(frame, "|gone~a| has no global definition."));
    server.evaluate("(defgeneric lost (x) (:method ((x integer)) (error \"lost ~a\" x)))");
    let repair = "(fmakunbound 'lost)";
    let text = restart_frame_after_repair(&mut server, "(list (lost 1))", "((:METHOD LOST (INTEGER)) 1)", repair);
    assert_eq!(text, restart_refusal(1, "(:METHOD LOST (INTEGER)) is no longer defined."));
    server.evaluate("(setf *fails* t)");
    let text = restart_frame_after_repair(&mut server, "(list (without 1))", "(WITHOUT", "");
    let said = "SBCL cannot unwind to frame 2, because the frame's code was compiled without the needed debug \
                information: declare (optimize (debug 3)) in its definition and reload the definition.";
    assert!(text.starts_with(said), "{text}");
    for kind in ["lisp", "fasl"] {
        std::fs::remove_file(path.with_extension(kind)).expect("removed");
    }
}

#[apply(both_modes)]
fn backtrace_through_local_calls_survives_garbage_collection(mode: Mode) {
    let mut server = mode.ready();
    let code = "(let ((x 0)) (labels ((f (n) (incf x) (if (zerop n) (sb-debug:list-backtrace) (values (f (1- n)))))) \
                (funcall (first (list #'f)) 5)))";
    for _ in 0..20 {
        call_ok(&mut server, "evaluate-lisp", json!({"code": format!("(progn {code} (gc) :listed)")}));
    }
    server.assert_works();
}
