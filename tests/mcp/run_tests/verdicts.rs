//! Reports of test runs: failures with their locations, counts, several systems, and the error state.

use super::*;

#[test]
fn failing_test_reports_expected_and_actual_values_and_place() {
    let Some(project) = fiveam(FIVEAM) else { return };
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.5}));
    let text = timeless(&text);
    let expected = "\
FAILED  2 passed, 2 failed, 4 errors, 1 skipped
1. DEMO-TESTS::PARSE-EMPTY  tests/tests.lisp:11
   (is (equal '(1) (parse \"\")))  expected (1), got NIL
   (is-true (parse \"\"))
   (PARSE \"\") did not return a true value
2. DEMO-TESTS::SPLIT-LAST  tests/tests.lisp:14
   SB-INT:INVALID-ARRAY-INDEX-ERROR Invalid index 9 for (SIMPLE-VECTOR 3), should be a non-negative integer below 3. (E1: get-backtrace shows all)
";
    assert!(text.starts_with(expected), "{text}");
    for frame in ["(DEMO:ITEM #(#\\a #\\b #\\c) 9)  ", "(DEMO:PARSE \"abc\")  "] {
        let line = text.lines().find(|line| line.contains(frame)).unwrap_or_else(|| panic!("no {frame} in:\n{text}"));
        assert!(line.contains("src/demo.lisp:"), "{line}");
    }
    assert!(text.contains("src/demo.lisp:5: (let ((found (aref v n)))"), "{text}");
    assert!(text.contains("   TIMEOUT The test did not end within 0.5 seconds and was interrupted. (E2: "), "{text}");
    assert!(
        text.contains("4. DEMO-TESTS::LEAVES  tests/tests.lisp:24\n   SBCL-HOST::EXIT-REFUSED EXIT was called"),
        "{text}"
    );
    assert!(text.contains("5. DEMO-TESTS::THROWN  tests/tests.lisp:27\n   SB-INT:SIMPLE-CONTROL-ERROR"), "{text}");
    assert!(text.contains("6. DEMO-TESTS::KILLS  tests/tests.lisp:30\n"), "{text}");
    // The complete error is kept under its id; the first error is the last error of the session.
    let error = last_error(&mut server);
    assert!(error.contains("Error: SB-INT:INVALID-ARRAY-INDEX-ERROR") && error.contains("Id: E1"), "{error}");
    let frames = call_ok(&mut server, "get-backtrace", json!({"error-id": "E1"}));
    assert!(frames.contains("(DEMO:ITEM #(#\\a #\\b #\\c) 9)\n"), "{frames}");
    assert!(frames.contains("RUN-TEST-LAMBDA"), "{frames}");
    server.assert_works();
}

/// Tests with unusual names, tests that are defined twice, removed or redefined by others, and one that hangs in a
/// thread without the means to interrupt it.
const UNUSUAL: &str = r#"(defpackage :demo-tests (:use :cl :fiveam :demo))
(in-package :demo-tests)
(def-suite demo)
(in-suite demo)

(test |Odd (name) x|
  (is (= 1 2)))

(test twice
  (is (= 1 1)))

(test twice
  (is (= 1 3)))

(test removes
  (rem-test 'victim)
  (test changed (is (= 1 4)))
  (is (= 1 1)))

(test victim
  (is (= 1 5)))

(test changed
  (is (= 1 1)))

(test loses
  (sb-sys:without-interrupts
    (loop until (sb-thread::thread-interruptions sb-thread:*current-thread*) repeat 4 do (sleep 0.1))
    (setf (sb-thread::thread-interruptions sb-thread:*current-thread*) '()))
  (loop))

(test alike
  (is (equal "a" (string #\a)))
  (is (equal "a" (string #\b)))
  (is (equal "c" (string #\b)))
  (is (= 1 (1+ 0)))
  (is (= 1 (1+ 1))))

(run! 'twice)
"#;

#[test]
fn removed_redefined_and_oddly_named_tests_are_reported() {
    let Some(project) = fiveam(UNUSUAL) else { return };
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "timeout": 1}));
    let expected = "FAILED  1 passed, 5 failed, 1 error, 0 skipped
1. DEMO-TESTS::|Odd (name) x|  tests/tests.lisp:7
   (is (= 1 2))  expected 1, got 2
2. DEMO-TESTS::TWICE  tests/tests.lisp:13
   (is (= 1 3))  expected 1, got 3
3. DEMO-TESTS::VICTIM  tests/tests.lisp:20
   The test could not run: it was removed during the run.
4. DEMO-TESTS::CHANGED  tests/tests.lisp:23
   (= 1 4)  expected 1, got 4
5. DEMO-TESTS::LOSES  tests/tests.lisp:26
   TIMEOUT The test did not end within 1 second and was interrupted. (E1: get-backtrace shows all)
6. DEMO-TESTS::ALIKE  tests/tests.lisp:34
   (is (equal \"a\" (string #\\b)))  expected \"a\", got \"b\"
   (is (equal \"c\" (string #\\b)))  expected \"c\", got \"b\"
   (is (= 1 (1+ 1)))  expected 1, got 2
";
    assert!(timeless(&text).starts_with(expected), "{text}");
    server.assert_works();
}

#[test]
fn tests_named_like_functions_or_tests_of_other_packages_have_their_own_locations() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))
(in-package :demo-tests)
(declaim (inline twice))
(defun twice (x) (* x 2))
(deftest twice (twice 2) 5)
(progn
  (deftest in-progn 1 2))
(defpackage :demo-other (:use :cl :sb-rt))
(in-package \"DEMO-OTHER\")
(deftest twice 1 7)
(deftest parse 1 8)
";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    for (name, line) in
        [("DEMO-TESTS::TWICE", 5), ("DEMO-TESTS::IN-PROGN", 7), ("DEMO-OTHER::TWICE", 10), ("DEMO-OTHER::PARSE", 11)]
    {
        assert!(text.contains(&format!(". {name}  tests/tests.lisp:{line}\n")), "{name}: {text}");
    }
}

#[test]
fn tests_in_the_last_of_2001_files_have_their_locations() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))
(in-package :demo-tests)
(deftest first-test 1 2)
(defmacro deftwice (name)
  `(progn (deftest ,(intern (format nil \"~A.ONE\" name)) (list 3) (4))
          (deftest ,(intern (format nil \"~A.TWO\" name)) 1 1)))
(deftwice parse)
";
    let project = Project::new("", "", tests);
    // The other files do not exist, which saves time.
    project.write(
        "demo.asd",
        r#"(defclass absent-file (cl-source-file) ())
           (defmethod perform ((o compile-op) (c absent-file)))
           (defmethod perform ((o load-op) (c absent-file)))
           (defsystem "demo" :depends-on ("sb-rt") :perform (test-op (o c) (symbol-call :sb-rt :do-tests))
             :components #.`(,@(loop for n below 2000 collect `(absent-file ,(format nil "f~D" n)))
                             (:file "tests/tests")))"#,
    );
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    for (name, line) in [("FIRST-TEST", 3), ("PARSE.ONE", 7)] {
        assert!(text.contains(&format!(". DEMO-TESTS::{name}  tests/tests.lisp:{line}\n")), "{name}: {text}");
    }
}

/// Values and conditions of failing tests whose print methods and reports never end.
const ENDLESS: &str = r#"
(defclass endless () ())
(defmethod print-object ((object endless) stream) (loop))
(define-condition endless-report (error) () (:report (lambda (condition stream) (declare (ignore condition stream)) (loop))))
(defun fails (object) (declare (ignore object)) (error "on purpose"))
"#;

#[test]
fn endless_print_methods_and_reports_do_not_end_the_run() {
    let tests = format!(
        "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n{ENDLESS}
(deftest signals (error 'endless-report) 1)
(deftest argument (fails (make-instance 'endless)) 1)
(deftest after 1 2)
"
    );
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", &tests);
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "timeout": 1}));
    assert!(text.starts_with("FAILED  0 passed, "), "{text}");
    for name in ["SIGNALS", "ARGUMENT", "AFTER"] {
        assert!(text.contains(&format!(". DEMO-TESTS::{name}  tests/tests.lisp:")), "{text}");
    }
    assert!(text.contains("on purpose") && text.contains("expected 2, got 1"), "{text}");
    server.assert_works();

    let tests = format!(
        "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n{ENDLESS}
(def-suite demo)\n(in-suite demo)
(test value (is (equal 1 (make-instance 'endless))))
(test signals (error 'endless-report))
(test argument (fails (make-instance 'endless)))
(test after (is (= 2 1)))
"
    );
    let Some(project) = fiveam(&tests) else { return };
    let mut server = project.server();
    // FiveAM itself prints the values after its tests. On a busy machine, its other work takes seconds, too.
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "timeout": 5}));
    assert!(text.starts_with("FAILED  0 passed, "), "{text}");
    assert!(text.contains("TIMEOUT The test did not end within 5 seconds"), "{text}");
    server.assert_works();
}

#[test]
fn structured_content_has_a_record_per_test_and_matching_counts() {
    let Some(project) = fiveam(FIVEAM) else { return };
    let mut server = libraries::start_in(&project.directory, &["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let content = structured(&mut server, json!({"system": "demo", "timeout": 0.5}));
    let tests = content["tests"].as_array().expect("tests");
    let with = |status: &str| tests.iter().filter(|test| test["status"] == status).count();
    for (count, status) in [("passed", "passed"), ("failed", "failed"), ("errors", "error"), ("skipped", "skipped")] {
        assert_eq!(content[count], with(status), "{content:#}");
    }
    assert_eq!(tests.len(), 9, "{content:#}");
    assert_eq!(tests[0]["name"], "DEMO-TESTS::PARSE-EMPTY");
    assert_eq!((&tests[0]["file"], &tests[0]["line"]), (&json!("tests/tests.lisp"), &json!(11)));
    assert_eq!(
        tests[0]["checks"][0],
        json!({"form": "(is (equal '(1) (parse \"\")))", "expected": "(1)", "actual": "NIL"})
    );
    assert_eq!(tests[1]["error"]["id"], "E1", "{content:#}");
    let skipped = tests.iter().find(|test| test["status"] == "skipped").expect("one");
    assert_eq!((&skipped["name"], &skipped["message"]), (&json!("DEMO-TESTS::LATER"), &json!("no time")));
}

#[test]
fn run_tests_shows_all_paths_relative_to_the_working_directory() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest fine (demo:parse \"\") nil)\n\
                 (deftest broken (demo:parse \"abc\") 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = ready();
    project.register(&mut server);
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "suspects": 2}));
    let here = std::env::current_dir().expect("a directory");
    let shown = project.directory.strip_prefix(here).unwrap_or(&project.directory).display();
    for expected in [
        format!("1. DEMO-TESTS::BROKEN  {shown}/tests/tests.lisp:4\n"),
        format!("(DEMO:PARSE \"abc\")  {shown}/src/demo.lisp:11: "),
        format!("   Suspects: ITEM  {shown}/src/demo.lisp:4  "),
    ] {
        assert!(text.contains(&expected), "{expected} is not in\n{text}");
    }
}

#[test]
fn failed_tests_set_and_passing_tests_clear_the_error_state() {
    let tests = r#"(defpackage :demo-tests (:use :cl :fiveam :demo))
(in-package :demo-tests)
(def-suite demo)
(in-suite demo)
(test good (is (= 1 1)))
(test wrong (is (= 1 2)))
(test broken (is (equal 1 (parse "abc"))))
"#;
    let Some(project) = fiveam(tests) else { return };
    let mut server = project.server();
    crate::client::evaluate_err(&mut server, "(error \"before\")");
    let name = |name: &str| json!({"name": name});
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(asdf:load-system \"demo/tests\")"}));
    crate::client::evaluate_err(&mut server, "(error \"before\")");
    // A failed check signals no error, so the error state stays.
    let text = call_ok(&mut server, "run-tests", name("demo-tests::wrong"));
    assert!(text.starts_with("FAILED  0 passed, 1 failed, 0 errors, 0 skipped in "), "{text}");
    assert!(last_error(&mut server).contains("before"));
    call_ok(&mut server, "run-tests", name("broken"));
    assert!(last_error(&mut server).contains("INVALID-ARRAY-INDEX-ERROR"));
    let text = call_ok(&mut server, "run-tests", name("good"));
    assert_eq!(timeless(&text), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped");
    assert!(last_error(&mut server).starts_with("No error information available."));
    // The suite, the package, and the system.
    for arguments in [name("demo-tests::demo"), json!({"test-package": "demo-tests"}), json!({"system": "demo/tests"})]
    {
        let text = call_ok(&mut server, "run-tests", arguments);
        assert!(text.starts_with("FAILED  1 passed, 1 failed, 1 error, 0 skipped in "), "{text}");
    }
}

#[test]
fn run_tests_finds_a_system_by_the_rules_of_load() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest one 1 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let other =
        "(defsystem \"other-tests\" :depends-on (\"sb-rt\") :pathname \"tests\" :components ((:file \"tests\")))";
    project.write("more.asd", other);
    let root = project.directory.display().to_string();
    let mut server = ready();
    let missing = call_err(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(missing.contains("Not found in ") && missing.contains(", its parent directories and "), "{missing}");
    let text = call_err(&mut server, "run-tests", json!({"system": "demo", "directory": "/no-such-directory"}));
    assert_eq!(text, "The argument directory must be an existing directory, not /no-such-directory.");
    // In the directory, in a file with another name, and in a parent directory.
    for (system, directory) in [("demo", ""), ("DEMO/TESTS", ""), ("other-tests", ""), ("demo", "/tests")] {
        for fresh in [false, true] {
            let mut server = ready();
            let arguments = json!({"system": system, "directory": format!("{root}{directory}"), "fresh": fresh});
            let text = call_ok(&mut server, "run-tests", arguments);
            assert!(text.contains("=> all pass  1 passed, 0 failed"), "{system}: {text}");
        }
    }
}

#[test]
fn run_tests_runs_the_tests_of_the_checkout_that_directory_names() {
    let root = Scratch::below_target();
    for (checkout, value) in [("main", 1), ("fix", 2)] {
        let system = "(defsystem \"app\" :depends-on (\"sb-rt\") :components ((:file \"app\"))
                        :perform (test-op (o c) (symbol-call :sb-rt :do-tests)))";
        root.write(&format!("{checkout}/app.asd"), system);
        let tests = format!("(defpackage :app (:use :cl :sb-rt))\n(in-package :app)\n(deftest one {value} 2)\n");
        root.write(&format!("{checkout}/app.lisp"), &tests);
    }
    let mut server = ready();
    for checkout in ["main", "fix", "main"] {
        for fresh in [false, true] {
            let arguments = json!({"system": "app", "directory": root.join(checkout), "fresh": fresh});
            let text = call_ok(&mut server, "run-tests", arguments);
            let expected = if checkout == "fix" { "=> all pass  1 passed" } else { "FAILED  0 passed, 1 failed" };
            assert!(text.contains(expected), "{checkout}, fresh: {fresh}: {text}");
        }
    }
}

/// Writes several systems in one directory: FiveAM suites, a test-op without a framework, a system that does not load,
/// and one without tests.
fn project_with_several_systems() -> Option<Project> {
    let project = fiveam(FIVEAM)?;
    let suite = |package: &str, tests: &str| {
        format!(
            "(defpackage :{package} (:use :cl :fiveam))\n(in-package :{package})\n(def-suite all)\n(in-suite all)\n{tests}"
        )
    };
    let perform = |package: &str| {
        format!(":perform (test-op (o c) (symbol-call :fiveam :run! (find-symbol \"ALL\" \"{package}\")))")
    };
    project.write(
        "s.asd",
        &format!(
            r#"(defsystem "s")
               (defsystem "s/good" :depends-on ("fiveam") :components ((:file "good")) {})
               (defsystem "s/more" :depends-on ("fiveam") :components ((:file "more")) {})
               (defsystem "s/code" :components ((:file "code")))
               (defsystem "s/bad" :depends-on ("fiveam" "s/code") :components ((:file "bad")) {})
               (defsystem "s/worse" :depends-on ("fiveam") :components ((:file "worse")) {})
               (defsystem "s/same" :depends-on ("fiveam") :components ((:file "same")) {})
               (defsystem "s/broken" :components ((:file "broken")))
               (defsystem "s/empty" :components ((:file "empty")))
               (defsystem "s/plain" :perform (test-op (o c) (format t "3 of 4 things work~%") (error "not all")))"#,
            perform("GOOD"),
            perform("MORE"),
            perform("BAD"),
            perform("WORSE"),
            perform("SAME"),
        ),
    );
    project.write("same.lisp", &suite("same", "(test same (is (= 1 2)))\n"));
    project.write("good.lisp", &suite("good", "(test adds (is (= 2 (+ 1 1))))\n(test same (is (= 1 1)))\n"));
    project.write("more.lisp", &suite("more", "(test more (is (= 2 (+ 1 1))))\n"));
    let wrong: String = (0..30).map(|n| format!("(test wrong-{n} (is (= {n} (1+ {n}))))\n")).collect();
    project.write(
        "bad.lisp",
        &suite("bad", &format!("(test same (cl-user::so 1))\n(test fine (is (= 1 (cl-user::so nil))))\n{wrong}")),
    );
    project.write("worse.lisp", &suite("worse", &wrong.replace("(= ", "(= 1 2 3 4 5 6 7 8 9 10 11 12 ")));
    project.write("code.lisp", "(in-package :cl-user)\n(defun so (x)\n  (if x\n      (error \"so\")\n      1))\n");
    project.write("broken.lisp", "(defun fine () 1)\n(eval-when (:compile-toplevel) (error \"no such luck\"))\n");
    project.write("empty.lisp", "(defun no-test () 1)\n");
    Some(project)
}

#[test]
fn run_tests_accepts_several_systems_and_sums_the_counts() {
    let Some(project) = project_with_several_systems() else { return };
    let root = project.directory.display().to_string();
    let mut server = libraries::start_in(&project.directory, &["--structured-content"]);
    server.initialize("2025-11-25");
    let run = |server: &mut Server, systems: Value, others: Value| {
        let mut arguments = json!({"system": systems, "directory": root});
        arguments.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
        call_ok(server, "run-tests", arguments)
    };
    // A single system is reported as usual, in each notation of the argument.
    for one in [json!("s/good"), json!([":s/good"]), json!(" s/good, ")] {
        let text = run(&mut server, one, json!({}));
        assert_eq!(timeless(&text).lines().next().unwrap(), "=> all pass  2 passed, 0 failed, 0 errors, 0 skipped");
        assert!(!text.contains("s/good:"), "{text}");
    }
    let without_times = |text: &str| {
        let lines = text.lines().map(|line| {
            line.split_once(" skipped in ").map_or(line.to_owned(), |(counts, _)| format!("{counts} skipped"))
        });
        lines.collect::<Vec<_>>().join("\n")
    };
    for (systems, fresh) in [(json!("s/good, s/more"), false), (json!(["s/good", "S/MORE", "s/good"]), true)] {
        let text = run(&mut server, systems, json!({"fresh": fresh}));
        let expected = "s/good:\n=> all pass  2 passed, 0 failed, 0 errors, 0 skipped\n\n\
                        s/more:\n=> all pass  1 passed, 0 failed, 0 errors, 0 skipped\n\n\
                        2 systems: => all pass  3 passed, 0 failed, 0 errors, 0 skipped";
        let timeless = without_times(&text);
        assert_eq!(timeless.contains("used a fresh image"), fresh, "{text}");
        assert!(timeless.contains(expected), "{text}");
        assert!(last_error(&mut server).starts_with("No error information available."));
    }
    // The remaining systems run after a failure, and each has its share of the report.
    for fresh in [false, true] {
        let all = json!("s/good no-such-system,s/broken s/empty s/plain s/bad s/more");
        let text = run(&mut server, all, json!({"fresh": fresh}));
        assert!(text.chars().count() <= 9_500, "{} characters", text.chars().count());
        let timeless = without_times(&text);
        for expected in [
            "s/good:\n=> all pass  2 passed, 0 failed, 0 errors, 0 skipped\n",
            "no-such-system:\nFAILED  0 passed, 0 failed, 1 error, 0 skipped\n1. no-such-system\n   \
             ASDF/FIND-COMPONENT:MISSING-COMPONENT ",
            "\ns/broken:\nFAILED  0 passed, 0 failed, 1 error, 0 skipped\n1. s/broken\n   SIMPLE-ERROR no such luck In ",
            "\ns/empty:\nFAILED  0 passed, 0 failed, 1 error, 0 skipped\n1. s/empty\n   SIMPLE-ERROR Nothing ran: ",
            "\ns/plain:\nFAILED  0 passed, 0 failed, 1 error, 0 skipped\n1. test-op of s/plain\n   SIMPLE-ERROR not all ",
            "\nThe test run printed:\n3 of 4 things work\n",
            "\ns/bad:\nFAILED  1 passed, 30 failed, 1 error, 0 skipped\n1. BAD::SAME  bad.lisp:5\n",
            "BAD::WRONG-29",
            "\ns/more:\n=> all pass  1 passed, 0 failed, 0 errors, 0 skipped\n",
            "\n7 systems: FAILED  4 passed, 30 failed, 5 errors, 0 skipped",
        ] {
            assert!(timeless.contains(expected), "{fresh}: {expected:?} is not in\n{text}");
        }
        assert_eq!(text.lines().filter(|line| *line == "3 of 4 things work").count(), 1, "{text}");
        assert_eq!(text.matches("also lists code that").count(), 1, "{text}");
        assert!(last_error(&mut server).starts_with("Error: "));
    }
    // Omitted failures are counted for each system.
    call_ok(&mut server, "configure-limits", json!({"max-answer": 6000}));
    let text = run(&mut server, json!("s/worse s/bad s/good"), json!({}));
    assert!(text.chars().count() <= 6_000 && !text.contains("characters omitted"), "{text}");
    for expected in [" more failed, not shown for lack of room", "\n\ns/bad:\nFAILED", "\n\ns/good:\n=> all pass"] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    call_ok(&mut server, "configure-limits", json!({"max-answer": 9500}));
    // Remarks about some systems name them.
    for fresh in [false, true] {
        let text =
            run(&mut server, json!("s/worse s/good s/bad s/plain s/same"), json!({"suspects": 1, "fresh": fresh}));
        let said = "\ns/worse, s/same: There are no suspects: no failed test ran code from the files of";
        assert!(text.contains(said) && text.matches("There are no suspects").count() == 2, "{text}");
        assert!(text.contains("\ns/plain: There are no suspects: the ASDF test-op counts as one test"), "{text}");
        let notice = "[notice]\nThis test run used a fresh image, which loads only files, for each system.\n";
        assert_eq!(text.contains(notice), fresh, "{text}");
    }
    // A system that cannot be loaded has no suspects.
    let text = run(&mut server, json!("s/good no-such-system"), json!({"suspects": 2}));
    assert!(!text.contains("uspects"), "{text}");
    let text = run(&mut server, json!("s/good no-such-system"), json!({}));
    assert!(!text.contains("uspects"), "{text}");
    // Each test has a record with its system, and each system has suspects.
    for fresh in [false, true] {
        let arguments = json!({"system": "s/good s/bad s/broken", "directory": root, "suspects": 2, "fresh": fresh});
        let content = structured(&mut server, arguments);
        let tests = content["tests"].as_array().unwrap();
        let of = |system: &str| tests.iter().filter(|test| test["system"] == system).count();
        assert_eq!((of("s/good"), of("s/bad"), of("s/broken"), tests.len()), (2, 32, 1, 35), "{content:#}");
        assert_eq!((&content["passed"], &content["failed"], &content["errors"]), (&json!(3), &json!(30), &json!(2)));
        let erred = tests.iter().find(|test| test["name"] == "BAD::SAME").unwrap();
        assert_eq!((&erred["error"]["message"], &erred["suspects"][0]["name"]), (&json!("so"), &json!("SO")));
        let erred = tests.iter().find(|test| test["name"] == "s/broken").unwrap();
        assert!(erred["error"]["message"].as_str().unwrap().contains("broken"), "{erred:#}");
    }
    let text = call_err(&mut server, "run-tests", json!({"system": "s/good", "test-package": "good"}));
    assert_eq!(text, "run-tests needs exactly one of system, test-package and name.");
}

#[test]
fn test_without_a_check_passes_with_a_remark() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n(def-suite demo)\n\
                 (in-suite demo)\n(test checks (is (= 1 1)))\n(test nothing (list 1))\n";
    let Some(project) = fiveam(tests) else { return };
    let mut server = libraries::start_with(&["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    let expected = "=> all pass  2 passed, 0 failed, 0 errors, 0 skipped\nTests without checks: DEMO-TESTS::NOTHING";
    assert_eq!(timeless(&text), expected);
    let content = structured(&mut server, json!({"system": "demo"}));
    let test = |name: &str| content["tests"].as_array().unwrap().iter().find(|test| test["name"] == name).unwrap();
    assert_eq!(test("DEMO-TESTS::NOTHING")["message"], "The test checked nothing.");
    assert_eq!(test("DEMO-TESTS::CHECKS")["message"], json!(null));
}

#[test]
fn fiveam_checks_without_a_form_show_the_reason_and_the_falsifying_values() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n(def-suite demo)\n\
                 (in-suite demo)\n(defvar *ready* nil)\n\
                 (test random-values (for-all ((n (constantly 8)))\n  (is (= 8 n))\n  (is (= 7 n))))\n\
                 (test no-checks (for-all ((n (constantly 8)))\n  (list n)))\n\
                 (test variable-value (is-true *ready*))\n(test no-condition (signals error 1))\n";
    let Some(project) = fiveam(tests) else { return };
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.starts_with("FAILED  0 passed, 4 failed, 0 errors, 0 skipped in "), "{text}");
    for expected in [
        "tests.lisp:8\n   Falsifiable with (8)\n   (is (= 7 n))  expected 7, got 8\n",
        "\n   No tests\n",
        "*READY* did not return a true value",
        "\n   Failed to signal a ERROR",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    for wrong in ["Found failing test data", "\n   nil", "\n   *ready*", "\n   error"] {
        assert!(!text.contains(wrong), "{wrong:?} is in\n{text}");
    }
}

#[test]
fn condition_with_a_failing_report_does_not_end_other_tests() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n(def-suite demo)\n\
                 (in-suite demo)\n(test first-one (is (= 1 1)))\n\
                 (define-condition silent (error) () (:report (lambda (c s) c s (error \"no report\"))))\n\
                 (test broken (error 'silent))\n(test after (is (= 2 2)))\n(test erring (error \"so\"))\n";
    let Some(project) = fiveam(tests) else { return };
    let mut server = project.server();
    for settings in ["", "(setf *print-readably* t)"] {
        server.evaluate(settings);
        let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
        assert!(text.starts_with("FAILED  2 passed, 0 failed, 2 errors, 0 skipped in "), "{settings}: {text}");
        assert!(!text.contains("non-local exit"), "{settings}: {text}");
    }
}

#[test]
fn suite_without_tests_is_an_error() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n(def-suite demo)\n";
    let Some(project) = fiveam(tests) else { return };
    let mut server = project.server();
    let text = call_err(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("Nothing ran: there are no tests of the system demo"), "{text}");
    let text = call_err(&mut server, "run-tests", json!({"name": "demo-tests::demo"}));
    assert!(text.contains("Nothing ran: the suite demo-tests::demo contains no tests."), "{text}");
}

#[test]
fn test_removed_by_an_earlier_test_is_an_error() {
    let Some(root) = libraries() else { return };
    for (framework, perform, tests) in [
        (
            "rove",
            "(symbol-call :rove :run-suite :demo-tests)",
            "(deftest removes (ok t) (rove:remove-test 'gone))\n(deftest gone (ok t))\n",
        ),
        (
            "lisp-unit2",
            "(symbol-call :lisp-unit2 :run-tests :package :demo-tests)",
            "(define-test removes () (assert-true t) (uninstall-test 'gone))\n(define-test gone () (assert-true t))\n",
        ),
    ] {
        let tests = format!("(defpackage :demo-tests (:use :cl :{framework}))\n(in-package :demo-tests)\n{tests}");
        let project = Project::new(&format!("{framework:?}"), perform, &tests);
        let mut server = ready();
        server.evaluate(&format!(
            "(progn (asdf:initialize-source-registry '(:source-registry (:tree {root:?}) :inherit-configuration)) t)"
        ));
        project.register(&mut server);
        call_ok(&mut server, "load-system", json!({"system": "demo/tests", "timeout": 600}));
        let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
        assert!(text.starts_with("FAILED  1 passed, 0 failed, 1 error, 0 skipped in "), "{framework}: {text}");
        assert!(text.contains("   The test could not run: it was removed during the run.\n"), "{framework}: {text}");
    }
}

#[test]
fn unknown_system_test_or_package_is_an_error_with_near_names() {
    let mut server = ready();
    let text = call_err(&mut server, "run-tests", json!({}));
    assert_eq!(text, "run-tests needs exactly one of system, test-package and name.");
    assert_eq!(text, call_err(&mut server, "run-tests", json!({"system": "a", "name": "b"})));
    let text = call_err(&mut server, "run-tests", json!({"system": "no-such-system-here"}));
    assert!(text.starts_with("[ERROR] ASDF/FIND-COMPONENT:MISSING-COMPONENT\n"), "{text}");
    let text = call_err(&mut server, "run-tests", json!({"name": "spliting"}));
    assert!(
        text.contains(
            "There is no test or suite named spliting: no tests of a supported framework are loaded. Load the tests first"
        ),
        "{text}"
    );
    server.evaluate("(defpackage :demo-rt (:use :cl :sb-rt)) (in-package :demo-rt) (deftest splitting 1 1)");
    let text = call_err(&mut server, "run-tests", json!({"name": "spliting"}));
    assert!(
        text.contains("There is no test or suite named spliting") && text.contains("Did you mean SPLITTING?"),
        "{text}"
    );
    let text = call_err(&mut server, "run-tests", json!({"name": "split|ting"}));
    let expected = "There is no test or suite named split|ting. This name does not spell a symbol: a vertical bar in it is not \
                    closed. In a name, \\| spells a vertical bar, and \\\\ a backslash.";
    assert!(text.contains(expected), "{text}");
    let text = call_err(&mut server, "run-tests", json!({"test-package": "cl-user"}));
    assert!(text.contains("Nothing ran: there are no tests of the package cl-user."), "{text}");
    // Evaluated tests can be run, too.
    let text = call_ok(&mut server, "run-tests", json!({"name": "splitting"}));
    assert_eq!(timeless(&text), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped");
    assert_eq!(server.evaluate("(eq nil (find-symbol \"SPLITING\" :demo-rt))"), "=> T");
}

#[test]
fn name_of_a_test_is_read_in_its_package() {
    let mut server = ready();
    server.evaluate(
        "(defpackage :demo-code (:use :cl) (:export #:add)) (defpackage :demo-rt (:use :cl :demo-code :sb-rt))
         (defpackage :demo-other (:use :cl :sb-rt))
         (in-package :demo-other) (deftest add 1 2)
         (in-package :demo-rt) (deftest add 1 1)",
    );
    for name in ["demo-rt::add", "demo-code:add", "add"] {
        let text = call_ok(&mut server, "run-tests", json!({"name": name}));
        assert_eq!(timeless(&text), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped", "{name}");
    }
    let text = call_ok(&mut server, "run-tests", json!({"name": "demo-other::add"}));
    assert!(text.starts_with("FAILED  0 passed, 1 failed, "), "{text}");
}

#[test]
fn restart_abort_of_a_test_says_that_it_ends_the_test() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest aborts (princ-to-string (find-restart 'abort)) \"End this test with an error.\")\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let text = call_ok(&mut project.server(), "run-tests", json!({"system": "demo"}));
    assert!(text.starts_with("=> all pass  1 passed"), "{text}");
}

#[test]
fn test_runs_at_the_same_time_do_not_disturb_each_other() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest one 1 1)\n(deftest two 2 2)\n";
    let perform = "(progn (setf (symbol-value 'cl-user::*state*) :begun)
                     (loop until (eq :continue (symbol-value 'cl-user::*state*)) do (sleep 0.01))
                     (symbol-call :sb-rt :do-tests))";
    let project = Project::new("\"sb-rt\"", perform, tests);
    let other =
        "(defsystem \"other\" :depends-on (\"sb-rt\") :perform (test-op (o c) (symbol-call :sb-rt :do-tests)))\n";
    project.write("other.asd", other);
    let mut server = project.server();
    server.evaluate("(defvar *state* nil)");
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "background": true}));
    let id: u64 = text.split(' ').nth(1).and_then(|id| id.parse().ok()).expect("a number");
    wait_until("the test operation has begun", || server.evaluate("*state*").ends_with("=> :BEGUN"));
    // A run that begins and ends while the other run waits.
    call_ok(&mut server, "run-tests", json!({"system": "other"}));
    server.evaluate("(setf *state* :continue)");
    let text = call_ok(&mut server, "check-evaluation", json!({"id": id, "wait": 60}));
    assert!(text.starts_with("=> all pass  2 passed, 0 failed, 0 errors"), "{text}");
}
