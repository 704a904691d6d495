//! Test frameworks, test operations without a framework, and comparisons with bare SBCL.

use super::*;

const PARACHUTE: &str = r#"(defpackage :demo-tests (:use :cl :parachute :demo))
(in-package :demo-tests)

(define-test adds
  (is = 2 (+ 1 1)))

(define-test parse-empty
  (is equal nil (parse ""))
  (is equal '(1) (parse ""))
  (true (parse "")))

(define-test split-last
  :depends-on (adds)
  (is equal '(1)
      (parse "abc")))

(define-test handled
  (fail (parse "abc") 'error))

(define-test hangs
  (true (loop)))

(define-test leaves
  (true (sb-ext:exit :code 3)))

(define-test thrown
  (throw 'demo-nowhere 1))

(define-test kills
  (sb-thread:terminate-thread sb-thread:*current-thread*)
  (sleep 10))

(define-test later
  (skip "no time" (true nil)))
"#;

const ROVE: &str = r#"(defpackage :demo-tests (:use :cl :rove :demo))
(in-package :demo-tests)

(deftest adds
  (ok (= 2 (+ 1 1))))

(deftest parse-empty
  (ok (equal nil (parse "")))
  (ok (equal '(1) (parse "")))
  (ok (parse "")))

(deftest split-last
  (ok (equal '(1)
             (parse "abc"))))

(deftest handled
  (ok (signals (parse "abc") 'error)))

(deftest hangs
  (ok (loop)))

(deftest leaves
  (ok (sb-ext:exit :code 3)))

(deftest thrown
  (throw 'demo-nowhere 1))

(deftest kills
  (sb-thread:terminate-thread sb-thread:*current-thread*)
  (sleep 10))

(deftest later
  (skip "no time"))
"#;

const LISP_UNIT2: &str = r#"(defpackage :demo-tests (:use :cl :lisp-unit2 :demo))
(in-package :demo-tests)

(define-test adds ()
  (assert-eql 2 (+ 1 1)))

(define-test parse-empty ()
  (assert-equal nil (parse ""))
  (assert-equal '(1) (parse ""))
  (assert-true (parse "")))

(define-test split-last (:tags '(slow))
  (assert-equal '(1)
                (parse "abc")))

(define-test handled ()
  (assert-error 'error (parse "abc")))

(define-test hangs ()
  (assert-true (loop)))

(define-test leaves ()
  (assert-true (sb-ext:exit :code 3)))

(define-test thrown ()
  (throw 'demo-nowhere 1))

(define-test kills ()
  (sb-thread:terminate-thread sb-thread:*current-thread*)
  (sleep 10))
"#;

/// The tests of a framework and the expected report: how checks and errors in checks are shown.
struct FrameworkCase {
    framework: &'static str,
    perform: &'static str,
    tests: &'static str,
    skipped: usize,
    /// The answer of `run-tests` up to the frames of the second failure.
    expected: &'static str,
    leaves: &'static str,
}

const FRAMEWORKS: [FrameworkCase; 3] = [
    FrameworkCase {
        framework: "parachute",
        perform: "(symbol-call :parachute :test \"DEMO-TESTS\")",
        tests: PARACHUTE,
        skipped: 1,
        expected: "\
1. DEMO-TESTS::PARSE-EMPTY  tests/tests.lisp:9
   (is equal '(1) (parse \"\"))  expected (1), got NIL
   (true (parse \"\"))  expected T, got NIL
2. DEMO-TESTS::SPLIT-LAST  tests/tests.lisp:14
   (is equal '(1) (parse \"abc\"))
",
        leaves: "4. DEMO-TESTS::LEAVES  tests/tests.lisp:24\n   (true (sb-ext:exit :code 3))\n",
    },
    FrameworkCase {
        framework: "rove",
        perform: "(symbol-call :rove :run c)",
        tests: ROVE,
        skipped: 1,
        expected: "\
1. DEMO-TESTS::PARSE-EMPTY  tests/tests.lisp:9
   (equal '(1) (parse \"\"))  expected true, got (PARSE \"\") = NIL
   (parse \"\")  expected true, got NIL
2. DEMO-TESTS::SPLIT-LAST  tests/tests.lisp:13
   (equal '(1) (parse \"abc\"))
",
        leaves: "4. DEMO-TESTS::LEAVES  tests/tests.lisp:23\n   (sb-ext:exit :code 3)\n",
    },
    FrameworkCase {
        framework: "lisp-unit2",
        perform: "(symbol-call :lisp-unit2 :run-tests :package :demo-tests)",
        tests: LISP_UNIT2,
        skipped: 0,
        expected: "\
1. DEMO-TESTS::PARSE-EMPTY  tests/tests.lisp:9
   (assert-equal '(1) (parse \"\"))  expected (1), got NIL
   (assert-true (parse \"\"))  expected T, got NIL
2. DEMO-TESTS::SPLIT-LAST  tests/tests.lisp:12
",
        leaves: "4. DEMO-TESTS::LEAVES  tests/tests.lisp:22\n",
    },
];

/// Reports for other frameworks, with their real libraries, agree with those for FiveAM.
#[test]
fn parachute_rove_and_lisp_unit2_failures_report_checks_and_frames() {
    let Some(root) = libraries() else { return };
    for case in FRAMEWORKS {
        let name = case.framework;
        let project = Project::new(&format!("{name:?}"), case.perform, case.tests);
        let mut server = libraries::start_in(&project.directory, &["--structured-content"]);
        server.initialize("2025-11-25");
        server.evaluate(&format!(
            "(progn (asdf:initialize-source-registry '(:source-registry (:tree {root:?}) :inherit-configuration)) t)"
        ));
        project.register(&mut server);
        // Warnings from loading a library are reported only once, in this answer.
        call_ok(&mut server, "load-system", json!({"system": "demo/tests", "timeout": 600}));
        let counts = format!("FAILED  2 passed, 2 failed, 4 errors, {} skipped", case.skipped);
        let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.5}));
        let text = timeless(&text);
        let error = "   SB-INT:INVALID-ARRAY-INDEX-ERROR Invalid index 9 for (SIMPLE-VECTOR 3), should be a non-negative \
                     integer below 3. (E1: get-backtrace shows all)\n";
        assert!(text.starts_with(&format!("{counts}\n{}{error}", case.expected)), "{name}: {text}");
        for expected in [
            "src/demo.lisp:5: (let ((found (aref v n)))\n",
            "src/demo.lisp:11: (list (item (coerce text 'simple-vector) 9))))\n",
            "   1: (DEMO:ITEM #(#\\a #\\b #\\c) 9)  ",
            "   2: (DEMO:PARSE \"abc\")  ",
            "3. DEMO-TESTS::HANGS  tests/tests.lisp:",
            "   TIMEOUT The test did not end within 0.5 seconds and was interrupted. (E2: ",
            case.leaves,
            "   SBCL-HOST::EXIT-REFUSED EXIT was called",
            "5. DEMO-TESTS::THROWN  tests/tests.lisp:",
            "   SB-INT:SIMPLE-CONTROL-ERROR attempt to THROW to a tag that does not exist: ",
            "6. DEMO-TESTS::KILLS  tests/tests.lisp:",
        ] {
            assert!(text.contains(expected), "{name}: no {expected} in:\n{text}");
        }
        let frames = call_ok(&mut server, "get-backtrace", json!({"error-id": "E1"}));
        assert!(frames.contains("(DEMO:ITEM #(#\\a #\\b #\\c) 9)\n"), "{name}: {frames}");
        assert!(last_error(&mut server).contains("Id: E1"), "{name}");

        let content = structured(&mut server, json!({"system": "demo", "timeout": 0.5, "fresh": true, "suspects": 1}));
        let tests = content["tests"].as_array().expect("tests");
        let with = |status: &str| tests.iter().filter(|test| test["status"] == status).count();
        let counts = [("passed", "passed", 2), ("failed", "failed", 2), ("errors", "error", 4)];
        for (count, status, number) in counts.into_iter().chain([("skipped", "skipped", case.skipped)]) {
            assert_eq!((&content[count], with(status)), (&json!(number), number), "{name}: {content:#}");
        }
        let suspect = &tests[0]["suspects"][0];
        assert_eq!((&suspect["name"], &suspect["file"]), (&json!("PARSE"), &json!("src/demo.lisp")), "{name}");

        let text = call_ok(&mut server, "run-tests", json!({"name": "demo-tests::adds"}));
        assert_eq!(timeless(&text), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped", "{name}");
        let text = call_ok(&mut server, "run-tests", json!({"test-package": "demo-tests", "timeout": 0.5}));
        assert!(text.starts_with("FAILED  2 passed, 2 failed, 4 errors"), "{name}: {text}");
    }
}

const RT: &str = r#"(defpackage :demo-tests (:use :cl :sb-rt :demo))
(in-package :demo-tests)
(deftest rt.good (+ 1 1) 2)
(deftest rt.bad
  (values (+ 1 1) :a)
  3 :a)
(deftest rt.error (parse "abc") 3)
(deftest "by string" (progn (format t "hello~%") 1) 2)
(deftest rt.prints (let ((line (make-string 2000))) (dotimes (i 50000 t) (write-string line))) t)
(deftest rt.recurses (labels ((f (x) (1+ (f (1+ x))))) (f 1)) 1)
"#;

#[test]
fn sb_rt_and_rt_tests_run_despite_100_megabytes_of_output() {
    check_rt_run("sb-rt", RT);
    if installed("rt") {
        check_rt_run("rt", &RT.replace("sb-rt", "regression-test").replace("50000", "50"));
    }
}

/// Runs `tests` of the rt framework in system `system`, and checks the report.
fn check_rt_run(system: &str, tests: &str) {
    let package = if system == "rt" { "regression-test" } else { system };
    let run = format!("(unless (symbol-call :{package} :do-tests) (error \"failed\"))");
    let project = Project::new(&format!("{system:?}"), &run, tests);
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.starts_with("FAILED  2 passed, 2 failed, 2 errors, 0 skipped in "), "{text}");
    assert!(
        text.contains("1. DEMO-TESTS::RT.BAD  tests/tests.lisp:5\n   (values (+ 1 1) :a)  expected 3, :A, got 2, :A\n"),
        "{text}"
    );
    assert!(
        text.contains("2. DEMO-TESTS::RT.ERROR  tests/tests.lisp:7\n   SB-INT:INVALID-ARRAY-INDEX-ERROR"),
        "{text}"
    );
    assert!(
        text.contains("3. by string  tests/tests.lisp:8\n   (progn (format t \"hello~%\") 1)  expected 2, got 1\n"),
        "{text}"
    );
    assert!(
        text.contains("4. DEMO-TESTS::RT.RECURSES  tests/tests.lisp:10\n   SB-KERNEL::CONTROL-STACK-EXHAUSTED"),
        "{text}"
    );
    assert!(text.len() < 3000, "{text}");
    server.assert_works();
}

#[test]
fn sb_rt_values_are_not_taken_from_printed_words_or_memory() {
    let tests = r#"(defpackage :demo-tests (:use :cl :sb-rt))
(in-package :demo-tests)
(deftest words (progn (format t "Test X failed~%Actual value: 77.") 1) 2)
(deftest returns-condition (make-condition 'simple-error :format-control "q") 3)
"#;
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    let words = "   (progn (format t \"Test X failed~%Actual value: 77.\") 1)  expected 2, got 1\n";
    assert!(text.contains(words), "{text}");
    let line = text.lines().find(|line| line.contains("expected 3, got #<SIMPLE-ERROR \"q\" {"));
    assert!(line.is_some_and(|line| line.ends_with("}>")), "{text}");
}

/// The first run, in which the test-op loads the framework, has the same counts as a later run, and the framework's own
/// report is not printed.
#[test]
fn tests_of_a_framework_loaded_by_the_test_op_are_counted() {
    for (framework, package, run, tests) in [
        (
            "fiveam",
            "fiveam",
            ":run! :lazy",
            "(def-suite :lazy) (in-suite :lazy)\n(test good (is (= 1 1)))\n(test bad (is (= 1 2)))\n",
        ),
        ("rt", "regression-test", ":do-tests", "(rem-all-tests)\n(deftest good 1 1)\n(deftest bad 1 2)\n"),
    ] {
        if !installed(framework) {
            continue;
        }
        let tests = format!("(defpackage :demo-tests (:use :cl :{package}))\n(in-package :demo-tests)\n{tests}");
        let project = Project::new("", "", &tests);
        project.write(
            "demo.asd",
            &format!(
                r#"(defsystem "demo" :perform (test-op (o c) (load-system "demo/tests") (symbol-call :{package} {run}) t))
                   (defsystem "demo/tests" :depends-on ("{framework}") :components ((:file "tests/tests")))"#
            ),
        );
        for first_is_fresh in [false, true] {
            let mut server = project.server();
            for fresh in [first_is_fresh, false] {
                let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "fresh": fresh}));
                assert!(text.contains("FAILED  1 passed, 1 failed, 0 errors, 0 skipped in "), "{framework}: {text}");
                assert!(text.contains("\n1. DEMO-TESTS::BAD  tests/tests.lisp:5\n"), "{framework}: {text}");
                assert!(!text.contains("The test run printed"), "{framework}: {text}");
            }
            if framework == "fiveam" {
                let stream = server.evaluate("(typep fiveam::*test-dribble* 'broadcast-stream)");
                assert_eq!(stream, "=> NIL", "the report stream is restored");
            }
        }
    }
}

/// ASDF, too, loads these systems before the test-op.
#[test]
fn systems_on_whose_load_the_test_op_depends_are_loaded_before_the_tests_run() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (rem-all-tests)\n(deftest good 1 1)\n";
    let project = Project::new("", "", tests);
    project.write(
        "demo.asd",
        r#"(defsystem "demo"
             :in-order-to ((test-op (load-op (:feature :sbcl "demo/tests") (:feature :no-such "none") (:require "sb-rt"))))
             :perform (test-op (o c) (symbol-call :sb-rt :do-tests)))
           (defsystem "demo/tests" :depends-on ("sb-rt") :components ((:file "tests/tests")))"#,
    );
    for fresh in [false, true] {
        let mut server = project.server();
        let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "fresh": fresh}));
        assert!(text.contains("1 passed, 0 failed, 0 errors, 0 skipped in "), "{fresh}: {text}");
    }
}

/// Only the thread of the test run discards the reports of a framework that its test-op has loaded.
#[test]
fn a_framework_loaded_by_the_test_op_prints_reports_in_other_threads() {
    if !installed("fiveam") {
        return;
    }
    let tests = "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n\
                 (def-suite :lazy) (in-suite :lazy)\n(test good (is (= 1 1)))\n";
    let project = Project::new("", "", tests);
    project.write(
        "demo.asd",
        r#"(defsystem "demo" :perform (test-op (o c)
             (load-system "demo/tests")
             (symbol-call :fiveam :run! :lazy)
             (setf (symbol-value 'cl-user::*printed*)
                   (sb-thread:join-thread
                    (sb-thread:make-thread
                     (lambda () (with-output-to-string (*standard-output*) (symbol-call :fiveam :run! :lazy))))))
             t))
           (defsystem "demo/tests" :depends-on ("fiveam") :components ((:file "tests/tests")))"#,
    );
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("1 passed, 0 failed, 0 errors, 0 skipped in "), "{text}");
    assert!(!text.contains("Did 1 check."), "{text}");
    let printed = server.evaluate("cl-user::*printed*");
    assert!(printed.contains("Did 1 check."), "{printed}");
}

/// Tests run against the definitions in the image, unless `reload` is given.
#[test]
fn tests_without_a_test_op_are_found_by_system_name_and_not_reloaded() {
    let tests = "(defpackage :demo/tests (:use :cl :sb-rt) (:import-from :demo #:answer)) (in-package :demo/tests)
                 (deftest one (answer) 42)";
    let source = "(defpackage :demo (:use :cl) (:export #:answer)) (in-package :demo) (defun answer () 41)";
    let demo = r#"(defsystem "demo" :components ((:file "demo")))"#;
    let inferred = r#"(defsystem "demo" :class :package-inferred-system :depends-on ("demo/main"))"#;
    let of_tests =
        |name: &str| format!(r#"(defsystem "{name}" :depends-on ("demo" "sb-rt") :components ((:file "tests")))"#);
    for (name, files) in [
        ("beside", &[("demo.asd", format!("{demo} {}", of_tests("demo/test")))][..]),
        ("apart", &[("demo.asd", demo.to_owned()), ("demo-tests.asd", of_tests("demo-tests"))]),
        ("inferred", &[("demo.asd", inferred.to_owned()), ("main.lisp", format!("(defpackage :demo/main) {source}"))]),
        (
            "within",
            &[(
                "demo.asd",
                r#"(defsystem "demo" :depends-on ("sb-rt") :components ((:file "demo") (:file "tests")))"#.to_owned(),
            )],
        ),
        ("without", &[("demo.asd", demo.to_owned())]),
    ] {
        let project = Project::new("", "", "");
        project.write("demo.lisp", source);
        if name != "without" {
            project.write("tests.lisp", tests);
        }
        for (file, text) in files {
            project.write(file, text);
        }
        let mut server = project.server();
        for arguments in [json!({"system": "demo"}), json!({"system": "demo", "directory": *project.directory})] {
            server.evaluate("(asdf:load-system \"demo\")");
            if name == "without" {
                call_err(&mut server, "run-tests", arguments.clone());
                server.evaluate("(defun demo::answer () 42)");
                call_err(&mut server, "run-tests", arguments);
                assert_eq!(server.evaluate("(demo::answer)"), "=> 42");
                continue;
            }
            let text = call_ok(&mut server, "run-tests", arguments.clone());
            assert!(text.starts_with("FAILED  0 passed, 1 failed, 0 errors"), "{name}: {text}");
            server.evaluate("(defun demo::answer () 42)");
            let text = call_ok(&mut server, "run-tests", arguments);
            assert!(text.starts_with("=> all pass  1 passed, 0 failed, 0 errors"), "{name}: {text}");
            server.evaluate("(defun demo::answer () 41)");
        }
        if name != "without" {
            project.write("tests.lisp", &tests.replace("42", "41"));
            let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "reload": true}));
            assert!(text.starts_with("=> all pass  1 passed, 0 failed, 0 errors"), "{name}: {text}");
            assert_eq!(server.evaluate("(demo::answer)"), "=> 41");
        }
        if name == "inferred" {
            // In a package-inferred system, each file declares its dependencies.
            project.write(
                "extra.lisp",
                "(defpackage :demo/extra (:use :cl) (:export #:extra)) (in-package :demo/extra)
                                         (defun extra () 41)",
            );
            let needing = tests.replace("#:answer)", "#:answer) (:import-from :demo/extra #:extra)");
            project.write("tests.lisp", &needing.replace("42", "#.(extra)"));
            server.evaluate("(defun demo::answer () 41)");
            let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "reload": true}));
            assert!(text.starts_with("=> all pass  1 passed, 0 failed, 0 errors"), "{name}: {text}");
        }
    }
}

#[test]
fn test_op_without_a_known_framework_counts_as_a_single_test() {
    for (perform, expected) in [
        ("(error \"2 tests failed\")", "1. test-op of demo/tests\n   SIMPLE-ERROR 2 tests failed (E1: "),
        ("(uiop:quit 1)", "1. test-op of demo/tests\n   SBCL-HOST::EXIT-REFUSED EXIT was called"),
        ("(abort)", "1. test-op of demo/tests\n   The test-op invoked the restart ABORT.\n"),
    ] {
        let project = Project::new("", perform, "");
        let mut server = project.server();
        let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
        assert!(text.starts_with("FAILED  0 passed, 0 failed, 1 error, 0 skipped in "), "{text}");
        assert!(text.contains(expected), "{text}");
    }
    // Many test operations return false instead of signalling an error. NIL, the value of FORMAT, is not by itself
    // taken for a failure.
    for (name, perform, expected) in [
        (
            "false",
            "(progn (format t \"~%Some tests failed.~%\") nil)",
            "FAILED  0 passed, 1 failed, 0 errors, 0 skipped",
        ),
        ("none", "(format t \"3 passed, 0 failed~%\")", "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped"),
        (
            "true",
            "(progn (format t \"Testing what failed before~%\") t)",
            "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped",
        ),
    ] {
        let project = Project::new("", perform, "");
        let mut server = project.server();
        let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
        assert_eq!(timeless(text.lines().next().expect("a line")), expected, "{text}");
        if name == "false" {
            let said = "1. test-op of demo/tests\n   The test-op returned NIL and printed: Some tests failed.\n";
            assert!(text.contains(said), "{text}");
            assert!(text.ends_with("\nThe test run printed:\nSome tests failed."), "{text}");
            let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "suspects": 3}));
            assert!(text.starts_with("[notice]\nThere are no suspects: "), "{text}");
            assert!(text.contains(said), "{text}");
        }
    }
    // A long output is shown by its beginning and its end.
    let print = "(progn (loop for i below 5000 do (format t \"line ~D~%\" i)) (format t \"the end~%\") t)";
    let project = Project::new("", print, "");
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("\nThe test run printed:\nline 0\nline 1\n"), "{text}");
    assert!(text.contains("line 4999\nthe end\nThe test run printed 48898 characters: check-evaluation {"), "{text}");
    assert!(text.len() < 2600, "{text}");
    // Omitted output is reported at its place.
    call_ok(&mut server, "configure-limits", json!({"max-output": 20}));
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    let expected = "\nThe test run printed:\nline 0\nline 1\nline 2[... 48878 characters omitted]\n\
                    The test run printed 48898 characters, of which the first 20 are kept: check-evaluation {\"id\": 3, \
                    \"part\": \"output\"} shows these.";
    assert!(text.ends_with(expected), "{text}");
    call_ok(&mut server, "configure-limits", json!({"max-output": 10000}));
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("[... 38898 characters omitted]\nThe test run printed 48898 characters, of which"), "{text}");
    let project = Project::new("", "(format t \"all is well~%\")", "");
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(timeless(lines[0]), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped");
    assert_eq!(&lines[1..3], &["The test run printed:", "all is well"], "{text}");
    assert_eq!(lines.len(), 3, "{text}");
    // The output of the load is part of the output of the run.
    let project = Project::new("", "(format t \"all is well~%\")", "");
    project.write("src/demo.lisp", "(format t \"the load~%\")");
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.ends_with("\nThe test run printed:\nthe load\nall is well"), "{text}");
    // A test operation that does nothing does not pass.
    let project = Project::new("", "", "");
    project.write("demo.asd", "(defsystem \"demo\" :components ((:module \"src\" :components ((:file \"demo\")))))");
    let mut server = project.server();
    let text = call_err(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("Nothing ran: there are no tests of the system demo, and its test-op runs none."), "{text}");
}

/// Returns the last line that a program prints in bare SBCL, or `None` without bare SBCL.
fn last_line_of_bare_sbcl(program: &str) -> Option<String> {
    let recipe = sbcl_core::Recipe::in_checkout(Path::new(env!("CARGO_MANIFEST_DIR")));
    let bare = recipe.build().expect("the build of the binary is cached").bare?;
    let output = std::process::Command::new(&bare.program)
        .arg("--core")
        .arg(&bare.core)
        .args(["--noinform", "--no-sysinit", "--no-userinit", "--non-interactive"])
        .args(["--eval", "(require :asdf)", "--eval", program])
        .env("SBCL_HOME", &bare.home)
        .output()
        .expect("bare SBCL starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().last().unwrap_or_default().trim().to_owned())
}

#[test]
fn alexandria_and_esrap_suites_have_the_counts_of_bare_sbcl() {
    // The test-op runs sb-rt twice, without and with compilation.
    if installed("alexandria") {
        let mut server = ready();
        let text = call_ok(&mut server, "run-tests", json!({"system": "alexandria"}));
        let verdict = text.lines().next().unwrap_or_default();
        let program = "(progn (asdf:load-system \"alexandria-tests\")
                         (let ((count (length (rest (symbol-value (find-symbol \"*ENTRIES*\" :sb-rt)))))
                               (failed (nth-value 2 (let ((*standard-output* (make-broadcast-stream)))
                                                      (uiop:symbol-call :sb-rt :do-tests)))))
                           (format t \"~&=> all pass  ~D passed, ~D failed~%\" (* 2 (- count (length failed)))
                                   (* 2 (length failed)))))";
        if let Some(bare) = last_line_of_bare_sbcl(program) {
            assert!(verdict.starts_with(&bare), "{verdict} is not {bare}");
        }
    }
    if installed("esrap") && installed("fiveam") {
        let mut server = ready();
        let text = call_ok(&mut server, "run-tests", json!({"system": "esrap"}));
        let verdict = text.lines().next().unwrap_or_default();
        let program = "(progn (asdf:load-system \"esrap/tests\")
                         (let* ((results (let ((*standard-output* (make-broadcast-stream)))
                                           (uiop:symbol-call :fiveam :run (find-symbol \"ESRAP\" :esrap-tests))))
                                (of (lambda (results) (remove-duplicates
                                                        (mapcar (find-symbol \"TEST-CASE\" :it.bese.fiveam) results))))
                                (all (funcall of results))
                                (failed (funcall of (remove-if (find-symbol \"TEST-PASSED-P\" :it.bese.fiveam) results))))
                           (format t \"~&=> all pass  ~D passed, ~D failed~%\" (- (length all) (length failed))
                                   (length failed))))";
        if let Some(bare) = last_line_of_bare_sbcl(program) {
            assert!(verdict.starts_with(&bare), "{verdict} is not {bare}");
        }
    }
}

/// Compares the verdict on each test that ends by itself with bare SBCL's.
#[test]
fn parachute_rove_and_lisp_unit2_verdicts_agree_with_bare_sbcl() {
    let Some(root) = libraries() else { return };
    let registry =
        format!("(asdf:initialize-source-registry '(:source-registry (:tree {root:?}) :inherit-configuration))");
    // The names of all tests and of the failing ones, from the framework's own functions.
    let verdicts = [
        "(let ((results (remove-if-not (lambda (result) (typep result 'parachute:test-result))
                                       (coerce (parachute::results (parachute:test :demo-tests :report 'parachute:quiet))
                                               'list))))
           (flet ((names (results)
                    (mapcar (lambda (result) (parachute:name (parachute:expression result))) results)))
             (list (names results) (names (remove :failed results :key #'parachute:status :test-not #'eq)))))",
        "(let ((names (rove/core/suite/package:suite-tests (rove/core/suite/package:package-suite :demo-tests))))
           (list names (let ((rove:*report-stream* (make-broadcast-stream)))
                         (remove-if (lambda (name) (rove:run-test name :style :none)) names))))",
        "(let ((results (coerce (lisp-unit2::results (lisp-unit2:run-tests :package :demo-tests)) 'list)))
           (flet ((names (results)
                    (mapcar (lambda (result) (lisp-unit2::name (lisp-unit2::unit-test result))) results)))
             (list (names results)
                   (names (remove-if-not (lambda (result) (or (lisp-unit2::failed result) (lisp-unit2::errors result)))
                                         results)))))",
    ];
    for (case, verdicts) in FRAMEWORKS.iter().zip(verdicts) {
        let name = case.framework;
        // Tests that hang or are ended run only under run-tests.
        let (ending, rest) = case.tests.split_at(case.tests.find("hangs").expect("one that hangs"));
        let ending = &ending[..ending.rfind('(').expect("its form")];
        let later = rest.find("later").map_or("", |at| &rest[rest[..at].rfind('(').expect("its form")..]);
        let project = Project::new(&format!("{name:?}"), case.perform, &format!("{ending}{later}"));
        let mut server = libraries::start_with(&["--structured-content"]);
        server.initialize("2025-11-25");
        server.evaluate(&format!("(progn {registry} t)"));
        project.register(&mut server);
        call_ok(&mut server, "load-system", json!({"system": "demo/tests", "timeout": 600}));
        let content = structured(&mut server, json!({"system": "demo"}));
        let tests = content["tests"].as_array().expect("tests");
        let names = |failed: bool| {
            let wanted =
                tests.iter().filter(|test| !failed || ["failed", "error"].contains(&test["status"].as_str().unwrap()));
            let mut names: Vec<_> = wanted
                .map(|test| test["name"].as_str().expect("a name").rsplit(':').next().expect("one").to_owned())
                .collect();
            names.sort();
            names.join(" ")
        };
        let program = format!(
            "(progn {registry} (push #p{:?} asdf:*central-registry*) (asdf:load-system \"demo/tests\")
               (let ((*print-case* :upcase))
                 (format t \"~&~{{~{{~A~^ ~}}~^; ~}}~%\"
                         (mapcar (lambda (names) (sort (mapcar #'string names) #'string<))
                                 (eval (read-from-string {verdicts:?}))))))",
            project.directory.join(""),
            verdicts = verdicts.replace('\n', " ")
        );
        if let Some(bare) = last_line_of_bare_sbcl(&program) {
            assert_eq!(format!("{}; {}", names(false), names(true)), bare, "{name}: {content:#}");
        }
    }
}
