//! Programs that evaluated code starts: where their output goes, and when they are ended.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use crate::client::{DEADLINE, Server, call_err, call_ok, evaluate_err};
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::json;

/// Returns the notice in the answer to an evaluation that ran a program with `option`, `:output` or `:error`, set to T.
fn notice(option: &str) -> String {
    format!(
        "[notice]\nOutput of a program run with {option} t is not captured: it goes to this process's own output, in the \
         server to stderr. To capture the output, pass *standard-output* instead of t (or of UIOP's :interactive).\n\n"
    )
}

/// Returns the running processes with this command line.
fn running(command_line: &str) -> Vec<String> {
    let wanted: Vec<u8> = command_line.split(' ').flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect();
    let processes = std::fs::read_dir("/proc").expect("Linux has it").flatten();
    processes
        .filter(|process| std::fs::read(process.path().join("cmdline")).is_ok_and(|found| found == wanted))
        .map(|process| process.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Waits until `count` processes with this command line run.
#[track_caller]
fn await_running(command_line: &str, count: usize) {
    let deadline = Instant::now() + DEADLINE;
    while running(command_line).len() != count {
        assert!(Instant::now() < deadline, "{:?}", running(command_line));
        std::thread::yield_now();
    }
}

/// Returns a number of seconds that no other test's program sleeps, so that its process can be found.
fn seconds() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(7000);
    format!("{}.{}", NUMBER.fetch_add(1, Ordering::Relaxed), std::process::id())
}

fn shell(script: &str, options: &str) -> String {
    format!("(sb-ext:run-program \"/bin/sh\" '(\"-c\" \"{script}\") {options})")
}

#[apply(both_modes)]
fn interrupted_evaluation_kills_the_process_groups_of_its_programs(mode: Mode) {
    let mut server = mode.ready();
    let time = seconds();
    let sleep = format!("sleep {time}");
    for (script, options) in [
        // The shell waits for its child.
        (format!("{sleep}; echo"), ""),
        // The shell does not wait: its process group outlives it and holds the stream that Lisp reads.
        (format!("{sleep} & echo"), ":output *standard-output*"),
        // The shell shares this process's stdin.
        (format!("{sleep}; echo"), ":input t"),
    ] {
        let code = format!("(progn {} (loop))", shell(&script, options));
        let (_, is_error) = server.call_tool("evaluate-lisp", json!({"code": code, "timeout": 0.5}));
        assert!(is_error);
        await_running(&sleep, 0);
        server.assert_works();
    }
    // A thread of the evaluation starts the program, and the client cancels the call.
    let script = format!("{sleep}; echo");
    let code = format!("(sb-thread:join-thread (sb-thread:make-thread (lambda () {})))", shell(&script, ""));
    let id = server.post_call("evaluate-lisp", json!({"code": code}));
    await_running(&sleep, 1);
    server.notify("notifications/cancelled", json!({"requestId": id}));
    await_running(&sleep, 0);
    server.assert_works();
}

/// A thread may be about to start a program when its evaluation is interrupted. SBCL lists the program among its
/// processes only after the program has begun to run.
#[apply(both_modes)]
fn interrupted_evaluation_kills_a_program_that_is_being_started(mode: Mode) {
    let mut server = mode.ready();
    let sleep = format!("sleep {}", seconds());
    server.evaluate(
        "(sb-int:encapsulate 'sb-impl::wait-for-exec 'slow
                             (lambda (wait &rest arguments) (sleep 3) (apply wait arguments)))",
    );
    let program = shell(&format!("{sleep}; echo"), "");
    let code = format!("(sb-thread:join-thread (sb-thread:make-thread (lambda () {program})))");
    let (_, is_error) = server.call_tool("evaluate-lisp", json!({"code": code, "timeout": 0.5}));
    assert!(is_error);
    await_running(&sleep, 0);
    server.assert_works();
}

