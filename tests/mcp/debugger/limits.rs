//! Time limits and output of held evaluations.

use super::*;

/// Evaluates code that must reach its time limit and be held; returns the report.
#[track_caller]
fn hold_timed_out(server: &mut Server, code: &str) -> String {
    let arguments = json!({"code": code, "on-error": "debug", "timeout": 0.3});
    let report = call_err(server, "evaluate-lisp", arguments);
    assert!(
        report.contains("[ERROR] TIMEOUT\n") && report.ends_with(DEBUGGER_SECTION_END),
        "{code} is not held:\n{report}"
    );
    report
}

#[apply(both_modes)]
fn timed_out_evaluation_is_held_and_continue_resumes_in_place(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defvar *stop* nil)\n(defvar *cleaned* 0)
         (defun wait (argument)
           (unwind-protect (let ((*print-base* 2)) (loop until *stop*) (list argument *print-base*)) (incf *cleaned*)))",
    );
    let report = hold_timed_out(&mut server, "(list :waited (wait :here))");
    let restarts = "\n[Debugger]\nHeld. Restarts:\n  1. CONTINUE - Continue the evaluation.\n  2. RETRY - Evaluate this \
                    form again.\n  3. ABORT - Return to top level.\n";
    assert!(report.contains(restarts), "{report}");
    let frame = frame_of(&report, "(WAIT :HERE)");
    assert!(last_error(&mut server).starts_with("Error: TIMEOUT\n"));
    assert!(frame_locals(&mut server, frame).contains("ARGUMENT = :HERE"));
    assert_eq!(in_frame(&mut server, frame, "(list argument *cleaned*)"), "=> (:HERE 0)");
    // CONTINUE renews the time limit.
    let again = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(again.contains("time limit of 0.3 seconds") && again.ends_with(DEBUGGER_SECTION_END), "{again}");
    // invoke-restart has no argument `timeout`.
    assert!(report.contains("pass a larger `timeout`, or raise the default"), "{report}");
    assert!(again.contains("pass a larger `timeout` to the call that begins the evaluation, or raise"), "{again}");
    assert!(in_frame(&mut server, frame_of(&again, "(WAIT :HERE)"), "(setf *stop* t)").ends_with("=> T"));
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> (:WAITED (:HERE 2))");
    assert_eq!(last_error(&mut server), NO_ERROR);
    assert_eq!(server.evaluate("*cleaned*"), "=> 1");
    assert_nothing_held(&mut server);

    // RETRY evaluates the form again.
    server.evaluate("(setf *stop* nil)");
    hold_timed_out(&mut server, "(setf *cleaned* 0)\n(wait 1)");
    in_frame(&mut server, 0, "(setf *stop* t)");
    assert_eq!(invoke_restart(&mut server, "RETRY"), "=> (1 2)");
    assert_eq!(server.evaluate("*cleaned*"), "=> 2");
    // Releasing the evaluation in any way runs its cleanup forms.
    server.evaluate("(setf *stop* nil *cleaned* 0)");
    hold_timed_out(&mut server, "(wait 1)");
    assert_eq!(call_ok(&mut server, "abort-evaluation", json!({})), "Evaluation aborted.");
    hold_timed_out(&mut server, "(wait 1)");
    assert_eq!(invoke_restart(&mut server, "ABORT"), "Evaluation aborted.");
    hold_timed_out(&mut server, "(wait 1)");
    assert_eq!(server.evaluate("*cleaned*"), format!("{RELEASED}=> 3"));
}

#[apply(both_modes)]
fn frames_of_a_timed_out_evaluation_can_return_and_restart(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun spin (x) (loop (when (eq x :stop) (return x))))\n(defun around (x) (list (spin x) *print-base*))",
    );
    for (call, expected) in [("(SPIN 1)", "=> ((:BACK 10))"), ("(AROUND 1)", "=> (:BACK)")] {
        let report = hold_timed_out(&mut server, "(list (let ((*print-base* 10)) (around 1)))");
        let frame = frame_of(&report, call);
        let text = call_ok(&mut server, "resume-from-frame", json!({"frame": frame, "return": ":back"}));
        assert_eq!(text, expected, "{report}");
    }
    for call in ["(SPIN 1)", "(AROUND 1)"] {
        server.evaluate("(defun spin (x) (loop (when (eq x :stop) (return x))))");
        let report = hold_timed_out(&mut server, "(list (around 1))");
        let frame = frame_of(&report, call);
        in_frame(&mut server, frame, "(defun spin (x) (list :new x))");
        assert_eq!(call_ok(&mut server, "resume-from-frame", json!({"frame": frame})), "=> (((:NEW 1) 10))");
    }
}

