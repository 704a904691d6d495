//! Reloading; tests that hang, exit or fill the heap; and runs in a fresh image.

use super::*;
use crate::attach::RuntimeDirectory;
use crate::server_mode::Mode;

#[test]
fn run_tests_reload_loads_files_changed_on_disk() {
    let Some(project) = fiveam(FIVEAM) else { return };
    let mut server = project.server();
    call_ok(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.3}));
    let name = json!({"name": "parse-empty"});
    assert!(call_ok(&mut server, "run-tests", name.clone()).starts_with("FAILED  0 passed"));
    let repaired = "(defpackage :demo (:use :cl) (:export #:parse #:item))\n(in-package :demo)\n\
                    (defun parse (text) (declare (ignore text)) 0)\n(defun item (v n) (aref v n))\n";
    project.write("src/demo.lisp", repaired);
    project.write(
        "tests/tests.lisp",
        "(defpackage :demo-tests (:use :cl :fiveam :demo))\n(in-package :demo-tests)\n(def-suite demo)\n(in-suite demo)\n\
         (test parse-empty (is (eql 0 (parse \"\"))))\n",
    );
    // Without `reload`, changes on disk are ignored.
    assert!(call_ok(&mut server, "run-tests", name).starts_with("FAILED  0 passed"));
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "reload": true}));
    assert!(text.starts_with("=> all pass  1 passed, 0 failed, 0 errors, 0 skipped in "), "{text}");
}

#[test]
fn run_tests_reload_names_stale_definitions_and_defvars() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest one 1 1)\n";
    for (fresh, more) in [(false, ""), (true, "This test run used a fresh image, which loads only files.\n")] {
        let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
        let source = |variable: &str, function: &str| {
            let text =
                format!("(defpackage :demo (:use :cl))\n(in-package :demo)\n{variable}\n(defun {function} () 1)\n");
            project.write("src/demo.lisp", &text);
        };
        source("(defvar *limit* 1)", "old");
        let mut server = project.server();
        call_ok(&mut server, "run-tests", json!({"system": "demo"}));
        source("(defvar *limit* 2)", "new");
        let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "reload": true, "fresh": fresh}));
        let expected = format!(
            "[notice]\n{more}DEMO::*LIMIT* keeps its value: its DEFVAR in src/demo.lisp has changed, but DEFVAR \
             does not reassign a bound variable. To assign the new value, in the file's package: (setf DEMO::*LIMIT* 2).\nThe image still \
             has definitions that src/demo.lisp no longer contains: function DEMO::OLD.\n\n=> all pass  1 passed, "
        );
        assert!(text.starts_with(&expected), "{text}");
        // The same holds for a file that its system no longer contains.
        let definition = std::fs::read_to_string(project.directory.join("demo.asd")).expect("a file");
        project.write("demo.asd", &definition.replace("(:file \"demo\")", ""));
        let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "reload": true, "fresh": fresh}));
        let expected = "src/demo.lisp, a file that the system demo no longer contains: package \"DEMO\", variable \
                        DEMO::*LIMIT*, function DEMO::NEW.\n";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn run_tests_verdict_ignores_reset_printer_settings_and_image_loss() {
    let Some(project) = fiveam(FIVEAM) else { return };
    let mut server = project.server();
    let verdict = |server: &mut Server| {
        let text = call_ok(server, "run-tests", json!({"system": "demo", "timeout": 1}));
        let line = text.lines().find(|line| line.starts_with("FAILED")).expect("a verdict").to_owned();
        (timeless(&line), text.lines().filter(|line| line.contains("expected (1), got NIL")).count())
    };
    let known = verdict(&mut server);
    assert_eq!(known, ("FAILED  2 passed, 2 failed, 4 errors, 1 skipped".to_owned(), 1));
    // Inspection tools answer during a run.
    let id = server.post_call("run-tests", json!({"system": "demo", "timeout": 1}));
    let description = call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(description.starts_with("COMMON-LISP:CAR [FUNCTION]"), "{description}");
    server.outcome(id);
    // After a reset.
    call_ok(&mut server, "reset-session", json!({}));
    project.register(&mut server);
    assert_eq!(verdict(&mut server), known);
    // With unusual settings of printer and reader.
    server.evaluate(
        "(setf *print-base* 2 *print-radix* t *print-length* 1 *print-level* 1 *print-case* :capitalize \
               *print-pretty* t *print-right-margin* 10 *read-base* 16 *print-circle* t *print-escape* nil)",
    );
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "timeout": 1}));
    assert!(text.lines().any(|line| timeless(line) == known.0), "{text}");
    // After the image is lost.
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": "(sb-posix:kill (sb-posix:getpid) 9)"}));
    assert!(is_error && text.contains("IMAGE-LOST"), "{text}");
    call_ok(&mut server, "reset-session", json!({}));
    project.register(&mut server);
    assert_eq!(verdict(&mut server), known);
}

