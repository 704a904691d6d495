//! Releasing a held evaluation, and the debugger tools' errors when none is held.

use super::*;
use crate::processes::kill_worker;

#[apply(both_modes)]
fn abort_evaluation_runs_the_cleanup_forms(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *cleaned* nil)");
    hold(&mut server, "(unwind-protect (error \"x\") (setf *cleaned* :yes))\n(setf *cleaned* :wrong)");
    let before = last_error(&mut server);
    assert!(in_frame(&mut server, 0, "*cleaned*").ends_with("=> NIL"));
    assert_eq!(call_ok(&mut server, "abort-evaluation", json!({})), "Evaluation aborted.");
    assert_eq!(last_error(&mut server), before, "aborting leaves the error state alone");
    assert_nothing_held(&mut server);
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
}

#[apply(both_modes)]
fn abort_restart_releases_the_held_evaluation(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *cleaned* nil)");
    hold(&mut server, "(unwind-protect (error \"x\") (setf *cleaned* :yes))");
    let before = last_error(&mut server);
    assert_eq!(invoke_restart(&mut server, "ABORT"), "Evaluation aborted.");
    assert_eq!(last_error(&mut server), before, "aborting leaves the error state alone");
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"list": 20})).lines().count(), 1);
    assert_nothing_held(&mut server);
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
    // An ABORT restart of the user's code is invoked like any other.
    hold(&mut server, "(list (restart-case (error \"x\") (abort () :mine)))");
    assert_eq!(invoke_restart(&mut server, "ABORT"), "=> (:MINE)");
    // Cleanup forms that fail or never end are not held again.
    hold(&mut server, "(unwind-protect (error \"x\") (error \"y\"))");
    assert_eq!(invoke_restart(&mut server, "ABORT"), "Evaluation aborted.");
    assert_nothing_held(&mut server);
    hold(&mut server, "(unwind-protect (error \"x\") (loop))");
    assert_eq!(invoke_restart(&mut server, "ABORT"), "Evaluation aborted.");
    assert_nothing_held(&mut server);
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
}

#[apply(both_modes)]
fn waiting_for_a_held_evaluation_that_is_aborted_ends_with_its_error_and_no_debugger(mode: Mode) {
    let mut server = mode.ready();
    let [begun, gate] = ["begun", "gate"].map(|name| server.home().join(name));
    let cleanup = format!("(open {begun:?} :direction :probe :if-does-not-exist :create)");
    let code = format!("(unwind-protect (error \"x\") {cleanup} (loop until (probe-file {gate:?}) do (sleep 0.01)))");
    hold(&mut server, &code);
    let aborting = server.post_call("invoke-restart", json!({"restart": "ABORT"}));
    wait_until("the cleanup form begins", || begun.exists());
    let waiting = server.post_call("check-evaluation", json!({"id": 1, "wait": 25}));
    let status = call_ok(&mut server, "check-evaluation", json!({"id": 1}));
    assert!(status.starts_with("Evaluation 1: running"), "{status}");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(server.outcome(aborting), ("Evaluation aborted.".to_owned(), false));
    let (text, is_error) = server.outcome(waiting);
    assert!(is_error && text.starts_with("[ERROR] SIMPLE-ERROR\nx\n") && !text.contains("[Debugger]"), "{text}");
}

/// The code of a resumption is not the evaluation: interrupting it must also abort the evaluation, which is held again.
#[apply(both_modes)]
fn abort_evaluation_ends_a_held_evaluation_whose_resumption_runs(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *cleaned* nil) (defun broken () (error \"x\"))");
    let report = hold(&mut server, "(unwind-protect (broken) (setf *cleaned* :yes))");
    let begun = server.home().join("begun");
    let code = format!("(with-open-file (s {begun:?} :direction :output)) (loop)");
    let arguments = json!({"frame": frame_of(&report, "(BROKEN)"), "return": code});
    let resumption = server.post_call("resume-from-frame", arguments);
    wait_until("the code begins", || begun.exists());
    let id = call_ok(&mut server, "check-evaluation", json!({}));
    let id: u64 = id.strip_prefix("Evaluation ").unwrap().split(':').next().unwrap().parse().unwrap();
    let begin = Instant::now();
    assert_eq!(call_ok(&mut server, "abort-evaluation", json!({"id": id})), "Evaluation aborted.");
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    let (text, is_error) = server.outcome(resumption);
    assert!(is_error && text.contains("[ERROR] CANCELLED"), "{text}");
    assert_nothing_held(&mut server);
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
}

