//! Every tool of the server in every state that a session may be in: its answer is that of a quiet session, or what the
//! contract says instead.

use std::path::PathBuf;

use crate::client::{Scratch, Server, abort_newest, bad, good};
use serde_json::{Value, json};

/// What every session has here; the last error is that of `(fail 1)`. sb-rt itself prints a test that failed with the value
/// that came, as the user would have it: a string is always the same.
const DEFINITIONS: &str = "
    (require :sb-rt)
    (defun fail (n) (declare (optimize debug)) (let ((half (/ n 2))) (error \"~A of ~S\" half (list n :of \"it\"))))
    (defun caller (list) (declare (notinline fail)) (if list (fail (first list)) (values)))
    (defvar *counter* 12)
    (defmacro twice (form) `(progn ,form ,form))
    (defstruct point (x 10) (y '(1 (2 (3)))))
    (sb-rt:deftest passes (list 10 (quote symbol)) (10 symbol))
    (sb-rt:deftest differs (first (list \"other\")) \"this\")";

/// When a tool answers otherwise than in a quiet session.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Never.
    Inspects,
    /// What is held is released, and `[notice]` says so.
    Evaluates,
    /// It works on what is held, which it answers with this. In all other states there is nothing.
    Debugs(&'static str),
}
use Kind::{Debugs, Evaluates, Inspects};

/// A call of a tool whose answer does not depend on how the user has values printed.
struct Row {
    tool: &'static str,
    arguments: Value,
    kind: Kind,
}

/// A file to load.
struct File(PathBuf, #[expect(dead_code, reason = "removes the file when it is dropped")] Scratch);

impl File {
    fn new() -> Self {
        let scratch = Scratch::below_target();
        let text = "(in-package :cl-user)\n(defun loaded (x) (car x))\n(defun other () (loaded 'x))\n";
        Self(scratch.write("states.lisp", text), scratch)
    }
}

/// In the order in which they are called in each state: the one that forgets everything comes last.
fn rows(file: &File) -> Vec<Row> {
    let row = |tool, kind, arguments| Row { tool, arguments, kind };
    vec![
        row("describe-last-error", Inspects, json!({})),
        row("get-backtrace", Inspects, json!({"locals": true, "max-frames": 3})),
        row("describe-last-error", Inspects, json!({"list": 1})),
        row("describe-symbol", Inspects, json!({"name": "*counter*"})),
        row("describe-symbol", Inspects, json!({"name": "point"})),
        row("describe-symbol", Inspects, json!({"name": "fail", "source": true})),
        row("find-symbols", Inspects, json!({"query": "with-open-*"})),
        row("find-references", Inspects, json!({"name": "fail"})),
        row("macroexpand", Inspects, json!({"form": "(twice (print 'a))", "depth": "all"})),
        row("list-definitions", Inspects, json!({})),
        row("configure-limits", Inspects, json!({})),
        row("checkpoint", Inspects, json!({})),
        row("check-evaluation", Inspects, json!({"part": "output"})),
        row("eval-in-frame", Debugs("; No values"), json!({"frame": 1, "code": "(values)"})),
        row("resume-from-frame", Debugs("; No values"), json!({"frame": 1, "return": "(values)"})),
        row("resume-from-frame", Debugs("[ERROR] SIMPLE-ERROR\n1/2 of (1 :OF \"it\")"), json!({"frame": 1})),
        row("invoke-restart", Debugs("[ERROR] SIMPLE-ERROR\n1/2 of (1 :OF \"it\")"), json!({"restart": "RETRY"})),
        row("abort-evaluation", Debugs("Evaluation aborted."), json!({})),
        row("evaluate-lisp", Evaluates, json!({"code": "(progn (write-string \"out\") (warn \"~A\" 10) (values))"})),
        row("evaluate-lisp", Evaluates, json!({"code": "(caller '(1))"})),
        row("load-system", Evaluates, json!({"path": file.0})),
        row("run-tests", Evaluates, json!({"test-package": "cl-user"})),
        row("trace-calls", Evaluates, json!({"code": "(caller nil)", "functions": ["caller"]})),
        row("profile", Evaluates, json!({"code": "(values)"})),
        row("reset-session", Evaluates, json!({})),
    ]
}

/// The text with numbers as `#`: identifiers, times, addresses.
fn numberless(text: &str) -> String {
    let mut result = String::new();
    for character in text.chars() {
        match character {
            '0'..='9' if result.ends_with('#') => {}
            '0'..='9' => result.push('#'),
            other => result.push(other),
        }
    }
    result
}

/// What a call answers, and whether it is an error.
fn answer(server: &mut Server, row: &Row) -> (String, bool) {
    let (text, is_error) = server.call_tool(row.tool, row.arguments.clone());
    let text = match row.tool {
        // How many samples there are is chance.
        "profile" => text.split_once("\n\n").map_or(text.clone(), |(_, answer)| answer.to_owned()),
        // There may be older ones.
        "describe-last-error" if row.arguments["list"].is_number() => {
            text.lines().next().unwrap_or_default().to_owned()
        }
        // While one is held its variables are read again: they have not changed.
        "get-backtrace" => text.replacen("Backtrace (live) for ", "Backtrace for ", 1),
        _ => text,
    };
    (numberless(&text), is_error)
}

fn ready() -> Server {
    let mut server = Server::ready();
    define(&mut server);
    server
}

fn define(server: &mut Server) {
    good(server, "evaluate-lisp", json!({"code": format!("{DEFINITIONS} (values)")}));
}

/// Makes an error the last one, or has one be held.
fn fail(server: &mut Server, on_error: &str) {
    let text =
        bad(server, "evaluate-lisp", json!({"code": "(write-string \"before\") (fail 1)", "on-error": on_error}));
    assert!(text.contains("1/2 of (1 :OF \"it\")"), "{text}");
}

/// What every call answers in a quiet session.
fn quiet(rows: &[Row]) -> Vec<(String, bool)> {
    let mut server = ready();
    rows.iter()
        .map(|row| {
            fail(&mut server, "abort");
            answer(&mut server, row)
        })
        .collect()
}

/// Every call answers so, after this was made of a session.
#[track_caller]
fn all_as_when_quiet(rows: &[Row], quiet: &[(String, bool)], state: &str, server: &mut Server) {
    for (row, quiet) in rows.iter().zip(quiet) {
        fail(server, "abort");
        let found = answer(server, row);
        let as_known = if row.tool == "reset-session" {
            // What it has ended is said before.
            !found.1 && found.0.ends_with(&quiet.0)
        } else {
            found == *quiet
        };
        assert!(
            as_known,
            "{state}: {} {}\n--- answers ({})\n{}\n--- not ({})\n{}",
            row.tool, row.arguments, found.1, found.0, quiet.1, quiet.0
        );
    }
}

#[test]
fn every_tool_is_covered_by_the_state_table() {
    let file = File::new();
    let mut server = Server::ready();
    let answer = server.request("tools/list", json!({}));
    let mut tools: Vec<_> = answer["result"]["tools"]
        .as_array()
        .expect("tools")
        .iter()
        .map(|tool| tool["name"].as_str().expect("a name").to_owned())
        .collect();
    let mut known: Vec<_> = rows(&file).iter().map(|row| row.tool.to_owned()).collect();
    known.sort();
    known.dedup();
    tools.sort();
    assert_eq!(known, tools);
}

#[test]
fn tools_answer_the_same_after_reset_and_image_loss() {
    let file = File::new();
    let rows = rows(&file);
    let quiet = quiet(&rows);
    let mut server = ready();
    good(&mut server, "reset-session", json!({}));
    define(&mut server);
    all_as_when_quiet(&rows, &quiet, "after a reset", &mut server);
    // That was the last row.
    define(&mut server);
    let text = bad(&mut server, "evaluate-lisp", json!({"code": "(sb-posix:kill (sb-posix:getpid) 9)"}));
    assert!(text.contains("IMAGE-LOST"), "{text}");
    // What is defined comes back of itself; values, as tests of sb-rt's are, do not.
    define(&mut server);
    all_as_when_quiet(&rows, &quiet, "after IMAGE-LOST", &mut server);
}

#[test]
fn tools_answer_the_same_while_evaluations_run() {
    let file = File::new();
    let rows = rows(&file);
    let quiet = quiet(&rows);
    let mut server = ready();
    // Two in the background, and then inspections while another one is in the foreground.
    for _ in 0..2 {
        good(&mut server, "evaluate-lisp", json!({"code": "(loop (sleep 0.01))", "background": true}));
    }
    all_as_when_quiet(&rows, &quiet, "while others run", &mut server);
    define(&mut server);
    fail(&mut server, "abort");
    let id = server.post_running("", "(loop (sleep 0.01))", 600.0);
    // The newest evaluation is that one now.
    let asked = |row: &Row| row.kind == Inspects && row.tool != "check-evaluation";
    for (row, quiet) in rows.iter().zip(&quiet).filter(|(row, _)| asked(row)) {
        assert_eq!(answer(&mut server, row), *quiet, "{} while another one runs", row.tool);
    }
    let text = good(&mut server, "check-evaluation", json!({}));
    assert!(text.contains(": running for "), "{text}");
    abort_newest(&mut server);
    server.outcome(id);
}

#[test]
fn tools_answer_the_same_under_any_printer_and_reader_settings() {
    let file = File::new();
    let rows = rows(&file);
    let quiet = quiet(&rows);
    let nonsense = [
        (
            "a deleted *package*",
            "(let ((gone (make-package \"GONE\" :use '(:cl)))) (setf *package* gone) (delete-package gone))",
        ),
        (
            "no length",
            "(setf *print-length* 0 *print-level* 0 *print-lines* 0 *print-right-margin* 1 *print-miser-width* 99)",
        ),
        ("another base", "(setf *print-base* 36 *print-radix* t)"),
        ("readably", "(setf *print-readably* t)"),
        ("readers", "(setf *read-base* 2 *read-default-float-format* 'long-float *read-eval* nil)"),
        (
            "a broken dispatch table",
            "(let ((table (copy-pprint-dispatch)))
               (set-pprint-dispatch '(or number structure-object)
                                    (lambda (stream object) (error \"no ~A ~A\" stream object)) 100 table)
               (setf *print-pprint-dispatch* table *print-pretty* t))",
        ),
        (
            "a readtable",
            "(let ((table (copy-readtable nil)))
               (setf (readtable-case table) :invert)
               (dolist (character '(#\\| #\\` #\\, #\\:)) (set-syntax-from-char character #\\a table))
               (setf *readtable* table))",
        ),
        (
            "cases",
            "(setf *print-case* :capitalize *print-escape* nil *print-circle* t *print-array* nil *print-gensym* nil)",
        ),
    ];
    let all: Vec<_> = nonsense.iter().map(|(_, code)| *code).collect();
    let all = all.join("\n");
    for (state, code) in nonsense.into_iter().chain([("all of that", &*all)]) {
        let mut server = ready();
        good(&mut server, "evaluate-lisp", json!({"code": format!("(progn {code} (values))")}));
        all_as_when_quiet(&rows, &quiet, state, &mut server);
    }
}

#[test]
fn each_tool_keeps_uses_or_releases_a_held_evaluation() {
    let file = File::new();
    let rows = rows(&file);
    let quiet = quiet(&rows);
    let mut server = ready();
    for (row, quiet) in rows.iter().zip(&quiet) {
        fail(&mut server, "debug");
        let (text, is_error) = answer(&mut server, row);
        let context = format!("{} {}\n--- answers\n{text}\n--- not\n{}", row.tool, row.arguments, quiet.0);
        match row.kind {
            Inspects => assert_eq!((&text, is_error), (&quiet.0, quiet.1), "{context}"),
            Evaluates => {
                // What was seen of calls comes before the code's own answer, and so before `[notice]`.
                let (seen, answered) =
                    quiet.0.split_once("\n\n").filter(|_| row.tool == "trace-calls").unwrap_or(("", &quiet.0));
                let released = "[notice]\nThe evaluation that was held for debugging has been released.\n";
                assert!(text.starts_with(seen) && text.contains(released) && text.ends_with(answered), "{context}");
                assert_eq!(is_error, quiet.1, "{context}");
            }
            Debugs(expected) => assert!(text.contains(&numberless(expected)) && quiet.1, "{context}"),
        }
        server.call_tool("abort-evaluation", json!({}));
    }
}
