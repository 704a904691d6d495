//! run-tests: real frameworks, what a failing test says, tests that hang, exit and end threads, and the error state.

mod common;
#[path = "common/processes.rs"]
mod processes;

use std::path::{Path, PathBuf};

use common::{Server, bad, good, last_error};
use processes::until;
use serde_json::{Value, json};

/// Where ASDF looks for what Debian installs.
const INSTALLED: &str = "/usr/share/common-lisp/source";

/// True when this Lisp system is installed. Where it is not, as outside Debian, what needs it is left out; but not in CI.
fn installed(system: &str) -> bool {
    let there = Path::new(INSTALLED).join(system).exists();
    assert!(there || std::env::var_os("CI").is_none(), "scripts/setup.sh test installs {system}");
    if !there {
        eprintln!("{system} is not installed: left out");
    }
    there
}

/// A system `demo` and one of its tests, `demo/tests`, in a directory of their own.
struct Project(PathBuf);

impl Project {
    /// With these tests, that depend on this framework and are run by this form.
    fn new(name: &str, framework: &str, perform: &str, tests: &str) -> Self {
        let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("testing-{name}-{}", std::process::id()));
        let project = Self(root);
        project.write(
            "demo.asd",
            &format!(
                r#"(defsystem "demo" :components ((:module "src" :components ((:file "demo"))))
                     :in-order-to ((test-op (test-op "demo/tests"))))
                   (defsystem "demo/tests" :depends-on ("demo" {framework})
                     :components ((:module "tests" :components ((:file "tests"))))
                     :perform (test-op (o c) {perform}))"#
            ),
        );
        project.write(
            "src/demo.lisp",
            "(defpackage :demo (:use :cl) (:export #:parse #:item))\n(in-package :demo)\n\n\
             (defun item (v n)\n  (let ((found (aref v n)))\n    (list found)))\n\n\
             (defun parse (text)\n  (if (string= text \"\")\n      nil\n      \
             (list (item (coerce text 'simple-vector) 9))))\n",
        );
        project.write("tests/tests.lisp", tests);
        project
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.0.join(file);
        std::fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        std::fs::write(path, text).expect("a file");
    }

    /// Has the file count as changed: what is as new as its fasl to the second does not.
    fn touch(&self, file: &str) {
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        std::fs::File::options().write(true).open(self.0.join(file)).unwrap().set_modified(later).unwrap();
    }

    /// A server that finds the system.
    fn server(&self) -> Server {
        let mut server = Server::ready();
        self.register(&mut server);
        server
    }

    fn register(&self, server: &mut Server) {
        server.evaluate(&format!("(progn (push #p{:?} asdf:*central-registry*) t)", self.0.join("")));
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The text without times and addresses.
fn timeless(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let counts = first.rsplit_once(" in ").map_or(first, |(counts, _)| counts);
    text.replacen(first, counts, 1)
}

fn structured(server: &mut Server, arguments: Value) -> Value {
    let id = server.post_call("run-tests", arguments);
    let answer = server.answer(id);
    answer["result"]["structuredContent"].clone()
}

const FIVEAM: &str = r#"(defpackage :demo-tests (:use :cl :fiveam :demo))
(in-package :demo-tests)
(def-suite demo)
(in-suite demo)

(test adds
  (is (= 2 (+ 1 1))))

(test parse-empty
  (is (equal nil (parse "")))
  (is (equal '(1) (parse "")))
  (is-true (parse "")))

(test (split-last :depends-on adds)
  (is (equal '(1)
             (parse "abc"))))

(test handled
  (signals error (error "x")))

(test hangs
  (loop))

(test leaves
  (sb-ext:exit :code 3))

(test thrown
  (throw 'demo-nowhere 1))

(test kills
  (sb-thread:terminate-thread sb-thread:*current-thread*)
  (sleep 10))

(test later
  (skip "no time"))
"#;

fn fiveam(name: &str, tests: &str) -> Option<Project> {
    let run = "(symbol-call :fiveam :run! (find-symbol \"DEMO\" \"DEMO-TESTS\"))";
    installed("fiveam").then(|| Project::new(name, "\"fiveam\"", run, tests))
}

#[test]
fn a_failing_test_says_what_was_expected_what_came_and_where() {
    let Some(project) = fiveam("fiveam", FIVEAM) else { return };
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.5}));
    let text = timeless(&text);
    let expected = "\
FAILED  2 passed, 2 failed, 4 errors, 1 skipped
1. DEMO-TESTS::PARSE-EMPTY  tests/tests.lisp:11
   (is (equal '(1) (parse \"\")))  expected (1), got NIL
   (is-true (parse \"\"))
   (PARSE \"\") did not return a true value
2. DEMO-TESTS::SPLIT-LAST  tests/tests.lisp:14
   SB-INT:INVALID-ARRAY-INDEX-ERROR Invalid index 9 for (SIMPLE-VECTOR 3), should be a non-negative integer below 3. (E1: get-backtrace has all)
";
    assert!(text.starts_with(expected), "{text}");
    for frame in ["(DEMO:ITEM #(#\\a #\\b #\\c) 9)  ", "(DEMO:PARSE \"abc\")  "] {
        let line = text.lines().find(|line| line.contains(frame)).unwrap_or_else(|| panic!("no {frame} in:\n{text}"));
        assert!(line.contains("src/demo.lisp:"), "{line}");
    }
    assert!(text.contains("src/demo.lisp:5: (let ((found (aref v n)))"), "{text}");
    assert!(text.contains("   TIMEOUT It did not end within 0.5 seconds and was interrupted. (E2: "), "{text}");
    assert!(
        text.contains("4. DEMO-TESTS::LEAVES  tests/tests.lisp:24\n   SBCL-HOST::EXIT-REFUSED EXIT was called"),
        "{text}"
    );
    assert!(text.contains("5. DEMO-TESTS::THROWN  tests/tests.lisp:27\n   SB-INT:SIMPLE-CONTROL-ERROR"), "{text}");
    assert!(text.contains("6. DEMO-TESTS::KILLS  tests/tests.lisp:30\n"), "{text}");
    // The whole of it is kept under the identifier; the first one is the last error.
    let error = last_error(&mut server);
    assert!(error.contains("Error: SB-INT:INVALID-ARRAY-INDEX-ERROR") && error.contains("Id: E1"), "{error}");
    let frames = good(&mut server, "get-backtrace", json!({"error-id": "E1"}));
    assert!(frames.contains("(DEMO:ITEM #(#\\a #\\b #\\c) 9)\n"), "{frames}");
    assert!(frames.contains("RUN-TEST-LAMBDA"), "{frames}");
    server.goes_on();
}

/// Tests that are named oddly, defined twice, removed or defined anew by others, and one that hangs in a thread which has
/// lost what was to interrupt it.
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
fn unusual_tests_are_told_of_as_what_they_are() {
    let Some(project) = fiveam("unusual", UNUSUAL) else { return };
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo", "timeout": 1}));
    let expected = "FAILED  1 passed, 5 failed, 1 error, 0 skipped
1. DEMO-TESTS::|Odd (name) x|  tests/tests.lisp:7
   (is (= 1 2))  expected 1, got 2
2. DEMO-TESTS::TWICE  tests/tests.lisp:13
   (is (= 1 3))  expected 1, got 3
3. DEMO-TESTS::VICTIM  tests/tests.lisp:20
   It could not run: a test before it has removed it.
4. DEMO-TESTS::CHANGED  tests/tests.lisp:23
   (= 1 4)  expected 1, got 4
5. DEMO-TESTS::LOSES  tests/tests.lisp:26
   TIMEOUT It did not end within 1 second and was interrupted. (E1: get-backtrace has all)
6. DEMO-TESTS::ALIKE  tests/tests.lisp:34
   (is (equal \"a\" (string #\\b)))  expected \"a\", got \"b\"
   (is (equal \"c\" (string #\\b)))  expected \"c\", got \"b\"
   (is (= 1 (1+ 1)))  expected 1, got 2
";
    assert!(timeless(&text).starts_with(expected), "{text}");
    server.goes_on();
}

/// Print methods and reports that never end, of what tests fail with.
const ENDLESS: &str = r#"
(defclass endless () ())
(defmethod print-object ((object endless) stream) (loop))
(define-condition endless-report (error) () (:report (lambda (condition stream) (declare (ignore condition stream)) (loop))))
(defun fails (object) (declare (ignore object)) (error "on purpose"))
"#;

#[test]
fn what_never_ends_printing_ends_no_run() {
    let tests = format!(
        "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n{ENDLESS}
(deftest signals (error 'endless-report) 1)
(deftest argument (fails (make-instance 'endless)) 1)
(deftest after 1 2)
"
    );
    let project = Project::new("endless", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", &tests);
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo", "timeout": 1}));
    assert!(text.starts_with("FAILED  0 passed, "), "{text}");
    for name in ["SIGNALS", "ARGUMENT", "AFTER"] {
        assert!(text.contains(&format!(". DEMO-TESTS::{name}  tests/tests.lisp:")), "{text}");
    }
    assert!(text.contains("on purpose") && text.contains("expected 2, got 1"), "{text}");
    server.goes_on();

    let tests = format!(
        "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n{ENDLESS}
(def-suite demo)\n(in-suite demo)
(test value (is (equal 1 (make-instance 'endless))))
(test signals (error 'endless-report))
(test argument (fails (make-instance 'endless)))
(test after (is (= 2 1)))
"
    );
    let Some(project) = fiveam("endless-fiveam", &tests) else { return };
    let mut server = project.server();
    // FiveAM itself prints the values once its tests are over.
    let text = good(&mut server, "run-tests", json!({"system": "demo", "timeout": 1}));
    assert!(text.starts_with("FAILED  0 passed, "), "{text}");
    assert!(text.contains("TIMEOUT It did not end within 1 second and was interrupted."), "{text}");
    server.goes_on();
}

#[test]
fn each_test_is_a_record_and_counts_add_up() {
    let Some(project) = fiveam("structured", FIVEAM) else { return };
    let mut server = Server::start_with(&["--structured-content"]);
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
fn the_error_state_follows_the_tests() {
    let tests = r#"(defpackage :demo-tests (:use :cl :fiveam :demo))
(in-package :demo-tests)
(def-suite demo)
(in-suite demo)
(test good (is (= 1 1)))
(test wrong (is (= 1 2)))
(test broken (is (equal 1 (parse "abc"))))
"#;
    let Some(project) = fiveam("state", tests) else { return };
    let mut server = project.server();
    common::fail(&mut server, "(error \"before\")");
    let name = |name: &str| json!({"name": name});
    good(&mut server, "evaluate-lisp", json!({"code": "(asdf:load-system \"demo/tests\")"}));
    common::fail(&mut server, "(error \"before\")");
    // Without an error of its own, a failure leaves the state alone.
    let text = good(&mut server, "run-tests", name("demo-tests::wrong"));
    assert!(text.starts_with("FAILED  0 passed, 1 failed, 0 errors, 0 skipped in "), "{text}");
    assert!(last_error(&mut server).contains("before"));
    good(&mut server, "run-tests", name("broken"));
    assert!(last_error(&mut server).contains("INVALID-ARRAY-INDEX-ERROR"));
    let text = good(&mut server, "run-tests", name("good"));
    assert_eq!(timeless(&text), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped");
    assert!(last_error(&mut server).starts_with("No error information available."));
    // The suite of that name, and the package.
    for arguments in [name("demo-tests::demo"), json!({"package": "demo-tests"}), json!({"system": "demo/tests"})] {
        let text = good(&mut server, "run-tests", arguments);
        assert!(text.starts_with("FAILED  1 passed, 1 failed, 1 error, 0 skipped in "), "{text}");
    }
}

#[test]
fn a_system_is_found_as_load_finds_it() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest one 1 1)\n";
    let project = Project::new("found", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let other =
        "(defsystem \"other-tests\" :depends-on (\"sb-rt\") :pathname \"tests\" :components ((:file \"tests\")))";
    project.write("more.asd", other);
    let root = project.0.display().to_string();
    let mut server = Server::ready();
    let missing = bad(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(missing.contains("Not found in ") && missing.contains(", above it and one level below, "), "{missing}");
    let text = bad(&mut server, "run-tests", json!({"system": "demo", "directory": "/no-such-directory"}));
    assert_eq!(text, "directory: there is no directory /no-such-directory.");
    // In it, in a file of another name, above it.
    for (system, directory) in [("demo", ""), ("DEMO/TESTS", ""), ("other-tests", ""), ("demo", "/tests")] {
        for fresh in [false, true] {
            let mut server = Server::ready();
            let arguments = json!({"system": system, "directory": format!("{root}{directory}"), "fresh": fresh});
            let text = good(&mut server, "run-tests", arguments);
            assert!(text.contains("=> all pass  1 passed, 0 failed"), "{system}: {text}");
        }
    }
}

/// Systems in one directory: suites of FiveAM, a test-op alone, one that does not load, and one without tests.
fn several(name: &str) -> Option<Project> {
    let project = fiveam(name, FIVEAM)?;
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
fn several_systems_are_tested_in_one_call() {
    let Some(project) = several("several") else { return };
    let root = project.0.display().to_string();
    let mut server = Server::start_with(&["--structured-content"]);
    server.initialize("2025-11-25");
    let run = |server: &mut Server, systems: Value, others: Value| {
        let mut arguments = json!({"system": systems, "directory": root});
        arguments.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
        good(server, "run-tests", arguments)
    };
    // One is told of as ever, however it is written.
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
        assert_eq!(timeless.contains("ran in a fresh image"), fresh, "{text}");
        assert!(timeless.contains(expected), "{text}");
        assert!(last_error(&mut server).starts_with("No error information available."));
    }
    // The others go on, and have their share of the room.
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
            "\nIt printed:\n3 of 4 things work\n",
            "\ns/bad:\nFAILED  1 passed, 30 failed, 1 error, 0 skipped\n1. BAD::SAME  bad.lisp:5\n",
            "BAD::WRONG-29",
            "\ns/more:\n=> all pass  1 passed, 0 failed, 0 errors, 0 skipped\n",
            "\n7 systems: FAILED  4 passed, 30 failed, 5 errors, 0 skipped",
        ] {
            assert!(timeless.contains(expected), "{fresh}: {expected:?} is not in\n{text}");
        }
        assert_eq!(text.matches("3 of 4 things work").count(), 1, "{text}");
        assert_eq!(text.matches("also says which code").count(), 1, "{text}");
        assert!(last_error(&mut server).starts_with("Error: "));
    }
    // What there is no room for is told of each.
    good(&mut server, "configure-limits", json!({"max-answer": 6000}));
    let text = run(&mut server, json!("s/worse s/bad s/good"), json!({}));
    assert!(text.chars().count() <= 6_000 && !text.contains("characters omitted"), "{text}");
    for expected in [" more failed, for which there is no room here", "\n\ns/bad:\nFAILED", "\n\ns/good:\n=> all pass"]
    {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    good(&mut server, "configure-limits", json!({"max-answer": 9500}));
    // What is said of some says of which.
    for fresh in [false, true] {
        let text =
            run(&mut server, json!("s/worse s/good s/bad s/plain s/same"), json!({"suspects": 1, "fresh": fresh}));
        let said = "\ns/worse, s/same: There are no suspects: the tests that failed ran nothing of the systems";
        assert!(text.contains(said) && text.matches("There are no suspects").count() == 2, "{text}");
        assert!(text.contains("\ns/plain: There are no suspects: of a test operation"), "{text}");
        assert_eq!(text.contains("[notice]\nThe tests ran in a fresh image that"), fresh, "{text}");
    }
    // Of what cannot be loaded there are no suspects.
    let text = run(&mut server, json!("s/good no-such-system"), json!({"suspects": 2}));
    assert!(!text.contains("uspects"), "{text}");
    let text = run(&mut server, json!("s/good no-such-system"), json!({}));
    assert!(!text.contains("uspects"), "{text}");
    // One record a test, with its system; suspects for each.
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
    let text = bad(&mut server, "run-tests", json!({"system": "s/good", "package": "good"}));
    assert_eq!(text, "run-tests needs one of system, package and name.");
}

#[test]
fn a_test_that_checks_nothing_is_told_of_as_that() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n(def-suite demo)\n\
                 (in-suite demo)\n(test checks (is (= 1 1)))\n(test nothing (list 1))\n";
    let Some(project) = fiveam("nothing", tests) else { return };
    let mut server = Server::start_with(&["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    let expected = "=> all pass  2 passed, 0 failed, 0 errors, 0 skipped\nMade no check: DEMO-TESTS::NOTHING";
    assert_eq!(timeless(&text), expected);
    let content = structured(&mut server, json!({"system": "demo"}));
    let test = |name: &str| content["tests"].as_array().unwrap().iter().find(|test| test["name"] == name).unwrap();
    assert_eq!(test("DEMO-TESTS::NOTHING")["message"], "It made no check.");
    assert_eq!(test("DEMO-TESTS::CHECKS")["message"], json!(null));
}

#[test]
fn what_a_framework_does_not_handle_ends_no_other_test() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n(def-suite demo)\n\
                 (in-suite demo)\n(test first-one (is (= 1 1)))\n\
                 (define-condition silent (error) () (:report (lambda (c s) c s (error \"no report\"))))\n\
                 (test broken (error 'silent))\n(test after (is (= 2 2)))\n(test erring (error \"so\"))\n";
    let Some(project) = fiveam("silent", tests) else { return };
    let mut server = project.server();
    for settings in ["", "(setf *print-readably* t)"] {
        server.evaluate(settings);
        let text = good(&mut server, "run-tests", json!({"system": "demo"}));
        assert!(text.starts_with("FAILED  2 passed, 0 failed, 2 errors, 0 skipped in "), "{settings}: {text}");
        assert!(!text.contains("non-local exit"), "{settings}: {text}");
    }
}

#[test]
fn a_framework_that_is_asked_for_no_test_passes_none() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam))\n(in-package :demo-tests)\n(def-suite demo)\n";
    let Some(project) = fiveam("none-asked", tests) else { return };
    let text = bad(&mut project.server(), "run-tests", json!({"system": "demo"}));
    assert!(text.contains("Nothing ran: there are no tests of the system demo"), "{text}");
}

#[test]
fn a_test_that_another_has_removed_does_not_pass() {
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
        let project = Project::new(&format!("removed-{framework}"), &format!("{framework:?}"), perform, &tests);
        let mut server = Server::ready();
        server.evaluate(&format!(
            "(progn (asdf:initialize-source-registry '(:source-registry (:tree {root:?}) :inherit-configuration)) t)"
        ));
        project.register(&mut server);
        good(&mut server, "load", json!({"system": "demo/tests", "timeout": 600}));
        let text = good(&mut server, "run-tests", json!({"system": "demo"}));
        assert!(text.starts_with("FAILED  1 passed, 0 failed, 1 error, 0 skipped in "), "{framework}: {text}");
        assert!(text.contains("   It could not run: a test before it has removed it.\n"), "{framework}: {text}");
    }
}

#[test]
fn what_is_not_there_is_an_error_with_near_names() {
    let mut server = Server::ready();
    let text = bad(&mut server, "run-tests", json!({}));
    assert_eq!(text, "run-tests needs one of system, package and name.");
    assert_eq!(text, bad(&mut server, "run-tests", json!({"system": "a", "name": "b"})));
    let text = bad(&mut server, "run-tests", json!({"system": "no-such-system-here"}));
    assert!(text.starts_with("[ERROR] ASDF/FIND-COMPONENT:MISSING-COMPONENT\n"), "{text}");
    server.evaluate("(defpackage :demo-rt (:use :cl :sb-rt)) (in-package :demo-rt) (deftest splitting 1 1)");
    let text = bad(&mut server, "run-tests", json!({"name": "spliting"}));
    assert!(
        text.contains("There is no test or suite named spliting") && text.contains("Did you mean SPLITTING?"),
        "{text}"
    );
    let text = bad(&mut server, "run-tests", json!({"package": "cl-user"}));
    assert!(text.contains("Nothing ran: there are no tests of the package cl-user."), "{text}");
    // Evaluated tests can be run, too.
    let text = good(&mut server, "run-tests", json!({"name": "splitting"}));
    assert_eq!(timeless(&text), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped");
    assert_eq!(server.evaluate("(eq nil (find-symbol \"SPLITING\" :demo-rt))"), "=> T");
}

/// Where the real libraries are that no package registry has; `None` where nobody said so (CONTRIBUTING.md).
fn libraries() -> Option<String> {
    let root = std::env::var("SBCL_MCP_LISP_LIBRARIES").ok();
    if root.is_none() {
        eprintln!("SBCL_MCP_LISP_LIBRARIES is not set: Parachute, Rove and lisp-unit2 are left out");
    }
    root
}

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

/// What a failing test says in a framework: how its checks are shown, and what stands there of errors in checks.
struct Dialect {
    framework: &'static str,
    perform: &'static str,
    tests: &'static str,
    skipped: usize,
    /// What `run-tests` answers up to the frames of the second failure, and a line of the one that calls EXIT.
    expected: &'static str,
    leaves: &'static str,
}

const DIALECTS: [Dialect; 3] = [
    Dialect {
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
    Dialect {
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
    Dialect {
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

/// What FiveAM's tests above show of it, with the real libraries of other frameworks.
#[test]
fn other_frameworks_say_as_much() {
    let Some(root) = libraries() else { return };
    for dialect in DIALECTS {
        let name = dialect.framework;
        let project = Project::new(name, &format!("{name:?}"), dialect.perform, dialect.tests);
        let mut server = Server::start_with(&["--structured-content"]);
        server.initialize("2025-11-25");
        server.evaluate(&format!(
            "(progn (asdf:initialize-source-registry '(:source-registry (:tree {root:?}) :inherit-configuration)) t)"
        ));
        project.register(&mut server);
        // What loading a library warns of is told of once.
        good(&mut server, "load", json!({"system": "demo/tests", "timeout": 600}));
        let counts = format!("FAILED  2 passed, 2 failed, 4 errors, {} skipped", dialect.skipped);
        let text = good(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.5}));
        let text = timeless(&text);
        let error = "   SB-INT:INVALID-ARRAY-INDEX-ERROR Invalid index 9 for (SIMPLE-VECTOR 3), should be a non-negative \
                     integer below 3. (E1: get-backtrace has all)\n";
        assert!(text.starts_with(&format!("{counts}\n{}{error}", dialect.expected)), "{name}: {text}");
        for expected in [
            "src/demo.lisp:5: (let ((found (aref v n)))\n",
            "src/demo.lisp:11: (list (item (coerce text 'simple-vector) 9))))\n",
            "   1: (DEMO:ITEM #(#\\a #\\b #\\c) 9)  ",
            "   2: (DEMO:PARSE \"abc\")  ",
            "3. DEMO-TESTS::HANGS  tests/tests.lisp:",
            "   TIMEOUT It did not end within 0.5 seconds and was interrupted. (E2: ",
            dialect.leaves,
            "   SBCL-HOST::EXIT-REFUSED EXIT was called",
            "5. DEMO-TESTS::THROWN  tests/tests.lisp:",
            "   SB-INT:SIMPLE-CONTROL-ERROR attempt to THROW to a tag that does not exist: ",
            "6. DEMO-TESTS::KILLS  tests/tests.lisp:",
        ] {
            assert!(text.contains(expected), "{name}: no {expected} in:\n{text}");
        }
        let frames = good(&mut server, "get-backtrace", json!({"error-id": "E1"}));
        assert!(frames.contains("(DEMO:ITEM #(#\\a #\\b #\\c) 9)\n"), "{name}: {frames}");
        assert!(last_error(&mut server).contains("Id: E1"), "{name}");

        let content = structured(&mut server, json!({"system": "demo", "timeout": 0.5, "fresh": true, "suspects": 1}));
        let tests = content["tests"].as_array().expect("tests");
        let with = |status: &str| tests.iter().filter(|test| test["status"] == status).count();
        let counts = [("passed", "passed", 2), ("failed", "failed", 2), ("errors", "error", 4)];
        for (count, status, number) in counts.into_iter().chain([("skipped", "skipped", dialect.skipped)]) {
            assert_eq!((&content[count], with(status)), (&json!(number), number), "{name}: {content:#}");
        }
        let suspect = &tests[0]["suspects"][0];
        assert_eq!((&suspect["name"], &suspect["file"]), (&json!("PARSE"), &json!("src/demo.lisp")), "{name}");

        let text = good(&mut server, "run-tests", json!({"name": "demo-tests::adds"}));
        assert_eq!(timeless(&text), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped", "{name}");
        let text = good(&mut server, "run-tests", json!({"package": "demo-tests", "timeout": 0.5}));
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
(deftest rt.recurses (labels ((f (x) (list (f (list x))))) (f 1)) 1)
"#;

#[test]
fn sb_rt_and_rt_are_run_and_a_hundred_megabytes_of_output_are_nothing() {
    rt("sb-rt", RT);
    if installed("rt") {
        rt("rt", &RT.replace("sb-rt", "regression-test").replace("50000", "50"));
    }
}

/// Runs these tests of the framework with this system.
fn rt(system: &str, tests: &str) {
    let package = if system == "rt" { "regression-test" } else { system };
    let run = format!("(unless (symbol-call :{package} :do-tests) (error \"failed\"))");
    let project = Project::new(system, &format!("{system:?}"), &run, tests);
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
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
    server.goes_on();
}

/// What is repaired in the image is what is tested, until `reload` says otherwise.
#[test]
fn tests_that_no_operation_names_are_found_by_the_systems_name_and_nothing_is_loaded_again() {
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
        let project = Project::new(&format!("named-{name}"), "", "", "");
        project.write("demo.lisp", source);
        if name != "without" {
            project.write("tests.lisp", tests);
        }
        for (file, text) in files {
            project.write(file, text);
        }
        let mut server = project.server();
        for arguments in [json!({"system": "demo"}), json!({"system": "demo", "directory": project.0})] {
            server.evaluate("(asdf:load-system \"demo\")");
            if name == "without" {
                bad(&mut server, "run-tests", arguments.clone());
                server.evaluate("(defun demo::answer () 42)");
                bad(&mut server, "run-tests", arguments);
                assert_eq!(server.evaluate("(demo::answer)"), "=> 42");
                continue;
            }
            let text = good(&mut server, "run-tests", arguments.clone());
            assert!(text.starts_with("FAILED  0 passed, 1 failed, 0 errors"), "{name}: {text}");
            server.evaluate("(defun demo::answer () 42)");
            let text = good(&mut server, "run-tests", arguments);
            assert!(text.starts_with("=> all pass  1 passed, 0 failed, 0 errors"), "{name}: {text}");
            server.evaluate("(defun demo::answer () 41)");
        }
        if name != "without" {
            project.write("tests.lisp", &tests.replace("42", "41"));
            project.touch("tests.lisp");
            let text = good(&mut server, "run-tests", json!({"system": "demo", "reload": true}));
            assert!(text.starts_with("=> all pass  1 passed, 0 failed, 0 errors"), "{name}: {text}");
            assert_eq!(server.evaluate("(demo::answer)"), "=> 41");
        }
        if name == "inferred" {
            // What a file needs stands in it.
            project.write(
                "extra.lisp",
                "(defpackage :demo/extra (:use :cl) (:export #:extra)) (in-package :demo/extra)
                                         (defun extra () 41)",
            );
            let needing = tests.replace("#:answer)", "#:answer) (:import-from :demo/extra #:extra)");
            project.write("tests.lisp", &needing.replace("42", "#.(extra)"));
            project.touch("tests.lisp");
            server.evaluate("(defun demo::answer () 41)");
            let text = good(&mut server, "run-tests", json!({"system": "demo", "reload": true}));
            assert!(text.starts_with("=> all pass  1 passed, 0 failed, 0 errors"), "{name}: {text}");
        }
    }
}

#[test]
fn what_no_framework_is_known_of_is_its_test_op() {
    for (name, perform, expected) in [
        ("signals", "(error \"2 tests failed\")", "1. test-op of demo/tests\n   SIMPLE-ERROR 2 tests failed (E1: "),
        ("exits", "(uiop:quit 1)", "1. test-op of demo/tests\n   SBCL-HOST::EXIT-REFUSED EXIT was called"),
    ] {
        let project = Project::new(name, "", perform, "");
        let mut server = project.server();
        let text = good(&mut server, "run-tests", json!({"system": "demo"}));
        assert!(text.starts_with("FAILED  0 passed, 0 failed, 1 error, 0 skipped in "), "{text}");
        assert!(text.contains(expected), "{text}");
    }
    // Many return false in place of an error; those that return what FORMAT does are not told by that alone.
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
        let project = Project::new(name, "", perform, "");
        let mut server = project.server();
        let text = good(&mut server, "run-tests", json!({"system": "demo"}));
        assert_eq!(timeless(text.lines().next().expect("a line")), expected, "{text}");
        if name == "false" {
            let said = "1. test-op of demo/tests\n   It returned NIL and printed: Some tests failed.\n";
            assert!(text.contains(said), "{text}");
            assert!(text.ends_with("\nIt printed:\nSome tests failed."), "{text}");
            let text = good(&mut server, "run-tests", json!({"system": "demo", "suspects": 3}));
            assert!(text.starts_with("[notice]\nThere are no suspects: "), "{text}");
            assert!(text.contains(said), "{text}");
        }
    }
    // Of much that it printed, the beginning and the end.
    let print = "(progn (loop for i below 5000 do (format t \"line ~D~%\" i)) (format t \"the end~%\") t)";
    let project = Project::new("prints-much", "", print, "");
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("\nIt printed:\nline 0\nline 1\n"), "{text}");
    assert!(text.contains("line 4999\nthe end\nThe tests printed 48898 characters: evaluation {"), "{text}");
    assert!(text.len() < 2600, "{text}");
    // What of it is not kept is told of where it would stand.
    good(&mut server, "configure-limits", json!({"max-output": 20}));
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    let expected = "\nIt printed:\nline 0\nline 1\nline 2[... 48878 characters omitted]\n\
                    The tests printed 48898 characters, of which the first 20 are kept: evaluation {\"id\": 3, \
                    \"action\": \"output\"} shows these.";
    assert!(text.ends_with(expected), "{text}");
    good(&mut server, "configure-limits", json!({"max-output": 10000}));
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("[... 38898 characters omitted]\nThe tests printed 48898 characters, of which"), "{text}");
    let project = Project::new("prints", "", "(format t \"all is well~%\")", "");
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(timeless(lines[0]), "=> all pass  1 passed, 0 failed, 0 errors, 0 skipped");
    assert_eq!(&lines[1..3], &["It printed:", "all is well"], "{text}");
    assert_eq!(lines.len(), 3, "{text}");
    // Without anything to do, nothing passes.
    let project = Project::new("nothing", "", "", "");
    project.write("demo.asd", "(defsystem \"demo\" :components ((:module \"src\" :components ((:file \"demo\")))))");
    let mut server = project.server();
    let text = bad(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(
        text.contains("Nothing ran: there are no tests of the system demo, and its test-op does nothing."),
        "{text}"
    );
}

#[test]
fn reload_takes_what_changed_on_disk() {
    let Some(project) = fiveam("reload", FIVEAM) else { return };
    let mut server = project.server();
    good(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.3}));
    let name = json!({"name": "parse-empty"});
    assert!(good(&mut server, "run-tests", name.clone()).starts_with("FAILED  0 passed"));
    let repaired = "(defpackage :demo (:use :cl) (:export #:parse #:item))\n(in-package :demo)\n\
                    (defun parse (text) (declare (ignore text)) 0)\n(defun item (v n) (aref v n))\n";
    project.write("src/demo.lisp", repaired);
    project.write(
        "tests/tests.lisp",
        "(defpackage :demo-tests (:use :cl :fiveam :demo))\n(in-package :demo-tests)\n(def-suite demo)\n(in-suite demo)\n\
         (test parse-empty (is (eql 0 (parse \"\"))))\n",
    );
    project.touch("src/demo.lisp");
    project.touch("tests/tests.lisp");
    // What is on disk is not looked at unasked.
    assert!(good(&mut server, "run-tests", name).starts_with("FAILED  0 passed"));
    let text = good(&mut server, "run-tests", json!({"system": "demo", "reload": true}));
    assert!(text.starts_with("=> all pass  1 passed, 0 failed, 0 errors, 0 skipped in "), "{text}");
}

#[test]
fn a_reload_names_what_is_left_of_old_versions() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest one 1 1)\n";
    for (fresh, more) in
        [(false, ""), (true, "The tests ran in a fresh image that loaded the files and nothing else.\n")]
    {
        let project = Project::new(&format!("left-{fresh}"), "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
        let source = |variable: &str, function: &str| {
            let text =
                format!("(defpackage :demo (:use :cl))\n(in-package :demo)\n{variable}\n(defun {function} () 1)\n");
            project.write("src/demo.lisp", &text);
        };
        source("(defvar *limit* 1)", "old");
        let mut server = project.server();
        good(&mut server, "run-tests", json!({"system": "demo"}));
        source("(defvar *limit* 2)", "new");
        project.touch("src/demo.lisp");
        let text = good(&mut server, "run-tests", json!({"system": "demo", "reload": true, "fresh": fresh}));
        let text = text.replace(&format!("target/tmp/{}/", project.0.file_name().unwrap().display()), "");
        let expected = format!(
            "[notice]\n{more}DEMO::*LIMIT* keeps the value that it had: its DEFVAR in src/demo.lisp has changed, and gives none to \
             a variable that has one. (setf DEMO::*LIMIT* 2) does.\nsrc/demo.lisp no longer defines what is still there \
             from before: function DEMO::OLD.\n\n=> all pass  1 passed, "
        );
        assert!(text.starts_with(&expected), "{text}");
    }
}

#[test]
fn tests_run_whatever_the_session_is_like() {
    let Some(project) = fiveam("session", FIVEAM) else { return };
    let mut server = project.server();
    let verdict = |server: &mut Server| {
        let text = good(server, "run-tests", json!({"system": "demo", "timeout": 1}));
        let line = text.lines().find(|line| line.starts_with("FAILED")).expect("a verdict").to_owned();
        (timeless(&line), text.lines().filter(|line| line.contains("expected (1), got NIL")).count())
    };
    let known = verdict(&mut server);
    assert_eq!(known, ("FAILED  2 passed, 2 failed, 4 errors, 1 skipped".to_owned(), 1));
    // Queries are answered meanwhile.
    let id = server.post_call("run-tests", json!({"system": "demo", "timeout": 1}));
    let description = good(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(description.starts_with("COMMON-LISP:CAR [FUNCTION]"), "{description}");
    server.outcome(id);
    // After a reset.
    good(&mut server, "reset-session", json!({}));
    project.register(&mut server);
    assert_eq!(verdict(&mut server), known);
    // With nonsense for the printer and the reader.
    server.evaluate(
        "(setf *print-base* 2 *print-radix* t *print-length* 1 *print-level* 1 *print-case* :capitalize \
               *print-pretty* t *print-right-margin* 10 *read-base* 16 *print-circle* t *print-escape* nil)",
    );
    let text = good(&mut server, "run-tests", json!({"system": "demo", "timeout": 1}));
    assert!(text.lines().any(|line| timeless(line) == known.0), "{text}");
    // After the image is lost.
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": "(sb-posix:kill (sb-posix:getpid) 9)"}));
    assert!(is_error && text.contains("IMAGE-LOST"), "{text}");
    good(&mut server, "reset-session", json!({}));
    project.register(&mut server);
    assert_eq!(verdict(&mut server), known);
}

#[test]
fn a_test_that_ends_the_process_is_told_of_as_that() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest dies (sb-posix:kill (sb-posix:getpid) 9) 1)\n";
    let project = Project::new("dies", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    let text = bad(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("IMAGE-LOST"), "{text}");
    assert!(text.contains(") in the test DEMO-TESTS::DIES. A new image"), "{text}");
    server.goes_on();
    // What comes after it is none.
    let text = bad(&mut server, "evaluate-lisp", json!({"code": "(sb-posix:kill (sb-posix:getpid) 9)"}));
    assert!(text.contains("IMAGE-LOST") && !text.contains("DIES"), "{text}");
}

#[test]
fn what_takes_longer_than_it_may_is_named() {
    let mut server = Server::ready();
    good(&mut server, "configure-limits", json!({"timeout": 0}));
    let code = "(unwind-protect (progn (sbcl-host::announce-step \"the loading of demo\" 100) (loop))
                  (sbcl-host::announce-test nil))";
    let text = bad(&mut server, "evaluate-lisp", json!({"code": code}));
    assert!(text.starts_with("[ERROR] TIMEOUT\nThe time limit of the loading of demo has passed.\n"), "{text}");
    // Nor is anything limited when that is over.
    let code = "(progn (sbcl-host::announce-step \"the loading of demo\" 100) (sbcl-host::announce-test nil)
                  (sleep 0.3) 1)";
    assert_eq!(server.evaluate(code), "=> 1");
}

/// Tests of which one lets nothing interrupt it, but where `*here*` is bound.
fn stuck(name: &str) -> Project {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest before 1 1)\n\
                 (deftest stuck (unless (boundp 'cl-user::*here*) (sb-sys:without-interrupts (loop))) nil)\n";
    Project::new(name, "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests)
}

#[test]
fn a_test_that_lets_nothing_interrupt_it_costs_the_image() {
    let project = stuck("stuck");
    let mut server = project.server();
    let text = bad(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.2}));
    let expected = "[ERROR] TIMEOUT\nThe time limit of the test DEMO-TESTS::STUCK has passed.\n\
                    The Lisp image did not react to being interrupted and was ended. A new image has taken its place.\n";
    assert!(text.starts_with(expected), "{text}");
    server.goes_on();
}

#[test]
fn a_fresh_image_that_lets_nothing_interrupt_it_is_ended() {
    let project = stuck("fresh-stuck");
    let mut server = project.server();
    server.evaluate("(defvar *here* t)");
    let text = bad(&mut server, "run-tests", json!({"system": "demo", "timeout": 0.2, "fresh": true}));
    let expected = "\n[ERROR] TIMEOUT\nThe time limit of the test DEMO-TESTS::STUCK has passed. \
                    The Lisp image did not react to being interrupted.\n";
    assert!(text.contains(expected), "{text}");
    assert_eq!(server.evaluate("*here*"), "=> T");
}

#[test]
fn a_test_that_fills_the_heap_is_ended_and_the_others_go_on() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest before 1 1)\n\
                 (deftest fills (length (loop collect (make-array 10000))) 0)\n(deftest after 1 1)\n\
                 (deftest fills-again (length (loop collect (make-list 10000))) 0)\n(deftest end 1 1)\n";
    let project = Project::new("fills", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = Server::start_with(&["--heap", "512M"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.starts_with("FAILED  3 passed, 0 failed, 2 errors, 0 skipped"), "{text}");
    assert_eq!(text.matches("HEAP-EXHAUSTED The heap was nearly used up (").count(), 2, "{text}");
    server.goes_on();
}

#[test]
fn cancelling_ends_the_run() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest hangs (loop (ignore-errors (loop))) 1)\n(deftest after 1 1)\n";
    let project = Project::new("cancelled", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    server.evaluate("(asdf:load-system \"demo/tests\")");
    let id = server.post_call("run-tests", json!({"system": "demo"}));
    let running = |server: &mut Server| good(server, "evaluation", json!({})).contains("running");
    let deadline = std::time::Instant::now() + common::DEADLINE;
    while !running(&mut server) {
        assert!(std::time::Instant::now() < deadline, "it does not begin");
    }
    good(&mut server, "evaluation", json!({"action": "cancel"}));
    let (text, is_error) = server.outcome(id);
    assert!(is_error && text.contains("[ERROR] CANCELLED"), "{text}");
    // Nothing of the framework stays changed.
    let text = good(&mut server, "run-tests", json!({"name": "after"}));
    assert!(text.starts_with("=> all pass  1 passed"), "{text}");
    assert_eq!(server.evaluate("(sb-int:encapsulated-p 'sb-rt:do-tests 'sbcl-host::run-tests)"), "=> NIL");
}

#[test]
fn a_fresh_image_has_the_files_and_nothing_else() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest stale (parse \"\") (1))\n(deftest spoilt (parse \"\") nil)\n(deftest fine 1 1)\n";
    let project = Project::new("fresh", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = Server::start_with(&["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    // What is not loaded here stays so.
    let text = good(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    let expected = "[notice]\nThe tests ran in a fresh image that loaded the files and nothing else.\n\n\
                    FAILED  2 passed, 1 failed, 0 errors, 0 skipped in ";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(server.evaluate("(find-package \"DEMO-TESTS\")"), "=> NIL");
    server.evaluate("(asdf:load-system \"demo/tests\")");
    server.evaluate("(defun demo:parse (text) (declare (ignore text)) '(1))");
    let text = good(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    assert!(text.starts_with(expected), "{text}");
    let stale = "Stale state: only in this session, not in a fresh image, these pass: DEMO-TESTS::STALE\n\
                 Stale state: in this session, not in a fresh image, these fail: DEMO-TESTS::SPOILT\n";
    assert!(text.contains(stale), "{text}");
    let content = structured(&mut server, json!({"name": "stale", "fresh": true}));
    assert_eq!(content["differs"], json!([{"name": "DEMO-TESTS::STALE", "passes": "session"}]), "{content:#}");
    // The session is as it was.
    assert_eq!(server.evaluate("(demo:parse \"\")"), "=> (1)");
    // Evaluated tests are in no file.
    server.evaluate("(sb-rt:deftest evaluated 1 1)");
    let text = bad(&mut server, "run-tests", json!({"name": "evaluated", "fresh": true}));
    assert!(text.starts_with("[ERROR] SIMPLE-ERROR\nThe tests are in no file of a system that is loaded"), "{text}");
}

#[test]
fn fresh_images_and_suspects_go_on_in_the_background() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest good (parse \"\") nil)\n(deftest bad (parse \"x\") (1))\n";
    let project = Project::new("fresh-background", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let temporary = project.0.join("temporary");
    std::fs::create_dir(&temporary).expect("a directory");
    let mut server = Server::start_with_environment(&[], &[("TMPDIR", &temporary)]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let arguments = json!({"system": "demo", "fresh": true, "suspects": 1, "background": true});
    let text = good(&mut server, "run-tests", arguments.clone());
    assert_eq!(text, "Evaluation 2 goes on in the background.");
    // The next ones need not wait.
    server.goes_on();
    let text = good(&mut server, "evaluation", json!({"id": 2, "action": "wait", "seconds": 60}));
    let expected = "[notice]\nThe tests ran in a fresh image that loaded the files and nothing else.\n\n\
                    FAILED  1 passed, 1 failed, 0 errors, 0 skipped in ";
    assert!(
        text.starts_with(expected) || text.starts_with(&expected.replace("1 failed, 0 errors", "0 failed, 1 error")),
        "{text}"
    );
    assert!(text.contains("Suspects: ") && text.contains("src/demo.lisp:"), "{text}");
    assert!(last_error(&mut server).starts_with("Error: "), "the one of the first test that failed");
    // Again, and it is left while the other image runs.
    let text = good(&mut server, "run-tests", json!({"system": "demo", "fresh": true, "wait": 0.01}));
    assert!(text.ends_with("Evaluation 4 goes on in the background."), "{text}");
    // It is ended there, too.
    good(&mut server, "run-tests", arguments);
    good(&mut server, "evaluation", json!({"id": 5, "action": "cancel"}));
    let text = bad(&mut server, "evaluation", json!({"id": 5, "action": "wait"}));
    assert!(text.contains("[ERROR] CANCELLED"), "{text}");
    good(&mut server, "evaluation", json!({"id": 4, "action": "wait", "seconds": 60}));
    // A reset ends it with a word.
    good(&mut server, "run-tests", json!({"system": "demo", "fresh": true, "background": true}));
    let text = good(&mut server, "reset-session", json!({}));
    assert!(text.contains("Evaluation 6, in the background, has been ended."), "{text}");
    server.goes_on();
    // Nothing stays of the other images.
    server.finish();
    until("what they wrote is gone", || std::fs::read_dir(&temporary).is_ok_and(|mut files| files.next().is_none()));
}

#[test]
fn a_fresh_image_may_take_its_time() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest slow (progn (unless (find-package :session) (sleep 2)) 1) 1)\n";
    let project = Project::new("fresh-slow", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    // Those are a hundred looks of the watchdog's.
    let mut server = Server::start_with(&["--watch-interval", "20"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    server.evaluate("(progn (make-package :session) (defvar *kept* 1))");
    let text = good(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    assert!(text.contains("=> all pass  1 passed, 0 failed"), "{text}");
    assert_eq!(server.evaluate("*kept*"), "=> 1");
}

#[test]
fn what_a_fresh_image_dies_of_leaves_the_session_alone() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n\
                 (deftest dies (sb-posix:kill (sb-posix:getpid) 9) 1)\n";
    let project = Project::new("fresh-dies", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    server.evaluate("(defvar *kept* 1)");
    let text = bad(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    assert!(text.starts_with("[ERROR] SIMPLE-ERROR\nThe image for the tests died: signal: 9"), "{text}");
    assert_eq!(server.evaluate("*kept*"), "=> 1");
    // Loading may fail there.
    project.write("src/demo.lisp", "(defpackage :demo (:use :cl))\n(in-package :demo)\n(error \"not today\")\n");
    project.touch("src/demo.lisp");
    let text = bad(&mut server, "run-tests", json!({"system": "demo", "fresh": true}));
    assert!(text.contains("[ERROR] SIMPLE-ERROR\nnot today"), "{text}");
    assert!(last_error(&mut server).contains("not today"));
}

/// Programs inherit no end of the pipe that the outcome comes by; what is forked does.
#[test]
fn what_a_test_leaves_running_holds_up_no_fresh_image() {
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
    let project = Project::new("fresh-leaves", "\"sb-rt\" \"sb-posix\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    server.evaluate("(asdf:load-system \"demo/tests\")");
    let pid = |name: &str| std::fs::read_to_string(project.0.join(name)).ok().and_then(|pid| pid.parse::<u32>().ok());
    let gone = |name: &str| {
        let pid = pid(name).expect("a process");
        until(&format!("{name} is gone"), || !processes::is_alive(pid));
        std::fs::remove_file(project.0.join(name)).unwrap();
    };
    let begin = |server: &mut Server, name: &str| {
        // Here, as in the other image, there is nothing to compare with.
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
    assert!(text.starts_with("[ERROR] SIMPLE-ERROR\nThe image for the tests died: signal: 9"), "{text}");
    gone("forked");
    let id = begin(&mut server, "hangs");
    until("it hangs", || pid("hanging").is_some());
    good(&mut server, "evaluation", json!({"action": "cancel"}));
    assert!(server.outcome(id).0.contains("[ERROR] CANCELLED"));
    gone("hanging");
}

#[test]
fn tests_that_end_alike_are_one_entry() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest first-one (parse \"abc\") nil)\n(deftest second-one (parse \"xyz\") nil)\n\
                 (deftest other (item (vector 1) 9) nil)\n(deftest third-one (parse \"uvw\") nil)\n\
                 (deftest longer (parse \"abcd\") nil)\n";
    let project = Project::new("alike", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.starts_with("FAILED  0 passed, 0 failed, 5 errors, 0 skipped in "), "{text}");
    assert!(
        text.contains("1. DEMO-TESTS::FIRST-ONE  tests/tests.lisp:3\n   SB-INT:INVALID-ARRAY-INDEX-ERROR"),
        "{text}"
    );
    // What says another thing is shown.
    let longer = "DEMO-TESTS::LONGER: Invalid index 9 for (SIMPLE-VECTOR 4), should be a non-negative integer below 4.";
    let alike =
        format!("\n   Alike: DEMO-TESTS::SECOND-ONE, DEMO-TESTS::THIRD-ONE\n          {longer}\n2. DEMO-TESTS::OTHER");
    assert!(text.contains(&alike), "{text}");
    assert_eq!(text.matches("Invalid index 9").count(), 3, "{text}");
}

/// Two faults may end in the same function that signals.
#[test]
fn tests_that_end_alike_have_each_its_suspects() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest one (run #'alpha 1) 2)\n(deftest two (run #'beta 1) 2)\n(deftest three (run #'gamma 1) 2)\n\
                 (deftest again (run #'alpha 2) 2)\n";
    let project = Project::new("alike-apart", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    project.write(
        "src/demo.lisp",
        "(defpackage :demo (:use :cl) (:export #:run #:alpha #:beta #:gamma))\n(in-package :demo)\n\n\
         (defun alpha (n)\n  (- n 1))\n\n(defun beta (n)\n  (* n 1))\n\n(defun gamma (n)\n  (+ n 1))\n\n\
         (defun run (function n)\n  (let ((found (funcall function n)))\n    (if (= found 2)\n        found\n        \
         (error \"It is ~D.\" found))))\n",
    );
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains("\n   Alike: DEMO-TESTS::TWO: It is 1.\n          DEMO-TESTS::AGAIN: It is 1.\n"), "{text}");
    let text = good(&mut server, "run-tests", json!({"system": "demo", "suspects": 2}));
    assert!(text.starts_with("FAILED  1 passed, 0 failed, 3 errors, 0 skipped in "), "{text}");
    let (first, second) = text.split_once("\n2. DEMO-TESTS::TWO  tests/tests.lisp:4\n").expect("an entry of its own");
    assert!(first.contains("\n   Alike: DEMO-TESTS::AGAIN"), "{text}");
    assert!(first.contains("ALPHA  src/demo.lisp:4") && !first.contains("BETA"), "{text}");
    assert!(second.starts_with("   SIMPLE-ERROR It is 1. (E") && second.contains(", in the frames of 1)\n"), "{text}");
    assert!(second.contains("BETA  src/demo.lisp:7") && !second.contains("ALPHA"), "{text}");
}

/// Each of many faults is worth more than the last line about the first.
#[test]
fn each_of_many_failures_is_told() {
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
    let project = Project::new("many-failures", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", &tests);
    project.write("src/demo.lisp", &code);
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo", "suspects": 3}));
    assert!(text.starts_with("FAILED  0 passed, 40 failed, 0 errors"), "{text}");
    assert!(text.chars().count() <= 8_000 && !text.contains("no room here"), "{text}");
    for fault in 0..FAULTS {
        let (_, entry) = text.split_once(&format!("\n{}. DEMO-TESTS::TEST-{fault}  ", fault + 1)).expect(&text);
        let (entry, _) = entry.split_once("\n   Alike: ").expect(entry);
        assert!(entry.contains("expected 101, got 100"), "{entry}");
        let (_, rest) = text.split_once(&format!("\n   Alike: DEMO-TESTS::SAME-{fault}\n   Suspects: ")).expect(&text);
        assert!(rest.starts_with(&format!("FAULT-{fault}  src/demo.lisp:")), "{rest}");
    }
    // Alone it is told whole.
    let text = good(&mut server, "run-tests", json!({"name": "demo-tests::test-7", "suspects": 3}));
    assert!(text.contains("case like this\")))\n") && text.contains("(- sum 45)))"), "{text}");
}

/// A test operation of no known framework has one verdict; but it prints as it goes along.
#[test]
fn the_reports_of_a_test_operation_have_suspects() {
    let tests = "(defpackage :demo-tests (:use :cl :demo))\n(in-package :demo-tests)\n\n\
                 (defun check (number expected &aux (found (classify number)))\n  (cond ((equal found expected)\n         \
                 (write-char #\\.)\n         (finish-output))\n        \
                 (t (format t \"~&~3D:~%   expected ~S but got ~S~%\" number expected found)))\n  \
                 (equal found expected))\n\n\
                 (defun run ()\n  (let ((passed t))\n    (loop for (number expected)\n            in \
                 '((3 :small) (4 :small) (5000 :huge) (100 (:large 100)) (6000 :huge)\n                (-1 :minus) \
                 (101 (:large 101)) (5 :small))\n          do (unless (check number expected) (setf passed nil)))\n    \
                 (format t \"~&Some tests failed.~%\")\n    passed))\n";
    let project = Project::new("reports", "", "(symbol-call :demo-tests :run)", tests);
    project.write(
        "src/demo.lisp",
        "(defpackage :demo (:use :cl) (:export #:classify))\n(in-package :demo)\n\n(defun huge-p (n)\n  (> n 1000))\n\n\
         (defun large-name (n)\n  (if (plusp n)\n      (list :larg n)\n      (list :large n)))\n\n\
         (defun classify (n)\n  (cond ((huge-p n) :huge)\n        ((> n 10)\n         (large-name n))\n        \
         ((minusp n) (sign-of n))\n        (t :small)))\n\n\
         (defun sign-of (n)\n  (if (minusp n)\n      :plus\n      :minus))\n",
    );
    let mut server = Server::start_with(&["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let said = "1. test-op of demo/tests\n   It returned NIL and printed: Some tests failed.\n";
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains(said) && text.contains("run-tests with `suspects`: 3 also says"), "{text}");
    // Lines of dots say nothing; and what was shown need not be asked for.
    assert!(text.contains("\nIt printed:\n100:\n   expected (:LARGE 100) but got (:LARG 100)\n -1:\n"), "{text}");
    assert!(text.ends_with("\nSome tests failed."), "{text}");
    let text = good(&mut server, "run-tests", json!({"system": "demo", "suspects": 2}));
    let large = "   Before it printed 100: expected (:LARGE 100) but got (:LARG 100) (and 1 more):\n   \
                 Suspects: LARGE-NAME  src/demo.lisp:7  (no passing test ran these lines)\n";
    let sign = "   Before it printed -1: expected :MINUS but got :PLUS:\n   \
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

/// What is told of an error after its test is printed then: what its frames had on the stack is gone.
#[test]
fn arguments_on_the_stack_are_not_looked_at_when_that_is_gone() {
    let mut server = Server::ready();
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
    let text = good(&mut server, "run-tests", json!({"name": "stack"}));
    assert!(text.contains("(INNER #<dynamic-extent FUNCTION> #<dynamic-extent CONS>)"), "{text}");
    let end = server.finish();
    assert!(!end.stderr.contains("CORRUPTION"), "{}", end.stderr);
}

#[test]
fn suspects_are_what_the_failing_test_ran_and_few_passing_ones_did() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest small (classify 3) :small)\n(deftest huge (classify 5000) :huge)\n\
                 (deftest large (classify 100) (:large 100))\n(deftest also (classify 101) (:large 101))\n\
                 (deftest sign (demo::sign-of -1) :minus)\n";
    let project = Project::new("suspects", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let source = "(defpackage :demo (:use :cl) (:export #:classify))\n(in-package :demo)\n\
                  (defmacro with-size ((size n) &body body)\n  `(let ((,size (abs ,n))) ,@body))\n\
                  (defun huge-p (n)\n  (> n 1000))\n\n\
                  (defun large-name (n)\n  (if (plusp n)\n      (list :larg n)\n      (list :large n)))\n\n\
                  (defun classify (n)\n  (with-size (size n)\n    (cond ((huge-p size) :huge)\n          \
                  ((> size 10)\n           (large-name size))\n          (t :small))))\n\n\
                  (declaim (inline sign-of))\n(defun sign-of (n)\n  (if (minusp n)\n      :plus\n      :minus))\n";
    project.write("src/demo.lisp", source);
    let mut server = Server::start_with(&["--structured-content"]);
    server.initialize("2025-11-25");
    project.register(&mut server);
    let asked = "\nrun-tests with `suspects`: 3 also says which code these tests ran and passing ones did not.";
    let text = good(&mut server, "run-tests", json!({"system": "demo"}));
    assert!(text.contains(asked), "{text}");
    let text = good(&mut server, "run-tests", json!({"system": "demo", "suspects": 2}));
    assert!(!text.contains(asked), "{text}");
    let suspect = "   Suspects: LARGE-NAME  src/demo.lisp:8  (no passing test ran these lines)\n";
    assert!(text.contains(suspect) && text.contains("\n               10: (list :larg n)\n"), "{text}");
    assert!(
        text.contains("CLASSIFY  src/demo.lisp:13  (no passing test ran these lines)  expands WITH-SIZE\n"),
        "{text}"
    );
    assert!(text.contains("17: (large-name size))"), "{text}");
    assert!(!text.contains("HUGE-P"), "{text}");
    // Tests that fail alike are told of once.
    assert!(
        text.contains("2. DEMO-TESTS::ALSO  tests/tests.lisp:6\n") && text.contains("Suspects: as those of 1"),
        "{text}"
    );
    // What decided is shown, too; and a function that would be expanded in its callers is seen.
    assert!(text.contains("\n               9: (if (plusp n)\n"), "{text}");
    let inline = "SIGN-OF  src/demo.lisp:21  (no passing test ran these lines)\n               22: (if (minusp n)";
    assert!(text.contains(inline), "{text}");
    // The session's own code has no marks.
    assert_eq!(server.evaluate("(sb-c::code-coverage-map (sb-kernel:fun-code-header #'demo:classify))"), "=> NIL");
    let content = structured(&mut server, json!({"package": "demo-tests", "suspects": 1}));
    let suspects = &content["tests"][0]["suspects"];
    assert_eq!((&suspects[0]["name"], &suspects[0]["passing"]), (&json!("LARGE-NAME"), &json!(0)), "{content:#}");
    assert_eq!(suspects.as_array().map(Vec::len), Some(1), "{content:#}");
}

#[test]
fn suspects_are_found_where_code_and_tests_are_one_system() {
    let code = "(defun small (n)\n  (1+ n))\n(defun large (n)\n  (if (plusp n)\n      (* 3 n)\n      0))\n";
    for (framework, tests) in [
        ("sb-rt", "(deftest one (small 1) 2)\n(deftest two (large 1) 2)\n"),
        ("fiveam", "(fiveam:test one (fiveam:is (= 2 (small 1))))\n(fiveam:test two (fiveam:is (= 2 (large 1))))\n"),
    ] {
        let using = if framework == "sb-rt" { " :sb-rt" } else { "" };
        let package = format!("(defpackage :demo (:use :cl{using}))\n");
        let begin = "(in-package :demo)\n";
        for apart in [false, true] {
            let project = Project::new(&format!("one-system-{framework}-{apart}"), "", "", "");
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
            let text = good(&mut server, "run-tests", json!({"system": "demo", "suspects": 3}));
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
fn suspects_are_of_the_code_wherever_its_tests_are() {
    for (system, helpers) in [("demo-tests", ""), ("demo-tests", "helpers-for-tests"), ("check-tests", "")] {
        let project = Project::new(&format!("two-places-{system}{helpers}"), "", "", "");
        let needed = if helpers.is_empty() { String::new() } else { format!("{helpers:?}") };
        std::fs::remove_file(project.0.join("demo.asd")).unwrap();
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
        let mut server = Server::ready();
        for place in ["code/", "aids/", "tests/"] {
            server.evaluate(&format!("(progn (push #p{:?} asdf:*central-registry*) t)", project.0.join(place)));
        }
        for asked in [json!({"system": system, "suspects": 3}), json!({"package": "demo-tests", "suspects": 3})] {
            let text = good(&mut server, "run-tests", asked);
            assert!(text.starts_with("FAILED  1 passed, 1 failed"), "{text}");
            assert!(
                text.contains("   Suspects: LARGE  parts.lisp:3  (no passing test ran"),
                "{system} {helpers}: {text}"
            );
            assert!(!text.contains("CALL"), "{system} {helpers}: {text}");
        }
    }
}

#[test]
fn it_is_said_why_there_are_no_suspects() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt))\n(in-package :demo-tests)\n(deftest one 1 2)\n\
                 (deftest stale (demo:parse \"\") nil)\n(deftest fine 1 1)\n";
    let project = Project::new("no-suspects", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    let mut server = project.server();
    let nothing = "ran nothing of the systems that are tested, but tests and what is not found in their files.\n";
    let passed = "No suspects of what passed where they were looked for, in another image that loaded the files: \
                  DEMO-TESTS::STALE.\n";
    let suspects = |server: &mut Server, name: &str| {
        let text =
            good(server, "run-tests", json!({name: if name == "system" { "demo" } else { "stale" }, "suspects": 3}));
        assert!(!text.contains("with `suspects`") && !text.contains("Suspects:"), "{text}");
        text
    };
    let text = suspects(&mut server, "system");
    assert!(text.starts_with(&format!("[notice]\nThere are no suspects: the tests that failed {nothing}\n")), "{text}");
    // Only the session's own state lets it fail.
    server.evaluate("(defun demo:parse (text) text)");
    let text = suspects(&mut server, "system");
    let others = format!("{passed}There are no suspects: the other tests that failed {nothing}\n");
    assert!(text.starts_with(&format!("[notice]\n{others}")), "{text}");
    let text = suspects(&mut server, "name");
    assert!(text.starts_with(&format!("[notice]\n{passed}\nFAILED")), "{text}");
}

/// A passing test may run the line that is wrong, and not look at what it did.
#[test]
fn a_line_that_speaks_of_the_failure_is_shown_though_passing_tests_ran_it() {
    let tests = "(defpackage :demo-tests (:use :cl :sb-rt :demo))\n(in-package :demo-tests)\n\
                 (deftest both (list (title \"s\") (title 'foo)) (\"some text\" \"some name\"))\n\
                 (deftest one (stringp (title 'bar)) t)\n";
    let project = Project::new("speaks", "\"sb-rt\"", "(symbol-call :sb-rt :do-tests)", tests);
    project.write(
        "src/demo.lisp",
        "(defpackage :demo (:use :cl) (:export #:title))\n(in-package :demo)\n\n\
         (defun title (x)\n  (cond\n    ((stringp x)\n     (concatenate 'string \"some\" \" text\"))\n    \
         (t\n     (concatenate 'string \"wrong\" \" name\"))))\n",
    );
    let mut server = project.server();
    let text = good(&mut server, "run-tests", json!({"system": "demo", "suspects": 1}));
    assert!(text.contains("\n   Suspects: TITLE  src/demo.lisp:4  (no passing test ran these lines)\n"), "{text}");
    assert!(text.contains("\n               7: (concatenate 'string \"some\" \" text\"))\n"), "{text}");
    assert!(text.contains("\n               9: (concatenate 'string \"wrong\" \" name\"))))  (1 passing)"), "{text}");
}

#[test]
fn what_ran_only_to_tell_of_a_failure_is_no_suspect() {
    let tests = "(defpackage :demo-tests (:use :cl :fiveam :demo))\n(in-package :demo-tests)\n\
                 (def-suite demo)\n(in-suite demo)\n\
                 (test small (is (= 1 (demo::n (make-item 1)))))\n\
                 (test large (is (eql 7 (make-item 7))))\n\
                 (test text (is (string= \"nothing\" (princ-to-string (make-item 0)))))\n\
                 (test report (is (search \"even\" (handler-case (check-item (make-item 2))\n\
                                                    (error (condition) (princ-to-string condition))))))\n\
                 (test broken (check-item (make-item 4)))\n\
                 (test handled (is (eq :handled (handler-case (check-item (make-item 6)) (error () :odd)))))\n";
    let Some(project) = fiveam("told", tests) else { return };
    let source = "(defpackage :demo (:use :cl) (:export #:make-item #:check-item))\n(in-package :demo)\n\n\
                  (defclass item () ((n :initarg :n :reader n)))\n\n\
                  (define-condition odd-item (error)\n  ((item :initarg :item :reader item))\n  \
                  (:report (lambda (condition stream)\n             (format stream \"odd: ~A\" (item condition)))))\n\n\
                  (defmethod print-object ((item item) stream)\n  (if (plusp (n item))\n      \
                  (format stream \"item ~D\" (n item))\n      (write-string \"empty\" stream)))\n\n\
                  (defun make-item (n)\n  (make-instance 'item :n n))\n\n\
                  (defun check-item (item)\n  (when (evenp (n item))\n    (error 'odd-item :item item)))\n";
    project.write("src/demo.lisp", source);
    let mut server = Server::start_with(&["--structured-content"]);
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
    // FiveAM printed what came, or the condition; and we printed the frames of what was signalled.
    for (name, expected) in [("LARGE", "MAKE-ITEM"), ("BROKEN", "CHECK-ITEM"), ("HANDLED", "CHECK-ITEM")] {
        let found = suspects(name);
        assert!(found.iter().any(|name| name.contains(expected)), "{name}: {found:?}");
        assert!(
            !found.iter().any(|name| name.contains("PRINT-OBJECT") || name.contains("ODD-ITEM")),
            "{name}: {found:?}"
        );
    }
    // These tests are of what is printed.
    for (name, parts) in [("TEXT", &["PRINT-OBJECT"][..]), ("REPORT", &["ODD-ITEM", "PRINT-OBJECT"])] {
        let found = suspects(name);
        assert!(parts.iter().all(|part| found.iter().any(|name| name.contains(part))), "{name}: {found:?}");
    }
}

/// The last line of what a program of bare SBCL's prints; `None` where there is none to ask.
fn by_bare_sbcl(program: &str) -> Option<String> {
    let recipe = sbcl_core::Recipe::in_checkout(Path::new(env!("CARGO_MANIFEST_DIR")));
    let bare = recipe.build().expect("what the binary was built with is there").bare?;
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
fn real_suites_come_to_what_the_framework_itself_says() {
    // sb-rt, run twice by the test-op, without and with compilation.
    if installed("alexandria") {
        let mut server = Server::ready();
        let text = good(&mut server, "run-tests", json!({"system": "alexandria"}));
        let verdict = text.lines().next().unwrap_or_default();
        let program = "(progn (asdf:load-system \"alexandria-tests\")
                         (let ((count (length (rest (symbol-value (find-symbol \"*ENTRIES*\" :sb-rt)))))
                               (failed (nth-value 2 (let ((*standard-output* (make-broadcast-stream)))
                                                      (uiop:symbol-call :sb-rt :do-tests)))))
                           (format t \"~&=> all pass  ~D passed, ~D failed~%\" (* 2 (- count (length failed)))
                                   (* 2 (length failed)))))";
        if let Some(bare) = by_bare_sbcl(program) {
            assert!(verdict.starts_with(&bare), "{verdict} is not {bare}");
        }
    }
    if installed("esrap") && installed("fiveam") {
        let mut server = Server::ready();
        let text = good(&mut server, "run-tests", json!({"system": "esrap"}));
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
        if let Some(bare) = by_bare_sbcl(program) {
            assert!(verdict.starts_with(&bare), "{verdict} is not {bare}");
        }
    }
}

/// Tests that end in a framework of its own accord, with the verdict of each in bare SBCL.
#[test]
fn other_frameworks_verdicts_are_those_in_bare_sbcl() {
    let Some(root) = libraries() else { return };
    let registry =
        format!("(asdf:initialize-source-registry '(:source-registry (:tree {root:?}) :inherit-configuration))");
    // A list of the names of all tests, and one of those that fail, as the framework's own functions say.
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
    for (dialect, verdicts) in DIALECTS.iter().zip(verdicts) {
        let name = dialect.framework;
        // Those that hang or are ended are for run-tests alone.
        let (ending, rest) = dialect.tests.split_at(dialect.tests.find("hangs").expect("one that hangs"));
        let ending = &ending[..ending.rfind('(').expect("its form")];
        let later = rest.find("later").map_or("", |at| &rest[rest[..at].rfind('(').expect("its form")..]);
        let project =
            Project::new(&format!("bare-{name}"), &format!("{name:?}"), dialect.perform, &format!("{ending}{later}"));
        let mut server = Server::start_with(&["--structured-content"]);
        server.initialize("2025-11-25");
        server.evaluate(&format!("(progn {registry} t)"));
        project.register(&mut server);
        good(&mut server, "load", json!({"system": "demo/tests", "timeout": 600}));
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
            project.0.join(""),
            verdicts = verdicts.replace('\n', " ")
        );
        if let Some(bare) = by_bare_sbcl(&program) {
            assert_eq!(format!("{}; {}", names(false), names(true)), bare, "{name}: {content:#}");
        }
    }
}
