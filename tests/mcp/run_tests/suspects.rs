//! Grouping of similar failures, and suspects.

use super::*;

#[test]
fn tests_with_the_same_failure_share_a_report_entry() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest first-one (parse \"abc\") nil)\n(deftest second-one (parse \"xyz\") nil)\n\
                 (deftest other (item (vector 1) 9) nil)\n(deftest third-one (parse \"uvw\") nil)\n\
                 (deftest longer (parse \"abcd\") nil)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.starts_with("FAILED  0 passed, 0 failed, 5 errors, 0 skipped in "), "{text}");
    assert!(
        text.contains("1. DEMO-TESTS::FIRST-ONE  tests/tests.lisp:3\n   SB-INT:INVALID-ARRAY-INDEX-ERROR"),
        "{text}"
    );
    // A similar failure with another message is shown with its message.
    let longer = "DEMO-TESTS::LONGER: Invalid index 9 for (SIMPLE-VECTOR 4), should be a non-negative integer below 4.";
    let alike =
        format!("\n   Alike: DEMO-TESTS::SECOND-ONE, DEMO-TESTS::THIRD-ONE\n          {longer}\n2. DEMO-TESTS::OTHER");
    assert!(text.contains(&alike), "{text}");
    assert_eq!(text.matches("Invalid index 9").count(), 3, "{text}");
}

/// Two faults may fail in the same function.
#[test]
fn tests_with_the_same_failure_are_split_by_their_suspects() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest one (run #'alpha 1) 2)\n(deftest two (run #'beta 1) 2)\n(deftest three (run #'gamma 1) 2)\n\
                 (deftest again (run #'alpha 2) 2)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    project.write(
        "src/demo.lisp",
        "(defpackage :demo (:use :cl) (:export #:run #:alpha #:beta #:gamma))\n(in-package :demo)\n\n\
         (defun alpha (n)\n  (- n 1))\n\n(defun beta (n)\n  (* n 1))\n\n(defun gamma (n)\n  (+ n 1))\n\n\
         (defun run (function n)\n  (let ((found (funcall function n)))\n    (if (= found 2)\n        found\n        \
         (error \"It is ~D.\" found))))\n",
    );
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("\n   Alike: DEMO-TESTS::TWO: It is 1.\n          DEMO-TESTS::AGAIN: It is 1.\n"), "{text}");
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "suspects": 2}));
    assert!(text.starts_with("FAILED  1 passed, 0 failed, 3 errors, 0 skipped in "), "{text}");
    let (first, second) = text.split_once("\n2. DEMO-TESTS::TWO  tests/tests.lisp:4\n").expect("an entry of its own");
    assert!(first.contains("\n   Alike: DEMO-TESTS::AGAIN"), "{text}");
    assert!(first.contains("ALPHA  src/demo.lisp:4") && !first.contains("BETA"), "{text}");
    assert!(second.starts_with("   SIMPLE-ERROR It is 1. (E") && second.contains(", same frames as 1)\n"), "{text}");
    assert!(second.contains("BETA  src/demo.lisp:7") && !second.contains("ALPHA"), "{text}");
}

