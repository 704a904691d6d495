//! Failures between supervisor and worker: each costs at most an image, every request has one answer, and the server
//! keeps running.

#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::attach::RuntimeDirectory;
use crate::client::{DEADLINE, Scratch, Server, binary, call_err, call_ok, is_emulated, outcome};
use crate::processes::{children, is_alive, kill_worker, signal, stop_worker, wait_until, worker};
use crate::server_mode::Mode;
use rstest::rstest;
use serde_json::{Value, json};

/// Returns the number of answers to request `id` in a transcript.
fn count_answers(transcript: &[Value], id: i64) -> usize {
    transcript.iter().filter(|message| message.get("method").is_none() && message["id"] == id).count()
}

// ---- Harmless events that must not cost the image

/// Checks that the worker is kept for `looks` intervals of the watchdog after notifications without answers; 600
/// correspond to ten minutes.
fn assert_worker_kept_while_idle(looks: u32) {
    let interval = Duration::from_millis(50);
    let mut server = Server::start_with(&["--watch-interval", "50"]);
    server.initialize("2025-11-25");
    server.evaluate("(defvar *x* 1)");
    server.evaluate("(setf *x* 99)");
    let before = worker(&server);
    let end = Instant::now() + interval * looks;
    let mut stray = 0;
    while Instant::now() < end {
        // A client notifies now and then when its user navigates.
        server.notify("notifications/roots/list_changed", json!({}));
        stray += 1;
        server.assert_silent_for(interval * looks / 5);
    }
    assert!(stray >= 5);
    assert_eq!(server.evaluate("*x*"), "=> 99");
    assert_eq!(worker(&server), before);
}

#[test]
fn unanswered_notifications_do_not_replace_an_idle_worker() {
    assert_worker_kept_while_idle(150);
}

#[test]
#[ignore = "half a minute; a shorter one runs every time"]
fn ten_minutes_of_idleness_do_not_replace_the_worker() {
    assert_worker_kept_while_idle(600);
}

#[test]
fn worker_ignores_sigterm_sigint_sighup_and_sigusr1() {
    let mut server = Server::ready();
    server.evaluate("(defvar *x* 1)");
    server.evaluate("(setf *x* 99)");
    let before = worker(&server);
    for number in [15, 2, 1, 10] {
        let code = format!("(progn (sb-posix:kill (sb-posix:getpid) {number}) *x*)");
        assert_eq!(server.evaluate(&code), "=> 99", "{number}");
    }
    // The first shell is in its own process group, the second in the worker's.
    for code in [
        r#"(progn (sb-ext:run-program "/bin/sh" '("-c" "kill 0")) *x*)"#,
        r#"(progn (sb-alien:alien-funcall (sb-alien:extern-alien "system" (function sb-alien:int sb-alien:c-string)) "trap : TERM; kill 0") *x*)"#,
    ] {
        assert_eq!(server.evaluate(code), "=> 99", "{code}");
    }
    // The child ends while the signal's handler runs, in which SBCL once gave up one time in twelve.
    let both = r#"(sb-alien:alien-funcall (sb-alien:extern-alien "system" (function sb-alien:int sb-alien:c-string)) "trap : TERM; kill 0")"#;
    assert_eq!(server.evaluate(&format!("(progn (dotimes (i 100) {both}) *x*)")), "=> 99");
    assert_eq!(worker(&server), before);
    signal(server.pid(), "-TERM");
    assert_eq!(server.end().status.code(), Some(143));
}

// ---- Recovery state

#[test]
fn failing_code_of_34_mebibytes_keeps_its_error_after_image_loss() {
    let mut server = Server::ready();
    let code = format!("(/ 1 0) ;{}", "x".repeat(34 << 20));
    for _ in 0..3 {
        assert!(server.call_tool("evaluate-lisp", json!({"code": code})).1);
    }
    let described = call_ok(&mut server, "describe-last-error", json!({"error-id": "E1"}));
    assert!(described.len() < 10_000, "{} bytes", described.len());
    kill_worker(&server);
    assert_eq!(call_ok(&mut server, "describe-last-error", json!({"error-id": "E1"})), described);
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
}

#[test]
fn image_loss_is_noticed_by_a_server_that_was_started_with_blocked_signals() {
    let mut command = Command::new("env");
    let mut server = Server::start_command(command.arg("--block-signal").arg(binary()));
    server.initialize("2025-11-25");
    server.evaluate("(defun f () 7)");
    kill_worker(&server);
    let text = server.evaluate("(f)");
    assert!(text.contains("was killed by signal 9") && text.ends_with("=> 7"), "{text}");
}

#[test]
fn definition_too_long_for_the_recovery_log_is_reported() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 7)");
    server.evaluate(&format!("(defparameter *long* (length \"{}\"))", "\u{1}".repeat(3 << 19)));
    kill_worker(&server);
    let text = server.evaluate("(list (f) (boundp '*long*))");
    assert!(
        text.contains("Restored: 1 of 2 defining forms") && text.contains("- (defparameter *long* (length \""),
        "{text}"
    );
    // Six bytes for each control character, and two for each quotation mark.
    let reason = format!("(the form takes {} bytes as JSON; the limit is 7602176 bytes)", (9 << 20) + 35);
    assert!(text.contains(&reason), "{text}");
    // The report mentions no running evaluation.
    let lost = "Not kept: threads, open files, and values assigned to variables after their definitions. (";
    assert!(text.contains(lost), "{text}");
    assert!(text.ends_with("=> (7 NIL)"), "{text}");
    assert!(call_ok(&mut server, "list-definitions", json!({})).contains(&reason));
    server.evaluate("(defparameter *long* 1)");
    assert!(!call_ok(&mut server, "list-definitions", json!({})).contains("Not restored"));
}

#[test]
fn redefined_functions_do_not_push_live_definitions_out_of_the_recovery_log() {
    let mut server = Server::ready();
    server.evaluate("(defun keep () :kept)");
    let large = "x".repeat(4_000_000);
    for round in 0..6 {
        server.evaluate(&format!("(defun big () {large:?} {round})"));
    }
    kill_worker(&server);
    let text = server.evaluate("(list (keep) (big))");
    assert!(text.contains("Restored: all ") && text.ends_with("=> (:KEPT 5)"), "{text}");
    assert!(!call_ok(&mut server, "list-definitions", json!({})).contains("Not Restored"));

    // Live definitions that exceed the log's limit.
    for round in 0..5 {
        server.evaluate(&format!("(defvar *v{round}* (length {large:?}))"));
    }
    kill_worker(&server);
    let text = server.evaluate("(list (fboundp 'keep) (boundp '*v4*))");
    let line = "- (defun keep () :kept) (the form was dropped to save space)";
    assert!(text.contains("Not restored:") && text.contains(line) && text.ends_with("=> (NIL T)"), "{text}");
    assert!(text.len() < 5_000, "{} bytes", text.len());
    let listed = |server: &mut Server| call_ok(server, "list-definitions", json!({}));
    let text = listed(&mut server);
    assert!(text.contains("[Not Restored]") && text.contains("(defun keep () :kept)"), "{text}");
    // The form is named again after the next loss, until it is redefined.
    kill_worker(&server);
    let text = server.evaluate("1");
    assert!(text.contains("Still missing since") && text.contains(line), "{text}");
    server.evaluate("(defun keep () :again)");
    assert!(!listed(&mut server).contains("(defun keep () :kept)"));
}

