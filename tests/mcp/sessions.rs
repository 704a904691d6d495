//! Persistent sessions: the option `--session` and the command `sessions`.

#![cfg(target_os = "linux")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::attach::Client;
use crate::bare::bare;
use crate::checkpoints::damage;
use crate::client::{Scratch, Server, binary, call_err, call_ok};
use crate::processes::{
    NO_FORK, NO_SIGXFSZ, children, is_alive, kill_worker, limit_file_size, signal, stop_worker, wait_until, worker,
};
use serde_json::json;

/// A state directory for servers with sessions.
struct StateDirectory {
    directory: Scratch,
}

impl StateDirectory {
    fn new() -> Self {
        Self { directory: Scratch::new() }
    }

    fn start(&self, arguments: &[&str]) -> Server {
        Server::start_with_environment(
            arguments,
            &[("XDG_STATE_HOME", &self.directory), ("XDG_RUNTIME_DIR", &self.directory)],
        )
    }

    /// Starts and initializes a server of this session.
    fn serve(&self, session: &str) -> Server {
        let mut server = self.start(&["--session", session]);
        server.initialize("2025-11-25");
        server
    }

    /// Starts and initializes a server of this session whose supervisor ignores SIGXFSZ, so that a write fails with an error
    /// as on a full disk.
    fn serve_without_sigxfsz(&self, session: &str) -> Server {
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\"", binary(), "--session", session]);
        command.env("XDG_STATE_HOME", &*self.directory).env("XDG_RUNTIME_DIR", &*self.directory);
        let mut server = Server::start_command(&mut command);
        server.initialize("2025-11-25");
        server
    }

    /// Runs `sbcl-mcp sessions` with these arguments.
    fn sessions(&self, arguments: &[&str]) -> Output {
        Command::new(binary())
            .arg("sessions")
            .args(arguments)
            .env("XDG_STATE_HOME", &*self.directory)
            .env("XDG_RUNTIME_DIR", &self.directory)
            .output()
            .unwrap()
    }

    /// Runs `sbcl-mcp sessions` with these arguments in a working directory that no longer exists.
    fn sessions_without_working_directory(&self, arguments: &[&str]) -> Output {
        Command::new("sh")
            .args(["-c", "mkdir gone && cd gone && rmdir ../gone && exec \"$0\" sessions \"$@\"", binary()])
            .args(arguments)
            .env("XDG_STATE_HOME", &*self.directory)
            .env("XDG_RUNTIME_DIR", &*self.directory)
            .current_dir(&*self.directory)
            .output()
            .unwrap()
    }

    fn list(&self) -> String {
        let output = self.sessions(&[]);
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    fn directory(&self, session: &str) -> PathBuf {
        self.directory.join("sbcl-mcp/sessions").join(session)
    }

    /// Waits until no process uses the session.
    fn await_free(&self, session: &str) {
        wait_until("the session is free", || {
            let list = self.list();
            list.lines().any(|line| line.starts_with(session) && !line.contains("by process"))
        });
    }
}

/// Returns the files in a directory with this extension.
fn files(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
}