#[test]
fn test_that_kills_the_process_is_named_in_image_lost() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest dies (sb-posix:kill (sb-posix:getpid) 9) 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    let text = call_err(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("IMAGE-LOST"), "{text}");
    assert!(text.contains(" during the test DEMO-TESTS::DIES. A new image"), "{text}");
    server.assert_works();
    // A later loss does not name the test.
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": "(sb-posix:kill (sb-posix:getpid) 9)"}));
    assert!(text.contains("IMAGE-LOST") && !text.contains("DIES"), "{text}");
}

#[test]
fn timed_out_step_of_a_test_run_is_named() {
    let mut server = ready();
    call_ok(&mut server, "configure-limits", json!({"timeout": 0}));
    let code = "(unwind-protect (progn (sbcl-host/testing::announce-step \"the load of demo\" 100) (loop))
                  (sbcl-host/testing::announce-test nil))";
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": code}));
    assert!(
        text.starts_with(
            "[ERROR] TIMEOUT\nThe time limit for the load of demo was exceeded, so the test run was stopped.\n"
        ),
        "{text}"
    );
    // No time limit remains after the step.
    let code =
        "(progn (sbcl-host/testing::announce-step \"the load of demo\" 100) (sbcl-host/testing::announce-test nil)
                  (sleep 0.3) 1)";
    assert_eq!(server.evaluate(code), "=> 1");
}

/// A project with a test that cannot be interrupted, unless `*here*` is bound.
fn project_with_stuck_test() -> Project {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest before 1 1)\n\
                 (deftest stuck (unless (boundp 'cl-user::*here*) (sb-sys:without-interrupts (loop))) nil)\n";
    Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests)
}

#[test]
fn uninterruptible_test_replaces_the_image() {
    let project = project_with_stuck_test();
    let mut server = project.server();
    let text = call_err(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.2}));
    let expected = "[ERROR] TIMEOUT\nThe time limit for the test DEMO-TESTS::STUCK was exceeded.\n\
                    The Lisp image did not respond to an interrupt (interrupts are off inside without-interrupts, and in \
                    code that interrupt-thread or a timer runs, except inside with-interrupts) and was terminated. A \
                    new image has replaced the lost image.\n";
    assert!(text.starts_with(expected), "{text}");
    server.assert_works();
}

#[test]
fn uninterruptible_test_in_a_fresh_image_leaves_the_session_intact() {
    let project = project_with_stuck_test();
    let mut server = project.server();
    server.evaluate("(defvar *here* t)");
    let text = call_err(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.2, "fresh": true}));
    let expected = "\n[ERROR] TIMEOUT\nThe time limit for the test DEMO-TESTS::STUCK was exceeded. \
                    The Lisp image did not respond to an interrupt (interrupts are off inside without-interrupts, and in \
                    code that interrupt-thread or a timer runs, except inside with-interrupts).\n";
    assert!(text.contains(expected), "{text}");
    assert_eq!(server.evaluate("*here*"), "=> T");
}