#[apply(both_modes)]
fn new_evaluation_releases_the_held_evaluation_with_a_notice(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *cleaned* nil)");
    hold(&mut server, "(unwind-protect (error \"x\") (setf *cleaned* :yes))");
    assert_eq!(server.evaluate("*cleaned*"), format!("{RELEASED}=> :YES"));
    assert_eq!(server.evaluate("*cleaned*"), "=> :YES");
    assert_nothing_held(&mut server);
    // The new evaluation is held in turn.
    hold(&mut server, "(error \"first\")");
    let second = hold(&mut server, "(error \"second\")");
    assert!(second.starts_with(&format!("{RELEASED}[ERROR] SIMPLE-ERROR\nsecond\n")), "{second}");
    call_ok(&mut server, "abort-evaluation", json!({}));
}

#[test]
fn a_long_release_before_the_next_evaluation_keeps_the_image() {
    // The supervisor ends a worker that runs nothing for 20 checks, here four seconds, although a client waits.
    let mut server = Server::start_with(&["--cleanup", "20", "--watch-interval", "200"]);
    server.initialize("2025-06-18");
    server.evaluate("(defvar *x* 1)");
    server.evaluate("(setf *x* 2)");
    hold(&mut server, "(unwind-protect (error \"x\") (loop repeat 50 do (sleep 0.1)))");
    assert_eq!(server.evaluate("*x*"), format!("{RELEASED}=> 2"));
}

#[apply(both_modes)]
fn inspection_tools_and_configure_limits_keep_the_evaluation_held(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(cerror \"go\" \"x\")");
    for (tool, arguments) in [
        ("describe-last-error", json!({})),
        ("get-backtrace", json!({})),
        ("describe-last-error", json!({"list": 20})),
        ("list-definitions", json!({})),
        ("describe-symbol", json!({"name": "car"})),
        ("configure-limits", json!({"timeout": 20})),
    ] {
        call_ok(&mut server, tool, arguments);
    }
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> NIL");
}

#[apply(both_modes)]
fn reset_releases_the_held_evaluation_with_a_notice(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(error \"x\")");
    let reset = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";
    let text = call_ok(&mut server, "reset-session", json!({}));
    assert_eq!(text, format!("{RELEASED}{reset}"));
    assert_nothing_held(&mut server);
    assert_eq!(last_error(&mut server), NO_ERROR);
    assert_eq!(server.evaluate("2"), "=> 2");
    assert_eq!(call_ok(&mut server, "reset-session", json!({})), reset);
    assert_eq!(server.evaluate("3"), "=> 3");
    server.assert_works();
}

#[apply(both_modes)]
fn hold_option_releases_the_held_evaluation_after_its_time(mode: Mode) {
    let mut server = mode.start_with(&["--hold", "0.5"]);
    server.initialize("2025-06-18");
    hold(&mut server, "(error \"x\")");
    // A question about the held evaluation would extend its hold time.
    while call_ok(&mut server, "check-evaluation", json!({})).contains("held") {
        std::thread::yield_now();
    }
    assert_last_hold(&mut server, 1, "its hold timed out");
    let text = server.evaluate("1");
    let said = "[notice]\nThe evaluation held for debugging was ended: the hold timed out.\n\n=> 1";
    assert_eq!(text, said);
}