#[test]
fn session_path_without_a_working_directory_is_refused_with_advice() {
    let output = StateDirectory::new().sessions_without_working_directory(&["delete", "x/y"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.starts_with("The working directory, to which \"x/y\" is relative, cannot be found: "), "{text}");
    assert!(text.ends_with(". Use an absolute path.\n"), "{text}");
}

#[test]
fn restarted_session_restores_values_package_and_error_history() {
    let state = StateDirectory::new();
    let expected = format!(
        "There are no persistent sessions in {}. `sbcl-mcp --session NAME` starts a server that creates one.\n",
        state.directory.join("sbcl-mcp/sessions").display()
    );
    assert_eq!(state.list(), expected);
    let mut server = state.serve("work");
    assert_eq!(server.evaluate("(defvar *x* 1) (defun f () *x*) (setf *x* 41) *x*"), "=> 41");
    let _ = call_err(&mut server, "evaluate-lisp", json!({"code": "(/ 1 0)"}));
    server.evaluate("(defpackage :app (:use :cl)) (in-package :app)");
    let end = server.finish();
    assert!(end.status.success() && end.stderr.is_empty(), "{}", end.stderr);

    // The next server waits for the process that saves the session.
    let mut server = state.serve("work");
    let text = server.evaluate("(list cl-user::*x* (cl-user::f))");
    assert!(
        text.starts_with("[notice]\nThe session \"work\" continues. Restored: the checkpoint \"auto-1\" from "),
        "{text}"
    );
    assert!(text.contains(" ago (evaluation 3). There were no later definitions to restore.\n\n=> (41 41)"), "{text}");
    assert_eq!(server.evaluate("(package-name *package*)"), "=> \"APP\"");
    // Error numbers continue, and the history is that of the session.
    assert!(call_ok(&mut server, "describe-last-error", json!({"list": 20})).contains("E1 "));
    let _ = call_err(&mut server, "evaluate-lisp", json!({"code": "(/ 2 0)"}));
    assert!(call_ok(&mut server, "describe-last-error", json!({})).contains("Id: E2"));
    assert!(call_ok(&mut server, "check-evaluation", json!({})).starts_with("Evaluation 6"));

    let list = state.list();
    assert!(list.starts_with("work  ") && list.contains(&format!("; served by process {}", server.pid())), "{list}");
    assert!(list.contains(" ago, evaluation "), "{list}");
    assert!(list.contains(": 1 function, 1 variable, 1 package; "), "{list}");
    assert_eq!(std::fs::metadata(state.directory("work")).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn session_is_saved_after_the_cleanup_forms_of_background_evaluations() {
    let state = StateDirectory::new();
    let mut server = state.serve("work");
    server.evaluate("(defvar *runs* nil) (defvar *clean* nil)");
    let code = "(unwind-protect (progn (setf *runs* t) (sleep 60)) (sleep 2) (setf *clean* t))";
    call_ok(&mut server, "evaluate-lisp", json!({"code": code, "background": true}));
    server.evaluate("(loop until *runs*)");
    server.finish();
    let mut server = state.serve("work");
    let text = server.evaluate("*clean*");
    assert!(text.ends_with("=> T"), "{text}");
}

#[test]
fn error_numbers_of_attached_clients_are_not_used_again_after_a_loss_or_a_restart() {
    let state = StateDirectory::new();
    let mut server = state.serve("numbers");
    let fail_attached = || {
        let mut client = Client::connect(&state.directory.join("sbcl-mcp/numbers.sock"));
        client.initialize("person");
        client.call("evaluate-lisp", json!({"code": "(error \"attached\")"}));
        client.call("describe-last-error", json!({})).0
    };
    let fail = |server: &mut Server| {
        let _ = call_err(server, "evaluate-lisp", json!({"code": "(/ 1 0)"}));
        call_ok(server, "describe-last-error", json!({}))
    };
    assert!(fail_attached().contains("\nId: E1\n"));
    kill_worker(&server);
    let text = fail(&mut server);
    assert!(text.contains("\nId: E2\n"), "{text}");
    assert!(fail_attached().contains("\nId: E3\n"));
    // The next image has no error of its own when the server is killed.
    kill_worker(&server);
    assert!(server.evaluate("1").ends_with("=> 1"));
    kill_all(&state);
    drop(server);
    let text = fail(&mut state.serve("numbers"));
    assert!(text.contains("\nId: E4\n"), "{text}");
}

#[test]
fn second_server_of_a_session_is_refused() {
    let state = StateDirectory::new();
    let server = state.serve("only");
    let second = state.start(&["--session", "only"]);
    let end = second.end();
    assert_eq!(end.status.code(), Some(1));
    let reason = format!(
        "The session \"only\" is served by process {}. A session can have only one server at a time: wait until that \
         process has ended, or attach to that server (sbcl-mcp repl --attach=only).",
        server.pid()
    );
    assert!(end.stderr.contains(&reason), "{}", end.stderr);
    // The client gets the reason, too.
    let mut third = state.start(&["--session", "only"]);
    let answer = third.request(
        "initialize",
        json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}),
    );
    assert!(answer["error"]["message"].as_str().unwrap().contains(&reason), "{answer}");
    let output = state.sessions(&["delete", "only"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot be deleted while it is served by process"));
    assert!(server.finish().status.success());
    // No evaluation means nothing to save, so the session is free.
    state.await_free("only");
    assert!(state.sessions(&["delete", "only"]).status.success());
    assert!(!state.directory("only").exists());
    let output = state.sessions(&["delete", "only"]);
    assert!(
        String::from_utf8_lossy(&output.stderr).starts_with("There is no session \"only\". Existing sessions: none.")
    );
    for name in ["", ".", "..", ".x", "a\nb"] {
        let end = state.start(&["--session", name]).end();
        assert!(
            end.stderr.contains("is not a valid session name: use 1 to 100 printable characters"),
            "{}",
            end.stderr
        );
    }
    let end = state.start(&["--session", "x", "--restore", "none"]).end();
    assert!(end.stderr.contains("omit --restore"), "{}", end.stderr);
}

#[test]
fn session_is_saved_at_exit_despite_held_or_running_evaluations() {
    let state = StateDirectory::new();
    let directory = state.directory.join("a place");
    let path = directory.to_str().unwrap();
    let mut server = state.serve(path);
    server.evaluate("(defvar *x* 1) (setf *x* 2)");
    let _ = call_err(&mut server, "evaluate-lisp", json!({"code": "(setf *x* 3) (/ 1 0)", "on-error": "debug"}));
    assert!(server.finish().status.success());
    let mut server = state.serve(path);
    assert!(server.evaluate("*x*").ends_with("=> 3"));
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(setf *x* 4) (sleep 1000)", "background": true}));
    server.post_running("(setf *y* 5) (sb-ext:run-program \"/bin/sleep\" '(\"1000\") :wait nil)", "(loop)", 100.0);
    let programs = children(worker(&server));
    assert_eq!(programs.len(), 1);
    signal(server.pid(), "-TERM");
    assert_eq!(server.end().status.code(), Some(143));
    wait_until("the program is gone", || !programs.iter().any(|program| is_alive(*program)));
    let mut server = state.serve(path);
    assert!(server.evaluate("(list *x* *y*)").ends_with("=> (4 5)"));
    assert!(directory.join("log").exists());
}

#[test]
fn session_is_saved_when_its_supervisor_does_not_run_during_the_shutdown() {
    let state = StateDirectory::new();
    let lock = state.directory("stopped").join("lock");
    for kills_worker in [false, true] {
        let mut server = state.serve("stopped");
        server.evaluate(&format!("(defvar *x* 1) (setf *x* {})", if kills_worker { 3 } else { 2 }));
        let (supervisor, worker) = (server.pid(), worker(&server));
        stop_worker(&server);
        // The answers are longer than the pipe from the worker to the supervisor. They are few, so that the worker can send
        // them in time.
        let lists: Vec<_> = (0..6).map(|_| server.post("tools/list", json!({}))).collect();
        server.close();
        wait_until("the shutdown has begun", || std::fs::read_to_string(&lock).unwrap().contains("saving"));
        signal(supervisor, "-STOP");
        signal(worker, "-CONT");
        let is_finisher = |pid: u32| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("finish-saving"))
        };
        wait_until("the save has begun", || {
            [supervisor, worker].iter().flat_map(|pid| children(*pid)).any(is_finisher)
        });
        // The supervisor is stopped for longer than it waits for the worker.
        std::thread::sleep(std::time::Duration::from_secs(1));
        if kills_worker {
            signal(worker, "-KILL");
        }
        signal(supervisor, "-CONT");
        if !kills_worker {
            lists.into_iter().for_each(|list| assert!(server.answer(list)["result"]["tools"].is_array()));
        }
        assert!(server.end().status.success());
        let mut server = state.serve("stopped");
        let text = server.evaluate("*x*");
        assert!(text.ends_with(if kills_worker { "=> 3" } else { "=> 2" }), "{text}");
        server.finish();
        state.await_free("stopped");
    }
}

#[test]
fn server_waits_for_a_previous_server_that_is_slow_to_end() {
    let state = StateDirectory::new();
    let mut first = state.serve("slow-end");
    first.evaluate("(defvar *x* 1) (setf *x* 2)");
    signal(first.pid(), "-STOP");
    first.close();
    let mut second = state.start(&["--session", "slow-end"]);
    std::thread::sleep(std::time::Duration::from_secs(2));
    signal(first.pid(), "-CONT");
    second.initialize("2025-11-25");
    assert!(second.evaluate("*x*").ends_with("=> 2"));
}

#[test]
fn session_is_saved_when_its_client_stops_reading() {
    let state = StateDirectory::new();
    let mut server = state.serve("unread");
    server.evaluate("(defvar *x* 1) (setf *x* 2)");
    server.stop_reading();
    // The reading end of stdout is closed after the first of these lines.
    for _ in 0..10 {
        server.post("tools/list", json!({}));
    }
    server.end();
    let text = state.serve("unread").evaluate("*x*");
    assert!(text.ends_with("=> 2"), "{text}");
}

#[test]
fn session_is_saved_when_idle_and_by_the_checkpoint_tool() {
    let state = StateDirectory::new();
    let mut server = state.serve("idle");
    server.evaluate("(defvar *x* 1) (setf *x* 2)");
    wait_until("the session is saved", || call_ok(&mut server, "checkpoint", json!({})).starts_with("\"auto-1\""));
    server.evaluate("(setf *x* 3)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "mine"}));
    server.evaluate("(setf *x* 4) (defun f () :f)");
    let pids: Vec<_> = children(server.pid()).into_iter().chain([server.pid()]).collect();
    // All processes are stopped first: one that sees another die would save the session or start a new worker.
    pids.iter().rev().for_each(|pid| signal(*pid, "-STOP"));
    pids.iter().for_each(|pid| signal(*pid, "-KILL"));
    wait_until("all processes are gone", || !pids[..1].iter().any(|pid| is_alive(*pid)));
    drop(server);
    let mut server = state.serve("idle");
    let text = server.evaluate("(list *x* (f))");
    assert!(text.contains("the checkpoint \"mine\" from "), "{text}");
    let rest = "and the one defining form since then.\n  Lost: threads, open files, and values assigned to variables since \
                the checkpoint.\n\n=> (3 :F)";
    assert!(text.ends_with(rest), "{text}");
    // Evaluations without definitions count as well.
    assert!(call_ok(&mut server, "check-evaluation", json!({})).starts_with("Evaluation 4"));
    // The named checkpoint still exists, and restoring it forgets the later definitions.
    let text = call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "mine"}));
    assert!(text.contains("Discarded: the 2 evaluations since then."), "{text}");
    assert_eq!(server.evaluate("(list *x* (fboundp 'f))"), "=> (3 NIL)");
    call_ok(&mut server, "reset-session", json!({}));
    assert!(server.finish().status.success());
    let mut server = state.serve("idle");
    assert_eq!(server.evaluate("(boundp '*x*)"), "=> NIL");
    // Restoring a checkpoint from before the reset restores its definitions in the log, too.
    call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "mine"}));
    kill_worker(&server);
    assert!(server.evaluate("*x*").ends_with("=> 3"));
    let export = String::from_utf8(state.sessions(&["export", "idle"]).stdout).unwrap();
    assert!(export.contains("(defvar *x* 1)"), "{export}");
}