#[test]
fn heap_filling_test_is_an_error_and_the_other_tests_run() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest before 1 1)\n\
                 (deftest fills (length (loop collect (make-array 10000))) 0)\n(deftest after 1 1)\n\
                 (deftest fills-again (length (loop collect (make-list 10000))) 0)\n(deftest end 1 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = libraries::start_with(&["--heap", "512M"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.starts_with("FAILED  3 passed, 0 failed, 2 errors, 0 skipped"), "{text}");
    assert_eq!(text.matches("HEAP-EXHAUSTED The heap was nearly used up (").count(), 2, "{text}");
    assert_eq!(
        text.matches("so the test was ended. Keep fewer objects, or start with a larger heap.").count(),
        2,
        "{text}"
    );
    server.assert_works();
    // Data that a test keeps leaves less memory to later evaluations. The loop ends at the limit, and the cleanup form
    // exceeds it by 40 MB.
    let keeps = "(defvar *kept* '())\n(defun keep () (push (make-array 100000) *kept*))\n\
                 (deftest keeps (unwind-protect (loop (keep)) (loop repeat 50 do (keep))) 0)\n";
    project.write("tests/tests.lisp", &format!("{tests}{keeps}"));
    let text = call_err(&mut server, "run-tests", json!({"system": "demo", "reload": true}));
    assert!(text.contains("[ERROR] HEAP-EXHAUSTED\nThe heap was nearly used up ("), "{text}");
    assert!(text.contains(" MB, even after the test DEMO-TESTS::KEEPS ended; a garbage "), "{text}");
    server.assert_works();
}

#[test]
fn cancelling_run_tests_ends_the_run_and_restores_the_framework() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest hangs (loop (ignore-errors (loop))) 1)\n(deftest after 1 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    server.evaluate("(asdf:load-system \"demo/tests\")");
    let id = server.post_call("run-tests", json!({"system": "demo"}));
    let running = |server: &mut Server| call_ok(server, "check-evaluation", json!({})).contains("running");
    let deadline = std::time::Instant::now() + crate::client::DEADLINE;
    while !running(&mut server) {
        assert!(std::time::Instant::now() < deadline, "the evaluation does not begin");
    }
    abort_newest(&mut server);
    let (text, is_error) = server.outcome(id);
    assert!(is_error && text.contains("[ERROR] CANCELLED"), "{text}");
    // The framework's functions are restored.
    let text = call_ok(&mut server, "run-tests", json!({"name": "after"}));
    assert!(text.starts_with("=> all pass  1 passed"), "{text}");
    let code = "(sb-impl::encapsulation-info (sb-kernel:%symbol-function 'sb-rt:do-tests))";
    assert_eq!(server.evaluate(code), "=> NIL");
}

#[test]
fn run_tests_fresh_loads_only_files_and_reports_stale_session_state() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest stale (parse \"\") (1))\n(deftest spoilt (parse \"\") nil)\n(deftest fine 1 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = libraries::start_with(&["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    // Systems not loaded in the session stay unloaded there.
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    let expected = "[notice]\nThis test run used a fresh image, which loads only files.\n\n\
                    FAILED  2 passed, 1 failed, 0 errors, 0 skipped in ";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(server.evaluate("(find-package \"DEMO-TESTS\")"), "=> NIL");
    server.evaluate("(asdf:load-system \"demo/tests\")");
    server.evaluate("(defun demo:parse (text) (declare (ignore text)) '(1))");
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    assert!(text.starts_with(expected), "{text}");
    let stale = "Stale state: this test passes in this session, but not in a fresh image: DEMO-TESTS::STALE\n\
                 Stale state: this test fails in this session, but not in a fresh image: DEMO-TESTS::SPOILT\n";
    assert!(text.contains(stale), "{text}");
    let content = structured(&mut server, json!({"name": "stale", "fresh": true}));
    assert_eq!(content["differs"], json!([{"name": "DEMO-TESTS::STALE", "passes": "session"}]), "{content:#}");
    // The session is unchanged.
    assert_eq!(server.evaluate("(demo:parse \"\")"), "=> (1)");
    // Evaluated tests are in no file, so a fresh image cannot run them.
    server.evaluate("(sb-rt:deftest evaluated 1 1)");
    let text = call_err(&mut server, "run-tests", json!({"name": "evaluated", "fresh": true}));
    assert!(text.starts_with("[ERROR] SIMPLE-ERROR\nThe tests are not in a file of a loaded system"), "{text}");
}

#[test]
fn a_fresh_image_finds_a_system_where_the_session_found_it() {
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", "");
    for (file, system, value) in [("main/app.asd", "app", 1), ("fix/odd.asd", "app", 2), ("lone/odd.asd", "lone", 2)] {
        let definition = format!(
            "(defsystem \"{system}\" :depends-on (\"sb-rt\") :components ((:file \"tests\"))\n  \
             :perform (test-op (o c) (symbol-call :sb-rt :do-tests)))"
        );
        project.write(file, &definition);
        let directory = file.split('/').next().expect("a directory");
        let tests = format!(
            "(defpackage :{system}-tests (:use :cl :sb-rt))\n(in-package :{system}-tests)\n(deftest value {value} 2)\n"
        );
        project.write(&format!("{directory}/tests.lisp"), &tests);
    }
    // The file that defines a system need not have its name.
    for (directories, system, result) in [
        (&["main", "fix"][..], "app", "=> all pass  1 passed, 0 failed"),
        (&["fix", "main"][..], "app", "FAILED  0 passed, 1 failed"),
        (&["lone"][..], "lone", "=> all pass  1 passed, 0 failed"),
    ] {
        let mut server = project.server();
        for directory in directories {
            call_ok(&mut server, "load-system", json!({"system": system, "directory": directory}));
        }
        for fresh in [false, true] {
            let text = call_ok(&mut server, "run-tests", json!({"system": system, "fresh": fresh}));
            assert!(text.contains(result), "{directories:?}: {text}");
        }
    }
}