#[apply(both_modes)]
fn timed_out_sleep_join_and_semaphore_wait_resume_with_continue(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *semaphore* (sb-thread:make-semaphore))");
    for code in [
        "(progn (sleep 1) :slept)",
        "(progn (sb-ext:run-program \"/bin/sleep\" '(\"1\")) :slept)",
        "(progn (sb-thread:join-thread (sb-thread:make-thread (lambda () (sleep 1)))) :slept)",
    ] {
        hold_timed_out(&mut server, code);
        let mut text = String::new();
        for _ in 0..100 {
            text = server.call_tool("invoke-restart", json!({"restart": "CONTINUE"})).0;
            if !text.contains("[ERROR] TIMEOUT") {
                break;
            }
        }
        assert_eq!(text, "=> :SLEPT", "{code}");
    }
    hold_timed_out(&mut server, "(progn (sb-thread:wait-on-semaphore *semaphore*) :woken)");
    in_frame(&mut server, 0, "(sb-thread:signal-semaphore *semaphore*)");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :WOKEN");
}

#[apply(both_modes)]
fn timeout_in_foreign_code_or_the_printer_is_not_held(mode: Mode) {
    let mut server = mode.ready();
    // Foreign code may hold locks of its own, so it is not held.
    let usleep = "(alien-funcall (extern-alien \"usleep\" (function int unsigned)) 5000000)";
    server.evaluate(&format!("(use-package :sb-alien) (defun foreign () {usleep})"));
    for code in [usleep, "(foreign)"] {
        let arguments = json!({"code": code, "on-error": "debug", "timeout": 0.3});
        let text = call_err(&mut server, "evaluate-lisp", arguments);
        assert!(text.starts_with("[ERROR] TIMEOUT\n") && !text.contains("[Debugger]"), "{text}");
        assert_nothing_held(&mut server);
    }
    // During the printing of a value there is no form to resume.
    server.evaluate("(defclass endless () ()) (defmethod print-object ((object endless) stream) (loop))");
    let code = "(make-instance 'endless)";
    let text = server.call_tool("evaluate-lisp", json!({"code": code, "on-error": "debug", "timeout": 0.3})).0;
    assert!(text.contains("[ERROR] TIMEOUT\n") && !text.contains("[Debugger]"), "{text}");
    assert_nothing_held(&mut server);
    // Code inside `without-interrupts` is held once it allows interrupts again, even after several interrupts.
    let code = "(let ((end (+ (get-internal-real-time) (* 3/2 internal-time-units-per-second))))
                  (sb-sys:without-interrupts (loop until (> (get-internal-real-time) end)))
                  :done)";
    hold_timed_out(&mut server, code);
    call_ok(&mut server, "configure-limits", json!({"timeout": 30}));
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :DONE");
    server.assert_works();
}

#[apply(both_modes)]
fn eval_in_frame_has_its_own_timeout(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(progn (cerror \"go\" \"x\") :went-on)");
    let before = last_error(&mut server);
    let text = call_err(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(loop)", "timeout": 0.2}));
    assert!(text.contains("[ERROR] TIMEOUT\n") && text.contains("time limit of 0.2 seconds"), "{text}");
    assert!(!text.contains("[Debugger]"), "{text}");
    assert_eq!(last_error(&mut server), before);
    call_ok(&mut server, "configure-limits", json!({"timeout": 0.2}));
    let slow = json!({"frame": 0, "code": "(progn (sleep 0.5) 1)", "timeout": 10});
    assert!(call_ok(&mut server, "eval-in-frame", slow).ends_with("=> 1"));
    let text = call_err(&mut server, "eval-in-frame", json!({"frame": 0, "code": "1", "timeout": -1}));
    assert!(text.contains("timeout must be a number of seconds from 0 (no limit) to 86400, not -1"), "{text}");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :WENT-ON");
}

#[apply(both_modes)]
fn output_of_eval_in_frame_is_in_its_own_answer(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(progn (cerror \"go\" \"x\") 1)");
    let text = call_ok(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(princ :o1) (princ :o2)"}));
    assert!(text.contains("[stdout]\nO1O2\n"), "{text}");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> 1");
}

#[apply(both_modes)]
fn output_and_errors_of_cleanup_forms_on_release_are_reported(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(unwind-protect (unwind-protect (error \"x\") (princ :cleaned)) (error \"in cleanup\"))");
    let failed = error_id(&mut server);
    call_ok(&mut server, "abort-evaluation", json!({}));
    let history = call_ok(&mut server, "describe-last-error", json!({"list": 20}));
    assert!(history.lines().next().is_some_and(|line| line.contains("in cleanup")), "{history}");
    let text = server.evaluate("1");
    let expected = format!("[notice]\nE{} reached the debugger earlier: SIMPLE-ERROR. ", failed + 1);
    assert!(text.starts_with(&expected) && text.contains("[background]\nCLEANED\n"), "{text}");
}

/// Returns the number of the last error.
fn error_id(server: &mut Server) -> u64 {
    let text = last_error(server);
    text.lines().find_map(|line| line.strip_prefix("Id: E")).expect("an identifier").parse().expect("a number")
}