#[test]
fn session_is_saved_at_exit_when_a_thread_has_run_since_the_last_save() {
    let state = StateDirectory::new();
    let mut server = state.serve("threads");
    let (begin, done) = (state.directory.join("begin"), state.directory.join("done"));
    server.evaluate(&format!(
        "(progn (defvar *x* 1)
                (sb-thread:make-thread
                 (lambda ()
                   (loop until (probe-file {begin:?}) do (sleep 0.05))
                   (setf (symbol-value '*x*) 2)
                   (open {done:?} :direction :output)))
                nil)"
    ));
    wait_until("the session is saved", || call_ok(&mut server, "checkpoint", json!({})).starts_with("\"auto-1\""));
    std::fs::write(begin, "").unwrap();
    wait_until("the thread is done", || done.exists());
    assert!(server.finish().status.success());
    let text = state.serve("threads").evaluate("*x*");
    assert!(text.ends_with("=> 2"), "{text}");
}

#[test]
fn session_is_saved_at_exit_after_its_restored_checkpoint_was_deleted() {
    let state = StateDirectory::new();
    let mut server = state.serve("deleted");
    server.evaluate("(defvar *x* 1) (setf *x* 2)");
    for action in ["save", "restore", "delete"] {
        call_ok(&mut server, "checkpoint", json!({"action": action, "name": "mine"}));
    }
    assert!(server.finish().status.success());
    let text = state.serve("deleted").evaluate("*x*");
    assert!(text.ends_with("=> 2"), "{text}");
}

/// Writes a session of a build before version 0.1 that has no image, only a log.
fn write_session_of_an_earlier_build(state: &StateDirectory) {
    std::fs::create_dir_all(state.directory("old")).unwrap();
    let lines = [
        r#"{"from":{"evaluations":7,"dropped":0}}"#,
        r#"{"errors":{"last":null,"history":{"errors":[],"bytes":0},"count":4}}"#,
        r#"{"unrestored":[{"form":{"code":"(load \"gone\")","package":"COMMON-LISP-USER"},"reason":"it failed"}]}"#,
        r#"{"form":{"form":{"code":"(defvar *x* 1)","package":"COMMON-LISP-USER"},"local":false,"evaluation":3,"took":1}}"#,
        r#"{"saving":"gone.core"}"#,
        r#"{"form":{"form":{"code":"(defun f () *x*)","package":"COMMON-LISP-USER"},"local":true,"evaluation":9}}"#,
        r#"{"error":{"added":null,"last":null}}"#,
    ];
    std::fs::write(state.directory("old").join("log"), lines.join("\n") + "\n").unwrap();
}

#[test]
fn session_of_an_earlier_build_is_continued_and_exported() {
    let state = StateDirectory::new();
    write_session_of_an_earlier_build(&state);
    assert!(state.list().starts_with("old"), "{}", state.list());
    let export = String::from_utf8(state.sessions(&["export", "old"]).stdout).unwrap();
    assert!(export.contains("(defun f () *x*)") && export.contains(";; (load \"gone\")"), "{export}");
    let mut server = state.serve("old");
    let text = server.evaluate("(f)");
    assert!(text.contains("The session \"old\" continues. Restored: all 2 defining forms."), "{text}");
    assert!(text.contains("- (load \"gone\") (it failed)") && text.ends_with("=> 1"), "{text}");
    let _ = call_err(&mut server, "evaluate-lisp", json!({"code": "(/ 1 0)"}));
    assert!(call_ok(&mut server, "describe-last-error", json!({"error-id": "E5"})).contains("DIVISION-BY-ZERO"));
    assert!(server.finish().status.success());
    // The server has rewritten the log in the current format.
    state.await_free("old");
    assert!(std::fs::read_to_string(state.directory("old").join("log")).unwrap().starts_with("{\"snapshot\":"));
    let mut server = state.serve("old");
    assert!(server.evaluate("(f)").ends_with("=> 1"));
}

#[test]
fn session_of_a_newer_version_is_refused_and_left_as_it_is() {
    let state = StateDirectory::new();
    write_session_of_an_earlier_build(&state);
    let mut server = state.serve("old");
    assert!(server.evaluate("(f)").ends_with("=> 1"));
    assert!(server.finish().status.success());
    state.await_free("old");
    let log = state.directory("old").join("log");
    let text = std::fs::read_to_string(&log).unwrap().replacen("\"format\":2", "\"format\":3", 1);
    std::fs::write(&log, &text).unwrap();
    let end = state.start(&["--session", "old"]).end();
    assert!(!end.status.success());
    let reason = "The session \"old\" cannot be opened: its log was written by a newer sbcl-mcp (";
    assert!(end.stderr.contains(reason), "{}", end.stderr);
    let export = state.sessions(&["export", "old"]);
    assert!(!export.status.success() && String::from_utf8_lossy(&export.stderr).contains(reason));
    let list = state.list();
    assert!(list.contains(" ago, cannot be opened: its log was written by a newer sbcl-mcp ("), "{list}");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), text);
}