/// With many faults, the report favours one line of each over more lines about the first.
#[test]
fn report_of_20_faults_shows_each_with_its_suspect() {
    const FAULTS: usize = 20;
    let (mut code, mut tests) = (
        "(defpackage :demo (:use :cl))\n(in-package :demo)\n".to_owned(),
        "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n".to_owned(),
    );
    for fault in 0..FAULTS {
        code += &format!("\n(defun fault-{fault} (number)\n  (let ((sum number))\n");
        for line in 0..10 {
            code += &format!("    (incf sum (if (plusp sum) {line} (length \"what is added in a case like this\")))\n");
        }
        code += "    (- sum 45)))\n";
        tests += &format!("(deftest test-{fault} (demo::fault-{fault} 100) 101)\n");
        tests += &format!("(deftest same-{fault} (demo::fault-{fault} 100) 101)\n");
    }
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", &tests);
    project.write("src/demo.lisp", &code);
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "suspects": 3}));
    assert!(text.starts_with("FAILED  0 passed, 40 failed, 0 errors"), "{text}");
    assert!(text.chars().count() <= 8_000 && !text.contains("no room here"), "{text}");
    for fault in 0..FAULTS {
        let (_, entry) = text.split_once(&format!("\n{}. DEMO-TESTS::TEST-{fault}  ", fault + 1)).expect(&text);
        let (entry, _) = entry.split_once("\n   Alike: ").expect(entry);
        assert!(entry.contains("expected 101, got 100"), "{entry}");
        let (_, rest) = text.split_once(&format!("\n   Alike: DEMO-TESTS::SAME-{fault}\n   Suspects: ")).expect(&text);
        assert!(rest.starts_with(&format!("FAULT-{fault}  src/demo.lisp:")), "{rest}");
    }
    // A single failure is reported completely.
    let text = call_ok(&mut server, "run-tests", json!({"name": "demo-tests::test-7", "suspects": 3}));
    assert!(text.contains("case like this\")))\n") && text.contains("(- sum 45)))"), "{text}");
}

/// A test operation without a known framework has one verdict, but its output shows single failures.
#[test]
fn failures_printed_by_a_test_op_have_suspects() {
    let tests = "(defpackage :demo-tests (:use :cl :demo))\n(in-package :demo-tests)\n\n\
                 (defun check (number expected &aux (found (classify number)))\n  (cond ((equal found expected)\n         \
                 (write-char #\\.)\n         (finish-output))\n        \
                 (t (format t \"~&~3D:~%   expected ~S but got ~S~%\" number expected found)))\n  \
                 (equal found expected))\n\n\
                 (defun run ()\n  (let ((passed t))\n    (loop for (number expected)\n            in \
                 '((3 :small) (4 :small) (5000 :huge) (100 (:large 100)) (6000 :huge)\n                (-1 :minus) \
                 (101 (:large 101)) (5 :small))\n          do (unless (check number expected) (setf passed nil)))\n    \
                 (format t \"~&Some tests failed.~%\")\n    passed))\n";
    let project = Project::new("", "(symbol-call :demo-tests :run)", tests);
    project.write(
        "src/demo.lisp",
        "(defpackage :demo (:use :cl) (:export #:classify))\n(in-package :demo)\n\n(defun huge-p (n)\n  (> n 1000))\n\n\
         (defun large-name (n)\n  (if (plusp n)\n      (list :larg n)\n      (list :large n)))\n\n\
         (defun classify (n)\n  (cond ((huge-p n) :huge)\n        ((> n 10)\n         (large-name n))\n        \
         ((minusp n) (sign-of n))\n        (t :small)))\n\n\
         (defun sign-of (n)\n  (if (minusp n)\n      :plus\n      :minus))\n",
    );
    let mut server = libraries::start_in(&project.directory, &["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let said = "1. test-op of demo/tests\n   The test-op returned NIL and printed: Some tests failed.\n";
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains(said) && text.contains("run-tests with `suspects`: 3 also lists"), "{text}");
    // Lines of dots are left out, and complete output needs no hint on how to see the rest.
    let printed = "\nThe test run printed:\n100:\n   expected (:LARGE 100) but got (:LARG 100)\n -1:\n";
    assert!(text.contains(printed), "{text}");
    assert!(text.ends_with("\nSome tests failed."), "{text}");
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "suspects": 2}));
    let large = "   Before the test-op printed 100: expected (:LARGE 100) but got (:LARG 100) (and 1 more):\n   \
                 Suspects: LARGE-NAME  src/demo.lisp:7  (no passing test ran these lines)\n";
    let sign = "   Before the test-op printed -1: expected :MINUS but got :PLUS:\n   \
                Suspects: SIGN-OF  src/demo.lisp:19  (no passing test ran these lines)\n";
    assert!(text.contains(large) && text.contains("\n               9: (list :larg n)\n"), "{text}");
    assert!(text.contains(sign), "{text}");
    assert!(text.find(large) < text.find(sign), "{text}");
    let content = structured(&mut server, json!({"system": "demo", "suspects": 1}));
    let tests = content["tests"].as_array().expect("tests");
    assert_eq!(tests.len(), 1, "{content:#}");
    let names: Vec<_> =
        tests[0]["suspects"].as_array().expect("suspects").iter().map(|suspect| &suspect["name"]).collect();
    assert_eq!(names, ["LARGE-NAME", "SIGN-OF"], "{content:#}");
}

