//! A long session of code that works, fails, prints much and starts threads. At the end the server must hold the
//! resources that it held after the first evaluations. A session of more than a million lines must work, too.
//!
//! `SBCL_MCP_SOAK_EVALUATIONS` sets the number of evaluations.

#![cfg(target_os = "linux")]

use crate::client::Server;
use serde_json::json;

/// The number of evaluations before the first measurement: buffers, caches and the heap have reached their size by
/// then.
const WARM_UP: usize = 1000;
/// Allowed growth of the worker in bytes. SBCL keeps some freed memory, and no two collections are alike.
const WORKER_TOLERANCE: u64 = 24 << 20;
/// Allowed growth of the supervisor in bytes.
const SUPERVISOR_TOLERANCE: u64 = 2 << 20;

/// The resources that a process holds.
#[derive(Debug)]
struct Resources {
    resident: u64,
    threads: u64,
    descriptors: usize,
}

fn resources(pid: u32) -> Resources {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process lives");
    let number = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the line exists");
        line.split_ascii_whitespace().next().expect("a number").parse().expect("a number")
    };
    Resources {
        resident: number("VmRSS:") * 1024,
        threads: number("Threads:"),
        descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process lives").count(),
    }
}

fn worker(server: &Server) -> u32 {
    let pid = server.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("the process lives");
    children.split_ascii_whitespace().next().expect("a worker").parse().expect("a number")
}

/// Collects garbage and measures supervisor and worker.
fn measure(server: &mut Server) -> [Resources; 2] {
    assert_eq!(server.evaluate("(progn (sb-ext:gc :full t) (sb-ext:gc :full t) 1)"), "=> 1");
    [resources(server.pid()), resources(worker(server))]
}

/// Returns the code of evaluation `n`, the text that its answer must contain, and whether it fails.
fn evaluation(n: usize) -> (String, String, bool) {
    match n % 20 {
        0 => ("(defun g (x) (* x 2)) (g 21)".to_owned(), "=> 42".to_owned(), false),
        1 => ("(/ 1 0)".to_owned(), "[ERROR] DIVISION-BY-ZERO".to_owned(), true),
        2 => (format!("(progn (format t \"line ~d~%\" {n}) {n})"), format!("[stdout]\nline {n}\n\n=> {n}"), false),
        3 => ("(nonexistent 1)".to_owned(), "[ERROR] UNDEFINED-FUNCTION".to_owned(), true),
        4 => ("(warn \"careful\")".to_owned(), "SIMPLE-WARNING: careful".to_owned(), false),
        5 => ("(list 1 2".to_owned(), "[ERROR] END-OF-FILE".to_owned(), true),
        6 => (
            "(dotimes (i 500) (write-line \"some output that is not short\"))".to_owned(),
            "some output".to_owned(),
            false,
        ),
        7 => ("(defparameter *v* (make-list 1000))".to_owned(), "=> *V*".to_owned(), false),
        8 => ("(handler-case (error \"x\") (error (c) (princ-to-string c)))".to_owned(), "=> \"x\"".to_owned(), false),
        9 => (
            "(sb-thread:join-thread (sb-thread:make-thread (lambda () (princ 1) 2)))".to_owned(),
            "=> 2".to_owned(),
            false,
        ),
        10 => ("(defclass point () ((x :initarg :x)))".to_owned(), "POINT".to_owned(), false),
        11 => ("(make-instance 'point :x 1)".to_owned(), "POINT".to_owned(), false),
        12 => ("(make-string 200000 :initial-element #\\y)".to_owned(), "characters omitted]".to_owned(), false),
        13 => (
            "(labels ((r (n) (if (zerop n) (error \"deep\") (+ 1 (r (1- n)))))) (r 300))".to_owned(),
            "deep".to_owned(),
            true,
        ),
        14 => ("(with-output-to-string (s) (print (list 1 2) s))".to_owned(), "(1 2)".to_owned(), false),
        15 => ("(funcall (compile nil '(lambda (x) (+ x 1))) 2)".to_owned(), "=> 3".to_owned(), false),
        16 => ("(with-open-file (s \"/dev/null\") (read-line s nil :end))".to_owned(), "=> :END".to_owned(), false),
        17 => ("(exit)".to_owned(), "[ERROR] SBCL-HOST::EXIT-REFUSED".to_owned(), true),
        18 => ("(break)".to_owned(), "[ERROR] SIMPLE-CONDITION".to_owned(), true),
        _ => (format!("(+ {n} 1)"), format!("=> {}", n + 1), false),
    }
}