#[test]
fn lines_of_a_session_log_that_cannot_be_read_are_reported() {
    let state = StateDirectory::new();
    write_session_of_an_earlier_build(&state);
    let log = state.directory("old").join("log");
    let text = std::fs::read_to_string(&log)
        .unwrap()
        .replace("{\"form\":{\"form\":{\"code\":\"(defvar", "{\"form\":{\"code\":\"(defvar");
    std::fs::write(&log, &text).unwrap();
    let mut server = state.serve("old");
    let notice = server.evaluate("(fboundp 'f)");
    let copy = state.directory("old").join("log.damaged");
    let reason = format!(
        "A line of the session's log could not be read: some definitions may be missing. {} is a copy of the log.",
        copy.display()
    );
    assert!(notice.contains(&reason), "{notice}");
    assert_eq!(std::fs::read_to_string(copy).unwrap(), text);
    let end = server.finish();
    assert!(end.stderr.contains(&format!("skipped an unreadable line of {}", log.display())), "{}", end.stderr);
}

/// Saves a session with a checkpoint in which `*x*` is 2 and `(f)` returns 1, and waits until no process uses the
/// session.
fn saved_session(state: &StateDirectory, name: &str) {
    let mut server = state.serve(name);
    server.evaluate("(defun f () 1) (defvar *x* 1) (setf *x* 2)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "first"}));
    assert!(server.finish().status.success());
    state.await_free(name);
}

#[test]
fn session_whose_log_lost_its_beginning_continues_from_its_last_checkpoint() {
    let state = StateDirectory::new();
    saved_session(&state, "torn");
    let log = state.directory("torn").join("log");
    let text = std::fs::read_to_string(&log).unwrap();
    let damaged = text.replacen("{\"snapshot\":", "XX", 1);
    std::fs::write(&log, &damaged).unwrap();
    assert!(state.list().contains("torn"), "{}", state.list());
    let mut server = state.serve("torn");
    let text = server.evaluate("(list (f) *x*)");
    assert!(text.ends_with("=> (1 2)"), "{text}");
    assert!(text.contains("A line of the session's log could not be read: some definitions may be missing."), "{text}");
    assert!(
        text.contains("The beginning of the session's log is lost: definitions since the checkpoint may be missing."),
        "{text}"
    );
    assert_eq!(std::fs::read_to_string(state.directory("torn").join("log.damaged")).unwrap(), damaged);
    // The server has rewritten the log, which is intact again.
    assert!(server.finish().status.success());
    state.await_free("torn");
    let mut server = state.serve("torn");
    let text = server.evaluate("(list (f) *x*)");
    assert!(text.ends_with("=> (1 2)") && !text.contains("log"), "{text}");
}

#[test]
fn session_whose_log_is_removed_continues_from_its_last_checkpoint() {
    let state = StateDirectory::new();
    saved_session(&state, "bare");
    std::fs::remove_file(state.directory("bare").join("log")).unwrap();
    assert!(state.list().contains("bare"), "{}", state.list());
    let mut server = state.serve("bare");
    let text = server.evaluate("(list (f) *x*)");
    assert!(text.contains("The session's log is lost: definitions since the checkpoint may be missing."), "{text}");
    assert!(text.ends_with("=> (1 2)"), "{text}");
    assert!(server.finish().status.success());
    state.await_free("bare");
    std::fs::remove_file(state.directory("bare").join("log")).unwrap();
    assert!(state.sessions(&["delete", "bare"]).status.success());
    assert!(!state.directory("bare").exists());
}

#[test]
fn checkpoint_with_an_unreadable_description_is_reported() {
    let state = StateDirectory::new();
    saved_session(&state, "blind");
    let manifests = files(&state.directory("blind"), "json");
    manifests.iter().for_each(|manifest| std::fs::write(manifest, "{").unwrap());
    let mut server = state.serve("blind");
    let text = server.evaluate("(list (f) *x*)");
    for manifest in manifests {
        let reason =
            format!("A checkpoint cannot be restored because its description cannot be read: {}.", manifest.display());
        assert!(text.contains(&reason), "{text}");
    }
    assert!(text.ends_with("=> (1 1)"), "{text}");
}

#[test]
fn session_starts_when_its_status_page_cannot_be_written() {
    let state = StateDirectory::new();
    saved_session(&state, "odd");
    let status = state.directory("odd").join("status");
    std::fs::remove_file(&status).unwrap();
    std::fs::create_dir(&status).unwrap();
    let mut server = state.serve("odd");
    assert!(server.evaluate("(list (f) *x*)").ends_with("=> (1 2)"));
    let end = server.finish();
    assert!(end.stderr.contains("may use numbers of evaluations and errors again"), "{}", end.stderr);
}

#[test]
fn image_of_another_build_is_not_booted_and_definitions_are_replayed() {
    let state = StateDirectory::new();
    let mut server = state.serve("old");
    server.evaluate("(defvar *x* 1) (setf *x* 2) (defun f () :f)");
    assert!(server.finish().status.success());
    state.await_free("old");
    for manifest in files(&state.directory("old"), "json") {
        let text = std::fs::read_to_string(&manifest).unwrap();
        let mut checkpoint: serde_json::Value = serde_json::from_str(&text).unwrap();
        checkpoint["build"] = json!("0.0.1 2.0.0 x y");
        std::fs::write(manifest, checkpoint.to_string()).unwrap();
    }
    let mut server = state.serve("old");
    let text = server.evaluate("(list *x* (f))");
    assert!(
        text.starts_with(
            "[notice]\nThe session \"old\" continues. The session's image was saved by another build of sbcl-mcp (0.0.1, \
             with SBCL 2.0.0) and cannot be booted here: only definitions are restored, not values. (`sbcl-mcp sessions \
             export old` prints the definitions as source code.) Restored: all 2 defining forms."
        ),
        "{text}"
    );
    assert!(text.ends_with("=> (1 :F)"), "{text}");
    assert!(server.finish().status.success());
    state.await_free("old");
    let end = state.start(&["--session", "old", "--heap", "1G"]).end();
    assert!(
        end.stderr.contains(
            "The session \"old\" was saved with another heap size: start the server with --heap \
             8G."
        ),
        "{}",
        end.stderr
    );
}

#[test]
fn export_command_writes_definitions_loadable_by_bare_sbcl() {
    let state = StateDirectory::new();
    let mut server = state.serve("app");
    server.evaluate(
        "(defpackage :app (:use :cl) (:export #:area)) (in-package :app)
         (defun side () 2)
         (defun area () (* (side) (side)))
         (defstruct point x y)",
    );
    server.evaluate("(defun side () 3) (setf (get 'x 'y) 1)");
    server.evaluate("(in-package :cl-user) (defun pid () (sb-posix:getpid)) (defvar *list* (list 1 (app:area)))");
    let file = state.directory.join("app.lisp");
    let path = file.to_str().unwrap();
    // Exporting works while the session is in use.
    wait_until("all forms are in the log", || {
        assert!(state.sessions(&["export", "app", "--output", path]).status.success());
        std::fs::read_to_string(&file).unwrap().contains("*list*")
    });
    let text = std::fs::read_to_string(&file).unwrap();
    let body: Vec<_> = text.lines().filter(|line| !line.starts_with(";;;;") && !line.is_empty()).collect();
    let expected = [
        "(require :sb-posix)",
        "(defpackage :app (:use :cl) (:export #:area))",
        "(in-package :app)",
        "(defun area () (* (side) (side)))",
        "(defstruct point x y)",
        "(defun side () 3)",
        "(cl:in-package :common-lisp-user)",
        "(defun pid () (sb-posix:getpid))",
        "(defvar *list* (list 1 (app:area)))",
    ];
    assert_eq!(body, [&expected[..3], &["(defun side () 2)"], &expected[3..]].concat());
    let Some(bare) = bare() else { return };
    let mut bare = bare.command();
    let check = "(assert (equal (list (list 1 9) (integerp (pid))) (list *list* t)))";
    let output = bare.args(["--load", path, "--eval", check, "--quit"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Kills all processes that use this state directory. They are stopped first, and a process is killed before its parent,
/// so that no worker sees the end of its supervisor, whereupon it would begin to save the session.
fn kill_all(state: &StateDirectory) {
    let mark = format!("XDG_STATE_HOME={}\0", state.directory.display());
    let uses_directory = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        *pid != std::process::id() && String::from_utf8_lossy(&environment).contains(&mark)
    };
    loop {
        let mut found: Vec<u32> = crate::processes::processes().into_keys().filter(uses_directory).collect();
        if found.is_empty() {
            return;
        }
        // A process has a higher number than its parent.
        found.sort_unstable_by(|a, b| b.cmp(a));
        for signal in ["-STOP", "-KILL"] {
            let _ = Command::new("kill").arg(signal).args(found.iter().map(u32::to_string)).output();
        }
    }
}

/// `SBCL_MCP_SESSION_KILLS` sets the number of kills.
#[test]
fn kill_during_saving_leaves_the_old_or_the_new_state() {
    let rounds = std::env::var("SBCL_MCP_SESSION_KILLS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(8);
    let state = StateDirectory::new();
    // Measures the time of a save on this machine.
    let mut server = state.serve("killed");
    server.evaluate("(setf *a* 0 *b* (list 0)) (defun f () (list *a* (first *b*)))");
    let begin = std::time::Instant::now();
    server.finish();
    state.await_free("killed");
    let time = begin.elapsed().as_micros();
    let mut random = 1_u64;
    let mut known = 0;
    let mut outcomes = [0, 0];
    for round in 1..=rounds {
        let mut server = state.serve("killed");
        let text = server.evaluate("(f)");
        let is = |n: u64| text.ends_with(&format!("=> ({n} {n})"));
        let found = if is(round - 1) { round - 1 } else { known };
        assert!(is(found), "after round {round}: {text}, with {known} before");
        // A complete save is not reported as incomplete.
        assert!(found == known || !text.contains("was not saved"), "after round {round}: {text}");
        outcomes[usize::from(found == known)] += 1;
        known = found;
        server.evaluate(&format!("(setf *a* {round} *b* (list {round}))"));
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let delay = u128::from(random >> 33) * time * 5 / 4 / u128::from(u32::MAX >> 1);
        match round % 3 {
            0 => drop(server.post_call("checkpoint", json!({"action": "save", "name": "kept"}))),
            1 => server.close(),
            _ => signal(server.pid(), "-TERM"),
        }
        // The kill comes at a random moment, so there is no condition to wait for.
        std::thread::sleep(std::time::Duration::from_micros(delay.try_into().unwrap()));
        kill_all(&state);
        drop(server);
    }
    eprintln!("{} of {rounds} kills left the new state, {} the one before", outcomes[0], outcomes[1]);
    // Incomplete saves take no disk space.
    let mut server = state.serve("killed");
    server.evaluate("(f)");
    let (cores, manifests) = (files(&state.directory("killed"), "core"), files(&state.directory("killed"), "json"));
    assert_eq!(cores.len(), manifests.len());
    assert!(cores.len() <= 3, "{cores:?}");
}

#[test]
fn unrestored_forms_stay_listed_across_server_restarts() {
    let state = StateDirectory::new();
    let file = state.directory.join("needed");
    std::fs::write(&file, "1").unwrap();
    let mut server = state.serve("lame");
    let code = format!("(progn (assert (probe-file {file:?})) (defun lame () 1))");
    server.evaluate(&code);
    server.evaluate("(defun f () 7)");
    server.finish();
    state.await_free("lame");
    // Without the images, the session is restored from its log alone.
    files(&state.directory("lame"), "core").iter().for_each(|core| std::fs::remove_file(core).unwrap());
    std::fs::remove_file(&file).unwrap();
    let mut server = state.serve("lame");
    assert!(server.evaluate("(f)").contains("Restored: 1 of 2 defining forms"));
    let listed =
        |server: &mut Server| call_ok(server, "list-definitions", json!({})).contains("[Not Restored]\n- (progn ");
    assert!(listed(&mut server));
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "x"}));
    assert!(listed(&mut server));
    server.finish();
    state.await_free("lame");
    let mut server = state.serve("lame");
    let text = server.evaluate("(f)");
    assert!(text.contains("Still missing since an earlier restore:\n  - (progn "), "{text}");
    let exported = String::from_utf8(state.sessions(&["export", "lame"]).stdout).unwrap();
    assert!(
        exported.contains(";;; Missing: this form could not be restored (SIMPLE-ERROR: ")
            && exported.contains(";; (progn ")
    );
    std::fs::write(&file, "1").unwrap();
    server.evaluate(&code);
    assert!(!listed(&mut server));
    server.finish();
    state.await_free("lame");
    assert!(!listed(&mut state.serve("lame")));
}

/// The log contains a restore only once the checkpoint has booted.
#[test]
fn killed_server_of_a_session_has_lost_no_definitions_in_a_failed_restore() {
    let state = StateDirectory::new();
    let directory = state.directory("failed");
    let mut server = state.serve("failed");
    server.evaluate("(defun f () 1)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "mine"}));
    server.evaluate("(defun g () 2)");
    // The session may have been saved automatically, too.
    let manifests = files(&directory, "json").into_iter().map(|path| std::fs::read(path).unwrap());
    let mut manifests = manifests.map(|text| serde_json::from_slice::<serde_json::Value>(&text).unwrap());
    let manifest = manifests.find(|manifest| manifest["name"] == "mine").expect("a manifest");
    let core = directory.join(manifest["file"].as_str().unwrap());
    damage(&core);
    let text = call_err(&mut server, "checkpoint", json!({"action": "restore", "name": "mine"}));
    assert!(text.contains("and no definition was discarded."), "{text}");
    kill_all(&state);
    drop(server);
    // The next server reads the core again and does not boot it.
    let core = std::fs::File::options().write(true).open(core).unwrap();
    core.set_modified(std::time::SystemTime::now()).unwrap();
    let text = state.serve("failed").evaluate("(list (f) (g))");
    assert!(text.ends_with("=> (1 2)"), "{text}");
}

#[test]
fn session_whose_server_ends_during_a_restore_continues_from_the_checkpoint() {
    let state = StateDirectory::new();
    let mut server = state.serve("ends");
    server.evaluate("(defun f () 1) (defvar *x* 1)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "mine"}));
    server.evaluate("(defun g () 2) (setf *x* 2)");
    let [unwinding, ending] = ["unwinding", "ending"].map(|name| state.directory.join(name));
    // The restore waits until this evaluation has unwound.
    let code = format!(
        "(sleep 60))
           (with-open-file (file {unwinding:?} :direction :output))
           (loop until (probe-file {ending:?}) do (sleep 0.01)))"
    );
    server.post_running("(unwind-protect (progn", &code, 60.0);
    server.post_call("checkpoint", json!({"action": "restore", "name": "mine"}));
    wait_until("the evaluation unwinds", || unwinding.exists());
    server.close();
    // If this takes too long, the worker does not wait for the evaluation, and the session continues in the same way.
    wait_until("the server ends", || !state.list().contains("; served by process"));
    std::fs::write(&ending, "").unwrap();
    server.end();
    let text = state.serve("ends").evaluate("(list (f) (fboundp 'g) *x*)");
    assert!(text.contains("The session \"ends\" continues. Restored: the checkpoint \"mine\" from "), "{text}");
    assert!(text.ends_with("=> (1 NIL 1)"), "{text}");
}

#[test]
fn client_is_answered_while_its_session_is_restored() {
    let state = StateDirectory::new();
    let (gate, marker) = (state.directory.join("gate"), state.directory.join("marker"));
    let mut server = state.serve("slow");
    server.evaluate(&format!(
        "(progn (with-open-file (s {marker:?} :direction :output :if-exists :supersede))
                (loop while (probe-file {gate:?}) do (sleep 0.01)) (defun f () 7))"
    ));
    server.finish();
    state.await_free("slow");
    files(&state.directory("slow"), "core").iter().for_each(|core| std::fs::remove_file(core).unwrap());
    for resets in [false, true] {
        std::fs::remove_file(&marker).unwrap();
        std::fs::write(&gate, "").unwrap();
        let mut server = state.serve("slow");
        wait_until("the session is being restored", || marker.exists());
        let waits = server.post_call("evaluate-lisp", json!({"code": "(f)"}));
        assert_eq!(server.request("ping", json!({}))["result"], json!({}));
        assert!(call_ok(&mut server, "describe-last-error", json!({})).starts_with("No error information"));
        if resets {
            let text = call_ok(&mut server, "reset-session", json!({}));
            assert!(text.contains("The reset ended the unfinished restore"), "{text}");
            assert!(server.outcome(waits).0.starts_with("[ERROR] CANCELLED"));
            assert_eq!(server.evaluate("(fboundp 'f)"), "=> NIL");
            continue;
        }
        // A session whose restore was interrupted is left unchanged.
        server.finish();
        state.await_free("slow");
        assert!(files(&state.directory("slow"), "core").is_empty());
    }
}

#[test]
fn session_with_damaged_images_replays_its_definitions() {
    let state = StateDirectory::new();
    let mut server = state.serve("torn");
    server.evaluate("(defun f () 1) (defvar *x* 1) (setf *x* 2)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "first"}));
    server.evaluate("(defun g () 2) (setf *x* 3)");
    server.finish();
    state.await_free("torn");
    let cores = files(&state.directory("torn"), "core");
    assert!(cores.len() > 1);
    for core in cores {
        let mut bytes = std::fs::read(&core).unwrap();
        // The beginning of an incomplete core may have never been written.
        bytes.iter_mut().take(1 << 20).for_each(|byte| *byte = 0xff);
        std::fs::write(core, bytes).unwrap();
    }
    let mut server = state.serve("torn");
    let text = server.evaluate("(list (f) (g) *x*)");
    assert!(text.contains("The session \"torn\" continues.") && text.ends_with("=> (1 2 1)"), "{text}");
}

/// The damage is noticed only when the image boots.
#[test]
fn session_whose_last_image_does_not_boot_continues_from_the_previous_checkpoint() {
    let state = StateDirectory::new();
    let mut server = state.serve("unbootable");
    server.evaluate("(defun f () 1) (defvar *x* 1) (setf *x* 2)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "first"}));
    server.evaluate("(defun g () 2) (setf *x* 3)");
    server.finish();
    state.await_free("unbootable");
    for manifest in files(&state.directory("unbootable"), "json") {
        let text = std::fs::read_to_string(&manifest).unwrap();
        let checkpoint: serde_json::Value = serde_json::from_str(&text).unwrap();
        if checkpoint["name"].as_str().unwrap().starts_with("auto-") {
            damage(&manifest.with_extension("core"));
        }
    }
    let mut server = state.serve("unbootable");
    let text = server.evaluate("(list (f) (g) *x*)");
    assert!(text.contains("Restored: the checkpoint \"first\" from ") && text.ends_with("=> (1 2 2)"), "{text}");
    let list = call_ok(&mut server, "checkpoint", json!({}));
    assert!(list.contains("; damaged: can only be deleted or replaced"), "{list}");
}

#[test]
fn incomplete_image_falls_back_to_the_previous_checkpoint_or_replay() {
    let state = StateDirectory::new();
    let mut server = state.serve("cut");
    server.evaluate("(defun f () 1) (defvar *x* 1) (setf *x* 2)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "first"}));
    server.evaluate("(defun g () 2) (setf *x* 3)");
    server.finish();
    state.await_free("cut");
    // During a long evaluation the server may have saved the session before its end.
    let names = files(&state.directory("cut"), "json").into_iter().map(|manifest| {
        let checkpoint: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(manifest).unwrap()).unwrap();
        checkpoint["name"].as_str().unwrap().to_owned()
    });
    let number = |name: &str| name.strip_prefix("auto-").and_then(|number| number.parse::<u32>().ok());
    let last = names.filter_map(|name| number(&name)).max().expect("it is saved at the end");
    let damaged = format!("The last checkpoint, \"auto-{last}\", is incomplete or damaged.");
    // First the automatic checkpoint is truncated, then all of them.
    for (image, damaged, restored, outcome) in [
        ("auto-", damaged.as_str(), "Restored: the checkpoint \"first\" from ", "2 2"),
        ("", "is incomplete or damaged.", "Restored: all 3 defining forms.", "2 1"),
    ] {
        for manifest in files(&state.directory("cut"), "json") {
            let text = std::fs::read_to_string(&manifest).unwrap();
            let checkpoint: serde_json::Value = serde_json::from_str(&text).unwrap();
            if checkpoint["name"].as_str().unwrap().starts_with(image) {
                let core = std::fs::File::options().write(true).open(manifest.with_extension("core")).unwrap();
                core.set_len(checkpoint["bytes"].as_u64().unwrap() - 1).unwrap();
            }
        }
        let mut server = state.serve("cut");
        let text = server.evaluate("(list (f) (g) *x*)");
        assert!(text.starts_with("[notice]\nThe session \"cut\" continues. The last checkpoint, "), "{text}");
        assert!(text.contains(damaged) && text.contains(restored), "{text}");
        assert!(text.ends_with(&format!("=> (1 {outcome})")), "{text}");
        // The server is killed so that it saves no further image.
        kill_all(&state);
    }
}

/// A core from another directory is checked before it is booted.
#[test]
fn copied_session_directory_works_and_a_damaged_core_is_rejected() {
    let state = StateDirectory::new();
    let mut server = state.serve("here");
    server.evaluate("(defun f () 1) (defvar *x* 1) (setf *x* 2)");
    server.finish();
    state.await_free("here");
    let copy = |name: &str| {
        std::fs::create_dir(state.directory(name)).unwrap();
        for file in std::fs::read_dir(state.directory("here")).unwrap() {
            let path = file.unwrap().path();
            std::fs::copy(&path, state.directory(name).join(path.file_name().unwrap())).unwrap();
        }
        let [core] = &files(&state.directory(name), "core")[..] else { panic!("one image") };
        core.clone()
    };
    let core = copy("there");
    let fingerprint = || -> serde_json::Value {
        serde_json::from_slice::<serde_json::Value>(&std::fs::read(core.with_extension("json")).unwrap()).unwrap()["seal"]
            .clone()
    };
    let before = fingerprint();
    let mut server = state.serve("there");
    let text = server.evaluate("(list (f) *x*)");
    assert!(text.ends_with("=> (1 2)"), "{text}");
    // The checksum was verified once: the manifest now has the copy's inode.
    assert!(
        fingerprint()["inode"] != before["inode"] && fingerprint()["checksum"] == before["checksum"],
        "{before} {}",
        fingerprint()
    );
    kill_all(&state);

    let core = copy("damaged");
    let mut bytes = std::fs::read(&core).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&core, bytes).unwrap();
    let mut server = state.serve("damaged");
    let text = server.evaluate("(list (f) *x*)");
    assert!(
        text.contains("is incomplete or damaged. Restored: all 2 defining forms.") && text.ends_with("=> (1 1)"),
        "{text}"
    );
}

#[test]
fn save_at_exit_counts_even_if_the_clock_was_set_back() {
    let state = StateDirectory::new();
    let mut server = state.serve("clock");
    server.evaluate("(defvar *x* 1)");
    assert!(server.finish().status.success());
    state.await_free("clock");
    // The checkpoint was saved before the clock was set back by a day.
    let [manifest] = &files(&state.directory("clock"), "json")[..] else { panic!("one checkpoint") };
    let mut saved: serde_json::Value = serde_json::from_slice(&std::fs::read(manifest).unwrap()).unwrap();
    let time: jiff::Timestamp = saved["saved"].as_str().unwrap().parse().unwrap();
    saved["saved"] = json!((time + jiff::SignedDuration::from_hours(24)).to_string());
    std::fs::write(manifest, saved.to_string()).unwrap();
    for value in 2..6 {
        let mut server = state.serve("clock");
        let text = server.evaluate(&format!("(shiftf *x* {value})"));
        assert!(text.ends_with(&format!("=> {}", value - 1)), "{text}");
        assert!(server.finish().status.success());
        state.await_free("clock");
    }
}

#[test]
fn failed_save_at_exit_is_reported_and_keeps_the_saved_state() {
    let state = StateDirectory::new();
    let mut server = state.serve("full");
    server.evaluate("(defvar *x* 1) (setf *x* 2)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "mine"}));
    // From here on every save fails, including those of an idle session.
    server.evaluate(NO_SIGXFSZ);
    limit_file_size(worker(&server), Some(1 << 20));
    server.evaluate("(defun f () :f) (setf *x* 3)");
    assert!(server.finish().status.success());
    state.await_free("full");
    let mut server = state.serve("full");
    let text = server.evaluate("(list *x* (f))");
    assert!(text.contains("Restored: the checkpoint \"") && text.ends_with("=> (2 :F)"), "{text}");
    let failure = "The session was not saved when its last server ended: the saving process exited with ";
    assert!(text.contains(failure), "{text}");
    // The fork fails for lack of memory.
    server.evaluate("(defun g () :g)");
    assert_eq!(server.evaluate(NO_FORK), "=> (0 0)");
    let end = server.finish();
    let report_heading = "Messages from the last save of the session \"full\":\n";
    assert!(end.stderr.contains(report_heading), "{}", end.stderr);
    assert!(end.stderr.contains("The session was not saved: the saving process exited with "), "{}", end.stderr);
    assert!(end.stderr.contains("the session was not saved: "), "{}", end.stderr);
    assert!(end.stderr.contains("The process cannot be copied: Cannot allocate memory."), "{}", end.stderr);
    state.await_free("full");
    let mut server = state.serve("full");
    let text = server.evaluate("(list *x* (f) (g))");
    let failure = "was not saved when its last server ended: The process cannot be copied: Cannot allocate memory.";
    assert!(text.contains(failure) && text.ends_with("=> (2 :F :G)"), "{text}");
    assert!(server.finish().status.success());
    // This server has saved the session. No incomplete core is left.
    state.await_free("full");
    let mut server = state.serve("full");
    let text = server.evaluate("(list *x* (f) (g))");
    assert!(!text.contains("was not saved") && text.ends_with("=> (2 :F :G)"), "{text}");
    assert!(!server.finish().stderr.contains(report_heading));
    state.await_free("full");
    let directory = state.directory("full");
    assert_eq!(files(&directory, "core").len(), files(&directory, "json").len());
}

#[test]
fn save_at_exit_that_could_write_nothing_is_reported_once() {
    let state = StateDirectory::new();
    let mut server = state.serve("full");
    server.evaluate("(defvar *x* 1)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "mine"}));
    server.evaluate(NO_SIGXFSZ);
    // As on a full disk, files can be created, but nothing can be written to them.
    limit_file_size(worker(&server), Some(0));
    server.evaluate("(setf *x* 2)");
    assert!(server.finish().status.success());
    state.await_free("full");
    let failure = "The session was not saved when its last server ended: the save did not complete";
    let mut server = state.serve("full");
    let text = server.evaluate("*x*");
    assert!(text.contains(failure) && text.ends_with("=> 1"), "{text}");
    assert!(text.contains("Restored: the checkpoint \""), "{text}");
    assert!(server.finish().status.success());
    state.await_free("full");
    let text = state.serve("full").evaluate("*x*");
    assert!(!text.contains(failure) && text.ends_with("=> 1"), "{text}");
}

#[test]
fn values_assigned_after_a_save_at_exit_are_reported_as_lost_when_the_next_server_is_killed() {
    let state = StateDirectory::new();
    let mut server = state.serve("killed");
    server.evaluate("(defvar *x* 1)");
    assert!(server.finish().status.success());
    let mut server = state.serve("killed");
    // Without a fork, no automatic checkpoint contains the value.
    assert!(server.evaluate(NO_FORK).ends_with("=> (0 0)"));
    server.evaluate("(setf *x* 2)");
    kill_all(&state);
    drop(server);
    let text = state.serve("killed").evaluate("*x*");
    let lost = "Lost: threads, open files, and values assigned to variables since the checkpoint.";
    assert!(text.contains(lost) && text.ends_with("=> 1"), "{text}");
}

/// Evaluates `code` in a server whose log cannot be written, and waits for the notice about the log.
fn evaluate_until_log_fails(server: &mut Server, code: &str) {
    let mut text = server.evaluate(code);
    wait_until("the log cannot be written", || {
        let answer = std::mem::replace(&mut text, server.evaluate("1"));
        answer.contains("The session's log cannot be written")
    });
}

#[test]
fn a_log_that_can_be_written_again_during_the_shutdown_is_complete() {
    let state = StateDirectory::new();
    let mut server = state.serve_without_sigxfsz("late");
    server.evaluate("(defun before () 1)");
    limit_file_size(server.pid(), Some(10));
    evaluate_until_log_fails(&mut server, "(defun during () 2)");
    // A directory with the name of the new log makes each attempt to write it fail until the socket is closed.
    let (obstacle, socket) = (state.directory("late").join("log.draft"), state.directory.join("sbcl-mcp/late.sock"));
    wait_until("the name is free", || std::fs::create_dir(&obstacle).is_ok());
    limit_file_size(server.pid(), None);
    let code = format!(
        "(loop while (probe-file {socket:?}) do (sleep 0.01))
         (sleep 0.1)
         (sb-ext:delete-directory \"{}/\")",
        obstacle.display()
    );
    server.post_running("", &code, 60.0);
    server.finish();
    assert!(!obstacle.exists());
    state.await_free("late");
    // Without its cores, the session continues from its log.
    files(&state.directory("late"), "core").iter().for_each(|core| std::fs::remove_file(core).unwrap());
    let text = state.serve("late").evaluate("(list (before) (during))");
    assert!(text.ends_with("=> (1 2)") && !text.contains("could not be written"), "{text}");
}

#[test]
fn a_log_that_cannot_be_written_is_reported_and_written_later() {
    let state = StateDirectory::new();
    let start = || state.serve_without_sigxfsz("full");
    let mut server = start();
    server.evaluate("(defun before () 1)");
    limit_file_size(server.pid(), Some(10));
    // The notice comes with this answer or the next one.
    let notice = "[notice]\nThe session's log cannot be written: File too large (os error 27). Until the log can ";
    let texts = ["(defun during () 2)", "(defun later () 3)"].map(|form| server.evaluate(form));
    assert!(texts.iter().any(|text| text.starts_with(notice)), "{texts:?}");
    assert_eq!(server.evaluate("(later)"), "=> 3");
    // A client that attaches meanwhile is notified, too.
    let mut client = Client::connect(&state.directory.join("sbcl-mcp/full.sock"));
    client.initialize("person");
    let (text, _) = client.call("evaluate-lisp", json!({"code": "(later)"}));
    assert!(text.starts_with(notice) && text.ends_with("=> 3"), "{text}");
    drop(client);
    // A new image reports that the log works again, too.
    kill_worker(&server);
    limit_file_size(server.pid(), None);
    wait_until("the log is written again", || {
        server.evaluate("(later)").contains("The session's log can be written again")
    });
    assert_eq!(server.evaluate("(later)"), "=> 3");
    kill_all(&state);
    drop(server);
    let mut server = start();
    let text = server.evaluate("(list (before) (during) (later))");
    assert!(text.starts_with("[notice]\nThe session \"full\" continues. Restored: "), "{text}");
    assert!(text.ends_with("=> (1 2 3)"), "{text}");

    // The server is killed while the log cannot be written: the next server reports once that definitions may be
    // missing. Without a fork, no automatic checkpoint contains them.
    assert_eq!(server.evaluate(NO_FORK), "=> (0 0)");
    limit_file_size(server.pid(), Some(10));
    evaluate_until_log_fails(&mut server, "(defun lost () 4)");
    kill_all(&state);
    drop(server);
    let mut server = start();
    let text = server.evaluate("(list (before) (fboundp 'lost))");
    assert!(text.contains("continues. The session's log could not be written from "), "{text}");
    let until = " ago until the last server ended: definitions made in that time may be missing.";
    assert!(text.contains(until), "{text}");
    assert!(text.ends_with("=> (1 NIL)"), "{text}");
    kill_all(&state);
    drop(server);
    let mut server = start();
    assert!(!server.evaluate("1").contains("log could not be written"));
}

#[test]
fn session_whose_name_cannot_name_a_socket_starts_without_a_message() {
    let state = StateDirectory::new();
    let path = state.directory.join("elsewhere");
    for name in [path.to_str().unwrap(), "two words", &"long".repeat(20)] {
        let end = state.serve(name).finish();
        assert!(end.status.success() && end.stderr.is_empty(), "{name}: {}", end.stderr);
    }
}

#[test]
fn session_files_are_readable_only_by_their_owner() {
    let state = StateDirectory::new();
    let directory = state.directory.join("shared");
    std::fs::create_dir(&directory).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o755)).unwrap();
    let mut server = state.serve(directory.to_str().unwrap());
    server.evaluate("(defvar *secret* 1)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "mine"}));
    server.evaluate("(setf *secret* 2)");
    server.finish();
    // Serving the session again waits for the process that saves it.
    assert!(state.serve(directory.to_str().unwrap()).evaluate("*secret*").ends_with("=> 2"));
    assert!(files(&directory, "core").len() > 1);
    for entry in std::fs::read_dir(&directory).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
}

#[test]
fn directory_with_foreign_files_is_not_used_or_deleted_as_a_session() {
    let state = StateDirectory::new();
    let directory = state.directory.join("mine");
    let path = directory.to_str().unwrap();
    std::fs::create_dir(&directory).unwrap();
    let mine = ["app.core", "app.forms", "log", "notes.draft"].map(|name| directory.join(name));
    mine.iter().for_each(|file| std::fs::write(file, "mine").unwrap());
    let end = state.start(&["--session", path]).end();
    assert!(end.stderr.contains("is not empty and holds no session"), "{}", end.stderr);
    for action in ["delete", "export"] {
        let output = state.sessions(&[action, path]);
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).starts_with("There is no session "), "{output:?}");
    }
    assert!(mine.iter().all(|file| std::fs::read_to_string(file).unwrap() == "mine"));
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), mine.len());

    // An empty directory may become a session. Files that others add later do not belong to the session.
    mine.iter().for_each(|file| std::fs::remove_file(file).unwrap());
    let mut server = state.serve(path);
    server.evaluate("(defvar *x* 1)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "one"}));
    server.finish();
    for name in ["app.core", "notes.draft"] {
        std::fs::write(directory.join(name), "mine").unwrap();
    }
    let mut server = state.serve(path);
    assert!(server.evaluate("*x*").ends_with("=> 1"));
    server.finish();
    wait_until("the session can be deleted", || state.sessions(&["delete", path]).status.success());
    let mut left: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["app.core", "notes.draft"]);
}