#[test]
fn run_tests_with_fresh_and_suspects_works_in_the_background() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest good (parse \"\") nil)\n(deftest bad (parse \"x\") (1))\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let temporary = project.directory.join("temporary");
    std::fs::create_dir(&temporary).expect("a directory");
    let mut server = Server::start_with_environment(&[], &[("TMPDIR", &temporary)]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let arguments = json!({"system": "demo", "fresh": true, "suspects": 1, "background": true});
    let text = call_ok(&mut server, "run-tests", arguments.clone());
    assert_eq!(text, "Evaluation 2 continues in the background.");
    // Further evaluations need not wait.
    server.assert_works();
    let text = call_ok(&mut server, "check-evaluation", json!({"id": 2, "wait": 60}));
    let expected = "[notice]\nThis test run used a fresh image, which loads only files.\n\n\
                    FAILED  1 passed, 1 failed, 0 errors, 0 skipped in ";
    assert!(
        text.starts_with(expected) || text.starts_with(&expected.replace("1 failed, 0 errors", "0 failed, 1 error")),
        "{text}"
    );
    assert!(text.contains("Suspects: ") && text.contains("src/demo.lisp:"), "{text}");
    assert!(last_error(&mut server).starts_with("No error information"), "the run was in the background");
    // With `wait`, the call goes to the background while the fresh image runs.
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "fresh": true, "wait": 0.01}));
    assert!(text.ends_with("Evaluation 4 continues in the background."), "{text}");
    // Aborting the evaluation ends the fresh image.
    call_ok(&mut server, "run-tests", arguments);
    call_ok(&mut server, "abort-evaluation", json!({"id": 5}));
    let text = call_err(&mut server, "check-evaluation", json!({"id": 5, "wait": 25}));
    assert!(text.contains("[ERROR] CANCELLED"), "{text}");
    call_ok(&mut server, "check-evaluation", json!({"id": 4, "wait": 60}));
    // A reset ends the run and reports that.
    call_ok(&mut server, "run-tests", json!({"system": "demo", "fresh": true, "background": true}));
    let text = call_ok(&mut server, "reset-session", json!({}));
    assert!(text.contains("Background evaluation 6 was ended."), "{text}");
    server.assert_works();
    // The fresh images leave no files.
    server.finish();
    wait_until("the files of the fresh images are removed", || {
        std::fs::read_dir(&temporary).is_ok_and(|mut files| files.next().is_none())
    });
}