#[test]
fn unrestored_form_is_listed_until_all_that_it_defined_is_defined_again_or_removed() {
    let mut server = Server::ready();
    let scratch = Scratch::new();
    let path = scratch.join("there");
    std::fs::write(&path, "").unwrap();
    server.evaluate("(defpackage :app (:use :cl)) (in-package :app)");
    server.evaluate(
        "(defmacro define-both (path) (unless (probe-file path) (error \"gone\"))
           '(progn (defun both () 1) (defun (setf both) (x) x)))",
    );
    server.evaluate(&format!("(define-both {:?})", path.to_str().unwrap()));
    std::fs::remove_file(&path).unwrap();
    kill_worker(&server);
    let text = server.evaluate("1");
    assert!(text.contains("- (define-both "), "{text}");
    let is_listed = |server: &mut Server| call_ok(server, "list-definitions", json!({})).contains("(define-both ");
    assert!(is_listed(&mut server));
    // Another operator redefines the function, from another package.
    server.evaluate("(in-package :cl-user) (setf (fdefinition 'app::both) (lambda () 2))");
    assert!(is_listed(&mut server));
    server.evaluate("(fmakunbound '(setf app::both))");
    assert!(!is_listed(&mut server));
    kill_worker(&server);
    let text = server.evaluate("1");
    assert!(!text.contains("define-both (") && !text.contains("Still missing since"), "{text}");
}

/// A method replaces no other method of its generic function, and a symbol macro replaces no macro.
#[test]
fn lost_method_or_macro_is_listed_although_another_method_or_symbol_macro_follows() {
    for (lost, later, further) in [
        (
            "(defmethod m ((x (eql (elt *keys* 0)))) :special)",
            "(defmethod m ((x string)) :general)",
            "(progn (defmethod m ((x list)) :further))",
        ),
        (
            "(defmacro k () (list 'quote #.(elt *keys* 0)))",
            "(define-symbol-macro k :other)",
            "(define-symbol-macro k :further)",
        ),
    ] {
        let mut server = Server::ready();
        for code in ["(defvar *keys* nil)", "(setf *keys* (list :a))", lost, later] {
            server.evaluate(code);
        }
        kill_worker(&server);
        let text = server.evaluate("1");
        assert!(text.contains("Restored: 2 of 3 defining forms. Not restored:"), "{text}");
        let is_listed = |server: &mut Server| {
            call_ok(server, "list-definitions", json!({})).contains(&format!("\n- {}", &lost[..20]))
        };
        assert!(is_listed(&mut server), "{lost}");
        server.evaluate(further);
        assert!(is_listed(&mut server), "{lost}");
        server.evaluate("(setf *keys* (list :a))");
        server.evaluate(lost);
        assert!(!is_listed(&mut server), "{lost}");
    }
}