#[test]
fn run_program_without_wait_survives_interrupts_and_ends_on_reset() {
    let mut server = Server::ready();
    let sleep = format!("sleep {}", seconds());
    server.evaluate(&format!("(progn {} nil)", shell(&format!("{sleep}; echo"), ":wait nil")));
    await_running(&sleep, 1);
    call_err(&mut server, "evaluate-lisp", json!({"code": "(loop)", "timeout": 0.3}));
    assert_eq!(running(&sleep).len(), 1);
    // An error does not end the program.
    evaluate_err(&mut server, "(error \"boom\")");
    assert_eq!(running(&sleep).len(), 1);
    call_ok(&mut server, "reset-session", json!({}));
    await_running(&sleep, 0);
}

#[apply(both_modes)]
fn started_programs_end_when_the_server_or_eval_exits(mode: Mode) {
    let mut server = mode.ready();
    let sleep = format!("sleep {}", seconds());
    server.evaluate(&format!("(progn {} nil)", shell(&format!("{sleep}; echo"), ":wait nil")));
    await_running(&sleep, 1);
    assert!(server.finish().status.success());
    await_running(&sleep, 0);
    let sleep = format!("sleep {}", seconds());
    let code = format!("(progn {} 1)", shell(&format!("{sleep}; echo"), ":wait nil"));
    assert!(Command::new(crate::client::binary()).args(["eval", &code]).status().expect("it starts").success());
    await_running(&sleep, 0);
}

#[apply(both_modes)]
fn run_program_output_t_is_reported_as_going_to_stderr(mode: Mode) {
    let mut server = mode.ready();
    let echo =
        |options: &str| format!("(sb-ext:process-exit-code (sb-ext:run-program \"/bin/echo\" '(\"hello\") {options}))");
    for (option, options) in [
        (":output", ":output t"),
        (":error", ":error t"),
        (":error", ":output nil :error t"),
        (":output", ":search nil :output t :wait t"),
        (":output t and :error", ":output t :error t"),
    ] {
        // The notice comes once per evaluation.
        let code = format!("(progn {0} {0})", echo(options));
        assert_eq!(server.evaluate(&code), format!("{}=> 0", notice(option)), "{options}");
    }
    for options in ["", ":output nil", ":output :stream", ":error :output"] {
        assert_eq!(server.evaluate(&echo(options)), "=> 0", "{options}");
    }
    insta::allow_duplicates! { insta::assert_snapshot!(server.evaluate(&echo(":output *standard-output*")), @r"
    [stdout]
    hello

    => 0
    "); }
    insta::allow_duplicates! { insta::assert_snapshot!(server.evaluate("(uiop:run-program \"echo hello\" :output :string)"), @r#"
    => "hello
    "
    => NIL
    => 0
    "#); }
    assert_eq!(
        server.evaluate("(uiop:run-program '(\"/bin/echo\" \"hello\") :output :interactive)"),
        format!("{}=> NIL\n=> NIL\n=> 0", notice(":output"))
    );
    let report = evaluate_err(&mut server, "(sb-ext:run-program \"/bin/echo\" '() :output)");
    assert!(report.starts_with("[ERROR] SB-INT:SIMPLE-PROGRAM-ERROR\nodd number of &KEY arguments\n"), "{report}");
    let end = server.finish();
    assert!(end.stderr.lines().filter(|line| *line == "hello").count() >= 5, "{}", end.stderr);
}

#[apply(both_modes)]
fn runtime_pathname_is_sbcl_mcp_and_refuses_sbcl_options(mode: Mode) {
    let mut server = mode.ready();
    let program = std::fs::canonicalize(Path::new(crate::client::binary())).expect("the binary exists");
    assert_eq!(
        server.evaluate(
            "(values (sb-ext:native-namestring sb-ext:*runtime-pathname*) (sb-ext:native-namestring \
             sb-ext:*core-pathname*) (first sb-ext:*posix-argv*) (length sb-ext:*posix-argv*))"
        ),
        format!("=> {program:?}\n=> {program:?}\n=> {program:?}\n=> 1")
    );
    let code = "(multiple-value-list (uiop:run-program (list (sb-ext:native-namestring sb-ext:*runtime-pathname*) \
                \"--noinform\" \"--eval\" \"(print 1)\") :error-output :string :ignore-error-status t))";
    let answer = server.evaluate(code);
    assert!(answer.contains("sbcl-mcp serves SBCL to MCP clients") && answer.ends_with(" 2)"), "{answer}");
}
