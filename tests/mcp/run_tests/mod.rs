//! The run-tests tool: test frameworks, reports of failures, tests that hang, exit or end threads, and the error state.

mod frameworks;
mod fresh;
mod suspects;
mod verdicts;

use std::path::Path;

use crate::client::{Scratch, Server, abort_newest, call_err, call_ok, last_error};
use crate::libraries::{self, installed};
use crate::processes::{descendants, processes, wait_until};
use serde_json::{Value, json};

/// Starts and initializes a server with the installed libraries.
fn ready() -> Server {
    let mut server = libraries::start_with(&[]);
    server.initialize("2025-06-18");
    server
}

/// A directory with a system `demo` and a system of its tests, `demo/tests`.
struct Project {
    directory: Scratch,
}

impl Project {
    /// Writes the systems: `tests` depend on `framework`, and the form `perform` runs them.
    fn new(framework: &str, perform: &str, tests: &str) -> Self {
        let project = Self { directory: Scratch::below_target() };
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
        self.directory.write(file, text);
    }

    /// Starts a server in the project's directory that finds the systems.
    fn server(&self) -> Server {
        let mut server = libraries::start_in(&self.directory, &[]);
        server.initialize("2025-06-18");
        self.register(&mut server);
        server
    }

    fn register(&self, server: &mut Server) {
        server.evaluate(&format!("(progn (push #p{:?} asdf:*central-registry*) t)", self.directory.join("")));
    }
}

/// Returns the text without the time in its first line.
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

fn fiveam(tests: &str) -> Option<Project> {
    let run = "(symbol-call :fiveam :run! (find-symbol \"DEMO\" \"DEMO-TESTS\"))";
    installed("fiveam").then(|| Project::new("\"fiveam\"", run, tests))
}

/// Returns the directory of the libraries that no package registry has, or `None` if it is not set (CONTRIBUTING.md).
fn libraries() -> Option<String> {
    let root = std::env::var("SBCL_MCP_LISP_LIBRARIES").ok();
    if root.is_none() {
        eprintln!("SBCL_MCP_LISP_LIBRARIES is not set: Parachute, Rove and lisp-unit2 are left out");
    }
    root
}