#[test]
fn definition_made_while_a_form_was_read_is_listed_when_the_form_could_not_be_read() {
    let mut server = Server::ready();
    server.evaluate("(defun kept () 1)");
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": "(list #.(defun read-time () 2) #<x>)"}));
    assert!(text.contains("READER-ERROR"), "{text}");
    kill_worker(&server);
    let text = server.evaluate("(list (kept) (fboundp 'read-time))");
    assert!(text.contains("Restored: 1 of 2 defining forms. Not restored:"), "{text}");
    assert!(text.contains("- (list #.(defun read-time () 2) #"), "{text}");
    assert!(text.contains("(the form failed after defining FUNCTION COMMON-LISP-USER::READ-TIME)"), "{text}");
    assert!(text.ends_with("=> (1 NIL)"), "{text}");
}

#[test]
fn definition_made_while_a_value_was_printed_is_restored() {
    let mut server = Server::ready();
    server.evaluate("(defclass noisy () ())");
    server.evaluate(
        "(defmethod print-object ((object noisy) stream)
           (unless (fboundp 'made) (setf (fdefinition 'made) (lambda () 7)))
           (write-string \"noisy\" stream))",
    );
    assert_eq!(server.evaluate("(list (make-instance 'noisy))"), "=> (noisy)");
    // Printing the value again defines nothing, so this form is not repeated.
    assert_eq!(server.evaluate("(make-instance 'noisy)"), "=> noisy");
    kill_worker(&server);
    let text = server.evaluate("(made)");
    assert!(text.contains("Restored: all 3 defining forms.") && text.ends_with("=> 7"), "{text}");
}

#[test]
fn definition_is_restored_when_an_interruption_comes_just_after_it() {
    let mut server = Server::ready();
    // The interruption comes when the form has been evaluated, and is about to be recorded.
    let arm = "(sb-int:encapsulate 'sbcl-host::push-defining-form 'interrupt
                 (lambda (function &rest arguments)
                   (when (search \"JUST-MADE\" (prin1-to-string arguments))
                     (sb-int:unencapsulate 'sbcl-host::push-defining-form 'interrupt)
                     (sb-thread:interrupt-thread sb-thread:*current-thread* (lambda () (invoke-restart 'abort))))
                   (apply function arguments)))";
    server.evaluate(arm);
    let failed = call_err(&mut server, "evaluate-lisp", json!({"code": "(defun just-made () 7)"}));
    assert!(failed.contains("The code invoked the restart ABORT"), "{failed}");
    assert_eq!(server.evaluate("(just-made)"), "=> 7");
    kill_worker(&server);
    let text = server.evaluate("(just-made)");
    assert!(text.ends_with("=> 7"), "{text}");
}

// ---- Cancelled requests

/// Starts a server whose replay lasts while the file `gate` exists: a form writes `marker` and then waits.
fn server_with_slow_replay(gate: &Path, marker: &Path) -> Server {
    let mut server = Server::ready();
    server.evaluate(&format!(
        "(progn (with-open-file (s {:?} :direction :output :if-exists :supersede)) \
         (loop while (probe-file {:?}) do (sleep 0.01)) (defun f () 7))",
        marker, gate
    ));
    std::fs::remove_file(marker).unwrap();
    std::fs::write(gate, "").unwrap();
    server
}

#[test]
fn call_cancelled_during_a_restore_sends_no_answer() {
    let scratch = Scratch::new();
    let (gate, marker) = (scratch.join("gate"), scratch.join("marker"));
    let mut server = server_with_slow_replay(&gate, &marker);
    let lost = server.post_running("", "(sleep 1000)", 0.0);
    let queued = server.post_call("evaluate-lisp", json!({"code": "1"}));
    let behind = server.post_call("evaluate-lisp", json!({"code": "(f)"}));
    kill_worker(&server);
    wait_until("the session is being restored", || marker.exists());
    for id in [lost, queued] {
        server.notify("notifications/cancelled", json!({"requestId": id}));
    }
    // The ids can be used again.
    let again = json!({"jsonrpc": "2.0", "id": queued, "method": "ping"});
    server.send(&again);
    // The ping is answered during the replay, after everything sent before it has been read.
    assert_eq!(server.answer(queued)["result"], json!({}));
    std::fs::remove_file(&gate).unwrap();
    let text = server.outcome(behind).0;
    assert!(text.starts_with("[notice]\nThe Lisp image was killed by signal 9") && text.ends_with("=> 7"), "{text}");
    server.assert_works();
    let transcript = server.finish().transcript;
    assert_eq!((count_answers(&transcript, lost), count_answers(&transcript, queued)), (0, 1));
}

#[test]
fn cancellation_unread_by_a_killed_worker_still_sends_no_answer() {
    let mut server = Server::start();
    server.initialize("2025-03-26");
    server.evaluate("(defun f () 7)");
    let lost = server.post_running("", "(sleep 1000)", 0.0);
    stop_worker(&server);
    let call = |id: i64| json!({"jsonrpc": "2.0", "id": id, "method": "ping"});
    server.send(&json!([call(1), call(2)]));
    server.notify("notifications/cancelled", json!({"requestId": lost}));
    server.notify("notifications/cancelled", json!({"requestId": 1}));
    kill_worker(&server);
    let text = server.evaluate("(f)");
    assert!(text.starts_with("[notice]\nThe Lisp image was") && text.ends_with("=> 7"), "{text}");
    let transcript = server.finish().transcript;
    assert_eq!(count_answers(&transcript, lost), 0);
    let batch = transcript.iter().find_map(Value::as_array).unwrap();
    assert_eq!(batch.iter().map(|answer| &answer["id"]).collect::<Vec<_>>(), [2]);
}

#[test]
fn describe_last_error_reports_a_cancellation_that_replaced_the_image() {
    let scratch = Scratch::new();
    let (gate, marker) = (scratch.join("gate"), scratch.join("marker"));
    let mut server = server_with_slow_replay(&gate, &marker);
    let id = server.post_running("(sb-sys:without-interrupts", "(loop))", 0.0);
    server.notify("notifications/cancelled", json!({"requestId": id}));
    let text = call_ok(&mut server, "describe-last-error", json!({}));
    assert!(
        text.starts_with("[notice]\nEvaluation ") && text.contains(" was cancelled and has not ended yet: "),
        "{text}"
    );
    wait_until("the session is being restored", || marker.exists());
    let question = server.post_call("describe-last-error", json!({}));
    let late = server.post_call("get-backtrace", json!({"max-frames": 3}));
    // Other tools answer meanwhile.
    assert!(call_ok(&mut server, "configure-limits", json!({})).contains("timeout"));
    std::fs::remove_file(&gate).unwrap();
    let text = server.outcome(question).0;
    assert!(text.starts_with("Error: CANCELLED") && text.contains("did not respond to an interrupt"), "{text}");
    let text = server.outcome(late).0;
    assert!(text.contains("CANCELLED"), "{text}");
}

#[test]
fn definitions_made_in_the_debugger_are_replayed_without_the_held_form() {
    let scratch = Scratch::new();
    let paid = scratch.join("paid");
    let mut server = Server::ready();
    server.evaluate(&format!(
        "(defun pay () (with-open-file (s {:?} :direction :output :if-exists :append :if-does-not-exist :create) \
         (write-line \"paid\" s)) (settle))",
        paid
    ));
    let (text, failed) = server.call_tool("evaluate-lisp", json!({"code": "(pay)", "on-error": "debug"}));
    assert!(failed && text.starts_with("[ERROR] UNDEFINED-FUNCTION"), "{text}");
    call_ok(&mut server, "eval-in-frame", json!({"frame": 0, "code": "(defun settle () :settled)"}));
    assert_eq!(call_ok(&mut server, "invoke-restart", json!({"restart": "continue"})), "=> :SETTLED");
    for _ in 0..2 {
        kill_worker(&server);
        let text = server.evaluate("(settle)");
        assert!(text.contains("Restored: all 2 defining forms.") && text.ends_with("=> :SETTLED"), "{text}");
    }
    assert_eq!(std::fs::read_to_string(&paid).unwrap(), "paid\n");
    // A form that makes a definition is replayed as a whole, with its other effects.
    let text = "(progn (defvar *account* 1) (incf *account*) (settle))";
    server.evaluate(text);
    kill_worker(&server);
    assert!(server.evaluate("*account*").ends_with("=> 2"));
}

#[test]
fn feature_added_while_a_form_was_held_is_restored_without_the_held_form() {
    let scratch = Scratch::new();
    let paid = scratch.join("paid");
    let mut server = Server::ready();
    let held = format!(
        "(progn (with-open-file (s {paid:?} :direction :output :if-exists :append :if-does-not-exist :create)
                  (write-line \"paid\" s))
                (let ((*features* (cons :bound *features*))) (cerror \"Go on.\" \"Stop.\"))
                :paid)"
    );
    assert!(server.call_tool("evaluate-lisp", json!({"code": held, "on-error": "debug"})).1);
    // The thread of the held form has a binding of *features*, so another thread changes the global value.
    let change = "(sb-thread:join-thread (sb-thread:make-thread (lambda () (push :mine *features*) :pushed)))";
    assert!(call_ok(&mut server, "eval-in-frame", json!({"frame": 0, "code": change})).ends_with("=> :PUSHED"));
    assert_eq!(call_ok(&mut server, "invoke-restart", json!({"restart": "continue"})), "=> :PAID");
    kill_worker(&server);
    let text = server.evaluate("(list (count :mine *features*) (count :bound *features*))");
    assert!(text.contains("Restored: the one defining form.") && text.ends_with("=> (1 0)"), "{text}");
    assert_eq!(std::fs::read_to_string(&paid).unwrap(), "paid\n");
}

#[test]
fn feature_added_before_a_form_was_held_is_restored_with_the_resumed_form() {
    let scratch = Scratch::new();
    let resumed = scratch.join("resumed");
    let mut server = Server::ready();
    let held = format!(
        "(progn (push :mine *features*) (unless (probe-file {resumed:?}) (cerror \"Go on.\" \"Stop.\")) :resumed)"
    );
    assert!(server.call_tool("evaluate-lisp", json!({"code": held, "on-error": "debug"})).1);
    std::fs::write(&resumed, "").unwrap();
    assert_eq!(call_ok(&mut server, "invoke-restart", json!({"restart": "continue"})), "=> :RESUMED");
    kill_worker(&server);
    let text = server.evaluate("(count :mine *features*)");
    assert!(text.contains("Restored: the one defining form.") && text.ends_with("=> 1"), "{text}");
}

// ---- Workers that fail to start

/// Starts a server over new pipes.
fn spawn_server(arguments: &[&str], home: Option<&std::path::Path>) -> Child {
    let mut command = Command::new(binary());
    command.args(arguments).envs(home.map(|home| ("HOME", home)));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn request(id: i64, method: &str, params: &Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string() + "\n"
}

fn opening() -> Value {
    json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "r", "version": "1"}})
}

fn lines(bytes: &[u8]) -> Vec<Value> {
    bytes
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

#[test]
fn failed_start_answers_every_pending_request_with_the_reason() {
    let mut child = spawn_server(&["--heap", "1M"], None);
    let mut stdin = child.stdin.take().unwrap();
    let requests = [request(1, "initialize", &opening()), request(2, "tools/list", &json!({}))].concat();
    stdin.write_all(requests.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let answers = lines(&output.stdout);
    assert_eq!(answers.iter().map(|answer| answer["id"].clone()).collect::<Vec<_>>(), [json!(1), json!(2)]);
    for answer in &answers {
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("cannot start: heap 1M is out of range; allowed: 128M to 64G"), "{message}");
    }
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn crash_loop_writing_to_the_pipes_answers_each_request_once() {
    let home = Scratch::new();
    let init =
        "(loop for fd from 3 to 1023 do (sb-unix:unix-write fd (coerce #(1 2 3) '(vector (unsigned-byte 8))) 0 3))";
    std::fs::write(home.join(".sbclrc"), init).unwrap();
    let mut child = spawn_server(&["--user-init"], Some(&home));
    let mut stdin = child.stdin.take().unwrap();
    let requests: String = (1..=5).map(|id| request(id, "initialize", &opening())).collect();
    stdin.write_all(requests.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let answers = lines(&output.stdout);
    assert_eq!(answers.iter().map(|answer| answer["id"].as_i64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    for answer in &answers {
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("lost 5 times")
                && message.contains("code had written to a file descriptor that the server uses"),
            "{message}"
        );
    }
    assert_eq!(output.status.code(), Some(1));
}

/// Limits the number of descriptors of the supervisor.
fn limit_descriptors(server: &Server, limit: u64) {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = Pid::from_raw(i32::try_from(server.pid()).unwrap());
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(1024) }).unwrap();
}

#[test]
fn worker_start_is_retried_until_descriptors_are_available() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 7)");
    limit_descriptors(&server, 8);
    kill_worker(&server);
    wait_until("there is no worker", || children(server.pid()).is_empty());
    let waits = server.post_call("evaluate-lisp", json!({"code": "(f)"}));
    limit_descriptors(&server, 1024);
    assert!(server.outcome(waits).0.ends_with("=> 7"));
    server.assert_works();
}

#[test]
fn failed_worker_start_answers_the_lost_call_and_ends_the_server() {
    let mut server = Server::ready();
    let waits = server.post_running("", "(sleep 1000)", 0.0);
    limit_descriptors(&server, 8);
    kill_worker(&server);
    let message = server.answer(waits)["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("could not be started") && message.contains("Too many open files"), "{message}");
    let end = server.end();
    assert_eq!(end.status.code(), Some(1));
    assert_eq!(count_answers(&end.transcript, waits), 1);
}

// ---- A client that does not read stderr

/// A server and a client that never reads the server's stderr.
struct InattentiveClient {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    requests: i64,
}

impl InattentiveClient {
    /// Starts a server with this stderr, and performs the handshake.
    fn start(arguments: &[&str], stderr: impl Into<Stdio>) -> Self {
        let mut command = Command::new(binary());
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut client = Self { child, stdin, stdout, requests: 0 };
        client.exchange("initialize", &opening());
        let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string() + "\n";
        client.stdin.write_all(initialized.as_bytes()).unwrap();
        client
    }

    /// Sends a request, and returns the answer as text.
    fn exchange(&mut self, method: &str, params: &Value) -> String {
        self.requests += 1;
        self.stdin.write_all(request(self.requests, method, params).as_bytes()).unwrap();
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(answer["id"], self.requests, "{answer}");
        answer.to_string()
    }

    fn evaluate(&mut self, code: &str) -> String {
        self.exchange("tools/call", &json!({"name": "evaluate-lisp", "arguments": {"code": code}}))
    }
}

#[test]
fn full_stderr_pipe_does_not_block_recovery_or_exit() {
    for ending in ["end", "-TERM"] {
        let mut client = InattentiveClient::start(&[], Stdio::piped());
        let fill = "(let ((fd (sb-unix:unix-open \"/proc/self/fd/2\" (logior sb-unix:o_wronly #o4000) 0)) \
                          (text (make-array 4096 :element-type '(unsigned-byte 8) :initial-element 120))) \
                      (defun f () 7) \
                      (loop for size in '(4096 1) do (loop while (sb-unix:unix-write fd text 0 size))) :full)";
        let text = client.evaluate(fill);
        assert!(text.contains(":FULL"), "{text}");
        signal(children(client.child.id())[0], "-KILL");
        client.exchange("ping", &json!({}));
        let text = client.evaluate("(f)");
        assert!(text.contains("=> 7"), "{text}");
        let InattentiveClient { mut child, stdin, .. } = client;
        match ending {
            "end" => drop(stdin),
            name => signal(child.id(), name),
        }
        let status = child.wait().unwrap().code();
        assert_eq!(status, Some(if ending == "end" { 0 } else { 143 }));
    }
}

/// SBCL's runtime prints in signal handlers, where a thread that waits can neither be interrupted nor stopped. Many clients
/// connect stderr with a socket, which has room for only a few hundred such messages.
#[rstest]
fn messages_of_the_runtime_do_not_wait_for_a_reader_of_stderr(
    #[values(Mode::Supervised, Mode::Plain)] mode: Mode,
    #[values(true, false)] is_socket: bool,
) {
    let (_reader, writer): (OwnedFd, OwnedFd) = if is_socket {
        let (reader, writer) = UnixStream::pair().unwrap();
        (reader.into(), writer.into())
    } else {
        let (reader, writer) = std::io::pipe().unwrap();
        (reader.into(), writer.into())
    };
    let mut client = InattentiveClient::start(&[mode.options(), &["--control-stack", "2M"]].concat(), writer);
    client.evaluate("(defvar *kept* 1)");
    client.evaluate("(setf *kept* 2)");
    let exhaust =
        "(dotimes (i 2000) (handler-case (labels ((deep () (1+ (deep)))) (deep)) (storage-condition () nil)))";
    let text = client.evaluate(exhaust);
    assert!(text.contains("=> NIL"), "{text}");
    let text = client.evaluate("*kept*");
    assert!(text.contains("=> 2"), "{text}");
    let InattentiveClient { mut child, stdin, .. } = client;
    drop(stdin);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

// ---- Lisp code that uses the server's descriptors

#[test]
fn stray_writes_to_low_descriptors_do_not_harm_the_worker() {
    let mut server = Server::ready();
    server.evaluate("(defvar *x* 1)");
    server.evaluate("(setf *x* 99)");
    let before = worker(&server);
    let strays =
        "(loop for fd from 3 to 400 do (sb-unix:unix-write fd (coerce #(1 2 3) '(vector (unsigned-byte 8))) 0 3))";
    server.evaluate(strays);
    assert_eq!(server.evaluate("*x*"), "=> 99");
    assert_eq!(worker(&server), before);
}

/// Defines a function that writes a frame to the supervisor, which no code does by accident.
const FORGE: &str = r#"
(defun forge (kind line length &optional (payload ""))
  (let ((frame (concatenate '(vector (unsigned-byte 8)) (list #xfe 83 77 kind)
                            (loop for i below 4 collect (ldb (byte 8 (* 8 i)) length))
                            (loop for i below 8 collect (ldb (byte 8 (* 8 i)) line))
                            (map 'list #'char-code payload))))
    (loop for fd from 400 to 1023
          do (handler-case
                 (when (and (= 1 (logand 3 (sb-posix:fcntl fd sb-posix:f-getfl)))
                            (= #o010000 (logand #o170000 (sb-posix:stat-mode (sb-posix:fstat fd)))))
                   (sb-unix:unix-write fd (coerce frame '(simple-array (unsigned-byte 8) (*))) 0 (length frame)))
               (error ())))))
(defun event (json) (forge 4 0 (length json) json))"#;

#[rstest]
#[case::answer_to_an_unknown_request("(forge 1 1000000 3 (format nil \"{}~%\"))")]
#[case::an_answer_that_is_no_line("(forge 1 1000000 2 \"{}\")")]
#[case::length_over_the_limit("(forge 1 1 (ash 1 30))")]
#[case::length_over_that_of_the_data("(forge 1 1 (ash 1 27))")]
#[case::an_unknown_kind("(forge 99 1 0)")]
#[case::a_handshake_without_end(
    r#"(dotimes (i 100) (event "{\"changed\":{\"handshake\":{\"call\":0,\"message\":\"null\"}}}"))"#
)]
#[case::readiness(r#"(event "\"ready\"")"#)]
#[case::the_end_of_a_replay(r#"(event "{\"restored\":{\"failed\":[[9,\"x\"]]}}")"#)]
#[case::reset_for_an_unknown_request(r#"(event "{\"reset_requested\":{\"job\":1000000,\"notices\":[]}}")"#)]
#[case::a_stuck_evaluation(r#"(event "{\"stuck\":{\"outcome\":null,\"why\":\"Unmoved\"}}")"#)]
#[case::end_without_a_reason(r#"(event "{\"leaving\":{\"status\":3,\"reason\":null}}")"#)]
#[case::end_with_a_reason(r#"(event "{\"leaving\":{\"status\":3,\"reason\":\"reason\"}}")"#)]
fn forged_frames_to_the_supervisor_lose_at_most_the_image(#[case] code: &str) {
    // In QEMU, a worker that starts while others run can look stalled for more than 50 ms.
    let mut server = Server::start_with(&["--watch-interval", if is_emulated() { "500" } else { "50" }]);
    server.initialize("2025-11-25");
    server.evaluate(FORGE);
    // The frame is written while the evaluation thread sleeps.
    server.evaluate(&format!("(sb-thread:make-thread (lambda () (sleep 0.1) {code}))"));
    let text = server.call_tool("evaluate-lisp", json!({"code": "(sleep 0.5)"})).0;
    assert!(text.contains("=> NIL") || text.contains("IMAGE-LOST"), "{text}");
    let text = server.evaluate("(not (null (fboundp 'forge)))");
    assert!(text.ends_with("=> T"), "{text}");
    server.assert_works();
    let end = server.finish();
    assert!(end.status.success(), "{}", end.stderr);
}

/// The supervisor, which no sandbox confines, writes the definitions that a core contains next to the core.
#[test]
fn forged_report_of_a_save_writes_no_file_elsewhere() {
    let mut server = Server::ready();
    server.evaluate(FORGE);
    let elsewhere = server.home().join("0123456789abcdef.core");
    let event = json!({"changed": {"saving": {"file": elsewhere}}}).to_string();
    let code = format!("(progn (event {event:?}) (sleep 60))");
    let text = server.call_tool("evaluate-lisp", json!({"code": code})).0;
    assert!(text.contains("IMAGE-LOST"), "{text}");
    assert!(!elsewhere.with_extension("forms").exists());
    server.assert_works();
}

/// For 20 seconds, forked children of a killed worker write valid frames to the supervisor's pipe as fast as it reads them.
#[test]
fn children_of_a_killed_worker_that_write_to_the_supervisor_delay_no_request() {
    let mut server = Server::ready();
    server.evaluate(
        r#"(defun flood (fd)
             ;; A forked child cannot collect garbage, so it does not allocate.
             (let ((frames (make-array 4096 :element-type '(unsigned-byte 8) :initial-element 0)))
               (dotimes (i 256) (replace frames #(#xfe 83 77 5) :start1 (* 16 i)))
               (flet ((now () (sb-alien:alien-funcall
                               (sb-alien:extern-alien "time" (function sb-alien:long sb-alien:long)) 0)))
                 (sb-sys:with-pinned-objects (frames)
                   (dotimes (i 4)
                     (when (zerop (sb-alien:alien-funcall (sb-alien:extern-alien "fork" (function sb-alien:int))))
                       (loop with end of-type fixnum = (+ (now) 20)
                             until (> (now) end)
                             do (sb-alien:alien-funcall
                                 (sb-alien:extern-alien "write" (function sb-alien:long sb-alien:int
                                                                          sb-sys:system-area-pointer sb-alien:long))
                                 fd (sb-sys:vector-sap frames) 4096))
                       (sb-alien:alien-funcall
                        (sb-alien:extern-alien "_exit" (function sb-alien:void sb-alien:int)) 0)))))))"#,
    );
    let code = "(progn
                  (loop for fd from 400 to 1023
                        when (ignore-errors
                              (and (= 1 (logand 3 (sb-posix:fcntl fd sb-posix:f-getfl)))
                                   (= #o010000 (logand #o170000 (sb-posix:stat-mode (sb-posix:fstat fd))))))
                          do (flood fd))
                  (sb-posix:kill (sb-posix:getpid) 9))";
    let call = server.post_call("evaluate-lisp", json!({"code": code}));
    std::thread::sleep(Duration::from_millis(500));
    let begin = Instant::now();
    server.request("ping", json!({}));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(server.outcome(call).0.contains("IMAGE-LOST"));
    server.assert_works();
}

/// An unreadable event changes nothing: unreadable limits, for example, are not replaced by defaults.
#[test]
fn events_that_cannot_be_read_are_reported_and_change_nothing() {
    let mut server = Server::ready();
    call_ok(&mut server, "configure-limits", json!({"timeout": 77}));
    server.evaluate(FORGE);
    // The notice comes with this answer or a later one.
    let mut text = server.evaluate("(event \"null\")");
    wait_until("the client gets the notice", || {
        let is_told = text.contains("The supervisor could not read a report from the Lisp process (");
        if !is_told {
            text = server.evaluate("1");
        }
        is_told
    });
    assert!(text.contains("the new process may lack a recent change, such as a definition: "), "{text}");
    // One notice covers all unreadable events.
    for payload in ["{}", "[1", r#"{\"changed\":{\"limits\":null}}"#, r#"{\"changed\":{\"defined\":{}}}"#] {
        assert!(server.evaluate(&format!("(dotimes (i 100) (event \"{payload}\"))")).ends_with("=> NIL"));
    }
    kill_worker(&server);
    let text = server.evaluate("(not (null (fboundp 'event)))");
    assert!(text.contains("Restored: all 2 defining forms") && text.ends_with("=> T"), "{text}");
    assert!(call_ok(&mut server, "configure-limits", json!({})).contains("77"));
    let end = server.finish();
    assert_eq!(end.stderr.matches("could not read a report from the image: ").count(), 1, "{}", end.stderr);
    let notices = end
        .transcript
        .iter()
        .filter(|message| message.to_string().contains("could not read a report from the Lisp process"));
    assert_eq!(notices.count(), 1);
}

/// Returns the worker's descriptor of the pipe to which the supervisor writes requests.
fn requests_pipe(server: &Server) -> i32 {
    let worker = worker(server);
    let descriptors = |pid: u32| {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        entries
            .filter_map(|entry| Some((entry.file_name(), std::fs::read_link(entry.path()).ok()?)))
            .collect::<Vec<_>>()
    };
    let is_read = |number: &std::ffi::OsStr| {
        let about = std::fs::read_to_string(format!("/proc/{worker}/fdinfo/{}", number.display())).unwrap();
        about.lines().any(|line| line.starts_with("flags:") && line.ends_with('0'))
    };
    let supervisors = descriptors(server.pid());
    let is_shared = |link: &Path| supervisors.iter().any(|(_, other)| other == link);
    let is_it = |(number, link): &(std::ffi::OsString, std::path::PathBuf)| {
        link.to_string_lossy().starts_with("pipe:[") && is_shared(link) && is_read(number)
    };
    let (number, _) = descriptors(worker).into_iter().find(is_it).expect("the pipe");
    number.to_str().unwrap().parse().unwrap()
}

#[test]
fn request_that_lisp_code_reads_from_the_pipe_is_answered_while_others_evaluate() {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let (mut victim, mut other) = (runtime.attach(&server), runtime.attach(&server));
    let (pipe, marker) = (requests_pipe(&server), runtime.directory.join("marker"));
    server.evaluate(&format!(
        "(sb-thread:make-thread
           (lambda ()
             (let ((bytes (make-array 10000 :element-type '(unsigned-byte 8))))
               (sb-sys:with-pinned-objects (bytes)
                 (loop (let ((read (sb-unix:unix-read {pipe} (sb-sys:vector-sap bytes) 10000)))
                         (when (and read (plusp read))
                           (with-open-file (s {marker:?} :direction :output))
                           (return))))))))"
    ));
    let (answer, answers) = channel();
    let (ask, asked) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for () in asked {
                let id = victim.post_call("evaluate-lisp", json!({"code": "(+ 20 22)"}));
                let _ = answer.send(outcome(&victim.answer(id)).0);
            }
        });
        ask.send(()).unwrap();
        wait_until("the code has read a request", || {
            if answers.try_recv().is_ok() {
                ask.send(()).unwrap();
            }
            marker.exists()
        });
        drop(ask);
        let end = Instant::now() + DEADLINE / 2;
        let text = loop {
            match answers.try_recv() {
                Ok(text) => break text,
                Err(_) => assert!(Instant::now() < end, "the request is not answered"),
            }
            other.call("evaluate-lisp", json!({"code": "(+ 1 1)"}));
        };
        // The request had not begun in the lost image.
        assert!(text.ends_with("=> 42"), "{text}");
    });
    assert!(other.evaluate("(+ 1 2)").ends_with("=> 3"));
    let text = server.evaluate("(+ 1 2)");
    assert!(
        text.contains("lost a request because code had read from a file descriptor that the server uses"),
        "{text}"
    );
}

#[test]
fn request_at_which_two_workers_stopped_is_answered_and_not_repeated() {
    let mut server = Server::start_with(&["--watch-interval", "100"]);
    server.initialize("2025-11-25");
    // SIGSTOP. Reading the definition again stops nothing; expanding the macro stops the worker.
    server.evaluate(
        "(defun f () 42)
         (defmacro stop ()
           (sb-alien:alien-funcall (sb-alien:extern-alien \"kill\" (function sb-alien:int sb-alien:int sb-alien:int))
                                   (sb-posix:getpid) 19)
           1)",
    );
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(stop)"}));
    assert!(failed.contains("Two images were lost during this request, so it is not retried."), "{failed}");
    let text = server.evaluate("(f)");
    assert!(text.contains("was stopped by a signal") && text.ends_with("=> 42"), "{text}");
    let end = server.finish();
    assert_eq!(end.stderr.matches("the Lisp image was stopped by a signal").count(), 2, "{}", end.stderr);
}

#[test]
fn forked_child_that_prints_exits() {
    let mut server = Server::ready();
    let fork = r#"(progn (sb-alien:alien-funcall (sb-alien:extern-alien "fork" (function sb-alien:int)))
                         (dotimes (i 100) (print i)) (warn "x") 1)"#;
    // The code also forks in a thread that it creates.
    let thread = format!("(sb-thread:join-thread (sb-thread:make-thread (lambda () {fork})))");
    for _ in 0..5 {
        assert!(server.evaluate(fork).ends_with("=> 1"));
        assert!(server.evaluate(&thread).ends_with("=> 1"));
    }
    wait_until("the children end by themselves", || children(worker(&server)).is_empty());
    assert!(is_alive(worker(&server)));
}

#[test]
fn forked_child_allocates_though_another_thread_was_ending() {
    let mut server = Server::ready();
    // An ended thread's last allocation region is released when the thread is joined.
    let fork = r#"(dotimes (i 100)
                    (sb-thread:join-thread (sb-thread:make-thread (lambda () (loop repeat 3000 collect 1))))
                    (when (eql 0 (sb-alien:alien-funcall (sb-alien:extern-alien "fork" (function sb-alien:int))))
                      (loop repeat 50000 collect 1)
                      (sb-alien:alien-funcall (sb-alien:extern-alien "_exit" (function sb-alien:void sb-alien:int)) 0)))"#;
    for _ in 0..6 {
        // The children have no thread that could collect garbage.
        assert_eq!(server.evaluate("(gc)"), "=> NIL");
        assert_eq!(server.evaluate(fork), "=> NIL");
    }
    wait_until("the children end by themselves", || children(worker(&server)).is_empty());
    assert!(is_alive(worker(&server)));
}

// ---- Completeness of the replay

#[test]
fn replayed_form_is_skipped_when_its_package_is_missing() {
    let mut server = Server::ready();
    let scratch = Scratch::new();
    let path = scratch.join("package.lisp");
    std::fs::write(&path, "(defpackage :app (:use :cl))").unwrap();
    server.evaluate(&format!("(load {:?})", path.to_str().unwrap()));
    server.evaluate("(defun run () :the-users-own)");
    server.evaluate("(in-package :app)");
    server.evaluate("(defun run () :of-app)");
    server.evaluate("(in-package :cl-user)");
    std::fs::remove_file(&path).unwrap();
    kill_worker(&server);
    let text = server.evaluate("(list (run) (package-name *package*))");
    assert!(text.ends_with("=> (:THE-USERS-OWN \"COMMON-LISP-USER\")"), "{text}");
    assert!(text.contains("- (defun run () :of-app) ("), "{text}");
    assert!(text.contains("The package APP, in which the form was read, does not exist."), "{text}");
}

#[test]
fn forms_evaluated_after_the_current_package_was_renamed_are_restored() {
    let mut server = Server::ready();
    server.evaluate("(defpackage :old (:use :cl)) (in-package :old) (defun keep () 1)");
    server.evaluate("(rename-package :old :new)");
    server.evaluate("(defun later () (keep))");
    let (text, failed) = server.call_tool("evaluate-lisp", json!({"code": "(no-such-function)", "on-error": "debug"}));
    assert!(failed, "{text}");
    let code = "(rename-package :new :newer) (defun in-frame () (later))";
    assert!(call_ok(&mut server, "eval-in-frame", json!({"frame": 0, "code": code})).ends_with("=> IN-FRAME"));
    call_ok(&mut server, "abort-evaluation", json!({}));
    kill_worker(&server);
    let text = server.evaluate("(list (package-name *package*) (find-package :old) (find-package :new) (in-frame))");
    assert!(text.contains("Restored: all 7 defining forms.") && text.ends_with("=> (\"NEWER\" NIL NIL 1)"), "{text}");
}

#[test]
fn forms_evaluated_after_the_current_package_was_deleted_are_restored() {
    let mut server = Server::ready();
    server.evaluate("(defpackage :doomed (:use :cl)) (in-package :doomed)");
    server.evaluate("(delete-package :doomed) (defun later () 1)");
    kill_worker(&server);
    let text = server.evaluate("(list (package-name *package*) (find-package :doomed) (later))");
    assert!(
        text.contains("Restored: all 4 defining forms.") && text.ends_with("=> (\"COMMON-LISP-USER\" NIL 1)"),
        "{text}"
    );
}

#[test]
fn replayed_form_is_skipped_when_its_defpackage_was_not_kept() {
    let mut server = Server::ready();
    server.evaluate("(defpackage :app (:use :cl))");
    // Together these exceed the limit.
    for number in 0..3 {
        server.evaluate(&format!("(defparameter *long-{number}* (length \"{}\"))", "x".repeat(6 << 20)));
    }
    server.evaluate("(defun run () :the-users-own)");
    server.evaluate("(in-package :app) (defun run () :of-app)");
    server.evaluate("(cl:in-package :cl-user)");
    kill_worker(&server);
    let text = server.evaluate("(list (run) *long-2*)");
    assert!(text.ends_with(&format!("=> (:THE-USERS-OWN {})", 6 << 20)), "{text}");
    assert!(text.contains("- (defun run () :of-app) ("), "{text}");
    assert!(text.contains("- (defpackage :app (:use :cl)) (the form was dropped to save space)"), "{text}");
    assert!(text.contains("The package APP, in which the form was read, does not exist."), "{text}");
}

/// Not every package uses COMMON-LISP.
#[test]
fn loaded_systems_are_restored_in_a_package_without_common_lisp() {
    let mut server = Server::ready();
    let scratch = Scratch::new();
    let path = scratch.join("without-cl");
    std::fs::create_dir_all(path.join("a/b")).unwrap();
    std::fs::write(path.join("without-cl.asd"), "(defsystem \"without-cl\")").unwrap();
    std::fs::write(path.join("a/without-cl-a.asd"), "(defsystem \"without-cl-a\")").unwrap();
    std::fs::write(path.join("file.lisp"), "(cl:defun f () 7)").unwrap();
    server.evaluate("(defpackage :without-cl (:use))");
    server.evaluate("(cl:in-package :without-cl)");
    call_ok(&mut server, "load-system", json!({"system": "without-cl", "directory": path}));
    call_ok(&mut server, "load-system", json!({"path": path.join("a/without-cl-a.asd"), "force": "self"}));
    call_ok(&mut server, "load-system", json!({"path": path.join("file.lisp")}));
    kill_worker(&server);
    let text = server.evaluate("(cl:list (f) (asdf:registered-system \"without-cl-a\"))");
    std::fs::remove_dir_all(&path).unwrap();
    assert!(text.contains("Restored: all 5 defining forms."), "{text}");
    assert!(text.contains("(7 #<ASDF/SYSTEM:SYSTEM \"without-cl-a\">)"), "{text}");
}

#[test]
fn features_directories_documentation_and_methods_are_restored() {
    let mut server = Server::ready();
    let scratch = Scratch::new();
    let path = scratch.join("set-up");
    std::fs::create_dir(&path).unwrap();
    let directory = path.canonicalize().unwrap();
    std::fs::write(directory.join("set-up.asd"), "(defsystem \"set-up\")").unwrap();
    server.evaluate(&format!("(defvar *place* {:?})", format!("{}/", directory.display())));
    for code in [
        "(pushnew :mine *features*)",
        "(push (pathname *place*) asdf:*central-registry*)",
        "(setf *default-pathname-defaults* (pathname *place*))",
        "(asdf:load-asd (merge-pathnames \"set-up.asd\" *place*))",
        "(sb-posix:chdir *place*)",
        "(setf (logical-pathname-translations \"MINE\") (list (list \"**;*.*\" *place*)))",
        "(defgeneric f (x)) (defmethod f ((x integer)) 1) (defmethod f ((x float)) 2)",
        "(setf (documentation 'f 'function) \"What it does.\")",
        "(remove-method #'f (find-method #'f '() (list (find-class 'float))))",
    ] {
        server.evaluate(code);
    }
    // A form that only assigns is not replayed.
    server.evaluate("(setf *place* :another)");
    let about = "(list (and (find :mine *features*) t) (find (pathname *place*) asdf:*central-registry* :test #'equal)
                       (namestring *default-pathname-defaults*) (asdf:registered-system \"set-up\") (sb-posix:getcwd)
                       (length (logical-pathname-translations \"MINE\")) (documentation 'f 'function)
                       (length (sb-mop:generic-function-methods #'f)))";
    kill_worker(&server);
    let text = server.evaluate(about);
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(text.contains("Restored: all 12 defining forms."), "{text}");
    let values: Vec<_> = text.rsplit_once("=> ").unwrap().1.split_whitespace().collect();
    let place = format!("{}/", directory.display());
    let expected = format!(
        "(T #P{place:?} {place:?} #<ASDF/SYSTEM:SYSTEM \"set-up\"> {:?} 1 \"What it does.\" 1)",
        directory.to_str().unwrap()
    );
    assert_eq!(values.join(" "), expected);
}

#[test]
fn feature_that_a_loaded_file_adds_is_restored() {
    let mut server = Server::ready();
    let scratch = Scratch::new();
    let file = scratch.join("feature.lisp");
    std::fs::write(&file, "(push :mine *features*)\n").unwrap();
    call_ok(&mut server, "load-system", json!({"path": file}));
    kill_worker(&server);
    let text = server.evaluate("(count :mine *features*)");
    assert!(text.contains("Restored: the one defining form.") && text.ends_with("=> 1"), "{text}");
}

#[test]
fn feature_that_was_deleted_from_the_list_itself_is_absent_after_image_loss() {
    let mut server = Server::ready();
    server.evaluate("(setf *features* (list* :first :second *features*))");
    server.evaluate("(setf *features* (delete :second *features*))");
    kill_worker(&server);
    let text = server.evaluate("(list (count :first *features*) (count :second *features*))");
    assert!(text.ends_with("=> (1 0)"), "{text}");
}

#[test]
fn test_run_that_changes_nothing_is_not_recorded_as_a_defining_form() {
    let mut server = Server::ready();
    server.evaluate("(progn (defun f () 1) (sb-rt:deftest one (f) 1))");
    for _ in 0..2 {
        let text = call_ok(&mut server, "run-tests", json!({"name": "cl-user::one"}));
        assert!(text.contains("1 passed, 0 failed"), "{text}");
    }
    kill_worker(&server);
    let text = server.evaluate("(f)");
    assert!(text.contains("Restored: the one defining form.") && text.ends_with("=> 1"), "{text}");
}

#[test]
fn form_that_failed_after_adding_a_feature_is_listed_when_the_feature_is_lost() {
    let scratch = Scratch::new();
    let file = scratch.join("feature.lisp");
    std::fs::write(&file, "(push :mine *features*)\n(/ 0)\n").unwrap();
    for (tool, arguments) in [
        ("evaluate-lisp", json!({"code": "(progn (push :mine *features*) (error \"then\"))"})),
        ("evaluate-lisp", json!({"code": "(list #.(push :mine *features*) #<x>)"})),
        ("load-system", json!({"path": file})),
    ] {
        let mut server = Server::ready();
        call_err(&mut server, tool, arguments);
        // This form fails, too, but binds the variable only.
        call_err(
            &mut server,
            "evaluate-lisp",
            json!({"code": "(let ((*features* (cons :bound *features*))) (error \"then\"))"}),
        );
        kill_worker(&server);
        let text = server.evaluate("(count :mine *features*)");
        assert!(text.contains("The one defining form was not restored:"), "{tool}: {text}");
        assert!(text.contains("(the form failed after defining or changing something)"), "{tool}: {text}");
        assert!(text.ends_with("=> 0"), "{tool}: {text}");
    }
}

#[test]
fn hash_table_tests_alien_definitions_compiler_macros_and_systems_are_restored() {
    let mut server = Server::ready();
    for code in [
        "(defun same (a b) (equal a b)) (defun hash-of (a) (sxhash a))",
        "(sb-ext:define-hash-table-test same hash-of)",
        "(sb-alien:define-alien-variable (\"environ\" the-environment) sb-alien:unsigned-long)",
        "(sb-alien::define-alien-callable seven sb-alien:int () 7)",
        "(setf (compiler-macro-function 'same) (lambda (form environment) (declare (ignore environment)) form))",
        "(asdf:defsystem \"defined-directly\")",
    ] {
        server.evaluate(code);
    }
    let about = "(list (hash-table-test (make-hash-table :test 'same)) (integerp the-environment)
                       (sb-alien:alien-funcall (sb-alien::alien-callable-function 'seven))
                       (and (compiler-macro-function 'same) t)
                       (and (asdf:registered-system \"defined-directly\") t))";
    let before = server.evaluate(about);
    assert_eq!(before, "=> (SAME T 7 T T)");
    kill_worker(&server);
    let text = server.evaluate(about);
    assert!(text.contains("Restored: all 7 defining forms.") && text.ends_with(&before), "{text}");
}

#[test]
fn restrictions_of_the_policy_implementation_packages_and_readtable_settings_are_restored() {
    let mut server = Server::ready();
    for code in [
        "(sb-ext:restrict-compiler-policy 'debug 3)",
        "(defpackage :helper (:use :cl))",
        "(sb-ext:add-implementation-package :helper :cl-user)",
        "(setf (sb-ext:readtable-normalization *readtable*) nil)",
        "(setf (sb-ext:readtable-base-char-preference *readtable*) :both)",
    ] {
        server.evaluate(code);
    }
    let about = "(list (cdr (assoc 'debug (sb-ext:restrict-compiler-policy)))
                       (and (member (find-package :helper) (sb-ext:package-implemented-by-list :cl-user)) t)
                       (sb-ext:readtable-normalization *readtable*)
                       (sb-ext:readtable-base-char-preference *readtable*))";
    let before = server.evaluate(about);
    assert_eq!(before, "=> (3 T NIL :BOTH)");
    kill_worker(&server);
    let text = server.evaluate(about);
    assert!(text.contains("Restored: all 5 defining forms.") && text.ends_with(&before), "{text}");
}

#[test]
fn form_that_only_copies_a_readtable_defines_nothing() {
    let mut server = Server::ready();
    assert_eq!(server.evaluate("(readtablep (copy-readtable))"), "=> T");
    kill_worker(&server);
    let text = server.evaluate("1");
    assert!(text.contains("There were no definitions to restore."), "{text}");
}

#[test]
fn reinitialized_and_renamed_classes_and_generic_functions_are_restored() {
    let mut server = Server::ready();
    for code in [
        "(defclass base () ()) (defclass derived () ((x :initarg :x))) (defgeneric f (x))",
        "(reinitialize-instance (find-class 'derived) :direct-superclasses (list (find-class 'base)))",
        "(setf (class-name (find-class 'base)) 'renamed)",
        "(reinitialize-instance #'f :documentation \"What it does.\")",
        // These forms define nothing.
        "(reinitialize-instance (make-instance 'base) :allow-other-keys t)",
        "(trace f) (untrace f)",
    ] {
        server.evaluate(code);
    }
    let about = "(list (mapcar #'class-name (sb-mop:class-direct-superclasses (find-class 'derived)))
                       (documentation #'f t))";
    let before = server.evaluate(about);
    assert_eq!(before, "=> ((RENAMED) \"What it does.\")");
    kill_worker(&server);
    let text = server.evaluate(about);
    assert!(text.contains("Restored: all 6 defining forms.") && text.ends_with(&before), "{text}");
}

#[test]
fn removed_nicknames_unbound_variables_and_package_locks_are_restored() {
    let mut server = Server::ready();
    for code in [
        "(defpackage :p (:use :cl)) (defpackage :locked (:use :cl)) (defpackage :open (:use :cl) (:lock t))",
        "(sb-ext:add-package-local-nickname :nick :cl :p)",
        "(sb-ext:remove-package-local-nickname :nick :p)",
        "(defvar *bound* 1)",
        "(makunbound '*bound*)",
        "(sb-ext:lock-package :locked)",
        "(sb-ext:unlock-package :open)",
    ] {
        server.evaluate(code);
    }
    let about = "(list (sb-ext:package-local-nicknames :p) (boundp '*bound*) (sb-ext:package-locked-p :locked)
                       (sb-ext:package-locked-p :open))";
    let before = server.evaluate(about);
    assert_eq!(before, "=> (NIL NIL T NIL)");
    kill_worker(&server);
    let text = server.evaluate(about);
    assert!(text.contains("Restored: all ") && text.ends_with(&before), "{text}");
}

/// Each poisoned form is skipped and not tried again.
#[test]
fn poisoned_forms_are_skipped_after_three_kills_each() {
    let mut server = Server::ready();
    let scratch = Scratch::new();
    let mark = scratch.join("deadly");
    for number in 0..6 {
        let deadly = format!(
            "(progn (defun f{number} ()) (when (probe-file {:?}) (sb-posix:kill (sb-posix:getpid) 9)))",
            mark.to_str().unwrap()
        );
        server.evaluate(&deadly);
        server.evaluate(&format!("(defun g{number} () {number})"));
    }
    std::fs::write(&mark, "").unwrap();
    kill_worker(&server);
    let text = server.evaluate("(list (g0) (g5) (fboundp 'f0))");
    assert!(text.ends_with("=> (0 5 NIL)"), "{text}");
    assert!(text.contains("Restored: 6 of 12 defining forms"), "{text}");
    assert_eq!(text.matches("(the image was killed 3 times while this form was replayed)").count(), 6, "{text}");
    // The next replay has no poisoned form.
    kill_worker(&server);
    assert!(server.evaluate("(list (g0) (g5))").ends_with("=> (0 5)"));
}

#[test]
fn external_kills_during_a_restore_do_not_poison_a_form() {
    let scratch = Scratch::new();
    let (gate, marker) = (scratch.join("gate"), scratch.join("marker"));
    let mut server = server_with_slow_replay(&gate, &marker);
    // The first kill hits the image, the next two hit the images that replay the form.
    for _ in 0..3 {
        kill_worker(&server);
        wait_until("the session is being restored", || marker.exists());
        std::fs::remove_file(&marker).unwrap();
    }
    std::fs::remove_file(&gate).unwrap();
    let text = server.evaluate("(f)");
    assert!(text.contains("Restored: the one defining form.") && text.ends_with("=> 7"), "{text}");
}

// ---- While an image is restored

#[test]
fn error_tools_and_ping_answer_while_an_image_is_restored() {
    let scratch = Scratch::new();
    let (gate, marker) = (scratch.join("gate"), scratch.join("marker"));
    let mut server = server_with_slow_replay(&gate, &marker);
    let failed = server.call_tool("evaluate-lisp", json!({"code": "(/ 1 0)"})).0;
    assert!(failed.contains("DIVISION-BY-ZERO"), "{failed}");
    let calls = [
        ("describe-last-error", json!({})),
        ("get-backtrace", json!({})),
        ("describe-last-error", json!({"list": 20})),
        ("configure-limits", json!({})),
    ];
    let ask = |server: &mut Server| calls.clone().map(|(tool, arguments)| server.call_tool(tool, arguments));
    let before = ask(&mut server);
    kill_worker(&server);
    wait_until("the session is being restored", || marker.exists());
    let params = json!({"name": "evaluate-lisp", "arguments": {"code": "(f)"}, "_meta": {"progressToken": "p"}});
    let waits = server.post("tools/call", params);
    let inspects = server.post_call("list-definitions", json!({}));
    assert_eq!(server.request("ping", json!({}))["result"], json!({}));
    assert_eq!(ask(&mut server), before);
    let progress = server.receive().unwrap();
    assert_eq!(progress["method"], "notifications/progress");
    assert_eq!(progress["params"]["progressToken"], "p");
    assert_eq!(progress["params"]["message"], "waiting while the image is restored: form 1 of 1");
    std::fs::remove_file(&gate).unwrap();
    let text = server.outcome(waits).0;
    assert!(text.contains("Restored: the one defining form") && text.ends_with("=> 7"), "{text}");
    assert!(server.outcome(inspects).0.contains("- F ()"));
    assert!(call_ok(&mut server, "describe-last-error", json!({})).starts_with("No error information"));
    server.assert_works();
}

#[test]
fn a_reset_ends_a_restore() {
    let scratch = Scratch::new();
    let (gate, marker) = (scratch.join("gate"), scratch.join("marker"));
    let mut server = server_with_slow_replay(&gate, &marker);
    let lost = server.post_running("", "(sleep 1000)", 0.0);
    kill_worker(&server);
    wait_until("the session is being restored", || marker.exists());
    let waits = server.post_call("evaluate-lisp", json!({"code": "(f)"}));
    let inspects = server.post_call("list-definitions", json!({}));
    let text = call_ok(&mut server, "reset-session", json!({}));
    assert!(text.contains("The reset ended the unfinished restore") && text.contains("Session reset."), "{text}");
    for id in [lost, waits] {
        let (text, is_error) = server.outcome(id);
        assert!(is_error && text.starts_with("[ERROR] CANCELLED"), "{text}");
    }
    assert_eq!(server.outcome(inspects).0, "No definitions in this session.");
    assert_eq!(server.evaluate("(fboundp 'f)"), "=> NIL");
    server.assert_works();
}

/// Returns a form that runs and cannot be interrupted while the file `gate` exists.
fn uninterruptible(gate: &Path) -> String {
    format!("(progn (sb-sys:without-interrupts (loop while (probe-file {:?}))) (defun stuck () 1))", gate)
}

#[test]
#[ignore = "the time of such a form, a quarter of a minute"]
fn uninterruptible_form_in_a_restore_is_skipped_after_its_time() {
    let scratch = Scratch::new();
    let gate = scratch.join("gate-uninterruptible");
    let mut server = Server::ready();
    server.evaluate(&uninterruptible(&gate));
    server.evaluate("(defun f () 7)");
    std::fs::write(&gate, "").unwrap();
    let begin = Instant::now();
    kill_worker(&server);
    let text = server.evaluate("(f)");
    assert!(
        text.contains("Restored: 1 of 2 defining forms") && text.contains("(while this form was replayed, the image "),
        "{text}"
    );
    assert!(text.ends_with("=> 7"), "{text}");
    assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", begin.elapsed());
}