#[apply(both_modes)]
fn looping_cleanup_forms_delay_release_only_for_a_bounded_time(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *kept* :here)");
    hold(&mut server, "(unwind-protect (error \"x\") (loop))");
    let begin = Instant::now();
    call_ok(&mut server, "abort-evaluation", json!({}));
    hold(&mut server, "(unwind-protect (error \"x\") (loop))");
    assert_eq!(server.evaluate("*kept*"), format!("{RELEASED}=> :HERE"));
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[apply(both_modes)]
fn time_limit_stops_while_held_and_restarts_on_resume(mode: Mode) {
    let mut server = mode.ready();
    call_ok(&mut server, "configure-limits", json!({"timeout": 1}));
    hold(&mut server, "(progn (sleep 0.6) (cerror \"go\" \"x\") (sleep 0.6) :done)");
    // The elapsed time itself is tested, here and below.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :DONE");
    hold(&mut server, "(progn (cerror \"go\" \"x\") (loop))");
    let text = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(text.starts_with("[ERROR] TIMEOUT\n") && text.ends_with(DEBUGGER_SECTION_END), "{text}");
    call_ok(&mut server, "abort-evaluation", json!({}));
    // An evaluation in a frame has its own time limit; the frame's evaluation stays held.
    hold(&mut server, "(cerror \"go\" \"x\")");
    let text = call_err(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(loop)"}));
    assert!(text.contains("[ERROR] TIMEOUT\n"), "{text}");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> NIL");
    server.assert_works();
}

#[apply(both_modes)]
fn resumed_evaluation_keeps_its_own_time_limit(mode: Mode) {
    let mut server = mode.ready();
    let held = |server: &mut Server, code: &str, timeout: f64| {
        let arguments = json!({"code": code, "on-error": "debug", "timeout": timeout});
        assert!(call_err(server, "evaluate-lisp", arguments).ends_with(DEBUGGER_SECTION_END));
    };
    held(&mut server, "(progn (cerror \"go\" \"x\") (loop))", 0.5);
    let text = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(text.contains("did not finish within its time limit of 0.5 seconds"), "{text}");

    call_ok(&mut server, "configure-limits", json!({"timeout": 0.5}));
    server.evaluate("(defun f () (declare (optimize debug)) (cerror \"go\" \"x\") :f)");
    let slow = "(progn (f) (sleep 1) (cerror \"go\" \"y\") (sleep 1) :done)";
    held(&mut server, slow, 10.0);
    // An evaluation in a frame is an evaluation of its own, with the session's time limit.
    let text = call_err(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(loop)"}));
    assert!(text.contains("did not finish within its time limit of 0.5 seconds"), "{text}");
    assert!(call_err(&mut server, "resume-from-frame", json!({"frame": 1, "return": "1"})).contains("\ny\n"));
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :DONE");
    // An evaluation without a limit, then one with the session's limit at its start.
    held(&mut server, slow, 0.0);
    assert!(call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"})).contains("\ny\n"));
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :DONE");
    hold(&mut server, "(progn (cerror \"go\" \"x\") (loop))");
    call_ok(&mut server, "configure-limits", json!({"timeout": 60}));
    let text = call_err(&mut server, "invoke-restart", json!({"restart": "CONTINUE"}));
    assert!(text.contains("did not finish within its time limit of 0.5 seconds"), "{text}");
}

#[apply(both_modes)]
fn with_timeout_deadlines_and_handlers_cannot_end_a_hold(mode: Mode) {
    let mut server = mode.ready();
    for code in [
        // The handler of the timeout would unwind.
        "(handler-case (sb-ext:with-timeout 0.3 (cerror \"go\" \"held\") :went-on) (sb-ext:timeout () :timed-out))",
        // The handler of the timeout would throw.
        "(catch 'out (handler-bind ((sb-ext:timeout (lambda (c) (declare (ignore c)) (throw 'out :thrown))))\n \
         (sb-ext:with-timeout 0.3 (cerror \"go\" \"held\") :went-on)))",
        // The timeout has no handler.
        "(sb-ext:with-timeout 0.3 (cerror \"go\" \"held\") :went-on)",
        "(sb-sys:with-deadline (:seconds 0.3) (cerror \"go\" \"held\") :went-on)",
        "(handler-bind ((error (lambda (c) (unless (search \"held\" (princ-to-string c)) (abort)))))\n  \
         (cerror \"go\" \"held\") :went-on)",
    ] {
        hold(&mut server, code);
        std::thread::sleep(Duration::from_millis(600));
        assert!(in_frame(&mut server, 0, "(+ 20 22)").ends_with("=> 42"), "{code}");
        let inside = call_err(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(error \"inside\")"}));
        assert!(inside.contains("[ERROR] SIMPLE-ERROR\ninside\n"), "{code}: {inside}");
        assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :WENT-ON", "{code}");
    }
}

#[apply(both_modes)]
fn timers_in_the_held_thread_cannot_end_a_hold(mode: Mode) {
    let mut server = mode.ready();
    for does in ["(error \"from the timer\")", "(throw 'out :thrown)", "(abort)", "(sb-thread:abort-thread)"] {
        let code = format!(
            "(catch 'out (let ((timer (sb-ext:make-timer (lambda () {does}) :thread sb-thread:*current-thread*)))\n  \
             (sb-ext:schedule-timer timer 0.3) (cerror \"go\" \"held\") :went-on))"
        );
        hold(&mut server, &code);
        std::thread::sleep(Duration::from_millis(600));
        assert!(in_frame(&mut server, 0, "(+ 20 22)").ends_with("=> 42"), "{code}");
        assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> :WENT-ON", "{code}");
    }
}

#[apply(both_modes)]
fn cancelling_invoke_restart_stops_the_resumed_evaluation(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(progn (cerror \"go\" \"x\") (loop))");
    let id = server.post_call("invoke-restart", json!({"restart": "CONTINUE"}));
    while !call_ok(&mut server, "check-evaluation", json!({})).contains("running for") {
        std::thread::yield_now();
    }
    server.notify("notifications/cancelled", json!({"requestId": id}));
    server.assert_works();
    assert_nothing_held(&mut server);
}

#[apply(both_modes)]
fn abort_evaluation_does_not_end_a_running_evaluation(mode: Mode) {
    let mut server = mode.ready();
    let running = server.post_call("evaluate-lisp", json!({"code": "(progn (sleep 0.5) :ran)", "on-error": "debug"}));
    assert_eq!(call_err(&mut server, "abort-evaluation", json!({})), NOTHING_HELD);
    assert_eq!(server.outcome(running), ("=> :RAN".to_owned(), false));
}

#[test]
fn definitions_made_by_eval_in_frame_are_replayed_after_image_loss() {
    let mut server = Server::ready();
    hold(&mut server, "(progn (cerror \"go\" \"x\") (sb-sys:without-interrupts (loop)))");
    in_frame(&mut server, 1, "(defvar *kept* 7) (setf *kept* 8)\n(defun kept () (list :kept *kept*))");
    call_ok(&mut server, "configure-limits", json!({"timeout": short_limit()}));
    in_frame(&mut server, 1, "(+ 1 2)");
    let lost = "(sb-sys:without-interrupts (loop))";
    let text = call_err(&mut server, "eval-in-frame", json!({"frame": 1, "code": lost, "timeout": short_limit()}));
    assert!(text.contains("The Lisp image did not respond to an interrupt"), "{text}");
    assert!(text.contains("\nRestored: all 2 defining forms.\n"), "{text}");
    assert_eq!(server.evaluate("(kept)"), "=> (:KEPT 7)");
}

#[test]
fn definitions_of_a_form_that_failed_in_a_frame_are_named_when_lost() {
    for code in ["(progn (defun in-frame () 1) (error \"y\"))", "(list #.(defun in-frame () 1) #<x>)"] {
        let mut server = Server::ready();
        hold(&mut server, "(error \"x\")");
        call_err(&mut server, "eval-in-frame", json!({"frame": 0, "code": code}));
        kill_worker(&server);
        let text = server.evaluate("(fboundp 'in-frame)");
        assert!(
            text.contains("(the form failed after defining FUNCTION COMMON-LISP-USER::IN-FRAME)"),
            "{code}: {text}"
        );
    }
}

#[test]
fn held_form_is_not_replayed_for_definitions_of_the_values_that_resumed_it() {
    let mut server = Server::ready();
    server.evaluate("(defun risky (x) (restart-case (error \"~A\" x) (use-value (value) value)))");
    let file = server.home().join("effects");
    let code = format!(
        "(progn (with-open-file (out {file:?} :direction :output :if-exists :append :if-does-not-exist :create)
                  (write-char #\\x out))
                (list (risky 1)))"
    );
    let values = "(progn (defun helper () 1) 42)";
    hold(&mut server, &code);
    let restarted = invoke_restart_with(&mut server, "USE-VALUE", values);
    let frame = frame_of(&hold(&mut server, &code), "(RISKY 1)");
    let returned = call_ok(&mut server, "resume-from-frame", json!({"frame": frame, "return": values}));
    for text in [restarted, returned] {
        let notice = "If the image is lost, the definitions that the code for the values made can be restored only \
            from a checkpoint. To keep these definitions without a checkpoint, evaluate them again on their own.";
        assert!(text.contains(notice), "{text}");
        assert!(text.ends_with("=> (42)"), "{text}");
    }
    kill_worker(&server);
    assert!(server.evaluate("(fboundp 'helper)").ends_with("=> NIL"));
    assert_eq!(std::fs::read_to_string(file).unwrap(), "xx");
}

#[test]
fn server_without_a_supervisor_does_not_say_that_definitions_are_restored_from_a_checkpoint() {
    let mut server = Mode::Plain.ready();
    hold(&mut server, "(list (restart-case (error \"x\") (use-value (value) value)))");
    let text = invoke_restart_with(&mut server, "USE-VALUE", "(progn (defun helper () 1) 42)");
    assert_eq!(text, "=> (42)");
}

#[apply(both_modes)]
fn server_restarts_are_invisible_to_find_restart(mode: Mode) {
    let mut server = mode.ready();
    for code in ["(find-restart 'retry)", "(find-restart 'continue)", "(find-restart :retry)"] {
        assert_eq!(server.evaluate(code), "=> NIL", "{code}");
    }
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": "(invoke-restart 'retry)"}));
    assert!(text.starts_with("[ERROR] SB-INT:SIMPLE-CONTROL-ERROR\n"), "{text}");
    // Of two restarts with one name, the name selects the inner one, and each has its number.
    server.evaluate("(defvar *tries* 0)");
    let code = "(incf *tries*)\n(progn (incf *tries*) (restart-case (error \"x\") (retry () :report \"Mine.\" :mine)))";
    let report = hold(&mut server, code);
    assert!(report.contains("  1. RETRY - Mine.\n  2. RETRY - Evaluate this form again.\n"), "{report}");
    assert!(call_err(&mut server, "invoke-restart", json!({"restart": 2})).ends_with(DEBUGGER_SECTION_END));
    assert_eq!(invoke_restart(&mut server, "RETRY"), "=> :MINE");
    assert_eq!(server.evaluate("*tries*"), "=> 3");
}

#[apply(both_modes)]
fn evaluation_is_reported_as_held_while_code_runs_in_its_frame(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *gate* nil)");
    hold(&mut server, "(cerror \"go\" \"x\")");
    let running = server.post_call("eval-in-frame", json!({"frame": 0, "code": "(loop until *gate* do (sleep 0.01))"}));
    while !call_ok(&mut server, "check-evaluation", json!({})).contains("running for") {
        std::thread::yield_now();
    }
    let status = call_ok(&mut server, "check-evaluation", json!({"id": 2}));
    assert!(status.starts_with("Evaluation 2: held in the debugger with SIMPLE-ERROR (E1)"), "{status}");
    call_ok(&mut server, "abort-evaluation", json!({"id": 3}));
    assert!(server.outcome(running).0.contains("[ERROR] CANCELLED"));
    assert_eq!(call_ok(&mut server, "abort-evaluation", json!({"id": 2})), "Evaluation aborted.");
    assert_nothing_held(&mut server);
}

// ---- Errors: nothing held, unknown restarts and frames

#[apply(both_modes)]
fn debugger_tools_report_that_no_evaluation_is_held(mode: Mode) {
    let mut server = mode.ready();
    for (tool, arguments) in [
        ("invoke-restart", json!({"restart": 1})),
        ("eval-in-frame", json!({"frame": 0, "code": "1"})),
        ("resume-from-frame", json!({"frame": 0, "return": "1"})),
        ("resume-from-frame", json!({"frame": 0})),
        ("abort-evaluation", json!({})),
    ] {
        assert_eq!(call_err(&mut server, tool, arguments), NOTHING_HELD, "{tool}");
    }
    assert_eq!(last_error(&mut server), NO_ERROR);
    server.assert_works();
}

/// Asserts that no evaluation is held, and that the last held evaluation was `evaluation`, until `end`.
#[track_caller]
fn assert_last_hold(server: &mut Server, evaluation: u64, end: &str) {
    let expected = format!(
        "No evaluation is held: evaluation {evaluation} was held until {end}. To debug an error, evaluate the code with \
         on-error \"debug\"."
    );
    assert_eq!(call_err(server, "abort-evaluation", json!({})), expected);
}

#[apply(both_modes)]
fn debugger_tools_report_how_the_last_hold_ended(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(cerror \"go\" \"x\")");
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> NIL");
    assert_last_hold(&mut server, 1, "it was resumed");
    hold(&mut server, "(error \"x\")");
    assert_eq!(invoke_restart(&mut server, "ABORT"), "Evaluation aborted.");
    assert_last_hold(&mut server, 2, "it was aborted");
    hold(&mut server, "(error \"x\")");
    call_ok(&mut server, "abort-evaluation", json!({}));
    assert_last_hold(&mut server, 3, "it was aborted");
    hold(&mut server, "(error \"x\")");
    server.evaluate("1");
    assert_last_hold(&mut server, 4, "a later evaluation or a reset ended it");
}

/// An eval-in-frame that waits for its turn has a number, so a client may wait for its end.
#[apply(both_modes)]
fn waiting_for_an_eval_in_frame_that_is_refused_ends_with_the_reason(mode: Mode) {
    let mut server = mode.ready();
    let gate = server.home().join("gate");
    let running = server.post_running("", &format!("(loop until (probe-file {gate:?}) do (sleep 0.01))"), 600.0);
    let refused = server.post_call("eval-in-frame", json!({"frame": 0, "code": "1"}));
    let waiting = server.post_call("check-evaluation", json!({"id": 2, "wait": 3600}));
    let status = call_ok(&mut server, "check-evaluation", json!({"id": 2}));
    assert!(status.starts_with("Evaluation 2: waiting"), "{status}");
    std::fs::write(&gate, "").unwrap();
    server.outcome(running);
    assert_eq!(server.outcome(refused), (NOTHING_HELD.to_owned(), true));
    let (text, is_error) = server.outcome(waiting);
    assert!(is_error && text.contains(NOTHING_HELD), "{text}");
}

#[apply(both_modes)]
fn unknown_restarts_frames_and_arguments_are_refused_with_the_valid_ones(mode: Mode) {
    let mut server = mode.ready();
    hold(&mut server, "(cerror \"go\" \"x\")");
    let before = last_error(&mut server);
    let there_are = "Available restarts: 1 CONTINUE, 2 RETRY, 3 ABORT.";
    for (restart, named) in
        [(json!(7), "7"), (json!("7"), "7"), (json!("nope"), "nope"), (json!("cl:continue"), "cl:continue")]
    {
        let text = call_err(&mut server, "invoke-restart", json!({"restart": restart}));
        assert_eq!(text, format!("There is no restart {named}. {there_are}"));
    }
    for (tool, arguments) in [
        ("eval-in-frame", json!({"frame": 99, "code": "1"})),
        ("resume-from-frame", json!({"frame": 99, "return": "1"})),
        ("resume-from-frame", json!({"frame": 99})),
    ] {
        let text = call_err(&mut server, tool, arguments);
        assert!(text.starts_with("There is no frame 99. Frames are numbered from 0 to 2"), "{tool}: {text}");
    }
    for (tool, arguments, part) in [
        ("invoke-restart", json!({"restart": 0}), "restart must be a number, 1 or greater, or a name"),
        ("invoke-restart", json!({"restart": true}), "restart must be a string, not true"),
        ("invoke-restart", json!({"restart": 1, "values": [41]}), "values must be a string"),
        ("resume-from-frame", json!({"frame": -1}), "frame must be a frame number, 0 or greater"),
        ("resume-from-frame", json!({"frame": "none"}), "frame must be a frame number, 0 or greater"),
        ("eval-in-frame", json!({"frame": 1}), "eval-in-frame needs the argument code"),
        ("abort-evaluation", json!({"now": true}), "abort-evaluation has no argument"),
    ] {
        let text = call_err(&mut server, tool, arguments);
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(last_error(&mut server), before);
    assert_eq!(invoke_restart(&mut server, "CONTINUE"), "=> NIL");
}

#[apply(both_modes)]
fn markers_in_restarts_and_locals_are_escaped(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defun f (trap) (declare (optimize debug)) (cerror \"go\" \"x\") trap)");
    let code = "(restart-case (f \"[Debugger]\") (go-on () :report \"[ERROR] really\" 1))";
    let report = hold(&mut server, code);
    assert!(report.contains("2. GO-ON - [ERROR\\] really\n"), "{report}");
    assert_eq!(report.matches("[Debugger]").count(), 1, "{report}");
    let shown = call_ok(&mut server, "get-backtrace", json!({"locals": true}));
    assert!(shown.contains("TRAP = \"[Debugger\\]\""), "{shown}");
    call_ok(&mut server, "abort-evaluation", json!({}));
}
