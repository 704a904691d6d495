//! Every tool in every state of a session: its answer equals that in a quiet session, or the contract defines another
//! one.

use std::path::PathBuf;

use crate::client::{Scratch, Server, abort_newest, call_err, call_ok};
use serde_json::{Value, json};

/// Definitions of each session. `(fail 1)` makes the last error. The test that fails returns a string, because sb-rt
/// prints the value with the user's printer settings and a string always prints alike.
const DEFINITIONS: &str = "
    (require :sb-rt)
    (defun fail (n) (declare (optimize debug)) (let ((half (/ n 2))) (error \"~A of ~S\" half (list n :of \"it\"))))
    (defun caller (list) (declare (notinline fail)) (if list (fail (first list)) (values)))
    (defvar *counter* 12)
    (defmacro twice (form) `(progn ,form ,form))
    (defstruct point (x 10) (y '(1 (2 (3)))))
    (sb-rt:deftest passes (list 10 (quote symbol)) (10 symbol))
    (sb-rt:deftest differs (first (list \"other\")) \"this\")";

/// A tool's relation to evaluations, which determines in which states its answer differs.
#[derive(Clone, Copy, PartialEq)]
enum Effect {
    /// The answer is the same in every state.
    Inspects,
    /// The tool releases a held evaluation and reports that in `[notice]`.
    Evaluates,
    /// The tool acts on a held evaluation, with this answer. In other states no evaluation is held.
    Debugs(&'static str),
}
use Effect::{Debugs, Evaluates, Inspects};

/// A tool call whose answer does not depend on the user's printer settings.
struct ToolCall {
    tool: &'static str,
    arguments: Value,
    kind: Effect,
}

/// A file to load.
struct SourceFile(PathBuf, #[expect(dead_code, reason = "removes the file when it is dropped")] Scratch);

impl SourceFile {
    fn new() -> Self {
        let scratch = Scratch::below_target();
        let text = "(in-package :cl-user)\n(defun loaded (x) (car x))\n(defun other () (loaded 'x))\n";
        Self(scratch.write("states.lisp", text), scratch)
    }
}

/// Returns the calls in the order in which each state makes them; the one that forgets everything comes last.
fn calls(file: &SourceFile) -> Vec<ToolCall> {
    let entry = |tool, kind, arguments| ToolCall { tool, arguments, kind };
    vec![
        entry("describe-last-error", Inspects, json!({})),
        entry("get-backtrace", Inspects, json!({"locals": true, "max-frames": 3})),
        entry("describe-last-error", Inspects, json!({"list": 1})),
        entry("describe-symbol", Inspects, json!({"name": "*counter*"})),
        entry("describe-symbol", Inspects, json!({"name": "point"})),
        entry("describe-symbol", Inspects, json!({"name": "fail", "source": true})),
        entry("find-symbols", Inspects, json!({"query": "with-open-*"})),
        entry("find-references", Inspects, json!({"name": "fail"})),
        entry("macroexpand", Inspects, json!({"form": "(twice (print 'a))", "depth": "all"})),
        entry("list-definitions", Inspects, json!({})),
        entry("configure-limits", Inspects, json!({})),
        entry("checkpoint", Inspects, json!({})),
        entry("check-evaluation", Inspects, json!({"part": "output"})),
        entry("eval-in-frame", Debugs("; No values"), json!({"frame": 1, "code": "(values)"})),
        entry("resume-from-frame", Debugs("; No values"), json!({"frame": 1, "return": "(values)"})),
        entry("resume-from-frame", Debugs("[ERROR] SIMPLE-ERROR\n1/2 of (1 :OF \"it\")"), json!({"frame": 1})),
        entry("invoke-restart", Debugs("[ERROR] SIMPLE-ERROR\n1/2 of (1 :OF \"it\")"), json!({"restart": "RETRY"})),
        entry("abort-evaluation", Debugs("Evaluation aborted."), json!({})),
        entry("evaluate-lisp", Evaluates, json!({"code": "(progn (write-string \"out\") (warn \"~A\" 10) (values))"})),
        entry("evaluate-lisp", Evaluates, json!({"code": "(caller '(1))"})),
        entry("load-system", Evaluates, json!({"path": file.0})),
        entry("run-tests", Evaluates, json!({"test-package": "cl-user"})),
        entry("trace-calls", Evaluates, json!({"code": "(caller nil)", "functions": ["caller"]})),
        entry("profile", Evaluates, json!({"code": "(values)"})),
        entry("reset-session", Evaluates, json!({})),
    ]
}

/// Returns the text with each number replaced by `#`: ids, times, addresses.
fn without_numbers(text: &str) -> String {
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

/// Makes a call and returns its normalized answer and whether it is an error.
fn answer(server: &mut Server, call: &ToolCall) -> (String, bool) {
    let (text, is_error) = server.call_tool(call.tool, call.arguments.clone());
    let text = match call.tool {
        // The number of samples varies.
        "profile" => text.split_once("\n\n").map_or(text.clone(), |(_, answer)| answer.to_owned()),
        // There may be older errors after the first line.
        "describe-last-error" if call.arguments["list"].is_number() => {
            text.lines().next().unwrap_or_default().to_owned()
        }
        // For a held evaluation the variables are read again, with the same values.
        "get-backtrace" => text.replacen("Backtrace (live) for ", "Backtrace for ", 1),
        _ => text,
    };
    (without_numbers(&text), is_error)
}

fn ready() -> Server {
    let mut server = Server::ready();
    define(&mut server);
    server
}

fn define(server: &mut Server) {
    call_ok(server, "evaluate-lisp", json!({"code": format!("{DEFINITIONS} (values)")}));
}

/// Evaluates code that fails: the error becomes the last one, or is held.
fn make_error(server: &mut Server, on_error: &str) {
    let text =
        call_err(server, "evaluate-lisp", json!({"code": "(write-string \"before\") (fail 1)", "on-error": on_error}));
    assert!(text.contains("1/2 of (1 :OF \"it\")"), "{text}");
}

/// Returns the answer to each call in a quiet session.
fn quiet_answers(calls: &[ToolCall]) -> Vec<(String, bool)> {
    let mut server = ready();
    calls
        .iter()
        .map(|call| {
            make_error(&mut server, "abort");
            answer(&mut server, call)
        })
        .collect()
}

/// Asserts that each call has its answer of a quiet session in another state.
#[track_caller]
fn assert_answers_as_quiet(calls: &[ToolCall], quiet_answers: &[(String, bool)], state: &str, server: &mut Server) {
    for (call, expected) in calls.iter().zip(quiet_answers) {
        make_error(server, "abort");
        let found = answer(server, call);
        let as_known = if call.tool == "reset-session" {
            // A reset first reports what it has ended.
            !found.1 && found.0.ends_with(&expected.0)
        } else {
            found == *expected
        };
        assert!(
            as_known,
            "{state}: {} {}\n--- answers ({})\n{}\n--- not ({})\n{}",
            call.tool, call.arguments, found.1, found.0, expected.1, expected.0
        );
    }
}

#[test]
fn every_tool_is_covered_by_the_state_table() {
    let file = SourceFile::new();
    let mut server = Server::ready();
    let answer = server.request("tools/list", json!({}));
    let mut tools: Vec<_> = answer["result"]["tools"]
        .as_array()
        .expect("tools")
        .iter()
        .map(|tool| tool["name"].as_str().expect("a name").to_owned())
        .collect();
    let mut known: Vec<_> = calls(&file).iter().map(|call| call.tool.to_owned()).collect();
    known.sort();
    known.dedup();
    tools.sort();
    assert_eq!(known, tools);
}

#[test]
fn tools_answer_the_same_after_reset_and_image_loss() {
    let file = SourceFile::new();
    let calls = calls(&file);
    let quiet_answers = quiet_answers(&calls);
    let mut server = ready();
    call_ok(&mut server, "reset-session", json!({}));
    define(&mut server);
    assert_answers_as_quiet(&calls, &quiet_answers, "after a reset", &mut server);
    // The last call was a reset.
    define(&mut server);
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": "(sb-posix:kill (sb-posix:getpid) 9)"}));
    assert!(text.contains("IMAGE-LOST"), "{text}");
    // Definitions are restored automatically, but assigned values, such as the tests of sb-rt, are not.
    define(&mut server);
    assert_answers_as_quiet(&calls, &quiet_answers, "after IMAGE-LOST", &mut server);
}

#[test]
fn tools_answer_the_same_while_evaluations_run() {
    let file = SourceFile::new();
    let calls = calls(&file);
    let quiet_answers = quiet_answers(&calls);
    let mut server = ready();
    // First two background evaluations, then inspections during a foreground evaluation.
    for _ in 0..2 {
        call_ok(&mut server, "evaluate-lisp", json!({"code": "(loop (sleep 0.01))", "background": true}));
    }
    assert_answers_as_quiet(&calls, &quiet_answers, "while others run", &mut server);
    define(&mut server);
    make_error(&mut server, "abort");
    let id = server.post_running("", "(loop (sleep 0.01))", 600.0);
    // check-evaluation would report the running evaluation, the newest one.
    let asked = |call: &ToolCall| call.kind == Inspects && call.tool != "check-evaluation";
    for (call, expected) in calls.iter().zip(&quiet_answers).filter(|(call, _)| asked(call)) {
        assert_eq!(answer(&mut server, call), *expected, "{} while another one runs", call.tool);
    }
    let text = call_ok(&mut server, "check-evaluation", json!({}));
    assert!(text.contains(": running for "), "{text}");
    abort_newest(&mut server);
    server.outcome(id);
}

#[test]
fn tools_answer_the_same_under_any_printer_and_reader_settings() {
    let file = SourceFile::new();
    let calls = calls(&file);
    let quiet_answers = quiet_answers(&calls);
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
        call_ok(&mut server, "evaluate-lisp", json!({"code": format!("(progn {code} (values))")}));
        assert_answers_as_quiet(&calls, &quiet_answers, state, &mut server);
    }
}

#[test]
fn each_tool_keeps_uses_or_releases_a_held_evaluation() {
    let file = SourceFile::new();
    let calls = calls(&file);
    let quiet_answers = quiet_answers(&calls);
    let mut server = ready();
    for (call, expected) in calls.iter().zip(&quiet_answers) {
        make_error(&mut server, "debug");
        let (text, is_error) = answer(&mut server, call);
        let context = format!("{} {}\n--- answers\n{text}\n--- not\n{}", call.tool, call.arguments, expected.0);
        match call.kind {
            Inspects => assert_eq!((&text, is_error), (&expected.0, expected.1), "{context}"),
            Evaluates => {
                // The traced calls precede the answer of the code and hence `[notice]`.
                let (seen, answered) =
                    expected.0.split_once("\n\n").filter(|_| call.tool == "trace-calls").unwrap_or(("", &expected.0));
                let released = "[notice]\nThe evaluation held for debugging was ended.\n";
                assert!(text.starts_with(seen) && text.contains(released) && text.ends_with(answered), "{context}");
                assert_eq!(is_error, expected.1, "{context}");
            }
            Debugs(held_answer) => assert!(text.contains(&without_numbers(held_answer)) && expected.1, "{context}"),
        }
        server.call_tool("abort-evaluation", json!({}));
    }
}