#[test]
fn slow_fresh_image_is_not_ended_by_the_watchdog() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest slow (progn (unless (find-package :session) (sleep 2)) 1) 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    // The test takes forty intervals of the watchdog.
    let mut server = libraries::start_with(&["--watch-interval", "50"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    server.evaluate("(progn (make-package :session) (defvar *kept* 1))");
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    assert!(text.contains("=> all pass  1 passed, 0 failed"), "{text}");
    assert_eq!(server.evaluate("*kept*"), "=> 1");
}

#[test]
fn crash_of_a_fresh_image_leaves_the_session_intact() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest dies (sb-posix:kill (sb-posix:getpid) 9) 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    server.evaluate("(defvar *kept* 1)");
    let text = call_err(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    assert!(text.starts_with("[ERROR] SIMPLE-ERROR\nThe fresh image for the tests died (signal: 9"), "{text}");
    assert_eq!(server.evaluate("*kept*"), "=> 1");
    // Loading may fail in the fresh image.
    project.write("src/demo.lisp", "(defpackage :demo (:use :cl))\n(in-package :demo)\n(error \"not today\")\n");
    let text = call_err(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    assert!(text.contains("[ERROR] SIMPLE-ERROR\nnot today"), "{text}");
    assert!(last_error(&mut server).contains("not today"));
}

/// Programs started by a test do not inherit the pipe for the outcome, but forked processes do.
#[test]
fn run_tests_fresh_ends_processes_left_running_by_tests() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (defmacro c (name &rest arguments)\n  `(sb-alien:alien-funcall\n    \
                 (sb-alien:extern-alien ,name (function sb-alien:int ,@(mapcar (constantly 'sb-alien:int) arguments)))\n    \
                 ,@arguments))\n\
                 (defun note (name pid)\n  (with-open-file (s (asdf:system-relative-pathname \"demo\" name) :direction :output)\n    \
                 (princ pid s)))\n\
                 (defun run (name) (note name (sb-ext:process-pid (sb-ext:run-program \"/bin/sleep\" '(\"1000\") :wait nil))))\n\
                 (defun daemon ()\n  (let ((child (c \"fork\")))\n    (when (zerop child)\n      \
                 (let ((grandchild (c \"fork\")))\n        (if (zerop grandchild) (c \"sleep\" 1000) (note \"forked\" grandchild)))\n      \
                 (c \"_exit\" 0))\n    (sb-posix:waitpid child 0)))\n\
                 (deftest runs (progn (run \"run\") 1) 1)\n(deftest forks (progn (daemon) 1) 1)\n\
                 (deftest dies (progn (daemon) (sb-posix:kill (sb-posix:getpid) 9)) 1)\n\
                 (deftest hangs (progn (run \"hanging\") (loop)) 1)\n";
    let project = Project::new("\"sb-rt\" \"sb-posix\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    server.evaluate("(asdf:load-system \"demo/tests\")");
    let pid =
        |name: &str| std::fs::read_to_string(project.directory.join(name)).ok().and_then(|pid| pid.parse::<u32>().ok());
    let gone = |name: &str| {
        let pid = pid(name).expect("a process");
        wait_until(&format!("{name} is gone"), || !crate::processes::is_alive(pid));
        std::fs::remove_file(project.directory.join(name)).unwrap();
    };
    let begin = |server: &mut Server, name: &str| {
        // The session has the same verdict, so there is no stale state to report.
        server.evaluate(&format!("(sb-rt:rem-all-tests) (sb-rt:deftest demo-tests::{name} 1 1)"));
        server.post_call("run-tests", json!({"name": name, "fresh": true}))
    };
    let id = begin(&mut server, "runs");
    assert!(server.outcome(id).0.contains("=> all pass  1 passed"));
    gone("run");
    let id = begin(&mut server, "forks");
    assert!(server.outcome(id).0.contains("=> all pass  1 passed"));
    gone("forked");
    let id = begin(&mut server, "dies");
    let (text, _) = server.outcome(id);
    assert!(text.starts_with("[ERROR] SIMPLE-ERROR\nThe fresh image for the tests died (signal: 9"), "{text}");
    gone("forked");
    let id = begin(&mut server, "hangs");
    wait_until("the test hangs", || pid("hanging").is_some());
    abort_newest(&mut server);
    assert!(server.outcome(id).0.contains("[ERROR] CANCELLED"));
    gone("hanging");
}

#[test]
fn fresh_run_of_a_disconnected_client_prevents_no_save() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest hangs (unless (find-package :session)\n  \
                 (open (asdf:system-relative-pathname \"demo\" \"begun\") :direction :output)\n  (sleep 1000))\n  nil)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    project.register(&mut server);
    server.evaluate("(make-package :session)");
    let mut client = runtime.attach(&server);
    client.post_call("run-tests", json!({"system": "demo", "fresh": true, "timeout": 600}));
    wait_until("the test runs", || project.directory.join("begun").exists());
    let save = json!({"action": "save", "name": "a"});
    let text = call_err(&mut server, "checkpoint", save.clone());
    assert!(text.contains("an evaluation is running"), "{text}");
    drop(client);
    wait_until("the run has ended", || !server.call_tool("checkpoint", save.clone()).1);
}

#[test]
fn cancelling_a_fresh_run_ends_all_processes_that_its_tests_started() {
    const CHILDREN: usize = 100;
    let script = format!(
        "(setsid sleep 1000 &); i=1; while [ $i -lt {CHILDREN} ]; do sleep 1000 & i=$((i+1)); done; sh -c 'sleep 1000; :'"
    );
    let tests = format!(
        "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
         (deftest starts (unless (find-package :session) (sb-ext:run-program \"/bin/sh\" '(\"-c\" {script:?}))) nil)\n"
    );
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", &tests);
    let mut server = project.server();
    server.evaluate("(make-package :session)");
    let run = server.post_call("run-tests", json!({"system": "demo", "fresh": true}));
    let mut started = Vec::new();
    wait_until("the test has started its processes", || {
        started = descendants(server.pid(), "sleep");
        started.len() == CHILDREN + 1
    });
    server.notify("notifications/cancelled", json!({"requestId": run}));
    wait_until("the processes are gone", || {
        let running = processes();
        !started.iter().any(|pid| running.contains_key(pid))
    });
    server.assert_works();
}