/// The report of an error is made after its test, when the stack of its frames is gone.
#[test]
fn dynamic_extent_arguments_in_frames_are_not_read_after_unwinding() {
    let mut server = ready();
    server.evaluate("(require \"sb-rt\")");
    server.evaluate(
        "(defun inner (function list) (declare (notinline +)) (+ (funcall function 1) (first list)) 1)
         (defun outer (x)
           (flet ((add (n) (+ n x)))
             (declare (dynamic-extent #'add))
             (let ((list (list 'a x)))
               (declare (dynamic-extent list))
               (inner #'add list))))
         (sb-rt:deftest stack (outer 1) 1)",
    );
    let text = call_ok(&mut server, "run-tests", json!({"name": "stack"}));
    assert!(text.contains("(INNER #<dynamic-extent FUNCTION> #<dynamic-extent CONS>)"), "{text}");
    let end = server.finish();
    assert!(!end.stderr.contains("CORRUPTION"), "{}", end.stderr);
}

#[test]
fn functions_run_by_failing_and_few_passing_tests_are_suspects() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest small (classify 3) :small)\n(deftest huge (classify 5000) :huge)\n\
                 (deftest large (classify 100) (:large 100))\n(deftest also (classify 101) (:large 101))\n\
                 (deftest sign (demo::sign-of -1) :minus)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let source = "(defpackage :demo (:use :cl) (:export #:classify))\n(in-package :demo)\n\
                  (defmacro with-size ((size n) &body body)\n  `(let ((,size (abs ,n))) ,@body))\n\
                  (defun huge-p (n)\n  (> n 1000))\n\n\
                  (defun large-name (n)\n  (if (plusp n)\n      (list :larg n)\n      (list :large n)))\n\n\
                  (defun classify (n)\n  (with-size (size n)\n    (cond ((huge-p size) :huge)\n          \
                  ((> size 10)\n           (large-name size))\n          (t :small))))\n\n\
                  (declaim (inline sign-of))\n(defun sign-of (n)\n  (if (minusp n)\n      :plus\n      :minus))\n";
    project.write("src/demo.lisp", source);
    let mut server = libraries::start_in(&project.directory, &["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let asked = "\nrun-tests with `suspects`: 3 also lists code that failed tests ran and few or no passing tests ran.";
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains(asked), "{text}");
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "suspects": 2}));
    assert!(!text.contains(asked), "{text}");
    let suspect = "   Suspects: LARGE-NAME  src/demo.lisp:8  (no passing test ran these lines)\n";
    assert!(text.contains(suspect) && text.contains("\n               10: (list :larg n)\n"), "{text}");
    assert!(
        text.contains("CLASSIFY  src/demo.lisp:13  (no passing test ran these lines)  expands WITH-SIZE\n"),
        "{text}"
    );
    assert!(text.contains("17: (large-name size))"), "{text}");
    assert!(!text.contains("HUGE-P"), "{text}");
    // The suspects of similar failures are listed once.
    assert!(
        text.contains("2. DEMO-TESTS::ALSO  tests/tests.lisp:6\n") && text.contains("Suspects: same as for 1"),
        "{text}"
    );
    // The line of the deciding condition is shown, and inline functions are recorded.
    assert!(text.contains("\n               9: (if (plusp n)\n"), "{text}");
    let inline = "SIGN-OF  src/demo.lisp:21  (no passing test ran these lines)\n               22: (if (minusp n)";
    assert!(text.contains(inline), "{text}");
    // The session's own code is not instrumented.
    assert_eq!(server.evaluate("(sb-c::code-coverage-map (sb-kernel:fun-code-header #'demo:classify))"), "=> NIL");
    let content = structured(&mut server, json!({"test-package": "demo-tests", "suspects": 1}));
    let suspects = &content["tests"][0]["suspects"];
    assert_eq!((&suspects[0]["name"], &suspects[0]["passing"]), (&json!("LARGE-NAME"), &json!(0)), "{content:#}");
    assert_eq!(suspects.as_array().map(Vec::len), Some(1), "{content:#}");
}

#[test]
fn code_in_the_same_system_as_its_tests_has_suspects() {
    let code = "(defun small (n)\n  (1+ n))\n(defun large (n)\n  (if (plusp n)\n      (* 3 n)\n      0))\n";
    for (framework, tests) in [
        ("sb-rt", "(deftest one (small 1) 2)\n(deftest two (large 1) 2)\n"),
        ("fiveam", "(fiveam:test one (fiveam:is (= 2 (small 1))))\n(fiveam:test two (fiveam:is (= 2 (large 1))))\n"),
    ] {
        let using = if framework == "sb-rt" { " :sb-rt" } else { "" };
        let package = format!("(defpackage :demo (:use :cl{using}))\n");
        let begin = "(in-package :demo)\n";
        for apart in [false, true] {
            let project = Project::new("", "", "");
            let files = if apart { "(:file \"demo\") (:file \"tests\")" } else { "(:file \"demo\")" };
            let system = format!("(defsystem \"demo\" :depends-on (\"{framework}\") :serial t :components ({files}))");
            project.write("demo.asd", &system);
            if apart {
                project.write("demo.lisp", &format!("{package}{begin}{code}"));
                project.write("tests.lisp", &format!("{begin}{tests}"));
            } else {
                project.write("demo.lisp", &format!("{package}{begin}{code}{tests}"));
            }
            let mut server = project.server();
            let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "suspects": 3}));
            let suspect =
                "   Suspects: LARGE  demo.lisp:5  (no passing test ran these lines)\n               6: (if (plusp n)\n";
            assert!(
                text.contains(suspect) && text.matches(" passing test").count() == 1,
                "{framework} {apart}: {text}"
            );
        }
    }
}

#[test]
fn code_in_another_system_than_its_tests_has_suspects() {
    for (system, helpers) in [("demo-tests", ""), ("demo-tests", "helpers-for-tests"), ("check-tests", "")] {
        let project = Project::new("", "", "");
        let needed = if helpers.is_empty() { String::new() } else { format!("{helpers:?}") };
        std::fs::remove_file(project.directory.join("demo.asd")).unwrap();
        project.write(
            "code/demo.asd",
            "(defsystem \"demo\" :depends-on (\"demo/parts\") :components ((:file \"demo\")))
                                        (defsystem \"demo/parts\" :components ((:file \"parts\")))",
        );
        project.write(
            "code/parts.lisp",
            "(defpackage :demo (:use :cl))\n(in-package :demo)\n(defun large (n)\n  (* 3 n))\n",
        );
        project.write("code/demo.lisp", "(in-package :demo)\n(defun small (n)\n  (1+ n))\n");
        project.write(
            "aids/helpers-for-tests.asd",
            "(defsystem \"helpers-for-tests\" :depends-on (\"demo\") :components ((:file \"aids\")))",
        );
        project.write("aids/aids.lisp", "(in-package :demo)\n");
        project.write(
            &format!("tests/{system}.asd"),
            &format!(
                "(defsystem {system:?} :depends-on ({needed} \"sb-rt\" \"demo\") :components ((:file \"tests\")))"
            ),
        );
        project.write(
            "tests/tests.lisp",
            "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(defun call (f) (funcall f 1))\n\
             (deftest one (call 'demo::small) 2)\n(deftest two (call 'demo::large) 2)\n",
        );
        let mut server = libraries::start_in(&project.directory, &[]);
        server.initialize("2025-06-18");
        for place in ["code/", "aids/", "tests/"] {
            server.evaluate(&format!("(progn (push #p{:?} asdf:*central-registry*) t)", project.directory.join(place)));
        }
        for asked in [json!({"system": system, "suspects": 3}), json!({"test-package": "demo-tests", "suspects": 3})] {
            let text = call_ok(&mut server, "run-tests", asked);
            assert!(text.starts_with("FAILED  1 passed, 1 failed"), "{text}");
            assert!(
                text.contains("   Suspects: LARGE  code/parts.lisp:3  (no passing test ran"),
                "{system} {helpers}: {text}"
            );
            assert!(!text.contains("CALL"), "{system} {helpers}: {text}");
        }
    }
}

/// ASDF knows no directory for the systems that it infers from the files of a package-inferred system.
#[test]
fn code_in_a_package_inferred_system_has_suspects() {
    let project = Project::new("", "", "");
    project.write(
        "demo.asd",
        "(defsystem \"demo\" :class :package-inferred-system :depends-on (\"demo/code/main\")
           :in-order-to ((test-op (test-op \"demo/checks/all\"))))",
    );
    project.write(
        "code/main.lisp",
        "(defpackage :demo/code/main (:use :cl) (:export #:small #:large))\n(in-package :demo/code/main)\n\
         (defun small (n)\n  (1+ n))\n(defun large (n)\n  (* 3 n))\n",
    );
    let package = |name: &str, more: &str| format!("(defpackage :demo/checks/{name} (:use :cl :sb-rt) {more})\n");
    project
        .write("checks/all.lisp", &package("all", "(:import-from :demo/checks/one) (:import-from :demo/checks/two)"));
    for (name, tests) in [
        ("one", "(deftest one (demo/code/main:small 1) 2)\n"),
        ("two", "(deftest small (demo/code/main:small 1) 2)\n(deftest large (demo/code/main:large 1) 2)\n"),
    ] {
        let text =
            format!("{}(in-package :demo/checks/{name})\n{tests}", package(name, "(:import-from :demo/code/main)"));
        project.write(&format!("checks/{name}.lisp"), &text);
    }
    let mut server = project.server();
    for (asked, passed) in [
        (json!({"system": "demo", "suspects": 3}), 2),
        (json!({"system": "demo/checks/all", "suspects": 3}), 2),
        (json!({"system": "demo/checks/two", "suspects": 3}), 1),
        (json!({"test-package": "demo/checks/two", "suspects": 3}), 1),
    ] {
        let text = call_ok(&mut server, "run-tests", asked.clone());
        assert!(text.starts_with(&format!("FAILED  {passed} passed, 1 failed")), "{asked}: {text}");
        assert!(text.contains("1. DEMO/CHECKS/TWO::LARGE  checks/two.lisp:4\n"), "{asked}: {text}");
        let suspect = "   Suspects: LARGE  code/main.lisp:5  (no passing test ran these lines)\n";
        assert!(text.contains(suspect), "{asked}: {text}");
    }
}

#[test]
fn absence_of_suspects_is_reported_with_the_reason() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest one 1 2)\n\
                 (deftest stale (demo:parse \"\") nil)\n(deftest fine 1 1)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    let nothing = "ran code from the files of a tested system, apart from the tests themselves.\n";
    let passed = "Tests that passed in the fresh image used for the search have no suspects: DEMO-TESTS::STALE.\n";
    let suspects = |server: &mut Server, name: &str| {
        let text =
            call_ok(server, "run-tests", json!({name: if name == "system" { "demo" } else { "stale" }, "suspects": 3}));
        assert!(!text.contains("with `suspects`") && !text.contains("Suspects:"), "{text}");
        text
    };
    let text = suspects(&mut server, "system");
    assert!(text.starts_with(&format!("[notice]\nThere are no suspects: no failed test {nothing}\n")), "{text}");
    // The test fails only in the session's state.
    server.evaluate("(defun demo:parse (text) text)");
    let text = suspects(&mut server, "system");
    let others = format!("{passed}There are no suspects: no other failed test {nothing}\n");
    assert!(text.starts_with(&format!("[notice]\n{others}")), "{text}");
    let text = suspects(&mut server, "name");
    assert!(text.starts_with(&format!("[notice]\n{passed}\nFAILED")), "{text}");
}

/// A passing test may run the faulty line without checking its effect.
#[test]
fn suspect_line_matching_the_failure_is_shown_although_passing_tests_ran_it() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest both (list (title \"s\") (title 'foo)) (\"some text\" \"some name\"))\n\
                 (deftest one (stringp (title 'bar)) t)\n";
    let project = Project::new("\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    project.write(
        "src/demo.lisp",
        "(defpackage :demo (:use :cl) (:export #:title))\n(in-package :demo)\n\n\
         (defun title (x)\n  (cond\n    ((stringp x)\n     (concatenate 'string \"some\" \" text\"))\n    \
         (t\n     (concatenate 'string \"wrong\" \" name\"))))\n",
    );
    let mut server = project.server();
    let text = call_ok(&mut server, "run-tests", json!({"system": "demo", "suspects": 1}));
    assert!(text.contains("\n   Suspects: TITLE  src/demo.lisp:4  (no passing test ran these lines)\n"), "{text}");
    assert!(text.contains("\n               7: (concatenate 'string \"some\" \" text\"))\n"), "{text}");
    assert!(text.contains("\n               9: (concatenate 'string \"wrong\" \" name\"))))  (1 passing)"), "{text}");
}

#[test]
fn print_methods_run_only_to_report_a_failure_are_no_suspects() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam :demo))\n(in-package :demo-tests)\n\
                 (def-suite demo)\n(in-suite demo)\n\
                 (test small (is (= 1 (demo::n (make-item 1)))))\n\
                 (test large (is (eql 7 (make-item 7))))\n\
                 (test text (is (string= \"nothing\" (princ-to-string (make-item 0)))))\n\
                 (test report (is (search \"even\" (handler-case (check-item (make-item 2))\n\
                                                    (error (condition) (princ-to-string condition))))))\n\
                 (test broken (check-item (make-item 4)))\n\
                 (test handled (is (eq :handled (handler-case (check-item (make-item 6)) (error () :odd)))))\n";
    let Some(project) = fiveam(tests) else { return };
    let source = "(defpackage :demo (:use :cl) (:export #:make-item #:check-item))\n(in-package :demo)\n\n\
                  (defclass item () ((n :initarg :n :reader n)))\n\n\
                  (define-condition odd-item (error)\n  ((item :initarg :item :reader item))\n  \
                  (:report (lambda (condition stream)\n             (format stream \"odd: ~A\" (item condition)))))\n\n\
                  (defmethod print-object ((item item) stream)\n  (if (plusp (n item))\n      \
                  (format stream \"item ~D\" (n item))\n      (write-string \"empty\" stream)))\n\n\
                  (defun make-item (n)\n  (make-instance 'item :n n))\n\n\
                  (defun check-item (item)\n  (when (evenp (n item))\n    (error 'odd-item :item item)))\n";
    project.write("src/demo.lisp", source);
    let mut server = libraries::start_with(&["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let content = structured(&mut server, json!({"system": "demo", "suspects": 5}));
    let suspects = |name: &str| {
        let title = format!("DEMO-TESTS::{name}");
        let test = content["tests"].as_array().expect("tests").iter().find(|test| test["name"] == title.as_str());
        let suspects = test.unwrap_or_else(|| panic!("no {name} in {content:#}"))["suspects"].clone();
        let names = suspects.as_array().expect("suspects").iter().map(|suspect| suspect["name"].to_string());
        names.collect::<Vec<_>>()
    };
    // FiveAM printed the value or the condition, and the server printed the frames of the error.
    for (name, expected) in [("LARGE", "MAKE-ITEM"), ("BROKEN", "CHECK-ITEM"), ("HANDLED", "CHECK-ITEM")] {
        let found = suspects(name);
        assert!(found.iter().any(|name| name.contains(expected)), "{name}: {found:?}");
        assert!(
            !found.iter().any(|name| name.contains("PRINT-OBJECT") || name.contains("ODD-ITEM")),
            "{name}: {found:?}"
        );
    }
    // These tests check printed text.
    for (name, parts) in [("TEXT", &["PRINT-OBJECT"][..]), ("REPORT", &["ODD-ITEM", "PRINT-OBJECT"])] {
        let found = suspects(name);
        assert!(parts.iter().all(|part| found.iter().any(|name| name.contains(part))), "{name}: {found:?}");
    }
}
