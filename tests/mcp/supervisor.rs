//! The server survives what kills SBCL: the binary over pipes, with its worker killed in every way.

#![cfg(target_os = "linux")]

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::process::Command;
use std::time::Duration;

use crate::client::{Scratch, Server, binary, call_ok, outcome};
use crate::processes::{children, is_alive, kill_worker, processes, signal, stop_worker, wait_until, worker};
use rstest::rstest;
use serde_json::{Value, json};

const RESET: &str = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";
const NO_ERROR: &str = "No error information available.\n(No error has occurred since the last successful evaluation)";
const ABORT: &str = r#"(sb-alien:alien-funcall (sb-alien:extern-alien "abort" (function sb-alien:void)))"#;

/// Definitions of all kinds.
const DEFINITIONS: &str = r#"
(defpackage :zoo (:use :cl) (:export #:feed))
(in-package :zoo)
(defmacro twice (form) `(progn ,form ,form))
(defclass animal () ((name :initarg :name :reader name)))
(defgeneric feed (animal))
(defmethod feed ((animal animal)) (list :fed (name animal)))
(let ((count 0)) (defun tick () (twice (incf count)) count))
(defstruct cage (size 3))
(defparameter *open* 1)
(define-condition hungry (error) ())"#;

const CHECK_DEFINITIONS: &str = "(list (feed (make-instance 'animal :name 1)) (cage-size (make-cage)) (package-name *package*) \
                      (not (null (macro-function 'twice))) (fboundp 'tick))";
const DEFINITIONS_INTACT: &str = r#"=> ((:FED 1) 3 "ZOO" T #<FUNCTION TICK>)"#;

fn assert_image_lost(text: &str) {
    assert!(text.starts_with("[ERROR] IMAGE-LOST\n"), "{text}");
    assert!(text.ends_with("[Backtrace]\n0: (no frames available)"), "{text}");
}

// ---- Loss of the image

#[test]
fn killed_idle_worker_is_replaced_and_definitions_are_restored() {
    let mut server = Server::ready();
    server.evaluate(DEFINITIONS);
    server.evaluate("(setf *open* 99)");
    kill_worker(&server);
    let text = server.evaluate("*open*");
    assert!(text.starts_with("[notice]\nThe Lisp image was killed by signal 9 (SIGKILL"), "{text}");
    assert!(text.contains("Restored: all 10 defining forms"), "{text}");
    assert!(text.contains("values assigned to variables"), "{text}");
    assert!(text.ends_with("\n\n=> 1"), "{text}");
    assert_eq!(server.evaluate(CHECK_DEFINITIONS).split(" {").next(), DEFINITIONS_INTACT.split(" {").next());
    server.assert_works();
    let end = server.finish();
    assert!(end.status.success());
}

#[test]
fn setf_expanders_and_method_combinations_are_restored() {
    let mut server = Server::ready();
    server.evaluate("(defsetf spot set-spot) (define-method-combination joined :operator list)");
    let before = call_ok(&mut server, "list-definitions", json!({}));
    assert_eq!(before, "[Macros]\n- SPOT (setf expander)\n\n[Classes]\n- JOINED (method combination)");
    kill_worker(&server);
    server.evaluate("1");
    assert_eq!(call_ok(&mut server, "list-definitions", json!({})), before);
}

#[test]
fn request_right_after_a_worker_kill_is_answered() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 7)");
    for _ in 0..10 {
        signal(worker(&server), "-KILL");
        let text = server.evaluate("(f)");
        assert!(text.ends_with("=> 7"), "{text}");
        server.assert_works();
    }
}

#[test]
fn image_loss_fails_the_running_evaluation_and_queued_evaluations_run() {
    let mut server = Server::ready();
    server.evaluate(DEFINITIONS);
    let running = server.post_running("(progn (defun never () 1) ", "(sleep 100))", 0.0);
    let queued: Vec<_> =
        (0..5).map(|n| server.post_call("evaluate-lisp", json!({"code": format!("(+ {n} 1)")}))).collect();
    // The ping is answered after all calls have arrived.
    server.request("ping", json!({}));
    kill_worker(&server);
    let (text, is_error) = server.outcome(running);
    assert!(is_error);
    assert_image_lost(&text);
    assert!(text.contains("SIGKILL") && text.contains("Restored: all 10 defining forms"), "{text}");
    for (n, id) in queued.into_iter().enumerate() {
        assert_eq!(server.outcome(id), (format!("=> {}", n + 1), false));
    }
    assert_eq!(server.evaluate("(fboundp 'never)"), "=> NIL");
    let end = server.finish();
    let ids: Vec<_> = end.transcript.iter().map(|message| message["id"].clone()).collect();
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len(), "an id was answered twice");
}

#[test]
fn abort_exit_and_sigkill_of_the_worker_answer_image_lost() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 7)");
    for (code, word) in [
        (ABORT, "SBCL itself or foreign code aborted (the server's stderr may say why)."),
        (
            r#"(sb-alien:alien-funcall (sb-alien:extern-alien "_exit" (function sb-alien:void sb-alien:int)) 0)"#,
            "status 0",
        ),
        (
            r#"(sb-alien:alien-funcall (sb-alien:extern-alien "_exit" (function sb-alien:void sb-alien:int)) 3)"#,
            "status 3",
        ),
        (
            r#"(sb-alien:alien-funcall (sb-alien:extern-alien "kill" (function sb-alien:int sb-alien:int sb-alien:int)) (sb-unix:unix-getpid) 9)"#,
            "SIGKILL",
        ),
    ] {
        let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code}));
        assert!(is_error, "{code}: {text}");
        assert_image_lost(&text);
        assert!(text.contains(word), "{code}: {text}");
        let described = server.call_tool("describe-last-error", json!({})).0;
        assert!(described.starts_with("Error: IMAGE-LOST\n  The Lisp image "), "{described}");
        assert!(server.call_tool("get-backtrace", json!({})).0.starts_with("Backtrace for IMAGE-LOST (0 of 0 frames)"));
        assert_eq!(server.evaluate("(f)"), "=> 7", "{code}");
        assert_eq!(server.call_tool("describe-last-error", json!({})).0, NO_ERROR);
        server.assert_works();
    }
}

#[test]
fn image_that_filled_its_heap_is_reported_with_advice() {
    let mut server = Server::ready();
    // This is the exit status of a process in which the heap was full (docs/reference/exit-statuses.md).
    let exit = r#"(sb-alien:alien-funcall (sb-alien:extern-alien "_exit" (function sb-alien:void sb-alien:int)) 87)"#;
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": exit}));
    let expected = "[ERROR] HEAP-EXHAUSTED\nThe heap was used up.\nThe Lisp image filled its heap and was terminated \
                    (keep fewer objects, or start with a larger heap). A new image has replaced the lost image.\n";
    assert!(is_error && text.contains(expected), "{text}");
}

#[test]
fn only_forms_before_the_killing_form_are_replayed() {
    let mut server = Server::ready();
    let code = format!("(defun before () 1) (progn (defun killer () 2) {ABORT}) (defun after () 3)");
    assert_image_lost(&server.call_tool("evaluate-lisp", json!({"code": code})).0);
    assert_eq!(server.evaluate("(list (before) (fboundp 'killer) (fboundp 'after))"), "=> (1 NIL NIL)");
}

#[test]
fn unrestorable_forms_are_named_and_not_tried_again() {
    let mut server = Server::ready();
    let scratch = Scratch::new();
    let (path, deadly) = (scratch.join("restore"), scratch.join("deadly"));
    std::fs::write(&path, "1").unwrap();
    server.evaluate(&format!("(progn (assert (probe-file {path:?})) (defun lucky () 1))"));
    server.evaluate(&format!("(progn (when (probe-file {deadly:?}) {ABORT}) (defun unlucky () 1))"));
    server.evaluate("(defun f () 7)");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&deadly, "1").unwrap();
    kill_worker(&server);
    let text = server.evaluate("(list (f) (fboundp 'lucky) (fboundp 'unlucky))");
    assert!(text.contains("Restored: 1 of 3 defining forms"), "{text}");
    assert!(text.contains("(progn (assert") && text.contains("(while this form was replayed, the image "), "{text}");
    assert!(text.ends_with("=> (7 NIL NIL)"), "{text}");
    // The forms are not tried again.
    std::fs::remove_file(&deadly).unwrap();
    kill_worker(&server);
    assert!(server.evaluate("(f)").contains("Restored: the one defining form"));
}

#[test]
fn error_state_history_and_limits_survive_image_loss() {
    let mut server = Server::ready();
    server.call_tool("configure-limits", json!({"timeout": 7, "max-output": 1234}));
    let limits = server.call_tool("configure-limits", json!({}));
    server.call_tool("evaluate-lisp", json!({"code": "(car 1)"}));
    server.call_tool("evaluate-lisp", json!({"code": "(/ 1 0)"}));
    let calls = [
        ("describe-last-error", json!({})),
        ("get-backtrace", json!({})),
        ("describe-last-error", json!({"list": 20})),
    ];
    let ask = |server: &mut Server| calls.clone().map(|(tool, arguments)| server.call_tool(tool, arguments));
    let before = ask(&mut server);
    assert!(before[0].0.starts_with("Error: DIVISION-BY-ZERO"));
    for _ in 0..2 {
        kill_worker(&server);
        assert_eq!(ask(&mut server), before);
        assert_eq!(server.call_tool("configure-limits", json!({})), limits);
    }
}

#[test]
fn a_notice_about_missing_errors_is_repeated_only_if_the_next_image_lacks_further_errors() {
    let mut server = Server::ready();
    let fail = |server: &mut Server, times: usize| {
        // Each error takes at least 10,000 bytes.
        let code = "(error \"~A\" (make-string 20000 :initial-element #\\x))";
        for _ in 0..times {
            assert!(server.call_tool("evaluate-lisp", json!({"code": code})).1);
        }
    };
    let next_image_notifies = |server: &mut Server| {
        kill_worker(server);
        server.evaluate("1").contains("The error history now begins with E")
    };
    fail(&mut server, 120);
    assert!(next_image_notifies(&mut server));
    assert!(!next_image_notifies(&mut server));
    fail(&mut server, 2);
    assert!(next_image_notifies(&mut server));
}

#[test]
fn restore_none_option_restores_no_definitions() {
    let mut server = Server::start_with(&["--restore", "none"]);
    server.initialize("2025-11-25");
    server.call_tool("configure-limits", json!({"timeout": 7}));
    server.evaluate("(defun f () 7)");
    kill_worker(&server);
    let text = server.evaluate("(fboundp 'f)");
    assert!(text.contains("Nothing was restored (--restore none)") && text.ends_with("=> NIL"), "{text}");
    assert!(server.call_tool("configure-limits", json!({})).0.contains("timeout: 7 seconds"));
}

#[test]
fn checkpoint_is_restored_on_request_whatever_the_restore_option() {
    for option in ["none", "definitions"] {
        let mut server = Server::start_with(&["--restore", option]);
        server.initialize("2025-11-25");
        server.evaluate("(defvar *x* 1) (setf *x* 2)");
        call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "one"}));
        server.evaluate("(setf *x* 3)");
        let text = call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "one"}));
        assert!(text.contains("Restored"), "{text}");
        assert_eq!(server.evaluate("*x*"), "=> 2");
        // The next image follows the option again.
        kill_worker(&server);
        let text = server.evaluate("(if (boundp '*x*) *x* :unbound)");
        assert!(text.ends_with(if option == "none" { "=> :UNBOUND" } else { "=> 1" }), "{text}");
    }
}

#[test]
fn definitions_of_a_failed_form_are_named_when_they_are_lost() {
    let mut server = Server::ready();
    server.evaluate("(defun g () 1)");
    for code in ["(progn (defun f () 1) (error \"then\"))", "(progn (defclass c () ()) (defmethod m ((c c))) (/ 0))"] {
        assert!(server.call_tool("evaluate-lisp", json!({"code": code})).1);
    }
    let code = "(progn (defvar *v* 1) (loop))";
    assert!(server.call_tool("evaluate-lisp", json!({"code": code, "timeout": 0.3})).1);
    // H is redefined before the loss.
    assert!(server.call_tool("evaluate-lisp", json!({"code": "(progn (defun h () 1) (error \"then\"))"})).1);
    server.evaluate("(defun h () 2)");
    let file = server.home().join("half.lisp");
    std::fs::write(&file, "(defun in-file () 1)\n(/ 0)\n").unwrap();
    assert!(server.call_tool("load-system", json!({"path": file})).1);
    kill_worker(&server);
    let text = server.evaluate("(list (fboundp 'f) (find-class 'c nil) (boundp '*v*) (g) (h) (fboundp 'in-file))");
    assert!(text.ends_with("=> (NIL NIL NIL 1 2 NIL)"), "{text}");
    assert!(text.contains("Restored: 2 of 6 defining forms. Not restored:"), "{text}");
    let mut lines: Vec<_> = text.lines().filter_map(|line| line.trim_start().strip_prefix("- ")).collect();
    let load = lines.pop().unwrap();
    assert!(load.ends_with(" (the form failed after defining FUNCTION COMMON-LISP-USER::IN-FILE)"), "{text}");
    assert_eq!(
        lines,
        [
            "(progn (defun f () 1) (error \"then\")) (the form failed after defining FUNCTION COMMON-LISP-USER::F)",
            "(progn (defclass c () ()) (defmethod m ((c c))) (/ 0)) (the form failed after defining \
             CLASS COMMON-LISP-USER::C, FUNCTION COMMON-LISP-USER::M, METHOD COMMON-LISP-USER::M)",
            "(progn (defvar *v* 1) (loop)) (the form failed after defining VARIABLE COMMON-LISP-USER::*V*)",
        ],
        "{text}"
    );
    server.evaluate("(defun f () 3)");
    let text = call_ok(&mut server, "list-definitions", json!({}));
    assert!(text.contains("(defclass c") && !text.contains("(defun f () 1)"), "{text}");
}

#[test]
fn definitions_of_a_held_form_are_named_when_lost_and_a_resumed_form_is_replayed() {
    let failed = "(progn (defun f () 1) (error \"then\"))";
    for released_by in ["", "abort-evaluation", "evaluate-lisp"] {
        let mut server = Server::ready();
        server.call_tool("evaluate-lisp", json!({"code": failed, "on-error": "debug"}));
        match released_by {
            "" => {}
            "evaluate-lisp" => drop(server.evaluate("1")),
            tool => drop(call_ok(&mut server, tool, json!({}))),
        }
        kill_worker(&server);
        let text = server.evaluate("(fboundp 'f)");
        assert!(text.contains("The one defining form was not restored:"), "{released_by}: {text}");
        assert!(
            text.contains("(the form failed after defining FUNCTION COMMON-LISP-USER::F)"),
            "{released_by}: {text}"
        );
    }
    let mut server = Server::ready();
    let code = "(progn (defun f () 1) (restart-case (error \"then\") (go-on () (defun g () 2))))";
    server.call_tool("evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    call_ok(&mut server, "invoke-restart", json!({"restart": "GO-ON"}));
    kill_worker(&server);
    let text = server.evaluate("(fboundp 'f)");
    // The form is replayed and fails again.
    assert!(text.contains("The one defining form was not restored:") && text.contains("then"), "{text}");
}

#[test]
fn replay_keeps_package_arguments_local_to_their_evaluation() {
    let mut server = Server::ready();
    server.evaluate("(defpackage :a (:use :cl)) (defpackage :b (:use :cl))");
    server.call_tool(
        "evaluate-lisp",
        json!({"code": "(defun in-a () 1) (in-package :b) (defun in-b () 2)", "package": "A"}),
    );
    server.evaluate("(defun in-user () 3)");
    kill_worker(&server);
    let text = server.evaluate("(list (package-name *package*) (a::in-a) (b::in-b) (in-user))");
    assert!(text.ends_with(r#"=> ("COMMON-LISP-USER" 1 2 3)"#), "{text}");
}

#[test]
fn every_protocol_revision_survives_image_loss() {
    for revision in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        let mut server = Server::start();
        let result = server.initialize(revision);
        server.evaluate("(defun f () 7)");
        kill_worker(&server);
        assert!(server.evaluate("(f)").ends_with("=> 7"), "{revision}");
        server.assert_works();
        assert_eq!(result["protocolVersion"], revision);
        let end = server.finish();
        let initialized = end.transcript.iter().filter(|message| message["result"]["protocolVersion"] == revision);
        assert_eq!(initialized.count(), 1, "the handshake was answered once");
    }
    // The revision without a handshake.
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let mut server = Server::start();
    let evaluate = |server: &mut Server, code: &str| {
        let call = json!({"name": "evaluate-lisp", "arguments": {"code": code}, "_meta": meta});
        outcome(&server.request("tools/call", call)).0
    };
    evaluate(&mut server, "(defun f () 7)");
    kill_worker(&server);
    assert!(evaluate(&mut server, "(f)").ends_with("=> 7"));
    assert_image_lost(&evaluate(&mut server, ABORT));
    assert_eq!(evaluate(&mut server, "(f)"), "=> 7");
}

#[test]
fn batch_with_an_image_loss_is_answered_once() {
    let mut server = Server::start();
    server.initialize("2025-03-26");
    let call = |id: i64, code: &str| {
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {"name": "evaluate-lisp", "arguments": {"code": code}}})
    };
    server.send(&json!([call(1, "(defun f () 7)"), call(2, ABORT), call(3, "(f)")]));
    let line = server.receive().unwrap();
    let answers = line.as_array().unwrap();
    assert_eq!(answers.len(), 3, "{line}");
    let of = |id: i64| outcome(answers.iter().find(|answer| answer["id"] == id).unwrap()).0;
    assert_image_lost(&of(1));
    assert_image_lost(&of(2));
    assert_eq!(of(3), "=> 7");
    server.assert_works();
}

#[test]
fn held_evaluation_is_lost_with_its_image() {
    let mut server = Server::ready();
    let (text, _) = server.call_tool("evaluate-lisp", json!({"code": "(/ 1 0)", "on-error": "debug"}));
    assert!(text.contains("DIVISION-BY-ZERO"), "{text}");
    kill_worker(&server);
    let (text, is_error) = server.call_tool("invoke-restart", json!({"restart": 1}));
    assert!(is_error, "{text}");
    assert!(server.call_tool("describe-last-error", json!({})).0.starts_with("Error: DIVISION-BY-ZERO"));
    server.evaluate("1");
    server.assert_works();
}

// ---- Evaluations that cannot be interrupted

#[test]
fn uninterruptible_evaluation_replaces_the_image() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 7)");
    let code = "(sb-sys:without-interrupts (loop))";
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code, "timeout": 0.5}));
    assert!(is_error && text.starts_with("[ERROR] TIMEOUT\n"), "{text}");
    assert!(text.contains("0.5 seconds") && text.contains("A new image has replaced the lost image."), "{text}");
    assert!(server.call_tool("describe-last-error", json!({})).0.starts_with("Error: TIMEOUT"));
    assert_eq!(server.evaluate("(f)"), "=> 7");

    let id = server.post_running("(sb-sys:without-interrupts", "(loop))", 600.0);
    let behind = server.post_call("evaluate-lisp", json!({"code": "(f)"}));
    server.notify("notifications/cancelled", json!({"requestId": id}));
    assert!(server.outcome(behind).0.ends_with("=> 7"));
    server.assert_works();
    let end = server.finish();
    assert!(end.transcript.iter().all(|message| message["id"] != id), "a cancelled request was answered");
}

#[test]
fn worker_stopped_by_sigstop_is_replaced() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 42)");
    stop_worker(&server);
    let text = server.evaluate("(f)");
    assert!(text.ends_with("=> 42") && text.contains("was stopped by a signal"), "{text}");
    let running = server.post_running("", "(loop)", 2.0);
    stop_worker(&server);
    let (text, is_error) = server.outcome(running);
    assert!(is_error && text.starts_with("[ERROR] TIMEOUT\nThe evaluation did not end in time.\n"), "{text}");
    assert_eq!(server.evaluate("(f)"), "=> 42");
    server.assert_works();
}

#[test]
fn worker_stuck_in_garbage_collection_is_replaced() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 42)");
    // A collection waits for a thread that never stops for it, and every other thread waits for the collection. A
    // thread that collections do not stop writes the file.
    let collecting = server.home().join("collecting");
    server.evaluate(&format!(
        "(let ((fd (sb-unix:unix-open {collecting:?} (logior sb-unix:o_wronly sb-unix:o_creat) #o600)) \
               (text (coerce #(1) '(simple-array (unsigned-byte 8) (*))))) \
           (sb-thread:make-thread \
            (lambda () \
              (sb-sys:without-gcing \
                (loop until sb-kernel:*stop-for-gc-pending*) (sb-unix:unix-write fd text 0 1) (loop)))) \
           (sb-thread:make-thread (lambda () (sleep 0.3) (gc))) 1)"
    ));
    wait_until("garbage is being collected", || std::fs::metadata(&collecting).is_ok_and(|file| file.len() == 1));
    std::fs::remove_file(&collecting).unwrap();
    let text = server.evaluate("(f)");
    assert!(text.ends_with("=> 42"), "{text}");
    server.assert_works();
}

#[test]
fn closing_any_worker_descriptor_loses_at_most_the_image() {
    for fd in 3..=14 {
        let mut server = Server::ready();
        server.evaluate("(defun f () 42)");
        let close = format!(
            "(sb-alien:alien-funcall (sb-alien:extern-alien \"close\" (function sb-alien:int sb-alien:int)) {fd})"
        );
        server.call_tool("evaluate-lisp", json!({"code": close}));
        for code in ["(f)", "(progn (sleep 1/50) (f))"] {
            let text = server.call_tool("evaluate-lisp", json!({"code": code, "timeout": 3})).0;
            let is_replaced = text.contains("A new image has replaced the lost image.");
            assert!(text.ends_with("=> 42") || is_replaced, "{fd}: {text}");
        }
        assert!(server.evaluate("(f)").ends_with("=> 42"));
    }
}

// ---- Reset

#[test]
fn calls_queued_behind_a_reset_run_although_an_evaluation_was_held() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 42)");
    let (text, _) = server.call_tool("evaluate-lisp", json!({"code": "(error \"held\")", "on-error": "debug"}));
    assert!(text.contains("[Debugger]"), "{text}");
    let reset = server.post_call("reset-session", json!({}));
    let behind = server.post_call("evaluate-lisp", json!({"code": "(defun g () (fboundp 'f))"}));
    let last = server.post_call("evaluate-lisp", json!({"code": "(g)"}));
    let said = format!("[notice]\nThe evaluation held for debugging was ended.\n\n{RESET}");
    assert_eq!(server.outcome(reset), (said, false));
    assert_eq!(server.outcome(behind), ("=> G".to_owned(), false));
    assert_eq!(server.outcome(last), ("=> NIL".to_owned(), false));
    server.assert_works();
}

#[test]
fn reset_starts_a_fresh_image_and_ends_the_old_processes() {
    let mut server = Server::ready();
    server.call_tool("configure-limits", json!({"timeout": 9}));
    server.evaluate(DEFINITIONS);
    server.evaluate(
        "(defmethod print-object ((x integer) stream) (write-string \"forged\" stream)) \
         (sb-thread:make-thread (lambda () (sleep 1000))) (defvar cl-user::*big* (make-array 1000000)) \
         (setf *read-base* 16 *print-base* 2) (sb-ext:run-program \"/bin/sleep\" '(\"1000\") :wait nil)",
    );
    server.call_tool("evaluate-lisp", json!({"code": "(/ 1 0)"}));
    let before = worker(&server);
    assert_eq!(server.call_tool("reset-session", json!({})), (RESET.to_owned(), false));
    assert_eq!(server.call_tool("describe-last-error", json!({})).0, NO_ERROR);
    assert_eq!(server.call_tool("list-definitions", json!({})).0, "No definitions in this session.");
    assert_eq!(
        server.evaluate("(list 10 (find-package :zoo) (find-symbol \"*BIG*\") (package-name *package*))"),
        "=> (10 NIL NIL \"COMMON-LISP-USER\")"
    );
    assert!(server.call_tool("configure-limits", json!({})).0.contains("timeout: 9 seconds"));
    assert!(!is_alive(before));
    let all = processes();
    let descends = |mut pid: u32| loop {
        match all.get(&pid) {
            Some((parent, _)) if *parent == server.pid() => return true,
            Some((parent, _)) if *parent > 1 => pid = *parent,
            _ => return false,
        }
    };
    assert!(!all.iter().any(|(pid, (_, name))| name == "sleep" && descends(*pid)));
    // The definitions are not restored by the next image, either.
    kill_worker(&server);
    assert!(server.evaluate("(find-package :zoo)").ends_with("=> NIL"));
}

#[test]
fn reset_runs_in_request_order() {
    let mut server = Server::ready();
    for _ in 0..10 {
        server.evaluate("(defvar *x* 1)");
        assert_eq!(server.call_tool("reset-session", json!({})).0, RESET);
    }
    server.evaluate("(defparameter *x* 2)");
    let reset = server.post_call("reset-session", json!({}));
    let second = server.post_call("evaluate-lisp", json!({"code": "(boundp '*x*)"}));
    assert_eq!(server.outcome(reset).0, RESET);
    assert_eq!(server.outcome(second).0, "=> NIL");
    let again = server.post_call("reset-session", json!({}));
    let third = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    assert_eq!(server.outcome(again).0, RESET);
    assert_eq!(server.outcome(third).0, "=> 3");
}

/// Each image that a call of a batch requests runs the batch again, so a second call must not request yet another image.
#[test]
fn only_one_call_of_a_batch_replaces_the_image_and_the_others_are_refused() {
    let reset = |id: i64| {
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {"name": "reset-session", "arguments": {}}})
    };
    let restore = |id: i64, name: &str| {
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {"name": "checkpoint", "arguments": {"action": "restore", "name": name}}})
    };
    for (batch, value) in [
        ([reset(1), restore(2, "one")], "=> NIL"),
        ([restore(1, "one"), reset(2)], "=> 1"),
        ([restore(1, "one"), restore(2, "two")], "=> 1"),
        ([reset(1), reset(2)], "=> NIL"),
    ] {
        let mut server = Server::start();
        server.initialize("2025-03-26");
        for (code, name) in [("(defun f () 1)", "one"), ("(defun f () 2)", "two")] {
            server.evaluate(code);
            call_ok(&mut server, "checkpoint", json!({"action": "save", "name": name}));
        }
        server.send(&json!(batch));
        let answers = server.receive().expect("an answer");
        let of = |id: i64| outcome(answers.as_array().unwrap().iter().find(|answer| answer["id"] == id).unwrap());
        assert!(!of(1).1, "{batch:?}: {answers}");
        let (text, is_error) = of(2);
        assert!(is_error && text.contains("another call of the same batch"), "{batch:?}: {answers}");
        let text = server.evaluate("(and (fboundp 'f) (funcall 'f))");
        assert!(text.ends_with(value), "{batch:?}: {text}");
        server.assert_works();
    }
}

/// The answers to a batch are sent together. The expansion crashes the first image, and succeeds in the next image.
#[test]
fn deletion_in_a_batch_whose_image_is_lost_is_not_repeated() {
    let call = |id: i64, name: &str, arguments: Value| {
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {"name": name, "arguments": arguments}})
    };
    let mut server = Server::start();
    server.initialize("2025-03-26");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "a"}));
    let crashed = server.home().join("crashed");
    let crash = format!(
        "(unless (probe-file {crashed:?}) (open {crashed:?} :direction :output) (sb-posix:kill (sb-posix:getpid) 9))"
    );
    let expansion = json!({"form": format!("(macrolet ((m () {crash} 42)) (m))"), "depth": "all"});
    let deletion = json!({"action": "delete", "name": "a"});
    server.send(&json!([call(1, "checkpoint", deletion), call(2, "macroexpand", expansion)]));
    let answers = server.receive().expect("an answer");
    let of = |id: i64| outcome(answers.as_array().unwrap().iter().find(|answer| answer["id"] == id).unwrap());
    let (text, is_error) = of(1);
    assert!(is_error && text.contains("IMAGE-LOST"), "{answers}");
    assert!(of(2).0.contains("42"), "{answers}");
    assert!(!call_ok(&mut server, "checkpoint", json!({})).contains("\"a\""));
}

/// The answers to a batch are sent together, so the reset discards the answer of an evaluation that has ended. A later crash
/// does not change what the client learns of that evaluation.
#[rstest]
fn evaluation_that_ended_before_a_reset_in_its_batch_is_not_reported_as_ended_by_the_reset(
    #[values(false, true)] crashes: bool,
) {
    let call = |id: i64, name: &str, arguments: Value| {
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {"name": name, "arguments": arguments}})
    };
    let exit = r#"(sb-alien:alien-funcall (sb-alien:extern-alien "_exit" (function sb-alien:void sb-alien:int)) 3)"#;
    let mut server = Server::start();
    server.initialize("2025-03-26");
    let systems = server.home().join("systems");
    std::fs::create_dir(&systems).expect("a directory");
    // The search for a system gives the evaluation time to end. If this time was too short, the next search takes longer.
    for attempt in 1..=10 {
        for n in 0..300 {
            let text = format!("(defsystem \"system-{attempt}-{n}\")\n{}", "; a comment\n".repeat(100));
            std::fs::write(systems.join(format!("file-{attempt}-{n}.asd")), text).expect("a file");
        }
        let marker = server.home().join(format!("marker-{attempt}"));
        let stream = format!("(s {marker:?} :direction :output :if-exists :append :if-does-not-exist :create)");
        let evaluation = json!({"code": format!("(with-open-file {stream} (write-line \"once\" s))")});
        let search = json!({"system": "no-such", "directory": systems});
        let mut batch = vec![
            call(1, "evaluate-lisp", evaluation),
            call(2, "load-system", search),
            call(3, "reset-session", json!({})),
        ];
        // The expansion crashes the image after the reset, and succeeds in the next image.
        let crashed = server.home().join(format!("crashed-{attempt}"));
        let crash = format!("(unless (probe-file {crashed:?}) (open {crashed:?} :direction :output) {exit})");
        let expansion = json!({"form": format!("(macrolet ((m () (sleep 0.3) {crash} 42)) (m))"), "depth": "all"});
        batch.extend(crashes.then(|| call(4, "macroexpand", expansion)));
        server.send(&json!(batch));
        let answers = server.receive().expect("an answer");
        let of = |id: i64| outcome(answers.as_array().unwrap().iter().find(|answer| answer["id"] == id).unwrap());
        assert!(!of(3).1, "{answers}");
        if crashes {
            assert!(of(4).0.contains("42"), "{answers}");
        }
        let Ok(written) = std::fs::read_to_string(marker) else { continue };
        assert_eq!(written, "once\n");
        let (text, is_error) = of(1);
        assert!(is_error && text.contains("Another call of the same batch replaced the image."), "{answers}");
        server.assert_works();
        return;
    }
    panic!("no evaluation ended before the reset");
}

/// Each reset cancels the macro expansion, so the next image runs the batch again. A reset that has replaced an image must
/// not replace the next image again, or images would replace each other without end.
#[test]
fn a_reset_in_a_batch_and_another_reset_each_replace_the_image_once() {
    let mut server = Server::start();
    server.initialize("2025-03-26");
    let call = |id: i64, name: &str, arguments: Value| {
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {"name": name, "arguments": arguments}})
    };
    let slow = json!({"form": "(macrolet ((m () (sleep 1) 42)) (m))", "depth": "all"});
    server.send(&json!([call(1, "reset-session", json!({})), call(2, "macroexpand", slow)]));
    server.send(&call(3, "reset-session", json!({})));
    let answers: Vec<_> = (0..2).map(|_| server.receive().expect("an answer")).collect();
    let batch = answers.iter().find_map(Value::as_array).expect("the answers to the batch");
    let of = |id: i64| outcome(batch.iter().chain(&answers).find(|answer| answer["id"] == id).expect("an answer"));
    assert_eq!([of(1).1, of(2).1, of(3).1], [false; 3], "{answers:?}");
    assert!(of(2).0.contains("42"), "{answers:?}");
    server.assert_works();
}

#[test]
fn reset_without_a_supervisor_clears_definitions() {
    let mut server = Server::start_with(&["--no-supervisor"]);
    server.initialize("2025-11-25");
    server.evaluate("(defun f () 7)");
    assert!(children(server.pid()).is_empty());
    assert_eq!(server.call_tool("reset-session", json!({})).0, RESET);
    assert_eq!(server.evaluate("(fboundp 'f)"), "=> NIL");
    server.assert_works();
}

// ---- Shutdown

#[test]
fn ended_server_leaves_no_worker_or_program_running() {
    // End of input, a signal, and SIGKILL of the supervisor.
    for how in ["end", "-TERM", "-INT", "-HUP", "-KILL"] {
        let mut server = Server::ready();
        let code = r#"(list (sb-ext:process-pid (sb-ext:run-program "/bin/sleep" '("1000") :wait nil))
                            (sb-ext:process-pid (sb-ext:run-program "/bin/sh" '("-c" "setsid sleep 1001 & sleep 1002") :wait nil)))"#;
        let text = server.evaluate(code);
        let mut pids: Vec<u32> =
            text.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
        assert_eq!(pids.len(), 2, "{text}");
        wait_until("the shell has children", || children(pids[1]).len() == 2);
        pids.extend(children(pids[1]));
        pids.push(worker(&server));
        server.post_running("", "(loop)", 0.0);
        match how {
            "end" => server.close(),
            signal_name => signal(server.pid(), signal_name),
        }
        // After SIGKILL of the supervisor, the worker ends the programs.
        if how != "-KILL" {
            server.end();
        }
        for pid in pids {
            wait_until("the process is gone", || !is_alive(pid));
        }
    }
}

#[test]
fn worker_killed_during_shutdown_still_answers_pending_calls() {
    let mut server = Server::ready();
    let running = server.post_running("", "(sleep 100)", 600.0);
    let pid = worker(&server);
    let descriptors = format!("/proc/{}/fd", server.pid());
    let open = || std::fs::read_dir(&descriptors).unwrap().count();
    let before = open();
    server.close();
    wait_until("the end is noticed", || open() < before);
    signal(pid, "-KILL");
    let answer = server.answer(running);
    assert!(answer["error"]["message"].as_str().unwrap().contains("shutting down"), "{answer}");
    assert_eq!(server.end().status.code(), Some(0));
}

#[test]
fn forked_child_sends_nothing_to_the_client() {
    let mut server = Server::ready();
    let fork = r#"(progn (defun f () 7) (sb-alien:alien-funcall (sb-alien:extern-alien "fork" (function sb-alien:int))) (defun g () 8) 1)"#;
    for _ in 0..5 {
        assert_eq!(server.evaluate(fork), "=> 1");
        let failing =
            r#"(progn (sb-alien:alien-funcall (sb-alien:extern-alien "fork" (function sb-alien:int))) (error "x"))"#;
        assert!(server.call_tool("evaluate-lisp", json!({"code": failing})).1);
        server.assert_works();
    }
    wait_until("the children end by themselves", || children(worker(&server)).is_empty());
    server.assert_works();
}

/// Starts a server whose home is `directory`, and each of whose workers crashes when it starts.
fn start_with_crashing_workers(directory: &Scratch) -> std::process::Child {
    directory.write(".sbclrc", ABORT);
    Command::new(binary())
        .args(["serve", "--user-init"])
        .env("HOME", &**directory)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn worker_crash_loop_ends_the_server_with_a_message() {
    let directory = Scratch::new();
    let mut child = start_with_crashing_workers(&directory);
    let mut stdin = child.stdin.take().unwrap();
    let client =
        json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "r", "version": "1"}});
    let line = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client});
    std::io::Write::write_all(&mut stdin, format!("{line}\n").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    drop(stdin);
    assert_eq!(output.status.code(), Some(1));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["id"], 1);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("lost 5 times") && message.contains("the server stops"), "{message}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("the server stops"));
}

/// The supervisor reads these requests at once, and ends its event loop after the first 1,000 requests, because it then has
/// requests to answer with the reason.
#[test]
fn every_request_of_one_read_is_answered_by_a_server_that_stops() {
    const REQUESTS: u64 = 1_400;
    let directory = Scratch::new();
    let mut child = start_with_crashing_workers(&directory);
    let mut stdin = child.stdin.take().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(log.any(|line| line.unwrap().contains("the server stops")));
    let request = |id: u64| format!("{}\n", json!({"jsonrpc": "2.0", "id": id, "method": "ping"}));
    let requests: String = (0..REQUESTS).map(request).collect();
    // A pipe has room for all of them.
    assert!(requests.len() < 64 << 10);
    stdin.write_all(requests.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    drop((stdin, log));
    assert_eq!(output.status.code(), Some(1));
    let answers = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<Value> = answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(answers.iter().all(|answer| answer["error"]["message"].as_str().unwrap().contains("the server stops")));
    let mut ids: Vec<_> = answers.iter().map(|answer| answer["id"].as_u64().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..REQUESTS).collect::<Vec<_>>());
}

// ---- Random kills

/// Kills the worker at random moments while several requests are open.
fn kill_under_load(kills: usize) {
    let mut server = Server::ready();
    server.evaluate(DEFINITIONS);
    let mut random = std::collections::hash_map::RandomState::new();
    let mut number = move |below: u64| {
        use std::hash::BuildHasher;
        let value = random.hash_one(0);
        random = std::collections::hash_map::RandomState::new();
        value % below
    };
    let mut asked = 0;
    for round in 0..kills {
        let mut open = Vec::new();
        for _ in 0..12 {
            let (tool, arguments) = match number(8) {
                0 => (
                    "evaluate-lisp",
                    json!({"code": "(progn (write-string (make-string 60000 :initial-element #\\x)) 1)"}),
                ),
                1 => ("evaluate-lisp", json!({"code": "(/ 1 0)"})),
                2 => ("list-definitions", json!({})),
                3 => ("describe-symbol", json!({"name": "car"})),
                4 => ("evaluate-lisp", json!({"code": "(sleep 1/200)"})),
                5 => ("get-backtrace", json!({})),
                6 => ("evaluate-lisp", json!({"code": "(let ((l (make-list 20000))) (sb-ext:gc) (length l))"})),
                _ => ("evaluate-lisp", json!({"code": "(+ 1 2)"})),
            };
            open.push(server.post_call(tool, arguments));
        }
        let pid = worker(&server);
        std::thread::sleep(Duration::from_micros(number(40_000)));
        signal(pid, "-KILL");
        for id in open {
            let (text, is_error) = server.outcome(id);
            asked += 1;
            if is_error {
                assert!(text.contains("[ERROR] DIVISION-BY-ZERO") || text.contains("[ERROR] IMAGE-LOST"), "{text}");
            }
        }
        let text = server.evaluate(CHECK_DEFINITIONS);
        assert!(text.contains("=> ((:FED 1) 3 \"ZOO\" T"), "round {round}: {text}");
    }
    server.assert_works();
    let end = server.finish();
    assert!(end.status.success());
    let ids: Vec<_> = end.transcript.iter().map(|message| message["id"].to_string()).collect();
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len(), "an id was answered twice");
    // Other answers: the handshake, the definitions, one evaluation per round, and the last evaluation.
    assert_eq!(ids.len(), asked + kills + 3);
}

/// `SBCL_MCP_KILLS` sets the number of kills.
#[test]
fn hundred_worker_kills_under_load_answer_every_call_once() {
    let kills = std::env::var("SBCL_MCP_KILLS").map_or(100, |kills| kills.parse().expect("a number"));
    kill_under_load(kills);
}

/// Returns the unrestored forms that list-definitions shows.
fn unrestored_forms(server: &mut Server) -> Vec<String> {
    let text = server.call_tool("list-definitions", json!({})).0;
    let lines = text.split_once("[Not Restored]\n").map_or("", |(_, rest)| rest);
    lines.lines().map(str::to_owned).collect()
}

#[test]
fn unrestored_forms_stay_listed_until_redefined_or_dropped() {
    let mut server = Server::ready();
    let file = server.home().join("unrestored");
    std::fs::write(&file, "1").unwrap();
    let needs = format!("(assert (probe-file {file:?}))");
    let whole = format!("(progn {needs} (defun whole () 1))");
    server.evaluate(&whole);
    server.evaluate(&format!("(defparameter *again* (progn {needs} 1))"));
    server.evaluate(&format!("(defparameter *dropped* (progn {needs} 1))"));
    server.evaluate("(defun f () 7)");
    std::fs::remove_file(&file).unwrap();
    kill_worker(&server);
    let text = server.evaluate("(f)");
    assert!(text.contains("Restored: 1 of 4 defining forms"), "{text}");
    let listed = unrestored_forms(&mut server);
    assert!(
        listed[0].starts_with("- (progn (assert (probe-file ") && listed[0].contains("(SIMPLE-ERROR: "),
        "{listed:?}"
    );
    assert!(listed[1].starts_with("- (defparameter *again* ") && listed[2].contains("*dropped* "), "{listed:?}");
    assert!(!server.call_tool("list-definitions", json!({"type": "functions"})).0.contains("[Not Restored]"));

    server.evaluate("(defparameter *again* 2)");
    assert_eq!(unrestored_forms(&mut server), [listed[0].as_str(), &listed[2]]);
    server.evaluate("(unintern '*dropped*)");
    assert_eq!(unrestored_forms(&mut server), listed[..1]);
    // Later reports list the form, too.
    kill_worker(&server);
    let text = server.evaluate("(f)");
    assert!(text.contains("Restored: all 3 defining forms"), "{text}");
    let earlier = text.split_once("\n  Still missing since an earlier restore:\n  ").unwrap().1;
    assert!(earlier.starts_with(&listed[0]), "{text}");
    assert_eq!(unrestored_forms(&mut server), listed[..1]);
    // A checkpoint saved before the redefinition lacks the definition.
    server.call_tool("checkpoint", json!({"action": "save", "name": "without"}));
    std::fs::write(&file, "1").unwrap();
    assert!(server.evaluate(&whole).ends_with("=> WHOLE"));
    std::fs::remove_file(&file).unwrap();
    assert_eq!(unrestored_forms(&mut server), [""; 0]);
    server.call_tool("checkpoint", json!({"action": "restore", "name": "without"}));
    assert_eq!(unrestored_forms(&mut server), listed[..1]);
    server.call_tool("reset-session", json!({}));
    assert_eq!(server.call_tool("list-definitions", json!({})).0, "No definitions in this session.");
}

#[test]
fn fmakunbound_and_delete_package_are_replayed() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 1) (defun g () 2) (defpackage :a) (fmakunbound 'f) (delete-package :a)");
    kill_worker(&server);
    let text = server.evaluate("(list (fboundp 'f) (g) (find-package :a))");
    assert!(text.contains("Restored: all 5 defining forms") && text.ends_with("=> (NIL 2 NIL)"), "{text}");
}