fn evaluate_range(server: &mut Server, range: std::ops::Range<usize>) {
    for n in range {
        let (code, expected, fails) = evaluation(n);
        let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code}));
        assert_eq!(is_error, fails, "{code}: {text}");
        assert!(text.contains(&expected), "{code}: {text}");
        if fails {
            let described = server.call_tool("describe-last-error", json!({})).0;
            assert!(described.starts_with("Error: "), "{described}");
        }
        // In a long run, the transcript would fill the client's memory.
        server.transcript.clear();
    }
}

#[test]
fn thousands_of_evaluations_leak_no_memory_threads_or_descriptors() {
    let evaluations = match std::env::var("SBCL_MCP_SOAK_EVALUATIONS") {
        Ok(text) => text.parse().expect("SBCL_MCP_SOAK_EVALUATIONS is a number"),
        Err(_) => 2000,
    };
    assert!(evaluations > WARM_UP, "at least {}", WARM_UP + 1);
    let mut server = Server::ready();
    server.evaluate("(defun earlier () 7)");
    evaluate_range(&mut server, 0..WARM_UP);
    let before = measure(&mut server);
    evaluate_range(&mut server, WARM_UP..evaluations);
    let after = measure(&mut server);
    let tolerances = [SUPERVISOR_TOLERANCE, WORKER_TOLERANCE];
    for ((before, after), tolerance) in before.iter().zip(&after).zip(tolerances) {
        assert!(after.resident <= before.resident + tolerance, "{before:?} became {after:?}");
        assert_eq!(after.threads, before.threads, "{before:?} became {after:?}");
        assert_eq!(after.descriptors, before.descriptors, "{before:?} became {after:?}");
    }
    println!("{evaluations} evaluations: {before:?} became {after:?}");
    assert_eq!(server.evaluate("(earlier)"), "=> 7");
    server.assert_works();
    assert!(server.finish().status.success());
}

#[test]
fn replaced_methods_are_collected_as_garbage() {
    let mut server = Server::ready();
    server.evaluate("(defgeneric m (x)) (defvar *methods* nil)");
    server.evaluate(
        "(dotimes (i 100)
           (eval `(defmethod m ((x string)) ,i))
           (push (sb-ext:make-weak-pointer (find-method #'m '() (list (find-class 'string)))) *methods*))",
    );
    let text = server.evaluate("(progn (sb-ext:gc :full t) (< (count-if #'sb-ext:weak-pointer-value *methods*) 50))");
    assert_eq!(text, "=> T");
}

/// Each line has a number, from which the numbers of its call's jobs are computed.
#[test]
fn evaluations_run_after_a_million_lines() {
    const LINES: usize = 1 << 20;
    const LINES_AT_ONCE: usize = 1 << 16;
    let mut server = Server::ready();
    let lines = "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/unknown\"}\n".repeat(LINES_AT_ONCE);
    for _ in 0..LINES / LINES_AT_ONCE {
        server.send_raw(lines.as_bytes());
        server.request("ping", json!({}));
    }
    assert_eq!(server.evaluate("(+ 1 2)"), "=> 3");
    let (text, is_error) =
        server.call_tool("evaluate-lisp", json!({"code": "(handler-case (error \"x\") (error () 4))"}));
    assert!(!is_error && text == "=> 4", "{text}");
}
